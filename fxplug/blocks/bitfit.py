"""BitFit: a difference of a parameter that trains (Ben Zaken et al. 2022, arXiv 2106.10199)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .base import Block
from .weight_update import in_place_of, weight_at

if TYPE_CHECKING:
    from ..rewriter.sites import Site


class Delta(Block):
    """value + delta: a parameter's change as a parameter of its own, zero when new, while the base stays as it is.

    On biases it is BitFit (Ben Zaken et al. 2021, arXiv 2106.10199).
    """

    neutral = True

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = list(shape)
        self.delta = nn.Parameter(torch.zeros(self.shape))

    @classmethod
    def at(cls, site: Site) -> Delta:
        """A change for any floating-point parameter."""
        return cls(weight_at(site, "a change", 0).shape)

    def forward(self, value: Tensor) -> Tensor:
        return in_place_of(value + self.delta, value)
