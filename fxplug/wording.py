"""Words for messages: where the model's code is running, and what a node computes, as a person would say it."""

from __future__ import annotations

import ast
import linecache
import os
import re
import sys
import sysconfig
from functools import lru_cache
from traceback import walk_tb
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import fx

from . import targets

STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
CALLER = os.path.join(os.path.dirname(__file__), "entry.py")  # what called the model: no line of the model is above it
OWN = tuple(os.path.dirname(str(file)) + os.sep for file in (torch.__file__, np.__file__, __file__))
# functions whose text is read by people only: all of it, and all but the first argument
TELLING = {"print", "warn", "warning", "warning_once", "warn_once", "debug", "info"}
CHECKS = {"_assert", "_check", "_check_value", "_check_type"}
OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**", "eq": "==", "ne": "!=",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "and_": "and", "or_": "or",
}  # fmt: skip


def is_user_code(frame: FrameType) -> bool:
    """Whether a frame runs the model's own code, not torch, numpy, fxplug or the standard library."""
    file = frame.f_code.co_filename
    return not file.startswith((*OWN, "<")) and (not file.startswith(STDLIB) or "-packages" in file)


def is_text_for_people(frame: FrameType) -> bool:
    """Whether the text that a frame is making goes into a check, a log or an error, and nothing else hangs on it."""
    return _is_within(frame, _texts(frame.f_code.co_filename))


def decides_layout_only(frame: FrameType) -> bool:
    """Whether a frame is at the test of an `if` that does no more than make tensors contiguous: both ways give the same values.

    diffusers' upsampling does so above a batch of 64, because of a kernel that was wrong once.
    """
    return _is_within(frame, _layout_tests(frame.f_code.co_filename))


def _is_within(frame: FrameType, places: list[Any]) -> bool:
    at = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    if None in at:
        return False
    first, last, start, end = at
    return any(lower <= (first, start) and (last, end) <= upper for lower, upper in places)


@lru_cache(maxsize=64)
def _layout_tests(file: str) -> list[Any]:
    """Where in a source file such tests stand: from (line, column) to (line, column)."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return []
    found = [n.test for n in ast.walk(tree) if isinstance(n, ast.If) and not n.orelse and all(map(_makes_contiguous, n.body))]
    return [((test.lineno, test.col_offset), (test.end_lineno, test.end_col_offset)) for test in found]


def _makes_contiguous(statement: ast.stmt) -> bool:
    """`x = x.contiguous()`"""
    if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.value, ast.Call)):
        return False
    function = statement.value.func
    same = isinstance(function, ast.Attribute) and ast.unparse(function.value) == ast.unparse(statement.targets[0])
    return same and _called(statement.value) == "contiguous" and not statement.value.args and not statement.value.keywords


@lru_cache(maxsize=64)
def _texts(file: str) -> list[Any]:
    """Where in a source file text for people stands: from (line, column) to (line, column)."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return []
    found = []
    for call in ast.walk(tree):
        name = _called(call)
        if name in CHECKS or name in TELLING or name.endswith(("Error", "Exception", "Warning")):
            assert isinstance(call, ast.Call)
            todo: list[ast.expr] = [*call.args[name in CHECKS :], *(k.value for k in call.keywords)]
            while todo:
                part = todo.pop()
                if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Add):
                    todo += [part.left, part.right]
                percent = isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod) and isinstance(part.left, ast.Constant)
                if percent or isinstance(part, ast.JoinedStr) or _called(part) in ("str", "repr", "format"):
                    found.append(((part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)))
    return found


def _called(node: ast.AST) -> str:
    """The last name of what a call calls."""
    function = getattr(node, "func", None) if isinstance(node, ast.Call) else None
    return str(getattr(function, "attr", getattr(function, "id", "")))


def source_line(error: BaseException | None = None) -> tuple[str, str]:
    """File:line and text of the innermost line of the user's code that is running, or that raised an error."""
    if error is not None:
        ran = [(frame, line) for frame, line in walk_tb(error.__traceback__) if is_user_code(frame)]
        return line_of(*ran[-1]) if ran else ("?", "?")
    frame = user_frame()
    return ("?", "?") if frame is None else line_of(frame, frame.f_lineno)


def user_frame() -> FrameType | None:
    """The innermost frame of the user's code that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != CALLER:
        if is_user_code(frame):
            return frame
        frame = frame.f_back
    return None


def line_of(frame: FrameType, number: int) -> tuple[str, str]:
    """File:line of a frame, and the text that stands there."""
    file = frame.f_code.co_filename
    return f"{short_path(file)}:{number}", shortened(linecache.getline(file, number).strip(), 70)


def short_path(file: str) -> str:
    """A source path without the part that differs between machines."""
    file = os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file
    return re.sub(r"^.*(?:site-packages|dist-packages)/", "", file)


def shortened(text: str, length: int) -> str:
    """`text` cut in the middle to at most `length` characters."""
    half = (length - 5) // 2
    return text if len(text) <= length else f"{text[:half]} ... {text[-half:]}"


def describe(node: fx.Node) -> str:
    """What a number's node computes, in few words: `sample.size(2) % 8 != 0`."""
    return shortened(_expression(node, 5), 90)


def _expression(node: Any, depth: int) -> str:
    if not isinstance(node, fx.Node):
        return repr(node)
    if "value" not in node.meta:
        return _tensor(node)
    short = targets.short_name(node.target)
    if depth == 0:
        return "..."
    args = [_expression(a, depth - 1) for a in node.args]
    if short in OPERATORS and len(args) == 2:
        # an operand that is a sum or quotient itself stands in brackets
        args = [
            f"({text})" if isinstance(a, fx.Node) and targets.short_name(a.target) in OPERATORS else text
            for a, text in zip(node.args, args, strict=True)
        ]
        return f"{args[0]} {OPERATORS[short]} {args[1]}"
    if node.op == "call_method":
        return f"{args[0]}.{short}({', '.join(args[1:])})"
    return f"{short}({', '.join(args)})"


def _tensor(node: fx.Node) -> str:
    """A tensor: the port it is, else the operation that made it and the region where."""
    port = node.meta.get("port")
    if port is not None:
        return ".".join(map(str, port.keys)) if not port.path and port.side == "in" else str(port)
    if node.op in ("placeholder", "get_attr"):
        return str(node.target)
    region = [*node.meta.get("nn_module_stack", {"": None})][-1]
    short = targets.short_name(node.target)
    return f"{short} in {region}" if region else short
