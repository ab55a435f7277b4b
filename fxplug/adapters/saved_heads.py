"""Layers that an adapter file holds whole, such as a new head: PEFT's `modules_to_save`."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..core import weight_files
from ..core.errors import DEFAULT, ArtifactError, Limits, SpecError, did_you_mean
from .file_keys import WRAPPED
from .find_tensors import find
from .updates import AdapterFile, Entry

BIAS = ".base_layer.bias"  # of a layer with an update, where the configuration says `bias`
BEFORE = "base_model.model."  # of every key in it


def saved_head(path: str | os.PathLike[str], layer: str, name: str, limits: Limits = DEFAULT) -> Tensor:
    """A parameter of a layer as an adapter file, or a checkpoint, has it; `path` is a file or a folder of PEFT.

    Raises ArtifactError for a file that cannot be read, and SpecError for one that has no such parameter.
    """
    file = find(Path(path))
    found, _ = weight_files.read(file, limits=limits)
    values = found if isinstance(found, Mapping) else {}
    known = {WRAPPED.sub("", str(key).removeprefix(BEFORE)): value for key, value in values.items()}
    value = known.get(f"{layer}.{name}")
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise SpecError(f"'{file}' has no '{layer}.{name}'{did_you_mean(f'{layer}.{name}', known)}")
    return value


def merged_heads(module: nn.Module, passes: list[str]) -> dict[str, Tensor]:
    """The parameters of layers that passes gave another size, by the key that they have once merged, on the CPU."""
    found: dict[str, Tensor] = {}
    for key, value in _resized(module, passes):
        if value.is_meta:
            raise ArtifactError(f"the new '{key}' is on the meta device and has no values")
        found[key] = value.detach().cpu().clone()
    return found


def without_heads(file: AdapterFile, module: Any) -> tuple[AdapterFile, list[tuple[Tensor, Tensor]]]:
    """A file without the layers that it has whole and that passes gave another size here; and these, each with its new value.

    Raises ArtifactError for one of yet another size.
    """
    if not any(entry.method == "whole" for entry in file.entries):
        return file, []
    homes = dict(_resized(module))
    values: list[tuple[Tensor, Tensor]] = []
    rest: list[Entry] = []
    for entry in file.entries:
        home = homes.get(f"{entry.path}.{entry.param}") if entry.method == "whole" else None
        if home is None:
            rest.append(entry)
            continue
        value = entry.tensors["whole"]
        if value.shape != home.shape:
            raise ArtifactError(
                f"{file.source}: its '{entry.path}' has the {entry.param} {list(value.shape)}, and the new layer here is "
                f"{list(home.shape)}: make it with {{weights: the file}}"
            )
        values.append((home, value))
    return (replace(file, entries=tuple(rest)) if values else file), values


def changed_layers(
    changes: Sequence[Entry], adapted: Sequence[Entry], there: Callable[[str], Tensor | None]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parameters with whole changes, and those that a file has whole, as PEFT's `modules_to_save` has them, by key.

    Second what cannot be so, by place, with the reason. `adapted` are the updates; those of LoRA and DoRA may have the bias of
    their layer beside them. `there` gives a parameter of the model by its name.
    """
    made: dict[str, Tensor] = {}
    left: dict[str, str] = {}
    owners, biased = _with_owners(entry.path for entry in adapted), _biased(adapted)
    for entry in changes:
        key, value = f"{entry.path}.{entry.param}", entry.tensors.get("whole")
        base = there(key)
        if value is None and base is not None and not base.is_meta and base.is_floating_point():
            value = base.detach().cpu() + entry.tensors["delta"].detach().cpu().reshape(base.shape)
        if value is not None and entry.param == "bias" and entry.path in biased:
            made[entry.path + BIAS] = value.detach().cpu()
        elif any(owner.endswith(entry.path) for owner in owners):
            why = "is a whole parameter beside an update of its layer: load the file, and save the adapter"
            other = "has a whole change, which PEFT would also apply to a layer with another update"
            left[entry.key(entry.path)] = other if entry.method == "diff" else why
        elif value is None:
            why = "has a whole change, for which PEFT needs the parameter, and its values are not available"
            left[entry.key(entry.path)] = why
        else:
            for name in ("weight", "bias"):
                beside = there(f"{entry.path}.{name}")
                if beside is not None and not beside.is_meta:
                    made.setdefault(f"{entry.path}.{name}", beside.detach().cpu().clone())
            made[key] = value.detach().cpu()
    return made, left


def _biased(entries: Iterable[Entry]) -> set[str]:
    return {entry.path for entry in entries if entry.kind in ("lora", "dora") and not entry.method}


def _with_owners(paths: Iterable[str]) -> set[str]:
    """Paths, and those of all that hold them."""
    return {".".join(path.split(".")[:n]) for path in paths for n in range(1, path.count(".") + 2)}


def _resized(module: Any, passes: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    modules = dict(module.named_modules()) if isinstance(module, nn.Module) else {}  # lowered, blocks may lie elsewhere
    for entry in getattr(module, "meta", {}).get("passes", []):
        for site in entry["sites"] if passes is None or entry["name"] in passes else ():
            block: Any = modules.get(site["block"])
            if getattr(block, "resizes", False):
                yield f"{site['path'].partition('@')[0]}.{'weight' if block.value.dim() > 1 else 'bias'}", block.value
