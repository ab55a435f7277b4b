"""Modules as JSON and back: by constructor arguments, else by what each holds; and the classes that may be named."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from ...blocks.base import Block
from .. import extensions, quantised
from ..errors import DEFAULT, ArtifactError, Limits, did_you_mean, quote
from ..ir.containers import PLAIN_TYPES, RESERVED, Container, FixedNames, get_plain_attributes, is_plain_attribute
from ..ir.traced_module import TracedModule
from ..spec.pass_file import update_path
from ..torch_internals.modules import WEIGHT_LISTS, is_hooked, list_weights
from ..torch_internals.tensors import CallLimit
from .document import ModuleRecord
from .tensor_records import check_layer
from .value_json import (
    Unportable,
    check_name,
    check_path,
    check_size,
    decode,
    encode,
    find_function,
    get_function_name,
    import_class,
    is_import_path,
)

INTERNAL = frozenset(vars(nn.Module())) | {"training"}
STEPS = 64  # calls of torch for each tensor that a constructor is to make


# --- classes


@cache
def torch_classes() -> dict[str, type[nn.Module]]:
    """Return every module class of torch.nn by name."""
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
    """Return every block of the package that a graph may call, by import path: no file can have another module imported."""
    found: dict[str, type[nn.Module]] = {}
    for folder in ("fxplug.blocks", *extensions.list_block_packages()):
        for file in pkgutil.iter_modules(importlib.import_module(folder).__path__):
            module = importlib.import_module(f"{folder}.{file.name}")
            for value in vars(module).values():
                if isinstance(value, type) and issubclass(value, Block) and value.__module__ == module.__name__:
                    found[f"{folder}:{value.__qualname__}"] = value
    return found


def block_class(name: str) -> type[nn.Module] | None:
    """Return the block of an import path, importing only its own file if its package declares it; None if there is none."""
    package, _, attribute = name.partition(":")
    if _has_blocks(package) and attribute.isidentifier():
        value = getattr(importlib.import_module(package), attribute, None)
        if isinstance(value, type) and block_name(value) == name:
            return value
    return block_classes().get(name)


def block_name(cls: type[nn.Module]) -> str | None:
    """Return the import path of a block as it is saved, with the name of its folder; None for another class."""
    package = cls.__module__.rpartition(".")[0]
    return f"{package}:{cls.__qualname__}" if issubclass(cls, Block) and _has_blocks(package) else None


def _has_blocks(package: str) -> bool:
    return package == "fxplug.blocks" or package in extensions.list_block_packages()


def list_constructor_parameters(cls: type[nn.Module]) -> list[inspect.Parameter]:
    """Return the parameters of a class's constructor that a file may set."""
    return [
        p
        for p in _constructor_parameters(cls)  # type: ignore[arg-type]
        if p.name not in ("device", "dtype") and p.name[0] != "_" and not (p.name == "mode" and issubclass(cls, nn.RNNBase))
    ]


@cache
def _constructor_parameters(cls: type[nn.Module]) -> list[inspect.Parameter]:
    """Return the parameters of the first constructor in the method resolution order that names them."""
    for base in cls.__mro__:
        if base is nn.Module:
            break
        if "__init__" in vars(base):
            parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
            if not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
                return parameters
    return []


