"""What code names: globals and attributes, and the globals it writes."""

from __future__ import annotations

import dis
import functools
import sys
import types
from typing import Any, NamedTuple

CACHE = type(functools.lru_cache(lambda: None))
STORES = {dis.opmap["STORE_GLOBAL"], dis.opmap["DELETE_GLOBAL"]}


class Names(NamedTuple):
    """What code calls by name, other than its locals: globals and attributes; and the globals it writes."""

    used: frozenset[str]
    written: frozenset[str]


@functools.lru_cache(maxsize=1 << 16)
def names_of(code: types.CodeType) -> Names:
    """The names in a function's code and in the functions that it defines."""
    # a text may be the name of an attribute
    used = {*code.co_names, *(x for x in code.co_consts if isinstance(x, str) and x.isidentifier())}
    written = set()
    if STORES & set(code.co_code[::2]):
        written = {i.argval for i in dis.get_instructions(code) if i.opcode in STORES}
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            inner = names_of(part)
            used |= inner.used
            written |= inner.written
    return Names(frozenset(used), frozenset(written))


def functions_of(member: Any) -> list[Any]:
    """The functions that a member of a class runs: its own, or those of a property."""
    if isinstance(member, property):
        return [f for f in (member.fget, member.fset, member.fdel) if f is not None]
    if isinstance(member, functools.cached_property):
        return [member.func]
    return [getattr(member, "__func__", member)] if isinstance(member, (classmethod, staticmethod)) else [member]


def foreign(module: object) -> bool:
    """Whether a class lives where no model keeps its state."""
    if not isinstance(module, str):
        return True
    package = module.partition(".")[0]
    return package in ("torch", "numpy", "fxplug") or (package in sys.stdlib_module_names and module != "__main__")
