"""Forms of call of a traced module, in words and as keys: what a variant is for, and which calls were refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import shown
from . import ops
from .pytree import children

if TYPE_CHECKING:
    from .traced_module import TracedModule

DECIDED = "decided: "  # before what is no argument


def key(module: TracedModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What decides, beside values of tensors, whether a call can be traced: its shapes and plain values, and the modes."""
    like = next(module.parameters(), None)
    held = None if like is None else (like.dtype, str(like.device))
    modes = module.training, torch.is_grad_enabled(), ops.modes(), held
    return str(modes), _form(args), _form(dict(kwargs))


def _form(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, str(value.device), value.requires_grad
    if (members := children(value)) is not None:
        return type(value), tuple((str(name), _form(member)) for name, member in members)
    return type(value), shown(value, 200)


def labels(module: TracedModule, variants: Sequence[TracedModule]) -> list[str]:
    """What each variant is for: how its call differs from the one that the module itself was traced with."""
    own = _checked(module)
    found: list[str] = []
    for variant in variants:
        rows = {key: row for key, row in _checked(variant).items() if own.get(key) != row}
        label = ", ".join(row for key, row in rows.items() if not key.startswith(DECIDED))
        if not label or label in found:
            label = ", ".join(rows.values())
        found.append(label or "other sizes")
    return found


def _checked(module: TracedModule) -> Mapping[str, str]:
    """How a graph is called, by argument; decisions that it has taken come last."""
    rows: dict[str, str] = {}
    decided: dict[str, str] = {}
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        args: Any = node.args
        if node.target is ops.same:
            rows.update({name: f"{name}={shown(value, 60)}" for value, name in zip(args[1], args[2], strict=True)})
        elif node.target is ops.check_numbers:
            rows.update({name: f"{name}: {kind}" for kind, name in zip(args[1], args[2], strict=True)})
        elif node.target is ops.check_inputs:
            for rank, dtype, name in zip(args[1], args[2], args[3], strict=True):
                kind = "tensor" if dtype is None else str(dtype).removeprefix("torch.")
                rows[name] = f"{name}: {kind} of {rank} dimensions"
        elif node.target is ops.check_members:
            rows[args[2]] = f"{args[2]} with {', '.join(map(str, args[1])) or 'nothing'}"
        elif node.target is ops.guard:
            what = str(args[2]).rpartition("was decided on ")[2]
            decided[what.rpartition(",")[0]] = what.removesuffix(" when traced")
    return {**rows, **{f"{DECIDED}{key}": text for key, text in decided.items()}}
