"""Adapter files of fxplug's own that hold passes of any kind: their tensors by name, and the passes as data beside them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..core import reading
from ..core.errors import DEFAULT, ArtifactError, Limits, SpecError, did_you_mean
from ..core.spec.pass_file import load_pass
from ..core.spec.rules import Pass
from ..core.weight_files import find
from .file_tensors import explain_unreadable, load, parse_object
from .updates import AdapterFile

OWN = "fxplug.adapter"  # the key of a file's metadata that says which passes it has, and which layers of the base
# what a stranger's file may name
BLOCKS = re.compile(r"fxplug\.(blocks|adapters):[A-Za-z]\w*|fxplug\.(adapters|core\.rewriter)\.widest:projections")
NUMBER = re.compile(r"_\d+$")  # of a second block at one place


def make_description(records: Sequence[Mapping[str, Any]], trained: Sequence[str]) -> str:
    """Return the description for a file's metadata: the passes of these records, and the names of the base's parameters in
    it."""
    passes = [
        {"name": entry["name"], "sites": [[site["path"], site["place"], site["block"]] for site in entry["sites"]],
         "rules": entry.get("rules")}
        for entry in records
    ]  # fmt: skip
    return json.dumps({"passes": passes, "trained": list(trained)})


def read_description(file: AdapterFile, limits: Limits = DEFAULT) -> dict[str, Any]:
    """Return a file's description of its passes. Raises ArtifactError if it is malformed."""
    where = f"{file.source}: its {OWN}"
    found = parse_object(reading.parse_json(file.about[OWN], reading.make_reporter(where), limits), where)
    passes, trained = found.get("passes"), found.get("trained")
    good = isinstance(passes, list) and isinstance(trained, list) and all(isinstance(name, str) for name in trained)
    if not good or not all(_is_pass(entry) for entry in passes):  # type: ignore[union-attr]
        raise ArtifactError(f"{where} is not a list of passes with their names and sites, and a list of trained parameters")
    return found


