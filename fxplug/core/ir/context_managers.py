"""The context managers of a model's class that code around the model opens, such as that of diffusers' caches."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

from torch import nn

NAMES = "contexts"  # the key in a traced module's `meta` of their names


def list_context_managers(kind: type) -> list[str]:
    """List the public context managers of a class."""
    return [name for name in dir(kind) if not name.startswith("_") and _is_one(inspect.getattr_static(kind, name))]


def get_context_manager(module: nn.Module, name: str, method: Any) -> Any:
    """Return the method of that name of a traced module if it is a context manager; None if not.

    `method` is what the model's class has. A loaded module, which has no class, has one that does nothing: what diffusers'
    reads are hooks on the model's layers, and there are none.
    """
    if _is_one(method):
        return method.__get__(module)
    known = vars(module).get("meta", {}).get(NAMES) if method is None else None
    return _do_nothing if isinstance(known, list) and name in known else None


def _is_one(method: Any) -> bool:
    return inspect.isgeneratorfunction(getattr(method, "__wrapped__", None))


def _do_nothing(*_: Any, **__: Any) -> nullcontext[None]:
    """Return a context manager that does nothing."""
    return nullcontext()
