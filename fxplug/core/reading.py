"""Files from strangers: regular files only, opened once, within bounds; whatever goes wrong is an error of our own.

A reader opens a file here, takes all it needs from that one handle, and reads JSON and zip archives here. Imports no torch.
"""

from __future__ import annotations

import ast
import errno
import json
import os
import re
import stat
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from .errors import DEFAULT, ArtifactError, FxplugError, Limits, did_you_mean, quote

PARSING, TRIES = threading.Lock(), 20
Raises = Callable[[str], FxplugError]  # a finding about a file, such as "is a folder", as the error that tells it
KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device", stat.S_IFLNK: "a link, which may point outside its folder",
}  # fmt: skip
REASONS = {
    errno.EACCES: "permission denied", errno.EPERM: "permission denied", errno.ELOOP: "a link that points to itself",
    errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is exceeded", errno.EFBIG: "the file would be too large",
    errno.EROFS: "the file system is read-only", errno.ENAMETOOLONG: "the name is too long",
}  # fmt: skip
# how files begin that are often found where weights should be
BEGINNINGS = {
    b"version https://git-lfs": "a pointer of git-lfs: fetch the file itself with 'git lfs pull'",
    b"<!doctype": "an HTML page: the download failed, or needs a login",
    b"<html": "an HTML page: the download failed, or needs a login",
    b"<?xml": "an XML document",
    b"\x1f\x8b": "compressed (gzip)",
    b"7z\xbc\xaf": "compressed (7-Zip)",
    b"rar!": "compressed (RAR)",
    b"\x7felf": "a program",
    b"mz": "a program",
    b"#!": "a script",
    b"\x89hdf": "an HDF5 file",
    b"gguf": "a GGUF file, whose weights are quantised: use the .safetensors file that it was made from, or trace the model "
             "that diffusers loads from it (from_single_file with a GGUFQuantizationConfig)",
    b"\x93numpy": "a NumPy array",
    b"\x89png": "a picture (PNG)",
    b"\xff\xd8\xff": "a picture (JPEG)",
    b"%pdf": "a PDF",
    b"{": "JSON text, such as a configuration or a server's error",
}


def make_reporter(path: str | os.PathLike[str], kind: Raises = ArtifactError) -> Raises:
    """Return a function that makes an error of a kind from a finding about a file: `ink.safetensors is a folder`."""
    return lambda finding: kind(f"{path} {finding}")


def get_reason(error: OSError) -> str:
    """Return a system error's reason as text."""
    return REASONS.get(error.errno or 0) or (error.strerror or type(error).__name__).lower()


@contextmanager
def report_errors(raises: Raises, what: str = "cannot be read") -> Iterator[None]:
    """Raise system errors as `raises` makes them; `what` describes the operation."""
    try:
        yield
    except FxplugError:
        raise
    except OSError as error:
        raise raises(f"{what}: {get_reason(error)}") from None
    except (ValueError, UnicodeError) as error:
        if "null byte" not in str(error) and not isinstance(error, UnicodeError):
            raise
        raise raises(f"{what}: this is not a valid file name") from None


@contextmanager
def open_regular_file(
    path: str | os.PathLike[str],
    limit: int | None = None,
    raises: Raises | None = None,
    *,
    links: bool = True,
) -> Iterator[BinaryIO]:
    """Open a regular file of at most `limit` bytes for reading.

    Raises what `raises` makes (an ArtifactError that names the path) for one that is missing, too large, no regular file (a
    pipe is not waited for, a device not touched; without `links` neither is a link), cannot be read, or changes before the end
    of the block.
    """
    raises = raises or make_reporter(path)
    with report_errors(raises):
        try:
            before = os.stat(path, follow_symlinks=links)
        except FileNotFoundError:
            raise raises(explain_missing(Path(path))) from None
        _check_kind(before, raises)
        # between the two looks a pipe may have come there: opening one does not wait then
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        handle = os.open(path, flags if links else flags | getattr(os, "O_NOFOLLOW", 0))
        with os.fdopen(handle, "rb") as file:
            before = os.fstat(handle)
            _check_kind(before, raises)
            if limit is not None and before.st_size > limit:
                raise raises(f"has {before.st_size} bytes; the limit is {limit}; fxplug.Limits can raise it")
            yield file
            after = os.fstat(handle)  # its other time changes also where another file comes in its place
            if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                raise raises("changed while it was read")


