"""What repeats in a list of paths or in a diff, said once.

A model has its blocks many times, and a pass does the same to each. Paths that differ in a part become one pattern of the
pass language (`blocks.{0:28}.attn.{to_q,to_k}`), which can be given to `at:` as it stands; places of a diff that differ in the
numbers of their names become one, with what the numbers were. Nothing is lost: what is folded can be written out again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from ..spec.addresses import identifier

LETTERS = "ijklmnpqrstuvw"
LISTED = 6  # so many patterns of numbers are told of a folded place
_ODD = re.compile(r"[{}*?,=\[\]]")  # means something in a pattern
_IN_NAME = re.compile(r"(?<![\w.])[A-Za-z_][\w.]*")
_INDEX = re.compile(r"(?<=[._])\d+(?![^\W_])")  # a number that is a part of a name
_HEAD = re.compile(r"^@@ .* @@$", re.MULTILINE)


@dataclass(frozen=True)
class Pattern:
    """What stands for several paths: its text, the first of the paths, and how many they are."""

    text: str
    first: str
    count: int


def patterns(paths: Sequence[str]) -> list[Pattern]:
    """Few patterns that stand for these paths and no others, in the order of the first of each.

    Parts that are numbers come together first, `{0:4}` for a run of them and `{0,2}` for others, then those that are names.
    """
    parts: list[tuple[tuple[str, ...], ...]] = [tuple((part,) for part in path.split(".")) for path in dict.fromkeys(paths)]
    for numbers in (True, False):
        for place in range(max(map(len, parts), default=0) - 1, -1, -1):
            found: dict[object, list[str]] = {}
            kept: dict[object, tuple[tuple[str, ...], ...]] = {}
            for row in parts:
                fits = place < len(row) and all(part.isdecimal() is numbers and not _ODD.search(part) for part in row[place])
                key = (row[:place], row[place + 1 :]) if fits else row
                kept.setdefault(key, row)
                found.setdefault(key, []).extend(row[place] if fits else ())
            parts = [(*row[:place], tuple(found[key]), *row[place + 1 :]) if found[key] else row for key, row in kept.items()]
    return [Pattern(".".join(map(_part, row)), ".".join(names[0] for names in row), prod(map(len, row))) for row in parts]


def _part(names: tuple[str, ...]) -> str:
    """One part of a pattern."""
    if len(names) == 1:
        return names[0]
    if all(name.isdecimal() for name in names):
        found = sorted(map(int, names))
        if len(found) > 2 and all(b == a + 1 for a, b in pairwise(found)):
            return f"{{{found[0]}:{found[-1] + 1}}}"
        return f"{{{','.join(map(str, found))}}}"
    return f"{{{','.join(names)}}}"


def folded(diff: str) -> str:
    """A diff of `fxplug.diff` with each place that is there several times shown once.

    Places are alike whose lines differ in numbers that are parts of names and in nothing else. Such numbers are letters in what
    is shown, one letter for all that are equal in each place, and the head says what the letters are together.
    """
    places: dict[str, list[tuple[str, list[str]]]] = {}
    for head, body in _places(diff.replace("\0", "\\0")):
        numbers: list[str] = []
        key = _masked(body, numbers)
        places.setdefault(key, []).append((head, numbers))
    rows = []
    for key, alike in places.items():
        if len(alike) == 1:
            rows.append(alike[0][0] + _filled(key, alike[0][1]))
            continue
        columns = list(zip(*(numbers for _, numbers in alike), strict=True))
        kinds = list(dict.fromkeys(column for column in columns if len({*column}) > 1))
        if len(kinds) > len(LETTERS):
            rows += [head + _filled(key, numbers) for head, numbers in alike]
            continue
        letters = dict(zip(kinds, LETTERS, strict=False))
        shown = [f"{{{letters[column]}}}" if column in letters else column[0] for column in columns]
        rows.append(f"@@ x{len(alike)}{_told(letters)} @@{_filled(key, shown)}")
    return "\n".join(rows) + "\n" if rows else ""


def _told(letters: dict[tuple[str, ...], str]) -> str:
    """What the letters are in the places that are alike."""
    if not letters:
        return ""
    found = [pattern.text for pattern in patterns([".".join(numbers) for numbers in zip(*letters, strict=True)])]
    more = [f"... {len(found) - LISTED} more"] if len(found) > LISTED else []
    return f": {'.'.join(letters.values())} = {', '.join([*found[:LISTED], *more])}"


def _places(diff: str) -> list[tuple[str, str]]:
    """The places of a diff: head, and the lines with a line end before each."""
    heads = list(_HEAD.finditer(diff))
    ends = [*(head.start() for head in heads), len(diff)][1:]
    return [(head[0], diff[head.end() : end].rstrip("\n")) for head, end in zip(heads, ends, strict=True)]


def _masked(text: str, numbers: list[str]) -> str:
    """A text with each number that is a part of a name taken out; they are added to `numbers`."""

    def without(name: re.Match[str]) -> str:
        numbers.extend(_INDEX.findall(name[0]))
        return _INDEX.sub("\0", name[0])

    return _IN_NAME.sub(without, text)


def _filled(key: str, numbers: Sequence[str]) -> str:
    """The text of `_masked` with its numbers, or what stands for them."""
    first, *rest = key.split("\0")
    return first + "".join(f"{number}{text}" for number, text in zip(numbers, rest, strict=True))


def counted(diff: str, passes: Sequence[str]) -> str:
    """What a diff holds, in one line: how many lines each pass put in, how many read others now, how many are gone."""
    names: dict[str, list[str]] = {"+": [], "-": []}
    for _, body in _places(diff):
        for line in body.split("\n")[1:]:
            if line[:1] in names:
                names[line[0]].append(line[1:].partition(" = ")[0])
    put, gone = Counter(names["+"]) - Counter(names["-"]), Counter(names["-"]) - Counter(names["+"])
    changed = sum((Counter(names["+"]) & Counter(names["-"])).values())
    starts = {f"{identifier(name)}_": name for name in passes}
    by = Counter(next((starts[start] for start in starts if name.startswith(start)), "") for name in put.elements())
    each = ", ".join(f"{count:,} by {name}" for name, count in by.items() if name) if len(passes) > 1 else ""
    total = f"{put.total():,} lines put in" + (f" ({each})" if each else "")
    return f"{total}, {changed:,} changed, {gone.total():,} taken out"
