"""Tracing leaves a model as it was: what a run changes in it, or keeps from it, is put back."""

from __future__ import annotations

import contextlib
import functools
import pickle
import random
import sys
from collections import deque
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from .errors import TraceError

CONTAINERS = (dict, list, set, deque)
# what torch itself keeps in a module beside its state
HOOKS = set(vars(nn.Module())) - {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training"}
CACHE = type(functools.lru_cache(lambda: None))


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Give back what a run of `forward` changes: attributes, containers, objects the model holds, class attributes,
    globals and caches of its source files. None may keep a fake tensor, or a number of this one run.

    Yields the tensors that the model holds in any of these places.
    """
    state = _State(model)
    for cache in state.caches:
        cache.cache_clear()
    near = [(cache, cache.cache_info().misses) for cache in state.caches_near()]
    try:
        yield state.tensors
    finally:
        for cache in state.caches:
            cache.cache_clear()
        for cache, misses in near:
            if cache.cache_info().misses != misses:
                cache.cache_clear()
        state.restore()


class _State:
    """Everything that can be changed by way of a model, each container with a copy."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: set[int] = set()
        self.copies: list[tuple[Any, Any]] = []
        self.attributes: list[tuple[type, dict[str, Any]]] = []
        self.tensors: list[torch.Tensor] = []
        self.caches: list[Any] = []
        self.spaces = {type(m).__module__ for m in model.modules()}
        self.own = {id(m) for m in model.modules()}
        for module in model.modules():
            self.walk(module)
        done: set[str] = set()
        while new := self.spaces - done:
            done |= new
            for name in new:
                space = sys.modules.get(name)
                if isinstance(space, ModuleType) and not foreign(name):
                    self.walk_space(space)

    def walk(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return
        if isinstance(value, (str, int, float, type, FunctionType, ModuleType, type(None))) or id(value) in self.seen:
            return
        if isinstance(value, fx.GraphModule) and id(value) not in self.own:
            return  # a graph that lies about, such as this model's of an earlier trace: no code of the model changes it
        if isinstance(value, CONTAINERS):
            self.keep(value)
            for member in list(value.values() if isinstance(value, dict) else value):
                self.walk(member)
        elif isinstance(value, tuple):
            for member in value:
                self.walk(member)
        elif isinstance(value, nn.Module) or not foreign(type(value).__module__):
            self.seen.add(id(value))
            self.walk_class(type(value))
            attributes = getattr(value, "__dict__", None)
            if isinstance(attributes, dict):
                self.keep(attributes)
                for key, member in list(attributes.items()):
                    if key not in HOOKS:
                        self.walk(member)

    def keep(self, container: Any) -> None:
        self.seen.add(id(container))
        self.copies.append((container, list(container.items()) if isinstance(container, dict) else list(container)))

    def walk_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if id(base) in self.seen or foreign(base.__module__):
                continue
            self.seen.add(id(base))
            self.spaces.add(base.__module__)
            members = {k: v for k, v in vars(base).items() if not k.startswith("__")}
            self.attributes.append((base, members))
            self.walk_members(members)

    def walk_space(self, space: ModuleType) -> None:
        self.keep(vars(space))
        members = {k: v for k, v in vars(space).items() if not k.startswith("__")}
        self.walk_members(members)
        for value in members.values():
            if isinstance(value, type) and value.__module__ == space.__name__:
                self.walk_members(vars(value))

    def walk_members(self, members: Any) -> None:
        for value in list(members.values()):
            value = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            if isinstance(value, (CACHE, FunctionType)):
                self.caches.extend(_caches_of(value))
            elif isinstance(value, (*CONTAINERS, tuple)) or type(value).__module__ in self.spaces:
                self.walk(value)

    def caches_near(self) -> list[Any]:
        """Caches in the modules that the model's source files import from, and those import from."""
        known = {id(cache) for cache in self.caches}
        found: list[Any] = []
        done, now = set(self.spaces), set(self.spaces)
        for _ in range(2):
            members = [v for name in now for v in _globals(name)]
            names = {v.__name__ for v in members if isinstance(v, ModuleType)}
            names |= {v.__module__ for v in members if isinstance(v, (FunctionType, CACHE, type))}
            now = {name for name in names - done if not foreign(name)}
            done |= now
            found.extend(cache for name in now for value in _globals(name) for cache in _caches_of(value))
        return [cache for cache in found if id(cache) not in known]

    def restore(self) -> None:
        for container, copy in self.copies:
            if isinstance(container, dict):
                now = list(container.items())
                same = len(now) == len(copy) and all(a is c and b is d for (a, b), (c, d) in zip(now, copy, strict=True))
                if not same:
                    # the original methods, as a class may forbid changing it
                    dict.clear(container)
                    dict.update(container, copy)
            elif isinstance(container, set):
                if container != set(copy):
                    container.clear()
                    container.update(copy)
            elif len(container) != len(copy) or any(a is not b for a, b in zip(container, copy, strict=True)):
                container.clear()
                container.extend(copy)
        for kind, members in self.attributes:
            for key, value in members.items():
                if vars(kind).get(key, members) is not value:
                    setattr(kind, key, value)
            for key in [k for k in vars(kind) if not k.startswith("__") and k not in members]:
                delattr(kind, key)


def _globals(name: str) -> list[Any]:
    """What an imported module holds."""
    module = sys.modules.get(name)
    return list(vars(module).values()) if isinstance(module, ModuleType) else []


def foreign(module: object) -> bool:
    """Whether a class lives where no model keeps its state."""
    if not isinstance(module, str):
        return True
    package = module.partition(".")[0]
    return package in ("torch", "numpy", "fxplug") or (package in sys.stdlib_module_names and module != "__main__")


def _caches_of(function: Any) -> Iterator[Any]:
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


@contextlib.contextmanager
def same_values(model: nn.Module, held: list[torch.Tensor], device: torch.device) -> Iterator[None]:
    """Give tensors the values back that running the model for real changes in place."""
    parameters = {id(p) for p in model.parameters()}
    changing = {id(t): t for t in [*model.buffers(), *held] if id(t) not in parameters and not t.is_meta}
    kept = [(tensor, tensor.clone()) for tensor in changing.values()]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            for tensor, value in kept:
                if tensor._version != value._version:
                    tensor.copy_(value)


@contextlib.contextmanager
def same_random(model: nn.Module) -> Iterator[None]:
    """Refuse a model that draws from Python's or numpy's generator: the graph would repeat that one draw forever."""
    before, numpy_before = random.getstate(), np.random.get_state()
    try:
        yield
        drew = "random" if random.getstate() != before else ""
        if pickle.dumps(np.random.get_state()) != pickle.dumps(numpy_before):
            drew = "numpy.random"
        if drew:
            raise TraceError(
                f"{type(model).__name__} draws from Python's '{drew}' in {'training' if model.training else 'evaluation'}, and "
                "its graph would repeat that one draw; keep the module that does so whole: leaf: [its path]"
            )
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)
