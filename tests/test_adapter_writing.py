"""Adapter files that we write: the tools read them, with equal outputs, and what was loaded comes back to the last bit."""

from __future__ import annotations

import copy
import json
import os
import re
import threading
from dataclasses import replace
from functools import cache

import peft
import pytest
import torch
import unets
from lycoris import create_lycoris_from_weights
from safetensors import safe_open
from safetensors.torch import load_file
from small import load_and_use, seeded, traced
from sweeps import sweep
from test_adapter_files import ASSETS, Net, randomised, real
from torch import nn
from typer.testing import CliRunner

import fxplug
from fxplug.__main__ import app
from fxplug.adapters import files
from fxplug.adapters.contents import AdapterContents, list_layers
from fxplug.adapters.layer_names import map_first_names
from fxplug.adapters.tables import FORMATS
from fxplug.adapters.writing import About, make_content
from fxplug.core.errors import ArtifactError, SpecError

INDICES = torch.arange(6).view(1, 2, 3)


@cache
def net():
    return traced(seeded(Net).eval(), INDICES)


def tuned(name, at="**", **options):
    """A pass on a small net, with other numbers than it begins with."""
    new = fxplug.apply(net().gm, fxplug.load_pass(name, at=at, **{"rank": 3, "alpha": 2.0, "name": "style", **options}))
    torch.manual_seed(1)
    randomised(new.style, "down", "up", "hada_", "lokr_")
    with torch.no_grad():
        for parameter in new.style.parameters():
            parameter.mul_(0.3)  # or the net's numbers grow so large that their rounding does
    return new


def metadata(file):
    with safe_open(file, "pt") as opened:
        return opened.metadata()


