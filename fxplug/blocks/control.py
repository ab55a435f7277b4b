"""Residuals of a ControlNet or T2I-Adapter that are added, and when and how strongly they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..core.errors import SpecError, quote
from .base import Block

if TYPE_CHECKING:
    from ..core.rewriter.sites import Site

CLOSE = 1e-6  # a step of the schedule is about 1e-3: this only makes up for rounding in float32


class Add(Block):
    """value + residual * strength, as ControlNet (arXiv 2302.05543) and T2I-Adapter (arXiv 2302.08453) add theirs.

    `value` (batch, ...) is floating point; `residual` has its dtype and shape, or 1 where it is the same everywhere;
    `strength` is one number, or one for each sample (batch,), of any real dtype. Zero leaves `value` as it was.
    """

    inline: ClassVar[bool] = True
    neutral = True

    @classmethod
    def at(cls, site: Site) -> Add:
        """Make the block. Raises SpecError if the residual does not fit the value that it is added to."""
        value, residual = site.args[:2]
        if not _fits(residual.shape, value.shape):
            raise SpecError(
                f"{residual} does not fit {value}: a residual must have the shape of the value it is added to, so the network "
                "was made for a model of other widths or sizes, or needs a condition of another size"
            )
        return cls()

    def forward(self, value: Tensor, residual: Tensor, strength: Tensor) -> Tensor:
        return value + residual * align_to_samples(strength, value)


def _fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(shape) == len(wanted) and all(a in (1, b) for a, b in zip(shape, wanted, strict=True))


def align_to_samples(strength: Tensor, value: Tensor) -> Tensor:
    """Reshape one number, or one for each sample, to multiply a tensor like `value` (batch, ...) and keep its dtype."""
    # type_as and not `to`: a graph would keep the dtype that it was traced with
    return strength.type_as(value).reshape(-1, *[1] * (value.dim() - 1)) if strength.dim() else strength


class Gate(Block):
    """Lets a strength act in a part of the noise schedule only, chosen by tensors, so that another part recompiles nothing.

    forward(timestep, strength, start, end) gives the timestep as it came, and the strength where
    start <= 1 - timestep / timesteps <= end, else zero. `timestep` is one number or one for each sample (batch,), of any
    real dtype, and runs from `timesteps` (all noise) down to 0; the other three are one number each.

    `start` and `end` are fractions of the noise schedule. The pipelines of diffusers count fractions of the steps that they
    take: step i of n acts when start <= i / n and (i + 1) / n <= end. With steps evenly spaced from the last timestep
    down, these starts are the same, and ours has the one step more that begins at `end`.
    """

    inline: ClassVar[bool] = True
    neutral = True
    hands_on = True

    def __init__(self, timesteps: float = 1000) -> None:
        """Create the gate; `timesteps` is the timestep of pure noise. Raises SpecError unless it is above zero."""
        super().__init__()
        if isinstance(timesteps, bool) or not isinstance(timesteps, (int, float)) or timesteps <= 0:
            raise SpecError(f"timesteps must be a number above zero, not {quote(timesteps)}")
        self.timesteps = timesteps

    def forward(self, timestep: Tensor, strength: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        done = 1 - timestep.to(torch.float32) / self.timesteps
        # the numbers stand on the right, where they may be plain ones too
        return timestep, ((done + CLOSE >= start) & (done - CLOSE <= end)) * strength
