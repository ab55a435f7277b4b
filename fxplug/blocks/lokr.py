"""LoKr: an update that is a Kronecker product (KronA, Edalati et al. 2022, arXiv 2212.10650; as LyCORIS has it)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import SpecError, quote
from .base import UpdateKind
from .low_rank import choose_lokr_shapes, make_kronecker, make_kronecker_halves
from .low_rank import make_factor as factor_of
from .weight_update import Update, list_divisors

FIRST = ({"lokr_w1": "a c"}, {"lokr_w1_a": "a r", "lokr_w1_b": "r c"})
SECOND = (
    {"lokr_w2": "b d ...k"},
    {"lokr_w2_a": "b q", "lokr_w2_b": "q d"},
    {"lokr_w2_a": "q b", "lokr_t2": "q p ...k", "lokr_w2_b": "p d"},
)


def _delta(own: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
    return make_kronecker(factor_of(own, "lokr_w1"), factor_of(own, "lokr_w2").flatten(1)).reshape(*shape)


def _options(own: Mapping[str, Tensor], rank: int, shape: Sequence[int]) -> dict[str, Any] | None:
    """Give the options of a pass with these factors, by the sizes of the first; None where no block has such."""
    there = {name: tuple(tensor.shape) for name, tensor in own.items()}
    first = there["lokr_w1"] if "lokr_w1" in there else (there["lokr_w1_a"][0], there["lokr_w1_b"][1])
    split, cores = ("lokr_w1_a" in there, "lokr_w2_a" in there), "lokr_t2" in there
    fits = choose_lokr_shapes(shape, rank, cores=cores, first=first, split=split) == there
    return {"first": first, "decompose": split, "tucker": cores} if fits else None


class Lokr(Update):
    """value + scale * kron(w1, w2): a Kronecker product (LyCORIS, Yeh et al. 2023, arXiv 2309.14859).

    Widths are split as in `factorization`. Parameters have the names and shapes that LyCORIS' files have: `lokr_w1`, or with
    `decompose_both` its factors `lokr_w1_a`, `lokr_w1_b` where the rank is below half of the longer side; `lokr_w2`, or by the
    same rule `lokr_w2_a`, `lokr_w2_b`, and with `tucker` on a kernel larger than 1 a core `lokr_t2`. Two full matrices are
    not scaled. `lokr_w2` or `lokr_w2_b` is zero when new.
    """

    update_kind = UpdateKind(
        name="lokr",
        forms=tuple({**first, **second} for first, second in product(FIRST, SECOND)),
        ranks="rqp",
        outputs="a*b",
        inputs="c*d",
        neutral={"lokr_w2": 0, "lokr_w2_b": 0},
        delta=_delta,
        factors=("lokr_w1", "lokr_w2"),
        join=make_kronecker_halves,
        formats={"peft": {}, "diffusers": {}, "kohya": {}, "comfy": {}, "lycoris": {}},
        ranked=("lokr_w1_b", "lokr_w2_b"),
        options=_options,
    )
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
        first: Sequence[int] | None = None,
        decompose: Sequence[bool] | None = None,
    ) -> None:
        """Create the factors; `shape` is that of the parameter, two or more dimensions. `full_matrix` decomposes nothing,
        whatever the rank; `first` sets rows and columns of the first matrix instead of `factor`, and `decompose` whether the
        first and the second are decomposed, instead of the rank.

        Raises SpecError for a rank below 1, for a factor that is no number above 0 or -1 or that divides neither width, for
        sizes of `first` that do not divide them, and as `scaling` does.
        """
        super().__init__(shape, rank, alpha, rslora, alpha_auto_scale, slots)
        self.factor, self.decompose_both, self.tucker, self.full_matrix = factor, decompose_both, tucker, full_matrix
        self.decompose = None if decompose is None else check_decompose(decompose)
        self.first = None if first is None else check_first(first, self.shape)
        if first is None:
            check_factor(factor, *self.shape[:2])
        shapes = choose_lokr_shapes(self.shape, rank, factor, decompose_both, tucker, full_matrix, self.first, self.decompose)
        split_1, split_2, self.core = "lokr_w1_a" in shapes, "lokr_w2_a" in shapes, "lokr_t2" in shapes
        for name, size in shapes.items():
            parameter = nn.Parameter(torch.empty(size))
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
            self.register_parameter(name, parameter)
        nn.init.zeros_(self.lokr_w2_b if split_2 else self.lokr_w2)
        self.split_1, self.split_2 = split_1, split_2
        if not split_1 and not split_2 and not slots:
            self.scale.fill_(1.0)
        self.banked()

    def extra_repr(self) -> str:
        parts = [name.removeprefix("lokr_") for name, _ in self.named_parameters()]
        return f"{super().extra_repr()}, factor={self.factor}, {' '.join(parts)}"


def check_factor(factor: Any, out: int, inner: int) -> None:
    """Raise SpecError unless `factor` is -1, or divides one of the widths."""
    if not isinstance(factor, int) or isinstance(factor, bool) or (factor < 1 and factor != -1):
        raise SpecError(f"factor must be -1 (as near to a square as possible) or a whole number above 0, not {quote(factor)}")
    if factor > 0 and out % factor and inner % factor:
        raise SpecError(
            f"factor {factor} divides neither the {out} outputs nor the {inner} inputs; "
            f"{out} has the divisors {list_divisors(out)}, {inner} has {list_divisors(inner)}"
        )


def check_first(first: Any, shape: Sequence[int]) -> list[int]:
    """Raise SpecError unless `first` is two numbers, of which the one divides the outputs and the other the inputs."""
    out, inner = shape[0], math.prod(shape[1:])
    numbers = isinstance(first, (list, tuple)) and len(first) == 2 and all(type(n) is int and n > 0 for n in first)
    if not numbers or out % first[0] or inner % first[1]:
        raise SpecError(f"first must be two numbers that divide {out} outputs and {inner} inputs, not {quote(first)}")
    return list(first)


def check_decompose(decompose: Any) -> list[bool]:
    """Raise SpecError unless `decompose` is two truth values."""
    if not isinstance(decompose, (list, tuple)) or [type(one) for one in decompose] != [bool, bool]:
        raise SpecError(f"decompose must be two booleans, for the first matrix and the second, not {quote(decompose)}")
    return list(decompose)
