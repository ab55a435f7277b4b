"""The Triton kernels, as they are or with one thing broken, for the programs that prove them."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path

from fxplug.lowerings import linear

NAME = "fxplug.lowerings.linear.kernels"
FOLDER = tempfile.TemporaryDirectory()
SOURCE = Path(linear.__file__).with_name("kernels.py").read_text()


def load(old="", new=""):
    """The file with `new` in the place of `old`, from a copy, as Triton reads what it compiles."""
    assert old in SOURCE, f"the kernels have no {old!r}"
    file = Path(FOLDER.name, f"kernels_{len(list(Path(FOLDER.name).iterdir()))}.py")
    file.write_text(SOURCE.replace(old, new) if old else SOURCE)
    spec = importlib.util.spec_from_file_location(NAME, file)
    sys.modules[NAME] = linear.kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(linear.kernels)
    return linear.kernels
