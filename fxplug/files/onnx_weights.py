"""The weights and the metadata of an ONNX file, read from its bytes: no other of its messages is looked into."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ..errors import shown
from ..limits import DEFAULT, Limits
from .reading import Raises, begins, opened, size_of

# ONNX's TensorProto.DataType -> dtype, and the field that holds such numbers where `raw_data` does not
DTYPES = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 4: torch.uint16, 5: torch.int16, 6: torch.int32, 7: torch.int64,
    9: torch.bool, 10: torch.float16, 11: torch.float64, 14: torch.complex64, 16: torch.bfloat16,
}  # fmt: skip
PACKED = {4: torch.float32, 10: torch.float64}
VARINTS = {5: (torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool), 7: (torch.int64,)}
RAW, PLACE, EXTERNAL = 9, 13, 14
METADATA = 14  # of a model
WORD = (1 << 64) - 1
STEPS = 4  # operations of a pickle that a field takes as long as


def read(path: Path, raises: Raises, *, meta: bool = False, limits: Limits = DEFAULT) -> dict[str, Tensor]:
    """The initializers of an ONNX graph by name, on the CPU or as meta tensors. Raises what `raises` makes.

    The exporter renames a transposed weight `onnx::MatMul_7`: its name is taken from the node that uses it,
    `/blocks.0/mlp/fc1/MatMul`, and it is turned back: `blocks.0.mlp.fc1.weight`.
    """
    with opened(path, raises=raises) as file:
        reader = _Reader(file, raises, limits)
        tensors: dict[str, Tensor] = {}
        renamed: dict[str, str] = {}
        for number, span in reader.fields((0, size_of(file))):
            if number != 7 or not isinstance(span, tuple):  # the graph
                continue
            for part, inner in reader.fields(span):
                if part == 5 and isinstance(inner, tuple):
                    name, tensor = reader.tensor(inner, meta)
                    if name in tensors or len(tensors) >= limits.tensors:
                        raise raises(f"cannot be read: it has {shown(name)} twice, or more than {limits.tensors} tensors")
                    tensors[name] = tensor
                elif part == 1 and isinstance(inner, tuple) and (found := reader.node(inner)):
                    renamed.setdefault(*found)
    if not tensors:
        raise raises("cannot be read: it is no ONNX file, or one without weights")
    for name, new in renamed.items():
        if name in tensors and tensors[name].dim() == 2 and new not in tensors:
            tensors[new] = tensors.pop(name).t()
    return tensors


def metadata(file: BinaryIO, raises: Raises, limits: Limits = DEFAULT) -> dict[str, bytes]:
    """The metadata of an ONNX model by key, each value at most `limits.json` bytes; of a key that is there twice, the first."""
    reader = _Reader(file, raises, limits)
    found: dict[str, bytes] = {}
    for number, span in reader.fields((0, size_in(file))):
        if number == METADATA and isinstance(span, tuple):
            key, value = reader.pair(span)
            found.setdefault(key, value)
    return found


@dataclass
class Beside:
    """The file that a model's weights lie in: its name in the model, and the opened file."""

    name: str
    file: BinaryIO


def initializers(
    file: BinaryIO, raises: Raises, names: Set[str], beside: Beside | None = None, limits: Limits = DEFAULT
) -> dict[str, Tensor]:
    """Some initializers of an ONNX model by name, from its file or the one beside it. Raises what `raises` makes."""
    reader = _Reader(file, raises, limits, beside)
    tensors: dict[str, Tensor] = {}
    for number, span in reader.fields((0, size_in(file))):
        for part, inner in reader.fields(span) if number == 7 and isinstance(span, tuple) else ():
            if part == 5 and isinstance(inner, tuple) and (name := reader.name(inner)) in names:
                if name in tensors:
                    raise raises(f"cannot be read: it has {shown(name)} twice")
                tensors[name] = reader.tensor(inner, False)[1]
    if len(tensors) < len(names):
        raise raises(f"cannot be read: it has no {shown(min(names - tensors.keys()))}, which its metadata lists")
    return tensors


def size_in(file: BinaryIO) -> int:
    """The size of what can be read: a file, or bytes in memory."""
    return file.seek(0, os.SEEK_END)


Span = tuple[int, int]  # from this byte of the file to that


