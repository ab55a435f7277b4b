"""Weights from a file into a model: every key finds its place, or it is said which did not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...core import weight_files
from ...core.errors import DEFAULT, Limits, SpecError, did_you_mean, find_nearest, quote
from ...core.reading import Raises, read_json
from ...core.spec.addresses import select
from ..model_section import INDICES, SUFFIXES, WeightsSpec

SHOWN = 4  # so many keys of each kind are listed when weights do not fit
WRAPPERS = ("state_dict", "model")  # a checkpoint often has its weights under one of these, beside other things
DENOISER = "model.diffusion_model."  # where a whole pipeline in one file has it
State = dict[str, torch.Tensor]


def load_weights(model: nn.Module, spec: WeightsSpec, base: Path, part: str = "weights") -> None:
    """Load a weight file into a model. Raises SpecError, with the first keys and shapes, if the two do not fit.

    `base` is the folder that its path is relative to; `part` is the place of the file in the configuration.
    """
    try:
        file = spec.find(base)
        state = _without_ignored(read_weights(file, _on_meta(model)), spec)
        if spec.order:
            state = _in_order(model, state, file.name)
        elif spec.keys:
            state = _renamed(model, state, spec)
        else:
            wanted = model.state_dict()
            part_of_file = DENOISER if any(key.startswith(DENOISER) for key in state) else ""
            more = [key for key in state if key.startswith(part_of_file) and key not in wanted]
            if scale := weight_files.find_scale(more):
                finding = (
                    f"'{file.name}' has quantised weights, scaled by '{scale}', which cannot be loaded into this model: give "
                    "the weights from before quantisation"
                )
                raise SpecError(finding)
            state = convert_to_diffusers(model, state, f"'{file.name}'")
        _assign(model, state, f"'{file.name}'")
    except SpecError as error:
        raise SpecError(error.finding, path=(part, *error.path[1:])) from error.__cause__


def read_weights(file: Path, meta: bool = False, limits: Limits = DEFAULT) -> State:
    """Read the tensors of a file by name: safetensors, a pickle of weights only, ONNX, or the index of several.

    With `meta` they are meta tensors of the same shapes. Nothing in the file is run, and it is read within `limits`. Raises
    SpecError.
    """
    def raises(finding: str) -> SpecError:
        way = "; save its weights alone, as .safetensors" if (
            "objects other than tensors"
        ) in finding else ""
        return SpecError(f"'{file.name}' {finding}{way}")

    if file.suffix == ".onnx":
        return weight_files.read_onnx(file, raises, meta=meta)
    if file.name.endswith(INDICES):
        return _read_shards(file, raises, meta, limits)
    if not file.name.endswith((*SUFFIXES, ".gguf")):
        raise raises(f"is none of {', '.join(SUFFIXES)}")
    return _unwrapped(weight_files.read(file, raises=raises, most=-1 if meta else math.inf, limits=limits)[0], file.name)


def _read_shards(index: Path, raises: Raises, meta: bool, limits: Limits) -> State:
    """Read the tensors of the files that an index names, in its own folder."""
    read = read_json(index, raises, limits)
    shards = read.get("weight_map") if isinstance(read, Mapping) else None
    if not isinstance(shards, Mapping) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise raises("has no 'weight_map' that names a file for each tensor: it is not the index of a checkpoint")
    state: State = {}
    for name in dict.fromkeys(shards.values()):
        if Path(name).name != name or name.endswith(INDICES):
            raise raises(
                f"names {quote(name)}, which is not allowed: an index may only name files of weights in its own folder"
            )
        if not (index.parent / name).is_file():
            raise raises(f"names '{name}', which is not in its folder: all of its {len({*shards.values()})} files are needed")
        state.update(read_weights(index.parent / name, meta, limits))
    if (lost := next((key for key in shards if key not in state), None)) is not None:
        raise raises(f"says that '{lost}' is in '{shards[lost]}', which does not have it: the index belongs to other files")
    return state


def convert_to_diffusers(model: nn.Module, state: State, name: str) -> State:
    """Rename a checkpoint in a diffusers model's original layout to diffusers' names; return any other unchanged.

    diffusers' own converters do it (`diffusers.loaders.single_file_model`), and extract the model's part from a whole
    pipeline.
    """
    wanted, config = model.state_dict().keys(), getattr(model, "config", None)
    if wanted <= state.keys() or not isinstance(config, Mapping):
        return state
    import diffusers
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES as loadable

    classes = getattr(model, "classes", None) or (type(model).__name__,)
    cls = getattr(diffusers, classes[0], None)
    mro = [each.__name__ for each in cls.__mro__] if isinstance(cls, type) else []
    convert = next((loadable[each]["checkpoint_mapping_fn"] for each in mro if each in loadable), None)
    if convert is None:
        return state
    best, why = state, ""
    inner = {key.removeprefix(DENOISER): value for key, value in state.items() if key.startswith(DENOISER)}
    outer = {f"{DENOISER}{key}": value for key, value in state.items()}
    for given in (state, outer, inner):  # some converters know only names with the prefix, others only those without
        try:
            made = convert(checkpoint=dict(given), config=dict(config))
        except Exception as error:  # diffusers' code, of a checkpoint that is another model's
            why = why or f"{type(error).__name__}: {error}"
            continue
        best = max(best, made or {}, key=lambda each: len(wanted & each.keys()))
    if why and not wanted & best.keys():
        finding = f"{name} has neither the key names of diffusers' {classes[0]} nor any that diffusers can convert ({why})"
        raise SpecError(finding, path=("weights",))
    return best


def _unwrapped(read: Any, name: str) -> State:
    """Return the mapping of names to tensors inside a checkpoint, without the `module.` of a parallel run."""
    for key in WRAPPERS:
        if isinstance(read, Mapping) and isinstance(read.get(key), Mapping):
            read = read[key]
    if not isinstance(read, Mapping):
        raise SpecError(f"'{name}' contains a {type(read).__name__}, not a dict of tensors")
    other = [f"{key} ({type(value).__name__})" for key, value in read.items() if not isinstance(value, torch.Tensor)]
    if other or not read:
        found = f", but {', '.join(other[:SHOWN])}" if other else ": it is empty"
        raise SpecError(f"'{name}' must contain a dict of tensors only{found}")
    prefix = "module." if all(str(key).startswith("module.") for key in read) else ""
    return {str(key).removeprefix(prefix): value for key, value in read.items()}


def _without_ignored(state: State, spec: WeightsSpec) -> State:
    for pattern in spec.ignore:
        dropped = select(pattern, state)
        if not dropped:
            hint = did_you_mean(pattern, state)
            raise SpecError(f"'{pattern}' is not a key of the file{hint}", path=("weights", "ignore"))
        state = {key: value for key, value in state.items() if key not in dropped}
    return state


def _in_order(model: nn.Module, state: State, name: str) -> State:
    """Return the tensors of a file under the model's keys, one after the other; all shapes must agree."""
    wanted = model.state_dict()
    for index, (ours, theirs) in enumerate(itertools.zip_longest(wanted, state)):
        if ours is None or theirs is None or wanted[ours].shape != state[theirs].shape:
            finding = (
                f"the tensors of '{name}' are not those of the model in the same order ({len(state)} in the file, "
                f"{len(wanted)} in the model); the first that differs is number {index}: {_with_shape(theirs, state)} in the "
                f"file, {_with_shape(ours, wanted)} in the model"
            )
            raise SpecError(finding, path=("weights", "order"))
    return dict(zip(wanted, state.values(), strict=True))


