"""What `make` installs, and where: by the commands that it would run in a fresh checkout."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def commands(folder, *arguments):
    return subprocess.run(["make", "-n", *arguments], capture_output=True, text=True, cwd=folder, check=True).stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_demo_installs_what_it_needs_and_no_tool_of_the_tests(tmp_path):
    for name in ("Makefile", "setup.cfg", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    fresh = commands(tmp_path, "demo")
    assert "-m venv .venv" in fresh and "install -e '.[demo]'" in fresh and "[test]" not in fresh
    for target in ("install", "lint", "suite", "docs"):  # each makes all that it needs by itself
        assert "-m venv .venv" in (said := commands(tmp_path, target)) and "install -e '.[test]'" in said

    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/.demo").touch()
    assert "pip install" not in commands(tmp_path, "demo") and "install -e '.[test]'" in commands(tmp_path, "suite")
    (tmp_path / ".venv/.demo").unlink()
    (tmp_path / ".venv/.installed").touch()  # which has what the demo needs
    assert "pip install" not in commands(tmp_path, "demo") + commands(tmp_path, "suite")

    (tmp_path / "done").touch()
    elsewhere = commands(tmp_path, "demo", "lint", "BIN=/elsewhere/bin", "STAMP=done")
    assert "pip install" not in elsewhere and "/elsewhere/bin/ruff" in elsewhere and ".venv" not in elsewhere
