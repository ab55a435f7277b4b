"""Hostile packages, all made of one that is compiled for it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from hostile_packages import run
from test_packages import packed_model


def fuzz_packages(cases: int, seed: int) -> list[str]:
    """What got through of so many hostile packages, a line each."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        _, path = packed_model(Path(folder))
        return run(path, Path(folder), range(seed, seed + cases), 0)
