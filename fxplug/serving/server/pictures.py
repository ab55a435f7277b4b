"""Results of pipelines as files, and previews of latents."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ...core.errors import SpecError
from .server_config import Size

MIMES = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}
FPS = 8  # frames a second of a video


def list_pictures(result: Any) -> list[list[Image.Image]]:
    """List the pictures of a pipeline's result, each a list of its frames.

    Args:
        result: What the pipeline gave.

    Returns:
        The pictures; a still one has one frame.

    Raises:
        SpecError: For what has no pictures.
    """
    found = getattr(result, "images", None)
    if found is None:
        found = getattr(result, "frames", None)
    if isinstance(found, (np.ndarray, Tensor)):
        found = [_from_array(np.asarray(one)) for one in found]
    rows = [one if isinstance(one, list) else [one] for one in found] if isinstance(found, list) else []
    if not rows or not all(isinstance(frame, Image.Image) for row in rows for frame in row):
        raise SpecError(f"the pipeline gives a {type(result).__name__} without pictures, which cannot be sent")
    return rows


def _from_array(values: np.ndarray[Any, Any]) -> Any:
    """Convert values in [0, 1] with channels last, of a picture or of the frames of one."""
    if values.ndim == 4:
        return [_from_array(frame) for frame in values]
    return Image.fromarray((values.clip(0, 1) * 255).round().astype(np.uint8).squeeze())


def encode_picture(frames: list[Image.Image], kind: str) -> tuple[bytes, str]:
    """Encode a picture.

    Args:
        frames: Its frames; more than one are a WebP that moves.
        kind: "png", "jpeg" or "webp".

    Returns:
        The bytes, the same for the same picture, and their kind.
    """
    file = io.BytesIO()
    if len(frames) > 1:
        frames[0].save(file, "webp", save_all=True, append_images=frames[1:], duration=1000 // FPS, loop=0)
        return file.getvalue(), "webp"
    picture = frames[0].convert("RGB") if kind == "jpeg" else frames[0]
    picture.save(file, kind)
    return file.getvalue(), kind


@dataclass
class Preview:
    """A linear map from the values of latents at a place to the colour there, learnt from one picture.

    `weight` has the shape (channels + 1, 3). Latents are (1, channels, height, width), or (1, places, channels) with as many
    places as make the proportions of the picture.
    """

    weight: Tensor

    @classmethod
    def learn(cls, latents: Tensor, picture: Image.Image) -> Preview | None:
        """Learn the map by least squares.

        Args:
            latents: Those of the last step.
            picture: What they became.

        Returns:
            The map; None where latents have no places.
        """
        places = _to_places(latents, picture.size)
        if places is None:
            return None
        height, width, _ = places.shape
        small = np.asarray(picture.convert("RGB").resize((width, height), Image.Resampling.BOX), dtype=np.float64) / 255
        values = _add_ones(places)
        found = torch.linalg.lstsq(values, torch.from_numpy(small).reshape(-1, 3), driver="gelsd").solution
        return cls(found) if bool(found.isfinite().all()) else None

    def draw(self, latents: Tensor, size: Size) -> Image.Image | None:
        """Draw a preview.

        Args:
            latents: The latents of a step.
            size: Width and height of the picture.

        Returns:
            The preview; None where the latents have another form.
        """
        places = _to_places(latents, size)
        if places is None or places.shape[-1] + 1 != len(self.weight):
            return None
        height, width, _ = places.shape
        colours = (_add_ones(places) @ self.weight).nan_to_num().clip(0, 1).reshape(height, width, 3)
        return Image.fromarray((colours * 255).round().to(torch.uint8).numpy()).resize(size, Image.Resampling.BILINEAR)


def _add_ones(places: Tensor) -> Tensor:
    rows = places.reshape(-1, places.shape[-1])
    return torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1)


def _to_places(latents: Tensor, size: Size) -> Tensor | None:
    """Return latents as (height, width, channels) in float64; None where they have no places of a picture."""
    x = latents[0].detach().to("cpu", torch.float64)
    if x.dim() == 3:
        return x.movedim(0, -1)
    if x.dim() != 2:
        return None
    width, height = size
    rows = next(iter(_find_rows(len(x), width, height)), 0)
    return x.reshape(rows, -1, x.shape[1]) if rows else None


def _find_rows(places: int, width: int, height: int) -> Iterator[int]:
    for rows in range(1, places + 1):
        if places % rows == 0 and rows * width == places // rows * height:
            yield rows
