"""Measuring which form a layer with its low-rank update takes, for the shapes of a module, on the device at hand."""

from __future__ import annotations

import inspect
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ...blocks.low_rank import side
from ...core.errors import SpecError, brief_fields, outline, shown
from ...core.ir.containers import tensor_at
from ...core.ir.traced_module import TracedModule, check_traced
from . import forms, operators
from .forms import Case
from .layers import Layer, argument, linear_layers

FASTER = 0.97  # a form is taken whose median is below this, and three quarters of whose turns are below 1
LEAST = 2e-3  # seconds that one turn of a form takes at least
TURNS, FEWEST = 24, 4  # of `settle`: at most, and at least
CERTAIN = 1.05  # the most that a form may surely take over any other if it is to be kept
BUSY = 1.2  # of the time that measuring took, over that in which this thread had the processor: nothing is kept
BRIEF = 2e-4  # seconds that one turn takes at least there
MOST = 10_000  # turns that may be asked for
BUDGET = 2.0  # seconds of this process that all cases together may take before they get no more turns than the fewest
HOPELESS = 1.3  # a form that takes so much longer than the fastest in the best of two turns gets no other
PRODUCTS = 1.5e9  # multiplications of one call of all cases there: what has more is measured with fewer rows
LARGEST = 1.5e8  # and of one case
DTYPES = ("float16", "bfloat16", "float32", "float64")


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
    args: Sequence[Any] | torch.Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    compiled: bool = False,
    turns: int = 15,
) -> Tuned:
    """Measure the forms of each linear layer with a `Lora` in `gm`, and keep what was fastest for `fuse(gm, "auto")`.

    With inputs the shapes are those that the layers see with them, else those of the trace. The layers are measured on
    tensors of their own, without gradients, on the device of their weights, in alternation with the stock form; `compiled`
    measures each form as torch.compile makes it. Slots are measured with one adapter for the whole batch. A form is taken only
    where it was faster than stock by 3 % in the median of the turns, and faster at all in three quarters of them.
    Raises SpecError for what is no traced module, or has no such layer, and for a number of turns that is none.
    """
    check_traced(gm, "tune")
    if not isinstance(turns, int) or isinstance(turns, bool) or not 1 <= turns <= MOST:
        raise SpecError(f"turns must be a whole number from 1 to {MOST}, not {shown(turns)}")
    args = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    rows = rows_of(gm, args, kwargs or {}) if args or kwargs else {}
    found: dict[Case, list[Any]] = {}
    device = torch.device("cpu")
    graph: Any = gm.graph
    for node, layer in linear_layers(graph, gm):
        known = None if layer is None or layer.lora is None else case_of(gm, node, layer)
        if known is not None:
            path, (device, case) = str(node.target), known
            case = case._replace(rows=rows.get(path, case.rows), compiled=int(compiled))
            found.setdefault(case, []).append(path)
    if not found:
        raise SpecError("nothing to tune: no linear layer here has a Lora that could be fused with it")
    timings = [measure(device, case, names, turns) for case, names in sorted(found.items())]
    entries = {t.case: {"form": t.form, "ratios": t.ratios, "milliseconds": t.milliseconds} for t in timings}
    return Tuned(timings, forms.write(device, entries))


def case_of(
    tree: nn.Module, node: fx.Node, layer: Layer | None, dtype: torch.dtype | None = None
) -> tuple[torch.device, Case] | None:
    """The device and the case of a linear layer, with the `Lora` behind it, for the rows of the trace; None if not known."""
    read = argument(node, 1, "weight") if layer is None else None
    if isinstance(read, fx.Node) and read.op == "get_attr":
        weight: Any = tensor_at(tree, str(read.target))
    else:
        weight = None if layer is None else layer.module.weight
    shape, block = node.meta.get("shape"), None if layer is None else layer.block
    if not shape or type(weight) not in (torch.Tensor, nn.Parameter) or weight.dim() != 2:
        return None
    named = str(dtype or weight.dtype).removeprefix("torch.")
    outer, inner = weight.shape
    rank, slots = (0, 0) if block is None else (block.rank, block.slots)
    return weight.device, Case(named, int(math.prod(shape[:-1])), inner, outer, rank, slots)


