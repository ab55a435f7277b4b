"""Which rows an operation reads for which rows of its result: found by running it on some of its rows."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from ...core.ir.comparison import WITHIN
from ...core.torch_internals import modules as pytree
from ..runtime.halos import Reach
from .streams import Leaf, OperationRefused, StreamNumber
from .trials import ShardTrials, choose_factor, list_leaves

PERIODS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32)


class ReachProbe:
    """An operation on small values, run on some of the rows of one of its inputs."""

    def __init__(self, tries: ShardTrials, node: fx.Node, values: dict[fx.Node, Any], index: int) -> None:
        self.tries, self.node = tries, node
        self.given = {n: tries.make_parts(values[n], None, False, True)[0] for n in node.all_input_nodes}
        self.kinds = {n: values[n] for n in node.all_input_nodes}
        self.input = node.all_input_nodes[index]
        leaf: Leaf = values[self.input]
        assert leaf.place is not None
        self.dim: int = leaf.place.dim
        self.x: Tensor = self.given[self.input]
        self.base = self.size = self.x.shape[self.dim]
        self.run()

    def run(self) -> None:
        """Run the operation on all rows."""
        self.whole = self.of(self.x)
        self.bound = 0.0
        if self.whole is not None and self.whole.numel() and not self.whole.is_complex():
            self.bound = WITHIN.shares(self.whole)[0] * max(1e-6, float(self.whole.double().abs().max()))

    def of(self, x: Tensor) -> Any:
        """Return the result on some rows: a tensor, or None."""
        given = {}
        for node, value in self.given.items():
            leaves, tree = pytree.tree_flatten(value)
            kinds = list_leaves(self.kinds[node])
            new = []
            for leaf, kind in zip(leaves, kinds, strict=True):
                if isinstance(kind, StreamNumber):
                    if type(leaf) is not int or leaf * x.shape[self.dim] % self.base:
                        return None
                    leaf = leaf * x.shape[self.dim] // self.base
                new.append(leaf.clone() if isinstance(leaf, Tensor) else leaf)
            given[node] = pytree.tree_unflatten(new, tree)
        given[self.input] = x.clone()
        try:
            with torch.no_grad():
                found = self.tries.run(self.node, given)
        except OperationRefused:  # too few rows, or sizes that do not go together
            return None
        return found if isinstance(found, Tensor) else None

    def longer(self, times: int) -> ReachProbe:
        """Return a probe of the same operation on `times` as many rows."""
        found, shape = copy.copy(self), list(self.x.shape)
        shape[self.dim] *= times
        found.x = self.tries.random(shape, self.x.dtype)
        found.size = shape[self.dim]
        found.run()
        return found

    def rows(self, begin: int, end: int) -> Any:
        """Return the result on the rows from `begin` to before `end`: a tensor, or None."""
        return self.of(self.x.narrow(self.dim, begin, end - begin))


def find_reach(probe: ReachProbe) -> tuple[Reach, int] | None:
    """Return the reach of an operation, and the dimension of the rows in its result; None if it reads all, or unevenly."""
    if probe.whole is None or not probe.whole.numel() or probe.size < 3:
        return None
    best = None  # a reach of nearly all rows may be one by accident: a shorter one is looked for
    for period in sorted({*PERIODS, *(round(probe.size / n) for n in probe.whole.shape if n)}):
        rest = probe.rows(period, probe.size) if 0 < 2 * period < probe.size else None
        if rest is None or rest.dim() != probe.whole.dim():
            continue
        dims = [d for d, n in enumerate(rest.shape) if n != probe.whole.shape[d]]
        if len(dims) != 1 or (gives := probe.whole.shape[dims[0]] - rest.shape[dims[0]]) < 1:
            continue
        (dim,) = dims
        if not rest.shape[dim] or not _is_close(probe, probe.whole.select(dim, -1), rest.select(dim, -1)):
            continue  # periods of this length do not do the same
        before, after = _beyond(probe, dim, gives, period)
        if best is not None and (before + after + 1) * period >= best[0]:
            continue
        for wider, longer in ((0, 0), (0, 2), (1, 2), (2, 6)):
            found = Reach(period, gives, before + wider, after + wider, before + after + 1 + 2 * wider + longer)
            if all(right(probe, found, dim, *one) for one in _windows(probe.whole.shape[dim])):
                best = (before + after + 1) * period, found, dim
                break
        if best is not None and best[0] * 2 <= probe.size:
            break
    return None if best is None else best[1:]


def has_reach(probe: ReachProbe, reach: Reach, dim: int) -> bool:
    """Return whether an operation reads no more if there are so many rows that it does not read all of them."""
    least = (reach.before + reach.after + 1 + reach.least) * reach.period
    longer = probe.longer(2 + least // probe.size)
    if longer.whole is None or longer.whole.dim() <= dim:
        return False
    beyond = _beyond(longer, dim, reach.gives, reach.period)
    if beyond[0] > reach.before or beyond[1] > reach.after:  # what small values hide
        return False
    size = longer.whole.shape[dim]
    rows = {0, size - 1, *range(size // 2, min(size, size // 2 + reach.gives))}
    return all(right(longer, reach, dim, row, row + 1) for row in rows)


def right(probe: ReachProbe, reach: Reach, dim: int, first: int, last: int) -> bool:
    """Return whether some rows of the result are computed from the rows in their window alone."""
    begin, end = reach.window(first, last, probe.size)
    got, skipped = probe.rows(begin, end), begin // reach.period * reach.gives
    if got is None or got.dim() != probe.whole.dim() or last - skipped > got.shape[dim]:
        return False
    return _is_close(probe, probe.whole.narrow(dim, first, last - first), got.narrow(dim, first - skipped, last - first))


def _is_close(probe: ReachProbe, want: Tensor, got: Tensor) -> bool:
    if want.shape != got.shape or want.dtype != got.dtype or want.is_complex():
        return False
    off = (torch.nan_to_num(want.double()) - torch.nan_to_num(got.double())).abs()
    return bool((off <= probe.bound).all())


def find_extents(probe: ReachProbe, reach: Reach, dim: int) -> Reach | None:
    """Return the reach with the extra rows for each remainder of the input's rows; None if they cannot be found."""
    extra = []
    for rest in range(reach.period):
        size = probe.size - (probe.size - rest) % reach.period
        found = probe.rows(0, size)
        if found is None:
            return None
        extra.append(found.shape[dim] - size // reach.period * reach.gives)
    return reach._replace(extra=tuple(extra))


def _windows(size: int) -> Iterator[tuple[int, int]]:
    for first in sorted({0, 1, size // 3, size // 2, max(0, size - 2), size - 1}):
        if first < size:
            yield first, first + 1
    yield 0, size // 2
    yield size // 2, size


def _beyond(probe: ReachProbe, dim: int, gives: int, period: int) -> tuple[int, int]:
    """Return how many periods an operation reads before its own and after, whatever its weights are.

    NaN or large values in one half of the rows show which rows of the result depend on that half.
    """
    middle, found = probe.size // period // 2, []
    for begin, end in ((0, middle * period), (middle * period, probe.size)):
        marks = torch.zeros(probe.whole.shape, dtype=torch.bool)
        for odd in (math.nan, choose_factor(probe.x.dtype)) if probe.x.is_floating_point() else ():
            x = probe.x.clone()
            x.narrow(probe.dim, begin, end - begin).fill_(odd)
            got = probe.of(x)
            if got is None or not got.is_floating_point() or got.shape != probe.whole.shape:
                return 0, 0
            marks |= ((got.double() - probe.whole.double()).abs() > probe.bound) | got.isnan()
        found.append([int(row) for row in marks.movedim(dim, 0).flatten(1).any(1).nonzero()])
    upper, lower = found
    before = upper[-1] // gives - (middle - 1) if upper else 0
    return max(0, before), max(0, middle - lower[0] // gives) if lower else 0
