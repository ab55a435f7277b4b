"""LoRA on a weight itself, whatever layer reads it (arXiv 2106.09685), and with its magnitude apart (arXiv 2402.09353)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor, nn

from ..core.errors import SpecError
from .base import UpdateKind
from .lora import KOHYA, PEFT
from .low_rank import compute_norm, decompose, multiply, multiply_experts
from .weight_update import Update, check_single, count_experts, get_output_dim, get_weight, match_parameter

if TYPE_CHECKING:
    from ..core.rewriter.sites import Site


PEFT_DORA = {"down": PEFT["down"], "up": PEFT["up"], "magnitude": "lora_magnitude_vector"}
KOHYA_DORA = {**KOHYA, "magnitude": "dora_scale"}


def _delta(own: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
    return multiply(own["up"], own["down"], shape)


class LoraWeight(Update):
    """value + scale * up @ down: LoRA added to the weight itself (Hu et al. 2021, arXiv 2106.09685).

    For parameters that no layer of their own reads, such as `in_proj_weight`, and where many tokens make the side path of
    Lora the slower way. `down` is (rank, in, *kernel), `up` (out, rank, 1, ...), zero when new: the shapes that PEFT and
    kohya's files have. With `transposed` the weight is (in, out), as that of transformers' Conv1D.

    With `experts` the parameter is (experts, n, m), the weights of as many experts, each with an update of this rank: `down`
    is (rank, experts, m), `up` (n, rank, experts).
    """

    update_kind = UpdateKind(
        name="lora", forms=({"down": "r i ...", "up": "o r ..."},), neutral={"up": 0}, delta=_delta, ranked=("up",)
    )
    asks = "a low-rank update"
    by_expert = True

    def __init__(
        self,
        shape: Sequence[int],
        rank: int = 8,
        alpha: float | None = None,
        rslora: bool = False,
        alpha_auto_scale: bool = True,
        slots: int = 0,
        transposed: bool = False,
        experts: int = 0,
    ) -> None:
        """Create the factors, as Update; with `transposed`, `shape` is (out, in), and the parameter is (in, out).

        Raises SpecError unless `experts` is the first of three numbers of `shape`.
        """
        super().__init__(shape, rank, alpha, rslora, alpha_auto_scale, slots)
        self.transposed, self.experts = transposed, experts
        if experts and (len(self.shape) != 3 or self.shape[0] != experts):
            raise SpecError(f"experts is {experts}, and the shape {self.shape}: it must be [{experts}, n, m]")
        self.down = nn.Parameter(torch.empty(rank, *self.shape[1:]))
        self.up = nn.Parameter(torch.zeros(self.shape[0], rank, *[1] * (len(self.shape) - 2)))
        if experts:
            self.down = nn.Parameter(torch.empty(rank, experts, self.shape[2]))
            self.up = nn.Parameter(torch.zeros(self.shape[1], rank, experts))
        nn.init.kaiming_uniform_(self.down.flatten(0, 1) if experts else self.down, a=math.sqrt(5))
        self.banked()

    @classmethod
    def at(cls, site: Site, rank: int = 8, slots: int = 0, rank_max: int | None = None, **options: Any) -> Self:
        options |= {"transposed": "TransposedLinear" in site.classes, "experts": count_experts(site)}
        return super().at(site, rank, slots, rank_max, **options)

    def bank(self) -> dict[str, Any]:
        return {**super().bank(), **({"experts": self.experts} if self.experts else {})}

    def update(self, own: Mapping[str, Tensor]) -> Tensor:
        if self.experts:
            return multiply_experts(own["up"], own["down"])
        made = super().update(own)
        return made.T if self.transposed else made


class Dora(LoraWeight):
    """magnitude * V / |V| with V = value + scale * up @ down: weight-decomposed LoRA (Liu et al. 2024, arXiv 2402.09353).

    The norm is that of each output channel, or of each input channel as LyCORIS has it too, and gets no gradient (section
    4.3 of the paper). `magnitude` is the norm of the weight when new, (out) or (1, out, 1, ...) for convolutions as in PEFT.
    A channel of zeros is left alone until the update has given it a direction.

    With `slots`, each adds its own magnitude * V / |V| - value, times how much of it is taken: that of one adapter in full is
    its own tool's, several add up, and the order of them does not matter. A slot whose magnitudes are zeros has nothing here.
    """

    update_kind = UpdateKind(
        name="dora",
        forms=({"down": "r i ...", "up": "o r ...", "magnitude": "m ..."},),
        neutral={"up": 0, "magnitude": compute_norm},
        delta=_delta,
        formats={
            "peft": PEFT_DORA, "diffusers": PEFT_DORA, "kohya": KOHYA_DORA, "comfy": KOHYA_DORA, "lycoris": KOHYA_DORA
        },
        ranked=("up",),
    )
    neutral = True
    by_sample = "fxplug.blocks:GatheredDora"

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
        """Create the factors; `dim` is the dimension of `shape` that has magnitudes, 0 or 1. Raises SpecError as LoraWeight
        does."""
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
        """Make an update for any weight of two or more dimensions; its output channels follow from the kind of layer.

        `by` selects the channels that have magnitudes. Raises SpecError for another word.
        """
        if by not in ("output", "input"):
            raise SpecError(f"by must be output or input, not {by!r}")
        value = get_weight(site, "a low-rank update")
        check_single(site, "a low-rank update with magnitudes")
        dim = get_output_dim(site) if by == "output" else 1 - get_output_dim(site)
        rank = rank_max if slots and rank_max is not None else rank
        turned = "TransposedLinear" in site.classes
        shape = value.shape[::-1] if turned else value.shape
        block = cls(shape, rank, alpha, rslora, alpha_auto_scale, dim, slots, turned)
        if not slots:
            # the norm in the dtype that the weight has, or it would not be the one that forward finds
            block.magnitude.data = compute_norm(value.detach(), block.own_dim).reshape(block.magnitude.shape)
        return block

    @property
    def own_dim(self) -> int:
        """Dimension of the parameter itself that has magnitudes."""
        return 1 - self.dim if self.transposed else self.dim

    def forward(self, value: Tensor, uniform: Tensor | None = None) -> Tensor:
        if uniform is not None:
            return super().forward(value, uniform)
        return match_parameter(decompose(self.updated(value), self.magnitude, self.own_dim, value.dtype), value)

    def change(self, value: Tensor, own: Mapping[str, Tensor]) -> Tensor:
        magnitude = own["magnitude"]
        made = decompose(value + self.update(own), magnitude, self.own_dim, value.dtype) - value
        return torch.where((magnitude != 0).any(), made, 0.0)

    def bank(self) -> dict[str, object]:
        return {**super().bank(), "dim": self.dim}
