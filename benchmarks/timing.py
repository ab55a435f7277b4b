"""Time of ways of doing one thing: they take turns, and ratios are of the same turn.

It is this process's time on a CPU, and that of CUDA's events on a GPU.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Call = Callable[[], Any]


def turns(
    ways: dict[str, Call], count: int, over: str, warm: int = 2, clock: Callable[[Call], float] | None = None
) -> dict[str, Any]:
    """Milliseconds of each way, and the median of the ratios over `over` with their spread."""
    times = taken(ways, count, warm, clock or milliseconds)
    return {
        name: {"milliseconds": statistics.median(t[name] for t in times), "ratio": ratios(times, name, over)} for name in ways
    }


def taken(ways: Mapping[str, Any], count: int, warm: int, clock: Callable[[Any], float]) -> list[dict[str, float]]:
    """What `clock` says of each way, in so many turns after those that warm up; who begins alternates."""
    times = []
    for index in range(count + warm):
        times.append({name: clock(ways[name]) for name in (list(ways) if index % 2 else list(reversed(ways)))})
    return times[warm:]


def ratios(times: Sequence[Mapping[str, float]], way: str, over: str) -> dict[str, float]:
    """The spread of the ratios of two ways in each turn."""
    return spread([found[way] / found[over] for found in times])


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


def cpu_seconds() -> float:
    """CPU time of this process and of those that it waited for."""
    found = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(row.ru_utime + row.ru_stime for row in found)


def in_a_process(*command: str, **environment: str) -> Any:
    """What a Python command prints in its last line, as JSON, in a process of its own."""
    done = subprocess.run(
        [sys.executable, *command], env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def error_of(error: BaseException) -> str:
    """The class of an error and the first line of what it says."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"[:200]


def difference(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference over the largest value."""
    return float((out.float() - wanted.float()).abs().max() / wanted.float().abs().max())
