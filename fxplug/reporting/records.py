"""A graph as plain records: what a page shows of a module, what its passes changed, and what stood there before."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import fx

from ..core.ir import functions, ops
from ..core.ir.graph import is_added, without_edges
from ..core.ir.regions import Regions
from ..core.ir.text import format_node
from ..core.ir.traced_module import TracedModule


@dataclass
class NodeText:
    """One node of a graph, the edges of regions left out.

    `kind` is input, output, layer (a module that is called whole), block (what a pass put in), op, weight, or note (sizes and
    guards: no tensor comes of it). `label` is the class or function, `level` the keys of the regions around it from the model
    on, `path` the module or tensor that it names, `reads` the nodes whose values it takes, `line` its text. `owner` is the pass
    that put it in, `site` the place where.
    """

    name: str
    kind: str
    label: str
    level: tuple[str, ...]
    reads: tuple[str, ...]
    line: str
    path: str = ""
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    owner: str = ""
    site: str = ""
    whole: str = ""  # the tuple that this is a member of
    behind: str = ""  # the node whose readers read this one now


@dataclass
class GraphText:
    """The records of a graph by their names in order, the classes of its regions by key, and what their inputs and results are
    called: by region, the port for the node whose value goes through."""

    records: dict[str, NodeText]
    classes: dict[str, str]
    ports: dict[str, dict[str, str]] = field(default_factory=dict)


def make_listing(module: TracedModule) -> GraphText:
    """Return the records of the active graph."""
    regions = Regions(module.graph, module)
    stacks: dict[str, tuple[str, ...]] = {"": ("",)}
    leaves = {key for key, region in regions.by_key.items() if region.leaf is not None}
    ports: dict[str, dict[str, str]] = {}
    plain = without_edges(module.graph)
    levels: dict[str, tuple[str, ...]] = {}
    for node in module.graph.nodes:
        stack = tuple(node.meta.get("nn_module_stack") or ("",))
        port = node.meta.get("port")
        if node.op == "call_module" and not is_added(node) and len(stack) > 1:
            stacks[stack[-1]] = stack
            stack = stack[:-1]
        elif node.target is ops.edge and port is not None:  # one that a pass put between two of its values has no port
            name = ".".join(map(str, port.keys)) or "result"
            ports.setdefault(port.path, {})[f"{port.side}:{_through(node).name}"] = name
        if not is_added(node):
            stacks.update({stack[i]: stack[: i + 1] for i in range(len(stack)) if stack[i] not in stacks})
        levels[node.name] = stack
    records = {}
    for node in plain.nodes:
        made = node.meta.get("pass", {}) if "pass" in node.meta else {}
        level = levels.get(node.name, ("",))
        if is_added(node) and len(level) == 1:
            level = _beside(str(made.get("site", "")), str(made.get("place", "")), stacks, leaves, levels)
        records[node.name] = _record(module, regions, node, level, made)
    paths = {key: key.partition("@")[0] for key in stacks}
    classes = {key: regions.classes(path)[0] for key, path in paths.items() if key not in leaves}
    return GraphText(records, classes, ports)


def _through(node: fx.Node) -> fx.Node:
    while node.target is ops.edge and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _beside(
    site: str, place: str, stacks: dict[str, tuple[str, ...]], leaves: set[str], levels: dict[str, tuple[str, ...]]
) -> tuple[str, ...]:
    """Return the region that shows a block: the one around its site, or the site's own for a block before its contents."""
    if site in stacks:
        inside = place == "before" and site not in leaves or not site
        return stacks[site] if inside else stacks[site][:-1]
    return levels.get(site, ("",))


def _record(module: TracedModule, regions: Regions, node: fx.Node, level: tuple[str, ...], made: Any) -> NodeText:
    shape = node.meta.get("shape")
    is_member = node.op == "call_function" and node.target is operator.getitem and "shape" not in node.all_input_nodes[0].meta
    kinds = {"placeholder": "input", "output": "output", "get_attr": "weight", "call_module": "layer"}
    kind = kinds.get(node.op, "op" if shape is not None or any("shape" in user.meta for user in _members(node)) else "note")
    if kind == "input" and shape is None and not made and not any("shape" in user.meta for user in _members(node)):
        kind = "note"
    if is_added(node) and kind in ("op", "layer"):
        kind = "block"
    if node.op == "call_module":
        path = str(node.target)
        label = regions.classes(path)[0]
    else:
        path = str(node.target) if node.op in ("get_attr", "placeholder") else ""
        name = functions.name_functions().get(node.target) or getattr(node.target, "__name__", str(node.target))
        label = str(name).rpartition(".")[2]
    return NodeText(
        name=node.name,
        kind=kind,
        label=label,
        level=level,
        reads=tuple(n.name for n in node.all_input_nodes),
        line=format_node(node),
        path=path,
        shape=None if shape is None else tuple(int(size) for size in shape),
        dtype=str(node.meta.get("dtype", "")).removeprefix("torch."),
        owner=str(made.get("name", "")),
        site=str(made.get("site", "")),
        whole=node.all_input_nodes[0].name if is_member and shape is not None else "",
        behind=str(node.meta.get("behind", "")) if is_added(node) else "",
    )


def _members(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.target is operator.getitem]


def find_changes(base: TracedModule, new: TracedModule) -> dict[str, Any]:
    """Return the removed and changed records of the graph of `base`, as plain values that are saved with a module.

    `gone` has the removed records, `was` the reads and the line of those that read something else now, `classes` the classes of
    the regions of the removed ones.
    """
    before, after = make_listing(base), make_listing(new)
    gone = [asdict(r) for name, r in before.records.items() if name not in after.records]
    both = [(r, after.records[name]) for name, r in before.records.items() if name in after.records]
    keys = {key for r in gone for key in r["level"]}
    return {
        "gone": gone,
        "was": {old.name: [old.reads, old.line] for old, now in both if (old.reads, old.line) != (now.reads, now.line)},
        "classes": {key: name for key, name in before.classes.items() if key in keys},
    }


def undo_changes(after: GraphText, changed: Mapping[str, Any] | None) -> dict[str, NodeText]:
    """Return the records of a graph before its passes, from its current records and the saved `find_changes`.

    Without saved changes they are the records that no pass added, each with its reads among them.
    """
    kept = {name: record for name, record in after.records.items() if not record.owner}
    if changed is None:
        return {name: replace(r, reads=tuple(value for value in r.reads if value in kept)) for name, r in kept.items()}
    was = changed["was"]
    gone = {row["name"]: _fill_in(row) for row in changed["gone"]}
    changed_back = {n: replace(r, reads=tuple(was[n][0]), line=was[n][1]) if n in was else r for n, r in kept.items()}
    return {**changed_back, **gone}


def _fill_in(row: Mapping[str, Any]) -> NodeText:
    shape = row["shape"]
    return NodeText(**{**row, "level": tuple(row["level"]), "reads": tuple(row["reads"]), "shape": shape and tuple(shape)})
