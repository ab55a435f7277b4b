"""The graph of a traced module: an FX graph with the edges of regions, its code, and its edits.

What torch.fx offers for it is called in this file alone. Arguments may be nested as those of nodes are, in tuples, lists,
dicts and slices; nothing here checks that what a node reads stands before it, `graph.lint()` does.
"""

from __future__ import annotations

import functools
import itertools
import keyword
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from ..errors import FxplugError, GuardError, quote
from ..torch_internals.modules import get_modes, is_refusing_hooks, set_modes
from . import ops
from .containers import HOOKED, TracedPart, find_module

# --- new nodes


def _create(graph: fx.Graph, op: str, target: Any, args: Any, kwargs: Any, name: str | None, kind: Any = None) -> fx.Node:
    """Create a node without arguments and give it them then: torch searches those of a new one for symbolic numbers, which
    ours never have, and takes a third of the time of a copy for it."""
    node: fx.Node = graph.create_node(op, target, name=name, type_expr=kind)
    node.args = args
    if kwargs:
        node.kwargs = dict(kwargs)
    return node


def insert(
    graph: fx.Graph,
    op: str,
    target: Any,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    after: fx.Node | None = None,
    before: fx.Node | None = None,
    name: str | None = None,
    meta: Mapping[str, Any] | None = None,
) -> fx.Node:
    """A new node right after or right before another, or at the end of the graph, with this meta.

    `op`, `target` and the arguments are those of an `fx.Node`. Its name is `name`, or made of the target, and gets a number
    where the graph has it already.
    """
    node = _create(graph, op, target, args, kwargs, name)
    node.meta.update(meta or {})
    move(node, after=after, before=before)
    return node


def get_meta(value: fx.Node | Tensor, *keys: str) -> dict[str, Any]:
    """The shape and dtype of a tensor, as meta has them; of a node what is known of these two, or of the keys named."""
    if isinstance(value, Tensor):
        return {"shape": tuple(value.shape), "dtype": value.dtype}
    return {key: value.meta[key] for key in keys or ("shape", "dtype") if key in value.meta}


def copy_nodes(nodes: Iterable[fx.Node], into: fx.Graph, values: dict[fx.Node, fx.Node]) -> None:
    """Copies of nodes at the end of another graph, names and meta included.

    `values` says what stands there for the nodes that they read, and for each one in it already, which is not copied; it
    learns the copies. Raises KeyError for a node that reads what is neither.
    """
    for node in nodes:
        if node not in values:
            args, kwargs = (fx.node.map_arg(given, values.__getitem__) for given in (node.args, node.kwargs))
            values[node] = new = _create(into, node.op, node.target, args, kwargs, node.name, node.type)
            new.meta = node.meta.copy()


# --- nodes that are there


def move(node: fx.Node, *, after: fx.Node | None = None, before: fx.Node | None = None) -> None:
    """Put a node right after or right before another of its graph."""
    if before is not None:
        before.prepend(node)
    elif after is not None:
        after.append(node)


def change(
    node: fx.Node, *, target: Any = None, args: tuple[Any, ...] | None = None, kwargs: Mapping[str, Any] | None = None
) -> None:
    """Let a node call another target, or give it other arguments; what is None stays."""
    if target is not None:
        node.target = target
    if args is not None:
        node.args = args
    if kwargs is not None:
        node.kwargs = dict(kwargs)


def set_argument(node: fx.Node, position: int, name: str, value: Any) -> None:
    """Give a node another value for an argument, which stands at this position or, where that is not given, has this name."""
    if len(node.args) > position:
        change(node, args=(*node.args[:position], value, *node.args[position + 1 :]))
    else:
        change(node, kwargs={**node.kwargs, name: value})


def set_operand(node: fx.Node, index: int, value: fx.Node) -> None:
    """Give a node another value in the place of one of the tensors in its arguments, counted as in `regions.list_operands`."""
    count = itertools.count()
    args, kwargs = fx.node.map_arg(
        (node.args, node.kwargs), lambda read: value if "shape" in read.meta and next(count) == index else read
    )
    change(node, args=args, kwargs=kwargs)


