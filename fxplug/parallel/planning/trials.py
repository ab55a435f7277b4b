"""What an operation makes of parts: tried on small random values beside the whole, never told by rules about it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...core.ir.comparison import WITHIN, is_close
from ...core.ir.traced_module import strip_to_container
from ...core.rewriter.graft import Traces
from ...core.torch_internals import modules as pytree
from ...core.torch_internals.tensors import version
from ..runtime.layouts import Layout
from .streams import ArgumentSplit, Leaf, OperationRefused, Placement, Scaled, StreamNumber, Streams

EMPTY = ("empty", "empty_like", "new_empty")
POOL = 1_299_709  # random values, a prime number of them: rows that take them again begin elsewhere
RANGE = 2  # random whole numbers are below
LARGE = 2.0**40
HALVES = (torch.float16, torch.bfloat16)
CPU = torch.device("cpu")
PLAIN = (Tensor, int, float, bool, complex, str, type(None), tuple, list, dict)


class Memory:
    """What plans along one axis share: what operations do on parts, by seed, and the traces of layers."""

    def __init__(self) -> None:
        self.known: dict[int, dict[Any, Any]] = {}
        self.traces = Traces()


class ShardTrials:
    """Runs operations on small values in one process and in two pretended ones."""

    def __init__(self, gm: nn.Module, seed: int, uneven: bool = False, memory: Memory | None = None) -> None:
        """Store the module and seed; `memory` has the findings of other plans along the same axis."""
        self.gm, self.seed, self.uneven = gm, seed, uneven
        self.streams = Streams()
        self.pool = torch.rand(POOL, generator=torch.Generator().manual_seed(seed)) + 0.1
        self.used = 0
        self.multiple = 0  # of which the rows are tried; 0 for what their true number is a multiple of
        self.more = 0  # rows in each part than usual
        self.writes: Mapping[fx.Node, Sequence[fx.Node]] = {}  # the inputs that a node writes into
        self.known: dict[Any, Any] = {} if memory is None else memory.known.setdefault(seed, {})
        self.latest: tuple[str, nn.Module] | None = None  # the module that was called last, by its path

    # --- values

    def random(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Draw random values: floating-point ones between 0.1 and 1.1, so that logarithms and roots are finite. floating-point
        ones lie between 0.1 and 1.1, so that logarithms and roots have values too.

        Half precision is tried in float32, as its rounding would hide what is added once too often.
        """
        dtype = torch.float32 if dtype in HALVES else dtype
        if dtype.is_complex:
            return torch.complex(*(self.random(shape, torch.float32) for _ in range(2))).to(dtype)
        found = torch.empty(tuple(shape), dtype=dtype if dtype.is_floating_point else torch.float32)
        flat, done = found.data.view(-1), 0  # .data: what is not written yet has no version
        while done < len(flat):
            first = (self.used + done) % POOL
            length = min(POOL - first, len(flat) - done)
            flat[done : done + length].copy_(self.pool[first : first + length])
            done += length
        self.used += done
        if dtype.is_floating_point:
            return found
        return found < 0.6 if dtype == torch.bool else ((found - 0.1) * RANGE).to(dtype)

    def small_tensor(self, tensor: Tensor, place: Placement | None) -> Tensor:
        """Return a small tensor in place of a true one; known integers are kept."""
        shape = list(tensor.shape)
        known = not tensor.is_meta and not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
        tensor = tensor.cpu() if known else tensor
        if place is None:
            return tensor.detach().clone() if known else self.random(shape, tensor.dtype)
        size = place.layout.total(self.streams.small)
        if known and tensor.shape[place.dim]:
            return tensor.index_select(place.dim, torch.arange(size) % tensor.shape[place.dim])
        shape[place.dim] = size
        if not self.uneven:
            return self.random(shape, tensor.dtype)
        # what is the mean of many may not look like that of their parts
        ramp = torch.linspace(0.5, 2, size).view([-1 if d == place.dim else 1 for d in range(len(shape))])
        found = self.random(shape, tensor.dtype)
        return (found * ramp).to(found.dtype) if found.is_floating_point() else found

    def part(self, whole: Tensor, place: Placement | None, rank: int, written: bool = True) -> Tensor:
        """Return a process's part of a tensor: the tensor itself if it is whole, and not `written`."""
        if place is None:
            return whole.clone() if written else whole
        return whole.index_select(place.dim, place.layout.rows(self.streams.bounds(rank)))

    def enlarge(self, tensor: Tensor, place: Placement, rank: int) -> None:
        """Multiply the rows of the simulated process of a rank by the largest useful factor, in place."""
        rows = place.layout.rows(self.streams.bounds(rank))
        wide = tensor.index_select(place.dim, rows).to(torch.complex128 if tensor.is_complex() else torch.float64)
        tensor.index_copy_(place.dim, rows, (wide * choose_factor(tensor.dtype)).to(tensor.dtype))

    # --- one operation

    def call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Return an operation's result. Raises OperationRefused if it fails on these values."""
        module = self.module(str(node.target)) if node.op == "call_module" else None
        with sdpa_kernel(SDPBackend.MATH):  # fused ones do not ask whether values are as many as keys, and read beyond them
            try:
                if node.op == "call_function":
                    return node.target(*args, **kwargs)  # type: ignore[operator]
                if module is None:
                    return getattr(args[0], str(node.target))(*args[1:], **kwargs)
                return module(*args, **kwargs)
            except Exception as error:  # torch's, or a kept module's: sizes that do not go together raise anything
                raise OperationRefused(f"'{node.name}': {type(error).__name__}: {error}") from error

    def module(self, path: str) -> nn.Module:
        """Return a module of the model from `with_values`, the same for successive calls."""
        if self.latest is None or self.latest[0] != path:
            self.latest = path, self.with_values(self.gm.get_submodule(path))
        return self.latest[1]

    def with_values(self, module: nn.Module) -> nn.Module:
        """Return a module, or a copy with random values for tensors that have none on the CPU, or are in half precision.

        Also for a parameter of zeros, which hides its effect until it is trained or loaded. Parameters of tensor subclasses,
        such as quantised ones, are unchanged.
        """
        others: dict[int, Tensor] = {}
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            zeros = type(tensor) is nn.Parameter and tensor.is_floating_point() and not tensor.is_meta and not tensor.any()
            if zeros or tensor.device.type != "cpu" or is_half(tensor):
                value = self.random(tensor.shape, tensor.dtype)
                others[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
        if not others:
            return module
        new = strip_to_container(module)  # no deep copy: a module may hold anything, and others may be calling this one
        for one in new.modules():
            for table in (one._parameters, one._buffers):
                table.update({name: others.get(id(tensor), tensor) for name, tensor in table.items()})  # type: ignore[misc]
        return new

    def run_parts(
        self, node: fx.Node, values: dict[fx.Node, Any], step: ArgumentSplit
    ) -> tuple[Any, list[Any], dict[fx.Node, Any]] | None:
        """Return an operation's results in one process and in each simulated one, and the inputs after it.

        None if it fails.
        """
        given: dict[fx.Node, tuple[Any, list[Any]]] = {}
        for index, one in enumerate(node.all_input_nodes):
            split = dict(step.splits).get(index)
            once, written = index in step.once, one in self.writes.get(node, ())
            given[one] = self.make_parts(values[one], split, index in step.gathers, step.whole_numbers, written or once)
            if once:
                given[one][1][1].zero_()
        try:
            with torch.no_grad():
                whole = self.run(node, {n: v[0] for n, v in given.items()}, step.scaled)
                parts = [self.run(node, {n: v[1][rank] for n, v in given.items()}, step.scaled, rank) for rank in (0, 1)]
        except OperationRefused:
            return None
        return whole, parts, given

    def is_local(
        self, node: fx.Node, values: dict[fx.Node, Any], step: ArgumentSplit, found: Any, parts: list[Any], used: int
    ) -> bool:
        """Return whether a process's part of a result is unchanged if the values of the other are large.

        `found`, and its `parts`, were computed from the values of the pool from `used` on. Returns True if the operation fails
        on large values; sums are not checked.
        """
        mine, (after, self.used) = self.seed % 2, (self.used, used)
        given = {}
        for index, one in enumerate(node.all_input_nodes):
            split = dict(step.splits).get(index)
            given[one] = self.make_parts(values[one], split, index in step.gathers, step.whole_numbers, large=1 - mine)[0]
        self.used = after
        try:
            with torch.no_grad():
                whole = self.run(node, given, step.scaled)
        except OperationRefused:
            return True
        results = pytree.tree_leaves(whole), pytree.tree_leaves(parts[mine])
        for leaf, got, part in zip(list_leaves(found), *results, strict=False):
            if isinstance(leaf, Leaf) and leaf.place is not None:
                dim, layout = leaf.place
                if got.dim() != part.dim() or got.shape[dim] != layout.total(self.streams.small):
                    return False
                if not is_close(part, self.part(got, leaf.place, mine), WITHIN):
                    return False
        return True

    def make_parts(
        self, value: Any, split: Placement | None, gathered: bool, numbers: bool, written: bool = True, large: int | None = None
    ) -> tuple[Any, list[Any]]:
        """Return a value of a node in one process and in each simulated one; in one alone if some rank's rows are `large`."""

        def made(leaf: Any) -> tuple[Any, ...]:
            if isinstance(leaf, StreamNumber):
                parts = [leaf.true, leaf.true] if gathered else [leaf.small, leaf.small] if numbers else leaf.parts
                return leaf.true if gathered else leaf.small, *parts
            if not isinstance(leaf, Leaf):
                leaf = CPU if isinstance(leaf, torch.device) else leaf  # a try is made where there are values
                return leaf, leaf, leaf
            place = split or (None if gathered else leaf.place)
            whole = self.small_tensor(leaf.tensor, place)
            if large is None:
                return whole, *(self.part(whole, place, rank, written) for rank in (0, 1))
            if place is not None and (whole.is_floating_point() or whole.is_complex()):
                self.enlarge(whole, place, large)
            return whole, None, None

        if is_value(value):
            whole, *parts = made(value)
            return whole, parts
        leaves, tree = pytree.tree_flatten(value, is_leaf=is_value)
        rows = [made(leaf) for leaf in leaves]
        whole, *parts = (pytree.tree_unflatten([row[i] for row in rows], tree) for i in range(3))
        return whole, parts

    def mutated_inputs(self, given: tuple[Any, list[Any]], value: Any) -> bool | None:
        """Return whether an operation wrote into an input; None if the written values are not split like the input."""
        wholes, parts = pytree.tree_leaves(given[0]), [pytree.tree_leaves(part) for part in given[1]]
        written = False
        for position, leaf in enumerate(pytree.tree_leaves(value, is_leaf=is_value)):
            if isinstance(leaf, Leaf) and version(wholes[position]):
                written = True
                for rank in (0, 1):
                    if not is_close(self.part(wholes[position], leaf.place, rank), parts[rank][position], WITHIN):
                        return None
        return written

    def run(self, node: fx.Node, given: dict[fx.Node, Any], scaled: Scaled = (), rank: int | None = None) -> Any:
        """Return a node's result for these inputs, in one process or in the simulated one of a rank. Raises OperationRefused.

        `scaled` lists the numbers among its arguments that count streams: they are replaced by the small sizes.
        """
        runs = dict(scaled)

        def number(position: int, value: Any) -> Any:
            if position not in runs:
                return CPU if isinstance(value, torch.device) else value
            parts = self.streams.parts
            sizes = [sum(parts[s]) if rank is None else parts[s][rank] for s in runs[position]]
            return value // sum(self.streams.true[s] for s in runs[position]) * sum(sizes)

        args, kwargs = map_numbered((node.args, node.kwargs), lambda i, v: number(i, given[v] if isinstance(v, fx.Node) else v))
        if get_name(node) in EMPTY:  # what is not written yet is the same everywhere
            return self.call(node, args, kwargs).zero_()
        return self.call(node, args, kwargs)

    # --- what came out

    def placed(
        self, true: Any, whole: Any, parts: list[Any], layouts: Sequence[Layout], from_parts: bool, from_sizes: bool = False
    ) -> tuple[Any, Any] | None:
        """Return the value of a node, and whether it is a sum over the processes; None if it is neither whole nor split.

        In place of True there are streams if it is a mean over their tokens.

        Values that are equal everywhere may be so by chance: a tensor that is computed `from_parts`, a number `from_sizes`.
        """
        leaves, tree = pytree.tree_flatten(whole)
        rows = [pytree.tree_flatten(part) for part in parts]
        trues, same = pytree.tree_flatten(true)
        if any(t != tree for _, t in rows) or same != tree:
            return None
        found: list[Any] = []
        add: Any = False
        for index, small in enumerate(leaves):
            got, real = [row[index] for row, _ in rows], trues[index]
            if not isinstance(small, Tensor):
                alike = all(type(g) is type(small) and g == small for g in got) and small == real
                chance = from_sizes and isinstance(small, (bool, int, float))
                found.append(real if alike and not chance else StreamNumber(real, small, tuple(got)))
                continue
            place = self.place(small, got, layouts, from_parts)
            if place is None:
                return None
            if place == "sum":
                add, place = True, "whole"
            elif isinstance(place, tuple) and not isinstance(place, Placement):
                add, place = place, "whole"
            if place != "whole" and not self.as_true(real, small, place):
                return None
            if place == "whole" and real.shape != small.shape:
                return None
            found.append(Leaf(real, None if place == "whole" else place))
        if add and len(found) != 1:
            return None
        return pytree.tree_unflatten(found, tree), add

    def mean(self, got: list[Tensor], streams: Sequence[int]) -> Tensor:
        """Return the mean over tokens of these streams, from the mean of each simulated process."""
        lengths = [sum(self.streams.parts[stream][rank] for stream in streams) for rank in (0, 1)]
        return (got[0] * lengths[0] + got[1] * lengths[1]) / sum(lengths)

    def as_true(self, true: Tensor, small: Tensor, place: Placement) -> bool:
        """Return whether the true value has the shape that the small one implies."""
        sizes = list(small.shape)
        sizes[place.dim] = place.layout.total(self.streams.true)
        return list(true.shape) == sizes

    def place(self, whole: Tensor, got: list[Any], layouts: Sequence[Layout], from_parts: bool) -> Any:
        """Return how a result is split: "whole", "sum", a Placement, or the streams that it is a mean over; None if nothing
        fits."""
        if any(not isinstance(g, Tensor) or g.dim() != whole.dim() for g in got):
            return None
        if whole.numel() and (whole.is_floating_point() or whole.is_complex()) and bool(whole.isnan().all()):
            return None  # it says nothing
        if all(g.shape == whole.shape for g in got):
            if all(is_close(whole, g, WITHIN) for g in got):
                return None if from_parts and whole.numel() else "whole"  # by chance: it was computed from parts
            summed = got[0] + got[1] if whole.is_floating_point() else None
            if summed is None or is_close(whole, summed, WITHIN):
                return None if summed is None else "sum"
            return next((layout.streams for layout in layouts if is_close(whole, self.mean(got, layout.streams), WITHIN)), None)
        dims = {d for g in got for d in range(whole.dim()) if g.shape[d] != whole.shape[d]}
        if len(dims) != 1:
            return None
        dim = dims.pop()
        for layout in candidates(layouts, self.streams.small, whole.shape[dim]):
            place = Placement(dim, layout)
            rows = [layout.rows(self.streams.bounds(rank)) for rank in (0, 1)]
            fits = all(len(r) == g.shape[dim] for r, g in zip(rows, got, strict=True))
            if fits and all(is_close(whole.index_select(dim, r), g, WITHIN) for r, g in zip(rows, got, strict=True)):
                return place
        return None


def is_half(tensor: Tensor) -> bool:
    """Return whether a tensor is a plain one in half precision."""
    return tensor.dtype in HALVES and type(tensor) in (Tensor, nn.Parameter)


def map_numbered(value: Any, function: Callable[[int, Any], Any]) -> Any:
    """Map nested arguments by a function of each leaf and its position among the leaves."""
    position = itertools.count()
    return fx.node.map_aggregate(value, lambda leaf: function(next(position), leaf))


def is_value(value: Any) -> bool:
    """Return whether this is a leaf of a value: a tensor with its placement, or a number that depends on sizes."""
    return isinstance(value, (Leaf, StreamNumber))


def list_leaves(value: Any) -> list[Any]:
    """Return the leaves of a nested value."""
    leaves: list[Any] = pytree.tree_leaves(value, is_leaf=is_value)
    return leaves


def get_norm_arguments(node: fx.Node) -> dict[str, Any] | None:
    """Return the arguments of layer_norm and rms_norm by name, None for another node."""
    names = {"layer_norm": ("weight", "bias", "eps"), "rms_norm": ("weight", "eps")}.get(get_name(node))
    if names is None or node.op != "call_function":
        return None
    given = dict(zip(("input", "normalized_shape", *names), node.args, strict=False))
    return {"weight": None, "bias": None, "eps": 1e-5 if "bias" in names else None, **given, **node.kwargs}


def is_plain_result(value: Any) -> bool:
    """Return whether parts of a result can be gathered into one of its type: not for custom classes."""
    own = type(value) is not dict if isinstance(value, dict) else hasattr(value, "_fields")
    return isinstance(value, PLAIN) and not own


def is_placed(leaf: Any) -> bool:
    """Return whether a leaf is a tensor that is split."""
    return isinstance(leaf, Leaf) and leaf.place is not None


def make_leaf(true: Any, kind: Any) -> Any:
    """Return a leaf of a result of the same kind as in an earlier trial."""
    if isinstance(true, Tensor):
        return Leaf(true, kind)
    return kind if isinstance(kind, StreamNumber) else true


def make_signature(value: Any) -> Any:
    """Return a key of the properties of a value that determine how an operation acts on its parts."""
    found: list[Any] = [str(pytree.tree_structure(value, is_leaf=is_value))]
    for leaf in list_leaves(value):
        if isinstance(leaf, Leaf):
            known = not leaf.tensor.is_meta
            content = leaf.tensor.cpu().numpy().tobytes() if known else b""
            found.append((tuple(leaf.tensor.shape), leaf.tensor.dtype, leaf.place, content))
        elif isinstance(leaf, (int, float, bool, str, type(None), StreamNumber)):
            found.append((type(leaf), leaf))
        else:
            found.append(repr(leaf))
    return tuple(found)


def count_elements(value: Any) -> int:
    """Return the number of elements of a tensor; 0 for another value."""
    return value.numel() if isinstance(value, Tensor) else 0


def get_name(node: fx.Node) -> str:
    """Return the name of the function or method that a node calls, or the path of a module."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def choose_factor(dtype: torch.dtype) -> float:
    """Return a factor large enough to show a dependence on the multiplied values."""
    return min(LARGE, math.sqrt(torch.finfo(dtype).max))


def candidates(layouts: Sequence[Layout], sizes: Sequence[int], size: int) -> Iterator[Layout]:
    """Yield layouts that fill a dimension: the given ones, runs of their streams, several concatenated, and split or joined
    ones."""
    found: dict[tuple[int, ...], None] = {}
    for layout in layouts:
        found.update(dict.fromkeys(layout.runs()))
    if 1 < len(layouts) <= 4:
        for order in itertools.permutations(layouts):
            found[tuple(stream for layout in order for stream in layout.streams)] = None
    seen = set()
    for layout in layouts:
        if layout.total(sizes) == size:
            seen.add(layout)
            yield layout
    for streams in found:
        tokens = sum(sizes[stream] for stream in streams)
        if size % tokens == 0:
            times = size // tokens
            for outer in range(1, times + 1):
                layout = Layout(streams, outer, times // outer)
                if times % outer == 0 and layout not in seen:
                    yield layout
