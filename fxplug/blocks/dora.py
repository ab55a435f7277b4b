"""DoRA: magnitude and direction of a weight apart (Liu et al. 2024, arXiv 2402.09353)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from ..core.errors import SpecError
from .lora_weight import LoraWeight
from .low_rank import decomposed, norm_except
from .weight_update import in_place_of, output_dim, weight_at

if TYPE_CHECKING:
    from ..core.rewriter.sites import Site


class Dora(LoraWeight):
    """magnitude * V / |V| with V = value + scale * up @ down: weight-decomposed LoRA (Liu et al. 2024, arXiv 2402.09353).

    The norm is that of each output channel, or of each input channel as LyCORIS has it too, and gets no gradient (section
    4.3 of the paper). `magnitude` is the norm of the weight when new, (out) or (1, out, 1, ...) for convolutions as in PEFT.
    A channel of zeros is left alone until the update has given it a direction.

    With `slots`, each adds its own magnitude * V / |V| - value, times how much of it is taken: that of one adapter in full is
    its own tool's, several add up, and the order of them does not matter. A slot whose magnitudes are zeros has nothing here.
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
        slots: int = 0,
        transposed: bool = False,
    ) -> None:
        """`dim` is the dimension of `shape` that has magnitudes, 0 or 1. Raises SpecError as LoraWeight does."""
        super().__init__(shape, rank, alpha, rslora, alpha_auto_scale, transposed=transposed)
        self.dim, self.slots = dim, slots
        around = [1] if len(self.shape) > 2 else []
        self.magnitude = nn.Parameter(torch.ones(*around, self.shape[dim], *[1] * (len(self.shape) - 2)))
        if slots:
            del self._buffers["scale"]
        self.banked()

    @classmethod
    def at(  # type: ignore[override]  # its options are named
        cls,
        site: Site,
        rank: int = 8,
        alpha: float | None = None,
        rslora: bool = False,
        alpha_auto_scale: bool = True,
        by: Literal["output", "input"] = "output",
        slots: int = 0,
        rank_max: int | None = None,
    ) -> Dora:
        """An update for any weight of two or more dimensions; its output channels are told by the kind of layer.

        `by` says which channels have magnitudes. Raises SpecError for another word.
        """
        if by not in ("output", "input"):
            raise SpecError(f"by must be output or input, not {by!r}")
        value = weight_at(site, "a low-rank update")
        dim = output_dim(site) if by == "output" else 1 - output_dim(site)
        rank = rank_max if slots and rank_max is not None else rank
        turned = "TransposedLinear" in site.classes
        shape = value.shape[::-1] if turned else value.shape
        block = cls(shape, rank, alpha, rslora, alpha_auto_scale, dim, slots, turned)
        if not slots:
            # the norm in the dtype that the weight has, or it would not be the one that forward finds
            block.magnitude.data = norm_except(value.detach(), block.own_dim).reshape(block.magnitude.shape)
        return block

    @property
    def own_dim(self) -> int:
        """The dimension of the parameter itself that has magnitudes."""
        return 1 - self.dim if self.transposed else self.dim

    def forward(self, value: Tensor, uniform: Tensor | None = None) -> Tensor:
        if uniform is not None:
            return super().forward(value, uniform)
        return in_place_of(decomposed(self.updated(value), self.magnitude, self.own_dim, value.dtype), value)

    def change(self, value: Tensor, own: Mapping[str, Tensor]) -> Tensor:
        magnitude = own["magnitude"]
        made = decomposed(value + self.update(own), magnitude, self.own_dim, value.dtype) - value
        return torch.where((magnitude != 0).any(), made, 0.0)

    def bank(self) -> dict[str, object]:
        return {**super().bank(), "dim": self.dim}
