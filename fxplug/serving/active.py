"""The runs of pipelines that an engine has taken in."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import nn

from .parked import RequestThread, StepCount
from .regions import RegionGroup
from .requests import Request, find_sigma, get_strengths
from .tickets import Ticket


@dataclass(eq=False)
class ActiveRequest:
    """A run of a request that is taken in, or of one of its regions: its thread, and what its rows are made with."""

    ticket: Ticket
    request: Request  # the ticket's, or what a region makes of it
    thread: RequestThread
    pipe: Any
    count: StepCount
    rows: int  # of its largest call so far, or of one of its kind
    resources: ExitStack  # what ends with it: the pins of its adapters
    adapters: Mapping[int, frozenset[str]]  # the names of those that a model has, by its `id`
    group: RegionGroup | None = None
    is_region: bool = False
    parked: int = -1  # when it came to the call at which it waits, in calls

    def mixture(self, model: nn.Module) -> dict[str, Any]:
        """Return the strengths of its adapters in a model, now."""
        names = self.adapters.get(id(model), ())
        asked = {name: value for name, value in self.request.adapters.items() if name in names}
        done, scheduler = self.count.steps, getattr(self.pipe, "scheduler", None)
        return get_strengths(asked, done / max(self.steps, done, 1), lambda: find_sigma(scheduler, done))

    @property
    def steps(self) -> int:
        """How many steps its scheduler shall make; 0 before that is known."""
        made = getattr(self.pipe, "num_timesteps", None) if self.count.steps else 0  # before it is that of an earlier call
        if isinstance(made, int):
            return made
        steps = getattr(getattr(self.pipe, "scheduler", None), "timesteps", None)
        return 0 if steps is None else len(steps)
