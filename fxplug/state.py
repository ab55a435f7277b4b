"""Everything that Python code can change by way of a model, each place with what it held: to compare, and to put back."""

from __future__ import annotations

import argparse
import array
import contextlib
import functools
import operator
import random
import sys
import types
import weakref
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable
from functools import cached_property
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.modules import module as torch_module

from .spaces import CACHE, caches_of, foreign, globals_of, stored

PLAIN = (str, int, float, type(None), type, ModuleType)
CONTAINERS = (dict, list, set, deque)
# what torch itself keeps in a module beside its state: hooks, most of them dicts that are empty
HOOKS = set(vars(nn.Module())) - {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training"}
GLOBAL_HOOKS = [value for name, value in vars(torch_module).items() if name.startswith("_global_") and isinstance(value, dict)]
# classes of the standard library that hold what they are given
HOLDERS: tuple[type, ...] = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList)
HOLDERS += (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
Link = tuple[Any, Any]  # what holds a place, and under which key: from the module or file down


class _Kind(NamedTuple):
    """How to note what a value holds, to tell whether it changed, and to give it back."""

    note: Callable[[Any], Any]
    same: Callable[[Any, Any], bool]
    put: Callable[[Any, Any], None]


def _identical(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


def _base(value: Any) -> Any:
    """The class whose methods work on a dict, as its own may forbid changing it."""
    return OrderedDict if isinstance(value, OrderedDict) else dict


def _items(value: Any) -> dict[Any, Any]:
    return dict(OrderedDict.items(value)) if isinstance(value, OrderedDict) else dict.copy(value)


def _identical_items(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b)) and all(map(operator.is_, a.values(), b.values()))


def _put_items(value: Any, members: Any) -> None:
    base = _base(value)
    base.clear(value)
    for key, member in members.items():
        base.__setitem__(value, key, member)


def _put_list(value: Any, members: Any) -> None:
    value[:] = members


def _put_members(value: Any, members: Any) -> None:
    value.clear()
    (value.update if isinstance(value, set) else value.extend)(members)


def _fill(cell: CellType, contents: list[Any]) -> None:
    if contents:
        cell.cell_contents = contents[0]
    else:
        del cell.cell_contents


def _contents(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # still empty
        return []


def _put_array(value: np.ndarray, copy: np.ndarray) -> None:
    value[...] = copy


def _put_bit_state(value: np.random.Generator, state: Any) -> None:
    value.bit_generator.state = state


def _same_arrays(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes() if a.dtype != object else _identical(a.ravel(), b.ravel())


def _same_generators(a: torch.Generator, b: torch.Generator) -> bool:
    with unset_fake_temporarily():
        return torch.equal(a.get_state(), b.get_state())


KINDS: dict[type, _Kind] = {
    dict: _Kind(_items, _identical_items, _put_items),
    list: _Kind(list, _identical, _put_list),
    deque: _Kind(list, _identical, _put_members),
    set: _Kind(lambda v: set(v), lambda a, b: a == b, _put_members),
    CellType: _Kind(_contents, _identical, _fill),
    bytearray: _Kind(bytes, lambda a, b: a == b, _put_list),
    array.array: _Kind(lambda v: v[:], lambda a, b: a.tobytes() == b.tobytes(), _put_list),
    np.ndarray: _Kind(lambda v: v.copy(), _same_arrays, _put_array),
    torch.Generator: _Kind(lambda v: v.clone_state(), _same_generators, lambda v, s: v.set_state(s.get_state())),
    random.Random: _Kind(lambda v: v.getstate(), lambda a, b: a == b, lambda v, s: v.setstate(s)),
    np.random.RandomState: _Kind(lambda v: v.get_state(), lambda a, b: repr(a) == repr(b), lambda v, s: v.set_state(s)),
    np.random.Generator: _Kind(lambda v: v.bit_generator.state, lambda a, b: repr(a) == repr(b), _put_bit_state),
}


class Place(NamedTuple):
    """Where something changed: the container, the key in it (None: all of it), and what it held before."""

    owner: Any
    key: Any
    before: Any
    link: Link

    def __str__(self) -> str:
        return _written(self.link if self.key is None else (self.link, self.key))

    def root(self) -> Any:
        """The name of the module, class or file that holds the place."""
        outer, key = self.link
        while outer is not None:
            outer, key = outer
        return key

    def changed(self) -> bool:
        """Whether the place holds something else than before."""
        if self.key is None:
            return not _noting(self.owner).same(self.before, self.now())
        return self.now() is not self.before

    def now(self) -> Any:
        """What the place holds; `MISSING` where it is gone."""
        if self.key is None:
            return _noting(self.owner).note(self.owner)
        return (_items(self.owner) if isinstance(self.owner, dict) else _own(self.owner)).get(self.key, MISSING)


MISSING = type("Missing", (), {"__repr__": lambda self: "nothing"})()


class _Held(NamedTuple):
    """A tensor that was there, with what code can change of it without an operation."""

    tensor: torch.Tensor
    alias: torch.Tensor
    version: int
    requires_grad: bool
    grad: torch.Tensor | None
    link: Link

    def __str__(self) -> str:
        return _written(self.link)

    def is_buffer(self) -> bool:
        """Whether a module lists it among its buffers."""
        return self.link[0] is not None and self.link[0][1] == "_buffers"


class _Globals(NamedTuple):
    """A source file's globals that one of its functions writes; the others may be another thread's to write."""

    space: ModuleType
    names: set[str]


class State:
    """Everything that can be changed by way of modules: attributes, containers, objects that they hold, class attributes,
    globals, closures and caches of their source files.
    """

    def __init__(self, *roots: nn.Module) -> None:
        self.seen: set[int] = set()
        self.notes: list[tuple[Any, _Kind, Any, Link]] = []
        self.members: list[tuple[Any, dict[str, Any], Link]] = []
        self.hooks: list[tuple[dict[Any, Any], dict[Any, Any], Link]] = []
        self.classes: dict[int, dict[str, Any]] = {}
        self.tensors: dict[int, _Held] = {}
        self.caches: list[Any] = []
        modules = {id(m): (m, name) for root in roots for name, m in root.named_modules()}
        self.spaces = {type(m).__module__ for m, _ in modules.values()}
        self.own = set(modules)
        for module, name in modules.values():
            self.walk_object(module, (None, f"'{name}'" if name else type(module).__name__))
        for hooks in GLOBAL_HOOKS:
            self.walk_hooks(hooks, (None, "the hooks of all modules"))
        done: set[str] = set()
        while new := self.spaces - done:
            done |= new
            for name in new:
                space = sys.modules.get(name)
                if isinstance(space, ModuleType) and not foreign(name):
                    self.walk_space(space)

    # --- what there is

    def walk(self, value: Any, link: Link) -> None:
        if isinstance(value, PLAIN) or id(value) in self.seen:
            return
        if isinstance(value, torch.Tensor):
            self.hold(value, link)
        elif isinstance(value, fx.GraphModule) and id(value) not in self.own:
            return  # a graph that lies about, such as this model's of an earlier trace: no code of the model changes it
        elif (kind := _kind(value)) is not None:
            self.note(value, kind, link)
            if isinstance(value, CONTAINERS):
                for key, member in list(value.items()) if isinstance(value, dict) else enumerate(list(value)):
                    self.walk(member, (link, key))
        elif isinstance(value, tuple):
            for key, member in enumerate(value):
                self.walk(member, (link, key))
        elif isinstance(value, FunctionType):
            self.walk_function(value, link)
        elif isinstance(value, MethodType):
            self.walk(value.__self__, link)
        elif isinstance(value, functools.partial):
            self.seen.add(id(value))
            for member in (value.func, value.args, value.keywords):
                self.walk(member, link)
        elif id(value) not in self.own and (isinstance(value, (nn.Module, *HOLDERS)) or not foreign(type(value).__module__)):
            self.walk_object(value, link)

    def walk_object(self, value: Any, link: Link) -> None:
        if id(value) not in self.seen:
            self.seen.add(id(value))
            self.walk_class(type(value))
            attributes = getattr(value, "__dict__", None)
            if isinstance(attributes, dict):
                self.note(attributes, KINDS[dict], link)
                for key, member in list(attributes.items()):
                    if key not in HOOKS:
                        self.walk(member, (link, key))
                    elif isinstance(member, dict):
                        self.walk_hooks(member, (link, key))
            if slots := _slots(value):
                self.members.append((value, slots, link))
                for key, member in slots.items():
                    self.walk(member, (link, key))

    def walk_hooks(self, hooks: dict[Any, Any], link: Link) -> None:
        self.hooks.append((hooks, _items(hooks) if hooks else {}, link))
        for key, hook in list(hooks.items()):
            self.walk(hook, (link, key))

    def walk_function(self, function: FunctionType, link: Link) -> None:
        if foreign(function.__module__):
            return
        self.seen.add(id(function))
        self.caches.extend(caches_of(function))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) not in self.seen:
                self.note(cell, KINDS[CellType], (link, name))
                for member in _contents(cell):
                    self.walk(member, (link, name))
        self.walk(function.__dict__, link)
        for part in (function.__defaults__, function.__kwdefaults__):
            if part:
                self.walk(part, link)

    def note(self, value: Any, kind: _Kind, link: Link) -> None:
        self.seen.add(id(value))
        self.notes.append((value, kind, kind.note(value), link))

    def hold(self, tensor: torch.Tensor, link: Link) -> None:
        if id(tensor) in self.tensors:
            return
        with torch._C.DisableTorchFunction(), torch.no_grad(), contextlib.suppress(RuntimeError):
            grad = tensor.grad if tensor.is_leaf else None
            version = 0 if tensor.is_inference() else tensor._version
            self.tensors[id(tensor)] = _Held(tensor, tensor.detach(), version, tensor.requires_grad, grad, link)

    def walk_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if id(base) in self.seen or foreign(base.__module__):
                continue
            self.seen.add(id(base))
            self.spaces.add(base.__module__)
            self.classes[id(base)] = dict(vars(base))
            members = _own(base)
            link = (None, base.__qualname__)
            self.members.append((base, members, link))
            self.walk_members(members, link)

    def walk_space(self, space: ModuleType) -> None:
        link = (None, space.__name__)
        names = {name for value in list(vars(space).values()) for name in stored(value, space.__name__)}
        if names:
            self.members.append((_Globals(space, names), _own(_Globals(space, names)), link))
        members = {k: v for k, v in vars(space).items() if not k.startswith("__")}
        self.walk_members(members, link)
        for value in members.values():
            if isinstance(value, type) and value.__module__ == space.__name__:
                self.walk_class(value)

    def walk_members(self, members: Any, link: Link) -> None:
        for key, value in list(members.items()):
            value = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            if isinstance(value, CACHE):
                self.caches.append(value)
            elif isinstance(value, (FunctionType, *CONTAINERS, tuple, *HOLDERS, *KINDS)) or self.is_ours(value):
                self.walk(value, (link, key))

    def is_ours(self, value: Any) -> bool:
        return type(value).__module__ in self.spaces

    @cached_property
    def near(self) -> list[Any]:
        """Caches in the modules that the model's source files import from, and those import from."""
        known = {id(cache) for cache in self.caches}
        found: list[Any] = []
        done, now = set(self.spaces), set(self.spaces)
        for _ in range(2):
            members = [v for name in now for v in globals_of(name)]
            names = {v.__name__ for v in members if isinstance(v, ModuleType)}
            names |= {v.__module__ for v in members if isinstance(v, (FunctionType, CACHE, type))}
            now = {name for name in names - done if not foreign(name)}
            done |= now
            found.extend(cache for name in now for value in globals_of(name) for cache in caches_of(value))
        return [cache for cache in found if id(cache) not in known]

    # --- what became of it

    def changes(self) -> list[Place]:
        """The places that hold something else than they did; tensors changed in place are none."""
        found = []
        for value, kind, before, link in self.notes:
            if isinstance(value, dict):
                if type(value) is dict and _identical_items(before, value):
                    continue  # most are, and need no copy
                found += _differing(value, before, _items(value), link)
            elif not kind.same(before, kind.note(value)):
                found.append(Place(value, None, before, link))
        for hooks, before, link in self.hooks:
            if (hooks or before) and not _identical_items(before, hooks):
                found.append(Place(hooks, None, before, link))
        for owner, members, link in self.members:
            if not self.is_untouched(owner):
                found += _differing(owner, members, _own(owner), link)
        return found

    def is_untouched(self, owner: Any) -> bool:
        """Whether it is a class that holds the very objects it did, which most are."""
        return id(owner) in self.classes and _identical_items(self.classes[id(owner)], vars(owner))

    def restore(self) -> None:
        """Put everything back, in whatever order it changed."""
        for hooks, before, _ in self.hooks:
            if (hooks or before) and not _identical_items(before, hooks):
                _put_items(hooks, before)
        for value, kind, before, _ in self.notes:
            if type(value) is dict and _identical_items(before, value):
                continue
            if not kind.same(before, kind.note(value)):
                kind.put(value, before)
        for owner, members, _ in self.members:
            if self.is_untouched(owner):
                continue
            write = (setattr, delattr) if isinstance(owner, type) else (object.__setattr__, object.__delattr__)
            now, target = _own(owner), owner.space if isinstance(owner, _Globals) else owner
            for key, value in members.items():
                if now.get(key, MISSING) is not value:
                    write[0](target, key, value)
            for key in now.keys() - members.keys():
                write[1](target, key)

    def restore_tensors(self) -> None:
        """Give tensors their memory, geometry, gradients and versions back; their values are another matter."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for held in self.tensors.values():
                tensor, alias = held.tensor, held.alias
                if _geometry(tensor) != _geometry(alias):
                    tensor.data = alias
                if not tensor.is_leaf and not held.requires_grad:
                    with contextlib.suppress(RuntimeError):  # a view keeps the history of what it is a view of
                        tensor.detach_()
                if tensor.is_leaf and tensor.requires_grad != held.requires_grad:
                    tensor.requires_grad_(held.requires_grad)
                if tensor.is_leaf and tensor.grad is not held.grad:
                    tensor.grad = held.grad
                if not tensor.is_inference() and tensor._version != held.version:
                    torch._C._autograd._unsafe_set_version_counter((tensor,), (held.version,))


def _differing(owner: Any, before: dict[Any, Any], now: dict[Any, Any], link: Link) -> list[Place]:
    return [
        Place(owner, key, before.get(key, MISSING), link)
        for key in dict.fromkeys([*before, *now])
        if before.get(key, MISSING) is not now.get(key, MISSING)
    ]


def _geometry(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, nn.Parameter):
        return None
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _kind(value: Any) -> _Kind | None:
    return _kind_of(type(value))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1 << 14)
def _kind_of(cls: type) -> _Kind | None:
    return next((kind for base, kind in KINDS.items() if issubclass(cls, base)), None)


def _noting(value: Any) -> _Kind:
    found = _kind(value)
    assert found is not None
    return found


def _own(value: Any) -> dict[str, Any]:
    """The attributes of a class, those of an object that has slots, or globals that functions write."""
    if isinstance(value, _Globals):
        return {name: vars(value.space)[name] for name in value.names if name in vars(value.space)}
    if isinstance(value, type):
        return {k: v for k, v in vars(value).items() if not k.startswith("__")}
    return _slots(value)


def _slots(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in _slot_names(type(value)) if hasattr(value, name)}  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1 << 14)
def _slot_names(cls: type) -> tuple[str, ...]:
    names = (name for base in cls.__mro__ for name in _listed(vars(base).get("__slots__", ())))
    return tuple(name for name in names if not name.startswith("__"))


def _listed(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _written(link: Link) -> str:
    """A place as a person would write it: `'blocks.0'.cache['x']`."""
    outer, key = link
    if outer is None:
        return str(key)
    if key in ("_buffers", "_parameters", "_modules"):  # where torch keeps what is an attribute
        return _written(outer)
    if isinstance(key, str) and key.isidentifier():
        return f"{_written(outer)}.{key}"
    return f"{_written(outer)}[{key!r}]" if isinstance(key, (str, int)) else f"{_written(outer)}[...]"
