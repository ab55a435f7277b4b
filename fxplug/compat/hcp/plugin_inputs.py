"""Which inputs a plugin takes out of what `feed_input_data` gets, read from its source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from .base_classes import BasePluginBlock


def list_read_inputs(kind: type[BasePluginBlock], fed: Sequence[str] = ()) -> list[str]:
    """The names that a plugin takes out of its inputs, as far as its source says; `fed`, the names that there are, where it
    goes through all of them.

    Read are its `feed_input_data`, that of a base class which it hands on to or inherits, and what its methods take out of
    `self.input_data`, where HCP-Diffusion's own `feed_input_data` puts the inputs. A key may be a text, or go through texts
    that stand in the loop, or in an attribute of the class or of its module.
    """
    found: dict[str, None] = {}
    for function, data in _readers(kind):
        loops = dict(_loops(function, kind))
        for node in ast.walk(function):
            key = _key(node, data)
            if key is not None:
                found.update(dict.fromkeys(_texts(key, loops)))
            elif _goes_through(node, data):
                found.update(dict.fromkeys(fed))
    return list(found)


def _readers(kind: type) -> Iterator[tuple[ast.FunctionDef, str]]:
    """The methods that may read inputs, each with how it names them."""
    feeding = True  # whether the next feed_input_data is still called
    for owner in kind.__mro__:
        if owner.__module__ == BasePluginBlock.__module__:
            continue
        for name, method in vars(owner).items():
            function = _parsed(method)
            if function is None or not function.args.args:
                continue
            if name == "feed_input_data" and feeding and len(function.args.args) > 1:
                feeding = any(isinstance(node, ast.Attribute) and node.attr == name for node in ast.walk(function))
                yield function, function.args.args[1].arg
            yield function, f"{function.args.args[0].arg}.input_data"


def _parsed(method: Any) -> ast.FunctionDef | None:
    if not inspect.isfunction(method):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, SyntaxError):
        return None
    return tree.body[0] if isinstance(tree.body[0], ast.FunctionDef) else None


def _key(node: ast.AST, data: str) -> ast.expr | None:
    """The key in `data[key]`, `data.get(key)`, `data.pop(key)`."""
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == data:
        return node.slice
    if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in (f"{data}.get", f"{data}.pop"):
        return node.args[0]
    return None


def _goes_through(node: ast.AST, data: str) -> bool:
    """Whether a node takes all that there is: `for key in data`, `data.items()`, `**data`, `update(data)`."""
    if isinstance(node, (ast.For, ast.comprehension)):
        return ast.unparse(node.iter) == data
    if isinstance(node, ast.Call):
        given = [ast.unparse(argument) for argument in (*node.args, *(k.value for k in node.keywords if k.arg is None))]
        own = ast.unparse(node.func)
        return own in (f"{data}.{method}" for method in ("items", "keys", "values")) or (
            data in given and own.rpartition(".")[2] in ("update", "dict", "set_hyper_params")
        )
    return False


def _loops(function: ast.FunctionDef, kind: type) -> Iterator[tuple[str, list[str]]]:
    """The names that go through texts: `for key in ("a", "b")`, `[... for key in self.keys]`."""
    for node in ast.walk(function):
        if not isinstance(node, (ast.For, ast.comprehension)) or not isinstance(node.target, ast.Name):
            continue
        values: Any = None
        if isinstance(node.iter, (ast.Tuple, ast.List, ast.Set)):
            values = [item.value for item in node.iter.elts if isinstance(item, ast.Constant)]
        elif isinstance(node.iter, ast.Attribute):
            values = getattr(kind, node.iter.attr, None)
        elif isinstance(node.iter, ast.Name):
            values = getattr(inspect.getmodule(kind), node.iter.id, None)
        if isinstance(values, (tuple, list, set, frozenset, dict)):
            yield node.target.id, [value for value in values if isinstance(value, str)]


def _texts(key: ast.expr, loops: dict[str, list[str]]) -> list[str]:
    if isinstance(key, ast.Constant) and isinstance(key.value, str):
        return [key.value]
    return loops.get(key.id, []) if isinstance(key, ast.Name) else []
