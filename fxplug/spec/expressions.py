"""Regular expressions of strangers, held against names in bounded time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import shown
from ..files.reading import Raises
from ..limits import DEFAULT, Limits

SLOW_PATTERN_SECONDS = 0.5  # of CPU time, for all patterns of a file together
WAITED = 10.0  # seconds that a busy machine may take for them
WAYS = 1_000_000  # so many ways to match a name can be tried here
LENGTH = 128  # characters of a name, in what is reckoned of them
PLAIN = re.compile(r"[\w-]+(?:\.[\w-]+){0,63}")


def searched(expression: str, names: Iterable[str], raises: Raises) -> set[str]:
    """The names that a regular expression is found in anywhere, as by `re.search`, in bounded time.

    Raises what `raises` makes for one that is none, or backtracks without end.
    """
    names = list(names)
    check_expression(expression, raises)
    if is_risky(expression, starts=LENGTH):
        (found,) = first_matches([[expression]], names, raises, anywhere=True)
        return set(found)
    return {name for name in names if re.search(expression, name)}


def is_risky(expression: str, starts: int = 1) -> bool:
    """Whether an expression may take long to compile, or to match from so many places of a name on: a short one that tries few
    ways does neither."""
    if len(expression) > 512 or re.search(r"\(\?[a-zA-Z]*i", expression):
        return True
    from re import _parser  # type: ignore[attr-defined]

    try:
        return starts * ways(_parser.parse(expression)) > WAYS
    except (re.error, OverflowError, RecursionError):
        return False  # `compile_pattern` says what is wrong with it


def check_expression(text: str, raises: Raises) -> None:
    """Raise what `raises` makes unless this is a regular expression, of bounded length, that compiles in bounded time."""
    if len(text) > DEFAULT.text:
        raise raises(f"has {len(text)} characters, and more than {DEFAULT.text} are not read")
    if is_risky(text):
        first_matches([[text]], [], raises)
        return
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        at = getattr(error, "pos", None)
        place = "" if at is None else f" at position {at}\n  {text}\n  {' ' * at}^"
        raise raises(f"is not a regular expression: {getattr(error, 'msg', error)}{place}") from None


def ways(item: object, length: int = LENGTH) -> float:
    """At most so many ways does a parsed expression have to match a name of that length: what it may try before it gives up."""
    if isinstance(item, tuple) and len(item) == 2 and str(item[0]) in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        low, high, body = item[1]
        inner, most = ways(body, length), min(int(high), length)
        if inner > 1:
            return float("inf") if most > 20 else inner ** float(most) * (most - min(int(low), most) + 1)
        return float(most - min(int(low), most) + 1)
    if isinstance(item, tuple) and len(item) == 2 and str(item[0]) == "BRANCH":
        return float(sum(ways(body, length) for body in item[1][1]))
    if isinstance(item, (list, tuple)) or type(item).__name__ == "SubPattern":
        found = 1.0
        for child in item:  # type: ignore[attr-defined]
            found = min(found * ways(child, length), float("inf"))
        return found
    return 1.0


def first_matches(
    groups: Sequence[Sequence[str]], names: Sequence[str], raises: Raises, anywhere: bool = False
) -> list[dict[str, tuple[int, dict[str, str]]]]:
    """For each group of regular expressions: which of them is the first that matches a name from its start (or
    `anywhere` in it), and what its groups caught; a name that none matches is left out.

    They run in a process of their own that ends by itself, as `re` cannot be interrupted from inside: neither matching nor
    compiling them takes longer than SLOW_PATTERN_SECONDS. Raises what `raises` makes for those that would, or that are none.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROGRAM],
            input=json.dumps([SLOW_PATTERN_SECONDS, "search" if anywhere else "match", groups, names]),
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=WAITED,
        )
        answer = json.loads(done.stdout)
    except OSError as error:
        raise raises(f"cannot be matched: no process of Python starts ({error.strerror})") from None
    except (subprocess.TimeoutExpired, ValueError):
        stopped = f"(stopped after {SLOW_PATTERN_SECONDS:g} s)"
        if sum(map(len, groups)) > 1:
            raise raises(f"take too long to match {stopped}") from None
        raise raises(
            f"backtracks without end on these paths {stopped}: "
            "it repeats something that is itself a repeat; write it without the inner one"
        ) from None
    if isinstance(answer, list) and isinstance(answer[0], str):
        raise raises(f"is not a regular expression: {shown(answer[0])}: {answer[1]}")
    return [{name: (index, caught) for name, (index, caught) in each.items()} for each in answer]


# a process without a handler ends when its CPU time is used up, also in the middle of a match
_PROGRAM = """
import json, re, sys
seconds, method, groups, names = json.load(sys.stdin)
try:
    import resource, signal
    signal.setitimer(signal.ITIMER_PROF, seconds)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
except (ImportError, AttributeError, ValueError, OSError):
    pass
try:
    for group in groups:
        for index, text in enumerate(group):
            group[index] = re.compile(text)
except (re.error, OverflowError, RecursionError) as error:
    json.dump([text, getattr(error, "msg", None) or str(error)], sys.stdout)
    sys.exit()
found = []
for group in groups:
    found.append({})
    for name in names:
        for index, regex in enumerate(group):
            match = getattr(regex, method)(name)
            if match:
                found[-1][name] = index, match.groupdict()
                break
json.dump(found, sys.stdout)
"""


def by_ending(
    tables: Sequence[Mapping[str, Any]], names: Sequence[str], raises: Raises, limits: Limits = DEFAULT
) -> list[dict[str, Any]]:
    """What each table has for each name: the value of its first pattern that is the name or its end behind a dot, as PEFT reads
    `alpha_pattern`. A pattern is a regular expression from a stranger's file.

    Raises what `raises` makes for one that is none, is longer than `limits.text`, or takes too long.
    """
    longest = max((len(pattern) for table in tables for pattern in table), default=0)
    if longest > limits.text:
        raise raises(f"has a pattern of {longest} characters, and more than {limits.text} are not read; see Limits")
    order = [{pattern: index for index, pattern in enumerate(table)} for table in tables]
    hard = [[pattern for pattern in table if not PLAIN.fullmatch(pattern)] for table in tables]
    caught: list[dict[str, tuple[int, dict[str, str]]]] = [{} for _ in tables]
    if any(hard):
        expressions = [[rf"(.*\.)?({pattern})$" for pattern in group] for group in hard]
        every = sum(hard, [])
        what = f"the pattern {shown(every[0])}" if len(every) == 1 else f"{len(every)} patterns"
        caught = first_matches(expressions, names, lambda finding: raises(f"{what} {finding}"))
    made: list[dict[str, Any]] = []
    for table, places, group, matched in zip(tables, order, hard, caught, strict=True):
        values = list(table.values())
        found = {}
        for name in names:
            parts = name.split(".")
            endings = (".".join(parts[at:]) for at in range(max(0, len(parts) - 64), len(parts)))
            hits = [places[ending] for ending in endings if ending in places]
            if name in matched:
                hits.append(places[group[matched[name][0]]])
            if hits:
                found[name] = values[min(hits)]
        made.append(found)
    return made
