"""The digest of the weights that an adapter was made beside: its file names it, and a load on other weights warns."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from ..core.errors import quote
from .file_tensors import explain_unreadable

DIGEST, LAYERS = "fxplug.base", "fxplug.base_layers"  # keys of a file's metadata
NUMBERS = 4096  # of each weight so many are read, evenly spaced: those of another base differ nearly everywhere


def digest_of(layers: Iterable[str], there: Callable[[str], Tensor | None]) -> str:
    """Return the digest of some layers' weights, or of parameters: of names, shapes, dtypes and a sample of their numbers.

    `there` returns a parameter by its name. Returns "" if one is missing, has no values, or is packed (quantised).
    """
    found = hashlib.sha256()
    for path in sorted(layers):
        value = there(f"{path}.weight")
        value = there(path) if value is None else value  # a parameter that is no layer's weight
        if value is None or value.is_meta or not value.is_floating_point() or explain_unreadable(value):
            return ""
        flat = value.detach().flatten()
        sample = flat[:: max(1, flat.numel() // NUMBERS)][: 2 * NUMBERS].cpu().contiguous()
        found.update(repr((path, tuple(value.shape), str(value.dtype))).encode())
        found.update(sample.view(torch.uint8).numpy().tobytes())
    return f"sha256:{found.hexdigest()}"


def describe_base(layers: Iterable[str], there: Callable[[str], Tensor | None]) -> dict[str, str]:
    """Return the metadata of an adapter file that identifies its base; empty if that has no digest."""
    paths = sorted(set(layers))
    found = digest_of(paths, there) if paths else ""
    return {DIGEST: found, LAYERS: "\n".join(paths)} if found else {}


def warn_on_other_base(source: str, about: Mapping[str, object], there: Callable[[str], Tensor | None]) -> None:
    """Warn if a file has the digest of its base's weights, and the weights of these layers here have another."""
    said, layers = about.get(DIGEST), about.get(LAYERS)
    if not (isinstance(said, str) and isinstance(layers, str)):
        return
    here = digest_of(layers.split("\n"), there)
    if here and here != said:
        warnings.warn(
            f"{source} was made beside weights with the digest {quote(said, 80)}, and those of its layers here have {here}: "
            "this is another base model, or the same in another dtype, so the adapter may have another effect",
            stacklevel=3,
        )
