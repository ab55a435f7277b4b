"""What stages of a pipeline send each other: asynchronously, over torch.distributed."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...core.errors import SpecError
from ...core.torch_internals import modules as pytree
from ...core.torch_internals.distributed import get_timeout, limit_waiting
from ..runtime.faults import run_guarded
from ..runtime.mesh import MeshPosition, find_position

WAITING = "what the others have of their patches"


class Links:
    """A process's ways to the other stages. `key` names what both sides know of a message: shapes go with the first alone.

    Messages from one stage to another come in the order in which they were sent; those that go back have an order of their
    own, so that neither waits for the other.
    """

    def __init__(self, rank: int, ranks: Sequence[int], groups: Sequence[Any]) -> None:
        self.rank, self.ranks, self.groups = rank, list(ranks), list(groups)
        self.known: dict[Any, Any] = {}
        self.going: list[tuple[Any, Tensor]] = []  # tensors live until they have been sent
        self.world: MeshPosition | None = None  # all processes that have this image, for what is compared
        self.device = torch.device("cpu")

    def send(self, to: int, values: Any, key: Any) -> None:
        """Send nested values to a stage, without waiting."""
        group = self.groups[to < self.rank]
        leaves, tree = pytree.tree_flatten(values)
        going = [leaf.contiguous() for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel()]
        if (self.rank, to, key) not in self.known:
            self.known[self.rank, to, key] = True
            text = json.dumps([pytree.treespec_dumps(tree), [_header(leaf) for leaf in leaves]]).encode()
            head = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            going = [t.to(self.device) for t in (torch.tensor([len(head)]), head)] + going

        def call() -> None:
            self.going = [row for row in self.going if not row[0].is_completed()]
            self.going += [(dist.isend(tensor, self.ranks[to], group), tensor) for tensor in going]

        run_guarded(call, group.group_name, f"what stage {to} takes")

    def receive(self, source: int, key: Any) -> Any:
        """Receive values from a stage. Raises GuardError if nothing arrives."""
        group = self.groups[self.rank < source]

        def into(tensor: Tensor) -> Tensor:
            run_guarded(lambda: dist.recv(tensor, self.ranks[source], group), group.group_name, f"what stage {source} sends")
            return tensor

        if (source, self.rank, key) not in self.known:
            size = into(torch.empty(1, dtype=torch.int64, device=self.device))
            head = into(torch.empty(int(size), dtype=torch.uint8, device=self.device))
            spec, said = json.loads(bytes(head.tolist()))
            self.known[source, self.rank, key] = [_heard(leaf) for leaf in said], pytree.treespec_loads(spec)
        outlines, tree = self.known[source, self.rank, key]
        leaves = self.empty(outlines)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.numel():
                into(leaf)
        return pytree.tree_unflatten(leaves, tree)

    def share(self, source: int, values: Any, key: Any) -> Any:
        """Broadcast one stage's values to all. Raises GuardError if a process does not reach the broadcast."""
        group = self.groups[0]
        leaves, tree = pytree.tree_flatten(values)

        def wait(call: Any) -> None:
            run_guarded(call, group.group_name, f"what stage {source} gives to all")

        if ("all", key) not in self.known:
            rows: list[Any] = [(_outlines(leaves), tree)]
            wait(lambda: dist.broadcast_object_list(rows, self.ranks[source], group))
            self.known["all", key] = rows[0]
        outlines, tree = self.known["all", key]
        if self.rank != source:
            leaves = self.empty(outlines)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.numel():
                leaves[i] = tensor = leaf.contiguous()
                wait(functools.partial(dist.broadcast, tensor, self.ranks[source], group))
        return pytree.tree_unflatten(leaves, tree)

    def swap(self, values: Sequence[Tensor], key: Any) -> tuple[Callable[[], None], list[list[Tensor]]]:
        """Start an all-gather of tensors: return a function that waits for it, and the tensors of each process, complete after
        that."""
        name = self.groups[0].group_name
        if ("swap", key) not in self.known:
            shapes: list[Any] = [None] * len(self.ranks)
            run_guarded(lambda: dist.all_gather_object(shapes, _outlines(values), self.groups[0]), name, WAITING)
            self.known["swap", key] = shapes
        rows = [self.empty(outlines) for outlines in self.known["swap", key]]
        rows[self.rank] = [value.contiguous() for value in values]
        works: list[Any] = [
            dist.broadcast(tensor, self.ranks[source], self.groups[0], async_op=True)
            for source, row in enumerate(rows) for tensor in row if tensor.numel()
        ]  # fmt: skip

        def wait() -> None:
            run_guarded(lambda: [work.wait() for work in works], name, WAITING)

        return wait, rows

    def empty(self, outlines: Sequence[Any]) -> list[Any]:
        """Allocate tensors to receive into, one for each outline."""
        return [self.here(outline) for outline in outlines]

    def here(self, outline: Any) -> Any:
        """Return an empty tensor of an outline on this process's device; replace any device by it; return anything else as it
        is."""
        if isinstance(outline, _Outline):
            return torch.empty(outline.shape, dtype=outline.dtype, device=self.device)
        return self.device if isinstance(outline, torch.device) else outline


