"""How values are nested: what a method or hook gave, against what it had to give."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..core.errors import TraceError
from ..core.ir.containers import list_members


def describe(value: Any) -> str:
    """Describe the structure of a value, with its constants: `(tensor, 3)`, `[tensor]`, `{a: tensor}`,
    `Output(sample=tensor)`."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, (bool, int, float, str)):
        return repr(value)
    members = list_members(value)
    if members is None:
        return "None" if value is None else type(value).__name__
    items = [(key, describe(member)) for key, member in members]
    inside = ", ".join(text for _, text in items)
    if isinstance(value, tuple):
        return f"({inside}{',' * (len(items) == 1)})"
    if isinstance(value, list):
        return f"[{inside}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {text}" for key, text in items) + "}"
    return f"{type(value).__name__}({', '.join(f'{key}={text}' for key, text in items)})"


def check_structure(value: Any, like: Any, who: str, what: str) -> Any:
    """Return `value` if it has the structure of `like`. Raises TraceError with both."""
    if describe(value) != describe(like):
        raise TraceError(
            f"{who} returns {describe(value)}, and {what} is {describe(like)}: both must have the same structure"
        )
    return value


@contextmanager
def forbid_writes(who: str, *values: Any) -> Iterator[None]:
    """Raise TraceError if the lists and dicts in values get other members inside the context: the model's own would have them,
    a graph's not."""
    before = _identities(values)
    yield
    if _identities(values) != before:
        raise TraceError(
            f"{who} writes to a list or dict that it is given, which a graph cannot pass on to what reads it later: return the "
            "new value, or change the tensors in it in place"
        )


def _identities(value: Any) -> Any:
    found = None if isinstance(value, torch.Tensor) else list_members(value)
    return id(value) if found is None else [(key, _identities(member)) for key, member in found]
