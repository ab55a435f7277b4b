"""How much of which slot each sample takes: the network that passes with slots bring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..torch_internals.dispatch import is_watched
from ..torch_internals.tensors import assert_later
from ..turns import Turns
from .base import Block

ROWS = 1024  # the most samples of a batch that can have entries of their own
NAME = 128  # the most bytes of an adapter's name


def taken(gates: Tensor, slots: int) -> Sequence[int]:
    """The slots that some sample takes, of gates (..., slots * n) for so many slots, n numbers for each.

    These are all of them where values are not looked at: where a compiler looks on, and on a GPU, which would be waited for.
    """
    if is_watched() or type(gates) is not Tensor or gates.device.type != "cpu":
        return range(slots)
    rows = gates.reshape(-1, slots, gates.shape[-1] // slots)[..., 0].tolist()
    return [slot for slot, numbers in enumerate(zip(*rows, strict=True)) if any(numbers)]  # NaN is taken too


class Table(Block):
    """The state of a pass's slots, as tensors: it is saved, moved and shared with the weights, and a change recompiles nothing.

    `weights`, float32 (ROWS, slots), says how much of each slot each sample takes; all rows are equal where the whole batch
    takes the same. `entries`, int64, is the number of samples whose rows were given one by one, 0 for a whole batch. `names`,
    uint8 (slots, NAME), holds the adapters' names as UTF-8; a slot without a name is free.
    """

    neutral = True
    weights: Tensor
    entries: Tensor
    names: Tensor

    def __init__(self, slots: int, rank: int, others: Sequence[int] = ()) -> None:
        """`others` are ranks of further banks, which have rows of their own."""
        super().__init__()
        self.slots, self.rank, self.others = slots, rank, list(others)
        self.turns = Turns()  # shells share it as they share the tensors, and a copy has its own
        self.register_buffer("weights", torch.zeros(ROWS, slots, dtype=torch.float32))
        self.register_buffer("entries", torch.zeros((), dtype=torch.int64))
        self.register_buffer("names", torch.zeros(slots, NAME, dtype=torch.uint8))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Gives (batch, slots * rank), each slot's weight for each of its inner channels, and (slots,), what all samples take;
        then what the first is for each of the other ranks.

        x has the samples in its first dimension. The second result is NaN where samples differ. Where entries were given for
        another number of samples, a CPU raises RuntimeError; on a GPU, which no error may leave unusable, all is NaN.
        """
        batch = x.shape[0]
        rows = self.weights[torch.arange(batch, device=self.weights.device).clamp(max=ROWS - 1)].float()
        fits = (self.entries == 0) | (self.entries == batch)
        if rows.device.type == "cpu":
            assert_later(fits, "adapters.use was given one entry per sample, and the batch has another size")
        rows = torch.where(fits, rows, torch.nan)
        uniform = torch.where((rows == self.weights[0]).all(), self.weights[0].float(), torch.nan)
        return rows.repeat_interleave(self.rank, 1), uniform, *(rows.repeat_interleave(rank, 1) for rank in self.others)


class Gates(nn.Module):
    """The table of a pass's slots, as a network of the pass: what it gives goes to each of the pass's blocks."""

    def __init__(self, slots: int, rank: int, others: Sequence[int] = ()) -> None:
        super().__init__()
        self.table = Table(slots, rank, others)

    @classmethod
    def of(cls, model: Any, slots: int, rank: int, others: Sequence[int] = ()) -> Gates:
        """Gates for a model with banks of so many slots, of this rank, or of one of the others."""
        return cls(slots, rank, others)

    def forward(self, x: Tensor) -> Any:
        return self.table(x)
