"""What a trained module is to a pipeline of diffusers: the file that it loads, and the lines that put it to use."""

from __future__ import annotations

import warnings
from pathlib import Path

from ..adapters.named import part_of
from ..adapters.writing import save_adapter
from ..errors import FxplugError
from ..ir.traced_module import TracedModule
from ..spec.run_config import Config

PIPELINES = ("unet", "transformer")
FILE = "pytorch_lora_weights.safetensors"


def into_pipeline(module: TracedModule, out: Path, config: Config) -> str:
    """Write `adapter/` beside the saved `module/` of a run where diffusers has a form for all that was trained.

    Gives the lines of Python that use the result in a pipeline, that file or the module itself; no text for a model that is no
    denoiser of a pipeline, and for weights that were trained beside passes. A file that cannot be written is a warning.
    """
    part = part_of(module.classes)
    if config.model.kind != "diffusers" or part not in PIPELINES:
        return ""
    lines = ["from diffusers import DiffusionPipeline", f"pipe = DiffusionPipeline.from_pretrained({_pipeline(config)})"]
    names = [entry["name"] for entry in module.meta.get("passes", [])]
    try:
        (out / "adapter").mkdir(exist_ok=True)
        save_adapter(module, out / "adapter" / FILE, as_="diffusers", passes=names, name=out.name, part=part)
    except (FxplugError, OSError) as error:  # such as a pass that no adapter file of diffusers has a form for
        if isinstance(error, OSError):
            warnings.warn(f"{out / 'adapter'} cannot be written: {error}", stacklevel=2)
        else:
            _tidied(out / "adapter")
        return "\n".join(["import fxplug", *lines, f"pipe.{part} = fxplug.load({str(out / 'module')!r})"])
    return "\n".join([*lines, f"pipe.load_lora_weights({str(out / 'adapter')!r})"])


def _pipeline(config: Config) -> str:
    """The folder of the pipeline that a model's folder is in, as Python text."""
    if isinstance(config.model.target, str):
        folder = config.base / config.model.target
        home = folder.parent if folder.is_dir() else folder.parent.parent
        if (home / "model_index.json").is_file():
            return repr(str(home))
    return '"the pipeline of this model"'


def _tidied(folder: Path) -> None:
    if not any(folder.iterdir()):
        folder.rmdir()
