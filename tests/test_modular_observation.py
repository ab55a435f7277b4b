"""What modular pipelines do around their denoiser: what the stock pipeline of the family does, or refused in words."""

from __future__ import annotations

import logging

import diffusers.modular_pipelines
import pytest
import tiny_modular_pipelines as tiny_modular
import tiny_pipelines as tiny
import torch
from diffusers import LayerSkipConfig, SkipLayerGuidance

import fxplug
from fxplug.pipelines.conditions import encode_condition
from fxplug.pipelines.observation import confirm, observe

# of numpy, about what schedulers of diffusers make of tensors, and of torch, about what diffusers itself uses
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
SIZE = {"height": tiny.SIZE, "width": tiny.SIZE}
QUICK = "sd3", "flux", "wan", "ltx", "z_image"
SLOW = "sdxl", "qwen_image"


def same(one, two):
    """Whether two arguments are equal, but for what only one of them has: a mask of ones, a setting."""
    if isinstance(one, dict) and isinstance(two, dict):
        return all(same(one[key], two[key]) for key in one.keys() & two.keys())
    left, right = ([x for x in torch.utils._pytree.tree_leaves(value) if x is not None] for value in (one, two))
    if not left or not right:
        return True
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(left, right, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_the_modular_form_is_observed_as_the_stock_pipeline(name):
    if name == "wan":
        pytest.importorskip("ftfy")  # which the blocks of Wan need
    stock = tiny.make(name)
    form = tiny_modular.form_of(name, stock)
    call = {**tiny.CALLS[name], **SIZE}
    one, two = observe(stock, call), observe(form, {k: v for k, v in call.items() if k != "guidance_scale"})
    assert confirm(form, two) < 1e-6
    assert (one.part, one.noisy, one.time, one.slope, one.offset) == (two.part, two.noisy, two.time, two.slope, two.offset)
    for key in ("to_output", "to_decoder"):
        left, right = getattr(one, key), getattr(two, key)
        assert torch.equal(left.index, right.index)
        assert torch.allclose(left.factor, right.factor) and torch.allclose(left.term, right.term, atol=1e-6)
    # of the two calls that a guider makes it is the one with the caption
    calls = [encode_condition(pipe, seen, prompt="a blue cube") for pipe, seen in ((stock, one), (form, two))]
    names = {k for k in calls[0].keys() & calls[1].keys() if k not in (one.noisy, one.time)}
    assert any("encoder_hidden_states" in k or k == "cap_feats" for k in names)
    assert all(same(calls[0][k], calls[1][k]) for k in names)
    assert form.guider._enabled if name in ("sdxl", "wan", "ltx") else True  # and the pipeline's own is as it was


def test_a_guider_that_skips_layers_is_kept_out():
    pytest.importorskip("ftfy")
    form = tiny_modular.form_of("wan", tiny.make("wan"))
    call = {**tiny.CALLS["wan"], **SIZE}
    plain = observe(form, call)
    form.update_components(guider=SkipLayerGuidance(skip_layer_config=LayerSkipConfig(indices=[1], fqn="blocks")))
    seen = observe(form, call)
    assert confirm(form, seen) < 1e-6 and seen.describe() == plain.describe()
    assert type(form.guider) is SkipLayerGuidance


@pytest.mark.slow
@pytest.mark.parametrize("name", ["anima", "flux3"])
def test_a_family_without_a_stock_pipeline_is_observed(name):
    pipe = tiny_modular.make(name)
    call = tiny_modular.CALLS[name]
    draw = {**call, "prompt": "a red ball", "num_inference_steps": 2, "output_type": "latent"}
    want = pipe(**{**draw, "output_type": "pt"}, generator=torch.Generator().manual_seed(7), output="images")
    seen = observe(pipe, call)
    assert confirm(pipe, seen) < 1e-6
    assert (seen.part, seen.noisy, seen.slope, seen.offset) == ("transformer", "hidden_states", 0.001, 0.0)
    means = pipe.vae.bn.running_mean if name == "flux3" else torch.tensor(pipe.vae.config.latents_mean)
    assert torch.allclose(seen.to_decoder.term.unique(), means.unique(), atol=1e-5)
    traced = fxplug.trace_pipeline(pipe, parts="transformer", **draw)["transformer"]
    again = tiny_modular.make(name)
    again.update_components(transformer=fxplug.pipeline_part(traced, again.transformer))
    got = again(**{**draw, "output_type": "pt"}, generator=torch.Generator().manual_seed(7), output="images")
    assert torch.equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flux3_distilled", "time of .*timestep, target_timestep of transformer change with the time.*two times"),
        pytest.param("wan_animate_2", "VAE of .*vae decodes [0-9]+ of [0-9]+ elements of the latents", marks=pytest.mark.slow),
        ("minimax_music3", "VAE of .*ends without decoding"),
        pytest.param(
            "minimax_h3", "latents of .*predicts for hidden_states depends on audio_hidden_states, other latents.*of a sound",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_family_that_is_not_understood_is_refused_in_words(name, message):
    pipe = tiny_modular.make(name)
    with pytest.raises(fxplug.SpecError, match=message):
        observe(pipe, tiny_modular.CALLS[name])


def test_a_failing_block_is_quoted_and_logs_no_traceback():
    form, lines = tiny_modular.form_of("sd3", tiny.make("sd3")), []

    def fail(*_args, **_named):
        raise RuntimeError("no such shape")

    form.transformer.forward = fail
    handler = logging.Handler()
    handler.emit = lambda record: lines.extend(record.getMessage().splitlines())
    logging.getLogger("diffusers").addHandler(handler)
    try:
        with pytest.raises(fxplug.SpecError, match="StableDiffusion3ModularPipeline.*RuntimeError: no such shape"):
            observe(form, SIZE)
        assert lines == []
        with pytest.raises(RuntimeError):  # outside, diffusers logs as ever
            form(prompt="a ball", **SIZE, num_inference_steps=1)
        assert any("Traceback" in line for line in lines)
    finally:
        logging.getLogger("diffusers").removeHandler(handler)


def test_a_pipeline_without_a_scheduler_is_refused():
    pipe = diffusers.modular_pipelines.EchoBlocks().init_pipeline()
    with pytest.raises(fxplug.SpecError, match="EchoModularPipeline.*scheduler"):
        observe(pipe, {"prompt": "a ball"})
