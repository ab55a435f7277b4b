"""Rows of adapters: what `Adapters.use` takes, as the tables of weights that the slots of each pass have."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from ..blocks.base import check_values
from ..core.errors import LONGEST, SpecError, cut, did_you_mean, quote
from ..core.locks import StateLock
from ..core.torch_internals.modules import without_watchers
from ..core.torch_internals.tensors import FakeTensor
from .banks import Bank, is_finite
from .loading import check_samples
from .strengths import Schedule, Strength, get_value, make_factors, make_regions

REGIONS = ("masks", "rests", "ratios")  # of a table: what its `regions` number, not of rows
TABLE = ("weights", "entries", "which", "factors", "regions", *REGIONS)  # what a choice writes of a table
Row = dict[str, float | Strength]  # of one sample: the weight of each adapter that takes part
Tables = dict[str, dict[str, Tensor]]  # by pass: what a choice writes into each tensor of the table


class Slots(Protocol):
    """Slots that a choice is for, as `Adapters` has them."""

    module: Any
    locks: tuple[StateLock, ...]
    banks: dict[str, list[Bank]]

    @property
    def names(self) -> list[str]:
        """Names of the loaded adapters."""

    def tensor(self, name: str) -> Tensor:
        """Return a parameter or buffer by name."""

    def there(self, name: str) -> Tensor | None:
        """Return a parameter or buffer, if there is one of that name."""

    def names_of(self, p: str) -> list[str]:
        """Return the name of the adapter in each slot of a pass."""

    def passes_of(self, lock: StateLock) -> list[str]:
        """Return the passes whose tables have this lock."""

    def list_names(self, p: str) -> list[str] | None:
        """Return the names of a pass's slots, another list after each change; None where nothing counts the changes."""

    def check_known(self, name: Any) -> str:
        """Return the name. Raises SpecError if no adapter has it."""


class Rows:
    """The adapters of each sample of a batch, read once and used often: what `Adapters.rows` makes.

    It names adapters, not slots: it goes on after loads and unloads, and where one of its adapters is gone, `use` and `using`
    raise SpecError with its name.
    """

    def __init__(self, adapters: Slots, rows: list[Row], single: bool) -> None:
        """Store the rows as `read_rows` gives them, one for all samples if `single`. Raises SpecError as `make_tables`."""
        self.adapters, self.rows, self.single = adapters, rows, single
        self._tables = make_tables(adapters, rows, single)
        self._state = self._read_state()

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"Rows({cut(repr(self.rows[0] if self.single else self.rows), LONGEST)})"

    def tables(self) -> Tables:
        """Return the tables as `make_tables` does, with the slots that the adapters have now. Raises SpecError as it does, and
        for an adapter that is gone."""
        state = self._read_state()
        if state is None or self._state is None or any(a is not b for a, b in zip(state, self._state, strict=True)):
            known = set(self.adapters.names)
            if (gone := next((name for row in self.rows for name in row if name not in known), None)) is not None:
                self.adapters.check_known(gone)
            self._tables, self._state = make_tables(self.adapters, self.rows, self.single), state
        return self._tables

    def _read_state(self) -> list[Any] | None:
        """Return what the tables depend on, as objects; None where nothing counts the writes, in inference mode."""
        found: list[Any] = []
        for p in self.adapters.banks:
            weights = self.adapters.tensor(f"{p}.gates.table.weights")
            if (names := self.adapters.list_names(p)) is None:
                return None
            found += [weights, weights.dtype, names]
        return found

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Rows) and (self.adapters, self.single) == (other.adapters, other.single)
        return same and self.rows == other.rows  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]

    @without_watchers
    def write(self, lock: StateLock) -> None:
        """Write them into the tables of the passes that have this lock, as calls in a block of `using` do.

        Args:
            lock: Of the tables.

        Raises:
            SpecError: For an adapter that was unloaded.
        """
        tables = self.tables()
        for name, tensor in self._tensors(lock).items():
            p, _, key = name.rpartition(".gates.table.")
            write_rows(tensor, tables[p][key], self.single and key not in REGIONS)

    @without_watchers
    def backup(self, lock: StateLock) -> Callable[[], None]:
        """Read the present values of these tables.

        Args:
            lock: Of the tables.

        Returns:
            A function that puts them back.
        """
        before = {name: (tensor, tensor.clone()) for name, tensor in self._tensors(lock).items()}

        @without_watchers
        def restore() -> None:
            now = self._tensors(lock)  # others, where the module was moved in the middle of a call
            for name, (tensor, value) in before.items():
                for target in {id(t): t for t in (tensor, now.get(name, tensor))}.values():
                    target.copy_(value)

        return restore

    def _tensors(self, lock: StateLock) -> dict[str, Tensor]:
        """Return the tables with this lock, by name, without the fake ones that exist while the module is traced."""
        names = [f"{p}.gates.table.{name}" for p in self.adapters.passes_of(lock) for name in TABLE]
        tensors = {name: self.adapters.there(name) for name in names}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None and not isinstance(tensor, FakeTensor)}


