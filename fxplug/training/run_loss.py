"""The loss of a batch as a run computes it, and what is wrong with a batch whose loss or gradient is not finite."""

from __future__ import annotations

from collections.abc import Callable

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..core.errors import GuardError, TrainError
from ..core.ir.traced_module import TracedModule
from ..lowerings.frozen_norms import freeze_norms
from .diagnosis import describe_misfit, find_first_not_finite
from .distributed import set_mode
from .random_draws import RunDraws
from .shared_pass import SharedModule
from .shared_samples import find_call
from .tasks.task import Batch, Task
from .train_section import Train


class RunLoss:
    """The loss of micro batches in the precision of a run, with random numbers that the seed and the step decide.

    `module` is what was traced, `runner` the same lowered, compiled, in DDP; `frozen` is a predicate on names of parameters.
    """

    def __init__(
        self,
        module: TracedModule,
        runner: nn.Module,
        task: Task,
        settings: Train,
        accelerator: Accelerator,
        draws: RunDraws,
        frozen: Callable[[str], bool],
    ) -> None:
        self.module, self.runner, self.task, self.settings = module, runner, task, settings
        self.accelerator, self.draws, self.frozen = accelerator, draws, frozen

    def __call__(self, batch: Batch, step: int, micro: int, micros: int) -> tuple[Tensor, dict[str, float]]:
        """Compute the mean loss, a scalar, and what the task reports, of micro batch `micro` of `micros`.

        Raises TrainError for a batch that the graph does not take, and for a loss that is not one number, or of no parameter.
        """
        draws = self.draws.of(step, micro, micros)
        try:
            with self.accelerator.autocast():
                found = self.task.loss(self.runner, batch, draws)
        except GuardError as error:
            args, kwargs = find_call(self.task, batch, draws, self.accelerator)
            raise TrainError(describe_misfit(error, self.module, batch, args, kwargs)) from error
        loss, report = found if isinstance(found, tuple) else (found, {})
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            name = type(self.task).__name__
            raise TrainError(f"{name}.loss must return a tensor of one number, the mean over the batch; it returned {got}")
        if not loss.requires_grad:
            why = self.task.unreached or "it is detached, or the passes do not affect it"
            raise TrainError(f"the loss does not depend on any trained parameter: {why}")
        return loss, {key: float(v.detach() if isinstance(v, Tensor) else v) for key, v in report.items()}

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss to those of the parameters; with other adapters' losses, where they share a pass."""
        if isinstance(self.runner, SharedModule):
            loss.backward()  # type: ignore[no-untyped-call]  # up to the results of the module
            self.runner.wait_for_gradients()
        else:
            self.accelerator.backward(loss)

    def diagnose(self, finding: str, batch: Batch, step: int, micro: int, micros: int) -> str:
        """Add to a finding the batch and the first region that went non-finite, by one forward as in training."""
        cause = "a sharded run cannot find the region: run one process without 'shard' to see it"
        if self.settings.blocks_to_swap and self.accelerator.device.type != "cpu":
            cause = "a run with weights on the host cannot find the region: run without 'blocks_to_swap' to see it"
        elif not self.settings.shard:
            watched = freeze_norms(self.module, self.frozen)
            set_mode(watched, self.module, self.settings.mode)
            args, kwargs = find_call(self.task, batch, self.draws.of(step, micro, micros), self.accelerator)
            with torch.no_grad(), self.accelerator.autocast():
                found = find_first_not_finite(watched, args, kwargs)
            cause = found or "every value in the forward pass is finite, so the loss or the backward pass is not"
        names = [str(name) for name in batch.get("name", [])]
        shown = f"{', '.join(names[:8])}{' ...' * (len(names) > 8)}" if names else "a batch without names"
        return f"step {step}: {finding}\n  batch: {shown}\n  {cause}\n  a lower lr, 'clip', or a wider precision may help"
