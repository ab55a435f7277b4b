"""Every tutorial runs in a kernel of its own, and prints again what is stored in it where no machine prints anything else."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import forked_python
import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook, new_output

ROOT = Path(__file__).parent.parent
TUTORIALS = ROOT / "docs" / "tutorials"
NAMES = sorted(file.stem for file in TUTORIALS.glob("*.ipynb"))
QUICK = {"own_method"}  # one that shows how they are run; each takes more than 8 seconds of CPU time
NUMBER_OF_TUTORIALS = 7


def run(notebook, folder, python=None):
    """Run all cells of a notebook in a new kernel, forked or of another Python; CellExecutionError for one that fails.

    A cell with the tag `checked` has to print the text that is stored in it.
    """
    python = python or forked_python.python()
    stored = [printed(cell) for cell in notebook.cells]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    changes = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "IPYTHONDIR": str(folder / "ipython"),
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": os.pathsep.join([str(Path(python).parent), os.environ["PATH"]]),
    }
    env = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"} | changes
    (folder / "work").mkdir()
    with tempfile.TemporaryDirectory() as sockets:  # whose path is short enough for one
        manager = AsyncKernelManager(
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),  # this Python's, whatever a user has installed
            transport="ipc",
            connection_file=f"{sockets}/kernel.json",
        )
        manager.kernel_spec.argv = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        client = NotebookClient(notebook, km=manager, timeout=600)
        client.execute(cleanup_kc=True, cwd=str(folder / "work"), env=env)
    for cell, text in zip(notebook.cells, stored, strict=True):
        if "checked" in cell.metadata.get("tags", []):
            assert printed(cell) == text, f"this cell prints something else than is stored in it:\n{cell.source}"


def printed(cell):
    """The text that a cell has printed or given as its value."""
    outputs = cell.get("outputs", [])
    texts = [o.text if o.output_type == "stream" else o.get("data", {}).get("text/plain", "") for o in outputs
             if o.get("name", "stdout") == "stdout"]  # fmt: skip
    return "".join(texts)


def read(name):
    return nbformat.read(TUTORIALS / f"{name}.ipynb", as_version=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in NAMES])
def test_tutorial(name, tmp_path):
    run(read(name), tmp_path, sys.executable if name in QUICK else None)


def test_tutorials_are_short_and_know_nothing_of_the_machine_that_ran_them():
    assert len(NAMES) == NUMBER_OF_TUTORIALS and set(NAMES) > QUICK
    for name in NAMES:
        notebook = read(name)
        nbformat.validate(notebook)
        assert 8 <= len(notebook.cells) <= 20, name
        assert (TUTORIALS / f"{name}.ipynb").stat().st_size < 400_000, name
        assert set(notebook.metadata) <= {"kernelspec", "language_info"} and notebook.metadata.kernelspec.name == "python3"
        assert any("checked" in cell.metadata.get("tags", []) for cell in notebook.cells), name
        for cell in notebook.cells:
            assert set(cell.metadata) <= {"tags"}, name
            assert all(o.get("name") != "stderr" and o.output_type != "error" for o in cell.get("outputs", [])), name
            assert not re.search(r"(?<![\w.])/(?:tmp|home|root|work|usr|opt)/", printed(cell)), name


def test_a_cell_that_fails_fails_the_test(tmp_path):
    with pytest.raises(CellExecutionError, match="no such thing") as raised:
        run(new_notebook(cells=[new_code_cell("x = 1"), new_code_cell("raise ValueError('no such thing')")]), tmp_path)
    assert raised.value.ename == "ValueError"


def test_a_shell_command_that_fails_fails_the_test(tmp_path):
    with pytest.raises(CellExecutionError, match="CalledProcessError"):
        run(new_notebook(cells=[new_code_cell("%%bash\nexit 3")]), tmp_path)


def test_a_checked_cell_has_to_print_what_is_stored(tmp_path):
    stored = [new_output("stream", name="stdout", text="1\n")]
    same = new_code_cell("print(1)", outputs=stored, metadata={"tags": ["checked"]})
    other = new_code_cell("print(2)", outputs=stored)
    (tmp_path / "a").mkdir()
    run(new_notebook(cells=[same, other]), tmp_path / "a")  # what has no tag may print anything
    other = new_code_cell("print(2)", outputs=stored, metadata={"tags": ["checked"]})
    (tmp_path / "b").mkdir()
    with pytest.raises(AssertionError, match=r"something else than is stored in it:\s+print\(2\)"):
        run(new_notebook(cells=[same, other]), tmp_path / "b")
