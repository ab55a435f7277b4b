"""Adapters for other tools are the same numbers to readers of the file, and to those that get its tensors alone."""

from __future__ import annotations

import copy
import inspect
import json
from functools import cache

import diffusers
import fuzz_formats
import pytest
import torch
import unets
import zoo
from safetensors import safe_open
from safetensors.torch import load_file
from small import traced
from sweeps import sweep

import fxplug
from fxplug.adapters.contents import AdapterContents, ModelLayer
from fxplug.adapters.files import read
from fxplug.adapters.updates import Entry
from fxplug.adapters.writing import About, FileOptions, make_content

PIPELINES = {
    "StableDiffusionPipeline": "", "StableDiffusionXLPipeline": "", "StableDiffusion3Pipeline": "SD3Transformer2DModel-sd35",
    "FluxPipeline": "FluxTransformer2DModel", "SanaPipeline": "SanaTransformer2DModel", "WanPipeline": "WanTransformer3DModel",
    "QwenImagePipeline": "QwenImageTransformer2DModel", "LTXPipeline": "LTXVideoTransformer3DModel",
    "ZImagePipeline": "ZImageTransformer2DModel",
}  # fmt: skip


@cache
def denoiser(pipeline):
    """The traced denoiser of a small pipeline, with its inputs."""
    if pipeline.startswith("StableDiffusion") and "3" not in pipeline:
        return unets.sdxl() if "XL" in pipeline else unets.sd15()
    (case,) = (case for case in zoo.cases() if case.name == f"diffusers/{PIPELINES[pipeline]}")
    model = case.build().eval()
    args, kwargs = case.inputs(batch=2)
    return traced(model, *args, **kwargs)


def first(result):
    while not isinstance(result, torch.Tensor):
        result = result[0]
    return result


@pytest.mark.slow
def test_readers_of_each_format_give_what_was_written(capsys):
    assert fuzz_formats.fuzz_formats(12, 0) == [], capsys.readouterr().out


def lora(dtype, up=1.0, scale=0.75):
    torch.manual_seed(0)
    tensors = {"down": torch.randn(4, 16), "up": up * torch.randn(16, 4), "bias": torch.randn(16)}
    return Entry("a", "a", "", "lora+bias", {name: value.to(dtype) for name, value in tensors.items()}, scale, 4)


def test_a_scale_goes_where_it_loses_least():
    exact = lora(torch.float16, scale=4.0).with_scale_in_factor()
    assert exact.scale == 1 and torch.equal(exact.tensors["up"], lora(torch.float16).tensors["up"] * 4)
    small = lora(torch.float16, up=1e-5, scale=2**-6)  # of which the product with up would be below the least float16
    made = small.with_scale_in_factor()
    assert torch.equal(made.tensors["up"], small.tensors["up"]) and made.tensors["down"].dtype == torch.float16
    torch.testing.assert_close(made.update((16, 16)), small.update((16, 16)), rtol=1e-3, atol=0)
    torch.testing.assert_close(made.tensors["bias"].double(), small.tensors["bias"].double() * 2**-6, rtol=1e-3, atol=0)


def test_a_scale_is_rounded_once_to_the_dtype_that_is_written():
    given = lora(torch.float16, scale=0.3)
    made = given.with_scale_in_factor(torch.float32)
    torch.testing.assert_close(made.tensors["up"].double(), given.tensors["up"].double() * 0.3, rtol=1e-7, atol=0)
    assert lora(torch.float16, scale=1.0).with_scale_in_factor(torch.float32).scale == 1


def test_comfyui_gets_the_whole_name_of_a_norm_of_flux(tmp_path):
    base = denoiser("FluxPipeline")
    new = fxplug.apply(base.gm, fxplug.load_pass("delta", at="**.norm_q"))
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            if name.startswith("delta."):
                parameter.fill_(0.5)
    file = fxplug.save_adapter(new, tmp_path / "ink.safetensors", as_="comfy").path
    norms = ("double_blocks.0.img_attn.norm.query_norm", "single_blocks.0.norm.query_norm")
    assert {*load_file(file)} == {f"diffusion_model.{norm}.scale.w_norm" for norm in norms}
    again = fxplug.apply(base.gm, fxplug.pass_for(file, base.gm, slots=0))
    fxplug.load_adapter(again, file)
    assert torch.equal(first(again(*base.args, **base.kwargs)), first(new(*base.args, **base.kwargs)))


@pytest.mark.parametrize(("as_", "start"), [("comfy", "text_encoders.t5xxl.transformer."), ("kohya", "lora_te3_")])
def test_the_second_text_encoder_of_flux_is_a_t5(as_, start):
    layers = {"encoder.block.0.layer.0.SelfAttention.q": ModelLayer("Linear", (8, 8))}
    entries = (Entry(path := next(iter(layers)), path, "", "lora", {"down": torch.ones(1, 8), "up": torch.ones(8, 1)}, 1.0, 1),)
    how = FileOptions(part="text_encoder_2")
    made = make_content(AdapterContents(entries, {}), as_, About(layers, ("T5EncoderModel",)), how)
    assert all(key.startswith(start) for key in made.tensors)


@sweep("pipeline", PIPELINES, "FluxPipeline", "StableDiffusionPipeline")
@torch.no_grad()
def test_a_pipeline_and_a_reader_of_tensors_alone_give_what_was_trained(pipeline, tmp_path):
    base = denoiser(pipeline)
    part = "unet" if "UNet" in type(base.model).__name__ else "transformer"
    lora = fxplug.load_pass("lora", at=["to_q", "to_k", "to_v", "to_out.0"], rank=6, alpha=2.5)
    new = fxplug.apply(base.gm, lora)
    torch.manual_seed(0)
    for name, parameter in new.named_parameters():
        if name.startswith("lora."):
            parameter.copy_(0.2 * torch.randn_like(parameter))
    folder = fxplug.save_adapter(new, tmp_path / "ink", as_="diffusers").path
    (file,) = folder.iterdir()
    wanted, plain = (first(module(*base.args, **base.kwargs)) for module in (new, base.model))
    effect = (wanted - plain).abs().max()

    def off(model):
        return (first(model(*base.args, **base.kwargs)) - wanted).abs().max()

    kind = getattr(diffusers, pipeline)
    others = dict.fromkeys(inspect.signature(kind.__init__).parameters.keys() - {"self"})
    others = {name: None for name in others if inspect.signature(kind.__init__).parameters[name].default is inspect._empty}
    pipe = kind(**{**others, part: copy.deepcopy(base.model), "scheduler": diffusers.FlowMatchEulerDiscreteScheduler()})
    pipe.load_lora_weights(folder)
    alone = copy.deepcopy(base.model)
    tensors = load_file(file)
    alone.load_lora_adapter(dict(tensors), prefix=part)
    for model in (getattr(pipe, part), alone):
        assert off(model) <= 1e-5 and off(model) <= 1e-3 * effect
    with safe_open(file, "pt") as opened:
        said = json.loads(opened.metadata()["lora_adapter_metadata"])
    assert said[f"{part}.lora_alpha"] == said[f"{part}.r"] == 6 and not said[f"{part}.alpha_pattern"]
    with_metadata, without = ({entry.name: entry for entry in read(one).entries} for one in (folder, tensors))
    assert with_metadata.keys() == without.keys() == {key.partition(".lora_")[0] for key in tensors}
    assert all(entry.scale == without[name].scale == 1 for name, entry in with_metadata.items())
