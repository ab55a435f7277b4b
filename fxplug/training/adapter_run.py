"""One adapter of a run that trains many: its trainer, whose steps pause where all adapters share a pass of the base."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from .random_draws import seed_within
from .shared_pass import PausableThread, SharedModule

if TYPE_CHECKING:
    from .trainer import Trainer


class AdapterRun:
    """One adapter of the run: its trainer, whose steps call `shared`, and how far it is."""

    def __init__(self, name: str, index: int, trainer: Trainer) -> None:
        self.name, self.index, self.trainer, self.shared = name, index, trainer, SharedModule()
        self.ended, self.failed = False, ""
        self.passes = {entry["name"] for entry in trainer.module.meta["passes"]}
        trainer.runner = trainer.take_step.loss.runner = self.shared
        with seed_within(trainer.seed_of_draws):
            trainer.state.end_step()  # its generators stand where those of a run alone do

    def start(self, asked: Callable[[], bool]) -> PausableThread:
        """Begin the loop of its trainer, in a thread that does not run yet."""
        self.shared.thread = PausableThread(partial(self._train, asked), self.trainer.state.last_random)
        return self.shared.thread

    def rewind(self, here: bool) -> None:
        """Go back in its log to the step that it is at, after its state was loaded from its own folder, or another."""
        trainer, step = self.trainer, self.trainer.progress.step
        dropped = trainer.watch.rewind(step, trainer.progress.log_length if here else 0)
        trainer.outputs.folder.go_back(step, 0, dropped)
        trainer.history = trainer.watch.history()

    def _train(self, asked: Callable[[], bool]) -> None:
        self.trainer.take_steps(asked)
        if not self.trainer.take_step.stop:
            if self.trainer.tests and self.trainer.progress.done:  # it ended within an epoch
                self.trainer.test()
            self.trainer.draw_samples()
