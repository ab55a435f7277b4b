"""One optimizer step: micro batches to a loss, gradients, checks, and new weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..core.errors import TrainError
from .diagnosis import find_bad_gradients
from .distributed import average_by_name
from .plugins import Plugins
from .run_loss import RunLoss
from .tasks.task import Batch

OVERFLOWS = 50  # so many fp16 steps in a row may be skipped while the loss scale falls


class Stepper:
    """Takes the optimizer steps of a run.

    `clip` is the largest norm that the gradients of the `trained` parameters have together. `look_at_gradients` is called in
    the first step, before a plugin changes them.
    """

    def __init__(
        self,
        loss: RunLoss,
        optimizer: Any,
        trained: Mapping[str, Tensor],
        clip: float | None,
        plugins: Plugins,
        look_at_gradients: Callable[[], None],
    ) -> None:
        self.loss, self.optimizer, self.trained, self.clip = loss, optimizer, trained, clip
        self.accelerator, self.plugins, self.look_at_gradients = loss.accelerator, plugins, look_at_gradients
        self.asked: Callable[[], bool] = lambda: False  # whether this process was told to stop
        self.stop = False  # whether any was; all know it after the same step
        self.checked, self.overflows = False, 0
        self.has_more = False  # whether the step at hand has further micro batches
        self.whole = True  # whether all of a step is done; the trainer says so when it has counted it
        self._names: list[str] = []  # of numbers that any process has reported

    def __call__(self, batches: Sequence[Batch], step: int, place: dict[str, int]) -> dict[str, float]:
        """Take step number `step` (the first is 1) on its micro batches, which are on the device already. Returns loss,
        grad_norm and the task's values, as means over micro batches and processes. `place` (epoch, global_step, local_step) is
        passed to the plugins' hooks at the start of the step, and at the end of all its batches but the last.

        Raises TrainError for a loss or gradient that is not finite, with the step, the batch and the first region with
        non-finite values, and after the first step for a block that no gradient reached. No weight has changed then.
        """
        counts = [count_samples(batch) for batch in batches]
        reports: list[dict[str, float]] = []
        for micro, batch in enumerate(batches):
            last = micro == len(batches) - 1
            self.has_more = not last
            here = {"batch": batch, "epoch": place["epoch"]}
            here |= {key: place[key] + micro for key in ("global_step", "local_step")}
            began = time.perf_counter()
            self.plugins.call("on_step_start", **here)
            with nullcontext() if last else self.accelerator.no_sync(self.loss.runner):
                loss, report = self.loss(batch, step, micro, len(batches))
                self.loss.backward(loss / (sum(counts) / counts[micro]))
            loss = loss.detach()
            reports.append({"loss": float(loss), **report})
            if not math.isfinite(reports[-1]["loss"]):
                raise TrainError(self.loss.diagnose(f"the loss is {float(loss)}", batch, step, micro, len(batches)))
            if last and not self.checked:
                self.look_at_gradients()
                self.checked = True
            self.plugins.call("on_backpropagation", loss=loss, **here)
            if not last:
                record = {"loss": float(loss), "lr": self.optimizer.param_groups[0]["lr"]}
                self.plugins.call("on_step_end", **record, seconds=time.perf_counter() - began, **here)
        means, asked = average_by_name(self.accelerator, _weighted(reports, counts), self._names, float(self.asked()))
        norm = self._change_weights(step, batches)
        self.stop = asked > 0
        skipped = {"skipped": 1.0} if self.skipped else {}
        return {**means, "grad_norm": norm, **skipped}

    @property
    def skipped(self) -> bool:
        """Return whether the last step changed nothing because its gradients overflowed in fp16."""
        return bool(getattr(self.optimizer, "step_was_skipped", False))

    def _change_weights(self, step: int, batches: Sequence[Batch]) -> float:
        """Clip the gradients, change the weights, and return the norm before clipping."""
        self.accelerator.unscale_gradients(self.optimizer)
        whole: Any = torch.nn.utils.clip_grad_norm_(self.trained.values(), self.clip or float("inf"))
        norm = float(whole.full_tensor() if hasattr(whole, "full_tensor") else whole)
        if not math.isfinite(norm):
            self._overflowed(step, batches)
        else:
            self.overflows = 0
        self.whole = False
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def _overflowed(self, step: int, batches: Sequence[Batch]) -> None:
        """Count an fp16 overflow, after which the scaler skips the step and halves its scale; raise TrainError for too many."""
        self.overflows += 1
        if self.accelerator.scaler is not None and self.overflows < OVERFLOWS:
            return
        finding = find_bad_gradients(self.trained) or "the norm of the gradient is not finite"
        raise TrainError(self.loss.diagnose(finding, batches[-1], step, len(batches) - 1, len(batches)))


def count_samples(batch: Batch) -> int:
    """Return the number of samples of a batch: the length of its first tensor or list; 1 where it has none."""
    return max(1, next((len(v) for v in batch.values() if isinstance(v, list) or (isinstance(v, Tensor) and v.ndim)), 1))


def _weighted(reports: Sequence[dict[str, float]], counts: Sequence[int]) -> dict[str, float]:
    """Return the mean of each number over the samples of the micro batches that report it."""
    found = {}
    for key in sorted({key for report in reports for key in report}):
        rows = [(report[key], count) for report, count in zip(reports, counts, strict=True) if key in report]
        equal = len({count for _, count in rows}) == 1
        found[key] = sum(v for v, _ in rows) / len(rows) if equal else sum(v * n for v, n in rows) / sum(n for _, n in rows)
    return found
