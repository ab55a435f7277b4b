"""Adapter files resized, converted and merged without a model: by the formulas of the tools, and with what they cannot do."""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections import OrderedDict

import diffusers
import peft
import pytest
import torch
import unets
from safetensors.torch import load_file, save_file
from test_adapter_writing import metadata, net, tuned
from torch import nn
from typer.testing import CliRunner

import fxplug
from fxplug.__main__ import app
from fxplug.adapters import file_layouts
from fxplug.adapters.contents import list_layers
from fxplug.adapters.files import fit, read
from fxplug.core.errors import ArtifactError, SpecError

SPARSE = ("ties", "dare_linear", "dare_ties", "magnitude_prune")
SHAPES = {"lora_unet_a": (12, 8), "lora_unet_b": (6, 12), "lora_unet_c": (6, 4, 3, 3)}


def kohya(path, rank=4, seed=0, alpha=2.0, shapes=SHAPES, dtype=torch.float32):
    """A file of kohya's with numbers of falling weight, so that shares of singular values tell ranks apart."""
    torch.manual_seed(seed)
    state = {}
    for name, (out, inner, *kernel) in shapes.items():
        fall = torch.tensor([2.0**-n for n in range(rank)])
        state[f"{name}.lora_down.weight"] = torch.randn(rank, inner, *kernel).to(dtype)
        state[f"{name}.lora_up.weight"] = (torch.randn(out, rank) * fall).reshape(out, rank, *[1] * len(kernel)).to(dtype)
        state[f"{name}.alpha"] = torch.tensor(alpha)
    about = {"ss_network_dim": str(rank), "ss_network_alpha": f"{alpha:g}", "ss_tag": "ink", "sshs_model_hash": "1"}
    save_file(state, path, about)
    return path


def products(source):
    """The change of each layer by its name in the file."""
    return {e.name: e.update((e.sizes()[0], *e.sizes()[1])).flatten(1) for e in read(source).entries}


def near(ours, theirs, **how):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], **{"rtol": 1e-4, "atol": 1e-5, **how})


# --- merge


def plain():
    return nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 6), nn.Conv2d(4, 6, 3), nn.Conv2d(6, 4, 1), nn.Embedding(9, 6))


@pytest.fixture(scope="module")
def pefts(tmp_path_factory):
    """A model with two adapters of PEFT's, which are in folders as well."""
    torch.manual_seed(0)
    base = plain()
    targets = {"target_modules": ["0", "1", "2", "3", "4"]}
    model = peft.get_peft_model(base, peft.LoraConfig(r=3, lora_alpha=2, **targets), adapter_name="ink")
    model.add_adapter("film", peft.LoraConfig(r=3, lora_alpha=6, target_modules=["0", "2", "3", "4"]))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter)
    folder = tmp_path_factory.mktemp("peft")
    model.save_pretrained(folder)
    return model, folder


@pytest.mark.parametrize("change", ["resize", "convert", "merge"])
def test_tensors_without_values_are_refused(change, tmp_path):
    file = {f"0.lora_{half}.weight": torch.empty(size, device="meta") for half, size in (("A", (2, 8)), ("B", (12, 2)))}
    calls = {
        "resize": lambda: fxplug.resize_adapter(file, tmp_path / "out.safetensors", rank=1),
        "convert": lambda: fxplug.convert_adapter(file, tmp_path / "out.safetensors", as_="kohya", model=plain()),
        "merge": lambda: fxplug.merge_adapters([(file, 0.5), (file, 0.5)], tmp_path / "out.safetensors"),
    }
    with pytest.raises(fxplug.ArtifactError, match="its (down|up) is on the meta device and has no values"):
        calls[change]()
    assert not list(tmp_path.iterdir())


HOWS = [(how, "total") for how in ("linear", "cat", "svd", *SPARSE, *(f"{each}_svd" for each in SPARSE))]
HOWS += [("ties", "frequency"), ("dare_ties_svd", "frequency")]