def construct(cls: type[nn.Module], arguments: dict[str, Any]) -> nn.Module:
    """Construct a module of a class, on the meta device. The caller's random state is unchanged."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cls(**arguments)


# --- written


def write_modules(root: nn.Module) -> dict[str, dict[str, Any]]:
    """Return a record of every module by its path, parents first. Raises ArtifactError for one that cannot be rebuilt."""
    seen: dict[int, str] = {}
    built: dict[Any, dict[str, Any] | str] = {}  # by what decides it: models have many modules that are alike
    records: dict[str, dict[str, Any]] = {}

    def write(module: nn.Module | None, path: str) -> None:
        if path:
            check_path(path, "module path")
        if module is None or id(module) in seen:
            records[path] = {"kind": "none"} if module is None else {"kind": "same", "as": seen[id(module)]}
            return
        seen[id(module)] = path
        if not path and is_hooked(module):
            raise ArtifactError("the module has hooks, which cannot be saved: remove them, and register them after loading")
        if not path or isinstance(module, (Container, TracedModule)) or type(module) is nn.Module:
            records[path] = _container(module)
        else:
            record = _constructor_arguments(module, path, built)
            records[path] = {**_class_record(module, path), **record}
            if record["arguments"] is not None:
                for name, child in module.named_modules():
                    seen.setdefault(id(child), f"{path}.{name}" if name else path)
                return
        for key, child in module._modules.items():
            write(child, f"{path}.{key}" if path else key)

    write(root, "")
    return records


def _constructor_arguments(module: nn.Module, path: str, built: dict[Any, dict[str, Any] | str]) -> dict[str, Any]:
    """Return the constructor arguments of an equal module, and attributes to set afterwards; else the module's own contents."""
    if is_hooked(module):
        raise ArtifactError(f"'{path}' has hooks, which cannot be saved: remove them, or trace again without it as a leaf")
    if quantised.is_own_layer(module):
        arguments, attributes = quantised.get_arguments(module)
        return {"arguments": _encode_all(arguments), "attributes": _encode_all(attributes)}
    kind = (type(module), *_facts(module).items())
    if kind not in built:
        try:
            built[kind] = _by_constructor(quantised.unwrap_layer(module))
        except Exception as error:  # a constructor of anybody's may raise anything
            built[kind] = str(error)
    reason = built[kind]
    if isinstance(reason, dict):
        return reason
    try:
        return {"arguments": None, "attributes": _encode_all(_attributes(module)), **_state_names(module)}
    except Unportable as error:
        cls = type(module).__qualname__
        raise ArtifactError(
            f"'{path}' ({cls}) cannot be rebuilt from its constructor arguments ({reason}) or from its attributes ({error}). "
            f"Trace without that leaf, or store each constructor argument of {cls} as an attribute of the same name"
        ) from None


def _container(module: nn.Module) -> dict[str, Any]:
    attributes = {k: encode(v) for k, v in get_plain_attributes(module).items() if k not in RESERVED}
    classes = module.classes if isinstance(module, (Container, TracedModule)) else ("Module",)
    fixed = {"fixed": sorted(vars(module)["_fixed"].names)} if "_fixed" in vars(module) else {}
    return {"kind": "container", "classes": list(classes), "attributes": attributes, **fixed, **_state_names(module)}


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
            f"'{path}' is of the class {cls.__qualname__} of {cls.__module__}, which cannot be imported from a file: define it "
            "at the top level of a module"
        )
    return {"kind": "block" if getattr(cls, "is_block", False) else "leaf", "class": name}


def _by_constructor(module: nn.Module) -> dict[str, Any]:
    """Return the constructor arguments of an equal module; raise an error with the reason if there are none."""
    arguments = get_constructor_arguments(module)
    rebuilt = construct(type(module), arguments)
    ours, theirs = _facts(module), _facts(rebuilt)
    changed = {name: value for name, value in _attributes(module).items() if theirs.get(name) != ours[name]}
    record = {"arguments": _encode_all(arguments), "attributes": _encode_all(changed)}
    vars(rebuilt).update(changed)
    if problem := difference(module, rebuilt):
        raise ValueError(problem)
    return record


def get_constructor_arguments(module: nn.Module) -> dict[str, Any]:
    """Return the arguments of `type(module)`, read from the attributes with the names of its parameters."""
    found = {}
    for parameter in list_constructor_parameters(type(module)):
        name = parameter.name
        value = getattr(module, name, parameter.empty)
        if name in module._parameters:
            value = module._parameters[name] is not None
        if value is parameter.empty or isinstance(value, (torch.Tensor, nn.Module)) or inspect.ismethod(value):
            if parameter.default is parameter.empty:
                raise ValueError(f"the constructor argument '{name}' is not stored as an attribute of the same name")
            continue
        if type(value) is not type(parameter.default) or value != parameter.default:
            found[name] = value
    return found


def _encode_all(values: dict[str, Any]) -> dict[str, Any]:
    return {key: _encode(value) for key, value in values.items()}


