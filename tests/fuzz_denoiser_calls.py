"""Random pipelines and what training calls their denoiser with: what is confirmed gives, for other captions, seeds and numbers
of steps, alone and in batches, what the pipeline gives its scheduler; or it is refused.

Random are the packing of latents (patches in two orders, of a grid or of its columns, rows, rows behind samples, pictures,
lists, tokens of the text before or behind, channels of a caption or a picture before or behind), guidance (halves in either
order, interleaved, along another dimension, in two calls, within some steps alone, by a formula that is off at 0, told to the
denoiser, with a negative prompt of another length), the line of times, told for each sample, all, or each token, factors and
shifts of channels, schedulers and what they predict, the form of the output, captions of as many tokens as they have words, and
one or two denoisers by time. Half have a trait that cannot be trained.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import diffusers
import torch
from diffusers.utils import BaseOutput
from fuzz_observation import Vae, observe_at_random
from torch import nn

from fxplug.core.errors import SpecError
from fxplug.pipelines.denoiser_call import make_denoiser_call
from fxplug.pipelines.observation import PROMPTS, confirm, observe

COST = 10
CLOSE = 1e-5  # of the largest value
CAPTIONS = ("a dog", "a small cat on a box", "an old green boat", "the red ball of the dog")
TRAITS = (
    "rolled by step", "term by condition", "output by condition", "decoder by condition", "input of two", "time rounded",
    "time by step", "time squared", "time clamped", "time by condition", "always guided", "zero is without", "output rescaled",
    "clean output", "scaled between", "told by time", "noise added", "text by step", "channel by time", "latents by caption",
    "preconditioned", "times of tokens", "noisy condition", "condition by time", "output clamped", "input clamped",
    "first is 0", "two calls averaged", "output of before", "latents clamped", "latents normed", "ids by step",
    "decoder by latents",
)  # fmt: skip
GUIDANCE = (
    "none", "halves", "swapped", "interleaved", "two calls", "two calls swapped", "off at 0", "told", "both", "within steps",
    "negative",
)  # fmt: skip
SCHEDULERS = {
    "DDIMScheduler": {"clip_sample": False}, "EulerDiscreteScheduler": {}, "DDPMScheduler": {"clip_sample": False},
    "DPMSolverMultistepScheduler": {}, "UniPCMultistepScheduler": {}, "LMSDiscreteScheduler": {},
    "PNDMScheduler": {"skip_prk_steps": True}, "EulerAncestralDiscreteScheduler": {},
}  # fmt: skip
OUTPUTS = ("tuple", "tensor", "sample", "two")


@dataclasses.dataclass
class Output(BaseOutput):
    """What models of diffusers return."""

    sample: Any


class Denoiser(nn.Module):
    """Mixes the elements of a sample; samples are along `dim`, or the entries of a list."""

    dtype = torch.float32

    def __init__(self, dim: int, out: int, weight: float, form: str, channels: int = 0) -> None:
        super().__init__()
        self.weight, self.dim, self.out = nn.Parameter(torch.tensor(weight)), dim, out
        self.form, self.channels = form, channels  # of the output; those of a picture, where others are beside them

    def forward(self, hidden: Any, timestep: Any, text: Any, guidance: Any = None, ids: Any = None, return_dict: bool = True):
        listed = isinstance(hidden, list)
        rows = torch.stack(hidden) if listed else hidden.movedim(self.dim, 0)
        flat = rows.flatten(1)
        time = torch.as_tensor(timestep, dtype=torch.float32)
        time = time.mean(1) if time.dim() == 2 else time.reshape(-1)
        time = time[: len(flat)].reshape(-1, 1)
        words = torch.stack([t.mean() * (1 + len(t) / 7) for t in text]).reshape(-1, 1)
        told = 0 if guidance is None else torch.sin(guidance.reshape(-1, 1) / 3)
        mixed = flat * self.weight + 0.3 * flat.roll(1, 1)
        found = torch.sin(mixed + time / 130 + 2 * words + told) + flat.mean(1, keepdim=True)
        found = found.reshape(rows.shape)
        found = found[:, : self.channels] if self.channels else found
        found = torch.cat([found, found.cos()], 2 if found.dim() == 3 else 1) if self.out == 2 else found
        given: Any = [*found] if listed else found.movedim(0, self.dim)
        more = (found.flatten(1)[:, :2],) if self.form == "two" else ()
        return {"tensor": given, "sample": Output(sample=given)}.get(self.form, (given, *more))


class Encoder(nn.Module):
    """Captions to rows of as many tokens as they have words."""

    dtype = torch.float32

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, prompts: list[str]) -> list[torch.Tensor]:
        return [torch.stack([torch.linspace(0.1, 1, self.width) * (sum(map(ord, word)) % 23 - 11) / 11
                             for word in prompt.split() or ["-"]]) for prompt in prompts]  # fmt: skip


class Pipeline:
    """A pipeline with random surroundings, and a trait or none."""

    def __init__(self, rng: random.Random, trait: str | None) -> None:
        self.trait, self.guide = trait, rng.choice(GUIDANCE)
        self.channels, self.height, self.width = rng.choice((2, 4)), rng.choice((2, 4)), rng.choice((2, 4, 6))
        self.layout = rng.choice(("picture", "rows", "rows", "rows late", "list"))
        if self.guide == "interleaved" and self.layout == "list":
            self.layout = "picture"
        self.patch_first, self.patch, self.columns = rng.random() < 0.5, rng.choice((1, 2)), rng.random() < 0.3
        self.pictured = rng.random() < 0.3  # has a picture as a condition, else the caption in its place
        self.channels_beside = rng.choice(("none", "before", "behind")) if self.layout == "picture" else "none"
        self.per_token = self.channels * self.patch**2
        self.text_tokens = rng.choice(("none", "none", "before", "behind")) if self.layout == "rows" else "none"
        number = lambda: rng.choice((1.0, -1.0, rng.uniform(0.2, 4)))  # noqa: E731
        draw = torch.Generator().manual_seed(rng.randrange(10**6))
        each = lambda low: low + torch.rand(1, self.channels, 1, 1, generator=draw)  # noqa: E731
        one = torch.ones(1, self.channels, 1, 1)
        self.in_factor = each(0.4) if rng.random() < 0.3 else one * number()
        self.in_shift = each(-0.5) if rng.random() < 0.3 else one * 0
        self.mean, self.std = (each(-0.5), each(0.4)) if rng.random() < 0.6 else (one * 0, one * number())
        self.out_factor = number()
        self.slope, self.offset = rng.choice(((1.0, 0.0), (1e-3, 0.0), (-1e-3, 1.0), (-1.0, 1000.0), (0.25, 3.0)))
        self.time_form = rng.choice(("each", "each", "scalar", "number", "tokens"))
        if self.time_form == "tokens" and self.layout != "rows":
            self.time_form = "each"
        self.flow = rng.random() < 0.6
        flow = diffusers.FlowMatchEulerDiscreteScheduler(shift=rng.choice((1.0, 3.0)))
        kind = rng.choice([*SCHEDULERS])
        told = {"prediction_type": rng.choice(("epsilon", "v_prediction"))}
        other = getattr(diffusers, kind)(**SCHEDULERS[kind], **told)
        self.scheduler = flow if self.flow else other
        self.family, self.told_factor = f"{self.guide}, {self.layout}", rng.choice((1.0, 1000.0, 0.1))
        self.boundary = rng.choice((None, None, 500))
        dim = 1 if self.layout == "rows late" else 0
        out = 2 if self.layout in ("picture", "rows") and rng.random() < 0.3 else 1  # as of a variance that is learnt
        self.components = {"scheduler": self.scheduler, "text_encoder": Encoder(self.per_token), "vae": Vae()}
        form, only = rng.choice(OUTPUTS), self.channels if self.channels_beside == "behind" and out == 1 else 0
        self.components["denoiser"] = Denoiser(dim, out, 0.7, form, only)
        if self.boundary is not None:
            self.components["denoiser_2"] = Denoiser(dim, out, 0.4, form, only)
        self.__dict__.update(self.components)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Latents [b, c, h, w] as tokens [b, n, d]."""
        x = x.transpose(-1, -2) if self.columns else x
        b, c, h, w, p = *x.shape, self.patch
        patches = x.reshape(b, c, h // p, p, w // p, p)
        order = (0, 2, 4, 3, 5, 1) if self.patch_first else (0, 2, 4, 1, 3, 5)
        return patches.permute(order).reshape(b, h * w // p**2, c * p * p)

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        b, c, h, w, p = len(x), self.channels, self.height, self.width, self.patch
        h, w = (w, h) if self.columns else (h, w)
        if self.patch_first:
            found = x.reshape(b, h // p, w // p, p, p, c).permute(0, 5, 1, 3, 2, 4).reshape(b, c, h, w)
        else:
            found = x.reshape(b, h // p, w // p, c, p, p).permute(0, 3, 1, 4, 2, 5).reshape(b, c, h, w)
        return found.transpose(-1, -2) if self.columns else found

    def predict(self, part: Any, x: torch.Tensor, text: list[torch.Tensor], time: torch.Tensor, told: Any) -> torch.Tensor:
        """Call the denoiser for latents [b, c, h, w], and return its output in that shape."""
        more, count = {}, len(x)
        beside = self.beside.repeat(count // len(self.beside), 1, 1, 1)
        if told is not None:
            more["guidance"] = torch.full((count,), told * self.told_factor)
        given: Any = self.pack(x)
        if self.layout == "picture":
            joined = {"none": [x], "before": [beside, x], "behind": [x, beside]}[self.channels_beside]
            given = torch.cat(joined, 1)
        elif self.layout == "list":
            given = list(given)
        elif self.layout == "rows late":
            given = given.transpose(0, 1)
        words = torch.stack([t[:2].mean(0, keepdim=True) for t in text])
        if self.text_tokens != "none":
            given = torch.cat([words, given] if self.text_tokens == "before" else [given, words], 1)
        when: Any = float(time) if self.time_form == "number" else time if self.time_form == "scalar" else time.expand(count)
        if self.time_form == "tokens" or (self.trait == "times of tokens" and self.layout == "rows"):
            when = time.reshape(1, 1).repeat(count, given.shape[1])
            when[:, : given.shape[1] // 2 if self.trait == "times of tokens" else 0] *= 0.3
        shorter = text if len({len(t) for t in text}) > 1 else torch.stack(text)
        ids = torch.arange(given[0].numel()) + (int(time) if self.trait == "ids by step" else 0)
        found = part(given, when, shorter, **more, ids=ids, return_dict=False)
        found = found if self.layout == "list" and part.form == "tensor" or torch.is_tensor(found) else found[0]
        found = torch.stack(found) if self.layout == "list" else found
        if self.layout == "picture":
            skipped = self.channels if self.channels_beside == "before" else 0
            return found[:, skipped : skipped + self.channels]
        found = found.transpose(0, 1) if self.layout == "rows late" else found
        found = found[..., : self.per_token]
        if self.text_tokens != "none":
            found = found[:, 1:] if self.text_tokens == "before" else found[:, :-1]
        return self.unpack(found)

    def __call__(
        self, prompt: Any = None, num_inference_steps: int = 10, guidance_scale: float = 3.0, true_cfg_scale: float = 1.0,
        num_images_per_prompt: int = 1, negative_prompt: Any = None, image: Any = None,
    ) -> Any:  # fmt: skip
        trait, prompts = self.trait, [prompt] if isinstance(prompt, str) else prompt
        prompts = [each for each in prompts for _ in range(num_images_per_prompt)]
        text, none = self.text_encoder(prompts), self.text_encoder([""] * len(prompts))
        if len({len(t) for t in text}) > 1:
            raise ValueError("captions of one length")
        if self.guide == "negative":
            none = self.text_encoder([negative_prompt or "a very bad picture"] * len(prompts))  # of another length
        elif self.guide != "two calls":
            none = [row.expand(len(t), -1) for row, t in zip(none, text, strict=True)]
        own = torch.stack([t.mean() for t in text]).reshape(-1, 1, 1, 1)
        scale = true_cfg_scale if self.guide == "both" else guidance_scale
        guided = self.guide not in ("none", "told") and scale > (0 if self.guide == "off at 0" else 1)
        guided &= self.guide != "negative" or negative_prompt is not None or self.channels == 4
        guided |= trait == "always guided" or (trait == "zero is without" and scale != 0)
        told = guidance_scale if self.guide in ("told", "both") else None
        if trait == "zero is without" and scale == 0:
            text = self.text_encoder([""] * len(prompts))
        latents = torch.randn(len(prompts), self.channels, self.height, self.width)
        self.beside = own.expand(latents.shape) * torch.linspace(-1, 1, latents[0].numel()).reshape(latents.shape[1:])
        if self.pictured:
            if image is None:
                raise ValueError("a picture is missing")
            self.beside = (image[:, :1, : self.height, : self.width] * 2 - 1).expand(latents.shape)
        before: Any = None
        self.scheduler.set_timesteps(num_inference_steps)
        for number, t in enumerate(self.scheduler.timesteps):
            scaled = getattr(self.scheduler, "scale_model_input", None)
            x = latents if scaled is None else scaled(latents, t)
            if trait == "preconditioned":
                x = x / (1 + (float(t) / 1000) ** 2) ** 0.5
            x = x * self.in_factor + self.in_shift
            x = x.clamp(-1.5, 1.5) if trait == "input clamped" else x
            if trait == "noisy condition":
                self.beside = self.beside + 0.1 * torch.randn(self.beside.shape)
            if trait == "condition by time":
                self.beside = self.beside * (1 + float(t) / 5000)
            x = x.roll(number % 2, -1) if trait == "rolled by step" else x
            x = x + 0.2 * own if trait == "term by condition" else x
            x = x + 0.1 * x.flip(-1) if trait == "input of two" else x
            x = x + 1e-3 * torch.randn(x.shape) if trait == "noise added" else x
            x = torch.cat([x[:, :1] * (1 + float(t) / 9000), x[:, 1:]], 1) if trait == "channel by time" else x
            time = t.float() * self.slope + self.offset
            if trait == "time rounded":
                time = torch.round(t.float() / 7) * 7 * self.slope + self.offset
            time = torch.tensor(float(number)) if trait == "time by step" else time
            time = (t.float() / 1000) ** 2 * 1000 if trait == "time squared" else time
            time = t.float().clamp(max=960) * self.slope + self.offset if trait == "time clamped" else time
            time = time + own.flatten()[0] if trait == "time by condition" else time
            words = [each * (1 + number / 50) for each in text] if trait == "text by step" else text
            part = self.denoiser if self.boundary is None or t >= self.boundary else self.denoiser_2
            now = told * (0.5 if told is not None and 300 < t < 700 else 1) if trait == "told by time" and told else told
            within = guided and (self.guide != "within steps" or 200 < t < 700)
            found = self.guide_step(part, x, words, none, time, now, scale, within)
            if trait == "two calls averaged":
                found = (found + self.predict(part, x, words, time * 0.9, now)) / 2
            found = found * self.out_factor
            found = found.clamp(-1.2, 1.2) if trait == "output clamped" else found
            found = found * 0 if trait == "first is 0" and number == 0 else found
            if trait == "output of before":
                found, before = found if before is None else 0.9 * found + 0.1 * before, found
            found = found + 0.2 * own if trait == "output by condition" else found
            found = found * (found.std() / (found.std() + 0.1)) if trait == "output rescaled" else found
            found = latents - found * float(t) / 1000 if trait == "clean output" else found
            found = found * 1.05 if trait == "scaled between" and 400 < t < 650 else found
            if trait == "latents by caption" and len(prompts[0].split()) > 3:
                latents = latents * 0.98
            latents = self.scheduler.step(found, t, latents, return_dict=False)[0]
            latents = latents.clamp(-1.5, 1.5) if trait == "latents clamped" else latents
            latents = latents / latents.std() if trait == "latents normed" else latents
        z = latents * self.std + self.mean
        z = z * (1 + z.mean() / 9) if trait == "decoder by latents" else z
        return self.vae.decode(z + 0.2 * own if trait == "decoder by condition" else z)

    def guide_step(self, part, x, text, none, time, told, scale, guided) -> torch.Tensor:
        """Return the prediction for a step, guided or not."""
        if not guided:
            return self.predict(part, x, text, time, told)
        if self.guide.startswith("two calls") or self.guide in ("none", "told", "both", "off at 0"):
            order = (none, text) if "swapped" in self.guide else (text, none)
            pairs = [self.predict(part, x, each, time, told) for each in order]
            free, found = pairs if "swapped" in self.guide else pairs[::-1]
        elif self.guide == "interleaved":
            rows = [each for pair in zip(none, text, strict=True) for each in pair]
            both = self.predict(part, x.repeat_interleave(2, 0), rows, time, told)
            free, found = both[0::2], both[1::2]
        else:
            both = self.predict(part, torch.cat([x, x]), none + text if self.guide == "halves" else text + none, time, told)
            free, found = both.chunk(2) if self.guide == "halves" else both.chunk(2)[::-1]
        return found + scale * (found - free) if self.guide == "off at 0" else free + scale * (found - free)


def record(pipe: Pipeline, call: dict[str, Any], part: str, seed: int) -> tuple[list[tuple[Any, Any, Any]], Any, Any]:
    """Each step of a denoiser (latents as scaled, time, prediction), the last latents and what is decoded, of a call."""
    rows, state, scheduler = [], {}, pipe.scheduler
    step, scale, decode = scheduler.step, getattr(scheduler, "scale_model_input", None), pipe.vae.decode

    def stepped(prediction, t, sample, **named):
        if state.pop("called", False):
            rows.append((state.get("scaled", sample).clone(), t, prediction.clone()))
        state["called"], state["final"] = False, step(prediction, t, sample, **named)[0]
        return (state["final"],)

    def scaled(sample, t):
        state["scaled"] = scale(sample, t)
        return state["scaled"]

    hook = pipe.components[part].register_forward_hook(lambda *_: state.__setitem__("called", True))
    scheduler.step = stepped
    if scale is not None:
        scheduler.scale_model_input = scaled
    pipe.vae.decode = lambda z: state.__setitem__("decoded", z)
    try:
        torch.manual_seed(seed)
        with torch.no_grad():
            pipe(**call)
    finally:
        hook.remove()
        for owner, name in ((scheduler, "step"), (scheduler, "scale_model_input"), (pipe.vae, "decode")):
            vars(owner).pop(name, None)
        assert pipe.vae.decode == decode
    return rows, state["final"], state["decoded"]


def measure_difference(found: torch.Tensor, right: torch.Tensor) -> float:
    """The largest difference over the largest value, or over 0.1: sums that nearly cancel are rounded as their terms are."""
    return float((found.double().flatten() - right.double().flatten()).abs().max() / right.double().abs().max().clamp(min=0.1))


@torch.no_grad()
def check_calls(pipe: Pipeline, part: str, rng: random.Random) -> str | None:
    """What is wrong with the calls of a denoiser; None where none is. Raises SpecError where the pipeline is refused."""
    draw = torch.Generator().manual_seed(rng.randrange(99))
    pictures = [{"image": torch.rand(1, 3, 6, 6, generator=draw)} if pipe.pictured else {} for _ in CAPTIONS]
    seen = observe(pipe, pictures[0], part)
    one, two = ({**seen.call, "prompt": caption, **pictures[n]} for n, caption in enumerate(PROMPTS))
    confirm(pipe, seen, (one, two))
    made, module = make_denoiser_call(pipe, seen, torch.device("cpu"), **pictures[0]), pipe.components[part]
    calls = {caption: {"prompt": caption, **more} for caption, more in zip(CAPTIONS, pictures, strict=True)}
    conditions = {caption: made.encode(**call) for caption, call in calls.items()}
    steps, together = rng.randint(4, 7), list[tuple[Any, Any, Any, str]]()
    for caption in CAPTIONS[:3]:
        call = {**seen.call, **calls[caption], "num_inference_steps": steps}
        rows, final, decoded = record(pipe, call, part, rng.randrange(99))
        for x, t, right in rows:
            found = module(**made([conditions[caption]], x, t.reshape(1)))
            off = measure_difference(made.predictions(found, 1), right)
            if not off < CLOSE * max(1.0, float(x.abs().max()) / 10):  # large latents are rounded
                return f"a sample is {off:.1e} off at {float(t):g}: {seen.describe()}"
        if not (off := measure_difference(seen.to_decoder(final), decoded)) < CLOSE:
            return f"what is decoded is {off:.1e} off: {seen.describe()}"
        if not (off := measure_difference(made.latents(decoded.reshape(1, *made.decoded)), final)) < CLOSE:
            return f"latents of what is decoded are {off:.1e} off: {seen.describe()}"
        together += [(*row, caption) for row in (rows[0], rows[-1])]
    groups: dict[str, list[Any]] = {}
    for row in together:
        groups.setdefault(conditions[row[3]].form, []).append(row)
    for rows in groups.values():
        x, times = torch.cat([row[0] for row in rows]), torch.stack([row[1].reshape(()) for row in rows])
        if pipe.time_form in ("scalar", "number") or made.batching.lists:
            x, times, rows = x[:1], times[:1], rows[:1]  # noqa: PLW2901 one time is told for all samples, or each has a call
        found = made.predictions(module(**made([conditions[row[3]] for row in rows], x, times)), len(rows))
        for one, (_, t, right, caption) in zip(found, rows, strict=True):
            if not (off := measure_difference(one, right)) < CLOSE * max(1.0, float(x.abs().max()) / 10):
                return f"'{caption}' in a batch of {len(rows)} is {off:.1e} off at {float(t):g}: {seen.describe()}"
    return None


def has_trait(pipe: Pipeline) -> bool:
    """Whether a pipeline does what its trait says."""
    if pipe.trait == "told by time":
        return pipe.guide in ("told", "both")
    if pipe.trait in ("noisy condition", "condition by time"):
        return pipe.channels_beside != "none"
    if pipe.trait == "times of tokens":
        return pipe.layout == "rows"
    return pipe.trait is not None


def check(pipe: Pipeline) -> str | None:
    """What is wrong with the observation of a pipeline's denoisers."""
    for part in ("denoiser", *(["denoiser_2"] if pipe.boundary is not None else [])):
        try:
            wrong = check_calls(pipe, part, random.Random(len(part)))
        except SpecError as error:
            if not has_trait(pipe):
                return f"{part} refused: {error}"
            REFUSALS.append(f"{pipe.trait} {pipe.family}: {error}")
            continue
        if wrong is not None:
            return f"{part}: {wrong}"
        if has_trait(pipe):
            if pipe.trait == "zero is without":  # of which a run by the same call shows nothing
                return f"{part} is confirmed without captions: {pipe.guide}"
            ACCEPTED.append(f"{pipe.trait} {pipe.family} {part}")
    return None


def fuzz_denoiser_calls(cases: int, seed: int) -> list[str]:
    """Observe random pipelines, half of them with a trait that is to be refused, and call their denoisers as training does."""
    return observe_at_random(cases, seed, TRAITS, Pipeline, check)


REFUSALS: list[str] = []
ACCEPTED: list[str] = []  # with a trait that changes nothing that the steps of a run show
