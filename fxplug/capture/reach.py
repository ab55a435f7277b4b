"""What Python code can reach by way of a model: attributes, containers, objects, classes, closures, globals, caches."""

from __future__ import annotations

import argparse
import contextlib
import copy
import enum
import functools
import inspect
import itertools
import logging
import pathlib
import re
import sys
import threading
import types
import warnings
import weakref
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx, nn

from ..torch_internals.dispatch import DisableTorchFunction
from ..torch_internals.fakes import FakeTensor, kept_on_fakes
from ..torch_internals.modules import GLOBAL_HOOKS, TABLES, DecoratorContextManager
from ..torch_internals.tensors import version
from .code_names import CACHE, Names, foreign, functions_of, names_of
from .value_kinds import KINDS, Kind, contents, items, kind_of

PLAIN: tuple[type, ...] = (str, bytes, int, float, complex, type(None), ModuleType, BuiltinFunctionType)
PLAIN += (types.WrapperDescriptorType, types.MethodDescriptorType, types.MemberDescriptorType, types.GetSetDescriptorType)
PLAIN += (frozenset, range, slice, re.Pattern, enum.Enum, pathlib.PurePath, inspect.Signature, logging.Logger, weakref.ref)
PLAIN += (threading.Thread,)  # what one of another kind keeps, such as tqdm's monitor, it writes at any time
PLAIN += (type(vars(NamedTuple("Pair", [("first", int)]))["first"]), types.GenericAlias, types.UnionType)
PLAIN += (torch.dtype, torch.device, torch.layout, torch.memory_format, DecoratorContextManager, np.generic, np.dtype)
CONTAINERS = (dict, list, set, deque)
# they are copied as they stand, and what they go through is shared
SEQUENCES: tuple[Any, ...] = ([], (), "", b"", range(1), range(1 << 99))
ITERATORS: tuple[type, ...] = (itertools.count, itertools.repeat, *(type(iter(sequence)) for sequence in SEQUENCES))
# what torch itself keeps in a module beside its state: hooks, most of them dicts that are empty
HOOKS = set(vars(nn.Module())) - {*TABLES, "training"}
# classes of the standard library that hold what they are given
HOLDERS: tuple[type, ...] = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList)
HOLDERS += (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
Link = tuple[Any, Any]  # what holds a place, and under which key: from the module or file down


class _Held(NamedTuple):
    """A tensor that was there, with what code can change of it without an operation."""

    tensor: torch.Tensor
    alias: torch.Tensor
    version: int
    requires_grad: bool
    grad: torch.Tensor | None
    link: Link

    def __str__(self) -> str:
        return written(self.link)

    def is_buffer(self) -> bool:
        """Whether a module lists it among its buffers."""
        return self.link[0] is not None and self.link[0][1] == "_buffers"


class Globals(NamedTuple):
    """A source file's globals that one of its functions writes; the others may be another thread's to write."""

    space: ModuleType
    names: set[str]


class Reach:
    """Everything that can be changed by way of modules: attributes, containers, objects that they hold, attributes of their
    classes, and the globals, closures and caches that their code names, in whatever file but torch's and Python's own.
    """

    def __init__(self, *roots: nn.Module) -> None:
        self.seen: set[int] = set()
        self.notes: list[tuple[Any, Kind, Any, Link]] = []
        self.members: list[tuple[Any, dict[str, Any], Link]] = []
        self.hooks: list[tuple[dict[str, dict[Any, Any]], dict[str, dict[Any, Any]], Link]] = []
        self.classes: dict[int, dict[str, Any]] = {}
        self.tensors: dict[int, _Held] = {}
        self.caches: list[Any] = []  # of the files that the model's classes are from
        self.near: list[Any] = []  # of others
        self.todo: list[tuple[Any, Link]] = []
        self.functions: list[FunctionType] = []
        self.named = Names({"forward", "train"}, set(), set())
        self.methods: dict[str, list[tuple[FunctionType, Link]]] = {}  # that no code met so far names
        self.opaque = False  # whether there is an object, such as an iterator, of which nobody can tell what it keeps
        self.iterators: dict[int, Any] = {}  # of these, those that can be copied
        self.lent: list[Any] = []
        self.spaces: list[dict[str, Any]] = []  # globals that hold one of them
        self.held: list[tuple[Any, Any, Any]] = []  # a dict, list, cell or globals, under which key it holds one, and which
        self.modules = {id(m): (m, name) for root in roots for name, m in root.named_modules()}
        self.files = {c.__module__ for kind in {type(m) for m, _ in self.modules.values()} for c in kind.__mro__}
        with DisableTorchFunction(), torch.no_grad():
            for module, name in self.modules.values():
                self.walk_object(module, (None, f"'{name}'" if name else type(module).__name__))
            self.walk_hooks(GLOBAL_HOOKS, (None, "torch.nn.modules.module"))
            self.walk_code()
        if self.iterators:
            kinds = (KINDS[dict], KINDS[list], KINDS[CellType])
            noted: list[tuple[Any, Any]] = [(value, before) for value, kind, before, _ in self.notes if kind in kinds]
            for value, before in noted + [(space, space) for space in self.spaces]:
                members = list(before.items()) if isinstance(before, dict) else list(enumerate(before))
                self.held += [(value, key, member) for key, member in members if id(member) in self.iterators]

    # --- what there is

    def walk(self, value: Any, link: Link) -> None:
        """Look into a value, later: a list may nest deeper than Python calls."""
        if _way(type(value)) is not None and id(value) not in self.seen:  # type: ignore[arg-type]
            self.todo.append((value, link))

    def walk_all(self, members: Iterable[tuple[Any, Any]], link: Link) -> None:
        """Look into members, later: those that can change and were not seen."""
        for key, member in members:
            if _way(type(member)) is not None and id(member) not in self.seen:  # type: ignore[arg-type]
                self.todo.append((member, (link, key)))

    def walk_kind(self, value: Any, link: Link) -> None:
        """Note what a value of a known kind holds, and look into it where it is a container."""
        held = self.note(value, kind_of(value), link)
        if isinstance(value, CONTAINERS):
            self.walk_all(list(held.items()) if isinstance(value, dict) else enumerate(held), link)

    def walk_tuple(self, value: tuple[Any, ...], link: Link) -> None:
        """Look into the members of a tuple."""
        self.seen.add(id(value))
        self.walk_all(enumerate(value), link)

    def walk_method(self, value: MethodType, link: Link) -> None:
        """Look into the object that a method is bound to."""
        self.walk(value.__self__, link)

    def walk_partial(self, value: functools.partial[Any], link: Link) -> None:
        """Look into the function of a partial and into what it is given."""
        self.seen.add(id(value))
        self.walk_all(((None, member) for member in (value.func, value.args, value.keywords)), link)

    def walk_type(self, value: type, link: Link) -> None:
        """Note a class."""
        self.walk_class(value)

    def walk_cache(self, value: Any, link: Link) -> None:
        """Keep a function that caches its results, unless it is foreign, and look into what it wraps."""
        if not foreign(value.__module__):
            self.seen.add(id(value))
            (self.caches if value.__module__ in self.files else self.near).append(value)
            self.walk(value.__wrapped__, link)

    def walk_graph(self, value: fx.GraphModule, link: Link) -> None:
        """Note a GraphModule where it is one of the modules."""
        # one that lies about, such as this model's of an earlier trace, no code of the model changes
        if id(value) in self.modules:
            self.walk_object(value, link)

    def walk_other(self, value: Any, link: Link) -> None:
        """Note an object, unless it is one of the modules, which are noted anyway."""
        if id(value) not in self.modules:
            self.walk_object(value, link)

    def walk_closed(self, value: Any, link: Link) -> None:
        """An object that nobody can look into: from here on the state is opaque, and iterators are kept to be copied."""
        self.opaque = True
        if isinstance(value, ITERATORS):
            with contextlib.suppress(TypeError):  # later Pythons copy fewer of them
                copies([value])
                self.iterators[id(value)] = value

    def walk_object(self, value: Any, link: Link) -> None:
        """Note the attributes and slots of an object, its class, and a module's hooks; look into what they hold."""
        if id(value) not in self.seen:
            self.seen.add(id(value))
            self.walk_class(type(value))
            attributes = getattr(value, "__dict__", None)
            if isinstance(attributes, dict):
                self.note(attributes, KINDS[dict], link)
                if isinstance(value, nn.Module):
                    self.walk_hooks({key: attributes[key] for key in HOOKS if isinstance(attributes.get(key), dict)}, link)
                    self.walk_all([item for item in attributes.items() if item[0] not in HOOKS], link)
                else:
                    self.walk_all(list(attributes.items()), link)
            if slots := _slots(value):
                self.members.append((value, slots, link))
                self.walk_all(slots.items(), link)

    def walk_hooks(self, tables: dict[str, dict[Any, Any]], link: Link) -> None:
        """Note tables of hooks, by name, and look into the hooks."""
        self.hooks.append((tables, {key: items(hooks) for key, hooks in tables.items() if hooks}, link))
        if any(tables.values()):
            for key, hooks in tables.items():
                self.walk_all(list(hooks.items()), (link, key))

    def walk_function(self, function: FunctionType, link: Link) -> None:
        """Note what a function closes over, unless it is foreign; look into that, its attributes and its defaults."""
        if foreign(function.__module__):
            return
        self.seen.add(id(function))
        self.functions.append(function)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) not in self.seen:
                self.note(cell, KINDS[CellType], (link, name))
                for member in contents(cell):
                    self.walk(member, (link, name))
        self.walk(function.__dict__, link)
        for part in (function.__defaults__, function.__kwdefaults__):
            if part:
                self.walk(part, link)

    def note(self, value: Any, kind: Kind, link: Link) -> Any:
        """Note what a value of this kind holds, and give that."""
        self.seen.add(id(value))
        held = kind.note(value)
        self.notes.append((value, kind, held, link))
        return held

    def hold(self, tensor: torch.Tensor, link: Link) -> None:
        """Note a tensor and what can change of it without an operation."""
        if id(tensor) in self.tensors:
            return
        with contextlib.suppress(RuntimeError):
            grad = tensor.grad if tensor.is_leaf else None
            writes = 0 if tensor.is_inference() else version(tensor)
            self.tensors[id(tensor)] = _Held(tensor, tensor.detach(), writes, tensor.requires_grad, grad, link)
        own = own_attributes(tensor)
        self.members.append((tensor, own, link))
        self.walk_all(own.items(), link)

    def walk_class(self, kind: type) -> None:
        """Note the attributes of a class and its bases, and look into them; functions that no code names wait."""
        for base in kind.__mro__:
            if id(base) in self.seen or foreign(base.__module__):
                continue
            self.seen.add(id(base))
            self.classes[id(base)] = dict(vars(base))
            link = (None, base.__qualname__)
            self.members.append((base, own(base), link))
            called = self.named.among(self.classes[id(base)])
            for key, member in self.classes[id(base)].items():
                for value in functions_of(member):
                    if isinstance(value, FunctionType) and not key.startswith("__") and key not in called:
                        self.methods.setdefault(key, []).append((value, link))
                    elif isinstance(value, FunctionType) or not key.startswith("__"):
                        self.walk(value, (link, key))

    def walk_code(self) -> None:
        """What the values met so far hold, and what their functions name: methods of the classes met, and globals."""
        written: dict[str, set[str]] = {}
        while self.todo or self.functions:
            while self.todo:
                value, link = self.todo.pop()
                way = _way(type(value))  # type: ignore[arg-type]
                if way is not None and id(value) not in self.seen:
                    way(self, value, link)
            if not self.functions:
                break
            function = self.functions.pop()
            names = names_of(function.__code__)
            self.named.add(names)
            for name in names.among(self.methods):
                for method, link in self.methods.pop(name):
                    self.walk(method, (link, name))
            self.walk_named(function, names)
            written.setdefault(function.__globals__.get("__name__", ""), set()).update(names.written)
        for name, changed in written.items():
            if changed and isinstance(space := sys.modules.get(name), ModuleType):
                self.members.append((Globals(space, changed), own(Globals(space, changed)), (None, name)))

    def walk_named(self, function: FunctionType, names: Names) -> None:
        """Globals that a function may use, of its own file and by way of modules that it names."""
        todo, done = [function.__globals__], set()
        while todo:
            space = todo.pop()
            done.add(id(space))
            link = (None, space.get("__name__"))
            for name in names.among(space):
                value = space[name]
                if isinstance(value, ModuleType):
                    if id(vars(value)) not in done and not foreign(value.__name__):
                        todo.append(vars(value))
                elif not name.startswith("__"):
                    self.walk(value, (link, name))
                    if isinstance(value, ITERATORS):
                        self.spaces.append(space)

