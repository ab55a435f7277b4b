"""Attention that sees only near tokens, halves of a batch, and the mark of a place where a step may do with them.

DiTFastAttn (Yuan et al. 2024, arXiv 2406.08552).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.errors import GuardError
from .base import Block, check_count
from .step_marks import Mark


class Window(Block):
    """Attention of tokens to those at most `window` before or behind them: forward(query, key, value, scale=None).

    Tensors are (..., heads, tokens, features) with as many keys as queries, or (..., tokens, features). Computed for as many
    queries at a time as the window is wide, it takes 3 * window / tokens of the products. One that holds all tokens is plain
    attention.
    """

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        return windowed(query, key, value, self.window, scale)


class Half(Block):
    """One half of the batch: forward(x, like=None) gives it of an `x` whose first dimension is that of `like`, else `x`.

    Raises GuardError for an odd batch.
    """

    def __init__(self, which: int = 1) -> None:
        super().__init__()
        self.which = which

    def forward(self, x: Tensor, like: Tensor | None = None) -> Tensor:
        if like is not None and x.shape[0] != like.shape[0]:
            return x
        if x.shape[0] % 2:
            raise GuardError(f"a batch of {x.shape[0]} cannot be split into halves: sharing the guidance needs an even batch")
        return torch.chunk(x, 2)[self.which]


class Attend(Mark):
    """Marks what leaves an attention: forward(y) gives y. `window` is how many tokens on either side a token may see."""

    def __init__(self, window: int = 64) -> None:
        """Create the mark. Raises SpecError for a window that is no integer, 0 or more."""
        super().__init__()
        self.window = check_count("window", window, 0)
        self.near, self.halves = Window(window), nn.ModuleList([Half(0), Half(1)])

    def forward(self, y: Tensor) -> Tensor:
        return y


def windowed(query: Tensor, key: Tensor, value: Tensor, window: int, scale: float | None = None) -> Tensor:
    """Compute attention of tokens to those at most `window` away, as `Window` does."""
    tokens = query.shape[-2]
    if key.dim() > 2 and key.shape[-3] != query.shape[-3]:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    if window >= tokens - 1:
        return F.scaled_dot_product_attention(query, key, value, scale=scale)
    size = max(window, 1)  # queries at a time
    count = -(-tokens // size)
    span, more = size + 2 * window, count * size - tokens
    lead = query.shape[:-2]
    query = F.pad(query, [0, 0, 0, more]).reshape(-1, count, size, query.shape[-1])
    key, value = (
        F.pad(t, [0, 0, window, window + more]).unfold(-2, span, size).transpose(-1, -2).reshape(-1, count, span, t.shape[-1])
        for t in (key, value)
    )
    row = torch.arange(count * size, device=query.device).view(count, size, 1)
    column = row[:, :1] + torch.arange(span, device=query.device) - window
    # what was put behind the last token sees all, and is cut off again
    seen = ((row - column).abs() <= window) & (column >= 0) & (column < tokens) | (row >= tokens)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale)
    return out.reshape(*lead, count * size, out.shape[-1]).narrow(-2, 0, tokens)
