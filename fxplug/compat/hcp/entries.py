"""One plugin of HCP-Diffusion's file as passes of fxplug's configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...core.errors import SpecError, did_you_mean, prefix_path
from ...core.spec.pass_file import check_known
from ...core.spec.pass_file import get_arguments as options_of
from ...core.spec.yaml_source import Source, quote_yaml
from .base_classes import (
    BasePluginBlock,
    HookParam,
    MultiPluginBlock,
    PatchPluginBlock,
    PatchPluginContainer,
    PluginBlock,
    SinglePluginBlock,
)
from .builtin_plugins import convert_built_in
from .hosts import OPTIONS, Host, make_patterns, read_common, take_key
from .layer_patterns import LayerPattern, format_paths, pair, read_layers
from .plugin_factory import import_plugin_class, make
from .plugin_inputs import list_read_inputs

PLACE_KEYS = ("layers", "from_layer", "to_layer", "from_layers", "to_layers")
# what HCP-Diffusion itself feeds to a plugin of the UNet, by the names of its arguments
FED = {
    "noisy_latents": ":in.sample",
    "timesteps": ":in.timestep",
    "encoder_hidden_states": ":in.encoder_hidden_states",
    "attn_mask": ":in.encoder_attention_mask",
}


def read_plugins(
    source: Source, at: tuple[str, ...], entries: Any, host: Host, notes: list[str]
) -> list[dict[str, Any]]:
    """Return the passes of a section of plugins by name, at the path `at` of a file. Raises SpecError with its lines."""
    if not isinstance(entries or {}, Mapping):
        raise source.error(f"must be a mapping of plugins by name, not {quote_yaml(entries)}", *at)
    passes: list[dict[str, Any]] = []
    for name, entry in (entries or {}).items():
        with source.inside(*at, name):
            passes += plugin_passes(str(name), entry, host, notes)
    return passes


def plugin_passes(name: str, entry: Any, host: Host, notes: list[str]) -> list[dict[str, Any]]:
    """Return the passes of one entry of `plugin_unet`. Raises SpecError with the key that is wrong."""
    if not isinstance(entry, Mapping):
        raise SpecError(f"must be a mapping with '_target_', not {quote_yaml(entry)}")
    target = entry.get("_target_")
    if not isinstance(target, str):
        raise SpecError(f"must be the path of a class, not {quote_yaml(target)}", path=("_target_",))
    if entry.get("_partial_", True) is not True:
        raise SpecError("must be true: HCP-Diffusion gives the layers itself", path=("_partial_",))
    common = read_common(name, entry, notes)
    given = {key: value for key, value in entry.items() if key not in OPTIONS}
    if target.startswith("hcpdiff."):
        return [convert_built_in(target, common, given, host, notes)]
    path, wrap = (target.removesuffix(".wrap_model"), True) if target.endswith(".wrap_model") else (target, False)
    module, _, attribute = path.rpartition(".")
    if not module:
        raise SpecError(f"must look like 'module.Class', not {quote_yaml(target)}", path=("_target_",))
    with prefix_path("_target_"):
        kind = import_plugin_class(f"{module}:{attribute}")
    common["plugin"] = f"{module}:{attribute}"
    if issubclass(kind, (PluginBlock, MultiPluginBlock)):
        if wrap:
            raise SpecError(f"{kind.__name__} has no wrap_model", path=("_target_",))
        keys: tuple[str, ...] = ("from_layer", "to_layer")
        if issubclass(kind, MultiPluginBlock):
            keys = ("from_layers", "to_layers")
    elif issubclass(kind, (SinglePluginBlock, PatchPluginBlock)):
        keys = ("layers",)
    else:
        raise SpecError(f"{kind.__name__} is not one of the four kinds of plugin", path=("_target_",))
    lists = [read_layers(take_key(given, key), key) for key in keys]
    _check_options(kind, given, keys)
    if given:
        common["options"] = dict(given)
    if issubclass(kind, PluginBlock):
        return _pairs(kind, common, lists[0], lists[1], host)
    if issubclass(kind, MultiPluginBlock):
        return [_multi(kind, common, lists[0], lists[1], host)]
    return [_layers(kind, common, lists[0], host, wrap)]


def _check_options(kind: type[BasePluginBlock], options: Mapping[str, Any], keys: Sequence[str]) -> None:
    takes = options_of(kind)
    known = [*sorted({*takes.names} - {"name", "lora_id", "host", "host_model", *keys}), *keys, *OPTIONS]
    for key in options:
        misspelt = key in PLACE_KEYS or did_you_mean(key, [*keys, *OPTIONS])
        if key not in takes.names and (misspelt or not takes.free):
            check_known([key], known, f"{kind.__name__} takes no")


# --- SinglePluginBlock and PatchPluginBlock


def _layers(
    kind: type[BasePluginBlock], common: dict[str, Any], layers: list[LayerPattern], host: Host, wrap: bool
) -> dict[str, Any]:
    hooked = [layer.text for layer in layers if layer.pre_hook]
    if hooked:
        raise SpecError(f"'{hooked[0]}': a {kind.__name__} has no pre_hook: remove it (HCP-Diffusion "
                        "ignores it)", path=("layers",))
    kinds = {layer.kind for layer in layers}
    if len(kinds) > 1:
        raise SpecError("some layers have another cls(...) or none: make two plugins", path=("layers",))
    with prefix_path("layers"):
        found = host.places(layers)
    given: dict[str, Any] = {**common, "layers": make_patterns(layers)}
    within, single = kinds.pop(), issubclass(kind, SinglePluginBlock)
    if within is not None:
        given["within"] = [within]
    if wrap:
        if within is not None:
            raise SpecError("cls(...) and wrap_model both choose layers below: use one of them", path=("layers",))
        given.update(_wrapped(kind, common, found, host, one_by_one=not single and _patch_pass(kind) == "hcp/patch_around"))
    _feeds(kind, given, host)
    if single:
        target = _hook_param(kind, given, found, host)
        if target is None:
            return {"hcp/single": _with_args(given, "x[:]", "y[:]")}
        return {"hcp/param": _with_args({**given, "param": target}, "value")}
    name = _patch_pass(kind)
    if name == "hcp/patch_around":
        if found is None or "within" in given:
            name = "hcp/patch"  # for layers that are kept whole; it says what else there is
        elif not wrap:
            given["layers"] = [place.path for place in found]
    return {name: _with_args(given, *(["x[:]"] if name == "hcp/patch_before" else ["x[:]", "y[:]"]), "x[**]")}


def _with_args(given: dict[str, Any], *args: str) -> dict[str, Any]:
    """Add `args`, with the inputs of the pass after the driver's own, if there are any."""
    extra = given.pop("fed", [])
    return {**given, "args": [*args, *extra]} if extra else given


