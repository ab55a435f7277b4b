"""Regions of a picture: runs of its pipeline in step with its own, blended by masks at each call of the denoiser."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..adapters.slots import Adapters
from ..adapters.strengths import Schedule, Strength
from ..core.errors import SpecError, did_you_mean, quote
from ..core.torch_internals.trees import tree_flatten, tree_unflatten
from ..pipelines.opening import call_parameters
from .learning import CALLBACKS, COUNTS
from .parked import RequestThread, StepCount
from .requests import Request, check_call, list_generators

Sides = tuple[int, int]  # height and width


def check_regions(request: Request, pipe: Any) -> None:
    """Check the regions of a request.

    Args:
        request: The request.
        pipe: The pipeline that it calls.

    Raises:
        SpecError: For a pipeline that draws no pictures or takes no generator, a request without a seed, an argument that no
            region may change, and masks of other proportions than the picture's or each other's.
    """
    if not request.regions:
        return
    known = call_parameters(pipe)
    if "generator" not in known or not ({"height", "width"} <= known.keys() or "image" in known):
        raise SpecError(f"{type(pipe).__name__} takes no generator or has no pictures: leave them out", path=("regions",))
    if request.seed is None and not list_generators(request.call):
        raise SpecError("regions need a seed, so that all runs of the request begin with the same noise", path=("seed",))
    height, width = (request.call.get(name) for name in ("height", "width"))
    sides: Sides = (height, width) if isinstance(height, int) and isinstance(width, int) else request.regions[0].sides
    words = [name for name in known if "prompt" in name and name not in COUNTS]
    for at, region in enumerate(request.regions):
        if _find_sides((1, 1, *region.sides), sides) is None:
            raise SpecError(
                f"the mask has {region.sides[1]} x {region.sides[0]} pixels, and the picture {sides[1]} x {sides[0]}: give one "
                "of its proportions", path=("regions", at, "mask"),
            )  # fmt: skip
        for name in region.call:
            if name not in words:
                listed = f"{did_you_mean(name, words)}; it can have its own {', '.join(words)}"
                raise SpecError(f"a region cannot change {quote(name)}{listed}", path=("regions", at, "call"), key=name)
    for one in make_region_requests(request):
        check_call(one, pipe)


def fold_regions(request: Request, slots: Sequence[Adapters]) -> Request:
    """Make regions that change adapters alone strengths in regions of the request's own run, where the models have masks.

    Args:
        request: The request.
        slots: The adapters of the models.

    Returns:
        A request without regions; the request itself where it is drawn from a picture, a region has arguments of its own, two
            name one adapter, a strength has a region already, there are more adapters than a sample may have, or a model has
            slots without masks.
    """
    found: list[Any] = [table for one in slots for p in one.banks for table in [one.there(f"{p}.gates.table.regions")]]
    names = [name for region in request.regions for name in region.adapters]
    if not request.regions or not found or any(table is None for table in found) or any(one.call for one in request.regions):
        return request
    every = {*request.adapters, *names}
    if any("image" in name and value is not None for name, value in request.call.items() if name not in COUNTS):
        return request  # its tokens may be among those of the picture
    if len(every) < len(request.adapters) + len(names) or len(every) > min(table.shape[1] for table in found):
        return request
    adapters = dict(request.adapters)
    for region in request.regions:
        for name, strength in region.adapters.items():
            knots = [one for _, one in strength.knots] if isinstance(strength, Schedule) else [strength]
            inner: list[Any] = [_place(one, region.mask) for one in knots]
            if any(one is None for one in inner):
                return request
            adapters[name] = inner[0]
            if isinstance(strength, Schedule):
                places = [place for place, _ in strength.knots]
                adapters[name] = replace(strength, knots=[*zip(places, inner, strict=True)])
    return request.model_copy(update={"adapters": adapters, "regions": []})


def _place(strength: Any, mask: Tensor) -> Strength | None:
    """Return a strength in a region; None for one that has a region."""
    made = strength if isinstance(strength, Strength) else Strength(float(strength))
    return None if made.digest else replace(made, region=mask)


def make_region_requests(request: Request) -> list[Request]:
    """Make the requests that the regions of a request are: with its arguments and adapters, and their own instead.

    Args:
        request: The request.

    Returns:
        A request for each region, without callbacks; its generators are copies that draw the same numbers.
    """
    call = {name: value for name, value in request.call.items() if name not in CALLBACKS}
    made = []
    for region in request.regions:
        own = {**call, **region.call}
        if generators := list_generators(call):
            copies = [generator.clone_state() for generator in generators]
            own["generator"] = copies if isinstance(call["generator"], (list, tuple)) else copies[0]
        made.append(request.model_copy(
            update={"call": own, "adapters": {**request.adapters, **region.adapters}, "regions": []}
        ))  # fmt: skip
    return made


class RegionGroup:
    """The run of a request and those of its regions, which all go on with the same result of each call of a denoiser.

    At a place where the masks sum to less than 1 the request's own run has the rest; where they sum to more, each has its share
    of the sum. A place where one mask is 1 and the others are 0 has the bits of that region's run.
    """

    def __init__(self, request: Request, pipe: Any) -> None:
        self.masks = [region.mask for region in request.regions]
        self.runs: list[tuple[RequestThread, StepCount]] = []  # the request's own is the first
        self.flat = ""  # why a result without height and width is refused
        if "num_frames" in call_parameters(pipe):
            self.flat = "of frames"
        elif any("image" in name and value is not None for name, value in request.call.items() if name not in COUNTS):
            self.flat = "of a picture and what it is drawn from"
        self._answered: list[RequestThread] = []
        self._weights: dict[Any, list[Tensor]] = {}

    def is_waiting(self, thread: RequestThread) -> bool:
        """Tell whether the call of a run has its result, and waits for those of the others."""
        return thread in self._answered

    def collect(self, thread: RequestThread) -> bool:
        """Take the result of a run's call of a denoiser, and blend those of all runs once they are there.

        Args:
            thread: That of the run.

        Returns:
            Whether all may go on.

        Raises:
            SpecError: Where the runs are not in step, and for results that have no places of a picture.
            Exception: That of the call.
        """
        if isinstance(thread.call.result, BaseException):
            raise thread.call.result
        self._answered.append(thread)
        if any(other.done or other.cancelled for other, _ in self.runs):
            raise SpecError("a region's run ends before the others: its prompt changes the number of calls", path=("regions",))
        if len(self._answered) < len(self.runs):
            return False
        self._answered = []
        calls = [other.call for other, _ in self.runs]
        if len({(id(call.model), call.method, count.steps) for call, (_, count) in zip(calls, self.runs, strict=True)}) > 1:
            raise SpecError("the regions' runs are not in step: they call other models, or at other steps", path=("regions",))
        flat = [tree_flatten(call.result) for call in calls]
        if any(structure != flat[0][1] for _, structure in flat):
            raise SpecError("the regions' runs are not in step: their results differ in structure", path=("regions",))
        rows = zip(*(leaves for leaves, _ in flat), strict=True)
        inputs = list(zip(*(call.leaves for call in calls), strict=False))
        blended = [self._blend(leaves, inputs) for leaves in rows]
        if all(new is None for new in blended):
            raise SpecError(f"{type(calls[0].model).__name__} gives nothing that has places of a picture", path=("regions",))
        for call, (leaves, structure) in zip(calls, flat, strict=True):
            own = [old if new is None else new.clone() for old, new in zip(leaves, blended, strict=True)]
            call.result = tree_unflatten(own, structure)
        return True

    def _blend(self, leaves: Sequence[Any], inputs: Sequence[Sequence[Any]]) -> Tensor | None:
        """Blend a tensor of the results; None where each run keeps its own."""
        first = leaves[0]
        if not isinstance(first, Tensor) or first.dim() < 3 or not first.is_floating_point():
            return None
        if any(leaf.shape != first.shape or leaf.dtype != first.dtype for leaf in leaves):
            raise SpecError("the regions' runs are not in step: their results differ in size", path=("regions",))
        sides = None if first.dim() == 3 and self.flat else _find_sides(first.shape, (*self.masks[0].shape,))
        if sides is None:
            of = f" {self.flat}" if first.dim() == 3 and self.flat else ""
            height, width = self.masks[0].shape
            raise SpecError(
                f"the denoiser's result of the shape {list(first.shape)}{of} has no height and width of the mask's proportions "
                f"({width} x {height})", path=("regions",),
            )  # fmt: skip
        for given in inputs:
            if _has_places(given[0], first) and not all(torch.equal(given[0], other) for other in given[1:]):
                raise SpecError("the regions' runs have other latents than the picture's own: a callback, or the prompt, "
                                "changes them", path=("regions",))  # fmt: skip
        weights = self._make_weights(sides, first)
        total = None
        for leaf, weight in zip(leaves, weights, strict=True):
            if not bool(weight.any()):
                continue
            share = weight.reshape(-1, 1) if first.dim() == 3 else weight
            part = torch.where(share > 0, leaf * share, torch.zeros((), dtype=share.dtype, device=share.device))
            total = part if total is None else total + part
        return None if total is None else total.to(first.dtype)

    def _make_weights(self, sides: Sides, like: Tensor) -> list[Tensor]:
        """Make the share of each run at each place, in float32 or better."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        key = sides, dtype, like.device
        if key not in self._weights:
            masks = [F.interpolate(mask.to(like.device, dtype)[None, None], sides, mode="area") for mask in self.masks]
            small = torch.cat(masks)[:, 0]
            small = small / small.sum(0).clamp(min=1)
            self._weights[key] = [(1 - small.sum(0)).clamp(min=0), *small]
        return self._weights[key]


def _find_sides(shape: Sequence[int], like: Sides) -> Sides | None:
    """Find height and width in the shape of a result, of these proportions: its last two sizes, or of tokens the second."""
    height, width = like
    if len(shape) == 3:
        found = math.isqrt(shape[1] * height // width)
        sides = found, shape[1] // max(found, 1)
        whole = sides[0] * sides[1] == shape[1]
    else:
        sides, whole = (shape[-2], shape[-1]), True
    return sides if whole and min(sides) > 0 and sides[0] * width == sides[1] * height else None


def _has_places(x: Any, result: Tensor) -> bool:
    """Tell whether an input has the places of a result, as latents have."""
    if not isinstance(x, Tensor) or x.dim() != result.dim() or not x.is_floating_point():
        return False
    return x.shape[:2] == result.shape[:2] if x.dim() == 3 else x.shape[-2:] == result.shape[-2:]
