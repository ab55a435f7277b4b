"""DoRA: magnitude and direction of a weight apart (Liu et al. 2024, arXiv 2402.09353)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .lora_weight import LoraWeight
from .weight_update import in_place_of, output_dim, weight_at

if TYPE_CHECKING:
    from ..rewriter.sites import Site


def norm_except(value: Tensor, dim: int) -> Tensor:
    """The Euclidean norm of each slice along `dim`, which stays, the others of size 1; -1 is the norm of all."""
    others = [d for d in range(value.dim()) if d != dim]
    norm: Tensor = torch.linalg.vector_norm(value, dim=others, keepdim=True)
    return norm


def over_norm(magnitude: Tensor, norm: Tensor) -> Tensor:
    """magnitude / norm, and 1 where the norm is zero: such a slice has no direction yet."""
    nothing = norm == 0
    return torch.where(nothing, 1.0, magnitude / torch.where(nothing, 1.0, norm))


class Dora(LoraWeight):
    """magnitude * V / |V| with V = value + scale * up @ down: weight-decomposed LoRA (Liu et al. 2024, arXiv 2402.09353).

    The norm is that of each output channel and gets no gradient (section 4.3 of the paper). `magnitude` is the norm of the
    weight when new, (out) or (1, out, 1, ...) for convolutions as in PEFT. An output channel of zeros is left alone until
    the update has given it a direction.
    """

    neutral = True

    def __init__(
        self,
        shape: Sequence[int],
        rank: int = 8,
        alpha: float | None = None,
        rslora: bool = False,
        alpha_auto_scale: bool = True,
        dim: int = 0,
    ) -> None:
        """`dim` is the dimension of the output channels. Raises SpecError as LoraWeight does."""
        super().__init__(shape, rank, alpha, rslora, alpha_auto_scale)
        self.dim = dim
        around = [1] if len(self.shape) > 2 else []
        self.magnitude = nn.Parameter(torch.ones(*around, self.shape[dim], *[1] * (len(self.shape) - 2)))

    @classmethod
    def at(  # type: ignore[override]  # an adapter of this kind cannot be one of several
        cls,
        site: Site,
        rank: int = 8,
        alpha: float | None = None,
        rslora: bool = False,
        alpha_auto_scale: bool = True,
    ) -> Dora:
        """An update for any weight of two or more dimensions; its output channels are told by the kind of layer."""
        value = weight_at(site, "a low-rank update")
        block = cls(value.shape, rank, alpha, rslora, alpha_auto_scale, output_dim(site))
        # the norm in the dtype that the weight has, or it would not be the one that forward finds
        block.magnitude.data = norm_except(value.detach(), block.dim).reshape(block.magnitude.shape)
        return block

    def forward(self, value: Tensor, uniform: Tensor | None = None) -> Tensor:
        changed = self.updated(value)
        norm = norm_except(changed.detach().to(value.dtype), self.dim)
        return in_place_of(changed * over_norm(self.magnitude.reshape(norm.shape), norm), value)
