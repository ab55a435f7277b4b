"""Parallel models inside unchanged pipelines of diffusers: the picture of one process, whatever the pipeline asks of them."""

from __future__ import annotations

import copy
import functools
import itertools
from pathlib import Path

import pipelines
import processes
import pytest
import torch
import unets
from diffusers import DDIMScheduler, StableDiffusionPipeline
from pipelines import PIPELINES
from sweeps import sweep
from torch import nn

import fxplug
from fxplug import Every, StepCache
from fxplug.parallel.runtime.pretended import run_simulated

CLOSE = 1e-5  # of the largest value of a picture
NAMES = tuple(PIPELINES)
ONE_SAMPLE = ("flux",)  # its guidance is an input


def off(a, b):
    return float((a - b).abs().max() / a.abs().max())


@functools.cache
def case(name):
    """The pipeline, its model traced with what it is called with there, and that call."""
    found = pipelines.made(name)
    args, kwargs = found.called_with()
    return found, fxplug.trace(found.pipe.transformer, args, kwargs).eval(), args, kwargs


@functools.cache
def picture(name, **more):
    return case(name)[0](**more)


@functools.cache
def parallel(name, **ways):
    _, gm, args, kwargs = case(name)
    plan = fxplug.parallel_plan(gm, args, kwargs, **ways)
    return plan, fxplug.parallelize(gm, plan)


def drawn(plan, found, model, **more):
    """The picture of every pretended process."""
    return run_simulated(plan.ways, lambda rank: found.with_transformer(model)(**more))


TOGETHER = "guidance 2 x ulysses 2"
WAYS = {
    "ulysses 2": {"ulysses": 2}, TOGETHER: {"batch": 2, "ulysses": 2}, "ring 2": {"ring": 2},
    "ulysses 2 x ring 2": {"ulysses": 2, "ring": 2},
}  # fmt: skip


PAIRS = [*itertools.product(NAMES, ("ulysses 2", TOGETHER)), ("sd3", "ring 2"), ("sd3", "ulysses 2 x ring 2")]


@pytest.mark.slow
@sweep(("name", "ways"), PAIRS, *(pair for pair in PAIRS if pair[0] in ("dit", "sd3")))
def test_the_picture_is_that_of_one_process(name, ways):
    if name in ONE_SAMPLE and "batch" in WAYS[ways]:
        with pytest.raises(fxplug.SpecError, match=r"1 samples \('hidden_states', dimension 0\) cannot be split over"):
            parallel(name, **WAYS[ways])
        return
    plan, new = parallel(name, **WAYS[ways])
    assert plan.share > 0.9
    for found in drawn(plan, case(name)[0], new):
        assert off(picture(name), found) < CLOSE


def decoder_in_rows(found, number):
    """The pipeline with its decoder split by rows, and the plan."""
    decoder, latents = found.pipe.vae.decoder, torch.randn(1, found.pipe.vae.config.latent_channels, 16, 16)
    gm = fxplug.trace(decoder, (latents,)).eval()
    plan = fxplug.parallel_plan(gm, (latents,), rows=number)
    pipe = copy.copy(found.pipe)
    pipe.vae = copy.copy(found.pipe.vae)
    pipe.vae._modules = {**found.pipe.vae._modules, "decoder": fxplug.parallelize(gm, plan)}
    return pipelines.Case(pipe, found.call), plan


@sweep("name", [name for name in NAMES if name != "cogvideox"], "sd3")  # cogvideox gives latents
def test_the_decoder_is_split_by_rows(name):
    new, plan = decoder_in_rows(case(name)[0], 3)
    for found in run_simulated(plan.ways, lambda rank: new.with_transformer(new.pipe.transformer)()):
        assert off(picture(name), found) < CLOSE


OTHERS = {
    "dit": [{"labels": (1, 2)}, {"labels": (5, 6, 7), "guidance": 1.0}],
    "pixart": [{"length": 12}, {"length": 3}, {"texts": 2}],
    "sd3": [{"length": 12}, {"size": (40, 24)}, {"texts": 2, "size": (48, 32)}],
    "flux": [{"length": 4}, {"size": (40, 24), "length": 12}, {"texts": 2}],
    "cogvideox": [{"texts": 2}, {"guidance_scale": 1.0}],
}


@sweep(("name", "more"), [(n, m) for n, rows in OTHERS.items() for m in rows], *(("sd3", m) for m in OTHERS["sd3"]), ids=str)
def test_other_texts_sizes_and_batches_than_planned(name, more):
    """The plan was made for one picture of 32 x 32 with its text: 64 tokens, or 15 for 40 x 24, in two uneven parts."""
    want = case(name)[0](**more)
    ways = [{"ulysses": 2, "ring": 2}]
    if name not in ONE_SAMPLE and more.get("guidance_scale") != 1.0:
        ways.append({"batch": 2, "ulysses": 2})
    for each in ways:
        plan, new = parallel(name, **each)
        for found in drawn(plan, case(name)[0], new, **more):
            assert off(want, found) < CLOSE


