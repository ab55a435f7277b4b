"""Sizes, values and dtypes that a model reads: from the graph where torch takes them, held by guards where Python decides."""

from __future__ import annotations

import ast
import operator
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx, nn

from ..errors import TraceError
from ..ir import functions, ops
from ..ir.graph import meta_of, redirect
from ..spec.addresses import identifier
from ..torch_internals.tensors import DisableTorchFunction, FakeTensor, OpOverload, OpOverloadPacket
from .fake_tensors import KINDS, NeedsValues, Number, lacks_values, record
from .graph_builder import NUMBERS, Nodes
from .user_code import (
    ORDERED,
    asker,
    counts_distinct,
    decides_nothing,
    decision_at,
    position,
    source_line,
    tree_of,
    unpacked,
    user_frame,
)

Place = tuple[int, int, int, int]  # line, column, last line, last column
NAMESPACES = {"torch", "F", "nn", "functional"}


@dataclass
class Read:
    """One read by the model's code. `given` is whether it went straight to a torch function."""

    node: fx.Node
    where: str
    line: str
    given: bool = False


class Dtypes:
    """The dtypes that are read in one run. A dtype itself cannot tell whose it is: the source says where it goes."""

    def __init__(self, recording: Nodes) -> None:
        self.recording = recording
        self.nodes: dict[fx.Node, fx.Node] = {}  # by the tensor's
        self.all: list[Read] = []
        self.last: dict[tuple[int, Place | str], Read] = {}  # by frame, and expression or name

    def read(self, tensor: torch.Tensor, answer: torch.dtype, frame: FrameType) -> torch.dtype:
        """Record that `frame` reads the dtype of a tensor, and return the dtype."""
        recording, user = self.recording, asker(frame)
        known = recording.recorded(tensor) is not None or id(tensor) in recording.parameters
        if user is None or not known or decides_nothing(user):
            return answer
        of = recording.lookup(tensor)
        if of not in self.nodes:
            self.nodes[of] = recording.node("call_function", ops.dtype_of, (of,), {}, f"{of.name}_dtype")
            self.nodes[of].meta["value"] = answer
        read = Read(self.nodes[of], *source_line())
        self.all.append(read)
        place, source = position(user), _reads(user.f_code.co_filename)
        if user is frame and place in source.given:
            self.last[id(user), place] = read
        elif user is frame and place in source.held:
            self.last[id(user), source.held[place]] = read
        return answer

    def dtype_argument(self, dtype: torch.dtype) -> Any:
        """Return the node that reads a dtype among the arguments of a call; the dtype itself if no such node is known."""
        frame = user_frame()
        place = None if frame is None else position(frame)
        if frame is None or place is None:
            return dtype
        for use in _reads(frame.f_code.co_filename).uses.get(place, ()):
            read = self.last.get((id(frame), use.read or use.name))
            if read is not None and read.node.meta["value"] == dtype:
                read.given = True
                return read.node
        return dtype

    def decided(self) -> Iterable[Read]:
        """Return the reads that are not passed straight to a torch function, the first of each node."""
        return {read.node: read for read in reversed(self.all) if not read.given}.values()


class DtypeUse(NamedTuple):
    """One dtype among the arguments of a call: read there, `x.to(y.dtype)`, or held by a local name, `x.to(dtype)`."""

    read: Place | None
    name: str


@dataclass
class SourceDtypes:
    """What a source file does with dtypes."""

    given: set[Place]  # reads that are an argument of a torch function
    held: dict[Place, str]  # reads that go into a local name, which is an argument of torch functions and nothing else
    uses: dict[Place, list[DtypeUse]]  # by call


def _place(node: ast.expr) -> Place:
    return node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0


@lru_cache(maxsize=256)
def _reads(file: str) -> SourceDtypes:
    found = SourceDtypes(set(), {}, {})
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Call) and (uses := _uses(node)):
            found.uses[_place(node)] = uses
            found.given.update(use.read for use in uses if use.read)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.held.update(_find_dtype_names(node))
    return found


def _uses(call: ast.Call) -> list[DtypeUse]:
    """Return the dtypes among the arguments of a call that converts or creates a tensor."""
    function = call.func
    if not isinstance(function, ast.Attribute):
        return []
    root: ast.expr = function
    while isinstance(root, ast.Attribute):
        root = root.value
    known = isinstance(root, ast.Name) and root.id in NAMESPACES
    converts = function.attr in ("to", "type")
    args = [a for a in call.args if converts] + [k.value for k in call.keywords if k.arg == "dtype" and (converts or known)]
    uses = []
    for arg in args:
        if isinstance(arg, ast.Attribute) and arg.attr == "dtype":
            uses.append(DtypeUse(_place(arg), ""))
        elif isinstance(arg, ast.Name):
            uses.append(DtypeUse(None, arg.id))
    return uses


