"""One graph edited at the sites of a pass: the rewrite layer's centre."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from ..errors import ClashError, MatchError, SpecError
from ..ir import ops
from ..ir.graph import Graph, erase, erase_unused, get_meta, insert, rewire
from ..ir.regions import find_input, find_member, find_operand, find_output, find_source, list_member_ports, list_operands
from ..ir.traced_module import TracedModule, strip_to_container
from ..spec.addresses import Port, make_identifier
from ..spec.rules import Pass
from ..torch_internals.modules import is_erased
from .graft import Graft, OpenedGraph, Traces, find_last_input, open_results
from .matcher import fill, find_reads
from .sites import (
    Site,
    ValueUse,
    check_flow,
    check_order,
    describe_late,
    describe_structure,
    find_beside,
    find_insertion_point,
    find_needed,
    find_users,
    has_same_structure,
    list_nodes,
    list_ports,
    map_ports,
    sort_sites,
)

ROOT = {"": ("", "")}  # the nn_module_stack of what passes put in


def note_replaced(node: fx.Node, value: fx.Node) -> None:
    """Record the value that an inserted node replaces, for removing the pass again."""
    node.meta["pass"] = {**node.meta.get("pass", {}), "instead": value.name}


class Editor(OpenedGraph):
    """One pass on one copied graph."""

    def __init__(
        self, graph: Graph, mode: bool, modes: int, tree: nn.Module, gm: TracedModule, p: Pass, traces: Traces
    ) -> None:
        super().__init__(graph, mode, modes, tree, gm, p, traces)
        self.earlier: dict[str, tuple[str, str, str]] = {}  # region: a pass with a block at or below it, where, and the place
        for entry in gm.meta.get("passes", []):
            for site in entry["sites"]:
                parts = site["path"].split(".")
                for n in range(len(parts) + 1):
                    self.earlier.setdefault(".".join(parts[:n]), (entry["name"], site["path"], site["place"]))
        self.by_name: dict[str, fx.Node] = {node.name: node for node in graph.nodes}
        self.kept: dict[str, Any] = {}

    def run(self, sites: list[Site], blocks: Mapping[int, tuple[str, nn.Module]]) -> None:
        """Insert blocks, by the id of their site, if this graph has the site. Raises MatchError for a value that would flow
        backward."""
        here = [site for site in sites if self.present(site)]
        carried: dict[str, nn.Module] = {}
        if any(site.rule.carries for site in here):
            here = sort_sites(self.graph, self.regions, here)
        for site in here:
            if site.rule.place == "param":
                self.map_parameter(site, *blocks[id(site)])
            else:
                self.insert(site, blocks.get(id(site)))
            if site.rule.carries:
                carried[str(site.rule.name)] = blocks[id(site)][1]
        for name, last in carried.items():
            if (ended := getattr(last, "ended", None)) is not None:
                ended(self.kept[name])
        check_flow(self.graph, self.p.name)
        self.graph.lint()

    def present(self, site: Site) -> bool:
        """Return whether this graph has the site: a region that runs in training only is in one of two graphs."""
        return site.node in self.by_name if site.node else site.rule.place == "param" or site.path in self.regions.by_key

    # --- putting a block in

    def insert(self, site: Site, made: tuple[str, nn.Module] | None) -> None:
        """Insert one block: call it with its arguments after the last of them, and pass its result to the users."""
        rule = site.rule
        stacked = self.stacked(site)
        if rule.place == "replace" and not site.node and self.regions.by_key[site.path].leaf is not None:
            self.add_edges(self.regions.by_key[site.path])
        slots = self.slots(site)
        args = [self.argument(site, index, slots) for index in range(len(rule.args))]
        if stacked and rule.combine == "chain" and not any(item in ("y", "y[:]") for item in rule.args):
            args = [slots[0][1].value if item == "x" else arg for item, arg in zip(rule.args, args, strict=True)]
        last = find_insertion_point([*list_nodes(args), *(slot.value for _, slot in slots)], [slot for _, slot in slots])
        result, new = (args[0], []) if made is None else self.call(site, *made, args, last, slots)
        if rule.name is not None:
            result, kept = (self.member(result, i, new) for i in (0, 1))
            self.kept[fill(rule.name, site.caught)] = kept
        self.check_structure(site, result)
        taken: set[fx.Node] = set()
        for keys, slot in slots:
            value = result
            for key in keys:
                value = self.member(value, key, new)
            if value is slot.value or value is slot.only:
                continue
            reading: set[fx.Node] = find_users(slot, value) if made is None else set()
            check_order(site, slot, args, value if made is None else last, reading)
            if stacked and rule.combine == "sum":
                value = self.node("call_function", operator.add, (slot.value, value), site, max(slot.value, value))
            elif value not in new or value in taken:  # a name of its own: it is also something else
                known = get_meta(value)
                value = self.node("call_function", ops.edge, (value,), site, max(value, slot.value))
                value.meta.update(known)
            taken.add(value)
            new.append(value)
            if "shape" not in value.meta:  # a block that was traced knows its own
                value.meta.update(get_meta(slot.value))
            note_replaced(value, slot.value)
            slot.put(value, {*new, *reading})
            if slot.only is None:
                value.meta["behind"] = slot.value.name
                self.behind[slot.value.name] = value
        if rule.place == "replace" and not stacked:
            self.drop(site)

    def call(
        self, site: Site, name: str, block: nn.Module, args: list[Any], last: fx.Node, slots: list[tuple[Any, ValueUse]]
    ) -> tuple[Any, list[fx.Node]]:
        """Call a block after `last`; return its result, and the new nodes."""
        if getattr(block, "inline", False):
            return self.inlined(site, name, block, args, last)
        node = self.node("call_module", name, tuple(args), site, last, make_identifier(name), type(block).__name__)
        if slots:
            node.meta.update(get_meta(slots[0][1].value))
        return node, [node]

    def inlined(
        self, site: Site, name: str, block: nn.Module, args: list[Any], last: fx.Node
    ) -> tuple[Any, list[fx.Node]]:
        """Inline a block's own code, so that a saved graph does not need its class; return its result, and the new nodes."""
        where = f"{site.rule.where}: " if str(site.rule.where) else ""
        what = f"{where}{self.p.name}: {type(block).__name__} at '{site.node or site.path or 'the model'}'"
        sub = self.traces.of(block, args, {}, what)
        owner, _, last_name = name.rpartition(".")
        own = strip_to_container(sub)
        self.tree.get_submodule(owner)._modules[last_name] = own
        graft = Graft(self.graph, name, name, ROOT, self.made_by(site, type(block).__name__), after=last)
        graft.base = self.traces.weights_of_base(name, own, self.tree)
        graft.base |= self.traces.share_weights(name, block, own, self.tree)
        inputs = inspect.signature(block.forward).bind(*args)
        inputs.apply_defaults()
        return open_results(graft.put(self.of_mode(sub), inputs.arguments), graft.nodes), graft.nodes

    def node(
        self, op: str, target: Any, args: Any, site: Site, after: fx.Node, name: str | None = None, block: str = ""
    ) -> fx.Node:
        """Insert a new node after another, with the provenance metadata of the pass."""
        meta = {"nn_module_stack": ROOT, "pass": self.made_by(site, block)}
        return insert(self.graph, op, target, args, after=after, name=name, meta=meta)

    def made_by(self, site: Site, block: str) -> dict[str, Any]:
        """Return the provenance metadata for a node inserted by this pass."""
        rule = site.rule
        return {
            "name": self.p.name,
            "site": site.node or site.path,
            "place": rule.place,
            "block": block,
            "where": rule.where.portable,
            **({"within": site.path} if site.node else {}),  # the operation may go
        }

    def member(self, value: Any, key: int | str, new: list[fx.Node]) -> Any:
        """Return a member of a block's result, which is a node or nested nodes."""
        if not isinstance(value, fx.Node):
            return value[key] if not isinstance(value, Mapping) or key in value else getattr(value, str(key))
        after = value
        while after.next in value.users:
            after = after.next
        meta = get_meta(value, "pass", "nn_module_stack", "shape", "dtype")
        item = insert(self.graph, "call_function", operator.getitem, (value, key), after=after, meta=meta)
        new.append(item)
        return item

    def check_structure(self, site: Site, result: Any) -> None:
        """Raise an error for a result that is nested differently from the value it replaces."""
        if isinstance(result, fx.Node) and result.op == "call_module":
            return  # what a block returns that is called is known when it runs
        tree = list_member_ports(self.regions, site.port) if site.port.with_members else site.port
        if not has_same_structure(result, tree):
            where = f"{site.rule.where}: " if str(site.rule.where) else ""
            raise SpecError(
                f"{where}{self.p.name}: '{site.node or site.port}' returns {describe_structure(tree)}, and the block in its "
                f"place returns {describe_structure(result)}: return the same structure"
            )

    # --- the places that are changed

    def stacked(self, site: Site) -> bool:
        """Return whether a replacement meets an existing one. Raises ClashError if the two cannot be combined."""
        if site.rule.place != "replace" or site.node:
            return False
        path = site.path.partition("@")[0]
        if path in self.regions.replaced:
            if site.rule.combine is None:
                name, _ = self.regions.replaced[path]
                raise ClashError(
                    f"{self.p.name}: '{site.path}' is replaced by pass '{name}' already: narrow the pattern of one of the two "
                    "passes, or combine them in the rule, with combine: sum (their sum) or combine: chain (one after the other)"
                )
            return True
        if site.path in self.earlier:
            name, inner, place = self.earlier[site.path]
            raise ClashError(
                f"{self.p.name}: '{inner}' has a block of pass '{name}' ({place}) and cannot be replaced: narrow the pattern "
                "of one of the two passes"
            )
        return False

    def slots(self, site: Site) -> list[tuple[tuple[int | str, ...], ValueUse]]:
        """Return the uses of the values that a site changes, with their keys in the block's result."""
        if site.node:
            node = self.by_name[site.node]
            port = site.operand
            if site.rule.place == "before":
                given = list_operands((node.args, node.kwargs))
                index = find_operand(node, port)
                return [((), ValueUse(given[index], node, beside=find_beside(given[index], site.node), operand=index))]
            return [((), ValueUse(self.newest(find_member(node, port))))]
        if not site.port.with_members:
            return [((), self.slot(site.port))]
        return [(keys, self.slot(port)) for keys, port in list_ports(list_member_ports(self.regions, site.port))]

    def slot(self, port: Port) -> ValueUse:
        """Return the uses of the value at a port: all its users, or the one argument or edge of the port."""
        region = self.regions.by_key[port.path]
        if port.side == "in":
            _, index, reader = find_input(self.regions, region, port)
            given = reader.args[0] if region.leaf is None else [*reader.args, *reader.kwargs.values()][index]
            assert isinstance(given, fx.Node)
            if region.leaf is None:
                return ValueUse(given, reader)
            return ValueUse(given, reader, index, find_beside(given, port.path))
        node = find_output(self.regions, region, port)
        if region.leaf is None:
            read = node.args[0]
            assert isinstance(read, fx.Node)
            return ValueUse(read, node)
        return ValueUse(self.newest(node))

    # --- what a block is called with

    def argument(self, site: Site, index: int, slots: list[tuple[Any, ValueUse]]) -> Any:
        """Return the current value of one of a rule's arguments: a node, or nodes in the structure of a whole value."""
        value = site.args[index]
        if value.kind == "changed":
            return slots[0][1].value
        if value.kind == "kept":
            if value.address not in self.kept:
                if site.rule.carries and value.address == site.rule.name:
                    return None
                raise MatchError(f"{self.p.name}: '{value.address}' is used before the rule that names it: put that rule first")
            return self.kept[value.address]
        port = value.port
        assert port is not None
        if value.kind == "operand":
            node: fx.Node = self.by_name[site.node]
            given = list_operands((node.args, node.kwargs))
            if port.with_members:
                return tuple(given)
            return find_member(node, port) if port.side == "out" else given[find_operand(node, port)]
        if port.side == "param":
            return self.parameter(port)
        if port.with_members:
            return map_ports(list_member_ports(self.regions, port), lambda one: self.now(one, site))
        return self.now(port, site)

    def now(self, port: Port, site: Site) -> fx.Node:
        """Return the current value at a port, after the blocks inserted so far.

        At the edge that the site changes it is the value before the edge, which then gets the block's result.
        """
        node = find_source(self.regions, port)
        region = self.regions.by_key[port.path]
        if region.leaf is not None:
            return self.newest(node) if port.side == "out" else node
        if port.path == site.path and port.side == site.port.side:
            node = find_input(self.regions, region, port)[2] if port.side == "in" else node
            assert isinstance(node.args[0], fx.Node)
            return node.args[0]
        return node

    def parameter(self, port: Port) -> fx.Node:
        """Return the current value of a parameter: the result of a block, or a node at the start of the graph that reads it."""
        if (mapped := self.behind.get(f"param:{port.path}.{port.keys[0]}")) is not None:
            return mapped
        name = f"{port.path}.{port.keys[0]}".lstrip(".")
        meta = {**get_meta(self.tree.get_parameter(name)), "nn_module_stack": ROOT, "pass": {"name": self.p.name}}
        return insert(self.graph, "get_attr", name, after=find_last_input(self.graph), name=make_identifier(name), meta=meta)

    # --- parameters

    def map_parameter(self, site: Site, name: str, block: nn.Module) -> None:
        """Insert a block between a parameter and its readers: a leaf that owns it is inlined."""
        path, own = site.port.path, str(site.port.keys[0])
        full = f"param:{path}.{own}"
        for region in self.regions.calls.get(path, []):
            if region.leaf is not None:
                self.open(region, f"its parameter '{own}'")
        if full in self.behind:
            value: fx.Node | None = self.behind[full]
            users = [(self.behind[full], user) for user in self.behind[full].users]
        else:
            users = find_reads(self.regions, path, own)
            value = min(node for node, _ in users) if users else None
        if value is None:
            return  # this graph does not read it
        slot = ValueUse(value)
        args = [self.argument(site, index, [((), slot)]) for index in range(len(site.args))]
        last = max([value, *list_nodes(args)])
        shared = self.behind.get(f"block:{name}")
        if shared is not None and all(shared < user for _, user in users):
            result = shared
        else:
            result, new = self.call(site, name, block, args, last, [((), slot)])
            if not isinstance(result, fx.Node) or result not in new:
                result = self.node("call_function", ops.edge, (result,), site, last)
            result.meta.update(get_meta(value))
            result.meta["behind"] = full
            note_replaced(result, value)
            self.behind[f"block:{name}"] = result
        early = [user for _, user in users if user <= result]
        if early:
            raise describe_late(site, args, last, "the parameter is read first", early)
        for node, user in users:
            rewire(user, {node: result})
        self.behind[full] = result

    # --- what goes

    def drop(self, site: Site) -> None:
        """Erase what was replaced and is unused: an operation, or the nodes of a region."""
        if site.node:
            erase_unused([self.by_name[site.node]])
            return
        inside = [node for node in self.inside.get(site.path, []) if not is_erased(node)]
        keep = find_needed(inside)
        erase(node for node in inside if node not in keep)


