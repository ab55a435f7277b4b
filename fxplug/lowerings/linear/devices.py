"""Where the Triton kernels run, and in which tiles: a rule over what is known before a call, without Triton."""

from __future__ import annotations

import functools
import json
import os
import re
from importlib.resources import files
from typing import Any, NamedTuple

import torch

from ...core import find_version

TILES: dict[str, Any] = json.loads(files(__package__).joinpath("tiles.json").read_text("utf-8"))
FORMAT = 1  # of tiles.json
TRITON = (3, 8)  # the oldest that the kernels are tested with
CAPABILITY = (8, 0)
WIDEST = 128  # the highest rank, of one slot
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Tile(NamedTuple):
    """What one program of `expand` computes: rows, columns, inner values at a time; and its warps and stages."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


def is_interpreted() -> bool:
    """Return whether Triton runs kernels in Python, on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def explain_unfit(device: torch.device, dtype: torch.dtype, rank: int) -> str | None:
    """Return why the kernels do not support a layer; None if they do."""
    if reason := _unfit_device(device, is_interpreted()):
        return reason
    if dtype not in DTYPES:
        return f"Triton's kernels take float16, bfloat16 and float32, not {str(dtype).removeprefix('torch.')}"
    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32":
        return (
            "Triton's kernels multiply float32 in TF32, and torch does not: call torch.set_float32_matmul_precision('high'), "
            "or lower under autocast"
        )
    return f"Triton's kernels hold ranks up to {WIDEST}, and there are {rank}" if rank > WIDEST else None


@functools.cache
def _unfit_device(device: torch.device, in_python: bool) -> str | None:
    found = find_version("triton")
    if found is None:
        return "Triton is not installed: it is installed with torch for CUDA"
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < TRITON:
        return f"Triton {found} is older than {'.'.join(map(str, TRITON))}, the oldest that is tested: install a newer torch"
    if TILES.get("format") != FORMAT:
        return f"the table of Triton's tiles has format {TILES.get('format')}, not {FORMAT}: install fxplug again"
    if in_python and device.type == "cpu":
        return None
    if device.type != "cuda" or torch.version.hip:
        return f"Triton's kernels run on CUDA, and the layer is on {'ROCm' if device.type == 'cuda' else device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        name, needed = torch.cuda.get_device_name(device), ".".join(map(str, CAPABILITY))
        return f"Triton's kernels need CUDA capability {needed}, and {name} has {'.'.join(map(str, capability))}"
    return None


@functools.cache
def tiles_of(device: torch.device) -> tuple[list[Tile], int]:
    """Return the tiles for a device, largest first, and how many of them it computes at once."""
    if device.type != "cuda":
        return tiles_for(80), 4
    facts = torch.cuda.get_device_properties(device)
    return tiles_for(10 * facts.major + facts.minor, facts.name), facts.multi_processor_count


def tiles_for(capability: int, name: str = "") -> list[Tile]:
    """Return the tiles for a CUDA capability, as 90 for 9.0, or for the device of this name."""
    of = max(known for known in map(int, TILES["capabilities"]) if known <= capability)
    return [Tile(*tile) for tile in TILES["devices"].get(name) or TILES["capabilities"][str(of)]]


def choose_tile(rows: Any, columns: int, device: torch.device, dtype: torch.dtype) -> Tile:
    """Return the largest tile of which every multiprocessor gets one.

    A symbolic number of rows is not compared, as that would specialise it: it counts as large.
    """
    tiles, at_once = tiles_of(device)
    known = isinstance(rows, int)
    fits = (t for t in tiles if 2 * columns > t.n and (not known or -(-rows // t.m) * -(-columns // t.n) >= at_once))
    tile = next(fits, tiles[-1])
    return tile._replace(k=tile.k // 2) if dtype.itemsize == 4 else tile
