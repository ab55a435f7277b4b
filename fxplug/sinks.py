"""Files that torch and safetensors write: a full disk is an OSError then, and neither a text nor the end of the process."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from safetensors import SafetensorError, torch
from torch import Tensor


class Sink(io.RawIOBase):
    """Takes all that is written to it, and keeps the first error for the end.

    torch's writer of archives throws an error a second time while it is being destroyed, which ends the process.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """torch goes back to the beginning of what it wrote; nothing is read from here."""
        return 0

    def write(self, data: Any, /) -> int:
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        return memoryview(data).nbytes


@contextlib.contextmanager
def written(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A new file as torch can write it. Raises OSError at the end where that failed."""
    with Path(path).open("wb") as file:
        sink = Sink(file)
        yield cast(IO[bytes], sink)
        if sink.error is not None:
            raise sink.error
        file.flush()
        os.fsync(file.fileno())


def save_file(tensors: dict[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Write a safetensors file. Raises OSError where that failed, which safetensors tells as text."""
    try:
        torch.save_file(tensors, path)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
