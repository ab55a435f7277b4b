"""Marks for step caches: where a value may be kept from an earlier step, and what says whether it may."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from ..core.errors import GuardError, SpecError
from .base import Block, check_count

if TYPE_CHECKING:
    from ..core.rewriter.sites import Site


class Mark(Block):
    """A block that only says something about a place; lowerings leave it where it is."""

    neutral = True
    is_mark: ClassVar[bool] = True


class Join(Mark):
    """Marks where a UNet joins its way up with a skip: DeepCache (Ma et al. 2023, arXiv 2312.00858) may cut there.

    forward(y) gives y, the result of the joining operation. Of its operands the one that most is computed for is kept; of all
    such marks of a pass the one that `branch` counts from the end of the model, from 0.
    """

    def __init__(self, branch: int = 0) -> None:
        super().__init__()
        self.branch = check_count("branch", branch, 0)

    @classmethod
    def at(cls, site: Site, branch: int = 0) -> Join:
        """A mark for any site. Raises SpecError for a branch that is no whole number, 0 or more."""
        return cls(branch)

    def forward(self, y: Tensor) -> Tensor:
        return y


class Keep(Mark):
    """Marks a value that may be taken from an earlier step: as it is, or as what it differs by from another.

    forward(value, base=None) gives value. With a base, a tensor of the same shape, the difference is kept and is added to the
    base of the step that takes it.
    """

    @classmethod
    def at(cls, site: Site) -> Keep:
        """Raises SpecError where value and base differ in shape."""
        _check_alike(site, "the cached value is the difference of two values")
        return cls()

    def forward(self, value: Tensor, base: Tensor | None = None) -> Tensor:
        return value if base is None else _check_and_take(value, base)


class Gauge(Mark):
    """Marks what tells how much a step differs from an earlier one: the change from x to y that an early block makes.

    forward(y, x=None) gives y; both have one shape. Without x it is y itself.
    """

    @classmethod
    def at(cls, site: Site) -> Gauge:
        """Raises SpecError where x and y differ in shape."""
        _check_alike(site, "the gauge of a step is the difference of two values")
        return cls()

    def forward(self, y: Tensor, x: Tensor | None = None) -> Tensor:
        return y if x is None else _check_and_take(y, x)


def _check_and_take(value: Tensor, other: Tensor) -> Tensor:
    """The first; where only one of them is split over processes it is found out here that the other has to be."""
    if value.shape != other.shape:
        raise GuardError(f"a mark needs two values of one shape, not {tuple(value.shape)} and {tuple(other.shape)}")
    return value


def _check_alike(site: Site, what: str) -> None:
    if any(value.shape != site.args[0].shape for value in site.args):
        found = " and ".join(map(str, site.args))
        raise SpecError(f"{what} of one shape, and these are {found}: name a port, such as 'blocks.0:out[1]'")
