"""One graph cut by what each node is computed from: a graph for each set of groups of inputs whose values it needs.

Nothing here is about a model. A node needs a group if a value of it, or of what was written where it reads, does; sizes, dtypes
and devices are no values. What writes inputs or buffers, draws, or does what nobody knows is of the step, which is computed at
every call, and so is what is cheaper to compute than to keep.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from ...core.errors import SpecError, format_fields
from ...core.ir import ops
from ...core.ir.graph import MODES, Graph, change, copy_graph, copy_nodes, erase, get_meta, insert, redirect, replace
from ...core.ir.subgraphs import SWITCHES, find_written, may_share_memory
from ...step_cache.slices import DataFlow
from ...step_cache.steps import put
from .reads import find_obstacle, has_size_by_value, is_of_shape, is_table, is_view_of_input, list_shape_reads

STEP = "step"  # the group of the inputs that differ at every call, and the stage that is never kept
LARGEST = 1 << 24  # bytes: what no weight is in, or nothing but weights, is computed again where it is larger
Needs = frozenset[str]
ONLY_STEP: Needs = frozenset([STEP])


@dataclass(eq=False)
class HoistStage:
    """The nodes that need the same groups, and a graph of them. `nodes` are in it, `own` of them in no other but by repetition.

    `given` are the values that it takes from other stages, or numbers that only the step has; `results` those that it gives.
    """

    name: str
    needs: Needs
    own: list[fx.Node]
    nodes: list[fx.Node] = field(default_factory=list)
    given: list[fx.Node] = field(default_factory=list)
    results: list[fx.Node] = field(default_factory=list)
    slotted: bool = False  # whether it depends on which adapters are in use

    __repr__ = format_fields


class StageCut:
    """A graph in stages: `stages` in the order in which they are computed, the step last. `groups` has the group of each input.

    Raises SpecError where no stage but the step has work, with the node in the way.
    """

    def __init__(self, graph: fx.Graph, root: nn.Module, groups: Mapping[str, str]) -> None:
        self.root, self.groups = root, groups
        self.graph = prepare_graph(graph)
        self.stays: set[fx.Node] = set()  # in the step, though they need nothing of it
        self._analyse()
        self._join_equal()
        self._analyse()
        self.inputs = [n for n in self.flow.nodes if n.op == "placeholder"]
        self.output = self.flow.nodes[-1]
        nested = {n for n in self.output.all_input_nodes if "shape" not in n.meta and not self.of_input[n]}
        self.stays |= {n for n in nested if not self.number[n]}  # several tensors in one, which the caller may write
        self._find_needs()
        while more := self._list_cheap():
            self.stays |= more
            self._find_needs()
        self._place()
        while empty := [n for s in self.stages[:-1] if not s.results for n in s.own if n.op != "placeholder"]:
            self.stays |= set(empty)
            self._find_needs()
            self._place()
        if not any(self.count_operations(stage) for stage in self.stages[:-1]):
            raise SpecError(self._describe_obstacle())
        self.late = list(dict.fromkeys(n for s in self.stages for n in s.given if self.number[n] and not self.needs[n]))

    def get_group(self, node: fx.Node) -> str:
        """Return the group of an input, the step's for one that is in none."""
        return self.groups.get(str(node.target).lstrip("*"), STEP)

    # --- what needs what

    def _analyse(self) -> None:
        self.flow = DataFlow(self.graph, self.root)
        self.scopes: dict[fx.Node, list[fx.Node]] = {}
        self.number: dict[fx.Node, bool] = {}  # sizes, dtypes, devices, and what is computed of these alone
        self.of_input: dict[fx.Node, bool] = {}
        self.obstacles: dict[fx.Node, str] = {}
        self.shape_reads: dict[fx.Node, list[fx.Node]] = {}
        scopes: list[fx.Node] = []
        for node in self.flow.nodes:
            self.scopes[node] = list(scopes)
            if node.target in MODES:
                scopes.append(node)
            elif node.target in SWITCHES:
                scopes.remove(node.all_input_nodes[0])
            given = node.all_input_nodes
            plain = node.op in ("call_function", "call_method") and "shape" not in node.meta and not node.meta.get("effect")
            plain = plain and node.target not in SWITCHES and bool(given) and all(self.number[n] for n in given)
            self.number[node] = is_of_shape(node) or plain
            self.of_input[node] = is_view_of_input(node, self.of_input)
            self.obstacles[node] = find_obstacle(node, self.root, self.scopes[node])
            found = list_shape_reads(node, self.root)
            self.shape_reads[node] = found if all(self.of_input[n] for n in found) else []
        self._find_needs()

    def _find_needs(self) -> None:
        """Find the groups that each node needs: a fixpoint, as what is written anywhere is of all that is read there before."""
        flow, root = self.flow, self.root
        needs: dict[fx.Node, Needs] = dict.fromkeys(flow.nodes, frozenset())
        # memory of inputs and buffers that is written, and of lists
        outside = {m: isinstance(m, str) or m.op == "placeholder" for m in flow.writers}
        memory: dict[Any, Needs] = {m: ONLY_STEP if out else frozenset() for m, out in outside.items()}
        unsized: set[fx.Node] = set()  # of sizes that depend on values
        before: Any = None
        while before != (now := (dict(needs), dict(memory))):
            before = now
            for node in flow.nodes:
                own = frozenset([self.get_group(node)]) if node.op == "placeholder" else frozenset()
                own |= ONLY_STEP if self.obstacles[node] or node in self.stays else frozenset()
                given = node.all_input_nodes
                if has_size_by_value(node) or not self.number[node] and self._takes_unsized(node, unsized):
                    unsized.add(node)
                if is_of_shape(node):
                    read = [n for n in given if n in unsized]
                else:
                    read = [n for n in given if n not in self.shape_reads[node]]
                own = own.union(*(needs[n] for n in read))
                if node.target is ops.guard and not own:
                    own = self._reach(node, needs) or ONLY_STEP  # where the sizes are that it checks
                own |= memory.get(flow.memory[node], frozenset())
                for written in find_written(node, root):
                    memory[flow.memory[written]] |= own
                needs[node] = ONLY_STEP if STEP in own else own
            for reader, writer in flow.late:
                for written in find_written(writer, root):
                    memory[flow.memory[written]] |= needs[reader]
        self.needs = needs

    def _takes_unsized(self, node: fx.Node, unsized: set[fx.Node]) -> bool:
        """Return whether a node's sizes may come from values: it reads such a tensor, or a number that is none of sizes."""
        if node.op in ("placeholder", "get_attr", "output") or self.of_input[node] or node.target in SWITCHES:
            return False
        numbers = [n for n in node.all_input_nodes if "shape" not in n.meta and not self.number[n] and n.op != "get_attr"]
        if node.target is operator.getitem and numbers == [node.args[0]]:  # a member of what gives several
            numbers = []
        return bool(numbers) or any(n in unsized for n in node.all_input_nodes)

    def _reach(self, node: fx.Node, needs: Mapping[fx.Node, Needs]) -> Needs:
        """Return the groups needed to compute the tensors whose sizes a number is made of; inputs are there in all stages."""
        found: Needs = frozenset()
        todo, seen = [node], {node}
        while todo:
            for given in todo.pop().all_input_nodes:
                if given not in seen and not self.of_input[given]:
                    seen.add(given)
                    found |= needs[given]
                    todo += [given] if self.number[given] else []
        return found

    def _join_equal(self) -> None:
        """Make one node of several that do the same with the same: blocks cast and reshape the same tables again and again."""
        known: dict[Any, fx.Node] = {}
        for node in self.flow.nodes:
            odd = node.op in ("placeholder", "output") or STEP in self.needs[node] or node.target in SWITCHES
            if odd or node.meta.get("effect") or self.obstacles[node] or self.flow.memory[node] in self.flow.writers:
                continue
            key = (node.op, node.target, repr((node.args, node.kwargs)), tuple(self.scopes[node]))
            first = known.setdefault(key, node)
            if first is not node:
                redirect(node, first)
                erase([node])

    def _list_cheap(self) -> set[fx.Node]:
        """Return values for the step that are large, and made without weights, or of nothing else: they cost little to compute.

        Keeping the first would cost memory for no weight that could leave, and keeping the others as much as the weights do.
        """
        weighted: dict[fx.Node, bool] = {}
        found = set()
        for node in self.flow.nodes:
            own = node.op == "get_attr"
            if node.op == "call_module" and not is_table(node, self.root):
                own = any(True for _ in self.root.get_submodule(str(node.target)).parameters())
            weighted[node] = own or any(weighted[n] for n in node.all_input_nodes)
            early = STEP not in self.needs[node] and not self.is_free(node) and "shape" in node.meta
            if not early or (self.needs[node] and weighted[node]) or self.flow.memory[node] in self.flow.writers:
                continue
            if count_bytes(node) > LARGEST and any(STEP in self.needs[user] for user in node.users):
                found.add(node)
        return found

    # --- the stages

    def is_free(self, node: fx.Node) -> bool:
        """Return whether a node is repeated where it is read: weights and views of them, scopes, sizes, members of inputs."""
        if node.op == "get_attr" or node.target in SWITCHES or self.of_input[node] and node.op != "placeholder":
            return True
        weight = isinstance(self.flow.memory[node], str) and may_share_memory(node, self.root)
        return (weight or self.number[node]) and not self.needs[node]

    def _place(self) -> None:
        """Put each node into its stage."""
        flow = self.flow
        rows: dict[Needs, list[fx.Node]] = {ONLY_STEP: []}
        for node in flow.nodes:
            if node.op not in ("placeholder", "output") and not self.is_free(node):
                rows.setdefault(self.needs[node], []).append(node)
        order = sorted(rows, key=lambda needs: (needs == ONLY_STEP, len(needs), sorted(needs)))
        self.stages = [HoistStage("+".join(sorted(needs)) or "always", needs, rows[needs]) for needs in order]
        for stage in self.stages:
            self._fill(stage)
        last = self.stages[-1]
        read = {value for stage in self.stages for value in stage.given}
        for stage in self.stages[:-1]:
            stage.results = [node for node in stage.own if node in read]
            under = [s for s in self.stages[:-1] if s.needs <= stage.needs]
            stage.slotted = any(is_table(node, self.root) for s in under for node in s.own)
        last.given = [value for value in last.given if value.op != "placeholder"]

    def _fill(self, stage: HoistStage) -> None:
        """Find what a stage computes beside its own nodes, and what it takes from others."""
        inside, given = set(stage.own), set()
        todo = list(inside)
        step = STEP in stage.needs
        if step:
            inside.add(self.output)
            todo.append(self.output)
        while todo:
            node = todo.pop()
            for value in [*node.all_input_nodes, *self.scopes[node]]:
                if value in inside or value in given:
                    continue
                near = step or not self.number[value] or self._reach(value, self.needs) <= stage.needs
                if value.op == "placeholder" or self.is_free(value) and near:
                    inside.add(value)
                    todo.append(value)
                    if value in self.flow.ends:
                        inside.add(self.flow.ends[value])
                        todo.append(self.flow.ends[value])
                else:
                    given.add(value)
        stage.nodes, stage.given = [n for n in self.flow.nodes if n in inside], sorted(given)

    def count_operations(self, stage: HoistStage) -> int:
        """Return how many nodes of a stage's own compute tensors."""
        calls = [node for node in stage.own if node.op != "placeholder" and node.target is not operator.getitem]
        return sum("shape" in node.meta for node in calls)

    def count_result_bytes(self, stage: HoistStage) -> int:
        """Return the size of the memory of a stage's results, at the sizes of the trace; nested results count as nothing."""
        homes = {self.flow.memory[node]: node for node in stage.results}
        return sum(count_bytes(home if isinstance(home, fx.Node) else node) for home, node in homes.items())

    def _describe_obstacle(self) -> str:
        """Describe the first node that could have been hoisted and is not, and the input it needs."""
        names = [str(n.target).lstrip("*") for n in self.inputs if self.get_group(n) != STEP]
        reading = {n for n in self.inputs if self.get_group(n) != STEP}
        for node in self.flow.nodes:
            if node.op in ("placeholder", "get_attr", "output") or self.is_free(node) or self.flow.checks(node):
                continue
            if reading.isdisjoint(node.all_input_nodes):
                continue
            if "shape" not in node.meta and not self.obstacles[node]:
                reading.add(node)
                continue
            why = self.obstacles[node]
            if not why and node not in self.stays:
                late = next((v for v in node.all_input_nodes if STEP in self.needs[v]), None)
                source = late and self._find_input(late)
                why = f"needs the input '{source}', which is in no group" if source else "is in memory that the step writes"
            if why:
                region = next(reversed(node.meta.get("nn_module_stack") or {"": ""}), "")
                where = f" in '{region}'" if region else ""
                return f"nothing can be hoisted: of {', '.join(names)} the first reader, '{node.name}'{where}, {why}"
        return f"nothing can be hoisted: no tensor is computed from {', '.join(names)} alone"

    def _find_input(self, node: fx.Node) -> str:
        """Return the name of an input without a group that a node is computed from, the nearest one; "" for none."""
        todo, seen = [node], {node}
        for each in todo:
            if each.op == "placeholder" and self.get_group(each) == STEP:
                return str(each.target).lstrip("*")
            more = [n for n in each.all_input_nodes if n not in seen]
            seen.update(more)
            todo += more
        return ""

    # --- their graphs

    def write(self, stage: HoistStage) -> Graph:
        """Write the graph of a stage: of its inputs by name, and of what it is given, to a tuple of its results.

        The step's has the inputs and the result of the whole, and what it is given by name besides.
        """
        graph, values, step = Graph(), dict[fx.Node, fx.Node](), STEP in stage.needs
        inputs = self.inputs if step else [n for n in stage.nodes if n.op == "placeholder"]
        plain = [n for n in inputs if not step or not str(n.target).startswith("**")]
        if step:
            copy_nodes(plain, graph, values)
        for node in [*([] if step else plain), *stage.given]:
            default = (None,) if step else ()
            values[node] = put(graph, "placeholder", node.name, default, node, name=node.name)
        copy_nodes([n for n in inputs if n not in values], graph, values)
        copy_nodes([n for n in stage.nodes if n.op not in ("placeholder", "output")], graph, values)
        if step:
            result = fx.node.map_arg(self.output.args[0], lambda node: self._put_owned(graph, node, values))
        else:
            result = tuple(values[node] for node in stage.results)
        insert(graph, "output", "output", (result,), meta=self.output.meta)
        graph.lint()
        return graph

    def _put_owned(self, graph: Graph, node: fx.Node, values: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """Return a part of the result: a copy, if it may be a kept value or lie in its memory."""
        home = self.flow.memory[node]
        early = [n for n in (node, home) if isinstance(n, fx.Node) and n.op != "placeholder" and STEP not in self.needs[n]]
        tensor = "shape" in node.meta
        return put(graph, "call_method", "clone", (values[node],), node) if early and tensor else values[node]

    def write_numbers(self) -> Graph:
        """Write a graph of the inputs to the numbers that stages need of values which only the step has."""
        graph, values = Graph(), dict[fx.Node, fx.Node]()
        copy_nodes(self._list_for_numbers(), graph, values)
        insert(graph, "output", "output", (tuple(values[n] for n in self.late),))
        return graph

    def are_numbers_pure(self) -> bool:
        """Return whether what these numbers need draws nothing and writes no more than memory of its own."""
        for node in self._list_for_numbers():
            homes = [self.flow.memory[written] for written in find_written(node, self.root)]
            outside = any(isinstance(home, str) or home.op == "placeholder" for home in homes)
            if self.obstacles[node] or outside:
                return False
        return True

    def _list_for_numbers(self) -> list[fx.Node]:
        found = self.flow.closed([*self.late, *self.inputs], self.flow.needs)
        return [n for n in self.flow.nodes if n in found and n.op != "output" and not self.flow.checks(n)]


def prepare_graph(graph: fx.Graph) -> Graph:
    """Copy a graph without the edges of regions, which hide inputs, and with the dtype alone of what `type_as` reads."""
    new = copy_graph(graph)
    for node in list(new.nodes):
        if node.target is ops.edge and isinstance(node.args[0], fx.Node):
            replace(node, node.args[0])
        elif node.op == "call_method" and node.target == "type_as" and len(node.args) == 2:
            stack = get_meta(node, "nn_module_stack", "pass")
            kind = (ops.device_of, ops.dtype_of)
            read = [insert(new, "call_function", what, (node.args[1],), before=node, meta=stack) for what in kind]
            change(node, target="to", args=(node.args[0], *read))
    return new


def count_bytes(node: fx.Node) -> int:
    """Return the size of a node's tensor as traced."""
    return int(math.prod(node.meta["shape"]) * node.meta["dtype"].itemsize) if "shape" in node.meta else 0


