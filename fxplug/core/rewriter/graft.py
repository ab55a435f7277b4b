"""One graph put into another: the networks of passes, blocks that are traced, leaves that are opened."""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from ..capture.tracer import trace
from ..errors import SpecError, TraceError
from ..ir import ops
from ..ir.containers import Container, get_plain_attributes, list_leaves, list_tensors, map_leaves
from ..ir.graph import ENTRY, MODES, Graph, erase, get_meta, insert, is_added, redirect
from ..ir.regions import RegionNodes, Regions
from ..ir.traced_module import TracedModule
from ..spec.addresses import Port, make_identifier
from ..spec.rules import Pass
from ..torch_internals.tensors import memory_id
from .sites import ValueUse, replace_leaf_uses

CHECKS = ENTRY  # of the inputs, which are the host's values here


def trace_module(module: nn.Module, args: Any, kwargs: Mapping[str, Any], what: str) -> TracedModule:
    """Trace a module for values of a host graph, represented by their shapes. Raises TraceError that names it by `what`."""
    if isinstance(module, TracedModule):
        return module
    try:
        return trace(module, *map_leaves((args, kwargs), _example, kind=fx.Node))
    except (TraceError, SpecError) as error:
        raise type(error)(f"{what}: {error}") from error
    except Exception as error:  # the network's or torch's
        shapes = ", ".join(f"{n.name} {list(n.meta['shape'])}" for n in list_leaves((args, kwargs)) if isinstance(n, fx.Node))
        raise TraceError(f"{what} fails on {shapes or 'its inputs'}: {type(error).__name__}: {error}") from error


def _example(node: fx.Node, _: Any) -> Any:
    if "shape" not in node.meta:
        raise TraceError(f"the value '{node.name}' must be a tensor whose shape is known")
    return torch.empty(node.meta["shape"], dtype=node.meta["dtype"], device="meta")


class Traces:
    """The graphs of blocks and leaves that are put into graphs, each traced once."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[nn.Module, TracedModule]] = {}  # with the module, whose id may be a part of the key
        self._base: dict[tuple[Any, ...], str] = {}
        self._homes: dict[int, str] = {}

    def of(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any], what: str) -> TracedModule:
        """Return the trace of a module for values of these shapes. Leaves that differ in their weights alone share one."""
        rows = map_leaves((args, dict(kwargs)), lambda n, _: get_meta(n), kind=fx.Node)
        own: Any = id(module)
        if not module._modules and type(module).__module__.startswith("torch.nn."):
            tensors = {**module._parameters, **module._buffers}
            shapes = tuple((k, None if t is None else (tuple(t.shape), t.dtype)) for k, t in tensors.items())
            own = (type(module), repr(sorted(get_plain_attributes(module).items())), shapes)
        key = (own, repr(rows))
        _, found = self._known.get(key, (module, None))
        if found is None or (found.twin_error and found.training != module.training):  # it has the graph of one mode alone
            found = trace_module(module, args, kwargs, what)
            self._known[key] = module, found
        return found

    def share_weights(self, name: str, block: nn.Module, own: nn.Module, tree: nn.Module) -> dict[str, str]:
        """Return the names in another block of modules that this block shares with it; they are removed from `own`.

        `own` is the tree of the block's trace, at `name` in `tree`. A module is in the first block that has it, with what all
        of them call.
        """
        found = {}
        for child, module in block.named_children():
            home = self._homes.setdefault(id(module), f"{name}.{child}")
            if home == f"{name}.{child}":
                continue
            _move(own.get_submodule(child), tree.get_submodule(home), module)
            if not any(True for _ in own.get_submodule(child).buffers()):
                del own._modules[child]
            inside = [*module.named_modules(), *module.named_parameters(), *module.named_buffers()]
            found.update({f"{child}.{key}": f"{home}.{key}" for key, _ in inside})
        return found

    def weights_of_base(self, name: str, own: nn.Module, tree: nn.Module) -> dict[str, str]:
        """Return the constants of a trace that are weights of the model, with the model's names; they are removed from `own`.

        `own` is at `name` in `tree`: its own buffers that are not saved look like constants, and stay. A block that reads the
        layer it was made for (`site.module.weight`) finds the layer's own weight this way.
        """
        if not self._base:
            self._base = {_memory(tensor): name for name, tensor in reversed(list(list_tensors(tree)))}
        found = {}
        for key, tensor in list(own.named_buffers()):
            path, _, last = key.rpartition(".")
            owner = own.get_submodule(path)
            home = self._base.get(_memory(tensor)) if last in owner._non_persistent_buffers_set else None
            if home is not None and not home.startswith(f"{name}."):
                found[key] = home
                del owner._buffers[last]
                owner._non_persistent_buffers_set.discard(last)
        return found


def _move(own: nn.Module, home: nn.Module, module: nn.Module) -> None:
    """Remove the tensors of `module` from a tree, and move the layers that it calls to `home`; constants of the trace stay."""
    own._parameters.clear()
    for key in module._buffers:
        own._buffers.pop(key, None)
    for key, child in module._modules.items():
        here, there = own._modules.get(key), home._modules.get(key)
        if child is None or here is None or there is None:
            continue
        if isinstance(here, Container):
            _move(here, there, child)
        else:
            home._modules[key] = own._modules.pop(key)


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that identifies the tensor's storage and geometry, on the meta device too: a detached one has the same."""
    return memory_id(tensor.untyped_storage()), tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


