"""A layer of a graph, its weight and bias, and the blocks behind it: read, or why not, and replaced by one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import fx, nn

from ...blocks.base import CONVOLUTIONS
from ...blocks.lokr import Lokr
from ...blocks.lora import Lora
from ...blocks.lora_weight import Dora
from ...blocks.scale import Scale, Ssf
from ...core import quantised
from ...core.ir import ops
from ...core.ir.containers import find_tensor
from ...core.ir.graph import Graph, erase, get_meta, insert, replace
from ...core.torch_internals.modules import conv_forward, is_erased, is_hooked

LAYERS: dict[str, type[nn.Module]] = {"Linear": nn.Linear, **CONVOLUTIONS, "Embedding": nn.Embedding}
NORMS: dict[type[nn.Module], str] = {
    c: c.__name__ for c in (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
}
# what the functions behind layers are, and where their weight and bias stand
PRODUCTS: dict[Any, tuple[str, int, int]] = {
    F.linear: ("Linear", 1, 2),
    F.conv1d: ("Conv1d", 1, 2),
    F.conv2d: ("Conv2d", 1, 2),
    F.conv3d: ("Conv3d", 1, 2),
    F.embedding: ("Embedding", 1, -1),
    F.layer_norm: ("LayerNorm", 2, 3),
    F.group_norm: ("GroupNorm", 2, 3),
    F.batch_norm: ("BatchNorm", 3, 4),
    F.rms_norm: ("RMSNorm", 2, -1),
}
BEHIND = (Lora, Scale, Ssf)  # blocks that change a layer's result as other weights would


class Layer(NamedTuple):
    """A layer in a graph: a module that is called, or a product of the model's own code or of a layer that was opened.

    `kind` is that of torch.nn's layer ("Linear", "Conv2d", "LayerNorm", ...), "" where a module is of no known kind;
    `module` is None for a product. `weight` and `bias` are the names of a module's parameters, or the values in the graph that
    a product reads; None where there is none. `update` calls the `Lora` behind a module, or the `Dora` or `Lokr` that maps the
    weight of a product, and `block` is that block, where `list_linear` found one to join the layer with; `weight` is the one
    that it maps then.
    """

    node: fx.Node
    kind: str
    module: Any
    weight: Any
    bias: Any
    update: fx.Node | None = None
    block: Any = None

    @property
    def x(self) -> Any:
        """Input of the layer, before the edges of regions."""
        return find_inner(get_argument(self.node, 0, "input"))

    @property
    def weight_name(self) -> str | None:
        """Name of the parameter that is the weight; None for a value that is computed."""
        if isinstance(self.weight, fx.Node):
            return str(self.weight.target) if self.weight.op == "get_attr" else None
        return None if self.weight is None else str(self.weight)


def list_linear(graph: fx.Graph, tree: nn.Module) -> Iterator[Layer]:
    """Yield the calls of nn.Linear and of F.linear, each with the update to join it with; the graph may change meanwhile."""
    for node in list(graph.nodes):
        layer = None if is_erased(node) else get_layer(tree, node)
        if layer is not None and layer.kind == "Linear" and layer.module is None:
            yield find_mapping(tree, layer)
        elif layer is not None and _is_plain(tree, node):
            yield find_lora(tree, layer)


def _is_plain(tree: nn.Module, node: fx.Node) -> bool:
    """Return whether a node calls an nn.Linear with its input alone, which has parameters for a weight and a bias."""
    module = get_called(tree, node, nn.Linear)
    if module is None or len(node.args) != 1 or node.kwargs:
        return False
    return all(getattr(module, name) is module._parameters.get(name) for name in ("weight", "bias"))


def find_lora(tree: nn.Module, layer: Layer) -> Layer:
    """Return the nn.Linear with the `Lora` behind it that can be joined with it, if there is one."""
    found = next(list_blocks(tree, layer.node), None)
    if found is None:
        return layer
    user, block = found
    if list(layer.node.users) != [user] or get_called(tree, user, Lora) is None or block.bias or block.dropout:
        return layer
    return layer if explain_misfit(block, user, layer.kind, layer.x) else layer._replace(update=user, block=block)


def find_mapping(tree: nn.Module, layer: Layer) -> Layer:
    """Return the call of F.linear with the `Dora` or `Lokr` that maps its weight, if nothing else reads what that gives."""
    mapping = layer.weight
    if not isinstance(mapping, fx.Node) or len(mapping.users) != 1 or len(mapping.args) != 1 or mapping.kwargs:
        return layer
    block = get_called(tree, mapping, Dora) or get_called(tree, mapping, Lokr)
    if block is None or block.slots or len(block.shape) != 2 or getattr(mapping.args[0], "op", "") != "get_attr":
        return layer
    if isinstance(block, Dora) and (block.dim or block.transposed):
        return layer
    return layer._replace(weight=mapping.args[0], update=mapping, block=block)


def get_layer(tree: nn.Module, node: fx.Node) -> Layer | None:
    """Return the layer of a node, or the module of no known kind that it calls; None for another node."""
    if node.op == "call_module":
        module = tree.get_submodule(str(node.target))
        weight, bias = (f"{node.target}.{n}" if module._parameters.get(n) is not None else None for n in ("weight", "bias"))
        return Layer(node, _kind(module), module, weight, bias)
    if node.op != "call_function" or node.target not in PRODUCTS:
        return None
    kind, weight_at, bias_at = PRODUCTS[node.target]
    weight, bias = get_argument(node, weight_at, "weight"), get_argument(node, bias_at, "bias") if bias_at > 0 else None
    packed = getattr(weight, "op", "") == "get_attr" and quantised.is_packed(find_tensor(tree, str(weight.target)))
    return None if packed else Layer(node, kind, None, weight, bias)


def _kind(module: nn.Module) -> str:
    """Return the kind of a layer of torch.nn that has the forward of its class there, and for a norm a weight; "" for others,
    and for quantised ones.
    """
    if quantised.is_quantised(module):
        return ""
    kind = next((k for k, c in LAYERS.items() if isinstance(module, c) and type(module).forward is c.forward), "")
    if kind in CONVOLUTIONS and conv_forward(type(module)) is not conv_forward(CONVOLUTIONS[kind]):
        kind = ""
    return kind or (NORMS.get(type(module), "") if module._parameters.get("weight") is not None else "")


def get_called(tree: nn.Module, node: fx.Node, kind: type[nn.Module]) -> Any:
    """Return the module that a node calls, if it is exactly of this class, without hooks, and not quantised."""
    module = tree.get_submodule(str(node.target)) if node.op == "call_module" else None
    if module is None or type(module) is not kind or is_hooked(module) or quantised.is_quantised(module):
        return None
    return module


def explain_misfit(lora: Lora, node: fx.Node, kind: str, x: Any) -> str | None:
    """Return why a `Lora` that a node calls does not belong to a layer of this kind that reads x, or None."""
    if lora.kind != kind:
        return f"it was made for {lora.kind} and is at {kind}"
    own = find_inner(get_argument(node, 0, "x"))
    if own is not x:
        return f"it reads '{getattr(own, 'name', own)}', and the layer reads '{getattr(x, 'name', x)}'"
    return None


# --- walking through a graph


def get_argument(node: fx.Node, index: int, name: str) -> Any:
    """Return an argument of a node by its position or its name, None if it is missing."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name)


