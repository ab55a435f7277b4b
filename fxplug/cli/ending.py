"""The end of the process of a command, at once where nothing is left to do.

Python takes apart what large libraries have made, object by object: two seconds and more after a dry run has said all.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from typing import Any

_state: dict[str, Any] = {"at once": False, "code": 1}


def at_once() -> None:
    """Let the process end when threads and exit handlers have: no object of it has anything to do at its own end."""
    _state["at once"] = True


def ends_at_once() -> bool:
    """Whether `at_once` was called."""
    return bool(_state["at once"])


def ended(command: Callable[[], None]) -> None:
    """Run a command that ends with SystemExit, in the process that is there for it."""
    atexit.register(_end)  # exit handlers run in reverse: those of libraries, which are imported later, before this
    try:
        command()
    except SystemExit as end:
        _state["code"] = end.code
        raise


def _end() -> None:
    if _state != {"at once": True, "code": 0}:
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        return  # Python has the words and the exit code for it
    os._exit(0)