def _find_dtype_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[Place, str]:
    """Return the dtype reads that are assigned to a name which is set once and then only passed to torch functions."""
    inside = list(ast.walk(function))
    reads = [n for n in inside if isinstance(n, ast.Assign) and isinstance(n.value, ast.Attribute) and n.value.attr == "dtype"]
    if not reads:
        return {}
    names = [n for n in inside if isinstance(n, ast.Name)]
    calls = [use.name for n in inside if isinstance(n, ast.Call) for use in _uses(n)]
    found = {}
    for node in reads:
        if len(node.targets) == 1 and isinstance(target := node.targets[0], ast.Name):
            mine = [n for n in names if n.id == target.id]
            loads = sum(isinstance(n.ctx, ast.Load) for n in mine)
            if len(mine) == loads + 1 and loads == calls.count(target.id):
                found[_place(node.value)] = target.id
    return found


class RecordedNumbers(Nodes):
    """A graph that grows, with the numbers that are read out of its tensors."""

    def shape(self, tensor: torch.Tensor) -> torch.Size:
        """Return a tensor's shape in recorded numbers; a weight's in plain ones."""
        node = self.recorded(tensor)
        if node is None:
            return tensor.shape  # a weight has the size it has
        return torch.Size([self.size_of(node, "size", s, d) for d, s in enumerate(tensor.shape)])

    def size_of(self, node: fx.Node, method: str, value: int, dim: int | None = None) -> Any:
        """Return a size of a tensor as a recorded number, read from the node by a method: `x.size(1)`, `x.numel()`."""
        args = (node,) if dim is None else (node, dim)
        name = f"{node.name}_{method}" + ("" if dim is None else f"_{dim}")
        return self.memo((node, method, dim), "call_method", method, args, value, name)

    def size(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Return the result of a method such as `size`, `stride` or `numel`, in recorded numbers unless the tensor is a
        weight."""
        tensor = args[0]
        with DisableTorchFunction():
            plain, _ = self.lower(args[1:])
            out = func(tensor, *plain, **kwargs)
        node = self.recorded(tensor)
        if node is None:
            return out
        if isinstance(out, tuple):
            return type(out)([self.size_of(node, name, s, d) for d, s in enumerate(out)])
        if name in ("size", "stride"):
            dim = plain[0] if plain else kwargs["dim"]
            return self.size_of(node, name, out, dim % tensor.dim())
        if name == "__len__":
            return self.size_of(node, "size", out, 0)
        return self.size_of(node, "numel" if name == "nelement" else name, out)

    def memo(self, key: Any, op: str, target: Any, args: Any, value: Any, name: str) -> Any:
        """Return a recorded number; its node is created once per key."""
        if key not in self.numbers:
            self.numbers[key] = self.node(op, target, args, {}, name)
        return self.wrap_number(self.numbers[key], value)

    def number(self, target: Callable[..., Any], args: tuple[Any, ...], value: Any) -> Any:
        """Return `target(*args)` on recorded numbers."""
        value = value.item() if isinstance(value, np.generic) else value
        if type(value) not in NUMBERS:
            for number in args:
                self.decide(number)
            return value
        _, nodes = self.lower(args)
        key = (target, tuple((type(n), n) for n in nodes))
        return self.memo(key, "call_function", target, nodes, value, self.named(functions.short_name(target)))

    def decide(self, number: Any) -> Any:
        """Return the plain value of a number that Python needs, and guard it."""
        if not isinstance(number, Number):
            return number
        return self.settle(number.fx_node, number.value) if number.recorder is self else number.value

    def settle(self, node: fx.Node, value: Any) -> Any:
        """Return the plain value of a node that Python needs, and guard it unless nothing depends on it."""
        if node not in self.guards:
            frame = user_frame()
            if frame is None or not decides_nothing(frame):
                self.guard(node, value)
        return value

    def guard(self, node: fx.Node, expected: Any, does: str = "branches on a value that it computes") -> None:
        """Guard a number to its present value."""
        if node in self.guards:
            return
        self.guards.add(node)
        if not self.fake:
            self.refuse_drawn(node)
            if not self.measured and self.computed(node):
                self.refuse_measured(node, does)
        decision = decision_at(node)
        self.node("call_function", ops.guard, (node, expected, decision), {}, self.named("guard"), effect=True)

    def assigned(self, leaves: set[str]) -> None:
        """Record the buffers that forward assigned anew: their values are copied into the existing memory."""
        for name, module, before in self.buffers:
            path, _, key = name.rpartition(".")
            now = module._buffers.get(key)
            if now is before or now is None or any(f"{path}.".startswith(f"{leaf}.") for leaf in leaves):
                continue
            with DisableTorchFunction():
                sizes = tuple(now.shape)
                alike = sizes == tuple(before.shape) and now.dtype == before.dtype
            if not alike or self.recorded(now) is None:
                continue
            old, new = self.lookup(before), self.lookup(now)
            if old.users:  # what read the old value keeps it
                copy = self.node("call_method", "clone", (old,), {}, f"{old.name}_before", after=old)
                copy.meta.update(meta_of(old))
                redirect(old, copy)
            kinds = self.node("call_function", ops.same_dtype, (old, new), {}, f"{new.name}_same_dtype")
            self.guard_after(kinds, True, (*source_line(), f"whether the value written to the buffer '{name}' has the buffer's "
                                                           "dtype"))
            for dim, size in enumerate(sizes):
                self.decide(self.size_of(new, "size", size, dim))
            self.node("call_method", "copy_", (old, new), {}, identifier(f"{name}_assign"), effect=True)

    def guard_parts(self, func: Any, name: str, node: fx.Node, out: Any, call: Any, frame: FrameType) -> None:
        """Guard the number of results, or of dimensions, of a function if sizes decide it without a list among the arguments.

        For operators and functions that are not torch's, everything that Python can see is guarded.
        """
        foreign = isinstance(func, (OpOverload, OpOverloadPacket)) and not str(func).startswith(("aten.", "prims."))
        if foreign or ops.is_applied(func) or name in functions.BY_SIZES:
            self.guard_structure(node, out)
        elif isinstance(out, (tuple, list)):
            sized = any(isinstance(x, (list, tuple)) for x in (*call[0], *call[1].values()))
            whole = name.endswith("chunk") and unpacked(frame) == len(out)  # which gives no more, and Python refuses fewer
            if functions.takes_apart(name) and not sized and not whole:
                self.guard_answer(ops.number_of_parts, node, len(out))
        elif name in functions.SQUEEZING and isinstance(out, torch.Tensor):
            dims = self.node("call_method", "dim", (node,), {}, f"{node.name}_dim", after=node)
            dims.meta["value"] = out.dim()
            self.guard_after(dims, out.dim(), decision_at(dims))

    def guard_structure(self, node: fx.Node, out: Any) -> None:
        """Guard all that Python can see of a result besides the numbers in it."""
        with DisableTorchFunction():
            structure = ops.structure_of(out)
        self.guard_answer(ops.structure_of, node, structure)

    def guard_answer(self, question: Callable[..., Any], node: fx.Node, answer: Any) -> None:
        """Guard the answer of one of our functions about a result."""
        asked = self.node("call_function", question, (node,), {}, f"{node.name}_{question.__name__}", after=node)
        asked.meta["value"] = answer
        self.guard_after(asked, answer, decision_at(asked))

    def value(self, func: Any, name: str, args: Any) -> Any:
        """Return a number read out of a tensor: recorded if it depends on the inputs, otherwise plain."""
        tensor = args[0]
        try:
            out = func(*args)
        except RuntimeError as error:
            if self.fake and lacks_values(error):
                raise NeedsValues(self.needs_values()) from error
            raise
        source = self.lookup(tensor)
        if self.fake and not self.computed(tensor):
            return out  # fake tensors know the values of constants
        if name == "tolist":
            if tensor.dim() and source.op != "get_attr":
                for size in self.shape(tensor):
                    self.decide(size)
            return self.bind(out, self.node("call_method", "tolist", (source,), {}, self.named("tolist")))
        with DisableTorchFunction():
            read = tensor.item()
        node = self.node("call_method", "item", (source,), {}, self.named("item"))
        if type(read) not in KINDS:
            self.guard(node, read)
            return out
        number = self.bind(read, node)
        return number if name == "item" else type(out)(number)

    def refuse_drawn(self, node: fx.Node) -> None:
        """Raise TraceError for a branch on a random number, whose outcome differs between calls."""

        def look(current: fx.Node, short: str) -> list[fx.Node]:
            if short in functions.DRAWS:
                self.refuse_way("branches on a random number")
            return current.all_input_nodes

        functions.computed_by(node, look)

    def refuse_measured(self, node: fx.Node, does: str) -> None:
        """Raise TraceError for a branch on a measured value; one on masks, counts or equality is a property of the input."""

        def look(current: fx.Node, short: str) -> list[fx.Node]:
            given = [a for a in current.args if isinstance(a, fx.Node)]
            floating = any(getattr(a.meta.get("dtype"), "is_floating_point", False) for a in given)
            if floating and (short in ORDERED or short in ("item", "tolist")):
                self.refuse_way(does, ", or trace on real tensors, with the values of this call as a guard: trace(..., "
                                      "real=True)")
            follows = not floating or short in ("isnan", "isinf")
            return current.all_input_nodes if follows else []

        functions.computed_by(node, look)

    def refuse_way(self, does: str, more: str = "") -> None:
        """Raise TraceError because what the model `does` here depends on a value."""
        where, line = source_line()
        raise TraceError(
            f"{self.region()} {does} ({where}: {line}), and a graph records one branch only; {self.way_out()}{more}"
        )


# --- what stands for Python's `int`, `float`, `len` and `type` in the model's source files: Python makes plain numbers of what
# these give, so that `int(h * 0.5)` would be a part of the graph, and not recorded


class _StandIn(type):
    """The class of what stands for a class of Python's, its base: equal to it, and with the same instances."""

    __base__: type

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.__base__)

    def __subclasscheck__(cls, value: Any) -> bool:
        return issubclass(value, cls.__base__)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.__base__

    def __hash__(cls) -> int:
        return hash(cls.__base__)


