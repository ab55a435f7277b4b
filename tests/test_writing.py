"""Places that cannot be written: every command that writes says so in one message, and leaves what was there as it was."""

from __future__ import annotations

import builtins
import errno
import io
import os
import re
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml
from runs import config
from safetensors.torch import save_file
from sweeps import sweep
from torch import nn
from typer.testing import CliRunner

import fxplug
from fxplug.__main__ import app


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(64, 64)

    def forward(self, x):
        return self.one(x)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(
        "model: test_writing:Net\ninputs: {x: [2, 64]}\nverify: false\npasses:\n  - lora: {rank: 2, slots: 2}\n"
    )
    Path("h.yaml").write_text("lora_unet:\n  - {rank: 2, layers: [one]}\n")
    save_file({"one.lora_A.weight": torch.ones(2, 64), "one.lora_B.weight": torch.zeros(64, 2)}, "a.safetensors")
    Path("t.yaml").write_text(yaml.safe_dump(config(train__steps=1)))


def saved():
    fxplug.rewrite("c.yaml", out="taken/out")
    module = fxplug.load("taken/out")
    module.adapters.load("ink", "a.safetensors")
    fxplug.save(module, "taken/out")


COMMANDS = {
    "rewrite": ["rewrite", "c.yaml", "--out", "taken/out"],
    "convert": ["convert", "hcp", "h.yaml", "-o", "taken/made.yaml"],
    "load": ["adapters", "load", "taken/out", "film", "a.safetensors"],
    "use": ["adapters", "use", "taken/out", "ink=0.5"],
    "unload": ["adapters", "unload", "taken/out", "ink"],
    "pages": ["passes", "--pages", "taken/pages"],
    "adapter": ["export", "taken/out", "--to", "peft", "--adapter", "ink", "--out", "taken/peft"],
    "checkpoint": ["export", "taken/out", "--to", "safetensors", "--merge", "ink", "--out", "taken/merged"],
    "train": ["train", "t.yaml", "--out", "taken/run", "--quiet"],
}


@contextmanager
def too_large(monkeypatch):
    """The system writes no file beyond 100 bytes, whoever writes it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def refusing(monkeypatch, number: int):
    """Everything new below the folder `taken` is refused with an error of the system's."""
    below = os.path.realpath("taken")

    def guarded(function, writes):
        def call(path, *args, **kwargs):
            if not isinstance(path, int) and os.path.realpath(path).startswith(below) and writes(*args, **kwargs):
                raise OSError(number, os.strerror(number), str(path))
            return function(path, *args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for module in (builtins, io):
            patch.setattr(module, "open", guarded(open, lambda mode="r", *_, **__: bool(set(mode) & set("wax+"))))
        patch.setattr(os, "open", guarded(os.open, lambda flags, *_, **__: bool(flags & (os.O_WRONLY | os.O_RDWR))))
        patch.setattr(os, "mkdir", guarded(os.mkdir, lambda *_, **__: True))
        yield


WAYS = {
    "too large": (too_large, "too large|disk is full"),
    "full": (lambda m: refusing(m, errno.ENOSPC), "the disk is full"),
    "read-only": (lambda m: refusing(m, errno.EROFS), "the file system is read-only"),
    "rights": (lambda m: refusing(m, errno.EACCES), "permission denied"),
}


@sweep("way", WAYS, "full")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_cannot_write(name, way, monkeypatch):
    how, words = WAYS[way]
    saved()
    kept = {path: path.read_bytes() for path in Path("taken").rglob("*") if path.is_file()}
    with how(monkeypatch):
        done = CliRunner().invoke(app, COMMANDS[name], prog_name="fxplug")
    assert done.exit_code == 1, done.output
    assert "taken" in done.stderr and "Traceback" not in done.stderr and "(--debug" not in done.stderr, done.stderr
    assert re.search(words, done.stderr), done.stderr
    now = {path: path.read_bytes() for path in Path("taken").rglob("*") if path.is_file() and "run" not in path.parts}
    assert {path: data for path, data in now.items() if path.suffix != ".md"} == kept


def test_a_page_that_python_cannot_write(monkeypatch):
    gm = fxplug.trace(torch.nn.Linear(2, 2), torch.randn(1, 2))
    with too_large(monkeypatch), pytest.raises(fxplug.SpecError, match="page.html cannot be written: .*too large"):
        fxplug.report(gm, gm, out="page.html")
    assert not Path("page.html").exists()
