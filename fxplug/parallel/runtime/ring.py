"""Ring attention: keys and values go around, and each process merges what it computes from them by their denominators.

Liu et al. 2023 (arXiv 2310.01889). Parts are computed by torch's flash kernels where there is one, which give the logarithm
of the denominators too (Dao 2023, arXiv 2307.08691); backward computes each part again from the denominators of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.torch_internals import tensors as kernels
from .collectives import exchange

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)


def attend_ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: Sequence[Tensor | None],
    scale: float | None,
    counts: Sequence[int],
    rank: int,
    group: Any,
) -> Tensor:
    """Compute attention of (batch, heads, tokens, features) to the keys and values of a whole ring.

    `counts` are the numbers of keys of each process, `masks` those of the queries here for each process's keys: None, booleans,
    or floating-point summands. Differentiable in all of them. The next part is requested before the current one is computed.
    """
    device = query.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # as scaled_dot_product_attention has it
        query, key, value = (t.to(torch.get_autocast_dtype(device)) for t in (query, key, value))
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))  # the kernels do not ask
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out: Tensor = _Ring.apply(query, key, value, scale, rank, group, *counts, *masks)
    return out.transpose(1, 2).contiguous().transpose(1, 2)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        rank: int,
        group: Any,
        *rest: Any,
    ) -> Tensor:
        # counts and masks, one after the other: Dynamo of torch 2.14 takes a tuple of symbolic sizes for its first
        counts, masks = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        travel = _Travel(counts, rank, group)
        out = weight = extra = None
        both = travel.packed(key, value)
        for step in range(len(counts)):
            source, here = (rank - step) % len(counts), both
            if step + 1 < len(counts):
                both = travel.on(both)
            k, v = travel.unpacked(here, key, value, source)
            part, more, extra = attended(query, k, v, masks[source], scale)
            if out is None or weight is None:
                out, weight = part.to(more.dtype), more
                continue
            joined = torch.logaddexp(weight, more)
            safe = joined.masked_fill(joined == float("-inf"), 0.0)  # rows that see nothing so far
            out = out * (weight - safe).exp()[..., None] + part * (more - safe).exp()[..., None]
            weight = joined
        assert out is not None and weight is not None
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, weight, *masks)
        ctx.way = scale, counts, rank, group, extra
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, out, weight, *masks = ctx.saved_tensors
        scale, counts, rank, group, extra = ctx.way
        travel = _Travel(counts, rank, group)
        both = travel.packed(key, value)
        high = torch.promote_types(query.dtype, torch.float32)
        asked = torch.zeros_like(query, dtype=high)
        owed = torch.zeros_like(both, dtype=high)  # the gradients of keys and values go around with them, and come home
        found: list[Tensor | None] = [None] * len(counts)
        for step in range(len(counts)):
            source, here = (rank - step) % len(counts), both
            if step + 1 < len(counts):
                both = travel.on(both)
            k, v = travel.unpacked(here, key, value, source)
            wanted = ctx.needs_input_grad[6 + len(counts) + source]
            more = gradients(grad, query, k, v, out, weight, masks[source], scale, extra, wanted)
            asked, found[source] = asked + more[0], more[3]
            owed = travel.on(owed + travel.packed(more[1].to(high), more[2].to(high)))
        dk, dv = travel.unpacked(owed, key, value, rank)
        return asked.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), None, None, None, *[None] * len(counts), *found


class _Travel:
    """How keys and values go from each process to the next: one behind the other, padded to the longest part."""

    def __init__(self, counts: Sequence[int], rank: int, group: Any) -> None:
        self.counts, self.rank, self.group, self.most = counts, rank, group, max(counts)

    def packed(self, key: Tensor, value: Tensor) -> Tensor:
        flat = torch.cat([key.reshape(-1), value.reshape(-1)])
        longest = math.prod(key.shape[:-2]) * (key.shape[-1] + value.shape[-1]) * self.most
        return F.pad(flat, [0, longest - flat.numel()])

    def unpacked(self, both: Tensor, key: Tensor, value: Tensor, source: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a process, which have these shapes except for their number."""
        shapes = [(*t.shape[:-2], self.counts[source], t.shape[-1]) for t in (key, value)]
        sizes = [math.prod(shape) for shape in shapes]
        return both[: sizes[0]].view(shapes[0]), both[sizes[0] : sum(sizes)].view(shapes[1])

    def on(self, both: Tensor) -> Tensor:
        """Pass a tensor on around the ring; return that of the process before."""
        world = len(self.counts)
        give, take = [0] * world, [0] * world
        give[(self.rank + 1) % world] = take[(self.rank - 1) % world] = both.numel()
        return exchange(both, give, take, self.rank, self.group)


