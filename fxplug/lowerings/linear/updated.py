"""Linear layers whose weight DoRA or LoKr maps: trained without the gradient of a whole weight.

The product is that of the changed weight, as the rewritten layer has it. What trains gets its gradient by the factors that it
is made of; that of the whole weight, which costs as much as the layer itself, is never there.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...blocks.low_rank import decompose, divide_by_norm, make_factor, make_kronecker
from . import library, operators
from .operators import Run

# --- the functions that stand in a graph

FACTORS = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")


@operators.make_operator("linear_with_dora")
def run_dora_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: Tensor, magnitude: Tensor,
    form: str = "fused",
) -> Tensor:  # fmt: skip
    """Compute linear(x, magnitude * V / |V|, bias) with V = weight + scale * up @ down, for x (..., in) and weight (out, in).

    down is (rank, in), up (out, rank), magnitude (out,). |V| is the norm of each output channel and gets no gradient (DoRA, Liu
    et al. 2024, arXiv 2402.09353, section 4.3).
    """
    way = _form_of_call(form, x, weight, bias, down, up, magnitude)
    if way == "stock":
        return F.linear(x, decompose(weight + scale * (up @ down), magnitude, 0, weight.dtype).to(weight.dtype), bias)
    x, bias = operators._cast(x, bias)  # the update itself is not
    traced = torch.compiler.is_compiling() or operators.is_training(x, bias, down, up, magnitude)
    return library.run_rows("dora", traced, x, weight, bias, down, up, scale, magnitude, way == "blas")


@operators.make_operator("linear_with_lokr")
def run_lokr_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, w1: Tensor | None, w1_a: Tensor | None,
    w1_b: Tensor | None, w2: Tensor | None, w2_a: Tensor | None, w2_b: Tensor | None, form: str = "fused",
) -> Tensor:  # fmt: skip
    """Compute linear(x, weight + scale * kron(w1, w2), bias) for x (..., in), weight (out, in); a factor is whole or a product.

    w1 is (a, c) and w2 (b, d) with a * b = out and c * d = in (LoKr, arXiv 2309.14859).
    """
    own = {n: t for n, t in zip(FACTORS, (w1, w1_a, w1_b, w2, w2_a, w2_b), strict=True) if t is not None}
    first, second = make_factor(own, "lokr_w1"), make_factor(own, "lokr_w2")
    way = _form_of_call(form, x, weight, bias, first, second)
    if way == "stock":
        return F.linear(x, (weight + scale * make_kronecker(first, second)).to(weight.dtype), bias)
    x, bias = operators._cast(x, bias)
    traced = torch.compiler.is_compiling() or operators.is_training(x, bias, first, second)
    return library.run_rows("lokr", traced, x, weight, bias, first, second, scale, way == "blas")


def _form_of_call(form: str, x: Tensor, weight: Tensor, *rest: Tensor | None) -> str:
    """Return the form of a call: `stock` if the base trains, and in an export."""
    library.check_values(x, weight, *rest)
    plain = torch.compiler.is_exporting() or x.dim() < 2 or not x.numel() or operators.is_training(weight)
    return "stock" if plain else operators._form(form, operators.is_training(x, *rest))


# --- their names in torch's library, and their gradients


def in_own_dtypes(run: Run) -> Run:
    """Run a function without autocast, which would also cache what is cast in it, without its gradient, for others."""

    @functools.wraps(run)
    def call(x: Tensor, *rest: Any) -> Any:
        if x.is_meta or not torch.is_autocast_enabled(x.device.type):
            return run(x, *rest)
        with torch.autocast(x.device.type, enabled=False):
            return run(x, *rest)

    return call  # type: ignore[return-value]


@in_own_dtypes
def dora(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: Tensor, magnitude: Tensor,
    blas: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute `run_dora_linear` for x (rows, in); return its result, the changed weight in x.dtype, the norms |V|."""
    changed = torch.addmm(weight.to(torch.promote_types(weight.dtype, up.dtype)), up * scale, down)
    norm = torch.linalg.vector_norm(changed.to(weight.dtype), dim=1)  # as the magnitudes of a new one were taken
    changed = (changed * divide_by_norm(magnitude.flatten(), norm)[:, None]).to(x.dtype)
    return library.multiply(x, changed, bias, blas), changed, norm


