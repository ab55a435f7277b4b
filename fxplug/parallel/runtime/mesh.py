"""Where a process stands: its rank on each axis of a device mesh, and the groups of processes along them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...core.errors import SpecError, quote
from ...core.torch_internals.distributed import get_joined_group, limit_waiting

# from the outermost: neighbours talk most along the last
AXES = ("batch", "rows", "ring", "ulysses", "tensor")
SEQUENCE = "sequence"  # ring and ulysses as one axis


class MeshPosition:
    """A process's place in a mesh: for each axis how many processes it has, which of them this one is, and their group."""

    is_runtime_state = True  # which no artifact has

    def __init__(self, sizes: Mapping[str, int], ranks: Mapping[str, int], groups: Mapping[str, Any]) -> None:
        self.sizes, self.ranks, self.groups = dict(sizes), dict(ranks), dict(groups)
        self.sizes[SEQUENCE] = sizes["ring"] * sizes["ulysses"]
        self.ranks[SEQUENCE] = ranks["ring"] * sizes["ulysses"] + ranks["ulysses"]

    def __deepcopy__(self, memo: Any) -> MeshPosition:
        return self


def fill_degrees(ways: Mapping[str, int]) -> dict[str, int]:
    """Return the number of processes of every axis. Raises SpecError for an unknown axis, or an invalid number."""
    for axis, number in ways.items():
        if axis not in AXES:
            raise SpecError(f"no axis '{axis}': there are {', '.join(AXES)}")
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise SpecError(f"{axis} must be a whole number, 1 or more, not {quote(number)}")
    return {axis: ways.get(axis, 1) for axis in AXES}


def format_degrees(ways: Mapping[str, int]) -> str:
    """Format degrees as `ulysses 2 x ring 2`; "" for one process."""
    return " x ".join(f"{axis} {n}" for axis, n in ways.items() if n > 1)


def find_position(ways: Mapping[str, int], mesh: DeviceMesh | None = None) -> MeshPosition:
    """Return this process's position in a mesh with these axes; the default mesh consists of all processes.

    Raises SpecError without a process group, and for a mesh that has other axes or sizes.
    """
    ways = fill_degrees(ways)
    needed = math.prod(ways.values())
    text = format_degrees(ways) or "1"
    if not dist.is_available() or not dist.is_initialized():
        raise SpecError(
            f"this model runs on {needed} processes, and there is no process group: start with "
            f"torchrun --nproc-per-node {needed}, and call torch.distributed.init_process_group first"
        )
    if mesh is None:
        plans: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(plans, text)
        if other := next((rank for rank, plan in enumerate(plans) if plan != plans[0]), 0):
            raise SpecError(
                f"process 0 has a plan for {plans[0]}, and process {other} one for {plans[other]}: make the same plan in all "
                "processes, or pass to each the mesh of those that share its plan"
            )
        if dist.get_world_size() != needed:
            raise SpecError(
                f"the plan is for {needed} processes ({text}), and there are {dist.get_world_size()}: start that number, use "
                "other degrees, or pass a mesh over some of them"
            )
        kind = torch.accelerator.current_accelerator() if dist.get_backend() != "gloo" else None
        mesh = init_device_mesh(str(kind or "cpu"), tuple(ways.values()), mesh_dim_names=tuple(ways))
        for axis in ways:
            limit_waiting(mesh.get_group(axis).group_name)
    return _placed(ways, mesh)


def _placed(ways: Mapping[str, int], mesh: DeviceMesh) -> MeshPosition:
    names = mesh.mesh_dim_names or ()
    sizes, ranks, groups = {}, {}, {}
    for axis, number in ways.items():
        there = mesh[axis].size() if axis in names else 1
        if there != number:
            raise SpecError(f"the mesh has {there} processes along '{axis}', and the plan {number}: {mesh}")
        sizes[axis], ranks[axis] = number, 0
        if axis in names:
            ranks[axis], groups[axis] = mesh.get_local_rank(axis), mesh.get_group(axis).group_name
    both = [axis for axis in ("ring", "ulysses") if axis in names]
    if len(both) == 2:
        groups[SEQUENCE] = get_joined_group(mesh[tuple(both)], SEQUENCE)
        limit_waiting(groups[SEQUENCE])
    elif both:
        groups[SEQUENCE] = groups[both[0]]
    return MeshPosition(sizes, ranks, groups)
