"""The loop: epochs of batches to steps, with checkpoints, tests, pictures and plugins around them."""

from __future__ import annotations

import contextlib
import itertools
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..core.errors import SpecError, TrainError, below
from ..core.ir.traced_module import TracedModule
from ..core.spec.run_config import check_settings
from ..core.spec.train_section import Train
from ..lowerings.regions.submodules import originals
from .checkpoint import Checkpoint, fingerprint, newest
from .data.loader import too_many
from .data.wrapped_loader import loader_of
from .diagnosis import check_fits
from .distributed import gathered, launched, prepared, set_mode
from .monitor import RunMonitor
from .optimizer_step import Batch, Stepper
from .param_groups import (
    Ema,
    check_optimizer,
    choose,
    make_optimizer,
    make_scheduler,
    optimizer_config,
    rewritten_parts,
    trained_beside,
)
from .plugin_state import Optimizers, TrainBatch, TrainingState, plugin_batch
from .plugins import Plugins
from .progress import Progress
from .random_draws import Draws, mixed, preserve_random_state, random_state_dict, seeded
from .resume import export, interruptible, keep, keep_best, rescue, restore, take_best
from .shared_samples import divided, share
from .tasks.task import TaskInfo, make_task, means


class Trainer:
    """Trains a traced module: `fit()`, `test()`.

    `task` is a name, an import path, one of them with options, or a Task; `data` and `test` are torch Datasets, DataLoaders
    or Loaders (or `test={"every": 1, "data": ...}`). The other settings are those of a configuration's `train` section
    (`epochs=5, batch=32, lr=1e-3`). A given `optimizer` takes the place of the settings' one; a given `scheduler` is stepped
    once an epoch. The module keeps its Parameter objects: what passes added and what `trainable` names is trained in place,
    nothing else of it is written. Without `out` nothing is written to disk.

    Raises SpecError and TrainError for what cannot be trained.
    """

    def __init__(
        self,
        module: TracedModule,
        task: Any,
        data: Any,
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
        **train: Any,
    ) -> None:
        if not isinstance(module, TracedModule):
            kind = type(module).__name__
            raise TrainError(f"a trainer takes a traced module, not {kind}: fxplug.trace(model, inputs) makes one")
        self.module, self.seed, self.quiet, self.out = module, seed, quiet, Path(out) if out else None
        self.task = make_task(task)
        if isinstance(test, Mapping):
            train["test"] = {key: value for key, value in test.items() if key != "data"}
            test = test.get("data")
        for key, given in (("optimizer", optimizer), ("scheduler", scheduler)):
            if isinstance(given, (str, Mapping)):
                train[key] = given
        optimizer, scheduler = (None if isinstance(given, (str, Mapping)) else given for given in (optimizer, scheduler))
        self.settings = settings or _settings(self.task, train)
        self.config = dict(config or {"model": module.classes[0], "train": self.settings.model_dump(mode="json")})
        self.accelerator = accelerator or launched(self.settings.precision, device)
        self.first = self.accelerator.is_main_process
        if not isinstance(plugins, Plugins):
            specs = self.settings.plugins if plugins is None else plugins
            plugins = Plugins(specs, base=base, on_error=self.settings.on_plugin_error)
        self.plugins = plugins
        self.groups = choose(module, self.settings, others=self.task.trains)
        place = self.accelerator.device
        tensors = itertools.chain(module.parameters(), module.buffers())
        if any((t.device.type, t.device.index or 0) != (place.type, place.index or 0) for t in tensors):
            module.to(place)  # which torch refuses for packed weights that compiled code looks at, even where nothing moves
        self.rank, self.world = share(self.accelerator, self.settings)
        common: dict[str, Any] = {"batch": self.settings.batch, "seed": seed, "rank": self.rank, "world": self.world}
        self.data = loader_of(data, train=True, hooks=self.plugins if self.plugins.transforms else None, **common)
        self.tests = None if test is None else loader_of(test, train=False, hooks=None, **common)
        for key in ("patience", "best"):
            if getattr(self.settings.test, key) and not (self.tests and self.settings.test.every):
                raise TrainError(f"test.{key} compares tests: set test.every, and the test data ('test' in the section data)")
        self._set_up(Path(base or Path.cwd()), timm)
        self.parts = rewritten_parts(module, self.task)
        self._check_first_batch()  # before plugins see the module, which may hook it
        beside = self.task.parts()
        self.state = TrainingState(
            train_batch=TrainBatch(self.data, self.task), unet=module, write_checkpoint=lambda path: keep(self, path), **beside
        )
        self._tell_of_the_model()
        self.groups += trained_beside(self.task, self.settings, self.accelerator.num_processes)
        if not self.groups:
            raise TrainError("nothing trains: no pass of the module or of the text encoder has parameters that train")
        rows = [zip(group["names"], group["dtypes"], strict=True) for group in self.groups]
        self.dtypes = dict(itertools.chain(*rows))
        self.progress = Progress(self.settings, self.data.steps)
        self.history: list[dict[str, Any]] = []
        self.metrics: dict[str, float] = {}
        self.drawn: Any = None  # the random state before the step at hand
        self.saved = False  # whether the module is written
        self._make(optimizer, scheduler)
        out = self.out if self.first else None
        self.watch = RunMonitor(out, self.settings, self.steps, self.epochs, quiet=quiet or not self.first)
        self.plugins.note = self.watch.note

    def _set_up(self, base: Path, timm: str | None) -> None:
        """Tell the task what there is, and the loaders what the task makes of an image."""
        loader, sizes = self.tests or self.data, self.data.size or (0, 0)
        info = TaskInfo(
            size=sizes,
            device=self.accelerator.device,
            classes=self.data.classes,
            timm=timm,
            base=base,
            examples=lambda count: self.moved(loader.first(count)),
            prompt=self.plugins.modify_sample_prompt,
            seed=self.seed,
        )
        try:
            self.task.setup(self.module, info)
        except SpecError as error:
            if error.path[:1] in (("train",), ("data",)):
                raise
            with below("train", "task", self.settings.task.name):
                raise
        for one, train in ((self.data, True), (self.tests, False)):
            if one is not None and one.transform is None:
                one.transform = self.task.transform(train)
                spec = getattr(one, "spec", None)
                if one.transform and spec and not spec.conditions and (spec.flip or spec.crop == "random"):
                    finding = "has no effect: the task crops and flips itself (classify: augment)"
                    raise SpecError(finding, path=("data", "flip" if spec.flip else "crop"))

    def _tell_of_the_model(self) -> None:
        """What plugins get in all hooks, and the first hook: before the module is lowered, so that its hooks are kept."""
        folder = self.out or Path.cwd()
        self.plugins.common = {
            "module": self.module,
            "project_name": folder.absolute().name,
            "log_folder": str(folder),
            "data_root": self.data.root,
            "ed_state": self.state,
        }
        self.plugins.call(
            "on_model_load",
            config=self.config,
            optimizer_config=optimizer_config(self.task, self.settings),
            resume_ckpt=self.task.encoder and self.task.encoder.source,
            disable_unet_training=not self.groups,
            disable_textenc_training=not self.task.trains,
        )

    def _check_first_batch(self) -> None:
        """Raises TrainError where it does not fit the graph, unless a plugin may still change it."""
        batch = None
        if not self.plugins.has("on_step_start"):
            with contextlib.suppress(Exception):  # the data set's own, which the first step tells
                batch = self.data.peek()
        if batch is not None:
            set_mode(self.module, self.module, self.settings.mode)
            draws = Draws(self.seed, 1, rank=self.rank, world=self.world, device=self.accelerator.device)
            check_fits(self.module, self.task, self.moved(batch), draws, self.accelerator)

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.progress.steps

    @property
    def epochs(self) -> int:
        """Epochs of the whole run."""
        return self.progress.epochs

    def _make(self, optimizer: torch.optim.Optimizer | None, scheduler: Any) -> None:
        """What runs, the optimizer and its scheduler, the average of the weights, and what takes steps."""
        names = {name for group in self.groups for name in group["names"]}
        frozen = {name for name, _ in self.module.named_parameters()} - names
        self.divided = self._divided()
        self.runner, self.sharded = prepared(self.divided, self.settings, frozen, self.accelerator)
        if self.sharded is not None:
            held = originals(self.sharded)
            for group in self.groups:
                group["params"] = [held[name] for name in group["names"]]
            if self.plugins.has("on_backpropagation"):
                raise TrainError("a plugin's on_backpropagation cannot see the gradients of a sharded run: remove 'shard'")
        if optimizer is not None:
            check_optimizer(optimizer, self.groups)
        made = optimizer or make_optimizer(self.settings.optimizer, self.groups)
        self.scheduler, self.by_epoch = scheduler, scheduler is not None
        if scheduler is None:
            self.scheduler, self.by_epoch = make_scheduler(self.settings.scheduler, made, self.steps, self.progress.per_epoch)
        self.optimizer: Any = self.accelerator.prepare_optimizer(made, device_placement=False)
        self.state.optimizer = Optimizers(self.optimizer, self.state.text_encoder)
        self.trained = {name: p for group in self.groups for name, p in zip(group["names"], group["params"], strict=True)}
        every = {f"{before}{name}": p for before, part in self.parts.items() for name, p in part.named_parameters()}
        self.fingerprint = fingerprint({name: p for name, p in every.items() if name not in self.trained})
        self.ema = Ema(self.trained, self.settings.ema) if self.settings.ema else None
        self.kept_best: Checkpoint | None = None  # where the run has no folder
        self.buffers = {name: buffer.detach().clone() for name, buffer in self.named_buffers().items()}
        self.take_step = Stepper(self)

    def named_buffers(self) -> dict[str, Tensor]:
        """List the buffers of all modules that passes are in, by the names that they have in a checkpoint."""
        return {f"{before}{name}": buffer for before, part in self.parts.items() for name, buffer in part.named_buffers()}

    def _divided(self) -> TracedModule:
        """The module as processes that share samples compute it together; the module itself where none do."""
        if self.settings.parallel is None:
            return self.module
        with preserve_random_state():
            batch = next(self.data.epoch(0))
        self.data.close()
        return divided(self.module, self.settings, self.task, self.moved(batch), self.accelerator, self.dtypes)

    # --- training

    def fit(self, resume: str | Path | None = None) -> list[dict[str, Any]]:
        """Train to the end and give the history: for each step a dict of step, epoch, loss, lr, seconds, grad_norm and more.

        `resume` is a checkpoint, or the folder of a run, of which the newest one is taken. On a CPU a resumed run goes on as
        if it had never stopped, to the bit. An interrupt (SIGINT, SIGTERM) ends the run after the step at hand, with a
        checkpoint. Raises TrainError; the checkpoints written so far stay.
        """
        if self.history and self.progress.step >= self.steps:
            return self.history
        with seeded(mixed(self.seed, self.rank)):
            if resume is not None:
                restore(self, newest(Path(resume)))
            self.history = self.watch.rewind(self.progress.step)
            self.watch.start(self.module, self.counts())
            for line in (*self.data.notes(self.task), *self.progress.notes()):
                self.watch.note(line)
            begun = time.perf_counter()
            self._run()
            for line in self.plugins.summary(time.perf_counter() - begun):
                self.watch.note(line)
            return self.history

    def _run(self) -> None:
        """From the first step to the last, and what is left on disk."""
        length = {"steps": self.steps, "epochs": self.epochs, "global_step": self.progress.seen}
        self.plugins.call("on_training_start", optimizer=self.optimizer, config=self.config, **length)
        try:
            with interruptible() as asked:
                self.take_step.asked = lambda: bool(asked)
                if self.settings.log.samples and not self.progress.step:
                    self._pictures()
                while self.progress.step < self.steps and not self.take_step.stop and not self._waits():
                    self._epoch()
            if self.take_step.stop:
                keep(self)
                end = KeyboardInterrupt(f"stopped after step {self.progress.step}")
                end.signal = asked[0] if asked else signal.SIGINT  # type: ignore[attr-defined]  # for the exit code
                raise end
            if self._waits() and self.progress.step < self.steps:
                self.watch.note(f"ended after step {self.progress.step}: {self.progress.waited} tests without an improvement")
            self._finish()
        except BaseException as error:  # whoever it comes from: nothing learnt is lost
            rescue(self, error)
            raise
        finally:
            self._close()

    def counts(self) -> tuple[int, int]:
        """Count the parameters that train, and all."""
        every = (p.numel() for part in self.parts.values() for p in part.parameters())
        return sum(p.numel() for p in self.trained.values()), sum(every)

    def _epoch(self) -> None:
        progress = self.progress
        if progress.done < progress.batches:  # else the checkpoint is of the moment before the end of an epoch
            place = {"epoch": progress.epoch, "global_step": progress.seen, "arg_update_callback": progress.update}
            self.plugins.call("on_epoch_start", epoch_length=progress.batches, **place)
        if progress.done == 0 and (line := progress.renew()):
            if self.settings.scheduler is not None:
                line += f"; the learning rate keeps its schedule of {self.watch.steps} steps, and there are {self.steps}"
            self.watch.note(line)
            self.watch.steps, self.watch.epochs = self.steps, self.epochs
        set_mode(self.runner, self.module, self.settings.mode)
        batches = self.data.epoch(progress.epoch, start=progress.done)
        before = time.perf_counter()
        while progress.done < progress.batches and progress.step < self.steps and not self.take_step.stop:
            taken = [self.moved(batch) for batch in itertools.islice(batches, progress.size())]
            if any(self.plugins.has(hook) for hook in ("on_step_start", "on_backpropagation", "on_step_end")):
                taken = [plugin_batch(batch, self.task) for batch in taken]
            record = self._step(taken)
            after = time.perf_counter()
            self._after({**record, "seconds": after - before}, taken[-1])
            self.take_step.stop |= self.accelerator.num_processes == 1 and self.take_step.asked()
            before = time.perf_counter()
        if progress.done >= progress.batches:
            self._end_epoch()

    def _step(self, batches: list[Batch]) -> dict[str, Any]:
        progress = self.progress
        place = {"epoch": progress.epoch, "global_step": self.progress.seen, "local_step": progress.done}
        self.drawn = random_state_dict()
        lr = self.optimizer.param_groups[0]["lr"]
        report = self.take_step(batches, progress.step + 1, place)
        progress.step += 1
        progress.done += len(batches)
        progress.total += report["loss"] * len(batches)
        self.drawn = None
        if not self.take_step.skipped:
            if self.ema:
                self.ema.update()
            if not self.by_epoch:
                self._schedule(report["loss"])
        self.take_step.whole = True
        return {"step": progress.step, "epoch": progress.epoch, "loss": report.pop("loss"), "lr": lr, **report}

    def _close(self) -> None:
        """End the workers, say what they could not read, and finish what is watched."""
        for loader in (self.data, self.tests) if self.tests else (self.data,):
            loader.close()
            if loader.skipped:
                self.watch.note(f"{len(loader.skipped)} images could not be read: {too_many(loader.skipped)}")
        self.watch.close(self.history)

    def _schedule(self, loss: float) -> None:
        by_loss = isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        try:
            self.scheduler.step(*[loss] * by_loss)
        except Exception as error:  # the scheduler's, which may be the user's
            self.take_step.whole = True  # but for the learning rate, which nothing goes on with
            name, step = type(self.scheduler).__name__, self.progress.step
            raise TrainError(f"scheduler {name} raised after step {step}: {type(error).__name__}: {error}") from error

    def _after(self, record: dict[str, Any], batch: Batch) -> None:
        """What follows a step: its record, the plugins, pictures, a checkpoint."""
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
                self._pictures()
            if settings.save.every and progress.step % settings.save.every == 0:
                keep(self)

    def _end_epoch(self) -> None:
        progress, every = self.progress, self.settings.test.every
        epoch, loss = progress.epoch, progress.total / self.progress.batches
        progress.epoch, progress.done, progress.total = epoch + 1, 0, 0.0
        if self.by_epoch:
            self._schedule(loss)
        last = progress.step >= self.steps
        metrics = self.test() if self.tests and ((every and progress.epoch % every == 0) or last) else {}
        self._judge(metrics)
        place = {"epoch": epoch, "global_step": self.progress.seen, "arg_update_callback": self.progress.update}
        self.plugins.call("on_epoch_end", loss=loss, metrics=metrics, **place)

    def _judge(self, metrics: dict[str, float]) -> None:
        """Keep what has tested best, and count the tests since."""
        wanted = self.settings.test
        if metrics and (wanted.best or wanted.patience) and self.progress.judge(metrics, self.task.best) and wanted.best:
            keep_best(self)

    def _waits(self) -> bool:
        """Whether no test is awaited that could be better: the run ends early."""
        patience = self.settings.test.patience
        return patience is not None and self.progress.waited >= patience

    def _finish(self) -> None:
        """Pictures, the last checkpoint and the trained module."""
        if self.tests and self.progress.done:  # the run ended within an epoch
            self._judge(self.test())
        keep(self)
        if self.settings.test.best:
            take_best(self)
        self._pictures()
        export(self)
        self.accelerator.wait_for_everyone()  # a process that ended while the first one writes would take it with it

    # --- looking at what was learnt

    def test(self) -> dict[str, float]:
        """Compute the task's metrics on the test data, over all processes; those of the averaged weights, if there are any."""
        if self.tests is None:
            raise TrainError("no test data: set 'test' in the data section, or pass test=...")
        begun = time.perf_counter()
        most = max(gathered(self.accelerator, self.tests.steps))
        with self._evaluating() as module:
            totals, count = self._totals(module, self.tests.epoch(0))
            for _ in range(most - count if self.sharded else 0):
                self._totals(module, iter([self.tests.first(1)]))  # all processes of a sharded module call it as often
        parts = gathered(self.accelerator, {name: (float(a), float(b)) for name, (a, b) in totals.items()})
        metrics = means({name: (sum(p[name][0] for p in parts), sum(p[name][1] for p in parts)) for name in parts[0]})
        best, chosen = self.progress.best, self.task.best
        if chosen in metrics and (chosen not in best or metrics[chosen] >= best[chosen]):
            self.progress.best = dict(metrics)
        seconds = (time.perf_counter() - begun) / max(1, self.tests.steps)
        self.watch.test(self.progress.epoch or 1, metrics, seconds, self.progress.best)
        self.metrics = metrics
        return metrics

    def _pictures(self) -> None:
        """Show what the task's samples are now, where it has any."""
        with self._evaluating() as module:
            images = self.task.samples(module, Draws(self.seed, 0, device=self.accelerator.device))
        if images is not None:
            self.watch.beside_samples(self.task.beside_samples)
            self.watch.samples(self.progress.step, images)

    def _totals(self, module: nn.Module, batches: Iterator[Batch]) -> tuple[dict[str, tuple[float, float]], int]:
        """What the task's test gives for batches, and how many they were."""
        counted = itertools.count()
        taken = (self.moved(batch) for batch, _ in zip(batches, counted, strict=False))
        return self.task.test(module, taken), next(counted)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[nn.Module]:
        """The module for tests and pictures: in evaluation, with averaged weights; the run's random numbers stay."""
        both = self.divided.twin_error == self.module.twin_error  # else only one mode can be divided
        module = self.sharded or (self.divided if both else self.module)
        device = self.accelerator.device
        if self.accelerator.num_processes > 1:
            for buffer in module.buffers():  # statistics that each process took of its own samples
                torch.distributed.broadcast(buffer, 0)
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.no_grad(),
            self.ema.applied() if self.ema else contextlib.nullcontext(),
            self.accelerator.autocast(),
        ):
            module.eval()
            yield module
        set_mode(self.runner, self.module, self.settings.mode)

    def moved(self, batch: Batch) -> Batch:
        """Move a batch to the device of the run."""
        device = self.accelerator.device
        return {k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in batch.items()}


def _settings(task: Any, given: Mapping[str, Any]) -> Train:
    """The `train` section of keyword arguments. SpecError for what a configuration would not take either."""
    known = {"task": type(task).__name__, "epochs": None if "steps" in given else 1, **given}
    made: Train = check_settings(Train, known, "train")
    return made
