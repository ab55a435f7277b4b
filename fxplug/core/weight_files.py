"""Files of weights: safetensors, what `torch.save` wrote, and ONNX. Tensors and plain values come out; no code in them is run.

torch and onnx read theirs; what they get wrong is looked at here. The tensors of safetensors are read here:
`safetensors.safe_open` gives the memory of the file itself, which whoever writes to the file changes, and which ends the
process where the file is cut; it takes a name twice, and reads by a path and not from the handle whose bytes are hashed.
Which of the first two a file is, its first bytes tell; the ending of its name is only held against them.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor, nn

from .errors import DEFAULT, ArtifactError, FxplugError, Limits, did_you_mean, quote
from .hub_names import find_local
from .reading import Raises, get_size, guess_kind, make_reporter, open_archive, open_regular_file, parse_json, report_errors

SAFE, PICKLED = (".safetensors",), (".bin", ".pt", ".pth", ".ckpt")  # how the names of files end, by how they are written
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "U16": torch.uint16,
    "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
# ONNX's TensorProto.DataType -> dtype
ONNX_DTYPES = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 4: torch.uint16, 5: torch.int16, 6: torch.int32, 7: torch.int64,
    9: torch.bool, 10: torch.float16, 11: torch.float64, 14: torch.complex64, 16: torch.bfloat16,
}  # fmt: skip
# how the names of numbers end by which a quantised weight is scaled: ComfyUI's, compressed-tensors' and bitsandbytes'
SCALES = ("scale_weight", "weight_scale", "weight_scale_2", "weight_scale_inv", "scaled_fp8", ".comfy_quant", ".SCB", ".absmax")
PIECE = 1 << 24  # bytes that are read at once
SAVED = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # from its third byte on, how a file begins that torch.save wrote before 1.6


@dataclass(frozen=True)
class TensorEntry:
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

    records: Mapping[str, TensorEntry]
    about: Mapping[str, str]
    start: bytes

    def in_file(self) -> list[tuple[str, TensorEntry]]:
        """Return the records sorted by the position of their bytes."""
        return sorted(self.records.items(), key=lambda item: (item[1].offset, item[1].size))


def read(
    path: str | PathLike[str], *, raises: Raises | None = None, most: float = math.inf, limits: Limits = DEFAULT
) -> tuple[Any, dict[str, str]]:
    """Read a file of weights on the CPU, and its metadata: tensors by name for safetensors, any value of `torch.save`.

    Tensors of more than `most` bytes are meta tensors of the same shapes, and not read; with -1 all are. Raises what `raises`
    makes (an ArtifactError that names the path) for a file that cannot be read, is damaged or something else, or is beyond
    `limits`.
    """
    raises = raises or make_reporter(path)
    with open_regular_file(path, raises=raises) as file:
        start = file.read(64)
        suffix = str(path).rpartition(".")[2].lower()
        sized = start[8:9] == b"{" and not any(start[4:8])  # behind the length of a header, whose first byte may be any
        if (start[:1] == b"\x80" and not sized) or start[:4] == b"PK\x03\x04":
            if start[:2] == b"PK" and suffix == "safetensors" and b"data.pkl" not in start:
                raise raises("is a zip archive, not a safetensors file: unpack it")
            if suffix == "safetensors":
                raise raises("was written by torch.save and is not a safetensors file: rename it so that it ends in .pt")
            return _load_saved(file, path, raises, most), {}
        if not start:
            raise raises("cannot be read: it is empty")
        if what := "" if sized else guess_kind(start):
            raise raises(f"cannot be read: it is {what}")
        if suffix != "safetensors" and start[8:9] != b"{":
            raise raises("cannot be read: it is neither a safetensors file nor a file of torch.save")
        head = read_header(file, raises, limits)
        found = dict(read_tensors(file, head, raises, most=most))
        return {name: found[name] for name in head.records}, dict(head.about)


def read_header(file: BinaryIO, raises: Raises, limits: Limits = DEFAULT) -> Header:
    """Read and check the header of a safetensors file: each byte after it belongs to exactly one tensor, of matching shape.

    The file is positioned at the first tensor's bytes.
    """
    total = file.seek(0, io.SEEK_END)
    file.seek(0)
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if total < 8 or length > total - 8:
        raise raises(f"cannot be read: it claims a header of {length} bytes, which a file of {total} bytes cannot have")
    if length > limits.json:
        raise raises(f"has a header of {length} bytes; the limit is {limits.json}; fxplug.Limits can raise it")
    start += file.read(length)
    found = parse_json(start[8:], lambda finding: raises(f"cannot be read: its header {finding}"), limits)
    if type(found) is not dict:
        raise raises("cannot be read: its header is not a JSON object")
    said = found.pop("__metadata__", {})
    if type(said) is not dict or not all(type(value) is str for value in said.values()):
        raise raises("cannot be read: its metadata must be a mapping of text to text")
    if len(found) > limits.tensors:
        raise raises(f"has {len(found)} tensors; the limit is {limits.tensors}; fxplug.Limits can raise it")
    records = {name: _record(name, entry, 8 + length, raises, limits) for name, entry in found.items()}
    at = 8 + length
    head = Header(records, said, start)
    for name, record in head.in_file():
        if record.offset != at:
            raise raises(f"is damaged: the bytes of {quote(name)} do not start where those before it end")
        at += record.size
    if at != total:
        what = "truncated" if at > total else "longer than its tensors"
        raise raises(f"is {what}: it has {total} bytes, and its header says {at}")
    return head


def read_tensors(
    file: BinaryIO, head: Header, raises: Raises, seen: Callable[[memoryview], object] = len, most: float = math.inf
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a safetensors file with the header `head`, in the order of their bytes, on the CPU, in their own
    memory.

    Those of more than `most` bytes are meta tensors, and not read. `seen` is called with everything that is read, piece by
    piece. Raises what `raises` makes for a file that became shorter.
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
                raise raises("was truncated while it was read")
            seen(view[done : done + count])
            done += count
        # another byte than 0 or 1 is no bool, and torch does not look
        yield name, (memory.ne(0) if record.dtype is torch.bool else memory.view(record.dtype)).reshape(record.shape)


def _record(name: str, entry: Any, start: int, raises: Raises, limits: Limits) -> TensorEntry:
    if len(name) > limits.text:
        raise raises(f"has a name of {len(name)} characters; the limit is {limits.text}; fxplug.Limits can raise it")
    if type(entry) is not dict or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise raises(f"is damaged: the header of {quote(name)} must have dtype, shape and data_offsets only")
    dtype = DTYPES.get(entry["dtype"]) if type(entry["dtype"]) is str else None
    if dtype is None:
        raise raises(f"has {quote(name)} of dtype {quote(entry['dtype'])}, which is not supported")
    shape, offsets = entry["shape"], entry["data_offsets"]
    numbers = [shape, offsets] if type(shape) is type(offsets) is list and len(shape) <= 64 and len(offsets) == 2 else [[-1]]
    if not all(type(n) is int and 0 <= n < 1 << 62 for list_ in numbers for n in list_):
        raise raises(f"is damaged: the shape or the data_offsets of {quote(name)} are not valid")
    size = math.prod(shape) * dtype.itemsize
    if math.prod(max(n, 1) for n in shape) >= 1 << 62 or size != offsets[1] - offsets[0]:
        took = offsets[1] - offsets[0]
        raise raises(f"is damaged: {quote(name)} has {took} bytes, which do not fit its shape {quote(shape)}")
    return TensorEntry(dtype, tuple(shape), start + offsets[0], size)


# --- what torch.save wrote


def _load_saved(file: BinaryIO, path: str | PathLike[str], raises: Raises, most: float) -> Any:
    """Read a file of `torch.save`: tensors on the CPU, or meta, in dicts, lists and tuples, and plain values.

    torch's own reader is used, with weights only. If tensors are left out, the file is mapped into memory and their bytes are
    not read; otherwise all of it is copied, so that the file may change later. Raises what `raises` makes.
    """
    file.seek(0)
    archive = file.read(2) == b"PK"
    if archive:
        names = open_archive(file, raises).namelist()  # torch inflates without a bound, and maps compressed bytes as weights
        if not any(name.endswith("/data.pkl") for name in names):
            found = quote(", ".join(names[:6]), 200)
            raise raises(f"is a zip archive without a 'data.pkl', so not a file of torch.save; it has {found}")
    elif file.read(len(SAVED)) != SAVED:
        raise raises("is a file of pickle.dump, which is not read: save it with torch.save, or as .safetensors")
    file.seek(0)
    mapped = archive and most < math.inf
    try:
        with _one_error(raises, "cannot be read: it is truncated or damaged"):
            value = torch.load(path if mapped else file, map_location="cpu", weights_only=True, mmap=mapped)
            return _plain_value(value, raises, most, 2 * get_size(file) + (16 << 20))
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        if named is None:
            raise raises(f"is damaged, or its pickle contains objects other than tensors: {_first_line(error)}") from None
        raise raises(f"is refused, its pickle contains objects other than tensors: it names {quote(named[1])}") from None


@contextlib.contextmanager
def _one_error(raises: Raises, finding: str) -> Iterator[None]:
    """Tell as `raises` does what torch, numpy and protobuf make of a damaged file, which is errors of many kinds."""
    try:
        yield
    except (FxplugError, pickle.UnpicklingError):
        raise
    except Exception as error:  # of theirs
        raise raises(f"{finding}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    text = str(error).rpartition("Unpickler error: ")[2].strip()
    return quote((text.splitlines() or [type(error).__name__])[0], 200)[1:-1]


def _plain_value(value: Any, raises: Raises, most: float, room: int) -> Any:
    """Return the value that torch read with plain dicts, lists and tuples, and tensors that have numbers and nothing else.

    `most` is as for `read`, `room` the number of bytes that all tensors may have together: torch gives a tensor the shape in
    the file, whatever data the file has.
    """
    made: dict[int, Any] = {}  # a value may be in many places

    def plain(value: Any) -> Any:
        if id(value) not in made:
            made[id(value)] = make(value)
        return made[id(value)]

    def make(value: Any) -> Any:
        nonlocal room
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return (list if isinstance(value, list) else tuple)(map(plain, value))
        if not isinstance(value, Tensor):
            return str(value) if isinstance(value, torch.device) else value
        if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided or value.is_quantized or value.is_nested:
            raise raises("is refused, its pickle contains objects other than tensors: it has a sparse or other unusual tensor")
        room -= value.nbytes
        if room < 0:
            raise raises("is damaged: its tensors have more elements than the file")
        if value.untyped_storage().nbytes() > most:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return Tensor.detach(value) if most == math.inf else Tensor.detach(value).clone()

    return plain(value)


# --- ONNX


def parse_onnx(data: bytes, raises: Raises) -> Any:
    """Return the `onnx.ModelProto` of a file's bytes. Raises what `raises` makes for other bytes, and without the package
    onnx."""
    try:
        import onnx
    except ImportError:
        raise raises("needs the package onnx, which is not installed: pip install 'fxplug[onnx]'") from None
    try:
        return onnx.load_model_from_string(data)
    except Exception:  # protobuf's
        what = guess_kind(data[:64])
        it = what if what and not what.startswith("an ONNX") else "not an ONNX file, or truncated"
        raise raises(f"cannot be read: it is {it}") from None


def read_onnx_tensor(proto: Any, raises: Raises, beside: tuple[str, BinaryIO] | None = None) -> Tensor:
    """Return the value of an `onnx.TensorProto`, in its own memory; its data may lie in the file `beside` (name, opened).

    onnx itself opens whatever file a model names. Raises what `raises` makes for another one, and for malformed tensors.
    """
    from onnx import numpy_helper

    with _one_error(raises, f"cannot be read: {quote(proto.name)} has a dtype, a shape or data that is not supported"):
        dtype = ONNX_DTYPES[proto.data_type]
        if proto.data_location == proto.EXTERNAL:
            place = {entry.key: entry.value for entry in proto.external_data}
            if beside is None:
                raise raises("has its weights in another file: save it as one file, without external data")
            if place.get("location") != beside[0]:
                raise raises(f"cannot be read: the offsets of {quote(proto.name)} point to no weights in it")
            beside[1].seek(int(place["offset"]))
            proto.raw_data, proto.data_location = beside[1].read(int(place["length"])), proto.DEFAULT
        array = numpy_helper.to_array(proto)
        numbers = torch.from_numpy(np.array(array).reshape(-1).view(np.uint8))  # numpy has no bfloat16
        return numbers.view(dtype).reshape(array.shape)


def read_onnx(path: Path, raises: Raises, *, meta: bool = False) -> dict[str, Tensor]:
    """Read the initializers of an ONNX graph by name, on the CPU or as meta tensors. Raises what `raises` makes.

    The exporter renames a transposed weight `onnx::MatMul_7`: its name is taken from the node that uses it,
    `/blocks.0/mlp/fc1/MatMul`, and it is transposed back: `blocks.0.mlp.fc1.weight`.
    """
    with open_regular_file(path, raises=raises) as file, _one_error(raises, "cannot be read: it is a damaged ONNX file"):
        graph = parse_onnx(file.read(), raises).graph
        tensors: dict[str, Tensor] = {}
        for proto in graph.initializer:
            if proto.name in tensors:
                raise raises(f"cannot be read: it has {quote(proto.name)} twice")
            tensor = read_onnx_tensor(proto, raises)
            tensors[proto.name] = tensor.to("meta") if meta else tensor
        if not tensors:
            raise raises("cannot be read: it is not an ONNX file, or one without weights")
        for node in graph.node:
            weight = node.input[1] if node.op_type == "MatMul" and len(node.input) == 2 else ""
            new = node.name.removeprefix("/").rpartition("/")[0].replace("/", ".") + ".weight"
            if weight.startswith("onnx::") and weight in tensors and tensors[weight].dim() == 2 and new not in tensors:
                tensors[new] = tensors.pop(weight).t()
        return tensors


# --- which file of a folder


def find_kind(path: Path) -> str:
    """Return what is at a path: `folder`, `file` (or something else that can be opened), or "". Raises ArtifactError."""
    with report_errors(make_reporter(path)):
        return "folder" if path.is_dir() else "file" if os.path.lexists(path) else ""


def find(source: str | os.PathLike[str]) -> Path:
    """Return the file that holds the tensors of a file, a folder, or a repository on the hub. Raises ArtifactError."""
    path = find_local(source, "adapter")
    what = find_kind(path)
    if what != "folder":
        if not what:
            with report_errors(make_reporter(path.parent)):
                near = os.listdir(path.parent) if path.parent.is_dir() else []
            raise ArtifactError(f"no adapter file or folder '{path}'{did_you_mean(path.name, near)}")
        return path
    with report_errors(make_reporter(path)):
        found = {entry.name: entry.is_dir() for entry in os.scandir(path)}
    chosen, files = choose_file([name for name, is_folder in found.items() if not is_folder])
    if chosen:
        return path / chosen
    inner = sorted(name for name, is_folder in found.items() if is_folder and find_kind(path / name / "adapter_config.json"))
    if inner and not files:
        raise ArtifactError(f"'{path}' has the adapters {', '.join(inner)}: give the folder of one of them")
    names = f": give one of {', '.join(files[:6])}" if files else ""
    raise ArtifactError(f"the folder '{path}' has {len(files) or 'no'} files of weights{names}")


def choose_file(names: Sequence[str]) -> tuple[str, list[str]]:
    """Return the one among the files of a folder that holds an adapter, "" if none does for certain, and those that may."""
    for stem in ("adapter_model", "pytorch_lora_weights"):
        for suffix in (*SAFE, *PICKLED):
            if f"{stem}{suffix}" in names:
                return f"{stem}{suffix}", []
    files = sorted(name for name in names if name.endswith(SAFE))
    if "manifest.json" in names:  # what `fxplug.save` wrote: the model's own weights are no adapter
        files = [name for name in files if name != "model.safetensors"]
    return files[0] if len(files) == 1 else "", files


# --- written


def find_scale(names: Iterable[str]) -> str:
    """Return the first name that is the scale of a quantised weight; "" if there is none."""
    return min((name for name in names if name.endswith(SCALES)), default="")


def separate(tensor: Tensor, storages: set[int]) -> Tensor:
    """Return a tensor for saving: on the CPU, contiguous, and alone in its storage, which is added to `storages`."""
    value = tensor.detach().cpu().contiguous()
    storage = value.untyped_storage()
    if storage.data_ptr() in storages or storage.nbytes() != value.nbytes:
        value = value.clone()
    storages.add(value.untyped_storage().data_ptr())
    return value


def save_file(tensors: dict[str, Tensor], path: str | os.PathLike[str], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, the same bytes each time. Raises OSError where that failed, which safetensors tells as text."""
    try:
        safetensors.save_file(tensors, path, metadata)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
    if metadata:
        _sort_metadata(path)


def _sort_metadata(path: str | os.PathLike[str]) -> None:
    """Put the metadata of a new safetensors file in the order of its names: safetensors writes another one in each process."""
    with open(path, "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        said = json.loads(file.read(length))
        said["__metadata__"] = dict(sorted(said["__metadata__"].items()))
        text = json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) <= length:
            file.seek(8)
            file.write(text.ljust(length))
