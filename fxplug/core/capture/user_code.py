"""Which lines are the model's own: who asks of a tensor, what its code does with the answer, and how to name a node."""

from __future__ import annotations

import ast
import builtins
import contextlib
import dis
import inspect
import io
import itertools
import linecache
import logging
import os
import re
import sys
import sysconfig
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch

from ..errors import shorten
from ..reading import parse_python
from ..torch_internals import CHECKS

CACHE = type(lru_cache(lambda: None))
STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
CALLER = os.path.join(os.path.dirname(__file__), "edges.py"), "run"  # what called the model: no line of it is above
# libraries that torch works with by itself: what they ask, no model asks
TORCHS = [spec.origin for name in ("filelock", "fsspec", "sympy", "mpmath", "triton") if (spec := find_spec(name))]
PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
FOLDERS = (PACKAGE, *(os.path.dirname(str(file)) for file in (torch.__file__, np.__file__, *TORCHS)))
OWN = tuple(folder + os.sep for folder in FOLDERS)
# torch's own ways to what the model asks it, and parts of the standard library that speak to people
THROUGH = tuple(os.path.join(os.path.dirname(str(torch.__file__)), name) for name in ("_tensor.py", "overrides.py", "_ops.py"))
SPEAKING = tuple(STDLIB + name for name in ("logging" + os.sep, "importlib" + os.sep, "warnings.py", "traceback.py"))
KEEPING = ("catch_warnings", "redirect_stdout", "redirect_stderr")  # what is told to people meanwhile can be read again
# context managers that pass errors on
PASSING = {"no_grad", "enable_grad", "set_grad_enabled", "inference_mode", "autocast", "nullcontext", "record_function"}
HEAP_TYPE = 1 << 9  # the flag of classes that Python code makes
FOREIGN = ("torch", "numpy", "fxplug", "_pytest", "pytest", "pluggy")
MISSING = object()


def is_foreign(cls: type) -> bool:
    """Return whether a class is torch's, Python's own or ours, and none of a model's.

    A class executed from text in a namespace without a name is a model's, though Python says that it is of `builtins`.
    """
    return _is_foreign_name(cls.__module__) and not (cls.__module__ == "builtins" and cls.__flags__ & HEAP_TYPE)


def _is_foreign_name(module: object) -> bool:
    package = module.partition(".")[0] if isinstance(module, str) else ""
    return package in FOREIGN or (package in sys.stdlib_module_names and module != "__main__")


def is_user_code(frame: FrameType) -> bool:
    """Return whether a frame runs the model's own code, not torch, numpy, fxplug or the standard library."""
    file = frame.f_code.co_filename
    if file.startswith("<"):  # no file: typed at a prompt, run from text, or made by Python itself
        return not _is_foreign_name(frame.f_globals.get("__name__"))
    return not file.startswith(OWN) and (not file.startswith(STDLIB) or "-packages" in file)


