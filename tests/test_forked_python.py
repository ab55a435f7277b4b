"""The Python that tests fork behaves as a new one does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import forked_python
import pytest

pytestmark = pytest.mark.slow
PRINTS = """
import sys, torch
from torch.utils.data import DataLoader
print(sys.argv[1:], input(), torch.get_num_threads(), __name__, *DataLoader(range(2), num_workers=1))
"""


@pytest.mark.parametrize(("words", "code"), [
    (["-c", PRINTS, "a", "-b"], 0), (["-W", "error", "-c", "import warnings; warnings.warn('told')"], 1),
    (["-c", "import atexit, sys; atexit.register(print, 'last'); sys.exit('said')"], 1), (["-c", "raise SystemExit(7)"], 7),
    (["-c", "import os; os.kill(os.getpid(), 9)"], -9), (["-u", "-c", "import os; os.abort()"], -signal.SIGABRT),
    (["-m", "fxplug", "--version"], 0), (["-m", "json.tool", "--compact"], 0), (["program.py", "x"], 3),
    (["-c", "import sys, subprocess; subprocess.run([sys.executable, '-c', 'print(1)'], check=True)"], 0), (["-V"], 0),
])  # fmt: skip
def test_it_prints_and_ends_as_a_new_one(words, code, tmp_path):
    (tmp_path / "program.py").write_text("import sys\nprint(sys.argv, sys.path[0], __name__)\nsys.exit(3)\n")
    found = []
    for python in (forked_python.python(), sys.executable):
        done = subprocess.run([python, *words], input="[1]\n", capture_output=True, text=True, cwd=tmp_path)
        found.append((done.returncode, done.stdout, done.stderr.splitlines()[-1:] if code == 1 else []))
    assert found[0] == found[1] and found[0][0] == code


def test_who_kills_it_ends_its_program():
    words = [forked_python.python(), "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        process.kill()
    end = time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{pid}")
