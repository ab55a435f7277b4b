"""The fuse lowering: linear layers, each with its low-rank update, as one product in a training step."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import fx, nn

from . import ops, products
from .blocks import Lora
from .errors import SpecError
from .module import Graph, TracedModule, copy_graph, shell


def fuse(gm: TracedModule) -> TracedModule:
    """The same module whose linear layers, and `Lora`s behind them, are the functions of `products`: faster steps.

    Graph and module tree are copied, parameters are shared, so what it trains is trained in `gm`: save and export that one.
    Results and gradients are those of `gm` but for rounding. Second derivatives of the layers are not there. A layer with a
    hook, of a derived class, or a `Lora` with dropout, a bias, or behind another block, stays as it is.
    Raises SpecError for what is no traced module.
    """
    if not isinstance(gm, TracedModule):
        raise SpecError(f"fuse takes a traced module, not {type(gm).__name__}: fxplug.trace(model, inputs) makes one")
    tree = shell(gm)
    graphs = {mode: copy_graph(graph) for mode, graph in gm.graphs.items()}
    for graph in graphs.values():
        for node in list(graph.nodes):
            if not node._erased:
                _fuse(graph, tree, node)
        graph.lint()
    new = TracedModule(tree, graphs, gm._origin, gm._extras)
    new.twin_error, new.meta = gm.twin_error, dict(gm.meta)
    return new


def _fuse(graph: Graph, tree: nn.Module, node: fx.Node) -> None:
    if node.op == "call_function" and node.target is F.linear:
        node.target = products.linear
        return
    layer = _called(tree, node, nn.Linear)
    if layer is None or len(node.args) != 1 or node.kwargs:
        return
    user = next(iter(node.users), node)
    lora = _called(tree, user, Lora) if len(node.users) == 1 else None
    if lora is not None and lora.kind == "Linear" and not lora.bias and not lora.dropout and _reads(user, node):
        _replace(graph, tree, user, node, products.lora_linear, ["down.weight", "up.weight", "scale"])
        graph.erase_node(node)
    else:
        _replace(graph, tree, node, node, products.linear, [])


def _called(tree: nn.Module, node: fx.Node, kind: type[nn.Module]) -> Any:
    """The module that a node calls, if it is of this very class and nobody looks on."""
    module = tree.get_submodule(str(node.target)) if node.op == "call_module" else None
    if type(module) is not kind:
        return None
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return None if any(hooks) else module


def _reads(lora: fx.Node, layer: fx.Node) -> bool:
    """Whether a Lora's x and y are what the layer gets and gives."""
    values = [_inside(value) for value in (*lora.args, layer.args[0])]
    return len(values) == 3 and values[0] is values[2] and values[1] is layer


def _inside(value: Any) -> Any:
    """A value before the edges of regions that it crosses."""
    while isinstance(value, fx.Node) and value.target is ops.edge:
        value = value.args[0]
    return value


def _replace(graph: Graph, tree: nn.Module, old: fx.Node, layer: fx.Node, function: Any, more: list[str]) -> None:
    """A call of `function` in the place of `old`, with the weights of what `layer` calls and `more` of what `old` calls."""
    stack = layer.meta["nn_module_stack"]
    weights: list[fx.Node | None] = []
    with graph.inserting_before(old):
        for name in [f"{layer.target}.weight", f"{layer.target}.bias", *(f"{old.target}.{key}" for key in more)]:
            owner, _, key = name.rpartition(".")
            tensor = getattr(tree.get_submodule(owner), key)
            read = None if tensor is None else graph.create_node("get_attr", name)
            if read is not None:
                read.meta.update(nn_module_stack=stack, shape=tuple(tensor.shape), dtype=tensor.dtype)
            weights.append(read)
        new = graph.call_function(function, (layer.args[0], *weights))
    new.meta.update({**old.meta, "nn_module_stack": stack})
    old.replace_all_uses_with(new)
    graph.erase_node(old)
