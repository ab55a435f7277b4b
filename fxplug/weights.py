"""Blocks that map a parameter: what `place: param` puts between a weight and the layer that reads it.

Each is called with the parameter and gives the one that is used instead, of the same shape and dtype. All but the pure
functions of a block's mathematics know nothing of the kind of layer: a weight is (out, in, *kernel).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .blocks import Block, check_rank, check_slots, scaling
from .errors import SpecError

if TYPE_CHECKING:
    from .match import Site


def weight_at(site: Site, what: str, dims: int = 2) -> Tensor:
    """The parameter of a site, of floating point and at least `dims` dimensions. Raises SpecError, which says `what` asks."""
    value = site.parameter
    if not value.is_floating_point():
        raise SpecError(f"{what} needs floating-point numbers, and '{site.port}' holds {value.dtype}")
    if value.dim() < dims:
        raise SpecError(f"{what} needs {dims} dimensions, and '{site.port}' is {list(value.shape)}: leave it out of the match")
    return value


def output_dim(site: Site) -> int:
    """The dimension of a layer's weight that its output has: 0, but 1 for Embedding and transposed convolutions."""
    return int("Embedding" in site.classes or "_ConvTransposeNd" in site.classes)


def in_place_of(result: Tensor, value: Tensor) -> Tensor:
    """`result`, of the shape of a parameter, in its dtype and with its strides, so that it takes the parameter's place.

    Which kernel reads a weight, and so the last bit of what it gives, depends on its strides, and in torch.matmul on whether
    it requires a gradient, be gradients on or off. A parameter whose elements share memory, as an expanded one's do, cannot
    be followed there.
    """
    result = result.to(value.dtype)
    if result.stride() != value.stride() and not _overlaps(value):
        result = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(result)
    if not torch.compiler.is_compiling() and not torch.is_grad_enabled() and result is not value:
        result.requires_grad_(value.requires_grad)
    return result


def _overlaps(value: Tensor) -> bool:
    """Whether elements of a tensor may share memory."""
    reach = 1
    for stride, size in sorted((st, n) for st, n in zip(value.stride(), value.shape, strict=True) if n > 1):
        if stride < reach:
            return True
        reach = stride * size
    return False


# --- low rank


def low_rank(up: Tensor, down: Tensor, shape: Sequence[int]) -> Tensor:
    """up @ down in the shape of a weight: up is (out, rank, ...), down (rank, in, *kernel)."""
    return (up.flatten(1) @ down.flatten(1)).reshape(*shape)


class Update(Block):
    """A scaled update of a parameter: what LoRA, LoHa and LoKr have in common. `scale` is a float32 buffer.

    With `slots` it is a bank for that many: each parameter has them as its first dimension, begins as zeros and is not
    trained, and `forward` takes, instead of the scale, the float32 (slots,) that `gates.Gates` gives for all samples.
    """

    neutral = True
    scale: Tensor

    def __init__(
        self, shape: Sequence[int], rank: int, alpha: float | None, rslora: bool, alpha_auto_scale: bool, slots: int = 0
    ) -> None:
        """`shape` is the parameter's, two or more dimensions. Raises SpecError for a rank below 1 and as `scaling` does."""
        super().__init__()
        check_slots(slots)
        self.shape, self.rank, self.slots = list(shape), check_rank(rank), slots
        self.alpha = rank if alpha is None else alpha
        self.rslora, self.alpha_auto_scale = rslora, alpha_auto_scale
        if not slots:
            factor = scaling(rank, alpha, rslora, alpha_auto_scale)
            self.register_buffer("scale", torch.tensor(factor, dtype=torch.float32))

    def banked(self) -> None:
        """Give each parameter its slots."""
        for name, parameter in self._parameters.items() if self.slots else ():
            assert parameter is not None
            self._parameters[name] = nn.Parameter(parameter.new_zeros(self.slots, *parameter.shape), requires_grad=False)

    def bank(self) -> dict[str, Any]:
        """What tells where an adapter goes in a bank, as plain values; see `switching.Bank`."""
        names = list(self._parameters)
        return {"kind": type(self).__name__, "slots": self.slots, "rank": self.rank, "shape": self.shape, "parameters": names}

    def forward(self, value: Tensor, uniform: Tensor | None = None) -> Tensor:
        return in_place_of(self.updated(value, uniform), value)

    def updated(self, value: Tensor, uniform: Tensor | None = None) -> Tensor:
        """The parameter with the update added, or with those of all slots."""
        if uniform is None:
            return value + self.scale * self.update(dict(self.named_parameters()))
        for slot in range(self.slots):
            value = value + uniform[slot] * self.update({name: bank[slot] for name, bank in self.named_parameters()})
        return value

    def update(self, own: Mapping[str, Tensor]) -> Tensor:
        """What parameters of these names make together, in the shape of the parameter that is updated, not scaled yet."""
        raise NotImplementedError


