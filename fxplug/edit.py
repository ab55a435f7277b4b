"""Sites to a rewritten module: a copied graph on shared weights. The only file that edits graphs."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import networkx
import torch
from torch import fx, nn

from . import ops
from .errors import ClashError, FxplugError, MatchError, SpecError, did_you_mean
from .match import Regions, Site, fill, find, find_input, find_output, source
from .module import Container, Graph, TracedModule, copy_graph, shell
from .paths import Port, identifier, parse_port
from .spec import Pass, Rule, import_target


def apply(gm: TracedModule, *passes: Pass) -> TracedModule:
    """The module that the passes make of `gm`, which stays as it was.

    Graph and module tree are copied, weights are shared. The passes run in the order given and each sees what the former
    left; all sites of a pass are found before any edit. New parameters live under `<pass>.<path of the site>.<BlockClass>`.

    Raises MatchError, ClashError or SpecError, with the pass's file and line; nothing is changed then.
    """
    if not isinstance(gm, TracedModule):
        raise SpecError(f"apply takes a traced module, not {type(gm).__name__}: fxplug.trace(model, inputs) makes one")
    for p in passes:
        gm = _apply(gm, p)
    return gm


def _apply(gm: TracedModule, p: Pass) -> TracedModule:
    applied = gm.meta.get("passes", [])
    if p.name in {entry["name"] for entry in applied}:
        raise ClashError(
            f"pass '{p.name}' is already applied here; give the second one a name of its own (name: {p.name}_2) "
            "if both are wanted"
        )
    if hasattr(gm, p.name) and p.name in dict(gm.named_children()):
        raise ClashError(f"the model has a module '{p.name}' of its own; give the pass another name (name: ...)")
    if p.networks:
        raise SpecError(f"{p.name}: 'networks' are not known to this version")
    for rule in p.rules:
        if rule.place == "param":
            raise SpecError(f"{p.name}: place 'param' is not known to this version", where=rule.where)
    sites = find(gm, p)
    tree = shell(gm)
    owners: dict[str, Any] = {}
    first = next((t for t in gm.parameters() if t.is_floating_point()), None)
    blocks = {id(site): _block(tree, site, p, owners, first) for site in sites}
    graphs = {mode: copy_graph(graph) for mode, graph in gm.graphs.items()}
    for graph in graphs.values():
        Editor(graph, tree, p, applied).run(sites, blocks)
    new = TracedModule(tree, graphs, gm._origin, gm._extras)
    new.twin_error = gm.twin_error
    new.meta = {**gm.meta, "passes": [*applied, _entry(p, sites, blocks)]}
    return new


def _entry(p: Pass, sites: list[Site], blocks: Mapping[int, tuple[str, nn.Module]]) -> dict[str, Any]:
    """What a module remembers of a pass: plain values, saved with it."""
    return {
        "name": p.name,
        "about": p.about,
        "params": _plain(dict(p.params)),
        "lr": p.lr,
        "weight_decay": p.weight_decay,
        "train": p.train,
        "neutral": all(getattr(block, "neutral", False) for _, block in blocks.values()),
        "sites": [{"path": s.node or s.path, "place": s.rule.place, "block": blocks[id(s)][0]} for s in sites],
        "inputs": list(p.inputs),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


# --- blocks


def _block(tree: nn.Module, site: Site, p: Pass, owners: dict[str, Any], weight: torch.Tensor | None) -> tuple[str, nn.Module]:
    """The block of a site, put into the module tree; calls of one module share one, other rules and ports do not.

    `weight` says device and dtype where the site has no weights of its own.
    """
    rule = site.rule
    kind = _block_class(rule)
    first = name = ".".join(filter(None, [p.name, site.name, kind.__name__]))
    owner_key = (id(rule), site.port.side, site.port.keys if not site.node else ())
    number = 2
    while owners.setdefault(name, owner_key) != owner_key:
        name, number = f"{first}_{number}", number + 1
    try:
        return name, tree.get_submodule(name)
    except AttributeError:
        pass
    try:
        _check_options(kind, rule)
        block = _make(kind, site, weight).train(tree.training)
    except FxplugError as error:
        text = getattr(error, "finding", str(error))
        raise SpecError(f"{p.name}: {site.node or site.path or 'the model'}: {text}", where=rule.where) from None
    except Exception as error:
        error.add_note(f"while {kind.__name__}.at made a block for '{site.path}' ({str(rule.where) or p.name})")
        raise
    owner = tree
    *parents, last = name.split(".")
    for part in parents:
        if part not in owner._modules:
            owner._modules[part] = Container(("Added",))
        owner = owner._modules[part]  # type: ignore[assignment]
    owner._modules[last] = block
    return name, block


def _block_class(rule: Rule) -> type[nn.Module]:
    kind = rule.use if isinstance(rule.use, type) else import_target(rule.use, rule.where)
    if not isinstance(kind, type) or not issubclass(kind, nn.Module):
        raise SpecError(f"'{rule.use}' is no module class: a block is an nn.Module", where=rule.where)
    if not callable(getattr(kind, "at", None)):
        raise SpecError(
            f"block class '{kind.__name__}' has no classmethod 'at(site, **options)', which makes a block for a site",
            where=rule.where,
        )
    return kind


def _check_options(kind: type[nn.Module], rule: Rule) -> None:
    parameters = inspect.signature(kind.at).parameters  # type: ignore[attr-defined]
    known = [n for n, v in parameters.items() if v.kind is not v.VAR_KEYWORD][1 if "self" not in parameters else 0 :]
    if any(v.kind is v.VAR_KEYWORD for v in parameters.values()):
        return
    for name in rule.options:
        if name not in known:
            raise SpecError(
                f"{kind.__name__} takes no option '{name}'{did_you_mean(name, known)}; it takes {', '.join(known) or 'none'}"
            )


def _make(kind: type[nn.Module], site: Site, weight: torch.Tensor | None) -> nn.Module:
    """A block on the device and, for floating-point weights, in the dtype of the weights around it."""
    near = next((t for t in site.module.parameters() if t.is_floating_point()), weight)
    device = torch.device("cpu") if near is None else near.device
    with torch.device(device), torch.random.fork_rng(enabled=False):
        block: nn.Module = kind.at(site, **site.rule.options)  # type: ignore[attr-defined]
    if near is not None:
        block.to(device)
        for parameter in block.parameters():
            if parameter.is_floating_point() and parameter.dtype != near.dtype:
                parameter.data = parameter.data.to(near.dtype)
    return block


# --- graphs


class Editor:
    """One pass on one copied graph."""

    def __init__(self, graph: Graph, tree: nn.Module, p: Pass, applied: list[dict[str, Any]]) -> None:
        self.graph = graph
        self.p = p
        self.earlier: dict[str, list[tuple[str, str]]] = {}  # region: the passes that put a block there, and the place
        for entry in applied:
            for site in entry["sites"]:
                self.earlier.setdefault(site["path"], []).append((entry["name"], site["place"]))
        self.regions = Regions(graph, tree)
        self.by_name: dict[str, fx.Node] = {node.name: node for node in graph.nodes}
        self.kept: dict[str, fx.Node] = {}
        self.behind: dict[str, fx.Node] = {n.meta["behind"]: n for n in graph.nodes if "behind" in n.meta}
        self.inputs = self.add_inputs()

    def run(self, sites: list[Site], blocks: Mapping[int, tuple[str, nn.Module]]) -> None:
        for site in sites:
            if self.present(site):
                self.insert(site, *blocks[id(site)])
        self.graph.lint()

    def present(self, site: Site) -> bool:
        """Whether this graph has the site: a region that runs in training only is in one of two graphs."""
        return site.node in self.by_name if site.node else site.path in self.regions.by_key

    def add_inputs(self) -> dict[str, fx.Node]:
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        taken = {str(n.target).lstrip("*") for n in placeholders}
        found = {}
        for name in self.p.inputs:
            if name in taken:
                raise ClashError(f"{self.p.name}: the model has an argument '{name}' already; give the input another name")
            last = [n for n in self.graph.nodes if n.op == "placeholder"][-1]
            starred = last.target.startswith("**")
            optional = any(n.args for n in placeholders)
            at = self.graph.inserting_before(last) if starred else self.graph.inserting_after(last)
            with at:
                default = None if optional else inspect.Signature.empty
                node = self.graph.create_node("placeholder", name, () if default is not None else (None,), {}, name=name)
            node.meta["pass"] = {"name": self.p.name}
            node.meta["nn_module_stack"] = placeholders[0].meta["nn_module_stack"]
            found[name] = node
        return found

    def insert(self, site: Site, name: str, block: nn.Module) -> None:
        """Put one block in: call it with its arguments behind the last of them, and give its result to the users."""
        rule = site.rule
        slot = self.slot(site)
        args = [self.argument(site, index, item, slot) for index, item in enumerate(rule.args)]
        users = slot.users()
        last = max([*args, slot.value])  # nodes compare by their place in the graph
        self.check_order(site, users, args, last)
        with self.graph.inserting_after(last):
            node = self.graph.create_node("call_module", name, tuple(args), {}, name=identifier(name))
        node.meta["nn_module_stack"] = {"": ("", "")}
        node.meta["pass"] = {
            "name": self.p.name,
            "site": site.node or site.path,
            "place": rule.place,
            "block": type(block).__name__,
            "where": str(rule.where),
        }
        node.meta.update({k: slot.value.meta[k] for k in ("shape", "dtype") if k in slot.value.meta})
        value = node
        if rule.name is not None:
            value, extra = (self.item(node, i) for i in (0, 1))
            value.meta.update({k: node.meta[k] for k in ("shape", "dtype") if k in node.meta})
            self.kept[fill(rule.name, site.caught)] = extra
        slot.put(value, {node, value})
        if slot.only is None:
            value.meta["behind"] = slot.value.name
            self.behind[slot.value.name] = value
        if rule.place == "replace":
            self.drop_region(site)

    def item(self, node: fx.Node, index: int) -> fx.Node:
        with self.graph.inserting_after(node.next if node.next in node.users else node):
            item = self.graph.call_function(operator.getitem, (node, index))
        item.meta.update({"pass": node.meta["pass"], "nn_module_stack": node.meta["nn_module_stack"]})
        return item

    def slot(self, site: Site) -> Slot:
        """The place where the value that a site changes is written."""
        if site.node:
            node = self.by_name[site.node]
            if site.rule.place == "before":
                value = next(a for a in node.all_input_nodes if "shape" in a.meta)
                return Slot(value, node)
            return Slot(self.newest(node))
        region = self.regions.by_key[site.path]
        if site.port.side == "in":
            port, index, reader = find_input(self.regions, region, site.port)
            given = reader.args[0] if region.leaf is None else [*reader.args, *reader.kwargs.values()][index]
            assert isinstance(given, fx.Node)
            return Slot(given, reader, None if region.leaf is None else index)
        node = find_output(self.regions, region, site.port)
        self.refuse_replaced(site)
        if region.leaf is None:
            read = node.args[0]
            assert isinstance(read, fx.Node)
            return Slot(read, node)
        return Slot(self.newest(node))

    def newest(self, node: fx.Node) -> fx.Node:
        """What the users of a leaf's result see now: the result of the last block put behind it."""
        while node.name in self.behind:
            node = self.behind[node.name]
        return node

    def refuse_replaced(self, site: Site) -> None:
        replaced = site.rule.place == "replace"
        here = {site.path: self.earlier.get(site.path, [])}
        if replaced:
            here.update({path: found for path, found in self.earlier.items() if path.startswith(f"{site.path}.")})
        for path, found in here.items():
            for name, place in found:
                if replaced or place == "replace":
                    raise ClashError(
                        f"{self.p.name}: '{path}' has a block of pass '{name}' ({place}) and cannot be "
                        f"{'replaced' if replaced else 'extended, since it was replaced'}: narrow one of the two passes"
                    )

    def argument(self, site: Site, index: int, item: Any, slot: Slot) -> fx.Node:
        """The node of one of a rule's arguments, as it is now."""
        rule = site.rule
        if item == "value" or item == ("x" if rule.place == "before" else "y"):
            return slot.value
        if site.node and item in ("x", "y"):
            node: fx.Node = self.by_name[site.node]
            return node if item == "y" else next(a for a in node.all_input_nodes if "shape" in a.meta)
        address: str = site.args[index].address
        if item in self.inputs:
            return self.inputs[item]
        if address in self.kept:
            return self.kept[address]
        port = Port(site.path, "in") if item == "x" else Port(site.path, "out") if item == "y" else parse_port(address)
        return self.now(port)

    def now(self, port: Port) -> fx.Node:
        """The value at a port, with the blocks that are there already."""
        node = source(self.regions, port)
        region = self.regions.by_key[port.path]
        return self.newest(node) if region.leaf is not None and port.side == "out" else node

    def check_order(self, site: Site, users: list[fx.Node], args: list[fx.Node], last: fx.Node) -> None:
        """Refuse a block whose inputs come from behind the place where its result is used."""
        early = [u for u in users if u <= last and u not in args]
        early = [u for u in early if u is not last or u in users]
        if not early:
            return
        late = max(args)
        which = site.rule.args[args.index(late)]
        where = f"{site.rule.where}: " if str(site.rule.where) else ""
        why = "depends on it" if _reaches(early, late) else "is computed only after it was used"
        raise MatchError(
            f"{where}{self.p.name}: the value '{site.args[args.index(late)].address or which}' cannot flow to "
            f"'{site.port}': it {why}, so it would flow backward; a value can only flow to what runs later"
        )

    def drop_region(self, site: Site) -> None:
        """Erase the nodes of a replaced region that nothing uses any more."""
        region = self.regions.by_key[site.path]
        inside = self.inside.get(site.path, []) if region.leaf is None else [region.leaf]
        keep = _needed(inside)
        for node in reversed(inside):
            if node not in keep:
                self.graph.erase_node(node)

    @cached_property
    def inside(self) -> dict[str, list[fx.Node]]:
        """The model's own nodes by the regions around them."""
        found: dict[str, list[fx.Node]] = {}
        for node in self.graph.nodes:
            if "pass" not in node.meta and node.op not in ("placeholder", "output"):
                for key in node.meta.get("nn_module_stack", {}):
                    found.setdefault(key, []).append(node)
        return found


