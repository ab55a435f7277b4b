"""Adapter files in and out of a format: whose names a file has, on which paths of a model these are, and the way back."""

from __future__ import annotations

import functools
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import ArtifactError, SpecError, did_you_mean, format_fields
from .contents import AdapterContents, ModelLayer
from .files import AdapterFile, Entry, fit
from .formats import CONFIGURED, find_format, find_part, get_alpha, make_tensors
from .tables import FORMATS, PARTS, read_table
from .writing import About, Content, FileOptions, Saved, _in_dtype, describe_model, make_content, prepare_tensors, write

FAMILIES: Mapping[str, Mapping[str, Any]] = read_table("formats")["published"]
HASHES = ("sshs_", "modelspec.hash")  # how keys of metadata begin that are true of one file's tensors only
SECOND = "transformer_2"  # as in Wan 2.2, which has two transformers of one kind
UNETS = re.compile(r"(^|[._])((down|up|input|output)_blocks|mid_block|middle_block)[._]")
# text encoders' layers, whose names without dots tell these: CLIP's, and T5's
_TEXT = re.compile(r"^(?:(text_model)[._])?(encoder)[._](layers)[._](\d+)[._](self_attn|mlp)[._](\w+)$")
_T5 = re.compile(r"^(encoder)[._](block)[._](\d+)[._](layer)[._](\d+)[._](SelfAttention|DenseReluDense)[._](\w+)$")


@dataclass(frozen=True)
class EditedFile(Saved):
    """A file that was written. `ranks` are those of its layers; `errors` has by layer what is missing since, by its norm.

    That is the Frobenius norm of the difference to the change that was asked for, relative to that change's own.
    """

    ranks: Mapping[str, int] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)

    __repr__ = format_fields


def read_model(model: nn.Module | None, family: str | None) -> About | None:
    """Describe a model's layers, from the model itself or a family; None without either. Raises SpecError."""
    if model is not None:
        return describe_model(model)
    if family is None:
        return None
    if family not in FAMILIES:
        raise SpecError(f"no model family '{family}'{did_you_mean(family, FAMILIES)}; there are {', '.join(FAMILIES)}")
    return _read_published(family)


@functools.cache
def _read_published(family: str) -> About:
    import diffusers

    options = dict(FAMILIES[family])
    with torch.device("meta"):
        return describe_model(getattr(diffusers, options.pop("class")).from_config(options))


def find_family(file: AdapterFile) -> About:
    """Return the first family that all layers of a file fit. Raises ArtifactError."""
    for _, about in _list_fitting(file):
        return about
    known = ", ".join(FAMILIES)
    raise ArtifactError(f"{file.source} fits none of {known} at their published sizes: give the model that it is for as model=")


def list_families(file: AdapterFile) -> list[str]:
    """Return the families that all layers of a file fit at their published sizes."""
    return [family for family, _ in _list_fitting(file)]


def _list_fitting(file: AdapterFile) -> Iterator[tuple[str, About]]:
    names = [entry.name for entry in file.entries if not entry.part.startswith("text_encoder")]
    unet = any(UNETS.search(name) for name in names)
    for family, options in FAMILIES.items():
        if ("UNet" in options["class"]) != unet or not names:
            continue
        about = _read_published(family)
        try:
            place_on_paths(file, about)
        except ArtifactError:
            continue
        yield family, about


def list_published_layers() -> Iterator[tuple[str, dict[str, tuple[int, ...]]]]:
    """Yield each family of models with the shapes of its layers by path."""
    for family in FAMILIES:
        yield family, {path: tuple(layer.shape) for path, layer in _read_published(family).layers.items()}


def find_layout(file: AdapterFile) -> str:
    """Return the format whose names a file has; "" if several have such."""
    if file.about.get("software") == "fxplug":
        return "fxplug"
    return find_format(file.entries[0])


def place_on_paths(file: AdapterFile, about: About | None) -> list[Entry]:
    """Return the updates of a file on the paths of a model and of text encoders; unchanged without a model."""
    if about is None:
        return list(file.entries)
    every = {**about.named, **about.layers}
    shapes = {path: layer.shape for path, layer in every.items()}
    beside = {f"{path}.bias": (layer.shape[0],) for path, layer in every.items()}
    flux = about.classes[0].startswith("Flux")  # whose second text encoder is the others' third
    made: list[Entry] = []
    others: list[tuple[str, Entry]] = []
    for part, entries in _by_model(file, find_part(about.classes)).items():
        found = fit(replace(file, entries=entries), shapes, beside=beside).check()
        for key, entry in found.placed.items():
            at = key if entry.param == "weight" else key.removesuffix(f".{entry.param}")
            made.append(replace(entry, path=at, part=part, flat=False))
        others += [(other, entry) for other, some in found.others.items() for entry in some]
    for other, entry in others:
        for text, start in FORMATS["comfy"]["parts"].items():
            if entry.path.startswith(start) and text.startswith("text_encoder"):
                entry = replace(entry, path=entry.path.removeprefix(start), part=text)
        if flux and entry.part == "text_encoder_3":
            entry = replace(entry, part="text_encoder_2")
        names = _TEXT.match(entry.path) or _T5.match(entry.path)
        if names is None:
            where = other or "another part"
            raise ArtifactError(f"{file.source}: '{entry.name}' of {where} is not a known layer: give the model that it is for")
        made.append(replace(entry, path=".".join(filter(None, names.groups())), flat=False))
    return made


