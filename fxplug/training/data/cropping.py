"""The part of an image that is used: cropped to the shape of the batch, resized, perhaps mirrored."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor


class Place(NamedTuple):
    """Where the crop lies, from 0 (left, top) to 1, and whether it is mirrored. An image and its condition have the same."""

    x: float = 0.5
    y: float = 0.5
    flip: bool = False


def placed(image: Image.Image, size: tuple[int, int], place: Place) -> Image.Image:
    """The largest crop of the shape of `size` (h, w), resized with an antialiasing Lanczos filter in the same go."""
    h, w = size
    scale = min(image.width / w, image.height / h)
    spare_w, spare_h = image.width - w * scale, image.height - h * scale
    if (image.height, image.width) != (h, w):
        left, top = spare_w * place.x, spare_h * place.y
        box = (left, top, min(left + w * scale, image.width), min(top + h * scale, image.height))
        image = image.resize((w, h), Image.Resampling.LANCZOS, box=box)
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if place.flip else image


def pixels(image: Image.Image) -> Tensor:
    """uint8 [c, h, w]."""
    array = torch.from_numpy(np.array(image))
    return array[None] if array.ndim == 2 else array.permute(2, 0, 1)
