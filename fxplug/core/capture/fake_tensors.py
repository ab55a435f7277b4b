"""What a model computes with while it is traced: fake tensors, and numbers that remember where they were read."""

from __future__ import annotations

import builtins
import gc
import logging
import math
import operator
import re
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch import (  # torch's own, whatever a run puts in their place
    fx,
    get_autocast_dtype,
    get_default_dtype,
    is_autocast_enabled,
    nn,
)

from ..ir.functions import MATH_FUNCTIONS
from ..quantised import is_packed
from ..torch_internals import FAKE_TENSOR_LOG
from ..torch_internals.modules import forward_hooks
from ..torch_internals.tensors import (
    DataDependentOutputException,
    DisableTorchFunction,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    Node,
    as_parameter,
    is_error_of_dynamo,
    make_fake_tensor,
)
from .module_state import State, get_own_attributes
from .user_code import (
    find_calling_frame,
    find_user_frame,
    is_calling_cached,
    is_inside_try,
    is_text_for_people,
    is_user_code,
)


class Number:
    """A concrete `value`, int or float, and the node that computes it.

    Arithmetic is recorded and gives another Number; a use that needs the plain value (a comparison, `range`, a dict
    key, text) goes through `decide` of its recorder, which records a guard. For `isinstance` it is the plain type; C code
    sees the real one and has to ask. When the recording is over it is only its value.
    """

    def __init__(self, recorder: Any, node: fx.Node, value: Any) -> None:
        self.recorder = recorder
        self.fx_node = node
        self.value = value
        self.node = Node(self)

    def plain(self) -> Any:
        """Return the plain value; during the recording it is requested from the recorder's `decide`."""
        return self.recorder.decide(self) if self.recorder.active else self.value

    def __bool__(self) -> bool:
        return bool(record(operator.ne, self, 0))

    def __int__(self) -> int:
        return int(_plain(self if isinstance(self.value, int) else record(MATH_FUNCTIONS["trunc"], self)))

    def __index__(self) -> int:
        return operator.index(self.plain())

    def __float__(self) -> float:
        return float(self.plain())

    def __complex__(self) -> complex:
        return complex(self.plain())

    def __hash__(self) -> int:
        # einops keeps what it works out for a shape, and has another way for numbers that, as torch's, have no hash
        if self.recorder.active and is_inside_try(find_user_frame(), "TypeError"):
            raise TypeError("a recorded number has no hash")
        # a cache of a function compares the numbers of two calls, which is guarded, and gives what the function gives
        return hash(self.value if self.recorder.active and is_calling_cached(sys._getframe(1)) else self.plain())

    def __str__(self) -> str:
        return str(self._for_text(sys._getframe(1)))

    def __format__(self, spec: str) -> str:
        return format(self._for_text(sys._getframe(1)), spec)

    def __repr__(self) -> str:
        return repr(self._for_text(sys._getframe(1)))

    def _for_text(self, frame: FrameType) -> Any:
        # text may become a key; what a debugger shows, or an error says, leaves no guard behind
        asking = find_calling_frame(frame) if self.recorder.active else None
        return self.value if asking is None or is_text_for_people(asking) else self.plain()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.plain(), dtype)

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if function in (np.ceil, np.floor, np.sqrt) and method == "__call__" and not kwargs:
            return record(operator.mul, record(MATH_FUNCTIONS[function.__name__], *inputs), 1.0)
        return getattr(function, method)(*map(_plain, inputs), **kwargs)

    def __copy__(self) -> Number:
        return self

    def __deepcopy__(self, memo: Any) -> Number:
        return self

    def __reduce__(self) -> Any:
        return type(self.value), (self.plain(),)

    def __round__(self, digits: int | None = None) -> Any:
        args = (self,) if digits is None else (self, digits)
        return record(builtins.round, *args)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __pow__(self, other: Any, modulo: Any = None) -> Any:
        return _binary(operator.pow)(self, other) if modulo is None else pow(self.plain(), other, modulo)


class Int(Number, torch.SymInt):  # type: ignore[misc]
    """A recorded int."""

    __class__ = property(lambda self: int)


class Float(Number, torch.SymFloat):  # type: ignore[misc]
    """A recorded float."""

    __class__ = property(lambda self: float)


KINDS: dict[type, type[Number]] = {int: Int, float: Float}


def _value(x: Any) -> Any:
    return x.value if isinstance(x, Number) else x


def _plain(x: Any) -> Any:
    return x.plain() if isinstance(x, Number) else x