def _by_model(file: AdapterFile, own: str) -> dict[str, tuple[Entry, ...]]:
    """Return the updates of a file by the pipeline's model that they are for: its denoiser, or the second one of that kind."""
    second = tuple(entry for entry in file.entries if entry.part == SECOND)
    rest = tuple(entry for entry in file.entries if entry.part != SECOND)
    if not second or all(entry.part.startswith("text_encoder") for entry in rest):
        return {SECOND if second else own: file.entries}
    return {own: rest, SECOND: second}


def _layer(entry: Entry) -> ModelLayer:
    """Describe a layer by its update alone."""
    if entry.method == "diff":
        shape = tuple(entry.tensors["delta"].shape)
        return ModelLayer("Linear" if len(shape) == 2 else "", shape)
    out, rest = entry.sizes()
    kind = "Embedding" if entry.embedding else "Linear" if len(rest) < 2 else f"Conv{len(rest) - 1}d"
    shape = (*rest, out) if entry.embedding else (out, *rest)
    groups = len(entry.tensors["down"]) // entry.tensors["up"].shape[1] if "down" in entry.tensors else 1
    return ModelLayer(kind, shape, groups)


def write_parts(
    entries: Sequence[Entry],
    path: str | os.PathLike[str],
    as_: str,
    about: About | None,
    options: FileOptions,
    errors: Mapping[str, float] | None = None,
) -> EditedFile:
    """Write updates in a format, those of several parts of a pipeline one after the other."""
    own, part = find_part(about.classes) if about else None, options.part
    parts: dict[str, list[Entry]] = {}
    for entry in entries:
        parts.setdefault(entry.part, []).append(entry)
    if part is not None and part not in parts:
        raise SpecError(f"the file has nothing for '{part}'{did_you_mean(part, parts)}; it has {', '.join(parts)}")
    models = [each for each in parts if as_ == "peft" or not each.startswith("text_")]
    if part is None and len(models) > 1 and as_ not in ("diffusers", "fxplug"):
        what = "a folder of PEFT" if as_ == "peft" else f"a file of {as_}"
        raise SpecError(f"{what} is for one model, and the file has {', '.join(parts)}: give one of them as part=")
    made: Content | None = None
    for each, some in parts.items():
        if part in (None, each):
            # of layers that nobody knows there may be others whose paths end alike, which PEFT is not to take
            known = {start + e.path: _layer(e) for e in some if e.method in ("", "diff") for start in ("", "*.")}
            model = about if each in (own, SECOND) and about is not None else About(known)
            where = each if each in PARTS else None
            if about and about.classes[0].startswith("Flux") and as_ in ("kohya", "comfy") and each == "text_encoder_2":
                where = "text_encoder_3"
            held = AdapterContents(tuple(some), {})
            done = make_content(held, as_, model, replace(options, part=where))
            early = about is not None and own == "unet" and "add_embedding.linear_1" not in about.layers
            if as_ == "kohya" and each == "text_encoder" and about is not None and not early:
                done = replace(done, tensors={k.replace("lora_te_", "lora_te1_", 1): t for k, t in done.tensors.items()})
            made = done if made is None else _joined(made, done)
    assert made is not None
    return _edited(write(made, path, as_), entries, errors or {})


def _joined(first: Content, second: Content) -> Content:
    key, about = "lora_adapter_metadata", {**second.about, **first.about}
    if key in about:
        about[key] = json.dumps({**json.loads(first.about[key]), **json.loads(second.about[key])}, indent=2, sort_keys=True)
    left = {**first.left_out, **second.left_out}
    return Content({**first.tensors, **second.tensors}, about, first.config, first.layers + second.layers, left)


def write_own(
    file: AdapterFile,
    entries: Sequence[Entry],
    path: str | os.PathLike[str],
    dtype: torch.dtype | None,
    errors: Mapping[str, float],
) -> EditedFile:
    """Write updates in the layout and under the names of their original file."""
    layout = find_layout(file)
    if layout in (*CONFIGURED, "fxplug"):
        return write_parts(entries, path, layout, None, FileOptions(dtype=dtype), errors)
    if (other := next((entry for entry in entries if entry.method not in ("", "diff")), None)) is not None:
        raise ArtifactError(
            f"'{other.name}' is {other.method}, which cannot be converted without its model: load it, and save the adapter"
        )
    entries = [_in_dtype(entry, dtype) for entry in entries]
    tensors: dict[str, Tensor] = {}
    for entry in entries:
        tensors |= make_tensors(layout or "kohya", entry.name, entry, _layer(entry))
    tensors = prepare_tensors(tensors)
    about = {key: value for key, value in file.about.items() if isinstance(value, str) and not key.startswith(HASHES)}
    ranks = Counter((entry.rank, get_alpha(entry)) for entry in entries if not entry.method)
    if "ss_network_dim" in about and ranks:
        (rank, alpha), _ = ranks.most_common(1)[0]
        about |= {"ss_network_dim": str(rank), "ss_network_alpha": f"{alpha:g}"}
    names = tuple(entry.name for entry in entries)
    made = Content(tensors, {"format": "pt", **about}, {}, names, {})
    return _edited(write(made, path, layout or "kohya"), entries, errors)


def _edited(saved: Saved, entries: Sequence[Entry], errors: Mapping[str, float]) -> EditedFile:
    return EditedFile(**vars(saved), ranks={entry.name: entry.rank for entry in entries if not entry.method}, errors=errors)
