"""Bottleneck adapters: down, a nonlinearity, up (Houlsby et al. 2019, arXiv 1902.00751)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Block, check_count, check_share, find_torch_class, get_widths

if TYPE_CHECKING:
    from ..core.rewriter.sites import Site


class Adapter(Block):
    """y + scale * up(act(down(x))): a bottleneck beside or behind a sublayer.

    Behind it (args y, y) it is the serial adapter of Houlsby et al. 2019, arXiv 1902.00751; beside it (args x, y) the
    parallel one of He et al. 2021, arXiv 2110.04366, who take a scale of 4. x and y are (..., features), or
    (batch, channels, *space) when `dim` is 1, and agree in all other dimensions. `up` is zero when new.
    """

    neutral = True
    hands_on = True

    def __init__(
        self,
        in_width: int,
        width: int,
        bottleneck: int = 16,
        act: str = "GELU",
        scale: float = 1.0,
        dropout: float = 0.0,
        dim: int = -1,
    ) -> None:
        """Create the adapter; `act` is the name of a class in torch.nn. Raises SpecError for a bottleneck below 1 or a dropout
        outside [0, 1)."""
        super().__init__()
        check_count("bottleneck", bottleneck)
        check_share("dropout", dropout)
        self.in_width, self.width, self.bottleneck, self.act, self.dropout, self.dim = (
            in_width, width, bottleneck, act, dropout, dim,
        )  # fmt: skip
        self.down, self.up = nn.Linear(in_width, bottleneck), nn.Linear(bottleneck, width)
        self.activation = find_torch_class(act)()
        self.register_buffer("factor", torch.tensor(scale, dtype=torch.float32))
        self.scale = scale
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        for parameter in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(parameter)

    @classmethod
    def at(cls, site: Site, dim: int | None = None, **options: Any) -> Adapter:
        """Make an adapter between the two values that the rule's `args` name."""
        x, y = site.args
        inner, features, dim = get_widths(site, y, x, dim, f"an adapter from {x} to {y}", "use a serial adapter here")
        return cls(inner, features, dim=dim, **options)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        inner: Tensor = self.activation(self.down(x if self.dim == -1 else x.movedim(self.dim, -1)))
        update: Tensor = self.up(F.dropout(inner, self.dropout, self.training)) * self.factor
        return y + (update if self.dim == -1 else update.movedim(-1, self.dim))

    def extra_repr(self) -> str:
        return f"scale={self.scale:g}, dropout={self.dropout:g}"
