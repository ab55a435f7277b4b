"""`fxplug doctor`: the installed libraries beside the tested versions, the devices and the compilers."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Sequence

from ... import __version__
from ...core import LIBRARIES, find_version, is_tested
from ...core.errors import FxplugError
from .json_output import Json, print_json
from .verbs import Debug

COMPILERS = {"c++": "torch.compile on a CPU, packages compiled ahead", "nvcc": "packages for CUDA"}


def doctor(as_json: Json = False, debug: Debug = False) -> None:
    """List installed and tested versions of each library, devices and compilers."""
    rows = [_library_row(name) for name in LIBRARIES]
    names = {"c++": os.environ.get("CXX") or "g++", "nvcc": "nvcc"}
    found = [(name, shutil.which(names[name]) or "missing", used_for) for name, used_for in COMPILERS.items()]
    tables: dict[str, list[tuple[str, ...]]] = {
        "libraries": [("library", "found", "tested", "used for"), *rows],
        "devices": [("device", "found"), *_devices()],
        "compilers": [("compiler", "found", "used for"), *found],
    }
    if as_json:
        made = {name: [dict(zip(table[0], row, strict=True)) for row in table[1:]] for name, table in tables.items()}
        print_json({"fxplug": __version__, "python": platform.python_version(), "platform": platform.platform(), **made})
    else:
        print(f"fxplug {__version__}, Python {platform.python_version()}, {platform.platform()}")
        for table in tables.values():
            print()
            _print_table(table)
    required = [row[0] for row in rows if LIBRARIES[row[0]].extra is None and row[1] == "missing" and row[0] != "triton"]
    if required:
        sys.stdout.flush()
        raise FxplugError(f"{', '.join(required)} missing, which fxplug requires: pip install fxplug")


def _library_row(name: str) -> tuple[str, str, str, str]:
    library, found = LIBRARIES[name], find_version(name)
    tested = f"{library.oldest} to {library.newest}" if library.oldest else ""
    if found is None:
        command = f" (pip install fxplug[{library.extra}])" if library.extra else ""
        return name, "missing", tested, library.used_for + command
    fault = _import_fault(library.module)
    if fault:
        return name, f"{found}, broken", tested, f"{library.used_for}; its import fails: {fault}"
    return name, found if is_tested(name, found) else f"{found}, untested", tested, library.used_for


def _import_fault(module: str) -> str | None:
    """Return why a library cannot be imported, in one line."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            importlib.import_module(module)
    except Exception as error:  # a library's own code
        return " ".join(f"{type(error).__name__}: {error}".split())[:160]
    return None


def _devices() -> list[tuple[str, str]]:
    try:
        import torch
    except Exception:  # the table of libraries says why
        return [("cpu", platform.machine())]
    rows = [("cpu", f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores")]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            rows.append((f"cuda:{index}", f"{facts.name}, sm_{facts.major}{facts.minor}, {facts.total_memory >> 30} GiB"))
    else:
        rows.append(("cuda", f"none (torch is built for CUDA {torch.version.cuda})" if torch.version.cuda else "none"))
    return rows


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True)).rstrip())
