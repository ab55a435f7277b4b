"""Values as they are now, to compare with what they become, and what modules have computed from their weights and keep."""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ..ir.containers import children, equal, leaves, map_leaves, unlike
from ..ir.ops import other_kind
from ..quantised import library
from ..torch_internals.tensors import memory_id
from .fake_tensors import Number
from .isolation import restore_after
from .module_state import HOLDERS, Journal, State, own
from .user_code import is_foreign

DEPTH = 40  # nested deeper than this, values count as equal


def frozen(value: Any, depth: int = 0) -> Any:
    """A copy of what a value holds, for `alike`: later changes in place do not reach it."""
    if isinstance(value, torch.Tensor):
        return value if isinstance(value, nn.Parameter) else value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Number):
        return value.value
    if depth > DEPTH or isinstance(value, (str, bytes, int, float, complex, type, type(None))):
        return value
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


NESTED = 20  # what a module made of its weights is looked for in structures nested no deeper
PLAIN = (dict, list, set)
OTHERS = (nn.Module, torch.Tensor, type)
ANY_MODULES = frozenset(vars(nn.Module()))  # what every module has
STORE, FURTHER = dis.opmap["STORE_ATTR"], dis.opmap["EXTENDED_ARG"]


class Spot(NamedTuple):
    """A place that a module holds, `name` as seen from it: attributes of an object, or members of a dict or a list, by key."""

    module: nn.Module
    name: str
    owner: Any
    key: Any
    gone: bool  # whether there is nothing at all without it, or an empty value

    def value(self) -> Any:
        """What it holds; None where it is not there."""
        if isinstance(self.owner, list):
            return self.owner[self.key] if self.key < len(self.owner) else None
        return self.owner.get(self.key) if isinstance(self.owner, dict) else getattr(self.owner, self.key, None)


Kept = list[Spot]


def find_derived(model: nn.Module, call: Any = None) -> Kept:
    """The modules, and names of their attributes, that the modules drop when their mode changes, or when they are cast; and
    what Python keeps for them of a `functools.cached_property`.

    timm's LeViT, TinyViT and EfficientFormer keep the biases of their attention so. A graph that had taken those for constants
    would go on with them when the weights have changed. Each module's own `train` and `_apply` are asked on a stand-in without
    children and without values; what is None or empty in that afterwards is what they drop.

    With a `call` that has values, also the tensors that modules hold without registering them, if a call makes them anew of
    the weights: it makes others of other weights.
    """
    found = [Spot(m, name, vars(m), name, True) for m in model.modules() for name in vars(m) if _is_cached_property(m, name)]
    if own := [module for module in model.modules() if _says_what_to_drop(module)]:
        with restore_after(State(model)):
            found += [Spot(m, name, vars(m), name, False) for m in own for name in _dropped(m)]
    if call is not None:
        found += _made_of_weights(model, call)
    return list({(id(spot.owner), spot.key): spot for spot in reversed(found)}.values())[::-1]


def _made_of_weights(model: nn.Module, call: Any) -> Kept:
    found: Kept = []
    for deep in (False, True):
        held = [
            spot
            for module in model.modules()
            if not (is_foreign(type(module)) or library(module)) and any(p.is_floating_point() for p in module.parameters())
            for spot in _find_candidates(module, deep)
        ]
        made = _made_anew(model, call, held)
        if made is None:  # one of them is no such thing
            groups: dict[tuple[int, str], Kept] = {}
            for spot in held:
                groups.setdefault((id(type(spot.module)), ""), []).append(spot)
                groups.setdefault((id(type(spot.module)), spot.name), []).append(spot)
            tries = [each for group in groups.values() for each in (group, [s._replace(gone=True) for s in group])]
            made = [spot for group in tries for spot in _made_anew(model, call, group) or []]
        found += made
    return found


def _find_candidates(module: nn.Module, deep: bool) -> Iterator[Spot]:
    """What a module holds that may be made of weights: tensors, in structures of nothing else, and numbers that code sets
    outside of `__init__`; `deep` in these structures, and not the structures themselves."""
    todo: list[tuple[Any, str, bool]] = [(vars(module), "", False), (module._buffers, "", False)]
    seen = {id(owner) for owner, *_ in todo}
    while todo:
        owner, path, inside = todo.pop()
        members = owner if isinstance(owner, dict) else dict(enumerate(owner)) if isinstance(owner, list) else own(owner)
        for key, value in list(members.items()):
            if owner is vars(module) and key in ANY_MODULES:
                continue
            name, assigned = f"{path}.{key}".strip("."), isinstance(key, str) and key in _assigned(type(module))  # type: ignore[arg-type]
            if owner is module._buffers and not (assigned and key in module._non_persistent_buffers_set):
                continue
            structure = type(value) in (dict, list, tuple)
            if (_tensors(value) and not (deep and structure)) or (type(value) in (float, int, bool) and assigned):
                if inside or not deep:
                    yield Spot(module, name, owner, key, type(owner) is dict and inside)
            elif id(value) not in seen and name.count(".") < NESTED:
                seen.add(id(value))
                if structure:
                    todo.append((list(value) if type(value) is tuple else value, name, deep))
                elif isinstance(value, HOLDERS) or not (isinstance(value, OTHERS) or is_foreign(type(value))):
                    todo.append((vars(value) if hasattr(value, "__dict__") else value, name, False))


