"""Zip archives from strangers, as far as torch writes them: members that are stored, whole, lie end to end, and fill the file.

Readers of zip archives differ in what they make of gaps, overlaps, second directories, headers that contradict each other, and
compression can say gigabytes in a few bytes. None of that is in an archive of torch's, and none of it is read here.
"""

from __future__ import annotations

import io
import stat
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..errors import shown
from ..limits import DEFAULT, Limits
from .reading import Raises, size_of

END = struct.Struct("<4s4H2LH")  # the last record, of 22 bytes
LOCATOR = struct.Struct("<4sLQL")
WIDE_END = struct.Struct("<4sQ2H2L4Q")  # the last record of an archive with sizes of 64 bits
ENTRY = struct.Struct("<4s6H3L5H2L")  # of the directory
HEADER = struct.Struct("<4s5H3L2H")  # before a member
FULL = 0xFFFFFFFF  # stands for a number that is in a wide field
TRAILED, UNICODE, ENCRYPTED = 0x8, 0x800, 0x1  # flags of a member
CHUNK = 1 << 20


@dataclass(frozen=True)
class Member:
    """A file in an archive: where its header and its bytes begin, how many these are, and their checksum."""

    name: str
    header: int
    start: int
    size: int
    crc: int


class Archive:
    """The members of an opened archive, by name. What is no such archive raises what `raises` makes."""

    def __init__(self, file: BinaryIO, raises: Raises, limits: Limits = DEFAULT, most: int | None = None) -> None:
        """`most` is how many members there may be, as many as tensors where it is not given."""
        self._file, self._raises = file, raises
        count, start, end = self._directory(limits, limits.tensors if most is None else most)
        found = sorted(self._entries(count, start, end, limits), key=lambda entry: entry[0].header)
        self.members: dict[str, Member] = {}
        at = 0
        for i, (entry, flags) in enumerate(found):
            following = found[i + 1][0].header if i + 1 < len(found) else start
            member = self._member(entry, flags, at, following)
            self.members[member.name] = member
            at = following
        if at != start:
            raise raises("is damaged, or no archive of torch's: there is something before its directory that is no member")
        lower = {name.casefold() for name in self.members}
        if len(self.members) != len(found) or len(lower) != len(found):
            raise raises("holds one name twice")

    def _at(self, position: int, size: int) -> bytes:
        self._file.seek(position)
        data = self._file.read(size)
        if len(data) != size:
            raise self._raises("is damaged, or no archive of torch's: it ends too early")
        return data

    def _directory(self, limits: Limits, most: int) -> tuple[int, int, int]:
        """How many members there are, and where the directory begins and ends."""
        size = size_of(self._file)
        wrong = self._raises("is damaged, or no archive of torch's: it does not end as an archive does")
        end = size - END.size
        if end < 0:
            raise wrong
        mark, disk, first, here, count, length, start, comment = END.unpack(self._at(end, END.size))
        if mark != b"PK\5\6" or disk or first or here != count or comment:
            raise wrong
        if end >= LOCATOR.size + WIDE_END.size and self._at(end - LOCATOR.size, 4) == b"PK\6\7":
            narrow = (count, length, start)
            at = end - LOCATOR.size - WIDE_END.size
            if LOCATOR.unpack(self._at(end - LOCATOR.size, LOCATOR.size))[1:] != (0, at, 1):
                raise wrong
            mark, rest, _, _, disk, first, here, count, length, start = WIDE_END.unpack(self._at(at, WIDE_END.size))
            if mark != b"PK\6\6" or rest != WIDE_END.size - 12 or disk or first or here != count:
                raise wrong
            for said, full, true in zip(narrow, (0xFFFF, FULL, FULL), (count, length, start), strict=True):
                if said not in (full, true):
                    raise wrong
            end = at
        if start + length != end or count * ENTRY.size > length:
            raise self._raises("is damaged, or no archive of torch's: its directory is not where it says")
        if count > most or length > limits.json:
            raise self._raises(f"has {count} members in a directory of {length} bytes, and so many are not read; see Limits")
        return count, start, end

    def _entries(self, count: int, start: int, end: int, limits: Limits) -> Iterator[tuple[Member, int]]:
        data = self._at(start, end - start)
        at = 0
        for _ in range(count):
            if at + ENTRY.size > len(data):
                raise self._raises("is damaged, or no archive of torch's: its directory ends too early")
            found = ENTRY.unpack_from(data, at)
            mark, _, _, flags, method, _, _, crc, packed, size, name, extra, comment, disk, _, kind, header = found
            at += ENTRY.size
            raw, more = data[at : at + name], data[at + name : at + name + extra]
            at += name + extra + comment
            if mark != b"PK\1\2" or at > len(data) or disk or comment:
                raise self._raises("is damaged, or no archive of torch's: its directory cannot be read")
            if name > limits.text:
                raise self._raises(f"has a name of {name} bytes, and more than {limits.text} are not read; see Limits")
            try:
                text = raw.decode("utf-8" if flags & UNICODE else "ascii")
            except UnicodeDecodeError:
                raise self._raises(f"has a member whose name is no text: {shown(raw)}") from None
            if flags & ENCRYPTED:
                raise self._raises(f"has an encrypted member, {shown(text)}")
            if method or flags & ~(TRAILED | UNICODE):
                raise self._raises(f"has a compressed member, {shown(text)}; what torch writes is stored as it is")
            if stat.S_IFMT(kind >> 16) not in (0, stat.S_IFREG) or kind & 0x10 or text.endswith("/"):
                raise self._raises(f"has a member that is no file, {shown(text)}")
            size, packed, header = self._widened((size, packed, header), more, text)
            if size != packed:
                raise self._raises(f"contradicts itself about the size of {shown(text)}")
            yield Member(text, header, 0, size, crc), flags
        if at != len(data):
            raise self._raises("is damaged, or no archive of torch's: its directory has more than it says")

    def _widened(self, numbers: tuple[int, ...], extra: bytes, name: str) -> tuple[int, ...]:
        """Numbers of a header, those that are too large for it taken from its wide field."""
        wanted = numbers.count(FULL)
        if not wanted:
            return numbers
        at, wide = 0, b""
        while at + 4 <= len(extra):
            kind, size = struct.unpack_from("<2H", extra, at)
            wide = extra[at + 4 : at + 4 + size] if kind == 1 else wide
            at += 4 + size
        if len(wide) < 8 * wanted:
            raise self._raises(f"contradicts itself about the size of {shown(name)}")
        rest = iter(struct.unpack_from(f"<{wanted}Q", wide))
        return tuple(next(rest) if number == FULL else number for number in numbers)

    def _member(self, entry: Member, flags: int, at: int, following: int) -> Member:
        """A member whose header says what the directory does, and whose bytes fill the room up to the next one."""
        shown_name = shown(entry.name)
        if entry.header != at or following < at + HEADER.size:
            raise self._raises(f"has something before, or over, its member {shown_name}")
        mark, _, own_flags, method, _, _, crc, packed, size, name, extra = HEADER.unpack(self._at(at, HEADER.size))
        raw = self._at(at + HEADER.size, name + extra)
        wrong = self._raises(f"contradicts itself about {shown_name}: its directory says another thing than the member")
        if mark != b"PK\3\4" or own_flags != flags or method or raw[:name] != entry.name.encode():
            raise wrong
        start = at + HEADER.size + name + extra
        stop = start + entry.size
        size, packed = self._widened((size, packed), raw[name:], entry.name)
        told = (crc, size, packed)
        trailer = following - stop
        if flags & TRAILED:
            form = {16: "<4s3L", 24: "<4sL2Q"}.get(trailer)
            if form is None or told not in ((0, 0, 0), (entry.crc, entry.size, entry.size)):
                raise wrong
            told = struct.unpack(form, self._at(stop, trailer))[1:]
            trailer = 0
        if trailer or told != (entry.crc, entry.size, entry.size):
            raise wrong
        return Member(entry.name, at, start, entry.size, entry.crc)

    def _chunks(self, member: Member) -> Iterator[bytes]:
        crc = 0
        for at in range(member.start, member.start + member.size, CHUNK):
            data = self._at(at, min(CHUNK, member.start + member.size - at))
            crc = zlib.crc32(data, crc)
            yield data
        if crc != member.crc:
            raise self._raises(f"is damaged: {member.name} is not as it was written")

    def read(self, name: str, limit: int | None = None) -> bytes:
        """The bytes of a member, at most `limit` of them. Raises for one that is not as it was written, as `unpack` does."""
        member = self.members[name]
        if limit is not None and member.size > limit:
            raise self._raises(f"has {member.size} bytes in {name}, and more than {limit} are not read; see Limits")
        out = io.BytesIO()
        for chunk in self._chunks(member):
            out.write(chunk)
        return out.getvalue()

    def unpack(self, name: str, target: Path) -> None:
        """Write a member to a file that is not there yet."""
        with target.open("xb") as file:
            for chunk in self._chunks(self.members[name]):
                file.write(chunk)
