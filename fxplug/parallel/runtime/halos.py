"""Rows that an operation reads of its neighbours: fetched from whichever process has them, and what is too much cut off."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...core.errors import GuardError, SpecError, quote
from . import layouts
from .collectives import Collective, Lengthwise, check_integer, exchange


class Reach(NamedTuple):
    """Of an operation that does the same everywhere along its rows: `gives` rows of its result come from `period` of its input.

    The rows of a period also hang on `before` periods in front of it and `after` behind. Fewer than `least` periods are
    given to it only where there are not more. `extra` is how many rows there are besides, by the remainder of the input's.
    """

    period: int
    gives: int
    before: int
    after: int
    least: int
    extra: tuple[int, ...] = ()

    def window(self, first: int, last: int, size: int) -> tuple[int, int]:
        """Return the range of the `size` input rows that are read for rows `first` to `last` of the result."""
        every = -(-size // self.period)
        begin = max(0, first // self.gives - self.before)
        end = max(-(-last // self.gives) + self.after, begin + self.least)
        if end >= every:
            end, begin = every, max(0, min(begin, every - self.least))
        return begin * self.period, min(end * self.period, size)

    def size(self, size: int) -> int:
        """Return the number of rows of the result for `size` rows of the input."""
        return size // self.period * self.gives + self.extra[size % self.period]

    def numbers(self) -> tuple[int, ...]:
        """Return it as integers, from which `read` restores it."""
        return self.period, self.gives, self.before, self.after, self.least, *self.extra


def read(numbers: tuple[int, ...]) -> Reach:
    """Make a reach from its numbers. Raises SpecError for invalid ones."""
    if not isinstance(numbers, (tuple, list)) or len(numbers) < 5 or any(type(n) is not int for n in numbers):
        raise SpecError(f"a halo must be a list of five or more whole numbers, not {quote(numbers)}")
    period, gives, before, after, least, *extra = numbers
    found = Reach(period, gives, before, after, least, tuple(extra))
    if min(found.period, found.gives, found.least) < 1 or found.before < 0 or len(found.extra) not in (0, found.period):
        raise SpecError(f"{quote(numbers)} are not valid numbers of a halo")
    return found


class Near(Lengthwise):
    """What `Fetch` and `Cut` have in common: rows are `inner` a token, those of the result `out`, or as many as a call says."""

    def __init__(self, ways: dict[str, int], axis: str, dim: int, inner: int, out: int, reach: tuple[int, ...]) -> None:
        super().__init__(ways, axis, dim, inner)
        self.out, self.reach = check_integer("out", out, 1), read(reach).numbers()

    def bounds(self, rank: int, world: int, given: int, tokens: int, out: int) -> tuple[int, int, int, int]:
        """Return the range of a process's rows of the result, and of the rows of `given` that it reads for them."""
        first, last = (layouts.find_start(tokens, r, world) * out for r in (rank, rank + 1))
        return first, last, *read(self.reach).window(first, last, given)


class Fetch(Near):
    """The rows that this process's part of a result is computed from: forward(x, given, gives).

    `x` is its part along dimension `dim`; `given` are the tokens of the whole input, `gives` those of the whole result.
    """

    def forward(self, x: Tensor, given: int, gives: int, inner: int | None = None, out: int | None = None) -> Tensor:
        rank, world, group = self.group_of()
        inner, out = self.inner if inner is None else inner, self.out if out is None else out
        starts = [layouts.find_start(given, r, world) * inner for r in range(world + 1)]
        if x.shape[self.dim] != starts[rank + 1] - starts[rank]:
            raise GuardError(
                f"dimension {self.dim} of {tuple(x.shape)} is not this process's part of {given * inner} rows: make a plan "
                "with inputs of this size"
            )
        windows = [self.bounds(r, world, given * inner, gives, out)[2:] for r in range(world)]
        overlaps = [[_overlap(windows[to], starts[of], starts[of + 1]) for to in range(world)] for of in range(world)]
        mine = overlaps[rank]
        parts = [x.narrow(self.dim, first - starts[rank], length) for first, length in mine]
        own = parts[rank]
        if all(overlaps[of][to][1] == 0 for of in range(world) for to in range(world) if of != to):
            return own.contiguous()
        row = x.numel() // x.shape[self.dim]
        give = [0 if r == rank else part.numel() for r, part in enumerate(parts)]
        take = [0 if r == rank else overlaps[r][rank][1] * row for r in range(world)]
        flat = torch.cat([part.reshape(-1) for r, part in enumerate(parts) if r != rank])
        came = list(torch.split(exchange(flat, give, take, rank, group), take))
        shape = list(x.shape)
        found = []
        for r in range(world):
            shape[self.dim] = overlaps[r][rank][1]
            found.append(own if r == rank else came[r].view(shape))
        return torch.cat(found, self.dim)  # also what is empty: a gradient goes back through the exchange everywhere


class Cut(Near):
    """This process's part of a result that was computed from what `Fetch` gave: forward(y, given, gives)."""

    def forward(self, y: Tensor, given: int, gives: int, inner: int | None = None, out: int | None = None) -> Tensor:
        rank, world, _ = self.group_of()
        inner, out = self.inner if inner is None else inner, self.out if out is None else out
        first, last, begin, end = self.bounds(rank, world, given * inner, gives, out)
        reach = read(self.reach)
        first, last = (n - begin // reach.period * reach.gives for n in (first, last))
        whole = end - begin == given * inner
        fewer = reach.extra and reach.size(given * inner) != gives * out  # which every process sees
        if gives < world or fewer or last > y.shape[self.dim] or (whole and y.shape[self.dim] != gives * out):
            raise GuardError(
                f"{gives * out} rows of {given * inner} cannot be split over {world} processes: use fewer processes for "
                "'rows', or make a plan with inputs of this size"
            )
        return y.narrow(self.dim, first, last - first).contiguous()


class Extent(Collective):
    """How many rows an operation gives for all rows of its input: forward(x, given)."""

    def __init__(self, ways: dict[str, int], axis: str, inner: int, reach: tuple[int, ...]) -> None:
        super().__init__(ways, axis)
        self.inner, self.reach = check_integer("inner", inner, 1), read(reach).numbers()

    def forward(self, x: Tensor, given: int, inner: int | None = None) -> int:
        return read(self.reach).size(given * (self.inner if inner is None else inner))


class RowScale(Lengthwise):
    """A number that grows with the rows, for those that were fetched: forward(number, rows, given)."""

    def forward(self, number: int, rows: Tensor, given: int, inner: int | None = None) -> int:
        return number * rows.shape[self.dim] // (given * (self.inner if inner is None else inner))


def _overlap(window: tuple[int, int], start: int, end: int) -> tuple[int, int]:
    """Return the start and length of the overlap of a window with the range between two rows."""
    first, last = max(window[0], start), min(window[1], end)
    return (first, last - first) if last > first else (start, 0)
