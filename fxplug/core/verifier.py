"""What must hold after a rewrite: lint, shapes, neutrality, untouched base, gradients, one compiled graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from . import extensions
from .artifacts.artifact import check_savable
from .capture.fake_tensors import silence_torch
from .errors import ArtifactError, VerifyError, cut_lines, format_fields
from .ir.containers import count_pass_parameters, list_leaves, list_tensors, make_call, map_leaves
from .ir.graph import Graph, copy_graph, replace
from .ir.ops import TO_DENSE, other_kind
from .ir.traced_module import TracedModule, strip_to_container
from .quantised import cut_gradient, describe_layer
from .rewriter import neutrality
from .rewriter.neutrality import restore_buffers
from .rewriter.probe import (
    GraphRun,
    Unchecked,
    bind_placeholders,
    find_gradient_cut,
    find_gradient_leaves,
    locate_error,
    make_empty,
    make_meta,
    swap_weights,
)
from .torch_internals.tensors import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode, version


@dataclass
class Check:
    """One thing that was checked: `status` is ok, failed, skipped, or cannot, `detail` says what was found.

    A module that cannot be saved or exported is right all the same; it is only good to know beforehand.
    """

    name: str
    status: str
    detail: str
    seconds: float

    __repr__ = format_fields


@dataclass
class Report:
    """What `verify` found. `str()` gives it as text, `json()` as plain values."""

    checks: list[Check] = field(default_factory=list)
    summary: str = ""

    __repr__ = format_fields

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not any(c.status == "failed" for c in self.checks)

    def __str__(self) -> str:
        return cut_lines(self.listing)

    @property
    def listing(self) -> str:
        """All checks as text."""
        rows = [f"{c.status:8}{c.name:12}{c.detail}" for c in self.checks]
        return "\n".join([*rows, *([self.summary] if self.summary else [])])

    def json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {"ok": self.ok, "summary": self.summary, "checks": [asdict(c) for c in self.checks]}


@dataclass
class Subject:
    """What a check of an extension is called with: a function (subject) -> what it found, or None where it does not apply.

    It runs where all checks before it hold, and raises VerifyError for what is wrong, Unchecked for what cannot be checked
    here, and Unsupported where the module is right, and cannot be used for what the check is about. `call` are the example
    inputs, (args, kwargs); `entries` the records of the passes that `new` has and `gm` lacks; `results` what each graph of
    `new` gives for them, on fake tensors.
    """

    gm: TracedModule
    new: TracedModule
    call: tuple[tuple[Any, ...], dict[str, Any]]
    entries: list[dict[str, Any]]
    results: list[Any] = field(default_factory=list)


class Unsupported(Exception):
    """Why something that others do with a module cannot be done with this one."""


def verify(
    gm: TracedModule,
    new: TracedModule,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    compile: bool = True,
) -> Report:
    """Check a rewritten module against the one it was made of, on example inputs of the model and of what passes added.

    Lint; base weights the same objects under the same keys; shapes by fake propagation in every mode, and a gradient for every
    new parameter; when all new passes are neutral, results, buffers and inputs that are `torch.equal` after each call, and
    gradients that reach what they reached; whether `save` would take it, and nothing in the graph stands against `export`; with
    `compile`, one graph under `torch.compile(fullgraph=True)`, by capture alone, where calls that are equal to the compiler are
    captured once.

    Values are needed for neutrality only: on meta weights or inputs it is reported as skipped. Both modules are then called
    with the same seed on copies of inputs and state: in evaluation twice, the second time with gradients; in training, where
    anything in them can know of it; and with channels-last copies of 4-D and 5-D inputs, where passes map a parameter or stand
    at such values. Other shapes, dtypes and devices than the example's are not tried, nor are values of gradients. Nothing is
    left changed.

    Extensions add checks of their own: see `Subject`. A module that is parallel is checked as its first process runs it, with
    nothing travelling, and then as fxplug.parallel says, on pretended processes and on real ones.

    Args:
        gm: The module before.
        new: The rewritten module.
        args: Example inputs by position, as for `trace`.
        kwargs: Example inputs by name, those that passes have added too.
        compile: Whether the compiler must capture one graph.

    Returns:
        The report: a line for each check.

    Raises:
        VerifyError: Something does not hold; the error has the report as its `report`.
    """
    call = make_call(args, kwargs)
    report = Report(summary=count_pass_parameters(new))
    old = {entry["name"] for entry in gm.meta.get("passes", [])}
    entries = [entry for entry in new.meta.get("passes", []) if entry["name"] not in old]
    written: set[str] = set()
    subject = Subject(gm, new, call, entries)
    known: set[str] = set()
    tests: list[tuple[str, Callable[[], str | None]]] = [
        ("lint", lambda: _lint(new)),
        ("base", lambda: _base_untouched(gm, new, entries)),
        ("shapes", lambda: _shapes_and_gradients(new, call, entries, written, subject.results)),
        ("neutral", lambda: _neutral(gm, new, call, entries, written if "shapes" in known else None)),
        ("saved", lambda: _saved(new)),
    ]
    if compile:
        tests.append(("one graph", lambda: _one_graph(gm, new, call)))
    with restore_buffers(gm, new) as restore:
        with as_first_rank(new):
            _run(tests, report, known)
        restore()
        if report.ok:
            names = extensions.list_parts("checks")
            more = [(name, partial(extensions.import_part("checks", name), subject)) for name in names]
            _run(more, report, known)
    if not report.ok:
        failed = [c.detail for c in report.checks if c.status == "failed"]
        verify_error = VerifyError("\n".join(failed))
        verify_error.report = report  # type: ignore[attr-defined]
        raise verify_error
    return report


def _run(tests: Sequence[tuple[str, Callable[[], str | None]]], report: Report, known: set[str]) -> None:
    """Run the checks one after the other; `known` gets the names of those that hold."""
    for name, test in tests:
        start = time.perf_counter()
        try:
            status, detail = "ok", test()
            known.add(name)
            if detail is None:
                continue
        except Unchecked as reason:
            status, detail = "skipped", str(reason)
        except Unsupported as reason:
            status, detail = "cannot", str(reason)
        except VerifyError as error:
            status, detail = "failed", str(error)
        report.checks.append(Check(name, status, detail, round(time.perf_counter() - start, 3)))
        if status == "failed" and name in ("lint", "shapes"):
            break  # nothing after it can be run


def _lint(new: TracedModule) -> str:
    for graph in new.graphs.values():
        try:
            graph.lint()
        except (AssertionError, RuntimeError) as error:
            raise VerifyError(f"the graph is not well formed: {error}") from error
    return f"{sum(len(g.nodes) for g in new.graphs.values())} nodes in {len(new.graphs)} graph(s)"


def _base_untouched(gm: TracedModule, new: TracedModule, entries: list[dict[str, Any]]) -> str:
    base, ours = dict(list_tensors(gm)), dict(list_tensors(new))
    for name, tensor in base.items():
        if ours.get(name) is not tensor:
            raise VerifyError(f"the base weight '{name}' was replaced by another tensor")
    prefixes = tuple(f"{entry['name']}." for entry in entries)
    for name in ours:
        if name not in base and not name.startswith(prefixes):
            raise VerifyError(f"the name of the new weight '{name}' does not begin with the name of a pass")
    return f"{len(base)} weights are the same tensors"


# --- shapes and gradients, on fake tensors


def _shapes_and_gradients(
    new: TracedModule, call: Any, entries: list[dict[str, Any]], written: set[str], results: list[Any]
) -> str:
    """Propagates shapes.

    `written` gets the names of the weights that a call writes, and `neutrality.INPUTS` for inputs; `results` what it gives.
    """
    prefixes = tuple(f"{entry['name']}." for entry in entries)
    wanted = [n for n, p in new.named_parameters() if n.startswith(prefixes) and p.is_floating_point()] if prefixes else []
    reached: set[str] = set()
    if kind := next((kind for t in list_leaves(call) if isinstance(t, torch.Tensor) and (kind := other_kind(t))), ""):
        raise VerifyError(f"an example input is a {kind} tensor, which a graph cannot take: {TO_DENSE}")
    if any(n.op == "call_method" and n.target in ("item", "tolist") for graph in new.graphs.values() for n in graph.nodes):
        raise Unchecked("the model reads values from its data, which fake tensors do not have")
    for graph in new.graphs.values():
        needed = any(name not in reached for name in wanted)  # one mode that trains a parameter is enough
        with FakeTensorMode(allow_non_fake_inputs=True), swap_weights(new, make_empty) as fakes, torch.set_grad_enabled(needed):
            inputs = map_leaves(call, lambda t, _: make_empty(t))
            for name in wanted:
                fakes[name].requires_grad_()
            run = GraphRun(new, graph, bind_placeholders(graph, inputs))
            try:
                with silence_torch():
                    out = run.finish()
            except VerifyError:
                raise
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise Unchecked("the model's sizes depend on its data, which fake tensors do not have") from error
            except Exception as error:  # the rewritten model's
                raise locate_error(run, error) from error
            results.append(out)
            written |= {name for name, t in fakes.items() if version(t)}
            written |= {neutrality.INPUTS for t in list_leaves(inputs) if isinstance(t, torch.Tensor) and version(t)}
            leaf = find_gradient_leaves(out)
            reached |= {name for name in wanted if id(fakes[name]) in leaf}
    trained = [entry["name"] for entry in entries if entry["train"] and not entry["slots"] and entry["sites"]]
    if wanted and trained and (path := cut_gradient(new)):
        layer = new.get_submodule(path)
        raise VerifyError(
            f"no gradient passes through '{path}' ({describe_layer(layer)}), because its library computes none, so the blocks "
            f"of {trained[0]} before it cannot be trained; set `train: false` to use the pass without training"
        )
    lost = [name for name in wanted if name not in reached]
    if lost:
        raise VerifyError(_lost(lost, run))
    return f"propagate in {len(new.graphs)} graph(s); a gradient reaches {len(wanted)} new parameters"


def _lost(names: list[str], run: GraphRun) -> str:
    """The parameters that no gradient reaches, and the block that lets none through, if that is another one."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    text = f"no gradient reaches {', '.join(names[:3])}{more}: the model's output does not depend on their result"
    calls = [n for n in run.graph.nodes if n.op == "call_module" and names[0].startswith(f"{n.target}.")]
    cut = next((found for n in calls if (found := find_gradient_cut(run, n)) is not None), None)
    if cut is None:
        return text
    entry = cut.meta["pass"]
    return f"{text}; {entry['name']}: block {entry['block']} at '{entry['site']}' passes no gradient on"


