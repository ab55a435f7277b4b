"""The verb `fxplug parallel`: the plan of a model, checked on pretended and on real processes, and what it will cost."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.cli.verbs import Allow, Debug, Set, Subject, load_saved, progress, read_config
from ..core.errors import SpecError, did_you_mean, shown
from ..core.spec.rules import WAYS

AXES = (*WAYS, "stages", "patches")

if TYPE_CHECKING:
    from ..core.ir.traced_module import TracedModule
    from ..core.spec.run_config import Config


def parallel(
    subject: Subject,
    ways: Annotated[
        str,
        typer.Option(
            "--ways",
            metavar="AXIS=N,...",
            help=f"Processes along each axis: {', '.join(AXES)}; auto takes what is predicted to be the fastest.",
        ),
    ] = "",
    plan_only: Annotated[
        bool, typer.Option("--plan-only", help="Find and print the plan, on the meta device where that can be.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Compare every value on simulated and on real processes with one process.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="The folder to save the parallel model in; with --predict the picture.")
    ] = None,
    predict: Annotated[
        str, typer.Option("--predict", metavar="PIXELS,...", help="What each way will cost at these resolutions.")
    ] = "",
    devices: Annotated[
        str, typer.Option("--devices", metavar="N,...", help="With --predict: how many devices; with --ways auto one number.")
    ] = "2,4,8",
    link: Annotated[
        str, typer.Option("--link", help="With these: nvlink, pcie, 100gbe, GB/s, or measured (under torchrun).")
    ] = "nvlink",
    speed: Annotated[float, typer.Option("--speed", help="With these: teraFLOP a second of a device.")] = 300.0,
    at: Annotated[int, typer.Option("--at", help="With --predict: the resolution that the example inputs are for.")] = 0,
    set: Set = None,
    allow: Allow = None,
    debug: Debug = False,
) -> None:
    """Split a model over processes: print the plan, check it, save the model. Runs under torchrun too."""
    if plan_only and (check or out):
        raise typer.BadParameter("--plan-only works without values: leave out --check and --out")
    given = {} if ways.strip() == "auto" else parse_degrees(ways)
    if predict:
        if ways or check or plan_only:
            raise typer.BadParameter("--predict compares all degrees: leave out --ways, --check and --plan-only")
        sizes = _numbers(predict, "--predict"), _numbers(devices, "--devices", 2)
        _predicted(subject, *sizes, link, speed, at, out, set)
        return
    if ways.strip() == "auto":
        given = _fastest(subject, devices, link, speed, set, allow)
    if "patches" in given and "stages" not in given:
        raise SpecError("--ways patches=... needs stages: write stages=2,patches=4")
    module, plan, call, config = _planned(subject, given, plan_only, set, allow)
    print(getattr(plan, "listing", plan))  # a text, where there is no plan
    if plan_only:
        return
    from .plan import Plan
    from .processes import agree

    if check:
        with progress("check"):
            print(agree(module, *call))
    elif isinstance(plan, Plan):
        with progress("check"):
            print(f"simulated processes differ from one by {plan.check():.1e}")
    if out is not None:
        from .processes import is_first

        if is_first():
            from ..core.artifacts.artifact import save

            save(module, out, config=config)
        print(f"saved in {out}")


def _predicted(
    subject: str, pixels: list[int], devices: list[int], link: str, speed: float, at: int, out: Path | None, set: Any
) -> None:
    from ..core.flow import rewrite
    from .costs.plot import save_picture
    from .costs.prediction import figures_of, format_figures, predict, table

    if Path(subject).is_dir():
        raise SpecError(f"'{subject}' is a saved rewrite: give --predict its configuration, {subject}/config.yaml")
    found, speed = figures_of(link, speed)
    config = _unsplit(subject, set)
    rows = []
    for side in pixels:
        grown = config.model_copy(update={"inputs": _grown(config.inputs, side, at or _side(config.inputs))})
        result = rewrite(grown, dry_run=True, verify=False, progress=progress)
        with progress(f"predict {side}"):
            rows += predict(result.module, *result.inputs, devices, found, speed, side)
    kinds = {str(p.dtype).removeprefix("torch.") for p in result.module.parameters()}
    print(f"{', '.join(sorted(kinds))}, {format_figures(found, speed)}")
    print(table(rows))
    if out is not None:
        save_picture(rows, out)
        print(f"saved in {out}")


def _fastest(subject: str, devices: str, link: str, speed: float, set: Any, allow: Any) -> dict[str, int]:
    """The ways that are predicted to be the fastest for so many processes, those of torchrun if it started this one."""
    from ..core.flow import rewrite, saved_inputs
    from .costs.prediction import fastest_plan

    counts = [int(os.environ["WORLD_SIZE"])] if "TORCHELASTIC_RUN_ID" in os.environ else _numbers(devices, "--devices", 2)
    if len(counts) != 1:
        raise SpecError(f"--ways auto is for one number of processes, not {devices}: give --devices {counts[0]}")
    if Path(subject).is_dir():
        module = load_saved(subject, set, allow)
        call = saved_inputs(subject, module)
    else:
        result = rewrite(_unsplit(subject, set), dry_run=True, verify=False, progress=progress)
        module, call = result.module, result.inputs
    with progress("choose"):
        plan = fastest_plan(module, *call, devices=counts[0], link=link, speed=speed, check=False)
    print("\n".join(plan.alternatives))
    return {axis: number for axis, number in plan.ways.items() if number > 1}


def _unsplit(subject: str, set: Any) -> Config:
    """A configuration without its parallel passes."""
    config = read_config(subject, set)
    return config.model_copy(update={"passes": [p for p in config.passes if not p.parallel]})


def _side(inputs: Mapping[str, Any]) -> int:
    """The pixels of an image's side: 8 for each element of a latent's last dimension, 16 for each token of a square's side."""
    latents, tokens = _largest(inputs)
    if not latents and not tokens:
        raise SpecError(
            "no input of the configuration has four dimensions or tokens, so its size cannot be varied: set shapes under "
            "'inputs'"
        )
    return 8 * latents if latents else 16 * round(math.sqrt(tokens))


