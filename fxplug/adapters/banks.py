"""Banks of slots: how the tensors of one layer hold several adapters, and what of an adapter goes into them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..blocks import list_update_kinds
from ..blocks.base import UpdateKind
from ..blocks.lora import Lora
from ..blocks.low_rank import view_slot
from ..core.errors import SpecError, format_fields, quote
from ..core.quantised import is_packed
from .updates import Entry


@dataclass(frozen=True)
class Bank:
    """The slots at one layer: what `apply` keeps of a block with slots, plain values all.

    `path` is the layer, `block` the module that holds the bank, `kind` the kind of layer beside which a low-rank update runs
    (Linear, Conv2d, Embedding), or the `make_kind_key` of any other block, and `param` the parameter that this maps; `shape` is
    the parameter's, `dim` that of the channels that have magnitudes. The layer of one that is `transposed` holds its weight as
    (in, out); `shape` is (out, in), but that of a change of the whole. With `experts` it is (experts, n, m), and an update for
    each of them. `group` is that of a pass's groups of layers.
    """

    path: str
    block: str
    kind: str
    slots: int
    rank: int
    shape: tuple[int, ...]
    groups: int = 1
    parameters: tuple[str, ...] = ("down", "up")
    param: str = "weight"
    dim: int = 0
    transposed: bool = False
    experts: int = 0
    group: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)  # of a block without slots: what the tensors mean there

    __repr__ = format_fields

    @classmethod
    def of(cls, site: Mapping[str, Any]) -> Bank:
        """Return the bank of a site, as recorded by `apply`."""
        values: dict[str, Any] = dict(site["bank"])
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        return cls(site["path"].partition("@")[0], site["block"], **values)

    @property
    def update_kind(self) -> UpdateKind:
        """Kind of update that the bank holds."""
        found = list_update_kinds().get(self.kind)
        if found is None and ":" in self.kind:
            raise SpecError(f"the slots at '{self.path}' are of {quote(self.kind)}, whose module is not imported: import it")
        return found or Lora.update_kind

    def plainly(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {key: value for key, value in vars(self).items() if key != "options"}

    @property
    def names(self) -> dict[str, str]:
        """State dict names of the parameters."""
        return {key: f"{self.block}.{self.update_kind.state.get(key, key)}" for key in self.parameters}

    @property
    def key(self) -> str:
        """Key of the place: the layer's path, followed by the parameter's name unless it is the weight."""
        return f"{self.path}.{self.param}".lstrip(".") if self.maps and self.param != "weight" else self.path

    @property
    def biased(self) -> bool:
        """Return whether the update has a bias."""
        return "bias" in self.parameters

    @property
    def gates(self) -> bool:
        """Return whether the block wraps its layer and changes the bias along with the weight."""
        return self.update_kind.place == "after" and bool(self.update_kind.method)

    @property
    def has_gain(self) -> bool:
        """Return whether the block adds to its layer's result and multiplies it: it holds LoRA, DoRA and (IA)3."""
        return "gain" in self.parameters

    def without_magnitude(self) -> Bank:
        """Return the bank as an export has it, whose program reads gains and not the magnitudes that they were made of."""
        return replace(self, parameters=tuple(key for key in self.parameters if not (self.has_gain and key == "magnitude")))

    @property
    def maps(self) -> bool:
        """Return whether the block maps the weight itself, with the slots as the first dimension of its parameters."""
        return self.is_stacked and self.update_kind.place == "param"

    @property
    def is_stacked(self) -> bool:
        """Return whether the slots are the first dimension of the block's parameters."""
        return self.update_kind.slots == "first"

    def views(self, name: str, tensor: Tensor, slot: int) -> Tensor:
        """Return a view of one slot of one of the bank's tensors; (groups, rank, ...) for the `down` of a grouped
        convolution."""
        if self.update_kind.slots != "inner" or name not in ("down", "up"):
            return tensor[slot] if self.slots else tensor
        turned = name == "up" or self.kind == "Embedding"
        return view_slot(tensor, slot, max(self.slots, 1), 0 if turned else self.groups)

    def fitted(self, key: str, tensor: Tensor, value: Tensor, entry: Entry) -> Tensor:
        """Values for a slot of `tensor`, one of the bank's, scaled, in its dtype. Raises SpecError where they do not fit."""
        if value.is_meta and not tensor.is_meta:
            raise SpecError(f"'{entry.name}': its {key} is on the meta device and has no values: give the file itself")
        target = self.views(key, tensor, 0)
        loose = self.update_kind.rank_dims(key, self.parameters)
        if self.update_kind.slots == "inner":
            loose = (1,) if key in ("down", "up") else ()
        fits = target.dim() == value.dim() and all(
            n == m or (d in loose and n < m) for d, (n, m) in enumerate(zip(value.shape, target.shape, strict=True))
        )
        if not fits:
            raise SpecError(
                f"'{entry.name}' has a {key} of {list(value.shape)}, and the slots at '{self.path}' take {list(target.shape)}: "
                "apply the pass with the options that the adapter was trained with"
            )
        if self.slots and self.gates:  # a slot that is empty changes nothing: it has what a gate has beyond one
            value = value.to(torch.promote_types(value.dtype, torch.float32)) - 1
        takes = bool(self.slots) and not self.gates and key == self.update_kind.scaled(self.parameters)
        if value.dtype == tensor.dtype != torch.float64 and (not takes or entry.scale == 1):
            return value  # whose reader has seen that its numbers are finite
        wide = value.to(torch.promote_types(value.dtype, torch.float32))
        made = (wide * entry.scale if takes else value).to(tensor.dtype)
        if not made.is_meta and not torch.isfinite(made).all():
            raise SpecError(f"'{entry.name}': its {key} has numbers out of range for {tensor.dtype}, the dtype of the slots")
        return made


