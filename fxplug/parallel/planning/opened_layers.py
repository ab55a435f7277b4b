"""Layers whose own code comes into a graph, so that their weights are values of it like others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable

from torch import fx, nn

from ...core.errors import SpecError, TraceError
from ...core.ir.graph import Graph, copy_graph, erase, get_meta, replace
from ...core.ir.traced_module import TracedModule, strip_to_container
from ...core.quantised import is_quantised
from ...core.rewriter.graft import Graft, Traces
from ...core.torch_internals.modules import is_hooked
from ..runtime.collectives import Collective

DEPTH = 4  # layers in layers, as a low-rank update has them


def open_layers(
    gm: TracedModule, paths: Iterable[str] | None = None, modes: Iterable[bool] | None = None, traces: Traces | None = None
) -> TracedModule:
    """Return the module with the layers at these paths, None for all, opened: their code is inlined, each node with their path
    in its meta.

    It has the graphs of these `modes`, None for all. Layers that cannot be traced stay closed. Weights are shared, and so are
    `traces` among calls.
    """
    wanted = None if paths is None else set(paths)
    tree, traces = strip_to_container(gm), traces or Traces()
    graphs = {}
    for mode in gm.graphs if modes is None else modes:
        graphs[mode] = copy_graph(gm.graphs[mode])
        _open_all(graphs[mode], tree, traces, mode, lambda path: wanted is None or path in wanted)
        graphs[mode].lint()
    return gm.derived(tree, graphs)


def _open_all(graph: Graph, tree: nn.Module, traces: Traces, mode: bool, wanted: Callable[[str], bool]) -> None:
    todo = [(node, str(node.target), 0) for node in graph.nodes if node.op == "call_module" and wanted(str(node.target))]
    while todo:
        node, path, depth = todo.pop()
        module = tree.get_submodule(str(node.target))
        if isinstance(module, Collective) or depth > DEPTH or next(module.parameters(), None) is None:
            continue
        inner = _open(graph, tree, node, module, traces, mode)
        for one in inner:
            one.meta["opened"] = path
        todo += [(one, path, depth + 1) for one in inner if one.op == "call_module"]


def _open(graph: Graph, tree: nn.Module, node: fx.Node, module: nn.Module, traces: Traces, mode: bool) -> list[fx.Node]:
    """Replace the call of a layer by its code, and return its nodes; none if that is impossible."""
    if is_hooked(module) or is_quantised(module):
        return []
    try:
        sub = traces.of(module, list(node.args), dict(node.kwargs), f"'{node.target}', opened,")
        inputs = inspect.signature(module.forward).bind(*node.args, **node.kwargs)
    except (TraceError, SpecError, TypeError):
        return []
    if module.training != tree.training and len(sub.graphs) > 1:
        return []  # opened code runs in the model's mode
    known = {name for name, _ in module.named_buffers()}
    if any(name not in known for name, _ in sub.named_buffers()):  # constants of its code
        return []
    inputs.apply_defaults()
    path, made_by = str(node.target), node.meta.get("pass", {})
    graft = Graft(graph, path, path, node.meta["nn_module_stack"], made_by, after=node)
    result = graft.put(sub.graphs.get(mode) or sub.graph, inputs.arguments)
    if not isinstance(result, fx.Node):
        erase(graft.nodes)
        return []
    for one in graft.nodes:
        if not made_by:
            one.meta.pop("pass", None)
        one.meta.pop("port", None)
    result.meta.update(get_meta(node))
    replace(node, result)
    return graft.nodes
