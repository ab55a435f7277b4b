"""What an artifact says of the passes in it, checked before anything reads it: keys, their kinds, and the modules they name."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from ..errors import ArtifactError, shown

ENTRY: dict[str, tuple[type, ...]] = {
    "name": (str,), "params": (dict,), "train": (bool,), "neutral": (bool,), "sites": (list,), "inputs": (list,),
    "networks": (list,),
}  # fmt: skip
SITE: dict[str, tuple[type, ...]] = {"path": (str,), "place": (str,), "block": (str,)}
BANK: dict[str, tuple[type, ...]] = {"kind": (str,), "slots": (int,), "rank": (int,), "shape": (list, tuple)}


def check_passes(passes: Any, modules: Container[str]) -> None:
    """Raises ArtifactError unless this is a list of passes as `apply` writes them down; `modules` are the paths there are."""
    if type(passes) is not list:
        raise ArtifactError(f"graph.json: the passes must be a list, not {shown(passes)}")
    for number, entry in enumerate(passes):
        where = f"graph.json: pass {number + 1}"
        _check(entry, ENTRY, where)
        if "gates" in entry["networks"] and f"{entry['name']}.gates.table" not in modules:
            raise ArtifactError(f"{where} has slots, and there is no module '{shown(entry['name'])}.gates.table'")
        for index, site in enumerate(entry["sites"]):
            _check(site, SITE, f"{where}, site {index + 1}")
            if "bank" in site and "gates" not in entry["networks"]:
                raise ArtifactError(f"{where} has slots, and no network 'gates', which says how much of each is taken")
            if "bank" in site:
                _check(site["bank"], BANK, f"{where}, the bank of site {index + 1}")
                if site["block"] not in modules:  # elsewhere it may be the kind of operation that a pass made
                    raise ArtifactError(f"{where}, site {index + 1}: there is no module {shown(site['block'])}, its block")


def _check(value: Any, keys: Mapping[str, tuple[type, ...]], where: str) -> None:
    if type(value) is not dict:
        raise ArtifactError(f"{where} must be values by name, not {shown(value)}")
    for key, kinds in keys.items():
        if key not in value:
            raise ArtifactError(f"{where} has no '{key}': the file is not as fxplug.save wrote it")
        if type(value[key]) not in kinds:
            raise ArtifactError(f"{where}: its '{key}' is {shown(value[key])}, which cannot be")
