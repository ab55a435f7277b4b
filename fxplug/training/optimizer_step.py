"""One optimizer step: micro batches to a loss, gradients, checks, and new weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.errors import GuardError, TrainError
from ..lowerings.frozen_norms import freeze_norms
from .diagnosis import bad_gradients, first_not_finite, misfit
from .distributed import mean_by_name, set_mode
from .param_groups import check_gradients
from .random_draws import Drawn, Draws
from .shared_samples import called

if TYPE_CHECKING:
    from .trainer import Trainer

OVERFLOWS = 50  # so many fp16 steps in a row may be skipped while the loss scale falls
Batch = dict[str, Any]


class Stepper:
    """Takes the optimizer steps of a trainer. Its `module` is what was traced, `runner` the same lowered, compiled, in DDP."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.asked: Callable[[], bool] = lambda: False  # whether this process was told to stop
        self.stop = False  # whether any was; all know it after the same step
        self.checked, self.overflows = False, 0
        self.whole = True  # whether all of a step is done; the trainer says so when it has counted it
        self.micros, self.drawn = 1, Drawn(0, 0)  # of the step at hand
        self._names: list[str] = []  # of numbers that any process has reported

    def __call__(self, batches: Sequence[Batch], step: int, place: dict[str, int]) -> dict[str, float]:
        """Step number `step` (the first is 1) on its micro batches, which are on the device already. Gives loss, grad_norm and
        what the task reports, as means over micro batches and processes. `place` is where plugins are told that it begins:
        epoch, global_step, local_step; they are told the end of all its batches but the last.

        Raises TrainError for a loss or gradient that is not finite, with the step, the batch and the first region that went
        non-finite, and after the first step for a block that no gradient reached. No weight has changed then.
        """
        counts = [count_samples(batch) for batch in batches]
        self.micros = len(batches)
        reports: list[dict[str, float]] = []
        for micro, batch in enumerate(batches):
            began, last = time.perf_counter(), micro == len(batches) - 1
            here = {"batch": batch, "epoch": place["epoch"]}
            here |= {key: place[key] + micro for key in ("global_step", "local_step")}
            self.trainer.plugins.call("on_step_start", **here)
            with nullcontext() if last else self.trainer.accelerator.no_sync(self.trainer.runner):
                loss, report = self._loss(batch, step, micro)
                if not loss.requires_grad:
                    raise TrainError(
                        "the loss does not depend on any trained parameter: it is detached, or the passes do not affect it"
                    )
                self.trainer.accelerator.backward(loss / (sum(counts) / counts[micro]))
            reports.append({"loss": float(loss.detach()), **report})
            if not math.isfinite(reports[-1]["loss"]):
                raise TrainError(self._diagnosed(step, micro, batch, f"the loss is {reports[-1]['loss']}"))
            if last:
                self._check_gradients()
            self.trainer.plugins.call("on_backpropagation", loss=loss.detach(), **here)
            if not last:
                record = {"loss": reports[-1]["loss"], "lr": self.trainer.optimizer.param_groups[0]["lr"]}
                self.trainer.plugins.call("on_step_end", **record, seconds=time.perf_counter() - began, **here)
        means, asked = mean_by_name(self.trainer.accelerator, _weighted(reports, counts), self._names, float(self.asked()))
        norm = self._finished(step, batches)
        self.stop = asked > 0
        skipped = {"skipped": 1.0} if self.skipped else {}
        return {**means, "grad_norm": norm, **skipped}

    @property
    def skipped(self) -> bool:
        """Whether the last step changed nothing, because its gradients overflowed in fp16."""
        return bool(self.trainer.optimizer.step_was_skipped)

    def _draws(self, step: int, micro: int) -> Draws:
        trainer, own = self.trainer, (micro, self.micros)
        if micro == 0:
            self.drawn = Drawn(trainer.seed, step)
        where = {"rank": trainer.rank, "world": trainer.world, "device": trainer.accelerator.device}
        return Draws(trainer.seed, step, *own, **where, drawn=self.drawn)

    def _loss(self, batch: Batch, step: int, micro: int) -> tuple[Tensor, dict[str, float]]:
        trainer, task, accelerator = self.trainer, self.trainer.task, self.trainer.accelerator
        draws = self._draws(step, micro)
        try:
            with accelerator.autocast():
                found = task.loss(trainer.runner, batch, draws)
        except GuardError as error:
            raise TrainError(misfit(error, trainer.module, batch, *called(task, batch, draws, accelerator))) from error
        loss, report = found if isinstance(found, tuple) else (found, {})
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            name = type(task).__name__
            raise TrainError(f"{name}.loss must return a tensor of one number, the mean over the batch; it returned {got}")
        return loss, {key: float(v.detach() if isinstance(v, Tensor) else v) for key, v in report.items()}

    def _check_gradients(self) -> None:
        """In the first step, before a plugin changes them."""
        if self.checked:
            return
        if lost := check_gradients(self.trainer.parts, self.trainer.groups):
            more = f" and {len(lost) - 5} more" * (len(lost) > 5)
            self.trainer.watch.note(f"{', '.join(lost[:5])}{more} got no gradient in the first step")
        self.checked = True

    def _finished(self, step: int, batches: Sequence[Batch]) -> float:
        """Clip the gradients and take the step. Gives their norm before clipping."""
        self.trainer.accelerator.unscale_gradients(self.trainer.optimizer)
        limit = self.trainer.settings.clip or float("inf")
        whole: Any = torch.nn.utils.clip_grad_norm_(self.trainer.trained.values(), limit)
        norm = float(whole.full_tensor() if hasattr(whole, "full_tensor") else whole)
        if not math.isfinite(norm):
            self._overflowed(step, batches)
        else:
            self.overflows = 0
        self.whole = False
        self.trainer.optimizer.step()
        self.trainer.optimizer.zero_grad(set_to_none=True)
        return norm

    def _overflowed(self, step: int, batches: Sequence[Batch]) -> None:
        """fp16: the scaler skips the step and halves its scale, which is normal now and then. Else the run stops."""
        self.overflows += 1
        if self.trainer.accelerator.scaler is not None and self.overflows < OVERFLOWS:
            return
        finding = bad_gradients(self.trainer.trained) or "the norm of the gradient is not finite"
        raise TrainError(self._diagnosed(step, len(batches) - 1, batches[-1], finding))

    def _diagnosed(self, step: int, micro: int, batch: Batch, finding: str) -> str:
        """The finding with the batch and the first region that went non-finite, by one forward as in training."""
        trainer, cause = self.trainer, "a sharded run cannot find the region: run one process without 'shard' to see it"
        if not trainer.settings.shard:
            watched = freeze_norms(trainer.module, trainer.frozen)
            set_mode(watched, trainer.module, trainer.settings.mode)
            args, kwargs = called(trainer.task, batch, self._draws(step, micro), trainer.accelerator)
            with torch.no_grad(), trainer.accelerator.autocast():
                found = first_not_finite(watched, args, kwargs)
            cause = found or "every value in the forward pass is finite, so the loss or the backward pass is not"
        names = [str(name) for name in batch.get("name", [])]
        shown = f"{', '.join(names[:8])}{' ...' * (len(names) > 8)}" if names else "a batch without names"
        return f"step {step}: {finding}\n  batch: {shown}\n  {cause}\n  a lower lr, 'clip', or a wider precision may help"


def count_samples(batch: Batch) -> int:
    """How many samples a batch has: the length of its first tensor or list; 1 where it has none."""
    return max(1, next((len(v) for v in batch.values() if isinstance(v, list) or (isinstance(v, Tensor) and v.ndim)), 1))


def _weighted(reports: Sequence[dict[str, float]], counts: Sequence[int]) -> dict[str, float]:
    """The mean of each number over the samples of the micro batches that report it."""
    found = {}
    for key in sorted({key for report in reports for key in report}):
        rows = [(report[key], count) for report, count in zip(reports, counts, strict=True) if key in report]
        equal = len({count for _, count in rows}) == 1
        found[key] = sum(v for v, _ in rows) / len(rows) if equal else sum(v * n for v, n in rows) / sum(n for _, n in rows)
    return found
