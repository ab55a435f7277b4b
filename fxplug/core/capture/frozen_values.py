"""Values as they are now, to compare with what they become, and what modules say they have computed from their weights."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from ..ir.containers import children, leaves, map_leaves, unlike
from ..ir.ops import other_kind
from ..torch_internals.tensors import memory_id
from .fake_tensors import Number
from .isolation import restore_after
from .module_state import MISSING, Journal, State

DEPTH = 40  # nested deeper than this, values count as equal


def frozen(value: Any, depth: int = 0) -> Any:
    """A copy of what a value holds, for `alike`: later changes in place do not reach it."""
    if isinstance(value, torch.Tensor):
        return value if isinstance(value, nn.Parameter) else value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Number):
        return value.value
    if depth > DEPTH or isinstance(value, (str, bytes, int, float, complex, type, type(None), fx.Graph)):
        return value  # the nodes of a graph hold each other, so that copies of it would never end
    if isinstance(value, FunctionType):
        return ("function", value.__code__)
    if isinstance(value, MethodType):
        return ("method", value.__func__.__qualname__)
    if isinstance(value, (set, frozenset)):
        return ("set", set(value))
    found = children(value)
    if found is None and isinstance(attributes := getattr(value, "__dict__", None), dict):
        found = iter(attributes.items())
    if found is None:
        return value
    return (type(value), {key: frozen(member, depth + 1) for key, member in list(found)})


def alike(a: Any, b: Any) -> bool:
    """Whether two frozen values are the same: tensors in every bit, objects in what they hold."""
    return unlike(a, b, same=_alike) is None


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool(a.dtype == object or a.tobytes() == b.tobytes())
    plain = isinstance(a, (str, bytes, int, float, complex, type, set))
    return a == b or a != a and b != b if plain else True  # an object without a content: any other will do


def rounded(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors differ by no more than rounding."""
    if a.shape != b.shape or a.dtype != b.dtype or not a.dtype.is_floating_point:
        return False
    return torch.allclose(a, b, rtol=torch.finfo(a.dtype).eps ** 0.5, equal_nan=True)


def difference(a: Any, b: Any) -> str | None:
    """How `b` differs from `a`, in words; None where type, structure and every bit are the same, and objects hold the same."""
    return unlike(a, b, same=_equal_contents)


def _equal_contents(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Generator):
        return torch.equal(a.get_state(), b.get_state())
    return alike(frozen(a), frozen(b))


def copied(call: Any, other: str = "") -> Any:
    """Inputs again, with memory of their own and the same strides, aliases of each other and gradients.

    With `other` "numbers" floating-point tensors have other values: half of them, and a quarter. With "all" integers have too:
    half of them, so that indices are indices still.
    """
    tensors = [x for x in leaves(call) if isinstance(x, torch.Tensor)]
    spans: dict[Any, tuple[int, int]] = {}
    for t in tensors:
        if key := _memory(t):
            offset = int(t.storage_offset())
            first, last = spans.get(key, (offset, 0))
            end = offset + 1 + sum((int(n) - 1) * int(s) for n, s in zip(t.shape, t.stride(), strict=True))
            spans[key] = min(first, offset), max(last, end if t.numel() else offset)
    flats: dict[Any, torch.Tensor] = {}
    known: dict[int, torch.Tensor] = {}

    def copy(t: torch.Tensor, _: Any) -> torch.Tensor:
        if id(t) in known:
            return known[id(t)]
        with torch.no_grad():
            if key := _memory(t):
                first, last = spans[key]
                if key not in flats:
                    flats[key] = t.detach().as_strided((last - first,), (1,), first).clone()
                    if other:
                        _change(flats[key], other == "all")
                new = flats[key].as_strided(t.shape, t.stride(), t.storage_offset() - first)
            else:
                new = t.detach().clone()
        if t.requires_grad:
            new.requires_grad_()
            new = new if t.is_leaf else new.clone()
        known[id(t)] = new
        return new

    return _plain_copies(map_leaves(call, copy))


