"""When two calls are the same for a stage: its inputs to the bit, its weights, the choice of adapters and torch's modes.

> A kept value is used only if all that it was computed from is the same: its inputs by their bits, its weights by identity,
> address and version, the choice of adapters by its numbers, and torch's modes. Anything else is computed.

Writes of weights that leave their version as it was are not seen: through `.data` or a tensor that was made with it, through
numpy, and by a fused optimizer's kernel that is called without `Optimizer.step`. Nor are casts that `torch.autocast` keeps of
weights which were written since, within one block.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from ctypes import string_at
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import format_fields
from ...core.ir import ops
from ...core.ir.containers import list_members
from ...core.torch_internals.modules import GLOBAL_HOOKS, read_kernel_modes
from ...core.torch_internals.tensors import is_watched

CONDITIONS, TIME = "conditions", "time"
COUNTED = (int, float, complex)
# an input that is none of these, no tensor and no container of them is not looked into: its calls keep nothing
PLAIN = (bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
NUMBERS = itertools.count(1)  # of sets of conditions and forms of calls: nothing gets that of another, in no thread
SMALL = 1 << 14  # bytes: memory of so much is read at once, which takes a tenth of the time of comparing two tensors
LINE = 64  # bytes: some kernels round otherwise where memory does not begin at a multiple of it


@dataclass
class Call:
    """What a call is made with: its inputs, and these in the parts that are compared.

    `form` is what all stages depend on: structure, shapes, strides, dtypes, devices, plain values, which tensors are one, and
    torch's modes. `tensors` has those of each group with the names of their inputs, `numbers` the numbers.
    """

    values: dict[str, Any]
    form: tuple[Any, ...]
    tensors: dict[str, list[tuple[str, Tensor]]]
    numbers: dict[str, tuple[str, ...]]

    __repr__ = format_fields


def read_call(values: dict[str, Any], groups: Mapping[str, str]) -> Call | None:
    """Read a call's inputs by name, with the group of each that has one; None for one of other values than can be compared."""
    form: list[Any] = [read_kernel_modes()]
    reading = CallReading(form)
    for name, value in values.items():
        if value is None:
            form.append(None)
        elif not reading.add(name, groups.get(name), value):
            return None
    return Call(values, tuple(form), reading.tensors, {group: tuple(rows) for group, rows in reading.numbers.items()})


class CallReading:
    """The inputs of one call that were read so far."""

    def __init__(self, form: list[Any]) -> None:
        self.form = form
        self.tensors: dict[str, list[tuple[str, Tensor]]] = {CONDITIONS: [], TIME: []}
        self.numbers: dict[str, list[str]] = {CONDITIONS: [], TIME: []}
        self.seen: dict[int, int] = {}

    def add(self, name: str, group: str | None, value: Any) -> bool:
        """Add a value of an input, or a member of one. Returns whether it can be compared."""
        kind, form = type(value), self.form
        if isinstance(value, Tensor):
            if not is_comparable(value):
                return False
            seen = self.seen
            first = seen.setdefault(id(value), len(seen))
            device, casts = value.device, None
            if not (value.is_cpu or value.is_cuda):  # whose autocast is not among the modes
                casts = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
            form.append((value.shape, value.stride(), value.dtype, device, value.is_inference(), first, casts))
            if group is not None:
                self.tensors[group].append((name, value))
            return True
        if kind in COUNTED:
            form.append(kind)
            if group is not None:
                self.numbers[group].append(repr(value))  # which tells -0.0 from 0.0
            return True
        if value is None or kind is bool:
            form.append((kind, value))
            return True
        members = list_members(value)
        if members is None:
            form.append((kind, repr(value)))
            return kind in PLAIN
        rows = list(members)
        form.append((kind, tuple(key for key, _ in rows)))
        return all(self.add(name, group, member) for _, member in rows)


def is_comparable(value: Tensor) -> bool:
    """Return whether a tensor is plain memory, whose bits are all that there is of it."""
    return (
        type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and value.itemsize in BITS
        and not (value.is_nested or value.is_quantized or value.is_meta or value.is_conj() or value.is_neg())
        and not (vars(value) and ops.attributes(value))
    )  # fmt: skip


def is_observed() -> bool:
    """Return whether somebody sees each operation or call of a module, and would miss those that are not made."""
    return is_watched() or any(GLOBAL_HOOKS.values())


