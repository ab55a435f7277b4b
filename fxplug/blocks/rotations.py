"""The algebra of orthogonal updates: pure functions on tensors, of which blocks and readers of adapter files are users."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def skew(upper: Tensor, size: int) -> Tensor:
    """Skew-symmetric matrices (n, size, size) from what is above their diagonals, row by row: (n, size * (size - 1) / 2)."""
    rows, columns = torch.triu_indices(size, size, 1, device=upper.device)
    filled = upper.new_zeros(size, size, upper.shape[0]).index_put((rows, columns), upper.T)
    return filled.permute(2, 0, 1) - filled.permute(2, 1, 0)


def cayley(matrices: Tensor) -> Tensor:
    """(I - Q)(I + Q)^-1 of skew-symmetric matrices Q (n, size, size): orthogonal, and exactly I where Q is zero."""
    q = matrices.float()  # there is no solver for half precision
    one = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device).expand_as(q)
    solved: Tensor = torch.linalg.solve(one + q, one - q, left=False)
    return solved.to(matrices.dtype)


def neumann(matrices: Tensor, terms: int) -> Tensor:
    """The first `terms` of I + 2Q + 2Q^2 + ..., the series of (I + Q)(I - Q)^-1; three or more, the last one is taken once.

    Orthogonal for small Q only. As in OFTv2 (Qiu et al. 2025, arXiv 2506.19847) and PEFT, with Q of the other sign than in
    `cayley`. (PEFT takes 3 terms for 4.)
    """
    one = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device).expand_as(matrices)
    result, power = one + 2 * matrices, matrices
    for _ in range(2, terms - 1):
        power = power @ matrices
        result = result + 2 * power
    return result + power @ matrices


def turned(value: Tensor, rotations: Tensor) -> Tensor:
    """A weight (out, in) times the transpose of the matrix that has `rotations` (n, size, size) along its diagonal."""
    parts = value.reshape(value.shape[0], -1, rotations.shape[-1])
    return torch.einsum("ork,rjk->orj", parts, rotations.expand(parts.shape[1], -1, -1)).flatten(1)


def rotated(value: Tensor, upper: Tensor, size: int, terms: int) -> Tensor:
    """A weight (out, in) turned by OFT's rotations: `upper` is what `skew` takes, `terms` those of the series, 0 for none."""
    matrices = skew(upper, size)
    return turned(value, (neumann(matrices, terms) if terms else cayley(matrices)).to(value.dtype))


def rotated_in_levels(value: Tensor, matrices: Tensor, orders: Iterable[Tensor]) -> Tensor:
    """A weight (out, in) turned by BOFT's (levels, blocks, size, size), each level on inputs in its order, see `butterfly`."""
    rotations = cayley((matrices - matrices.mT).flatten(0, 1) * 0.5).reshape(matrices.shape).to(value.dtype)
    for order, level in zip(orders, rotations, strict=True):
        value = turned(value[:, torch.argsort(order)], level)[:, order]
    return value


def butterfly(width: int, size: int, level: int) -> Tensor:
    """The order of the inputs at one level of a butterfly: in each group of 2^level blocks the even half blocks, then the odd.

    Level 0 leaves the order. (BOFT, section 4, with half a block as the unit.)
    """
    group, half = size * 2**level, size // 2
    order = torch.arange(width)
    return order.view(width // group, -1, 2, half).transpose(1, 2).flatten() if half else order