class LoraWeight(Update):
    """value + scale * up @ down: LoRA added to the weight itself (Hu et al. 2021, arXiv 2106.09685).

    For parameters that no layer of their own reads, such as `in_proj_weight`, and where many tokens make the side path of
    Lora the slower way. `down` is (rank, in, *kernel), `up` (out, rank, 1, ...), zero when new: the shapes that PEFT and
    kohya's files have.
    """

    def __init__(
        self,
        shape: Sequence[int],
        rank: int = 8,
        alpha: float | None = None,
        rslora: bool = False,
        alpha_auto_scale: bool = True,
        slots: int = 0,
    ) -> None:
        """As Update."""
        super().__init__(shape, rank, alpha, rslora, alpha_auto_scale, slots)
        self.down = nn.Parameter(torch.empty(rank, *self.shape[1:]))
        self.up = nn.Parameter(torch.zeros(self.shape[0], rank, *[1] * (len(self.shape) - 2)))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))
        self.banked()

    @classmethod
    def at(
        cls,
        site: Site,
        rank: int = 8,
        alpha: float | None = None,
        rslora: bool = False,
        alpha_auto_scale: bool = True,
        slots: int = 0,
        rank_max: int | None = None,
    ) -> LoraWeight:
        """An update for any parameter of two or more dimensions; with `slots`, of adapters of ranks up to `rank_max`."""
        rank = rank_max if slots and rank_max is not None else rank
        return cls(weight_at(site, "a low-rank update").shape, rank, alpha, rslora, alpha_auto_scale, slots)

    def update(self, own: Mapping[str, Tensor]) -> Tensor:
        return low_rank(own["up"], own["down"], self.shape)

    def extra_repr(self) -> str:
        return f"{self.shape}, rank={self.rank}, " + (f"slots={self.slots}" if self.slots else f"alpha={self.alpha:g}")


def norm_except(value: Tensor, dim: int) -> Tensor:
    """The Euclidean norm of each slice along `dim`, which stays, the others of size 1; -1 is the norm of all."""
    others = [d for d in range(value.dim()) if d != dim]
    norm: Tensor = torch.linalg.vector_norm(value, dim=others, keepdim=True)
    return norm


def over_norm(magnitude: Tensor, norm: Tensor) -> Tensor:
    """magnitude / norm, and 1 where the norm is zero: such a slice has no direction yet."""
    nothing = norm == 0
    return torch.where(nothing, 1.0, magnitude / torch.where(nothing, 1.0, norm))


