"""Whether the processes of a mesh have the same plan, weights and inputs: checksums that are compared at each call."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ...core.errors import GuardError
from ...core.ir.containers import list_leaves
from ...core.torch_internals.distributed import group_of_name
from ...core.torch_internals.tensors import version
from .faults import run_guarded
from .mesh import AXES, MeshPosition
from .pretended import ThreadGroup

PARTS = "parts"  # in a module's meta: the names of its weights of which each process keeps only its part

# of weights: the version that was hashed last, and the hash
KNOWN: MutableMapping[Tensor, tuple[int, int]] = WeakTensorKeyDictionary()
PLANS: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
NEXT = "next step"  # of each process, before anything else is compared
CHUNK = 1 << 20  # elements that are hashed at a time
GOLDEN, FACTOR = -0x61C8864680B583EB, 0x5851F42D4C957F2D  # odd numbers without a pattern
NUMBERS: dict[torch.device, Tensor] = {}  # one for each place
WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_equal_on_ranks(
    root: nn.Module, world: MeshPosition, args: Sequence[Any], kwargs: Mapping[str, Any], call: str = "a call"
) -> None:
    """Compare the graph, mode, parameters, buffers and inputs with those of the other processes of a mesh.

    For tensors it compares shapes, strides, dtypes and a hash of all bits: for the inputs at each call, for a weight at the
    first one and when its version counter has changed. Each process sends eight bytes. Every process raises the same
    GuardError, which names a tensor and the processes that have another one. Weights that are sharded, quantised or on the meta
    device are left out. `call` names the operation, which must be the same, too.
    """
    if any(world.groups.values()):
        _compare(world, {NEXT: (call,), **_table(root, args, kwargs)})


def check_together(world: MeshPosition, call: str) -> None:
    """Raise GuardError in every process if they are not about to do the same `call`."""
    if any(world.groups.values()):
        _compare(world, {NEXT: (call,)})


def _compare(world: MeshPosition, table: Mapping[str, Any]) -> None:
    digest = int.from_bytes(hashlib.sha256(repr(table).encode()).digest()[:8], signed=True)
    if len(set(_everyone(world, [digest], _gather_numbers))) == 1:
        return
    tables = dict(sorted(_everyone(world, [(_rank(world), table)], _gather_objects)))
    for name in dict.fromkeys(name for found in tables.values() for name in found):
        values = {rank: found.get(name, ("none",)) for rank, found in tables.items()}
        if name == NEXT and len(set(values.values())) > 1:
            rows = "; ".join(f"process {rank} is at {value[0]}" for rank, value in values.items())
            raise GuardError(f"the processes do not do the same things: {rows}. Run the same code in all of them")
        usual = Counter(values.values()).most_common(1)[0][0]
        if others := sorted(rank for rank, value in values.items() if value != usual):
            first = next(rank for rank in sorted(values) if values[rank] == usual)
            mine, theirs = (_shown(value) for value in (values[others[0]], usual))
            apart = f" ({mine} and {theirs})" if mine != theirs else ""
            many = f"process{'es' * (len(others) > 1)} {', '.join(map(str, others))}"
            raise GuardError(
                f"the {name} of {many} differs from process {first}{apart}: pass the same weights and the same inputs to all "
                "processes that share a model; each takes its own part itself"
            )


def _table(root: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the compared values by name: shape, dtype, strides and hash of tensors, other inputs as text."""
    tensors: dict[str, Tensor] = {}
    if root not in PLANS:
        PLANS[root] = make_mark(root)
    table: dict[str, Any] = {"plan": (PLANS[root], ""), "mode": (_mode(root),)}
    parts = set(getattr(root, "meta", {}).get(PARTS, ()))
    for kind, named in (("weight", root.named_parameters()), ("buffer", root.named_buffers())):
        tensors.update({f"{kind} '{name}'": t for name, t in named if name not in parts})
    for place, value in (*enumerate(args), *dict(kwargs).items()):
        for index, leaf in enumerate(found := list_leaves(value)):
            name = f"input {place}" + (f"[{index}]" if len(found) > 1 else "")
            if isinstance(leaf, Tensor):
                table[f"class of {name}"] = (type(leaf).__name__,)
                tensors.update(_plain_parts(name, leaf))
            elif isinstance(leaf, (bool, int, float, str, type(None))):
                table[name] = (type(leaf).__name__, repr(leaf))
    plain = {name: t for name, t in tensors.items() if type(t) in (Tensor, nn.Parameter) and not t.is_meta}
    sums = {name: known[1] for name, t in plain.items() if (known := KNOWN.get(t)) is not None and known[0] == version(t)}
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, t in plain.items():
        if name not in sums:
            by_device.setdefault(t.device, []).append((name, _hash(t)))
    for rows in by_device.values():
        sums.update(zip([name for name, _ in rows], torch.stack([s for _, s in rows]).tolist(), strict=True))
    KNOWN.update({t: (version(t), sums[n]) for n, t in plain.items() if not n.startswith("input ") and not t.is_inference()})
    table.update({name: (tuple(t.shape), str(t.dtype), _strides(t), sums[name]) for name, t in plain.items()})
    return table


