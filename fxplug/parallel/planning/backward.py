"""Followed back: which parts of an operation's inputs give a part of its result, by trying."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from ...core.torch_internals import modules as pytree
from ..runtime.layouts import Layout
from .planner import NeedsGather, Planner
from .sharding_plan import ShardingPlan
from .streams import PARTS, ArgumentSplit, Leaf, Placement, StreamNumber
from .trials import ShardTrials, get_name, is_value
from .walk import Walk

CAT = ("cat", "concat", "concatenate")


class Backward:
    """Finds the inputs of operations whose parts give parts of results. `sizes` are those of the streams that are followed."""

    numbers_count = True  # numbers in the model's code may count a stream, as those of heads and features do

    def __init__(self, walk: Walk, tries: ShardTrials) -> None:
        self.walk, self.tries, self.fed = walk, tries, walk.fed()
        self.sizes: list[int] = []
        self.planner = Planner(ShardingPlan(walk, tries, {}), False)

    def stream(self, size: int) -> int:
        """Return the number of the stream of this size; add one if there is none."""
        if size not in self.sizes:
            self.sizes.append(size)
        return self.sizes.index(size)

    def outcome(self, node: fx.Node, one: fx.Node, place: Placement) -> Any:
        """Return what an operation does with one input that is split, in the best way; None if it cannot be split."""
        streams = sorted(set(place.layout.streams))
        if len(streams) > len(PARTS):
            return None
        table = {stream: index for index, stream in enumerate(streams)}
        self.tries.streams.clear()
        self.tries.streams.true[:] = [self.sizes[stream] for stream in streams]
        self.planner.counted = len(streams) if self.numbers_count else 0
        self.planner.found.origins[:] = [(node, -1)] * len(streams)
        inputs = node.all_input_nodes
        for other in inputs:
            self.planner.values[other] = pytree.tree_map(self.sized, self.planner.full_value(other), is_leaf=is_value)
        self.planner.values[one] = Leaf(self.walk.values[one], rename_streams(place, table))
        sized = [index for index, other in enumerate(inputs) if self.planner.found.hangs_on_sizes(other)]
        try:
            got = self.planner.result(node, [inputs.index(one)], sized)
        except NeedsGather:
            return None
        if got is None or len(self.tries.streams.true) > len(streams):  # a stream of something else
            return None
        step, kinds, written = got
        back = {index: stream for stream, index in table.items()}
        splits = tuple((index, rename_streams(p, back)) for index, p in step.splits)
        kinds = [rename_streams(k, back) if isinstance(k, Placement) else k for k in kinds]
        return step._replace(splits=splits), kinds, written

    def sized(self, leaf: Any) -> Any:
        """Return a number of the graph: one that depends on the stream if it is a multiple of its size."""
        (size, *_), streams = self.tries.streams.true, self.tries.streams
        if self.numbers_count or type(leaf) is not int or leaf < 2 or leaf % size:
            return leaf
        times = leaf // size
        return StreamNumber(leaf, times * streams.small[0], tuple(times * n for n in streams.parts[0]))

    def before(self, node: fx.Node, wanted: Placement) -> list[tuple[fx.Node, Placement]] | None:
        """Return the inputs whose parts give this part of a value; None if no parts do."""
        if node.op == "placeholder":
            return None
        operation, member = node, 0
        if node.target is operator.getitem and isinstance(self.walk.values[node.all_input_nodes[0]], (tuple, list)):
            operation, member = node.all_input_nodes[0], node.args[1]  # type: ignore[assignment]
        inputs = operation.all_input_nodes
        if get_name(operation) in CAT and wanted.layout.outer == 1:
            return self.joined(operation, wanted)
        for index, place in self.guesses(operation, wanted):
            got = self.outcome(operation, inputs[index], place)
            if got is None:
                continue
            step, kinds, written = got
            if step.gathers or step.add or written or (not self.numbers_count and step._replace(splits=()) != ArgumentSplit()):
                continue
            if isinstance(member, int) and member < len(kinds) and kinds[member] == wanted:
                return [(inputs[index], place), *((inputs[other], p) for other, p in step.splits)]
        return None

    def joined(self, node: fx.Node, wanted: Placement) -> list[tuple[fx.Node, Placement]] | None:
        """Return the inputs of a concatenation, each with its run of the streams."""
        along = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
        parts = node.args[0]
        if not isinstance(along, int) or not isinstance(parts, (list, tuple)):
            return None
        if along % self.walk.values[node].dim() != wanted.dim:
            return [(one, wanted) for one in parts if isinstance(one, fx.Node)]
        left = list(wanted.layout.streams)
        found = []
        for one in parts:
            if not isinstance(one, fx.Node):
                return None
            size = self.walk.values[one].shape[wanted.dim]
            run: list[int] = []
            while left and wanted.layout.inner * sum(self.sizes[s] for s in run) < size:
                run.append(left.pop(0))
            if wanted.layout.inner * sum(self.sizes[s] for s in run) != size:
                return None
            found.append((one, Placement(wanted.dim, wanted.layout._replace(streams=tuple(run)))))
        return found

    def guesses(self, node: fx.Node, wanted: Placement) -> Iterator[tuple[int, Placement]]:
        """Yield inputs and how they may be split, the likeliest first."""
        layout, rank = wanted.layout, getattr(self.walk.values[node], "ndim", 0)
        runs = sorted(dict.fromkeys(layout.runs()), key=lambda run: -len(run))
        layer = node in self.walk.work  # whose features come of the rows of its weight
        inputs = sorted(enumerate(node.all_input_nodes), key=lambda row: (row[1] in self.fed) is layer)
        later = []
        for index, one in inputs:
            value = self.walk.values[one]
            if not isinstance(value, Tensor):
                continue
            rows = layer and one not in self.fed
            for dim in sorted(range(value.dim()), key=lambda d: d if rows else abs(d - value.dim() - wanted.dim + rank)):
                for run in runs[:3]:
                    times, rest = divmod(value.shape[dim], sum(self.sizes[s] for s in run))
                    if rest or not times:
                        continue
                    inners = sorted((n for n in range(1, times + 1) if times % n == 0), key=lambda n: (n != layout.inner, n))
                    for number, inner in enumerate(inners):
                        place = Placement(dim, Layout(run, times // inner, inner))
                        if number < 2 and len(run) == len(layout.streams):
                            yield index, place
                        else:
                            later.append((index, place))
        yield from later[:24]


def rename_streams(place: Placement, table: dict[int, int]) -> Placement:
    """Return a placement with its streams renumbered by a table."""
    return Placement(place.dim, place.layout._replace(streams=tuple(table[stream] for stream in place.layout.streams)))