def _wrapped(
    kind: Any, common: Mapping[str, Any], found: Sequence[LayerPattern] | None, host: Host, one_by_one: bool
) -> dict[str, Any]:
    """Return `wrap_model` as a selection of layers by class, or as a list with `one_by_one`, or if the class excludes some."""
    names = [k.__name__ for k in kind.wrapable_classes]
    if not names:
        raise SpecError(f"{kind.__name__}.wrapable_classes is empty, so wrap_model would find no layer", path=("_target_",))
    options = common.get("options", {})
    if host.model is None or found is None:
        seen = _exclusion(kind, options)
        foreign = [c for c in seen["exclude_classes"] if not issubclass(c, BasePluginBlock)]
        if foreign:
            out = foreign[0].__name__
            raise SpecError(f"wrap_model excludes {out}: {host.asks}, so that the layers can be listed")
        given = {"within": names, "wrap": True}
        return {**given, "exclude_key": seen["exclude_key"]} if seen["exclude_key"] is not None else given
    listing = type(kind.__name__, (kind,), {"wrap_layer": classmethod(lambda cls, name, layer, **rest: layer)})
    paths, everything = [], []
    for place in found:
        below = host.modules[place.path]
        parent, _, own = place.path.rpartition(".")
        rest = {"host_model": host.model, "parent_block": host.modules[parent], "host_name": own}
        chosen = listing.wrap_model(common["name"], below, **options, **rest)  # type: ignore[attr-defined]
        paths += [".".join(filter(None, [place.path, path])) for path in chosen]
        kinds = tuple(kind.wrapable_classes)
        inner = [""] if isinstance(below, kinds) else [p for p, m in below.named_modules() if isinstance(m, kinds)]
        everything += [".".join(filter(None, [place.path, path])) for path in inner]
    if not paths:
        raise SpecError(f"wrap_model finds no {' or '.join(names)} in {format_paths(found)}", path=("layers",))
    if paths == everything and not one_by_one:
        return {"within": names, "wrap": True}
    return {"layers": paths, "wrap": True}