def find_calling_frame(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the model's own code that asks, starting from `frame`; None if torch, a library, a log or an error
    asks.

    Standard functions in between, such as `json.dumps`, ask on the model's behalf.
    """
    kept = False
    while frame is not None:
        file = frame.f_code.co_filename
        own = file.startswith(THROUGH) or (file.startswith(STDLIB) and "-packages" not in file)
        speaks = file.startswith(SPEAKING)
        kept = kept or (speaks and _is_kept(frame))
        if not own or (speaks and not kept):
            return frame if is_user_code(frame) else None
        frame = frame.f_back
    return None


def is_text_for_people(frame: FrameType) -> bool:
    """Return whether the text that a frame is making goes only into a check, a log or an error."""
    return any(function is None or _is_for_people(frame, function) for function in _around(frame, _texts))


def _is_for_people(frame: FrameType, function: ast.expr) -> bool:
    """Return whether a call writes for people, and not to a text in memory or a class of the model's."""
    logger = _resolved(frame, function.value) if isinstance(function, ast.Attribute) else logging.root
    while isinstance(logger, logging.Logger):
        if any(map(_keeps, logger.handlers)):
            return False
        logger = logger.parent if logger.propagate else None
    called = _resolved(frame, function)
    return _is_logging_call(called) and not (called is builtins.print and type(sys.stdout) is io.StringIO)


def _keeps(handler: logging.Handler) -> bool:
    """Return whether the model can read again what a log handler receives."""
    in_memory = type(handler) is logging.StreamHandler and isinstance(handler.stream, io.StringIO)
    return in_memory or not is_foreign(type(handler))


def _is_kept(frame: FrameType | None) -> bool:
    """Return whether a frame formats a log record for a handler that keeps the text."""
    while frame is not None:
        if isinstance(handler := frame.f_locals.get("self"), logging.Handler):
            return _keeps(handler)
        if not frame.f_code.co_filename.startswith(SPEAKING):
            return False
        frame = frame.f_back
    return False


def is_irrelevant_branch(frame: FrameType) -> bool:
    """Return whether a frame is at a test without influence on the result.

    Either an `if` that only makes tensors contiguous: both branches give the same values (diffusers' upsampling does so above a
    batch of 64, because of a kernel that was wrong once). Or one part of `a and self.flag` with the flag off: the whole is
    false whatever `a` is, as where diffusers checks for gradient checkpointing. Only the plainest of such tests, in which
    nothing can keep the answer, see `_is_plain`.
    """
    if any(_around(frame, _layout_tests)):
        return True
    for stop, others, tested in _around(frame, _operands):
        for other in others:
            value = _resolved(frame, other)
            plain = type(value) is bool or (tested and (value is None or type(value) in (int, float, str)))
            if plain and bool(value) is stop:
                return True
    return False


def is_inside_try(frame: FrameType | None, error: str = "") -> bool:
    """Return whether a frame is in a `try` whose handlers let the code go on; with `error`, in one with a handler of that
    name."""
    if frame is None or not _lines_in_try(frame.f_code.co_filename):
        return False
    return any(error in ("", *names) and _swallows(frame, items) for items, names in _around(frame, _lines_in_try))


@lru_cache(maxsize=1024)
def _lines_in_try(file: str) -> list[Any]:
    """Return the statements in each `try` with a handler that does not end by raising, with the names of the handled errors.

    Also those in each `with` whose manager may swallow an error, as `suppress` does: all that are not known to pass errors
    on.
    """
    tries = list_nodes(file, ast.Try)
    passing = [n for n in tries if not all(isinstance(handler.body[-1], ast.Raise) for handler in n.handlers)]
    kinds = [[n.id for h in t.handlers if h.type for n in ast.walk(h.type) if isinstance(n, ast.Name)] for t in passing]
    withs = list_nodes(file, ast.With, ast.AsyncWith)
    swallowing = [w for w in withs if not all(_called(item.context_expr) in PASSING for item in w.items)]
    places = [_place(part, (None, names)) for n, names in zip(passing, kinds, strict=True) for part in n.body]
    return places + [_place(part, (w.items, _names(w.items))) for w in swallowing for part in w.body]


def _names(items: list[ast.withitem]) -> list[str]:
    """Return the names among the arguments of context managers."""
    return [
        n.id
        for item in items
        if isinstance(item.context_expr, ast.Call)
        for a in item.context_expr.args
        for n in ast.walk(a)
        if isinstance(n, ast.Name)
    ]


def _swallows(frame: FrameType, items: list[ast.withitem] | None) -> bool:
    """Return whether a `try`, or one of these context managers, may continue after an error; torch's own do not."""
    if items is None:
        return True
    for item in items:
        made = item.context_expr
        value = _resolved(frame, made.func if isinstance(made, ast.Call) else made)
        module = getattr(value, "__module__", None) or type(value).__module__
        if value is MISSING or module == "contextlib" or not _is_foreign_name(module):
            return True
    return False


@cache
def has_builtin_dtypes(file: str) -> bool:
    """Return whether a source file passes `int` or `float` as a dtype, for which torch accepts no other class."""
    return bool(re.search(r"(dtype\s*=|\.(to|type)\()\s*(int|float)\b", _text(file)))


@cache
def find_names(file: str, names: frozenset[str]) -> frozenset[str]:
    """Return which of some Python names occur in a source file; all of them if that is unknown."""
    words = set(re.findall(r"\w+", _text(file)))
    return names if not words or words & {"exec", "eval", "compile"} else names & words


def _text(file: str) -> str:
    try:
        return Path(file).read_text("utf-8")
    except (OSError, ValueError):
        return ""


def is_comparing_identity(frame: FrameType | None) -> bool:
    """Return whether a frame is in a function that compares two values by identity."""
    return frame is not None and bool(_identities(frame.f_code.co_filename)) and any(_around(frame, _identities))


@lru_cache(maxsize=1024)
def _identities(file: str) -> list[Any]:
    """Return the functions with an `a is b` in which neither is a constant."""
    if not any(map(_asks_identity, list_nodes(file, ast.Compare))):
        return []
    functions = list_nodes(file, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    return [_place(f, True) for f in functions if any(map(_asks_identity, ast.walk(f)))]


def _asks_identity(node: ast.AST) -> bool:
    if not isinstance(node, ast.Compare) or not any(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
        return False
    return not any(isinstance(side, ast.Constant) or _called(side) == "type" for side in (node.left, *node.comparators))


def find_position(frame: FrameType) -> tuple[int, int, int, int] | None:
    """Return line, column, last line and last column of the expression that a frame is at; columns in bytes."""
    first, last, start, end = _positions(frame.f_code)[frame.f_lasti // 2]
    return None if first is None or last is None or start is None or end is None else (first, start, last, end)


@lru_cache(maxsize=4096)
def _positions(code: CodeType) -> list[tuple[int | None, int | None, int | None, int | None]]:
    return list(code.co_positions())


def is_counting_distinct(frame: FrameType) -> bool:
    """Return whether a frame is at the inner call of `len(set(...))`."""
    at = find_position(frame)
    return at is not None and at in _counted_sets(frame.f_code.co_filename)


@lru_cache(maxsize=1024)
def _counted_sets(file: str) -> set[tuple[int, int, int, int]]:
    """Return the positions of the calls of `set` of which only the length is used."""
    calls = [n for n in list_nodes(file, ast.Call) if n.args]
    counts = [n for n in calls if getattr(n.func, "id", "") == "len"]
    sets: list[Any] = [n.args[0] for n in counts if isinstance(n.args[0], ast.Call) and _called(n.args[0]) == "set"]
    return {(n.lineno, n.col_offset, n.end_lineno, n.end_col_offset) for n in sets}


def is_calling_cached(frame: FrameType) -> bool:
    """Return whether a frame is at a call of a function that `functools.lru_cache` keeps the results of."""
    at = find_position(frame)
    called = _calls(frame.f_code.co_filename).get(at) if at is not None else None
    return called is not None and isinstance(_resolved(frame, called), CACHE)


@lru_cache(maxsize=64)
def _calls(file: str) -> dict[tuple[int, int, int | None, int | None], ast.expr]:
    """Return the function of each call in a source file, by the position of the call."""
    return {(n.lineno, n.col_offset, n.end_lineno, n.end_col_offset): n.func for n in list_nodes(file, ast.Call)}


def count_unpacked(frame: FrameType) -> int | None:
    """Return how many names a frame unpacks the result of its present call into, `a, b = x.chunk(2)`; otherwise None."""
    return _unpacking(frame.f_code).get(frame.f_lasti)


@lru_cache(maxsize=4096)
def _unpacking(code: CodeType) -> dict[int, int]:
    found = list(dis.get_instructions(code))
    return {a.offset: b.arg or 0 for a, b in itertools.pairwise(found) if b.opname == "UNPACK_SEQUENCE"}


def _around(frame: FrameType, find: Any) -> list[Any]:
    """Return the notes of `find` on the places in a source file around the expression that a frame is at."""
    at = find_position(frame)
    if at is None:
        return []
    first, start, last, end = at
    places = find(frame.f_code.co_filename)
    return [note for lower, upper, note in places if lower <= (first, start) and (last, end) <= upper]


def _place(part: Any, note: Any) -> tuple[Any, Any, Any]:
    """Return the position of an expression: from (line, column) to (line, column), columns in bytes as in Python."""
    return (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset), note


def list_nodes(file: str, *kinds: type[ast.AST]) -> list[Any]:
    """Return the nodes of some classes in the syntax tree of a source file; none if there is no source."""
    nodes = _parse(file)
    return [node for kind in kinds for node in nodes.get(kind, ())]


@lru_cache(maxsize=64)  # a large file's are tens of megabytes
def _parse(file: str) -> dict[type[ast.AST], list[ast.AST]]:
    """Return the nodes of a source file by their class: walking over a file takes longer than parsing it."""
    found: dict[type[ast.AST], list[ast.AST]] = {}
    with contextlib.suppress(SyntaxError, ValueError):
        for node in ast.walk(parse_python("".join(linecache.getlines(file)))):
            found.setdefault(type(node), []).append(node)
    return found


@lru_cache(maxsize=1024)
def _layout_tests(file: str) -> list[Any]:
    """Return the tests of each `if` that makes tensors contiguous."""
    ifs = [n for n in list_nodes(file, ast.If) if not n.orelse and _is_plain(n.test)]
    return [_place(n.test, True) for n in ifs if all(map(_makes_contiguous, n.body))]


PLAIN = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Attribute, ast.Name, ast.Constant, ast.Subscript, ast.Tuple)
PLAIN += (ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context)  # type: ignore[assignment]


def _is_plain(test: ast.expr) -> bool:
    """Return whether a test has names, numbers, comparisons and calls without arguments: its answer goes nowhere else."""
    parts = list(ast.walk(test))
    calls = [n for n in parts if isinstance(n, ast.Call)]
    if any(n.keywords or not all(isinstance(a, ast.Constant) for a in n.args) for n in calls):
        return False
    return all(isinstance(n, (*PLAIN, ast.Call)) for n in parts)


def _makes_contiguous(statement: ast.stmt) -> bool:
    """Return whether a statement is `x = x.contiguous()`."""
    if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.value, ast.Call)):
        return False
    function = statement.value.func
    same = isinstance(function, ast.Attribute) and ast.unparse(function.value) == ast.unparse(statement.targets[0])
    return same and _called(statement.value) == "contiguous" and not statement.value.args and not statement.value.keywords


@lru_cache(maxsize=1024)
def _operands(file: str) -> list[Any]:
    """Return the plain parts of each `and` and `or` in a test, with the value that decides the whole and the names that follow.

    Elsewhere such an expression returns one of its parts, so that only parts which are true or false may be left out.
    """
    tests = {id(part) for n in list_nodes(file, ast.If, ast.While, ast.IfExp, ast.Assert) for part in _tested(n.test)}
    found = []
    for node in list_nodes(file, ast.BoolOp):
        for index, part in enumerate(node.values):
            names = [p for p in node.values[index + 1 :] if isinstance(p, (ast.Name, ast.Attribute))]
            tested = id(node) in tests
            if names and _is_plain(part) and (tested or _is_truth(part)):
                found.append(_place(part, (isinstance(node.op, ast.Or), names, tested)))
    return found


def _tested(test: ast.expr) -> list[ast.expr]:
    """Return the parts of a test of which only the truth value matters."""
    inner = test.values if isinstance(test, ast.BoolOp) else [test.operand] if isinstance(test, ast.UnaryOp) else []
    return [test, *(part for value in inner for part in _tested(value))]


def _is_truth(part: ast.expr) -> bool:
    """Return whether an expression evaluates to True or False."""
    return (
        isinstance(part, ast.Compare)
        or (isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Not))
        or _called(part).startswith("is_")
    )


