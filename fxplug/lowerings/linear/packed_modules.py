"""Packed products: several linear layers as one, on parameters that are parts of one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...blocks.lora import Lora
from ...errors import SpecError
from . import operators


class Packed(nn.Module):
    """x @ weight.T + bias for several layers at once: x (..., in), the result (..., rows of the packed weight).

    `weights` and `biases` name the parameters that are parts of the packed tensors, with the row where each begins, from the
    module that holds this one. Without a packed bias, biases are put together at each call.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, weights: dict[str, int], biases: dict[str, int]) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.weights, self.biases = weights, biases
        # a call reads no names: a program compiled for one of several alike regions then serves all
        self.weight_rows, self.bias_rows = list(weights.values()), list(biases.values())

    def forward(self, x: Tensor, *parts: Tensor) -> Tensor:
        """`parts` are the parameters that `weights` and then `biases` name: read where gradients of them are wanted."""
        weight, bias = self.weight, self.bias
        graded = torch.is_grad_enabled()
        trained = graded and any(part.requires_grad for part in parts)
        if trained:
            weight = _joined(weight, self.weight_rows, parts[: len(self.weight_rows)])
        if self.bias_rows and (trained or bias is None):
            bias = _joined(weight.new_zeros(len(weight)), self.bias_rows, parts[len(self.weight_rows) :])
        graded = graded and (x.requires_grad or weight.requires_grad)
        casts = torch.is_autocast_enabled(x.device.type) or x.dtype != weight.dtype
        if graded or casts or x.dim() < 2 or torch.compiler.is_exporting():
            return F.linear(x, weight, bias)
        return operators.product(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], weight.shape[0])

    def retie(self, root: nn.Module) -> None:
        """Let the parameters, found from `root`, be parts of the packed tensors again, with the values that they have now."""
        for key, names in (("weight", self.weights), ("bias", self.biases)):
            whole = getattr(self, key)
            if whole is None:
                continue
            try:
                parts = {name: root.get_parameter(name) for name in names}
            except AttributeError:
                return  # a part of an outlined module: the module that holds them does it
            kinds = {(part.device, part.dtype) for part in parts.values()}
            if len(kinds) > 1:
                raise SpecError(f"the packed layers {', '.join(parts)} must be of one dtype and on one device, not {kinds}")
            if kinds != {(whole.device, whole.dtype)}:
                ((device, dtype),) = kinds
                whole = self._buffers[key] = torch.zeros(whole.shape, device=device, dtype=dtype)
            tie(whole, [(part, names[name]) for name, part in parts.items()])
            for rows in _between(whole, list(names.values()), list(parts.values())):
                rows.zero_()  # of layers without a bias

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}, {', '.join(self.weights)}"


class Joined(Lora):
    """A `Lora` whose `down` may be a part of a packed product: what that gives comes as `hidden`."""

    def forward(self, x: Tensor, y: Tensor, rows: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        """x, y and `rows` as for `Lora`; hidden (..., rank) is down(x)."""
        if hidden is None:
            return super().forward(x, y, rows)
        inner = hidden * self.scale if rows is None else self.gated(hidden, rows)
        weight = self.up.weight
        if y.dim() < 2 or y.dtype != weight.dtype or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return torch.add(y, self.up(inner))
        # y is a part of a packed product that nobody else reads
        return y.flatten(0, -2).addmm_(inner.flatten(0, -2), weight.t()).view(y.shape)  # type: ignore[operator]


def _between(whole: Tensor, starts: Sequence[int], parts: Sequence[Tensor]) -> list[Tensor]:
    """The rows of a packed tensor before each of its parts, and those behind the last."""
    ends = [0, *(start + part.shape[0] for start, part in zip(starts, parts, strict=True))]
    return [whole[end:start] for end, start in zip(ends, [*starts, whole.shape[0]], strict=True)]


def _joined(whole: Tensor, starts: Sequence[int], parts: Sequence[Tensor]) -> Tensor:
    """A packed tensor put together from its parts, for autograd."""
    *before, last = _between(whole, starts, parts)
    return torch.cat([rows for pair in zip(before, parts, strict=True) for rows in pair] + [last])


@torch.no_grad()
def tie(whole: Tensor, parts: list[tuple[nn.Parameter, int]]) -> None:
    """Make parameters the rows of `whole` that begin at these numbers, with their values."""
    for part, start in parts:
        rows = whole[start : start + part.shape[0]]
        if part.is_meta or part.data_ptr() != rows.data_ptr():
            rows.copy_(part)
            part.data = rows


def whole_of(parts: Sequence[tuple[Tensor, int]], rows: int) -> Tensor | None:
    """The tensor of so many rows whose parts begin at these rows; None where their memory belongs to something else.

    Parameters that are parts of such a tensor already stay where they are.
    """
    (first, start), size = parts[0], parts[0][0][0].numel()
    shape = (rows, *first.shape[1:])
    own = [alone(tensor) for tensor, _ in parts]
    if all(own):
        return first.new_zeros(shape).detach()
    storage, offset = first.untyped_storage(), first.storage_offset() - start * size
    beyond = (offset + rows * size) * first.element_size() > storage.nbytes()
    if any(own) or beyond or any(t.data_ptr() != first.data_ptr() + (s - start) * size * t.element_size() for t, s in parts):
        return None
    return first.detach().as_strided(shape, first.stride(), offset)


def alone(tensor: Tensor) -> bool:
    """Whether a tensor has memory of its own."""
    return tensor.is_meta or tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
