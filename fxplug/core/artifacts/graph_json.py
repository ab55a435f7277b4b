"""Graphs as JSON, and back: what their text may say, every name checked against a closed list."""

from __future__ import annotations

import ast
import collections
import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx, nn

from ..errors import DEFAULT, ArtifactError, Limits, did_you_mean, quote
from ..ir import functions, ops
from ..ir.graph import Graph, insert, is_indexed
from ..reading import parse_python
from ..spec.addresses import Port
from ..torch_internals.modules import qualified_name
from .document import NodeMeta, NodeRecord, ResultRecord, check_record
from .value_json import (
    TORCH_NAMES,
    Unportable,
    check_name,
    check_path,
    decode,
    encode,
    find_function,
    get_function_name,
    import_class,
    is_allowed,
    is_import_path,
)

COUNTS = {"placeholder": (0, 1), "get_attr": (0,), "output": (1,)}  # how many arguments these can have
GENERATED = ("self", "inf", "nan", "NoneType", "torch", "device", "fx_pytree", "pytree")  # what generated code means by these
PLAIN_META = ("index", "effect", "reads_dtype", "behind", "constant")
STAND_IN = "result"  # the key in node.meta that keeps the name of a result class which a stand-in replaces


# --- functions and result classes


def _result_class(cls: type, meta: dict[str, Any]) -> dict[str, Any] | None:
    if isinstance(meta.get(STAND_IN), dict):
        return dict(meta[STAND_IN])
    record: dict[str, Any] = {"result": f"{cls.__module__}:{cls.__qualname__}"}
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return {**record, "fields": list(cls._fields)}
    return record if issubclass(cls, dict) or dataclasses.is_dataclass(cls) else None


def _find_result(record: Any, allow: Sequence[str]) -> tuple[Any, bool]:
    """Return the class of a result, and whether it is only a stand-in because its own is not allowed."""
    found = check_record(ResultRecord, record, "graph.json: a result class")
    path, fields = found.result, found.fields
    for name in fields or ():
        check_name(name, "field of a result")
    if is_import_path(path) and is_allowed(path.partition(":")[0], allow):
        cls = import_class(path, allow)
        if _result_class(cls, {}) is None:
            raise ArtifactError(f"{path} is not a result class: neither a dataclass nor a NamedTuple nor a dict")
        return cls, False
    if fields is None:
        return ops.Record, True
    name = check_name(path.rpartition(":")[2].rpartition(".")[2], "name of a result class")
    return collections.namedtuple(name, fields, module=ops.__name__), True


# --- graphs


def write_graph(graph: fx.Graph, stacks: list[Any]) -> list[dict[str, Any]]:
    """Return the nodes of a graph as JSON; their module stacks are collected, each once, in `stacks`."""
    known = {repr(stack): index for index, stack in enumerate(stacks)}
    return [_write_node(node, stacks, known) for node in graph.nodes]


def _write_node(node: fx.Node, stacks: list[Any], known: dict[str, int]) -> dict[str, Any]:
    record = {"name": node.name, "op": node.op, "target": _write_target(node)}
    try:
        if node.args:
            record["args"] = [encode(a) for a in node.args]
        if node.kwargs:
            record["kwargs"] = {k: encode(v) for k, v in node.kwargs.items()}
    except Unportable as error:
        raise ArtifactError(f"the node '{node.name}' cannot be saved: {error}") from None
    if meta := _write_meta(node, stacks, known):
        record["meta"] = meta
    return record


def _write_target(node: fx.Node) -> Any:
    if node.op == "call_method" and node.target not in functions.list_methods():
        raise ArtifactError(f"the node '{node.name}' calls the method '{node.target}', which an artifact may not call")
    if node.op != "call_function":
        return node.target
    name = get_function_name(node.target)
    if name is not None:
        return name
    record = _result_class(node.target, node.meta) if isinstance(node.target, type) else None
    if record is None:
        if ops.is_applied(node.target):
            of = node.target.of  # type: ignore[union-attr]
            of = of[0] if isinstance(of, tuple) else of
            called = f"{of.__module__}.{of.__qualname__}"
        else:
            called = torch.overrides.resolve_name(node.target) or repr(node.target)
        region = next(reversed(node.meta.get("nn_module_stack") or {"": None})) or "a submodule"
        raise ArtifactError(
            f"the node '{node.name}' calls {called}, which is not one of the functions that an artifact may call: trace again "
            f"and keep the module that calls it whole, leaf: [{region}]"
        )
    return record


