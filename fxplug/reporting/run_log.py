"""What a training run's folder tells: its log, its samples. Read as a stranger's: within bounds, and never run."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from ..core.errors import DEFAULT, FxplugError
from ..core.reading import read_bytes

POINTS = 400  # of one curve
PICTURES = 8  # of the samples over time: the first, the last and those evenly between
EPOCHS = 2_000  # rows of the table
SIDE = 320  # pixels of a picture at most
PIXELS = 50_000_000  # of a picture that is read
NO_NUMBERS = {"nan", "inf", "-inf"}


def run_of(folder: Path) -> dict[str, Any] | None:
    """What a page says of a run: facts, curves, epochs, pictures and notes; None for a folder that is of no run."""
    log = folder / "log.jsonl"
    if not log.is_file():
        if not (folder / "checkpoints").is_dir():
            return None
        empty: dict[str, Any] = {"facts": {}, "curves": [], "epochs": [], "notes": []}
        return {"note": "This run has no log.", **empty, "pictures": _pictures(folder)}
    note = ""
    try:
        records = _records(read_bytes(log, DEFAULT.json))
    except FxplugError as error:
        records, note = [], str(error)
    steps = [r for r in records if _number(r.get("loss")) is not None and _number(r.get("step")) is not None]
    tests = [r for r in records if isinstance(r.get("test"), dict)]
    if not steps:
        note = note or "No step of this run is in its log."
    return {
        "note": note,
        "facts": _facts(steps, tests),
        "curves": _curves(steps, tests),
        "epochs": _epochs(steps, tests),
        "pictures": _pictures(folder),
        "notes": [str(r["note"]) for r in records if "note" in r][:50],
    }


def _records(data: bytes) -> list[dict[str, Any]]:
    """The lines that are whole; a killed process leaves a half one."""
    found = []
    for line in data.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            found.append(record)
    return found


def _number(value: Any) -> float | None:
    """A number; None for what is none, or not finite."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e300 and math.isfinite(value) else None


