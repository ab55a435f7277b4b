"""Parts of a traced module in another mode than its root: graphs of both modes put together at the edges of regions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from torch import fx, nn

from ..errors import GuardError
from ..spec.addresses import Port
from . import ops
from .containers import Container, SharedCode, find_module
from .graph import Graph, copy_graph, copy_nodes, is_added

NAMES = {True: "training", False: "evaluation"}
# classes whose own code is that of torch and asks for no mode
LISTS = ("Sequential", "ModuleList", "ModuleDict")
# functions of numbers and shapes, which give the same wherever they stand
OF_NUMBERS = {getattr, len, int, float, max, min, ops.device_of, ops.dtype_of, "size", "dim", "numel"}


class RegionCall(NamedTuple):
    """The place in a region's code where it calls the region of this key."""

    key: str


class RegionCode:
    """The code of each region of one graph: its own nodes and its calls of others, in their order.

    The inputs of a region are of the code around it, its results of its own. Reads of parameters are of none.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.of: dict[str, list[fx.Node | RegionCall]] = {"": []}
        self.at: dict[fx.Node, tuple[str, int]] = {}  # where each node is in it
        self.edges: dict[str, dict[Port, fx.Node]] = {}
        self._stacks: dict[str, tuple[str, ...]] = {"": ()}  # the regions around each region, and itself
        self._named = {node.name: node for node in graph.nodes}
        calls = [node for node in graph.find_nodes(op="call_module") if "port" in node.meta and not is_added(node)]
        self._layers = {node.meta["port"].path: node for node in calls}  # have no code here
        for node in graph.nodes:
            self._note_region(node)
        for node in graph.nodes:
            if not _is_free(node):
                self._put(node, self._around(node))

    def _note_region(self, node: fx.Node) -> None:
        if not is_added(node) and node.op not in ("placeholder", "output") and not _is_free(node):
            stack = tuple(key for key in node.meta.get("nn_module_stack", {}) if key and key not in self._layers)
            if stack:
                self._stacks.setdefault(stack[-1], stack)

    def _around(self, node: fx.Node) -> tuple[str, ...]:
        """Return the keys of the regions that a node is in, the innermost last."""
        if is_added(node):
            site = str(node.meta["pass"].get("site", ""))
            if site in self._layers:
                return self._around(self._layers[site])
            if site in self._stacks:
                return self._stacks[site]  # within the edges
            if site in self._named and not is_added(self._named[site]):
                return self._around(self._named[site])
            site = str(node.meta["pass"].get("within", site))
            while site and site not in self._stacks:
                site = site.rpartition(".")[0]
            return self._stacks.get(site, ())
        keys = [key for key in node.meta.get("nn_module_stack", {}) if key and key not in self._layers]
        if keys and _is_edge(node) and node.meta["port"].side == "in":
            keys.pop()
        return self._stacks.get(keys[-1], ()) if keys else ()

    def _put(self, node: fx.Node, stack: tuple[str, ...]) -> None:
        outer = ""
        for key in stack:
            if key not in self.of:
                self.of[outer].append(RegionCall(key))
                self.of[key] = []
            outer = key
        port = node.meta.get("port")
        if port is not None and node.target is ops.edge:
            self.edges.setdefault(port.path, {})[port] = node
        self.at[node] = outer, len(self.of[outer])
        self.of[outer].append(node)

    def rows(self, key: str) -> list[Any] | None:
        """Return the code of a region for comparison with the other mode's; None if it has none."""
        return [self.row(item) for item in self.of[key]] if key in self.of else None

    def row(self, item: fx.Node | RegionCall) -> Any:
        """Return a part of a region's code for comparison with the other mode's."""
        if isinstance(item, RegionCall):
            return item
        args = fx.node.map_arg((item.args, item.kwargs), self.reference)
        constants = [item.meta.get(key) for key in ("call", "named")] if item.target is ops.edge else None
        return item.op, item.target, repr(args), str(item.meta.get("port", "")), repr(constants)

    def reference(self, node: fx.Node) -> Any:
        """Return the reference to a node that is read, in the text of a region's code."""
        if node.op == "placeholder" or _is_free(node):
            return Reference(f"{node.op} {node.target}")
        if _is_edge(node):
            return Reference(f"edge {node.meta['port']}")
        return Reference("{} {}".format(*self.at[node]))


class Reference(str):
    """What stands for a node in the text of a region's code."""

    __slots__ = ()