@functools.lru_cache(maxsize=1 << 10)
def _assigned(cls: type) -> frozenset[str]:
    """The names of attributes that code of a class, and functions of its file, sets but in `__init__`; and what they name."""
    space = vars(sys.modules.get(cls.__module__, torch))
    todo: list[Any] = [x for base in cls.__mro__ if not is_foreign(base) for x in vars(base).values()]
    todo += [x for x in space.values() if getattr(x, "__module__", None) == cls.__module__ and not isinstance(x, type)]
    codes = [getattr(getattr(x, "__func__", x), "__code__", None) for x in todo]
    names: set[str] = set()
    while codes:
        code = codes.pop()
        if not isinstance(code, CodeType) or code.co_name == "__init__":
            continue
        codes += code.co_consts
        names |= {x for x in code.co_consts if isinstance(x, str) and x.isidentifier()}
        steps = code.co_code
        for at in range(0, len(steps), 2):
            if steps[at] == STORE:
                names.add(code.co_names[steps[at + 1] + (steps[at - 1] << 8) * (at > 0 and steps[at - 2] == FURTHER)])
    return frozenset(names)


def _made_anew(model: nn.Module, call: Any, held: Kept) -> Kept | None:
    """Those of some places that a call without them makes anew, otherwise for other weights and not for other inputs, and the
    flags and counts beside them that it sets as they were; None where the call fails."""
    if all(type(spot.value()) in (int, bool) for spot in held):
        return []
    before = [_numbers(spot.value()) for spot in held]
    now = _after_call(model, call, held, other=False)
    if now is None:
        return None
    pairs = zip(held, before, now, strict=True)
    found = [spot for spot, old, new in pairs if len(old) == len(new) and not all(map(equal, old, new))]
    again = (_after_call(model, call, held, other=True) if found else now) or now  # of other inputs it may fail
    same = [spot for spot, a, b in zip(held, now, again, strict=True) if len(a) == len(b) and all(map(equal, a, b))]
    found = [spot for spot in found if spot in same]
    modules = [spot.module for spot in found]
    flags = [(s, old, new) for s, old, new in zip(held, before, now, strict=True) if type(s.value()) in (int, bool)]
    return found + [s for s, old, new in flags if s.module in modules and new and equal(*old, *new)]


def _after_call(model: nn.Module, call: Any, held: Kept, other: bool) -> list[list[torch.Tensor]] | None:
    """What a call without some places, with other weights, and perhaps with other inputs, makes of them."""
    journal = Journal()
    try:
        with torch.no_grad(), restore_after(State(model)), journal:
            drop(held)
            for parameter in {p for spot in held for p in spot.module.parameters() if p.is_floating_point()}:
                parameter.mul_(0.5)
            args, kwargs = copied(call, "all" if other else "")
            model(*args, **kwargs)
            return [_numbers(spot.value()) for spot in held]
    except Exception:  # the model's own
        return None
    finally:
        journal.put_back()
        torch.clear_autocast_cache()  # which has casts of the other weights, for as long as the caller's autocast lasts


def _numbers(value: Any) -> list[torch.Tensor]:
    """What can be compared of a place."""
    if type(value) in (float, int, bool):
        return [torch.tensor(value, dtype=torch.float64)]
    return [tensor.detach().clone() for tensor in _tensors(value)]


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of an attribute that is one, or is made of lists, tuples and dicts of them, and of nothing else."""
    found: list[torch.Tensor] = []
    rest, seen = [value], set()
    while rest:
        x = rest.pop()
        if type(x) in (dict, list, tuple):  # a subclass may have methods that do more
            rest += [] if id(x) in seen else x.values() if type(x) is dict else x
            seen.add(id(x))
        elif isinstance(x, torch.Tensor) and not isinstance(x, nn.Parameter) and x.is_floating_point():
            found.append(x)
        else:
            return []
    return found


def drop(kept: Kept) -> None:
    """Take these out of the model; what was noted of it before gives them back."""
    for spot in kept:
        value = spot.value()
        empty = type(value)() if type(value) in PLAIN else None
        if not isinstance(spot.owner, (dict, list)):
            delattr(spot.owner, spot.key) if spot.gone else setattr(spot.owner, spot.key, empty)
        elif spot.gone and isinstance(spot.owner, dict):
            del spot.owner[spot.key]
        else:
            spot.owner[spot.key] = empty


def _is_cached_property(module: nn.Module, name: str) -> bool:
    return isinstance(getattr(type(module), name, None), functools.cached_property)


def _says_what_to_drop(module: nn.Module) -> bool:
    """Whether a class that is not torch's own says what happens to a module that changes its mode, or is cast."""
    homes = (next(cls for cls in type(module).__mro__ if name in vars(cls)) for name in ("train", "_apply"))
    return any(home.__module__.partition(".")[0] != "torch" for home in homes)


def _dropped(module: nn.Module) -> list[str]:
    stand_in = object.__new__(type(module))
    held = {name: value.copy() if type(value) in PLAIN else value for name, value in vars(module).items()}
    with contextlib.suppress(Exception):  # the model's own code
        parameters = {
            name: None if p is None else nn.Parameter(p.detach().to("meta"), p.requires_grad)
            for name, p in module._parameters.items()
        }
        buffers = {name: None if b is None else b.detach().to("meta") for name, b in module._buffers.items()}
        stand_in.__dict__.update(held, _parameters=parameters, _buffers=buffers, _modules={})
        stand_in.train(not module.training)
        stand_in.train(module.training)
        stand_in.to("meta")
        now, own = vars(stand_in), [name for name in vars(module) if name not in ANY_MODULES]
        return [name for name in own if name in now and _empty(now[name]) and not _empty(vars(module)[name])]
    return []


def _empty(value: Any) -> bool:
    return value is None or (type(value) in PLAIN and not value)
