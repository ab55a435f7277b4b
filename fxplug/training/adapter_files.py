"""What a run of many adapters leaves of each: a file that other tools read, and a slot of the module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..adapters.contents import read_trained
from ..adapters.formats import find_part
from ..adapters.updates import AdapterFile
from ..adapters.writing import save_adapter
from ..core.errors import ArtifactError, FxplugError, SpecError
from ..core.ir.traced_module import TracedModule
from .param_groups import fill_within
from .tasks.denoise import Denoise
from .tasks.pipeline_denoise import PipelineDenoise

if TYPE_CHECKING:
    from .trainer import Trainer

DENOISERS = ("unet", "transformer")  # whose layers `load_lora_weights` reads


def write_adapter_files(
    trainer: Trainer, name: str, out: Path, averages: Mapping[str, Tensor], note: Callable[[str], object]
) -> None:
    """Write `adapter/NAME/` in the first format that has a form for it, and with averaged weights `ema/NAME/`.

    A denoiser of diffusers has diffusers' own format, any other model PEFT's. What cannot be written is noted.
    """
    named = trainer.trained
    if not all(bool(value.isfinite().all()) for value in named.values()):
        note(f"{name}: adapter/{name} is not written, because its weights are not finite")
        return
    _write(trainer, name, out / "adapter" / name, note)
    if averages:
        with fill_within(named, averages):
            _write(trainer, name, out / "ema" / name, note)


def _write(trainer: Trainer, name: str, folder: Path, note: Callable[[str], object]) -> None:
    task, module = trainer.task, trainer.module
    own = task.part if isinstance(task, PipelineDenoise) else find_part(module.classes)
    diffusers = isinstance(task, (Denoise, PipelineDenoise)) and own in DENOISERS
    whys = []
    for form in ("diffusers", "peft", "fxplug") if diffusers else ("peft", "fxplug"):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "adapter.safetensors" if form == "fxplug" else folder
        part: dict[str, Any] = {"part": own} if form == "diffusers" else {}
        try:
            save_adapter(module, path, as_=form, name=name, **part)
            return
        except (FxplugError, OSError) as error:
            whys.append(f"{form}: {error}")
    note(f"{name}: {folder} could not be written: {'; '.join(whys)}")


def load_into_slots(
    module: TracedModule, trained: Sequence[tuple[str, TracedModule]], note: Callable[[str], object]
) -> None:
    """Put trained adapters into the free slots of a module, the first ones first; those without a slot are noted."""
    adapters: Any = module.adapters
    left = []
    for name, one in trained:
        own = {entry["name"] for entry in one.meta["passes"]}
        slotted = [entry["name"] for entry in module.meta["passes"] if entry["slots"] and entry["train"]]
        passes = [p for p in slotted if p in own]
        if any("" not in adapters.names_of(p) for p in passes):
            left.append(name)
            continue
        try:
            held = read_trained(one)
            if held.left_out:
                raise SpecError("; ".join(f"'{path}' {why}" for path, why in held.left_out.items()))
            adapters.load(name, AdapterFile(name, held.entries))
        except (ArtifactError, SpecError) as error:
            note(f"{name}: is not in a slot of the module: {error}")
    if left:
        note(f"{', '.join(left)}: not in the module, which has {adapters.slots} slots; adapter/ has all")