@pytest.mark.parametrize(("how", "sign"), HOWS)
def test_merges_are_those_of_peft(how, sign, pefts, tmp_path, monkeypatch):
    model, folder = pefts
    options = {"density": 0.6} if how.removesuffix("_svd") in SPARSE else {}
    if "ties" in how:
        options["majority_sign_method"] = sign
    inject = type(model.base_model).inject_adapter

    def seeded(self, *args, **kwargs):  # new layers draw numbers, before those of DARE are drawn
        inject(self, *args, **kwargs)
        torch.manual_seed(3)

    monkeypatch.setattr(type(model.base_model), "inject_adapter", seeded)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.add_weighted_adapter(["ink", "film"], [0.8, -0.5], f"{how}-{sign}", combination_type=how, **options)
    layers = {f"base_model.model.{n}": model.base_model.model.get_submodule(n) for n in "01234"}
    wanted = {name: layer.get_delta_weight(f"{how}-{sign}").detach().flatten(1) for name, layer in layers.items()}
    wanted["base_model.model.4"] = wanted["base_model.model.4"].T  # an embedding's, of which ours is transposed
    pairs = {folder / "ink": 0.8, folder / "film": -0.5}
    done = fxplug.merge_adapters(pairs, tmp_path / "both", how=how, seed=3, sign=sign, density=options.get("density"))
    entries = read(tmp_path / "both").entries
    near({e.name: e.scale * (e.tensors["up"].flatten(1) @ e.tensors["down"].flatten(1)) for e in entries}, wanted)
    assert done.as_ == "peft" and set(done.ranks.values()) == ({3, 6} if how == "cat" else {3})
    again = peft.PeftModel.from_pretrained(plain(), tmp_path / "both")
    delta = again.base_model.model[2].get_delta_weight("default").detach().flatten(1)
    torch.testing.assert_close(delta, wanted["base_model.model.2"], rtol=1e-4, atol=1e-5)


def test_dare_draws_in_the_order_of_the_model(tmp_path, monkeypatch):
    """As PEFT does; files have their tensors by the alphabet."""
    torch.manual_seed(0)
    base = nn.Sequential(OrderedDict(late=nn.Linear(8, 12), early=nn.Linear(12, 6)))
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=3, target_modules=["late", "early"]), adapter_name="ink")
    model.add_adapter("film", peft.LoraConfig(r=3, target_modules=["late", "early"]))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    inject = type(model.base_model).inject_adapter
    monkeypatch.setattr(type(model.base_model), "inject_adapter", lambda *a, **o: (inject(*a, **o), torch.manual_seed(3)))
    model.add_weighted_adapter(["ink", "film"], [0.8, 0.5], "both", combination_type="dare_linear", density=0.5)
    pairs = {tmp_path / "ink": 0.8, tmp_path / "film": 0.5}
    fxplug.merge_adapters(pairs, tmp_path / "both", how="dare_linear", density=0.5, seed=3, model=base, as_="peft")
    wanted = {name: model.base_model.model.get_submodule(name).get_delta_weight("both").detach() for name in ("late", "early")}
    near(of(tmp_path / "both", base), wanted)


