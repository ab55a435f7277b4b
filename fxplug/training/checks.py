"""What is checked of a run before it starts: settings that nothing would use, its precision, batches, pictures and what it
writes at its end.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch.utils.data import DataLoader

from ..core.artifacts.artifact import check_savable
from ..core.errors import FxplugError, SpecError, TrainError, prefix_path
from ..core.ir.traced_module import TracedModule
from ..core.writing import check_folder
from .distributed import remake_accelerator
from .evaluation import Evaluation
from .param_groups import find_precision
from .random_draws import preserve_random_state
from .tasks.task import Task
from .train_section import Log, Save, Train

# of a run that writes nothing: a section, a key, and the values that ask for nothing
IDLE = (
    ("save", "every", (0, Save().every)),
    ("save", "keep", (Save().keep,)),
    ("log", "every", (Log().every,)),
    ("log", "samples", (0,)),
)


def choose_precision(
    module: TracedModule, settings: Train, accelerator: Accelerator, *, others: bool
) -> tuple[Train, Accelerator, list[str]]:
    """Let a model in half precision compute in it, with what trains in float32.

    Returns the settings and the accelerator of that precision, and what is to be said of it. `others` says that something
    trains beside the module.
    """
    chosen = find_precision(module, settings, others=others)
    if chosen == settings.precision:
        return settings, accelerator, []
    note = f"the model is in half precision: the run computes as with precision: {chosen}, and trained parameters are float32"
    return settings.model_copy(update={"precision": chosen}), remake_accelerator(chosen, accelerator), [note]


def check_used(settings: Train, out: Path | None, tests: Any) -> None:
    """Raise SpecError for a setting that would have no effect, TrainError for a folder that cannot be written to, and for tests
    that are to be compared and do not take place."""
    for key in ("patience", "best"):
        if getattr(settings.test, key) and not (tests and settings.test.every):
            raise TrainError(f"test.{key} compares tests: set test.every, and the test data ('test' in the section data)")
    if out is not None:
        check_folder(out, TrainError)
    if settings.test.every and tests is None:
        finding = "has no effect without test data: set 'test' in the section data, or pass test=..."
        raise SpecError(finding, path=("train", "test", "every"))
    if out is None:
        for name, key, without in IDLE:
            if getattr(getattr(settings, name), key) not in without:
                raise SpecError("has no effect, because the run writes nothing: pass out=...", path=("train", name, key))


def check_saved(modules: Iterable[TracedModule]) -> None:
    """Raise TrainError for a module that could not be saved at the end of the run."""
    for module in modules:
        try:
            check_savable(module)
        except FxplugError as error:
            raise TrainError(f"module/ could not be written at the end (without out=... none is): {error}") from error


def check_batches(settings: Train, task: Task, data: Any) -> None:
    """Raise SpecError or TrainError for batches of another size than the settings say, or that the task cannot take as the
    run divides them or the weights."""
    if settings.shard and task.preserve is not None:
        finding = "needs the whole weights in each process: leave 'shard' out"
        raise SpecError(finding, path=("train", "task", settings.task.name, "preserve"))
    given = data if isinstance(data, DataLoader) else None
    size = settings.batch if given is None else given.batch_size
    if given is not None and size is not None and "batch" in settings.model_fields_set and settings.batch != size:
        finding = f"has no effect, because the batches of the DataLoader have {size} samples: set {size}, or leave it out"
        raise SpecError(finding, path=("train", "batch"))
    if size is None:
        return
    task.check_batch(size)
    sampler: Any = getattr(given, "sampler", None)
    if given is None or given.drop_last or not hasattr(sampler, "__len__") or not (rest := len(sampler) % size):
        return
    try:
        task.check_batch(rest)
    except SpecError as error:
        finding = f"the last batch of an epoch has {rest} samples: {error.finding}; set drop_last=True for the DataLoader"
        raise TrainError(finding) from error


def check_samples(task: Task, settings: Train, evaluation: Evaluation) -> None:
    """Raise SpecError or TrainError if the task's sample pictures could not be drawn at the end of the run."""
    path = ("train", "task", settings.task.name)
    try:
        with preserve_random_state(), evaluation.evaluating() as module, prefix_path(*path):
            drawn = task.check_samples(module)
    except FxplugError:
        raise
    except Exception as error:  # of the scheduler, the text encoder, the VAE
        finding = f"the sample pictures cannot be drawn: {type(error).__name__}: {error}; samples: 0 draws none"
        raise SpecError(finding, path=(*path, "samples")) from error
    if settings.log.samples and not drawn:
        raise SpecError("has no effect, because the task draws no pictures", path=("train", "log", "samples"))
