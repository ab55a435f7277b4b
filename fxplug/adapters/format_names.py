"""What a format calls the layers of a model: by their paths, or as the first code bases named them, several as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .contents import ModelLayer
from .layer_names import SWAPPED, first_names
from .tables import FORMATS, PARTS
from .updates import Entry


def part_of(classes: Sequence[str]) -> str:
    """The part of a pipeline that a model is, by the names of its classes."""
    name = next(iter(classes), "")
    if "UNet" in name:
        return "unet"
    return "text_encoder" if any(word in name for word in ("Text", "T5", "CLIP", "Llama", "Gemma")) else "transformer"


def start_of(as_: str, part: str) -> str:
    """What a format puts before the names of the layers of a part of a pipeline."""
    row = FORMATS[as_]
    return str(row.get("parts", {}).get(part, row["start"])).replace("{part}", part)


def format_of(entry: Entry) -> str:
    """The format whose names the layer of an update has; empty where several have such."""
    if entry.flat:
        return "" if ":" in entry.name else "lycoris" if entry.name.startswith(start_of("lycoris", "")) else "kohya"
    named = next((as_ for as_ in ("peft", "comfy") if entry.name.startswith(start_of(as_, "unet"))), "")
    return named or ("diffusers" if entry.part in PARTS else "")


def named(
    entries: Sequence[Entry], as_: str, layers: Mapping[str, ModelLayer], part: str
) -> tuple[list[tuple[str, Entry]], dict[str, str]]:
    """Each update with what the format calls its layer, and what it has no name for, by path, with the reason."""
    start = start_of(as_, part)
    if as_ in ("peft", "diffusers"):
        return [(start + entry.path, entry) for entry in entries], {}
    if as_ == "lycoris":
        return _flat([(entry.path, entry) for entry in entries], start)
    # kohya's tools have diffusers' names for the UNets of Stable Diffusion 1 and 2, and the first names for all later models
    early = part == "unet" and "add_embedding.linear_1" not in layers
    rows, left = ([(e.path, e) for e in entries], {}) if as_ == "kohya" and early else _first(entries, layers)
    if part.startswith("text_encoder"):  # of CLIP's, whose outer module newer versions of transformers have no more
        rows = [(f"text_model.{name}" if name.startswith("encoder.layers.") else name, entry) for name, entry in rows]
    if as_ == "comfy":
        return [(start + name, entry) for name, entry in rows], left
    made, same = _flat(rows, start)
    return made, left | same


def _flat(rows: Sequence[tuple[str, Entry]], start: str) -> tuple[list[tuple[str, Entry]], dict[str, str]]:
    """Names with underscores for dots; what two layers would both be called is left out."""
    made: dict[tuple[str, str, str], tuple[str, Entry]] = {}
    left = {}
    for name, entry in rows:
        key = start + name.replace(".", "_")
        _, first = made.setdefault((key, entry.param, entry.method), (key, entry))
        if first is not entry:
            left[entry.path] = f"has the same name as '{first.path}' when dots become underscores"
    return list(made.values()), left


def _first(entries: Sequence[Entry], layers: Mapping[str, ModelLayer]) -> tuple[list[tuple[str, Entry]], dict[str, str]]:
    """Updates under the first names of their layers; their paths where there are none."""
    known: dict[str, tuple[str, tuple[str, ...]]] = {}
    for name, paths in first_names(layers).items():
        for path in paths:
            known.setdefault(path.removesuffix(SWAPPED), (name, paths))
    groups: dict[Any, dict[str, Entry]] = {}  # a layer may have a change of its weight, and one of its bias
    for entry in entries:
        layer = known.get(entry.path, (entry.path, (entry.path,)))
        groups.setdefault((*layer, entry.param, entry.method), {})[entry.path] = entry
    made: list[tuple[str, Entry]] = []
    left: dict[str, str] = {}
    for (name, paths, *_), found in groups.items():
        own = {path.removesuffix(SWAPPED): path for path in paths}
        turned = {path: entry.swapped() if own[path].endswith(SWAPPED) else entry for path, entry in found.items()}
        if len(paths) == 1:
            made.append((name, turned[next(iter(own))]))
            continue
        odd = next((e for e in found.values() if e.kind != "lora"), None)
        if odd is not None:
            why = (
                f"is one of {len(paths)} layers that are one layer '{name}' in that format, and {odd.kind} of a part cannot be "
                "written for the whole"
            )
            left |= dict.fromkeys(found, why)
            continue
        widths = {path: layers[path].shape[0] for path in own}
        made.append((name, joined(turned, widths)))
    return made, left


def joined(entries: Mapping[str, Entry], widths: Mapping[str, int]) -> Entry:
    """The LoRAs of some of several layers as one of the layer whose outputs are all of theirs, one after the other.

    With one `down` and scale for all it is that one; else the ranks add up, and `up` has a block for each. Exact, but for the
    rounding of a block whose scale is not the largest.
    """
    entries = {path: entries[path] for path in widths if path in entries}  # a file may have them in another order
    first = max(entries.values(), key=lambda entry: abs(entry.scale))
    downs = [entry.tensors["down"] for entry in entries.values()]
    alike = all(entry.scale == first.scale and torch.equal(entry.tensors["down"], downs[0]) for entry in entries.values())
    rank = first.rank if alike else sum(entry.rank for entry in entries.values())
    dtype = first.tensors["up"].dtype
    for entry in entries.values():
        dtype = torch.promote_types(dtype, entry.tensors["up"].dtype)
    rows: list[Tensor] = []
    start = 0
    for path, width in widths.items():
        up = torch.zeros(width, rank, dtype=dtype)
        if path in entries:
            entry = entries[path]
            own = entry.tensors["up"].flatten(1)
            if entry.scale != first.scale:
                own = own.float() * (entry.scale / first.scale)
            up[:, start : start + entry.rank] = own
            start += 0 if alike else entry.rank
        rows.append(up)
    down = downs[0] if alike else torch.cat([down.to(dtype) for down in downs])
    shape = [1] * (down.dim() - 2)
    tensors = {"down": down, "up": torch.cat(rows).reshape(-1, rank, *shape)}
    return replace(first, tensors=tensors, rank=rank)