def make_links(stages: int, ways: Mapping[str, int], mesh: DeviceMesh | None = None) -> tuple[Links, MeshPosition]:
    """Return the links to the stages for this process's part of the batch, and its position in a mesh of (batch, stages).

    Raises SpecError for a mesh, or a number of processes, that does not fit.
    """
    needed = stages * math.prod(ways.values())
    if mesh is None:
        if dist.get_world_size() != needed:
            raise SpecError(
                f"{stages} stages need {needed} processes, and there are {dist.get_world_size()}: start that number"
            )
        kind = torch.accelerator.current_accelerator() if dist.get_backend() != "gloo" else None
        mesh = init_device_mesh(str(kind or "cpu"), (needed // stages, stages), mesh_dim_names=("batch", "stages"))
        for axis in ("batch", "stages"):
            limit_waiting(mesh.get_group(axis).group_name)
    names = mesh.mesh_dim_names or ()
    if "stages" not in names or mesh["stages"].size() != stages:
        raise SpecError(f"a mesh for {stages} stages must have that number of processes along 'stages': {mesh}")
    mine: list[Any] = []
    rows = mesh.mesh.movedim(names.index("stages"), -1).reshape(-1, stages).tolist()
    for row in rows:  # every process makes all groups; one for what goes on, one for what comes back
        groups = [dist.new_group(row, get_timeout()) for _ in range(2)]
        if dist.get_rank() in row:
            mine = [row.index(dist.get_rank()), row, groups]
    links, world = Links(*mine), find_position(ways, mesh)
    along = {"sizes": stages, "ranks": links.rank, "groups": links.groups[0].group_name}
    links.world = MeshPosition(**{name: {**vars(world)[name], "ulysses": value} for name, value in along.items()})
    return links, world


class _Outline(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


def _outlines(leaves: Sequence[Any]) -> list[Any]:
    return [_Outline(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in leaves]


def _header(leaf: Any) -> Any:
    """Return the header of a value, as JSON."""
    if isinstance(leaf, Tensor):
        return {"shape": list(leaf.shape), "dtype": str(leaf.dtype).removeprefix("torch.")}
    if isinstance(leaf, torch.dtype):
        return {"dtype": str(leaf).removeprefix("torch.")}
    return {"device": str(leaf)} if isinstance(leaf, torch.device) else leaf


def _heard(said: Any) -> Any:
    if not isinstance(said, dict):
        return said
    if "device" in said:
        return torch.device(said["device"])
    dtype = getattr(torch, said["dtype"])
    return _Outline(tuple(said["shape"]), dtype) if "shape" in said else dtype
