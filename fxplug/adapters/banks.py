"""Banks of slots: how the tensors of one layer hold several adapters, and what of an adapter goes into them."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import SpecError, brief_fields, shown
from ..low_rank import in_slot
from .slot_memory import LOST, SAID, lost, said, scaled
from .updates import Entry

# the dimensions of a parameter that are ranks; a bank is padded there and nowhere else
RANKS = {
    "down": (0,), "up": (1,),
    "hada_w1_a": (1,), "hada_w1_b": (0,), "hada_w2_a": (1,), "hada_w2_b": (0,), "hada_t1": (0, 1), "hada_t2": (0, 1),
    "lokr_w1": (), "lokr_w2": (), "lokr_w1_a": (1,), "lokr_w1_b": (0,), "lokr_w2_a": (1,), "lokr_w2_b": (0,), "lokr_t2": (0, 1),
}  # fmt: skip
SCALED = ("up", "hada_w2_b", "lokr_w2", "lokr_w2_b")  # which of a bank's parameters takes the adapter's scale


CORES = {"hada_w1_a": "hada_t1", "hada_w2_a": "hada_t2", "lokr_w2_a": "lokr_t2"}


def rank_dims(key: str, names: Container[str]) -> tuple[int, ...]:
    """The dimensions of one of an update's tensors that are ranks; `names` are those of all: before a core it is the first."""
    return (0,) if CORES.get(key) in names else RANKS[key]


def scaled_factor(names: Iterable[str]) -> str:
    """The one of an update's factors that takes its scale."""
    known = set(names)
    return next(name for name in SCALED if name in known)


@dataclass(frozen=True)
class Bank:
    """The slots at one layer: what `apply` keeps of a block with slots, plain values all.

    `path` is the layer, `block` the module that holds the bank, `kind` the kind of layer beside which a low-rank update runs
    (Linear, Conv2d, Embedding), or the class of block that maps the weight (LoraWeight, Loha, Lokr); `shape` is the weight's.
    """

    path: str
    block: str
    kind: str
    slots: int
    rank: int
    shape: tuple[int, ...]
    groups: int = 1
    parameters: tuple[str, ...] = ("down", "up")

    __repr__ = brief_fields

    @classmethod
    def of(cls, site: Mapping[str, Any]) -> Bank:
        """The bank of a site, as `apply` wrote it down."""
        said: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in site["bank"].items()}
        return cls(site["path"].partition("@")[0], site["block"], **said)

    @property
    def names(self) -> dict[str, str]:
        """The names of its parameters in the state dict."""
        if not self.maps:
            return {"down": f"{self.block}.down.weight", "up": f"{self.block}.up.weight"}
        return {key: f"{self.block}.{key}" for key in self.parameters}

    @property
    def memory(self) -> dict[str, str]:
        """The names of what it keeps of the files, see `slot_memory`; a package of an earlier version has none of them."""
        return {key: f"{self.block}.{key}" for key in (SAID, LOST)}

    @property
    def maps(self) -> bool:
        """Whether it maps the weight itself, so that its parameters have the slots as their first dimension."""
        return self.kind in ("LoraWeight", "Loha", "Lokr")

    def views(self, name: str, tensor: Tensor, slot: int) -> Tensor:
        """One slot of one of the bank's tensors: a view, in groups (groups, rank, ...) for a convolution's `down`."""
        if self.maps or name == SAID:
            return tensor[slot]
        name = scaled_factor(self.parameters) if name == LOST else name
        turned = name == "up" or self.kind == "Embedding"
        return in_slot(tensor, slot, self.slots, 0 if turned else self.groups)

    def fitted(self, key: str, tensor: Tensor, value: Tensor, entry: Entry) -> Tensor:
        """Values for a slot of `tensor`, one of the bank's, scaled, in its dtype. Raises SpecError where they do not fit."""
        target = self.views(key, tensor, 0)
        loose = rank_dims(key, self.parameters) if self.maps else (1,)
        fits = target.dim() == value.dim() and all(
            n == m or (d in loose and n < m) for d, (n, m) in enumerate(zip(value.shape, target.shape, strict=True))
        )
        if not fits:
            raise SpecError(
                f"'{entry.name}' has a {key} of {list(value.shape)}, and the bank at '{self.path}' takes {list(target.shape)}: "
                "apply the pass with the factors that the adapter was made with"
            )
        takes = key == scaled_factor(self.parameters)
        made = scaled(value, entry.scale, tensor.dtype) if takes else value.to(tensor.dtype)
        if not made.is_meta and not torch.isfinite(made).all():
            raise SpecError(f"'{entry.name}': its {key} has numbers beyond {tensor.dtype}, which the slots hold")
        return made

    def rows(
        self, entry: Entry, rank: int, values: Mapping[str, Tensor], there: Callable[[str], Tensor | None]
    ) -> Iterator[tuple[Bank, str, str, Tensor]]:
        """What to write for an entry, of that rank and with these values: this, what it is, the tensor's name, and the value.

        `there` gives the tensors of the module. Raises SpecError for values that do not fit.
        """
        factor = scaled_factor(values)
        for key, value in values.items():
            tensor = there(self.names[key])
            assert tensor is not None, key
            held = self.fitted(key, tensor, value, entry)
            yield self, key, self.names[key], held
            if key == factor and there(self.memory[SAID]) is not None:
                rank = entry.rank if self.kind in ("Loha", "Lokr") else rank
                meta = value.is_meta or held.is_meta
                steps = torch.zeros(held.shape, dtype=torch.int8) if meta else lost(value.cpu(), held.cpu(), entry.scale)
                yield self, SAID, self.memory[SAID], said(entry.scale, rank, value.dtype)
                yield self, LOST, self.memory[LOST], steps


