"""Adapter files changed without their model: resized, converted between the names of tools, and merged to one file."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks import low_rank
from ..core.errors import DEFAULT, ArtifactError, Limits, SpecError, quote
from .banks import is_finite
from .combination import Combination
from .file_layouts import EditedFile, find_family, find_layout, place_on_paths, read_model, write_own, write_parts
from .file_metadata import list_fields
from .files import AdapterFile, Entry, Source, read
from .formats import CONFIGURED
from .own_files import check_no_own
from .writing import FileOptions


@torch.no_grad()
def resize_adapter(
    source: Source,
    path: str | os.PathLike[str],
    *,
    rank: int | None = None,
    energy: float | None = None,
    ratio: float | None = None,
    cumulative: float | None = None,
    dtype: torch.dtype | None = None,
    adapter: str | None = None,
    limits: Limits = DEFAULT,
) -> EditedFile:
    """Write an adapter file with lower ranks, under its own names: the best of that rank for each layer, by singular values.

    kohya's script keeps one singular value more than a share needs. The scale of a layer, alpha / rank, stays. What has no
    higher rank stays as it is, whole changes of parameters too; LoHa and LoKr become LoRAs.

    Args:
        source: The adapter, as `adapters.load` takes it.
        path: The file to write.
        rank: The highest rank of a layer.
        energy: The share of the sum of the squares of the singular values that is kept (its root is the parameter of sv_fro in
            kohya's networks/resize_lora.py).
        ratio: Those larger than the largest divided by this are kept (sv_ratio).
        cumulative: The share of their sum that is kept (sv_cumulative).
        dtype: The dtype of the tensors; None is the file's.
        adapter: Which of several adapters in the file.
        limits: Bounds of what is read.

    Returns:
        What was written, and the ranks and errors of the layers.

    Raises:
        SpecError: A rank or share is none, or none is given.
        ArtifactError: The file has updates of other kinds, or cannot be read.
    """
    if rank is not None and (not isinstance(rank, int) or isinstance(rank, bool) or rank < 1):
        raise SpecError(f"rank must be a whole number, 1 or more, not {quote(rank)}")
    asked = {name: n for name, n in (("energy", energy), ("cumulative", cumulative), ("ratio", ratio)) if n is not None}
    for name, value in asked.items():
        if isinstance(value, bool) or not (value >= 1 if name == "ratio" else 0 < value <= 1):
            what = "a number, 1 or more" if name == "ratio" else "a share above 0 and at most 1"
            raise SpecError(f"{name} must be {what}, not {quote(value)}")
    if len(asked) > 1 or not (asked or rank):
        raise SpecError("give rank, or one of energy, cumulative and ratio, or rank and one of these three")
    file = _read(source, adapter=adapter, limits=limits)
    made, errors = [], {}
    for entry in file.entries:
        if entry.method not in ("diff", "whole"):
            halves = _halves(entry, f"{file.source}: ")
            up, s, down = low_rank.compute_svd(*halves)
            number = _number(s, rank, energy, cumulative, ratio)
            if number < halves[0].shape[1] or entry.kind not in ("lora", "lora+bias"):
                errors[entry.name] = _missing(s, number)
                entry = _lora(entry, *_take_largest(up, s, down, number), entry.scale)
        made.append(entry)
    return write_own(file, made, path, dtype, errors)


@torch.no_grad()
def convert_adapter(
    source: Source,
    path: str | os.PathLike[str],
    *,
    as_: str,
    model: nn.Module | None = None,
    family: str | None = None,
    part: str | None = None,
    partial: bool = False,
    dtype: torch.dtype | None = None,
    name: str = "",
    adapter: str | None = None,
    limits: Limits = DEFAULT,
) -> EditedFile:
    """Write an adapter file as another tool reads it, with that tool's names.

    Between names that are the model's own paths, as PEFT and diffusers have them, neither `model` nor `family` is needed. Text
    encoders go along, but into PEFT's folders, which are for one model: `part` says which.

    Args:
        source: The adapter, as `adapters.load` takes it.
        path: The file or folder to write.
        as_: The format, as in `save_adapter`.
        model: Any module that has the layers, on the meta device too.
        family: A family of models at its published sizes (`file_layouts.FAMILIES`); without it and `model` it is the one that
            the file fits.
        part: Which part of a pipeline is written.
        partial: Whether what the format cannot hold is left out.
        dtype: The dtype of the tensors; None is the file's.
        name: The title in the metadata.
        adapter: Which of several adapters in the file.
        limits: Bounds of what is read.

    Returns:
        What was written, what was left out, and the ranks and errors of the layers.

    Raises:
        SpecError: There is no such format, family or part.
        ArtifactError: The file cannot be read, fits no family or not the model, or has what the format cannot hold.
    """
    file = _read(source, adapter=adapter, limits=limits)
    about = read_model(model, family)
    own = as_ in (*CONFIGURED, "lycoris", "fxplug") and find_layout(file) in (*CONFIGURED, "fxplug")
    if about is None and not own:
        about = find_family(file)
    said = list_fields(file.about)
    if name:
        said.pop("modelspec.title", None)
    placed = place_on_paths(file, about)
    return write_parts(placed, path, as_, about, FileOptions(name, part, partial, dtype, said))


@torch.no_grad()
def merge_adapters(
    sources: Mapping[Any, float] | Sequence[tuple[Source, float]],
    path: str | os.PathLike[str],
    *,
    how: str = "cat",
    rank: int | None = None,
    density: float | None = None,
    sign: str = "total",
    clamp: float | None = None,
    seed: int = 0,
    as_: str | None = None,
    model: nn.Module | None = None,
    family: str | None = None,
    part: str | None = None,
    partial: bool = False,
    dtype: torch.dtype | None = None,
    limits: Limits = DEFAULT,
) -> EditedFile:
    """Write several adapter files as one, each times its weight: `merge_adapters({"ink.safetensors": 0.8, ...}, out)`.

    One file alone is pruned as several are, where PEFT takes "linear". Whole changes of parameters are combined alike. Files of
    one layout are merged under their own names; others on the paths of a model, as in `convert_adapter`.

    Args:
        sources: The adapters with their weights, as a mapping or as pairs.
        path: The file or folder to write.
        how: As in PEFT's `add_weighted_adapter`. "cat" is the exact sum, its rank that of all together; "svd" the best of
            `rank`. "linear", "ties", "dare_linear", "dare_ties" and "magnitude_prune" combine the halves of LoRAs of one rank,
            which is no sum of their products; with "_svd" at the end they combine the products. "kohya" is
            networks/merge_lora.py of sd-scripts: both halves times the weight, so that one counts with its weight's square (its
            --concat is "cat" with squared weights).
        rank: The rank for "svd"; None is the highest of the files'.
        density: The share of numbers that pruning keeps.
        sign: Which sign most have in TIES: that of the "total", or by "frequency".
        clamp: The quantile at which the tensors of "svd" are cut.
        seed: What draws the numbers of DARE, layer by layer in the order of `model` (then they are PEFT's) or of the first
            file.
        as_: The format, as in `save_adapter`; None is the first file's layout.
        model: Any module that has the layers, as in `convert_adapter`.
        family: A family of models, as in `convert_adapter`.
        part: Which part of a pipeline is written.
        partial: Whether what the format cannot hold is left out.
        dtype: The dtype of the tensors.
        limits: Bounds of what is read.

    Returns:
        What was written, what was left out, and the ranks and errors of the layers.

    Raises:
        SpecError: Arguments are none of these.
        ArtifactError: Layers have other shapes, ranks that "linear" and its kin cannot add, or are no low-rank product (DoRA);
            and as `convert_adapter`.
    """
    pairs = list(sources.items() if isinstance(sources, Mapping) else sources)
    if odd := [one for one in pairs if not isinstance(one, (tuple, list)) or len(one) != 2]:
        raise SpecError(f"merge_adapters takes files with their weights, {{'ink.safetensors': 0.8}}; {quote(odd[0])} has none")
    ways = Combination(how, rank, density, sign, clamp, seed)
    if not pairs:
        raise SpecError("nothing to merge: give files with their weights, {'ink.safetensors': 0.8}")
    for source, weight in pairs:
        if not is_finite(weight):
            raise SpecError(f"the weight of {quote(str(source))} must be a finite number, not {quote(weight)}")
    files = [_read(source, limits=limits) for source, _ in pairs]
    layout, about = find_layout(files[0]), read_model(model, family)
    same = about is None and as_ in (None, layout) and all(find_layout(file) == layout for file in files)
    if not same and about is None:
        about = find_family(files[0])
    rows: dict[tuple[str, str, str], list[tuple[Entry, float]]] = {}
    for file, (_, weight) in zip(files, pairs, strict=True):
        for entry in file.entries if same else place_on_paths(file, about):
            rows.setdefault((entry.part, entry.path.replace(".", "_"), entry.param), []).append((entry, float(weight)))
    errors: dict[str, float] = {}
    if about is not None:  # as PEFT goes through the layers, so that DARE draws for each of them what it draws there
        order = {path.replace(".", "_"): n for n, path in enumerate(about.layers)}
        rows = dict(sorted(rows.items(), key=lambda item: order.get(item[0][1], len(order))))
    made = [_merged(row, ways, errors) for row in rows.values()]
    if same:
        return write_own(files[0], made, path, dtype, errors)
    format_ = as_ or layout or "kohya"
    return write_parts(made, path, format_, about, FileOptions("", part, partial, dtype), errors)


# --- one layer


@torch.no_grad()
def cut_rank(entry: Entry, rank: int, where: str) -> Entry:
    """Return the update of a layer with a lower rank, the best by singular values, as `resize_adapter` makes it.

    Args:
        entry: The update.
        rank: The rank.
        where: What stands before an error.

    Returns:
        A LoRA.

    Raises:
        ArtifactError: For an update that is no low-rank product alone.
    """
    up, s, down = low_rank.compute_svd(*_halves(entry, where))
    return _lora(entry, *_take_largest(up, s, down, rank), entry.scale)


def _take_largest(up: Tensor, s: Tensor, down: Tensor, number: int) -> tuple[Tensor, Tensor]:
    root = s[:number].sqrt()
    return up[:, :number] * root, root[:, None] * down[:number]


def _read(source: Source, **options: Any) -> AdapterFile:
    file = read(source, **options)
    check_no_own(file, "a tool for files")
    for entry in file.entries:
        if (empty := next((key for key, tensor in entry.tensors.items() if tensor.is_meta), None)) is not None:
            raise ArtifactError(f"{file.source}: '{entry.name}': its {empty} is on the meta device and has no values")
    return file


def _halves(entry: Entry, where: str) -> tuple[Tensor, Tensor]:
    """Return `up` (out, rank) and `down` (rank, in * kernel) of an update, in float32 or wider, without its scale."""
    if not entry.is_low_rank and (entry.method or entry.kind != "lora+bias"):
        what = entry.method or entry.kind
        raise ArtifactError(
            f"{where}'{entry.name}' is {what}, not only a low-rank product: merge it into its model (fxplug.merge), and take "
            "the difference with fxplug.extract"
        )
    if not entry.update_kind.is_plain:
        entry = entry.as_lora((entry.sizes()[0], *entry.sizes()[1]))
    entry = entry.as_one_group()
    down, up = entry.tensors["down"].flatten(1), entry.tensors["up"].flatten(1)
    wide = torch.float64 if up.dtype == torch.float64 else torch.float32
    return up.to(wide), down.to(wide)


def _lora(entry: Entry, up: Tensor, down: Tensor, scale: float) -> Entry:
    """Return a LoRA with these halves in place of an update, in its dtype and with its other sizes."""
    sizes, dtype = entry.sizes()[1], next(iter(entry.tensors.values())).dtype
    if "down" in entry.tensors:
        sizes = tuple(entry.tensors["down"].shape[1:])
    shape = (len(up), len(down), *[1] * (len(sizes) - 1))
    made = {"down": down.reshape(-1, *sizes).to(dtype), "up": up.reshape(shape).to(dtype)}
    bias = {"bias": entry.tensors["bias"]} if "bias" in entry.tensors else {}
    kind = "lora+bias" if bias else "lora"
    return replace(entry, kind=kind, tensors={**made, **bias}, rank=len(down), scale=scale, assumed=False)


def _number(s: Tensor, rank: int | None, energy: float | None, cumulative: float | None, ratio: float | None) -> int:
    """Return the rank of an update with these singular values."""
    most = int((s > 0).sum()) or 1
    if energy is not None or cumulative is not None:
        share = low_rank.choose_rank(s.square() if energy is not None else s, float(energy or cumulative or 0))
    else:
        share = int((s > s[0] / ratio).sum()) or 1 if ratio else most
    return min(most, share, rank or most)


def _merged(row: Sequence[tuple[Entry, float]], ways: Combination, errors: dict[str, float]) -> Entry:
    """Return the merged update of one layer from several with their weights."""
    first, how = row[0][0], ways.how
    if all(entry.method == "diff" for entry, _ in row):
        values = [entry.tensors["delta"] for entry, _ in row]
        _check_shapes(first, values)
        made = ways.combine([value.float() for value in values], [weight * entry.scale for entry, weight in row])
        return replace(first, tensors={"delta": made.to(_dtype(values))}, scale=1.0)
    by_halves = not ways.by_svd and how != "cat"
    for entry, _ in row:
        if "bias" in entry.kind or (by_halves and entry.is_low_rank and not entry.update_kind.is_plain):
            why = "which 'cat' and 'svd' can merge" if "bias" not in entry.kind else "since it has a bias beside a LoRA"
            raise ArtifactError(f"'{entry.name}' is {entry.kind}, which '{how}' cannot merge, {why}")
    ups, downs = zip(*(_halves(entry, "") for entry, _ in row), strict=True)
    weights = [weight * entry.scale for entry, weight in row]
    _check_shapes(first, [up[:, :1] for up in ups], [down[:1] for down in downs])
    dtype = _dtype([tensor for entry, _ in row for tensor in entry.tensors.values()])
    first = replace(first, tensors={key: value.to(dtype) for key, value in first.tensors.items()})
    if how == "cat":
        return _lora(first, torch.cat(ups, 1), torch.cat([d * w for d, w in zip(downs, weights, strict=True)]), 1.0)
    if ways.by_svd:
        products = [up @ down * entry.scale for up, down, (entry, _) in zip(ups, downs, row, strict=True)]
        turned = [value.T for value in products] if first.embedding else products  # as the weight is, whose numbers are drawn
        whole = ways.combine(turned, [weight for _, weight in row])
        u, s, v = torch.linalg.svd(whole.T if first.embedding else whole, full_matrices=False)
        number = min(ways.rank or max(up.shape[1] for up in ups), len(s))
        errors[first.name] = _missing(s, number)
        up, down = u[:, :number] * s[:number], v[:number]
        if ways.clamp is not None:
            most = torch.quantile(torch.cat([up.flatten(), down.flatten()]), ways.clamp)
            up, down = up.clamp(-most, most), down.clamp(-most, most)
        return _lora(first, up, down, 1.0)
    if len({up.shape[1] for up in ups}) > 1:
        ranks = ", ".join(str(up.shape[1]) for up in ups)
        raise ArtifactError(f"'{first.name}' has the ranks {ranks}, and '{how}' needs equal ranks: use cat or svd")
    scale = first.scale if how == "kohya" else 1.0
    if how == "kohya":
        parts = [math.sqrt(abs(entry.scale / scale)) * weight for entry, weight in row]
    else:
        parts = [math.copysign(math.sqrt(abs(weight)), weight) for weight in weights]
    down = ways.combine(downs, parts)
    return _lora(first, ways.combine(ups, [abs(part) for part in parts]), down, scale)


def _missing(s: Tensor, number: int) -> float:
    """Return the norm of the truncated part of an update with these singular values, relative to its own."""
    return float(torch.linalg.vector_norm(s[number:]) / torch.linalg.vector_norm(s).clamp(min=1e-30))


def _dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))


def _check_shapes(entry: Entry, *lists: Sequence[Tensor]) -> None:
    for values in lists:
        if len(shapes := list(dict.fromkeys(tuple(value.shape) for value in values))) > 1:
            raise ArtifactError(f"'{entry.name}' has the shape {list(shapes[0])} in one file and {list(shapes[1])} in another")
