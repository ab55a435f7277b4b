"""The adapters that a module holds, as the entries of a file: those of a slot, and those of passes that were trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks.base import get_kind
from ..blocks.scale import Scale
from ..core.errors import ArtifactError, SpecError, format_fields
from ..core.quantised import get_weight_shape, is_transposed
from .banks import Bank
from .file_tensors import explain_unreadable
from .loading import get_slotless_passes, make_bank
from .saved_heads import as_entries, get_merged_heads, get_trained_layers
from .updates import Entry


@dataclass(frozen=True)
class ModelLayer:
    """A layer of a model: its class, the shape of its weight as its product has it, and its groups.

    That of one that is `transposed` holds it the other way round.
    """

    kind: str
    shape: tuple[int, ...]
    groups: int = 1
    transposed: bool = False


@dataclass(frozen=True)
class AdapterContents:
    """What is to be written: the updates by layer, and what of the module no adapter file holds, by place, with the reason.

    `heads` are the parameters of layers that a pass made anew, by key.
    """

    entries: tuple[Entry, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    heads: Mapping[str, Tensor] = field(default_factory=dict)

    __repr__ = format_fields


def list_layers(module: nn.Module, dims: int = 2) -> dict[str, ModelLayer]:
    """Return the layers of a module whose weight has `dims` or more dimensions, by path, without those that passes inserted."""
    found = {}
    added = {entry["name"] for entry in getattr(module, "meta", {}).get("passes", [])}
    for path, layer in module.named_modules():
        weight = layer._parameters.get("weight")
        if path and weight is not None and weight.dim() >= dims and path.partition(".")[0] not in added:
            kind = next((c.__name__ for c in type(layer).__mro__ if c.__module__.startswith("torch.nn.")), "")
            turned = is_transposed(layer)
            groups = int(getattr(layer, "groups", 1))
            found[path] = ModelLayer("Linear" if turned else kind, get_weight_shape(layer, weight), groups, turned)
    return found


# --- slots


def read_slots(
    slots: Iterable[tuple[str, Bank, int]],
    tensor: Callable[[str], Tensor],
    layers: Mapping[str, ModelLayer],
    records: Iterable[Mapping[str, Any]],
) -> AdapterContents:
    """Read what banks hold of an adapter: of each, with the name of its pass, the slot that the adapter has.

    `tensor` gives a tensor of a bank by name, `layers` are those of the model, and `records` what it remembers of its passes.
    The caller holds the slots meanwhile.
    """
    entries: list[Entry] = []
    at = [(site["block"], site["path"].partition("@")[0]) for entry in records for site in entry["sites"]]
    for p, bank, slot in slots:
        known = layers.get(bank.path)
        own = {key: bank.views(key, tensor(name), slot).detach().cpu().clone() for key, name in bank.names.items()}
        entry = _in_slot(bank, own, p, known is not None and known.kind == "Embedding")
        paths = {bank.path: 0, **{path: 0 for block, path in at if block == bank.block}}  # tied layers have one block
        entries += [] if entry is None else [replace(entry, name=path, path=path) for path in paths]
    return AdapterContents(tuple(entries))


def _in_slot(bank: Bank, own: dict[str, Tensor], p: str, table: bool) -> Entry | None:
    """Return the update in one slot of a bank's tensors; None if the slot is empty."""
    if bank.has_gain:
        return _of_gained(bank, own, p)
    telling = [own["magnitude"]] if "magnitude" in own else own.values()
    if not any(value.any() for value in telling):
        return None  # a layer that the adapter has nothing for
    loose = {key: bank.update_kind.rank_dims(key, own) if bank.is_stacked else (1,) for key in own}
    rank = max([1, *(_reach(own[key], dim) for key in own for dim in loose[key])])
    return _entry(bank, {key: _cut(value, loose[key], rank) for key, value in own.items()}, 1.0, p, table)


def has_dora(own: Mapping[str, Tensor]) -> bool:
    """Return whether a slot without magnitudes, as an export has it, holds DoRA: (IA)3 has a gain and nothing else."""
    return bool(own["gain"].any() and (own["up"].any() or ("shift" in own and own["shift"].any())))


def _of_gained(bank: Bank, own: dict[str, Tensor], p: str) -> Entry | None:
    """Return what one slot of a bank with gains holds: DoRA, (IA)3 or LoRA; None if the slot is empty."""
    gain = own["gain"]
    magnitude = own.get("magnitude", torch.zeros(1))
    if "magnitude" not in own and has_dora(own):
        raise SpecError(f"the adapter has DoRA at '{bank.path}', whose magnitudes no export has: save it from the module")
    if gain.any() and not magnitude.any():
        gate = (gain.to(torch.promote_types(gain.dtype, torch.float32)) + 1).to(gain.dtype)
        ia3 = Scale.update_kind
        return Entry(bank.path, bank.path, p, ia3.name, {"gate": gate}, 1.0, 0, method=ia3.method, options={"side": "output"})
    plain = _in_slot(replace(bank, parameters=("down", "up")), {key: own[key] for key in ("down", "up")}, p, False)
    if plain is None and magnitude.any():  # whose product is zero: the norms alone are others
        cut = {key: own[key].narrow(dim, 0, 1) for key, dim in (("down", 1), ("up", 1))}
        plain = _entry(replace(bank, parameters=("down", "up")), cut, 1.0, p, False)
    if plain is None or not magnitude.any():
        return plain
    return replace(plain, kind="dora", tensors={**plain.tensors, "magnitude": magnitude.contiguous()})