def test_merges_are_those_of_kohya(tmp_path):
    """networks/merge_lora.py with and without --concat, and svd_merge_lora.py."""
    files = [kohya(tmp_path / "a.safetensors", alpha=2.0), kohya(tmp_path / "b.safetensors", seed=1, alpha=8.0)]
    ratios, states = (0.7, -0.4), [load_file(file) for file in files]
    wanted, concat, whole = {}, {}, {}
    for name in SHAPES:
        halves = {"up": [], "down": []}
        for state, ratio in zip(states, ratios, strict=True):
            scale = math.sqrt(state[f"{name}.alpha"].item() / 2.0) * ratio
            for half in halves:
                value = state[f"{name}.lora_{half}.weight"].flatten(1)
                halves[half].append(value * (abs(scale) if half == "up" else scale))
        wanted[name] = 0.5 * sum(halves["up"]) @ sum(halves["down"])
        concat[name] = 0.5 * torch.cat(halves["up"], 1) @ torch.cat(halves["down"])
        whole[name] = sum(ratio * products(file)[name] for file, ratio in zip(files, ratios, strict=True))
    out = tmp_path / "out.safetensors"
    pairs = dict(zip(files, ratios, strict=True))
    fxplug.merge_adapters(pairs, out, how="kohya")
    near(products(out), wanted)
    assert load_file(out)["lora_unet_a.alpha"] == 2.0
    assert metadata(out)["ss_tag"] == "ink" and "sshs_model_hash" not in metadata(out)
    fxplug.merge_adapters({files[0]: 0.7**2, files[1]: -(0.4**2)}, out, how="cat")
    near(products(out), concat)
    fxplug.merge_adapters(pairs, out, how="svd", rank=2, clamp=0.99)
    clamped = {}
    for name, value in whole.items():
        u, s, v = torch.linalg.svd(value, full_matrices=False)
        u, v = u[:, :2] * s[:2], v[:2]
        most = torch.quantile(torch.cat([u.flatten(), v.flatten()]), 0.99)
        clamped[name] = u.clamp(-most, most) @ v.clamp(-most, most)
    some = products(out)
    assert {name: value.shape for name, value in some.items()} == {name: value.shape for name, value in clamped.items()}
    done = fxplug.merge_adapters(pairs, out, how="svd")
    near({name: torch.linalg.matrix_norm(whole[name] - value) for name, value in products(out).items()},
         {name: torch.linalg.matrix_norm(whole[name]) * lacks for name, lacks in done.errors.items()}, atol=1e-4)  # fmt: skip


def test_files_of_several_layouts_are_merged_on_the_paths_of_a_model(tmp_path):
    new = tuned("lora", at="blocks.**")
    places = [tmp_path / "peft", tmp_path / "fxplug.safetensors"]
    for place in places:
        fxplug.save_adapter(new, place, as_=place.stem)
    out = tmp_path / "out.safetensors"
    fxplug.merge_adapters([(places[0], 0.5), (places[1], 0.25)], out, how="cat", model=net().model, as_="lycoris")
    wanted = {f"lycoris_{name.replace('.', '_')}": 0.75 * value for name, value in of(places[0], net().model).items()}
    near(products(out), wanted)


def test_whole_changes_and_other_factors_are_merged_as_what_they_change(tmp_path):
    torch.manual_seed(0)
    states = []
    for n in range(2):
        loha = {f"lora_unet_a.hada_w{i}_{j}": torch.randn(*size) for i in "12" for j, size in (("a", (12, 2)), ("b", (2, 8)))}
        states.append({**loha, "lora_unet_a.alpha": torch.tensor(1.0), "lora_unet_n.w_norm": torch.randn(5)})
        save_file(states[-1], tmp_path / f"{n}.safetensors")
    pairs = {tmp_path / "0.safetensors": 0.5, tmp_path / "1.safetensors": 2.0}
    fxplug.merge_adapters(pairs, tmp_path / "out.safetensors")
    torch.testing.assert_close(
        load_file(tmp_path / "out.safetensors")["lora_unet_n.w_norm"],
        0.5 * states[0]["lora_unet_n.w_norm"] + 2 * states[1]["lora_unet_n.w_norm"],
    )
    factors = [[state[f"lora_unet_a.hada_w{i}_a"] @ state[f"lora_unet_a.hada_w{i}_b"] for i in "12"] for state in states]
    deltas = [0.5 * first * second for first, second in factors]
    (made,) = (e for e in read(tmp_path / "out.safetensors").entries if e.kind == "lora")
    torch.testing.assert_close(made.update((12, 8)), 0.5 * deltas[0] + 2 * deltas[1], rtol=1e-4, atol=1e-4)
    with pytest.raises(ArtifactError, match="'lora_unet_a' is loha, which 'linear' cannot merge, which 'cat'"):
        fxplug.merge_adapters(pairs, tmp_path / "out.safetensors", how="linear")


