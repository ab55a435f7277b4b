"""The fuse lowering: linear layers, each with its low-rank update or its bank of them, as one product."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx, nn

from ...blocks.loha import Loha
from ...blocks.lokr import Lokr
from ...blocks.lora import Lora
from ...errors import SpecError
from ...ir import ops
from ...ir.traced_module import Graph, TracedModule, copy_graph, shell
from ...torch_internals.graphs import is_erased
from ...torch_internals.modules import is_hooked
from . import forms, operators


class Layer(NamedTuple):
    """A layer's call in a graph, and that of the `Lora` behind it if there is one that can be joined with it."""

    node: fx.Node
    module: Any
    lora: fx.Node | None
    block: Any


def fuse(gm: TracedModule, how: str = "auto") -> TracedModule:
    """The same module whose linear layers, and `Lora`s behind them, are the functions of `products`: faster steps and calls.

    Graph and module tree are copied, parameters are shared, so what it trains is trained in `gm`: save and export that one.
    Results and gradients are those of `gm` but for rounding. Second derivatives of the layers are not there. A layer with a
    hook, of a derived class, or a `Lora` with dropout, a bias, or behind another block, stays as it is. `how` is a form of
    `forms.FORMS` for all layers, or `auto`: for each the one that was measured fastest (`tuning.tune`) for the rows of the
    trace, else `fused`. With a kernel as form, `Loha` and `Lokr` make their weights by kernels too. `meta["forms"]` says which
    form each layer with an update has. Raises SpecError for what is no traced module, and an unknown form.
    """
    check_traced(gm, "fuse")
    forms.check(how)
    return lowered(gm, lambda graph, tree: _fuse(graph, tree, how))


def _fuse(graph: Graph, tree: nn.Module, how: str) -> dict[str, str]:
    chosen = {}
    for node in list(graph.nodes):
        if is_erased(node):
            continue
        if node.op == "call_function" and node.target is F.linear:
            node.target = operators.linear
        layer = layer_at(tree, node, (nn.Linear,))
        if layer is None:
            path = _fuse_weight(graph, tree, node, how) if how in forms.KERNELS else None
            if path is not None:
                chosen[path] = how
        elif layer.lora is None:
            replace(graph, tree, node, node, operators.linear, [])
        else:
            chosen[str(node.target)] = _fuse_layer(graph, tree, layer, how)
    return chosen


def _fuse_layer(graph: Graph, tree: nn.Module, layer: Layer, form: str) -> str:
    lora, block, device = layer.lora, layer.block, layer.module.weight.device
    assert lora is not None
    if form == "auto":
        form = forms.choose(device, forms.case_of(layer.module, block, forms.rows_of(layer.node)))
    form = forms.available(form, device)
    if form == "remerge":
        remerge_linear(graph, tree, layer)
    elif form != "stock":
        function, last = forms.function(form, bool(block.slots))
        if block.slots:
            last = (lora.args[2], block.slots, block.batch_dim, *last)
        replace(graph, tree, lora, layer.node, function, WEIGHTS if block.slots else [*WEIGHTS, "scale"], *last)
        graph.erase_node(layer.node)
    return form


