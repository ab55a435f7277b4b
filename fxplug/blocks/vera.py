"""VeRA: random matrices that all layers share, and two trained vectors each (Kopiczko et al. 2024, arXiv 2310.11454)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.errors import SpecError
from ..core.quantised import get_weight_shape
from .base import Block, UpdateKind, check_count, check_share

if TYPE_CHECKING:
    from ..core.rewriter.sites import Site


class Vera(Block):
    """y + b * B(d * A(x)): a low-rank update whose matrices all layers share (Kopiczko et al. 2024, arXiv 2310.11454).

    A (rank, in or more) and B (out or more, rank) are values in the graph, of which the layer takes the first columns and
    rows; `d` (rank) and `b` (out) are trained. `b` is zero when new. x is (..., in), y (..., out).
    """

    update_kind = UpdateKind(name="vera", place="after", shared=("shared.first", "shared.second"))
    neutral = True

    def __init__(
        self, in_features: int, out_features: int, rank: int = 256, d_initial: float = 0.1, dropout: float = 0.0
    ) -> None:
        """Create the vectors. Raises SpecError for a rank below 1 or a dropout outside [0, 1)."""
        super().__init__()
        check_share("dropout", dropout)
        self.in_features, self.out_features, self.rank = in_features, out_features, check_count("rank", rank)
        self.d_initial, self.dropout = d_initial, dropout
        self.d = nn.Parameter(torch.full((rank,), float(d_initial)))
        self.b = nn.Parameter(torch.zeros(out_features))

    @classmethod
    def at(cls, site: Site, rank: int = 256, d_initial: float = 0.1, dropout: float = 0.0) -> Vera:
        """Make an update for a linear layer. Raises SpecError for another."""
        weight = site.module._parameters.get("weight")
        if weight is None or weight.dim() != 2:
            raise SpecError(f"{site.path} is a {site.classes[0]}; VeRA fits linear layers")
        out, inner = get_weight_shape(site.module, weight)
        return cls(inner, out, rank, d_initial, dropout)

    def forward(self, x: Tensor, y: Tensor, first: Tensor, second: Tensor) -> Tensor:
        hidden = F.linear(F.dropout(x, self.dropout, self.training), first[:, : self.in_features])
        return torch.add(y, self.b * F.linear(self.d * hidden, second[: self.out_features]))

    def product(self, first: Tensor, second: Tensor) -> dict[str, Tensor]:
        """Make the update as a plain one: `down` (rank, in), `up` (out, rank)."""
        down = self.d.detach().cpu()[:, None] * first[:, : self.in_features]
        return {"down": down, "up": self.b.detach().cpu()[:, None] * second[: self.out_features]}

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, rank={self.rank}"


def draw_projections(key: int, rank: int, inner: int, out: int) -> tuple[Tensor, Tensor]:
    """Return VeRA's two fixed matrices (rank, inner), (out, rank) for the widest of its layers, as PEFT draws them on a CPU."""
    generator = torch.Generator().manual_seed(key)
    sizes = (rank, inner), (out, rank)
    made = [torch.empty(size, device="cpu", dtype=torch.float32) for size in sizes]
    for matrix in made:
        bound = math.sqrt(3.0) * math.sqrt(2) / math.sqrt(matrix.shape[1])
        matrix.uniform_(-bound, bound, generator=generator)
    return made[0], made[1]


class Projections(nn.Module):
    """The pair that the layers share: `first` (rank, in) and `second` (out, rank), buffers that PEFT's `key` draws."""

    first: Tensor
    second: Tensor

    def __init__(self, rank: int, in_features: int, out_features: int, key: int = 0) -> None:
        """Draw the matrices. Raises SpecError for a rank below 1."""
        super().__init__()
        first, second = draw_projections(key, check_count("rank", rank), in_features, out_features)
        like = torch.empty(0)  # of the dtype and on the device of the model
        self.register_buffer("first", first.to(like))
        self.register_buffer("second", second.to(like))

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.first, self.second
