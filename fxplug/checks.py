"""What must hold after a rewrite: lint, shapes, neutrality, untouched base, gradients, one compiled graph."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from .errors import FxplugError, VerifyError
from .fakes import quiet
from .module import TracedModule, copy_graph, shell
from .printing import parameters
from .structure import leaves, map_leaves


@dataclass
class Check:
    """One thing that was checked: `status` is ok, failed or skipped, `detail` says what was found."""

    name: str
    status: str
    detail: str
    seconds: float


@dataclass
class Report:
    """What `verify` found. `str()` gives it as text, `json()` as plain values."""

    checks: list[Check] = field(default_factory=list)
    summary: str = ""

    @property
    def ok(self) -> bool:
        return not any(c.status == "failed" for c in self.checks)

    def __str__(self) -> str:
        rows = [f"{c.status:8}{c.name:12}{c.detail}" for c in self.checks]
        return "\n".join([*rows, *([self.summary] if self.summary else [])])

    def json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {"ok": self.ok, "summary": self.summary, "checks": [asdict(c) for c in self.checks]}


class _Skip(Exception):
    pass


def verify(
    gm: TracedModule,
    new: TracedModule,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    compile: bool = True,
) -> Report:
    """Check a rewritten module `new` against the one it was made of, on example inputs of the model.

    Lint; shapes by fake propagation in every mode; `torch.equal` outputs when all new passes are neutral; base weights the
    same objects under the same keys; a gradient for every new parameter; with `compile`, one graph under
    `torch.compile(fullgraph=True)`, by capture alone. Values are needed for neutrality only: on meta weights or inputs it
    is reported as skipped.

    Raises VerifyError, with the report as its `report`, when something does not hold.
    """
    call = (tuple(args) if isinstance(args, (tuple, list)) else (args,), dict(kwargs or {}))
    report = Report(summary=parameters(new))
    old = {entry["name"] for entry in gm.meta.get("passes", [])}
    entries = [entry for entry in new.meta.get("passes", []) if entry["name"] not in old]
    tests: list[tuple[str, Callable[[], str]]] = [
        ("lint", lambda: _lint(new)),
        ("base", lambda: _base_untouched(gm, new, entries)),
        ("shapes", lambda: _shapes_and_gradients(new, call, entries)),
        ("neutral", lambda: _neutral(gm, new, call, entries)),
    ]
    if compile:
        tests.append(("one graph", lambda: _one_graph(gm, new, call)))
    for name, test in tests:
        start = time.perf_counter()
        try:
            status, detail = "ok", test()
        except _Skip as reason:
            status, detail = "skipped", str(reason)
        except VerifyError as error:
            status, detail = "failed", str(error)
        report.checks.append(Check(name, status, detail, round(time.perf_counter() - start, 3)))
        if status == "failed" and name in ("lint", "shapes"):
            break  # nothing after it can be run
    if not report.ok:
        failed = [c.detail for c in report.checks if c.status == "failed"]
        verify_error = VerifyError("\n".join(failed))
        verify_error.report = report  # type: ignore[attr-defined]
        raise verify_error
    return report


def _lint(new: TracedModule) -> str:
    for graph in new.graphs.values():
        try:
            graph.lint()
        except (AssertionError, RuntimeError) as error:
            raise VerifyError(f"the graph is not well formed: {error}") from error
    return f"{sum(len(g.nodes) for g in new.graphs.values())} nodes in {len(new.graphs)} graph(s)"


def _base_untouched(gm: TracedModule, new: TracedModule, entries: list[dict[str, Any]]) -> str:
    ours = dict(_tensors(new))
    for name, tensor in _tensors(gm):
        if ours.get(name) is not tensor:
            raise VerifyError(f"the base weight '{name}' is not the object it was")
    base = dict(_tensors(gm))
    prefixes = tuple(f"{entry['name']}." for entry in entries)
    for name in ours:
        if name not in base and not name.startswith(prefixes):
            raise VerifyError(f"the new weight '{name}' does not stand under the name of a pass")
    return f"{len(base)} weights are the same objects"


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


# --- shapes and gradients, on fake tensors


class _Probe(fx.Interpreter):
    """Runs a graph node by node and remembers which one it was at, and values of inserted nodes."""

    def __init__(self, module: fx.GraphModule, graph: fx.Graph, call: Any) -> None:
        super().__init__(module, garbage_collect_values=False, graph=graph)
        self.at: fx.Node | None = None
        self.inputs = _placeholder_values(graph, call)

    def run_node(self, n: fx.Node) -> Any:
        self.at = n
        return super().run_node(n)

    def go(self) -> Any:
        return self.run(initial_env=dict(self.inputs), enable_io_processing=False)


def _placeholder_values(graph: fx.Graph, call: Any) -> dict[fx.Node, Any]:
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


def _shapes_and_gradients(new: TracedModule, call: Any, entries: list[dict[str, Any]]) -> str:
    prefixes = tuple(f"{entry['name']}." for entry in entries)
    wanted = [n for n, p in new.named_parameters() if n.startswith(prefixes) and p.is_floating_point()] if prefixes else []
    reached: set[str] = set()
    if any(_reads_values(graph) for graph in new.graphs.values()):
        raise _Skip("the model reads values from its data, which fake tensors do not have")
    for graph in new.graphs.values():
        needed = any(name not in reached for name in wanted)  # one mode that trains a parameter is enough
        with FakeTensorMode(allow_non_fake_inputs=True), _swapped(new, _empty) as fakes, torch.set_grad_enabled(needed):
            inputs = map_leaves(call, lambda t, _: _empty(t))
            for name in wanted:
                fakes[name].requires_grad_()
            probe = _Probe(new, graph, inputs)
            try:
                with quiet():
                    out = probe.go()
            except VerifyError:
                raise
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise _Skip("the model's sizes depend on its data, which fake tensors do not have") from error
            except Exception as error:
                raise _located(probe, error) from error
            leaf = _gradient_reaches(out)
            reached |= {name for name in wanted if id(fakes[name]) in leaf}
    lost = [name for name in wanted if name not in reached]
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        raise VerifyError(f"no gradient reaches {', '.join(lost[:3])}{more}: their result does not reach the output")
    return f"propagate in {len(new.graphs)} graph(s); a gradient reaches {len(wanted)} new parameters"


def _gradient_reaches(out: Any) -> set[int]:
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


def _reads_values(graph: fx.Graph) -> bool:
    return any(n.op == "call_method" and n.target in ("item", "tolist") for n in graph.nodes)


def _empty(tensor: torch.Tensor, device: str | None = None) -> torch.Tensor:
    """A tensor of the same geometry without values; a fake one inside a fake mode, where meta ones pass for real."""
    device = device or ("cpu" if tensor.is_meta else str(tensor.device))
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return _empty(tensor, "meta")


@contextlib.contextmanager
def _swapped(module: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Put `make(tensor)` in the place of every weight; gives the new ones by name."""
    held: list[tuple[dict[str, Any], dict[str, Any]]] = []
    made: dict[int, torch.Tensor] = {}
    by_name: dict[str, torch.Tensor] = {}
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


