"""The section `merge` of HCP-Diffusion's configurations: checkpoints that it mixes into its models when it loads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.errors import SpecError, did_you_mean
from ...core.spec.yaml_source import Source, shown
from .builtin_plugins import half_of
from .config_files import References, near, read_files
from .entries import plugins_of
from .hosts import PARTS, Host, number, pass_name
from .layer_patterns import read_layers

GROUP = ("type", "base_model_alpha", "lora", "part", "plugin")
ITEMS = {
    "lora": ("path", "alpha", "layers", "mask", "dropout", "alpha_auto_scale"),
    "part": ("path", "alpha", "layers"),
}
BUILDER = "fxplug.compat.hcp.merging:merged"


@dataclass
class Merge:
    """What a merge section is here: `parts` of weights that are mixed when the model is built, and `passes`."""

    parts: list[dict[str, Any]] = field(default_factory=list)
    passes: list[dict[str, Any]] = field(default_factory=list)

    def head(self, head: dict[str, Any], here: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
        """The sections beside the passes, with a `model` that mixes the parts into what was the model.

        `here` has the same sections with paths from the working folder, which those of the parts are from.
        """
        if not self.parts:
            return head
        kept = {key: here[key] for key in ("model", "weights") if here.get(key) is not None}
        notes.append("paths of the model and of the parts in it are those of the working folder, as HCP-Diffusion's are")
        made = {"model": {"call": BUILDER, "options": {**kept, "parts": self.parts}}}
        return {**made, **{key: value for key, value in head.items() if key not in ("model", "weights")}}


def merges(data: Mapping[str, Any], part: str) -> bool:
    """Whether a configuration merges something into a part."""
    section = data.get("merge")
    if not isinstance(section, Mapping):
        return isinstance(section, str)  # a reference
    others = [name for name in PARTS if name != part]
    groups = [group for group in section.values() if isinstance(group, Mapping) and any(key in group for key in GROUP)]
    return any(group.get("type") not in others for group in groups)  # one without a part is told to be none


def read_merge(source: Source, part: str, host: Host, notes: list[str]) -> Merge:
    """What the groups of one part are here. Raises SpecError, with its place, for what HCP-Diffusion would pass over."""
    found = Merge()
    section = References(source).value("merge") if source.data.get("merge") is not None else {}
    if not isinstance(section, Mapping):
        raise source.error(f"must be a mapping of groups, not {shown(section)}", "merge")
    plugins = _plugins(source, section.get("plugin_cfg"), part, host, notes)
    found.passes += plugins
    known = [next(iter(entry.values()))["name"] for entry in plugins]
    if not isinstance(section.get("load_ema", False), bool):
        raise source.error(f"must be true or false, not {shown(section['load_ema'])}", "merge", "load_ema")
    for name, group in section.items():
        if name == "plugin_cfg" or not isinstance(group, Mapping):
            continue  # values that others refer to
        with source.inside("merge", name):
            if _is_of(group, part, str(name), notes):
                _read_group(found, str(name), group, known, section.get("load_ema", False), notes)
    return found


def _is_of(group: Mapping[str, Any], part: str, name: str, notes: list[str]) -> bool:
    if "type" not in group:
        if any(key in group for key in GROUP):
            raise SpecError(f"missing key 'type', one of {', '.join(PARTS)}: HCP-Diffusion passes the group over")
        return False
    if group["type"] not in list(PARTS):
        raise SpecError(f"no part {shown(group['type'])}{did_you_mean(group['type'], PARTS)}", path=("type",))
    for key in group:
        if key not in GROUP:
            raise SpecError(f"unknown key '{key}'{did_you_mean(key, GROUP)}; there are {', '.join(GROUP)}", key=key)
    if group["type"] != part and any(group.get(key) for key in ("lora", "part", "plugin")):
        notes.append(f"merge.{name} is left out, as it is of another model (convert again with --part {group['type']})")
    return bool(group["type"] == part)


def _read_group(
    found: Merge, name: str, group: Mapping[str, Any], plugins: list[str], ema: Any, notes: list[str]
) -> None:
    share = group.get("base_model_alpha")
    more = {"ema": True} if ema else {}
    for index, item in enumerate(_items(group, "part")):
        path = ("part", index)
        _check(item, "part", path)
        if "alpha" not in item:
            raise SpecError("missing key 'alpha', the strength of the part", path=path)
        found.parts.append(
            {"file": item["path"], "alpha": number(item["alpha"], (*path, "alpha")), **_chosen(item, path), **more,
             "base": 0.0 if share is None else number(share, ("base_model_alpha",))}
        )  # fmt: skip
    for index, item in enumerate(_items(group, "lora")):
        path = ("lora", index)
        _check(item, "lora", path)
        if item.get("dropout"):
            notes.append(f"merge.{name}: a dropout of {item['dropout']} is left out, as nothing drops out when a model is used")
        given = {"name": pass_name(f"{name}_lora_{index}", notes), "file": item["path"]}
        given["alpha"] = number(item.get("alpha", 1.0), (*path, "alpha"))
        given.update(_chosen(item, path), **more)
        if half_at(item.get("mask"), path) is not None:
            given["mask"] = list(item["mask"])
        if not item.get("alpha_auto_scale", True):
            given["alpha_auto_scale"] = False
        found.passes.append({"hcp/checkpoint": given})
    if group.get("lora") and not group.get("part") and share not in (None, 1):
        notes.append(f"merge.{name}: base_model_alpha: {share} is left out, as HCP-Diffusion takes it for 'part' alone")
    _plugin_weights(name, group.get("plugin") or {}, plugins, notes)


def half_at(mask: Any, path: tuple[str | int, ...]) -> str | None:
    """`half_of` with the place of the mask."""
    try:
        return half_of(mask)
    except SpecError as error:
        raise SpecError(error.finding, path=(*path, "mask")) from None


def _items(group: Mapping[str, Any], key: str) -> list[Any]:
    items = group.get(key) or []
    if not isinstance(items, list):
        raise SpecError(f"must be a list of files, not {shown(items)}", path=(key,))
    return items


def _check(item: Any, sort: str, path: tuple[str | int, ...]) -> None:
    if not isinstance(item, Mapping):
        raise SpecError(f"must be a mapping with 'path', not {shown(item)}", path=path)
    for key in item:
        if key not in ITEMS[sort]:
            raise SpecError(f"unknown key '{key}'{did_you_mean(key, ITEMS[sort])}", path=path, key=key)
    if not isinstance(item.get("path"), str) or not item["path"]:
        found = f"must be a file, not {shown(item['path'])}" if "path" in item else "missing key 'path'"
        raise SpecError(found, path=(*path, "path") if "path" in item else path)


def _chosen(item: Mapping[str, Any], path: tuple[str | int, ...]) -> dict[str, Any]:
    layers = item.get("layers", "all")
    if layers == "all":
        return {}
    try:
        read = read_layers(layers, "layers")
    except SpecError as error:
        raise SpecError(error.finding, path=(*path, *error.path)) from None
    return {"layers": [layer.text for layer in read]}


def _plugins(source: Source, given: Any, part: str, host: Host, notes: list[str]) -> list[dict[str, Any]]:
    """The passes of `plugin_cfg`, a file with sections of plugins or such sections themselves."""
    key = PARTS[part][0]
    if given is None:
        return []
    if isinstance(given, str):
        file = near(given, Path(source.file).resolve()) if source.file else None
        if file is None:
            raise source.error(f"'{given}' is in no folder around {Path(source.file).name}", "merge", "plugin_cfg")
        other = read_files(file, notes)
        entries = References(other).value(key) if isinstance(other.data, Mapping) and other.data.get(key) else {}
        return plugins_of(other, (key,), entries, host, notes)
    if not isinstance(given, Mapping):
        raise source.error(f"must be a file or a mapping with '{key}', not {shown(given)}", "merge", "plugin_cfg")
    return plugins_of(source, ("merge", "plugin_cfg", key), given.get(key), host, notes)


def _plugin_weights(group: str, plugins: Any, known: list[str], notes: list[str]) -> None:
    """Notes on the weights of plugins: a pass has none of a file, and a saved rewrite is given them."""
    if not isinstance(plugins, Mapping):
        raise SpecError(f"must be a mapping of plugins by name, not {shown(plugins)}", path=("plugin",))
    for name, item in plugins.items():
        path = ("plugin", name)
        if not isinstance(item, Mapping) or not isinstance(item.get("path"), str):
            raise SpecError(f"must be a mapping with 'path', not {shown(item)}", path=path)
        here = [one for one in known if one == pass_name(str(name), []) or one.startswith(f"{pass_name(str(name), [])}_")]
        if not here:
            raise SpecError(f"plugin_cfg has no plugin '{name}'{did_you_mean(name, known)}", path=path)
        passes = " ".join(f"--pass {one}" for one in here)
        notes.append(
            f"merge.{group}: the weights of {name} are put into the saved rewrite: fxplug convert hcp {item['path']} "
            f"--into DIR {passes}"
        )
        if item.get("layers", "all") != "all":
            notes.append(f"merge.{group}: {name} gets all weights of its file, and not those of layers: {item['layers']} alone")
        rest = {key: value for key, value in item.items() if key not in ("path", "layers")}
        if rest:
            notes.append(f"merge.{group}: {name}: set_hyper_params({rest}) is left out: give such values in the pass's options")
