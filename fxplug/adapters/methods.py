"""What methods of adaptation that are no low-rank product make of a weight: a table, a row a method that no block has.

Each is a pure function of a parameter (out, in, *kernel), or of a bias (out), in float32, of the tensors that a file has for
the layer, and of the numbers that the file or its configuration says. Formulas are those of LyCORIS 4.1 and PEFT 0.21.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..blocks import list_update_kinds, low_rank
from ..blocks.base import Method
from ..blocks.low_rank import trim_shape
from ..blocks.orthogonal import compute_cayley

Tensors = Mapping[str, Tensor]
Options = Mapping[str, Any]


def _inner(shape: Sequence[int]) -> int:
    return math.prod(shape[1:])


def _flat(out: Callable[[Tensors], int] | None, inner: Callable[[Tensors], int] | None) -> Callable[..., bool]:
    """Make a `fits` for parameters with so many outputs and inputs * kernel; None is any number."""
    return lambda t, o, shape: bool(shape) and all(
        size is None or size(t) == n for size, n in ((out, shape[0]), (inner, _inner(shape)))
    )


def _matrix(function: Callable[[Tensor, Tensors, Options], Tensor]) -> Callable[[Tensor, Tensors, Options], Tensor]:
    """Make a function of a parameter from one of a matrix (out, in * kernel)."""
    return lambda w, t, o: function(w.flatten(1), t, o).reshape(w.shape)


# --- LyCORIS


def _normed(blocks: Tensor, constraint: float) -> Tensor:
    """Return the skew-symmetric matrices of LyCORIS' blocks, together at most of norm `constraint`; 0 sets no bound."""
    q = blocks - blocks.mT
    norm = q.norm() + 1e-8
    return q * constraint / norm if 0 < constraint < norm else q


def _diag_oft(w: Tensor, t: Tensors, o: Options) -> Tensor:
    """Rotate outputs in blocks, then rescale them."""
    turns = compute_cayley(_normed(t["oft_blocks"], o["constraint"] * w.shape[0]))  # (I - Q)(I + Q)^-1 is LyCORIS' transpose
    made = torch.bmm(turns, w.reshape(len(turns), turns.shape[-1], -1)).reshape(w.shape)
    return made * t["rescale"].reshape(-1, *[1] * (w.dim() - 1)) if "rescale" in t else made