def _entry(bank: Bank, values: dict[str, Tensor], scale: float, p: str, table: bool) -> Entry:
    of, kind = bank.update_kind, bank.update_kind.name
    if of.whole:
        own = {"delta": values["delta"].contiguous()}
        return Entry(bank.path, bank.path, p, kind, own, 1.0, 0, param=bank.param, method=of.method)
    if bank.gates:
        gate = values["gate"]
        own = {"gate": (gate.to(torch.promote_types(gate.dtype, torch.float32)) + 1).to(gate.dtype) if bank.slots else gate}
        return Entry(bank.path, bank.path, p, kind, own, 1.0, 0, method=of.method, options=dict(bank.options))
    if of.is_decomposed:
        values["magnitude"] = values["magnitude"].flatten()
        kind = f"{kind} by input" if bank.dim != int(table) else kind  # a table's outputs are its second dimension
    embedding = bank.kind == "Embedding"
    if not bank.maps:
        values["down"] = values["down"].T if embedding else values["down"].flatten(0, 1)
    kind = f"{kind}+bias" if "bias" in values else kind
    tensors = {key: value.contiguous() for key, value in values.items()}
    options = {"experts": bank.experts, "by_expert": True, "transposed": bank.transposed} if bank.experts else {}
    param = bank.param if bank.maps else "weight"
    return Entry(bank.path, bank.path, p, kind, tensors, scale, of.rank(values), embedding, param=param, options=options)


def _reach(value: Tensor, dim: int) -> int:
    """Return the index after the last nonzero entry along a dimension."""
    used = value.movedim(dim, 0).flatten(1).any(1).nonzero()
    return int(used.max()) + 1 if len(used) else 0


def _cut(value: Tensor, dims: Iterable[int], rank: int) -> Tensor:
    for dim in dims:
        value = value.narrow(dim, 0, min(rank, value.shape[dim]))
    return value


# --- passes


def read_trained(module: Any, passes: Sequence[str] | None = None, *, strict: bool = True) -> AdapterContents:
    """Return the updates of passes without slots, and the layers of the base model that were trained with them, whole.

    `passes` selects passes by name; None selects all that have updates.

    Raises SpecError for an unknown name, for a pass with slots, and if there is none; with `strict` also if no update can be
    represented in a file.
    """
    wanted = get_slotless_passes(module, passes)
    entries: dict[str, Entry] = {}
    left: dict[str, str] = {}
    done: set[tuple[str, str]] = set()
    for name, record in wanted.items():
        for site in record["sites"]:
            block, path = site["block"], site["path"].partition("@")[0]
            if not block or (block, path) in done:
                continue
            done.add((block, path))  # tied layers have one block
            made = module.get_submodule(block)
            if getattr(made, "resizes", False):
                continue  # `get_merged_heads` has it
            kind = get_kind(made)
            gates = kind is not None and kind.place == "after" and bool(kind.method)
            if kind is None or (kind.method and not kind.whole and not gates):
                left[path] = f"{name} has a {type(made).__name__} there, which no adapter format can represent"
            elif site.get("apart"):
                left[path] = f"{name} has a block there that does not run beside every call of the layer, on its input"
            elif site["place"] != kind.place and not (gates and site["place"] == "before"):
                left[path] = f"{name} has a {type(made).__name__} there with place '{site['place']}', not beside the layer"
            elif (entry := _of_block(module, site, path, name)) and entries.setdefault(entry.key(path), entry) is not entry:
                left[entry.key(path)] = f"{name} has a second update there: choose with passes="
    whole = as_entries(module, get_trained_layers(module))
    if not entries and not wanted and not whole:
        slots = getattr(module, "meta", {}).get("passes")
        other = "; to save an adapter from slots, name it: module.adapters.save(name, ...)" if slots else ""
        raise SpecError(f"no pass without slots is applied here, so there is nothing to save{other}")
    if strict and not entries and not whole:
        raise SpecError(
            f"{' and '.join(wanted)}: has no low-rank updates{''.join(f': {why}' for why in list(left.values())[:1])}; "
            "write it with as_='fxplug', or the whole module with fxplug.save"
        )
    return AdapterContents((*entries.values(), *whole), left, get_merged_heads(module, list(wanted)))


def _of_block(module: nn.Module, site: Mapping[str, Any], path: str, name: str) -> Entry | None:
    """Return the update of one block; None for a change that is zero."""
    block: Any = module.get_submodule(site["block"])
    if shared := block.update_kind.shared:
        own = block.product(*(module.get_buffer(f"{name}.{one}").detach().cpu() for one in shared))
        return Entry(path, path, name, "lora", own, 1.0, len(own["down"]))
    bank = make_bank(module, site)
    assert bank is not None
    state = dict(block.state_dict(prefix=f"{bank.block}.", keep_vars=True))
    if odd := next((text for value in state.values() if (text := explain_unreadable(value))), ""):
        raise ArtifactError(f"the update of '{path}' {odd}")
    if any(value.is_meta for value in state.values()):
        raise ArtifactError(f"the update of '{path}' is on the meta device and has no values")
    if dtypes := [state[key].dtype for key in bank.names.values() if not state[key].is_floating_point()]:
        raise ArtifactError(f"the update of '{path}' is {dtypes[0]}; an adapter's weights must be floating point")
    own = {key: bank.views(key, state[tensor], 0).detach().cpu().clone() for key, tensor in bank.names.items()}
    if bank.update_kind.whole:
        return _entry(bank, own, 1.0, name, False) if own["delta"].any() else None
    if bank.gates:
        return _entry(bank, own, 1.0, name, False)
    if f"{bank.block}.scale" not in state:
        raise ArtifactError(f"the update of '{path}' is a bank of slots, and the record of {name} says that it has none")
    return _entry(bank, own, float(state[f"{bank.block}.scale"]), name, False)