def check_name(name: Any, room: int) -> None:
    """Raises SpecError unless a name for an adapter is a text of at most so many bytes."""
    raw = name.encode(errors="ignore") if isinstance(name, str) else b""
    if not raw.strip() or b"\0" in raw or raw.decode() != name or len(raw) > room:
        raise SpecError(f"an adapter's name must be text of at most {room} bytes, not {quote(name)}")


def is_finite(value: Any) -> bool:
    """Return whether a value is a finite number that a float can represent: no bool, NaN or infinity, and no integer out of
    range."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def values_for(bank: Bank, entry: Entry, base: Tensor | None) -> tuple[int, dict[str, Tensor]]:
    """Return an entry's rank and its tensors in the bank's layout, not scaled yet. Raises SpecError for another kind. Raises
    SpecError for another kind.

    `base` are the values of the parameter, if they are at hand.
    """
    kind = bank.update_kind
    if kind.whole:
        return 1, {"delta": _change(bank, entry, base)}
    if bank.has_gain and entry.method:
        gate = entry.tensors["gate"].flatten()
        return 0, {"gain": gate.to(torch.promote_types(gate.dtype, torch.float32)) - 1}
    if kind.method:
        return 0, _as_is(bank, entry)
    if kind.is_product and not kind.is_plain:
        tensors = dict(entry.tensors)
        rank = max((tensors[key].shape[dim] for key in tensors for dim in kind.rank_dims(key, tensors)), default=0)
        cores = any(name.replace("w", "t") in tensors for name in kind.factors)
        for whole in kind.factors:
            split = whole in bank.names and f"{whole}_a" in tensors and not cores
            if split and (shape := _shape_without_factors(bank, entry, whole)):
                tensors[whole] = (tensors.pop(f"{whole}_a").float() @ tensors.pop(f"{whole}_b").float()).reshape(shape)
        if tensors.keys() != bank.names.keys():
            raise SpecError(
                f"'{entry.name}' has {', '.join(sorted(tensors))}, and the slots at '{bank.path}' are for "
                f"{', '.join(sorted(bank.names))}: apply the pass with the options that the adapter was trained with"
            )
        return rank, tensors
    if entry.experts and bank.maps and kind.is_plain:
        return entry.rank, entry.by_expert(bank.transposed)
    if (rank := entry.rank if kind.is_decomposed else entry.product_rank()) > bank.rank:
        return rank, {}
    magnitude = entry.tensors.get("magnitude")
    if bank.has_gain and magnitude is not None:
        check_base_values(bank, base)
        entry = entry.without_magnitude()
        magnitude = magnitude.flatten()
    entry = entry if kind.is_decomposed or entry.kind == "lora+bias" else entry.as_lora(bank.shape)
    entry = entry.as_one_group() if bank.maps else entry
    down, up = entry.pair("Linear" if bank.maps else bank.kind)
    rank = up.shape[1]
    if not bank.maps and bank.kind != "Embedding":
        groups = len(down) // rank
        if groups not in (1, bank.groups):
            raise SpecError(
                f"'{entry.name}' is for a convolution of {groups} groups, and '{bank.path}' has {bank.groups}: it was trained "
                "for another layer"
            )
        down = torch.unflatten(down, 0, (groups, -1)).expand(bank.groups, *[-1] * down.dim())
    if bank.biased:
        bias = entry.tensors.get("bias")
        return rank, {"down": down, "up": up, "bias": torch.zeros(up.shape[0]) if bias is None else bias}
    if magnitude is None:
        return rank, {"down": down, "up": up}
    if not magnitude.is_meta and not magnitude.any():
        raise SpecError(f"'{entry.name}': its magnitudes are all zero, which marks an empty slot, so it cannot be loaded")
    return rank, {"down": down, "up": up, "magnitude": magnitude}


def _as_is(bank: Bank, entry: Entry) -> dict[str, Tensor]:
    """Return the tensors of an entry for a block with its own method. Raises SpecError if its options differ from the
    block's."""
    wrong = {key: entry.options[key] for key, value in bank.options.items() if entry.options.get(key, value) != value}
    if wrong:
        settings = ", ".join(f"{key}={value!r}" for key, value in wrong.items())
        raise SpecError(
            f"'{entry.name}' is {entry.kind} with {settings}, and the block at '{bank.path}' has "
            f"{', '.join(f'{key}={bank.options[key]!r}' for key in wrong)}: apply the pass with the options that the adapter "
            "was trained with"
        )
    return dict(entry.tensors)


