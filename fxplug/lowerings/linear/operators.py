"""Linear layers, ones with their low-rank update, and ones with a bank of them: the functions that stand in a fused graph.

Each has forms, which give the same but for rounding: `fused`, on a CPU through oneDNN and with the update in the place that is
the cheaper one at each call; `blas`, the same by torch's own products; `triton`, kernels with the update in the product, and
`triton:weight`, one that adds it to the weight; `stock`, as the layer and its `Lora` do it. A form may be four (`MODES`) with
commas between them: those in eager code without and with gradients, and in compiled code. In compiled code for a GPU `fused`
adds the update to the weight, and what is trained or runs in autocast is as in `stock`.

Dynamo takes each for one operator of torch's library and does not look inside: that would take it longer than all else.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ...blocks.low_rank import add_update, compute_update
from ...core.torch_internals.tensors import is_transforming
from . import devices, library

Run = TypeVar("Run", bound=Callable[..., Any])
MODES = ((False, False), (False, True), (True, False), (True, True))  # compiled, with gradients
KEPT = ContextVar("KEPT", default=False)  # whether what an export gives is compiled here


def make_operator(name: str) -> Callable[[Run], Run]:
    """Make a decorator that calls a function through an operator of torch's library, of this name, under a compiler."""

    def decorate(run: Run) -> Run:
        library.LIBRARY.define(name + torch.library.infer_schema(run, mutates_args=()))  # type: ignore[no-untyped-call]
        library.LIBRARY.impl(name, run, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]

        @functools.wraps(run)
        def call(*args: Any, **kwargs: Any) -> Any:
            traced = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
            return getattr(torch.ops.fxplug, name)(*args, **kwargs) if traced else run(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


@make_operator("linear")
def run_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, form: str = "fused") -> Tensor:
    """Compute `torch.nn.functional.linear`, up to rounding: x (..., in), weight (out, in), bias (out,)."""
    x, weight, bias = _cast(x, weight, bias)
    trained, compiled = is_training(x, weight, bias), torch.compiler.is_compiling()
    ours = library.ONEDNN and x.device.type == "cpu" and x.dtype == torch.float32 and _fits(x, weight)
    if _form(form, trained) != "fused" or not ours or torch.compiler.is_exporting():
        return F.linear(x, weight, bias)
    return library.run_rows("product", compiled or trained, x, weight, bias)


@make_operator("linear_with_lora")
def run_lora_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: Tensor, form: str = "fused"
) -> Tensor:
    """Compute linear(x, weight, bias) + scale * linear(linear(x, down), up): a layer and its `Lora`.

    x is (..., in), weight (out, in), bias (out,), down (rank, in), up (out, rank), scale one number.
    """
    autocast = x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
    x, weight, bias, down, up = _cast(x, weight, bias, down, up)
    trained = is_training(x, weight, bias, down, up)
    way = _form(form, trained)
    if kernels := _kernels(way, x, weight, bias, down, up):
        if way == "triton:weight":
            return F.linear(x, torch.ops.fxplug.triton_merge(weight, down, up, scale), bias)
        return kernels.compute_linear(x, weight, bias, down, up, scale)  # type: ignore[no-any-return]
    compiled = torch.compiler.is_compiling()
    alone = compiled and x.device.type != "cpu"  # there the compiler has products of its own, and joins what is around them
    plain = way.startswith(("stock", "triton")) or not _fits(x, weight, down, up) or torch.compiler.is_exporting()
    if plain or (alone and (trained or autocast)):
        return torch.add(F.linear(x, weight, bias), compute_update(x, down, up, scale))
    if alone:  # but none for the update beside: on the weight, no pass over the rows is for it
        return F.linear(x, add_update(weight, down, up, scale), bias)
    name = "lora_and_hidden" if trained else "lora"
    return library.run_rows(name, compiled or trained, x, weight, bias, down, up, scale, way == "blas")


@make_operator("bank_linear")
def run_bank_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    rows: Tensor,
    slots: int,
    batch_dim: int = 0,
    form: str = "fused",
) -> Tensor:
    """Compute a layer and its `Lora` with slots: each sample gets the low-rank updates of the slots that it uses.

    x is (..., in) with the samples in dimension `batch_dim`, 0 or 1, -1 for none; weight (out, in), bias (out,), down (slots *
    rank, in), up (out, slots * rank), rows float32 (batch, slots * rank), a slot's weight repeated for its rank. On a CPU only
    slots with a weight cost time. The bank gets no gradient.
    """
    x, weight, bias, down, up = _cast(x, weight, bias, down, up)
    trained = is_training(x, weight, bias, down, up)
    way = _form(form, trained)
    kernels = _kernels(way, x, weight, bias, down, up, slots=slots)
    if kernels and rows.shape[0] and -1 < batch_dim < x.dim() - 1 and x.shape[batch_dim] % rows.shape[0] == 0:
        return kernels.compute_linear(x, weight, bias, down, up, rows, slots, batch_dim)  # type: ignore[no-any-return]
    plain = torch.compiler.is_exporting() or trained or not _fits(x, weight, down, up) or way in ("stock", "triton")
    if x.device.type == "cpu" and not plain:
        call = torch.ops.fxplug.bank if torch.compiler.is_compiling() else library.compute_bank
        return call(x, weight, bias, down, up, rows, slots, batch_dim, way == "blas")
    return torch.add(run_linear(x, weight, bias, way), compute_update(x, down, up, rows, batch_dim))


def _kernels(form: str, x: Tensor, *weights: Tensor | None, slots: int = 1) -> Any:
    """Return the module of the Triton kernels, if a form uses them and they support a call; else None.

    A compiler cannot look into Triton's interpreter. Exported programs use torch's own products, unless `KEPT` is set.
    """
    if not form.startswith("triton") or (torch.compiler.is_exporting() and not KEPT.get()):
        return None
    known = [weight for weight in weights if weight is not None]
    if not x.numel() or not _fits(x, *known) or x.shape[-1] != known[0].shape[1]:  # of which torch's own products raise
        return None
    if devices.explain_unfit(x.device, x.dtype, known[-1].shape[1] // slots) is not None:
        return None
    if devices.is_interpreted() and torch.compiler.is_compiling():
        return None
    from . import kernels

    return kernels


@contextlib.contextmanager
def keep_kernels() -> Iterator[None]:
    """Keep the calls of Triton kernels in exports inside the context."""
    token = KEPT.set(True)
    try:
        yield
    finally:
        KEPT.reset(token)


def is_training(*tensors: Tensor | None) -> bool:
    """Return whether autograd records what is computed from these."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _form(form: str, trained: bool) -> str:
    """Return the form of a call: torch's own products under functional transforms, as ours support autograd alone."""
    if not torch.compiler.is_exporting() and is_transforming():
        return "stock"
    forms = form.split(",")
    return forms[0] if len(forms) == 1 else forms[MODES.index((torch.compiler.is_compiling(), trained))]


def _cast(x: Tensor, *rest: Any) -> tuple[Any, ...]:
    """Cast the tensors to autocast's dtype if it is enabled, as for torch's linear.

    Raises SpecError for weights on the meta device with an input that has values: torch's own products would return
    uninitialised memory.
    """
    kind = x.device.type
    library.check_values(x, *rest)
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # which torch refuses to say of the meta device
        return x, *rest
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t if t is None else t.to(dtype) for t in (x, *rest))


def _fits(x: Tensor, *weights: Tensor) -> bool:
    return x.dim() > 1 and all(w.dtype == x.dtype for w in weights)
