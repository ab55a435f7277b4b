"""The checks of a call that a graph begins with, run by themselves, and whether a call can be made a second time."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from ..errors import GuardError
from ..torch_internals.compiling import apart
from ..torch_internals.modules import NormBase
from . import functions, ops
from .editing import copy_nodes, insert

if TYPE_CHECKING:
    from .traced_module import TracedModule

# what checks how a graph is called, before it computes anything
ENTRY = (ops.same, ops.check_inputs, ops.check_members, ops.check_generator, ops.check_numbers)
AT_ENTRY = (*ENTRY, operator.getitem, ops.edge, ops.device_of, ops.given)
HARMLESS = (
    *ENTRY, ops.guard, ops.tried, ops.check_state, ops.check_added, ops.any_gradients, ops.enter_grad, ops.exit_grad,
    ops.enter_autocast, ops.exit_autocast,
)  # fmt: skip
# what may give the memory of its first argument
VIEWS = """view reshape transpose permute unsqueeze squeeze expand getitem chunk split unbind flatten unflatten narrow select t
detach contiguous to float half bfloat16 double type edge alias real imag swapaxes swapdims movedim moveaxis expand_as view_as
diagonal tensor_split type_as as_strided""".split()  # noqa: SIM905


def signature_of(module: TracedModule) -> inspect.Signature:
    """How a module is called, whatever an offloader has put in the place of its `forward`."""
    return inspect.signature(type(module).forward.__get__(module))


@apart
def refusal(module: TracedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why a graph does not hold for a call, as far as its first checks tell; None where it does, or takes no such call."""
    graph = _graph(module)
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
    """The first checks of a graph alone."""
    head, values = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        first = node.op == "call_function" and node.target in AT_ENTRY
        held = node.op == "get_attr" and any(user.target is ops.given for user in node.users)
        if node.op == "placeholder" or held or first and all(read in values for read in node.all_input_nodes):
            copy_nodes([node], head, values)
        elif node.op != "get_attr" and not first:
            break
    insert(head, "output", "output", (None,))
    forward: Callable[..., None] = fx.GraphModule(module, head).forward
    return forward


def _graph(module: TracedModule) -> fx.Graph:
    return module.graphs.get(module.training, module.graph)


@apart
def repeatable(module: TracedModule) -> bool:
    """Whether a call that a guard ended can be made again in another way: nothing was written or drawn that stays."""
    for node in _graph(module).nodes:
        if ops.is_applied(node.target):
            return False  # its code may do either
        if node.op == "call_module":
            leaf = module.get_submodule(str(node.target))
            ours = type(leaf).__module__.startswith(("torch.nn.modules.", "fxplug.blocks."))
            if not ours or any(functions.draws(m, module.training) for m in leaf.modules()):
                return False
            if module.training and isinstance(leaf, NormBase):
                return False
        if not node.meta.get("effect") or node.target in HARMLESS:
            continue
        short = functions.short_name(node.target)
        if short in functions.RANDOM:
            if short in functions.DRAWS or module.training:
                return False
        elif node.op not in ("call_function", "call_method") or _owner(node).op in ("placeholder", "get_attr"):
            return False
    return True


def _owner(node: fx.Node) -> fx.Node:
    """Whose memory a node writes, as far back as it may be: an input, a tensor of the module, or what was computed."""
    while node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
        if functions.short_name(node.target) not in VIEWS:
            break
    return node
