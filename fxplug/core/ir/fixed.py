"""What a traced module holds fixed: to change it after the trace would have no effect, and is an error."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import CodeType
from typing import Any

from torch import nn

from ..errors import SpecError, quote
from ..torch_internals.modules import admit_hooks, refuse_hooks

WAYS = (
    "to compute something else write a pass or trace the changed model again, to read values use "
    "fxplug.features(module, [paths]) or hook a layer that the graph calls, and to keep a part whole trace with "
    "leaf: [its path]"
)
LISTS = ("Sequential", "ModuleList", "ModuleDict")  # classes whose owner calls whatever is in them


def check_value(part: nn.Module, name: str, value: Any, container: type[nn.Module]) -> None:
    """Raises SpecError for another value of an attribute than that with which the graph was traced.

    `container` is the class of parts that the graph does not call.
    """
    modules = part.__dict__.get("_modules", {})
    if name in modules:
        _check_module(part, name, modules[name], value, container)
    elif "_fixed" in part.__dict__ and name in part.__dict__["_fixed"].names:
        _check_attribute(part, name, value)
    elif "_fixed" in part.__dict__ and not set(LISTS).isdisjoint(getattr(part, "classes", ())):
        raise SpecError(f"{_place(part, name)} is a new module, which the graph does not call: {WAYS}")


def check_tensor(part: nn.Module, name: str, value: Any) -> None:
    """Raises SpecError for a tensor where the model had None."""
    if value is not None:
        raise SpecError(f"{_place(part, name)} is None, and the graph was traced without a tensor there: {WAYS}")


def refuse_deletion(part: nn.Module, name: str) -> None:
    """Raises SpecError for what the graph was traced with."""
    raise SpecError(f"{_place(part, name)} cannot be deleted, as the graph was traced with it: {WAYS}")


def _check_attribute(part: nn.Module, name: str, value: Any) -> None:
    """Raises SpecError where an attribute that forward reads would get another value."""
    missing = object()
    before = part.__dict__.get(name, part.__dict__.get("_extras", {}).get(name, missing))
    if before is value or (type(before) is type(value) and _is_like(before, value)):
        return
    was = "may be read by forward" if before is missing else f"was {quote(before, 80)} when the model was traced"
    raise SpecError(
        f"{_place(part, name)} {was}, and the graph has what it was: to set it to {quote(value, 80)} would have no effect; set "
        "it on the model and trace that again, or let a pass compute with another value"
    )


def _is_like(before: Any, value: Any) -> bool:
    try:
        return bool(before == value)
    except Exception:  # the comparison of anybody's class
        return False


def _check_module(part: nn.Module, name: str, before: nn.Module | None, value: Any, container: type[nn.Module]) -> None:
    """Raises SpecError for a module that takes the place of one that the graph does not call."""
    if value is before:
        return
    if before is None or isinstance(before, container) or isinstance(value, container) or not isinstance(value, nn.Module):
        now = type(value).__name__ if isinstance(value, nn.Module) else quote(value, 80)
        was = "None" if before is None else f"a {type(before).__name__}"
        why = "its code is in the graph" if isinstance(before, container) else "the graph was traced with it"
        raise SpecError(f"{_place(part, name)} was {was}, and is replaced by {now}: {why}; {WAYS}")


def check_forward(part: nn.Module, value: Any, hook: Any) -> None:
    """Raises SpecError for another `forward` of a part, unless it is of a `hook` of accelerate that moves weights."""
    if getattr(value, "__func__", None) is type(part).forward:
        return
    kinds = [type(each) for each in getattr(hook, "hooks", (hook,))]
    if any(kind.__name__ != "AlignDevicesHook" or not kind.__module__.startswith("accelerate.") for kind in kinds):
        refuse_without_call(part, "forward")


def refuse_without_call(part: nn.Module, name: str) -> None:
    """Raises SpecError: what this name stands for acts when the part is called."""
    raise SpecError(f"{_place(part, name)} has no effect: no graph calls this part, as its code is in the graph; {WAYS}")


def check_own_forward(module: Any, hook: Any, ours: CodeType) -> None:
    """Raises SpecError for a forward that is a module's own, but that of its class, which accelerate leaves when its hooks go.

    It is bound to this module, and would be called in place of what a copy or a rewrite of it computes. `ours` is the code of
    the forward of every traced module.
    """
    if (forward := vars(module).get("forward")) is None:  # another thread was here
        return
    function = getattr(forward, "__func__", None)
    of_graph = getattr(function, "__code__", None) is ours
    if not (function is type(module).forward or of_graph and forward.__self__ is module):
        hook = hook or next(iter(getattr(vars(module).get("_diffusers_hook"), "hooks", {}).values()), None)
        kind = next(iter(getattr(module, "classes", ())), type(module).__name__)
        raise SpecError(
            f"{f'{type(hook).__name__} has set a' if hook else 'there is another'} forward on a traced {kind}, which no "
            "rewrite, lowered or saved module takes along: take it off before (pipe.remove_all_hooks(), "
            "accelerate.hooks.remove_hook_from_submodules(module)), and set it again on the result"
        )


def refuse_uncalled(tree: nn.Module, old: set[str], new: set[str], given: set[str], part: type[nn.Module]) -> None:
    """Make an error of hooks on layers of a tree that were called, by `old` paths, and are not by the `new` ones.

    Layers `given` to what is called are left alone, and so are those of the class `part`, which see to hooks themselves.
    """
    modules = dict(tree.named_modules(remove_duplicate=False))
    called, kept, left = (
        {id(m): m for path in paths if path in modules for m in modules[path].modules()} for paths in (new, given, old - new)
    )
    for layer in called.values():
        admit_hooks(layer)
    for path, layer in modules.items():
        if id(layer) in left and not (id(layer) in called or id(layer) in kept or isinstance(layer, part)):
            refuse_hooks(layer, partial(_refuse_hook, path))


def _refuse_hook(path: str) -> None:
    raise SpecError(
        f"a hook on '{path}' has no effect: no graph calls this layer any more, as a pass or a lowering reads its weights; "
        f"hook it before that (they leave layers with hooks whole or take the hooks in), or {WAYS}"
    )


def _place(part: nn.Module, name: str) -> str:
    path = getattr(part.__dict__.get("_fixed"), "path", "")
    kind = next(iter(getattr(part, "classes", ())), type(part).__name__)
    return f"'{f'{path}.' if path else ''}{name}' of a traced {kind}"


# --- one tensor or layer under several names, of which the graph reads one


def describe_untied(one: str, other: str) -> str:
    """Why a graph does not hold where two names that were one are two."""
    return (
        f"'{one}' and '{other}' were one when the model was traced, and the graph reads one of them for both; now they are "
        "two: give both names the same object, load without assign=True, which copies values, or trace a model in which they "
        "are two"
    )


def check_assigned(module: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Raises SpecError where tensors that are put into a module would untie what its graph reads once."""
    for names in module.__dict__.get("_tied", ()):
        keys = [".".join(name) for name in names]
        given = [state_dict[key] for key in keys if key in state_dict]
        if given and not (len(given) == len(keys) and isinstance(given[0], nn.Parameter) and len(set(map(id, given))) == 1):
            raise SpecError(f"load_state_dict(assign=True) loads nothing: {describe_untied(*keys[:2])}")
