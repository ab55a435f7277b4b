"""HCP-Diffusion's checkpoints: weights of converted passes out of its files, and into files that it reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...blocks.lora import HalfLora, Lora
from ...core.errors import ArtifactError, SpecError, did_you_mean
from ...core.ir.traced_module import TracedModule
from ...core.reading import make_reporter, report_errors
from ...core.spec.addresses import is_pattern
from ...core.weight_files import save_file
from ...core.writing import open_new, replace_file
from .checkpoint_files import State, list_weights, read_sections

WRITTEN = {"down.weight": "layer.W_down", "up.weight": "layer.W_up", "up.bias": "layer.bias", "scale": "alpha"}
HEAD = "controlnet_cond_embedding"
BACKUP = "backup"  # where a plugin with `hook_param` keeps the layer's own parameter, in HCP-Diffusion

Homes = dict[tuple[str, str], dict[str, str]]  # of section and layer: the name of each weight there -> in the module


def load_checkpoint(module: TracedModule, file: str | Path, *, passes: Sequence[str] = (), ema: bool = False) -> list[str]:
    """Load the weights of a file of HCP-Diffusion, `.ckpt` or `.safetensors`, into converted passes of a module, all or none.

    It reads low-rank updates (`lora`) and plugins (`plugin`), or with `ema` their averages; `passes` names the passes that the
    file is for, if there are several at one layer, as with the branches of DreamArtist++. Returns the names of the loaded
    weights. Raises SpecError for a layer or weight that no such pass has, another shape, or a weight that the file lacks;
    ArtifactError for a file that cannot be read.
    """
    target, homes = module.state_dict(), _homes(module, passes)
    found = _read(Path(file), ema)
    _check_layers(module, file, found, homes)
    chosen: dict[str, Tensor] = {}
    for (section, path), weights in found.items():
        here = homes[section, path]
        for key, tensor in weights.items():
            said = WRITTEN.get(key, key) if section == "lora" else key
            if key == BACKUP and key not in here and (name := _hooked(module, path, here)) is not None:
                _check_backup(file, path, tensor, target[name])
                continue
            if key not in here:
                raise SpecError(f"{file}: '{path}' has no weight '{said}' here{did_you_mean(key, here)}")
            name = here[key]
            if target[name].shape != tensor.shape:
                there, own = list(tensor.shape), list(target[name].shape)
                raise SpecError(f"{file}: '{path}' has {said} {there}, and {name} is {own}: another model, or another rank")
            chosen[name] = tensor
    filled = {name.partition(".")[0] for name in chosen}
    for name in dict.fromkeys(name for here in homes.values() for name in here.values()):
        if name.partition(".")[0] in filled and name not in chosen and not name.endswith(".scale"):
            raise SpecError(f"{file}: it has no '{name}'")
    with torch.no_grad():
        for name, tensor in chosen.items():
            target[name].copy_(tensor)
    return list(chosen)


def _hooked(module: TracedModule, path: str, here: Mapping[str, str]) -> str | None:
    """Return the parameter of the model that a plugin with `hook_param` changes at a layer; None for another plugin."""
    for entry in module.meta.get("passes", []):
        for site in entry["sites"]:
            block = str(site["block"])
            if site["path"] == path and ".ParamPlugin" in f".{block}" and any(n.startswith(f"{block}.") for n in here.values()):
                return ".".join(filter(None, [path, str(entry["params"].get("param", "weight"))]))
    return None


def _check_backup(file: str | Path, path: str, found: Tensor, own: Tensor) -> None:
    """Raise SpecError if the model's weight that HCP-Diffusion saved beside a plugin's differs from the model here."""
    same = found.shape == own.shape and any(torch.equal(found.to(own.device, d), own.to(d)) for d in (found.dtype, own.dtype))
    if not same:
        raise SpecError(
            f"{file}: '{path}' has the model's own weight beside the plugin's ({BACKUP}), and here it is another one: "
            "HCP-Diffusion trained it too, or the file is for another model; give the model that weight (weights: of the "
            "configuration), as a checkpoint of plugins does not change the model"
        )


def save_checkpoint(module: TracedModule, file: str | Path, *, passes: Sequence[str] = ()) -> list[str]:
    """Write the weights of converted passes as a file that HCP-Diffusion 0.9 loads; return the names of the written weights.

    Raises SpecError for two passes with weights at one layer, of which `passes` has to name one, for passes without such
    weights, and for another suffix than `.ckpt` and `.safetensors`; ArtifactError if the file cannot be written. An existing
    file is then unchanged.
    """
    out, state, names = Path(file), module.state_dict(), []
    sections: dict[str, dict[str, Tensor]] = {}
    for (section, path), here in _homes(module, passes).items():
        for key, name in here.items():
            key = WRITTEN[key] if section == "lora" else key
            sections.setdefault(section, {})[f"{path}.___.{key}"] = state[name].detach().cpu().contiguous().clone()
            names.append(name)
    if out.suffix not in (".ckpt", ".safetensors"):
        raise SpecError(f"{file}: the name of a checkpoint of HCP-Diffusion must end in .ckpt or .safetensors")
    if not names:
        listed = ", ".join(passes or [entry["name"] for entry in module.meta.get("passes", [])]) or "there is none"
        raise SpecError(f"no pass here has weights that a checkpoint of HCP-Diffusion can store: {listed}")
    with report_errors(make_reporter(file), "cannot be written"), replace_file(out) as beside:
        if out.suffix == ".ckpt":
            with open_new(beside) as opened:
                torch.save(sections, opened)
        else:
            flat = {f"{section}:{key}": value for section, here in sections.items() for key, value in here.items()}
            save_file(flat, beside)
    return names


def _read(file: Path, ema: bool) -> dict[tuple[str, str], State]:
    """Return the weights of the low-rank updates and plugins of a file, by section and layer."""
    sections = read_sections(file, ema)
    found = {
        (section, path): here
        for section in ("lora", "plugin")
        for path, here in list_weights(section, sections.get(section, {}), file).items()
    }
    if not found:
        raise ArtifactError(
            f"{file} has no low-rank updates and no plugins ('lora', 'plugin'); it has {', '.join(sections)}, which are merged "
            "into a model by a configuration: fxplug convert hcp FILE -o OUT.yaml"
        )
    return found


def _check_layers(module: TracedModule, file: str | Path, found: Mapping[tuple[str, str], State], homes: Homes) -> None:
    """Raise SpecError for layers of a file that have no such pass here, with their names and number."""
    lost = [home for home in found if home not in homes]
    if not lost:
        return
    section, path = lost[0]
    paths, modules = [p for s, p in homes if s == section], dict(module.named_modules())
    what = f"{len(paths)} layers have such a pass" if paths else "no pass here has such weights"
    text = f"{file}: {section} has weights of '{path}', and {what}{did_you_mean(path, paths)}"
    foreign = [p for _, p in lost if p not in modules]
    if len(found) > 1:
        text += f"\n  {len(lost)} of its {len(found)} layers have no such pass here, and {len(foreign)} are not in this model"
    raise SpecError(text)


def _homes(module: TracedModule, passes: Sequence[str]) -> Homes:
    """Return the names of the weights of the chosen passes; those of `also` are passes of their own, as each has a file there.

    Raises SpecError for an unknown pass, and for two at one layer.
    """
    entries: dict[str, dict[str, Any]] = {}
    for entry in module.meta.get("passes", []):
        patches = any(".Patch" in site["block"] for site in entry["sites"])
        also = entry["params"].get("also", []) if patches else []
        entries |= {name: {**entry, "name": name} for name in (entry["name"], *(more["name"] for more in also))}
    for name in passes:
        if name not in entries:
            raise SpecError(f"no pass '{name}'{did_you_mean(name, entries)}; there are {', '.join(entries) or 'none'}")
    homes: Homes = {}
    owners: dict[tuple[str, str], str] = {}
    state, modules = list(module.state_dict()), dict(module.named_modules())
    for name in passes or entries:
        for (section, path), here in _weights(entries[name], state, modules):
            known = homes.setdefault((section, path), here)
            other = owners.setdefault((section, path), name)
            if known != here:
                raise SpecError(f"the passes {other} and {name} both have weights at '{path}': choose one (passes=['{name}'])")
    return homes


def _weights(
    entry: Mapping[str, Any], state: Sequence[str], modules: Mapping[str, nn.Module]
) -> list[tuple[tuple[str, str], dict[str, str]]]:
    """Return the names of the weights of a pass, by section and layer."""
    name, rows, known = entry["name"], [], set(state)
    for prefix, rename in ((f"{name}.cn.", _control), (f"{name}.plugin.plugin.", str)):
        here = {rename(key.removeprefix(prefix)): key for key in state if key.startswith(prefix)}
        if here:
            rows.append((("plugin", ""), here))
    for site in entry["sites"]:
        block = f"{site['block']}."
        path = str(site["path"]).partition("@")[0]
        kind = site["block"].rpartition(".")[2].partition("_")[0]
        if isinstance(made := modules.get(site["block"]), (Lora, HalfLora)):
            inner = block + "lora." * isinstance(made, HalfLora)
            rows.append((("lora", path), {own: inner + own for own in WRITTEN if inner + own in known}))
        for inner in (f"{block}plugin.", f"{block}container.{name}."):
            here = {key.removeprefix(inner): key for key in state if key.startswith(inner)}
            home = ("plugin", _source(entry, path) if kind == "PairPlugin" else path)
            if here and not (kind == "PatchAround" and home in dict(rows)):  # both sides have the one plugin
                rows.append((home, here))
    return rows


def _source(entry: Mapping[str, Any], path: str) -> str:
    """Return the from-layer of the PluginBlock at a to-layer, under which a file has its weights."""
    given = entry["params"]
    targets, sources = ([value] if isinstance(value, str) else value for value in (given["to"], given["args"][0]))
    if any(map(is_pattern, targets)):
        raise SpecError(
            f"the pass {entry['name']} has patterns for its layers, and a file needs their paths: convert with --model"
        )
    return str(sources[list(targets).index(path)]).removesuffix(":in[:]")


def _control(key: str) -> str:
    """Return the name that HCP-Diffusion's plugin has for a weight of diffusers' ControlNet; only those of the condition layers
    differ."""
    found = re.fullmatch(rf"{HEAD}\.(?:(conv_in)|(conv_out)|blocks\.(\d+))\.(\w+)", key)
    if found is None:
        return key
    number = 0 if found[1] else 14 if found[2] else 2 * (int(found[3]) + 1)
    return f"cond_head.{number}.{found[4]}"
