"""Samples that become a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from ...core.errors import TrainError, quote
from .image_files import rescale
from .image_sources import IMAGES, PlacedImage

NUMBERS = {"loss_scale": torch.float32, "cond_dropout": torch.float32, "label": torch.int64, "index": torch.int64}


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Collate samples into one dict of batched values.

    `image`, `condition` and `loss_mask` are stacked to float32 [b, c, h, w], `video` to [b, c, f, h, w]; uint8 becomes [-1, 1],
    of a condition or mask [0, 1]. Text, and images that are not decoded, become a list, `label` and `index` int64 [b], the rest
    what torch's default_collate makes of it. Raises TrainError for samples that cannot be collated.
    """
    first = samples[0]
    for sample in samples[1:]:
        if sample.keys() != first.keys():
            key = sorted(map(str, sample.keys() ^ first.keys()))[0]
            has, lacks = (sample, first) if key in sample else (first, sample)
            raise TrainError(f"{has['name']} has '{key}' and {lacks['name']} does not")
    return {key: collate_key(key, [sample[key] for sample in samples], samples) for key in first}


def collate_key(key: str, values: list[Any], samples: Sequence[dict[str, Any]]) -> Any:
    """Collate the values of one key. `samples` give the names for errors. Raises TrainError."""
    if isinstance(values[0], (str, PlacedImage)):
        return values
    if key in NUMBERS:
        return torch.stack([_read(key, value, sample) for value, sample in zip(values, samples, strict=True)])
    if key in IMAGES and isinstance(values[0], Tensor):
        for value, sample in zip(values, samples, strict=True):
            if value.shape != values[0].shape or value.dtype != values[0].dtype:
                one, two = (f"{s['name']} ({_described(v)})" for v, s in ((values[0], samples[0]), (value, sample)))
                raise TrainError(f"the {key}s of a batch must have one size and dtype: {one}, {two}; set 'size' to resize them")
        return rescale(key, torch.stack(values))
    try:
        return default_collate(values)
    except Exception as error:  # torch's, about samples of the user's
        raise TrainError(
            f"the values of '{key}' cannot be collated into a batch: {error}; samples from {samples[0]['name']}"
        ) from error


def _read(key: str, value: Any, sample: dict[str, Any]) -> Tensor:
    """Return a number of a sample as a scalar tensor. Raises TrainError for anything else, which a data set may give."""
    try:
        return torch.tensor(value, dtype=NUMBERS[key]).reshape(())
    except (TypeError, ValueError, RuntimeError, OverflowError):
        whole = "" if NUMBERS[key].is_floating_point else " whole"
        raise TrainError(f"{sample['name']}: '{key}' must be a{whole} number, not {quote(value)}") from None


def _described(value: Tensor) -> str:
    return "x".join(map(str, value.shape)) + f" {str(value.dtype).removeprefix('torch.')}"


def pair_with_prior(sample: dict[str, Any], prior: dict[str, Any], weight: float) -> None:
    """Mark a sample and a prior image that goes with it, and give each what the other alone has, where that has a default.

    A prior image without a mask counts everywhere.
    """
    sample["prior"], prior["prior"] = False, True
    sample["loss_scale"], prior["loss_scale"] = sample.get("loss_scale", 1.0), prior.get("loss_scale", 1.0) * weight
    if "cond_dropout" in sample or "cond_dropout" in prior:
        for one in (sample, prior):
            one.setdefault("cond_dropout", math.nan)
    if isinstance(mask := sample.get("loss_mask"), Tensor):
        prior.setdefault("loss_mask", torch.full_like(mask, 1.0 if mask.is_floating_point() else 255))
