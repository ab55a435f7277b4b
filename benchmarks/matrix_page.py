"""The page and the file of `make matrix`: what was measured, what was not, and every reason once."""

from __future__ import annotations

import argparse
import datetime
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import record
from matrix_features import FEATURES
from matrix_models import MODELS

MARKS = {"equal": "=", "refused": "r", "fault": "F", "does not apply": " ", "": "."}
Lines = dict[str, dict[str, Any]]
INTRO = """# What composes

Which features of fxplug work together: each with each other one, in both orders, on a small model of each family.

- *equal*: both together give the result of the oracle, which has the adapting features alone, uncompiled, on one process. The
  tolerance is 1e-5 of the largest value in float32, 2e-2 in bfloat16 and autocast; or twice the oracle's own distance from
  float64, three times for gradients, as in FlashAttention's tests. Adapters have weights that are not zero.
- *refused*: an error of fxplug says why, and what to do.
- *fault*: anything else, and an adapter without an effect.

`make matrix` writes this page; `python benchmarks/matrix.py "unet: lora_slots + outline"` repeats a cell. Add a feature to
`benchmarks/matrix_features.py`, a model to `benchmarks/matrix_models.py`.
"""

NOTES = """`torch.compile` uses the backend `aot_eager`. Processes are simulated by threads. If a feature needs an adapter and
a cell has none before it, LoRA comes first.

## Pairs

The row is applied first, the column second: `=` equal, `r` refused, `F` fault, `.` not measured, blank: makes no sense on
this model. Below each grid are the features that it lacks, with the reason.
"""


def write(lines: Lines, features: Sequence[str], options: argparse.Namespace) -> None:
    """Print the counts, and write the page and the file that were asked for."""
    pairs = {model: _pairs(lines, model, features) for model in options.models}
    counts = _counts(pairs)
    print("\n".join(counts))
    if options.page:
        options.page.write_text(page(lines, features, options, pairs))
    if options.json:
        record.write(options.json, document(lines, features, options, pairs))


def outcome(lines: Lines, cell: str) -> str:
    """What is kept of a cell; one that is refused does not apply where one of its features is refused alone."""
    found = str(lines.get(cell, {}).get("outcome", ""))
    model, _, names = cell.rpartition(": ")
    several = names.split(" + ")
    alone = {lines.get(f"{model}: {name}", {}).get("outcome") for name in several} if len(several) > 1 else set()
    return "does not apply" if found == "refused" and alone & {"refused", "does not apply"} else found


def alone(lines: Lines, model: str, features: Sequence[str]) -> list[str]:
    return [name for name in features if outcome(lines, f"{model}: {name}") in ("equal", "fault", "")]


def _pairs(lines: Lines, model: str, features: Sequence[str]) -> dict[tuple[str, str], str]:
    """The outcome of each pair that makes sense, empty for one that was not measured."""
    names = alone(lines, model, features)
    found = {(a, b): outcome(lines, f"{model}: {a} + {b}") for a in names for b in names if a != b}
    return {pair: text for pair, text in found.items() if text != "does not apply"}


def _counts(pairs: dict[str, dict[tuple[str, str], str]]) -> list[str]:
    heads = ["model", "pairs that make sense", "measured", "equal", "refused", "fault", "equal, of measured (%)"]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    total: Counter[str] = Counter()
    for model, cells in pairs.items():
        count = Counter(cells.values())
        total += count
        rows.append(_row(f"{model}: {MODELS[model].what}" if model in MODELS else model, count))
    return [*rows, _row("**all**", total)]


def _row(name: str, count: Counter[str]) -> str:
    measured = count.total() - count[""]
    numbers = [count.total(), measured, count["equal"], count["refused"], count["fault"]]
    return f"| {name} | {' | '.join(map(str, numbers))} | {100 * count['equal'] / max(1, measured):.1f} |"


def grid(cells: dict[tuple[str, str], str], features: Sequence[str]) -> str:
    """Rows are done first, columns second."""
    used = [name for name in features if any(name in pair for pair in cells)]
    width = max(map(len, used), default=0) + 4
    heads = [" " * width + "".join(f"{number // 10 or ' '}" for number in range(1, len(used) + 1)),
             " " * width + "".join(f"{number % 10}" for number in range(1, len(used) + 1))]  # fmt: skip
    rows = ["".join(MARKS[cells[a, b]] if (a, b) in cells else " " for b in used) for a in used]
    named = (f"{n:2} {name:{width - 3}}{row}".rstrip() for n, (name, row) in enumerate(zip(used, rows, strict=True), 1))
    return "\n".join([*heads, *named])


