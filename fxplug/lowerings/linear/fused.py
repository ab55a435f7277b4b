"""The fuse lowering: linear layers, each with its low-rank update or its bank of them, as one product."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from ...blocks.loha import Loha
from ...blocks.lokr import Lokr
from ...ir.editing import change, insert, replace
from ...ir.graph import Graph
from ...ir.traced_module import TracedModule
from ...torch_internals.graphs import is_erased
from . import forms, measuring, operators
from .forms import Case
from .layers import WEIGHTS, Layer, argument, call_instead, called, check_traced, layer_at, lowered, uniform


def fuse(gm: TracedModule, how: str = "auto", *, dtype: torch.dtype | None = None) -> TracedModule:
    """The same module whose linear layers, and `Lora`s behind them, are the functions of `operators`: faster steps and calls.

    Graph and module tree are copied, parameters are shared, so what it trains is trained in `gm`: save and export that one.
    Results and gradients are those of `gm` but for rounding. Second derivatives of the layers are not there. A layer with a
    hook, of a derived class, or a `Lora` with dropout, a bias, or behind another block, stays as it is.

    `how` is a form of `forms.FORMS` for all layers, or `auto`: for each layer the form that is fastest on this device for the
    rows of the trace, and `stock`, which leaves it as it is, where none is clearly faster. What was not measured before
    (`measuring.tune`) is measured now, see `measuring.settle`: in eager and in compiled code, without gradients and with them,
    each of which may take another form; in `dtype`, that of the weights if None, as autocast may have another. With a kernel as
    form, `Loha` and `Lokr` make their weights by kernels too. `meta["forms"]` says which form each layer with an update has,
    and its time over that of `stock`. Raises SpecError for what is no traced module, and an unknown form.
    """
    check_traced(gm, "fuse")
    forms.check(how)
    if how != "auto":
        return lowered(gm, lambda graph, tree: _fuse(graph, tree, lambda node, layer: (how, how)))
    cases = (case_of(gm, node, layer, dtype) for graph in gm.graphs.values() for node, layer in _linear(graph, gm))
    settled = measuring.settle({found for found in cases if found is not None})

    def choice(tree: nn.Module, node: fx.Node, layer: Layer | None) -> tuple[str, str]:
        found = case_of(tree, node, layer, dtype)
        return ("stock", "stock") if found is None else measuring.chosen(settled[found[0]], found[1])

    return lowered(gm, lambda graph, tree: _fuse(graph, tree, lambda node, layer: choice(tree, node, layer)))


def _linear(graph: fx.Graph, tree: nn.Module) -> Iterator[tuple[fx.Node, Layer | None]]:
    """The linear layers of a graph, and its calls of F.linear, without a layer; the graph may change meanwhile."""
    for node in list(graph.nodes):
        layer = None if is_erased(node) else layer_at(tree, node, (nn.Linear,))
        if layer is not None or (not is_erased(node) and node.target is F.linear):
            yield node, layer


def case_of(
    tree: nn.Module, node: fx.Node, layer: Layer | None, dtype: torch.dtype | None = None
) -> tuple[torch.device, Case] | None:
    """The device and the case of a linear layer, with the `Lora` behind it, for the rows of the trace; None if not known."""
    read = argument(node, 1, "weight") if layer is None else None
    if isinstance(read, fx.Node) and read.op == "get_attr":
        owner, _, name = str(read.target).rpartition(".")
        weight = getattr(tree.get_submodule(owner), name)
    else:
        weight = None if layer is None else layer.module.weight
    shape, block = node.meta.get("shape"), None if layer is None else layer.block
    if not shape or type(weight) not in (torch.Tensor, nn.Parameter) or weight.dim() != 2:
        return None
    named = str(dtype or weight.dtype).removeprefix("torch.")
    outer, inner = weight.shape
    rank, slots = (0, 0) if block is None else (block.rank, block.slots)
    return weight.device, Case(named, int(math.prod(shape[:-1])), inner, outer, rank, slots)


def _fuse(graph: Graph, tree: nn.Module, choice: Callable[[fx.Node, Layer | None], tuple[str, str]]) -> dict[str, str]:
    chosen = {}
    for node, layer in _linear(graph, tree):
        form, text = choice(node, layer)
        if layer is not None and layer.lora is not None:
            taken = _fuse_layer(graph, tree, layer, form)
            chosen[str(node.target)] = text if taken == form else taken
        elif "fused" in form.split(",") or form == "remerge" or form in forms.KERNELS:
            more = (form,) if "," in form else ()
            if layer is None:
                change(node, target=operators.linear, kwargs={**node.kwargs, **({"form": form} if more else {})})
            else:
                call_instead(graph, tree, node, node, operators.linear, [], *more)
    for node in list(graph.nodes):
        form, _ = choice(node, None) if called(tree, node, (Loha, Lokr)) is not None else ("", "")
        path = _fuse_weight(graph, tree, node, form) if form in forms.KERNELS else None
        if path is not None:
            chosen[path] = form
    return chosen


def _fuse_layer(graph: Graph, tree: nn.Module, layer: Layer, form: str) -> str:
    lora, block = layer.lora, layer.block
    assert lora is not None
    form = forms.available(form, layer.module.weight.device)
    if form == "remerge" or (form == "remerge:blas" and block.slots):
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
