"""What ways of splitting a model will cost, before anything runs: bytes, calls and time by resolution and number of devices.

Bytes and calls are those of the written graph, run on the meta device with nothing travelling. Time is a formula: work over
the device's speed, bytes over the link's, a moment for each call; keys and values that go around a ring travel while the
attention to what came before is computed (Liu et al. 2023, arXiv 2310.01889), everything else is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ...core.errors import FxplugError, SpecError, brief_fields, did_you_mean
from ...core.ir.containers import leaves, map_leaves
from ...core.ir.traced_module import TracedModule
from ...core.torch_internals import tensors as kernels
from ..checking import Runner, pretending
from ..plan import Plan, parallel_plan
from ..planning.trials import name_of
from ..planning.walk import bound
from ..runtime.attention import Attention
from ..runtime.collectives import traffic
from ..runtime.mesh import ways_of
from ..runtime.pretended import placed

# bytes a second that a process sends, and seconds that a call takes whatever its size; between what is promised and reached
LINKS = {"nvlink": (300e9, 10e-6), "pcie": (20e9, 15e-6), "100gbe": (10e9, 30e-6)}
SPEED = 300.0  # teraFLOP a second


@dataclass(frozen=True)
class Cost:
    """One way of splitting one step: what a process sends and computes, and seconds; `ways` empty for one device."""

    pixels: int
    devices: int
    method: str
    calls: int
    bytes: int
    seconds: float
    speedup: float
    compute: float  # the share of the time in which it computes

    __repr__ = brief_fields


def link_of(text: str) -> tuple[float, float]:
    """Bytes a second and seconds a call of a link by name, or by its GB/s. Raises SpecError."""
    if text in LINKS:
        return LINKS[text]
    try:
        speed = float(text)
        if speed > 0 and math.isfinite(speed):
            return speed * 1e9, 15e-6
    except ValueError:
        pass
    known = [*LINKS, "measured"]
    raise SpecError(f"--link '{text}': no such link{did_you_mean(text, known)}; one of {', '.join(known)}, or GB/s")


def predict(
    gm: TracedModule,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    devices: Sequence[int],
    link: tuple[float, float],
    speed: float = SPEED,
    pixels: int = 0,
) -> list[Cost]:
    """The cost of a call on inputs of one resolution, for each number of devices and each way of splitting that is possible.

    `speed` is in teraFLOP a second, `pixels` is what the rows are called. Weights and inputs belong on the meta device. What
    ulysses and ring send is counted, with half of the samples where guidance is split; what tensor and pipefusion send are the
    formulas of Megatron-LM (two sums of the tokens a layer) and PipeFusion. Raises SpecError where no tokens can be split.
    """
    plan = parallel_plan(gm, args, kwargs, ulysses=2, check=False)
    call = tuple(args), dict(kwargs)
    whole = _Whole(gm, call)
    rows = [Cost(pixels, 1, "one", 0, 0, whole.work / (speed * 1e12), 1.0, 1.0)]
    for count in devices:
        for batch in (1, 2):
            for inner in (n for n in range(1, count + 1) if count % (batch * n) == 0):
                ways = {"batch": batch, "ulysses": inner, "ring": count // batch // inner}
                if (cost := _cost(plan, ways, call, whole, link, speed, pixels)) is not None:
                    rows.append(cost)
        rows += [_tensor(whole, count, link, speed, pixels), _pipeline(whole, count, link, speed, pixels)]
    return rows


class _Whole:
    """What one device does in a call: floating-point operations, attentions, and bytes of samples, tokens and results."""

    def __init__(self, gm: TracedModule, call: Any) -> None:
        self.layers = self.width = 0
        counter = kernels.flop_counter()
        with torch.no_grad(), counter:
            out = Runner(gm, gm.graph, self.each).run(*bound(gm, *call))
        self.work = counter.get_total_flops()
        self.result = sum(t.numel() * t.element_size() for t in _tensors(out))
        self.samples = {t.shape[0] for t in _tensors(call) if t.dim() > 1}

    def each(self, node: fx.Node, run: Any) -> Any:
        value = run()
        if name_of(node) == "scaled_dot_product_attention" and isinstance(value, Tensor):
            self.layers += 1
            self.width = max(self.width, value.numel() * value.element_size())
        return value


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def _cost(
    plan: Plan, ways: dict[str, int], call: Any, whole: _Whole, link: tuple[float, float], speed: float, pixels: int
) -> Cost | None:
    """One way; None where there are fewer tokens or samples than processes."""
    batch = ways["batch"]
    if batch > 1:
        if len(whole.samples) != 1 or max(whole.samples) % batch:
            return None
        (samples,) = whole.samples
        call = map_leaves(call, lambda t, _: t[: samples // batch] if t.dim() and t.shape[0] == samples else t)
    sent: list[tuple[bool, list[int]]] = []

    def each(node: fx.Node, run: Any) -> Any:
        with traffic() as numbers:
            value = run()
        if numbers:
            called = plan.written.get_submodule(str(node.target)) if node.op == "call_module" else None
            sent.append((isinstance(called, Attention), list(numbers)))
        return value

    if ways["ulysses"] * ways["ring"] > 1:
        try:
            with torch.no_grad(), pretending(placed(ways_of({**ways, "batch": 1}), 0)):
                Runner(plan.written, plan.written.graphs[plan.mode], each).run(*bound(plan.written, *call))
        except FxplugError:
            return None
    if batch > 1:
        sent.append((False, [whole.result // batch * (batch - 1)]))
    share = plan.share
    mine = whole.work / batch * (1 - share + share / (ways["ulysses"] * ways["ring"]))
    compute = mine / (speed * 1e12)
    turns, waited, around = ways["ring"] - 1, 0.0, 0.0
    for is_attention, numbers in sent:
        first = min(3, len(numbers) - turns) if is_attention and turns else len(numbers)
        for index, number in enumerate(numbers):
            seconds = number / link[0] + link[1]
            around, waited = (around + seconds, waited) if first <= index < first + turns else (around, waited + seconds)
    total = compute + waited + max(0.0, around - compute * _attention(plan))  # a ring's turns hide behind attention
    method = " x ".join(f"{axis} {n}" for axis, n in ways.items() if n > 1)
    calls, size = sum(len(n) for _, n in sent), sum(sum(n) for _, n in sent)
    return _row(pixels, math.prod(ways.values()), method, calls, size, total, compute, whole, speed)


def _attention(plan: Plan) -> float:
    """The share of the work that attention is, on the example inputs."""
    (stage,) = plan.stages
    work, steps = stage.found.walk.work, stage.found.steps
    own = sum(n for node, n in work.items() if node in steps and steps[node].special == "attention")
    return own / max(1, sum(work.values()))


def _row(
    pixels: int, count: int, method: str, calls: int, size: int, total: float, compute: float, whole: _Whole, speed: float
) -> Cost:
    return Cost(pixels, count, method, calls, size, total, whole.work / (speed * 1e12) / total, compute / total)


def _tensor(whole: _Whole, count: int, link: tuple[float, float], speed: float, pixels: int) -> Cost:
    """Tensor parallelism by its formula (Shoeybi et al. 2019, arXiv 1909.08053): two sums of all tokens a layer."""
    calls = 2 * whole.layers
    size = calls * 2 * (count - 1) * whole.width // count
    compute = whole.work / count / (speed * 1e12)
    total = compute + size / link[0] + calls * link[1]
    return _row(pixels, count, f"tensor {count} (formula)", calls, size, total, compute, whole, speed)


def _pipeline(whole: _Whole, count: int, link: tuple[float, float], speed: float, pixels: int) -> Cost:
    """PipeFusion by its formula (Fang et al. 2024, arXiv 2405.14430): what goes from layer to layer, sent on once a step.

    It travels while another patch is computed, and no stage is idle after the first steps.
    """
    compute = whole.work / count / (speed * 1e12)
    total = max(compute, whole.width / link[0] + count * link[1])
    return _row(pixels, count, f"pipefusion {count} (formula)", count, whole.width, total, compute, whole, speed)


def table(rows: Sequence[Cost]) -> str:
    """The costs as text; `*` is before the fastest of each resolution and number of devices."""
    best = winners(rows)
    lines = [f"{'pixels':>7} {'devices':>7}   {'method':<28} {'calls':>6} {'MB sent':>10} {'ms':>9} {'speedup':>8}  computes"]
    for row in rows:
        mark = "*" if row in best and row.devices > 1 else " "
        lines.append(
            f"{row.pixels:>7} {row.devices:>7} {mark} {row.method:<28} {row.calls:>6} {row.bytes / 1e6:>10,.1f} "
            f"{row.seconds * 1e3:>9,.1f} {row.speedup:>8.2f} {row.compute:>9.0%}"
        )
    return "\n".join(lines)


def winners(rows: Sequence[Cost]) -> list[Cost]:
    """The fastest of each resolution and number of devices."""
    found: dict[tuple[int, int], Cost] = {}
    for row in rows:
        if (key := (row.pixels, row.devices)) not in found or row.seconds < found[key].seconds:
            found[key] = row
    return list(found.values())
