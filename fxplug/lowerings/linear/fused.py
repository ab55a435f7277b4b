"""The fuse lowering: linear layers, each with its low-rank update or its bank of them, as one product."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...core.ir.graph import Graph, change
from ...core.ir.traced_module import TracedModule, check_traced, copied_graphs, shell
from . import forms, measurement, operators
from .layers import WEIGHTS, Layer, call_instead, linear_layers


def fuse(gm: TracedModule, how: str = "auto", *, dtype: torch.dtype | None = None) -> TracedModule:
    """Join each `nn.Linear` and the `Lora` behind it in one function, for faster steps and calls; `gm` stays as it is.

    Graph and module tree are copied, parameters are shared, so what it trains is trained in `gm`: save and export that one.
    Results and gradients are those of `gm` but for rounding. Second derivatives of the layers are not there. A layer with a
    hook, of a derived class, or a `Lora` with dropout, a bias, or behind another block, stays as it is.

    `how` is a form of `forms.FORMS` for all layers, or `auto`: for each layer the form that is fastest on this device for the
    rows of the trace, and `stock`, which leaves it as it is, where none is clearly faster. What was not measured before
    (`measurement.tune`) is measured now, see `measurement.settle`: without gradients and with them, each of which may take
    another form; in `dtype`, that of the weights if None, as autocast may have another.
    `meta["forms"]` says which form each layer with an update has, and its time over that of `stock`. Raises SpecError for
    what is no traced module, and an unknown form.
    """
    check_traced(gm, "fuse")
    form = forms.form_named(how)
    tree, graphs, chosen = shell(gm), copied_graphs(gm), dict(gm.meta.get("forms", {}))
    settled: dict[torch.device, Any] = {}
    if form == "auto":
        each = (measurement.case_of(tree, *row, dtype) for graph in graphs.values() for row in linear_layers(graph, tree))
        settled = measurement.settle({case for case in each if case is not None})
    for graph in graphs.values():
        for node, layer in linear_layers(graph, tree):
            taken = text = form
            if form == "auto":
                case = measurement.case_of(tree, node, layer, dtype)
                taken, text = ("stock", "stock") if case is None else measurement.chosen(settled[case[0]], case[1])
            if layer is not None and layer.lora is not None:
                _fuse_layer(graph, tree, layer, taken)
                chosen[str(node.target)] = text
            elif "fused" in taken.split(","):
                more = (taken,) if "," in taken else ()
                if layer is None:
                    change(node, target=operators.linear, kwargs={**node.kwargs, **({"form": taken} if more else {})})
                else:
                    call_instead(graph, tree, node, node, operators.linear, [], *more)
        graph.lint()
    return gm.derived(tree, graphs, **({"forms": chosen} if chosen else {}))


def _fuse_layer(graph: Graph, tree: nn.Module, layer: Layer, form: str) -> None:
    lora, block = layer.lora, layer.block
    assert lora is not None
    if form != "stock":
        function, last = forms.function(form, bool(block.slots))
        if block.slots:
            last = (lora.args[2], block.slots, block.batch_dim, *last)
        call_instead(graph, tree, lora, layer.node, function, WEIGHTS if block.slots else [*WEIGHTS, "scale"], *last)
