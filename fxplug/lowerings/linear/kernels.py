"""Linear layers with low-rank updates as Triton kernels, and as operators of torch's library.

    y[m] = x[m] @ weight.T + bias + (gate[m] * (x[m] @ down.T)) @ up.T

for x (rows, in), weight (out, in), bias (out,), down (slots * rank, in), up (out, slots * rank). `gates` is one number, or
(batch, slots * rank) as a bank's are: row m is of sample (m // tokens) % batch then, and a tile of rows none of which takes
anything of a slot spends no time on it. `shrink` makes the inner values, `expand` the result with the update in the product's
own accumulator; the gradient of x is the same two with the weights turned round. `merge` adds an update to a weight.

Only a form that asks for it imports this file; `devices.explain_unfit` says where it runs. TRITON_INTERPRET=1 runs it on a CPU.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from . import devices

INTERPRETED = tl.constexpr(devices.is_interpreted())
# what changes with the batch: a kernel is compiled once for all numbers of them
OPEN = ["M", "tokens", "batch"]


# --- kernels: M rows, N results, K inner values, R the rank; BM, BN, BK, BR of them at a time


@triton.jit
def _dot(a, b, total):
    """Return total + a @ b."""
    if INTERPRETED:  # which would multiply the bits of bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="tf32")


@triton.jit
def _gate(gates, m, M, tokens, batch, gb):
    """Return the gate of each of the rows m for the slot that `gates` points to."""
    return tl.load(gates + (m // tokens) % batch * gb, mask=m < M, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=OPEN)
def _shrink(
    x, down, hidden, gates, M, K, R, xm, xk, dr, dk, tokens, batch, gb, gr,
    BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute hidden[m, slot * R + r] = gate * sum over k of x[m, k] * down[slot * R + r, k]; zeros if no row uses the slot."""
    slot, m = tl.program_id(1), tl.program_id(0) * BM + tl.arange(0, BM)
    r, k = tl.arange(0, BR), tl.arange(0, BK)
    take = _gate(gates + slot * R * gr, m, M, tokens, batch, gb)
    total = tl.zeros((BM, BR), dtype=tl.float32)
    if tl.max((take != 0).to(tl.int32), 0) != 0:
        x_at = x + m[:, None].to(tl.int64) * xm + k[None, :] * xk
        d_at = down + (slot * R + r)[None, :].to(tl.int64) * dr + k[:, None] * dk
        for first in range(0, K, BK):
            a = tl.load(x_at, mask=(m[:, None] < M) & (k[None, :] < K - first), other=0.0)
            b = tl.load(d_at, mask=(r[None, :] < R) & (k[:, None] < K - first), other=0.0)
            total = _dot(a, b, total)
            x_at += BK * xk
            d_at += BK * dk
        total *= take[:, None]
    h_at = hidden + m[:, None].to(tl.int64) * (R * tl.num_programs(1)) + slot * R + r[None, :]
    tl.store(h_at, total.to(hidden.dtype.element_ty), mask=(m[:, None] < M) & (r[None, :] < R))


