"""What nodes of a graph give, tried on numbers: blocks that map a parameter, and updates beside convolutions written out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from ...blocks.gathered import GatheredDora
from ...blocks.lora import Lora
from ...core.errors import FxplugError
from ...core.ir.comparison import REWRITTEN, is_close
from ...core.ir.containers import find_tensor
from ...core.ir.traced_module import strip_to_container
from ..linear.layers import Layer
from .updates import compute_delta, get_weight, run_in_dtype

SIZES = (7, 8)  # of the images on which a layer's own padding is compared with an update's


class Unfoldable(Exception):
    """Why a block cannot go into a weight."""


def compare(block: Lora, layer: Layer, x: Any, tree: nn.Module) -> str | None:
    """Return why a written-out convolution with an update's weight differs from the update, or None: tried on two sizes."""
    shape = getattr(x, "meta", {}).get("shape")
    if shape is None:
        return "its input must be a tensor whose shape is known"
    probe = noise(block)
    gates = torch.ones(probe.slots) if probe.slots else None
    given = {layer.weight: compute_delta(probe, gates, torch.float64)}
    if layer.bias is not None:
        given[layer.bias] = torch.zeros(block.out_features, dtype=torch.float64)
    space = len(block.geometry["kernel_size"])
    tried = 0
    for size in SIZES:
        sides = [max(size, d * (k - 1) + 1) for k, d in zip(block.geometry["kernel_size"], block.geometry["dilation"])]  # noqa: B905
        image = torch.randn(*(1 for _ in shape[: -space - 1]), shape[-space - 1], *sides, dtype=torch.float64)
        try:
            ours = evaluate(layer.node, tree, {**given, x: image}, torch.float64)
        except Unfoldable:
            return f"'{layer.node.name}' does not read the same values"
        except (FxplugError, RuntimeError):  # a size that the model does not take
            continue
        rows = [] if gates is None else [torch.ones(1, get_weight(probe.up).shape[1], dtype=torch.float64)]
        try:
            theirs = probe(image, torch.zeros_like(ours), *rows)
        except RuntimeError:
            return "its stride, padding or dilation differs from the layer's"
        if not is_close(ours, theirs, REWRITTEN):
            return "its stride, padding or dilation differs from the layer's"
        tried += 1
    return None if tried else "its stride, padding and dilation could not be compared with the layer's"


def evaluate(node: fx.Node, tree: nn.Module, given: Mapping[fx.Node, Any], dtype: torch.dtype) -> Any:
    """Evaluate a node on tensors of the module alone, floating-point ones in `dtype`. Raises Unfoldable."""
    done = dict(given)

    def run(n: fx.Node) -> Any:
        if n not in done:
            if n.op == "placeholder":
                raise Unfoldable(f"it depends on the input '{n.target}'")
            args, kwargs = fx.node.map_arg(n.args, run), fx.node.map_arg(n.kwargs, run)
            if n.op == "get_attr":
                value: Any = find_tensor(tree, str(n.target))
                done[n] = value.detach().to(dtype) if value.is_floating_point() else value
            elif n.op == "call_module":
                done[n] = run_in_dtype(tree.get_submodule(str(n.target)), dtype, *args)
            elif n.op == "call_method":
                done[n] = getattr(args[0], str(n.target))(*args[1:], **kwargs)
            else:
                done[n] = n.target(*args, **kwargs)  # type: ignore[operator]
        return done[n]

    return run(node)


def noise(block: Lora) -> Lora:
    """Return a block of the same kind with random numbers, in float64 on the CPU."""
    copied: Lora = strip_to_container(block).eval()  # type: ignore[assignment]
    for module in copied.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = nn.Parameter(torch.randn(p.shape, dtype=torch.float64), requires_grad=False)
        for name, b in module._buffers.items():
            if b is not None:
                module._buffers[name] = torch.ones(b.shape, dtype=torch.float64)
    if isinstance(copied, GatheredDora):
        nn.init.zeros_(copied.gain)
    if copied.bias:
        nn.init.zeros_(copied.up.bias)  # type: ignore[arg-type]
    return copied
