"""What `torch.save` wrote, read without unpickling: an interpreter of the few operations that weights are made of.

No class or function is looked up by the name that a file gives. A name is a word; those in the tables here have a meaning, and
any other is the end of reading. Tensors come from the bytes of the file and never have more elements than it has bytes for.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..errors import shown
from ..limits import DEFAULT, Limits
from .reading import Raises, size_of
from .zip_archives import Archive

MAGIC = 0x1950A86A20F9469CFC6C  # the first number of a file of torch before 1.6
STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32, "ShortStorage": torch.int16,
    "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128, "UntypedStorage": torch.uint8,
}  # fmt: skip
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
KEYS = (str, int, float, bool, type(None))  # what may be a key; a tuple of tuples can take forever to hash


def load(file: BinaryIO, raises: Raises, *, most: float = math.inf, limits: Limits = DEFAULT) -> Any:
    """The value of a file of `torch.save`: tensors on the CPU in dicts, lists, tuples, and plain values.

    Those in a memory of more than `most` bytes are meta tensors of the same shapes, and their weights are not read. Raises what
    `raises` makes for a file that is damaged, holds anything else, or is beyond `limits`.
    """
    file.seek(0)
    start = file.read(4)
    file.seek(0)
    if start == b"PK\x03\x04":
        return _load_archive(file, raises, most, limits)
    if start[:1] != b"\x80":
        raise raises("cannot be read: it is no file of torch.save" if start else "cannot be read: it is empty")
    return _load_stream(file, raises, most, limits)


def _load_archive(file: BinaryIO, raises: Raises, most: float, limits: Limits) -> Any:
    held = Archive(file, raises, limits).members
    roots = [name.removesuffix("data.pkl") for name in held if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(roots) != 1:
        found = shown(", ".join(list(held)[:6]), 200)
        raise raises(f"is an archive without a 'data.pkl', no file of torch.save; it has {found}")
    (root,) = roots
    order = held.get(f"{root}byteorder")
    if order is not None:
        file.seek(order.start)
        if file.read(min(order.size, 8)) != b"little":
            raise raises("was written on a machine with another order of bytes")
    program = held[f"{root}data.pkl"]
    file.seek(program.start)
    made = _Interpreter(file, raises, most, limits, program.start + program.size)
    value = made.run()
    for key, storage in made.storages.items():
        member = held.get(f"{root}data/{key}")
        _fill(file, storage, member.start if member else 0, member.size if member else -1, raises)
    return value


def _load_stream(file: BinaryIO, raises: Raises, most: float, limits: Limits) -> Any:
    """The older form: numbers, then the value, then the names of its storages, then their bytes."""
    made = _Interpreter(file, raises, most, limits, size_of(file))
    if made.run() != MAGIC:
        raise raises("is a pickle, and no file of torch.save")
    version, system = made.run(), made.run()
    if version != 1001 or (isinstance(system, dict) and system.get("little_endian") is False):
        raise raises("was written by another version of torch, or on a machine with another order of bytes")
    value, keys = made.run(), made.run()
    if not isinstance(keys, list) or not all(type(key) is str for key in keys) or sorted(keys) != sorted(made.storages):
        raise raises("is damaged: it does not have the storages of its tensors")
    for key in keys:
        head = file.read(8)
        size, storage = int.from_bytes(head, "little"), made.storages[key]
        if len(head) < 8 or size * storage.dtype.itemsize != storage.size:
            raise raises("is truncated or damaged: a storage has another size than its tensors")
        at = file.tell()
        _fill(file, storage, at, made.end - at, raises)
        file.seek(at + storage.size)
    return value


@dataclass
class _Word:
    """A name of a class or function, which is all that is known of it."""

    name: str


@dataclass
class _Storage:
    """The memory of tensors, `size` bytes; None on meta."""

    dtype: torch.dtype
    size: int
    memory: Tensor | None


def _fill(file: BinaryIO, storage: _Storage, start: int, room: int, raises: Raises) -> None:
    if room < storage.size:
        raise raises("is truncated or damaged: a tensor has fewer bytes than its shape says")
    if storage.memory is not None and storage.size:
        file.seek(start)
        if file.readinto(storage.memory.numpy().data) != storage.size:  # type: ignore[attr-defined]
            raise raises("is truncated: a tensor ends behind the end of the file")


_MARK = object()
_EMPTY: dict[bytes, Callable[[], Any]] = {
    b"}": dict, b"]": list, b")": tuple, b"\x8f": set, b"N": lambda: None, b"\x88": lambda: True, b"\x89": lambda: False,
}  # fmt: skip
_NUMBERS = {b"K": struct.Struct("<B"), b"M": struct.Struct("<H"), b"J": struct.Struct("<i"), b"G": struct.Struct(">d")}
_LENGTHS = {b"X": 4, b"T": 4, b"U": 1, b"\x8c": 1}  # text and how long the field of its length is


class _Interpreter:
    """Runs pickles one after the other, up to the byte `end` of a file."""

    def __init__(self, file: BinaryIO, raises: Raises, most: float, limits: Limits, end: int) -> None:
        self.file, self.raises, self.most, self.limits, self.end = file, raises, most, limits, end
        self.storages: dict[str, _Storage] = {}
        self.total = size_of(file)
        self.steps = self.stored = self.shown = self.tensors = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """The value of the next pickle."""
        self.stack, self.memo = [], {}
        try:
            while (code := self.read(1)) != b".":
                self.steps += 1
                if self.steps > self.limits.opcodes:
                    raise self.raises(f"is a pickle of more than {self.limits.opcodes} operations; see Limits")
                self.step(code)
            if self.file.tell() > self.end:
                raise EOFError
            return self.stack.pop()
        except (IndexError, KeyError, TypeError, AttributeError, ValueError, RecursionError, struct.error):
            raise self.raises("cannot be read: it is a damaged pickle") from None
        except EOFError:
            raise self.raises("is truncated: its pickle ends in its middle") from None

    def read(self, number: int) -> bytes:
        if number > self.limits.json:
            raise self.raises(f"has a text of {number} bytes, and more than {self.limits.json} are not read; see Limits")
        data = self.file.read(number)
        if len(data) < number:
            raise EOFError
        return data

    def step(self, code: bytes) -> None:
        stack = self.stack
        if code in b"qr":
            self.memo[int.from_bytes(self.read(1 if code == b"q" else 4), "little")] = stack[-1]
        elif code in b"hj":
            stack.append(self.memo[int.from_bytes(self.read(1 if code == b"h" else 4), "little")])
        elif code in _LENGTHS:
            length = int.from_bytes(self.read(_LENGTHS[code]), "little")
            stack.append(self.read(length).decode("utf-8"))
        elif code in _NUMBERS:
            stack.append(_NUMBERS[code].unpack(self.read(_NUMBERS[code].size))[0])
        elif code in _EMPTY:
            stack.append(_EMPTY[code]())
        elif code == b"(":
            stack.append(_MARK)
        elif code == b"t":
            stack.append(tuple(self.marked()))
        elif code in b"\x85\x86\x87":
            count = code[0] - 0x84
            if len(stack) < count or any(value is _MARK for value in stack[-count:]):
                raise IndexError
            stack[-count:] = [tuple(stack[-count:])]
        elif code in b"su":
            values = self.marked() if code == b"u" else [stack.pop(-2), stack.pop()]
            for key, value in zip(values[::2], values[1::2], strict=True):
                if not isinstance(key, KEYS):
                    raise self.raises(f"is refused, it is a pickle of more than weights: a key is a {type(key).__name__}")
                self.top(dict)[key] = value
        elif code in b"ea":
            values = self.marked() if code == b"e" else [stack.pop()]
            self.top(list).extend(values)
        elif code == b"\x8a":  # a number of up to 255 bytes
            stack.append(int.from_bytes(self.read(self.read(1)[0]), "little", signed=True))
        elif code == b"c":
            module, name = self.line(), self.line()
            stack.append(self.word(f"{module}.{name}"))
        elif code == b"Q":
            stack.append(self.storage(stack.pop()))
        elif code == b"R":
            args, word = stack.pop(), stack.pop()
            stack.append(self.made(word, args))
        elif code == b"b":  # the attributes of an object; those of a dict or tensor are no weights
            stack.pop()
            if not isinstance(stack[-1], (dict, Tensor)):
                raise TypeError
        elif code == b"\x80":
            self.read(1)
        elif code == b"\x95":  # of a protocol that torch.save does not use
            raise self.raises("is refused, it is a pickle of more than weights: pickle.dump wrote it, and not torch.save")
        else:
            raise self.raises(f"is refused, it is a pickle of more than weights: it has operation {code!r}")

    def top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise TypeError
        return self.stack[-1]

    def marked(self) -> list[Any]:
        """What stands above the last mark; the mark goes."""
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
        values = self.stack[at + 1 :]
        del self.stack[at:]
        return values

    def line(self) -> str:
        text = self.file.readline(self.limits.text)
        if not text.endswith(b"\n"):
            raise EOFError
        return text[:-1].decode("utf-8")

    def word(self, name: str) -> Any:
        head, _, last = name.rpartition(".")
        if head == "torch" and last in DTYPES:
            return DTYPES[last]
        if name in _WORDS or (head in ("torch", "torch.storage", "torch.cuda") and last in STORAGES):
            return _Word(name)
        raise self.raises(f"is refused, it is a pickle of more than weights: it names {shown(name)}")

    def storage(self, given: Any) -> _Storage:
        kind, word, key, _, count, *view = given
        dtype = STORAGES.get(word.name.rpartition(".")[2])
        if kind != "storage" or dtype is None or type(key) is not str or type(count) is not int or count < 0 or any(view):
            raise TypeError
        if key not in self.storages:
            size = count * dtype.itemsize
            self.stored += size
            if self.stored > self.total:
                raise self.raises("is truncated or damaged: its tensors are larger than the file")
            self.storages[key] = _Storage(dtype, size, None if size > self.most else torch.empty(size, dtype=torch.uint8))
        found = self.storages[key]
        if found.size != count * dtype.itemsize:
            raise TypeError
        return found

    def made(self, word: _Word, args: Any) -> Any:
        """What a function or class gives for its arguments."""
        if type(word) is not _Word or type(args) is not tuple:
            raise TypeError
        if word.name in _TENSORS:
            dtype = args[6] if word.name.endswith("v3") else args[0].dtype
            return self.tensor(args[0], dtype, *args[1:4])
        if word.name in ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"):
            return _of(args[0], Tensor)
        if word.name == "torch._tensor._rebuild_from_type_v2":
            function, kind, inner, _ = args
            if type(kind) is not _Word or kind.name not in _CLASSES:
                raise TypeError
            return self.made(function, inner)
        if word.name in ("collections.OrderedDict", "collections.Counter"):
            pairs = args[0] if args else []
            pairs = list(pairs.items()) if type(pairs) is dict else [tuple(pair) for pair in _of(pairs, list)]
            if not all(isinstance(key, KEYS) for key, _ in pairs):
                raise TypeError
            return Counter(dict(pairs)) if word.name.endswith("Counter") else dict(pairs)
        if word.name == "torch.Size":
            return _of(args[0], tuple)
        if word.name == "torch.device":
            return _of(args[0], str)
        raise TypeError

    def tensor(self, storage: Any, dtype: Any, offset: Any, size: Any, stride: Any) -> Tensor:
        numbers = (offset, *size, *stride)
        sound = type(storage) is _Storage and isinstance(dtype, torch.dtype) and len(size) == len(stride) <= 64
        if not sound or not all(type(n) is int and n >= 0 for n in numbers):
            raise TypeError
        count = math.prod(size)
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if count else -1
        most = max(math.prod(max(n, 1) for n in size), *numbers)
        if (last + 1) * dtype.itemsize > storage.size or most >= 1 << 62:
            raise self.raises("is truncated or damaged: a tensor is larger than its storage")
        self.shown += count * dtype.itemsize
        self.tensors += 1
        if self.shown > 2 * self.total + (16 << 20) or self.tensors > self.limits.tensors:
            raise self.raises("has tensors of more elements than there are in the file, or too many of them; see Limits")
        if not count:
            return torch.empty(size, dtype=dtype, device="meta" if self.most < 0 else "cpu")
        if storage.memory is None:
            return torch.empty_strided(size, stride, dtype=dtype, device="meta")
        return torch.empty(0, dtype=dtype).set_(storage.memory.untyped_storage(), offset, size, stride)


def _of(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError
    return value


_TENSORS = {"torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"}
_CLASSES = {"torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter"}
_WORDS = {
    *_TENSORS, *_CLASSES, "torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state",
    "torch._tensor._rebuild_from_type_v2", "collections.OrderedDict", "collections.Counter", "torch.Size", "torch.device",
}  # fmt: skip
