"""A split over time: one graph runs on one patch of the tokens after the other, with what the others gave before.

The places where tokens meet are those of a plan for processes. Here a value that must be whole is put together from the patch
at hand and from an input, `kept`, with what the other patches gave when they ran last: stale keys and values, as in PipeFusion
(Fang et al. 2024, arXiv 2405.14430) and DistriFusion (Li et al. 2024, arXiv 2402.19481). In one patch everything is fresh.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ...core.errors import GuardError, SpecError
from ...core.ir import ops
from ...core.ir.functions import bind_attention
from ...core.ir.graph import copy_graph, insert, replace
from ...core.rewriter.graft import find_last_input
from ..planning.sharding_plan import ShardingPlan
from ..runtime import layouts
from ..runtime.collectives import AllReduce, Broadcast, Collective, Gather, GlobalSize, Numel, Split, count_times, take_part
from ..runtime.mesh import SEQUENCE
from ..writing import PlanWriter

# --- what the graph calls; `patch` of `patches` is at hand


def take_patch(x: Tensor, patch: int, patches: int, dim: int, inner: int, born: bool, *sizes: int) -> Tensor:
    """Return a patch of a tensor, given the whole sizes of the streams in a dimension. Raises GuardError for too few tokens."""
    if patches == 1:
        return x
    for size in sizes:
        if born and size < patches:
            raise GuardError(f"{size} tokens (dimension {dim} of {tuple(x.shape)}) cannot be split into {patches} patches")
    return take_part(x, dim, inner, sizes, patch, patches)


def put_patch(x: Tensor, kept: Tensor | None, patch: int, patches: int, dim: int, inner: int, *sizes: int) -> Tensor:
    """Return a whole tensor: this patch's part, and the cached values of the others."""
    return x if patches == 1 or kept is None else update_cache(kept.clone(), x, patch, patches, dim, inner, sizes)


def add_patch(x: Tensor, kept: Tensor | None, patch: int, patches: int) -> Tensor:
    """Return a sum over the patches. `kept` has the last sum of a step in one piece, and each patch's summand: NaN before its
    first. `kept` has the last sum of a step in one piece, and each patch's summand: NaN before its first.

    Until all summands are known the sum is that of the step in one piece.
    """
    if patches == 1 or kept is None:
        return x
    now = torch.cat([kept[1 : patch + 1], x[None], kept[patch + 2 :]])
    return torch.where(kept[1:].isnan().any(), kept[0], now.sum(0))


def global_size(x: Tensor, patch: int, patches: int, dim: int, *sizes: int) -> int:
    """Return the whole size of a dimension that is split in a patch."""
    return layouts.compute_global_size(x, dim, sizes, patch, patches)


def numel(x: Tensor, patch: int, patches: int, dim: int, *sizes: int) -> int:
    """Return the whole number of elements of a tensor that is split in a patch."""
    return x.numel() // x.shape[dim] * global_size(x, patch, patches, dim, *sizes)


def compute_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    options: dict[str, Any],
    patch: int,
    patches: int,
    *sizes: int,
) -> Tensor:
    """Compute `scaled_dot_product_attention` of a patch's queries; all else is whole. `sizes` are those of the queries'
    streams."""
    if patches > 1 and (causal or (mask is not None and mask.dim() > 1 and mask.shape[-2] > 1)):
        at = layouts.list_positions(sizes, [patch], patches, query.device)
        mask = torch.arange(key.shape[-2], device=query.device) <= at[:, None] if mask is None else mask.index_select(-2, at)
        causal = False
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, **options)


def update_cache(
    kept: Tensor | None, value: Tensor, patch: int, patches: int, dim: int, inner: int, sizes: Sequence[int]
) -> Tensor:
    """Return the cache after a patch computed `value`: the same memory, updated in place."""
    if inner == 0:
        assert kept is not None
        kept[patch + 1] = value
        return kept
    if patches == 1 or kept is None:
        return value.detach().clone(memory_format=torch.contiguous_format)
    total, spans = sum(sizes) * inner, layouts.list_spans(sizes, patch, patches, inner)
    y = torch.unflatten(kept, dim, (count_times(kept, dim, total), total))
    mine = torch.split(torch.unflatten(value, dim, (y.shape[dim], -1)), [length for _, length in spans], dim + 1)
    for (first, length), own in zip(spans, mine, strict=True):
        y.narrow(dim + 1, first, length).copy_(own)
    return kept


