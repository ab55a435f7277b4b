"""A save into a folder that is locked: a temporary one of this process takes it, and another process is waited for."""

import subprocess
import sys
import threading
import warnings

import pytest
import torch

import fxplug
from fxplug.core import writing


@pytest.fixture
def module():
    return fxplug.trace(torch.nn.Linear(2, 2), torch.ones(1, 2))


@pytest.mark.parametrize("inside", ["", "deeper"])
def test_a_save_straight_into_a_temporary_folder_of_this_process_ends(inside, module):
    with writing.open_temporary_folder("fxplug-test-") as folder:
        target = folder / inside / "saved"
        ended = threading.Thread(target=lambda: [fxplug.save(module, target), fxplug.save(module, folder / "two")], daemon=True)
        ended.start()
        ended.join(30)
        assert not ended.is_alive()
        assert torch.equal(fxplug.load(target)(torch.ones(1, 2)), module(torch.ones(1, 2)))
    assert not writing._OWN


def test_threads_that_save_into_one_temporary_folder_leave_whole_ones(module):
    with writing.open_temporary_folder("fxplug-test-") as folder:
        each = [threading.Thread(target=fxplug.save, args=(module, folder / str(n))) for n in range(6)]
        for thread in each:
            thread.start()
        for thread in each:
            thread.join(60)
        assert all(torch.equal(fxplug.load(folder / str(n))(torch.ones(1, 2)), module(torch.ones(1, 2))) for n in range(6))


def test_who_waits_for_another_process_says_so(tmp_path, monkeypatch, module):
    hold = (
        "import fcntl, os, sys; handle = os.open(sys.argv[1], os.O_RDONLY); fcntl.flock(handle, fcntl.LOCK_EX); "
        "print('locked', flush=True); sys.stdin.readline()"
    )
    monkeypatch.setattr(writing, "PATIENCE", 0.05)
    said = threading.Event()
    monkeypatch.setattr(warnings, "warn", lambda text, **_: said.set() if "waiting for" in str(text) else None)
    with subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"locked\n"
        saving = threading.Thread(target=fxplug.save, args=(module, tmp_path / "saved"), daemon=True)
        saving.start()
        assert said.wait(30) and saving.is_alive() and not (tmp_path / "saved").exists()
        other.communicate(b"\n")
        saving.join(30)
    assert fxplug.load(tmp_path / "saved") is not None