def read_rows(adapters: Slots, what: Any) -> tuple[list[Row], bool]:
    """Read the argument of `Adapters.use`.

    Args:
        adapters: The slots that it is for.
        what: A name, names with weights, None, or one of these for each sample.

    Returns:
        The names and weights for each sample, and whether there is one set, for all samples.

    Raises:
        SpecError: For an unknown name, a position out of range, a weight that is no finite number, anything else.
    """
    known = dict.fromkeys(adapters.names)
    if what is None or isinstance(what, (str, Mapping)):
        return [read_row(known, what)], True
    return [read_row(known, entry, i) for i, entry in _entries(what)], False


def write_rows(tensor: Tensor, value: Tensor, single: bool) -> None:
    """Write rows into the first of a table, or one into all of them; or a number."""
    (tensor if single or not value.dim() else tensor[: len(value)]).copy_(value)


def make_tables(adapters: Slots, rows: list[Row], single: bool) -> Tables:
    """Make the table of each pass from such rows.

    Returns:
        By pass: `weights` (rows, slots) in the dtype and on the device of its slots, `entries`, their number, 0 if `single`;
            with `per_sample` `which`, the slots that each row takes, and with `groups` `factors` of these in each group; with
            `regions` what `make_regions` gives.

    Raises:
        SpecError: For more rows than there is room for, a weight out of range for the dtype, samples that differ in
            adapters which change the weight itself, and strengths by block where a pass has no groups.
    """
    made: Tables = {}
    for p in adapters.banks:
        weights = check_values(adapters.tensor(f"{p}.gates.table.weights"))
        names = adapters.names_of(p)
        if not single and len(rows) > weights.shape[0]:
            raise SpecError(f"a batch can have entries for at most {weights.shape[0]} samples, not {len(rows)}")
        table = _make_table(rows, names)
        which, factors = adapters.there(f"{p}.gates.table.which"), adapters.there(f"{p}.gates.table.factors")
        strengths = [strength for row in rows for strength in row.values() if isinstance(strength, Strength)]
        if any(strength.region is not None for strength in strengths) and adapters.there(f"{p}.gates.table.regions") is None:
            raise SpecError(
                f"a strength in a region needs masks, and '{p}' has none: apply the pass with per_sample and regions=True"
            )
        if any(strength.blocks for strength in strengths) and factors is None:
            raise SpecError(
                f"a strength by block needs groups of layers, and '{p}' has none: apply the pass with per_sample and "
                "groups='block'"
            )
        entries = torch.tensor(0 if single else len(rows))
        own = made[p] = {"weights": table.to(weights.device, weights.dtype), "entries": entries}
        if which is not None:
            most, found = which.shape[1], (table != 0).sum(1)
            if (found > most).any():
                where = "" if single else f"sample {int(found.argmax())}: "
                raise SpecError(
                    f"{where}{int(found.max())} adapters, and '{p}' has room for {most} in a sample: use fewer, or apply the "
                    f"pass with per_sample={int(found.max())}"
                )
            slots = choose_slots(table, names, most)
            own["which"] = slots.to(which.device)
            if factors is not None:
                kept = vars(adapters).setdefault("_factors", {}).setdefault(p, {})
                paths = [bank.path for banks in adapters.banks.values() for bank in banks]
                value = make_factors(rows, names, slots, adapters.banks[p], factors.shape[1], paths, kept)
                own["factors"] = value.to(factors.device, factors.dtype)
            if (masks := adapters.there(f"{p}.gates.table.masks")) is not None:
                made_before = vars(adapters).setdefault("_masks", {})
                for key, value in make_regions(rows, names, slots.cpu(), made_before).items():
                    own[key] = value.to(masks.device, masks.dtype if key != "regions" else value.dtype)
        if not all(bool(own[key].isfinite().all()) for key in ("weights", "factors") if key in own):
            raise SpecError(f"a weight is out of range for {weights.dtype}, the dtype of the slots of '{p}'")
        mapping = next((bank for bank in adapters.banks[p] if bank.maps), None)
        if mapping is not None and (table != table[:1]).any():
            raise SpecError(
                f"the adapters of '{p}' change weights ({mapping.kind} at '{mapping.path}'), which all samples of a batch "
                "share: use the same adapters for all samples, or a pass that runs beside its layers, such as lora"
            )
        apart = (table != table[:1]).any(0).nonzero()[:, 0].tolist()
        if strengths:
            differ = {name for row in rows for name in {*row, *rows[0]} if row.get(name) != rows[0].get(name)}
            apart = [slot for slot, name in enumerate(names) if name in differ]
        check_samples(p, adapters.banks[p], apart, adapters.tensor, adapters.module)
    return made


