"""The exceptions a user can meet, the nearest-name hint that their messages share, and values in few words."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from difflib import get_close_matches
from heapq import nlargest
from itertools import islice
from typing import Any

LONGEST = 1_800  # characters of a message, and of what an object of ours is as text
NAME, CLOSE = 160, 64  # characters of a name, and names, that are compared closely to find the nearest


class FxplugError(Exception):
    """What was given is wrong. A mistake inside fxplug is never one of these.

    Its text can be printed: control characters, which a stranger's file may bring, are written out as `\\x1b`.
    """

    def __str__(self) -> str:  # and no __init__, in which torch.compile cannot follow where a guard raises one
        return make_printable(super().__str__())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({quote(str(self), LONGEST)})"


class SpecError(FxplugError):
    """A pass or configuration that cannot be used: a wrong key, type, value, name or file.

    The text is `where: path: finding`; `path` is the way through the data (`rules[0].match`), `key` the
    key below it that is at fault. All but `where` stay readable, so that a caller who knows the file and
    line can say it again; `located` tells whether one did.
    """

    def __init__(
        self, finding: str, *, path: Sequence[str | int] = (), key: str | None = None, where: object = ""
    ) -> None:
        super().__init__(": ".join(part for part in (str(where), format_path(path), finding) if part))
        self.finding = finding
        self.path = tuple(path)
        self.key = key
        self.where = str(where)
        self.located = bool(self.where)


@contextmanager
def prefix_path(*path: str | int) -> Iterator[None]:
    """Prefix the paths of SpecErrors with `path`; one with a place in another file keeps that in its text."""
    try:
        yield
    except SpecError as error:
        if error.located:
            raise SpecError(str(error), path=path) from error.__cause__
        raise SpecError(error.finding, path=(*path, *error.path), key=error.key) from error.__cause__


class TraceError(FxplugError):
    """A model that cannot be traced as it is."""


class GuardError(FxplugError):
    """A call that the traced graph does not hold for: Python would have taken another branch."""


class MatchError(FxplugError):
    """A rule found no place, or not as many as it expects."""


class ClashError(FxplugError):
    """Two rules want the same place, or a pass is applied a second time."""


class VerifyError(FxplugError):
    """A rewritten graph breaks a promise, such as being neutral when new."""


class TrainError(FxplugError):
    """A training run cannot start or go on."""


class ArtifactError(FxplugError):
    """A saved rewrite or adapter file that cannot be read, or does not fit."""


def make_printable(text: str) -> str:
    """Escape what controls a terminal in `text`, and cut it in the middle if it is very long."""
    return _short(escape(_short(text)))


def escape(text: str) -> str:
    """Escape what controls a terminal in `text`, except line ends."""
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _short(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    half = (LONGEST - 40) // 2
    return f"{text[:half]} ... {len(text) - 2 * half} characters ... {text[-half:]}"


class _Brief(reprlib.Repr):
    """Values in few words: of a tensor its shape, of a module its class, of a collection the first members."""

    def repr_int(self, x: int, level: int) -> str:
        return f"a number of about {x.bit_length() * 3 // 10} digits" if x.bit_length() > 256 else repr(x)

    def repr_instance(self, x: Any, level: int) -> str:
        kind = type(x)
        if hasattr(kind, "shape") and hasattr(kind, "dtype"):
            return f"{kind.__name__} {list(x.shape)} {x.dtype}"
        if hasattr(kind, "named_modules"):
            return f"{kind.__name__}(...)"
        for base in (dict, list, tuple, set, frozenset, str, int):
            if isinstance(x, base):
                return str(getattr(self, f"repr_{base.__name__}")(x, level))
        return self.repr_dict(dict(x), level) if isinstance(x, Mapping) else super().repr_instance(x, level)


_brief = _Brief()
_brief.maxdict = _brief.maxlist = _brief.maxtuple = _brief.maxset = _brief.maxfrozenset = 6
_brief.maxlevel, _brief.maxstring, _brief.maxother = 3, 120, 120


def format_brief(value: object, length: int = 200) -> str:
    """Format a value for a message or a `repr`: in few words, printable, at most `length` characters."""
    try:
        return cut(make_printable(_brief.repr(value)), length)
    except Exception:  # whatever a stranger's `shape` or members raise
        return f"a {type(value).__name__}"


def format_fields(self: Any) -> str:
    """Return the `__repr__` of a dataclass whose fields may hold tensors, modules and long lists: each in few words."""
    shown_ = (f"{f.name}={format_brief(getattr(self, f.name, None), 160)}" for f in fields(self) if f.repr)
    return cut(f"{type(self).__name__}({', '.join(shown_)})", LONGEST)


def quote(value: object, length: int = 80) -> str:
    """Quote a value from a file for a message: printable and at most `length` characters."""
    if isinstance(value, (str, bytes)):
        return cut(make_printable(repr(value[:length])), length)
    return format_brief(value, length)


def get_first_line(error: BaseException) -> str:
    """Return an error's text in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def cut(text: str, length: int) -> str:
    """Cut a text to at most so many characters, with `...` for its omitted end."""
    return text if len(text) <= length else text[: length - 3] + "..."