@lru_cache(maxsize=1024)
def _texts(file: str) -> list[Any]:
    """Return texts made for `raise`, and texts in calls that are statements, with the called function."""
    found = []
    tries = [t for t in list_nodes(file, ast.Try) if t.handlers]
    caught = {id(n) for t in tries for part in t.body for n in ast.walk(part)}  # a text that may be read again
    kept = [w for w in list_nodes(file, ast.With) if any(_called(item.context_expr) in KEEPING for item in w.items)]
    caught |= {id(n) for w in kept for part in w.body for n in ast.walk(part)}
    for node in list_nodes(file, ast.Raise, ast.Expr):
        call = node.exc if isinstance(node, ast.Raise) else node.value
        if isinstance(call, ast.Call) and id(node) not in caught and not any(map(_is_stream, call.keywords)):
            function = None if isinstance(node, ast.Raise) else call.func
            todo: list[ast.expr] = [*call.args[_called(call) in CHECKS :], *(k.value for k in call.keywords)]
            while todo:
                part = todo.pop()
                if isinstance(part, ast.Lambda):
                    todo.append(part.body)
                if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Add):
                    todo += [part.left, part.right]
                percent = isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod) and isinstance(part.left, ast.Constant)
                if percent or isinstance(part, ast.JoinedStr) or _called(part) in ("str", "repr", "format"):
                    found.append(_place(part, function))
    return found


