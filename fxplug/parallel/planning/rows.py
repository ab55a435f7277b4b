"""Rows of images over processes: which dimension is split, and what an operation does that reads its neighbours' rows."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..runtime.halos import Reach
from ..runtime.layouts import Layout
from .planner import Planner, make_plan, replan
from .reach import ReachProbe, find_extents, find_reach, has_reach
from .sharding_plan import PlanSettings, ShardingPlan, Unsplittable
from .streams import ArgumentSplit, Leaf, Placement
from .trials import ShardTrials
from .walk import Walk

NORMS = (nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
ENOUGH = 0.95  # of the work: other dimensions are not looked at
MOST = 64  # rows a token
SMALL = {1: (7, 4), 2: (7, 3), 4: (7, 5), 8: (9, 7)}  # small parts by what the number of tokens is a multiple of
LARGER = {1: (13, 10), 2: (13, 9), 4: (15, 13), 8: (17, 15)}  # where fewer rows come of them


class FetchedRows(NamedTuple):
    """Rows of one input are fetched: which input, where its rows lie, how far they reach, and where those of the result lie."""

    which: int
    place: Placement
    reach: Reach
    out: Placement


class GlobalNorm(NamedTuple):
    """Normalisation whose statistics are those of all processes."""

    groups: int | None
    eps: float
    weight: Any
    bias: Any


class Spatial(Planner):
    """Finds what operations do on rows: what they read of their neighbours, statistics of all, or the whole and its rows."""

    means = True

    def attention(self, node: fx.Node) -> Any:
        """Return the value of a norm of groups of channels whose statistics are those of all processes, in place of
        attention."""
        norm = self.norm(node)
        if norm is None:
            return None
        place = self.found.place(node.all_input_nodes[0])
        if place is None or place.dim < 2 or any(self.found.is_split(n) for n in node.all_input_nodes[1:]):
            return None
        self.found.steps[node] = ArgumentSplit(special="norm", near=norm)
        return Leaf(self.walk.values[node], place)

    def stream(self, node: fx.Node, dim: int, size: int) -> int:
        """Return the planner's stream; a new one is tried in parts that can be halved as often as its true size."""
        before = len(self.tries.streams.true)
        found = super().stream(node, dim, size)
        if len(self.tries.streams.true) > before:  # as often even as the true number: a view may halve it
            rank = self.walk.values[node].dim()
            images = [v for v in self.walk.values.values() if isinstance(v, Tensor) and v.dim() == rank]
            parts = LARGER if any(1 < image.shape[dim] < size for image in images) else SMALL
            first, second = parts[self.tries.multiple or math.gcd(size, max(SMALL))]
            more = self.tries.more + 4 * (first + second + 2 * self.tries.more == size)  # as many as there are say little
            self.tries.streams.own[found] = first + more, second + more
        return found

    def norm(self, node: fx.Node) -> GlobalNorm | None:
        """Return the settings of a node's normalisation of groups of channels, or None."""
        if node.op == "call_module":
            module: Any = self.tries.gm.get_submodule(str(node.target))
            if type(module) not in NORMS or len(node.args) != 1 or getattr(module, "running_mean", None) is not None:
                return None
            names = [f"{node.target}.{name}" if getattr(module, name) is not None else None for name in ("weight", "bias")]
            return GlobalNorm(getattr(module, "num_groups", None), module.eps, *names)
        if node.target in (torch.group_norm, F.group_norm, F.instance_norm):
            form = F.instance_norm if node.target is F.instance_norm else F.group_norm
            given = inspect.signature(form).bind(*node.args[:5] if form is F.group_norm else node.args, **node.kwargs)
            given.apply_defaults()
            a = given.arguments
            if a.get("running_mean") is None and a.get("use_input_stats", True) is True:
                return GlobalNorm(a.get("num_groups"), a["eps"], a["weight"], a["bias"])
        return None

    def repairs(self, node: fx.Node, split: list[int], sized: list[int]) -> Iterator[ArgumentSplit]:
        """Yield the planner's repairs, and those that keep one of three or more split inputs and gather the others."""
        yield from super().repairs(node, split, sized)
        for kept in split if len(split) > 2 else ():  # queries stay, what they look at is whole
            yield ArgumentSplit(gathers=tuple(i for i in split if i != kept), whole_numbers=bool(sized))

    def mixed(self, node: fx.Node, everything: ArgumentSplit) -> Any:
        """Return the value of an operation that no repair makes run: on rows of neighbours, or as the planner does."""
        alone = node not in self.walk.writes and isinstance(self.walk.values[node], Tensor)
        near = self.near(node, everything.gathers) if alone and everything.gathers else None
        if near is None:
            return super().mixed(node, everything)
        self.found.steps[node] = ArgumentSplit(special="near", near=near)
        return Leaf(self.walk.values[node], near.out)

    # --- rows of neighbours

    def near(self, node: fx.Node, split: tuple[int, ...]) -> FetchedRows | None:
        """Return how a node runs on rows of its neighbours, or None."""
        place = self.found.place(node.all_input_nodes[split[0]])
        if len(split) != 1 or place is None or len(place.layout.streams) != 1 or place.layout.outer != 1:
            return None
        key = ("near", self.key(node))
        if key[1] is None or key not in self.tries.known:
            self.tries.known[key] = self.reach(node, split[0])
        if self.tries.known[key] is None:
            return None
        reach, dim, small = self.tries.known[key]
        out = self.rows(node, dim, small, place, reach)
        return None if out is None else FetchedRows(split[0], place, reach, Placement(dim, out))

    def reach(self, node: fx.Node, index: int) -> tuple[Reach, int, int] | None:
        """Return the reach of a node in one input, the dimension of rows in its result, and their number; None if it reads
        all."""
        probe = ReachProbe(self.tries, node, self.values, index)
        if probe.whole is None:
            return None
        for times in (1, 3):  # of few rows a reach may be all of them, whatever it is of more
            tried = probe if times == 1 else probe.longer(times)
            found = find_reach(tried)
            if found is not None and has_reach(tried, *found):
                reach, dim = found
                return find_extents(tried, reach, dim) or reach, dim, probe.whole.shape[dim]
        return None

    def rows(self, node: fx.Node, dim: int, small: int, place: Placement, reach: Reach) -> Layout | None:
        """Return the layout of the rows of a result: along an existing stream, or a new one."""
        streams, true = self.tries.streams, self.walk.values[node].shape[dim]
        (source,) = place.layout.streams
        if reach.extra and reach.size(streams.true[source] * place.layout.inner) != true:
            return None
        for stream in (source, *range(len(streams.true))):
            times = small // streams.small[stream]
            if times and times * streams.small[stream] == small and times * streams.true[stream] == true:
                return Layout((stream,), 1, times)
        if small < 2 or not reach.extra:
            return None
        self.found.origins.append((node, dim))
        stream = streams.new(true, small)
        self.found.derived.add(stream)
        return Layout((stream,))


