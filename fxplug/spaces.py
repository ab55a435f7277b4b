"""What source files hold: globals, those that their functions write, and caches."""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
import types
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

CACHE = type(functools.lru_cache(lambda: None))
STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]


def stored(value: Any, space: str) -> Iterator[str]:
    """The globals that a function, or a method of a class, declares as `global` and writes."""
    if isinstance(value, type) and value.__module__ == space:
        for member in list(vars(value).values()):
            yield from stored(getattr(member, "__func__", getattr(member, "fget", member)), space)
    elif isinstance(value, FunctionType) and value.__module__ == space:
        yield from _stored_by(value.__code__)


@functools.lru_cache(maxsize=1 << 16)
def _stored_by(code: types.CodeType) -> tuple[str, ...]:
    inner = [name for part in code.co_consts if isinstance(part, types.CodeType) for name in _stored_by(part)]
    if STORE_GLOBAL not in code.co_code[::2]:
        return tuple(inner)
    return (*inner, *(i.argval for i in dis.get_instructions(code) if i.opcode == STORE_GLOBAL))


def globals_of(name: str) -> list[Any]:
    """What an imported module holds."""
    module = sys.modules.get(name)
    return list(vars(module).values()) if isinstance(module, ModuleType) else []


def foreign(module: object) -> bool:
    """Whether a class lives where no model keeps its state."""
    if not isinstance(module, str):
        return True
    package = module.partition(".")[0]
    return package in ("torch", "numpy", "fxplug") or (package in sys.stdlib_module_names and module != "__main__")


def caches_of(function: Any) -> Iterator[Any]:
    """The cache that a function is, wraps, or calls by way of its closure."""
    if isinstance(function, CACHE):
        yield function
    elif isinstance(function, FunctionType):
        if isinstance(function.__dict__.get("__wrapped__"), CACHE):
            yield function.__dict__["__wrapped__"]
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # a cell that is still empty
                if isinstance(cell.cell_contents, CACHE):
                    yield cell.cell_contents
