"""Linear layers, ones with their low-rank update, and ones with a bank of them: the functions that stand in a fused graph.

Each has forms, which give the same but for rounding: `fused`, on a CPU through oneDNN and with the update in the place that is
the cheaper one at each call; `blas`, the same by torch's own products; `remerge` and `remerge:blas`, with the update in the
weight; `kernel` and `kernel:N`, of `kernels`; `stock`, as the layer and its `Lora` do it. A form may be four (`MODES`) with
commas between them: those in eager code without and with gradients, and in compiled code.

Dynamo takes each for one operator of torch's library and does not look inside: that would take it longer than all else.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...low_rank import added, side
from . import kernels, library

MODES = ((False, False), (False, True), (True, False), (True, True))  # compiled, with gradients


def product(a: Tensor, b: Tensor, bias: Tensor | None = None, blas: bool = False) -> Tensor:
    """a @ b.T + bias, for a (rows, inner), b (columns, inner) and bias (columns,) of one dtype, on any device."""
    if not torch.compiler.is_compiling():
        return library.multiply(a, b, bias, blas)
    if blas or not library.ONEDNN or a.device.type != "cpu" or a.dtype != torch.float32:
        return F.linear(a, b, bias)
    return torch.ops.fxplug.product(a, b, bias)  # type: ignore[no-any-return]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, form: str = "fused") -> Tensor:
    """`torch.nn.functional.linear`, equal to it but for rounding: x (..., in), weight (out, in), bias (out,)."""
    if _whole(form):
        return torch.ops.fxplug.linear(x, weight, bias, form)  # type: ignore[no-any-return]
    return _linear(x, weight, bias, form)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, form: str) -> Tensor:
    x, weight, bias = _cast(x, weight, bias)
    trained = trains(x, weight, bias)
    if _form(form, trained) != "fused" or not _fits(x, weight) or torch.compiler.is_exporting():
        return F.linear(x, weight, bias)
    if trained and not torch.compiler.is_compiling():
        return _Linear.apply(x, weight, bias)  # type: ignore[no-any-return]
    return product(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], weight.shape[0])


def lora_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: Tensor, form: str = "fused"
) -> Tensor:
    """linear(x, weight, bias) + scale * linear(linear(x, down), up): what a layer and its `Lora` give together.

    x is (..., in), weight (out, in), bias (out,), down (rank, in), up (out, rank), scale one number.
    """
    if _whole(form):
        return torch.ops.fxplug.lora_linear(x, weight, bias, down, up, scale, form)  # type: ignore[no-any-return]
    return _lora_linear(x, weight, bias, down, up, scale, form)


def _lora_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: Tensor, form: str
) -> Tensor:
    x, weight, bias, down, up = _cast(x, weight, bias, down, up)
    trained = trains(x, weight, bias, down, up)
    way = _form(form, trained)
    if way.startswith("kernel"):
        return kernel_lora_linear(x, weight, bias, down, up, scale, _tile(way))
    compiled = torch.compiler.is_compiling()
    alone = compiled and x.device.type != "cpu"  # there the compiler has products of its own, and joins what is around them
    if way == "stock" or alone or not _fits(x, weight, down, up) or torch.compiler.is_exporting():
        return torch.add(F.linear(x, weight, bias), side(x, down, up, scale))
    blas, merged = way.endswith("blas"), way.startswith("remerge")
    if trained and not compiled:
        return _LoraLinear.apply(x, weight, bias, down, up, scale, blas, merged)  # type: ignore[no-any-return]
    flat, shape = x.flatten(0, -2), (*x.shape[:-1], weight.shape[0])
    if trained:
        y, _ = torch.ops.fxplug.lora_and_inner(flat, weight, bias, down, up, scale, blas, merged)
    elif merged:
        y = product(flat, remerged(weight, down, up, scale), bias, blas)
    else:
        y = (torch.ops.fxplug.lora if compiled else library.lora)(flat, weight, bias, down, up, scale, blas)
    return y.view(shape)  # type: ignore[no-any-return]


def bank_linear(
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
    """What a layer and its `Lora` with slots give together: each sample gets the low-rank updates of the slots that it takes.

    x is (..., in) with the samples in dimension `batch_dim`, 0 or 1, -1 for none; weight (out, in), bias (out,),
    down (slots * rank, in), up (out, slots * rank), rows float32 (batch, slots * rank), a slot's weight repeated for its
    rank. On a CPU only slots with a weight cost time. The bank gets no gradient.
    """
    if _whole(form):
        return torch.ops.fxplug.bank_linear(x, weight, bias, down, up, rows, slots, batch_dim, form)  # type: ignore[no-any-return]
    return _bank_linear(x, weight, bias, down, up, rows, slots, batch_dim, form)


def _bank_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    rows: Tensor,
    slots: int,
    batch_dim: int,
    form: str,
) -> Tensor:
    x, weight, bias, down, up = _cast(x, weight, bias, down, up)
    trained = trains(x, weight, bias, down, up)
    way = _form(form, trained)
    if way.startswith("kernel"):
        return kernel_bank_linear(x, weight, bias, down, up, rows, slots, batch_dim, _tile(way))
    plain = torch.compiler.is_exporting() or trained or not _fits(x, weight, down, up) or way == "stock"
    if x.device.type == "cpu" and not plain:
        call = torch.ops.fxplug.bank if torch.compiler.is_compiling() else library.bank
        return call(x, weight, bias, down, up, rows, slots, batch_dim, way == "blas")
    return torch.add(linear(x, weight, bias, way), side(x, down, up, rows, batch_dim))


def kernel_lora_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: Tensor, tile: int = 0
) -> Tensor:
    """`lora_linear` as one kernel of `kernels`; as it is where none fits. `tile` is one of `kernels.TILES`."""
    x, weight, bias, down, up = _cast(x, weight, bias, down, up)
    if x.dim() < 2 or not kernels.fits(x, weight, bias, down, up, rank=down.shape[0]):
        return lora_linear(x, weight, bias, down, up, scale)
    y = kernels.linear(x.reshape(1, -1, x.shape[-1]), weight, bias, down, up, scale.float().view(1, 1), tile)
    return y.view(*x.shape[:-1], weight.shape[0])


def kernel_bank_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    rows: Tensor,
    slots: int,
    batch_dim: int = 0,
    tile: int = 0,
) -> Tensor:
    """`bank_linear` as one kernel of `kernels`, in which only slots with a weight cost time; as it is where none fits."""
    x, weight, bias, down, up = _cast(x, weight, bias, down, up)
    batch, rank = rows.shape[0], down.shape[0] // slots
    if x.dim() < 2 or not batch or not kernels.fits(x, weight, bias, down, up, rank=rank):
        return bank_linear(x, weight, bias, down, up, rows, slots, batch_dim)
    if batch_dim < 0 or x.shape[batch_dim] % batch:
        return bank_linear(x, weight, bias, down, up, rows, slots, batch_dim)
    take = rows[:, ::rank]
    if batch_dim and take.shape[0] > 1:
        first = x.transpose(0, batch_dim)
        y = kernels.linear(first.flatten(1, -2), weight, bias, down, up, take, tile)
        return y.view(*first.shape[:-1], weight.shape[0]).transpose(0, batch_dim)
    y = kernels.linear(x.reshape(take.shape[0], -1, x.shape[-1]), weight, bias, down, up, take, tile)
    return y.view(*x.shape[:-1], weight.shape[0])


def loha_weight(value: Tensor, a1: Tensor, b1: Tensor, a2: Tensor, b2: Tensor, gates: Tensor) -> Tensor:
    """value + gates * (a1 @ b1) * (a2 @ b2), for value (out, in, *kernel), in its dtype; one number, or (slots,) and banks."""
    parts = [t if gates.dim() else t[None] for t in (a1, b1, a2, b2)]
    return kernels.loha(value.flatten(1), *parts, gates.float().view(-1)).view(value.shape)


def lokr_weight(value: Tensor, w1: Tensor, w2: Tensor, gates: Tensor) -> Tensor:
    """value + gates * kron(w1, w2), for value (a * b, c * d, *kernel), w1 (a, c) and w2 (b, d, *kernel), as `loha_weight`."""
    first, second = (w1, w2) if gates.dim() else (w1[None], w2[None])
    return kernels.lokr(value.flatten(1), first, second.flatten(2), gates.float().view(-1)).view(value.shape)


def remerged(weight: Tensor, down: Tensor, up: Tensor, gates: Tensor) -> Tensor:
    """`added` without gradients, and on a CPU without the slots that nobody takes.

    Raises ValueError on a CPU where a gate is NaN, as gates are when the samples of a batch take different slots.
    """
    if weight.device.type == "cpu" and gates.dim() and not torch.compiler.is_exporting():
        call = torch.ops.fxplug.remerged if torch.compiler.is_compiling() else library.remerged
        return call(weight, down, up, gates)
    return added(weight, down, up, gates)


def trains(*tensors: Tensor | None) -> bool:
    """Whether autograd wants to see what is computed from these."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _whole(form: str) -> bool:
    """Whether a compiler looks on that is to see one operator; one for GPUs has to see their kernels."""
    return torch.compiler.is_compiling() and not torch.compiler.is_exporting() and "kernel" not in form


