"""Patches of HCP-Diffusion's file that share a container, as one pass for each group of layers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from ...core.spec.addresses import is_pattern, select
from .hosts import Host
from .plugin_factory import TRAINED, import_plugin_class

PATCHES = ("hcp/patch", "hcp/patch_around", "hcp/patch_after", "hcp/patch_before")
SHARED = ("exclude_key", "inputs", "feeds")  # what plugins of one pass have in common

Entry = tuple[str, dict[str, Any]]


def join_patches(passes: Sequence[Mapping[str, dict[str, Any]]], host: Host) -> list[dict[str, dict[str, Any]]]:
    """Join patches that HCP-Diffusion puts into one container into one pass, where two passes would differ from that.

    If the model is known, patches that share some layers are split: each group of layers with the same patches is a pass, and a
    plugin's second one is named with `_2`. Else only those whose layers are written alike are joined.
    """
    entries = [next(iter(entry.items())) for entry in passes]
    at: dict[Hashable, list[tuple[int, ...]]] = {}  # by layer: the passes there by number, those of one container together
    for number, entry in enumerate(entries):
        for layer in _layers(entry, number, host):
            here = at.setdefault(layer, [])
            if here and _kind([entries[index] for index in (*here[-1], number)], isinstance(layer, str)):
                here[-1] = (*here[-1], number)
            else:
                here.append((number,))
    groups: dict[tuple[int, ...], list[Hashable]] = {}
    for layer, here in at.items():
        for numbers in here:
            groups.setdefault(numbers, []).append(layer)
    names = {given["name"] for _, given in entries}
    found, seen = [], set[int]()
    for numbers in sorted(groups):
        own = []
        for number in numbers:
            own.append(_fresh(entries[number][1]["name"], names) if number in seen else entries[number][1]["name"])
            names.add(own[-1])
        seen.update(numbers)
        alone = all(sum(number in other for other in groups) == 1 for number in numbers)
        found.append(_joined([entries[number] for number in numbers], own, groups[numbers], alone))
    return found


def _layers(entry: Entry, number: int, host: Host) -> list[Hashable]:
    """Return the paths of a patch's layers, or if they are unknown one key, equal for those that are written alike."""
    kind, given = entry
    if kind not in PATCHES:
        return [number]
    within = given.get("within") or []
    if host.model is None:
        return [(*given["layers"], None, *within)]
    paths = dict.fromkeys(p for text in given["layers"] for p in (select(text, host.classes) if is_pattern(text) else [text]))
    if not within:
        return list(paths)
    kinds = {path: {kind.__name__ for kind in type(module).__mro__} for path, module in host.modules.items()}
    inside = [p for p in host.modules if any(p == path or not path or p.startswith(f"{path}.") for path in paths)]
    return [path for path in inside if not kinds[path].isdisjoint(within)]


def _kind(entries: Sequence[Entry], listed: bool) -> str | None:
    """Return the pass for several patches at one layer; None if they stay separate, which is an error there."""
    (kind, there), *others = entries
    for other, given in others:
        if kind not in PATCHES or other not in PATCHES or any(there.get(key) != given.get(key) for key in SHARED):
            return None
        one, two = (import_plugin_class(x["plugin"]).container_cls for x in (there, given))  # type: ignore[attr-defined]
        if not issubclass(one, two) or (other != kind and "args" in {**there, **given}):
            return None
        if kind not in (other, "hcp/patch"):
            if not listed and (there.get("within") or any(map(is_pattern, there["layers"]))):
                return None
            kind = "hcp/patch_around"
    return kind


def _joined(entries: Sequence[Entry], names: Sequence[str], layers: Sequence[Any], alone: bool) -> dict[str, dict[str, Any]]:
    """Return one pass at some layers, written as in the file if it has all layers of its patches."""
    (first, there), *others = entries
    kind = _kind(entries, listed=True) or first
    given = {**there, "name": names[0]}
    alike = alone and all(there.get(key) == other.get(key) for _, other in others for key in ("layers", "within"))
    if isinstance(layers[0], str) and not (alike and kind == first):
        given["layers"] = list(layers)
        given.pop("within", None)
    for name, (_, other) in zip(names[1:], others, strict=True):
        more = {"name": name, "plugin": other["plugin"], "options": other.get("options", {})}
        more |= {key: other.get(key, key == "train" or None) for key in TRAINED if other.get(key) != there.get(key)}
        more |= {"wrap": bool(other.get("wrap"))} if bool(other.get("wrap")) != bool(there.get("wrap")) else {}
        given.setdefault("also", []).append(more)
    return {kind: given}


def _fresh(name: str, names: set[str]) -> str:
    """Return the name with the first number that makes it unique."""
    return next(new for number in range(2, len(names) + 3) if (new := f"{name}_{number}") not in names)
