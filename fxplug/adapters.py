"""Blocks on activations: shift and scale, bottleneck adapters, prompt tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block, along, torch_class, width
from .errors import SpecError

if TYPE_CHECKING:
    from .match import Site, Value


class Ssf(Block):
    """y * scale + shift per channel, one and zero when new (SSF, Lian et al. 2022, arXiv 2210.08823).

    y is (..., features), or (batch, channels, *space) when `dim` is 1. The authors' code draws both around these values with a
    deviation of 0.02; here a new one changes nothing.
    """

    neutral = True

    def __init__(self, width: int, dim: int = -1) -> None:
        super().__init__()
        self.width, self.dim = width, dim
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    @classmethod
    def at(cls, site: Site, dim: int | None = None) -> Ssf:
        """A scale and a shift for any tensor; `dim` is where its channels are, if that is not to be guessed."""
        return cls(*width(site, site.args[0], dim))

    def forward(self, y: Tensor) -> Tensor:
        return y * along(self.scale, y, self.dim) + along(self.shift, y, self.dim)


class Adapter(Block):
    """y + scale * up(act(down(x))): a bottleneck beside or behind a sublayer.

    Behind it (args y, y) it is the serial adapter of Houlsby et al. 2019, arXiv 1902.00751; beside it (args x, y) the
    parallel one of He et al. 2021, arXiv 2110.04366, who take a scale of 4. x and y are (..., features), or
    (batch, channels, *space) when `dim` is 1, and agree in all other dimensions. `up` is zero when new.
    """

    neutral = True

    def __init__(
        self,
        in_width: int,
        width: int,
        bottleneck: int = 16,
        act: str = "GELU",
        scale: float = 1.0,
        dropout: float = 0.0,
        dim: int = -1,
    ) -> None:
        """`act` is the name of a class in torch.nn. Raises SpecError for a bottleneck below 1 or a dropout outside [0, 1)."""
        super().__init__()
        if not isinstance(bottleneck, int) or isinstance(bottleneck, bool) or bottleneck < 1:
            raise SpecError(f"bottleneck must be a whole number, 1 or more, not {bottleneck!r}")
        if not 0 <= dropout < 1:
            raise SpecError(f"dropout must be at least 0 and below 1, not {dropout!r}")
        self.in_width, self.width, self.bottleneck, self.act, self.dropout, self.dim = (
            in_width, width, bottleneck, act, dropout, dim,
        )  # fmt: skip
        self.down, self.up = nn.Linear(in_width, bottleneck), nn.Linear(bottleneck, width)
        self.activation = torch_class(act)()
        self.register_buffer("factor", torch.tensor(scale, dtype=torch.float32))
        self.scale = scale
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        for parameter in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(parameter)

    @classmethod
    def at(
        cls,
        site: Site,
        bottleneck: int = 16,
        act: str = "GELU",
        scale: float = 1.0,
        dropout: float = 0.0,
        dim: int | None = None,
    ) -> Adapter:
        """An adapter between the two values that the rule's `args` name."""
        x, y = site.args
        features, dim = width(site, y, dim)
        rest = [[n for i, n in enumerate(v.shape) if i != dim % max(len(v.shape), 1)] for v in (x, y)]
        if rest[0] != rest[1]:
            raise SpecError(f"an adapter from {x} to {y}: only the widths (dimension {dim}) may differ; put a serial one here")
        return cls(x.shape[dim], features, bottleneck, act, scale, dropout, dim)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        inner: Tensor = self.activation(self.down(x if self.dim == -1 else x.movedim(self.dim, -1)))
        update: Tensor = self.up(F.dropout(inner, self.dropout, self.training)) * self.factor
        return y + (update if self.dim == -1 else update.movedim(-1, self.dim))

    def extra_repr(self) -> str:
        return f"scale={self.scale:g}, dropout={self.dropout:g}"


class Prompt(Block):
    """x with learned tokens behind its first `prefix` tokens (VPT, Jia et al. 2022, arXiv 2203.12119).

    x is (batch, tokens, width); the prefix is the class and register tokens. The tokens are drawn evenly from
    +-sqrt(3 / width), which for a ViT-B/16 is what the authors' code does.

    Attention that adds a bias or a rotation for each pair of positions (BEiT, EVA) has none for them; `verify` says so.
    """

    def __init__(self, width: int, tokens: int = 10, prefix: int = 1, dropout: float = 0.0) -> None:
        """Raises SpecError for fewer than one token or a dropout outside [0, 1)."""
        super().__init__()
        _check_tokens(tokens, prefix)
        if not 0 <= dropout < 1:
            raise SpecError(f"dropout must be at least 0 and below 1, not {dropout!r}")
        self.width, self.tokens, self.prefix, self.dropout = width, tokens, prefix, dropout
        self.prompt = nn.Parameter(torch.empty(tokens, width))
        nn.init.uniform_(self.prompt, -math.sqrt(3 / width), math.sqrt(3 / width))

    @classmethod
    def at(cls, site: Site, tokens: int = 10, prefix: int | None = None, dropout: float = 0.0) -> Prompt:
        """Tokens for any sequence; the prefix is the `num_prefix_tokens` of the model around it, if that is not given."""
        value = site.args[0]
        prefix = prefix_tokens(site, value) if prefix is None else prefix
        return cls(value.shape[2], tokens, prefix, dropout)

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
        """Raises SpecError for fewer than one token."""
        super().__init__()
        _check_tokens(tokens, prefix)
        self.tokens, self.prefix = tokens, prefix

    @classmethod
    def at(cls, site: Site, tokens: int = 10, prefix: int | None = None) -> Drop:
        """As Prompt.at."""
        return cls(tokens, prefix_tokens(site, site.args[0]) if prefix is None else prefix)

    def forward(self, y: Tensor, entered: Tensor | None = None) -> Tensor:
        return torch.cat([y[:, : self.prefix], y[:, self.prefix + self.tokens :]], 1)

    def extra_repr(self) -> str:
        return f"tokens={self.tokens}, prefix={self.prefix}"


def prefix_tokens(site: Site, value: Value) -> int:
    """`num_prefix_tokens` of the nearest module around a site that has it. Raises SpecError."""
    if len(value.shape) != 3:
        raise SpecError(f"prompt tokens go into a value (batch, tokens, width), and {value} is none")
    parts = site.path.partition("@")[0].split(".")
    for count in range(len(parts) - 1, -1, -1):
        found: Any = getattr(site.root.get_submodule(".".join(parts[:count])), "num_prefix_tokens", None)
        if isinstance(found, int):
            return found
    raise SpecError(
        "the model does not say how many class and register tokens come first (it has no 'num_prefix_tokens'); "
        "give it: prefix: 1, or prefix: 0 where there are none"
    )


def _check_tokens(tokens: Any, prefix: Any) -> None:
    for name, number, least in (("tokens", tokens, 1), ("prefix", prefix, 0)):
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise SpecError(f"{name} must be a whole number, {least} or more, not {number!r}")
