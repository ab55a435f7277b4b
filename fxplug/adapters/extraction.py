"""Adapters of a difference: what a fine-tuned checkpoint has that its base has not, as low-rank updates."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks import low_rank
from ..core import reading, weight_files
from ..core.errors import DEFAULT, ArtifactError, Limits, SpecError, did_you_mean, quote
from ..core.spec.addresses import select
from .contents import AdapterContents, ModelLayer
from .file_tensors import parse_object
from .updates import AdapterFile, Entry
from .writing import About, FileOptions, Saved, describe_model, list_skipped, make_content, write

WHOLE = "model.diffusion_model."  # what a single-file checkpoint puts before the denoiser's names, among others' weights
Given = str | os.PathLike[str] | nn.Module | Mapping[str, Tensor]


@dataclass(frozen=True)
class Extracted:
    """An adapter that was extracted: its updates, and how much of each layer's difference it lacks.

    `errors` has by layer the Frobenius norm of what is left of the difference, relative to the difference's own; `left_out`
    what differs and no low-rank update holds, with the reason; `same` the number of layers that do not differ. `file` is what
    `adapters.load` takes.
    """

    file: AdapterFile
    errors: Mapping[str, float]
    left_out: Mapping[str, str]
    same: int
    model: About = field(repr=False)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        as_: str = "kohya",
        part: str | None = None,
        partial: bool = False,
        name: str = "",
        dtype: torch.dtype | None = None,
        overwrite: bool = True,
    ) -> Saved:
        """Write it in a tool's format, see `writing.save_adapter`."""
        contents = AdapterContents(self.file.entries)
        made = make_content(contents, as_, self.model, FileOptions(name, part, partial, dtype))
        return write(made, path, as_, overwrite)

    def __repr__(self) -> str:
        worst = max(self.errors, key=lambda path: self.errors[path])
        left = f"; not held: {list_skipped(self.left_out)}" if self.left_out else ""
        most = f"the largest error is {self.errors[worst]:.1%} of the difference, at '{worst}'"
        return f"Extracted({len(self.errors)} layers, {self.same} more are equal; {most}{left})"


@torch.no_grad()
def extract(
    base: Given,
    tuned: Given,
    *,
    rank: int | float = 16,
    at: str = "**",
    limits: Limits = DEFAULT,
    progress: Callable[[str], object] = str,
) -> Extracted:
    """Make an adapter of the difference of two checkpoints of one model: the best one of its rank, by singular values.

    Of a convolution (out, in, *kernel) the difference is taken as (out, in * kernel). Updates have the dtype of the tuned
    weight, and what that rounds counts in the error. Safetensors files are read layer by layer.

    Args:
        base: A file of weights, a folder with a model of diffusers, a module or a state dict.
        tuned: The same after training, with the same names and shapes.
        rank: A whole number, or a share between 0 and 1: each layer then gets the lowest rank that keeps this share of its
            difference's energy (the sum of the squares of the singular values; Eckart and Young 1936).
        at: Which layers, as in a pass.
        limits: Bounds of what is read.
        progress: Is called with the name of each layer.

    Returns:
        The adapter, with the rank and the error of each layer.

    Raises:
        SpecError: The rank or pattern is none, or nothing differs.
        ArtifactError: A file cannot be read, weights have other shapes, or numbers are not finite.
    """
    number = isinstance(rank, (int, float)) and not isinstance(rank, bool)
    if not number or not (rank >= 1 if isinstance(rank, int) else 0 < rank < 1):
        raise SpecError(f"rank must be a whole number, 1 or more, or a share between 0 and 1, not {quote(rank)}")
    with contextlib.ExitStack() as stack:
        first, second = (_weights_of(given, stack, limits) for given in (base, tuned))
        model = second.model if second.model.layers else first.model
        for one in (first, second):
            if scale := weight_files.find_scale(one.found):
                raise ArtifactError(
                    f"{one.where} has quantised weights, scaled by '{scale}': use the weights from before quantisation"
                )
        shared = [key for key in second.found if key in first.found]
        if not shared:
            some = next(iter(second.found), "")
            raise ArtifactError(f"{first.where} and {second.where} have no names in common{did_you_mean(some, first.found)}")
        paths = {key.removesuffix(".weight"): key for key in shared if key.endswith(".weight") and second.found[key].dim() > 1}
        chosen = select(at, paths)
        if not chosen:
            raise SpecError(f"'{at}' is not a layer of both models{did_you_mean(at, paths)}")
        pairs = (second, first), (first, second)
        left = {key: f"is only in {one.where}" for one, other in pairs for key in one.found if key not in other.found}
        entries: list[Entry] = []
        errors: dict[str, float] = {}
        layers: dict[str, ModelLayer] = {}
        same = 0
        for key in shared:
            a, b = first.found[key], second.found[key]
            path = key.removesuffix(".weight")
            if a.shape != b.shape:
                raise ArtifactError(f"'{key}' is {list(a.shape)} in {first.where} and {list(b.shape)} in {second.where}")
            if path in chosen:
                layers[path] = model.layers.get(path) or _layer(tuple(b.shape))
            if path in chosen and a.is_floating_point() != b.is_floating_point():
                both = f"{a.dtype} in {first.where} and {b.dtype} in {second.where}"
                raise ArtifactError(f"'{key}' is {both}: give the weights as floating point")
            if not b.is_floating_point() or (path in paths and path not in chosen):
                continue
            progress(key)
            value = second.tensor(key)
            wide = torch.float64 if value.dtype == torch.float64 else torch.float32
            delta = value.to(wide) - first.tensor(key).to(wide)
            if not delta.isfinite().all():
                raise ArtifactError(f"'{key}' has numbers that are not finite in {first.where} or {second.where}")
            if not delta.any():
                same += path in chosen
            elif path not in chosen:
                left[key] = f"differs by up to {delta.abs().max():.3g}, and a low-rank update cannot change it"
            else:
                entry, errors[path] = _low_rank(path, delta, value.dtype, rank)
                entries.append(entry)
        if not entries:
            others = f"; only tensors that are not weights of layers differ: {list_skipped(left)}" if left else ""
            raise SpecError(f"no layer at '{at}' differs between {first.where} and {second.where}{others}")
        whole = About(layers, model.classes, model.config)
        return Extracted(AdapterFile(second.where, tuple(entries)), errors, left, same, whole)


