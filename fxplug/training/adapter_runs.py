"""Many adapters trained in one run: one pass of a frozen base for the samples of all, and for each all that a run alone has."""

from __future__ import annotations

import contextlib
import copy
import math
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from torch import Tensor

from ..config.run_config import check_settings
from ..core.artifacts.artifact import save
from ..core.errors import FxplugError, SpecError, TrainError, prefix_path
from ..core.ir.traced_module import TracedModule
from .adapter_check import check_alike, check_by_sample
from .adapter_files import load_into_slots, write_adapter_files
from .adapter_modules import OPTIONS, RandomState, SampleRows, join_adapters, list_adapter_passes, make_adapter_module
from .adapter_run import AdapterRun
from .adapter_settings import PATH, check_adapter_settings, make_adapter_settings, read_adapters
from .adapter_state import AdapterStates
from .adapter_turns import choose_separate_passes, count_steps_of_turn
from .checkpoint import Checkpoint, find_newest, read
from .checks import check_saved
from .data.loader import Loader
from .distributed import make_accelerator, set_mode
from .identity import check_same_run, compute_digest
from .interrupts import catch_interrupts
from .monitor import RunMonitor
from .random_draws import preserve_random_state
from .run_folder import RunFolder
from .shared_pass import ModuleInTurn, SharedPass
from .task_setup import check_task_settings
from .tasks.task import Task, make_task
from .train_section import Train

if TYPE_CHECKING:
    from .trainer import Trainer

RUNS = "runs"  # the folder with what each adapter's run alone would have in its own


