"""Batches of an epoch, in an order that several processes and a resumed run agree on; or those of a torch DataLoader."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from ...core.errors import SpecError, TrainError
from ...core.spec.train_section import Data, Use
from ..plugins import Plugins
from ..random_draws import mixed, random_state, random_state_kept, seed_all, set_random_state
from ..tasks.task import Task
from .batch_order import Order, Request, assign, bucket_sizes
from .fetching import Fetch, Fetched, Size, Transform, rescaled, too_many
from .files import Items
from .image_files import Unreadable
from .sources import classes_of, keyed, own_items


class Loader:
    """The batches of `items` for one process of `world`.

    A batch is a dict: `image` float32 [b, c, h, w], `caption` list of str, `label` int64 [b], `condition` float32 [b, c, h, w],
    `index` int64 [b], `name` list of str, and what else the items hold. What `Order` and `Fetch` say decides them: seed, epoch
    and index alone, so neither the number of workers or processes, nor a resumed epoch, nor random numbers drawn elsewhere.

    transform: (PIL image, (h, w)) -> tensor [c, h, w]. None: crop to the shape of the size, resize, flip as `spec` says,
        values in [-1, 1]; a transform does all that itself, but where there are condition images it gets the image cropped
        and flipped already.
    hooks: changes captions and PIL images before anything else does.

    `size` is (h, w), or None where images stay as they are; `classes` are the names of the labels, `root` is the data's folder.
    `skipped` has the unreadable images with the reason; more than `spec.max_corrupt` in this process, since it
    started, are a TrainError: each process, and each resume, counts from none. `buckets` has the
    number of images of each size, `left_out` how many samples an epoch goes without. Raises TrainError for a batch larger
    than the data, SpecError for buckets that cannot be.
    """

    def __init__(
        self,
        items: Items,
        spec: Data,
        batch: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        train: bool = True,
        transform: Transform | None = None,
        hooks: Plugins | None = None,
    ) -> None:
        self.items, self.spec, self.skipped = items, spec, dict[str, str]()
        size = (spec.size, spec.size) if isinstance(spec.size, int) else spec.size
        groups: list[Sequence[int]] = [range(len(items))]
        sizes: list[Size | None] = [size]
        if spec.buckets is not None:
            grouped = self._bucketed(size, batch * world if train else 1)
            groups, sizes = list(grouped.values()), list(grouped)
        order: dict[str, Any] = {"seed": seed, "rank": rank, "world": world, "train": train, "shuffle": spec.shuffle and train}
        self.order = Order(groups, batch, **order, repeats=items.repeats if train else None)
        counts = list(map(self.order.count, groups))
        total = self.total = sum(counts)
        self.steps = len(self.order)
        self.buckets = {bucket: count for bucket, count in zip(sizes, counts, strict=True) if bucket is not None}
        self.left_out = sum(count % (batch * world) for count in counts) if train else 0
        if not self.steps and train:
            batches = f"a batch of {batch}" + (f" in each of {world} processes" if world > 1 else "")
            raise TrainError(f"{batches} is larger than the data: {total} samples")
        self.size: Size | None = size
        self.classes, self.root = items.classes, items.root
        self._fetch = Fetch(items, spec, groups, sizes, seed=seed, train=train, transform=transform, hooks=hooks)
        self._plain = Fetch(items, spec, groups, sizes, seed=seed, train=False, transform=None, hooks=None)
        self._requests = list[Request]()
        self._pool: DataLoader[Any] | None = None

    @property
    def transform(self) -> Transform | None:
        """What makes a tensor of an image; may be set between epochs."""
        return self._fetch.transform

    @transform.setter
    def transform(self, transform: Transform | None) -> None:
        self._fetch.transform = transform
        self.close()

    def first(self, count: int) -> dict[str, Any]:
        """The first `count` readable samples (of the fullest bucket) as a batch, without shuffling, plugins and transform.

        Those that cannot be read are counted as in an epoch. Raises TrainError where none can.
        """
        number = max(range(len(self._plain.groups)), key=lambda n: len(self._plain.groups[n]))
        group = self._plain.groups[number]
        fetched = self._plain(Request(0, number, group), enough=count)
        self._count(fetched.skipped)
        if fetched.error is not None:
            raise fetched.error
        if fetched.batch is None and count:
            raise TrainError(f"no image of {len(group)} can be read: {too_many(fetched.skipped)}")
        return fetched.batch or {}

    def peek(self) -> dict[str, Any] | None:
        """The first batch of the training, but for what plugins change in it; nothing is counted. None where there is none."""
        fetch = copy.copy(self._fetch)
        fetch.hooks, fetch._hooked = None, set()
        request = next(iter(self.order.requests(0)), None)
        return None if request is None else fetch(request).batch

    def epoch(self, number: int, start: int = 0) -> Iterator[dict[str, Any]]:
        """The batches of epoch `number` from the `start`-th on. Raises TrainError for data that cannot be used."""
        requests = self.order.requests(number)[start:]
        for fetched in self._pooled(requests) if self.spec.workers else map(self._fetch, requests):
            self._count(fetched.skipped)
            if (error := fetched.error) is not None:
                try:
                    raise error
                finally:  # or the error's traceback, this frame and the error are a cycle that keeps the workers alive
                    del fetched, error
            if fetched.batch is not None:
                yield fetched.batch

    def notes(self, task: Task) -> list[str]:
        """What is to be said about the data before the training: what of them it goes without."""
        notes = list(self.items.notes)
        keys = {key for value in self.items.values for key in value}
        for key in ("loss_scale", "cond_dropout"):
            if key in keys and key not in task.reads:
                notes.append(f"'{key}' of images is not gone by: {type(task).__name__} has no use for it")
        if "flip_p" in keys and self.transform is not None:
            notes.append("'flip_p' of images is not gone by: the task mirrors them by itself")
        if self.left_out:
            finding = f"{self.left_out} of {self.total} samples are left out of each epoch, others in each"
            notes.append(f"{finding}: they fill no batch")
        return notes

    def close(self) -> None:
        """End the workers; a later epoch starts new ones."""
        self._pool = None

    def _pooled(self, requests: list[Request]) -> Iterator[Fetched]:
        self._requests[:] = requests
        if self._pool is None:
            self._pool = DataLoader(
                self._fetch,
                batch_size=None,
                sampler=self._requests,
                collate_fn=_same,
                num_workers=self.spec.workers,
                persistent_workers=True,
                generator=torch.Generator(),  # or it would draw from the global one
            )
        return iter(self._pool)

    def _count(self, skipped: dict[str, str]) -> None:
        self.skipped.update(skipped)
        if len(self.skipped) > self.spec.max_corrupt:
            found = f"{len(self.skipped)} images cannot be read, 'max_corrupt' is {self.spec.max_corrupt}"
            raise TrainError(f"{found}: {too_many(self.skipped)}")

    def _bucketed(self, size: Size | None, fill: int) -> dict[Size, Sequence[int]]:
        """The samples of each bucket; those without a readable header are skipped here already, so in every process."""
        images = self.items.sizes
        if size is None or images is None or self.spec.buckets is None:
            missing = "the size of each image; give the data set 'sizes' [(h, w), ...]"
            missing = "a 'size', whose area they have" if size is None else missing
            raise SpecError(f"buckets need {missing}", path=("data", "buckets"))
        for i, image in enumerate(images):
            if not all(image):
                self._count(_reason(self.items, i))
        known = [i for i, image in enumerate(images) if all(image)]
        chosen = assign([images[i] for i in known], bucket_sizes(size, self.spec.buckets), fill)
        groups: dict[Size, list[int]] = {}
        for i, bucket in zip(known, chosen, strict=True):
            groups.setdefault(bucket, []).append(i)
        return dict(sorted(groups.items()))


def loader_of(
    data: Any, batch: int, *, seed: int = 0, rank: int = 0, world: int = 1, train: bool = True, hooks: Plugins | None = None
) -> Loader | Given:
    """Batches of what Python has: a Loader is taken as it is, a torch DataLoader too (see `Given`), a map-style data set gets a
    Loader that leaves the size of its images alone. Raises SpecError or TrainError for anything else.
    """
    if isinstance(data, (Loader, Given)):
        return data
    if isinstance(data, DataLoader):
        return Given(data, seed=seed, world=world, train=train, hooks=hooks)
    spec = Data(call=Use(type(data).__name__, {}))
    items = own_items(data, spec, "the data")
    return Loader(items, spec, batch, seed=seed, rank=rank, world=world, train=train, hooks=hooks)


def _same(fetched: Any) -> Any:
    return fetched


def _reason(items: Items, i: int) -> dict[str, str]:
    try:
        items[i]
    except Unreadable as error:
        return {error.name: error.why}
    return {f"image {i}": "its header does not tell its size"}


class Given:
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

    def __init__(
        self, loader: DataLoader[Any], *, seed: int = 0, world: int = 1, train: bool = True, hooks: Plugins | None = None
    ) -> None:
        try:
            self.steps = len(loader)
        except TypeError:
            raise TrainError("the DataLoader has no length: the length of an epoch must be known") from None
        if not self.steps:
            raise TrainError("the DataLoader has no batches")
        sampler = getattr(loader, "sampler", None)
        if world > 1 and not isinstance(sampler, DistributedSampler):
            finding = f"{world} processes would train on the same batches: give the DataLoader a DistributedSampler"
            raise TrainError(f"{finding}, or give its data set instead")
        for hook in ("transform_caption", "transform_pil_image"):
            if hooks is not None and hooks.has(hook):
                raise TrainError(f"a plugin's {hook} cannot reach into a DataLoader: give its data set instead")
        self.loader, self.items, self.seed, self.train, self.sampler = loader, loader.dataset, seed, train, sampler
        self.classes, self.skipped = classes_of(loader.dataset), dict[str, str]()
        self.transform: Transform | None = None
        self._start = None if loader.generator is None else loader.generator.initial_seed()

    def first(self, count: int) -> dict[str, Any]:
        """The first `count` samples of the data set as a batch; of one without numbers, the first of its first batch."""
        dataset: Any = self.loader.dataset
        if self._numbered():
            with random_state_kept():
                seed_all(self.seed)
                samples = [dataset[i] for i in range(min(count, len(dataset)))]
                return self._batch(self.loader.collate_fn(samples), 0)
        batch = next(iter(self.epoch(0)))
        return {key: value[:count] if isinstance(value, (Tensor, list)) else value for key, value in batch.items()}

    def peek(self) -> dict[str, Any] | None:
        """A batch of the first samples, as many as in a batch. None for data without numbers, which is read once."""
        return self.first(self.loader.batch_size or 1) if self._numbered() else None

    def _numbered(self) -> bool:
        iterable = isinstance(self.loader.dataset, IterableDataset)
        return hasattr(self.loader.dataset, "__getitem__") and not iterable and self.loader.batch_sampler is not None

    def epoch(self, number: int, start: int = 0) -> Iterator[dict[str, Any]]:
        """The batches of epoch `number` from the `start`-th on. Raises TrainError where training gets fewer."""
        if isinstance(self.sampler, DistributedSampler):
            self.sampler.set_epoch(number)
        with random_state_kept():
            seed_all(mixed(self.seed, number))
            if self.loader.generator is not None and self._start is not None:
                self.loader.generator.manual_seed(mixed(self._start, self.seed, number))
            batches, states = iter(self.loader), random_state()
        for index in range(self.steps):
            with random_state_kept():
                set_random_state(states)
                batch = next(batches, None)
                states = random_state()
            if batch is None:
                if self.train:
                    found = f"the DataLoader says that it has {self.steps} batches and ended after {index}"
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
