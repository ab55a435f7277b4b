"""One optimizer step: micro batches to a loss, gradients, checks, and new weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..core.errors import GuardError, TrainError
from ..lowerings.frozen_norms import hold_norms
from .diagnosis import Finder, bad_gradients, misfit
from .distributed import mean, set_mode
from .param_groups import check_gradients
from .random_draws import Draws
from .splitting import called

if TYPE_CHECKING:
    from .trainer import Trainer

OVERFLOWS = 50  # so many fp16 steps in a row may be skipped while the loss scale falls
Batch = dict[str, Any]


class Stepper:
    """Takes optimizer steps. `module` is what was traced, `runner` what runs: the same lowered, compiled, in DDP."""

    def __init__(self, trainer: Trainer) -> None:
        self.accelerator, self.module, self.runner = trainer.accelerator, trainer.module, trainer.runner
        self.task, self.groups, self.optimizer = trainer.task, trainer.groups, trainer.optimizer
        self.settings, self.plugins, self.trained = trainer.settings, trainer.plugins, trainer.trained
        self.seed, self.rank, self.world = trainer.seed, trainer.rank, trainer.world
        self.note: Callable[[str], object] = print
        self.asked: Callable[[], bool] = lambda: False  # whether this process was told to stop
        self.stop = False  # whether any was; all know it after the same step
        self.frozen = {name for name, _ in self.module.named_parameters()} - self.trained.keys()
        self.checked, self.overflows = False, 0
        self.whole = True  # whether all of a step is done; the trainer says so when it has counted it

    def __call__(self, batches: Sequence[Batch], step: int, place: dict[str, int]) -> dict[str, float]:
        """Step number `step` (the first is 1) on its micro batches, which are on the device already. Gives loss, grad_norm and
        what the task reports, as means over micro batches and processes. `place` is where plugins are told that it begins:
        epoch, global_step, local_step; they are told the end of all its batches but the last.

        Raises TrainError for a loss or gradient that is not finite, with the step, the batch and the first region that went
        non-finite, and after the first step for a block that no gradient reached. No weight has changed then.
        """
        reports: list[dict[str, float]] = []
        for micro, batch in enumerate(batches):
            began, last = time.perf_counter(), micro == len(batches) - 1
            here = {"batch": batch, "epoch": place["epoch"]}
            here |= {key: place[key] + micro for key in ("global_step", "local_step")}
            self.plugins.call("on_step_start", **here)
            with self._unsynchronised(not last):
                loss, report = self._loss(self.runner, batch, step, micro)
                if not loss.requires_grad:
                    raise TrainError("the loss does not depend on what trains: it is detached, or the passes do not reach it")
                self.accelerator.backward(loss / len(batches))
            reports.append({"loss": float(loss.detach()), **report})
            if not math.isfinite(reports[-1]["loss"]):
                raise TrainError(self._diagnosed(step, micro, batch, f"the loss is {reports[-1]['loss']}"))
            if last:
                self._check_gradients()
            self.plugins.call("on_backpropagation", loss=loss.detach(), **here)
            if not last:
                record = {"loss": reports[-1]["loss"], "lr": self.optimizer.param_groups[0]["lr"]}
                self.plugins.call("on_step_end", **record, seconds=time.perf_counter() - began, **here)
        keys = sorted({key for report in reports for key in report})
        own = [[report[key] for report in reports if key in report] for key in keys]
        *means, asked = mean(self.accelerator, [*(sum(v) / len(v) for v in own), float(self.asked())])
        norm = self._finished(step, batches)
        self.stop = asked > 0
        skipped = {"skipped": 1.0} if self.skipped else {}
        return {**dict(zip(keys, means, strict=True)), "grad_norm": norm, **skipped}

    @property
    def skipped(self) -> bool:
        """Whether the last step changed nothing, because its gradients overflowed in fp16."""
        return bool(self.optimizer.step_was_skipped)

    def _unsynchronised(self, accumulating: bool) -> Any:
        ddp = isinstance(self.runner, DistributedDataParallel)
        runner: Any = self.runner
        return runner.no_sync() if ddp and accumulating else nullcontext()

    def _loss(self, runner: nn.Module, batch: Batch, step: int, micro: int) -> tuple[Tensor, dict[str, float]]:
        accelerator = self.accelerator
        draws = Draws(self.seed, step, micro, rank=self.rank, world=self.world, device=accelerator.device)
        try:
            with accelerator.autocast():
                found = self.task.loss(runner, batch, draws)
        except GuardError as error:
            call = called(self.task, batch, draws, self.accelerator)
            raise TrainError(misfit(error, self.module, batch, *call)) from error
        loss, report = found if isinstance(found, tuple) else (found, {})
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            name = type(self.task).__name__
            raise TrainError(f"{name}.loss must give a tensor of one number, the mean over the batch; it gave {got}")
        return loss, {key: float(v.detach() if isinstance(v, Tensor) else v) for key, v in report.items()}

    def _check_gradients(self) -> None:
        """In the first step, before a plugin changes them."""
        if self.checked:
            return
        zero = check_gradients(self.module, self.groups)
        if zero:
            more = f" and {len(zero) - 5} more" * (len(zero) > 5)
            self.note(f"{', '.join(zero[:5])}{more} got no gradient, or one that is exactly zero, in the first step")
        self.checked = True

    def _finished(self, step: int, batches: Sequence[Batch]) -> float:
        """Clip the gradients and take the step. Gives their norm before clipping."""
        self.accelerator.unscale_gradients(self.optimizer)
        limit = self.settings.clip or float("inf")
        whole: Any = torch.nn.utils.clip_grad_norm_(self.trained.values(), limit)
        norm = float(whole.full_tensor() if hasattr(whole, "full_tensor") else whole)
        if not math.isfinite(norm):
            self._overflowed(step, batches)
        else:
            self.overflows = 0
        self.whole = False
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _overflowed(self, step: int, batches: Sequence[Batch]) -> None:
        """fp16: the scaler skips the step and halves its scale, which is normal now and then. Else the run stops."""
        self.overflows += 1
        if self.accelerator.scaler is not None and self.overflows < OVERFLOWS:
            return
        finding = bad_gradients(self.trained) or "the norm of the gradient is not finite"
        raise TrainError(self._diagnosed(step, len(batches) - 1, batches[-1], finding))

    def _diagnosed(self, step: int, micro: int, batch: Batch, finding: str) -> str:
        """The finding with the batch and the first region that went non-finite, by one forward as in training."""
        cause = "a sharded run does not say in which region: one process without 'shard' does"
        if not self.settings.shard:
            finder = Finder(hold_norms(self.module, self.frozen))
            set_mode(finder.watched, self.module, self.settings.mode)
            with torch.no_grad():
                self._loss(finder, batch, step, micro)
            cause = finder.finding or "every value in the forward is finite: the loss itself, or the backward pass, is not"
        names = [str(name) for name in batch.get("name", [])]
        shown = f"{', '.join(names[:8])}{' ...' * (len(names) > 8)}" if names else "of one without names"
        return f"step {step}: {finding}\n  batch: {shown}\n  {cause}\n  a lower lr, 'clip', or a wider precision may help"