class Graft:
    """A graph that is copied into `host`: its modules lie at `path`, its regions begin with `key`.

    Every node runs as soon as its inputs are there, in the order of the graph it comes from, not before `after`. With
    `edges` the root's own edges come along, which make its inputs and results ports of the region `key`.
    """

    def __init__(
        self,
        host: Graph,
        path: str,
        key: str,
        stack: Mapping[str, Any],
        made_by: Mapping[str, Any],
        after: fx.Node | None = None,
        edges: bool = False,
    ) -> None:
        self.host, self.path, self.key, self.stack, self.made_by = host, path, key, dict(stack), dict(made_by)
        self.cursor = after
        self.edges = edges
        self.values: dict[fx.Node, Any] = {}
        self.nodes: list[fx.Node] = []
        self.base: dict[str, str] = {}  # constants that are weights of the host

    def put(self, graph: fx.Graph, inputs: Mapping[str, Any]) -> Any:
        """Copy the nodes of a graph; return its result, with the same nesting, in nodes of the host."""
        result = None
        given = [n for n in list_leaves(dict(inputs)) if isinstance(n, fx.Node)]
        if given and any(n.target in MODES for n in graph.nodes if n.op == "call_function"):
            self.cursor = max([*given, *([self.cursor] if self.cursor is not None else [])])
        for node in graph.nodes:
            if node.op == "placeholder":
                self.values[node] = inputs[str(node.target).lstrip("*")]
            elif node.op == "output":
                result = self.mapped(node.args[0])
            elif node.op == "call_function" and node.target in CHECKS:
                continue
            elif node.target is ops.put_members and not isinstance(self.mapped(node.args[0]), fx.Node):
                continue  # a list or dict that is made for this code alone: what is returned has its members
            else:
                self.values[node] = self.copied(node)
        return result

    def mapped(self, value: Any) -> Any:
        """Map a nested value of the copied graph to nodes of the host."""
        return fx.node.map_arg(value, lambda n: self.values[n])

    def copied(self, node: fx.Node) -> Any:
        """Return the host's counterpart of a node: a copy of it, or the value itself for an edge or an item that needs none."""
        port = node.meta.get("port")
        args, kwargs = self.mapped(node.args), self.mapped(node.kwargs)
        if node.target is operator.getitem and not isinstance(args[0], fx.Node):
            return args[0][args[1]]
        at_root = port is not None and not port.path and node.target is ops.edge
        if node.target is ops.edge and (not isinstance(args[0], fx.Node) or (at_root and not self.edges)):
            return args[0]
        inner: list[fx.Node] = []
        fx.node.map_arg((args, kwargs), inner.append)
        anchors = inner if at_root else [*inner, *([self.cursor] if self.cursor is not None else [])]
        anchor = max(anchors) if anchors else find_last_input(self.host)
        target = node.target
        if node.op in ("get_attr", "call_module"):
            target = self.base.get(str(target)) or f"{self.path}.{target}"
        inside = {self.join(k): (f"{self.path}.{v[0]}", v[1]) for k, v in node.meta["nn_module_stack"].items() if k}
        meta = {**node.meta, "pass": self.made_by, "nn_module_stack": {**self.stack, **inside}}
        if port is not None:
            meta["port"] = Port(self.join(port.path), port.side, port.keys)
        name = f"{make_identifier(self.key)}_{node.name}"
        new = insert(self.host, node.op, target, args, kwargs, after=anchor, name=name, meta=meta)
        if not at_root:
            self.cursor = new
        self.nodes.append(new)
        return new

    def join(self, key: str) -> str:
        """Return the host's key of a region of the inserted graph."""
        base, _, call = self.key.partition("@")
        inner, _, inner_call = key.partition("@")
        calls = "_".join(filter(None, [call, inner_call]))
        return ".".join(filter(None, [base, inner])) + (f"@{calls}" if calls else "")


