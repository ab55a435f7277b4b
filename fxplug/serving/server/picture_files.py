"""Pictures that clients send, decoded within a limit of pixels."""

from __future__ import annotations

import base64
import binascii
import io
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor

from PIL import Image, ImageChops

from ...core.errors import SpecError, get_first_line, quote
from ...core.orientation import rotate_upright

READER = ThreadPoolExecutor(1, "pictures")  # reads bodies beside the event loop, and one at a time: each may be large
FORMATS = ("PNG", "JPEG", "WEBP")
DEEP = ("I", "F", "I;16", "I;16B", "I;16L")  # modes of more than eight bits, which conversions cut off


def decode_picture(data: bytes, pixels: int) -> Image.Image:
    """Decode a picture, upright.

    Args:
        data: A file of PNG, JPEG or WebP.
        pixels: The most pixels, which its header is asked for before it is unpacked.

    Returns:
        The picture.

    Raises:
        SpecError: For what is no such file, is broken or larger, moves, or has more than eight bits a channel.
    """
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = picture.size
        if width * height > pixels:
            raise SpecError(f"has {width} x {height} pixels; the limit is {pixels}")
        if getattr(picture, "n_frames", 1) != 1:
            raise SpecError("moves: send one picture")
        picture.load()
    except SpecError:
        raise
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError, struct.error, zlib.error, EOFError) as error:
        raise SpecError(f"cannot be read as PNG, JPEG or WebP: {get_first_line(error)}") from None
    if picture.mode in DEEP:
        raise SpecError(f"has more than 8 bits a channel ({picture.mode}): save it with 8")
    return rotate_upright(picture)


def decode_base64(text: object) -> bytes:
    """Decode a file within a body of JSON.

    Args:
        text: The file in base64, or as a `data:` URL with it.

    Returns:
        The bytes.

    Raises:
        SpecError: For anything else.
    """
    if not isinstance(text, str):
        raise SpecError(f"must be a picture in base64, not {quote(text)}")
    head, comma, rest = text.partition(",")
    try:
        return base64.b64decode(rest if comma and head.startswith("data:") else text, validate=True)
    except (binascii.Error, ValueError):
        raise SpecError(f"is not base64: {quote(text)}") from None


def read_mask(picture: Image.Image) -> Image.Image:
    """Read a mask: white is 1, black and what is transparent 0.

    Args:
        picture: A picture of any mode of eight bits.

    Returns:
        A grey picture.
    """
    if not picture.has_transparency_data:
        return picture.convert("L")
    full = picture.convert("RGBA")
    return ImageChops.multiply(full.convert("RGB").convert("L"), full.getchannel("A"))
