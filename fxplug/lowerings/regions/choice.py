"""Which regions to outline when nobody names them: repeated ones, so that few activations are saved."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import networkx
from torch import fx, nn

from ...errors import MatchError
from ...ir import functions
from ...ir.regions import added
from ...ir.subgraphs import Cut, aliases, changed_input, plan
from ...ir.traced_module import class_names

SMALL = 1e-3  # a region of less than this share of the model's activations is not worth a second run


@dataclass
class _Region:
    """What a region costs in bytes: everything inside it, what is in none of its inner regions, what leaves it."""

    inside: int = 0
    own: int = 0
    leaving: int = 0
    can: bool = False
    inner: list[str] = field(default_factory=list)


def choose(graph: fx.Graph, members: Mapping[str, list[fx.Node]], root: nn.Module, checkpoint: bool) -> list[str]:
    """Disjoint repeated regions of a graph, in the order they run.

    Regions are repeated when the same operations run in them in the same order, whatever their names and sizes are and
    whatever passes put in. Of all choices the one with the smallest estimate of saved memory is taken: what leaves the
    regions, what lies outside them, and the largest inside of one, as that is computed again (Chen et al. 2016, arXiv
    1604.06174). A region that would save less than two thirds of its inside is not worth a second run. Sizes are those of the
    trace. Raises MatchError when nothing is repeated.
    """
    tree = nesting_tree(graph, members)
    rows = _measured(graph, members, root, tree)
    kinds = {key: hash(_structure(nodes, root)) for key, nodes in members.items() if not is_leaf(key, nodes)}
    same = Counter(kinds.values())
    for key, kind in kinds.items():
        if same[kind] > 1:
            nodes = members[key]
            cut = plan(key, nodes, root)
            rows[key].can = isinstance(cut, Cut) and not (checkpoint and changed_input(cut.nodes, cut.inputs, root))
            if isinstance(cut, Cut):
                rows[key].leaving = sum(map(_bytes, cut.outputs))
    order = list(networkx.dfs_postorder_nodes(tree, ""))
    best: tuple[float, list[str]] = (math.inf, [])
    for limit in sorted({row.inside for row in rows.values() if row.can}):
        cost: dict[str, tuple[int, list[str]]] = {}
        for key in order:
            row = rows[key]
            inner = [cost[k] for k in row.inner]
            cost[key] = row.own + sum(c for c, _ in inner), []
            if row.can and row.inside <= limit and 3 * row.leaving <= cost[key][0] and cost[key][0] > SMALL * rows[""].inside:
                cost[key] = row.leaving, [key]
            else:
                cost[key] = cost[key][0], [k for _, chosen in inner for k in chosen]
        if cost[""][0] + limit < best[0]:
            best = cost[""][0] + limit, cost[""][1]
    if not best[1]:
        raise MatchError("no region here is repeated and can be cut out: name the regions yourself")
    return sorted(best[1], key=lambda key: members[key][0])


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


def _measured(
    graph: fx.Graph, members: Mapping[str, list[fx.Node]], root: nn.Module, tree: networkx.DiGraph[str]
) -> dict[str, _Region]:
    new = {n: 0 if n.op in ("placeholder", "output", "get_attr") or aliases(n, root) else _bytes(n) for n in graph.nodes}
    rows = {key: _Region(sum(new[n] for n in members.get(key, graph.nodes)), inner=list(tree.successors(key))) for key in tree}
    for row in rows.values():
        row.own = max(0, row.inside - sum(rows[key].inside for key in row.inner))
    return rows


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
