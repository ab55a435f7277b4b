"""The modules of a traced model as JSON, and back: by constructor arguments, else by what each one holds."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from ..blocks.base import Block
from ..errors import ArtifactError, did_you_mean, shown
from ..ir.traced_module import PLAIN_TYPES, RESERVED, Container, TracedModule, is_plain_attribute, plain_attributes
from ..limits import DEFAULT, Limits
from ..parallel.runtime.mesh import World
from ..spec.import_path import present
from ..torch_internals.modules import WEIGHT_LISTS, forward_hooks, list_weights
from ..turns import Turns
from .magnitudes import Budget, check_size
from .names import check_name, check_path, find_function, function_name, import_class, is_import_path, only_keys
from .value_json import Unportable, decode, encode

INTERNAL = frozenset(vars(nn.Module())) | {"training"}
BLOCKS = ("fxplug.blocks", "fxplug.parallel.runtime")  # the folders of blocks: in a file a block has the name of its folder
KINDS = {
    "none": [],
    "same": ["as"],
    "container": ["classes", "attributes", "parameters", "buffers"],
    "module": ["class", "arguments", "attributes", "parameters", "buffers"],
    "block": ["class", "arguments", "attributes", "parameters", "buffers"],
    "leaf": ["class", "arguments", "attributes", "parameters", "buffers"],
}


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
    for folder in BLOCKS:
        for file in pkgutil.iter_modules(importlib.import_module(folder).__path__):
            module = importlib.import_module(f"{folder}.{file.name}")
            for value in vars(module).values():
                if isinstance(value, type) and issubclass(value, Block) and value.__module__ == module.__name__:
                    found[f"{folder}:{value.__qualname__}"] = value
    return found


@cache
def _block_names() -> dict[type[nn.Module], str]:
    return {value: name for name, value in block_classes().items()}


# --- writing


def write_modules(root: nn.Module) -> dict[str, dict[str, Any]]:
    """A record of every module by its path, parents first. Raises ArtifactError for one that cannot be rebuilt."""
    return _Writer().write(root, "")


def foreign_classes(root: nn.Module) -> list[str]:
    """The classes, but torch's and fxplug's, that the records of a module tree name. Modules that are alike are tried once.

    Raises ArtifactError for one that cannot be rebuilt.
    """
    tried: set[Any] = set()
    found: set[str] = set()

    def visit(module: nn.Module, path: str) -> None:
        if not path or isinstance(module, (Container, TracedModule)) or type(module) is nn.Module:
            for key, child in module._modules.items():
                if child is not None:
                    visit(child, f"{path}.{key}" if path else key)
            return
        held = tuple((name, type(value)) for name, value in vars(module).items())
        hooks = sum(map(len, forward_hooks(module)))
        kind = (type(module), repr(module), held, tuple(_layout(module)), hooks)
        if kind not in tried:
            tried.add(kind)
            records = _Writer().write(module, path).values()
            found.update(str(r["class"]) for r in records if ":" in r.get("class", ""))

    visit(root, "")
    return sorted(name for name in found if not name.startswith("fxplug."))


class _Writer:
    def __init__(self) -> None:
        self.seen: dict[int, str] = {}

    def write(self, module: nn.Module | None, path: str) -> dict[str, dict[str, Any]]:
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
        built = _by_constructor(module)
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
    name = _block_names().get(cls, f"{cls.__module__}:{cls.__qualname__}")
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
        rebuilt = _construct(type(module), arguments)
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
    for parameter in _written_parameters(type(module)):
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


def _written_parameters(cls: type[nn.Module]) -> list[inspect.Parameter]:
    """Those that a file may give."""
    return [
        p
        for p in _constructor_parameters(cls)
        if p.name not in ("device", "dtype") and p.name[0] != "_" and not (p.name == "mode" and issubclass(cls, nn.RNNBase))
    ]


def _construct(cls: type[nn.Module], arguments: dict[str, Any]) -> nn.Module:
    with torch.random.fork_rng(devices=[]), torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cls(**arguments)


def _encode_all(values: dict[str, Any]) -> dict[str, Any]:
    return {key: _encode(value) for key, value in values.items()}


def _encode(value: Any) -> Any:
    name = function_name(value) if callable(value) and not isinstance(value, type) else None
    return {"function": name} if name else encode(value)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in vars(module).items() if k not in INTERNAL and not isinstance(v, (Turns, World))}


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


# --- reading


def read_modules(
    records: Any, allow: Sequence[str], tensors: Mapping[str, Any] | None = None, limits: Limits = DEFAULT
) -> dict[str, nn.Module]:
    """Every module of the records by its path, on the meta device; '' is the tree. Raises ArtifactError.

    `tensors` are the names of all parameters and buffers: no constructor makes many more than they say.
    """
    return _Reader(allow, tensors or {}, limits).read(records)


class _Reader:
    def __init__(self, allow: Sequence[str], tensors: Mapping[str, Any], limits: Limits) -> None:
        self.allow, self.limits = allow, limits
        self.made: dict[str, nn.Module] = {}
        self.expected: Counter[str] = Counter()  # how many tensors lie below each path
        for name in tensors:
            parts = name.split(".")[: limits.depth]
            self.expected.update(".".join(parts[:count]) for count in range(len(parts)))

    def read(self, records: Any) -> dict[str, nn.Module]:
        if type(records) is not dict or type(records.get("")) is not dict or records[""].get("kind") != "container":
            raise ArtifactError("graph.json: the modules must be an object whose entry '' is a container")
        if len(records) > self.limits.modules:
            raise ArtifactError(f"graph.json has {len(records)} modules; more than {self.limits.modules} are not read")
        for path, record in records.items():
            if path:
                check_path(path, "module path")
                if path.count(".") >= self.limits.depth:
                    raise ArtifactError(f"graph.json: the module {shown(path)} lies deeper than {self.limits.depth}")
            self._attach(path, self._module(path, record))
        return self.made

    def _attach(self, path: str, module: nn.Module | None) -> None:
        if path:
            parent, _, key = path.rpartition(".")
            if parent not in self.made or key in self.made[parent]._modules:
                raise ArtifactError(f"graph.json: the module {shown(path)} has no place: its parent must come before it")
            self.made[parent]._modules[key] = module
        todo = [(path, module)]
        while todo:  # by hand, as each name of a shared module counts
            where, module = todo.pop()
            if module is None:
                continue
            if len(self.made) >= self.limits.modules or where.count(".") >= self.limits.depth:
                raise ArtifactError(f"graph.json: shared modules give more than {self.limits.modules} paths, or too deep ones")
            self.made.setdefault(where, module)
            todo += [(f"{where}.{key}" if where else key, child) for key, child in module._modules.items()]

    def _module(self, path: str, record: Any) -> nn.Module | None:
        where = f"the module {shown(path)}"
        kind = record.get("kind") if type(record) is dict else None
        if type(kind) is not str or kind not in KINDS:
            raise ArtifactError(f"graph.json: {where} is of the unknown kind {shown(kind)}{did_you_mean(kind, KINDS)}")
        only_keys(record, ["kind", *KINDS[kind]], where)
        if kind == "none":
            return None
        if kind == "same":
            other = record.get("as")
            if type(other) is not str or other not in self.made or f"{path}.".startswith(f"{other}." if other else ""):
                raise ArtifactError(f"graph.json: {where} is said to be {shown(other)}, which does not come before it")
            return self.made[other]
        for entry in ("attributes", "parameters", "buffers"):
            if type(record.get(entry, {})) is not dict:
                raise ArtifactError(f"graph.json: the {entry} of {where} are no object")
        attributes = {k: self._value(v, function=kind != "container") for k, v in record.get("attributes", {}).items()}
        if kind == "container":
            return self._container(record, attributes, where)
        cls = self._class(kind, record.get("class"))
        checked = getattr(cls, "by_constructor", False) is True  # which says what it may hold
        if record.get("arguments") is None or (checked and attributes):
            if checked or issubclass(cls, nn.RNNBase):
                raise ArtifactError(f"graph.json: {where}: a {cls.__name__} is made from constructor arguments only")
            module = object.__new__(cls)
            nn.Module.__init__(module)
            _empty_state(module, record)
        else:
            module = self._constructed(cls, record["arguments"], path, where)
        for name, value in attributes.items():
            _set_attribute(module, name, value, where)
        return module

    def _container(self, record: dict[str, Any], attributes: dict[str, Any], where: str) -> Container:
        for name, value in attributes.items():
            check_name(name, f"attribute of {where}")
            if not is_plain_attribute(name, value):
                raise ArtifactError(f"graph.json: {where} sets {shown(name)}, a part of every module, or no plain value")
        if type(record.get("classes")) is not list or not record["classes"]:
            raise ArtifactError(f"graph.json: {where} names no class")
        module = Container(tuple(str(c) for c in record["classes"]), attributes)
        _empty_state(module, record)
        return module

    def _constructed(self, cls: type[nn.Module], given: Any, path: str, where: str) -> nn.Module:
        if type(given) is not dict:
            raise ArtifactError(f"graph.json: the arguments of {where} are no object")
        arguments = {check_name(k, "argument name"): self._value(v, function=True) for k, v in given.items()}
        known = [p.name for p in _written_parameters(cls)]
        for name, value in arguments.items():
            if name not in known:
                near = did_you_mean(name, known)
                raise ArtifactError(f"graph.json: {where}: a {cls.__name__} is not made with {shown(name)}{near}")
            check_size(value, self.limits.size, f"{shown(name)} of {where}")
        try:
            with Budget(STEPS * (self.expected[path] + 16)):
                return _construct(cls, arguments)
        except Exception as error:  # the constructor's, of torch or of a block that is allowed
            raise ArtifactError(f"{where}: {cls.__qualname__} cannot be built again: {shown(str(error), 300)}") from error

    def _class(self, kind: str, name: Any) -> type[nn.Module]:
        known = torch_classes() if kind == "module" else block_classes() if kind == "block" else {}
        name = present(name) if type(name) is str else name
        if type(name) is str and name in known:
            return known[name]
        if kind == "module":
            raise ArtifactError(f"graph.json: torch.nn has no module class {shown(name)}{did_you_mean(name, known)}")
        if kind == "block" and is_import_path(name) and name.partition(".")[0].partition(":")[0] == "fxplug":
            raise ArtifactError(f"graph.json: fxplug has no block {shown(name)}{did_you_mean(name, known)}")
        cls = import_class(name, self.allow)
        if not issubclass(cls, nn.Module) or (kind == "block" and getattr(cls, "is_block", False) is not True):
            needed = "an nn.Module" + " with is_block" * (kind == "block")
            raise ArtifactError(f"graph.json: {shown(name)} is no {kind}: it is not {needed}")
        return cls

    def _value(self, data: Any, function: bool) -> Any:
        if function and type(data) is dict and list(data) == ["function"]:
            return find_function(data["function"])
        return decode(data, None, self.limits)


STEPS = 64  # calls of torch for each tensor that a constructor is to make


def _set_attribute(module: nn.Module, name: str, value: Any, where: str) -> None:
    """Set what `save` may have found: no attribute that a class or another part of the module answers for.

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
        raise ArtifactError(f"graph.json: {where} sets {shown(name)}, which is part of every module of its class")
    vars(module)[name] = value


def _empty_state(module: nn.Module, record: dict[str, Any]) -> None:
    """Places for the parameters and buffers that `fill` will bring."""
    tables: list[tuple[str, dict[str, Any]]] = [("parameters", module._parameters), ("buffers", module._buffers)]
    for name, table in tables:
        for key, there in record.get(name, {}).items():
            if "." in check_path(key, "tensor name"):
                raise ArtifactError(f"graph.json: {shown(key)} is no tensor name: it has a dot")
            table[key] = torch.empty(0, device="meta") if there else None


def fill(root: nn.Module, values: Callable[[str], torch.Tensor], persistent: Callable[[str], bool]) -> None:
    """Put the tensors of an artifact, asked for by name, in their places."""
    for path, module in root.named_modules():
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    name = f"{path}.{key}" if path else key
                    table[key] = values(name)
                    if isinstance(table[key], nn.Parameter) is not (table is module._parameters):
                        raise ArtifactError(f"graph.json: {shown(name)} is a parameter in one place and a buffer in another")
                    if table is module._buffers and not persistent(name):
                        module._non_persistent_buffers_set.add(key)
        if isinstance(module, nn.RNNBase):
            list_weights(module)  # it keeps its weights in a list as well
