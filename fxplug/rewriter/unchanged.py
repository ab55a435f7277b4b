"""A model that is only looked at: what is done to its modules for a time is found, and taken back."""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.memory_journal import Journal, storage_of
from ..ir.traced_module import OWN_STATE
from ..torch_internals.tensors import gradient_hooks, memory_id, set_gradient_hooks

Rows = list[tuple[Any, Any]]
TABLES = (OrderedDict, dict, list, set)  # with their subclasses: hooks, parameters, children, and what users keep


class Unchanged(Journal):  # type: ignore[no-untyped-call]
    """The classes, attributes, hooks, children and tensors of all modules of a model as they are when this is made.

    What is written into the tensors' memory is seen while this is entered, whichever alias it is written through.
    """

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.root = root
        held = [(path, module, vars(module)) for path, module in root.named_modules()]
        held += [("", root, vars(root).get("_extras", {}))]
        self.before = [(path, module, type(module), now, self._state(now)) for path, module, now in held]
        rows = [*root.named_parameters(), *root.named_buffers()]
        tensors = [(name, tensor, tensor.detach()) for name, tensor in rows]
        # some quantised tensors lie elsewhere in each view
        tensors = [row for row in tensors if _same_place(*row[1:])]
        self.tensors = {name: (t, view, t.requires_grad, gradient_hooks(t)) for name, t, view in tensors}
        self.memory = {memory_id(s): name for name, row in self.tensors.items() if (s := storage_of(row[1])) is not None}

    def _state(self, now: dict[str, Any]) -> dict[str, tuple[Any, Rows]]:
        skipped = OWN_STATE if now is vars(self.root) else ()
        return {key: (value, _tables(value)) for key, value in now.items() if key not in skipped}

    def keep(self, value: Any) -> None:
        """Copy the memory of a tensor, once, if it is the model's."""
        storage = storage_of(value)
        if storage is not None and memory_id(storage) in self.memory:
            super().keep(value)

    def undo(self) -> dict[str, list[str]]:
        """Take back what was done since; the names of what was changed, by the path of the module."""
        found: dict[str, list[str]] = {}
        for path, module, kind, now, state in self.before:
            if type(module) is not kind:
                found.setdefault(path, []).append("__class__")
                module.__class__ = kind
            for key in [key for key in self._state(now) if key not in state]:
                if not isinstance(inspect.getattr_static(type(module), key, None), functools.cached_property):
                    found.setdefault(path, []).append(key)
                del now[key]
            for key, (value, members) in state.items():
                changed = [row for row in members if not _alike(*row)]
                if now.get(key, self) is not value or changed:
                    found.setdefault(path, []).append(key)
                    now[key] = value
                    for row in changed:
                        _refill(*row)
        written = {self.memory[key] for key in self.kept}
        self.put_back()
        for name, (tensor, before, trains, hooks) in self.tensors.items():
            moved = not _same_place(tensor, before)
            if moved:
                tensor.data = before
            if moved or name in written or (tensor.requires_grad, gradient_hooks(tensor)) != (trains, hooks):
                tensor.requires_grad_(trains)
                set_gradient_hooks(tensor, hooks)
                path, _, last = name.rpartition(".")
                found.setdefault(path, []).append(last)
        return found


def _same_place(tensor: Tensor, before: Tensor) -> bool:
    """Whether a tensor is the numbers that it was: of this dtype, in this memory, in this order."""
    shapes = [(t.dtype, t.device, tuple(t.shape), t.layout) for t in (tensor, before)]
    if shapes[0] != shapes[1] or tensor.layout is not torch.strided:
        return shapes[0] == shapes[1]
    places = [(t.stride(), t.storage_offset(), s and memory_id(s)) for t in (tensor, before) for s in [storage_of(t)]]
    return places[0] == places[1]


def _tables(value: Any) -> Rows:
    """The dicts, lists and sets in a value, to the last of them, each with a copy."""
    found: dict[int, tuple[Any, Any]] = {}
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, TABLES) and id(one) not in found:
            found[id(one)] = one, _kind(one)(one)
            waiting += one.values() if isinstance(one, dict) else one
        elif isinstance(one, tuple):
            waiting += one
    return list(found.values())


def _kind(table: Any) -> Any:
    return next(kind for kind in TABLES if isinstance(table, kind))


def _alike(value: Any, members: Any) -> bool:
    if len(value) != len(members):
        return False
    if isinstance(value, dict):
        return all(a is b and value[a] is members[b] for a, b in zip(value, members, strict=True))
    return value == members if isinstance(value, set) else all(a is b for a, b in zip(value, members, strict=True))


def _refill(value: Any, members: Any) -> None:
    kind = _kind(value)  # whose methods a subclass may forbid, as FrozenDict of diffusers does
    kind.clear(value)
    (kind.extend if kind is list else kind.update)(value, members)
