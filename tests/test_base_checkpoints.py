"""Base models from checkpoints as they are shared: one file in the original layout, several with an index."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path

import diffusers
import pytest
import small
import torch
import unets
import zoo
from safetensors.torch import load_file, save_file

import fxplug
from fxplug.adapters.layer_names import map_first_names
from fxplug.config.models.factory import build
from fxplug.config.models.state_dict import load_weights
from fxplug.config.run_config import load_config
from fxplug.core.errors import FxplugError, SpecError


def config_of(model, folder):
    """The model's configuration without weights, as a file."""
    (folder / "config.json").write_text(model.to_json_string())
    return str(folder / "config.json")


def loaded(device="cpu", **sections):
    return build(load_config({key: str(value) for key, value in sections.items()}), device=device)


def assert_same(made, model):
    wanted = model.state_dict()
    assert made.state_dict().keys() == wanted.keys()
    assert all(torch.equal(value, wanted[key]) for key, value in made.state_dict().items())


@cache
def sd3():
    """With the norms of queries and keys, and the second attention of some blocks, that version 3.5 has."""
    return small.seeded(lambda: diffusers.SD3Transformer2DModel(
        sample_size=8, in_channels=4, num_layers=2, attention_head_dim=4, num_attention_heads=2, joint_attention_dim=12,
        caption_projection_dim=8, pooled_projection_dim=10, out_channels=4, pos_embed_max_size=8, qk_norm="rms_norm",
        dual_attention_layers=(0,),
    ))  # fmt: skip


def original(model, more):
    """The state of a model under its family's first names, `more` being those of single tensors."""
    state, made, used = model.state_dict(), {}, set()
    for name, paths in map_first_names(dict.fromkeys(key.rpartition(".")[0] for key in state)).items():
        for end in ("weight", "bias"):
            keys = [f"{path.removesuffix('~')}.{end}" for path in paths]
            if all(key in state for key in keys):
                parts = [state[key] for key in keys]
                parts = [torch.cat(part.chunk(2)[::-1]) if paths[0].endswith("~") else part for part in parts]
                end = "scale" if name.endswith(("query_norm", "key_norm")) else end
                made[f"{name}.{end}"] = torch.cat(parts)
                used |= {*keys}
    for key in state.keys() - used:
        made[more(key)] = state[key].clone()
    return made


def in_sd3(key):
    """What the code of Stability AI calls what is not a layer's weight or bias in diffusers, and its norms."""
    for ours, theirs in (("pos_embed.pos_embed", "pos_embed"), ("transformer_blocks", "joint_blocks"),
                         (".attn.norm_added_", ".context_block.attn.ln_"), (".attn.norm_", ".x_block.attn.ln_"),
                         (".attn2.norm_", ".x_block.attn2.ln_")):  # fmt: skip
        key = key.replace(ours, theirs)
    return key


def test_what_is_written_under_first_names_is_read_as_weights(tmp_path):
    base = unets.sd15()
    done = fxplug.save_checkpoint(base.gm, tmp_path / "unet", to="safetensors", first=True)
    config = config_of(base.model, tmp_path)
    assert_same(loaded(model=config, weights=done.path), base.model)
    gm = copy.deepcopy(base.gm)  # which stands for the model where its trace is kept, and knows its class
    with torch.no_grad():
        for parameter in gm.parameters():
            parameter.zero_()
    load_weights(gm, load_config({"model": config, "weights": str(done.path)}).weights, Path())
    assert_same(gm, base.model)


@pytest.mark.parametrize("kind", ["Flux2Transformer2DModel", "FluxTransformer2DModel"])
def test_first_names_are_written_where_they_are_read_back(kind, tmp_path):
    """diffusers' converter of Flux has the width of the published model in it, that of Flux 2 takes any."""
    case = next(case for case in zoo.cases() if case.name == f"diffusers/{kind}")
    model, (args, kwargs) = case.build(), case.inputs()
    gm = fxplug.trace(model, args, kwargs)
    if kind == "FluxTransformer2DModel":
        with pytest.raises(FxplugError, match="diffusers could not read FluxTransformer2DModel in the names of its original "
                                              "format"):
            fxplug.save_checkpoint(gm, tmp_path / "it", to="safetensors", first=True)
        return
    done = fxplug.save_checkpoint(gm, tmp_path / "it", to="safetensors", first=True)
    assert "double_blocks.0.img_attn.norm.query_norm.scale" in load_file(done.path)
    assert_same(loaded(model=config_of(model, tmp_path), weights=done.path), model)


