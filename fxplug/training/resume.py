"""What a run leaves on disk, and how it is taken up again."""

from __future__ import annotations

import errno
import shutil
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from ..core.artifacts.artifact import save
from ..core.errors import TrainError
from ..core.reading import reason
from ..core.spec.train_section import written
from ..core.torch_internals.modules import tree_map
from .checkpoint import PREFIX, Checkpoint, differences, list_checkpoints, read, write, write_to
from .distributed import gathered
from .param_groups import fill, filled, spread
from .random_draws import random_state_dict, read_random_state

if TYPE_CHECKING:
    from .trainer import Trainer

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SERVED = {"shuffle", "size", "buckets", "crop", "flip", "channels", "captions", "repeats"}  # how samples are served


def keep(trainer: Trainer, path: Path | None = None) -> None:
    """Write a checkpoint of this moment: the newest of the run, or one in a folder of its own, which no later one removes.

    A full disk is reported, and ends the run when the settings say so.
    """
    if trainer.out is None and path is None:
        return
    made = _snapshot(trainer, gathered(trainer.accelerator, random_state_dict()))
    newest = None
    if trainer.first:
        with _reported(trainer, f"checkpoint of step {trainer.progress.step}" if path is None else f"checkpoint '{path}'"):
            if path is not None:
                write_to(path, made)
            elif trainer.out is not None:
                newest = write(trainer.out / "checkpoints", made, trainer.settings.save.keep)
    if newest is not None:  # outside: what a plugin raises is not the disk's
        _tell(trainer, newest)


def keep_best(trainer: Trainer) -> None:
    """Keep what has tested best: in the folder `best/`, a checkpoint, or in memory where the run has no folder."""
    if trainer.out is not None:
        keep(trainer, trainer.out / "best")
    else:
        trainer.kept_best = _snapshot(trainer, [])


def take_best(trainer: Trainer) -> None:
    """Give the module the weights that have tested best."""
    trainer.accelerator.wait_for_everyone()  # the first process writes them
    kept = trainer.kept_best
    if trainer.out is not None and (trainer.out / "best").is_dir():
        kept = read(trainer.out / "best")
    if kept is None:
        return  # no test had a number
    buffers = trainer.named_buffers()
    fill(buffers, trainer.buffers)
    fill({**buffers, **trainer.trained}, kept.weights)
    if trainer.ema is not None:
        fill(trainer.ema.average, kept.ema)
    trainer.metrics = trainer.progress.measured or trainer.metrics  # a checkpoint of an earlier version does not have them
    trainer.watch.note(f"the module is that of step {kept.progress['step']}, which had the best test")


def _tell(trainer: Trainer, path: Path) -> None:
    place = {"epoch": trainer.progress.epoch, "global_step": trainer.progress.seen}
    names = {"save_folder": str(path), "diffusers_save_path": str(path)}
    trainer.plugins.call("on_model_save", path=path, **names, **place)


def rescue(trainer: Trainer, error: BaseException) -> None:
    """Write what was learnt before an error that ends a run: a checkpoint of its last whole step, and the module.

    Of several processes the first one writes, without asking the others, which may be gone; what is sharded among them is
    lost back to the newest checkpoint. The error gets a note about what there is.
    """
    step, stepper = trainer.progress.step, trainer.take_step
    if trainer.out is None or not trainer.first or step == 0 or trainer.saved:
        return
    lost, module = None, f" and '{trainer.out / 'module'}'"
    kept = list_checkpoints(trainer.out / "checkpoints")
    if trainer.sharded is not None:
        lost = "its weights are sharded over several processes"
    elif not stepper.whole:
        lost = "the optimizer was changing the weights"
    elif not all(bool(p.isfinite().all()) for p in trainer.trained.values()):
        lost = "its weights are not finite"
    else:
        try:
            if not kept or kept[-1].name != f"{PREFIX}{step:08}":
                made = _snapshot(trainer, [trainer.drawn or random_state_dict()])
                kept.append(write(trainer.out / "checkpoints", made, trainer.settings.save.keep))
        except Exception as other:  # the system's or torch's; the first error is the one that counts
            lost = f"it cannot be written: {other}"
    try:
        if lost is None:
            _write_modules(trainer, _collect(trainer))
    except Exception as other:  # as above
        module = f"; the module could not be written: {other}"
    text = f"{'stopped' if isinstance(error, KeyboardInterrupt) else 'the run ended'} after step {step}"
    if lost is None:
        text += f": the training is saved in '{kept[-1]}' (continue with --resume){module}"
    else:
        text += f", and nothing of it is saved because {lost}; {_newest(trainer)}"
    error.add_note(text)
    trainer.watch.note(text, said=False)


