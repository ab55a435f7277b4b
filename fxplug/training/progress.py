"""How far a run is, and how far it has to go: batches, the steps they make, and epochs; in checkpoints it is samples."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import TrainError, quote
from .train_section import Train

LARGEST = 2**53  # of a whole number that every reader of JSON has exactly


@dataclass
class Progress:
    """How far a run of epochs of `batches` batches is: optimizer steps, the epoch at hand, batches done in it and the sum of
    their losses; best tests.

    `size` is how many samples a batch has over all processes, None where only a DataLoader knows. `accumulate` is how many
    batches make a step, which a plugin may change between epochs; the last step of an epoch is made of the batches that are
    left, so each is trained on. `score` is that of the best test, at `best_step`, `measured` all that it gave, and `waited` how
    many came after it.
    """

    settings: Train
    batches: int
    size: int | None = None
    grouped: bool = False  # whether the samples of a batch come from groups, as those of buckets do
    step: int = 0
    epoch: int = 0
    done: int = 0
    total: float = 0.0
    best: dict[str, float] = field(default_factory=dict)
    accumulate: int = 1
    score: float | None = None
    best_step: int = 0
    measured: dict[str, float] = field(default_factory=dict)
    waited: int = 0
    log_length: int = 0  # bytes of the log at a checkpoint
    asked: int | None = None  # batches a step from the next epoch on

    def __post_init__(self) -> None:
        self.accumulate = self.settings.accumulate

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: plain values, the position within the epoch in samples."""
        kept = ("step", "epoch", "score", "best_step", "waited", "log_length")
        return {
            **{key: getattr(self, key) for key in kept},
            **{key: _finite(getattr(self, key)) for key in ("best", "measured")},
            "total": self.total * (self.size or 1),
            "done": self.done * (self.size or 1),
            "batch": self.size,
            "epoch_samples": self.batches * (self.size or 1),
            "accumulate": None if self.accumulate == self.settings.accumulate else self.accumulate,
        }

    def check(self, state: dict[str, Any]) -> None:
        """Raise TrainError for a `state_dict` with an entry that is missing or out of range, a position between two batches
        of this run, or one beyond its end."""
        for key in ("step", "epoch", "done", "epoch_samples", "best_step", "waited", "log_length"):
            value = state.get(key)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST:
                raise TrainError(f"'progress.{key}' must be a whole number, 0 or more, not {quote(value)}")
        for key in ("total", "score"):
            value = state.get(key)
            if not (key == "score" and value is None) and not (isinstance(value, (int, float)) and math.isfinite(value)):
                raise TrainError(f"'progress.{key}' must be a number, not {quote(value)}")
        for key in ("best", "measured"):
            if not isinstance(state.get(key), dict):
                raise TrainError(f"'progress.{key}' must be numbers by name, not {quote(state.get(key))}")
        if state["done"] > state["epoch_samples"]:
            raise TrainError(f"'progress.done' is {state['done']}, and an epoch has {state['epoch_samples']} samples")
        self._check_length(state)
        if state.get("batch") == self.size and state["epoch_samples"] == self.batches * (self.size or 1):
            return
        if self.size is None or state.get("batch") is None or self.grouped:
            why = "a DataLoader" if self.size is None or state.get("batch") is None else "data in buckets"
            found = f"{quote(state.get('batch'))} samples per batch and {state['epoch_samples']} per epoch then"
            now = f"{quote(self.size)} and {self.batches * (self.size or 1)} now"
            raise TrainError(f"{found}, {now}: with {why} both must stay as they were")
        if state["epoch_samples"] != self.batches * self.size:
            raise TrainError(
                f"an epoch had {state['epoch_samples']} samples then, and has {self.batches * self.size} now in batches of "
                f"{self.size}: set 'batch' so that the same number fills whole batches"
            )
        if state["done"] % self.size:
            raise TrainError(
                f"{state['done']} samples of the epoch are done, which is not a multiple of the batch {self.size}: set "
                "'batch' to a divisor of that number, or resume from another checkpoint"
            )
        if state.get("accumulate") is not None:
            raise TrainError("a plugin has changed 'accumulate' within the run, so batch and processes must stay as they were")

    def _check_length(self, state: dict[str, Any]) -> None:
        """Raise TrainError for a state beyond the end of this run: what it would leave is not what it was asked for."""
        steps, epochs = self.settings.steps, self.settings.epochs or 1
        if steps is not None and state["step"] > steps:
            taken = state["step"]
            raise TrainError(f"{taken} steps were taken, and the run ends after {steps}: set 'steps' to {taken} or more")
        if steps is None and (state["epoch"], state["done"]) > (epochs, 0):
            begun = state["epoch"] + (state["done"] > 0)
            raise TrainError(f"{begun} epochs were begun, and the run ends after {epochs}: set 'epochs' to {begun} or more")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict` that `check` has accepted."""
        for key in ("step", "epoch", "best", "score", "best_step", "measured", "waited", "log_length"):
            setattr(self, key, state[key])
        self.done, self.total = state["done"] // (self.size or 1), state["total"] / (self.size or 1)
        self.accumulate = state["accumulate"] or self.settings.accumulate

    def judge(self, metrics: dict[str, float], highest: str | None) -> bool:
        """Return whether a test is the best so far: by the metric `highest`, of which more is better, else by the lowest
        loss."""
        name = highest if highest is not None and highest in metrics else "loss"
        if name not in metrics:
            listed = ", ".join(metrics) or "nothing"
            raise TrainError(f"test.patience and test.best need the task's best metric or 'loss'; the tests give {listed}")
        score = -metrics[name] if name == "loss" != highest else metrics[name]
        better = score > (float("-inf") if self.score is None else self.score)
        if better:
            self.score, self.best_step, self.measured, self.waited = score, self.step, dict(metrics), 0
        else:
            self.waited += 1
        return better

    @property
    def per_epoch(self) -> int:
        """Number of steps of an epoch."""
        return -(-self.batches // self.accumulate)

    @property
    def steps(self) -> int:
        """Number of steps of the whole run, as it is planned now."""
        if self.settings.steps is not None:
            return self.settings.steps
        left = (self.settings.epochs or 1) - self.epoch
        here = -(-(self.batches - self.done) // self.accumulate)
        return self.step + (here + (left - 1) * self.per_epoch if left > 0 else 0)

    @property
    def epochs(self) -> int:
        """Number of epochs of the whole run; the last one may be partial."""
        if self.settings.steps is None:
            return self.settings.epochs or 1
        return self.epoch + -(-max(0, self.settings.steps - self.step) // self.per_epoch)

    @property
    def seen(self) -> int:
        """Number of batches done."""
        return self.epoch * self.batches + self.done

    def notes(self) -> list[str]:
        """Return notes for the user before the training."""
        rest = self.batches % self.accumulate
        short = f"the last step of each epoch takes {rest} batches, not {self.accumulate}: an epoch has {self.batches}"
        return [short] if rest else []

    def next_batches(self) -> int:
        """Return the number of batches of the next step."""
        return min(self.accumulate, self.batches - self.done)

    def update(self, name: str, value: object) -> None:
        """Set `grad_accum` for a plugin, from the next epoch on. Raises ValueError for any other name or value."""
        if name != "grad_accum":
            raise ValueError(f"'{name}' cannot be changed during the run; only 'grad_accum' can")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"grad_accum must be a whole number, 1 or more, not {value!r}")
        self.asked = value

    def renew(self) -> str:
        """Apply the requested `grad_accum` at the start of an epoch, and return a note about it."""
        asked, self.asked = self.asked, None
        if asked is None or asked == self.accumulate:
            return ""
        self.accumulate = asked
        finding = f"from epoch {self.epoch} on a step takes {asked} batches: {self.per_epoch} steps per epoch"
        return "; ".join([finding, *self.notes()])


def _finite(metrics: dict[str, float]) -> dict[str, float]:
    """Return the finite metrics, which JSON can represent."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
