"""A graph run once as one process has it: what each node gives, how much it computes, and what shares memory."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from ..errors import SpecError
from ..module import TracedModule

KEPT = 1 << 16  # elements of a tensor of whole numbers whose values are kept


@dataclass
class Walk:
    """What the nodes of a graph give on example inputs: floating-point tensors on the meta device, others with values."""

    graph: fx.Graph
    values: dict[fx.Node, Any] = field(default_factory=dict)
    work: dict[fx.Node, int] = field(default_factory=dict)  # floating-point operations
    inputs: set[fx.Node] = field(default_factory=set)  # placeholders, and what is taken out of them
    views: set[fx.Node] = field(default_factory=set)  # nodes whose tensors share memory with their inputs'
    writes: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)  # the inputs that a node writes into
    written: set[fx.Node] = field(default_factory=set)  # values that are written after they were made

    def fed(self) -> set[fx.Node]:
        """The values that are computed from tensors among the inputs, and not from weights and sizes alone."""
        found: set[fx.Node] = set()
        for node, value in self.values.items():
            tensors = any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))
            if tensors and (node.op == "placeholder" or not found.isdisjoint(node.all_input_nodes)):
                found.add(node)
        return found

    def roots(self, node: fx.Node) -> set[fx.Node]:
        """The values whose memory a value shares, itself when it has its own."""
        found, todo, seen = set(), [node], set()
        while todo:
            one = todo.pop()
            if one in seen:
                continue
            seen.add(one)
            if one in self.views:
                todo += one.all_input_nodes
            else:
                found.add(one)
        return found


def walk(gm: TracedModule, graph: fx.Graph, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Walk:
    """Run a graph on example inputs, with values or without. Raises SpecError for inputs that the model does not take."""
    found = Walk(graph)
    env: dict[fx.Node, Any] = {}
    places = iter(bound(gm, args, kwargs))
    last = {n: node for node in graph.nodes for n in node.all_input_nodes}
    gone: dict[fx.Node, list[fx.Node]] = {}
    for node, user in last.items():
        gone.setdefault(user, []).append(node)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), counter:
        before = 0
        for node in graph.nodes:
            if node.op == "output":
                break
            versions = {n: _versions(env[n]) for n in node.all_input_nodes}
            env[node] = value = pytree.tree_map(_copied, next(places)) if node.op == "placeholder" else _run(gm, node, env)
            if changed := [n for n, version in versions.items() if version != _versions(env[n])]:
                found.writes[node] = changed
            found.values[node] = pytree.tree_map(_outline, value)
            after = counter.get_total_flops()
            if after > before:
                found.work[node], before = after - before, after
            if node.op != "placeholder" and _memory(value) & {m for n in node.all_input_nodes for m in _memory(env[n])}:
                found.views.add(node)
            for one in gone.get(node, ()):
                env.pop(one, None)
    for changed in found.writes.values():
        for one in changed:
            found.written |= found.roots(one)
    return found


def bound(gm: TracedModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Inputs in the order of a graph's placeholders. Raises SpecError for those that the model does not take."""
    try:
        given = inspect.signature(gm.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise SpecError(f"the model does not take these example inputs: {error}") from None
    given.apply_defaults()
    return list(given.arguments.values())


def _run(gm: TracedModule, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
    args: Any = fx.node.map_arg(node.args, env.__getitem__)
    kwargs: Any = fx.node.map_arg(node.kwargs, env.__getitem__)
    if node.op == "get_attr":
        value: Any = gm
        for part in str(node.target).split("."):
            value = getattr(value, part)
        return value
    if node.op == "call_function":
        return node.target(*args, **kwargs)  # type: ignore[operator]
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return gm.get_submodule(str(node.target))(*args, **kwargs)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _outline(value: Any) -> Any:
    """A tensor without its values, if they do not matter to what an operation may be called with."""
    if not isinstance(value, Tensor):
        return value
    if not (value.is_floating_point() or value.is_complex()) and value.numel() <= KEPT:
        return value.detach().clone()
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _versions(value: Any) -> int:
    return sum(t._version for t in pytree.tree_leaves(value) if isinstance(t, Tensor) and not t.is_inference())


def _memory(value: Any) -> set[int]:
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return {t.untyped_storage()._cdata for t in tensors}
