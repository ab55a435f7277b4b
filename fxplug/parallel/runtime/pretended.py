"""Processes that are threads of this one: a parallel graph as all of them run it, to compare with one process."""

from __future__ import annotations

import contextvars
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.torch_internals.modules import get_modes, set_modes
from .mesh import SEQUENCE, MeshPosition

WAIT = 600  # seconds for all to come to one collective


class ThreadGroup:
    """One thread's way into a group, whose threads hand each other values."""

    def __init__(self, barrier: threading.Barrier, slots: list[Any], rank: int) -> None:
        self.barrier, self.slots, self.rank = barrier, slots, rank

    def swap(self, value: Any) -> list[Any]:
        """Exchange each thread's value with the group; return them in the order of the ranks."""
        self.slots[self.rank] = value
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found

    def all_to_all(self, x: Tensor, give: list[int]) -> Tensor:
        """Send each thread its piece of x, so many rows, and concatenate the received pieces."""
        return torch.cat([pieces[self.rank] for pieces in self.swap(torch.split(x, give))])

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate the rows of all threads' x."""
        return torch.cat(self.swap(x))

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all threads' x."""
        found: Tensor = torch.stack(self.swap(x)).sum(0)
        return found


PRETENDED: contextvars.ContextVar[MeshPosition | None] = contextvars.ContextVar("pretended", default=None)


def make_position(ways: Mapping[str, int], rank: int) -> MeshPosition:
    """Return the mesh position of a rank, without groups."""
    ranks = dict(ways)
    for axis in reversed(list(ways)):
        ranks[axis] = rank % ways[axis]
        rank //= ways[axis]
    return MeshPosition(ways, ranks, {})


def run_simulated(ways: Mapping[str, int], call: Callable[[int], Any]) -> list[Any]:
    """Return the results of `call(rank)` in as many threads as a mesh has processes. Raises the first error of any."""
    count = math.prod(ways.values())
    worlds = [make_position(ways, rank) for rank in range(count)]
    meetings: dict[Any, tuple[threading.Barrier, list[Any]]] = {}  # of each group
    for world in worlds:
        for axis, size in world.sizes.items():
            own = ("ring", "ulysses") if axis == SEQUENCE else (axis,)
            key = (axis, *(n for a, n in world.ranks.items() if a not in (*own, SEQUENCE)))
            meeting = meetings.setdefault(key, (threading.Barrier(size, timeout=WAIT), [None] * size))
            world.groups[axis] = ThreadGroup(*meeting, world.ranks[axis])
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(rank: int, modes: Any) -> None:
        PRETENDED.set(worlds[rank])
        set_modes(modes)  # which are a thread's own
        try:
            # a device's own thread runs the backward passes of all: one that waits for another in it waits for ever
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = call(rank)
        except BaseException as error:  # of one rank's thread, raised again where all were started
            errors.append(error)
            for barrier, _ in meetings.values():
                barrier.abort()

    threads = [threading.Thread(target=run, args=(rank, get_modes())) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results
