"""Everything that Python code can change by way of a model, each place with what it held: to compare, and to put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import CellType
from typing import Any, NamedTuple

import torch
from torch import nn

from ..torch_internals.dispatch import DisableTorchFunction
from ..torch_internals.tensors import set_version, version
from .reach import Globals, Link, Reach, copies, own, written
from .value_kinds import identical_items, items, kind_of, put_items

MISSING = type("Missing", (), {"__repr__": lambda self: "nothing"})()


class Place(NamedTuple):
    """Where something changed: the container, the key in it (None: all of it), and what it held before."""

    owner: Any
    key: Any
    before: Any
    link: Link

    def __str__(self) -> str:
        return written(self.link if self.key is None else (self.link, self.key))

    def root(self) -> Any:
        """The name of the module, class or file that holds the place."""
        outer, key = self.link
        while outer is not None:
            outer, key = outer
        return key

    def changed(self) -> bool:
        """Whether the place holds something else than before."""
        if self.key is None:
            return not kind_of(self.owner).same(self.before, self.now())
        return self.now() is not self.before

    def now(self) -> Any:
        """What the place holds; `MISSING` where it is gone."""
        if self.key is None:
            return kind_of(self.owner).note(self.owner)
        return (items(self.owner) if isinstance(self.owner, dict) else own(self.owner)).get(self.key, MISSING)


class State(Reach):
    """What can be reached, and what became of it since: where it changed, and how it is put back."""

    def changes(self) -> list[Place]:
        """The places that hold something else than they did; tensors changed in place are none."""
        found = []
        for value, kind, before, link in self.notes:
            if isinstance(value, dict):
                if type(value) is dict and identical_items(before, value):
                    continue  # most are, and need no copy
                found += _differing(value, before, items(value), link)
            elif not kind.same(before, kind.note(value)):
                found.append(Place(value, None, before, link))
        found += [Place(hooks, None, before, (link, key)) for hooks, before, link, key in self.changed_hooks()]
        for owner, members, link in self.members:
            if not self.is_untouched(owner):
                found += _differing(owner, members, own(owner), link)
        lent = set(map(id, self.lent))
        return [place for place in found if id(place.now()) not in lent] if lent else found

    def changed_hooks(self) -> Iterator[tuple[dict[Any, Any], dict[Any, Any], Link, str]]:
        """Tables whose hooks are others now: the table, what it held, its link and its name."""
        for tables, before, link in self.hooks:
            if before or any(tables.values()):
                for key, hooks in tables.items():
                    if not identical_items(before.get(key, {}), hooks):
                        yield hooks, before.get(key, {}), link, key

    def is_untouched(self, owner: Any) -> bool:
        """Whether it is a class that holds the very objects it did, which most are."""
        return id(owner) in self.classes and identical_items(self.classes[id(owner)], vars(owner))

    def restore(self) -> None:
        """Put everything back, in whatever order it changed."""
        self.hand_out(self.iterators)
        for hooks, before, _, _ in self.changed_hooks():
            put_items(hooks, before)
        for value, kind, before, _ in self.notes:
            if type(value) is dict and identical_items(before, value):
                continue
            if not kind.same(before, kind.note(value)):
                kind.put(value, before)
        for owner, members, _ in self.members:
            if self.is_untouched(owner):
                continue
            write = (setattr, delattr) if isinstance(owner, type) else (object.__setattr__, object.__delattr__)
            now, target = own(owner), owner.space if isinstance(owner, Globals) else owner
            for key, value in members.items():
                if now.get(key, MISSING) is not value:
                    write[0](target, key, value)
            for key in now.keys() - members.keys():
                write[1](target, key)

    def lend(self) -> None:
        """Put copies in the place of iterators, which nobody can set back; `restore` gives them back."""
        if self.iterators:
            self.lent = copies(self.iterators.values())
            self.hand_out(dict(zip(self.iterators, self.lent, strict=True)))

    def hand_out(self, iterators: dict[int, Any]) -> None:
        """Put iterators where those with these ids were."""
        for value, key, iterator in self.held:
            if isinstance(value, CellType):
                value.cell_contents = iterators[id(iterator)]
            elif isinstance(value, dict):
                dict.__setitem__(value, key, iterators[id(iterator)])
            elif key < list.__len__(value):
                list.__setitem__(value, key, iterators[id(iterator)])

    def restore_tensors(self) -> None:
        """Give tensors their memory, geometry, gradients and versions back; their values are another matter."""
        with DisableTorchFunction(), torch.no_grad():
            for held in self.tensors.values():
                tensor, alias = held.tensor, held.alias
                if _geometry(tensor) != _geometry(alias):
                    tensor.data = alias
                if not tensor.is_leaf and not held.requires_grad:
                    with contextlib.suppress(RuntimeError):  # a view keeps the history of what it is a view of
                        tensor.detach_()
                if tensor.is_leaf and tensor.requires_grad != held.requires_grad:
                    tensor.requires_grad_(held.requires_grad)
                if tensor.is_leaf and tensor.grad is not held.grad:
                    tensor.grad = held.grad
                if not tensor.is_inference() and version(tensor) != held.version:
                    set_version(tensor, held.version)


def _differing(owner: Any, before: dict[Any, Any], now: dict[Any, Any], link: Link) -> list[Place]:
    return [
        Place(owner, key, before.get(key, MISSING), link)
        for key in dict.fromkeys([*before, *now])
        if before.get(key, MISSING) is not now.get(key, MISSING)
    ]


def _geometry(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, nn.Parameter):
        return None
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
