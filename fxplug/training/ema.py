"""A moving average of the weights that train."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from ..torch_internals.tensors import lerp_all


class Ema:
    """An exponential moving average in float32 of named parameters (Polyak averaging; the ramp is that of diffusers' EMAModel).

    After step t the average is `d * average + (1 - d) * weights` with d = min(decay, (1 + t) / (10 + t)).
    """

    def __init__(self, parameters: Mapping[str, Tensor], decay: float) -> None:
        self.parameters, self.decay, self.steps = dict(parameters), decay, 0
        self.average = {name: p.detach().float().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights of this moment in."""
        self.steps += 1
        weight = 1 - min(self.decay, (1 + self.steps) / (10 + self.steps))
        now = [p.detach().float() for p in self.parameters.values()]
        lerp_all(list(self.average.values()), now, weight)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The parameters hold the average inside, and their own values again after."""
        kept = {name: p.detach().clone() for name, p in self.parameters.items()}
        try:
            self._fill(self.average)
            yield
        finally:
            self._fill(kept)

    @torch.no_grad()
    def _fill(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(values[name])
