"""The remerge lowering: low-rank updates added to the weights at each call, where many rows make that the cheaper way."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn

from ...ir.graph import Graph
from ...ir.traced_module import TracedModule
from ...low_rank import grouped_product, spread
from ..linear.fused import remerge_linear
from ..linear.layers import WEIGHTS, Layer, call_instead, check_traced, layers, lowered, uniform
from ..linear.library import pays
from ..linear.operators import remerged, trains

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
GEOMETRY = ("stride", "padding", "dilation", "groups")


def remerge(gm: TracedModule, everywhere: bool = False) -> TracedModule:
    """The same module whose linear layers and convolutions have the updates of the `Lora`s behind them in their weights.

    The weights are made anew at each call, as `low_rank.added` says, so training, switching and scaling stay what they were;
    the gradient of a linear layer's update costs no full-size one. Where slots are taken, all samples of a batch take the
    same: others are an error on a CPU and NaN on a GPU. It pays where a layer sees many rows: by `library.pays`, for the
    shapes of the trace, and `everywhere` if asked. What `fused.fuse` leaves alone stays, and a convolution with
    another padding than zeros. Graph and module tree are copied, parameters shared. Raises SpecError for what is no traced
    module.
    """
    check_traced(gm, "remerge")
    return lowered(gm, lambda graph, tree: _remerge(graph, tree, everywhere))


def _remerge(graph: Graph, tree: nn.Module, everywhere: bool) -> dict[str, str]:
    chosen = {}
    for layer in layers(graph, tree, (nn.Linear, *CONVOLUTIONS)):
        if layer.lora is None or not (everywhere or _pays(layer)):
            continue
        path = str(layer.node.target)
        if isinstance(layer.module, nn.Linear):
            remerge_linear(graph, tree, layer)
        elif not _remerge_conv(graph, tree, layer):
            continue
        chosen[path] = "remerge"
    return chosen


def _pays(layer: Layer) -> bool:
    """Whether the shapes of the trace make a new weight the cheaper way; True where they are not known."""
    shape = layer.node.meta.get("shape")
    if not shape:
        return True
    channels_last = isinstance(layer.module, nn.Linear)
    rows = math.prod(shape[:-1]) if channels_last else math.prod(shape) // layer.module.out_channels
    return pays(int(rows), layer.module.weight.flatten(1))


def _remerge_conv(graph: Graph, tree: nn.Module, layer: Layer) -> bool:
    module, block, lora = layer.module, layer.block, layer.lora
    slotted_groups = block.slots and module.groups > 1
    if block.same_padding or module.padding_mode != "zeros" or slotted_groups or lora is None:
        return False
    options = [getattr(module, name) for name in GEOMETRY]
    if block.slots:
        call_instead(graph, tree, lora, layer.node, convolution, WEIGHTS, uniform(graph, lora), *options)
    else:
        call_instead(graph, tree, lora, layer.node, convolution, [*WEIGHTS, "scale"], *options)
    return True


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    gates: Tensor,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
) -> Tensor:
    """A convolution of 1, 2 or 3 dimensions whose weight (out, in / groups, *kernel) gets an update first.

    down is (groups * rank, in / groups, *kernel), up (out, rank, *1); `gates` one number or, without groups, (slots,).
    """
    function: Any = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[weight.dim()]
    return function(x, added(weight, down, up, gates, groups), bias, stride, padding, dilation, groups)  # type: ignore[no-any-return]


def added(weight: Tensor, down: Tensor, up: Tensor, gates: Tensor, groups: int = 1) -> Tensor:
    """The weight of a linear layer or convolution with its low-rank update, in the weight's dtype; autograd sees all of it.

    Shapes are those of `convolution`, and (out, in), (rank, in), (out, rank) for a linear layer.
    """
    if groups == 1 and not trains(weight, down, up):
        return remerged(weight.flatten(1), down.flatten(1), up.flatten(1), gates).view(weight.shape)
    left = (up.flatten(1) * spread(gates, down.shape[0])).to(up.dtype)
    return weight + grouped_product(left, down, groups).view(weight.shape)


def forms_of(gm: fx.GraphModule) -> dict[str, str]:
    """Which form each layer with an update has, {path: form}; a layer that is not named has the stock one."""
    return dict(gm.meta.get("forms", {}))
