"""Packages as a stranger could write them: one real package, changed in its archive, its manifest, its signature, its tensors.

The machine code stays as it was: what that does cannot be checked, and is trusted or not loaded. Every other package has to be
loaded or refused by an ArtifactError that names the file, soon, in little memory, and without a look or a write elsewhere.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import stat
import struct
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fxplug
from fxplug.errors import ArtifactError
from fxplug.exports.package_file import CODE, MANIFEST, TENSORS

Rng = random.Random
SECONDS = 1.0  # of processor time, for one refusal


# --- an archive that says what it is told to say


@dataclass
class Entry:
    """A member; `local` and `central` override fields of its two headers."""

    name: bytes
    data: bytes
    local: dict[str, Any] = field(default_factory=dict)
    central: dict[str, Any] = field(default_factory=dict)
    before: bytes = b""


def entries(path: Path) -> list[Entry]:
    with zipfile.ZipFile(path) as archive:
        return [Entry(name.encode(), archive.read(name)) for name in archive.namelist()]


def written(members: list[Entry], end: dict[str, Any] | None = None, tail: bytes = b"", head: bytes = b"") -> bytes:
    """The bytes of an archive; `end` overrides fields of the last record."""
    out, directory = bytearray(head), bytearray()
    for member in members:
        out += member.before
        facts = {"flags": 0x800, "method": 0, "crc": zlib.crc32(member.data), "packed": len(member.data), "mode": 0o600 << 16}
        facts |= {"size": len(member.data), "name": member.name, "extra": b"", "offset": len(out), "data": member.data}
        here, there = {**facts, **member.local}, {**facts, **member.central}
        out += struct.pack(
            "<4s5H3L2H", b"PK\3\4", 20, here["flags"], here["method"], 0, 0x21, here["crc"], here["packed"], here["size"],
            len(here["name"]), len(here["extra"]),
        ) + here["name"] + here["extra"] + here["data"]  # fmt: skip
        directory += struct.pack(
            "<4s6H3L5H2L", b"PK\1\2", 20, 20, there["flags"], there["method"], 0, 0x21, there["crc"], there["packed"],
            there["size"], len(there["name"]), len(there["extra"]), 0, 0, 0, there["mode"], there["offset"],
        ) + there["name"] + there["extra"]  # fmt: skip
    facts = {
        "count": len(members),
        "total": len(members),
        "length": len(directory),
        "start": len(out),
        "comment": b"",
        "disk": 0,
    }
    facts |= end or {}
    last = struct.pack(
        "<4s4H2LH", b"PK\5\6", facts["disk"], 0, facts["count"], facts["total"], facts["length"], facts["start"],
        len(facts["comment"]),
    )  # fmt: skip
    return bytes(out + directory + last) + facts["comment"] + tail


def deflated(data: bytes) -> bytes:
    work = zlib.compressobj(9, zlib.DEFLATED, -15)
    return work.compress(data) + work.flush()


# --- what is done to it

NAMES = [
    "../evil", "../../../../tmp/evil", "/etc/evil", "C:\\evil", "..\\evil", "a/../../evil", "./evil", "", ".", "..",
    "evil\0.so",
    "evil\n", "evil\x1b[31m", "ev\u202eil", "CON", "évil", "x" * 5000, "-rf", "data/constants/custom_obj_0",
    "data/weights/weight_0",
    "models/model.json", "extra/x", "data/aotinductor/model/../../../evil.so", "data/aotinductor/model/sub/evil.so",
    "data/aotinductor/model/evil.so", "data/aotinductor/other/evil.so", "data/aotinductor/model/x.py",
    "data/aotinductor/model/x.pkl",
    "data/aotinductor/model/.so", "data/aotinductor/model/a;id.cpp", "data/aotinductor/model/$(id).json",
    "data/aotinductor/model//x.json", "data/aotinductor/modelx.so", "data/fxplug/more.json", "data/fxplug/manifest.json/x",
    "DATA/fxplug/manifest.json", "data/fxplug/MANIFEST.json",
]  # fmt: skip
NUMBERS = [0, 1, 0xFF, 0xFFFF, 0xFFFE, 0xFFFFFFFF, 0xFFFFFFFE, 0x7FFFFFFF, 0x80000000]
ZIP64 = struct.pack("<2H3Q", 1, 24, 2**63, 2**63, 2**62)


def _member(rng: Rng, members: list[Entry]) -> Entry:
    return rng.choice(members)


def _root(members: list[Entry]) -> str:
    return members[0].name.decode().partition("/")[0] + "/"


def add_name(rng: Rng, members: list[Entry]) -> bytes:
    name = rng.choice(NAMES)
    name = name if rng.random() < 0.3 else _root(members) + name
    members.insert(rng.randrange(len(members) + 1), Entry(name.encode(), rng.randbytes(rng.randrange(50))))
    return written(members)


def rename(rng: Rng, members: list[Entry]) -> bytes:
    member = _member(rng, members)
    base = member.name.decode().rpartition("/")[0]
    member.name = rng.choice([*NAMES, f"{base}/../x.so", f"{base}/{rng.choice(NAMES)}"]).encode()
    return written(members)


def twice(rng: Rng, members: list[Entry]) -> bytes:
    member = copy.deepcopy(_member(rng, members))
    member.name = rng.choice([member.name, member.name.upper(), member.name.title()])
    member.data = rng.choice([member.data, b"", b"other"])
    members.insert(rng.randrange(len(members) + 1), member)
    return written(members)


def leave_out(rng: Rng, members: list[Entry]) -> bytes:
    for _ in range(rng.randrange(1, 4)):
        members.remove(_member(rng, members))
    return written(members)


def other_roots(rng: Rng, members: list[Entry]) -> bytes:
    root = _root(members)
    new = rng.choice(["", "/", "../", "./", "a\\b/", "a/b/", "\x1b[2J/", "other/"])
    for member in members if rng.random() < 0.5 else rng.sample(members, 2):
        member.name = member.name.decode().replace(root, new, 1).encode()
    return written(members)


def lie_in_headers(rng: Rng, members: list[Entry]) -> bytes:
    for _ in range(rng.randrange(1, 3)):
        member = _member(rng, members)
        lies: list[tuple[str, Any]] = [(key, rng.choice(NUMBERS)) for key in ("crc", "size", "packed")]
        lies += [
            ("flags", rng.choice([0x1, 0x8, 0x801, 0x808, 0x840, 0x2800])),
            ("method", rng.choice([1, 8, 9, 12, 14, 93, 99])),
        ]
        lies += [
            ("name", rng.choice(NAMES).encode()[:200]),
            ("extra", rng.choice([ZIP64, b"\1\0", rng.randbytes(9), b"\1\0\xff\xff"])),
        ]
        lies += [("offset", rng.choice([*NUMBERS, 30, 64])), ("mode", rng.choice([stat.S_IFLNK | 0o777, stat.S_IFDIR]) << 16)]
        key, value = rng.choice(lies)
        for header in rng.choice([(member.local,), (member.central,), (member.local, member.central)]):
            header[key] = value
    return written(members)


def lie_at_the_end(rng: Rng, members: list[Entry]) -> bytes:
    end = {
        rng.choice(["count", "total", "disk"]): rng.choice(NUMBERS[:4]),
        rng.choice(["length", "start"]): rng.choice(NUMBERS),
    }
    return written(members, {key: end[key] for key in rng.sample(list(end), rng.randrange(1, 3))})


def lie_in_64_bits(rng: Rng, members: list[Entry]) -> bytes:
    data = written(members)
    numbers = [rng.choice([len(members), 2**63, 2**64 - 1, 0, 2**32]) for _ in range(4)]
    wide = struct.pack("<4sQ2H2L4Q", b"PK\6\6", rng.choice([44, 0, 2**63]), 45, 45, 0, 0, *numbers)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, rng.choice([len(data) - 22, 0, 2**63]), rng.choice([1, 0, 99]))
    last = data[-22:] if rng.random() < 0.5 else struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, *[0xFFFFFFFF] * 2, 0)
    return data[:-22] + wide + locator + last


def squeeze(rng: Rng, members: list[Entry]) -> bytes:
    """Compressed members: what they were, or very many zeros."""
    member = _member(rng, members)
    data = member.data if rng.random() < 0.3 else bytes(rng.choice([1 << 20, 1 << 25]))
    small = deflated(data)
    facts = {"method": 8, "packed": len(small), "size": len(data), "crc": zlib.crc32(data)}
    member.local, member.central = {**facts, "data": small}, facts
    return written(members)


def overlap(rng: Rng, members: list[Entry]) -> bytes:
    one, other = rng.sample(range(len(members)), 2)
    ends = [0]
    for member in members:
        ends.append(ends[-1] + 30 + len(member.name) + len(member.data))
    members[one].central["offset"] = ends[other] + rng.choice([0, 0, 1, 30])
    return written(members)


def around(rng: Rng, members: list[Entry]) -> bytes:
    """Something before, between or behind the members."""
    junk = rng.choice([b"#!/bin/sh\nid\n", b"\x7fELF", bytes(1000), b"PK\5\6" + bytes(18), rng.randbytes(100)])
    where = rng.randrange(5)
    if where == 0:
        return written(members, head=junk)
    if where == 1:
        return written(members, tail=junk)
    if where == 2:
        return written(members, {"comment": junk})
    if where == 3:
        return junk + written(members)
    _member(rng, members).before = junk
    return written(members)


def nest(rng: Rng, members: list[Entry]) -> bytes:
    inner = written(members)
    return rng.choice(
        [inner + inner, written([Entry(b"x/" + MANIFEST.encode(), inner)]), written([*members, Entry(b"x.zip", inner)])]
    )


def damage(rng: Rng, members: list[Entry]) -> bytes:
    data = bytearray(written(members))
    start = len(data) - 22 - sum(46 + len(member.name) for member in members)
    for _ in range(rng.randrange(1, 6)):
        place = rng.choice([rng.randrange(start, len(data)), rng.randrange(len(data)), rng.randrange(60)])
        data[place] = rng.randrange(256)
    return bytes(data[: rng.randrange(len(data))] if rng.random() < 0.3 else data)


def many(rng: Rng, members: list[Entry]) -> bytes:
    count = rng.choice([5_000, 65_000])
    root = _root(members)
    return written(members + [Entry(f"{root}{CODE}f{i}.h".encode(), b"") for i in range(count)])


VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, -(2**63), 10**300, 0.5, 1e308, "", "x", "x" * 100_000, "../../etc/passwd",
    "__class__", "__globals__", "\x1b[31m", "\0", "torch", "os::system", "aten::add",
    [], {}, [[]], [{}], {"": ""}, [None], [0] * 1000,
    [-1], [2**62] * 3, {"dtype": "float32"}, "load", "float32", "Tensor", "cuda", "meta",
]  # fmt: skip


def _steps(value: Any) -> list[tuple[Any, Any]]:
    """All places in a value of JSON, as holder and key."""
    found = []
    todo = [value]
    while todo:
        holder = todo.pop()
        for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
            found.append((holder, key))
            if isinstance(holder[key], (dict, list)):
                todo.append(holder[key])
    return found


def _mutated(rng: Rng, value: Any) -> None:
    """One to three changes anywhere in a value of JSON."""
    for _ in range(rng.randrange(1, 4)):
        holder, key = rng.choice(_steps(value))
        what = rng.randrange(5)
        if what == 0 and isinstance(holder, dict):
            holder[rng.choice(["x", "__class__", "", "../x", key + "x", "load_library"])] = holder.pop(key)
        elif what == 1:
            del holder[key]
        elif what == 2:
            other, place = rng.choice(_steps(value))
            holder[key] = copy.deepcopy(other[place])
        elif isinstance(holder[key], int) and what == 3:
            holder[key] += rng.choice([-1, 1, 2**31, -(2**31), 2**62])
        else:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
        if not _steps(value):
            return


def _found(members: list[Entry], name: str) -> Entry:
    return next(member for member in members if member.name.endswith(name.encode()))


def _manifest(change: Callable[[Rng, dict[str, Any]], Any]) -> Callable[[Rng, list[Entry]], bytes]:
    def mutation(rng: Rng, members: list[Entry]) -> bytes:
        member = _found(members, MANIFEST)
        manifest = json.loads(member.data)
        changed = change(rng, manifest)
        member.data = changed if isinstance(changed, bytes) else json.dumps(manifest).encode()
        return written(members)

    mutation.__name__ = change.__name__
    return mutation


@_manifest
def manifest_anywhere(rng: Rng, manifest: dict[str, Any]) -> None:
    _mutated(rng, manifest)


@_manifest
def manifest_entry(rng: Rng, manifest: dict[str, Any]) -> None:
    manifest[rng.choice(list(manifest))] = copy.deepcopy(rng.choice(VALUES))


@_manifest
def manifest_records(rng: Rng, manifest: dict[str, Any]) -> None:
    kind = rng.choice(["constants", "banks", "where", "operators", "features"])
    if isinstance(manifest[kind], dict):
        _mutated(rng, manifest[kind])
    else:
        manifest[kind].append(rng.choice([*VALUES, "::", "a::b", "aten::add", "torch::ops", "fxplug::loha", "x::load_library"]))


@_manifest
def manifest_views(rng: Rng, manifest: dict[str, Any]) -> None:
    names = [name for name in manifest["constants"] if name.startswith("lora.")]
    view = {"of": rng.choice(names), "shape": [2, 2], "stride": [2, 1], "start": 0}
    view[rng.choice(list(view))] = rng.choice([*VALUES, [0, 0], [2**40, 2**40], [-1, 1], [3, 1], [1], "gone", 10**6])
    manifest["views"][rng.choice([*names, "new", "conv.weight"])] = view


@_manifest
def manifest_text(rng: Rng, manifest: dict[str, Any]) -> bytes:
    """JSON that json.dumps does not write."""
    text = json.dumps(manifest)
    return rng.choice([
        text.replace('"format": 1', f'"format": {"9" * rng.choice([10, 5000, 1_000_000])}'),
        text.replace('"format": 1', '"format": NaN'),
        text.replace('"format": 1', '"format": 1, "format": 1'),
        text.replace('"format": 1', '"format": ' + "[" * 100_000),
        text.replace('"mode": "eval"', '"views": ' + "[" * 3000 + "]" * 3000),
        text.replace('"mode": "eval"', '"views": [' + "{}," * 3_000_000 + "{}]"),
        "\ufeff" + text,
        text[: rng.randrange(len(text))],
    ]).encode(rng.choice(["utf-8", "utf-8", "utf-16"]))  # fmt: skip


GUARDS = [
    "9**9**9", "9**99999999", "(9**200)**(9**200)", "2**-99999999999", "0**-1", "1/0", "1%0", "1//0", "round(1, -999999999)",
    "L['image'].size() * 999999999", "L['image'].size() + L['image'].size()", "L", "L['image']", "L['gone'].size()[0]",
    "L['image'].size()[99]", "L['image'].size()['x']", "L['image'].__class__", "().__class__.__bases__[0].__subclasses__()",
    "__import__('os').system('id')", "open('/tmp/evil', 'w')", "eval('1')", "lambda: 1", "[x for x in ()]", "x := 1",
    "f'{1}'", "a",
    "math.factorial(99999)", "math.sqrt(-1)", "math.floor(1e400)", "math.ceil(1e400 - 1e400)", "max(5)", "min()", "abs(1, 2)",
    "torch.sym_ite(1)", "max(*L)", "max(1, key=2)", "'x' * 999999999", "'x' < 1", "None", "...", "1 < 2 < 'x'", "1j * 1j < 1",
    "(-8) ** 0.5 < 1", "not " * 20_000 + "1", "-" * 50_000 + "1", "~1",
    "(" * 500 + "1" + ")" * 500, "[" * 150 + "]" * 150, "1+" * 5000 + "1",
    "L" + "['a']" * 5000, "1 if 1 else 2", "1 and " * 10_000 + "1", "max(" * 90 + "1, 1" + ", 1)" * 90, "\\", "\0",
    "{" * 99, "1\n2",
    "0x" + "f" * 5000 + " < 1", "9" * 5000 + " < 1", "1" + "0" * 200_000, "L['image'].size(0)",
    "L['image'].size()[-1]", "True", "1",
    "x" * 300_000,
]  # fmt: skip


@_manifest
def signature_guards(rng: Rng, manifest: dict[str, Any]) -> None:
    guard = rng.choice([*GUARDS, "".join(rng.choice("9*(L)[].,'+-<%xsize \n") for _ in range(rng.randrange(1, 80)))])
    guards = manifest["signature"]["guards"]
    guards.insert(rng.randrange(len(guards) + 1), guard)
    if rng.random() < 0.05:
        guards.extend([guard] * min(1000, 1_000_000 // len(guard)))


@_manifest
def signature_anywhere(rng: Rng, manifest: dict[str, Any]) -> None:
    _mutated(rng, manifest["signature"])


def _tensors(change: Callable[[Rng, dict[str, Any], bytes], bytes | None]) -> Callable[[Rng, list[Entry]], bytes]:
    def mutation(rng: Rng, members: list[Entry]) -> bytes:
        member = _found(members, TENSORS)
        length = int.from_bytes(member.data[:8], "little")
        header, body = json.loads(member.data[8 : 8 + length]), member.data[8 + length :]
        text = change(rng, header, body) or json.dumps(header).encode()
        length = len(text) if rng.random() < 0.9 else rng.choice([0, 2**63, 2**64 - 1, len(text) - 1, len(text) + 1, 10**8])
        member.data = length.to_bytes(8, "little") + text + (body if rng.random() < 0.9 else body[: rng.randrange(len(body))])
        return written(members)

    mutation.__name__ = change.__name__
    return mutation


@_tensors
def tensors_anywhere(rng: Rng, header: dict[str, Any], body: bytes) -> None:
    _mutated(rng, header)


@_tensors
def tensors_records(rng: Rng, header: dict[str, Any], body: bytes) -> None:
    record = header[rng.choice([name for name in header if name != "__metadata__"])]
    key = rng.choice(["dtype", "shape", "data_offsets"])
    shapes = [[2**62], [2**32, 2**32], [0], [], [-1], [1] * 1000, record["shape"][::-1], [1, *record["shape"]]]
    offsets = [[0, 2**63], [5, 1], [0, len(body)], [0], [], [0, 4], [1, 5]]
    dtypes = ["F64", "F16", "BOOL", "F8_E4M3", "F4", "C64", "U64", "I32", "X", "", 5]
    record[key] = rng.choice({"dtype": dtypes, "shape": shapes, "data_offsets": offsets}[key])


@_tensors
def tensors_text(rng: Rng, header: dict[str, Any], body: bytes) -> bytes:
    text = json.dumps(header)
    row = '{"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}'
    return rng.choice([
        text[:-1] + f', "x": {row}, "x": {row}}}',
        text[:-1] + "".join(f', "n{i}": {row}' for i in range(140_000)) + "}",
        text.replace("F32", "F32\x1b[2J"), "[" * 100_000, text[:-1], "null", "[]", " " * 10_000_000 + text,
    ]).encode()  # fmt: skip


MUTATIONS: list[Callable[[Rng, list[Entry]], bytes]] = [
    add_name, rename, twice, leave_out, other_roots, lie_in_headers, lie_at_the_end, lie_in_64_bits, squeeze, overlap, around,
    nest, damage, many, manifest_anywhere, manifest_entry, manifest_records, manifest_views, manifest_text, signature_guards,
    signature_anywhere, tensors_anywhere, tensors_records, tensors_text,
]  # fmt: skip
RARE = {many, manifest_text, tensors_text}  # large


def hostile(members: list[Entry], seed: int, case: int) -> tuple[str, bytes]:
    """One package of a sequence, and what was done."""
    rng = random.Random(f"{seed}/{case}")
    mutation = MUTATIONS[case % len(MUTATIONS)]
    if mutation in RARE and case >= len(MUTATIONS) * 2 and rng.random() < 0.9:
        mutation = rng.choice([m for m in MUTATIONS if m not in RARE])
    return mutation.__name__, mutation(rng, copy.deepcopy(members))


# --- what becomes of it

_watching: list[list[str]] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _watching:
        return
    name = event.partition(".")[0]
    bad = event in ("exec", "import", "pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.fork")
    bad = bad or name in ("subprocess", "socket", "ctypes", "urllib", "code", "winreg")
    if event == "import":
        bad = args[0].partition(".")[0] not in ("fxplug", "encodings") and args[0] not in sys.modules
    if event == "exec":
        bad = not any(f"/{name}/" in getattr(args[0], "co_filename", "") for name in ("fxplug", "encodings"))
    if event == "compile":
        bad = args[0] is None  # what was compiled is not text: a condition is parsed, and never run
    if event == "open" and args[0] is not None:
        flags = args[2] if isinstance(args[2], int) else 0
        bad = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)) and not _ours(args[0])
    if event in ("os.mkdir", "os.remove", "os.rmdir", "os.rename", "os.link", "os.symlink", "os.chmod", "os.truncate"):
        bad = not _ours(args[0]) and not (event == "os.remove" and args[-1] != -1)  # below a folder that is open
    if bad:
        _watching[-1].append(f"{event} {str(args)[:200]}")


def _ours(path: Any) -> bool:
    text = os.fsdecode(path) if isinstance(path, (str, bytes)) else ""
    return not text or text.startswith(os.path.join(tempfile.gettempdir(), "fxplug-package-")) or "/" not in text


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """What the block did that reading a file has no need of."""
    if not getattr(sys, "_fxplug_packages_watched", False):
        sys.addaudithook(_audit)
        sys._fxplug_packages_watched = True  # type: ignore[attr-defined]
    found: list[str] = []
    _watching.append(found)
    try:
        yield found
    finally:
        _watching.pop()


def verdict(file: Path) -> str:
    """Empty for a package that is loaded or refused as it should be, or what is wrong."""
    start = time.thread_time()
    error: BaseException | None = None
    with watched() as seen:
        try:
            package = fxplug.load_package(file, trusted=True)
            repr(package), package.state()
            if package.manifest["banks"]:
                repr(package.adapters), package.adapters.active
            del package
        except ArtifactError as caught:
            error = caught
        except BaseException as caught:
            return f"raw {type(caught).__name__}: {str(caught)[:300]}"
    spent = time.thread_time() - start
    if seen:
        return f"did what it should not: {seen[:3]}"
    if error is not None:
        text = str(error)
        if str(file) not in text:
            return f"does not name the file: {text[:300]}"
        if len(text) > 2000 or any(not c.isprintable() for c in text):
            return f"says it badly, in {len(text)} characters: {text[:100]!r}"
        if spent > SECONDS:
            return f"took {spent:.2f} s: {text[:200]}"
    return ""


def run(package: Path, folder: Path, cases: range, seed: int) -> list[str]:
    """The misses of some cases."""
    from fxplug.lowerings.linear import operators  # noqa: F401  (which a package of ours may import)

    members, misses = entries(package), []
    file = folder / "hostile.pt2"
    before = {path.name for path in Path(tempfile.gettempdir()).iterdir() if path.name.startswith("fxplug-package-")}
    for case in cases:
        what, data = hostile(members, seed, case)
        file.write_bytes(data)
        miss = verdict(file)
        if miss:
            misses.append(f"case {case} of seed {seed}, {what}: {miss}")
    after = {path.name for path in Path(tempfile.gettempdir()).iterdir() if path.name.startswith("fxplug-package-")}
    return [*misses, *(f"left {name}" for name in sorted(after - before))]
