"""The card of a pushed rewrite, README.md: what it is made of, what its passes changed, and how it was checked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from huggingface_hub import ModelCard, ModelCardData

from ..config.flow import load_run_record
from ..core.errors import FxplugError
from ..core.ir.text import diff, fold_diff
from ..core.ir.traced_module import TracedModule
from ..core.rewriter.removing import remove

LONGEST = 200  # lines of a diff
SITES = 20
FENCE = re.compile(r"`{3,}")


def make_card(module: TracedModule, name: str, base: str | None, license: str | None) -> str:
    """Return the text of README.md for a module in the repository `name`: front matter, passes with their diffs, checks."""
    data = ModelCardData(base_model=base, license=license, library_name="fxplug", tags=["fxplug"])
    if base is not None:
        data["base_model_relation"] = "adapter"
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(_lines(module, name, base))))


def _lines(module: TracedModule, name: str, base: str | None) -> Iterator[str]:
    of = f" of [{base}](https://huggingface.co/{base})" if base else ""
    yield f"# {name.rpartition('/')[2]}\n"
    yield f"A rewrite{of}: a traced PyTorch model with the passes below, as `fxplug.save` writes it. It contains no code.\n"
    yield f'```python\nimport fxplug\n\nmodule = fxplug.load("{name}")\n```\n'
    passes = module.meta.get("passes", [])
    yield "## Passes\n" if passes else "No pass is applied to it.\n"
    for entry in passes:
        yield f"### {entry['name']}\n"
        if about := " ".join(str(entry.get("about") or "").split()):
            yield f"{about}\n"
        text = _diff_of(module, entry["name"])
        yield _fenced(text, "diff") if text else _fenced(_sites(entry), "text")
    record = load_run_record(module) or {}
    if checks := record.get("checks"):
        yield "## Checks\n\nWhat `fxplug.verify` found when the passes were applied:\n"
        yield "| check | result | |\n|---|---|---|"
        yield from (f"| {_cell(row['name'])} | {_cell(row['status'])} | {_cell(row['detail'])} |" for row in checks)
        yield ""


def _diff_of(module: TracedModule, name: str) -> str:
    """Return what a pass changed; "" for one that cannot be taken out alone, which is how the model before it is known."""
    record = load_run_record(module)
    if record is not None and record["passes"] == [name]:
        return fold_diff("".join(record["text"]))
    try:
        return fold_diff(diff(remove(module, name), module))
    except FxplugError:
        return ""


def _sites(entry: Mapping[str, object]) -> str:
    """Return the places of a pass as text."""
    found = entry["sites"]
    assert isinstance(found, list)
    rows = [f"{site['place']} {site['path']}: {site['block']}" for site in found[:SITES]]
    return "\n".join([*rows, *([f"... {len(found) - SITES} more"] if len(found) > SITES else [])]) + "\n"


def _fenced(text: str, language: str) -> str:
    """Return a text as a block of code, in a fence longer than any in it."""
    lines = text.rstrip("\n").split("\n")
    left = len(lines) - LONGEST
    shown = "\n".join([*lines[:LONGEST], *([f"... {left} more lines: fxplug.diff shows them"] if left > 0 else [])])
    fence = "`" * (1 + max([2, *map(len, FENCE.findall(shown))]))
    return f"{fence}{language}\n{shown}\n{fence}\n"


def _cell(value: object) -> str:
    """Return a text within a table."""
    return " ".join(str(value).split()).replace("|", "\\|")