def _is_free(node: fx.Node) -> bool:
    """Return whether a node is placed where it is first needed, in whichever region."""
    return node.op == "get_attr" or node.target is ops.device_of


def _is_edge(node: fx.Node) -> bool:
    return node.target is ops.edge and "port" in node.meta


class MixedModes(GuardError):
    """A part is in another mode than what is around it, and no graph can follow: another way of calling cannot either."""


class PartModes:
    """The parts of a module whose code is another in training than in evaluation, and graphs for them in mixed modes.

    `modules` has them by the key of their region. Where there is a graph for one mode alone these are all parts with code of
    their own, as nothing is known of the other mode. With them are those whose mode the code of others reads or sets.
    """

    def __init__(
        self, root: nn.Module, graphs: Mapping[bool, fx.Graph], meta: Mapping[str, Any], error: str | None = None
    ) -> None:
        """`root` has the parts, `graphs` are by training mode; `error` is why there is none for the other mode."""
        self.codes = {mode: RegionCode(graph) for mode, graph in graphs.items()}
        self.error = error
        codes = list(self.codes.values())
        keys = dict.fromkeys(key for code in codes for key in code.of)
        self.differ = {key for key in keys if len(codes) == 1 or codes[0].rows(key) != codes[1].rows(key)}
        found = {key: find_module(root, key.partition("@")[0]) for key in keys if key and key in self.differ}
        self.modules = {
            key: part
            for key, part in found.items()
            if part is not None and not (len(codes) == 1 and class_of(part) in LISTS)
        }
        if len(codes) == 1 and not self.error:
            self.modules = {}
        self.read = [tuple(pair) for pair in meta.get("modes_read", [])]
        for path in (path for pair in self.read for path in pair):
            if path and path not in self.modules and (part := find_module(root, path)) is not None:
                self.modules[path] = part
        nested = [key for keys in meta.get("nested", {}).values() for key in keys]
        self.outlined = {key: part for key, part in _inside_outlined(root, graphs, nested) if key not in self.modules}
        self.modules.update(self.outlined)

    def compose(self, root_mode: bool) -> Graph:
        """Return a graph in which each part has the code of its own mode. Raises MixedModes that names a part."""
        modes = {key: part.training for key, part in self.modules.items()}
        for reader, path in self.read:
            one, two = (modes.get(key, root_mode) for key in (reader, path))
            if one != two:
                why = f"the code of {f'{reader!r}' if reader else 'the model'} reads or sets that mode"
                raise refused(path or reader, two if path else one, why, "put both into one mode")
        if len(self.codes) == 1 and not self.error:
            return copy_graph(next(iter(self.codes.values())).graph)
        for key in self.modules if len(self.codes) == 1 else self.outlined:
            if modes[key] != root_mode:
                why = f"the model could not be traced in {NAMES[modes[key]]} ({self.error})"
                if key in self.outlined:
                    why = "its code is shared with other parts"
                raise refused(key, modes[key], why)
        return _Composition(self, root_mode, modes).graph


def refused(key: str, mode: bool, why: str, todo: str = "") -> MixedModes:
    """Return the error for a part in this mode."""
    path = key.partition("@")[0]
    todo = todo or f"put the whole model into one mode, or keep the part whole when the model is traced: leaf: [{path}]"
    return MixedModes(f"'{path}' is in {NAMES[mode]} and the modules around it are not, which no graph supports: {why}; {todo}")


def class_of(module: nn.Module) -> str:
    """Return the name of a part's class in the model."""
    return module.classes[0] if isinstance(module, Container) else type(module).__name__


