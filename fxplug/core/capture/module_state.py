"""What the modules of a model hold, by attributes and in memory: noted, to tell what a run changed, and to give it back.

Attributes, parameters, buffers and hooks of the modules; containers, objects and tensors that these hold. What lies outside of
the modules (globals, closures, classes, the environment, files) is no state of a model here.
"""

from __future__ import annotations

import array
import contextlib
import enum
import functools
import logging
import operator
import pathlib
import random
import re
import sys
import threading
import types
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ..ir.containers import list_leaves
from ..torch_internals.modules import TABLES
from ..torch_internals.tensors import (
    DisableTorchFunction,
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    get_gradient_hooks,
    list_fake_attributes,
    memory_id,
    schema,
    set_gradient_hooks,
    set_version,
    unset_fake_temporarily,
    version,
)
from .user_code import CACHE, is_foreign


class Journal(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operation as it is, and copies a tensor's memory before the first write into it.

    Memory that the run itself takes is left alone, so what is kept is only what outlives the run: buffers, inputs, tensors
    that the model holds.
    """

    supports_higher_order_operators = True  # such as flex_attention; they have no schema, and write nothing

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dispatching = False  # whether an operation runs that came as such, and not from a function
        self.made: set[int] = set()
        self.kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for index, argument in enumerate(schema(func).arguments if isinstance(func, OpOverload) else ()):
            # batch norms do not say that they move their running statistics
            if argument.name.startswith("running_") or (argument.alias_info and argument.alias_info.is_write):
                for value in list_leaves(args[index] if index < len(args) else kwargs.get(argument.name)):
                    self.keep(value)
        self.dispatching = True  # which a recording that listens sees: operations of code that is no Python come here only
        try:
            out = func(*args, **kwargs)
        finally:
            self.dispatching = False
        given = {memory_id(storage) for value in list_leaves((args, kwargs)) if (storage := get_storage(value)) is not None}
        for value in list_leaves(out):
            storage = get_storage(value)
            if storage is not None and memory_id(storage) not in given:
                self.made.add(memory_id(storage))
        return out

    def keep(self, value: Any) -> None:
        """Copy the memory of a tensor, once."""
        storage = get_storage(value)
        if storage is not None and memory_id(storage) not in self.made and memory_id(storage) not in self.kept:
            self.kept[memory_id(storage)] = (storage, storage.clone())  # type: ignore[no-untyped-call]

    def makes(self, tensor: torch.Tensor) -> bool:
        """Return whether this run allocated the memory of a tensor."""
        storage = get_storage(tensor)
        return storage is not None and memory_id(storage) in self.made

    def forget(self, tensor: torch.Tensor) -> None:
        """Count a tensor as one that existed before the run."""
        storage = get_storage(tensor)
        if storage is not None:
            self.made.discard(memory_id(storage))

    def now(self) -> dict[int, torch.UntypedStorage]:
        """Return a copy of all written memory as it is now."""
        return {key: storage.clone() for key, (storage, _) in self.kept.items()}  # type: ignore[no-untyped-call]

    def put_back(self, values: dict[int, torch.UntypedStorage] | None = None) -> None:
        """Restore the memory as before the run, or as in an earlier `now()`."""
        for key, (storage, before) in self.kept.items():
            then = before if values is None else values.get(key, before)
            if storage.nbytes() != then.nbytes():
                storage.resize_(then.nbytes())
            storage.copy_(then)


def get_storage(value: Any) -> torch.UntypedStorage | None:
    """Return the storage of a tensor, or None."""
    if not isinstance(value, torch.Tensor):
        return None
    with DisableTorchFunction():
        if value.layout is not torch.strided or value.is_meta:
            return None
        try:
            return value.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a tensor of another kind, which has no memory of its own
            return None


class StateKind(NamedTuple):
    """How to note what a value holds, to tell whether it changed, and to give it back."""

    note: Callable[[Any], Any]
    same: Callable[[Any, Any], bool]
    put: Callable[[Any, Any], None]


def _identical(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


def items(value: Any) -> dict[Any, Any]:
    """Return the items of a dict, whatever its class makes of `items()`."""
    return dict(OrderedDict.items(value)) if isinstance(value, OrderedDict) else dict.copy(value)


def has_identical_items(a: Any, b: Any) -> bool:
    """Return whether two dicts have identical keys and values, in the same order."""
    return len(a) == len(b) and all(map(operator.is_, a, b)) and all(map(operator.is_, a.values(), b.values()))


def put_items(value: Any, members: Any) -> None:
    """Replace the members of a dict, whatever its class allows."""
    base: Any = OrderedDict if isinstance(value, OrderedDict) else dict  # its own class may forbid changing it
    base.clear(value)
    for key, member in members.items():
        base.__setitem__(value, key, member)


def _put_list(value: Any, members: Any) -> None:
    (list if isinstance(value, list) else type(value)).__setitem__(value, slice(None), members)


def _put_members(value: Any, members: Any) -> None:
    value.clear()
    (value.update if isinstance(value, set) else value.extend)(members)


def _same_generators(a: torch.Generator, b: torch.Generator) -> bool:
    with unset_fake_temporarily():
        return torch.equal(a.get_state(), b.get_state())


KINDS: dict[type, StateKind] = {
    dict: StateKind(items, has_identical_items, put_items),
    list: StateKind(lambda v: list(list.__iter__(v)), _identical, _put_list),
    deque: StateKind(lambda v: list(deque.__iter__(v)), _identical, _put_members),
    set: StateKind(lambda v: set(set.__iter__(v)), lambda a, b: a == b, _put_members),
    bytearray: StateKind(bytes, lambda a, b: a == b, _put_list),
    array.array: StateKind(lambda v: v[:], lambda a, b: a.tobytes() == b.tobytes(), _put_list),
    np.ndarray: StateKind(
        lambda v: v.copy(),
        lambda a, b: a.tobytes() == b.tobytes() if a.dtype != object else _identical(a.ravel(), b.ravel()),
        lambda v, s: v.__setitem__(..., s),
    ),
    torch.Generator: StateKind(lambda v: v.clone_state(), _same_generators, lambda v, s: v.set_state(s.get_state())),
    random.Random: StateKind(lambda v: v.getstate(), lambda a, b: a == b, lambda v, s: v.setstate(s)),
    np.random.RandomState: StateKind(lambda v: v.get_state(), lambda a, b: repr(a) == repr(b), lambda v, s: v.set_state(s)),
    np.random.Generator: StateKind(
        lambda v: v.bit_generator.state, lambda a, b: repr(a) == repr(b), lambda v, s: setattr(v.bit_generator, "state", s)
    ),
}


@functools.lru_cache(maxsize=1 << 14)
def kind_of(cls: type) -> StateKind:
    """Return the kind of the values of a class in KINDS, or of a derived one."""
    return next(kind for base, kind in KINDS.items() if issubclass(cls, base))


MISSING = type("Missing", (), {"__repr__": lambda self: "nothing"})()
PLAIN: tuple[type, ...] = (str, bytes, int, float, complex, type(None), type, types.ModuleType, types.FunctionType)
PLAIN += (types.BuiltinFunctionType, types.GenericAlias, types.UnionType, frozenset, range, slice, re.Pattern, enum.Enum)
PLAIN += (pathlib.PurePath, logging.Logger, threading.Thread, np.generic, np.dtype)
PLAIN += (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.jit.ScriptFunction)
# classes of the standard library that hold what they are given
HOLDERS: tuple[type, ...] = (types.SimpleNamespace, UserDict, UserList)
HOOKS = set(vars(nn.Module())) - {*TABLES, "training"}  # tables of every module, most of them empty
Link = tuple[Any, Any]  # what holds a place, and under which key: from the module down


class Home(NamedTuple):
    """The module at the beginning of each link."""

    path: str
    kind: type

    def __str__(self) -> str:
        return f"'{self.path}'" if self.path else self.kind.__name__


class StatePlace(NamedTuple):
    """Where something changed: the container, the key in it (None: all of it), and what it held before."""

    owner: Any
    key: Any
    before: Any
    link: Link

    def __str__(self) -> str:
        return written(self.link if self.key is None else (self.link, self.key))

    def path(self) -> str:
        """Return the path of the module that holds the place."""
        return split_place(self.link)[0].path  # type: ignore[no-any-return]

    def is_in(self, leaves: Iterable[str]) -> bool:
        """Return whether the place is in one of these modules, or a part of it."""
        return any(f"{self.path()}.".startswith(f"{leaf}.") for leaf in leaves)

    def now(self) -> Any:
        """Return the current value at the place; `MISSING` if it is gone."""
        if self.key is None:
            return kind_of(type(self.owner)).note(self.owner)  # type: ignore[arg-type]
        return (items(self.owner) if isinstance(self.owner, dict) else own(self.owner)).get(self.key, MISSING)


class _TensorState(NamedTuple):
    """A tensor that was there, with what code can change of it without an operation."""

    tensor: torch.Tensor
    alias: torch.Tensor
    version: int
    requires_grad: bool
    grad: torch.Tensor | None
    link: Link
    hooks: dict[int, Any]

    def __str__(self) -> str:
        return written(self.link)

    def is_as_it_was(self) -> bool:
        """Return whether memory, geometry, hooks and flag are unchanged, whatever its values are."""
        flags = self.tensor.requires_grad, get_gradient_hooks(self.tensor)
        return not self.is_moved() and flags == (self.requires_grad, self.hooks)

    def is_moved(self) -> bool:
        """Return whether it has other memory or another geometry; for some subclasses this is unknown."""
        alias = self.alias
        if alias.layout is not torch.strided or type(alias) is not torch.Tensor:
            return False
        return bool(_geometry(self.tensor) != _geometry(alias))


class State:
    """What modules hold when it is made, and what became of it since."""

    def __init__(self, *roots: nn.Module) -> None:
        self.seen: set[int] = set()
        self.notes: list[tuple[Any, Any, Any, Link]] = []
        self.members: list[tuple[Any, dict[str, Any], Link]] = []  # of objects with slots, and of tensors
        self.hooks: list[tuple[dict[str, Any], dict[str, dict[Any, Any]], Link]] = []
        self.tensors: dict[int, _TensorState] = {}
        self.todo: list[tuple[Any, Link]] = []
        self.opaque = False  # whether there is an object, such as an iterator, of which nobody can tell what it keeps
        self.modules = {id(m): (m, name) for root in roots for name, m in root.named_modules()}
        self.kinds: set[type] = set()
        with DisableTorchFunction(), torch.no_grad():
            for module, name in self.modules.values():
                self._note_object(module, (None, Home(name, type(module))))
            while self.todo:
                self._look(*self.todo.pop())
        self.caches = _caches(self.kinds)

    def _look(self, value: Any, link: Link) -> None:
        if id(value) in self.seen:
            return
        if isinstance(value, torch.Tensor):
            self._note_tensor(value, link)
        elif isinstance(value, tuple(KINDS)):
            self.seen.add(id(value))
            kind = kind_of(type(value))  # type: ignore[arg-type]
            held = kind.note(value)
            self.notes.append((value, kind, held, link))
            if isinstance(value, (dict, list, set, deque)):
                self._later(held.items() if isinstance(held, dict) else enumerate(held), link)
        elif isinstance(value, tuple):
            self.seen.add(id(value))
            self._later(enumerate(value), link)
        elif isinstance(value, MethodType):
            self._later([(None, value.__self__)], link)
        elif isinstance(value, functools.partial):
            self._later([(None, part) for part in (value.func, value.args, value.keywords)], link)
        elif isinstance(value, (nn.Module, *HOLDERS)) or not is_foreign(type(value)):
            if id(value) not in self.modules:
                self._note_object(value, link)
        else:
            self.opaque = True

    def _later(self, members: Iterable[tuple[Any, Any]], link: Link) -> None:
        for key, member in members:
            if id(member) not in self.seen and not _is_plain(type(member)):  # type: ignore[arg-type]
                self.todo.append((member, (link, key)))

    def _note_object(self, value: Any, link: Link) -> None:
        self.seen.add(id(value))
        self.kinds.add(type(value))
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self.seen.add(id(attributes))
            self.notes.append((attributes, KINDS[dict], items(attributes), link))
            members: Iterable[tuple[str, Any]] = list(attributes.items())
            if isinstance(value, nn.Module):
                tables = {key: attributes[key] for key in HOOKS if isinstance(attributes.get(key), dict)}
                self.hooks.append((tables, {key: items(table) for key, table in tables.items() if table}, link))
                members = [item for item in members if item[0] not in tables]
                self._later(((key, hook) for key, table in tables.items() for hook in table.values()), link)
            self._later(members, link)
        if slots := _slots(value):
            self.members.append((value, slots, link))
            self._later(slots.items(), link)

    def _note_tensor(self, tensor: torch.Tensor, link: Link) -> None:
        self.seen.add(id(tensor))
        with contextlib.suppress(RuntimeError):
            grad = tensor.grad if tensor.is_leaf else None
            writes = 0 if tensor.is_inference() else version(tensor)
            flags = tensor.requires_grad, grad, link, get_gradient_hooks(tensor)
            self.tensors[id(tensor)] = _TensorState(tensor, tensor.detach(), writes, *flags)
        attributes = get_own_attributes(tensor)
        self.members.append((tensor, attributes, link))
        self._later(attributes.items(), link)

    # --- what became of it

    def changes(self) -> list[StatePlace]:
        """Return the places with another value than before; tensors changed in place are none."""
        found = []
        for value, kind, before, link in self.notes:
            if isinstance(value, dict):
                if type(value) is dict and has_identical_items(before, value):
                    continue  # most are, and need no copy
                found += _differing(value, before, items(value), link)
            elif not kind.same(before, kind.note(value)):
                found.append(StatePlace(value, None, before, link))
        found += [StatePlace(hooks, None, before, (link, key)) for hooks, before, link, key in self._changed_hooks()]
        for owner, members, link in self.members:
            found += _differing(owner, members, own(owner), link)
        return found

    def _changed_hooks(self) -> Iterator[tuple[dict[Any, Any], dict[Any, Any], Link, str]]:
        for tables, before, link in self.hooks:
            if before or any(tables.values()):
                for key, hooks in tables.items():
                    if not has_identical_items(before.get(key, {}), hooks):
                        yield hooks, before.get(key, {}), link, key

    def restore(self) -> None:
        """Restore everything, in whatever order it changed."""
        for hooks, before, _, _ in self._changed_hooks():
            put_items(hooks, before)
        for value, kind, before, _ in self.notes:
            if type(value) is dict and has_identical_items(before, value):
                continue
            if not kind.same(before, kind.note(value)):
                kind.put(value, before)
        for owner, members, _ in self.members:
            now = own(owner)
            for key, value in members.items():
                if now.get(key, MISSING) is not value:
                    object.__setattr__(owner, key, value)
            for key in now.keys() - members.keys():
                object.__delattr__(owner, key)

    def restore_tensors(self) -> None:
        """Restore memory, geometry, gradients and versions of tensors, but not their values."""
        with DisableTorchFunction(), torch.no_grad():
            for held in self.tensors.values():
                tensor = held.tensor
                if held.is_moved():
                    tensor.data = held.alias
                if not tensor.is_leaf and not held.requires_grad:
                    with contextlib.suppress(RuntimeError):  # a view keeps the history of what it is a view of
                        tensor.detach_()
                if tensor.is_leaf and tensor.requires_grad != held.requires_grad:
                    tensor.requires_grad_(held.requires_grad)
                set_gradient_hooks(tensor, held.hooks)
                if tensor.is_leaf and tensor.grad is not held.grad:
                    tensor.grad = held.grad
                if not tensor.is_inference() and version(tensor) != held.version:
                    set_version(tensor, held.version)


@functools.lru_cache(maxsize=1 << 14)
def _is_plain(cls: type) -> bool:
    return issubclass(cls, PLAIN) or cls.__module__ == "typing"


def _caches(kinds: set[type]) -> list[Any]:
    """Return the cached functions of classes and their files: a run on fake tensors would leave some of these in the caches.

    A decorator may hold such a function in its closure, as diffusers' `lru_cache_unless_export` does.
    """
    classes = {base for kind in kinds for base in kind.__mro__ if not is_foreign(base)}
    spaces = [vars(sys.modules[name]) for name in {c.__module__ for c in classes} if name in sys.modules]
    values = [value for space in (*map(vars, classes), *spaces) for value in list(space.values())]
    found = [value.__func__ if isinstance(value, (staticmethod, classmethod)) else value for value in values]
    cells = [cell for value in found if isinstance(value, types.FunctionType) for cell in value.__closure__ or ()]
    found += [cell.cell_contents for cell in cells if cell != types.CellType()]
    return [value for value in found if isinstance(value, CACHE)]


def own(value: Any) -> dict[str, Any]:
    """Return the attributes of a tensor, or those of an object with slots."""
    return get_own_attributes(value) if isinstance(value, torch.Tensor) else _slots(value)


def get_own_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that code has set on a tensor; names with an underscore are torch's and ours."""
    torchs = list_fake_attributes() if type(tensor) is FakeTensor else ()
    return {name: value for name, value in vars(tensor).items() if not name.startswith("_") and name not in torchs}


def _slots(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in _slot_names(type(value)) if hasattr(value, name)}  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1 << 14)
def _slot_names(cls: type) -> tuple[str, ...]:
    listed = (vars(base).get("__slots__", ()) for base in cls.__mro__)
    names = (name for slots in listed for name in ([slots] if isinstance(slots, str) else list(slots)))
    return tuple(name for name in names if not name.startswith("__"))


def split_place(link: Link) -> list[Any]:
    """Return the module of a place and the keys from there on."""
    keys = []
    while link is not None:
        link, key = link
        keys.append(key)
    return keys[::-1]


def written(link: Link) -> str:
    """Format a place in Python's syntax: `'blocks.0'.cache['x']`."""
    home, *keys = split_place(link)
    text = str(home)
    for key in keys:
        if key in ("_buffers", "_parameters", "_modules"):  # where torch keeps what is an attribute
            continue
        if isinstance(key, str) and key.isidentifier():
            text += f".{key}"
        else:
            text += f"[{key!r}]" if isinstance(key, (str, int)) else "[...]"
    return text


def _differing(owner: Any, before: dict[Any, Any], now: dict[Any, Any], link: Link) -> list[StatePlace]:
    return [
        StatePlace(owner, key, before.get(key, MISSING), link)
        for key in dict.fromkeys([*before, *now])
        if before.get(key, MISSING) is not now.get(key, MISSING)
    ]


def _geometry(tensor: torch.Tensor) -> Any:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
