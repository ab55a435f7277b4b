"""The tree of a traced module without the code of its classes, and nested values: walked, rebuilt in kind."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx.immutable_collections import immutable_dict, immutable_list

from ..errors import DEFAULT, SpecError

Keys = tuple[int | str, ...]


def list_members(value: Any) -> Iterator[tuple[int | str, Any]] | None:
    """The members of a container with their keys, or None for anything else."""
    if isinstance(value, torch.Size):
        return None
    if isinstance(value, (tuple, list)):
        return iter(enumerate(value))
    if isinstance(value, dict):
        return iter(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return iter([(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if hasattr(value, f.name)])
    return None


def rebuild(value: Any, members: dict[int | str, Any]) -> Any:
    """A container like `value` with other members."""
    if isinstance(value, tuple):
        return type(value)(*members.values()) if hasattr(value, "_fields") else type(value)(members.values())
    if type(value) in (list, immutable_list):  # FX has its own, which cannot be written
        return list(members.values())
    if type(value) in (dict, immutable_dict):
        return members
    new = copy.copy(value)
    for key, member in members.items():
        set_member(new, key, member)
    return new


def set_member(value: Any, key: int | str, member: Any) -> None:
    """Put a member into a list, dict or result class, whether it is frozen or not."""
    if isinstance(value, (list, dict)):
        value[key] = member  # type: ignore[index]
    else:
        object.__setattr__(value, str(key), member)


def map_leaves(
    value: Any, function: Callable[[Any, Keys], Any], keys: Keys = (), in_place: bool = False, kind: Any = torch.Tensor
) -> Any:
    """`value` with every tensor in it replaced by `function(tensor, keys)`; the same object when no tensor is in it.

    With `in_place` lists, dicts and result classes stay the objects that they are and get other members. `kind` is another
    class than tensors.
    """
    if isinstance(value, kind):
        return function(value, keys)
    found = list_members(value)
    if found is None:
        return value
    old = dict(found)
    new = {key: map_leaves(member, function, (*keys, key), in_place, kind) for key, member in old.items()}
    changed = [key for key in old if new[key] is not old[key]]
    if not changed:
        return value
    if not in_place or isinstance(value, tuple):
        return rebuild(value, new)
    for key in changed:
        set_member(value, key, new[key])
    return value


def list_leaves(value: Any) -> list[Any]:
    """Every value in a nested one, containers opened."""
    found = None if isinstance(value, torch.Tensor) else list_members(value)
    return [value] if found is None else [x for _, member in found for x in list_leaves(member)]


def has_tensor(value: Any) -> bool:
    """Whether a tensor is anywhere in `value`."""
    return any(isinstance(leaf, torch.Tensor) for leaf in list_leaves(value))


def list_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a module under all of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def find_tensor(module: nn.Module, name: str) -> Tensor | None:
    """The parameter or buffer of this name; None where there is none."""
    path, _, key = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        return None
    found = owner._parameters.get(key)
    return owner._buffers.get(key) if found is None else found


def find_module(root: nn.Module, path: str) -> nn.Module | None:
    """The module at a path; None where there is none."""
    try:
        return root.get_submodule(path)
    except AttributeError:
        return None


def count_pass_parameters(module: nn.Module) -> str:
    """How many numbers a module has, and how many each applied pass added."""
    seen: dict[int, int] = {id(p): p.numel() for p in module.parameters()}
    total = sum(seen.values())
    added = {
        entry["name"]: sum(p.numel() for name, p in module.named_parameters() if name.startswith(f"{entry['name']}."))
        for entry in getattr(module, "meta", {}).get("passes", [])
    }
    parts = [f"{name} +{count:,} ({count / max(total - sum(added.values()), 1):.2%})" for name, count in added.items()]
    return f"{total:,} parameters" + (f": base {total - sum(added.values()):,}, {', '.join(parts)}" if parts else "")


# names that torch's GraphModule and this one use themselves; a model's attribute of that name stays out
RESERVED = {"meta", "shape_env", "attributes", "graphs", "graph", "code", "classes", "training", "twin_error"}
PLAIN_TYPES = (bool, int, float, str, type(None), torch.dtype)


def make_call(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An example call: `args` is a tuple or list of the positional arguments, or a single one. Raises SpecError."""
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise SpecError(
            f"kwargs has the arguments by name, and this is a {type(kwargs).__name__}: give several positional arguments as "
            "one tuple, (a, b)"
        )
    return tuple(args) if isinstance(args, (tuple, list)) else (args,), dict(kwargs or {})