def _with_shape(key: str | None, state: Mapping[str, torch.Tensor]) -> str:
    return "none" if key is None else f"{key} {list(state[key].shape)}"


def _renamed(model: nn.Module, state: State, spec: WeightsSpec) -> State:
    """Return the file's tensors under the keys in `keys`; tensors of a list are concatenated."""
    wanted = model.state_dict()
    out: State = {}
    used: set[str] = set()
    for pattern, names in spec.keys.items():
        matched = select(pattern, wanted)
        if not matched:
            hint = did_you_mean(pattern, wanted)
            raise SpecError(f"'{pattern}' is not a key of the model{hint}", path=("weights", "keys"))
        for key, caught in matched.items():
            parts = [_filled(name, caught) for name in ([names] if isinstance(names, str) else names)]
            for part in parts:
                if part not in state:
                    finding = f"'{part}', wanted for '{key}', is not a key of the file{did_you_mean(part, state)}"
                    raise SpecError(finding, path=("weights", "keys"))
            used.update(parts)
            out[key] = _joined(key, [state[part] for part in parts], wanted[key])
    return {**out, **{key: value for key, value in state.items() if key not in used}}


def _filled(text: str, caught: Mapping[str, str]) -> str:
    for name, value in caught.items():
        text = text.replace("{" + name + "}", value)
    return text


