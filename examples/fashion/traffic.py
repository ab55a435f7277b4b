"""Requests for garments that come at random times, and what an engine makes of them in CPU time."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from garments import CLASSES
from pipeline import load_pipeline

import fxplug
from fxplug.serving import AdapterStore, Engine, Request

sys.path.append(str(Path(__file__).resolve().parent.parent / "tiny"))
from random_adapters import KINDS, write_adapters  # noqa: E402

SCHEDULERS = (
    "FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler", "DPMSolverMultistepScheduler",
    "UniPCMultistepScheduler",
)  # fmt: skip
STEPS = (4, 6, 8, 12)


@dataclass
class Outcome:
    """What a load came to: times in seconds of the processor, and calls of the denoiser with the rows asked for."""

    seconds: float
    waits: list[float]  # from when a request arrives until its pipeline is called
    wholes: list[float]  # until its picture is there
    calls: int
    rows: int
    pictures: list[Any]  # in the order of the requests

    def __str__(self) -> str:
        (wait, longest), (whole, last) = (quantile(values, 0.5, 0.99) for values in (self.waits, self.wholes))
        return (
            f"{len(self.wholes)} pictures, {len(self.wholes) / self.seconds:.2f} a CPU second; {self.calls} calls of the "
            f"denoiser, {self.rows / self.calls:.1f} rows each; waited {wait:.1f} s (99 %: {longest:.1f}), done after "
            f"{whole:.1f} s (99 %: {last:.1f})"
        )


def quantile(values: Sequence[float], *at: float) -> list[float]:
    ordered = sorted(values)
    return [ordered[min(int(share * len(ordered)), len(ordered) - 1)] for share in at]


def draw_requests(count: int, rate: float, names: Sequence[str], seed: int = 0, steps: Sequence[int] = STEPS) -> list[Any]:
    """Draw when requests arrive, `rate` a second on average, and which they are."""
    draw, now, made = random.Random(seed), 0.0, []
    weights = [1 / (n + 1) for n in range(len(names))]
    for n in range(count):
        now += draw.expovariate(rate)
        few = draw.choices((0, 1, 2, 3), (0.15, 0.6, 0.17, 0.08))[0]
        call = {"prompt": draw.choice(CLASSES), "num_inference_steps": draw.choice(steps), "output_type": "pt"}
        call["guidance_scale"] = draw.choice((1.0, 2.5, 4.0))
        adapters = {name: draw.choice((0.6, 0.8, 1.0)) for name in draw.choices(names, weights, k=few)}
        made.append((now, Request(call=call, adapters=adapters, scheduler=draw.choice(SCHEDULERS), seed=n)))
    return made


def run_load(engine: Engine, arrivals: Sequence[tuple[float, Request]], model: str = "unet") -> Outcome:
    """Run an engine on requests that arrive at their times."""
    key = id(engine.models[model])
    calls, rows = engine.caller.made[key], engine.caller.rows[key]
    begin, idle, coming = time.process_time(), 0.0, list(arrivals)
    since: dict[str, float] = {}
    waits, wholes, open_ = [], [], []
    made: dict[int, Any] = {}

    def now() -> float:
        return time.process_time() - begin + idle

    while coming or not engine.is_idle:
        if engine.is_idle and coming[0][0] > now():
            idle += coming[0][0] - now()
        while coming and coming[0][0] <= now() and len(open_) < 4 * engine.rows:
            at, request = coming.pop(0)
            ticket = engine.submit(request)
            since[ticket.id] = at
            open_.append(ticket)
        for ticket in engine.step():
            wholes.append(now() - since[ticket.id])
            made[id(ticket.request)] = ticket.result().images
        for ticket in [one for one in open_ if one.state not in ("queued", "waiting")]:
            open_.remove(ticket)
            waits.append(now() - since[ticket.id])
    spent = time.process_time() - begin
    pictures = [made[id(request)] for _, request in arrivals]
    return Outcome(spent, waits, wholes, engine.caller.made[key] - calls, engine.caller.rows[key] - rows, pictures)


def make_pipeline(slots: int, rank: int = 8, per_sample: int = 3) -> Any:
    """Load the pipeline of garments with slots at all layers of its UNet."""
    bank = fxplug.load_pass("lora", at="**", rank=rank, slots=slots, per_sample=per_sample)
    return fxplug.rewrite_pipeline(load_pipeline(), passes={"unet": [bank]}, prompt="Bag")


def make_store(folder: Path, pipe: Any, count: int, kinds: Sequence[str] = KINDS) -> tuple[AdapterStore, list[str]]:
    """Write adapters of random weights, too weak to spoil a garment, and make a store of them."""
    names = write_adapters(folder, load_pipeline().unet, count, kinds=kinds, size=0.1)
    return AdapterStore(folder, {"unet": pipe.unet}), names