def _low_rank(path: str, delta: Tensor, dtype: torch.dtype, rank: int | float) -> tuple[Entry, float]:
    """Return the update of a layer, and the share of the difference that it lacks."""
    flat = delta.flatten(1)
    u, s, v = torch.linalg.svd(flat, full_matrices=False)
    number = low_rank.choose_rank(s.double().square(), rank) if isinstance(rank, float) else rank
    number = min(number, int((s > 0).sum()) or 1)
    root = s[:number].sqrt()
    up, down = (u[:, :number] * root).to(dtype), (root[:, None] * v[:number]).to(dtype)
    lacks = torch.linalg.vector_norm(flat - up.to(flat.dtype) @ down.to(flat.dtype)) / torch.linalg.vector_norm(flat)
    tensors = {"down": down.reshape(number, *delta.shape[1:]), "up": up.reshape(-1, number, *[1] * (delta.dim() - 2))}
    return Entry(path, path, "", "lora", tensors, 1.0, number), lacks.item()


def _layer(shape: tuple[int, ...]) -> ModelLayer:
    """Describe a layer by its weight alone: one input per channel is a convolution in as many groups."""
    kind = "Linear" if len(shape) == 2 else f"Conv{len(shape) - 2}d"
    return ModelLayer(kind, shape, shape[0] if len(shape) > 2 and shape[1] == 1 < shape[0] else 1)


# --- weights, one after the other


@dataclass(frozen=True)
class _Weights:
    """A checkpoint: its tensors by name, those of files without their values, and each when it is asked for."""

    where: str
    found: Mapping[str, Tensor]
    tensor: Callable[[str], Tensor]
    model: About


def _weights_of(given: Given, stack: contextlib.ExitStack, limits: Limits) -> _Weights:
    """Open a checkpoint, whose files are open until the stack is closed."""
    if isinstance(given, nn.Module):
        return _in_memory(f"the {type(given).__name__}", given.state_dict(), describe_model(given))
    if isinstance(given, Mapping):
        return _in_memory("the state dict", given, About({}))
    return _in_files(Path(given), stack, limits)


def _in_memory(where: str, state: Mapping[str, Tensor], model: About) -> _Weights:
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise ArtifactError(f"{where}: '{key}' is a {type(value).__name__}, not a tensor")
        if value.is_meta:
            raise ArtifactError(f"{where}: '{key}' is on the meta device and has no values")
    return _Weights(where, state, lambda key: state[key].detach().cpu(), model)


def _in_files(path: Path, stack: contextlib.ExitStack, limits: Limits) -> _Weights:
    """Open the weights of a file, or of all files in a folder."""
    model, files = About({}), [path]
    if weight_files.find_kind(path) == "folder":
        with reading.report_errors(reading.make_reporter(path)):
            files = sorted(each for each in path.iterdir() if each.suffix == ".safetensors")
        if not files:
            raise ArtifactError(f"the folder '{path}' has no .safetensors file: give a file of weights, or a model's folder")
        if weight_files.find_kind(path / "config.json") == "file":
            config = parse_object(reading.read_json(path / "config.json", limits=limits), str(path / "config.json"))
            model = About({}, (str(config.get("_class_name", "")),), config)
    if path.suffix != ".safetensors" and len(files) == 1 and files[0] == path:
        found, _ = weight_files.read(path, limits=limits)
        found = found.get("state_dict", found) if isinstance(found, Mapping) else found
        if not isinstance(found, Mapping):
            raise ArtifactError(f"{path} contains a {type(found).__name__}, not a dict of tensors")
        return _in_memory(str(path), {str(key): value for key, value in found.items()}, model)
    records: dict[str, tuple[Any, weight_files.TensorEntry]] = {}
    metas: dict[str, Tensor] = {}
    for file in files:
        handle = stack.enter_context(reading.open_regular_file(file))
        head = weight_files.read_header(handle, reading.make_reporter(file), limits)
        for key, value in weight_files.read_tensors(handle, head, reading.make_reporter(file), most=-1):
            if key in metas:
                raise ArtifactError(f"'{key}' is in two files of '{path}': give one of them")
            metas[key], records[key] = value, (handle, head.records[key])
    start = WHOLE if any(key.startswith(WHOLE) for key in records) else ""  # of a pipeline in one file, the denoiser
    found = {key.removeprefix(start): value for key, value in metas.items() if key.startswith(start)}

    def tensor(name: str) -> Tensor:
        handle, record = records[start + name]
        handle.seek(record.offset)
        head = weight_files.Header({name: record}, {}, b"")
        return dict(weight_files.read_tensors(handle, head, reading.make_reporter(path)))[name]

    if start and not model.classes:
        model = About({}, ("UNet2DConditionModel" if any("input_blocks." in name for name in found) else "",))
    return _Weights(str(path), found, tensor, model)
