"""Products of a training step that cost less than autograd's own: a linear layer, and one with its low-rank update.

On a CPU in float32 they go through oneDNN, where torch's linear goes through its BLAS: MKL leaves AVX-512 unused on CPUs of
other makers. Everywhere, the low-rank update is added to the base's fresh output, and its gradient to the base's, in place.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

ONEDNN = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
LIBRARY = torch.library.Library("fxplug", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define("product(Tensor a, Tensor b, Tensor? bias) -> Tensor")  # type: ignore[no-untyped-call]


def _onednn(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    if not (a.numel() and b.numel()):  # which oneDNN refuses
        return F.linear(a, b, bias)
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")  # type: ignore[no-any-return]


# the compiler takes oneDNN's own operator only where the second factor is a constant
LIBRARY.impl("product", _onednn, "CPU")  # type: ignore[no-untyped-call]
LIBRARY.impl("product", lambda a, b, bias: a.new_empty(a.shape[0], b.shape[0]), "Meta")  # type: ignore[no-untyped-call]


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a @ b.T + bias, for a (rows, inner), b (columns, inner) and bias (columns,) of one dtype; autograd does not see it."""
    if ONEDNN and a.device.type == "cpu" and a.dtype == torch.float32:
        compiling = torch.compiler.is_compiling()
        return torch.ops.fxplug.product(a, b, bias) if compiling else _onednn(a, b, bias)
    return F.linear(a, b, bias)


def plus(y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """y + a @ b.T, in y's memory where nothing is compiled: a compiler joins the sum with what follows."""
    return y + product(a, b) if torch.compiler.is_compiling() else y.addmm_(a, b.t())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, equal to it but for rounding: x (..., in), weight (out, in), bias (out,)."""
    x, weight, bias = _cast(x, weight, bias)
    if not _fits(x, weight) or torch.compiler.is_exporting():
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias)  # type: ignore[no-any-return]


def lora_linear(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: Tensor) -> Tensor:
    """linear(x, weight, bias) + scale * linear(linear(x, down), up): what a layer and its `Lora` give together.

    x is (..., in), weight (out, in), bias (out,), down (rank, in), up (out, rank), scale one number.
    """
    x, weight, bias, down, up = _cast(x, weight, bias, down, up)
    if not _fits(x, weight, down, up) or torch.compiler.is_exporting():
        return F.linear(x, weight, bias) + F.linear(F.linear(x, down) * scale, up)
    return _LoraLinear.apply(x, weight, bias, down, up, scale)  # type: ignore[no-any-return]


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