def get_stamp(found: os.stat_result) -> tuple[int, ...]:
    """Return what tells a file from another one that was put in its place, and from itself after it was written: inode, size,
    and the times of change in ns, of which copying tools set only the first."""
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _check_kind(found: os.stat_result, raises: Raises) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise raises(f"cannot be read: it is {KINDS.get(stat.S_IFMT(found.st_mode), 'something else')}, not a file")


def explain_missing(path: Path) -> str:
    """Return why there is no file: `no such file` with the nearest name in that folder, or `no such folder`."""
    if os.path.islink(path):
        return f"is a broken link to {quote(os.readlink(path))}"
    if not os.path.isdir(path.parent):
        return f"does not exist: no such folder {quote(str(path.parent), 200)}"
    with report_errors(make_reporter(path.parent)):
        return "does not exist: no such file" + did_you_mean(path.name, os.listdir(path.parent))


def get_size(file: BinaryIO) -> int:
    """Return the size of an opened file in bytes."""
    return os.fstat(file.fileno()).st_size


def read_bytes(path: str | os.PathLike[str], limit: int, raises: Raises | None = None) -> bytes:
    """Read the bytes of a file, with the checks of `open_regular_file`."""
    with open_regular_file(path, limit, raises) as file:
        data = file.read(limit + 1)
        if len(data) != get_size(file):
            raise (raises or make_reporter(path))("changed while it was read")
        return data


def read_text(path: str | os.PathLike[str], limit: int, raises: Raises | None = None) -> str:
    """Read the UTF-8 text of a file, without a byte order mark."""
    raises = raises or make_reporter(path)
    data = read_bytes(path, limit, raises)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        wide = data[:2] in (b"\xff\xfe", b"\xfe\xff")
        hint = "; it is UTF-16: save it as UTF-8" if wide else f" in line {data[: error.start].count(10) + 1}"
        raise raises(f"cannot be read: not UTF-8 text{hint}") from None


def guess_kind(start: bytes) -> str:
    """Return the kind of a file that is often given instead of weights, from its first bytes; else ""."""
    low = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if what := next((what for mark, what in BEGINNINGS.items() if low.startswith(mark)), ""):
        return what
    if start[:1] == b"\x08" and start[1:2] < b"\x20" and start[2:3] in (b"\x12", b"\x3a", b"\x42"):  # version, producer
        return (
            "an ONNX file: load_onnx reads one that export wrote, and 'weights' of a configuration any whose name ends in .onnx"
        )
    printed = len(start) > 8 and all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in start)
    return "text, not weights" if printed else ""


def open_archive(file: BinaryIO, raises: Raises) -> zipfile.ZipFile:
    """Open a zip archive as torch writes it: its members are stored uncompressed, so they are no larger than the file.

    Raises what `raises` makes for what is no archive, has a name twice, or would have to be inflated.
    """
    try:
        archive = zipfile.ZipFile(file)
    except Exception as error:  # zipfile tells of a damaged directory by many kinds
        raise raises(f"is damaged, or not a zip archive: {quote(str(error), 200)[1:-1]}") from None
    members = archive.infolist()
    if any(each.compress_type or each.flag_bits & 1 for each in members) or sum(e.file_size for e in members) > get_size(file):
        raise raises("has compressed or encrypted members, which torch never writes")
    if len(archive.NameToInfo) != len(members):
        raise raises("has the same name twice")
    return archive


