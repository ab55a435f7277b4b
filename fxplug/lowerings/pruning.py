"""Prune: what no graph uses any more, because a pass has replaced or cut it off, goes from the module."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ..core.ir.bound_inputs import HOME
from ..core.ir.graph import copy_graph
from ..core.ir.traced_module import TracedModule, strip_to_container
from ..core.ir.variants import Variants
from ..core.locks import with_read_lock
from .merging.fold import check_unlowered


@with_read_lock
def prune(gm: TracedModule) -> TracedModule:
    """Remove the submodules, parameters and buffers that no node of any graph uses; `gm` is unchanged.

    Artifacts of it are as much smaller, and a `state_dict` of the model fits it with `strict=False` only. What passes have put
    in stays, and so do the names of tied weights. Variants stay; further ones, which would trace the whole model, are refused.

    Args:
        gm: The traced module.

    Returns:
        The module on the weights that are left.

    Raises:
        SpecError: `gm` is no traced module, or is lowered already.
    """
    check_unlowered(gm, "prune")
    every = gm.modules_by_form
    tree = strip_to_container(gm)
    own = {entry["name"] for entry in gm.meta.get("passes", [])} | {HOME}
    kept: set[int] = set()  # modules
    used: set[int] = set()  # tensors
    for module in (m for name, child in tree.named_children() if name in own for m in child.modules()):
        kept.add(id(module))
        used.update(map(id, _tensors(module)))
    for node in (node for one in every for graph in one.graphs.values() for node in graph.nodes):
        for path, _ in (node.meta.get("nn_module_stack") or {}).values():
            kept.update(map(id, _modules_on_path(tree, path)))
        owner, _, name = str(node.target).rpartition(".")
        if node.op == "get_attr":
            home = tree.get_submodule(owner)
            kept.update(map(id, _modules_on_path(tree, owner)))
            used.update(id(table[name]) for table in (home._parameters, home._buffers) if name in table)
        elif node.op == "call_module":
            kept.update(map(id, _modules_on_path(tree, str(node.target))))
            for module in tree.get_submodule(str(node.target)).modules():
                kept.add(id(module))
                used.update(map(id, _tensors(module)))
    for module in list(tree.modules()):
        for table in (module._parameters, module._buffers):
            for name in [name for name, tensor in table.items() if tensor is not None and id(tensor) not in used]:
                del table[name]
                module._non_persistent_buffers_set.discard(name)
        for name in [name for name, child in module._modules.items() if child is not None and not _holds(child, kept, used)]:
            del module._modules[name]
    graphs = [{mode: copy_graph(graph) for mode, graph in one.graphs.items()} for one in every]
    new = gm.derived(tree, graphs[0])
    if isinstance(new, Variants):
        new.keep_only([(made, one.twin_error) for made, one in zip(graphs[1:], every[1:], strict=True)])
    return new


def _tensors(module: nn.Module) -> Iterator[object]:
    yield from (tensor for table in (module._parameters, module._buffers) for tensor in table.values() if tensor is not None)


def _modules_on_path(tree: nn.Module, path: str) -> Iterator[nn.Module]:
    """Yield the modules from the first to the last of a path, as far as they exist."""
    for name in path.partition("@")[0].split(".") if path else ():
        if (child := tree._modules.get(name)) is None:
            return
        tree = child
        yield tree


def _holds(module: nn.Module, kept: set[int], used: set[int]) -> bool:
    return any(id(m) in kept or any(id(tensor) in used for tensor in _tensors(m)) for m in module.modules())
