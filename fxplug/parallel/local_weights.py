"""Weights of which each process keeps only its part, and the whole of them again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from ..blocks.base import Block
from ..core.errors import SpecError
from ..core.ir.traced_module import TracedModule
from .runtime.checksums import PARTS
from .runtime.collectives import Collective, Gather
from .runtime.mesh import find_position
from .runtime.shares import Part


def localize(gm: TracedModule, mesh: DeviceMesh | None = None) -> TracedModule:
    """Let this process keep only its parts of the weights that a tensor-parallel module splits, in place; return `gm`.

    `parallelize` does it if there are processes; call it for a module that was loaded. `mesh` is as for `parallelize`. Tensors
    of adapters in blocks stay whole: they are small, and are written while the model runs. So does a weight that another place
    of the graph reads whole. Parts are new tensors, so that the whole weights are freed with the last module that uses them; an
    optimizer takes the parameters that the module has afterwards. `save` refuses a module with parts.

    Args:
        gm: The parallel module.
        mesh: The mesh, as `parallelize` takes it.

    Returns:
        `gm`.

    Raises:
        SpecError: The module is not parallel, or the mesh or number of processes does not fit.
    """
    collectives = [module for module in gm.modules() if isinstance(module, Collective)] if isinstance(gm, nn.Module) else []
    if not collectives:
        raise SpecError("localize takes a parallel module: fxplug.parallelize(gm, plan) makes one")
    world = find_position(collectives[0].ways, mesh)
    for module in collectives:
        module.world = world
    kept = list(gm.meta.get(PARTS, []))
    for name, (part, sizes) in _parts(gm).items():
        owner, key = _owner(gm, name)
        tensor: Any = owner._parameters[key]
        mine = Part.forward(part, tensor.detach(), *sizes).clone()
        owner._parameters[key] = nn.Parameter(mine, requires_grad=tensor.requires_grad)
        kept.append(name)
    gm.meta[PARTS] = sorted(set(kept))
    gm.meta.pop("plan", None)  # whose module has the whole weights
    return gm


def whole_state(gm: TracedModule) -> dict[str, Tensor]:
    """Gather the state_dict of a module that processes keep parts of, with whole weights: all processes of the mesh call it.

    Args:
        gm: The parallel module.

    Returns:
        All weights and buffers by name, the same in each process.
    """
    state = dict(gm.state_dict())
    for name, (part, sizes) in _parts(gm).items():
        if name in gm.meta.get(PARTS, ()):
            gather = Gather(part.ways, part.axis, part.dim, part.inner)
            gather.world = part.world
            with torch.no_grad():
                state[name] = gather(state[name], *sizes)
    return state


def _parts(gm: TracedModule) -> dict[str, tuple[Part, tuple[int, ...]]]:
    """Return the parameters that are only read in parts, each always the same."""
    names: dict[int, list[str]] = {}
    for name, tensor in gm.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
    ways: dict[int, set[Any]] = {}
    blocks = {id(p) for module in gm.modules() if isinstance(module, Block) for p in module.parameters()}
    for graph in gm.graphs.values():
        for node in graph.nodes:
            if node.op == "call_module":
                for tensor in gm.get_submodule(str(node.target)).parameters():
                    ways.setdefault(id(tensor), set()).add(None)
            elif node.op == "get_attr":
                owner, key = _owner(gm, str(node.target))
                if (weight := owner._parameters.get(key)) is not None:
                    ways.setdefault(id(weight), set()).update(_way(gm, node, user) for user in node.users)
    found: dict[str, Any] = {}
    for own, aliases in names.items():
        (way, *others) = ways.get(own) or {None}
        if way is not None and not others and own not in blocks and len(aliases) == 1:
            found[aliases[0]] = gm.get_submodule(way[0]), way[1]
    return found


def _way(gm: TracedModule, node: fx.Node, user: fx.Node) -> Any:
    """Return how a user takes its part of a weight, None for one that reads it whole."""
    part = gm.get_submodule(str(user.target)) if user.op == "call_module" else None
    if not isinstance(part, Part) or user.args[0] is not node:
        return None
    return str(user.target), tuple(user.args[1:])


def _owner(gm: nn.Module, name: str) -> tuple[nn.Module, str]:
    owner, _, key = name.rpartition(".")
    return gm.get_submodule(owner), key
