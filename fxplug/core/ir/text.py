"""A graph as stable text, the difference between two, and what repeats in them, said once.

A model has its blocks many times, and a pass does the same to each. Paths that differ in a part become one pattern of the
pass language (`blocks.{0:28}.attn.{to_q,to_k}`), which can be given to `at:` as it stands; places of a diff that differ in the
numbers of their names become one, with what the numbers were. Nothing is lost: what is folded can be written out again.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import fx, nn

from ..spec.addresses import make_identifier
from . import functions, ops
from .graph import without_edges
from .traced_module import TracedModule, list_class_names

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


def find_patterns(paths: Sequence[str]) -> list[Pattern]:
    """Return few patterns that match these paths and no others, in the order of the first path of each.

    Parts that are numbers are merged first, `{0:4}` for a run of them and `{0,2}` for others, then those that are names.
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
    """Return one part of a pattern."""
    if len(names) == 1:
        return names[0]
    if all(name.isdecimal() for name in names):
        found = sorted(map(int, names))
        if len(found) > 2 and all(b == a + 1 for a, b in pairwise(found)):
            return f"{{{found[0]}:{found[-1] + 1}}}"
        return f"{{{','.join(map(str, found))}}}"
    return f"{{{','.join(names)}}}"


def fold_diff(diff: str) -> str:
    """Fold a diff of `fxplug.diff`: show each repeated place once.

    Places are alike if their lines differ in numbers that are parts of names and in nothing else. Such numbers are shown as
    letters, one letter for all that are equal in each place, and the head lists what the letters stand for.
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
        rows.append(f"@@ x{len(alike)}{_letter_ranges(letters)} @@{_filled(key, shown)}")
    return "\n".join(rows) + "\n" if rows else ""


def _letter_ranges(letters: dict[tuple[str, ...], str]) -> str:
    """Format the values of the letters in the places that are alike."""
    if not letters:
        return ""
    found = [pattern.text for pattern in find_patterns([".".join(numbers) for numbers in zip(*letters, strict=True)])]
    more = [f"... {len(found) - LISTED} more"] if len(found) > LISTED else []
    return f": {'.'.join(letters.values())} = {', '.join([*found[:LISTED], *more])}"


def _places(diff: str) -> list[tuple[str, str]]:
    """Return the places of a diff: head, and the lines with a line end before each."""
    heads = list(_HEAD.finditer(diff))
    ends = [*(head.start() for head in heads), len(diff)][1:]
    return [(head[0], diff[head.end() : end].rstrip("\n")) for head, end in zip(heads, ends, strict=True)]


def _masked(text: str, numbers: list[str]) -> str:
    """Remove each number that is a part of a name from a text; append them to `numbers`."""

    def without(name: re.Match[str]) -> str:
        numbers.extend(_INDEX.findall(name[0]))
        return _INDEX.sub("\0", name[0])

    return _IN_NAME.sub(without, text)


def _filled(key: str, numbers: Sequence[str]) -> str:
    """Fill the text of `_masked` with its numbers, or other texts."""
    first, *rest = key.split("\0")
    return first + "".join(f"{number}{text}" for number, text in zip(numbers, rest, strict=True))


def summarize_diff(diff: str, passes: Sequence[str]) -> str:
    """Summarise a diff in one line: how many lines each pass inserted, how many read other values, how many are removed."""
    names: dict[str, list[str]] = {"+": [], "-": []}
    for _, body in _places(diff):
        for line in body.split("\n")[1:]:
            if line[:1] in names:
                names[line[0]].append(line[1:].partition(" = ")[0])
    put, gone = Counter(names["+"]) - Counter(names["-"]), Counter(names["-"]) - Counter(names["+"])
    changed = sum((Counter(names["+"]) & Counter(names["-"])).values())
    starts = {f"{make_identifier(name)}_": name for name in passes}
    by = Counter(next((starts[start] for start in starts if name.startswith(start)), "") for name in put.elements())
    each = ", ".join(f"{count:,} by {name}" for name, count in by.items() if name) if len(passes) > 1 else ""
    total = f"{put.total():,} lines put in" + (f" ({each})" if each else "")
    return f"{total}, {changed:,} changed, {gone.total():,} taken out"


def show(module: fx.GraphModule) -> str:
    """Return a graph as text: `name = target(arguments)`, modules by path, edges of regions left out; a line a variant.

    Args:
        module: The traced module, or another module with a graph.

    Returns:
        One line for each node.
    """
    more = module.variants if isinstance(module, TracedModule) else []
    return "\n".join([*_lines(module.graph), *(f"# variant: {label}" for label in more)]) + "\n"


def diff(before: fx.GraphModule, after: fx.GraphModule, context: int = 1) -> str:
    """Compare two graphs as text.

    It says what is computed, not what trains: `apply` freezes nothing of the base, and `fxplug.trainable(after)` names what
    trains; `after.print_trainable_parameters()` counts it.

    Args:
        before: The graph before.
        after: The graph after.
        context: How many lines are shown around a change.

    Returns:
        A unified diff without its header; empty where nothing changed.
    """
    old, new = _lines(before.graph), _lines(after.graph)
    rows: list[str] = []
    for group in _Alike(None, old, new).get_grouped_opcodes(context):
        spans = ((group[0][1], group[-1][2]), (group[0][3], group[-1][4]))
        rows.append("@@ -{} +{} @@".format(*(_span(*span) for span in spans)))
        for tag, start, end, first, last in group:
            if tag == "equal":
                rows += [f" {line}" for line in old[start:end]]
            else:
                rows += [f"-{line}" for line in old[start:end]] + [f"+{line}" for line in new[first:last]]
    return "\n".join(rows) + "\n"


class _Alike(difflib.SequenceMatcher[str]):
    """Lines that two texts share: at once where they are in one order in both, as a rewrite leaves them. difflib's own search
    takes time with the square of their number."""

    a: Sequence[str]
    b: Sequence[str]

    def get_matching_blocks(self) -> list[difflib.Match]:
        places = dict(zip(_numbered(self.b), range(len(self.b)), strict=True))
        pairs = [(i, places[key]) for i, key in enumerate(_numbered(self.a)) if key in places]
        if any(two[1] < one[1] for one, two in pairwise(pairs)):
            return super().get_matching_blocks()
        blocks: list[difflib.Match] = []
        for i, j in pairs:
            last = blocks[-1] if blocks else difflib.Match(-1, -1, 0)
            if last.size and (last.a + last.size, last.b + last.size) == (i, j):
                blocks[-1] = last._replace(size=last.size + 1)
            else:
                blocks.append(difflib.Match(i, j, 1))
        return [*blocks, difflib.Match(len(self.a), len(self.b), 0)]


def _numbered(lines: Sequence[str]) -> list[tuple[str, int]]:
    """Return each line with the number of its earlier occurrences."""
    counts: Counter[str] = Counter()
    found = []
    for line in lines:
        found.append((line, counts[line]))
        counts[line] += 1
    return found


def _span(start: int, end: int) -> str:
    """Format a range of lines from 0 as in a unified diff."""
    return f"{start + 1}" if end - start == 1 else f"{start + (end > start)},{end - start}"


def show_modules(module: nn.Module) -> str:
    """Return the module tree as text: path, class and parameters of every module that has some, or was called."""
    rows = []
    for path, child in module.named_modules():
        own = sum(p.numel() for p in child.parameters(recurse=False))
        if path and (own or not len(list(child.children()))):
            rows.append(f"{path}  {list_class_names(child)[0]}" + (f"  {own:,}" if own else ""))
    return "\n".join(rows) + "\n"


def _lines(graph: fx.Graph) -> list[str]:
    return [text for node in without_edges(graph).nodes if (text := format_node(node))]


def format_node(node: fx.Node) -> str:
    """Return a node as one line of text; "" for what is left out."""
    if node.op == "placeholder":
        default = f" = {node.args[0]!r}" if node.args else ""
        return f"input {node.target}{default}"
    if node.op == "output":
        return f"return {_text(node.args[0])}"
    if node.op == "get_attr":
        return f"{node.name} = {node.target}"
    args = [_text(a) for a in node.args] + [f"{k}={_text(v)}" for k, v in node.kwargs.items()]
    if node.target is operator.getitem and node.op == "call_function":
        index = node.args[1]
        inside = ", ".join(map(_text, index)) if isinstance(index, tuple) and len(index) > 1 else args[1]
        return f"{node.name} = {args[0]}[{inside}]"
    if node.op == "call_method":
        return f"{node.name} = {args[0]}.{node.target}({', '.join(args[1:])})"
    if node.target is ops.guard:
        return f"guard {args[0]} is {args[1]}"
    if node.target is ops.check_constants:
        pairs = zip(node.args[2], node.args[1], strict=True)  # type: ignore[arg-type]
        return "constant " + ", ".join(f"{name}={value!r}" for name, value in pairs)
    if node.target is ops.check_inputs:
        ranks = zip(node.args[3], node.args[1], strict=True)  # type: ignore[arg-type]
        return "check " + ", ".join(f"{name}: {rank}-d" for name, rank in ranks)
    if node.target is ops.check_numbers:
        kinds = zip(node.args[2], node.args[1], strict=True)  # type: ignore[arg-type]
        return "check " + ", ".join(f"{name}: {kind}" for name, kind in kinds)
    if node.target is ops.check_added:
        return f"{node.name} = check {args[0]}: {node.args[3] or 'any shape'}"
    if node.target in (ops.check_members, ops.check_generator):
        return f"check {node.args[2]}: {args[1]}"
    stands_for = node.meta.get("result", {}).get("result", "").rpartition(":")[2]  # of a class that was not there to be read
    name = node.target if node.op == "call_module" else stands_for or functions.name_functions().get(node.target)
    name = name or getattr(node.target, "__qualname__", str(node.target))
    short = str(name).removeprefix("fxplug.ops.").removeprefix("torch.nn.functional.").removeprefix("operator.")
    return f"{node.name} = {short}({', '.join(args)})"


def _text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, slice):
        start, stop = ("" if v is None else _text(v) for v in (value.start, value.stop))
        return f"{start}:{stop}" + (f":{_text(value.step)}" if value.step is not None else "")
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return repr(value)
