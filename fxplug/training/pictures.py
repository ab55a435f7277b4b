"""Pictures of a run as PNG files: grids of samples, and the curves; videos as animated WebP."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ..core.writing import replace_file

GRAY: dict[str, Any] = {"color": "tab:gray"}
UNITS = {"acc": "accuracy (%)"}  # of what tests measure


def make_grid(images: Tensor) -> Tensor:
    """Arrange images [n, c, h, w] in [0, 1], c being 1 or 3, as one uint8 image [3, h, w] with up to 8 of them in a row."""
    from torchvision.utils import make_grid

    clean = torch.nan_to_num(images.detach().float().cpu()).clamp(0, 1)
    rows = math.ceil(len(clean) / 8)
    whole: Tensor = make_grid(clean, nrow=math.ceil(len(clean) / max(rows, 1)), padding=2)
    return (whole * 255).round().to(torch.uint8)


def save_picture(picture: Tensor, path: Path) -> None:
    """Save a uint8 image [3, h, w] as PNG. Raises OSError, and leaves no partial file, when the disk is full."""
    image = Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy())
    with replace_file(path) as beside:
        image.save(beside, format="png")


def save_animation(frames: Sequence[Tensor], path: Path) -> None:
    """Save uint8 images [3, h, w] as the frames of an animated WebP, 8 a second. Raises OSError as `save_picture` does."""
    images = [Image.fromarray(frame.permute(1, 2, 0).contiguous().numpy()) for frame in frames]
    with replace_file(path) as beside:
        images[0].save(beside, format="webp", save_all=True, append_images=images[1:], duration=125, loop=0, lossless=True)


def save_curves(history: Sequence[Mapping[str, Any]], tests: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Save curves as PNG: the loss of every step, its running mean and that of tests; other test metrics, each kind on its own
    axes; and the learning rate where it changes. Returns False without steps."""
    losses = [(r["step"], r["loss"]) for r in history if isinstance(r.get("loss"), (int, float)) and math.isfinite(r["loss"])]
    rates = [(r["step"], r["lr"]) for r in history if isinstance(r.get("lr"), (int, float))]
    if not losses:
        return False
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {"loss": {}}
    for name in sorted({name for test in tests for name in test["test"]}):
        given = [(test["step"], test["test"][name]) for test in tests if isinstance(test["test"].get(name), (int, float))]
        kind = re.sub(r"\d+$", "", name)  # acc1 and acc5 are of one kind
        panels.setdefault(UNITS.get(kind, kind), {})[f"test {name}" if kind == "loss" else name] = given
    if len({rate for _, rate in rates}) > 1:
        panels["learning rate"] = {"": rates}
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.6 + 2.2 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True, height_ratios=[2, *[1] * (len(panels) - 1)])[:, 0]
    axes[0].plot(*zip(*losses, strict=True), color="tab:blue", alpha=0.35, linewidth=0.8, label="loss")
    axes[0].plot(*zip(*smoothed(losses), strict=True), color="tab:blue", linewidth=1.8, label="running mean")
    for axis, (label, curves) in zip(axes, panels.items(), strict=True):
        for name, given in curves.items():
            if given:
                axis.plot(*zip(*given, strict=True), label=name or None, **({"marker": "o", "markersize": 3} if name else GRAY))
        axis.set_ylabel(label)
        axis.grid(alpha=0.25)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False)
    axes[-1].set_xlabel("step")
    with replace_file(path) as beside:
        figure.savefig(beside, format="png", dpi=110)
    return True


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the exponential running mean over about a twentieth of the points, without its bias to the first."""
    keep = 1 - 1 / max(1.0, len(points) / 20)
    total, weight, found = 0.0, 0.0, []
    for x, y in points:
        total, weight = keep * total + (1 - keep) * y, keep * weight + (1 - keep)
        found.append((x, total / weight))
    return found
