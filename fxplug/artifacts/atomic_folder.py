"""Folders that are replaced whole: a crash at any moment leaves the old one or the new one."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..files.temporary import folder
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
    with locked(target.parent):
        _restore(target)
    with folder(f".{target.name}.saving-", target.parent) as work:
        yield work
        mode = 0o666 & ~_umask()
        for path in work.iterdir():
            if path.stat().st_nlink == 1:  # a file that others have, too, is theirs
                path.chmod(mode)
        work.chmod(0o777 & ~_umask())
        for path in (*work.iterdir(), work):
            _sync(path)
        with locked(target.parent):
            _keep_others(target, work)
            _swap(work, target)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a folder against others who ask for it too, where the system can: on some network file systems it cannot."""
    handle = None
    try:
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_RDONLY)
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
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


def _old(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _restore(target: Path) -> None:
    """Bring back a folder that was between its two renames when a save was killed."""
    old = _old(target)
    if old.exists():
        if target.exists():
            shutil.rmtree(old)
        else:
            os.rename(old, target)


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


def recovered(target: Path) -> Path:
    """The folder to read: the target, or the old one where a save ended while neither was in its place."""
    old = _old(target.absolute())
    return old if not target.exists() and old.is_dir() else target