def rewire(node: fx.Node, table: Mapping[fx.Node, Any]) -> None:
    """Let a node read, wherever in its arguments a node of this table stands, what the table has for it: any value."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda read: table.get(read, read))
    change(node, args=args, kwargs=kwargs)


def is_added(node: fx.Node) -> bool:
    """Whether a pass put a node in and it is no part of a region: the blocks, not the networks of a pass."""
    return "pass" in node.meta and not node.meta["pass"].get("region")


# --- who reads a value


def redirect(value: fx.Node, new: fx.Node, keep: Collection[fx.Node] = ()) -> None:
    """Let those who read a value read a new node instead, all but that node itself and those to `keep`."""
    value.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new and user not in keep)


def replace(node: fx.Node, value: Any) -> None:
    """Let those who read a node read a value instead, another node or nested ones, and take the node out of its graph."""
    for user in list(node.users):
        rewire(user, {node: value})
    erase([node])


def erase(nodes: Iterable[fx.Node]) -> None:
    """Take nodes out of their graph, the last first. Raises RuntimeError where one is read by another that stays."""
    for node in sorted(nodes, reverse=True):
        node.graph.erase_node(node)


def erase_unused(nodes: Iterable[fx.Node], which: Callable[[fx.Node], bool] | None = None) -> None:
    """Take out those of the nodes that nobody reads, the last first: what they alone read is unused then, and goes as well.

    Inputs and outputs of the graph stay, and nodes of which `which` is not true.
    """
    for node in sorted(nodes, reverse=True):
        if not node.users and node.op not in ("placeholder", "output") and (which is None or which(node)):
            erase([node])


# a path from the root, within the calls of getattr that FX writes for a name such as "0"; or a string or comment, which stays
PATH = re.compile(
    r'''(?<![\w.])((?:getattr\()*self(?:\.\w+|\[[^\[\]]+\]|, "[^"\\]+"\))+)|'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*"|#[^\n]*'''
)
STEP = re.compile(r'''\.(\w+)|\[[^\[\]]+\]|, "([^"\\]+)"\)''')
OF_THE_ROOT: set[str] = set()  # the names that a traced module has for itself, which its class says


class _Statements(fx.Graph):
    """A graph's nodes without the edges of regions, in a list: to write code FX asks no more, and a graph costs twice as much.

    They are copies, as FX changes how nodes are printed while it writes, and another thread may use the graph's own.
    """

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__()
        self.listed: list[fx.Node] = []
        values: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            if _is_edge(node):
                values[node] = values[cast(fx.Node, node.args[0])]
                continue
            args, kwargs = (fx.node.map_arg(given, values.__getitem__) for given in (node.args, node.kwargs))
            values[node] = new = fx.Node(self, node.name, node.op, node.target, args, kwargs, node.type)
            new.meta = node.meta
            self.listed.append(new)

    @property
    def nodes(self) -> Any:
        return self.listed


class Graph(fx.Graph):
    """An FX graph whose generated code leaves out the edges of regions and writes `self.blocks[0]`, not `getattr`."""

    def python_code(self, root_module: str, **options: Any) -> Any:
        """The code of the graph without the edges of regions, with `self.blocks[0]` for a path."""
        code = _Statements(self).python_code(root_module, **options)
        code.src = PATH.sub(_spelled, code.src)
        return code

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Graph:
        return copy_graph(self)


def _spelled(found: re.Match[str]) -> str:
    return found[0] if found[1] is None else _spell(found[1])


@functools.lru_cache(10_000)  # the graphs of a model have the same paths
def _spell(path: str) -> str:
    calls, path = path.split("self", 1)
    lookups, text = len(calls) // len("getattr("), "self"
    for step in STEP.finditer(path):
        if step[2]:
            if not lookups:  # an argument of a call around it
                return text + path[step.start() :]
            lookups -= 1
            text += f"[{step[2] if step[2].isdigit() else repr(step[2])}]"
        else:
            text += f"[{step[1]!r}]" if step[1] and is_indexed(step[1], first=step.start() == 0) else step[0]
    return "getattr(" * lookups + text


@functools.cache
def is_indexed(key: str, first: bool) -> bool:
    """Whether code takes a child, parameter or buffer as `module[key]`: an attribute of that name would be another.

    `first` says that the module is the root, a TracedModule; below it the modules with such keys are Containers.
    """
    if not key.isascii() or not key.isidentifier() or keyword.iskeyword(key):
        return True
    return key in (OF_THE_ROOT if first else {"classes", "attributes", *dir(nn.Module)})


def copy_graph(graph: fx.Graph) -> Graph:
    """The same graph again, node names and meta included."""
    new = Graph()
    copy_nodes(graph.nodes, new, {})
    return new


def without_edges(graph: fx.Graph) -> fx.Graph:
    """The graph that runs: the same without the identities that mark the edges of regions."""
    new = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if _is_edge(node):
            values[node] = values[cast(fx.Node, node.args[0])]
        else:
            copy_nodes([node], new, values)
    return new


def _is_edge(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is ops.edge and isinstance(node.args[0], fx.Node)


MODES = (ops.enter_grad, ops.enter_autocast)


def restore_modes_on_error(forward: Any, switches: bool, tried: bool) -> Any:
    """Wrap a forward so that its errors leave nothing behind and are no answer of the model's.

    Where it `switches` gradients or autocast, these get their modes back. Where it has operations that the model's code has
    `tried`, one that fails is a GuardError: the model may go on then, and no graph can.
    """

    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        before = get_modes() if switches else None
        try:
            return forward(self, *args, **kwargs)
        except BaseException as error:  # whatever leaves the model's forward, an interrupt, too
            if before is not None:
                set_modes(before)
            if not tried or isinstance(error, FxplugError) or not isinstance(error, Exception):
                raise
            text = quote(f"{type(error).__name__}: {error}", 300)
            raise GuardError(f"an operation of the graph fails, which the model may catch in a `try`: {text}") from error

    return wrapper


def compile_graph(graph: fx.Graph) -> tuple[fx.GraphModule, Any, Any]:
    """A graph as code, in a module whose class gets the bare forward, which no call in another thread may run; and a forward
    for it.
    """
    blank = fx.GraphModule({}, fx.Graph())
    blank._graph = graph
    code = blank.recompile()
    forward: Any = type(blank).forward
    switches = any(node.target in MODES for node in graph.nodes if node.op == "call_function")
    tried = bool(graph.find_nodes(op="call_function", target=ops.tried))
    return blank, code, restore_modes_on_error(forward, switches, tried) if switches or tried else forward


# --- one tensor or layer under several names, of which the graph reads one

Names = tuple[tuple[str, ...], ...]  # paths, split


def note_tied(tree: nn.Module, graphs: Iterable[fx.Graph]) -> None:
    """Note in a tree the names of each tensor and layer that its graphs use and that has several."""
    used = {str(node.target) for graph in graphs for node in graph.nodes if node.op in ("get_attr", "call_module")}
    places: dict[int, dict[tuple[int, str], str]] = {}  # of each object: where it is held, and under which name
    for path, module in tree.named_modules(remove_duplicate=False):
        for table in (module._parameters, module._buffers, module._modules):
            for key, value in table.items():
                if value is not None:
                    places.setdefault(id(value), {}).setdefault((id(module), key), f"{path}.{key}" if path else key)
    several = [list(names.values()) for names in places.values() if len(names) > 1]
    tied = tuple(tuple(tuple(name.split(".")) for name in names) for names in several if not used.isdisjoint(names))
    if tied:
        tree.__dict__["_tied"] = tied


def check_tied(module: nn.Module) -> None:
    """Raises GuardError where two names of the model were one tensor or layer when it was traced, and are no more."""
    for names in module.__dict__["_tied"]:
        first = _at(module, names[0])
        for name in names:
            if _at(module, name) is not first and HOOKED not in module.__dict__:
                from .fixed import describe_untied

                raise GuardError(describe_untied(".".join(names[0]), ".".join(name)))


def list_tied(module: nn.Module) -> tuple[Names, ...]:
    """Those of the tied names of a module that are one."""
    tied: tuple[Names, ...] = module.__dict__["_tied"]
    return tuple(names for names in tied if len({id(_at(module, name)) for name in names}) == 1)


def _at(module: nn.Module, steps: tuple[str, ...]) -> Any:
    for step in steps[:-1]:
        if (found := module._modules.get(step)) is None:
            return None
        module = found
    last = steps[-1]
    return module._parameters.get(last, module._buffers.get(last, module._modules.get(last)))


# what checks how a graph is called, before it computes anything
ENTRY = (ops.check_constants, ops.check_inputs, ops.check_members, ops.check_generator, ops.check_numbers)
OF_INPUTS = (operator.getitem, ops.edge, ops.input_or_default)  # what takes a call's arguments apart


def get_graph(module: Any) -> fx.Graph:
    """Get the graph of the mode that a traced module is in."""
    graph: fx.Graph = module.graphs.get(module.training, module.graph)
    return graph


def note_uncalled(tree: nn.Module, before: Collection[fx.Graph], after: Collection[fx.Graph]) -> None:
    """Let layers of a tree that the graphs before a change call, and those after it do not, refuse hooks."""
    old, new = (list_targets(graphs, "call_module") for graphs in (before, after))
    if old - new or any(is_refusing_hooks(find_module(tree, path)) for path in new - old):
        from .fixed import refuse_uncalled  # for few modules

        refuse_uncalled(tree, old, new, list_targets(after, "get_attr"), TracedPart)


def list_targets(graphs: Iterable[fx.Graph], op: str) -> set[str]:
    """What the nodes of some graphs with this operation have as targets."""
    return {str(node.target) for graph in graphs for node in graph.find_nodes(op=op, sort=False)}


class SampleTable:
    """A module that a graph calls and that may have an entry for each sample of a call."""

    def count_entries(self) -> int:
        """Return the number of samples with their own entries; 0 if all samples use the same."""
        raise NotImplementedError

    def check_samples(self, x: Tensor) -> None:
        """Raise SpecError if the number of samples with entries differs from the first dimension of x."""
        raise NotImplementedError


def report_loaded(module: nn.Module, result: Any) -> Any:
    """Tell the blocks of a module that its weights were loaded: `after_load` of one makes anew what it has made of them.

    Returns the result of the loading.
    """
    for block in module.modules():
        if callable(make_anew := getattr(block, "after_load", None)):
            make_anew(module)
    return result


def find_tables(graph: fx.Graph, module: nn.Module) -> list[fx.Node]:
    """Return the calls of blocks that may have an entry for each sample."""
    calls = graph.find_nodes(op="call_module")
    return [node for node in calls if isinstance(module.get_submodule(str(node.target)), SampleTable)]


def find_samples(graph: fx.Graph, module: nn.Module) -> tuple[list[Any], Callable[..., Any] | None]:
    """Return the blocks that may have an entry for each sample, and a function from a call's arguments to their inputs."""
    head, values = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        read = node.op == "call_function" and node.target in OF_INPUTS and all(n in values for n in node.all_input_nodes)
        if node.op == "placeholder" or node.op == "get_attr" or read:
            copy_nodes([node], head, values)
    found = [(node, values[x]) for node in find_tables(graph, module) for x in node.all_input_nodes if x in values]
    insert(head, "output", "output", (tuple(value for _, value in found),))
    head.eliminate_dead_code()
    tables = [module.get_submodule(str(node.target)) for node, _ in found]
    return tables, fx.GraphModule(module, head).forward if found else None
