"""One sample of a data set, read: its images decoded, cropped and changed by plugins, its caption chosen."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor

from ...core.errors import TrainError
from ..plugins import Plugins
from ..train_section import Data
from ..trigger import with_trigger
from .batch_order import Size
from .files import Items
from .image_files import COMPOSED, Crop, Unreadable, check_alike, check_ratio, convert_image, crop_and_resize, prepare
from .image_sources import IMAGES, ImageSource, PlacedImage, find_crop_origin, make_pixels
from .sidecars import Caption

Transform = Callable[[Image.Image, Size], Tensor]
SkipDecoding = Callable[[dict[str, Any]], bool]


@dataclass(frozen=True)
class SampleReader:
    """Reads the samples of `items`, as a `Loader` is told to; its docstring says what the fields are."""

    items: Items
    spec: Data
    train: bool
    hooks: Plugins | None
    transform: Transform | None
    condition: Callable[[Any], Any] | None  # makes the condition image of an image
    skip_decoding: SkipDecoding | None = None

    @property
    def has_files(self) -> bool:
        """Return whether all that a sample's pixels depend on are its files and the settings, so that these can be cached."""
        drawn = self._hooked("transform_pil_image") or (self.train and self.spec.crop == "random")
        return self.items.has_files and self.condition is None and self.transform is None and not drawn

    def _hooked(self, hook: str) -> bool:
        return self.hooks is not None and self.hooks.has(hook)

    def read(self, index: int, size: Size | None, epoch: int) -> dict[str, Any]:
        """Read a sample in a size, random choices drawn from Python's generator. Raises Unreadable, TrainError."""
        random_place = self.train and self.spec.crop == "random"
        x, y, coin = random.random(), random.random(), random.random()
        item = self.items.open_sample(index)
        files = any(isinstance(item.get(key), ImageSource) for key in IMAGES)
        drawn = self.train and (self.spec.flip or "flip_p" in item) and files
        flip = coin < item.pop("flip_p", 0.5 if self.spec.flip else 0.0)
        place = Crop(*((x, y) if random_place else (0.5, 0.5)), flip=self.train and flip)
        if drawn and self.transform is None:
            item.setdefault("flipped", place.flip)
        if isinstance(caption := item.get("caption"), Caption):
            item["caption"] = caption.shuffled() if self.train else caption.text()
        if self.spec.trigger is not None:
            if "caption" not in item:
                raise TrainError(f"{item['name']} has no caption to put 'trigger' before: write one, or leave 'trigger' out")
            item["caption"] = with_trigger(item["caption"], self.spec.trigger)
        if self.hooks is not None:
            self.hooks.sample = f"epoch {epoch}, {item['name']}"
        if self.skip_decoding is None:
            self._read_images(item, size, place)
        if self.hooks is not None and self._hooked("transform_caption") and "caption" in item:
            item["caption"] = self.hooks.transform_caption(item["caption"])  # behind the image, as EveryDream2trainer has it
        if self.skip_decoding is not None:
            self._put_placed(item, size, place)
        item["index"] = index
        return item

    def _read_images(self, item: dict[str, Any], size: Size | None, place: Crop) -> None:
        """Decode an item's images and convert them to tensors of a size; note where those that are files are cropped."""
        opened = {key: item[key] for key in IMAGES if isinstance(item.get(key), ImageSource)}
        item |= {key: source.read() for key, source in opened.items()}
        frames = [item.get("image"), item.get("condition"), *(item["video"] if "video" in opened else ())]
        if any(isinstance(image, Image.Image) and COMPOSED in image.info for image in frames):
            item[COMPOSED] = item["name"]
        if "image" in opened and self.transform is None:
            self._put_sizes(item, (item["image"].height, item["image"].width), size, place)
        if "video" in opened:
            self._put_video(item, size, place)
        self._put_images(item, size, place)

    def _put_placed(self, item: dict[str, Any], size: Size | None, place: Crop) -> None:
        """Replace an item's images by what is to be decoded of them, and decode it unless `skip_decoding` says otherwise."""
        assert self.skip_decoding is not None
        sources: dict[str, ImageSource] = {key: item[key] for key in IMAGES if key in item}
        sizes = {key: source.size() for key, source in sources.items()}
        for key, source in sources.items():
            if not all(sizes[key]):
                source.read()
                raise Unreadable(source.name, "its size is not in its header")
        first = next(iter(sources))  # a condition has the size of its image
        item |= {key: PlacedImage(source, size or sizes[first], place, key) for key, source in sources.items()}
        for key, kind in (("condition", "condition"), ("loss_mask", "mask")):
            if key in sizes and key != first:
                check_ratio(sizes[first], sizes[key], item["name"], kind)
        if not self.skip_decoding(item):
            item |= {key: item[key].decoded() for key in sources}
            if any(item[key].composed for key in sources):
                item[COMPOSED] = item["name"]
        item.setdefault("content", item[first].content)
        self._put_sizes(item, sizes[first], size, place)

    def _put_sizes(self, item: dict[str, Any], original: Size, size: Size | None, place: Crop) -> None:
        """Put `original_size` and `crop` of an item where it has none of its own."""
        item.setdefault("original_size", torch.tensor(original))
        item.setdefault("crop", torch.tensor(find_crop_origin(original, size or original, place)))

    def _put_video(self, item: dict[str, Any], size: Size | None, place: Crop) -> None:
        """Convert the frames of an item's video to one tensor. Raises TrainError where they are to be changed as images are."""
        what = "the task" if self.transform is not None else "a plugin's transform_pil_image"
        if self.transform is not None or self._hooked("transform_pil_image"):
            raise TrainError(f"{item['name']} is a video, and {what} changes images")
        original = (item["video"][0].height, item["video"][0].width)
        self._put_sizes(item, original, size, place)
        item["video"] = make_pixels(item["video"], size or original, place)

    def _put_images(self, item: dict[str, Any], size: Size | None, place: Crop) -> None:
        """Convert an item's image, condition and mask to tensors of a size. A task's transform crops by itself, without the
        other two."""
        image, name, condition, mask = item.get("image"), item["name"], item.get("condition"), item.get("loss_mask")
        if isinstance(image, Tensor):
            if size is not None and image.shape[1:] != size:
                finding = f"{name} is a float image of {image.shape[1]}x{image.shape[2]}, which is used as it is"
                raise TrainError(f"{finding}, but the size must be {size[0]}x{size[1]}")
            for used, what in ((self._hooked("transform_pil_image"), "a plugin's transform_pil_image"),
                               (self.condition is not None and condition is None, "a condition function")):  # fmt: skip
                if used:
                    raise TrainError(f"{name} is a float image: {what} needs PIL or uint8")
            size, place = (image.shape[1], image.shape[2]), Crop()
        elif image is not None:
            size = size or (image.height, image.width)
            both = self.condition is not None or condition is not None or mask is not None
            for further, kind in ((condition, "condition"), (mask, "mask")):
                check_alike(image, further, size, place, name, kind)
            if both or self.transform is None:
                image = crop_and_resize(image, size, place)
            image = self._changed(image, name, fixed=both or self.transform is None)
            if size is not None and isinstance(mask, Image.Image):
                item["loss_mask"] = mask = pil_to_tensor(crop_and_resize(mask, size, place))
            if self.condition is not None:  # made of what the model sees: grey stays grey
                made, place = self.condition(image), Crop()
                grey = made.mode in ("1", "L") if isinstance(made, Image.Image) else np.ndim(made) == 2
                item["condition"] = convert_image(made, f"the condition of {name}", 1 if grey else 3, self.spec.background)
            item["image"] = pil_to_tensor(image) if self.transform is None else self.transform(image, size)
        if size is not None and isinstance(condition := item.get("condition"), Image.Image):
            item["condition"] = pil_to_tensor(crop_and_resize(condition, size, place))
        if size is not None and isinstance(mask, Image.Image):  # of an image that is a tensor
            item["loss_mask"] = pil_to_tensor(crop_and_resize(mask, size, place))

    def _changed(self, image: Image.Image, name: str, fixed: bool) -> Image.Image:
        """Return the image after the plugins, which may change its size only where the task crops it."""
        if self.hooks is None or not self._hooked("transform_pil_image"):
            return image
        try:
            changed = prepare(self.hooks.transform_pil_image(image), self.spec.channels, self.spec.background)
        except ValueError as error:
            raise TrainError(f"{name}: the image that transform_pil_image returned cannot be used: {error}") from None
        if fixed and changed.size != image.size:
            sizes = f"{changed.height}x{changed.width} of one of {image.height}x{image.width}"
            raise TrainError(
                f"{name}: transform_pil_image returned an image of {sizes}, but the size must stay the same, since it is "
                "cropped already"
            )
        return changed