def check_base_values(bank: Bank, base: Tensor | None) -> Tensor:
    """Return the weight of which the gain of an adapter with magnitudes is made. Raises SpecError where it has no values."""
    where = f"an adapter with magnitudes (DoRA) needs the weight of '{bank.path}'"
    if base is None:
        raise SpecError(f"{where}, which this module does not have: load it into the module that this was made from")
    if base.is_meta:
        raise SpecError(f"{where}, which is on the meta device and has no values: move the module to another device")
    if not base.is_floating_point() or is_packed(base):
        raise SpecError(f"{where}, which is quantised: load it into slots on the base's own weights")
    return base


def _change(bank: Bank, entry: Entry, base: Tensor | None) -> Tensor:
    """Return the change that an entry of any kind makes to a parameter: as in the file, or in float32 from the parameter's
    values."""
    if entry.method == "diff":
        return entry.tensors["delta"].reshape(bank.shape)
    where = f"'{entry.name}' is {entry.method or entry.kind}, a function of the weight of '{bank.path}'"
    if bank.transposed and bank.param == "weight" and entry.method != "whole":
        raise SpecError(f"{where}, which is stored as (in, out): load it into slots of lora, lora_weight or dora")
    if base is None:
        raise SpecError(f"{where}, which this module does not have: load it into the module that this was made from")
    if base.is_meta:
        raise SpecError(f"{where}, which is on the meta device and has no values: move the module to another device")
    if not base.is_floating_point():
        raise SpecError(f"{where}, which is quantised: load it into slots on the base's own weights")
    made = entry.changed(base.detach()) - base.detach().float()
    if not made.isfinite().all():
        raise SpecError(f"{where}, and the result is not finite (NaN or infinity)")
    return made