class _IntStandIn(_StandIn):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], Number):
            return record(functions.MATH_FUNCTIONS["trunc"], args[0]) if isinstance(args[0], float) else args[0]
        return int(*args, **kwargs)


class _FloatStandIn(_StandIn):
    def __call__(cls, *args: Any) -> Any:
        return record(operator.mul, args[0], 1.0) if args and isinstance(args[0], Number) else float(*args)


class _TypeStandIn(_StandIn):
    classes: dict[Any, Any]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return type(*args, **kwargs)
        kind = type(args[0].value if isinstance(args[0], Number) else args[0])
        if kind is FakeTensor:
            return nn.Parameter if isinstance(args[0], nn.Parameter) else torch.Tensor
        return cls if issubclass(kind, _StandIn) else cls.classes.get(kind, kind)


class Distinct(NamedTuple):
    """What `len(set(numbers))` counts."""

    count: Any


class _SetStandIn(_StandIn):
    def __call__(cls, *args: Any) -> Any:
        items = list(args[0]) if len(args) == 1 else []
        if any(map(_is_value, items)) and counts_distinct(sys._getframe(1)) and all(isinstance(x, (int, float)) for x in items):
            return Distinct(record(ops.number_of_distinct, *items))
        return set(items) if args else set()


# numpy asks a class for its dtype; torch takes none but Python's own, see `Tries.stand_ins`
Int: Any = _IntStandIn("int", (int,), {"dtype": np.dtype(int)})
Float: Any = _FloatStandIn("float", (float,), {"dtype": np.dtype(float)})
Set: Any = _SetStandIn("set", (set,), {})
Type: Any = _TypeStandIn("type", (type,), {"classes": {int: Int, float: Float, set: Set}})