def near(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


# --- what passes learned, read by the tools

LAYERS = ["blocks.*.to_q", "blocks.*.ff", "conv", "point"]
WAYS = {
    "lora": ("lora", "**", {}),
    "lora of biases": ("lora", LAYERS, {"bias": True}),
    "rslora": ("lora", LAYERS, {"rslora": True}),
    "lora on weights": ("lora_weight", "**", {}),
    "dora": ("dora", LAYERS, {}),
    "loha": ("loha", LAYERS, {}),
    "lokr": ("lokr", LAYERS, {"rank": 1}),
    "lokr of both": ("lokr", ["blocks.*.ff", "conv"], {"rank": 1, "decompose_both": True}),
    "lokr of full matrices": ("lokr", LAYERS, {"full_matrix": True}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # peft's advice on its own options
def test_peft_reads_what_a_pass_learned(way, tmp_path):
    name, at, options = WAYS[way]
    new = tuned(name, at, **options)
    done = fxplug.save_adapter(new, tmp_path / "peft", as_="peft")
    assert sorted(os.listdir(tmp_path / "peft")) == ["adapter_config.json", "adapter_model.safetensors"]
    model = peft.PeftModel.from_pretrained(copy.deepcopy(net().model), tmp_path / "peft").eval()
    near(new(INDICES), model(INDICES))
    assert not torch.allclose(new(INDICES), net().model(INDICES), atol=1e-3)
    config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    if way == "lora":
        assert config["target_modules"] == sorted(done.layers) and len(done.layers) == 7
        assert (config["r"], config["lora_alpha"], config["rank_pattern"]) == (3, 2.0, {})
    assert not config.get("use_rslora") and config.get("lora_bias", False) is (way == "lora of biases")


@pytest.mark.parametrize("way", [way for way in WAYS if way != "lora of biases"])
def test_lycoris_reads_what_a_pass_learned(way, tmp_path, capsys):
    name, at, options = WAYS[way]
    new = tuned(name, LAYERS if at == "**" else at, **options)
    fxplug.save_adapter(new, tmp_path / "a", as_="lycoris")
    model = copy.deepcopy(net().model)
    network, _ = create_lycoris_from_weights(1.0, str(tmp_path / "a.safetensors"), model)
    assert len(network.loras) == len(load_keys(tmp_path / "a.safetensors"))
    network.apply_to()
    near(new(INDICES), model(INDICES))
    assert metadata(tmp_path / "a.safetensors")["ss_network_module"] == "lycoris.kohya"


@pytest.mark.parametrize("as_", ["kohya", "lycoris", "comfy", "peft", "fxplug"])
def test_a_scaled_lokr_of_full_matrices_is_what_peft_trained(as_, tmp_path):
    at, base = ["blocks.0.ff", "conv"], copy.deepcopy(net().model)
    model = peft.get_peft_model(base, peft.LoKrConfig(r=64, alpha=256, target_modules=at)).eval()
    randomised(model, "lokr_")
    model.save_pretrained(tmp_path / "trained")

    def loaded(source):
        new = fxplug.apply(net().gm, fxplug.pass_for(source, net().gm))
        load_and_use(new, source, "a")
        near(new(INDICES), model(INDICES))
        return new

    file = tmp_path / ("a" if as_ == "peft" else "a.safetensors")
    loaded(tmp_path / "trained").adapters.save("a", file, as_=as_)
    loaded(file)
    if as_ == "lycoris":
        plain = copy.deepcopy(net().model)
        create_lycoris_from_weights(1.0, str(file), plain)[0].apply_to()
        near(plain(INDICES), model(INDICES))


def load_keys(file):
    return {key.partition(".")[0] for key in load_file(file)}


# --- what is written in any form is what is read, or is refused

METHODS = {
    "lora": {"rank": 3, "alpha": 2.0}, "lora of biases": {"rank": 3, "bias": True}, "lora_weight": {"rank": 3},
    "dora": {"rank": 3}, "dora by input": {"rank": 3, "by": "input"}, "loha": {"rank": 2}, "lokr": {"rank": 1},
    "delta": {"param": "weight"}, "nothing": None,
}  # fmt: skip


@cache
def beside_biases(method, biases):
    """A small net with a method and maybe changes of biases, with what it gives."""
    options = METHODS[method]
    passes = [] if options is None else [fxplug.load_pass(method.partition(" ")[0], at=LAYERS, name="style", **options)]
    passes += [fxplug.load_pass("delta", at=LAYERS, param="bias", name="biases")] if biases else []
    new = fxplug.apply(net().gm, *passes)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            if name.startswith(("style", "biases")):
                parameter.add_(torch.randn_like(parameter) * 0.1)
        return new, new(INDICES)


PAIRS = [(m, b) for m in METHODS for b in (False, True) if b or m != "nothing"]


@pytest.mark.parametrize("as_", FORMATS)
@sweep(("method", "biases"), PAIRS, *((m, True) for m in ("lora", "dora", "loha", "nothing", "lora of biases")))
def test_what_is_written_in_a_form_is_read_as_it_was_or_refused(method, biases, as_, tmp_path):
    new, wanted = beside_biases(method, biases)
    try:
        file = fxplug.save_adapter(new, tmp_path / "it", as_=as_).path
    except ArtifactError as error:
        assert as_ != "fxplug" and (method, as_) not in [("dora", "peft"), ("lora of biases", "comfy")]
        assert biases or re.search("whole weight|dora by input|loha|delta|whole", str(error))
        return
    for slots in (0, 1):
        again = fxplug.apply(net().gm, fxplug.pass_for(file, net().gm, slots=slots))
        if slots:
            load_and_use(again, file)
        else:
            fxplug.load_adapter(again, file)
        near(again(INDICES), wanted)


# --- what was loaded comes back


def pairs(shapes, rank=4, dtype=torch.float16, alpha=3.0, form="lora_unet_{}"):
    """A file of kohya's for layers by name."""
    made = {}
    for name, (out, inner, *kernel) in shapes.items():
        key = form.format(name.replace(".", "_"))
        made[f"{key}.lora_down.weight"] = (0.3 * torch.randn(rank, inner, *kernel)).to(dtype)
        made[f"{key}.lora_up.weight"] = (0.3 * torch.randn(out, rank, *[1] * len(kernel))).to(dtype)
        made[f"{key}.alpha"] = torch.tensor(alpha, dtype=dtype)
    return made


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key].dtype == value.dtype and torch.equal(found[key], value), key


def updates(source):
    """The updates of a file by layer."""
    found = {}
    for entry in files.read(source).entries:
        out, inner = entry.sizes()
        found[entry.name] = entry.changed(torch.zeros(out, *inner))
    return found


def alike(file, state):
    """That a file has the keys of a state, and its updates."""
    assert load_file(file).keys() == state.keys()
    found, wanted = updates(file), updates(state)
    for name, update in found.items():
        near(update, wanted[name])


def comes_back(adapters, state, file):
    """That an adapter of LyCORIS is written with its updates, and with the numbers that its slots hold."""
    adapters.load("ink", state)
    done = adapters.save("ink", file, as_="lycoris")
    adapters.load("again", done.path)
    for name, banks in adapters.banks.items():
        first, second = map(adapters.names_of(name).index, ("ink", "again"))
        for bank in banks:
            for key, tensor in ((key, adapters.tensor(each)) for key, each in bank.names.items()):
                assert torch.equal(bank.views(key, tensor, first), bank.views(key, tensor, second))
    adapters.unload("again")
    return done


@cache
def banked(name="lora", **options):
    at = "**" if name.startswith("lora") else LAYERS
    return fxplug.apply(net().gm, fxplug.load_pass(name, at=at, **{"rank": 5, "slots": 3, "name": "style", **options}))


SHAPES = {n: tuple(m.weight.shape) for n, m in Net().named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("alpha", [4.0, 3.0, 0.7, 1e-3])
def test_a_kohya_file_comes_back_from_a_slot(alpha, dtype, tmp_path):
    new = copy.deepcopy(banked())
    state = pairs(SHAPES, 4, dtype, torch.tensor(alpha, dtype=dtype).item(), "lycoris_{}")
    done = comes_back(new.adapters, state, tmp_path / "a")
    alike(done.path, state)
    fxplug.save(new, tmp_path / "module")
    fxplug.load(tmp_path / "module").adapters.save("ink", tmp_path / "b", as_="lycoris")
    same(load_file(tmp_path / "b.safetensors"), load_file(done.path))


@pytest.mark.parametrize("ranks", [{}, {"blocks.0.to_q": 3, "words": 5}], ids=["even", "uneven"])
def test_a_folder_of_peft_comes_back_from_a_slot(ranks, tmp_path):
    config = peft.LoraConfig(target_modules=list(SHAPES) + ["words"], r=4, lora_alpha=9, rank_pattern=ranks)
    model = peft.get_peft_model(copy.deepcopy(net().model), config)
    randomised(model, "lora_")
    model.save_pretrained(tmp_path / "theirs")
    new = copy.deepcopy(banked())
    new.adapters.load("ink", tmp_path / "theirs")
    done = new.adapters.save("ink", tmp_path / "ours")
    assert load_keys(tmp_path / "ours/adapter_model.safetensors") == load_keys(tmp_path / "theirs/adapter_model.safetensors")
    assert len(done.layers) == 7 and len(repr(done)) < 200
    again = peft.PeftModel.from_pretrained(copy.deepcopy(net().model), tmp_path / "ours")
    for name, update in updates(again.state_dict()).items():
        near(update, updates(tmp_path / "ours")[name])
        near(update, updates(tmp_path / "theirs")[name])


@pytest.mark.parametrize("name", ["loha", "lokr", "lora_weight"])
def test_products_come_back_from_slots_that_map_weights(name, tmp_path):
    learned = tuned(name, LAYERS, rank=2 if name != "lokr" else 1, alpha=0.7)
    fxplug.save_adapter(learned, tmp_path / "a", as_="lycoris")
    new = copy.deepcopy(banked(name, rank=2 if name != "lokr" else 1))
    comes_back(new.adapters, load_file(tmp_path / "a.safetensors"), tmp_path / "b")


def test_what_was_written_over_in_a_slot_is_saved_as_it_is(tmp_path):
    """As an optimizer does."""
    new = copy.deepcopy(banked())
    load_and_use(new, pairs(SHAPES, 2, form="lycoris_{}"), "ink")
    with torch.no_grad(), new.adapters.change():
        up = new.get_submodule("style.blocks.0.to_q.Lora").up.weight
        up[:, :5] += torch.rand(8, 5)  # in what pads the rank, too
        new.get_submodule("style.blocks.0.to_q.Lora").down.weight[:5] += torch.rand(5, 8)
    new.adapters.save("ink", tmp_path / "a", as_="lycoris")
    other = copy.deepcopy(banked())
    load_and_use(other, tmp_path / "a.safetensors", "ink")
    near(other(INDICES), new(INDICES))
    assert load_file(tmp_path / "a.safetensors")["lycoris_blocks_0_to_q.lora_up.weight"].shape == (8, 5)


def test_slots_of_16_bits_give_a_file_of_16_bits_back(tmp_path):
    new = copy.deepcopy(banked()).to(torch.bfloat16)
    done = comes_back(new.adapters, pairs(SHAPES, 4, torch.bfloat16, 0.7, "lycoris_{}"), tmp_path / "a")
    assert {value.dtype for key, value in load_file(done.path).items() if ".lora_" in key} == {torch.bfloat16}


# --- first names


@cache
def flux():
    from diffusers import FluxTransformer2DModel

    options = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2, "in_channels": 8}
    conditions = {"joint_attention_dim": 12, "pooled_projection_dim": 6, "guidance_embeds": False, "axes_dims_rope": (2, 2, 4)}
    model = seeded(lambda: FluxTransformer2DModel(**options, **conditions)).eval()
    call = {
        "hidden_states": torch.randn(1, 4, 8), "encoder_hidden_states": torch.randn(1, 3, 12), "timestep": torch.ones(1),
        "pooled_projections": torch.randn(1, 6), "img_ids": torch.zeros(4, 3), "txt_ids": torch.zeros(3, 3),
        "return_dict": False,
    }  # fmt: skip
    return traced(model, **call)


def weights(model):
    return {n: tuple(m.weight.shape) for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}


def of_diffusers(model, state, alphas=None, name="unet"):
    """What a model computes with a state dict that diffusers' loaders made."""
    other = copy.deepcopy(model)
    other.load_lora_adapter(state, prefix=name, network_alphas=alphas, adapter_name="ink")
    return other


@cache
def small_sdxl():
    model = seeded(unets.small_sdxl_model)
    return traced(model, **seeded(lambda: unets.inputs(model)))


@pytest.mark.slow
def test_kohya_names_of_sdxl_are_read_by_diffusers(tmp_path):
    from diffusers import StableDiffusionXLPipeline

    base = small_sdxl()
    new = fxplug.apply(base.gm, fxplug.load_pass("lora", at="re:.*attentions.*(to_[qkv]|proj_in)$", rank=3, slots=2))
    names = {path: name for name, (path,) in map_first_names(weights(base.model)).items()}
    shapes = {names[path]: shape for path, shape in weights(base.model).items() if path.endswith(("to_q", "to_v", "proj_in"))}
    shapes = {name: shape for name, shape in shapes.items() if "_blocks." in name or "middle" in name}
    state = pairs(shapes, 3)
    new.adapters.load("ink", state)
    done = new.adapters.save("ink", tmp_path / "ink", as_="kohya")
    alike(done.path, state)
    about = metadata(done.path)
    assert "modelspec.architecture" not in about  # none of the known, as its text is narrower
    assert about["modelspec.resolution"] == "128x128"
    assert (about["ss_network_dim"], about["ss_network_alpha"], about["ss_network_module"]) == ("3", "3", "networks.lora")
    converted, alphas = StableDiffusionXLPipeline.lora_state_dict(str(done.path), unet_config=base.model.config)
    other = of_diffusers(base.model, converted, alphas)
    new.adapters.use("ink")
    near(new(**base.kwargs)[0], other(**base.kwargs)[0])
    assert not torch.allclose(new(**base.kwargs)[0], base.model(**base.kwargs)[0], atol=1e-4)
    comfy = new.adapters.save("ink", tmp_path / "comfy", as_="comfy")
    assert load_file(comfy.path).keys() == {
        f"diffusion_model.{name}.{end}" for name in shapes for end in ("lora_down.weight", "lora_up.weight", "alpha")
    }
    again = copy.deepcopy(new)
    load_and_use(again, comfy.path, "comfy")
    near(again(**base.kwargs)[0], new(**base.kwargs)[0])


@pytest.mark.parametrize("as_", ["kohya", "comfy"])
@sweep("some", ["all of q, k, v", "q alone", "q and v of other ranks and scales"], "q and v of other ranks and scales")
def test_fused_layers_of_flux_are_read_by_diffusers(some, as_, tmp_path):
    from diffusers import FluxPipeline

    base = flux()
    new = fxplug.apply(base.gm, fxplug.load_pass("lora", at="re:.*transformer_blocks.*", rank=12, slots=2))
    if some.startswith("all"):
        fused = {"double_blocks.0.img_attn.qkv": (48, 16), "single_blocks.0.linear1": (112, 16)}
        state = pairs(fused | {"double_blocks.0.txt_mlp.2": (16, 64)}, 3)
        new.adapters.load("ink", state)
    else:
        ranks = {"attn.to_q": 2} if "alone" in some else {"attn.to_q": 2, "attn.to_v": 5}
        state = {}
        for end, rank in ranks.items():
            state |= pairs({f"transformer_blocks.0.{end}": (16, 16)}, rank, torch.float32, rank + 1.0, "lycoris_{}")
        new.adapters.load("ink", state)
    done = new.adapters.save("ink", tmp_path / "ink", as_=as_)
    if some.startswith("all") and as_ == "kohya":
        alike(done.path, state)
    if "other" in some:
        key = "lora_unet_double_blocks_0_img_attn_qkv" if as_ == "kohya" else "diffusion_model.double_blocks.0.img_attn.qkv"
        assert load_file(done.path)[f"{key}.lora_up.weight"].shape == (48, 7)
    new.adapters.use("ink")
    again = copy.deepcopy(new)
    load_and_use(again, done.path, "back")
    near(again(**base.kwargs)[0], new(**base.kwargs)[0])
    if not some.startswith("all"):  # of linear1 theirs takes the full width only
        converted = FluxPipeline.lora_state_dict(str(done.path))
        other = of_diffusers(base.model, converted, name="transformer")
        near(new(**base.kwargs)[0], other(**base.kwargs)[0])


# --- diffusers' own


@pytest.mark.slow
@pytest.mark.parametrize("way", ["lora", "dora", "lokr", "biases"])
@pytest.mark.filterwarnings("ignore::UserWarning")  # peft's advice on merging
def test_diffusers_loads_the_folder_of_a_unet(way, tmp_path):
    base = unets.sd15()
    options = {"lora": {}, "dora": {}, "lokr": {"rank": 1}, "biases": {"bias": True}}[way]
    name = "lora" if way == "biases" else way
    options = {"rank": 3, "alpha": 2.0, **options}
    new = fxplug.apply(base.gm, fxplug.load_pass(name, at="re:.*(attn.*to_[qkv]|conv1)$", **options))
    randomised(new.get_submodule(name), "up", "down", "lokr_")
    with torch.no_grad():
        for parameter in new.get_submodule(name).parameters():
            parameter.mul_(0.2)
    done = fxplug.save_adapter(new, tmp_path / "ink", as_="diffusers")
    assert os.listdir(done.path) == ["pytorch_lora_weights.safetensors"]
    keys = load_file(done.path / "pytorch_lora_weights.safetensors")
    assert all(key.startswith("unet.") for key in keys)
    other = copy.deepcopy(base.model)
    other.load_lora_adapter(done.path, prefix="unet", use_safetensors=True)
    near(new(**base.kwargs)[0], other(**base.kwargs)[0])
    back = files.fit(files.read(done.path), weights(base.model)).check()
    assert set(back.placed) == set(done.layers)


@pytest.mark.parametrize("as_", ["diffusers", "kohya"])
def test_a_pipeline_of_flux_loads_it(as_, tmp_path):
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    base = flux()
    new = fxplug.apply(base.gm, fxplug.load_pass("lora", at="re:transformer_blocks.*(to_[qkv]|ff.net.2)$", rank=3, alpha=1.5))
    new = fxplug.apply(new, fxplug.load_pass("loha", at="x_embedder", rank=2))
    randomised(new.lora, "up")
    done = fxplug.save_adapter(new, tmp_path / "ink", as_=as_, passes=["lora"])
    parts = dict.fromkeys(["vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"])
    pipe = FluxPipeline(scheduler=FlowMatchEulerDiscreteScheduler(), transformer=copy.deepcopy(base.model), **parts)
    pipe.load_lora_weights(str(done.path), weight_name=None if as_ == "kohya" else "pytorch_lora_weights.safetensors")
    near(pipe.transformer(**base.kwargs)[0], new(**base.kwargs)[0])
    assert not torch.allclose(base.model(**base.kwargs)[0], new(**base.kwargs)[0], atol=1e-4)


# --- the verb


def run(*args, code=0):
    done = CliRunner().invoke(app, list(map(str, args)), prog_name="fxplug")
    assert done.exit_code == code and "Traceback" not in done.output, done.output
    return done.stderr if code else done.stdout


def test_export_writes_what_a_pass_learned(tmp_path):
    fxplug.save(tuned("lora"), tmp_path / "saved", config={"model": "net", "train": {"steps": 7}, "passes": [{"lora": {}}]})
    text = run("export", tmp_path / "saved", "--to", "peft", "--out", tmp_path / "peft")
    assert text == f"7 layers\nsaved in {tmp_path / 'peft'}\n"
    text = run("export", tmp_path / "saved", "--to", "kohya", "--out", tmp_path / "ink.safetensors", code=1)
    assert "kohya cannot represent 1 of 7 layers: 'words' is an embedding with lora, which kohya cannot represent" in text
    text = run("export", tmp_path / "saved", "--to", "kohya", "--out", tmp_path / "ink.safetensors", "--partial")
    assert text.splitlines()[:2] == ["6 layers", "left out: 'words' is an embedding with lora, which kohya cannot represent"]
    assert json.loads(metadata(tmp_path / "ink.safetensors")["fxplug.config"])["train"] == {"steps": 7}
    assert sorted(os.listdir(tmp_path)) == ["ink.safetensors", "peft", "saved"]


def test_export_writes_an_adapter_of_a_slot(tmp_path):
    new = copy.deepcopy(banked())
    for name in ("ink", "film"):
        new.adapters.load(name, pairs(SHAPES, 2, form="lycoris_{}"))
    fxplug.save(new, tmp_path / "saved")
    out = tmp_path / "a.safetensors"
    text = run("export", tmp_path / "saved", "--to", "lycoris", "--out", out, code=1)
    assert "give --adapter, the name of the adapter to write: there are ink, film" in text
    run("export", tmp_path / "saved", "--to", "lycoris", "--out", out, "--adapter", "ink")
    assert metadata(out)["modelspec.title"] == "ink" and len(load_keys(out)) == 6
    assert "did you mean 'ink'?" in run("export", tmp_path / "saved", "--to", "peft", "--out", out, "--adapter", "inc", code=1)
    assert "give --out, the place" in run("export", tmp_path / "saved", "--to", "peft", "--adapter", "ink", code=1)
    assert "no export format 'kohia' (did you mean 'kohya'?)" in run("export", tmp_path / "saved", "--to", "kohia", code=1)
    assert "--adapter is only for --to peft" in run("export", tmp_path / "saved", "--adapter", "ink", code=1)
    for to, merge, finding in (
        ("peft", "ink", "which peft does not support"), ("timm", "ink=x", "must be a number, such as ink=0.8"),
        ("timm", "ink,ink", "is given twice"), ("timm", "=1", "names no adapter"),
    ):  # fmt: skip
        assert finding in run("export", tmp_path / "saved", "--to", to, "--out", out, "--merge", merge, code=1)


# --- what a format has no form for


def test_a_format_says_what_it_cannot_hold(tmp_path):
    new = fxplug.apply(net().gm, fxplug.load_pass("lora", at="conv", name="a"), fxplug.load_pass("loha", at="point", name="b"))
    new = fxplug.apply(new, fxplug.load_pass("ssf", at="blocks.0.to_q"))
    with pytest.raises(ArtifactError, match="peft cannot represent 2 of 3 layers: 'blocks.0.to_q' ssf has a Ssf there.*'point' "
                                            "has"):
        fxplug.save_adapter(new, tmp_path / "a")
    done = fxplug.save_adapter(new, tmp_path / "a", partial=True)
    assert done.layers == ("conv",) and set(done.left_out) == {"blocks.0.to_q", "point"} and "left out: " in repr(done)
    with pytest.raises(ArtifactError, match="nothing of this adapter can be written as diffusers: 'point' has loha, which"):
        fxplug.save_adapter(new, tmp_path / "b", as_="diffusers", passes=["b"], partial=True)
    with pytest.raises(SpecError, match=r"no adapter format 'kohia' \(did you mean 'kohya'\?\)"):
        fxplug.save_adapter(new, tmp_path / "b", as_="kohia")
    with pytest.raises(SpecError, match=r"no pass 'c' is applied here.*; there are a, b, ssf"):
        fxplug.save_adapter(new, tmp_path / "b", passes=["c"])
    with pytest.raises(SpecError, match="ssf: has no low-rank updates: ssf has a Ssf there.*as_='fxplug'"):
        fxplug.save_adapter(new, tmp_path / "b", passes=["ssf"])
    with pytest.raises(SpecError, match=r"not text: write \['a'\]"):
        fxplug.save_adapter(new, tmp_path / "b", passes="a")
    with pytest.raises(SpecError, match="the pass 'style' has slots: load and save adapters in them by their names"):
        fxplug.save_adapter(banked(), tmp_path / "b", passes=["style"])
    with pytest.raises(SpecError, match="no pass without slots is applied here"):
        fxplug.save_adapter(net().gm, tmp_path / "b")
    assert os.listdir(tmp_path) == ["a"]


def test_two_updates_of_one_layer_are_not_mixed(tmp_path):
    new = fxplug.apply(net().gm, *(fxplug.load_pass("lora", at="conv", name=name) for name in "ab"))
    with pytest.raises(ArtifactError, match="'conv' b has a second update there: choose with passes="):
        fxplug.save_adapter(new, tmp_path / "a")
    assert fxplug.save_adapter(new, tmp_path / "a", passes=["b"]).layers == ("conv",)
    new = fxplug.apply(net().gm, fxplug.load_pass("loha", at="conv", rank=2), fxplug.load_pass("delta", at="conv"))
    torch.nn.init.ones_(new.delta.conv.Delta.delta)
    with pytest.raises(ArtifactError, match="'conv' delta has a second update there: choose with passes="):
        fxplug.save_adapter(new, tmp_path / "a", as_="comfy")


UNSAVED = pytest.mark.filterwarnings("ignore:the name .* cannot be in an artifact")


class Odd(nn.Module):
    """Grouped and one-dimensional convolutions, and names that underscores do not tell apart."""

    def __init__(self):
        super().__init__()
        self.grouped, self.line = nn.Conv2d(8, 8, 3, groups=4), nn.Conv1d(9, 6, 3)
        self.a = nn.ModuleDict({"b_c": nn.Linear(6, 6)})
        self.a_b = nn.ModuleDict({"c": nn.Linear(6, 6)})
        self.tail = nn.ModuleDict({"net (old)": nn.Linear(6, 6), "a_b": nn.ModuleDict({"c": nn.Linear(6, 6)})})

    def forward(self, x):
        x = self.line(self.grouped(x).flatten(2)[:, :1].expand(-1, 9, -1)).mean(-1)
        return self.tail["net (old)"](self.tail["a_b"]["c"](self.a_b["c"](self.a["b_c"](x))))


@cache
def odd():
    return traced(seeded(Odd).eval(), torch.randn(2, 8, 5, 5))


@pytest.mark.parametrize("name", ["lora", "loha"])
@UNSAVED
def test_odd_layers_and_names(name, tmp_path):
    new = fxplug.apply(odd().gm, fxplug.load_pass(name, at="**", rank=2))
    randomised(new.get_submodule(name), "up", "hada")
    with pytest.raises(ArtifactError, match="'a_b.c' has the same name as 'a.b_c' when dots become underscores"):
        fxplug.save_adapter(new, tmp_path / "a", as_="kohya")
    if name == "lora":
        with pytest.raises(ArtifactError, match="'grouped' is a convolution in 4 groups, whose low-rank updates"):
            fxplug.save_adapter(new, tmp_path / "a")
        new = fxplug.apply(odd().gm, fxplug.load_pass(name, at=["grouped", "line"], rank=2))
        randomised(new.get_submodule(name), "up", "hada")
        for as_ in ("kohya", "comfy", "lycoris"):  # one down for all groups, of their ranks together
            file = fxplug.save_adapter(new, tmp_path / as_, as_=as_).path
            again = fxplug.apply(odd().gm, fxplug.pass_for(file, odd().gm, slots=0))
            fxplug.load_adapter(again, file)
            near(again(*odd().args), new(*odd().args))
        model = copy.deepcopy(odd().model)
        create_lycoris_from_weights(1.0, str(file), model)[0].apply_to()
        near(model(*odd().args), new(*odd().args))
        small = fxplug.resize_adapter(file, tmp_path / "small", rank=8)
        assert small.ranks == {"lycoris_grouped": 8, "lycoris_line": 2} and small.errors == {}
    new = fxplug.apply(odd().gm, fxplug.load_pass(name, at=["line", "a*.**", "tail.**"], rank=2))
    randomised(new.get_submodule(name), "up", "hada")
    done = fxplug.save_adapter(new, tmp_path / "peft")
    model = peft.PeftModel.from_pretrained(copy.deepcopy(odd().model), done.path)
    near(model(*odd().args), new(*odd().args))


@UNSAVED
def test_a_path_that_ends_as_another_is_told_apart_from_it(tmp_path):
    new = fxplug.apply(odd().gm, fxplug.load_pass("lora", at="a_b.c", rank=2))
    randomised(new.lora, "up")
    done = fxplug.save_adapter(new, tmp_path / "peft")
    assert json.loads((done.path / "adapter_config.json").read_text())["target_modules"] == r"^(?:a_b\.c)$"
    model = peft.PeftModel.from_pretrained(copy.deepcopy(odd().model), done.path)
    assert sum("lora_A" in key for key in model.state_dict()) == 1
    near(model(*odd().args), new(*odd().args))


@UNSAVED
def test_our_own_format_holds_all_of_it(tmp_path):
    new = fxplug.apply(odd().gm, fxplug.load_pass("lora", at="**", rank=2, slots=2))
    learned = fxplug.apply(odd().gm, fxplug.load_pass("lora", at="**", rank=2))
    randomised(learned.lora, "up")
    done = fxplug.save_adapter(learned, tmp_path / "own", as_="fxplug")
    assert len(done.layers) == 6
    load_and_use(new, done.path, "ink")
    near(new(*odd().args), learned(*odd().args))
    again = new.adapters.save("ink", tmp_path / "again", as_="fxplug")
    same(load_file(again.path), load_file(done.path))


# --- places, dtypes, threads


def test_places_that_are_taken_or_cannot_be_written(tmp_path):
    new = tuned("lora", at="conv")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ArtifactError, match="full has files and no adapter .*save to another folder"):
        fxplug.save_adapter(new, tmp_path / "full")
    with pytest.raises(ArtifactError, match="file exists and is not a folder"):
        fxplug.save_adapter(new, tmp_path / "file")
    with pytest.raises(ArtifactError, match="cannot be written: "):
        fxplug.save_adapter(new, tmp_path / "file/below", as_="kohya")
    with pytest.raises(ArtifactError, match="cannot be written: the name is too long"):
        fxplug.save_adapter(new, tmp_path / ("x" * 300), as_="kohya")
    with pytest.raises(ArtifactError, match="this is not a valid file name"):
        fxplug.save_adapter(new, tmp_path / "a\0b", as_="kohya")
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(ArtifactError, match="is a folder, which is not overwritten by a file"):
        fxplug.save_adapter(new, tmp_path / "folder.safetensors", as_="kohya")
    assert fxplug.save_adapter(new, tmp_path / "full", as_="kohya").path == tmp_path / "full/full.safetensors"
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "full/full.safetensors")
    fxplug.save_adapter(tuned("lora", at="point"), tmp_path / "link.safetensors", as_="kohya")
    assert load_keys(tmp_path / "full/full.safetensors") == {"lora_unet_point"} and (tmp_path / "link.safetensors").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["file", "folder.safetensors", "full", "link.safetensors"]


