"""The loop: epochs of batches to steps, with checkpoints, tests, pictures and plugins around them."""

from __future__ import annotations

import functools
import itertools
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from ..core.errors import TrainError
from ..core.ir.traced_module import TracedModule
from ..lowerings.frozen_norms import HeldBuffers, find_frozen_buffers
from ..lowerings.regions.submodules import get_originals
from . import task_setup
from .checkpoint import find_newest
from .checks import check_batches, check_samples, check_saved, check_used, choose_precision
from .data.loader import Loader, list_skipped
from .data.sources import match_test_items
from .data.wrapped_loader import make_loader
from .distributed import check_agreement, make_accelerator, prepare
from .evaluation import Evaluation, move
from .first_batch import FirstBatch
from .identity import compute_digest, describe_run
from .interrupts import catch_interrupts
from .monitor import RunMonitor
from .optimizer_step import Stepper
from .optimizers import begin_training, open_optimizer, use_evaluation_weights, with_loss_scale
from .param_groups import Ema, check_gradients, choose, divide_groups, make_frozen_filter
from .plugins import Plugins, RunStart, load_plugins
from .progress import Progress
from .random_draws import Draws, RunDraws, load_random_state, mix, preserve_random_state, seed_within
from .run_folder import RunFolder
from .run_loss import RunLoss
from .run_outputs import RunOutputs, list_buffers, list_sharded_buffers
from .schedule import RateSchedule
from .shared_samples import divide, share
from .state import TrainState
from .swapped_blocks import end_swap, place_module, swap_outside_steps
from .tasks.task import Batch, Task, make_task
from .train_section import Train, format_use, read_use


