"""Outlined regions as the units of FSDP2: frozen base and adapters in shards, gathered under their original names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .cutting import changed_input
from .errors import SpecError
from .module import TracedModule
from .outlining import Checkpointed, originals


def shard(outlined: TracedModule, mesh: Any = None, **options: Any) -> TracedModule:
    """Shard an outlined module over the processes of a mesh, in place: FSDP2's fully_shard of each region, then of the rest.

    `mesh` is a one-dimensional DeviceMesh, None for all processes; `options` go to fully_shard (Zhao et al. 2023, arXiv
    2304.11277). Which parameters train must be said before (`requires_grad_`); an optimizer takes the parameters that the
    module has afterwards. A region that shares a parameter with another, or changes its input in place, belongs to the rest.

    Raises SpecError for a module that is not outlined, and without a process group.
    """
    from torch.distributed.fsdp import fully_shard

    if not isinstance(outlined, TracedModule) or "regions" not in outlined.meta:
        raise SpecError("shard takes an outlined module: outline(module) makes one")
    if not torch.distributed.is_initialized():
        raise SpecError("sharding needs several processes: start with torchrun or accelerate launch")
    units = {path: outlined.get_submodule(path) for path in outlined.meta["regions"].values()}
    uses = Counter(id(p) for unit in units.values() for p in unit.parameters())
    uses.update(_used_by_rest(outlined, units))
    for unit in units.values():
        if all(uses[id(p)] == 1 for p in unit.parameters()) and not _changes_input(unit):
            fully_shard(unit, mesh=mesh, **options)
    fully_shard(outlined, mesh=mesh, **options)
    return outlined


def full_state(outlined: TracedModule, trainable: bool = True) -> dict[str, Tensor]:
    """Parameters of an outlined module, sharded or not, whole and under the names they have in the module it was made from.

    `trainable` leaves out frozen parameters and buffers. Every process of the mesh must call it, and gets everything.
    """
    found = {}
    for name, tensor in originals(outlined).items():
        if not trainable or (isinstance(tensor, nn.Parameter) and tensor.requires_grad):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found[name] = whole.detach()
    return found


def _used_by_rest(outlined: TracedModule, units: Mapping[str, nn.Module]) -> set[int]:
    """The ids of the parameters that stand or are used outside the regions."""
    inside = {id(module) for unit in units.values() for module in unit.modules()}
    found = {id(p) for module in outlined.modules() if id(module) not in inside for p in module._parameters.values()}
    for node in (node for graph in outlined.graphs.values() for node in graph.nodes):
        if node.op == "call_module" and node.target not in units:
            found |= {id(p) for p in outlined.get_submodule(str(node.target)).parameters()}
    return found


def _changes_input(unit: nn.Module) -> bool:
    region: Any = unit.region if isinstance(unit, Checkpointed) else unit
    graphs = region.graphs.values()
    return any(changed_input(g.nodes, [n for n in g.nodes if n.op == "placeholder"], region) for g in graphs)