def _butterflies(w: Tensor, t: Tensors, o: Options) -> Tensor:
    """Rotate outputs in butterflies of blocks, then rescale them."""
    q = _normed(t["oft_blocks"], o["constraint"] * w.shape[0])
    levels, _, size, _ = q.shape
    turns = compute_cayley(-q.flatten(0, 1)).reshape(q.shape)
    made = w.flatten(1)
    for level in range(levels):
        order = torch.arange(len(made)).view(-1, 2, 2**level * size // 2).transpose(1, 2).flatten()
        made = torch.bmm(turns[level], made[order].reshape(-1, size, made.shape[1])).reshape(made.shape)
        made = made[torch.argsort(order)]
    made = made.reshape(w.shape)
    return made * t["rescale"].reshape(-1, *[1] * (w.dim() - 1)) if "rescale" in t else made


def _glora(w: Tensor, t: Tensors, o: Options) -> Tensor:
    """Return W + scale * (W a1 a2 + b1 b2)."""
    a = t["a1"].flatten(1) @ t["a2"].flatten(1)
    wa = torch.einsum("oi...,ij->oj...", w, a)
    b2 = low_rank.multiply_core(t["bm"], t["b2"].flatten(1)) if "bm" in t else t["b2"]
    made: Tensor = w + o["scale"] * (wa + low_rank.multiply(t["b1"], b2, w.shape))
    return made


# --- PEFT


def _hra(w: Tensor, t: Tensors, o: Options) -> Tensor:
    """Multiply W by Householder reflections; with `gs` by those of the Gram-Schmidt orthogonalised vectors, all at once."""
    vectors: list[Tensor] = []
    for u in t["u"].T:
        if o["gs"]:
            for v in vectors:
                u = u - (v @ u) * v
        vectors.append(u / u.norm())
    if o["gs"]:
        basis = torch.stack(vectors, 1)
        return w - 2 * (w @ basis) @ basis.T
    for u in vectors:
        w = w - 2 * torch.outer(w @ u, u)
    return w


def _bat(w: Tensor, t: Tensors, o: Options) -> Tensor:
    """Return W + W B + B in squares of the rank (Bone with Bat); B is (out / r, r, r) beside all squares of a row."""
    block = t["block"]
    r = block.shape[-1]
    parts = w.reshape(w.shape[0] // r, r, w.shape[1] // r, r).permute(2, 0, 1, 3)
    return w + (parts @ block + block).permute(1, 2, 0, 3).reshape(w.shape)


def _circulant(w: Tensor, t: Tensors, o: Options) -> Tensor:
    """Add a block-circulant convolution (C3A)."""
    kernel = t["kernel"]
    size = kernel.shape[-1]
    at = (torch.arange(size)[None, :] - torch.arange(size)[:, None]) % size
    return w + kernel[..., at].permute(0, 2, 1, 3).reshape(w.shape) / w.shape[1]


def _fourier(w: Tensor, t: Tensors, o: Options) -> Tensor:
    """Add a few frequencies, drawn by a seed (FourierFT)."""
    generator = torch.Generator().manual_seed(o["seed"])
    at = torch.randperm(w.numel(), generator=generator)[: len(t["spectrum"])]
    spectrum = torch.zeros(w.numel()).index_put((at,), t["spectrum"]).reshape(w.shape)
    made: Tensor = w + torch.fft.ifft2(spectrum).real * o["scale"]
    return made


def _sparse(w: Tensor, t: Tensors, o: Options) -> Tensor:
    """Add single elements (SHiRA)."""
    rows, columns = t["at"].long()
    return w.index_put((rows, columns), t["values"] * o["scale"], accumulate=True)


def _sparse_fits(t: Tensors, o: Options, shape: Sequence[int]) -> bool:
    most = [0, 0] if t["at"].is_meta else t["at"].long().amax(1).tolist()
    return len(trim_shape(shape)) <= 2 and len(shape) > 1 and most[0] < shape[0] and most[1] < shape[1]


def _randlora(w: Tensor, t: Tensors, o: Options) -> Tensor:
    """Add fixed random bases, scaled on both sides (RandLoRA)."""
    small, large = sorted(w.shape)
    lam, gamma = t["lambda"], t["gamma"]
    a = (t["A"][:, : gamma.shape[0], :small] * lam[:, :, None] * gamma[None]).flatten(0, 1)  # (rank * bases, small)
    b = t["B"][:large, : gamma.shape[0]].flatten(1)  # (large, bases * rank)
    b = torch.unflatten(b, 1, (gamma.shape[0], -1)).flatten(1)
    made = b @ a
    changed: Tensor = w + o["scale"] * (made if small == w.shape[1] else made.T)
    return changed


def _hira(w: Tensor, t: Tensors, o: Options) -> Tensor:
    """Return W + W * (B A), elementwise."""
    return w + w * (t["B"] @ t["A"])


def _road(w: Tensor, t: Tensors, o: Options) -> Tensor:
    """Rotate and scale outputs in pairs (RoAd); a bias too."""
    half = o["group"] // 2
    theta, alpha = t["theta"], t["alpha"]
    if o["variant"] == "road_1":
        theta, alpha = (one.reshape(-1, half).repeat_interleave(2, dim=0).flatten() for one in (theta, alpha))
    if o["variant"] == "road_4":
        theta, theta_2 = theta.reshape(-1, 2, o["group"]).transpose(0, 1).flatten(1)
        alpha, alpha_2 = alpha.reshape(-1, 2, o["group"]).transpose(0, 1).flatten(1)
    else:
        theta_2, alpha_2 = theta, alpha
    first, second = alpha * theta.cos(), alpha_2 * theta_2.sin()
    rows = w.reshape(len(first), -1)
    a, b = torch.unflatten(rows, 0, (-1, 2, half)).unbind(1)
    across = torch.stack((-b, a), 1).reshape(rows.shape)
    made: Tensor = rows * first[:, None] + across * second[:, None]
    return made.reshape(w.shape)


def _road_fits(t: Tensors, o: Options, shape: Sequence[int]) -> bool:
    each = {"road_1": 2, "road_2": 1, "road_4": 0.5}[o["variant"]]
    return bool(shape) and shape[0] % o["group"] == 0 and t["theta"].numel() * each == shape[0]


def _delora(w: Tensor, t: Tensors, o: Options) -> Tensor:
    """Add B A with B and A of unit length, bounded by lambda and scaled by the norms of W's columns (DeLoRA)."""
    a, b = t["A"].norm(dim=1).clamp(min=1e-4), t["B"].norm(dim=0).clamp(min=1e-4)
    made: Tensor = w + (t["B"] * (t["lambda"] / len(a) / (a * b))) @ t["A"] * t["w_norm"]
    return made


def _gralora(w: Tensor, t: Tensors, o: Options) -> Tensor:
    """Add low-rank updates of k * k blocks, whose halves are exchanged between rows and columns (GraLoRA)."""
    a, b = t["A"], t["B"]  # (k, in / k, rank), (k, rank, out / k)
    k = len(a)
    parts = torch.einsum("cirs,rcso->roci", torch.unflatten(a, 2, (k, -1)), torch.unflatten(b, 1, (k, -1)))
    made = parts.reshape(w.shape)
    if "A_general" in t:
        made = made + t["B_general"] @ t["A_general"]
    changed: Tensor = w + made * o["scale"]
    return changed


def _rows(w: Tensor, t: Tensors, o: Options) -> Tensor:
    return w.index_copy(0, torch.tensor(o["rows"], device=w.device), t["rows"])


METHODS = {
    "whole": Method(
        lambda w, t, o: t["whole"].reshape(w.shape),
        lambda t, o, shape: trim_shape(t["whole"].shape) == trim_shape(shape),
        ("whole",),
    ),
    "tokens": Method(_rows, lambda t, o, s: len(s) == 2 and s[1] == t["rows"].shape[1] and s[0] > max(o["rows"])),
    "glora": Method(
        _glora, lambda t, o, s: tuple(s[:2]) == (len(t["b1"]), t["b2"].shape[1]) and s[1] == len(t["a1"]), ("b1",)
    ),
    "diag-oft": Method(_diag_oft, _flat(lambda t: math.prod(t["oft_blocks"].shape[:2]), None)),
    "butterfly oft": Method(_butterflies, _flat(lambda t: math.prod(t["oft_blocks"].shape[1:3]), None)),
    "hra": Method(_matrix(_hra), _flat(None, lambda t: len(t["u"])), ()),
    "bat": Method(
        _matrix(_bat), lambda t, o, s: s[0] == math.prod(t["block"].shape[:2]) and _inner(s) % t["block"].shape[-1] == 0
    ),
    "c3a": Method(
        _matrix(_circulant),
        lambda t, o, s: [s[0], _inner(s)] == [n * t["kernel"].shape[2] for n in t["kernel"].shape[:2]],
    ),
    "fourierft": Method(_matrix(_fourier), lambda t, o, s: len(s) > 1 and len(t["spectrum"]) <= math.prod(s)),
    "shira": Method(_matrix(_sparse), _sparse_fits),
    "randlora": Method(
        _matrix(_randlora),
        lambda t, o, s: len(s) > 1
        and min(s[0], _inner(s)) == t["gamma"].shape[1] <= t["A"].shape[-1]
        and max(s[0], _inner(s)) <= len(t["B"]),
    ),
    "hira": Method(_matrix(_hira), _flat(lambda t: len(t["B"]), lambda t: t["A"].shape[1]), ("B",)),
    "road": Method(_road, _road_fits),
    "delora": Method(_matrix(_delora), _flat(lambda t: len(t["B"]), lambda t: t["A"].shape[1])),
    "gralora": Method(
        _matrix(_gralora),
        _flat(lambda t: len(t["B"]) * t["B"].shape[2], lambda t: math.prod(t["A"].shape[:2])),
    ),
}  # fmt: skip


def find_method(name: str) -> Method | None:
    """Find the method of that name: a block's own, or one of the table; None where there is none."""
    own = (kind.algebra for kind in list_update_kinds().values() if kind.method == name and name)
    return next(own, None) or METHODS.get(name)
