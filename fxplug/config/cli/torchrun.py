"""One command that torchrun started several times: the first process prints, the others say nothing unless they alone fail."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn

GRACE = 10.0  # seconds in which torchrun ends a process because the first one has failed too


def run_on_all_ranks(call: Callable[[], None], everywhere: bool) -> None:
    """Run a command in each of the processes that torchrun started, or `everywhere` False, in the first one alone.

    Each exits with its own exit code, and torchrun with 1 if one is not 0. An error that the first process has too is printed
    by it alone.
    """
    rank = int(os.environ["RANK"])
    if rank == 0:
        _end(_exit_code(call))
    if not everywhere:
        raise SystemExit(0)
    error = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
        code = _exit_code(call)
    if code:
        time.sleep(GRACE)
        print("".join(f"process {rank}: {line}\n" for line in error.getvalue().splitlines()), end="", file=sys.stderr)
    _end(code)


def is_launched() -> bool:
    """Return whether torchrun started this process, and others."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def _end(code: int) -> NoReturn:
    """End this process at once: gloo's threads outlive their group, and one that frees a tensor during interpreter shutdown
    aborts the process, whose exit code is then no longer the command's."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _exit_code(call: Callable[[], None]) -> int:
    try:
        call()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # the whole run's: this is the end of a process
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0
