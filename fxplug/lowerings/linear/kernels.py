"""Triton kernels as operators: a linear layer with low-rank updates that each sample takes, and weights that are made anew.

Each is a `torch.library` operator with a fake implementation, one for CPUs in torch's own functions, and gradients, so that
it stands in a compiled or exported graph as one node; the compiler takes the kernels of `linear` and of the weights into its
own program. Without triton, on other devices and for what a kernel does not fit (`fits`), the operators compute the same by
torch's functions.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...low_rank import gated, kronecker, side, spread

try:
    import triton
    import triton.language as tl
except ImportError:  # torch comes without it on some systems
    triton = None

# what a program computes: rows, columns, and how many inner values at a time; and its warps and stages
TILES = [(128, 128, 64, 8, 3), (128, 256, 64, 8, 3), (64, 128, 64, 4, 4), (64, 64, 32, 4, 4)]
WIDEST = 256  # the most inner channels of one slot
FLOATS = (torch.bfloat16, torch.float16, torch.float32)

AVAILABLE = triton is not None
INTERPRETED = triton is not None and triton.knobs.runtime.interpret  # TRITON_INTERPRET=1: kernels run on a CPU, slowly
wrap_triton: Any = (lambda kernel: kernel) if INTERPRETED else torch.library.wrap_triton  # so that the compiler sees it

if triton is not None:
    INTERPRETER = tl.constexpr(INTERPRETED)

    @triton.jit
    def _dot(a, b, PRECISION: tl.constexpr):
        """a @ b in float32."""
        if INTERPRETER:  # which multiplies the bits of bfloat16
            a, b = a.to(tl.float32), b.to(tl.float32)
        return tl.dot(a, b, input_precision=PRECISION)

    @triton.jit
    def _shrink(
        x, down, take, hidden, tokens, inner, slots, rank,
        xb, xt, xk, dr, dk,
        BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """hidden[b, t, s * rank + r] = take[b, s] * sum over k of x[b, t, k] * down[s * rank + r, k], where take is not 0."""
        tiles = tl.cdiv(tokens, BM)
        sample, slot = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(1)
        weight = tl.load(take + sample * slots + slot)
        if weight != 0:
            t = (tl.program_id(0) % tiles) * BM + tl.arange(0, BM)
            r, k = tl.arange(0, BR), tl.arange(0, BK)
            rows, columns = t < tokens, r < rank
            x_at = x + sample * xb + t[:, None].to(tl.int64) * xt + k[None, :] * xk
            d_at = down + (slot * rank + r)[None, :].to(tl.int64) * dr + k[:, None] * dk
            total = tl.zeros((BM, BR), dtype=tl.float32)
            for first in range(0, inner, BK):
                left = inner - first
                a = tl.load(x_at, mask=rows[:, None] & (k[None, :] < left), other=0.0)
                b = tl.load(d_at, mask=columns[None, :] & (k[:, None] < left), other=0.0)
                total += _dot(a, b, PRECISION)
                x_at += BK * xk
                d_at += BK * dk
            width = slots * rank
            h_at = hidden + (sample * tokens + t[:, None]) * width + slot * rank + r[None, :]
            tl.store(h_at, (total * weight).to(hidden.dtype.element_ty), mask=rows[:, None] & columns[None, :])

    @triton.jit
    def _expand(
        x, weight, bias, hidden, up, take, y, tokens, inner, outer, slots, rank,
        xb, xt, xk, wn, wk, un, ur,
        BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
        WHOLE: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """y[b] = x[b] @ weight.T + bias, and of each slot that sample b takes, hidden[b] @ up.T; WHOLE: BK divides inner."""
        tiles_t, tiles_n = tl.cdiv(tokens, BM), tl.cdiv(outer, BN)
        tiles_m = (tl.num_programs(0) // (tiles_t * tiles_n)) * tiles_t
        # eight tiles of rows share the weight's columns while they lie in the cache
        group = 8 * tiles_n
        first_m = (tl.program_id(0) // group) * 8
        high = min(tiles_m - first_m, 8)
        m = first_m + (tl.program_id(0) % group) % high
        n = ((tl.program_id(0) % group) // high) * BN + tl.arange(0, BN)
        sample = (m // tiles_t).to(tl.int64)
        t = (m % tiles_t) * BM + tl.arange(0, BM)
        k, r = tl.arange(0, BK), tl.arange(0, BR)
        rows, columns = t < tokens, n < outer
        x_at = x + sample * xb + t[:, None].to(tl.int64) * xt + k[None, :] * xk
        w_at = weight + n[None, :].to(tl.int64) * wn + k[:, None] * wk
        total = tl.zeros((BM, BN), dtype=tl.float32)
        for first in range(0, inner, BK):
            if WHOLE:
                a = tl.load(x_at, mask=rows[:, None], other=0.0)
                b = tl.load(w_at, mask=columns[None, :], other=0.0)
            else:
                a = tl.load(x_at, mask=rows[:, None] & (k[None, :] < inner - first), other=0.0)
                b = tl.load(w_at, mask=columns[None, :] & (k[:, None] < inner - first), other=0.0)
            total += _dot(a, b, PRECISION)
            x_at += BK * xk
            w_at += BK * wk
        width = slots * rank
        for slot in range(0, slots):
            if tl.load(take + sample * slots + slot) != 0:
                h_at = hidden + (sample * tokens + t[:, None]) * width + slot * rank + r[None, :]
                u_at = up + n[None, :].to(tl.int64) * un + (slot * rank + r)[:, None] * ur
                a = tl.load(h_at, mask=rows[:, None] & (r[None, :] < rank), other=0.0)
                b = tl.load(u_at, mask=columns[None, :] & (r[:, None] < rank), other=0.0)
                total += _dot(a, b, PRECISION)
        if BIAS:
            total += tl.load(bias + n, mask=columns, other=0.0).to(tl.float32)[None, :]
        y_at = y + (sample * tokens + t[:, None]) * outer + n[None, :]
        tl.store(y_at, total.to(y.dtype.element_ty), mask=rows[:, None] & columns[None, :])

    @triton.jit
    def _hadamard(
        value, a1, b1, a2, b2, take, out, outer, inner, slots, rank,
        BO: tl.constexpr, BI: tl.constexpr, BR: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """out = value + sum over slots of take[s] * (a1[s] @ b1[s]) * (a2[s] @ b2[s])."""
        o, i, r = tl.program_id(0) * BO + tl.arange(0, BO), tl.program_id(1) * BI + tl.arange(0, BI), tl.arange(0, BR)
        inside = (o[:, None] < outer) & (i[None, :] < inner)
        at = o[:, None].to(tl.int64) * inner + i[None, :]
        total = tl.load(value + at, mask=inside, other=0.0).to(tl.float32)
        left, right = (o[:, None] < outer) & (r[None, :] < rank), (r[:, None] < rank) & (i[None, :] < inner)
        for slot in range(0, slots):
            weight = tl.load(take + slot)
            if weight != 0:
                a_at = (slot * outer + o[:, None]).to(tl.int64) * rank + r[None, :]
                b_at = (slot * rank + r[:, None]).to(tl.int64) * inner + i[None, :]
                one, two = tl.load(a1 + a_at, mask=left, other=0.0), tl.load(b1 + b_at, mask=right, other=0.0)
                first = _dot(one, two, PRECISION)
                one, two = tl.load(a2 + a_at, mask=left, other=0.0), tl.load(b2 + b_at, mask=right, other=0.0)
                total += weight * first * _dot(one, two, PRECISION)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _kronecker(
        value, w1, w2, take, out, a, b, c, d, slots, BO: tl.constexpr, BI: tl.constexpr,
    ):  # fmt: skip
        """out = value + sum over slots of take[s] * kron(w1[s], w2[s]), for w1 (slots, a, b) and w2 (slots, c, d)."""
        o, i = tl.program_id(0) * BO + tl.arange(0, BO), tl.program_id(1) * BI + tl.arange(0, BI)
        inside = (o[:, None] < a * c) & (i[None, :] < b * d)
        at = o[:, None].to(tl.int64) * (b * d) + i[None, :]
        total = tl.load(value + at, mask=inside, other=0.0).to(tl.float32)
        for slot in range(0, slots):
            weight = tl.load(take + slot)
            if weight != 0:
                one = tl.load(w1 + (slot * a + o[:, None] // c) * b + i[None, :] // d, mask=inside, other=0.0)
                two = tl.load(w2 + (slot * c + o[:, None] % c).to(tl.int64) * d + i[None, :] % d, mask=inside, other=0.0)
                total += weight * one.to(tl.float32) * two.to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def fits(*tensors: Tensor | None, rank: int = 1) -> bool:
    """Whether a kernel takes such tensors: on a GPU that triton compiles for, of one dtype of `FLOATS`."""
    given = [t for t in tensors if t is not None]
    alike = all(t.dtype == given[0].dtype and (t.is_cuda or INTERPRETED) for t in given)
    return triton is not None and alike and given[0].dtype in FLOATS and rank <= WIDEST


def _precision(x: Tensor) -> str:
    return "tf32" if x.dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _block(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


# --- a linear layer with a bank of updates


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, take: Tensor, tile: int
) -> Tensor:
    (batch, tokens, inner), outer, slots = x.shape, weight.shape[0], take.shape[1]
    y = x.new_empty(batch, tokens, outer)
    if not y.numel():
        return y
    rank, take, bias = down.shape[0] // slots, take.contiguous(), None if bias is None else bias.contiguous()
    hidden = x.new_empty(batch, tokens, down.shape[0])
    bm, bn, bk, warps, stages = TILES[tile]
    sizes: dict[str, Any] = {"BR": _block(rank), "BK": bk, "PRECISION": _precision(x)}
    wrap_triton(_shrink)[(batch * triton.cdiv(tokens, 64), slots)](
        x, down, take, hidden, tokens, inner, slots, rank, *x.stride(), *down.stride(), BM=64, **sizes, num_warps=4
    )
    wrap_triton(_expand)[(batch * triton.cdiv(tokens, bm) * triton.cdiv(outer, bn),)](
        x, weight, weight if bias is None else bias, hidden, up, take, y, tokens, inner, outer, slots, rank, *x.stride(),
        *weight.stride(), *up.stride(), BIAS=bias is not None, BM=bm, BN=bn, WHOLE=inner % bk == 0, **sizes,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


def _linear_plain(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, take: Tensor, tile: int
) -> Tensor:
    return F.linear(x, weight, bias) + side(x, down, up, spread(take, down.shape[0]))


def _linear_saves(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, down, up, take, ctx.tile = inputs
    ctx.save_for_backward(x if any(ctx.needs_input_grad[n] for n in (1, 3, 4)) else None, weight, down, up, take)


def _linear_gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, down, up, take = ctx.saved_tensors
    needs, flat = ctx.needs_input_grad, g.flatten(0, 1)
    gx = linear(g, weight.t(), None, up.t(), down.t(), take, ctx.tile) if needs[0] else None
    gw = flat.t() @ x.flatten(0, 1) if needs[1] else None
    rows = spread(take, down.shape[0])
    gd = gated(g @ up, rows).flatten(0, 1).t() @ x.flatten(0, 1) if needs[3] else None
    gu = flat.t() @ gated(x @ down.t(), rows).flatten(0, 1) if needs[4] else None
    return gx, gw, flat.sum(0) if needs[2] else None, gd, gu, None, None


# --- weights


def _loha(value: Tensor, a1: Tensor, b1: Tensor, a2: Tensor, b2: Tensor, take: Tensor) -> Tensor:
    out, (outer, inner), (slots, _, rank) = _like(value), value.shape, a1.shape
    if out.numel():
        given = [t.contiguous() for t in (value, a1, b1, a2, b2, take)]
        sizes = {"BO": 64, "BI": 64, "BR": _block(rank), "PRECISION": _precision(value)}
        grid = triton.cdiv(outer, 64), triton.cdiv(inner, 64)
        wrap_triton(_hadamard)[grid](*given, out, outer, inner, slots, rank, **sizes)
    return out


def _loha_plain(value: Tensor, a1: Tensor, b1: Tensor, a2: Tensor, b2: Tensor, take: Tensor) -> Tensor:
    return (value + (take.view(-1, 1, 1) * (a1 @ b1) * (a2 @ b2)).sum(0)).to(value.dtype)


def _loha_saves(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _loha_gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    a1, b1, a2, b2, take = ctx.saved_tensors
    scaled, found = (take.view(-1, 1, 1) * g).to(g.dtype), []
    for a, b, other in ((a1, b1, (a2, b2)), (a2, b2, (a1, b1))):
        inside = scaled * (other[0] @ other[1])
        found += [inside @ b.mT, a.mT @ inside]
    return g, *found, None


def _lokr(value: Tensor, w1: Tensor, w2: Tensor, take: Tensor) -> Tensor:
    (outer, inner), out = value.shape, _like(value)
    if out.numel():
        given = [t.contiguous() for t in (value, w1, w2, take)]
        sizes = (*w1.shape[1:], *w2.shape[1:], w1.shape[0])
        wrap_triton(_kronecker)[(triton.cdiv(outer, 32), triton.cdiv(inner, 128))](*given, out, *sizes, BO=32, BI=128)
    return out


def _lokr_plain(value: Tensor, w1: Tensor, w2: Tensor, take: Tensor) -> Tensor:
    return (value + (take.view(-1, 1, 1) * kronecker(w1, w2)).sum(0)).to(value.dtype)


def _lokr_saves(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _lokr_gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    w1, w2, take = ctx.saved_tensors
    scaled = (take.view(-1, 1, 1) * g).to(g.dtype).view(-1, w1.shape[1], w2.shape[1], w1.shape[2], w2.shape[2])
    return g, torch.einsum("sacbd,scd->sab", scaled, w2), torch.einsum("sacbd,sab->scd", scaled, w1), None


# --- the operators


def _operator(name: str, kernel: Any, plain: Any, fake: Any, saves: Any, gradients: Any) -> Callable[..., Tensor]:
    """fxplug::name, with the kernel where it can run and torch's functions elsewhere, in a compiled graph as well."""
    given = list(inspect.signature(kernel).parameters).index("take")

    def run(*args: Any) -> Any:
        width = args[1].shape[-1] if name == "loha" else 1
        width = args[3].shape[0] // args[given].shape[-1] if name == "linear_of_bank" else width
        return (kernel if fits(*args[:given], rank=width) else plain)(*args)

    run.__signature__ = inspect.signature(kernel)  # type: ignore[attr-defined]  # which torch reads the schema from
    make: Any = torch.library.custom_op if triton is None else torch.library.triton_op
    operator: Any = make(f"fxplug::{name}", run, mutates_args=())
    operator.register_fake(fake)
    operator.register_autograd(gradients, setup_context=saves)
    return operator  # type: ignore[no-any-return]


def _like(value: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


def _outputs(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


linear = _operator("linear_of_bank", _linear, _linear_plain, _outputs, _linear_saves, _linear_gradients)
loha = _operator("loha", _loha, _loha_plain, _like, _loha_saves, _loha_gradients)
lokr = _operator("lokr", _lokr, _lokr_plain, _like, _lokr_saves, _lokr_gradients)