def _is_pass(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not isinstance(entry.get("sites"), list):
        return False
    rows = entry["sites"]
    return all(isinstance(row, list) and len(row) == 3 and all(isinstance(part, str) for part in row) for row in rows)


def check_tensors(state: Mapping[str, Any], where: str) -> dict[str, Tensor]:
    """Return the tensors of a file. Raises ArtifactError for a tensor whose numbers cannot be read."""
    for key, value in state.items():
        if odd := explain_unreadable(value):
            raise ArtifactError(f"{where}: '{key}' {odd}")
        if not value.is_meta and value.is_floating_point() and not value.isfinite().all():
            raise ArtifactError(f"{where}: '{key}' has numbers that are not finite (NaN or infinity)")
    return dict(state)


def check_no_own(file: AdapterFile, who: str) -> None:
    """Raises ArtifactError for a file that has passes by name, of which a tool of layers' updates can do nothing."""
    if file.own:
        names = ", ".join(entry["name"] for entry in read_description(file)["passes"]) or "trained layers"
        raise ArtifactError(
            f"{file.source} has {names} as a module has them, which {who} cannot take: load_adapter loads it into passes "
            "without slots, pass_for makes these"
        )


def make_pass(file: AdapterFile, name: str, chosen: Sequence[str] | None = None, limits: Limits = DEFAULT) -> Pass:
    """Return a pass called `name` with the rules of all passes of a file, and a rule for each parameter of the base in it.

    `chosen` selects passes by name; the parameters of the base are then left out.

    Raises ArtifactError for passes without a description, and for blocks and networks that are not fxplug's own.
    """
    found = read_description(file, limits)
    made: dict[str, Any] = {"rules": [], "inputs": {}, "networks": {}}
    known = [entry["name"] for entry in found["passes"]]
    if other := [one for one in chosen or () if one not in known]:
        raise SpecError(f"{file.source} has no pass '{other[0]}'{did_you_mean(other[0], known)}; it has {', '.join(known)}")
    if chosen is None:
        _check_places(file, found["passes"])
    for key in found["trained"] if chosen is None else ():
        path, _, param = key.rpartition(".")
        if not path:
            raise ArtifactError(
                f"{file.source}: '{key}' is a parameter of the model itself, which no pass can replace: apply the passes, call "
                f"fxplug.trainable(new, '{key}'), and load the file with load_adapter"
            )
        rule = {"match": {"path": f"re:^{re.escape(path)}$"}, "use": "fxplug.blocks:Head", "place": "param", "port": param}
        made["rules"].append({**rule, "options": {"same": True}})
    for entry in found["passes"]:
        if chosen is not None and entry["name"] not in chosen:
            continue
        way = f"apply the pass '{entry['name']}' yourself, and load the file with load_adapter"
        rules = entry.get("rules")
        if not isinstance(rules, dict):
            raise ArtifactError(f"{file.source} does not say the rules of the pass '{entry['name']}': {way}")
        for key, target in _named_code(rules):
            if not BLOCKS.fullmatch(target):
                what = f"the {key} '{target}' of '{entry['name']}'"
                raise ArtifactError(f"{file.source}: {what} is not one of fxplug's own: {way}")
        for key in ("inputs", "networks"):
            if same := sorted(made[key].keys() & rules.get(key, {}).keys()):
                raise ArtifactError(f"{file.source}: two of its passes have the {key} {', '.join(same)}: {way}")
            made[key] |= rules.get(key, {})
        made["rules"] += rules.get("rules", [])
    try:
        return load_pass({key: value for key, value in made.items() if value}, name=name, allow=())
    except SpecError as error:
        raise ArtifactError(f"{file.source}: its passes cannot be made: {error}") from None


def _check_places(file: AdapterFile, passes: Sequence[Mapping[str, Any]]) -> None:
    """Raises ArtifactError for two passes at one place, where one pass can put one block only."""
    seen: dict[tuple[str, str], str] = {}
    for entry in passes:
        for path, place, _ in entry["sites"]:
            other = seen.setdefault((path, place), entry["name"])
            if other != entry["name"] and place != "param":
                one, two = other, entry["name"]
                raise ArtifactError(
                    f"{file.source}: its passes '{one}' and '{two}' both have a block at '{path}' ({place}): make a pass of "
                    f"each, pass_for(file, gm, name='{one}', passes=['{one}']), and apply one after the other"
                )


def _named_code(rules: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the blocks and networks that the data of a pass names, and file paths, which no pass may name."""
    found = []
    for key, rows in (("block", rules.get("rules")), ("network", rules.get("networks"))):
        for row in (rows.values() if isinstance(rows, dict) else rows) or ():
            row = row if isinstance(row, dict) else {}
            given = row.get("options")
            options = given if isinstance(given, dict) else {}
            found += [(key, str(row["use"]))] if row.get("use") is not None else []
            found += [("file", str(value)) for name, value in options.items() if name == "weights" and value is not None]
    return found


def match_tensors(
    module: nn.Module, records: Mapping[str, Mapping[str, Any]], whole: Mapping[str, Tensor], file: AdapterFile
) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors of a module that a file has, each with its new value.

    `records` are the passes without slots that may take them, `whole` the parameters of the base that may, by name. A pass is
    matched by its name, or its blocks by their places, as `pass_for` merges all into one. Raises ArtifactError for entries that
    do not exist in the module, and for values missing from the file.
    """
    found = read_description(file)
    prefixes: dict[str, str] = {}
    blocks: dict[str, str] = {}
    others = [entry for name, entry in records.items() if name not in {row["name"] for row in found["passes"]}]
    taken: set[int] = set()
    for row in found["passes"]:
        same = records.get(row["name"])
        free = [site for entry in ([same] if same is not None else others) for site in entry["sites"]]
        for path, place, block in row["sites"]:
            wanted = (path, place, _kind(block))
            site = next(
                (s for s in free if id(s) not in taken and (s["path"], s["place"], _kind(s["block"])) == wanted), None
            )
            if site is None:
                known = [s["path"] for s in free]
                raise ArtifactError(
                    f"{file.source}: '{row['name']}' has a {_kind(block) or 'place'} at '{path}' ({place}), and no pass here "
                    f"does{did_you_mean(path, known)}: apply the pass first, or the one that pass_for makes of the file"
                )
            taken.add(id(site))
            if block:
                blocks[f"{block}."] = f"{site['block']}."
        owners = [same] if same is not None else others
        prefixes |= {f"{row['name']}.": f"{entry['name']}." for entry in owners[:1]}
    state = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}
    writes: list[tuple[Tensor, Tensor]] = []
    given: set[str] = set()
    for key, value in file.own.items():
        if key in found["trained"]:
            name, target = key, whole.get(key)
        else:
            name = _renamed(key, blocks) or _renamed(key, prefixes) or key
            target = state.get(name)
        if target is None:
            why = "no pass here has it"
            if key in found["trained"]:
                owner = key.rpartition(".")[0] or key
                why = f"it was trained, and is not trainable here: call fxplug.trainable(new, '{owner}') first"
            raise ArtifactError(f"{file.source}: '{key}' has no place: {why}{did_you_mean(name, state)}")
        if target.shape != value.shape:
            raise ArtifactError(f"{file.source}: '{key}' is {list(value.shape)}, and is {list(target.shape)} here")
        given.add(name)
        writes.append((target, value))
    touched = {f"{name.partition('.')[0]}." for name in given if name not in found["trained"]}
    kept = set(module.state_dict(keep_vars=True))
    modules = dict(module.named_modules())
    sites = [site for entry in records.values() for site in entry["sites"]]
    heads = {f"{site['block']}." for site in sites if getattr(modules.get(site["block"]), "resizes", False)}
    lacks = [
        name for name in state
        if name in kept and name.startswith(tuple(touched)) and name not in given and not name.startswith(tuple(heads))
    ]  # fmt: skip
    if lacks and touched:
        raise ArtifactError(f"{file.source} has no '{lacks[0]}', which a pass here needs ({len(lacks)} tensors are missing)")
    return writes


def read_pass_file(source: Any, records: Mapping[str, Mapping[str, Any]], limits: Limits) -> AdapterFile | None:
    """Return a file whose tensors all carry the name of one pass here, as in `<pass>.safetensors` of a saved folder; otherwise
    None."""
    if not isinstance(source, (str, os.PathLike)):
        return None
    file = find(source)
    state, _ = load(file, limits)
    owners = {str(key).partition(".")[0] for key in state}
    if len(owners) != 1 or not owners <= records.keys():
        return None
    about = {OWN: make_description([records[name] for name in owners], ())}
    return AdapterFile(str(file), (), {}, about, check_tensors(state, str(file)))


def _kind(block: str) -> str:
    return NUMBER.sub("", block.rpartition(".")[2])


def _renamed(key: str, prefixes: Mapping[str, str]) -> str:
    """Return a key under its owner's name in this module; "" if its owner is not among these."""
    parts = key.split(".")
    for end in range(len(parts) - 1, 0, -1):
        before = ".".join(parts[:end]) + "."
        if before in prefixes:
            return prefixes[before] + key.removeprefix(before)
    return ""