def read_member(archive: zipfile.ZipFile, name: str, raises: Raises, limit: int | None = None) -> bytes:
    """Read the bytes of a member, at most `limit` of them. Raises what `raises` makes for one that is not as it was written."""
    size = archive.getinfo(name).file_size
    if limit is not None and size > limit:
        raise raises(f"has {size} bytes in {quote(name)}; the limit is {limit}; fxplug.Limits can raise it")
    try:
        return archive.read(name)
    except Exception as error:  # zipfile tells of damage by many kinds
        raise raises(
            f"is damaged: {quote(name, 200)} has changed since it was written: {quote(str(error), 200)[1:-1]}"
        ) from None


# --- JSON

_ESCAPED = re.compile(rb"\\.", re.DOTALL)
_QUOTED = re.compile(rb'"[^"]*"')
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_LONG = re.compile(rb"[0-9]{256}")


def parse_json(data: bytes | str, raises: Raises, limits: Limits = DEFAULT) -> Any:
    """Parse a JSON value. Duplicate keys, NaN, and what is larger, deeper or longer than `limits` raise what `raises` makes.

    The limits are checked before it is parsed, so a refusal takes no memory but that of the text.
    """
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if len(raw) > limits.json:
        raise raises(f"has {len(raw)} bytes of JSON; the limit is {limits.json}; fxplug.Limits can raise it")
    bare = _QUOTED.sub(b"", _ESCAPED.sub(b"", raw))
    count = sum(map(bare.count, (b"{", b"[", b",")))
    if count > limits.values:
        raise raises(f"has {count} values of JSON; the limit is {limits.values}; fxplug.Limits can raise it")
    nest = bare.translate(None, _NO_BRACKETS)
    for _ in range(limits.depth):
        if not nest:
            break
        nest = nest.replace(b"[]", b"").replace(b"{}", b"")
    if len(nest) > limits.depth:
        raise raises(f"is not JSON, or nested more than {limits.depth} deep")
    if long := _LONG.search(bare):
        digits = re.compile(rb"[0-9]*").match(bare, long.start())
        if digits and len(digits[0]) > limits.digits:
            raise raises(f"has a number of {len(digits[0])} digits; the limit is {limits.digits}; fxplug.Limits can raise it")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise raises(f"has the key {quote(twice)} twice in one object")
        return found

    def refuse(constant: str) -> Any:
        raise raises(f"has {constant}, which is not JSON")

    try:
        return json.loads(raw.decode("utf-8-sig"), object_pairs_hook=unique, parse_constant=refuse)
    except UnicodeDecodeError as error:
        raise raises(f"is not JSON: not UTF-8 text (byte {error.start})") from None
    except (ValueError, RecursionError) as error:
        if (what := guess_kind(raw[:64])) and not what.startswith(("JSON", "text")):
            raise raises(f"is not JSON: it is {what}") from None
        raise raises(f"is not JSON: {quote(str(error), 200)[1:-1] or type(error).__name__}") from None


def read_json(path: str | os.PathLike[str], raises: Raises | None = None, limits: Limits = DEFAULT) -> Any:
    """Read the value of a JSON file, within `limits`."""
    raises = raises or make_reporter(path)
    return parse_json(read_bytes(path, limits.json, raises), raises, limits)


def check_format(manifest: Any, newest: int, raises: Raises) -> None:
    """Raise what `raises` makes unless a manifest, an object with `format`, is of a version up to `newest`.

    Its key `fxplug` is the version that wrote it.
    """
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if type(version) is not int or version < 1:
        raise raises(f"cannot be read: its manifest has the format {quote(version)}, which is not a version")
    if version > newest:
        writer = f", written by fxplug {quote(str(manifest['fxplug']))[1:-1]}" if "fxplug" in manifest else ""
        raise raises(f"has format {quote(version)}{writer}; this version reads up to {newest}: update fxplug")


def parse_python(text: str, mode: str = "exec") -> Any:
    """Return Python's syntax tree of a text. Raises SyntaxError.

    CPython 3.11 counts the depth for all threads together, and fails if two of them parse at once.
    """
    with PARSING:
        for _ in range(TRIES):
            try:
                return ast.parse(text, mode=mode)
            except SystemError:  # a thread that is none of ours
                continue
        return ast.parse(text, mode=mode)
