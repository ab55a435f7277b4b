"""What a match admits: the regions that its patterns name, the last layer, and layers alike that it left."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx, nn

from ..errors import MatchError, format_fields
from ..ir import functions
from ..ir.graph import is_added
from ..ir.regions import RegionNodes, Regions, format_names
from ..spec.addresses import Port, choose_names, is_pattern, parse_port
from ..spec.rules import Match, Pass, Rule

LAST = "last-layer"  # a path that stands for it
KINDS = ("Linear", "Conv1d", "Conv2d", "Conv3d")
# what stands behind a layer within a model, and not behind its last one; a softmax, sigmoid or tanh may
ACTIVATIONS = {
    "relu", "relu6", "leakyrelu", "leaky_relu", "prelu", "rrelu", "elu", "celu", "selu", "gelu", "silu", "mish", "hardswish",
    "softplus", "glu",
}  # fmt: skip


def last_layer(regions: Regions) -> str:
    """Return the path of the Linear or convolution from whose result the model's output is made by operations without weights.

    Raises MatchError if there is no such layer, or if there are several.
    """
    called: dict[fx.Node, RegionNodes] = {r.leaf: r for r in regions.by_key.values() if r.leaf is not None}
    called |= {node: r for r in regions.by_key.values() if r.leaf is None and _is_head(regions, r) for _, node in r.outputs}
    (output,) = (node for node in regions.graph.nodes if node.op == "output")
    found = [_made_of(regions, node, called) for node in output.all_input_nodes]
    heads = list(dict.fromkeys(path for paths, others in found for path in paths if not others))
    if len(heads) == 1:
        return heads[0]
    if heads:
        raise MatchError(f"this model has {len(heads)} last layers, {format_names(heads)}: name the ones to change, at: [...]")
    made = list(dict.fromkeys(path for paths, others in found for path in (*paths, *others)))
    comes = f"its result is from {format_names(made)}" if made else "its result is made of constants"
    raise MatchError(
        f"this model has no single last layer: {comes}, not from one Linear or convolution; name the layer to change, at: ..., "
        "or build the model with one (timm's num_classes)"
    )


def _made_of(regions: Regions, result: fx.Node, called: dict[fx.Node, RegionNodes]) -> tuple[list[str], list[str]]:
    """Return the layers from whose results a result is made without other weights, and its other sources."""
    heads: dict[str, None] = {}
    others: dict[str, None] = {}
    todo, seen = [result], set[fx.Node]()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        region = called.get(node)
        beside = str(node.meta["pass"].get("site", "")).partition("@")[0] if is_added(node) else ""
        if region is None and beside and beside in regions.calls:  # a block at a layer
            region = regions.calls[beside][0]
        if region is not None and _is_head(regions, region):
            heads.setdefault(region.path)
        elif region is not None and any(True for _ in regions.module(region.path).parameters()):
            others.setdefault(f"{region.path} ({regions.classes(region.path)[0]})")
        elif node.op in ("placeholder", "get_attr"):
            others.setdefault(str(node.target))
        elif (name := functions.get_short_name(node.target).rstrip("_")) in ACTIVATIONS or any(
            value.op == "get_attr" for value in node.all_input_nodes
        ):
            at = next(reversed(node.meta.get("nn_module_stack") or {"": ""}))
            others.setdefault(f"{at} ({regions.classes(at.partition('@')[0])[0]})" if at else name)
        elif region is not None and regions.classes(region.path)[0].lower() in ACTIVATIONS:
            others.setdefault(f"{region.path} ({regions.classes(region.path)[0]})")
        else:
            todo += [v for v in node.all_input_nodes if "shape" in v.meta or node.target is operator.getitem]
    return list(heads), list(others)


def _is_head(regions: Regions, region: RegionNodes) -> bool:
    return bool(region.path) and not regions.inserted(region.path) and regions.classes(region.path)[0] in KINDS


ALL_LINEAR = "all-linear"


@dataclass
class Hit:
    """A region that a match admits: what its path caught, the port that the pattern names, and which pattern it was."""

    key: str
    caught: dict[str, str]
    port: Port
    pattern: int

    __repr__ = format_fields


def format_prefix(rule: Rule, name: str) -> str:
    """Return the prefix of an error about a rule."""
    return f"{rule.where}: {name}: " if str(rule.where) else f"{name}: "


def find_hits(regions: Regions, match: Match) -> list[Hit]:
    """Return the regions that a match admits, in the order of its patterns and of the run. `op` is ignored.

    A container that the model never calls (an `nn.ModuleList` of blocks) represents the regions in it. A bare name that is no
    path is matched as a suffix of paths; `all-linear` has PEFT's meaning.
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
                caught = choose_names(last_layer(regions) if last else port.path, known)
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
                    raise MatchError(f"'{key}' was resized by pass '{by}', which trains all of it: leave it out")
                continue
            found.setdefault((key, port), Hit(key, groups, replace(port, path=key), number))
    return list(found.values())


def find_composites(root: nn.Module) -> dict[str, nn.Module]:
    """Return the torch.nn modules that contain layers but are called as one, such as MultiheadAttention, by path."""
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    return {
        path: module
        for path, module in root.named_modules()
        if module._modules and type(module).__module__.startswith("torch.nn.modules.") and not isinstance(module, containers)
    }