@pytest.mark.parametrize("as_", ["peft", "diffusers", "kohya"])
def test_an_adapter_that_is_there_is_replaced_as_save_does(tmp_path, as_):
    def layers(path):
        (file,) = path.glob("*.safetensors") if path.is_dir() else [path]
        return set(load_file(file))

    old, new = tuned("lora", at="conv"), tuned("lora", at="point")
    target = tmp_path / "ink"
    if as_ != "kohya":  # a folder, in which others keep more
        target.mkdir()
        (target / "adapter_model.bin").write_bytes(b"an earlier version's, which some readers take first")
    first = fxplug.save_adapter(old, target, as_=as_)
    before = layers(first.path)
    if as_ != "kohya":
        (target / "README.md").write_text("mine")
        (target / "more").mkdir()
        (target / "more/kept").write_text("mine")
    with pytest.raises(ArtifactError, match="ink(.safetensors)? exists: overwrite=True replaces"):
        fxplug.save_adapter(new, target, as_=as_, overwrite=False)
    assert layers(first.path) == before
    fxplug.save_adapter(new, target, as_=as_)
    assert layers(first.path) != before
    if as_ != "kohya":
        peft = ["adapter_config.json", "adapter_model.safetensors"]
        names = peft if as_ == "peft" else ["pytorch_lora_weights.safetensors"]
        assert sorted(os.listdir(target)) == sorted(["README.md", "more", *names])
        assert (target / "more/kept").read_text() == "mine"
        fxplug.save_adapter(new, target, as_="diffusers" if as_ == "peft" else "peft")  # another tool's takes its place
        assert not {*names} & {*os.listdir(target)} and (target / "README.md").exists()
    assert not list(tmp_path.glob(".*"))


