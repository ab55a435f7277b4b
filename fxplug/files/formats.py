"""The version that a file of ours says it has: one that a later fxplug wrote is refused before it is misread."""

from __future__ import annotations

from typing import Any

from ..errors import shown
from .reading import Raises


def check_format(manifest: Any, newest: int, raises: Raises) -> None:
    """Raises what `raises` makes unless a manifest, an object with `format`, is of a version up to `newest`.

    `fxplug`, where it has that, is the version that wrote it.
    """
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if type(version) is not int or version < 1:
        raise raises(f"cannot be read: its manifest has the format {shown(version)}, which is no version")
    if version > newest:
        writer = f", written by fxplug {shown(str(manifest['fxplug']))[1:-1]}" if "fxplug" in manifest else ""
        raise raises(f"has format {shown(version)}{writer}; this version reads up to {newest}: update fxplug")
