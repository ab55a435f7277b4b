"""What a match left: layers like those that it took, and patterns that take them too. Reads graphs, changes none."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..ir.regions import Regions
from ..spec.rules import Pass, Rule
from .matches import hits

if TYPE_CHECKING:
    from .sites import Site

HOLDERS = ("Sequential", "ModuleList", "ModuleDict", "Identity", "Dropout")  # a class that says nothing of what one does
SHOWN = 3  # so many patterns are listed
ENDS = 4  # a pattern has at most so many parts behind `**.`
TRIED = 20  # groups for which a pattern is looked for


def left_over(views: Sequence[Regions], p: Pass, sites: Iterable[Site]) -> str:
    """`140 similar layers were not taken: **.to_out.0 (to take them too: at: [...])`, or an empty text.

    Similar is a layer of the same class that is in the same module as one that was taken, or has its name. Rules that match
    operations, or whose `expect` says how many places there are, leave nothing, and no rule does in a pass with `expect`.
    """
    rules = [rule for rule in p.rules if not rule.counted and not rule.match.op]
    held = [site for site in sites if any(site.rule is rule for rule in rules)] if p.expect is None else []
    known = {path: regions for regions in reversed(views) for path in regions.calls if path}
    taken = {path: known[path] for site in held if (path := site.path.partition("@")[0]) in known}
    classes = {regions.classes(path)[0] for path, regions in taken.items()} - {*HOLDERS}
    around = {(_owner(regions, path), regions.classes(path)[0]) for path, regions in taken.items()}
    ends = {(_end(path), regions.classes(path)[0]) for path, regions in taken.items()}
    left = [
        path
        for path, regions in known.items()
        if path not in taken
        and (name := regions.classes(path)[0]) in classes
        and not regions.inserted(path)
        and ((_owner(regions, path), name) in around or (_end(path), name) in ends)
    ]
    if not left:
        return ""
    patterns = list(_patterns(views, rules, left, {*taken}))
    listed = ", ".join(patterns[:SHOWN]) + (f", ... ({len(patterns)} patterns)" if len(patterns) > SHOWN else "")
    plural = "s were" if len(left) > 1 else " was"
    return f"{len(left)} similar layer{plural} not taken: {listed}{_with(p, rules, patterns)}"


def _with(p: Pass, rules: Sequence[Rule], patterns: list[str]) -> str:
    """How the one rule of a pass takes them too, as YAML has it."""
    if len(rules) != 1 or len(patterns) > SHOWN or any(isinstance(item, tuple) for item in rules[0].args):
        return ""
    key = "at" if "at" in p.params else "path"
    text = json.dumps([*rules[0].match.patterns, *patterns], ensure_ascii=False)
    return f" (a pattern that takes them too: {key}: {text})" if len(text) < 400 else ""


def _patterns(views: Sequence[Regions], rules: Sequence[Rule], left: Sequence[str], taken: set[str]) -> Iterator[str]:
    """Patterns that together take all that was left, and beside it only what was taken: one for each name, the shortest."""
    groups: dict[str, list[str]] = {}
    for path in left:
        groups.setdefault(_end(path), []).append(path)
    for number, (end, paths) in enumerate(groups.items()):
        found = None
        for text in _forms(paths, len(end.split("."))) if number < TRIED else ():
            reached = {h.key.partition("@")[0] for v in views for r in rules for h in hits(v, replace(r.match, path=text))}
            if reached >= {*paths} and reached <= taken.union(left):
                found = text
                break
        yield from [found] if found else paths


def _forms(paths: Sequence[str], least: int) -> Iterator[str]:
    """Globs that all of these paths match, those with few parts first; numbers above the name itself are free."""
    rows = [path.split(".") for path in paths]
    loose = [[*("*" if part.isdigit() else part for part in row[:-least]), *row[-least:]] for row in rows]
    shortest = min(map(len, rows))
    for count in range(least, min(shortest, least + ENDS) + 1):
        ends = [list(dict.fromkeys(row[-count:][at] for row in loose)) for at in range(count)]
        text = ".".join(names[0] if len(names) == 1 else f"{{{','.join(names)}}}" for names in ends)
        if "*" not in [name for names in ends if len(names) > 1 for name in names]:
            yield text if all(len(row) == count for row in rows) else f"**.{text}"
    if len({*map(tuple, loose)}) == 1:
        yield ".".join(loose[0])


def _owner(regions: Regions, path: str) -> str:
    """The nearest module around a layer that the model calls."""
    above = path.rpartition(".")[0]
    while above and above not in regions.calls:
        above = above.rpartition(".")[0]
    return above


def _end(path: str) -> str:
    """What a layer is called: its last part, from the last that is no number."""
    parts = path.split(".")
    at = next((index for index in range(len(parts) - 1, -1, -1) if not parts[index].isdigit()), 0)
    return ".".join(parts[at:])
