"""What values of each kind hold: how to note it, to tell whether it changed, and to give it back."""

from __future__ import annotations

import array
import functools
import operator
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from ..torch_internals.fakes import unset_fake_temporarily


class Kind(NamedTuple):
    """How to note what a value holds, to tell whether it changed, and to give it back."""

    note: Callable[[Any], Any]
    same: Callable[[Any, Any], bool]
    put: Callable[[Any, Any], None]


def _identical(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


def _base(value: Any) -> Any:
    """The class whose methods work on a dict, as its own may forbid changing it."""
    return OrderedDict if isinstance(value, OrderedDict) else dict


def items(value: Any) -> dict[Any, Any]:
    """What a dict holds, whatever its class makes of `items()`."""
    return dict(OrderedDict.items(value)) if isinstance(value, OrderedDict) else dict.copy(value)


def identical_items(a: Any, b: Any) -> bool:
    """Whether two dicts hold the same objects under the same ones, in the same order."""
    return len(a) == len(b) and all(map(operator.is_, a, b)) and all(map(operator.is_, a.values(), b.values()))


def put_items(value: Any, members: Any) -> None:
    """Make a dict hold these members and no others, whatever its class allows."""
    base = _base(value)
    base.clear(value)
    for key, member in members.items():
        base.__setitem__(value, key, member)


def _put_list(value: Any, members: Any) -> None:
    (list if isinstance(value, list) else type(value)).__setitem__(value, slice(None), members)


def _put_members(value: Any, members: Any) -> None:
    value.clear()
    (value.update if isinstance(value, set) else value.extend)(members)


def _put_array(value: np.ndarray, copy: np.ndarray) -> None:
    value[...] = copy


def _put_bit_state(value: np.random.Generator, state: Any) -> None:
    value.bit_generator.state = state


def _same_arrays(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes() if a.dtype != object else _identical(a.ravel(), b.ravel())


def _same_generators(a: torch.Generator, b: torch.Generator) -> bool:
    with unset_fake_temporarily():
        return torch.equal(a.get_state(), b.get_state())


KINDS: dict[type, Kind] = {
    dict: Kind(items, identical_items, put_items),
    list: Kind(lambda v: list(list.__iter__(v)), _identical, _put_list),
    deque: Kind(lambda v: list(deque.__iter__(v)), _identical, _put_members),
    set: Kind(lambda v: set(set.__iter__(v)), lambda a, b: a == b, _put_members),
    bytearray: Kind(bytes, lambda a, b: a == b, _put_list),
    array.array: Kind(lambda v: v[:], lambda a, b: a.tobytes() == b.tobytes(), _put_list),
    np.ndarray: Kind(lambda v: v.copy(), _same_arrays, _put_array),
    torch.Generator: Kind(lambda v: v.clone_state(), _same_generators, lambda v, s: v.set_state(s.get_state())),
    random.Random: Kind(lambda v: v.getstate(), lambda a, b: a == b, lambda v, s: v.setstate(s)),
    np.random.RandomState: Kind(lambda v: v.get_state(), lambda a, b: repr(a) == repr(b), lambda v, s: v.set_state(s)),
    np.random.Generator: Kind(lambda v: v.bit_generator.state, lambda a, b: repr(a) == repr(b), _put_bit_state),
}


def kind_of(value: Any) -> Kind:
    """The kind of a value of a class in KINDS, or of one derived from it."""
    return _kind_of(type(value))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1 << 14)
def _kind_of(cls: type) -> Kind:
    return next(kind for base, kind in KINDS.items() if issubclass(cls, base))
