"""LoKr: an update that is a Kronecker product (KronA, Edalati et al. 2022, arXiv 2212.10650; as LyCORIS has it)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SpecError, shown
from ..low_rank import factor, factorization, kronecker
from .weight_update import Update, divisors


class Lokr(Update):
    """value + scale * kron(w1, w2): a Kronecker product (LyCORIS, Yeh et al. 2023, arXiv 2309.14859).

    Widths are split as in `factorization`. Parameters have the names and shapes that LyCORIS' files have: `lokr_w1`, or with
    `decompose_both` its factors `lokr_w1_a`, `lokr_w1_b` where the rank is below half of the longer side; `lokr_w2`, or by the
    same rule `lokr_w2_a`, `lokr_w2_b`, and with `tucker` on a kernel larger than 1 a core `lokr_t2`. Two full matrices are
    not scaled. `lokr_w2` or `lokr_w2_b` is zero when new.
    """

    asks = "a Kronecker product"
    lokr_w1: Tensor
    lokr_w1_a: Tensor
    lokr_w1_b: Tensor
    lokr_w2: Tensor
    lokr_w2_a: Tensor
    lokr_w2_b: Tensor
    lokr_t2: Tensor

    def __init__(
        self,
        shape: Sequence[int],
        rank: int = 8,
        alpha: float | None = None,
        factor: int = -1,
        decompose_both: bool = False,
        tucker: bool = False,
        full_matrix: bool = False,
        rslora: bool = False,
        alpha_auto_scale: bool = True,
        slots: int = 0,
    ) -> None:
        """`shape` is that of the parameter, two or more dimensions. `full_matrix` decomposes nothing, whatever the rank.

        Raises SpecError for a rank below 1, for a factor that is no number above 0 or -1 or that divides neither width, and
        as `scaling` does.
        """
        super().__init__(shape, rank, alpha, rslora, alpha_auto_scale, slots)
        self.factor, self.decompose_both, self.tucker, self.full_matrix = factor, decompose_both, tucker, full_matrix
        out, inner, *kernel = self.shape
        check_factor(factor, out, inner)
        (a, b), (c, d) = factorization(out, factor), factorization(inner, factor)
        split_1 = decompose_both and rank < max(a, c) / 2 and not full_matrix
        split_2 = rank < max(b, d) / 2 and not full_matrix
        self.core = split_2 and tucker and math.prod(kernel) > 1
        shapes: dict[str, tuple[int, ...]] = {"w1_a": (a, rank), "w1_b": (rank, c)} if split_1 else {"w1": (a, c)}
        if self.core:
            shapes |= {"t2": (rank, rank, *kernel), "w2_a": (rank, b), "w2_b": (rank, d)}
        elif split_2:
            shapes |= {"w2_a": (b, rank), "w2_b": (rank, d * math.prod(kernel))}
        else:
            shapes |= {"w2": (b, d, *kernel)}
        for name, size in shapes.items():
            parameter = nn.Parameter(torch.empty(size))
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
            self.register_parameter(f"lokr_{name}", parameter)
        nn.init.zeros_(self.lokr_w2_b if split_2 else self.lokr_w2)
        self.split_1, self.split_2 = split_1, split_2
        if not split_1 and not split_2 and not slots:
            self.scale.fill_(1.0)
        self.banked()

    def update(self, own: Mapping[str, Tensor]) -> Tensor:
        w1, w2 = factor(own, "lokr_w1", "lokr_t1"), factor(own, "lokr_w2", "lokr_t2")
        return kronecker(w1, w2.flatten(1)).reshape(self.shape)

    def extra_repr(self) -> str:
        parts = [name.removeprefix("lokr_") for name, _ in self.named_parameters()]
        return f"{super().extra_repr()}, factor={self.factor}, {' '.join(parts)}"


def check_factor(factor: Any, out: int, inner: int) -> None:
    """Raise SpecError unless `factor` is -1, or divides one of the widths."""
    if not isinstance(factor, int) or isinstance(factor, bool) or (factor < 1 and factor != -1):
        raise SpecError(f"factor must be -1 (as near to a square as can be) or a whole number above 0, not {shown(factor)}")
    if factor > 0 and out % factor and inner % factor:
        raise SpecError(
            f"factor {factor} divides neither the {out} outputs nor the {inner} inputs; "
            f"{out} has the divisors {divisors(out)}, {inner} has {divisors(inner)}"
        )
