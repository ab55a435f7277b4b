"""Where a value of a graph has the samples of the model's batch, as far as its way from the inputs tells."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from . import ops

# the order of elements stays, only the sizes are others
SAME_ORDER = ("reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous", "clone", "edge")
# by graph, as every layer of a pass asks about the same one; nothing in here keeps it alive
_known: WeakKeyDictionary[fx.Graph, tuple[tuple[int, int], Mapping[str, int]]] = WeakKeyDictionary()
MOVED = ("transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "t")


def dimension(node: fx.Node, batch: int) -> int | None:
    """The dimension of a value in whose order its samples follow each other; -1 where they alternate, None if not known."""
    graph = node.graph
    key = batch, len(graph.nodes)
    if (known := _known.get(graph)) is None or known[0] != key:
        _known[graph] = known = key, _before(graph, batch)
    before = known[1].get(node.name)
    return None if before is None else _dimension(node.meta["shape"], before, batch)


def sampled(node: fx.Node | None) -> bool:
    """Whether a value is computed from the model's inputs, or from how many samples they have."""
    todo, seen = [node], {node}
    while todo:
        value = todo.pop()
        if value is None or value.op == "placeholder":
            return True
        if value.op == "call_method" and value.target == "size" and len(value.args) > 1:
            if value.args[1] == 0:
                return True
            continue
        if value.target is ops.device_of or (value.target is getattr and value.args[1] in ("device", "dtype")):
            continue
        new = [given for given in value.all_input_nodes if given not in seen]
        seen.update(new)
        todo.extend(new)
    return False


def _before(graph: fx.Graph, batch: int) -> Mapping[str, int]:
    """How many combinations of the dimensions before it the samples' own has, by value: reshaping leaves that as it is."""
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        shape = node.meta.get("shape")
        if not shape:
            continue
        if node.op == "placeholder":
            if shape[0] == batch:
                found[node] = 1
            continue
        given = next((n for n in node.all_input_nodes if n in found), None)
        if given is not None and (before := _after(node, given, found[given], batch)) is not None:
            found[node] = before
    return {node.name: before for node, before in found.items()}


def _after(node: fx.Node, given: fx.Node, before: int, batch: int) -> int | None:
    old, new = given.meta["shape"], node.meta["shape"]
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    dim = _dimension(old, before, batch)
    if name in SAME_ORDER and math.prod(old) == math.prod(new):
        return before
    if name in MOVED:
        return None if dim < 0 else _moved(node, len(old), dim)
    if dim >= 0:
        kept = len(old) == len(new) and old[dim] == new[dim]
        return math.prod(new[:dim]) if kept else None
    # they alternate in rows that are still as many
    return before if old[:-1] == new[:-1] else None


def order(node: fx.Node, dims: int) -> list[int] | None:
    """Which dimension of its input each dimension of the result of a function is that only changes their order."""
    constants = [*node.args[1:], *node.kwargs.values()]
    if any(isinstance(value, fx.Node) for value in constants):
        return None
    # a tensor whose sizes are its dimensions' numbers says where each goes
    marked: Any = torch.empty([2 + d for d in range(dims)], device="meta")
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return [size - 2 for size in getattr(torch.Tensor, name)(marked, *node.args[1:], **node.kwargs).shape]


def _moved(node: fx.Node, dims: int, dim: int) -> int | None:
    """As `before`, behind a function that only changes the order of dimensions."""
    moved = order(node, dims)
    sizes: Sequence[int] = node.meta["shape"]
    return None if moved is None else math.prod(sizes[: moved.index(dim)])


def _dimension(shape: Sequence[int], before: int, batch: int) -> int:
    product = 1
    for dim, size in enumerate(shape):
        if product == before and size % batch == 0:
            return dim
        product *= size
    return -1
