"""What the blocks of passes make of weights: sums in float32, or float64 where a weight is that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from ...blocks.gathered import GatheredDora
from ...blocks.lora import Lora
from ...blocks.low_rank import repeat_gates, split_groups
from ...blocks.scale import Scale, Ssf
from ...blocks.weight_update import Update
from ...core.ir.traced_module import strip_to_container


@dataclass(frozen=True)
class FoldStep:
    """A block that is folded: its path; whether it is a parameter's, stands before a layer, or behind it; its node.

    `via` is the path of a scale before the layer, where an update reads what that gives.
    """

    block: str
    place: str
    node: fx.Node = field(compare=False)
    via: str = ""


@dataclass
class ParameterUse:
    """A place where a parameter is read: the nodes of a layer, and the blocks on the way that are folded into it."""

    name: str
    part: str
    kind: str
    node: fx.Node
    steps: tuple[FoldStep, ...] = ()


def choose_accumulator(weight: Tensor) -> torch.dtype:
    """Return the dtype in which updates of a weight are summed: float32, or float64 for a float64 weight."""
    return torch.promote_types(weight.dtype, torch.float32)


def compute_delta(block: Lora, gates: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the term that a `Lora` adds to its layer's weight, in the weight's shape; `gates` is (slots,), None without
    slots."""
    down, up = _factors(block, gates, dtype)
    product = up @ down
    return product[0].T if block.kind == "Embedding" else product.reshape(-1, *get_weight(block.down).shape[1:])


def add_lora(
    value: Tensor, block: Lora, gates: Tensor | None, out: Tensor | None = None, transposed: bool = False
) -> Tensor:
    """Return a layer's weight in its accumulator's dtype with a `Lora` added; written into `out` if that is given.

    A `transposed` weight is (in, out).
    """
    down, up = _factors(block, gates, value.dtype)
    if block.kind == "Embedding" or transposed:
        return torch.addmm(value, down[0].T, up[0].T, out=out)
    flat = None if out is None else out.view(len(up), -1, down.shape[2])
    groups = value.reshape(len(up), -1, down.shape[2])
    if len(up) == 1:
        return torch.addmm(groups[0], up[0], down[0], out=None if flat is None else flat[0]).view(value.shape)
    return torch.baddbmm(groups, up, down, out=flat).view(value.shape)


def _factors(block: Lora, gates: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the factors of an update, (groups, rank, in) with the scale, and (groups, out, rank); an Embedding's are
    transposed."""
    down, up = get_weight(block.down), get_weight(block.up)
    groups = block.geometry.get("groups", 1)
    down, up = split_groups(down.T if block.kind == "Embedding" else down, groups), split_groups(up, groups)
    if isinstance(block, GatheredDora):
        gain = (1 + block.gain.to(dtype)).T.repeat_interleave(up.shape[2] // block.slots, 1)
        up = up.to(dtype) * split_groups(gain, groups)
    if gates is None:
        return down.to(dtype) * block.scale.to(dtype), up.to(dtype)
    # the slots follow each other within each group; those that are not in use cost nothing
    rows = repeat_gates(gates.cpu(), down.shape[1])
    used = rows.nonzero()[:, 0].to(down.device)
    return down[:, used].to(dtype) * rows[rows != 0][:, None].to(down.device, dtype), up[:, :, used].to(dtype)


def get_weight(layer: nn.Module) -> Tensor:
    """Return the weight of a layer that has one."""
    found = layer.weight
    assert isinstance(found, Tensor)
    return found


def fold_block(
    value: Tensor, block: nn.Module, step: FoldStep, use: ParameterUse, gates: Tensor | None, via: Tensor | None = None
) -> Tensor:
    """Return a layer's weight or bias in its accumulator's dtype, with a block before or after the layer folded in.

    `gates` has how much is taken of each slot, (slots,), None without slots; `via` the factors of the inputs that a `Lora`
    reads where the layer's own are scaled.
    """
    dtype, part, kind = value.dtype, use.part, use.kind
    if isinstance(block, Scale):
        return multiply_layer(value, get_scale(block, gates), step.place, kind)
    if isinstance(block, GatheredDora):
        assert gates is not None
        return fold_gains(value, block, gates, part == "bias", kind)
    whole = part == "bias" or kind == "Embedding"  # what is added to the result is added to this
    if isinstance(block, Lora):
        if part == "weight":
            if via is None:
                value = add_lora(value, block, gates, transposed=kind == "TransposedLinear")
            else:
                value = value + multiply_layer(compute_delta(block, gates, dtype), via, "before", kind)
        if block.bias and whole:
            value = value + block.up.bias.to(dtype) * block.scale.to(dtype)  # type: ignore[operator]
        return value
    assert isinstance(block, Ssf)
    value = multiply_layer(value, block.scale, "after", kind)
    return value + block.shift.to(dtype) if whole else value


def fold_gains(value: Tensor, block: GatheredDora, gates: Tensor, is_bias: bool, kind: str) -> Tensor:
    """Return a layer's weight or bias in its accumulator's dtype, with the updates and the gains of a bank folded in.

    `gates` has how much is taken of each slot, (slots,).
    """
    taken = gates.to(value)
    factor = 1 + taken @ block.gain.to(value.dtype)
    if is_bias:
        return value * factor + taken @ block.shift.to(value.dtype)
    return add_lora(multiply_layer(value, factor, "after", kind), block, gates, transposed=kind == "TransposedLinear")


def get_scale(block: nn.Module, gates: Tensor | None) -> Tensor:
    """Return the factors of the channels that a `Scale` has, or those of its slots of which so much is taken."""
    assert isinstance(block, Scale)
    return block.weight if gates is None or not block.slots else block.combine(gates)


def multiply_layer(value: Tensor, scale: Tensor, place: str, kind: str) -> Tensor:
    """Return a layer's weight or bias whose inputs, or with `place` "after" outputs, are times these factors."""
    scale = scale.to(value.dtype)
    if place == "before":
        return value * scale.view(1, -1, *[1] * (value.dim() - 2))
    return value * (scale if kind in ("Embedding", "TransposedLinear") else scale.view(-1, *[1] * (value.dim() - 1)))


def map_parameter(value: Tensor, block: nn.Module, gates: Tensor) -> Tensor:
    """Return a parameter in its accumulator's dtype with the updates of a bank that maps it, of the used slots alone."""
    assert isinstance(block, Update)
    banks = dict(block.named_parameters())
    total = value
    for slot, gate in enumerate(gates.tolist()):
        if gate:
            own = {name: bank[slot].detach().to(value.dtype) for name, bank in banks.items()}
            total = total + gate * block.change(value, own)
    return total


def run_in_dtype(block: nn.Module, dtype: torch.dtype, *args: Any) -> Any:
    """Return a block's result in evaluation with all its tensors in this dtype; the block itself is unchanged."""
    rows = [*block.named_parameters(), *block.named_buffers()]
    state = {name: t.detach().to(dtype) if t.is_floating_point() else t.clone() for name, t in rows}
    return functional_call(strip_to_container(block).eval(), state, args)