def _is_result_class(kind: Any) -> bool:
    return isinstance(kind, type) and (issubclass(kind, dict) or hasattr(kind, "_fields") or dataclasses.is_dataclass(kind))


def open_results(result: Any, nodes: list[fx.Node]) -> Any:
    """Replace the result classes that `nodes` build for a result by their members; erase what built them."""
    if isinstance(result, fx.Node) and result in nodes and result.op == "call_function" and _is_result_class(result.target):
        found: Any = tuple(result.args)
        if result.kwargs or not issubclass(result.target, tuple):  # type: ignore[arg-type]
            given = dict(result.args[0] if result.args else result.kwargs)  # type: ignore[arg-type]
            found = {key: value for key, value in given.items() if value is not None}
        if not result.users:
            nodes.remove(result)
            erase([result])
        return open_results(found, nodes)
    if isinstance(result, dict):
        return {key: open_results(value, nodes) for key, value in result.items()}
    if isinstance(result, list):  # which code that goes on with it may append to
        return [open_results(value, nodes) for value in result]
    return tuple(open_results(value, nodes) for value in result) if isinstance(result, tuple) else result


def find_last_input(graph: fx.Graph) -> fx.Node:
    """Return the last of the inputs at the start of a graph."""
    last: fx.Node = [node for node in graph.nodes if node.op == "placeholder"][-1]
    return last


def check_nested(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], what: str) -> None:
    """Raise SpecError for a TransformerEncoder that drops padded tokens only in evaluation without gradients."""
    if not isinstance(module, nn.TransformerEncoder) or not module.use_nested_tensor:
        return
    given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    if given.get("src_key_padding_mask") is not None:
        raise SpecError(
            f"{what} gets a src_key_padding_mask, and gives zeros for padded tokens where no gradients are computed, as a "
            "nested tensor: make it with enable_nested_tensor=False and trace again"
        )


class DiffersBetweenModes(Exception):
    """What is put in differs between training and evaluation, and the graph so far does not."""


