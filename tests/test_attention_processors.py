"""What reads or sets attention processors of a traced model is refused in words, before a picture is begun."""

from __future__ import annotations

import diffusers
import pytest
import torch
from test_runs_of_steps import pipeline

import fxplug
from fxplug.core.errors import SpecError

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning", "ignore::FutureWarning")
WORDS = {"prompt_embeds": torch.ones(1, 7, 32), "negative_prompt_embeds": torch.zeros(1, 7, 32)}
CALL = {**WORDS, "num_inference_steps": 2, "output_type": "latent"}


@pytest.fixture(scope="module")
def rewritten():
    from test_runs_of_steps import marked

    return fxplug.rewrite_pipeline(pipeline(marked()[0]), **CALL)


@pytest.mark.parametrize("name", [
    "StableDiffusionPAGPipeline", "StableDiffusionPAGImg2ImgPipeline", "StableDiffusionXLPAGPipeline", "AnimateDiffPAGPipeline",
    "StableDiffusion3PAGPipeline", "StableDiffusionSAGPipeline", "PixArtSigmaPAGPipeline",
])  # fmt: skip
def test_pipelines_that_change_processors_are_refused(name):
    pipe = object.__new__(getattr(diffusers, name))
    with pytest.raises(SpecError, match=rf"{name}.* uses 'attn_processors' of its models while it runs.*use the pipeline"):
        fxplug.rewrite_pipeline(pipe, prompt="x")


@pytest.mark.parametrize("name", ["StableDiffusionPipeline", "StableDiffusionXLPipeline", "FluxPipeline", "WanPipeline"])
def test_pipelines_that_do_not_are_not(name):
    from fxplug.pipelines.diffusers_types import check_pipeline

    check_pipeline(object.__new__(getattr(diffusers, name)))


@pytest.mark.slow
@pytest.mark.parametrize("what", [
    lambda pipe: pipe.unet.attn_processors,
    lambda pipe: pipe.unet.set_attn_processor(None),
    lambda pipe: pipe.unet.set_default_attn_processor(),
    lambda pipe: pipe.fuse_qkv_projections(vae=False),
    lambda pipe: pipe.unet._load_ip_adapter_weights([{}]),
    lambda pipe: pipe.unet.enable_xformers_memory_efficient_attention(),
    lambda pipe: pipe.set_ip_adapter_scale(0.5),
    lambda pipe: pipe.unload_ip_adapter(),
])  # fmt: skip
def test_a_traced_model_has_no_processors(rewritten, what):
    with pytest.raises(SpecError, match="of the traced UNet2DConditionModel: attention is part of the graph, and no processor"):
        what(rewritten)


def test_a_pipeline_made_of_a_rewritten_one_is_refused_before_its_first_step(rewritten):
    pipe = diffusers.StableDiffusionPAGPipeline.from_pipe(rewritten, unet=rewritten.unet, pag_applied_layers="mid")
    with pytest.raises((SpecError, ValueError), match="attention is part of the graph"):
        pipe(**CALL)
    assert pipe(**CALL, pag_scale=0.0).images.shape == (1, 4, 8, 8)  # nothing of it is asked for


def test_the_rest_of_a_rewritten_pipeline_works(rewritten):
    rewritten.enable_attention_slicing()
    assert rewritten(**CALL).images.isfinite().all()
