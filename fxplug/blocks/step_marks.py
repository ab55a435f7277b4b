"""Marks for step caches: where a value may be kept from an earlier step, and what says whether it may."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Self

from torch import Tensor

from ..core.errors import GuardError, SpecError
from .base import Block, check_count

if TYPE_CHECKING:
    from ..core.rewriter.sites import Site


class Mark(Block):
    """A block that only says something about a place; lowerings leave it where it is."""

    neutral = True
    hands_on = True
    is_mark: ClassVar[bool] = True


class Join(Mark):
    """Marks where a UNet joins its way up with a skip: DeepCache (Ma et al. 2023, arXiv 2312.00858) may cut there.

    forward(y) gives y, the result of the joining operation. Of its operands the one that most is computed for is kept; of all
    such marks of a pass the one that `branch` counts from the end of the model, from 0.
    """

    def __init__(self, branch: int = 0) -> None:
        """Create the mark. Raises SpecError for a branch that is no integer, 0 or more."""
        super().__init__()
        self.branch = check_count("branch", branch, 0)

    def forward(self, y: Tensor) -> Tensor:
        return y


class _OfTwo(Mark):
    """A mark of a value, or of what it differs by from another of its shape: forward(value, other=None) gives the value."""

    what: ClassVar[str]

    @classmethod
    def at(cls, site: Site) -> Self:
        """Make the mark. Raises SpecError if the two differ in shape."""
        if any(value.shape != site.args[0].shape for value in site.args):
            found = " and ".join(map(str, site.args))
            raise SpecError(f"{cls.what} of one shape, and these are {found}: name a port, such as 'blocks.0:out[1]'")
        return cls()

    def forward(self, value: Tensor, other: Tensor | None = None) -> Tensor:
        # where only one of them is split over processes it is found out here that the other has to be
        if other is not None and value.shape != other.shape:
            raise GuardError(f"a mark needs two values of one shape, not {tuple(value.shape)} and {tuple(other.shape)}")
        return value


class Keep(_OfTwo):
    """Marks a value that may be taken from an earlier step: as it is, or as what it differs by from another.

    With another, the base, the difference is kept and is added to the base of the step that takes it.
    """

    what = "the cached value is the difference of two values"


class Gauge(_OfTwo):
    """Marks what tells how much a step differs from an earlier one: the change that an early block makes.

    That is the change from the second value, what the block gets, to the first; without a second it is the first itself.
    """

    what = "the gauge of a step is the difference of two values"
