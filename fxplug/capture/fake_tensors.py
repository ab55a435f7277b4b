"""Fake tensors made directly, also in the place of weights, and the results of functions on them remembered: most of the time
of a trace goes there."""

from __future__ import annotations

import gc
import logging
import re
import threading
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import (  # torch's own, whatever a run puts in their place
    get_autocast_dtype,
    get_default_dtype,
    is_autocast_enabled,
    nn,
)

from ..quantised import is_packed
from ..torch_internals.dispatch import DisableTorchFunction
from ..torch_internals.fakes import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    fake_of,
    is_error_of_dynamo,
)
from ..torch_internals.names import FAKE_TENSOR_LOG
from ..torch_internals.tensors import as_parameter
from .module_state import State, own_attributes
from .numbers import Number

PLAIN = (bool, int, float, str, type(None), type(...), torch.dtype, torch.device, torch.memory_format, torch.layout)
Geometry = tuple[Any, ...]
# what torch says where a function needs memory behind a tensor, or is not written for tensors without
NO_MEMORY = re.compile(
    r"[Ff]ake ?[Tt]ensor|[Ff]ake impl|\b[Mm]eta\b|tensor subclass|data pointer|python storage|not allocated|"
    r"TorchScript interpreter"
)


class NeedsValues(Exception):
    """The model reads a number out of its data, which fake tensors do not have."""


def lacks_values(error: BaseException | None) -> bool:
    """Whether an error came of tensors without values, fake ones or those on the meta device, and real ones may cure it.

    The model's own errors, wrong sizes and our own mistakes are none of these.
    """
    while error is not None:
        if isinstance(error, (NeedsValues, DataDependentOutputException, DynamicOutputShapeException)):
            return True
        if is_error_of_dynamo(error):
            return True
        if isinstance(error, (RuntimeError, NotImplementedError, TypeError, ValueError)) and NO_MEMORY.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def fake(like: torch.Tensor, mode: FakeTensorMode, device: torch.device, constant: Any = None) -> FakeTensor:
    """A fake tensor of the size, strides and dtype of `like`, made without a dispatch."""
    with DisableTorchFunction():
        return fake_of((like.shape, like.stride(), like.dtype, device), mode, constant)


@contextmanager
def fake_weights(
    state: State, mode: FakeTensorMode, device: torch.device, names: dict[int, str], autograd: bool
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Put a fake tensor in the place of each parameter and buffer, and note its name. Gives each with the fake one."""
    fakes: dict[int, torch.Tensor] = {}
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    held: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def stand_in(tensor: torch.Tensor, name: str) -> torch.Tensor:
        if id(tensor) not in fakes:
            made = fake(tensor, mode, device)
            if isinstance(tensor, nn.Parameter):
                as_parameter(made)
            if autograd:
                made.requires_grad_(tensor.requires_grad)
            if not is_packed(tensor):  # its attributes are what it is made of
                carry_over(tensor, made)
                pairs.append((tensor, made))
            fakes[id(tensor)] = made
            names[id(made)] = name
        return fakes[id(tensor)]

    for module, path in state.modules.values():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # its tensors cannot be exchanged
        for table in (module._parameters, module._buffers):
            held.append((table, dict(table)))
            for key, tensor in table.items():
                if tensor is not None:
                    table[key] = stand_in(tensor, f"{path}.{key}" if path else key)
    try:
        yield pairs
    finally:
        for table, original in held:
            table.clear()
            table.update(original)


def carry_over(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Give another tensor the attributes that code has put on this one, and no others."""
    has, wanted = own_attributes(other), own_attributes(tensor)
    if has or wanted:
        for name in has.keys() - wanted.keys():
            del vars(other)[name]
        vars(other).update(wanted)


class Results:
    """What functions gave on fake tensors, by function and arguments: the same blocks come again and again."""

    def __init__(self, remember: bool = True) -> None:
        self.known: dict[Hashable, Any] = {}
        self.remember = remember

    def key(self, function: Any, args: Any, kwargs: Any) -> Hashable:
        """A key for a call, or None where its result may depend on more than the geometry of its arguments."""
        if not self.remember:
            return None
        try:
            with DisableTorchFunction():
                return (function, _key(args), _key(kwargs), _surroundings())
        except TypeError:
            return None

    def get(self, key: Hashable, mode: FakeTensorMode | None) -> Any:
        """Fresh tensors as the call gave them before, or None."""
        found = self.known.get(key) if key is not None and mode is not None else None
        if found is None or mode is None:
            return None
        kind, geometries = found
        if kind is None:
            return fake_of(geometries, mode)
        return kind(fake_of(g, mode) for g in geometries)

    def put(self, key: Hashable, out: Any, given: list[torch.Tensor]) -> None:
        """Remember a result that is new tensors and nothing else."""
        many = type(out) in (tuple, list)
        if key is None or not (many or isinstance(out, torch.Tensor)):
            return
        tensors = list(out) if many else [out]
        if any(type(t) is not FakeTensor or t.constant is not None or any(t is g for g in given) for t in tensors):
            return
        with DisableTorchFunction():
            geometries = [_geometry(t) for t in tensors]
        self.known[key] = (type(out), geometries) if many else (None, geometries[0])


def _geometry(tensor: torch.Tensor) -> Geometry:
    assert isinstance(tensor, FakeTensor)
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.fake_device)


def _surroundings() -> Hashable:
    """What else decides the dtype of a result."""
    casts = [get_autocast_dtype(d) if is_autocast_enabled(d) else None for d in ("cpu", "cuda")]
    return (*casts, get_default_dtype())


def _key(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        if type(value) is not FakeTensor or value.constant is not None or value.dtype.is_complex or value.requires_grad:
            raise TypeError
        return _geometry(value)
    if isinstance(value, PLAIN) and not isinstance(value, Number):
        return (type(value), value)
    if isinstance(value, slice):
        return (slice, _key(value.start), _key(value.stop), _key(value.step))
    if type(value) in (tuple, list, torch.Size):
        return (type(value), tuple(map(_key, value)))
    if type(value) is dict:
        return tuple((k, _key(v)) for k, v in value.items())
    raise TypeError


@contextmanager
def no_collection() -> Iterator[None]:
    """Python's garbage collector walks every node and tensor again and again while a graph grows; it can wait."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def quiet() -> Iterator[None]:
    """A failing fake operation of this thread logs no traceback, as the error that is raised says it better."""
    log, thread = logging.getLogger(FAKE_TENSOR_LOG), threading.get_ident()

    def others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    log.addFilter(others)
    try:
        yield
    finally:
        log.removeFilter(others)


def writable() -> AbstractContextManager[Any]:
    """Tensors that are made meanwhile can be written later, though inference mode is on."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
