"""Looking at what was learnt: tests, and pictures."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..errors import TrainError
from .distributed import gathered, set_mode
from .random_draws import Draws
from .tasks.task import Batch, means

if TYPE_CHECKING:
    from .trainer import Trainer


def tested(trainer: Trainer) -> dict[str, float]:
    """The task's metrics on the test data, over all processes; the average of the weights is tested when there is one."""
    if trainer.tests is None:
        raise TrainError("there is nothing to test on: give 'test' in the data section, or test=...")
    begun = time.perf_counter()
    most = max(gathered(trainer.accelerator, trainer.tests.steps))
    with _evaluating(trainer) as module:
        totals, count = _totals(trainer, module, trainer.tests.epoch(0))
        for _ in range(most - count if trainer.sharded else 0):
            _totals(trainer, module, iter([trainer.tests.first(1)]))  # all processes of a sharded module call it as often
    parts = gathered(trainer.accelerator, {name: (float(a), float(b)) for name, (a, b) in totals.items()})
    metrics = means({name: (sum(p[name][0] for p in parts), sum(p[name][1] for p in parts)) for name in parts[0]})
    best, chosen = trainer.progress.best, trainer.task.best
    if chosen in metrics and (chosen not in best or metrics[chosen] >= best[chosen]):
        trainer.progress.best = dict(metrics)
    seconds = (time.perf_counter() - begun) / max(1, trainer.tests.steps)
    trainer.watch.test(trainer.progress.epoch or 1, metrics, seconds, trainer.progress.best)
    return metrics


def pictures(trainer: Trainer) -> None:
    """Show what the task's samples are now, where it has any."""
    with _evaluating(trainer) as module:
        images = trainer.task.samples(module, Draws(trainer.seed, 0, device=trainer.accelerator.device))
    if images is not None:
        trainer.watch.beside_samples(trainer.task.beside_samples)
        trainer.watch.samples(trainer.progress.step, images)


def _totals(trainer: Trainer, module: nn.Module, batches: Iterator[Batch]) -> tuple[dict[str, tuple[float, float]], int]:
    """What the task's test gives for batches, and how many they were."""
    counted = itertools.count()
    taken = (trainer.moved(batch) for batch, _ in zip(batches, counted, strict=False))
    return trainer.task.test(module, taken), next(counted)


@contextmanager
def _evaluating(trainer: Trainer) -> Iterator[nn.Module]:
    """The module for tests and pictures: in evaluation, with averaged weights; the run's random numbers stay as they are."""
    both = trainer.divided.twin_error == trainer.module.twin_error  # else only one mode can be divided
    module = trainer.sharded or (trainer.divided if both else trainer.module)
    device = trainer.accelerator.device
    if trainer.accelerator.num_processes > 1:
        for buffer in module.buffers():  # statistics that each process took of its own samples
            torch.distributed.broadcast(buffer, 0)
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.no_grad(),
        trainer.ema.applied() if trainer.ema else nullcontext(),
        trainer.accelerator.autocast(),
    ):
        module.eval()
        yield module
    set_mode(trainer.runner, trainer.module, trainer.settings.mode)