def attended(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Return attention to some keys, the logarithm of its denominators (float32 or more; -inf for fully masked rows), and what
    the kernel's backward needs besides."""
    kernel = _kernel(query, key, value, mask)
    if kernel == "cpu":
        bias = _bias(mask, query, key)
        out, weight = kernels.flash_cpu(query, key, value, attn_mask=bias, scale=scale)
        if bias is not None:  # the kernel says 0 for rows that see nothing
            weight = weight.masked_fill((bias == float("-inf")).all(-1), float("-inf"))
        return out, weight, ()
    if kernel == "cuda":
        out, weight, *extra = kernels.flash_cuda(query, key, value, scale=scale)
        return out, weight, tuple(extra)
    high = torch.promote_types(query.dtype, torch.float32)
    scores = _scores(query, key, mask, scale)
    top = scores.amax(-1, keepdim=True) if key.shape[-2] else scores.new_full((*scores.shape[:-1], 1), float("-inf"))
    top = top.clamp_min(torch.finfo(high).min)
    shares = (scores - top).exp()
    total = shares.sum(-1, keepdim=True)
    return (shares @ value.to(high)) / total.clamp_min(torch.finfo(high).tiny), (top + total.log()).squeeze(-1), ()


def gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    weight: Tensor,
    mask: Tensor | None,
    scale: float,
    extra: tuple[Any, ...],
    wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the contributions of some keys and values to the gradients of queries, keys, values, and of the mask if `wanted`.

    `out` and `weight` are those of all keys together.
    """
    weight = weight.masked_fill(weight == float("-inf"), 0.0)  # of rows that see nothing, which have no shares
    kernel = "" if wanted else _kernel(query, key, value, mask)
    if kernel == "cpu":
        given = grad.contiguous(), query, key, value, out, weight, 0.0, False
        bias = _bias(mask, query, key)
        return (*kernels.flash_cpu_backward(*given, attn_mask=bias, scale=scale), None)
    if kernel == "cuda" and extra:
        firsts, lasts, most, _, state, unused, *_ = extra
        lengths = firsts, lasts, most, key.shape[-2], 0.0, False, state, unused
        backward = kernels.flash_cuda_backward
        return (*backward(grad.contiguous(), query, key, value, out, weight, *lengths, scale=scale)[:3], None)
    high = torch.promote_types(query.dtype, torch.float32)
    shares = (_scores(query, key, mask, scale) - weight[..., None]).exp()
    grad, q, k, v = (t.to(high) for t in (grad, query, key, value))
    inner = shares * (grad @ v.transpose(-1, -2) - (grad * out.to(high)).sum(-1, keepdim=True))
    bias = inner.sum_to_size(mask.shape).to(mask.dtype) if wanted and mask is not None else None
    return inner @ k * scale, inner.transpose(-1, -2) @ q * scale, shares.transpose(-1, -2) @ grad, bias


def _kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> str:
    """Return which of torch's kernels supports these tensors; "" for plain products."""
    device, features = query.device.type, query.shape[-1]
    alike = query.dtype == key.dtype == value.dtype and features == value.shape[-1] and key.shape[-2] > 0 < query.shape[-2]
    if alike and device == "cpu":
        return "cpu"
    if alike and device == "cuda" and mask is None and query.dtype in HALF and features % 8 == 0 and features <= 256:
        return "cuda"
    return ""


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, float("-inf"))
    return mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    high = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(high) @ key.to(high).transpose(-1, -2) * scale
    if mask is None:
        return scores
    return scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
