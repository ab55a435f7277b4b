"""Images as PIL reads them, upright and in one mode, or with the reason why not; and the part of one that is used."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms.v2.functional import to_image, to_pil_image

from ...core.errors import TrainError

_ORIENTATION = 0x0112  # the EXIF tag; 5 to 8 lie on their side


class Unreadable(Exception):
    """One image that cannot be read. The loader names it and goes on without it."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(name, why)
        self.name, self.why = name, why


WHITE = (255, 255, 255)
COMPOSED = "composed"  # in the info of an image that had transparent pixels


def read_image(
    source: Path | bytes, name: str, channels: int = 3, background: tuple[int, int, int] = WHITE
) -> Image.Image:
    """Decode the image in a file or its bytes, upright, in mode RGB or L, as `prepared` does. Raises Unreadable."""
    with _readable(name, source), Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
        image.load()
        return prepared(image, channels, background)


@contextlib.contextmanager
def _readable(name: str, source: Path | bytes = b"...") -> Iterator[None]:
    """Raises Unreadable, with the reason, for whatever decoders raise for broken data."""
    try:
        yield
    except Exception as error:  # a decoder's
        why = str(error) or type(error).__name__
        if isinstance(error, UnidentifiedImageError):
            why = "not an image" if (len(source) if isinstance(source, bytes) else source.stat().st_size) else "an empty file"
        elif isinstance(error, FileNotFoundError):
            why = "no such file"
        elif isinstance(error, Image.DecompressionBombError):
            why = f"too many pixels (a possible decompression bomb): {error}"
        raise Unreadable(name, why) from error


def read_size(source: Path | bytes) -> tuple[int, int]:
    """(h, w) of the upright image, from its header; (0, 0) for one that cannot be read."""
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            w, h = image.size
            return (w, h) if _orientation(image) > 4 else (h, w)
    except Exception:  # a decoder's, as above
        return (0, 0)


def prepared(image: Image.Image, channels: int, background: tuple[int, int, int] = WHITE) -> Image.Image:
    """Turn an image upright, in mode RGB (3 channels) or L (1), its transparent pixels composed on a colour.

    16-bit grey keeps its upper 8 bits. An image that had transparent pixels has `COMPOSED` in its `info`.
    """
    if _orientation(image) > 1:
        image = ImageOps.exif_transpose(image)
    mode = "RGB" if channels == 3 else "L"
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image).clip(0, 0xFFFF) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        composed = Image.new("RGBA", layer.size, (*background, 255))
        composed.alpha_composite(layer)
        image = composed.convert(mode)
        if layer.getchannel("A").getextrema()[0] != 255:
            image.info[COMPOSED] = True
    return image if image.mode == mode else image.convert(mode)


def as_image(
    value: Any, name: str, channels: int = 3, background: tuple[int, int, int] = WHITE
) -> Image.Image | Tensor:
    """An image of a data set as the loader takes it.

    PIL images, and uint8 arrays and tensors [c, h, w], become PIL images of this many channels. A float array or tensor is an
    image that is ready: it becomes float32 [c, h, w] and is otherwise left as it is, so its values must be those the task works
    with. Tensors are [c, h, w] or [h, w], numpy arrays (and lists) [h, w, c] or [h, w]. Raises TrainError for anything else,
    and Unreadable for a PIL image that does not decode.
    """
    if value is None:
        raise Unreadable(name, "no image")
    if isinstance(value, Image.Image):
        with _readable(name):  # it may not be loaded yet
            return prepared(value, channels, background)
    if isinstance(value, (dict, bytes, bytearray)):
        return read_image(stored(value) if isinstance(value, dict) else bytes(value), name, channels, background)
    found = np.asarray(value) if isinstance(value, list) else value
    if not isinstance(found, (Tensor, np.ndarray)):
        raise TrainError(f"{name}: an image must be a PIL image, a tensor or a numpy array, not a {type(value).__name__}")
    array = to_image(found).as_subclass(Tensor) if found.ndim in (2, 3) else torch.empty(0)
    if array.ndim != 3 or (not array.is_floating_point() and len(array) not in (1, 3, 4)):
        layout = "[c, h, w] or [h, w]" if isinstance(value, Tensor) else "[h, w, c] or [h, w]"
        shape = "x".join(map(str, np.shape(value)))
        kind = f"an image that is a {type(value).__name__} must be {layout} with 1, 3 or 4 channels"
        raise TrainError(f"{name}: {kind}, not {shape}")
    if array.is_floating_point():
        return array.float().contiguous()
    if isinstance(value, list) and 0 <= int(array.min()) <= int(array.max()) <= 255:
        array = array.to(torch.uint8)  # a list has no dtype
    if array.dtype != torch.uint8:
        raise TrainError(f"{name}: image values must be uint8 or float, not {str(array.dtype).removeprefix('torch.')}")
    return prepared(to_pil_image(array), channels, background)


def stored(value: dict[str, Any]) -> bytes | Path:
    """What a Hugging Face data set has of an image that it is not to decode."""
    return value["bytes"] if value["bytes"] is not None else Path(value["path"])


def _orientation(image: Image.Image) -> int:
    if image.format == "PNG" and not {"exif", "Raw profile type exif"} & image.info.keys():
        return 1  # PIL would decode the whole image to look behind it
    with contextlib.suppress(Exception):  # broken EXIF data does not make an image unreadable
        return int(image.getexif().get(_ORIENTATION, 1))
    return 1


class Crop(NamedTuple):
    """Where the crop lies, from 0 (left, top) to 1, and whether it is mirrored. An image and its condition have the same."""

    x: float = 0.5
    y: float = 0.5
    flip: bool = False


def placed(image: Image.Image, size: tuple[int, int], place: Crop) -> Image.Image:
    """The largest crop of the shape of `size` (h, w), resized with an antialiasing Lanczos filter in the same go."""
    if (image.height, image.width) != size:
        image = ImageOps.fit(image, size[::-1], Image.Resampling.LANCZOS, centering=(place.x, place.y))
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if place.flip else image
