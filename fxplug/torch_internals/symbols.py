"""Numbers that stand for sizes: what torch asks the `node` of a SymInt or SymFloat, and what we ask one."""

from __future__ import annotations

from typing import Any, Protocol

import torch

__all__ = ["Node", "size_name"]


class _Recorder(Protocol):
    active: bool


class _Number(Protocol):
    value: Any

    @property
    def recorder(self) -> _Recorder: ...

    def __int__(self) -> int: ...

    def __float__(self) -> float: ...

    def __bool__(self) -> bool: ...


class Node:
    """What torch's own code asks the `node` of a SymInt; every answer is a decision about the value.

    We need that torch asks nothing else for an operation with such a number among its arguments.
    """

    constant = None
    shape_env = None

    def __init__(self, number: _Number) -> None:
        self.number = number

    def int_(self) -> int:
        return int(self.number)

    def guard_int(self, file: str, line: int) -> int:
        return int(self.number)

    def guard_bool(self, file: str, line: int) -> bool:
        return bool(self.number)

    def guard_float(self, file: str, line: int) -> float:
        return float(self.number)

    expect_true = guard_or_true = guard_or_false = guard_size_oblivious = guard_bool

    def expect_size(self, file: str, line: int) -> bool:
        return True

    def maybe_as_int(self) -> Any:
        return None if self.number.recorder.active else self.number.value

    maybe_as_float = maybe_as_int

    def is_int(self) -> bool:
        return type(self.number.value) is int

    def is_float(self) -> bool:
        return type(self.number.value) is float

    def is_bool(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return True

    def is_constant(self) -> bool:
        return False

    is_nested_int = is_constant

    def has_hint(self) -> bool:
        return True

    @property
    def hint(self) -> Any:
        return self.number.value

    def _graph_repr(self) -> str:
        return repr(self.number.value)


def size_name(size: torch.SymInt) -> int | str | None:
    """A number, the name of a free size, or None for one that follows from others; we need this of an exported program."""
    known = size.node.maybe_as_int()
    if known is not None:
        return int(known)
    return str(size.node.expr) if size.node.expr.is_Symbol else None
