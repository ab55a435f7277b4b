"""Stages of a graph that runs patch by patch: where it is cut, and each stage as graphs of its own."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...core.errors import SpecError
from ...core.ir.graph import copy_nodes, insert
from ...core.ir.subgraphs import SWITCHES
from ...core.torch_internals import modules as pytree
from ..planning.planner import CHECKS
from .patches import Patcher, PatchValue, add_patch, compute_attention, put_patch, take_patch

SENT = (Tensor, int, float, bool, complex, str, type(None), torch.dtype, torch.device)  # what goes from stage to stage
TENTHS = 10  # of its share of the work, which a stage may have more


@dataclass
class PipelineStage:
    """A part of the nodes, as three graphs. Values are known by the names of their nodes.

        entire(*arguments, patch, patches, *taken, *fixed_taken, *kept) -> (given, parts, fixed)
        early(*arguments, *fixed_used)                                  -> early_used
        late(patch, patches, *early_used, *fixed_used, *taken, *kept)   -> (given, parts)

    `entire` runs all tokens; `fixed` are the numbers that are read off tokens and hold for every patch. `early` is what does
    not hang on the patch; `late` runs one. `parts` has for each value that is put together what this patch gives to it, and
    the sizes of its streams.
    """

    entire: fx.GraphModule
    early: fx.GraphModule
    late: fx.GraphModule
    kept: list[PatchValue]
    taken: dict[str, int]  # with the stage that gives it
    fixed_taken: dict[str, int]
    fixed_used: list[str]
    given: list[str]
    fixed: list[str]
    work: int  # floating-point operations in one piece
    reads: set[int]  # positions of the arguments whose values `early` looks at, not their shapes alone


@dataclass
class Stages:
    """A graph in stages, and what comes behind the last: tail(*arguments, *fixed, *wholes, *others) -> result."""

    stages: list[PipelineStage]
    tail: fx.GraphModule
    fixed: dict[str, int]  # for the tail, with the stage that gives it
    wholes: list[PatchValue]  # what the tail puts together, in the last stage
    others: list[str]  # other values that the tail takes, in the last stage
    reads: set[int]  # positions of the arguments whose values the tail looks at


class _StageNodes:
    """The nodes of a patched graph by kind, and the stage of each.

    `late` ones are other for each patch; `fixed` ones are numbers read off those that are the same for each; `tail` ones come
    behind the last stage.
    """

    def __init__(self, patcher: Patcher) -> None:
        self.patcher, self.walk = patcher, patcher.found.walk
        self.late: set[fx.Node] = set()
        self.fixed: set[fx.Node] = set()
        self.tail: set[fx.Node] = set()
        self.wholes: list[PatchValue] = []
        self.others: list[fx.Node] = []
        inputs = {patcher.patch, patcher.patches, *(kept.given for kept in patcher.kept)}
        for node in patcher.graph.nodes:
            if node.op != "output" and not (self.late | inputs).isdisjoint(node.all_input_nodes):
                (self.fixed if self.is_fixed(node) else self.late).add(node)
        (self.output,) = (node for node in patcher.graph.nodes if node.op == "output")
        self.find_tail()
        self.patched = self.late | self.fixed | self.tail
        behind = self.tail | {kept.node for kept in self.wholes}
        self.order = [n for n in patcher.graph.nodes if n in self.patched and n not in behind]
        self.home: dict[fx.Node, int] = {}
        self.writers: dict[fx.Node, list[fx.Node]] = {}  # by the value that has the memory
        for node, values in self.walk.writes.items():
            for root in set().union(*map(self.walk.roots, values)):
                self.writers.setdefault(root, []).append(node)

    def find_tail(self) -> None:
        makers = {kept.node: kept for kept in self.patcher.kept}
        before = self.reached([n for n in self.late if n in makers or n.target is take_patch], lambda n: n.all_input_nodes)
        todo, edge = [n for n in self.output.all_input_nodes if n in self.late], set()
        while todo:
            node = todo.pop()
            if node in makers or node in before or any(self.is_split(n) for n in node.all_input_nodes):
                edge.add(node)
            elif node not in self.tail:
                self.tail.add(node)
                todo += [n for n in node.all_input_nodes if n in self.late]
        for node in sorted(edge):
            if node in makers and makers[node].inner and node not in before:
                self.wholes.append(makers[node])
                self.tail |= self.reached([node], lambda n: n.users)
            else:
                self.others.append(node)
        self.tail |= self.reached(self.tail, lambda n: n.users)
        self.tail.discard(self.output)
        self.fixed -= self.tail

    def reached(self, nodes: Iterable[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
        """Return the nodes that are reached from nodes, following users or inputs."""
        found: set[fx.Node] = set()
        todo = [n for node in nodes for n in step(node)]
        while todo:
            node = todo.pop()
            if node not in found:
                found.add(node)
                todo += step(node)
        return found

    def is_fixed(self, node: fx.Node) -> bool:
        if node.target in (take_patch, put_patch, add_patch, compute_attention) or node.target in CHECKS:
            return False
        one = self.patcher.origin.get(node)
        if one is None or self.patcher.twin[one.name] is not node:  # made by the writer: a whole number, or a member
            return node.target is not operator.getitem
        leaves = pytree.tree_leaves(self.walk.values[one])
        if one in self.walk.writes or not node.users:
            return False
        return not any(isinstance(v, Tensor) for v in leaves) and not self.patcher.found.hangs_on_sizes(one)

    def is_split(self, node: fx.Node) -> bool:
        one = self.patcher.origin.get(node)
        if node.target in (take_patch, put_patch, add_patch) or one is None or node not in self.late:
            return node.target is take_patch
        return self.patcher.found.is_split(one)

    def work(self, node: fx.Node) -> int:
        one = self.patcher.origin.get(node)
        return 0 if one is None or node.target in (take_patch, put_patch, add_patch) else self.walk.work.get(one, 0)

    def bytes(self, node: fx.Node) -> float:
        """Return the number of bytes to send a value; infinite for one that cannot be sent."""
        one = self.patcher.origin.get(node)
        leaves = [] if one is None else pytree.tree_leaves(self.walk.values[one])
        if not all(isinstance(v, SENT) for v in leaves):
            return math.inf
        return sum(v.numel() * v.element_size() if isinstance(v, Tensor) else 8 for v in leaves)

    # --- closures

    def early(self, roots: Iterable[fx.Node]) -> set[fx.Node]:
        """Return the nodes that values are computed from and that are the same for every patch, with those that write into
        them."""
        found: set[fx.Node] = set()
        todo = list(roots)
        while todo:
            node = todo.pop()
            if node in found or node in self.patched or node.op in ("placeholder", "output"):
                continue
            found.add(node)
            todo += [*node.all_input_nodes, *self.written_by(node)]
        return found

    def written_by(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that write into the memory of a value."""
        one = self.patcher.origin.get(node)
        if one is None or not self.writers:
            return []
        return [self.patcher.twin[w.name] for root in self.walk.roots(one) for w in self.writers.get(root, ())]

    def scopes(self, stage: int) -> list[fx.Node]:
        """Return checks, and switches of gradients and autocast, that belong to a stage: to all if they read inputs alone."""
        found = []
        for node in self.patcher.graph.nodes:
            if node not in self.patched and (node.target in CHECKS or node.target in SWITCHES):
                homes = [self.home.get(n, -1) for n in self.fixed_of(self.early([node]))]
                if not homes or max(homes) == stage:
                    found.append(node)
        return found

    def reads(self, nodes: Iterable[fx.Node], results: Iterable[fx.Node]) -> set[int]:
        """Return the arguments from which results are computed through tensors alone."""
        found = set()
        order, results = sorted(nodes), set(results)
        for i, argument in enumerate(self.patcher.arguments):
            seen = {argument}
            for node in order:
                one = self.patcher.origin.get(node)
                leaves = [] if one is None else pytree.tree_leaves(self.walk.values.get(one))
                if any(isinstance(v, Tensor) for v in leaves) and not seen.isdisjoint(node.all_input_nodes):
                    seen.add(node)
            if not seen.isdisjoint(results):
                found.add(i)
        return found

    def fixed_of(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return sorted({n for node in nodes for n in node.all_input_nodes if n in self.fixed})

    # --- cuts

    def cuts(self, number: int) -> list[int]:
        """Return the positions in the order where stages begin, except the first. Raises SpecError if there are too few."""
        places = self.places()
        if len(places) < number - 1:
            raise SpecError(
                f"this model cannot be cut into {number} stages: it has {len(places)} places where few values pass from one "
                f"part to the next; set stages={len(places) + 1} or fewer"
            )
        done = [0, *itertools.accumulate(map(self.work, self.order))]
        points = [(0, 0.0, 0), *((at, size, done[at]) for at, size in places), (len(self.order), 0.0, done[-1])]
        share = done[-1] / number
        for tenths in range(1, TENTHS * number):
            if (found := _path(points, number, share * (1 + tenths / TENTHS))) is not None:
                return found
        raise SpecError(f"this model cannot be cut into {number} stages that each have some of its work: set fewer stages")

    def places(self) -> list[tuple[int, float]]:
        """Return the positions where fewer bytes are passed on than at their neighbours, and the bytes."""
        position = {node: i for i, node in enumerate(self.order)}
        size = [0.0] * (len(self.order) + 1)
        for i, node in enumerate(self.order):
            last = max((position.get(user, len(self.order)) for user in node.users), default=i)
            if node in self.late and last > i:
                bytes_ = self.bytes(node)
                last_write = max((position.get(twin, -1) for twin in self.written_by(node)), default=-1)
                for at in range(i + 1, last + 1):
                    size[at] += math.inf if at <= last_write else bytes_
        found, at = [], 1
        while at < len(self.order):
            end = at
            while end + 1 < len(self.order) and size[end + 1] == size[at]:
                end += 1
            if size[at - 1] > size[at] < math.inf and (size[end + 1] > size[at] or end + 1 == len(self.order)):
                found.append((end, size[at]))
            at = end + 1
        return found


def _path(points: Sequence[tuple[int, float, int]], number: int, most: float) -> list[int] | None:
    """Return the cuts with the fewest bytes, then the most even, for nonempty stages of at most so much work; None if
    impossible."""
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for _ in range(number):
        nxt: dict[int, tuple[float, float, list[int]]] = {}
        for i, (size, squares, cuts) in best.items():
            for j in range(i + 1, len(points)):
                work = points[j][2] - points[i][2]
                if 0 < work <= most:
                    new = size + points[j][1], squares + float(work) ** 2, [*cuts, points[j][0]]
                    if j not in nxt or new < nxt[j]:
                        nxt[j] = new
        best = nxt
    found = best.get(len(points) - 1)
    return None if found is None else found[2][:-1]


# --- graphs


def cut_stages(patcher: Patcher, root: nn.Module, number: int) -> Stages:
    """Cut a patched graph into stages of about equal work, where little is passed from one to the next.

    Raises SpecError if it cannot be cut so often.
    """
    nodes = _StageNodes(patcher)
    cuts = [0, *nodes.cuts(number), len(nodes.order)]
    nodes.home = {node: s for s in range(number) for node in nodes.order[cuts[s] : cuts[s + 1]]}
    nodes.home.update({kept.node: number - 1 for kept in nodes.wholes})
    stages = [_stage(nodes, root, s, number - 1) for s in range(number)]
    switches = [n for n in patcher.graph.nodes if n.target in SWITCHES]
    early = nodes.early([n for node in [*nodes.tail, nodes.output, *switches] for n in (node, *node.all_input_nodes)])
    fixed = nodes.fixed_of([*nodes.tail, *early, nodes.output])
    given = [*patcher.arguments, *fixed, *(kept.node for kept in nodes.wholes), *nodes.others]
    tail = _module(root, {*nodes.tail, *early}, given, nodes.output.args[0])
    reads = nodes.reads({*nodes.tail, *early}, nodes.output.all_input_nodes)
    return Stages(stages, tail, {n.name: nodes.home[n] for n in fixed}, nodes.wholes, [n.name for n in nodes.others], reads)


def _stage(nodes: _StageNodes, root: nn.Module, number: int, last: int) -> PipelineStage:
    patcher, home = nodes.patcher, nodes.home
    own = {n for n, s in home.items() if s == number}
    late = own & nodes.late
    scopes = nodes.scopes(number)
    inside = {*late, *(n for n in scopes if n.target in SWITCHES)}
    kept = [row for row in patcher.kept if row.node in own]
    hand = [patcher.patch, patcher.patches]
    ends = nodes.others if number == last else []  # of earlier stages, too
    taken = sorted({n for node in own for n in (*node.all_input_nodes, *ends) if n in nodes.late and home[n] < number})
    direct = {n for node in inside for n in node.all_input_nodes} - nodes.late - nodes.fixed - inside
    direct -= {*hand, *(row.given for row in patcher.kept)}
    reads = {n for n in direct if n.op == "get_attr"}
    early = nodes.early([*(direct - reads), *scopes])
    whole = nodes.early([*(n for node in own for n in node.all_input_nodes), *early])
    used, asked = nodes.fixed_of([*late, *early]), nodes.fixed_of([*own, *whole])
    before = [n for n in asked if home[n] < number]
    own_fixed = sorted(own & nodes.fixed)
    given = [n for n in sorted(late) if any(home.get(u, last) > number for u in n.users)] if number < last else nodes.others
    parts = tuple((row.value, *row.sizes) for row in kept)
    cells = [row.given for row in kept]
    first = sorted(direct - reads)
    entire = _module(root, {*own, *whole}, [*patcher.arguments, *hand, *taken, *before, *cells], (given, parts, own_fixed))
    start = _module(root, early, [*patcher.arguments, *used], first)
    later = _module(root, inside | reads, [*hand, *first, *used, *taken, *cells], (given, parts))
    return PipelineStage(
        entire, start, later, kept, {n.name: home[n] for n in taken}, {n.name: home[n] for n in before},
        [n.name for n in used], [n.name for n in given], [n.name for n in own_fixed], sum(map(nodes.work, late)),
        nodes.reads(early, first),
    )  # fmt: skip


def _module(root: nn.Module, nodes: set[fx.Node], given: Sequence[fx.Node], results: Any) -> fx.GraphModule:
    """Return nodes of a graph as a module that takes the values of others."""
    new = fx.Graph()
    values = {one: insert(new, "placeholder", one.name, name=one.name) for one in given}
    copy_nodes(sorted(nodes), new, values)
    insert(new, "output", "output", (fx.node.map_arg(results, values.__getitem__),))
    new.lint()
    return fx.GraphModule(root, new)
