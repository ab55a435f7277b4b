"""The tree of a traced module: modules without the code of their classes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..limits import DEFAULT

# names that torch's GraphModule and this one use themselves; a model's attribute of that name stays out
RESERVED = {"meta", "shape_env", "attributes", "graphs", "graph", "code", "classes", "training", "twin_error"}
PLAIN_TYPES = (bool, int, float, str, type(None), torch.dtype)


class Container(nn.Module):
    """Stands where a module was whose code is in the graph now: its parameters, children and plain attributes.

    `classes` holds the names of its class and of that class's bases; its own class has the first of them as its name.
    """

    def __new__(cls, classes: tuple[str, ...] = ("Module",), attributes: dict[str, Any] | None = None) -> Container:
        name = next(iter(classes), "")
        return super().__new__(_named(name) if cls is Container and name.isidentifier() else cls)

    def __init__(self, classes: tuple[str, ...] = ("Module",), attributes: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.classes = classes
        self.attributes = tuple(attributes or ())
        self.__dict__.update(attributes or {})

    def __getitem__(self, key: int | str) -> Any:
        return child_of(self, key)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(m for m in self._modules.values() if m is not None)

    def __bool__(self) -> bool:
        return True

    def _get_name(self) -> str:
        return self.classes[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises NotImplementedError: the code is in the graph of the traced model."""
        raise CodeInGraph(self)


class CodeInGraph(NotImplementedError):
    """A part of a traced model was called by itself; `module` is the part, or a copy of it."""

    def __init__(self, module: Container) -> None:
        self.module = module
        super().__init__(
            f"the code of this {module.classes[0]} is in the graph of the traced model: call the model, or keep the part whole "
            "when the model is traced, leaf: [its path]"
        )


@functools.lru_cache(4096)
def _named(name: str) -> type[Container]:
    return type(name, (Container,), {"__module__": __name__})


def child_of(module: nn.Module, key: int | str) -> Any:
    """A child, parameter or buffer by name; or a child by position, as in a ModuleList."""
    name = str(key)
    found: Any = module._modules.get(name)
    if found is None:
        found = module._parameters.get(name)
    if found is None:
        found = module._buffers.get(name)
    if found is None and isinstance(key, int):
        found = list(module._modules.values())[key]
    if found is None:
        raise KeyError(key)
    return found


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """The public attributes of a module that are numbers, strings, None, dtypes, or tuples and lists of those."""
    return {k: v for k, v in vars(module).items() if is_plain_attribute(k, v)}


def is_plain_attribute(name: str, value: Any) -> bool:
    """Whether a Container has an attribute: a public one, of no name that a module has itself, and a plain value."""

    def plain(x: Any, depth: int = DEFAULT.depth) -> bool:
        return isinstance(x, PLAIN_TYPES) or (type(x) in (tuple, list) and depth > 0 and all(plain(y, depth - 1) for y in x))

    taken = name in ("training", "classes", "attributes") or hasattr(Container, name)
    return not (name.startswith("_") or taken) and plain(value)
