"""What is kept on disk from one run to the next, each entry for as long as all that it was made with is as it was.

An entry is one file: the SHA-256 of the rest, a line of JSON that says what it was made with, and what it holds. It is written
beside its place and moved there, so that a reader finds all of it or nothing, however many processes write. Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import re
import stat
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, PathFinder
from pathlib import Path
from typing import Any

BOUND = 256 << 20  # bytes of all entries together: those that were not used for longest go first
WRITING = ".writing-"
NAME = re.compile(r"[0-9a-f]{64}\.json")
STANDARD = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
OWN = Path(__file__).parents[1]
PLAIN = (str, int, float, bool, type(None))
BEGAN = time.time_ns()
# environment variables that the libraries of models look at, and torch
LOOKED_AT = ("TORCH", "PYTORCH", "PT_", "CUDA", "CUBLAS", "HF_", "TIMM_", "DIFFUSERS_", "TRANSFORMERS_", "USE_", "ACCELERATE_",
             "XFORMERS", "FLASH", "PEFT", "_CHECK_PEFT", "BNB_")  # fmt: skip


def cache_folder() -> Path:
    """Where fxplug keeps what it can make again: `FXPLUG_CACHE`, else `fxplug` in the cache folder of the user."""
    if given := os.environ.get("FXPLUG_CACHE"):
        return Path(given)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fxplug"
    except RuntimeError:
        raise FileNotFoundError(errno.ENOENT, "this user has no home folder: FXPLUG_CACHE names another") from None


class Stale(Exception):
    """Why an entry that is there is not used."""


class NotKept(UserWarning):
    """Something that was kept is not used, or something is not kept."""


_under: dict[str, dict[str, Any]] = {"files": {}, "packages": {}}  # what the entries that were used here were made of
_warned: set[str] = set()
Said = list[tuple[str, str, str, int]]  # warnings: what it says, its class, the file and the line


def name_of(made_of: Any) -> str | None:
    """The name of the entry that is made of this, and of `beside_packages`; None for what is not plain data."""
    return f"{_digest([made_of, beside_packages()])}.json" if _is_plain(made_of) else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(member) for key, member in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return type(value) in PLAIN


def read(name: str, made_with: Mapping[str, Any], limit: int, *, used: bool = False) -> bytes | None:
    """What an entry holds; None where there is none. Raises Stale where it is damaged, or something has changed since.

    `made_with` is the `environment()` of now. What is `used` for what will be kept is under that. A stale entry is removed.
    """
    try:
        body, sources = _read(file := cache_folder() / "traces" / name, made_with, limit)
    except FileNotFoundError:
        return None
    except Stale:
        with contextlib.suppress(OSError):
            file.unlink()
        raise
    for key, kept in _under.items() if used else ():
        kept.update(sources[key])
    return body


def _read(file: Path, made_with: Mapping[str, Any], limit: int) -> tuple[bytes, dict[str, Any]]:
    try:
        handle = os.open(file, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(handle, "rb") as opened:
            about = os.fstat(handle)
            if not stat.S_ISREG(about.st_mode) or not _mine(about) or not _mine(os.stat(file.parent)):
                raise Stale("others can write it")
            if about.st_size > limit:
                raise Stale(f"it has {about.st_size} bytes")
            digest, _, rest = opened.read(limit).partition(b"\n")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Stale(f"it cannot be read: {error.strerror}") from None
    if digest != hashlib.sha256(rest).hexdigest().encode():
        raise Stale("it is damaged")
    head, _, body = rest.partition(b"\n")
    before, sources = json.loads(head)
    if changed := next((key for key, value in made_with.items() if before.get(key) != value), None):
        raise Stale(f"its {changed} is another now")
    if changed := _changed(sources):
        raise Stale(f"{changed} has changed")
    with contextlib.suppress(OSError):
        os.utime(file)
    return body, sources


def write(
    name: str, made_with: Mapping[str, Any], body: bytes, files: Mapping[str, os.stat_result] | None = None
) -> None:
    """Keep an entry that was made with this environment, as it was at the beginning, and of these `files`. Raises OSError.

    What was made of entries that were used here ends when they do. Nothing is kept where code has changed since this process
    began, which may have loaded what was there before. The oldest ones go where there are too many.
    """
    sources = loaded_sources()
    if any(changed > BEGAN for state in sources["files"].values() for changed in state[1:]):
        return
    sources = {key: {**_under[key], **found} for key, found in sources.items()}
    sources["files"].update({file: state(about) for file, about in (files or {}).items()})
    folder = cache_folder() / "traces"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _mine(os.stat(folder)):
        raise PermissionError(13, "others can write it", str(folder))
    rest = json.dumps([made_with, sources]).encode() + b"\n" + body
    handle, path = tempfile.mkstemp(dir=folder, prefix=WRITING)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)
        os.replace(path, folder / name)
    except BaseException:  # an interrupt, too
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    _bounded(folder, name)


def _bounded(folder: Path, newest: str) -> None:
    """Remove what was not used for longest, and what a process that was killed has left; other files are not ours."""
    found = []
    for file in folder.iterdir():
        with contextlib.suppress(OSError):
            about = file.lstat()
            if stat.S_ISREG(about.st_mode) and (NAME.fullmatch(file.name) or file.name.startswith(WRITING)):
                found.append((about.st_mtime, about.st_size, file))
    size = sum(size for _, size, _ in found)
    for age, taken, file in sorted(found):
        if (size > BOUND and file.name != newest) or (file.name.startswith(WRITING) and age < time.time() - 3600):
            with contextlib.suppress(OSError):
                file.unlink()
                size -= taken


def not_used(why: Stale | Exception) -> None:
    """Warn that an entry which is there is made again."""
    _warn(f"what an earlier run has kept is not used, and made again: {why}")


def not_kept(why: OSError) -> None:
    """Warn that an entry could not be written."""
    where = f" in '{Path(why.filename).parent}'" if why.filename else ""
    _warn(f"nothing is kept for the next run{where}: {why.strerror}")


def _warn(text: str) -> None:
    """Warn once of what is the same with several entries; Python's own count begins anew where a library changes filters."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, NotKept, stacklevel=3)


