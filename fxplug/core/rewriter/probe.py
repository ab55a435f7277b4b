"""Running a graph node by node, on fake tensors or copies: which block a failure came from, where a difference begins."""

from __future__ import annotations

import contextlib
import inspect
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from ..errors import FxplugError, VerifyError
from ..ir.comparison import Call, is_equal
from ..ir.containers import list_leaves, list_tensors
from ..ir.ops import AddedInput
from ..ir.traced_module import TracedModule
from ..quantised import WithoutValues, is_own_layer
from ..torch_internals.tensors import version


class Unchecked(Exception):
    """Why something cannot be checked here."""


class GraphRun(fx.Interpreter):
    """One run of a graph: whoever goes through it gets each node with its value, as they are computed.

    `at` is the node that was begun last. `env` has the values: all, or with `keep` False what `at` reads and later ones read.
    """

    def __init__(self, module: nn.Module, graph: fx.Graph, inputs: Sequence[Any], keep: bool = True) -> None:
        super().__init__(module, garbage_collect_values=not keep, graph=graph)
        self.at: fx.Node | None = None
        self.keep = keep
        self.env.update(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))

    def __iter__(self) -> Iterator[tuple[fx.Node, Any]]:
        for node in self.graph.nodes:
            yield node, self.step(node)

    def step(self, node: fx.Node) -> Any:
        """Run a node behind those that it reads, and give its value. A failure has a note of where it was."""
        for done in () if self.keep or self.at is None else self.user_to_last_uses.get(self.at, ()):
            del self.env[done]
        self.at = node
        try:
            value = self.env[node] = self.env[node] if node.op == "placeholder" else self.run_node(node)
        except Exception as error:  # an operation's, or a layer's
            error.add_note(f"at '{node.name}' of the graph")
            raise
        return value

    def finish(self) -> Any:
        """Run all nodes; gives the result."""
        for _, value in self:
            result = value
        return result

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Give the result in plain containers."""
        return _plain(args[0])  # as the generated code has it


def _plain(value: Any) -> Any:
    """FX's own lists and dicts in a node's arguments as Python's."""
    if isinstance(value, dict) and type(value).__module__.startswith("torch.fx"):
        return {key: _plain(member) for key, member in value.items()}
    if isinstance(value, list):
        return [_plain(member) for member in value]
    return tuple(map(_plain, value)) if type(value) is tuple else value


def bind_placeholders(graph: fx.Graph, call: Any) -> list[Any]:
    """Get what each placeholder is in a call, as the generated function's signature would bind its arguments."""
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
    return [bound.arguments[row.name] for row in rows]


def make_empty(tensor: torch.Tensor, device: str | None = None) -> torch.Tensor:
    """Return an uninitialised tensor of the same geometry; a fake one inside a fake mode, where meta ones pass for real."""
    device = device or ("cpu" if tensor.is_meta else str(tensor.device))
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def make_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same geometry on the meta device."""
    return make_empty(tensor, "meta")


@contextlib.contextmanager
def swap_weights(module: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Put `make(tensor)`, which has no values, in the place of every weight; gives the new ones by name."""
    held: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for parent in list(module.modules()):
        if layers := {k: WithoutValues(m) for k, m in parent._modules.items() if m is not None and is_own_layer(m)}:
            held.append((parent._modules, dict(parent._modules)))
            parent._modules.update(layers)
    try:
        by_name = dict(list_tensors(module))
        made = {id(tensor): make(tensor) for tensor in {id(t): t for t in by_name.values()}.values()}
        with replace_tensors(module, made):
            yield {name: made[id(tensor)] for name, tensor in by_name.items()}
    finally:
        for table, original in held:
            table.update(original)


