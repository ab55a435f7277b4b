"""The section `merge` of HCP-Diffusion's configurations: checkpoints that it mixes into its models when it loads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ...core.errors import SpecError, did_you_mean
from ...core.spec.yaml_source import Section, Source, make_validator, quote_yaml, validate
from .builtin_plugins import read_half
from .config_files import References, find_file, read_files
from .entries import read_plugins
from .hosts import PARTS, Host, Number, make_pass_name
from .layer_patterns import read_paths

GROUP = ("type", "base_model_alpha", "lora", "part", "plugin")
BUILDER = "fxplug.compat.hcp.merging:merged"


@dataclass
class MergeSection:
    """What a merge section is here: `parts` of weights that are mixed when the model is built, and `passes`."""

    parts: list[dict[str, Any]] = field(default_factory=list)
    passes: list[dict[str, Any]] = field(default_factory=list)

    def head(self, head: dict[str, Any], here: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
        """Return the sections beside the passes, with a `model` that mixes the parts into the given one.

        `here` has the same sections with paths relative to the working folder, as those of the parts are.
        """
        if not self.parts:
            return head
        kept = {key: here[key] for key in ("model", "weights") if here.get(key) is not None}
        notes.append("paths of the model and of its parts are relative to the working folder, as in HCP-Diffusion")
        made = {"model": {"call": BUILDER, "options": {**kept, "parts": self.parts}}}
        return {**made, **{key: value for key, value in head.items() if key not in ("model", "weights")}}


def is_merging(data: Mapping[str, Any], part: str) -> bool:
    """Return whether a configuration merges something into a part."""
    section = data.get("merge")
    if not isinstance(section, Mapping):
        return isinstance(section, str)  # a reference
    others = [name for name in PARTS if name != part]
    groups = [group for group in section.values() if isinstance(group, Mapping) and any(key in group for key in GROUP)]
    return any(group.get("type") not in others for group in groups)  # one without a part is told to be none


def read_merge(source: Source, part: str, host: Host, notes: list[str]) -> MergeSection:
    """Read the groups of one part. Raises SpecError, with its place, for entries that HCP-Diffusion would ignore."""
    found = MergeSection()
    section = References(source).value("merge") if source.data.get("merge") is not None else {}
    if not isinstance(section, Mapping):
        raise source.error(f"must be a mapping of groups, not {quote_yaml(section)}", "merge")
    plugins = _plugins(source, section.get("plugin_cfg"), part, host, notes)
    found.passes += plugins
    known = [next(iter(entry.values()))["name"] for entry in plugins]
    if not isinstance(section.get("load_ema", False), bool):
        raise source.error(f"must be true or false, not {quote_yaml(section['load_ema'])}", "merge", "load_ema")
    for name, group in section.items():
        if name == "plugin_cfg" or not isinstance(group, Mapping):
            continue  # values that others refer to
        with source.inside("merge", name):
            _read_group(found, str(name), group, part, known, section.get("load_ema", False), notes)
    return found


def _layers(layers: Any) -> list[str] | None:
    """Return the layers of a file as they are written, None for all. Raises SpecError."""
    return None if layers == "all" else [layer.text for layer in read_paths(layers)]


Layers = Annotated[Any, make_validator(_layers)]


class _LoraSection(Section):
    path: str = Field(min_length=1, description="a file")
    alpha: Number = 1.0
    layers: Layers = None
    mask: Annotated[Any, make_validator(lambda mask: read_half(mask) and list(mask))] = None
    dropout: Any = None
    alpha_auto_scale: bool = True


class _PartSection(Section):
    path: str = Field(min_length=1, description="a file")
    alpha: Number = Field(description="the strength of the part, a number")
    layers: Layers = None


class _Group(Section):
    type: Literal["unet", "TE"] = Field(description="the model that the files are for, unet or TE")
    base_model_alpha: Number = 0.0
    lora: list[Any] = Field([], description="a list of files")
    part: list[Any] = Field([], description="a list of files")
    plugin: dict[str, Any] = Field({}, description="a mapping of plugins by name")


def _read_group(
    found: MergeSection, name: str, given: Mapping[str, Any], part: str, plugins: list[str], ema: Any, notes: list[str]
) -> None:
    if not any(key in given for key in GROUP):
        return
    group = validate(_Group, {key: value for key, value in given.items() if value is not None})
    if group.type != part:
        if group.lora or group.part or group.plugin:
            notes.append(f"merge.{name} is left out, because it is for another model (convert again with --part {group.type})")
        return
    more = {"ema": True} if ema else {}
    for item in [validate(_PartSection, one, "part", index) for index, one in enumerate(group.part)]:
        layers = {} if item.layers is None else {"layers": item.layers}
        found.parts.append({"file": item.path, "alpha": item.alpha, **layers, **more, "base": group.base_model_alpha})
    for index, given in enumerate(group.lora):
        one = validate(_LoraSection, given, "lora", index)
        if one.dropout:
            notes.append(
                f"merge.{name}: a dropout of {one.dropout} is left out, because dropout has no effect when a model is used"
            )
        own = {"name": make_pass_name(f"{name}_lora_{index}", notes), "file": one.path, "alpha": one.alpha}
        own |= {} if one.layers is None else {"layers": one.layers}
        own |= more | ({} if one.mask is None else {"mask": one.mask})
        found.passes.append({"hcp/checkpoint": own if one.alpha_auto_scale else {**own, "alpha_auto_scale": False}})
    if group.lora and not group.part and group.base_model_alpha != 1 and "base_model_alpha" in group.model_fields_set:
        share = group.base_model_alpha
        notes.append(f"merge.{name}: base_model_alpha: {share:g} is left out, because HCP-Diffusion uses it for 'part' only")
    _plugin_weights(name, group.plugin, plugins, notes)


def _plugins(source: Source, given: Any, part: str, host: Host, notes: list[str]) -> list[dict[str, Any]]:
    """Return the passes of `plugin_cfg`, a file with sections of plugins or such sections themselves."""
    key = PARTS[part][0]
    if given is None:
        return []
    if isinstance(given, str):
        file = find_file(given, Path(source.file).resolve()) if source.file else None
        if file is None:
            raise source.error(f"'{given}' is in no folder around {Path(source.file).name}", "merge", "plugin_cfg")
        other = read_files(file, notes)
        entries = References(other).value(key) if isinstance(other.data, Mapping) and other.data.get(key) else {}
        return read_plugins(other, (key,), entries, host, notes)
    if not isinstance(given, Mapping):
        raise source.error(f"must be a file or a mapping with '{key}', not {quote_yaml(given)}", "merge", "plugin_cfg")
    return read_plugins(source, ("merge", "plugin_cfg", key), given.get(key), host, notes)


def _plugin_weights(group: str, plugins: Mapping[str, Any], known: list[str], notes: list[str]) -> None:
    """Note the weights of plugins: a pass cannot load them from a file, a saved rewrite can."""
    for name, item in plugins.items():
        path = ("plugin", name)
        if not isinstance(item, Mapping) or not isinstance(item.get("path"), str):
            raise SpecError(f"must be a mapping with 'path', not {quote_yaml(item)}", path=path)
        start = make_pass_name(str(name), [])
        here = [one for one in known if one == start or one.startswith(f"{start}_")]
        if not here:
            raise SpecError(f"plugin_cfg has no plugin '{name}'{did_you_mean(name, known)}", path=path)
        passes = " ".join(f"--pass {one}" for one in here)
        notes.append(
            f"merge.{group}: put the weights of {name} into the saved rewrite: fxplug convert hcp {item['path']} --into DIR "
            f"{passes}"
        )
        if item.get("layers", "all") != "all":
            notes.append(f"merge.{group}: {name} gets all weights of its file, not only those of layers: {item['layers']}")
        rest = {key: value for key, value in item.items() if key not in ("path", "layers")}
        if rest:
            notes.append(
                f"merge.{group}: {name}: set_hyper_params({rest}) is left out: set these values in the options of the pass"
            )
