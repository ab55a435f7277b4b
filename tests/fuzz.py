"""Runs every fuzzer of this folder: `python tests/fuzz.py --cases 50000 --seed 0 [name ...]`.

A fuzzer is a file `fuzz_<name>.py` with a function `fuzz(cases, seed)` that returns what went wrong, a line for each.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run(job: tuple[str, int, int]) -> list[str]:
    name, cases, seed = job
    return list(importlib.import_module(f"fuzz_{name}").fuzz(cases, seed))


def main() -> int:
    known = sorted(file.stem.removeprefix("fuzz_") for file in HERE.glob("fuzz_*.py"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*known, []], help="which fuzzers; all of them by default")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    share = -(-options.cases // options.processes)
    starts = range(options.seed, options.seed + options.cases, share)
    jobs = [(n, min(share, options.seed + options.cases - s), s) for n in options.names or known for s in starts]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        wrong = [line for lines in pool.imap_unordered(run, jobs, chunksize=1) for line in lines]
    print(*wrong, f"{options.cases} cases of {', '.join(options.names or known)}: {len(wrong)} went wrong", sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    sys.exit(main())
