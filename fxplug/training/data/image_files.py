"""Images as PIL reads them, upright and in one mode, or with the reason why not; and the part of one that is used."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms.v2.functional import to_image, to_pil_image

from ...core.errors import TrainError
from ...core.orientation import PLACES, TAG, read_orientation, rotate_upright


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
    """Decode the image in a file or its bytes, upright, in mode RGB or L, as `prepare` does. Raises Unreadable."""
    with check_readable(name, source), _opened(source) as file, Image.open(file) as image:
        return prepare(image, channels, background)


@contextlib.contextmanager
def check_readable(name: str, source: Path | bytes = b"...") -> Iterator[None]:
    """Raise Unreadable, with the reason, for whatever decoders raise for broken data."""
    try:
        yield
    except Exception as error:  # a decoder's
        why = str(error) or type(error).__name__
        if isinstance(error, UnidentifiedImageError):
            why = _unidentified(source)
        elif isinstance(error, FileNotFoundError):
            why = "no such file"
        elif isinstance(error, Image.DecompressionBombError):
            why = f"too many pixels (a possible decompression bomb): {error}"
        raise Unreadable(name, why) from error


def _opened(source: Path | bytes) -> BinaryIO:
    """Open a path or bytes for reading. Given a path, PIL would memory-map a TIFF, whose pixels then differ once it is
    rotated."""
    return io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")


def _unidentified(source: Path | bytes) -> str:
    """Return the reason why PIL cannot open a file."""
    with _opened(source) as file:
        start = file.read(4)
    if start in (b"II*\0", b"MM\0*"):
        return "a TIFF of a kind that PIL does not read, such as floats of several channels: save it as a PNG"
    return "not an image" if start else "an empty file"


def read_size(source: Path | bytes) -> tuple[int, int]:
    """Return (h, w) of the upright image, from its header; (0, 0) if it cannot be read."""
    try:
        with _opened(source) as file, Image.open(file) as image:
            if image.format == "PNG" and not image.info.keys() & {*PLACES} and _has_late_chunks(source):
                image.load()
            w, h = image.size
            if image.format == "TIFF":  # of which PIL has turned the size already
                w, h = image.tag_v2[256], image.tag_v2[257]  # type: ignore[attr-defined]
            return (w, h) if read_orientation(image) > 4 else (h, w)
    except Exception:  # a decoder's, as above
        return (0, 0)


def _has_late_chunks(source: Path | bytes) -> bool:
    """Return whether a PNG has metadata after its pixels, which may hold an orientation. Only then is it decoded for its
    size."""
    with _opened(source) as file:
        file.seek(8)
        pixels = False
        while len(head := file.read(8)) == 8:
            pixels |= head[4:] == b"IDAT"
            if pixels and head[4:] in (b"eXIf", b"tEXt", b"zTXt", b"iTXt"):
                return True
            file.seek(int.from_bytes(head[:4], "big") + 4, io.SEEK_CUR)
    return False


def prepare(image: Image.Image, channels: int, background: tuple[int, int, int] = WHITE) -> Image.Image:
    """Rotate an image upright, in mode RGB (3 channels) or L (1), its transparent pixels composed on a background colour.

    Grey of more than 8 bits becomes 8 (see `_of_8_bits`). An image that had transparent pixels has `COMPOSED` in its `info`.
    Raises ValueError for values whose white is not known.
    """
    image.load()  # a PNG may say at its end how it is turned, and a TIFF is turned while it is loaded
    mode = "RGB" if channels == 3 else "L"
    if image.mode == "F" or image.mode.startswith("I"):
        image = _of_8_bits(image)
    elif image.mode in ("La", "LAB"):
        image = image.convert("LA" if image.mode == "La" else "RGB")
    elif image.mode == "RGB" and isinstance(clear := image.info.get("transparency"), tuple) and max(clear) > 255:
        image = image.copy()  # 16 bits a colour, of which PIL keeps the upper 8
        image.info["transparency"] = tuple(value >> 8 for value in clear)
    image = rotate_upright(image)
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        composed = Image.new("RGBA", layer.size, (*background, 255))
        composed.alpha_composite(layer)
        image = composed.convert(mode)
        if layer.getchannel("A").getextrema()[0] != 255:
            image.info[COMPOSED] = True
    return image if image.mode == mode else image.convert(mode)


def _of_8_bits(image: Image.Image) -> Image.Image:
    """Convert grey of 16 or 32 bits or of floats to 8 bits.

    White is the largest value of 16 bits, of which the upper 8 are kept. In 32 bits and floats it is 255, or 65535 where the
    image has larger values and all are whole; in floats up to 1 it is 1. Raises ValueError for other values, and for floats of
    which most are below 1 and some above, which may be either.
    """
    values, clear = np.asarray(image), image.info.get("transparency")
    least, most = values.min(), values.max()
    if not 0 <= least <= most:
        raise ValueError(f"it has values from {least:g} to {most:g}, and black is 0")
    whole = image.mode != "F" or bool((values == np.rint(values)).all())
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        grey = values.astype(np.int64) >> 8
    elif image.mode == "F" and most <= 1:
        grey = np.rint(values * 255)
    elif most <= 255 and (whole or values.mean() > 1):
        grey = np.rint(values)
    elif most <= 0xFFFF and whole:
        grey = values.astype(np.int64) >> 8
    else:
        white = "1, to 255, or whole ones to 65535" if image.mode == "F" else "255, or to 65535"
        found = f"it has values from {least:g} to {most:g} (their mean is {values.mean():g})"
        raise ValueError(f"{found}, and must have them from 0 to {white}")
    made = Image.fromarray(grey.astype(np.uint8))
    if getattr(image, "tag_v2", {}).get(262) == 0:  # a TIFF in which white is 0
        made = ImageOps.invert(made)
    if isinstance(clear, int):
        made.putalpha(Image.fromarray(np.where(values == clear, 0, 255).astype(np.uint8)))
    made.getexif()[TAG] = read_orientation(image)
    return made


def convert_image(
    value: Any, name: str, channels: int = 3, background: tuple[int, int, int] = WHITE
) -> Image.Image | Tensor:
    """Convert an image of a data set to what the loader takes.

    PIL images, and uint8 arrays and tensors [c, h, w], become PIL images of this many channels. A float array or tensor counts
    as preprocessed: it becomes float32 [c, h, w] and is otherwise left as it is, so its values must be those the task works
    with. Tensors are [c, h, w] or [h, w], numpy arrays (and lists) [h, w, c] or [h, w]. Raises TrainError for anything else,
    and Unreadable for a PIL image that does not decode.
    """
    if value is None:
        raise Unreadable(name, "no image")
    if isinstance(value, Image.Image):
        with check_readable(name):  # it may not be loaded yet
            return prepare(value, channels, background)
    if isinstance(value, dict) and value.get("path"):
        name = f"{name} ({value['path']})"
    if isinstance(value, (dict, bytes, bytearray)):
        return read_image(get_stored(value) if isinstance(value, dict) else bytes(value), name, channels, background)
    found = np.asarray(value) if isinstance(value, list) else value
    if not isinstance(found, (Tensor, np.ndarray)):
        raise TrainError(f"{name}: an image must be a PIL image, a tensor or a numpy array, not a {type(value).__name__}")
    if isinstance(found, np.ndarray) and not found.flags.writeable:
        found = found.copy()  # of which torch would warn
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
    return prepare(to_pil_image(array), channels, background)


def get_stored(value: dict[str, Any]) -> bytes | Path:
    """Return the bytes or path that a Hugging Face data set has of an undecoded image."""
    return value["bytes"] if value["bytes"] is not None else Path(value["path"])


class Crop(NamedTuple):
    """Where the crop lies, from 0 (left, top) to 1, and whether it is mirrored. An image and its condition have the same."""

    x: float = 0.5
    y: float = 0.5
    flip: bool = False


def crop_and_resize(image: Image.Image, size: tuple[int, int], place: Crop) -> Image.Image:
    """Take the largest crop with the aspect ratio of `size` (h, w), resized in the same step with an antialiasing Lanczos
    filter."""
    if (image.height, image.width) != size:
        image = ImageOps.fit(image, size[::-1], Image.Resampling.LANCZOS, centering=(place.x, place.y))
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if place.flip else image


def rescale(key: str, images: Tensor) -> Tensor:
    """Convert uint8 images and videos to float32 in [-1, 1], conditions and masks to [0, 1]; return floats unchanged."""
    if images.dtype != torch.uint8:
        return images
    return images.float().div_(255) if key in ("condition", "loss_mask") else images.float().div_(127.5).sub_(1)


def check_alike(image: Image.Image, further: Any, size: tuple[int, int], place: Crop, name: str, kind: str) -> None:
    """Raise TrainError for an image and its condition, or its mask, that cannot be cropped alike."""
    if isinstance(further, Tensor) and (place.flip or not size == (image.height, image.width) == further.shape[1:]):
        raise TrainError(
            f"{name}: its {kind} is a float tensor, which cannot be cropped and flipped with it: use a PIL image or uint8"
        )
    if isinstance(further, Image.Image):
        check_ratio((image.height, image.width), (further.height, further.width), name, kind)


def check_ratio(image: tuple[int, int], further: tuple[int, int], name: str, kind: str) -> None:
    """Raise TrainError for an image and its condition, or its mask, of other aspect ratios."""
    if not 0.98 < image[1] * further[0] / (image[0] * further[1]) < 1.02:
        sizes = f"{image[0]}x{image[1]}, its {kind} {further[0]}x{further[1]}"
        raise TrainError(f"{name} is {sizes}: they must have one shape to be cropped alike")
