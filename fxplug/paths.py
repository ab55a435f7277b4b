"""Names of places in a model: module paths, patterns over them, and ports at their edges."""

from __future__ import annotations

import json
import keyword
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from .errors import SpecError

SLOW_PATTERN_SECONDS = 2.0


@dataclass(frozen=True)
class Port:
    """One value at the edge of a region.

    `side` is "in", "out" or "param"; `keys` walks into nested values: positions and names, outermost first.
    The empty path is the model itself; `path@1` is the second call of the same module.
    """

    path: str
    side: str = "out"
    keys: tuple[int | str, ...] = ()

    def __str__(self) -> str:
        text = self.path
        if self.side != "out" or self.keys or not self.path:
            text += f":{self.side}"
        return text + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.keys)


ADDRESS = re.compile(r"^(?P<path>.*?)(?::(?P<side>in|out|param)(?P<keys>(?:\[[^\[\]]+\]|\.[^.\[\]]+)*))?$")
KEY = re.compile(r"\[([^\[\]]+)\]|\.([^.\[\]]+)")


def parse_port(text: str) -> Port:
    """Read `path`, `path:in`, `path:in[1]`, `path:in.name`, `path:out[1][0]` or `path:param.weight`.

    Raises SpecError when the part behind the colon is none of these.
    """
    if text.startswith("re:"):
        split = re.match(r"^(re:.*?)(:(?:in|out|param)(?:\[[^\[\]]+\]|\.[^.\[\]]+)*)?$", text)
        assert split is not None
        path, rest = split.group(1), split.group(2) or ""
        inner = parse_port("x" + rest)
        return Port(path, inner.side, inner.keys)
    found = ADDRESS.match(text)
    if found is None or ":" in found["path"]:
        raise SpecError(
            f"'{text}' is no address of a value: write 'path', 'path:in', 'path:in[1]', 'path:in.name', "
            "'path:out[1][0]' or 'path:param.weight'"
        )
    keys = tuple(
        int(index) if index.lstrip("-").isdigit() else (index or name) for index, name in KEY.findall(found["keys"] or "")
    )
    return Port(found["path"], found["side"] or "out", keys)


def identifier(text: str) -> str:
    """A module path or name as a Python identifier."""
    name = re.sub(r"\W", "_", text)
    return f"_{name}" if not name or name[0].isdigit() or keyword.iskeyword(name) else name


def is_pattern(text: str) -> bool:
    """Whether `text` can stand for more than one path."""
    return text.startswith("re:") or any(mark in text for mark in "*{?")


@lru_cache(maxsize=4096)
def compile_pattern(text: str) -> re.Pattern[str]:
    """A path pattern as a regular expression: exact, glob with `*` `**` `{i}`, or `re:`.

    `*` stays inside one dotted part, `**` crosses dots, `{name}` catches one part and gives it a name. Behind
    `re:` stands a Python regular expression that must match from the start of the path, as `re.match` does.
    Raises SpecError for an expression that does not compile.
    """
    if text.startswith("re:"):
        try:
            return re.compile(text[3:])
        except re.error as error:
            place = f" at position {error.pos}" if error.pos is not None else ""
            raise SpecError(f"'{text}' is not a regular expression: {error.msg}{place}") from None
    out = []
    seen: set[str] = set()
    for part in re.split(r"(\*\*\.|\*\*|\*|\?|\{\w+\})", text):
        if part == "**.":
            out.append(r"(?:.+\.)?")
        elif part == "**":
            out.append(r".*")
        elif part == "*":
            out.append(r"[^.]*")
        elif part == "?":
            out.append(r"[^.]")
        elif part.startswith("{") and part.endswith("}"):
            name = part[1:-1]
            out.append(rf"(?P={name})" if name in seen else rf"(?P<{name}>[^.]+)")
            seen.add(name)
        else:
            out.append(re.escape(part))
    return re.compile("".join(out) + r"\Z")


def select(pattern: str, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """The names that `pattern` matches, each with what its groups caught.

    Matching takes bounded time: an expression that backtracks without end raises SpecError.
    """
    regex = compile_pattern(pattern)
    risky = pattern.startswith("re:") and backtracks(pattern[3:])
    if risky:
        return _select_bounded(pattern, list(names))
    return {name: found.groupdict() for name in names if (found := regex.match(name))}


def backtracks(expression: str) -> bool:
    """Whether an expression has a repeat inside a repeat, or alternatives under one: the kinds that can explode."""
    from re import _parser  # type: ignore[attr-defined]

    repeats = {"MAX_REPEAT", "MIN_REPEAT"}

    def walk(item: object, inside: bool) -> bool:
        if isinstance(item, tuple) and len(item) == 2 and str(item[0]) in repeats:
            low, high, body = item[1]
            unbounded = high > 16
            return (unbounded and inside) or walk(body, inside or unbounded)
        if isinstance(item, tuple) and len(item) == 2 and str(item[0]) == "BRANCH" and inside:
            return True
        if isinstance(item, (list, tuple)) or type(item).__name__ == "SubPattern":
            return any(walk(child, inside) for child in item)  # type: ignore[attr-defined]
        return False

    return walk(_parser.parse(expression), False)


def _select_bounded(pattern: str, names: list[str]) -> dict[str, dict[str, str]]:
    # `re` cannot be interrupted from inside, so a suspicious expression runs in a process that can be
    program = (
        "import json, re, sys; p, names = json.load(sys.stdin); r = re.compile(p); "
        "json.dump({n: m.groupdict() for n in names if (m := r.match(n))}, sys.stdout)"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-S", "-c", program],
            input=json.dumps([pattern[3:], names]),
            capture_output=True,
            text=True,
            timeout=SLOW_PATTERN_SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise SpecError(
            f"'{pattern}' backtracks without end on these paths (stopped after {SLOW_PATTERN_SECONDS:g} s): "
            "it repeats something that is itself a repeat; write it without the inner one"
        ) from None
    return json.loads(done.stdout)  # type: ignore[no-any-return]