def _encode(value: Any) -> Any:
    name = get_function_name(value) if callable(value) and not isinstance(value, type) else None
    return {"function": name} if name else encode(value)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes, without those that others store on torch's modules under the name of a method, as
    ultralytics does with `type`."""
    kept = {k: v for k, v in vars(module).items() if k not in INTERNAL and not getattr(v, "is_runtime_state", False)}
    if torch_classes().get(type(module).__name__) is type(module):
        kept = {k: v for k, v in kept.items() if not (hasattr(nn.Module, k) and isinstance(v, PLAIN_TYPES))}
    return kept


def _facts(module: nn.Module) -> dict[str, Any]:
    """Return the comparable state of a module and its submodules, by name: classes, attributes, tensors without values and
    dtypes, text."""
    found: dict[str, Any] = {"its text": repr(module)}
    tensors = []
    for path, m in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        found[f"{prefix}__class__"] = type(m)
        found.update({prefix + name: _comparable(value) for name, value in _attributes(m).items()})
        for table in (m._parameters, m._buffers):
            for key, tensor in table.items():
                mark = (table is m._parameters, key in m._non_persistent_buffers_set)
                tensors.append((prefix + key, None if tensor is None else (tuple(tensor.shape), *mark)))
    return {**found, "its tensors": tuple(tensors)}


def _comparable(value: Any) -> Any:
    """Return a value that is equal for equal attributes: their JSON, or else their text. 1 does not equal True here."""
    try:
        return repr(_encode(value))
    except Unportable:
        pass
    if isinstance(value, (list, tuple)):  # the flat weights of an RNN, which its constructor gathers
        return (type(value), *map(type, value))
    return id(value) if isinstance(value, torch.Tensor) or callable(value) else (type(value), repr(value))


def difference(module: nn.Module, rebuilt: nn.Module) -> str | None:
    """Return how a rebuilt module differs from the original, apart from tensors' values and dtypes; None if it does not."""
    ours, theirs = _facts(module), _facts(rebuilt)
    differing = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return f"the constructor gives a module that differs in {', '.join(differing[1:4] or differing)}" if differing else None


# --- read


class ModuleReader:
    """Rebuilds the modules of a file, of classes that `allow` covers.

    `tensors` are the names of all parameters and buffers: no constructor makes many more than they name.
    """

    def __init__(self, allow: Sequence[str], tensors: Collection[str] = (), limits: Limits = DEFAULT) -> None:
        self.allow, self.limits = allow, limits
        self.made: dict[str, nn.Module] = {}
        self.expected: Counter[str] = Counter()  # how many tensors lie below each path
        for name in tensors:
            parts = name.split(".")[: limits.depth]
            self.expected.update(".".join(parts[:count]) for count in range(len(parts)))

    def read(self, records: Mapping[str, ModuleRecord]) -> dict[str, nn.Module]:
        """Rebuild every module of the records by its path, on the meta device; '' is the tree. Raises ArtifactError."""
        if "" not in records or records[""].kind != "container":
            raise ArtifactError("graph.json: the modules must have an entry '' (the root), which is a container")
        for path, record in records.items():
            if path and check_path(path, "module path").count(".") >= self.limits.depth:
                raise ArtifactError(f"graph.json: the module {quote(path)} is nested deeper than {self.limits.depth}")
            self._attach(path, self._module(path, record))
        return self.made

    def _attach(self, path: str, module: nn.Module | None) -> None:
        if path:
            parent, _, key = path.rpartition(".")
            if parent not in self.made or key in self.made[parent]._modules:
                raise ArtifactError(f"graph.json: the module {quote(path)} must come after its parent")
            self.made[parent]._modules[key] = module
        todo = [(path, module)]
        while todo:  # by hand, as each name of a shared module counts
            where, module = todo.pop()
            if module is None:
                continue
            if len(self.made) >= self.limits.modules or where.count(".") >= self.limits.depth:
                raise ArtifactError(
                    f"graph.json: shared modules have more than {self.limits.modules} paths, or are nested too deeply"
                )
            self.made.setdefault(where, module)
            todo += [(f"{where}.{key}" if where else key, child) for key, child in module._modules.items()]

    def _module(self, path: str, record: ModuleRecord) -> nn.Module | None:
        where = f"the module {quote(path)}"
        if record.kind == "none":
            return None
        if record.kind == "same":
            if record.same not in self.made or f"{path}.".startswith(f"{record.same}." if record.same else ""):
                raise ArtifactError(f"graph.json: {where} refers to {quote(record.same)}, which must come before it")
            return self.made[record.same]
        attributes = {k: self._value(v, function=record.kind != "container") for k, v in record.attributes.items()}
        if record.kind == "container":
            for name, value in attributes.items():
                check_name(name, f"attribute of {where}")
                if not is_plain_attribute(name, value):
                    raise ArtifactError(
                        f"graph.json: {where} sets {quote(name)}, which is an attribute of every module, or not a plain value"
                    )
            container = Container(tuple(record.classes), attributes)
            if record.fixed is not None or attributes:  # earlier versions wrote the attributes alone
                vars(container)["_fixed"] = FixedNames(path, frozenset(attributes if record.fixed is None else record.fixed))
            _empty_state(container, record)
            return container
        cls = self._class(record.kind, record.cls)
        checked = getattr(cls, "by_constructor", False) is True  # which says what it may hold
        if record.arguments is None or (checked and attributes):
            if checked or issubclass(cls, nn.RNNBase):
                raise ArtifactError(f"graph.json: {where}: a {cls.__name__} may have constructor arguments only")
            module = object.__new__(cls)
            nn.Module.__init__(module)
            _empty_state(module, record)
        else:
            module = self._constructed(cls, record.arguments, path, where)
        for name, value in attributes.items():
            _set_attribute(module, name, value, where)
        return module

    def _constructed(self, cls: type[nn.Module], given: dict[str, Any], path: str, where: str) -> nn.Module:
        arguments = {check_name(k, "argument name"): self._value(v, function=True) for k, v in given.items()}
        known = [p.name for p in list_constructor_parameters(cls)]
        for name, value in arguments.items():
            if name not in known:
                near = did_you_mean(name, known)
                raise ArtifactError(
                    f"graph.json: {where}: the constructor of {cls.__name__} has no argument {quote(name)}{near}"
                )
            check_size(value, self.limits.size, f"{quote(name)} of {where}")
        try:
            with CallLimit(STEPS * (self.expected[path] + 16), ArtifactError("it creates tensors that the file does not have")):
                return construct(cls, arguments)
        except Exception as error:  # the constructor's, of torch or of a block that is allowed
            raise ArtifactError(f"{where}: {cls.__qualname__} cannot be rebuilt: {quote(str(error), 300)}") from error

    def _class(self, kind: str, name: str) -> type[nn.Module]:
        name = update_path(name)
        if kind == "module":
            if name in (known := torch_classes()):
                return known[name]
            raise ArtifactError(f"graph.json: torch.nn has no module class {quote(name)}{did_you_mean(name, known)}")
        if kind == "block" and (block := block_class(name)) is not None:
            return block
        if kind == "block" and is_import_path(name) and name.partition(".")[0].partition(":")[0] == "fxplug":
            hint = did_you_mean(name, block_classes()) + extensions.describe_unusable()
            raise ArtifactError(f"graph.json: fxplug has no block {quote(name)}{hint}")
        cls = import_class(name, self.allow)
        if not issubclass(cls, nn.Module) or (kind == "block" and getattr(cls, "is_block", False) is not True):
            needed = "an nn.Module" + " with is_block" * (kind == "block")
            raise ArtifactError(f"graph.json: {quote(name)} is not {needed}, so it cannot be a {kind}")
        return cls

    def _value(self, data: Any, function: bool) -> Any:
        if function and type(data) is dict and list(data) == ["function"]:
            return find_function(data["function"])
        return decode(data, None, self.limits)


