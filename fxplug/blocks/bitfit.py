"""A parameter's change as a parameter of its own: BitFit on biases (Ben Zaken et al. 2022, arXiv 2106.10199)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .weight_update import Update, weight_at

if TYPE_CHECKING:
    from ..core.rewriter.sites import Site


class Delta(Update):
    """value + delta: a parameter's change as a parameter of its own, zero when new, while the base stays as it is.

    On biases it is BitFit (Ben Zaken et al. 2021, arXiv 2106.10199). With `slots` it holds what an adapter changes whole: a
    bias, a norm, a weight of any kind.
    """

    asks = "a change"
    delta: Tensor

    def __init__(self, shape: Sequence[int], slots: int = 0) -> None:
        """`shape` is the parameter's."""
        super().__init__(shape, 1, None, False, True, slots)
        self._buffers.pop("scale", None)  # it is not scaled
        self.delta = nn.Parameter(torch.zeros(self.shape))
        self.banked()

    @classmethod
    def at(cls, site: Site, slots: int = 0) -> Delta:  # type: ignore[override]  # it has no rank
        """A change for any floating-point parameter."""
        return cls(weight_at(site, cls.asks, 0).shape, slots)

    def updated(self, value: Tensor, uniform: Tensor | None = None) -> Tensor:
        return value + self.delta if uniform is None else super().updated(value, uniform)

    def update(self, own: Mapping[str, Tensor]) -> Tensor:
        return own["delta"]

    def extra_repr(self) -> str:
        return f"{self.shape}" + (f", slots={self.slots}" if self.slots else "")
