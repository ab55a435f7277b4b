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
from diffusers import ConfigMixin, DDIMScheduler, DiffusionPipeline, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "examples/tiny"))
import random_adapters
import tiny

import fxplug
from fxplug.serving import AdapterStore, Cancelled, Engine, Region, Request

COST = 250  # a case is some two hundred steps
SIZE = {"height": 16, "width": 16, "output_type": "latent"}
LAYERS = ["conv_in", "**.conv1", "**.time_emb_proj", "**.to_q", "**.to_v"], ["conv_in", "attn.*", "time"]
ADAPTERS, SLOTS, ROWS, WIDTH = 9, 4, 8, 8
SCHEDULERS = ("DDIMScheduler", "EulerDiscreteScheduler", "DPMSolverMultistepScheduler", "UniPCMultistepScheduler")
WORDS = ("a cat", "dog", "red sea", "blue", "", "x y z")
steps_made = 0
known: dict[str, torch.Tensor] = {}  # pictures that were made with nobody else there


class Raised(Exception):
    """What a callback, or a model, raises here."""


class TinyDenoiser(ModelMixin, ConfigMixin):
    """Two convolutions around attention to words, so that a hundred thousand steps take minutes."""

    @register_to_config
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(4, width, 3, padding=1), nn.Conv2d(width, 4, 3, padding=1)
        self.time = nn.Linear(1, width)
        self.attn = nn.ModuleDict({name: nn.Linear(width, width) for name in ("q", "k", "v")})

    def forward(self, x, t, words):
        h = nn.functional.silu(self.conv_in(x) + self.time(t[:, None] / 1000)[:, :, None, None])
        tokens = h.flatten(2).transpose(1, 2)
        seen = nn.functional.scaled_dot_product_attention(self.attn["q"](tokens), self.attn["k"](words), self.attn["v"](words))
        return self.conv_out(h + seen.transpose(1, 2).unflatten(2, x.shape[2:]))


