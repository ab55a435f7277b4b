"""Repeated regions as calls of shared code: each kind is compiled once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...core.errors import MatchError, SpecError
from ...core.extensions import DERIVATION
from ...core.ir import ops
from ...core.ir.containers import Container, SharedCode, find_tensor, get_plain_attributes
from ...core.ir.entry_checks import is_pure
from ...core.ir.functions import REGION
from ...core.ir.graph import Graph, change, copy_graph, copy_nodes, erase_unused, insert, replace
from ...core.ir.subgraphs import (
    RegionCut,
    collect_nodes,
    extract,
    find_changed_input,
    make_unique_names,
    may_share_memory,
    plan,
)
from ...core.ir.traced_module import TracedModule, list_class_names, strip_to_container
from ...core.torch_internals.modules import as_listened, is_compiling, keep_floats_constant
from ...core.torch_internals.tensors import memory_id
from ..lowering import LoweredForm
from .choice import check_outlinable, choose
from .submodules import find_named, make_stack

CALL = 10  # what one more call of a region costs to compile, in operations compiled once
WORTH = 0.75  # nothing is nested where more than this share of the operations would be left to compile
HOME = "nested"


class Nested(SharedCode):
    """What alike regions of a model compute, as code without weights: the modules and parameters are arguments.

    A compiler that is given the model compiles it, once whatever the number of calls; with gradients as without, as what calls
    it is not compiled and torch's own autograd stands between the calls. In what is compiled around the model it is a nested
    compile region where gradients are disabled. Eager code and torch.export run it as it is. It holds no parameters, buffers or
    state.
    """

    def __init__(self, graph: fx.Graph, name: str) -> None:
        super().__init__()
        self.body = fx.GraphModule(nn.Module(), graph, name)
        self.code = type(self.body).forward
        self.compiled_once = torch.compiler.nested_compile_region(self.code, max_reuse_entries=1 << 30)
        self.constant_floats = keep_floats_constant()

    def __deepcopy__(self, memo: dict[int, Any]) -> Nested:
        """Copy the module, but share its code and its compiled code."""
        new = memo[id(self)] = Nested.__new__(Nested)
        new.__dict__.update({**vars(self), "_modules": dict(self._modules)})
        return new

    def forward(self, *args: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return as_listened(self.code, self.body, *(map(_in_order, args) if is_compiling() else args))
        if torch.compiler.is_exporting():  # an exported program is flat
            return self.body(*args)
        if torch.is_grad_enabled():  # torch 2.15 computes wrong gradients through nested compile regions: docs/contributing.md
            return self.body(*args)
        with self.constant_floats:
            return self.compiled_once(self.body, *args)


def _in_order(x: Any) -> Any:
    """Make a sequence of tokens contiguous: the first region may get it from a convolution, with other strides than the others.

    Other strides would be another compiled program. Images keep theirs, which have a purpose.
    """
    return x.contiguous() if isinstance(x, Tensor) and x.dim() == 3 else x


def nest(gm: TracedModule, regions: Sequence[str] | None = None) -> TracedModule:
    """Return a module with repeated regions as calls of shared code, on the same module tree; `gm` is unchanged.

    Regions that compute the same, from layers of the same sizes, become calls of one `Nested` module, to which the layers are
    passed: `torch.compile(nested, fullgraph=True)` and `nested.compile()` compile each kind once, for inference and with
    gradients, and the code around the regions runs eagerly (diffusers' `compile_repeated_blocks`, for regions that are found,
    whatever passes put into them). A compiled module around it, `torch.compile(nn.Sequential(nested, head))`, is one graph,
    which has the regions as nested ones without gradients, and flat with them. Names, results and gradients stay the same, bit
    for bit in eager code; operations are not fused across the edges of a region. `nested.meta["nested"]` maps the modules to
    the regions that they compute.

    `regions` are path patterns (exact, glob, slices, `re:`); of nested regions the outer one is used, and one that equals no
    other stays in the graph. None uses those that `choose` finds, if they leave clearly fewer operations to compile.

    Raises MatchError for a pattern that matches nothing, and when nothing is repeated; SpecError for a named region that cannot
    be cut out, with the reason.
    """
    check_outlinable(gm, regions, "nest")
    graphs = {mode: _plain(graph) for mode, graph in gm.graphs.items()}
    chosen = {mode: _chosen(graph, gm, regions) for mode, graph in graphs.items()}
    if not any(chosen.values()):
        raise MatchError(
            "the model has no repeated regions that can be outlined, so outlining saves no compilation: do not outline"
        )
    home = HOME
    while hasattr(gm, home):
        home += "_"
    tree = strip_to_container(gm)
    holder = Container(("Nested",))
    holder.training = gm.training
    kinds: dict[Any, str] = {}
    calls: dict[str, dict[str, None]] = {}
    for mode, graph in graphs.items():
        names = make_unique_names(chosen[mode])
        for key, (nodes, kind) in chosen[mode].items():
            if kind not in kinds:
                kinds[kind] = _name(gm, key, kinds.values())
            target = f"{home}.{kinds[kind]}"
            cut = _cut(key, nodes, gm)  # once more: what it reads are results of calls by now
            assert isinstance(cut, RegionCut)
            own, call = extract(cut, target, names[key], make_stack(cut))
            body, given = _functional(own, key)
            if kinds[kind] not in holder._modules:
                new = holder._modules[kinds[kind]] = Nested(body, kinds[kind])
                new.repeatable = frozenset(training for training in (False, True) if is_pure(own.nodes, gm, training))
            code: Any = holder._modules[kinds[kind]]
            constants = {str(node.target): {"constant": True} for node in own.nodes if node.meta.get("constant")}
            code.constants = code.constants.union(constants).difference(given)
            layers = [insert(graph, "get_attr", path, before=call, meta=constants.get(path)) for path in given]
            change(call, args=(*layers, *call.args))
            calls.setdefault(target, {})[key] = None
        for node in graph.nodes:
            node.meta.pop(REGION, None)
        erase_unused(graph.nodes, lambda node: node.op == "get_attr")
        graph.lint()
    holder.train(gm.training)
    tree._modules[home] = holder
    nested = {target: list(keys) for target, keys in calls.items()}
    return gm.derived(tree, graphs, source=gm.meta.get("source", gm), nested=nested, **{DERIVATION: LoweredForm()})


def _plain(graph: fx.Graph) -> Graph:
    """Copy a graph without the edges of regions, which make two values of one: a region has each input and result once."""
    new = copy_graph(graph)
    for node in new.nodes:
        if node.target is ops.edge and isinstance(node.args[0], fx.Node):
            replace(node, node.args[0])
    return new


def _name(gm: TracedModule, key: str, taken: Iterable[str]) -> str:
    """Return a name for a kind of region: the class of its original module, with a number if there are more of that name."""
    module = dict(gm.named_modules()).get(_path(key))
    kind = "Region" if module is None else list_class_names(module)[0]
    names, name, number = set(taken), kind, 1
    while name in names:
        number += 1
        name = f"{kind}_{number}"
    return name


def _path(key: str) -> str:
    """Return the path of a region's module: without the number of the call."""
    return re.sub(r"@\d+", "", key)


