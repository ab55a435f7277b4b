"""Zip archives read as data: what is in them is listed, measured and read in place; nothing is unpacked or inflated."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import BinaryIO

from .errors import shown
from .limits import DEFAULT, Limits
from .reading import Raises, size_of

_END, _END64, _LOCATOR = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_ENTRY = struct.Struct("<4s6H3I5H2I")  # a record of the central directory
_LOCAL = struct.Struct("<4s5H3I2H")  # the header that stands before a member's bytes
_FULL = 0xFFFFFFFF  # the value is too large for its field and stands in the record's extra part


@dataclass(frozen=True)
class Member:
    """Where a member's bytes are in the archive."""

    offset: int
    size: int


def members(file: BinaryIO, raises: Raises, limits: Limits = DEFAULT) -> dict[str, Member]:
    """The members of an archive by name. Raises what `raises` makes for one that is damaged, compressed, encrypted, has a
    name twice or leading out of a folder, has members that share bytes, or is larger than `limits`."""
    total = size_of(file)
    start, size, count = _directory(file, total, raises)
    if count > limits.tensors or size > limits.json or start + size > total:
        raise raises(f"is an archive of {count} members with a table of {size} bytes: too large, or damaged; see Limits")
    file.seek(start)
    table, at = file.read(size), 0
    found: dict[str, Member] = {}
    used = 0
    while at < len(table) and len(found) < count:
        if len(table) < at + _ENTRY.size or table[at : at + 4] != b"PK\x01\x02":
            raise raises("is a damaged archive: its table is broken")
        row = _ENTRY.unpack_from(table, at)
        flags, method, packed, plain, names, extras, comment, offset = row[3], row[4], row[8], row[9], *row[10:13], row[16]
        at += _ENTRY.size
        name, extra = table[at : at + names].decode("utf-8", "replace"), table[at + names : at + names + extras]
        at += names + extras + comment
        plain, packed, offset = _wide(extra, plain, packed, offset)
        if method or flags & 1 or plain != packed:
            how = "encrypted" if flags & 1 else "compressed"
            raise raises(f"is an archive with {shown(name)} {how}, and only plain members are read")
        if name in found or name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/") or "\0" in name:
            raise raises(f"is an archive with {shown(name)} {'twice' if name in found else 'in it, which leads out of it'}")
        used += plain
        if used > total:
            raise raises("is an archive whose members share their bytes")
        file.seek(offset)
        head = file.read(_LOCAL.size)
        if len(head) < _LOCAL.size or head[:4] != b"PK\x03\x04":
            raise raises(f"is a damaged archive: {shown(name)} is not where its table says")
        begin = offset + _LOCAL.size + sum(_LOCAL.unpack(head)[9:])
        if begin + plain > total:
            raise raises(f"is truncated: {shown(name)} ends behind the end of the file")
        found[name] = Member(begin, plain)
    if len(found) != count:
        raise raises("is a damaged archive: its table is broken")
    return found


def _directory(file: BinaryIO, total: int, raises: Raises) -> tuple[int, int, int]:
    """Where the table of an archive begins, its size in bytes, and how many members it lists."""
    file.seek(max(0, total - 22 - 0xFFFF))
    tail = file.read()
    at = tail.rfind(_END)
    if at < 0 or len(tail) < at + 22:
        raise raises("is a truncated archive: it has no table")
    count, size, start = struct.unpack_from("<H2I", tail, at + 10)
    if at >= 20 and tail[at - 20 : at - 16] == _LOCATOR and (count == 0xFFFF or _FULL in (size, start)):
        (where,) = struct.unpack_from("<Q", tail, at - 12)
        if where > total - 56:
            raise raises("is a damaged archive: its table is broken")
        file.seek(where)
        record = file.read(56)
        if record[:4] != _END64:
            raise raises("is a damaged archive: its table is broken")
        count, size, start = struct.unpack_from("<3Q", record, 32)
    return start, size, count


def _wide(extra: bytes, *values: int) -> list[int]:
    """Values of a record, those that stand in its extra part from there (zip64)."""
    made, at = list(values), 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            rest = extra[at + 4 : at + 4 + length]
            for index, value in enumerate(made):
                if value == _FULL and len(rest) >= 8:
                    (made[index],) = struct.unpack_from("<Q", rest)
                    rest = rest[8:]
            break
        at += 4 + length
    return made