class OpenedGraph:
    """One graph while a pass is put in, with its regions, and what stands behind each value by now."""

    def __init__(
        self, graph: Graph, mode: bool, modes: int, tree: nn.Module, gm: TracedModule, p: Pass, traces: Traces
    ) -> None:
        self.graph, self.mode, self.modes = graph, mode, modes
        self.tree, self.p, self.traces = tree, p, traces
        self.regions = Regions(graph, gm)
        self.behind: dict[str, fx.Node] = {n.meta["behind"]: n for n in graph.nodes if "behind" in n.meta}

    def of_mode(self, sub: TracedModule) -> fx.Graph:
        """Return the graph of a traced block for this mode. Raises DiffersBetweenModes if it has more modes than the model."""
        if len(sub.graphs) > self.modes:
            raise DiffersBetweenModes
        return sub.graphs.get(self.mode) or next(iter(sub.graphs.values()))

    def newest(self, node: fx.Node) -> fx.Node:
        """Return what the users of a leaf's result now see: the result of the last block after it."""
        while node.name in self.behind:
            node = self.behind[node.name]
        return node

    def open(self, region: RegionNodes, reason: str) -> None:
        """Replace a leaf's call by its own code; `reason` says for what."""
        leaf = region.leaf
        assert leaf is not None
        module = self.tree.get_submodule(region.path)
        self.add_edges(region)
        args, kwargs = list(leaf.args), dict(leaf.kwargs)
        what = f"{self.p.name}: '{region.path}' ({type(module).__name__}), opened for {reason},"
        check_nested(module, args, kwargs, what)
        sub = self.traces.of(module, args, kwargs, what)
        if module.training != self.tree.training and len(sub.graphs) > 1:
            own, other = [{True: "training", False: "evaluation"}[mode] for mode in (module.training, self.tree.training)]
            raise SpecError(
                f"{what} is in {own} and the model in {other}, and code that is opened runs in the model's mode: put both into "
                "one mode, or leave the layer out"
            )
        known = {name for name, _ in module.named_buffers()}
        for name, constant in sub.named_buffers():
            if name not in known:
                owner, _, last = name.rpartition(".")
                module.get_submodule(owner).register_buffer(last, constant, persistent=False)
        stack = leaf.meta["nn_module_stack"]
        made_by = {"name": self.p.name, "site": region.key, "place": "param", "block": "", "region": True}
        graft = Graft(self.graph, region.path, region.key, stack, made_by, after=leaf)
        inputs = inspect.signature(module.forward).bind(*args, **kwargs)
        inputs.apply_defaults()
        result = graft.put(self.of_mode(sub), inputs.arguments)
        for node in graft.nodes:
            if node.op == "get_attr":
                self.regions.readers.setdefault(str(node.target), []).append(node)
        self.now_inside(graft.nodes)
        replace_leaf_uses(leaf, result)

    def add_edges(self, region: RegionNodes) -> None:
        """Make a leaf a region with edges of its own, so that its place remains when its call is replaced."""
        leaf = region.leaf
        assert leaf is not None
        stack = leaf.meta["nn_module_stack"]
        inputs, outputs = self.regions.in_ports(region), self.regions.out_ports(region)
        region.leaf, region.inputs, region.outputs = None, [], []
        leaf.meta.pop("port")
        for port, index, _ in inputs:
            given = [*leaf.args, *leaf.kwargs.values()][index]
            assert isinstance(given, fx.Node)
            edge = self.edge(given, port, index, stack, before=leaf)
            if not region.inputs:
                edge.meta["call"] = tuple(None if isinstance(v, fx.Node) else v for v in leaf.args)
                edge.meta["named"] = {k: None if isinstance(v, fx.Node) else v for k, v in leaf.kwargs.items()}
            ValueUse(given, leaf, index).put(edge, set())
            region.inputs.append((port, index, edge))
        for port, node in outputs:
            value = self.newest(node)
            edge = self.edge(value, port, 0, stack)
            redirect(value, edge)
            region.outputs.append((port, edge))
        self.now_inside([*(edge for _, _, edge in region.inputs), *(edge for _, edge in region.outputs)])

    def edge(
        self, value: fx.Node, port: Port, index: int, stack: dict[str, Any], before: fx.Node | None = None
    ) -> fx.Node:
        """Insert an edge, after its value or before a node, as the port of a region."""
        name = make_identifier("_".join([port.path, *(["in"] if port.side == "in" else ["out"]), *map(str, port.keys)]))
        meta = {**get_meta(value), "port": port, "index": index, "nn_module_stack": stack}
        return insert(self.graph, "call_function", ops.edge, (value,), after=value, before=before, name=name, meta=meta)

    @cached_property
    def inside(self) -> dict[str, list[fx.Node]]:
        """Nodes of regions by the regions around them."""
        found: dict[str, list[fx.Node]] = {}
        for node in self.graph.nodes:
            if not is_added(node) and node.op not in ("placeholder", "output"):
                for key in node.meta.get("nn_module_stack", {}):
                    found.setdefault(key, []).append(node)
        return found

    def now_inside(self, nodes: list[fx.Node]) -> None:
        """Record nodes that were put into regions."""
        for node in nodes:
            for key in node.meta["nn_module_stack"]:
                self.inside.setdefault(key, []).append(node)
