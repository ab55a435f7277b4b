"""What a match admits: the regions that its patterns name, of the classes it asks for. Reads graphs, changes none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from ..errors import MatchError, brief_fields
from ..ir import functions
from ..ir.regions import Region, Regions
from ..spec.addresses import Port, chosen, is_pattern, parse_port
from ..spec.rules import Match, Rule
from .last_layer import LAST, last_layer

ALL_LINEAR = "all-linear"


@dataclass
class Hit:
    """A region that a match admits: what its path caught, the port that the pattern names, and which pattern it was."""

    key: str
    caught: dict[str, str]
    port: Port
    pattern: int

    __repr__ = brief_fields


def at(rule: Rule, name: str) -> str:
    """How an error about a rule begins."""
    return f"{rule.where}: {name}: " if str(rule.where) else f"{name}: "


def hits(regions: Regions, match: Match) -> list[Hit]:
    """The regions that a match admits, in the order of its patterns and of the run. `op` is not looked at.

    A container that the model never calls (an `nn.ModuleList` of blocks) stands for the regions in it. A bare name that is
    no path is the end of paths; `all-linear` is what PEFT means by it.
    """
    found: dict[tuple[str, Port], Hit] = {}
    for number, pattern in enumerate(match.patterns):
        port = parse_port(pattern)
        by_call = "@" in port.path
        names = {k: k if by_call else regions.by_key[k].path for k in regions.candidates(port.path)}
        if match.op and port.path == "**":
            names = {"": "", **names}  # the model's own operations
        if port.path:
            containers = {} if by_call else regions.containers(port.path)
            known = dict.fromkeys([*names.values(), *containers])
            if port.path.lower() == ALL_LINEAR and port.path not in known:
                caught = all_linear(regions, known)
            else:
                last = port.path == LAST and LAST not in known
                caught = chosen(last_layer(regions) if last else port.path, known)
        else:
            names, caught, containers = {"": "", **names}, {"": {}}, {}
        rows = {k: caught[name] for k, name in names.items() if name in caught}
        if match.within:
            rows = _below(regions, names, caught, match.within)
        else:
            inner = {path: groups for container, groups in caught.items() for path in containers.get(container, ())}
            rows = {**{k: inner[name] for k, name in names.items() if name in inner}, **rows}
        rows = {k: rows[k] for k, name in names.items() if k in rows and is_a(regions, name, match.module)}
        for key, groups in rows.items():
            if (by := regions.resized.get(regions.by_key[key].path)) is not None:
                if port.path in (key, LAST):
                    raise MatchError(f"'{key}' has another size since pass '{by}', which trains all of it: leave it out")
                continue
            found.setdefault((key, port), Hit(key, groups, replace(port, path=key), number))
    return list(found.values())


def all_linear(regions: Regions, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Every linear layer, as PEFT's `target_modules="all-linear"`: but for the last one where its weight has the shape of an
    Embedding's, the output embeddings of a language model."""
    paths = [name for name in names if name and "@" not in name]
    linears = [name for name in paths if not {"Linear", "TransposedLinear"}.isdisjoint(regions.classes(name))]
    shapes = {regions.module(name).weight.shape for name in paths if "Embedding" in regions.classes(name)}
    if linears and getattr(regions.module(linears[-1]).weight, "shape", None) in shapes:
        linears.pop()
    return {name: {} for name in linears}


def _below(
    regions: Regions, names: Mapping[str, str], above: Mapping[str, dict[str, str]], within: Sequence[str | type]
) -> dict[str, dict[str, str]]:
    """The layers of these classes at and below the paths above, with what the nearest of those caught."""
    found = {}
    for key, name in names.items():
        parts = name.partition("@")[0].split(".")
        around = (".".join(parts[:n]) for n in range(len(parts), -1, -1))
        nearest = next((path for path in around if path in above), None) if name else None
        if nearest is not None and is_a(regions, name, within):
            found[key] = above[nearest]
    return found


def is_a(regions: Regions, name: str, classes: Sequence[str | type]) -> bool:
    """Whether the module of a region is of one of these classes, by name."""
    known = regions.classes(name.partition("@")[0])
    return not classes or any((c if isinstance(c, str) else c.__name__) in known for c in classes)


def operations(region: Region, match: Match) -> list[fx.Node]:
    """The operations of a region that `op` names: by short name, as function or method, or by public name."""
    wanted = {op if isinstance(op, str) else functions.short_name(op) for op in match.op or ()}
    return [n for n in region.nodes if functions.short_name(n.target) in wanted or functions.names().get(n.target) in wanted]


def is_exact(match: Match, *names: str) -> bool:
    """Whether a match names its places one by one, and one of these names among them."""
    paths = [parse_port(pattern).path for pattern in match.patterns]
    return not match.within and not {*names}.isdisjoint(paths) and not any(map(is_pattern, paths))
