"""The costs of ways to split a model as a picture: speedup over devices, one panel for each resolution."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape

from .prediction import Cost

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#888888", "#000000")
WIDE, HIGH, EDGE = 300, 240, 45


def kind(method: str) -> str:
    """A method without its numbers of processes: one line of the picture."""
    return re.sub(r" \d+", "", method)


def svg(rows: Sequence[Cost]) -> str:
    """A picture of costs. Of several ways of one kind (ulysses 2 x ring 4, ulysses 4 x ring 2) the fastest is drawn."""
    sides = list(dict.fromkeys(row.pixels for row in rows))
    kinds = list(dict.fromkeys(kind(row.method) for row in rows if row.devices > 1))
    most = max(row.devices for row in rows)
    top = max(2.0, *(row.speedup for row in rows))
    width, height = len(sides) * WIDE + EDGE, HIGH + 2 * EDGE + 16 * len(kinds)

    def x(panel: int, devices: int) -> float:
        return EDGE + panel * WIDE + (WIDE - EDGE) * math.log2(devices) / max(1.0, math.log2(most))

    def y(speedup: float) -> float:
        return EDGE + HIGH * (1 - speedup / top)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for panel, side in enumerate(sides):
        left, right = x(panel, 1), x(panel, most)
        out.append(f'<text x="{left}" y="{EDGE - 12}" font-size="13">{side} pixels: speedup over devices</text>')
        for step in range(5):
            value = top * step / 4
            out.append(f'<path d="M{left:.1f} {y(value):.1f}H{right:.1f}" stroke="#ddd"/>')
            out.append(f'<text x="{left - 6:.1f}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.1f}</text>')
        counts = sorted({row.devices for row in rows if row.pixels == side})
        out += [f'<text x="{x(panel, n):.1f}" y="{EDGE + HIGH + 16}" text-anchor="middle">{n}</text>' for n in counts]
        for index, name in enumerate(kinds):
            best: dict[int, float] = {1: 1.0}
            for row in rows:
                if row.pixels == side and row.devices > 1 and kind(row.method) == name:
                    best[row.devices] = max(best.get(row.devices, 0.0), row.speedup)
            points = " ".join(f"{x(panel, n):.1f},{y(best[n]):.1f}" for n in sorted(best))
            colour = COLOURS[index % len(COLOURS)]
            out.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
    for index, name in enumerate(kinds):
        line = EDGE + HIGH + 40 + 16 * index
        out.append(f'<path d="M{EDGE} {line - 4}h22" stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="2"/>')
        out.append(f'<text x="{EDGE + 28}" y="{line}">{escape(name)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"
