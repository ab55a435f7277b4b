"""One optimizer step: micro batches to a loss, gradients, checks, and new weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import TrainError
from ..module import TracedModule
from ..settings import Train
from .diagnosis import Finder, bad_gradients
from .draws import Draws
from .groups import check_gradients
from .launch import mean
from .plugins import Plugins
from .tasks.task import Task

OVERFLOWS = 50  # so many fp16 steps in a row may be skipped while the loss scale falls
Batch = dict[str, Any]


class Stepper:
    """Takes optimizer steps. `module` is what was traced, `runner` what runs: the same lowered, compiled, in DDP."""

    def __init__(
        self,
        accelerator: Accelerator,
        module: TracedModule,
        runner: nn.Module,
        task: Task,
        groups: list[dict[str, Any]],
        optimizer: Any,
        settings: Train,
        plugins: Plugins,
        seed: int,
    ) -> None:
        self.accelerator, self.module, self.runner, self.task = accelerator, module, runner, task
        self.groups, self.optimizer, self.settings, self.plugins = groups, optimizer, settings, plugins
        self.seed = seed
        self.note: Callable[[str], object] = print
        self.parameters = [p for group in groups for p in group["params"]]
        self.checked, self.overflows = False, 0

    def __call__(self, batches: Sequence[Batch], step: int, context: dict[str, Any]) -> dict[str, float]:
        """Step number `step` (the first is 1) on its micro batches, which are on the device already. Gives loss, grad_norm and
        what the task reports, as means over micro batches and processes.

        Raises TrainError for a loss or gradient that is not finite, with the step, the batch and the first region that went
        non-finite, and after the first step for a block that no gradient reached. No weight has changed then.
        """
        reports: list[dict[str, float]] = []
        for micro, batch in enumerate(batches):
            last = micro == len(batches) - 1
            with self._unsynchronised(not last):
                loss, report = self._loss(self.runner, batch, step, micro)
                self.plugins.call("on_backpropagation", loss=loss, module=self.module, **context)
                if not loss.requires_grad:
                    raise TrainError("the loss does not depend on what trains: it is detached, or the passes do not reach it")
                self.accelerator.backward(loss / len(batches))
            reports.append({"loss": float(loss.detach()), **report})
            if not math.isfinite(reports[-1]["loss"]):
                raise TrainError(self._diagnosed(step, micro, batch, f"the loss is {reports[-1]['loss']}"))
        norm = self._finished(step, batches)
        keys = list(reports[0])
        means = mean(self.accelerator, [sum(report[key] for report in reports) / len(reports) for key in keys])
        return {**dict(zip(keys, means, strict=True)), "grad_norm": norm}

    def _unsynchronised(self, accumulating: bool) -> Any:
        ddp = isinstance(self.runner, DistributedDataParallel)
        runner: Any = self.runner
        return runner.no_sync() if ddp and accumulating else nullcontext()

    def _loss(self, runner: nn.Module, batch: Batch, step: int, micro: int) -> tuple[Tensor, dict[str, float]]:
        accelerator = self.accelerator
        draws = Draws(
            self.seed,
            step,
            micro,
            rank=accelerator.process_index,
            world=accelerator.num_processes,
            device=accelerator.device,
        )
        with accelerator.autocast():
            found = self.task.loss(runner, batch, draws)
        loss, report = found if isinstance(found, tuple) else (found, {})
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            name = type(self.task).__name__
            raise TrainError(f"{name}.loss must give one number, the mean over the batch; it gave one {shape}")
        return loss, {key: float(v.detach() if isinstance(v, Tensor) else v) for key, v in report.items()}

    def _finished(self, step: int, batches: Sequence[Batch]) -> float:
        """Check the gradients, clip them and take the step. Gives their norm before clipping."""
        if not self.checked:
            zero = check_gradients(self.module, self.groups)
            if zero:
                more = f" and {len(zero) - 5} more" * (len(zero) > 5)
                self.note(f"the gradient of {', '.join(zero[:5])}{more} is exactly zero in the first step")
            self.checked = True
        self.accelerator.unscale_gradients(self.optimizer)
        limit = self.settings.clip or float("inf")
        whole: Any = torch.nn.utils.clip_grad_norm_(self.parameters, limit)
        norm = float(whole.full_tensor() if hasattr(whole, "full_tensor") else whole)
        if not math.isfinite(norm):
            self._overflowed(step, batches)
        else:
            self.overflows = 0
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _overflowed(self, step: int, batches: Sequence[Batch]) -> None:
        """fp16: the scaler skips the step and halves its scale, which is normal now and then. Else the run stops."""
        self.overflows += 1
        if self.accelerator.scaler is not None and self.overflows < OVERFLOWS:
            return
        finding = bad_gradients(dict(self.module.named_parameters())) or "the norm of the gradient is not finite"
        raise TrainError(self._diagnosed(step, len(batches) - 1, batches[-1], finding))

    def _diagnosed(self, step: int, micro: int, batch: Batch, finding: str) -> str:
        """The finding with the batch and the first region that went non-finite, by one forward of the module itself."""
        finder = Finder(self.module)
        with torch.no_grad():
            self._loss(finder, batch, step, micro)
        names = [str(name) for name in batch.get("name", [])]
        shown = f"{', '.join(names[:8])}{' ...' * (len(names) > 8)}" if names else "of one without names"
        cause = finder.finding or "every value in the forward is finite: the loss itself, or the backward pass, is not"
        return f"step {step}: {finding}\n  batch: {shown}\n  {cause}\n  a lower lr, 'clip', or a wider precision may help"
