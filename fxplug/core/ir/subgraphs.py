"""A region of a graph as a graph of its own: which nodes belong to it, whether it can be cut out, and the cut itself."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import fx, nn

from ..errors import format_fields
from ..spec.addresses import make_identifier
from ..torch_internals.modules import DropoutNd
from . import functions, ops
from .containers import list_leaves
from .functions import REGION, is_random
from .graph import MODES, Graph, copy_nodes, erase, get_meta, insert, is_added, move, redirect

SWITCHES = (*MODES, ops.exit_grad, ops.exit_autocast)
# layers that may give the memory of their argument
ALIASING_MODULES = (nn.Identity, DropoutNd, nn.Flatten, nn.Unflatten)


@dataclass
class RegionCut:
    """What it takes to cut a region out of one graph."""

    key: str
    nodes: list[fx.Node]  # the region, in the order of the graph
    before: list[fx.Node] = field(default_factory=list)  # nodes between them which the region needs
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)

    __repr__ = format_fields


def collect_nodes(graph: fx.Graph) -> dict[str, list[fx.Node]]:
    """Return the nodes of each region by its key, in the order of the graph, without reads of parameters.

    Nodes that a pass inserted belong to the region of their site, and to those around it.
    """
    found: dict[str, list[fx.Node]] = {}
    stacks: dict[str, Iterable[str]] = {}
    by_name = {node.name: node for node in graph.nodes}
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack", {})
        if stack and not is_added(node):
            stacks.setdefault(next(reversed(stack)), tuple(stack))
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr") or node.target is ops.device_of:
            continue  # the device stands at the head, whichever region asked for it
        stack = node.meta.get("nn_module_stack", {})
        if is_added(node):
            site = str(node.meta["pass"].get("site", ""))
            if site in by_name and site not in stacks:
                site = next(reversed(by_name[site].meta.get("nn_module_stack", {"": ""})))
            while site and site not in stacks:
                site = site.rpartition(".")[0]
            stack = stacks.get(site, ())
        for key in stack:
            if key:
                found.setdefault(key, []).append(node)
    return found


def plan(key: str, nodes: list[fx.Node], root: nn.Module) -> RegionCut | str:
    """Return how a region is cut out of its graph, or why it cannot be: a clause that continues "'path' ".

    Nodes that a pass inserted in between are included if the region needs them and they need it. Those that a pass inserted
    long before the region, to change its inputs, stay where they are.
    """
    first = next((n for n in nodes if not is_added(n)), nodes[0])
    early = [n for n in nodes if n < first]
    inside = set(nodes)
    if early and any(n not in inside and n.op != "get_attr" for n in _between([*early, first])):
        inside -= set(early)
    while True:
        nodes = sorted(inside)
        between = [n for n in _between(nodes) if n not in inside]
        need, follow = _needed(between, inside), _following(between, inside)
        both = [n for n in between if n in need and n in follow]
        if not both:
            break
        if foreign := [n for n in both if not is_added(n)]:
            return f"cannot be one unit: values leave it and come back into it through {_named(foreign)}"
        inside.update(both)
    before = [n for n in between if n in need]
    after = [n for n in between if n not in need and n.op != "get_attr"]
    if reason := _reordered(nodes, before, after, root) or _unpaired(nodes, inside):
        return reason
    given = dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside and a.op != "get_attr")
    return RegionCut(key, nodes, before, list(given), [n for n in nodes if any(u not in inside for u in n.users)])


def extract(cut: RegionCut, target: str, name: str, stack: dict[str, Any]) -> tuple[Graph, fx.Node]:
    """Cut a region out of its graph and call `target` in its place. Returns the region's own graph, and the call."""
    graph = cut.nodes[0].graph
    for node in cut.before:
        move(node, before=cut.nodes[0])
    own = Graph()
    around = {"nn_module_stack": stack}
    values = {v: insert(own, "placeholder", v.name, name=v.name, meta={**get_meta(v), **around}) for v in cut.inputs}
    # a parameter is read in every region that uses it
    copy_nodes((each for node in cut.nodes for each in (*node.all_input_nodes, node)), own, values)
    outputs = [values[node] for node in cut.outputs]
    insert(own, "output", "output", (outputs[0] if len(outputs) == 1 else tuple(outputs) or None,), meta=around)
    first = cut.nodes[0]
    call = insert(graph, "call_module", target, tuple(cut.inputs), before=first, name=name, meta={**around, REGION: own})
    parts = [call]
    if len(outputs) != 1:
        parts = [insert(graph, "call_function", operator.getitem, (call, i), before=first) for i in range(len(outputs))]
    for old, new in zip(cut.outputs, parts, strict=True):
        new.meta.update(get_meta(old), **around)
        redirect(old, new, keep=values)
    erase(cut.nodes)
    return own, call


def _between(nodes: list[fx.Node]) -> Iterator[fx.Node]:
    node, last = nodes[0], nodes[-1]
    while node is not last:
        node = node.next
        yield node


