"""Conditions on the sizes of inputs, as torch.export writes them: read as Python, evaluated by tables of our own, in bounds."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..core.errors import FxplugError, quote
from ..core.reading import parse_python

# what a condition is written in: no braces, colons, backslashes, so that there is little for a parser to get lost in
CONDITION = re.compile(r"[\w\s.,()\[\]'+\-*/%<>=!]+\Z", re.ASCII)
DEEPEST = 200  # how deep a condition nests
LARGEST = 256  # bits of a whole number in one, and its largest exponent or number of places


def _power(base: float, exponent: float) -> Any:
    if abs(exponent) > LARGEST:
        raise OverflowError(f"{exponent} is too large an exponent")
    return base**exponent


def _round(number: float, places: int = 0) -> Any:
    if abs(places) > LARGEST:
        raise OverflowError(f"{places} decimal places are too many")
    return round(number, places) if places else round(number)


ARITHMETIC: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv, ast.Mod: operator.mod, ast.Pow: _power, ast.USub: operator.neg, ast.Not: operator.not_,
}  # fmt: skip
COMPARISONS: dict[type, Callable[..., Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "math.ceil": math.ceil, "math.floor": math.floor, "math.trunc": math.trunc, "math.sqrt": math.sqrt, "min": min, "max": max,
    "abs": abs, "round": _round, "torch.sym_float": float, "torch.sym_int": int, "torch.sym_max": max, "torch.sym_min": min,
    "torch.sym_not": operator.not_, "torch.sym_ite": lambda test, a, b: a if test else b,
}  # fmt: skip


def parse(text: str) -> ast.expr:
    """Parse a condition. Raises FxplugError for what is no expression."""
    if not CONDITION.match(text):
        raise FxplugError("it is not an expression")
    try:
        tree: ast.expr = parse_python(text, "eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise FxplugError("it is not an expression") from None
    level: list[ast.AST] = [tree]
    for _ in range(DEEPEST):
        level = [inner for outer in level for inner in ast.iter_child_nodes(outer)]
    if level:
        raise FxplugError("it is nested too deeply")
    return tree


def format_condition(text: str) -> str:
    """Return a condition as a user writes it: `image.shape[0] < 64`."""
    return re.sub(r"L\['(\w+)'\]", r"\1", text).replace(".size()", ".shape")


def evaluate(tree: ast.expr, arguments: Mapping[str, Any]) -> bool | int | float:
    """Evaluate an expression of numbers and sizes of the arguments, `L['x'].size()[0]`.

    Raises FxplugError for anything else: no name is looked up and nothing is called outside the tables above. Raises
    ArithmeticError for numbers that are too large, and if there is no result.
    """

    def value(node: ast.expr) -> bool | int | float:
        return evaluate(node, arguments)

    found: Any = None
    try:
        if isinstance(tree, ast.Constant):
            found = tree.value
        elif isinstance(tree, ast.BinOp) and type(tree.op) in ARITHMETIC:
            found = ARITHMETIC[type(tree.op)](value(tree.left), value(tree.right))
        elif isinstance(tree, ast.UnaryOp) and type(tree.op) in ARITHMETIC:
            found = ARITHMETIC[type(tree.op)](value(tree.operand))
        elif isinstance(tree, ast.BoolOp):
            found = (all if isinstance(tree.op, ast.And) else any)(value(member) for member in tree.values)
        elif isinstance(tree, ast.Compare) and all(type(op) in COMPARISONS for op in tree.ops):
            numbers = [value(node) for node in (tree.left, *tree.comparators)]
            pairs = zip(tree.ops, numbers[:-1], numbers[1:], strict=True)
            found = all(COMPARISONS[type(op)](a, b) for op, a, b in pairs)
        elif isinstance(tree, ast.Call) and not tree.keywords and _named(tree.func) in FUNCTIONS:
            found = FUNCTIONS[_named(tree.func)](*map(value, tree.args))
        elif isinstance(tree, ast.Subscript):
            found = _parse_source(tree, arguments)
    except (TypeError, ValueError) as error:  # min of one number, the root of -1
        raise ArithmeticError(str(error)) from None
    if not isinstance(found, (bool, int, float)):
        raise FxplugError(f"{quote(ast.unparse(tree))[1:-1]} is not a size")
    if isinstance(found, int) and found.bit_length() > LARGEST:
        raise OverflowError("the number is too large")
    return found


def _named(function: ast.expr) -> str:
    """Return `max` or `math.ceil`; "" for what is no such name."""
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return f"{function.value.id}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def _parse_source(tree: ast.expr, arguments: Mapping[str, Any]) -> Any:
    """Return `L['x']['y']`, or a size of it; None for anything else."""
    if isinstance(tree, ast.Name) and tree.id == "L":
        return arguments
    if isinstance(tree, ast.Subscript) and isinstance(tree.slice, ast.Constant):
        holder = _parse_source(tree.value, arguments)
        key: Any = tree.slice.value
        try:
            return holder[key] if isinstance(holder, (tuple, list, Mapping)) else None
        except (KeyError, IndexError, TypeError):
            return None
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Attribute) and tree.func.attr == "size":
        tensor = None if tree.args or tree.keywords else _parse_source(tree.func.value, arguments)
        return tensor.shape if isinstance(tensor, torch.Tensor) else None
    return None
