"""When a step of a step cache is computed in full: every so often, or by how much something has changed since."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from ..core.errors import SpecError, format_fields


@dataclass(frozen=True)
class Step:
    """What a policy decides on: the number of the step in its run, how many steps since the last full one were not full, and
    for a gauged policy by how much the gauge differs from that of the last full step (mean |now - then| / mean |then|).

    `moves` are the same differences from each step to the next, from the last full one on; this step's is the last.
    """

    index: int
    since: int
    change: float = math.nan
    moves: tuple[float, ...] = ()


class Policy(Protocol):
    """Whether a step is computed in full. One that reads `change` or `moves` has an attribute `gauged` that is True.

    It goes by the step alone: where several processes run one model, each asks its own and must be told the same.
    """

    def __call__(self, step: Step, /) -> bool: ...


@dataclass(frozen=True)
class Every:
    """Every `interval`-th step in full, as in DeepCache; the first `start` steps too."""

    interval: int = 3
    start: int = 1

    __repr__ = format_fields

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise SpecError(f"the interval must be 1 or more, not {self.interval}")

    def __call__(self, step: Step) -> bool:
        return step.index < self.start or step.since + 1 >= self.interval


@dataclass(frozen=True)
class Threshold:
    """A step in full when the gauge has changed by `limit` or more since the last full one, or after `at_most` others."""

    limit: float = 0.1
    at_most: int | None = None
    gauged: ClassVar[bool] = True

    __repr__ = format_fields

    def __call__(self, step: Step) -> bool:
        return not step.change < self.limit or (self.at_most is not None and step.since >= self.at_most)


@dataclass(frozen=True)
class TeaCache:
    """A step in full when what the gauge moved from step to step, rescaled, adds up to `limit` (Liu et al. 2024, 2411.19108).

    A polynomial tells the change of the model's output from that of its modulated input; `coefficients` has its highest power
    first and is the identity by default. It is another for each model: `TeaCache.fitted` finds it. With `steps`, how many a
    run has, the last one is in full; the first always is.
    """

    limit: float = 0.1
    coefficients: tuple[float, ...] = (1.0, 0.0)
    steps: int | None = None
    gauged: ClassVar[bool] = True

    __repr__ = format_fields

    def __post_init__(self) -> None:
        object.__setattr__(self, "coefficients", tuple(map(float, self.coefficients)))

    def rescaled(self, move: float) -> float:
        """Evaluate the polynomial.

        Args:
            move: The relative change of the gauge from one step to the next.

        Returns:
            The change of the output that it foretells.
        """
        found = 0.0
        for coefficient in self.coefficients:
            found = found * move + coefficient
        return found

    def __call__(self, step: Step) -> bool:
        return step.index + 1 == self.steps or not sum(map(self.rescaled, step.moves)) < self.limit

    @classmethod
    def fitted(
        cls, changes: Iterable[tuple[float, float]], limit: float = 0.1, *, degree: int = 4, steps: int | None = None
    ) -> TeaCache:
        """Fit a policy's polynomial by least squares to pairs (move of the gauge, change of the output).

        `StepCache.measured` yields them. Raises SpecError for fewer than `degree` + 1 different moves.
        """
        pairs = torch.tensor([pair for pair in changes if all(map(math.isfinite, pair))], dtype=torch.float64)
        different = len({move for move, _ in pairs.tolist()})
        if degree < 0 or different <= degree:
            raise SpecError(
                f"fitting a polynomial of degree {degree} needs at least {max(degree, 0) + 1} different values, and there are "
                f"{different}: measure more steps, or use a lower degree"
            )
        x, y = pairs.unbind(1)
        scale = x.abs().max() or torch.tensor(1.0)
        powers = torch.arange(degree, -1, -1)
        found = torch.linalg.lstsq((x / scale)[:, None] ** powers, y[:, None], driver="gelsd").solution[:, 0]
        return cls(limit, tuple((found / scale**powers).tolist()), steps)
