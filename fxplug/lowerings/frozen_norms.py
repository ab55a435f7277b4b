"""Batch norms of a frozen base keep their running statistics while the rest trains."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..core.errors import SpecError, did_you_mean
from ..core.ir.graph import copy_graph, erase_unused, get_meta, insert, replace, set_argument
from ..core.ir.traced_module import TracedModule, check_traced, strip_to_container
from ..core.spec.addresses import make_identifier
from ..core.torch_internals.modules import BatchNorm, InstanceNorm
from ..core.torch_internals.tensors import version

# the argument that chooses the statistics: its position and its name
CALLS: dict[Any, tuple[int, str]] = {F.batch_norm: (5, "training"), F.instance_norm: (5, "use_input_stats")}
TRACKING = (BatchNorm, InstanceNorm)


def freeze_norms(gm: TracedModule, frozen: Callable[[str], bool] | Collection[str]) -> TracedModule:
    """Return a copy for training, on shared weights, whose frozen norms normalise with their running statistics in training
    too.

    `frozen` says which parameters are frozen: a predicate on their names, or the names. A batch norm, or an instance norm that
    tracks statistics, is frozen when all its own parameters are. For one without parameters, a predicate is called with the
    name of the weight that it would have; a nonempty list of names freezes it. Frozen norms write no buffer. Evaluation is
    unchanged, bit for bit; so is training of what is not frozen. Raises SpecError for a name that no parameter has.
    """
    check_traced(gm, "freeze_norms")
    names = [name for name, _ in gm.named_parameters(remove_duplicate=False)]
    if not callable(frozen):
        for name in sorted(set(frozen) - set(names)):
            raise SpecError(f"no parameter is called '{name}'{did_you_mean(name, names)}")
        frozen, known = set(frozen), set(names)
        held = FrozenParts(names, lambda name: name in frozen if name in known else bool(frozen))
    else:
        held = FrozenParts(names, frozen)
    tree = strip_to_container(gm)
    graphs = {mode: copy_graph(graph) for mode, graph in gm.graphs.items()}
    for graph in graphs.values():
        counts = set()
        for node in list(graph.nodes):
            if node.op == "call_module":
                module = tree.get_submodule(str(node.target))
                if isinstance(module, TRACKING) and module.running_mean is not None and held.is_frozen(str(node.target)):
                    _open(graph, node, module)
            elif node.target in CALLS and (path := _owner(node)) is not None and held.is_frozen(path):
                set_argument(node, *CALLS[node.target], False)
                counts.add(_joined(path, "num_batches_tracked"))
        for node in [n for n in graph.nodes if n.target in ("add_", "copy_") and not n.users]:
            count = node.args[0]
            if isinstance(count, fx.Node) and count.target in counts:
                erase_unused([count, node])
        graph.lint()
    return gm.derived(tree, graphs)


class FrozenParts:
    """Which modules are frozen, by a predicate on the names of parameters; `names` are those that there are."""

    def __init__(self, names: Iterable[str], frozen: Callable[[str], bool]) -> None:
        self.frozen = frozen
        self.own: dict[str, list[str]] = {}
        for name in names:
            # what a parametrization holds is a parameter of the module whose weight it makes
            self.own.setdefault(_owner_of(name), []).append(name)

    def is_frozen(self, path: str) -> bool:
        """Return whether none of a module's own parameters trains; for one without any, check the weight that it would have."""
        path = _owner_of(_joined(path, "weight"))
        return all(map(self.frozen, self.own.get(path) or [_joined(path, "weight")]))


class HeldBuffers:
    """Buffers that a step leaves as they were, where it has written them: what spectral norm estimates, counters.

    `values` are what they hold now, by their names.
    """

    def __init__(self, buffers: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        self.buffers, self.values = list(buffers.values()), [values[name] for name in buffers]
        self.versions = list(map(version, self.buffers))

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Undo writes to the buffers inside the context; earlier writes are kept as the new values."""
        for index in self._written():
            self.values[index] = self.buffers[index].detach().clone()
        try:
            yield
        finally:
            with torch.no_grad():
                for index in self._written():
                    self.buffers[index].copy_(self.values[index])
            self._written()

    def _written(self) -> list[int]:
        """Return the indices of the buffers that were written in place since the last call, by their version counters."""
        before, self.versions = self.versions, list(map(version, self.buffers))
        return [index for index, (then, now) in enumerate(zip(before, self.versions, strict=True)) if then != now]


def find_frozen_buffers(gm: TracedModule, frozen: Callable[[str], bool]) -> dict[str, Tensor]:
    """Return the buffers of the modules that are frozen by a predicate on names of parameters."""
    parts = FrozenParts((name for name, _ in gm.named_parameters(remove_duplicate=False)), frozen)
    return {name: buffer for name, buffer in gm.named_buffers() if parts.is_frozen(_owner_of(name))}


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _owner_of(name: str) -> str:
    """Return the path of the module that owns a parameter or buffer."""
    path = name.rpartition(".")[0]
    whole, found, _ = f".{path}.".partition(".parametrizations.")
    return whole.strip(".") if found else path


def _open(graph: fx.Graph, call: fx.Node, module: Any) -> None:
    """Replace the call of a norm by the function that it computes in evaluation."""
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
    meta = {**get_meta(tensor), "nn_module_stack": call.meta.get("nn_module_stack")}
    return insert(graph, "get_attr", name, before=call, name=make_identifier(name), meta=meta)


def _owner(node: fx.Node) -> str | None:
    """Return the path of the module whose running statistics a call of batch_norm reads."""
    mean = node.args[1] if len(node.args) > 1 else node.kwargs.get("running_mean")
    return str(mean.target).rpartition(".")[0] if isinstance(mean, fx.Node) and mean.op == "get_attr" else None