def _fuse_weight(graph: Graph, tree: nn.Module, node: fx.Node, form: str) -> str | None:
    """Put a kernel in the place of a block that makes a weight; the path of its layer, or None where that cannot be."""
    block = _called(tree, node, (Loha, Lokr))
    value = node.args[0] if block is not None else None
    cores = block is not None and (block.cores if isinstance(block, Loha) else block.core)
    if not isinstance(value, fx.Node) or value.op != "get_attr" or cores:
        return None
    device = next(iter(block.parameters())).device
    if forms.available(form, device) not in forms.KERNELS:
        return None
    with graph.inserting_before(node):

        def read(name: str) -> fx.Node:
            return graph.create_node("get_attr", f"{node.target}.{name}")

        def factor(name: str, split: bool) -> fx.Node:
            return graph.call_function(torch.matmul, (read(f"{name}_a"), read(f"{name}_b"))) if split else read(name)

        gates = node.args[1] if block.slots else read("scale")
        if isinstance(block, Loha):
            parts = [read(name) for name in ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")]
            new = graph.call_function(operators.loha_weight, (value, *parts, gates))
        else:
            parts = [factor("lokr_w1", block.split_1), factor("lokr_w2", block.split_2)]
            new = graph.call_function(operators.lokr_weight, (value, *parts, gates))
    for made in [new, *new.all_input_nodes, *(n for part in new.all_input_nodes for n in part.all_input_nodes)]:
        made.meta.setdefault("nn_module_stack", node.meta.get("nn_module_stack", {}))
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return str(value.target).rpartition(".")[0]


def remerge_linear(graph: Graph, tree: nn.Module, layer: Layer) -> None:
    """Put `products.remerged_linear` in the place of a linear layer and its `Lora`."""
    lora, block = layer.lora, layer.block
    assert lora is not None
    if block.slots:
        replace(graph, tree, lora, layer.node, operators.remerged_linear, WEIGHTS, uniform(graph, lora))
    else:
        replace(graph, tree, lora, layer.node, operators.remerged_linear, [*WEIGHTS, "scale"])
    graph.erase_node(layer.node)


# --- what lowerings of layers have in common

WEIGHTS = ["down.weight", "up.weight"]


def check_traced(gm: Any, what: str) -> None:
    """Raises SpecError unless `gm` is a traced module."""
    if not isinstance(gm, TracedModule):
        raise SpecError(f"{what} takes a traced module, not {type(gm).__name__}: fxplug.trace(model, inputs) makes one")


def lowered(gm: TracedModule, change: Any) -> TracedModule:
    """A copy of `gm` on shared parameters, after `change(graph, tree)` of each graph, which gives {layer: form}."""
    tree = shell(gm)
    graphs = {mode: copy_graph(graph) for mode, graph in gm.graphs.items()}
    chosen = dict(gm.meta.get("forms", {}))
    for graph in graphs.values():
        chosen.update(change(graph, tree))
        graph.lint()
    return gm.derived(tree, graphs, **({"forms": chosen} if chosen else {}))


def layers(graph: Graph, tree: nn.Module, kinds: tuple[type[nn.Module], ...]) -> Iterator[Layer]:
    """The layers of these classes that a graph calls; the graph may change meanwhile."""
    for node in list(graph.nodes):
        found = None if is_erased(node) else layer_at(tree, node, kinds)
        if found is not None:
            yield found


def layer_at(tree: nn.Module, node: fx.Node, kinds: tuple[type[nn.Module], ...]) -> Layer | None:
    """What a node calls, if it is a layer of one of these very classes; None for another node."""
    module = _called(tree, node, kinds)
    if module is None or len(node.args) != 1 or node.kwargs:
        return None
    user = next(iter(node.users), node)
    block = _called(tree, user, (Lora,)) if len(node.users) == 1 else None
    fits = block is not None and not block.bias and not block.dropout and block.kind == type(module).__name__
    return Layer(node, module, *((user, block) if fits and _reads(user, node) else (None, None)))


def _called(tree: nn.Module, node: fx.Node, kinds: tuple[type[nn.Module], ...]) -> Any:
    """The module that a node calls, if it is of one of these very classes and nobody looks on."""
    module = tree.get_submodule(str(node.target)) if node.op == "call_module" else None
    if module is None or type(module) not in kinds:
        return None
    return None if is_hooked(module) else module


def _reads(lora: fx.Node, layer: fx.Node) -> bool:
    """Whether a Lora's x and y are what the layer gets and gives."""
    values = [inside(value) for value in (*lora.args[:2], layer.args[0])]
    return len(values) == 3 and values[0] is values[2] and values[1] is layer


def inside(value: Any) -> Any:
    """A value before the edges of regions that it crosses."""
    while isinstance(value, fx.Node) and value.target is ops.edge:
        value = value.args[0]
    return value


def uniform(graph: Graph, lora: fx.Node) -> fx.Node:
    """The node of what all samples take, (slots,), of the gates whose rows a `Lora` reads."""
    rows = inside(lora.args[2])
    with graph.inserting_after(rows):
        node = graph.call_function(rows.target, (rows.args[0], 1))
    node.meta.update({k: v for k, v in rows.meta.items() if k not in ("shape", "dtype")})
    return node


def replace(
    graph: Graph, tree: nn.Module, old: fx.Node, layer: fx.Node, function: Any, more: list[str], *rest: Any
) -> fx.Node:
    """A call of `function` in the place of `old`, with the weights of what `layer` calls, `more` of what `old` calls."""
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
        new = graph.call_function(function, (layer.args[0], *weights, *rest))
    new.meta.update({**old.meta, "nn_module_stack": stack})
    old.replace_all_uses_with(new)
    graph.erase_node(old)
    return new
