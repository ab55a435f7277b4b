"""Nodes in few words, as messages about guards have them."""

from __future__ import annotations

from typing import Any

from torch import fx

from ..errors import shorten
from ..ir import functions

OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**", "eq": "==", "ne": "!=",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "and_": "and", "or_": "or",
}  # fmt: skip


def describe(node: fx.Node) -> str:
    """Describe what a number's node computes, in few words: `sample.size(2) % 8 != 0`."""
    return shorten(_expression(node, 5), 90)


def _expression(node: Any, depth: int) -> str:
    if not isinstance(node, fx.Node):
        return repr(node)
    if "value" not in node.meta:
        return _tensor(node)
    short = functions.get_short_name(node.target)
    if depth == 0:
        return "..."
    args = [_expression(a, depth - 1) for a in node.args]
    if short in OPERATORS and len(args) == 2:
        # an operand that is a sum or quotient itself stands in brackets
        args = [
            f"({text})" if isinstance(a, fx.Node) and functions.get_short_name(a.target) in OPERATORS else text
            for a, text in zip(node.args, args, strict=True)
        ]
        return f"{args[0]} {OPERATORS[short]} {args[1]}"
    if short == "autograd_query":
        return f"{args[0]}.{node.args[1]}"
    if node.op == "call_method":
        return f"{args[0]}.{short}({', '.join(args[1:])})"
    return f"{short}({', '.join(args)})"


def _tensor(node: fx.Node) -> str:
    """Describe a tensor: the port it is at, else the operation that computes it and its region."""
    port = node.meta.get("port")
    if port is not None:
        return ".".join(map(str, port.keys)) if not port.path and port.side == "in" else str(port)
    if node.op in ("placeholder", "get_attr"):
        return str(node.target)
    region = [*node.meta.get("nn_module_stack", {"": None})][-1]
    short = functions.get_short_name(node.target)
    return f"{short} in {region}" if region else short