def _set_attribute(module: nn.Module, name: str, value: Any, where: str) -> None:
    """Set an attribute that `save` may have written, but none that a class or another part of the module defines. no attribute
    that a class or another part of the module answers for.

    A plain value of the class may be overridden by one, as by an instance that differs from others of its kind.
    """
    check_name(name, f"attribute of {where}")
    inherited = inspect.getattr_static(type(module), name, None)
    if (
        name in INTERNAL
        or name.startswith("__")
        or hasattr(nn.Module, name)
        or any(name in table for table in (module._parameters, module._buffers, module._modules))
        or isinstance(module, nn.RNNBase)
        and name in WEIGHT_LISTS
        or not (inherited is None or isinstance(inherited, PLAIN_TYPES) and isinstance(value, (*PLAIN_TYPES, list, tuple)))
    ):
        raise ArtifactError(f"graph.json: {where} sets {quote(name)}, which is an attribute of every module of its class")
    vars(module)[name] = value


def _empty_state(module: nn.Module, record: ModuleRecord) -> None:
    """Add empty entries for the parameters and buffers that `fill` will set."""
    tables: list[tuple[dict[str, bool], dict[str, Any]]] = [
        (record.parameters, module._parameters), (record.buffers, module._buffers)
    ]  # fmt: skip
    for names, table in tables:
        for key, there in names.items():
            if "." in check_path(key, "tensor name"):
                raise ArtifactError(f"graph.json: {quote(key)} is not a tensor name: it has a dot")
            table[key] = torch.empty(0, device="meta") if there else None


def fill(root: nn.Module, values: Callable[[str], torch.Tensor], persistent: Callable[[str], bool]) -> None:
    """Set the tensors of an artifact, read by name, in the modules."""
    for path, module in root.named_modules():
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    name = f"{path}.{key}" if path else key
                    table[key] = values(name)
                    if isinstance(table[key], nn.Parameter) is not (table is module._parameters):
                        raise ArtifactError(f"graph.json: {quote(name)} is a parameter in one place and a buffer in another")
                    if table is module._buffers and not persistent(name):
                        module._non_persistent_buffers_set.add(key)
        if quantised.is_own_layer(module):
            check_layer(path, module)
            quantised.disable_packing(module)
        if isinstance(module, nn.RNNBase):
            list_weights(module)  # it keeps its weights in a list as well
