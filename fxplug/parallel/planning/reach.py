"""Which rows an operation reads for which rows of its result: found by running it on some of its rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from ...core.ir.containers import tolerance
from ...core.torch_internals import modules as pytree
from ..runtime.halos import Reach
from .streams import Leaf, Number, Refused
from .trials import Tries, large, leaves_of

PERIODS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32)


class Probe:
    """An operation on small values, run on some of the rows of one of its inputs."""

    def __init__(self, tries: Tries, node: fx.Node, values: dict[fx.Node, Any], index: int) -> None:
        self.tries, self.node = tries, node
        self.given = {n: tries.given(values[n], None, False, True)[0] for n in node.all_input_nodes}
        self.kinds = {n: values[n] for n in node.all_input_nodes}
        self.input = node.all_input_nodes[index]
        leaf: Leaf = values[self.input]
        assert leaf.place is not None
        self.dim: int = leaf.place.dim
        self.x: Tensor = self.given[self.input]
        self.size: int = self.x.shape[self.dim]
        self.whole = self.of(self.x)
        self.bound = 0.0
        if self.whole is not None and self.whole.numel() and not self.whole.is_complex():
            self.bound = tolerance(self.whole, within=True) * max(1e-6, float(self.whole.double().abs().max()))

    def of(self, x: Tensor) -> Any:
        """What some rows give: a tensor, or None."""
        given = {}
        for node, value in self.given.items():
            leaves, tree = pytree.tree_flatten(value)
            kinds = leaves_of(self.kinds[node])
            new = []
            for leaf, kind in zip(leaves, kinds, strict=True):
                if isinstance(kind, Number):
                    if type(leaf) is not int or leaf * x.shape[self.dim] % self.size:
                        return None
                    leaf = leaf * x.shape[self.dim] // self.size
                new.append(leaf.clone() if isinstance(leaf, Tensor) else leaf)
            given[node] = pytree.tree_unflatten(new, tree)
        given[self.input] = x.clone()
        try:
            with torch.no_grad():
                found = self.tries.run(self.node, given)
        except Refused:  # too few rows, or sizes that do not go together
            return None
        return found if isinstance(found, Tensor) else None

    def rows(self, begin: int, end: int) -> Any:
        """What the rows from `begin` to before `end` give: a tensor, or None."""
        return self.of(self.x.narrow(self.dim, begin, end - begin))


def reach_of(probe: Probe) -> tuple[Reach, int] | None:
    """What an operation reads, and the dimension of its result where the rows are; None where it reads all, or unevenly."""
    if probe.whole is None or not probe.whole.numel() or probe.size < 3:
        return None
    if (marked := _marked(probe)) is None:
        return None
    best = None  # a reach of nearly all rows may be one by accident: a shorter one is looked for
    for period in sorted({*PERIODS, *(round(probe.size / n) for n in probe.whole.shape if n)}):
        most = (probe.size - 1) // period if period else 0
        if most < 2:
            continue
        rest, front = probe.rows(period, probe.size), probe.rows(0, period * most)
        if rest is None or front is None or rest.dim() != probe.whole.dim() or front.dim() != rest.dim():
            continue
        dims = [d for d, n in enumerate(rest.shape) if n != probe.whole.shape[d]]
        if len(dims) != 1 or (gives := probe.whole.shape[dims[0]] - rest.shape[dims[0]]) < 1:
            continue
        (dim,) = dims
        late, early = _wrong(probe, rest, gives, dim), _wrong(probe, front, 0, dim)
        if late is None or early is None or not len(late) or not len(early) or late[-1] or early[0]:
            continue
        last = int(late.nonzero()[-1]) + 1 if late.any() else 0
        first = int(early.nonzero()[0]) if early.any() else len(early)
        before, after = -(-last // gives), -(-(gives * most - first) // gives)
        for lines in marked:
            before = max(before, lines(dim, period, gives)[0])
            after = max(after, lines(dim, period, gives)[1])
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


def right(probe: Probe, reach: Reach, dim: int, first: int, last: int) -> bool:
    """Whether some rows of the result come out of the rows that are read for them."""
    begin, end = reach.window(first, last, probe.size)
    got = probe.rows(begin, end)
    first -= begin // reach.period * reach.gives
    last -= begin // reach.period * reach.gives
    if got is None or got.dim() != probe.whole.dim() or last > got.shape[dim]:
        return False
    wrong = _wrong(probe, got.narrow(dim, first, last - first), begin // reach.period * reach.gives + first, dim)
    return wrong is not None and not wrong.any()


def extents(probe: Probe, reach: Reach, dim: int) -> Reach | None:
    """The reach with what is over by the remainder of the input's rows; None where that is not to be found."""
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


def _wrong(probe: Probe, got: Tensor, offset: int, dim: int) -> Tensor | None:
    """Which rows are others than those of the whole, from a row on."""
    length = got.shape[dim]
    if offset + length > probe.whole.shape[dim] or got.dtype != probe.whole.dtype:
        return None
    want = probe.whole.narrow(dim, offset, length)
    if want.shape != got.shape:
        return None
    if want.is_complex():
        return None
    off = (torch.nan_to_num(want.double()) - torch.nan_to_num(got.double())).abs()
    return off.movedim(dim, 0).flatten(1).amax(1) > probe.bound if off.numel() else torch.zeros(length, dtype=torch.bool)


def _marked(probe: Probe) -> Any:
    """What hangs on the first rows, and on the last, whatever the weights are: told by values that are no number, or large.

    None where every row of the result hangs on either: the operation has no reach.
    """
    if not probe.x.is_floating_point():
        return []
    middle = probe.size // 2
    found = []
    for begin, end in ((0, middle), (middle, probe.size)):
        marks = []
        for odd in (math.nan, large(probe.x.dtype)):
            x = probe.x.clone()
            x.narrow(probe.dim, begin, end - begin).fill_(odd)
            got = probe.of(x)
            if got is None or not got.is_floating_point() or got.shape != probe.whole.shape:
                return []
            marks.append(((got.double() - probe.whole.double()).abs() > probe.bound) | got.isnan())
        found.append(marks[0] | marks[1])
    if all(bool(one.all()) for one in found):
        return None
    head, tail = found

    def lines(dim: int, period: int, gives: int) -> tuple[int, int]:
        upper, lower = (one.movedim(dim, 0).flatten(1).any(1).nonzero() for one in (head, tail))
        before = int(upper[-1]) // gives - (middle - 1) // period if len(upper) else 0
        after = middle // period + 1 - -(-(int(lower[0]) + 1) // gives) if len(lower) else 0
        return before, after

    return [lines]
