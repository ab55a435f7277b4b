"""Which dimensions of a value are places of the picture, as far as its way through the graph from the latents tells."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import fx, nn

from ..core.ir import functions
from ..core.ir.traced_module import list_class_names
from .dimensions import MOVED, RESHAPED, find_order
from .place_functions import (
    LIKE,
    MADE,
    PARTED,
    PRODUCTS,
    REDUCED,
    STRAY,
    get_name,
    has_computed_one,
    is_known,
    is_local,
    is_view,
    may_write,
)  # fmt: skip

Step = tuple[int, int, int]  # what a layer makes of a size: (size * first + second) // third
Grid = tuple[tuple[Step, Step], ...]  # such steps of height and width, from those of the latents on


def apply_grid(grid: Sequence[Any], height: Any, width: Any) -> tuple[Any, Any]:
    """Return height and width at a level, from those of the latents."""
    for (a, b, c), (d, e, f) in grid:
        height, width = (height * a + b) // c, (width * d + e) // f
    return height, width


@dataclass(frozen=True)
class PlaceDims:
    """Where a value has the places of a picture.

    `grid` gives height and width at its level. `dims` are the dimensions of these, or the one of tokens, row after row, which
    may have others, `text`, "before" or "after" these.
    """

    grid: Grid
    dims: tuple[int, ...]
    text: str = ""


NONE = PlaceDims((), (), "none")  # computed from the latents, and without places: a mean over them, text behind attention
LOST = PlaceDims((), (), "lost")  # computed from the latents, and where it has their places is not known

_known: WeakKeyDictionary[fx.Graph, tuple[Any, Mapping[str, PlaceDims]]] = WeakKeyDictionary()


def find_places(graph: fx.Graph, root: nn.Module, latents: str) -> Mapping[str, PlaceDims]:
    """Find where the values of a graph have the places of a picture.

    Args:
        graph: Of a traced module.
        root: That module.
        latents: The name of the node that is its input with the latents: (batch, channels, height, width), or tokens in rows
            (batch, tokens, channels).

    Returns:
        The places of each value that is computed from the latents, by the name of its node.
    """
    key = latents, len(graph.nodes)
    if (known := _known.get(graph)) is None or known[0] != key:
        _known[graph] = known = key, _PlaceSearch(graph, root, latents).found
    return known[1]


class _PlaceSearch:
    """A way over a graph from the latents on, which notes where each value has their places."""

    def __init__(self, graph: fx.Graph, root: nn.Module, latents: str) -> None:
        self.root = root
        start = next(node for node in graph.nodes if node.name == latents)
        shape = start.meta["shape"]
        self.packed = len(shape) == 3
        self.sides = (1, shape[1]) if self.packed else (shape[2], shape[3])
        self.found: dict[str, PlaceDims] = {latents: PlaceDims((), (1,) if self.packed else (2, 3))}
        for node in graph.nodes:
            if node.name == latents or not (given := self.find_inputs(node)):
                continue
            if may_write(node):
                self.write(node)
            if node.meta.get("shape") is not None and (made := self.of(node, given)) is not None:
                self.found[node.name] = self.checked(made, node.meta["shape"])

    def find_inputs(self, node: fx.Node) -> list[fx.Node]:
        """Return the values from the latents that a node is computed from, also by way of several in one."""
        found: list[fx.Node] = []
        for one in node.all_input_nodes:
            found += [one] if one.name in self.found else []
            if one.meta.get("shape") is None and node.target is operator.getitem:
                found += self.find_inputs(one)
        return found

    def write(self, node: fx.Node) -> None:
        """Note that nobody knows the places of a value that another one was written into, nor of what shares memory with it."""
        target: Any = node.kwargs.get("out") or (node.args[0] if node.args else None)
        others = {self.get(value) for value in node.all_input_nodes if value is not target} - {None, NONE}
        moves = get_name(node) in STRAY or "out" in node.kwargs
        if not others or not isinstance(target, fx.Node) or (not moves and self.get(target)):
            return  # such as x.add_(y)
        own = self.get(target)
        if get_name(node) == "setitem" and own is not None:
            value: Any = node.args[2]
            if self.get(value) == self.part(own, target.meta["shape"], node.args[1], value.meta["shape"]) != LOST:
                return
        while is_view(target):
            target = target.args[0]
        shared = [target]
        for one in shared:
            self.found[one.name] = LOST
            shared += [user for user in one.users if user.args[:1] == (one,) and is_view(user)]

    def get(self, node: Any) -> PlaceDims | None:
        return self.found.get(node.name) if isinstance(node, fx.Node) else None

    def sizes(self, grid: Grid) -> tuple[int, int]:
        height, width = apply_grid(grid, *self.sides)
        return height, width

    def checked(self, made: PlaceDims, shape: Sequence[int]) -> PlaceDims:
        """Return what was found, if the sizes are those of its level."""
        if made in (NONE, LOST):
            return made
        sizes, sides = tuple(shape[dim] for dim in made.dims), self.sizes(made.grid)
        if len(sizes) == 2:
            return made if sizes == sides else LOST
        return made if sizes[0] == math.prod(sides) or (made.text and sizes[0] > math.prod(sides)) else LOST

    def of(self, node: fx.Node, given: list[fx.Node]) -> PlaceDims | None:
        """Return the places of a node's result; None for one that no number of the latents is in."""
        shape = node.meta["shape"]
        name = get_name(node)
        if node.op == "get_attr" or name in MADE or not shape:
            return None if shape or name in MADE else NONE
        first: Any = node.args[0] if node.args else node.kwargs.get("input")
        if name == "getitem":
            return self.of_item(node, first)
        if name in ("cat", "concat", "concatenate"):
            return self.of_cat(node)
        if name == "baddbmm" and self.get(first) not in (None, NONE):
            return LOST  # what the product is added to
        if name in PRODUCTS:
            return self.of_product([value for value in node.args if isinstance(value, fx.Node)][-2:], shape)
        if name == "einsum":
            return self.of_einsum(node)
        if name == "scaled_dot_product_attention":
            return self.of_query(functions.bind_attention(node)["query"], shape)
        own = self.get(first)
        if name in LIKE and own is None:
            return None
        if own in (NONE, LOST) and (len(given) == 1 or name in LIKE):
            return own
        if name in STRAY or "fft" in name or not is_known(node, self.root):
            return LOST
        if own is None or own in (NONE, LOST):
            return self.of_operands(given, shape) if node.op == "call_module" or is_local(name) else LOST
        old = first.meta["shape"]
        if node.op == "call_module":
            return self.of_module(self.root.get_submodule(str(node.target)), own, old, given, shape)
        if name in MOVED:
            moved = find_order(node, len(old))
            return LOST if moved is None else replace(own, dims=tuple(moved.index(dim) for dim in own.dims))
        if name in (*RESHAPED, "view_as", "reshape_as"):
            return LOST if has_computed_one(node, shape) else self.reshaped(own, old, shape)
        if name in REDUCED:
            return self.reduced(node, own, old, shape)
        if name in ("view_as_complex", "view_as_real"):
            return own if len(shape) > own.dims[-1] + (name == "view_as_real") else LOST
        if name == "linear":
            return self.mixed(own, old, shape)
        if name in ("avg_pool2d", "max_pool2d"):
            return self.pooled(own, shape, *node.args[1:], **node.kwargs)
        if name in ("interpolate", "adaptive_avg_pool2d", "adaptive_max_pool2d", "pixel_shuffle", "pixel_unshuffle"):
            return self.resized(own, shape, name)
        if name == "pad":
            return self.padded(own, len(old), node.kwargs.get("pad", node.args[1] if len(node.args) > 1 else None))
        if name == "channel_shuffle":
            return LOST if 1 in own.dims else own
        return self.of_operands(given, shape) if is_local(name) else LOST

    def of_module(
        self, module: Any, own: PlaceDims, old: Sequence[int], given: list[fx.Node], shape: Sequence[int]
    ) -> PlaceDims:
        kinds = list_class_names(module)
        if "_ConvNd" in kinds:
            if "Conv2d" in kinds and own.dims == (2, 3):
                return self.convolved(module, own, old, shape)
            if "ConvTranspose2d" in kinds and module.kernel_size == module.stride and module.padding == (0, 0):
                return self.resized(own, shape)
            pointwise = "Conv1d" in kinds and module.kernel_size == module.stride == (1,) and own.dims == (2,)
            return own if pointwise and old[2] == shape[2] else LOST
        if "AvgPool2d" in kinds or "MaxPool2d" in kinds:
            return self.pooled(own, shape, module.kernel_size, module.stride, module.padding, ceil_mode=module.ceil_mode)
        for kind in ("Upsample", "AdaptiveAvgPool2d", "AdaptiveMaxPool2d", "PixelShuffle", "PixelUnshuffle"):
            if kind in kinds:
                return self.resized(own, shape, kind)
        if "Flatten" in kinds or "Unflatten" in kinds:
            return self.reshaped(own, old, shape)
        if "Embedding" in kinds:
            return own if list(shape[:-1]) == list(old) else LOST
        if any(kind in kinds for kind in ("Linear", "TransposedLinear", "Bilinear", "TransformerEncoderLayer")):
            return self.mixed(own, old, shape)
        if any("Pad" in kind for kind in kinds):
            return self.padded(own, len(old), module.padding)
        if {"Fold", "Unfold", "Prompt", "Drop"} & {*kinds} or ("ChannelShuffle" in kinds and 1 in own.dims):
            return LOST  # also where a pass has added tokens, whose number the sizes here do not have
        return self.of_operands(given, shape)

    # --- kinds of operations

    def of_operands(self, given: list[fx.Node], shape: Sequence[int]) -> PlaceDims:
        """Return the places of what is computed element by element: those of the operands that have its sizes there."""
        rows = {self.moved(self.found[n.name], n, shape) for n in given} - {NONE}
        known = rows - {LOST}
        return known.pop() if len(known) == 1 else LOST if rows else NONE

    def moved(self, own: PlaceDims, node: fx.Node, shape: Sequence[int]) -> PlaceDims:
        """Return the places of a result that has those of an operand, its dimensions counted from the last."""
        old = node.meta["shape"]
        more = len(shape) - len(old)
        kept = all(dim + more >= 0 and shape[dim + more] == old[dim] for dim in own.dims)
        return replace(own, dims=tuple(dim + more for dim in own.dims)) if kept else LOST

    def of_query(self, query: fx.Node, shape: Sequence[int]) -> PlaceDims:
        return self.moved(self.get(query) or NONE, query, shape)

    def mixed(self, own: PlaceDims, old: Sequence[int], shape: Sequence[int]) -> PlaceDims:
        """Return the places after a layer that mixes all of the last dimension."""
        return LOST if len(old) - 1 in own.dims or list(old[:-1]) != list(shape[:-1]) else own

    def reshaped(self, own: PlaceDims, old: Sequence[int], new: Sequence[int]) -> PlaceDims:
        """Return the places after a change of sizes that keeps the order of elements."""
        if math.prod(old) != math.prod(new):
            return LOST
        (height, width), behind = self.sizes(own.grid), [math.prod(old[dim + 1 :]) for dim in own.dims]
        spans = [(step, old[dim]) for step, dim in zip(behind, own.dims, strict=True)]  # step and number of what lies there
        if len(spans) == 2 and own.dims[1] == own.dims[0] + 1 and (whole := _find(new, behind[1], height * width)):
            return replace(own, dims=whole)
        if len(spans) == 1:
            if whole := _find(new, *spans[0]):
                return replace(own, dims=whole)
            if own.text or self.packed:
                return LOST
            spans = [(behind[0] * width, height), (behind[0], width)]
        steps, dims = [], []
        for step, count in spans:
            inside = [d for d, n in enumerate(new) if n > 1 and step <= math.prod(new[d + 1 :]) < step * count]
            last = math.prod(new[inside[-1] + 1 :]) if inside else 0
            if len(inside) not in (1, 2) or last != step or math.prod(new[d] for d in inside) != count:
                return LOST
            dims.append(inside[0])
            steps.append((1, 0, new[inside[-1]] if len(inside) == 2 else 1))  # places are patches then
        return self.stepped(replace(own, dims=tuple(dims)), steps)

    def stepped(self, own: PlaceDims, steps: Sequence[Step]) -> PlaceDims:
        return own if all(step == (1, 0, 1) for step in steps) else replace(own, grid=(*own.grid, (steps[0], steps[1])))

    def reduced(self, node: fx.Node, own: PlaceDims, old: Sequence[int], shape: Sequence[int]) -> PlaceDims:
        given: Any = next((a for a in node.args[1:] if isinstance(a, (int, tuple, list))), None)
        if (dims := node.kwargs.get("dim", node.kwargs.get("axis", given))) is None:
            return NONE
        gone = {dim % len(old) if isinstance(dim, int) else -1 for dim in (dims if isinstance(dims, (tuple, list)) else [dims])}
        if own.text or -1 in gone or (gone & {*own.dims} and not {*own.dims} <= gone):
            return LOST
        if gone & {*own.dims}:
            return NONE
        return own if len(shape) == len(old) else replace(own, dims=tuple(dim - sum(g < dim for g in gone) for dim in own.dims))

    def convolved(self, layer: Any, own: PlaceDims, old: Sequence[int], shape: Sequence[int]) -> PlaceDims:
        """Return the places after a convolution: its geometry makes the grid, or it pads as it likes (`same`)."""
        steps = []
        for dim in range(2):
            size, made, stride = old[2 + dim], shape[2 + dim], layer.stride[dim]
            span = layer.dilation[dim] * (layer.kernel_size[dim] - 1)
            padding = span if isinstance(layer.padding, str) else 2 * layer.padding[dim]
            adds = [padding - span - 1 + stride, stride - 1]
            add = next((add for add in adds if (size + add) // stride == made), None)
            if add is None:
                return LOST
            steps.append((1, 0, 1) if stride == 1 and add == 0 else (1, add, stride))
        return self.stepped(own, steps)

    def padded(self, own: PlaceDims, dims: int, amounts: Any) -> PlaceDims:
        """Return the places after padding, two amounts for each dimension from the last on: one that adds and takes away moves
        them."""
        if not isinstance(amounts, (list, tuple)):
            return LOST
        return LOST if any(any(amounts[2 * (dims - 1 - dim) :][:2]) for dim in own.dims) else own

    def pooled(self, own: PlaceDims, shape: Sequence[int], kernel_size: Any, stride: Any = None, padding: Any = 0, *more: Any,
               **named: Any) -> PlaceDims:  # fmt: skip
        given = kernel_size, kernel_size if stride is None or stride == [] else stride
        pairs = [(value, value) if isinstance(value, int) else value for value in given]
        known = all(isinstance(pair, (tuple, list)) and all(isinstance(n, int) for n in pair) for pair in pairs)
        if own.dims != (2, 3) or padding not in (0, (0, 0)) or not known or any(more) or named.get("ceil_mode"):
            return LOST
        return self.stepped(own, [(1, stride - kernel, stride) for kernel, stride in zip(*pairs, strict=True)])

    def resized(self, own: PlaceDims, shape: Sequence[int], name: str = "") -> PlaceDims:
        """Return the places after a picture was made larger: those of the last level with that size."""
        if own.dims != (2, 3) or len(shape) != 4:
            return LOST
        if name in ("pixel_unshuffle", "PixelUnshuffle"):
            return self.stepped(own, [(1, 0, size // new) for size, new in zip(self.sizes(own.grid), shape[2:], strict=True)])
        if tuple(shape[2:]) == (1, 1) != self.sizes(own.grid) and "adaptive" in name.lower():
            return NONE
        levels = [own.grid[:count] for count in range(len(own.grid), -1, -1)]
        return next((replace(own, grid=grid) for grid in levels if self.sizes(grid) == tuple(shape[2:])), LOST)

    def of_cat(self, node: fx.Node) -> PlaceDims:
        tensors: Any = node.args[0] if node.args else node.kwargs["tensors"]
        dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        rows = [self.get(one) for one in tensors]
        known = {row for row in rows if row is not None and row != NONE}
        if not known:
            return NONE
        first = known.pop()
        if known or first == LOST or not isinstance(dim, int):
            return LOST
        if dim % len(node.meta["shape"]) not in first.dims:
            return first if len(rows) == rows.count(first) or first in rows else LOST
        if rows.count(first) > 1 or first.text or len(first.dims) > 1 or first not in (rows[0], rows[-1]):
            return LOST
        return first if len(rows) == 1 else replace(first, text="after" if rows[0] == first else "before")

    def of_product(self, factors: Sequence[fx.Node], shape: Sequence[int]) -> PlaceDims:
        """Return the places of a product: those of the first factor's rows, or else of the second's columns."""
        if len(factors) < 2 or LOST in map(self.get, factors):
            return LOST
        placed = 0
        for factor, inner in zip(factors, (1, 2), strict=True):
            own = self.get(factor)
            if own is None or own == NONE:
                continue
            summed = len(factor.meta["shape"]) - inner
            if summed not in own.dims:
                return self.moved(own, factor, shape)
            if len(own.dims) > 1:
                return LOST
            placed += 1
        return LOST if placed == 1 else NONE  # a matrix that knows of no places mixes them

    def of_einsum(self, node: fx.Node) -> PlaceDims:
        equation, factors = node.args[0], [value for value in node.args[1:] if isinstance(value, fx.Node)]
        if not isinstance(equation, str) or "." in equation or "->" not in equation or not factors:
            return LOST
        left, right = equation.replace(" ", "").split("->")
        for letters, factor in zip(left.split(","), factors, strict=False):
            own = self.get(factor)
            kept = [letters[dim] in right for dim in own.dims] if own not in (None, LOST) else []
            if own == LOST or any(kept) != all(kept):
                return LOST
            if own is not None and kept and all(kept):
                return replace(own, dims=tuple(right.index(letters[dim]) for dim in own.dims))
        return NONE

    def of_item(self, node: fx.Node, first: Any) -> PlaceDims | None:
        """Return the places of a part of a value, or of one of several values."""
        if first.meta.get("shape") is None:
            return self.of_member(node, first)
        own = self.get(first)
        if own is None:
            return LOST  # at indices that are computed from the latents
        return self.part(own, first.meta["shape"], node.args[1], node.meta["shape"])

    def part(self, own: PlaceDims, old: Sequence[int], index: Any, shape: Sequence[int]) -> PlaceDims:
        """Return the places of a part of a value, by its indices and its shape."""
        if own in (NONE, LOST):
            return own
        items: Any = index if isinstance(index, (tuple, list)) else (index,)
        if any(isinstance(item, list) or (isinstance(item, fx.Node) and "shape" in item.meta) for item in items):
            return LOST
        wide = len(old) - sum(item is not None and item is not Ellipsis for item in items)
        at = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
        items = (*items[:at], *[slice(None)] * wide, *items[at + 1 :])
        dims: dict[int, int] = {}
        here = there = 0
        for item in items:
            if item is None:
                there += 1
                continue
            if here in own.dims and item != slice(None):
                if not isinstance(item, slice) or item.step not in (None, 1) or len(own.dims) > 1:
                    return LOST if own.text != "before" or item != 0 else NONE  # a token of a class stands first
                begin, end = item.start in (None, 0), item.stop is None
                own = self.cut(own, old[here], shape[there], begin, end)
            if isinstance(item, slice):
                dims[here], there = there, there + 1
            here += 1
        return replace(own, dims=tuple(dims[dim] for dim in own.dims))

    def cut(self, own: PlaceDims, whole: int, part: int, begin: bool, end: bool) -> PlaceDims:
        """Return the places of a part of tokens, from their `begin` or up to their `end`."""
        count = math.prod(self.sizes(own.grid))
        if part == whole:
            return own
        if not own.text or begin == end:
            return LOST
        if end == (own.text == "before"):
            return replace(own, text="") if part == count else LOST
        return NONE if part == whole - count else LOST

    def of_member(self, node: fx.Node, source: fx.Node) -> PlaceDims | None:
        value: Any = source.args[0] if source.args else None
        if not isinstance(value, fx.Node) or not isinstance(index := node.args[1], int):
            return LOST
        own, old, shape, name = self.get(value), value.meta.get("shape"), node.meta["shape"], get_name(source)
        if source.op == "call_module" and "MultiheadAttention" in list_class_names(self.root.get_submodule(str(source.target))):
            return self.of_query(value, shape) if index == 0 else LOST
        if name not in (*PARTED, "unbind") or old is None:
            return LOST
        if own is None or own in (NONE, LOST):
            return own  # of sizes alone
        at = 1 + (name != "unbind")
        dim: Any = source.kwargs.get("dim", source.args[at] if len(source.args) > at else 0)
        if not isinstance(dim, int):
            return LOST
        dim %= len(old)
        if name == "unbind":
            return LOST if dim in own.dims else replace(own, dims=tuple(d - (d > dim) for d in own.dims))
        if dim not in own.dims:
            return own
        rest = [user.meta["shape"][dim] for user in source.users if user is not node and "shape" in user.meta]
        two = index in (0, 1) and all(size + shape[dim] == old[dim] for size in rest)
        return self.cut(own, old[dim], shape[dim], index == 0, index == 1) if two and len(own.dims) == 1 else LOST


def _find(shape: Sequence[int], step: int, count: int) -> tuple[int, ...]:
    """Return the one dimension of that many entries, which are so many elements apart; () for none, or one entry."""
    return tuple(d for d, n in enumerate(shape) if n == count > 1 and math.prod(shape[d + 1 :]) == step)[:1]
