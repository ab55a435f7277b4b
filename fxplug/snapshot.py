"""The files of an artifact as they were at one moment: each is opened once, and what is hashed is what is read."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from .errors import ArtifactError, printable, shown
from .folders import recovered
from .limits import DEFAULT, Limits
from .manifest import CODE, MANIFEST, listed, parse

TRIES = 100  # how often a folder may be replaced while its files are opened
PIECE = 1 << 24
HERE = os.open in os.supports_dir_fd and os.listdir in os.supports_fd  # files of an opened folder can be opened
# what safetensors calls the types; https://github.com/huggingface/safetensors#format
TYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32", "I16": "int16",
    "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
DTYPES: dict[str, torch.dtype] = {name: vars(torch)[value] for name, value in TYPES.items() if value in vars(torch)}


class Snapshot:
    """An artifact whose files are open: a save into its folder that ends later changes nothing here."""

    def __init__(self, files: dict[str, tuple[BinaryIO, str]], limits: Limits) -> None:
        self.files, self.limits = files, limits

    @property
    def weights(self) -> list[str]:
        return [name for name in self.files if name.endswith(".safetensors")]

    def json(self, name: str) -> dict[str, Any]:
        """The object in a file. Raises ArtifactError."""
        file, digest = self.files[name]
        data = _read_json(file, name, self.limits)
        _check(name, hashlib.sha256(data), digest)
        return parse(data, name, self.limits)

    def check(self, name: str) -> None:
        """Raises ArtifactError for a file that is not as it was written."""
        file, digest = self.files[name]
        found = hashlib.sha256()
        while piece := file.read(PIECE):
            found.update(piece)
        _check(name, found, digest)

    def tensors(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of a weight file in its order, on the CPU and in memory of their own. Raises ArtifactError.

        That the file is as it was written is known, and said, after the last one.
        """
        file, digest = self.files[name]
        found = hashlib.sha256()
        for key, dtype, shape, size in _header(file, name, found, self.limits):
            memory = torch.empty(size, dtype=torch.uint8)
            view = memory.numpy().data
            done = 0
            while done < size and (count := file.readinto(view[done : done + PIECE])):  # type: ignore[attr-defined]
                found.update(view[done : done + count])
                done += count
            if done < size:
                raise ArtifactError(f"{name} became shorter while it was read")
            # another byte than 0 or 1 is no bool, and torch does not look
            yield key, (memory.ne(0) if dtype is torch.bool else memory.view(dtype)).reshape(shape)
        _check(name, found, digest)


@contextlib.contextmanager
def snapshot(folder: Path, limits: Limits = DEFAULT) -> Iterator[Snapshot]:
    """The artifact in a folder, its files opened: one version of it, however often it is replaced meanwhile.

    Raises ArtifactError for what is no artifact, incomplete, newer than this version, or no plain file.
    """
    for attempt in range(TRIES):
        with contextlib.ExitStack() as stack:
            path = recovered(folder)
            home = _open_folder(path, stack)
            try:
                found = _open_files(path, home, stack, limits)
            except ArtifactError:
                if attempt + 1 < TRIES and _replaced(path, home):
                    continue
                raise
            yield found
            return


def _open_folder(folder: Path, stack: contextlib.ExitStack) -> int | None:
    if not folder.is_dir():
        raise ArtifactError(f"there is no folder {folder}")
    if not HERE:
        return None
    try:
        home = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ArtifactError(f"{folder} cannot be read: {error.strerror}") from None
    stack.callback(os.close, home)
    return home


def _replaced(folder: Path, home: int | None) -> bool:
    try:
        return home is None or not os.path.samestat(os.stat(folder), os.fstat(home))
    except OSError:
        return True


def _open_files(folder: Path, home: int | None, stack: contextlib.ExitStack, limits: Limits) -> Snapshot:
    try:
        names = os.listdir(folder if home is None else home)
    except OSError as error:
        raise ArtifactError(f"{folder} cannot be read: {error.strerror}") from None
    if MANIFEST not in names:
        raise ArtifactError(f"{folder} is no artifact: it has no {MANIFEST}")
    manifest = _open(folder, home, MANIFEST, stack)
    files = listed(parse(_read_json(manifest, MANIFEST, limits), MANIFEST, limits), folder)
    opened = {}
    for name, (size, digest) in files.items():
        file = _open(folder, home, name, stack)
        found = os.fstat(file.fileno()).st_size
        if found != size:
            what = "truncated: the copy is incomplete" if found < size else "longer than it was"
            raise ArtifactError(f"{name} has {found} bytes instead of {shown(size)}; it is {what}")
        opened[name] = (file, digest)
    for name in names:
        if name not in files and Path(name).suffix.lower() in CODE:
            raise ArtifactError(f"{printable(name)} lies in the artifact and is not listed: code has no place there; remove it")
    return Snapshot(opened, limits)


