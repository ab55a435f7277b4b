"""What modules have computed from their weights in earlier calls, and keep: a trace does without it, as new weights would."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .frozen_values import copied, same_tensors
from .isolation import restored
from .memory_journal import Journal
from .module_state import State
from .user_code import is_foreign

PLAIN = (dict, list, set)
ANY_MODULES = frozenset(vars(nn.Module()))  # what every module has
Kept = list[tuple[nn.Module, str, bool]]  # modules, names of attributes, and whether these are no attributes without a value


def find_derived(model: nn.Module, call: Any = None) -> Kept:
    """The modules, and names of their attributes, that the modules drop when their mode changes, or when they are cast; and
    what Python keeps for them of a `functools.cached_property`.

    timm's LeViT, TinyViT and EfficientFormer keep the biases of their attention so. A graph that had taken those for constants
    would go on with them when the weights have changed. Each module's own `train` and `_apply` are asked on a stand-in without
    children and without values; what is None or empty in that afterwards is what they drop.

    With a `call` that has values, also the tensors that modules hold without registering them, if a call makes them anew of
    the weights: it makes others of other weights.
    """
    found = [(module, name, True) for module in model.modules() for name in vars(module) if _is_cached_property(module, name)]
    own = [module for module in model.modules() if _says_what_to_drop(module)]
    if own:
        with restored(State(model)):
            found += [(m, name, False) for m in own for name in _dropped(m) if (m, name, True) not in found]
    if call is not None:
        known = [(module, name) for module, name, _ in found]
        found += [entry for entry in _made_of_weights(model, call) if entry[:2] not in known]
    return found


def _made_of_weights(model: nn.Module, call: Any) -> Kept:
    held = [
        (module, name, False)
        for module in model.modules()
        if not is_foreign(type(module)) and any(p.is_floating_point() for p in module.parameters())
        for name, value in vars(module).items()
        if name not in ANY_MODULES and _tensors(value)
    ]
    found = _made_anew(model, call, held)
    if found is None:  # one of them is no such thing
        groups = [[entry for entry in held if (type(entry[0]), entry[1]) == key] for key in {(type(m), n) for m, n, _ in held}]
        found = [entry for group in groups for entry in _made_anew(model, call, group) or _after_hasattr(model, call, group)]
    return found


def _after_hasattr(model: nn.Module, call: Any, held: Kept) -> Kept:
    """Those that a call makes anew where they are no attributes, for code that asks `hasattr`."""
    return _made_anew(model, call, [(module, name, True) for module, name, _ in held]) or []


def _made_anew(model: nn.Module, call: Any, held: Kept) -> Kept | None:
    """Those of some attributes that a call without them makes anew, otherwise for other weights and not for other inputs; None
    where the call fails."""
    if not held:
        return []
    before = [[tensor.detach().clone() for tensor in _tensors(vars(module)[name])] for module, name, _ in held]
    now = _after_call(model, call, held, other=False)
    if now is None:
        return None
    pairs = zip(held, before, now, strict=True)
    found = [entry for entry, old, new in pairs if len(old) == len(new) and not all(map(same_tensors, old, new))]
    again = (_after_call(model, call, held, other=True) if found else now) or now  # of other inputs it may fail
    same = [entry for entry, a, b in zip(held, now, again, strict=True) if len(a) == len(b) and all(map(same_tensors, a, b))]
    return [entry for entry in found if entry in same]


def _after_call(model: nn.Module, call: Any, held: Kept, other: bool) -> list[list[torch.Tensor]] | None:
    """What a call without some attributes, with other weights, and perhaps with other inputs, makes of them."""
    journal = Journal()
    try:
        with torch.no_grad(), restored(State(model)), without(held), journal:
            for parameter in {p for module, *_ in held for p in module.parameters() if p.is_floating_point()}:
                parameter.mul_(0.5)
            args, kwargs = copied(call, "all" if other else "")
            model(*args, **kwargs)
            return [[tensor.detach().clone() for tensor in _tensors(vars(module).get(name))] for module, name, _ in held]
    except Exception:  # the model's own
        return None
    finally:
        journal.put_back()
        torch.clear_autocast_cache()  # which has casts of the other weights, for as long as the caller's autocast lasts


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
    before = [vars(module)[name] for module, name, _ in kept]
    for (module, name, gone), value in zip(kept, before, strict=True):
        if gone:
            del vars(module)[name]
        else:
            vars(module)[name] = type(value)() if type(value) in PLAIN else None
    try:
        yield
    finally:
        for (module, name, _), value in zip(kept, before, strict=True):
            vars(module)[name] = value


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
