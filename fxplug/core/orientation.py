"""How a picture lies in its file, as cameras write it into EXIF data, and the picture upright."""

from __future__ import annotations

from contextlib import suppress

from PIL import Image

TAG = 0x0112
PLACES = ("exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp")  # where a picture's info has it
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE, 8: Image.Transpose.ROTATE_90,
}  # fmt: skip


def read_orientation(image: Image.Image) -> int:
    """Return how a picture lies, 1 to 8 as in EXIF 2.3, where 5 to 8 lie on their side; 1 for other
    numbers, and where its data is broken."""
    if image.format == "PNG" and not image.info.keys() & {*PLACES}:
        return 1  # PIL would decode the whole image to look behind it
    with suppress(Exception):  # broken EXIF data does not make an image unreadable
        found = int(image.getexif().get(TAG, 1))
        return found if found in TURNS else 1
    return 1


def rotate_upright(image: Image.Image) -> Image.Image:
    """Return a picture upright, as PIL does, whose own function fails where it cannot write the rest of the data anew."""
    turn = TURNS.get(read_orientation(image))
    if turn is None:
        return image
    made = image.transpose(turn)
    for place in PLACES:  # upright now
        made.info.pop(place, None)
    return made
