"""Collectives that a compiler can take, and what torch.distributed knows of its groups."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "all_gather", "all_reduce", "all_to_all", "default_store", "get_joined_group", "get_timeout", "group_of_name",
    "limit_waiting", "wait",
]  # fmt: skip

# these give a tensor that is not there yet; its name of the first since torch 2.15, and before
all_gather: Any = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
all_reduce: Any = functional.all_reduce
all_to_all: Any = functional.all_to_all_single
# the tensor, once it is there
wait: Any = functional.wait_tensor
# its name of the first since torch 2.14, and before
_set_timeout: Any = getattr(dist.distributed_c10d, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
# the process group of a name, as a graph has it
group_of_name: Any = _resolve_process_group
# the store through which the default group was set up; we need its `clone`, `check`, `set` and `get`
default_store: Any = dist.distributed_c10d._get_default_store


def get_joined_group(mesh: DeviceMesh, name: str) -> Any:
    """Return the name of the group of all processes of a mesh with several axes; we need that it runs in the mesh's own
    order."""
    return mesh._flatten(name).get_group().group_name


def get_timeout() -> timedelta:
    """Return the timeout of a collective of the default group, which torch reports for its backends alone."""
    group = dist.distributed_c10d._get_default_group()
    found: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return found


def limit_waiting(name: str) -> None:
    """Set the timeout of a named group to that of the default group; groups of a mesh have another."""
    _set_timeout(get_timeout(), group_of_name(name))
