"""What the verb `fxplug parallel` runs: predictions, the plan of a configuration or of a saved rewrite, and its checks."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config.cli.verbs import load_saved, read_config, show_progress
from ..config.flow import make_saved_inputs, rewrite
from ..config.models.example_inputs import fill_inputs, make_added_inputs
from ..config.run_config import Config, load_config, resolve
from ..config.saved_config import read_saved_config
from ..core.artifacts.artifact import save
from ..core.errors import SpecError
from ..core.ir.traced_module import TracedModule
from .comparison import get_degrees
from .costs.plot import save_picture
from .costs.prediction import fastest_plan, format_figures, format_table, get_figures, predict
from .parallel_pass import ParallelPass
from .pipelines.entry import in_steps, with_steps
from .plan import parallel_plan, parallelize
from .plan_options import AXES
from .processes import compare_values, describe, is_first


def print_predictions(
    subject: str, pixels: list[int], devices: list[int], link: str, speed: float, at: int, out: Path | None, set: Any
) -> None:
    """Print what each way costs at each resolution, and save the picture of it. Raises SpecError."""
    if Path(subject).is_dir():
        raise SpecError(f"'{subject}' is a saved rewrite: give --predict its configuration, {subject}/config.yaml")
    found, speed = get_figures(link, speed)
    config = _unsplit(subject, set)
    rows = []
    for side in pixels:
        grown = config.model_copy(update={"inputs": _grown(config.inputs, side, at or _side(config.inputs))})
        result = rewrite(grown, dry_run=True, verify=False, progress=show_progress)
        with show_progress(f"predict {side}"):
            rows += predict(result.module, *result.inputs, devices, found, speed, side)
    kinds = {str(p.dtype).removeprefix("torch.") for p in result.module.parameters()}
    print(f"{', '.join(sorted(kinds))}, {format_figures(found, speed)}")
    print(format_table(rows))
    if out is not None:
        save_picture(rows, out)
        print(f"saved in {out}")


def find_fastest_degrees(subject: str, devices: int, link: str, speed: float, set: Any, allow: Any) -> dict[str, int]:
    """Find the degrees that are predicted to be the fastest for so many processes."""
    if Path(subject).is_dir():
        module = load_saved(subject, set, allow)
        call = make_saved_inputs(subject, module)
    else:
        result = rewrite(_unsplit(subject, set), dry_run=True, verify=False, progress=show_progress)
        module, call = result.module, result.inputs
    with show_progress("choose"):
        plan = fastest_plan(module, *call, devices=devices, link=link, speed=speed, check=False)
    print("\n".join(plan.alternatives))
    return {axis: number for axis, number in plan.ways.items() if number > 1}


def _unsplit(subject: str, set: Any) -> Config:
    """Return a configuration without its parallel passes."""
    config = read_config(subject, set)
    return config.model_copy(update={"passes": [p for p in config.passes if not isinstance(p, ParallelPass)]})


def _side(inputs: Mapping[str, Any]) -> int:
    """Return the pixels of an image's side: 8 for each element of a latent's last dimension, 16 for each token of a square's
    side."""
    latents, tokens = _largest(inputs)
    if not latents and not tokens:
        raise SpecError(
            "no input of the configuration has four dimensions or tokens, so its size cannot be varied: set shapes under "
            "'inputs'"
        )
    return 8 * latents if latents else 16 * round(math.sqrt(tokens))


def _largest(inputs: Mapping[str, Any]) -> tuple[int, int]:
    """Return the last dimension of the largest input with four or more, and the most tokens of one with three."""
    shapes = [spec.shape for spec in inputs.values() if hasattr(spec, "shape")]
    return (
        max((shape[-1] for shape in shapes if len(shape) >= 4), default=0),
        max((shape[1] for shape in shapes if len(shape) == 3), default=0),
    )


def _grown(inputs: Mapping[str, Any], side: int, at: int) -> dict[str, Any]:
    """Return inputs for another resolution: latents grow with the side; without latents, tokens grow with its square."""
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


def check_plan(module: TracedModule, plan: Any, call: Any, *, on_processes: bool) -> str:
    """Compare simulated processes with one, or also `on_processes`, and say by how much they differ."""
    return str(compare_values(module, *call)) if on_processes else f"simulated processes differ from one by {plan.check():.1e}"


def save_in_first(module: TracedModule, out: Path, config: Any) -> None:
    """Save a parallel module, in the first process of all."""
    if is_first():
        save(module, out, config=config)


def plan_model(subject: str, ways: Mapping[str, int], dry: bool, set: list[str] | None, allow: list[str] | None) -> Any:
    """Make the parallel module, its plan, an example call, and the configuration to save it with."""
    if Path(subject).is_dir():
        return _of_folder(subject, load_saved(subject, set, allow), ways)
    config = _with(read_config(subject, set), ways)
    if not any(isinstance(p, ParallelPass) for p in config.passes):
        raise SpecError(f"{subject} has no parallel degrees: give --ways ulysses=2, or a pass such as sequence_parallel")
    result = rewrite(config, dry_run=dry, verify=False, progress=show_progress)
    saved = None
    if not dry:
        inputs = {**fill_inputs(config, result.base, result.inputs), **make_added_inputs(config, result.module)[1]}
        saved = {**resolve(config), "inputs": inputs}
    said = result.plan or (result.stepped and result.stepped.extra_repr()) or "one process: all degrees are 1"
    return result.module, said, result.inputs, saved


def _of_folder(subject: str, module: TracedModule, ways: Mapping[str, int]) -> Any:
    call, config = make_saved_inputs(subject, module), read_saved_config(subject)
    said = module.meta.get("stepped", {})
    there = {axis: n for axis, n in (*get_degrees(module).items(), *said.items()) if axis in (*AXES, "ways") and n > 1}
    if there:
        if ways and dict(ways) != there:
            text = ",".join(f"{axis}={n}" for axis, n in there.items())
            raise SpecError(f"'{subject}' is parallel already, with --ways {text}: start from what it was made from")
        if said:
            return module, in_steps(module, *call, check=False).extra_repr(), call, config
        return module, describe(module, *call), call, config
    if not ways:
        raise SpecError(f"'{subject}' is not parallel: give --ways ulysses=2, for example")
    config = {**(config or {}), "passes": [*(config or {}).get("passes", []), *passes_of(ways)]}
    if "stages" in ways:
        module = with_steps(module, "pipefusion", ways)
        return module, in_steps(module, *call, check=False).extra_repr(), call, config
    with show_progress("plan"):
        settings: dict[str, Any] = dict(ways)
        plan = parallel_plan(module, *call, **settings, check=False)
    return parallelize(module, plan), plan, call, config


def passes_of(ways: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the passes for these degrees, in the form of a configuration."""
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
    """Return a configuration with these parallel passes; unchanged without any."""
    if not ways:
        return config
    data = copy.deepcopy(config._source.data)
    items = zip(data.get("passes") or [], config.passes, strict=True)
    data["passes"] = [*(item for item, p in items if not isinstance(p, ParallelPass)), *passes_of(ways)]
    found = load_config(data, base=config.base)
    found._source.file, found._source.lines = config._source.file, config._source.lines
    return found
