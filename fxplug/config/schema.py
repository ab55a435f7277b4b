"""The JSON Schema of a configuration and the page of its keys, of what its sections and the pass files say of each."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from ..core.spec.pass_file import REQUIRED, Draft, list_shipped, open_pass
from .model_section import Constant, ModelSpec, Tensor, WeightsSpec
from .run_config import make_config_model
from .sections import read_sections

Texts = Mapping[str, tuple[str, Any]]

# the parameters that many passes have; what a pass file says under `help` comes before it
PARAMETERS: Texts = {
    "at": ("which layers: a path, a bare name or ending (`to_q`), a glob, `re:...`, `all-linear`, or a list of them", "to_q"),
    "within": ("classes of layers: every such layer among and below the regions of `at`", ["Linear", "Conv2d"]),
    "rank": ("the rank of the update", 16),
    "alpha": ("the scale of the update is alpha / rank; null: alpha is the rank", 32),
    "dropout": ("the share of its input that the update drops in training", 0.1),
}
SETTINGS: Texts = {
    "name": ("the name of this pass: the first part of its keys, and of its inputs if you use a pass twice", "style"),
    "lr": ("the learning rate of its blocks; null: `train.lr`", 1e-4),
    "weight_decay": ("the weight decay of its blocks; null: `train.weight_decay`", 0.01),
    "train": ("whether its blocks train", False),
    "expect": ("the number of places that it must find, such as `==420`; fxplug then lists no similar layers", "==420"),
}
# examples for parameters of passes that neither have one in their file nor a default that is one
EXAMPLES: Mapping[str, Any] = {
    "slots": 4, "rank_max": 64, "samples": "timestep", "groups": "block", "options": {"scale": 2.0}, "feeds": ["cond"],
    "exclude_key": "norm",
    "inputs": {"cond": {"shape": ["n", 3, "h", "w"]}}, "also": ["conv_out"], "keywords": ["temb"], "mask": [0.5, 1.0],
    "weights": "ip-adapter_sd15.safetensors", "dim": 1, "blocks": 4, "prefix": 1, "split": {"x": 2}, "correct": 1, "steps": 20,
    "classes": 37, "size": 8, "warmup": 2, "clock": "timestep", "branch": 1,
    "files": {"ink": "ink.safetensors", "film": {"file": "film/", "strength": 0.3}}, "adapter": "default", "part": "unet",
    "first": [16, 32], "decompose": [True, True],
}  # fmt: skip

def parameter(name: str, default: Any, said: Mapping[str, str], given: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the text and the example of a parameter of a pass; `said` is the `help` of its file, `given` the values of its
    example."""
    text, example = PARAMETERS.get(name, ("", None))
    if name in given:
        example = given[name]
    elif example is None:
        example = not default if isinstance(default, bool) else EXAMPLES.get(name, default)
    return said.get(name, text), example


def list_headings() -> dict[type[BaseModel], str]:
    """Return the heading of each model of a configuration, in the order of the page of keys."""
    found: dict[type[BaseModel], str] = {
        make_config_model(): "A configuration", ModelSpec: "`model`, where it is a mapping",
        WeightsSpec: "`weights`, where it is a mapping", Tensor: "`inputs`, a tensor", Constant: "`inputs`, a constant",
    }  # fmt: skip
    for brought in read_sections().values():
        found |= brought.headings
    return found


HEAD = ("", "| key | default | example | |", "|---|---|---|---|")
SHAPES: Mapping[str, Any] = {
    "name": {"type": "string"},
    "lr": {"type": ["number", "null"], "minimum": 0},
    "weight_decay": {"type": ["number", "null"], "minimum": 0},
    "expect": {"type": ["string", "integer", "null"]},
}  # of the settings whose default does not say it


