"""Blocks that turn a weight: orthogonal fine-tuning, in blocks along the diagonal or in butterflies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core.errors import SpecError, quote
from .base import Block, Method, UpdateKind, make_kind_key
from .weight_update import get_weight, list_divisors, match_parameter

if TYPE_CHECKING:
    from ..core.rewriter.sites import Site


def split(width: int, block_size: Any, blocks: Any) -> tuple[int, int]:
    """Return the size and the number of the blocks of a matrix `width` wide; `blocks` overrides `block_size`. Raises
    SpecError."""
    name, given = ("block_size", block_size) if blocks is None else ("blocks", blocks)
    if not isinstance(given, int) or isinstance(given, bool) or given < 1 or width % given:
        fits = list_divisors(width)
        raise SpecError(f"{name} {given!r} does not divide {width}, the inputs of this weight; one of {fits} does")
    return (given, width // given) if blocks is None else (width // given, given)


class Oft(Block):
    """value with its inputs turned by an orthogonal matrix of blocks (OFT, Qiu et al. 2023, arXiv 2306.07280).

    The inputs of a convolution are in * kernel. `rotation` holds what is above the diagonals of the skew-symmetric matrices,
    (blocks, size * (size - 1) / 2) as in PEFT, zero when new; with `share` one block stands for all.
    """

    update_kind = UpdateKind(
        name="oft",
        forms=({"rotation": "n v"},),
        neutral={"rotation": 0},
        method="oft",
        algebra=Method(
            lambda value, own, options: rotated(
                value.flatten(1), own["rotation"], options["size"], options["terms"]
            ).reshape(value.shape),
            lambda own, options, shape: math.prod(shape[1:]) % options["size"] == 0
            and (options["share"] or math.prod(shape[1:]) == options["size"] * len(own["rotation"])),
            (),
        ),
        slots="",
    )
    neutral = True

    def __init__(
        self,
        shape: Sequence[int],
        block_size: int = 32,
        blocks: int | None = None,
        share: bool = False,
        terms: int = 5,
    ) -> None:
        """Create the rotation; `terms` is the length of the series that approximates the inverse, 0 for the inverse itself.

        Raises SpecError for a size or number of blocks that does not divide the inputs, and for 1 or 2 terms.
        """
        super().__init__()
        if not isinstance(terms, int) or isinstance(terms, bool) or (terms < 3 and terms != 0):
            raise SpecError(f"terms must be a whole number, 3 or more, or 0 for the exact inverse, not {quote(terms)}")
        self.shape, self.block_size, self.blocks, self.share, self.terms = list(shape), block_size, blocks, share, terms
        self.size, count = split(math.prod(self.shape[1:]), block_size, blocks)
        if self.size < 2:
            raise SpecError("the block size must be 2 or more: a block of size 1 has no rotation")
        self.rotation = nn.Parameter(torch.zeros(1 if share else count, self.size * (self.size - 1) // 2))

    @classmethod
    def at(cls, site: Site, block_size: int = 32, blocks: int | None = None, share: bool = False, terms: int = 5) -> Oft:
        """Make a rotation for any weight of two or more dimensions whose inputs the blocks divide; not for an Embedding."""
        return cls(rotatable_shape(site), block_size, blocks, share, terms)

    def bank(self) -> dict[str, Any]:
        """Return the description of the bank: its place, and the meaning of its tensors; see `adapters.banks.Bank`."""
        options = {"size": self.size, "share": self.share, "terms": self.terms}
        return {"kind": make_kind_key(type(self)), "slots": 0, "rank": 1, "shape": self.shape, "options": options}

    def forward(self, value: Tensor) -> Tensor:
        made = rotated(value.flatten(1), self.rotation, self.size, self.terms)
        return match_parameter(made.reshape(self.shape), value)

    def extra_repr(self) -> str:
        return f"{self.shape}, {self.rotation.shape[0]} of size {self.size}{', shared' if self.share else ''}"


class Boft(Block):
    """magnitude * value with its inputs turned by butterflies of blocks (BOFT, Liu et al. 2023, arXiv 2311.06243).

    `rotation` is (levels, blocks, size, size) and made skew-symmetric, zero when new; `magnitude` (out, 1), one when new; both
    as in PEFT. More levels let far inputs mix with blocks of the same size.
    """

    update_kind = UpdateKind(
        name="boft",
        forms=({"rotation": "l n s s", "magnitude": "o 1"},),
        neutral={"rotation": 0, "magnitude": 1},
        method="boft",
        algebra=Method(
            lambda value, own, options: _turned_in_levels(value.flatten(1), **own).reshape(value.shape),
            lambda own, options, shape: bool(shape)
            and (len(own["magnitude"]), math.prod(own["rotation"].shape[1:3])) == (shape[0], math.prod(shape[1:])),
            ("magnitude",),
        ),
        slots="",
    )
    neutral = True
    order: Tensor

    def __init__(self, shape: Sequence[int], block_size: int = 4, blocks: int | None = None, levels: int = 1) -> None:
        """Create the butterflies. Raises SpecError for a size or number of blocks that does not divide the inputs, or for too
        many levels."""
        super().__init__()
        self.shape, self.block_size, self.blocks, self.levels = list(shape), block_size, blocks, levels
        width = math.prod(self.shape[1:])
        self.size, count = split(width, block_size, blocks)
        most = _levels(self.size, count)
        if not isinstance(levels, int) or isinstance(levels, bool) or not 1 <= levels <= most:
            raise SpecError(
                f"levels must be 1 to {most} with {count} blocks of size {self.size}, not {quote(levels)}: each level but "
                "the first halves the number of blocks, which must be even, and so must the size"
            )
        self.rotation = nn.Parameter(torch.zeros(levels, count, self.size, self.size))
        self.magnitude = nn.Parameter(torch.ones(self.shape[0], 1))
        order = torch.stack([butterfly(width, self.size, level) for level in range(levels)])
        self.register_buffer("order", order, persistent=False)

    @classmethod
    def at(cls, site: Site, block_size: int = 4, blocks: int | None = None, levels: int = 1) -> Boft:
        """Make a rotation for any weight of two or more dimensions whose inputs the blocks divide; not for an Embedding."""
        return cls(rotatable_shape(site), block_size, blocks, levels)

    def bank(self) -> dict[str, Any]:
        """Return the description of the bank and its place; see `adapters.banks.Bank`."""
        return {"kind": make_kind_key(type(self)), "slots": 0, "rank": 1, "shape": self.shape}

    def forward(self, value: Tensor) -> Tensor:
        matrix = rotated_in_levels(value.flatten(1), self.rotation, self.order)
        return match_parameter((matrix * self.magnitude).reshape(self.shape), value)

    def extra_repr(self) -> str:
        return f"{self.shape}, {self.levels} levels of {self.rotation.shape[1]} blocks of size {self.size}"


def _levels(size: int, count: int) -> int:
    """Return how many levels a butterfly of `count` blocks can have."""
    levels = 1
    while size % 2 == 0 and count % 2 == 0:
        levels, count = levels + 1, count // 2
    return levels


def rotatable_shape(site: Site) -> torch.Size:
    """Return the shape of a weight whose second and later dimensions are a layer's inputs. Raises SpecError."""
    value = get_weight(site, "a rotation of the inputs")
    if "Embedding" in site.classes or "_ConvTransposeNd" in site.classes:
        raise SpecError(f"{site.path} is a {site.classes[0]}; a rotation of the inputs fits Linear, Conv1d, Conv2d and Conv3d")
    return value.shape


