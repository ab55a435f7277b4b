"""What a task is: the one class that a user writes to train something else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ...core.errors import SpecError, did_you_mean, format_fields
from ...core.ir.traced_module import TracedModule
from ..import_paths import construct, import_name
from ..random_draws import Draws
from ..train_section import read_use

if TYPE_CHECKING:
    from ...lowerings.regions.swapping import BlockSwap
    from .conditioning import FolderText

Batch = dict[str, Any]
# a sum and what it is a sum of: processes add up both, and the metric is their quotient
Totals = dict[str, tuple[float, float]]
NAMES = {"classify": "fxplug.training.tasks.classify:Classify", "denoise": "fxplug.training.tasks.denoise:Denoise"}


@dataclass(frozen=True)
class TaskInfo:
    """What a task is told before the training.

    `size` is height and width of the images; `classes` the names of the data's classes, None where it has none; `timm` the
    name of the model when it is one of timm's; `base` the folder that paths are relative to. `examples(n)` gives the first n
    items of the test data, else of the training data, as a batch on the device; None where there is no data yet. `prompt` is
    what plugins make of the caption of a sample image; `seed` is what the random numbers of the run begin with. `trigger` is
    the word that is before each caption of the data; `sizes` are those of the buckets of the images, as far as they are known.
    `swap` has the weights of the blocks that are on the host, and None where all are on the device.
    """

    size: tuple[int, int]
    device: torch.device = torch.device("cpu")
    classes: list[str] | None = None
    timm: str | None = None
    base: Path = Path()
    examples: Callable[[int], Batch] | None = None
    prompt: Callable[[str], str] = str
    seed: int = 0
    trigger: str | None = None
    sizes: tuple[tuple[int, int], ...] = ()
    swap: BlockSwap | None = None

    __repr__ = format_fields


@dataclass
class TrainedPart:
    """A further model of a pipeline that trains in a run: the rewritten `module`, and what steps call, its `runner`.

    `encodes` says that it is a text encoder: it runs as it was traced, in evaluation but for what passes added. `settings` are
    values of the section train that are its own, such as `lr`.
    """

    module: TracedModule
    encodes: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    runner: nn.Module = field(init=False)

    __repr__ = format_fields

    def __post_init__(self) -> None:
        self.runner = self.module


class Task:
    """What is learnt from a batch. A task of one's own is a subclass with a `loss`; the options are its constructor's.

    A batch is a dict: `image` float32 [b, c, h, w], and what the data has of `caption` (list of text), `label` int64 [b],
    `condition` float32 [b, c, h, w] and `loss_mask` float32 [b, 1, h, w], both in [0, 1], `index` int64 [b], `name` (list of
    text) and further keys. The module may be compiled, outlined or wrapped for several processes, so a task calls it, by
    keywords, and does nothing else with it.
    Whatever is random comes from the `draw` of the step: then runs resume exactly, and processes agree.
    """

    best: ClassVar[str | None] = None  # the metric of `test` of which the highest is the best
    reads: ClassVar[tuple[str, ...]] = ()  # of `loss_scale`, `cond_dropout`, `loss_mask` and `prior`, what it goes by
    encoder: FolderText | None = None  # what turns captions into tensors, where plugins may look at it
    trains = False  # whether something of `encoder`, or in `beside`, trains too
    beside: Mapping[str, TrainedPart] = MappingProxyType({})  # models that train beside the module, by name
    part = ""  # the name of the module in a pipeline
    preserve: str | None = None  # a class that the model keeps as it was, with whole weights in each process
    untrained: Any = None  # the model as it was before the run, which `preserve` calls; several by name
    unreached = ""  # why no gradient may reach some of the layers, known after `setup`

    def setup(self, module: nn.Module, info: TaskInfo) -> None:
        """Get ready, once, with the rewritten module, before anything else.

        Args:
            module: The rewritten module.
            info: What is known of the data and the run.

        Raises:
            SpecError: Something does not fit.
        """

    def transform(self, train: bool) -> Callable[[Any, tuple[int, int]], Tensor] | None:
        """Give the function that makes a tensor of an image.

        Args:
            train: Whether it is for training, or for tests.

        Returns:
            A function from a PIL image and a size (height, width) to a tensor [c, h, w]; None is the loader's own, in [-1, 1].
        """
        return None

    @contextlib.contextmanager
    def prepared(self, data: Any, tests: Any, quiet: bool) -> Iterator[None]:
        """Do, inside the context, what lasts as long as the steps: before them, what they need not do each.

        Args:
            data: The loader of the training data.
            tests: That of the test data; None without.
            quiet: Whether nothing is printed.

        Yields:
            Nothing.
        """
        yield

    def check_batch(self, size: int) -> None:
        """Check, before the training, that a batch of so many samples can be trained on.

        Args:
            size: The number of samples.

        Raises:
            SpecError: It cannot.
        """

    def check_samples(self, module: nn.Module) -> bool:
        """Try what `samples` does, before the training, so that it fails there.

        Args:
            module: The rewritten module.

        Returns:
            Whether there are pictures.
        """
        return type(self).samples is not Task.samples

    def loss(self, module: nn.Module, batch: Batch, draw: Draws) -> Tensor | tuple[Tensor, Mapping[str, float | Tensor]]:
        """Compute the mean loss of a batch.

        Args:
            module: What to call, by keywords.
            batch: `image` float32 [b, c, h, w], and what else the data has, see `Task`.
            draw: What all random numbers of the step come from.

        Returns:
            A scalar in float32; or it, and numbers to be logged by name.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method 'loss(module, batch, draw)'")

    @property
    def caption_dropout(self) -> float:
        """Share of samples that are trained without their caption or label."""
        return 0.0

    def set_caption_dropout(self, share: float) -> None:
        """Set the share of samples without caption or label, for the steps that follow.

        Args:
            share: From 0 to 1.

        Raises:
            SpecError: The task has no such samples.
        """
        raise SpecError(f"conditional_dropout is for the task denoise; {type(self).__name__} drops no captions or labels")

    def parts(self) -> dict[str, Any]:
        """List what plugins may look at beside the module: `text_encoder`, `tokenizer`, `scheduler` (of noise), `vae`."""
        return {}

    def test(self, module: nn.Module, batches: Iterable[Batch]) -> Totals:
        """Sum each metric over the batches, with what it is a sum of; `compute_means` makes the metrics of it.

        The module is in evaluation and no gradients are kept. Several processes see a part of the test data each and add their
        totals up.

        Args:
            module: What to call, by keywords.
            batches: The test data.

        Returns:
            By metric a sum, and the number that it is divided by; empty where the task has no test.
        """
        return {}

    def samples(self, module: nn.Module, draw: Draws) -> Tensor | None:
        """Draw pictures of what the module can do, with fixed seeds.

        Args:
            module: What to call, by keywords.
            draw: What all random numbers come from.

        Returns:
            Float32 [n, c, h, w] in [0, 1], of videos [n, f, c, h, w]; None for none.
        """
        return None

    def beside_samples(self) -> tuple[Tensor | None, list[str]]:
        """Return the images to compare samples with: pictures of the data in the same form, and the name of each sample."""
        return None, []


