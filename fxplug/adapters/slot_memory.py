"""What a slot keeps of the file that an adapter came from, so that the same file can be written again, to the last bit.

A bank holds an update with its scale in one of its factors. Beside it are two tensors that no graph reads: `said`, int64
(slots, 3), has the bits of the scale as a float64, the rank, and the number of the file's dtype in `DTYPES`; `lost`, int8 of
the shape of the scaled factor, says by how many steps from one number of the file's dtype to the next the quotient of what is
held and the scale misses the number of the file. Of 16-bit files in float32 slots, and of scales that are powers of two, it
never does; of other float32 files it does for some numbers, by one.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

# by their numbers in `said`: new ones go to the end
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def meta_row(scale: float, rank: int, dtype: torch.dtype) -> Tensor:
    """A row of `said`."""
    (bits,) = struct.unpack("<q", struct.pack("<d", scale))
    return torch.tensor([bits, rank, DTYPES.index(dtype) if dtype in DTYPES else 0], dtype=torch.int64)


def read_meta(row: Tensor) -> tuple[float, int, torch.dtype] | None:
    """The scale, rank and dtype of a row of `said`; None where nothing is said, or what no load has written."""
    bits, rank, number = row.tolist()
    (scale,) = struct.unpack("<d", struct.pack("<q", bits))
    return (scale, rank, DTYPES[number]) if rank > 0 and 0 <= number < len(DTYPES) and abs(scale) < float("inf") else None


def scaled(value: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """A factor as a slot of a dtype holds it: times the scale in float32."""
    return (value.float() * scale).to(dtype)


def rounding_residue(value: Tensor, held: Tensor, scale: float) -> Tensor:
    """What `unscaled` needs to know, int8, of the number of a file and what is held of it; 0 where that is too far away."""
    if scale == 1 and value.dtype == held.dtype != torch.float64:
        return torch.zeros(held.shape, dtype=torch.int8)
    steps = _bits(value).long() - _bits(_quotient(held, scale, value.dtype)).long()
    return torch.where(steps.abs() < 128, steps, 0).to(torch.int8)


def unscaled(held: Tensor, steps: Tensor | None, scale: float, dtype: torch.dtype) -> Tensor:
    """The numbers of a file by what is held of them; where they were written over meanwhile, the nearest quotient."""
    near = _quotient(held, scale, dtype)
    if steps is None:
        return near
    bits = _bits(near)
    moved = bits + steps.to(bits.dtype)
    right = scaled(moved.view(dtype), scale, held.dtype) == held
    return torch.where(right, moved, bits).view(dtype)


def _quotient(held: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return (held.float() / scale if scale else torch.zeros_like(held, dtype=torch.float32)).to(dtype).contiguous()


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().view(_BITS[value.itemsize])
