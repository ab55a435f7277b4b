"""The log of a run as JSON lines. A killed run leaves it readable, a resumed one goes on with it."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..core.writing import replace_file

NO_NUMBERS = ("nan", "inf", "-inf")  # how a log has them: JSON has no word for them


class Lines:
    """A file of JSON lines, each whole in the file before `write` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record. Numbers that JSON lacks are written as text (`"nan"`), tensors of one element as numbers.

        Raises OSError when the disk is full. The partial line is then removed: the file stays readable, and a later write may
        succeed.
        """
        _append(self.path, json.dumps(convert_plain(record)).encode() + b"\n")

    def read(self) -> list[dict[str, Any]]:
        """Return all records; a last line that a killed process did not finish is left out."""
        text = self.path.read_bytes() if self.path.is_file() else b""
        records = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n")]
        return [{key: float(v) if v in NO_NUMBERS else v for key, v in record.items()} for record in records]

    @property
    def length(self) -> int:
        """Length in bytes of the complete records."""
        return self.path.stat().st_size if self.path.is_file() else 0

    def cut(self, length: int) -> bytes:
        """Truncate to `length` bytes, without an incomplete last line; atomically. Returns the lines that were dropped."""
        text = self.path.read_bytes() if self.path.is_file() else b""
        whole = text[: text.rfind(b"\n") + 1]
        kept = whole[:length][: whole[:length].rfind(b"\n") + 1]
        if kept != text:
            with replace_file(self.path) as beside:
                beside.write_bytes(kept)
        return whole[len(kept) :]


def _append(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            with suppress(OSError):
                file.truncate(end)
            raise


def convert_plain(value: Any) -> Any:
    """Convert a value to what JSON can represent."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): convert_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [convert_plain(item) for item in value]
    return value if isinstance(value, (bool, int, str, type(None))) else str(value)