WRONG = [
    ({"how": "tis"}, r"no merge method 'tis' \(did you mean 'ties'\?\)"),
    ({"how": "ties"}, "'ties' takes a density above 0 and at most 1, .* not None"),
    ({"how": "ties", "density": 0}, "not 0"),
    ({"how": "cat", "density": 0.5}, "'cat' takes no density, not 0.5"),
    ({"how": "cat", "rank": 4}, "rank must be a whole number, 1 or more, for methods that are svd .*, and this is cat; not 4"),
    ({"how": "svd", "clamp": 2}, "clamp must be a quantile"),
    ({"how": "ties", "density": 0.5, "sign": "most"}, "'total' or 'frequency'"),
]


@pytest.mark.parametrize(("options", "text"), WRONG)
def test_merges_that_are_none(options, text, tmp_path):
    with pytest.raises(SpecError, match=text):
        fxplug.merge_adapters({kohya(tmp_path / "a.safetensors"): 1}, tmp_path / "out.safetensors", **options)
    assert not (tmp_path / "out.safetensors").exists()


def test_what_cannot_be_added_is_refused(tmp_path):
    a, b = kohya(tmp_path / "a.safetensors"), kohya(tmp_path / "b.safetensors", rank=2)
    out = tmp_path / "out.safetensors"
    with pytest.raises(ArtifactError, match="'lora_unet_a' has the ranks 4, 2, and 'linear' needs equal ranks"):
        fxplug.merge_adapters({a: 1, b: 1}, out, how="linear")
    c = kohya(tmp_path / "c.safetensors", shapes={"lora_unet_a": (12, 9)})
    with pytest.raises(ArtifactError, match=r"'lora_unet_a' has the shape \[1, 8\] in one file and \[1, 9\] in another"):
        fxplug.merge_adapters({a: 1, c: 1}, out)
    for pairs in ({}, {a: float("nan")}, {a: True}):
        with pytest.raises(SpecError, match="nothing to merge|must be a finite number"):
            fxplug.merge_adapters(pairs, out)
    dora = {**load_file(a), "lora_unet_a.dora_scale": torch.ones(12, 1)}
    save_file(dora, tmp_path / "dora.safetensors")
    for call in (lambda f: fxplug.merge_adapters({f: 1}, out), lambda f: fxplug.resize_adapter(f, out, rank=1)):
        with pytest.raises(ArtifactError, match="'lora_unet_a' is dora, not only a low-rank product: merge it into its model"):
            call(tmp_path / "dora.safetensors")
    assert not out.exists()


# --- resize


SHARES = [("energy", 0.9), ("energy", 0.999), ("cumulative", 0.8), ("ratio", 3.0), ("ratio", 1.0), ("energy", 1.0)]


@pytest.mark.parametrize(("share", "value"), SHARES)
def test_a_layer_gets_the_lowest_rank_that_keeps_the_share(share, value, tmp_path):
    """One less than kohya's script gives it, which adds one twice."""
    file, out = kohya(tmp_path / "a.safetensors"), tmp_path / "out.safetensors"
    done = fxplug.resize_adapter(file, out, **{share: value})
    for name, whole in products(file).items():
        s = torch.linalg.svdvals(whole / 0.5)
        if share == "ratio":
            index = int((s > s[0] / value).sum()) - 1
        else:
            s_ = s.square() if share == "energy" else s
            index = int(torch.searchsorted(s_.cumsum(0) / s_.sum(), value))
        rank = max(0, min(index, len(s) - 1)) + 1
        assert done.ranks[name] == min(rank, 4)
        u, s, v = torch.linalg.svd(whole, full_matrices=False)
        torch.testing.assert_close(products(out)[name], u[:, :rank] * s[:rank] @ v[:rank], rtol=1e-4, atol=1e-5)
        assert done.errors.get(name, 0) == pytest.approx((s[rank:].norm() / s.norm()).item(), abs=1e-5)
        assert load_file(out)[f"{name}.alpha"] == pytest.approx(0.5 * done.ranks[name])