def _is_value(number: Any) -> bool:
    """Return whether a number was read out of a tensor's values: what Python asks of it is recorded, not guarded."""
    todo = [number.fx_node] if isinstance(number, Number) and number.recorder.active else []
    while todo:
        node = todo.pop()
        if node.op == "call_method" and node.target in ("item", "tolist"):
            return True
        todo += [n for n in node.all_input_nodes if "value" in n.meta or n.target in ("item", "tolist")]
        if node.target is operator.getitem:
            todo += [n for n in node.all_input_nodes if n.target is operator.getitem]
    return False


def _extreme(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `max` or `min` to record it for numbers that were read out of a tensor's values."""

    def extreme(*args: Any, **kwargs: Any) -> Any:
        items = list(args[0]) if len(args) == 1 and isinstance(args[0], (list, tuple)) and not kwargs else args
        if kwargs or not any(map(_is_value, items)) or not all(isinstance(x, (int, float)) for x in items):
            return function(*args, **kwargs)
        return record(function, *items) if len(items) > 1 else items[0]

    return extreme


def length(value: Any) -> Any:
    """Return `len`, recorded for a tensor, and for a set of numbers that were read out of one."""
    if type(value) is Distinct:
        return value.count
    return len(value) if not isinstance(value, torch.Tensor) else value.__len__()  # type: ignore[no-untyped-call]


STAND_INS = {"int": Int, "float": Float, "type": Type, "len": length, "set": Set, "max": _extreme(max), "min": _extreme(min)}
KINDS_REPLACED = {"int", "float", "type", "len"}  # a file with any of these names of its own keeps them all
PLAIN = {"type": _TypeStandIn("type", (type,), {"classes": {}})}  # where the model gives `int` to what takes no other
