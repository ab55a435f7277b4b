"""A plan written into a graph: collectives as blocks, whole sizes beside sizes of parts. No rank is in it."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from ..core.ir.containers import Container
from ..core.ir.functions import bind_attention
from ..core.ir.graph import Graph, change, erase_unused, get_meta, insert, redirect, replace, rewire
from ..core.rewriter.editor import ROOT
from ..core.rewriter.graft import find_last_input
from ..core.rewriter.sites import list_nodes
from ..core.spec.addresses import make_identifier
from .planning.sharding_plan import ShardingPlan
from .planning.streams import ArgumentSplit, Leaf, Placement, StreamNumber
from .planning.trials import get_name, get_norm_arguments, map_numbered
from .runtime.attention import Attention
from .runtime.collectives import AllReduce, Broadcast, Collective, Gather, GlobalSize, Numel, Split
from .runtime.halos import Cut, Extent, Fetch, RowScale
from .runtime.norm_statistics import Norm
from .runtime.shares import AllReduceMean, Count, FeatureNorm, Once, Part


class PlanWriter:
    """One plan on one copied graph. `tree` gets the blocks under the pass's name; equal ones are one block."""

    def __init__(
        self, graph: Graph, tree: nn.Module, found: ShardingPlan, name: str, ways: Mapping[str, int], axis: str
    ) -> None:
        self.graph, self.tree, self.found, self.name = graph, tree, found, name
        self.ways, self.axis = dict(ways), axis
        self.twin: dict[str, fx.Node] = {node.name: node for node in graph.nodes}
        self.made: dict[Any, Any] = {}
        self.sizes: dict[int, Any] = {}
        self.now: dict[fx.Node, fx.Node] = {}  # what stands for a node since it was split or summed
        self.sites: list[dict[str, Any]] = []

    def run(self) -> None:
        """Write the whole plan into the graph."""
        for node in self.found.walk.graph.nodes:
            if node.op == "output":
                self.finish(node)
                break
            if (step := self.found.steps.get(node)) is not None:
                self.step(node, step)
            if node in self.found.starts and self.found.is_split(node):
                self.begin_split(node)
        erase_unused(self.graph.nodes, lambda n: n.op == "get_attr" or self.is_idle(n))
        self.graph.lint()

    def is_idle(self, node: fx.Node) -> bool:
        """Return whether a node was inserted by this plan and only computes a value, which may be unused."""
        return bool(node.meta.get("pass", {}).get("name") == self.name)

    # --- nodes

    def block(self, kind: type[Collective], *args: Any) -> str:
        """Return the path of a block; it is created when first needed."""
        key = (kind, *map(repr, args))
        if key not in self.made:
            owner = self.tree._modules.get(self.name)
            if owner is None:
                owner = self.tree._modules[self.name] = Container()
            known = next((k for k, m in owner._modules.items() if _are_same_block(m, kind, self.ways, args)), None)
            if known is None:
                known = f"{kind.__name__.lower()}{sum(isinstance(m, kind) for m in owner._modules.values()) + 1}"
                owner._modules[known] = kind(self.ways, *args)
            self.made[key] = f"{self.name}.{known}"
        return str(self.made[key])

    def call(
        self,
        kind: type[Collective],
        settings: tuple[Any, ...],
        value: Any,
        streams: tuple[int, ...],
        like: Any = None,
        **where: Any,
    ) -> fx.Node:
        """Insert a call of a collective on a value and the sizes of its streams, `after` a node or `before` one."""
        path = self.block(kind, *settings)
        args = (value, *(self.size(stream) for stream in streams))
        known = get_meta(value) if isinstance(value, fx.Node) else None
        node = insert(self.graph, "call_module", path, args, **{"name": make_identifier(path), "meta": known, **where})
        return self.marked(node, like or value, kind.__name__)

    def plain(self, op: str, target: Any, args: Any, like: fx.Node, **place: Any) -> fx.Node:
        """Insert a new node that is no block, on behalf of another."""
        return self.marked(insert(self.graph, op, target, args, **place), like, "")

    def in_place(self, twin: fx.Node, kind: type[Collective], settings: tuple[Any, ...], args: tuple[Any, ...]) -> None:
        """Replace a node by a call of a block."""
        path, name = self.block(kind, *settings), f"{twin.name}_parallel"
        new = insert(self.graph, "call_module", path, args, before=twin, name=name, meta=twin.meta)
        self.marked(new, twin, kind.__name__).meta["nn_module_stack"] = twin.meta.get("nn_module_stack", ROOT)
        replace(twin, new)
        self.now[twin] = new

    def marked(self, node: fx.Node, like: fx.Node, block: str) -> fx.Node:
        """Record on a node that this plan inserted it, for which node and as which block; return it."""
        node.meta["nn_module_stack"] = ROOT
        site = {"site": like.name, "place": "node", "block": block}
        node.meta["pass"] = {"name": self.name, **site, "where": ""}
        if block:
            self.sites.append({"path": like.name, "place": "node", "block": str(node.target)})
        return node

    def node(self, one: fx.Node) -> fx.Node:
        """Return the current node of this graph for a node of the plan."""
        twin = self.twin[one.name]
        return self.now.get(twin, twin)

    def size(self, stream: int) -> Any:
        """Return the whole size of a stream, read where it begins; a constant if that is a weight."""
        if stream not in self.sizes:
            one, dim = self.found.origins[stream]
            if isinstance(self.found.starts.get(one), Placement):
                self.sizes[stream] = self.found.sizes[stream]
                return self.sizes[stream]
            origin = self.twin[one.name]
            after = find_last_input(self.graph) if origin.op == "placeholder" else origin
            size = self.plain("call_method", "size", (origin, dim), origin, after=after)
            if (inner := self.found.grains.get(one, 1)) > 1:
                size = self.plain("call_function", operator.floordiv, (size, inner), origin, after=size)
            self.sizes[stream] = size
        return self.sizes[stream]

    # --- steps

    def begin_split(self, node: fx.Node) -> None:
        """Split a value where its streams begin."""
        place = self.found.place(node)
        assert place is not None
        twin = self.node(node)
        if isinstance(self.found.starts[node], Placement):
            cut = self.call(Part, self.part(place), twin, place.layout.streams, after=twin)
        else:
            (stream,) = place.layout.streams
            settings: tuple[Any, ...] = self.axis, place.dim, place.layout.inner, True
            if self.axis == "rows":  # tokens of other values may be whole rows
                settings += (tuple(self.found.walk.values[node].shape[place.dim + 1 :]),)
                settings += (self.found.divisor, self.found.rest) if self.found.divisor > 1 else ()
            elif self.axis == "batch" and self.found.samples_are_apart():
                settings += (None, 1, 0, True)
            after = max(self.size(stream), find_last_input(self.graph) if twin.op == "placeholder" else twin)
            cut = self.call(Split, settings, twin, (stream,), after=after)
        sizes = list_nodes(list(self.sizes.values()))
        redirect(twin, cut, keep={*sizes, *list_nodes([size.args for size in sizes])})
        self.now[self.twin[node.name]] = cut

    def part(self, place: Placement) -> tuple[Any, ...]:
        """Return the settings of a `Part`."""
        return self.axis, place.dim, place.layout.inner, place.layout.outer

    def step(self, node: fx.Node, step: ArgumentSplit) -> None:
        """Write the plan's step at one node."""
        inputs = node.all_input_nodes
        twin = self.twin[node.name]
        table: dict[fx.Node, Any] = {}
        for index in step.gathers:
            table[self.node(inputs[index])] = self.gathered(inputs[index], twin)
        for index, place in step.splits:
            table[self.node(inputs[index])] = self.split(inputs[index], place, twin)
        for index in step.once:
            table[self.node(inputs[index])] = self.call(Once, (self.axis,), self.node(inputs[index]), (), before=twin)
        if step.whole_numbers:
            for one in inputs:
                if self.found.hangs_on_sizes(one) and self.node(one) not in table:
                    table[self.node(one)] = self.whole_number(one)
        if step.special == "attention":
            self.attention(node, twin, table)
            return
        if step.special == "norm":
            self.norm(node, twin, step.near)
            return
        if step.special == "features":
            self.feature_norm(node, twin, table)
            return
        if step.special == "near":
            self.near(node, twin, step.near)
            return
        if table or step.scaled:
            runs = dict(step.scaled)

            def argument(position: int, leaf: Any) -> Any:
                value = table.get(leaf, leaf) if isinstance(leaf, fx.Node) else leaf
                if position not in runs:
                    return value
                key = ("count", value, runs[position])
                if key not in self.made:
                    self.made[key] = self.call(Count, (self.axis,), value, runs[position], before=twin, like=twin)
                return self.made[key]

            args, kwargs = map_numbered((twin.args, twin.kwargs), argument)
            change(twin, args=args, kwargs=kwargs)
        if step.add or step.same:
            after = max([twin, *list_nodes([self.size(stream) for stream in step.mean])])
            kind = Broadcast if step.same else AllReduceMean if step.mean else AllReduce
            total = self.call(kind, (self.axis,), twin, step.mean, after=after)
            self.instead(twin, total)
        if step.cut is not None:
            settings, now = (self.axis, step.cut.dim, step.cut.layout.inner), self.node(node)
            cut = self.call(Split, settings, now, step.cut.layout.streams, after=now)
            redirect(now, cut)
            self.now[twin] = cut

    def instead(self, twin: fx.Node, new: fx.Node) -> None:
        """Replace a node by a new one from here on."""
        redirect(twin, new)
        self.now[twin] = new

    def near(self, node: fx.Node, twin: fx.Node, near: Any) -> None:
        """Fetch rows of the neighbours for a node, and cut off the excess."""
        inputs = node.all_input_nodes
        value = self.node(inputs[near.which])
        (given,), (gives,) = near.place.layout.streams, near.out.layout.streams
        inner, out = near.place.layout.inner, near.out.layout.inner
        if gives in self.found.derived and gives not in self.sizes:
            self.sizes[gives] = self.call(Extent, (self.axis, inner, near.reach.numbers()), value, (given,), before=twin)
        both = inner, out, near.reach.numbers()
        rows = self.call(Fetch, (self.axis, near.place.dim, *both), value, (given, gives), before=twin)
        table: dict[fx.Node, Any] = {value: rows}
        for one in inputs:
            if self.found.hangs_on_sizes(one):
                path = self.block(RowScale, self.axis, near.place.dim, inner)
                args = (self.whole_number(one), rows, self.size(given))
                scaled = insert(self.graph, "call_module", path, args, before=twin)
                table[self.node(one)] = self.marked(scaled, twin, "RowScale")
        rewire(twin, table)
        cut, name = (self.axis, near.out.dim, *both), f"{twin.name}_parallel"
        self.instead(twin, self.call(Cut, cut, twin, (given, gives), after=twin, name=name))

    def norm(self, node: fx.Node, twin: fx.Node, norm: Any) -> None:
        """Insert normalisation by the statistics of all processes."""
        place = self.found.place(node)
        assert place is not None
        sizes = tuple(self.size(stream) for stream in place.layout.streams)
        given = []
        for value in (norm.weight, norm.bias):
            if isinstance(value, str):
                value = self.plain("get_attr", value, (), twin, before=twin)
            given.append(self.node(value) if isinstance(value, fx.Node) and value.name in self.twin else value)
        args = (self.node(node.all_input_nodes[0]), *given, *sizes)
        self.in_place(twin, Norm, (self.axis, norm.groups, norm.eps), args)

    def split(self, one: fx.Node, place: Placement, before: fx.Node) -> fx.Node:
        """Return the part of a whole value, inserted once."""
        key = ("split", one, place)
        if key not in self.made:
            kind, settings = Split, (self.axis, place.dim, place.layout.inner)
            if one.op == "get_attr" and all(isinstance(self.size(stream), int) for stream in place.layout.streams):
                kind, settings = Part, self.part(place)  # type: ignore[assignment]
            self.made[key] = self.call(kind, settings, self.node(one), place.layout.streams, before=before)
        found: fx.Node = self.made[key]
        return found

    def gathered(self, one: fx.Node, before: fx.Node) -> Any:
        """Return the whole of a value, inserted once: a node, or nested ones."""
        key = ("gather", one)
        if key not in self.made:
            self.made[key] = self.gather(self.found.values[one], self.node(one), before)
        return self.made[key]

    def gather(self, value: Any, node: Any, before: fx.Node) -> Any:
        """Return the whole of a value: gathered if it is split, with the same nesting."""
        if isinstance(value, Leaf):
            if value.place is None:
                return node
            dim, layout = value.place
            return self.call(Gather, (self.axis, dim, layout.inner), node, layout.streams, before=before)
        if isinstance(value, StreamNumber):
            return self.whole_number(node)
        if isinstance(value, (tuple, list, dict)):
            members = {}
            for key, member in value.items() if isinstance(value, dict) else enumerate(value):
                item = self.plain("call_function", operator.getitem, (node, key), node, before=before)
                members[key] = self.gather(member, item, before)
            return members if isinstance(value, dict) else type(value)(members.values())
        return node

    def whole_number(self, one: fx.Node) -> Any:
        """Return a number as one process would have it."""
        twin = self.twin.get(one.name, one)
        if not self.found.hangs_on_sizes(one):
            return self.now.get(twin, twin)
        key = ("number", one)
        if key in self.made:
            return self.made[key]
        (source, *_) = one.all_input_nodes
        place = self.found.place(source)
        asked = {"numel": Numel, "size": GlobalSize if len(one.args) + len(one.kwargs) == 2 else None}.get(str(one.target))
        if asked is not None and place is not None:
            streams = place.layout.streams
            after = max([twin, *list_nodes([self.size(stream) for stream in streams])])
            made = self.call(asked, (self.axis, place.dim), self.node(source), streams, after=after)
        else:
            given = {n: self.full_result(n, twin) for n in one.all_input_nodes}
            after = max([twin, *list_nodes(list(given.values()))])
            args, kwargs = fx.node.map_arg((one.args, one.kwargs), given.__getitem__)
            made = self.plain(one.op, one.target, args, twin, kwargs=kwargs, after=after)
        self.made[key] = made
        return made

    def full_result(self, one: fx.Node, before: fx.Node) -> Any:
        """Return the whole result of a node, a tensor or a number."""
        if self.found.is_split(one):
            return self.gathered(one, before)
        return self.whole_number(one)

    def attention(self, node: fx.Node, twin: fx.Node, table: Mapping[fx.Node, Any]) -> None:
        """Replace a node by attention over all processes' tokens."""
        given = bind_attention(node)
        query, key = (self.found.place(given[name]) for name in ("query", "key"))
        assert query is not None and key is not None
        values = [self.node(given[name]) for name in ("query", "key", "value")]
        mask, scale = (self.node(v) if isinstance(v, fx.Node) else v for v in (given["attn_mask"], given["scale"]))
        mask = table.get(mask, mask) if isinstance(mask, fx.Node) else mask
        streams = (*query.layout.streams, *key.layout.streams)
        sizes = tuple(self.size(stream) for stream in streams)
        settings = len(query.layout.streams), given["is_causal"]
        self.in_place(twin, Attention, settings, (*values, mask, scale, *sizes))

    def feature_norm(self, node: fx.Node, twin: fx.Node, table: Mapping[fx.Node, Any]) -> None:
        """Replace a node by a norm with the statistics of all processes' features."""
        given, leaf = get_norm_arguments(node), self.found.place(node)
        assert given is not None and leaf is not None
        parts = [self.node(given[key]) for key in ("input", "weight", "bias") if given[key] is not None]
        values = [table.get(value, value) for value in parts]
        values += [None] * (3 - len(values))  # a bias comes with a weight
        settings = self.axis, "layer" in get_name(twin), given["eps"]
        sizes = tuple(self.size(stream) for stream in leaf.layout.streams)
        self.in_place(twin, FeatureNorm, settings, (*values, *sizes))

    def finish(self, node: fx.Node) -> None:
        """Gather what the graph returns."""
        twin = self.twin[node.name]
        table = {}
        for one in node.all_input_nodes:
            if self.found.is_split(one):
                table[self.node(one)] = self.gathered(one, twin)
            elif self.found.hangs_on_sizes(one):
                table[self.node(one)] = self.whole_number(one)
        rewire(twin, table)


def _are_same_block(module: Any, kind: type[Collective], ways: Mapping[str, int], args: tuple[Any, ...]) -> bool:
    return type(module) is kind and repr(vars(kind(dict(ways), *args))) == repr(vars(module))


