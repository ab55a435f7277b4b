"""Pictures upright, whatever else their EXIF data says."""

from __future__ import annotations

import io
import itertools
import random
import warnings

import numpy as np
import pytest
from PIL import Image, ImageOps

from fxplug.core.orientation import read_orientation, rotate_upright
from fxplug.serving.server.picture_files import decode_picture
from fxplug.training.data.image_files import read_image, read_size

VALUES = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8)


def write(mode, kind, exif):
    file = io.BytesIO()
    Image.fromarray(VALUES).convert(mode).save(file, kind, exif=exif)
    return file.getvalue()


def opened(raw):
    image = Image.open(io.BytesIO(raw))
    image.load()
    return image


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "1", "CMYK"])
def test_it_is_as_pil_turns_it_and_is_turned_once(mode):
    tried = 0
    for kind, turn in itertools.product(("PNG", "JPEG", "WEBP", "TIFF"), range(11)):
        exif = Image.Exif()
        exif[0x0112] = turn
        try:
            raw = write(mode, kind, exif)
        except OSError:  # this format has no such mode
            continue
        want, found = ImageOps.exif_transpose(opened(raw)), rotate_upright(opened(raw))
        assert found.mode == want.mode and np.array_equal(np.asarray(found), np.asarray(want)), (kind, turn)
        assert rotate_upright(found) is found, (kind, turn)
        tried += 1
    assert tried >= 11


def break_randomly(draw, raw):
    """Change bytes of EXIF data behind its head."""
    made = bytearray(raw)
    for _ in range(draw.randint(1, 9)):
        made[draw.randrange(24, len(made))] = draw.randrange(256)
    return bytes(made)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PIL, about what is broken
def test_broken_data_turns_nothing_and_refuses_nothing():
    draw, refused = random.Random(0), 0
    for number in range(300):
        exif = Image.Exif()
        exif[0x0112], exif[0x010F], exif[0x011A] = draw.randint(2, 8), "x" * draw.randrange(9), 1.5
        exif.get_ifd(0x8825)[2] = (1.0, 2.0, 3.0)
        raw = write("RGB", draw.choice(("PNG", "WEBP")), break_randomly(draw, exif.tobytes()))
        image = opened(raw)
        turn = read_orientation(image)
        plain = Image.Exif()
        plain[0x0112] = turn
        want = np.asarray(ImageOps.exif_transpose(opened(write("RGB", "PNG", plain))))
        with warnings.catch_warnings():
            try:
                ImageOps.exif_transpose(image)
            except Exception:  # which is why it is not used
                refused += 1
        for found in (decode_picture(raw, 1000), read_image(raw, "a.png")):
            assert found.size == want.shape[1::-1], number
            assert image.format == "WEBP" or np.array_equal(np.asarray(found), want), number
        assert read_size(raw) == want.shape[:2], number
    assert refused > 0