def test_what_has_no_higher_rank_stays_to_the_bit(tmp_path):
    file, out = kohya(tmp_path / "a.safetensors", dtype=torch.float16), tmp_path / "out.safetensors"
    state = load_file(file) | {"lora_unet_n.w_norm": torch.randn(5)}
    state |= {"lora_unet_big.lora_down.weight": torch.randn(6, 8), "lora_unet_big.lora_up.weight": torch.randn(8, 6)}
    save_file(state, file, {"ss_network_dim": "4", "ss_network_alpha": "2", "modelspec.hash_sha256": "0x1"})
    fxplug.resize_adapter(file, out, rank=4)
    made = load_file(out)
    assert made["lora_unet_big.lora_down.weight"].shape == (4, 8)
    assert all(torch.equal(made[key], value) for key, value in state.items() if "big" not in key)
    assert "modelspec.hash_sha256" not in metadata(out) and metadata(out)["ss_network_dim"] == "4"
    fxplug.resize_adapter(file, out, rank=2, dtype=torch.bfloat16)
    assert load_file(out)["lora_unet_a.lora_down.weight"].dtype == torch.bfloat16 and metadata(out)["ss_network_dim"] == "2"


@pytest.mark.parametrize("as_", ["peft", "diffusers", "kohya", "comfy", "lycoris", "fxplug"])
def test_a_file_keeps_its_layout(as_, tmp_path):
    new = tuned("lora", at="blocks.**")
    place = tmp_path / "ink"
    file = fxplug.save_adapter(new, place, as_=as_).path
    done = fxplug.resize_adapter(file, tmp_path / "out", rank=2)
    assert set(done.ranks.values()) == {2} and done.as_ == as_
    ours, theirs = of(done.path, net().model), of(file, net().model)
    for path, value in theirs.items():
        u, s, v = torch.linalg.svd(value)
        torch.testing.assert_close(ours[path], u[:, :2] * s[:2] @ v[:2], rtol=1e-4, atol=1e-5)
    if as_ == "peft":  # whose names of layers mean these alone
        gm = peft.PeftModel.from_pretrained(type(net().model)(), done.path)
        delta = gm.base_model.model.blocks[0]["ff"].get_delta_weight("default").detach()
        torch.testing.assert_close(delta, ours["blocks.0.ff"], rtol=1e-4, atol=1e-5)


def test_sizes_that_are_none(tmp_path):
    file = kohya(tmp_path / "a.safetensors")
    both = {"energy": 0.9, "ratio": 2}
    for options in ({}, {"rank": 0}, {"rank": True}, {"energy": 0}, {"energy": 1.5}, {"ratio": 0.5}, both):
        with pytest.raises(SpecError, match="give rank|rank must be a whole number|energy must be a share|ratio must be a "
                                            "number"):
            fxplug.resize_adapter(file, tmp_path / "out.safetensors", **options)


# --- convert


def of(source, model):
    """The change of each layer of a model by a file."""
    shapes = {path: layer.shape for path, layer in list_layers(model).items()}
    return {path: entry.update(shapes[path]) for path, entry in fit(read(source), shapes).check().placed.items()}


def flux():
    return diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=12,
        pooled_projection_dim=10, guidance_embeds=True, axes_dims_rope=(2, 2, 4),
    )  # fmt: skip


def of_unet(model, path, rank=2):
    """A file of diffusers' for some layers of a UNet, and for one of its text encoder."""
    torch.manual_seed(0)
    state = {}
    for name, layer in model.named_modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)) and ("attn" in name or "resnets.0" in name):
            state[f"unet.{name}.lora_A.weight"] = torch.randn(rank, *layer.weight.shape[1:])
            state[f"unet.{name}.lora_B.weight"] = torch.randn(len(layer.weight), rank, *[1] * (layer.weight.dim() - 2))
    text = "text_encoder.text_model.encoder.layers.0.self_attn.q_proj"
    state |= {f"{text}.lora_A.weight": torch.randn(rank, 8), f"{text}.lora_B.weight": torch.randn(8, rank)}
    save_file(state, path)
    return path