def _located(probe: _Probe, error: Exception) -> VerifyError:
    """A failure of propagation, told at the rule whose block caused it."""
    node = probe.at
    assert node is not None
    text = str(error).split("\n")[0]
    if isinstance(error, FxplugError):
        text = f"{text} (a decision of the original model does not hold after the rewrite)"
    shapes = ", ".join(
        f"{a.name} {list(probe.env[a].shape)}" for a in node.all_input_nodes if isinstance(probe.env.get(a), torch.Tensor)
    )
    origin = _origin(node)
    if origin is None:
        return VerifyError(f"'{node.name}' fails on {shapes or 'its inputs'}: {text}")
    entry = origin.meta["pass"]
    where = f"{entry['where']}: " if entry.get("where") else ""
    what = f"{where}{entry['name']}: block {entry.get('block', '')} at '{entry.get('site', '')}'"
    if origin is node:
        return VerifyError(f"{what} fails on {shapes}: {text}")
    made = probe.env.get(origin)
    before = origin.meta.get("shape")
    sizes = f"{list(made.shape)} where {list(before)} was" if isinstance(made, torch.Tensor) and before else "another value"
    return VerifyError(f"{what} gives {sizes}, and '{node.name}' cannot take it ({shapes}): {text}")


def _origin(node: fx.Node) -> fx.Node | None:
    """The inserted node nearest above a node."""
    seen, row = {node}, [node]
    while row:
        for n in row:
            if "pass" in n.meta and n.op == "call_module":
                return n
        row = [a for n in row for a in n.all_input_nodes if a not in seen and not seen.add(a)]  # type: ignore[func-returns-value]
    return None


# --- neutrality, on values


