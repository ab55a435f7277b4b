"""Measuring which form a layer with its low-rank update takes, for the shapes of a module, on the device at hand."""

from __future__ import annotations

import functools
import inspect
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from ...blocks.lora import Lora
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
    found: dict[Case, tuple[torch.device, list[str]]] = {}
    for layer in list_linear(gm.graph, gm):
        known = make_case(gm, layer) if isinstance(layer.block, Lora) else None
        if known is not None:
            path, (device, case) = str(layer.node.target), known
            case = case._replace(rows=rows.get(path, case.rows), compiled=int(compiled))
            found.setdefault(case, (device, []))[1].append(path)
    if not found:
        raise SpecError("nothing to tune: no linear layer here has a Lora that could be fused with it")
    return Tuned([measure(device, case, names, turns) for case, (device, names) in sorted(found.items())])


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


@torch.no_grad()
def measure(device: torch.device, case: Case, names: Sequence[str], turns: int) -> Timing:
    """Return the timing of one case."""
    calls = {form: _ready(call, bool(case.compiled)) for form, call in make_calls(device, case).items()}
    times, ratios = measure_calls(device, calls, turns, LEAST), {}
    for form, spent in times.items():
        each = [one / stock for one, stock in zip(spent, times["stock"], strict=True)]
        ratios[form] = (statistics.median(each), statistics.quantiles(each, n=4)[2] if turns > 1 else each[0])
    milliseconds = {form: 1000 * statistics.median(each) for form, each in times.items()}
    return Timing(case, forms.choose_form(case, forms.classify(device.type)), milliseconds, ratios, names)


def measure_calls(
    device: torch.device, calls: Mapping[str, Callable[[], Any]], turns: int, least: float
) -> dict[str, list[float]]:
    """Return the seconds of each call in each turn, of at least so many seconds; every second turn is the other way round."""
    repeats = {form: max(1, round(least / max(_time(device, call, 1), 1e-6))) for form, call in calls.items()}
    times: dict[str, list[float]] = {form: [] for form in calls}
    for turn in range(turns):
        for form in list(calls) if turn % 2 else reversed(list(calls)):
            times[form].append(_time(device, calls[form], repeats[form]))
    return times


def make_calls(device: torch.device, case: Case) -> dict[str, Callable[[], Any]]:
    """Return a call of each form that this device supports, on tensors of the case's shape, for one adapter."""
    dtype, draws, width = getattr(torch, case.dtype), torch.Generator(device).manual_seed(0), case.rank * max(case.slots, 1)
    shapes = (1, case.rows, case.inner), (case.outer, case.inner), (case.outer,), (width, case.inner), (case.outer, width)
    x, weight, bias, down, up = (
        (torch.randn(shape, device=device, generator=draws) * shape[-1] ** -0.5).to(dtype) for shape in shapes
    )
    gates, more, run = torch.ones((), device=device), tuple[Any, ...](), cast(Any, operators.run_lora_linear)
    if case.slots:
        gates, more, run = torch.zeros(1, width, device=device), (case.slots, 0), operators.run_bank_linear
        gates[:, : case.rank] = 1
    found: dict[str, Callable[[], Any]] = {
        "stock": lambda: torch.add(F.linear(x, weight, bias), compute_update(x, down, up, gates))
    }
    for form in ("fused", "blas") if device.type == "cpu" else ("fused",):
        if form == "blas" or device.type != "cpu" or dtype == torch.float32:
            found[form] = functools.partial(run, x, weight, bias, down, up, gates, *more, form)
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
