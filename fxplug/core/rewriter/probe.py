"""Running a graph node by node, on fake tensors or copies: which block a failure came from, where a difference begins."""

from __future__ import annotations

import contextlib
import inspect
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from ..errors import FxplugError, VerifyError
from ..ir.comparison import describe_difference, equal
from ..ir.containers import leaves
from ..ir.ops import AddedInput
from ..ir.traced_module import TracedModule
from ..quantised import WithoutValues, is_own_layer
from ..torch_internals.tensors import version


class Unchecked(Exception):
    """Why something cannot be checked here."""


class Probe(fx.Interpreter):
    """Runs a graph node by node and remembers which one it was at, and all values.

    With `isolated` what passes put in draws its random numbers beside those of the model.
    """

    def __init__(self, module: fx.GraphModule, graph: fx.Graph, call: Any, isolated: bool = False) -> None:
        super().__init__(module, garbage_collect_values=False, graph=graph)
        self.at: fx.Node | None = None
        self.inputs = placeholder_values(graph, call)
        self.isolated = isolated

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, noted as the one that it is at."""
        self.at = n
        put_in = n.meta.get("pass", {})
        opened = put_in.get("region") and put_in.get("place") == "param"  # a layer of the model, as its code
        if self.isolated and put_in and not opened:
            with torch.random.fork_rng():
                return super().run_node(n)
        return super().run_node(n)

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The result, in plain containers."""
        return _plain(args[0])  # as the generated code has it

    def run_graph(self) -> Any:
        """Run the graph on its inputs; gives its result."""
        return self.run(initial_env=dict(self.inputs), enable_io_processing=False)


def _plain(value: Any) -> Any:
    """FX's own lists and dicts in a node's arguments as Python's."""
    if isinstance(value, dict) and type(value).__module__.startswith("torch.fx"):
        return {key: _plain(member) for key, member in value.items()}
    if isinstance(value, list):
        return [_plain(member) for member in value]
    return tuple(map(_plain, value)) if type(value) is tuple else value