def _neutral(gm: TracedModule, new: TracedModule, call: Any, entries: list[dict[str, Any]]) -> str:
    loud = [entry["name"] for entry in entries if not entry["neutral"]]
    if loud:
        raise _Skip(f"{', '.join(loud)} changes the output by design")
    if any(t.is_meta for _, t in _tensors(new)) or any(isinstance(t, torch.Tensor) and t.is_meta for t in leaves(call)):
        raise _Skip("weights or inputs are on the meta device and have no values")
    added = {name for entry in entries for name in entry["inputs"]}
    old_call = (call[0], {k: v for k, v in call[1].items() if k not in added})
    names = ", ".join(e["name"] for e in entries) or "no pass"
    with _evaluating(gm, new):
        differ = _outputs_differ(gm, new, old_call, call)
        if differ and any(isinstance(m, nn.MultiheadAttention) for m in gm.modules()) and torch.allclose(*differ, rtol=1e-5):
            # torch's own way through it depends on gradients, and on whether q, k and v are one object
            return f"outputs agree within rounding ({names}): an opened MultiheadAttention computes in another order"
        if differ:
            raise VerifyError(_first_difference(new, call, entries, *differ))
    return f"outputs are torch.equal ({names})"


def _outputs_differ(gm: TracedModule, new: TracedModule, old_call: Any, call: Any) -> tuple[Any, Any] | None:
    """The first outputs that are not equal."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        before = leaves(gm(*old_call[0], **old_call[1]))
        torch.manual_seed(0)
        after = leaves(new(*call[0], **call[1]))
    pairs = zip(before, after, strict=True)
    return next(((a, b) for a, b in pairs if isinstance(a, torch.Tensor) and not _equal(a, b)), None)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(a.isnan(), b.isnan()):
        return False
    return torch.equal(a.nan_to_num(), b.nan_to_num())


@contextlib.contextmanager
def _evaluating(*modules: nn.Module) -> Iterator[None]:
    """Evaluation mode for the time of a check; each module's own mode is given back."""
    held = [(m, m.training) for root in modules for m in root.modules()]
    roots = [(root, root.training) for root in modules]
    try:
        for root, training in roots:
            if training:
                root.eval()
        yield
    finally:
        for root, training in roots:
            if training:
                root.train()
        for module, training in held:
            if not isinstance(module, TracedModule):
                module.training = training


def _first_difference(new: TracedModule, call: Any, entries: list[dict[str, Any]], a: Any, b: Any) -> str:
    names = ", ".join(entry["name"] for entry in entries)
    off = (
        f"by {(a - b).abs().max().item():.1e}"
        if a.shape == b.shape
        else f"in shape: {list(b.shape)} instead of {list(a.shape)}"
    )
    text = f"{names} says it is neutral, but outputs differ {off}"

    class Watch(_Probe):
        found: fx.Node | None = None

        def run_node(self, n: fx.Node) -> Any:
            out = super().run_node(n)
            if self.found is None and n.op == "call_module" and "pass" in n.meta and isinstance(out, torch.Tensor):
                given = [self.env[i] for i in n.all_input_nodes if isinstance(self.env.get(i), torch.Tensor)]
                if not any(_equal(x, out) for x in given):
                    self.found = n
            return out

    watch = Watch(new, new.graph, call)
    watch.go()
    if watch.found is not None:
        entry = watch.found.meta["pass"]
        where = f" ({entry['where']})" if entry.get("where") else ""
        text += f"\n  first region to differ: {entry['site']} ({entry['block']}){where}"
    return text


# --- one graph


def _one_graph(gm: TracedModule, new: TracedModule, call: Any) -> str:
    failed = _capture_error(new, call)
    if failed is None:
        return "torch.compile(fullgraph=True) captures one graph"
    if _capture_error(gm, call) is not None:
        raise _Skip(f"the model itself is not one graph before the rewrite either: {failed}")
    raise VerifyError(f"torch.compile(fullgraph=True) does not give one graph: {failed}")


def _capture_error(module: TracedModule, call: Any) -> str | None:
    """Why dynamo cannot capture the module whole, or None. Runs on the meta device, on a copy that is thrown away."""
    captured = 0

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        nonlocal captured
        captured += 1
        return graph.forward

    for mode, graph in module.graphs.items():
        tree = shell(module)
        with _swapped(tree, _meta):
            tree.train(mode)
            copy = TracedModule(tree, {mode: copy_graph(graph)})
            inputs = map_leaves(call, lambda t, _: _meta(t))
            captured = 0
            try:
                with torch.no_grad():
                    torch.compile(copy, backend=backend, fullgraph=True)(*inputs[0], **inputs[1])
            except Exception as error:
                lines = [line.strip() for line in str(error).split("\n") if line.strip()]
                return " ".join(lines[:3]) or type(error).__name__
            if captured != 1:
                return f"{captured} graphs"
    return None
