"""One adapter of a run that trains many: its trainer, whose steps pause where all adapters share a pass of the base."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from .random_draws import seed_within
from .shared_pass import ModuleInTurn, PausableThread, SharedCall, SharedModule

if TYPE_CHECKING:
    from .trainer import Trainer


class AdapterRun:
    """One adapter of the run: its trainer, whose steps call `called` in the place of the module, and how far it is.

    `index` is its number among those that share a pass of the base; None is for one whose steps are taken in turn, `turn` of
    them each time.
    """

    def __init__(self, name: str, index: int | None, trainer: Trainer, turn: int) -> None:
        self.name, self.index, self.trainer = name, -1 if index is None else index, trainer
        self.called: SharedModule | ModuleInTurn = SharedModule()
        if index is None:
            self.called = ModuleInTurn(trainer.runner, lambda: trainer.progress.step, turn)
        self.ended, self.failed = False, ""
        self.passes = {entry["name"] for entry in trainer.module.meta["passes"]}
        trainer.runner = trainer.take_step.loss.runner = self.called
        with seed_within(trainer.seed_of_draws):
            trainer.state.end_step()  # its generators stand where those of a run alone do

    def start(self, asked: Callable[[], bool]) -> PausableThread:
        """Begin the loop of its trainer, in a thread that does not run yet."""
        thread = PausableThread(partial(self._train, asked), self.trainer.state.last_random)
        if isinstance(self.called, ModuleInTurn):
            self.called.begin()
        self.called.thread = thread
        return thread

    @property
    def shares(self) -> bool:
        """Whether it shares a pass of the base with others."""
        return isinstance(self.called, SharedModule)

    @property
    def calls(self) -> list[tuple[int, SharedCall]]:
        """Its call of the shared pass, with its index; none where it does not wait for one."""
        call = self.called.call if isinstance(self.called, SharedModule) else None
        return [] if call is None else [(self.index, call)]

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
