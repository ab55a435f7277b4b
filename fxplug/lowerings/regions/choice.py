"""Which regions to take when nobody names them: repeated ones that are large inside and give little."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import networkx
from torch import fx, nn

from ...core.errors import SpecError
from ...core.ir import functions
from ...core.ir.containers import find_tensor
from ...core.ir.graph import is_added
from ...core.ir.subgraphs import RegionCut, may_share_memory
from ...core.ir.traced_module import check_traced, list_class_names

SMALL = 1e-3  # a region of less than this share of the model's activations is not worth a second run


def check_outlinable(gm: Any, regions: object, caller: str) -> None:
    """Raise SpecError for what is no traced module, for one with regions of its own, and for patterns given as one text."""
    check_traced(gm, caller)
    if "nested" in gm.meta or "regions" in gm.meta:
        raise SpecError("this module is outlined already: outline the module it was made from")
    if isinstance(regions, str):
        raise SpecError(f"regions must be a list of path patterns, not text: write ['{regions}']")


def choose(
    graph: fx.Graph,
    members: Mapping[str, list[fx.Node]],
    root: nn.Module,
    cut: Callable[[str, list[fx.Node]], RegionCut | str],
    kind: Callable[[RegionCut], object] = lambda cut: None,
) -> list[str]:
    """Choose disjoint repeated regions of a graph, in the order they run; none if nothing is repeated.

    Regions are repeated when the same operations run in them in the same order, whatever their names and sizes and the blocks
    of passes are, and `kind` is equal. `cut` returns how a region is cut out, or why it cannot be. Of all choices the one with
    the smallest estimate of saved memory is used: the results of the regions, what is outside them, and the largest inside of
    one, as that is recomputed (Chen et al. 2016, arXiv 1604.06174). A region that would save less than two thirds of its inside
    is not worth a second run. Sizes are those of the trace.
    """
    tree = _nesting_tree(graph, members)
    free = ("placeholder", "output", "get_attr")
    new = {n: 0 if n.op in free or may_share_memory(n, root) else _bytes(n) for n in graph.nodes}
    inside = {key: sum(new[n] for n in members.get(key, graph.nodes)) for key in tree}
    structures = {key: hash(_structure(nodes, root)) for key, nodes in members.items() if not _is_leaf(key, nodes)}
    alike = Counter(structures.values())
    repeated = [key for key, structure in structures.items() if alike[structure] > 1]
    cuts = {key: found for key in repeated if isinstance(found := cut(key, members[key]), RegionCut)}
    kinds = {key: (structures[key], kind(found)) for key, found in cuts.items()}
    same = Counter(kinds.values())
    leaving = {key: sum(map(_bytes, cuts[key].outputs)) for key in kinds if same[kinds[key]] > 1}
    order = [(key, list(tree.successors(key))) for key in networkx.dfs_postorder_nodes(tree, "")]
    spent: dict[str, int] = {}  # with nothing taken inside
    for key, parts in order:
        spent[key] = max(0, inside[key] - sum(inside[k] for k in parts)) + sum(spent[k] for k in parts)

    def choose_within(limit: float) -> tuple[float, list[str]]:
        """Choose regions from the inside out, none larger than this; return their cost, and their keys."""
        found: dict[str, list[str]] = {}
        for key, parts in order:
            found[key] = [region for part in parts for region in found.pop(part)]
            cost = spent[key] - sum(spent[k] - leaving[k] for k in found[key])
            if key in leaving and inside[key] <= limit and 3 * leaving[key] <= cost and cost > SMALL * inside[""]:
                found[key] = [key]
        return cost + limit, found[""]

    choices = [choose_within(limit) for limit in sorted({inside[key] for key in leaving})]
    _, regions = min(choices, key=lambda row: row[0], default=(math.inf, []))
    return sorted(regions, key=lambda key: members[key][0])


def choose_blocks(
    graph: fx.Graph,
    members: Mapping[str, list[fx.Node]],
    root: nn.Module,
    cut: Callable[[str, list[fx.Node]], RegionCut | str],
) -> list[str]:
    """Choose the outermost repeated regions of a graph that hold weights, in the order they run; none if nothing is repeated.

    Regions are repeated as in `choose`. One with less than a thousandth of the model's weights is none.
    """
    tree = _nesting_tree(graph, members)
    structures = {key: hash(_structure(nodes, root)) for key, nodes in members.items() if not _is_leaf(key, nodes)}
    places: dict[int, set[fx.Node]] = {}
    for key, structure in structures.items():
        places.setdefault(structure, set()).add(members[key][0])  # what is all of what is around it is no other region
    least = SMALL * _weight_bytes(graph.nodes, root)
    found: list[str] = []
    todo = [""]
    while todo and "" in tree:  # which it is not where no module is around a node
        for key in tree.successors(todo.pop()):
            repeated = key in structures and len(places[structures[key]]) > 1 and _weight_bytes(members[key], root) >= least
            (found if repeated and isinstance(cut(key, members[key]), RegionCut) else todo).append(key)
    return sorted(found, key=lambda key: members[key][0])


def _weight_bytes(nodes: Iterable[fx.Node], root: nn.Module) -> int:
    """Return the size of the parameters that nodes read."""
    found: dict[int, int] = {}
    for node in nodes:
        if node.op == "call_module":
            found.update({id(p): p.nbytes for p in root.get_submodule(str(node.target)).parameters()})
        elif node.op == "get_attr" and isinstance(value := find_tensor(root, str(node.target)), nn.Parameter):
            found[id(value)] = value.nbytes
    return sum(found.values())


def _is_leaf(key: str, nodes: list[fx.Node]) -> bool:
    """Return whether a region, given with its nodes, is one call of a module that is kept whole."""
    port = nodes[0].meta.get("port")
    return nodes[0].op == "call_module" and port is not None and port.path == key


def _nesting_tree(graph: fx.Graph, members: Mapping[str, list[fx.Node]]) -> networkx.DiGraph[str]:
    """Return the regions as a tree below the model itself."""
    tree: networkx.DiGraph[str] = networkx.DiGraph()
    tree.add_node("")
    for node in graph.nodes:
        if not is_added(node):
            keys = [key for key in node.meta.get("nn_module_stack", {}) if key == "" or key in members]
            for outer, inner in zip(keys, keys[1:], strict=False):
                if inner not in tree:
                    tree.add_edge(outer, inner)
    return tree


def _bytes(node: fx.Node) -> int:
    """Return the size of a node's tensor as traced; for an unknown size that of a number."""
    if "shape" in node.meta:
        return int(math.prod(node.meta["shape"]) * node.meta["dtype"].itemsize)
    return 1


def _structure(nodes: list[fx.Node], root: nn.Module) -> tuple[object, ...]:
    """Return the operations of a region, without names and sizes."""

    def what(node: fx.Node) -> object:
        if node.op == "call_module":
            return list_class_names(root.get_submodule(str(node.target)))[0]
        return functions.get_short_name(node.target)

    return tuple((what(n), len(n.all_input_nodes)) for n in nodes if not is_added(n) and n.target is not None)
