"""A model of a configuration with one call of it, and what that call is as a section `inputs`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import nn

from ...core.errors import format_fields
from ...core.ir.traced_module import TracedModule
from ..model_section import TensorDtype


@dataclass
class BuiltModel:
    """A model with the arguments of an example call, `inputs`; `pipeline` is the pipeline that it is a part of, or None.

    `complete` makes the module that is rewritten of the model's trace: itself, unless the model's kind does more. `beside` has
    further models of the same pipeline, by their names in it, which the same passes rewrite; `part` is the model's own name.
    """

    module: nn.Module
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    pipeline: Any = None
    complete: Callable[[TracedModule], TracedModule] = lambda traced: traced
    part: str = ""
    beside: dict[str, BuiltModel] = field(default_factory=dict)

    __repr__ = format_fields


def describe_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the arguments of a call as a section `inputs`, by name; what is neither a tensor nor plain data is left out."""
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    given = dict(bound.arguments)
    for parameter in bound.signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            given.update(given.pop(parameter.name, {}))
    found = {}
    for name, value in given.items():
        try:
            found[name] = _described(value)
        except TypeError:
            continue
    return found


def _described(value: Any) -> dict[str, Any] | list[Any]:
    """Describe a value as an entry of `inputs`. Raises TypeError for one that is no plain data."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in get_args(TensorDtype):
            raise TypeError
        numbers = not (value.dtype.is_floating_point or value.dtype.is_complex or value.dtype is torch.bool)
        bounds = {"low": int(value.min()), "high": int(value.max()) + 1} if numbers and value.numel() else {}
        return {"shape": list(value.shape), "dtype": dtype, **bounds}
    if isinstance(value, Mapping) and value and _has_tensors(value):
        return {str(key): _described(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and _has_tensors(value):
        return [_described(item) for item in value]
    return {"value": _plain(value)}


def _has_tensors(value: Any) -> bool:
    if isinstance(value, (Mapping, list, tuple)):
        return any(map(_has_tensors, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, torch.Tensor)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise TypeError
