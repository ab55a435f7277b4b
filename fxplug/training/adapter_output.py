"""What a run on a denoiser of diffusers leaves for its pipeline: `adapter/`, and the proof that the pipeline draws the same."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..adapters.contents import read_trained
from ..adapters.formats import find_part
from ..adapters.writing import describe_model, make_content, save_parts
from ..config.run_config import Config
from ..core.errors import ArtifactError, FxplugError, get_first_line
from ..core.ir.traced_module import TRAINED, TracedModule
from ..pipelines.recorded_run import get_components, hide_warnings
from .network_output import KIND, find_network, make_controlled_pipeline, make_network_model
from .tasks.conditioning import ENCODER
from .tasks.denoise import Denoise
from .tasks.pipeline_denoise import PipelineDenoise
from .tasks.task import Task
from .trainer import Trainer

DENOISERS = ("unet", "transformer")  # whose layers `load_lora_weights` reads
FILE = "pytorch_lora_weights.safetensors"
EQUAL = {torch.float32: 1e-5, torch.float64: 1e-5}  # of pictures in [0, 1]; in other dtypes PEFT's layers round elsewhere


def has_adapter(task: Task, config: Config, module: TracedModule) -> bool:
    """Return whether a run leaves `adapter/`: one on a pipeline, or on a denoiser of diffusers by the task denoise."""
    if isinstance(task, PipelineDenoise):
        return True
    return isinstance(task, Denoise) and config.model.kind == "diffusers" and find_part(module.classes) in DENOISERS


def check_adapter(module: TracedModule, task: Task) -> None:
    """Warn, before the training starts, of trainable parameters that `adapter/` cannot hold: a layer of the base, an encoder;
    and of a pipeline that does not load it."""
    if isinstance(task, PipelineDenoise) and (network := find_network(module)) is not None:
        try:
            make_network_model(module, network, task)
        except ArtifactError as error:
            warnings.warn(f"adapter/ is not written, module/ has all that trains: {error}", stacklevel=3)
        return
    parts = trained_parts(module, task)
    where = "module/ has" if ENCODER not in parts else "module/ and text/ have"
    try:
        _check_encoder(module, task)
        for part, one in parts.items():
            if one.meta.get(TRAINED) or isinstance(task, PipelineDenoise):
                make_content(read_trained(one), "diffusers", describe_model(one), part=part)
    except FxplugError as error:
        warnings.warn(f"adapter/ is not written, {where} all that trains: {error}", stacklevel=3)
        return
    if isinstance(task, PipelineDenoise) and (lacking := _explain_missing_loader(task)):
        warnings.warn(lacking, stacklevel=3)


def trained_parts(module: TracedModule, task: Task) -> dict[str, TracedModule]:
    """Return the models that a run trains, by their names in a pipeline: the module, unless only the text encoder has passes,
    and a text encoder with passes."""
    found = {task.part if isinstance(task, PipelineDenoise) else find_part(module.classes): module}
    if task.encoder is None or task.encoder.traced is None:
        return found
    changed = module.meta.get("passes") or module.meta.get(TRAINED)
    return {**(found if changed else {}), ENCODER: task.encoder.traced}


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
    parts = trained_parts(module, task)
    lines = ["from diffusers import DiffusionPipeline", f"pipe = DiffusionPipeline.from_pretrained({pipeline})"]
    if isinstance(task, PipelineDenoise) and (network := find_network(module)) is not None:
        try:
            make_network_model(module, network, task).save_pretrained(out / "adapter")
        except (FxplugError, OSError) as error:
            if isinstance(error, OSError):
                warnings.warn(f"{out / 'adapter'} cannot be written: {error}", stacklevel=2)
            return "\n".join(["import fxplug", *lines, _load_module(task, out)])
        lines[0] = f"from diffusers import AutoPipelineForText2Image, {KIND}, DiffusionPipeline"
        loading = f"{KIND}.from_pretrained({str(out / 'adapter')!r})"
        return "\n".join([*lines, f"pipe = AutoPipelineForText2Image.from_pipe(pipe, controlnet={loading})"])
    try:
        _check_encoder(module, task)
        (out / "adapter").mkdir(exist_ok=True)
        save_parts(parts, out / "adapter" / FILE)
    except (FxplugError, OSError) as error:  # such as a pass that no adapter file of diffusers has a form for
        if isinstance(error, OSError):
            warnings.warn(f"{out / 'adapter'} cannot be written: {error}", stacklevel=2)
        elif (out / "adapter").is_dir() and not any((out / "adapter").iterdir()):
            (out / "adapter").rmdir()
        if isinstance(task, PipelineDenoise):
            return "\n".join(["import fxplug", *lines, _load_module(task, out)])
        kept = {part: out / "text" / ENCODER if part == ENCODER else out / "module" for part in parts}
        return "\n".join(["import fxplug", *lines, *(f"pipe.{part} = fxplug.load({str(kept[part])!r})" for part in parts)])
    loading = f"pipe.load_lora_weights({str(out / 'adapter')!r})"
    if isinstance(task, PipelineDenoise) and not _loads_itself(task):
        if not _loads_in_part(task):
            return "\n".join(["import fxplug", *lines, _load_module(task, out)])
        loading = f"pipe.{task.part}.load_lora_adapter({str(out / 'adapter')!r}, prefix={task.part!r})"
    return "\n".join([*lines, loading])


def _load_module(task: PipelineDenoise, out: Path) -> str:
    """Return the line of Python that puts the saved module in its pipeline, with the pictures that its passes take."""
    bound = ", ".join(f"{name}=picture" for name in task.added.names)  # float [1, c, h, w] in [0, 1]
    return f"pipe.{task.part} = fxplug.load({str(out / 'module')!r})" + (f".bind({bound})" if bound else "")


def prove_adapter(trainer: Trainer, task: PipelineDenoise, folder: Path) -> None:
    """Load `adapter/` in the stock pipeline, draw the last sample again, and tell how far it is from the run's own.

    Args:
        trainer: The run, which is done.
        task: Its task, whose pipeline is as before afterwards.
        folder: The folder `adapter/`.
    """
    network = find_network(trainer.module)
    if trainer.sharded is not None or not (network or _loads_itself(task) or _loads_in_part(task)):
        return
    what = "adapter/ in the stock pipeline"
    if task.added.names and (network is None or network.guess_mode):
        trainer.watch.note(f"{what}: not compared, as the stock pipeline does not take '{task.added.names[0]}' so")
        return
    try:
        call, seed, added = task.last_sample()
        trainer.module.eval()
        own = task.sampler(trainer.module, call, steps=task.sample_steps, seed=seed, added=added)
        if network is not None:
            stock = _drawn_by_network(task, folder, {**call, "image": next(iter(added.values()))}, seed)
        else:
            stock = _drawn_with(task, folder, call, seed)
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
        pipe = make_controlled_pipeline(task, network)
        pipe.set_progress_bar_config(disable=True)
    return task.sampler.stock(call, steps=task.sample_steps, seed=seed, pipe=pipe)


def _drawn_with(task: PipelineDenoise, folder: Path, call: dict[str, Any], seed: int) -> Tensor:
    """Return the sample that the stock pipeline draws with the adapter of a folder; the pipeline is without it afterwards."""
    pipe, part = task.pipe, get_components(task.pipe)[task.part]
    before = {name: p.requires_grad for name, p in part.named_parameters()}
    try:
        with hide_warnings():
            if _loads_itself(task):
                pipe.load_lora_weights(str(folder), weight_name=FILE)
            else:
                part.load_lora_adapter(str(folder), prefix=task.part, weight_name=FILE)
        return task.sampler.stock(call, steps=task.sample_steps, seed=seed)
    finally:
        if getattr(part, "peft_config", None):
            part.unload_lora()
        for name, parameter in part.named_parameters():
            parameter.requires_grad_(before.get(name, parameter.requires_grad))


def _loads_itself(task: PipelineDenoise) -> bool:
    """Return whether the pipeline loads layers of the trained part by itself."""
    return hasattr(task.pipe, "load_lora_weights") and task.part in DENOISERS


def _loads_in_part(task: PipelineDenoise) -> bool:
    return hasattr(get_components(task.pipe)[task.part], "load_lora_adapter")


def _explain_missing_loader(task: PipelineDenoise) -> str:
    """Return what is to be said of a pipeline that does not load the adapter by itself; "" if it does."""
    if _loads_itself(task):
        return ""
    why = f"{type(task.pipe).__name__} has no load_lora_weights"
    if hasattr(task.pipe, "load_lora_weights"):
        why = f"load_lora_weights of {type(task.pipe).__name__} does not read layers of '{task.part}'"
    if _loads_in_part(task):
        return f"{why}: pipe.{task.part}.load_lora_adapter(FOLDER, prefix='{task.part}') loads adapter/"
    return f"{why}, nor has its {task.part} load_lora_adapter: fxplug.load reads module/"


def _check_encoder(module: TracedModule, task: Task) -> None:
    """Raise ArtifactError for a text encoder with passes that no pipeline of such a module reads from its adapter file."""
    encoder = task.encoder
    if encoder is not None and encoder.traced is not None and not (encoder.is_clip and find_part(module.classes) == "unet"):
        raise ArtifactError("the one file for a model and its text encoder is that of a UNet with CLIP's text encoder")


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
