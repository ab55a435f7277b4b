"""Tensors that are not computed yet: what is done with them elementwise is written down, and done patch by patch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.torch_internals import modules as pytree
from ...core.torch_internals.tensors import disabled_torch_function, schema, wrapper_of

# beside what torch marks as elementwise or as a view
MOVES = ("cat", "stack", "clone", "_to_copy", "detach", "alias", "_unsafe_view")
SHAPES = ("_like", "new_empty", "new_zeros", "new_ones", "new_full")  # ends of names that ask for a shape, and maybe chance


class DeferredComputation:
    """How a value is computed for one patch: an operation on values and other recipes. `found` has what is known."""

    def __init__(self, func: Any = None, given: Any = None, member: int = 0) -> None:
        self.func, self.given, self.member = func, given, member
        self.found: dict[tuple[str, int], Tensor] = {}
        self.whole: Tensor | None = None
        self.owned: list[Tensor] = []
        self.shape: tuple[int, ...] = ()

    def at(self, what: str, patch: int) -> Tensor:
        """Return the "value", correct on the patch's elements, or the "mark": NaN on all other elements."""
        if self.whole is not None:
            return self.whole
        if what == "mark" and self.owned:
            mark = torch.full(self.shape, torch.nan, device=self.owned[patch].device)
            mark.view(-1)[self.owned[patch]] = 0.0
            return mark
        if (what, patch) not in self.found:
            args, kwargs = pytree.tree_map(lambda v: v.at(what, patch) if isinstance(v, DeferredComputation) else v, self.given)
            self.found[what, patch] = pytree.tree_leaves(self.func(*args, **kwargs))[self.member]
        return self.found[what, patch]

    def forget(self, owned: list[Tensor], shape: tuple[int, ...]) -> None:
        """Keep the known values and the elements of each patch, but drop the inputs of the computation."""
        self.func, self.given, self.owned, self.shape = None, None, owned, shape


class DeferredTensor(Tensor):
    """A tensor that comes patch by patch. `settle(recipe, why)` gives the whole where an operation needs it.

    Once its whole is there it is an ordinary tensor to all that is done with it: what is written into it or into a view of it
    is there, and what was computed of it before stays.
    """

    recipe: DeferredComputation
    settle: Callable[[DeferredComputation, Tensor, str], Tensor]
    base: DeferredTensor | None = None  # of a view, and how it is taken of that
    taken: Callable[[Tensor], Tensor] | None = None
    whole: Tensor | None = None
    __torch_function__: Any = disabled_torch_function

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device, recipe: DeferredComputation, settle: Any) -> DeferredTensor:
        found: DeferredTensor = wrapper_of(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        found.recipe, found.settle = recipe, settle
        return found

    @property
    def is_settled(self) -> bool:
        """Return whether the whole tensor is available."""
        return self.whole is not None if self.base is None else self.base.is_settled

    @torch.no_grad()
    def settled(self, why: str = "") -> Tensor:
        """Return the whole tensor; every process must call this at the same place."""
        if self.base is not None and self.taken is not None:
            return self.taken(self.base.settled(why))
        if self.whole is None:
            if self.recipe.whole is None:
                self.recipe.whole = self.settle(self.recipe, self, why).detach()
                self.recipe.forget([], ())
            self.whole = self.recipe.whole.clone()  # which may be written into; what was recorded before reads the recipe's
        return self.whole

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self.settled("numpy").numpy(*args, **kwargs)

    def tolist(self) -> Any:
        return self.settled("tolist").tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeferredTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        name = func.name().partition("::")[2].partition(".")[0]
        laters = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, DeferredTensor)]
        one = laters[0]
        if any(name.endswith(end) for end in SHAPES):
            given = pytree.tree_map_only(DeferredTensor, lambda v: torch.empty_like(_meta(v), device=v.device), (args, kwargs))
            return func(*given[0], **given[1])
        elsewhere = kwargs.get("device") not in (None, one.device)
        pointwise = torch.Tag.pointwise in func.tags or func.is_view or name in MOVES
        other = any(not isinstance(r.type, (torch.TensorType, torch.ListType)) for r in schema(func).returns)
        settled = all(later.is_settled for later in laters)
        if settled or elsewhere or other or not pointwise or schema(func).is_mutable:
            why = f"'{name}'{_place()}"
            given = pytree.tree_map_only(DeferredTensor, lambda v: v.settled(why), (args, kwargs))
            return func(*given[0], **given[1])
        shapes = pytree.tree_map_only(Tensor, _meta, (args, {k: v for k, v in kwargs.items() if k != "device"}))
        result = func(*shapes[0], **shapes[1])
        kept = pytree.tree_map_only(Tensor, lambda v: v.recipe if isinstance(v, DeferredTensor) else v.clone(), (args, kwargs))
        leaves, tree = pytree.tree_flatten(result)
        recipes = [DeferredComputation(func, kept, i) for i in range(len(leaves))]
        made = [DeferredTensor(leaf, one.device, recipe, one.settle) for leaf, recipe in zip(leaves, recipes, strict=True)]
        for i, later in enumerate(made if func.is_view else ()):
            later.base, later.taken = one, _member(func, args, kwargs, i)
        return pytree.tree_unflatten(made, tree)


def _member(func: Any, args: Any, kwargs: Any, number: int) -> Callable[[Tensor], Tensor]:
    """Return a function that takes this one of the views that an operation returns of a deferred tensor."""

    def view(base: Tensor) -> Tensor:
        given = pytree.tree_map_only(DeferredTensor, lambda _: base, (args, kwargs))
        found: Tensor = pytree.tree_leaves(func(*given[0], **given[1]))[number]
        return found

    return view


def _meta(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _place() -> str:
    """Return the file and line of the user's code that runs an operation."""
    # nothing plainer: somebody's code asked for a value that is not there yet, and the error says in which line
    frame = sys._getframe(2)
    while frame.f_back is not None and "/torch/" in frame.f_code.co_filename.replace("\\", "/"):
        frame = frame.f_back
    return f" ({'/'.join(frame.f_code.co_filename.split('/')[-2:])}:{frame.f_lineno})"


def find_owners(marks: Sequence[Tensor]) -> list[Tensor] | None:
    """Return the flat positions of each patch, int64, from its mark; None if they do not cover the whole exactly once."""
    mine = [~mark.isnan().reshape(-1) for mark in marks]
    if not bool((torch.stack(mine).sum(0) == 1).all()):
        return None
    return [own.nonzero().squeeze(1) for own in mine]
