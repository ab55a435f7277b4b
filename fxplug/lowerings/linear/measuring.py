"""Measuring which form a layer with its low-rank update takes, for the shapes of a module, on the device at hand."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ...errors import SpecError, brief_fields, outline
from ...ir.traced_module import Graph, TracedModule
from ...low_rank import side
from . import forms, kernels, operators
from .forms import Case
from .layers import check_traced, layers

FASTER = 0.97  # a form is taken whose median is below this, and three quarters of whose turns are below 1
LEAST = 2e-3  # seconds that one turn of a form takes at least


@dataclass(frozen=True)
class Timing:
    """What was measured for one case: the milliseconds of each form's call, the ratios to `stock`, and the form to take.

    `ratios` are the median and the upper quartile over turns of each form's time over that of `stock` in the same turn.
    """

    case: Case
    form: str
    milliseconds: Mapping[str, float]
    ratios: Mapping[str, tuple[float, float]]
    layers: Sequence[str]

    __repr__ = brief_fields


@dataclass(frozen=True)
class Tuned:
    """The timings of a module's cases, and the file that keeps them."""

    timings: Sequence[Timing]
    file: Path

    __repr__ = brief_fields

    def __str__(self) -> str:
        return outline(self.listing)

    @property
    def listing(self) -> str:
        """Every case and form as text."""
        lines = []
        for timing in self.timings:
            c = timing.case
            of = f"rank {c.rank}" + (f" x {c.slots} slots" if c.slots else "")
            lines.append(f"{c.rows} rows, {c.inner} -> {c.outer}, {of}, {c.dtype}: {len(timing.layers)} layers")
            for form, spent in timing.milliseconds.items():
                median, quartile = timing.ratios[form]
                chosen = "  <- taken" if form == timing.form else ""
                lines.append(f"  {form:9} {spent:9.3f} ms  x{median:.3f} (three quarters below x{quartile:.3f}){chosen}")
        return "\n".join([*lines, f"kept in {self.file}"])


def tune(
    gm: TracedModule,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    compiled: bool = False,
    turns: int = 15,
) -> Tuned:
    """Measure the forms of each linear layer with a `Lora` in `gm`, and keep what was fastest for `fuse(gm, "auto")`.

    With inputs the shapes are those that the layers see with them, else those of the trace. The layers are measured on
    tensors of their own, without gradients, on the device of their weights, in alternation with the stock form; `compiled`
    measures each form as torch.compile makes it. Slots are measured with one adapter for the whole batch, and never
    in the weight, as samples may take adapters of their own. A form is taken only
    where it was faster than stock by 3 % in the median of the turns, and faster at all in three quarters of them.
    Raises SpecError for what is no traced module, or has no such layer.
    """
    check_traced(gm, "tune")
    graph: Any = next(iter(gm.graphs.values())) if len(gm.graphs) == 1 else gm.graphs[gm.training]
    rows = seen(gm, graph, args, kwargs or {}) if args or kwargs else {}
    found: dict[Case, list[Any]] = {}
    device = torch.device("cpu")
    for layer in layers(graph, gm, (nn.Linear,)):
        count = rows.get(layer.node.name, forms.rows_of(layer.node))
        if layer.lora is not None and count:
            found.setdefault(forms.case_of(layer.module, layer.block, count), []).append(str(layer.node.target))
            device = layer.module.weight.device
    if not found:
        raise SpecError("no linear layer here has a Lora that could be fused with it: nothing to tune")
    timings = [measure(device, case, names, compiled, turns) for case, names in sorted(found.items())]
    entries = {t.case: {"form": t.form, "ratios": t.ratios, "milliseconds": t.milliseconds} for t in timings}
    return Tuned(timings, forms.write(device, entries))