def candidate_banks(entry: Entry, banks: Sequence[Bank]) -> list[int]:
    """Return the indices of the banks at a place that may take an entry: those of its own kind first, then those with room for
    it.

    Any low-rank product fits a bank of plain ones, and everything fits a bank of whole changes.
    """
    base, *more = entry.kind.split("+")
    word, _, side = base.partition(" ")
    beside, kind = "bias" in more, entry.update_kind
    output = not entry.kind.endswith("by input") and entry.options.get("side", "output") == "output"
    gained = output and (kind.method == "gate" or kind.is_decomposed or "dora" in more)
    ways: list[Callable[[Bank], bool]] = []
    if kind.is_product and not any("dora" in one for one in more):
        ways = [lambda bank: bank.update_kind.name == word and not beside]
        if kind.is_low_rank:
            ways.append(lambda bank: bank.update_kind.is_plain and (bank.biased or not beside))
    elif not more:
        dim = int(bool(side)) ^ int(bool(entry.embedding))  # of the channels that have magnitudes
        ways = [lambda bank: bank.update_kind.name == word and (not kind.is_decomposed or bank.dim == dim)]
    if gained and not beside:
        ways.append(lambda bank: bank.has_gain)
    if not beside:
        ways.append(lambda bank: bank.update_kind.whole)
    return list(dict.fromkeys(n for way in ways for n, bank in enumerate(banks) if way(bank)))


def parted(placed: Mapping[str, Entry], homes: Mapping[str, Sequence[Bank]]) -> dict[str, Entry]:
    """Entries by place: a bias that the home of its update has no room for is one of its own, and a gate's is the gate's.

    Raises SpecError where that layer's bias is not changed by a sum.
    """
    made: dict[str, Entry] = {}
    for path, entry in placed.items():
        if path in made:
            continue  # part of a sum
        if entry.optional and any(bank.gates or bank.has_gain for bank in homes.get(path.removesuffix(f".{entry.param}"), ())):
            continue
        if "+bias" in entry.kind and not candidate_banks(entry, homes.get(path, ())):
            tensors = dict(entry.tensors)
            delta = tensors.pop("bias").float() * entry.scale
            made[path] = replace(entry, kind=entry.kind.replace("+bias", ""), tensors=tensors)
            if (other := placed.get(f"{path}.bias")) is not None:
                if other.method != "diff":
                    both = f"'{entry.name}' adds to a bias, which '{other.name}' changes by {other.method}"
                    raise SpecError(f"{both}: load one of them")
                delta = delta + other.tensors["delta"].float().flatten()
            more = {"kind": "delta", "method": "diff", "param": "bias", "tensors": {"delta": delta}, "scale": 1.0}
            path, entry = f"{path}.bias", replace(entry, **more)  # type: ignore[arg-type]
        made[path] = entry
    return made


def no_home(entry: Entry, key: str, banks: Sequence[Bank]) -> SpecError:
    """Return the error for an entry that no bank here can take; it names a pass that could."""
    names = {"lora, dora and ia3 of a layer's outputs" if bank.has_gain else bank.update_kind.name for bank in banks}
    here = f"the slots here are for {' and '.join(sorted(names))}" if banks else (
        "no pass here has slots for it"
    )
    path = key.removesuffix(f".{entry.param}") if entry.param != "weight" else key
    what = f"{entry.kind} ({entry.method})" if entry.method else entry.kind
    what = f"a change of '{key}'" if entry.method in ("diff", "whole") else what
    word, _, side = entry.kind.partition("+")[0].partition(" ")
    own = not (entry.update_kind.whole or entry.update_kind.is_low_rank)
    way = f"{word}{' with by=input' if side else ''} or delta" if own else "delta"
    return SpecError(
        f"'{entry.name}' is {what}, which is more than a low-rank update, and {here}: apply the pass {way} with at='{path}', "
        f"param='{entry.param}'"
    )