HOOKED = "_hf_hook"  # where accelerate keeps what it does before and after a call of a module
WATCHED = "_watched"  # where a root keeps which of its parts and layers may have something there that it must see


class FixedNames(NamedTuple):
    """Where a part was in the model, and the names of what its forward may read there, tensors and modules apart."""

    path: str = ""
    names: frozenset[str] = frozenset()


class TracedPart(nn.Module):
    """The root of a traced module, or a part of it that its graph does not call.

    `_fixed` in its `__dict__` says what the graph has of it. Values that are set again as they are go through, and so do names
    that the model did not have.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what the graph reads or the model did not have. Raises SpecError for what is fixed."""
        own = self.__dict__
        if name in own.get("_modules", ()) or isinstance(value, nn.Module) or "_fixed" in own and name in own["_fixed"].names:
            _checks().check_value(self, name, value, Container)
        elif any(name in own.get(table, ()) and own[table][name] is None for table in ("_parameters", "_buffers")):
            _checks().check_tensor(self, name, value)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Delete a tensor, or what the model did not have. Raises SpecError for what is fixed."""
        own = self.__dict__
        if name in own["_modules"] or "_fixed" in own and name in own["_fixed"].names:
            _checks().refuse_deletion(self, name)
        super().__delattr__(name)

    def __prepare_scriptable__(self) -> Any:
        """Raises SpecError: torch.jit.script compiles Python code, which a graph has none of."""
        raise SpecError(
            "torch.jit.script compiles Python code, and the code of a traced module is a graph: use "
            "torch.jit.trace(module, args), or fxplug.export"
        )

    def __setitem__(self, key: int | str, value: Any) -> None:
        """Put a layer in the place of another, as `setattr`."""
        setattr(self, str(key), value)

    def __delitem__(self, key: int | str) -> None:
        """Raises SpecError: the graph calls what is in it."""
        delattr(self, str(key))

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Do as torch's `add_module`. Raises SpecError where the model would call the new module, and the graph does not."""
        _checks().check_value(self, name, module, Container)
        super().add_module(name, module)


def _checks() -> Any:
    from . import fixed  # for few modules

    return fixed


class SharedCode(nn.Module):
    """What alike regions of a graph compute, without weights.

    `constants` names what the model's code holds and the regions read; `repeatable` has the modes in which they write and draw
    nothing.
    """

    constants: frozenset[str] = frozenset()
    repeatable: frozenset[bool] = frozenset()


class TracedRoot(TracedPart):
    """The root of a traced module: what a graph reads of it is in its tables, and what else is asked for is looked up."""

    def __getattr__(self, name: str) -> Any:
        if (child := self.__dict__.get("_modules", {}).get(name)) is not None:  # which a call asks for hundreds of times
            return child
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
        return self._missing_attribute(name)

    def _missing_attribute(self, name: str) -> Any:
        raise NotImplementedError


