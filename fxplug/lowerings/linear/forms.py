"""Which form a layer with its low-rank update takes: a rule over its sizes, its dtype and the class of its device."""

from __future__ import annotations

import functools
import json
import math
import platform
import warnings
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ...core.errors import SpecError, did_you_mean, quote
from ...core.ir.containers import find_tensor
from . import devices, library, operators
from .layers import Layer

FORMS = {
    "stock": "as the pass put it in",
    "fused": "one function: base and update, on a CPU by oneDNN, the cheaper of side path and weight at each call",
    "blas": "the same by torch's own products",
    "triton": "kernels for CUDA: the update in the product, or in the weight where rows are many and nothing is trained",
}
# what the rule goes by, for each class of devices; `benchmarks/forms.py` measures a CPU's and writes them
LIMITS: dict[str, dict[str, Any]] = json.loads(files(__package__).joinpath("limits.json").read_text("utf-8"))
DTYPES = ("float16", "bfloat16", "float32", "float64")


class Case(NamedTuple):
    """What a form's time depends on. `rows` is batch times tokens; `slots` 0 is a plain `Lora`, `rank` 0 a layer without one;
    `grad`, `compiled` and `mapped` are 1 for calls with gradients, in compiled code, and of a weight that an update maps.
    """

    dtype: str
    rows: int
    inner: int
    outer: int
    rank: int
    slots: int
    grad: int = 0
    compiled: int = 0
    mapped: int = 0


def make_case(tree: nn.Module, layer: Layer, dtype: torch.dtype | None = None) -> tuple[torch.device, Case] | None:
    """Return device and case of a linear layer, with its update, for the rows of the trace; None if unknown."""
    weight: Any = find_tensor(tree, layer.weight_name) if layer.weight_name else None
    shape, block = layer.node.meta.get("shape"), layer.block
    if not shape or type(weight) not in (torch.Tensor, nn.Parameter) or weight.dim() != 2:
        return None
    named = str(dtype or weight.dtype).removeprefix("torch.")
    outer, inner = weight.shape
    rank, slots = (0, 0) if block is None else (block.rank, block.slots)
    mapped = int(block is not None and layer.module is None)
    return weight.device, Case(named, int(math.prod(shape[:-1])), inner, outer, rank, slots, mapped=mapped)


def find_form(how: str) -> str:
    """Return the form of this name, or `auto`. Raises SpecError."""
    known = ["auto", *FORMS]
    if how not in known:
        raise SpecError(f"fuse must be one of {', '.join(known)}, not {quote(how)}{did_you_mean(str(how), known)}")
    return how


@functools.cache
def classify(device: str) -> str:
    """Return the class of a type of devices, as in LIMITS: CPUs are split by whether torch has their maker's products."""
    if device != "cpu" or not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return device
    info = Path("/proc/cpuinfo")
    maker = info.read_text(errors="replace") if info.is_file() else platform.processor()
    return "cpu with mkl" if "GenuineIntel" in maker else device


def choose_form(case: Case, device: str) -> str:
    """Return the form of a layer on a class of devices (`classify`).

    `own` are the dtypes with products that are not torch's own. These are faster if a weight is large and a result is wide; in
    training if the input is narrow as well, or the rows are many. A layer of few multiplications takes longer to call than to
    compute; with slots those of their updates count, as only what is used of these is computed (`banks`, null where that is not
    so), and twice in a dtype with torch's own products alone. If `compiled` is false, compiled code has no form but that on the
    weight.
    """
    limits, (dtype, rows, inner, outer, rank, slots, grad, compiled, mapped) = LIMITS.get(device), case
    if limits is None or dtype not in DTYPES:
        return "stock"
    least, work = limits["least"], rows * inner * outer
    if slots:
        least, work = limits["banks"], rows * slots * rank * (inner + outer) * (1 if dtype in limits["own"] else 2)
    if least is None or work < least:
        return "stock"
    own = dtype in limits["own"] and inner * outer >= limits["heavy"]
    wide, long = outer > limits["wide"], rows >= limits["long"]
    if grad and (slots or not rank):
        return "stock"
    on_weight = rank and not (slots or grad or mapped) and library.is_cheaper(rows, outer, inner)
    if compiled and not limits["compiled"] and not on_weight:
        return "stock"
    if grad:
        return "fused" if own and inner <= limits["narrow"] and (wide or long) else "blas" if long or mapped else "stock"
    if own and wide:
        return "fused"
    return "blas" if rank else "stock"


def choose_forms(case: Case, device: str) -> tuple[str, str]:
    """Return the form of a case in all of `operators.MODES`, as the functions there read it, and as text."""
    modes = [case._replace(compiled=int(compiled), grad=int(grad)) for compiled, grad in operators.MODES]
    return join_forms([choose_form(mode, classify(device)) for mode in modes])


def join_forms(found: Sequence[str]) -> tuple[str, str]:
    """Return the forms of a layer in all of `operators.MODES` as one name, and as text, which leaves out what repeats."""
    if len(set(found)) == 1:
        return found[0], found[0]
    words = zip(found, ("", " (with gradients)", " (compiled)", " (compiled, with gradients)"), strict=True)
    kept = [f"{form}{mode}" for i, (form, mode) in enumerate(words) if not i or form != found[i % 2 if i > 1 else 0]]
    return ",".join(found), ", ".join(kept)


def choose_triton_form(known: tuple[torch.device, Case] | None) -> tuple[str, str, str | None]:
    """Return the form of the Triton kernels for a layer, as `join_forms` does, and why they do not support it.

    An update is added to the weight if that costs less for the rows of the trace, and nothing is trained.
    """
    if known is None:
        return "stock", "stock", "the trace has no sizes for Triton's kernels"
    device, case = known
    cast = device.type != "meta" and torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if cast else getattr(torch, case.dtype)
    reason = devices.explain_unfit(device, dtype, case.rank)
    if reason is not None:
        return "stock", "stock", reason
    on_weight = not case.slots and library.is_cheaper(case.rows, case.outer, case.inner)
    return *join_forms(["triton:weight" if on_weight and not grad else "triton" for _, grad in operators.MODES]), None


@functools.cache
def warn_once(text: str) -> None:
    """Warn, once for each text."""
    warnings.warn(text, stacklevel=4)