# --- which regions


def _chosen(graph: fx.Graph, gm: TracedModule, patterns: Sequence[str] | None) -> dict[str, tuple[list[fx.Node], Any]]:
    """Return the disjoint regions of a graph to nest, in the order they run: their nodes, and a key equal for shared code."""
    inside = collect_nodes(graph)
    kinds: dict[str, Any] = {}
    sizes: dict[str, int] = {}

    def kind(cut: RegionCut) -> Any:
        kinds[cut.key], sizes[cut.key] = _kind(cut, gm), sum(n.op != "get_attr" for n in cut.nodes)
        return kinds[cut.key]

    if patterns is None:
        keys = choose(graph, inside, gm, lambda key, nodes: _cut(key, nodes, gm), kind)
    else:
        keys = [key for key in find_named(gm, patterns) if key in inside]
        for key in keys:
            cut = _cut(key, inside[key], gm)
            if isinstance(cut, str):
                raise SpecError(f"'{key}' {cut}: name a region around it, or regions inside it")
            kind(cut)
    same = Counter(kinds[key] for key in keys)
    keys = sorted((key for key in keys if same[kinds[key]] > 1), key=lambda key: inside[key][0])
    total = sum(n.op != "get_attr" for n in graph.nodes)
    once = {kinds[key]: sizes[key] for key in keys}
    left = total - sum(sizes[key] - CALL for key in keys) + sum(once.values())
    if patterns is None and left > WORTH * total:
        return {}
    return {key: (inside[key], kinds[key]) for key in keys}


def _cut(key: str, nodes: list[fx.Node], root: nn.Module) -> RegionCut | str:
    """Return how a region is cut out to be compiled on its own, or why it cannot be.

    A compiled caller assumes that the results of a region have their own memory: none may be a view of an input or of another
    result, and inputs must not be changed.
    """
    cut = plan(key, nodes, root)
    if isinstance(cut, str):
        return cut
    if _shares_memory(cut, root):
        return "cannot be outlined, because it reads two weights that share memory"
    if changed := find_changed_input(cut.nodes, cut.inputs, root):
        return f"cannot be outlined, because '{changed.name}' changes its input in place"
    memory: dict[fx.Node, fx.Node] = {}
    for node in cut.nodes:
        first = next(iter(node.all_input_nodes), node)
        memory[node] = memory.get(first, first) if may_share_memory(node, root) else node
    lent = [memory[node] for node in cut.outputs if "shape" in node.meta]
    if any(node in cut.inputs or node.op == "get_attr" for node in lent):
        return "cannot be outlined, because it returns a view of its input"
    if len(set(lent)) < len(lent):
        return "cannot be outlined, because two of its results may be views of one tensor"
    return cut


