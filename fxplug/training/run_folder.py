"""The folder of a run: one run at a time writes into it, and nothing is deleted that the run did not write."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

from ..core.errors import TrainError
from ..core.reading import get_reason
from ..core.writing import check_folder
from .checkpoint import PREFIX, Checkpoint, list_checkpoints, read, write, write_to
from .train_section import Save

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MARK = "run.json"  # which the folder of a run has: who writes into it
LATER = "log.later.jsonl"  # lines that a resumed run has dropped from its log
EARLIER = "earlier"  # where what a run gives up is moved to


class RunFolder:
    """The files of a run below `path`; `note` is told what goes wrong while the run goes on.

    Only the first of several processes has one that writes: for the others, and for a run without a folder, `path` is None.
    """

    def __init__(self, path: Path | None, settings: Save, note: Callable[[str], object]) -> None:
        self.path, self.settings, self.note = path, settings, note
        self._lock_handle: int | None = None

    # --- whose it is

    def check(self, resumes: bool) -> None:
        """Raise TrainError, with nothing touched, for a folder that has unrelated files, or a run that is not to be resumed."""
        if self.path is None:
            return
        check_folder(self.path, TrainError)
        there = self._names()
        if there and MARK not in there:
            more = f" and {len(there) - 3} more" * (len(there) > 3)
            raise TrainError(
                f"'{self.path}' has {', '.join(there[:3])}{more}, which no run wrote: give a new or an empty folder (--out)"
            )
        if not resumes and (list_checkpoints(self.path / "checkpoints") or (self.path / "module").is_dir()):
            raise TrainError(f"'{self.path}' has a run already: continue it (--resume), or give another folder")

    def open(self, resumes: bool) -> None:
        """Lock the folder for this run, and move aside what a run without a checkpoint has left.

        Raises TrainError as `check` does, and if another run is writing into the folder.
        """
        if self.path is None or self._lock_handle is not None:
            return
        self.check(resumes)
        with self.reported("folder of the run"):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock_handle = self._lock()
            if not resumes:
                self.move_aside([self.path / name for name in self._names() if name not in (MARK, EARLIER)])

    def close(self) -> None:
        """Release the lock of the folder."""
        if self._lock_handle is not None:
            _HANDLES.discard(self._lock_handle)
            os.close(self._lock_handle)
            self._lock_handle = None

    def _names(self) -> list[str]:
        return sorted(os.listdir(self.path)) if self.path is not None and self.path.is_dir() else []

    def _lock(self) -> int:
        """Lock the folder for as long as this process has the returned handle open, if the file system can."""
        assert self.path is not None
        handle = os.open(self.path / MARK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = "another process"
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                held = json.loads((self.path / MARK).read_text("utf-8"))
                who = f"process {held['pid']} on {held['host']}, which began at {held['started']},"
            os.close(handle)
            raise TrainError(f"'{self.path}' has a run that is not over: {who} writes into it; give another folder") from None
        except OSError:  # a file system without locks
            pass
        _HANDLES.add(handle)
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.ftruncate(handle, 0)
        os.write(handle, json.dumps(holder).encode() + b"\n")
        return handle

    # --- what gives way

    def move_aside(self, paths: list[Path]) -> None:
        """Move files of the run, which it would drop or overwrite, to `earlier/`, and note it."""
        paths = [path for path in paths if path.exists()]
        if self.path is None or not paths:
            return
        target = self.path / EARLIER / time.strftime("%Y%m%d-%H%M%S")
        number = 1
        while target.exists():
            number += 1
            target = target.with_name(f"{target.name.partition('.')[0]}.{number}")
        for path in paths:
            to = target / path.relative_to(self.path)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, to)
        named = ", ".join(str(path.relative_to(self.path)) for path in paths[:4])
        more = f" and {len(paths) - 4} more" * (len(paths) > 4)
        self.note(f"{named}{more}: moved to '{target}'")

    def go_back(self, step: int, best_step: int, dropped: bytes) -> None:
        """Move aside the files of later steps, `dropped` lines of the log too, and a best checkpoint of another step than
        `best_step`."""
        if self.path is None:
            return
        if any("note" not in json.loads(line) for line in dropped.splitlines()):
            (self.path / LATER).write_bytes(dropped)
        later = [p for p in list_checkpoints(self.path / "checkpoints") if int(p.name.removeprefix(PREFIX)) > step]
        pictures = sorted(p for end in ("png", "webp") for p in (self.path / "samples").glob(f"step-*.{end}"))
        later += [p for p in pictures if p.stem.removeprefix("step-").isdigit() and int(p.stem.removeprefix("step-")) > step]
        if (self.path / "best").is_dir() and self._best_step() != best_step:
            later.append(self.path / "best")
        self.move_aside([*later, self.path / LATER])

    def _best_step(self) -> int | None:
        assert self.path is not None
        with contextlib.suppress(TrainError):
            return read(self.path / "best").step
        return None

    # --- what is written

    def keep(self, made: Checkpoint) -> Path | None:
        """Write the newest checkpoint, and remove the oldest of more than `save.keep`. Returns None if the disk is full."""
        if self.path is None:
            return None
        with self.reported(f"checkpoint of step {made.step}"):
            return self.write(made)
        return None

    def write(self, made: Checkpoint) -> Path:
        """Write a checkpoint as `keep` does, but raise the system's own errors."""
        assert self.path is not None
        return write(self.path / "checkpoints", made, self.settings.keep)

    def keep_at(self, path: Path, made: Checkpoint) -> None:
        """Write a checkpoint to its own folder, which no later one removes."""
        with self.reported(f"checkpoint '{path}'"):
            write_to(path, made)

    @contextlib.contextmanager
    def reported(self, what: str) -> Iterator[None]:
        """Report a write error: the run stops with what is saved so far. After a full disk it may go on, if the settings say
        so."""
        try:
            yield
        except Exception as error:  # torch's or the system's, wrapped in what it likes; any other is raised again
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            if cause is None or isinstance(error, TrainError):
                raise
            full = cause.errno in FULL
            why = "the disk is full" if full else get_reason(cause)
            text = f"the {what} could not be written, {why} ({error}); {self.newest}"
            if not full:
                raise TrainError(f"{text}; make the folder writable and resume") from error
            if self.settings.on_full_disk == "stop":
                raise TrainError(f"{text}; free some space and resume, or set save.on_full_disk: continue") from error
            self.note(f"{text}; the run continues")

    @property
    def newest(self) -> str:
        """Sentence that names the newest checkpoint."""
        kept = list_checkpoints(self.path / "checkpoints") if self.path else []
        return f"the newest checkpoint is '{kept[-1]}'" if kept else "there is no checkpoint"


def _close_handles() -> None:
    """Close the locks in a forked process: workers that outlive the run must not hold its folder."""
    while _HANDLES:
        os.close(_HANDLES.pop())


_HANDLES: set[int] = set()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_handles)