def rows_of(gm: TracedModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, int]:
    """How many rows each linear layer has in a call, by its path."""
    found: dict[str, int] = {}

    class FlopCounter(fx.Interpreter):
        def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
            result = super().call_module(target, args, kwargs)
            if isinstance(self.fetch_attr(target), nn.Linear):
                found[str(target)] = result.numel() // max(result.shape[-1], 1)
            return result

    bound = inspect.signature(gm.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    graph: Any = next(iter(gm.graphs.values())) if len(gm.graphs) == 1 else gm.graphs[gm.training]
    with torch.no_grad():
        FlopCounter(gm, graph=graph).run(*bound.arguments.values())
    return found


def measure(device: torch.device, case: Case, names: Sequence[str], turns: int) -> Timing:
    """The timing of one case."""
    calls = {form: _ready(call, bool(case.compiled)) for form, call in calls_of(device, case).items()}
    with torch.no_grad():
        times = _time_alternating(device, calls, turns, LEAST)
    return Timing(case=case, layers=names, **_entry(times)[0])


def _time_alternating(device: torch.device, calls: dict[str, Any], turns: int, least: float) -> dict[str, list[float]]:
    """Seconds of each call in each turn, who begins alternating."""
    repeats = {form: max(1, round(least / max(_time(device, call, 1), 1e-6))) for form, call in calls.items()}
    times: dict[str, list[float]] = {form: [] for form in calls}
    for turn in range(turns):
        for form in list(calls) if turn % 2 else reversed(calls):
            times[form].append(_time(device, calls[form], repeats[form]))
    return times


def _ratios(times: Mapping[str, Sequence[float]], over: str) -> dict[str, tuple[float, float]]:
    """The median and the upper quartile of each form's time over that of another in the same turn."""
    ratios = {}
    for form, spent in times.items():
        each = [one / base for one, base in zip(spent, times[over], strict=True)]
        ratios[form] = (statistics.median(each), statistics.quantiles(each, n=4)[2] if len(each) > 1 else each[0])
    return ratios


def _best(ratios: Mapping[str, tuple[float, float]]) -> str:
    """The form to take: the fastest of those that were clearly faster than stock, else stock."""
    faster = [form for form, (median, quartile) in ratios.items() if median < FASTER and quartile < 1]
    return min(faster, key=lambda form: ratios[form][0], default="stock")


def calls_of(device: torch.device, case: Case) -> dict[str, Callable[[], Any]]:
    """A call of each form that this device has, on tensors of the case's shape; `case.grad`: with its gradients."""
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
        return {"stock": ready(F.linear, x, weight, bias), "fused": ready(operators.linear, x, weight, bias)}

    def stock() -> Any:
        return torch.add(F.linear(x, weight, bias), side(x, down, up, rows))

    found = {"stock": ready(stock)}
    for form in ["fused", *(["blas"] if device.type == "cpu" and dtype == torch.float32 else [])]:
        function, last = forms.function(form, bool(slots))
        given = (x, weight, bias, down, up, *rest, *((0,) if slots else ()), *last)
        found[form] = ready(function, *given)
    return found


# --- what `fuse` asks for


def settle(seen: set[tuple[torch.device, Case]]) -> dict[torch.device, dict[Case, dict[str, Any]]]:
    """What is measured of these cases on each device, without gradients and with them; what is not there is measured now.

    A few shapes take some BUDGET seconds together, less where few turns are enough. What is certain is kept as `tune` keeps its
    own, which goes before, and in this process where the file cannot be written; what is not is given, and measured again by
    the next call. Forms are timed as eager code calls them, and compiled code takes the same: whether a compiler makes the sum
    of base and update for nothing depends on what is around a layer. `tune(compiled=True)` compiles each form.
    """
    found: dict[torch.device, dict[Case, dict[str, Any]]] = {}
    for device in {device for device, _ in seen}:
        kept = MEASURED.setdefault(forms.cache_file(device), {})
        found[device] = {**kept, **forms.measured(device)}
        cases = {case for other, case in seen if other == device and _measurable(device, case)}
        missing = [case._replace(grad=grad) for case in sorted(cases) for grad in (0, 1)]
        missing = [case for case in missing if forms.choose(found[device], case) is None]
        if device.type not in ("cpu", "cuda") or not missing:
            continue
        begun, sure, all_certain = clock(), dict[Case, dict[str, Any]](), True
        for index, case in enumerate(missing):
            rows = int(min(LARGEST, PRODUCTS / len(missing)) / (case.inner * case.outer))
            fewer = case._replace(rows=min(case.rows, max(rows, 32)))
            found[device][case], certain = _brief(device, fewer, begun + BUDGET * (index + 1) / len(missing))
            sure.update({case: found[device][case]} if certain else {})
            all_certain = all_certain and certain
        kept.update(sure)
        if not all_certain:
            forms.say(
                "which form of a layer is fastest was not certain for every shape, as the machine was busy: these were chosen "
                "for this module alone, and the next fuse measures them again; 'fxplug tune' on a quiet machine settles them"
            )
        try:
            forms.write(device, sure)
        except SpecError as error:
            forms.say(f"the measurements could not be saved and are used in this process only: {error}")
    return found


def _measurable(device: torch.device, case: Case) -> bool:
    """Whether there is something to measure: no other form of a layer without an update is there but on a CPU."""
    sizes = case.rows * case.inner * case.outer
    return sizes > 0 and case.dtype in DTYPES and (case.rank > 0 or device.type == "cpu")


MEASURED: dict[Path, dict[Case, dict[str, Any]]] = {}  # by this process: the file may be where nothing can be written


@torch.inference_mode(False)
def _brief(device: torch.device, case: Case, until: float) -> tuple[dict[str, Any], bool]:
    """The entry of a case, and whether it is certain. It ends when it is, or at `until`, or after so many turns."""
    begun, had = time.perf_counter(), time.thread_time()
    with torch.autocast(device.type, enabled=False), torch.set_grad_enabled(bool(case.grad)):
        calls = calls_of(device, case)
        first = {form: min(seconds) for form, seconds in _time_alternating(device, calls, 2, 0).items()}
        calls = {form: call for form, call in calls.items() if form == "stock" or first[form] <= HOPELESS * min(first.values())}
        times: dict[str, list[float]] = {form: [] for form in calls}
        certain, entry = False, dict[str, Any]()
        for turn in range(0, TURNS, 2):
            if turn < FEWEST or not (certain or clock() > until):
                for form, seconds in _time_alternating(device, calls, 2, BRIEF).items():
                    times[form] += seconds
                entry, certain = _entry(times)
    spent, had = time.perf_counter() - begun, time.thread_time() - had
    return entry, certain and (device.type != "cpu" or spent < BUSY * had)


def _entry(times: Mapping[str, Sequence[float]]) -> tuple[dict[str, Any], bool]:
    """The entry of a case by the seconds of each turn, and whether its form is certain."""
    ratios = _ratios(times, "stock")
    milliseconds = {form: 1000 * statistics.median(each) for form, each in times.items()}
    form = _best(ratios)
    bounds = [_bound_of_median([a / b for a, b in zip(times[form], each, strict=True)]) for each in times.values()]
    return {"form": form, "ratios": ratios, "milliseconds": milliseconds}, max(bounds) < CERTAIN


def _bound_of_median(ratios: Sequence[float]) -> float:
    """What the median of more such turns is below in five cases of six: the value half a root of their number above it."""
    count = len(ratios)
    return sorted(ratios)[min(count - 1, round(count / 2 + math.sqrt(count) / 2))]


def chosen(found: Mapping[Case, dict[str, Any]], case: Case) -> tuple[str, str]:
    """The form of a case in all modes, as `operators` reads it, and in words with times over `stock`.

    Compiled code takes that of eager code where `tune(compiled=True)` did not measure it.
    """
    taken, words = [], dict[str, list[str]]()
    for compiled, grad in operators.MODES:
        eager = case._replace(compiled=0, grad=int(grad))
        each = eager._replace(compiled=int(compiled))
        each = each if forms.choose(found, each) else eager
        form = forms.choose(found, each) or "stock"
        taken.append(form)
        ratio = dict(found.get(each, {}).get("ratios", {})).get(form, (1.0,))[0]
        code = ("compiled" if compiled else "eager") + (" with gradients" if grad else "")
        words.setdefault(form, []).append(code if form == "stock" else f"{code} x{ratio:.2f}")
    if set(taken) == {"stock"}:
        return "stock", "stock"
    text = ", ".join(f"{form} ({', '.join(where)})" for form, where in words.items())
    return (taken[0] if len(set(taken)) == 1 else ",".join(taken)), text


clock = time.process_time


def _ready(call: Callable[[], Any], compiled: bool) -> Callable[[], Any]:
    ready: Callable[[], Any] = torch.compile(call, fullgraph=True) if compiled else call
    with torch.no_grad():
        ready()
        ready()
    return ready


def _time(device: torch.device, call: Callable[[], Any], repeats: int) -> float:
    """Seconds of one call: by CUDA's events on a GPU, and those of this thread where it computes alone."""
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
