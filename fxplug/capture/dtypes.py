"""Dtypes that the model reads: a torch function that is given one has it from the graph, what else it decides is a guard."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import fx

from ..ir import ops
from .graph_builder import Nodes
from .user_code import asker, decides_nothing, position, source_line, tree_of, user_frame
from .wording import describe

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
        """`frame` reads the dtype of a tensor."""
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

    def given(self, dtype: torch.dtype) -> Any:
        """A dtype among the arguments of a call: the node that reads it, or the dtype where none is known."""
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

    def decided(self) -> Iterator[tuple[fx.Node, str]]:
        """Reads that went anywhere else, each node once, with words for a guard."""
        seen: set[fx.Node] = set()
        for read in self.all:
            if not read.given and read.node not in seen:
                seen.add(read.node)
                answer = read.node.meta["value"]
                yield read.node, f"{read.where}: '{read.line}' was decided on {describe(read.node)}, {answer} when traced"


class Use(NamedTuple):
    """One dtype among the arguments of a call: read there, `x.to(y.dtype)`, or held by a local name, `x.to(dtype)`."""

    read: Place | None
    name: str


@dataclass
class Source:
    """What a source file does with dtypes."""

    given: set[Place]  # reads that are an argument of a torch function
    held: dict[Place, str]  # reads that go into a local name, which is an argument of torch functions and nothing else
    uses: dict[Place, list[Use]]  # by call


def _place(node: ast.expr) -> Place:
    return node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0


@lru_cache(maxsize=256)
def _reads(file: str) -> Source:
    found = Source(set(), {}, {})
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Call) and (uses := _uses(node)):
            found.uses[_place(node)] = uses
            found.given.update(use.read for use in uses if use.read)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.held.update(_held(node))
    return found


def _uses(call: ast.Call) -> list[Use]:
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
            uses.append(Use(_place(arg), ""))
        elif isinstance(arg, ast.Name):
            uses.append(Use(None, arg.id))
    return uses


def _held(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[Place, str]:
    """Reads that go into a name which is set once, and then given to torch functions only."""
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
