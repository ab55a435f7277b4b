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

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from ...core.errors import SpecError, did_you_mean, shown

KINDS = ("inout", "in", "out")
ENDS = ("...", "…", "input", "output")  # steps that stand for modules nobody names
BESIDE = "a point must be directly before or after a module, as in '{in1}(fc2)' or '(fc2){out1}'"
NAME = re.compile(r"[^\W\d]\w*")
WORD = re.compile(r"\w+")
POINT = re.compile(r"\{\s*(\w*?)\s*(\d*)\s*\}")
INDEX = re.compile(r"(?P<number>-?\d+)|(?P<variable>[^\W\d]\w*)|(?P<slice>(?:-?\d+)?\s*:\s*(?:-?\d+)?\s*(?::\s*(?:-?\d+)?)?)")


@dataclass(frozen=True)
class Index:
    """What stands in square brackets and may be several numbers: `0:12`, `-1`, or a variable such as `i`."""

    text: str
    at: int = field(compare=False)

    @property
    def variable(self) -> bool:
        """Whether it is a variable."""
        return self.text.isidentifier()

    @property
    def count(self) -> int | None:
        """How many numbers it is, None where only the model tells."""
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
        """The indices among its parts, in their order."""
        return [part for part in self.parts if isinstance(part, Index)]

    def pattern(self, names: dict[int, str] | None = None) -> str:
        """The module's path as a glob: `blocks[0:12].attn` is `blocks.{0:12}.attn`; `names` names the slices by number."""
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
    """Read one line or several. Raises SpecError that points at the place, and says what was expected there."""
    if not isinstance(text, str):
        raise SpecError(f"a line must be text such as '(MLPAddin.adapt_input): ...->{{inout1}}(fc2)->...', not {shown(text)}")
    return list(_LineReader(text).lines())


def parse_path(text: str) -> str:
    """The path of modules such as `blocks[10:12].mlp` as a glob. Raises SpecError that points at the place."""
    reader = _LineReader(text)
    parts = reader.path()
    reader.skip()
    if reader.at < len(text):
        reader.fail(f"expected the end of the path, found {reader.next_token()}")
    return ModuleSide(parts).pattern()


def pointed(text: str, at: int) -> str:
    """The line of `text` that position `at` is on, and a caret under it."""
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


class _LineReader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def fail(self, finding: str, at: int | None = None) -> NoReturn:
        raise SpecError(finding + pointed(self.text, self.at if at is None else at))

    def skip(self) -> bool:
        """Pass over spaces, prompts and backticks; whether a line ended among them."""
        before = self.at
        while found := re.compile(r"\s+|>>>|`").match(self.text, self.at):
            self.at = found.end()
        return "\n" in self.text[before : self.at]

    def take(self, token: str) -> bool:
        self.skip()
        here = self.text.startswith(token, self.at)
        self.at += len(token) * here
        return here

    def expect(self, token: str, what: str) -> None:
        if not self.take(token):
            self.fail(f"expected '{token}' {what}, found {self.next_token()}")

    def next_token(self) -> str:
        word = WORD.match(self.text, self.at)
        return f"'{word[0] if word else self.text[self.at]}'" if self.at < len(self.text) else "the end of the line"

    def name(self, what: str) -> str:
        self.skip()
        found = NAME.match(self.text, self.at)
        if not found:
            self.fail(f"expected {what}, found {self.next_token()}")
        self.at = found.end()
        return found[0]

    def lines(self) -> Iterator[Line]:
        self.skip()
        while True:
            yield self.line()
            while self.take(","):
                pass
            self.skip()
            if self.at == len(self.text):
                return

    def line(self) -> Line:
        start = self.at
        self.expect("(", "and the add-in, as in '(MLPAddin.adapt_input): ...->{inout1}(fc2)->...'")
        addin = self.name("the class of the add-in")
        self.expect(".", f"and a method, as in '({addin}.adapt_input)'")
        method = self.name(f"a method of {addin}")
        self.expect(")", "after the method")
        self.expect(":", f"behind '({addin}.{method})'")
        points: list[_Point] = []
        named: list[ModuleSide] = []
        step = 0
        while True:
            self.step(step, points, named)
            step += 1
            before = self.at
            ended = self.skip()
            if self.take("->"):
                continue
            rest = self.text[self.at : self.at + 1]
            if not rest or rest == "," or (ended and rest == "("):
                break
            if rest == "(":
                self.fail("expected '->' between two modules, found '('")
            if rest == "{":
                self.fail(BESIDE)
            self.fail(f"expected '->' or the end of the line, found {self.next_token()}")
        text = self.text[start:before].strip(" \n\t`>,")
        try:
            insertions, notes = _paired(points)
        except _Misplaced as error:
            self.fail(str(error), error.at if error.at is not None else start)
        return Line(text, addin, method, insertions, tuple(named), notes)

    def step(self, step: int, points: list[_Point], named: list[ModuleSide]) -> None:
        """`...`, or a module with the points before and behind it."""
        self.skip()
        for end in ENDS:
            if self.take(end):
                return
        before = self.points()
        if not self.take("("):
            if before:
                self.fail(BESIDE, before[0][2])
            word = WORD.match(self.text, self.at)
            hint = f"; write a module in brackets: '({word[0]})'" if word else "; an arrow must point to a module, or to '...'"
            self.fail(f"expected '...' or a module such as '(fc2)', found {self.next_token()}{hint}")
        parts = self.path()
        self.expect(")", "after the module")
        behind = self.points()
        named.append(ModuleSide(parts, step=step, at=self.at))
        for side, found in (("in", before), ("out", behind)):
            points += [_Point(kind, number, ModuleSide(parts, side, step, at)) for kind, number, at in found]

    def points(self) -> list[tuple[str, str, int]]:
        points: list[tuple[str, str, int]] = []
        while True:
            self.skip()
            if not self.text.startswith("{", self.at):
                return points
            found = POINT.match(self.text, self.at)
            if not found:
                self.fail("a point must be '{inout1}', '{in1}' or '{out1}'")
            kind, number = found.groups()
            if kind not in KINDS:
                point = f"{{{kind}{number}}}"
                self.fail(
                    f"no point '{point}'{did_you_mean(kind, KINDS)}; a point must be '{{inout1}}', '{{in1}}' or '{{out1}}'"
                )
            if not number:
                self.fail(f"'{{{kind}}}' has no number: write '{{{kind}1}}'; an in and an out with one number belong together")
            points.append((kind, number, self.at))
            self.at = found.end()

    def path(self) -> tuple[str | Index, ...]:
        parts: list[str | Index] = [self.name("the name of a module, as print(model) shows it")]
        while True:
            if self.take("."):
                self.skip()
                word = WORD.match(self.text, self.at)
                if not word:
                    self.fail(f"expected a name after the dot, found {self.next_token()}")
                parts.append(word[0])
                self.at = word.end()
            elif self.take("["):
                self.skip()
                found = INDEX.match(self.text, self.at)
                # the longest of the three forms: `0:12` begins with a number
                longer = re.compile(INDEX.pattern.split("|")[-1]).match(self.text, self.at)
                found = longer if longer and (not found or longer.end() > found.end()) else found
                if not found or not found[0].strip():
                    self.fail(f"expected a number, a range such as 0:12, or a variable such as i, found {self.next_token()}")
                text = re.sub(r"\s+", "", found[0])
                if re.fullmatch(r"-?\d*:-?\d*:-?0+", text):
                    self.fail("the step of a range cannot be 0")
                parts.append(text if text.isdigit() else Index(text, self.at))
                if isinstance(parts[-1], Index) and parts[-1].count == 0:
                    self.fail(f"the range [{text}] is empty")
                self.at = found.end()
                self.expect("]", "after the index")
            else:
                return tuple(parts)


class _Misplaced(Exception):
    def __init__(self, finding: str, at: int | None = None) -> None:
        super().__init__(finding)
        self.at = at


def _paired(points: list[_Point]) -> tuple[tuple[Insertion, ...], tuple[str, ...]]:
    """The insertions of a line, those at one place first, as ZhiJian orders them."""
    if not points:
        raise _Misplaced("this line has no place for the add-in: mark one with '{inout1}' before or after a module")
    notes: tuple[str, ...] = ()
    seen: dict[str, _Point] = {}
    for point in points:
        if seen.setdefault(str(point), point) is not point:
            raise _Misplaced(f"'{point}' is there twice: each point of a line needs its own number", point.place.at)
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
            raise _Misplaced(_alone(point, "out", outs), point.place.at)
        _check_ends(point, partner)
        insertions.append(Insertion(partner.place, point.place))
    for point in outs:
        if all(p.number != point.number for p in ins):
            raise _Misplaced(_alone(point, "in", ins), point.place.at)
    ends: dict[ModuleSide, ModuleSide] = {}
    for insertion in insertions:
        end = insertion.end
        if ends.setdefault(end, end) is not end:
            raise _Misplaced(f"two points change {end}: make two passes, and the second gets the result of the first", end.at)
    return tuple(insertions), notes


def _alone(point: _Point, other: str, others: list[_Point]) -> str:
    near = f" (found '{others[0]}'; partners have the same number)" if others else ""
    what = "result goes" if other == "out" else "value is from"
    return (
        f"'{point}' has no '{{{other}{point.number}}}'{near}: mark where the add-in's {what} "
        f"by '{{{other}{point.number}}}', or write '{{inout{point.number}}}' where both are one place"
    )


def _check_ends(start: _Point, end: _Point) -> None:
    a, b = start.place, end.place
    if (b.step, b.side == "out") < (a.step, a.side == "out"):
        raise _Misplaced(f"'{end}' runs before '{start}', and a value can only flow to what runs later", b.at)
    if a.indices and not b.indices and any(i.count != 1 for i in a.indices):
        raise _Misplaced(f"'{start}' matches several modules and '{end}' one; the ends of a range are paired in order, so the "
                         "numbers must be equal", b.at)
    counts = [[i.count for i in place.indices] for place in (a, b)]
    if a.indices and b.indices and all(None not in c for c in counts):
        sizes = [_product(c) for c in counts]
        if sizes[0] != sizes[1] and not {i.text for i in a.indices} <= {i.text for i in b.indices}:
            raise _Misplaced(f"'{start}' matches {sizes[0]} modules and '{end}' {sizes[1]}; they are paired in order, so the "
                             "numbers must be equal", b.at)


def _product(counts: list[int | None]) -> int:
    size = 1
    for count in counts:
        size *= count or 1
    return size
