"""Checkpoints of merged models: the libraries of the base models read them, under their own names."""

from __future__ import annotations

import copy
import json
import os
from functools import cache

import pytest
import small
import torch
import unets
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import fxplug
from fxplug.__main__ import app
from fxplug.core.errors import FxplugError, SpecError


def near(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@cache
def slotted():
    """A UNet with two adapters in its slots."""
    torch.manual_seed(2)
    new = fxplug.apply(unets.sd15().gm, fxplug.load_pass("lora", at="re:.*attn.*to_[qkv]$", rank=4, slots=2))
    for name in ("ink", "film"):
        state = {}
        for path, layer in unets.sd15().model.named_modules():
            if path.endswith(("to_q", "to_v")):
                state[f"{path}.lora_A.weight"] = 0.3 * torch.randn(3, layer.in_features)
                state[f"{path}.lora_B.weight"] = 0.3 * torch.randn(layer.out_features, 3)
        new.adapters.load(name, state)
    return new


def run(*args, code=0):
    done = CliRunner().invoke(app, list(map(str, args)), prog_name="fxplug")
    assert done.exit_code == code and "Traceback" not in done.output, done.output
    return done.stdout if not code else done.stderr


@pytest.mark.slow
def test_a_merged_unet_is_a_folder_that_diffusers_reads(tmp_path):
    from diffusers import UNet2DConditionModel

    base, new = unets.sd15(), copy.deepcopy(slotted())
    fxplug.save(new, tmp_path / "saved")
    text = run("export", tmp_path / "saved", "--to", "diffusers", "--merge", "ink=0.8,film=0.3", "--out", tmp_path / "unet")
    assert "diffusion_pytorch_model.safetensors, with ink, film merged" in text
    assert sorted(os.listdir(tmp_path / "unet")) == ["config.json", "diffusion_pytorch_model.safetensors"]
    model = UNet2DConditionModel.from_pretrained(tmp_path / "unet").eval()
    assert model.state_dict().keys() == base.model.state_dict().keys()
    wanted = json.loads(json.dumps(dict(base.model.config)))  # whose lists are tuples
    assert {key: value for key, value in model.config.items() if key[0] != "_"} == {k: wanted[k] for k in wanted if k[0] != "_"}
    new.adapters.use({"ink": 0.8, "film": 0.3})
    near(model(**base.kwargs)[0], new(**base.kwargs)[0])
    assert not torch.allclose(model(**base.kwargs)[0], base.model(**base.kwargs)[0], atol=1e-4)


@pytest.mark.slow
def test_a_large_one_is_written_in_shards(tmp_path):
    from diffusers import UNet2DConditionModel

    done = fxplug.save_checkpoint(slotted(), tmp_path / "unet", merge={"ink": 1.0}, largest=40_000)
    assert "diffusion_pytorch_model.safetensors.index.json" in done.files and len(done.files) > 3
    model = UNet2DConditionModel.from_pretrained(tmp_path / "unet")
    fxplug.save_checkpoint(slotted(), tmp_path / "whole", merge={"ink": 1.0})
    whole = UNet2DConditionModel.from_pretrained(tmp_path / "whole").state_dict()
    assert all(torch.equal(value, whole[key]) for key, value in model.state_dict().items())


def test_the_module_stays_as_it_is_and_what_is_in_use_is_what_is_merged(tmp_path):
    new = copy.deepcopy(slotted())
    new.adapters.use("film")
    before = {key: value.clone() for key, value in new.state_dict().items()}
    fxplug.save_checkpoint(new, tmp_path / "a", to="safetensors")
    fxplug.save_checkpoint(new, tmp_path / "b", to="safetensors", merge={"film": 1.0})
    fxplug.save_checkpoint(new, tmp_path / "none", to="safetensors", merge={})
    assert all(torch.equal(value, before[key]) for key, value in new.state_dict().items())
    a, b, none = (load_file(tmp_path / f"{name}.safetensors") for name in ("a", "b", "none"))
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert all(torch.equal(value, none[key]) for key, value in unets.sd15().model.state_dict().items())
    assert any(not torch.equal(a[key], none[key]) for key in a)


def test_a_single_file_has_the_names_of_the_first_code_base(tmp_path):
    done = fxplug.save_checkpoint(slotted(), tmp_path / "unet", to="safetensors", merge={"ink": 1.0}, first=True)
    first = load_file(done.path)
    own = fxplug.exports.checkpoints.merged_state(slotted(), {"ink": 1.0})[0]
    assert len(first) == len(own)
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    config = {**unets.sd15().model.config, "class_embed_type": None}
    back = convert_ldm_unet_checkpoint(dict(first), config)
    assert back.keys() == own.keys() and all(torch.equal(value, own[key]) for key, value in back.items())


@pytest.mark.parametrize("name", ["lora", "dora", "ssf"])
def test_timm_takes_what_a_pass_learned(name, tmp_path):
    import timm

    base = small.plain_vit()
    at = "blocks.*.attn.qkv"
    new = fxplug.apply(base.gm, fxplug.load_pass(name, at=at))
    with torch.no_grad():
        for parameter in new.get_submodule(name).parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    fxplug.save(new, tmp_path / "saved")
    run("export", tmp_path / "saved", "--to", "timm", "--out", tmp_path / "vit.safetensors")
    options = {"img_size": 32, "depth": 2, "num_classes": 10, "embed_dim": 96}
    model = timm.create_model("vit_tiny_patch16_224", checkpoint_path=tmp_path / "vit.safetensors", **options).eval()
    near(model(*base.args), new.eval()(*base.args))
    assert model.state_dict().keys() == base.model.state_dict().keys()


REFUSED = [
    ({"merge": {"inc": 1.0}}, SpecError, r"no adapter 'inc' \(did you mean 'ink'\?\)"),
    ({"merge": {"ink": float("nan")}}, SpecError, "the weight of 'ink' must be a finite number"),
    ({"merge": {"lora": 1.0}}, SpecError, "the pass 'lora' has slots: give the names of adapters in them"),
    ({"merge": {"ink": 1e300}}, FxplugError, "merged, '.*' has numbers out of range for torch.float32"),
    ({"to": "timm"}, FxplugError, "is a UNet2DConditionModel, which is not a model class of timm"),
    ({"to": "difusers"}, FxplugError, r"no checkpoint format 'difusers' \(did you mean 'diffusers'\?\)"),
    ({"first": True}, FxplugError, "to='safetensors'"),
    ({"largest": 0}, FxplugError, "a whole number of bytes"),
]


@pytest.mark.parametrize(("options", "kind", "text"), REFUSED)
def test_what_cannot_be_written_says_so(options, kind, text, tmp_path):
    with pytest.raises(kind, match=text):
        fxplug.save_checkpoint(slotted(), tmp_path / "out", **options)
    assert os.listdir(tmp_path) == []


def test_a_place_that_is_taken_stays_as_it_is(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for name in ("full", "file", "link"):
        with pytest.raises(FxplugError, match=rf"{name} exists and is not"):
            fxplug.save_checkpoint(slotted(), tmp_path / name, merge={"ink": 1.0})
    assert (tmp_path / "full/mine.txt").read_text() == (tmp_path / "file").read_text() == "mine"
    fxplug.save_checkpoint(slotted(), tmp_path / "empty", merge={"ink": 1.0})
    assert len(os.listdir(tmp_path / "empty")) == 2 and len(os.listdir(tmp_path)) == 4


def test_passes_that_are_no_functions_of_weights_are_refused(tmp_path):
    passes = fxplug.load_pass("adapter", at="blocks.*.mlp"), fxplug.load_pass("lora", at="blocks.*.attn.qkv")
    new = fxplug.apply(small.plain_vit().gm, *passes)
    with pytest.raises(SpecError, match="adapter cannot be merged"):
        fxplug.save_checkpoint(new, tmp_path / "out", to="timm")
    with pytest.raises(SpecError, match="the pass 'lora' can only be merged in full, not by 0.5"):
        fxplug.save_checkpoint(new, tmp_path / "out", to="timm", merge={"lora": 0.5})
    done = fxplug.save_checkpoint(new, tmp_path / "out", to="timm", merge={"lora": 1})
    assert done.passes == ("lora",) and load_file(done.path).keys() == small.plain_vit().model.state_dict().keys()


def test_a_base_of_no_library(tmp_path):
    with pytest.raises(FxplugError, match="save_checkpoint takes a traced module, not a Linear"):
        fxplug.save_checkpoint(nn.Linear(2, 2), tmp_path / "a")
    gm = fxplug.trace(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4))
    for to in ("diffusers", "timm"):
        with pytest.raises(FxplugError, match=f"Sequential, .*not a model class of {to}"):
            fxplug.save_checkpoint(gm, tmp_path / "a", to=to)
    done = fxplug.save_checkpoint(gm, tmp_path / "a", to="safetensors")
    assert load_file(done.path).keys() == {"0.weight", "0.bias"}
    with pytest.raises(FxplugError, match="2 of 2 tensors have no known name of the original format: '0.weight', '0.bias'"):
        fxplug.save_checkpoint(gm, tmp_path / "b", to="safetensors", first=True)


def test_marks_for_a_step_cache_are_nothing_to_merge(tmp_path):
    marked = fxplug.apply(unets.sd15().gm, fxplug.load_pass("deepcache"))
    done = fxplug.save_checkpoint(marked, tmp_path / "a", to="safetensors")
    assert done.passes == () and done.tensors == len(unets.sd15().model.state_dict())
    new = fxplug.apply(marked, fxplug.load_pass("lora", at="re:.*to_q$"))
    assert fxplug.save_checkpoint(new, tmp_path / "a", to="safetensors").passes == ("lora",)


def full_disk(*args):
    raise OSError(28, "No space left on device")


def full_memory(*args):
    raise MemoryError("no memory")


def full_allocator(*args):
    torch.empty(1 << 60, dtype=torch.uint8)


@pytest.mark.parametrize(("fails", "error", "text"), [
    (full_disk, FxplugError, "cannot be written: the disk is full"), (full_memory, MemoryError, "no memory"),
    (full_allocator, RuntimeError, "allocate memory"),
])  # fmt: skip
@pytest.mark.parametrize("to", ["diffusers", "safetensors"])
def test_nothing_is_left_where_disk_or_memory_are_full(fails, error, text, to, tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_text("mine")
    monkeypatch.setattr(fxplug.exports.checkpoints, "save_file", fails)
    with pytest.raises(error, match=text):
        fxplug.save_checkpoint(slotted(), tmp_path if to == "safetensors" else tmp_path / "unet", to=to, merge={})
    assert os.listdir(tmp_path) == ["model.safetensors"] and (tmp_path / "model.safetensors").read_text() == "mine"
    if fails is not full_disk:
        monkeypatch.setattr(fxplug.exports.checkpoints, "fold", fails)
        with pytest.raises(error, match=text):
            fxplug.save_checkpoint(slotted(), tmp_path / "b", to=to, merge={"ink": 1.0})
