"""Files that torch and safetensors write: a full disk is an OSError then, and neither a text nor the end of the process."""

from __future__ import annotations

import contextlib
import io
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor

from ..errors import ArtifactError
from .reading import about
from .weight_files import PIECE, header


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
        """Hand bytes on, none after the first error; gives how many were given."""
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


def check_folder(folder: Path, raises: Callable[[str], Exception]) -> None:
    """Raises what `raises` makes of a finding where a folder is not there and cannot be made, before anything is worked out."""
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        why = f"{there} is not a folder" if there.exists() else f"{there} is a link to nothing"
        raise raises(why if there == folder else f"'{folder}' cannot be made: {why}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise raises(f"'{folder}' cannot be written: '{there}' is not open to you")


def save_file(tensors: dict[str, Tensor], path: str | os.PathLike[str], about: dict[str, str] | None = None) -> None:
    """Write a safetensors file, `about` its metadata. Raises OSError where that failed, which safetensors tells as text."""
    try:
        safetensors.save_file(tensors, path, about)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None


def linked(tensors: dict[str, Tensor], old: Path, new: Path) -> bool:
    """Give a safetensors file that holds these tensors and nothing else a second name; False where `old` is no such file.

    Nothing is written then, however large it is. Every byte of it is compared.
    """
    with contextlib.suppress(OSError, ArtifactError):
        handle = os.open(old, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode) or not _holds(file, tensors, old):
                return False
            os.link(old, new, follow_symlinks=False)
            if os.path.samestat(os.fstat(handle), os.lstat(new)):
                return True
            new.unlink()  # another file had taken that name
    return False


def _holds(file: BinaryIO, tensors: dict[str, Tensor], name: Path) -> bool:
    head = header(file, about(name))
    wanted = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}
    if {key: (record.dtype, tuple(record.shape)) for key, record in head.records.items()} != wanted:
        return False
    buffer = torch.empty(PIECE, dtype=torch.uint8)
    for key, record in head.in_file():
        ours = tensors[key].reshape(-1).view(torch.uint8)
        for begin in range(0, record.size, PIECE):
            piece = ours[begin : begin + PIECE]
            theirs = buffer[: len(piece)]
            if file.readinto(theirs.numpy().data) < len(piece) or not torch.equal(theirs, piece):  # type: ignore[attr-defined]
                return False
    return True