def seen(gm: TracedModule, graph: Graph, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, int]:
    """How many rows each linear layer's call has with these inputs, by the name of its node."""
    found: dict[str, int] = {}

    class Watch(fx.Interpreter):
        def call_module(self, target: Any, given: Any, options: Any) -> Any:
            result = super().call_module(target, given, options)
            if isinstance(self.fetch_attr(target), nn.Linear) and isinstance(result, Tensor):
                found[self.current.name] = result.numel() // max(result.shape[-1], 1)
            return result

        def run_node(self, n: fx.Node) -> Any:
            self.current = n
            return super().run_node(n)

    with torch.no_grad():
        Watch(gm, graph=graph).run(*_bound(gm, args, kwargs))
    return found


def _bound(gm: TracedModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments of a call in the order of the graph's inputs."""
    bound = inspect.signature(gm.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return list(bound.arguments.values())


def measure(device: torch.device, case: Case, names: Sequence[str], compiled: bool, turns: int) -> Timing:
    """The timing of one case."""
    calls = {form: _ready(call, compiled) for form, call in calls_of(device, case).items()}
    repeats = {form: max(1, round(LEAST / max(_time(device, call, 1), 1e-6))) for form, call in calls.items()}
    times: dict[str, list[float]] = {form: [] for form in calls}
    for turn in range(turns):
        for form in list(calls) if turn % 2 else reversed(calls):
            times[form].append(_time(device, calls[form], repeats[form]))
    ratios = {}
    for form, spent in times.items():
        each = [one / base for one, base in zip(spent, times["stock"], strict=True)]
        ratios[form] = (statistics.median(each), statistics.quantiles(each, n=4)[2] if turns > 1 else each[0])
    faster = [form for form, (median, quartile) in ratios.items() if median < FASTER and quartile < 1]
    best = min(faster, key=lambda form: ratios[form][0], default="stock")
    return Timing(case, best, {form: 1000 * statistics.median(spent) for form, spent in times.items()}, ratios, names)


def calls_of(device: torch.device, case: Case) -> dict[str, Callable[[], Any]]:
    """A call of each form that this device has, on tensors of the case's shape."""
    dtype, slots = getattr(torch, case.dtype), case.slots
    inner = case.rank * max(slots, 1)

    def new(*shape: int) -> Tensor:
        made: Tensor = torch.randn(shape, device=device, dtype=dtype) * shape[-1] ** -0.5
        return made

    x, weight, bias = new(1, case.rows, case.inner), new(case.outer, case.inner), new(case.outer)
    down, up = new(inner, case.inner), new(case.outer, inner)
    uniform = torch.tensor([1.0] + [0.0] * (slots - 1) if slots else 1.0, device=device)
    rows = uniform.repeat_interleave(case.rank)[None] if slots else uniform
    rest: tuple[Any, ...] = (rows, slots) if slots else (rows,)

    def stock() -> Any:
        return torch.add(F.linear(x, weight, bias), side(x, down, up, rows))

    def call(form: str) -> Callable[[], Any]:
        function, last = forms.function(form, bool(slots))
        tile = {"tile": last[0]} if last else {}
        return lambda: function(x, weight, bias, down, up, *rest, **tile)

    found: dict[str, Callable[[], Any]] = {"stock": stock, "fused": call("fused")}
    if not slots:  # where samples may take slots of their own, none is measured for all of them
        found["remerge"] = lambda: operators.remerged_linear(x, weight, bias, down, up, rows)
    if kernels.fits(x, weight, rank=case.rank):
        # in float32 without TF32 there are no tensor cores for the large tiles to feed, and they take minutes to compile
        large = dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32
        found.update({form: call(form) for form in forms.KERNELS[0 if large else -1 :]})
    return found


def _ready(call: Callable[[], Any], compiled: bool) -> Callable[[], Any]:
    ready: Callable[[], Any] = torch.compile(call, fullgraph=True) if compiled else call
    with torch.no_grad():
        ready()
        ready()
    return ready


def _time(device: torch.device, call: Callable[[], Any], repeats: int) -> float:
    """Seconds of one call: by CUDA's events on a GPU."""
    with torch.no_grad():
        if device.type == "cuda":
            begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begun.record()
            for _ in range(repeats):
                call()
            done.record()
            torch.cuda.synchronize(device)
            return float(begun.elapsed_time(done)) / 1000 / repeats
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats
