"""Where the boxes of a picture stand: layered, values flowing down (Sugiyama, Tagawa, Toda 1981), by fast-sugiyama.

Of the layouts that Python has it crosses the fewest arrows of our graphs, and says where long arrows pass between boxes.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import networkx as nx
from fast_sugiyama import from_edges

for name in ("rust-sugiyama", "connected_components"):
    logging.getLogger(name).setLevel(logging.WARNING)  # they tell each step of each layout
WIDTH, HEIGHT = 176, 54  # of a box, in pixels
ACROSS, DOWN = 28, 34  # between boxes
MOST = 250  # boxes of one picture
# above so many arrows, or bends in them, finding an order with few crossings takes seconds, and then minutes
ARROWS, BENDS = 500, 2_000


@dataclass
class GraphLayout:
    """A picture in pixels: the upper left corner of each box, and the points that each arrow goes through."""

    width: float
    height: float
    boxes: list[tuple[float, float]]
    arrows: list[list[tuple[float, float]]]


def place(count: int, arrows: Sequence[tuple[int, int]]) -> GraphLayout:
    """Place boxes and the arrows of an acyclic graph between them. The layout is deterministic."""
    centres: dict[int, tuple[float, float]] = {}
    bends: dict[tuple[int, int], list[int]] = {}
    right = 0.0
    pairs = list(dict.fromkeys((a, b) for a, b in arrows if a != b))
    for found, edges in _layered(pairs) if _simple(pairs) else _rows(pairs):
        ranks = {y: row for row, y in enumerate(sorted({y for _, (_, y) in found}, reverse=True))}
        rows: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for box, (x, y) in found:
            rows[ranks[y]].append((x, box))
        for row, members in rows.items():
            members.sort()
            for (_, box), x in zip(members, _spread_boxes(members, count), strict=True):
                centres[box] = (x, row * (HEIGHT + DOWN) + HEIGHT / 2)
        left = min(centres[box][0] - _half(box, count) for box, _ in found) - right
        for box, _ in found:
            centres[box] = (centres[box][0] - left, centres[box][1])
        right = max(centres[box][0] + _half(box, count) for box, _ in found) + ACROSS
        bends |= _bends(edges, count)
    for box in range(count):
        if box not in centres:
            centres[box] = (right + WIDTH / 2, HEIGHT / 2)
            right += WIDTH + ACROSS
    lines = [_line(centres, bends.get((a, b), []), a, b) for a, b in arrows]
    corners = [(centres[box][0] - WIDTH / 2, centres[box][1] - HEIGHT / 2) for box in range(count)]
    width = max([x + WIDTH for x, _ in corners] + [x for line in lines for x, _ in line], default=WIDTH)
    return GraphLayout(width, max((y + HEIGHT for _, y in corners), default=HEIGHT), corners, lines)


def _layered(pairs: list[tuple[int, int]]) -> Iterator[tuple[list[tuple[int, tuple[float, float]]], list[tuple[int, int]]]]:
    """Yield the connected parts of a graph: the positions of boxes and of the bends of arrows, and the segments between
    them."""
    made = from_edges(pairs, vertex_spacing=WIDTH + ACROSS, dummy_vertices=True, dummy_size=1) if pairs else []
    for found, _, _, edges in made:
        yield [(int(box), (float(x), float(y))) for box, (x, y) in found], [(int(a), int(b)) for a, b in edges or []]


def _simple(pairs: Sequence[tuple[int, int]]) -> bool:
    """Return whether a layout can be computed quickly."""
    ranks = {box: y for found, _ in _rows(pairs) for box, (_, y) in found} if len(pairs) <= ARROWS else {}
    return len(pairs) <= ARROWS and sum(abs(ranks[a] - ranks[b]) for a, b in pairs) <= BENDS


def _rows(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[list[tuple[int, tuple[float, float]]], list[tuple[int, int]]]]:
    """Yield a simple layout in the same form: each box in the first row below all its inputs, rows in order."""
    graph = nx.DiGraph(pairs)
    if not nx.is_directed_acyclic_graph(graph):
        graph = nx.DiGraph((a, b) for a, b in pairs if a < b)
        graph.add_nodes_from(box for pair in pairs for box in pair)
    rows = enumerate(nx.topological_generations(graph))
    yield [(box, (float(x * (WIDTH + ACROSS)), -float(row))) for row, boxes in rows for x, box in enumerate(boxes)], []


def _half(box: int, count: int) -> float:
    """Return half of the width of a box, or of the space around a bend in an arrow."""
    return WIDTH / 2 if box < count else ACROSS / 4


def _spread_boxes(members: Sequence[tuple[float, int]], count: int) -> list[float]:
    """Place a row of boxes without overlap, in order, minimising displacement.

    This is an isotonic regression, by pooling neighbours that are too near.
    """
    offset, last = 0.0, None
    offsets = []
    for _, box in members:
        offset += 0 if last is None else _half(last, count) + _half(box, count) + ACROSS / 2
        offsets.append(offset)
        last = box
    pools: list[tuple[float, int]] = []
    for (x, _), shift in zip(members, offsets, strict=True):
        pool = (x - shift, 1)
        while pools and pools[-1][0] > pool[0]:
            mean, many = pools.pop()
            pool = ((mean * many + pool[0] * pool[1]) / (many + pool[1]), many + pool[1])
        pools.append(pool)
    wanted = [mean for mean, many in pools for _ in range(many)]
    return [place + shift for place, shift in zip(wanted, offsets, strict=True)]


def _bends(edges: Sequence[tuple[int, int]], count: int) -> dict[tuple[int, int], list[int]]:
    """Return the bends of long arrows, by the boxes that they connect."""
    after: dict[int, int] = {a: b for a, b in edges if a >= count}
    found = {}
    for a, b in edges:
        if a < count <= b:
            way = [b]
            while way[-1] >= count:
                way.append(after[way[-1]])
            found[a, way[-1]] = way[:-1]
    return found


def _line(centres: dict[int, tuple[float, float]], through: Sequence[int], a: int, b: int) -> list[tuple[float, float]]:
    (ax, ay), (bx, by) = centres[a], centres[b]
    return [(ax, ay + HEIGHT / 2), *(centres[p] for p in through), (bx, by - HEIGHT / 2)]