def _plain_parts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return the plain tensors that a tensor of any class consists of, by name: itself, or those inside a wrapper."""
    if type(tensor) is Tensor:
        return {name: tensor}
    if hasattr(tensor, "__tensor_flatten__"):
        parts, _ = tensor.__tensor_flatten__()
        return {key: t for part in parts for key, t in _plain_parts(f"{name}.{part}", getattr(tensor, part)).items()}
    return {name: tensor.detach().as_subclass(Tensor)}


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Return a tensor's strides, except those of dimensions of size 1."""
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def _shown(value: tuple[Any, ...]) -> str:
    """Format a row of the table for a message: for a tensor its dtype and shape."""
    return f"{value[1]} {value[0]}" if isinstance(value[0], tuple) else str(value[-1])


def _mode(root: nn.Module) -> str:
    """Describe the state that determines which graph runs, whether it has a backward pass, and which dtypes are sent."""
    accelerator = torch.accelerator.current_accelerator()
    devices = ["cpu", *([accelerator.type] if accelerator else [])]
    casts = [f"autocast {torch.get_autocast_dtype(d)} on {d}" for d in devices if torch.is_autocast_enabled(d)]
    training = ["training" if root.training else "evaluation"] if len(getattr(root, "graphs", ())) == 2 else []
    return ", ".join([*training, "gradients" if torch.is_grad_enabled() else "no gradients", *casts])


def make_mark(module: nn.Module) -> str:
    """Return a digest that is equal for two modules with the same graphs."""
    graphs = getattr(module, "graphs", {})
    text = "\n".join(f"{mode} {node.format_node()}" for mode in sorted(graphs) for node in graphs[mode].nodes)
    return hashlib.sha256(text.encode()).hexdigest()


def _everyone(world: MeshPosition, known: list[Any], gather: Callable[[list[Any], int, Any], list[list[Any]]]) -> list[Any]:
    """Return the values of all processes of a mesh, gathered along one axis after the other."""
    for axis in AXES:
        group = world.groups.get(axis)
        if group is None or world.sizes[axis] == 1:
            continue
        local = isinstance(group, ThreadGroup)
        rows = group.swap(known) if local else gather(known, world.sizes[axis], group_of_name(group))
        known = [value for row in rows for value in row]
    return known


def _gather_numbers(known: list[int], size: int, group: Any) -> list[list[int]]:
    """Gather integers of each process of a group, as int64."""
    device = torch.accelerator.current_accelerator() if dist.get_backend(group) != "gloo" else None
    mine = torch.tensor(known, device=device or "cpu")
    rows = mine.new_empty(size, len(known))

    def call() -> Tensor:
        dist.all_gather(list(rows), mine, group)
        return rows

    return run_guarded(call, group.group_name).tolist()


def _gather_objects(known: list[Any], size: int, group: Any) -> list[list[Any]]:
    rows: list[Any] = [None] * size
    dist.all_gather_object(rows, known, group)
    return rows


def _hash(t: Tensor) -> Tensor:
    """Return a multilinear hash of a tensor's bits modulo 2**64, int64, the same on any device (Lemire and Kaser, arXiv
    1202.4961).

    It is the sum over the values of their bits times a pseudo-random number for the position.
    """
    t = t.detach()
    t = torch.view_as_real(t) if t.is_complex() else t
    bits = t.contiguous().flatten().view(WHOLE[t.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    for some in torch.split(bits, CHUNK):
        total = total * FACTOR + (some.long() * _numbers(len(some), t.device)).sum()
    return total


def _numbers(count: int, device: torch.device) -> Tensor:
    """Return a number for each position, from 64-bit finalizers over 1, 2, ... (splitmix64), cached for the next call."""
    known = NUMBERS.get(device)
    if known is None or len(known) < count:
        z = torch.arange(1, max(count, 1 << 12) + 1, dtype=torch.int64, device=device) * GOLDEN
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
            z = (z ^ (z >> shift)) * factor
        known = NUMBERS[device] = z | 1
    return known[:count]


def _rank(world: MeshPosition) -> int:
    if not any(isinstance(group, ThreadGroup) for group in world.groups.values()):
        return dist.get_rank()
    rank = 0
    for axis in AXES:
        rank = rank * world.sizes[axis] + world.ranks[axis]
    return rank