# --- modules that several processes run together


@contextmanager
def as_first_rank(module: nn.Module) -> Iterator[None]:
    """Let blocks that exchange tensors with other processes run as the first of them, with nothing travelling."""
    with ExitStack() as stack:
        for block in module.modules():
            if isinstance(block, extensions.DistributedPart):
                stack.enter_context(block.as_first_rank())
        yield


def is_split(module: nn.Module, name: str) -> bool:
    """Whether a pass of a module splits it over processes."""
    blocks = module._modules.get(name)
    return blocks is not None and any(isinstance(block, extensions.DistributedPart) for block in blocks.children())


# --- neutrality, on values


def _neutral(
    gm: TracedModule, new: TracedModule, call: Any, entries: list[dict[str, Any]], written: set[str] | None
) -> str:
    loud = [entry["name"] for entry in entries if not entry["neutral"]]
    if loud and all(is_split(new, name) for name in loud):
        raise Unchecked(f"{', '.join(loud)} may sum in another order: see 'parallel'")
    if loud:
        raise Unchecked(f"{', '.join(loud)} changes the output by design")
    need_values(new, call)
    return neutrality.check(gm, new, call, entries, written)


def need_values(new: TracedModule, call: Any) -> None:
    """Raises Unchecked for a module or inputs on the meta device."""
    tensors = [*(t for _, t in list_tensors(new)), *list_leaves(call)]
    if any(isinstance(t, torch.Tensor) and t.is_meta for t in tensors):
        raise Unchecked("weights or inputs are on the meta device and have no values")