@contextlib.contextmanager
def replace_tensors(module: nn.Module, new: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Put other tensors in the place of some that a module holds, by the id of these; what it assigns meanwhile is undone."""
    held: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for child in module.modules():
        if lists := {key: value for key, value in vars(child).items() if type(value) is list}:  # an LSTM's weights are in one
            held.append((vars(child), lists))
            vars(child).update({key: value.copy() for key, value in lists.items()})
        tables: list[dict[str, Any]] = [child._parameters, child._buffers]
        for table in tables:
            if table:
                held.append((table, dict(table)))
                table.update({key: new[id(t)] for key, t in table.items() if id(t) in new})
    try:
        yield
    finally:
        for table, original in held:
            table.update(original)


def _functions_behind(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Yield the autograd functions that tensors come from, each once. Computes nothing."""
    todo = [t.grad_fn for t in tensors]
    seen = {None, *todo}
    while todo:
        if (function := todo.pop()) is not None:
            yield function
            new = {f for f, _ in function.next_functions} - seen
            seen |= new
            todo.extend(new)


def find_gradient_leaves(out: Any) -> set[int]:
    """Return the ids of the leaf tensors that a gradient of a result would reach."""
    tensors = [t for t in list_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
    return {id(t) for t in tensors} | {id(f.variable) for f in _functions_behind(tensors) if hasattr(f, "variable")}


def has_gradient_path(out: torch.Tensor, goal: Any) -> bool:
    """Return whether a gradient of `out` reaches an autograd function, or a leaf."""
    return out is goal or any(f is goal or getattr(f, "variable", None) is goal for f in _functions_behind([out]))


def find_gradient_cut(run: GraphRun, start: fx.Node) -> fx.Node | None:
    """Return the first inserted node after `start` that stops its gradient, in a graph that ran with gradients."""
    reached = {start}
    node: fx.Node
    for node in run.graph.nodes:
        given = [run.env[a] for a in node.all_input_nodes if a in reached]
        if not given:
            continue
        results = [t for t in list_leaves(run.env.get(node)) if isinstance(t, torch.Tensor)]
        goals = [t if t.grad_fn is None else t.grad_fn for t in list_leaves(given) if isinstance(t, torch.Tensor)]
        if any(has_gradient_path(t, goal) for t in results for goal in goals):
            reached.add(node)
        elif "pass" in node.meta and node.op == "call_module":
            return node
    return None


def locate_error(run: GraphRun, error: Exception) -> VerifyError:
    """Return an error of propagation as a VerifyError that names the rule whose block caused it."""
    node = run.at
    assert node is not None
    text = str(error).split("\n")[0]
    if isinstance(error, AddedInput):
        return VerifyError(f"the example inputs do not fit: {text}")
    if isinstance(error, FxplugError):
        text = f"{text} (a guard of the original model fails after the rewrite)"
    shapes = ", ".join(
        f"{a.name} {list(run.env[a].shape)}" for a in node.all_input_nodes if isinstance(run.env.get(a), torch.Tensor)
    )
    inserted = inserted_source(run, node)
    if inserted is None:
        return VerifyError(f"'{node.name}' fails on {shapes or 'its inputs'}: {text}")
    entry = inserted.meta["pass"]
    where = f"{entry['where']}: " if entry.get("where") else ""
    what = f"{where}{entry['name']}: block {entry.get('block', '')} at '{entry.get('site', '')}'"
    if inserted is node:
        return VerifyError(f"{what} fails on {shapes}: {text}")
    made, now, before = run.env.get(inserted), "another value", inserted.meta.get("shape")
    if isinstance(made, torch.Tensor) and before:
        now = f"{list(made.shape)} where {list(before)} was"
        if tuple(made.shape) == tuple(before):
            now = f"{made.dtype} where {inserted.meta.get('dtype')} was"
    return VerifyError(f"{what} returns {now}, and '{node.name}' cannot take it ({shapes}): {text}")


def changes(run: GraphRun, node: fx.Node) -> bool:
    """Return whether an inserted node's tensor has another shape or dtype than the one it replaces."""
    made, shape, dtype = run.env.get(node), node.meta.get("shape"), node.meta.get("dtype")
    if not isinstance(made, torch.Tensor) or shape is None:
        return False
    return tuple(made.shape) != tuple(shape) or made.dtype != dtype


def inserted_source(run: GraphRun, node: fx.Node) -> fx.Node | None:
    """Return the inserted node that makes a later one fail: the first of the nearest ones that changes shape or dtype."""
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
        near = chain if changes(run, chain) else near
        chain = next((a for a in chain.all_input_nodes if "pass" in a.meta and a.op == "call_module"), None)
    return near


def is_differentiable(value: Any) -> bool:
    """Return whether a value is a tensor of numbers that can have a gradient."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


# --- who it was


def _digest(value: Any) -> Any:
    """Return a digest that distinguishes values of a node: shapes, dtypes and a checksum, in which 0 and -0 are equal."""
    rows = []
    for t in list_leaves(value):
        if isinstance(t, torch.Tensor):
            plain = t.detach()
            plain = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
            plain = plain if plain.dtype == torch.bool else plain + 0
            held = plain.cpu().contiguous().flatten().view(torch.uint8).numpy()
            rows.append((tuple(t.shape), t.dtype, zlib.crc32(held.data)))
    return rows


class Recorder:
    """Goes through a run and notes a digest of each node's value by its name, and what blocks do to their inputs."""

    def __init__(self, run: GraphRun) -> None:
        self.run = run
        self.digests: dict[str, Any] = {}
        self.writers: list[fx.Node] = []
        self.cutters: list[fx.Node] = []
        self.louder: set[fx.Node] = set()

    def finish(self) -> Any:
        """Run all nodes; gives the result."""
        for node in self.run.graph.nodes:
            result = self.step(node)
        return result

    def step(self, node: fx.Node) -> Any:
        """Run a node, and note what it gives and, where a pass put it in, what it did to its inputs."""
        values = [self.run.env.get(a) for a in node.all_input_nodes if "pass" in node.meta]
        given = [t for t in values if isinstance(t, torch.Tensor)]
        digests = [_digest(t) for t in given]
        functions = [t if t.grad_fn is None else t.grad_fn for t in given]
        out = self.run.step(node)
        if not node.op.startswith("call"):
            return out
        self.digests[node.name] = _digest(out)
        if [_digest(t) for t in given] != digests:
            self.writers.append(node)
        results = [t for t in list_leaves(out) if isinstance(t, torch.Tensor)]
        same = [i for i, d in enumerate(digests) for t in results[:1] if _digest(t) == d]
        if node.op == "call_module" and not same:
            self.louder.add(node)
        if any(given[i].requires_grad and not has_gradient_path(results[0], functions[i]) for i in same):
            self.cutters.append(node)
        return out

    def responsible_block(self, before: Mapping[str, Any]) -> tuple[fx.Node | None, fx.Node | None]:
        """Return the first node of the model whose value differs from `before`, and the responsible block.

        That is the first block above it whose result is none of its inputs, else the nearest one."""
        known = [n for n in self.run.graph.nodes if n.name in before]
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


@contextlib.contextmanager
def check_writes(gm: TracedModule, new: TracedModule, call: Call) -> Iterator[None]:
    """See that what the calls got copies of is not written by another way. Raises VerifyError."""
    kinds = [("parameter", gm.named_parameters()), ("buffer", gm.named_buffers())]
    named = [(f"the {kind} '{name}' of the model", t) for kind, tensors in kinds for name, t in tensors]
    given = [("an input", t) for t in list_leaves(call) if isinstance(t, torch.Tensor)]
    watched = [(what, t, version(t)) for what, t in [*named, *given] if not t.is_inference()]
    yield
    changed = [what for what, t, before in watched if version(t) != before]
    if changed:
        raise VerifyError(f"a block writes to {changed[0]}: a block must not change the model's tensors")


def note_constant_output(out: Any) -> str:
    """Return a note if the outputs make a comparison weak. Raises Unchecked if they are all NaN."""
    tensors = [t for t in list_leaves(out) if is_differentiable(t) and t.numel() > 1 and t.layout == torch.strided]
    if tensors and all(t.isnan().all() for t in tensors):
        raise Unchecked("every output of the model is NaN on these inputs, so there is nothing to compare")
    if tensors and all(is_equal(t, t.flatten()[:1].expand(t.numel()).view(t.shape)) for t in tensors):
        return "every output has the same value everywhere, which may hide a change before it"
    return ""