def _is_stream(keyword: ast.keyword) -> bool:
    """Return whether a keyword is `file=...` with a stream other than those of the process, which may be read again."""
    return keyword.arg == "file" and ast.unparse(keyword.value) not in ("None", "sys.stdout", "sys.stderr")


def _resolved(frame: FrameType, name: ast.expr) -> Any:
    """Return the value of a name such as `self.flag` in a frame, found without running anything; MISSING if unknown."""
    if isinstance(name, ast.Name):
        for space in (frame.f_locals, frame.f_globals, vars(builtins)):
            if name.id in space:
                return space[name.id]
        return MISSING
    if isinstance(name, ast.Call) and _resolved(frame, name.func) is logging.getLogger:
        return logging.root
    if not isinstance(name, ast.Attribute):
        return MISSING
    owner = _resolved(frame, name.value)
    if owner is MISSING:
        return MISSING
    if isinstance(owner, torch.nn.Module) and name.attr == "training":
        return owner.training  # the one that is worth asking for: the run must know that it was read
    found = inspect.getattr_static(owner, name.attr, MISSING)
    if found is MISSING and isinstance(owner, torch.nn.Module):
        found = owner._modules.get(name.attr, MISSING)
    return found


def _is_logging_call(function: Any) -> bool:
    """Return whether a function writes for people, or checks a condition: its text goes nowhere else."""
    if function is builtins.print or (callable(function) and function in vars(logging.Logger).values()):
        return True
    module, name = getattr(function, "__module__", None), getattr(function, "__name__", "")
    return module in ("logging", "warnings", "_warnings") or (module == "torch" and name in CHECKS)


