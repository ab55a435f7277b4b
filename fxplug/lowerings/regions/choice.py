"""Which regions to take when nobody names them: the disjoint ones that cost least; and what outlined ones cost, in memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import networkx
from torch import fx, nn

from ...core.errors import MatchError
from ...core.ir import functions
from ...core.ir.regions import added
from ...core.ir.subgraphs import Cut, aliases, changed_input, plan
from ...core.ir.traced_module import class_names

SMALL = 1e-3  # a region of less than this share of the model's activations is not worth a second run


State = TypeVar("State")


def cheapest(
    tree: networkx.DiGraph[str],
    start: State,
    moves: Iterable[Callable[[State], State]],
    take: Callable[[State, str, list[str]], bool],
    cost: Callable[[State, list[str]], float],
) -> tuple[float, list[str]]:
    """Disjoint regions of a tree (`nesting_tree`), no set of which that was tried costs less, and what they cost.

    A state says which regions may be taken: from the inside out, `take(state, region, inner)` says whether a region takes the
    place of those that were taken inside it. Each of the moves is tried from the best state so far, in turn, until none of them
    makes `cost(state, regions)` less.
    """
    order = [(key, list(tree.successors(key))) for key in networkx.dfs_postorder_nodes(tree, "")]
    moves = list(moves)

    def tried(state: State) -> tuple[float, list[str]]:
        taken: dict[str, list[str]] = {}
        for key, parts in order:
            inner = [region for part in parts for region in taken.pop(part)]
            taken[key] = [key] if take(state, key, inner) else inner
        return cost(state, taken[""]), taken[""]

    (best, regions), better = tried(start), True
    while better:
        better = False
        for move in moves:
            state = move(start)
            now, found = tried(state)
            if now < best:
                best, regions, start, better = now, found, state, True
    return best, regions


def choose(graph: fx.Graph, members: Mapping[str, list[fx.Node]], root: nn.Module, checkpoint: bool) -> list[str]:
    """Disjoint repeated regions of a graph, in the order they run.

    Regions are repeated when the same operations run in them in the same order, whatever their names and sizes are and
    whatever passes put in. Of all choices the one with the smallest estimate of saved memory is taken: what leaves the
    regions, what lies outside them, and the largest inside of one, as that is computed again (Chen et al. 2016, arXiv
    1604.06174). A region that would save less than two thirds of its inside is not worth a second run. Sizes are those of the
    trace. Raises MatchError when nothing is repeated.
    """
    tree = nesting_tree(graph, members)
    inside, leaving = _inside(graph, members, root, tree), dict[str, int]()
    kinds = {key: hash(_structure(nodes, root)) for key, nodes in members.items() if not is_leaf(key, nodes)}
    same = Counter(kinds.values())
    for key, kind in kinds.items():
        cut = plan(key, members[key], root) if same[kind] > 1 else ""
        if isinstance(cut, Cut) and not (checkpoint and changed_input(cut.nodes, cut.inputs, root)):
            leaving[key] = sum(map(_bytes, cut.outputs))
    spent: dict[str, int] = {}  # with nothing taken inside
    for key in networkx.dfs_postorder_nodes(tree, ""):
        parts = list(tree.successors(key))
        spent[key] = max(0, inside[key] - sum(inside[k] for k in parts)) + sum(spent[k] for k in parts)

    def cost(key: str, taken: list[str]) -> int:
        return spent[key] - sum(spent[k] - leaving[k] for k in taken)

    def take(limit: float, key: str, inner: list[str]) -> bool:
        if key not in leaving or inside[key] > limit:
            return False
        now = cost(key, inner)
        return 3 * leaving[key] <= now and now > SMALL * inside[""]

    limits = sorted({inside[key] for key in leaving})
    moves = [lambda _, limit=limit: limit for limit in limits]
    _, regions = cheapest(tree, math.inf, moves, take, lambda limit, regions: cost("", regions) + limit)
    if not regions:
        raise MatchError("no region here is repeated and can be cut out: name the regions yourself")
    return sorted(regions, key=lambda key: members[key][0])


def is_leaf(key: str, nodes: list[fx.Node]) -> bool:
    """Whether a region, given with its nodes, is one call of a module that is kept whole."""
    port = nodes[0].meta.get("port")
    return nodes[0].op == "call_module" and port is not None and port.path == key


def nesting_tree(graph: fx.Graph, members: Mapping[str, list[fx.Node]]) -> networkx.DiGraph[str]:
    """The regions as a tree below the model itself."""
    tree: networkx.DiGraph[str] = networkx.DiGraph()
    tree.add_node("")
    for node in graph.nodes:
        if not added(node):
            keys = [key for key in node.meta.get("nn_module_stack", {}) if key == "" or key in members]
            for outer, inner in zip(keys, keys[1:], strict=False):
                if inner not in tree:
                    tree.add_edge(outer, inner)
    return tree


def _inside(
    graph: fx.Graph, members: Mapping[str, list[fx.Node]], root: nn.Module, tree: networkx.DiGraph[str]
) -> dict[str, int]:
    """The bytes of all that is new in each region."""
    new = {n: 0 if n.op in ("placeholder", "output", "get_attr") or aliases(n, root) else _bytes(n) for n in graph.nodes}
    return {key: sum(new[n] for n in members.get(key, graph.nodes)) for key in tree}


def _bytes(node: fx.Node) -> int:
    """The size of a node's tensor as traced; of one whose size is not known that of a number."""
    if "shape" in node.meta:
        return int(math.prod(node.meta["shape"]) * node.meta["dtype"].itemsize)
    return 1


def _structure(nodes: list[fx.Node], root: nn.Module) -> tuple[object, ...]:
    """What a region computes, without names and sizes."""

    def what(node: fx.Node) -> object:
        if node.op == "call_module":
            return class_names(root.get_submodule(str(node.target)))[0]
        return functions.short_name(node.target)

    return tuple((what(n), len(n.all_input_nodes)) for n in nodes if not added(n) and n.target is not None)