def make_schema() -> dict[str, Any]:
    """Return the JSON Schema of a configuration; it includes the parameters of every shipped pass."""
    whole = make_config_model()
    made = copy.deepcopy(whole.model_json_schema())  # parts of it are the constants of annotations
    for section in list_headings():
        part = made if section is whole else made["$defs"].setdefault(section.__name__, section.model_json_schema())
        for key, field in section.model_fields.items():
            found = part["properties"][key]
            found["description"] = _described(field.description or "", found.get("default", REQUIRED), *field.examples or ())
    properties = made["properties"]
    for key, name, kinds in (("model", "ModelSpec", ["string"]), ("weights", "WeightsSpec", ["string", "null"])):
        properties[key].pop("$ref", None)
        properties[key]["anyOf"] = [*({"type": kind} for kind in kinds), {"$ref": f"#/$defs/{name}"}]
    constant = properties["inputs"]["additionalProperties"]
    constant["anyOf"] = [{"$ref": "#/$defs/Tensor"}, {"$ref": "#/$defs/Constant"}, {}]
    for brought in read_sections().values():
        for (section, key), shipped_options in brought.options.items():
            _add_options(made["$defs"][section.__name__]["properties"][key], shipped_options)
    names = {name: _pass(open_pass(path)) for name, path in list_shipped("passes").items()}
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


def _add_options(found: dict[str, Any], options: Mapping[str, type[BaseModel]]) -> None:
    """Add the options of what ships with fxplug, where a name with its options below it is allowed."""
    mapping = next(kind for kind in found["anyOf"] if kind.get("type") == "object")
    mapping["properties"] = {}
    for name, section in options.items():
        key, field = next(iter(section.model_fields.items()))
        example = {key: (field.examples or [None])[0]}
        text = (section.__doc__ or "").removesuffix(".")
        kinds = [{"$ref": f"#/$defs/{section.__name__}"}, {"type": "null"}]
        mapping["properties"][name] = {"anyOf": kinds, "description": _described(text, {}, example), "examples": [example]}


def _described(text: str, default: Any, example: Any) -> str:
    told = "Required." if default == REQUIRED else f"Default: {_plain(default)}."
    return f"{text[:1].upper()}{text[1:]}. {told} Example: {_plain(example)}."


def _plain(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _pass(draft: Draft) -> dict[str, Any]:
    settings = {
        key: {**(SHAPES.get(key) or _kind(default)), "description": _described(text, default, example), "examples": [example]}
        for key, default, text, example in list_parameters(draft)
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


def list_parameters(draft: Draft) -> list[tuple[str, Any, str, Any]]:
    """Return for each parameter of a pass, then for each setting of all passes: its name, default, text and example."""
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


def make_page() -> str:
    """Return every key of a configuration as Markdown, the content of `docs/reference/keys.md`."""
    made = make_schema()
    parts = {"Config": made, **made["$defs"]}
    lines = [
        "# Keys of a configuration",
        "",
        "Written by `fxplug schema --page`; `fxplug schema` gives the same to an editor. What a pass takes is on",
        "[its own page](passes.md), and in `fxplug passes NAME`.",
    ]
    for section, title in list_headings().items():
        lines += list_rows(section, title, parts[section.__name__]["properties"])
    lines += ["", "## Settings of every pass", *HEAD]
    defaults = {"name": "its file's name", "train": True}
    lines += [_row(key, defaults.get(key), text, example) for key, (text, example) in SETTINGS.items()]
    return "\n".join(lines) + "\n"


def list_rows(section: type[BaseModel], title: str, properties: Mapping[str, Any]) -> list[str]:
    """Return the keys of a section as lines of Markdown, below a heading; `properties` are those of its JSON Schema."""
    rows = ["", f"## {title}", *HEAD]
    for key, field in section.model_fields.items():
        name = field.alias or key
        rows.append(_row(name, properties[name].get("default", REQUIRED), field.description or "", *field.examples or ()))
    return rows


def _row(key: str, default: Any, text: str, example: Any) -> str:
    told = "required" if default == REQUIRED else f"`{_plain(default)}`"
    return f"| `{key}` | {told} | `{_plain(example)}` | {text} |"
