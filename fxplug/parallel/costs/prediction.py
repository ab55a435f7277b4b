"""What ways of splitting a model will cost, before anything runs: bytes, calls and time by resolution and number of devices.

Bytes and calls are those of the written graph, run without values and with nothing travelling. Time is a formula: work over
the device's speed, bytes over the link's, a moment for each call; keys and values that go around a ring travel while the
attention to what came before is computed (Liu et al. 2023, arXiv 2310.01889), everything else is waited for.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import FxplugError, SpecError, did_you_mean, format_fields, quote
from ...core.ir.containers import list_leaves, map_leaves
from ...core.ir.traced_module import TracedModule, strip_to_container
from ...core.rewriter.probe import GraphRun, make_empty, swap_weights
from ...core.torch_internals import tensors as kernels
from ..comparison import simulate_rank
from ..plan import Plan, list_senders, parallel_plan
from ..planning.trials import get_name
from ..planning.walk import bind
from ..runtime.attention import Attention
from ..runtime.mesh import fill_degrees, format_degrees
from ..runtime.pretended import make_position

# bytes a second that a process sends, and seconds that a call takes whatever its size; between what is promised and reached
LINKS = {"nvlink": (300e9, 10e-6), "pcie": (20e9, 15e-6), "100gbe": (10e9, 30e-6)}
SPEED = 300.0  # teraFLOP a second


@dataclass(frozen=True)
class Cost:
    """One way of splitting one step: what a process sends and computes, and seconds.

    `ways` are the arguments that `parallel_plan` takes for it: none for one device, and for what no plan is.
    """

    pixels: int
    devices: int
    method: str
    calls: int
    bytes: int
    seconds: float
    speedup: float
    compute: float  # the share of the time in which it computes
    ways: Mapping[str, int]

    __repr__ = format_fields


def link_of(text: str) -> tuple[float, float]:
    """Return bytes per second and seconds per call of a link by name, or by its GB/s. Raises SpecError."""
    text = str(text)
    if text in LINKS:
        return LINKS[text]
    try:
        speed = float(text)
        if speed > 0 and math.isfinite(speed):
            return speed * 1e9, 15e-6
    except ValueError:
        pass
    known = [*LINKS, "measured"]
    raise SpecError(f"link '{text}': no such link{did_you_mean(text, known)}; one of {', '.join(known)}, or GB/s")


def predict(
    gm: TracedModule,
    args: Sequence[Any] | torch.Tensor,
    kwargs: Mapping[str, Any],
    devices: Sequence[int],
    link: tuple[float, float],
    speed: float = SPEED,
    pixels: int = 0,
) -> list[Cost]:
    """Return the cost of a call on inputs of one resolution, for each number of devices and each possible way to split.

    `speed` is in teraFLOP per second, `pixels` labels the rows. The bytes of ulysses and ring are counted, with half of the
    samples if guidance is split; those of tensor and pipefusion are the formulas of Megatron-LM (two sums of the tokens per
    layer) and PipeFusion. Raises SpecError if no tokens can be split.
    """
    args = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    if not (isinstance(speed, (int, float)) and math.isfinite(speed) and speed > 0):
        raise SpecError(f"speed must be in TFLOP/s, above 0, not {quote(speed)}")
    try:
        plan = parallel_plan(gm, args, kwargs, ulysses=2, check=False)
    except SpecError as error:
        raise SpecError(f"{error}; parallel_plan splits samples (batch=...) or images (rows=...)") from error
    step = _StepCost(gm, plan, (args, dict(kwargs)), link, speed * 1e12, pixels)
    rows: list[Cost | None] = [step.cost(1, "one", 0, 0, step.work / step.speed, {})]
    for count in devices:
        for batch in (1, 2):
            for inner in (n for n in range(1, count + 1) if count % (batch * n) == 0):
                rows.append(step.split({"batch": batch, "ulysses": inner, "ring": count // batch // inner}))
        rows += [step.tensor(count), step.pipeline(count)]
    return [row for row in rows if row is not None]


def fastest_plan(
    gm: TracedModule,
    args: Sequence[Any] | torch.Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    devices: int,
    link: str = "nvlink",
    speed: float = SPEED,
    check: bool = True,
) -> Plan:
    """Make the plan for so many processes that is predicted to be the fastest; its text lists what the others would cost.

    A way that turns out to be none for this model makes room for the next. Chosen among are batch, ulysses, ring, their mixes,
    and tensor; PipeFusion, which is no plan, is listed alone.

    Args:
        gm: The traced module.
        args: Example inputs by position, as for `trace`; the meta device will do.
        kwargs: Example inputs by name.
        devices: The number of processes.
        link: What connects them: "nvlink", "pcie", "100gbe", GB/s as text, or "measured" between the processes that torchrun
            has started, which takes `speed` from them too.
        speed: What a device computes, in teraFLOP a second.
        check: Whether the plan is run on pretended processes, as in `parallel_plan`.

    Returns:
        The plan.

    Raises:
        SpecError: No tokens can be split, or in no way over so many processes.
    """
    if type(devices) is not int or devices < 2:
        raise SpecError(f"devices must be a number of processes, 2 or more, not {quote(devices)}")
    figures, speed = get_figures(link, speed)
    args = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    rows = predict(gm, args, kwargs or {}, [devices], figures, speed)
    why = []
    for row in sorted((row for row in rows if row.ways), key=lambda row: row.seconds):
        try:
            plan = parallel_plan(gm, args, kwargs, **dict(row.ways), check=check)  # type: ignore[arg-type]
        except SpecError as error:
            why.append(f"{row.method}: {error}")
            continue
        plan.alternatives = [f"chosen among, at {format_figures(figures, speed)}:", *format_table(rows).splitlines(), *why]
        return plan
    raise SpecError(f"no way to split this model over {devices} processes: {'; '.join(why) or 'it has fewer tokens'}")


def get_figures(link: str, speed: float) -> tuple[tuple[float, float], float]:
    """Return bytes per second and seconds per call of a link, and a device's teraFLOP/s: given, or `measure`. Raises
    SpecError."""
    if link == "measured":
        from ..processes import measure

        return measure()
    return link_of(link), speed


def format_figures(link: tuple[float, float], speed: float) -> str:
    """Format the figures that a prediction is based on."""
    return f"{link[0] / 1e9:g} GB/s and {link[1] * 1e6:.3g} us per call, {speed:g} TFLOP/s per device"


@contextlib.contextmanager
def _without_values(module: TracedModule, call: Any) -> Iterator[tuple[nn.Module, Any]]:
    """Yield a copy of the module tree and the call on fake tensors; the module itself can be called."""
    tree = strip_to_container(module)
    with torch.no_grad(), kernels.FakeTensorMode(allow_non_fake_inputs=True), swap_weights(tree, make_empty):
        yield tree, map_leaves(call, lambda t, _: make_empty(t))


class _StepCost:
    """One step: floating-point operations of one device, attentions, and bytes of samples, tokens and results."""

    def __init__(self, gm: TracedModule, plan: Plan, call: Any, link: tuple[float, float], speed: float, pixels: int) -> None:
        self.plan, self.call, self.link, self.speed, self.pixels = plan, call, link, speed, pixels
        self.layers = self.width = 0
        counter = kernels.make_flop_counter()
        with _without_values(gm, call) as (tree, inputs), counter:
            for node, value in GraphRun(tree, gm.graph, bind(gm, *inputs), keep=False):
                if get_name(node) == "scaled_dot_product_attention" and isinstance(value, Tensor):
                    self.layers += 1
                    self.width = max(self.width, value.numel() * value.element_size())
        self.work = counter.get_total_flops()
        self.result = sum(t.numel() * t.element_size() for t in _tensors(value))
        self.samples = {t.shape[0] for t in _tensors(call) if t.dim() > 1}

    def cost(
        self, count: int, method: str, calls: int, size: int, seconds: float, ways: Mapping[str, int], work: float | None = None
    ) -> Cost:
        """Return the cost of a way in which a process sends so many bytes and computes `work`, by default an equal part of
        all."""
        compute = (self.work / count if work is None else work) / self.speed
        speedup = self.work / self.speed / seconds
        return Cost(self.pixels, count, method, calls, size, seconds, speedup, compute / seconds, ways)

    def split(self, ways: dict[str, int]) -> Cost | None:
        """Return the cost of splitting samples and tokens in these ways; None if there are fewer of them than processes."""
        batch, call = ways["batch"], self.call
        if batch > 1:
            if len(self.samples) != 1 or max(self.samples) % batch:
                return None
            (samples,) = self.samples
            call = map_leaves(call, lambda t, _: t[: samples // batch] if t.dim() and t.shape[0] == samples else t)
        sent: list[tuple[bool, list[int]]] = []
        written = self.plan.written
        if ways["ulysses"] * ways["ring"] > 1:
            try:
                position = make_position(fill_degrees({**ways, "batch": 1}), 0)
                with _without_values(written, call) as (tree, inputs), simulate_rank(position):
                    rows = list_senders(tree, written.graphs[self.plan.mode], bind(written, *inputs))
            except FxplugError:
                return None
            attentions = {name for name, module in written.named_modules() if isinstance(module, Attention)}
            sent += [(node.target in attentions, numbers) for node, numbers in rows]
        if batch > 1:
            sent.append((False, [self.result // batch * (batch - 1)]))
        share = self.plan.share
        work = self.work / batch * (1 - share + share / (ways["ulysses"] * ways["ring"]))
        turns, waited, around = ways["ring"] - 1, 0.0, 0.0
        for is_attention, numbers in sent:
            first = min(3, len(numbers) - turns) if is_attention and turns else len(numbers)
            for index, number in enumerate(numbers):
                seconds = number / self.link[0] + self.link[1]
                around, waited = (around + seconds, waited) if first <= index < first + turns else (around, waited + seconds)
        compute = work / self.speed
        total = compute + waited + max(0.0, around - compute * _attention(self.plan))  # a ring's turns hide behind attention
        calls, size = sum(len(n) for _, n in sent), sum(sum(n) for _, n in sent)
        return self.cost(math.prod(ways.values()), format_degrees(ways), calls, size, total, ways, work)

    def tensor(self, count: int) -> Cost:
        """Return the cost of tensor parallelism by its formula (Shoeybi et al. 2019, arXiv 1909.08053): two sums of all tokens
        per layer."""
        calls = 2 * self.layers
        size = calls * 2 * (count - 1) * self.width // count
        total = self.work / count / self.speed + size / self.link[0] + calls * self.link[1]
        return self.cost(count, f"tensor {count} (formula)", calls, size, total, {"tensor": count})

    def pipeline(self, count: int) -> Cost:
        """Return the cost of PipeFusion by its formula (Fang et al. 2024, arXiv 2405.14430): activations passed on once per
        step. 2024, arXiv 2405.14430): what goes from layer to layer, sent on once a step.

        It travels while another patch is computed, and no stage is idle after the first steps.
        """
        total = max(self.work / count / self.speed, self.width / self.link[0] + count * self.link[1])
        return self.cost(count, f"pipefusion {count} (formula)", count, self.width, total, {})


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in list_leaves(value) if isinstance(leaf, Tensor)]


def _attention(plan: Plan) -> float:
    """Return the share of attention in the work, on the example inputs."""
    (stage,) = plan.stages
    work, steps = stage.found.walk.work, stage.found.steps
    own = sum(n for node, n in work.items() if node in steps and steps[node].special == "attention")
    return own / max(1, sum(work.values()))


def format_table(rows: Sequence[Cost]) -> str:
    """Format the costs as a table; `*` marks the fastest of each resolution and number of devices."""
    best = winners(rows)
    lines = [f"{'pixels':>7} {'devices':>7}   {'method':<28} {'calls':>6} {'MB sent':>10} {'ms':>9} {'speedup':>8}  computes"]
    for row in rows:
        mark = "*" if row in best and row.devices > 1 else " "
        lines.append(
            f"{row.pixels or '':>7} {row.devices:>7} {mark} {row.method:<28} {row.calls:>6} {row.bytes / 1e6:>10,.1f} "
            f"{row.seconds * 1e3:>9,.1f} {row.speedup:>8.2f} {row.compute:>9.0%}"
        )
    return "\n".join(lines)


def winners(rows: Sequence[Cost]) -> list[Cost]:
    """Return the fastest of each resolution and number of devices."""
    found: dict[tuple[int, int], Cost] = {}
    for row in rows:
        if (key := (row.pixels, row.devices)) not in found or row.seconds < found[key].seconds:
            found[key] = row
    return list(found.values())
