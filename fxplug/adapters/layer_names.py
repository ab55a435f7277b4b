"""The names that models' own code gives the layers which diffusers names otherwise, found in a graph by its family's table.

Most adapter files that people share have those names. What is here is told from the graph alone: no model is asked for.
"""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .tables import read_table

# any vision transformer has them: they tell no family
SHARED_WITH_TIMM = tuple(f"blocks.{{i}}.{name}" for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"))
# what diffusers' `fuse_qkv_projections` calls several layers as one
FUSED = {
    "to_qkv": ("to_q", "to_k", "to_v"), "to_kv": ("to_k", "to_v"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"), "to_added_kv": ("add_k_proj", "add_v_proj"),
}  # fmt: skip
SWAPPED = "~"  # the two halves of the outputs change places

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a component of a path


@dataclass(frozen=True)
class Family:
    """How one family of models names its layers, a row of families.yaml, which says what these fields are."""

    name: str
    has: tuple[str, ...]
    names: Mapping[str, str]
    also: Mapping[str, str]


@functools.cache
def families() -> tuple[Family, ...]:
    """Return the families in the order in which a graph is compared with them."""
    made = []
    for row in read_table("families")["families"]:
        names, also = (_rows(row.get(key, {}), row.get("time", "")) for key in ("names", "also"))
        made.append(Family(row["name"], tuple(one.replace("{time}", row.get("time", "")) for one in row["has"]), names, also))
    return tuple(made)


def _rows(rows: Any, time: str, old: str = "", new: str = "") -> dict[str, str]:
    """Flatten a table with groups: their name -> ours."""
    made: dict[str, str] = {}
    for key, value in rows.items() if isinstance(rows, dict) else [("", one) for one in rows]:
        theirs, arrow, ours = key.partition(" ->")
        ours = ours.strip() if arrow else theirs
        if isinstance(value, str):
            made[old + theirs] = (new + value).replace("{time}", time)
        else:
            made |= _rows(value, time, f"{old}{theirs}." if theirs else old, f"{new}{ours}." if ours else new)
    return made


def map_first_names(layers: Iterable[str], also: bool = False) -> dict[str, tuple[str, ...]]:
    """Return the layers of a graph by their names in the family's original code, empty for a graph of no known family.

    Several layers are those whose outputs, in this order, were one layer's; a path that ends in `~` has the two halves of its
    outputs swapped. For a graph that contains such a model as a part (`transformer.`) it returns that part's layers. `also`
    adds the names of other tools, which no layer needs.
    """
    known = dict.fromkeys(layers)
    if any(path.startswith("down_blocks.0.resnets.") for path in known):
        return {name: (path,) for name, path in _unet(known).items()}
    found = family_of(known)
    if found is None:
        return {}
    family, start = found
    return _names({**family.names, **family.also} if also else family.names, known, start)


def map_fused_names(layers: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the `FUSED` name of layers of a graph, whether it has that layer or not, and these layers in order."""
    known = dict.fromkeys(layers)
    owners = dict.fromkeys(path.rpartition(".")[0] for path in known if path.endswith(("to_k", "add_k_proj")))
    pairs = [(owner, fused) for owner in owners for fused in FUSED]
    rows = {f"{owner}.{fused}": tuple(f"{owner}.{name}" for name in FUSED[fused]) for owner, fused in pairs}
    return {fused.removeprefix("."): paths for fused, paths in rows.items() if all(path in known for path in paths)}


def family_of(layers: Iterable[str]) -> tuple[Family, str] | None:
    """Return the family of a graph with these layers, and the prefix of their paths, "" for the whole graph."""
    kinds = {_NUMBER.sub("#", path) for path in layers}
    for family in families():
        first, *others = (_kind(name) for name in family.has)
        starts = {kind.removesuffix(first) for kind in kinds if kind == first or kind.endswith(f".{first}")}
        for start in sorted(starts, key=len):
            if "#" not in start and all(start + other in kinds for other in others):
                return family, start
    return None


def guess_family(names: Iterable[str]) -> str:
    """Return the name of the family whose own names match most of some layers' names; "" if there is none. Several: "a or
    b"."""
    counted = collections.Counter[str]()
    shared = re.compile("|".join(map(_pattern, SHARED_WITH_TIMM)))
    some = list(names)
    if all(map(shared.fullmatch, some)):
        return ""
    for family in families():
        old = re.compile("|".join(_pattern(name) for name in {**family.names, **family.also}))
        counted[family.name] = sum(bool(old.fullmatch(name) or old.fullmatch(name.replace("_", "."))) for name in some)
    most = max(counted.values())
    return " or ".join(name for name, count in counted.items() if count == most) if most > len(some) / 2 else ""


def _kind(name: str) -> str:
    """Replace the numbers in a path by a placeholder."""
    return _NUMBER.sub("#", name).replace("{i}", "#").replace("{last}", "#")


def _pattern(name: str) -> str:
    """Return a row's name as a regular expression; underscores may be dots, as kohya's names cannot be told apart."""
    text = re.escape(name).replace("_", "[_.]")
    return re.sub(r"\\\{(i|last)\\\}", r"\\d+", text).replace(r"\{\*\}", ".+")


def _names(table: Mapping[str, str], layers: Mapping[str, None], start: str) -> dict[str, tuple[str, ...]]:
    kinds: dict[str, list[str]] = {}
    for path in layers:
        if path.startswith(start):
            kinds.setdefault(_NUMBER.sub("#", path[len(start) :]), []).append(path[len(start) :])
    names: dict[str, tuple[str, ...]] = {}
    for old, new in table.items():
        owner, bracket, inner = new.removesuffix(SWAPPED).partition("[")
        targets = [owner + name for name in inner.removesuffix("]").split()] if bracket else [owner]
        kind, rest, _ = _kind(targets[0]).partition("{*}")
        paths = [path for found in kinds if found.startswith(kind) for path in kinds[found]] if rest else kinds.get(kind, [])
        form = re.escape(targets[0]).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{last\}", r"(?P<i>\d+)")
        matches = [m for path in paths if (m := re.fullmatch(form.replace(r"\{\*\}", "(?P<rest>.+)"), path))]
        if "{last}" in new:
            blocks = re.escape(new.partition("{last}")[0])
            numbers = [int(m[1]) for path in layers if (m := re.match(rf"{re.escape(start)}{blocks}(\d+)\.", path))]
            matches = [m for m in matches if int(m["i"]) == max(numbers)]
        for m in matches:
            groups = {"i": "", "rest": "", **m.groupdict()}

            def filled(text: str, of: Mapping[str, str] = groups) -> str:
                return text.replace("{i}", of["i"]).replace("{last}", of["i"]).replace("{*}", of["rest"])

            found = tuple(start + filled(name) for name in targets)
            if all(path in layers for path in found):
                names[filled(old)] = tuple(path + SWAPPED * new.endswith(SWAPPED) for path in found)
    return names


def _unet(layers: Mapping[str, None]) -> dict[str, str]:
    """Return the original names of Stable Diffusion's UNet, whose blocks are counted through all levels."""
    owners = {}  # a module of the graph -> its first name
    count: dict[str, dict[int, set[int]]] = {"down": {}, "up": {}}
    for path in layers:
        if found := re.match(r"(down|up)_blocks\.(\d+)\.resnets\.(\d+)\.", path):
            count[found[1]].setdefault(int(found[2]), set()).add(int(found[3]))
    number = 1
    for level in sorted(count["down"]):
        for n in sorted(count["down"][level]):
            owners[f"down_blocks.{level}.resnets.{n}"] = f"input_blocks.{number}.0"
            owners[f"down_blocks.{level}.attentions.{n}"] = f"input_blocks.{number}.1"
            number += 1
        owners[f"down_blocks.{level}.downsamplers.0.conv"] = f"input_blocks.{number}.0.op"
        number += 1
    number = 0
    for level in sorted(count["up"]):
        attends = any(path.startswith(f"up_blocks.{level}.attentions.") for path in layers)
        for n in sorted(count["up"][level]):
            owners[f"up_blocks.{level}.resnets.{n}"] = f"output_blocks.{number}.0"
            owners[f"up_blocks.{level}.attentions.{n}"] = f"output_blocks.{number}.1"
            number += 1
        owners[f"up_blocks.{level}.upsamplers.0"] = f"output_blocks.{number - 1}.{1 + attends}"
    owners |= {"mid_block.resnets.0": "middle_block.0", "mid_block.attentions.0": "middle_block.1"}
    owners |= {"mid_block.resnets.1": "middle_block.2"}
    unet = read_table("families")["unet"]
    resnet = {new: old for old, new in unet["resnets"].items()}
    names = {old: new for old, new in unet["names"].items() if new in layers}
    for path in layers:
        parts = path.split(".")
        for n in range(len(parts), 1, -1):
            owner, inner = ".".join(parts[:n]), ".".join(parts[n:])
            if owner in owners:
                inner = resnet.get(inner, inner) if ".resnets." in owner else inner
                names[".".join(filter(None, [owners[owner], inner]))] = path
                break
    return names


def rename_processor(layer: str) -> str:
    """Rename `X.processor.to_q` to `X.to_q`: the LoRAs of diffusers' attention processors update that layer."""
    owner, _, last = layer.removesuffix("_lora").rpartition(".")
    if owner.rpartition(".")[2] == "self_attn":  # a text encoder's
        last = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}.get(last, last)
    last = {"to_out": "to_out.0"}.get(last, last)
    return f"{owner.removesuffix('.processor')}.{last}" if owner else last
