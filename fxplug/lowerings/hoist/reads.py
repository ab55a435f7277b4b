"""What a node reads of its arguments: their values, or only sizes, dtypes and devices, which are the same for other values."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

from ...blocks.base import Table
from ...core.ir import functions, ops
from ...core.ir.entry_checks import HARMLESS
from ...core.ir.functions import REGION, bind_attention, is_random_layer
from ...core.ir.graph import MODES
from ...core.ir.subgraphs import SWITCHES, find_written

OF_SHAPE = {"size", "dim", "numel", "ndimension", "is_floating_point", "is_complex", "element_size"}
OF_KIND = (ops.dtype_of, ops.device_of, ops.same_dtype, ops.number_of_parts)
# of this argument only sizes, dtype and device count
LIKE = {"expand_as": 1, "view_as": 1, "reshape_as": 1, "type_as": 1}
LIKE |= {f"{kind}_like": 0 for kind in ("zeros", "ones", "empty", "full")}
LIKE |= {f"new_{kind}": 0 for kind in ("zeros", "ones", "full", "empty")}
# their results have sizes by values
BY_VALUE = {"nonzero", "masked_select", "unique", "unique_consecutive", "argwhere", "item", "tolist", "bincount"}
# modules whose calls have no other effect than their result, by the beginnings of where they are from
KNOWN = ("torch.nn.modules.", "fxplug.blocks.", "fxplug.lowerings.")


def is_table(node: fx.Node, root: nn.Module) -> bool:
    """Return whether a node calls the table of a pass's slots, which reads the number of samples of its argument."""
    return node.op == "call_module" and isinstance(root.get_submodule(str(node.target)), Table)


def is_of_shape(node: fx.Node) -> bool:
    """Return whether a node reads nothing but sizes, dtype and device of its arguments."""
    return node.target in OF_KIND or node.op == "call_method" and node.target in OF_SHAPE


def is_view_of_input(node: fx.Node, known: dict[fx.Node, bool]) -> bool:
    """Return whether a node is an input, or a member of an input that is a list or a dict; `known` has earlier answers."""
    member = node.target is operator.getitem and len(node.all_input_nodes) == 1
    return node.op == "placeholder" or member and "shape" not in node.args[0].meta and known[node.args[0]]  # type: ignore[index, union-attr]


def list_shape_reads(node: fx.Node, root: nn.Module) -> list[fx.Node]:
    """Return the arguments of a node of which it reads sizes, dtype and device alone, if they are inputs of the model."""
    if is_table(node, root):
        return node.all_input_nodes
    if node.target is ops.check_added:  # it compares the sizes of the first with those of others
        return [given for given in node.all_input_nodes if given is not node.args[0]]
    at = LIKE.get(functions.get_short_name(node.target), -1)
    found = node.args[at] if 0 <= at < len(node.args) else None
    return [found] if isinstance(found, fx.Node) and list(node.args).count(found) == 1 else []


def has_size_by_value(node: fx.Node) -> bool:
    """Return whether the sizes of a node's result depend on values of its arguments."""
    name = functions.get_short_name(node.target)
    if name == "where":
        return len(node.args) + len(node.kwargs) == 1
    if name == "repeat_interleave":
        repeats = node.kwargs.get("repeats", node.args[1] if len(node.args) > 1 else node)
        return isinstance(repeats, fx.Node)
    masks = node.target is operator.getitem and any(n.meta.get("dtype") == torch.bool for n in node.all_input_nodes[1:])
    return name in BY_VALUE or masks


def is_drawing(node: fx.Node, root: nn.Module) -> bool:
    """Return whether a node draws random numbers in evaluation.

    Attention and dropout that drop nothing do not, which their names alone do not say. Layers that draw in training are looked
    at when they are called.
    """
    if REGION in node.meta:
        return True
    if node.op == "call_module":
        return any(is_random_layer(layer, False) for layer in root.get_submodule(str(node.target)).modules())
    name = functions.get_short_name(node.target)
    if name not in functions.RANDOM:
        return False
    if name == "scaled_dot_product_attention":
        return bool(bind_attention(node)["dropout_p"] != 0)
    if "dropout" in name and name not in ("native_dropout", "feature_dropout"):
        training: Any = node.kwargs.get("training", node.kwargs.get("train", node.args[2] if len(node.args) > 2 else True))
        return training is not False
    return True


def find_obstacle(node: fx.Node, root: nn.Module, scopes: list[fx.Node]) -> str:
    """Return why a node is computed at every call, whatever it reads: what it does beside its result; "" if it does nothing."""
    if node.op in ("placeholder", "get_attr") or node.target in SWITCHES:
        return ""
    if node.op == "output":
        return "is the result"
    if is_drawing(node, root):
        return "draws random numbers"
    if ops.is_applied(node.target):
        return "runs custom code, which may have side effects"
    if node.op == "call_module":
        parts = root.get_submodule(str(node.target)).modules()
        odd = next((part for part in parts if not type(part).__module__.startswith(KNOWN)), None)
        return "" if odd is None else f"calls a {type(odd).__name__}, whose side effects are unknown"
    if node.target in (ops.check_state, ops.autograd_query, ops.any_gradients, ops.is_same):
        return "reads more of a tensor than its values"
    if any(scope.target is MODES[0] and scope.args[0] is not False for scope in scopes):
        return "is computed with gradients"
    quiet = functions.get_short_name(node.target) in functions.RANDOM
    if node.meta.get("effect") and not quiet and node.target not in HARMLESS and not find_written(node, root):
        return "has unknown side effects"
    return ""
