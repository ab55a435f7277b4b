"""Layers that an adapter file holds whole, such as a new head: PEFT's `modules_to_save`."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import ArtifactError
from ..core.ir.traced_module import BEFORE_TRAINING, TRAINED
from ..core.quantised import is_packed
from ..core.torch_internals.modules import NormBase
from .updates import AdapterFile, Entry

BIAS = ".base_layer.bias"  # of a layer with an update, where the configuration says `bias`
STATISTICS = ("running_mean", "running_var")


def get_trained_layers(module: Any) -> dict[str, Tensor]:
    """Return the base parameters that `trainable` made trainable, under all their names; none if it was not called.

    Those made trainable by `requires_grad_` since are included.
    """
    noted = getattr(module, "meta", {}).get(TRAINED)
    if noted is None:
        return {}
    added = {entry["name"] for entry in module.meta.get("passes", [])}
    rows = [row for row in module.named_parameters(remove_duplicate=False) if row[0].partition(".")[0] not in added]
    chosen = {id(p) for name, p in rows if name in noted or p.requires_grad}
    found: dict[str, Tensor] = {name: p for name, p in rows if id(p) in chosen and not is_packed(p)}
    for name in list(found):  # the statistics of a norm that trains are trained with it
        path, _, _ = name.rpartition(".")
        layer = module.get_submodule(path)
        if isinstance(layer, NormBase) and layer.running_mean is not None:
            found |= {f"{path}.{key}": layer.get_buffer(key) for key in STATISTICS}
    return found


def as_entries(module: Any, tensors: Mapping[str, Tensor]) -> list[Entry]:
    """Return whole parameters as entries of a file. Raises ArtifactError for one on the meta device."""
    before = vars(module).get(BEFORE_TRAINING, {})
    first = {id(tensors[name]): value for name, value in before.items() if name in tensors}
    made = []
    for key, value in tensors.items():
        if value.is_meta:
            raise ArtifactError(f"'{key}' was trained, and is on the meta device and has no values")
        path, _, param = key.rpartition(".")
        whole, base = {"whole": value.detach().cpu().clone()}, first.get(id(value))
        made.append(Entry(path, path, "", "delta", whole, 1.0, 0, param=param, method="whole", base=base))
    return made


def as_changes(entries: Sequence[Entry], low_rank: bool) -> list[Entry]:
    """Return updates in which whole parameters are replaced by their differences to before the training, if these are known.

    For a format without differences, with `low_rank`, that of a weight is a LoRA of full rank, one factor being the
    identity.
    """
    updated = {entry.path for entry in entries if entry.method != "whole"}
    made = []
    for entry in entries:
        if entry.method == "whole" and entry.base is not None and entry.param in ("weight", "bias"):
            change = entry.tensors["whole"] - entry.base.to(entry.tensors["whole"])
            if not low_rank or entry.param == "bias":
                entry = replace(entry, method="diff", tensors={"delta": change}, base=None)
            elif change.dim() > 1 and entry.path not in updated:
                tensors = full_rank_factors(change)
                rank = len(tensors["down"])
                entry = replace(entry, kind="lora", method="", tensors=tensors, rank=rank, base=None)
        made.append(entry)
    return made


def full_rank_factors(change: Tensor) -> dict[str, Tensor]:
    """Return `down` and `up` of a LoRA whose product is this change of the weight of a linear layer or of a convolution."""
    out, inner = change.shape[0], change[0].numel()
    around = [1] * (change.dim() - 2)
    if out <= inner:
        return {"down": change, "up": torch.eye(out, dtype=change.dtype).reshape(out, out, *around)}
    down = torch.eye(inner, dtype=change.dtype).reshape(inner, *change.shape[1:])
    return {"down": down, "up": change.reshape(out, inner, *around)}


def get_merged_heads(module: nn.Module, passes: list[str]) -> dict[str, Tensor]:
    """Return the parameters of layers that passes gave another size, by their key after a merge, on the CPU."""
    found: dict[str, Tensor] = {}
    for key, value in _resized(module, passes):
        if value.is_meta:
            raise ArtifactError(f"the new '{key}' is on the meta device and has no values")
        found[key] = value.detach().cpu().clone()
    return found


def without_heads(file: AdapterFile, module: Any) -> tuple[AdapterFile, list[tuple[Tensor, Tensor]]]:
    """Return a file without the whole layers that are new here, or trainable; and these, each with its new value.

    Raises ArtifactError for one of yet another size.
    """
    if not any(entry.method == "whole" for entry in file.entries):
        return file, []
    homes = {**find_resized_layers(module), **get_trained_layers(module)}
    layers = {name.rpartition(".")[0] for name in homes}
    values: list[tuple[Tensor, Tensor]] = []
    rest: list[Entry] = []
    for entry in file.entries:
        # what is a part of pipelines elsewhere is a module of some models, as GPT-2's `transformer`
        paths = [entry.path, f"{entry.part}.{entry.path}"] if entry.method == "whole" else []
        home = next((homes[name] for path in paths if (name := f"{path}.{entry.param}".lstrip(".")) in homes), None)
        if home is None:
            if not any(path in layers and _is_value_of(path, entry, module) for path in paths):
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


def _is_value_of(path: str, entry: Entry, module: nn.Module) -> bool:
    """Return whether a file's value equals a parameter here: PEFT saves a whole layer if one parameter of it trained."""
    layer = dict(module.named_modules()).get(path)
    here = getattr(layer, entry.param, None)
    return isinstance(here, Tensor) and not here.is_meta and torch.equal(here.detach().cpu(), entry.tensors["whole"].cpu())


