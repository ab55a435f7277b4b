"""Random pipelines whose steps have two latents, of a picture and of a sound: what is observed is right, or it is refused.

They differ in shapes, in the order of steps and of decoders, in schedulers (a copy, a part of its own, one for both) and in
times (shared, told twice, or of each); some have a second denoiser, for guidance. Half have a trait with which the picture's
latents cannot be trained alone.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import diffusers
import torch
from fuzz_observation import describe_difference, observe_at_random
from torch import nn

from fxplug.core.errors import SpecError
from fxplug.pipelines.observation import PROMPTS, confirm, observe

COST = 10
TRAITS = (
    "never apart", "leaks", "leaks time", "leaks by condition", "one argument", "output sums", "swapped later", "decoder sums",
    "two pictures", "one decoder", "sound scaled", "input by sound", "sound by picture", "stepped twice", "ignored",
)  # fmt: skip


class Denoiser(nn.Module):
    """Predicts both latents from both; the picture's without the sound's where they are apart."""

    dtype = torch.float32

    def __init__(self, trait: str | None, independent: bool) -> None:
        super().__init__()
        self.weight, self.trait, self.independent = nn.Parameter(torch.tensor(0.7)), trait, independent

    def forward(self, hidden, timestep, text, sound=None, sigma=None, sound_time=None, apart=False, skipped=None):
        if self.trait == "one argument":
            hidden, sound = hidden[:, : self.size], hidden[:, self.size :]
        told = 0 if sigma is None else sigma.flatten()[0] / 500
        both = told + timestep.flatten()[0] / 300 + text.mean() + (0.3 if skipped else 0)
        heard = sound.mean() + (0 if sound_time is None else sound_time.flatten()[0] / 200)
        share = 0.0 if apart or self.independent else 1.0
        if self.trait == "leaks" or (self.trait == "leaks by condition" and text.mean() > 0):
            share = max(share, 1e-3)
        if self.trait == "leaks time" and sound_time is not None:
            both = both + sound_time.flatten()[0] / 200
        picture = torch.sin(hidden * self.weight + both + share * heard)
        picture = torch.zeros_like(hidden) if self.trait == "ignored" and apart else picture
        return picture, torch.cos(sound * self.weight + both + hidden.mean())


class Encoder(nn.Module):
    dtype = torch.float32

    def forward(self, prompts: list[str]) -> torch.Tensor:
        signs = [1.0 if prompt == PROMPTS[1] else -1.0 for prompt in prompts]  # the two prompts of a confirmation
        return torch.tensor([[sign * (len(prompt) % 7 + 1) / 9] * 3 for sign, prompt in zip(signs, prompts, strict=True)])


class Vae(nn.Module):
    dtype = torch.float32

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] != self.channels or x.dim() != 4:
            raise RuntimeError(f"expected {self.channels} channels")
        return x

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return z


class Pipeline:
    """A pipeline of two latents, with a trait or none."""

    def __init__(self, rng: random.Random, trait: str | None) -> None:
        self.trait = trait
        self.channels, self.side = rng.choice((1, 3)), rng.choice((2, 3))
        size = self.channels * self.side**2
        self.sound_size = size if rng.random() < 0.4 or trait == "swapped later" else rng.choice((2, 5, 8))
        draw = torch.Generator().manual_seed(rng.randrange(10**6))
        self.order, self.out_order, self.decoded_order = (torch.randperm(size, generator=draw) for _ in range(3))
        self.factor, self.decoded_factor = rng.choice((1.0, -1.0, 0.37)), rng.choice((1.0, 5.5))
        self.slope, self.offset = rng.choice(((1.0, 0.0), (1e-3, 0.0), (-1e-3, 1.0)))
        self.sound_first, self.sound_decoded_first = rng.random() < 0.5, rng.random() < 0.5
        self.kind = rng.choice(("copy", "part", "one"))
        self.own_times = trait == "leaks time" or (self.kind == "part" and rng.random() < 0.7)
        self.kind = "part" if self.own_times else self.kind
        self.told_twice, self.x0 = rng.random() < 0.5, self.kind != "one" and rng.random() < 0.4
        self.family = self.kind
        flow = diffusers.FlowMatchEulerDiscreteScheduler
        self.scheduler = diffusers.DDIMScheduler(clip_sample=False) if self.kind == "one" else flow(shift=3.0)
        denoiser = Denoiser(trait, independent=trait is None and rng.random() < 0.2)
        denoiser.size = size
        self.components = {
            "scheduler": self.scheduler, "denoiser": denoiser, "text_encoder": Encoder(), "vae": Vae(3),
            "sound_vae": Vae(3 if trait == "two pictures" else 2),
        }  # fmt: skip
        if self.kind == "part":
            self.components["sound_scheduler"] = flow(shift=rng.choice((1.0, 5.0)) if self.own_times else 3.0)
        if trait == "one decoder":
            del self.components["sound_vae"]
        self.second, self.second_first = rng.random() < 0.3, rng.random() < 0.5
        if self.second:  # for guidance, as of Ideogram 4: called in each step
            self.components["free_denoiser"] = Denoiser(None, independent=False)
        self.__dict__.update(self.components)

    def __call__(
        self, prompt: Any = None, num_inference_steps: int = 10, guidance_scale: float = 3.0, sound_scale: float = 2.0,
        stg_scale: float = 1.0, other_scale: float = 0.7,
    ) -> Any:  # fmt: skip
        trait, prompts = self.trait, [prompt] if isinstance(prompt, str) else prompt
        text = self.text_encoder(prompts)
        count = len(prompts)
        picture, sound = torch.randn(count, self.channels, self.side, self.side), torch.randn(count, self.sound_size)
        copied = copy.deepcopy(self.scheduler)
        second = {"copy": copied, "part": getattr(self, "sound_scheduler", None), "one": self.scheduler}[self.kind]
        self.scheduler.set_timesteps(num_inference_steps)
        if second is not self.scheduler:
            second.set_timesteps(num_inference_steps)
        for number, (t, t2) in enumerate(zip(self.scheduler.timesteps, second.timesteps, strict=True)):
            packed = picture.flatten(1)[:, self.order] * self.factor
            heard = sound * 2
            if trait == "input by sound":
                packed = packed + sound.mean()
            if trait == "sound by picture":
                heard = heard + picture.mean()
            time = (float(t) * self.slope + self.offset) * torch.ones(count)
            given: dict[str, Any] = {"hidden": packed, "sound": heard, "timestep": time, "text": text}
            if trait == "one argument":
                given = {**given, "hidden": torch.cat([packed, heard], 1), "sound": None}
            if self.told_twice:
                given["sigma"] = time.clone()
            if self.own_times:
                given["sound_time"] = float(t2) * torch.ones(count)
            if self.second and self.second_first and trait != "one argument":
                free, _ = self.free_denoiser(**{**given, "text": text * 0})
            found, told = self.denoiser(**given)
            if self.second and trait != "one argument":
                if not self.second_first:
                    free, _ = self.free_denoiser(**{**given, "text": text * 0})
                found = guidance_scale * found + (1 - guidance_scale) * free
            elif guidance_scale > 1:
                free, silent = self.denoiser(**{**given, "text": text * 0})
                found, told = free + guidance_scale * (found - free), silent + guidance_scale * (told - silent)
            if stg_scale > 0:
                found = found + stg_scale * (found - self.denoiser(**given, skipped=[2])[0])
            if sound_scale > 1 and trait != "never apart":
                found = found + (sound_scale - 1) * (found - self.denoiser(**given, apart=True)[0])
            found = found[:, self.out_order].reshape(picture.shape)
            if trait == "output sums":
                found = found + told.mean()
            if self.x0:  # as where guidance is of the data
                sigma = self.scheduler.sigmas[number]
                found = (picture - (picture - found * sigma)) / sigma

            def step_picture(picture=picture, found=found, t=t):
                return self.scheduler.step(found, t, picture, return_dict=False)[0]

            def step_sound(sound=sound, told=told, t2=t2):
                return second.step(told, t2, sound, return_dict=False)[0]

            late = trait == "swapped later" and number > 1
            if self.sound_first != late:
                sound = step_sound()
                picture = step_picture()
            else:
                picture = step_picture()
                sound = step_sound()
            if trait == "sound scaled":
                sound = sound * 0.99
            if trait == "stepped twice" and self.kind == "one":
                picture = self.scheduler.step(found, t, picture * 0.9, return_dict=False)[0]
        z = picture.flatten(1)[:, self.decoded_order].reshape(picture.shape) * self.decoded_factor
        if trait == "decoder sums":
            z = z + sound.mean()
        sounds = () if trait == "one decoder" else ((self.sound_vae, sound),)
        parts = ((self.vae, z), *sounds)
        return [vae.decode(value) for vae, value in (parts[::-1] if self.sound_decoded_first else parts)]


def check(pipe: Pipeline) -> str | None:
    """What is wrong with an observation of the pipeline; None where it is right, or a refusal of what is to be refused."""
    trait = pipe.trait if pipe.trait != "stepped twice" or pipe.kind == "one" else None
    try:
        seen = observe(pipe, part="denoiser")
        confirm(pipe, seen)
    except SpecError as error:
        return None if trait else f"refused: {error}"
    if trait:
        return f"confirmed: {seen.describe()}"
    latents = torch.randn(1, pipe.channels, pipe.side, pipe.side)
    flat, size = latents.flatten(), len(pipe.order)
    output = torch.randn(size + pipe.sound_size)
    times = torch.tensor([1.0, 337.25, 999.0], dtype=torch.float64)
    wanted = {
        "input": (seen.to_input(latents).flatten(), flat[pipe.order] * pipe.factor),
        "decoder": (seen.to_decoder(latents).flatten(), flat[pipe.decoded_order] * pipe.decoded_factor),
        "output": (seen.to_output(output).flatten(), output[:size][pipe.out_order]),
        "time": (seen.model_time(times), times * pipe.slope + pipe.offset),
    }
    if (wrong := describe_difference(wanted)) is not None:
        return wrong
    apart = {"sound", *(["sound_time"] if pipe.own_times else [])}
    settings = {} if pipe.denoiser.independent else {"apart": True}
    names = (seen.noisy, seen.vae, {seen.time, *seen.also}, set(seen.beside), seen.settings)
    right_names = ("hidden", "vae", {"timestep", *(["sigma"] if pipe.told_twice else [])}, apart, settings)
    return None if names == right_names else f"{names} for {right_names}"


def fuzz_two_latents(cases: int, seed: int) -> list[str]:
    """Observe and confirm random pipelines of two latents, half of them with a trait that is to be refused."""
    return observe_at_random(cases, seed, TRAITS, Pipeline, check)
