"""Names of places in a model: module paths, patterns over them, and ports at their edges."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from ..errors import DEFAULT, Limits, MatchError, SpecError, quote
from ..reading import Raises

EACH = "*"  # a key that stands for each member of a value
WHOLE = ":"  # a last key that stands for the whole value, with all its members
NAMED = "**"  # the one key that stands for the arguments that a region is given by name
MARKS = (EACH, WHOLE, NAMED)


@dataclass(frozen=True)
class Port:
    """One value at the edge of a region.

    `side` is "in", "out" or "param"; `keys` walks into nested values: positions and names, outermost first. A last key
    `:` is the whole value with its members, a key `*` each of its members; the one key `**` is all that is given by name.
    The empty path is the model itself; `path@1` is the second call of the same module.
    """

    path: str
    side: str = "out"
    keys: tuple[int | str, ...] = ()

    def __str__(self) -> str:
        text = self.path
        if self.side != "out" or self.keys or not self.path:
            text += f":{self.side}"
        return text + "".join(f"[{key}]" if isinstance(key, int) or key in MARKS else f".{key}" for key in self.keys)

    @property
    def with_members(self) -> bool:
        """Return whether this is a value with all its members."""
        return self.keys[-1:] == (WHOLE,) or self.keys == (NAMED,)

    @property
    def each(self) -> bool:
        """Return whether this stands for several values."""
        return EACH in self.keys


KEYS = r"(?:\[[^\[\]]+\]|\.[^.\[\]]+)*"
ADDRESS = re.compile(rf"^(?P<path>.*?)(?::(?P<side>in|out|param)(?P<keys>{KEYS}))?$")
KEY = re.compile(r"\[([^\[\]]+)\]|\.([^.\[\]]+)")
RELATIVE = re.compile(rf"^(?P<side>x|y)(?P<keys>{KEYS})$")
PARTS = re.compile(r"((?:\*\*\.)+|\*\*+|\*|\?|\{[^{}]*\})")
HIDDEN = "slice__"  # the groups of slices without a name of their own
BRACES = re.compile(r"\{[^{}]*\}")
NAMES = re.compile(r"(\{[^{},]*,[^{}]*\})")  # several names in braces
MOST = 1000  # so many names may one pattern with braces stand for
WILD = {"**.": r"(?:.+\.)?", "**": r".*", "*": r"[^.]*", "?": r"[^.]"}
SLICE = re.compile(r"\{(?:(?P<name>[^\W\d]\w*)=)?(?P<slice>-?\d+|(?:-?\d+)?:(?:-?\d+)?(?::(?:-?\d+)?)?)\}")


def parse_port(text: str) -> Port:
    """Parse `path`, `path:in`, `path:in[1]`, `path:in.name`, `path:out[1][0]` or `path:param.weight`.

    Raises SpecError if the part after the colon is none of these.
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
            f"'{text}' is not an address of a value: write 'path', 'path:in', 'path:in[1]', 'path:in.name', 'path:out[1][0]' "
            "or 'path:param.weight'"
        )
    return Port(found["path"], found["side"] or "out", _keys(found["keys"] or ""))


def parse_relative(text: str, path: str = "") -> Port | None:
    """Parse `x`, `y`, `x[1]`, `y.sample`, `x[:]`: an argument or the result of the region at `path`; None for anything else."""
    found = RELATIVE.match(text)
    return Port(path, "in" if found["side"] == "x" else "out", _keys(found["keys"])) if found else None


def _keys(text: str) -> tuple[int | str, ...]:
    return tuple(int(index) if index.lstrip("-").isdigit() else (index or name) for index, name in KEY.findall(text))


def make_identifier(text: str) -> str:
    """Return a module path or name as a Python identifier."""
    name = re.sub(r"\W", "_", text)
    return f"_{name}" if not name or name[0].isdigit() or keyword.iskeyword(name) else name


def is_pattern(text: str) -> bool:
    """Return whether `text` can match more than one path."""
    return text.startswith("re:") or any(mark in text for mark in "*{?")


