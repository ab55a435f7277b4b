"""Several updates of one layer as one: weighted sums, and what takes part of each before it is summed.

Pure functions on tensors of one shape, with the formulas of PEFT's `add_weighted_adapter` (peft.utils.merge_utils): TIES (Yadav
et al. 2023, arXiv 2306.01708), DARE (Yu et al. 2023, arXiv 2311.03099), and pruning by magnitude.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..core.errors import SpecError, did_you_mean, quote

SPARSE = ("ties", "dare_linear", "dare_ties", "magnitude_prune")
HOWS = ("linear", "cat", "svd", *SPARSE, *(f"{kind}_svd" for kind in SPARSE), "kohya")


@dataclass(frozen=True)
class Combination:
    """How updates are combined, see `file_tools.merge_adapters`. Raises SpecError for arguments that do not go together."""

    how: str = "cat"
    rank: int | None = None
    density: float | None = None
    sign: str = "total"
    clamp: float | None = None
    seed: int = 0
    draws: torch.Generator = field(init=False, default_factory=torch.Generator)

    def __post_init__(self) -> None:
        how, rank, density, clamp = self.how, self.rank, self.density, self.clamp
        if how not in HOWS:
            raise SpecError(f"no merge method '{how}'{did_you_mean(how, HOWS)}; there are {', '.join(HOWS)}")
        sparse = self.kind in SPARSE
        if sparse != (density is not None) or (density is not None and not 0 < density <= 1):
            what = "a density above 0 and at most 1, the share of values to keep" if sparse else "no density"
            raise SpecError(f"'{how}' takes {what}, not {quote(density)}")
        only = f"methods that are svd or end in _svd, and this is {how}" if not self.by_svd else "these"
        if rank is not None and (not self.by_svd or isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
            raise SpecError(f"rank must be a whole number, 1 or more, for {only}; not {quote(rank)}")
        if clamp is not None and not (self.by_svd and 0 < clamp <= 1):
            raise SpecError(f"clamp must be a quantile, above 0 and at most 1, for {only}; not {quote(clamp)}")
        if self.sign not in ("total", "frequency"):
            raise SpecError(f"sign must be 'total' or 'frequency', not {quote(self.sign)}")
        self.draws.manual_seed(self.seed)

    @property
    def by_svd(self) -> bool:
        """Return whether products are combined, and the singular values of their sum truncated."""
        return self.how == "svd" or self.how.endswith("_svd")

    @property
    def kind(self) -> str:
        """Name of the operation on tensors of one shape: one of `SPARSE`, or "linear"."""
        kind = self.how.removesuffix("_svd")
        return kind if kind in SPARSE else "linear"

    def combine(self, tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Return the weighted sum of tensors of one shape, of which all but "linear" keep a share `density` first.

        That share is the largest numbers of each ("ties", "magnitude_prune"), or random ones, divided by it ("dare_linear",
        "dare_ties"). With ties only the numbers with the majority sign count, and are averaged: the sign of the sum ("total"),
        or of more tensors ("frequency").
        """
        kind, density = self.kind, self.density or 1.0
        if density < 1 and kind.startswith("dare"):
            tensors = [t * torch.bernoulli(torch.full_like(t, density), generator=self.draws) / density for t in tensors]
        elif density < 1 and kind != "linear":
            tensors = [_largest(t, int(density * t.numel())) for t in tensors]
        stacked = torch.stack(list(tensors))
        scaled = stacked * torch.tensor(list(weights), dtype=stacked.dtype).view(-1, *[1] * (stacked.dim() - 1))
        if not kind.endswith("ties"):
            return scaled.sum(0)
        signs = stacked.sign()
        agree = signs == torch.where((stacked if self.sign == "total" else signs).sum(0) >= 0, 1, -1)
        return (scaled * agree).sum(0) / agree.sum(0).clamp(min=1.0)


def _largest(value: Tensor, number: int) -> Tensor:
    """Return a tensor with its largest numbers, and zeros for the others."""
    mask = torch.zeros(value.numel(), dtype=value.dtype)
    mask[value.abs().flatten().topk(number).indices] = 1
    return value * mask.view(value.shape)
