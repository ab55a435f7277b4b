"""Products that cost less than torch's own, as operators of `torch.library`: what a compiled graph calls.

On a CPU in float32 they go through oneDNN, where torch's linear goes through its BLAS, unless `blas` asks for that: which is
faster depends on the processor. The low-rank update is added to the base's fresh output in place, or, where the rows are many,
to the weight; that choice is made at each call, so that no number of rows is part of a compiled graph.

Compiled code is kept on disk by torch and calls these by name: one that is to mean something else gets another name.
"""

from __future__ import annotations

import itertools
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from ...blocks.low_rank import add_update, compute_update
from ...core.errors import SpecError
from ...core.torch_internals.tensors import onednn_linear

ONEDNN = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
GATES = torch.float32  # the dtype of what gates give
LIBRARY = torch.library.Library("fxplug", "FRAGMENT")  # type: ignore[no-untyped-call]
UPDATED = "Tensor x, Tensor weight, Tensor? bias, Tensor down, Tensor up"


def multiply(a: Tensor, b: Tensor, bias: Tensor | None = None, blas: bool = False) -> Tensor:
    """Compute a @ b.T + bias for a (rows, inner), b (columns, inner) and bias (columns,), unseen by autograd and compiler."""
    fits = ONEDNN and not blas and a.device.type == "cpu" and a.dtype == torch.float32
    if not fits or not (a.numel() and b.numel()):  # which oneDNN refuses
        return F.linear(a, b, bias)
    return onednn_linear(a, b, bias, "none", [], "")  # type: ignore[no-any-return]


def is_cheaper(rows: int, outer: int, inner: int) -> bool:
    """Return whether an update costs less on a weight (outer, inner) than on so many rows.

    In multiplications it is rank * outer * inner against rank * rows * (outer + inner). The new weight is also written and read
    again: on the CPUs measured (ViT-S and UNet sizes, rank 16) that doubles its cost.
    """
    return rows * (outer + inner) >= 2 * outer * inner


def compute_lora(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: Tensor, blas: bool = False
) -> Tensor:
    """Compute x @ (weight + scale * up @ down).T + bias, for x (rows, in), in the cheaper order."""
    if is_cheaper(x.shape[0], *weight.shape):
        return multiply(x, add_update(weight, down, up, scale), bias, blas)
    return multiply(x, weight, bias, blas).addmm_(multiply(x, down, None, blas).mul_(scale), up.t())