class Container(TracedPart):
    """Stands where a module was whose code is in the graph now: its parameters, children and plain attributes.

    `classes` holds the names of its class and of that class's bases; its own class has the first of them as its name.
    """

    def __new__(cls, classes: tuple[str, ...] = ("Module",), attributes: dict[str, Any] | None = None) -> Container:
        name = next(iter(classes), "")
        kind = next((kind for kind in (ListPart, DictPart) if kind.of.intersection(classes)), Container)
        return super().__new__(_named(name, kind) if cls is Container and name.isidentifier() else cls)

    def __init__(self, classes: tuple[str, ...] = ("Module",), attributes: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.classes = classes
        self.attributes = tuple(attributes or ())
        self.__dict__.update(attributes or {})

    def __getitem__(self, key: int | str) -> Any:
        return get_child(self, key)

    def __len__(self) -> int:
        return len(self._modules)

    def __bool__(self) -> bool:
        return True

    def _get_name(self) -> str:
        return self.classes[0]

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what the graph reads or the model did not have. Raises SpecError for what is fixed, and for a `forward`."""
        if name == "forward":
            _checks().check_forward(self, value, self.__dict__.get(HOOKED))
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter again. Raises SpecError for a new one, as of `torch.nn.utils.prune`, which no graph reads."""
        if name not in self._parameters:
            _checks().refuse_without_call(self, name)
        super().register_parameter(name, param)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises NotImplementedError: the code is in the graph of the traced model."""
        raise CodeInGraph(self)


class ListPart(Container):
    """Stands where one of torch's lists of modules or parameters was."""

    of = frozenset({"ModuleList", "Sequential", "ParameterList"})

    def __getitem__(self, key: Any) -> Any:
        """A member, or for a slice a list of torch's with the same members."""
        if not isinstance(key, slice):
            return super().__getitem__(key)
        if "Sequential" in self.classes:
            return nn.Sequential(*[*self][key])
        return (nn.ModuleList if self._modules else nn.ParameterList)([*self][key])

    def __len__(self) -> int:
        return len(self._modules) + len(self._parameters)

    def __iter__(self) -> Iterator[Any]:
        return iter([value for value in (*self._modules.values(), *self._parameters.values()) if value is not None])


class DictPart(Container):
    """Stands where one of torch's dicts of modules or parameters was."""

    of = frozenset({"ModuleDict", "ParameterDict"})

    def __len__(self) -> int:
        return len(self.keys())

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    def keys(self) -> KeysView[str]:
        """The names of the members."""
        return {**self._modules, **self._parameters}.keys()

    def values(self) -> Iterable[Any]:
        """The members."""
        return {**self._modules, **self._parameters}.values()

    def items(self) -> Iterable[tuple[str, Any]]:
        """The members with their names."""
        return {**self._modules, **self._parameters}.items()


def _refusing(name: str) -> Callable[..., Any]:
    """A method of nn.Module that acts on calls of a module."""
    original = getattr(nn.Module, name)

    @functools.wraps(original)
    def method(self: Container, *args: Any, **kwargs: Any) -> Any:
        if type(self).forward is Container.forward:
            _checks().refuse_without_call(self, name)
        return original(self, *args, **kwargs)

    return method


OF_CALLS = "forward_hook forward_pre_hook backward_hook full_backward_hook full_backward_pre_hook".split()  # noqa: SIM905
for _name in ("compile", *(f"register_{hook}" for hook in OF_CALLS)):
    setattr(Container, _name, _refusing(_name))


class CodeInGraph(NotImplementedError):
    """A part of a traced model was called by itself; `module` is the part, or a copy of it."""

    def __init__(self, module: Container) -> None:
        self.module = module
        super().__init__(
            f"this {module.classes[0]} cannot be called by itself, because its code is in the graph of the traced model: call "
            "the model, or keep this part whole when the model is traced, leaf: [its path]"
        )


@functools.lru_cache(4096)
def _named(name: str, kind: type[Container]) -> type[Container]:
    return type(name, (kind,), {"__module__": __name__})


def get_child(module: nn.Module, key: int | str) -> Any:
    """A child, parameter or buffer by name; or a child by position, as in a ModuleList."""
    for table in (module._modules, module._parameters, module._buffers):
        if (found := table.get(str(key))) is not None:
            return found
    if isinstance(key, int):
        return list(module._modules.values() or module._parameters.values())[key]
    raise KeyError(key)


def get_plain_attributes(module: nn.Module) -> dict[str, Any]:
    """The public attributes of a module that are numbers, strings, None, dtypes, or tuples and lists of those."""
    return {k: v for k, v in vars(module).items() if is_plain_attribute(k, v)}


def is_plain_attribute(name: str, value: Any) -> bool:
    """Whether a Container has an attribute: a public one, of no name that a module has itself, and a plain value."""

    def plain(x: Any, depth: int = DEFAULT.depth) -> bool:
        return isinstance(x, PLAIN_TYPES) or (type(x) in (tuple, list) and depth > 0 and all(plain(y, depth - 1) for y in x))

    taken = name in ("training", "classes", "attributes") or hasattr(Container, name)
    return not (name.startswith("_") or taken) and plain(value)
