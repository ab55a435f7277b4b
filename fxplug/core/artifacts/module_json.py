"""The modules of a traced model as JSON, by constructor arguments, else by what each holds; the classes that may be named."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from ...blocks.base import Block
from .. import extensions, quantised
from ..errors import ArtifactError
from ..ir.containers import RESERVED, Container, plain_attributes
from ..ir.traced_module import TracedModule
from ..torch_internals.modules import forward_hooks
from .value_json import Unportable, check_path, encode, function_name, is_import_path

INTERNAL = frozenset(vars(nn.Module())) | {"training"}


@cache
def torch_classes() -> dict[str, type[nn.Module]]:
    """Every module class of torch.nn by name."""
    found: dict[str, type[nn.Module]] = {}
    for _, file in sorted(inspect.getmembers(nn.modules, inspect.ismodule)):
        for value in vars(file).values():
            if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == file.__name__:
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


def write_modules(root: nn.Module) -> dict[str, dict[str, Any]]:
    """A record of every module by its path, parents first. Raises ArtifactError for one that cannot be rebuilt."""
    return _Writer().write(root, "")


class _Writer:
    def __init__(self) -> None:
        self.seen: dict[int, str] = {}
        self.built: dict[Any, dict[str, Any] | str] = {}  # by what decides it: models have many modules that are alike

    def write(self, module: nn.Module | None, path: str) -> dict[str, dict[str, Any]]:
        if path:
            check_path(path, "module path")
        if module is None:
            return {path: {"kind": "none"}}
        if id(module) in self.seen:
            return {path: {"kind": "same", "as": self.seen[id(module)]}}
        self.seen[id(module)] = path
        if not path or isinstance(module, (Container, TracedModule)) or type(module) is nn.Module:
            return {path: _container(module), **self.children(module, path)}
        if any(forward_hooks(module)):
            raise ArtifactError(f"'{path}' has forward hooks, which an artifact cannot hold: trace with it not kept whole")
        head = _class_record(module, path)
        if quantised.is_own_layer(module):
            arguments, attributes = quantised.rebuilding(module)
            return {path: {**head, "arguments": _encode_all(arguments), "attributes": _encode_all(attributes)}}
        kind = (type(module), *_layout(module), *_attribute_keys(module))
        if kind not in self.built:
            self.built[kind] = _by_constructor(quantised.undressed(module))
        built = self.built[kind]
        if isinstance(built, dict):
            for name, child in module.named_modules():
                self.seen.setdefault(id(child), f"{path}.{name}" if name else path)
            return {path: {**head, **built}}
        return {path: {**head, **_by_contents(module, path, built)}, **self.children(module, path)}

    def children(self, module: nn.Module, path: str) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for key, child in module._modules.items():
            found.update(self.write(child, f"{path}.{key}" if path else key))
        return found


def _container(module: nn.Module) -> dict[str, Any]:
    attributes = {k: encode(v) for k, v in plain_attributes(module).items() if k not in RESERVED}
    classes = module.classes if isinstance(module, (Container, TracedModule)) else ("Module",)
    return {"kind": "container", "classes": list(classes), "attributes": attributes, **_state_names(module)}


def _state_names(module: nn.Module) -> dict[str, Any]:
    return {
        "parameters": {k: v is not None for k, v in module._parameters.items()},
        "buffers": {k: v is not None for k, v in module._buffers.items()},
    }


def _class_record(module: nn.Module, path: str) -> dict[str, Any]:
    cls = type(module)
    if torch_classes().get(cls.__name__) is cls:
        return {"kind": "module", "class": cls.__name__}
    name = block_name(cls) or f"{cls.__module__}:{cls.__qualname__}"
    if not is_import_path(name):
        raise ArtifactError(
            f"'{path}' is of the class {cls.__qualname__} of {cls.__module__}, which nobody else can import: define it at "
            "the top of a module of its own"
        )
    return {"kind": "block" if getattr(cls, "is_block", False) else "leaf", "class": name}


def _by_constructor(module: nn.Module) -> dict[str, Any] | str:
    """Arguments, and attributes to set afterwards, that give an equal module; or why there are none."""
    try:
        arguments = constructor_arguments(module)
        rebuilt = construct(type(module), arguments)
    except Exception as error:  # a constructor of anybody's may raise anything
        return str(error)
    changed = _changed_attributes(module, rebuilt)
    if isinstance(changed, str):
        return changed
    vars(rebuilt).update(changed)
    problem = difference(module, rebuilt)
    if problem:
        return problem
    try:
        return {"arguments": _encode_all(arguments), "attributes": _encode_all(changed)}
    except Unportable as error:
        return str(error)


def constructor_arguments(module: nn.Module) -> dict[str, Any]:
    """What `type(module)` was called with, read from the attributes that bear the names of its parameters."""
    found = {}
    for parameter in written_parameters(type(module)):
        name = parameter.name
        value = getattr(module, name, parameter.empty)
        if name in module._parameters:
            value = module._parameters[name] is not None
        if value is parameter.empty or isinstance(value, (torch.Tensor, nn.Module)) or inspect.ismethod(value):
            if parameter.default is parameter.empty:
                raise ValueError(f"the constructor argument '{name}' is not kept as an attribute of the same name")
            continue
        if type(value) is not type(parameter.default) or value != parameter.default:
            found[name] = value
    return found


def _encode_all(values: dict[str, Any]) -> dict[str, Any]:
    return {key: _encode(value) for key, value in values.items()}


def _encode(value: Any) -> Any:
    name = function_name(value) if callable(value) and not isinstance(value, type) else None
    return {"function": name} if name else encode(value)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in vars(module).items() if k not in INTERNAL and not getattr(v, "is_runtime_state", False)}


def _attribute_keys(module: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """The attributes of a module and those below it, each by what it is written as, or by the object that it is."""
    for path, m in module.named_modules():
        for name, value in _attributes(m).items():
            try:
                yield path, name, repr(_encode(value))
            except Unportable:
                yield path, name, id(value)


def _changed_attributes(module: nn.Module, rebuilt: nn.Module) -> dict[str, Any] | str:
    """The attributes of `module` that `rebuilt` lacks or has otherwise; or which one cannot be written down."""
    ours, theirs = _attributes(module), _attributes(rebuilt)
    for name in theirs:
        if name not in ours:
            return f"the constructor sets '{name}', which the module does not have"
    changed = {}
    for name, value in ours.items():
        if name in theirs and _equal(value, theirs[name]):
            continue
        try:
            _encode(value)
        except Unportable:
            return f"its attribute '{name}' is a {type(value).__qualname__}, which cannot be written down"
        changed[name] = value
    return changed


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    try:
        return repr(_encode(a)) == repr(_encode(b))  # not ==: 1 is not True here
    except Unportable:
        pass
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):  # the flat weights of an RNN, which its constructor gathers
        return len(a) == len(b) and all(type(x) is type(y) for x, y in zip(a, b, strict=True))
    return not isinstance(a, torch.Tensor) and not callable(a) and repr(a) == repr(b)


def difference(module: nn.Module, rebuilt: nn.Module) -> str | None:
    """How a rebuilt module differs from the one it is to replace, tensors' values and dtypes aside; None if not."""
    if type(module) is not type(rebuilt):
        return f"it is a {type(rebuilt).__qualname__} instead of a {type(module).__qualname__}"
    if _layout(module) != _layout(rebuilt):
        theirs = dict(_layout(rebuilt))
        names = [name for name, shape in _layout(module) if theirs.get(name) != shape] or list(theirs)
        return f"its tensors differ ({', '.join(map(str, names[:3]))})"
    pairs = zip(module.named_modules(remove_duplicate=False), rebuilt.named_modules(remove_duplicate=False), strict=False)
    for (name, a), (other, b) in pairs:
        if name != other or type(a) is not type(b):
            return f"its submodule '{name}' differs"
        changed = _changed_attributes(a, b)
        if changed:
            which = changed if isinstance(changed, str) else ", ".join(f"'{k}'" for k in changed)
            return f"its attributes differ{f' in {name!r}' if name else ''}: {which}"
    return None if repr(module) == repr(rebuilt) else "it prints differently"


def _layout(module: nn.Module) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for path, m in module.named_modules(remove_duplicate=False):
        for table in (m._parameters, m._buffers):
            for key, tensor in table.items():
                mark = (table is m._parameters, key in m._non_persistent_buffers_set)
                found.append((f"{path}.{key}" if path else key, None if tensor is None else (tuple(tensor.shape), mark)))
    return found


def _by_contents(module: nn.Module, path: str, reason: str) -> dict[str, Any]:
    """What a module holds, for one that no constructor arguments give again."""
    try:
        attributes = _encode_all(_attributes(module))
    except Unportable as error:
        cls = type(module).__qualname__
        raise ArtifactError(
            f"'{path}' ({cls}) cannot be rebuilt from constructor arguments: {reason}; nor from what it holds: {error}. "
            f"Trace without that leaf, or keep each constructor argument of {cls} as an attribute of the same name"
        ) from None
    return {"arguments": None, "attributes": attributes, **_state_names(module)}
