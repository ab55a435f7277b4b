"""Layers of an adapter file that are not in the model: said wherever they are, and placed nowhere by their shape."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxplug
from fxplug.adapters import files
from fxplug.core.errors import ArtifactError

DENOISER = {f"blocks.{n}.attn.{name}": (8, 8) for n in range(2) for name in ("to_q", "to_k", "to_v")}
TEXT = {f"text_model.encoder.layers.0.self_attn.{name}": (8, 8) for name in ("q_proj", "k_proj")}


def lora(*names, rank=2, shape=(8, 8), form=("lora_A", "lora_B")):
    halves = ((form[0], (rank, shape[1])), (form[1], (shape[0], rank)))
    return {f"{name}.{half}.weight": torch.ones(size) for name in names for half, size in halves}


KNOWN = "transformer.blocks.0.attn.to_q"
# a file's layers that are here, the others, and the model's
STRAYS = {
    "of a wrapper of DDP": ([KNOWN], ["module.blocks.0.attn.to_k"], DENOISER),
    "of a checkpoint": ([KNOWN], ["model.diffusion_model.blocks.0.attn.to_v", "module.blocks.1.attn.to_k"], DENOISER),
    "without a prefix, misspelt": ([KNOWN], ["blocks.0.atn.to_k"], DENOISER),
    "under another name of denoisers": (["unet.blocks.0.attn.to_q"], ["diffusion_model.layers.0.to_k"], DENOISER),
    "kohya's beside another prefix": (["lora_unet_blocks_0_attn_to_q"], ["lora_dit_blocks_0_attn_to_k"], DENOISER),
    "of another model beside names without a part": (["blocks.0.attn.to_q"], ["unet.down.0.to_q"], DENOISER),
    "of a text encoder, wrapped": ([f"text_encoder.{next(iter(TEXT))}"], [f"module.{list(TEXT)[1]}"], TEXT),
    "of a pass of another folder": (["lora.blocks.0.attn.to_q.Lora"], ["extra.stem.Lora"], DENOISER),
}


@pytest.mark.parametrize("case", STRAYS)
def test_layers_under_an_unknown_prefix_are_refused(case):
    here, strays, shapes = STRAYS[case]
    form = ("down", "up") if ".Lora" in here[0] else ("lora_A", "lora_B")
    found = files.fit(files.read(lora(*here, *strays, form=form)), shapes)
    assert len(found.placed) == len(here) and len(found.missing) == len(strays) and not found.others
    with pytest.raises(ArtifactError, match=rf"{len(strays)} of {len(here + strays)} layers are not in the graph"):
        found.check()


@pytest.mark.parametrize(
    ("names", "shapes"),
    [
        ([KNOWN, "text_encoder.text_model.encoder.layers.0.self_attn.q_proj"], DENOISER),
        (["lora_unet_blocks_0_attn_to_q", "lora_te2_text_model_encoder_layers_0_self_attn_k_proj"], DENOISER),
        (["diffusion_model.blocks.0.attn.to_q", "text_encoders.clip_l.transformer.text_model.x.q_proj"], DENOISER),
        ([KNOWN, "transformer_2.layers.0.attn.to_q"], DENOISER),
        ([f"text_encoder.{next(iter(TEXT))}", "down.0.attn.to_q"], TEXT),  # diffusers' of 2023: the denoiser's have no part
        ([f"text_encoder.{next(iter(TEXT))}", "unet.down.0.attn.to_q"], TEXT),
    ],
)
def test_layers_of_another_model_of_the_pipeline_are_left_to_it(names, shapes):
    found = files.fit(files.read(lora(*names)), shapes).check()
    assert len(found.placed) == 1 and sum(map(len, found.others.values())) == 1


@pytest.mark.parametrize(
    "names",
    [
        ["transformer.blocks.0.attn.to_qkv"], ["blocks.0.attn.qkv_all"], ["lora_unet_blocks_0_attn_fused"],
        ["base_model.model.blocks.0.mixer"], ["diffusion_model.single.0.linear1", "diffusion_model.single.1.linear1"],
        ["unet:0", "unet.blocks.0.mixer"],
    ],
)  # fmt: skip
def test_a_layer_with_a_name_is_no_other_of_its_shape(names):
    """The only layers of that shape: neither advised nor taken, whatever `guess` says."""
    shapes = {f"blocks.{n}.norm.linear": (24, 8) for n in range(len(names))} | {"head": (8, 8)}
    state = lora(*(name for name in names if ":" not in name), shape=(24, 8))
    for name in (name for name in names if ":" in name):
        state |= {f"{name}:down": torch.ones(2, 8), f"{name}:up": torch.ones(24, 2)}
    file = files.read(state)
    for guess in (False, True):
        found = files.fit(file, shapes, guess=guess)
        assert not found.placed and not found.guessed
        with pytest.raises(ArtifactError, match=r"layers are not in the graph: ") as error:
            found.check()
        assert "guess" not in str(error.value)
    net = nn.Sequential(nn.Linear(8, 24))
    new = fxplug.apply(fxplug.trace(net, torch.randn(1, 8)), fxplug.load_pass("lora", rank=2, slots=1))
    with pytest.raises(ArtifactError, match="are not in the graph"):
        new.adapters.load("a", state, guess=True)
