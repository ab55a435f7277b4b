"""Where a run of a step cache begins: by who runs it and by what it is called with, never by the time alone."""

from __future__ import annotations

import copy
from functools import cache as once

import diffusers
import pytest
import torch
from test_caching import pixart

import fxplug
from fxplug.core.clock import Clock
from fxplug.core.errors import GuardError
from fxplug.step_cache.cache import StepCache
from fxplug.step_cache.fast_attention import FastAttention
from fxplug.step_cache.policies import Every, TeaCache, Threshold

# numpy's, of diffusers' schedulers
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@once
def marked():
    """A UNet with marks, its text encoder's results, and an autoencoder."""
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(32, 64), down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=32, attention_head_dim=8, norm_num_groups=8,
    ).eval()  # fmt: skip
    call = {"sample": torch.randn(2, 4, 8, 8), "timestep": torch.tensor(5), "encoder_hidden_states": torch.randn(2, 7, 32)}
    gm = fxplug.trace(unet, kwargs={**call, "return_dict": False})
    return unet, fxplug.apply(gm, fxplug.load_pass("deepcache"))


def pipeline(denoiser, kind=diffusers.StableDiffusionPipeline, scheduler="DDIMScheduler"):
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(block_out_channels=(8, 8), latent_channels=4, norm_num_groups=4)
    named = {"clip_sample": False} if scheduler in ("DDIMScheduler", "DDPMScheduler") else {}
    scheduler = getattr(diffusers, scheduler)(steps_offset=1, **named)
    pipe = kind(vae, None, None, marked()[0], scheduler, None, None, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    pipe.unet = denoiser
    return pipe


@torch.no_grad()
def picture(pipe, steps=9, seed=1, word=1.0, **more):
    words = torch.full((1, 7, 32), word), torch.zeros(1, 7, 32)
    options = {"num_inference_steps": steps, "generator": torch.Generator().manual_seed(seed), "output_type": "latent"}
    return pipe(prompt_embeds=words[0], negative_prompt_embeds=words[1], **{**options, **more}).images


def fresh():
    return StepCache(marked()[1], Every(3))


SCHEDULERS = (
    "DDIM EulerDiscrete EulerAncestralDiscrete DPMSolverMultistep UniPCMultistep HeunDiscrete DDPM PNDM".split()  # noqa: SIM905
)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_second_run_takes_nothing_of_the_first_under_any_scheduler(name):
    pipe = pipeline(fresh(), scheduler=f"{name}Scheduler")
    first = picture(pipe)
    counts = dict(pipe.unet.counts)
    assert counts["shallow"] >= counts["full"]  # within a run steps are taken from earlier ones
    assert torch.equal(picture(pipe), first) and pipe.unet.counts == {k: 2 * v for k, v in counts.items()}
    assert torch.equal(picture(pipe, seed=2), picture(pipeline(fresh(), scheduler=f"{name}Scheduler"), seed=2))


def interrupted(pipe, **more):
    """A run that an error of the caller's ends in its middle, at high times."""

    def stop(pipe, i, t, kwargs):
        if i == 1:
            raise ZeroDivisionError
        return kwargs

    with pytest.raises(ZeroDivisionError):
        picture(pipe, callback_on_step_end=stop, **more)


def broken_off(pipe, **more):
    def stop(pipe, i, t, kwargs):
        pipe._interrupt = i == 1
        return kwargs

    picture(pipe, callback_on_step_end=stop, **more)


BEFORE = {  # what runs first, and ends where the second begins
    "a few steps": lambda pipe: picture(pipe, steps=2),
    "an error": interrupted,
    "an interrupt": broken_off,
    "no guidance": lambda pipe: picture(pipe, steps=2, guidance_scale=1.0),
    "other words": lambda pipe: picture(pipe, steps=2, word=2.0),
    "one step": lambda pipe: picture(pipe, steps=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("guidance", [7.5, 1.0])
@pytest.mark.parametrize("before", BEFORE)
def test_a_picture_from_a_picture_begins_a_run_below_the_time_of_the_last(before, guidance):
    """In another pipeline that shares the module, with the words of the first, and from what it has made."""

    def both(cache, first):
        made = pipeline(cache)
        if first:
            BEFORE[before](made)
        other = pipeline(cache, diffusers.StableDiffusionImg2ImgPipeline)
        other.scheduler = made.scheduler
        source = picture(pipeline(marked()[1]), steps=2)
        return picture(other, steps=10, image=source, strength=0.3, guidance_scale=guidance)

    assert torch.equal(both(fresh(), True), both(fresh(), False))


@pytest.mark.slow
def test_guidance_that_ends_or_begins_in_a_run_keeps_calls_apart():
    """A call takes nothing from one with another condition: without changes between steps each is the model's own."""
    base = pixart()
    new = fxplug.apply(base.gm, fxplug.load_pass("first_block_cache"))
    cache, calls = StepCache(new, Every(50)), []
    words = {name: torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(i)) for i, name in enumerate("ab")}
    plan = [(7, "ab"), (6, "ab"), (5, "b"), (4, "b"), (3, "ab"), (2, "ba"), (1, "a")]
    with torch.no_grad():
        for time, names in plan:
            for name in names:
                call = {**base.kwargs, "encoder_hidden_states": words[name], "timestep": torch.full((2,), time)}
                before = cache.counts["full"]
                out = cache(**call)
                calls.append((time, name, cache.counts["full"] > before))
                alone = StepCache(new, Every(50))
                alone(**{**call, "timestep": torch.full((2,), 7)})
                wanted = base.model(**call) if calls[-1][2] else alone(**call)
                kept = cache._streams[max(cache._clock.streams, key=lambda s: s.time == time and s.number).number]
                assert torch.equal(out[0], wanted[0]) or kept.index > 1, calls[-1]
    assert [row for row in calls if row[2]] == [(7, "a", True), (7, "b", True), (3, "a", True)]


def given(base, seed=1, time=9, words=1):
    one, two = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(100 + words)
    sample, words = torch.randn(2, 4, 8, 8, generator=one), torch.randn(2, 7, 12, generator=two)
    new = {"hidden_states": sample, "encoder_hidden_states": words, "timestep": torch.full((2,), time)}
    return {**base.kwargs, **new}


SECOND = {  # another picture, at a lower time, called by a loop of one's own
    "another sample": {"seed": 2},
    "other words": {"words": 2},
    "both": {"seed": 2, "words": 2},
}


@pytest.mark.parametrize("kind", ["every", "threshold", "teacache", "attention"])
@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("second", SECOND)
def test_a_loop_of_ones_own_that_begins_another_picture_lower_down(second, steps, kind):
    base = pixart()
    make = {
        "every": lambda: StepCache(fxplug.apply(base.gm, fxplug.load_pass("first_block_cache")), Every(9)),
        "threshold": lambda: StepCache(fxplug.apply(base.gm, fxplug.load_pass("first_block_cache")), Threshold(1e9)),
        "teacache": lambda: StepCache(fxplug.apply(base.gm, fxplug.load_pass("teacache")), TeaCache(1e9)),
        "attention": lambda: FastAttention(
            (new := fxplug.apply(base.gm, fxplug.load_pass("ditfastattn", window=4))),
            [{}, *(dict.fromkeys(FastAttention(new).places, "step") for _ in range(8))],
        ),
    }[kind]
    cache = make()
    with torch.no_grad():
        for time in range(8, 8 - steps, -1):
            cache(**given(base, time=time))
        call = given(base, time=2, **SECOND[second])
        assert torch.equal(cache(**call)[0], base.model(**call)[0])
        cache(**{**call, "timestep": torch.full((2,), 1)})
        if kind != "attention":
            assert cache.counts["shallow"] == steps - 1 + 1  # within both runs steps are still taken


def test_what_differs_at_each_step_is_no_condition():
    """Residuals of a ControlNet are others at each step; the words are not."""
    clock = Clock("timestep", ["sample", "timestep", "encoder_hidden_states", "down_block_additional_residuals"])
    words, sample = torch.randn(2, 7, 32), torch.randn(2, 4, 8, 8)
    found = []
    for time in (9, 8, 7, 6):
        sample = sample + 0.1 * torch.randn(2, 4, 8, 8)
        found.append(clock.tick((sample, time, words.clone()), {"down_block_additional_residuals": (torch.randn(2, 8, 8, 8),)}))
    assert found == [(True, 0), *[(False, 0)] * 3]
    assert clock.tick((sample, 5, words + 1), {"down_block_additional_residuals": (torch.randn(2, 8, 8, 8),)}) == (False, 1)
    words[:] = 0  # the same tensor with other values
    assert clock.tick((sample, 4, words), {"down_block_additional_residuals": (torch.randn(2, 8, 8, 8),)}) == (False, 2)


@pytest.mark.parametrize("name", ["first_block_cache", "teacache"])
@pytest.mark.parametrize("policy", [Every(3), Threshold(0.1), TeaCache(), Threshold(1e9)], ids=str)
@pytest.mark.parametrize("side", [6, 10])
def test_every_part_has_the_guards(name, policy, side):
    base = pixart()
    cache = StepCache(fxplug.apply(base.gm, fxplug.load_pass(name)), policy)
    with torch.no_grad():
        for time in (9, 8):
            cache(**given(base, time=time))
        wrong = {**given(base, time=7), "hidden_states": torch.randn(2, 4, side, side)}
        with pytest.raises(GuardError, match=r"self.height != height"):
            cache(**wrong)
        call = given(base, time=7)
        assert torch.equal(cache(**call)[0], base.model(**call)[0])  # what was broken off kept nothing


def test_a_copy_has_a_run_of_its_own():
    cache = fresh()
    pipe = pipeline(cache)
    wanted = picture(pipe)
    pipe.unet = copy.deepcopy(cache)
    assert torch.equal(picture(pipe), wanted)
