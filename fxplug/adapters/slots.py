"""Adapters that come and go in the slots of a module: load, use, unload. All state is in tensors, so nothing recompiles."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks.base import check_values
from ..core.errors import DEFAULT, LONGEST, Limits, SpecError, cut, quote
from ..core.locks import StateLock, check_change, get_choices, get_locks, read_lock, use_choices
from .banks import Bank, check_name, make_rows
from .base_weights import warn_on_other_base
from .contents import read_slots
from .files import Fit, Source, read
from .loading import find_tensor, fit_to, list_weights
from .rows import REGIONS, TABLE, Rows, check_name_known, make_tables, read_row, read_rows
from .saved_heads import without_heads
from .state import Prepared, SlotState
from .strengths import Strength, expand_factors, get_value, read_region
from .writing import About, FileOptions, Saved, describe_model, make_content, write

Weights = Mapping[str, float | Strength]


class Adapters(SlotState):
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
        self.locks = get_locks(module)
        self.watchers = [m for m in module.modules() if callable(getattr(m, "switched", None))]
        self.bases.note((), self.there)  # now, and not when they are asked for first

    # --- what a package of another kind does in its own way

    def tensor(self, name: str) -> Tensor:
        """Return a parameter or buffer; it is written in place.

        Args:
            name: Its name in the state dict.

        Returns:
            The tensor itself, no copy.

        Raises:
            KeyError: Where there is none of that name.
        """
        found = self.there(name)
        if found is None:
            raise KeyError(name)
        return found

    def there(self, name: str) -> Tensor | None:
        """Return a parameter or buffer, if there is one of that name.

        Args:
            name: Its name in the state dict.

        Returns:
            The tensor itself, or None.
        """
        return find_tensor(self.module, self.where.get(name, name))

    def shapes(self) -> dict[str, Sequence[int]]:
        """List the shapes of the weights of the whole model, by layer."""
        return list_weights(self.module)

    def passes_of(self, lock: StateLock) -> list[str]:
        """List the passes whose tables have a lock.

        Args:
            lock: One of `locks`.

        Returns:
            Their names.
        """
        homes = {p: self.where.get(f"{p}.gates.table.weights", f"{p}.gates.table.weights") for p in self.banks}
        return [p for p, name in homes.items() if lock in get_locks(self.module.get_submodule(name.rpartition(".")[0]))]

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
        with self._changing(whole=True) as write:
            yield
            with torch.no_grad():
                self._remake_gains(write)

    @property
    def names(self) -> list[str]:
        """Names of the loaded adapters, in the order of their slots."""
        with read_lock(self.locks):
            return list(dict.fromkeys(name for p in self.banks for name in self.names_of(p) if name))

    @property
    def slots(self) -> int:
        """Number of adapters that fit."""
        sizes = {p: self.tensor(f"{p}.gates.table.names").shape[0] for p in self.banks}
        return max(size - (self.there(f"{p}.gates.table.which") is not None) for p, size in sizes.items())

    @property
    def active(self) -> dict[str, float | Strength] | list[dict[str, float | Strength]]:
        """Strength of each active adapter, or one such dict for each sample: a number, or one with the factors of layers."""
        with read_lock(self.locks, reads=True):
            found = {p: {key: self.there(f"{p}.gates.table.{key}") for key in TABLE} for p in self.banks}
            known = {p: {key: t for key, t in table.items() if t is not None} for p, table in found.items()}
            tables = {p: {key: check_values(t).cpu() for key, t in table.items()} for p, table in known.items()}
            named = {p: self.names_of(p) for p in self.banks}
        count = max(int(table["entries"]) for table in tables.values())

        def row(index: int) -> dict[str, float | Strength]:
            made: dict[str, float | Strength] = {}
            for p, table in tables.items():
                for slot, (name, value) in enumerate(zip(named[p], table["weights"][index].tolist(), strict=True)):
                    if name and value and (name not in made or not isinstance(made[name], Strength)):
                        blocks = self._read_blocks(p, table, index, slot) if "factors" in table else None
                        made[name] = Strength(value, blocks, **read_region(table, index, slot))
            plain = {name for name, one in made.items() if isinstance(one, Strength) and not one.blocks and not one.digest}
            return {name: get_value(value) if name in plain else value for name, value in made.items()}

        return [row(i) for i in range(count)] if count else row(0)

    def _read_blocks(self, p: str, table: Mapping[str, Tensor], index: int, slot: int) -> dict[str, float]:
        """Return the factors of layers, but those of one, of what a row takes of a slot."""
        factors = table["factors"][index][:, table["which"][index] == slot][:, 0].tolist()
        return {bank.path: factors[bank.group] for bank in self.banks[p] if factors[bank.group] != 1}

    def __repr__(self) -> str:
        return f"Adapters({cut(', '.join(self.names), LONGEST // 2) or 'none'}; {self.slots} slots)"

    def check_known(self, name: Any) -> str:
        """Check that an adapter of a name is loaded.

        Args:
            name: What a user gave as its name.

        Returns:
            The name.

        Raises:
            SpecError: If none has it, with the nearest names.
        """
        return check_name_known(name, self.names)

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
        """Put an adapter into a free slot under a name; it is not used before `use` names it.

        Ranks up to the slots' and some of the layers are fine: what is missing adds nothing. An error changes nothing.

        Args:
            name: What it is called from now on.
            source: A file, a folder or a state dict, of any layout that `files.read` knows.
            adapter: One of several in a file.
            part: The part of a pipeline that this module is, such as "unet".
            config: PEFT's adapter configuration, where none lies beside the file; without it and without alphas in the source,
                the scale is 1.
            partial: Leave out layers that are not here.
            replace: Take the slot of an adapter of that name, and its place in `use`.
            guess: Match layers by shape and order where a file numbers its layers and does not name them.
            limits: Bounds on what is read of a file.

        Returns:
            What went where.

        Raises:
            ArtifactError: For a file that cannot be read or has layers that are not here.
            SpecError: For a name that is taken, full slots, a rank above theirs, or an update of another kind than they hold.
        """
        self._check_new(name, replace)  # before a file is read
        check_change(self.locks)
        ready = self.prepare(
            name, source, adapter=adapter, part=part, config=config, partial=partial, guess=guess, limits=limits
        )
        self._put(ready, replace)
        return ready.fit

    @torch.no_grad()
    def prepare(
        self,
        name: str,
        source: Source,
        *,
        adapter: str | None = None,
        part: str | None = None,
        config: Mapping[str, Any] | None = None,
        partial: bool = False,
        guess: bool = False,
        limits: Limits = DEFAULT,
    ) -> Prepared:
        """Read an adapter, fit it to the layers here and cast it, to be put into a slot later, as SwiftDiffusion loads adapters
        while steps run (arXiv 2407.02031). It waits for nobody: any thread may do so, also within a call.

        Args:
            name: What it will be called; the name may be taken until `put`.
            source: As for `load`, and so are the others.
            adapter: One of several in a file.
            part: The part of a pipeline that this module is.
            config: PEFT's adapter configuration.
            partial: Leave out layers that are not here.
            guess: Match layers by shape and order.
            limits: Bounds on what is read of a file.

        Returns:
            What `put` takes, on the device of the source.

        Raises:
            ArtifactError: As `load`.
            SpecError: As `load`, but for names and slots.
        """
        check_name(name, self._table(next(iter(self.banks)), "names").shape[1])
        file, heads = without_heads(read(source, adapter=adapter, config=config, limits=limits), self.module)
        if any(not torch.equal(home, value.to(home)) for home, value in heads):
            raise SpecError(
                f"{file.source} has a new last layer, which slots cannot hold: apply the pass head with {{weights: the file}}"
            )
        found = fit_to(file, self.banks, self.module, self.shapes, part, guess)
        if not (partial and found.placed):
            found.check()
        warn_on_other_base(file.source, file.about, self.there)
        return Prepared(name, found, make_rows(self.banks, found.placed, self.there))

    @torch.no_grad()
    def put(self, ready: Prepared, *, instead: str | None = None) -> Fit:
        """Put a prepared adapter into a free slot, or into that of another one; calls go on until its name is written.

        Args:
            ready: What `prepare` gave, of this module or of one with the same slots.
            instead: An adapter that makes room: it is unloaded.

        Returns:
            What went where.

        Raises:
            SpecError: For a name that is taken, full slots, an `instead` that is not loaded, is pinned, or is in use, and for
                what was prepared for a module with other slots.
        """
        if not isinstance(ready, Prepared):
            raise SpecError(f"put takes what prepare(name, source) gives, not {quote(ready)}")
        for p, rows in ready.rows.items():
            own = {bank.block: bank for bank in self.banks.get(p, ())}
            if (other := next((bank.path for bank, *_ in rows if own.get(bank.block) != bank), None)) is not None:
                raise SpecError(
                    f"'{ready.name}' was prepared for other slots than the pass '{p}' has at '{other}' here: prepare it with "
                    "these adapters"
                )
        self._put(ready, instead=instead)
        return ready.fit

    @contextmanager
    def pin(self, *names: str) -> Iterator[None]:
        """Keep adapters in their slots within a block: `unload`, `load(replace=True)` and `put(instead=)` of them are refused.

        Pins count, whichever thread has them: a name is free when all its blocks have ended.

        Args:
            *names: Of adapters that are loaded.

        Yields:
            None.

        Raises:
            SpecError: For a name that is not loaded.
        """
        with read_lock(self.locks):
            found = [self.check_known(name) for name in names]
            self._count_pins(found, 1)
        try:
            yield
        finally:
            self._count_pins(found, -1)

    @torch.no_grad()
    def unload(self, name: str) -> None:
        """Free an adapter's slot; it is used no longer.

        Args:
            name: Of the adapter.

        Raises:
            SpecError: For a name that is not loaded, or that is pinned.
        """
        self._unload(name)

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
        overwrite: bool = True,
    ) -> Saved:
        """Write an adapter as a file of a tool, see `writing.save_adapter`, with the numbers that its slots hold.

        These include its scale, so that alpha is the rank in the file; ranks end with the last number that is not zero. The
        slots may be used meanwhile, and are not changed while they are read.

        Args:
            name: Of the adapter.
            path: A file or a folder, as the format has it.
            as_: The format: "peft", "kohya" or another that `writing.save_adapter` knows.
            part: The part of a pipeline that this module is, where the format names it.
            partial: Leave out what the format cannot represent.
            dtype: Of the tensors in the file; None for that of the slots.
            about: Metadata, written into the file.
            overwrite: Whether an adapter that is there is replaced.

        Returns:
            What was written, and what was left out.

        Raises:
            SpecError: For a name that is not loaded, and as `save_adapter`.
        """
        with read_lock(self.locks):
            slots, model = self._slots_of(self.check_known(name)), self.about()
            rows = [(p, bank, slot) for p, slot in slots.items() for bank in self.banks[p]]
            held = read_slots(rows, self.tensor, model.layers, getattr(self.module, "meta", {}).get("passes", []))
        options = FileOptions(name, part, partial, dtype, about)
        return write(make_content(held, as_, model, options, there=self.there), path, as_, overwrite)

    def about(self) -> About:
        """Describe the model, for the files of its adapters."""
        return describe_model(self.module)

    # --- use

    def rows(self, what: Sequence[Weights | str | None]) -> Rows:
        """Read the adapters of each sample of a batch once, for calls of `use` or `using` at each step, which then only write
        a table.

        Args:
            what: As for `use`.

        Returns:
            The rows. They name adapters, not slots: after loads and unloads they go on.

        Raises:
            SpecError: As `use`.
        """
        with read_lock(self.locks):
            return self._rows(what)

    def _rows(self, what: Any) -> Rows:
        if isinstance(what, Rows):
            if what.adapters is self:
                return what
            what = what.rows[0] if what.single else what.rows
        return Rows(self, *read_rows(self, what))

    @torch.no_grad()
    def use(self, what: str | Weights | Sequence[Any] | Rows | Tensor | None) -> None:
        """Choose the adapters that take part in the next calls.

        Args:
            what: A name; names with weights, `{"ink": 0.8, "film": 0.3}`, numbers or a `Strength` each; None for none. A list
                of these, or an integer tensor (samples,) of positions in `names` with -1 for none, has an entry for each sample
                of the batch: batches must have that size until another `use`; what `rows` made of one takes least time.

        Raises:
            SpecError: For an unknown name, a weight that is no finite number, a position out of range, more entries than there
                is room for, or samples that differ in adapters that change the weight itself; nothing is changed then.
        """
        if get_choices(self.locks):
            raise SpecError("use(...) is not allowed inside a block of adapters.using(...): call it before or after that block")
        with self._changing() as write:
            rows = self._rows(what)
            if self.bases.find_changed(self.module, self.where, self._find_base):
                self._remake_gains(write)
            for p, values in rows.tables().items():
                for key, value in values.items():
                    table, whole = self._table(p, key), rows.single and key not in REGIONS
                    write(table if whole or not value.dim() else table[: len(value)], value)

    @contextmanager
    def using(self, what: str | Weights | Sequence[Any] | Rows | Tensor | None) -> Iterator[None]:
        """Use other adapters within a block: `with module.adapters.using("ink"): module(x)`.

        It holds for the calls of this thread, or of this asyncio task, and of what is run in its context
        (`asyncio.to_thread`); another thread, also one of an executor, begins without it. Blocks may be nested, and the inner
        one counts. Nothing recompiles. Calls with other choices than one that runs wait for it, and those with the same run
        beside it. `active`, `save`, `merge` and copies go by the last `use`.

        Args:
            what: As for `use`.

        Yields:
            None.

        Raises:
            SpecError: As `use`, and for a live merge, which would make its weights anew for each call. A call raises it where
                an adapter was unloaded meanwhile.
        """
        if self.watchers:
            raise SpecError(
                "adapters.using(...) is not supported with merge='live', whose weights have one choice merged: call use(...) "
                "between calls, or lower without merge='live'"
            )
        if self.bases.find_changed(self.module, self.where, self._find_base):
            with self._changing(whole=True) as write, torch.no_grad():
                self._remake_gains(write)
        with read_lock(self.locks):
            choice = self._rows(what)
            choice.tables()  # now, where one is gone
        with use_choices(dict.fromkeys(self.locks, choice)):
            yield

    def strengths(self, weights: Weights) -> dict[str, Tensor]:
        """Return what a batch would take of each pass's slots, if these adapters were used.

        Args:
            weights: The weight of each adapter.

        Returns:
            By pass: float32 (slots,), or of one with groups (groups, slots), where a strength has blocks.

        Raises:
            SpecError: As `use`.
        """
        row = read_row(self.names, weights)
        if any(isinstance(value, Strength) for value in row.values()):
            if any(isinstance(value, Strength) and value.digest for value in row.values()):
                raise SpecError("a strength in a region acts at some places, and a weight at all: leave the region out")
            tables = make_tables(self, [row], True)
            rows = {p: [own[key][0].cpu() for key in ("weights", "which", "factors")] for p, own in tables.items()}
            return {p: expand_factors(*own) for p, own in rows.items()}
        row = {"": 0.0, **row}
        return {p: torch.tensor([get_value(row.get(name, 0.0)) for name in self.names_of(p)]) for p in self.banks}
