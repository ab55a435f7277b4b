"""What a training run's folder tells: its log, its curves, its samples. Read as a stranger's: within bounds, and never run."""

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

PICTURES = 8  # of the samples over time: the first, the last and those evenly between
EPOCHS = 2_000  # rows of the table
SIDE, WIDE = 320, 1600  # pixels of a sample and of the curves at most
PIXELS = 50_000_000  # of a picture that is read


def read_run(folder: Path) -> dict[str, Any] | None:
    """Return a run's part of the page: facts, curves, epochs, pictures and notes; None for a folder without a run."""
    log = folder / "log.jsonl"
    if not log.is_file():
        if not (folder / "checkpoints").is_dir():
            return None
        empty: dict[str, Any] = {"facts": {}, "curves": None, "epochs": [], "notes": []}
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
        "curves": _picture(folder / "loss.png"),
        "epochs": _epochs(steps, tests),
        "pictures": _pictures(folder),
        "notes": [str(r["note"]) for r in records if "note" in r][:50],
    }


def _records(data: bytes) -> list[dict[str, Any]]:
    """Return the records of the complete lines; a killed process may leave a partial one."""
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
    """Return a finite number; None for anything else."""
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


def _epochs(steps: Sequence[Mapping[str, Any]], tests: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return a row for each epoch: steps, mean loss, last learning rate, seconds, and the metrics of the test after it."""
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
        if picture := _picture(file, SIDE * 2):
            found.append({"step": int(step) if step.isdigit() else step, **picture})
    return found


def _picture(file: Path, side: int = WIDE) -> dict[str, Any] | None:
    """Return a PNG file embedded in a page, its longer side at most `side`; None if it cannot be read."""
    try:
        with Image.open(io.BytesIO(read_bytes(file, DEFAULT.json))) as image:
            if image.width * image.height > PIXELS or image.format != "PNG":
                return None
            small = image.convert("RGB")
            small.thumbnail((side, side))
            data = io.BytesIO()
            small.save(data, format="webp", quality=80)
    except (FxplugError, OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    text = base64.b64encode(data.getvalue()).decode()
    return {"width": small.width, "height": small.height, "data": f"data:image/webp;base64,{text}"}
