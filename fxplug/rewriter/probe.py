"""Running a graph node by node, on fake tensors or copies, and telling which block a failure came from."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn

from ..errors import FxplugError, VerifyError
from ..ir.pytree import leaves
from ..quantised import WithoutValues, is_own_layer


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

    def go(self) -> Any:
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


def gradient_reaches(out: Any) -> set[int]:
    """The ids of the leaf tensors that a gradient of a result would reach. Follows autograd's graph and computes nothing."""
    found: set[int] = set()
    todo: list[Any] = []
    for t in leaves(out):
        if isinstance(t, torch.Tensor) and t.requires_grad:
            todo.append(t.grad_fn)
            found.add(id(t))
    seen = set(todo)
    while todo:
        function = todo.pop()
        if function is None:
            continue
        if hasattr(function, "variable"):
            found.add(id(function.variable))
        fresh = {f for f, _ in function.next_functions if f not in seen}
        seen |= fresh
        todo.extend(fresh)
    return found


def flows(out: torch.Tensor, goal: Any) -> bool:
    """Whether a gradient of `out` comes to a function of autograd, or to a leaf."""
    if out is goal or out.grad_fn is goal:
        return True
    seen, todo = set(), [out.grad_fn]
    while todo:
        function = todo.pop()
        if function is None or function in seen:
            continue
        if function is goal or getattr(function, "variable", None) is goal:
            return True
        seen.add(function)
        todo.extend(f for f, _ in function.next_functions)
    return False


def cut_by(probe: Probe, start: fx.Node) -> fx.Node | None:
    """The first inserted node behind `start` through which no gradient comes back to it, of a graph that ran with gradients."""
    reached = {start}
    node: fx.Node
    for node in probe.graph.nodes:
        given = [probe.env[a] for a in node.all_input_nodes if a in reached]
        if not given:
            continue
        results = [t for t in leaves(probe.env.get(node)) if isinstance(t, torch.Tensor)]
        goals = [t if t.grad_fn is None else t.grad_fn for t in leaves(given) if isinstance(t, torch.Tensor)]
        if any(flows(t, goal) for t in results for goal in goals):
            reached.add(node)
        elif "pass" in node.meta and node.op == "call_module":
            return node
    return None


def located(probe: Probe, error: Exception) -> VerifyError:
    """A failure of propagation, told at the rule whose block caused it."""
    node = probe.at
    assert node is not None
    text = str(error).split("\n")[0]
    if isinstance(error, FxplugError):
        text = f"{text} (a decision of the original model does not hold after the rewrite)"
    shapes = ", ".join(
        f"{a.name} {list(probe.env[a].shape)}" for a in node.all_input_nodes if isinstance(probe.env.get(a), torch.Tensor)
    )
    inserted = origin(probe, node)
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
    return VerifyError(f"{what} gives {now}, and '{node.name}' cannot take it ({shapes}): {text}")


def changes(probe: Probe, node: fx.Node) -> bool:
    """Whether an inserted node gives a tensor of another shape or dtype than the one it stands for."""
    made, shape, dtype = probe.env.get(node), node.meta.get("shape"), node.meta.get("dtype")
    if not isinstance(made, torch.Tensor) or shape is None:
        return False
    return tuple(made.shape) != tuple(shape) or made.dtype != dtype


def origin(probe: Probe, node: fx.Node) -> fx.Node | None:
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
