"""What `fxplug export` writes for other tools: adapter files, and checkpoints of the merged model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fxplug

from ..config.cli.verbs import load_saved, show_progress
from ..config.saved_config import read_saved_config
from ..core.errors import SpecError, quote

ADAPTERS = ("peft", "diffusers", "kohya", "comfy", "lycoris", "fxplug")
CHECKPOINTS = ("diffusers", "timm", "safetensors")
TO_TOOLS = tuple(dict.fromkeys((*ADAPTERS, *CHECKPOINTS)))


@dataclass(frozen=True)
class ToolOptions:
    """The options of `fxplug export` for other tools, by the names that they have there."""

    adapter: str | None
    passes: list[str] | None
    partial: bool
    part: str | None
    merge: str | None
    first_names: bool


def export_to_tool(folder: Path, to: str, out: Path | None, options: ToolOptions, allow: list[str] | None) -> None:
    """Write an adapter of a saved rewrite, or with `merge`, or for timm and safetensors, its model, and print the result."""
    if out is None:
        raise SpecError(f"give --out, the place to write the {to} file to")
    adapter, passes, partial, merge = options.adapter, options.passes, options.partial, options.merge
    whole = merge is not None or to not in ADAPTERS
    if whole and to not in CHECKPOINTS:
        raise SpecError(f"--merge writes a whole model, which {to} does not support: use --to {', '.join(CHECKPOINTS)}")
    if odd := ("--adapter" if adapter else "--pass" if passes else "--partial" if partial else "") if whole else "":
        raise SpecError(f"{odd} is for adapter files, and this writes a whole model: choose what goes into it with --merge")
    if options.first_names and not whole:
        raise SpecError("--first-names is for a whole model: the format of an adapter file sets the names of its layers")
    with show_progress("load"):
        module = load_saved(str(folder), None, allow)
    if whole:
        with show_progress(f"write for {to}"):
            strengths = _strengths(merge) if merge is not None else None
            done = fxplug.save_checkpoint(module, out, to=to, merge=strengths, first=options.first_names)
        print(f"{done}\nsaved in {done.path}")
        return
    config = read_saved_config(folder) or {}
    kept = {key: config[key] for key in ("passes", "train", "data", "seed") if key in config}
    about = {"fxplug.config": json.dumps(kept, sort_keys=True, default=str)} if kept else {}
    slotted = [entry["name"] for entry in module.meta.get("passes", []) if entry.get("slots")]
    if adapter is None and slotted and not passes and len(module.adapters.names) == 1:
        (adapter,) = module.adapters.names
    how: dict[str, Any] = {"as_": to, "part": options.part, "partial": partial, "about": about}
    if adapter is not None:
        saved = module.adapters.save(adapter, out, **how)
    elif slotted and not passes and len(slotted) == len(module.meta["passes"]):
        there = ", ".join(module.adapters.names) or "none"
        raise SpecError(f"give --adapter, the name of the adapter to write: there are {there}")
    else:
        saved = fxplug.save_adapter(module, out, passes=passes, name=folder.name, **how)
    print(f"{len(saved.layers)} layers")
    for path, why in saved.left_out.items():
        print(f"left out: '{path}' {why}")
    print(f"saved in {saved.path}")


def _strengths(text: str) -> dict[str, float]:
    """Parse `ink=0.8,film=0.3` as numbers by name. Raises SpecError for anything else."""
    made: dict[str, float] = {}
    for each in text.split(","):
        name, mark, weight = each.strip().rpartition("=") if "=" in each else (each.strip(), "", "1")
        try:
            value = float(weight)
        except ValueError:
            raise SpecError(f"--merge: {quote(each)}: the strength of '{name}' must be a number, such as {name}=0.8") from None
        if not name or name in made:
            raise SpecError(f"--merge: {quote(each)} {'is given twice' if name else 'names no adapter'}")
        made[name] = value
    return made
