"""A new file or folder that stands in its place whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from .reading import KINDS, Raises, reported
from .temporary import folder


@contextlib.contextmanager
def new_file(target: Path, raises: Raises, put: Callable[[Path, Path], None] | None = None) -> Iterator[Path]:
    """The name of a file to write beside the target, which takes its place then: a reader sees the old or the whole new one.

    `put` puts it there, if others go with it. Where the target is a link, the file that it leads to is replaced. Nothing is
    left when the writing fails. Raises what `raises` makes for a place where no file can be written, or where something stands
    that is no file.
    """
    with contextlib.ExitStack() as stack:
        with reported(raises, "cannot be written"):
            target = Path(os.path.realpath(target))
            if target.exists() and not target.is_file():
                kind = KINDS.get(stat.S_IFMT(target.stat().st_mode), "something else")
                raise raises(f"is {kind}, and no file is written over it")
            target.parent.mkdir(parents=True, exist_ok=True)
            work = stack.enter_context(folder(f".{target.name[:80]}.writing-", target.parent))
        name = work / target.name
        yield name
        with reported(raises, "cannot be written"):
            _settle(name)
            (put or os.replace)(name, target)


@contextlib.contextmanager
def new_folder(target: Path, raises: Raises) -> Iterator[Path]:
    """A folder to write files into, which takes the name of the target at the end; an empty folder may stand there.

    Nothing is left when the writing fails. Raises what `raises` makes where something else stands, or no folder can be.
    """
    with contextlib.ExitStack() as stack:
        with reported(raises, "cannot be written"):
            check_new(target, raises)
            target.parent.mkdir(parents=True, exist_ok=True)
            work = stack.enter_context(folder(f".{target.name[:80]}.writing-", target.parent))
            inner = work / "made"
            inner.mkdir()
        yield inner
        with reported(raises, "cannot be written"):
            for path in inner.iterdir():
                _settle(path)
            check_new(target, raises)  # what came meanwhile is not written over, which rename says of a full folder only
            os.rename(inner, target)


def check_new(target: Path, raises: Raises) -> None:
    """Raises what `raises` makes where a path is taken by anything but an empty folder."""
    if not os.path.lexists(target):
        return
    if target.is_symlink() or not target.is_dir():
        raise raises("exists and is not a folder: name another place")
    if any(target.iterdir()):
        raise raises("exists and is not empty: name a new folder, or remove it")


def _settle(path: Path) -> None:
    """Give a finished file the rights of a new one, and see that it is on the disk."""
    mask = os.umask(0o022)
    os.umask(mask)
    path.chmod(0o666 & ~mask)
    with path.open("rb") as file:
        os.fsync(file.fileno())
