"""Entries of ZhiJian's `addins:` lists, each one add-in with all its places, as rules. Imports no torch.

    addins:
      - {name: VPT, location: [[blocks, 1], [blocks, 2]], hook: [[cat_prompt_deep_1, pre], [cat_prompt_deep_2, pre]]}
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.errors import SpecError, prefix_path
from ...core.spec.rules import Match, Rule
from ...core.spec.yaml_source import Source, Where, quote_yaml

KEYS = ("name", "location", "hook", "kwargs")
SIDES = {"pre": "in", "post": "out"}


@dataclass(frozen=True)
class Hook:
    """One place of an add-in: the pattern of the module's path, the method, and the side, `in` or `out`."""

    path: str
    method: str
    side: str


@dataclass(frozen=True)
class AddinEntry:
    """One add-in with its hooks; `kwargs` are for its constructor."""

    addin: str
    hooks: tuple[Hook, ...]
    kwargs: Mapping[str, Any]
    at: tuple[str | int, ...] = ()

    @property
    def text(self) -> str:
        """Entry in one line, for messages."""
        hooks = ", ".join(f"{hook.method} {'before' if hook.side == 'in' else 'after'} {hook.path}" for hook in self.hooks[:3])
        return f"{self.addin}: {hooks}" + (f", ... ({len(self.hooks)} places)" if len(self.hooks) > 3 else "")


def read_entry(given: Mapping[str, Any], at: tuple[str | int, ...]) -> AddinEntry:
    """Parse one entry of a list, at the path `at` in what the user wrote. Raises SpecError."""
    with prefix_path(*at):
        Source(given).keys(KEYS, KEYS[:3])
    name, places, hooks, kwargs = given["name"], given["location"], given["hook"], given.get("kwargs")
    if not isinstance(name, str) or not name.isidentifier():
        raise SpecError(f"must be the class of an add-in, not {quote_yaml(name)}", path=(*at, "name"))
    if not _lists(places, (str, int)):
        raise SpecError(f"must be a list of places such as [blocks, 0, attn], not {quote_yaml(places)}", path=(*at, "location"))
    if not _lists(hooks, str) or not all(len(hook) == 2 and hook[1] in SIDES for hook in hooks):
        raise SpecError(f"must be a list of [method, pre] or [method, post], not {quote_yaml(hooks)}", path=(*at, "hook"))
    if len(places) != len(hooks):
        raise SpecError(f"{len(hooks)} hooks for {len(places)} places; they are paired in order, so the "
                        "numbers must be equal", path=(*at, "hook"))
    if not isinstance(kwargs or {}, Mapping):
        raise SpecError(f"must be a mapping, not {quote_yaml(kwargs)}", path=(*at, "kwargs"))
    paired = (Hook(make_pattern(place), method, SIDES[side]) for place, (method, side) in zip(places, hooks, strict=True))
    return AddinEntry(name, tuple(paired), kwargs or {}, at)


def make_rules(entry: AddinEntry, number: int, addin: Any, use: str, where: Where) -> list[Rule]:
    """Return a rule for each place of an entry. If there are several, the add-in's attributes are passed from one to the
    next."""
    carried = [f"{entry.addin} {number}"] if len(entry.hooks) > 1 else []
    options = {"addin": _with(addin, entry), "carries": bool(carried)}
    made = []
    for hook in entry.hooks:
        side = "x[:]" if hook.side == "in" else "y[:]"
        made.append(
            Rule(
                Match(hook.path),
                use,
                place="before" if hook.side == "in" else "after",
                port=side,
                args=[*dict.fromkeys(("x[:]", side)), *carried],
                options={**options, "method": hook.method, "point": hook.side},
                name=carried[0] if carried else None,
                where=where if str(where) else Where(entry.text),
            )
        )
    return made


def make_pattern(place: Sequence[str | int]) -> str:
    """Convert `[blocks, 0, attn]` to the pattern `blocks.0.attn`; `-1` and `8:12` are slices."""
    parts = []
    for part in place:
        several = isinstance(part, str) and ":" in part
        parts.append(f"{{{part}}}" if several or (isinstance(part, int) and part < 0) else str(part))
    return ".".join(parts)


def _lists(value: Any, kinds: Any) -> bool:
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return all(isinstance(row, (list, tuple)) and row and all(isinstance(x, kinds) for x in row) for row in value)


def _with(addin: Any, entry: AddinEntry) -> Any:
    """Return the factory of an entry's add-in, with the entry's `kwargs`."""
    if not entry.kwargs:
        return addin
    if isinstance(addin, Mapping):
        return {**addin, "options": {**(addin.get("options") or {}), **entry.kwargs}}
    if not isinstance(getattr(addin, "func", addin), type):
        finding = f"has options for {entry.addin}, which is an instance: give its class"
        raise SpecError(finding, path=(*entry.at, "kwargs"))
    return functools.partial(addin, **entry.kwargs)
