"""A layer that a graph calls, with the low-rank update behind it: read, and replaced by one call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import fx, nn

from ...blocks.lora import Lora
from ...errors import SpecError
from ...ir import ops
from ...ir.traced_module import Graph, TracedModule, copy_graph, shell
from ...torch_internals.graphs import is_erased
from ...torch_internals.modules import is_hooked

WEIGHTS = ["down.weight", "up.weight"]


class Layer(NamedTuple):
    """A layer's call in a graph, and that of the `Lora` behind it if there is one that can be joined with it."""

    node: fx.Node
    module: Any
    lora: fx.Node | None
    block: Any


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
    module = called(tree, node, kinds)
    if module is None or len(node.args) != 1 or node.kwargs:
        return None
    user = next(iter(node.users), node)
    block = called(tree, user, (Lora,)) if len(node.users) == 1 else None
    fits = block is not None and not block.bias and not block.dropout and block.kind == type(module).__name__
    return Layer(node, module, *((user, block) if fits and _reads(user, node) else (None, None)))


def called(tree: nn.Module, node: fx.Node, kinds: tuple[type[nn.Module], ...]) -> Any:
    """The module that a node calls, if it is of one of these very classes and nobody looks on."""
    module = tree.get_submodule(str(node.target)) if node.op == "call_module" else None
    return module if module is not None and type(module) in kinds and not is_hooked(module) else None


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
