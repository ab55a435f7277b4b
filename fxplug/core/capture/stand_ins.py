"""What stands for Python's `int`, `float`, `len` and `type` in the model's source files while it is traced, and for torch's
classes that are called to make a tensor.

Python itself makes plain numbers of what it gives: `int(h * 0.5)` would be a part of the graph, and not recorded. And torch
does not report `torch.Tensor(2, 3)`, as it does `torch.empty`.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from ..ir.functions import MATH_FUNCTIONS
from ..torch_internals.tensors import FakeTensor
from .fake_tensors import Number, record
from .user_code import asker


class _StandIn(type):
    """The class of what stands for a class of Python's, its base: equal to it, and with the same instances."""

    __base__: type

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.__base__)

    def __subclasscheck__(cls, value: Any) -> bool:
        return issubclass(value, cls.__base__)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.__base__

    def __hash__(cls) -> int:
        return hash(cls.__base__)


class _IntStandIn(_StandIn):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], Number):
            return record(MATH_FUNCTIONS["trunc"], args[0]) if isinstance(args[0], float) else args[0]
        return int(*args, **kwargs)


class _FloatStandIn(_StandIn):
    def __call__(cls, *args: Any) -> Any:
        return record(operator.mul, args[0], 1.0) if args and isinstance(args[0], Number) else float(*args)


class _TypeStandIn(_StandIn):
    classes: dict[Any, Any]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return type(*args, **kwargs)
        kind = type(args[0].value if isinstance(args[0], Number) else args[0])
        if kind is FakeTensor:
            return nn.Parameter if isinstance(args[0], nn.Parameter) else torch.Tensor
        return cls if issubclass(kind, _StandIn) else cls.classes.get(kind, kind)


# numpy asks a class for its dtype; torch takes none but Python's own, see `Tries.stand_ins`
Int: Any = _IntStandIn("int", (int,), {"dtype": np.dtype(int)})
Float: Any = _FloatStandIn("float", (float,), {"dtype": np.dtype(float)})
Type: Any = _TypeStandIn("type", (type,), {"classes": {int: Int, float: Float}})


def length(value: Any) -> Any:
    """`len`, recorded for a tensor."""
    return len(value) if not isinstance(value, torch.Tensor) else value.__len__()  # type: ignore[no-untyped-call]


STAND_INS = {"int": Int, "float": Float, "type": Type, "len": length}
PLAIN = {"type": _TypeStandIn("type", (type,), {"classes": {}})}  # where the model gives `int` to what takes no other

TENSOR_CLASSES = [f"{kind}Tensor" for kind in "Bool Byte Char Short Int Long Half BFloat16 Float Double".split()]  # noqa: SIM905


class TensorClass:
    """What stands for a class such as torch.LongTensor."""

    def __init__(self, original: Any, is_recording: Callable[[], bool]) -> None:
        self.original, self.is_recording = original, is_recording

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or not self.is_recording() or asker(sys._getframe(1)) is None:
            return self.original(*args, **kwargs)
        return _made(args, self.original.dtype)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, self.original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


def tensor_classes(is_recording: Callable[[], bool]) -> Iterator[tuple[Any, str, Any]]:
    """What stands for torch's classes where the model's own code calls them: owner, name and value."""
    original = torch.Tensor.__new__

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is not torch.Tensor or kwargs or not is_recording() or asker(sys._getframe(1)) is None:
            return original(cls, *args, **kwargs)
        return _made(args, torch.get_default_dtype())

    yield torch.Tensor, "__new__", new
    yield from ((torch, name, TensorClass(getattr(torch, name), is_recording)) for name in TENSOR_CLASSES)


def _made(args: tuple[Any, ...], dtype: torch.dtype) -> torch.Tensor:
    if len(args) == 1 and isinstance(args[0], torch.Tensor):
        return args[0].detach()
    if len(args) == 1 and isinstance(args[0], (list, tuple, np.ndarray)) and not isinstance(args[0], torch.Size):
        return torch.tensor(args[0], dtype=dtype)
    return torch.empty(*(args or (0,)), dtype=dtype)
