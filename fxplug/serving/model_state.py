"""What the modules of a model are made of, to see whether a pipeline writes into its models while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..core.ir.traced_module import TracedModule
from ..core.torch_internals.tensors import version
from .forms import PLAIN

TENSORS = ("_parameters", "_buffers")
State = dict[str, tuple[type, dict[str, Any]]]  # by the path of a module


def list_state(model: nn.Module) -> State:
    """List what the modules of a model are made of: tensors with their versions, children, hooks, and plain attributes.

    Args:
        model: The model.

    Returns:
        The class and the attributes of each module, by its path. Of a traced one, which keeps what it knows of its calls in
        attributes, the tensors alone.
    """
    return {path: (type(module), _members(module)) for path, module in model.named_modules()}


def _members(module: nn.Module) -> dict[str, Any]:
    names = TENSORS if isinstance(module, TracedModule) else vars(module)
    return {name: _content(vars(module)[name]) for name in names}


def _content(value: Any, looks_inside: bool = True) -> Any:
    if type(value) in PLAIN:
        return value
    if isinstance(value, Tensor):
        return value, None if value.is_inference() else version(value)
    if isinstance(value, Mapping):
        return {key: _content(each) for key, each in value.items()} if value else {}
    foreign = type(value).__module__.startswith("diffusers.") and not isinstance(value, nn.Module)
    if looks_inside and foreign and hasattr(value, "__dict__"):  # as an attention processor with a scale
        return {"": value, **{key: _content(each, looks_inside=False) for key, each in vars(value).items()}}
    return list(value) if isinstance(value, (list, tuple, set)) else value


def find_change(before: State, after: State, additions: bool = False) -> str | None:
    """Return the path of what a run changed in a model; None if nothing.

    Args:
        before: What was there.
        after: What is there now.
        additions: Whether something new is a change: models may make what they keep at their first call, an attribute that was
            not there, or tensors where None was.

    Returns:
        The path.
    """
    for path, (kind, members) in before.items():
        if path not in after or after[path][0] is not kind:
            return path
        if (name := _find_in(members, after[path][1], additions)) is not None:
            return f"{path}.{name}".strip(".")
    return next((path for path in after if path not in before), None) if additions else None


def _find_in(before: Mapping[str, Any], after: Mapping[str, Any], additions: bool) -> str | None:
    for name, value in before.items():
        if name not in after:
            return name
        other = after[name]
        if isinstance(value, dict) and isinstance(other, dict):
            if (found := _find_in(value, other, additions)) is not None:
                return str(found) if name in (*TENSORS, "_modules") else f"{name}.{found}"
        elif not _is_unchanged(value, other) and (additions or value is not None or not _has_tensors(other)):
            return name
    return next((name for name in after if name not in before), None) if additions else None


def _has_tensors(content: Any) -> bool:
    """Tell whether an attribute is a tensor, or a list of them alone."""
    rows = content[:1] if isinstance(content, tuple) else content if isinstance(content, list) else ()
    return bool(rows) and all(isinstance(row, Tensor) for row in rows)


def _is_unchanged(x: Any, y: Any) -> bool:
    if x is y:
        return True
    if isinstance(x, PLAIN) and isinstance(y, PLAIN):
        return type(x) is type(y) and (x == y or x != x)
    if isinstance(x, (list, tuple)) and type(x) is type(y) and type(x) in (list, tuple):
        return len(x) == len(y) and all(map(_is_unchanged, x, y))
    return False