def _shares_memory(cut: RegionCut, root: nn.Module) -> bool:
    """Return whether a region reads two tensors of one storage: torch gives a nested region no inputs that overlap."""
    read: dict[int, Tensor] = {}
    for node in cut.nodes:
        if node.op == "call_module":
            layer = root.get_submodule(str(node.target))
            read.update({id(p): p for p in layer.parameters()})
        elif node.op == "get_attr":
            value = find_tensor(root, str(node.target))
            read.update({} if value is None else {id(value): value})
    storages = [memory_id(t.untyped_storage()) for t in read.values() if t.numel()]
    return len(set(storages)) < len(storages)


# --- what is alike


def _kind(cut: RegionCut, root: nn.Module) -> Any:
    """Return a key of what a region computes, from layers of which sizes, without names: regions with equal keys share code."""
    where: dict[fx.Node, int] = {node: i for i, node in enumerate(cut.inputs)}
    roots: dict[str, int] = {}
    rows: list[Any] = [tuple((node.meta.get("shape"), node.meta.get("dtype")) for node in cut.inputs)]

    def layer(target: str) -> Any:
        owner, rest = _split(target, cut.key)
        return roots.setdefault(owner, len(roots)), rest, _described(root, target)

    def argument(x: Any) -> Any:
        if isinstance(x, fx.Node):
            return layer(str(x.target)) if x.op == "get_attr" else ("value", where[x])
        if isinstance(x, slice):
            return ("slice", argument(x.start), argument(x.stop), argument(x.step))
        if isinstance(x, (tuple, list)):
            return (type(x).__name__, *map(argument, x))
        if isinstance(x, dict):
            return ("dict", *((key, argument(value)) for key, value in x.items()))
        return (type(x).__name__, repr(x))

    for node in cut.nodes:
        if node.op != "get_attr":
            what = layer(str(node.target)) if node.op == "call_module" else node.target
            args = node.args[:2] if node.target is ops.guard else node.args  # the text of a guard says which region it is in
            rows.append((node.op, what, argument(args), argument(node.kwargs)))
            where[node] = len(where)
    rows.append(tuple(where[node] for node in cut.outputs))
    return tuple(rows)


def _described(root: nn.Module, target: str) -> Any:
    """Describe the layer or tensor at a path, as far as compiled code depends on it."""
    owner, _, last = target.rpartition(".")
    there = root.get_submodule(owner)
    found = getattr(there, last)
    if not isinstance(found, nn.Module):
        return _tensor(found)
    rows = []
    for name, module in found.named_modules():
        own = get_plain_attributes(module).items()
        settings = tuple(sorted((k, repr(v)) for k, v in own if k not in getattr(module, "about_place", ())))
        tensors = [*module._parameters.items(), *module._buffers.items()]
        rows.append((name, list_class_names(module), settings, tuple((k, _tensor(t)) for k, t in tensors)))
    return tuple(rows)


def _tensor(x: Any) -> Any:
    return (tuple(x.shape), x.dtype, x.requires_grad) if isinstance(x, Tensor) else type(x).__name__


def _split(target: str, key: str) -> tuple[str, str]:
    """Split a path into that of the region's module, in the model's tree or in a pass's, and the rest; "" if it is outside."""
    parts, own = target.split("."), _path(key).split(".")
    for start in range(len(parts) - len(own)):
        if parts[start : start + len(own)] == own:
            end = start + len(own)
            return ".".join(parts[:end]), ".".join(parts[end:])
    return target, ""


# --- the code that they share


def call_layer(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `layer`: not every dynamo supports `operator.call`."""
    return layer(*args, **kwargs)


@dataclass
class _Body:
    graph: Graph = field(default_factory=Graph)
    roots: dict[str, fx.Node] = field(default_factory=dict)
    layers: dict[str, fx.Node] = field(default_factory=dict)


def _functional(own: fx.Graph, key: str) -> tuple[Graph, list[str]]:
    """Return the graph of a region without names of the model: the modules that own its layers are its first arguments."""
    body = _Body()
    targets = [str(n.target) for n in own.nodes if n.op in ("call_module", "get_attr")]
    for target in targets:
        owner = _split(target, key)[0]
        if owner not in body.roots:
            body.roots[owner] = insert(body.graph, "placeholder", f"layers_{len(body.roots)}")
    values: dict[fx.Node, fx.Node] = {}
    copy_nodes([node for node in own.nodes if node.op == "placeholder"], body.graph, values)
    for node in own.nodes:
        if node.op == "get_attr":
            values[node] = _reach(body, str(node.target), key)
        elif node.op == "call_module":
            module = _reach(body, str(node.target), key)
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = insert(body.graph, "call_function", call_layer, (module, *args), kwargs, meta=node.meta)
        else:
            copy_nodes([node], body.graph, values)
    body.graph.lint()
    return body.graph, list(body.roots)


def _reach(body: _Body, target: str, key: str) -> fx.Node:
    """Return a node for a layer or tensor, read from the module that owns it."""
    path, rest = _split(target, key)
    node = body.roots[path]
    for part in filter(None, rest.split(".")):
        path = f"{path}.{part}"
        if path not in body.layers:
            body.layers[path] = insert(body.graph, "call_function", getattr, (node, part))
        node = body.layers[path]
    return node
