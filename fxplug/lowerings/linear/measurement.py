"""Measuring which form a layer with its low-rank update takes, for the shapes of a module, on the device at hand."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...blocks.low_rank import compute_update
from ...core.errors import SpecError, cut_lines, format_fields, quote
from ...core.ir.traced_module import TracedModule, check_traced
from ...core.rewriter.probe import GraphRun
from . import forms, operators
from .forms import Case, make_case
from .layers import list_linear

LEAST = 2e-3  # seconds that one turn of a form takes at least
MOST = 10_000  # turns that may be asked for


@dataclass(frozen=True)
class Timing:
    """What was measured for one case: the milliseconds of each form's call, the ratios to `stock`, and the form it takes.

    `ratios` are the median and the upper quartile over turns of each form's time over that of `stock` in the same turn.
    """

    case: Case
    form: str
    milliseconds: Mapping[str, float]
    ratios: Mapping[str, tuple[float, float]]
    layers: Sequence[str]

    __repr__ = format_fields


@dataclass(frozen=True)
class Tuned:
    """The timings of a module's cases."""

    timings: Sequence[Timing]

    __repr__ = format_fields

    def __str__(self) -> str:
        return cut_lines(self.listing)

    @property
    def listing(self) -> str:
        """Full text: every case and form."""
        lines = []
        for timing in self.timings:
            c = timing.case
            of = f"rank {c.rank}" + (f" x {c.slots} slots" if c.slots else "")
            lines.append(f"{c.rows} rows, {c.inner} -> {c.outer}, {of}, {c.dtype}: {len(timing.layers)} layers")
            for form, spent in timing.milliseconds.items():
                median, quartile = timing.ratios[form]
                chosen = "  <- taken" if form == timing.form else ""
                lines.append(f"  {form:9} {spent:9.3f} ms  x{median:.3f} (three quarters below x{quartile:.3f}){chosen}")
        return "\n".join(lines)


def tune(
    gm: TracedModule,
    args: Sequence[Any] | torch.Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    compiled: bool = False,
    turns: int = 15,
) -> Tuned:
    """Measure the forms of each linear layer with a `Lora` in `gm`, beside the one that `fuse(gm, "auto")` takes.

    The layers are measured on tensors of their own, without gradients, on the device of their weights, in alternation with the
    stock form. Slots are measured with one adapter for the whole batch. Nothing is kept: a form is taken by a rule
    (`forms.choose_form`), and where another one is faster here, `fuse` takes its name.

    Args:
        gm: The rewritten module.
        args: Example inputs by position: the shapes are those that the layers see with them; without inputs those of the trace.
        kwargs: Example inputs by name.
        compiled: Whether each form is measured as torch.compile makes it.
        turns: How many times each form is timed.

    Returns:
        The times of each form, by shape; it prints as a table.

    Raises:
        SpecError: `gm` is no traced module, has no such layer, or `turns` is no number of turns.
    """
    check_traced(gm, "tune")
    if not isinstance(turns, int) or isinstance(turns, bool) or not 1 <= turns <= MOST:
        raise SpecError(f"turns must be a whole number from 1 to {MOST}, not {quote(turns)}")
    args = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    rows = rows_of(gm, args, kwargs or {}) if args or kwargs else {}
    found: dict[Case, list[Any]] = {}
    device = torch.device("cpu")
    graph: Any = gm.graph
    for node, layer in list_linear(graph, gm):
        known = None if layer is None or layer.lora is None else make_case(gm, node, layer)
        if known is not None:
            path, (device, case) = str(node.target), known
            case = case._replace(rows=rows.get(path, case.rows), compiled=int(compiled))
            found.setdefault(case, []).append(path)
    if not found:
        raise SpecError("nothing to tune: no linear layer here has a Lora that could be fused with it")
    return Tuned([measure(device, case, names, turns) for case, names in sorted(found.items())])