# --- inputs


def as_bits(value: Tensor) -> Tensor:
    """Return a tensor as whole numbers of its bits: -0.0 and 0.0 are two, and NaN is itself."""
    if value.requires_grad:
        value = value.detach()
    if value.is_complex():
        value = torch.view_as_real(value)
    return value.view(BITS[value.itemsize])


def has_same_bits(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Return whether tensors of the same shapes and dtypes are equal to the bit; on a GPU one wait tells of all."""
    return _are_equal((as_bits(one), as_bits(other)) for one, other in pairs)


def _are_equal(pairs: Iterable[tuple[Any, Any]]) -> bool:
    waiting = []
    for a, b in pairs:
        if type(a) is bytes:
            if a != b:
                return False
        elif a.is_cpu:
            if not torch.equal(a, b):
                return False
        else:
            waiting.append((a != b).any())
    return not waiting or not bool(torch.stack(waiting).any())


def read_memory(value: Tensor) -> bytes | None:
    """Read the memory that a small tensor on the CPU lies in; None for another one, or where more lies between its numbers."""
    size = value.nbytes
    if size > SMALL or not value.is_cpu or not (address := value.data_ptr()):
        return None
    if not value.is_contiguous():  # as a time is for all samples
        last = sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
        if last >= value.numel():
            return None
        size = (last + 1) * value.itemsize
    return string_at(address, size)


def read_bytes(tensors: Iterable[Tensor]) -> bytes:
    """Read the bits of small tensors of known sizes and strides on the host: equal bytes are equal bits."""
    return b"".join([read_memory(tensor) or as_bits(tensor).cpu().numpy().tobytes() for tensor in tensors])


@dataclass
class ConditionCopy:
    """One set of conditions: its number, which no other ever gets, and copies of its own, which nobody else can write."""

    number: int
    plain: tuple[int, Any, Any]  # the form of the call, numbers, and where the memory of each tensor begins
    copies: list[bytes | Tensor]  # as bits


class KnownConditions:
    """The last sets of conditions, compared by their bits; `limit` of them are known, the oldest goes first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.rows: list[ConditionCopy] = []
        self.new_in_turn: list[set[str]] = []  # what differed from the set before, in calls that found none

    def find(self, call: Call, form: int) -> tuple[int, list[int]]:
        """Return the number of a call's conditions, a new one if they are new, and the numbers of those that went for it.

        `form` is the number of the call's form.
        """
        tensors = [tensor for _, tensor in call.tensors[CONDITIONS]]
        plain = form, call.numbers[CONDITIONS], [tensor.data_ptr() % LINE for tensor in tensors]
        bits = [read_memory(tensor) or as_bits(tensor) for tensor in tensors]
        for row in reversed(self.rows):
            if row.plain == plain and _are_equal(zip(bits, row.copies, strict=True)):
                if row is not self.rows[-1]:
                    self.rows.remove(row)
                    self.rows.append(row)
                self.new_in_turn.clear()
                return row.number, []
        self._note_change(call, form, bits)
        number = next(NUMBERS)
        self.rows.append(ConditionCopy(number, plain, [x if isinstance(x, bytes) else x.clone() for x in bits]))
        gone = self.rows[: max(len(self.rows) - self.limit, 0)]
        self.rows = self.rows[len(gone) :]
        return number, [row.number for row in gone]

    def _note_change(self, call: Call, form: int, bits: list[bytes | Tensor]) -> None:
        last = self.rows[-1] if self.rows else None
        if last is None or last.plain[0] != form:
            self.new_in_turn.clear()
            return
        named = zip(call.tensors[CONDITIONS], bits, last.copies, strict=True)
        self.new_in_turn.append({name for (name, _), now, before in named if not _are_equal([(now, before)])})

    def list_changing(self, calls: int) -> list[str]:
        """Return the inputs that were new in each of the last calls, so many of them, none of which found its conditions."""
        if len(self.new_in_turn) < calls:
            return []
        return sorted(set.intersection(*self.new_in_turn[-calls:]))

    def count_bytes(self) -> int:
        """Return the size of the copies."""
        return sum(len(x) if isinstance(x, bytes) else x.nbytes for row in self.rows for x in row.copies)
