"""The tensors of an artifact: what graph.json says of each, packed ones too, and their values by file."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArtifactError, Limits, quote
from ..ir.traced_module import TracedModule
from ..quantised import is_packed
from ..weight_files import separate
from .document import PartRecord, TensorRecord
from .value_json import KINDS, Read, Unportable, ValueKind, Write, decode, encode, import_class, is_import_path

FLATTENED = "__tensor_flatten__"
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # how many numbers of a 4-bit weight have one scale
DATA = "data"  # the integers of a parameter of bitsandbytes; its other parts have the names of its library


def class_path(value: Any) -> str:
    """Return the import path of a value's class. Raises Unportable for one that cannot be imported."""
    name = f"{type(value).__module__}:{type(value).__qualname__}"
    if not is_import_path(name):
        raise Unportable(f"its class {type(value).__qualname__} cannot be imported")
    return name


def parts_of(owner: nn.Module, tensor: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the record of a packed tensor, except its shape, and the plain tensors that it consists of, by name.

    Raises ArtifactError for a class that is not supported.
    """
    try:
        if hasattr(tensor, FLATTENED):
            names, context = tensor.__tensor_flatten__()
            said = {"class": class_path(tensor), "context": encode(context, kinds=_context_kinds())}
            return said, {name: getattr(tensor, name) for name in names}
        if type(tensor).__name__ == "Params4bit":
            return {"class": class_path(tensor)}, {DATA: _plain(tensor), **tensor.quant_state.as_dict(packed=True)}
        if type(tensor).__name__ == "Int8Params" and tensor.has_fp16_weights:
            return {"class": class_path(tensor)}, {DATA: _plain(tensor)}
        if type(tensor).__name__ == "Int8Params":
            state: Any = owner.state
            return {"class": class_path(tensor)}, {DATA: _plain(tensor), "SCB": state.SCB if tensor.SCB is None else tensor.SCB}
    except Unportable as error:
        raise ArtifactError(f"a {type(tensor).__name__} cannot be saved: {error}") from None
    raise ArtifactError(f"a {type(tensor).__name__} cannot be saved: it does not list the plain tensors that it is made of")


def assemble_tensor(record: TensorRecord, parts: dict[str, Tensor], allow: Sequence[str]) -> Tensor:
    """Assemble a tensor from its parts, of the class that a record names, which `allow` has to cover. Raises ArtifactError."""
    cls: Any = import_class(record.cls, allow)
    if not issubclass(cls, Tensor):
        raise ArtifactError(f"graph.json: {quote(record.cls)} is not a class of tensors")
    if "context" in record.model_fields_set:
        if not callable(getattr(cls, "__tensor_unflatten__", None)):
            raise ArtifactError(f"graph.json: {quote(record.cls)} cannot be made of plain tensors")
        context = decode(record.context, kinds=_context_kinds(allow))
        made: Tensor = cls.__tensor_unflatten__(parts, context, torch.Size(record.shape), tuple(record.stride or ()))
    else:
        data = parts.pop(DATA)
        if cls.__name__ == "Params4bit":
            made = cls.from_prequantized(data, parts, device=data.device)
        elif cls.__name__ == "Int8Params":
            own = {"has_fp16_weights": True} if data.is_floating_point() else {"CB": data, "SCB": parts["SCB"]}
            made = cls(data, requires_grad=False, **own)
        else:
            raise ArtifactError(f"graph.json: {quote(record.cls)} is not a class whose parts are known")
    if not is_packed(made):
        raise ArtifactError(f"graph.json: {quote(record.cls)} is not a class of a quantised tensor")
    return made


def check_layer(path: str, layer: Any) -> None:
    """Raise ArtifactError for a layer of bitsandbytes whose parts do not fit: its kernels would read out of bounds."""
    weight, bias = layer._parameters["weight"], layer._parameters.get("bias")
    shape = (layer.out_features, layer.in_features)
    fits = type(weight).__name__ in ("Params4bit", "Int8Params") and (bias is None or tuple(bias.shape) == shape[:1])
    if fits and type(weight).__name__ == "Int8Params":
        fits = tuple(weight.shape) == shape and weight.has_fp16_weights == layer.state.has_fp16_weights
        if fits and not weight.has_fp16_weights:
            fits = weight.dtype == torch.int8 and tuple(weight.SCB.shape) == shape[:1]
    elif fits:
        state, count = weight.quant_state, math.prod(shape)
        fits = tuple(state.shape) == shape and state.blocksize in BLOCKS and weight.nbytes == -(-count // 2)
        blocks = -(-count // state.blocksize) if fits else 0
        fits = fits and state.code.numel() == 16 and state.absmax.numel() == blocks and state.quant_type in ("fp4", "nf4")
        if fits and state.nested:
            inner = state.state2
            fits = inner.blocksize == 256 and inner.code.numel() == 256 and inner.absmax.numel() == -(-blocks // 256)
        fits = fits and state.absmax.dtype == (torch.uint8 if state.nested else torch.float32)
    if not fits:
        raise ArtifactError(f"graph.json: the parts of the weight of {quote(path)} do not fit a layer of shape {list(shape)}")


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().as_subclass(Tensor)


# --- what a class keeps beside its tensors: plain values, members of an enumeration, records


def _context_kinds(allow: Sequence[str] = ()) -> dict[str, ValueKind]:
    """Return the kinds of values of a context: those of a graph, members of enumerations, and records of classes that are
    allowed."""

    def read_member(body: Any, read: Read, limits: Limits) -> Any:
        path, name = body
        cls = import_class(path, allow)
        if not issubclass(cls, enum.Enum) or name not in cls.__members__:
            raise ArtifactError(f"graph.json: {quote(body)} is not a member of an enumeration")
        return cls[name]

    def write_record(value: Any, write: Write) -> Any:
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return [class_path(value), write(dict(zip(value._fields, value, strict=True)))]
        if isinstance(value, type) or not dataclasses.is_dataclass(value):
            return None
        return [class_path(value), write({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})]

    def read_record(body: Any, read: Read, limits: Limits) -> Any:
        path, fields = body
        cls = import_class(path, allow)
        if not (dataclasses.is_dataclass(cls) or (issubclass(cls, tuple) and hasattr(cls, "_fields"))):
            raise ArtifactError(f"graph.json: {quote(path)} is not a record")
        return cls(**read(fields))

    return {
        "member": ValueKind(enum.Enum, lambda value, write: [class_path(value), value.name], list, read_member),
        "record": ValueKind(object, write_record, list, read_record),
        **KINDS,
    }


def make_records(
    module: TracedModule, passes: Sequence[str], values: bool = True
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, torch.Tensor]]]:
    """Return the records of the tensors, and the tensors by file; one with two names is stored once."""
    records: dict[str, dict[str, Any]] = {}
    files: dict[str, dict[str, torch.Tensor]] = {"model.safetensors": {}, **{f"{p}.safetensors": {} for p in passes}}
    first: dict[int, str] = {}
    storages: set[int] = set()
    memory: dict[int, list[tuple[Any, Any, str]]] = {}  # of parameters, by storage
    for name, tensor, persistent in list_state(module):
        packed = is_packed(tensor)
        record = _tensor_record(name, tensor, persistent, packed)
        records[name] = record
        if id(tensor) in first:
            record["same_as"] = first[id(tensor)]
            continue
        first[id(tensor)] = name
        if isinstance(tensor, nn.Parameter) and not packed and not tensor.is_meta and tensor.numel():
            _check_apart(name, tensor, memory.setdefault(tensor.untyped_storage().data_ptr(), []))
        parts: dict[str, torch.Tensor] = {}
        if packed:
            facts, parts = _parts(name, module.get_submodule(name.rpartition(".")[0]), tensor)
            record.update(facts, parts={key: _tensor_record(f"{name}.{key}", part) for key, part in parts.items()})
        elif tensor.is_meta:
            record["stored"] = False
        if tensor.is_meta or not values:
            continue
        prefix = name.partition(".")[0]
        file = f"{prefix}.safetensors" if prefix in passes else "model.safetensors"
        for key, value in {f"{name}.{key}": part for key, part in parts.items()}.items() if packed else [(name, tensor)]:
            files[file][key] = _portable_tensor(value, storages)
    return records, files


def _check_apart(name: str, tensor: Tensor, others: list[tuple[Any, Any, str]]) -> None:
    """Record where a parameter is in its storage. Raises ArtifactError if it overlaps another, as a file stores them apart."""
    start = tensor.storage_offset() * tensor.element_size()
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = start + (span + 1) * tensor.element_size()
    if (other := next((other for begin, stop, other in others if begin < end and start < stop), None)) is not None:
        raise ArtifactError(
            f"the parameters '{other}' and '{name}' are views of one memory, which a file cannot hold: give the model one "
            "parameter and read the other from it in forward, or clone() one before the trace, which makes them two"
        )
    others.append((start, end, name))


def _parts(name: str, owner: nn.Module, tensor: torch.Tensor) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    if tensor.is_meta:
        raise ArtifactError(f"'{name}' is a {type(tensor).__name__} without values, which cannot be saved")
    try:
        return parts_of(owner, tensor)
    except ArtifactError as error:
        raise ArtifactError(f"'{name}': {error}") from None


def list_state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield every parameter and buffer with its name and whether state_dict has it."""
    for path, m in module.named_modules():
        for table in (m._parameters, m._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    persistent = table is m._parameters or key not in m._non_persistent_buffers_set
                    yield f"{path}.{key}" if path else key, tensor, persistent


def _tensor_record(name: str, tensor: torch.Tensor, persistent: bool = True, packed: bool = False) -> dict[str, Any]:
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_quantized
    if not plain and not packed:
        raise ArtifactError(f"'{name}' is a {type(tensor).__name__} ({tensor.layout}), which safetensors cannot store")
    record: dict[str, Any] = {
        "kind": "parameter" if isinstance(tensor, nn.Parameter) else "buffer",
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }
    if packed:
        record["stride"] = list(tensor.stride())
    if not persistent:
        record["persistent"] = False
    if tensor.requires_grad and not packed:
        record["requires_grad"] = True
    # which kernel runs, and so the last bit of a result, depends on the strides
    if plain and not tensor.is_contiguous() and torch.empty_like(tensor, device="meta").stride() == tensor.stride():
        record["stride"] = list(tensor.stride())
    return record


def _portable_tensor(tensor: torch.Tensor, storages: set[int]) -> torch.Tensor:
    """Return the values in the form that safetensors accepts: on the CPU, contiguous, real, in their own storage."""
    value = tensor.detach().resolve_conj().resolve_neg()
    return separate(torch.view_as_real(value) if value.is_complex() else value, storages)


def read_tensors(
    stored: Iterable[tuple[str, str, torch.Tensor]],
    records: Mapping[str, TensorRecord],
    device: torch.device | str | None = None,
    allow: Sequence[str] = (),
) -> dict[str, torch.Tensor]:
    """Return every tensor by name, from what is `stored`: file, name and value. Tied tensors are one object. file, name and
    value. The ones that share values are one object.

    `allow` covers the classes of packed ones. Raises ArtifactError.
    """
    expected: set[str] = set()
    for name, record in records.items():
        if record.same_as is None and record.stored:
            expected.update([name] if record.parts is None else [f"{name}.{key}" for key in record.parts])
    raw: dict[str, torch.Tensor] = {}
    for file, name, value in stored:
        if name not in expected or name in raw:
            raise ArtifactError(f"{file} has the tensor {quote(name)}, which graph.json does not list for it")
        raw[name] = value
    missing = sorted(expected - set(raw))
    if missing:
        more = f" nor {len(missing) - 1} more" * (len(missing) > 1)
        raise ArtifactError(f"the tensor {quote(missing[0])}{more} is in no file of the artifact")
    values: dict[str, torch.Tensor] = {}
    for name, record in records.items():
        if record.same_as is not None:
            if (other := record.same_as) not in values:
                raise ArtifactError(f"graph.json: {quote(name)} refers to {quote(other)}, which must come before it")
            values[name] = values[other]
        else:
            values[name] = _tensor(name, record, raw, device, allow)
            if record.kind == "parameter" and not isinstance(values[name], nn.Parameter):
                values[name] = nn.Parameter(values[name], requires_grad=record.requires_grad)
            elif record.parts is None:
                values[name].requires_grad_(record.requires_grad)
    return values


def _tensor(
    name: str, record: PartRecord, raw: dict[str, torch.Tensor], device: torch.device | str | None, allow: Sequence[str]
) -> torch.Tensor:
    """Return a stored tensor, or an empty one on the meta device; with parts one of its class, if that is allowed."""
    dtype, shape = decode({"dtype": record.dtype}), tuple(record.shape)
    if isinstance(record, TensorRecord) and record.parts is not None:
        parts = {key: _tensor(f"{name}.{key}", part, raw, device, allow) for key, part in record.parts.items()}
        made = assemble_tensor(record, parts, allow)
        if tuple(made.shape) != shape or made.dtype != dtype:
            raise ArtifactError(
                f"graph.json: the parts of '{name}' give {made.dtype} {list(made.shape)}, which differs from its record"
            )
        return made
    value = raw.pop(name, None)
    if value is None:
        value = torch.empty(shape, dtype=dtype, device="meta")
    else:
        value = torch.view_as_complex(value) if dtype.is_complex else value
        if value.dtype != dtype or tuple(value.shape) != shape:
            raise ArtifactError(
                f"'{name}' is {value.dtype} {tuple(value.shape)} in its file, and {dtype} {shape} in graph.json"
            )
        value = value.to(device) if device is not None else value
    if record.stride is None:
        return value
    strides = record.stride
    if len(strides) != value.dim() or 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) != value.numel():
        raise ArtifactError(f"graph.json: the strides {strides} of '{name}' do not fit its shape")
    return torch.empty_strided(shape, strides, dtype=dtype, device=value.device).copy_(value)
