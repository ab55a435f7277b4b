"""Passes that have no rules, and say how a model is split over processes. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..core.errors import SpecError
from ..core.spec.rules import Pass
from ..core.spec.yaml_source import validate
from .plan_options import WAYS, PlanOptions


@dataclass(frozen=True, repr=False)
class ParallelPass(Pass):
    """A pass whose places are found by running the model.

    `parallel` has keywords of `parallel_plan`, or of `pipefusion`; `at` is the region whose first input is split in rows.
    """

    parallel: Mapping[str, Any] = field(default_factory=dict, hash=False)

    made_for_model: ClassVar[bool] = True
    goes_last: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        validate(PlanOptions, self.parallel, "parallel")
        object.__setattr__(self, "parallel", dict(self.parallel))
        if not self.parallel:
            raise SpecError(f"missing the numbers of processes: give one of {', '.join(WAYS)}, or 'stages'", path=("parallel",))
        for key in ("rules", "inputs", "networks", "slots", "lr", "weight_decay", "expect"):
            if getattr(self, key):
                raise SpecError(f"a parallel pass has no '{key}'", path=(key,))

    def for_model(self, module: Any) -> Pass:
        """Raise SpecError: it is applied with others of its kind, after all passes."""
        given = "".join(f", {key}={value!r}" for key, value in self.parallel.items() if value not in (1, None))
        raise SpecError(
            f"{self.name}: a parallel pass is not applied with apply, because the model has to run to find its places: after "
            f"the other passes, call plan = fxplug.parallel_plan(gm, args, kwargs{given}) and fxplug.parallelize(gm, plan)"
        )

    @classmethod
    def finish(cls, result: Any, step: Any) -> None:
        """Split the result of a run over processes, as all its parallel passes say together."""
        from .passes import apply_parallel_passes  # which imports torch

        apply_parallel_passes(result, {i: p for i, p in enumerate(result.config.passes) if isinstance(p, cls)}, step)
