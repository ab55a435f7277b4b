"""LoHa: the Hadamard product of two low-rank updates (FedPara, Hyeon-Woo et al. 2022, arXiv 2108.06098)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from .base import UpdateKind
from .low_rank import make_factor, make_hadamard_halves
from .weight_update import Update


def _delta(own: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
    return (make_factor(own, "hada_w1") * make_factor(own, "hada_w2")).reshape(*shape)


class Loha(Update):
    """value + scale * (w1_a @ w1_b) * (w2_a @ w2_b): a low-rank Hadamard product (FedPara, Hyeon-Woo et al. 2021,
    arXiv 2108.06098; LyCORIS, Yeh et al. 2023, arXiv 2309.14859).

    Parameters have the names and shapes that LyCORIS' files have: `hada_w1_a` (out, rank), `hada_w1_b` (rank, in * kernel);
    with `tucker` on a kernel larger than 1, `hada_w1_a` (rank, out), `hada_w1_b` (rank, in) and a core `hada_t1`
    (rank, rank, *kernel); the same for 2. `hada_w2_b` is zero when new.
    """

    update_kind = UpdateKind(
        name="loha",
        forms=(
            {"hada_w1_a": "o r", "hada_w1_b": "r i", "hada_w2_a": "o s", "hada_w2_b": "s i"},
            {
                "hada_w1_a": "r o", "hada_t1": "r u ...k", "hada_w1_b": "u i",
                "hada_w2_a": "s o", "hada_t2": "s v ...k", "hada_w2_b": "v i",
            },
        ),
        ranks="rsuv",
        neutral={"hada_w2_b": 0},
        delta=_delta,
        factors=("hada_w1", "hada_w2"),
        join=make_hadamard_halves,
        formats={"peft": {}, "kohya": {}, "comfy": {}, "lycoris": {}},
        ranked=("hada_w1_b",),
        options=lambda own, rank, shape: {"tucker": "hada_t1" in own},
    )  # fmt: skip
    asks = "a Hadamard product"
    hada_w1_a: Tensor
    hada_w1_b: Tensor
    hada_w2_a: Tensor
    hada_w2_b: Tensor
    hada_t1: Tensor
    hada_t2: Tensor

    def __init__(
        self,
        shape: Sequence[int],
        rank: int = 8,
        alpha: float | None = None,
        tucker: bool = False,
        rslora: bool = False,
        alpha_auto_scale: bool = True,
        slots: int = 0,
    ) -> None:
        """Create the factors; arguments are those of Update."""
        super().__init__(shape, rank, alpha, rslora, alpha_auto_scale, slots)
        self.tucker = tucker
        out, inner, *kernel = self.shape
        self.cores = tucker and math.prod(kernel) > 1
        for n in (1, 2):
            if self.cores:
                a, b = (rank, out), (rank, inner)
                self.register_parameter(f"hada_t{n}", nn.Parameter(torch.empty(rank, rank, *kernel)))
            else:
                a, b = (out, rank), (rank, inner * math.prod(kernel))
            self.register_parameter(f"hada_w{n}_a", nn.Parameter(torch.empty(a)))
            self.register_parameter(f"hada_w{n}_b", nn.Parameter(torch.empty(b)))
        for parameter in self.parameters():
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
        nn.init.zeros_(self.hada_w2_b)
        self.banked()

    def updated(self, value: Tensor, uniform: Tensor | None = None) -> Tensor:
        if uniform is not None:
            return super().updated(value, uniform)
        own: dict[str, Tensor] = dict(self.named_parameters())
        own["hada_w1_a"] = own["hada_w1_a"] * self.scale  # and one pass over the whole, not three
        return torch.addcmul(value, *(make_factor(own, name).reshape(self.shape) for name in ("hada_w1", "hada_w2")))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}{', tucker' if self.cores else ''}"