def check_name(name: Any, room: int) -> None:
    """Raises SpecError unless a name for an adapter is a text of at most so many bytes."""
    raw = name.encode(errors="ignore") if isinstance(name, str) else b""
    if not raw.strip() or b"\0" in raw or raw.decode() != name or len(raw) > room:
        raise SpecError(f"an adapter's name is a text of at most {room} bytes, not {shown(name)}")


def values_for(bank: Bank, entry: Entry) -> tuple[int, dict[str, Tensor]]:
    """An entry's rank and its tensors as a bank holds them, not scaled yet. Raises SpecError for another kind."""
    if bank.kind in ("Loha", "Lokr"):
        if entry.kind != bank.kind.lower():
            raise SpecError(f"'{entry.name}' is {entry.kind}, and the slots at '{bank.path}' are for {bank.kind.lower()}")
        tensors = dict(entry.tensors)
        rank = max((tensors[key].shape[dim] for key in tensors for dim in rank_dims(key, tensors)), default=0)
        for whole in ("lokr_w1", "lokr_w2"):
            split = whole in bank.names and f"{whole}_a" in tensors and "lokr_t2" not in tensors
            if split and (shape := _whole(bank, entry, whole)):
                tensors[whole] = (tensors.pop(f"{whole}_a").float() @ tensors.pop(f"{whole}_b").float()).reshape(shape)
        if tensors.keys() != bank.names.keys():
            raise SpecError(
                f"'{entry.name}' has {', '.join(sorted(tensors))}, and the slots at '{bank.path}' are for "
                f"{', '.join(sorted(bank.names))}: apply the pass with the factors that the adapter was made with"
            )
    elif entry.kind not in ("lora", "loha", "lokr"):
        raise SpecError(
            f"'{entry.name}' is {entry.kind}, which is more than a low-rank update: it has no place in slots; apply it as a "
            "pass of its own"
        )
    elif (rank := entry.product_rank()) > bank.rank:
        return rank, {}
    else:
        entry = entry.as_lora(bank.shape)
        down, up = entry.pair("Linear" if bank.maps else bank.kind)
        rank = up.shape[1]
        if not bank.maps and bank.kind != "Embedding":
            groups = len(down) // rank
            if groups not in (1, bank.groups):
                raise SpecError(
                    f"'{entry.name}' is for a convolution of {groups} groups, and '{bank.path}' has {bank.groups}: it is made "
                    "for another layer"
                )
            down = torch.unflatten(down, 0, (groups, -1)).expand(bank.groups, *[-1] * down.dim())
        tensors = {"down": down, "up": up}
    return rank, tensors


def rows_for(
    all_banks: Mapping[str, Sequence[Bank]], placed: Mapping[str, Entry], there: Callable[[str], Tensor | None]
) -> dict[str, list[tuple[Bank, str, str, Tensor]]]:
    """What is to be written, by pass: bank, parameter, its name, values. Raises SpecError for what does not fit."""
    ready: dict[str, list[tuple[Bank, str, str, Tensor]]] = {}
    homes: dict[str, list[tuple[str, Bank]]] = {}
    for p, banks in all_banks.items():
        for bank in banks:
            homes.setdefault(bank.path, []).append((p, bank))
    high: list[tuple[str, int, Bank, str]] = []
    for path, entry in placed.items():
        rows = homes[path]
        same = [(p, bank) for p, bank in rows if bank.kind.lower() == entry.kind]
        p, bank = (same or rows)[0]
        rank, values = values_for(bank, entry)
        if rank > bank.rank:
            high.append((path, rank, bank, p))
            continue
        ready.setdefault(p, []).extend(bank.rows(entry, rank, values, there))
    if high:
        path, rank, bank, p = max(high, key=lambda row: row[1])
        raise SpecError(
            f"{len(high)} layers of the adapter have a rank above rank_max={bank.rank}, the highest is {rank} at '{path}': "
            f"apply pass '{p}' with rank_max={rank}"
        )
    return ready


def _whole(bank: Bank, entry: Entry, name: str) -> list[int]:
    """The shape of a factor that the file has decomposed and the bank has whole: only the second has the kernel.

    Empty where it cannot have one."""
    a, b = entry.tensors[f"{name}_a"].shape[0], entry.tensors[f"{name}_b"].shape[1]
    kernel = list(bank.shape[2:]) if name == "lokr_w2" else []
    return [] if b % math.prod(kernel) else [a, b // math.prod(kernel), *kernel]
