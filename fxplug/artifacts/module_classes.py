"""The classes of modules that an artifact may name, by name, and what their constructors take."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import warnings
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from .. import extensions
from ..blocks.base import Block

INTERNAL = frozenset(vars(nn.Module())) | {"training"}


@cache
def torch_classes() -> dict[str, type[nn.Module]]:
    """Every module class of torch.nn by name."""
    found: dict[str, type[nn.Module]] = {}
    for name, module in sorted(sys.modules.items()):
        if name.startswith("torch.nn.modules."):
            for value in vars(module).values():
                if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == name:
                    found.setdefault(value.__name__, value)
    found.update({k: v for k, v in vars(nn).items() if isinstance(v, type) and issubclass(v, nn.Module)})
    # these are made of other modules' calls: hooks that change the class, threads, processes
    odd = [name for name, kind in found.items() if issubclass(kind, LazyModuleMixin) or "parallel" in kind.__module__]
    for name in ("Module", *odd):
        del found[name]
    return found


@cache
def block_classes() -> dict[str, type[nn.Module]]:
    """Every block of the package that a graph may call, by import path: no file can have another module imported."""
    found: dict[str, type[nn.Module]] = {}
    for folder in ("fxplug.blocks", *extensions.block_packages()):
        for file in pkgutil.iter_modules(importlib.import_module(folder).__path__):
            module = importlib.import_module(f"{folder}.{file.name}")
            for value in vars(module).values():
                if isinstance(value, type) and issubclass(value, Block) and value.__module__ == module.__name__:
                    found[f"{folder}:{value.__qualname__}"] = value
    return found


def block_class(name: str) -> type[nn.Module] | None:
    """The block of that import path, importing no file but its own where its package says which; None where there is none."""
    package, _, attribute = name.partition(":")
    if _has_blocks(package) and attribute.isidentifier():
        value = getattr(importlib.import_module(package), attribute, None)
        if isinstance(value, type) and block_name(value) == name:
            return value
    return block_classes().get(name)


def block_name(cls: type[nn.Module]) -> str | None:
    """The import path of a block as a file has it, with the name of its folder; None for another class."""
    package = cls.__module__.rpartition(".")[0]
    return f"{package}:{cls.__qualname__}" if issubclass(cls, Block) and _has_blocks(package) else None


def _has_blocks(package: str) -> bool:
    return package == "fxplug.blocks" or package in extensions.block_packages()


def written_parameters(cls: type[nn.Module]) -> list[inspect.Parameter]:
    """The parameters of a class's constructor that a file may give."""
    return [
        p
        for p in _constructor_parameters(cls)  # type: ignore[arg-type]
        if p.name not in ("device", "dtype") and p.name[0] != "_" and not (p.name == "mode" and issubclass(cls, nn.RNNBase))
    ]


@cache
def _constructor_parameters(cls: type[nn.Module]) -> list[inspect.Parameter]:
    """The parameters of the first constructor in the line of bases that names them."""
    for base in cls.__mro__:
        if base is nn.Module:
            break
        if "__init__" in vars(base):
            parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
            if not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
                return parameters
    return []


def construct(cls: type[nn.Module], arguments: dict[str, Any]) -> nn.Module:
    """A module of a class, on the meta device. No random number of the caller's is drawn."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cls(**arguments)
