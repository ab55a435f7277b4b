"""Add-ins made for their places: from an instance, a class or a mapping, and copied with the methods that they hold."""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ...core.errors import SpecError
from ...core.spec.pass_file import check_options, get_arguments
from ..kept_state import list_tables
from .blitz import check_method
from .imports import import_class

if TYPE_CHECKING:
    from ...core.rewriter.sites import Value


def make_addin(addin: Any) -> nn.Module:
    """Make an add-in for one place, or for the places that share it. Raises SpecError if its class cannot be built."""
    if isinstance(addin, nn.Module):
        return _copy(addin)
    if isinstance(addin, Mapping):
        kind: Any = import_class(str(addin["use"]))
        options = {k: settings(v) for k, v in dict(addin.get("options") or {}).items()}
    else:
        kind, options = addin, {}
    made = getattr(kind, "func", kind)
    name = getattr(made, "__name__", repr(made))
    try:
        check_options(get_arguments(kind), options, name)
    except SpecError as error:
        raise SpecError(f"{name} cannot be built with the options {', '.join(options) or '(none)'}: {error}") from None
    try:
        addin = kind(**options)
    except Exception as error:  # the constructor's
        raise SpecError(f"{name} fails in its constructor, as it does in ZhiJian: {type(error).__name__}: {error}") from error
    if not isinstance(addin, nn.Module):
        raise SpecError(f"{name} returns a {type(addin).__name__}, and an add-in must be an nn.Module")
    return addin


def settings(value: Any) -> Any:
    """Convert a mapping to an object with attributes, recursively, like the configurations of ZhiJian."""
    if isinstance(value, Mapping):
        return SimpleNamespace(**{str(k): settings(v) for k, v in value.items()})
    return [settings(v) for v in value] if isinstance(value, (list, tuple)) else value


def _copy(addin: nn.Module) -> nn.Module:
    """Copy an add-in, with the functions of its constructor that refer to it bound to the copy."""
    memo: dict[int, Any] = {}
    new: nn.Module = copy.deepcopy(addin, memo)
    for module in new.modules():
        for key, value in list(vars(module).items()):
            if isinstance(value, types.FunctionType):
                vars(module)[key] = _rebound(value, memo)
    return new


def _rebound(function: types.FunctionType, memo: Mapping[int, Any]) -> types.FunctionType:
    """Copy a function with the objects in its closure replaced by their copies."""

    def moved(value: Any) -> Any:
        return _rebound(value, memo) if isinstance(value, types.FunctionType) else memo.get(id(value), value)

    cells = tuple(types.CellType(moved(cell.cell_contents)) for cell in function.__closure__ or ())
    code, defaults = function.__code__, function.__defaults__
    new = types.FunctionType(code, function.__globals__, function.__name__, defaults, cells or None)
    new.__kwdefaults__ = function.__kwdefaults__
    return new


def has_outputs(addin: nn.Module, method: str, point: str) -> bool:
    """Return whether the method takes (module, inputs, outputs) rather than (module, inputs). Raises SpecError."""
    check_method(addin, method)
    name, signature = type(addin).__name__, inspect.signature(getattr(addin, method))
    fits = []
    for count in (2, 3):
        try:
            signature.bind(*[None] * count)
            fits.append(count)
        except TypeError:
            pass
    if not fits:
        raise SpecError(f"{name}.{method}{signature} must take (module, inputs), or (module, inputs, outputs)")
    if point == "in" and 2 not in fits:
        raise SpecError(
            f"{name}.{method}{signature} takes outputs, and before a module there are none: put the point after the module, or "
            "name a method that takes (module, inputs)"
        )
    return 3 in fits


def create_parameters(addin: nn.Module, call: Any, args: Sequence[Value]) -> nn.Module:
    """Return the add-in with the parameters that its first call creates for the values there, else unchanged.

    `call(addin, *values)` is that call; it is run on a copy, and its exceptions are raised again by the trace.
    """
    values = [_zeros(value) for value in args]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.no_grad():
            with torch.random.fork_rng(devices):  # what draws numbers and makes no parameters draws none
                _, made = _called(addin, call, values)
            return _called(addin, call, values)[0] if made else addin
    except Exception:  # the add-in's, which its trace will say
        return addin


def _called(addin: nn.Module, call: Any, values: Sequence[Any]) -> tuple[nn.Module, bool]:
    """Return a copy of an add-in after a call, and whether that created parameters."""
    trial = _copy(addin)
    before = list_tables(trial)
    call(trial, *values)
    return trial, any(v is not before.get(name) for name, v in list_tables(trial).items() if isinstance(v, nn.Parameter))


def _zeros(value: Any) -> Any:
    """Return zeros in the structure of a value of a site."""
    if (members := getattr(value, "members", None)) is not None:
        return _zeros(members)
    if isinstance(value, dict):
        return {k: _zeros(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(map(_zeros, value))
    return torch.zeros(value.shape, dtype=value.dtype) if hasattr(value, "shape") else value


class OnItsDevice(TorchFunctionMode):
    """For the time of a `with`: what moves a tensor to CUDA leaves it where it is, as an add-in stands where its model is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            rest = [arg for arg in args[1:] if not _is_cuda(arg)]
            if _is_cuda(kwargs.get("device")):
                del kwargs["device"]
            if not rest and not kwargs:
                return args[0]
            args = (args[0], *rest)
        return func(*args, **kwargs)


def _is_cuda(value: Any) -> bool:
    return (isinstance(value, torch.device) and value.type == "cuda") or (isinstance(value, str) and value.startswith("cuda"))
