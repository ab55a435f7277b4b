"""Values of stages that are kept, by what they were computed from; the oldest go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ...core.errors import SpecError, format_fields, quote
from ...core.ir.containers import list_leaves
from .sameness import KnownConditions


@dataclass
class KeepLimits:
    """How much is kept: sets of conditions, times, and bytes (None: no limit)."""

    conditions: int = 8
    times: int = 256
    bytes: int | None = None

    __repr__ = format_fields


def check_limit(name: str, value: Any) -> int:
    """Return a limit. Raises SpecError for what is no whole number of 1 or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SpecError(f"limit: {name} must be a whole number, 1 or more, not {quote(value)}")
    return value


class Key(NamedTuple):
    """What a stage's values were computed from: each is a number or bytes that stand for one thing alone, 0 for none."""

    stage: str
    form: int
    conditions: int = 0
    time: Any = 0
    slots: Any = 0


Values = dict[str, Any]  # by the names of nodes


class KeptValues:
    """The values of all stages."""

    def __init__(self) -> None:
        self.rows: OrderedDict[Key, Values] = OrderedDict()
        self.times: OrderedDict[Any, None] = OrderedDict()

    def find(self, key: Key) -> Values | None:
        """Return the values of a stage, which are the newest then; None where there are none."""
        values = self.rows.get(key)
        if values is not None:
            self.rows.move_to_end(key)
            self._note_time(key)
        return values

    def add(self, key: Key, values: Values, limits: KeepLimits, known: KnownConditions) -> None:
        """Keep the values of a stage; drop the oldest beyond the limits, which the copies of known conditions are within."""
        self.rows[key] = values
        self._note_time(key)
        while len(self.times) > limits.times:
            gone, _ = self.times.popitem(last=False)
            self.drop(lambda old, gone=gone: old.time == gone)  # type: ignore[misc]
        if limits.bytes is not None:
            more = known.count_bytes()
            while len(self.rows) > 1 and count_bytes([*self.rows.values()]) + more > limits.bytes:
                self.rows.popitem(last=False)

    def _note_time(self, key: Key) -> None:
        if key.time != 0:
            self.times[key.time] = None
            self.times.move_to_end(key.time)

    def drop(self, which: Callable[[Key], bool]) -> None:
        """Drop the values of the keys that a function is true for."""
        for key in [key for key in self.rows if which(key)]:
            del self.rows[key]

    def count_bytes(self, stage: str) -> int:
        """Return the size of what is kept of a stage."""
        return count_bytes([values for key, values in self.rows.items() if key.stage == stage])


def count_bytes(values: Collection[Values]) -> int:
    """Return the size of the memory that values lie in; what several share counts once."""
    tensors = [leaf for leaf in list_leaves([list(row.values()) for row in values]) if isinstance(leaf, Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
