"""Tokens that are learnt and put before the others (VPT, Jia et al. 2022, arXiv 2203.12119)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.errors import SpecError
from .base import Block, check_count, check_share, find_attribute
from .regions import check_no_regions

if TYPE_CHECKING:
    from ..core.rewriter.sites import Site, Value


class Prompt(Block):
    """x with learned tokens behind its first `prefix` tokens (VPT, Jia et al. 2022, arXiv 2203.12119).

    x is (batch, tokens, width); the prefix is the class and register tokens. The tokens are drawn evenly from
    +-sqrt(3 / width), which for a ViT-B/16 is what the authors' code does.

    Attention that adds a bias or a rotation for each pair of positions (BEiT, EVA) has none for them; `verify` says so.
    """

    def __init__(self, width: int, tokens: int = 10, prefix: int = 1, dropout: float = 0.0) -> None:
        """Create the tokens. Raises SpecError for fewer than one token or a dropout outside [0, 1)."""
        super().__init__()
        self.tokens, self.prefix = check_count("tokens", tokens), check_count("prefix", prefix, 0)
        self.width, self.dropout = width, check_share("dropout", dropout)
        self.prompt = nn.Parameter(torch.empty(tokens, width))
        nn.init.uniform_(self.prompt, -math.sqrt(3 / width), math.sqrt(3 / width))

    @classmethod
    def at(cls, site: Site, tokens: int = 10, prefix: int | None = None, dropout: float = 0.0) -> Prompt:
        """Make tokens for any sequence; the prefix is by default the `num_prefix_tokens` of the model around it. Raises
        SpecError as `regions.check_no_regions`."""
        check_no_regions(site.root)
        value = site.args[0]
        return cls(value.shape[2], tokens, prefix_tokens(site, value) if prefix is None else prefix, dropout)

    def forward(self, x: Tensor) -> Tensor:
        prompt = F.dropout(self.prompt, self.dropout, self.training).expand(x.shape[0], -1, -1)
        return torch.cat([x[:, : self.prefix], prompt.to(x.dtype), x[:, self.prefix :]], 1)

    def extra_repr(self) -> str:
        return f"tokens={self.tokens}, prefix={self.prefix}, dropout={self.dropout:g}"


class Drop(Block):
    """y without the tokens that a Prompt put behind its first `prefix` tokens; y is (batch, tokens, width).

    `entered`, a value where the tokens came in, is not used: a rule names it so that each such place has its Drop.
    """

    def __init__(self, tokens: int = 10, prefix: int = 1) -> None:
        """Create the block. Raises SpecError for fewer than one token."""
        super().__init__()
        self.tokens, self.prefix = check_count("tokens", tokens), check_count("prefix", prefix, 0)

    @classmethod
    def at(cls, site: Site, tokens: int = 10, prefix: int | None = None) -> Drop:
        """Make the block; arguments are those of Prompt.at."""
        return cls(tokens, prefix_tokens(site, site.args[0]) if prefix is None else prefix)

    def forward(self, y: Tensor, entered: Tensor | None = None) -> Tensor:
        return torch.cat([y[:, : self.prefix], y[:, self.prefix + self.tokens :]], 1)

    def extra_repr(self) -> str:
        return f"tokens={self.tokens}, prefix={self.prefix}"


def prefix_tokens(site: Site, value: Value) -> int:
    """Return `num_prefix_tokens` of the nearest module around a site that has it. Raises SpecError."""
    if len(value.shape) != 3:
        raise SpecError(f"prompt tokens need a value (batch, tokens, width), not {value}")
    if (found := find_attribute(site, "num_prefix_tokens")) is not None:
        return found
    raise SpecError(
        "the number of class and register tokens is not known, since the model has no 'num_prefix_tokens': set prefix: 1, or "
        "prefix: 0 if there are none"
    )
