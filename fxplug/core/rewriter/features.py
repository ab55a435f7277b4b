"""The values of regions by their addresses, as the result of a module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import fx, nn

from ..errors import MatchError, SpecError, quote
from ..extensions import get_derivation
from ..ir import ops
from ..ir.containers import map_leaves
from ..ir.graph import Graph, change, erase, erase_unused, get_meta, insert
from ..ir.regions import Regions, expand_ports, find_input, find_output, find_region, nest
from ..ir.subgraphs import find_written, may_share_memory
from ..ir.traced_module import TracedModule, check_traced, copy_graphs, strip_to_container
from ..spec.addresses import Port, choose_names, is_pattern, parse_port
from ..spec.rules import Match
from .near_misses import describe_misses

CLOSING = (ops.exit_grad, ops.exit_autocast)


def features(gm: TracedModule, paths: str | Iterable[str]) -> TracedModule:
    """Give the values at some addresses as the result of a module on the same weights: a dict of them by address.

    What passes put behind a region is in its value. Each is the value of the moment at which it passed there, also where the
    model writes into it later. What the model runs up to the last of these values runs as in the model, whatever comes behind
    is left out. Gradients flow through the values. The module can be compiled, saved and rewritten as any other.

    Args:
        gm: The traced module.
        paths: Addresses as in passes: `blocks.3.attn` is what a forward hook on that module sees, `blocks.3:in` and
            `blocks.3:in[1]` what enters it, `head:out[0]` a member of its result, `conv@1` its second call, `:out` the result
            of the whole model. Patterns (globs, slices, `re:`) stand for all regions that they match.

    Returns:
        A module with the inputs of `gm`, whose result is a dict from each address to its value: a tensor, or a tuple or a dict
        of tensors where the region gives several.

    Raises:
        MatchError: There is no such address; with the nearest.
        SpecError: There is no address at all, one is of a parameter, or the module was lowered or split over processes.
    """
    check_traced(gm, "features")
    asked = [paths] if isinstance(paths, str) else list(paths)
    if not asked:
        raise SpecError("features: name at least one region, such as 'blocks.3'")
    if bad := [path for path in asked if not isinstance(path, str)]:
        raise SpecError(f"features takes addresses such as 'blocks.3:in', not {quote(bad[0])}")
    if get_derivation(gm) is not None:
        raise SpecError("features: this module was lowered or split: take the features first, and lower what that gives")
    graphs = copy_graphs(gm)
    names = set()
    for graph in graphs.values():
        regions = Regions(graph, gm)
        ports = {name: port for text in asked for name, port in _expanded(regions, text)}
        names.add(tuple(ports))
        _give(graph, regions, ports, gm)
    if len(names) > 1:
        apart = sorted(set.symmetric_difference(*map(set, names)))
        raise MatchError(f"features: '{apart[0]}' is there in one of training and evaluation alone: name regions without it")
    made = gm.derived(strip_to_container(gm), graphs)
    return made.made_by(partial(features, paths=asked), gm)


def _expanded(regions: Regions, text: str) -> Iterator[tuple[str, Port]]:
    """Yield the ports that an address denotes, by name."""
    port = parse_port(text)
    if port.side == "param":
        raise SpecError(f"features: '{text}' is a parameter, which is not a value of a call: use module.get_parameter")
    if not port.path:
        yield text, port
        return
    keys = choose_names(port.path, regions.candidates(port.path))
    if not keys and is_pattern(port.path):
        rows = "\n".join(describe_misses(regions, Match(port.path)))
        raise MatchError(f"features: no region matches '{port.path}'\n{rows}")
    if not keys:
        find_region(regions, port)  # raises
    for key in keys:
        found = replace(port, path=key)
        for one in expand_ports(regions, found) if found.each else [found]:
            yield (text if str(one) == str(port) else str(one)), one


@dataclass(frozen=True)
class PortValue:
    """A value that is asked for; `reader` is the layer before whose call it is taken, None for right behind its node."""

    node: fx.Node
    reader: fx.Node | None = None

    @property
    def last_node(self) -> fx.Node:
        """Last node that runs before the value is taken."""
        return self.node if self.reader is None else self.reader.prev


def _give(graph: Graph, regions: Regions, ports: dict[str, Port], root: nn.Module) -> None:
    """Let a graph give the values at some ports, and end behind the last of them."""
    behind = {node.meta["behind"]: node for node in graph.nodes if "behind" in node.meta}
    values = {name: _find_values(regions, port, behind) for name, port in ports.items()}
    asked = list(dict.fromkeys(one for one in _leaves(values) if isinstance(one, PortValue)))
    order = {node: index for index, node in enumerate(graph.nodes)}
    _cut(graph, max((one.last_node for one in asked), key=order.__getitem__), {one.node for one in asked})
    memory = _SharedMemory(graph, root)
    changed = {one for one in asked if memory.is_written_later(one)}
    nodes = {one: _copied(one) if one in changed else one.node for one in asked}
    (output,) = graph.find_nodes(op="output")
    change(output, args=(map_leaves(values, lambda one, _: nodes[one], kind=PortValue),))
    erase_unused(graph.nodes, lambda node: node.op == "get_attr")
    graph.lint()


def _find_values(regions: Regions, port: Port, behind: dict[str, fx.Node]) -> Any:
    """Return the values at a port, in their structure."""
    region = find_region(regions, port)
    if port.side == "in":
        _, index, node = find_input(regions, region, port)
        if region.leaf is None:
            return PortValue(node)
        given: Any = [*node.args, *node.kwargs.values()][index]
        return PortValue(given, reader=node)

    def newest(node: fx.Node) -> PortValue:
        while node.name in behind:
            node = behind[node.name]
        return PortValue(node)

    results = regions.out_ports(region)
    if port.keys or len(results) == 1:
        return newest(find_output(regions, region, port) if port.keys else results[0][1])
    if not results:
        find_output(regions, region, port)  # raises
    if region.leaf is not None and not any(node.name in behind for _, node in results):
        return PortValue(region.leaf)  # with what nobody reads
    return _plain(nest([(found.keys, newest(node)) for found, node in results]))


def _plain(value: Any) -> Any:
    """Return a nested value of tuples and dicts only."""
    if isinstance(value, dict):
        return {key: _plain(member) for key, member in dict.items(value)}
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def _leaves(value: Any) -> Iterator[Any]:
    members = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else None
    if members is None:
        yield value
    else:
        for member in members:
            yield from _leaves(member)


def _cut(graph: Graph, last: fx.Node, values: set[fx.Node]) -> None:
    """Take out what runs behind a node, but for what closes a mode and for buffers that the model assigns."""
    (output,) = graph.find_nodes(op="output")
    change(output, args=((),))
    gone: set[fx.Node] = set()
    node = last.next
    while node is not output:
        reads = set(node.all_input_nodes)
        closes = node.target in CLOSING and not reads & gone
        stack = [key for key in node.meta.get("nn_module_stack", {}) if key]
        assigns = node.target == "copy_" and not stack and not reads & gone and any(r.op == "get_attr" for r in reads)
        if node not in values and not closes and not assigns and node.op not in ("placeholder", "get_attr"):
            gone.add(node)
        node = node.next
    erase(gone)


class _SharedMemory:
    """Which nodes of a graph have one memory, and where it is written into."""

    def __init__(self, graph: Graph, root: nn.Module) -> None:
        self.order = {node: index for index, node in enumerate(graph.nodes)}
        self.memory: dict[fx.Node, fx.Node] = {}  # the first node with the memory that a node may have
        self.writes: list[tuple[int, fx.Node]] = []
        held: dict[Any, fx.Node] = {}  # reads of one tensor of the module are of one memory
        for node in graph.nodes:
            for value in _written(node, root):
                self.writes.append((self.order[node], self.memory[value]))
            shares = node.target is ops.edge or may_share_memory(node, root)
            first = held.setdefault(node.target, node) if node.op == "get_attr" else node
            self.memory[node] = self.memory[node.all_input_nodes[0]] if shares and node.all_input_nodes else first

    def is_written_later(self, one: PortValue) -> bool:
        """Return whether the model writes in place into a value after it was taken."""
        last_node, memory = self.order[one.last_node], self.memory[one.node]
        return any(at > last_node and value is memory for at, value in self.writes)


def _copied(one: PortValue) -> fx.Node:
    """Return a copy of a value at the time when it is taken."""
    node, port = one.node, one.node.meta.get("port")
    stack = dict(node.meta.get("nn_module_stack", {}))
    if port is not None:
        stack.pop(port.path, None)  # it is around the region that the value leaves
    note = {**get_meta(node), "nn_module_stack": stack}
    after = node if one.reader is None else None
    if "shape" not in node.meta:
        raise SpecError(
            f"features: the model writes into '{node.target}' after it was called: name the members, '{node.target}:out[0]'"
        )
    name = f"{node.name}_kept"
    return insert(node.graph, "call_method", "clone", (node,), after=after, before=one.reader, name=name, meta=note)


def _written(node: fx.Node, root: nn.Module) -> list[fx.Node]:
    """Return the values that a node changes, or may change, in place."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        if not type(module).__module__.startswith(("torch.nn.modules.", "fxplug.blocks.")):
            return node.all_input_nodes
    return node.all_input_nodes if ops.is_applied(node.target) else find_written(node, root)