def reasons(lines: Lines, kind: str) -> list[tuple[str, list[str]]]:
    """Sentences of an outcome, names and numbers in them taken as alike, with their cells; the commonest first."""
    found: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for cell, line in lines.items():
        if " + " in cell and outcome(lines, cell) == kind:
            first = re.sub(r"^\S+\.(?:yaml|py):\d+: ", "", line["text"]).split("\n")[0]
            found[re.sub(r"'[^']*'|\d[\d.e+-]*|\[[^\]]*\]|\b\w*_\w*\b", "*", first)[:80]].append({**line, "first": first})
    ordered = sorted(found.values(), key=lambda group: -len(group))
    return [(group[0]["first"], [line["cell"] for line in group]) for group in ordered]


def page(lines: Lines, features: Sequence[str], options: argparse.Namespace, pairs: dict[str, Any]) -> str:
    date = datetime.date.today().isoformat()
    commits = " and ".join(dict.fromkeys(line.get("commit", "") for line in lines.values()))
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "diffusers", "timm"))
    text = [INTRO, f"Measured {date} at {commits}, {versions}, seed {options.seed}, on a CPU.\n", *_counts(pairs), ""]
    missing = sum(list(cells.values()).count("") for cells in pairs.values())
    if missing:
        text.append(f"{missing} pairs are not measured; they are dots below, and do not count.\n")
    text += [*_others(lines, options), "## The features\n", "| feature | what the cell does |", "|---|---|"]
    text += [f"| {name} | {FEATURES[name].what} |" for name in features]
    text += ["", NOTES]
    for model, cells in pairs.items():
        text += [f"### {model}\n", "```", grid(cells, features), "```\n"]
        there = alone(lines, model, features)
        text += [f"- {name}: {_sentence(lines, f'{model}: {name}')}" for name in features if name not in there]
        text.append("")
    for kind, title in (("fault", "## Faults\n"), ("refused", "## Refusals\n")):
        found = reasons(lines, kind)
        text += [title, f"{len(found)} kinds: the number of cells, and the error of the first.\n" if found else "None.\n"]
        text += [f"- {len(cells)}: {_plain(sentence)} (`{cells[0]}`)" for sentence, cells in found]
        text.append("")
    return re.sub(r" +$", "", "\n".join(text), flags=re.MULTILINE).rstrip() + "\n"


def _others(lines: Lines, options: argparse.Namespace) -> list[str]:
    """Triples, and the newest classes."""
    triples = Counter(line["outcome"] for cell, line in lines.items() if cell.count(" + ") == 2)
    text = []
    if triples:
        text.append(f"Random triples: {_told(triples)}.\n")
    newest = Counter(outcome(lines, cell) for cell in lines if cell.startswith("zoo:") and cell.count(" + ") == 1)
    if newest:
        run = dict.fromkeys(cell.partition(": ")[0] for cell in lines if cell.startswith("zoo:") and " + " in cell)
        names = ", ".join(name.rpartition("/")[2] for name in sorted(run))
        text.append(f"Random pairs on {len(run)} recent diffusers classes without any model-specific code: {_told(newest)}. "
                    f"They are {names}.\n")  # fmt: skip
    return text


def _told(count: Counter[str]) -> str:
    rest = {kind: count[kind] for kind in ("equal", "refused", "fault")}
    return ", ".join(f"{number} {kind}" for kind, number in rest.items())


def _sentence(lines: Lines, cell: str) -> str:
    return _plain(re.sub(r"^\S+\.(?:yaml|py):\d+: ", "", lines[cell]["text"]).split("\n")[0])


def _plain(text: str) -> str:
    """Text as code where Markdown would read marks in it."""
    return re.sub(r"'([^']*)'", r"`\1`", text).replace("<", "&lt;") if re.search(r"[*_<\[]", text) else text


def document(lines: Lines, features: Sequence[str], options: argparse.Namespace, pairs: dict[str, Any]) -> dict[str, Any]:
    """Everything, small enough for a repository: a row of marks for each feature of each model, and the sentences."""
    marks = {
        model: {a: "".join(MARKS[cells[a, b]] if (a, b) in cells else " " for b in features) for a in features}
        for model, cells in pairs.items()
    }
    others = {cell: line["outcome"] for cell, line in lines.items() if cell.startswith("zoo:") or cell.count(" + ") != 1}
    texts = {kind: [{"text": text, "cells": cells} for text, cells in reasons(lines, kind)] for kind in ("fault", "refused")}
    return {"seed": options.seed, "features": list(features), "marks": MARKS, "pairs": marks, "others": others, **texts}


