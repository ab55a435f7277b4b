"""Token merging: similar tokens of a diffusion model are computed once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.errors import SpecError
from .base import Block, check_share
from .regions import check_no_regions

if TYPE_CHECKING:
    from ..core.rewriter.sites import Site


def matching(metric: Tensor, height: int, width: int, ratio: float, stride: int = 2, prefix: int = 0) -> tuple[Tensor, int]:
    """Return where each token goes when a share of them is merged into their nearest (Bolya, Hoffman 2023, arXiv 2303.17604).

    `metric` (batch, prefix + height * width, features) is compared between tokens, by cosine. The first token of each `stride`
    x `stride` cell is a destination, the others are sources; the `ratio` of all tokens, those of them that are most similar to
    a destination, move there. The first `prefix` tokens are unchanged. Returns the new position of each token (batch, tokens),
    int64, and the number of positions; no gradient flows through the choice.
    """
    batch, tokens = metric.shape[:2]
    rows, columns = height // stride, width // stride
    targets = rows * columns
    count = min(int((tokens - prefix) * ratio), height * width - targets)
    if count <= 0 or targets == 0:
        return torch.arange(tokens, device=metric.device).expand(batch, tokens), tokens
    with torch.no_grad():
        # sorting what is a source (1) behind what is a destination (0) gives the tokens of each kind in their order
        row, column = torch.arange(height, device=metric.device), torch.arange(width, device=metric.device)
        first_row = (row % stride == 0) & (row < rows * stride)
        first_column = (column % stride == 0) & (column < columns * stride)
        kind = ~(first_row[:, None] & first_column[None, :]).flatten()
        sorted_ = kind.to(torch.uint8).argsort(stable=True) + prefix
        goals, sources = sorted_[:targets], sorted_[targets:]
        unit = torch.nn.functional.normalize(metric.detach().float(), dim=-1)
        likeness, nearest = (unit[:, sources] @ unit[:, goals].transpose(1, 2)).max(-1)
        order = likeness.argsort(-1, descending=True)
        moved, kept = order[:, :count], order[:, count:]
        left = kept.shape[1] + prefix
        place = torch.empty(batch, tokens, dtype=torch.int64, device=metric.device)
        place[:, :prefix] = torch.arange(prefix, device=metric.device)
        place[:, goals] = torch.arange(left, left + targets, device=metric.device)
        place.scatter_(1, sources[kept], torch.arange(prefix, left, device=metric.device).expand(batch, -1))
        place.scatter_(1, sources[moved], left + nearest.gather(1, moved))
    return place, left + targets


def merge(x: Tensor, place: Tensor, count: int) -> Tensor:
    """Return the mean of the tokens of x (batch, tokens, features) that go to each of `count` positions."""
    index = place[..., None].expand(-1, -1, x.shape[-1])
    empty = x.new_zeros(x.shape[0], count, x.shape[-1])
    return empty.scatter_reduce(1, index, x, "mean", include_self=False)


def unmerge(x: Tensor, place: Tensor) -> Tensor:
    """Return for every token the value computed at its position; x is (batch, positions, features)."""
    return x.gather(1, place[..., None].expand(-1, -1, x.shape[-1]))


class Merge(Block):
    """Merges similar tokens before a layer (ToMe for Stable Diffusion, arXiv 2303.17604).

    forward(x, metric, grid): `x` (batch, tokens, features) is what the layer would see, `metric` (batch, tokens, any) what
    tokens are compared by, `grid` (batch, channels, height, width) the picture whose patches the tokens are. Gives the
    merged x and the place of each token (batch, tokens), which `Unmerge` needs. Where the picture is more than
    `max_downsample` times as fine as the tokens nothing is merged, and the places are empty.
    """

    def __init__(self, ratio: float = 0.5, stride: int = 2, max_downsample: int = 1, prefix: int = 0) -> None:
        """Create the block; `prefix` tokens at the start, such as a class token, are kept. Raises SpecError for a ratio outside
        [0, 1)."""
        super().__init__()
        check_share("ratio", ratio)
        if stride < 1 or max_downsample < 1 or prefix < 0:
            raise SpecError("stride and max_downsample must be 1 or more, prefix 0 or more")
        self.ratio, self.stride, self.max_downsample, self.prefix = ratio, stride, max_downsample, prefix

    hands_on = True

    @classmethod
    def at(cls, site: Site, **options: Any) -> Merge:
        """Make the block. Raises SpecError if the layer's tokens are no grid of patches of the image, and as
        `regions.check_no_regions`."""
        check_no_regions(site.root)
        block = cls(**options)
        x, metric, grid = (argument.shape for argument in site.args[:3])
        if len(x) != 3 or len(grid) != 4 or x[:2] != metric[:2]:
            named = ", ".join(map(str, site.args[:3]))
            raise SpecError(
                f"token merging needs tokens [batch, tokens, features] twice and an image of 4 dimensions, not {named}"
            )
        block.sides(x[1], grid[2], grid[3])
        return block

    def sides(self, tokens: int, height: int, width: int) -> tuple[int, int] | None:
        """Return height and width of the grid of tokens, or None if they are too coarse to be merged."""
        tokens -= self.prefix
        down = math.ceil(math.sqrt(height * width // max(tokens, 1)))
        if down > self.max_downsample:
            return None
        rows, columns = -(-height // max(down, 1)), -(-width // max(down, 1))
        if rows * columns != tokens:
            raise SpecError(f"{tokens} tokens are not a grid of patches of an image of {height} x {width}: check 'prefix'")
        return rows, columns

    def forward(self, x: Tensor, metric: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
        sides = self.sides(x.shape[1], grid.shape[2], grid.shape[3])
        if sides is None:
            return x, torch.empty(x.shape[0], 0, dtype=torch.int64, device=x.device)
        place, count = matching(metric, *sides, self.ratio, self.stride, self.prefix)
        return merge(x, place, count), place

    def extra_repr(self) -> str:
        return f"ratio={self.ratio}, stride={self.stride}, max_downsample={self.max_downsample}, prefix={self.prefix}"


class Unmerge(Block):
    """Gives every token what was computed at its place: the other half of `Merge`. y is (batch, places, features)."""

    hands_on = True

    def forward(self, y: Tensor, place: Tensor) -> Tensor:
        return unmerge(y, place) if place.shape[1] else y