@pytest.mark.parametrize("as_", ["kohya", "comfy", "diffusers"])
@pytest.mark.parametrize("kind", ["sd15", "sdxl"])
def test_names_are_turned_there_and_back(as_, kind, tmp_path):
    model = {"sd15": unets.sd15_model, "sdxl": unets.sdxl_model}[kind]()
    first = of_unet(model, tmp_path / "first.safetensors")
    done = fxplug.convert_adapter(first, tmp_path / "made.safetensors", as_=as_, model=model)
    text = f"{'lora_te_' if kind == 'sd15' else 'lora_te1_'}text_model_encoder_layers_0_self_attn_q_proj.lora_down.weight"
    assert as_ != "kohya" or text in load_file(done.path)
    near(of(done.path, model), of(first, model))
    back = fxplug.convert_adapter(done.path, tmp_path / "back.safetensors", as_="diffusers", model=model)
    ours, theirs = load_file(back.path), load_file(first)
    assert ours.keys() == theirs.keys() and all(torch.equal(value, theirs[key]) for key, value in ours.items())


@pytest.mark.parametrize("as_", ["kohya", "comfy"])
def test_layers_that_are_one_there_are_joined_in_its_order(as_, tmp_path):
    """Whatever the order and the ranks that the file has them in: safetensors sorts k before q."""
    model = flux()
    torch.manual_seed(0)
    state = {}
    for n, (path, layer) in enumerate(sorted(list_layers(model).items())):
        state[f"transformer.{path}.lora_A.weight"] = torch.randn(1 + n % 3, layer.shape[1])
        state[f"transformer.{path}.lora_B.weight"] = torch.randn(layer.shape[0], 1 + n % 3)
    done = fxplug.convert_adapter(state, tmp_path / "out.safetensors", as_=as_, model=model)
    near(of(done.path, model), of(state, model))


def test_the_second_transformer_stays_the_second(tmp_path):
    """As in files for Wan 2.2, whose two transformers are of one kind; other tools have a file for each."""
    model = flux()
    state = {}
    for part, value in (("transformer", 1.0), ("transformer_2", 2.0)):
        halves = {"A": torch.ones(1, 4), "B": torch.full((16, 1), value)}
        state |= {f"{part}.x_embedder.lora_{half}.weight": tensor for half, tensor in halves.items()}
    both = fxplug.convert_adapter(state, tmp_path / "both.safetensors", as_="diffusers", model=model)
    found = load_file(both.path)
    assert found.keys() == state.keys() and all(torch.equal(value, state[key]) for key, value in found.items())
    for as_ in ("kohya", "comfy", "lycoris", "peft"):
        with pytest.raises(SpecError, match="is for one model, and the file has transformer, transformer_2: give one of them "
                                            "as part="):
            fxplug.convert_adapter(state, tmp_path / as_, as_=as_, model=model)
    second = fxplug.convert_adapter(state, tmp_path / "second.safetensors", as_="comfy", model=model, part="transformer_2")
    assert torch.equal(load_file(second.path)["diffusion_model.img_in.lora_up.weight"], torch.full((16, 1), 2.0))
    second = {key: value for key, value in state.items() if "_2" in key}
    alone = fxplug.convert_adapter(second, tmp_path / "alone.safetensors", as_="diffusers", model=model)
    assert load_file(alone.path).keys() == second.keys()


def test_the_second_text_encoder_of_flux_is_t5(tmp_path):
    name = "lora_te3_encoder_block_0_layer_0_SelfAttention_q"
    shapes = {"lora_unet_single_blocks_3_linear2": (3072, 15360), name: (8, 8)}
    file = kohya(tmp_path / "a.safetensors", rank=1, shapes=shapes)
    done = fxplug.convert_adapter(file, tmp_path / "out.safetensors", as_="diffusers", family="flux")
    assert "text_encoder_2.encoder.block.0.layer.0.SelfAttention.q.lora_A.weight" in load_file(done.path)
    for as_, key in (("kohya", name), ("comfy", "text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q")):
        back = fxplug.convert_adapter(done.path, tmp_path / "back.safetensors", as_=as_, family="flux")
        assert f"{key}.lora_down.weight" in load_file(back.path)


def test_peft_puts_a_converted_adapter_on_its_layers_alone(tmp_path):
    halves = {"transformer.0.lora_A.weight": torch.ones(1, 8), "transformer.0.lora_B.weight": torch.ones(8, 1)}
    save_file(halves, tmp_path / "a.safetensors")
    done = fxplug.convert_adapter(tmp_path / "a.safetensors", tmp_path / "peft", as_="peft")
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)))
    found = peft.PeftModel.from_pretrained(model, done.path)
    assert [name for name, _ in found.named_parameters() if "lora_A" in name] == ["base_model.model.0.lora_A.default.weight"]