def export(trainer: Trainer) -> None:
    """Write the trained module, and the one with averaged weights, as artifacts: `module/` and `ema/`.

    Plugins see the end of the training before, with the weights that will be written: what they change is in the module.
    """
    averages = _collect(trainer)
    trainer.plugins.call("on_training_end", global_step=trainer.progress.seen)
    _write_modules(trainer, averages)
    trainer.saved = True
    if trainer.out is not None and trainer.first:
        _tell(trainer, trainer.out / "module")


def _collect(trainer: Trainer) -> dict[str, Any]:
    """Put the trained weights, whole and in their own dtype, into the module, and give the averaged ones by name."""
    named = {**trainer.trained, **dict(trainer.module.named_parameters())}
    trained, averages = tree_map(_gather_full, (trainer.trained, trainer.ema.average if trainer.ema else {}))
    if trainer.sharded is not None:  # the module itself still has the weights it began with
        fill(named, trained)
    for name, dtype in trainer.dtypes.items():  # so that the module is of one dtype again, and can be called
        named[name].data = named[name].data.to(dtype)
    trainer.module.eval()
    return dict(averages)


def _write_modules(trainer: Trainer, averages: dict[str, Any]) -> None:
    if trainer.out is None or not trainer.first:
        return
    named = {**trainer.trained, **dict(trainer.module.named_parameters())}
    encoder = trainer.task.encoder if trainer.task.trains else None
    with _reported(trainer, "trained module"):
        save(trainer.module, trainer.out / "module", config=trainer.config)
    if encoder is not None:
        with _reported(trainer, "trained text encoder"):
            encoder.save(trainer.out / "text")
    if averages:
        with filled(named, averages), _reported(trainer, "module with averaged weights"):
            save(trainer.module, trainer.out / "ema", config=trainer.config)
            if encoder is not None:
                encoder.save(trainer.out / "text_ema")


def restore(trainer: Trainer, path: Path) -> None:
    """Put a run back to a checkpoint. TrainError, with what differs, for one of another model, pass list or data."""
    kept = read(path)
    own = _identity(trainer)
    length = kept.progress["run"].pop("steps", None), own.pop("steps")
    if "data" not in kept.progress["run"]:
        del own["data"]  # a checkpoint of an earlier version
    lines = differences(kept.progress["run"], own)
    if lines:
        weights = [line for line in lines if line.startswith("trained.")]  # which follow from the passes, mostly
        others = [line for line in lines if line not in weights]
        more = f"and {len(weights)} trained weights"
        shown = [*others, more] if others and weights else others or [*weights[:3], *([more] if weights[3:] else [])]
        listed = "\n  ".join(shown)
        raise TrainError(f"'{path}' is a checkpoint of another run:\n  {listed}")
    fill({**trainer.named_buffers(), **trainer.trained}, kept.weights)
    if trainer.ema is not None:
        fill(trainer.ema.average, kept.ema)
        trainer.ema.steps = kept.progress["ema_steps"]
    state = kept.state["optimizer"]
    for index, parameter in enumerate(trainer.trained.values()):
        of = state["state"].get(index, {})
        of.update({key: spread(value, parameter) for key, value in of.items()})
    fresh = [{key: value for key, value in group.items() if key != "params"} for group in trainer.optimizer.param_groups]
    trainer.optimizer.load_state_dict(state)
    if length[0] == length[1]:
        trainer.scheduler.load_state_dict(kept.state["scheduler"])
    else:
        _replay(trainer, fresh, kept.state["scheduler"]["last_epoch"])
    if trainer.accelerator.scaler is not None and "scaler" in kept.state:
        trainer.accelerator.scaler.load_state_dict(kept.state["scaler"])
    for key, value in kept.progress["progress"].items():
        setattr(trainer.progress, key, value)
    trainer.take_step.checked = True
    if len(kept.random) == trainer.accelerator.num_processes:
        read_random_state(kept.random[trainer.accelerator.process_index])
    else:
        trainer.watch.note("the number of processes differs from before: dropout draws other numbers from here on")
    if trainer.out is not None and trainer.first:  # later ones are of a line of the run that is given up
        for later in list_checkpoints(trainer.out / "checkpoints"):
            if int(later.name.removeprefix(PREFIX)) > trainer.progress.step:
                shutil.rmtree(later)


