"""Why a rule matched nothing, or another number of places than expected: which condition failed, and what comes nearest."""

from __future__ import annotations

import difflib

from ..errors import did_you_mean
from ..ir import functions
from ..ir.regions import SHOWN, Regions, listed, no_region
from ..spec.addresses import is_pattern, parse_port, select
from ..spec.rules import Match
from .matches import hits, operations


def misses(regions: Regions, match: Match) -> list[str]:
    """Which condition failed, and what comes nearest."""
    if match.within and (around := [h.key for h in hits(regions, Match(match.path))]):
        wanted = [c if isinstance(c, str) else c.__name__ for c in match.within]
        below = [k for k in regions.ran if any(k.startswith(f"{a}.") or not a for a in around)]
        classes = sorted({regions.classes(regions.by_key[k].path)[0] for k in below})
        return [f"  within {listed(around)} there is no {' or '.join(wanted)}; there are {', '.join(classes) or 'no layers'}"]
    by_path = [h.key for h in hits(regions, Match(match.path))]
    by_class = [h.key for h in hits(regions, Match("**", match.module))] if match.module else []
    if match.module and not by_class:
        classes = sorted({regions.classes(regions.by_key[k].path)[0] for k in regions.ran})
        wanted = [c if isinstance(c, str) else c.__name__ for c in match.module]
        hint = "".join(did_you_mean(w, classes) for w in wanted)
        return [f"  nothing here is a {' or '.join(wanted)}{hint}; the classes here are {', '.join(classes)}"]
    if not by_path:
        return [line for pattern in match.patterns for line in _near_paths(regions, pattern, by_class)]
    if match.module and not set(by_path) & set(by_class):
        rows = [f"    {k} ({regions.classes(regions.by_key[k].path)[0]})" for k in by_path[:SHOWN]]
        what = f"  the class is what fails: {len(by_path)} place{'s' * (len(by_path) != 1)} meet the path, for example"
        return [what, *rows, f"  of the wanted class there are: {listed(by_class)}"]
    everywhere = [n for r in regions.by_key.values() for n in operations(r, match)]
    if everywhere:
        return [f"  the path is what fails: the operation is found at {listed([n.name for n in everywhere])}"]
    known = sorted({functions.short_name(n.target) for r in regions.by_key.values() for n in r.nodes})
    names = [op if isinstance(op, str) else functions.short_name(op) for op in match.op or ()]
    return [f"  no operation {', '.join(names)} here{did_you_mean(names[0], known)}; there are {', '.join(known)}"]


def _near_paths(regions: Regions, pattern: str, by_class: list[str]) -> list[str]:
    path = parse_port(pattern).path
    if not is_pattern(path):
        return [f"  {no_region(regions, path)}"]
    modules = [name for name, _ in regions.root.named_modules(remove_duplicate=False)]
    uncalled = list(select(path, [m for m in modules if m and not regions.inserted(m)]))
    if uncalled:
        return [f"  {no_region(regions, uncalled[0])}"]
    pool = by_class or regions.ran
    near = difflib.get_close_matches(path.removeprefix("re:"), pool, n=SHOWN, cutoff=0.0)
    why = f"the path is what fails: {len(pool)} places meet the other conditions" if by_class else f"{len(pool)} regions ran"
    return [f"  {why}, for example", *(f"    {k}" for k in near)]