# --- what can be done with it


def _saved(new: TracedModule) -> str:
    try:
        foreign = check_savable(new)
    except ArtifactError as error:
        raise Unsupported(str(error)) from error
    if foreign:
        return f"can be saved; load needs allow=[...] for {', '.join(foreign[:3])}"
    return "can be saved"


# --- one graph


def _one_graph(gm: TracedModule, new: TracedModule, call: Any) -> str:
    failed = _capture_error(new, call)
    if failed is None:
        return "torch.compile(fullgraph=True) captures one graph"
    if _capture_error(gm, call) is not None:
        raise Unchecked(f"the model is not one graph before the rewrite either: {failed}")
    raise VerifyError(f"torch.compile(fullgraph=True) does not give one graph: {failed}")


def _capture_error(module: TracedModule, call: Any) -> str | None:
    """Why dynamo cannot capture the module whole, or None. Equal calls are captured once; what fails so, again as it is."""
    for mode, graph in module.graphs.items():
        few = keep_distinct_calls(module, copy_graph(graph))
        if _capture(module, mode, few, call) is not None and (error := _capture(module, mode, copy_graph(graph), call)):
            return error
    return None


def _capture(module: TracedModule, mode: bool, graph: Graph, call: Any) -> str | None:
    """Why dynamo cannot capture a graph of a module, or None. Runs on the meta device, on a copy that is thrown away."""
    captured = 0

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        nonlocal captured
        captured += 1
        return graph.forward

    tree = strip_to_container(module)
    with swap_weights(tree, make_meta):
        tree.train(mode)
        copy = TracedModule(tree, {mode: graph})
        inputs = map_leaves(call, lambda t, _: make_meta(t))
        try:
            with torch.no_grad():
                torch.compile(copy, backend=backend, fullgraph=True)(*inputs[0], **inputs[1])
        except Exception as error:  # the compiler's
            lines = [line.strip() for line in str(error).split("\n") if line.strip()]
            return " ".join(lines[:3]) or type(error).__name__
    return None if captured == 1 else f"{captured} graphs"


