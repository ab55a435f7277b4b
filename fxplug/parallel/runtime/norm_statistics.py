"""The statistics of norms, of all rows, from those that each process has of its own.

Parts are combined as Chan, Golub and LeVeque do (1979, "Updating formulae and a pairwise algorithm for computing sample
variances"), so that nothing cancels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import layouts
from .collectives import Collective, check_integer, gather


class Norm(Collective):
    """Group normalisation of parts: forward(x, weight, bias, *sizes), as `torch.nn.functional.group_norm` is of the whole.

    x is (batch, channels, ...) with tokens of these whole sizes split along one of the dimensions behind; statistics are
    float32, or x's dtype where that is finer. `groups` None: a group for each channel.
    """

    def __init__(self, ways: dict[str, int], axis: str, groups: int | None, eps: float) -> None:
        super().__init__(ways, axis)
        self.groups, self.eps = None if groups is None else check_integer("groups", groups, 1), float(eps)

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *sizes: int) -> Tensor:
        rank, world, group = self.group_of()
        batch, channels = x.shape[:2]
        groups = self.groups or channels
        high = torch.promote_types(x.dtype, torch.float32)
        rows = x.reshape(batch, groups, channels // groups, -1).to(high)
        counts = layouts.count_all(sizes, world)
        var, mean = torch.var_mean(rows, (2, 3), correction=0, keepdim=True)
        if world > 1:
            both = gather(torch.stack([mean, var])[None], 0, [1] * world, rank, group)
            shares = torch.tensor([n / sum(sizes) for n in counts], dtype=high, device=x.device).view(-1, 1, 1, 1, 1)
            mean = (shares * both[:, 0]).sum(0)
            var = (shares * (both[:, 1] + (both[:, 0] - mean).square())).sum(0)
        scale = (var + self.eps).rsqrt()
        if weight is not None:
            scale = scale * weight.view(1, groups, -1, 1)
        rows = (rows - mean) * scale
        if bias is not None:
            rows = rows + bias.view(1, groups, -1, 1)
        return rows.to(x.dtype).view(x.shape)
