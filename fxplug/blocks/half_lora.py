"""LoRA on one half of a batch: the samples of a prompt and of its negative have weights of their own (arXiv 2211.11337)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..core.errors import SpecError, shown
from .base import Block
from .lora import Lora

if TYPE_CHECKING:
    from ..core.rewriter.sites import Site


class HalfLora(Block):
    """`Lora` for one half of the samples; the others keep their y.

    x and y have the samples in dimension 0, of which the first half is the smaller one where they are odd in number. It is no
    `Lora`, as no weight for all samples does the same: it cannot be merged.
    """

    neutral = True

    def __init__(self, lora: Lora, half: Literal["first", "second"]) -> None:
        """Raises SpecError for another half."""
        super().__init__()
        if half not in ("first", "second"):
            raise SpecError(f"half must be first or second, not {shown(half)}")
        self.lora, self.side = lora, half

    @classmethod
    def at(
        cls,
        site: Site,
        half: Literal["first", "second"],
        rank: int | float = 8,
        alpha: float | None = None,
        dropout: float = 0.0,
        bias: bool = False,
        alpha_auto_scale: bool = True,
    ) -> HalfLora:
        """As `Lora.at`."""
        made: Any = Lora.at(site, rank, alpha, dropout, bias, alpha_auto_scale=alpha_auto_scale)
        return cls(made, half)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        middle = y.shape[0] // 2
        if self.side == "first":
            return torch.cat([self.lora(x[:middle], y[:middle]), y[middle:]])
        return torch.cat([y[:middle], self.lora(x[middle:], y[middle:])])

    def extra_repr(self) -> str:
        return f"half={self.side}"
