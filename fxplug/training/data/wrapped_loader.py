"""Batches of what Python has: a Loader, a torch DataLoader, or a data set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler
from torchvision.transforms.v2.functional import pil_to_tensor

from ...core.capture.isolation import get_random_state, set_random_state
from ...core.errors import TrainError
from ..plugins import Plugins
from ..random_draws import mix, preserve_random_state, seed_all
from ..tasks.task import Task
from ..train_section import Data, Use
from .batch_order import Size
from .collation import collate_key
from .files import count_classes, name_classes
from .image_files import convert_image, rescale
from .loader import Loader
from .sample_reader import Transform
from .sources import add_keys, get_classes, get_labels, make_items

CHANNELS = (1, 3, 4)


def make_loader(
    data: Any, batch: int, *, seed: int = 0, rank: int = 0, world: int = 1, train: bool = True, hooks: Plugins | None = None
) -> Loader | WrappedDataLoader:
    """Return batches of Python data: a Loader as it is, a torch DataLoader in a `WrappedDataLoader`, a map-style data set in a
    Loader that keeps the size of its images. Raises SpecError or TrainError for anything else.
    """
    if isinstance(data, (Loader, WrappedDataLoader)):
        return data
    if isinstance(data, DataLoader):
        return WrappedDataLoader(data, seed=seed, rank=rank, world=world, train=train, hooks=hooks)
    spec = Data(call=Use(type(data).__name__, {}))
    items = make_items(data, spec, "the data")
    return Loader(items, spec, batch, seed=seed, rank=rank, world=world, train=train, hooks=hooks)


class WrappedDataLoader:
    """The batches of a DataLoader, with the face of a Loader.

    A batch is a mapping or a pair (images, labels) or (images, captions) and becomes a dict as the Loader's. Images are read as
    those of a data set: float tensors are ready and stay as they are; uint8 tensors [b, c, h, w], [b, h, w] or as numpy arrays
    are collated [b, h, w, c], and lists of what a sample may have, are transformed as the task says, else they get values in
    [-1, 1] (grey ones keep their one channel then). Labels become int64; `name` says which batch it was. Sizes and unreadable
    images are the DataLoader's affair. What it draws comes from (seed, epoch), as long as its sampler draws from the
    DataLoader's generator or the global one; a resumed epoch makes the batches before `start` once more and drops them.

    Raises TrainError for a DataLoader without a length, one whose samples plugins ought to change, and, where there are several
    processes, one whose sampler does not share the samples among them.
    """

    size: Size | None = None
    root: str | None = None
    grouped = False

    @property
    def described(self) -> list[Any]:
        """Plain values that identify how it makes batches."""
        return [self.steps, self.loader.batch_size, type(self.sampler).__name__, self.loader.drop_last]

    def samples_of_a_batch(self, world: int) -> int | None:
        """Return None: a DataLoader's batch size is its own."""
        return None

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        train: bool = True,
        hooks: Plugins | None = None,
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
        self.rank, self.skipped = rank, dict[str, str]()
        names = get_classes(loader.dataset)
        labels = get_labels(loader.dataset) if names is None else None
        self.classes, self.class_count = name_classes(names, labels), count_classes(names, labels)
        self.transform: Transform | None = None
        self._start = None if loader.generator is None else loader.generator.initial_seed()

    def first(self, count: int) -> dict[str, Any]:
        """Return the first `count` samples of the data set as a batch, without a transform; of one without indices, the first
        of its first batch."""
        batch = self._first(count, None) or next(iter(self.epoch(0)))
        return {key: value[:count] if isinstance(value, (Tensor, list)) else value for key, value in batch.items()}

    def peek(self) -> dict[str, Any] | None:
        """Return a batch of the first samples, of the usual size. None for data without indices, which is read once."""
        return self._first(None, self.transform)

    def _first(self, count: int | None, transform: Transform | None) -> dict[str, Any] | None:
        dataset: Any = self.loader.dataset
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or self.loader.batch_sampler is None:
            return None
        with preserve_random_state():
            seed_all(self.seed)
            samples = [dataset[i] for i in range(min(count or self.loader.batch_size or 1, len(dataset)))]
            return self._batch(self.loader.collate_fn(samples), 0, 0, transform)

    def epoch(self, number: int, start: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the batches of epoch `number` from the `start`-th on. Raises TrainError where training gets fewer."""
        if isinstance(self.sampler, DistributedSampler):
            self.sampler.set_epoch(number)
        with preserve_random_state():
            seed_all(mix(self.seed, number))
            if self.loader.generator is not None and self._start is not None:
                self.loader.generator.manual_seed(mix(self._start, self.seed, number))
            batches, states = iter(self.loader), get_random_state()
        for index in range(self.steps):
            with preserve_random_state():
                set_random_state(states)
                batch = next(batches, None)
                states = get_random_state()
            if batch is None:
                if self.train:
                    found = f"the length of the DataLoader is {self.steps} batches, and it ended after {index}"
                    raise TrainError(f"{found}: the length of its data set, or of its sampler, is wrong")
                return
            if index >= start:
                yield self._batch(batch, number, index, self.transform)

    def notes(self, task: Task) -> list[str]:
        """Return no notes: what the sampler leaves out is not known."""
        return []

    def close(self) -> None:
        """Do nothing: the workers belong to the DataLoader."""

    def _batch(self, batch: Any, epoch: int, index: int, transform: Transform | None) -> dict[str, Any]:
        found = add_keys(batch, f"batch {index}")
        for key in ("image", "condition"):
            if key in found:
                with preserve_random_state():
                    seed = mix(self.seed, epoch, index, self.rank)
                    found[key] = _images(key, found[key], f"batch {index}", transform if key == "image" else None, seed)
        if isinstance(found.get("label"), Tensor) and not found["label"].is_floating_point():
            found["label"] = found["label"].long()
            self._check_labels(found["label"], index)
        if isinstance(found.get("caption"), tuple):
            found["caption"] = list(found["caption"])
        length = next((len(value) for value in found.values() if isinstance(value, (Tensor, list))), 0)
        found.setdefault("name", [f"batch {index}[{row}]" for row in range(length)])
        return found

    def _check_labels(self, label: Tensor, index: int) -> None:
        """Raise TrainError for a label that is none of the data set's classes, where these are known."""
        if self.class_count is None or label.dim() != 1:
            return
        wrong = ((label < 0) | (label >= self.class_count)).nonzero().flatten().tolist()
        if wrong:
            found = f"batch {index}[{wrong[0]}] has the label {int(label[wrong[0]])}"
            raise TrainError(f"{found}, and its data set has {self.class_count} classes, 0 to {self.class_count - 1}")


def _images(key: str, given: Any, name: str, transform: Transform | None, seed: int) -> Any:
    """Convert the images of a batch as a Loader converts those of a data set, each with its own random numbers."""
    if isinstance(given, np.ndarray):
        given = torch.from_numpy(given)
        given = given.movedim(-1, 1) if given.dim() == 4 and given.dtype != torch.uint8 else given
    if isinstance(given, Tensor):
        if given.dtype != torch.uint8 or given.dim() not in (3, 4):
            return given
        given = given[:, None] if given.dim() == 3 else given
        if given.shape[1] not in CHANNELS and given.shape[3] in CHANNELS:
            given = given.movedim(3, 1)  # numpy arrays, as torch collates them
        if transform is None and given.shape[1] != 4:
            return rescale(key, given)
    elif not isinstance(given, (list, tuple)):
        return given
    samples, made = [{"name": f"{name}[{row}]"} for row in range(len(given))], []
    for row, (image, sample) in enumerate(zip(given, samples, strict=True)):
        seed_all(mix(seed, row))
        read = convert_image(image, sample["name"])
        if isinstance(read, Image.Image):
            read = pil_to_tensor(read) if transform is None else transform(read, (read.height, read.width))
        made.append(read)
    return collate_key(key, made, samples)
