"""Products that cost less than torch's own: a linear layer, one with its low-rank update, and one with a bank of them.

On a CPU in float32 they go through oneDNN, where torch's linear goes through its BLAS: MKL leaves AVX-512 unused on CPUs of
other makers. The low-rank update is added to the base's fresh output, and its gradient to the base's, in place; without
gradients and where the rows are many it is added to the weight instead. On a CPU the choice is made at each call, inside one
operator: no number of rows is part of a compiled graph.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...low_rank import added, side, spread
from ...torch_internals.kernels import onednn_linear
from . import kernels

ONEDNN = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
GATES = torch.float32  # the dtype of what gates give
MIXED = (
    "the samples of this batch take different adapters, and this graph adds them to the weights, which all samples share: "
    "keep the side path (lower without merge) for mixed batches"
)
LIBRARY = torch.library.Library("fxplug", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define("product(Tensor a, Tensor b, Tensor? bias) -> Tensor")  # type: ignore[no-untyped-call]


def _onednn(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    if not (a.numel() and b.numel()):  # which oneDNN refuses
        return F.linear(a, b, bias)
    return onednn_linear(a, b, bias, "none", [], "")  # type: ignore[no-any-return]


# the compiler takes oneDNN's own operator only where the second factor is a constant
LIBRARY.impl("product", _onednn, "CPU")  # type: ignore[no-untyped-call]
LIBRARY.impl("product", lambda a, b, bias: a.new_empty(a.shape[0], b.shape[0]), "Meta")  # type: ignore[no-untyped-call]
LIBRARY.define("lora(Tensor x, Tensor weight, Tensor? bias, Tensor down, Tensor up, Tensor scale) -> Tensor")  # type: ignore[no-untyped-call]
LIBRARY.define(  # type: ignore[no-untyped-call]
    "bank(Tensor x, Tensor weight, Tensor? bias, Tensor down, Tensor up, Tensor rows, int slots, int batch_dim) -> Tensor"
)
LIBRARY.define("remerged(Tensor weight, Tensor down, Tensor up, Tensor gates) -> Tensor")  # type: ignore[no-untyped-call]


def _eager(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a @ b.T + bias where nothing is compiled and autograd does not look."""
    onednn = ONEDNN and a.device.type == "cpu" and a.dtype == torch.float32
    return _onednn(a, b, bias) if onednn else F.linear(a, b, bias)


def pays(rows: int, weight: Tensor) -> bool:
    """Whether an update costs less on the weight (out, in) than on so many rows.

    By multiplications it is rank * out * in against rank * rows * (out + in). The new weight is also written and read again:
    on the CPUs measured (ViT-S and UNet sizes, rank 16) that doubles its price.
    """
    out, inner = weight.shape
    return rows * (out + inner) >= 2 * out * inner


def _lora(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: Tensor) -> Tensor:
    if pays(x.shape[0], weight):
        return _eager(x, added(weight, down, up, scale), bias)
    return _eager(x, weight, bias).addmm_(_eager(x, down).mul_(scale), up.t())


def _taken(down: Tensor, up: Tensor, take: list[float]) -> tuple[Tensor, Tensor, Tensor] | None:
    """down, up and gates of the slots that are taken, without the padding of their ranks; None where none is."""
    rank = down.shape[0] // len(take)
    parts = []
    for slot, weight in enumerate(take):
        if weight:  # NaN is taken too
            inner = down.narrow(0, slot * rank, rank)
            used = int(inner.any(1).nonzero().max()) + 1 if inner.any() else 1
            parts.append((inner[:used], up.narrow(1, slot * rank, used), down.new_full((used,), weight, dtype=GATES)))
    if len(parts) < 2:
        return parts[0] if parts else None
    downs, ups, gates = zip(*parts, strict=True)
    return torch.cat(downs), torch.cat(ups, 1), torch.cat(gates)


def _uniform(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, take: list[float]) -> Tensor:
    taken = _taken(down, up, take)
    return _eager(x, weight, bias) if taken is None else _lora(x, weight, bias, *taken)


