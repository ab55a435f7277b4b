"""The fuse lowering: linear layers, each with its low-rank update or its bank of them, as one product."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import fx, nn

from ...core.ir.graph import Graph, change
from ...core.ir.traced_module import TracedModule
from ...core.torch_internals.modules import is_erased
from . import forms, measurement, operators
from .layers import WEIGHTS, Layer, call_instead, check_traced, layer_at, lowered


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
    if form != "auto":
        return lowered(gm, lambda graph, tree: _fuse(graph, tree, lambda node, layer: (form, form)))
    cases = (measurement.case_of(gm, node, layer, dtype) for graph in gm.graphs.values() for node, layer in _linear(graph, gm))
    settled = measurement.settle({found for found in cases if found is not None})

    def choice(tree: nn.Module, node: fx.Node, layer: Layer | None) -> tuple[str, str]:
        found = measurement.case_of(tree, node, layer, dtype)
        return ("stock", "stock") if found is None else measurement.chosen(settled[found[0]], found[1])

    return lowered(gm, lambda graph, tree: _fuse(graph, tree, lambda node, layer: choice(tree, node, layer)))


def _linear(graph: fx.Graph, tree: nn.Module) -> Iterator[tuple[fx.Node, Layer | None]]:
    """The linear layers of a graph, and its calls of F.linear, without a layer; the graph may change meanwhile."""
    for node in list(graph.nodes):
        layer = None if is_erased(node) else layer_at(tree, node, (nn.Linear,))
        if layer is not None or (not is_erased(node) and node.target is F.linear):
            yield node, layer


def _fuse(graph: Graph, tree: nn.Module, choice: Callable[[fx.Node, Layer | None], tuple[str, str]]) -> dict[str, str]:
    chosen = {}
    for node, layer in _linear(graph, tree):
        form, text = choice(node, layer)
        if layer is not None and layer.lora is not None:
            _fuse_layer(graph, tree, layer, form)
            chosen[str(node.target)] = text
        elif "fused" in form.split(","):
            more = (form,) if "," in form else ()
            if layer is None:
                change(node, target=operators.linear, kwargs={**node.kwargs, **({"form": form} if more else {})})
            else:
                call_instead(graph, tree, node, node, operators.linear, [], *more)
    return chosen


def _fuse_layer(graph: Graph, tree: nn.Module, layer: Layer, form: str) -> None:
    lora, block = layer.lora, layer.block
    assert lora is not None
    if form != "stock":
        function, last = forms.function(form, bool(block.slots))
        if block.slots:
            last = (lora.args[2], block.slots, block.batch_dim, *last)
        call_instead(graph, tree, lora, layer.node, function, WEIGHTS if block.slots else [*WEIGHTS, "scale"], *last)
