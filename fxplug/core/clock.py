"""Where in a run a call of a denoiser is: which step, and which of several calls at one step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .errors import SpecError, did_you_mean

AT_ONCE = 8  # so many calls at one time are told apart


class Clock:
    """Reads a run off one of the inputs, such as the timestep.

    As long as it moves in one direction the run goes on; where it goes back a new one begins. Calls at one time (with and
    without a condition, say) are numbered. Without a name every call is the next step until somebody says that a run begins.
    Raises SpecError for a name that no input has.
    """

    def __init__(self, name: str | None, names: Sequence[str]) -> None:
        if name is not None and name not in names:
            raise SpecError(
                f"the model has no input '{name}', which would tell the step of a call{did_you_mean(name, names)}: give one of "
                f"{', '.join(names)} as clock=, or clock=None and call reset() or new_image() before each run"
            )
        self.name, self.position = name, -1 if name is None else list(names).index(name)
        self.reset()

    def reset(self) -> None:
        """Forget where a run is: the next call of a clock with a name begins one."""
        self.time: float | None = None
        self.direction = 0.0
        self.number = 0

    def tick(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, int]:
        """Whether a run begins with this call, and the call's number among those of its time."""
        if self.name is None:
            return False, 0
        value = args[self.position] if len(args) > self.position else kwargs.get(self.name)
        if value is None:
            raise SpecError(f"the call has no '{self.name}', which is needed to see where a run begins")
        now = float(value.flatten()[0]) if isinstance(value, Tensor) else float(value)
        before, self.time = self.time, now
        if before is None:
            return True, 0
        if now == before:
            self.number += 1
            if self.number < AT_ONCE:
                return False, self.number
        moved = math.copysign(1.0, now - before)
        back = now == before or (self.direction != 0 and moved != self.direction)
        self.direction, self.number = 0.0 if back else moved, 0
        return back, 0