def _form(form: str, trained: bool) -> str:
    """The form that a call takes."""
    forms = form.split(",")
    return forms[0] if len(forms) == 1 else forms[MODES.index((torch.compiler.is_compiling(), trained))]


def _tile(form: str) -> int:
    return int(form.partition(":")[2] or 0)


def _cast(x: Tensor, *rest: Any) -> tuple[Any, ...]:
    """The tensors in autocast's dtype where it is on, as it would cast them for torch's linear."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, *rest
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t if t is None else t.to(dtype) for t in (x, *rest))


def _fits(x: Tensor, *weights: Tensor) -> bool:
    return x.dim() > 1 and all(w.dtype == x.dtype for w in weights)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.blas = False
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return library.multiply(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        gx, *rest = library.product_gradients(library.Eager, ctx, g.flatten(0, -2))
        return None if gx is None else gx.view(*g.shape[:-1], gx.shape[1]), *rest


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: Tensor, *way: bool
    ) -> Tensor:
        y, inner = library.lora_and_inner(x.flatten(0, -2), weight, bias, down, up, scale, *way)
        ctx.way = way
        ctx.save_for_backward(x, weight, down, up, scale, inner)
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        gx, *rest = library.lora_gradients(library.Eager, ctx, g.flatten(0, -2))
        return None if gx is None else gx.view(*g.shape[:-1], gx.shape[1]), *rest, None, None


def remerged_linear(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, gates: Tensor) -> Tensor:
    """linear(x, remerged(weight, down, up, gates), bias), with gradients for all but the gates; x is (..., in)."""
    x, weight, bias, down, up = _cast(x, weight, bias, down, up)
    if not _fits(x, weight, down, up) or torch.compiler.is_exporting():
        return F.linear(x, added(weight, down, up, gates), bias)  # autograd sees all of it
    if not gates.dim():
        return lora_linear(x, weight, bias, down, up, gates, "remerge")
    whole = added(weight, down, up, gates) if trains(weight, down, up) else remerged(weight, down, up, gates)
    return linear(x, whole, bias)


for _name, _of, _run in (
    ("linear", "Tensor x, Tensor weight, Tensor? bias, str form", _linear),
    ("lora_linear", f"{library.UPDATED}, Tensor scale, str form", _lora_linear),
    ("bank_linear", f"{library.UPDATED}, Tensor rows, int slots, int batch_dim, str form", _bank_linear),
):
    library.LIBRARY.define(f"{_name}({_of}) -> Tensor")  # type: ignore[no-untyped-call]
    library.LIBRARY.impl(_name, _run, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
