"""The state of slots: their tables, which slot is whose, and changes of it that are made whole or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ..blocks.base import check_values
from ..core.errors import SpecError, format_fields
from ..core.locks import check_change, fill_lock, read_lock, write_lock
from ..core.torch_internals.tensors import version
from .banks import Bank, check_name
from .files import Fit
from .gains import BaseVersions, list_gained, make_gains
from .rows import Slots, choose_slots
from .strengths import TAKEN, align_rows

Write = Callable[[Tensor, Any], Any]  # puts a number or a tensor into a tensor of the slots
Use = tuple[Tensor, dict[str, Tensor]]  # how much rows take of a slot, see `_read_use`
_reserving = threading.Lock()  # for moments, while somebody looks for a free slot


@dataclass(frozen=True)
class Prepared:
    """An adapter that is read, fitted to a module's layers and cast: what `Adapters.prepare` makes and `Adapters.put` takes.

    `fit` says what goes where, `rows` has by pass the values for each tensor of a slot. It may be put often.
    """

    name: str
    fit: Fit
    rows: Mapping[str, list[tuple[Bank, str, str, Tensor]]] = field(repr=False)

    __repr__ = format_fields

    @property
    def bytes(self) -> int:
        """Number of bytes that its tensors have."""
        return sum(value.numel() * value.element_size() for rows in self.rows.values() for *_, value in rows)


class SlotState(Slots):
    """The state of a module's slots, and how it is changed."""

    watchers: Sequence[Any] = ()

    @contextmanager
    def _changing(self, whole: bool = False) -> Iterator[Write]:
        """Apply a change, all or nothing: yields a function that writes a number or a tensor into a tensor of the slots.

        One of the `whole` state may write any tensor; others write names, tables, and slots that this thread alone has.
        """
        before: list[tuple[Tensor, Tensor]] = []

        write = partial(_write, before)
        locks, fault = self.locks, self._half_made("KeyboardInterrupt")
        with write_lock(locks, whole):
            outer = locks[0].written  # of a change around this one, which also puts back what this one has written
            try:
                self._mark(written=before)
                yield write
                self._changed()
                if outer is not None:
                    outer.extend(before)
            except BaseException:  # the caller's, an interrupt, too: all is put back
                for one in locks:  # before any call, at which Python may interrupt
                    one.fault = fault
                self._undo(before)
                raise
            finally:
                self._mark(written=outer)
            self._mark(fault="")

    @torch.no_grad()
    def _undo(self, before: list[tuple[Tensor, Tensor]]) -> None:
        """Whoever interrupts this gets his interrupt, but not a half of it: it is done, or calls say that it is not."""
        done = False
        while not done:
            try:
                for target, old in reversed(before):
                    target.copy_(old)
                self._changed()
                self._mark(fault="")
                done = True
            except KeyboardInterrupt:
                pass
            except Exception as error:  # torch's, as of no memory, raised again at the next call
                self._mark(fault=self._half_made(type(error).__name__))
                done = True

    def _half_made(self, why: str) -> str:
        left = f"a change of adapters failed and left the weights of this module incomplete ({why})"
        return f"{left}: adapters.use(...) computes them again"

    def _changed(self) -> None:
        """Notify the watchers that the state of the slots changed."""
        for watcher in self.watchers:
            watcher.switched(self.module)

    def _mark(self, **values: Any) -> None:
        for lock in self.locks:
            vars(lock).update(values)

    def _table(self, p: str, name: str) -> Tensor:
        return check_values(self.tensor(f"{p}.gates.table.{name}"))

    def names_of(self, p: str) -> list[str]:
        """List the adapters in the slots of one pass.

        Args:
            p: The name of the pass.

        Returns:
            A name for each slot, empty where it is free.
        """
        return list(self.list_names(p) or _read_names(self._table(p, "names")))

    def list_names(self, p: str) -> list[str] | None:
        """Return the names of a pass's slots, another list after each change; None where nothing counts the changes."""
        table = self._table(p, "names")
        if table.is_inference():  # nothing counts what is written there
            return None
        names = vars(self).setdefault("_known", {})
        known, now = names.get(p), version(table)
        if known is None or known[0] is not table or known[1] != now:
            known = names[p] = table, now, _read_names(table)
        return known[2]  # type: ignore[no-any-return]

    def _slots_of(self, name: str) -> dict[str, int]:
        """Find the slot that an adapter has in each pass that has it."""
        named = {p: self.names_of(p) for p in self.banks}
        return {p: names.index(name) for p, names in named.items() if name in names}

    def _check_new(self, name: Any, replace: bool) -> bool:
        """Return whether an adapter of this name is loaded. Raises SpecError for a name that cannot be used."""
        check_name(name, self._table(next(iter(self.banks)), "names").shape[1])
        if (known := name in self.names) and not replace:
            raise SpecError(f"an adapter '{name}' is loaded already: unload it first, or load with replace=True")
        return known

    def _free(self, p: str, name: str) -> int:
        names = self.names_of(p)
        names = names if self.there(f"{p}.gates.table.which") is None else names[:-1]  # the last holds zeros
        filling = set().union(*(lock.filling for lock in self.locks if p in self.passes_of(lock)))
        wanted = name if name in names else ""
        found = next((slot for slot, one in enumerate(names) if one == wanted and (one or slot not in filling)), None)
        if found is None:
            raise SpecError(
                f"all {len(names)} slots of pass '{p}' are taken, by {', '.join(filter(None, names))}: unload one, or apply "
                f"the pass with slots={len(names) + 1}"
            )
        return found

    def _clear(self, name: str, write: Write) -> None:
        """Free an adapter's slots."""
        slots = self._slots_of(name)
        self._unname(slots, write)
        for p, slot in slots.items():
            self._empty(p, slot, write)

    def _empty(self, p: str, slot: int, write: Write, but: Mapping[str, Sequence[int]] | None = None) -> None:
        """Zero what lies in a slot, `but` tensors that are written whole: training may have written into a free one."""
        for bank in self.banks[p]:
            for key, tensor_name in bank.names.items():
                view = check_values(bank.views(key, self.tensor(tensor_name), slot))
                if view.shape != (but or {}).get(tensor_name) and view.any():
                    write(view, 0)

    # --- filling

    def _put(self, ready: Prepared, replace: bool = False, instead: str | None = None) -> None:
        """Fill a slot that no row takes, and publish its name: only the name is written while nobody calls.

        What rows take is written while nobody calls, and so is what a change around this one has to be able to undo.
        """
        if check_change(self.locks) or self._check_new(ready.name, replace):
            self._put_alone(ready, replace, instead)
        else:
            self._put_beside(ready, instead)

    def _put_alone(self, ready: Prepared, replace: bool, instead: str | None) -> None:
        """Fill a slot and publish its name in one change."""
        with self._changing(whole=True) as write:
            known = self._check_new(ready.name, replace)
            if instead is not None:
                self._clear(self._check_unused(instead), write)
            slots = {p: self._free(p, ready.name) for p in ready.rows}
            used = {p: self._read_use(p, slot) for p, slot in self._slots_of(ready.name).items()}
            if known:
                self._clear(self.check_unpinned(ready.name), write)
            self._fill(ready, slots, write)
            self._publish(ready.name, slots, used, write)

    def _put_beside(self, ready: Prepared, instead: str | None) -> None:
        """Fill a slot that nobody else can take meanwhile, beside calls, then publish its name."""
        before: list[tuple[Tensor, Tensor]] = []
        slots: dict[str, int] = {}
        freed: dict[str, int] = {}
        write = partial(_write, before)
        with fill_lock(self.locks):
            try:
                if instead is not None:
                    with self._changing() as change:
                        self._check_new(ready.name, False)
                        freed |= self._slots_of(self._check_unused(instead))
                        self._reserve(ready, freed, slots)
                        self._unname(freed, change)
                else:
                    with read_lock(self.locks):
                        self._check_new(ready.name, False)
                        self._reserve(ready, freed, slots)
                self._fill(ready, slots, write)
                for p, slot in freed.items():
                    if slots.get(p) != slot:
                        self._empty(p, slot, write)
                with self._changing() as change:
                    self._check_new(ready.name, False)
                    self._publish(ready.name, slots, {}, change)
            except BaseException:  # an interrupt, too: all is put back
                self._bring_back(instead or "", freed, {}, before)
                raise
            finally:
                self._mark_filling({**freed, **slots}, False)

    def _reserve(self, ready: Prepared, freed: Mapping[str, int], slots: dict[str, int]) -> None:
        """Find a slot in each pass, of those that are `freed` or of the free ones, which nobody else fills meanwhile."""
        with _reserving:
            found = {p: freed[p] if p in freed else self._free(p, ready.name) for p in ready.rows}
            slots |= found
            self._mark_filling({**freed, **found}, True)

    def _fill(self, ready: Prepared, slots: Mapping[str, int], write: Write) -> None:
        """Write an adapter into slots, one for each pass; what it has nothing for becomes zero."""
        for p, slot in slots.items():
            self._empty(p, slot, write, {tensor_name: value.shape for *_, tensor_name, value in ready.rows[p]})
            for bank, key, tensor_name, value in ready.rows[p]:
                tensor = self.tensor(tensor_name)
                if tensor.dtype != value.dtype:
                    raise SpecError(
                        f"'{ready.name}' was prepared for slots of {value.dtype}, and '{tensor_name}' is {tensor.dtype} now: "
                        "prepare it again"
                    )
                write(bank.views(key, tensor, slot)[tuple(slice(n) for n in value.shape)], value)
            gained = [bank for bank, key, *_ in ready.rows[p] if key == "magnitude" and bank.has_gain]
            for bank in gained:
                self._write_gain(bank, slot, write)
            self.bases.note(gained, self._find_base)

    @cached_property
    def bases(self) -> BaseVersions:
        """The weights of which the gains in the slots were made; those that are there when it is first asked for."""
        made = BaseVersions(self.banks)
        made.note([bank for bank in made.banks if list_gained(bank, self.there)], self._find_base)
        return made

    def _find_base(self, name: str) -> Tensor | None:
        """Return a weight by name, and where a live merge has put another one in its place that of the base."""
        found = [w.find_base(self.module, name) for w in self.watchers if callable(getattr(w, "find_base", None))]
        return next((tensor for tensor in found if tensor is not None), self.there(name))

    def _write_gain(self, bank: Bank, slot: int, write: Write) -> None:
        for key, value in make_gains(bank, slot, self._find_base).items():
            write(bank.views(key, self.tensor(bank.names[key]), slot), value)

    def _remake_gains(self, write: Write) -> None:
        """Make the gains of all slots anew, of the base as it is now."""
        for bank in self.bases.banks:
            slots = list_gained(bank, self.there) if self.there(f"{bank.path}.weight") is not None else []
            for slot in slots:
                self._write_gain(bank, slot, write)
            self.bases.note([bank] if slots else [], self._find_base)

    def _publish(self, name: str, slots: Mapping[str, int], used: Mapping[str, Use], write: Write) -> None:
        """Write a name, and how much is taken of it: as before, also where a pass had nothing of it until now."""
        for p, slot in slots.items():
            taken, own = used.get(p) or (next(iter(used.values()))[0] if used else 0, {})
            write(self._table(p, "weights")[:, slot], taken)
            table = self._table(p, "names")
            raw = list(name.encode().ljust(table.shape[1], b"\0"))
            write(table[slot], torch.tensor(raw, dtype=torch.uint8))
            if used and (which := self.there(f"{p}.gates.table.which")) is not None:
                now = choose_slots(self._table(p, "weights"), self.names_of(p), which.shape[1])
                for key, neutral in TAKEN.items():
                    if (value := self.there(f"{p}.gates.table.{key}")) is not None:
                        made = align_rows(value, which, now, neutral)
                        here = (now == slot).view(len(now), *[1] * (value.dim() - 2), -1)
                        write(value, torch.where(here, own[key][..., None], made) if key in own else made)
                write(which, now)

    def _read_use(self, p: str, slot: int) -> Use:
        """Return how much each row takes of a slot, (rows,), and what tables have for that, (rows, ...)."""
        which, found = self.there(f"{p}.gates.table.which"), {}
        for key, neutral in TAKEN.items():
            if (value := self.there(f"{p}.gates.table.{key}")) is not None and which is not None:
                here = (which == slot).view(len(which), *[1] * (value.dim() - 2), -1)
                found[key] = torch.where(here.any(-1), torch.where(here, value, 0).sum(-1), neutral)
        return self._table(p, "weights")[:, slot].clone(), found

    def _unname(self, slots: Mapping[str, int], write: Write) -> None:
        """Take the names from slots, and the slots from all rows."""
        for p, slot in slots.items():
            write(self._table(p, "weights")[:, slot], 0)
            write(self._table(p, "names")[slot], 0)
            if (which := self.there(f"{p}.gates.table.which")) is not None:
                write(which, torch.where(which == slot, self._table(p, "names").shape[0] - 1, which))

    def _unload(self, name: str) -> None:
        """Free an adapter's slots: names and tables while nobody calls, what lay in them after that."""
        if check_change(self.locks):
            with self._changing() as write:
                self._clear(self.check_unpinned(self.check_known(name)), write)
            return
        before: list[tuple[Tensor, Tensor]] = []
        slots: dict[str, int] = {}
        used: dict[str, Use] = {}
        with fill_lock(self.locks):
            try:
                with self._changing() as change:
                    slots |= self._slots_of(self.check_unpinned(self.check_known(name)))
                    used |= {p: self._read_use(p, slot) for p, slot in slots.items()}
                    self._mark_filling(slots, True)
                    self._unname(slots, change)
                for p, slot in slots.items():
                    self._empty(p, slot, partial(_write, before))
            except BaseException:  # an interrupt, too: all is put back
                self._bring_back(name, slots, used, before)
                raise
            finally:
                self._mark_filling(slots, False)

    def _bring_back(
        self, name: str, slots: Mapping[str, int], used: Mapping[str, Use], before: list[tuple[Tensor, Tensor]]
    ) -> None:
        """Undo what was written into slots, and give them the name again that they had."""
        for target, old in reversed(before):
            target.copy_(old)
        if slots and not self._slots_of(name):
            with self._changing() as change:
                self._publish(name, slots, used, change)

    def _mark_filling(self, slots: Mapping[str, int], filling: bool) -> None:
        """Keep others from filling these slots, or no longer."""
        for p, slot in slots.items():
            for lock in self.locks:
                if p in self.passes_of(lock):
                    (lock.filling.add if filling else lock.filling.discard)(slot)

    def _count_pins(self, names: Sequence[str], step: int) -> None:
        with _reserving:
            for lock in self.locks:
                for name in names:
                    lock.pins[name] = lock.pins.get(name, 0) + step

    def check_unpinned(self, name: str) -> str:
        """Return the name of an adapter. Raises SpecError where it is pinned."""
        if any(lock.pins.get(name) for lock in self.locks):
            raise SpecError(f"'{name}' is pinned: it is neither unloaded nor replaced before its pins end")
        return name

    def _check_unused(self, name: str) -> str:
        """Return the name of an adapter that makes room. Raises SpecError where it is pinned, or where `use` names it now."""
        slots = self._slots_of(self.check_unpinned(self.check_known(name)))
        if any(self._table(p, "weights")[:, slot].any() for p, slot in slots.items()):
            raise SpecError(f"'{name}' is in use: replace it after a use(...) without it")
        return name


def _write(before: list[tuple[Tensor, Tensor]], target: Tensor, value: Any) -> None:
    """Write a number or a tensor, and note the old values."""
    before.append((check_values(target), target.clone()))
    (target.copy_ if isinstance(value, Tensor) else target.fill_)(value)


def _read_names(table: Tensor) -> list[str]:
    """Read the names of a table, uint8 (slots, bytes)."""
    raw = table.detach().cpu().numpy()
    return [row.tobytes().rstrip(b"\0").decode("utf-8", "replace") for row in raw]
