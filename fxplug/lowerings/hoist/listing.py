"""What was hoisted, as a table: stages, operations, weights, floating-point operations, and bytes that are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from ...core.errors import format_fields
from ...core.ir.functions import bind_attention, get_short_name
from ...core.torch_internals.modules import ConvNd
from .cut import StageCut
from .kept import KeptValues
from .stamps import Place

PRODUCTS = {"matmul", "bmm", "mm", "addmm", "baddbmm"}  # of two values, by their last arguments


@dataclass(frozen=True)
class StageRow:
    """One stage: operations that compute tensors, parameters that no later stage reads, FLOPs, the shares of these, and bytes.

    `result_bytes` are those that its values take for one set of what they need, at the sizes of the trace; `kept_bytes` are
    kept now.
    """

    name: str
    operations: int
    weights: int
    weight_share: float
    flops: int
    flop_share: float
    result_bytes: int
    kept_bytes: int

    __repr__ = format_fields


def list_stages(cut: StageCut, places: Mapping[str, Sequence[Place]], kept: KeptValues) -> list[StageRow]:
    """List the stages of a cut. A parameter is of the last stage that reads it; FLOPs are at the sizes of the trace."""
    last: dict[int, str] = {}
    sizes = {id(p): p.numel() for p in cut.root.parameters()}
    for stage in cut.stages:
        for table, key in places[stage.name]:
            if id(table.get(key)) in sizes:
                last[id(table[key])] = stage.name
    flops = {stage.name: sum(count_flops(node, cut.root) for node in stage.own) for stage in cut.stages}
    total, every = max(sum(sizes.values()), 1), max(sum(flops.values()), 1)
    rows = []
    for stage in cut.stages:
        own = sum(sizes[key] for key, name in last.items() if name == stage.name)
        numbers = (cut.count_operations(stage), own, own / total, flops[stage.name], flops[stage.name] / every)
        rows.append(StageRow(stage.name, *numbers, cut.count_result_bytes(stage), kept.count_bytes(stage.name)))
    return rows


def make_cells(rows: Sequence[StageRow]) -> list[tuple[str, ...]]:
    """Make the texts of a table of stages, its head first."""
    head = ("stage", "operations", "parameters", "share", "FLOPs", "share", "bytes a set", "bytes kept")
    cells = [
        (r.name, f"{r.operations:,}", f"{r.weights:,}", f"{r.weight_share:.1%}", f"{r.flops:,}", f"{r.flop_share:.2%}",
         f"{r.result_bytes:,}", f"{r.kept_bytes:,}")
        for r in rows
    ]  # fmt: skip
    return [head, *cells]


def format_stages(rows: Sequence[StageRow]) -> str:
    """Format the rows of a table of stages."""
    cells = make_cells(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for first, *rest in cells:
        lines.append("  ".join([first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(rest, widths[1:], strict=True))]).rstrip())
    return "\n".join(lines) + "\n"


def count_flops(node: fx.Node, root: nn.Module) -> int:
    """Count the floating-point operations of products, convolutions and attention, 2 for each multiplication, as traced."""
    if "shape" not in node.meta:
        return 0
    out = math.prod(node.meta["shape"])
    shapes: list[Any] = [given.meta.get("shape", ()) for given in node.all_input_nodes]
    if node.op == "call_module":
        layer = root.get_submodule(str(node.target))
        weight = getattr(layer, "weight", None)
        if isinstance(layer, (nn.Linear, ConvNd)) and isinstance(weight, torch.Tensor):
            return int(2 * out * math.prod(weight.shape[1:]))
        factors = [p for p in layer.parameters() if p.dim() == 2] if type(layer).__module__.startswith("fxplug.blocks.") else []
        rows = out // max(node.meta["shape"][-1], 1) if node.meta["shape"] else 0
        return int(2 * rows * sum(p.numel() for p in factors))
    name = get_short_name(node.target)
    if name == "scaled_dot_product_attention":
        query, key = (bind_attention(node)[which].meta["shape"] for which in ("query", "key"))
        return int(2 * math.prod(query) * key[-2] + 2 * out * key[-2])
    if len(shapes) > 1 and (node.target is F.linear or "linear" in name):
        return int(2 * out * math.prod(shapes[1][1:]))
    if name in PRODUCTS and len(shapes) > 1:
        return int(2 * out * shapes[-2][-1]) if shapes[-2] else 0
    return 0