def make_rows(
    all_banks: Mapping[str, Sequence[Bank]], placed: Mapping[str, Entry], there: Callable[[str], Tensor | None]
) -> dict[str, list[tuple[Bank, str, str, Tensor]]]:
    """Return the values to write, by pass: bank, parameter, its name, values. Raises SpecError if an entry does not fit."""
    ready: dict[str, list[tuple[Bank, str, str, Tensor]]] = {}
    homes: dict[str, list[Bank]] = {}
    owner: dict[str, str] = {}
    for p, banks in all_banks.items():
        for bank in banks:
            homes.setdefault(bank.key, []).append(bank)
            owner[bank.block] = p
    high: list[tuple[str, int, Bank, str]] = []
    for path, entry in parted(placed, homes).items():
        here = homes.get(path, [])
        at = candidate_banks(entry, here)
        own = there(f"{path}.weight") if entry.base is not None else None
        if entry.base is not None and own is not None and not own.is_meta and not torch.equal(entry.base.to(own), own):
            raise SpecError(
                f"the file has the weight of '{path}' with which its update was trained, and the model's weight differs: set "
                "it in the model before the trace, or use the model that the adapter was trained on"
            )
        if not at:
            base = there(path if entry.param != "weight" else f"{path}.weight")
            if entry.method == "whole" and base is not None and torch.equal(entry.changed(base), base.float()):
                continue  # it is what is there
            raise no_home(entry, path, here)
        found = _first_fitting([here[n] for n in at], entry, there)
        if isinstance(found, int):
            high.append((path, found, here[at[0]], owner[here[at[0]].block]))
        else:
            ready.setdefault(owner[found[0][0].block], []).extend(found)
    if high:
        path, rank, bank, p = max(high, key=lambda row: row[1])
        word = "rank_max" if bank.slots else "rank"
        known = [placed[at] for at, *_ in high if at in placed]
        kind = next((entry.kind for entry in known if entry.is_low_rank and not entry.update_kind.is_plain), "")
        other = f", or apply the pass {kind}, which stores the factors as they are" if kind else ""
        way = f"apply pass '{p}' with {word}={rank}{other}"
        if bank.groups > 1:
            way = (
                f"apply the pass lora_weight with {word}={rank}, which has one product for all {bank.groups} groups of a "
                "convolution"
            )
        raise SpecError(
            f"{len(high)} layers of the adapter have a rank above {word}={bank.rank}, the highest of them {rank} at '{path}': "
            f"{way}"
        )
    return ready


def _first_fitting(
    banks: Sequence[Bank], entry: Entry, there: Callable[[str], Tensor | None]
) -> list[tuple[Bank, str, str, Tensor]] | int:
    """Return the values to write into the first bank that an entry fits; its rank, if that exceeds theirs.

    Raises SpecError as the first bank does if none takes it.
    """
    failed: SpecError | None = None
    high = 0
    for bank in banks:
        try:
            rank, values = values_for(bank, entry, there(f"{bank.path}.{bank.param}"))
            if rank <= bank.rank:
                scaled = replace(entry, scale=1.0) if bank.update_kind.whole else entry
                made = []
                for key, value in values.items():
                    tensor = there(bank.names[key])
                    assert tensor is not None, key
                    made.append((bank, key, bank.names[key], bank.fitted(key, tensor, value, scaled)))
                return made
            high = high or rank
        except SpecError as error:
            failed = failed or error
    if failed:
        raise failed
    return high


def _shape_without_factors(bank: Bank, entry: Entry, name: str) -> list[int]:
    """Return the shape of a factor that is decomposed in the file and whole in the bank: only the second one has the kernel.

    Empty if there is no such shape."""
    a, b = entry.tensors[f"{name}_a"].shape[0], entry.tensors[f"{name}_b"].shape[1]
    kernel = list(bank.shape[2:]) if name == bank.update_kind.factors[-1] else []
    return [] if b % math.prod(kernel) else [a, b // math.prod(kernel), *kernel]
