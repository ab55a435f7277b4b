"""Why a rule matched nothing, or another number of places than expected: which condition failed, and what comes nearest."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from ..errors import FxplugError, did_you_mean
from ..ir import functions
from ..ir.regions import SHOWN, Regions, explain_no_region, format_names
from ..spec.addresses import expand_braces, is_bare, parse_port, select
from ..spec.rules import Match, Pass, Rule
from .matches import ALL_LINEAR, Hit, find_hits, find_operations, format_prefix, without_classes
from .sites import Site


def describe_total(regions: Regions, p: Pass, found: Sequence[Site]) -> str:
    """Return the error message for a number of sites other than a whole pass expects."""
    if len(p.rules) == 1:
        return describe_count(regions, p, replace(p.rules[0], expect=p.expect), found)
    return f"{p.where or p.name}: {p.name}: its {len(p.rules)} rules matched {len(found)} places, expected {p.expect}"


def describe_count(regions: Regions, p: Pass, rule: Rule, found: Sequence[Site]) -> str:
    """Return the error message for a number of sites other than a rule expects."""
    match = rule.match
    what = f"'{match.path}'" if isinstance(match.path, str) else str(list(match.path))
    op, count = rule.expect
    head = f"{format_prefix(rule, p.name)}{what} matched {len(found)} place{'s' * (len(found) != 1)}, expected {op}{count}"
    if found:
        more = [f"  ... {len(found) - 2 * SHOWN} more"] if len(found) > 2 * SHOWN else []
        return "\n".join([head, *(f"  {s.node or s.path}" for s in found[: 2 * SHOWN]), *more])
    near = find_hits(regions, match) if rule.place == "param" else []
    if rule.place == "param" and match.bare and not near:
        others = find_hits(regions, without_classes(match))
        own = {name for hit in others for name in _own(regions, hit)}
        near = others if own and not any(fnmatchcase(name, rule.port or "weight") for name in own) else []
    if near:
        rows = [f"    {regions.by_key[h.key].path}: {', '.join(_own(regions, h)) or 'none'}" for h in near[:SHOWN]]
        return "\n".join([head, f"  none of {len(near)} regions has a parameter '{rule.port or 'weight'}'; they have", *rows])
    return "\n".join([head, *describe_misses(regions, match)])


def _own(regions: Regions, hit: Hit) -> list[str]:
    return regions.parameters(regions.by_key[hit.key].path, "*")


def describe_misses(regions: Regions, match: Match) -> list[str]:
    """Describe which condition failed, and the nearest misses."""
    if match.within and (around := [h.key for h in find_hits(regions, Match(match.path))]):
        wanted = [c if isinstance(c, str) else c.__name__ for c in match.within]
        below = [k for k in regions.ran if any(k.startswith(f"{a}.") or not a for a in around)]
        classes = sorted({regions.classes(regions.by_key[k].path)[0] for k in below})
        there = ", ".join(classes) or "no layers"
        return [f"  within {format_names(around)} there is no {' or '.join(wanted)}; there are {there}"]
    by_path = [h.key for h in find_hits(regions, Match(match.path))]
    by_class = [h.key for h in find_hits(regions, Match("**", match.module))] if match.module else []
    if match.module and not by_class:
        classes = sorted({regions.classes(regions.by_key[k].path)[0] for k in regions.ran})
        wanted = [c if isinstance(c, str) else c.__name__ for c in match.module]
        hint = "".join(did_you_mean(w, classes) for w in wanted)
        return [f"  nothing here is a {' or '.join(wanted)}{hint}; the classes here are {', '.join(classes) or 'none'}"]
    if not by_path:
        return [line for pattern in match.patterns for line in _near_paths(regions, match, pattern, by_class)]
    if match.module and not set(by_path) & set(by_class):
        rows = [f"    {k} ({regions.classes(regions.by_key[k].path)[0]})" for k in by_path[:SHOWN]]
        what = f"  the class does not match: {len(by_path)} place{'s' * (len(by_path) != 1)} match the path, for example"
        return [what, *rows, *_below(regions, match), f"  of that class there are: {format_names(by_class)}"]
    everywhere = [n for r in regions.by_key.values() for n in find_operations(r, match)]
    if everywhere:
        return [f"  the path does not match: the operation is at {format_names([n.name for n in everywhere])}"]
    known = sorted({functions.get_short_name(n.target) for r in regions.by_key.values() for n in r.nodes})
    names = [op if isinstance(op, str) else functions.get_short_name(op) for op in match.op or ()]
    if not names:
        return [f"  {format_names(by_path)} ran, and is no single operation any more: another pass has opened it"]
    return [f"  no operation {', '.join(names)} here{did_you_mean(names[0], known)}; there are {', '.join(known)}"]


def _below(regions: Regions, match: Match) -> list[str]:
    """Return the pattern for the children of the places that match a path, if these have the wanted class."""
    for pattern in match.patterns:
        if not pattern.startswith("re:") and ":" not in pattern and not pattern.endswith("**"):
            deeper = f"{pattern}*" if pattern.split(".")[-1] == "*" else f"{pattern}.**"
            if count := len(find_hits(regions, replace(match, path=deeper))):
                return [f"  inside of these there are some: '{deeper}' matches {_places(count)}"]
    return []


def _near_paths(regions: Regions, match: Match, pattern: str, by_class: list[str]) -> list[str]:
    path = parse_port(pattern).path
    if path.lower() == ALL_LINEAR:
        classes = ", ".join(sorted({regions.classes(regions.by_key[k].path)[0] for k in regions.ran})) or "none"
        return [f"  the model calls no Linear that '{ALL_LINEAR}' could mean; the classes here are {classes}"]
    if is_bare(path):
        return [f"  {_no_end(regions, one)}" for one in expand_braces(path)[:SHOWN]]
    modules = [name for name, _ in regions.root.named_modules(remove_duplicate=False)]
    uncalled = list(select(path, [m for m in modules if m and not regions.inserted(m)]))
    if uncalled:
        return [f"  {explain_no_region(regions, uncalled[0])}"]
    if meant := _meant(regions, match, pattern):
        return [f"  {meant}"]
    pool = by_class or regions.ran
    near = difflib.get_close_matches(path.removeprefix("re:"), pool, n=SHOWN, cutoff=0.0)
    why = f"the path does not match: {len(pool)} places match the other conditions" if by_class else (
        f"the model has {len(pool)} regions"
    )
    return [f"  {why}, for example", *(f"    {k}" for k in near)]


def _no_end(regions: Regions, path: str) -> str:
    """Return why a bare name is no region, nor the end of one."""
    found, depth = explain_no_region(regions, path), path.count(".") + 1
    if "did you mean" in found or "never called" in found or "replaced" in found:
        return found
    ends = dict.fromkeys(".".join(name.split(".")[-depth:]) for name in regions.ran)
    return f"no region '{path}', and none ends with '.{path}'{did_you_mean(path, ends)}"


def _meant(regions: Regions, match: Match, pattern: str) -> str:
    """Describe what a pattern or an expression would match anywhere in a path, if it does not match from the start."""
    anywhere, must = f"**.{pattern}", "a pattern must match the whole path"
    if pattern.startswith("re:"):
        expression = pattern.removeprefix("re:").removeprefix("^")
        anywhere = f"re:.*(?:{expression})" if "|" in expression else f"re:.*{expression}"
        must = "a regular expression must match from the start of a path"
    try:
        count = len(find_hits(regions, replace(match, path=anywhere)))
    except FxplugError:  # a slice that goes beyond what is there
        return ""
    return f"{must}: '{anywhere}' matches {_places(count)}" if count else ""


def _places(count: int) -> str:
    return f"{count} place{'s' * (count != 1)}"