def _facts(steps: Sequence[Mapping[str, Any]], tests: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    facts = {}
    if steps:
        seconds = sum(_number(r.get("seconds")) or 0 for r in steps)
        facts = {"steps": f"{len(steps):,}", "first loss": f"{steps[0]['loss']:.4g}", "last loss": f"{steps[-1]['loss']:.4g}"}
        facts |= {"seconds in steps": f"{seconds:.4g}"} if seconds else {}
    for name, value in (tests[-1]["test"] if tests else {}).items():
        if _number(value) is not None:
            facts[f"test {name}"] = f"{value:.4g}"
    return facts


def _curves(steps: Sequence[Mapping[str, Any]], tests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    loss = [(float(r["step"]), float(r["loss"])) for r in steps if _number(r["step"]) is not None]
    found = [_curve("Loss", {"each step": loss, "running mean": smoothed(loss)}, faint="each step")]
    rates: dict[str, list[tuple[float, float]]] = {}
    for record in steps:
        for name, value in record.items():
            if name == "lr" or name.startswith("lr_") or name.startswith("lr/"):
                if isinstance(value, dict):
                    for inner, one in value.items():
                        _take(rates, f"{inner}", record["step"], one)
                else:
                    _take(rates, name, record["step"], value)
    found.append(_curve("Learning rate", rates))
    names = dict.fromkeys(str(name) for test in tests for name in test["test"])
    for name in list(names)[:8]:
        points: dict[str, list[tuple[float, float]]] = {}
        for test in tests:
            _take(points, name, test.get("step"), test["test"].get(name))
        found.append(_curve(f"Test: {name}", points))
    return [curve for curve in found if curve is not None]


def _take(into: dict[str, list[tuple[float, float]]], name: str, step: Any, value: Any) -> None:
    x, y = _number(step), _number(value)
    if x is not None and y is not None:
        into.setdefault(name, []).append((x, y))


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The exponential running mean over about a twentieth of the points, without its bias to the first."""
    keep = 1 - 1 / max(1.0, len(points) / 20)
    total, weight, found = 0.0, 0.0, []
    for x, y in points:
        total, weight = keep * total + (1 - keep) * y, keep * weight + (1 - keep)
        found.append((x, total / weight))
    return found


def _curve(title: str, lines: Mapping[str, Sequence[tuple[float, float]]], faint: str = "") -> dict[str, Any] | None:
    """Lines in one frame of 320 to 150: their paths, and what stands at its ends."""
    given = {name: _thinned(points) for name, points in lines.items() if points}
    every = [point for points in given.values() for point in points]
    if len({x for x, _ in every}) < 2:
        return None  # one number is no curve: it stands among the facts
    (left, right), (low, high) = ((min(values), max(values)) for values in zip(*every, strict=True))
    if low == high:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    across, up = right - left, high - low

    def path(points: Sequence[tuple[float, float]]) -> str:
        places = [(46 + 268 * (x - left) / across, 124 - 114 * (y - low) / up) for x, y in points]
        return "".join(f"{'L' if index else 'M'}{x:.1f} {y:.1f}" for index, (x, y) in enumerate(places))

    last = next(reversed(given.values()))[-1][1]
    return {
        "title": title, "top": f"{high:.3g}", "bottom": f"{low:.3g}", "left": f"step {left:g}", "right": f"{right:g}",
        "said": f"from {every[0][1]:.3g} at step {left:g} to {last:.3g} at step {right:g}",
        "lines": [{"name": name, "path": path(points), "faint": name == faint} for name, points in given.items()],
    }  # fmt: skip


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `POINTS` of them: of each part the lowest and the highest."""
    if len(points) <= POINTS:
        return list(points)
    parts = POINTS // 2
    found = [points[0]]
    for index in range(parts):
        part = points[index * len(points) // parts : (index + 1) * len(points) // parts]
        found += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return [*found, points[-1]]


def _epochs(steps: Sequence[Mapping[str, Any]], tests: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """A row for each epoch: steps, mean loss, last learning rate, seconds, and what the test after it gave."""
    groups: dict[int, list[Mapping[str, Any]]] = {}
    for record in steps:
        if isinstance(epoch := record.get("epoch"), int):
            groups.setdefault(epoch, []).append(record)
    names = list(dict.fromkeys(name for test in tests for name in test["test"]))[:8]
    rows = []
    for epoch, records in sorted(groups.items())[:EPOCHS]:
        rate = _number(records[-1].get("lr"))
        steps_of = {record["step"] for record in records}
        test: dict[str, Any] = next((r["test"] for r in reversed(tests) if _number(r.get("step")) in steps_of), {})
        rows.append({
            "epoch": str(epoch + 1),
            "steps": str(len(records)),
            "loss": f"{sum(float(r['loss']) for r in records) / len(records):.4g}",
            "lr": "" if rate is None else f"{rate:.4g}",
            "seconds": f"{sum(_number(r.get('seconds')) or 0 for r in records):.4g}",
            **{f"test {name}": f"{test[name]:.4g}" if _number(test.get(name)) is not None else "" for name in names},
        })  # fmt: skip
    return rows


def _pictures(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "samples").glob("step-*.png"))
    if len(files) > PICTURES:
        files = [files[round(index * (len(files) - 1) / (PICTURES - 1))] for index in range(PICTURES)]
    found = []
    for file in files:
        step = file.stem.removeprefix("step-")
        try:
            with Image.open(io.BytesIO(read_bytes(file, DEFAULT.json))) as image:
                if image.width * image.height > PIXELS or image.format != "PNG":
                    continue
                small = image.convert("RGB")
                small.thumbnail((SIDE * 2, SIDE * 2))
                data = io.BytesIO()
                small.save(data, format="webp", quality=80)
        except (FxplugError, OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            continue
        text = base64.b64encode(data.getvalue()).decode()
        found.append({"step": int(step) if step.isdigit() else step, "width": small.width, "height": small.height,
                      "data": f"data:image/webp;base64,{text}"})  # fmt: skip
    return found
