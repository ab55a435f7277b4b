"""Random damage to configurations and passes: each is read, or refused with one error of fxplug's own."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import yaml
from hostile_files import ODD, PATTERNS, attacked, attacks

import fxplug.adapters.file_passes  # noqa: F401  (a pass that adapter files make names it, and no attack may import)
from fxplug.config.run_config import load_config
from fxplug.core.spec.pass_file import list_shipped, load_pass

LINES = [
    "a: &a [*a]",
    "<<: *x",
    "? [a]",
    "a: !!python/object:os.system {}",
    "a: !x 1",
    "- - - -",
    "\ta: 1",
    "a: 'b",
    "a: |\n x",
    "%YAML 9.9",
    "--- ",
    "a: 1:30:00",
    "a: 0o777",
    "a: 0x" + "f" * 9000,
    "a: " + "9" * 9000,
    "x" * 9000 + ": 1",
    "\x1b[2J",
    "a: \0",
    "a: 1e999",
    "[" * 3000,
    "a: [" + "1, " * 30_000 + "]",
    "a: &b {c: &c [1, 1]}\nd: [*c, *b]",
    "\ufeff",
    "a: .nan",
    "a: 1\na: 2",
]


@cache
def files():
    kinds = ("passes", "configs")
    return [(kind, name, path.read_text("utf-8")) for kind in kinds for name, path in list_shipped(kind).items()]


def places(data, path=()):
    """The way to each value in nested data."""
    yield path
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in inner:
        yield from places(value, (*path, key))


def odd(rng):
    return rng.choice(
        [*ODD, *(f"re:{p}" for p in PATTERNS), "{i}" * 50, "$x", "$$", ">=-1", "a:b", "x[1][*]", {"x" * 300: 1}, "*" * 3000]
    )


def damaged(rng, text: str) -> bytes:
    how = rng.random()
    if how < 0.55:
        data = yaml.safe_load(text)
        for _ in range(rng.randint(1, 3)):
            way = rng.choice(list(places(data))[1:])
            around = data
            for key in way[:-1]:
                around = around[key]
            act = rng.random()
            if act < 0.6 or isinstance(around, list):
                around[way[-1]] = odd(rng)
            elif act < 0.8:
                around[rng.choice(["\x1b", str(way[-1]) + "x", "x" * 5000, "name", "slots", "lr", "params"])] = around.pop(
                    way[-1]
                )
            else:
                around[rng.choice(["inputs", "networks", "slots", "lr", "train", "data", "seed", "weights", "leaf"])] = odd(rng)
        try:
            return yaml.safe_dump(data, allow_unicode=True).encode("utf-8", "surrogatepass")
        except ValueError:  # a number that has no text
            return b"9" * 100_000
    if how < 0.8:
        lines = text.splitlines()
        lines.insert(rng.randint(0, len(lines)), " " * rng.choice([0, 2, 4]) + rng.choice(LINES))
        return "\n".join(lines).encode("utf-8", "surrogatepass")
    raw = bytearray(text.encode())
    if how < 0.9:
        for _ in range(rng.randint(1, 5)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        return bytes(raw)
    return rng.choice(
        [
            text.encode("utf-16"),
            b"",
            b"\0" * 50,
            bytes(raw[: rng.randrange(len(raw))]),
            b"\xef\xbb\xbf" + raw,
            text.replace("\n", "\r\n").encode(),
            b"\xff" * 9,
            bytes(raw) * 2,
            b"null",
            b"- " * 50_000,
        ]
    )


def one(seed: str, folder: Path) -> tuple[str, str]:
    rng = random.Random(seed)
    kind, name, text = rng.choice(files())
    file = folder / "case.yaml"
    file.write_bytes(damaged(rng, text))
    read = load_config if kind == "configs" else load_pass
    given = {"rank": odd(rng)} if kind == "passes" and rng.random() < 0.1 else {}
    _, refused, wrong = attacked(lambda: read(file, **given), file.stat().st_size)
    return "refused" if refused is not None else "read", wrong


def fuzz_configs(cases: int, seed: int) -> list[str]:
    """Run so many cases, from this seed on; a line for each miss."""
    for kind, name, _ in files():
        if kind == "configs":
            load_config(name)
    return attacks("configs", one, cases, seed)
