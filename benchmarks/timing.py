"""Time of ways of doing one thing: they take turns, and ratios are of the same turn.

It is this process's time on a CPU, and that of CUDA's events on a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], Any]


def turns(
    ways: dict[str, Call], count: int, over: str, warm: int = 2, clock: Callable[[Call], float] | None = None
) -> dict[str, Any]:
    """Milliseconds of each way, who begins alternating, and the median of the ratios over `over` with their spread."""
    times: list[dict[str, float]] = []
    for index in range(count + warm):
        found = {name: (clock or milliseconds)(ways[name]) for name in (list(ways) if index % 2 else list(reversed(ways)))}
        if index >= warm:
            times.append(found)
    return {
        name: {"milliseconds": statistics.median(t[name] for t in times), "ratio": spread([t[name] / t[over] for t in times])}
        for name in ways
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, lowest and highest, and the middle half."""
    quarters = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": statistics.median(values), "low": min(values), "high": max(values), "middle": [quarters[0], quarters[2]]}


def shown(found: dict[str, float]) -> str:
    return "x{median:.3f} ({low:.3f} to {high:.3f})".format(**found)


def milliseconds(call: Call) -> float:
    """Time of a call, in that of this process on a CPU."""
    if torch.cuda.is_available():
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)
    begun = time.process_time()
    call()
    return 1000 * (time.process_time() - begun)


def by_the_clock(call: Call) -> float:
    """Milliseconds that somebody waits for a call and what it started on the device."""
    begun = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - begun)


def error_of(error: BaseException) -> str:
    """The class of an error and the first line of what it says."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"[:200]


def difference(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference over the largest value."""
    return float((out.float() - wanted.float()).abs().max() / wanted.float().abs().max())