class Trainer:
    """Trains a traced module: `fit()`, `test()`.

    `task` is a name, an import path, one of them with options, or a Task; `data` and `test` are torch Datasets, DataLoaders
    or Loaders (or `test={"every": 1, "data": ...}`). The other settings are those of a configuration's `train` section
    (`epochs=5, batch=32, lr=1e-3`). A given `optimizer` takes the place of the settings' one; a given `scheduler` is stepped
    once an epoch. The module keeps its Parameter objects: what passes added and what `trainable` names is trained in place,
    nothing else of it is written. Without `out` nothing is written to disk. With `adapters`, a list of mappings, it trains all
    of them at once in the slots of the module's passes, see `AdapterRuns`.

    Raises SpecError and TrainError for what cannot be trained.
    """

    def __new__(cls, *args: Any, adapters: Sequence[Any] | None = None, **given: Any) -> Any:
        """Make the trainer of many adapters where there are some, else one of this class."""
        if adapters is None:
            return object.__new__(cls)
        from .adapter_runs import AdapterRuns  # which makes a trainer for each

        return AdapterRuns(cls, *args, adapters=adapters, **given)

    def __init__(
        self,
        module: TracedModule,
        task: Any,
        data: Any = None,
        test: Any = None,
        *,
        out: str | Path | None = None,
        optimizer: Any = None,
        scheduler: Any = None,
        seed: int = 0,
        device: str | None = None,
        quiet: bool = False,
        base: str | Path | None = None,
        config: Mapping[str, Any] | None = None,
        timm: str | None = None,
        settings: Train | None = None,
        accelerator: Accelerator | None = None,
        plugins: Plugins | Sequence[Any] | None = None,
        adapters: Sequence[Any] | None = None,  # with some, `__new__` makes another
        **train: Any,
    ) -> None:
        if not isinstance(module, TracedModule):
            kind = type(module).__name__
            raise TrainError(f"a trainer takes a traced module, not {kind}: fxplug.trace(model, inputs) makes one")
        self.module, self.seed, self.quiet, self.out = module, seed, quiet, Path(out) if out is not None else None
        self.task, self._named = make_task(task), task
        if isinstance(test, Mapping):
            train["test"] = {key: value for key, value in test.items() if key != "data"}
            test = test.get("data")
        for key, given in (("optimizer", optimizer), ("scheduler", scheduler)):
            if isinstance(given, (str, Mapping)):
                train[key] = given
        optimizer, scheduler = (None if isinstance(given, (str, Mapping)) else given for given in (optimizer, scheduler))
        if settings is not None and train:
            raise TrainError(f"{', '.join(train)} would have no effect beside settings=...: set it there")
        self.settings = settings or task_setup.check_task_settings(self.task, train)
        self.config = dict(config or {"model": module.classes[0], "train": self.settings.model_dump(mode="json")})
        self.accelerator = accelerator or make_accelerator(self.settings.precision, device)
        precise = choose_precision(module, self.settings, self.accelerator, others=self.task.trains)
        self.settings, self.accelerator, self.notes = precise
        self.first = self.accelerator.is_main_process
        if not isinstance(plugins, Plugins):
            specs = self.settings.plugins if plugins is None else plugins
            plugins = load_plugins(specs, base=base, on_error=self.settings.on_plugin_error)
        self.plugins = plugins
        self.groups = choose(module, self.settings, others=self.task.trains)
        self.base = Path(base or Path.cwd())
        self.swap = place_module(module, self.settings, self.accelerator, self.notes)
        self.rank, self.world = share(self.accelerator, self.settings)
        self.seed_of_draws = mix(seed, self.rank)  # of dropout
        self.draws = RunDraws(seed, rank=self.rank, world=self.world, device=self.accelerator.device)
        common: dict[str, Any] = {"batch": self.settings.batch, "seed": seed, "rank": self.rank, "world": self.world}
        self.data = make_loader(data, train=True, hooks=self.plugins if self.plugins.transforms else None, **common)
        self.tests = None if test is None else make_loader(test, train=False, hooks=None, **common)
        if isinstance(self.data, Loader) and isinstance(self.tests, Loader):
            match_test_items(self.tests.items, self.data.items)
        check_used(self.settings, self.out, self.tests)
        check_batches(self.settings, self.task, data)
        where = {"device": self.accelerator.device, "base": self.base, "timm": timm, "plugins": self.plugins, "seed": seed}
        where |= {"name": self.settings.task.name, "swap": self.swap}
        task_setup.set_up_task(self.task, module, self.data, self.tests, **where)
        self.parts = task_setup.list_rewritten_parts(module, self.task)
        if self.out is not None:
            check_saved(self.parts.values())
        peek = None if self.plugins.has("on_step_start") else self.data.peek  # a plugin may change it
        self.first_batch = FirstBatch(module, self.task, self.settings, self.accelerator, self.draws, peek)
        self.first_batch.check()  # before plugins see the module, which may hook it
        self.plugins.begin(
            RunStart(
                module, self.task, self.data, self.settings, self.config, self.out,
                trains=bool(self.groups), keep_at=lambda path: self.outputs.keep_at(path),
            )  # fmt: skip
        )
        self.groups += task_setup.list_trained_beside(self.task, self.settings, self.accelerator.num_processes)
        self.groups = divide_groups(self.groups, self.settings.groups)
        if not self.groups:
            raise TrainError("nothing trains: no pass of the module or of the text encoder has parameters that train")
        rows = [zip(group["names"], group["dtypes"], strict=True) for group in self.groups]
        self.dtypes = dict(itertools.chain(*rows))
        size = self.data.samples_of_a_batch(self.world)
        self.progress = Progress(self.settings, self.data.steps, size, grouped=self.data.grouped)
        self.history: list[dict[str, Any]] = []
        self.metrics: dict[str, float] = {}
        self._make(optimizer, scheduler)
        check_samples(self.task, self.settings, self.evaluation)
        out = self.out if self.first else None
        self.watch = RunMonitor(out, self.settings, self.steps, self.epochs, quiet=quiet or not self.first)
        self.plugins.note = self.watch.note
        self.outputs = RunOutputs(
            self.module,
            self.state,
            RunFolder(out, self.settings.save, self.watch.note),
            describe=lambda: self.run, config=self.config, task=self.task, dtypes=self.dtypes, sharded=self.sharded,
            accelerator=self.accelerator, watch=self.watch, plugins=self.plugins, out=self.out,
        )  # fmt: skip

    @property
    def steps(self) -> int:
        """Number of steps of the whole run."""
        return self.progress.steps

    @property
    def epochs(self) -> int:
        """Number of epochs of the whole run."""
        return self.progress.epochs

    def _make(self, optimizer: torch.optim.Optimizer | None, scheduler: Any) -> None:
        """Make the runner, the optimizer and its scheduler, the average of the weights, and the stepper."""
        names = {name for group in self.groups for name in group["names"]}
        if self.accelerator.num_processes > 1:  # before the weights of the first take the place of the others'
            start = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
            check_agreement(self.accelerator, {"weights at the start": compute_digest(start)})
        self.frozen = make_frozen_filter(self.module, names, self.settings.trainable)
        self.divided = self._divided()
        self.learner = task_setup.with_assistant(self.divided, self.settings, self.base, self.accelerator.device)
        unused = self.first_batch.is_some_without_gradient()
        self.runner, self.sharded = prepare(self.learner, self.settings, self.frozen, self.accelerator, unused, self.swap)
        if self.sharded is not None:
            held = get_originals(self.sharded)
            for group in self.groups:
                group["params"] = [held[name] for name in group["names"]]
            if self.plugins.has("on_backpropagation"):
                raise TrainError("a plugin's on_backpropagation cannot see the gradients of a sharded run: remove 'shard'")
        task_setup.prepare_beside(self.task, self.settings, self.accelerator)
        made = open_optimizer(optimizer, scheduler, self.groups, self.settings)
        self.schedule = RateSchedule(made, self.settings.scheduler, self.steps, self.progress.per_epoch, given=scheduler)
        self.optimizer: Any = with_loss_scale(made, self.accelerator)
        self.plugins.begin_steps(self.optimizer)
        self.trained = {name: p for group in self.groups for name, p in zip(group["names"], group["params"], strict=True)}
        self.ema = Ema(self.trained, self.settings.ema) if self.settings.ema else None
        buffers = list_buffers(self.parts) if self.sharded is None else list_sharded_buffers(self.sharded)
        self.state = TrainState(
            self.trained, buffers, made, self.schedule, self.progress, ema=self.ema, scaler=self.accelerator.scaler
        )
        self.held = HeldBuffers(find_frozen_buffers(self.module, self.frozen), self.state.first_buffers)
        loss = RunLoss(self.module, self.runner, self.task, self.settings, self.accelerator, self.draws, self.frozen)
        self.take_step = Stepper(loss, self.optimizer, self.trained, self.settings.clip, self.plugins, self._look_at_gradients)
        both = self.divided.twin_error == self.module.twin_error  # else only one mode can be divided
        shown = self.divided if both else self.module
        shown = self.sharded or swap_outside_steps(shown, self.task, self.swap)
        self.modes = task_setup.Modes(self.runner, self.module, self.settings, self.task)
        weights = self.ema.applied if self.ema else functools.partial(use_evaluation_weights, made, self.trained)
        shards = self.sharded is not None
        self.evaluation = Evaluation(shown, self.task, self.accelerator, weights, self.modes.set, sharded=shards)

    @functools.cached_property
    def run(self) -> dict[str, Any]:
        """Identity of the run in plain values, which checkpoints store and a run that resumes from one must equal."""
        parts = {**self.parts, "": self.learner} if self.settings.assistant else self.parts
        every = {f"{before}{name}": p for before, part in parts.items() for name, p in part.named_parameters()}
        base = {name: p for name, p in every.items() if name not in self.trained}
        return self.describe({**base, **self.state.first_buffers})

    def describe(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """Describe the run in plain values.

        Args:
            base: What does not train, by name, of which there is a digest.

        Returns:
            What `describe_run` gives.
        """
        return describe_run(
            self.parts,
            self.settings,
            config=self.config,
            trained=self.trained,
            base=base,
            groups=self.groups,
            kinds=(type(self.state.optimizer).__name__, type(self.schedule.scheduler).__name__),
            task=format_use(self.settings.task if isinstance(self._named, Task) else read_use(self._named)),
            data=self.data,
            samples_of_a_step=self.settings.batch * self.settings.accumulate * self.world,
            seed=self.seed,
        )

    def _divided(self) -> TracedModule:
        """Return the parallelized module if processes share samples, else the module itself."""
        if self.settings.parallel is None:
            return self.module
        with preserve_random_state():
            batch = next(self.data.epoch(0))
        self.data.close()
        return divide(self.module, self.settings, self.task, self.moved(batch), self.accelerator, self.dtypes)

    def _look_at_gradients(self) -> None:
        """Note what got no gradient. Raises TrainError for a block that none reached."""
        why = self.task.unreached
        if lost := check_gradients(task_setup.list_whole_parts(self.parts, self.task), self.groups, why):
            more = f" and {len(lost) - 5} more" * (len(lost) > 5)
            self.watch.note(f"{', '.join(lost[:5])}{more} got no gradient in the first step{why and f': {why}'}")

    # --- training

    def fit(self, resume: str | Path | None = None) -> list[dict[str, Any]]:
        """Train to the end.

        On a CPU a resumed run goes on as if it had never stopped, to the bit. An interrupt (SIGINT, SIGTERM) ends the run after
        the step at hand, with a checkpoint.

        Args:
            resume: A checkpoint, or the folder of a run, of which the newest one is taken; None begins.

        Returns:
            The history: for each step a dict of step, epoch, loss, lr, seconds, grad_norm and more.

        Raises:
            TrainError: The run cannot start or go on; the checkpoints written so far stay.
        """
        if self.history and self.progress.step >= self.steps:
            return self.history
        start = None if resume is None else find_newest(Path(resume))
        if self.out is not None or start is not None or self.accelerator.num_processes > 1:
            check_agreement(self.accelerator, self.run)  # made before the training changes what it is made of
        with self.outputs.opened(start), seed_within(self.seed_of_draws), end_swap(self.swap):
            if start is not None:
                self._resume(start)
                self.history = self.watch.history()
            self.watch.start(self.module, self.counts())
            for line in (*self.notes, *self.data.notes(self.task), *self.progress.notes()):
                self.watch.note(line)
            begun = time.perf_counter()
            with self.task.prepared(self.data, self.tests, self.quiet or not self.first):
                self._run()
            for line in self.plugins.summary(time.perf_counter() - begun):
                self.watch.note(line)
            return self.history

    def _run(self) -> None:
        """Take all steps and write what is learnt, also where an error ends the run."""
        length = {"steps": self.steps, "epochs": self.epochs, "global_step": self.progress.seen}
        self.plugins.call("on_training_start", optimizer=self.optimizer, config=self.config, **length)
        try:
            with catch_interrupts() as asked:
                self.take_steps(lambda: bool(asked))
            if self.take_step.stop:
                self.outputs.keep()
                end = KeyboardInterrupt(f"stopped after step {self.progress.step}")
                end.signal = asked[0] if asked else signal.SIGINT  # type: ignore[attr-defined]  # for the exit code
                raise end
            self._finish()
        except BaseException as error:  # whoever it comes from: nothing learnt is lost
            if self.take_step.whole:
                self.state.roll_back()
            self.outputs.rescue(error, whole=self.take_step.whole)
            raise
        finally:
            self.close()

    def take_steps(self, asked: Callable[[], bool]) -> None:
        """Take the steps of one epoch after the other, until the run is done, told to stop, or waits in vain.

        Args:
            asked: Whether it is told to stop, which is looked at after each step.
        """
        self.take_step.asked, progress = asked, self.progress
        if self.settings.log.samples and not progress.step:
            self.draw_samples()
        while progress.step < self.steps and not self.take_step.stop and not self._waits():
            self._begin_epoch()
            before = time.perf_counter()
            for batches in self._batches():
                record = self._step(batches)
                self._after({**record, "seconds": time.perf_counter() - before}, batches[-1])
                before = time.perf_counter()
            if progress.done >= progress.batches:
                self._end_epoch()
        if self._waits() and progress.step < self.steps and not self.take_step.stop:
            self.watch.note(f"ended after step {progress.step}: {progress.waited} tests without an improvement")

    def _begin_epoch(self) -> None:
        """Tell plugins of an epoch, unless only its end is left, and put what trains into its mode."""
        progress = self.progress
        if progress.done < progress.batches:  # else the checkpoint is of the moment before the end of an epoch
            place = {"epoch": progress.epoch, "global_step": progress.seen, "arg_update_callback": progress.update}
            self.plugins.call("on_epoch_start", epoch_length=progress.batches, **place)
        if progress.done == 0 and (line := progress.renew()):
            if self.settings.scheduler is not None:
                line += f"; the learning rate keeps its schedule of {self.watch.steps} steps, and there are {self.steps}"
            self.watch.note(line)
            self.watch.steps, self.watch.epochs = self.steps, self.epochs
        self.modes.renew()
        begin_training(self.state.optimizer)

    def _batches(self) -> Iterator[list[Batch]]:
        """Yield the micro batches of each step that the epoch still has, on the device and as plugins see them."""
        progress, batches = self.progress, self.data.epoch(self.progress.epoch, start=self.progress.done)
        while progress.done < progress.batches and progress.step < self.steps and not self.take_step.stop:
            following = itertools.islice(batches, progress.next_batches())
            yield [self.plugins.see_batch(self.moved(batch)) for batch in following]
            self.take_step.stop |= self.accelerator.num_processes == 1 and self.take_step.asked()

    def _step(self, batches: list[Batch]) -> dict[str, Any]:
        """Take one step, and the averages and rates with it, and return its record."""
        progress = self.progress
        place = {"epoch": progress.epoch, "global_step": self.progress.seen, "local_step": progress.done}
        lr = self.optimizer.param_groups[0]["lr"]
        with self.held.unchanged():
            report = self.take_step(batches, progress.step + 1, place)
        progress.step += 1
        progress.done += len(batches)
        progress.total += report["loss"] * len(batches)
        try:
            if not self.take_step.skipped:
                if self.ema:
                    self.ema.update()
                if not self.schedule.by_epoch:
                    self.schedule.step(report["loss"], progress.step)
        except TrainError:  # the scheduler's, with whose rate nothing goes on
            self._end_step()
            raise
        self._end_step()
        return {"step": progress.step, "epoch": progress.epoch, "loss": report.pop("loss"), "lr": lr, **report}

    def _after(self, record: dict[str, Any], batch: Batch) -> None:
        """Record a step, call the plugins, draw pictures, and write a checkpoint if one is due."""
        progress, settings = self.progress, self.settings
        self.history.append(record)
        self.watch.step(record, last=progress.done >= self.progress.batches)
        self.plugins.call(
            "on_step_end",
            epoch=progress.epoch,
            global_step=self.progress.seen - 1,
            local_step=progress.done - 1,
            batch=batch,
            **{key: record[key] for key in ("loss", "lr", "seconds")},
        )
        if progress.step < self.steps:
            if settings.log.samples and progress.step % settings.log.samples == 0:
                self.draw_samples()
            if settings.save.every and progress.step % settings.save.every == 0:
                self.outputs.keep()

    def _end_epoch(self) -> None:
        progress, every = self.progress, self.settings.test.every
        epoch, loss = progress.epoch, progress.total / self.progress.batches
        progress.epoch, progress.done, progress.total = epoch + 1, 0, 0.0
        if self.schedule.by_epoch:
            self.schedule.step(loss, progress.step)
        last = progress.step >= self.steps
        metrics = self.test() if self.tests and ((every and progress.epoch % every == 0) or last) else {}
        self._judge(metrics)
        place = {"epoch": epoch, "global_step": self.progress.seen, "arg_update_callback": self.progress.update}
        self.plugins.call("on_epoch_end", loss=loss, metrics=metrics, **place)

    def _finish(self) -> None:
        """Draw the last pictures, and write the last checkpoint and the trained module."""
        if self.tests and self.progress.done:  # the run ended within an epoch
            self._judge(self.test())
        self.outputs.keep()
        if self.settings.test.best:
            self.outputs.take_best()
            self.metrics = self.progress.measured or self.metrics
        self.draw_samples()
        self.outputs.export()
        self.accelerator.wait_for_everyone()  # a process that ended while the first one writes would take it with it

    def _resume(self, path: Path) -> None:
        """Restore the run from a checkpoint. Raises TrainError, with the differences, for one of another run."""
        random = self.outputs.resume(path)
        self.take_step.checked = True
        if len(random) == self.accelerator.num_processes:
            load_random_state(random[self.accelerator.process_index])
            self.state.end_step()
        else:
            self.watch.note("the number of processes has changed: dropout draws different numbers from now on")

    def counts(self) -> tuple[int, int]:
        """Return the numbers of trainable and of all parameters."""
        every = (p.numel() for part in self.parts.values() for p in part.parameters())
        return sum(p.numel() for p in self.trained.values()), sum(every)

    def _end_step(self) -> None:
        self.take_step.whole = True
        self.state.end_step()

    def _judge(self, metrics: dict[str, float]) -> None:
        """Keep the best tested weights, and count the tests since."""
        wanted = self.settings.test
        if metrics and (wanted.best or wanted.patience) and self.progress.judge(metrics, self.task.best) and wanted.best:
            self.outputs.keep_best()

    def _waits(self) -> bool:
        """Return whether `patience` tests have passed without a better one, so that the run ends early."""
        patience = self.settings.test.patience
        return patience is not None and self.progress.waited >= patience

    def close(self) -> None:
        """Shut down the workers, note unreadable images, and close the monitor."""
        for loader in (self.data, self.tests) if self.tests else (self.data,):
            loader.close()
            if loader.skipped:
                self.watch.note(f"{len(loader.skipped)} images could not be read: {list_skipped(loader.skipped)}")
        self.watch.close(self.history)

    # --- looking at what was learnt

    def test(self) -> dict[str, float]:
        """Return the task's metrics on the test data, over all processes; those of the averaged weights, if there are any."""
        if self.tests is None:
            raise TrainError("no test data: set 'test' in the data section, or pass test=...")
        begun = time.perf_counter()
        metrics = self.evaluation.test(self.tests)
        best, chosen = self.progress.best, self.task.best
        if chosen in metrics and (chosen not in best or metrics[chosen] >= best[chosen]):
            self.progress.best = dict(metrics)
        seconds = (time.perf_counter() - begun) / max(1, self.tests.steps)
        self.watch.test(self.progress.epoch or 1, metrics, seconds, self.progress.best)
        self.metrics = metrics
        return metrics

    def draw_samples(self) -> None:
        """Draw the task's samples, if it has any."""
        images = self.evaluation.samples(Draws(self.seed, 0, device=self.accelerator.device))
        if images is not None:
            self.watch.beside_samples(self.task.beside_samples)
            self.watch.samples(self.progress.step, images)

    def moved(self, batch: Batch) -> Batch:
        """Move a batch to the device of the run.

        Args:
            batch: Tensors and other values by name.

        Returns:
            The same, with its tensors on the device.
        """
        return move(batch, self.accelerator.device)