def _make_table(rows: list[Row], names: list[str]) -> Tensor:
    """Return how much each row takes of each slot, float32 (rows, slots)."""
    table, at = torch.zeros(len(rows), len(names)), {name: slot for slot, name in enumerate(names) if name}
    found = [(i, at[name], get_value(value)) for i, row in enumerate(rows) for name, value in row.items() if name in at]
    if found:
        row, slot, value = zip(*found, strict=True)
        table[[*row], [*slot]] = torch.tensor([float(each) for each in value])
    return table


def check_name_known(name: Any, known: Collection[str]) -> str:
    """Return the name of an adapter. Raises SpecError if it is none of those that are loaded."""
    if name not in known:
        listed = f"; there are {', '.join(known)}" if known else "; none is loaded yet"
        raise SpecError(f"no adapter {name!r}{did_you_mean(str(name), known)}{listed}")
    return str(name)


def choose_slots(weights: Tensor, names: list[str], most: int) -> Tensor:
    """Return the slots that each row of weights (rows, slots) takes, int64 (rows, most): in the order of their names, as bits
    depend on an order, then the last slot, which holds zeros."""
    order = torch.empty(len(names), dtype=torch.int64)
    order[torch.tensor(sorted(range(len(names)), key=names.__getitem__))] = torch.arange(len(names))
    taken = weights.cpu() != 0
    which = torch.where(taken, order, len(names)).argsort(dim=1, stable=True)[:, :most]
    return torch.where(taken.gather(1, which), which, len(names) - 1).to(weights.device)


def read_row(known: Collection[str], entry: Any, sample: int | None = None) -> Row:
    """Read one entry as names, of those that are known, with weights: that of a sample, or without `sample` of all.

    Raises SpecError as `read_rows`.
    """
    where = "" if sample is None else f"sample {sample}: "
    if entry is None:
        return {}
    if isinstance(entry, int) and not isinstance(entry, bool) and sample is not None:
        if not -1 <= entry < len(known):
            raise SpecError(f"{where}no adapter at position {entry}; there are {len(known)}: {', '.join(known)}")
        return {} if entry == -1 else {list(known)[entry]: 1.0}
    if isinstance(entry, str):
        entry = {entry: 1.0}
    if not isinstance(entry, Mapping):
        raise SpecError(f"{where}an adapter must be a name, names with weights, or None, not {quote(entry)}")
    try:
        weights = {check_name_known(name, known): value for name, value in entry.items()}
    except SpecError as error:
        raise SpecError(f"{where}{error.finding}") from None
    for name, value in weights.items():
        if isinstance(value, Schedule):
            raise SpecError(f"{where}'{name}' has a Schedule: give the strength that it has at a step, schedule.at(...)")
        if not isinstance(value, Strength) and not is_finite(value):
            raise SpecError(f"{where}the weight of '{name}' must be a finite number, not {quote(value)}")
    kept = {name: value for name, value in weights.items() if isinstance(value, Strength) and (value.blocks or value.digest)}
    return {name: kept.get(name, float(get_value(value))) for name, value in weights.items()}


def _entries(what: Any) -> Iterator[tuple[int, Any]]:
    if isinstance(what, Tensor):
        if what.dim() != 1 or what.is_floating_point() or what.dtype == torch.bool:
            raise SpecError(f"positions must be a tensor of whole numbers, one per sample, not {what.dtype} {list(what.shape)}")
        what = what.tolist()
    if not isinstance(what, (list, tuple)) or not what:
        known = "a name, names with weights, None, or a list with one of these per sample"
        raise SpecError(f"use takes {known}, not {quote(what)}")
    yield from enumerate(what)
