"""ZhiJian's one-line syntax: `(MLPAddin.adapt_input): ...->{inout1}(fc2)->...` read into places. Imports no torch.

    text   = line { ("," | new line) line }
    line   = "(" class "." method ")" ":" step { "->" step }
    step   = "..." | "input" | "output" | points "(" path ")" points
    points = { "{" ("inout" | "in" | "out") number "}" }
    path   = name { "." name | "[" (number | [number] ":" [number] [":" number] | variable) "]" }

Spaces mean nothing, and the prompt `>>>` and the stray backtick of ZhiJian's manual are passed over. The language is that
of `zhijian/models/addin/base.py` (LAMDA-ZhiJian, 2023), which has no errors but an empty NotImplementedError.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from ...core.errors import SpecError, did_you_mean, quote

KINDS = ("inout", "in", "out")
ENDS = ("...", "…", "input", "output")  # steps that stand for modules nobody names
BESIDE = "a point must be directly before or after a module, as in '{in1}(fc2)' or '(fc2){out1}'"
NAME = re.compile(r"[^\W\d]\w*")
WORD = re.compile(r"\w+")
POINT = re.compile(r"\{\s*(inout|in|out)\s*(\d+)\s*\}")
INDEX = re.compile(r"\[\s*(-?\d+|[^\W\d]\w*|(?:-?\d+)?\s*:\s*(?:-?\d+)?\s*(?::\s*(?:-?\d+)?)?)\s*\]")
SKIPPED = re.compile(r"(?:\s|>>>|`)*")
TOKEN = re.compile(r"->|\.\.\.|\{[^{}()\n]*\}?|\[[^\[\]()\n]*\]?|\w+|\S")


@dataclass(frozen=True)
class Index:
    """What stands in square brackets and may be several numbers: `0:12`, `-1`, or a variable such as `i`."""

    text: str
    at: int = field(compare=False)

    @property
    def variable(self) -> bool:
        """Return whether it is a variable."""
        return self.text.isidentifier()

    @property
    def count(self) -> int | None:
        """Number of values it stands for, None if that depends on the model."""
        if ":" not in self.text:
            return None if self.variable else 1
        start, stop, step = (int(n) if n else None for n in (*self.text.split(":"), "")[:3])
        if stop is None or stop < 0 or (start or 0) < 0 or (step or 1) < 1:
            return None
        return len(range(start or 0, stop, step or 1))


@dataclass(frozen=True)
class ModuleSide:
    """One side of a module: its input (`in`) or its output (`out`). `at` is where the point stands in the text."""

    parts: tuple[str | Index, ...]
    side: str = "in"
    step: int = 0
    at: int = field(default=0, compare=False)

    @property
    def indices(self) -> list[Index]:
        """Indices among its parts, in their order."""
        return [part for part in self.parts if isinstance(part, Index)]

    def pattern(self, names: dict[int, str] | None = None) -> str:
        """Return the module's path as a glob: `blocks[0:12].attn` is `blocks.{0:12}.attn`; `names` names the slices by
        number."""
        names, out, number = names or {}, [], 0
        for part in self.parts:
            if isinstance(part, str):
                out.append(part)
            else:
                slice_ = part.text if number not in names or part.variable else f"{names[number]}={part.text}"
                out.append(f"{{{slice_}}}")
                number += 1
        return ".".join(out)

    def __str__(self) -> str:
        text = "".join(f".{p}" if isinstance(p, str) else f"[{p.text}]" for p in self.parts).removeprefix(".")
        return f"the {self.side}put of '{text}'"


@dataclass(frozen=True)
class Insertion:
    """An add-in at `end`, whose value it changes; what is at `start` is its `inputs_cache`."""

    end: ModuleSide
    start: ModuleSide | None = None


@dataclass(frozen=True)
class Line:
    """One line: which method of which add-in is called where. `notes` says what was not written as it was read."""

    text: str
    addin: str
    method: str
    insertions: tuple[Insertion, ...]
    named: tuple[ModuleSide, ...]
    notes: tuple[str, ...] = ()


def parse(text: str) -> list[Line]:
    """Parse one line or several. Raises SpecError that points at the place, and says what was expected there."""
    if not isinstance(text, str):
        raise SpecError(f"a line must be text such as '(MLPAddin.adapt_input): ...->{{inout1}}(fc2)->...', not {quote(text)}")
    return list(_LineReader(text).lines())


def parse_path(text: str) -> str:
    """Parse the path of modules such as `blocks[10:12].mlp` as a glob. Raises SpecError that points at the place."""
    reader = _LineReader(text)
    parts = reader.path()
    if reader.token.text:
        reader.fail(f"expected the end of the path, found {reader.token}")
    return ModuleSide(parts).pattern()


def pointed(text: str, at: int) -> str:
    """Return the line of `text` that contains position `at`, and a caret under it."""
    start = text.rfind("\n", 0, at) + 1
    line = text[start:].split("\n")[0].replace("\t", " ")
    return f"\n  {line.rstrip()}\n  {' ' * (at - start)}^"


@dataclass(frozen=True)
class _Point:
    kind: str
    number: str
    place: ModuleSide

    def __str__(self) -> str:
        return f"{{{self.kind}{self.number}}}"


@dataclass(frozen=True)
class _Token:
    text: str  # "" at the end
    at: int
    new_line: bool  # whether a line ended before it

    def __str__(self) -> str:
        return f"'{self.text}'" if self.text else "the end of the line"


class _LineReader:
    def __init__(self, text: str) -> None:
        self.text, self.number = text, 0
        self.tokens: list[_Token] = []
        at = 0
        while not self.tokens or self.tokens[-1].text:
            start = SKIPPED.match(text, at).end()  # type: ignore[union-attr]
            found = TOKEN.match(text, start)
            self.tokens.append(_Token(found[0] if found else "", start, "\n" in text[at:start]))
            at = found.end() if found else start

    @property
    def token(self) -> _Token:
        """Next token."""
        return self.tokens[self.number]

    def fail(self, finding: str, at: int | None = None) -> NoReturn:
        raise SpecError(finding + pointed(self.text, self.token.at if at is None else at))

    def take(self, *texts: str) -> bool:
        here = self.token.text in texts
        self.number += here
        return here

    def expect(self, text: str, what: str) -> None:
        if not self.take(text):
            self.fail(f"expected '{text}' {what}, found {self.token}")

    def word(self, form: re.Pattern[str], what: str) -> str:
        token = self.token
        if not form.fullmatch(token.text):
            self.fail(f"expected {what}, found {token}")
        self.number += 1
        return token.text

    def lines(self) -> Iterator[Line]:
        while True:
            yield self.line()
            while self.take(","):
                pass
            if not self.token.text:
                return

    def line(self) -> Line:
        start = self.token.at
        self.expect("(", "and the add-in, as in '(MLPAddin.adapt_input): ...->{inout1}(fc2)->...'")
        addin = self.word(NAME, "the class of the add-in")
        self.expect(".", f"and a method, as in '({addin}.adapt_input)'")
        method = self.word(NAME, f"a method of {addin}")
        self.expect(")", "after the method")
        self.expect(":", f"after '({addin}.{method})'")
        points: list[_Point] = []
        named: list[ModuleSide] = []
        for step in itertools.count():
            self.step(step, points, named)
            token = self.token
            if self.take("->"):
                continue
            if token.text in ("", ",") or (token.text == "(" and token.new_line):
                break
            self.fail(BESIDE if token.text.startswith("{") else f"expected '->' or the end of the line, found {token}")
        last = self.tokens[self.number - 1]
        insertions, notes = self.paired(points, start)
        return Line(self.text[start : last.at + len(last.text)], addin, method, insertions, tuple(named), notes)

    def step(self, step: int, points: list[_Point], named: list[ModuleSide]) -> None:
        """Parse `...`, or a module with the points before and after it."""
        if self.take(*ENDS):
            return
        before = self.points()
        if not self.take("("):
            if before:
                self.fail(BESIDE, before[0][2])
            self.fail(f"expected '...' or a module in brackets such as '(fc2)', found {self.token}")
        parts = self.path()
        self.expect(")", "after the module")
        behind = self.points()
        named.append(ModuleSide(parts, step=step, at=self.token.at))
        for side, found in (("in", before), ("out", behind)):
            points += [_Point(kind, number, ModuleSide(parts, side, step, at)) for kind, number, at in found]

    def points(self) -> list[tuple[str, str, int]]:
        points: list[tuple[str, str, int]] = []
        while (token := self.token).text.startswith("{"):
            found = POINT.fullmatch(token.text)
            if not found:
                hint = did_you_mean("".join(filter(str.isalpha, token.text)), KINDS)
                self.fail(f"a point must be '{{inout1}}', '{{in1}}' or '{{out1}}', not {token}{hint}")
            points.append((found[1], found[2], token.at))
            self.number += 1
        return points

    def path(self) -> tuple[str | Index, ...]:
        parts: list[str | Index] = [self.word(NAME, "the name of a module, as print(model) shows it")]
        while True:
            if self.take("."):
                parts.append(self.word(WORD, "a name after the dot"))
            elif self.token.text.startswith("["):
                parts.append(self.index())
            else:
                return tuple(parts)

    def index(self) -> str | Index:
        token, at = self.token, self.token.at + 1
        found = INDEX.fullmatch(token.text)
        if not found:
            self.fail(f"expected a number, a range such as [0:12], or a variable such as [i], found {token}", at)
        text = re.sub(r"\s+", "", found[1])
        if re.fullmatch(r"-?\d*:-?\d*:-?0+", text):
            self.fail("the step of a range cannot be 0", at)
        index = Index(text, at)
        if index.count == 0:
            self.fail(f"the range [{text}] is empty", at)
        self.number += 1
        return text if text.isdigit() else index

    def paired(self, points: list[_Point], start: int) -> tuple[tuple[Insertion, ...], tuple[str, ...]]:
        """Return the insertions of a line, those at one place first, as ZhiJian orders them."""
        if not points:
            self.fail("this line has no place for the add-in: mark one with '{inout1}' before or after a module", start)
        notes: tuple[str, ...] = ()
        seen: dict[str, _Point] = {}
        for point in points:
            if seen.setdefault(str(point), point) is not point:
                self.fail(f"'{point}' is there twice: each point of a line needs its own number", point.place.at)
        ins = [p for p in points if p.kind == "in"]
        outs = [p for p in points if p.kind == "out"]
        if len(ins) == 2 and not outs:
            # ZhiJian's manual writes {in2} for {out1}; its notebook and its code have {out1} at these places
            ins, second = ins[:1], ins[1]
            outs = [_Point("out", ins[0].number, second.place)]
            notes = (
                f"'{{in{second.number}}}' is read as '{outs[0]}': the line has no out point, and what the add-in makes of the "
                f"value at '{ins[0]}' must go somewhere; write '{outs[0]}'",
            )
        insertions = [Insertion(p.place) for p in points if p.kind == "inout"]
        for point in ins:
            partner = next((p for p in outs if p.number == point.number), None)
            if partner is None:
                self.fail(_missing_partner(point, "out"), point.place.at)
            self.check_ends(point, partner)
            insertions.append(Insertion(partner.place, point.place))
        for point in outs:
            if all(p.number != point.number for p in ins):
                self.fail(_missing_partner(point, "in"), point.place.at)
        ends: dict[ModuleSide, ModuleSide] = {}
        for insertion in insertions:
            end = insertion.end
            if ends.setdefault(end, end) is not end:
                self.fail(f"two points change {end}: make two passes, and the second gets the result of the first", end.at)
        return tuple(insertions), notes

    def check_ends(self, start: _Point, end: _Point) -> None:
        a, b = start.place, end.place
        if (b.step, b.side == "out") < (a.step, a.side == "out"):
            self.fail(f"'{end}' runs before '{start}', and a value can only flow to what runs later", b.at)
        if a.indices and not b.indices and any(i.count != 1 for i in a.indices):
            self.fail(f"'{start}' matches several modules and '{end}' one; the ends of a range are paired in order, so the "
                      "numbers must be equal", b.at)
        counts = [[i.count for i in place.indices] for place in (a, b)]
        if a.indices and b.indices and all(None not in c for c in counts):
            sizes = [math.prod(n or 1 for n in c) for c in counts]
            if sizes[0] != sizes[1] and not {i.text for i in a.indices} <= {i.text for i in b.indices}:
                self.fail(f"'{start}' matches {sizes[0]} modules and '{end}' {sizes[1]}; they are paired in order, so the "
                          "numbers must be equal", b.at)


def _missing_partner(point: _Point, other: str) -> str:
    partner = f"{{{other}{point.number}}}"
    return f"'{point}' has no '{partner}', and they belong together; write '{{inout{point.number}}}' where both are one place"