def start_sum(total: Tensor, patches: int) -> Tensor:
    """Return the cache of a sum after a step in one piece."""
    found = total.new_full((patches + 1, *total.shape), torch.nan)
    found[0] = total
    return found


# --- writing


class PatchValue(NamedTuple):
    """A value that is put together: the node, what this patch gives to it, where it lies; a sum has no tokens, `inner` is 0."""

    node: fx.Node
    value: fx.Node
    given: fx.Node  # the input with what is kept
    dim: int
    inner: int
    sizes: tuple[fx.Node, ...]


class Patcher(PlanWriter):
    """Writes a plan for processes into a copied graph as one over time; inputs are added: patch, patches, and what is kept.

    `kept` has a row for each of the latter; `origin` is the node of the plan that a new one computes for.
    """

    def __init__(self, found: ShardingPlan) -> None:
        super().__init__(copy_graph(found.walk.graph), nn.Module(), found, "pipefusion", {}, SEQUENCE)
        self.kept: list[PatchValue] = []
        self.origin: dict[fx.Node, fx.Node] = {self.twin[node.name]: node for node in found.walk.graph.nodes}
        self.arguments = [node for node in self.graph.nodes if node.op == "placeholder"]
        self.patches = self.input("patches")
        self.patch = self.input("patch")

    def run(self) -> None:
        """Write the whole plan into the graph without edges, and collect the cached values."""
        super().run()
        for node in list(self.graph.nodes):
            if node.target is ops.edge and isinstance(node.args[0], fx.Node):
                replace(node, node.args[0])
        for node in self.graph.nodes:
            given: Any = node.args
            if node.target is put_patch:
                self.kept.append(PatchValue(node, given[0], given[1], given[4], given[5], tuple(given[6:])))
            elif node.target is add_patch:
                self.kept.append(PatchValue(node, given[0], given[1], 0, 0, ()))

    def input(self, name: str) -> fx.Node:
        """Insert a new input of the graph, after the existing ones."""
        return insert(self.graph, "placeholder", f"pipefusion_{name}", after=find_last_input(self.graph))

    def call(
        self,
        kind: type[Collective],
        settings: tuple[Any, ...],
        value: Any,
        streams: tuple[int, ...],
        like: Any = None,
        **where: Any,
    ) -> fx.Node:
        """Insert a call of a collective's counterpart over time."""
        if kind is Broadcast:
            raise SpecError(
                f"'{value.name}' draws random numbers, which would differ from patch to patch: use the model in evaluation mode"
            )
        sizes = [self.size(stream) for stream in streams]
        given = [self.input("kept")] if kind in (Gather, AllReduce) else []
        dim, inner, born = (settings[1:] + (0, 1, False)[len(settings) - 1 :])
        more: tuple[Any, ...] = {Split: (dim, inner, born), Gather: (dim, inner), AllReduce: ()}.get(kind, (dim,))
        functions: Any = {Split: take_patch, Gather: put_patch, AllReduce: add_patch, GlobalSize: global_size, Numel: numel}
        function = functions[kind]
        args = (value, *given, self.patch, self.patches, *more, *sizes)
        node = insert(self.graph, "call_function", function, args, after=where.get("after"), before=where.get("before"))
        if value in self.origin:
            self.origin[node] = self.origin[value]
        return self.marked(node, value, kind.__name__)

    def attention(self, node: fx.Node, twin: fx.Node, table: Any) -> None:
        """Replace a node by attention of a patch, over the cached keys and values of all."""
        given = bind_attention(node)
        query = self.found.place(given["query"])
        assert query is not None
        values = [self.node(given["query"]), *(self.gathered(given[name], twin) for name in ("key", "value"))]
        mask = self.node(given["attn_mask"]) if isinstance(given["attn_mask"], fx.Node) else given["attn_mask"]
        options = {k: self.node(v) if isinstance(v, fx.Node) else v for k, v in given.items() if k in ("scale", "enable_gqa")}
        sizes = tuple(self.size(stream) for stream in query.layout.streams)
        args = (*values, table.get(mask, mask), given["is_causal"], options, self.patch, self.patches, *sizes)
        new = self.marked(insert(self.graph, "call_function", compute_attention, args, before=twin), twin, "Attention")
        replace(twin, new)
        self.now[twin], self.origin[new] = new, node
