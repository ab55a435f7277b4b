"""The JSON Schema of a configuration, and the page of its keys: every key with what it is, its default and an example."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from .explained import KEYS, SETTINGS, parameter
from .model_section import Constant, ModelKeys, Tensor, WeightKeys
from .pass_file import REQUIRED, Draft, open_pass
from .run_config import Config
from .shipped import shipped

PARTS: dict[str, type[BaseModel]] = {"Model": ModelKeys, "Weights": WeightKeys, "Tensor": Tensor, "Constant": Constant}
PLACES = {
    "Config": "A configuration", "Model": "`model`, where it is a mapping", "Weights": "`weights`, where it is a mapping",
    "Tensor": "`inputs`, a tensor", "Constant": "`inputs`, a constant", "Train": "`train`", "Save": "`train.save`",
    "Log": "`train.log`", "Test": "`train.test`", "Parallel": "`train.parallel`", "Data": "`data`", "Buckets": "`data.buckets`",
    "Export": "`export`",
}  # fmt: skip


SHAPES: Mapping[str, Any] = {
    "name": {"type": "string"},
    "lr": {"type": ["number", "null"], "minimum": 0},
    "weight_decay": {"type": ["number", "null"], "minimum": 0},
    "expect": {"type": ["string", "integer", "null"]},
}  # of the settings whose default does not say it


def schema() -> dict[str, Any]:
    """The JSON Schema of a configuration; it knows the parameters of every shipped pass."""
    made = copy.deepcopy(Config.model_json_schema())  # parts of it are the constants of annotations
    parts = {"Config": made, **made["$defs"]}
    for name, section in PARTS.items():
        parts[name] = made["$defs"][name] = section.model_json_schema()
    for name, part in parts.items():
        _explain(part, name)
    properties = made["properties"]
    for key, name, kinds in (("model", "Model", ["string"]), ("weights", "Weights", ["string", "null"])):
        properties[key].pop("type", None)
        properties[key]["anyOf"] = [*({"type": kind} for kind in kinds), {"$ref": f"#/$defs/{name}"}]
    constant = properties["inputs"]["additionalProperties"]
    constant["anyOf"] = [{"$ref": "#/$defs/Tensor"}, {"$ref": "#/$defs/Constant"}, {}]
    names = {name: _pass(open_pass(path)) for name, path in shipped("passes").items()}
    one = {
        "type": "object",
        "minProperties": 1,
        "maxProperties": 1,
        "properties": names,
        "patternProperties": {r"\.ya?ml$": {"type": ["object", "null"]}},
        "additionalProperties": False,
    }
    text = {"anyOf": [{"enum": list(names)}, {"type": "string", "pattern": r"\.ya?ml$"}]}
    properties["passes"]["items"] = {"anyOf": [text, one]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def _explain(part: dict[str, Any], name: str) -> None:
    for key, (text, example) in KEYS[name].items():
        found = part["properties"][key]
        found["description"] = _described(text, found.get("default", REQUIRED), example)
        found["examples"] = [example]


def _described(text: str, default: Any, example: Any) -> str:
    told = "Required." if default == REQUIRED else f"Default: {_plain(default)}."
    return f"{text[:1].upper()}{text[1:]}. {told} Example: {_plain(example)}."


def _plain(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _pass(draft: Draft) -> dict[str, Any]:
    settings = {
        key: {**(SHAPES.get(key) or _kind(default)), "description": _described(text, default, example), "examples": [example]}
        for key, default, text, example in parameters(draft)
    }
    given = (draft.source.data.get("example") or {}).get("with") or {}
    return {
        "description": _described(draft.source.data.get("about", "").removesuffix("."), {}, {draft.name: given}),
        "examples": [given],
        "type": ["object", "null"],
        "properties": settings,
        "required": [key for key, default in draft.params.items() if default == REQUIRED],
        "additionalProperties": False,
    }


def parameters(draft: Draft) -> list[tuple[str, Any, str, Any]]:
    """Of each parameter of a pass, then of each setting of all passes: its name, default, text and example."""
    data = draft.source.data
    said, given = data.get("help") or {}, (data.get("example") or {}).get("with") or {}
    rows = [(key, default, *parameter(key, default, said, given)) for key, default in draft.params.items()]
    defaults = {"name": draft.name, "train": True}
    return rows + [(key, defaults.get(key), text, example) for key, (text, example) in SETTINGS.items()]


def _kind(default: Any) -> dict[str, Any]:
    if default == REQUIRED:
        return {}
    if isinstance(default, (str, list)):
        return {"type": ["string", "array"], "default": default}
    names: dict[type, str] = {bool: "boolean", int: "integer", float: "number", dict: "object"}
    kind = {"type": names[type(default)]} if type(default) in names else {}
    return {**kind, "default": default}


def page() -> str:
    """Every key of a configuration as Markdown: what `docs/keys.md` holds."""
    made = schema()
    parts = {"Config": made, **made["$defs"]}
    lines = [
        "# Keys of a configuration",
        "",
        "Written by `fxplug schema --page`; `fxplug schema` gives the same to an editor. What a pass takes stands on",
        "[its own page](../examples/passes), and in `fxplug passes NAME`.",
    ]
    for name, title in PLACES.items():
        lines += ["", f"## {title}", "", "| key | default | example | |", "|---|---|---|---|"]
        for key, (text, example) in KEYS[name].items():
            lines.append(_row(key, parts[name]["properties"][key].get("default", REQUIRED), text, example))
    lines += ["", "## Settings of every pass", "", "| key | default | example | |", "|---|---|---|---|"]
    defaults = {"name": "its file's name", "train": True}
    lines += [_row(key, defaults.get(key), text, example) for key, (text, example) in SETTINGS.items()]
    return "\n".join(lines) + "\n"


def _row(key: str, default: Any, text: str, example: Any) -> str:
    told = "required" if default == REQUIRED else f"`{_plain(default)}`"
    return f"| `{key}` | {told} | `{_plain(example)}` | {text} |"
