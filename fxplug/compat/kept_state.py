"""What plugins and add-ins keep in their attributes while one of their methods is traced.

A graph has no place for an attribute that one call of the model writes and a later one reads. Attributes are watched during a
method, and are afterwards as they were; what a later method of the same call needs is handed on as values of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import SpecError
from ..core.torch_internals.tensors import version

TABLES = ("_parameters", "_buffers", "_modules")
OWN = set(vars(nn.Module())) - set(TABLES)  # what torch keeps in a module, and what every module may change
UNWATCHED = OWN | {*TABLES, "__dict__", "__class__"}
MISSING: Any = object()
# how a number travels that is known when the graph runs, as the size of a tensor without elements; and a tuple
SIZE, TUPLE = "@size", "@tuple"


def list_tables(module: nn.Module) -> dict[str, Any]:
    """Return the parameters, buffers and modules in a module, by name."""
    found = {}
    for path, part in module.named_modules():
        for table in TABLES:
            found.update({_joined(path, key): member for key, member in vars(part)[table].items()})
    return found


def attributes(module: nn.Module) -> dict[str, Any]:
    """Return all other attributes in a module by name, without those that torch has in every module."""
    return {
        _joined(path, key): value
        for path, part in module.named_modules()
        for key, value in vars(part).items()
        if key not in OWN and key not in TABLES
    }


class MethodCall:
    """One call of a method, as a `with`: the module begins with what is `left` of the calls before, and is then as it was.

    Then `set` has the attributes that the call changed, `anew` the names of parameters, buffers and modules that it set, and
    `read` those of the attributes that it read before it had written them, each with the member that was read if that is known.
    """

    def __init__(self, module: nn.Module, left: Mapping[str, Any] | None = None) -> None:
        self.module, self.given = module, left or {}
        self.set: dict[str, Any] = {}
        self.anew: list[str] = []
        self.read: dict[str, str] = {}

    def __enter__(self) -> MethodCall:
        self.tables, self.before = list_tables(self.module), attributes(self.module)
        self.modules = dict(self.module.named_modules())
        self.members = {(path, table): dict(vars(m)[table]) for path, m in self.modules.items() for table in TABLES}
        self.log = _AccessLog(self.given)
        noting: dict[int, Any] = {}
        for name, value in self.before.items():
            self._put(name, noting.setdefault(id(value), self.log.noting(_copied(value))))
        for name, value in self.given.items():
            self._put(name, _unpacked(value))
        self.begun = {name: (_copied(value), _fingerprint(value)) for name, value in attributes(self.module).items()}
        # nothing plainer: code of theirs holds these very objects, and reads are seen by a class only
        self.kinds = {path: type(m) for path, m in self.modules.items() if not type(m).__module__.startswith("torch.")}
        for path, kind in self.kinds.items():
            self.modules[path].__class__ = _watched_class(kind, path, self.log)
        return self

    def __exit__(self, *error: object) -> None:
        for path, kind in self.kinds.items():
            self.modules[path].__class__ = kind
        now, members = attributes(self.module), list_tables(self.module)
        for name in {**self.begun, **now}:
            begun, marks = self.begun.get(name, (MISSING, None))
            value = now.get(name, MISSING)
            if not equal_values(begun, value) or _fingerprint(value) != marks:
                self.set[name] = value
        self.read = {name: label for name in self.log.read_first() if (label := self._label(name, now))}
        self.anew = sorted(
            n for n in self.tables.keys() | members.keys() if self.tables.get(n, MISSING) is not members.get(n, MISSING)
        )
        for (path, table), before in self.members.items():
            vars(self.modules[path])[table].clear()
            vars(self.modules[path])[table].update(before)
        for name in now.keys() - self.before.keys():
            path, _, key = name.rpartition(".")
            if path in self.modules:
                self.modules[path].__dict__.pop(key, None)
        for name, value in self.before.items():
            self._put(name, value)

    def next_call_state(self) -> dict[str, Any]:
        """Return the attributes that the next call starts with, as values of a graph. Raises SpecError for a value that is
        none."""
        kind = type(self.module).__name__
        return {**_copied(dict(self.given)), **{name: _packed(v, f"{kind}.{name}") for name, v in self.set.items()}}

    def _label(self, name: str, now: Mapping[str, Any]) -> str:
        """Return the name of the attribute or member that was read before it was written; "" if only written members were
        read."""
        value = now.get(name)
        if name not in self.set or type(value) not in (_List, _Dict):
            return name
        before, after = (dict(enumerate(x) if isinstance(x, list) else x) for x in (self.begun[name][0], plain(value)))
        if isinstance(value, list) and len(before) != len(after):
            return name
        for key in {**before, **after}:
            equal = equal_values(before.get(key, MISSING), after.get(key, MISSING))
            if not equal and self.log.first.get((id(value), key)) != "write":
                return f"{name}[{key!r}]"
        return ""

    def _put(self, name: str, value: Any) -> None:
        path, _, key = name.rpartition(".")
        self.modules[path].__dict__[key] = value


class ReadNames:
    """The attributes that the methods of a module have read first; a set on a module is put back as it was after a trace."""

    __slots__ = ("names",)

    def __init__(self) -> None:
        self.names: set[str] = set()

    def stale(self, module: nn.Module, left: Mapping[str, Any]) -> list[str]:
        """Return the attributes that were read with their value from before the forward, and that it `left` with another."""
        before, found = attributes(module), self.names.intersection(left)
        names = sorted(found)
        return [n for n in names if n not in before or not equal_values(_packed(before[n], n), left[n])]


class _AccessLog:
    """Whether attributes and members were first read or first written; what is `given` counts as written."""

    def __init__(self, given: Iterable[str]) -> None:
        self.first: dict[Any, str] = dict.fromkeys(given, "write")

    def note(self, key: Any, what: str) -> None:
        self.first.setdefault(key, what)

    def read_first(self) -> list[str]:
        return [key for key, what in self.first.items() if what == "read" and isinstance(key, str)]

    def noting(self, value: Any) -> Any:
        """Wrap a list or dict so that it records which members are read and written; return anything else as it is."""
        if type(value) not in (list, dict):
            return value
        new = _List(value) if type(value) is list else _Dict(value)
        new.log, new.before = self, frozenset(range(len(value)) if type(value) is list else value)
        return new


def _noting(kind: type, methods: Mapping[str, tuple[str, Callable[..., Iterable[Any]]]]) -> Any:
    """Make a subclass of list or dict that records, for each of `methods`, the members which it reads or writes."""

    def noted(name: str, what: str, members: Callable[..., Iterable[Any]]) -> Callable[..., Any]:
        unnoted = getattr(kind, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            for member in members(self, *args, **kwargs):
                self.log.note((id(self), member), what)
            return unnoted(self, *args, **kwargs)

        return method

    return type(kind.__name__, (kind,), {name: noted(name, *how) for name, how in methods.items()})


def _at(self: Any, key: Any, *more: Any) -> Iterable[Any]:
    """Return the members at an index or a slice of a list."""
    return range(*key.indices(len(self))) if isinstance(key, slice) else [key % max(len(self), 1)]


def _all(self: Any) -> Iterable[Any]:
    return range(len(self))


_List = _noting(list, {
    "__getitem__": ("read", _at), "__setitem__": ("write", _at), "__iter__": ("read", _all), "clear": ("write", _all),
    "append": ("write", lambda self, value: [len(self)]),
})  # fmt: skip
_Dict = _noting(dict, {
    **dict.fromkeys(("__getitem__", "__contains__", "get"), ("read", lambda self, key, *more: [key])),
    **dict.fromkeys(("__iter__", "keys", "values", "items"), ("read", lambda self: self.before)),
    "__setitem__": ("write", lambda self, key, value: [key]),
    "update": ("write", lambda self, *args, **kwargs: dict(*args, **kwargs)),
})  # fmt: skip


def plain(value: Any) -> Any:
    """Return a list or dict without the recording."""
    return list.copy(value) if type(value) is _List else dict.copy(value) if type(value) is _Dict else value


def _watched_class(kind: Any, path: str, log: _AccessLog) -> Any:
    """Make a subclass that records which attributes are read and written, and looks like the class itself."""

    def __getattribute__(self: Any, key: str) -> Any:  # noqa: N807
        if key not in UNWATCHED and not callable(getattr(kind, key, None)):
            log.note(_joined(path, key), "read")
        return kind.__getattribute__(self, key)

    def __setattr__(self: Any, key: str, value: Any) -> None:  # noqa: N807
        log.note(_joined(path, key), "write")
        kind.__setattr__(self, key, value)

    own = {"__getattribute__": __getattribute__, "__setattr__": __setattr__}
    return type(kind.__name__, (kind,), {**own, "__module__": kind.__module__, "__qualname__": kind.__qualname__})


def equal_values(a: Any, b: Any) -> bool:
    """Return whether two values are one object, or equal numbers or text, or lists, dicts and sets of such."""
    if a is b:
        return True
    a, b = plain(a), plain(b)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(equal_values(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal_values(a[k], b[k]) for k in a)
    simple = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, set, frozenset)
    return type(a) in simple and type(a) is type(b) and bool(a == b)


def _fingerprint(value: Any) -> Any:
    """Return a value that changes if a tensor, or an object with attributes, is changed in place."""
    if isinstance(value, Tensor):
        return version(value)
    if isinstance(value := plain(value), (list, tuple)):
        return [*map(_fingerprint, value)]
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict) and not callable(value) and not isinstance(value, nn.Module):
        return [(key, id(member)) for key, member in own.items()]
    return None


def _copied(value: Any) -> Any:
    """Copy containers, so that changing them in place does not change those of the module."""
    value = plain(value)
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()} if type(value) is dict else value.copy()
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return set(value) if type(value) is set else value


def _packed(value: Any, name: str) -> Any:
    """Convert a value to one that a graph can pass on. Raises SpecError."""
    value = plain(value)
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
        f"'{name}' is a {type(value).__name__} that changes from call to call, and a graph can pass on only tensors, sizes, "
        "and lists and dicts of them"
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
