"""The fuse lowering: linear layers, each with its low-rank update or its bank of them, as one product."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from ...blocks.loha import Loha
from ...blocks.lokr import Lokr
from ...ir.editing import change, insert, replace
from ...ir.traced_module import Graph, TracedModule
from ...torch_internals.graphs import is_erased
from . import forms, operators
from .layers import WEIGHTS, Layer, call_instead, called, check_traced, layer_at, lowered, uniform


def fuse(gm: TracedModule, how: str = "auto") -> TracedModule:
    """The same module whose linear layers, and `Lora`s behind them, are the functions of `operators`: faster steps and calls.

    Graph and module tree are copied, parameters are shared, so what it trains is trained in `gm`: save and export that one.
    Results and gradients are those of `gm` but for rounding. Second derivatives of the layers are not there. A layer with a
    hook, of a derived class, or a `Lora` with dropout, a bias, or behind another block, stays as it is. `how` is a form of
    `forms.FORMS` for all layers, or `auto`: for each the one that was measured fastest (`measuring.tune`) for the rows of the
    trace, else `fused`. With a kernel as form, `Loha` and `Lokr` make their weights by kernels too. `meta["forms"]` says which
    form each layer with an update has. Raises SpecError for what is no traced module, and an unknown form.
    """
    check_traced(gm, "fuse")
    forms.check(how)
    return lowered(gm, lambda graph, tree: _fuse(graph, tree, how))


def _fuse(graph: Graph, tree: nn.Module, how: str) -> dict[str, str]:
    chosen = {}
    for node in list(graph.nodes):
        if is_erased(node):
            continue
        if node.op == "call_function" and node.target is F.linear:
            change(node, target=operators.linear)
        layer = layer_at(tree, node, (nn.Linear,))
        if layer is None:
            path = _fuse_weight(graph, tree, node, how) if how in forms.KERNELS else None
            if path is not None:
                chosen[path] = how
        elif layer.lora is None:
            call_instead(graph, tree, node, node, operators.linear, [])
        else:
            chosen[str(node.target)] = _fuse_layer(graph, tree, layer, how)
    return chosen


def _fuse_layer(graph: Graph, tree: nn.Module, layer: Layer, form: str) -> str:
    lora, block, device = layer.lora, layer.block, layer.module.weight.device
    assert lora is not None
    if form == "auto":
        form = forms.choose(device, forms.case_of(layer.module, block, forms.rows_of(layer.node)))
    form = forms.available(form, device)
    if form == "remerge":
        remerge_linear(graph, tree, layer)
    elif form != "stock":
        function, last = forms.function(form, bool(block.slots))
        if block.slots:
            last = (lora.args[2], block.slots, block.batch_dim, *last)
        call_instead(graph, tree, lora, layer.node, function, WEIGHTS if block.slots else [*WEIGHTS, "scale"], *last)
    return form


def _fuse_weight(graph: Graph, tree: nn.Module, node: fx.Node, form: str) -> str | None:
    """Put a kernel in the place of a block that makes a weight; the path of its layer, or None where that cannot be."""
    block = called(tree, node, (Loha, Lokr))
    value = node.args[0] if block is not None else None
    cores = block is not None and (block.cores if isinstance(block, Loha) else block.core)
    if not isinstance(value, fx.Node) or value.op != "get_attr" or cores:
        return None
    device = next(iter(block.parameters())).device
    if forms.available(form, device) not in forms.KERNELS:
        return None
    around = {"nn_module_stack": node.meta.get("nn_module_stack", {})}

    def read(name: str) -> fx.Node:
        return insert(graph, "get_attr", f"{node.target}.{name}", before=node, meta=around)

    def factor(name: str, split: bool) -> fx.Node:
        if not split:
            return read(name)
        return insert(graph, "call_function", torch.matmul, (read(f"{name}_a"), read(f"{name}_b")), before=node, meta=around)

    gates = node.args[1] if block.slots else read("scale")
    function: Any = operators.loha_weight if isinstance(block, Loha) else operators.lokr_weight
    if isinstance(block, Loha):
        parts = [read(name) for name in ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")]
    else:
        parts = [factor("lokr_w1", block.split_1), factor("lokr_w2", block.split_2)]
    args = (value, *parts, gates)
    replace(node, insert(graph, "call_function", function, args, before=node, meta={**around, **node.meta}))
    return str(value.target).rpartition(".")[0]


def remerge_linear(graph: Graph, tree: nn.Module, layer: Layer) -> None:
    """Put `operators.remerged_linear` in the place of a linear layer and its `Lora`."""
    lora, block = layer.lora, layer.block
    assert lora is not None
    if block.slots:
        call_instead(graph, tree, lora, layer.node, operators.remerged_linear, WEIGHTS, uniform(graph, lora))
    else:
        call_instead(graph, tree, lora, layer.node, operators.remerged_linear, [*WEIGHTS, "scale"])
