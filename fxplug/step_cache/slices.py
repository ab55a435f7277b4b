"""A marked graph cut into parts: what every step computes, what a step may take from an earlier one, and what gives it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import networkx
from torch import fx, nn

from ..blocks.step_marks import Gauge, Join, Keep, Mark
from ..core.errors import SpecError
from ..core.ir import ops
from ..core.ir.functions import is_random
from ..core.ir.graph import MODES, Graph, copy_graph, copy_nodes, insert, redirect, replace
from ..core.ir.subgraphs import SWITCHES, find_written, may_share_memory
from .steps import put, put_check

CALLS = ("call_module", "call_function", "call_method")
END = "end"  # stands behind the nodes whose needs are asked for


# --- the cut


@dataclass(eq=False)
class _CachedValue:
    """A value that is kept: its node, what it is measured from, its name as input and output."""

    node: fx.Node
    base: fx.Node | None
    name: str
    owner: str  # the pass


class DataFlow:
    """What each node of a graph needs: its inputs, what wrote into their memory before, and the scopes it stands in."""

    def __init__(self, graph: fx.Graph, root: nn.Module) -> None:
        self.root = root
        self.nodes: list[fx.Node] = list(graph.nodes)
        self.needs: networkx.DiGraph[Any] = networkx.DiGraph()
        self.needs.add_nodes_from(self.nodes)
        self.memory: dict[fx.Node, Any] = {}  # values that may share memory share this
        self.writers: dict[Any, list[fx.Node]] = {}
        self.late: list[tuple[fx.Node, fx.Node]] = []  # a node that reads, and one that writes there later
        self.ends: dict[fx.Node, fx.Node] = {}  # of scopes of gradients or autocast
        readers: dict[Any, list[fx.Node]] = {}
        scopes: list[fx.Node] = []
        for node in self.nodes:
            given = node.all_input_nodes
            self.needs.add_edges_from((g, node) for g in (*given, *scopes))
            shares = bool(given) and node.op not in ("placeholder", "output") and may_share_memory(node, root)
            self.memory[node] = str(node.target) if node.op == "get_attr" else self.memory[given[0]] if shares else node
            places = [self.memory[g] for g in given]
            pairs = zip(given, places, strict=True)  # what was written before a value was made is in what that value needs
            self.needs.add_edges_from((w, node) for g, place in pairs for w in self.writers.get(place, ()) if w > g)
            for place in {self.memory[v] for v in find_written(node, root)}:
                self.late.extend((reader, node) for reader in readers.get(place, ()))
                self.writers.setdefault(place, []).append(node)
            for place in places:
                readers.setdefault(place, []).append(node)
            if node.target in MODES:
                scopes.append(node)
            elif node.target in SWITCHES:
                scopes.remove(given[0])
                self.ends[given[0]] = node

    def closed(self, nodes: Iterable[fx.Node], needs: networkx.DiGraph[Any], first: bool = False) -> set[fx.Node]:
        """Return these nodes with all that they need, the ends of scopes, and the checks of available values.

        With `first` also the members of nested results, and the readers of a tensor before it is written in place.
        """
        found = set(nodes)
        size = -1
        while len(found) != size:
            size = len(found)
            needs.add_edges_from((node, END) for node in found)
            found |= networkx.ancestors(needs, END)
            needs.remove_node(END)
            found.update(end for start, end in self.ends.items() if start in found)
            for node in [n for n in self.nodes if n not in found and self.checks(n)]:
                found.update(self._sizes_for(node, found))
            if first:
                found.update(reader for reader, writer in self.late if writer in found)
                nested = {n for n in found if "shape" not in n.meta}
                found.update(n for n in self.nodes if n.target is operator.getitem and n.args[0] in nested)
        return found

    def _sizes_for(self, check: fx.Node, found: set[fx.Node]) -> set[fx.Node]:
        """Return a check and the sizes and numbers that it needs; the empty set if it needs a tensor that is not found."""
        made, todo = {check}, [check]
        while todo:
            for node in self.needs.predecessors(todo.pop()):
                if node not in found and node not in made:
                    if not self.is_plain(node):
                        return set()
                    made.add(node)
                    todo.append(node)
        return made

    def is_plain(self, node: fx.Node) -> bool:
        """Return whether a node is a size, a number or the start of a scope, which is recomputed at no cost."""
        plain = node.op in CALLS[1:] and not is_random(node, self.root) and not find_written(node, self.root)
        return plain and "shape" not in node.meta

    def checks(self, node: fx.Node) -> bool:
        """Return whether a node only checks values."""
        silent = not node.users and node.target not in SWITCHES and not find_written(node, self.root)
        return silent and bool(node.meta.get("effect"))

    def changed(self, node: fx.Node) -> bool:
        """Return whether the value of a node is later written in place."""
        return any(writer > node for writer in self.writers.get(self.memory[node], ()))


class Slices:
    """One graph without its marks, cut where they were; its methods write the parts."""

    def __init__(self, graph: fx.Graph, root: nn.Module) -> None:
        self.graph = copy_graph(graph)
        self.root = root
        self.gauges: list[tuple[fx.Node, fx.Node | None]] = []
        cuts, joins = self._unmarked()
        self.flow = DataFlow(self.graph, root)
        for owner, rows in joins.items():
            branch = max(mark.branch for _, mark in rows)
            if branch >= len(rows):
                counted = f"{len(rows)} joins, counted 0 to {len(rows) - 1} from the end" if len(rows) > 1 else "one, branch 0"
                raise SpecError(f"{owner}: no branch {branch}; it has marked {counted}")
            cuts.append(_CachedValue(self._deepest(rows[-1 - branch][0]), None, "", owner))
        if not cuts:
            raise SpecError(
                "no value is marked to be cached: apply a pass that marks one, such as deepcache or first_block_cache; to "
                "outline as well, use StepCache.map afterwards"
            )
        self.output = self.flow.nodes[-1]
        self.inputs = [n for n in self.flow.nodes if n.op == "placeholder"]
        self.variadic = [n for n in self.inputs if str(n.target).startswith("**")]
        taken = self.flow.needs.copy()
        for cut in cuts:
            taken.remove_edges_from(list(taken.in_edges(cut.node)))
            if cut.base is not None:
                taken.add_edge(cut.base, cut.node)
        self.taken = taken
        self.later = self.flow.closed([self.output, *self.inputs], taken)
        self.cuts = {cut.node: cut for cut in sorted(cuts, key=lambda cut: cut.node) if cut.node in self.later}
        self._named()
        if self.operations(self.later) >= self.operations(self.flow.nodes):
            raise SpecError(
                "caching the marked value saves nothing, because the whole model is still needed for the result: mark another"
            )

    def _unmarked(self) -> tuple[list[_CachedValue], dict[str, list[tuple[fx.Node, Join]]]]:
        """Remove the marks; return what they marked."""
        cuts: list[_CachedValue] = []
        joins: dict[str, list[tuple[fx.Node, Join]]] = {}
        for node in list(self.graph.nodes):
            mark = self.root.get_submodule(str(node.target)) if node.op == "call_module" else None
            if not isinstance(mark, Mark):
                continue
            owner, value = str(node.target).partition(".")[0], node.args[0]
            if isinstance(mark, Keep):
                cuts.append(_CachedValue(self._edge(node), node.args[1] if len(node.args) > 1 else None, "", owner))
                value = node.args[0]
            elif isinstance(mark, Gauge):
                self.gauges.append((value, node.args[1] if len(node.args) > 1 else None))
            elif isinstance(mark, Join):
                joins.setdefault(owner, []).append((value, mark))
            replace(node, value)
        return cuts, joins

    def _edge(self, mark: fx.Node) -> fx.Node:
        """Return the identity for a marked value: the edge of its region, or a new one, as other nodes may read the value."""
        users = list(mark.users)
        if len(users) == 1 and users[0].target is ops.edge:
            return users[0]
        edge = put(self.graph, "call_function", ops.edge, (mark.args[0],), mark, after=mark, name=f"{mark.name}_kept")
        redirect(mark, edge)
        return edge

    def _deepest(self, node: fx.Node) -> fx.Node:
        """Return the operand of a join that depends on the most nodes; a block after the join reads one value only."""
        while len(given := [a for a in node.all_input_nodes if "shape" in a.meta and a.op != "get_attr"]) == 1:
            node = given[0]
        return max(given, key=lambda a: len(networkx.ancestors(self.flow.needs, a)), default=node)

    def _named(self) -> None:
        own = {str(n.target).lstrip("*") for n in self.inputs}
        for i, cut in enumerate(self.cuts.values()):
            name = "kept" if len(self.cuts) == 1 else f"kept_{i}"
            cut.name = f"{cut.owner}_{name}" if name in own else name

    def operations(self, nodes: Iterable[fx.Node]) -> int:
        """Return how many of these nodes compute something."""
        idle = (operator.getitem,)
        calls = [n for n in nodes if n.op in CALLS and n.target not in idle and "shape" in n.meta]
        return sum(getattr(n.target, "__module__", "") != ops.__name__ for n in calls)

    # --- the parts

    def full(self) -> Graph:
        """Return the graph of a whole step, with the result and the cached values."""
        return self._write(self.flow.nodes, gives=True)

    def shallow(self) -> Graph:
        """Return the graph of a step that uses cached values."""
        return self._write(self.later, takes=True)

    def first(self) -> Graph:
        """Return the graph up to the gauges, with their values and those for the later parts."""
        graph = Graph()
        values: dict[fx.Node, fx.Node] = {}
        copy_nodes([node for node in self.flow.nodes if node in self.early], graph, values)
        gauges = tuple(values[y] if x is None else self._differ(graph, values[y], values[x], y) for y, x in self.gauges)
        result = (gauges, {n.name: values[n] for n in self.carried})
        insert(graph, "output", "output", (result,), meta=self.output.meta)
        return graph

    def rest(self) -> Graph:
        """Return the graph after `first` of a whole step, with the result and the cached values."""
        return self._write(self.nodes_after(self.flow.nodes, self.flow.needs), carried=True, gives=True)

    def short(self) -> Graph:
        """Return the graph after `first` of a step that uses cached values."""
        return self._write(self.nodes_after(self.later, self.taken), carried=True, takes=True)

    @cached_property
    def early(self) -> set[fx.Node]:
        """Nodes that are computed before a gauged step is decided."""
        starts = [node for pair in self.gauges for node in pair if node is not None]
        ports = [(n, n.meta["port"]) for n in self.flow.nodes if n.target is ops.edge and "port" in n.meta]
        inputs = [n for n, port in ports if port.path == "" and port.side == "in"]
        found = self.flow.closed([*starts, *inputs, *self.inputs], self.flow.needs, first=True)
        if not found.isdisjoint(self.cuts):
            raise SpecError("the marked value is computed before the gauge is read: mark a later block")
        return found

    @cached_property
    def carried(self) -> list[fx.Node]:
        """Values that the first part passes to the others."""
        found: set[fx.Node] = set()
        for nodes, needs in ((self.flow.nodes, self.flow.needs), (self.later, self.taken)):
            behind = self.nodes_after(nodes, needs)
            found.update(n for node in behind for n in needs.predecessors(node) if n not in behind and n.op != "get_attr")
        return sorted(found)

    def nodes_after(self, nodes: Iterable[fx.Node], needs: networkx.DiGraph[Any]) -> set[fx.Node]:
        """Return the nodes that are not computed first, with sizes and scopes, which are better recomputed than passed on."""
        found = {n for n in nodes if n not in self.early}
        todo = list(found)
        while todo:
            for node in needs.predecessors(todo.pop()):
                if node not in found and (node.op == "get_attr" or self.flow.is_plain(node)):
                    more = [node, *([self.flow.ends[node]] if node in self.flow.ends else [])]
                    found.update(more)
                    todo.extend(more)
        return found

    def _write(self, nodes: Iterable[fx.Node], carried: bool = False, takes: bool = False, gives: bool = False) -> Graph:
        """Return a graph of these nodes. With `takes` the cut values are inputs, with `gives` they are results too."""
        graph, own = Graph(), set(nodes)
        values: dict[fx.Node, fx.Node] = {}
        kept: dict[str, fx.Node] = {}
        inputs: dict[str, fx.Node] = {}
        for node in sorted(self.carried if carried else [n for n in self.inputs if n not in self.variadic]):
            if carried:
                values[node] = put(graph, "placeholder", node.name, (), node, name=node.name)
            else:
                copy_nodes([node], graph, values)
        if takes:
            inputs = {c.name: self._node(graph, "placeholder", c.name, (None,), n, c) for n, c in self.cuts.items()}
        if not carried:
            copy_nodes(self.variadic, graph, values)
        if takes:
            first = next((n for n in values.values() if "shape" in n.meta), None)
            inputs = {c.name: self._own(c, put_check(graph, inputs[c.name], c.name, n, first)) for n, c in self.cuts.items()}
        for node in self.flow.nodes:
            if node in values or node not in own or node is self.output:
                continue
            cut = self.cuts.get(node)
            if cut is not None and takes:
                values[node] = self._from_cache(graph, cut, inputs[cut.name], values)
                continue
            copy_nodes([node], graph, values)
            if cut is not None and gives:
                kept[cut.name] = self._value_to_cache(graph, cut, values)
        result = fx.node.map_arg(self.output.args[0], values.__getitem__)
        insert(graph, "output", "output", ((result, kept) if gives else result,), meta=self.output.meta)
        graph.lint()
        return graph

    def _from_cache(self, graph: Graph, cut: _CachedValue, given: fx.Node, values: Mapping[fx.Node, fx.Node]) -> fx.Node:
        if cut.base is not None:
            return self._node(graph, "call_function", operator.add, (values[cut.base], given), cut.node, cut)
        return self._unchanged(graph, cut, given)

    def _value_to_cache(self, graph: Graph, cut: _CachedValue, values: Mapping[fx.Node, fx.Node]) -> fx.Node:
        if cut.base is not None:
            return self._differ(graph, values[cut.node], values[cut.base], cut.node, cut)
        return self._unchanged(graph, cut, values[cut.node])

    def _unchanged(self, graph: Graph, cut: _CachedValue, value: fx.Node) -> fx.Node:
        return self._node(graph, "call_method", "clone", (value,), cut.node, cut) if self.flow.changed(cut.node) else value

    def _differ(self, graph: Graph, value: fx.Node, base: fx.Node, like: fx.Node, cut: _CachedValue | None = None) -> fx.Node:
        return self._node(graph, "call_function", operator.sub, (value, base), like, cut)

    def _node(self, graph: Graph, op: str, target: Any, args: Any, like: fx.Node, cut: _CachedValue | None) -> fx.Node:
        return self._own(cut, put(graph, op, target, args, like))

    def _own(self, cut: _CachedValue | None, node: fx.Node) -> fx.Node:
        if cut is not None:
            node.meta["pass"] = {"name": cut.owner, "site": "", "place": "", "block": "", "where": ""}
        return node
