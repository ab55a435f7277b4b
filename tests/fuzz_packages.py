"""Operations of torch in compiled packages, at other sizes and values than the example's: as eager, or refused in words."""

from __future__ import annotations

import random
import tempfile
import warnings
from pathlib import Path
from typing import Any

import exports_made
import torch
from fuzz_exports import CLOSE, STRIDE, Of, calls, made_of, operations
from torch import Tensor, nn

import fxplug
from fxplug.core.errors import FxplugError
from fxplug.core.ir.comparison import WITHIN, measure_difference
from fxplug.exports.size_trial import list_tensors

COST = 400
TOGETHER = 16  # operations in a package: compiling takes a minute, however few there are


class Many(nn.Module):
    """Some operations, each on tensors of its own."""

    def __init__(self, rows: list[Any]) -> None:
        super().__init__()
        self.of, self.counts = nn.ModuleList(module for module, *_ in rows), [len(inputs) for *_, inputs in rows]

    def forward(self, *tensors: Tensor) -> Any:
        found = []
        for module, count in zip(self.of, self.counts, strict=True):
            found.append(module(*tensors[:count]))
            tensors = tensors[count:]
        return tuple(found)


def fuzz_packages(cases: int, seed: int) -> list[str]:
    """A line for each miss of as many packages, and with seed 0 of each family's, of which the tests have some."""
    found = _families() if seed == 0 else []
    for n in range(seed, seed + cases):
        rows = []
        for place in range(TOGETHER):
            text = operations()[(n * TOGETHER + place) * STRIDE % len(operations())]
            row = made_of(text, random.Random(n * TOGETHER + place))
            if row[-1] and _is_call(row):
                rows.append((text, row))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found += [f"case {n}: {line}" for line in _attack(rows)]
    return found


def _families() -> list[str]:
    found = []
    for name, size in exports_made.FAMILIES.items():
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                exports_made.check_family(name, size, Path(folder), "aoti")
            except (AssertionError, FxplugError) as error:
                found.append(f"{name}: {error}")
    return found


def _is_call(row: Any) -> bool:
    module, *_, inputs = row
    try:
        module(*inputs)
        fxplug.trace(module, inputs)
    except Exception:  # no call of this operation, or no graph of it
        return False
    return True


def _attack(rows: list[Any]) -> list[str]:
    if not rows:
        return []
    flat = tuple(tensor for _, (*_, inputs) in rows for tensor in inputs)
    with tempfile.TemporaryDirectory() as folder:
        try:
            gm = fxplug.trace(Many([row for _, row in rows]).eval(), flat)
            package = fxplug.load_package(fxplug.export(gm, Path(folder), flat, to="aoti").path, trusted=True)
        except Exception as error:
            if len(rows) == 1:
                foreign = not isinstance(error, FxplugError)
                return [f"{rows[0][0]}: the export ends in {type(error).__name__}: {str(error)[:200]}"] * foreign
            half = len(rows) // 2  # one that is refused is looked for
            return _attack(rows[:half]) + _attack(rows[half:])
        found, before = [], 0
        for place, (text, (module, names, made, sizes, rng, inputs)) in enumerate(rows):
            for given in [list(inputs), *calls(names, made, sizes, rng)]:
                line = _missed(package, module, place, given, [*flat[:before], *given, *flat[before + len(given) :]])
                found += [f"{text}: {line} at {[tuple(t.shape) for t in given]}"] * bool(line)
            before += len(inputs)
    return found


def _missed(package: Any, module: Of, place: int, given: list[Tensor], every: list[Tensor]) -> str:
    try:
        wanted = list_tensors(module(*given))
    except Exception:  # no call of this operation
        return ""
    try:
        got = list_tensors(package(*every)[place])
    except FxplugError:
        return ""
    except Exception as error:
        return f"the call ends in {type(error).__name__}: {str(error)[:200]}"
    if [t.shape for t in wanted] == [t.shape for t in got]:
        got = [torch.where(a.isnan(), a, b) if a.dtype == b.dtype else b for a, b in zip(wanted, got, strict=True)]
    gap = measure_difference(wanted, got, WITHIN)
    return f"{gap.distance:.1e} off" if gap.times > CLOSE else ""
