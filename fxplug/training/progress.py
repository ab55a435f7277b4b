"""How far a run is, and how far it has to go: batches, the steps they make, and epochs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..core.errors import TrainError
from ..core.spec.train_section import Train


@dataclass
class Progress:
    """How far a run of epochs of `batches` batches is: optimizer steps, the epoch at hand, batches done in it and the sum of
    their losses; best tests.

    `accumulate` is how many batches make a step, which a plugin may change between epochs; the last step of an epoch is made of
    the batches that are left, so each is trained on. `score` is that of the best test, `measured` all that it gave, and
    `waited` how many came after it.
    """

    settings: Train
    batches: int
    step: int = 0
    epoch: int = 0
    done: int = 0
    total: float = 0.0
    best: dict[str, float] = field(default_factory=dict)
    accumulate: int = 1
    score: float | None = None
    measured: dict[str, float] = field(default_factory=dict)
    waited: int = 0
    asked: int | None = None  # batches a step from the next epoch on

    def __post_init__(self) -> None:
        self.accumulate = self.settings.accumulate

    def state(self) -> dict[str, Any]:
        """What a checkpoint has of it."""
        return {key: value for key, value in vars(self).items() if key not in ("settings", "batches", "asked")}

    def judge(self, metrics: dict[str, float], highest: str | None) -> bool:
        """Whether a test is better than all before: by the metric of which the highest is best, else by the lowest loss."""
        name = highest if highest is not None and highest in metrics else "loss"
        if name not in metrics:
            listed = ", ".join(metrics) or "nothing"
            raise TrainError(f"test.patience and test.best need the task's best metric or 'loss'; the tests give {listed}")
        score = -metrics[name] if name == "loss" != highest else metrics[name]
        better = score > (float("-inf") if self.score is None else self.score)
        if better:
            self.score, self.measured, self.waited = score, dict(metrics), 0
        else:
            self.waited += 1
        return better

    @property
    def per_epoch(self) -> int:
        """Steps of an epoch."""
        return -(-self.batches // self.accumulate)

    @property
    def steps(self) -> int:
        """Steps of the whole run, as it goes on now."""
        if self.settings.steps is not None:
            return self.settings.steps
        left = (self.settings.epochs or 1) - self.epoch
        here = -(-(self.batches - self.done) // self.accumulate)
        return self.step + (here + (left - 1) * self.per_epoch if left > 0 else 0)

    @property
    def epochs(self) -> int:
        """Epochs of the whole run; the last one may not be whole."""
        if self.settings.steps is None:
            return self.settings.epochs or 1
        return self.epoch + -(-max(0, self.settings.steps - self.step) // self.per_epoch)

    @property
    def seen(self) -> int:
        """Batches that were done."""
        return self.epoch * self.batches + self.done

    def notes(self) -> list[str]:
        """What is to be said before the training."""
        rest = self.batches % self.accumulate
        short = f"the last step of each epoch takes {rest} batches, not {self.accumulate}: an epoch has {self.batches}"
        return [short] if rest else []

    def size(self) -> int:
        """Batches of the next step."""
        return min(self.accumulate, self.batches - self.done)

    def update(self, name: str, value: object) -> None:
        """Take `grad_accum` from a plugin, for the next start of an epoch. ValueError for anything else."""
        if name != "grad_accum":
            raise ValueError(f"'{name}' cannot be changed during the run; only 'grad_accum' can")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"grad_accum must be a whole number, 1 or more, not {value!r}")
        self.asked = value

    def renew(self) -> str:
        """At the start of an epoch: take what was asked for, and say so."""
        asked, self.asked = self.asked, None
        if asked is None or asked == self.accumulate:
            return ""
        self.accumulate = asked
        finding = f"from epoch {self.epoch} on a step takes {asked} batches: {self.per_epoch} steps an epoch"
        return "; ".join([finding, *self.notes()])
