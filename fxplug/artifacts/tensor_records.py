"""The tensors of an artifact: what graph.json says of each, and their values by file, gathered and read back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ArtifactError, shown
from ..ir.traced_module import TracedModule
from ..quantised import is_packed
from .names import only_keys
from .packed_tensors import made_of, parts_of
from .snapshot import Snapshot
from .value_json import decode, whole

PARTS = 16  # of one packed tensor


def records_of(
    module: TracedModule, passes: Sequence[str], values: bool = True
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, torch.Tensor]]]:
    """What graph.json says of each tensor, and the tensors by file; one that has two names is stored once."""
    records: dict[str, dict[str, Any]] = {}
    files: dict[str, dict[str, torch.Tensor]] = {"model.safetensors": {}, **{f"{p}.safetensors": {} for p in passes}}
    first: dict[int, str] = {}
    storages: set[int] = set()
    for name, tensor, persistent in state_of(module):
        packed = is_packed(tensor)
        record = _packed_record(tensor, persistent) if packed else _tensor_record(name, tensor, persistent)
        records[name] = record
        if id(tensor) in first:
            record["same_as"] = first[id(tensor)]
            continue
        first[id(tensor)] = name
        parts: dict[str, torch.Tensor] = {}
        if packed:
            facts, parts = _parts(name, module.get_submodule(name.rpartition(".")[0]), tensor)
            record.update(facts, parts={key: _tensor_record(f"{name}.{key}", part, True) for key, part in parts.items()})
        elif tensor.is_meta:
            record["stored"] = False
        if tensor.is_meta or not values:
            continue
        prefix = name.partition(".")[0]
        file = f"{prefix}.safetensors" if prefix in passes else "model.safetensors"
        for key, value in {f"{name}.{key}": part for key, part in parts.items()}.items() if packed else [(name, tensor)]:
            files[file][key] = _portable_tensor(value, storages)
    return records, files


def _parts(name: str, owner: nn.Module, tensor: torch.Tensor) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    if tensor.is_meta:
        raise ArtifactError(f"'{name}' is a {type(tensor).__name__} without values, which an artifact cannot hold")
    try:
        return parts_of(owner, tensor)
    except ArtifactError as error:
        raise ArtifactError(f"'{name}': {error}") from None


def state_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Every parameter and buffer with its name and whether state_dict has it."""
    for path, m in module.named_modules():
        for table in (m._parameters, m._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    persistent = table is m._parameters or key not in m._non_persistent_buffers_set
                    yield f"{path}.{key}" if path else key, tensor, persistent


def _packed_record(tensor: torch.Tensor, persistent: bool) -> dict[str, Any]:
    return {
        "kind": "parameter" if isinstance(tensor, nn.Parameter) else "buffer",
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "stride": list(tensor.stride()),
        **({} if persistent else {"persistent": False}),
    }


def _tensor_record(name: str, tensor: torch.Tensor, persistent: bool) -> dict[str, Any]:
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
        raise ArtifactError(f"'{name}' is a {type(tensor).__name__} ({tensor.layout}), which safetensors cannot hold")
    record: dict[str, Any] = {
        "kind": "parameter" if isinstance(tensor, nn.Parameter) else "buffer",
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }
    if not persistent:
        record["persistent"] = False
    if tensor.requires_grad:
        record["requires_grad"] = True
    # which kernel runs, and so the last bit of a result, depends on the strides
    if not tensor.is_contiguous() and torch.empty_like(tensor, device="meta").stride() == tensor.stride():
        record["stride"] = list(tensor.stride())
    return record


def _portable_tensor(tensor: torch.Tensor, storages: set[int]) -> torch.Tensor:
    """The values as safetensors takes them: on the CPU, contiguous, real, in a storage of their own."""
    with torch.no_grad():
        value = tensor.detach().resolve_conj().resolve_neg().cpu()
        if value.is_complex():
            value = torch.view_as_real(value)
        value = value.contiguous()
    storage = value.untyped_storage()
    if storage.data_ptr() in storages or storage.nbytes() != value.nbytes:
        return value.clone()
    storages.add(storage.data_ptr())
    return value


def read_tensors(
    files: Snapshot, records: dict[str, Any], device: torch.device | str | None, allow: Sequence[str] = ()
) -> dict[str, torch.Tensor]:
    """Every tensor by name; the ones that share values are one object. `allow` covers the classes of packed ones."""
    known = ["kind", "shape", "dtype", "persistent", "requires_grad", "stride", "same_as", "stored"]
    known += ["class", "context", "parts"]  # of a packed one
    expected: set[str] = set()
    for name, record in records.items():
        only_keys(record, known, f"the tensor {shown(name)}")
        parts = record.get("parts")
        if parts is not None:
            if type(parts) is not dict or not parts or len(parts) > PARTS:
                raise ArtifactError(f"graph.json: the parts of {shown(name)} are no object of at most {PARTS}")
            for key, part in parts.items():
                only_keys(part, ["kind", "shape", "dtype", "stride"], f"the part {shown(key)} of {shown(name)}")
        if "same_as" not in record and record.get("stored", True):
            expected.update([name] if parts is None else [f"{name}.{key}" for key in parts])
    raw: dict[str, torch.Tensor] = {}
    for file in files.weights:
        for name, value in files.tensors(file):
            if name not in expected or name in raw:
                raise ArtifactError(f"{file} holds {shown(name)}, which graph.json does not place there")
            raw[name] = value
    missing = sorted(expected - set(raw))
    if missing:
        more = f" nor {len(missing) - 1} more" * (len(missing) > 1)
        raise ArtifactError(f"no file holds the tensor {shown(missing[0])}{more}")
    values: dict[str, torch.Tensor] = {}
    for name, record in records.items():
        if "same_as" in record:
            other = record["same_as"]
            if type(other) is not str or other not in values:
                raise ArtifactError(f"graph.json: {shown(name)} is said to be {shown(other)}, which does not come before it")
            values[name] = values[other]
        elif "parts" in record:
            values[name] = _packed(name, record, raw, device, allow)
        else:
            values[name] = _tensor(name, record, raw.pop(name, None), device)
    return values


def _packed(
    name: str, record: dict[str, Any], raw: dict[str, torch.Tensor], device: torch.device | str | None, allow: Sequence[str]
) -> torch.Tensor:
    """A tensor of a class that is allowed, made of its parts."""
    shape, stride = (tuple(map(whole, record.get(key) or ())) for key in ("shape", "stride"))
    own = {key: f"{name}.{key}" for key in record["parts"]}
    parts = {key: _tensor(full, record["parts"][key], raw.pop(full), device) for key, full in own.items()}
    made = made_of(record, {key: part.requires_grad_(False) for key, part in parts.items()}, shape, stride, allow)
    if tuple(made.shape) != shape or made.dtype != decode({"dtype": record.get("dtype")}):
        raise ArtifactError(f"graph.json: the parts of '{name}' make {made.dtype} {list(made.shape)}, which it is not")
    if record.get("kind") != "parameter" or isinstance(made, nn.Parameter):
        return made
    return nn.Parameter(made, requires_grad=False)


def _tensor(name: str, record: dict[str, Any], raw: torch.Tensor | None, device: torch.device | str | None) -> torch.Tensor:
    dtype = decode({"dtype": record.get("dtype")})
    shape = tuple(map(whole, record.get("shape") or ()))
    if raw is None:
        value = torch.empty(shape, dtype=dtype, device="meta")
    else:
        value = torch.view_as_complex(raw) if dtype.is_complex else raw
        if value.dtype != dtype or tuple(value.shape) != shape:
            raise ArtifactError(f"'{name}' is {value.dtype} {tuple(value.shape)} in its file and {dtype} {shape} in graph.json")
        value = value.to(device) if device is not None else value
    if "stride" in record:
        value = _with_strides(name, value, record["stride"])
    if record.get("kind") == "parameter":
        return nn.Parameter(value, requires_grad=record.get("requires_grad") is True)
    if record.get("kind") != "buffer":
        raise ArtifactError(f"graph.json: '{name}' is neither a parameter nor a buffer")
    return value.requires_grad_(record.get("requires_grad") is True)


def _with_strides(name: str, value: torch.Tensor, strides: Any) -> torch.Tensor:
    dense = len(strides) == value.dim() and all(type(s) is int and s >= 0 for s in strides)
    if not dense or 1 + sum((n - 1) * s for n, s in zip(value.shape, strides, strict=True)) != value.numel():
        raise ArtifactError(f"graph.json: the strides {strides} of '{name}' do not fit its shape")
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)
