"""What one call takes and makes of stages, and calls that differ from it in their time alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from inspect import Parameter, Signature
from typing import Any

import torch
from torch import Tensor, fx

from ...core.errors import SpecError, format_fields, quote
from ...core.ir.containers import map_leaves
from ...core.torch_internals.modules import get_modes, set_modes
from ...core.torch_internals.tensors import FakeTensorMode
from .cut import StageCut
from .kept import KeptValues, Key, Values
from .sameness import Call


class CallBinder:
    """The inputs of a signature by name, in its order, for calls; what `Signature.bind` does in a tenth of the time."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        rows = signature.parameters.values()
        self._defaults = {row.name: row.default for row in rows}
        plain = all(row.kind is Parameter.POSITIONAL_OR_KEYWORD for row in rows)
        self._names = [row.name for row in rows] if plain else None
        self._required = [row.name for row in rows if row.default is Parameter.empty]

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return all inputs of a call. Raises TypeError for one that the signature does not take."""
        names = self._names
        if names is not None and len(args) <= len(names):
            found = self._defaults.copy()
            found.update(zip(names, args, strict=False))
            found.update(kwargs)
            twice = args and not kwargs.keys().isdisjoint(names[: len(args)])
            missing = [name for name in self._required if found[name] is Parameter.empty]
            if not (twice or missing) and len(found) == len(names):
                return found
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)


@dataclass
class CallForm:
    """What calls have in common besides values: its number, whether such calls can keep values, and sizes of the step's own."""

    number: int
    refused: str
    sizes: dict[str, Any] | None = None

    __repr__ = format_fields


@dataclass
class CallPlan:
    """What one call takes and makes: its form, the key of each stage, and the values found so far: all, if it `is_kept`."""

    call: Call
    form: CallForm
    conditions: int
    slots: bytes
    keys: dict[str, Key]
    values: Values = field(default_factory=dict)
    is_kept: bool = False

    def find_values(self, kept: KeptValues) -> None:
        """Take the values of all stages but the step from those that are kept, if none is missing."""
        found = [kept.find(key) for key in self.keys.values()]
        if None not in found:
            self.is_kept = True
            for values in found:
                self.values.update(values or ())


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


def fill_times(values: Mapping[str, Any], times: Mapping[str, float]) -> dict[str, Any]:
    """Return the inputs that times are for with these, of the same kind, sizes and strides; what is one tensor stays one."""
    made: dict[int, Tensor] = {}

    def fill(time: float, tensor: Tensor, _: Any) -> Tensor:
        if id(tensor) not in made:
            last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
            memory = torch.full((last + 1,), time, dtype=tensor.dtype, device=tensor.device)
            made[id(tensor)] = memory.as_strided(tensor.size(), tensor.stride())
        return made[id(tensor)]

    found = {}
    for name, time in times.items():
        value = values[name]
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found[name] = type(value)(time)
        else:
            found[name] = map_leaves(value, partial(fill, time))
    return found


def find_sizes(cut: StageCut, form: CallForm, inputs: list[Any]) -> None:
    """Find the sizes that stages need of values which only the step has: what these need is computed once for each form.

    Where that would draw or write, it is done with tensors without values.
    """
    runner = fx.Interpreter(fx.GraphModule(cut.root, cut.write_numbers()))
    before = get_modes()
    torch.set_autocast_cache_enabled(False)  # it would keep weights without values for the calls after this
    try:
        if cut.are_numbers_pure():
            found = runner.run(*inputs)
        else:
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                found = runner.run(*map_leaves(inputs, lambda t, _: mode.from_tensor(t.detach())))
    except Exception as error:  # whatever an operation raises that has no form without values
        form.refused = f"sizes in it cannot be found before it: {type(error).__name__}: {error}"
        return
    finally:
        set_modes(before)  # which an error inside of a scope leaves switched
    form.sizes = dict(zip([node.name for node in cut.late], found, strict=True))
