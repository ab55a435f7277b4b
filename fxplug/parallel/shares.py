"""What a graph calls where features are split: parts of weights, what one process adds alone, means, numbers of parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import GuardError
from . import layouts
from .collectives import Collective, Split, Sum


class Part(Split):
    """This process's part of a weight: forward(weight, *sizes), as `Split` has it, with `outer` times the streams.

    A weight of which this process keeps only its part (`localize`) is that part, and its gradient is the part's own: no mean
    is taken of it along the axis.
    """

    def __init__(self, ways: dict[str, int], axis: str, dim: int, inner: int = 1, outer: int = 1) -> None:
        super().__init__(ways, axis, dim, inner)
        self.outer = outer

    def forward(self, x: Tensor, *sizes: int, inner: int | None = None) -> Tensor:
        rank, world, _ = self.along()
        times = self.outer * self.inner
        if x.shape[self.dim] == times * sum(sizes):
            return super().forward(x, *sizes)
        mine = times * layouts.counts(sizes, world)[rank]
        if x.shape[self.dim] != mine:
            raise GuardError(
                f"a weight {tuple(x.shape)} is neither whole, {times * sum(sizes)} along dimension {self.dim}, nor the part of "
                f"process {rank} of {world}, {mine}: it was kept in parts on other processes"
            )
        found: Tensor = _Share.apply(x, world)
        return found


class Once(Collective):
    """What one process adds alone: forward(x), zeros in the others."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.along()[0] == 0 else x * 0  # which has a gradient, of zeros


class Mean(Sum):
    """The mean over all tokens of what is a mean over a process's: forward(x, *sizes)."""

    def forward(self, x: Tensor, *sizes: int) -> Tensor:
        rank, world, _ = self.along()
        return super().forward(x if world == 1 else x * (layouts.counts(sizes, world)[rank] / sum(sizes)))


class Count(Collective):
    """A number that counts tokens of the whole, or multiples of them, for this process's: forward(n, *sizes)."""

    def forward(self, n: int, *sizes: int) -> int:
        rank, world, _ = self.along()
        return n // sum(sizes) * layouts.counts(sizes, world)[rank]


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, world: int) -> Tensor:
        ctx.world = world
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad / ctx.world, None
