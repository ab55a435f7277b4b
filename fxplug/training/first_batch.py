"""What the first batch tells of a run before it starts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from accelerate import Accelerator

from ..core.ir.traced_module import TracedModule
from .diagnosis import check_fits, find_without_gradient
from .distributed import gather, set_mode
from .evaluation import move
from .random_draws import RunDraws
from .tasks.task import Batch, Task
from .train_section import Train


@dataclass(frozen=True)
class FirstBatch:
    """The first batch of a run, which `peek` gives; None where it is not known."""

    module: TracedModule
    task: Task
    settings: Train
    accelerator: Accelerator
    draws: RunDraws
    peek: Callable[[], Batch | None] | None

    def check(self) -> None:
        """Raise TrainError if the first batch does not fit the graph, unless a plugin may still change it."""
        batch = self._read()
        if batch is not None:
            check_fits(self.module, self.task, batch, self.draws.of(1), self.accelerator)

    def is_some_without_gradient(self) -> bool:
        """Return whether a process's trainable parameters get no gradient from the first batch: DDP must look for them."""
        if self.accelerator.num_processes == 1 or self.settings.shard or self.settings.parallel is not None:
            return False
        batch = self._read()
        draws = self.draws.of(1)
        found = batch is None or bool(find_without_gradient(self.module, self.task, batch, draws, self.accelerator))
        return any(gather(self.accelerator, found))

    def _read(self) -> Batch | None:
        batch = None
        if self.peek is not None:
            with contextlib.suppress(Exception):  # the data set's own, which the first step tells
                batch = self.peek()
        set_mode(self.module, self.module, self.settings.mode)
        return batch and move(batch, self.accelerator.device)
