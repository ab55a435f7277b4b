"""Values and calls compared: exactly and in words, or within what one table of tolerances allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..torch_internals.tensors import FakeTensor, memory_id
from .containers import list_leaves, list_members, map_leaves
from .ops import other_kind

KIND = ("shape", "dtype", "device", "layout")  # of a tensor, beside its values
Same = Callable[[Any, Any], bool]  # compares what is neither a tensor nor a container


# --- the same in every value


def _is_equal(a: Any, b: Any) -> bool:
    return bool(a == b) or bool(a != a and b != b)


def pair_leaves(a: Any, b: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield what is in one place of two nested values, with that place; containers of other members are such values."""
    if a is b:
        return
    a, b = (x.item() if isinstance(x, np.generic) else x for x in (a, b))  # a graph gives Python's own numbers
    inner, other = (None if isinstance(x, Tensor) else list_members(x) for x in (a, b))
    if type(a) is type(b) and inner is not None and other is not None:
        ours, theirs = dict(inner), dict(other)
        if list(ours) == list(theirs):
            for key in ours:
                yield from pair_leaves(ours[key], theirs[key], f"{place}[{key!r}]")
            return
    yield place, a, b


def is_equal(a: Any, b: Any, same: Same = _is_equal) -> bool:
    """Tell whether two values, tensors or nested containers, are the same in kind, structure and every value.

    NaN is like NaN, infinities only like themselves. Of fake and meta tensors nothing but the kind is known.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _equal_tensors(a, b)
    for _, x, y in pair_leaves(a, b):
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            if not _equal_tensors(x, y):
                return False
        elif type(x) is not type(y) or list_members(x) is not None or not same(x, y):
            return False
    return True


def _equal_tensors(a: Tensor, b: Tensor) -> bool:
    if any(getattr(a, what) != getattr(b, what) for what in KIND):
        return False
    if a.is_meta or isinstance(a, FakeTensor):
        return True
    try:
        if torch.equal(a, b):
            return True
    except (RuntimeError, TypeError):  # a dtype, or a class of tensors, that torch cannot compare
        return type(a) not in (Tensor, nn.Parameter) or torch.equal(*(t.contiguous().view(torch.uint8) for t in (a, b)))
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    return a.is_floating_point() and a.layout == torch.strided and bool(((a == b) | (a.isnan() & b.isnan())).all())


def describe_difference(a: Any, b: Any, same: Same = _is_equal) -> str | None:
    """Say how `b` differs from `a`, tensors or nested containers; None where they are `equal`."""
    for place, x, y in pair_leaves(a, b):
        at = f" at {place}" if place else ""
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            text = _describe_tensors(x, y, at)
        elif type(x) is not type(y):
            text = f"in type{at}: a {type(y).__name__} instead of a {type(x).__name__}"
        elif (ours := list_members(x)) is not None and (theirs := list_members(y)) is not None:
            text = f"in structure{at}: members {list(dict(theirs))} instead of {list(dict(ours))}"
        else:
            text = None if same(x, y) else f"in value{at}: {y!r} instead of {x!r}"
        if text:
            return text
    return None


def _describe_tensors(a: Tensor, b: Tensor, at: str) -> str | None:
    for what in KIND:
        before, now = getattr(a, what), getattr(b, what)
        if before != now:
            shown = [list(v) if what == "shape" else v for v in (now, before)]
            return f"in {what}{at}: {shown[0]} instead of {shown[1]}"
    if _equal_tensors(a, b):
        return None
    if not (a.is_floating_point() or a.is_complex()) or a.layout != torch.strided:
        return f"in value{at}"
    if not torch.equal(a.isnan(), b.isnan()):
        return f"in {int((a.isnan() != b.isnan()).sum())} places{at} that are NaN in one of them"
    gaps = (get_numbers(a) - get_numbers(b)).abs()
    return f"by {gaps[gaps.isfinite() | (gaps == torch.inf)].max().item():.1e}{at}"


# --- within a tolerance

TINY = 1e-12  # the least largest number
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # the columns of the table; others are like float32
EPS = tuple(torch.finfo(dtype).eps for dtype in DTYPES)


class Tolerance(NamedTuple):
    """How far a number may be from the wanted one: a share of the largest number beside it, and one of itself, by dtype."""

    of_largest: tuple[float, ...]
    of_number: tuple[float, ...] = (0.0,) * len(DTYPES)
    zero_for_nan: bool = False  # kernels of attention make NaN or 0 of rows that see nothing: where NaN is wanted, 0 is right

    def shares(self, value: Any, dtypes: Iterable[torch.dtype] = ()) -> tuple[float, float]:
        """Get both shares for a value that was computed in its own dtype and in `dtypes`: the most of any."""
        own = value.dtype if isinstance(value, Tensor) else torch.float32
        reals = [dtype.to_real() for dtype in (own, *dtypes)]
        columns = [DTYPES.index(dtype if dtype in DTYPES else torch.float32) for dtype in reals]
        return max(self.of_largest[c] for c in columns), max(self.of_number[c] for c in columns)


# Of a result: sums were taken in another order, as several processes take them. Models in float64 often compute a part
# (embeddings of the time, norms) in float32.
RESULT = Tolerance((1e-5, 1e-5, 2e-3, 2e-2), zero_for_nan=True)
# Of a value within a model, or of one operation: large values may cancel in it, which the largest does not show.
WITHIN = Tolerance((1e-4, 1e-4, 1e-2, 2e-2), zero_for_nan=True)
# Of another compiler's program: all of it is fused and ordered anew. Another weight makes more of a difference.
COMPILED = Tolerance((1e-3, 1e-3, 1e-1, 2e-1), zero_for_nan=True)
# Of the same few operations written in another way: each number by itself, but for the last bits of the largest one.
REWRITTEN = Tolerance(tuple(2 * eps for eps in EPS), of_number=(1e-5,) * len(DTYPES))
# Of the same operations run again where they add up in an order of their own (a backward pass, a GPU): half of the digits
# of each number, and no more of a number near 0.
REPEATED = Tolerance((1e-8,) * len(DTYPES), of_number=tuple(eps**0.5 for eps in EPS))


class Difference(NamedTuple):
    """The largest difference of two values: as multiples of what a tolerance allows, and over the largest number."""

    times: float = 0.0
    distance: float = 0.0


def measure_difference(
    wanted: Any, got: Any, tolerance: Tolerance = RESULT, dtypes: Iterable[torch.dtype] = ()
) -> Difference:
    """Measure how far two values are apart, tensors or nested containers of them.

    `dtypes` are others that they were computed in, whose rounding they have. Infinitely, where they differ in number, shape,
    dtype or any value that is no floating-point number.
    """
    wants, gots = list_leaves(wanted), list_leaves(got)
    found = Difference() if len(wants) == len(gots) else Difference(math.inf, math.inf)
    dtypes = tuple(dtypes)
    for a, b in zip(wants, gots, strict=False):
        off = measure_distance(a, b, tolerance.zero_for_nan)
        if off:
            found = max(found, Difference(_times(a, b, off, *tolerance.shares(a, dtypes)), off))
    return found


def is_close(wanted: Any, got: Any, tolerance: Tolerance, dtypes: Iterable[torch.dtype] = ()) -> bool:
    """Tell whether two values differ by no more than a tolerance allows."""
    return measure_difference(wanted, got, tolerance, dtypes).times <= 1


def _times(wanted: Tensor, got: Tensor, off: float, of_largest: float, of_number: float) -> float:
    if not of_number or math.isinf(off):
        return off / of_largest
    a, b = get_numbers(wanted), get_numbers(got)
    finite = a.isfinite()
    a, b = a[finite], b[finite]
    allowed = of_number * a.abs() + of_largest * a.abs().max().clamp(min=TINY)
    return float(((a - b).abs() / allowed).max())


def measure_distance(wanted: Any, got: Any, zero_for_nan: bool = True) -> float:
    """Measure the largest difference of two values, over the largest finite number of the wanted one.

    Infinite values must be the same ones, and what is not wanted as NaN must not be NaN; where NaN is wanted, NaN is right, and
    with `zero_for_nan` so is 0.
    """
    if not isinstance(wanted, Tensor) or not isinstance(got, Tensor):
        return 0.0 if wanted == got or (wanted != wanted and got != got) else math.inf
    if wanted.shape != got.shape or wanted.dtype != got.dtype:
        return math.inf
    if not wanted.numel() or torch.equal(wanted, got):
        return 0.0
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return math.inf
    a, b = (get_numbers(t) for t in (wanted, got))
    off, most = (max(-float(low), float(high)) for low, high in map(torch.aminmax, (a - b, a)))
    if not math.isfinite(off + most):
        finite, infinite, of_nan = a.isfinite(), a.isinf(), b[a.isnan()]
        right = of_nan.isnan() | (of_nan == 0) if zero_for_nan else of_nan.isnan()
        if not torch.equal(a[infinite], b[infinite]) or not b[finite].isfinite().all() or not right.all():
            return math.inf
        return measure_distance(a[finite], b[finite])
    return off / max(TINY, most)


def get_numbers(value: Tensor) -> Tensor:
    """Get all numbers of a tensor, real and imaginary parts apart, in float64."""
    value = value.detach()
    return (torch.view_as_real(value.resolve_conj()) if value.is_complex() else value).double().flatten()


# --- calls

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Outcome:
    """What one call gave and what it left: its result or its error, its inputs, and tensors by a name for people.

    `dtypes` are those that it computed in, where that is known.
    """

    out: Any = None
    inputs: Any = None
    state: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None
    dtypes: set[torch.dtype] = field(default_factory=set)

    def diff(self, other: Outcome, same: Same = _is_equal) -> str | None:
        """Say how another call went otherwise, in words; None where it did not. Of states what both have is compared."""
        if type(self.error) is not type(other.error):
            return f"errors differ: {self.error!r} and {other.error!r}"
        if text := describe_difference(self.out, other.out, same):
            return f"outputs differ {text}"
        if text := describe_difference(self.inputs, other.inputs, same):
            return f"the inputs differ after the call, {text}"
        for name, value in self.state.items():
            if name in other.state and (text := describe_difference(value, other.state[name], same)):
                return f"{name} differs after the call, {text}"
        return None

    def difference(self, other: Outcome, tolerance: Tolerance) -> Difference:
        """Measure how far the result of another call is from this one's."""
        return measure_difference(self.out, other.out, tolerance, self.dtypes)

    def keep(self) -> None:
        """Let all that it has be copies, which later calls do not reach."""
        with torch.no_grad():
            self.out, self.inputs, self.state = (detach(value) for value in (self.out, self.inputs, self.state))


