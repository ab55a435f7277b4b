"""The modules of an artifact, read: made by their constructors, or of what they hold, on the meta device."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import DEFAULT, ArtifactError, Limits, did_you_mean, shown
from ..extensions import unusable_note
from ..ir.containers import PLAIN_TYPES, Container, is_plain_attribute
from ..quantised import is_own_layer, settle
from ..spec.pass_file import present
from ..torch_internals.modules import WEIGHT_LISTS, list_weights
from .module_json import INTERNAL, block_class, block_classes, construct, torch_classes, written_parameters
from .tensor_records import check_layer
from .value_json import (
    Budget,
    check_name,
    check_path,
    check_size,
    decode,
    find_function,
    import_class,
    is_import_path,
    only_keys,
)

KINDS = {
    "none": [],
    "same": ["as"],
    "container": ["classes", "attributes", "parameters", "buffers"],
    "module": ["class", "arguments", "attributes", "parameters", "buffers"],
    "block": ["class", "arguments", "attributes", "parameters", "buffers"],
    "leaf": ["class", "arguments", "attributes", "parameters", "buffers"],
}
STEPS = 64  # calls of torch for each tensor that a constructor is to make


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
        known = [p.name for p in written_parameters(cls)]
        for name, value in arguments.items():
            if name not in known:
                near = did_you_mean(name, known)
                raise ArtifactError(f"graph.json: {where}: a {cls.__name__} is not made with {shown(name)}{near}")
            check_size(value, self.limits.size, f"{shown(name)} of {where}")
        try:
            with Budget(STEPS * (self.expected[path] + 16)):
                return construct(cls, arguments)
        except Exception as error:  # the constructor's, of torch or of a block that is allowed
            raise ArtifactError(f"{where}: {cls.__qualname__} cannot be built again: {shown(str(error), 300)}") from error

    def _class(self, kind: str, name: Any) -> type[nn.Module]:
        name = present(name) if type(name) is str else name
        if kind == "module":
            known = torch_classes()
            if type(name) is str and name in known:
                return known[name]
            raise ArtifactError(f"graph.json: torch.nn has no module class {shown(name)}{did_you_mean(name, known)}")
        if kind == "block" and type(name) is str and (block := block_class(name)) is not None:
            return block
        if kind == "block" and is_import_path(name) and name.partition(".")[0].partition(":")[0] == "fxplug":
            hint = did_you_mean(name, block_classes()) + unusable_note()
            raise ArtifactError(f"graph.json: fxplug has no block {shown(name)}{hint}")
        cls = import_class(name, self.allow)
        if not issubclass(cls, nn.Module) or (kind == "block" and getattr(cls, "is_block", False) is not True):
            needed = "an nn.Module" + " with is_block" * (kind == "block")
            raise ArtifactError(f"graph.json: {shown(name)} is no {kind}: it is not {needed}")
        return cls

    def _value(self, data: Any, function: bool) -> Any:
        if function and type(data) is dict and list(data) == ["function"]:
            return find_function(data["function"])
        return decode(data, None, self.limits)


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
        if is_own_layer(module):
            check_layer(path, module)
            settle(module)
        if isinstance(module, nn.RNNBase):
            list_weights(module)  # it keeps its weights in a list as well