class TinyPipeline(DiffusionPipeline):
    """As few lines as a pipeline of diffusers can have."""

    def __init__(self, unet, scheduler):
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler)

    @torch.no_grad()
    def __call__(
        self, prompt, num_inference_steps=2, guidance_scale=1.0, num_images_per_prompt=1, height=8, width=8, generator=None,
        output_type="latent", callback_on_step_end=None,
    ):  # fmt: skip
        words = torch.randn(1, 3, WIDTH, generator=torch.Generator().manual_seed(WORDS.index(prompt)))
        words = words.expand(num_images_per_prompt, -1, -1)
        words = torch.cat([words, words * 0]) if guidance_scale > 1 else words
        self.scheduler.set_timesteps(num_inference_steps)
        x = torch.randn(num_images_per_prompt, 4, height // 4, width // 4, generator=generator)
        x = x * self.scheduler.init_noise_sigma
        for n, t in enumerate(self.scheduler.timesteps):
            given = self.scheduler.scale_model_input(torch.cat([x, x]) if guidance_scale > 1 else x, t)
            out = self.unet(given, t.float().expand(len(given)), words)
            if guidance_scale > 1:
                one, none = out.chunk(2)
                out = none + guidance_scale * (one - none)
            x = self.scheduler.step(out, t, x).prev_sample
            if callback_on_step_end is not None:
                callback_on_step_end(self, n, t, {})
        return ImagePipelineOutput(x)


@cache
def get_engine(tiny_one: bool) -> Any:
    """Make an engine of a pipeline with slots, whose store has more adapters than these."""
    if tiny_one:
        torch.manual_seed(0)
        pipe = TinyPipeline(TinyDenoiser().eval(), DDIMScheduler(clip_sample=False))
    else:
        pipe = tiny.pipeline("StableDiffusionPipeline")
    folder = Path(tempfile.mkdtemp())
    random_adapters.write_adapters(folder, pipe.unet, ADAPTERS, most=4)
    slots = fxplug.load_pass("lora", at=LAYERS[tiny_one], rank=4, slots=SLOTS, per_sample=2)
    pipe = fxplug.rewrite_pipeline(pipe, passes={"unet": [slots]}, prompt="a cat", height=16, width=16)
    store = AdapterStore(folder, {"unet": pipe.unet}, partial=True)
    return Engine(pipe, store=store, rows=ROWS, buckets=[ROWS], queue=1000)


def draw_request(draw: random.Random, stop: int | None = None) -> Request:
    """Draw one of a few hundred, so that each comes again beside others."""
    draw = random.Random(draw.randrange(400))
    names = draw.sample(range(ADAPTERS), draw.choice((0, 1, 1, 2)))
    call = {
        "prompt": draw.choice(WORDS), "num_inference_steps": draw.randint(1, 12),
        "guidance_scale": draw.choice((1.0, 3.0, 7.5)),
    }  # fmt: skip
    if draw.random() < 0.1:
        call["num_images_per_prompt"] = 2

    def callback(pipe: Any, step: int, time: Any, given: Any) -> Any:
        if step == stop:
            raise Raised
        return given

    more = {} if stop is None else {"callback_on_step_end": callback}
    request = Request(
        call={**SIZE, **call, **more}, adapters={f"style{n:04}": draw.choice((0.5, 1.0)) for n in names},
        scheduler=draw.choice(SCHEDULERS), seed=draw.randrange(2),
    )  # fmt: skip
    drawn = [draw_region(draw, names) for _ in range(draw.choice((0, 0, 0, 0, 1, 2)))]
    return request.model_copy(update={"regions": drawn})


def draw_region(draw: random.Random, names: list[int]) -> Region:
    """Draw a region, with words and adapters of its own or without."""
    side = draw.choice((2, 4, 16))
    mask = torch.tensor([[draw.choice((0.0, 1.0, draw.random())) for _ in range(side)] for _ in range(side)])
    own = names if names else draw.sample(range(ADAPTERS), draw.choice((0, 1)))
    return Region(
        mask=mask, adapters={f"style{n:04}": draw.choice((0.0, 0.7)) for n in own},
        call={"prompt": draw.choice(WORDS)} if draw.random() < 0.7 else {},
    )  # fmt: skip


def run_alone(engine: Engine, request: Request) -> torch.Tensor:
    """Return its picture with nobody else there, which is made once."""
    call = {key: value for key, value in request.call.items() if "callback" not in key}
    regions = [(one.mask.tolist(), one.adapters, one.call) for one in request.regions]
    key = repr((id(engine), sorted(call.items()), sorted(request.adapters.items()), request.scheduler, request.seed, regions))
    if key not in known:
        known[key] = engine.submit(request.model_copy(update={"call": call})).result().images
    return known[key]


def play(seed: int) -> list[str]:
    """Return what is wrong with a case."""
    global steps_made  # noqa: PLW0603
    draw, found = random.Random(seed), []
    engine = get_engine(seed % 20 > 0)
    adapters = engine.models["unet"].adapters
    fails = {"joint": 0.02 if seed % 2 else 0.0, "alone": 0.02 if seed % 3 else 0.0}
    real = engine.caller._call

    def call(*args: Any) -> Any:
        # a form whose proof fails is refused: its calls are padded no more, and have other bits than those of a later case
        proven = engine.forms.form_of(args[0]).proven
        if draw.random() < fails["joint" if len(set(map(str, args[3]))) > 1 else "alone"] and proven:
            raise Raised
        return real(*args)

    engine.caller._call = call  # type: ignore[method-assign]
    tickets: list[Any] = []
    while len(tickets) < 40 or not engine.is_idle:
        if len(tickets) < 40 and draw.random() < 0.5:
            for _ in range(draw.randint(1, 3)):
                tickets.append(engine.submit(draw_request(draw, draw.randrange(6) if draw.random() < 0.1 else None)))
        engine.step()
        if draw.random() < 0.05 and tickets:
            draw.choice(tickets).cancel()
        if draw.random() < 0.05 and (held := adapters.names):
            try:
                adapters.unload(draw.choice(held))
            except fxplug.SpecError as error:
                found += [] if "pin" in str(error) else [str(error)]
    engine.caller._call = real
    found += sorted({form.refused for form in engine.forms.forms.values() if form.refused})
    for form in engine.forms.forms.values():
        form.limit = None
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
