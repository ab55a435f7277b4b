"""Random linear layers with an update, in each form: results and gradients beside those in float64.

Drawn are shapes (empty ones, too), ranks, dtypes, strides, slots and how samples take them, which tensors train, autocast, and
whether a compiler has to make one program for two batches in which samples take other slots.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import _config as shapes

from fxplug.lowerings.linear import operators, updated
from fxplug.lowerings.linear.forms import FORMS

COST = 5
LIMITS = {torch.float32: 4e-7, torch.float16: 5e-4, torch.bfloat16: 4e-3}  # of the relative Frobenius error
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "linear": operators.run_linear, "lora": operators.run_lora_linear, "bank": operators.run_bank_linear,
    "dora": updated.run_dora_linear, "lokr": updated.run_lokr_linear,
}  # fmt: skip


def with_strides(pick: random.Random, tensor: Tensor) -> Tensor:
    """The same values, as a view of other memory."""
    way = pick.randrange(4)
    if way == 1 and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if way == 2:
        return torch.stack([tensor, tensor + 1], -1)[..., 0]
    return tensor.repeat(2, *[1] * (tensor.dim() - 1))[: len(tensor)] if way == 3 else tensor


def draw_gates(pick: random.Random, batch: int, slots: int, rank: int) -> Tensor:
    """What samples take of slots: (batch, slots * rank)."""
    way, values = pick.randrange(4), [0.0, 0.0, 1.0, 0.5, -2.0]
    each = [[pick.choice(values) * (way > 0) for _ in range(slots)] for _ in range(batch)]
    each = each[:1] * batch if way == 1 else sorted(each) if way == 2 else each  # all alike, or in groups
    return torch.tensor(each).view(batch, slots).repeat_interleave(rank, 1)


def draw(pick: random.Random) -> tuple[str, list[Tensor | None], list[Any], int]:
    """A function, its tensors in float64 of which the last ones do not train, its other arguments, and how many train."""
    draws = torch.Generator().manual_seed(pick.randrange(1 << 30))
    kind = pick.choice(["linear", "lora", "lora", "bank", "bank", "bank", "dora", "lokr"])
    sizes = [0, 1, 1, 2, 2, 3, 4, 4, 6, 17, 40]
    inner, outer, rank, slots = pick.choice([1, 8, 33, 60]), pick.choice([1, 7, 32, 60]), pick.randint(1, 9), pick.randint(1, 4)
    lead = [pick.choice(sizes) for _ in range(pick.choice([0, 1, 1, 2, 2, 2, 3]))]

    def new(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=draws, dtype=torch.float64) * (shape[-1] if len(shape) > 1 else 4) ** -0.5
        return with_strides(pick, values.bfloat16().double())  # values that each dtype has

    x, weight = new(*lead, inner), new(outer, inner)
    bias = new(outer) if pick.random() < 0.6 else None
    scale = torch.tensor(pick.choice([0.0, 1.0, 0.5, -3.0]))
    if kind == "linear":
        return kind, [x, weight, bias], [], 3
    if kind == "lokr":
        (a, c), (b, d) = ([pick.choice([n for n in range(1, size + 1) if size % n == 0])] * 2 for size in (outer, inner))
        whole = pick.random() < 0.5
        second = [new(outer // a, inner // b), None, None] if whole else [None, new(outer // a, rank), new(rank, inner // b)]
        return kind, [x, weight, bias, scale, new(a, c if c == b else b), None, None, *second], [], 10
    width = rank * (slots if kind == "bank" else 1)
    down, up = new(width, inner), new(outer, width)
    for channel in range(width):  # as the padding of a rank
        if pick.random() < 0.2:
            down[channel] = 0
    if kind == "dora":
        magnitude = new(outer)
        weight[0], up[0] = weight[0] * (keeps := pick.random() < 0.8), up[0] * keeps
        magnitude[-1] *= pick.random() < 0.8
        return kind, [x, weight, bias, down, up, scale, magnitude], [], 7
    if kind == "lora":
        return kind, [x, weight, bias, down, up, scale], [], 5
    batch_dim = pick.choice([0, 0, -1, 1] if x.dim() > 2 else [0, -1])
    known = x.shape[batch_dim] if -1 < batch_dim < x.dim() - 1 else pick.choice(sizes)
    fits = [n for n in range(1, known + 1) if known % n == 0] or [0]
    batch = known if batch_dim == 1 else pick.choice(fits)  # a sample has several entries in dimension 0 alone
    return kind, [x, weight, bias, down, up, draw_gates(pick, batch, slots, rank)], [slots, batch_dim], 5


def cast(tensors: list[Tensor | None], trained: list[bool], dtype: torch.dtype) -> list[Tensor | None]:
    """Copies in a dtype with their own strides; what says how much of an update is taken stays in float32."""
    return [
        t if t is None or t.dtype == torch.float32 else t.detach().to(dtype).requires_grad_(train)
        for t, train in zip(tensors, trained, strict=True)
    ]


def results(call: Callable[..., Tensor], tensors: list[Tensor | None], rest: list[Any], form: str, seed: int) -> list[Tensor]:
    """The result, and the gradients of what trains."""
    y = call(*tensors, *rest, form=form)
    wanted = [t for t in tensors if t is not None and t.requires_grad]
    if not wanted or not torch.is_grad_enabled():
        return [y.detach()]
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(y.dtype)
    found = torch.autograd.grad(y, wanted, g, allow_unused=True)
    return [y.detach(), *(torch.zeros_like(t) if one is None else one for one, t in zip(found, wanted, strict=True))]


def off(got: Tensor, wanted: Tensor) -> float:
    """How far a value is from another; infinity for another shape, or NaN in other places."""
    if got.shape != wanted.shape or not torch.equal(got.isnan(), wanted.isnan()):
        return float("inf")
    got, wanted = got.double().nan_to_num(), wanted.double().nan_to_num()
    return float((got - wanted).norm() / wanted.norm().clamp_min(1e-3))


def double(kind: str, tensors: list[Tensor | None], rest: list[Any]) -> list[Tensor | None]:
    """The tensors of a batch of twice the size, in which samples take other slots."""
    new = list(tensors)
    new[0] = torch.cat([tensors[0], tensors[0]])
    if kind == "bank":
        new[5] = torch.cat([tensors[5].flip(1), tensors[5]]) if rest[1] == 0 else tensors[5].flip(1)
    return new


def play(seed: int) -> Iterator[str]:
    pick = random.Random(seed)
    kind, tensors, rest, count = draw(pick)
    dtype, some = pick.choice(list(LIMITS)), pick.choice([0.0, 0.3, 1.0])
    trained = [i < count and pick.random() < some for i in range(len(tensors))]
    auto = dtype == torch.float32 and pick.random() < 0.2
    rounded = torch.bfloat16 if auto else dtype
    around: Callable[[], Any] = functools.partial(torch.autocast, "cpu", torch.bfloat16, enabled=auto)
    function, batches = FUNCTIONS[kind], [tensors]
    # a compiler makes another program for sizes of 0 and 1
    sizes = [*tensors[0].shape[:-1], *(tensors[5].shape[:1] if kind == "bank" else ())]
    compiled = tensors[0].dim() > 1 and min(sizes) > 1 and pick.random() < 0.2
    if compiled:  # for strides, too
        tensors = [t if t is None else t.contiguous() for t in tensors]
        batches = [tensors, double(kind, tensors, rest)]
    for form in [form for form in FORMS if form != "stock"]:
        torch._dynamo.reset()
        program = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
        for number, (call, batch) in enumerate(itertools.product([function, program][: 1 + compiled], batches)):
            whole, given = cast(batch, trained, torch.float64), cast(batch, trained, dtype)
            for tensor in [given[0], *given[5:6]][: 1 + (kind == "bank" and rest[1] == 0)] if compiled else ():
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
            wanted = results(function, whole, rest, "stock", seed)
            case = f"case {seed}: {kind} {list(batch[0].shape)} {rounded} {form}{' compiled' * (call is program and compiled)}"
            try:
                with around(), torch._dynamo.config.patch(error_on_recompile=number == 3), shapes.patch(use_duck_shape=False):
                    stock = results(function, given, rest, "stock", seed)
                    found = results(call, given, rest, form, seed)
            except Exception as error:
                yield f"{case}: {type(error).__name__}: {str(error)[:200]}"
                continue
            for i, (got, own, exact) in enumerate(zip(found, stock, wanted, strict=True)):
                few = 1 if exact.numel() >= 256 else 4  # in which what is summed may cancel
                apart, allowed = off(got, exact), max(few * LIMITS[rounded], 4 * off(own, exact))
                if got.dtype != own.dtype or not apart <= allowed:
                    what = f"gradient {i}" if i else "result"
                    yield f"{case}: {what} is {apart:.1e} off in {got.dtype}, and that of stock {off(own, exact):.1e}"


def fuzz_forms(cases: int, seed: int) -> list[str]:
    return [miss for number in range(seed, seed + cases) for miss in play(number)]