def _replay(trainer: Trainer, fresh: list[dict[str, Any]], times: int) -> None:
    """Let the scheduler of a run that is longer than before stand where it would be if the run had always been so long."""
    for group, first in zip(trainer.optimizer.param_groups, fresh, strict=True):
        group.update(first)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a step of the scheduler without one of the optimizer
        for _ in range(times):
            trainer.scheduler.step()


def _snapshot(trainer: Trainer, random: list[dict[str, Any]]) -> Checkpoint:
    accelerator, ema = trainer.accelerator, trainer.ema
    state = {"optimizer": tree_map(_gather_full, trainer.optimizer.state_dict()), "scheduler": trainer.scheduler.state_dict()}
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler.state_dict()
    progress = {
        "step": trainer.progress.step,
        "progress": trainer.progress.state(),
        "ema_steps": ema.steps if ema else 0,
        "run": _identity(trainer),
    }
    buffers = trainer.named_buffers()
    changed = {n: b for n, b in buffers.items() if not torch.equal(b, trainer.buffers[n].to(b.device))}
    tensors = {**trainer.trained, **changed}, ema.average if ema else {}
    copied = tree_map(lambda tensor: _gather_full(tensor).detach().to("cpu", copy=True).contiguous(), tensors)
    return Checkpoint(copied[0], progress, state, copied[1], random)


def _identity(trainer: Trainer) -> dict[str, Any]:
    """What must be the same when a run is taken up again. More steps and other logs are fine."""
    settings, config = trainer.settings, trainer.config
    fixed = isinstance(trainer.scheduler, torch.optim.lr_scheduler.LambdaLR)
    spec = getattr(trainer.data, "spec", None)
    return {
        **{key: config.get(key) for key in ("model", "weights", "dtype", "leaf")},
        "frozen weights": trainer.fingerprint,
        "passes": {
            f"{before}{entry['name']}": {**entry["params"], "sites": len(entry["sites"])}
            for before, part in trainer.parts.items()
            for entry in part.meta.get("passes", [])
        },
        "trained": {name: list(p.shape) for name, p in trainer.trained.items()},
        "task": written(settings.task),
        "optimizer": [type(trainer.optimizer.optimizer).__name__, written(settings.optimizer)],
        "groups": {group["name"]: [group["lr"], group["weight_decay"]] for group in trainer.groups},
        "scheduler": [type(trainer.scheduler).__name__, written(settings.scheduler)],
        "steps": None if fixed else trainer.steps,  # not compared: a run may be made longer
        "precision": settings.precision,
        "ema": settings.ema,
        "samples of a step": settings.batch * settings.accumulate * trainer.world,
        "data": None if spec is None else spec.model_dump(mode="json", include=SERVED),
        "samples": len(trainer.data.items),  # type: ignore[arg-type]  # a map-style data set has a length
        "seed": trainer.seed,
    }


def _gather_full(value: Any) -> Any:
    """A sharded tensor gathered from all processes; anything else as it is."""
    return value.full_tensor().detach() if isinstance(value, DTensor) else value


@contextmanager
def _reported(trainer: Trainer, what: str) -> Iterator[None]:
    """Tell an error of the system's: the run stops with what is still there. On a full disk it may go on, as told."""
    try:
        yield
    except Exception as error:  # torch's or the system's, wrapped in what it likes; any other is raised again
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        full = cause.errno in FULL
        why = "the disk is full" if full else reason(cause)
        text = f"the {what} could not be written, {why} ({error}); {_newest(trainer)}"
        if not full:
            raise TrainError(f"{text}; make the folder writable and resume") from error
        if trainer.settings.save.on_full_disk == "stop":
            raise TrainError(f"{text}; free some space and resume, or set save.on_full_disk: continue") from error
        trainer.watch.note(f"{text}; the run goes on")


def _newest(trainer: Trainer) -> str:
    kept = list_checkpoints(trainer.out / "checkpoints") if trainer.out else []
    return f"the newest checkpoint is '{kept[-1]}'" if kept else "there is no checkpoint"


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """A list that gets the number of the first SIGINT or SIGTERM; the second one interrupts at once."""
    asked: list[int] = []

    def ask(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
