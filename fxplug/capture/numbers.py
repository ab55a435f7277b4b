"""Numbers that remember where they were read: `torch.SymInt`s and their kin over one recorded node."""

from __future__ import annotations

import builtins
import math
import operator
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import numpy as np
import torch
from torch import fx

from ..torch_internals.symbols import Node
from .user_code import asker, is_text_for_people


class Recorder(Protocol):
    """What a number asks of the tracer."""

    active: bool

    def number(self, target: Callable[..., Any], args: tuple[Any, ...], value: Any) -> Any:
        """Record `target(*args)`, which is `value` now."""

    def decide(self, number: Number) -> Any:
        """Python needs the plain value: record a guard and give it."""


TRUNC = math.trunc  # kept here: while a model is traced, `math` has functions that record


class Number:
    """A concrete `value`, int or float, and the node that computes it.

    Arithmetic is recorded and gives another Number; a use that needs the plain value (a comparison, `range`, `int()`, a dict
    key, text) goes through `Recorder.decide`, which records a guard. For `isinstance` it is the plain type; C code
    sees the real one and has to ask. When the recording is over it is only its value.
    """

    def __init__(self, recorder: Recorder, node: fx.Node, value: Any) -> None:
        self.recorder = recorder
        self.fx_node = node
        self.value = value
        self.node = Node(self)

    def plain(self) -> Any:
        """The plain value; while the recording goes on it is asked of `Recorder.decide`."""
        return self.recorder.decide(self) if self.recorder.active else self.value

    def __bool__(self) -> bool:
        return bool(record(operator.ne, self, 0))

    def __int__(self) -> int:
        return int(_plain(self if isinstance(self.value, int) else record(TRUNC, self)))

    def __index__(self) -> int:
        return operator.index(self.plain())

    def __float__(self) -> float:
        return float(self.plain())

    def __complex__(self) -> complex:
        return complex(self.plain())

    def __hash__(self) -> int:
        return hash(self.plain())

    def __str__(self) -> str:
        return str(self._for_text(sys._getframe(1)))

    def __format__(self, spec: str) -> str:
        return format(self._for_text(sys._getframe(1)), spec)

    def __repr__(self) -> str:
        return repr(self._for_text(sys._getframe(1)))

    def _for_text(self, frame: FrameType) -> Any:
        # text may become a key; what a debugger shows, or an error says, leaves no guard behind
        asking = asker(frame) if self.recorder.active else None
        return self.value if asking is None or is_text_for_people(asking) else self.plain()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.plain(), dtype)

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
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


def _plain_attribute(name: str) -> property:
    return property(lambda self: getattr(self.plain(), name))


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
    setattr(Number, _name, _plain_attribute(_name))


def recorded_math(name: str) -> Callable[..., Any]:
    """`math.<name>` that records itself when a Number is among its arguments."""
    function = getattr(math, name)
    return lambda *args: record(function, *args)
