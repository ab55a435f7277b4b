"""Batches of an epoch, in an order that several processes and a resumed run agree on."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from ...core.errors import FxplugError, SpecError, TrainError
from ..import_paths import import_function
from ..plugins import Plugins
from ..random_draws import mix, preserve_random_state, seed_all
from ..tasks.task import Task
from ..train_section import Data
from .batch_order import BatchRequest, Order, Size, assign, list_bucket_sizes
from .collation import collate, pair_with_prior
from .files import Items, name_classes
from .image_files import COMPOSED, Unreadable
from .sample_reader import SampleReader, SkipDecoding, Transform
from .unreadable import collect_reports, report_to_first

NAMED = 20  # unreadable images in a message


class Fetched(NamedTuple):
    """A batch, the images it had to go without, the error that ends the run, and an image that had transparent pixels."""

    batch: dict[str, Any] | None
    skipped: dict[str, str]
    error: FxplugError | None = None
    composed: str = ""


class Loader(Dataset[Any]):
    """The batches of `items` for one process of `world`.

    A batch is a dict: `image` float32 [b, c, h, w], `caption` list of str, `label` int64 [b], `condition` float32 [b, c, h, w],
    `loss_mask` float32 [b, 1, h, w] in [0, 1], `video` float32 [b, c, f, h, w], `index` int64 [b], `name` list of str, and what
    else the items hold. Where images are files that the loader itself crops, it has `original_size` int64 [b, 2], height and
    width of the upright picture in the file, and `crop` int64 [b, 2], top and left of the crop in the resized picture
    (`find_crop_origin`); with flips, `flipped` bool [b].

    Seed, epoch, index and, where an epoch has it several times, the number of the time alone decide them (see `Order`): neither
    the number of workers or processes, nor a resumed epoch, nor random numbers drawn elsewhere.

    transform: (PIL image, (h, w)) -> tensor [c, h, w]. None: crop to the shape of the size, resize, flip as `spec` says,
        values in [-1, 1]; a transform does all that itself, but where there are condition images it gets the image cropped
        and flipped already.
    prior: prior images, in batches of one. When training, each sample of a batch is followed by one of them, all of which come
        in turn; `prior` bool [b] says which they are, and `loss_scale` has their weight.
    hooks: changes captions and PIL images before anything else does.
    skip_decoding: (item) -> whether its images need no pixels. Where it is set, `image` and `condition` of a batch are lists of
        `PlacedImage`, of which those have pixels that are not skipped, and `content` is the digests of the image files. Only
        where `has_files`.

    When training, the place of an unreadable image is taken by the next sample of its group, in the order of the data; in tests
    the batch is smaller. Picklable when items, transform and hooks are.

    `size` is (h, w), or None where images stay as they are; `sizes` are those of all batches, one for each bucket. `classes`
    are the names of the labels (of numbers, those from 0 to the largest), `root` is the data's folder. `skipped` has the
    unreadable images with the reason; more than `spec.max_corrupt` in this process, since it started, are a TrainError: each
    process, and each resume, counts from none. `buckets` has the number of images of each size, `left_out` how many samples an
    epoch goes without. Raises TrainError for a batch larger than the data, SpecError for buckets that cannot be.
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
        prior: Loader | None = None,
    ) -> None:
        self.prior = prior if train else None
        self.items, self.spec, self.seed, self.train = items, spec, seed, train
        self._skipped = dict[str, str]()
        self.size: Size | None = (spec.size, spec.size) if isinstance(spec.size, int) else spec.size
        self.classes, self.root = name_classes(items.classes, items.labels), items.root
        self.groups: list[Sequence[int]] = [range(len(items))]
        self.sizes: list[Size | None] = [self.size]
        if spec.buckets is not None:
            grouped = self._bucketed(self.size, batch * world if train else 1)
            self.groups, self.sizes = list(grouped.values()), list(grouped)
        order: dict[str, Any] = {"seed": seed, "rank": rank, "world": world, "train": train, "shuffle": spec.shuffle and train}
        self.order = Order(self.groups, batch, **order, repeats=items.repeats if train else None)
        counts = list(map(self.order.count, self.groups))
        self.total, self.steps = sum(counts), len(self.order)
        self.buckets = {bucket: count for bucket, count in zip(self.sizes, counts, strict=True) if bucket is not None}
        self.left_out = sum(count % (batch * world) for count in counts) if train else 0
        if not self.steps and train:
            batches = f"a batch of {batch}" + (f" in each of {world} processes" if world > 1 else "")
            raise TrainError(f"{batches} is larger than the data: {self.total} samples")
        named = spec.conditions is not None and ":" in spec.conditions.name
        condition = import_function(spec.conditions, ("data", "conditions")) if named and spec.conditions else None
        self.reader = SampleReader(items, spec, train, hooks, transform, condition)
        self.turn: tuple[int, list[BatchRequest]] | None = None  # the requests of the epoch that was asked for last
        self._requests, self._composed = list[BatchRequest](), False
        self._pool: DataLoader[Any] | None = None

    @property
    def skipped(self) -> dict[str, str]:
        """Images that could not be read, with the reason; in the first process those of the others too."""
        return {**collect_reports(self._set), **self._skipped}

    @property
    def _set(self) -> str:
        return "training" if self.train else "test"

    @property
    def transform(self) -> Transform | None:
        """Transform from an image to a tensor; may be set between epochs."""
        return self.reader.transform

    @transform.setter
    def transform(self, transform: Transform | None) -> None:
        self.reader = replace(self.reader, transform=transform)
        self.close()

    @property
    def has_files(self) -> bool:
        """Return whether all that a sample's pixels depend on are its files and the settings, so that these can be cached."""
        return self.reader.has_files

    @property
    def skip_decoding(self) -> SkipDecoding | None:
        """Function that says whether an item needs no pixels; may be set between epochs."""
        return self.reader.skip_decoding

    @skip_decoding.setter
    def skip_decoding(self, skip: SkipDecoding | None) -> None:
        self.reader = replace(self.reader, skip_decoding=skip)
        self.close()

    @property
    def grouped(self) -> bool:
        """Return whether samples come in groups, such as buckets, of which each batch has one."""
        return len(self.groups) > 1

    def samples_of_a_batch(self, world: int) -> int | None:
        """Return the number of samples of a batch over all processes."""
        return self.order.batch * world

    def close(self) -> None:
        """Shut down the workers; a later epoch starts new ones."""
        self._pool = None

    def first(self, count: int) -> dict[str, Any]:
        """Return the first `count` readable samples (of the fullest bucket) as a batch, without shuffling, plugins and
        transform.

        Unreadable samples are counted as in an epoch. Raises TrainError if none can be read.
        """
        number = max(range(len(self.groups)), key=lambda n: len(self.groups[n]))
        group = self.groups[number]
        reader = replace(self.reader, train=False, transform=None, hooks=None, skip_decoding=None)
        plain = self._copy(train=False, reader=reader)
        fetched = plain.fetch(BatchRequest(0, number, group), count)
        self._count(fetched.skipped)
        if fetched.error is not None:
            raise fetched.error
        if fetched.batch is None and count:
            raise TrainError(f"no image of {len(group)} can be read: {list_skipped(fetched.skipped)}")
        return fetched.batch or {}

    def peek(self) -> dict[str, Any] | None:
        """Return the first batch of the training, before plugins, without counting skipped images; None if there is none."""
        request = next(iter(self.order.requests(0)), None)
        return None if request is None else self._copy(reader=replace(self.reader, hooks=None)).fetch(request).batch

    def in_order(self) -> Loader:
        """Return a loader of the same samples of this process, one in a batch, each once and in order. It counts unreadable
        images as this one's."""
        old = self.order
        order = Order(self.groups, 1, seed=self.seed, rank=old.rank, world=old.world, train=False, shuffle=False)
        return self._copy(order=order, steps=len(order))

    def epoch(self, number: int, start: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the batches of epoch `number` from the `start`-th on. Raises TrainError for data that cannot be used."""
        self._requests[:] = self.order.requests(number)[start:]
        if self.spec.workers and self._pool is None:
            self._pool = DataLoader(
                self._copy(),  # this one would be in a cycle, which keeps the workers alive
                batch_size=None,
                sampler=self._requests,
                collate_fn=_are_equal,
                num_workers=self.spec.workers,
                persistent_workers=True,
                generator=torch.Generator(),  # or it would draw from the global one
            )
        for fetched in self._pool or map(self.fetch, list(self._requests)):
            self._count(fetched.skipped)
            self._note_composed(fetched.composed)
            if (error := fetched.error) is not None:
                try:
                    raise error
                finally:  # or the error's traceback, this frame and the error are a cycle that keeps the workers alive
                    del fetched, error
            if fetched.batch is not None:
                yield fetched.batch

    def notes(self, task: Task) -> list[str]:
        """Return notes about the data before the training: values that are ignored and samples that are left out."""
        notes = [*self.items.notes, *(self.prior.items.notes if self.prior is not None else [])]
        keys = {key for value in self.items.values for key in value}
        for key in ("loss_scale", "cond_dropout"):
            if key in keys and key not in task.reads:
                notes.append(f"'{key}' of images is ignored: {type(task).__name__} does not use it")
        if "flip_p" in keys and self.transform is not None:
            notes.append("'flip_p' of images is ignored: the task flips them itself")
        if self.left_out:
            which = "different ones each time" if self.order.shuffle else "with which the next epoch begins"
            finding = f"{self.left_out} of {self.total} samples are left out of each epoch, {which}"
            notes.append(f"{finding}, because they do not fill a batch")
        return notes

    def _note_composed(self, name: str) -> None:
        """Warn, once, of an image that had transparent pixels."""
        if name and not self._composed:
            self._composed = True
            colour = "{:02x}{:02x}{:02x}".format(*self.spec.background)
            finding = f"'{name}' has transparent pixels: they and those of others are composed on the colour #{colour}"
            warnings.warn(f"{finding}; 'background' in the section 'data' sets another", stacklevel=3)

    # --- what runs in the workers, or in the training process when there are none

    def _copy(self, **changed: Any) -> Loader:
        made = copy.copy(self)
        vars(made).update(changed, _pool=None, _requests=[])
        return made

    def __getitem__(self, request: BatchRequest) -> Fetched:
        return self.fetch(request)

    def fetch(self, request: BatchRequest, enough: int | None = None) -> Fetched:
        """Return the batch of a request; with `enough`, stop after that many samples.

        Every sample starts from random numbers seeded with (seed, epoch, index), and further views of it in one epoch with
        their number too.
        """
        skipped: dict[str, str] = {}
        composed = ""
        with preserve_random_state():
            try:
                samples: list[dict[str, Any]] = []
                for place, index in enumerate(request.indices):
                    if len(samples) == enough:
                        break
                    view = request.views[place] if request.views else 0
                    sample = self._readable(index, view, request, skipped)
                    if len(skipped) > self.spec.max_corrupt:  # the loader counts them, and stops
                        return Fetched(None, skipped)
                    if sample is not None:
                        composed = composed or sample.pop(COMPOSED, "")
                        sample.pop(COMPOSED, None)
                        samples.append(sample)
                        if self.prior is not None and self.train:
                            other = self._prior_of(self.prior, index, view, request, skipped)
                            if other is None:
                                return Fetched(None, skipped)
                            composed = composed or other.pop(COMPOSED, "")
                            other.pop(COMPOSED, None)
                            pair_with_prior(sample, other, self.spec.prior_weight)
                            samples.append(other)
                return Fetched(collate(samples) if samples else None, skipped, composed=composed)
            except FxplugError as error:
                return Fetched(None, skipped, error)

    def _readable(self, index: int, view: int, request: BatchRequest, skipped: dict[str, str]) -> dict[str, Any] | None:
        members = self.groups[request.group]
        for candidate in self._from(index, members) if self.train else (index,):
            # what stands in for another sample is a further view, too
            further = (view, index) if candidate != index else (view,) if view else ()
            seed_all(mix(self.seed, request.epoch, candidate, *further))
            try:
                return self.reader.read(candidate, self.sizes[request.group], request.epoch)
            except Unreadable as error:
                skipped[error.name] = error.why
                if len(skipped) > self.spec.max_corrupt:
                    return None
        if self.train:
            raise TrainError(f"no image of a group of {len(members)} can be read: {list_skipped(skipped)}")
        return None

    def _prior_of(
        self, prior: Loader, index: int, view: int, request: BatchRequest, skipped: dict[str, str]
    ) -> dict[str, Any] | None:
        """Return the prior image that goes with a sample, in its size: however the samples are divided, the same one."""
        views = math.ceil(max(self.items.repeats)) if self.items.repeats is not None else 1
        turn, place = divmod(index + len(self.items) * (request.epoch * views + view), len(prior.order))
        if prior.turn is None or prior.turn[0] != turn:
            prior.turn = (turn, prior.order.requests(turn))
        chosen = prior.turn[1][place]
        sized = prior._copy(sizes=[self.sizes[request.group]])
        return sized._readable(chosen.indices[0], chosen.views[0] if chosen.views else 0, chosen, skipped)

    @staticmethod
    def _from(index: int, members: Sequence[int]) -> Iterator[int]:
        yield index
        at = members.index(index)  # looked for only where a sample cannot be read
        yield from (*members[at + 1 :], *members[:at])

    # --- groups, and what cannot be read

    def _count(self, skipped: dict[str, str]) -> None:
        report_to_first(self._set, {name: why for name, why in skipped.items() if name not in self._skipped})
        self._skipped.update(skipped)
        if len(self._skipped) > self.spec.max_corrupt:
            found = f"{len(self._skipped)} images cannot be read, and 'max_corrupt' is {self.spec.max_corrupt}"
            raise TrainError(f"{found}: {list_skipped(self._skipped)}")

    def _bucketed(self, size: Size | None, fill: int) -> dict[Size, Sequence[int]]:
        """Return the samples of each bucket; those without a readable header are skipped here already, so in every process."""
        images = self.items.sizes
        if size is None or images is None or self.spec.buckets is None:
            missing = "the size of each image; give the data set 'sizes' [(h, w), ...]"
            missing = "a 'size', which sets their area" if size is None else missing
            raise SpecError(f"buckets need {missing}", path=("data", "buckets"))
        for i, image in enumerate(images):
            if not all(image):
                self._count(self._reason(i))
        known = [i for i, image in enumerate(images) if all(image)]
        chosen = assign([images[i] for i in known], list_bucket_sizes(size, self.spec.buckets), fill)
        groups: dict[Size, list[int]] = {}
        for i, bucket in zip(known, chosen, strict=True):
            groups.setdefault(bucket, []).append(i)
        return dict(sorted(groups.items()))

    def _reason(self, i: int) -> dict[str, str]:
        try:
            self.items[i]
        except Unreadable as error:
            return {error.name: error.why}
        return {f"image {i}": "its size is not in its header"}


def _are_equal(fetched: Any) -> Any:
    return fetched


def list_skipped(skipped: dict[str, str]) -> str:
    """List the first of the skipped images, each with the reason."""
    shown = [f"{name} ({why})" for name, why in list(skipped.items())[:NAMED]]
    return "; ".join(shown) + (f"; and {len(skipped) - NAMED} more" if len(skipped) > NAMED else "")
