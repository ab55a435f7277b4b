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

from .errors import MatchError, SpecError

SLOW_PATTERN_SECONDS = 2.0
EACH = "*"  # a key that stands for each member of a value
WHOLE = ":"  # a last key that stands for the whole value, with all its members


@dataclass(frozen=True)
class Port:
    """One value at the edge of a region.

    `side` is "in", "out" or "param"; `keys` walks into nested values: positions and names, outermost first. A last key
    `:` is the whole value with its members, a key `*` each of its members. The empty path is the model itself; `path@1`
    is the second call of the same module.
    """

    path: str
    side: str = "out"
    keys: tuple[int | str, ...] = ()

    def __str__(self) -> str:
        text = self.path
        if self.side != "out" or self.keys or not self.path:
            text += f":{self.side}"
        return text + "".join(f"[{key}]" if isinstance(key, int) or key in (EACH, WHOLE) else f".{key}" for key in self.keys)

    @property
    def whole(self) -> bool:
        """Whether this stands for a value with all its members."""
        return self.keys[-1:] == (WHOLE,)

    @property
    def each(self) -> bool:
        """Whether this stands for several values."""
        return EACH in self.keys


KEYS = r"(?:\[[^\[\]]+\]|\.[^.\[\]]+)*"
ADDRESS = re.compile(rf"^(?P<path>.*?)(?::(?P<side>in|out|param)(?P<keys>{KEYS}))?$")
KEY = re.compile(r"\[([^\[\]]+)\]|\.([^.\[\]]+)")
RELATIVE = re.compile(rf"^(?P<side>x|y)(?P<keys>{KEYS})$")
PARTS = re.compile(r"(\*\*\.|\*\*|\*|\?|\{[^{}]*\})")
HIDDEN = "slice__"  # the groups of slices without a name of their own
BRACES = re.compile(r"\{[^{}]*\}")
SLICE = re.compile(r"\{(?:(?P<name>[^\W\d]\w*)=)?(?P<slice>-?\d+|(?:-?\d+)?:(?:-?\d+)?(?::(?:-?\d+)?)?)\}")


def parse_port(text: str) -> Port:
    """Read `path`, `path:in`, `path:in[1]`, `path:in.name`, `path:out[1][0]` or `path:param.weight`.

    Raises SpecError when the part behind the colon is none of these.
    """
    if text.startswith("re:"):
        split = re.match(rf"^(re:.*?)(:(?:in|out|param){KEYS})?$", text)
        assert split is not None
        path, rest = split.group(1), split.group(2) or ""
        inner = parse_port("x" + rest)
        return Port(path, inner.side, inner.keys)
    found = ADDRESS.match(text)
    if found is None or ":" in BRACES.sub("", found["path"]):
        raise SpecError(
            f"'{text}' is no address of a value: write 'path', 'path:in', 'path:in[1]', 'path:in.name', "
            "'path:out[1][0]' or 'path:param.weight'"
        )
    return Port(found["path"], found["side"] or "out", _keys(found["keys"] or ""))


def parse_relative(text: str, path: str = "") -> Port | None:
    """Read `x`, `y`, `x[1]`, `y.sample`, `x[:]`: an argument or the result of the region at `path`; None for anything else."""
    found = RELATIVE.match(text)
    return Port(path, "in" if found["side"] == "x" else "out", _keys(found["keys"])) if found else None


def _keys(text: str) -> tuple[int | str, ...]:
    return tuple(int(index) if index.lstrip("-").isdigit() else (index or name) for index, name in KEY.findall(text))


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

    `*` stays inside one dotted part, `**` crosses dots, `{name}` catches one part and gives it a name, `{0:12}` and `{-1}`
    are a number (`select` holds it to the slice). Behind `re:` stands a Python regular expression that must match from
    the start of the path, as `re.match` does. Raises SpecError for an expression that does not compile.
    """
    if text.startswith("re:"):
        try:
            return re.compile(text[3:])
        except re.error as error:
            place = f" at position {error.pos}" if error.pos is not None else ""
            raise SpecError(f"'{text}' is not a regular expression: {error.msg}{place}") from None
    out = []
    seen: set[str] = set()
    for number, part in enumerate(PARTS.split(text)):
        if slice_ := SLICE.fullmatch(part):
            out.append(rf"(?P<{slice_['name'] or f'{HIDDEN}{number}'}>\d+)")
        elif part == "**.":
            out.append(r"(?:.+\.)?")
        elif part == "**":
            out.append(r".*")
        elif part == "*":
            out.append(r"[^.]*")
        elif part == "?":
            out.append(r"[^.]")
        elif part.startswith("{") and part.endswith("}"):
            name = part[1:-1]
            if not name.isidentifier():
                raise SpecError(
                    f"'{part}' in '{text}' catches nothing: write {{i}}, a position {{-1}}, a slice {{0:12}}, or {{i=0:12}}"
                )
            out.append(rf"(?P={name})" if name in seen else rf"(?P<{name}>[^.]+)")
            seen.add(name)
        else:
            out.append(re.escape(part))
    return re.compile("".join(out) + r"\Z")


def select(pattern: str, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """The names that `pattern` matches, each with what its groups caught.

    Matching takes bounded time: an expression that backtracks without end raises SpecError. A slice that ends beyond what
    there is raises MatchError.
    """
    regex = compile_pattern(pattern)
    risky = pattern.startswith("re:") and backtracks(pattern[3:])
    if risky:
        return _select_bounded(pattern, list(names))
    if not pattern.startswith("re:") and SLICE.search(pattern):
        return _select_sliced(pattern, regex, list(names))
    return {name: found.groupdict() for name in names if (found := regex.match(name))}


def _select_sliced(pattern: str, regex: re.Pattern[str], names: list[str]) -> dict[str, dict[str, str]]:
    slices = {}
    for number, part in enumerate(PARTS.split(pattern)):
        if found := SLICE.fullmatch(part):
            slices[found["name"] or f"{HIDDEN}{number}"] = (part, found["slice"])
    counts: dict[str, int] = {}  # how many numbers there are behind a prefix
    for name in names:
        parts = name.split(".")
        for at, part in enumerate(parts):
            if part.isdigit():
                prefix = ".".join(parts[:at])
                counts[prefix] = max(counts.get(prefix, 0), int(part) + 1)
    chosen = {}
    for name in names:
        match = regex.match(name)
        if match and all(
            int(match[group]) in _numbers(pattern, *text, name[: match.start(group)].rstrip("."), counts)
            for group, text in slices.items()
        ):
            chosen[name] = {k: v for k, v in match.groupdict().items() if not k.startswith(HIDDEN)}
    return chosen


def _numbers(pattern: str, part: str, text: str, prefix: str, counts: dict[str, int]) -> range:
    count = counts[prefix]
    if ":" not in text:
        number = int(text) + (count if int(text) < 0 else 0)
        return range(number, number + 1)
    start, stop, step = (int(n) if n else None for n in (*text.split(":"), "")[:3])
    if step == 0:
        raise SpecError(f"'{part}' in '{pattern}': the step of a slice cannot be 0")
    if stop is not None and stop > count:
        raise MatchError(f"'{part}' in '{pattern}' goes up to {stop}, but '{prefix}' has {count} (0 to {count - 1})")
    return range(count)[slice(start, stop, step)]


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