def is_bare(text: str) -> bool:
    """Return whether `text` is a path, or the end of one, without wildcards: `head`, `attn.to_q`, `attn.{to_q,to_k}`."""
    return bool(text) and not is_pattern(text if "*" in text or "?" in text else NAMES.sub("", text))


def expand_braces(text: str) -> list[str]:
    """Expand a pattern whose braces contain several names: `a.{b,c}` is `a.b` and `a.c`.

    Raises SpecError for more than `MOST`.
    """
    if text.startswith("re:"):
        return [text]
    parts = [_names(part, text) if index % 2 else [part] for index, part in enumerate(NAMES.split(text))]
    count = 1
    for part in parts:
        count *= len(part)
        if count > MOST:
            raise SpecError(f"{quote(text)} expands to more than {MOST} patterns: write `*` for some of its braces")
    return list(dict.fromkeys(map("".join, product(*parts))))


def expand_names(text: str) -> dict[str, str]:
    """Return each of the names in the braces of a pattern, with the pattern that has only this one."""
    parts = [] if text.startswith("re:") else NAMES.split(text)
    found: dict[str, str] = {}
    for index in range(1, len(parts), 2):
        found.update({name: "".join([*parts[:index], name, *parts[index + 1 :]]) for name in _names(parts[index], text)})
    return found


def _wild(part: str) -> str:
    """Return a part without braces as an expression; `**.**.` is no more than `**.`, and would be tried in as many ways."""
    part = "**." if part.startswith("**.") else "**" if part.startswith("**") else part
    return WILD.get(part) or re.escape(part)


def _names(part: str, text: str) -> list[str]:
    names = [name.strip() for name in part[1:-1].split(",")]
    if (odd := next((name for name in names if ":" in name or "=" in name), None)) is not None:
        raise SpecError(
            f"'{odd}' in {quote(text)}: a slice must be alone in its braces, {{0:12}}; a list of names is {{qkv,proj}}"
        )
    return names


@lru_cache(maxsize=4096)
def compile_pattern(text: str) -> re.Pattern[str]:
    """Compile a path pattern to a regular expression: exact, glob with `*` `**` `{i}` `{qkv,proj}`, or `re:`.

    `*` stays inside one dotted part, `**` crosses dots, `{name}` captures one part under a name, `{qkv,proj}` is one of these,
    `{0:12}` and `{-1}` are a number (`select` checks the slice). After `re:` follows a Python regular expression that must
    match from the start of the path, as `re.match` does. Raises SpecError for an expression that does not compile.
    """
    if text.startswith("re:"):
        return compile_expression(text[3:], lambda finding: SpecError(f"{quote(text)} {finding}"))
    out = []
    seen: set[str] = set()
    for number, part in enumerate(PARTS.split(text)):
        if slice_ := SLICE.fullmatch(part):
            out.append(rf"(?P<{slice_['name'] or f'{HIDDEN}{number}'}>\d+)")
        elif part.startswith("{") and "," in part:
            ways = ("".join(_wild(piece) for piece in PARTS.split(name)) for name in _names(part, text))
            out.append(f"(?:{'|'.join(ways)})")
        elif part.startswith("{") and part.endswith("}"):
            name = part[1:-1]
            if not name.isidentifier():
                raise SpecError(
                    f"'{part}' in '{text}' is not a placeholder: write {{i}}, names {{qkv,proj}}, a position {{-1}}, a slice "
                    f"{{0:12}}, or {{i=0:12}}"
                )
            out.append(rf"(?P={name})" if name in seen else rf"(?P<{name}>[^.]+)")
            seen.add(name)
        elif "{" in part or "}" in part:
            found = "has braces that are not closed, or are nested: write a list with one pattern for each alternative"
            raise SpecError(f"{quote(text)} {found}")
        else:
            out.append(_wild(part))
    return re.compile("".join(out) + r"\Z")


