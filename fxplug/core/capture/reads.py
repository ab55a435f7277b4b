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

from ..ir import functions, ops
from ..ir.graph import get_meta, redirect
from ..spec.addresses import make_identifier
from ..torch_internals.tensors import DisableTorchFunction, FakeTensor, OpOverload, OpOverloadPacket
from .fake_tensors import KINDS, NeedsValues, Number, is_missing_values, record
from .graph_builder import Recording
from .user_code import (
    count_unpacked,
    find_calling_frame,
    find_position,
    find_source_line,
    find_user_frame,
    is_counting_distinct,
    is_irrelevant_branch,
    list_nodes,
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

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.nodes: dict[fx.Node, fx.Node] = {}  # by the tensor's
        self.all: list[Read] = []
        self.last: dict[tuple[int, Place | str], Read] = {}  # by frame, and expression or name

    def read(self, tensor: torch.Tensor, answer: torch.dtype, frame: FrameType) -> torch.dtype:
        """`frame` reads the dtype of a tensor."""
        recording, user = self.recording, find_calling_frame(frame)
        known = recording.recorded(tensor) is not None or id(tensor) in recording.parameters
        if user is None or not known or is_irrelevant_branch(user):
            return answer
        of = recording.lookup(tensor)
        if of not in self.nodes:
            self.nodes[of] = recording.node("call_function", ops.dtype_of, (of,), {}, f"{of.name}_dtype")
            self.nodes[of].meta["value"] = answer
        read = Read(self.nodes[of], *find_source_line())
        self.all.append(read)
        place, source = find_position(user), _reads(user.f_code.co_filename)
        if user is frame and place in source.given:
            self.last[id(user), place] = read
        elif user is frame and place in source.held:
            self.last[id(user), source.held[place]] = read
        return answer

    def dtype_argument(self, dtype: torch.dtype) -> Any:
        """A dtype among the arguments of a call: the node that reads it, or the dtype where none is known."""
        frame = find_user_frame()
        place = None if frame is None else find_position(frame)
        if frame is None or place is None:
            return dtype
        for use in _reads(frame.f_code.co_filename).uses.get(place, ()):
            read = self.last.get((id(frame), use.read or use.name))
            if read is not None and read.node.meta["value"] == dtype:
                read.given = True
                return read.node
        return dtype

    def decided(self) -> Iterable[Read]:
        """Reads that went anywhere else, the first of each node."""
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


@lru_cache(maxsize=1024)
def _reads(file: str) -> SourceDtypes:
    found = SourceDtypes(set(), {}, {})
    for call in list_nodes(file, ast.Call):
        if uses := _uses(call):
            found.uses[_place(call)] = uses
            found.given.update(use.read for use in uses if use.read)
    lines = [node.lineno for node in list_nodes(file, ast.Assign) if _is_dtype(node.value)]
    for function in list_nodes(file, ast.FunctionDef, ast.AsyncFunctionDef):
        if any(function.lineno <= line <= function.end_lineno for line in lines):
            found.held.update(_find_dtype_names(function))
    return found


def _uses(call: ast.Call) -> list[DtypeUse]:
    """The dtypes among the arguments of a call that converts or makes a tensor."""
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


def _is_dtype(value: ast.expr) -> bool:
    return isinstance(value, ast.Attribute) and value.attr == "dtype"


def _find_dtype_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[Place, str]:
    """Reads that go into a name which is set once, and then given to torch functions only."""
    inside = list(ast.walk(function))
    reads = [n for n in inside if isinstance(n, ast.Assign) and _is_dtype(n.value)]
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


def read_size(recording: Recording, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Read what a method such as `size`, `stride` or `numel` gives, in recorded numbers unless the tensor is a weight."""
    tensor = args[0]
    with DisableTorchFunction():
        plain, _ = recording.lower(args[1:])
        out = func(tensor, *plain, **kwargs)
    node = recording.recorded(tensor)
    if node is None:
        return out
    if isinstance(out, tuple):
        return type(out)([recording.size_of(node, name, s, d) for d, s in enumerate(out)])
    if name in ("size", "stride"):
        dim = plain[0] if plain else kwargs["dim"]
        return recording.size_of(node, name, out, dim % tensor.dim())
    if name == "__len__":
        return recording.size_of(node, "size", out, 0)
    return recording.size_of(node, "numel" if name == "nelement" else name, out)


def record_assignments(recording: Recording, leaves: set[str]) -> None:
    """Record the buffers that forward assigned anew: their values go into the memory that they have."""
    for name, module, before in recording.buffers:
        path, _, key = name.rpartition(".")
        now = module._buffers.get(key)
        if now is before or now is None or any(f"{path}.".startswith(f"{leaf}.") for leaf in leaves):
            continue
        with DisableTorchFunction():
            sizes = tuple(now.shape)
            alike = sizes == tuple(before.shape) and now.dtype == before.dtype
        if not alike or recording.recorded(now) is None:
            continue
        old, new = recording.lookup(before), recording.lookup(now)
        if old.users:  # what read the old value keeps it
            copy = recording.node("call_method", "clone", (old,), {}, f"{old.name}_before", after=old)
            copy.meta.update(get_meta(old))
            redirect(old, copy)
        kinds = recording.node("call_function", ops.same_dtype, (old, new), {}, f"{new.name}_same_dtype")
        same = f"whether the value written to the buffer '{name}' has the buffer's dtype"
        recording.guard_after(kinds, True, (*find_source_line(), same))
        for dim, size in enumerate(sizes):
            recording.decide(recording.size_of(new, "size", size, dim))
        recording.node("call_method", "copy_", (old, new), {}, make_identifier(f"{name}_assign"), effect=True)


def guard_parts(recording: Recording, func: Any, name: str, node: fx.Node, out: Any, call: Any, frame: FrameType) -> None:
    """Hold how many results, or dimensions, a function gives where sizes decide that, and no list among its arguments.

    Of operators and functions that are not torch's everything is held that Python can see.
    """
    foreign = isinstance(func, (OpOverload, OpOverloadPacket)) and not str(func).startswith(("aten.", "prims."))
    if foreign or ops.is_applied(func) or name in functions.BY_SIZES:
        guard_structure(recording, node, out)
    elif isinstance(out, (tuple, list)):
        sized = any(isinstance(x, (list, tuple)) for x in (*call[0], *call[1].values()))
        whole = name.endswith("chunk") and count_unpacked(frame) == len(out)  # which gives no more, and Python refuses fewer
        if functions.is_splitting(name) and not sized and not whole:
            guard_answer(recording, ops.number_of_parts, node, len(out))
    elif name in functions.SQUEEZING and isinstance(out, torch.Tensor):
        dims = recording.node("call_method", "dim", (node,), {}, f"{node.name}_dim", after=node)
        dims.meta["value"] = out.dim()
        recording.guard_after(dims, out.dim(), recording.describe_decision(dims))


def guard_structure(recording: Recording, node: fx.Node, out: Any) -> None:
    """Hold all that Python can see of a result beside the numbers in it."""
    with DisableTorchFunction():
        structure = ops.structure_of(out)
    guard_answer(recording, ops.structure_of, node, structure)


def guard_answer(recording: Recording, question: Callable[..., Any], node: fx.Node, answer: Any) -> None:
    """Hold what a function of ours says of a result."""
    asked = recording.node("call_function", question, (node,), {}, f"{node.name}_{question.__name__}", after=node)
    asked.meta["value"] = answer
    recording.guard_after(asked, answer, recording.describe_decision(asked))


def read_value(recording: Recording, func: Any, name: str | None, args: Any, _: Any) -> Any:
    """Read a number out of a tensor: recorded where it depends on the inputs, else known."""
    tensor = args[0]
    try:
        out = func(*args)
    except RuntimeError as error:
        if recording.fake and is_missing_values(error):
            raise NeedsValues(recording.needs_values()) from error
        raise
    source = recording.lookup(tensor)
    if recording.fake and not recording.computed(tensor):
        return out  # fake tensors know the values of constants
    if name == "tolist":
        if tensor.dim() and source.op != "get_attr":
            for size in recording.shape(tensor):
                recording.decide(size)
        return recording.bind(out, recording.node("call_method", "tolist", (source,), {}, recording.named("tolist")))
    with DisableTorchFunction():
        read = tensor.item()
    node = recording.node("call_method", "item", (source,), {}, recording.named("item"))
    if type(read) not in KINDS:
        recording.guard(node, read)
        return out
    number = recording.bind(read, node)
    return number if name == "item" else type(out)(number)


# --- what stands for Python's `int`, `float`, `len`, `max`, `min`, `set` and `type` in the model's source files: Python makes
# plain numbers of what these give, so that `int(h * 0.5)` would be a guard, and the graph one of that size alone. Each is there
# for models that have one graph for all sizes by it: `int` for Kandinsky6Transformer3DModel, MiniMaxMusic3ConditionEncoder;
# `float` for timm's eva; `len` for ZImageTransformer2DModel, ShapEParamsProjModel; `max` for Kandinsky6SRTransformer3DModel;
# `min` for AnyFlowFARTransformer3DModel; `set` for the lengths of prompts in Lumina2Transformer2DModel. `type` is there because
# of `int`: `type(n) is int` compares with what stands for it.


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
        numbers = any(map(_is_value, items)) and all(isinstance(x, (int, float)) for x in items)
        if numbers and is_counting_distinct(sys._getframe(1)):
            return Distinct(record(ops.number_of_distinct, *items))
        return set(items) if args else set()


# numpy asks a class for its dtype; torch takes none but Python's own, see `RetryState.stand_ins`
Int: Any = _IntStandIn("int", (int,), {"dtype": np.dtype(int)})
Float: Any = _FloatStandIn("float", (float,), {"dtype": np.dtype(float)})
Set: Any = _SetStandIn("set", (set,), {})
Type: Any = _TypeStandIn("type", (type,), {"classes": {int: Int, float: Float, set: Set}})


def _is_value(number: Any) -> bool:
    """Whether a number was read out of a tensor's values: what Python asks of it is a part of the graph, and not a guard."""
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
    """`max` or `min`, recorded for sizes and for numbers that were read out of a tensor's values."""

    def extreme(*args: Any, **kwargs: Any) -> Any:
        items = list(args[0]) if len(args) == 1 and isinstance(args[0], (list, tuple)) and not kwargs else args
        numbers = (isinstance(x, Number) and x.recorder.active for x in items)
        if kwargs or not any(numbers) or not all(isinstance(x, (int, float)) for x in items):
            return function(*args, **kwargs)
        return record(function, *items) if len(items) > 1 else items[0]

    return extreme


def length(value: Any) -> Any:
    """`len`, recorded for a tensor, and for a set of numbers that were read out of one."""
    if type(value) is Distinct:
        return value.count
    return len(value) if not isinstance(value, torch.Tensor) else value.__len__()  # type: ignore[no-untyped-call]


STAND_INS = {"int": Int, "float": Float, "type": Type, "len": length, "set": Set, "max": _extreme(max), "min": _extreme(min)}
KINDS_REPLACED = {"int", "float", "type", "len"}  # a file with any of these names of its own keeps them all
PLAIN = {"type": _TypeStandIn("type", (type,), {"classes": {}})}  # where the model gives `int` to what takes no other
