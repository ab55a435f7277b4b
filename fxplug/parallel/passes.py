"""Passes of a configuration that split its model over processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config.flow import Result, Step, with_config_lines
from ..core.errors import SpecError
from ..core.ir.traced_module import TracedModule
from ..core.rewriter.matcher import find
from ..core.spec.rules import Match, Pass, Rule
from .pipelines.entry import in_steps, with_steps
from .plan import parallel_plan, parallelize
from .plan_options import STEP_KEYS, WAYS


def apply_parallel_passes(result: Result, passes: Mapping[int, Any], step: Step) -> None:
    """Split a result over processes, as all parallel passes together say: one plan on one mesh, after every other pass.

    `passes` has each `ParallelPass` by its place in the configuration. Sets the result's `module`, and `plan` or `stepped`.
    Raises SpecError for passes that exclude each other.
    """
    config = result.config
    given: dict[str, Any] = {}
    for index, p in passes.items():
        with with_config_lines(config, index):
            for key, value in p.parallel.items():
                if key in WAYS and value == 1 or value is None or value is False:
                    continue
                if key in given:
                    raise SpecError(f"{p.name}: another pass sets '{key}' too, and all passes share one plan: set it once")
                given[key] = value
            if at := given.pop("at", ""):
                if "split" in given:
                    raise SpecError(f"{p.name}: 'at' and 'split' cannot be used together, and all passes share one plan")
                given["split"] = _entered(result.module, p.name, at)
    steps = {key: value for key, value in given.items() if key in STEP_KEYS}
    if steps:
        with step("plan"), with_config_lines(config, *passes):
            name = next(p.name for p in passes.values() if steps.keys() & p.parallel.keys())
            if not steps.keys() & {"stages", "stale"}:
                key = next(iter(steps))
                raise SpecError(f"{name}: '{key}' is only for stale values: set stale: true, or leave it out")
            result.module = with_steps(result.module, name, given)
            result.stepped = in_steps(result.module, *result.inputs, check=False)  # verification does
    elif given.keys() & {*WAYS}:
        with step("plan"), with_config_lines(config, *passes):
            result.plan = parallel_plan(result.module, *result.inputs, **given, check=False)  # verification does
            result.module = parallelize(result.module, result.plan)


def _entered(module: TracedModule, name: str, path: str) -> dict[str, int]:
    """Return the node and dimension at which the rows of a region's first input are split. Raises MatchError for a path that is
    no region."""
    rule = Rule(Match(path=path), place="before", args=["value"], expect="==1")
    (site,) = find(module, Pass(name, [rule]))
    (value,) = site.args
    if value.node is None or len(value.shape) < 3:
        raise SpecError(f"{name}: the first input of '{path}' is not an image or feature map")
    return {value.node.name: len(value.shape) - 2}
