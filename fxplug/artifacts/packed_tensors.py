"""Tensors of quantised layers in an artifact: the plain tensors that each is made of, its class, and what else that keeps."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArtifactError, shown
from ..quantised import is_packed
from .names import import_class, is_import_path, only_keys
from .value_json import Mark, Unportable, decode, encode

FLATTENED = "__tensor_flatten__"
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # how many numbers of a 4-bit weight have one scale
DATA = "data"  # the integers of a parameter of bitsandbytes; its other parts have the names of its library


def class_path(value: Any) -> str:
    """The import path of a value's class. Raises Unportable for one that nobody can import."""
    name = f"{type(value).__module__}:{type(value).__qualname__}"
    if not is_import_path(name):
        raise Unportable(f"its class {type(value).__qualname__} cannot be imported")
    return name


def parts_of(owner: nn.Module, tensor: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What graph.json says of a packed tensor, beside its shape, and the plain tensors that it is made of, by name.

    Raises ArtifactError for one whose class does not tell.
    """
    try:
        if hasattr(tensor, FLATTENED):
            names, context = tensor.__tensor_flatten__()
            return {"class": class_path(tensor), "context": _encode(context)}, {n: getattr(tensor, n) for n in names}
        if type(tensor).__name__ == "Params4bit":
            return {"class": class_path(tensor)}, {DATA: _plain(tensor), **tensor.quant_state.as_dict(packed=True)}
        if type(tensor).__name__ == "Int8Params" and tensor.has_fp16_weights:
            return {"class": class_path(tensor)}, {DATA: _plain(tensor)}
        if type(tensor).__name__ == "Int8Params":
            state: Any = owner.state
            return {"class": class_path(tensor)}, {DATA: _plain(tensor), "SCB": state.SCB if tensor.SCB is None else tensor.SCB}
    except Unportable as error:
        raise ArtifactError(f"a {type(tensor).__name__} cannot be written down: {error}") from None
    raise ArtifactError(f"a {type(tensor).__name__} says of no plain tensors that it is made of them")


def made_of(
    record: Mapping[str, Any], parts: dict[str, Tensor], shape: tuple[int, ...], stride: tuple[int, ...], allow: Sequence[str]
) -> Tensor:
    """The tensor that these parts make, of the class that a record names, which `allow` has to cover. Raises ArtifactError."""
    cls: Any = import_class(record["class"], allow)
    if not issubclass(cls, Tensor):
        raise ArtifactError(f"graph.json: {shown(record['class'])} is no class of tensors")
    if "context" in record:
        if not callable(getattr(cls, "__tensor_unflatten__", None)):
            raise ArtifactError(f"graph.json: {shown(record['class'])} cannot be made of plain tensors")
        made: Tensor = cls.__tensor_unflatten__(parts, _decode(record["context"], allow), torch.Size(shape), stride)
    else:
        data = parts.pop(DATA)
        if cls.__name__ == "Params4bit":
            made = cls.from_prequantized(data, parts, device=data.device)
        elif cls.__name__ == "Int8Params":
            own = {"has_fp16_weights": True} if data.is_floating_point() else {"CB": data, "SCB": parts["SCB"]}
            made = cls(data, requires_grad=False, **own)
        else:
            raise ArtifactError(f"graph.json: {shown(record['class'])} is no class whose parts are known")
    if not is_packed(made):
        raise ArtifactError(f"graph.json: {shown(record['class'])} is no class of a quantised tensor")
    return made


def check_layer(path: str, layer: Any) -> None:
    """Raises ArtifactError for a layer of bitsandbytes whose parts do not fit: its kernels would read beyond them."""
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
        raise ArtifactError(f"graph.json: the parts of the weight of {shown(path)} are not those of a layer {list(shape)}")


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().as_subclass(Tensor)


# --- what a class keeps beside its tensors: plain values, members of an enumeration, records


def _encode(value: Any) -> Any:
    return encode(_marked(value))


def _marked(value: Any) -> Any:
    """The same with marks for the values that are of classes of the library."""
    if isinstance(value, enum.Enum):
        return Mark("member", [class_path(value), value.name])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return Mark("record", [class_path(value), _encode(fields)])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return Mark("record", [class_path(value), _encode(dict(zip(value._fields, value, strict=True)))])
    if type(value) in (list, tuple):
        return type(value)(map(_marked, value))
    if type(value) is dict:
        return {key: _marked(member) for key, member in value.items()}
    return value


def _decode(data: Any, allow: Sequence[str]) -> Any:
    if type(data) is list:
        return [_decode(member, allow) for member in data]
    if type(data) is not dict or len(data) != 1:
        return decode(data)
    ((kind, body),) = data.items()
    if kind == "member":
        cls = import_class(body[0], allow)
        if not issubclass(cls, enum.Enum) or body[1] not in cls.__members__:
            raise ArtifactError(f"graph.json: {shown(body)} is no member of an enumeration")
        return cls[body[1]]
    if kind == "record":
        cls = import_class(body[0], allow)
        if not (dataclasses.is_dataclass(cls) or (issubclass(cls, tuple) and hasattr(cls, "_fields"))):
            raise ArtifactError(f"graph.json: {shown(body[0])} is no record")
        names = [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else cls._fields
        return cls(**only_keys(_decode(body[1], allow), names, f"a {cls.__name__}"))
    if kind == "dict":
        return {decode(key): _decode(member, allow) for key, member in body}
    if kind == "tuple":
        return tuple(_decode(member, allow) for member in body)
    return decode(data)
