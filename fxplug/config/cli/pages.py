"""A page of text about a pass: what it does, its parameters and inputs, and what it changes in a small model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from ...core.errors import SpecError
from ...core.ir.containers import count_pass_parameters as counted
from ...core.ir.text import diff
from ...core.reading import make_reporter, report_errors
from ...core.spec.pass_file import REQUIRED, Draft, list_shipped, open_pass
from ...core.spec.rules import NUMERICS
from ..flow import Result, rewrite
from ..schema import list_parameters

LINES = 24  # so much of the diff is shown
SMALL: dict[str, Any] = {"timm": "vit_tiny_patch16_224", "options": {"img_size": 32, "depth": 2, "num_classes": 10}}


def make_page(name: str | Path) -> str:
    """Return the page of one pass as Markdown; its example is under `example` in the pass file.

    Raises SpecError for a pass that does not exist, or whose example does not work.
    """
    draft = open_pass(name)
    data = draft.source.data
    example = data.get("example") or {}
    given = example.get("with") or {}
    missing = [key for key, value in draft.params.items() if value == REQUIRED and key not in given]
    if missing:
        raise SpecError(f"pass '{draft.name}' requires '{missing[0]}', and its 'example' does not give it")
    config = {
        "model": example.get("model", SMALL),
        "device": "meta",
        **({"inputs": example["inputs"]} if "inputs" in example else {}),
        "passes": [{str(name): given} if given else str(name)],
    }
    result = rewrite(config, dry_run=True)
    title = name if name in list_shipped("passes") else draft.name
    sections = [f"# {title}", str(data.get("about", "")), *_numerics(data), *_papers(data), *_parameters(draft)]
    return "\n\n".join([*sections, *_inputs(result), *_example(str(name), given, result)]) + "\n"


def write(folder: str | Path) -> list[Path]:
    """Write the pages of all shipped passes into a folder, one file each."""
    files = []
    for name in list_shipped("passes"):
        file, text = Path(folder) / f"{name}.md", make_page(name)
        with report_errors(make_reporter(file, SpecError), "cannot be written"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")
        files.append(file)
    return files


def _numerics(data: dict[str, Any]) -> list[str]:
    return [f"Numerics: {data['numerics']} ({NUMERICS[data['numerics']]})."] if "numerics" in data else []


def _papers(data: dict[str, Any]) -> list[str]:
    numbers = dict.fromkeys(re.findall(r"arXiv (\d{4}\.\d{4,5})", json.dumps(data)))
    return ["Paper: " + ", ".join(f"[arXiv {n}](https://arxiv.org/abs/{n})" for n in numbers)] if numbers else []


def _parameters(draft: Draft) -> list[str]:
    rows = [
        f"| `{key}` | {'required' if default == REQUIRED else f'`{json.dumps(default)}`'} | {text} |"
        for key, default, text, _ in list_parameters(draft)
        if key in draft.params
    ]
    return ["\n".join(["| parameter | default | |", "|---|---|---|", *rows])] if rows else []


def _inputs(result: Result) -> list[str]:
    rows = []
    for node in (n for n in result.module.graph.nodes if n.op == "placeholder" and "pass" in n.meta):
        default = "required" if node.args[0] is None else f"`{node.args[0]}`"
        check = next(u for u in node.users if len(u.args) > 3)
        shape = check.args[3] or "any shape"
        rows.append(f"| `{node.target}` | {default} | {shape} |")
    return ["\n".join(["| new input of the model | default | shape |", "|---|---|---|", *rows])] if rows else []


def _example(name: str, given: dict[str, Any], result: Result) -> list[str]:
    entry = result.module.meta["passes"][-1]
    new = "leaves the output `torch.equal` when new" if entry["neutral"] else "changes the output"
    if result.plan is not None:
        new = "gives what one process gives, up to the order of sums"
    flow = yaml.safe_dump(given, sort_keys=False, default_flow_style=True, width=1000).rstrip()
    written = f"- {name}: {flow}" if given else f"- {name}"
    lines = diff(result.base, result.module).splitlines()
    more = [f"... {len(lines) - LINES} more lines"] if len(lines) > LINES else []
    sites = len(entry["sites"])
    return [
        "## Example",
        f"```yaml\npasses:\n  {written}\n```",
        f"On a small {result.base.classes[0]}: {sites} site{'s' * (sites != 1)}; it {new}. {counted(result.module)}.",
        "\n".join(["```diff", *(re.sub("^@@.*", "@@", line) for line in lines[:LINES]), *more, "```"]),
    ]
