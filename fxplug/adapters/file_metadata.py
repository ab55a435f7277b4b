"""What the metadata of an adapter file says of it: ModelSpec's fields, and those of kohya's tools."""

from __future__ import annotations

import datetime
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.errors import SpecError, did_you_mean, quote
from .contents import ModelLayer
from .file_keys import TABLES
from .formats import get_alpha
from .tables import read_table
from .updates import Entry

SPEC = "modelspec."  # before the fields of ModelSpec 1.0.1 (github.com/Stability-AI/ModelSpec)
# those that only who made an adapter can say
FIELDS = (
    "title", "description", "author", "date", "license", "usage_hint", "tags", "category", "thumbnail", "merged_from",
    "resolution", "trigger_phrase", "prediction_type", "timestep_range", "implementation_version", "is_negative_embedding",
)  # fmt: skip

# where files say which model they are for
BASES = ("base_model_name_or_path", "ss_sd_model_name", "ss_base_model_version", "modelspec.architecture", "baseModel")


def find_base_model(about: Mapping[str, Any]) -> str:
    """Return what the metadata of a file calls the model that it is for, or ""."""
    return next((value for key in BASES if isinstance(value := about.get(key), str) and value not in ("", "None")), "")


def prefix_fields(given: Mapping[str, str] | None) -> dict[str, str]:
    """Return metadata that a user gives, with ModelSpec's fields under their names in a file (`title` as `modelspec.title`).

    Raises SpecError for what is not text, a name that is nearly one of the fields, and a date or resolution of another form.
    """
    made: dict[str, str] = {}
    for key, value in (given or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise SpecError(f"metadata must be a mapping of text to text, and {key!r} is not text")
        own = key in FIELDS or "." in key or key.startswith("ss_")
        if not own and (near := did_you_mean(key, FIELDS)):
            fields = f"there are {', '.join(FIELDS)}, and names of your own with a dot"
            raise SpecError(f"metadata has no field '{key}'{near}; {fields}")
        key = SPEC + key if key in FIELDS else key
        if why := _refused(key, value):
            raise SpecError(f"the {key.removeprefix(SPEC)} in metadata must be {why}, not {quote(value)}")
        made[key] = value
    return made


def _refused(key: str, value: str) -> str:
    """Return the form that a field of ModelSpec must have where a value has another, else an empty text."""
    if key == f"{SPEC}resolution" and not re.fullmatch(r"[1-9]\d*x[1-9]\d*", value):
        return "width and height, as 1024x768"
    if key == f"{SPEC}date":
        try:
            datetime.datetime.fromisoformat(value)
        except ValueError:
            return "of ISO 8601, as 2026-07-16"
    return ""


def list_fields(about: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of ModelSpec that whoever made a file said in its metadata, but for those of another form."""
    found = {key: about.get(key) for key in (SPEC + field for field in FIELDS)}
    return {key: value for key, value in found.items() if isinstance(value, str) and not _refused(key, value)}


def describe_adapter(
    as_: str,
    rows: Sequence[tuple[str, Entry]],
    name: str,
    layers: Mapping[str, ModelLayer],
    kind: str,
    config: Mapping[str, Any],
) -> dict[str, str]:
    """Return the metadata of updates in a format, but for what describes the base's weights.

    PEFT has its configuration; our own format says which layers are Embeddings. The others have ModelSpec's fields, and all
    but diffusers' those that kohya's tools write. `kind` is the name of the model's class, and `config` its configuration.
    """
    if as_ == "fxplug":
        tables = {path for path, layer in layers.items() if layer.kind == "Embedding"}
        named = sorted(f"{entry.part or 'adapter'}.{key}" for key, entry in rows if entry.path in tables)
        return {TABLES: "\n".join(named)} if named else {}
    if as_ == "peft":
        return {}
    known = _architecture(kind, config)
    made = {"sai_model_spec": "1.0.1", "implementation": "diffusers", "title": name or "adapter"}
    if known:
        made["architecture"] = f"{known['name']}/lora"
    size = config.get("sample_size")
    if isinstance(size, int) and "UNet" in kind:
        made["resolution"] = f"{8 * size}x{8 * size}"
    version = {"ss_base_model_version": str(known["version"])} if "version" in known and as_ != "diffusers" else {}
    of_kohya = {} if as_ == "diffusers" else _of_kohya(as_, rows, layers)
    return {**of_kohya, **version, **{SPEC + key: value for key, value in made.items()}}


def _architecture(kind: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what ModelSpec and kohya's metadata call a model, by its class and configuration; nothing for another."""
    has = {**config, "class": kind}
    rows = read_table("formats")["architectures"]
    own = ("name", "version")
    return next((row for row in rows if all(has.get(key) == value for key, value in row.items() if key not in own)), {})


def _of_kohya(as_: str, rows: Sequence[tuple[str, Entry]], layers: Mapping[str, ModelLayer]) -> dict[str, str]:
    low = [(len(layers[e.path].shape), e) for _, e in rows if not e.method]
    flat = [(e.rank, get_alpha(e)) for dims, e in low if dims == 2]
    spatial = [(e.rank, get_alpha(e)) for dims, e in low if dims > 2]
    rank, alpha = Counter(flat or spatial or [(1, 1.0)]).most_common(1)[0][0]
    words = {"lora": "locon", "dora": "locon", "dora by input": "locon", "delta": "full"}
    kinds = sorted({words.get(entry.kind, entry.kind) for _, entry in rows})
    made = {"ss_network_dim": str(rank), "ss_network_alpha": f"{alpha:g}"}
    if as_ != "lycoris" and all(entry.kind == "lora" for _, entry in rows):
        made["ss_network_module"] = "networks.lora"
        args = {}
    else:
        made["ss_network_module"] = "lycoris.kohya"
        args = {"algo": kinds[0] if len(kinds) == 1 else "full"}
        args |= {"dora_wd": "True"} if any("dora" in entry.kind for _, entry in rows) else {}
    if spatial and flat:
        conv_rank, conv_alpha = Counter(spatial).most_common(1)[0][0]
        args |= {"conv_dim": str(conv_rank), "conv_alpha": f"{conv_alpha:g}"}
    if args:
        made["ss_network_args"] = json.dumps(args)
    return made
