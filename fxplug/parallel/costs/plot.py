"""The costs of ways to split a model as a picture: speedup over devices, one panel for each resolution."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from .prediction import Cost


def kind(method: str) -> str:
    """Return a method without its numbers of processes, which is one line of the picture."""
    return re.sub(r" \d+", "", method)


def save_picture(rows: Sequence[Cost], path: Path) -> None:
    """Plot costs. Of several ways of one kind (ulysses 2 x ring 4, ulysses 4 x ring 2) the fastest is drawn."""
    from matplotlib.figure import Figure

    sides = list(dict.fromkeys(row.pixels for row in rows))
    kinds = list(dict.fromkeys(kind(row.method) for row in rows if row.devices > 1))
    figure = Figure(figsize=(4 * len(sides), 4 + 0.2 * len(kinds)), layout="constrained")
    axes = figure.subplots(1, len(sides), squeeze=False, sharey=True)[0]
    for axis, side in zip(axes, sides, strict=True):
        for name in kinds:
            best: dict[int, float] = {1: 1.0}
            for row in rows:
                if row.pixels == side and row.devices > 1 and kind(row.method) == name:
                    best[row.devices] = max(best.get(row.devices, 0.0), row.speedup)
            axis.plot(sorted(best), [best[count] for count in sorted(best)], label=name)
        axis.set_xscale("log", base=2)
        axis.set(title=f"{side} pixels", xlabel="devices", ylabel="speedup")
        axis.grid(alpha=0.25)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", frameon=False)
    figure.savefig(path, format=path.suffix[1:] or "svg")