@pytest.mark.parametrize(
    ("name", "ways", "more", "text"),
    [
        ("sd3", {"ulysses": 2, "ring": 2}, {"length": 1}, r"1 tokens \(dimension 1 of \(2, 1, 24\)\) cannot be split over 4"),
        ("flux", {"ulysses": 2, "ring": 2}, {"size": (4, 4)}, r"1 tokens .* cannot be split over 4 processes"),
        ("pixart", {"ulysses": 2, "ring": 2}, {"size": (48, 32)}, r"embeddings.py:\d+: .*height.* now it is True: trace again"),
    ],
)
def test_what_the_plan_cannot_serve_is_told(name, ways, more, text):
    plan, new = parallel(name, **ways)
    with pytest.raises(fxplug.GuardError, match=text):
        drawn(plan, case(name)[0], new, **more)


@pytest.mark.parametrize("name", ["dit", pytest.param("pixart", marks=pytest.mark.slow)])
def test_guidance_off_where_the_plan_splits_it(name):
    key = "guidance" if name == "dit" else "guidance_scale"
    plan, new = parallel(name, batch=2, ulysses=2)
    with pytest.warns(UserWarning, match="samples are fewer than the 2 processes along 'batch'"):
        found = drawn(plan, case(name)[0], new, **{key: 1.0})
    assert all(off(case(name)[0](**{key: 1.0}), each) < CLOSE for each in found)


# --- with adapters, caches and a second network

AT = r"re:transformer_blocks.*(to_[qkv]|add_[qkv]_proj|to_out\.0)$"
CHOICES = (None, "a", {"a": 0.5, "b": 0.7}, ["a", "b"], [None, {"b": 1.5}])


def filled(module, seed):
    drawn = torch.Generator().manual_seed(seed)
    return {n: torch.randn(p.shape, generator=drawn) * 0.3 for n, p in module.named_parameters() if n.startswith("lora.")}


@functools.cache
def bank(name):
    """Two adapters in slots."""
    gm = case(name)[1]
    one = fxplug.apply(gm, fxplug.load_pass("lora", at=AT, rank=4))
    new = fxplug.apply(gm, fxplug.load_pass("lora", at=AT, rank=4, slots=2))
    for seed, adapter in enumerate("ab"):
        new.adapters.load(adapter, filled(one, seed))
    return new


@pytest.mark.slow
@sweep("how", [{}, {"fuse": "fused"}, {"merge": "live"}], {}, ids=str)
@pytest.mark.parametrize("ways", [{"ulysses": 2}, {"batch": 2}], ids=str)
def test_adapters_are_switched_while_it_is_parallel(ways, how):
    """Every choice, mixed by sample too: guidance has each sample twice."""
    found, _, args, kwargs = case("sd3")
    serial = bank("sd3")
    serial.adapters.use(None)
    lowered = fxplug.lower(serial, **how) if how else serial
    plan = fxplug.parallel_plan(lowered, args, kwargs, **ways)
    new = fxplug.parallelize(lowered, plan)
    pictures = []
    for choice in CHOICES:
        if "merge" in how and isinstance(choice, list):
            with pytest.raises(fxplug.SpecError, match="per-sample adapters are not supported with merge='live'"):
                new.adapters.use(choice)
            continue
        new.adapters.use(choice)
        many = drawn(plan, found, new)
        serial.adapters.use(choice)
        pictures.append(found.with_transformer(serial)())
        assert all(off(pictures[-1], each) < CLOSE for each in many)
    assert all(off(pictures[0], other) > 1e-3 for other in pictures[1:])


@pytest.mark.slow
def test_an_adapter_is_loaded_while_it_is_parallel():
    found, gm, args, kwargs = case("dit")
    at = "re:.*attn1.to_[qkv]$"
    state = filled(fxplug.apply(gm, fxplug.load_pass("lora", at=at, rank=4)), 5)
    empty = fxplug.apply(gm, fxplug.load_pass("lora", at=at, rank=4, slots=1))
    plan = fxplug.parallel_plan(empty, args, kwargs, ulysses=2)
    new = fxplug.parallelize(empty, plan)
    assert all(off(picture("dit"), each) < CLOSE for each in drawn(plan, found, new))
    new.adapters.load("late", state)
    new.adapters.use("late")
    many, want = drawn(plan, found, new), found.with_transformer(new_serial(gm, at, state))()
    assert off(want, picture("dit")) > 1e-3 and all(off(want, each) < CLOSE for each in many)


def new_serial(gm, at, state):
    new = fxplug.apply(gm, fxplug.load_pass("lora", at=at, rank=4))
    new.load_state_dict(state, strict=False)
    return new


def test_a_step_cache_takes_the_place_of_the_model():
    found, gm, args, kwargs = case("pixart")
    marked = fxplug.apply(gm, fxplug.load_pass("first_block_cache"))
    want = found.with_transformer(StepCache(marked, Every(2)))()
    assert off(picture("pixart"), want) > 1e-5  # steps were left out
    plan = fxplug.parallel_plan(marked, args, kwargs, ulysses=2)
    new = fxplug.parallelize(marked, plan)
    for each in run_simulated(plan.ways, lambda rank: found.with_transformer(StepCache(new, Every(2)))()):
        assert off(want, each) < CLOSE


