"""Outlined regions as the units of FSDP2: frozen base and adapters in shards, gathered under their original names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...core.errors import SpecError
from ...core.ir.subgraphs import find_changed_input
from ...core.ir.traced_module import TracedModule
from ...core.quantised import describe_layer, is_quantised
from .submodules import CheckpointedRegion, check_outlined, get_originals


def shard(outlined: TracedModule, mesh: Any = None, **options: Any) -> TracedModule:
    """Shard an outlined module over the processes of a mesh, in place: FSDP2's fully_shard of each region, then of the rest.

    `mesh` is a one-dimensional DeviceMesh, None for all processes; `options` are those of fully_shard (Zhao et al. 2023, arXiv
    2304.11277). Set the trainable parameters before (`requires_grad_`); an optimizer takes the parameters that the module has
    afterwards. A region that shares a parameter with another, or changes its input in place, belongs to the rest.

    Raises SpecError for a module that is not outlined, without a process group, and for quantised weights that cannot be
    sharded.
    """
    from torch.distributed.fsdp import fully_shard

    check_outlined(outlined, "shard")
    if not torch.distributed.is_initialized():
        raise SpecError("sharding needs several processes: start with torchrun or accelerate launch")
    units = [outlined.get_submodule(path) for path in outlined.meta["regions"].values()]
    uses = Counter(id(p) for unit in units for p in unit.parameters())
    uses.update(_shared_parameters(outlined, units))
    for module in outlined.modules():
        if isinstance(module, TracedModule):
            module._compile()  # before fully_shard makes a class of its own, which would hide that the code is not written
    packed = next((describe_layer(m) for m in outlined.modules() if is_quantised(m)), None)
    try:
        for unit in units:
            if all(uses[id(p)] == 1 for p in unit.parameters()) and not _changes_input(unit):
                fully_shard(unit, mesh=mesh, **options)
        fully_shard(outlined, mesh=mesh, **options)
    except NotImplementedError as error:  # of torchao, for kinds of tensors that it has not made for this
        if packed is None:
            raise
        finding = f"weights are quantised ({packed}), and the library cannot cut these into shards"
        raise SpecError(f"{finding}: train without shard") from error
    return outlined


def full_state(outlined: TracedModule, trainable: bool = True) -> dict[str, Tensor]:
    """Return parameters of an outlined module, sharded or not, whole and under their names in the original module.

    `trainable` leaves out frozen parameters and buffers. Every process of the mesh must call it, and gets everything. Raises
    SpecError for a module that is not outlined.
    """
    check_outlined(outlined, "full_state")
    found = {}
    for name, tensor in get_originals(outlined).items():
        if not trainable or (isinstance(tensor, nn.Parameter) and tensor.requires_grad):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found[name] = whole.detach()
    return found


def _shared_parameters(outlined: TracedModule, units: Sequence[nn.Module]) -> set[int]:
    """Return the ids of the parameters that are outside the regions too."""
    found: set[int] = set()
    todo: list[nn.Module] = [outlined]
    while todo:
        module = todo.pop()
        found |= {id(p) for p in module._parameters.values()}
        todo += [child for child in module.children() if child not in units]
    return found


def _changes_input(unit: nn.Module) -> bool:
    region: Any = unit.region if isinstance(unit, CheckpointedRegion) else unit
    graphs = region.graphs.values()
    return any(find_changed_input(g.nodes, [n for n in g.nodes if n.op == "placeholder"], region) for g in graphs)
