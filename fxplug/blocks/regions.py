"""Regions of a picture in which adapters act: a table of slots with masks, resized by area to each level of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import SpecError
from ..core.torch_internals.tensors import assert_later
from .base import ROWS, Gates, Table
from .levels import check_latents, list_grids, make_plain
from .places import apply_grid

SIDE = 64  # height and width of a mask in a table
MASKS = 128  # so many masks, each with what layers without places take, may the rows of a batch have; the first is of ones


class RegionTable(Table):
    """A `Table` with a mask of the picture for each slot that a sample takes.

    `regions`, int64 (ROWS, per_sample), has the number of that mask in `masks`, float32 (MASKS, SIDE, SIDE); 0 is everywhere.
    `rests`, float32 (MASKS,), is what layers without places take of a slot with that mask, and `ratios`, float32 (MASKS,),
    height over width of the picture that it is for, 0 for any.
    """

    neutral = True
    regions: Tensor
    masks: Tensor
    rests: Tensor
    ratios: Tensor

    def __init__(
        self, slots: int, rank: int, others: Sequence[int] = (), per_sample: int = 0, groups: int = 0,
        levels: Sequence[Any] = (), latents: str = "",
    ) -> None:  # fmt: skip
        """Create the table; `levels` are the grids of the layers that have places of a picture, see `places.Grid`, and
        `latents` is the name of the node with the latents."""
        super().__init__(slots, rank, others, per_sample, groups)
        self.levels, self.latents = list(levels), latents
        self.register_buffer("regions", torch.zeros(ROWS, per_sample, dtype=torch.int64))
        self.register_buffer("masks", torch.ones(MASKS, SIDE, SIDE, dtype=torch.float32))
        self.register_buffer("rests", torch.ones(MASKS, dtype=torch.float32))
        self.register_buffer("ratios", torch.zeros(MASKS, dtype=torch.float32))

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        """Return what `Table` does, and a tuple: (batch, per_sample), the share that layers without places take of the slots,
        and for each level the share at its places, (batch, per_sample, places).

        x are the latents, (batch, channels, height, width), or tokens (batch, tokens, channels) of a picture, row after row,
        whose height and width follow from the proportions of each mask. For tokens of another picture it is NaN, and a CPU
        raises RuntimeError. Without levels x may be anything.
        """
        chosen = self.regions[torch.arange(x.shape[0], device=self.regions.device).clamp(max=ROWS - 1)]
        made, rest = super().forward(x), self.rests.float()[chosen]
        if not self.levels:
            return *made, (rest,)
        masks = self.masks.float()[chosen]
        if x.dim() == 3:
            found, fits = make_token_masks(masks, self.ratios.float()[chosen], x.shape[1])
            if found.is_cpu:
                assert_later(fits, "a region of adapters.use is for a picture of other proportions than those of the latents")
            return *made, (rest, found)
        sizes = [apply_grid(grid, x.shape[2], x.shape[3]) for grid in self.levels]
        return *made, (rest, *(make_masks(masks, *size).flatten(2) for size in sizes))


class RegionGates(Gates):
    """The table of a pass with regions, as a network of the pass: what it gives goes to each of the pass's blocks."""

    def __init__(self, table: RegionTable) -> None:
        nn.Module.__init__(self)
        self.table = table

    @classmethod
    def of(cls, model: Any, latents: str = "", **options: Any) -> RegionGates:  # type: ignore[override]
        """Make the gates of a model's banks; `options` are those of `RegionTable`. Raises SpecError as `check_latents`."""
        grids: dict[Any, None] = {}
        if check_latents(model, latents):
            for graph in model.graphs.values():
                grids.update(dict.fromkeys(list_grids(graph, model, latents)))
            if not grids:
                raise SpecError(f"no layer has places of '{latents}': name the latents with 'samples', or leave regions out")
        return cls(RegionTable(**options, levels=[make_plain(grid) for grid in grids], latents=latents if grids else ""))


def check_no_regions(root: nn.Module) -> None:
    """Check that no layer of a module has masks of regions: they would be at other places once tokens come or go.

    Args:
        root: The module.

    Raises:
        SpecError: Where one has.
    """
    if any(isinstance(module, RegionTable) and module.levels for module in root.modules()):
        raise SpecError(
            "it changes the number of tokens, and a pass with regions has masks for those that there are: leave one of the two "
            "out"
        )


def make_masks(masks: Tensor, height: Any, width: Any) -> Tensor:
    """Resize masks by area: each place has the mean of what it covers.

    Args:
        masks: Float (..., h, w).
        height: The height to resize to.
        width: The width.

    Returns:
        (..., height, width). Ones and zeros are exact as long as both areas are below 2**24: what places cover is counted in
        whole numbers.
    """
    rows, columns = (
        _overlap(torch.arange(new, device=masks.device), new, old, masks.dtype)
        for new, old in ((height, masks.shape[-2]), (width, masks.shape[-1]))
    )
    return rows @ masks @ columns.transpose(-1, -2) / (masks.shape[-2] * masks.shape[-1])


def make_token_masks(masks: Tensor, ratios: Tensor, count: Any) -> tuple[Tensor, Tensor]:
    """Resize masks to tokens of a picture, row after row, whose height and width follow from their number and a proportion.

    Args:
        masks: Float (batch, adapters, h, w).
        ratios: Height over width of the picture that each is for, (batch, adapters); 0 for any.
        count: The number of tokens.

    Returns:
        (batch, adapters, count), and a bool tensor, whether so many tokens have these proportions, and have them not also with
        height and width exchanged: where they have not, the masks are of NaN.
    """
    width = (count / ratios.where(ratios > 0, 1 / count)).sqrt().round().clamp(min=1)[..., None]
    height = (count / width).round()
    wanted = ratios.where(ratios > 0, 1 / count)[..., None]
    off, turned = (height / width / wanted).log().abs(), (width / height / wanted).log().abs()  # turned: width for height
    fits = (height * width == count) & (off < 0.02) & ((height == width) | (2 * off < turned))
    fits = fits | (ratios <= 0)[..., None]
    high, wide = height.long(), width.long()  # whole numbers: a compiled division of others may be a little off
    at = torch.arange(count, device=masks.device)
    row = at // wide
    rows = _overlap(row, high[..., None], masks.shape[-2], masks.dtype)
    columns = _overlap(at - row * wide, wide[..., None], masks.shape[-1], masks.dtype)
    made = ((rows @ masks) * columns).sum(-1) / (masks.shape[-2] * masks.shape[-1])
    return made.where(fits, torch.nan), fits.all()


def _overlap(at: Tensor, new: Any, old: int, dtype: torch.dtype) -> Tensor:
    """Return how much of each of `old` cells the cells `at` of `new` ones cover, in the cells of both sizes together: whole
    numbers."""
    first, cell = (at * old)[..., None], torch.arange(old, device=at.device) * new
    return (torch.minimum(first + old, cell + new) - torch.maximum(first, cell)).clamp(min=0).to(dtype)
