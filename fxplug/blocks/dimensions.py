"""Where a value of a graph has the samples of the batch and where its channels, as far as its way through the graph tells."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn

from ..core.ir import ops
from ..core.ir.traced_module import list_class_names

# the order of elements stays, only the sizes are others
RESHAPED = ("reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze")
SAME_ORDER = (*RESHAPED, "contiguous", "clone", "edge")
# by graph, as every layer of a pass asks about the same one; nothing in here keeps it alive
_known: WeakKeyDictionary[fx.Graph, tuple[tuple[int, int], Mapping[str, int]]] = WeakKeyDictionary()
MOVED = ("transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "t")


def find_batch_dim(node: fx.Node, batch: int) -> int | None:
    """Return the dimension of a value along which samples are contiguous; -1 where they alternate, None if unknown."""
    graph = node.graph
    key = batch, len(graph.nodes)
    if (known := _known.get(graph)) is None or known[0] != key:
        _known[graph] = known = key, _before(graph, batch)
    before = known[1].get(node.name)
    return None if before is None else _dimension(node.meta["shape"], before, batch)


def is_sampled(node: fx.Node | None) -> bool:
    """Return whether a value is computed from the model's inputs, or from their batch size."""
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
    """Return the product of the dimensions before that of the samples, by value: reshaping does not change it."""
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


def find_order(node: fx.Node, dims: int) -> list[int] | None:
    """Return the input dimension of each dimension of the result of a function that only permutes them."""
    constants = [*node.args[1:], *node.kwargs.values()]
    if any(isinstance(value, fx.Node) for value in constants):
        return None
    # a tensor whose sizes are its dimensions' numbers says where each goes
    marked: Any = torch.empty([2 + d for d in range(dims)], device="meta")
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return [size - 2 for size in getattr(torch.Tensor, name)(marked, *node.args[1:], **node.kwargs).shape]


def _moved(node: fx.Node, dims: int, dim: int) -> int | None:
    """Return the same product after a function that only permutes dimensions."""
    moved = find_order(node, dims)
    sizes: Sequence[int] = node.meta["shape"]
    return None if moved is None else math.prod(sizes[: moved.index(dim)])


def _dimension(shape: Sequence[int], before: int, batch: int) -> int:
    product = 1
    for dim, size in enumerate(shape):
        if product == before and size % batch == 0:
            return dim
        product *= size
    return -1


# sums over a dimension that two tensors share: where the channels go is for the layers around to say
CONTRACTED = (
    "matmul", "bmm", "mm", "einsum", "baddbmm", "addmm", "tensordot", "scaled_dot_product_attention", "getattr",
    "multi_head_attention_forward", "outer", "cdist", "diag", "diagonal", "diag_embed",
)  # fmt: skip
LAST = (
    "Linear", "TransposedLinear", "Embedding", "EmbeddingBag", "MultiheadAttention", "RNNBase", "Bilinear",
    "TransformerEncoderLayer",
)  # fmt: skip
SECOND = ("GroupNorm", "_BatchNorm", "LocalResponseNorm", "PReLU")
FUNCTIONS = {
    "linear": -1, "embedding": -1, "conv1d": -2, "conv2d": -3, "conv3d": -4, "conv_transpose1d": -2, "conv_transpose2d": -3,
    "conv_transpose3d": -4, "pixel_shuffle": -3, "pixel_unshuffle": -3, "bilinear": -1,
}  # fmt: skip


def find_channel_dim(node: fx.Node, root: nn.Module) -> int | None:
    """Return the channel dimension of a value, counted from the first; None if no layer around determines it."""
    found = _all(node.graph, root).get(node)
    return None if found is None else found + len(node.meta["shape"])


def get_channel_dim(module: nn.Module, dims: int) -> int | None:
    """Return the channel dimension of a value at a layer of torch.nn, counted from the last; None if there is none."""
    names = list_class_names(module)
    if any(name in names for name in LAST):
        return -1
    if "_ConvNd" in names:
        return -len(module.kernel_size) - 1  # type: ignore[arg-type]
    if "_InstanceNorm" in names:
        return -int(next(name for name in names if name[-1:] == "d")[-2]) - 1
    if any(name in names for name in SECOND):
        return 1 - dims if dims > 1 else None
    if "LayerNorm" in names or "RMSNorm" in names:
        return -1 if len(module.normalized_shape) == 1 else None  # type: ignore[arg-type]
    return None


