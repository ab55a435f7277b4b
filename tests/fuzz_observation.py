"""Random pipelines with known maps around their denoiser: what is observed is what they do, or it is refused.

Each has a packing (permutations, factors, terms, padding of a condition), a line of times and a layout of the denoiser's call;
half have a trait that no such maps describe: an observation that is confirmed then is a miss.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from typing import Any

import diffusers
import torch
from torch import nn

from fxplug.core.errors import SpecError
from fxplug.pipelines.observation import PROMPTS, confirm, observe

COST = 10
TRAITS = (
    "input by time", "input squashed", "input clamped", "input sums", "input by condition", "latents masked", "latents scaled",
    "latents by condition", "condition at first", "input at first",
    "times per frame", "time squared", "time by condition", "output by latents", "output by time", "output normed",
    "output halved", "decoder clamped", "decoder partial", "decoder by condition", "decoder random", "decoder elsewhere",
    "two inputs", "condition by time", "condition by latents", "guided twice", "guided doubled", "two calls",
)  # fmt: skip
FAMILIES = {
    "flow": lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    "ddim": lambda: diffusers.DDIMScheduler(clip_sample=False),
    "euler": lambda: diffusers.EulerDiscreteScheduler(),
}


class Denoiser(nn.Module):
    """Gives numbers that depend on all it is called with."""

    def __init__(self, out: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.7, dtype=dtype))
        self.out, self.dtype = out, dtype

    def forward(self, hidden, timestep, text, extra=None, ids=None, return_dict=True):
        flat = hidden[0].flatten(1) if isinstance(hidden, (list, tuple)) else hidden.flatten(1)
        wide = flat.repeat(1, -(-self.out // flat.shape[1]))[:, : self.out]
        found = torch.sin(wide * self.weight + timestep.flatten()[0] / 300 + text.mean())
        if isinstance(hidden, (list, tuple)):
            return ([found],)
        return (found if hidden.dim() == 2 else found[..., None, None],)


class Encoder(nn.Module):
    """Captions to numbers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.dtype = nn.Parameter(torch.linspace(-1, 1, 5, dtype=dtype)), dtype

    def forward(self, prompts: list[str]) -> torch.Tensor:
        return torch.stack([self.weight * (sum(map(ord, prompt)) % 97) / 50 for prompt in prompts])


class Vae(nn.Module):
    dtype = torch.float32

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return z


