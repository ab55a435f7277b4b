"""Nested values: tuples, lists, dicts and result classes, walked and rebuilt in kind."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.fx.immutable_collections import immutable_dict, immutable_list

Keys = tuple[int | str, ...]


def children(value: Any) -> Iterator[tuple[int | str, Any]] | None:
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


def rebuilt(value: Any, members: dict[int | str, Any]) -> Any:
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
    found = children(value)
    if found is None:
        return value
    old = dict(found)
    new = {key: map_leaves(member, function, (*keys, key), in_place, kind) for key, member in old.items()}
    changed = [key for key in old if new[key] is not old[key]]
    if not changed:
        return value
    if not in_place or isinstance(value, tuple):
        return rebuilt(value, new)
    for key in changed:
        set_member(value, key, new[key])
    return value


def put_back(value: Any, originals: dict[int, tuple[Any, Any]]) -> Any:
    """Undo a `map_leaves` in place: `originals` has the new and the old value by the id of the new one."""
    if id(value) in originals:
        return originals[id(value)][1]
    found = None if isinstance(value, torch.Tensor) else children(value)
    if found is None:
        return value
    old = dict(found)
    new = {key: put_back(member, originals) for key, member in old.items()}
    changed = [key for key in old if new[key] is not old[key]]
    if changed and isinstance(value, tuple):
        return rebuilt(value, new)
    for key in changed:
        set_member(value, key, new[key])
    return value


def leaves(value: Any) -> list[Any]:
    """Every value in a nested one, containers opened."""
    found = None if isinstance(value, torch.Tensor) else children(value)
    return [value] if found is None else [x for _, member in found for x in leaves(member)]


def has_tensor(value: Any) -> bool:
    """Whether a tensor is anywhere in `value`."""
    if isinstance(value, torch.Tensor):
        return True
    found = children(value)
    return found is not None and any(has_tensor(member) for _, member in found)


def parameters(module: nn.Module) -> str:
    """How many numbers a module has, and how many each applied pass added."""
    seen: dict[int, int] = {id(p): p.numel() for p in module.parameters()}
    total = sum(seen.values())
    added = {
        entry["name"]: sum(p.numel() for name, p in module.named_parameters() if name.startswith(f"{entry['name']}."))
        for entry in getattr(module, "meta", {}).get("passes", [])
    }
    parts = [f"{name} +{count:,} ({count / max(total - sum(added.values()), 1):.2%})" for name, count in added.items()]
    return f"{total:,} parameters" + (f": base {total - sum(added.values()):,}, {', '.join(parts)}" if parts else "")
