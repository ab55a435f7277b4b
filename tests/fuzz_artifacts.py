"""Hostile artifacts by the thousand: each is refused, or loads and runs as a model; none writes, imports, hangs or crashes."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import tempfile
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import hostile
import torch

BATCH = 1000  # cases of one process
SECONDS = 20  # of processor time for one case
MEMORY = 4 << 30  # beyond what the process has


def fuzz_artifacts(cases: int, seed: int, wide: bool = True) -> list[str]:
    """Try that many cases, `wide` with models of the zoo too; what went wrong, each with the number of its case."""
    wrong: list[str] = []
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        hostile.bases(home, wide)
        first, last = seed, seed + cases
        while first < last:
            pid = os.fork()
            if not pid:
                try:
                    _batch(home, first, min(first + BATCH, last), wide)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)  # never back into the caller's code
            _, status = os.waitpid(pid, 0)
            rows = [json.loads(line) for line in (home / "rows").read_text().splitlines()]
            (home / "rows").unlink()
            for number, result, found in rows:
                counts[result] += result != "begun"
                wrong += [f"artifact {number}: {text}" for text in found]
            first = rows[-1][0] + 1
            if status:
                wrong.append(f"artifact {rows[-1][0]}: the process ended with {status}")
    print(dict(counts), flush=True)
    return wrong


def _batch(home: Path, first: int, last: int, wide: bool) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def late(*_: Any) -> None:
        raise TimeoutError(f"it takes more than {SECONDS} s")

    signal.signal(signal.SIGVTALRM, late)
    watch = hostile.Watch()
    with (home / "rows").open("w", buffering=1) as rows:
        for number in range(first, last):
            rows.write(json.dumps([number, "begun", []]) + "\n")
            folder = home / "case"
            shutil.rmtree(folder, ignore_errors=True)
            base = hostile.case(number, folder, home, wide)
            torch.manual_seed(number)
            signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
            result, found = hostile.outcome(folder, base, watch)
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            rows.write(json.dumps([number, result, found]) + "\n")
    os._exit(0)
