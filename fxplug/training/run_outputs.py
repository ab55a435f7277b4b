"""What a run leaves: checkpoints, the best of them, and the trained module; and how it is taken up again."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..core.artifacts.artifact import save
from ..core.errors import TrainError
from ..core.ir.traced_module import TracedModule
from ..core.torch_internals.modules import tree_map
from ..lowerings.regions.submodules import get_originals
from .checkpoint import PREFIX, Checkpoint, list_checkpoints, read
from .distributed import gather
from .identity import check_same_run
from .monitor import RunMonitor
from .optimizers import end_training, has_own_weights
from .param_groups import fill, fill_within
from .plugins import Plugins
from .random_draws import make_random_state
from .run_folder import RunFolder
from .state import TrainState, gather_full
from .tasks.task import Task


class RunOutputs:
    """Writes what a `state` is and what it has made of `module`, and reads it again.

    `out` is the folder of the run in every process, `folder` the same where this process writes. `describe` gives what the run
    is (see `describe_run`); `dtypes` are those that the trained parameters had; `sharded` is the module that runs, where
    weights are divided among processes.
    """

    def __init__(
        self,
        module: TracedModule,
        state: TrainState,
        folder: RunFolder,
        *,
        out: Path | None,
        describe: Callable[[], dict[str, Any]],
        config: Mapping[str, Any],
        task: Task,
        dtypes: Mapping[str, torch.dtype],
        sharded: nn.Module | None,
        accelerator: Accelerator,
        watch: RunMonitor,
        plugins: Plugins,
    ) -> None:
        self.module, self.state, self.folder, self.out = module, state, folder, out
        self.describe, self.config, self.task, self.dtypes = describe, dict(config), task, dtypes
        self.sharded, self.accelerator, self.watch, self.plugins = sharded, accelerator, watch, plugins
        self.progress, self.first = state.progress, accelerator.is_main_process
        self.best: Checkpoint | None = None  # where the run has no folder
        self.saved = False  # whether the module is written

    @contextlib.contextmanager
    def opened(self, start: Path | None) -> Iterator[None]:
        """Lock the folder of a run that continues from the checkpoint `start`."""
        self.open(start)
        try:
            yield
        finally:
            self.folder.close()

    def open(self, start: Path | None) -> None:
        """Lock the folder, in the first process for all. Raises TrainError, in every process, if that fails."""
        found = ""
        try:
            self.folder.open(resumes=start is not None and self.out is not None and start.is_relative_to(self.out))
        except TrainError as error:
            found = str(error)
        if found := next(filter(None, gather(self.accelerator, found)), ""):
            raise TrainError(found)

    # --- checkpoints

    def _checkpoint(self) -> Checkpoint:
        self.progress.log_length = self.watch.log_length
        return Checkpoint(self.state.state_dict(), self.describe(), gather(self.accelerator, make_random_state()))

    def keep(self) -> None:
        """Write the newest checkpoint, and call the plugins' hook. A full disk ends the run if the settings say so."""
        if self.out is None:
            return
        made = self._checkpoint()
        path = self.folder.keep(made)
        if path is not None:  # outside: what a plugin raises is not the disk's
            self._tell(path)

    def keep_at(self, path: Path) -> None:
        """Write a checkpoint to its own folder."""
        made = self._checkpoint()
        if self.first:
            self.folder.keep_at(path, made)

    def keep_best(self) -> None:
        """Keep the best tested weights: in the folder `best/`, or in memory if the run has no folder."""
        if self.out is not None:
            self.keep_at(self.out / "best")
        else:
            self.best = self._checkpoint()
            if has_own_weights(self.state.optimizer):  # the weights to evaluate are computed from what it keeps now
                self.best.state["optimizer"] = copy.deepcopy(self.best.state["optimizer"])

    def _tell(self, path: Path) -> None:
        place = {"epoch": self.progress.epoch, "global_step": self.progress.seen}
        names = {"save_folder": str(path), "diffusers_save_path": str(path)}
        self.plugins.call("on_model_save", path=path, **names, **place)

    def resume(self, path: Path) -> list[dict[str, Any]]:
        """Restore the run from a checkpoint, and return the random states of its processes.

        Files of later steps are moved aside. Raises TrainError, with the differences, for a checkpoint of another run, or one
        that lacks an entry.
        """
        kept = read(path)
        check_same_run(kept, self.describe(), path)
        try:
            self.state.load_state_dict(kept.state)
        except TrainError as error:
            raise TrainError(f"'{path}' does not fit this run: {error}; resume from another one") from error
        self._resume_best(path)
        here = self.out is not None and path.is_relative_to(self.out)
        dropped = self.watch.rewind(self.progress.step, self.progress.log_length if here else 0)
        self.folder.go_back(self.progress.step, self.progress.best_step, dropped)
        return kept.random

    def _resume_best(self, path: Path) -> None:
        """Restore the best weights as of a checkpoint: the folder `best` beside it, if it is still of that step."""
        if self.progress.score is None:
            return
        home = path.parent.parent if path.parent.name == "checkpoints" else path.parent
        with contextlib.suppress(TrainError):
            kept = read(home / "best")
            if kept.step == self.progress.best_step:
                if self.out is None:
                    self.best = kept
                elif self.first and home != self.out:
                    self.folder.keep_at(self.out / "best", kept)
                return
        gone = f"the weights of step {self.progress.best_step}, which tested best, are gone"
        self.watch.note(f"{gone}: the next test counts as the first")
        self.progress.score, self.progress.waited, self.progress.measured = None, 0, {}

    def take_best(self) -> None:
        """Load the best tested weights into the module: the averaged ones, if there are any."""
        self.accelerator.wait_for_everyone()  # the first process writes them
        kept = self.best
        if self.out is not None and (self.out / "best").is_dir():
            kept = read(self.out / "best")
        if kept is None:
            return  # no test had a number
        self.state.load_weights(kept.state)
        if has_own_weights(self.state.optimizer):
            self.state.load_optimizer(kept.state)
        if self.state.ema is not None:
            fill(self.state.trained, kept.state["ema"])
        averaged = "averaged " if self.state.ema is not None else ""
        self.watch.note(f"the module has the {averaged}weights of step {kept.step}, which had the best test")

    # --- the module

    def export(self) -> None:
        """Save the trained module, and the one with averaged weights, as artifacts: `module/` and `ema/`.

        Plugins get `on_training_end` before, with the weights that will be written: what they change is in the module.
        """
        averages = self.collect()
        self.plugins.call("on_training_end", global_step=self.progress.seen)
        self._write_modules(averages)
        self.saved = True
        if self.out is not None and self.first:
            self._tell(self.out / "module")

    def collect(self) -> dict[str, Any]:
        """Put the trained weights that are to be evaluated, whole and in their own dtype, into the module, and return the
        averaged ones by name."""
        end_training(self.state.optimizer)
        named, ema = {**self.state.trained, **dict(self.module.named_parameters())}, self.state.ema
        trained, averages = tree_map(gather_full, (self.state.trained, ema.average if ema else {}))
        if self.sharded is not None:  # the module itself still has the weights and buffers it began with
            fill(named, trained)
            fill(dict(self.module.named_buffers()), self.state.buffers)
        for name, dtype in self.dtypes.items():  # so that the module is of one dtype again, and can be called
            named[name].data = named[name].data.to(dtype)
        for module in (self.module, *(part.module for part in self.task.beside.values())):
            module.eval()
        return dict(averages)

    def _write_modules(self, averages: dict[str, Any]) -> None:
        if self.out is None or not self.first:
            return
        named = {**self.state.trained, **dict(self.module.named_parameters())}
        self._write("module", "text", "trained module")
        if averages:
            with fill_within(named, averages):
                self._write("ema", "text_ema", "module with averaged weights")

    def _write(self, name: str, text: str, what: str) -> None:
        """Save the trained models below the folder of the run: the module in `name`, or in a folder of its own in it where
        another denoiser trains beside it, and text encoders in `text`. Errors say `what` could not be written."""
        assert self.out is not None
        encoder = self.task.encoder if self.task.trains else None
        for path, module in self.list_saved(name, text).items():
            with self.folder.reported(what if path.is_relative_to(self.out / name) else "trained text encoder"):
                save(module, path, config=self.config)
        if encoder is not None:
            with self.folder.reported("trained text encoder"):
                encoder.save(self.out / text)

    def list_saved(self, name: str, text: str) -> dict[Path, TracedModule]:
        """List the folders of trained models, of which the module's is in `name`, and those of text encoders in `text`."""
        assert self.out is not None
        denoisers = {each: part.module for each, part in self.task.beside.items() if not part.encodes}
        own = {self.out / name / self.task.part: self.module} if denoisers else {self.out / name: self.module}
        encoders = {self.out / text / each: part.module for each, part in self.task.beside.items() if part.encodes}
        return {**own, **{self.out / name / each: module for each, module in denoisers.items()}, **encoders}

    def rescue(self, error: BaseException, whole: bool) -> None:
        """Save a checkpoint of the last complete step, and the module, after an error that ends a run.

        Of several processes the first one writes, without asking the others, which may have died; sharded weights are then lost
        back to the newest checkpoint, as are weights that an optimizer was changing (`whole` False). A note on the error says
        what was saved.
        """
        step = self.progress.step
        if self.out is None or not self.first or step == 0 or self.saved:
            return
        lost, module = None, f" and '{self.out / 'module'}'"
        kept = list_checkpoints(self.out / "checkpoints")
        if self.sharded is not None:
            lost = "its weights are sharded over several processes"
        elif not whole:
            lost = "the optimizer was changing the weights"
        elif not all(bool(p.isfinite().all()) for p in self.state.trained.values()):
            lost = "its weights are not finite"
        else:
            try:
                if not kept or kept[-1].name != f"{PREFIX}{step:08}":
                    self.progress.log_length = self.watch.log_length
                    random = [make_random_state(self.state.last_random)]
                    kept.append(self.folder.write(Checkpoint(self.state.state_dict(), self.describe(), random)))
            except Exception as other:  # the system's or torch's; the first error is the one that counts
                lost = f"it cannot be written: {other}"
        try:
            if lost is None:
                self._write_modules(self.collect())
        except Exception as other:  # as above
            module = f"; the module could not be written: {other}"
        text = f"{'stopped' if isinstance(error, KeyboardInterrupt) else 'the run ended'} after step {step}"
        if lost is None:
            text += f": the training is saved in '{kept[-1]}' (continue with --resume){module}"
        else:
            text += f", and nothing of its training is saved, because {lost}; {self.folder.newest}"
        error.add_note(text)
        self.watch.note(text, said=False)


def list_buffers(parts: Mapping[str, TracedModule]) -> dict[str, Tensor]:
    """Return the buffers of modules by their names in a checkpoint; `parts` by the prefix of these names."""
    return {f"{before}{name}": buffer for before, part in parts.items() for name, buffer in part.named_buffers()}


def list_sharded_buffers(sharded: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a sharded module by their names in the traced one."""
    named = get_originals(sharded)  # type: ignore[arg-type]
    return {name: tensor for name, tensor in named.items() if not isinstance(tensor, nn.Parameter)}
