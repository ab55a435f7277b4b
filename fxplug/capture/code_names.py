"""What code names: globals and attributes, and the globals it writes."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Collection
from typing import Any, NamedTuple

CACHE = type(functools.lru_cache(lambda: None))
STORES = {dis.opmap["STORE_GLOBAL"], dis.opmap["DELETE_GLOBAL"]}


class Names(NamedTuple):
    """What code calls by name, other than its locals: globals and attributes; and the globals it writes."""

    used: set[str]
    written: set[str]
    parts: set[str]  # with which names begin or end that code puts together for getattr or globals()

    def among(self, known: Collection[str]) -> set[str]:
        """Those of some names that the code may mean."""
        fewer, more = sorted((known, self.used), key=len)
        found = {name for name in fewer if name in more}
        if self.parts:
            parts = tuple(self.parts)
            found |= {name for name in known if name.startswith(parts) or name.endswith(parts)}
        return found

    def add(self, other: Names) -> None:
        """Take in what other code calls."""
        for mine, more in zip(self, other, strict=True):
            mine.update(more)


@functools.lru_cache(maxsize=1 << 16)
def names_of(code: types.CodeType) -> Names:
    """The names in a function's code and in the functions that it defines."""
    texts = [x for x in code.co_consts if isinstance(x, str) and x.isidentifier()]
    names = Names({*code.co_names, *texts}, set(), set())
    if "globals" in code.co_names:
        names.parts.add("")
    if "getattr" in code.co_names:
        names.parts.update(x for x in texts if len(x) > 1)
    if STORES & set(code.co_code[::2]):
        names.written.update(i.argval for i in dis.get_instructions(code) if i.opcode in STORES)
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            names.add(names_of(part))
    return names


def functions_of(member: Any) -> list[Any]:
    """The functions that a member of a class runs: its own, or those of a property."""
    if isinstance(member, property):
        return [f for f in (member.fget, member.fset, member.fdel) if f is not None]
    if isinstance(member, functools.cached_property):
        return [member.func]
    return [getattr(member, "__func__", member)] if isinstance(member, (classmethod, staticmethod)) else [member]


FOREIGN = ("torch", "numpy", "fxplug", "_pytest", "pytest", "pluggy")


def foreign(module: object) -> bool:
    """Whether a class lives where no model keeps its state. An `assert` that pytest has rewritten names the whole of pytest."""
    if not isinstance(module, str):
        return True
    package = module.partition(".")[0]
    return package in FOREIGN or (package in sys.stdlib_module_names and module != "__main__")
