"""A model that is only looked at: what is done to its modules for a time is found, and taken back."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor, nn

from ..ir.traced_module import OWN_STATE
from ..torch_internals.tensors import version

TABLES = (dict, list, set)  # with their subclasses: hooks, parameters, children, and what users keep


class Unchanged:
    """The attributes, hooks, children and tensors of all modules of a model as they are when this is made."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.before = {path: (module, _state(module, skipped=OWN_STATE if module is root else frozenset()))
                       for path, module in root.named_modules()}  # fmt: skip
        self.versions = {name: (tensor, version(tensor)) for name, tensor in _tensors(root)}

    def undo(self) -> dict[str, list[str]]:
        """Take back what was done since; the names of what was changed, by the path of the module.

        A tensor that was written stays as it is, and is among the names.
        """
        found: dict[str, list[str]] = {}
        for path, (module, state) in self.before.items():
            now = vars(module)
            for key in [k for k in now if k not in state and not (module is self.root and k in OWN_STATE)]:
                if not isinstance(inspect.getattr_static(type(module), key, None), functools.cached_property):
                    found.setdefault(path, []).append(key)
                del now[key]
            for key, (value, members) in state.items():
                if now.get(key, self) is not value or (members is not None and not _alike(value, members)):
                    found.setdefault(path, []).append(key)
                    now[key] = value
                    if members is not None:
                        _refill(value, members)
        for name, (tensor, before) in self.versions.items():
            if version(tensor) != before:
                path, _, last = name.rpartition(".")
                found.setdefault(path, []).append(last)
        return found


def _state(module: nn.Module, skipped: Any) -> dict[str, tuple[Any, Any]]:
    return {k: (v, v.copy() if isinstance(v, TABLES) else None) for k, v in vars(module).items() if k not in skipped}


def _tensors(root: nn.Module) -> list[tuple[str, Tensor]]:
    rows = [*root.named_parameters(), *root.named_buffers()]
    return [(name, tensor) for name, tensor in rows if not tensor.is_inference()]


def _alike(value: Any, members: Any) -> bool:
    if len(value) != len(members):
        return False
    if isinstance(value, dict):
        return all(a is b and value[a] is members[b] for a, b in zip(value, members, strict=True))
    return value == members if isinstance(value, set) else all(a is b for a, b in zip(value, members, strict=True))


def _refill(value: Any, members: Any) -> None:
    value.clear()
    if isinstance(value, list):
        value.extend(members)
    else:
        value.update(members)
