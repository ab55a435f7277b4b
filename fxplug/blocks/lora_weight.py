"""LoRA on a weight itself, whatever layer reads it (arXiv 2106.09685)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from .low_rank import product
from .weight_update import Update

if TYPE_CHECKING:
    from ..core.rewriter.sites import Site


class LoraWeight(Update):
    """value + scale * up @ down: LoRA added to the weight itself (Hu et al. 2021, arXiv 2106.09685).

    For parameters that no layer of their own reads, such as `in_proj_weight`, and where many tokens make the side path of
    Lora the slower way. `down` is (rank, in, *kernel), `up` (out, rank, 1, ...), zero when new: the shapes that PEFT and
    kohya's files have. With `transposed` the weight is (in, out), as that of transformers' Conv1D.
    """

    asks = "a low-rank update"

    def __init__(
        self,
        shape: Sequence[int],
        rank: int = 8,
        alpha: float | None = None,
        rslora: bool = False,
        alpha_auto_scale: bool = True,
        slots: int = 0,
        transposed: bool = False,
    ) -> None:
        """As Update; with `transposed`, `shape` is (out, in), and the parameter's the other way round."""
        super().__init__(shape, rank, alpha, rslora, alpha_auto_scale, slots)
        self.transposed = transposed
        self.down = nn.Parameter(torch.empty(rank, *self.shape[1:]))
        self.up = nn.Parameter(torch.zeros(self.shape[0], rank, *[1] * (len(self.shape) - 2)))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))
        self.banked()

    @classmethod
    def at(cls, site: Site, rank: int = 8, slots: int = 0, rank_max: int | None = None, **options: Any) -> Self:
        return super().at(site, rank, slots, rank_max, transposed="TransposedLinear" in site.classes, **options)

    def update(self, own: Mapping[str, Tensor]) -> Tensor:
        made = product(own["up"], own["down"], self.shape)
        return made.T if self.transposed else made
