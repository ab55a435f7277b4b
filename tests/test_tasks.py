"""The tasks people come with, done here and as its peer does them: equal, and no longer than the peer's way."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import processes
import pytest
import torch
from sweeps import sweep

from fxplug.core.ir.traced_module import TracedModule

TASKS = Path(__file__).parent.parent / "examples" / "tasks"
NAMES = sorted(path.stem for path in TASKS.glob("*.py") if "def check(" in path.read_text())
PIPELINES = sorted(f"../{path.stem}" for path in TASKS.parent.glob("*.py") if "def with_diffusers(" in path.read_text())


def lines(name: str) -> dict[str, int]:
    """How many lines each way of a task has, without blank ones, comments and what says what it does."""
    text = (TASKS / f"{name}.py").read_text()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("with_"):
            body = text.splitlines()[node.body[bool(ast.get_docstring(node))].lineno - 1 : node.end_lineno]
            found[node.name.removeprefix("with_")] = sum(bool(re.match(r"\s*[^#\s]", line)) for line in body)
    return found


def test_no_task_is_longer_than_its_peers_way_and_the_table_says_so():
    table = (TASKS / "README.md").read_text()
    assert len(PIPELINES) == 3
    for name in NAMES + PIPELINES:
        ours, *theirs = lines(name).values()
        assert not theirs or ours <= theirs[0], name
        row = next(row for row in table.splitlines() if f"({name}.py)" in row)
        assert [int(number) for number in re.findall(r"\| (\d+)(?= )", row)] == [ours, *theirs], name
    for script in re.findall(r"\]\((.+?\.py)\)", table):
        assert (TASKS / script).exists(), script


@pytest.fixture
def forked(monkeypatch, tmp_path):
    """The command line's verbs each in a process of its own, which need not import torch anew."""

    def run(command, **options):
        assert command[:3] == [sys.executable, "-m", "fxplug"] and options == {"capture_output": True, "text": True}
        folder = tmp_path / f"printed-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        done = processes.ended(processes.verb, *command[3:], folder=folder)
        return subprocess.CompletedProcess(command, done.codes[0], done.stdout, done.stderr)

    monkeypatch.setattr(subprocess, "run", run)


@pytest.fixture
def compiled_here(monkeypatch):
    """Our modules are compiled; the peer's numbers are the same without, and its code takes longer to compile than all else."""
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda m, **how: compiled(m, **how) if isinstance(m, TracedModule) else m)


@pytest.mark.slow
@sweep("name", NAMES, "new_head")
def test_a_task(name, tmp_path, monkeypatch, capsys, forked, compiled_here):
    monkeypatch.syspath_prepend(str(TASKS))
    importlib.import_module(name).check(tmp_path / name)
    said = capsys.readouterr().out
    assert said.strip() and "False" not in said
