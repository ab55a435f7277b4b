"""A graph run once as one process has it: what each node gives, how much it computes, and what shares memory."""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ...core.capture.isolation import restore_after
from ...core.capture.module_state import State
from ...core.capture.user_code import shorten_path
from ...core.errors import FxplugError, SpecError
from ...core.ir.ops import TO_DENSE, other_kind
from ...core.ir.traced_module import TracedModule
from ...core.rewriter.neutrality import restore_buffers
from ...core.torch_internals import modules as pytree
from ...core.torch_internals import tensors as kernels
from ...core.torch_internals.tensors import TorchDispatchMode, memory_id, schema, version

KEPT = 1 << 16  # elements of a tensor of whole numbers whose values are kept


def make_label(node: fx.Node) -> str:
    """Return a node's label for messages, with the line of the model's code that created it, if that is known."""
    line = node.meta.get("line")
    return f"'{node.name}' ({shorten_path(line[0])}:{line[1]})" if line else f"'{node.name}'"


class Unsplittable(Exception):
    """Why there is no plan from these starts."""


@dataclass
class Walk:
    """What the nodes of a graph give on example inputs: floating-point tensors on the meta device, others with values."""

    graph: fx.Graph
    values: dict[fx.Node, Any] = field(default_factory=dict)
    work: dict[fx.Node, int] = field(default_factory=dict)  # floating-point operations
    inputs: list[fx.Node] = field(default_factory=list)  # placeholders, and what is taken out of them
    random: set[fx.Node] = field(default_factory=set)  # nodes that draw random numbers
    views: set[fx.Node] = field(default_factory=set)  # nodes whose tensors share memory with their inputs'
    writes: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)  # the inputs that a node writes into
    written: set[fx.Node] = field(default_factory=set)  # values that are written after they were made

    def fed(self) -> set[fx.Node]:
        """Return the values that are computed from tensors among the inputs, and not from weights and sizes alone."""
        found: set[fx.Node] = set()
        for node, value in self.values.items():
            if _has_tensors(value) and (node.op == "placeholder" or not found.isdisjoint(node.all_input_nodes)):
                found.add(node)
        return found

    def roots(self, node: fx.Node) -> set[fx.Node]:
        """Return the values whose memory a value shares, itself if it has its own."""
        found, todo, seen = set(), [node], set()
        while todo:
            one = todo.pop()
            if one in seen:
                continue
            seen.add(one)
            if one in self.views:
                todo += [n for n in one.all_input_nodes if _has_tensors(self.values[n])]
            else:
                found.add(one)
        return found


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))


def walk(gm: TracedModule, graph: fx.Graph, inputs: Sequence[Any]) -> Walk:
    """Run a graph on example inputs, with values or without; it may change a model in training (see `restore_state`).

    Raises Unsplittable where an operation fails with them.
    """
    found = Walk(graph)
    interpreter = fx.Interpreter(gm, graph=graph)
    env = interpreter.env
    places = iter(inputs)
    last = {n: node for node in graph.nodes for n in node.all_input_nodes}
    gone: dict[fx.Node, list[fx.Node]] = {}
    for node, user in last.items():
        gone.setdefault(user, []).append(node)
    counter, draws = kernels.make_flop_counter(), RandomOpDetector()  # type: ignore[no-untyped-call]
    with torch.no_grad(), torch.random.fork_rng(devices=[]), counter, draws:
        before = 0
        for node in graph.nodes:
            if node.op == "output":
                break
            versions = {n: _versions(env[n]) for n in node.all_input_nodes}
            draws.seen = False
            try:
                value = pytree.tree_map(_copied, next(places)) if node.op == "placeholder" else interpreter.run_node(node)
            except (FxplugError, MemoryError):
                raise
            except Exception as error:  # the model's
                text = str(error).partition("\n")[0]
                label = make_label(node)
                raise Unsplittable(f"{label} fails with these example inputs: {type(error).__name__}: {text}") from error
            if node.op == "get_attr" and isinstance(value, Tensor):
                value = value.detach()  # the counter asks for gradients of what a module is given, and views have none here
            env[node] = value
            if draws.seen:
                found.random.add(node)
            if changed := [n for n, version in versions.items() if version != _versions(env[n])]:
                found.writes[node] = changed
            found.values[node] = pytree.tree_map(_outline, value)
            if node.op == "placeholder" or (node.target is operator.getitem and node.args[0] in found.inputs):
                found.inputs.append(node)
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


def bind(gm: TracedModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return inputs in the order of a graph's placeholders. Raises SpecError for those that the model does not take."""
    try:
        given = inspect.signature(gm.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise SpecError(f"the model does not take these example inputs: {error}") from None
    given.apply_defaults()
    for name, value in given.arguments.items():
        if kind := next((kind for t in pytree.tree_leaves(value) if isinstance(t, Tensor) and (kind := other_kind(t))), ""):
            raise SpecError(f"example input '{name}' is a {kind} tensor, which a graph cannot take: {TO_DENSE}")
    return list(given.arguments.values())


@contextlib.contextmanager
def restore_state(gm: TracedModule) -> Iterator[None]:
    """Restore a module's buffers, and all else that a call may write, after the context; random generators too."""
    with restore_after(State(gm)), restore_buffers(gm):
        yield


class RandomOpDetector(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether an operation draws random numbers."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            named = {a.name: a.default_value for a in schema(func).arguments}
            named |= dict(zip(named, args, strict=False)) | kwargs
            self.seen = self.seen or named.get("dropout_p", 1) != 0  # attention has the tag, and draws for dropout only
        return func(*args, **kwargs)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _outline(value: Any) -> Any:
    """Return a tensor without its values, unless they affect what an operation accepts."""
    if not isinstance(value, Tensor):
        return value
    if not (value.is_floating_point() or value.is_complex()) and value.numel() <= KEPT:
        return value.detach().clone()
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _versions(value: Any) -> int:
    return sum(version(t) for t in pytree.tree_leaves(value) if isinstance(t, Tensor) and not t.is_inference())


def _memory(value: Any) -> set[int]:
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return {memory_id(t.untyped_storage()) for t in tensors}
