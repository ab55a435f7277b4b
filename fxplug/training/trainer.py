"""The loop: epochs of batches to steps, with checkpoints, tests, pictures and plugins around them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..errors import SpecError, TrainError
from ..ir.traced_module import TracedModule
from ..lowerings.regions.submodules import originals
from ..spec.run_config import check_settings
from ..spec.train_section import Train
from .checkpoint import fingerprint, newest, seeded
from .data.loader import loader_of
from .data.seeding import random_state, random_state_kept
from .distributed import gathered, launched, prepared, set_mode
from .ema import Ema
from .monitor import Watch
from .param_groups import check_optimizer, choose, make_optimizer, make_scheduler
from .plugins import Plugins, open_plugins
from .random_draws import Draws, mixed
from .resuming import export, interruptible, keep, rescue, restore
from .splitting import divided, share
from .stepping import Batch, Stepper
from .tasks.task import TaskInfo, make_task, means


@dataclass
class Progress:
    """How far a run is: optimizer steps, the epoch at hand, micro batches done in it and the sum of its losses; best tests."""

    step: int = 0
    epoch: int = 0
    done: int = 0
    total: float = 0.0
    best: dict[str, float] = field(default_factory=dict)


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
            plugins = open_plugins(specs, self.settings.on_plugin_error, base)
        self.plugins = plugins
        before = {name: p.dtype for name, p in module.named_parameters()}
        self.groups = choose(module, self.settings)
        self.dtypes = {name: before[name] for group in self.groups for name in group["names"]}
        module.to(self.accelerator.device)
        self.rank, self.world = share(self.accelerator, self.settings)
        common: dict[str, Any] = {"batch": self.settings.batch, "seed": seed, "rank": self.rank, "world": self.world}
        self.data = loader_of(data, train=True, hooks=self.plugins if self.plugins.transforms else None, **common)
        self.tests = None if test is None else loader_of(test, train=False, hooks=None, **common)
        self._set_up(Path(base or Path.cwd()), timm)
        folder = self.out or Path.cwd()
        self.plugins.common = {
            "module": module,
            "project_name": folder.absolute().name,
            "log_folder": folder,
            "data_root": self.data.root,
        }
        self.plugins.call("on_model_load", config=self.config)  # before the module is lowered: hooks it registers are kept
        self.per_epoch = self.data.steps // self.settings.accumulate
        if self.per_epoch == 0:
            needed, has = self.settings.accumulate, self.data.steps
            raise TrainError(f"a step takes {needed} batches and an epoch has {has}: lower 'accumulate' or 'batch'")
        self.steps = self.settings.steps or self.per_epoch * (self.settings.epochs or 1)
        self.epochs = -(-self.steps // self.per_epoch)
        self.progress = Progress()
        self.history: list[dict[str, Any]] = []
        self.metrics: dict[str, float] = {}
        self.drawn: Any = None  # the random state before the step at hand
        self.saved = False  # whether the module is written
        self._make(optimizer, scheduler)
        counts = self.steps, self.epochs, self.per_epoch
        self.watch = Watch(self.out if self.first else None, self.settings, *counts, quiet=quiet or not self.first)
        self.take_step.note = self.plugins.note = self.watch.note

    def _set_up(self, base: Path, timm: str | None) -> None:
        """Tell the task what there is, and the loaders what the task makes of an image."""
        loader, sizes = self.tests or self.data, self.data.size or (0, 0)
        info = TaskInfo(
            size=sizes,
            device=self.accelerator.device,
            classes=self.data.classes,
            timm=timm,
            base=base,
            examples=lambda count: self._moved(loader.first(count)),
        )
        try:
            self.task.setup(self.module, info)
        except SpecError as error:
            if error.located or error.path[:1] in (("train",), ("data",)):
                raise
            path = ("train", "task", self.settings.task.name, *error.path)
            raise SpecError(error.finding, path=path, key=error.key) from error.__cause__
        for one, train in ((self.data, True), (self.tests, False)):
            if one is not None and one.transform is None:
                one.transform = self.task.transform(train)
                spec = getattr(one, "spec", None)
                if one.transform and spec and not spec.conditions and (spec.flip or spec.crop == "random"):
                    finding = "has no effect: the task crops and flips by itself (classify: augment)"
                    raise SpecError(finding, path=("data", "flip" if spec.flip else "crop"))

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
        if optimizer is not None:
            check_optimizer(optimizer, self.groups)
        made = optimizer or make_optimizer(self.settings.optimizer, self.groups)
        self.scheduler, self.by_epoch = scheduler, scheduler is not None
        if scheduler is None:
            self.scheduler, self.by_epoch = make_scheduler(self.settings.scheduler, made, self.steps, self.per_epoch)
        self.optimizer: Any = self.accelerator.prepare_optimizer(made, device_placement=False)
        self.trained = {name: p for group in self.groups for name, p in zip(group["names"], group["params"], strict=True)}
        self.fingerprint = fingerprint({n: p for n, p in self.module.named_parameters() if n in frozen})
        self.ema = Ema(self.trained, self.settings.ema) if self.settings.ema else None
        self.buffers = {name: buffer.detach().clone() for name, buffer in self.module.named_buffers()}
        parts = self.module, self.runner, self.task, self.groups, self.optimizer
        self.take_step = Stepper(self.accelerator, *parts, self.settings, self.plugins, self.seed)

    def _divided(self) -> TracedModule:
        """The module as processes that share samples compute it together; the module itself where none do."""
        if self.settings.parallel is None:
            return self.module
        with random_state_kept():
            batch = next(self.data.epoch(0))
        self.data.close()
        return divided(self.module, self.settings, self.task, self._moved(batch), self.accelerator, self.dtypes)

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
            return self._fit(None if resume is None else newest(Path(resume)))

    def _fit(self, start: Path | None) -> list[dict[str, Any]]:
        if start is not None:
            restore(self, start)
        self.history = self.watch.rewind(self.progress.step)
        self.watch.start(self.module, self.counts())
        begun = time.perf_counter()
        self.plugins.call(
            "on_training_start",
            optimizer=self.optimizer,
            config=self.config,
            steps=self.steps,
            epochs=self.epochs,
            global_step=self.progress.step,
        )
        try:
            with interruptible() as asked:
                self.take_step.asked = lambda: bool(asked)
                while self.progress.step < self.steps and not self.take_step.stop:
                    self._epoch()
            if self.take_step.stop:
                keep(self)
                raise KeyboardInterrupt(f"stopped after step {self.progress.step}")
            self._finish()
        except BaseException as error:  # whoever it comes from: nothing learnt is lost
            rescue(self, error)
            raise
        finally:
            self._close()
        self.plugins.call("on_training_end", global_step=self.progress.step)
        for line in self.plugins.summary(time.perf_counter() - begun):
            self.watch.note(line)
        return self.history

    def counts(self) -> tuple[int, int]:
        """Parameters that train, and all."""
        return sum(p.numel() for p in self.trained.values()), sum(p.numel() for p in self.module.parameters())

    def _epoch(self) -> None:
        progress, accumulate = self.progress, self.settings.accumulate
        whole = self.per_epoch * accumulate
        if progress.done < whole:  # else the checkpoint is of the moment before the end of an epoch
            place = {"epoch": progress.epoch, "global_step": progress.step}
            self.plugins.call("on_epoch_start", epoch_length=self.per_epoch, **place)
        set_mode(self.runner, self.module, self.settings.mode)
        batches = self.data.epoch(progress.epoch, start=progress.done)
        before = time.perf_counter()
        while progress.done < whole and progress.step < self.steps and not self.take_step.stop:
            taken = [self._moved(batch) for batch in itertools.islice(batches, accumulate)]
            record = self._step(taken)
            after = time.perf_counter()
            self._after({**record, "seconds": after - before}, taken[-1])
            self.take_step.stop |= self.accelerator.num_processes == 1 and self.take_step.asked()
            before = time.perf_counter()
        if progress.done >= whole:
            self._end_epoch()

    def _step(self, batches: list[Batch]) -> dict[str, Any]:
        progress = self.progress
        place = {"epoch": progress.epoch, "global_step": progress.step}
        local = progress.done // self.settings.accumulate
        self.drawn = random_state()
        self.plugins.call("on_step_start", local_step=local, batch=batches[0], **place)
        lr = self.optimizer.param_groups[0]["lr"]
        report = self.take_step(batches, progress.step + 1, place)
        if not self.take_step.skipped:
            if self.ema:
                self.ema.update()
            if not self.by_epoch:
                self._schedule(report["loss"])
        progress.step += 1
        progress.done += len(batches)
        progress.total += report["loss"]
        self.drawn = None
        return {"step": progress.step, "epoch": progress.epoch, "loss": report.pop("loss"), "lr": lr, **report}

    def _close(self) -> None:
        """End the workers, say what they could not read, and finish what is watched."""
        for loader in (self.data, self.tests) if self.tests else (self.data,):
            loader.close()
            if loader.skipped:
                shown = ", ".join(f"{name} ({why})" for name, why in list(loader.skipped.items())[:5])
                more = f" and {len(loader.skipped) - 5} more" * (len(loader.skipped) > 5)
                self.watch.note(f"{len(loader.skipped)} images could not be read: {shown}{more}")
        self.watch.close(self.history)

    def _schedule(self, loss: float) -> None:
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(loss)
        else:
            self.scheduler.step()

    def _after(self, record: dict[str, Any], batch: Batch) -> None:
        """What follows a step: its record, the plugins, pictures, a checkpoint."""
        progress, settings = self.progress, self.settings
        self.history.append(record)
        self.watch.step(record)
        self.plugins.call(
            "on_step_end",
            epoch=progress.epoch,
            global_step=progress.step - 1,
            local_step=progress.done // settings.accumulate - 1,
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
        epoch, loss = progress.epoch, progress.total / self.per_epoch
        progress.epoch, progress.done, progress.total = epoch + 1, 0, 0.0
        if self.by_epoch:
            self._schedule(loss)
        last = progress.step >= self.steps
        metrics = self.test() if self.tests and ((every and progress.epoch % every == 0) or last) else {}
        self.plugins.call("on_epoch_end", epoch=epoch, global_step=progress.step, loss=loss, metrics=metrics)

    def _finish(self) -> None:
        """Pictures, the last checkpoint and the trained module."""
        if self.tests and self.progress.done:  # the run ended within an epoch
            self.test()
        self._pictures()
        keep(self)
        export(self)
        self.accelerator.wait_for_everyone()  # a process that ended while the first one writes would take it with it

    # --- looking at what was learnt

    def test(self) -> dict[str, float]:
        """The task's metrics on the test data, over all processes; the average of the weights is tested when there is one."""
        if self.tests is None:
            raise TrainError("there is nothing to test on: give 'test' in the data section, or test=...")
        begun = time.perf_counter()
        most = max(gathered(self.accelerator, self.tests.steps))
        with self._evaluating() as module:
            totals, count = self._tested(module, self.tests.epoch(0))
            for _ in range(most - count if self.sharded else 0):
                self._tested(module, iter([self.tests.first(1)]))  # all processes of a sharded module call it as often
        parts = gathered(self.accelerator, {name: (float(a), float(b)) for name, (a, b) in totals.items()})
        metrics = means({name: (sum(p[name][0] for p in parts), sum(p[name][1] for p in parts)) for name in parts[0]})
        best, chosen = self.progress.best, self.task.best
        if chosen in metrics and (chosen not in best or metrics[chosen] >= best[chosen]):
            self.progress.best = dict(metrics)
        self.metrics, epoch = metrics, self.progress.epoch or 1
        seconds = (time.perf_counter() - begun) / max(1, self.tests.steps)
        self.watch.test(epoch, metrics, seconds, self.progress.best)
        return metrics

    def _tested(self, module: nn.Module, batches: Iterator[Batch]) -> tuple[dict[str, tuple[float, float]], int]:
        """What the task's test gives for batches, and how many they were."""
        counted = itertools.count()
        taken = (self._moved(batch) for batch, _ in zip(batches, counted, strict=False))
        return self.task.test(module, taken), next(counted)

    def _pictures(self) -> None:
        with self._evaluating() as module:
            images = self.task.samples(module, Draws(self.seed, 0, device=self.accelerator.device))
        if images is not None:
            self.watch.samples(self.progress.step, images)

    @contextmanager
    def _evaluating(self) -> Iterator[nn.Module]:
        """The module for tests and pictures: in evaluation, with averaged weights; the run's own random numbers stay as they
        are."""
        both = self.divided.twin_error == self.module.twin_error  # else only one mode can be divided
        module = self.sharded or (self.divided if both else self.module)
        device = self.accelerator.device
        if self.accelerator.num_processes > 1:
            for buffer in module.buffers():  # statistics that each process took of its own samples
                torch.distributed.broadcast(buffer, 0)
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.no_grad(),
            self.ema.applied() if self.ema else nullcontext(),
            self.accelerator.autocast(),
        ):
            module.eval()
            yield module
        set_mode(self.runner, self.module, self.settings.mode)

    def _moved(self, batch: Batch) -> Batch:
        device = self.accelerator.device
        return {k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in batch.items()}


def _settings(task: Any, given: Mapping[str, Any]) -> Train:
    """The `train` section of keyword arguments. SpecError for what a configuration would not take either."""
    known = {"task": type(task).__name__, "epochs": None if "steps" in given else 1, **given}
    made: Train = check_settings(Train, known, "train")
    return made
