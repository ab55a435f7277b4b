"""The files of three systems against what they are here: `make seeds SEEDS=folder`, with checkouts of them in the folder.

Prints how many sections of HCP-Diffusion's configurations convert, in every version that its history has, with the reason of
each that does not; then runs the tests that hold its plugins, EveryDream2trainer's and ZhiJian's to their own code. Exit code 1
when one of these fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import yaml

import fxplug
from fxplug.compat.hcp.convert_file import PARTS, convert
from fxplug.core.errors import FxplugError

TESTS = [
    "tests/parity/test_hcp_checkout.py", "tests/test_everydream.py", "tests/test_everydream_text.py",
    "tests/test_blitz_checkout.py", "tests/parity/test_kohya_checkout.py",
    "tests/parity/test_comfy_checkout.py",
]  # fmt: skip


def versions(checkout: Path) -> dict[str, tuple[str, str]]:
    """Every version of every YAML file in a repository's history, by its hash: path and text."""

    def git(*args: str) -> str:
        return subprocess.run(["git", "-C", str(checkout), *args], capture_output=True, text=True, check=True).stdout

    names = {}
    for commit in git("rev-list", "--all").split():
        for line in git("ls-tree", "-r", commit).splitlines():
            meta, path = line.split("\t")
            if path.endswith((".yaml", ".yml")):
                names.setdefault(meta.split()[2], path)
    return {blob: (path, git("cat-file", "-p", blob)) for blob, path in names.items()}


def conversions(checkout: Path) -> tuple[int, Counter[str]]:
    """How many sections with plugins or low-rank updates convert, and why others do not."""
    good, bad = 0, Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        for blob, (path, text) in versions(checkout).items():
            try:
                data = yaml.safe_load(text)
            except yaml.YAMLError:
                continue
            file = Path(folder) / blob / Path(path).name
            for part, keys in PARTS.items():
                if not isinstance(data, dict) or not any(data.get(key) for key in keys):
                    continue
                file.parent.mkdir(exist_ok=True)
                file.write_text(text)
                try:
                    fxplug.load_config(yaml.safe_load(convert(file, part=part).text))
                    good += 1
                except FxplugError as error:
                    bad[str(error).replace(str(file), path)] += 1
    return good, bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", type=Path, help="a folder of checkouts")
    seeds = parser.parse_args().seeds.absolute()
    warnings.simplefilter("ignore")
    hcp = next((path.parents[1] for path in sorted(seeds.rglob("hcpdiff/__init__.py"))), None)
    if hcp is None:
        print(f"no checkout of HCP-Diffusion in {seeds}")
    elif not (hcp / ".git").exists():
        print(f"{hcp.name} has no history: its configurations are converted by the tests alone")
    else:
        good, bad = conversions(hcp)
        print(f"HCP-Diffusion: {good} of {good + bad.total()} sections of its configurations convert")
        for why, count in bad.most_common():
            print(f"  {count} x {why}")
    command = [sys.executable, "-m", "pytest", "-q", "-rs", *TESTS]
    return subprocess.run(command, env={**os.environ, "SEEDS": str(seeds)}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
