"""Adapters that come and go in the slots of a module: load, use, unload. All state is in tensors, so nothing recompiles."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks.base import with_values
from ..core.errors import DEFAULT, LONGEST, Limits, SpecError, cut, did_you_mean, shown
from ..core.locks import StateLock, choices_of, locks_of, read_lock, use_choices, write_lock
from ..core.torch_internals.modules import unwatched
from ..core.torch_internals.tensors import FakeTensor
from .banks import Bank, check_name, is_finite, rows_for
from .base_weights import warn_on_other_base
from .contents import in_slots
from .files import Fit, Source, read
from .loading import check_samples, fit_to, tensor_of, weights_of
from .saved_heads import without_heads
from .writing import About, Saved, about_of, content, write

Weights = Mapping[str, float]
Write = Callable[[Tensor, Any], None]  # puts a number or a tensor into a tensor of the slots


class AdapterChoice:
    """Which adapters the calls of a block take: `rows` as `Adapters.use` takes them, one for all samples if `single`."""

    def __init__(self, adapters: Adapters, rows: list[dict[str, float]], single: bool) -> None:
        self.adapters, self.rows, self.single = adapters, rows, single
        self.made = adapters.tables(rows, single)
        self.changes = [lock.changes for lock in adapters.locks]

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, AdapterChoice) and (self.adapters, self.single) == (other.adapters, other.single)
        return same and self.rows == other.rows  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]

    @unwatched
    def write(self, lock: StateLock) -> None:
        """Write it into the tables of the passes that have this lock. Raises SpecError for an adapter that was unloaded."""
        if (changes := [lock.changes for lock in self.adapters.locks]) != self.changes:
            for name in {name for row in self.rows for name in row}:
                self.adapters.check_known(name)
            self.made, self.changes = self.adapters.tables(self.rows, self.single), changes
        for name, tensor in self._tensors(lock).items():
            table, entries = self.made[name.removesuffix(".gates.table.weights").removesuffix(".gates.table.entries")]
            if name.endswith(".entries"):
                tensor.fill_(entries)
            else:
                (tensor if self.single else tensor[: len(table)]).copy_(table)

    @unwatched
    def backup(self, lock: StateLock) -> Callable[[], None]:
        """Return a function that restores the present values of these tables."""
        before = {name: (tensor, tensor.clone()) for name, tensor in self._tensors(lock).items()}

        @unwatched
        def restore() -> None:
            now = self._tensors(lock)  # others, where the module was moved in the middle of a call
            for name, (tensor, value) in before.items():
                for target in {id(t): t for t in (tensor, now.get(name, tensor))}.values():
                    target.copy_(value)

        return restore

    def _tensors(self, lock: StateLock) -> dict[str, Tensor]:
        """Return the tables with this lock, by name, without the fake ones that exist while the module is traced."""
        names = [f"{p}.gates.table.{name}" for p in self.adapters.passes_of(lock) for name in ("weights", "entries")]
        tensors = {name: self.adapters.tensor(name) for name in names}
        return {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, FakeTensor)}


class Adapters:
    """The adapters of a module with slots, by name.

    Get them as `module.adapters`. Everything here may be called from any thread while others call the module, and a call sees
    one state from its start to its end: a change (`load`, `use`, `unload`, `module.load_state_dict`, a move to another device)
    waits for the calls that run, and later calls wait for it. Files are read before. A change that fails, at whatever place
    and for whatever reason, changes nothing. One within a call of the same thread raises SpecError. Lowered forms that share
    their slots with a module have its lock; copies do not.

    Calls are those of the module, also within others, compiled by itself or not. Where something *around* it is compiled, as
    `torch.compile(nn.Sequential(module, head))`, its call is a part of that program, which waits for nobody: put `hold()`
    around the calls there, and around a forward and its backward pass where activations are computed again in between
    (`torch.utils.checkpoint`). On a GPU calls and changes are put in line on streams: those of one stream run in their order,
    which is what threads do that choose none; with several streams the program has to wait for its events itself.
    """

    module: Any = None
    locks: tuple[StateLock, ...]
    watchers: Sequence[Any] = ()

    def __init__(self, module: nn.Module) -> None:
        """Raises SpecError for a module without slots."""
        meta = getattr(module, "meta", {})
        self.module = module
        self.where = meta.get("originals", {})  # of a module with regions: where its tensors are now
        self.banks: dict[str, list[Bank]] = {}
        for entry in meta.get("passes", []):
            if entry.get("slots"):
                sites = {site["block"]: site for site in reversed(entry["sites"]) if "bank" in site}  # the first of tied layers
                self.banks[entry["name"]] = [Bank.of(site) for site in reversed(sites.values())]
        if not self.banks:
            raise SpecError("no pass here has slots: apply one that has, such as load_pass('lora', at=..., rank=16, slots=4)")
        self.locks = locks_of(module)
        self.watchers = [m for m in module.modules() if callable(getattr(m, "switched", None))]

    # --- what a package of another kind does in its own way

    def tensor(self, name: str) -> Tensor:
        """Give a parameter or buffer by its name in the state dict; it is written in place."""
        found = self.there(name)
        if found is None:
            raise KeyError(name)
        return found

    def there(self, name: str) -> Tensor | None:
        """Give the same; None where there is none of that name."""
        return tensor_of(self.module, self.where.get(name, name))

    def shapes(self) -> dict[str, Sequence[int]]:
        """List the weights of the whole model, by layer."""
        return weights_of(self.module)

    def passes_of(self, lock: StateLock) -> list[str]:
        """List the passes whose tables have this lock."""
        homes = {p: self.where.get(f"{p}.gates.table.weights", f"{p}.gates.table.weights") for p in self.banks}
        return [p for p, name in homes.items() if lock in locks_of(self.module.get_submodule(name.rpartition(".")[0]))]

    # --- locks

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep everybody from changing the adapters: several calls within, such as the steps of one picture, see one choice.

        Changes of other threads wait, calls go on; a change of this thread raises SpecError.
        """
        with read_lock(self.locks):
            yield

    @contextmanager
    def change(self) -> Iterator[None]:
        """Make several changes one: all are made, or where the block ends with an error, none is.

        Other threads call the module before or after it; another asyncio task that does so while the block awaits gets a
        SpecError. Tensors of the slots may be written too, as an optimizer does, and what is merged is made anew at the end; an
        error does not put them back, only what `load`, `use`, `unload`, `load_adapter` did. Raises SpecError within a call.
        """
        with self._changing():
            yield

    @contextmanager
    def _changing(self) -> Iterator[Write]:
        """Apply a change, all or nothing: yields a function that writes a number or a tensor into a tensor of the slots."""
        before: list[tuple[Tensor, Tensor]] = []

        def write(target: Tensor, value: Any) -> None:
            before.append((with_values(target), target.clone()))
            (target.copy_ if isinstance(value, Tensor) else target.fill_)(value)

        locks, fault = self.locks, self._half_made("KeyboardInterrupt")
        with write_lock(locks):
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

    @property
    def names(self) -> list[str]:
        """Names of the loaded adapters, in the order of their slots."""
        with read_lock(self.locks):
            return list(dict.fromkeys(name for p in self.banks for name in self.names_of(p) if name))

    @property
    def slots(self) -> int:
        """Number of adapters that fit."""
        return max(self.tensor(f"{p}.gates.table.names").shape[0] for p in self.banks)

    @property
    def active(self) -> dict[str, float] | list[dict[str, float]]:
        """Weight of each active adapter, or one such dict for each sample."""
        with read_lock(self.locks, reads=True):
            tables = {p: (self._table(p, "weights"), int(self._table(p, "entries"))) for p in self.banks}
            named = {p: self.names_of(p) for p in self.banks}
        count = max(entries for _, entries in tables.values())

        def row(index: int) -> dict[str, float]:
            rows = [
                (name, value)
                for p, (weights, _) in tables.items()
                for name, value in zip(named[p], weights[index].tolist(), strict=True)
            ]
            return {name: value for name, value in rows if name and value}

        return [row(i) for i in range(count)] if count else row(0)

    def __repr__(self) -> str:
        return f"Adapters({cut(', '.join(self.names), LONGEST // 2) or 'none'}; {self.slots} slots)"

    def _table(self, p: str, name: str) -> Tensor:
        return with_values(self.tensor(f"{p}.gates.table.{name}"))

    def names_of(self, p: str) -> list[str]:
        """List the adapters in the slots of one pass, each an empty text where a slot is free."""
        return [bytes(row).rstrip(b"\0").decode("utf-8", "replace") for row in self._table(p, "names").tolist()]

    def _slots_of(self, name: str) -> dict[str, int]:
        """Find the slot that an adapter has in each pass that has it."""
        named = {p: self.names_of(p) for p in self.banks}
        return {p: names.index(name) for p, names in named.items() if name in names}

    def check_known(self, name: Any) -> str:
        """Give the name, if an adapter of that name is loaded. Raises SpecError."""
        if name not in (known := self.names):
            listed = f"; there are {', '.join(known)}" if known else "; none is loaded yet"
            raise SpecError(f"no adapter {name!r}{did_you_mean(str(name), known)}{listed}")
        return str(name)

    # --- loading

    @torch.no_grad()
    def load(
        self,
        name: str,
        source: Source,
        *,
        adapter: str | None = None,
        part: str | None = None,
        config: Mapping[str, Any] | None = None,
        partial: bool = False,
        replace: bool = False,
        guess: bool = False,
        limits: Limits = DEFAULT,
    ) -> Fit:
        """Put an adapter into a free slot under a name; it is not used before `use` says so.

        `source` is a file, a folder or a state dict of any layout that `files.read` knows. Ranks up to the slots' and
        some of the layers are fine: what is missing adds nothing. `adapter` names one of several in a file, `part` the part
        of a pipeline that this module is; `config` is PEFT's adapter configuration where none lies beside (without it and
        without alphas in the source, the scale is 1). `partial` leaves out layers that are not here; `replace` takes the slot
        of an adapter of that name, and is used as that was. `guess` takes layers by shape and order where a file numbers its
        layers and does not name them. `limits` bounds what is read of a file. Gives what went where: see `layer_matching.Fit`.

        Raises ArtifactError for a file that cannot be read or has layers that are not here; SpecError for a name that is
        taken, full slots, a rank above theirs, or an update of another kind than they hold. Nothing is changed then.
        """
        self._check_new(name, replace)  # before a file is read
        file, heads = without_heads(read(source, adapter=adapter, config=config, limits=limits), self.module)
        if any(not torch.equal(home, value.to(home)) for home, value in heads):
            raise SpecError(
                f"{file.source} has a new last layer, which slots cannot hold: apply the pass head with {{weights: the file}}"
            )
        found = fit_to(file, self.banks, self.module, self.shapes, part, guess)
        if not (partial and found.placed):
            found.check()
        warn_on_other_base(file.source, file.about, self.there)
        ready = rows_for(self.banks, found.placed, self.there)
        with self._changing() as write:
            known = self._check_new(name, replace)
            slots = {p: self._free(p, name) for p in ready}
            used = {p: self._table(p, "weights")[:, slot].clone() for p, slot in self._slots_of(name).items()}
            if known:
                self._clear(name, write)
            for p, slot in slots.items():
                self._empty(p, slot, write, {tensor_name: value.shape for *_, tensor_name, value in ready[p]})
            for p, rows in ready.items():
                for bank, key, tensor_name, value in rows:
                    target = bank.views(key, self.tensor(tensor_name), slots[p])
                    write(target[tuple(slice(n) for n in value.shape)], value)
                # as before, also where this pass had nothing of it until now
                write(self._table(p, "weights")[:, slots[p]], used.get(p, next(iter(used.values()), 0)))
                table = self._table(p, "names")
                raw = list(name.encode().ljust(table.shape[1], b"\0"))
                write(table[slots[p]], torch.tensor(raw, dtype=torch.uint8))
        return found

    def _check_new(self, name: Any, replace: bool) -> bool:
        """Return whether an adapter of this name is loaded. Raises SpecError for a name that cannot be used."""
        check_name(name, self._table(next(iter(self.banks)), "names").shape[1])
        if (known := name in self.names) and not replace:
            raise SpecError(f"an adapter '{name}' is loaded already: unload it first, or load with replace=True")
        return known

    def _free(self, p: str, name: str) -> int:
        names = self.names_of(p)
        if (wanted := name if name in names else "") not in names:
            raise SpecError(
                f"all {len(names)} slots of pass '{p}' are taken, by {', '.join(names)}: unload one, or apply the pass with "
                f"slots={len(names) + 1}"
            )
        return names.index(wanted)

    @torch.no_grad()
    def unload(self, name: str) -> None:
        """Free an adapter's slot; it is used no longer. Raises SpecError for a name that is not loaded."""
        with self._changing() as write:
            self._clear(self.check_known(name), write)

    def _clear(self, name: str, write: Write) -> None:
        """Free an adapter's slots."""
        for p, slot in self._slots_of(name).items():
            write(self._table(p, "weights")[:, slot], 0)
            write(self._table(p, "names")[slot], 0)
            self._empty(p, slot, write)

    def _empty(self, p: str, slot: int, write: Write, but: Mapping[str, Sequence[int]] | None = None) -> None:
        """Zero what lies in a slot, `but` tensors that are written whole: training may have written into a free one."""
        for bank in self.banks[p]:
            for key, tensor_name in bank.names.items():
                view = with_values(bank.views(key, self.tensor(tensor_name), slot))
                if view.shape != (but or {}).get(tensor_name) and view.any():
                    write(view, 0)

    def save(
        self,
        name: str,
        path: str | os.PathLike[str],
        *,
        as_: str = "peft",
        part: str | None = None,
        partial: bool = False,
        dtype: torch.dtype | None = None,
        about: Mapping[str, str] | None = None,
    ) -> Saved:
        """Write an adapter as a tool reads it, see `writing.save_adapter`: with the numbers that its slots hold.

        They have its scale in them, so that alpha is the rank in the file, and the dtype of the slots, but for `dtype`; ranks
        end with the last number that is not zero. The slots may be used meanwhile, and are not changed while they are read.

        Raises SpecError for a name that is not loaded, and what `save_adapter` does.
        """
        with read_lock(self.locks):
            slots, model = self._slots_of(self.check_known(name)), self.about()
            rows = [(p, bank, slot) for p, slot in slots.items() for bank in self.banks[p]]
            held = in_slots(rows, self.tensor, model.layers, getattr(self.module, "meta", {}).get("passes", []))
        options: Any = {"name": name, "part": part, "partial": partial, "dtype": dtype, "metadata": about}
        return write(content(held, as_, model, there=self.there, **options), path, as_)

    def about(self) -> About:
        """Say what is known of the model."""
        return about_of(self.module)

    # --- use

    @torch.no_grad()
    def use(self, what: str | Weights | Sequence[Any] | Tensor | None) -> None:
        """Say which adapters take part: a name; names with weights, `{"ink": 0.8, "film": 0.3}`; None for none.

        A list, or a tensor of positions in `names` with -1 for none, has an entry for each sample of the batch; the next
        batches must have that size, until another `use`. Raises SpecError for an unknown name, a weight that is no finite
        number, a position out of range, more entries than there is room for, or samples that differ in adapters that change
        the weight itself; nothing is changed then.
        """
        if choices_of(self.locks):
            raise SpecError("use(...) is not allowed inside a block of adapters.using(...): call it before or after that block")
        with self._changing() as write:
            rows, single = self._rows(what)
            for p, (table, entries) in self.tables(rows, single).items():
                weights = self._table(p, "weights")
                write(weights if single else weights[: len(table)], table)
                write(self._table(p, "entries"), entries)

    @contextmanager
    def using(self, what: str | Weights | Sequence[Any] | Tensor | None) -> Iterator[None]:
        """Let calls within this block take other adapters than `use` says: `with module.adapters.using("ink"): module(x)`.

        It holds for the calls of this thread, or of this asyncio task, and of what is run in its context
        (`asyncio.to_thread`); another thread, also one of an executor, begins without it. `what` is as for `use`; blocks may
        be nested, and the inner one counts. Nothing recompiles. Calls with other choices than one that runs wait for it, and
        those with the same run beside it. `active`, `save`, `merge` and copies are about what `use` said.

        Raises SpecError as `use`, and for a live merge, which would make its weights anew for each call. A call raises it where
        an adapter was unloaded meanwhile.
        """
        if self.watchers:
            raise SpecError(
                "adapters.using(...) is not supported with merge='live', whose weights have one choice merged: call use(...) "
                "between calls, or lower without merge='live'"
            )
        with read_lock(self.locks):
            choice = AdapterChoice(self, *self._rows(what))
        with use_choices(dict.fromkeys(self.locks, choice)):
            yield

    def _rows(self, what: Any) -> tuple[list[dict[str, float]], bool]:
        """Return the names and weights for each sample, and whether one set applies to all. Raises SpecError."""
        if what is None or isinstance(what, (str, Mapping)):
            return [self._weights(what)], True
        return [self._weights(entry, i) for i, entry in self._entries(what)], False

    def tables(self, rows: list[dict[str, float]], single: bool) -> dict[str, tuple[Tensor, int]]:
        """Give such rows in the table of each pass: weights, and the number of entries. Raises SpecError as `use`."""
        made: dict[str, tuple[Tensor, int]] = {}
        for p in self.banks:
            weights = self._table(p, "weights")
            names = self.names_of(p)
            if not single and len(rows) > weights.shape[0]:
                raise SpecError(f"a batch can have entries for at most {weights.shape[0]} samples, not {len(rows)}")
            table = torch.tensor([[row.get(name, 0.0) if name else 0.0 for name in names] for row in rows])
            made[p] = table.to(weights.device, weights.dtype), 0 if single else len(rows)
            if not made[p][0].isfinite().all():
                raise SpecError(f"a weight is out of range for {weights.dtype}, the dtype of the slots of '{p}'")
            mapping = next((bank for bank in self.banks[p] if bank.maps), None)
            if mapping is not None and (made[p][0] != made[p][0][:1]).any():
                raise SpecError(
                    f"the adapters of '{p}' change weights ({mapping.kind} at '{mapping.path}'), which all samples of a batch "
                    "share: use the same adapters for all samples, or a pass that runs beside its layers, such as lora"
                )
            apart = (made[p][0] != made[p][0][:1]).any(0).nonzero()[:, 0].tolist()
            check_samples(p, self.banks[p], apart, self.tensor, self.module)
        return made

    def strengths(self, weights: Weights) -> dict[str, Tensor]:
        """Give what a batch would take of each pass's slots, float32 (slots,), if these were used. Raises as `use`."""
        row = {"": 0.0, **self._weights(weights)}
        return {p: torch.tensor([row.get(name, 0.0) for name in self.names_of(p)]) for p in self.banks}

    def _entries(self, what: Any) -> Iterator[tuple[int, Any]]:
        if isinstance(what, Tensor):
            if what.dim() != 1 or what.is_floating_point() or what.dtype == torch.bool:
                raise SpecError(
                    f"positions must be a tensor of whole numbers, one per sample, not {what.dtype} {list(what.shape)}"
                )
            what = what.tolist()
        if not isinstance(what, (list, tuple)) or not what:
            known = "a name, names with weights, None, or a list with one of these per sample"
            raise SpecError(f"use takes {known}, not {shown(what)}")
        yield from enumerate(what)

    def _weights(self, entry: Any, sample: int | None = None) -> dict[str, float]:
        """Return an entry as names with weights."""
        where = "" if sample is None else f"sample {sample}: "
        if entry is None:
            return {}
        if isinstance(entry, int) and not isinstance(entry, bool) and sample is not None:
            known = self.names
            if not -1 <= entry < len(known):
                raise SpecError(f"{where}no adapter at position {entry}; there are {len(known)}: {', '.join(known)}")
            return {} if entry == -1 else {known[entry]: 1.0}
        if isinstance(entry, str):
            entry = {entry: 1.0}
        if not isinstance(entry, Mapping):
            raise SpecError(f"{where}an adapter must be a name, names with weights, or None, not {shown(entry)}")
        try:
            weights = {self.check_known(name): value for name, value in entry.items()}
        except SpecError as error:
            raise SpecError(f"{where}{error.finding}") from None
        for name, value in weights.items():
            if not is_finite(value):
                raise SpecError(f"{where}the weight of '{name}' must be a finite number, not {shown(value)}")
        return {name: float(value) for name, value in weights.items()}
