"""How a pipeline rearranges latents: each element of a result is one of the source, times a factor, plus a term."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.errors import format_fields
from ..core.torch_internals import trees as pytree

DIGIT = 16  # the base of the codes: half precision, which rounds factors by 2**-8, still tells digits below 16
ROUNDING = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


class MapError(ValueError):
    """What was observed is no such map; the text says why."""


@dataclass(frozen=True)
class LatentMap:
    """`result = factor * source[index] + term`, element by element, for one size of the latents of one sample.

    `index` int64 [n] has the place of each element of the result in the flattened source, -1 for one that does not come from
    it, and `factor` and `term` are float32 [n]; `source` is the shape of the source, and `like` an example of the result: a
    tensor or a structure with tensors.
    """

    index: Tensor
    factor: Tensor
    term: Tensor
    source: torch.Size
    like: Any

    __repr__ = format_fields

    def __call__(self, source: Tensor, like: Any = None) -> Any:
        """Return the result for the latents of one sample.

        Args:
            source: A tensor of the shape `source`.
            like: A result whose elements stay where the map has no index; None is the example that the map was found with.

        Returns:
            A structure like the example.
        """
        like = self.like if like is None else like
        index, factor, term = (t.to(source.device) for t in (self.index, self.factor, self.term))
        wide = source.flatten().to(torch.promote_types(source.dtype, torch.float32))
        mapped = (factor.to(wide.dtype) * wide[index.clamp(min=0)] + term.to(wide.dtype)).to(source.dtype)
        if (index < 0).any():
            mapped = torch.where(index < 0, flatten_tensors(like).to(mapped), mapped)
        return unflatten_tensors(mapped, like)

    def inverse(self, result: Any) -> Tensor:
        """Return the source of a result, for a map that `covers` its source."""
        flat = flatten_tensors(result)
        index, factor, term = (t.to(flat.device) for t in (self.index, self.factor, self.term))
        taken, wide = index >= 0, flat.to(torch.promote_types(flat.dtype, torch.float32))
        source = torch.zeros(self.source.numel(), dtype=wide.dtype, device=flat.device)
        source[index[taken]] = (wide[taken] - term[taken].to(wide.dtype)) / factor[taken].to(wide.dtype)
        return source.reshape(self.source).to(flat.dtype)

    def is_close(self, other: LatentMap, tolerance: float) -> bool:
        """Return whether another map has the same places, and the same factors and terms within a number."""
        pairs = ((self.factor, other.factor), (self.term, other.term))
        same = torch.equal(self.index, other.index)
        return same and all(bool(((a - b).abs() <= tolerance * (1 + b.abs())).all()) for a, b in pairs)

    @property
    def covers(self) -> bool:
        """Whether each element of the source is in the result."""
        return int((self.index >= 0).sum()) == self.source.numel()

    @property
    def keeps_own(self) -> bool:
        """Whether the result has elements that do not come from the source."""
        return bool((self.index < 0).any())

    def describe(self) -> str:
        """Describe the map in words: shapes, order, factors and terms."""
        taken = self.index >= 0
        shapes = ", ".join(str(list(t.shape)) for t in pytree.tree_leaves(self.like) if isinstance(t, Tensor))
        order = "in order" if bool((self.index[taken].diff() == 1).all()) else "rearranged"
        text = f"{list(self.source)} -> {shapes}, {order}"
        for name, values, neutral in (("times", self.factor[taken], 1.0), ("plus", self.term[taken], 0.0)):
            found = sorted({float(f"{value:.5g}") for value in values.tolist()})
            if found != [neutral]:
                text += f", {name} " + (f"{found[0]:g}" if len(found) == 1 else f"{found[0]:g} to {found[-1]:g}")
        if not self.covers:
            text += f", {int(taken.sum())} of {self.source.numel()} elements taken"
        own = int((~taken).sum())
        return text + (f", beside {own} elements of the condition" if own else "")


class BatchedMap:
    """A `LatentMap` of many samples at once, on one device: a reshape where the map moves nothing, else one gather."""

    def __init__(self, one: LatentMap, device: torch.device) -> None:
        """Read the map; `own` says which elements of a result do not come from the source, None where all do."""
        taken, self.source = one.index >= 0, one.source
        self.own = None if bool(taken.all()) else (~taken).to(device)
        in_order = len(taken) == one.source.numel() and bool((one.index == torch.arange(len(taken))).all())
        self.index = None if in_order else one.index.clamp(min=0).to(device)
        self.factor = _shared(one.factor.where(taken, one.factor[taken][0]), 1.0, device)
        self.term = _shared(one.term.where(taken, one.term[taken][0]), 0.0, device)
        places = torch.zeros(one.source.numel(), dtype=torch.long)
        places[one.index[taken]] = taken.nonzero().flatten()
        self.places = None if in_order else places.to(device)
        self.covers = one.covers

    def __call__(self, source: Tensor, own: Tensor | None = None) -> Tensor:
        """Return the elements [b, n] of the results for sources [b, ...]; `own` [b, n] has those that do not come from them."""
        rows = source.reshape(len(source), -1)
        if self.index is not None:
            rows = rows.index_select(1, self.index)
        if self.factor is not None or self.term is not None:
            wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
            wide = wide if self.factor is None else wide * self.factor
            rows = (wide if self.term is None else wide + self.term).to(rows.dtype)
        return rows if self.own is None or own is None else torch.where(self.own, own.to(rows), rows)

    def rearranged(self, source: Tensor) -> Tensor:
        """Return the elements [b, n] of sources [b, ...] in the places of the results, as they are."""
        rows = source.reshape(len(source), -1)
        return rows if self.index is None else rows.index_select(1, self.index)

    def arranged_back(self, result: Tensor) -> Tensor:
        """Return the elements [b, n] of results [b, ...] in the places of the sources, as they are."""
        rows = result.reshape(len(result), -1)
        return rows if self.places is None else rows.index_select(1, self.places)

    def inverse(self, result: Tensor) -> Tensor:
        """Return the elements [b, n] of the sources of results [b, ...], for a map that `covers` its source."""
        rows = result.reshape(len(result), -1)
        if self.factor is not None or self.term is not None:
            wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
            wide = wide if self.term is None else wide - self.term
            rows = (wide if self.factor is None else wide / self.factor).to(rows.dtype)
        return rows if self.places is None else rows.index_select(1, self.places)


def _shared(values: Tensor, neutral: float, device: torch.device) -> Tensor | float | None:
    """Return values as one number where they are equal, None where that one changes nothing."""
    if bool((values == values[0]).all()):
        return None if float(values[0]) == neutral else float(values[0])
    return values.to(device)


def flatten_tensors(value: Any) -> Tensor:
    """Return the elements of all tensors in a structure, one after the other, in the dtype of the first."""
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    flat: Tensor = torch.cat([tensor.flatten().to(tensors[0]) for tensor in tensors])
    return flat


def unflatten_tensors(flat: Tensor, like: Any) -> Any:
    """Return a structure like another one, with the elements of `flat` in its tensors."""
    place = 0

    def take(leaf: Tensor) -> Tensor:
        nonlocal place
        place += leaf.numel()
        return flat[place - leaf.numel() : place].reshape(leaf.shape)

    return pytree.tree_map_only(Tensor, take, like)


def make_codes(size: int) -> Mapping[str, Callable[[Tensor], Tensor]]:
    """Return the values that tell a map of `size` elements: ones, twos, and each digit of the number of each element, plus one.

    Each is a function of a tensor of so many elements to one of its shape and dtype. None is zero, as some pipelines divide by
    the norm of a prediction.
    """

    def digit(place: int) -> Callable[[Tensor], Tensor]:
        def code(like: Tensor) -> Tensor:
            number = torch.arange(like.numel(), device=like.device)
            digits: Tensor = number // DIGIT**place % DIGIT + 1
            return digits.to(like.dtype).reshape(like.shape)

        return code

    def twos(like: Tensor) -> Tensor:
        return torch.full_like(like, 2)

    places = 1
    while DIGIT**places < size:
        places += 1
    return {"ones": torch.ones_like, "twos": twos, **{f"digit{place}": digit(place) for place in range(places)}}


def solve_map(results: Mapping[str, Any], source: torch.Size) -> LatentMap:
    """Find the map that gave the results of the `make_codes` of a source of that shape, by the codes' names.

    Raises:
        MapError: Elements are sums or nonlinear, an element is used twice, or the results differ in form.
    """
    ones = results["ones"]
    flat = {}
    for name, result in results.items():
        if [t.shape for t in pytree.tree_leaves(result) if isinstance(t, Tensor)] != [
            t.shape for t in pytree.tree_leaves(ones) if isinstance(t, Tensor)
        ]:
            raise MapError("its shape depends on the values of the latents")
        flat[name] = flatten_tensors(result).double().cpu()
        if not flat[name].isfinite().all():
            raise MapError("it has values that are not finite")
    first = flat["ones"]
    factor = flat["twos"] - first
    rounding = ROUNDING.get(flatten_tensors(ones).dtype, 2e-6)
    taken = factor.abs() > rounding * first.abs().clamp(min=1e-3)
    if not taken.any():
        raise MapError("nothing of the latents is in it")
    index = torch.zeros(int(taken.sum()), dtype=torch.long)
    for name, values in flat.items():
        exact = (values - first)[taken] / factor[taken]
        if name.startswith("digit"):
            found = exact.round()
            if (exact - found).abs().max() > 0.2 or found.min() < 0 or found.max() >= DIGIT:
                raise MapError("an element of it is not one element of the latents times a factor, plus a term")
            index += found.long() * DIGIT ** int(name.removeprefix("digit"))
        if ((values - first)[~taken].abs() > rounding * first[~taken].abs().clamp(min=1e-3)).any():
            raise MapError("an element of it is not one element of the latents times a factor, plus a term")
    if index.max() >= source.numel():
        raise MapError("an element of it is not one element of the latents times a factor, plus a term")
    if len(set(index.tolist())) != len(index):
        raise MapError("an element of the latents is in it twice")
    places = torch.full(taken.shape, -1, dtype=torch.long)
    places[taken] = index
    factor = torch.where(taken, factor, 0.0)
    return LatentMap(places, _nearest_round(factor), _nearest_round(first - factor), source, ones)


def _nearest_round(values: Tensor) -> Tensor:
    """Return float32 values without the rounding of a difference: 1 for what is 1 within it, and 0 and -1 alike."""
    found = values.clone()
    for round_value in (0.0, 1.0, -1.0):
        found[(values - round_value).abs() < 1e-6] = round_value
    return found.float()