@lru_cache(maxsize=2)  # every layer of a pass asks about the same graph
def _all(graph: fx.Graph, root: nn.Module) -> Mapping[fx.Node, int]:
    """Return the channel dimension by value, counted from the last: propagated forward from the layers, then backward."""
    found: dict[fx.Node, int] = {}
    asked: dict[fx.Node, int] = {}  # what the readers of a value take for its channels
    for node in graph.nodes:
        if not (shape := node.meta.get("shape")):
            continue
        own = _of(node, root, len(shape))
        if own is not None:
            found[node] = own
            for given in node.all_input_nodes[:1]:
                asked.setdefault(given, own)
            continue
        for given in node.all_input_nodes:
            if given in found and (dim := _carried(node, given, found[given], given.meta["shape"], shape)) is not None:
                found[node] = dim
                break
    for node in reversed(graph.nodes):
        if node in found or not (shape := node.meta.get("shape")):
            continue
        if node in asked and -asked[node] <= len(shape):
            found[node] = asked[node]
            continue
        for user in node.users:
            if user in found and _of(user, root, 0) is None:
                dim = _carried(user, node, found[user], user.meta["shape"], shape, back=True)
                if dim is not None:
                    found[node] = dim
                    break
    return found


def _of(node: fx.Node, root: nn.Module, dims: int) -> int | None:
    """Return the channel dimension of the result of a node that is a layer."""
    if node.op == "call_module":
        return get_channel_dim(root.get_submodule(str(node.target)), dims)
    if node.op != "call_function":
        return None
    name = getattr(node.target, "__name__", "")
    if name == "getitem" and isinstance(node.args[0], fx.Node) and node.args[0].op == "call_module":
        # attention, an RNN: they give several values
        return get_channel_dim(root.get_submodule(str(node.args[0].target)), dims)
    if name in ("group_norm", "batch_norm", "instance_norm"):
        return 1 - dims if dims > 1 else None
    if name in ("layer_norm", "rms_norm"):
        size = node.args[1] if len(node.args) > 1 else node.kwargs.get("normalized_shape")
        return -1 if isinstance(size, (tuple, list)) and len(size) == 1 else None
    if name in ("matmul", "linear") and len(node.args) > 1:
        weight = node.args[1]
        plain = isinstance(weight, fx.Node) and weight.op == "get_attr"
        return -1 if name == "linear" or plain else None
    return FUNCTIONS.get(name)


def _carried(
    node: fx.Node, given: fx.Node, dim: int, old: Sequence[int], new: Sequence[int], back: bool = False
) -> int | None:
    """Return the channel dimension of another value: that of a node's result from its input's or, with `back`, the other
    way."""
    if node.target is ops.edge:
        return dim
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.op != "call_module" and name in MOVED:
        moved = find_order(node, len(old))
        if moved is None:
            return None
        index = dim + len(old)
        return (moved[index] if back else moved.index(index)) - len(old)
    if node.op == "call_module" or name in RESHAPED:
        return dim if list(old) == list(new) else _kept(dim, old, new)
    if name in CONTRACTED or -dim > min(len(old), len(new)):
        return None
    if len(old) != len(new):  # a smaller operand
        beside = any(len(n.meta.get("shape", ())) == len(new) for n in node.all_input_nodes)
        return dim if not back and beside and old[dim] in (1, new[dim]) else None
    return dim if old[dim] == new[dim] or name in ("cat", "concat") or 1 in (old[dim], new[dim]) else None


def _kept(dim: int, old: Sequence[int], new: Sequence[int]) -> int | None:
    """Return the dimension of a reshaped value with the same size and the same stride in elements."""

    def behind(shape: Sequence[int], at: int) -> int:
        return math.prod(shape[len(shape) + at + 1 :])

    if math.prod(old) != math.prod(new):  # a pool, say
        return dim if len(old) == len(new) and old[dim] == new[dim] else None
    rows = [d for d in range(-1, -len(new) - 1, -1) if new[d] == old[dim] and behind(new, d) == behind(old, dim)]
    return rows[0] if len(rows) == 1 else None  # several have size 1


def describe_unknown(value: Any) -> str:
    """Return the message for a value whose channel dimension is unknown."""
    rank = len(value.shape)
    return (
        f"the dimension of the channels of {value} is not known: set dim in the rule's options or the pass's parameters, dim: "
        f"-1 where they are last (batch, ..., channels), dim: {min(1, rank - 1)} for (batch, channels, ...)"
    )