@in_own_dtypes
def lokr(
    x: Tensor, weight: Tensor, bias: Tensor | None, first: Tensor, second: Tensor, scale: Tensor, blas: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute `run_lokr_linear` for x (rows, in); return its result, and the changed weight in the dtype of x."""
    (a, c), (b, d) = first.shape, second.shape
    own, other = (first * scale)[:, None, :, None], second[:, None]
    changed = torch.addcmul(weight.reshape(a, b, c, d), own, other).view(weight.shape).to(x.dtype)
    return library.multiply(x, changed, bias, blas), changed


@in_own_dtypes
def magnitude_gradient(
    g: Tensor, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: Tensor,
    magnitude: Tensor, norm: Tensor,
) -> Tensor:  # fmt: skip
    """Return the gradient of magnitude, (out,), from the result y (rows, out), which is magnitude * (x @ V.T / norm) + bias."""
    own, wide = magnitude.flatten(), torch.promote_types(g.dtype, torch.float32)
    found, unclear = (g * y).sum(0, dtype=wide), own == 0  # channels of which the result says nothing, or mostly the bias
    if bias is not None:
        found -= bias * g.sum(0, dtype=wide)
        unclear |= bias.abs() > 2 * own.abs() * torch.linalg.vector_norm(x) * x.numel() ** -0.5
    found /= torch.where(own == 0, 1.0, own)
    if (rows := (unclear & (norm != 0)).nonzero().flatten()).numel():
        base = weight[rows].to(torch.promote_types(weight.dtype, up.dtype))
        direction = torch.addmm(base, up[rows] * scale, down) / norm[rows, None]
        found[rows] = ((g[:, rows].t() @ x) * direction.to(x.dtype)).sum(1).to(found.dtype)
    return torch.where(norm == 0, 0.0, found).reshape(magnitude.shape).to(magnitude.dtype)


def _differentiable(inputs: tuple[Any, ...], needs: tuple[bool, ...], whole: Tensor, g: Tensor) -> tuple[Tensor | None, ...]:
    """Return gradients that can be differentiated again, by torch's own operations on the whole weight."""
    x, *weights = inputs
    if x is None:  # which was not saved: no gradient depends on its values
        x = g.new_zeros(g.shape[0], whole.shape[1], requires_grad=needs[0])
    y = F.linear(x, whole.to(x.dtype), weights[1])
    wanted = [tensor for tensor, need in zip((x, *weights), needs, strict=False) if need]
    found = iter(torch.autograd.grad(y, wanted, g, create_graph=True))
    return tuple(next(found) if need else None for need in needs)


def _dora_backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    x, weight, bias, down, up, scale, magnitude, y, changed, norm = ctx.saved_tensors
    needs = ctx.needs_input_grad
    if torch.is_grad_enabled():
        whole = decompose(weight + scale * (up @ down), magnitude, 0, weight.dtype)
        return _differentiable((x, weight, bias, down, up, scale, magnitude), needs, whole, g)
    ratio = (divide_by_norm(magnitude.flatten(), norm) * scale).to(g.dtype)[:, None]
    gx = torch.ops.fxplug.product(g, changed.t(), None, ctx.blas) if needs[0] else None
    gd = ((g @ (up.to(g.dtype) * ratio)).t() @ x).to(down.dtype) if needs[3] else None
    gu = ((g.t() @ (x @ down.to(x.dtype).t())) * ratio).to(up.dtype) if needs[4] else None
    gm = torch.ops.fxplug.magnitude_gradient(g, y, x, weight, bias, down, up, scale, magnitude, norm) if needs[6] else None
    return gx, None, g.sum(0) if needs[2] else None, gd, gu, None, gm, None


def _lokr_backward(ctx: Any, g: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    """Return the gradients of both factors, each from the other one: as many multiplications as the layer has, over the sides
    of a factor."""
    x, weight, bias, first, second, scale, changed = ctx.saved_tensors
    if torch.is_grad_enabled():
        whole = weight + scale * make_kronecker(first, second)
        return _differentiable((x, weight, bias, first, second, scale), ctx.needs_input_grad, whole, g)
    needs, (a, c), (b, d), rows = ctx.needs_input_grad, first.shape, second.shape, g.shape[0]
    gx = g1 = g2 = None
    if needs[0]:
        gx = torch.ops.fxplug.product(g, changed.t(), None, ctx.blas)
    if needs[3]:
        hidden = (x.reshape(-1, d) @ second.to(x.dtype).t()).view(rows, c, b)
        g1 = (torch.bmm(g.reshape(rows, a, b), hidden.transpose(1, 2)).sum(0) * scale).to(first.dtype)
    if needs[4]:
        inner = torch.bmm(first.to(g.dtype).t().expand(rows, c, a), g.reshape(rows, a, b)).view(-1, b)
        g2 = ((inner.t() @ x.reshape(-1, d)) * scale).to(second.dtype)
    return gx, None, g.sum(0) if needs[2] else None, g1, g2, None, None


def _like(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape[0], len(weight)), x.new_empty(weight.shape)


library.define("dora", dora, lambda x, w, *_: (*_like(x, w), w.new_empty(len(w))), _dora_backward, keep_first=True)
library.define("lokr", lokr, _like, _lokr_backward)
library.define("magnitude_gradient", magnitude_gradient, lambda *given: torch.empty_like(given[8]))
