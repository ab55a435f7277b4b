"""Temporary folders that do not outlive their process.

A folder is removed when its block ends, by an error or SIGTERM too. What a process leaves that was killed is removed by the
next one that wants a folder of that kind: a lock, which the system takes off when a process ends, says which are in use.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

try:
    import fcntl
except ImportError:  # Windows: nothing says there whether a folder is in use, so none is swept
    fcntl = None  # type: ignore[assignment]


class Folder:
    """A folder named `prefix` and something random, in `parent` or where the system has temporary files; ours alone."""

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        _sweep(parent, prefix)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            self._lock = _locked(self.path)
            if self.path.is_dir():  # or else swept by another process, before the lock was on it
                return
            self._unlock()

    def remove(self) -> None:
        """Remove the folder and all that is in it; a second time is fine."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


@contextlib.contextmanager
def folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A `Folder` for as long as the block runs."""
    with ended_by_exceptions():
        made = Folder(prefix, parent)
        try:
            yield made.path
        finally:
            made.remove()


@contextlib.contextmanager
def ended_by_exceptions() -> Iterator[None]:
    """SIGTERM ends the process by SystemExit in the block, so that what has to be cleaned up is.

    Nothing changes where a program has a handler of its own, or in other threads than the main one, which get no signals.
    """

    def leave(number: int, frame: types.FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _locked(path: Path, wait: bool = True) -> int | None:
    """A handle that locks a folder for as long as it is open, or None where that cannot be or another process has it."""
    if fcntl is None:
        return None
    handle = None
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # taken, gone, or on a file system without locks
        if handle is not None:
            os.close(handle)
        return None
    return handle


def _sweep(parent: Path, prefix: str) -> None:
    """Remove the folders of processes that are no more."""
    with contextlib.suppress(OSError):
        for path in [p for p in parent.iterdir() if p.name.startswith(prefix)]:
            handle = _locked(path, wait=False)
            if handle is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(handle)
