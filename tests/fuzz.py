"""Random attacks: `python tests/fuzz.py --cases 50000 --seed 0 [name ...]`; without a name, all of them.

An attack is a file `fuzz_<name>.py` here with a function of that name: it takes `cases` and `seed` and returns a line for each
miss. Case n of a seed is case 0 of seed + n, so `--cases 1 --seed N` makes one case again. One whose cases take seconds has a
COST, and plays one case for so many.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
ATTACKS = sorted(file.stem for file in HERE.glob("fuzz_*.py"))


def run(job: tuple[str, int, int]) -> list[str]:
    name, cases, seed = job
    attack = importlib.import_module(name)
    cases = -(-cases // getattr(attack, "COST", 1))
    return [f"{name}: {line}" for line in getattr(attack, name)(cases, seed)]


def main() -> int:
    names = [attack.removeprefix("fuzz_") for attack in ATTACKS]
    parser = argparse.ArgumentParser(description="Random attacks; the exit code is 1 where one found something.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"which of {', '.join(names)}; all by default")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    if unknown := sorted(set(given.names) - set(names)):
        parser.error(f"no attack {', '.join(unknown)}; there are {', '.join(names)}")
    end = given.seed + given.cases
    share = -(-given.cases // given.processes)
    starts = range(given.seed, end, share)
    jobs = [(f"fuzz_{name}", min(share, end - start), start) for name in given.names or names for start in starts]
    # a process for each job: what an attack leaves in one cannot help the next; no Pool, whose processes may have none below
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.processes, mp_context=spawn, max_tasks_per_child=1) as pool:
        misses = [line for lines in pool.map(run, jobs) for line in lines]
    print(*misses, f"{given.cases} cases of {', '.join(given.names or names)}: {len(misses)} misses", sep="\n")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    sys.exit(main())