def _needed(between: list[fx.Node], inside: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes in between that the region is computed from."""
    need: set[fx.Node] = set()
    for node in reversed(between):
        if any(user in need or (user in inside and node.op != "get_attr") for user in node.users):
            need.add(node)
    return need


def _following(between: list[fx.Node], inside: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes in between that are computed from the region."""
    follow: set[fx.Node] = set()
    for node in between:
        if any(given in inside or given in follow for given in node.all_input_nodes):
            follow.add(node)
    return follow


def _named(nodes: list[fx.Node]) -> str:
    """List the regions of some nodes."""
    keys = dict.fromkeys(next(reversed(n.meta.get("nn_module_stack") or {"": ""})) or n.name for n in nodes)
    shown = ", ".join(f"'{key}'" for key in list(keys)[:3])
    return shown + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")


# --- what may not change places


def find_written(node: fx.Node, root: nn.Module) -> list[fx.Node]:
    """Return the values that a node changes in place: tensors of the graph, or reads of buffers."""
    if REGION in node.meta:
        nodes = node.meta[REGION].nodes
        changes = find_changed_input(nodes, [n for n in nodes if n.op == "placeholder"], root)
        return node.all_input_nodes if changes else []
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return node.all_input_nodes[:1] if getattr(module, "inplace", False) else []
    if node.op not in ("call_function", "call_method") or getattr(node.target, "__module__", "") == ops.__name__:
        return []
    if node.target is F.batch_norm:
        return [a for a in node.all_input_nodes if a.op == "get_attr"][:2] if updates(node) else []
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    flagged = node.kwargs.get("inplace") is True or (name.startswith(("dropout", "alpha_dropout")) and node.args[3:] == (True,))
    plain = functions.get_short_name(node.target) in functions.RANDOM and not name.endswith("_")
    if flagged or (node.meta.get("effect") and not plain) or name in (*functions.IN_PLACE, "setitem"):
        out = node.kwargs.get("out")
        return [n for n in list_leaves(out) if isinstance(n, fx.Node)] if out is not None else node.all_input_nodes[:1]
    return []


def updates(node: fx.Node) -> bool:
    """Return whether a call of batch_norm uses the batch's statistics and writes the running ones."""
    training = node.kwargs.get("training", node.args[5] if len(node.args) > 5 else False)
    return training is not False


def may_share_memory(node: fx.Node, root: nn.Module) -> bool:
    """Return whether a node's result may share the memory of its first argument."""
    if node.op == "call_module":
        whole = REGION not in node.meta and isinstance(root.get_submodule(str(node.target)), ALIASING_MODULES)
        return whole or bool(find_written(node, root))
    may_alias = node.op != "placeholder" and functions.may_alias(functions.get_short_name(node.target))
    return node.op != "get_attr" and (may_alias or bool(find_written(node, root)))


def find_changed_input(nodes: Iterable[fx.Node], inputs: Iterable[fx.Node], root: nn.Module) -> fx.Node | None:
    """Return the node of a region that changes one of the region's inputs in place, or None."""
    shared = set(inputs)
    for node in nodes:
        if any(value in shared for value in find_written(node, root)):
            return node
        if may_share_memory(node, root) and any(a in shared for a in node.all_input_nodes[:1]):
            shared.add(node)
    return None


def _reordered(nodes: list[fx.Node], before: list[fx.Node], after: list[fx.Node], root: nn.Module) -> str | None:
    """Return a reason if calling the region as one would reorder operations whose order matters."""
    if not any(n.op != "get_attr" for n in before) and not after:
        return None
    order = [n for n in nodes if n.target in SWITCHES or is_random(n, root) or find_written(n, root)]
    early = set(before)
    for other in before + after:
        if other.op == "get_attr":
            continue
        alone = other.target not in SWITCHES and not find_written(other, root)
        for node in order if alone else nodes:
            if (node < other) != (other in early):
                continue  # they stay as they are
            for one, two in ((other, node), (node, other)):
                if one.target in SWITCHES:
                    return f"cannot be moved past '{one.name}' in {_named([one])}, which switches gradients or autocast"
                values = find_written(one, root)
                if any(v.op != "get_attr" or any(v.target == a.target for a in two.all_input_nodes) for v in values):
                    return f"cannot be moved past '{one.name}' in {_named([one])}, which changes a tensor in place"
            if is_random(other, root) and is_random(node, root):
                return f"draws random numbers alternately with {_named([other])}"
    return None


def _unpaired(nodes: list[fx.Node], inside: set[fx.Node]) -> str | None:
    """Return a reason if a scope of gradients or autocast is opened inside and closed outside, or vice versa."""
    for node in nodes:
        if node.target in SWITCHES:
            others = node.users if node.target in MODES else node.all_input_nodes
            if any(other not in inside for other in others if other.target in SWITCHES):
                return f"opens or closes a scope of gradients or autocast ('{node.name}') whose other end lies outside it"
    return None


def make_unique_names(keys: Iterable[str]) -> dict[str, str]:
    """Return a unique attribute name for each region."""
    found: dict[str, str] = {}
    taken: set[str] = set()
    numbers: Counter[str] = Counter()
    for key in keys:
        name = make_identifier(key)
        while name in taken:
            numbers[make_identifier(key)] += 1
            name = f"{make_identifier(key)}_{numbers[make_identifier(key)] + 1}"
        taken.add(name)
        found[key] = name
    return found
