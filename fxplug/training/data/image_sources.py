"""Images that are not decoded yet: which file they are of, by its content, and where they are cropped."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor

from ...core.errors import format_fields
from ...core.reading import get_stamp
from .batch_order import Size
from .image_files import COMPOSED, WHITE, Crop, Unreadable, crop_and_resize, read_image, read_size, rescale

IMAGES = ("image", "video", "condition", "loss_mask")  # the keys of a sample that have images
SETTLED = 2 * 10**9  # ns; a file may change again within one tick of its times, which is this long on some file systems
MOST = 1_000_000  # digests and sizes that a process remembers
_REMEMBERED: dict[tuple[Any, ...], Any] = {}


def compute_digest(*parts: bytes) -> str:
    """Return the SHA-256 of bytes as hexadecimal digits."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()


class CacheKey(dict[str, Any]):
    """Plain values that a cache knows something by, with a digest that is computed once, however often it is looked for."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the values as hexadecimal digits."""
        return compute_key_digest(dict(self))


def compute_key_digest(key: Any) -> str:
    """Return the SHA-256 of plain values of JSON as hexadecimal digits."""
    return key.digest if isinstance(key, CacheKey) else compute_digest(json.dumps(key, sort_keys=True).encode())


def compute_file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, which are read again only where the file may have changed. Raises OSError."""
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        digest: str = remember(path, "digest", found, lambda: hashlib.file_digest(file, "sha256").hexdigest())
    return digest


def remember(path: Path, what: str, found: os.stat_result, work_out: Callable[[], Any]) -> Any:
    """Return what this process has worked out of a file before, unless its times, size, inode or device have changed since, or
    it was written just before."""
    key = (what, str(path), found.st_dev, *get_stamp(found))
    if key in _REMEMBERED:
        return _REMEMBERED[key]
    value = work_out()
    if time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns) > SETTLED:
        if len(_REMEMBERED) >= MOST:
            _REMEMBERED.clear()
        _REMEMBERED[key] = value
    return value


class ImageSource:
    """One image, or the frames of one video, in files that are not decoded yet. `name` is what errors call it."""

    name: str

    @property
    def settings(self) -> tuple[Any, ...]:
        """Plain values that change what is decoded."""
        raise NotImplementedError

    def content(self) -> str:
        """Return a digest of the bytes of its files. Raises Unreadable."""
        raise NotImplementedError

    def size(self) -> Size:
        """Return (h, w) as shown, from its header; (0, 0) if it cannot be read."""
        raise NotImplementedError

    def read(self) -> Any:
        """Decode it: a PIL image, or a list of those of a video. Raises Unreadable."""
        return self.read_known()[0]

    def read_known(self) -> tuple[Any, str]:
        """Decode it, and return the digest of the very bytes that were decoded. Raises Unreadable."""
        raise NotImplementedError


@dataclass(frozen=True)
class ImageFile(ImageSource):
    """An image in a file, or in the bytes of one."""

    source: Path | bytes
    name: str
    channels: int = 3
    background: tuple[int, int, int] = WHITE

    __repr__ = format_fields

    @property
    def settings(self) -> tuple[Any, ...]:
        return (self.channels, *self.background)

    def content(self) -> str:
        try:
            return compute_digest(self.source) if isinstance(self.source, bytes) else compute_file_digest(self.source)
        except (OSError, ValueError) as error:
            raise make_unreadable(self.name, error) from error

    def size(self) -> Size:
        source = self.source
        if isinstance(source, bytes):
            return read_size(source)
        with contextlib.suppress(OSError, ValueError):
            size: Size = remember(source, "size", source.stat(), lambda: read_size(source))
            return size
        return (0, 0)

    def read(self) -> Image.Image:
        return read_image(self.source, self.name, self.channels, self.background)

    def read_known(self) -> tuple[Image.Image, str]:
        try:
            data = self.source if isinstance(self.source, bytes) else self.source.read_bytes()
        except (OSError, ValueError) as error:
            raise make_unreadable(self.name, error) from error
        return read_image(data, self.name, self.channels, self.background), compute_digest(data)


def make_unreadable(name: str, error: Exception) -> Unreadable:
    """Return the error of a file that cannot be opened."""
    return Unreadable(name, "no such file" if isinstance(error, FileNotFoundError) else str(error))


@dataclass(frozen=True)
class PlacedImage:
    """An image or a video as a model sees it: resized and cropped to `size`, perhaps mirrored, and not decoded yet.

    `size` None leaves images as they are; `kind` is the key of the sample: values of an `image` or a `video` are in [-1, 1],
    those of a `condition` in [0, 1]. `pixels` are there where it had to be decoded already.
    """

    source: ImageSource
    size: Size | None
    place: Crop
    kind: str = "image"
    known: str | None = field(default=None, repr=False)  # processes that share samples compare what is shown
    pixels: Tensor | None = field(default=None, repr=False)
    composed: bool = field(default=False, repr=False)

    __repr__ = format_fields

    @cached_property
    def content(self) -> str:
        """Digest of the bytes of its files. Raises Unreadable."""
        return self.source.content() if self.known is None else self.known

    @property
    def sides(self) -> tuple[int, ...]:
        """Height and width of its pixels, of a video after the number of frames; known without pixels."""
        frames = getattr(self.source, "frames", None) if self.kind == "video" else None
        return (*(() if frames is None else (frames,)), *(self.size or self.source.size()))

    @cached_property
    def key(self) -> CacheKey:
        """Plain values on which the pixels depend, and nothing else does: what a cache knows it by. Raises Unreadable."""
        place = [self.place.x, self.place.y, bool(self.place.flip)]
        return CacheKey(content=self.content, settings=list(self.source.settings), size=self.size, place=place)

    def read(self) -> Tensor:
        """Return the pixels as a batch has them, float32 [c, h, w], or [c, f, h, w] of a video. Raises Unreadable."""
        found = self.decoded().pixels
        assert found is not None
        return rescale(self.kind, found)

    def decoded(self) -> PlacedImage:
        """Return it with its pixels, and the digest of the bytes that they are from. Raises Unreadable."""
        if self.pixels is not None:
            return self
        image, known = self.source.read_known()
        frames = image if isinstance(image, list) else [image]
        composed = any(COMPOSED in frame.info for frame in frames)
        made = make_pixels(image, self.size or (frames[0].height, frames[0].width), self.place)
        return replace(self, known=known, pixels=made, composed=composed)

    def mirrored(self) -> PlacedImage:
        """Return it mirrored left to right."""
        pixels = None if self.pixels is None else self.pixels.flip(-1)
        return replace(self, place=self.place._replace(flip=not self.place.flip), pixels=pixels)


def make_pixels(image: Image.Image | Sequence[Image.Image], size: Size, place: Crop) -> Tensor:
    """Crop and resize an image to uint8 [c, h, w]; the frames of a video, all alike, to [c, f, h, w]."""
    frames = [image] if isinstance(image, Image.Image) else image
    pixels = [pil_to_tensor(crop_and_resize(frame, size, place)) for frame in frames]
    return pixels[0] if isinstance(image, Image.Image) else torch.stack(pixels, 1)


def find_crop_origin(image: Size, size: Size, place: Crop) -> tuple[int, int]:
    """Return (top, left) of the crop that `crop_and_resize` takes, in pixels of the resized image.

    The resized image is the smallest with the aspect ratio of the original that the crop of `size` fits in: the
    "crop coordinates" that SDXL is conditioned on (arXiv 2307.01952). Of a mirrored crop it is the place in the mirrored image.

    Args:
        image: (h, w) of the original, upright.
        size: (h, w) of the crop.
        place: Where it lies.
    """
    scale = max(size[0] / image[0], size[1] / image[1])
    top, left = (round(max(0.0, full * scale - side) * at) for full, side, at in
                 zip(image, size, (place.y, 1 - place.x if place.flip else place.x), strict=True))
    return top, left