def shorten(text: str, length: int) -> str:
    """Cut `text` in the middle to at most `length` characters."""
    half = (length - 5) // 2
    return text if len(text) <= length else f"{text[:half]} ... {text[-half:]}"


def cut_lines(text: str) -> str:
    """Cut a text to at most `LONGEST` characters by leaving out lines in its middle."""
    if len(text) <= LONGEST:
        return text
    lines = [cut(line, LONGEST // 6) for line in text.splitlines()]
    head, size = 0, 0
    while head < len(lines) - 3 and size + len(lines[head]) < LONGEST // 3:
        size += len(lines[head]) + 1
        head += 1
    return cut("\n".join([*lines[:head], f"... {len(lines) - head - 3} more lines", *lines[-3:]]), LONGEST)


def did_you_mean(word: object, known: Iterable[object]) -> str:
    """Return ` (did you mean 'x'?)` for the name in `known` nearest to `word`, or ""."""
    near = find_nearest(quote(word, 200) if isinstance(word, int) else str(word), known)
    return f" (did you mean '{near}'?)" if near else ""


def find_suggestion(text: str) -> str:
    """Return the name that `did_you_mean`, or the command line's parser, put into a message, or ""."""
    found = re.search(r"[Dd]id you mean '(.*?)'\?", text)
    return found[1] if found else ""


def find_nearest(word: str, known: Iterable[object]) -> str:
    """Return the name in `known` that is most like `word`, or "". Takes bounded time, whatever the names are. Takes bounded
    time, whatever the names are.

    Of many names only those that share the most pairs of letters with it are compared closely.
    """
    lower = word[:NAME].lower()
    names = {text[:NAME].lower(): text for text in map(str, islice(known, 20_000))}
    if len(names) > CLOSE:
        pairs = {*zip(lower, lower[1:], strict=False)}
        shared = {name: len(pairs.intersection(zip(name, name[1:], strict=False))) for name in names}
        names = {name: names[name] for name in nlargest(CLOSE, names, shared.__getitem__)}
    near = get_close_matches(lower, names, n=1) if len(word) <= 4 * NAME else []
    return names[near[0]] if near else ""


def format_path(path: Sequence[str | int]) -> str:
    """Format `("rules", 0, "match")` as `rules[0].match`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


@dataclass(frozen=True)
class Limits:
    """How much a reader takes before it refuses a file: `load(folder, limits=Limits(nodes=500_000))`.

    Sizes are bytes. A file within them is read in time and memory that its size bounds, but for what torch, onnx and zipfile
    read: `.pt`, `.ckpt`, ONNX and the archive of a package.
    """

    json: int = 64 << 20  # of one JSON file or header
    yaml: int = 1 << 19  # of one YAML file
    entries: int = 10_000  # values of one YAML file, aliases followed
    lines: int = 1 << 30  # of one metadata.jsonl
    caption: int = 1 << 20  # of one caption beside an image
    samples: int = 50_000_000  # of one epoch, repeats counted
    values: int = 2_000_000  # objects, lists and members of one JSON file
    depth: int = 64  # how deep values, modules or archives nest
    nodes: int = 65_536  # of one graph
    modules: int = 65_536  # of one graph
    variants: int = 256  # further graphs of one model, for other forms of call
    tensors: int = 131_072  # of one safetensors file
    digits: int = 4_300  # of one number, as Python's own limit
    update: float = 1e6  # of the most that an adapter changes one weight
    text: int = 4_096  # characters of one name or pattern
    string: int = 65_536  # characters of one text among the values of a graph
    members: int = 65_536  # of one range
    size: int = 1 << 32  # of one whole number among the arguments of a constructor
    conditions: int = 131_072  # characters of all conditions on sizes of one package


DEFAULT = Limits()