# --- the algebra: pure functions on tensors, of which readers of adapter files are users too


def skew(upper: Tensor, size: int) -> Tensor:
    """Return skew-symmetric matrices (n, size, size) from the elements above their diagonals, row by row: (n, size * (size - 1)
    / 2)."""
    rows, columns = torch.triu_indices(size, size, 1, device=upper.device)
    filled = upper.new_zeros(size, size, upper.shape[0]).index_put((rows, columns), upper.T)
    return filled.permute(2, 0, 1) - filled.permute(2, 1, 0)


def compute_cayley(matrices: Tensor) -> Tensor:
    """Return (I - Q)(I + Q)^-1 of skew-symmetric matrices Q (n, size, size): orthogonal, and exactly I where Q is zero."""
    q = matrices.float()  # there is no solver for half precision
    one = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device).expand_as(q)
    solved: Tensor = torch.linalg.solve(one + q, one - q, left=False)
    return solved.to(matrices.dtype)


def neumann(matrices: Tensor, terms: int) -> Tensor:
    """Return the first `terms` of I + 2Q + 2Q^2 + ..., the series of (I + Q)(I - Q)^-1; three or more, the last one counted
    once.

    Orthogonal for small Q only. As in OFTv2 (Qiu et al. 2025, arXiv 2506.19847) and PEFT, with Q of the other sign than in
    `compute_cayley`. (PEFT uses 3 terms for 4.)
    """
    one = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device).expand_as(matrices)
    result, power = one + 2 * matrices, matrices
    for _ in range(2, terms - 1):
        power = power @ matrices
        result = result + 2 * power
    return result + power @ matrices


def turned(value: Tensor, rotations: Tensor) -> Tensor:
    """Multiply a weight (out, in) by the transpose of the block-diagonal matrix of `rotations` (n, size, size)."""
    parts = value.reshape(value.shape[0], -1, rotations.shape[-1])
    return torch.einsum("ork,rjk->orj", parts, rotations.expand(parts.shape[1], -1, -1)).flatten(1)


def rotated(value: Tensor, upper: Tensor, size: int, terms: int) -> Tensor:
    """Rotate a weight (out, in) by OFT: `upper` is the argument of `skew`, `terms` the length of the series, 0 for the
    inverse."""
    matrices = skew(upper, size)
    return turned(value, (neumann(matrices, terms) if terms else compute_cayley(matrices)).to(value.dtype))


def rotated_in_levels(value: Tensor, matrices: Tensor, orders: Iterable[Tensor]) -> Tensor:
    """Rotate a weight (out, in) by BOFT's (levels, blocks, size, size), each level on inputs in its order, see `butterfly`."""
    rotations = compute_cayley((matrices - matrices.mT).flatten(0, 1) * 0.5).reshape(matrices.shape).to(value.dtype)
    for order, level in zip(orders, rotations, strict=True):
        value = turned(value[:, torch.argsort(order)], level)[:, order]
    return value


def _turned_in_levels(value: Tensor, rotation: Tensor, magnitude: Tensor) -> Tensor:
    """Give a weight (out, in) turned by BOFT's rotations, times its magnitudes."""
    levels, _, size, _ = rotation.shape
    orders = [butterfly(value.shape[1], size, level) for level in range(levels)]
    return rotated_in_levels(value, rotation, orders) * magnitude.reshape(-1, 1)


def butterfly(width: int, size: int, level: int) -> Tensor:
    """Return the order of the inputs at one level of a butterfly: in each group of 2^level blocks the even half blocks, then
    the odd. in each group of 2^level blocks the even half blocks, then the odd.

    Level 0 leaves the order. (BOFT, section 4, with half a block as the unit.)
    """
    group, half = size * 2**level, size // 2
    order = torch.arange(width)
    return order.view(width // group, -1, 2, half).transpose(1, 2).flatten() if half else order
