"""Files of weights: safetensors, and what `torch.save` wrote. Tensors and plain values come out; nothing in a file is run.

Which of the two a file is, its first bytes tell; the ending of its name is only held against them.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..errors import shown
from ..limits import DEFAULT, Limits
from . import torch_pickles
from .reading import Raises, about, begins, opened, parse_json

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "U16": torch.uint16,
    "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
PIECE = 1 << 24  # bytes that are read at once


@dataclass(frozen=True)
class Record:
    """A tensor of a safetensors file: where its bytes are, from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class Header:
    """What a safetensors file says is in it. `about` is its metadata.

    `start` is what the header was read from: the bytes before those of the first tensor.
    """

    records: Mapping[str, Record]
    about: Mapping[str, str]
    start: bytes

    def in_file(self) -> list[tuple[str, Record]]:
        """The records by where their bytes are."""
        return sorted(self.records.items(), key=lambda item: (item[1].offset, item[1].size))


def read(
    path: str | PathLike[str], *, raises: Raises | None = None, most: float = math.inf, limits: Limits = DEFAULT
) -> tuple[Any, dict[str, str]]:
    """The value of a file of weights on the CPU, and its metadata: tensors by name for safetensors, any value of `torch.save`.

    Tensors of more than `most` bytes are meta tensors of the same shapes, and not read; with -1 all are. Raises what `raises`
    makes (an ArtifactError that names the path) for a file that cannot be read, is damaged or something else, or is beyond
    `limits`.
    """
    raises = raises or about(path)
    with opened(path, raises=raises) as file:
        start = file.read(64)
        suffix = str(path).rpartition(".")[2].lower()
        sized = start[8:9] == b"{" and not any(start[4:8])  # behind the length of a header, whose first byte may be any
        if (start[:1] == b"\x80" and not sized) or start[:4] == b"PK\x03\x04":
            if start[:2] == b"PK" and suffix == "safetensors" and b"data.pkl" not in start:
                raise raises("is no safetensors file, but a zip archive: unpack it")
            if suffix == "safetensors":
                raise raises("is no safetensors file, it was written by torch.save: let its name end in .pt")
            return torch_pickles.load(file, raises, most=most, limits=limits), {}
        if not start:
            raise raises("cannot be read: it is empty")
        if what := "" if sized else begins(start):
            raise raises(f"cannot be read: it is {what}")
        if suffix != "safetensors" and start[8:9] != b"{":
            raise raises("cannot be read: it is neither a file of torch.save nor a safetensors file")
        head = header(file, raises, limits)
        found = dict(tensors(file, head, raises, most=most))
        return {name: found[name] for name in head.records}, dict(head.about)


def header(file: BinaryIO, raises: Raises, limits: Limits = DEFAULT) -> Header:
    """The header of a safetensors file, checked: every byte behind it belongs to one tensor, whose shape takes just so many.

    The file is left where the bytes of the first tensor begin.
    """
    total = file.seek(0, io.SEEK_END)
    file.seek(0)
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if total < 8 or length > total - 8:
        raise raises(f"cannot be read: it claims a header of {length} bytes, which a file of {total} bytes cannot have")
    if length > limits.json:
        raise raises(f"has a header of {length} bytes, and more than {limits.json} are not read; see Limits")
    start += file.read(length)
    found = parse_json(start[8:], lambda finding: raises(f"cannot be read: its header {finding}"), limits)
    if type(found) is not dict:
        raise raises("cannot be read: its header is no JSON object")
    said = found.pop("__metadata__", {})
    if type(said) is not dict or not all(type(value) is str for value in said.values()):
        raise raises("cannot be read: its metadata are not texts by name")
    if len(found) > limits.tensors:
        raise raises(f"has {len(found)} tensors, and more than {limits.tensors} are not read; see Limits")
    records = {name: _record(name, entry, 8 + length, raises, limits) for name, entry in found.items()}
    at = 8 + length
    head = Header(records, said, start)
    for name, record in head.in_file():
        if record.offset != at:
            raise raises(f"is damaged: the bytes of {shown(name)} do not begin where those before it end")
        at += record.size
    if at != total:
        what = "truncated" if at > total else "longer than its tensors"
        raise raises(f"is {what}: it has {total} bytes, and its header tells of {at}")
    return head


def tensors(
    file: BinaryIO, head: Header, raises: Raises, seen: Callable[[memoryview], object] = len, most: float = math.inf
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a safetensors file that `header` read, in the order of their bytes, on the CPU and in memory of their own.

    Those of more than `most` bytes are meta tensors, and not read. `seen` is called with all that is read, piece by piece.
    Raises what `raises` makes for a file that became shorter.
    """
    for name, record in head.in_file():
        if record.size > most:
            yield name, torch.empty(record.shape, dtype=record.dtype, device="meta")
            continue
        if most < math.inf:
            file.seek(record.offset)
        memory = torch.empty(record.size, dtype=torch.uint8)
        view = memory.numpy().data
        done = 0
        while done < record.size:
            count = file.readinto(view[done : done + PIECE])  # type: ignore[attr-defined]
            if not count:
                raise raises("became shorter while it was read")
            seen(view[done : done + count])
            done += count
        # another byte than 0 or 1 is no bool, and torch does not look
        yield name, (memory.ne(0) if record.dtype is torch.bool else memory.view(record.dtype)).reshape(record.shape)


def _record(name: str, entry: Any, start: int, raises: Raises, limits: Limits) -> Record:
    if len(name) > limits.text:
        raise raises(f"has a name of {len(name)} characters, and more than {limits.text} are not read; see Limits")
    if type(entry) is not dict or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise raises(f"is damaged: {shown(name)} has not just a dtype, a shape and data_offsets")
    dtype = DTYPES.get(entry["dtype"]) if type(entry["dtype"]) is str else None
    if dtype is None:
        raise raises(f"has {shown(name)} of the dtype {shown(entry['dtype'])}, which is not read")
    shape, offsets = entry["shape"], entry["data_offsets"]
    numbers = [shape, offsets] if type(shape) is type(offsets) is list and len(shape) <= 64 and len(offsets) == 2 else [[-1]]
    if not all(type(n) is int and 0 <= n < 1 << 62 for list_ in numbers for n in list_):
        raise raises(f"is damaged: the shape or place of {shown(name)} is none")
    size = math.prod(shape) * dtype.itemsize
    if math.prod(max(n, 1) for n in shape) >= 1 << 62 or size != offsets[1] - offsets[0]:
        took = offsets[1] - offsets[0]
        raise raises(f"is damaged: {shown(name)} has {took} bytes, which are not those of its shape {shown(shape)}")
    return Record(dtype, tuple(shape), start + offsets[0], size)
