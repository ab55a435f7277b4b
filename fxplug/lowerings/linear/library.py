"""Products that cost less than torch's own, as operators of `torch.library`: what a compiled graph calls.

On a CPU in float32 they go through oneDNN, where torch's linear goes through its BLAS, unless `blas` asks for that: which is
faster depends on the processor. The low-rank update is added to the base's fresh output in place, or, where the rows are many,
to the weight; that choice is made at each call, so that no number of rows is part of a compiled graph.

Compiled code is kept on disk by torch and calls these by name: one that is to mean something else gets another name.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...blocks.low_rank import add_update, compute_update
from ...core.errors import SpecError
from ...core.torch_internals.tensors import onednn_linear

ONEDNN = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
FEW = 1 << 22  # multiplications for a sample's updates by all slots, below which to leave some out takes longer
LIBRARY = torch.library.Library("fxplug", "FRAGMENT")  # type: ignore[no-untyped-call]
RUNS: dict[str, Any] = {}  # what operators compute, by their names


def multiply(a: Tensor, b: Tensor, bias: Tensor | None, blas: bool = False) -> Tensor:
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
    return lora_and_hidden(x, weight, bias, down, up, scale, blas)[0]


def lora_and_hidden(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: Tensor, blas: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute `compute_lora` beside the weight, and its inner values scale * x @ down.T, (rows, rank), for gradients."""
    y, inner = multiply(x, weight, bias, blas), multiply(x, down, None, blas).mul_(scale)
    return y.addmm_(inner, up.t()), inner


def list_channels(down: Tensor, takes: list[list[float]]) -> list[list[int]]:
    """Return the inner channels that each of these samples needs: of its slots those that are not zero, as the padding is."""
    rank, known = down.shape[0] // len(takes[0]), dict[int, list[int]]()
    for slot, weights in enumerate(zip(*takes, strict=True)):
        if any(weights):  # NaN is taken too, and what it or infinity is multiplied by
            some = down.narrow(0, slot * rank, rank).abs().amax(1).tolist() if math.isfinite(sum(weights)) else [1] * rank
            known[slot] = [slot * rank + i for i in range(rank) if some[i]]
    return [[i for slot, weight in enumerate(take) if weight for i in known[slot]] for take in takes]


