"""HCP-Diffusion's checkpoints: weights of converted passes out of its files, and into files that it reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ...errors import ArtifactError, SpecError, did_you_mean
from ...files import weight_files
from ...ir.traced_module import TracedModule
from ...spec.addresses import is_pattern

KEY = re.compile(r"(?P<path>.*?)\.(?:___|lora_block(?:_\d+)?)\.(?P<key>.+)")  # a layer, what stands for its plugin, a weight
# what a low-rank update's weights are called there; alpha is stored divided by the rank, so it is the scale
LOW_RANK = {
    "layer.W_down": "down.weight", "layer.lora_down.weight": "down.weight", "layer.W_up": "up.weight",
    "layer.lora_up.weight": "up.weight", "layer.bias": "up.bias", "layer.lora_up.bias": "up.bias", "alpha": "scale",
}  # fmt: skip
WRITTEN = {"down.weight": "layer.W_down", "up.weight": "layer.W_up", "up.bias": "layer.bias", "scale": "alpha"}
HEAD = "controlnet_cond_embedding"

Homes = dict[tuple[str, str], dict[str, str]]  # of section and layer: the name of each weight there -> in the module


def load_checkpoint(module: TracedModule, file: str | Path, *, passes: Sequence[str] = (), ema: bool = False) -> list[str]:
    """Give converted passes of a module the weights of a file of HCP-Diffusion, `.ckpt` or `.safetensors`, all or none.

    Read are its low-rank updates (`lora`) and plugins (`plugin`), or with `ema` their averages; `passes` says for which passes
    the file is, where there are several at one layer, as with the branches of DreamArtist++. Gives the names of what was
    loaded. Raises SpecError for a layer or weight that no such pass has, another shape, or a weight that the file lacks;
    ArtifactError for a file that cannot be read.
    """
    found, target = _read(Path(file), "_ema" if ema else ""), module.state_dict()
    homes = _homes(module, passes)
    chosen: dict[str, Tensor] = {}
    for (section, path, key), tensor in found.items():
        here = homes.get((section, path))
        if here is None:
            paths = [p for s, p in homes if s == section]
            what = f"{len(paths)} layers have such a pass" if paths else "no pass here has such weights"
            raise SpecError(f"{file}: {section} has weights of '{path}', and {what}{did_you_mean(path, paths)}")
        if key not in here:
            raise SpecError(f"{file}: '{path}' has no weight '{key}'{did_you_mean(key, here)}")
        name = here[key]
        if target[name].shape != tensor.shape:
            there, own = list(tensor.shape), list(target[name].shape)
            raise SpecError(f"{file}: '{path}' has {key} {there}, and {name} is {own}: another model, or another rank")
        chosen[name] = tensor
    filled = {name.partition(".")[0] for name in chosen}
    for name in dict.fromkeys(name for here in homes.values() for name in here.values()):
        if name.partition(".")[0] in filled and name not in chosen and not name.endswith(".scale"):
            raise SpecError(f"{file}: nothing in it is '{name}'")
    with torch.no_grad():
        for name, tensor in chosen.items():
            target[name].copy_(tensor)
    return list(chosen)


def save_checkpoint(module: TracedModule, file: str | Path, *, passes: Sequence[str] = ()) -> list[str]:
    """Write the weights of converted passes as a file that HCP-Diffusion 0.9 loads; gives the names of what was written.

    Raises SpecError for two passes with weights at one layer, of which `passes` has to name one, and for another suffix than
    `.ckpt` and `.safetensors`.
    """
    out, state, names = Path(file), module.state_dict(), []
    sections: dict[str, dict[str, Tensor]] = {}
    for (section, path), here in _homes(module, passes).items():
        for key, name in here.items():
            if section == "plugin" or WRITTEN.get(LOW_RANK[key]) == key:
                sections.setdefault(section, {})[f"{path}.___.{key}"] = state[name].detach().cpu().contiguous()
                names.append(name)
    if out.suffix == ".ckpt":
        torch.save(sections, out)
    elif out.suffix == ".safetensors":
        save_file({f"{section}:{key}": value for section, here in sections.items() for key, value in here.items()}, out)
    else:
        raise SpecError(f"{file}: a checkpoint of HCP-Diffusion ends in .ckpt or .safetensors")
    return names


def _read(file: Path, suffix: str) -> dict[tuple[str, str, str], Tensor]:
    """The weights of both sections, by section, layer and name. A flat file has its sections before a colon."""
    data, _ = weight_files.read(file)
    if not isinstance(data, Mapping):
        raise ArtifactError(f"{file} is a {type(data).__name__}, no checkpoint of HCP-Diffusion")
    flat = {k: v for k, v in data.items() if isinstance(v, Tensor)}
    flat |= {f"{section}:{k}": v for section, inner in data.items() if isinstance(inner, Mapping) for k, v in inner.items()}
    found = {}
    for text, tensor in flat.items():
        section, _, rest = text.partition(":")
        key = KEY.fullmatch(rest)
        if key is not None and isinstance(tensor, Tensor) and section in (f"lora{suffix}", f"plugin{suffix}"):
            found[section.removesuffix(suffix), key["path"], key["key"]] = tensor
    if not found:
        there = ", ".join(sorted({text.partition(":")[0] for text in flat})[:6]) or "nothing"
        raise ArtifactError(f"{file} has no low-rank updates and no plugins ('lora{suffix}', 'plugin{suffix}'); it has {there}")
    return found


def _homes(module: TracedModule, passes: Sequence[str]) -> Homes:
    """Where the weights of the chosen passes are. Raises SpecError for an unknown pass, and for two at one layer."""
    entries = {entry["name"]: entry for entry in module.meta.get("passes", [])}
    for name in passes:
        if name not in entries:
            raise SpecError(f"no pass '{name}'{did_you_mean(name, entries)}; there are {', '.join(entries) or 'none'}")
    homes: Homes = {}
    state = list(module.state_dict())
    for name in passes or entries:
        for (section, path), here in _weights(entries[name], state):
            known = homes.setdefault((section, path), here)
            if known != here:
                other = next(iter(known.values())).partition(".")[0]
                raise SpecError(f"the passes {other} and {name} both have weights at '{path}': say which (passes=['{name}'])")
    return homes


def _weights(entry: Mapping[str, Any], state: Sequence[str]) -> list[tuple[tuple[str, str], dict[str, str]]]:
    """The weights of a pass, by section and layer."""
    name, rows = entry["name"], []
    for prefix, rename in ((f"{name}.cn.", _control), (f"{name}.plugin.plugin.", str)):
        here = {rename(key.removeprefix(prefix)): key for key in state if key.startswith(prefix)}
        if here:
            rows.append((("plugin", ""), here))
    for site in entry["sites"]:
        block = f"{site['block']}."
        path = str(site["path"]).partition("@")[0]
        kind = site["block"].rpartition(".")[2].partition("_")[0]
        if kind in ("Lora", "HalfLora"):
            inner = block + "lora." * (kind == "HalfLora")
            here = {theirs: inner + own for theirs, own in LOW_RANK.items() if inner + own in state}
            rows.append((("lora", path), here))
        for inner in (f"{block}plugin.", f"{block}container.{name}."):
            here = {key.removeprefix(inner): key for key in state if key.startswith(inner)}
            if here:
                rows.append((("plugin", _source(entry, path) if kind == "PairPlugin" else path), here))
    return rows


def _source(entry: Mapping[str, Any], path: str) -> str:
    """The from-layer of the PluginBlock at a to-layer: a file has its weights there."""
    given = entry["params"]
    targets, sources = ([value] if isinstance(value, str) else value for value in (given["to"], given["args"][0]))
    if any(map(is_pattern, targets)):
        raise SpecError(f"the pass {entry['name']} has patterns for its layers, and a file their paths: convert with --model")
    return str(sources[list(targets).index(path)]).removesuffix(":in[:]")


def _control(key: str) -> str:
    """A weight of diffusers' ControlNet as HCP-Diffusion's plugin has it: the same but for the layers that read the image."""
    found = re.fullmatch(rf"{HEAD}\.(?:(conv_in)|(conv_out)|blocks\.(\d+))\.(\w+)", key)
    if found is None:
        return key
    number = 0 if found[1] else 14 if found[2] else 2 * (int(found[3]) + 1)
    return f"cond_head.{number}.{found[4]}"
