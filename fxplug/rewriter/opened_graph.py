"""A graph whose leaves, the modules that it calls whole, are opened: edges of their own, or their code in their place."""

from __future__ import annotations

import inspect
from functools import cached_property
from typing import Any

from torch import fx, nn

from ..ir import ops
from ..ir.editing import insert, meta_of, redirect
from ..ir.graph import Graph
from ..ir.regions import Region, Regions, added
from ..ir.traced_module import TracedModule
from ..spec.addresses import Port, identifier
from ..spec.rules import Pass
from .graft import Graft, Traces
from .uses import (
    Slot,
    hand_over,
)


class BothModes(Exception):
    """What is put in differs between training and evaluation, and the graph so far does not."""


class OpenedGraph:
    """One graph while a pass is put in, with its regions, and what stands behind each value by now."""

    def __init__(
        self, graph: Graph, mode: bool, modes: int, tree: nn.Module, gm: TracedModule, p: Pass, traces: Traces
    ) -> None:
        self.graph, self.mode, self.modes = graph, mode, modes
        self.tree, self.p, self.traces = tree, p, traces
        self.regions = Regions(graph, gm)
        self.behind: dict[str, fx.Node] = {n.meta["behind"]: n for n in graph.nodes if "behind" in n.meta}

    def of_mode(self, sub: TracedModule) -> fx.Graph:
        """The graph of a traced block for this mode. Raises BothModes where the block has more modes than the model."""
        if len(sub.graphs) > self.modes:
            raise BothModes
        return sub.graphs.get(self.mode) or next(iter(sub.graphs.values()))

    def newest(self, node: fx.Node) -> fx.Node:
        """What the users of a leaf's result see now: the result of the last block put behind it."""
        while node.name in self.behind:
            node = self.behind[node.name]
        return node

    def open(self, region: Region, parameter: str) -> None:
        """Put a leaf's own code in the place of its call."""
        leaf = region.leaf
        assert leaf is not None
        module = self.tree.get_submodule(region.path)
        self.add_edges(region)
        args, kwargs = list(leaf.args), dict(leaf.kwargs)
        what = f"{self.p.name}: '{region.path}' ({type(module).__name__}), opened for its parameter '{parameter}',"
        sub = self.traces.of(module, args, kwargs, what)
        known = {name for name, _ in module.named_buffers()}
        for name, constant in sub.named_buffers():
            if name not in known:
                owner, _, last = name.rpartition(".")
                module.get_submodule(owner).register_buffer(last, constant, persistent=False)
        stack = leaf.meta["nn_module_stack"]
        made_by = {"name": self.p.name, "site": region.key, "place": "param", "block": "", "region": True}
        graft = Graft(self.graph, region.path, region.key, stack, made_by, after=leaf)
        inputs = inspect.signature(module.forward).bind(*args, **kwargs)
        inputs.apply_defaults()
        result = graft.put(self.of_mode(sub), inputs.arguments)
        for node in graft.nodes:
            if node.op == "get_attr":
                self.regions.readers.setdefault(str(node.target), []).append(node)
        self.now_inside(graft.nodes)
        hand_over(leaf, result)

    def add_edges(self, region: Region) -> None:
        """Make a leaf a region with edges of its own, so that its place stays when its call goes."""
        leaf = region.leaf
        assert leaf is not None
        stack = leaf.meta["nn_module_stack"]
        inputs, outputs = self.regions.in_ports(region), self.regions.out_ports(region)
        region.leaf, region.inputs, region.outputs = None, [], []
        leaf.meta.pop("port")
        for port, index, _ in inputs:
            given = [*leaf.args, *leaf.kwargs.values()][index]
            assert isinstance(given, fx.Node)
            edge = self.edge(given, port, index, stack, before=leaf)
            if not region.inputs:
                edge.meta["call"] = tuple(None if isinstance(v, fx.Node) else v for v in leaf.args)
                edge.meta["named"] = {k: None if isinstance(v, fx.Node) else v for k, v in leaf.kwargs.items()}
            Slot(given, leaf, index).put(edge, set())
            region.inputs.append((port, index, edge))
        for port, node in outputs:
            value = self.newest(node)
            edge = self.edge(value, port, 0, stack)
            redirect(value, edge)
            region.outputs.append((port, edge))
        self.now_inside([*(edge for _, _, edge in region.inputs), *(edge for _, edge in region.outputs)])

    def edge(
        self, value: fx.Node, port: Port, index: int, stack: dict[str, Any], before: fx.Node | None = None
    ) -> fx.Node:
        """A new edge, behind its value or before a node: the port of a region."""
        name = identifier("_".join([port.path, *(["in"] if port.side == "in" else ["out"]), *map(str, port.keys)]))
        meta = {**meta_of(value), "port": port, "index": index, "nn_module_stack": stack}
        return insert(self.graph, "call_function", ops.edge, (value,), after=value, before=before, name=name, meta=meta)

    @cached_property
    def inside(self) -> dict[str, list[fx.Node]]:
        """The nodes of regions by the regions around them."""
        found: dict[str, list[fx.Node]] = {}
        for node in self.graph.nodes:
            if not added(node) and node.op not in ("placeholder", "output"):
                for key in node.meta.get("nn_module_stack", {}):
                    found.setdefault(key, []).append(node)
        return found

    def now_inside(self, nodes: list[fx.Node]) -> None:
        """Note nodes that were put into regions."""
        for node in nodes:
            for key in node.meta["nn_module_stack"]:
                self.inside.setdefault(key, []).append(node)
