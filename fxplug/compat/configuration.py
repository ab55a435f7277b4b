"""What is converted from another system as a configuration of fxplug: its model, its text, and notes for its reader."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from ..config.models.factory import build
from ..config.run_config import load_config
from ..core.spec.yaml_source import read_yaml

PLACEHOLDER = "REPLACE_ME"


@dataclass
class Conversion:
    """A configuration as YAML text, and what its reader should know: what was left out, what is another than before."""

    text: str
    notes: list[str] = field(default_factory=list)


def make_model_sections(model: str | None, folder: Path) -> dict[str, Any]:
    """Return the sections of the configuration other than its passes."""
    if model is None:
        return {"model": PLACEHOLDER}
    if not model.endswith((".yaml", ".yml")):
        return {"model": rebase_path(model, Path.cwd(), folder)}
    path = Path(model)
    read = read_yaml(path).data
    load_config({**read, "passes": []}, base=path.parent)
    head = {key: value for key, value in read.items() if key != "passes"}
    for key in ("model", "weights"):
        value = head.get(key)
        if isinstance(value, str):
            head[key] = rebase_path(value, path.parent, folder)
        elif isinstance(value, dict):
            head[key] = {k: rebase_path(v, path.parent, folder) if isinstance(v, str) else v for k, v in value.items()}
    return head


def build_on_meta(head: Mapping[str, Any], folder: Path) -> nn.Module:
    """Build the model of these sections, whose paths are below `folder`, on the meta device."""
    return build(load_config(dict(head), base=folder), device="meta")


def rebase_path(text: str, base: Path, folder: Path) -> str:
    """Rewrite a path below `base` as one below `folder`; return anything that is no path there unchanged."""
    here = base / text
    return os.path.relpath(here, folder) if here.exists() and ("/" in text or here.is_file() or here.is_dir()) else text


def dump_configuration(comments: Sequence[str], config: Mapping[str, Any], nested: tuple[type, ...]) -> str:
    """Dump a configuration as YAML below comments: lists without `nested` members in flow style, and no aliases."""

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

        def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> Any:
            plain = not any(isinstance(item, nested) for item in sequence)
            return super().represent_sequence(tag, sequence, flow_style=plain)

    text = yaml.dump(dict(config), Dumper=Dumper, sort_keys=False, width=120, allow_unicode=True)
    return "\n".join([*(f"# {comment}" for comment in comments), text])
