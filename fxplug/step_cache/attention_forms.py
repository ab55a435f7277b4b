"""Attention in cheaper ways: the places that are marked, and graphs that compute each of them in its way.

DiTFastAttn (Yuan et al. 2024, arXiv 2406.08552).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from ..blocks.windowed_attention import Attend
from ..core.errors import SpecError
from ..core.ir.functions import bind_attention
from ..core.ir.graph import Graph, copy_graph, erase, redirect, replace, set_argument
from ..core.ir.subgraphs import collect_nodes
from ..core.spec.addresses import make_identifier
from .slices import DataFlow
from .steps import put, put_check

# the cheapest first: from an earlier step (AST), in a window with what that leaves out from an earlier step (WA-RS), as it is;
# and of one half of the batch for both (ASC)
METHODS = ("step", "window half", "window", "full half", "full")


class Do(NamedTuple):
    """What becomes of one place in a step: the way it is computed, and what it gives to later ones."""

    method: str = "full"
    residual: bool = False
    output: bool = False


@dataclass
class MarkedRegion:
    """A marked region: its marks, its nodes, and the attentions in it."""

    key: str
    marks: list[fx.Node]
    nodes: list[fx.Node]
    attentions: list[fx.Node]

    @property
    def windowed(self) -> bool:
        """Return whether all attention is self-attention without mask, dropout or causality."""
        return bool(self.attentions) and all(map(_plain, self.attentions))


def find_places(graph: fx.Graph, root: nn.Module) -> dict[str, MarkedRegion]:
    """Return the marked regions of a graph, in its order. Raises SpecError if there are none."""
    found: dict[str, MarkedRegion] = {}
    regions = collect_nodes(graph)
    for node in graph.nodes:
        if node.op == "call_module" and isinstance(root.get_submodule(str(node.target)), Attend):
            site = str(node.meta["pass"]["site"])
            key = next((key for key in (site, site.partition(":")[0]) if key in regions), "")
            if not key:
                raise SpecError(f"'{site}' is not a module with attention that can be replaced: mark one that is")
            place = found.setdefault(key, MarkedRegion(key, [], regions[key], []))
            place.marks.append(node)
    for place in found.values():
        behind = set(place.marks)  # the edges by which values leave
        for node in place.nodes:
            if not behind.isdisjoint(node.all_input_nodes):
                behind.add(node)
        place.nodes = [n for n in place.nodes if n not in behind]
        place.attentions = [n for n in place.nodes if getattr(n.target, "__name__", "") == "scaled_dot_product_attention"]
    if not found:
        raise SpecError("no attention is marked here: apply the pass ditfastattn")
    return found


def _plain(node: fx.Node) -> bool:
    given = bind_attention(node)
    shapes = [n.meta.get("shape", ()) for n in (given["query"], given["key"]) if isinstance(n, fx.Node)]
    alike = len(shapes) == 2 and min(map(len, shapes)) > 1 and shapes[0][-2] == shapes[1][-2]
    return alike and given["attn_mask"] is None and given["dropout_p"] == 0 and given["is_causal"] is False


def write_attention(graph: fx.Graph, root: nn.Module, what: Mapping[str, Do], half: int) -> Graph:
    """Return a copy of a graph without its marks that computes each marked region by its method: -> (result, {name: cached
    value}).

    Cached values of earlier steps are inputs after the model's own. `half` of the batch, 0 or 1, is computed for both.
    """
    return _FormWriter(copy_graph(graph), root, half).run(what)


class _FormWriter:
    def __init__(self, graph: Graph, root: nn.Module, half: int) -> None:
        self.graph, self.root, self.half = graph, root, half
        self.heads = [n for n in graph.nodes if n.op == "placeholder"]
        self.gives: dict[str, fx.Node] = {}

    def run(self, what: Mapping[str, Do]) -> Graph:
        for place in find_places(self.graph, self.root).values():
            self.place(place, make_identifier(place.key), what.get(place.key, Do()))
        output = next(iter(reversed(self.graph.nodes)))
        set_argument(output, 0, "", (output.args[0], self.gives))
        flow = DataFlow(self.graph, self.root)
        heads = [n for n in self.graph.nodes if n.op == "placeholder"]
        needed = flow.closed([output, *heads], flow.needs)
        erase(node for node in self.graph.nodes if node not in needed)
        self.graph.lint()
        return self.graph

    def place(self, place: MarkedRegion, name: str, do: Do) -> None:
        values: list[Any] = [mark.args[0] for mark in place.marks]
        halved = do.method.endswith("half")
        if do.method == "step":
            values = [self.earlier_value(f"{name}_output_{i}", mark, mark) for i, mark in enumerate(place.marks)]
        else:
            base = str(place.marks[0].target)
            half = f"{base}.halves.{self.half}"
            if halved:
                self.enter(place, half)
            for i, node in enumerate(place.attentions):
                if do.method.startswith("window"):
                    self.window(node, f"{name}_residual_{i}", base, half if halved else "")
                elif do.residual:
                    near = self.near(node, base, node)
                    rest = self.node("call_function", operator.sub, (node, near), node, near)
                    self.gives[f"{name}_residual_{i}"] = self.twice(rest, rest) if halved else rest
            if halved:
                values = [self.twice(value, mark) for value, mark in zip(values, place.marks, strict=True)]
        for i, (mark, value) in enumerate(zip(place.marks, values, strict=True)):
            redirect(mark, value)
            if do.output and do.method != "step":
                self.gives[f"{name}_output_{i}"] = value

    def enter(self, place: MarkedRegion, half: str) -> None:
        """Pass one half of its inputs to the region."""
        inside = set(place.nodes)
        given = dict.fromkeys(a for n in place.nodes for a in n.all_input_nodes if a not in inside and a.meta.get("shape"))
        values = [a for a in given if a.op != "get_attr"]
        like = min((a for a in values if a.meta["shape"][0] == place.marks[0].meta["shape"][0]), default=None)
        if like is None:
            raise SpecError(
                f"no input of '{place.key}' has the batch dimension of its result, so it cannot be split into halves"
            )
        for value in values:
            if value.meta["shape"][0] == like.meta["shape"][0] or value.meta["shape"][0] == 1:
                cut = self.node("call_module", half, (value, like), value, max(value, like))
                redirect(value, cut, keep=value.users.keys() - inside)

    def window(self, node: fx.Node, name: str, base: str, half: str) -> None:
        near = self.near(node, base, node)
        rest = self.earlier_value(name, node, near)
        if half:
            rest = self.node("call_module", half, (rest,), node, rest)
        whole = self.node("call_function", operator.add, (near, rest), node, rest)
        replace(node, whole)

    def near(self, node: fx.Node, base: str, after: fx.Node) -> fx.Node:
        given = bind_attention(node)
        args = (given["query"], given["key"], given["value"], given["scale"])
        return self.node("call_module", f"{base}.near", args, node, after)

    def twice(self, value: fx.Node, after: fx.Node) -> fx.Node:
        return self.node("call_function", torch.cat, ([value, value],), value, after)

    def earlier_value(self, name: str, like: fx.Node, after: fx.Node) -> fx.Node:
        """Add an input for a value of an earlier step, after the model's own."""
        own = [n for n in self.graph.nodes if n.op == "placeholder"]
        rest = next((n for n in own if str(n.target).startswith("**")), None)
        if name in {str(n.target) for n in own}:
            raise SpecError(f"the model has an input '{name}' of its own")
        given = put(self.graph, "placeholder", name, (None,), like, after=own[-1], before=rest, name=name)
        return put_check(self.graph, given, name, like, next((n for n in own if "shape" in n.meta), None), after=after)

    def node(self, op: str, target: Any, args: tuple[Any, ...], like: fx.Node, after: fx.Node) -> fx.Node:
        return put(self.graph, op, target, args, like, after=after)