def lora_and_hidden(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    scale: Tensor,
    blas: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute `compute_lora` beside the weight, and its inner values scale * x @ down.T, (rows, rank), for gradients."""
    inner = multiply(x, down, None, blas).mul_(scale)
    return multiply(x, weight, bias, blas).addmm_(inner, up.t()), inner


def used_factors(down: Tensor, up: Tensor, take: list[float]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return down, up and gates of the slots in use, without the padding of their ranks; None if none is used."""
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


def compute_bank(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    rows: Tensor,
    slots: int,
    batch_dim: int,
    blas: bool = False,
) -> Tensor:
    """Compute `operators.run_bank_linear` without gradients and on a CPU."""
    flat, batch = x.flatten(0, -2), rows.shape[0]
    takes: list[list[float]] = rows[:, :: rows.shape[1] // slots].tolist()
    if not batch:
        return x.new_empty(*x.shape[:-1], weight.shape[0])
    shape = (*x.shape[:-1], weight.shape[0])
    if all(take == takes[0] for take in takes):
        used = used_factors(down, up, takes[0])
        found = multiply(flat, weight, bias, blas) if used is None else compute_lora(flat, weight, bias, *used, blas)
        return found.view(shape)
    if x.dim() < 2 or batch_dim < 0 or x.shape[batch_dim] % batch:  # no samples in it: what all of them take
        return (multiply(flat, weight, bias, blas) + compute_update(flat, down, up, rows, -1)).view(shape)
    if batch_dim:
        first = x.transpose(0, batch_dim)
        return compute_bank(first, weight, bias, down, up, rows, slots, 0, blas).transpose(0, batch_dim).contiguous()
    y = multiply(flat, weight, bias, blas)
    each, start = flat.shape[0] // batch, 0
    for take, same in itertools.groupby(takes):
        count = each * len(list(same))
        used = used_factors(down, up, take)
        if used is not None:
            inner = multiply(flat.narrow(0, start, count), used[0], None, blas).mul_(used[2])
            y.narrow(0, start, count).addmm_(inner, used[1].t())
        start += count
    return y.view(shape)


# --- their names in torch's library


def refuse_meta(x: Tensor, weight: Tensor) -> NoReturn:
    """Raise SpecError: the computation needs the values of a weight on the meta device."""
    raise SpecError(
        f"a fused layer reads a tensor {list(weight.shape)} on the meta device, which has no values, beside an input on "
        f"{x.device}: give the tensor its values (to_empty and load_state_dict), offload with accelerate, whose hooks bring "
        "them, or lower without fuse"
    )


def define(name: str, arguments: str, results: str, run: Any, like: Any) -> None:
    """Define an operator of torch's library; `like` computes its result on the meta device."""

    def on_meta(x: Tensor, *rest: Any) -> Any:
        if not x.is_meta:  # one of the others is: nothing that this gives would be filled
            refuse_meta(x, next(t for t in rest if isinstance(t, Tensor) and t.is_meta))
        return like(x, *rest)

    LIBRARY.define(f"{name}({arguments}) -> {results}")  # type: ignore[no-untyped-call]
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    LIBRARY.impl(name, on_meta, "Meta")  # type: ignore[no-untyped-call]


def _rows(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


# the compiler takes oneDNN's own operator only where the second factor is a constant
define("product", "Tensor a, Tensor b, Tensor? bias, bool blas=False", "Tensor", multiply, _rows)
define("lora", f"{UPDATED}, Tensor scale, bool blas=False", "Tensor", compute_lora, _rows)
define(
    "lora_and_hidden", f"{UPDATED}, Tensor scale, bool blas=False", "(Tensor, Tensor)", lora_and_hidden,
    lambda x, weight, bias, down, *_: (_rows(x, weight), _rows(x, down)),
)  # fmt: skip
define(
    "bank", f"{UPDATED}, Tensor rows, int slots, int batch_dim, bool blas=False", "Tensor", compute_bank,
    lambda x, weight, *_: x.new_empty(*x.shape[:-1], weight.shape[0]),
)  # fmt: skip


# --- their gradients


def _product_saves(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, _, ctx.blas = inputs
    ctx.save_for_backward(a if ctx.needs_input_grad[1] else None, b)


def _product_backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of a, b and the bias, if needed, for g (rows, columns)."""
    a, b = ctx.saved_tensors
    needs, product = ctx.needs_input_grad, torch.ops.fxplug.product
    ga = product(g, b.t(), None, ctx.blas) if needs[0] else None
    gb = product(g.t(), a.t(), None, ctx.blas) if needs[1] else None
    return ga, gb, g.sum(0) if needs[2] else None, None


def _lora_saves(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, down, up, scale, ctx.blas = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, down, up, scale, output[1])


def _lora_backward(ctx: Any, g: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    """Return the gradients of the first result, for g (rows, out): that of x is the same product with transposed weights."""
    x, weight, down, up, scale, hidden = ctx.saved_tensors
    needs, blas, product = ctx.needs_input_grad, ctx.blas, torch.ops.fxplug.product
    gx = inner = None
    if needs[0]:
        gx, inner = torch.ops.fxplug.lora_and_hidden(g, weight.t(), None, up.t(), down.t(), scale, blas)
    again = torch.is_grad_enabled()  # a gradient of this one goes through the inner values, too
    if again:
        hidden = product(x, down, None, blas) * scale
    if again or inner is None:
        inner = product(g, up.t(), None, blas) * scale
    gw = product(g.t(), x.t(), None, blas) if needs[1] else None
    # (rank, out) and not (out, rank): a product reads its second factor in either layout at full speed
    gd, gu = product(inner.t(), x.t(), None, blas), product(hidden.t(), g.t(), None, blas).t()
    return gx, gw, g.sum(0) if needs[2] else None, gd, gu, None, None


torch.library.register_autograd("fxplug::product", _product_backward, setup_context=_product_saves, lib=LIBRARY)
torch.library.register_autograd("fxplug::lora_and_hidden", _lora_backward, setup_context=_lora_saves, lib=LIBRARY)
