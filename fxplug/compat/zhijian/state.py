"""What an add-in keeps in its attributes between its calls in one forward: values that a graph hands from site to site."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import SpecError

CACHE = "inputs_cache"
TABLES = ("_parameters", "_buffers", "_modules")
# what torch keeps in a module, and what every module may change
OWN = set(vars(nn.Module())) - set(TABLES)
# how a number travels that is known when the graph runs, as the size of a tensor without elements; and a tuple
SIZE, TUPLE = "@size", "@tuple"
KEEPS = (
    "what lasts from one call of the model to the next is a buffer that is changed in place (self.count.add_(1)); a value for "
    "this call only needs no 'self.'"
)


def tables(addin: nn.Module) -> dict[str, Any]:
    """The parameters, buffers and modules in an add-in, by name."""
    found = {}
    for path, module in addin.named_modules():
        for table in TABLES:
            found.update({_joined(path, key): member for key, member in vars(module)[table].items()})
    return found


def attributes(addin: nn.Module) -> dict[str, Any]:
    """All other attributes in an add-in by name, without those that torch keeps in every module."""
    return {
        _joined(path, key): value
        for path, module in addin.named_modules()
        for key, value in vars(module).items()
        if key not in OWN and key not in TABLES
    }


class Call:
    """One call of a method, as a `with`: the add-in begins with what is `left` of the calls before, and is then as it was.

    Then `set` has the attributes that the call changed, `anew` the names of parameters, buffers and modules that it set, and
    `read` those of the attributes that it read as they were before the forward began.
    """

    def __init__(self, addin: nn.Module, left: Mapping[str, Any], watch: bool) -> None:
        self.addin, self.given, self.watch = addin, left, watch
        self.set: dict[str, Any] = {}
        self.anew: list[str] = []
        self.read: set[str] = set()

    def __enter__(self) -> Call:
        self.tables, self.before = tables(self.addin), attributes(self.addin)
        self.modules = dict(self.addin.named_modules())
        initial = {name: _copied(value) for name, value in self.before.items()}
        begun = {**initial, **{name: _unpacked(value) for name, value in self.given.items()}}
        for name, value in begun.items():
            self._put(name, value)
        self.begun = {name: _copied(value) for name, value in begun.items()}
        self.stack = contextlib.ExitStack()
        if self.watch:
            self.stack.enter_context(_watched(self.modules, initial, self.read))
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()
        now, members = attributes(self.addin), tables(self.addin)
        self.set = {name: v for name, v in now.items() if name not in self.begun or not same(self.begun[name], v)}
        absent = object()
        names = self.tables.keys() | members.keys()
        self.anew = sorted(n for n in names if self.tables.get(n, absent) is not members.get(n, absent))
        for name in now.keys() - self.before.keys():
            owner, key = self._place(name)
            vars(owner).pop(key, None)
        for name, value in self.before.items():
            self._put(name, value)

    def left(self) -> dict[str, Any]:
        """What the next call begins with, as a graph can hand it on. Raises SpecError for a value that it cannot."""
        kind = type(self.addin).__name__
        return {**_copied(dict(self.given)), **{name: _packed(v, f"{kind}.{name}") for name, v in self.set.items()}}

    def _place(self, name: str) -> tuple[nn.Module, str]:
        path, _, key = name.rpartition(".")
        return self.modules[path], key

    def _put(self, name: str, value: Any) -> None:
        owner, key = self._place(name)
        vars(owner)[key] = value


@contextlib.contextmanager
def _watched(modules: Mapping[str, nn.Module], initial: Mapping[str, Any], read: set[str]) -> Iterator[None]:
    """Notes which of the values that the modules began with are read: for that time they are of classes that tell."""
    kinds = {path: type(module) for path, module in modules.items() if not type(module).__module__.startswith("torch.")}
    # nothing plainer: code of theirs holds these very objects, and reads are seen by a class only
    for path, kind in kinds.items():
        modules[path].__class__ = _telling(kind, path, initial, read)
    try:
        yield
    finally:
        for path, kind in kinds.items():
            modules[path].__class__ = kind


def _telling(kind: Any, path: str, initial: Mapping[str, Any], read: set[str]) -> Any:
    def __getattribute__(self: Any, key: str) -> Any:  # noqa: N807
        name = _joined(path, key)
        try:
            value = kind.__getattribute__(self, key)
        except AttributeError:  # asked whether it is there
            read.add(name)
            raise
        if name in initial and value is initial[name]:
            read.add(name)
        return value

    own = {"__getattribute__": __getattribute__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), own)


def same(a: Any, b: Any) -> bool:
    """Whether two values are one object, or equal numbers or text, or lists and dicts of such."""
    if a is b:
        return True
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return type(a) in (bool, int, float, str) and type(a) is type(b) and bool(a == b)


def _copied(value: Any) -> Any:
    """Containers anew, so that changing them in place leaves those of the add-in alone."""
    if isinstance(value, dict):
        return type(value)({k: _copied(v) for k, v in value.items()}) if type(value) is dict else value.copy()
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return set(value) if type(value) is set else value


def _packed(value: Any, name: str) -> Any:
    """A value as a graph can hand it on. Raises SpecError."""
    if value is None or isinstance(value, Tensor) or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, int):  # a number that was read from a shape
        return {SIZE: torch.empty(value, 0)}
    if isinstance(value, dict) and all(isinstance(key, (str, int)) for key in value):
        return {k: _packed(v, name) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        members = [_packed(v, name) for v in value]
        return members if isinstance(value, list) else {TUPLE: members}
    raise SpecError(
        f"'{name}' is a {type(value).__name__} that its next call would find changed, and a graph hands on tensors, sizes, and "
        "lists and dicts of them only"
    )


def _unpacked(value: Any) -> Any:
    if isinstance(value, dict) and SIZE in value:
        return value[SIZE].size(0)
    if isinstance(value, dict) and TUPLE in value:
        return tuple(map(_unpacked, value[TUPLE]))
    if isinstance(value, dict):
        return {k: _unpacked(v) for k, v in value.items()}
    return [*map(_unpacked, value)] if isinstance(value, list) else value


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