@dataclass
class _Reader:
    """Reads the fields of protobuf messages."""

    file: BinaryIO
    raises: Raises
    limits: Limits
    beside: Beside | None = None
    seen: int = field(default=0)

    def broken(self) -> Exception:
        self.file.seek(0)
        what = begins(self.file.read(64))
        it = what if what and not what.startswith("an ONNX") else "no ONNX file, or truncated"
        return self.raises(f"cannot be read: it is {it}")

    def varint(self, end: int) -> int:
        value = shift = 0
        while self.file.tell() < end and shift < 64:
            byte = self.file.read(1)[0]
            value |= (byte & 127) << shift
            if byte < 128:
                return value & WORD
            shift += 7
        raise self.broken()

    def fields(self, span: Span) -> Iterator[tuple[int, int | Span]]:
        """The fields of a message: a number, or where a text, a message or packed numbers are."""
        at, end = span
        while at < end:
            self.seen += STEPS
            if self.seen > self.limits.opcodes:
                most = self.limits.opcodes // STEPS
                raise self.raises(f"has more than {most} fields, and so many are not read; see Limits")
            self.file.seek(at)
            tag = self.varint(end)
            kind, value = tag & 7, 0
            if kind == 0:
                value = self.varint(end)
            length = {0: 0, 1: 8, 2: 0, 5: 4}.get(kind)
            if length is None or tag < 8:
                raise self.broken()
            if kind == 2:
                length = self.varint(end)
            start = self.file.tell()
            at = start + length
            if at > end:
                raise self.broken()
            yield tag >> 3, value if kind == 0 else (start, at)

    def data(self, span: int | Span, limit: int) -> bytes:
        if not isinstance(span, tuple) or span[1] - span[0] > limit:
            raise self.raises(f"cannot be read: it has a name or list of more than {limit} bytes; see Limits")
        self.file.seek(span[0])
        return self.file.read(span[1] - span[0])

    def text(self, span: int | Span) -> str:
        return self.data(span, self.limits.text).decode("utf-8", "replace")

    def numbers(self, span: int | Span) -> list[int]:
        """Whole numbers, one or packed; those below zero have 64 bits."""
        if isinstance(span, int):
            return [span - (1 << 64) if span >> 63 else span]
        data = self.data(span, 1 << 16)
        made, value, shift = [], 0, 0
        for byte in data:
            value |= (byte & 127) << shift & WORD
            shift += 7
            if byte < 128:
                made.append(value - (1 << 64) if value >> 63 else value)
                value = shift = 0
            elif shift > 63:
                raise self.broken()
        return made

    def pair(self, span: Span) -> tuple[str, bytes]:
        """A key and its value."""
        key, value = "", b""
        for number, inner in self.fields(span):
            if number == 1:
                key = self.text(inner)
            elif number == 2:
                value = self.data(inner, self.limits.json)
        return key, value

    def name(self, span: Span) -> str:
        """The name of a TensorProto."""
        return next((self.text(value) for number, value in self.fields(span) if number == 8), "")

    def node(self, span: Span) -> tuple[str, str] | None:
        """For a MatMul with a nameless weight, that weight and what its name would be."""
        inputs: list[str] = []
        name, kind = "", ""
        for number, value in self.fields(span):
            if number == 1 and len(inputs) < 3:
                inputs.append(self.text(value))
            elif number == 3:
                name = self.text(value)
            elif number == 4:
                kind = self.text(value)
        if kind != "MatMul" or len(inputs) != 2 or not inputs[1].startswith("onnx::"):
            return None
        path = name.removeprefix("/").rpartition("/")[0].replace("/", ".")
        return inputs[1], f"{path}.weight"

    def tensor(self, span: Span, meta: bool) -> tuple[str, Tensor]:
        """The name and the value of a TensorProto."""
        shape: list[int] = []
        name, kind, data, where = "", 0, None, 0
        place: dict[str, bytes] = {}
        for number, value in self.fields(span):
            if number == 1:
                shape += self.numbers(value)
            elif number == 2 and isinstance(value, int):
                kind = value
            elif number == 8:
                name = self.text(value)
            elif number == PLACE and isinstance(value, tuple):
                place.update([self.pair(value)])
            elif number == EXTERNAL and self.beside is None:
                raise self.raises("has its weights in another file: save it as one file, without external data")
            elif number in (RAW, *PACKED, *VARINTS):
                data, where = value, number if data is None else -1
        dtype = DTYPES.get(kind)
        sound = len(shape) <= 64 and min(shape, default=0) >= 0 and math.prod(max(n, 1) for n in shape) < 1 << 58
        if dtype is None or not sound or where not in (0, RAW) and dtype not in (PACKED.get(where), *VARINTS.get(where, ())):
            raise self.raises(f"cannot be read: {shown(name)} has a dtype, a shape or a form that is not read")
        count = math.prod(shape)
        if where in VARINTS and data is not None:
            values = self.numbers(data)
            if len(values) != count:
                raise self.raises(f"cannot be read: {shown(name)} has {len(values)} numbers, its shape {count}")
            made = torch.tensor(values, dtype=torch.int64).to(dtype).reshape(shape)
            return name, made.to("meta") if meta else made
        begin, end = data if isinstance(data, tuple) else (0, 0)
        file = self.file
        if place and self.beside is not None:
            file, (begin, end) = self.beside.file, self.outside(place, name)
        if end - begin != count * dtype.itemsize:
            raise self.raises(f"cannot be read: {shown(name)} has {end - begin} bytes, its shape {shown(shape)} takes others")
        made = torch.empty(shape, dtype=dtype, device="meta" if meta else "cpu")
        if count and not meta:
            file.seek(begin)
            file.readinto(made.view(-1).view(torch.uint8).numpy().data)  # type: ignore[attr-defined]
        return name, made

    def outside(self, place: dict[str, bytes], name: str) -> Span:
        """The part of the file beside that a tensor is said to be. Raises for another file, and for what is not in it."""
        assert self.beside is not None
        numbers = [place.get(key, b"") for key in ("offset", "length")]
        if place.get("location") == self.beside.name.encode() and all(n.isdigit() and len(n) < 20 for n in numbers):
            begin, length = map(int, numbers)
            if begin + length <= size_in(self.beside.file):
                return begin, begin + length
        raise self.raises(f"cannot be read: {shown(name)} is said to lie where no weights of it are")