class Slot:
    """A value and its users: all of them, or one argument of one node."""

    def __init__(self, value: fx.Node, only: fx.Node | None = None, index: int | None = None) -> None:
        self.value = value
        self.only = only
        self.index = index

    def users(self) -> list[fx.Node]:
        return list(self.value.users) if self.only is None else [self.only]

    def put(self, new: fx.Node, spare: set[fx.Node]) -> None:
        """Let the users read `new` instead."""
        if self.only is None:
            self.value.replace_all_uses_with(new, delete_user_cb=lambda user: user not in spare)
        elif self.index is None:
            self.only.replace_input_with(self.value, new)
        elif self.index < len(self.only.args):
            self.only.update_arg(self.index, new)
        else:
            self.only.update_kwarg(list(self.only.kwargs)[self.index - len(self.only.args)], new)


def _needed(inside: list[fx.Node]) -> set[fx.Node]:
    """Those of a region's nodes that the rest of the graph still reads, and what works on their values."""
    own = set(inside)
    keep: set[fx.Node] = set()
    todo = [n for n in inside if any(u not in own for u in n.users)]
    while todo:
        while todo:
            node = todo.pop()
            if node not in keep:
                keep.add(node)
                todo.extend(a for a in node.all_input_nodes if a in own)
        made = {n for n in keep if n.target is not ops.edge}
        todo = [n for n in own - keep if n.meta.get("effect") and not made.isdisjoint(n.all_input_nodes)]
    return keep


def _reaches(starts: list[fx.Node], goal: fx.Node) -> bool:
    """Whether a value flows from one of these nodes to another."""
    flow = networkx.DiGraph((node, user) for node in goal.graph.nodes for user in node.users)
    return goal in starts or any(start in flow and goal in networkx.descendants(flow, start) for start in starts)
