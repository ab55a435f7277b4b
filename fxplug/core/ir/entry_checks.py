"""How a traced module is called, whether its graph holds for a call as far as its first checks tell, and whether again."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from ..errors import GuardError
from ..torch_internals.modules import NormBase, without_compiler
from . import functions, ops
from .containers import SharedCode
from .graph import ENTRY, copy_nodes, get_graph, insert

if TYPE_CHECKING:
    from .traced_module import TracedModule

AT_ENTRY = (*ENTRY, operator.getitem, ops.edge, ops.device_of, ops.input_or_default)
# what sizes of inputs are computed by: views of these, which cost next to nothing, their sizes, and numbers of numbers
VIEWS = frozenset({"view", "reshape", "flatten", "permute", "transpose", "unsqueeze", operator.getitem, ops.edge})
MEASURES = frozenset({"size", "dim", "numel"})
DECIDED = frozenset({
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg, operator.eq, operator.ne,
    operator.lt, operator.le, operator.gt, operator.ge, operator.getitem, ops.edge, ops.guard, max, min,
})  # fmt: skip
HARMLESS = (
    *ENTRY, ops.guard, ops.tried, ops.check_state, ops.check_added, ops.any_gradients, ops.enter_grad, ops.exit_grad,
    ops.enter_autocast, ops.exit_autocast,
)  # fmt: skip


@without_compiler
def find_refusal(module: TracedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return why a graph's first checks refuse a call; None if they do not, or if the signature does not fit."""
    graph = get_graph(module)
    known: Any = module.__dict__.get("_entry")
    if known is None or known[0] is not graph:
        known = module.__dict__["_entry"] = graph, _entry(graph, module)
    try:
        known[1](*args, **kwargs)
    except GuardError as error:
        return str(error)
    except TypeError:
        return None
    return None


def _entry(graph: fx.Graph, module: nn.Module) -> Callable[..., None]:
    """Return a function of the first checks of a graph alone, and of what it has decided by sizes of its inputs."""
    head, values = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        first = node.op == "call_function" and node.target in AT_ENTRY
        held = node.op == "get_attr" and any(user.target is ops.input_or_default for user in node.users)
        if node.op == "placeholder" or held or first and all(read in values for read in node.all_input_nodes):
            copy_nodes([node], head, values)
        elif node.op != "get_attr" and not first:
            break
    for node in _list_decisions_by_size(graph):
        if node not in values:
            copy_nodes([node], head, values)
    insert(head, "output", "output", (None,))
    forward: Callable[..., None] = fx.GraphModule(module, head).forward
    return forward


def _list_decisions_by_size(graph: fx.Graph) -> list[fx.Node]:
    """Return the guards of numbers that follow from sizes of inputs alone, and what these are computed by, in order."""
    nodes = list(graph.nodes)
    views = {node for node in nodes if node.op == "placeholder"}
    numbers: set[fx.Node] = set()
    for node in nodes:
        read = node.all_input_nodes
        if node.op not in ("call_function", "call_method") or not read:
            continue
        if node.target in VIEWS and read[0] in views and numbers.issuperset(read[1:]):
            views.add(node)
        elif numbers.issuperset(read) if node.target in DECIDED else node.target in MEASURES and views.issuperset(read):
            numbers.add(node)
    needed = {node for node in numbers if node.target is ops.guard}
    for node in reversed(nodes):
        if node.op != "placeholder" and not needed.isdisjoint(node.users):
            needed.add(node)
    return [node for node in nodes if node in needed]


@without_compiler
def is_repeatable(module: TracedModule) -> bool:
    """Return whether a call that a guard ended can be repeated in another way: nothing was written or drawn that stays."""
    if module.has_mixed_modes:
        return all(is_pure(graph.nodes, module, mode) for mode in (False, True) for graph in module.graphs.values())
    return is_pure(get_graph(module).nodes, module, module.training)


def is_pure(nodes: Iterable[fx.Node], module: nn.Module, training: bool) -> bool:
    """Return whether nodes write nothing that stays and draw no random numbers, in that mode."""
    for node in nodes:
        if ops.is_applied(node.target):
            return False  # its code may do either
        if node.op == "call_module":
            leaf = module.get_submodule(str(node.target))
            if isinstance(leaf, SharedCode):
                if training not in leaf.repeatable:
                    return False
                continue
            ours = type(leaf).__module__.startswith(("torch.nn.modules.", "fxplug.blocks."))
            if not ours or any(_draws(m, training) for m in leaf.modules()):
                return False
            if training and isinstance(leaf, NormBase):
                return False
        if not node.meta.get("effect") or node.target in HARMLESS:
            continue
        short = functions.get_short_name(node.target)
        if short in functions.RANDOM:
            drops = short != "scaled_dot_product_attention" or functions.bind_attention(node)["dropout_p"] != 0
            if short in functions.DRAWS or (training and drops):
                return False
        elif node.op not in ("call_function", "call_method") or _owner(node).op in ("placeholder", "get_attr"):
            return False
    return True


def _draws(layer: nn.Module, training: bool) -> bool:
    """Return whether a layer of torch draws random numbers: dropout that drops nothing, as in most denoisers, draws none."""
    return functions.is_random_layer(layer, training) and getattr(layer, "p", None) != 0


def _owner(node: fx.Node) -> fx.Node:
    """Return the possible owner of the memory that a node writes: an input, a tensor of the module, or a computed value."""
    while node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
        if not functions.may_alias(functions.get_short_name(node.target)):
            break
    return node


def get_signature(module: TracedModule) -> inspect.Signature:
    """Return the signature of a module, whatever an offloader has replaced its `forward` with."""
    return inspect.signature(type(module).forward.__get__(module))