def _called(node: ast.AST) -> str:
    """Return the last name of the function that a call calls."""
    function = getattr(node, "func", None) if isinstance(node, ast.Call) else None
    return str(getattr(function, "attr", getattr(function, "id", "")))


def find_source_line(error: BaseException | None = None) -> tuple[str, str]:
    """Return file:line and text of the innermost line of the user's code that is running, or that raised an error."""
    if error is not None:
        ran = [(frame, line) for frame, line in walk_tb(error.__traceback__) if is_user_code(frame)]
        return line_of(*ran[-1]) if ran else ("?", "?")
    frame = find_user_frame()
    return ("?", "?") if frame is None else line_of(frame, frame.f_lineno)


def find_user_frame() -> FrameType | None:
    """Return the innermost frame of the user's code that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) != CALLER:
        if is_user_code(frame):
            return frame
        frame = frame.f_back
    return None


def line_of(frame: FrameType, number: int) -> tuple[str, str]:
    """Return file:line of a frame, and the text of the line."""
    file = frame.f_code.co_filename
    return f"{shorten_path(file)}:{number}", shorten(linecache.getline(file, number).strip(), 70)


def shorten_path(file: str) -> str:
    """Return a source path without the part that differs between machines."""
    file = os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file
    return re.sub(r"^.*(?:site-packages|dist-packages)/", "", file)
