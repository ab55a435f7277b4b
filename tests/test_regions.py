"""Regions of a picture: equal to the plain runs where a mask is 1 or 0, and refused where runs are not in step."""

from __future__ import annotations

import base64
import json
import shutil
import threading

import pytest
import tiny
import torch
from diffusers import DDIMScheduler
from fuzz_serving import SIZE, TinyDenoiser, TinyPipeline
from PIL import Image
from test_engine import FLUX, SD, ask, make, run

import fxplug
from fxplug import Schedule, Strength
from fxplug.core.errors import SpecError
from fxplug.serving import AdapterStore, Cancelled, Engine, Region, Request
from fxplug.serving.server.bodies import read_order
from fxplug.serving.server.errors import RequestError
from fxplug.serving.server.keys import ANYBODY, ApiKey
from fxplug.serving.server.picture_files import read_mask
from fxplug.serving.server.pictures import encode_picture
from fxplug.serving.server.server_config import ServerConfig

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(scope="module")
def engine():
    torch.manual_seed(0)
    pipe = TinyPipeline(TinyDenoiser().eval(), DDIMScheduler(clip_sample=False))
    slots = fxplug.load_pass("lora", at=["attn.*", "conv_in"], rank=2, slots=3, per_sample=2)
    pipe = fxplug.rewrite_pipeline(pipe, passes={"unet": [slots]}, prompt="a cat", **SIZE)
    for seed, name in enumerate(("ink", "film", "wash")):
        torch.manual_seed(seed)
        adapters = pipe.unet.adapters
        shapes = {"A": (2, 8), "B": (8, 2)}
        layers = ("attn.q", "attn.v")
        adapters.load(name, {f"{at}.lora_{side}.weight": torch.randn(*shapes[side]) for at in layers for side in "AB"})
    return Engine(pipe, rows=8, buckets=[8])


def draw(engine, regions=(), **more):
    call = {"prompt": "a cat", "num_inference_steps": 3, "guidance_scale": 3.0, **SIZE}
    given = {"call": call, "seed": 0, "regions": list(regions), **more}
    (ticket,) = run(engine, [Request(**given)])
    return ticket.result().images


def fill(value, size=16):
    return torch.full((size, size), value)