@triton.jit(do_not_specialize=OPEN)
def _expand(
    x, weight, bias, hidden, up, y, gates, M, N, K, R, slots, xm, xk, wn, wk, un, ur, tokens, batch, gb, gr,
    BIAS: tl.constexpr, WHOLE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Compute y = x @ weight.T + bias + hidden @ up.T; WHOLE: BK divides K."""
    # eight tiles of rows after each other read the same columns of a weight, while these lie in the cache
    programs, tiles = tl.cdiv(M, BM), tl.cdiv(N, BN)
    begin = tl.program_id(0) // (8 * tiles) * 8
    height = min(programs - begin, 8)
    m = (begin + tl.program_id(0) % (8 * tiles) % height) * BM + tl.arange(0, BM)
    n = tl.program_id(0) % (8 * tiles) // height * BN + tl.arange(0, BN)
    rows, columns, k = m[:, None] < M, n < N, tl.arange(0, BK)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for slot in range(0, slots):
        take = _gate(gates + slot * R * gr, m, M, tokens, batch, gb)
        if tl.max((take != 0).to(tl.int32), 0) != 0:
            for first in tl.range(0, R, BR, num_stages=1):  # all of a high rank at once takes more registers than there are
                r = first + tl.arange(0, BR)
                h_at = hidden + m[:, None].to(tl.int64) * (slots * R) + slot * R + r[None, :]
                u_at = up + n[None, :].to(tl.int64) * un + (slot * R + r)[:, None].to(tl.int64) * ur
                h = tl.load(h_at, mask=rows & (r[None, :] < R), other=0.0)
                acc = _dot(h, tl.load(u_at, mask=columns[None, :] & (r[:, None] < R), other=0.0), acc)
    x_at = x + m[:, None].to(tl.int64) * xm + k[None, :] * xk
    w_at = weight + n[None, :].to(tl.int64) * wn + k[:, None] * wk
    for first in range(0, K, BK):
        if WHOLE:
            a, b = tl.load(x_at, mask=rows, other=0.0), tl.load(w_at, mask=columns[None, :], other=0.0)
        else:
            a = tl.load(x_at, mask=rows & (k[None, :] < K - first), other=0.0)
            b = tl.load(w_at, mask=columns[None, :] & (k[:, None] < K - first), other=0.0)
        acc = _dot(a, b, acc)
        x_at += BK * xk
        w_at += BK * wk
    if BIAS:
        acc += tl.load(bias + n, mask=columns, other=0.0).to(tl.float32)[None, :]
    tl.store(y + m[:, None].to(tl.int64) * N + n[None, :], acc.to(y.dtype.element_ty), mask=rows & columns[None, :])


@triton.jit
def _merge(
    weight, down, up, out, gate, N, K, R, wn, wk, dr, dk, un, ur, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr
):
    """Compute out = weight + gate * up @ down, rounded once."""
    n, k, r = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1) * BK + tl.arange(0, BK), tl.arange(0, BR)
    inside = (n[:, None] < N) & (k[None, :] < K)
    u_at = up + n[:, None].to(tl.int64) * un + r[None, :] * ur
    d_at = down + r[:, None].to(tl.int64) * dr + k[None, :] * dk
    u = tl.load(u_at, mask=(n[:, None] < N) & (r[None, :] < R), other=0.0)
    d = tl.load(d_at, mask=(r[:, None] < R) & (k[None, :] < K), other=0.0)
    total = _dot(u, d, tl.zeros((BN, BK), dtype=tl.float32)) * tl.load(gate).to(tl.float32)
    total += tl.load(weight + n[:, None].to(tl.int64) * wn + k[None, :] * wk, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + n[:, None].to(tl.int64) * K + k[None, :], total.to(out.dtype.element_ty), mask=inside)


# --- launches, which torch's compilers take into their programs


def shrink(x: Tensor, down: Tensor, gates: Tensor, slots: int, tokens: int) -> Tensor:
    """Return gates * (x @ down.T): (rows, slots * rank)."""
    m, (width, k) = x.shape[0], down.shape  # the features of a weight are never open
    hidden, block, rows = x.new_empty(m, width), _block(width // slots), 32
    wrap_triton(_shrink)[(triton.cdiv(m, rows), slots)](
        x, down, hidden, gates, m, k, width // slots, *x.stride(), *down.stride(), *_gating(gates, tokens),
        BM=rows, BR=block, BK=(256 if block <= 32 else 128) // x.itemsize, num_warps=4, num_stages=4,
    )  # fmt: skip
    return hidden


def lora(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, gates: Tensor, slots: int, tokens: int
) -> tuple[Tensor, Tensor]:
    """Return x @ weight.T + bias + hidden @ up.T, and hidden, the result of `shrink`."""
    m, (n, k), width, hidden = x.shape[0], weight.shape, up.shape[1], shrink(x, down, gates, slots, tokens)
    y, tile = x.new_empty(m, n), devices.choose_tile(m, n, x.device, x.dtype)
    wrap_triton(_expand)[(triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n),)](
        x, weight, weight if bias is None else bias, hidden, up, y, gates, m, n, k, width // slots, slots,
        *x.stride(), *weight.stride(), *up.stride(), *_gating(gates, tokens), BIAS=bias is not None, WHOLE=k % tile.k == 0,
        BM=tile.m, BN=tile.n, BK=tile.k, BR=16, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y, hidden


def merge(weight: Tensor, down: Tensor, up: Tensor, gate: Tensor) -> Tensor:
    """Return weight + gate * up @ down, for a gate of one number."""
    (n, k), rank, out = weight.shape, down.shape[0], weight.new_empty(weight.shape)
    wrap_triton(_merge)[(triton.cdiv(n, 64), triton.cdiv(k, 128))](
        weight, down, up, out, gate, n, k, rank, *weight.stride(), *down.stride(), *up.stride(),
        BN=64, BK=128, BR=_block(rank), num_warps=4,
    )  # fmt: skip
    return out


def _block(rank: int) -> int:
    return int(max(16, triton.next_power_of_2(rank)))


def _gating(gates: Tensor, tokens: Any) -> tuple[Any, ...]:
    """Return a kernel's arguments for the gates: tokens, batch, and the strides, which are 0 for one number."""
    return (tokens, gates.shape[0], *gates.stride()) if gates.dim() else (1, 1, 0, 0)


# --- their names in torch's library, and their gradients


def _saves(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, down, up, gates, ctx.slots, ctx.tokens = inputs
    needs = ctx.needs_input_grad
    ctx.mark_non_differentiable(output[1])
    read, kept = needs[1] or needs[3] or needs[4], output[1] if needs[4] else None
    ctx.save_for_backward(x if read else None, weight, down, up, gates, kept)


def _gradients(ctx: Any, g: Tensor, _: Any) -> tuple[Any, ...]:
    """Compute the gradients; that of x uses the same kernels with transposed weights."""
    x, weight, down, up, gates, hidden = ctx.saved_tensors
    gx: Any = None
    inner: Any = None
    needs, rest = ctx.needs_input_grad, (gates, ctx.slots, ctx.tokens)
    if needs[0]:
        gx, inner = torch.ops.fxplug.triton_lora(g, weight.t(), None, up.t(), down.t(), *rest)
    elif needs[3]:
        inner = torch.ops.fxplug.triton_shrink(g, up.t(), *rest)
    if torch.is_grad_enabled():  # a gradient of this one goes through the inner values, too
        take = gates[torch.arange(len(g), device=g.device) // ctx.tokens % len(gates)] if gates.dim() else gates
        inner, hidden = ((a @ b * take).to(g.dtype) for a, b in ((g, up), (x, down.t())))
    gw, gb = g.t() @ x if needs[1] else None, g.sum(0) if needs[2] else None
    gd, gu = inner.t() @ x if needs[3] else None, g.t() @ hidden if needs[4] else None
    return gx, gw, gb, gd, gu, None, None, None


# not `library.define`: a compiler would not see the kernels inside of what that defines
triton_op("fxplug::triton_shrink", shrink, mutates_args=())
triton_op("fxplug::triton_lora", lora, mutates_args=())
triton_op("fxplug::triton_merge", merge, mutates_args=())
torch.library.register_autograd("fxplug::triton_lora", _gradients, setup_context=_saves)


def compute_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, gates: Tensor, slots: int = 1, batch_dim: int = 0
) -> Tensor:
    """Compute a layer and its update, for x (..., in) with the samples in dimension `batch_dim`, of one entry or several
    each."""
    tokens: Any = 1
    if gates.dim():
        tokens = x.shape[batch_dim] // gates.shape[0] * math.prod(x.shape[batch_dim + 1 : -1])
    y, _ = torch.ops.fxplug.triton_lora(x.flatten(0, -2), weight, bias, down, up, gates, slots, tokens)
    return y.view(*x.shape[:-1], len(weight))  # type: ignore[no-any-return]