def copies(iterators: Iterable[Any]) -> list[Any]:
    """Copies of iterators as they stand. Raises TypeError for one that cannot be copied."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return [copy.copy(iterator) for iterator in iterators]


Way = Callable[[Reach, Any, Link], None]


@functools.lru_cache(maxsize=1 << 14)
def _way(cls: type) -> Way | None:
    """How to walk a value of a class; None where it holds nothing that changes."""
    if issubclass(cls, PLAIN) or cls.__module__ == "typing":
        return None
    ways: list[tuple[Any, Way]] = [
        (torch.Tensor, Reach.hold),
        (type, Reach.walk_type),
        (CACHE, Reach.walk_cache),
        (fx.GraphModule, Reach.walk_graph),
        (tuple(KINDS), Reach.walk_kind),
        (tuple, Reach.walk_tuple),
        (FunctionType, Reach.walk_function),
        (MethodType, Reach.walk_method),
        (functools.partial, Reach.walk_partial),
        ((nn.Module, *HOLDERS), Reach.walk_other),
    ]
    found = next((way for base, way in ways if issubclass(cls, base)), None)
    return found or (Reach.walk_closed if foreign(cls.__module__) else Reach.walk_other)


def own(value: Any) -> dict[str, Any]:
    """The attributes of a class or a tensor, those of an object that has slots, or globals that functions write."""
    if isinstance(value, Globals):
        return {name: vars(value.space)[name] for name in value.names if name in vars(value.space)}
    if isinstance(value, type):
        return {k: v for k, v in vars(value).items() if not k.startswith("__")}
    return own_attributes(value) if isinstance(value, torch.Tensor) else _slots(value)


def own_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """What code has put on a tensor; names with an underscore are torch's and ours."""
    torchs = kept_on_fakes() if type(tensor) is FakeTensor else ()
    return {name: value for name, value in vars(tensor).items() if not name.startswith("_") and name not in torchs}


def _slots(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in _slot_names(type(value)) if hasattr(value, name)}  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1 << 14)
def _slot_names(cls: type) -> tuple[str, ...]:
    names = (name for base in cls.__mro__ for name in _listed(vars(base).get("__slots__", ())))
    return tuple(name for name in names if not name.startswith("__"))


def _listed(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def written(link: Link) -> str:
    """A place as a person would write it: `'blocks.0'.cache['x']`."""
    keys = []
    while link[0] is not None:
        link, key = link
        keys.append(key)
    text = str(link[1])
    for key in reversed(keys):
        if key in ("_buffers", "_parameters", "_modules"):  # where torch keeps what is an attribute
            continue
        if isinstance(key, str) and key.isidentifier():
            text += f".{key}"
        else:
            text += f"[{key!r}]" if isinstance(key, (str, int)) else "[...]"
    return text