@contextlib.contextmanager
def heard() -> Iterator[Said]:
    """The warnings that are shown while it lasts, but for those about entries, as plain data."""
    said: Said = []
    show = warnings.showwarning

    def hear(message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
        if not issubclass(category, NotKept):
            said.append((str(message), category.__name__, filename, lineno))
        show(message, category, filename, lineno, *rest)

    warnings.showwarning = hear  # type: ignore[assignment]
    try:
        yield said
    finally:
        if warnings.showwarning is hear:
            warnings.showwarning = show


def repeat(said: Said) -> None:
    """Show warnings again that were shown when an entry was made."""
    for text, kind, file, line in said:
        warnings.showwarning(text, type(kind, (Warning,), {}), file, line)


def _mine(about: os.stat_result) -> bool:
    return not hasattr(os, "getuid") or (about.st_uid == os.getuid() and not about.st_mode & 0o022)


# --- what entries depend on


def environment() -> dict[str, Any]:
    """What of the machine, of Python and of what is installed a result can depend on, as plain data."""
    folders = dict.fromkeys((*_libraries(), *(os.path.abspath(path) for path in sys.path if "-packages" in path)))
    installed = [sorted(os.listdir(folder)) for folder in folders if os.path.isdir(folder)]
    own = sorted((str(path.relative_to(OWN)), *_state(path)) for path in OWN.rglob("*.py"))
    devices = sorted(name for name in os.listdir("/dev") if name.startswith("nvidia")) if os.path.isdir("/dev") else []
    return {
        "Python": sys.version,
        "machine": [platform.node(), platform.platform(), devices],
        "version of fxplug": _digest(own),
        "set of installed packages": _digest(installed),
        "environment": {key: value for key, value in sorted(os.environ.items()) if key.startswith(LOOKED_AT)},
    }


def beside_packages() -> list[list[str]]:
    """The modules in folders that nobody installed, such as that of a configuration: any library may look for one there."""
    folders = dict.fromkeys(os.path.abspath(path) for path in sys.path if "-packages" not in path)
    found = (_importable(folder) for folder in folders if not _standard(f"{folder}{os.sep}"))
    return [modules for modules in found if modules]


def loaded_sources() -> dict[str, Any]:
    """Size and time of each file of code that is loaded and not of Python's own library, and where the packages lie."""
    files, packages = {}, {}
    for name, file in _loaded():
        if not _standard(file) and not _own(file):
            with contextlib.suppress(OSError):
                files[file] = _state(file)
                if "." not in name and _place(name) == file:
                    packages[name] = file
    return {"files": files, "packages": packages}


def users_modules() -> list[str]:
    """The modules that are loaded and come neither from an installed package nor from Python nor from here.

    Nobody can say what those have done to the others. A process that is not of our command has one, what runs in it: a script
    or an interpreter.
    """
    known = tuple(f"{folder}{os.sep}" for folder in _libraries())
    found = [name for name, file in _loaded() if not (file.startswith(known) or _standard(file) or _own(file))]
    return found if _command(getattr(sys.modules["__main__"], "__file__", None)) else [*found, "__main__"]


def _command(file: str | None) -> bool:
    """Whether it is what begins our command: the package, or the script of that name which its installation made."""
    if file is None:
        return False
    scripts = os.path.normpath(sysconfig.get_path("scripts"))
    return _own(os.path.abspath(file)) or os.path.abspath(file) == os.path.join(scripts, __name__.partition(".")[0])


def _loaded() -> list[tuple[str, str]]:
    found = ((name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items()))
    named = [(name, file) for name, file in found if isinstance(file, str) and name not in ("__main__", "__mp_main__")]
    return [(name, os.path.normpath(file)) for name, file in named if os.path.isabs(file)]  # torch.ops has one that is none


def _changed(sources: Mapping[str, Any]) -> str | None:
    for file, state in sources["files"].items():
        try:
            if _state(file) != state:
                return str(file)
        except OSError:
            return str(file)
    for name, file in sources["packages"].items():
        if _place(name) != file:
            return str(name)
    return None


def _place(package: str) -> str | None:
    """The file that importing a package would run."""
    spec = PathFinder.find_spec(package)
    return None if spec is None or spec.origin is None else os.path.abspath(spec.origin)


def _importable(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as members:
            return sorted(member.name for member in members if _is_module(member))
    except OSError:
        return []


def _is_module(entry: os.DirEntry[str]) -> bool:
    if entry.name.endswith((*SOURCE_SUFFIXES, *EXTENSION_SUFFIXES)):
        return True
    return entry.is_dir() and os.path.exists(os.path.join(entry, "__init__.py"))


def _libraries() -> tuple[str, ...]:
    return tuple(dict.fromkeys(os.path.abspath(sysconfig.get_path(name)) for name in ("purelib", "platlib")))


def _standard(file: str) -> bool:
    return file.startswith(STANDARD) and "-packages" not in file


def _own(file: str) -> bool:
    return file.startswith(f"{OWN}{os.sep}")


def _state(file: str | Path) -> list[int]:
    return state(os.stat(file))


def state(about: os.stat_result) -> list[int]:
    """What tells whether a file has changed: its size, and when it was written and touched, in nanoseconds."""
    return [about.st_size, about.st_mtime_ns, about.st_ctime_ns]


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()
