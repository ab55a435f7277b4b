"""From a request to a batch: what runs in the workers, or in the training process when there are none."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from torchvision.transforms.v2.functional import pil_to_tensor

from ...core.errors import FxplugError, TrainError
from ...core.spec.train_section import Data
from ..plugins import Plugins
from ..random_draws import mixed, random_state_kept, seed_all
from ..tasks.task import function_of
from .batch_order import Request
from .files import Items
from .image_files import Place, Unreadable, as_image, placed, prepared
from .sidecars import Caption

Size = tuple[int, int]
Transform = Callable[[Image.Image, Size], Tensor]


class Fetched(NamedTuple):
    """A batch, the images it had to go without, and the error that ends the run."""

    batch: dict[str, Any] | None
    skipped: dict[str, str]
    error: FxplugError | None = None


class Fetch(Dataset[Any]):
    """Makes batches; picklable when items, transform and hooks are.

    Every sample starts from random numbers seeded with (seed, epoch, index). When training, the place of an unreadable image
    is taken by the next sample of its group, in the order of the data; in tests the batch is smaller.
    """

    def __init__(
        self,
        items: Items,
        spec: Data,
        groups: Sequence[Sequence[int]],
        sizes: Sequence[Size | None],
        *,
        seed: int,
        train: bool,
        transform: Transform | None,
        hooks: Plugins | None,
    ) -> None:
        self.items, self.spec, self.seed, self.train, self.transform, self.hooks = items, spec, seed, train, transform, hooks
        self.groups, self.sizes = groups, sizes
        named = spec.conditions is not None and ":" in spec.conditions.name
        self.condition = function_of(spec.conditions, ("data", "conditions")) if named and spec.conditions else None
        self._hooked = {hook for hook in ("transform_caption", "transform_pil_image") if hooks is not None and hooks.has(hook)}

    def __getitem__(self, request: Request) -> Fetched:
        """The batch of a request, as torch's workers ask for it."""
        return self(request)

    def __call__(self, request: Request, enough: int | None = None) -> Fetched:
        """The batch of a request; `enough` is after how many samples it ends."""
        skipped: dict[str, str] = {}
        with random_state_kept():
            try:
                samples: list[dict[str, Any]] = []
                for index in request.indices:
                    if len(samples) == enough:
                        break
                    sample = self._readable(index, request, skipped)
                    if len(skipped) > self.spec.max_corrupt:  # the loader counts them, and stops
                        return Fetched(None, skipped)
                    samples += [] if sample is None else [sample]
                return Fetched(collate(samples) if samples else None, skipped)
            except FxplugError as error:
                return Fetched(None, skipped, error)

    def _readable(self, index: int, request: Request, skipped: dict[str, str]) -> dict[str, Any] | None:
        for candidate in self._candidates(index, request.group):
            seed_all(mixed(self.seed, request.epoch, candidate))
            try:
                return self._sample(candidate, self.sizes[request.group], request.epoch)
            except Unreadable as error:
                skipped[error.name] = error.why
                if len(skipped) > self.spec.max_corrupt:
                    return None
        if self.train:
            raise TrainError(f"no image of a group of {len(self.groups[request.group])} can be read: {too_many(skipped)}")
        return None

    def _candidates(self, index: int, group: int) -> Iterator[int]:
        yield index
        if self.train:
            members = self.groups[group]
            at = members.index(index)
            yield from (*members[at + 1 :], *members[:at])

    def _sample(self, index: int, size: Size | None, epoch: int) -> dict[str, Any]:
        random_place = self.train and self.spec.crop == "random"
        x, y, coin = random.random(), random.random(), random.random()
        item = self.items[index]
        flip = coin < item.pop("flip_p", 0.5 if self.spec.flip else 0.0)
        place = Place(*((x, y) if random_place else (0.5, 0.5)), flip=self.train and flip)
        if isinstance(caption := item.get("caption"), Caption):
            item["caption"] = caption.shuffled() if self.train else caption.text()
        if self.hooks is not None:
            self.hooks.sample = f"epoch {epoch}, {item['name']}"
        self._put_images(item, size, place)
        if self.hooks is not None and "transform_caption" in self._hooked and "caption" in item:
            item["caption"] = self.hooks.transform_caption(item["caption"])  # behind the image, as EveryDream2trainer has it
        item["index"] = index
        return item

    def _put_images(self, item: dict[str, Any], size: Size | None, place: Place) -> None:
        """Make tensors of a size of an item's image and condition. A task's transform crops by itself, without a condition."""
        image, name, condition = item.get("image"), item["name"], item.get("condition")
        if isinstance(image, Tensor):
            if size is not None and image.shape[1:] != size:
                finding = f"{name} is a float image of {image.shape[1]}x{image.shape[2]}, which is used as it is"
                raise TrainError(f"{finding}; the size is to be {size[0]}x{size[1]}")
            for used, what in ((self._hooked & {"transform_pil_image"}, "a plugin's transform_pil_image"),
                               (self.condition is not None and condition is None, "a condition function")):  # fmt: skip
                if used:
                    raise TrainError(f"{name} is a float image: {what} needs PIL or uint8")
            size, place = (image.shape[1], image.shape[2]), Place()
        elif image is not None:
            size = size or (image.height, image.width)
            both = self.condition is not None or condition is not None
            _check_alike(image, condition, size, place, name)
            if both or self.transform is None:
                image = placed(image, size, place)
            image = self._changed(image, name, fixed=both or self.transform is None)
            if self.condition is not None:  # made of what the model sees: grey stays grey
                made, place = self.condition(image), Place()
                grey = made.mode in ("1", "L") if isinstance(made, Image.Image) else np.ndim(made) == 2
                item["condition"] = as_image(made, f"the condition of {name}", 1 if grey else 3)
            item["image"] = pil_to_tensor(image) if self.transform is None else self.transform(image, size)
        if size is not None and isinstance(condition := item.get("condition"), Image.Image):
            item["condition"] = pil_to_tensor(placed(condition, size, place))

    def _changed(self, image: Image.Image, name: str, fixed: bool) -> Image.Image:
        """The image after the plugins, which may change its size only where the task crops it."""
        if self.hooks is None or "transform_pil_image" not in self._hooked:
            return image
        changed = prepared(self.hooks.transform_pil_image(image), self.spec.channels)
        if fixed and changed.size != image.size:
            sizes = f"{changed.height}x{changed.width} of one of {image.height}x{image.width}"
            raise TrainError(f"{name}: transform_pil_image made an image of {sizes}, which is cropped already")
        return changed


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One dict of the samples' values.

    `image` and `condition` are stacked to float32 [b, c, h, w]; uint8 becomes [-1, 1] and [0, 1]. Text becomes a list,
    `label` and `index` int64 [b], the rest what torch's default_collate makes of it. Raises TrainError for samples that do
    not go together.
    """
    first = samples[0]
    for sample in samples[1:]:
        if sample.keys() != first.keys():
            key = sorted(map(str, sample.keys() ^ first.keys()))[0]
            has, lacks = (sample, first) if key in sample else (first, sample)
            raise TrainError(f"{has['name']} has '{key}' and {lacks['name']} has not")
    return {key: _collated(key, [sample[key] for sample in samples], samples) for key in first}


def _collated(key: str, values: list[Any], samples: Sequence[dict[str, Any]]) -> Any:
    if isinstance(values[0], str):
        return values
    if key in ("loss_scale", "cond_dropout"):
        return torch.tensor(values, dtype=torch.float32)
    if key in ("label", "index"):
        return torch.tensor(values, dtype=torch.int64)
    if key in ("image", "condition") and isinstance(values[0], Tensor):
        for value, sample in zip(values, samples, strict=True):
            if value.shape != values[0].shape or value.dtype != values[0].dtype:
                one, two = (f"{s['name']} ({_described(v)})" for v, s in ((values[0], samples[0]), (value, sample)))
                raise TrainError(f"the {key}s of a batch must be of one size and kind: {one}, {two}; 'size' makes them so")
        return rescaled(key, torch.stack(values))
    try:
        return default_collate(values)
    except Exception as error:  # torch's, about samples of the user's
        raise TrainError(f"the values of '{key}' make no batch: {error}; samples from {samples[0]['name']}") from error


def rescaled(key: str, images: Tensor) -> Tensor:
    """uint8 images as float32 in [-1, 1], conditions in [0, 1]; floats as they are."""
    if images.dtype != torch.uint8:
        return images
    return images.float().div_(127.5).sub_(1) if key == "image" else images.float().div_(255)


def _described(value: Tensor) -> str:
    return "x".join(map(str, value.shape)) + f" {str(value.dtype).removeprefix('torch.')}"


def _check_alike(image: Image.Image, condition: Any, size: Size, place: Place, name: str) -> None:
    """TrainError for an image and a condition that cannot be cropped alike."""
    if isinstance(condition, Tensor) and (place.flip or not size == (image.height, image.width) == condition.shape[1:]):
        raise TrainError(f"{name}: its condition is a float tensor, which cannot be cropped and mirrored with it")
    if isinstance(condition, Image.Image):
        ratio = image.width * condition.height / (image.height * condition.width)
        if not 0.98 < ratio < 1.02:
            sizes = f"{image.height}x{image.width}, its condition {condition.height}x{condition.width}"
            raise TrainError(f"{name} is {sizes}: they must have one shape to be cropped alike")


def too_many(skipped: dict[str, str]) -> str:
    """The first of the images that were skipped, each with the reason."""
    shown = [f"{name} ({why})" for name, why in list(skipped.items())[:5]]
    return "; ".join(shown) + (f"; and {len(skipped) - 5} more" if len(skipped) > 5 else "")