def peft_of(config, folder):
    """A trained adapter of PEFT's in a folder, and what its model gives."""
    torch.manual_seed(0)
    model = peft.get_peft_model(nn.Sequential(OrderedDict(body=nn.Linear(8, 12), head=nn.Linear(12, 5))), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model(torch.ones(1, 8)).detach()


@pytest.mark.parametrize("bias", ["none", "lora_only"])
def test_layers_that_peft_saved_whole_go_along(bias, tmp_path):
    config = peft.LoraConfig(r=3, target_modules=["body"], modules_to_save=["head"], bias=bias)
    wanted = peft_of(config, tmp_path / "first")
    fxplug.resize_adapter(tmp_path / "first", tmp_path / "resized", rank=8)
    fxplug.convert_adapter(tmp_path / "first", tmp_path / "converted", as_="peft")
    for name in ("resized", "converted"):
        torch.manual_seed(0)
        base = nn.Sequential(OrderedDict(body=nn.Linear(8, 12), head=nn.Linear(12, 5)))
        torch.testing.assert_close(peft.PeftModel.from_pretrained(base, tmp_path / name)(torch.ones(1, 8)), wanted)
    with pytest.raises(ArtifactError, match="diffusers cannot represent . of . layers: .*'head.bias' is a whole parameter, "):
        fxplug.convert_adapter(tmp_path / "first", tmp_path / "other", as_="diffusers")


@pytest.mark.parametrize(
    "config, why",
    [
        (peft.OFTConfig(oft_block_size=4, target_modules=["body"]), "'body' is oft, which cannot be converted without"),
        (peft.IA3Config(target_modules=["body"], feedforward_modules=[]), "'body' is gate, which cannot be converted without"),
        (peft.LoraConfig(target_modules=["body"], bias="lora_only"), "'body.bias' is a whole parameter, which "),
    ],
    ids=["oft", "ia3", "biases"],
)
def test_what_no_file_has_without_its_model_is_refused(config, why, tmp_path):
    peft_of(config, tmp_path / "first")
    for as_ in ("diffusers", "fxplug", *(["peft"] if "bias" not in why else [])):
        with pytest.raises(ArtifactError, match=why):
            fxplug.convert_adapter(tmp_path / "first", tmp_path / as_, as_=as_)


def test_one_folder_of_peft_is_for_one_model(tmp_path):
    model = unets.sd15_model()
    first = of_unet(model, tmp_path / "first.safetensors")
    with pytest.raises(SpecError, match="a folder of PEFT is for one model, and the file has unet, text_encoder: give one of "
                                        "them as part="):
        fxplug.convert_adapter(first, tmp_path / "peft", as_="peft", model=model)
    done = fxplug.convert_adapter(first, tmp_path / "peft", as_="peft", model=model, part="unet")
    near(of(done.path, model), of(first, model))
    peft.PeftModel.from_pretrained(unets.sd15_model(), done.path)


@pytest.mark.slow
def test_paths_of_the_model_need_none(tmp_path):
    new = tuned("lora", at="blocks.**")
    file = fxplug.save_adapter(new, tmp_path / "peft", as_="peft").path
    for as_ in ("diffusers", "lycoris", "fxplug", "peft"):
        done = fxplug.convert_adapter(file, tmp_path / f"made-{as_}", as_=as_)
        near(of(done.path, net().model), of(file, net().model))
    with pytest.raises(ArtifactError, match="fits none of sd1, .* at their published sizes: give the model"):
        fxplug.convert_adapter(file, tmp_path / "kohya", as_="kohya")
    with pytest.raises(SpecError, match="no model family 'sdx'"):
        fxplug.convert_adapter(file, tmp_path / "kohya", as_="kohya", family="sdx")


PUBLISHED = {
    "sd1": ("lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k", (320, 768),
            "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k"),
    "sdxl": ("lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_k", (640, 2048),
             "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k"),
    "flux": ("lora_unet_single_blocks_3_linear2", (3072, 15360), "transformer.single_transformer_blocks.3.proj_out"),
    "sd3": ("lora_unet_joint_blocks_2_x_block_mlp_fc1", (6144, 1536), "transformer.transformer_blocks.2.ff.net.0.proj"),
}  # fmt: skip


@pytest.mark.parametrize("family", PUBLISHED)
def test_a_family_has_its_published_sizes(family, tmp_path):
    name, shape, theirs = PUBLISHED[family]
    file = kohya(tmp_path / "a.safetensors", rank=1, shapes={name: shape})
    done = fxplug.convert_adapter(file, tmp_path / "out.safetensors", as_="diffusers", family=family)
    assert {key.partition(".lora_")[0] for key in load_file(done.path)} == {theirs}


@pytest.mark.slow
@pytest.mark.parametrize("family", file_layouts.FAMILIES)
def test_a_family_is_told_by_names_and_shapes(family, tmp_path):
    about = file_layouts.read_model(None, family)
    ends = ("attn2.to_k", ".attn.to_q", "attention.to_q", ".norm.linear")
    path, layer = next((path, layer) for path, layer in about.layers.items() if path.endswith(ends))
    part = "unet" if "UNet" in about.classes[0] else "transformer"
    out, inner = layer.shape
    halves = {f"{part}.{path}.lora_A.weight": torch.ones(1, inner), f"{part}.{path}.lora_B.weight": torch.ones(out, 1)}
    save_file(halves, tmp_path / "a.safetensors")
    done = fxplug.convert_adapter(tmp_path / "a.safetensors", tmp_path / "out.safetensors", as_="comfy")
    assert done.layers == (path,)


# --- the command line


def run(*args, code=0):
    done = CliRunner().invoke(app, ["adapters", *map(str, args)], prog_name="fxplug")
    assert done.exit_code == code and "Traceback" not in done.output, done.output
    return done.stdout if not code else done.stderr


def test_verbs(tmp_path):
    a, b = kohya(tmp_path / "a=1.safetensors"), kohya(tmp_path / "b.safetensors", seed=1)
    out = tmp_path / "out.safetensors"
    text = run("resize", a, "--out", out, "--energy", 0.9, "--rank", 2)
    assert "lora_unet_c  rank 2," in text and f"saved in {out}" in text
    run("merge", f"{a}=0.5", b, "--out", out, "--how", "ties", "--density", 0.5)
    wanted = tmp_path / "wanted.safetensors"
    fxplug.merge_adapters({a: 0.5, b: 1.0}, wanted, how="ties", density=0.5)
    near(products(out), products(wanted))
    assert "takes a density" in run("merge", a, "--out", out, "--how", "ties", code=1)
    model = unets.sd15_model()
    model.save_pretrained(tmp_path / "unet")
    first = of_unet(model, tmp_path / "first.safetensors")
    run("convert", first, "--as", "kohya", "--out", out, "--model", tmp_path / "unet")
    near(of(out, model), of(first, model))
    assert "fits none of" in run("convert", a, "--as", "diffusers", "--out", out, code=1)


def test_what_imports_log_is_not_shown(tmp_path, monkeypatch, caplog):
    """diffusers' classes log about torchao and bitsandbytes, when they are first imported."""

    def logs(*args, **options):
        logging.getLogger("diffusers").warning("Unable to import torchao")
        raise SpecError("so far")

    monkeypatch.setattr(fxplug, "convert_adapter", logs)
    assert "so far" in run("convert", tmp_path, "--as", "peft", "--out", tmp_path / "out", code=1)
    assert not caplog.records and logging.root.manager.disable == logging.NOTSET


@pytest.mark.parametrize("given", [["a.safetensors", "b.safetensors"], [("a.safetensors", 1.0, 2)], [3], [None], [[]], [""]])
def test_files_to_merge_come_with_weights(given, tmp_path):
    with pytest.raises(SpecError, match="merge_adapters takes files with their weights"):
        fxplug.merge_adapters(given, tmp_path / "out.safetensors")
