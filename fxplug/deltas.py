"""What the blocks of passes make of weights: sums in float32, or float64 where a weight is that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from .adapters import Ssf
from .blocks import Lora, Scale
from .module import shell
from .weights import Update


@dataclass(frozen=True)
class Step:
    """A block that is folded: its path; whether it is a parameter's, stands before a layer, or behind it; its node.

    `via` is the path of a scale before the layer, where an update reads what that gives.
    """

    block: str
    place: str
    node: fx.Node = field(compare=False)
    via: str = ""


@dataclass
class Use:
    """A place where a parameter is read: the nodes of a layer, and the blocks on the way that are folded into it."""

    name: str
    part: str
    kind: str
    node: fx.Node
    steps: tuple[Step, ...] = ()


def accumulator(weight: Tensor) -> torch.dtype:
    """The dtype in which updates of a weight are summed: float32, or float64 where the weight is that."""
    return torch.promote_types(weight.dtype, torch.float32)


def delta(block: Lora, gates: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What a `Lora` adds to its layer's weight, in the weight's shape; `gates` is (slots,), None without slots."""
    down, up = weight_of(block.down), weight_of(block.up)
    groups = block.geometry.get("groups", 1)
    shape = (up.shape[0], *down.shape[1:])
    # (groups, rank, in) and (groups, out, rank)
    down = down.T[None] if block.kind == "Embedding" else down.reshape(groups, down.shape[0] // groups, -1)
    up = up.reshape(groups, up.shape[0] // groups, -1)
    if gates is None:
        scale = block.scale
    else:  # the slots follow each other within each group; those that are not in use cost nothing
        rows = gates.cpu().repeat_interleave(down.shape[1] // len(gates))
        used = rows.nonzero()[:, 0].to(down.device)
        down, up, scale = down[:, used], up[:, :, used], rows[rows != 0][:, None].to(down.device)
    product = up.to(dtype) @ (down.to(dtype) * scale.to(dtype))
    return product[0].T if block.kind == "Embedding" else product.reshape(shape)


def weight_of(layer: nn.Module) -> Tensor:
    found = layer.weight
    assert isinstance(found, Tensor)
    return found


def changed(
    value: Tensor, block: nn.Module, step: Step, use: Use, gates: Tensor | None, via: nn.Module | None = None
) -> Tensor:
    """A layer's weight or bias in its accumulator's dtype, with a block before or behind the layer folded in."""
    dtype, part, kind = value.dtype, use.part, use.kind
    if step.place == "before":
        return _columns(value, block)
    whole = part == "bias" or kind == "Embedding"  # what is added to the result is added to this
    if isinstance(block, Lora):
        if part == "weight":
            update = delta(block, gates, dtype)
            value = value + (update if via is None else _columns(update, via))
        if block.bias and whole:
            value = value + block.up.bias.to(dtype) * block.scale.to(dtype)  # type: ignore[operator]
        return value
    assert isinstance(block, (Scale, Ssf))
    scale = (block.weight if isinstance(block, Scale) else block.scale).to(dtype)
    value = value * (scale if kind == "Embedding" else scale.view(-1, *[1] * (value.dim() - 1)))
    return value + block.shift.to(dtype) if isinstance(block, Ssf) and whole else value


def mapped(value: Tensor, block: nn.Module, gates: Tensor) -> Tensor:
    """A parameter in its accumulator's dtype with what a bank that maps it adds: of the slots in use alone."""
    assert isinstance(block, Update)
    banks = dict(block.named_parameters())
    for slot, gate in enumerate(gates.tolist()):
        if gate:
            own = {name: bank[slot].detach().to(value.dtype) for name, bank in banks.items()}
            value = value + gate * block.update(own)
    return value


def _columns(weight: Tensor, scale: nn.Module) -> Tensor:
    return weight * weight_of(scale).to(weight.dtype).view(1, -1, *[1] * (weight.dim() - 2))


def in_dtype(block: nn.Module, dtype: torch.dtype, *args: Any) -> Any:
    """A block's result in evaluation with all its tensors in this dtype; the block itself is left as it is."""
    rows = [*block.named_parameters(), *block.named_buffers()]
    state = {name: t.detach().to(dtype) if t.is_floating_point() else t.clone() for name, t in rows}
    return functional_call(shell(block).eval(), state, args)