class Dora(LoraWeight):
    """magnitude * V / |V| with V = value + scale * up @ down: weight-decomposed LoRA (Liu et al. 2024, arXiv 2402.09353).

    The norm is that of each output channel and gets no gradient (section 4.3 of the paper). `magnitude` is the norm of the
    weight when new, (out) or (1, out, 1, ...) for convolutions as in PEFT. An output channel of zeros is left alone until
    the update has given it a direction.
    """

    neutral = True

    def __init__(
        self,
        shape: Sequence[int],
        rank: int = 8,
        alpha: float | None = None,
        rslora: bool = False,
        alpha_auto_scale: bool = True,
        dim: int = 0,
    ) -> None:
        """`dim` is the dimension of the output channels. Raises SpecError as LoraWeight does."""
        super().__init__(shape, rank, alpha, rslora, alpha_auto_scale)
        self.dim = dim
        around = [1] if len(self.shape) > 2 else []
        self.magnitude = nn.Parameter(torch.ones(*around, self.shape[dim], *[1] * (len(self.shape) - 2)))

    @classmethod
    def at(  # type: ignore[override]  # an adapter of this kind cannot be one of several
        cls,
        site: Site,
        rank: int = 8,
        alpha: float | None = None,
        rslora: bool = False,
        alpha_auto_scale: bool = True,
    ) -> Dora:
        """An update for any weight of two or more dimensions; its output channels are told by the kind of layer."""
        value = weight_at(site, "a low-rank update")
        block = cls(value.shape, rank, alpha, rslora, alpha_auto_scale, output_dim(site))
        # the norm in the dtype that the weight has, or it would not be the one that forward finds
        block.magnitude.data = norm_except(value.detach(), block.dim).reshape(block.magnitude.shape)
        return block

    def forward(self, value: Tensor, uniform: Tensor | None = None) -> Tensor:
        changed = self.updated(value)
        norm = norm_except(changed.detach().to(value.dtype), self.dim)
        return in_place_of(changed * over_norm(self.magnitude.reshape(norm.shape), norm), value)


# --- Hadamard product


def hadamard(w1_a: Tensor, w1_b: Tensor, w2_a: Tensor, w2_b: Tensor) -> Tensor:
    """The elementwise product of two low-rank matrices, of rank up to the product of theirs."""
    return (w1_a @ w1_b) * (w2_a @ w2_b)


