"""Where features are born: from layers that contract them back to the weights whose rows give them, by trying.

Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053): of a pair of layers the first gives its features in parts, the second
takes them in parts and gives a summand. Heads, gates and fused layers in between are what the operations make of parts.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from ...core.ir.traced_module import TracedModule
from ..runtime.layouts import Layout
from .backward import CAT, Backward, rename_streams
from .opened_layers import open_layers
from .planner import make_plan, replan
from .sharding_plan import PlanSettings, ShardingPlan, Unsplittable
from .streams import ArgumentSplit, Placement
from .trials import Memory, ShardTrials, count_elements, get_name, list_leaves
from .walk import Walk, bind, walk

WAYS = 12  # kinds of streams that are tried for one layer
SMALL = 4  # times smaller is a sum that may be taken on the way
FAR = 40  # operations that are followed behind what is split


@dataclass
class LayerPair:
    """A layer that contracts features, and where they are born: weights and how they are split."""

    closing: fx.Node
    starts: dict[fx.Node, Placement] = field(default_factory=dict)
    split: dict[fx.Node, Placement] = field(default_factory=dict)  # what is split on the way, and the layer's own weights
    work: int = 0
    leaks: int = 0  # readers of what is split that are not on the way
    refined: list[tuple[tuple[int, ...], int]] = field(default_factory=list)  # other streams to try, and elements of a token
    finest: int = 0  # the size of the shortest stream
    stuck: list[fx.Node] = field(default_factory=list)  # whole values of which a process takes its part


class Features(Backward):
    """Looks for pairs of layers in a graph whose layers are opened, for a number of processes."""

    def __init__(self, walk: Walk, tries: ShardTrials, number: int) -> None:
        super().__init__(walk, tries)
        self.number = number
        self.why: dict[fx.Node, str] = {}
        self.aside = {n for n, value in walk.values.items() if not any(isinstance(v, Tensor) for v in list_leaves(value))}

    def best(self) -> ShardingPlan:
        """Return the plan of all pairs that need no gather. Raises Unsplittable if there are none."""
        pairs = [pair for node in self.walk.graph.nodes if node in self.walk.work and (pair := self.pair(node)) is not None]
        pairs = self.agreed(pairs)
        while pairs:
            starts = {node: place for pair in pairs for node, place in pair.starts.items()}
            found = self.plan(self.tries, starts)
            bad = self.broken(found, pairs)
            if not bad:
                found.why = {**self.why, **found.why}
                return found
            for pair, why in bad:
                self.why[pair.closing] = why
            pairs = [pair for pair in pairs if all(pair is not one for one, _ in bad)]
        raise Unsplittable(next((f"'{n.name}': {why}" for n, why in self.why.items()), "no layer reads the output of another"))

    def plan(self, tries: ShardTrials, starts: dict[fx.Node, Placement]) -> ShardingPlan:
        """Return the plan of these starts; its streams are those that are used."""
        used = sorted({stream for place in starts.values() for stream in place.layout.streams})
        table = {stream: index for index, stream in enumerate(used)}
        again: dict[fx.Node, int | Placement] = {node: rename_streams(place, table) for node, place in starts.items()}
        return make_plan(self.walk, tries, again, PlanSettings(streams=[self.sizes[stream] for stream in used]))

    def agreed(self, pairs: list[LayerPair]) -> list[LayerPair]:
        """Return pairs of which no two split one value differently, preferring the best ones."""
        known: dict[Any, Placement] = {}
        found = []
        for pair in sorted(pairs, key=lambda p: (p.leaks > 0, bool(p.stuck), -p.work)):
            claims = {n.target if n.op == "get_attr" else n: place for n, place in pair.split.items()}
            odd = next((n for n, place in claims.items() if known.get(n, place) != place), None)
            if odd is None:
                known.update(claims)
                found.append(pair)
            else:
                self.why[pair.closing] = f"'{odd}' is split differently for another layer"
        return found

    def broken(self, found: ShardingPlan, pairs: list[LayerPair]) -> list[tuple[LayerPair, str]]:
        """Return pairs that need a gather, or that do not close, and why."""
        bad: dict[int, tuple[LayerPair, str]] = {}
        for pair in pairs:
            if not found.summed(pair.closing):
                bad[id(pair)] = pair, "its input is not split like its weight"
        from_starts: dict[fx.Node, set[fx.Node]] = {}
        for node in self.walk.graph.nodes:
            mine = {node} & set(found.starts)
            for one in node.all_input_nodes:
                mine |= from_starts.get(one, set())
            step = found.steps.get(node, ArgumentSplit())
            inputs = node.all_input_nodes
            lost = {start for index in step.gathers for start in from_starts.get(inputs[index], ())}
            if node.op == "output":
                lost = {start for one in inputs if found.is_split(one) for start in from_starts.get(one, ())}
            for pair in pairs:
                if lost & set(pair.starts):
                    bad.setdefault(id(pair), (pair, f"'{node.name}' needs all features"))
            if found.is_split(node) or found.hangs_on_sizes(node):
                from_starts[node] = mine
        return list(bad.values())

    # --- one pair

    def pair(self, closing: fx.Node) -> LayerPair | None:
        """Return the best way to split what a layer contracts, None if there is none (then `why` has the reason)."""
        found: list[LayerPair] = []
        for one, dim in self.contracted(closing):
            size = self.walk.values[one].shape[dim]
            todo: list[tuple[tuple[int, ...], int]] = [((size,), 1)]
            for sizes, inner in todo:
                if len(todo) > WAYS:
                    break
                if min(sizes) < self.number:
                    self.why[closing] = f"{min(sizes)} parts of '{one.name}' are fewer than {self.number} processes"
                    continue
                trial = self.trial(closing, one, dim, sizes, inner)
                if trial is None:
                    continue
                todo += [more for more in trial.refined if more not in todo]
                if trial.starts:
                    found.append(trial)
                elif trial.stuck:
                    self.why.setdefault(closing, f"features of '{trial.stuck[0].name}' do not correspond to rows of a weight")
        best = max(found, key=lambda p: (-p.leaks, p.work, -len(p.stuck), p.finest), default=None)
        if best is not None:
            self.why.pop(closing, None)
        elif closing not in self.why:
            self.why[closing] = "none of its inputs can be split so that the results only need to be summed"
        return best

    def contracted(self, closing: fx.Node) -> Iterator[tuple[fx.Node, int]]:
        """Yield the inputs of a layer, and the dimensions along which it sums up products with a weight."""
        inputs = closing.all_input_nodes
        tensors = [n for n in inputs if isinstance(self.walk.values[n], Tensor)]
        weights = [self.walk.values[n] for n in tensors if n not in self.fed and self.walk.values[n].dim() > 1]
        if not weights:
            return
        sizes = {size for weight in weights for size in weight.shape}
        for one in tensors:
            value = self.walk.values[one]
            if one not in self.fed or not value.is_floating_point():
                continue
            for dim in sorted(range(value.dim()), key=lambda dim: (value.shape[dim] not in sizes, -dim)):
                if value.shape[dim] < 2:
                    continue
                step = self.outcome(closing, one, Placement(dim, Layout((self.stream(value.shape[dim]),))))
                if step is not None and step[0].add and not step[0].mean:
                    weights = [inputs[index] for index, _ in step[0].splits]
                    if weights and not any(w in self.fed for w in weights):
                        yield one, dim
                        return

    def trial(self, closing: fx.Node, one: fx.Node, dim: int, sizes: tuple[int, ...], inner: int) -> LayerPair | None:
        """Trace the features that a layer contracts back, in streams of these sizes; None if they cannot be split."""
        layout = Layout(tuple(self.stream(size) for size in sizes), 1, inner)
        if (got := self.outcome(closing, one, Placement(dim, layout))) is None or not got[0].add:
            return None
        inputs = closing.all_input_nodes
        split = {inputs[i]: p for i, p in got[0].splits}
        pair = LayerPair(closing, split=split, work=self.walk.work[closing], finest=min(sizes))
        known: dict[fx.Node, Placement] = {}
        todo = [(one, Placement(dim, layout))]
        while todo:
            node, place = todo.pop()
            if node in known:
                continue
            known[node] = place
            if node not in self.fed:
                if node.op == "get_attr":
                    pair.starts[node] = place
                continue
            if (before := self.before(node, place)) is None:
                pair.stuck.append(node)
                pair.refined += self.refined(node, place, sizes, inner)
                continue
            todo += before
            pair.work += self.walk.work.get(node, 0)
        pair.split.update(known)
        born = {node: place for node, place in known.items() if node in self.fed and node not in pair.stuck}
        pair.leaks, more = self.leaks(born, {*known, closing, *self.aside})
        pair.split.update(more)
        if not any(n in self.walk.work for n in known):  # its own input alone: nothing is born for it
            pair.starts.clear()
        return pair

    def leaks(self, split: dict[fx.Node, Placement], known: set[fx.Node]) -> tuple[int, dict[fx.Node, Placement]]:
        """Return how many unknown readers of split values need all of them, or a large sum, and what the others split.

        The others compute on parts, such as low-rank updates.
        """
        found, todo, seen, more = 0, list(split.items()), set(known), {}
        while todo:
            node, place = todo.pop()
            for user in node.users:
                if user in seen:
                    continue
                seen.add(user)
                got = None if user.op == "output" or len(seen) > len(known) + FAR else self.outcome(user, node, place)
                large = count_elements(self.walk.values.get(user)) * SMALL > count_elements(self.walk.values[node])
                if got is None or got[0].gathers or (got[0].add and large):
                    found += 1
                    continue
                more.update({user.all_input_nodes[index]: p for index, p in got[0].splits})
                if not got[0].add and isinstance(self.walk.values[user], (tuple, list)):
                    items = [one for one in user.users if one.target is operator.getitem and one not in seen]
                    members = {one: got[1][one.args[1]] for one in items}
                    seen.update(members)
                    todo += [(one, kind) for one, kind in members.items() if isinstance(kind, Placement)]
                elif not got[0].add and isinstance(got[1][0], Placement):
                    todo.append((user, got[1][0]))
        return found, more

    def refined(
        self, node: fx.Node, place: Placement, sizes: tuple[int, ...], inner: int
    ) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield smaller streams with more elements per token, or several streams, for which a node may be split."""
        inputs = [self.walk.values[n] for n in node.all_input_nodes if isinstance(self.walk.values[n], Tensor)]
        whole = [self.sizes[s] for s in place.layout.streams]
        if get_name(node) in CAT and len(whole) == 1:
            parts = [value.shape[place.dim] for value in inputs if value.dim() > place.dim]
            if sum(parts) == whole[0] * place.layout.inner and all(n % place.layout.inner == 0 for n in parts):
                at = sizes.index(whole[0])
                yield (*sizes[:at], *(n // place.layout.inner for n in parts), *sizes[at + 1 :]), inner
        for size in whole:
            for number in dict.fromkeys(n for value in inputs for n in value.shape if 1 < n < size and size % n == 0):
                times = size // number
                if all(n % times == 0 for n in sizes):
                    yield tuple(n // times for n in sizes), inner * times


def find(
    gm: TracedModule, mode: bool, call: Any, number: int, paths: frozenset[str] = frozenset(),
    before: ShardingPlan | None = None,
    memory: Memory | None = None,
) -> tuple[frozenset[str], ShardingPlan]:
    """Return the layers that are opened for a plan over features, by path, and the plan of the graph of a mode after that.

    `paths`, `before` and `memory` are those of the other mode, if there is one: weights are split once. Raises Unsplittable if
    there is no plan, or if it differs with other random values.
    """
    memory, inputs = memory or Memory(), bind(gm, *call)
    if before is None:
        every = open_layers(gm, None, [mode], memory.traces)
        walked = walk(every, every.graphs[mode], inputs)
        first = Features(walked, ShardTrials(every, 0, memory=memory), number).best()
        used = {n.meta["opened"] for n in walked.graph.nodes if "opened" in n.meta and (first.is_split(n) or n in first.steps)}
        paths = frozenset(used)
    else:
        first = before
    born = {str(node.target): place for node, place in first.starts.items() if isinstance(place, Placement)}
    some = open_layers(gm, paths, [mode], memory.traces)
    walked = walk(some, some.graphs[mode], inputs)
    starts = {n: born[str(n.target)] for n in walked.graph.nodes if n.op == "get_attr" and str(n.target) in born}
    sizes = first.sizes[: 1 + max(stream for place in born.values() for stream in place.layout.streams)]
    found = make_plan(walked, ShardTrials(some, 0, memory=memory), starts, PlanSettings(streams=sizes))
    replan(found, ShardTrials(some, 1, memory=memory))
    if before is None:
        found.why = {**_reasons(first, walked.graph, paths), **found.why}
    return paths, found


def _reasons(first: ShardingPlan, graph: fx.Graph, paths: frozenset[str]) -> dict[fx.Node, str]:
    """Return why layers stay whole, in a graph where fewer are opened."""
    names = {node.name: node for node in graph.nodes}
    calls = {str(node.target): node for node in reversed(graph.nodes) if node.op == "call_module"}
    found = {}
    for node, why in first.why.items():
        if not first.is_split(node) and not first.summed(node):
            one = names.get(node.name) if node.meta.get("opened", "") in ("", *paths) else calls.get(node.meta["opened"])
            if one is not None:
                found[one] = why
    return found