def take_channels(which: list[int], down: Tensor, up: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return down, up and gates of these inner channels: views of them if they follow each other."""
    first, count = which[0], len(which)
    if which[-1] - first == count - 1:
        return down.narrow(0, first, count), up.narrow(1, first, count), gates.narrow(0, first, count)
    index = torch.tensor(which)
    return down[index], up[:, index], gates[index]


def compute_bank(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, rows: Tensor, slots: int, batch_dim: int,
    blas: bool = False,
) -> Tensor:  # fmt: skip
    """Compute `operators.run_bank_linear` without gradients and on a CPU."""
    flat, batch, shape = x.flatten(0, -2), rows.shape[0], (*x.shape[:-1], weight.shape[0])
    takes: list[list[float]] = rows[:, :: rows.shape[1] // slots].tolist()
    if batch and all(take == takes[0] for take in takes):
        (which,) = list_channels(down, takes[:1])
        if not which:
            return multiply(flat, weight, bias, blas).view(shape)
        return compute_lora(flat, weight, bias, *take_channels(which, down, up, rows[0]), blas).view(shape)
    if not batch or x.dim() < 2 or batch_dim < 0 or x.shape[batch_dim] % batch:  # no samples in it: what all of them take
        return (multiply(flat, weight, bias, blas) + compute_update(flat, down, up, rows, -1)).view(shape)
    if batch_dim:
        first = x.transpose(0, batch_dim)
        return compute_bank(first, weight, bias, down, up, rows, slots, 0, blas).transpose(0, batch_dim).contiguous()
    y, each, start = multiply(flat, weight, bias, blas), flat.shape[0] // batch, 0
    if each * down.shape[0] * sum(weight.shape) < FEW:
        inner = multiply(flat, down, None, blas)
        inner.view(batch, each, -1).mul_(rows[:, None])
        return y.addmm_(inner, up.t()).view(shape)
    samples = zip(takes, list_channels(down, takes), rows.unbind(), strict=True)
    for _, alike in itertools.groupby(samples, key=lambda sample: sample[0]):
        (_, which, gates), *others = alike
        count = each * (1 + len(others))
        if which:
            own, outer, gates = take_channels(which, down, up, gates)
            inner = multiply(flat.narrow(0, start, count), own, None, blas).mul_(gates)
            y.narrow(0, start, count).addmm_(inner, outer.t())
        start += count
    return y.view(shape)


# --- their names in torch's library, and their gradients


def check_values(x: Tensor, *weights: Tensor | None) -> None:
    """Raise SpecError for a weight on the meta device where the input has values, which the computation needs."""
    weight = None if x.is_meta else next((each for each in weights if each is not None and each.is_meta), None)
    if weight is not None:
        raise SpecError(
            f"a fused layer reads a tensor {list(weight.shape)} on the meta device, which has no values, beside an input on "
            f"{x.device}: give the tensor its values (to_empty and load_state_dict), offload with accelerate, whose hooks "
            "bring them, or lower without fuse"
        )


def define(name: str, run: Any, like: Any, backward: Any = None, keep_first: bool = False) -> None:
    """Define an operator of torch's library by a function, whose annotations are its schema.

    `like` computes its results on the meta device, `backward` the gradients from that of the first result. Saved are all
    arguments, but the input only if a weight trains, and all results, but the first only with `keep_first`; the bias, which
    stands behind the weight, with that or if it trains.
    """

    def on_meta(x: Tensor, *rest: Any) -> Any:
        check_values(x, *(each for each in rest if isinstance(each, Tensor)))  # nothing that `like` gives would be filled
        return like(x, *rest)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        (x, *weights, ctx.blas), results = inputs, output if isinstance(output, tuple) else (output,)
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)  # zeros for a weight are a pass over it
        reads = any(need for i, need in enumerate(ctx.needs_input_grad) if i not in (0, 2))
        if not (keep_first or ctx.needs_input_grad[2]):  # a bias that stays may be written before the backward pass
            weights[1] = None
        ctx.save_for_backward(x if reads else None, *weights, *results[not keep_first :])

    RUNS[name] = run
    LIBRARY.define(name + torch.library.infer_schema(run, mutates_args=()))  # type: ignore[no-untyped-call]
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    LIBRARY.impl(name, on_meta, "Meta")  # type: ignore[no-untyped-call]
    if backward is not None:
        torch.library.register_autograd(f"fxplug::{name}", backward, setup_context=save, lib=LIBRARY)


def run_rows(name: str, traced: bool, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """Return what an operator gives first for the rows of x (..., in): (..., out).

    `traced` is whether autograd or a compiler must see the operator; its function alone takes less time.
    """
    found = (getattr(torch.ops.fxplug, name) if traced else RUNS[name])(x.flatten(0, -2), weight, *rest)
    y: Tensor = found if isinstance(found, Tensor) else found[0]
    return y.view(*x.shape[:-1], weight.shape[0])


def _rows(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _product_backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of a, b and the bias, if needed, for g (rows, columns)."""
    a, b, _ = ctx.saved_tensors
    needs, product = ctx.needs_input_grad, torch.ops.fxplug.product
    ga = product(g, b.t(), None, ctx.blas) if needs[0] else None
    gb = product(g.t(), a.t(), None, ctx.blas) if needs[1] else None
    return ga, gb, g.sum(0) if needs[2] else None, None


def _lora_backward(ctx: Any, g: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    """Return the gradients of the first result, for g (rows, out): that of x is the same product with transposed weights."""
    x, weight, _, down, up, scale, hidden = ctx.saved_tensors
    needs, blas, product = ctx.needs_input_grad, ctx.blas, torch.ops.fxplug.product
    gx = inner = gd = gu = None
    if needs[0]:
        gx, inner = torch.ops.fxplug.lora_and_hidden(g, weight.t(), None, up.t(), down.t(), scale, blas)
    again = torch.is_grad_enabled()  # a gradient of this one goes through the inner values, too
    if needs[3]:
        inner = product(g, up.t(), None, blas) * scale if again or inner is None else inner
        gd = product(inner.t(), x.t(), None, blas)
    if needs[4]:
        hidden = product(x, down, None, blas) * scale if again else hidden
        gu = product(hidden.t(), g.t(), None, blas).t()  # (rank, out): a product reads its second factor in either layout
    gw = product(g.t(), x.t(), None, blas) if needs[1] else None
    return gx, gw, g.sum(0) if needs[2] else None, gd, gu, None, None


# the compiler takes oneDNN's own operator only where the second factor is a constant
define("product", multiply, _rows, _product_backward)
define("lora", compute_lora, _rows)
define("lora_and_hidden", lora_and_hidden, lambda x, weight, bias, down, *_: (_rows(x, weight), _rows(x, down)), _lora_backward)
define("bank", compute_bank, lambda x, weight, *_: x.new_empty(*x.shape[:-1], weight.shape[0]))
