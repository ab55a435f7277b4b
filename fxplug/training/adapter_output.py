"""What a run on a denoiser of diffusers leaves for its pipeline: `adapter/`, and the proof that the pipeline draws the same."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..adapters.contents import read_trained
from ..adapters.formats import find_part
from ..adapters.writing import FileOptions, describe_model, make_content, save_parts
from ..config.run_config import Config
from ..core.errors import ArtifactError, FxplugError, get_first_line
from ..core.ir.traced_module import TRAINED, TracedModule
from ..pipelines.recorded_run import get_components, hide_warnings
from .network_output import KIND, find_frozen_network, find_network, make_controlled_pipeline, make_network_model
from .tasks.conditioning import ENCODER
from .tasks.denoise import Denoise
from .tasks.pipeline_denoise import PipelineDenoise
from .tasks.pipeline_encoders import with_swapped_weights
from .tasks.task import Task
from .trainer import Trainer

DENOISERS = ("unet", "transformer")  # whose layers `load_lora_weights` reads
FILE = "pytorch_lora_weights.safetensors"
IMPORTS = f"from diffusers import AutoPipelineForText2Image, {KIND}, DiffusionPipeline"
EQUAL = {torch.float32: 1e-5, torch.float64: 1e-5}  # of pictures in [0, 1]; in other dtypes PEFT's layers round elsewhere


def has_adapter(task: Task, config: Config, module: TracedModule) -> bool:
    """Return whether a run leaves `adapter/`: one on a pipeline, or on a denoiser of diffusers by the task denoise."""
    if isinstance(task, PipelineDenoise):
        return True
    return isinstance(task, Denoise) and config.model.kind == "diffusers" and find_part(module.classes) in DENOISERS


def check_adapter(module: TracedModule, task: Task) -> None:
    """Warn, before the training starts, of trainable parameters that `adapter/` cannot hold: a layer of the base, an encoder;
    and of a pipeline that does not load it."""
    if isinstance(task, PipelineDenoise) and not task.beside and (network := find_network(module)) is not None:
        try:
            make_network_model(module, network, task)
        except ArtifactError as error:
            warnings.warn(f"adapter/ is not written; module/ has all trained weights: {error}", stacklevel=3)
        return
    parts = trained_parts(module, task)
    where = "module/ and text/ have" if any(part.startswith(ENCODER) for part in parts) else "module/ has"
    try:
        _check_encoder(module, task)
        for part, one in parts.items():
            if one.meta.get(TRAINED) or isinstance(task, PipelineDenoise):
                held = read_trained(one, list_written_passes(one))
                make_content(held, "diffusers", describe_model(one), FileOptions(part=part))
    except FxplugError as error:
        warnings.warn(f"adapter/ is not written; {where} all trained weights: {error}", stacklevel=3)
        return
    if isinstance(task, PipelineDenoise):
        for part in parts:
            if lacking := _explain_missing_loader(task, part, part in task.beside):  # of these the run's last lines say how
                warnings.warn(lacking, stacklevel=3)


def trained_parts(module: TracedModule, task: Task) -> dict[str, TracedModule]:
    """Return the models that a run trains, by their names in a pipeline: the module, unless only text encoders have passes,
    and the models beside it."""
    found = {task.part if isinstance(task, PipelineDenoise) else find_part(module.classes): module}
    others = {name: part.module for name, part in task.beside.items()}
    if task.encoder is not None and task.encoder.traced is not None:
        others[ENCODER] = task.encoder.traced
    changed = module.meta.get("passes") or module.meta.get(TRAINED) or not others
    return {**(found if changed else {}), **others}


def list_written_passes(module: TracedModule) -> list[str]:
    """List the passes of a model that `adapter/` has: all but networks that stay as they are, which have folders of their own,
    as a ControlNet beside which a LoRA trains."""
    trains = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    entries = module.meta.get("passes", [])
    return [entry["name"] for entry in entries
            if not entry.get("networks") or any(name.startswith(f"{entry['name']}.") for name in trains)]  # fmt: skip


def list_adapters(module: TracedModule, task: Task, folder: Path) -> dict[Path, dict[str, TracedModule]]:
    """List the folders in which adapters are, `folder` or one in it for each of several denoisers, with the models of each."""
    parts = trained_parts(module, task)
    denoisers = [name for name, part in task.beside.items() if not part.encodes]
    if not denoisers:
        return {folder: parts}
    first = {name: one for name, one in parts.items() if name not in denoisers}
    return {folder / task.part: first, **{folder / name: {name: parts[name]} for name in denoisers}}


def write_adapter(module: TracedModule, task: Task, out: Path, pipeline: str) -> str:
    """Write `adapter/` beside the saved models of a run if diffusers has a format for everything that was trained.

    Args:
        module: The trained module.
        task: The task of the run.
        out: The folder of the run.
        pipeline: The folder or name of the pipeline, as Python text.

    Returns:
        The lines of Python that use the result in a pipeline, from that file or the models themselves. A file that cannot be
        written is a warning.
    """
    parts, folders = trained_parts(module, task), list_adapters(module, task, out / "adapter")
    lines = ["from diffusers import DiffusionPipeline", f"pipe = DiffusionPipeline.from_pretrained({pipeline})"]
    if isinstance(task, PipelineDenoise) and not task.beside and (network := find_network(module)) is not None:
        try:
            make_network_model(module, network, task).save_pretrained(out / "adapter")
        except (FxplugError, OSError) as error:
            if isinstance(error, OSError):
                warnings.warn(f"{out / 'adapter'} cannot be written: {error}", stacklevel=2)
            return "\n".join(["import fxplug", *lines, _set_model(out, task, task.part)])
        return "\n".join([IMPORTS, *lines[1:], _set_network(repr(str(out / "adapter")))])
    try:
        _check_encoder(module, task)
        for folder, models in folders.items():
            folder.mkdir(exist_ok=True, parents=True)
            save_parts(models, folder / FILE, {name: list_written_passes(one) for name, one in models.items()})
    except (FxplugError, OSError) as error:  # such as a pass that no adapter file of diffusers has a form for
        if isinstance(error, OSError):
            warnings.warn(f"{out / 'adapter'} cannot be written: {error}", stacklevel=2)
        for folder in (*folders, out / "adapter"):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        return "\n".join(["import fxplug", *lines, *(_set_model(out, task, part) for part in parts)])
    for folder, models in folders.items():
        part = next(iter(models))
        if not isinstance(task, PipelineDenoise) or _loads_itself(task, part):
            lines.append(f"pipe.load_lora_weights({str(folder)!r})")
        elif _loads_in_part(task, part):
            lines.append(f"pipe.{part}.load_lora_adapter({str(folder)!r}, prefix={part!r})")
        else:
            lines = [*(["import fxplug"] if "import fxplug" not in lines else []), *lines, _set_model(out, task, part)]
    if isinstance(task, PipelineDenoise) and (beside := find_frozen_network(module)) is not None:
        lines[lines.index("from diffusers import DiffusionPipeline")] = IMPORTS
        lines.append(_set_network(repr(str(beside.folder)) if beside.folder is not None else '"the folder of the ControlNet"'))
    return "\n".join(lines)


def _set_network(folder: str) -> str:
    return f"pipe = AutoPipelineForText2Image.from_pipe(pipe, controlnet={KIND}.from_pretrained({folder}))"


def _set_model(out: Path, task: Task, part: str) -> str:
    """Return the line of Python that puts a trained model into its pipeline, with the pictures that its passes take."""
    encodes = part == ENCODER if task.encoder is not None else part in task.beside and task.beside[part].encodes
    folder = out / "text" / part if encodes else out / "module"
    if not encodes and any(not other.encodes for other in task.beside.values()):
        folder /= part
    names = task.added.names if isinstance(task, PipelineDenoise) and not encodes else ()
    bound = ", ".join(f"{name}=picture" for name in names)  # float [1, c, h, w] in [0, 1]
    return f"pipe.{part} = fxplug.load({str(folder)!r})" + (f".bind({bound})" if bound else "")


def prove_adapter(trainer: Trainer, task: PipelineDenoise, folder: Path) -> None:
    """Load `adapter/` in the stock pipeline, draw the last sample again, and tell how far it is from the run's own.

    Args:
        trainer: The run, which is done.
        task: Its task, whose pipeline is as before afterwards.
        folder: The folder `adapter/`.
    """
    network, folders = find_network(trainer.module) if not task.beside else None, {folder: [task.part]}
    if network is None:
        folders = {path: [*models] for path, models in list_adapters(trainer.module, task, folder).items()}
        if any(_explain_missing_loader(task, part[0], True) for part in folders.values()):
            return
    if trainer.sharded is not None:
        return
    what = "adapter/ in the stock pipeline"
    beside = find_frozen_network(trainer.module) if network is None and not task.beside else None
    controls = network or beside
    if task.added.names and (controls is None or controls.guess_mode or len(task.added.names) > 1):
        trainer.watch.note(f"{what}: not compared, as the stock pipeline does not take '{task.added.names[0]}' in this way")
        return
    try:
        call, seed, added = task.last_sample()
        own_module = trainer.evaluation.module.eval()
        own = task.sampler(own_module, call, steps=task.sample_steps, seed=seed, added=added)
        with with_swapped_weights(trainer.swap, task.pipe):
            shown = {**call, "image": next(iter(added.values()))} if controls is not None else call
            if network is not None:
                stock = _drawn_by_network(task, folder, shown, seed)
            else:
                pipe = None if beside is None else _make_controlled(task, make_network_model(trainer.module, beside, task))
                stock = _drawn_with(task, folders, shown, seed, pipe)
    except Exception as error:  # of the pipeline's loader, PEFT, or a device without memory for both
        trainer.watch.note(f"{what}: could not be compared: {type(error).__name__}: {get_first_line(error)}")
        return
    off = float((stock - own).abs().max())
    dtype = next((p.dtype for p in get_components(task.pipe)[task.part].parameters() if p.is_floating_point()), torch.float32)
    alike = "equal" if off <= EQUAL.get(dtype, 2e-2) else "differs"
    trainer.watch.note(f"{what}: {alike} ({off:.1g})")


def _drawn_by_network(task: PipelineDenoise, folder: Path, call: dict[str, Any], seed: int) -> Tensor:
    """Return the sample that the pipeline of diffusers draws with the ControlNetModel of a folder."""
    from diffusers import ControlNetModel

    part = get_components(task.pipe)[task.part]
    with hide_warnings():
        network: Any = ControlNetModel.from_pretrained(folder, local_files_only=True, torch_dtype=part.dtype).to(part.device)
    return task.sampler.stock(call, steps=task.sample_steps, seed=seed, pipe=_make_controlled(task, network))


def _make_controlled(task: PipelineDenoise, network: Any) -> Any:
    with hide_warnings():
        pipe = make_controlled_pipeline(task, network)
        pipe.set_progress_bar_config(disable=True)
    return pipe


def _drawn_with(
    task: PipelineDenoise, folders: Mapping[Path, list[str]], call: dict[str, Any], seed: int, stock: Any = None
) -> Tensor:
    """Return the sample that the stock pipeline draws with the adapters of folders, of these parts; the pipeline is without
    them afterwards. `stock` is what draws instead, on the same models."""
    pipe, found = task.pipe, get_components(task.pipe)
    parts = {name: found[name] for names in folders.values() for name in names}
    before = {name: {key: p.requires_grad for key, p in part.named_parameters()} for name, part in parts.items()}
    try:
        with hide_warnings():
            for folder, (part, *_) in folders.items():
                if _loads_itself(task, part):
                    pipe.load_lora_weights(str(folder), weight_name=FILE)
                else:
                    parts[part].load_lora_adapter(str(folder), prefix=part, weight_name=FILE)
        return task.sampler.stock(call, steps=task.sample_steps, seed=seed, pipe=stock)
    finally:
        if any(task.beside[name].encodes for name in parts if name in task.beside):
            pipe.unload_lora_weights()  # which knows the layers of text encoders
        for name, part in parts.items():
            if getattr(part, "peft_config", None) and hasattr(part, "unload_lora"):
                part.unload_lora()
            for key, parameter in part.named_parameters():
                parameter.requires_grad_(before[name].get(key, parameter.requires_grad))


def _loads_itself(task: PipelineDenoise, part: str) -> bool:
    """Return whether the pipeline loads layers of a trained part by itself."""
    encodes = part in task.beside and task.beside[part].encodes
    return hasattr(task.pipe, "load_lora_weights") and (part in DENOISERS or encodes)


def _loads_in_part(task: PipelineDenoise, part: str) -> bool:
    return hasattr(get_components(task.pipe)[part], "load_lora_adapter")


def _explain_missing_loader(task: PipelineDenoise, part: str, both: bool = False) -> str:
    """Return what is to be said of a pipeline that does not load the adapter by itself; "" if it does, or with `both` where the
    part loads it."""
    if _loads_itself(task, part) or (both and _loads_in_part(task, part)):
        return ""
    why = f"{type(task.pipe).__name__} has no load_lora_weights"
    if hasattr(task.pipe, "load_lora_weights"):
        why = f"load_lora_weights of {type(task.pipe).__name__} does not read layers of '{part}'"
    if _loads_in_part(task, part):
        folder = f"adapter/{part}/" if any(not other.encodes for other in task.beside.values()) else "adapter/"
        return f"{why}: pipe.{part}.load_lora_adapter(FOLDER, prefix='{part}') loads {folder}"
    return f"{why}, nor has its {part} load_lora_adapter: fxplug.load reads module/"


def _check_encoder(module: TracedModule, task: Task) -> None:
    """Raise ArtifactError for a text encoder with passes that no pipeline of such a module reads from its adapter file."""
    encoder = task.encoder
    if encoder is not None and encoder.traced is not None and not (encoder.is_clip and find_part(module.classes) == "unet"):
        raise ArtifactError("one file for a model and its text encoder needs a UNet with CLIP's text encoder")


def find_pipeline(config: Config) -> str:
    """Return the folder of the pipeline that a model is in, as Python text."""
    if isinstance(config.model.target, str):
        folder = config.base / config.model.target
        if config.model.kind == "pipeline":
            return repr(str(folder) if folder.exists() else config.model.target)
        home = folder.parent if folder.is_dir() else folder.parent.parent
        if (home / "model_index.json").is_file():
            return repr(str(home))
    return '"the pipeline of this model"'