def _open(folder: Path, home: int | None, name: str, stack: contextlib.ExitStack) -> BinaryIO:
    """A plain file of the folder itself: no link that leads out of it, and nothing that waits or does something when opened."""
    where: Any = {} if home is None else {"dir_fd": home}
    path = name if home is not None else folder / name
    try:
        kind = os.stat(path, follow_symlinks=False, **where).st_mode
        if stat.S_ISLNK(kind):
            raise ArtifactError(f"{name} is a link, which leads out of the folder: an artifact's files lie in it themselves")
        if not stat.S_ISREG(kind):
            raise ArtifactError(f"{name} is no plain file")
        # it may have become something else meanwhile
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), **where)
    except FileNotFoundError:
        raise ArtifactError(f"{name} is missing from {folder}") from None
    except OSError as error:
        raise ArtifactError(f"{name} cannot be read: {error.strerror}") from None
    file = stack.enter_context(os.fdopen(handle, "rb", buffering=0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        raise ArtifactError(f"{name} is no plain file")
    return file


def _read_json(file: BinaryIO, name: str, limits: Limits) -> bytes:
    size = os.fstat(file.fileno()).st_size
    if size > limits.json:
        raise ArtifactError(f"{name} has {size} bytes; more than {limits.json} are not read")
    return _read(file, size, name)


def _read(file: BinaryIO, size: int, name: str) -> bytes:
    data = bytearray()
    try:
        while len(data) < size and (piece := file.read(size - len(data))):
            data += piece
    except OSError as error:
        raise ArtifactError(f"{name} cannot be read: {error.strerror}") from None
    if len(data) < size:
        raise ArtifactError(f"{name} became shorter while it was read")
    return bytes(data)


def _check(name: str, found: Any, digest: str) -> None:
    if found.hexdigest() != digest:
        raise ArtifactError(f"{name} is not as it was written: its SHA-256 differs from the manifest's")


def _header(file: BinaryIO, name: str, found: Any, limits: Limits) -> list[tuple[str, torch.dtype, list[int], int]]:
    """Name, dtype, shape and bytes of each tensor of a safetensors file, in the order in which they lie there."""
    size = os.fstat(file.fileno()).st_size
    start = _read(file, min(size, 8), name)
    length = int.from_bytes(start, "little")
    if size < 8 or length > size - 8:
        raise ArtifactError(f"{name} claims a header of {length} bytes, which a file of {size} bytes cannot have")
    if length > limits.json:
        raise ArtifactError(f"{name} has a header of {length} bytes; more than {limits.json} are not read")
    text = _read(file, length, name)
    found.update(start + text)
    records = parse(text, f"the header of {name}", limits)
    records.pop("__metadata__", None)
    if len(records) > limits.tensors:
        raise ArtifactError(f"{name} has {len(records)} tensors; more than {limits.tensors} are not read")
    rows, end = [], 0
    for key, record in sorted(records.items(), key=lambda item: _offsets(item, name)):
        begin, last = _offsets((key, record), name)
        dtype, shape = record.get("dtype"), record.get("shape")
        if type(dtype) is not str or dtype not in DTYPES:
            raise ArtifactError(f"{name}: {shown(key)} has the unknown type {shown(dtype)}")
        if type(shape) is not list or not all(type(n) is int and 0 <= n < 1 << 62 for n in shape) or len(shape) > limits.depth:
            raise ArtifactError(f"{name}: {shown(key)} has the shape {shown(shape)}")
        if begin != end or last - begin != math.prod(shape) * DTYPES[dtype].itemsize:
            raise ArtifactError(f"{name}: {shown(key)} lies at {begin} to {last}, where its {shown(shape)} do not fit")
        rows.append((key, DTYPES[dtype], shape, last - begin))
        end = last
    if end != size - 8 - length:
        raise ArtifactError(f"{name} has {size} bytes, and its header speaks of {8 + length + end}")
    return rows


def _offsets(item: tuple[str, Any], name: str) -> tuple[int, int]:
    key, record = item
    offsets = record.get("data_offsets") if type(record) is dict else None
    if type(offsets) is not list or len(offsets) != 2 or not all(type(n) is int and n >= 0 for n in offsets):
        raise ArtifactError(f"{name} does not say where {shown(key)} lies")
    return offsets[0], offsets[1]