def tucker_weight(core: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A convolution's weight (out, in, *kernel) from a core (rank, rank, *kernel) and matrices (rank, out), (rank, in)."""
    return torch.einsum("ij...,ip,jr->pr...", core, a, b)


class Loha(Update):
    """value + scale * (w1_a @ w1_b) * (w2_a @ w2_b): a low-rank Hadamard product (FedPara, Hyeon-Woo et al. 2021,
    arXiv 2108.06098; LyCORIS, Yeh et al. 2023, arXiv 2309.14859).

    Parameters have the names and shapes that LyCORIS' files have: `hada_w1_a` (out, rank), `hada_w1_b` (rank, in * kernel);
    with `tucker` on a kernel larger than 1, `hada_w1_a` (rank, out), `hada_w1_b` (rank, in) and a core `hada_t1`
    (rank, rank, *kernel); the same for 2. `hada_w2_b` is zero when new.
    """

    hada_w1_a: Tensor
    hada_w1_b: Tensor
    hada_w2_a: Tensor
    hada_w2_b: Tensor
    hada_t1: Tensor
    hada_t2: Tensor

    def __init__(
        self,
        shape: Sequence[int],
        rank: int = 8,
        alpha: float | None = None,
        tucker: bool = False,
        rslora: bool = False,
        alpha_auto_scale: bool = True,
        slots: int = 0,
    ) -> None:
        """As Update."""
        super().__init__(shape, rank, alpha, rslora, alpha_auto_scale, slots)
        self.tucker = tucker
        out, inner, *kernel = self.shape
        self.cores = tucker and math.prod(kernel) > 1
        for n in (1, 2):
            if self.cores:
                a, b = (rank, out), (rank, inner)
                self.register_parameter(f"hada_t{n}", nn.Parameter(torch.empty(rank, rank, *kernel)))
            else:
                a, b = (out, rank), (rank, inner * math.prod(kernel))
            self.register_parameter(f"hada_w{n}_a", nn.Parameter(torch.empty(a)))
            self.register_parameter(f"hada_w{n}_b", nn.Parameter(torch.empty(b)))
        for parameter in self.parameters():
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
        nn.init.zeros_(self.hada_w2_b)
        self.banked()

    @classmethod
    def at(
        cls,
        site: Site,
        rank: int = 8,
        alpha: float | None = None,
        tucker: bool = False,
        rslora: bool = False,
        alpha_auto_scale: bool = True,
        slots: int = 0,
        rank_max: int | None = None,
    ) -> Loha:
        """An update for any parameter of two or more dimensions; with `slots`, of adapters of ranks up to `rank_max`."""
        rank = rank_max if slots and rank_max is not None else rank
        return cls(weight_at(site, "a Hadamard product").shape, rank, alpha, tucker, rslora, alpha_auto_scale, slots)

    def update(self, own: Mapping[str, Tensor]) -> Tensor:
        if self.cores:
            first = tucker_weight(own["hada_t1"], own["hada_w1_a"], own["hada_w1_b"])
            return first * tucker_weight(own["hada_t2"], own["hada_w2_a"], own["hada_w2_b"])
        return hadamard(own["hada_w1_a"], own["hada_w1_b"], own["hada_w2_a"], own["hada_w2_b"]).reshape(self.shape)

    def extra_repr(self) -> str:
        of = f"slots={self.slots}" if self.slots else f"alpha={self.alpha:g}"
        return f"{self.shape}, rank={self.rank}, {of}{', tucker' if self.cores else ''}"


# --- Kronecker product


def factorization(size: int, factor: int = -1) -> tuple[int, int]:
    """`size` as a product (m, n), m <= n, as LyCORIS splits it: `factor` and the rest where it divides, else the pair nearest
    to a square whose smaller part is at most `factor`; -1 sets no bound.
    """
    if factor > 0 and size % factor == 0:
        pair = sorted((factor, size // factor))
        return pair[0], pair[1]
    limit = size if factor < 0 else factor
    small = max(d for d in range(1, math.isqrt(size) + 1) if size % d == 0 and d <= limit)
    return small, size // small


def divisors(size: int) -> list[int]:
    """Every number that divides `size`."""
    small = [d for d in range(1, math.isqrt(size) + 1) if size % d == 0]
    return sorted({*small, *(size // d for d in small)})


def kronecker(w1: Tensor, w2: Tensor, shape: Sequence[int]) -> Tensor:
    """The Kronecker product of (a, c) and (b, d, *kernel) as a weight (a * b, c * d, *kernel)."""
    return torch.kron(w1, w2.flatten(1)).reshape(*shape)


class Lokr(Update):
    """value + scale * kron(w1, w2): a Kronecker product (LyCORIS, Yeh et al. 2023, arXiv 2309.14859).

    Widths are split as in `factorization`. Parameters have the names and shapes that LyCORIS' files have: `lokr_w1`, or with
    `decompose_both` its factors `lokr_w1_a`, `lokr_w1_b` where the rank is below half of the longer side; `lokr_w2`, or by the
    same rule `lokr_w2_a`, `lokr_w2_b`, and with `tucker` on a kernel larger than 1 a core `lokr_t2`. Two full matrices are
    not scaled. `lokr_w2` or `lokr_w2_b` is zero when new.
    """

    lokr_w1: Tensor
    lokr_w1_a: Tensor
    lokr_w1_b: Tensor
    lokr_w2: Tensor
    lokr_w2_a: Tensor
    lokr_w2_b: Tensor
    lokr_t2: Tensor

    def __init__(
        self,
        shape: Sequence[int],
        rank: int = 8,
        alpha: float | None = None,
        factor: int = -1,
        decompose_both: bool = False,
        tucker: bool = False,
        full_matrix: bool = False,
        rslora: bool = False,
        alpha_auto_scale: bool = True,
        slots: int = 0,
    ) -> None:
        """`shape` is that of the parameter, two or more dimensions. `full_matrix` decomposes nothing, whatever the rank.

        Raises SpecError for a rank below 1, for a factor that is no number above 0 or -1 or that divides neither width, and
        as `scaling` does.
        """
        super().__init__(shape, rank, alpha, rslora, alpha_auto_scale, slots)
        self.factor, self.decompose_both, self.tucker, self.full_matrix = factor, decompose_both, tucker, full_matrix
        out, inner, *kernel = self.shape
        check_factor(factor, out, inner)
        (a, b), (c, d) = factorization(out, factor), factorization(inner, factor)
        split_1 = decompose_both and rank < max(a, c) / 2 and not full_matrix
        split_2 = rank < max(b, d) / 2 and not full_matrix
        self.core = split_2 and tucker and math.prod(kernel) > 1
        shapes: dict[str, tuple[int, ...]] = {"w1_a": (a, rank), "w1_b": (rank, c)} if split_1 else {"w1": (a, c)}
        if self.core:
            shapes |= {"t2": (rank, rank, *kernel), "w2_a": (rank, b), "w2_b": (rank, d)}
        elif split_2:
            shapes |= {"w2_a": (b, rank), "w2_b": (rank, d * math.prod(kernel))}
        else:
            shapes |= {"w2": (b, d, *kernel)}
        for name, size in shapes.items():
            parameter = nn.Parameter(torch.empty(size))
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
            self.register_parameter(f"lokr_{name}", parameter)
        nn.init.zeros_(self.lokr_w2_b if split_2 else self.lokr_w2)
        self.split_1, self.split_2 = split_1, split_2
        if not split_1 and not split_2 and not slots:
            self.scale.fill_(1.0)
        self.banked()

    @classmethod
    def at(
        cls,
        site: Site,
        rank: int = 8,
        alpha: float | None = None,
        factor: int = -1,
        decompose_both: bool = False,
        tucker: bool = False,
        full_matrix: bool = False,
        rslora: bool = False,
        alpha_auto_scale: bool = True,
        slots: int = 0,
        rank_max: int | None = None,
    ) -> Lokr:
        """An update for any parameter of two or more dimensions; with `slots`, of adapters of ranks up to `rank_max`."""
        shape = weight_at(site, "a Kronecker product").shape
        rank = rank_max if slots and rank_max is not None else rank
        return cls(shape, rank, alpha, factor, decompose_both, tucker, full_matrix, rslora, alpha_auto_scale, slots)

    def update(self, own: Mapping[str, Tensor]) -> Tensor:
        w1 = own["lokr_w1_a"] @ own["lokr_w1_b"] if self.split_1 else own["lokr_w1"]
        if self.core:
            w2 = tucker_weight(own["lokr_t2"], own["lokr_w2_a"], own["lokr_w2_b"])
        else:
            w2 = own["lokr_w2_a"] @ own["lokr_w2_b"] if self.split_2 else own["lokr_w2"]
        return kronecker(w1, w2, self.shape)

    def extra_repr(self) -> str:
        parts = [name.removeprefix("lokr_") for name, _ in self.named_parameters()]
        of = f"slots={self.slots}" if self.slots else f"alpha={self.alpha:g}"
        return f"{self.shape}, rank={self.rank}, {of}, factor={self.factor}, {' '.join(parts)}"


def check_factor(factor: Any, out: int, inner: int) -> None:
    """Raise SpecError unless `factor` is -1, or divides one of the widths."""
    if not isinstance(factor, int) or isinstance(factor, bool) or (factor < 1 and factor != -1):
        raise SpecError(f"factor must be -1 (as near to a square as can be) or a whole number above 0, not {factor!r}")
    if factor > 0 and out % factor and inner % factor:
        raise SpecError(
            f"factor {factor} divides neither the {out} outputs nor the {inner} inputs; "
            f"{out} has the divisors {divisors(out)}, {inner} has {divisors(inner)}"
        )


# --- the whole parameter


class Delta(Block):
    """value + delta: a parameter's change as a parameter of its own, zero when new, while the base stays as it is.

    On biases it is BitFit (Ben Zaken et al. 2021, arXiv 2106.10199).
    """

    neutral = True

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = list(shape)
        self.delta = nn.Parameter(torch.zeros(self.shape))

    @classmethod
    def at(cls, site: Site) -> Delta:
        """A change for any floating-point parameter."""
        return cls(weight_at(site, "a change", 0).shape)

    def forward(self, value: Tensor) -> Tensor:
        return in_place_of(value + self.delta, value)