def run(function: Callable[..., Any], inputs: Call) -> Outcome:
    """Call a function with arguments that are nobody else's; an exception is its outcome, too."""
    try:
        return Outcome(function(*inputs[0], **inputs[1]), inputs)
    except Exception as error:  # of anybody's code
        return Outcome(None, inputs, error=error)


def detach(value: Any) -> Any:
    """Copy the tensors of a nested value, without what they were computed from."""
    return map_leaves(value, lambda t, _: t.detach().clone())


def copy_inputs(call: Any, other: str = "") -> Any:
    """Copy inputs: with memory of their own and the same strides, aliases of each other and gradients.

    With `other` "numbers" floating-point tensors have other values: half of them, and a quarter. With "all" integers have too:
    half of them, so that indices are indices still.
    """
    tensors = {id(t): t for t in list_leaves(call) if isinstance(t, Tensor)}
    memory = {number: _memory(t) for number, t in tensors.items()}
    spans: dict[Any, tuple[int, int]] = {}
    for number, t in tensors.items():
        if key := memory[number]:
            offset = int(t.storage_offset())
            first, last = spans.get(key, (offset, 0))
            end = offset + 1 + sum((int(n) - 1) * int(s) for n, s in zip(t.shape, t.stride(), strict=True))
            spans[key] = min(first, offset), max(last, end if t.numel() else offset)
    flats: dict[Any, Tensor] = {}
    copies: dict[int, Tensor] = {}
    with torch.no_grad():
        for number, t in tensors.items():
            if not (key := memory[number]):
                copies[number] = t.detach().clone()
                continue
            first, last = spans[key]
            if key not in flats:
                flats[key] = t.detach().as_strided((last - first,), (1,), first).clone()
                if other:
                    _change(flats[key], other == "all")
            copies[number] = flats[key].as_strided(t.shape, t.stride(), t.storage_offset() - first)
    for number, t in tensors.items():
        if t.requires_grad:
            new = copies[number].requires_grad_()
            copies[number] = new if t.is_leaf else new.clone()
    return _plain_copies(map_leaves(call, lambda t, _: copies[id(t)]))


def is_integer(tensor: Tensor) -> bool:
    """Tell whether a tensor has a dtype of integers."""
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


def _memory(tensor: Tensor) -> Any:
    """Return a key for the memory of an ordinary tensor, and for how it is read; None for any other."""
    if type(tensor) not in (Tensor, nn.Parameter) or other_kind(tensor) or tensor.is_conj() or tensor.is_neg():
        return None
    return memory_id(tensor.untyped_storage()), tensor.dtype, tensor.device


def _change(tensor: Tensor, integers: bool) -> None:
    if is_integer(tensor):
        tensor.copy_(tensor // 2 if integers else tensor)
    elif tensor.is_floating_point() or tensor.is_complex():
        try:
            tensor.mul_(0.5).add_(0.25)
        except RuntimeError:  # a dtype without arithmetic
            return