def compute_means(totals: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return the metrics: each total divided by its count."""
    return {name: float(total) / float(count) if count else float("nan") for name, (total, count) in totals.items()}


def make_task(spec: Any) -> Task:
    """Make a task from its name, an import path, or a mapping of either to its options. Raises SpecError."""
    if isinstance(spec, Task):
        return spec
    use = read_use(spec)
    if ":" not in use.name and use.name not in NAMES:
        hint = did_you_mean(use.name, NAMES) or f"; there are {', '.join(NAMES)}, or 'package.module:Class' for one of your own"
        raise SpecError(f"no task '{use.name}'{hint}", path=("train", "task"))
    kind = import_name(NAMES.get(use.name, use.name), ("train", "task"))
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        raise SpecError(f"'{use.name}' is not a subclass of fxplug.Task", path=("train", "task"))
    task: Task = construct(kind, use, ("train", "task"))
    return task


def join_values(first: Any, second: Any) -> Any:
    """Concatenate the values of two batches; a number, such as `runt_size`, is one of the whole batch."""
    if isinstance(second, Tensor):
        return torch.cat([first, second]) if second.dim() else second
    return [*first, *second] if isinstance(second, (list, tuple)) else second


def take_rows(values: Any, rows: list[int]) -> Any:
    """Return some rows of a batch, in order and possibly repeated."""
    if isinstance(values, Mapping):
        return {name: take_rows(value, rows) for name, value in values.items()}
    if isinstance(values, (list, tuple)) and not isinstance(values[0], str):  # of samples that hold lists
        return [take_rows(value, rows) for value in values]
    return values[rows] if isinstance(values, Tensor) else [values[row] for row in rows]
