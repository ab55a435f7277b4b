"""Blocks that map a parameter: what `place: param` puts between a weight and the layer that reads it.

Each is called with the parameter and gives the one that is used instead, of the same shape and dtype. All but the pure
functions of a block's mathematics know nothing of the kind of layer: a weight is (out, in, *kernel).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ..core.errors import SpecError
from .base import LowRank, Method, UpdateKind, find_used_slots, make_kind_key
from .low_rank import trim_shape

if TYPE_CHECKING:
    from ..core.rewriter.sites import Site


def get_weight(site: Site, what: str, dims: int = 2) -> Tensor:
    """Return the parameter of a site, floating-point and of at least `dims` dimensions. Raises SpecError, which names
    `what`."""
    value = site.parameter
    if not value.is_floating_point():
        raise SpecError(f"{what} needs floating-point numbers, and '{site.port}' is {value.dtype}")
    if value.dim() < dims:
        raise SpecError(f"{what} needs {dims} dimensions, and '{site.port}' is {list(value.shape)}: exclude it from the match")
    return value


def get_output_dim(site: Site) -> int:
    """Return the output dimension of a layer's weight: 0, but 1 for Embedding and transposed convolutions."""
    return int("Embedding" in site.classes or "_ConvTransposeNd" in site.classes)


def count_experts(site: Site) -> int:
    """Return the number of experts in a parameter of three dimensions, as in a mixture of experts; 0 for any other one.

    A layer's own weight, and one of torch.nn's modules, is a single one, whatever its dimensions.
    """
    value = site.parameter
    single = str(site.port.keys[0]) == "weight" and not {"_ConvNd", "Bilinear"}.isdisjoint(site.classes)
    return value.shape[0] if value.dim() == 3 and not single else 0


def check_single(site: Site, what: str) -> None:
    """Raise SpecError for a parameter with the weights of several experts, which `what` does not support."""
    if (experts := count_experts(site)) > 1:
        shape = list(site.parameter.shape)
        raise SpecError(
            f"{what} is for one weight, and '{site.port}' is {shape}, the weights of {experts} experts: use lora_weight, which "
            "has an update for each, or delta"
        )


def match_parameter(result: Tensor, value: Tensor) -> Tensor:
    """Return `result`, of the shape of a parameter, in its dtype and with its strides, to replace the parameter.

    Which kernel reads a weight, and so the last bit of its result, depends on its strides, and in torch.matmul on whether it
    requires a gradient, whether gradients are enabled or not. The strides of a parameter whose elements share memory, as an
    expanded one's do, cannot be copied.
    """
    result = result.to(value.dtype)
    if result.stride() != value.stride() and not _overlaps(value):
        result = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(result)
    if not torch.compiler.is_compiling() and not torch.is_grad_enabled() and result is not value:
        result.requires_grad_(value.requires_grad)
    return result


def _overlaps(value: Tensor) -> bool:
    """Return whether elements of a tensor may share memory."""
    reach = 1
    for stride, size in sorted((st, n) for st, n in zip(value.stride(), value.shape, strict=True) if n > 1):
        if stride < reach:
            return True
        reach = stride * size
    return False