def _exclusion(kind: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layers that a class's own `wrap_model` excludes."""
    seen: dict[str, Any] = {"exclude_key": None, "exclude_classes": ()}

    def note(cls: type, module: nn.Module, *args: Any, **rest: Any) -> Any:
        seen.update({k: v for k, v in rest.items() if k in seen})
        return iter([])

    listing: Any = type(kind.__name__, (kind,), {"named_modules_with_exclude": classmethod(note)})
    listing.wrap_model("plugin", nn.Sequential(), **options)
    return seen


def _hook_param(kind: Any, given: Mapping[str, Any], found: Sequence[LayerPattern] | None, host: Host) -> str | None:
    """Return the parameter that a plugin changes: from the file, or from its constructor, run up to that of its base class."""
    options = given.get("options", {})
    if "hook_param" in options:
        return options["hook_param"]  # type: ignore[no-any-return]
    hosts: list[nn.Module] = []
    with torch.device("meta"):
        if host.model is not None and found:
            hosts = [m for p in found for m in host.modules[p.path].modules() if not given.get("wrap") or _fits(kind, m)][:1]
        hosts = hosts or [nn.Linear(8, 8), nn.Conv2d(8, 8, 3, padding=1)]
    for layer in hosts:
        place = {"name": given["name"], "host": layer, "host_model": host.model or nn.Sequential(layer)}
        try:
            make(kind, SinglePluginBlock, place, options, bool(given.get("wrap")), ask=True)
        except HookParam as found_out:
            return found_out.name
        except SpecError as error:
            if error.__cause__ is None:
                raise
            # its constructor's: it is for another sort of layer; when it is applied, its driver says what it changes
    return None


def _fits(kind: Any, module: nn.Module) -> bool:
    return isinstance(module, tuple(kind.wrapable_classes))


def _patch_pass(kind: Any) -> str:
    """Return the name of the pass that a PatchPluginBlock needs."""
    if kind.container_cls.forward is not PatchPluginContainer.forward:
        return "hcp/patch"
    pre = kind.pre_forward is not PatchPluginBlock.pre_forward
    post = kind.post_forward is not PatchPluginBlock.post_forward
    return "hcp/patch_around" if pre and post else "hcp/patch_before" if pre else "hcp/patch_after"


# --- PluginBlock and MultiPluginBlock


def _pairs(
    kind: Any, common: dict[str, Any], sources: list[LayerPattern], targets: list[LayerPattern], host: Host
) -> list[dict[str, Any]]:
    if any(layer.kind for layer in (*sources, *targets)) and host.model is None:
        raise SpecError(f"cls(...) in pairs: {host.asks}, so that the layers can be listed", path=("from_layer",))
    with prefix_path("from_layer"):
        froms = host.places(sources)
    with prefix_path("to_layer"):
        tos = host.places(targets)
    known = froms is not None and tos is not None
    if not known and len(sources) != len(targets):
        both = f"\n  from: {[s.text for s in sources]}\n  to:   {[t.text for t in targets]}"
        raise SpecError(
            f"from_layer has {len(sources)} entries and to_layer {len(targets)}, and the number of layers that their "
            f"expressions match is not known: {host.asks}, so that they can be paired{both}"
        )
    groups: dict[Any, list[tuple[str, str]]] = {}
    for number, (a, b) in enumerate(pair(froms, tos) if froms and tos else zip(sources, targets, strict=True)):
        groups.setdefault((a.pre_hook, b.pre_hook, 0 if known else number), []).append((a.pattern, b.pattern))
    found = []
    for number, ((from_pre, to_pre, _), rows) in enumerate(groups.items()):
        given = {**common, "name": common["name"] + (f"_{number + 1}" if number else "")}
        _feeds(kind, given, host)
        lists = [[b for _, b in rows], *([f"{a}{side}" for a, _ in rows] for side in (":in[:]", ":out[:]"))]
        to, *sides = lists if known else [items[0] for items in lists]
        args = [*sides[: 1 if from_pre else 2], *(["x[:]"] if to_pre else ["x[:]", "y[:]"])]
        given |= {"to": to, "args": [*args, *given.pop("fed", [])]}
        found.append({"hcp/pair_before" if to_pre else "hcp/pair": given | ({"from_pre": True} if from_pre else {})})
    return found


def _multi(
    kind: Any, common: dict[str, Any], sources: list[LayerPattern], targets: list[LayerPattern], host: Host
) -> dict[str, Any]:
    found = {}
    for key, layers in (("from_layers", sources), ("to_layers", targets)):
        with prefix_path(key):
            found[key] = host.places(layers)
        if found[key] is None:
            raise SpecError(f"has regular expressions: {host.asks}, so that the layers can be listed "
                            "in order", path=(key,))
    froms, tos = (found[key] or [] for key in ("from_layers", "to_layers"))
    values = []
    for place in (*froms, *tos):
        values.append(f"{place.path}:in[:]")
        if not place.pre_hook:
            values.append(f"{place.path}:out[:]")
    given: dict[str, Any] = dict(common)
    for key, layers_ in (("from_layers", froms), ("to_layers", tos)):
        given[key] = ["pre_hook:" * place.pre_hook + place.path for place in layers_]
    _feeds(kind, given, host)
    given["values"] = [*values, *given.pop("fed", [])]
    sides = {"after": False, "before": True}
    for key, pre_hook in sides.items():
        rows = [(index, place.path) for index, place in enumerate(tos) if place.pre_hook is pre_hook]
        if rows:
            given[key] = [path for _, path in rows]
            given[f"{key}_values"] = [f"plugin:out[{index}][:]" for index, _ in rows]
    return {"hcp/multi": given}


# --- inputs


def _feeds(kind: type[BasePluginBlock], given: dict[str, Any], host: Host) -> None:
    """Add the inputs that a plugin reads in `feed_input_data`: of the model if it has them, else of the pass."""
    own = {name: port for name, port in FED.items() if host.part == "unet" and name not in host.inputs}
    asked = list_read_inputs(kind, (*host.inputs, *own))
    if asked is None:
        return
    if not host.fed:
        raise SpecError(f"{kind.__name__} takes inputs (feed_input_data), and a text encoder is given tokens alone in a run")
    if not asked:
        raise SpecError(
            f"{kind.__name__} takes inputs (feed_input_data), and its code names none of {', '.join((*host.inputs, *own))}: "
            "give those that it names with their shapes, as in --input cond=n,3,8*h,8*w --input sample=n,c,h,w"
        )
    new = [name for name in asked if name not in own]
    host.used.update(new)
    given["feeds"] = list(asked)
    given["fed"] = [own.get(name, name) for name in asked]
    binding = [name for name in host.inputs if name not in new and host.binds(name)]
    if new:
        given["inputs"] = {name: {"shape": list(host.inputs[name])} for name in (*binding, *new)}
