"""New files and folders that stand in their place whole, or not at all, and the temporary folders for that.

What is written lies beside its place until it is whole, in a folder that is removed when its block ends, by an error or SIGTERM
too. What a process leaves that was killed is removed by the next one that wants a folder of that kind: a lock, which the system
takes off when a process ends, says which are in use. Imports no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import shutil
import signal
import stat
import tempfile
import threading
import types
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, NoReturn, cast

from .reading import KINDS, Raises, make_reporter, report_errors

try:
    import fcntl
except ImportError:  # Windows: nothing says there whether a folder is in use, so none is swept, and saves do not wait
    fcntl = None  # type: ignore[assignment]


PATIENCE = 5.0  # seconds that a save waits for another one before it says so
_THREADS = threading.RLock()  # of this process, in its own temporary folders


@contextlib.contextmanager
def replace_file(
    target: Path, raises: Raises | None = None, put: Callable[[Path, Path], None] | None = None
) -> Iterator[Path]:
    """The name of a file to write beside the target, which takes its place then: a reader sees the old or the whole new one.

    `put` puts it there, if others go with it. Where the target is a link, the file that it leads to is replaced. Nothing is
    left when the writing fails. Raises what `raises` makes for a place where no file can be written, or where something stands
    that is no file; without it, the system's own error.
    """
    with contextlib.ExitStack() as stack:
        with _unwritten(raises):
            target = Path(os.path.realpath(target))
            if target.exists() and not target.is_file():
                kind = KINDS.get(stat.S_IFMT(target.stat().st_mode), "something else")
                raise (raises or make_reporter(target))(f"is {kind}, which is not overwritten by a file: give another path")
            target.parent.mkdir(parents=True, exist_ok=True)
            work = stack.enter_context(open_temporary_folder(f".{target.name[:80]}.writing-", target.parent))
        name = work / target.name
        yield name
        with _unwritten(raises):
            _finish(name)
            (put or os.replace)(name, target)


def write_text(target: Path, text: str, raises: Raises) -> None:
    """Write a file whole, or leave it as it was. Raises what `raises` makes where it cannot be written."""
    with report_errors(raises, "cannot be written"), replace_file(target, raises) as file:
        file.write_text(text, "utf-8")


@contextlib.contextmanager
def replace_folder(
    target: Path, raises: Raises | None = None, own: Callable[[Path], Collection[str]] | None = None
) -> Iterator[Path]:
    """A folder to write files into, which takes the name of the target at the end; nothing changes when the writing fails.

    An empty folder may stand there, or any where `own` is given: `own(folder)` gives the names in it that the new folder takes
    the place of, and the others stay. Of several that replace one folder, the last one wins. Raises as `replace_file`.
    """
    with contextlib.ExitStack() as stack:
        with _unwritten(raises):
            if own is None:
                check_new(target, raises or make_reporter(target))
            target.parent.mkdir(parents=True, exist_ok=True)
            if own is not None:
                with lock_folder(target.parent):
                    _restore(target)
            made = stack.enter_context(open_temporary_folder(f".{target.name[:80]}.writing-", target.parent)) / "made"
            made.mkdir()
        yield made
        with _unwritten(raises):
            for path in made.iterdir():
                _finish(path)
            _sync(made)
            with lock_folder(target.parent):
                if own is None:
                    check_new(target, raises or make_reporter(target))  # what came meanwhile is not written over
                elif target.is_dir():
                    _keep_others(target, made, own(target))
                _swap(made, target)


def _unwritten(raises: Raises | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if raises is None else report_errors(raises, "cannot be written")


def check_new(target: Path, raises: Raises) -> None:
    """Raises what `raises` makes where a path is taken by anything but an empty folder."""
    if not os.path.lexists(target):
        return
    if target.is_symlink() or not target.is_dir():
        raise raises("exists and is not a folder: give another path")
    if any(target.iterdir()):
        raise raises("exists and is not empty: give a new folder, or remove it")


def check_folder(folder: Path, raises: Callable[[str], Exception]) -> None:
    """Raises what `raises` makes of a finding where a folder is not there and cannot be made, before anything is worked out."""
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        why = f"{there} is not a folder" if there.exists() else f"{there} is a broken link"
        raise raises(why if there == folder else f"'{folder}' cannot be created: {why}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise raises(f"'{folder}' cannot be written: no permission to write in '{there}'")


def _finish(path: Path) -> None:
    """Give a finished file the rights of a new one, and see that it is on the disk."""
    mask = os.umask(0o022)
    os.umask(mask)
    if path.stat().st_nlink == 1:  # a file that others have, too, is theirs
        path.chmod(0o666 & ~mask)
    with path.open("rb") as file:
        os.fsync(file.fileno())


# --- an old folder replaced


@contextlib.contextmanager
def lock_folder(path: Path) -> Iterator[int | None]:
    """Hold a folder against others who ask for it too, where the system can: on some network file systems it cannot.

    A temporary folder of this process is locked for as long as it is there: inside it threads wait for each other alone. Warns
    of a folder that another process holds for longer than `PATIENCE` seconds, and waits on.

    Yields the handle that locks it, None where it could not be locked.
    """
    path = Path(os.path.realpath(path))
    if (own := _OWN.get(_identity(path))) is not None:
        with _THREADS:
            yield own
        return
    handle = _lock_folder(path, wait=False)
    if handle is None:
        note = threading.Timer(PATIENCE, _warn_of_waiting, (path,))
        note.daemon = True
        note.start()
        try:
            handle = _lock_folder(path)
        finally:
            note.cancel()
    try:
        yield handle
    finally:
        if handle is not None:
            os.close(handle)


def _warn_of_waiting(path: Path) -> None:
    warnings.warn(f"waiting for {path}, which another process has locked: is it still running?", stacklevel=1)


def _identity(path: Path) -> tuple[int, int]:
    """Return what tells a folder from all others; (0, 0) for one that is not there."""
    with contextlib.suppress(OSError):
        there = path.stat()
        return there.st_dev, there.st_ino
    return 0, 0


@contextlib.contextmanager
def lock_current_folder(path: Path) -> Iterator[None]:
    """Let one process at a time read a folder, change what it read and replace the folder; others wait for their turn.

    The lock is that of the folder which stands there: who has waited while it was replaced takes the lock of the new one.
    """
    path = Path(os.path.realpath(path))
    while True:
        with lock_folder(path) as handle:
            if handle is None or _is_at(path, handle):
                yield
                return


def _is_at(path: Path, handle: int) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(path.stat(), os.fstat(handle))
    return not path.exists()  # gone: what reads it says so


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems cannot sync a folder
            os.fsync(handle)
    finally:
        os.close(handle)


def _old(target: Path) -> Path:
    return target.parent / f".{target.name}.old"


def _restore(target: Path) -> None:
    """Bring back a folder that was between its two renames when a save was killed."""
    old = _old(target)
    if old.exists():
        if target.exists():
            shutil.rmtree(old)
        else:
            os.rename(old, target)


def _keep_others(target: Path, made: Path, own: Collection[str]) -> None:
    """Give the new folder what lay in the old one and is not of its kind, by hard links where they work."""
    for path in target.iterdir():
        if path.name in own or (made / path.name).exists():
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, made / path.name, symlinks=True, copy_function=_link)
        else:
            _link(path, made / path.name)


def _link(source: Any, copy: Any) -> Any:
    try:
        os.link(source, copy, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, copy, follow_symlinks=False)
    return copy


def _swap(made: Path, target: Path) -> None:
    """Put the finished folder in the place of the old one; at no moment is there half of one."""
    if not target.exists():
        os.rename(made, target)
    elif not _exchange(made, target):
        os.rename(target, _old(target))  # load looks there when the target is missing
        os.rename(made, target)
        shutil.rmtree(_old(target), ignore_errors=True)
    _sync(target.parent)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two folders in one step, where the system can (Linux: renameat2 with RENAME_EXCHANGE)."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(rename(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0)


def find_whole_folder(target: Path) -> Path:
    """The folder to read: the target, or the old one where a save ended while neither was in its place."""
    old = _old(target.absolute())
    return old if not target.exists() and old.is_dir() else target


# --- temporary folders


_OWN: dict[tuple[int, int], int] = {}  # the handles that lock the temporary folders of this process, by what they are


class Folder:
    """A folder named `prefix` and something random, in `parent` or where the system has temporary files; ours alone."""

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        _sweep(parent, prefix)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            self._lock = _lock_folder(self.path)
            self._identity = _identity(self.path)
            if self.path.is_dir():  # or else swept by another process, before the lock was on it
                if self._lock is not None:
                    _OWN[self._identity] = self._lock
                return
            self._unlock()

    def remove(self) -> None:
        """Remove the folder and all that is in it; a second time is fine."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            _OWN.pop(self._identity, None)
            os.close(self._lock)
            self._lock = None


@contextlib.contextmanager
def open_temporary_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A `Folder` for as long as the block runs."""
    with raise_on_sigterm():
        made = Folder(prefix, parent)
        try:
            yield made.path
        finally:
            made.remove()


@contextlib.contextmanager
def raise_on_sigterm() -> Iterator[None]:
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


def _lock_folder(path: Path, wait: bool = True) -> int | None:
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
            handle = _lock_folder(path, wait=False)
            if handle is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(handle)


# --- files that torch writes


class Sink(io.RawIOBase):
    """Takes all that is written to it, and keeps the first error for the end.

    torch's writer of archives throws an error a second time while it is being destroyed, which ends the process.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """torch goes back to the beginning of what it wrote; nothing is read from here."""
        return 0

    def write(self, data: Any, /) -> int:
        """Hand bytes on, none after the first error; gives how many were given."""
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        return memoryview(data).nbytes


@contextlib.contextmanager
def open_new(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A new file as torch can write it. Raises OSError at the end where that failed."""
    with Path(path).open("wb") as file:
        sink = Sink(file)
        yield cast(IO[bytes], sink)
        if sink.error is not None:
            raise sink.error
        file.flush()
        os.fsync(file.fileno())
