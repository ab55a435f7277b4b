"""How far two results are apart, and how far the rounding of their dtype may put them: one measure and one table."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .pytree import leaves

# What another order of sums may change, of the largest value: of a result, and of a value within a model or of one operation,
# where large values may cancel. Models in float64 often compute a part (embeddings of the time, norms) in float32.
TOLERANCES = {
    torch.float64: (1e-5, 1e-4), torch.float32: (1e-5, 1e-4), torch.float16: (2e-3, 1e-2), torch.bfloat16: (2e-2, 2e-2),
}  # fmt: skip


class Difference(NamedTuple):
    """The largest difference of two results, over the largest value: as multiples of their dtype's tolerance, and itself."""

    times: float = 0.0
    distance: float = 0.0


def difference(wanted: Any, got: Any, within: bool = False, dtypes: Iterable[torch.dtype] = ()) -> Difference:
    """How far two results are apart, or two values `within` a model: tensors, or nested containers of them.

    `dtypes` are others that they were computed in, whose rounding they have. Infinitely, where they differ in number, shape,
    dtype or any value that is no floating-point number.
    """
    wants, gots = leaves(wanted), leaves(got)
    found = Difference() if len(wants) == len(gots) else Difference(math.inf, math.inf)
    dtypes = tuple(dtypes)
    for a, b in zip(wants, gots, strict=False):
        off = distance(a, b)
        found = max(found, Difference(off / tolerance(a, within, dtypes), off))
    return found


def tolerance(value: Any, within: bool = False, dtypes: Iterable[torch.dtype] = ()) -> float:
    """What rounding may change of a result, or of a value `within` a model, over its largest number: the most of its dtypes."""
    own = value.dtype if isinstance(value, Tensor) else torch.float32
    return max(TOLERANCES.get(dtype.to_real(), TOLERANCES[torch.float32])[within] for dtype in (own, *dtypes))


def distance(wanted: Any, got: Any) -> float:
    """The largest difference of two values, over the largest finite number of the wanted one.

    Infinite values must be the same ones, and what is not wanted as NaN must not be NaN; where NaN is wanted, NaN and 0 are
    right, which are what kernels of attention make of rows that see nothing.
    """
    if not isinstance(wanted, Tensor) or not isinstance(got, Tensor):
        return 0.0 if wanted == got or (wanted != wanted and got != got) else math.inf
    if wanted.shape != got.shape or wanted.dtype != got.dtype:
        return math.inf
    if not wanted.numel():
        return 0.0
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return 0.0 if torch.equal(wanted, got) else math.inf
    if torch.equal(wanted, got):
        return 0.0
    a, b = (numbers(t) for t in (wanted, got))
    off, most = (max(-float(low), float(high)) for low, high in map(torch.aminmax, (a - b, a)))
    if not math.isfinite(off + most):
        finite = a.isfinite()
        infinite, unknown = a.isinf(), a.isnan()
        if not torch.equal(a[infinite], b[infinite]) or not b[finite].isfinite().all() or b[unknown].nan_to_num().any():
            return math.inf
        return distance(a[finite], b[finite])
    return off / max(1e-12, most)


def numbers(value: Tensor) -> Tensor:
    """All numbers of a tensor, real and imaginary parts apart, in float64."""
    value = value.detach()
    return (torch.view_as_real(value.resolve_conj()) if value.is_complex() else value).double().flatten()