def record(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` as a recorded number, where one of the arguments is one."""
    try:
        value = function(*map(_value, args))
    except (ArithmeticError, ValueError):  # whoever catches it has decided on these values
        for x in args:
            _plain(x)
        raise
    recorder = next((x.recorder for x in args if isinstance(x, Number) and x.recorder.active), None)
    return value if recorder is None else recorder.number(function, args, value)


def _unary(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self: record(function, self)


def _binary(function: Callable[..., Any], swapped: bool = False) -> Callable[..., Any]:
    def method(self: Number, other: Any) -> Any:
        if isinstance(other, complex):
            return function(other, self.plain()) if swapped else function(self.plain(), other)
        if not isinstance(other, (int, float)):
            return NotImplemented
        return record(function, other, self) if swapped else record(function, self, other)

    return method


for _name in "add sub mul truediv floordiv mod lshift rshift and or xor".split():  # noqa: SIM905
    _function = getattr(operator, _name + "_" if _name in ("and", "or") else _name)
    setattr(Number, f"__{_name}__", _binary(_function))
    setattr(Number, f"__r{_name}__", _binary(_function, swapped=True))
Number.__rpow__ = _binary(operator.pow, swapped=True)  # type: ignore[attr-defined]
for _name in "eq ne lt le gt ge".split():  # noqa: SIM905
    setattr(Number, f"__{_name}__", _binary(getattr(operator, _name)))
for _name in "neg pos abs invert".split():  # noqa: SIM905
    setattr(Number, f"__{_name}__", _unary(getattr(operator, _name)))
for _name in "ceil floor trunc".split():  # noqa: SIM905
    setattr(Number, f"__{_name}__", _unary(getattr(math, _name)))

# what numbers have beside arithmetic
for _name in "real imag numerator denominator conjugate is_integer as_integer_ratio bit_length bit_count hex to_bytes".split():  # noqa: SIM905
    setattr(Number, _name, property(lambda self, name=_name: getattr(self.plain(), name)))  # type: ignore[misc]


def wrap_math(name: str) -> Callable[..., Any]:
    """`math.<name>` that records itself when a Number is among its arguments."""
    function = getattr(math, name)
    return lambda *args: record(function, *args)


# torch's classes that are called to make a tensor, which torch does not report as it does `torch.empty`
TENSOR_CLASSES = [f"{kind}Tensor" for kind in "Bool Byte Char Short Int Long Half BFloat16 Float Double".split()]  # noqa: SIM905


class TensorClass:
    """What stands for a class such as torch.LongTensor."""

    def __init__(self, original: Any, is_recording: Callable[[], bool]) -> None:
        self.original, self.is_recording = original, is_recording

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or not self.is_recording() or find_calling_frame(sys._getframe(1)) is None:
            return self.original(*args, **kwargs)
        return _made(args, self.original.dtype)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, self.original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


class FloatInfo(TensorClass):
    """What stands for torch.finfo, which tells of the default dtype where it is given none."""

    def __init__(self, is_recording: Callable[[], bool], reads_default_dtype: Callable[[], None]) -> None:
        super().__init__(torch.finfo, is_recording)
        self.reads_default_dtype = reads_default_dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs and self.is_recording() and find_calling_frame(sys._getframe(1)) is not None:
            self.reads_default_dtype()
        return self.original(*args, **kwargs)


def list_tensor_classes(
    is_recording: Callable[[], bool], reads_default_dtype: Callable[[], None]
) -> Iterator[tuple[Any, str, Any]]:
    """What stands for torch's classes where the model's own code calls them: owner, name and value."""
    original = torch.Tensor.__new__

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is not torch.Tensor or kwargs or not is_recording() or find_calling_frame(sys._getframe(1)) is None:
            return original(cls, *args, **kwargs)
        reads_default_dtype()
        return _made(args, torch.get_default_dtype())

    yield torch.Tensor, "__new__", new
    yield torch, "finfo", FloatInfo(is_recording, reads_default_dtype)
    yield from ((torch, name, TensorClass(getattr(torch, name), is_recording)) for name in TENSOR_CLASSES)


def _made(args: tuple[Any, ...], dtype: torch.dtype) -> torch.Tensor:
    if len(args) == 1 and isinstance(args[0], torch.Tensor):
        return args[0].detach()
    if len(args) == 1 and isinstance(args[0], (list, tuple, np.ndarray)) and not isinstance(args[0], torch.Size):
        return torch.tensor(args[0], dtype=dtype)
    return torch.empty(*(args or (0,)), dtype=dtype)


NUMBER_KIND = re.compile(r"\b(Number|Int|Float|SymInt|SymFloat|int|float)\b")  # in the message of a TypeError
NUMBER = re.compile(r"\b(Int|Float|SymInt|SymFloat)\b")  # in that of any other error


@dataclass
class RetryState:
    """What earlier tries at the same call found that it needs: autograd on fakes too, and code that takes plain numbers.

    `open_numbers` is whether numbers among the arguments are inputs of the graph, or a part of it; `one_or_two` whether it
    matters that two inputs are one tensor, and `stand_ins` whether `int` may be another class in the model's files.
    """

    open_numbers: bool = False
    one_or_two: bool = False
    autograd: bool = False
    plain: set[CodeType] = field(default_factory=set)
    stand_ins: bool = True

    def learn(self, error: Exception) -> bool:
        """Return whether another try can help: code that failed on a recorded number gets plain ones, or Python's own
        classes."""
        if "StandIn" not in str(error) and (NUMBER_KIND if isinstance(error, TypeError) else NUMBER).search(str(error)):
            frames = [frame for frame, _ in walk_tb(error.__traceback__) if is_user_code(frame)]
            new = next((f.f_code for f in reversed(frames) if f.f_code not in self.plain), None)
            if new is not None:
                self.plain.add(new)
                return True
        had, self.stand_ins = self.stand_ins and not is_missing_values(error), False
        return had


PLAIN = (bool, int, float, str, type(None), type(...), torch.dtype, torch.device, torch.memory_format, torch.layout)
Geometry = tuple[Any, ...]
# what torch says where a function needs memory behind a tensor, or is not written for tensors without
NO_MEMORY = re.compile(
    r"[Ff]ake ?[Tt]ensor|[Ff]ake impl|\b[Mm]eta\b|tensor subclass|data pointer|python storage|not allocated|"
    r"TorchScript interpreter"
)


class NeedsValues(Exception):
    """The model reads a number out of its data, which fake tensors do not have."""


def is_missing_values(error: BaseException | None) -> bool:
    """Return whether an error was caused by tensors without values, fake or on the meta device, so that real ones may help.

    The model's own errors, wrong sizes and our own mistakes do not count.
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


def make_fake(like: torch.Tensor, mode: FakeTensorMode, device: torch.device, constant: Any = None) -> FakeTensor:
    """Return a fake tensor of the size, strides and dtype of `like`, made without a dispatch."""
    with DisableTorchFunction():
        geometry = like.shape, like.stride(), like.dtype, device
    return make_fake_tensor(geometry, mode, constant)


def put_fake_weights(state: State, mode: FakeTensorMode, device: torch.device, names: dict[int, str], autograd: bool) -> None:
    """Put a fake tensor in the place of each parameter and buffer, and note its name; `state.restore` takes them out again."""
    fakes: dict[int, torch.Tensor] = {}

    def stand_in(tensor: torch.Tensor, name: str) -> torch.Tensor:
        if id(tensor) not in fakes:
            made = make_fake(tensor, mode, device)
            if isinstance(tensor, nn.Parameter):
                as_parameter(made)
            if autograd:
                made.requires_grad_(tensor.requires_grad)
            if not is_packed(tensor):  # its attributes are what it is made of
                vars(made).update(get_own_attributes(tensor))
            fakes[id(tensor)] = made
            names[id(made)] = name
        return fakes[id(tensor)]

    for module, path in state.modules.values():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # its tensors cannot be exchanged
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    table[key] = stand_in(tensor, f"{path}.{key}" if path else key)


class Results:
    """What functions gave on fake tensors, by function and arguments: the same blocks come again and again."""

    def __init__(self, remember: bool = True) -> None:
        self.known: dict[Hashable, Any] = {}
        self.remember = remember
        self.reads_training = False  # whether a layer asked for its mode when it was called

    def key(self, function: Any, args: Any, kwargs: Any, views: tuple[bool, ...] = ()) -> Hashable:
        """Return a key for a call; None if its result may depend on more than the geometry of its arguments.

        `views` marks the tensors among them that share memory with a parameter, as a result then may, too.
        """
        if not self.remember:
            return None
        try:
            with DisableTorchFunction():
                return (function, _key(args), _key(kwargs), views, _surroundings())
        except TypeError:
            return None

    def get(self, key: Hashable, mode: FakeTensorMode | None) -> Any:
        """Fresh tensors as the call gave them before, or None."""
        found = self.known.get(key) if key is not None and mode is not None else None
        if found is None or mode is None:
            return None
        kind, geometries = found
        if kind is None:
            return make_fake_tensor(geometries, mode)
        return kind(make_fake_tensor(g, mode) for g in geometries)

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
    """Return the settings that also affect the dtype of a result."""
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


def make_layer_key(module: nn.Module) -> Hashable:
    """Return a key for all that affects the geometry of a layer's results besides its arguments; equal layers share one key."""
    if module._modules or "forward" in vars(module) or any(forward_hooks(module)):
        return module
    try:
        with DisableTorchFunction():
            attributes = tuple((k, _key(v)) for k, v in vars(module).items() if not k.startswith("_"))
            return type(module), attributes, _key(module._parameters), _key(module._buffers)
    except TypeError:
        return module


@contextmanager
def pause_gc() -> Iterator[None]:
    """Python's garbage collector walks every node and tensor again and again while a graph grows; it can wait."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def silence_torch() -> Iterator[None]:
    """Suppress the traceback that torch logs for a failing fake operation of this thread; the raised error is clearer."""
    log, thread = logging.getLogger(FAKE_TENSOR_LOG), threading.get_ident()

    def others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    log.addFilter(others)
    try:
        yield
    finally:
        log.removeFilter(others)


def allow_writes() -> AbstractContextManager[Any]:
    """Tensors that are made meanwhile can be written later, though inference mode is on."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
