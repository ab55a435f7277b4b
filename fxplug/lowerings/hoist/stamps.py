"""Whether the weights that stages read are those of the call before: by identity, address and version."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...core.torch_internals.modules import is_hooked, list_hook_tables
from ...core.torch_internals.tensors import version
from .reads import KNOWN

Place = tuple[dict[str, Any], str]  # a module's table, and the key of the tensor in it
PLAIN = {Tensor, nn.Parameter}


class FusedSteps:
    """How many steps optimizers have made in this process whose writes no version counts: fused ones, and those of other
    libraries, whose kernels may write by address."""

    count = 0

    @staticmethod
    def note(optimizer: Any, *_: Any) -> None:
        """Note a step of an optimizer."""
        foreign = not type(optimizer).__module__.startswith("torch.optim.")
        if foreign or any(group.get("fused") for group in optimizer.param_groups):
            FusedSteps.count += 1


register_optimizer_step_post_hook(FusedSteps.note)


@dataclass
class WeightStamp:
    """Which tensors and layers a stage reads, where the tensors lie, and how often each was written.

    The objects are held, so that no other can get the identity of one that is gone.
    """

    objects: list[Any] = field(default_factory=list)
    numbers: list[tuple[int, int]] = field(default_factory=list)  # address and version of each tensor
    memory: list[Any] = field(default_factory=list)  # weak references to it: one that is gone may be at its address
    usable: bool = True  # whether a change would be seen

    def is_equal(self, other: WeightStamp) -> bool:
        """Return whether nothing has changed."""
        return self.numbers == other.numbers and _are_same(self.objects, other.objects)


def make_stamp(places: Iterable[Place], layers: Iterable[nn.Module], note: Callable[[Any], None]) -> WeightStamp:
    """Read the state of what a stage reads: tensors by where they stand, and layers with the settings that their code reads.

    `note` is called when memory of such a tensor is freed.
    """
    found = WeightStamp()
    for table, key in places:
        for tensor in list_memory(table.get(key)):
            found.objects.append(tensor)
            if tensor.is_inference():
                found.usable = False  # nothing counts how often it is written
            else:
                found.numbers.append((tensor.data_ptr(), version(tensor)))
                found.memory.append(weakref.ref(tensor.untyped_storage(), note))
    for layer in layers:
        found.objects.append(type(layer))
        found.objects.extend(vars(layer).values())
        if is_hooked(layer) or "forward" in vars(layer) or not type(layer).__module__.startswith(KNOWN):
            found.usable = False
    return found


def list_memory(tensor: Any) -> list[Tensor]:
    """Return a tensor, or those that one of a class of its own, such as a quantised weight, is made of."""
    if tensor is None:
        return []
    flatten = getattr(tensor, "__tensor_flatten__", None) if type(tensor) not in PLAIN else None
    if flatten is None:
        return [tensor]
    return [inner for name in flatten()[0] for inner in list_memory(getattr(tensor, name))]


class WeightWatch:
    """The stamps of all stages but the step, and one look at all of them that tells whether any can have changed.

    That look is made at every call: it compares lists in C, and reads what a stamp does.
    """

    def __init__(self, places: Mapping[str, Sequence[Place]], layers: Mapping[str, Sequence[nn.Module]]) -> None:
        self.places, self.layers = places, layers
        self.stamps: dict[str, WeightStamp] = {}
        self._all = list({(id(table), key): (table, key) for own in places.values() for table, key in own}.values())
        self._layers = list(dict.fromkeys(chain.from_iterable(layers.values())))
        self._steps = FusedSteps.count
        self._freed: list[Any] = []  # the memory that was
        self._seen: tuple[list[Any], ...] | None = None  # at the last look, if all are plain tensors and a change would be seen

    def find_changes(self) -> list[str] | None:
        """Return the stages whose weights are others than at the last call; None where a change could not be seen."""
        if self._steps != (steps := FusedSteps.count) or self._freed:
            self.stamps, self._seen, self._steps = {}, None, steps
            self._freed.clear()
        if self._is_unchanged():
            return []
        seen, changed = self._look(), []  # before the stamps: what another thread writes between is a change at the next call
        self._seen = None
        for name in self.places:
            now = make_stamp(self.places[name], self.layers[name], self._freed.append)
            if not now.usable:
                return None
            old = self.stamps.get(name)
            if old is None or not now.is_equal(old):
                self.stamps[name] = now
                changed.append(name)
        self._seen = seen
        return changed

    def renew(self) -> None:
        """Take the weights as they are now for those of the last call."""
        self._freed.clear()
        self.stamps = {name: make_stamp(self.places[name], self.layers[name], self._freed.append) for name in self.stamps}
        self._seen = None

    def _look(self) -> tuple[list[Any], ...] | None:
        tensors = [table.get(key) for table, key in self._all]
        plain = [tensor for tensor in tensors if tensor is not None]
        if any(type(tensor) not in PLAIN or tensor.is_inference() for tensor in plain):
            return None
        hooks = list(chain.from_iterable(map(list_hook_tables, self._layers)))
        numbers = list(map(version, plain)), list(map(Tensor.data_ptr, plain))
        return tensors, plain, list(map(type, plain)), *numbers, self._list_settings(), hooks

    def _list_settings(self) -> list[Any]:
        return [*map(type, self._layers), *chain.from_iterable(map(dict.values, map(vars, self._layers)))]

    def _is_unchanged(self) -> bool:
        if self._seen is None:
            return False
        tensors, plain, kinds, versions, addresses, settings, hooks = self._seen
        return (
            _are_same([table.get(key) for table, key in self._all], tensors)
            and _are_same(self._list_settings(), settings)  # with the tables of hooks
            and not any(hooks)
            and list(map(type, plain)) == kinds
            and list(map(Tensor.data_ptr, plain)) == addresses
            and not any(map(Tensor.is_inference, plain))
            and list(map(version, plain)) == versions
        )


def _are_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))
