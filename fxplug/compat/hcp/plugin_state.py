"""What a plugin keeps on itself: within one call anything goes, from one call to the next is an error.

A graph has no place for an attribute that one call writes and a later one reads. While a plugin is traced its attributes
are watched; afterwards they are as they were before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...core.errors import TraceError
from ...core.torch_internals.tensors import version

OWN = frozenset(vars(nn.Module())) | {"__dict__", "__class__"}  # what nn.Module itself keeps
MISSING: Any = object()
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class _Log:
    """Which attributes and members were first read, and which were written."""

    def __init__(self) -> None:
        self.first: dict[Any, str] = {}
        self.written: set[Any] = set()

    def read(self, key: Any) -> None:
        self.first.setdefault(key, "read")

    def write(self, key: Any) -> None:
        self.first.setdefault(key, "write")
        self.written.add(key)

    def stale(self, key: Any) -> bool:
        """Whether a value of an earlier call was seen, and then another was put in its place."""
        return key in self.written and self.first[key] == "read"


def _noting(kind: type, methods: dict[str, tuple[str, Callable[..., Iterable[Any]]]]) -> Any:
    """A list or dict that logs which members its methods read and write: by method, `read` or `write`, and which members.

    `log` is the log, `before` the members that were there at the beginning.
    """

    def noted(name: str, role: str, members: Callable[..., Iterable[Any]]) -> Callable[..., Any]:
        plain = getattr(kind, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            for member in members(self, *args, **kwargs):
                getattr(self.log, role)((id(self), member))
            return plain(self, *args, **kwargs)

        return method

    return type(f"_Noting{kind.__name__}", (kind,), {name: noted(name, *how) for name, how in methods.items()})


def _at(self: Any, key: Any, *more: Any) -> Iterable[Any]:
    """The members at an index or a slice of a list."""
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


@contextmanager
def watched(plugin: nn.Module, name: str) -> Iterator[None]:
    """Watch the attributes of a plugin and of its own modules during one call, and put them back after it.

    Raises TraceError, naming the attribute, when the call reads what an earlier one left there and leaves something else:
    a counter, a cache, a list that grows, a buffer that is assigned.
    """
    modules = [(path, m) for path, m in plugin.named_modules() if not type(m).__module__.startswith("torch.nn.")]
    watches = [_Watch(f"{name}.{path}" if path else name, module) for path, module in modules]
    try:
        for watch in watches:
            watch.begin()
        yield
        for watch in watches:
            watch.judge()
    finally:
        for watch in watches:
            watch.end()


class _Watch:
    """One module during one call."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.kind = type(module)
        self.log = _Log()
        self.held = {k: v for k, v in vars(module).items() if k not in OWN}
        self.tables = {k: dict(vars(module)[k]) for k in ("_parameters", "_buffers", "_modules")}
        self.inside = {k: _snapshot(v) for k, v in self.held.items()}
        self.stand_ins: dict[str, Any] = {}

    def begin(self) -> None:
        made: dict[int, Any] = {}
        for key, value in self.held.items():
            if type(value) in (list, dict):
                stand_in = made.setdefault(id(value), _List(value) if type(value) is list else _Dict(value))
                stand_in.log = self.log
                stand_in.before = frozenset(range(len(value)) if type(value) is list else value)
                self.stand_ins[key] = vars(self.module)[key] = stand_in
        # nothing plainer: the plugin holds this very object, and what is set on it is seen by a class only
        self.module.__class__ = _watched_class(self.kind, self.log)

    def judge(self) -> None:
        now = vars(self.module)
        for key in sorted(k for k in self.log.written if isinstance(k, str)):
            if self.log.stale(key) and not _same(self.held.get(key, MISSING), now.get(key, MISSING)):
                self.refuse(key, "is read before this call has written it, and then written: it holds what the last call left")
        for table, before in self.tables.items():
            changed = [k for k in {**before, **now[table]} if before.get(k) is not now[table].get(k)]
            if changed and table == "_modules":
                self.refuse(changed[0], "is a module that is made or changed during the call: make it in __init__")
            if changed:
                self.refuse(changed[0], f"is assigned during the call: change it in place (self.{changed[0]}.copy_(...))")
        for key, value in self.held.items():
            stand_in = self.stand_ins.get(key)
            if stand_in is not None:
                self.judge_members(key, value, stand_in)
            elif now.get(key) is value and _changed(self.inside[key], _snapshot(value)):
                self.refuse(key, "is changed in place and kept for the next call")

    def judge_members(self, key: str, before: Any, after: Any) -> None:
        is_list = isinstance(before, list)
        if is_list and len(before) != len(after):
            word = "grows" if len(after) > len(before) else "shrinks"
            self.refuse(key, f"is a list made before the call that {word} in it, from {len(before)} to {len(after)} members")
        members = range(len(before)) if is_list else {**before, **dict.copy(after)}
        for member in members:
            old = list.__getitem__(before, member) if is_list else before.get(member, MISSING)
            new = list.__getitem__(after, member) if is_list else dict.get(after, member, MISSING)
            if not _same(old, new) and self.log.first.get((id(after), member)) != "write":
                self.refuse(f"{key}[{member!r}]", "is read before this call has written it: it holds what the last call left")
        for *_, same, inside in self.inside[key]:  # what is in members that stayed the same objects
            for now in _snapshot(list(after) if is_list else dict(after)):
                if now[-2] == same and inside is not None and now[-1] != inside:
                    self.refuse(key, "holds something that is changed in place and kept for the next call")

    def refuse(self, key: str, finding: str) -> None:
        raise TraceError(
            f"{self.name}: the attribute 'self.{key}' {finding}. A graph keeps no Python values between calls; give what comes "
            "from outside as an input of the pass (feed_input_data gets it), and keep what lasts in a buffer "
            "(register_buffer in __init__, changed in place)"
        )

    def end(self) -> None:
        self.module.__class__ = self.kind
        now = vars(self.module)
        for key in [k for k in now if k not in OWN and k not in self.held]:
            del now[key]
        now.update(self.held)
        for table, before in self.tables.items():
            now[table].clear()
            now[table].update(before)


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module, also while it is watched."""
    return getattr(type(module), "_watched", type(module))


def _watched_class(kind: type[nn.Module], log: _Log) -> Any:
    """A subclass that tells the log which attributes are read and written, and looks like the class itself."""

    def __getattribute__(self: Any, name: str) -> Any:
        if name not in OWN:
            log.read(name)
        return kind.__getattribute__(self, name)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if name not in OWN:
            log.write(name)
        kind.__setattr__(self, name, value)

    def __delattr__(self: Any, name: str) -> None:
        log.write(name)
        kind.__delattr__(self, name)

    members: dict[str, Any] = {
        "_watched": kind,
        "__getattribute__": __getattribute__,
        "__setattr__": __setattr__,
        "__delattr__": __delattr__,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    return type(kind.__name__, (kind,), members)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    return type(a) is type(b) and isinstance(a, PLAIN) and bool(a == b)


def _snapshot(value: Any, depth: int = 2) -> Any:
    """What a value that stays the same object holds: members of containers, attributes of objects, versions of tensors."""
    if isinstance(value, torch.Tensor):
        return ("version", version(value))
    if isinstance(value, (str, type, nn.Module)) or depth == 0:
        return None
    if isinstance(value, dict):
        return [(k, id(v), _snapshot(v, depth - 1)) for k, v in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(id(v), _snapshot(v, depth - 1)) for v in value]
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict) and not callable(value):
        return [(k, id(v), _snapshot(v, depth - 1)) for k, v in attributes.items()]
    return None


def _changed(before: Any, after: Any) -> bool:
    return bool(before != after)
