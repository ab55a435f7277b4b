"""The algebra of low-rank updates: pure functions on tensors, of which blocks, kernels, lowerings and files' readers are users.

An update of a weight (out, in, *kernel) is `up` (out, rank, *1) @ `down` (rank, in, *kernel) (LoRA, Hu et al. 2021, arXiv
2106.09685); or the elementwise product (LoHa, from FedPara, Hyeon-Woo et al. 2021, arXiv 2108.06098) or the Kronecker product
(LoKr, from KronA, Edalati et al. 2022, arXiv 2212.10650) of two factors, named as in LyCORIS' files (Yeh et al. 2023, arXiv
2309.14859): a factor `w` is whole, or it is `w_a` (out, rank) @ `w_b` (rank, in * kernel), or a core `t` (rank, rank, *kernel)
between `w_a` (rank, out) and `w_b` (rank, in). A bank is the updates of several slots, whose inner channels follow each other:
its rank is slots * rank, in each group of a grouped convolution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.errors import SpecError

# --- how much of an update is taken


def compute_scale(rank: int, alpha: float | None, rslora: bool = False, alpha_auto_scale: bool = True) -> float:
    """Return the factor of a low-rank update: alpha / rank; alpha is by default the rank.

    `rslora` makes it alpha / sqrt(rank) (Kalajdzievski 2023, arXiv 2312.03732); `alpha_auto_scale=False` makes it alpha, as
    HCP-Diffusion does. Raises SpecError for both at once, or for the second without an alpha.
    """
    if alpha_auto_scale:
        return (rank if alpha is None else alpha) / (math.sqrt(rank) if rslora else rank)
    if rslora:
        raise SpecError(
            "rslora divides alpha by sqrt(rank) and alpha_auto_scale: false does not divide it: give one of the two"
        )
    if alpha is None:
        raise SpecError("alpha_auto_scale: false uses alpha itself as the scale: set alpha, 1.0 to add the update unscaled")
    return alpha


def repeat_gates(gates: Tensor, width: int) -> Tensor:
    """Repeat gates (..., slots) to (..., width), one for each inner channel of a bank; return a single number unchanged."""
    return gates.repeat_interleave(width // gates.shape[-1], -1) if gates.dim() else gates


def apply_gates(hidden: Tensor, rows: Tensor, batch_dim: int = 0, space: int = 0) -> Tensor:
    """Multiply the inner values of a bank by the gates of each sample, in the dtype of the values.

    hidden is (..., width) with the samples, contiguous, in `batch_dim`, 0 or 1, -1 for none; or (batch, width, *space) with so
    many dimensions of space. rows is (batch, width), or one number for all. A value without samples, such as one made from
    positions alone, uses the gates that all samples share; where they differ, and an adapter updates it, it is NaN.
    """
    if not rows.dim():
        return hidden * rows
    batch, ones = rows.shape[0], [1] * space
    if not batch:
        return hidden
    if hidden.dim() < 2 + space or batch_dim < 0 or hidden.shape[batch_dim] % batch:
        alike = (rows == rows[:1]).all(0).view(-1, *ones)
        return torch.where(alike | (hidden == 0), hidden * rows[0].view(-1, *ones), torch.nan).to(hidden.dtype)
    if batch_dim:  # of several entries each, too, one sample's in succession
        split = torch.unflatten(hidden, 1, (batch, -1))
        return (split * rows.view(batch, *[1] * (hidden.dim() - 2), -1)).to(hidden.dtype).flatten(1, 2)
    split = hidden.reshape(batch, -1, *hidden.shape[-1 - space :])
    return (split * rows.view(batch, 1, -1, *ones)).to(hidden.dtype).view(hidden.shape)


def view_slot(half: Tensor, slot: int, slots: int, groups: int = 0) -> Tensor:
    """Return a view of one slot of a bank's half: (n, rank, ...) of (n, slots * rank, ...), for `up` and an Embedding's `down`.

    With `groups`, (groups, rank, ...) of (groups * slots * rank, ...), for the `down` of other layers.
    """
    if groups:
        return torch.unflatten(half, 0, (groups, slots, -1))[:, slot]
    return torch.unflatten(half, 1, (slots, -1))[:, slot]


# --- up @ down


def compute_update(x: Tensor, down: Tensor, up: Tensor, rows: Tensor, batch_dim: int = 0) -> Tensor:
    """Return an update beside a linear layer: x (..., in), down (width, in), up (out, width), rows as for `apply_gates`."""
    return F.linear(apply_gates(F.linear(x, down), rows, batch_dim), up)


def multiply(up: Tensor, down: Tensor, shape: Sequence[int]) -> Tensor:
    """Return up @ down in the shape of a weight: up is (out, rank, ...), down (rank, in, *kernel)."""
    return (up.flatten(1) @ down.flatten(1)).reshape(*shape)


def multiply_experts(up: Tensor, down: Tensor) -> Tensor:
    """Return up @ down of each expert, (experts, n, m), for up (n, rank, experts) and down (rank, experts, m)."""
    return torch.bmm(up.permute(2, 0, 1), down.transpose(0, 1))


def split_groups(half: Tensor, groups: int) -> Tensor:
    """Reshape a half of an update to the groups of its convolution: (groups, n, m) of (groups * n, ...)."""
    return half.reshape(groups, half.shape[0] // groups, -1)


def multiply_groups(up: Tensor, down: Tensor, groups: int = 1) -> Tensor:
    """Return up @ down in groups, (groups, out / groups, in * kernel), for up (out, rank, ...) and down (groups * rank, in,
    *kernel)."""
    return torch.bmm(split_groups(up, groups), split_groups(down, groups))


def add_update(weight: Tensor, down: Tensor, up: Tensor, gates: Tensor) -> Tensor:
    """Return weight + (up * gates) @ down: (out, in), for down (rank, in), up (out, rank); `gates` is one number, or (slots,).
    (out, in), for down (rank, in), up (out, rank); `gates` is one number, or (slots,).

    With slots the rank is slots * rank. NaN where a gate is NaN.
    """
    return torch.addmm(weight, (up * repeat_gates(gates, down.shape[0])).to(up.dtype), down)


def compute_svd(up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the singular value decomposition u, s, v of up (out, rank) @ down (rank, in), without computing the product."""
    if up.shape[1] >= min(len(up), down.shape[1]):
        u, s, v = torch.linalg.svd(up @ down, full_matrices=False)
        return u, s, v
    (left, first), (right, second) = torch.linalg.qr(up), torch.linalg.qr(down.T)
    u, s, v = torch.linalg.svd(first @ second.T)
    return left @ u, s, v @ right.T