def test_xl_in_its_original_layout(tmp_path):
    model = unets.sdxl_model()
    save_file({f"model.diffusion_model.{k}": v for k, v in original(model, str).items()}, tmp_path / "xl.safetensors")
    assert_same(loaded(model=config_of(model, tmp_path), weights=tmp_path / "xl.safetensors"), model)


@pytest.mark.parametrize("suffix", [".safetensors", ".ckpt"])
def test_the_denoiser_of_a_whole_pipeline_in_one_file(suffix, tmp_path):
    model = unets.sd15().model
    state = original(model, str)
    whole = {f"model.diffusion_model.{key}": value for key, value in state.items()}
    whole |= {"first_stage_model.encoder.conv_in.weight": torch.ones(2), "cond_stage_model.x.weight": torch.ones(2)}
    if suffix == ".ckpt":
        torch.save({"state_dict": whole, "global_step": 3}, tmp_path / "whole.ckpt")
    else:
        save_file(whole, tmp_path / "whole.safetensors")
    assert_same(loaded(model=config_of(model, tmp_path), weights=tmp_path / f"whole{suffix}"), model)
    save_file(state, tmp_path / "unet.safetensors")  # the denoiser alone, without its prefix
    assert_same(loaded(model=config_of(model, tmp_path), weights=tmp_path / "unet.safetensors"), model)


@pytest.mark.parametrize("start", ["", "model.diffusion_model."])
def test_a_family_whose_converter_knows_no_prefix(start, tmp_path):
    case = next(case for case in zoo.cases() if case.name == "diffusers/Flux3Transformer2DModel")
    model = case.build()
    save_file({f"{start}{key}": value for key, value in original(model, str).items()}, tmp_path / "it.safetensors")
    assert_same(loaded(model=config_of(model, tmp_path), weights=tmp_path / "it.safetensors"), model)


@pytest.mark.parametrize("start", ["", "model.diffusion_model."])
def test_stable_diffusion_3_in_its_original_layout(start, tmp_path):
    state = original(sd3(), in_sd3)
    assert "joint_blocks.0.x_block.attn2.ln_k.weight" in state and "joint_blocks.1.context_block.attn.ln_q.weight" in state
    save_file({f"{start}{key}": value for key, value in state.items()}, tmp_path / "sd3.safetensors")
    assert_same(loaded(model=config_of(sd3(), tmp_path), weights=tmp_path / "sd3.safetensors"), sd3())


@pytest.mark.parametrize("start", ["", "model.diffusion_model."])
def test_weights_that_were_quantised_are_refused(start, tmp_path):
    """diffusers' converter takes what it knows, and leaves out the scales of ComfyUI's fp8 files without a word."""
    config, state = config_of(sd3(), tmp_path), {f"{start}{key}": value for key, value in original(sd3(), in_sd3).items()}
    key = f"{start}joint_blocks.0.x_block.attn.qkv"
    quantised = {f"{key}.weight": state[f"{key}.weight"].to(torch.float8_e4m3fn), f"{key}.scale_weight": torch.ones(1)}
    save_file(state | quantised, tmp_path / "scaled.safetensors")
    with pytest.raises(SpecError, match=f"'scaled.safetensors' has quantised weights, scaled by '{key}.scale_weight'"):
        loaded(model=config, weights=tmp_path / "scaled.safetensors")
    save_file(state | {f"{key}.weight": state[f"{key}.weight"].to(torch.int8)}, tmp_path / "int8.safetensors")
    with pytest.raises(SpecError, match=r"has torch.int8 for '.*attn.to_.\.weight', which is torch.float32"):
        loaded(model=config, weights=tmp_path / "int8.safetensors")


