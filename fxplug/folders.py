"""Folders that are replaced whole: a crash at any moment leaves the old one or the new one."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .manifest import FIXED, MANIFEST

try:
    import fcntl
except ImportError:  # not on this system: saves into one folder have to wait for each other by themselves
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def replaced(target: Path) -> Iterator[Path]:
    """A folder to write into, which takes the place of `target` at the end; nothing changes when the writing fails.

    What lies in the old folder and is not an artifact's stays. Of several that replace one folder, the last one wins.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent):
        _clean(target)
        work = Path(tempfile.mkdtemp(prefix=f"{_temporary(target)}{os.getpid()}-", dir=target.parent))
        mine = contextlib.ExitStack()
        mine.enter_context(_locked(work))  # tells others that its process lives
    with mine:
        try:
            yield work
            mode = 0o666 & ~_umask()
            for path in work.iterdir():
                path.chmod(mode)
            work.chmod(0o777 & ~_umask())
            for path in (*work.iterdir(), work):
                _sync(path)
            with _locked(target.parent):
                _keep_others(target, work)
                _swap(work, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path, wait: bool = True) -> Iterator[bool | None]:
    """Hold a folder against others who ask for it too; the system lets go of it when the process ends, however it does.

    Gives whether it is held; None where the system cannot tell, as on some network file systems.
    """
    handle, held = None, None
    try:
        with contextlib.suppress(PermissionError, IsADirectoryError):
            handle = os.open(folder, os.O_RDONLY)
        if fcntl is not None and handle is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                held = True
            except OSError as error:
                held = False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
        yield held
    finally:
        if handle is not None:
            os.close(handle)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems cannot sync a folder
            os.fsync(handle)
    finally:
        os.close(handle)


def _temporary(target: Path) -> str:
    return f".{target.name}.saving-"


def _old(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _clean(target: Path) -> None:
    """Remove what saves left that were killed, and bring back a folder that was between its two renames."""
    for path in target.parent.glob(f"{glob.escape(_temporary(target))}*"):
        process = path.name.removeprefix(_temporary(target)).partition("-")[0]
        with contextlib.suppress(FileNotFoundError), _locked(path, wait=False) as free:
            if free or (free is None and not (process.isdigit() and _alive(int(process)))):
                shutil.rmtree(path, ignore_errors=True)
    old = _old(target)
    if old.exists():
        if target.exists():
            shutil.rmtree(old)
        else:
            os.rename(old, target)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _keep_others(target: Path, work: Path) -> None:
    """Give the new folder what lay in the old one and is not the artifact's, by hard links where they work."""
    if not (target / MANIFEST).is_file():
        return
    try:
        listed = set(json.loads((target / MANIFEST).read_bytes())["files"])
    except (ValueError, KeyError, TypeError, RecursionError):
        listed = set()
    for path in target.iterdir():
        if path.name in listed or path.name in FIXED or (work / path.name).exists():
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, work / path.name, symlinks=True, copy_function=_link)
        else:
            _link(path, work / path.name)


def _link(source: Any, copy: Any) -> Any:
    try:
        os.link(source, copy, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, copy, follow_symlinks=False)
    return copy


def _swap(work: Path, target: Path) -> None:
    """Put the finished folder in the place of the old one; at no moment is there half of one."""
    if not target.exists():
        os.rename(work, target)
    elif not _exchange(work, target):
        os.rename(target, _old(target))  # load looks there when the target is missing
        os.rename(work, target)
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


def recovered(folder: Path) -> Path:
    old = _old(folder.absolute())
    return old if not folder.exists() and old.is_dir() else folder