def list_changed_layers(
    changes: Sequence[Entry], adapted: Sequence[Entry], there: Callable[[str], Tensor | None]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return parameters with whole changes, and those that a file has whole, as PEFT's `modules_to_save`, by key.

    The second result is those that cannot be saved so, by place, with the reason. `adapted` are the updates; those of LoRA and
    DoRA may have the bias of their layer beside them. `there` returns a parameter of the model by its name.
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
        elif not entry.path:
            left[entry.param] = "is a whole parameter of the model itself, and PEFT saves layers: use as_='fxplug'"
        elif any(owner.endswith(entry.path) for owner in owners):
            why = "is a whole parameter in a layer with an update, which PEFT cannot represent: use as_='fxplug'"
            other = "has a whole change, which PEFT would also apply to a layer with another update"
            left[entry.key(entry.path)] = other if entry.method == "diff" else why
        elif value is None:
            why = "has a whole change, for which PEFT needs the parameter, and its values are not available"
            left[entry.key(entry.path)] = why
        else:
            for name in ("weight", "bias", *STATISTICS, "num_batches_tracked"):  # which PEFT has, too
                beside = there(f"{entry.path}.{name}")
                if beside is not None and not beside.is_meta:
                    made.setdefault(f"{entry.path}.{name}", beside.detach().cpu().clone())
            made[key] = value.detach().cpu()
    return made, left


def _biased(entries: Iterable[Entry]) -> set[str]:
    return {entry.path for entry in entries if entry.kind in ("lora", "dora") and not entry.method}


def _with_owners(paths: Iterable[str]) -> set[str]:
    """Return paths, and those of all modules around them."""
    return {".".join(path.split(".")[:n]) for path in paths for n in range(1, path.count(".") + 2)}


def find_resized_layers(module: Any) -> dict[str, Tensor]:
    """Return the parameters of other sizes, or with other values, by the names of those they replace."""
    return dict(_resized(module))


def _resized(module: Any, passes: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    modules = dict(module.named_modules()) if isinstance(module, nn.Module) else {}  # lowered, blocks may lie elsewhere
    for entry in getattr(module, "meta", {}).get("passes", []):
        for site in entry["sites"] if passes is None or entry["name"] in passes else ():
            block: Any = modules.get(site["block"])
            if getattr(block, "resizes", False):
                yield f"{site['path'].partition('@')[0]}.{site.get('param', 'weight')}", block.value