class WithPicture(nn.Module):
    """A UNet with a ControlNet in it, as a pipeline without one calls it."""

    def __init__(self, module, cond):
        super().__init__()
        self.module, self.cond = module, cond
        self.config, self.dtype, self.device = module.config, module.dtype, module.device

    def forward(self, *args, **kwargs):
        cond = self.cond.expand(len(args[0]), -1, -1, -1)
        return self.module(*args, **kwargs, cond=cond, strength=torch.tensor(0.8))


@pytest.mark.slow
@pytest.mark.parametrize("ways", [{"ulysses": 2}, {"batch": 2}], ids=str)
def test_a_unet_with_its_controlnet(ways):
    base = unets.HOSTS["sd15"]()
    new = fxplug.apply(base.gm, fxplug.load_pass("controlnet", network=unets.control(base.model)))
    cond = unets.picture(base)
    text = base.kwargs["encoder_hidden_states"]

    def drawn(module):
        parts = (None, None, base.model, DDIMScheduler(clip_sample=False, steps_offset=1), None, None)
        pipe = StableDiffusionPipeline(pipelines.vae(4), *parts, requires_safety_checker=False)
        pipe.unet = WithPicture(module, cond[:1])
        return pipelines.quiet(pipe)(
            prompt_embeds=text[:1], negative_prompt_embeds=text[1:], num_inference_steps=4, output_type="latent",
            height=32, width=32, generator=torch.Generator().manual_seed(0),
        ).images  # fmt: skip

    with torch.no_grad():
        want = drawn(new)
        plan = fxplug.parallel_plan(new, base.args, {**base.kwargs, "cond": cond}, **ways)
        par = fxplug.parallelize(new, plan)
        assert off(want, drawn(fxplug.apply(base.gm, fxplug.load_pass("controlnet")))) > 1e-4
        for each in run_simulated(plan.ways, lambda rank: drawn(par)):
            assert off(want, each) < CLOSE


# --- real processes


def process(rank, folder):
    """Pictures of every pipeline, by models of one process that were saved, and by new ones."""
    world = torch.distributed.get_world_size()
    pictures = {}
    for saved in sorted(Path(folder).glob("model *")):
        name = saved.name.split()[1]
        found = pipelines.made(name)
        found.pipe.transformer = fxplug.load(saved)
        pictures[saved.name] = found()
        if found.pipe.transformer.meta["passes"][0].get("slots"):
            for choice in ("a", ["a", "b"]):
                found.pipe.transformer.adapters.use(choice)
                pictures[f"{saved.name} {choice}"] = found()
    for name in ("flux", "cogvideox") if world == 2 else ():
        found = pipelines.made(name)
        args, kwargs = found.called_with()
        gm = fxplug.trace(found.pipe.transformer, args, kwargs, check=False).eval()
        plan = fxplug.parallel_plan(gm, args, kwargs, ulysses=2, check=False)
        found.pipe.transformer = fxplug.parallelize(gm, plan)
        pictures[f"new {name}"] = found()
        if name == "flux":
            pictures[f"decoder {name}"] = decoder_in_rows(found, 2)[0]()
    torch.save(pictures, f"{folder}/{rank}.pt")
    torch.distributed.barrier()


def drawn_by(folder, world):
    processes.group(process, str(folder), world=world)
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


def wanted(key):
    _, name, *rest = key.split(maxsplit=2)
    if not rest or not rest[0].startswith("slots "):
        return picture(name)
    serial = bank(name)
    choice = rest[0].removeprefix("slots ")
    serial.adapters.use(None if choice == "none" else ["a", "b"] if choice.startswith("[") else choice)
    return case(name)[0].with_transformer(serial)()


@pytest.mark.slow
def test_two_processes(tmp_path):
    """Guidance by guidance, by heads, around a ring; from saved models, and planned there; adapters switched in between."""
    for name, ways in (("dit", {"ulysses": 2}), ("dit", {"batch": 2}), ("pixart", {"ring": 2})):
        fxplug.save(parallel(name, **ways)[1], tmp_path / f"model {name} {next(iter(ways))}")
    _, _, args, kwargs = case("sd3")
    bank("sd3").adapters.use(None)
    plan = fxplug.parallel_plan(bank("sd3"), args, kwargs, ulysses=2)
    fxplug.save(fxplug.parallelize(bank("sd3"), plan), tmp_path / "model sd3 slots none")
    for found in drawn_by(tmp_path, 2):
        assert len(found) == 9
        for key, value in found.items():
            assert off(wanted(key.replace("none a", "a").replace("none [", "[")), value) < CLOSE, key


@pytest.mark.slow
def test_four_processes(tmp_path):
    four = ("dit", {"batch": 2, "ulysses": 2}), ("sd3", {"batch": 2, "ring": 2}), ("pixart", {"ring": 2, "ulysses": 2})
    for name, ways in four:
        fxplug.save(parallel(name, **ways)[1], tmp_path / f"model {name} {'x'.join(ways)}")
    for found in drawn_by(tmp_path, 4):
        assert len(found) == 3 and all(off(picture(key.split()[1]), value) < CLOSE for key, value in found.items())
