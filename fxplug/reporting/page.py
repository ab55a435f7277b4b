"""A page's contents as one HTML file that stands for itself: no server, no network, nothing but its own script runs in it."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2.utils import htmlsafe_json_dumps

from ..core.errors import SpecError, did_you_mean
from .contents import Box, Page, RegionKind
from .pictures import COLOURS, draw_region

TEMPLATES = Path(__file__).parent / "templates"
MOST_ROWS = 4_000  # of one table
HIGH = 68.0  # pixels of the highest bar


@cache
def environment() -> jinja2.Environment:
    """Return the environment of the templates, in which every value is escaped."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )


@cache
def part(name: str) -> str:
    """Return a file that is part of every page."""
    return (TEMPLATES / name).read_text("utf-8")


def write_html(page: Page) -> str:
    """Write the page as HTML. The same contents give the same bytes."""
    colours = {row.name: index % COLOURS for index, row in enumerate(page.passes)}
    style, script = part("picture.css") + part("page.css"), part("page.js")
    gained = sum(row.parameters for row in page.passes)
    return environment().get_template("page.html.j2").render(
        page=page,
        style=style,
        script=script,
        policy=policy(script, style),
        pictures=[draw_region(kind, colours) for kind in page.kinds],
        colour=lambda name: f"p{colours[name]}" if name in colours else "",
        data=htmlsafe_json_dumps(_for_script(page, colours), separators=(",", ":")),
        lead=lead(page),
        gained=gained,
        share=f"{gained / page.base:.2%}" if page.base else "",
        classes=", ".join(f"{n:,} {label}" for label, n in Counter(row.label for row in page.sites).most_common(2)),
        verdict=verdict(page.checks or []),
        bars=bars(page.depth, colours),
        versions={name: page.facts[name] for name in ("fxplug", "torch", "python") if name in page.facts},
        most_rows=MOST_ROWS,
        alone=False,
        label="",
    )  # fmt: skip


def write_svg(page: Page, kind: RegionKind, label: str) -> str:
    """Write the picture of one region as an SVG file."""
    colours = {row.name: index % COLOURS for index, row in enumerate(page.passes)}
    drawn = draw_region(kind, colours)
    return environment().get_template("picture.svg.j2").render(p=drawn, alone=True, style=part("picture.css"), label=label)


def policy(script: str, style: str) -> str:
    """Return the page's content security policy: it may show itself, and run its one script."""
    own = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style)]
    return (
        f"default-src 'none'; script-src 'sha256-{own[0]}'; style-src 'sha256-{own[1]}'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


def lead(page: Page) -> str:
    """Summarise the page in a sentence."""
    if page.trouble:
        return "What a saved folder says, without the model in it."
    if not page.passes:
        return f"{page.model} as it was traced, without a pass."
    names = [row.name for row in page.passes]
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    gained = sum(row.parameters for row in page.passes)
    share = f" ({gained / page.base:.2%})" if page.base and gained else ""
    checked = verdict(page.checks) if page.checks else "no checks are known"
    places = f"{len(page.sites):,} place{'s' * (len(page.sites) != 1)}"
    return f"Rewritten by {listed} at {places}: {gained:,} parameters more{share}; {checked}."


def verdict(checks: Sequence[dict[str, str]]) -> str:
    """Summarise how many checks hold."""
    counts = Counter(check["status"] for check in checks)
    said = [f"{counts[status]} {status}" for status in ("failed", "skipped", "cannot") if counts[status]]
    return ", ".join([f"{counts['ok']} of {len(checks)} checks hold", *said])


def bars(depth: Sequence[dict[str, Any]], colours: dict[str, int]) -> list[dict[str, Any]]:
    """Return the bars of the chart along the model, passes on top of each other."""
    most = max((sum(part["added"].values()) for part in depth), default=0) or 1
    found = []
    for index, part_ in enumerate(depth):
        top = 69.0
        for name, count in part_["added"].items():
            height = count / most * HIGH
            top -= height
            title = f"{name} +{count:,}: {part_['from']} to {part_['to']}"
            found.append({"x": index * 10 + 1, "y": round(top, 2), "height": round(height, 2), "title": title,
                          "colour": f"p{colours.get(name, 0)}"})  # fmt: skip
    return found


def _for_script(page: Page, colours: dict[str, int]) -> dict[str, Any]:
    def row(box: Box, beside: Mapping[str, list[str]]) -> list[Any]:
        members = [[row(each, beside) for each in period] for period in box.members] if box.kind == "repeat" else None
        passes = list(box.blocks) or ([box.owner] if box.owner else beside.get(box.name, []))
        return [box.name, box.kind, box.label, box.inner, passes, members]

    kinds = []
    for kind in page.kinds:
        beside: dict[str, list[str]] = {}
        for box in (each for folded in kind.boxes for each in folded.unfolded if each.kind == "block"):
            beside.setdefault(box.name.removeprefix(f"{box.owner}: "), []).append(box.owner)
        kinds.append({"boxes": [row(box, beside) for box in kind.boxes]})
    return {
        "title": page.title,
        "root": page.root,
        "kinds": kinds,
        "times": times(page),
        "colours": {name: f"p{index}" for name, index in colours.items()},
    }


def times(page: Page) -> list[int]:
    """Return how many regions of the model are of each kind."""
    counts = [0] * len(page.kinds)
    if not page.kinds:
        return counts
    counts[page.root] = 1
    for index in range(len(page.kinds) - 1, -1, -1):  # a kind stands behind those inside of it
        for box in page.kinds[index].boxes:
            for each in box.unfolded:
                if each.inner is not None:
                    counts[each.inner] += counts[index]
    return counts


def find_region(page: Page, path: str) -> RegionKind:
    """Return the region at a path; "" is the model. Raises SpecError for a path that is no region."""
    kind, at = page.kinds[page.root], ""
    while at != path:
        below = [each for box in kind.boxes for each in box.unfolded if each.inner is not None]
        inner = {f"{at.partition('@')[0]}.{box.name}".strip("."): box for box in below}
        fits = [name for name in inner if name == path or path.startswith((f"{name}.", f"{name}@"))]
        if not fits:
            raise SpecError(f"there is no region '{path}'{did_you_mean(path, inner)}; in '{at or 'the model'}' there are "
                            f"{', '.join(list(inner)[:8]) or 'none'}{', ...' if len(inner) > 8 else ''}")  # fmt: skip
        at = max(fits, key=len)
        kind = page.kinds[inner[at].inner or 0]
    return kind
