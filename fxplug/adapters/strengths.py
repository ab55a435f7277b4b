"""How much of an adapter is taken: a number, another one in each block of a model, and another one at each step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import Tensor

from ..blocks.regions import MASKS, SIDE, make_masks
from ..core.errors import SpecError, did_you_mean, format_fields, quote
from ..core.spec.addresses import is_covered
from .banks import Bank, is_finite

KEPT = 64  # so many dictionaries of blocks, and so many masks, are kept as tables
TAKEN = {"factors": 1, "regions": 0}  # tables with an entry for each slot that a row takes, and what is there for nothing


@dataclass(frozen=True)
class Strength:
    """How much of an adapter is taken, and by how much more or less in some blocks.

    It stands wherever `Adapters.use` takes a number. `blocks` maps patterns of paths to factors of `value`: a pattern names a
    layer, or all layers below a path ("down_blocks.0"); of several that name a layer the last counts, and what none names
    takes `value`. It needs a pass with `groups`.

    `region` is a mask of the picture, (height, width) in [0, 1], by which `value` is multiplied at each place; it needs a pass
    with `regions`. Layers without places, of text, time or pooled values, take by `rest` the mask's mean ("share"), all of
    `value` ("full"), or nothing ("none"). Raises SpecError for what is no finite number, and for another mask or `rest`.
    """

    value: float = 1.0
    blocks: Mapping[str, float] | None = None
    region: Tensor | None = field(default=None, compare=False)
    rest: Literal["full", "share", "none"] = "share"
    digest: str = field(default="", init=False, repr=False)  # of the region, which compares as this

    __repr__ = format_fields

    def __post_init__(self) -> None:
        if not is_finite(self.value):
            raise SpecError(f"value must be a finite number, not {quote(self.value)}", path=("value",))
        if self.rest not in ("full", "share", "none"):
            raise SpecError(f"rest must be full, share or none, not {quote(self.rest)}", path=("rest",))
        if self.region is not None:
            object.__setattr__(self, "region", read_mask(self.region))
            object.__setattr__(self, "digest", _digest(self.region))
        if self.blocks is None:
            return
        if not isinstance(self.blocks, Mapping) or not all(isinstance(pattern, str) for pattern in self.blocks):
            raise SpecError(f"blocks must map patterns of paths to factors, not {quote(self.blocks)}", path=("blocks",))
        for pattern, factor in self.blocks.items():
            if not is_finite(factor):
                found = f"the factor of '{pattern}' must be a finite number, not {quote(factor)}"
                raise SpecError(found, path=("blocks",), key=pattern)
        object.__setattr__(self, "blocks", {pattern: float(factor) for pattern, factor in self.blocks.items()})

    def __format__(self, spec: str) -> str:
        return format(self.value, spec) + (" by block" if self.blocks else "") + (" in a region" if self.digest else "")


def read_mask(value: Any) -> Tensor:
    """Read the mask of a region.

    Args:
        value: A tensor (height, width) of numbers in [0, 1].

    Returns:
        A float32 copy on the CPU.

    Raises:
        SpecError: For anything else.
    """
    mask = value.detach() if isinstance(value, Tensor) and not value.is_complex() and not value.is_meta else None
    if mask is None or mask.dim() != 2 or not mask.numel() or not bool(((mask >= 0) & (mask <= 1)).all()):
        found = quote(value) if mask is None else f"one of the shape {list(mask.shape)}"
        found += " with other numbers" if mask is not None and mask.dim() == 2 and mask.numel() else ""
        raise SpecError(f"region must be a tensor (height, width) of numbers in [0, 1], not {found}", path=("region",))
    return mask.to("cpu", torch.float32, copy=True).contiguous()


def _digest(mask: Any) -> str:
    made = hashlib.blake2b(str(tuple(mask.shape)).encode(), digest_size=16)
    made.update(memoryview(mask.numpy()).cast("B"))
    return made.hexdigest()


@dataclass(frozen=True)
class Schedule:
    """A strength at each step of a picture, for whoever calls the model step by step.

    `knots` are pairs: from where on which strength. With `over` "share" they rise from 0, the first step, to 1, the end; with
    "sigma" they fall, and the first counts from the largest sigma on. `between` two knots the strength of the first is held,
    or goes to that of the second in a line. Raises SpecError for knots with a gap at the beginning, out of order, or of no
    finite number, and for a line between strengths that name other blocks.
    """

    knots: Sequence[tuple[float, float | Strength]]
    over: Literal["share", "sigma"] = "share"
    between: Literal["hold", "linear"] = "hold"

    __repr__ = format_fields

    def __post_init__(self) -> None:
        for name, known in (("over", ("share", "sigma")), ("between", ("hold", "linear"))):
            if (value := getattr(self, name)) not in known:
                raise SpecError(f"{name} must be {' or '.join(known)}, not {quote(value)}", path=(name,))
        if not isinstance(self.knots, (list, tuple)) or not self.knots:
            raise SpecError(f"knots must be pairs of a position and a strength, not {quote(self.knots)}", path=("knots",))
        for index, knot in enumerate(self.knots):
            pair = isinstance(knot, (list, tuple)) and len(knot) == 2
            if not pair or not is_finite(knot[0]) or not (isinstance(knot[1], Strength) or is_finite(knot[1])):
                found = f"must be a finite number and a strength, a number or a Strength, not {quote(knot)}: a gap"
                raise SpecError(found, path=("knots", index))
        at = [float(knot[0]) for knot in self.knots]
        if self.over == "share" and (at[0] != 0 or at[-1] > 1):
            raise SpecError(f"shares begin at 0 and end at most at 1, and these go from {at[0]:g} to {at[-1]:g}: a gap",
                            path=("knots",))  # fmt: skip
        rising = at if self.over == "share" else at[::-1]
        if any(one >= two for one, two in zip(rising, rising[1:], strict=False)) or rising[0] < 0:
            order = "rise" if self.over == "share" else "fall, and are 0 or more"
            raise SpecError(f"knots over {self.over} {order}, and these are {at}: a gap", path=("knots",))
        object.__setattr__(self, "knots", tuple((float(place), strength) for place, strength in self.knots))
        for (_, one), (_, two) in zip(self.knots, self.knots[1:], strict=False):
            if self.between == "linear":
                _blend(one, two, 0.5)

    def at(self, position: float) -> float | Strength:
        """Return the strength at a step.

        Args:
            position: The share of the steps that are done, 0 to 1, or with `over` "sigma" the step's sigma.

        Returns:
            What `Adapters.use` takes in the place of a number.

        Raises:
            SpecError: For what is no finite number.
        """
        if not is_finite(position):
            raise SpecError(f"a position must be a finite number, not {quote(position)}")
        sign = 1 if self.over == "share" else -1
        passed = [index for index, (place, _) in enumerate(self.knots) if sign * place <= sign * position]
        index = max(passed, default=0)
        place, strength = self.knots[index]
        if self.between == "hold" or not passed or index == len(self.knots) - 1:
            return strength
        after, following = self.knots[index + 1]
        return _blend(strength, following, (position - place) / (after - place))


def _blend(one: float | Strength, two: float | Strength, share: float) -> float | Strength:
    """Return the strength between two in a line, layer by layer. Raises SpecError where they name other blocks."""
    if not isinstance(one, Strength) and not isinstance(two, Strength):
        return one + (two - one) * share
    a, b = (each if isinstance(each, Strength) else Strength(each) for each in (one, two))
    value = a.value + (b.value - a.value) * share
    if (a.digest, a.rest) != (b.digest, b.rest):
        raise SpecError("between='linear' is for strengths of one region and rest: name the same in each knot, or hold",
                        path=("knots",))  # fmt: skip
    if a.blocks == b.blocks:
        return replace(a, value=value)
    if a.blocks and b.blocks and list(a.blocks) != list(b.blocks):
        raise SpecError(
            f"between='linear' is for strengths that name the same blocks, and these name {quote(list(a.blocks))} and "
            f"{quote(list(b.blocks))}: name all of them in each knot, or hold",
            path=("knots",),
        )
    first, second = a.blocks or {}, b.blocks or {}
    ends = {name: (a.value * first.get(name, 1.0), b.value * second.get(name, 1.0)) for name in first or second}
    blocks = {"**": value, **{name: start + (end - start) * share for name, (start, end) in ends.items()}}
    return replace(a, value=1.0, blocks=blocks)


def get_value(strength: float | Strength) -> float:
    """Return how much is taken where no block is named."""
    return strength.value if isinstance(strength, Strength) else strength


def find_factors(strength: Strength, banks: Sequence[Bank], groups: int, paths: Sequence[str]) -> Tensor:
    """Return the factor of each group of a pass.

    Args:
        strength: One with blocks.
        banks: Of the pass.
        groups: Their number.
        paths: The layers of all passes.

    Returns:
        float32 (groups,).

    Raises:
        SpecError: For a pattern that no layer has, or that names a part of a group, with the nearest path.
    """
    assert strength.blocks is not None
    made: list[float | None] = [None] * groups
    for pattern in strength.blocks:
        if not any(is_covered(pattern, path) for path in paths):
            parents = {path.rsplit(".", n)[0] for path in paths for n in range(path.count(".") + 1)}
            raise SpecError(f"no layer with adapters is at '{pattern}'{did_you_mean(pattern, sorted(parents))}", key=pattern)
    first: dict[int, str] = {}
    for bank in banks:
        factor = 1.0
        for pattern, value in strength.blocks.items():
            factor = value if is_covered(pattern, bank.path) else factor
        if made[bank.group] not in (None, factor):
            raise SpecError(
                f"'{first[bank.group]}' and '{bank.path}' are in one group of the pass, and the strength has "
                f"{made[bank.group]:g} for the one and {factor:g} for the other: name both, or apply the pass with groups that "
                "part them"
            )
        made[bank.group] = factor
        first.setdefault(bank.group, bank.path)
    return torch.tensor([1.0 if factor is None else factor for factor in made])


def make_factors(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], which: Tensor, banks: Sequence[Bank], groups: int,
    paths: Sequence[str], known: dict[Any, Tensor],
) -> Tensor:  # fmt: skip
    """Make the factors of each group for each adapter of each row.

    Args:
        rows: The strength of each adapter, for each sample.
        names: The name of the adapter in each slot.
        which: The slots that each row takes, (rows, per_sample).
        banks: Of the pass.
        groups: Their number.
        paths: The layers of all passes.
        known: The factors of strengths that were asked for before.

    Returns:
        float32 (rows, groups, per_sample).

    Raises:
        SpecError: As `find_factors`.
    """
    made = torch.ones(len(rows), groups, which.shape[1])
    for index, row in enumerate(rows):
        for name, strength in row.items():
            if not isinstance(strength, Strength) or not strength.blocks or name not in names:
                continue
            key = tuple(strength.blocks.items())
            if (factors := known.get(key)) is None:
                factors = find_factors(strength, banks, groups, paths)
                if len(known) >= KEPT:
                    known.pop(next(iter(known)))
                known[key] = factors
            made[index][:, which[index] == names.index(name)] = factors[:, None]
    return made


def expand_factors(weights: Tensor, which: Tensor, factors: Tensor) -> Tensor:
    """Return the strength of each slot in each group, (groups, slots), from that of a row: (slots,), the slots that it takes,
    (per_sample,), and the factors of these, (groups, per_sample)."""
    made = weights.new_zeros(len(factors), len(weights))
    return made.scatter_add(1, which.expand(len(factors), -1), weights[which] * factors.to(weights.dtype))


def make_regions(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], which: Tensor, known: dict[Any, Any]
) -> dict[str, Tensor]:
    """Make the tables of the regions of each row.

    Args:
        rows: The strength of each adapter, for each sample.
        names: The name of the adapter in each slot.
        which: The slots that each row takes, (rows, per_sample).
        known: The masks of strengths that were asked for before.

    Returns:
        `regions`, `masks`, `rests` and `ratios`, as `RegionTable` has them, the last three of as many as there are.

    Raises:
        SpecError: For more masks than there is room for.
    """
    chosen = torch.zeros(which.shape, dtype=torch.int64)
    made: dict[Any, tuple[Tensor, float, float]] = {None: (torch.ones(SIDE, SIDE), 1.0, 0.0)}
    for index, row in enumerate(rows):
        for name, strength in row.items():
            if not isinstance(strength, Strength) or strength.region is None or name not in names:
                continue
            key = strength.digest, strength.rest
            if key not in known:
                if len(known) >= KEPT:
                    known.pop(next(iter(known)))
                mask = make_masks(strength.region.double(), SIDE, SIDE).clamp(0, 1)
                rest = {"share": float(mask.float().double().mean()), "full": 1.0, "none": 0.0}[strength.rest]
                known[key] = mask.float(), rest, strength.region.shape[0] / strength.region.shape[1]
            if bool((known[key][0] == 1).all()) and known[key][1] == 1:
                continue  # everywhere
            made.setdefault(key, known[key])
            chosen[index, which[index] == names.index(name)] = list(made).index(key)
    if len(made) > MASKS:
        raise SpecError(f"a batch can have at most {MASKS - 1} different regions, not {len(made) - 1}: split the batch")
    masks, rests, ratios = zip(*made.values(), strict=True)
    return {"regions": chosen, "masks": torch.stack(masks), "rests": torch.tensor(rests), "ratios": torch.tensor(ratios)}


def read_region(table: Mapping[str, Tensor], index: int, slot: int) -> dict[str, Any]:
    """Return the region and rest of what a row takes of a slot, as `Strength` has them; nothing where there is none."""
    if "regions" not in table or not (number := int(table["regions"][index][table["which"][index] == slot][0])):
        return {}
    mask, rest = table["masks"][number].float(), table["rests"][number]
    word = "none" if rest == 0 else "full" if rest == 1 else "share"
    sides = Fraction(float(table["ratios"][number])).limit_denominator(16)
    mask = mask.repeat_interleave(max(sides.numerator, 1), 0).repeat_interleave(sides.denominator, 1)
    return {"region": mask, "rest": word}


def align_rows(value: Tensor, before: Tensor, now: Tensor, neutral: int) -> Tensor:
    """Return what rows have for each slot that they take, (rows, ..., per_sample), in the order in which they take them now;
    `neutral` for a slot that is new there."""
    same = now[:, :, None] == before[:, None, :]
    at, known = same.int().argmax(2), same.any(2)
    if value.dim() == 3:
        at, known = at[:, None].expand(-1, value.shape[1], -1), known[:, None]
    return torch.where(known, value.gather(-1, at), neutral)
