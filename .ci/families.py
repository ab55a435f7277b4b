"""Write a page for each family of models from its recipes: `python .ci/families.py docs/families [NAME ...]`.

`make pages` runs it, with `tests` in PYTHONPATH: the models at their full size are there.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import full_size
import yaml

from fxplug.core.spec.pass_file import list_recipes

INDEX = """# Families of models

Written by `make pages` from the recipes that ship. Each page has the layers to adapt, the YAML, the memory of a training, the
files that users exchange, and known limits.

A model without a page trains, too: `fxplug recipes FOLDER` says what its pipeline does, `fxplug sites CONFIG` names its layers.

| family | recipe | trains | GB of the recipe |
|---|---|---|---|
{rows}
## Memory

The figures are computed, not measured. The recipe's model is built and traced on the meta device, without weights. The sum has:

- the weights, in the bytes that the base has,
- 16 bytes for each trainable parameter,
- the results that the backward pass needs,
- 1 GB for the device.

[Training](../guides/training.md#begin-with-a-recipe) has the formula. "Cached" is a run that encodes pictures and captions
[once](../guides/training.md#cache-latents-and-text-embeddings): text encoders and VAE leave the GPU before the first step.
They fill it while they encode.
"""
ABOUT = "Train it: layers to adapt, the YAML, memory, files, limits. `make pages` writes this page from"
COMPUTED = "computed on the meta device, not measured ([how](index.md#memory))"
TABLE = {  # the base: how a configuration asks for it
    None: "bfloat16", "int8": "`quantize: int8`", "nf4": "`quantize: nf4`",
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A page: its title, the recipes, which files users exchange, and known limits."""

    title: str
    recipes: list[str]
    files: str
    limits: list[str]


DATA = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
FAMILIES = {name: Family(**data) for name, data in DATA.items()}


def make_page(name: str) -> tuple[str, str]:
    """Make the page of a family. Returns it and its rows in the index."""
    family, index = FAMILIES[name], ""
    parts = [f"# {family.title}", f"{ABOUT} {_join(f'`{each}`' for each in family.recipes)}."]
    for recipe in family.recipes:
        text, traced = list_recipes()[recipe].read_text("utf-8"), full_size.trace_recipe(recipe)
        about, *comments = (line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
        parts += [
            f"## Train {recipe}: {about.split()[0]}",
            f"{about}. {' '.join(line for line in comments if line and not line.startswith('fxplug'))}",
            "<!-- not run: the model is not here -->\n```console\n"
            + "\n".join(f"$ {line}" for line in comments if line.startswith("fxplug")) + "\n```",
            "```yaml\n" + "".join(f"{line}\n" for line in text.splitlines() if not line.startswith("#")) + "```",
            f"### Layers to adapt in {recipe}", _layers(traced), f"### Memory of {recipe}", _memory(recipe, traced),
        ]  # fmt: skip
        gigabytes = re.search(r"(\d+ GB.*)", about)
        size = gigabytes[1] if gigabytes else ""
        index += f"| [{family.title}]({name}.md) | `{recipe}` | {about.partition(':')[0]} | {size} |\n"
    limits = "\n".join(f"- {line}" for line in family.limits)
    parts += ["## Files and limits", f"Files that its users exchange: {family.files}.", limits]
    return "\n\n".join(parts) + "\n", index


def _layers(traced: Any) -> str:
    rows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for sites in traced.sites.values():
        for site in sites:
            last = re.search(r"[^.]+(\.\d+)*$", site.path)
            shape = f"{_last(site.x.shape)} to {_last(site.y.shape)}" if site.x and site.y else ""
            rows[last[0] if last else site.path, site.classes[0] if site.classes else ""].append(shape)
    table = [
        f"| `{name}` | {kind} | {len(shapes)} | {_join(dict.fromkeys(shapes))} |" for (name, kind), shapes in rows.items()
    ]  # fmt: skip
    count = f"{sum(map(len, traced.sites.values()))} layers, {traced.trains / 1e6:.2f} million trainable parameters."
    return "\n".join([count, "", "| name | class | layers | features |", "|---|---|---|---|", *table])


def _last(shape: Any) -> int:
    """Return the features of a value: channels of pictures, the last dimension of tokens."""
    return shape[1] if len(shape) == 4 else shape[-1]


def _memory(recipe: str, traced: Any) -> str:
    if traced.config.model.kind != "pipeline":
        rows = [
            f"| float32 | {batch} | "
            + " | ".join(_gigabytes(recipe, traced, None, checkpointing, batch) for checkpointing in (False, True)) + " |"
            for batch in (1, 32)
        ]  # fmt: skip
        head = "| base | batch | GB | GB with checkpointing |\n|---|---|---|---|"
        return "\n".join([f"At {traced.config.data.size} px, {COMPUTED}:", "", head, *rows])
    rows = [
        f"| {said} | " + " | ".join(
            _gigabytes(recipe, traced, quantize, checkpointing, 1, encoded) for encoded in (False, True)
            for checkpointing in (False, True)) + " |"
        for quantize, said in TABLE.items() if quantize is None or "lora" in traced.sites
    ]  # fmt: skip
    head = "| base | GB | GB with checkpointing | GB, cached | GB, cached, with checkpointing |\n|---|---|---|---|---|"
    size = traced.config.data.size
    return "\n".join([f"At {size} px, batch 1, {COMPUTED}:", "", head, *rows])


def _gigabytes(recipe: str, traced: Any, quantize: str | None, checkpointing: bool, batch: int, encoded: bool = False) -> str:
    made = 32 if traced.config.model.kind != "pipeline" else 1
    kept = full_size.results(traced.module, checkpointing) * (1 - batch / made)
    return f"{(full_size.count_bytes(recipe, traced, quantize, checkpointing, encoded=encoded) - kept) / 1e9:.1f}"


def _join(items: Any) -> str:
    items = list(items)
    shown = items[:4] + ["..."] * (len(items) > 4)
    return ", ".join(shown)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    folder, chosen = Path(sys.argv[1]), sys.argv[2:] or [*FAMILIES]
    rows = ""
    for each in chosen:
        page, lines = make_page(each)
        (folder / f"{each}.md").write_text(page, "utf-8")
        rows += lines
    if chosen == [*FAMILIES]:
        (folder / "index.md").write_text(INDEX.replace("{rows}", rows), "utf-8")
