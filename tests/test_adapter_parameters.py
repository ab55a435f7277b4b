"""Whole changes of parameters that are no layer's weight, under the names that tools and models' own code give them."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import zoo
from torch import nn

import fxplug
from fxplug import ArtifactError


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.part, self.scale = nn.Module(), nn.Parameter(torch.randn(16))
        self.part.table, self.part.fc = nn.Parameter(torch.randn(2, 16)), nn.Linear(16, 16)

    def forward(self, x):
        return self.part.fc(x * self.scale) * self.part.table[0] + self.part.table[1]


@functools.cache
def traced(name):
    """A model, its inputs, and its trace."""
    model, args, kwargs = built(name)
    return model, args, kwargs, fxplug.trace(model, args, kwargs)


def built(name):
    torch.manual_seed(0)
    if name == "Bare":
        return Bare().eval(), (torch.randn(3, 16),), {}
    case = next(case for case in zoo.cases() if case.name == f"diffusers/{name}")
    args, kwargs = case.inputs(2)
    return case.build().eval(), args, kwargs


# a model, the key of a change in a file, and the parameter that it changes
CASES = {
    "LightX2V": ("WanTransformer3DModel", "diffusion_model.blocks.0.diff_m", "blocks.0.scale_shift_table"),
    "LightX2V's head": ("WanTransformer3DModel", "diffusion_model.head.diff_m", "scale_shift_table"),
    "ComfyUI": ("WanTransformer3DModel", "diffusion_model.blocks.0.modulation.diff", "blocks.0.scale_shift_table"),
    "diffusers": ("WanTransformer3DModel", "transformer.blocks.0.scale_shift_table.diff", "blocks.0.scale_shift_table"),
    "VACE": ("WanVACETransformer3DModel", "vace_blocks.0.modulation.diff", "vace_blocks.0.scale_shift_table"),
    "PixArt": ("PixArtTransformer2DModel", "lora_unet_final_layer_scale_shift_table.diff", "scale_shift_table"),
    "Sana": ("SanaTransformer2DModel", "blocks.0.scale_shift_table.diff", "transformer_blocks.0.scale_shift_table"),
    "a norm of Sana": ("SanaTransformer2DModel", "diffusion_model.attention_y_norm.diff", "caption_norm.weight"),
    "LTX 2": (
        "LTX2VideoTransformer3DModel", "diffusion_model.transformer_blocks.0.scale_shift_table_a2v_ca_audio.diff",
        "transformer_blocks.0.audio_a2v_cross_attn_scale_shift_table",
    ),
    "AuraFlow": ("AuraFlowTransformer2DModel", "diffusion_model.register_tokens.diff", "register_tokens"),
    "Krea 2": ("Krea2Transformer2DModel", "diffusion_model.last.modulation.lin.diff", "final_layer.scale_shift_table"),
    "a norm of Krea 2": (
        "Krea2Transformer2DModel", "diffusion_model.blocks.0.prenorm.scale.diff", "transformer_blocks.0.norm1.weight"
    ),
    "a norm of Flux": (
        "FluxTransformer2DModel", "diffusion_model.double_blocks.0.img_attn.norm.query_norm.scale.diff",
        "transformer_blocks.0.attn.norm_q.weight",
    ),
    "another model": ("Bare", "part.table.diff", "part.table"),
    "one named scale": ("Bare", "base_model.model.scale.diff", "scale"),
}  # fmt: skip


def first(value):
    while not isinstance(value, torch.Tensor):
        value = next(iter(value.values() if isinstance(value, dict) else value))
    return value


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_a_change_of_a_parameter_is_the_base_and_the_difference(name):
    kind, key, parameter = CASES[name]
    model, args, kwargs, gm = traced(kind)
    change = torch.randn_like(model.get_parameter(parameter))

    def eager(strength):
        changed = copy.deepcopy(model)
        changed.get_parameter(parameter).add_(change, alpha=strength)
        return first(changed(*args, **kwargs))

    trained = fxplug.apply(gm, fxplug.pass_for({key: change}, gm, slots=0))
    assert not torch.equal(first(trained(*args, **kwargs)), eager(1.0))
    fxplug.load_adapter(trained, {key: change})
    torch.testing.assert_close(first(trained(*args, **kwargs)), eager(1.0))
    slotted = fxplug.apply(gm, fxplug.pass_for({key: change}, gm))
    slotted.adapters.load("a", {key: change})
    slotted.adapters.use({"a": 0.5})
    torch.testing.assert_close(first(slotted(*args, **kwargs)), eager(0.5))
    assert fxplug.inspect_adapter({key: change}, slotted).slots.placed.keys() == {parameter.removesuffix(".weight")}


def test_what_has_no_home_is_refused_by_name():
    model, args, _ = built("Bare")
    gm = fxplug.trace(model, args)
    slotted = fxplug.apply(gm, fxplug.load_pass("delta", at="part.fc", slots=1))
    table = torch.randn(2, 16)
    with pytest.raises(ArtifactError, match="'part.table' .apply the pass delta with at: 'part' and param: table"):
        slotted.adapters.load("a", {"part.table.diff": table})
    with pytest.raises(ArtifactError, match="'part.tables' .did you mean 'part.table'"):
        fxplug.pass_for({"part.tables.diff": table}, gm)
    with pytest.raises(ArtifactError, match=r"'part.table' is \[2, 16\], and 'part.table' is for another, .* of \[3, 16\]"):
        fxplug.pass_for({"part.table.diff": torch.randn(3, 16)}, gm)
    both = {"part.table.diff": table, "base_model.model.part.table.diff": table}
    with pytest.raises(ArtifactError, match="'part.table' and 'base_model.model.part.table' are both for 'part.table'"):
        fxplug.pass_for(both, gm)


def test_names_of_two_models_are_not_mixed():
    model, args, kwargs = built("WanTransformer3DModel")
    gm = fxplug.trace(model, args, kwargs)
    one, other = torch.randn(2, *model.blocks[0].scale_shift_table.shape)
    state = {"transformer.blocks.0.scale_shift_table.diff": one, "transformer_2.blocks.0.scale_shift_table.diff": other}
    with pytest.raises(ArtifactError, match="several models: give one of 'transformer' .1 layers., 'transformer_2'"):
        fxplug.pass_for(state, gm)
    new = fxplug.apply(gm, fxplug.pass_for(state, gm, slots=0, part="transformer_2"))
    found = fxplug.load_adapter(new, state, part="transformer_2")
    assert torch.equal(found.placed["blocks.0.scale_shift_table"].tensors["delta"], other)
