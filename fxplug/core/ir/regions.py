"""What there is in a graph: regions, the ports at their edges, and those that a match admits. Reads graphs, changes none."""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from torch import fx, nn

from ..errors import MatchError, did_you_mean, format_fields
from ..spec.addresses import EACH, NAMED, Port
from . import ops
from .graph import is_added
from .traced_module import TracedModule, list_class_names

SHOWN = 5  # so many examples are listed in a message


@dataclass
class RegionNodes:
    """One call of one module in one graph: the nodes at its edges."""

    key: str
    leaf: fx.Node | None = None
    inputs: list[tuple[Port, int, fx.Node]] = field(default_factory=list)
    outputs: list[tuple[Port, fx.Node]] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)

    __repr__ = format_fields

    @property
    def path(self) -> str:
        """Path of its module: the key without the number of the call."""
        return self.key.partition("@")[0]


class Regions:
    """The regions of one graph in the order they ran, and what the module that it belongs to says of them.

    The graph is walked once, and again when it has other nodes, targets or another order than at the last walk; of the module
    nothing is kept. Who edits a graph may add to `by_key` and `readers` what its edits make.
    """

    def __init__(self, graph: fx.Graph, root: nn.Module) -> None:
        self.root, self.graph = root, graph
        self._classes: dict[str, tuple[str, ...]] = {}
        walk = _walk(graph)
        self.by_key, self.readers = walk.by_key, walk.readers
        self._passes = walk.passes | {entry["name"] for entry in getattr(root, "meta", {}).get("passes", [])}
        self.replaced = dict(_replaced(root))

    @property
    def constants(self) -> dict[str, Any]:
        """Arguments of the model that are constants of the graph."""
        checks = self.graph.find_nodes(op="call_function", target=ops.check_constants)
        return {name: value for node in checks for name, value in zip(node.args[2], node.args[1], strict=True)}

    def in_ports(self, region: RegionNodes) -> list[tuple[Port, int, fx.Node]]:
        """Return the tensors that enter a region: their ports, the position of the argument, and the node that reads it."""
        if region.leaf is None:
            return region.inputs
        names = list(inspect.signature(self._modules[region.path].forward).parameters)
        found = []
        for index, value in enumerate([*region.leaf.args, *region.leaf.kwargs.values()]):
            positional = index < len(region.leaf.args)
            keyword = None if positional else list(region.leaf.kwargs)[index - len(region.leaf.args)]
            name = keyword or (names[index] if index < len(names) else f"arg{index}")
            if isinstance(value, fx.Node) and "shape" in value.meta:
                found.append((Port(region.key, "in", (name,)), index, region.leaf))
        return found

    def out_ports(self, region: RegionNodes) -> list[tuple[Port, fx.Node]]:
        """Return the tensors that leave a region: their ports and nodes."""
        if region.leaf is None:
            return region.outputs
        if "shape" in region.leaf.meta:
            return [(Port(region.key, "out"), region.leaf)]
        return list(_members(region.leaf, region.key, ()))

    def with_modules(self, paths: Iterable[str]) -> Regions:
        """Return the same regions, with modules that no call of the graph runs, each as a region without edges."""
        new = Regions(self.graph, self.root)
        new.by_key = {**self.by_key, **{path: RegionNodes(path) for path in paths if path not in self.by_key}}
        return new

    @cached_property
    def ran(self) -> list[str]:
        """Regions that ran, without the model itself."""
        return [key for key in self.by_key if key]

    @cached_property
    def calls(self) -> dict[str, list[RegionNodes]]:
        """Calls of each module, by its path."""
        found: dict[str, list[RegionNodes]] = {}
        for region in self.by_key.values():
            found.setdefault(region.path, []).append(region)
        return found

    def classes(self, path: str) -> tuple[str, ...]:
        """Return the names of a module's class and of its bases."""
        if path not in self._classes:
            self._classes[path] = list_class_names(self.module(path))
        return self._classes[path]

    def module(self, path: str) -> nn.Module:
        """Return the module of a region, or the block that a pass replaced it with."""
        _, block = self.replaced.get(path, ("", path))
        return self._modules.get(block) or self.root.get_submodule(block)

    @cached_property
    def _modules(self) -> dict[str, nn.Module]:
        return dict(self.root.named_modules(remove_duplicate=False))

    def inserted(self, path: str) -> bool:
        """Return whether a pass inserted this module."""
        return path.partition(".")[0] in self._passes

    def candidates(self, pattern: str) -> list[str]:
        """Return the regions that a pattern may match: inserted ones only if the pattern begins with their pass's name."""
        own = self._named(pattern)
        return [k for k in self.ran if not self.inserted(k) or k.partition(".")[0] == own]

    def containers(self, pattern: str) -> dict[str, list[str]]:
        """Return the uncalled modules that a pattern may match, with the paths of the first regions in them."""
        own = self._named(pattern)
        return {k: inner for k, inner in self._uncalled.items() if not self.inserted(k) or k.partition(".")[0] == own}

    def _named(self, pattern: str) -> str | None:
        head = re.match(r"(?:re:)?\^?(\w+)", pattern)
        return head[1] if head and head[1] in self._passes else None

    @cached_property
    def resized(self) -> dict[str, str]:
        """Layers to which a pass gave another size, with its name: each trains as a whole, and nothing is added beside it."""
        found = {}
        for entry in getattr(self.root, "meta", {}).get("passes", []):
            for site in entry["sites"]:
                if getattr(self._modules.get(site["block"]), "resizes", False):  # a plan's blocks are kinds, and no modules
                    found[site["path"].partition("@")[0]] = entry["name"]
        return found

    @cached_property
    def _uncalled(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for path in self.calls:
            above = path
            while above and (above := above.rpartition(".")[0]) not in self.calls and above:
                found.setdefault(above, []).append(path)
        return found

    @cached_property
    def names(self) -> dict[int, list[str]]:
        """Names of each parameter, by its id: a tied one has several."""
        found: dict[int, list[str]] = {}
        for name, parameter in self.root.named_parameters(remove_duplicate=False):
            found.setdefault(id(parameter), []).append(name)
        return found

    def parameters(self, path: str, pattern: str) -> list[str]:
        """Return the names of a module's own parameters that match a pattern."""
        names = [n for n, p in self.module(path)._parameters.items() if p is not None]
        return [n for n in names if fnmatchcase(n, pattern)]


def find_regions(gm: TracedModule) -> list[Regions]:
    """Return the regions of each graph of a traced module."""
    return [Regions(graph, gm) for graph in gm.graphs.values()]


@dataclass
class _RegionWalk:
    """What one walk finds in a graph that has these nodes and targets."""

    steps: list[Any]
    by_key: dict[str, RegionNodes] = field(default_factory=lambda: {"": RegionNodes("")})
    readers: dict[str, list[fx.Node]] = field(default_factory=dict)  # parameters that the graph itself reads
    passes: set[str] = field(default_factory=set)


def _walk(graph: fx.Graph) -> _RegionWalk:
    steps = [part for node in graph.nodes for part in (node, node.target)]
    known: _RegionWalk | None = vars(graph).get("_walk")
    if known is not None and known.steps == steps:
        return known
    walk = _RegionWalk(steps)
    for node in graph.nodes:
        if "pass" in node.meta:
            walk.passes.add(node.meta["pass"]["name"])
        if node.op == "get_attr":
            walk.readers.setdefault(str(node.target), []).append(node)
        stack = node.meta.get("nn_module_stack")
        if not stack or is_added(node):
            continue
        port = node.meta.get("port")
        key = next(reversed(stack)) if port is None else port.path
        region = walk.by_key.setdefault(key, RegionNodes(key))
        if node.op == "call_module" and port is not None:
            region.leaf = node
        elif port is not None and port.side == "in":
            region.inputs.append((port, node.meta["index"], node))
        elif port is not None:
            region.outputs.append((port, node))
        elif node.op in ("call_function", "call_method") and getattr(node.target, "__module__", "") != ops.__name__:
            region.nodes.append(node)
    graph._walk = walk  # type: ignore[attr-defined]  # whole: another thread may read it from now on
    return walk


def _members(node: fx.Node, key: str, keys: tuple[int | str, ...]) -> Iterator[tuple[Port, fx.Node]]:
    for user in node.users:
        if user.op == "call_function" and user.target is operator.getitem and user.args[0] is node:
            inner = (*keys, user.args[1])
            if "shape" in user.meta:
                yield Port(key, "out", inner), user  # type: ignore[arg-type]
            else:
                yield from _members(user, key, inner)  # type: ignore[arg-type]


# --- operations


def list_operands(arguments: Any) -> list[fx.Node]:
    """Return the tensors in an operation's arguments, in their order; one that it reads twice is listed twice."""
    found: list[fx.Node] = []
    fx.node.map_arg(arguments, lambda read: found.append(read) if "shape" in read.meta else None)
    return found


def find_operand(node: fx.Node, port: Port) -> int:
    """Return which of an operation's `list_operands` is at `x`, `x[1]` or, if it is given by name, `x.attn_mask`.

    Raises MatchError with the existing ones.
    """
    rows = [("", value) for value in list_operands(node.args)]
    rows += [(name, value) for name, given in node.kwargs.items() for value in list_operands(given)]
    names = [name for name, _ in rows]
    key = port.keys[0] if port.keys else 0
    if len(port.keys) < 2 and (key in range(len(rows)) or (key and key in names)):
        return key if isinstance(key, int) else names.index(key)
    there = ", ".join([f"x[{index}]" for index in range(len(rows))] + [f"x.{name}" for name in names if name])
    wanted = str(port).partition(":in")[2]
    raise MatchError(f"'{node.name}' has no tensor 'x{wanted}'; it reads {there or 'none'}: name one of them")


def find_member(node: fx.Node, port: Port) -> fx.Node:
    """Return the node of an operation's result at `y`, or of one of its members at `y[1]`.

    Raises MatchError with the existing ones: a member that nothing reads is none.
    """
    if not port.keys:
        return node
    found = list(_members(node, port.path, ()))
    for there, member in found:
        if there.keys == port.keys:
            return member
    wanted = str(port).partition(":out")[2]
    names = [f"y{str(there).partition(':out')[2]}" for there, _ in found]
    what = f"the model reads {', '.join(sorted(set(names)))} of it" if names else "its result is one value, 'y'"
    raise MatchError(f"'{node.name}' has no 'y{wanted}' that is read; {what}")


# --- values at ports


def find_region(regions: Regions, port: Port) -> RegionNodes:
    """Return the region of a port. Raises MatchError with the nearest one."""
    region = regions.by_key.get(port.path)
    if region is None:
        raise MatchError(explain_no_region(regions, port.path))
    return region


def find_source(regions: Regions, port: Port) -> fx.Node:
    """Return the node whose value is at a port. Raises MatchError with the existing ports."""
    region = find_region(regions, port)
    if port.side == "in":
        _, index, node = find_input(regions, region, port)
        return node if region.leaf is None else [*node.args, *node.kwargs.values()][index]  # type: ignore[return-value]
    return find_output(regions, region, port)


def find_input(regions: Regions, region: RegionNodes, port: Port) -> tuple[Port, int, fx.Node]:
    """Return the input at `in`, `in[1]` or `in.name`; without a key the first tensor."""
    ports = regions.in_ports(region)
    if not ports:
        raise MatchError(f"'{region.key or 'the model'}' takes no tensor, so it has no '{port}'")
    if not port.keys:
        return ports[0]
    for found in ports:
        if _is(port.keys, found[0].keys, found[1]):
            return found
    listed = ", ".join(f"'{found[0]}'" for found in ports)
    why = "is not an input"
    if not region.key and port.keys[0] in regions.constants:
        why = (
            f"was {regions.constants[str(port.keys[0])]!r} when the model was traced, so it is part of the graph and not an "
            "input"
        )
        listed += f"; trace with a tensor for '{port.keys[0]}'"
    raise MatchError(f"'{port}' {why} of '{region.key or 'the model'}'; there are {listed}")


def find_output(regions: Regions, region: RegionNodes, port: Port) -> fx.Node:
    """Return the node of a region's result at this port. Raises MatchError, with the existing ones, if there is none."""
    ports = regions.out_ports(region)
    if not ports:
        raise MatchError(f"'{region.key or 'the model'}' returns no tensor, so it has no '{port}'")
    for found, node in ports:
        if found.keys == port.keys:
            return node
    listed = ", ".join(f"'{found}'" for found, _ in ports)
    raise MatchError(f"'{region.key or 'the model'}' has no single result '{port}'; there are {listed}: name one")


def _is(wanted: tuple[int | str, ...], keys: tuple[int | str, ...], index: int | None = None) -> bool:
    """Return whether the keys of a port are the wanted ones; an argument has its name or its position."""
    if len(wanted) != len(keys):
        return False
    return all(w in (EACH, k) or (i == 0 and index is not None and w == index) for i, (w, k) in enumerate(zip(wanted, keys)))  # noqa: B905


def expand_ports(regions: Regions, port: Port) -> list[Port]:
    """Return the ports that one with `[*]` in its keys stands for. Raises MatchError if there are none."""
    region = find_region(regions, port)
    wanted = port.keys[:-1] if port.with_members else port.keys
    ports: list[tuple[Port, int | None]] = [(found, None) for found, _ in regions.out_ports(region)]
    if port.side == "in":
        ports = [(found, index) for found, index, _ in regions.in_ports(region)]
    if port.with_members:  # each of these values with all its members
        ports = list(dict.fromkeys((replace(p, keys=p.keys[: len(wanted)]), index) for p, index in ports))
        return [replace(p, keys=(*p.keys, port.keys[-1])) for p, index in ports if _is(wanted, p.keys, index)]
    chosen = [p for p, index in ports if _is(wanted, p.keys, index)]
    if not chosen:
        listed = ", ".join(f"'{p}'" for p, _ in ports)
        raise MatchError(f"'{port}' is not a value of '{region.key or 'the model'}'; there are {listed or 'none'}")
    return chosen


def list_member_ports(regions: Regions, port: Port) -> Any:
    """Return the ports of a whole value in its structure: tuples, records by name; None for a member that is no tensor."""
    region = find_region(regions, port)
    wanted = port.keys[:-1]
    rows: list[tuple[tuple[int | str, ...], Port]] = []
    if port.side == "in" and not wanted:
        return _named(regions, region) if port.keys == (NAMED,) else _arguments(regions, region)
    if port.side == "in":
        for found, index, _ in regions.in_ports(region):
            head = index if isinstance(wanted[0], int) else found.keys[0]
            rows.append(((head, *found.keys[1:]), found))
    else:
        rows = [(found.keys, found) for found, _ in regions.out_ports(region)]
    rows = [(keys[len(wanted) :], found) for keys, found in rows if keys[: len(wanted)] == wanted]
    if not rows and port.side == "out":
        raise MatchError(f"'{region.key or 'the model'}' returns no tensor, so it has no '{port}'")
    return nest(rows) if rows else ()


def _arguments(regions: Regions, region: RegionNodes) -> tuple[Any, ...]:
    """Return the positional arguments of a region's call, constants as they are; all arguments if none is positional."""
    ports = regions.in_ports(region)
    if region.leaf is not None:
        call: tuple[Any, ...] = tuple(region.leaf.args)
    else:
        call = next((node.meta["call"] for _, _, node in ports if "call" in node.meta), ())
    rows = [((index, *found.keys[1:]), found) for found, index, _ in ports if index < len(call) or not call]
    tensors = nest(rows) if rows else ()
    if not call:
        return tuple(value for value in tensors if value is not None)
    constants = [None if isinstance(value, fx.Node) else value for value in call]
    return tuple(
        tensors[i] if i < len(tensors) and tensors[i] is not None else constants[i]
        for i in range(max(len(constants), len(tensors)))
    )


def _named(regions: Regions, region: RegionNodes) -> dict[str, Any]:
    """Return the keyword arguments of a region's call, constants as they are."""
    ports = regions.in_ports(region)
    if region.leaf is not None:
        count = len(region.leaf.args)
        constants: dict[str, Any] = {k: None if isinstance(v, fx.Node) else v for k, v in region.leaf.kwargs.items()}
    else:
        meta: dict[str, Any] = next((node.meta for _, _, node in ports if "named" in node.meta), {"call": ports, "named": {}})
        count, constants = len(meta["call"]), meta["named"]
    rows = [(found.keys, found) for found, index, _ in ports if index >= count]
    return ops.Record({**constants, **(nest(rows) if rows else {})})


def nest(rows: Sequence[tuple[tuple[int | str, ...], Any]]) -> Any:
    """Nest values by their keys."""
    if len(rows) == 1 and rows[0][0] == ():
        return rows[0][1]
    inner: dict[int | str, list[Any]] = {}
    for keys, value in rows:
        inner.setdefault(keys[0], []).append((keys[1:], value))
    built = {key: nest(group) for key, group in inner.items()}
    if any(isinstance(key, str) for key in built):
        return ops.Record({str(key): value for key, value in built.items()})
    return tuple(built.get(i) for i in range(max(map(int, built)) + 1))


def explain_no_region(regions: Regions, path: str) -> str:
    """Return why there is no region at a path: replaced, never called, or no such path, with the nearest."""
    modules = dict(regions.root.named_modules(remove_duplicate=False))
    if path in modules and not regions.inserted(path):
        for place, (name, _) in regions.replaced.items():
            if f"{path}.".startswith(f"{place}."):
                return f"'{path}' is no longer in the graph: pass '{name}' replaced '{place}'"
        if isinstance(modules.get(path.rpartition(".")[0]), nn.MultiheadAttention):
            return (
                f"'{path}' is never called by the model, as MultiheadAttention reads its weight itself: use a pass that maps "
                "parameters, such as lora_weight"
            )
        inner = [k for k in regions.ran if k.startswith(f"{path}.")]
        inside = f"; regions inside it: {format_names(inner)}" if inner else ""
        return f"'{path}' ({list_class_names(modules[path])[0]}) is never called by the model, so it is not a region{inside}"
    return f"no region '{path}'{did_you_mean(path, regions.ran)}"


def _replaced(root: nn.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the regions that passes replaced, with the name of the pass and the path of the block."""
    for entry in getattr(root, "meta", {}).get("passes", []):
        rows = [s for s in entry["sites"] if s["place"] == "replace"]
        yield from ((s["path"].partition("@")[0], (entry["name"], s["block"])) for s in rows)


def format_names(items: Sequence[str]) -> str:
    """List names for a message, the first of them if they are many."""
    shown = ", ".join(items[: 2 * SHOWN])
    return shown + (f", ... ({len(items)})" if len(items) > 2 * SHOWN else "") if items else "none"