def rows_of(gm: TracedModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of rows of each linear layer in a call, by its path."""
    found: dict[str, int] = {}

    bound = inspect.signature(gm.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    graph: Any = next(iter(gm.graphs.values())) if len(gm.graphs) == 1 else gm.graphs[gm.training]
    with torch.no_grad():
        for node, value in GraphRun(gm, graph, list(bound.arguments.values()), keep=False):
            if node.op == "call_module" and isinstance(gm.get_submodule(str(node.target)), nn.Linear):
                found[str(node.target)] = value.numel() // max(value.shape[-1], 1)
    return found


def measure(device: torch.device, case: Case, names: Sequence[str], turns: int) -> Timing:
    """Return the timing of one case."""
    with torch.set_grad_enabled(bool(case.grad)):
        calls = {form: _ready(call, bool(case.compiled)) for form, call in calls_of(device, case).items()}
        times = _time_alternating(device, calls, turns, LEAST)
    milliseconds = {form: 1000 * statistics.median(each) for form, each in times.items()}
    return Timing(case, forms.choose_form(case, forms.classify(device.type)), milliseconds, _ratios(times, "stock"), names)


def _time_alternating(device: torch.device, calls: dict[str, Any], turns: int, least: float) -> dict[str, list[float]]:
    """Return the seconds of each call in each turn, in alternating order."""
    repeats = {form: max(1, round(least / max(_time(device, call, 1), 1e-6))) for form, call in calls.items()}
    times: dict[str, list[float]] = {form: [] for form in calls}
    for turn in range(turns):
        for form in list(calls) if turn % 2 else reversed(calls):
            times[form].append(_time(device, calls[form], repeats[form]))
    return times


def _ratios(times: Mapping[str, Sequence[float]], over: str) -> dict[str, tuple[float, float]]:
    """Return the median and the upper quartile of each form's time relative to that of another in the same turn."""
    ratios = {}
    for form, spent in times.items():
        each = [one / base for one, base in zip(spent, times[over], strict=True)]
        ratios[form] = (statistics.median(each), statistics.quantiles(each, n=4)[2] if len(each) > 1 else each[0])
    return ratios


def calls_of(device: torch.device, case: Case) -> dict[str, Callable[[], Any]]:
    """Return a call of each form that this device supports, on tensors of the case's shape; `case.grad`: with gradients."""
    dtype, slots, grad = getattr(torch, case.dtype), case.slots, bool(case.grad)
    inner, draws = case.rank * max(slots, 1), torch.Generator(device).manual_seed(0)

    def new(*shape: int, trained: bool = False) -> Tensor:
        made: Tensor = torch.randn(shape, device=device, dtype=torch.float32, generator=draws) * shape[-1] ** -0.5
        return made.to(dtype).requires_grad_(trained and grad)

    x, weight, bias = new(1, case.rows, case.inner, trained=True), new(case.outer, case.inner), new(case.outer)
    down, up = (new(inner, case.inner, trained=not slots), new(case.outer, inner, trained=not slots)) if inner else (x, x)
    uniform = torch.tensor([1.0] + [0.0] * (slots - 1) if slots else 1.0, device=device, dtype=torch.float32)
    rows = uniform.repeat_interleave(case.rank)[None] if slots else uniform
    rest: tuple[Any, ...] = (rows, slots) if slots else (rows,)
    wanted = [tensor for tensor in ((x, down, up) if inner else (x,)) if tensor.requires_grad]
    g = new(1, case.rows, case.outer)

    def ready(function: Any, *given: Any) -> Callable[[], Any]:
        def call() -> Any:
            y = function(*given)
            return torch.autograd.grad(y, wanted, g) if grad else y

        return call

    if not inner:
        return {"stock": ready(F.linear, x, weight, bias), "fused": ready(operators.run_linear, x, weight, bias)}

    def stock() -> Any:
        return torch.add(F.linear(x, weight, bias), compute_update(x, down, up, rows))

    found = {"stock": ready(stock)}
    own = device.type != "cpu" or dtype == torch.float32
    for form in (["fused"] if own else []) + (["blas"] if device.type == "cpu" else []):
        function, last = forms.make_function(form, bool(slots))
        given = (x, weight, bias, down, up, *rest, *((0,) if slots else ()), *last)
        found[form] = ready(function, *given)
    return found


def _ready(call: Callable[[], Any], compiled: bool) -> Callable[[], Any]:
    ready: Callable[[], Any] = torch.compile(call, fullgraph=True) if compiled else call
    ready()
    ready()
    return ready


def _time(device: torch.device, call: Callable[[], Any], repeats: int) -> float:
    """Return the seconds of one call: by CUDA events on a GPU, by this thread's CPU time if it is the only one computing."""
    if device.type == "cuda":
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begun.record()
        for _ in range(repeats):
            call()
        done.record()
        torch.cuda.synchronize(device)
        return float(begun.elapsed_time(done)) / 1000 / repeats
    now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = now()
    for _ in range(repeats):
        call()
    return (now() - start) / repeats
