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
        """The value, decided."""
        return int(self.number)

    def guard_int(self, file: str, line: int) -> int:
        """The value, decided, for a line of torch."""
        return int(self.number)

    def guard_bool(self, file: str, line: int) -> bool:
        """Whether it is not zero, decided, for a line of torch."""
        return bool(self.number)

    def guard_float(self, file: str, line: int) -> float:
        """The value, decided, for a line of torch."""
        return float(self.number)

    expect_true = guard_or_true = guard_or_false = guard_size_oblivious = guard_bool

    def expect_size(self, file: str, line: int) -> bool:
        """A size is never below zero, and none is asked."""
        return True

    def maybe_as_int(self) -> Any:
        """None while it is recorded, so that torch asks no shortcut; the value afterwards."""
        return None if self.number.recorder.active else self.number.value

    maybe_as_float = maybe_as_int

    def is_int(self) -> bool:
        """Whether it is a whole number."""
        return type(self.number.value) is int

    def is_float(self) -> bool:
        """Whether it is a fraction."""
        return type(self.number.value) is float

    def is_bool(self) -> bool:
        """No: conditions are numbers of 0 and 1 here."""
        return False

    def is_symbolic(self) -> bool:
        """Yes: it stands for more than its value."""
        return True

    def is_constant(self) -> bool:
        """No: it may be another value at the next call."""
        return False

    is_nested_int = is_constant

    def has_hint(self) -> bool:
        """Yes: the value of the example inputs."""
        return True

    @property
    def hint(self) -> Any:
        """The value of the example inputs."""
        return self.number.value

    def _graph_repr(self) -> str:
        return repr(self.number.value)


def size_name(size: torch.SymInt) -> int | str | None:
    """A number, the name of a free size, or None for one that follows from others; we need this of an exported program."""
    known = size.node.maybe_as_int()
    if known is not None:
        return int(known)
    return str(size.node.expr) if size.node.expr.is_Symbol else None
