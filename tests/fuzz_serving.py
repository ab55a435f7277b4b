"""Random requests in an engine, with loads, unloads, cancels and errors: a picture's bits do not depend on who else is there.

`fuzz_serving(cases, seed)` returns a line for each miss; `python tests/fuzz_serving.py --cases N --seed S` prints them, and how
many steps pictures made. The engine has one bucket; each picture must have the bits that the same request has with nobody
else. The engine goes on from case to case, and what was made alone is kept: to see a miss again, begin with the same seed.
"""

from __future__ import annotations

import random
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "examples/tiny"))
import random_adapters
import tiny

import fxplug
from fxplug.serving import AdapterStore, Cancelled, Engine, Request

COST = 250  # a case is some hundred steps
SIZE = {"height": 16, "width": 16, "output_type": "latent"}
LAYERS = ["conv_in", "**.conv1", "**.time_emb_proj", "**.to_q", "**.to_v"]
ADAPTERS, SLOTS, ROWS = 9, 4, 8
SCHEDULERS = ("DDIMScheduler", "EulerDiscreteScheduler", "DPMSolverMultistepScheduler", "UniPCMultistepScheduler")
WORDS = ("a cat", "dog", "red sea", "blue", "", "x y z")
steps_made = 0
known: dict[str, torch.Tensor] = {}  # pictures that were made with nobody else there


class Raised(Exception):
    """What a callback, or a model, raises here."""


@cache
def get_engine() -> Any:
    """Make an engine of a tiny pipeline with slots, whose store has more adapters than these."""
    pipe = tiny.pipeline("StableDiffusionPipeline")
    folder = Path(tempfile.mkdtemp())
    random_adapters.write_adapters(folder, pipe.unet, ADAPTERS, most=4)
    slots = fxplug.load_pass("lora", at=LAYERS, rank=4, slots=SLOTS, per_sample=2)
    pipe = fxplug.rewrite_pipeline(pipe, passes={"unet": [slots]}, prompt="a cat", height=16, width=16)
    return Engine(pipe, store=AdapterStore(folder, {"unet": pipe.unet}, partial=True), rows=ROWS, buckets=[ROWS], queue=1000)


def draw_request(draw: random.Random, stop: int | None = None) -> Request:
    """Draw one of a few hundred, so that each comes again beside others."""
    names = draw.sample(range(ADAPTERS), draw.choice((0, 1, 1, 2)))
    call = {
        "prompt": draw.choice(WORDS), "num_inference_steps": draw.randint(1, 5), "guidance_scale": draw.choice((1.0, 3.0, 7.5)),
    }  # fmt: skip
    if draw.random() < 0.1:
        call["num_images_per_prompt"] = 2

    def callback(pipe: Any, step: int, time: Any, given: Any) -> Any:
        if step == stop:
            raise Raised
        return given

    more = {} if stop is None else {"callback_on_step_end": callback}
    return Request(
        call={**SIZE, **call, **more}, adapters={f"style{n:04}": draw.choice((0.5, 1.0)) for n in names},
        scheduler=draw.choice(SCHEDULERS), seed=draw.randrange(2),
    )  # fmt: skip


def run_alone(engine: Engine, request: Request) -> torch.Tensor:
    call = {key: value for key, value in request.call.items() if "callback" not in key}
    key = repr((sorted(call.items()), sorted(request.adapters.items()), request.scheduler, request.seed))
    if key not in known:
        known[key] = engine.submit(request.model_copy(update={"call": call})).result().images
    return known[key]


def play(seed: int) -> list[str]:
    """Return what is wrong with a case."""
    global steps_made  # noqa: PLW0603
    draw, found = random.Random(seed), []
    engine = get_engine()
    adapters = engine.models["unet"].adapters
    fails = {"joint": 0.02 if seed % 2 else 0.0, "alone": 0.02 if seed % 3 else 0.0}
    real = engine.caller._call

    def call(*args: Any) -> Any:
        if draw.random() < fails["joint" if len(set(map(str, args[3]))) > 1 else "alone"]:
            raise Raised
        return real(*args)

    engine.caller._call = call  # type: ignore[method-assign]
    tickets: list[Any] = []
    while len(tickets) < 40 or not engine.is_idle:
        if len(tickets) < 40 and draw.random() < 0.5:
            for _ in range(draw.randint(1, 3)):
                tickets.append(engine.submit(draw_request(draw, draw.randrange(4) if draw.random() < 0.1 else None)))
        engine.step()
        if draw.random() < 0.05 and tickets:
            draw.choice(tickets).cancel()
        if draw.random() < 0.05 and (held := adapters.names):
            try:
                adapters.unload(draw.choice(held))
            except fxplug.SpecError as error:
                found += [] if "pin" in str(error) else [str(error)]
    engine.caller._call = real
    refused = {form.refused for form in engine.forms.forms.values() if form.refused}
    found += sorted(text for text in refused if "the first one failed: Raised" not in text)
    for key, form in [*engine.forms.forms.items()]:
        form.limit = None
        if form.refused:
            del engine.forms.forms[key]
    for ticket in tickets:
        steps_made += ticket.step * ticket.request.call.get("num_images_per_prompt", 1)
        try:
            made = ticket.result().images
        except (Raised, Cancelled):
            continue
        except Exception as error:
            found.append(f"{ticket} raises {type(error).__name__}: {error}")
            continue
        if not torch.equal(made, right := run_alone(engine, ticket.request)):
            found.append(f"{ticket.request} differs by {(made - right).abs().max():.1e}")
    return found


def fuzz_serving(cases: int, seed: int) -> list[str]:
    torch.set_num_threads(1)
    return [f"seed {n}: {line}" for n in range(seed, seed + cases) for line in play(n)]


if __name__ == "__main__":
    import argparse
    import logging
    import time

    logging.getLogger("fxplug.serving").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    misses = 0
    for n in range(given.seed, given.seed + given.cases):
        lines = fuzz_serving(1, n)
        misses += len(lines)
        print(*lines, f"{steps_made} steps in {time.process_time():.0f} s of CPU time, {misses} misses", sep="\n", flush=True)