def _joined(key: str, parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Concatenate parts along the one dimension that gives the model's shape."""
    if len(parts) == 1:
        return parts[0]
    shapes = [list(part.shape) for part in parts]
    for dim in range(like.dim()):
        same = all(part.dim() == like.dim() for part in parts)
        rest = [[n for d, n in enumerate(shape) if d != dim] for shape in (*shapes, list(like.shape))]
        if same and all(r == rest[0] for r in rest) and sum(s[dim] for s in shapes) == like.shape[dim]:
            return torch.cat(parts, dim)
    finding = f"tensors of shapes {', '.join(map(str, shapes))} cannot be concatenated to the {list(like.shape)} of '{key}'"
    raise SpecError(finding, path=("weights", "keys"))


def _assign(model: nn.Module, state: State, name: str) -> None:
    """Copy a state into the model; every key must exist in both."""
    wanted = model.state_dict(keep_vars=True)
    present = {id(wanted[key]) for key in state if key in wanted}  # of tied weights a file may hold one
    missing = [k for k in wanted if k not in state and id(wanted[k]) not in present and not k.endswith("num_batches_tracked")]
    unexpected = [k for k in state if k not in wanted]
    wrong = [k for k in state if k in wanted and state[k].shape != wanted[k].shape]
    if missing or unexpected or wrong:
        counts = f"{len(missing)} keys missing, {len(unexpected)} unexpected, {len(wrong)} of another shape"
        lines = [f"{name} does not fit {type(model).__name__}: {counts}"]
        lines += _listed("missing", missing, wanted, "there is", unexpected, state)
        lines += _listed("unexpected", unexpected, state, "wanted is", missing, wanted)
        lines += [f"  another shape: {_with_shape(k, state)}, the model has {list(wanted[k].shape)}" for k in wrong[:SHOWN]]
        raise SpecError("\n".join(lines), path=("weights",))
    for key, value in state.items():
        if wanted[key].is_floating_point() and not value.is_floating_point():
            finding = (
                f"{name} has {value.dtype} for '{key}', which is {wanted[key].dtype} in the model: give it as floating point"
            )
            raise SpecError(finding, path=("weights",))
    model.load_state_dict(state, strict=False)


def _listed(
    what: str, keys: list[str], own: Mapping[str, torch.Tensor], near: str, pool: list[str], others: Mapping[str, torch.Tensor]
) -> Iterator[str]:
    for key in keys[:SHOWN]:
        hit = find_nearest(key, pool)
        hint = f" ({near} {_with_shape(hit, others)})" if hit else ""
        yield f"  {what}: {_with_shape(key, own)}{hint}"
    if len(keys) > SHOWN:
        yield f"  {what}: ... {len(keys) - SHOWN} more"


def _on_meta(model: nn.Module) -> bool:
    return any(p.is_meta for p in model.parameters())
