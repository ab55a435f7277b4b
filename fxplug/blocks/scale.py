"""Learned factors of channels: gates, and SSF's scales with shifts (Lian et al. 2022, arXiv 2210.08823)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core.quantised import get_weight_shape
from .base import Block, Method, UpdateKind, align_to_dim, check_slots, find_used_slots, get_width, make_kind_key
from .dimensions import find_batch_dim, is_sampled

if TYPE_CHECKING:
    from ..core.rewriter.sites import Site, Value


def _gated(value: Tensor, own: Mapping[str, Tensor], options: Mapping[str, Any]) -> Tensor:
    """Give a weight or bias with its outputs or inputs times a gate each."""
    behind = value.dim() - (1 if options["side"] == "output" else 2)
    return value * own["gate"].reshape(-1, *[1] * behind)


def _fits(own: Mapping[str, Tensor], options: Mapping[str, Any], shape: Sequence[int]) -> bool:
    at = int(options["side"] == "input")
    return len(shape) > at and shape[at] == own["gate"].numel()


def find_samples(value: Value, dim: int, batch: int) -> int:
    """Return which of the first two dimensions of a value has a batch of so many samples, as traced; -1 if neither has."""
    shape, node = value.shape, value.node
    found = None if node is None else find_batch_dim(node, batch)
    if found is None and node is not None and (batch in shape[:2] or is_sampled(node)):
        found = 0 if shape[0] == batch or len(shape) < 3 or shape[1] != batch else 1
    channels = dim % len(shape)
    return found if found is not None and 0 <= found < min(channels + 1, 2) and found != channels else -1


class Scale(Block):
    """y times a learned gate per channel, one when new (IA3, Liu et al. 2022, arXiv 2205.05638).

    y is (..., features), or (batch, channels, *space) when `dim` is 1.

    With `slots` it is a bank for that many adapters: `weight`, float (slots, width), has what each gate has beyond one, begins
    as zeros and is not trained, and `rows`, float32 (batch, slots * n), what `Gates` gives, says how much of it a sample takes.
    """

    update_kind = UpdateKind(
        name="ia3",
        forms=({"gate": "n"},),
        neutral={"gate": 1},
        method="gate",
        algebra=Method(_gated, _fits, ("gate",)),
        place="after",
        state={"gate": "weight"},
    )
    neutral = True

    def __init__(self, width: int, dim: int = -1, slots: int = 0, batch_dim: int = 0) -> None:
        """Create the gates; `batch_dim` is the dimension of the samples of y, 0 or 1, or -1 for none, which only slots need.
        Raises SpecError for slots below 0."""
        super().__init__()
        check_slots(slots)
        self.width, self.dim, self.slots, self.batch_dim = width, dim, slots, batch_dim
        self.layer: dict[str, Any] = {}  # of a bank: what it tells of the layer that it is beside
        self.weight = nn.Parameter(torch.zeros(slots, width) if slots else torch.ones(width), requires_grad=not slots)

    @classmethod
    def at(cls, site: Site, dim: int | None = None, slots: int = 0) -> Scale:
        """Make a gate for any tensor; `dim` is its channel dimension, by default that of the layers around. Raises
        SpecError."""
        value = site.args[0]
        width, dim = get_width(site, value, dim)
        if not slots:
            return cls(width, dim)
        made = cls(width, dim, slots, find_samples(value, dim, site.args[-1].shape[0]))
        made.layer = {"options": {"side": "output" if site.rule.place == "after" else "input"}}
        if isinstance(weight := getattr(site.module, "weight", None), Tensor):
            made.layer["shape"] = list(get_weight_shape(site.module, weight))
        return made

    def bank(self) -> dict[str, Any]:
        """Return the description of the bank and its place; see `adapters.banks.Bank`."""
        return {"kind": make_kind_key(type(self)), "slots": self.slots, "rank": 1, "shape": [self.width],
                "parameters": ["gate"], **self.layer}  # fmt: skip

    def forward(self, y: Tensor, rows: Tensor | None = None) -> Tensor:
        if rows is not None:
            return self.banked(y, rows)
        made = y * align_to_dim(self.weight, y, self.dim)
        return made if made.dtype == y.dtype else made.to(y.dtype)  # of gates that train in a wider dtype than the model's

    def banked(self, y: Tensor, rows: Tensor) -> Tensor:
        """Return y times the gates of the slots that each sample takes. In eager code on a CPU only slots in use cost time."""
        slots = find_used_slots(rows, self.slots)
        if not slots:
            return y.clone()
        given = torch.unflatten(rows, 1, (self.slots, -1))[..., 0]  # (batch, slots)
        weight: Tensor = self.weight
        if len(slots) < self.slots:
            given, weight = given[:, list(slots)], weight[list(slots)]
        batch, at = given.shape[0], self.batch_dim
        if at < 0 or y.dim() < 2 or (at == self.dim % y.dim()) or y.shape[at] % batch:
            alike = (given == given[:1]).all()
            factor = self.combine(given[0], weight)
            factor = torch.where(alike | (factor == 1), factor, torch.nan)
            return (y * align_to_dim(factor, y, self.dim)).to(y.dtype)
        factor = self.combine(given, weight)
        shape = [1] * y.dim()
        shape[at], shape[self.dim] = batch, self.width
        split = torch.unflatten(y, at, (batch, -1))  # more rows than samples where a layer is given parts of each
        factor = (factor if at < self.dim % y.dim() else factor.mT).reshape(shape).unsqueeze(at + 1)
        made: Tensor = (split * factor).to(y.dtype).flatten(at, at + 1)
        return made

    def combine(self, gates: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the gates of several slots as one.

        Args:
            gates: How much of each slot is taken, (..., slots).
            weight: What the slots have beyond one, (slots, width); None: those of the bank.

        Returns:
            float32, or float64 where the bank has that, (..., width): one, and so much of what each slot has beyond it.
        """
        own = self.weight if weight is None else weight
        dtype = torch.promote_types(own.dtype, torch.float32)
        return 1 + gates.to(own.device, dtype) @ own.to(dtype)


class Ssf(Block):
    """y * scale + shift per channel, one and zero when new (SSF, Lian et al. 2022, arXiv 2210.08823).

    y is (..., features), or (batch, channels, *space) when `dim` is 1. The authors' code draws both around these values with a
    deviation of 0.02; here a new one changes nothing.
    """

    neutral = True

    def __init__(self, width: int, dim: int = -1) -> None:
        super().__init__()
        self.width, self.dim = width, dim
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    @classmethod
    def at(cls, site: Site, dim: int | None = None) -> Ssf:
        """Make a scale and a shift for any tensor; `dim` is its channel dimension, by default that of the layers around."""
        return cls(*get_width(site, site.args[0], dim))

    def forward(self, y: Tensor) -> Tensor:
        return y * align_to_dim(self.scale, y, self.dim) + align_to_dim(self.shift, y, self.dim)
