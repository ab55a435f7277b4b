"""When the learning rate changes: the scheduler of a run, and its place in a run that is made longer."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch

from ..core.errors import TrainError
from .param_groups import SHAPES, make_scheduler
from .train_section import Use

LENGTHS = ("T_max", "total_steps")  # what `make_scheduler` sets by the length of the run


class RateSchedule:
    """The scheduler of an optimizer, stepped once a step, or `by_epoch` once an epoch.

    `given` is one that was made elsewhere, which is stepped once an epoch; else it is made of what the settings `use` for a run
    of so many steps, `per_epoch` of them an epoch.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, use: Use | None, steps: int, per_epoch: int, given: Any = None
    ) -> None:
        self.optimizer, self.use, self.length, self.given = optimizer, use, [steps, per_epoch], given
        self._fresh = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
        self.scheduler, self.by_epoch = (given, True) if given is not None else make_scheduler(use, optimizer, steps, per_epoch)

    def step(self, loss: float, after: int) -> None:
        """Update the rates; `loss` is for a scheduler that reads it. Raises TrainError if the scheduler raises."""
        by_loss = isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        try:
            self.scheduler.step(*[loss] * by_loss)
        except Exception as error:  # the scheduler's, which may be the user's
            name = type(self.scheduler).__name__
            raise TrainError(f"scheduler {name} raised after step {after}: {type(error).__name__}: {error}") from error

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"scheduler": self.scheduler.state_dict(), "length": self.length}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state, after the optimizer has loaded its own; for a state of a shorter run, replay as many steps of a run of
        this length."""
        kept = state["scheduler"]
        if list(state["length"]) == self.length or not self._goes_by_length():
            self.scheduler.load_state_dict(kept)
            return
        shadow = copy.copy(self.optimizer)  # what the optimizer itself keeps in its groups stays
        shadow.param_groups = [
            {**fresh, "params": group["params"]} for fresh, group in zip(self._fresh, self.optimizer.param_groups, strict=True)
        ]
        made, _ = make_scheduler(self.use, shadow, *self.length)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of a step of the scheduler without one of the optimizer
            for _ in range(kept["last_epoch"]):
                made.step()
        for group, now, fresh in zip(self.optimizer.param_groups, shadow.param_groups, self._fresh, strict=True):
            group |= {key: value for key, value in now.items() if key == "lr" or key not in fresh or value != fresh[key]}
        self.scheduler.load_state_dict(made.state_dict())

    def _goes_by_length(self) -> bool:
        if self.given is not None:
            return False
        if self.use is None or self.use.name in SHAPES:
            return True
        return any(hasattr(self.scheduler, key) and key not in self.use.options for key in LENGTHS)