def _write_meta(node: fx.Node, stacks: list[Any], known: dict[str, int]) -> dict[str, Any]:
    meta: dict[str, Any] = {}
    port = node.meta.get("port")
    if isinstance(port, Port):
        meta["port"] = [port.path, port.side, list(port.keys)]
    for key in PLAIN_META:
        if key in node.meta:
            meta[key] = node.meta[key]
    if "shape" in node.meta:
        meta["shape"] = [int(s) for s in node.meta["shape"]]
    if "dtype" in node.meta:
        meta["dtype"] = str(node.meta["dtype"]).removeprefix("torch.")
    for key in ("pass", "call", "named"):
        if node.meta.get(key) is not None:
            meta[key] = encode(node.meta[key])
    stack = node.meta.get("nn_module_stack")
    if stack is not None:
        rows = [[key, path, kind if isinstance(kind, str) else kind.__qualname__] for key, (path, kind) in stack.items()]
        if repr(rows) not in known:
            known[repr(rows)] = len(stacks)
            stacks.append(rows)
        meta["stack"] = known[repr(rows)]
    return meta


class GraphReader:
    """Reads graphs of one artifact: what their nodes may name is known, anything else is refused.

    `modules` and `tensors` are the paths that a graph may call and read.
    """

    def __init__(
        self, modules: Collection[str], tensors: Collection[str], stacks: Any, allow: Sequence[str], limits: Limits = DEFAULT
    ) -> None:
        self.modules, self.tensors, self.allow, self.limits = modules, tensors, allow, limits
        self.stacks = [{key: (path, kind) for key, path, kind in rows} for rows in stacks]
        self.results: dict[str, tuple[Any, bool]] = {}

    def read(self, records: Sequence[NodeRecord]) -> Graph:
        """Return the graph of a list of node records. Raises ArtifactError."""
        graph = Graph()
        nodes: dict[str, fx.Node] = {}
        for record in records:
            name = check_name(record.name, "node name")
            if name in nodes:
                raise ArtifactError(f"graph.json: two nodes are named '{name}'")
            nodes[name] = self._node(graph, name, record, nodes)
        if [r.op for r in records].count("output") != 1 or records[-1].op != "output":
            raise ArtifactError("graph.json: a graph must end with one output node")
        _check_pairs(graph)
        check_program(graph)
        return graph

    def _node(self, graph: Graph, name: str, record: NodeRecord, nodes: dict[str, fx.Node]) -> fx.Node:
        op = record.op
        args = tuple(decode(a, None if op == "placeholder" else nodes, self.limits) for a in record.args)
        kwargs = {check_name(k, "argument name"): decode(v, nodes, self.limits) for k, v in record.kwargs.items()}
        meta = self._meta(record.meta)
        target = self._target(op, name, record.target, meta)
        if op == "call_method" and not (args and isinstance(args[0], fx.Node)):
            raise ArtifactError(f"graph.json: node '{name}' calls the method {quote(target)} without a value to call it on")
        if op in COUNTS and (kwargs or len(args) not in COUNTS[op]):
            raise ArtifactError(f"graph.json: node '{name}' has arguments that a {op} cannot have")
        node = insert(graph, op, target, args, kwargs, name=name, meta=meta)
        if node.name != name or name in GENERATED:
            raise ArtifactError(f"graph.json: '{name}' is not a valid node name: Python or torch reserves it")
        return node

    def _target(self, op: str, name: str, target: Any, meta: dict[str, Any]) -> Any:
        if op == "call_function" and isinstance(target, dict):
            key = repr(target)
            if key not in self.results:
                self.results[key] = _find_result(target, self.allow)
            cls, stands_in = self.results[key]
            if stands_in:
                meta[STAND_IN] = target
            return cls
        if op == "call_function":
            return find_function(target)
        if op == "call_method":
            if type(target) is not str or target not in functions.list_methods():
                near = did_you_mean(target, functions.list_methods())
                raise ArtifactError(f"graph.json: {quote(target)} is not a method that a graph may call{near}")
        elif op == "get_attr":
            if check_path(target, "attribute") not in self.tensors:
                raise ArtifactError(f"graph.json: node '{name}' reads {quote(target)}, which is not a tensor of the artifact")
        elif op == "call_module":
            if check_path(target, "module path") not in self.modules:
                raise ArtifactError(f"graph.json: node '{name}' calls {quote(target)}, which is not a module of the artifact")
        elif op == "placeholder":
            plain = check_name(target.removeprefix("*").removeprefix("*") if type(target) is str else target, "argument")
            if plain in ("self", "torch"):
                raise ArtifactError(f"graph.json: '{plain}' cannot be the name of an argument")
        elif target != "output":
            raise ArtifactError(f"graph.json: the output node has the target {quote(target)}")
        return target

    def _meta(self, record: NodeMeta) -> dict[str, Any]:
        said = record.model_fields_set
        meta: dict[str, Any] = {key: getattr(record, key) for key in PLAIN_META if key in said}
        if "stack" in said:
            meta["nn_module_stack"] = self.stacks[record.stack]
        if record.port is not None:
            path, side, keys = record.port
            meta["port"] = Port(path, side, tuple(keys))
        if "shape" in said:
            meta["shape"] = tuple(record.shape)
        if record.dtype:
            meta["dtype"] = decode({"dtype": record.dtype})
        values = {"pass": record.passed, "call": record.call, "named": record.named}
        return {**meta, **{key: decode(value) for key, value in values.items() if value is not None}}


