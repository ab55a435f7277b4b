"""What models beside the trained one have made of pictures and captions, on the disk: made once, for all runs and processes."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import warnings
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core import reading, weight_files
from ..core.errors import ArtifactError
from ..core.writing import Folder
from .data.image_sources import compute_key_digest
from .run_folder import FULL
from .train_section import Data

MEMORY = 256 << 20  # bytes
FORMAT = 1  # of the entries; those of another are not looked at
DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}


class EncodedCache:
    """Values by key, one file each, in a folder that runs and processes share.

    Values are tensors on the CPU, and mappings, lists, tuples, text and numbers of them. An entry is there whole or not at all:
    processes may write the same one at once, or be killed. One that is damaged is made anew. What cannot be written is said
    once, and no more is written from then on. `maker` names what makes the values (`digest_models`): entries of another maker
    are others. Keys are plain values of JSON. The newest `memory` bytes of values are kept in memory too: who changes a tensor
    of a value in place changes what the next `get` gives. Picklable; a copy says things by `warnings`.
    """

    def __init__(
        self, folder: str | Path, maker: str, note: Callable[[str], object] | None = None, memory: int = MEMORY
    ) -> None:
        self.folder, self.maker, self.note, self.memory = Path(folder), maker, note or warnings.warn, memory
        self.writable = True
        self._broken = False
        self._place = self.folder / f"v{FORMAT}" / hashlib.sha256(maker.encode()).hexdigest()[:32]
        self._work: Path | None = None  # where this process writes its files
        self._counter = itertools.count()
        self._kept, self._bytes = OrderedDict[str, _CacheEntry](), 0

    def __reduce__(self) -> Any:
        return EncodedCache, (self.folder, self.maker)

    def path(self, key: Any) -> Path:
        """Return the file of an entry."""
        return Path(self._path(compute_key_digest(key)))

    def _path(self, name: str) -> str:
        return f"{self._place}/{name[:2]}/{name[2:]}.safetensors"

    def has(self, key: Any) -> bool:
        """Return whether there is a file for an entry, which `get` may still find damaged."""
        return os.path.isfile(self._path(compute_key_digest(key)))

    def get(self, key: Any) -> Any:
        """Return the value of a key; None where there is none that can be used."""
        name = compute_key_digest(key)
        if name in self._kept:
            self._kept.move_to_end(name)
            return self._kept[name].value()
        path = self._path(name)
        if not os.path.isfile(path):
            return None
        try:
            found = _read(Path(path), name)
            self._keep(name, found)
            return found.value()
        except ArtifactError as error:
            if os.path.isfile(path) and not self._broken:  # else another process has removed it
                self._broken = True
                self.note(f"a file of the cache is unusable; it is written again: {error}")
            return None

    def put(self, key: Any, value: Any) -> bool:
        """Write the value of a key, or leave the entry as it was. Returns whether it is written."""
        tensors: dict[str, Tensor] = {}
        try:
            entry = _CacheEntry(json.dumps(_encode_structure(value, tensors, set())), tensors)
        except _Unknown as error:
            self._stop(f"the cache cannot store a {error}: the run continues without it")
            return False
        name = compute_key_digest(key)
        self._keep(name, entry)
        if not self.writable:
            return False
        try:
            self._write(Path(self._path(name)), entry, name)
            return True
        except OSError as error:
            cure = "free some space, or set" if error.errno in FULL else "set"
            self._stop(
                f"the cache in '{self.folder}' cannot be written: {reading.get_reason(error)}. The run continues and encodes "
                f"what is missing: {cure} 'cache' in the section 'data' to a folder elsewhere, or to false"
            )
            return False

    def _write(self, path: Path, entry: _CacheEntry, name: str) -> None:
        """Write an entry beside the others, then put it in its place."""
        for again in (False, True):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                file = self._work_folder() / f"{next(self._counter)}.safetensors"
                try:
                    weight_files.save_file(entry.tensors, file, entry.about(name))
                    os.replace(file, path)
                finally:
                    file.unlink(missing_ok=True)
                return
            except FileNotFoundError:  # the cache was cleared meanwhile
                if again:
                    raise
                self._work = None

    def _work_folder(self) -> Path:
        """Return this process's folder below the cache; the next one removes it where this one is killed."""
        if self._work is None:
            made = Folder(".writing-", self._place)
            weakref.finalize(self, _remove, made, os.getpid())
            self._work = made.path
        return self._work

    def _keep(self, name: str, entry: _CacheEntry) -> None:
        """Keep an entry in memory, and forget the oldest of more than `memory` bytes."""
        old = self._kept.pop(name, None)
        self._kept[name] = entry
        self._bytes += entry.bytes - (old.bytes if old else 0)
        while self._bytes > self.memory:
            self._bytes -= self._kept.popitem(last=False)[1].bytes

    def get_or_make(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the value of a key; one that is not there is made and written."""
        value = self.get(key)
        if value is None:
            value = make()
            self.put(key, value)
        return value

    def _stop(self, finding: str) -> None:
        self.writable = False
        self.note(finding)


def open_cache(
    data: Data, base: Path, maker: str, note: Callable[[str], object] | None = None
) -> EncodedCache | None:
    """Open the cache that a `data` section names: a folder relative to `base`, by default one below the user's cache folder.

    Returns None for `cache: false`, and where there is no such folder.
    """
    if data.cache is False:
        return None
    folder = default_folder() if data.cache is None else base / os.path.expanduser(data.cache)
    return None if folder is None else EncodedCache(folder, maker, note)


def default_folder() -> Path | None:
    """Return the folder `fxplug/encoded` below the user's cache folder; None for a user without a home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    top = given if os.path.isabs(given) else os.path.expanduser("~/.cache")  # as its standard has it: others are ignored
    return Path(top) / "fxplug" / "encoded" if os.path.isabs(top) else None


def _remove(folder: Folder, process: int) -> None:
    """Remove a process's folder, but not from a forked process."""
    if os.getpid() == process:
        folder.remove()


def _sum(tensor: Tensor) -> int:
    """Return a checksum of a tensor's dtype, shape and bytes."""
    start = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, start) if tensor.numel() else start