def test_flux_fits_in_its_original_layout_by_names_and_shapes(tmp_path):
    """At the width of the real one, which diffusers' converter has as a number; the file has a hole for its values."""
    sizes = {"num_layers": 1, "num_single_layers": 1, "guidance_embeds": True}
    with torch.device("meta"):
        model = diffusers.FluxTransformer2DModel(**sizes)
    header, at = {}, 0
    for key, value in original(model, str).items():
        header[key] = {"dtype": "F8_E4M3", "shape": list(value.shape), "data_offsets": [at, at + value.numel()]}
        at += value.numel()
    text = json.dumps(header).encode()
    with (tmp_path / "flux.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    loaded("meta", model=config_of(model, tmp_path), weights=tmp_path / "flux.safetensors")
    with pytest.raises(SpecError, match="does not fit FluxTransformer2DModel: 32 keys missing"):
        with torch.device("meta"):
            other = diffusers.FluxTransformer2DModel(**{**sizes, "num_layers": 2})
        loaded("meta", model=config_of(other, tmp_path), weights=tmp_path / "flux.safetensors")


def test_an_index_of_several_files(tmp_path):
    model = unets.sd15().model
    model.save_pretrained(tmp_path / "unet", max_shard_size="60KB")
    index = tmp_path / "unet/diffusion_pytorch_model.safetensors.index.json"
    assert_same(loaded(model=config_of(model, tmp_path), weights=index), model)
    read = json.loads(index.read_text())
    shard = next(iter(read["weight_map"].values()))

    def refused(text, **changes):
        index.write_text(json.dumps(read | changes))
        with pytest.raises(SpecError, match=text):
            loaded(model=config_of(model, tmp_path), weights=index)

    refused("has no 'weight_map' that names a file for each tensor", weight_map={})
    refused("has no 'weight_map'", weight_map={"conv_in.weight": 3})
    refused("an index may only name files of weights in its own folder", weight_map={"a": "../unet/a.safetensors"})
    refused("says that 'odd' is in '.*', which does not have it", weight_map={**read["weight_map"], "odd": shard})
    (tmp_path / "unet" / shard).unlink()
    refused(f"names '{shard}', which is not in its folder")


def test_a_file_of_another_model_says_what_does_not_fit(tmp_path):
    model = unets.sd15().model
    config = config_of(model, tmp_path)
    save_file(original(sd3(), in_sd3), tmp_path / "sd3.safetensors")
    with pytest.raises(SpecError, match="does not fit UNet2DConditionModel: 208 keys missing"):
        loaded(model=config, weights=tmp_path / "sd3.safetensors")
    save_file(original(model, str), tmp_path / "unet.safetensors")
    with pytest.raises(SpecError, match="has neither the key names of diffusers' SD3Transformer2DModel nor any that"):
        loaded(model=config_of(sd3(), tmp_path), weights=tmp_path / "unet.safetensors")
    state = dict(model.state_dict())
    del state["conv_in.weight"]
    save_file(state, tmp_path / "part.safetensors")  # in diffusers' layout, and one is missing
    with pytest.raises(SpecError, match=r"1 keys missing.*\n  missing: conv_in.weight"):
        loaded(model=config_of(model, tmp_path), weights=tmp_path / "part.safetensors")


def test_a_pickle_of_more_than_weights_and_gguf_are_refused(tmp_path):
    config = config_of(unets.sd15().model, tmp_path)
    torch.save({"state_dict": {"a": torch.ones(1)}, "epoch": SpecError("x")}, tmp_path / "a.ckpt")
    with pytest.raises(SpecError, match="objects other than tensors: .*; save its weights alone, as "
                                        ".safetensors"):
        loaded(model=config, weights=tmp_path / "a.ckpt")
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(100))
    for sections in ({"model": config, "weights": tmp_path / "a.gguf"}, {"model": tmp_path / "a.gguf"}):
        with pytest.raises(SpecError, match="it is a GGUF file, whose weights are quantised: use the .safetensors"):
            loaded(**sections)


def test_one_file_is_a_model_where_its_configuration_is_in_the_cache(tmp_path, monkeypatch):
    model = unets.sd15().model
    save_file({f"model.diffusion_model.{k}": v for k, v in original(model, str).items()}, tmp_path / "sd.safetensors")
    cache = tmp_path / "cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    with pytest.raises(SpecError, match="looks like one of stable-diffusion-v1-5/.*not in the hub's cache.*as 'weights'"):
        loaded(model=tmp_path / "sd.safetensors")
    repo = cache / "models--stable-diffusion-v1-5--stable-diffusion-v1-5"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs/main").write_text("a1")
    (repo / "snapshots/a1/unet").mkdir(parents=True)
    config_of(model, repo / "snapshots/a1/unet")
    assert_same(loaded(model=tmp_path / "sd.safetensors"), model)
    save_file({"conv.weight": torch.ones(2)}, tmp_path / "other.safetensors")
    with pytest.raises(SpecError, match="is a file of weights without the model's configuration beside it: give"):
        loaded(model=tmp_path / "other.safetensors")
