"""The picture of a region: what its template draws, box by box."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .contents import Arrow, Box, RegionKind
from .layout import HEIGHT, MOST, WIDTH, GraphLayout, place

COLOURS = 8  # passes beyond these begin again with the first colour
LETTERS, SMALL = 21, 27  # that fit into a box
MARGIN = 6


@dataclass
class DrawnBox:
    """A box with its place, the classes that style it, and its three lines of text."""

    index: int
    box: Box
    x: float
    y: float
    classes: str
    texts: tuple[str, str, str]
    title: str


@dataclass
class Picture:
    """What is drawn of a region; `left_out` boxes did not fit."""

    width: int
    height: int
    boxes: list[DrawnBox]
    arrows: list[tuple[str, str]]
    left_out: int
    box_width: int = WIDTH
    box_height: int = HEIGHT


def draw_region(kind: RegionKind, colours: Mapping[str, int]) -> Picture:
    """Return the picture of a region; `colours` numbers the passes."""
    count = min(len(kind.boxes), MOST)
    arrows = [a for a in kind.arrows if a.source < count and a.target < count]
    placed = place(count, [(a.source, a.target) for a in arrows])
    boxes = [_place_boxes(index, box, placed, colours) for index, box in enumerate(kind.boxes[:count])]
    lines = [(_path(line), _arrow_classes(arrow, kind.boxes, colours))
             for arrow, line in zip(arrows, placed.arrows, strict=True)]  # fmt: skip
    width, height = round(placed.width) + 2 * MARGIN, round(placed.height) + 2 * MARGIN
    return Picture(width, height, boxes, lines, len(kind.boxes) - count)


def _place_boxes(index: int, box: Box, placed: GraphLayout, colours: Mapping[str, int]) -> DrawnBox:
    owner = box.owner or (next(iter(box.blocks)) if len(box.blocks) == 1 else "")
    coloured = f" p{colours[owner] % COLOURS}" if owner in colours else " many" if box.blocks else ""
    x, y = placed.boxes[index]
    name, label = _titles(box)
    third = format_shape(box.shape)
    if box.blocks and box.kind != "block":
        third = " ".join(filter(None, [third, "+" + ", ".join(f"{n} {name}" for name, n in box.blocks.items())]))
    said = [
        name,
        label,
        f"{format_shape(box.shape)} {box.dtype}" if box.shape is not None else "",
        f"{box.parameters:,} parameters" if box.parameters else "",
        f"{box.added:,} added" if box.added else "",
        f"put in by {box.owner}" if box.owner else "",
        "taken out" if box.state == "gone" else "",
    ]
    title = "\n".join(filter(None, said))
    texts = (middle(name, LETTERS), middle(label, SMALL), middle(third, SMALL))
    return DrawnBox(index, box, round(x + MARGIN, 1), round(y + MARGIN, 1), f"{box.kind} {box.state}{coloured}", texts, title)


def _titles(box: Box) -> tuple[str, str]:
    """Return the first two lines in a box."""
    if box.kind == "repeat":
        return f"{len(box.members)} × {box.label}", box.name
    if box.kind == "ops":
        return box.label, f"{len(box.members)} operations"
    said = {"in": "input", "out": "result", "op": box.label if box.label != box.name else "operation", "weight": "weight"}
    return box.name, said.get(box.kind, box.label)


def _arrow_classes(arrow: Arrow, boxes: Sequence[Box], colours: Mapping[str, int]) -> str:
    owners = [boxes[end].owner for end in (arrow.source, arrow.target) if boxes[end].owner in colours]
    colour = f" p{colours[owners[0]] % COLOURS}" if owners and arrow.state == "added" else ""
    return f"{arrow.state}{colour}"


def _path(points: Sequence[tuple[float, float]]) -> str:
    moved = [(round(x + MARGIN, 1), round(y + MARGIN, 1)) for x, y in points]
    parts = [f"M{moved[0][0]:g} {moved[0][1]:g}"]
    for (ax, ay), (bx, by) in pairwise(moved):
        if ax == bx:
            parts.append(f"V{by:g}")
            continue
        half = round((ay + by) / 2, 1)
        parts.append(f"C{ax:g} {half:g} {bx:g} {half:g} {bx:g} {by:g}")
    return "".join(parts)


def format_shape(sizes: Sequence[int] | None) -> str:
    """Format a shape as `2 × 77 × 768`; `scalar` without dimensions, "" for None."""
    return "" if sizes is None else " × ".join(map(str, sizes)) or "scalar"


def middle(text: str, letters: int) -> str:
    """Shorten a text by leaving out its middle: the ends of a path are the most informative."""
    if len(text) <= letters:
        return text
    half = (letters - 1) // 2
    return f"{text[: letters - 1 - half]}…{text[-half:]}"