def choose_rank(values: Tensor, share: float) -> int:
    """Return how many of the first of these nonnegative values have this share of the sum of all."""
    reached = values.double().cumsum(0)
    return min(int((reached < share * reached[-1]).sum()) + 1, len(values))


# --- products of two factors


def tucker(core: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return a convolution's weight (out, in, *kernel) from a core (rank, rank, *kernel) and matrices (rank, out), (rank,
    in)."""
    return torch.einsum("ij...,ip,jr->pr...", core, a, b)


def multiply_core(core: Tensor, b: Tensor) -> Tensor:
    """Multiply a core (rank, inner, *kernel) by the matrix (inner, in) after it: (rank, in, *kernel)."""
    return torch.einsum("ij...,jr->ir...", core, b)


def make_hadamard_halves(up1: Tensor, down1: Tensor, up2: Tensor, down2: Tensor) -> tuple[Tensor, Tensor]:
    """Return the elementwise product of (out, r) @ (r, in) and (out, s) @ (s, in) as factors (out, r * s) and (r * s, in)."""
    return (up1.unsqueeze(2) * up2.unsqueeze(1)).flatten(1), (down1.unsqueeze(1) * down2.unsqueeze(0)).flatten(0, 1)


def make_kronecker_halves(up1: Tensor, down1: Tensor, up2: Tensor, down2: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Kronecker product of (out, r) @ (r, in) and (m, s) @ (s, n) as (out * m, r * s) and (r * s, in * n)."""
    return make_kronecker(up1, up2), make_kronecker(down1, down2)


def make_kronecker(a: Tensor, b: Tensor) -> Tensor:
    """Return the Kronecker products (..., m * p, n * q) of (..., m, n) and (..., p, q).

    torch.kron takes no batch, and fails on some views of one row.
    """
    return (a[..., :, None, :, None] * b[..., None, :, None, :]).flatten(-2).flatten(-3, -2)


