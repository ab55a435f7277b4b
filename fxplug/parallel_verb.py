"""The verb `fxplug parallel`: the plan of a model, checked on pretended and on real processes, and what it will cost."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import SpecError, did_you_mean, shown
from .rules import WAYS
from .verbs import Allow, Debug, Set, Subject, load_saved, progress, read_config

if TYPE_CHECKING:
    from .config import Config
    from .module import TracedModule


def parallel(
    subject: Subject,
    ways: Annotated[
        str, typer.Option("--ways", metavar="AXIS=N,...", help=f"Processes along each axis: {', '.join(WAYS)}.")
    ] = "",
    plan_only: Annotated[
        bool, typer.Option("--plan-only", help="Find and print the plan, on the meta device where that can be.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Compare every value on pretended and on real processes with one process.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", help="The folder to save the parallel model in.")] = None,
    set: Set = None,
    allow: Allow = None,
    debug: Debug = False,
) -> None:
    """Split a model over processes: print the plan, check it, save the model. Runs under torchrun too."""
    if plan_only and (check or out):
        raise typer.BadParameter("--plan-only has no values: leave out --check and --out")
    given = read_ways(ways)
    module, plan, call, config = _planned(subject, given, plan_only, set, allow)
    print(plan)
    if plan_only:
        return
    from .parallel.running import agree

    if check:
        with progress("check"):
            print(agree(module, *call))
    elif plan is not None:
        with progress("check"):
            print(f"pretended processes differ from one by {plan.check():.1e}")
    if out is not None:
        from .parallel.running import is_first

        if is_first():
            from .artifact import save

            save(module, out, config=config)
        print(f"saved in {out}")


def read_ways(text: str) -> dict[str, int]:
    """`ulysses=2,ring=2` as numbers. Raises SpecError."""
    found: dict[str, int] = {}
    here = f"--ways {shown(text)}: "
    for item in filter(None, text.split(",")):
        axis, _, number = (part.strip() for part in item.partition("="))
        if axis not in WAYS:
            raise SpecError(f"{here}no axis {shown(axis)}{did_you_mean(axis, WAYS)}; there are {', '.join(WAYS)}")
        if axis in found:
            raise SpecError(f"{here}'{axis}' is given twice")
        if not number.isdecimal() or int(number) < 1:
            raise SpecError(f"{here}{axis} must be a whole number, 1 or more, not {shown(number)}")
        found[axis] = int(number)
    return found


def _planned(subject: str, ways: Mapping[str, int], dry: bool, set: list[str] | None, allow: list[str] | None) -> Any:
    """The parallel module, its plan, an example call, and the configuration to save it with."""
    if Path(subject).is_dir():
        return _of_folder(subject, load_saved(subject, set, allow), ways)
    from .config import resolved
    from .flow import rewrite
    from .models import added_inputs, default_inputs

    config = _with(read_config(subject, set), ways)
    if not any(p.parallel for p in config.passes):
        raise SpecError(f"{subject} does not say how: give --ways ulysses=2, or a pass such as sequence_parallel")
    result = rewrite(config, dry_run=dry, verify=False, progress=progress)
    saved = None
    if not dry:
        inputs = {**default_inputs(config, result.base), **added_inputs(config, result.module)[1]}
        saved = {**resolved(config), "inputs": inputs}
    return result.module, result.plan or "one process: all ways are 1", result.inputs, saved


def _of_folder(subject: str, module: TracedModule, ways: Mapping[str, int]) -> Any:
    from .flow import saved_config, saved_inputs
    from .parallel.checking import ways_in
    from .parallel.plan import parallel_plan, parallelize

    call, config = saved_inputs(subject, module), saved_config(subject)
    there = {axis: n for axis, n in ways_in(module).items() if n > 1}
    if there:
        if ways and dict(ways) != there:
            text = ",".join(f"{axis}={n}" for axis, n in there.items())
            raise SpecError(f"'{subject}' is parallel already, with --ways {text}: make another from what it was made of")
        from .parallel.running import described

        return module, described(module, *call), call, config
    if not ways:
        raise SpecError(f"'{subject}' is not parallel: give --ways ulysses=2, for example")
    with progress("plan"):
        settings: dict[str, Any] = dict(ways)
        plan = parallel_plan(module, *call, **settings, check=False)
    config = {**(config or {}), "passes": [*(config or {}).get("passes", []), *passes_of(ways)]}
    return parallelize(module, plan), plan, call, config


def passes_of(ways: Mapping[str, int]) -> list[dict[str, Any]]:
    """The passes that say these ways, as a configuration has them."""
    found: list[dict[str, Any]] = []
    for axis, name in (("batch", "batch_parallel"), ("tensor", "tensor_parallel"), ("rows", "spatial_parallel")):
        if axis in ways:
            found.append({name: {"ways": ways[axis]}})
    if given := {axis: ways[axis] for axis in ("ulysses", "ring") if axis in ways}:
        found.append({"sequence_parallel": given})
    return found


def _with(config: Config, ways: Mapping[str, int]) -> Config:
    """A configuration whose parallel passes are these; as it is without any."""
    from .config import load_config

    if not ways:
        return config
    data = copy.deepcopy(config._source.data)
    items = zip(data.get("passes") or [], config.passes, strict=True)
    data["passes"] = [*(item for item, p in items if not p.parallel), *passes_of(ways)]
    found = load_config(data, base=config.base)
    found._source.file, found._source.lines = config._source.file, config._source.lines
    return found
