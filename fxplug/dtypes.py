"""Where the model's code reads the dtype of a tensor, what it does with it: given straight to a torch function, or more."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import NamedTuple

from .wording import position, tree_of

Place = tuple[int, int, int, int]  # line, column, last line, last column
NAMESPACES = {"torch", "F", "nn", "functional"}


class Use(NamedTuple):
    """One dtype among the arguments of a call: read there, `x.to(y.dtype)`, or held by a local name, `x.to(dtype)`."""

    read: Place | None
    name: str


@dataclass
class Reads:
    """What a source file does with dtypes."""

    given: set[Place]  # reads that are an argument of a torch function
    held: dict[Place, str]  # reads that go into a local name, which is an argument of torch functions and nothing else
    uses: dict[Place, list[Use]]  # by call


def place_of(node: ast.expr) -> Place:
    return node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0


def reads(frame: FrameType) -> Reads:
    """What the file of a frame does with dtypes."""
    return _reads(frame.f_code.co_filename)


def at(frame: FrameType) -> Place | None:
    """The expression that a frame is at."""
    return position(frame)


@lru_cache(maxsize=256)
def _reads(file: str) -> Reads:
    found = Reads(set(), {}, {})
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Call) and (uses := _uses(node)):
            found.uses[place_of(node)] = uses
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
            uses.append(Use(place_of(arg), ""))
        elif isinstance(arg, ast.Name):
            uses.append(Use(None, arg.id))
    return uses


def _held(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[Place, str]:
    """Reads that go into a name which is set once, and then given to torch functions only."""
    names = [n for n in ast.walk(function) if isinstance(n, ast.Name)]
    calls = [use.name for n in ast.walk(function) if isinstance(n, ast.Call) for use in _uses(n)]
    found = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(target := node.targets[0], ast.Name):
            value = node.value
            mine = [n for n in names if n.id == target.id]
            loads = sum(isinstance(n.ctx, ast.Load) for n in mine)
            only = len(mine) == loads + 1 and loads == calls.count(target.id)
            if only and isinstance(value, ast.Attribute) and value.attr == "dtype":
                found[place_of(value)] = target.id
    return found