class AdapterRuns:
    """Trains many adapters at once in the slots of a module's passes: `fit()`.

    Each of `adapters`, a mapping with a `name`, has data (`data`, `test`), a rank, alpha, dropout and seed of its own, and the
    settings of a run that it gives; what it does not give is that of the run. It learns what its run alone would: one pass of
    the frozen base is for the samples of all, blocks, losses, gradients, optimizers and random numbers are each adapter's own.
    Those that `choose_separate_passes` names have passes of their own, one after the other; `turns` has the reasons. As many
    train at once as there are free slots; others begin when one ends. One whose loss is no number, or whose data fails,
    ends alone; `failed` has the reasons by name.

    The other arguments are those of `Trainer`. With `out` there are `adapter/NAME/` for each, `runs/NAME/` with its log and
    samples, and `module/` with the adapters in its slots.

    Raises SpecError and TrainError for what cannot be trained so.
    """

    def __init__(
        self,
        make: type[Trainer],
        module: TracedModule,
        task: Any,
        data: Any = None,
        test: Any = None,
        *,
        adapters: Sequence[Any],
        out: str | Path | None = None,
        seed: int = 0,
        device: str | None = None,
        quiet: bool = False,
        base: str | Path | None = None,
        config: Mapping[str, Any] | None = None,
        timm: str | None = None,
        settings: Train | None = None,
        accelerator: Accelerator | None = None,
        **train: Any,
    ) -> None:
        if not isinstance(module, TracedModule):
            kind = type(module).__name__
            raise TrainError(f"a trainer takes a traced module, not {kind}: fxplug.trace(model, inputs) makes one")
        plain, objects = read_adapters(adapters)
        if not plain:
            raise SpecError("needs one adapter at least, and the list is empty", path=PATH)
        task = make_task(task)
        if isinstance(test, Mapping):
            train["test"] = {key: value for key, value in test.items() if key != "data"}
            test = test.get("data")
        if settings is None:
            settings = check_task_settings(task, {**train, "adapters": plain})
        else:
            settings = settings.model_copy(update={"adapters": check_settings(Train, {
                "task": "classify", "epochs": 1, "adapters": plain}, "train").adapters})  # fmt: skip
        self.module, self.settings, self.seed, self.quiet = module, settings, seed, quiet
        self.out = None if out is None else Path(out)
        self.config = dict(config or {"model": module.classes[0], "train": settings.model_dump(mode="json")})
        self.accelerator = accelerator or make_accelerator(settings.precision, device)
        check_adapter_settings(settings, self.accelerator)
        self.room = self._count_slots()
        if self.out is not None:
            check_saved([module])
        common = {"base": base, "timm": timm, "accelerator": self.accelerator, "quiet": True, "config": self.config}
        self.runs: list[AdapterRun] = []
        self.turns = choose_separate_passes(module, settings, self.room)
        modules: list[TracedModule] = []  # of those that share a pass
        makers: list[Callable[[TracedModule], TracedModule]] = []
        for index, (one, given) in enumerate(zip(settings.adapters, objects, strict=True)):
            shares = not self.turns[index]
            own = make_adapter_settings(settings, index, shares)
            of_seed = seed if one.seed is None else one.seed
            with prefix_path(*PATH, index):
                options = one.model_dump(include={*OPTIONS})
                maker = partial(make_adapter_module, given=options, seed=of_seed, chosen=one.passes)
                made = maker(module)
            if isinstance(data, Loader) and given["data"] is None and len(plain) > 1:
                raise TrainError("one Loader cannot give the samples of several adapters: give each its own, or a data set")
            loaders = [given[key] if given[key] is not None else default for key, default in (("data", data), ("test", test))]
            if loaders[0] is None:
                raise SpecError("needs data: give the adapter 'data', or the trainer data for all", path=(*PATH, index))
            own_task = copy.copy(task) if given["task"] is None else make_task(given["task"])
            _check_task(own_task)
            folder = None if self.out is None else self.out / RUNS / one.name
            try:
                trainer = make(made, own_task, *loaders, out=folder, seed=of_seed, settings=own, **common)
            except TrainError as error:
                raise TrainError(f"adapter '{one.name}': {error}") from error
            turn = count_steps_of_turn(settings.save.every)
            self.runs.append(AdapterRun(one.name, len(modules) if shares else None, trainer, turn))
            if shares:
                modules.append(made)
                makers.append(maker)
        self.sharing = [one for one in self.runs if one.shares]
        self.rows = SampleRows(drawings=[RandomState() for _ in self.sharing])
        joint = module
        if modules:
            joint = join_adapters(module, modules, self.rows, makers)
            set_mode(joint, joint, settings.mode)
        self.shared = SharedPass(joint, self.rows, self.runs[0].trainer.accelerator.autocast)
        self.watch = RunMonitor(self.out, settings, 0, 0, quiet=quiet)
        self.folder = RunFolder(self.out, settings.save, self.watch.note)
        self.states = AdapterStates(self.runs)
        self._active: list[AdapterRun] = []
        self._asked = False  # whether the run was told to stop; all adapters know it after the same step
        self._even = True  # whether all that train have taken the same steps of the whole
        self._kept = -1  # the last round with a checkpoint

    def _count_slots(self) -> dict[str, int]:
        """Return how many adapters can train at once in each pass with slots: as many as are free.

        Raises SpecError for none, and for a name that is taken.
        """
        entries = [entry for entry in list_adapter_passes(self.module) if entry["slots"]]
        if not entries:
            return {}
        adapters: Any = self.module.adapters
        names: dict[str, list[str]] = {entry["name"]: adapters.names_of(entry["name"]) for entry in entries}
        for p, there in names.items():
            for index, one in enumerate(self.settings.adapters):
                if one.name in there:
                    raise SpecError(f"'{one.name}' is in a slot of pass '{p}' already: unload it", path=(*PATH, index, "name"))
            if "" not in there:
                raise SpecError(f"all {len(there)} slots of pass '{p}' are taken, by {', '.join(there)}: unload one", path=PATH)
        return {p: there.count("") for p, there in names.items()}

    def _has_room(self, one: AdapterRun) -> bool:
        """Return whether each pass of an adapter has a slot that none of those that train has."""
        mine = one.passes & self.room.keys()
        return all(sum(p in other.passes for other in self._active) < self.room[p] for p in mine)

    # --- what was learnt

    @property
    def failed(self) -> dict[str, str]:
        """Why adapters ended before their last step, by name."""
        return {one.name: one.failed for one in self.runs if one.failed}

    @property
    def history(self) -> list[dict[str, Any]]:
        """The records of all steps, each with the name of its `adapter`, in the order of the steps."""
        rows = [{"adapter": one.name, **record} for one in self.runs for record in one.trainer.history]
        return sorted(rows, key=lambda row: row["step"])

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last tests: `NAME/METRIC`."""
        return {f"{one.name}/{key}": value for one in self.runs for key, value in one.trainer.metrics.items()}

    def get_adapter(self, name: str) -> TracedModule:
        """Return the module of one adapter alone, in which its blocks are in the place of the slots.

        Args:
            name: Of the adapter.

        Returns:
            The module, on the tensors of the base.

        Raises:
            SpecError: There is none of that name.
        """
        for one in self.runs:
            if one.name == name:
                return one.trainer.module
        raise SpecError(f"no adapter '{name}' was trained; there are {', '.join(one.name for one in self.runs)}")

    # --- training

    def open(self, start: Path | None) -> None:
        """Lock the folder of the run, which goes on from the checkpoint `start`, or begins. Raises TrainError."""
        self.folder.open(resumes=start is not None and self.out is not None and start.is_relative_to(self.out))

    def fit(self, resume: str | Path | None = None) -> list[dict[str, Any]]:
        """Train all adapters to their ends.

        On a CPU a resumed run goes on as if it had never stopped, to the bit. An interrupt ends it after the step at hand, with
        a checkpoint.

        Args:
            resume: A checkpoint of such a run, or its folder; None begins.

        Returns:
            The history, see `history`.

        Raises:
            TrainError: The run cannot start or go on, or every adapter failed.
        """
        if all(one.ended for one in self.runs):
            return self.history
        start = None if resume is None else find_newest(Path(resume))
        if self.out is not None:
            self.describe()  # before the training changes what it is made of
        self.open(start)
        try:
            if start is not None:
                self._resume(start)
            with contextlib.ExitStack() as held:
                for one in self.runs:
                    trainer = one.trainer
                    if self.out is not None:
                        (self.out / RUNS / one.name).mkdir(parents=True, exist_ok=True)
                    trainer.watch.start(trainer.module, trainer.counts())
                    held.callback(trainer.close)
                    if not one.ended:
                        held.enter_context(trainer.task.prepared(trainer.data, trainer.tests, self.quiet))
                self._note_separate_passes()
                self._run()
            self._finish()
        finally:
            self.watch.close()
            self.folder.close()
        return self.history

    def _run(self) -> None:
        waiting = [one for one in self.states.runs if not one.ended]
        waiting.sort(key=lambda one: one.trainer.progress.step == 0)  # those that had a slot before have one again
        try:
            with catch_interrupts() as asked, preserve_random_state():
                while True:
                    self._even = False
                    self._fill(waiting)
                    self._even = True
                    if not self._active:
                        break
                    self._keep_if_due()
                    if not self.states.checked:
                        self._check_first()
                    self._asked = bool(asked)
                    if self._asked:
                        waiting = []
                    self._take_round()
                    self.watch.remind(self._describe_steps)
            if self._asked:
                self._keep()
                end = KeyboardInterrupt(f"stopped after step {self.states.rounds}")
                end.signal = asked[0] if asked else signal.SIGINT  # type: ignore[attr-defined]  # for the exit code
                raise end
        except BaseException as error:  # whoever it comes from: nothing learnt is lost
            self._rescue(error)
            raise
        finally:
            for one in self._active:
                if one.called.thread is not None:
                    one.called.thread.close()

    def _fill(self, waiting: list[AdapterRun]) -> None:
        """Let those that train run to the next call of the module, and others begin in the place of those that end."""
        while True:
            while (one := next(filter(self._has_room, waiting), None)) is not None:
                waiting.remove(one)
                thread = one.start(lambda: self._asked)
                if one.shares:
                    self.rows.drawings[one.index] = thread
                self._active.append(one)
                self._active.sort(key=self.states.runs.index)  # a batch is the same, to the bit, in a resumed run
            self._resume_all(self._active)
            if not any(map(self._has_room, waiting)):
                return

    def _resume_all(self, those: Sequence[AdapterRun]) -> None:
        """Let these adapters run until each pauses or ends; those that end leave the batch."""
        for one in those:
            thread = one.called.thread
            assert thread is not None
            if not one.called.waits:
                thread.resume()
            if thread.done:
                self._end(one, thread.error)
        self._active = [one for one in self._active if one.called.thread is not None and not one.called.thread.done]

    def _end(self, one: AdapterRun, error: BaseException | None) -> None:
        """Note how an adapter ended. Raises its error, unless it is one of a run, which ends that adapter alone."""
        trainer = one.trainer
        if error is not None and not isinstance(error, FxplugError):
            error.add_note(f"in the run of the adapter '{one.name}', after its step {trainer.progress.step}")
            raise error
        if error is not None:
            trainer.state.roll_back()
            one.failed = str(error)
            self.watch.note(f"{one.name}: ended after step {trainer.progress.step}: {error}")
        elif not trainer.take_step.stop:
            self.watch.note(f"{one.name}: {trainer.progress.step} steps{_describe_loss(trainer, ', the last with a loss of ')}")
        one.ended = error is not None or not trainer.take_step.stop

    def _take_round(self) -> None:
        """Take one step of each adapter that shares a pass: a micro step of all, and further ones of those whose step has more.

        The steps of others begin when they are resumed next.
        """
        turn = [one for one in self._active if one.shares]
        while turn:
            calling = turn
            while calling:
                self.shared.forward([call for one in calling for call in one.calls])
                self._resume_all(calling)
                calling = [one for one in self._active if one in calling and one.calls]
            self.shared.backward()
            turn = [one for one in self._active if one in turn and one.trainer.take_step.has_more]
            self._resume_all(turn)
            turn = [one for one in self._active if one in turn]
        for one in self._active:
            if isinstance(one.called, ModuleInTurn):
                one.called.take_turn(self.states.rounds)
        self.states.rounds += 1

    def _note_separate_passes(self) -> None:
        """Note which adapters take their steps in turn, and why."""
        for why in filter(None, dict.fromkeys(self.turns)):
            names = [one.name for one, own in zip(self.runs, self.turns, strict=True) if own == why]
            self.watch.note(f"{', '.join(names)}: each has a pass of its own, one after the other: {why}")

    def _describe_steps(self) -> str:
        """Return how far the adapters are that train now, the first few by name."""
        rows = [f"{one.name} step {one.trainer.progress.step}/{one.trainer.steps}{_describe_loss(one.trainer, ', loss ')}"
                for one in self._active]  # fmt: skip
        return "; ".join([*rows[:3], *([f"and {len(rows) - 3} more"] if rows[3:] else [])])

    def _check_first(self) -> None:
        """Raise TrainError where the first samples of the adapters do not make one batch, or the base does not take them one by
        one."""
        calls = [call for one in self._active for call in one.calls]
        if not calls:
            return
        self.states.checked = True
        varies = any(getattr(getattr(one.trainer.data, "spec", None), "buckets", None) for one in self._active)
        names = [one.name for one in self.sharing]
        if not varies:
            check_alike(calls, names)
        check_by_sample(self.shared, self.rows, [(index, call, self.sharing[index].trainer) for index, call in calls], names)

    # --- checkpoints

    def _keep_if_due(self) -> None:
        every = self.settings.save.every
        if every and self.states.rounds and self.states.rounds % every == 0:
            self._keep()

    def _keep(self) -> None:
        """Write a checkpoint of all adapters."""
        if self.out is not None and self._kept != self.states.rounds:
            self._kept = self.states.rounds
            self.folder.keep(self._checkpoint())

    def _checkpoint(self) -> Checkpoint:
        return self.states.make_checkpoint(self.describe(), self.watch.log_length)

    def describe(self) -> dict[str, Any]:
        """Describe the run in plain values, which one that goes on from its checkpoint must equal."""
        if not hasattr(self, "_described"):
            tensors: dict[str, Tensor] = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
            passes = tuple(f"{entry['name']}." for entry in list_adapter_passes(self.module))
            base = compute_digest({name: value for name, value in tensors.items() if not name.startswith(passes)})
            each = {one.name: one.trainer.describe({}) for one in self.runs}
            self._described = {"base weights": base, "slots": self.room, "adapters": each}
        return self._described

    def _resume(self, path: Path) -> None:
        """Restore all adapters from a checkpoint. Raises TrainError, with the differences, for one of another run."""
        kept = read(path)
        check_same_run(kept, self.describe(), path)
        try:
            length = self.states.load_checkpoint(kept)
        except TrainError as error:
            raise TrainError(f"'{path}' does not fit this run: {error}; resume from another one") from error
        here = self.out is not None and path.is_relative_to(self.out)
        self._kept = self.states.rounds if here else -1
        dropped = self.watch.rewind(self.states.rounds, length if here else 0)
        self.folder.go_back(self.states.rounds, 0, dropped)
        for one in self.runs:
            one.rewind(here)

    def _rescue(self, error: BaseException) -> None:
        """Save a checkpoint after an error that ends the run, where every adapter is at the end of a step."""
        if self.out is None or not self.states.rounds:
            return
        if self._even:
            with contextlib.suppress(Exception):  # of the disk: the first error is the one that counts
                self._keep()
        error.add_note(f"the run ended after step {self.states.rounds}: {self.folder.newest} (continue with --resume)")

    # --- the end

    def _finish(self) -> None:
        """Write the last checkpoint, the file of each adapter, and the module with the adapters in its slots."""
        self._keep()
        if len(self.failed) == len(self.runs):
            listed = "\n".join(f"{name}: {why}" for name, why in self.failed.items())
            raise TrainError(f"every adapter failed:\n{listed}")
        for one in self.runs:
            averages = one.trainer.outputs.collect()
            if self.out is not None:
                write_adapter_files(one.trainer, one.name, self.out, averages, self.watch.note)
        if any(not entry["slots"] for entry in list_adapter_passes(self.module)):
            return  # a module has no room for several of these: the files have them
        load_into_slots(self.module, [(one.name, one.trainer.module) for one in self.runs if not one.failed], self.watch.note)
        if self.out is not None:
            with self.folder.reported("trained module"):
                save(self.module, self.out / "module", config=self.config)


def _describe_loss(trainer: Trainer, before: str) -> str:
    """Return the loss of the last step with what stands before it; "" where no step was taken here."""
    losses = [record["loss"] for record in trainer.history[-1:]]
    return f"{before}{losses[0]:.4g}" if losses and math.isfinite(losses[0]) else ""


def _check_task(task: Task) -> None:
    """Raise SpecError for a task that trains something beside the module."""
    if task.trains:
        raise SpecError("trains a text encoder, which all adapters would share", path=("train", "task"))