class Update(LowRank):
    """A scaled update of a parameter: what LoRA, LoHa and LoKr have in common. `asks` says what it is, where none fits.

    With `slots` it is a bank for that many: each parameter has them as its first dimension, begins as zeros and is not
    trained, and `forward` takes, instead of the scale, the float32 (slots,) that `Gates` gives for all samples.
    """

    asks: ClassVar[str]
    hands_on = True
    by_expert = False  # whether it has an update for each of several experts

    def __init__(
        self, shape: Sequence[int], rank: int, alpha: float | None, rslora: bool, alpha_auto_scale: bool, slots: int = 0
    ) -> None:
        """Set up the update; `shape` is the parameter's, two or more dimensions. Raises SpecError for a rank below 1 and as
        `scaling` does."""
        super().__init__(rank, alpha, rslora, alpha_auto_scale, slots)
        self.shape = list(shape)

    @classmethod
    def at(cls, site: Site, rank: int = 8, slots: int = 0, rank_max: int | None = None, **options: Any) -> Self:
        """Make an update for any parameter of two or more dimensions; with `slots`, for adapters of ranks up to `rank_max`."""
        rank = rank_max if slots and rank_max is not None else rank
        shape = get_weight(site, cls.asks).shape
        if not cls.by_expert:
            check_single(site, cls.asks)
        return cls(shape[::-1] if options.get("transposed") else shape, rank, slots=slots, **options)

    def banked(self) -> None:
        """Add the dimension of the slots to each parameter."""
        for name, parameter in self._parameters.items() if self.slots else ():
            assert parameter is not None
            self._parameters[name] = nn.Parameter(parameter.new_zeros(self.slots, *parameter.shape), requires_grad=False)

    def bank(self) -> dict[str, Any]:
        """Describe the bank in plain values, for matching adapters; see `adapters.banks.Bank`."""
        names = list(self._parameters)
        kind = make_kind_key(type(self))
        return {"kind": kind, "slots": self.slots, "rank": self.rank, "shape": self.shape, "parameters": names}

    def forward(self, value: Tensor, uniform: Tensor | None = None) -> Tensor:
        return match_parameter(self.updated(value, uniform), value)

    def updated(self, value: Tensor, uniform: Tensor | None = None) -> Tensor:
        """Return the parameter with the update added, or with those of the slots in use."""
        if uniform is None:
            return value + self.scale * self.update(dict(self.named_parameters()))
        total = value
        for slot in find_used_slots(uniform, self.slots):
            total = total + uniform[slot] * self.change(value, {name: bank[slot] for name, bank in self.named_parameters()})
        return total

    def extra_repr(self) -> str:
        return f"{self.shape}, {super().extra_repr()}"

    def change(self, value: Tensor, own: Mapping[str, Tensor]) -> Tensor:
        """Return the change of the parameter `value` by a slot with these parameters, before it is multiplied by the slot's
        weight."""
        return self.update(own)

    def update(self, own: Mapping[str, Tensor]) -> Tensor:
        """Return the update from parameters of these names, in the shape of the updated parameter, not scaled yet."""
        assert self.update_kind is not None and self.update_kind.delta is not None
        return self.update_kind.delta(own, self.shape)


class Delta(Update):
    """value + delta: a parameter's change as a parameter of its own, zero when new, while the base stays as it is.

    On biases it is BitFit (Ben Zaken et al. 2021, arXiv 2106.10199). With `slots` it holds what an adapter changes whole: a
    bias, a norm, a weight of any kind.
    """

    update_kind = UpdateKind(
        name="delta",
        forms=({"delta": "..."},),
        neutral={"delta": 0},
        delta=lambda own, shape: own["delta"],
        method="diff",
        algebra=Method(
            lambda value, own, options: value + own["delta"].reshape(value.shape),
            lambda own, options, shape: trim_shape(own["delta"].shape) == trim_shape(shape),
            ("delta",),
        ),
        whole=True,
        formats={"kohya": {}, "comfy": {}, "lycoris": {}},
    )
    asks = "a change"
    delta: Tensor

    def __init__(self, shape: Sequence[int], slots: int = 0) -> None:
        """Create the change; `shape` is the parameter's."""
        super().__init__(shape, 1, None, False, True, slots)
        self._buffers.pop("scale", None)  # it is not scaled
        self.delta = nn.Parameter(torch.zeros(self.shape))
        self.banked()

    @classmethod
    def at(cls, site: Site, slots: int = 0) -> Delta:  # type: ignore[override]  # it has no rank
        """Make a change for any floating-point parameter."""
        return cls(get_weight(site, cls.asks, 0).shape, slots)

    def updated(self, value: Tensor, uniform: Tensor | None = None) -> Tensor:
        return value + self.delta if uniform is None else super().updated(value, uniform)

    def extra_repr(self) -> str:
        return f"{self.shape}" + (f", slots={self.slots}" if self.slots else "")


# --- Kronecker product


def list_divisors(size: int) -> list[int]:
    """Return all numbers that divide `size`."""
    small = [d for d in range(1, math.isqrt(size) + 1) if size % d == 0]
    return sorted({*small, *(size // d for d in small)})
