"""A connection that carries one value of a graph to another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.errors import GuardError
from .base import Block, align_to_dim, get_widths

if TYPE_CHECKING:
    from ..core.rewriter.sites import Site


class Skip(Block):
    """value + source: a skip connection with a learned gate per channel, zero when new.

    Sources of another width go through a linear map (a convolution of size 1 when `dim` is 1), zero when new. Both tensors
    must agree in every other dimension. `forward` raises GuardError for other widths than these.
    """

    neutral = True

    def __init__(self, source_width: int, width: int, dim: int = -1) -> None:
        super().__init__()
        self.source_width, self.width, self.dim = source_width, width, dim
        same = source_width == width
        self.weight = nn.Parameter(torch.zeros(width) if same else torch.zeros(width, source_width))

    @classmethod
    def at(cls, site: Site, dim: int | None = None) -> Skip:
        """Make a skip along `dim`, by default the value's channels. Raises SpecError if other dimensions differ."""
        value, source = site.args
        what, way = f"a skip from {source} to {value}", "use a block of your own that reshapes"
        return cls(*get_widths(site, value, source, dim, what, way))

    def forward(self, value: Tensor, source: Tensor) -> Tensor:
        if source.shape[self.dim] != self.source_width or value.shape[self.dim] != self.width:
            raise GuardError(
                f"a skip from width {self.source_width} to {self.width} (dimension {self.dim}) got {tuple(source.shape)} and "
                f"{tuple(value.shape)}: that dimension depends on the size of the input; put the skip where it does not"
            )
        if self.weight.dim() == 1:
            return value + source * align_to_dim(self.weight, source, self.dim)
        moved = F.linear(source.movedim(self.dim, -1), self.weight).movedim(-1, self.dim)
        return value + moved
