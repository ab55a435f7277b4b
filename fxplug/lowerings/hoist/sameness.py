"""When two calls are the same for a stage: its inputs to the bit, its weights, the choice of adapters and torch's modes.

> A kept value is used only if all that it was computed from is the same: its inputs by their bits, its weights by identity,
> address and version, the choice of adapters by its numbers, and torch's modes. Anything else is computed.

Two writes of weights leave their version as it was and are not seen: through `.data`, and by a fused optimizer's kernel that is
called without `Optimizer.step`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import format_fields
from ...core.ir import ops
from ...core.ir.containers import list_members
from ...core.torch_internals.modules import GLOBAL_HOOKS
from ...core.torch_internals.tensors import is_watched

CONDITIONS, TIME = "conditions", "time"
NUMBERS = (int, float, complex)
# an input that is none of these, no tensor and no container of them is not looked into: its calls keep nothing
PLAIN = (bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, slice)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
CASTING = ("cpu", "cuda")  # devices that a model of any other may use, too
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
    form: list[Any] = [read_modes()]
    tensors: dict[str, list[tuple[str, Tensor]]] = {CONDITIONS: [], TIME: []}
    numbers: dict[str, list[str]] = {CONDITIONS: [], TIME: []}
    seen: dict[int, int] = {}

    def visit(name: str, group: str | None, value: Any) -> bool:
        if isinstance(value, Tensor):
            if not is_comparable(value):
                return False
            first = seen.setdefault(id(value), len(seen))
            kind = value.device.type  # whose autocast is not among the modes
            casts = kind not in CASTING and (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            form.append((value.shape, value.stride(), value.dtype, value.device, value.is_inference(), first, casts))
            if group is not None:
                tensors[group].append((name, value))
            return True
        if type(value) in NUMBERS:
            form.append(type(value))
            if group is not None:
                numbers[group].append(repr(value))  # which tells -0.0 from 0.0
            return True
        members = list_members(value)
        if members is None:
            form.append((type(value), repr(value)))
            return isinstance(value, PLAIN)
        rows = list(members)
        form.append((type(value), tuple(key for key, _ in rows)))
        return all(visit(name, group, member) for _, member in rows)

    if not all(visit(name, groups.get(name), value) for name, value in values.items()):
        return None
    return Call(values, tuple(form), tensors, {group: tuple(rows) for group, rows in numbers.items()})


def is_comparable(value: Tensor) -> bool:
    """Return whether a tensor is plain memory, whose bits are all that there is of it."""
    plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_nested
    plain = plain and not value.is_quantized and not value.is_meta and value.itemsize in BITS
    return plain and not value.is_conj() and not value.is_neg() and not ops.attributes(value)


def read_modes() -> tuple[Any, ...]:
    """Return the modes of torch that kernels ask, which may compute other bits in another one."""
    backends: Any = torch.backends
    matmul = backends.cuda.matmul
    return (
        torch.is_inference_mode_enabled(), torch.get_num_threads(), torch.get_default_dtype(),
        torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(), torch.is_autocast_cache_enabled(),
        *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in CASTING),
        *(getattr(owner, "fp32_precision", None) for owner in (backends.mkldnn.matmul, backends.mkldnn.conv, matmul)),
        backends.cuda.flash_sdp_enabled(), backends.cuda.mem_efficient_sdp_enabled(), backends.cuda.math_sdp_enabled(),
        backends.cuda.cudnn_sdp_enabled(), backends.mha.get_fastpath_enabled(), backends.mkldnn.enabled, backends.cudnn.enabled,
        backends.cudnn.benchmark, backends.cudnn.deterministic, backends.cudnn.allow_tf32,
        matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction,
    )  # fmt: skip


def is_observed() -> bool:
    """Return whether somebody sees each operation or call of a module, and would miss those that are not made."""
    return is_watched() or any(GLOBAL_HOOKS.values())


# --- inputs


def as_bits(value: Tensor) -> Tensor:
    """Return a tensor as whole numbers of its bits: -0.0 and 0.0 are two, and NaN is itself."""
    value = value.detach()
    if value.is_complex():
        value = torch.view_as_real(value)
    return value.view(BITS[value.itemsize])


def has_same_bits(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Return whether tensors of the same shapes and dtypes are equal to the bit; on a GPU one wait tells of all."""
    waiting = []
    for one, other in pairs:
        a, b = as_bits(one), as_bits(other)
        if a.device.type == "cpu":
            if not torch.equal(a, b):
                return False
        else:
            waiting.append((a != b).any())
    return not waiting or not bool(torch.stack(waiting).any())


def read_bytes(tensors: Iterable[Tensor]) -> bytes:
    """Read the bits of small tensors on the host."""
    return b"".join(as_bits(tensor).cpu().numpy().tobytes() for tensor in tensors)


@dataclass
class ConditionCopy:
    """One set of conditions: its number, which no other ever gets, and copies of its own, which nobody else can write."""

    number: int
    form: tuple[Any, ...]
    plain: tuple[Any, ...]  # numbers, and where the memory of each tensor begins
    copies: list[Tensor]


class KnownConditions:
    """The last sets of conditions, compared by their bits; `limit` of them are known, the oldest goes first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.rows: list[ConditionCopy] = []
        self.begun = 0
        self.new_in_turn: list[set[str]] = []  # what differed from the set before, in calls that found none

    def find(self, call: Call) -> tuple[int, list[int]]:
        """Return the number of a call's conditions, a new one if they are new, and the numbers of those that went for it."""
        tensors = [tensor for _, tensor in call.tensors[CONDITIONS]]
        plain = (call.numbers[CONDITIONS], tuple(t.data_ptr() % LINE for t in tensors))
        for row in reversed(self.rows):
            alike = row.form == call.form and row.plain == plain
            if alike and has_same_bits(zip(tensors, row.copies, strict=True)):
                self.rows.remove(row)
                self.rows.append(row)
                self.new_in_turn.clear()
                return row.number, []
        self._note_change(call, plain)
        self.begun += 1
        self.rows.append(ConditionCopy(self.begun, call.form, plain, [t.detach().clone() for t in tensors]))
        gone = self.rows[: max(len(self.rows) - self.limit, 0)]
        self.rows = self.rows[len(gone) :]
        return self.begun, [row.number for row in gone]

    def _note_change(self, call: Call, plain: tuple[Any, ...]) -> None:
        last = self.rows[-1] if self.rows else None
        if last is None or last.form != call.form:
            self.new_in_turn.clear()
            return
        named = zip(call.tensors[CONDITIONS], last.copies, strict=True)
        names = {name for (name, now), before in named if not has_same_bits([(now, before)])}
        self.new_in_turn.append(names)

    def list_changing(self, calls: int) -> list[str]:
        """Return the inputs that were new in each of the last calls, so many of them, none of which found its conditions."""
        if len(self.new_in_turn) < calls:
            return []
        return sorted(set.intersection(*self.new_in_turn[-calls:]))

    def count_bytes(self) -> int:
        """Return the size of the copies."""
        return sum(copy.nbytes for row in self.rows for copy in row.copies)
