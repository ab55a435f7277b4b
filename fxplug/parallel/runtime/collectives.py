"""What a parallel graph calls: parts of what is whole, the whole of what is split, sums; all differentiable.

A gradient is that of the sum of what all processes compute: each has the loss of the whole, so the mean over the processes of
a parameter's gradients is its gradient, as DDP and FSDP take it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...blocks.base import Block
from ...core.errors import ArtifactError, GuardError, SpecError, quote
from ...core.extensions import DistributedPart
from ...core.ir.traced_module import TracedModule
from ...core.torch_internals import distributed
from . import layouts
from .checksums import PARTS, check_equal_on_ranks
from .faults import run_guarded
from .mesh import AXES, SEQUENCE, MeshPosition, fill_degrees, find_position
from .pretended import PRETENDED, ThreadGroup, make_position


class Collective(DistributedPart[TracedModule], Block):
    """A block that runs on every process along an axis of the mesh. `ways` are the sizes of all axes.

    `world` is this process's place, looked up when the first call finds none; a file has no rank.
    """

    world: MeshPosition | None = None
    by_constructor: ClassVar[bool] = True

    def __init__(self, ways: dict[str, int], axis: str) -> None:
        super().__init__()
        if not isinstance(ways, dict) or axis not in (*AXES, SEQUENCE):
            known = ", ".join((*AXES, SEQUENCE))
            raise SpecError(f"a collective must run along one of {known}, not {quote(axis)} of {quote(ways)}")
        self.ways, self.axis = fill_degrees(ways), axis

    def here(self) -> MeshPosition:
        """Return this process's position. Raises SpecError if there is no process group, or one of another size."""
        if not torch.compiler.is_compiling() and (world := PRETENDED.get()) is not None:
            return world
        if self.world is None:
            self.world = find_position(self.ways)
        return self.world

    @contextlib.contextmanager
    def as_first_rank(self) -> Iterator[None]:
        """Run as the first process, without communication."""
        before, self.world = vars(self).get("world"), make_position(self.ways, 0)
        try:
            yield
        finally:
            vars(self).pop("world", None)
            if before is not None:
                self.world = before

    @contextlib.contextmanager
    def without_exchange(self) -> Iterator[None]:
        """Run as this process, without communication."""
        world = self.here()
        token = PRETENDED.set(MeshPosition({axis: world.sizes[axis] for axis in self.ways}, world.ranks, {}))
        try:
            yield
        finally:
            PRETENDED.reset(token)

    def get_ranks(self) -> dict[str, int]:
        """Return this process's rank along each axis of the mesh."""
        return self.here().ranks

    def saved_form(self, module: TracedModule) -> TracedModule:
        if parts := module.meta.get(PARTS):
            raise ArtifactError(
                f"this process has only its shard of {len(parts)} weights, such as '{parts[0]}': gather them with whole_state, "
                "and save the module that parallelize gives without processes"
            )
        return module

    def rebuild(self, module: TracedModule, change: Callable[[TracedModule], TracedModule]) -> TracedModule:
        plan: Any = module.meta.get("plan")
        if plan is None or not plan.is_of(module):
            parts = module.meta.get(PARTS)
            why = "keeps only its part of some weights" if parts else "was loaded, or changed since it was split"
            raise SpecError(
                f"this module is split over processes and {why}, so that a pass cannot go to what it was made from: apply the "
                "pass to that, or remove it of that, and make the plan of the module that this gives"
            )
        return plan.rebuild(module, change)  # type: ignore[no-any-return]

    def before_call(self, root: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Check before each call of a module that all processes have the same plan, weights and inputs. Raises GuardError."""
        meta = getattr(root, "meta", {})
        if "region" not in meta and "part" not in meta:  # what enters a region, or a part of a step cache, may be parts
            check_equal_on_ranks(root, self.here(), args, kwargs)

    def group_of(self, *sizes: int) -> tuple[int, int, Any]:
        """Return rank, number of processes and group along the axis; 0, 1 and None if there are too few samples to split. 0, 1
        and None where each computes all of too few samples.

        `sizes` are those of the streams that are split.
        """
        world = self.here()
        if self.axis == "batch" and sizes and min(sizes) < world.sizes[self.axis]:
            return 0, 1, None
        return world.ranks[self.axis], world.sizes[self.axis], world.groups.get(self.axis)

    def everywhere(self, x: Tensor) -> Tensor:
        """Return a small tensor of every process of the mesh: stacked, in one order, the same in each."""
        world, rows = self.here(), x[None]
        for axis in self.ways:
            if world.sizes[axis] > 1:
                even = [len(rows)] * world.sizes[axis]
                rows = gather(rows, 0, even, world.ranks[axis], world.groups.get(axis))
        return rows


class Lengthwise(Collective):
    """What runs along a dimension `dim` in which tokens lie, each with `inner` elements, or as many as a call says."""

    def __init__(self, ways: dict[str, int], axis: str, dim: int, inner: int = 1) -> None:
        super().__init__(ways, axis)
        self.dim, self.inner = check_integer("dim", dim), check_integer("inner", inner, 1)


class Split(Lengthwise):
    """This process's part of a tensor: forward(x, *sizes), with the whole sizes of the streams in dimension `dim`.

    A token has `inner` elements, or as many as the call says; the streams stand there once, or several times in front of each
    other. `born` says that tokens begin here: fewer than there are processes raise GuardError, and so do other sizes than
    `behind` in the dimensions behind, and a number of tokens that leaves another `rest` by the `divisor`. With `few` each
    process computes all of fewer samples than there are processes.
    """

    def __init__(
        self, ways: dict[str, int], axis: str, dim: int, inner: int = 1, born: bool = False,
        behind: Sequence[int] | None = None, divisor: int = 1, rest: int = 0, few: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(ways, axis, dim, inner)
        self.born, self.behind = bool(born), None if behind is None else [check_integer("behind", size) for size in behind]
        self.divisor, self.rest, self.few = check_integer("divisor", divisor, 1), check_integer("rest", rest), bool(few)

    def forward(self, x: Tensor, *sizes: int, inner: int | None = None) -> Tensor:
        rank, world, _ = self.group_of(*sizes)
        inner = self.inner if inner is None else inner
        many = self.group_of()[1]
        if self.born and min(sizes) < many and not self.few:
            what, where = "samples" if self.axis == "batch" else "tokens", f"dimension {self.dim} of {tuple(x.shape)}"
            raise GuardError(f"{min(sizes)} {what} ({where}) cannot be split over {many} processes")
        if self.born and world < many and not torch.compiler.is_compiling():
            few = f"{min(sizes)} samples are fewer than the {many} processes along 'batch'"
            warnings.warn(f"{few}: each computes all of them", stacklevel=2)
        total = sum(sizes) * inner
        if self.born and x.shape[self.dim] != total:
            raise GuardError(
                f"dimension {self.dim} of {tuple(x.shape)} must be {sum(sizes)} times {inner}, as in the plan: use inputs of "
                "that size, or make a plan with inputs of this one"
            )
        if sum(sizes) % self.divisor != self.rest:
            kind = f"a multiple of {self.divisor}" if not self.rest else "odd"
            raise GuardError(
                f"dimension {self.dim} of {tuple(x.shape)} holds {sum(sizes)} tokens, and that must be {kind}, as in the plan: "
                "use inputs of such a size, or make a plan with inputs of this one"
            )
        if self.behind is not None and list(x.shape[self.dim + 1 :]) != self.behind:
            raise GuardError(
                f"the dimensions of {tuple(x.shape)} after dimension {self.dim} must be {self.behind}, as in the plan: use "
                "inputs of that size, or make a plan with inputs of this one"
            )
        return take_part(x, self.dim, inner, sizes, rank, world)


class Gather(Lengthwise):
    """The whole of a tensor whose dimension `dim` is split: forward(x, *sizes), the inverse of `Split`."""

    def forward(self, x: Tensor, *sizes: int, inner: int | None = None) -> Tensor:
        rank, world, group = self.group_of(*sizes)
        inner = self.inner if inner is None else inner
        counts = layouts.count_all(sizes, world)
        y = torch.unflatten(x, self.dim, (count_times(x, self.dim, counts[rank] * inner), counts[rank] * inner))
        y = gather(y, self.dim + 1, [n * inner for n in counts], rank, group)
        if len(sizes) > 1:
            lengths = [layouts.count(n, r, world) * inner for r in range(world) for n in sizes]
            parts = torch.split(y, lengths, self.dim + 1)
            y = torch.cat([parts[r * len(sizes) + i] for i in range(len(sizes)) for r in range(world)], self.dim + 1)
        return y.flatten(self.dim, self.dim + 1).contiguous()


class AllReduce(Collective):
    """The sum over the processes: forward(x)."""

    def forward(self, x: Tensor) -> Tensor:
        _, world, group = self.group_of()
        if world == 1:
            return x
        sent(2 * (world - 1) * x.element_size() * x.numel() // world)
        found: Tensor = _SumFunction.apply(x, group)
        return found


class Broadcast(Collective):
    """What the first process has: forward(x). For what every process would draw by chance for itself."""

    def forward(self, x: Tensor) -> Tensor:
        rank, world, group = self.group_of()
        if world == 1:
            return x
        flat = x.reshape(-1)
        give = [flat.numel() * (rank == 0)] * world
        take = [flat.numel() * (other == 0) for other in range(world)]
        found = exchange(flat.repeat(world if rank == 0 else 0), give, take, rank, group)
        return found.reshape(x.shape)


class GlobalSize(Collective):
    """The size that a split dimension has in one process: forward(x, *sizes)."""

    def __init__(self, ways: dict[str, int], axis: str, dim: int) -> None:
        super().__init__(ways, axis)
        self.dim = check_integer("dim", dim)

    def forward(self, x: Tensor, *sizes: int) -> int:
        rank, world, _ = self.group_of(*sizes)
        return layouts.compute_global_size(x, self.dim, sizes, rank, world)


class Numel(GlobalSize):
    """The number of elements that a split tensor has in one process: forward(x, *sizes)."""

    def forward(self, x: Tensor, *sizes: int) -> int:
        return x.numel() // x.shape[self.dim] * super().forward(x, *sizes)


def check_integer(name: str, value: Any, least: int = 0) -> int:
    """Return the value. Raises SpecError if it is no integer, or below `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SpecError(f"{name} must be a whole number, {least} or more, not {quote(value)}")
    return value


def take_part(x: Tensor, dim: int, inner: int, sizes: Sequence[int], rank: int, world: int) -> Tensor:
    """Return a rank's part of a tensor whose dimension contains these streams once, or several times."""
    total = sum(sizes) * inner
    y = torch.unflatten(x, dim, (count_times(x, dim, total), total))
    y = layouts.narrow(y, dim + 1, layouts.list_spans(sizes, rank, world, inner))
    return y.flatten(dim, dim + 1).contiguous()  # what is contiguous in one process is so in each: a view may follow


def count_times(x: Tensor, dim: int, size: int) -> int:
    """Return how often a dimension contains so many elements. Raises GuardError if that is no integer."""
    if size and x.shape[dim] % size:
        raise GuardError(
            f"dimension {dim} of {tuple(x.shape)} is not split as in the plan: make a plan with inputs of this size"
        )
    return x.shape[dim] // size if size else 1


# --- the operations below


# what every backend sends
SENT = {torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64}
TRAFFIC: ContextVar[list[int] | None] = ContextVar("traffic", default=None)


@contextlib.contextmanager
def record_traffic() -> Iterator[list[int]]:
    """Yield a list that receives the bytes that this process sends, a number for each collective of a forward pass.

    An all-reduce counts as in a ring: 2 (n - 1) / n of its bytes.
    """
    found: list[int] = []
    token = TRAFFIC.set(found)
    try:
        yield found
    finally:
        TRAFFIC.reset(token)


def sent(count: int) -> None:
    """Record sent bytes, if `record_traffic` is active."""
    if not torch.compiler.is_compiling() and (found := TRAFFIC.get()) is not None:
        found.append(count)


def gather(x: Tensor, dim: int, counts: Sequence[int], rank: int, group: Any) -> Tensor:
    """Return the values of all ranks, concatenated in order, where they have `counts` rows along a dimension."""
    if len(counts) == 1:
        return x
    sent(x.element_size() * x.numel() // max(1, x.shape[dim]) * max(counts) * (len(counts) - 1))
    y = x.movedim(dim, 0)
    most = max(counts)
    uneven = torch.compiler.is_compiling() or min(counts) != most  # one graph serves sizes of both kinds
    if uneven:
        y = F.pad(y, [0, 0] * (y.dim() - 1) + [0, most - counts[rank]])
    y = _GatherFunction.apply(y.contiguous(), len(counts), group)
    if uneven:
        y = torch.cat([y.narrow(0, r * most, n) for r, n in enumerate(counts)])
    return y.movedim(0, dim)


def exchange(flat: Tensor, give: list[int], take: list[int], rank: int, group: Any) -> Tensor:
    """Exchange elements of a one-dimensional tensor: `give[r]` elements go to rank r, `take[r]` come from it."""
    sent(flat.element_size() * (sum(give) - give[rank]))
    found: Tensor = _Exchange.apply(flat, give, take, group)
    return found


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, give: list[int], take: list[int], group: Any) -> Tensor:
        ctx.way = give, take, group
        return _all_to_all(flat, give, take, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        give, take, group = ctx.way
        return _all_to_all(grad, take, give, group), None, None, None


class _GatherFunction(torch.autograd.Function):
    """All-gather along the first dimension; backward adds up what each rank's part got everywhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, world: int, group: Any) -> Tensor:
        ctx.way = world, group
        if group is None:
            return x.new_zeros(world * x.shape[0], *x.shape[1:])
        if isinstance(group, ThreadGroup):
            return group.all_gather(x)
        return _moved(lambda sent: distributed.all_gather(sent, 0, group), x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        world, group = ctx.way
        even = [grad.shape[0] // world] * world
        came = _all_to_all(grad, even, even, group)
        return came.view(world, even[0], *grad.shape[1:]).sum(0), None, None


class _SumFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _all_reduce(grad, ctx.group), None


def _all_to_all(x: Tensor, give: list[int], take: list[int], group: Any) -> Tensor:
    """Exchange rows of the first dimension with each rank. Without a group nothing is sent."""
    if group is None:
        return x.new_zeros(sum(take), *x.shape[1:])
    if isinstance(group, ThreadGroup):
        return group.all_to_all(x, give)
    return _moved(lambda sent: distributed.all_to_all(sent.contiguous(), take, give, group), x, group)


def _moved(collective: Callable[[Tensor], Tensor], x: Tensor, group: str) -> Tensor:
    """Run a collective that only moves values: on the bytes of a tensor whose dtype it does not support."""
    if x.dtype in SENT:
        return run_guarded(lambda: _waited(collective(x)), group)
    data = x.resolve_conj()[..., None].contiguous().view(torch.uint8)
    return run_guarded(lambda: _waited(collective(data)), group).view(x.dtype)[..., 0]


def _all_reduce(x: Tensor, group: Any) -> Tensor:
    if group is None:
        return x.clone()
    if isinstance(group, ThreadGroup):
        return group.all_reduce(x)
    return run_guarded(lambda: _waited(distributed.all_reduce(x.contiguous(), "sum", group)), group)


def _waited(x: Tensor) -> Tensor:
    found: Tensor = distributed.wait(x)
    return found