def parts(own: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the matrices of a decomposed factor: `w1_a`, `w1_b`, and the core `t1` between them, or None."""
    return own[f"{name}_a"], own[f"{name}_b"], own.get(name.replace("w", "t"))


def make_factor(own: Mapping[str, Tensor], name: str) -> Tensor:
    """Return one factor of a product, whole: (out, in * kernel), or (out, in, *kernel) if it is stored so."""
    if name in own:
        return own[name]
    a, b, core = parts(own, name)
    return a @ b if core is None else tucker(core, a, b)


def make_halves(own: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """Return one factor of a product as (out, rank) and (rank, in * kernel)."""
    if name in own:
        whole = own[name].flatten(1)
        one = torch.eye(min(whole.shape), dtype=whole.dtype, device=whole.device)
        return (one, whole) if whole.shape[0] <= whole.shape[1] else (whole, one)
    a, b, core = parts(own, name)
    return (a, b.flatten(1)) if core is None else (a.T, multiply_core(core, b).flatten(1))


def get_inner_rank(own: Mapping[str, Tensor], name: str) -> int:
    """Return the rank of one factor of a product in the form of `make_halves`."""
    if name in own:
        return min(own[name].flatten(1).shape)
    a, _, core = parts(own, name)
    return a.shape[1 if core is None else 0]


def sides(own: Mapping[str, Tensor], name: str) -> tuple[int, tuple[int, ...]]:
    """Return the sizes of one factor of a product: its output width, and (in, *kernel) or their product."""
    if name in own:
        return own[name].shape[0], tuple(own[name].shape[1:])
    a, b, core = parts(own, name)
    return (a.shape[0], tuple(b.shape[1:])) if core is None else (a.shape[1], (b.shape[1], *core.shape[2:]))


def trim_shape(sizes: Sequence[int]) -> tuple[int, ...]:
    """Remove the sizes of 1 at the end: a linear layer and a 1x1 convolution have the same."""
    made = [int(n) for n in sizes]
    while len(made) > 1 and made[-1] == 1:
        made.pop()
    return tuple(made)


def factorization(size: int, factor: int = -1) -> tuple[int, int]:
    """Return `size` as a product (m, n), m <= n, as LyCORIS splits it: `factor` and the rest if it divides, else the pair
    nearest to a square whose smaller part is at most `factor`; -1 sets no bound.
    """
    if factor > 0 and size % factor == 0:
        pair = sorted((factor, size // factor))
        return pair[0], pair[1]
    limit = size if factor < 0 else factor
    small = max(d for d in range(1, math.isqrt(size) + 1) if size % d == 0 and d <= limit)
    return small, size // small


def choose_lokr_shapes(
    shape: Sequence[int],
    rank: int,
    factor: int = -1,
    both: bool = False,
    cores: bool = False,
    full: bool = False,
    first: Sequence[int] | None = None,
    split: Sequence[bool] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a Kronecker product's matrices for a weight (out, in, *kernel), named and chosen as in LyCORIS and
    PEFT.

    The first is (a, c), the second (b, d, *kernel); a * b is out and c * d is in, split as `factorization` does, or with a, c
    the numbers of `first`, where c * d may be in times the kernel. The second is decomposed if the rank is below half of its
    longer side, with `cores` through a core if there is a kernel; the first with `both`, by the same rule; none with `full`.
    `split` decides for the first and the second, whatever the rank.
    """
    out, inner, *kernel = shape
    (a, b), (c, d) = factorization(out, factor), factorization(inner, factor)
    if first is not None:
        a, c = first
        if inner % c:
            inner, kernel = inner * math.prod(kernel), []
        b, d = out // a, inner // c
    by_rule = (both and rank < max(a, c) / 2 and not full, rank < max(b, d) / 2 and not full)
    split_1, split_2 = by_rule if split is None else split
    made: dict[str, tuple[int, ...]] = {"lokr_w1_a": (a, rank), "lokr_w1_b": (rank, c)} if split_1 else {"lokr_w1": (a, c)}
    if not split_2:
        return made | {"lokr_w2": (b, d, *kernel)}
    if cores and math.prod(kernel) > 1:
        return made | {"lokr_t2": (rank, rank, *kernel), "lokr_w2_a": (rank, b), "lokr_w2_b": (rank, d)}
    return made | {"lokr_w2_a": (b, rank), "lokr_w2_b": (rank, d * math.prod(kernel))}


# --- magnitude and direction


def compute_norm(value: Tensor, dim: int) -> Tensor:
    """Return the Euclidean norm of each slice along `dim`, which is kept, the others of size 1; -1 is the norm of all."""
    others = [d for d in range(value.dim()) if d != dim]
    norm: Tensor = torch.linalg.vector_norm(value, dim=others, keepdim=True)
    return norm


def divide_by_norm(magnitude: Tensor, norm: Tensor) -> Tensor:
    """Return magnitude / norm, and 1 where the norm is zero: such a slice has no direction yet."""
    nothing = norm == 0
    return torch.where(nothing, 1.0, magnitude / torch.where(nothing, 1.0, norm))


def decompose(changed: Tensor, magnitude: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return a weight with `magnitude` as the norms of its channels along `dim`; these are computed in `dtype`, without
    gradient."""
    norm = compute_norm(changed.detach().to(changed.dtype if dtype is None else dtype), dim)
    return changed * divide_by_norm(magnitude.reshape(norm.shape), norm)
