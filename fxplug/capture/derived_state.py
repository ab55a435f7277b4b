"""What modules have computed from their weights in earlier calls, and keep: a trace does without it, as new weights would."""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn

from .frozen_values import copied, same_tensors
from .isolation import restored
from .memory_journal import Journal
from .module_state import HOLDERS, State, own
from .user_code import is_foreign

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
        with restored(State(model)):
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
            if not is_foreign(type(module)) and any(p.is_floating_point() for p in module.parameters())
            for spot in _held(module, deep)
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


def _held(module: nn.Module, deep: bool) -> Iterator[Spot]:
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
            elif id(value) not in seen:
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
    found = [spot for spot, old, new in pairs if len(old) == len(new) and not all(map(same_tensors, old, new))]
    again = (_after_call(model, call, held, other=True) if found else now) or now  # of other inputs it may fail
    same = [spot for spot, a, b in zip(held, now, again, strict=True) if len(a) == len(b) and all(map(same_tensors, a, b))]
    found = [spot for spot in found if spot in same]
    modules = [spot.module for spot in found]
    flags = [(s, old, new) for s, old, new in zip(held, before, now, strict=True) if type(s.value()) in (int, bool)]
    return found + [s for s, old, new in flags if s.module in modules and new and same_tensors(*old, *new)]


def _after_call(model: nn.Module, call: Any, held: Kept, other: bool) -> list[list[torch.Tensor]] | None:
    """What a call without some places, with other weights, and perhaps with other inputs, makes of them."""
    journal = Journal()
    try:
        with torch.no_grad(), restored(State(model)), without(held), journal:
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


@contextlib.contextmanager
def without(kept: Kept) -> Iterator[None]:
    """The model without these; it gets them back afterwards."""
    before = [(spot, spot.value(), list(spot.owner.items()) if isinstance(spot.owner, dict) else None) for spot in kept]
    for spot, value, _ in before:
        empty = type(value)() if type(value) in PLAIN else None
        if not isinstance(spot.owner, (dict, list)):
            delattr(spot.owner, spot.key) if spot.gone else setattr(spot.owner, spot.key, empty)
        elif spot.gone and isinstance(spot.owner, dict):
            del spot.owner[spot.key]
        else:
            spot.owner[spot.key] = empty
    try:
        yield
    finally:
        for spot, value, items in reversed(before):
            if items is not None and spot.gone:
                for key, _ in items:  # in the order that it had
                    spot.owner[key] = spot.owner.pop(key, value)
            if isinstance(spot.owner, (dict, list)):
                spot.owner[spot.key] = value
            else:
                setattr(spot.owner, spot.key, value)


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