def _largest(inputs: Mapping[str, Any]) -> tuple[int, int]:
    """The last dimension of the largest input with four or more, and the most tokens of one with three."""
    shapes = [spec.shape for spec in inputs.values() if hasattr(spec, "shape")]
    return (
        max((shape[-1] for shape in shapes if len(shape) >= 4), default=0),
        max((shape[1] for shape in shapes if len(shape) == 3), default=0),
    )


def _grown(inputs: Mapping[str, Any], side: int, at: int) -> dict[str, Any]:
    """Inputs for another resolution: latents grow with the side; where there are none, tokens with its square."""
    latents, tokens = _largest(inputs)
    found = dict(inputs)
    for name, spec in inputs.items():
        shape = getattr(spec, "shape", ())
        if latents and len(shape) >= 4:
            shape = (*shape[:-2], *(round(n * side / at) for n in shape[-2:]))
        elif not latents:
            shape = tuple(round(n * side * side / at / at) if n == tokens else n for n in shape)
        if shape != getattr(spec, "shape", ()):
            found[name] = spec.model_copy(update={"shape": shape})
    return found


def _numbers(text: str, name: str, least: int = 1) -> list[int]:
    found = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= least for part in found):
        raise SpecError(f"{name} {shown(text)}: must be whole numbers, {least} or more, such as {least * 2},{least * 4}")
    return sorted({int(part) for part in found})


def parse_degrees(text: str) -> dict[str, int]:
    """`ulysses=2,ring=2` as numbers. Raises SpecError."""
    found: dict[str, int] = {}
    here = f"--ways {shown(text)}: "
    for item in filter(None, text.split(",")):
        axis, _, number = (part.strip() for part in item.partition("="))
        if axis not in AXES:
            raise SpecError(f"{here}no axis {shown(axis)}{did_you_mean(axis, AXES)}; there are {', '.join(AXES)}")
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
    from ..core.flow import rewrite
    from ..core.models.example_inputs import added_inputs, default_inputs
    from ..core.spec.run_config import resolved

    config = _with(read_config(subject, set), ways)
    if not any(p.parallel for p in config.passes):
        raise SpecError(f"{subject} has no parallel degrees: give --ways ulysses=2, or a pass such as sequence_parallel")
    result = rewrite(config, dry_run=dry, verify=False, progress=progress)
    saved = None
    if not dry:
        inputs = {**default_inputs(config, result.base), **added_inputs(config, result.module)[1]}
        saved = {**resolved(config), "inputs": inputs}
    said = result.plan or (result.stepped and result.stepped.extra_repr()) or "one process: all degrees are 1"
    return result.module, said, result.inputs, saved


def _of_folder(subject: str, module: TracedModule, ways: Mapping[str, int]) -> Any:
    from ..core.flow import saved_config, saved_inputs
    from .comparison import degrees_of
    from .pipelines.entry import in_steps, with_steps
    from .plan import parallel_plan, parallelize

    call, config = saved_inputs(subject, module), saved_config(subject)
    said = module.meta.get("stepped", {})
    there = {axis: n for axis, n in (*degrees_of(module).items(), *said.items()) if axis in (*AXES, "ways") and n > 1}
    if there:
        if ways and dict(ways) != there:
            text = ",".join(f"{axis}={n}" for axis, n in there.items())
            raise SpecError(f"'{subject}' is parallel already, with --ways {text}: start from what it was made from")
        from .processes import described

        if said:
            return module, in_steps(module, *call, check=False).extra_repr(), call, config
        return module, described(module, *call), call, config
    if not ways:
        raise SpecError(f"'{subject}' is not parallel: give --ways ulysses=2, for example")
    config = {**(config or {}), "passes": [*(config or {}).get("passes", []), *passes_of(ways)]}
    if "stages" in ways:
        module = with_steps(module, "pipefusion", ways)
        return module, in_steps(module, *call, check=False).extra_repr(), call, config
    with progress("plan"):
        settings: dict[str, Any] = dict(ways)
        plan = parallel_plan(module, *call, **settings, check=False)
    return parallelize(module, plan), plan, call, config


def passes_of(ways: Mapping[str, int]) -> list[dict[str, Any]]:
    """The passes that say these ways, as a configuration has them."""
    found: list[dict[str, Any]] = []
    for axis, name in (("batch", "batch_parallel"), ("tensor", "tensor_parallel"), ("rows", "spatial_parallel")):
        if axis in ways:
            found.append({name: {"ways": ways[axis]}})
    if given := {axis: ways[axis] for axis in ("ulysses", "ring") if axis in ways}:
        found.append({"sequence_parallel": given})
    if given := {axis: ways[axis] for axis in ("stages", "patches") if axis in ways}:
        found.append({"pipefusion": given})
    return found


def _with(config: Config, ways: Mapping[str, int]) -> Config:
    """A configuration whose parallel passes are these; as it is without any."""
    from ..core.spec.run_config import load_config

    if not ways:
        return config
    data = copy.deepcopy(config._source.data)
    items = zip(data.get("passes") or [], config.passes, strict=True)
    data["passes"] = [*(item for item, p in items if not p.parallel), *passes_of(ways)]
    found = load_config(data, base=config.base)
    found._source.file, found._source.lines = config._source.file, config._source.lines
    return found
