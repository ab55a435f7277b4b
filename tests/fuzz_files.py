"""Random damage to ONNX files and to metadata.jsonl: each is read, or refused with one error of fxplug's own."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from hostile_files import ODD, attacked, attacks

from fxplug.core import weight_files
from fxplug.core.reading import make_reporter
from fxplug.training.data.files import open_files
from fxplug.training.train_section import Data

NUMBERS = [0, 1, 2, 3, 7, 8, 127, 128, 2**31, 2**40, 2**62, 2**63, 2**64 - 1, 2**70 - 1]
NAMES = ["a.png", "b.png", "c/d.png"]


def varint(number: int) -> bytes:
    made = b""
    while number > 127:
        made, number = made + bytes([number & 127 | 128]), number >> 7
    return made + bytes([number])


def field(number: int, value: int | str | bytes) -> bytes:
    """A field of a protobuf message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def initializer(rng, number: int) -> bytes:
    """A TensorProto: sound, or with shapes, dtypes, numbers and forms that do not go together."""
    shape = [rng.randint(1, 4) for _ in range(rng.randint(0, 3))]
    count = int(torch.Size(shape).numel())
    parts = [field(1, n) for n in shape] if rng.random() < 0.5 else [field(1, b"".join(map(varint, shape)))]
    if rng.random() < 0.6:
        parts += [field(2, 1), field(9, bytes(4 * count))]
    else:
        parts += [field(2, 7), field(7, b"".join(varint(rng.choice([1, 2**64 - 1])) for _ in range(count)))]
    parts.append(field(8, rng.choice([f"w{number}", "onnx::MatMul_7"])))
    if rng.random() < 0.25:
        odd = [
            lambda: field(1, rng.choice(NUMBERS)),
            lambda: field(1, b"".join(varint(rng.choice(NUMBERS)) for _ in range(rng.choice([1, 3, 70, 20_000])))),
            lambda: field(1, b"\0") + field(1, 2**39) * rng.randint(1, 9),
            lambda: field(2, rng.choice([*range(20), *NUMBERS])),
            lambda: field(
                rng.choice([4, 5, 7, 9, 10]), rng.choice([b"", bytes(4 * count), varint(2**70 - 1) * count, 1, 2**69])
            ),
            lambda: field(8, rng.choice([b"\xff", "x" * 5000, "", "\x1b[2J", 1])),
            lambda: field(rng.choice([13, 14]), rng.choice([1, "location"])),
            lambda: varint(rng.choice(NUMBERS)) + bytes(rng.randint(0, 9)),
        ]
        parts[rng.randrange(len(parts))] = rng.choice(odd)()
        parts.insert(rng.randint(0, len(parts)), rng.choice(odd)())
    return b"".join(parts)


def onnx_file(rng) -> bytes:
    graph = b"".join(field(5, initializer(rng, number)) for number in range(rng.randint(1, 4)))
    graph += field(1, field(1, "x") + field(1, "onnx::MatMul_7") + field(3, "/a/b/MatMul") + field(4, "MatMul"))
    if rng.random() < 0.03:
        graph += rng.choice([field(1, b""), field(1, field(1, "x")), field(5, b"")]) * 400_000
    data = bytearray(field(1, 8) + field(7, graph))
    for _ in range(rng.choice([0, 0, 0, 1, 3])):
        data[rng.randrange(min(len(data), 300))] = rng.randrange(256)
    return bytes(data[: rng.randrange(len(data))] if rng.random() < 0.1 else data)


def metadata(rng) -> bytes:
    """Lines for the images NAMES, of which some have other keys, values or forms."""
    lines = []
    for name in NAMES:
        line = {"file_name": name, rng.choice(["text", "caption"]): "x"}
        if rng.random() < 0.2:
            line["label"] = rng.choice(["cat", "dog", 3, *ODD])
        if rng.random() < 0.2:
            key = rng.choice(["file_name", "text", "caption", "label", "image", "index", "x" * 5000, "\x1b[31m", "\ud800"])
            line[key] = rng.choice([*ODD, *NAMES, "../a.png", "/etc/passwd", "a\0.png", "c/../a.png"])
        text = json.dumps(line)
        if rng.random() < 0.07:
            odd = ["[" * 5000, "9" * 9000, "null", '{"a":1,"a":2}', "{}", "\0"]
            text = rng.choice([text[:-1], text * 2, "\ufeff" + text, *odd])
        lines.append(text)
    data = bytearray("\n".join(lines * rng.choice([1, 1, 1, 2])).encode("utf-8", "surrogatepass"))
    for _ in range(rng.choice([0, 0, 0, 1, 4])):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def one(seed: str, folder: Path) -> tuple[str, str]:
    """What happened with one case, and what is wrong with that."""
    rng = random.Random(seed)
    if rng.random() < 0.5:
        file = folder / "w.onnx"
        file.write_bytes(onnx_file(rng))
        meta = rng.random() < 0.5
        raises = make_reporter(file)
        found, refused, wrong = attacked(lambda: weight_files.read_onnx(file, raises, meta=meta), file.stat().st_size)
    else:
        (folder / "c").mkdir()
        for name in NAMES:
            (folder / name).touch()
            (folder / name).with_suffix(".txt").write_bytes(rng.choice([b"x", b"x", b"x", b"", b"\xff", b"x" * (2 << 20)]))
        (folder / rng.choice(["", "c"]) / "metadata.jsonl").write_bytes(metadata(rng))
        spec = Data(images=".", captions=rng.choice(["required", "optional", "none"]))
        found, refused, wrong = attacked(lambda: open_files(spec, folder), 3 << 20)
        if found is not None and any(not isinstance(value.get("caption", ""), str) for value in found.values):
            wrong = "a caption that is no text"
    return "refused" if refused is not None else "read", wrong


def fuzz_files(cases: int, seed: int) -> list[str]:
    """Run so many cases, from this seed on; a line for each miss."""
    return attacks("files", one, cases, seed)
