"""Whether the processes of a mesh have the same weights and inputs: checksums that are compared at the first call."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import GuardError
from ...ir.pytree import leaves
from ...torch_internals.distributed import group_of_name
from .mesh import AXES, World
from .pretended import Local

WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_alike(root: nn.Module, world: World, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Compare parameters, buffers and inputs with those of the other processes of a mesh: shapes, dtypes and a sum of all bits.

    One pass over the weights, and some bytes that travel. Every process raises the same GuardError, which names a tensor and
    the processes that have another one. What is sharded, quantised or on the meta device is left out.
    """
    if not any(world.groups.values()):
        return
    table = _table(root, args, kwargs)
    digest = hashlib.sha256(repr(table).encode()).hexdigest()
    if len(set(_everyone(world, digest).values())) == 1:
        return
    tables = _everyone(world, table)
    for name in dict.fromkeys(name for found in tables.values() for name in found):
        values = {rank: found.get(name, "missing") for rank, found in tables.items()}
        usual = Counter(values.values()).most_common(1)[0][0]
        if others := sorted(rank for rank, value in values.items() if value != usual):
            first = next(rank for rank in sorted(values) if values[rank] == usual)
            shapes = f" ({values[others[0]][:-1]} and {usual[:-1]})" if values[others[0]][:-1] != usual[:-1] else ""
            many = f"process{'es' * (len(others) > 1)} {', '.join(map(str, others))}"
            raise GuardError(
                f"the {name} of {many} is not that of process {first}{shapes}: processes that share a model are given the same "
                "weights and the same inputs; each takes its own part by itself"
            )


def _table(root: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """What is compared, by name: shape, dtype and checksum of tensors, other inputs as they are printed."""
    tensors: dict[str, Tensor] = {}
    table: dict[str, Any] = {}
    parts = set(getattr(root, "meta", {}).get("parts", ()))  # of these each process has another part
    for kind, named in (("weight", root.named_parameters()), ("buffer", root.named_buffers())):
        tensors.update({f"{kind} '{name}'": t for name, t in named if name not in parts})
    for place, value in (*enumerate(args), *dict(kwargs).items()):
        for index, leaf in enumerate(found := leaves(value)):
            name = f"input {place}" + (f"[{index}]" if len(found) > 1 else "")
            if isinstance(leaf, Tensor):
                tensors[name] = leaf
            elif isinstance(leaf, (bool, int, float, str, type(None))):
                table[name] = (type(leaf).__name__, repr(leaf))
    plain = {name: t for name, t in tensors.items() if type(t) in (Tensor, nn.Parameter) and not t.is_meta}
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, t in plain.items():
        by_device.setdefault(t.device, []).append((name, _sum(t)))
    sums: dict[str, int] = {}
    for rows in by_device.values():
        sums.update(zip([name for name, _ in rows], torch.stack([s for _, s in rows]).tolist(), strict=True))
    table.update({name: (tuple(t.shape), str(t.dtype), sums[name]) for name, t in plain.items()})
    return table


def _sum(t: Tensor) -> Tensor:
    """The sum of a tensor's bits as whole numbers, int64: the same in any order and on any device."""
    t = t.detach()
    t = torch.view_as_real(t) if t.is_complex() else t
    return t.contiguous().flatten().view(WHOLE[t.element_size()]).sum(dtype=torch.int64)


def _everyone(world: World, value: Any) -> dict[int, Any]:
    """What each process of a mesh gives, by rank: along one axis after the other, all that is known so far."""
    known = {_rank(world): value}
    for axis in AXES:
        group = world.groups.get(axis)
        if group is None or world.sizes[axis] == 1:
            continue
        if isinstance(group, Local):
            told = group.swap(known)
        else:
            told = [None] * world.sizes[axis]
            dist.all_gather_object(told, known, group_of_name(group))
        known = {rank: held for each in told for rank, held in each.items()}
    return dict(sorted(known.items()))


def _rank(world: World) -> int:
    if not any(isinstance(group, Local) for group in world.groups.values()):
        return dist.get_rank()
    rank = 0
    for axis in AXES:
        rank = rank * world.sizes[axis] + world.ranks[axis]
    return rank