def placeholder_values(graph: fx.Graph, call: Any) -> dict[fx.Node, Any]:
    """The example inputs by placeholder, as the generated function's signature would bind them."""
    nodes = [n for n in graph.nodes if n.op == "placeholder"]
    kinds: dict[str, Any] = {"*": inspect.Parameter.VAR_POSITIONAL, "**": inspect.Parameter.VAR_KEYWORD}
    rows = []
    keyword_only = False
    for n in nodes:
        name = str(n.target).lstrip("*")
        kind = kinds.get(str(n.target)[: -len(name)], inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if keyword_only and kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            kind = inspect.Parameter.KEYWORD_ONLY
        keyword_only = keyword_only or kind is inspect.Parameter.VAR_POSITIONAL
        rows.append(inspect.Parameter(name, kind, default=n.args[0] if n.args else inspect.Parameter.empty))
    signature = inspect.Signature(rows)
    try:
        bound = signature.bind(*call[0], **call[1])
    except TypeError as error:
        raise VerifyError(f"the rewritten model does not take these example inputs: {error}; it takes {signature}") from None
    bound.apply_defaults()
    return {n: bound.arguments[row.name] for n, row in zip(nodes, rows, strict=True)}


def empty(tensor: torch.Tensor, device: str | None = None) -> torch.Tensor:
    """A tensor of the same geometry without values; a fake one inside a fake mode, where meta ones pass for real."""
    device = device or ("cpu" if tensor.is_meta else str(tensor.device))
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same geometry on the meta device."""
    return empty(tensor, "meta")


@contextlib.contextmanager
def swapped(
    module: nn.Module, make: Callable[[torch.Tensor], torch.Tensor], values: bool = False
) -> Iterator[dict[str, torch.Tensor]]:
    """Put `make(tensor)` in the place of every weight; gives the new ones by name. `values` says that they have any."""
    held: list[tuple[dict[str, Any], dict[str, Any]]] = []
    made: dict[int, torch.Tensor] = {}
    by_name: dict[str, torch.Tensor] = {}
    for parent in [] if values else list(module.modules()):
        if layers := {k: WithoutValues(m) for k, m in parent._modules.items() if m is not None and is_own_layer(m)}:
            held.append((parent._modules, dict(parent._modules)))
            parent._modules.update(layers)
    for path, child in module.named_modules():
        lists = {key: value for key, value in vars(child).items() if type(value) is list}  # an LSTM keeps its weights in one
        held.append((child.__dict__, lists))
        child.__dict__.update({key: value.copy() for key, value in lists.items()})
        for table in (child._parameters, child._buffers):
            held.append((table, dict(table)))
            for key, tensor in table.items():
                if tensor is not None:
                    by_name[f"{path}.{key}" if path else key] = made.setdefault(id(tensor), make(tensor))
                    table[key] = made[id(tensor)]
    try:
        yield by_name
    finally:
        for table, original in held:
            table.update(original)


def _functions_behind(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The functions of autograd that tensors come from, each once. Computes nothing."""
    todo = [t.grad_fn for t in tensors]
    seen = {None, *todo}
    while todo:
        if (function := todo.pop()) is not None:
            yield function
            new = {f for f, _ in function.next_functions} - seen
            seen |= new
            todo.extend(new)


def leaves_with_gradient(out: Any) -> set[int]:
    """The ids of the leaf tensors that a gradient of a result would reach."""
    tensors = [t for t in leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
    return {id(t) for t in tensors} | {id(f.variable) for f in _functions_behind(tensors) if hasattr(f, "variable")}


def has_gradient_path(out: torch.Tensor, goal: Any) -> bool:
    """Whether a gradient of `out` comes to a function of autograd, or to a leaf."""
    return out is goal or any(f is goal or getattr(f, "variable", None) is goal for f in _functions_behind([out]))


def find_gradient_cut(probe: Probe, start: fx.Node) -> fx.Node | None:
    """The first inserted node behind `start` through which no gradient comes back to it, of a graph that ran with gradients."""
    reached = {start}
    node: fx.Node
    for node in probe.graph.nodes:
        given = [probe.env[a] for a in node.all_input_nodes if a in reached]
        if not given:
            continue
        results = [t for t in leaves(probe.env.get(node)) if isinstance(t, torch.Tensor)]
        goals = [t if t.grad_fn is None else t.grad_fn for t in leaves(given) if isinstance(t, torch.Tensor)]
        if any(has_gradient_path(t, goal) for t in results for goal in goals):
            reached.add(node)
        elif "pass" in node.meta and node.op == "call_module":
            return node
    return None


def locate_error(probe: Probe, error: Exception) -> VerifyError:
    """A failure of propagation, told at the rule whose block caused it."""
    node = probe.at
    assert node is not None
    text = str(error).split("\n")[0]
    if isinstance(error, AddedInput):
        return VerifyError(f"the example inputs do not fit: {text}")
    if isinstance(error, FxplugError):
        text = f"{text} (a guard of the original model fails after the rewrite)"
    shapes = ", ".join(
        f"{a.name} {list(probe.env[a].shape)}" for a in node.all_input_nodes if isinstance(probe.env.get(a), torch.Tensor)
    )
    inserted = inserted_source(probe, node)
    if inserted is None:
        return VerifyError(f"'{node.name}' fails on {shapes or 'its inputs'}: {text}")
    entry = inserted.meta["pass"]
    where = f"{entry['where']}: " if entry.get("where") else ""
    what = f"{where}{entry['name']}: block {entry.get('block', '')} at '{entry.get('site', '')}'"
    if inserted is node:
        return VerifyError(f"{what} fails on {shapes}: {text}")
    made, now, before = probe.env.get(inserted), "another value", inserted.meta.get("shape")
    if isinstance(made, torch.Tensor) and before:
        now = f"{list(made.shape)} where {list(before)} was"
        if tuple(made.shape) == tuple(before):
            now = f"{made.dtype} where {inserted.meta.get('dtype')} was"
    return VerifyError(f"{what} returns {now}, and '{node.name}' cannot take it ({shapes}): {text}")


def changes(probe: Probe, node: fx.Node) -> bool:
    """Whether an inserted node gives a tensor of another shape or dtype than the one it stands for."""
    made, shape, dtype = probe.env.get(node), node.meta.get("shape"), node.meta.get("dtype")
    if not isinstance(made, torch.Tensor) or shape is None:
        return False
    return tuple(made.shape) != tuple(shape) or made.dtype != dtype


def inserted_source(probe: Probe, node: fx.Node) -> fx.Node | None:
    """The inserted node above another one that it fails for: the first of those next to it that changes shape or dtype."""
    if "pass" in node.meta and node.op == "call_module":
        return node
    seen, row, near = {node}, [node], None
    while row:
        row = [a for n in row for a in n.all_input_nodes if a not in seen and not seen.add(a)]  # type: ignore[func-returns-value]
        blocks = [n for n in row if "pass" in n.meta and n.op == "call_module"]
        near = near or next(iter(blocks), None)
        if near is not None:
            break
    chain = near
    while chain is not None:  # blocks of several passes stand one behind the other
        near = chain if changes(probe, chain) else near
        chain = next((a for a in chain.all_input_nodes if "pass" in a.meta and a.op == "call_module"), None)
    return near


def is_differentiable(value: Any) -> bool:
    """Whether a value is a tensor of numbers that a gradient can have."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


# --- who it was


def _digest(value: Any) -> Any:
    """What tells values of a node apart without keeping them: shapes, dtypes and a checksum, in which 0 and -0 are one."""
    rows = []
    for t in leaves(value):
        if isinstance(t, torch.Tensor):
            plain = t.detach()
            plain = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
            plain = plain if plain.dtype == torch.bool else plain + 0
            held = plain.cpu().contiguous().flatten().view(torch.uint8).numpy()
            rows.append((tuple(t.shape), t.dtype, zlib.crc32(held.data)))
    return rows


class Recorder(Probe):
    """Runs a graph and notes a digest of each node's value by its name, and what blocks do to their inputs."""

    def __init__(self, module: fx.GraphModule, graph: fx.Graph, call: Any) -> None:
        super().__init__(module, graph, call)
        self.digests: dict[str, Any] = {}
        self.writers: list[fx.Node] = []
        self.cutters: list[fx.Node] = []
        self.louder: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, and note what it gives and, where a pass put it in, what it did to its inputs."""
        values = [self.env.get(a) for a in n.all_input_nodes if "pass" in n.meta]
        given = [t for t in values if isinstance(t, torch.Tensor)]
        digests = [_digest(t) for t in given]
        functions = [t if t.grad_fn is None else t.grad_fn for t in given]
        out = super().run_node(n)
        if not n.op.startswith("call"):
            return out
        self.digests[n.name] = _digest(out)
        if [_digest(t) for t in given] != digests:
            self.writers.append(n)
        results = [t for t in leaves(out) if isinstance(t, torch.Tensor)]
        same = [i for i, d in enumerate(digests) for t in results[:1] if _digest(t) == d]
        if n.op == "call_module" and not same:
            self.louder.add(n)
        if any(given[i].requires_grad and not has_gradient_path(results[0], functions[i]) for i in same):
            self.cutters.append(n)
        return out

    def responsible_block(self, before: Mapping[str, Any]) -> tuple[fx.Node | None, fx.Node | None]:
        """The first node of the model whose value is another than `before`, and the block behind that: the first above it whose
        result is none of its inputs, else the nearest one."""
        known = [n for n in self.graph.nodes if n.name in before]
        first = next((n for n in known if self.digests.get(n.name) != before[n.name]), None)
        if first is None:
            return None, next(iter([*self.cutters, *self.writers]), None)
        seen, todo = {first}, [first]
        while todo:
            new = [a for a in todo.pop().all_input_nodes if a not in seen and a.op.startswith("call") and a.name not in before]
            seen.update(new)
            todo.extend(new)
        above = sorted(n for n in seen - {first} if "pass" in n.meta)
        loud = [n for n in above if n in self.louder]
        writers = [n for n in self.writers if n < first]
        blocks = [n for n in above if n.op == "call_module"]
        return first, next(iter([*loud, *writers, *reversed(blocks), *reversed(above)]), None)


Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class CallOutcome:
    """What one call leaves: its result, the state and the inputs after it, and the weights and inputs a gradient reaches."""

    out: Any
    state: dict[str, torch.Tensor]
    inputs: Any
    reached: set[str]


@dataclass
class CallDifference:
    """How what two calls left differs: in which of the calls, in words."""

    index: int
    text: str


@contextlib.contextmanager
def check_writes(gm: TracedModule, new: TracedModule, call: Call) -> Iterator[None]:
    """See that what the calls got copies of is not written by another way. Raises VerifyError."""
    kinds = [("parameter", gm.named_parameters()), ("buffer", gm.named_buffers())]
    named = [(f"the {kind} '{name}' of the model", t) for kind, tensors in kinds for name, t in tensors]
    given = [("an input", t) for t in leaves(call) if isinstance(t, torch.Tensor)]
    watched = [(what, t, version(t)) for what, t in [*named, *given] if not t.is_inference()]
    yield
    changed = [what for what, t, before in watched if version(t) != before]
    if changed:
        raise VerifyError(f"a block writes to {changed[0]}: a block must not change the model's tensors")


def first_difference(base: list[CallOutcome], new: list[CallOutcome]) -> CallDifference | None:
    """The first thing that calls of two modules left otherwise."""
    for index, (a, b) in enumerate(zip(base, new, strict=True)):
        if off := describe_difference(a.out, b.out):
            return CallDifference(index, f"outputs differ {off}")
        if off := describe_difference(a.inputs, (b.inputs[0], {k: v for k, v in b.inputs[1].items() if k in a.inputs[1]})):
            return CallDifference(index, f"the inputs differ after the call, {off}")
        for name in a.state.keys() & b.state.keys():
            if off := describe_difference(a.state[name], b.state[name]):
                return CallDifference(index, f"'{name}' differs after the call, {off}")
        if lost := sorted(a.reached - b.reached):
            more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
            return CallDifference(index, f"gradients no longer reach {', '.join(lost[:3])}{more}")
    return None


def constant_output_note(out: Any) -> str:
    """What keeps a comparison from seeing much."""
    tensors = [t for t in leaves(out) if is_differentiable(t) and t.numel() > 1 and t.layout == torch.strided]
    if tensors and all(t.isnan().all() for t in tensors):
        raise Unchecked("every output of the model is NaN on these inputs, so there is nothing to compare")
    if tensors and all(equal(t, t.flatten()[:1].expand(t.numel()).view(t.shape)) for t in tensors):
        return "every output has the same value everywhere, which may hide a change before it"
    return ""