@dataclass(frozen=True)
class _CacheEntry:
    """A value in parts: its structure as JSON, and the tensors that this names."""

    structure: str
    tensors: dict[str, Tensor]

    @property
    def bytes(self) -> int:
        return len(self.structure) + sum(tensor.nbytes for tensor in self.tensors.values())

    def value(self) -> Any:
        return _decode_structure(json.loads(self.structure), self.tensors)

    def about(self, name: str) -> dict[str, str]:
        """Return the metadata of the file of an entry: its name, its structure, and sums of all its bytes."""
        sums = {key: _sum(tensor) for key, tensor in self.tensors.items()}
        sum_ = str(zlib.crc32(self.structure.encode()))
        return {"key": name, "value": self.structure, "sum": sum_, "sums": json.dumps(sums)}


class _Unknown(Exception):
    """A value of a kind that is not stored."""


def _encode_structure(value: Any, tensors: dict[str, Tensor], storages: set[int]) -> Any:
    """Return a value in JSON's terms, its tensors put into `tensors` and named. Raises _Unknown."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return ["float", value.hex()]
    if type(value) is dict and all(type(key) is str for key in value):
        return ["dict", [[key, _encode_structure(item, tensors, storages)] for key, item in value.items()]]
    if type(value) in (list, tuple, torch.Size):
        return ["list" if type(value) is list else "tuple", [_encode_structure(item, tensors, storages) for item in value]]
    if type(value) is torch.dtype:
        return ["dtype", str(value).removeprefix("torch.")]
    plain = type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.is_meta
    if not plain or value.is_quantized:
        raise _Unknown(f"{type(value).__module__}.{type(value).__qualname__}")
    tensor = weight_files.separate(value.detach().resolve_conj().resolve_neg(), storages)
    name, shape, dtype = str(len(tensors)), list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    known = tensor.dtype in weight_files.DTYPES.values()
    tensors[name] = tensor if known else tensor.reshape(-1).view(torch.uint8)
    return ["tensor", name, shape, dtype]


def _decode_structure(found: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the value that `_encode_structure` made `found` of."""
    if not isinstance(found, list):
        return found
    match found:
        case ["float", text]:
            return float.fromhex(text)
        case ["dict", pairs]:
            return {key: _decode_structure(item, tensors) for key, item in pairs}
        case ["list", items]:
            return [_decode_structure(item, tensors) for item in items]
        case ["tuple", items]:
            return tuple(_decode_structure(item, tensors) for item in items)
        case ["dtype", name]:
            return DTYPES[name]
        case ["tensor", name, shape, dtype]:
            return tensors[name].view(DTYPES[dtype]).reshape(shape)
    raise ValueError(found)


def _read(path: Path, name: str) -> _CacheEntry:
    """Read an entry from a file, all of it checked. Raises ArtifactError."""
    raises = reading.make_reporter(path)
    with reading.open_regular_file(path, raises=raises) as file:
        head = weight_files.read_header(file, raises)
        if head.about.get("key") != name:
            raise raises("does not match its name")
        entry = _CacheEntry(head.about.get("value", ""), dict(weight_files.read_tensors(file, head, raises)))
    if entry.about(name) == head.about:
        with contextlib.suppress(LookupError, ValueError, TypeError, RuntimeError):
            entry.value()
            return entry
    raise raises("is damaged: its bytes have changed since it was written")
