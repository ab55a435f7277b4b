"""Random attacks, each by name: `python tests/fuzz.py models --cases 1000 --seed 0`; without a name, all of them.

An attack is a file `fuzz_<name>.py` here with a function of the same name: it takes `cases` and `seed`, prints what it finds
with the command that finds it again, and returns how many misses there were.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

ATTACKS = sorted(file.stem for file in Path(__file__).parent.glob("fuzz_*.py"))


def main() -> int:
    parser = argparse.ArgumentParser(description="Random attacks; the exit code is 1 where one found something.")
    parser.add_argument("name", nargs="?", choices=[a.removeprefix("fuzz_") for a in ATTACKS], help="which; all when not given")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found = 0
    for attack in ATTACKS:
        if given.name in (None, attack.removeprefix("fuzz_")):
            found += getattr(import_module(attack), attack)(given.cases, given.seed)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
