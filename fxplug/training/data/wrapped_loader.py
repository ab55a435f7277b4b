"""Batches of what Python has: a Loader, a torch DataLoader, or a data set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from ...core.capture.isolation import random_state, set_random_state
from ...core.errors import TrainError
from ...core.spec.train_section import Data, Use
from ..plugins import Plugins
from ..random_draws import mixed, preserve_random_state, seed_all
from ..tasks.task import Task
from .batch_order import Size
from .collation import rescaled
from .loader import Loader, Transform
from .sources import classes_of, items_of, keyed


def loader_of(
    data: Any, batch: int, *, seed: int = 0, rank: int = 0, world: int = 1, train: bool = True, hooks: Plugins | None = None
) -> Loader | WrappedDataLoader:
    """Batches of what Python has: a Loader is taken as it is, a torch DataLoader too (see `Given`), a map-style data set gets a
    Loader that leaves the size of its images alone. Raises SpecError or TrainError for anything else.
    """
    if isinstance(data, (Loader, WrappedDataLoader)):
        return data
    if isinstance(data, DataLoader):
        return WrappedDataLoader(data, seed=seed, world=world, train=train, hooks=hooks)
    spec = Data(call=Use(type(data).__name__, {}))
    items = items_of(data, spec, "the data")
    return Loader(items, spec, batch, seed=seed, rank=rank, world=world, train=train, hooks=hooks)


class WrappedDataLoader:
    """The batches of a DataLoader, with the face of a Loader.

    A batch is a mapping or a pair (images, labels) or (images, captions) and becomes a dict as the Loader's: uint8 images get
    values in [-1, 1], float images stay as they are, labels become int64; `name` says which batch it was. Sizes, transforms and
    unreadable images are the DataLoader's affair. What it draws comes from (seed, epoch), as long as its sampler draws from the
    DataLoader's generator or the global one; a resumed epoch makes the batches before `start` once more and drops them.

    Raises TrainError for a DataLoader without a length, one whose samples plugins ought to change, and, where there are several
    processes, one whose sampler does not share the samples among them.
    """

    size: Size | None = None
    root: str | None = None
    grouped = False

    @property
    def described(self) -> list[Any]:
        """How it makes batches, in plain values."""
        return [self.steps, self.loader.batch_size, type(self.sampler).__name__, self.loader.drop_last]

    def samples_of_a_batch(self, world: int) -> int | None:
        """None: its batches are its own affair."""
        return None

    def __init__(
        self, loader: DataLoader[Any], *, seed: int = 0, world: int = 1, train: bool = True, hooks: Plugins | None = None
    ) -> None:
        try:
            self.steps = len(loader)
        except TypeError:
            raise TrainError(
                "the DataLoader has no length, which is needed for the length of an epoch: give it a map-style data set"
            ) from None
        if not self.steps:
            raise TrainError("the DataLoader has no batches")
        sampler = getattr(loader, "sampler", None)
        if world > 1 and not isinstance(sampler, DistributedSampler):
            finding = f"{world} processes would train on the same batches: give the DataLoader a DistributedSampler"
            raise TrainError(f"{finding}, or pass its data set instead")
        if found := [hook for hook in ("transform_caption", "transform_pil_image") if hooks is not None and hooks.has(hook)]:
            raise TrainError(f"a plugin's {found[0]} has no effect inside a DataLoader: pass its data set instead")
        self.loader, self.items, self.seed, self.train, self.sampler = loader, loader.dataset, seed, train, sampler
        self.classes, self.skipped = classes_of(loader.dataset), dict[str, str]()
        self.transform: Transform | None = None
        self._start = None if loader.generator is None else loader.generator.initial_seed()

    def first(self, count: int) -> dict[str, Any]:
        """The first `count` samples of the data set as a batch; of one without numbers, the first of its first batch."""
        batch = self.peek(count) or next(iter(self.epoch(0)))
        return {key: value[:count] if isinstance(value, (Tensor, list)) else value for key, value in batch.items()}

    def peek(self, count: int | None = None) -> dict[str, Any] | None:
        """A batch of the first samples, as many as in a batch. None for data without numbers, which is read once."""
        dataset: Any = self.loader.dataset
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or self.loader.batch_sampler is None:
            return None
        with preserve_random_state():
            seed_all(self.seed)
            samples = [dataset[i] for i in range(min(count or self.loader.batch_size or 1, len(dataset)))]
            return self._batch(self.loader.collate_fn(samples), 0)

    def epoch(self, number: int, start: int = 0) -> Iterator[dict[str, Any]]:
        """The batches of epoch `number` from the `start`-th on. Raises TrainError where training gets fewer."""
        if isinstance(self.sampler, DistributedSampler):
            self.sampler.set_epoch(number)
        with preserve_random_state():
            seed_all(mixed(self.seed, number))
            if self.loader.generator is not None and self._start is not None:
                self.loader.generator.manual_seed(mixed(self._start, self.seed, number))
            batches, states = iter(self.loader), random_state()
        for index in range(self.steps):
            with preserve_random_state():
                set_random_state(states)
                batch = next(batches, None)
                states = random_state()
            if batch is None:
                if self.train:
                    found = f"the length of the DataLoader is {self.steps} batches, and it ended after {index}"
                    raise TrainError(f"{found}: the length of its data set, or of its sampler, is wrong")
                return
            if index >= start:
                yield self._batch(batch, index)

    def notes(self, task: Task) -> list[str]:
        """Nothing is known of what its sampler leaves out."""
        return []

    def close(self) -> None:
        """Nothing: its workers are the DataLoader's."""

    def _batch(self, batch: Any, index: int) -> dict[str, Any]:
        found = keyed(batch, f"batch {index}")
        for key in ("image", "condition"):
            if isinstance(found.get(key), Tensor):
                found[key] = rescaled(key, found[key])
        if isinstance(found.get("label"), Tensor) and not found["label"].is_floating_point():
            found["label"] = found["label"].long()
        if isinstance(found.get("caption"), tuple):
            found["caption"] = list(found["caption"])
        length = next((len(value) for value in found.values() if isinstance(value, (Tensor, list))), 0)
        found.setdefault("name", [f"batch {index}[{row}]" for row in range(length)])
        return found