class Pipeline:
    """A pipeline of random arithmetic around a denoiser, with a trait or none."""

    def __init__(self, rng: random.Random, trait: str | None) -> None:
        self.trait = trait
        self.channels, self.side = rng.choice((1, 3, 4)), rng.choice((2, 3, 4))
        size = self.channels * self.side**2
        draw = torch.Generator().manual_seed(rng.randrange(10**6))
        self.padding = rng.choice((0, 0, 3, size))  # elements of the input that are the condition's
        self.order = torch.randperm(size, generator=draw)
        self.out_order = torch.randperm(size, generator=draw)
        self.decoded_order = torch.randperm(size, generator=draw)
        self.unused = rng.choice((0, 0, size))  # of the output, as a learnt variance
        number = lambda: rng.choice((1.0, -1.0, rng.uniform(0.1, 8)))  # noqa: E731
        self.in_factor, self.in_term = number(), rng.choice((0.0, rng.uniform(-1, 1)))
        self.out_factor = number()
        self.decoded_factor = torch.rand(size, generator=draw) + 0.3 if rng.random() < 0.5 else torch.full((size,), number())
        self.decoded_term = rng.choice((0.0, 1.0)) * torch.randn(size, generator=draw)
        self.slope, self.offset = rng.choice(((1.0, 0.0), (1e-3, 0.0), (-1e-3, 1.0), (4.0, 2.0)))
        self.listed, self.scalar_time, self.as_rows = rng.random() < 0.2, rng.random() < 0.3, rng.random() < 0.5
        self.scheduler = FAMILIES[rng.choice(list(FAMILIES))]()
        self.family = type(self.scheduler).__name__
        dtype = rng.choice((torch.float32, torch.float32, torch.float32, torch.bfloat16))
        self.components = {
            "scheduler": self.scheduler, "denoiser": Denoiser(size + self.unused, dtype), "text_encoder": Encoder(dtype),
            "vae": Vae(),
        }  # fmt: skip
        self.__dict__.update(self.components)

    def __call__(self, prompt: Any = None, num_inference_steps: int = 10, guidance_scale: float = 3.0) -> Any:
        trait = self.trait
        prompts = [prompt] if isinstance(prompt, str) else prompt
        text = self.text_encoder(prompts)
        count, dtype = len(prompts), text.dtype
        own = text[:, 0]
        latents = torch.randn(count, self.channels, self.side, self.side).to(dtype)
        self.scheduler.set_timesteps(num_inference_steps)
        padding = text.repeat(1, 30)[:, : self.padding]
        for t in self.scheduler.timesteps:
            scale = getattr(self.scheduler, "scale_model_input", None)
            x = latents if scale is None else scale(latents, t)
            flat = x.flatten(1)[:, self.order]
            packed = flat * self.in_factor + self.in_term
            if trait == "input by time":
                packed = packed / (1 + t / 1000)
            if trait == "input squashed":
                packed = torch.tanh(packed / 9) * 9
            if trait == "input clamped":
                packed = packed.clamp(-0.5, 30)
            if trait == "input sums":
                packed = packed + 0.1 * packed.flip(1)
            if trait == "input by condition":
                packed = packed + own[:, None] * 0.3
            if trait == "input at first" and t == self.scheduler.timesteps[0]:
                packed = torch.cat([packed, text], 1)
            packed = torch.cat([packed, padding], 1).to(dtype)
            time = torch.as_tensor(float(t) * self.slope + self.offset)
            if trait == "time squared":
                time = time**2
            if trait == "time by condition":
                time = time + own[0].float()
            time = time if self.scalar_time else time.expand(count)
            if trait == "times per frame":
                time = torch.stack([time.reshape(-1)[0], time.reshape(-1)[0] * 0.5])
            given: Any = packed if self.as_rows else packed[..., None, None]
            given = [given] if self.listed else given
            more: dict[str, Any] = {"text": text}
            if trait == "two inputs":
                more["extra"] = packed * 2
            if trait == "condition at first" and t == self.scheduler.timesteps[0]:
                more["extra"] = text * 2  # as what a model caches
            if trait == "condition by time":
                more["text"] = text * (1 + float(t) / 1000)
            if trait == "condition by latents":
                more["extra"] = latents.mean()
            if trait == "guided doubled":
                given, more["text"] = torch.cat([given, given]) if not self.listed else given * 2, torch.cat([text * 0, text])
            output = self.denoiser(given, time, **more, return_dict=False)[0]
            if trait in ("guided twice", "two calls"):
                text_free = self.denoiser(given, time, text=text * 0, return_dict=False)[0]
                output = pick(output, text_free, lambda a, b: b + guidance_scale * (a - b))
            found = output[0] if isinstance(output, list) else output
            if trait == "guided doubled" and not self.listed:
                free, found = found.chunk(2)
                found = free + 3 * (found - free)
            found = found.flatten(1)[:, : len(self.order)][:, self.out_order] * self.out_factor
            if trait == "output by latents":
                found = found + 0.1 * latents.flatten(1)
            if trait == "output by time":
                found = found * (1 + t / 1000)
            if trait == "output normed":
                found = found / found.norm()
            if trait == "output halved":
                found = found[:, : len(self.order) // 2 * 0 + 1].expand(found.shape)
            found = found.reshape(latents.shape).to(latents.dtype)
            latents = self.scheduler.step(found, t, latents, return_dict=False)[0].to(dtype)
            if trait == "latents masked":
                latents = torch.where(torch.arange(latents.numel()).reshape(latents.shape) % 3 == 0, own[0] * 0.1, latents)
            if trait == "latents scaled":
                latents = latents * 0.99
            if trait == "latents by condition" and prompts[0] != PROMPTS[0] and t != self.scheduler.timesteps[-1]:
                latents = latents * 0.99  # as a mask that leaves all to be drawn, or not
        z = latents.flatten(1)[:, self.decoded_order]
        z = z * self.decoded_factor.to(z) + self.decoded_term.to(z)
        if trait == "decoder clamped":
            z = z.clamp(-0.2, 40)
        if trait == "decoder partial":
            z = z[:, 1:]
        if trait == "decoder by condition":
            z = z + own[:, None]
        if trait == "decoder random":
            z = z + 0.1 * torch.randn(z.shape)
        return z if trait == "decoder elsewhere" else self.vae.decode(z)


def pick(one: Any, other: Any, function: Any) -> Any:
    return [function(a, b) for a, b in zip(one, other, strict=True)] if isinstance(one, list) else function(one, other)


def check(pipe: Pipeline) -> str | None:
    """What is wrong with an observation of the pipeline; None where it is right, or a refusal of what is to be refused."""
    try:
        seen = observe(pipe)
        confirm(pipe, seen)
    except SpecError as error:
        return None if pipe.trait else f"refused: {error}"
    if pipe.trait:
        return f"confirmed: {seen.describe()}"
    size = len(pipe.order)
    latents = torch.randn(1, pipe.channels, pipe.side, pipe.side)
    flat = latents.flatten()
    mapped = seen.to_input(latents)
    mapped = (mapped[0] if isinstance(mapped, list) else mapped).flatten()
    wanted = {
        "input": (mapped[:size], flat[pipe.order] * pipe.in_factor + pipe.in_term),
        "decoder": (seen.to_decoder(latents).flatten(), flat[pipe.decoded_order] * pipe.decoded_factor + pipe.decoded_term),
        "inverse": (seen.to_decoder.inverse(seen.to_decoder(latents)), latents),
    }
    output = torch.randn(size + pipe.unused)
    wanted["output"] = (seen.to_output(output).flatten(), output[pipe.out_order] * pipe.out_factor)
    times = torch.tensor([1.0, 337.25, 999.0], dtype=torch.float64)
    wanted["time"] = (seen.model_time(times), times * pipe.slope + pipe.offset)
    return describe_difference(wanted)


def describe_difference(wanted: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> str | None:
    """What of these pairs of what is found and what is right differs; None where all agree."""
    for what, (found, right) in wanted.items():
        if not torch.allclose(found.double(), right.double(), rtol=3e-6, atol=3e-6):
            return f"{what} is {float((found - right).abs().max()):.1e} off"
    return None


def observe_at_random(cases: int, seed: int, traits: Sequence[str], make: Any, check: Any) -> list[str]:
    """What is wrong about random pipelines that `make` makes, half of them with a trait that is to be refused."""
    found = []
    for n in range(seed, seed + cases):
        rng = random.Random(n)
        trait = rng.choice(traits) if rng.random() < 0.5 else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pipe = make(rng, trait)
            if (wrong := check(pipe)) is not None:
                found.append(f"case {n} ({trait}, {pipe.family}): {wrong}")
    return found


def fuzz_observation(cases: int, seed: int) -> list[str]:
    """Observe and confirm random pipelines, half of them with a trait that is to be refused."""
    return observe_at_random(cases, seed, TRAITS, Pipeline, check)
