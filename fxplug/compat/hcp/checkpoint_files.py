"""What a file of HCP-Diffusion holds: its sections, and the low-rank update of each layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core import weight_files
from ...core.errors import ArtifactError, SpecError, did_you_mean
from .layer_patterns import read_paths

State = dict[str, Tensor]
SECTIONS = ("base", "lora", "plugin")
KEY = re.compile(r"(?P<path>.*?)\.(?:___|lora_block(?:_\d+)?)\.(?P<key>.+)")  # a layer, what stands for its plugin, a weight
# what a low-rank update's weights are called there; alpha is stored divided by the rank, so it is the scale (until 0.3 as such)
LOW_RANK = {
    "layer.W_down": "down.weight", "layer.lora_down.weight": "down.weight", "layer.W_up": "up.weight",
    "layer.lora_up.weight": "up.weight", "layer.bias": "up.bias", "layer.lora_up.bias": "up.bias", "alpha": "scale",
    "scale": "scale",
}  # fmt: skip
GROUPS = "layer.rank_groups"  # of a LoHa; 1 in files of early versions' LoRA
OTHERS = {  # how the names of files begin that are none of HCP-Diffusion's
    "lora_unet_": "an adapter file of kohya's scripts or LyCORIS, which new.adapters.load reads",
    "lora_te": "an adapter file of kohya's scripts or LyCORIS, which new.adapters.load reads",
    "unet.": "an adapter file of diffusers or PEFT, which new.adapters.load reads",
    "base_model.": "an adapter file of PEFT, which new.adapters.load reads",
    "model.diffusion_model.": "a whole checkpoint of Stable Diffusion with its original names, which is not supported",
    "down_blocks.": "the weights of a whole UNet: give the file as `weights` of a configuration",
    "text_model.": "the weights of a whole text encoder: give the file as `weights` of a configuration",
}


def read_sections(file: str | Path, ema: bool = False) -> dict[str, State]:
    """Return the tensors of `base`, `lora` and `plugin` by name, or with `ema` their averages, under the same three names.

    A `.ckpt` has nested sections, a `.safetensors` file writes them before a colon; a plugin's file of versions up to 0.3 has
    none. Raises ArtifactError for a file that cannot be read or has no such section, and names its contents.
    """
    file, suffix = Path(file), "_ema" if ema else ""
    data, _ = weight_files.read(file)
    if not isinstance(data, Mapping):
        raise ArtifactError(f"{file} contains a {type(data).__name__}, so it is not a checkpoint of HCP-Diffusion")
    found: dict[str, State] = {}
    flat = dict(_flat(data))
    for text, tensor in flat.items():
        section, colon, rest = text.partition(":")
        if not colon and "___" in text and not ema:
            section, rest = "plugin", text
        if section.removesuffix("_ema") in SECTIONS and section.endswith("_ema") == ema:
            found.setdefault(section.removesuffix("_ema"), {})[rest] = tensor
    if not found:
        there = ", ".join(dict.fromkeys(text.partition(":")[0] for text in sorted(flat)))
        what = next((f"; it is {what}" for start, what in OTHERS.items() if any(k.startswith(start) for k in flat)), "")
        there = there if len(there) < 80 else f"{there[:77]}..."
        known = ", ".join(f"'{name}{suffix}'" for name in SECTIONS)
        raise ArtifactError(f"{file} has none of the sections {known}; it has {there or 'nothing'}{what}")
    return found


def _flat(data: Mapping[Any, Any], before: str = "") -> Iterable[tuple[str, Tensor]]:
    """Yield tensors under the names of the `.safetensors` form; lists are sections with numbers."""
    for key, value in data.items():
        if isinstance(value, Tensor):
            yield f"{before}{key}", value
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}:")
        elif isinstance(value, (list, tuple)):
            yield from _flat(dict(enumerate(value)), f"{before}{key}:")


def list_weights(section: str, state: Mapping[str, Tensor], file: str | Path) -> dict[str, State]:
    """Return the weights of a section `lora` or `plugin` by layer; those of low-rank updates under the names of fxplug's
    blocks.

    Raises SpecError for a name that is no layer's weight, for one weight under the names of two versions, and for an update
    that is no LoRA.
    """
    found: dict[str, State] = {}
    for text, tensor in state.items():
        read = KEY.fullmatch(text)
        if read is None:
            raise SpecError(f"{file}: '{text}' in {section} is not the weight of a layer, which looks like LAYER.___.WEIGHT")
        path, key = read["path"], read["key"]
        here = found.setdefault(path, {})
        if section == "lora":
            if key == GROUPS and tensor.numel() == 1 and int(tensor) == 1:
                continue
            if key == GROUPS or (key.startswith("layer.W_") and tensor.dim() in (3, 5)):
                raise SpecError(
                    f"{file}: '{path}' is a LoHa of HCP-Diffusion, which is not supported (HCP-Diffusion cannot load it either)"
                )
            if key not in LOW_RANK:
                raise SpecError(f"{file}: '{path}' has no weight '{key}'{did_you_mean(key, LOW_RANK)}")
            key = LOW_RANK[key]
        if key in here:
            raise SpecError(f"{file}: '{path}' has its {key} twice, under the names of two versions of HCP-Diffusion")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise SpecError(f"{file}: '{path}' has values in {key} that are not finite")
        here[key] = tensor
    return found


def find_alpha(weights: Mapping[str, State], notes: list[str]) -> float:
    """Return the alpha of the low-rank updates if all layers have the same; else 1.0, with a note."""
    known = {round(float(here["scale"]) * here["down.weight"].shape[0], 6) for here in weights.values() if "scale" in here}
    if len(known) > 1:
        notes.append(
            f"its layers were trained with alpha from {min(known):g} to {max(known):g}: alpha is set to 1.0 for all of them"
        )
    return known.pop() if len(known) == 1 else 1.0


def select_names(names: Sequence[str], layers: Any, file: str | Path) -> list[str]:
    """Return those of a file's `names` that `layers` of a merge list selects: all, or those in the named layers.

    HCP-Diffusion compares prefixes, and so `layers.1` selects `layers.10` too; here a name ends at a dot. Raises SpecError for
    an entry that selects nothing, and for a prefix that has no meaning there.
    """
    if layers is None or layers == "all":
        return list(names)
    chosen: set[str] = set()
    for layer in read_paths(layers, "layers"):
        here = [name for name in names if any(_is(layer.path, part, layer.regex) for part in _parts(name))]
        if not here:
            hint = did_you_mean(layer.path, {part for name in names for part in _parts(name)})
            raise SpecError(f"'{layer.text}' is not a layer that {file} has weights of{hint}", path=("layers",))
        chosen.update(here)
    return [name for name in names if name in chosen]


def _is(pattern: str, path: str, regex: bool) -> bool:
    return re.match(pattern, path) is not None if regex else pattern == path


def _parts(name: str) -> list[str]:
    """Return the paths of the modules that a layer or parameter is in: "a.b.c" is in "", "a", "a.b" and itself."""
    pieces = name.split(".")
    return ["", *(".".join(pieces[: count + 1]) for count in range(len(pieces)))]