def value_changes(call: Any) -> list[str]:
    """What `copied` may take as `other` for a call, what changes most first."""
    has_integers = any(isinstance(t, torch.Tensor) and _is_integer(t) for t in leaves(call))
    return ["all", "numbers"] if has_integers else ["numbers"]


def of_other_sizes(call: Any) -> Iterator[Any]:
    """The inputs with one of their sizes changed, wherever it occurs: by one, and to a half."""
    sizes = {int(n) for t in leaves(call) if isinstance(t, torch.Tensor) for n in t.shape if n > 1}
    for size in sorted(sizes):
        for new in sorted({size // 2, size - 1, size + 1} - {0}):
            yield map_leaves(call, lambda t, _, size=size, new=new: _resized(t, size, new))  # type: ignore[misc]


def _resized(tensor: torch.Tensor, size: int, new: int) -> torch.Tensor:
    with torch.no_grad():
        for dim, n in enumerate(tensor.shape):
            if n == size:
                tensor = tensor.index_select(dim, torch.arange(new, device=tensor.device) % size)
    return tensor


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def _plain_copies(value: Any) -> Any:
    """Containers and generators that are nobody else's."""
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if type(value) in (list, tuple):
        return type(value)(map(_plain_copies, value))
    if type(value) is dict:
        return {key: _plain_copies(member) for key, member in value.items()}
    return value


def _memory(tensor: torch.Tensor) -> Any:
    """A key for the memory of an ordinary tensor, and for how it is read; None for any other."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or other_kind(tensor) or tensor.is_conj() or tensor.is_neg():
        return None
    return memory_id(tensor.untyped_storage()), tensor.dtype, tensor.device


def _change(tensor: torch.Tensor, integers: bool) -> None:
    if _is_integer(tensor):
        tensor.copy_(tensor // 2 if integers else tensor)
    elif tensor.is_floating_point() or tensor.is_complex():
        try:
            tensor.mul_(0.5).add_(0.25)
        except RuntimeError:  # a dtype without arithmetic
            return


PLAIN = (dict, list, set)
ANY_MODULES = frozenset(vars(nn.Module()))  # what every module has
Derived = list[tuple[nn.Module, str]]  # modules, and names of their attributes


def find_derived(model: nn.Module) -> Derived:
    """What modules drop when their mode changes, and what Python keeps for them of a `functools.cached_property`.

    timm's LeViT, TinyViT and EfficientFormer keep the biases of their attention so. A graph that had taken those for constants
    would go on with them when the weights have changed. The model's mode is changed and changed back, and what is None or empty
    then is what they drop; all is given back.
    """
    modules = list(model.modules())
    found = [(module, name) for module in modules for name in vars(module) if _is_cached_property(module, name)]
    if all(type(module).train is nn.Module.train for module in modules):
        return found
    kept = [(m, name) for m in modules for name, value in vars(m).items() if name not in ANY_MODULES and not _empty(value)]
    journal = Journal()  # layers that merge an update into their weight write it here
    try:
        with restore_after(State(model)), contextlib.suppress(Exception), journal:  # the model's own code
            for _ in range(2):
                model.train(not model.training)
            found += [(module, name) for module, name in kept if _empty(vars(module).get(name, MISSING))]
    finally:
        journal.put_back()
    return found


def drop(derived: Derived) -> None:
    """Take these out of the model; what was noted of it before gives them back."""
    for module, name in derived:
        if _is_cached_property(module, name):
            del vars(module)[name]
        else:
            value = vars(module)[name]
            setattr(module, name, type(value)() if type(value) in PLAIN else None)


def _is_cached_property(module: nn.Module, name: str) -> bool:
    return isinstance(getattr(type(module), name, None), functools.cached_property)


def _empty(value: Any) -> bool:
    return value is None or (type(value) in PLAIN and not value)