@pytest.mark.slow
@pytest.mark.parametrize("name", [SD, FLUX])
def test_a_mask_of_ones_is_the_regions_own_picture_and_one_of_zeros_is_the_plain_one(name):
    engine, size = Engine(make(name), rows=8, buckets=[8]), 32 if name == SD else 64
    plain = ask(name, 0)
    own = {key: value for key, value in ask(name, 1).call.items() if "prompt" in key}
    other = plain.model_copy(update={"call": {**plain.call, **own}})
    half = torch.cat([fill(1.0, size)[:, : size // 2], fill(0.0, size)[:, size // 2 :]], 1)
    asked = [plain.model_copy(update={"regions": [Region(mask=m, call=own)]}) for m in (fill(1.0, size), fill(0.0), half)]
    first, second, ones, zeros, both = (ticket.result().images for ticket in run(engine, [plain, other, *asked]))
    assert torch.equal(ones, second) and torch.equal(zeros, first) and not torch.equal(first, second)
    left, right = (both[..., : size // 4], both[..., -size // 4 :])
    assert (left - second[..., : size // 4]).abs().mean() < (left - first[..., : size // 4]).abs().mean()
    assert (right - first[..., -size // 4 :]).abs().mean() < (right - second[..., -size // 4 :]).abs().mean()


def test_a_region_has_adapters_of_its_own_beside_those_of_the_request(engine):
    plain = draw(engine, adapters={"ink": 1.0})
    both = draw(engine, adapters={"ink": 0.3, "film": 0.5})
    assert torch.equal(draw(engine, [Region(mask=fill(0.0), adapters={"film": 0.5})], adapters={"ink": 1.0}), plain)
    assert torch.equal(draw(engine, [Region(mask=fill(1.0), adapters={"ink": 0.3, "film": 0.5})], adapters={"ink": 1.0}), both)
    assert not torch.equal(plain, both)


def test_masks_that_sum_to_more_share_and_where_they_sum_to_less_the_request_has_the_rest(engine):
    words = {"prompt": "dog"}
    twice = draw(engine, [Region(mask=fill(1.0), call=words), Region(mask=fill(1.0), call=words)])
    assert torch.allclose(twice, draw(engine, call={"prompt": "dog", "num_inference_steps": 3, "guidance_scale": 3.0, **SIZE}))
    part = draw(engine, [Region(mask=fill(0.5), call=words)])
    assert torch.allclose(part, draw(engine, [Region(mask=fill(0.25), call=words), Region(mask=fill(0.25), call=words)]))
    grey = Image.new("L", (16, 16), 255)
    assert torch.equal(draw(engine, [Region(mask=grey, call=words)]), draw(engine, [Region(mask=fill(1.0), call=words)]))


def test_generators_without_a_seed_draw_as_they_would_alone(engine):
    made = []
    for regions in ([], [Region(mask=fill(0.0), call={"prompt": "dog"})]):
        generator = torch.Generator().manual_seed(3)
        made.append(draw(engine, regions, seed=None, call={"prompt": "blue", "generator": generator, **SIZE}))
        made.append(generator.get_state())
    assert torch.equal(made[0], made[2]) and torch.equal(made[1], made[3])


@pytest.mark.parametrize(("region", "more", "text"), [
    ({"mask": fill(1.0, 8)[:4]}, {}, r"regions\[0\]\.mask: the mask has 8 x 4 pixels, and the picture 16 x 16"),
    ({"mask": fill(1.0), "call": {"guidance_scale": 2.0}}, {}, "cannot change 'guidance_scale'; it can have its own prompt"),
    ({"mask": fill(1.0), "call": {"promt": ""}}, {}, "did you mean 'prompt'"),
    ({"mask": fill(1.0)}, {"seed": None}, "seed: regions need a seed"),
    ({"mask": fill(1.0), "adapters": {"inc": 1.0}}, {}, "did you mean 'ink'"),
])  # fmt: skip
def test_what_is_wrong_is_told_by_submit(engine, region, more, text):
    with pytest.raises(SpecError, match=text):
        engine.submit(Request(**{"call": {"prompt": "", **SIZE}, "seed": 0, "regions": [Region(**region)], **more}))
    assert engine.is_idle


@pytest.mark.parametrize("mask", [fill(1.5), fill(float("nan")), torch.ones(3), torch.ones(0, 4), None, [[1.0]]])
def test_a_mask_of_other_values_is_told(mask):
    with pytest.raises(SpecError, match="must be a tensor"):
        Region(mask=mask)


class Odd(TinyPipeline):
    """Makes more steps for a longer prompt, or other latents."""

    def __call__(self, prompt, num_inference_steps=2, height=8, width=8, generator=None, **more):
        steps = 3 if prompt == "red sea" else 2
        if prompt == "blue":
            generator.manual_seed(9)
        return super().__call__(prompt, steps, height=height, width=width, generator=generator, **more)


@pytest.mark.parametrize("words", [("", "red sea"), ("red sea", ""), ("", "blue")])
def test_runs_that_are_not_in_step_are_told_and_others_go_on(engine, words):
    own = Engine(Odd(engine.models["unet"], DDIMScheduler(clip_sample=False)), rows=8)
    size, region = {"height": 16, "width": 16}, Region(mask=fill(0.5), call={"prompt": words[1]})
    plain = Request(call={"prompt": "dog", **size}, seed=1)
    good, bad = run(own, [plain, Request(call={"prompt": words[0], **size}, seed=0, regions=[region])])
    with pytest.raises(SpecError, match="other latents|not in step|ends before"):
        bad.result()
    assert good.state == "done" and own.is_idle and own.count_requests() == (0, 0)
    assert not [thread for thread in threading.enumerate() if thread.name == "fxplug request"]


def test_a_cancelled_request_takes_its_regions_with_it(engine):
    call = {"prompt": "dog", "num_inference_steps": 9, **SIZE}
    ticket = engine.submit(Request(call=call, seed=0, adapters={"wash": 1.0}, regions=[Region(mask=fill(0.5))] * 3))
    for _ in range(4):
        engine.step()
    assert engine.count_requests() == (0, 1) and ticket.state == "running"
    ticket.cancel()
    while not engine.is_idle:
        engine.step()
    with pytest.raises(Cancelled):
        ticket.result()
    engine.models["unet"].adapters.unload("wash")  # no pin is left


def test_regions_may_have_more_adapters_in_all_than_a_sample_but_not_than_there_are_slots(tmp_path):
    pipe = tiny.pipeline(SD)
    slots = fxplug.load_pass("lora", at="**.to_q", rank=2, slots=3, per_sample=1)
    pipe = fxplug.rewrite_pipeline(pipe, passes={"unet": [slots]}, prompt="a cat", height=32, width=32)
    for seed, name in enumerate("abcd"):
        file = tiny.lora(tiny.pipeline(SD), f"regions_{name}", seed=seed, unet=["to_q"])
        shutil.copy(file / "pytorch_lora_weights.safetensors", tmp_path / f"{name}.safetensors")
    call = {"prompt": "a cat", "num_inference_steps": 1, "height": 32, "width": 32, "output_type": "latent"}
    with AdapterStore(tmp_path, {"unet": pipe.unet}, resize=True) as store:
        engine = Engine(pipe, store=store)
        three, four = ([Region(mask=fill(0.2), adapters={name: 1.0}) for name in names] for names in ("abc", "abcd"))
        assert engine.submit(Request(call=call, seed=0, regions=three)).result().images.isfinite().all()
        with pytest.raises(SpecError, match="4 adapters for unet, which has room for 3 in its slots"):
            engine.submit(Request(call=call, seed=0, regions=four)).result()


# --- over HTTP


def encode(picture):
    return base64.b64encode(encode_picture([picture], "png")[0]).decode()


WHITE = encode(Image.new("L", (16, 16), 255))


def read(engine, regions, key=ANYBODY, **more):
    config = ServerConfig(model="x", limits={"pixels": 256, "regions": 2, "adapters": 2})
    body = {"prompt": "a cat", "seed": 0, "size": "16x16", "regions": regions, **more}
    return read_order(json.dumps(body).encode(), config, engine.pipes[""], ["ink", "film"], key)


def test_regions_of_a_body_are_those_of_a_request(engine):
    region = {"mask": WHITE, "adapters": {"film": 0.5}, "call": {"prompt": "dog"}}
    (request,) = read(engine, [region, {"mask": "data:image/png;base64," + WHITE}], adapters={"ink": 1.0}).requests
    first, second = request.regions
    assert (first.adapters, first.call, second.adapters, second.call) == ({"film": 0.5}, {"prompt": "dog"}, {}, {})
    assert torch.equal(first.mask, fill(1.0)) and torch.equal(second.mask, fill(1.0))


@pytest.mark.parametrize(("picture", "values"), [
    (Image.new("L", (1, 1), 51), 51), (Image.new("1", (1, 1), 1), 255), (Image.new("RGB", (1, 1), "white"), 255),
    (Image.new("RGBA", (1, 1), (255, 255, 255, 0)), 0), (Image.new("LA", (1, 1), (255, 102)), 102),
    (Image.new("RGBA", (1, 1), "black"), 0),
])  # fmt: skip
def test_white_is_the_region_and_what_is_transparent_is_not(picture, values):
    assert read_mask(picture).getpixel((0, 0)) == values


@pytest.mark.parametrize(("regions", "status", "param", "text"), [
    ([{"mask": WHITE}] * 3, 400, "regions", "3 regions"),
    ([{}], 400, "regions[0]", "missing key 'mask'"),
    ([{"mask": WHITE}, {"mask": "?"}], 400, "regions[1].mask", "is not base64"),
    ([{"mask": 1}], 400, "regions[0].mask", "a picture in base64"),
    ([{"mask": base64.b64encode(b"GIF89a").decode()}], 400, "regions[0].mask", "cannot be read as PNG"),
    ([{"mask": WHITE[:60]}], 400, "regions[0].mask", "cannot be read as PNG"),
    ([{"mask": encode(Image.new("L", (16, 8)))}], 400, "regions[0].mask", "is 16x8, and the picture 16x16"),
    ([{"mask": encode(Image.new("1", (80, 80)))}], 400, "regions[0].mask", "the limit is 4096"),
    ([{"mask": encode(Image.new("I;16", (16, 16)))}], 400, "regions[0].mask", "more than 8 bits"),
    ([{"mask": WHITE, "call": {"prompt": 1}}], 400, "regions[0].call.prompt", "must be a text"),
    ([{"mask": WHITE, "call": {"guidance_scale": 1.0}}], 400, "regions[0].call.guidance_scale", "a region cannot change"),
    ([{"mask": WHITE, "call": {"promt": ""}}], 400, "regions[0].call.promt", "did you mean 'prompt'"),
    ([{"mask": WHITE, "adapters": {"inc": 1}}], 404, "regions[0].adapters.inc", "did you mean 'ink'"),
    ([{"mask": WHITE, "adapters": {"film": 1}}], 404, "regions[0].adapters.film", "no adapter 'film'"),
    ([{"mask": WHITE, "adapters": {"ink": "1"}}], 400, "regions[0].adapters.ink", "must be a number"),
    ({"mask": WHITE}, 400, "regions", "list"),
])  # fmt: skip
def test_regions_that_are_wrong_are_told_by_field(engine, regions, status, param, text):
    with pytest.raises(RequestError, match=".*") as caught:
        read(engine, regions, ApiKey(adapters="i*") if status == 404 else ANYBODY)
    assert (caught.value.status, caught.value.param) == (status, param) and text in str(caught.value), caught.value


@pytest.fixture(scope="module")
def gated():
    pipe = tiny.pipeline(SD)
    slots = fxplug.load_pass("lora", at=["**.to_q", "**.to_v"], rank=4, slots=3, per_sample=2, regions=True)
    pipe = fxplug.rewrite_pipeline(pipe, passes={"unet": [slots]}, prompt="a cat", height=32, width=32)
    for seed, name in enumerate(("ink", "film", "grain")):
        pipe.unet.adapters.load(name, tiny.lora(tiny.pipeline(SD), f"gated_{name}", seed=seed, unet=["to_q", "to_v"]))
    return Engine(pipe, rows=8)


@pytest.mark.slow
def test_regions_of_adapters_alone_are_gates_in_one_run(gated):
    def ask_for(regions, **adapters):
        call = {"prompt": "a cat", "num_inference_steps": 2, "height": 32, "width": 32, "output_type": "pt"}
        before = gated.count_denoiser_calls()[1]
        (ticket,) = run(gated, [Request(call=call, seed=0, adapters=adapters, regions=regions)])
        return ticket.result().images, gated.count_denoiser_calls()[1] - before

    left = torch.cat([fill(1.0, 32)[:, :16], fill(0.0, 32)[:, 16:]], 1)
    plain, rows = ask_for([], ink=1.0)
    both, _ = ask_for([], ink=1.0, film=0.5)
    ones, seen = ask_for([Region(mask=fill(1.0, 32), adapters={"film": 0.5})], ink=1.0)
    zeros, _ = ask_for([Region(mask=fill(0.0, 32), adapters={"film": 0.5})], ink=1.0)
    assert seen == rows and torch.equal(ones, both) and torch.equal(zeros, plain) and not torch.equal(plain, both)
    fade = Schedule([(0, 1.0), (0.5, Strength(0.5, rest="full"))])
    two, seen = ask_for([Region(mask=left, adapters={"ink": 1.0}), Region(mask=1 - left, adapters={"film": fade})])
    other, _ = ask_for([Region(mask=1 - left, adapters={"ink": 1.0}), Region(mask=left, adapters={"film": fade})])
    assert seen == rows and not torch.equal(two, other) and not torch.equal(two, plain)
    for regions in ([Region(mask=left, adapters={"film": 0.5}, call={"prompt": "a dog"})],  # by rows
                    [Region(mask=left, adapters={"ink": 0.5})],
                    [Region(mask=left, adapters={"film": 0.5}), Region(mask=1 - left, adapters={"grain": 0.5})]):  # fmt: skip
        assert ask_for(regions, ink=1.0)[1] >= (1 + len(regions)) * rows  # and more for the proof of a first joint call


@pytest.mark.slow
def test_requests_with_other_masks_do_not_mix(gated):
    def ask_for(mask, rest="share"):
        call = {"prompt": "a cat", "num_inference_steps": 2, "height": 32, "width": 32, "output_type": "pt"}
        return Request(call=call, seed=0, regions=[Region(mask=mask, adapters={"ink": Strength(1.0, rest=rest)})])

    left = torch.cat([fill(1.0, 32)[:, :16], fill(0.0, 32)[:, 16:]], 1)
    asked = [(left, "share"), (1 - left, "share"), (left, "none"), (left.T, "full")]
    alone = [run(gated, [ask_for(*one)])[0].result().images for one in asked]
    for turn in (asked, asked[::-1]):
        together = run(gated, [ask_for(*one) for one in turn])
        for one, ticket in zip(turn, together, strict=True):
            torch.testing.assert_close(ticket.result().images, alone[[*map(id, asked)].index(id(one))], rtol=1e-4, atol=1e-4)
    assert all(not torch.allclose(alone[i], alone[j], atol=1e-3) for i in range(4) for j in range(i))