def _check_pairs(graph: fx.Graph) -> None:
    """Raise ArtifactError for a graph that changes how torch runs, as `no_grad` and `autocast` do, and does not change it back
    in order."""
    pairs = {ops.exit_grad: ops.enter_grad, ops.exit_autocast: ops.enter_autocast}
    inside: list[fx.Node] = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in pairs.values():
            if [user.target for user in node.users] != [leave for leave, enter in pairs.items() if enter is node.target]:
                raise ArtifactError(f"graph.json: '{node.name}' changes a mode of torch, and no node restores it")
            inside.append(node)
        elif node.target in pairs:
            last = inside.pop() if inside else None
            if last is None or node.args != (last,) or node.kwargs or last.target is not pairs[node.target]:
                raise ArtifactError(f"graph.json: '{node.name}' restores a mode of torch that is not the last one changed")


# names of Python that FX writes for values, `slice(0, 1, None)`, and those of values of torch, `torch.float16`
WORDS = {"self", "torch", "slice", "range", "complex", "int", "float", "bool", "Ellipsis", "round", "pow", "Size"}
WORDS.update(*TORCH_NAMES.values())
SYNTAX = (
    ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Assign, ast.AugAssign, ast.Return, ast.Call, ast.Name,
    ast.Attribute, ast.Subscript, ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.BinOp, ast.UnaryOp, ast.Compare,
    ast.Starred, ast.keyword, ast.Slice, ast.operator, ast.unaryop, ast.cmpop, ast.expr_context,
)  # fmt: skip


def check_program(graph: Graph) -> None:
    """Raise ArtifactError for a graph whose code has a statement, or a name, that its nodes do not have.

    The code is FX's, which quotes texts and numbers; a stranger's runs only after this, whatever FX made of them.
    """
    program = graph.python_code("self")
    known = {*WORDS, *program.globals}
    for node in graph.nodes:
        target = qualified_name(node.target) if node.op == "call_function" else str(node.target)
        known.update((node.name, *target.lstrip("*").split(".")))
    try:
        count = 0
        for part in ast.walk(parse_python(program.src)):
            count += isinstance(part, ast.FunctionDef)
            name = getattr(part, "id", None) or getattr(part, "attr", None)
            if not isinstance(part, SYNTAX) or count > 1 or (name is not None and name not in known):
                raise SyntaxError(f"{quote(ast.unparse(part))} is not part of the graph")
    except (SyntaxError, ValueError, MemoryError) as error:
        raise ArtifactError(
            f"graph.json: a text in it would be executed as code, so the artifact is damaged or malicious: {error}"
        ) from None


# --- the tree


def resolve_path(root: nn.Module, path: str) -> Any:
    """Return the module, parameter or buffer at `self.<path>`, which must be the one that the tables declare.

    Raises ArtifactError if an attribute or method of a class, or an attribute of the module, would be reached on the way.
    """
    found: Any = root
    for place, key in enumerate(path.split(".")):
        if not isinstance(found, nn.Module):
            raise ArtifactError(f"'{path}' names a part of a tensor")
        declared = [table[key] for table in (found._parameters, found._buffers, found._modules) if key in table]
        if len(declared) != 1 or declared[0] is None:
            raise ArtifactError(f"'{path}' is not one module, parameter or buffer of the model")
        try:
            at: Any = int(key) if key.isdigit() else key
            taken = found[at] if is_indexed(key, first=place == 0) else getattr(found, key)  # type: ignore[index]
        except (LookupError, AttributeError, TypeError):
            taken = None
        if taken is not declared[0]:
            raise ArtifactError(
                f"{quote(path)} is not a path of the model: {quote(key)} is part of every {type(found).__name__}"
            )
        found = declared[0]
    return found
