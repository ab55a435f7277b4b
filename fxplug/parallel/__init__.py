"""Many devices: a plan found by trying operations on parts, written into the graph as collectives over a device mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.extensions import DistributedPart, Extension

if TYPE_CHECKING:
    from ..core.verifier import Subject

EXTENSION = Extension(
    name="parallel",
    extra="parallel",
    bases=("config",),
    names={
        "fastest_plan": "fxplug.parallel.costs.prediction:fastest_plan",
        "localize": "fxplug.parallel.local_weights:localize",
        "whole_state": "fxplug.parallel.local_weights:whole_state",
        "in_steps": "fxplug.parallel.pipelines.entry:in_steps",
        "pipefusion": "fxplug.parallel.pipelines.entry:pipefusion",
        "stale_sequence": "fxplug.parallel.pipelines.entry:stale_sequence",
        "PipeFusion": "fxplug.parallel.pipelines.pipeline:PipeFusion",
        "Plan": "fxplug.parallel.plan:Plan",
        "parallel_plan": "fxplug.parallel.plan:parallel_plan",
        "parallelize": "fxplug.parallel.plan:parallelize",
    },
    verbs={
        "parallel": "fxplug.parallel.verbs:parallel",
    },
    checks={
        "parallel": "fxplug.parallel:check_ranks",
        "in steps": "fxplug.parallel:check_steps",
    },
    keys={"parallel": "fxplug.parallel.parallel_pass:ParallelPass"},
    blocks=("fxplug.parallel.runtime",),
)


def check_ranks(subject: Subject) -> str | None:
    """Check modules that several processes run together, as a check of `verify`."""
    if not any(isinstance(part, DistributedPart) for part in subject.new.modules()):
        return None
    from .comparison import check_subject

    return check_subject(subject)


def check_steps(subject: Subject) -> str | None:
    """Check modules that run in steps, as a check of `verify`: in one piece and patch by patch, with nothing stale."""
    if not subject.new.meta.get("stepped"):
        return None
    from ..core.verifier import need_values
    from .pipelines.entry import in_steps

    need_values(subject.new, subject.call)
    stepped = in_steps(subject.new, *subject.call, check=False)
    return f"differs by {stepped.check(*subject.call):.1e} in one piece and by patches; {stepped.extra_repr()}"
