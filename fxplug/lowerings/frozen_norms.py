"""Batch norms of a frozen base keep their running statistics while the rest trains."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx

from ..core.errors import SpecError, did_you_mean
from ..core.ir.graph import copy_graph, erase_unused, insert, meta_of, replace, set_argument
from ..core.ir.traced_module import TracedModule, check_traced, shell
from ..core.spec.addresses import identifier
from ..core.torch_internals.modules import BatchNorm, InstanceNorm

# the argument that chooses the statistics: its position and its name
CALLS: dict[Any, tuple[int, str]] = {F.batch_norm: (5, "training"), F.instance_norm: (5, "use_input_stats")}
TRACKING = (BatchNorm, InstanceNorm)


def freeze_norms(gm: TracedModule, frozen: Callable[[str], bool] | Collection[str]) -> TracedModule:
    """A copy for training, on shared weights, whose frozen norms normalise with their running statistics in training too.

    `frozen` says which parameters are: a predicate on their names, or the names. A batch norm, or an instance norm that
    tracks statistics, is held when all its own parameters are frozen; one without any goes by those of the nearest module
    around it that has some. Held norms write no buffer. Evaluation is what it was, bit for bit; so is training of what is
    not frozen. Raises SpecError for a name that no parameter has.
    """
    check_traced(gm, "freeze_norms")
    names = [name for name, _ in gm.named_parameters(remove_duplicate=False)]
    if not callable(frozen):
        for name in sorted(set(frozen) - set(names)):
            raise SpecError(f"no parameter is called '{name}'{did_you_mean(name, names)}")
        frozen = set(frozen).__contains__
    held = _FrozenNorms(names, frozen)
    tree = shell(gm)
    graphs = {mode: copy_graph(graph) for mode, graph in gm.graphs.items()}
    for graph in graphs.values():
        counts = set()
        for node in list(graph.nodes):
            if node.op == "call_module":
                module = tree.get_submodule(str(node.target))
                if isinstance(module, TRACKING) and module.running_mean is not None and held.norm(str(node.target)):
                    _open(graph, node, module)
            elif node.target in CALLS and (path := _owner(node)) is not None and held.norm(path):
                set_argument(node, *CALLS[node.target], False)
                counts.add(f"{path}.num_batches_tracked")
        for node in [n for n in graph.nodes if n.target in ("add_", "copy_") and not n.users]:
            count = node.args[0]
            if isinstance(count, fx.Node) and count.target in counts:
                erase_unused([count, node])
        graph.lint()
    return gm.derived(tree, graphs)


class _FrozenNorms:
    """Which norms are frozen."""

    def __init__(self, names: list[str], frozen: Callable[[str], bool]) -> None:
        self.frozen = {name: bool(frozen(name)) for name in names}
        self.around: dict[str, bool] = {}  # whether everything at or below a path is frozen
        for name, is_frozen in self.frozen.items():
            parts = name.split(".")
            for n in range(len(parts)):
                path = ".".join(parts[:n])
                self.around[path] = self.around.get(path, True) and is_frozen

    def norm(self, path: str) -> bool:
        own = [self.frozen[n] for n in (f"{path}.weight", f"{path}.bias") if n in self.frozen]
        if own:
            return all(own)
        while path and path not in self.around:
            path = path.rpartition(".")[0]
        return self.around.get(path, True)


def _open(graph: fx.Graph, call: fx.Node, module: Any) -> None:
    """Put the function that a norm is in evaluation in the place of its call."""
    names = ("running_mean", "running_var", "weight", "bias")
    read = [_read(graph, call, f"{call.target}.{name}", getattr(module, name)) for name in names]
    function = F.batch_norm if isinstance(module, BatchNorm) else F.instance_norm
    x = call.args[0] if call.args else next(iter(call.kwargs.values()))
    args = (x, *read, False, 0.0, module.eps)
    name = f"{call.name}_{function.__name__}"
    replace(call, insert(graph, "call_function", function, args, before=call, name=name, meta=call.meta))


def _read(graph: fx.Graph, call: fx.Node, name: str, tensor: Tensor | None) -> fx.Node | None:
    if tensor is None:
        return None
    meta = {**meta_of(tensor), "nn_module_stack": call.meta.get("nn_module_stack")}
    return insert(graph, "get_attr", name, before=call, name=identifier(name), meta=meta)


def _owner(node: fx.Node) -> str | None:
    """The module whose running statistics a call of batch_norm reads."""
    mean = node.args[1] if len(node.args) > 1 else node.kwargs.get("running_mean")
    return str(mean.target).rpartition(".")[0] if isinstance(mean, fx.Node) and mean.op == "get_attr" else None
