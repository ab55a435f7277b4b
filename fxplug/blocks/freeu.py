"""FreeU: the skips of a UNet lose some of their low frequencies, its backbone gains."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.errors import SpecError
from .base import Block

if TYPE_CHECKING:
    from ..core.rewriter.sites import Site


def scale_low(x: Tensor, scale: Tensor) -> Tensor:
    """Multiply the frequencies 0 and -1 of x in height and width by `scale`: FreeU's filter (Si et al. 2023, arXiv 2309.11497).

    x is (..., height, width), scale one number. It equals the Fourier transform, a mask on four of its coefficients, the
    inverse and the real part; but four coefficients need no transform: they are two thin matrix products with sines and
    cosines, in float32 at least, which compile and export unlike complex numbers. The result has the dtype of x.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rows, columns = (_waves(n, wide) for n in x.shape[-2:])
    # the real part of (a + ib)(c + id) is ac - bd: exchanging sine and cosine on both sides gives bd from ac
    found = rows.mT @ wide @ columns
    found = found - _turned(_turned(found).mT).mT
    return (wide + (rows @ found @ columns.mT) * (scale - 1)).to(x.dtype)


def _waves(size: int, like: Tensor) -> Tensor:
    """Return constant, cosine and sine of one period over `size` positions, as columns; only the constant if there is one."""
    angle = torch.arange(size, device=like.device, dtype=like.dtype) * (2 * math.pi / size)
    second = float(size > 1)  # frequency -1 is frequency 0 where there is one place
    return torch.stack([torch.ones_like(angle), angle.cos() * second, angle.sin() * second], -1) / math.sqrt(size)


def _turned(coefficients: Tensor) -> Tensor:
    """Return the coefficients of the imaginary part in dimension -2: none of the constant, the sine's, minus the cosine's."""
    constant, cosine, sine = coefficients.unbind(-2)
    return torch.stack([torch.zeros_like(constant), sine, -cosine], -2)


class FreeU(Block):
    """Stands for the concatenation of a UNet's hidden state and a skip (FreeU, arXiv 2309.11497).

    forward(hidden, skip, backbone, low): half of the channels of `hidden` (batch, channels, height, width) are multiplied by
    `backbone`, the low frequencies of `skip` (batch, any, height, width) by `low`, both one number; then both are
    concatenated in dimension 1.
    """

    @classmethod
    def at(cls, site: Site) -> FreeU:
        """Make the block. Raises SpecError unless the operation concatenates two feature maps."""
        hidden, skip = (argument.shape for argument in site.args[:2])
        if len(hidden) != 4 or len(skip) != 4 or hidden[2:] != skip[2:]:
            raise SpecError(f"FreeU needs two feature maps of one size, not {site.args[0]} and {site.args[1]}")
        return cls()

    def forward(self, hidden: Tensor, skip: Tensor, backbone: Tensor, low: Tensor) -> Tensor:
        half = hidden.shape[1] // 2
        first = hidden[:, :half] * backbone
        return torch.cat([first, hidden[:, half:], scale_low(skip, low)], 1)