def test_a_dtype_that_has_no_room_says_so(tmp_path):
    new = tuned("lora", at="conv")
    fxplug.save_adapter(new, tmp_path / "half", as_="kohya", dtype=torch.float16)
    assert {value.dtype for value in load_file(tmp_path / "half.safetensors").values()} == {torch.float16}
    with torch.no_grad():
        new.get_submodule("style.conv.Lora").up.weight.mul_(1e6)
        new.get_submodule("style.conv.Lora").down.weight.mul_(1e-4)
    with pytest.raises(ArtifactError, match="'conv': its up has numbers out of range for torch.float16: write it in another "
                                            "dtype"):
        fxplug.save_adapter(new, tmp_path / "more", as_="kohya", dtype=torch.float16)


def test_it_is_saved_whole_while_others_call_and_change(tmp_path):
    """A save sees one adapter, never half of the old and half of the new one."""
    new = copy.deepcopy(banked())
    states = [{key: torch.full_like(v, n) for key, v in pairs(SHAPES, 2, form="lycoris_{}").items()} for n in (1.0, 2.0)]
    load_and_use(new, states[0], "ink")
    stop, failed = threading.Event(), []

    def change():
        try:
            while not stop.is_set():
                for state in states:
                    new.adapters.load("ink", state, replace=True)
        except Exception as error:
            failed.append(error)

    def call():
        while not stop.is_set():
            new(INDICES)

    threads = [threading.Thread(target=target) for target in (change, call)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(6):
            done = new.adapters.save("ink", tmp_path / "a", as_="lycoris")
            found = {(key.rpartition(".lora_")[2], value.max().item()) for key, value in load_file(done.path).items()}
            found = {pair for pair in found if pair[0] in ("down.weight", "up.weight")}
            assert found in ({("down.weight", n), ("up.weight", n * n / 2)} for n in (1.0, 2.0))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failed


def test_cores_of_lower_rank_have_room_in_slots(tmp_path):
    learned = fxplug.apply(net().gm, fxplug.load_pass("loha", at="conv", rank=2, tucker=True))
    randomised(learned.loha, "hada_")
    done = fxplug.save_adapter(learned, tmp_path / "a", as_="lycoris")
    new = fxplug.apply(net().gm, fxplug.load_pass("loha", at="conv", rank=4, tucker=True, slots=2))
    load_and_use(new, done.path, "ink")
    near(new(INDICES), learned(INDICES))
    again = new.adapters.save("ink", tmp_path / "b", as_="lycoris")
    same(load_file(again.path), load_file(done.path))


@pytest.mark.parametrize("how", ["fuse", "outline", "live"])
def test_lowered_forms_keep_it_as_well(how, tmp_path):
    new = copy.deepcopy(banked())
    options = {"merge": how} if how == "live" else {how: "auto"}
    state = pairs(SHAPES, 4, torch.float32, form="lycoris_{}")
    comes_back(fxplug.lower(new, **options).adapters, state, tmp_path / "a")


@pytest.mark.parametrize(("options", "finding"), [
    ({"part": "unett"}, r"no part 'unett' of a pipeline \(did you mean 'unet'\?\)"),
    ({"dtype": torch.int8}, "dtype must be a floating point dtype, such as torch.float16, not torch.int8"),
    ({"about": {"a": 1}}, "metadata must be a mapping of text to text, and 'a' is not"),
])  # fmt: skip
def test_options_that_are_none(options, finding, tmp_path):
    with pytest.raises(SpecError, match=finding):
        fxplug.save_adapter(tuned("lora", at="conv"), tmp_path / "a", **options)


class Twice(nn.Module):
    """A layer that is called twice, and one whose weight has another name."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.shared, self.lin = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.shared(self.shared(self.lin(self.attn(x, x, x, need_weights=False)[0])))


def test_what_is_not_beside_each_call_of_a_layer_is_left_out(tmp_path):
    x = torch.randn(2, 3, 8)
    model = Twice().eval()
    gm = fxplug.trace(model, (x,))
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="shared"))
    randomised(new.lora, "up")
    near(peft.PeftModel.from_pretrained(copy.deepcopy(model), fxplug.save_adapter(new, tmp_path / "a").path)(x), new(x))
    other = fxplug.Pass("odd", rules=[fxplug.Rule(fxplug.Match(path="lin"), use="fxplug.blocks:Lora", args=["y", "y"])])
    for given in (fxplug.load_pass("lora", at="shared@1"), other):
        with pytest.raises(SpecError, match="that does not run beside every call of the layer, on its input"):
            fxplug.save_adapter(fxplug.apply(gm, given), tmp_path / "b")
    weights_ = fxplug.apply(gm, fxplug.load_pass("lora_weight", at=["attn", "lin"], param="*weight"))
    finding = "diffusers cannot represent 1 of 2 layers: 'attn.in_proj_weight' is an update of in_proj_weight, which is not"
    with pytest.raises(ArtifactError, match=finding):
        fxplug.save_adapter(weights_, tmp_path / "b", as_="diffusers")
    assert os.listdir(tmp_path) == ["a"]


def test_weights_without_values_are_not_written(tmp_path):
    with torch.device("meta"):
        gm = fxplug.trace(Net(), (torch.zeros(1, 2, 3, dtype=torch.int64),))
    with pytest.raises(ArtifactError, match="the update of 'conv' is on the meta device and has no values"):
        fxplug.save_adapter(fxplug.apply(gm, fxplug.load_pass("lora", at="conv")), tmp_path / "a")


@pytest.mark.slow
def test_ranks_and_alphas_that_differ_by_layer_go_to_peft_and_diffusers(tmp_path):
    base = unets.sd15()
    new = fxplug.apply(base.gm, fxplug.load_pass("lora", at="re:.*(attn.*to_[qkv]|conv1)$", rank=8, slots=1))
    state = {}
    for number, (path, shape) in enumerate(weights(base.model).items()):
        if path.endswith(("to_q", "to_v", "conv1")):
            state |= pairs({path: shape}, 1 + number % 7, torch.float32, 0.3 + number % 3, "lycoris_{}")
    load_and_use(new, state, "ink")
    wanted = new(**base.kwargs)[0]
    other = copy.deepcopy(base.model)
    done = new.adapters.save("ink", tmp_path / "diffusers", as_="diffusers")
    other.load_lora_adapter(done.path, prefix="unet", use_safetensors=True)
    near(other(**base.kwargs)[0], wanted)
    model = peft.PeftModel.from_pretrained(copy.deepcopy(base.model), new.adapters.save("ink", tmp_path / "peft").path)
    near(model(**base.kwargs)[0], wanted)


def test_numbers_that_are_none_are_not_written(tmp_path):
    new = tuned("lora", at="conv")
    with torch.no_grad():
        new.get_submodule("style.conv.Lora").up.weight[0] = torch.nan
    with pytest.raises(ArtifactError, match="'base_model.model.conv.lora_B.weight' has numbers that are not finite"):
        fxplug.save_adapter(new, tmp_path / "a")
    slots = copy.deepcopy(banked())
    slots.adapters.load("ink", pairs(SHAPES, 2, form="lycoris_{}"))
    with torch.no_grad(), slots.adapters.change():
        slots.get_submodule("style.conv.Lora").up.weight[0, 0] = torch.nan
    with pytest.raises(ArtifactError, match="'lycoris_conv.lora_up.weight' has numbers that are not finite"):
        slots.adapters.save("ink", tmp_path / "a", as_="lycoris")
    assert os.listdir(tmp_path) == []


# --- files that people share


def again(state, model, as_):
    """What a file becomes that is placed on a model's layers and written again: the tensors of the model's part."""
    layers = list_layers(model)
    shapes = {path: layer.shape for path, layer in layers.items()}
    placed = files.fit(files.read(state), shapes, model=lambda: shapes).check().placed
    held = AdapterContents(tuple(replace(entry, path=path) for path, entry in placed.items()))
    return make_content(held, as_, About(layers, (type(model).__name__,))).tensors


@real
def test_a_lokr_that_is_shared_comes_back():
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        model = UNet2DConditionModel(cross_attention_dim=768)
    state = load_file(ASSETS / "kohya_lycoris" / "smart_falcon_4_lokr.safetensors")
    same(again(state, model, "kohya"), {key: value for key, value in state.items() if key.startswith("lora_unet_")})


@real
@pytest.mark.parametrize(("name", "as_"), [("kohya", "kohya"), ("diffusers", "diffusers"), ("diffusers_base_model", "peft")])
def test_names_of_a_flux_file_come_back(name, as_):
    from diffusers import FluxTransformer2DModel

    with torch.device("meta"):
        model = FluxTransformer2DModel(guidance_embeds=True)
    shapes = json.loads((ASSETS / "key_lists" / f"flux_lora_{name}_format.json").read_text())["state_dict_keys"]
    some = {key: shape for key, shape in shapes.items() if re.search(r"blocks[_.]1?0[_.]|time|guidance", key)}
    state = {key: (torch.randn(shape) if shape else torch.tensor(8.0)).to(torch.bfloat16) for key, shape in some.items()}
    same(again(state, model, as_), state)


def test_a_part_of_a_model_in_one_of_several_processes_is_not_written(tmp_path):
    new, slots = tuned("lora", at="conv"), copy.deepcopy(banked())
    slots.adapters.load("ink", pairs(SHAPES, 2, form="lycoris_{}"))
    for module in (new, slots):
        module.meta["parts"] = ["conv.weight"]
    for save in (
        lambda: fxplug.save_adapter(new, tmp_path / "a"), lambda: slots.adapters.save("ink", tmp_path / "a"),
        lambda: fxplug.save_checkpoint(new, tmp_path / "a", to="safetensors"),
    ):  # fmt: skip
        with pytest.raises(ArtifactError, match="only its shard of 1 weights, such as 'conv.weight'"):
            save()
    assert os.listdir(tmp_path) == []


def test_layers_of_zeros_are_left_out(tmp_path):
    """They are as layers that the adapter has nothing for; with magnitudes, or one factor that is not zero, they are not."""
    new = copy.deepcopy(banked())
    state = pairs(SHAPES, 3, torch.float32, form="lycoris_{}")
    state["lycoris_conv.lora_up.weight"].zero_()
    new.adapters.load("ink", state)
    done = new.adapters.save("ink", tmp_path / "untrained", as_="lycoris")
    assert {key.partition(".")[0] for key in state} == load_keys(done.path)
    state["lycoris_conv.lora_down.weight"].zero_()
    new.adapters.load("ink", state, replace=True)
    done = new.adapters.save("ink", tmp_path / "a", as_="lycoris")
    assert {key.partition(".")[0] for key in state} - load_keys(done.path) == {"lycoris_conv"}
    dora = copy.deepcopy(banked("dora"))
    state |= {"lycoris_conv.dora_scale": torch.rand(6, 1, 1, 1) + 1}
    dora.adapters.load("ink", {key: value for key, value in state.items() if key.startswith("lycoris_conv.")})
    dora.adapters.use("ink")
    dora.adapters.save("ink", tmp_path / "b", as_="lycoris")
    again = copy.deepcopy(banked("dora"))
    load_and_use(again, tmp_path / "b.safetensors", "ink")
    assert torch.equal(again(INDICES), dora(INDICES))


@pytest.mark.slow
def test_a_text_encoder_has_the_names_that_kohyas_tools_have(tmp_path):
    from diffusers import StableDiffusionPipeline
    from transformers import CLIPTextConfig, CLIPTextModel

    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"max_position_embeddings": 8, "bos_token_id": 0, "eos_token_id": 2}
    model = CLIPTextModel(CLIPTextConfig(**sizes, **ends)).eval()
    call = {"input_ids": torch.arange(3, 11).view(1, 8), "return_dict": False}
    gm = fxplug.trace(model, (), call)
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="re:.*fc[12]$", rank=2))
    randomised(new.lora, "up")
    done = fxplug.save_adapter(new, tmp_path / "ink", as_="kohya")
    assert load_keys(done.path) == {f"lora_te_text_model_encoder_layers_0_mlp_{name}" for name in ("fc1", "fc2")}
    slots = fxplug.apply(gm, fxplug.load_pass("lora", at="re:.*fc[12]$", rank=2, slots=1))
    load_and_use(slots, done.path, "ink")
    near(slots(**call)[0], new(**call)[0])
    state, alphas = StableDiffusionPipeline.lora_state_dict(str(done.path))
    other = copy.deepcopy(model)
    StableDiffusionPipeline.load_lora_into_text_encoder(state, alphas, other, prefix="text_encoder", adapter_name="ink")
    near(other(**call)[0], new(**call)[0])
    assert not torch.allclose(model(**call)[0], new(**call)[0], atol=1e-3)


@pytest.mark.parametrize("as_", ["comfy", "kohya"])
def test_a_norm_has_its_first_name_as_layers_have(as_, tmp_path):
    import unets

    gm, *_ = unets.sdxl()
    new = fxplug.apply(gm, fxplug.load_pass("delta", at="down_blocks.0.resnets.0.norm1"))
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            if name.startswith("delta."):
                parameter.fill_(0.5)
    keys = load_file(fxplug.save_adapter(new, tmp_path / "a.safetensors", as_=as_).path).keys()
    first = {"comfy": "diffusion_model.input_blocks.1.0.in_layers.0", "kohya": "lora_unet_input_blocks_1_0_in_layers_0"}[as_]
    assert keys and all(key.startswith(f"{first}.") for key in keys)
