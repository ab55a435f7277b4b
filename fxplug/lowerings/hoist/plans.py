"""What one call takes and makes of stages, and calls that differ from it in their time alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...core.errors import SpecError, format_fields, quote
from ...core.ir.containers import map_leaves
from .cut import HoistStage
from .kept import Key, Values
from .sameness import CONDITIONS, TIME, Call


@dataclass
class CallForm:
    """What calls have in common besides values: its number, whether such calls can keep values, and sizes of the step's own."""

    number: int
    refused: str
    sizes: dict[str, Any] | None = None

    __repr__ = format_fields


@dataclass
class CallPlan:
    """What one call takes and makes: its form, the key of each stage, and the values found so far."""

    call: Call
    form: CallForm
    conditions: int
    time: Any
    slots: Any
    values: Values = field(default_factory=dict)

    def key(self, stage: HoistStage) -> Key:
        """Return the key of a stage's values."""
        conditions = self.conditions if CONDITIONS in stage.needs else 0
        time = self.time if TIME in stage.needs else 0
        return Key(stage.name, self.form.number, conditions, time, self.slots if stage.slotted else 0)


def copy_memory(tensor: Tensor) -> Tensor:
    """Copy a tensor with the strides that it has, also where several of its numbers are one in memory."""
    storage = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
    new = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return new.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def read_times(times: Any) -> tuple[float, ...]:
    """Read the times of a run. Raises SpecError for what is no list of numbers."""
    rows = times.detach().flatten().tolist() if isinstance(times, Tensor) else times
    if isinstance(rows, str) or not isinstance(rows, Iterable):
        raise SpecError(f"prepare: times must be the times of a run, such as scheduler.timesteps, not {quote(times)}")
    found = [x.item() if isinstance(x, Tensor) and x.numel() == 1 else x for x in rows]
    if not found or not all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in found):
        raise SpecError(f"prepare: times must be numbers, one or more, not {quote(times)}")
    return tuple(found)


def fill_time(value: Any, time: float) -> Any:
    """Return an input for the time with another one, of the same kind, sizes and strides."""

    def filled(tensor: Tensor, _: Any) -> Tensor:
        last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        memory = torch.full((last + 1,), time, dtype=tensor.dtype, device=tensor.device)
        return memory.as_strided(tensor.size(), tensor.stride())

    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return type(value)(time)
    return map_leaves(value, filled)
