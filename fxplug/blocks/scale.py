"""Learned factors of channels: gates, and SSF's scales with shifts (Lian et al. 2022, arXiv 2210.08823)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .base import Block, Method, UpdateKind, align_to_dim, get_width, make_kind_key

if TYPE_CHECKING:
    from ..core.rewriter.sites import Site


def _gated(value: Tensor, own: Mapping[str, Tensor], options: Mapping[str, Any]) -> Tensor:
    """Give a weight or bias with its outputs or inputs times a gate each."""
    behind = value.dim() - (1 if options["side"] == "output" else 2)
    return value * own["gate"].reshape(-1, *[1] * behind)


def _fits(own: Mapping[str, Tensor], options: Mapping[str, Any], shape: Sequence[int]) -> bool:
    at = int(options["side"] == "input")
    return len(shape) > at and shape[at] == own["gate"].numel()


class Scale(Block):
    """y times a learned gate per channel, one when new (IA3, Liu et al. 2022, arXiv 2205.05638).

    y is (..., features), or (batch, channels, *space) when `dim` is 1.
    """

    update_kind = UpdateKind(
        name="ia3",
        forms=({"gate": "n"},),
        neutral={"gate": 1},
        method="gate",
        algebra=Method(_gated, _fits, ("gate",)),
        place="after",
        slots="",
        state={"gate": "weight"},
    )
    neutral = True

    def __init__(self, width: int, dim: int = -1) -> None:
        super().__init__()
        self.width, self.dim = width, dim
        self.weight = nn.Parameter(torch.ones(width))

    @classmethod
    def at(cls, site: Site, dim: int | None = None) -> Scale:
        """Make a gate for any tensor; `dim` is its channel dimension, by default that of the layers around. Raises
        SpecError."""
        return cls(*get_width(site, site.args[0], dim))

    def bank(self) -> dict[str, Any]:
        """Return the description of the bank and its place; see `adapters.banks.Bank`."""
        return {"kind": make_kind_key(type(self)), "slots": 0, "rank": 1, "shape": [self.width]}

    def forward(self, y: Tensor) -> Tensor:
        return y * align_to_dim(self.weight, y, self.dim)


class Ssf(Block):
    """y * scale + shift per channel, one and zero when new (SSF, Lian et al. 2022, arXiv 2210.08823).

    y is (..., features), or (batch, channels, *space) when `dim` is 1. The authors' code draws both around these values with a
    deviation of 0.02; here a new one changes nothing.
    """

    neutral = True

    def __init__(self, width: int, dim: int = -1) -> None:
        super().__init__()
        self.width, self.dim = width, dim
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    @classmethod
    def at(cls, site: Site, dim: int | None = None) -> Ssf:
        """Make a scale and a shift for any tensor; `dim` is its channel dimension, by default that of the layers around."""
        return cls(*get_width(site, site.args[0], dim))

    def forward(self, y: Tensor) -> Tensor:
        return y * align_to_dim(self.scale, y, self.dim) + align_to_dim(self.shift, y, self.dim)
