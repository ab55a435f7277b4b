"""What the text of a graph may say: the graph's own nodes, functions of the closed list, and paths of its own tree."""

from __future__ import annotations

import ast
import itertools
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..errors import ArtifactError, shown
from ..files.reading import syntax_tree
from ..ir.containers import Container
from ..ir.graph import Graph, by_index, without_edges
from ..ir.traced_module import TracedModule
from ..torch_internals.graphs import qualified_name
from .value_json import TORCH_NAMES

# names of Python that FX writes for values, `slice(0, 1, None)`
RESERVED = {"self", "torch", "slice", "range", "complex", "int", "float", "bool", "Ellipsis", "round", "pow"}
NAMES = {"Size", *itertools.chain(*TORCH_NAMES.values())}
PLAIN = (
    ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Starred, ast.keyword, ast.Slice,
    ast.operator, ast.unaryop, ast.cmpop, ast.expr_context,
)  # fmt: skip
HOLDERS = (Container, TracedModule, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
SETITEM = qualified_name(operator.setitem)
GETTERS = [vars(holder)["__getitem__"] for holder in HOLDERS]


def check_program(graph: Graph) -> None:
    """Refuse a graph whose text says anything that its nodes do not. Raises ArtifactError.

    The text is FX's; the code of a stranger's graph runs only after this, whatever FX made of its names and values.
    """
    program = graph.python_code("self")
    try:
        (function,) = syntax_tree(program.src).body
        if not isinstance(function, ast.FunctionDef) or function.decorator_list or function.returns:
            raise SyntaxError("it is not one function")
        _Reader(graph, program.globals).check(function)
        said = sorted(text for node in without_edges(graph).nodes for text in _texts([node.args, *node.kwargs.values()]))
        if sorted(_constants(function)) != said:
            raise SyntaxError("a text in it is not the same text in the code")
    except (SyntaxError, ValueError, MemoryError) as error:
        raise ArtifactError(
            f"graph.json: a text in it would be read as code; the artifact is damaged or hostile: {error}"
        ) from None


def _texts(value: Any) -> Iterator[str]:
    """The texts in the arguments of a node; a device is written with one."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, torch.device):
        yield value.type
    elif isinstance(value, slice):
        yield from _texts((value.start, value.stop, value.step))
    elif isinstance(value, (tuple, list)):
        for member in value:
            yield from _texts(member)
    elif isinstance(value, dict):
        yield from _texts([*value.keys(), *value.values()])


def _constants(tree: ast.AST) -> Iterator[str]:
    """The texts in code, but for those that are steps of a path."""
    if isinstance(tree, ast.Constant) and isinstance(tree.value, str):
        yield tree.value
    if not isinstance(tree, ast.Subscript) or _path(tree) is None:
        for part in ast.iter_child_nodes(tree):
            yield from _constants(part)


def _path(tree: ast.expr) -> str | None:
    """The path that `self.blocks[0].attn` reaches, None for what begins with anything but `self`."""
    if isinstance(tree, ast.Name):
        return "" if tree.id == "self" else None
    if isinstance(tree, ast.Attribute):
        name = tree.attr
    elif isinstance(tree, ast.Subscript) and isinstance(tree.slice, ast.Constant):
        name = str(tree.slice.value)
    else:
        return None
    before = _path(tree.value)
    return None if before is None else f"{before}.{name}" if before else name


class _Reader:
    def __init__(self, graph: Graph, values: dict[str, Any]) -> None:
        nodes = list(graph.nodes)
        arguments = [node for node in nodes if node.op == "placeholder"]
        self.arguments = {node.target.lstrip("*") for node in arguments}
        self.globals = values
        self.functions = {qualified_name(node.target) for node in nodes if node.op == "call_function"}
        self.methods = {node.target for node in nodes if node.op == "call_method"}
        self.paths = {node.target for node in nodes if node.op in ("get_attr", "call_module")}
        if len(self.arguments) != len(arguments) or self.arguments & {n.name for n in nodes if n.op != "placeholder"}:
            raise SyntaxError("an argument has the name of another value")

    def check(self, function: ast.FunctionDef) -> None:
        given = function.args
        for default in (*given.defaults, *given.kw_defaults):
            if default is not None:
                self.expression(default, set())
        names = {arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg) if arg}
        if names != self.arguments | {"self"}:
            raise SyntaxError("its arguments are others")
        for statement in function.body:
            self.statement(statement, names)

    def statement(self, statement: ast.stmt, known: set[str]) -> None:
        """One of `x = value`, `x += value`, `x[key] = value`, `x = y = None` and `return value`."""
        if not isinstance(statement, (ast.Assign, ast.AugAssign, ast.Return)) or statement.value is None:
            raise SyntaxError(f"{shown(ast.unparse(statement))} is no node")
        self.expression(statement.value, known)
        if isinstance(statement, ast.AugAssign):
            self.expression(statement.target, known)
        elif isinstance(statement, ast.Assign):
            for place in statement.targets:
                if isinstance(place, ast.Subscript) and _path(place) is None and SETITEM in self.functions:
                    self.expressions([place.value, place.slice], known)
                    continue
                if not isinstance(place, ast.Name) or place.id in self.globals or place.id in RESERVED:
                    raise SyntaxError(f"{shown(ast.unparse(place))} is no name of a node")
                known.add(place.id)

    def expression(self, tree: ast.AST, known: set[str]) -> None:
        if isinstance(tree, ast.Call):
            self.call(tree.func, known)
            self.expressions([*tree.args, *tree.keywords], known)
        elif isinstance(tree, ast.Name):
            if tree.id == "self" or not (tree.id in known or tree.id in self.globals or tree.id in RESERVED):
                raise SyntaxError(f"'{tree.id}' is no name of a node")
        elif isinstance(tree, ast.Subscript) and _path(tree) is None:
            self.expressions([tree.value, tree.slice], known)
        elif isinstance(tree, (ast.Attribute, ast.Subscript)):
            text = ast.unparse(tree)
            if _path(tree) not in self.paths and text.removeprefix("torch.") not in NAMES:
                raise SyntaxError(f"{shown(text)} is no part of the model")
        elif isinstance(tree, PLAIN):
            self.expressions(ast.iter_child_nodes(tree), known)
        else:
            raise SyntaxError(f"{shown(ast.unparse(tree))} is no value")

    def expressions(self, trees: Iterable[ast.AST], known: set[str]) -> None:
        for tree in trees:
            self.expression(tree, known)

    def call(self, function: ast.expr, known: set[str]) -> None:
        """A function of the graph, a module of the tree, or a method of a value."""
        path, text = _path(function), ast.unparse(function)
        if path is not None:
            allowed = path in self.paths
        elif isinstance(function, ast.Name):
            allowed = text in self.globals or text in RESERVED
        else:
            allowed = text in self.functions or text == "torch.Size"
            if not allowed and isinstance(function, ast.Attribute) and function.attr in self.methods:
                allowed = True
                self.expression(function.value, known)
        if not allowed:
            raise SyntaxError(f"{shown(text)} is nothing that the graph calls")


# --- the tree


def reach(root: nn.Module, path: str) -> Any:
    """The module, parameter or buffer that `self.<path>` gives, which has to be the one that the tables declare.

    Raises ArtifactError where an attribute or method of a class, or an attribute of the module, would be met on the way.
    """
    found: Any = root
    for place, key in enumerate(path.split(".")):
        if not isinstance(found, nn.Module):
            raise ArtifactError(f"'{path}' leads into a tensor")
        declared = [table[key] for table in (found._parameters, found._buffers, found._modules) if key in table]
        if len(declared) != 1 or declared[0] is None:
            raise ArtifactError(f"'{path}' is no one module, parameter or buffer of the model")
        if by_index(key, first=place == 0):
            taken = _indexed(found, key)
        else:
            known = key in vars(found) or any(key in vars(base) for base in type(found).__mro__)
            taken = None if known else declared[0]
        if taken is not declared[0]:
            raise ArtifactError(f"{shown(path)} is no path of the model: {shown(key)} is part of every {type(found).__name__}")
        found = declared[0]
    return found


def _indexed(module: nn.Module, key: str) -> Any:
    """What `module[key]` gives, None where it is not torch or this package that answers."""
    getter = next((vars(base)["__getitem__"] for base in type(module).__mro__ if "__getitem__" in vars(base)), None)
    try:
        return module[int(key) if key.isdigit() else key] if getter in GETTERS else None  # type: ignore[index]
    except (LookupError, AttributeError, TypeError):
        return None
