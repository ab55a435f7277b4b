"""`load_adapted`: one call from a model and a file of any format to a module with the adapter in use."""

from __future__ import annotations

import copy
import functools

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

import fxplug
from fxplug.core.errors import ArtifactError, MatchError, SpecError

X = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@functools.cache
def vit():
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10).eval()


@functools.cache
def traced():
    return fxplug.trace(vit(), X)


def trained(name="lora", **settings):
    torch.manual_seed(1)
    made = fxplug.apply(traced(), fxplug.load_pass(name, **settings))
    for key, weight in made.named_parameters():
        if key.startswith(f"{name}."):
            nn.init.normal_(weight, std=0.1)
    return made


def pair(path, out, inner, rank=2):
    return {f"{path}.lora_down.weight": torch.ones(rank, inner), f"{path}.lora_up.weight": torch.ones(out, rank),
            f"{path}.alpha": torch.tensor(1.0)}  # fmt: skip


@pytest.mark.parametrize("as_", ["peft", "diffusers", "kohya", "comfy", "lycoris", "fxplug", "saved"])
@pytest.mark.parametrize("slots", [1, 0])
def test_each_format_in_one_call(tmp_path, as_, slots):
    want = trained(at="blocks.*.attn.*", rank=4)
    path = tmp_path / "ink"
    source = fxplug.save(want, path) if as_ == "saved" else fxplug.save_adapter(want, path, as_=as_).path
    new = fxplug.load_adapted(vit() if as_ == "peft" else traced(), source, X if as_ == "peft" else (), slots=slots)
    torch.testing.assert_close(new(X), want(X), atol=1e-5, rtol=1e-4)
    assert not torch.equal(new(X), vit()(X)) and (not slots or new.adapters.active == {"default": 1.0})
    assert next(new.parameters()) is next(vit().parameters())  # on the model's own weights


def test_it_is_what_peft_gives_with_a_head_that_was_trained_whole(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["qkv"], modules_to_save=["head"])
    model = peft.get_peft_model(copy.deepcopy(vit()), config)
    torch.manual_seed(2)
    for weight in model.parameters():
        if weight.requires_grad:
            nn.init.normal_(weight, std=0.1)
    model.save_pretrained(tmp_path)
    want = peft.PeftModel.from_pretrained(copy.deepcopy(vit()), tmp_path).eval()(X)
    for slots in (1, 0):
        torch.testing.assert_close(fxplug.load_adapted(vit(), tmp_path, X, slots=slots)(X), want, atol=1e-5, rtol=1e-4)


def test_names_strengths_slots_and_passes_of_other_kinds(tmp_path):
    file = fxplug.save_adapter(trained(at="blocks.*.attn.qkv", rank=2), tmp_path / "ink.safetensors", as_="kohya").path
    new = fxplug.load_adapted(traced(), file, name="ink", strength=0.5, slots=2)
    assert new.adapters.active == {"ink": 0.5} and new.adapters.slots == 2
    with pytest.raises(SpecError, match="has a pass 'adapter' already: load another file into it"):
        fxplug.load_adapted(new, file)
    other = fxplug.apply(traced(), fxplug.load_pass("lora", at="**.fc1", slots=1))
    assert fxplug.load_adapted(other, file).adapters.active == {"default": 1.0}  # nothing of it went into the other's slots

    want = trained("bottleneck", at="blocks.*.mlp")
    own = fxplug.save_adapter(want, tmp_path / "own", as_="fxplug").path
    assert torch.equal(fxplug.load_adapted(traced(), own)(X), want(X))
    with pytest.raises(MatchError, match="matched 0 places"):
        fxplug.load_adapted(nn.Linear(3, 3), own, torch.ones(1, 3))
    with pytest.raises(SpecError, match="strength: must be 1 where the adapter has no slot, not 0.5"):
        fxplug.load_adapted(traced(), own, strength=0.5)


@pytest.mark.parametrize(
    ("layers", "metadata", "says"),
    [
        ({"lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k": (640, 2048)}, {}, "this file is of sdxl"),
        ({"lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_k": (640, 2048)}, {}, "this file is of sdxl"),
        ({"unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_k": (320, 320)}, {}, "this file is of sd1 or sd2"),
        ({"transformer.single_transformer_blocks.3.attn.to_q": (3072, 3072)}, {}, "this file is of flux"),
        ({"double_blocks.0.img_attn.proj": (64, 64)}, {}, "this file is of "),  # by names alone: its size is nobody's
        ({"lora_te_text_model_encoder_layers_0_self_attn_q_proj": (768, 768)}, {}, "this file is of a text encoder"),
        ({"some.layer": (4, 4)}, {"modelspec.architecture": "pixart-sigma/lora"}, "says that its model is 'pixart-sigma/lora'"),
    ],
)
def test_a_file_of_another_model_says_which(tmp_path, layers, metadata, says):
    file = tmp_path / "a.safetensors"
    save_file({key: value for path, sizes in layers.items() for key, value in pair(path, *sizes).items()}, file, metadata)
    with pytest.raises(ArtifactError, match=f"a.safetensors: .* not in the graph.*; this file .*{says.split('this file ')[-1]}"
                                            ".*, and the model is VisionTransformer"):
        fxplug.load_adapted(traced(), file)


def test_what_is_wrong_is_said_before_the_trace(tmp_path):
    class Never(nn.Module):
        def forward(self, x):
            raise AssertionError("it was traced")

    save_file(pair("some.layer", 4, 4), tmp_path / "a.safetensors")
    cases = {
        "no adapter file or folder": {"source": tmp_path / "nothing"},
        "strength: must be a finite number, not nan": {"strength": float("nan")},
        "must be 1 where the adapter has no slot, not 2": {"strength": 2, "slots": 0},
        "args: one example call of the model is needed": {"args": ()},
    }
    for says, given in cases.items():
        with pytest.raises(fxplug.FxplugError, match=says):
            fxplug.load_adapted(Never(), **{"source": tmp_path / "a.safetensors", "args": X, **given})
    with pytest.raises(SpecError, match="args: .*traced already"):
        fxplug.load_adapted(traced(), tmp_path / "a.safetensors", X)


def test_what_is_loaded_is_one_line(tmp_path):
    new = trained(at="blocks.*.attn.*", rank=4, slots=1)
    found = new.adapters.load("ink", {**pair("blocks.0.attn.qkv", 576, 192), **pair("gone", 4, 4)}, partial=True)
    assert repr(found) == "Fit('the state dict': 1 placed, 1 missing)"
    assert "\n" not in repr(fxplug.load(fxplug.save(new, tmp_path / "saved"))) + repr(new.adapters)


def test_updates_that_change_nothing_are_counted(tmp_path):
    paths = [f"blocks.{n}.attn.qkv" for n in (0, 1)]
    untrained = fxplug.apply(traced(), fxplug.load_pass("lora", at="qkv", rank=2))
    zero = fxplug.load_adapted(traced(), fxplug.save_adapter(untrained, tmp_path / "zero.safetensors", as_="kohya").path)
    assert torch.equal(zero(X), traced()(X))
    new = trained(at="qkv", rank=2, slots=1)
    state = {**pair(paths[0], 576, 192), **pair(paths[1], 576, 192)}
    half = {**state, f"{paths[1]}.lora_down.weight": torch.zeros(2, 192)}
    for given, expected in ((tmp_path / "zero.safetensors", paths), (half, paths[1:]), (state, [])):
        found = new.adapters.load("ink", given, replace=True)
        assert found.zero == expected and (f"2 placed, {len(expected)} of them zero" in repr(found)) == bool(expected)
