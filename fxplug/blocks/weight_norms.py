"""Blocks that bound a weight: weight normalisation and spectral normalisation, with the base weight as the direction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.errors import SpecError, quote
from .base import Block, check_count
from .low_rank import compute_norm, divide_by_norm
from .weight_update import get_weight, match_parameter

if TYPE_CHECKING:
    from ..core.rewriter.sites import Site


class WeightNorm(Block):
    """magnitude * value / |value|: a weight's length learned apart from its direction (Salimans and Kingma 2016,
    arXiv 1602.07868).

    The same result and gradients as torch.nn.utils.parametrizations.weight_norm, whose `original0` is `magnitude` and whose
    `original1` is the base weight; a slice of zeros stays zeros. `magnitude` is the norm when new, each slice along `dim`.
    """

    neutral = True

    def __init__(self, shape: Sequence[int], dim: int = 0) -> None:
        """Create the magnitude; `dim` is the dimension whose slices have their own lengths; -1 means one length for all.

        Raises SpecError for a dimension that the parameter does not have.
        """
        super().__init__()
        self.shape, self.dim = list(shape), dim
        if dim != -1:
            _check_dim(dim, self.shape)
        kept = [n if i == dim else 1 for i, n in enumerate(self.shape)]
        self.magnitude = nn.Parameter(torch.ones(kept))

    @classmethod
    def at(cls, site: Site, dim: int = 0) -> WeightNorm:
        """Make a length for any parameter of one or more dimensions."""
        value = get_weight(site, "weight normalisation", 1)
        block = cls(value.shape, dim)
        block.magnitude.data = compute_norm(value.detach(), dim)
        return block

    def forward(self, value: Tensor) -> Tensor:
        return match_parameter(value * divide_by_norm(self.magnitude, compute_norm(value, self.dim)), value)


def power_iteration(matrix: Tensor, u: Tensor, v: Tensor, steps: int, eps: float) -> tuple[Tensor, Tensor]:
    """Improve left and right singular vectors of the largest singular value of a matrix, from u (rows) and v (columns)."""
    for _ in range(steps):
        u = F.normalize(matrix @ v, dim=0, eps=eps)
        v = F.normalize(matrix.T @ u, dim=0, eps=eps)
    return u, v


class SpectralNorm(Block):
    """value / sigma, with sigma the largest singular value of the weight as a matrix (Miyato et al. 2018, arXiv 1802.05957).

    As torch.nn.utils.parametrizations.spectral_norm: sigma is read off the vectors `u` and `v`, two buffers that each call in
    training mode betters by `steps` power iterations and that no call in evaluation changes. Adds no parameters.
    """

    u: Tensor
    v: Tensor

    def __init__(self, shape: Sequence[int], steps: int = 1, dim: int = 0, eps: float = 1e-12) -> None:
        """Create the vectors; `dim` is the dimension of the rows. Raises SpecError for fewer than one step, a missing
        dimension, or an `eps` of 0.1 or more."""
        super().__init__()
        if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < 0.1:
            raise SpecError(f"eps must be at least 0 and below 0.1, not {quote(eps)}")
        self.shape, self.steps, self.dim, self.eps = list(shape), check_count("steps", steps), dim, eps
        _check_dim(dim, self.shape)
        rows = self.shape[dim]
        self.register_buffer("u", F.normalize(torch.randn(rows), dim=0, eps=eps))
        self.register_buffer("v", F.normalize(torch.randn(torch.Size(self.shape).numel() // rows), dim=0, eps=eps))

    @classmethod
    def at(cls, site: Site, steps: int = 1, dim: int | None = None, eps: float = 1e-12) -> SpectralNorm:
        """Make a bound for any parameter of two or more dimensions; `dim` is 1 for transposed convolutions, else 0.

        The vectors start with 15 power iterations, as torch's do.
        """
        value = get_weight(site, "spectral normalisation").detach()
        block = cls(value.shape, steps, int("_ConvTransposeNd" in site.classes) if dim is None else dim, eps)
        start = (block.u.to(value), block.v.to(value))
        block.u, block.v = power_iteration(block.matrix(value), *start, 15, eps)
        return block

    def matrix(self, value: Tensor) -> Tensor:
        """Return the parameter as a matrix: dimension `dim` by all the others."""
        return value.movedim(self.dim, 0).flatten(1)

    def forward(self, value: Tensor) -> Tensor:
        matrix = self.matrix(value)
        u, v = self.u, self.v
        if self.training:
            with torch.no_grad():
                u, v = power_iteration(matrix, u, v, self.steps, self.eps)
                self.u.copy_(u)
                self.v.copy_(v)
        else:
            # a later call in training must not change what this call's gradient reads
            u, v = u.clone(), v.clone()
        return match_parameter(value / torch.dot(u, matrix @ v), value)


def _check_dim(dim: object, shape: Sequence[int]) -> None:
    if not isinstance(dim, int) or isinstance(dim, bool) or not 0 <= dim < len(shape):
        raise SpecError(f"dim {dim!r} is not a dimension of a parameter of shape {list(shape)}; it has 0 to {len(shape) - 1}")
