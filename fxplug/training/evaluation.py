"""Tests and pictures of a run: in evaluation, with averaged weights where there are any."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from .distributed import gather
from .random_draws import Draws
from .tasks.task import Task, compute_means


class Evaluation:
    """Evaluates `module` on a task, with its parameters as in the context `weights`; `after` puts what trains back into its
    mode. The random numbers stay where they are."""

    def __init__(
        self,
        module: nn.Module,
        task: Task,
        accelerator: Accelerator,
        weights: Callable[[], AbstractContextManager[None]],
        after: Callable[[], None],
        *,
        sharded: bool,
    ) -> None:
        self.module, self.task, self.accelerator, self.weights, self.after = module, task, accelerator, weights, after
        self.sharded = sharded

    def test(self, loader: Any) -> dict[str, float]:
        """Return the task's metrics on a loader of test data, over all processes."""
        most = max(gather(self.accelerator, loader.steps))
        with self.evaluating() as module:
            totals, count = self._totals(module, loader.epoch(0))
            for _ in range(most - count if self.sharded else 0):
                self._totals(module, iter([loader.first(1)]))  # all processes of a sharded module call it as often
        parts = gather(self.accelerator, {name: (float(a), float(b)) for name, (a, b) in totals.items()})
        names = dict.fromkeys(name for part in parts for name in part)
        pairs = {name: [part[name] for part in parts if name in part] for name in names}
        return compute_means({name: (sum(a for a, _ in found), sum(b for _, b in found)) for name, found in pairs.items()})

    def samples(self, draws: Draws) -> Tensor | None:
        """Return the task's pictures, [n, c, h, w] in [0, 1], or videos, or None if it has none."""
        with self.evaluating() as module:
            return self.task.samples(module, draws)

    def _totals(self, module: nn.Module, batches: Iterator[dict[str, Any]]) -> tuple[dict[str, tuple[float, float]], int]:
        """Return the totals of the task's test over batches, and the number of batches."""
        counted = itertools.count()
        taken = (move(batch, self.accelerator.device) for batch, _ in zip(batches, counted, strict=False))
        return self.task.test(module, taken), next(counted)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Yield the module in evaluation mode with the weights to evaluate; put it back into training afterwards."""
        device = self.accelerator.device
        if self.accelerator.num_processes > 1:
            for buffer in self.module.buffers():  # statistics that each process took of its own samples
                torch.distributed.broadcast(buffer, 0)
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.no_grad(),
            self.weights(),
            self.accelerator.autocast(),
        ):
            self.module.eval()
            yield self.module
        self.after()


def move(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Move the tensors of a batch to a device."""
    return {k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in batch.items()}