def keep_distinct_calls(module: nn.Module, graph: Graph) -> Graph:
    """Take the later ones of equal calls out of a graph, in place; their users get the result of the first.

    Calls are equal that have the same function, or layers of torch or fxplug with the same classes, settings and sizes, and
    arguments and results of the same shapes and dtypes.
    """
    first: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        result = _sizes(node)
        if node.op in ("placeholder", "output") or (result is node and not node.meta.get("effect")):
            continue
        if node.op == "call_module":
            target: Any = _settings(module.get_submodule(str(node.target)))
        else:
            target = "" if node.op == "get_attr" else node.target
        key = (node.op, target, repr(fx.map_arg((node.args, node.kwargs), _sizes)), "" if result is node else repr(result))
        if first.setdefault(key, node) is not node:
            replace(node, first[key])
    return graph


def _sizes(node: fx.Node) -> Any:
    """Shape and dtype of a node's tensor, or its number; the node itself where it gives something else."""
    if "shape" in node.meta:
        return (tuple(node.meta["shape"]), node.meta["dtype"])
    return ("number", node.meta["value"]) if "value" in node.meta else node


def _settings(layer: nn.Module) -> Any:
    """What a layer's code can depend on, but for values of tensors; the layer itself where code in it is somebody's own."""
    settings = []
    for child in layer.modules():
        if type(child).__module__.partition(".")[0] not in ("torch", "fxplug"):
            return layer
        values = {key: value for key, value in vars(child).items() if key not in ("_parameters", "_buffers", "_modules")}
        tensors = [(key, t.shape, t.dtype) for key, t in [*child._parameters.items(), *child._buffers.items()] if t is not None]
        settings.append((type(child), repr(values), repr(tensors)))
    return tuple(settings)
