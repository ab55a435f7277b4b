"""What plugins return: checked, and brought to one form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor, nn

from ..errors import did_you_mean

Array = np.ndarray[Any, Any]


def as_text(result: Any, given: Any) -> Any:
    """What a plugin returns for a caption. TypeError for what is not of the kind of `given`."""
    kind = str if isinstance(given, str) else object
    if result is None or not isinstance(result, kind):
        raise _wrong(result, f"a {kind.__name__}: the value, changed or not")
    return result


def checked_image(result: Any, given: Array) -> Array:
    """What a plugin returns for an image uint8 [h, w, c] or [h, w], in that form.

    It may be an array, with floats from 0 to 1 also, or a PIL image. TypeError for anything else.
    """
    if isinstance(result, Image.Image):
        return np.array(result.convert("L" if given.ndim == 2 else "RGB"))
    if not isinstance(result, np.ndarray):
        raise _wrong(result, "an image: an array or a PIL image")
    if result.ndim != given.ndim or result.shape[2:] != given.shape[2:]:
        raise TypeError(f"it returned an array of shape {list(result.shape)} for one of shape {list(given.shape)}")
    if np.issubdtype(result.dtype, np.floating):
        low, high = float(result.min()), float(result.max())
        if not 0 <= low <= high <= 1:
            raise TypeError(f"it returned floats from {low:.4g} to {high:.4g}; floats go from 0 to 1, uint8 to 255")
        scaled: Array = np.rint(result * 255).astype(np.uint8)
        return scaled
    if result.dtype != np.uint8:
        raise TypeError(f"it returned an array of {result.dtype}; an image is uint8, or floats from 0 to 1")
    return result


def put_gradients(module: nn.Module, result: Any) -> None:
    """Give parameters of a module the gradients that a plugin returned by their names. TypeError for anything else."""
    if not isinstance(result, Mapping):
        raise _wrong(result, "nothing, or gradients by the names of their parameters")
    named = dict(module.named_parameters())
    for name, gradient in result.items():
        if name not in named:
            raise TypeError(f"it returned a gradient of '{name}', which is no parameter{did_you_mean(name, named)}")
        if gradient is not None and not (isinstance(gradient, Tensor) and gradient.shape == named[name].shape):
            found = list(gradient.shape) if isinstance(gradient, Tensor) else type(gradient).__name__
            raise TypeError(f"it returned {found} as the gradient of '{name}', which has the shape {list(named[name].shape)}")
    for name, gradient in result.items():
        named[name].grad = gradient


def _wrong(result: Any, wanted: str) -> TypeError:
    found = "nothing" if result is None else f"a {type(result).__name__}"
    return TypeError(f"it returned {found}, but must return {wanted}")
