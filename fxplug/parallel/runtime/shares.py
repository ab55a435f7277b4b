"""What a graph calls where features are split: parts of weights, what one process adds alone, means, numbers of parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.errors import GuardError
from . import layouts
from .collectives import AllReduce, Collective, Split


class Part(Split):
    """This process's part of a weight: forward(weight, *sizes), as `Split` has it, with `outer` times the streams.

    A weight of which this process keeps only its part (`localize`) is that part, and its gradient is the part's own: no mean
    is taken of it along the axis.
    """

    def __init__(self, ways: dict[str, int], axis: str, dim: int, inner: int = 1, outer: int = 1) -> None:
        super().__init__(ways, axis, dim, inner)
        self.outer = outer

    def forward(self, x: Tensor, *sizes: int, inner: int | None = None) -> Tensor:
        rank, world, _ = self.group_of()
        times = self.outer * self.inner
        if x.shape[self.dim] == times * sum(sizes):
            return super().forward(x, *sizes)
        mine = times * layouts.count_all(sizes, world)[rank]
        if x.shape[self.dim] != mine:
            raise GuardError(
                f"a weight of shape {tuple(x.shape)} must be complete, {times * sum(sizes)} along dimension {self.dim}, or the "
                f"shard of process {rank} of {world}, {mine}: it was sharded over another number of processes"
            )
        found: Tensor = _Share.apply(x, world)
        return found


class Once(Collective):
    """What one process adds alone: forward(x), zeros in the others."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.group_of()[0] == 0 else x * 0  # which has a gradient, of zeros


class AllReduceMean(AllReduce):
    """The mean over all tokens of what is a mean over a process's: forward(x, *sizes)."""

    def forward(self, x: Tensor, *sizes: int) -> Tensor:
        rank, world, _ = self.group_of()
        return super().forward(x if world == 1 else x * (layouts.count_all(sizes, world)[rank] / sum(sizes)))


class FeatureNorm(AllReduce):
    """`layer_norm`, or `rms_norm`, over features that are split in the last dimension: forward(x, weight, bias, *sizes).

    The statistics are sums over the processes, in float32 or more; weight and bias are parts, or None.
    """

    def __init__(self, ways: dict[str, int], axis: str, centred: bool, eps: float | None = None) -> None:
        super().__init__(ways, axis)
        self.centred, self.eps = bool(centred), None if eps is None else float(eps)

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *sizes: int) -> Tensor:  # type: ignore[override]
        rank, world, _ = self.group_of()
        if world == 1 and self.centred:
            return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5 if self.eps is None else self.eps)
        if world == 1:
            return F.rms_norm(x, x.shape[-1:], weight, self.eps)
        count = x.shape[-1] // layouts.count_all(sizes, world)[rank] * sum(sizes)
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.centred:
            y = y - super().forward(y.sum(-1, keepdim=True)) / count
        eps = (1e-5 if self.centred else torch.finfo(x.dtype).eps) if self.eps is None else self.eps
        y = (y * torch.rsqrt(super().forward(y.square().sum(-1, keepdim=True)) / count + eps)).to(x.dtype)
        y = y if weight is None else y * weight
        return y if bias is None else y + bias


class Count(Collective):
    """A number that counts tokens of the whole, or multiples of them, for this process's: forward(n, *sizes)."""

    def forward(self, n: int, *sizes: int) -> int:
        rank, world, _ = self.group_of(*sizes)
        return n // sum(sizes) * layouts.count_all(sizes, world)[rank]


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, world: int) -> Tensor:
        ctx.world = world
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad / ctx.world, None