def _bank(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, rows: Tensor, slots: int, batch_dim: int
) -> Tensor:
    flat, batch = x.flatten(0, -2), rows.shape[0]
    takes: list[list[float]] = rows[:, :: rows.shape[1] // slots].tolist()
    if not batch:
        return x.new_empty(*x.shape[:-1], weight.shape[0])
    shape = (*x.shape[:-1], weight.shape[0])
    if all(take == takes[0] for take in takes):
        return _uniform(flat, weight, bias, down, up, takes[0]).view(shape)
    if x.dim() < 2 or batch_dim < 0 or x.shape[batch_dim] % batch:  # no samples in it: what all of them take
        return (_eager(flat, weight, bias) + side(flat, down, up, rows, -1)).view(shape)
    if batch_dim:
        first = x.transpose(0, batch_dim)
        return _bank(first, weight, bias, down, up, rows, slots, 0).transpose(0, batch_dim).contiguous()
    y = _eager(flat, weight, bias)
    each, start = flat.shape[0] // batch, 0
    for take, same in itertools.groupby(takes):
        count = each * len(list(same))
        taken = _taken(down, up, take)
        if taken is not None:
            inner = _eager(flat.narrow(0, start, count), taken[0]).mul_(taken[2])
            y.narrow(0, start, count).addmm_(inner, taken[1].t())
        start += count
    return y.view(shape)


def _remerged(weight: Tensor, down: Tensor, up: Tensor, gates: Tensor) -> Tensor:
    take: list[float] = gates.tolist()
    if any(math.isnan(value) for value in take):
        raise ValueError(MIXED)
    taken = _taken(down, up, take)
    return weight.clone() if taken is None else added(weight, *taken)


LIBRARY.impl("lora", _lora, "CPU")  # type: ignore[no-untyped-call]
LIBRARY.impl("lora", lambda x, weight, *_: x.new_empty(x.shape[0], weight.shape[0]), "Meta")  # type: ignore[no-untyped-call]
LIBRARY.impl("bank", _bank, "CPU")  # type: ignore[no-untyped-call]
LIBRARY.impl("bank", lambda x, weight, *_: x.new_empty(*x.shape[:-1], weight.shape[0]), "Meta")  # type: ignore[no-untyped-call]
LIBRARY.impl("remerged", _remerged, "CPU")  # type: ignore[no-untyped-call]
LIBRARY.impl("remerged", lambda weight, *_: torch.empty_like(weight), "Meta")  # type: ignore[no-untyped-call]


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a @ b.T + bias, for a (rows, inner), b (columns, inner) and bias (columns,) of one dtype; autograd does not see it."""
    if ONEDNN and a.device.type == "cpu" and a.dtype == torch.float32 and torch.compiler.is_compiling():
        return torch.ops.fxplug.product(a, b, bias)  # type: ignore[no-any-return]
    return _eager(a, b, bias)


def plus(y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """y + a @ b.T, in y's memory where nothing is compiled: a compiler joins the sum with what follows."""
    return y + product(a, b) if torch.compiler.is_compiling() else y.addmm_(a, b.t())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, equal to it but for rounding: x (..., in), weight (out, in), bias (out,)."""
    x, weight, bias = _cast(x, weight, bias)
    if not _fits(x, weight) or torch.compiler.is_exporting():
        return F.linear(x, weight, bias)
    if not trains(x, weight, bias):
        return product(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], weight.shape[0])
    return _Linear.apply(x, weight, bias)  # type: ignore[no-any-return]


def lora_linear(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: Tensor) -> Tensor:
    """linear(x, weight, bias) + scale * linear(linear(x, down), up): what a layer and its `Lora` give together.

    x is (..., in), weight (out, in), bias (out,), down (rank, in), up (out, rank), scale one number.
    """
    x, weight, bias, down, up = _cast(x, weight, bias, down, up)
    if not _fits(x, weight, down, up) or torch.compiler.is_exporting():
        return F.linear(x, weight, bias) + side(x, down, up, scale)
    if trains(x, weight, bias, down, up):
        return _LoraLinear.apply(x, weight, bias, down, up, scale)  # type: ignore[no-any-return]
    flat = x.flatten(0, -2)
    if x.device.type == "cpu":
        call = torch.ops.fxplug.lora if torch.compiler.is_compiling() else _lora
        y = call(flat, weight, bias, down, up, scale)
    else:
        y = plus(product(flat, weight, bias), product(flat, down) * scale, up)
    return y.view(*x.shape[:-1], weight.shape[0])


def bank_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    rows: Tensor,
    slots: int,
    batch_dim: int = 0,
) -> Tensor:
    """What a layer and its `Lora` with slots give together: each sample gets the low-rank updates of the slots that it takes.

    x is (..., in) with the samples in dimension `batch_dim`, 0 or 1, -1 for none; weight (out, in), bias (out,),
    down (slots * rank, in), up (out, slots * rank), rows float32 (batch, slots * rank), a slot's weight repeated for its
    rank. On a CPU only slots with a weight cost time. The bank gets no gradient.
    """
    x, weight, bias, down, up = _cast(x, weight, bias, down, up)
    plain = torch.compiler.is_exporting() or trains(x, weight, bias, down, up) or not _fits(x, weight, down, up)
    if x.device.type == "cpu" and not plain:
        call = torch.ops.fxplug.bank if torch.compiler.is_compiling() else _bank
        return call(x, weight, bias, down, up, rows, slots, batch_dim)
    return torch.add(linear(x, weight, bias), side(x, down, up, rows, batch_dim))


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
        call = torch.ops.fxplug.remerged if torch.compiler.is_compiling() else _remerged
        return call(weight, down, up, gates)
    return added(weight, down, up, gates)


def trains(*tensors: Tensor | None) -> bool:
    """Whether autograd wants to see what is computed from these."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


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
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return product(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        flat = g.flatten(0, -2)
        gx = product(flat, weight.t()).view(*g.shape[:-1], weight.shape[1]) if ctx.needs_input_grad[0] else None
        return gx, *_base_gradients(ctx, x, flat)


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        hidden = product(flat, down) * scale
        ctx.save_for_backward(x, weight, down, up, scale, hidden)
        y = product(flat, weight, bias)
        return plus(y, hidden, up).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, down, up, scale, hidden = ctx.saved_tensors
        flat, rows = g.flatten(0, -2), x.flatten(0, -2)
        inner = product(flat, up.t()) * scale
        gx = None
        if ctx.needs_input_grad[0]:
            gx = plus(product(flat, weight.t()), inner, down.t()).view(x.shape)
        # (rank, out) and not (out, rank): a product reads its second factor in either layout at full speed
        return gx, *_base_gradients(ctx, x, flat), product(inner.t(), rows.t()), product(hidden.t(), flat.t()).t(), None


def _base_gradients(ctx: Any, x: Tensor | None, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Those of weight and bias, where they are trained."""
    weight = product(g.t(), x.flatten(0, -2).t()) if ctx.needs_input_grad[1] and x is not None else None
    return weight, g.sum(0) if ctx.needs_input_grad[2] else None


class _Remerged(torch.autograd.Function):
    """`_LoraLinear` by way of the weight: its gradients cost no matrix of the weight's size but the weight once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, gates: Tensor) -> Tensor:
        ctx.save_for_backward(x if any(ctx.needs_input_grad[1:5]) else None, weight, down, up, gates)
        y = product(x.flatten(0, -2), remerged(weight, down, up, gates), bias)
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, down, up, gates = ctx.saved_tensors
        flat, gx, gd, gu = g.flatten(0, -2), None, None, None
        if ctx.needs_input_grad[0]:
            gx = product(flat, remerged(weight, down, up, gates).t()).view(*g.shape[:-1], weight.shape[1])
        each = spread(gates, down.shape[0])
        if ctx.needs_input_grad[3]:
            inner = product(flat, up.t()) * each
            gd = product(inner.to(g.dtype).t(), x.flatten(0, -2).t())
        if ctx.needs_input_grad[4]:
            hidden = product(x.flatten(0, -2), down) * each
            gu = product(hidden.to(g.dtype).t(), flat.t()).t()
        return gx, *_base_gradients(ctx, x, flat), gd, gu, None


def remerged_linear(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, gates: Tensor) -> Tensor:
    """linear(x, remerged(weight, down, up, gates), bias), with gradients for all but the gates; x is (..., in)."""
    x, weight, bias, down, up = _cast(x, weight, bias, down, up)
    if not _fits(x, weight, down, up) or torch.compiler.is_exporting():
        return F.linear(x, added(weight, down, up, gates), bias)  # autograd sees all of it
    if trains(x, weight, bias, down, up):
        return _Remerged.apply(x, weight, bias, down, up, gates)  # type: ignore[no-any-return]
    y = product(x.flatten(0, -2), remerged(weight, down, up, gates), bias)
    return y.view(*x.shape[:-1], weight.shape[0])