def is_catch_all(pattern: str) -> bool:
    """Return whether a pattern names no place, but matches every region that the model calls."""
    return parse_port(pattern).path.lower() in ("*", "**", "re:.*", ALL_LINEAR)


def without_classes(match: Match) -> Match:
    """Return the match without its module classes if its rule maps parameters, where `select_parameters` checks them."""
    return replace(match, module=()) if match.bare else match


def select_parameters(regions: Regions, path: str, match: Match, pattern: str) -> list[str]:
    """Return the parameters of a module that a rule with place `param` maps, selected by a pattern for their names."""
    names = regions.parameters(path, pattern)
    if not match.bare or is_a(regions, path, match.module):
        return names
    own, of_torch = regions.module(path)._parameters, any(hasattr(nn, kind) for kind in regions.classes(path))
    matrix = (value := own.get("weight")) is not None and value.dim() > 1 and not of_torch
    return [name for name in names if name not in ("weight", "bias") or (matrix and name == "weight")]


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
    """Return the layers of these classes at and below the paths above, with the captures of the nearest of those."""
    found = {}
    for key, name in names.items():
        parts = name.partition("@")[0].split(".")
        around = (".".join(parts[:n]) for n in range(len(parts), -1, -1))
        nearest = next((path for path in around if path in above), None) if name else None
        if nearest is not None and is_a(regions, name, within):
            found[key] = above[nearest]
    return found


def is_a(regions: Regions, name: str, classes: Sequence[str | type]) -> bool:
    """Return whether the module of a region is of one of these classes, by name."""
    known = regions.classes(name.partition("@")[0])
    return not classes or any((c if isinstance(c, str) else c.__name__) in known for c in classes)


def find_operations(region: RegionNodes, match: Match) -> list[fx.Node]:
    """Return the operations of a region that `op` names: by short name, as function or method, or by public name."""
    wanted = {op if isinstance(op, str) else functions.get_short_name(op) for op in match.op or ()}
    public = functions.name_functions()
    return [n for n in region.nodes if functions.get_short_name(n.target) in wanted or public.get(n.target) in wanted]


def is_exact(match: Match, *names: str) -> bool:
    """Return whether a match lists its places one by one, one of these names among them."""
    paths = [parse_port(pattern).path for pattern in match.patterns]
    return not match.within and not {*names}.isdisjoint(paths) and not any(map(is_pattern, paths))


HOLDERS = ("Sequential", "ModuleList", "ModuleDict", "Identity", "Dropout")  # a class that says nothing of what one does
SHOWN = 3  # so many patterns are listed


def describe_unmatched(views: Sequence[Regions], p: Pass, matched: Iterable[tuple[Rule, str]]) -> str:
    """Say which layers are similar to the `matched` ones, each a rule and the path that it matched; empty for none.

    Similar is a layer of the same class that is in the same module as one that was taken, or has its name. Rules that match
    operations, or whose `expect` says how many places there are, leave nothing, and no rule does in a pass with `expect`.
    """
    rules = [rule for rule in p.rules if not rule.counted and not rule.match.op]
    paths = [path for of, path in matched if any(of is rule for rule in rules)] if p.expect is None else []
    known = {path: regions for regions in reversed(views) for path in regions.calls if path}
    taken = {path: known[path] for key in paths if (path := key.partition("@")[0]) in known}
    classes = {regions.classes(path)[0] for path, regions in taken.items()} - {*HOLDERS}
    around = {(_owner(regions, path), regions.classes(path)[0]) for path, regions in taken.items()}
    ends = {(_end(path), regions.classes(path)[0]) for path, regions in taken.items()}
    left = [
        path
        for path, regions in known.items()
        if path not in taken
        and (name := regions.classes(path)[0]) in classes
        and not regions.inserted(path)
        and ((_owner(regions, path), name) in around or (_end(path), name) in ends)
    ]
    if not left:
        return ""
    named: dict[str, list[str]] = {}
    for path in left:
        named.setdefault(_end(path), []).append(path)
    patterns = [paths[0] if len(paths) == 1 else f"**.{end}" for end, paths in named.items()]
    listed = ", ".join(patterns[:SHOWN]) + (f", ... ({len(patterns)} patterns)" if len(patterns) > SHOWN else "")
    plural = "s were" if len(left) > 1 else " was"
    return f"{len(left)} similar layer{plural} not matched: {listed}{_with(p, rules, patterns)}"


def _with(p: Pass, rules: Sequence[Rule], patterns: list[str]) -> str:
    """Return how to extend the pattern of a pass's one rule to match them too, as YAML; "" if that is not possible."""
    if len(rules) != 1 or len(patterns) > SHOWN or any(isinstance(item, tuple) for item in rules[0].args):
        return ""
    key = "at" if "at" in p.params else "path"
    text = json.dumps([*rules[0].match.patterns, *patterns], ensure_ascii=False)
    return f" (a pattern that matches them too: {key}: {text})" if len(text) < 400 else ""


def _owner(regions: Regions, path: str) -> str:
    """Return the path of the nearest module around a layer that the model calls."""
    above = path.rpartition(".")[0]
    while above and above not in regions.calls:
        above = above.rpartition(".")[0]
    return above


def _end(path: str) -> str:
    """Return a layer's short name: the end of its path, starting with the last part that is not a number."""
    parts = path.split(".")
    at = next((index for index in range(len(parts) - 1, -1, -1) if not parts[index].isdigit()), 0)
    return ".".join(parts[at:])