def _inside_outlined(
    root: nn.Module, graphs: Mapping[bool, fx.Graph], nested: Collection[str]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts whose code is in modules that `nested` regions share, which is another one for each mode."""
    calls = [_shared(graph, root) for graph in graphs.values()] if nested else []
    if len(calls) < 2 or calls[0] == calls[1]:
        return
    for path in (key.partition("@")[0] for key in nested):
        part = find_module(root, path)
        for name, inner in part.named_modules(prefix=path) if part is not None else ():
            if isinstance(inner, Container) and class_of(inner) not in LISTS:
                yield name, inner


def _shared(graph: fx.Graph, root: nn.Module) -> list[str]:
    """List the calls of shared code in a graph."""
    calls = [str(node.target) for node in graph.find_nodes(op="call_module")]
    return [name for name in calls if isinstance(find_module(root, name), SharedCode)]


class _Composition:
    """One graph while it is put together."""

    def __init__(self, parts: PartModes, root_mode: bool, modes: Mapping[str, bool]) -> None:
        self.parts, self.modes = parts, modes
        self.graph = Graph()
        # by mode: what stands for the nodes of that graph
        self.values: dict[bool, dict[fx.Node, fx.Node]] = {False: {}, True: {}}
        self.reads: dict[str, fx.Node] = {}
        self.region("", root_mode, ())
        self.graph.lint()

    def region(self, key: str, mode: bool, around: tuple[str, ...]) -> None:
        """Put the code of a region here, as it is in this mode; `around` are those that it is in."""
        code = self.parts.codes[mode]
        for index, item in enumerate(code.of[key]):
            if isinstance(item, RegionCall):
                self.call(item.key, mode, (*around, key))
                continue
            for read in item.all_input_nodes:
                if read not in self.values[mode]:
                    self.values[mode][read] = self.outside(read, mode, key)
            copy_nodes([item], self.graph, self.values[mode])
            self.map_copy(item, key, index, not mode)

    def map_copy(self, node: fx.Node, key: str, index: int, other: bool) -> None:
        """Note that the copy of a node stands for what is like it in the other graph, too."""
        code = self.parts.codes[other]
        twin: fx.Node | RegionCall | None = None
        if _is_edge(node):
            port = node.meta["port"]
            twin = code.edges.get(port.path, {}).get(port)
        elif node.op == "placeholder":
            twin = next(each for each in code.graph.find_nodes(op="placeholder") if each.target == node.target)
        elif key not in self.parts.differ:
            twin = code.of[key][index]
        if isinstance(twin, fx.Node):
            self.values[other].setdefault(twin, self.values[not other][node])

    def call(self, key: str, mode: bool, around: tuple[str, ...]) -> None:
        own = self.modes.get(key, mode)
        if key in self.parts.differ and own != mode:
            self.check(key, mode)
            mode = own
        self.region(key, mode, around)

    def check(self, key: str, mode: bool) -> None:
        """Raises GuardError where a region has other inputs or results in the two modes."""
        here, there = (self.parts.codes[m] for m in (mode, not mode))
        if key not in there.of:
            raise refused(key, not mode, f"the model does not call it in {NAMES[not mode]}")
        ports = [set(code.edges.get(key, ())) for code in (here, there)]
        if ports[0] != ports[1]:
            names = ", ".join(f"'{port}'" for port in sorted(ports[0] ^ ports[1], key=str))
            raise refused(key, not mode, f"in one mode alone it has {names}")
        for port, node in here.edges.get(key, {}).items():
            twin = there.edges[key][port]
            if any(node.meta.get(name) != twin.meta.get(name) for name in ("call", "named")):
                raise refused(key, not mode, "the model calls it with other arguments in the two modes")

    def outside(self, node: fx.Node, mode: bool, key: str) -> fx.Node:
        """Return the node that replaces one outside a region which reads it other than through its edges."""
        if node in self.values[mode]:
            return self.values[mode][node]
        if _is_free(node):
            name = str(node.target)
            if name not in self.reads:
                copy_nodes([*node.all_input_nodes, node], self.graph, self.values[mode])
                self.reads[name] = self.values[mode][node]
            return self.reads[name]
        if node.op in ("call_function", "call_method") and _of_numbers(node) and self.has_twin(node, mode):
            for read in node.all_input_nodes:
                self.values[mode][read] = self.outside(read, mode, key)
            copy_nodes([node], self.graph, self.values[mode])
            return self.values[mode][node]
        home = self.parts.codes[mode].at[node][0]
        made, used = (f"in '{name}'" if name else "around it" for name in (home, key))
        why = f"'{node.name}', which is computed {made}, is read {used} and is neither an argument nor a result"
        raise refused(key or home, self.modes.get(key or home, mode), why)

    def has_twin(self, node: fx.Node, mode: bool) -> bool:
        """Return whether the region that computes a number computes it in the other mode, too."""
        home = self.parts.codes[mode].at[node][0]
        own, other = self.parts.codes[mode], self.parts.codes[not mode]
        row = own.row(node)
        return any(other.row(item) == row for item in other.of.get(home, ()))


def _of_numbers(node: fx.Node) -> bool:
    """Return whether a node computes a number from shapes and numbers."""
    if "shape" in node.meta or node.meta.get("effect"):
        return False
    return node.target in OF_NUMBERS or getattr(node.target, "__module__", "") in ("_operator", "math")