def choose_names(pattern: str, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the matches of `select`; for a bare name that is none of the names, those that end with it after a dot, as in
    PEFT.

    So `head` is the model's own child of that name if there is one, and `to_q` every `...to_q` if there is none.
    """
    if not is_bare(pattern):
        return select(pattern, names)
    known = dict.fromkeys(names)
    found: dict[str, dict[str, str]] = {}
    for one in expand_braces(pattern):
        found.update({one: {}} if one in known else {name: {} for name in known if one and name.endswith(f".{one}")})
    return found


def select(pattern: str, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the names that `pattern` matches, each with its captured groups. Raises MatchError for a slice beyond the existing
    numbers."""
    regex = compile_pattern(pattern)
    if not pattern.startswith("re:") and SLICE.search(pattern):
        return _select_sliced(pattern, regex, list(names))
    return {name: match.groupdict() for name in names if (match := regex.match(name))}


def is_covered(pattern: str, path: str) -> bool:
    """Return whether a pattern matches a path or one above it: `blocks.0` covers all that is in that block."""
    regex, parts = compile_pattern(pattern), path.split(".")
    return any(regex.match(".".join(parts[:count])) for count in range(1, len(parts) + 1))


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


BACKTRACKS = 500_000_000  # so many ways to split its names may a stranger's patterns have
PLAIN = re.compile(r"[\w-]+(?:\.[\w-]+){0,63}")


def compile_expression(text: str, raises: Raises) -> re.Pattern[str]:
    """Compile a regular expression. Raises what `raises` makes for an invalid one."""
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        at = getattr(error, "pos", None)
        place = "" if at is None else f" at position {at}\n  {text}\n  {' ' * at}^"
        raise raises(f"is not a regular expression: {getattr(error, 'msg', error)}{place}") from None


def _count_backtracks(expression: str, length: int) -> float:
    """Return in how many ways a regular expression may split a name of so many characters, at most; infinity if it repeats a
    group, takes long to compile, or has a comment or a flag that changes the meaning of spaces or letters."""
    if re.search(r"\)[*+{]|\(\?#|\(\?[a-zA-Z]*[ix]", expression):
        return math.inf
    repeats, choices = len(re.findall(r"[*+{]", expression)), len(re.findall(r"[?|]", expression))
    return math.inf if repeats + choices > 64 else float(math.comb(length + repeats, repeats) * 2**choices)


def match_endings(
    tables: Sequence[Mapping[str, Any]], names: Sequence[str], raises: Raises, limits: Limits = DEFAULT
) -> list[dict[str, Any]]:
    """Return each table's value for each name: that of its first pattern that is the name or its end after a dot, as PEFT reads
    `alpha_pattern`. A pattern is a regular expression from a stranger's file.

    Raises what `raises` makes for one that is invalid, is longer than `limits.text`, or may be tried in too many ways.
    """
    longest = max((len(pattern) for table in tables for pattern in table), default=0)
    if longest > limits.text:
        raise raises(f"has a pattern of {longest} characters; the limit is {limits.text}; fxplug.Limits can raise it")
    hard = [pattern for table in tables for pattern in table if not PLAIN.fullmatch(pattern)]
    length = max(map(len, names), default=0)
    tried: float = len(names)
    for pattern in hard:
        tried += len(names) * _count_backtracks(pattern, length)
        if tried > BACKTRACKS:
            raise raises(
                f"has the pattern {quote(pattern)}, which may split {len(names)} names in more than {BACKTRACKS} ways: name "
                "the layers, or repeat no group and fewer characters, without flags and comments"
            )

    def compiled(pattern: str) -> re.Pattern[str]:
        return compile_expression(pattern, lambda finding: raises(f"the pattern {quote(pattern)} {finding}"))

    regexes = {pattern: compiled(pattern) for pattern in hard}
    made: list[dict[str, Any]] = []
    for table in tables:
        order = {pattern: index for index, pattern in enumerate(table)}
        values, expressions = list(table.values()), [pattern for pattern in table if pattern in regexes]
        found = {}
        for name in names:
            starts = [0, *(at + 1 for at, letter in enumerate(name) if letter == ".")][-64:]
            hits = [order[name[at:]] for at in starts if name[at:] in order]
            hits += [order[one] for one in expressions if any(regexes[one].fullmatch(name, at) for at in starts)][:1]
            if hits:
                found[name] = values[min(hits)]
        made.append(found)
    return made
