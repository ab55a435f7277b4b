"""A wheel in an empty environment: what is not installed with it, such as what only tests need, is missed by nothing."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import fxplug
from fxplug.core.spec.pass_file import list_recipes

ROOT = Path(__file__).parents[2]


def needed(name: str, extras: frozenset[str] = frozenset()) -> set[str]:
    """An installed distribution, and all that it says it needs."""
    found: set[tuple[str, frozenset[str]]] = set()
    todo = [(name, extras)]
    while todo:
        name, extras = todo.pop()
        if (name, extras) in found:
            continue
        found.add((name, extras))
        for text in importlib.metadata.requires(name) or []:
            wanted = Requirement(text)
            if wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in (extras or {""})):
                todo.append((wanted.name, frozenset(wanted.extras)))
    return {name for name, _ in found}


RUN = """
import importlib.util, torch, fxplug
assert [importlib.util.find_spec(name) for name in ("pytest", "peft", "lycoris", "sklearn")] == [None] * 4
result = fxplug.rewrite("config.yaml")
gm = fxplug.trace(torch.nn.Sequential(torch.nn.Linear(4, 4)).eval(), torch.ones(1, 4))
new = fxplug.apply(gm, fxplug.load_pass("lora", at="0", rank=2))
fxplug.verify(gm, new, torch.ones(1, 4))
fxplug.save(new, "out")
assert torch.equal(fxplug.load("out")(torch.ones(1, 4)), gm(torch.ones(1, 4)))
print(len(result.sites), fxplug.__version__)
"""

MODULE = """
import torch
from torch import nn

class Data(torch.utils.data.Dataset):
    classes = ["a", "b"]
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.full((3, 8, 8), index / 8), index % 2

def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, 2))
"""
TRAIN = """
import fxplug
done = fxplug.train({
    "model": {"call": "own:model"}, "inputs": {"input": [1, 3, 8, 8]}, "data": {"call": "own:Data"},
    "passes": [{"lora": {"at": "1", "rank": 2}}], "train": {"task": "classify", "steps": 2, "batch": 4}, "device": "cpu",
}, out="run", quiet=True)
assert (done.out / "report.html").stat().st_size > 10000, list(done.out.iterdir())
"""
REPORT = """
import fxplug
result = fxplug.rewrite("config.yaml")
fxplug.report(result.base, result.module, "report.html")
"""
ONNX = """
import torch, fxplug
gm = fxplug.trace(torch.nn.Sequential(torch.nn.Linear(4, 4)).eval(), torch.ones(1, 4))
fxplug.export(gm, "model.onnx", (torch.ones(1, 4),), to="onnx")
assert torch.allclose(fxplug.load_onnx("model.onnx")(torch.ones(1, 4)), gm(torch.ones(1, 4)), atol=1e-5)
"""

PROGRAMS = {"": RUN, "train": TRAIN, "report": REPORT, "onnx": ONNX}


def run(*command, **options):
    """Run a command as a user does who has nothing of ours on the path, and return what it prints."""
    told = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=told, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # built elsewhere: setuptools leaves folders beside what it builds
    source.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "README.md", "fxplug", "passes", "configs"):
        run("cp", "-r", ROOT / name, source)
    # as `python -m build --no-isolation`: a wheel out of a source archive, which has to have all that goes into it
    run(sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})", cwd=source)
    (archive,) = folder.glob("fxplug-*.tar.gz")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, archive)
    (made,) = folder.glob("fxplug-*.whl")
    return made


@pytest.mark.slow
@pytest.mark.parametrize("extra", PROGRAMS)
def test_a_wheel_runs_without_what_tests_need(tmp_path, wheel, extra):
    venv.create(tmp_path / "empty", symlinks=True)
    python = tmp_path / "empty/bin/python"
    (packages,) = (tmp_path / "empty/lib").glob("python*/site-packages")
    for name in needed("fxplug", frozenset({extra} - {""})) - {"fxplug"}:
        for file in importlib.metadata.files(name) or []:
            top, here = file.parts[0], Path(str(file.locate()))
            there = packages / top
            if top != ".." and top != "__pycache__" and not there.exists():
                there.symlink_to(here.parents[len(file.parts) - 2] if len(file.parts) > 1 else here)
    run(sys.executable, "-m", "pip", "-q", "--python", python, "install", "--no-deps", "--no-index", wheel)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "config.yaml").write_text("model: test_vit\npasses:\n  - lora: {at: blocks.*.attn.qkv, rank: 2}\n")
    (elsewhere / "own.py").write_text(MODULE)
    printed = run(python, "-W", "ignore", "-c", PROGRAMS[extra], cwd=elsewhere).split()
    command = tmp_path / "empty/bin/fxplug"
    if not extra:
        assert int(printed[0]) > 0 and printed[1] == fxplug.__version__ == wheel.name.split("-")[1]
        assert "saved in rewritten" in run(command, "rewrite", "config.yaml", "--out", "rewritten", cwd=elsewhere)
        assert set(list_recipes()) == {line.split()[0] for line in run(command, "recipes", cwd=elsewhere).splitlines()}
        assert run(command, "recipes", "sd15", cwd=elsewhere) == (ROOT / "configs/train/sd15.yaml").read_text()
    assert "lora" in run(command, "passes", cwd=elsewhere)