# --- where rows begin


def images(walk: Walk) -> list[fx.Node]:
    """Return the inputs that may be images or feature maps: floating-point, three dimensions or more."""
    tensors = [node for node in walk.inputs if isinstance(walk.values[node], Tensor)]
    return [node for node in tensors if walk.values[node].dim() >= 3 and walk.values[node].is_floating_point()]


def grains(walk: Walk, size: int, dims: int, back: int) -> list[int]:
    """Return how many rows a token may have, the best first: so many that images with fewer rows still have whole tokens."""
    found = []
    for nodes in (walk.work, walk.values):
        values = [value for node in nodes if isinstance(value := walk.values[node], Tensor) and value.dim() == dims]
        rows = {value.shape[back] for value in values if 1 < value.shape[back] <= size and size % value.shape[back] == 0}
        found.append(max((size // n for n in rows if size // n <= MOST), default=1))
    return list(dict.fromkeys([*found, 1]))


def find_best(tries: ShardTrials, walk: Walk, split: Mapping[fx.Node, int] | None = None) -> ShardingPlan:
    """Return the plan in rows that splits most work: along the height of images, else along another dimension. along the height
    of images, else along another dimension.

    Raises Unsplittable where no plan splits anything.
    """
    found: ShardingPlan | None = None
    failed: Unsplittable | None = None
    for starts, tokens in _split_arguments(walk, split) if split else _choices(walk):
        table = {node: walk.values[node].shape[dim] // tokens for node, dim in starts.items()}
        try:
            one = make_plan(walk, tries, starts, PlanSettings(True, grains=table, planner=Spatial))
        except Unsplittable as error:
            failed = error
            continue
        if found is None or one.rank() > found.rank():
            found = one
        if found.share() > ENOUGH and not any(step.cut for step in found.steps.values()):
            break
    if found is None or not found.share():
        raise failed or Unsplittable("no input is an image or a feature map whose rows can be split")
    return found


def check_at_other_rows(found: ShardingPlan, tries: Sequence[ShardTrials]) -> None:
    """Check a plan for numbers of rows with another divisor, and with other random values.

    If it differs then, it is only valid for numbers of rows like that of the example, and is checked once more for these.
    Raises Unsplittable if that differs, too.
    """
    multiple = math.gcd(found.sizes[0], max(SMALL))
    tries[0].multiple, tries[1].more = 1 if multiple > 1 else 2, 8
    try:
        replan(found, tries[0])
    except Unsplittable:
        replan(found, tries[1])
        found.divisor, found.rest = (multiple, 0) if multiple > 1 else (2, 1)


def _choices(walk: Walk) -> Iterator[tuple[dict[fx.Node, int], int]]:
    """Yield starts, and the largest number of their tokens: the rows of an image first, then its columns, then frames."""
    given = images(walk)
    most = max((walk.values[n].dim() for n in given), default=0)
    for back in (-2, -1, -3) if most > 3 else (-1, -2):
        first = next((n for n in given if walk.values[n].dim() == most and -back <= most - 2), None)
        if first is None:
            continue
        size = walk.values[first].shape[back]
        for grain in grains(walk, size, most, back):
            starts = {}
            for node in given:
                value = walk.values[node]
                if value.dim() == most and value.shape[back] % (size // grain) == 0:
                    starts[node] = value.dim() + back
            yield starts, size // grain


def _split_arguments(walk: Walk, split: Mapping[fx.Node, int]) -> Iterator[tuple[dict[fx.Node, int], int]]:
    starts = {}
    for node, dim in split.items():
        value = walk.values[node]
        if not isinstance(value, Tensor) or not -value.dim() <= dim < value.dim():
            raise Unsplittable(f"'{node.name}' has no dimension {dim}")
        starts[node] = dim % value.dim()
    node, dim = next(iter(starts.items()))
    value = walk.values[node]
    for grain in grains(walk, value.shape[dim], value.dim(), dim - value.dim()):
        tokens = value.shape[dim] // grain
        if all(walk.values[n].shape[d] % tokens == 0 for n, d in starts.items()):
            yield starts, tokens