def find_inner(value: Any) -> Any:
    """Return a value before the edges of regions that it crosses."""
    while isinstance(value, fx.Node) and value.target is ops.edge:
        value = value.args[0]
    return value


def list_readers(node: fx.Node) -> list[fx.Node]:
    """Return the users of a value, including those after the edges of regions."""
    found: dict[fx.Node, None] = {}
    for user in node.users:
        found.update(dict.fromkeys(list_readers(user)) if user.target is ops.edge else {user: None})
    return list(found)


def list_blocks(tree: nn.Module, value: fx.Node) -> Iterator[tuple[fx.Node, Any]]:
    """Yield the blocks that change a layer's result, in order: each is the only reader of the value before it."""
    while len(found := list_readers(value)) == 1 and found[0].op == "call_module":
        block = tree.get_submodule(str(found[0].target))
        if not isinstance(block, BEHIND) or find_inner(find_result(found[0], block)) is not value:
            return
        value = found[0]
        yield value, block


def find_result(node: fx.Node, block: nn.Module) -> Any:
    """Return the layer's result among the arguments of a block after it."""
    return get_argument(node, 1, "y") if isinstance(block, Lora) else get_argument(node, 0, "y")


# --- editing a graph


def call_instead(graph: Graph, tree: nn.Module, layer: Layer, function: Any, names: Sequence[str], *rest: Any) -> None:
    """Replace a layer, and its update, by a call of `function`.

    It gets the input, weight and bias, then the tensors of the layer's block with these names, None for one that it does not
    have, then `rest`.
    """
    old, other = layer.node, layer.update
    if other is not None and layer.module is not None:  # the `Lora` comes last
        old, other = other, old
    around = {"nn_module_stack": layer.node.meta["nn_module_stack"]}

    def read(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        tensor = find_tensor(tree, value)
        return None if tensor is None else insert(graph, "get_attr", value, before=old, meta={**get_meta(tensor), **around})

    own = [f"{layer.update.target}.{name}" for name in names] if layer.update is not None else []
    given = [get_argument(layer.node, 0, "input"), *map(read, (layer.weight, layer.bias, *own)), *rest]
    replace(old, insert(graph, "call_function", function, tuple(given), before=old, meta={**old.meta, **around}))
    erase([] if other is None else [other])
