"""Adapter files: what peft, diffusers and LyCORIS write is read as they mean it, and placed on the layers of a graph."""

from __future__ import annotations

import copy
import json
import re
from functools import cache
from pathlib import Path

import peft
import pytest
import torch
from lycoris import LycorisNetwork, create_lycoris
from safetensors.torch import load_file, save_file
from torch import nn

import fxplug
from fxplug.adapters import files
from fxplug.adapters.layer_names import map_first_names
from fxplug.core.errors import ArtifactError, SpecError

ASSETS = Path(__file__).parents[2] / "shared" / "assets" / "adapters"
NEAR = {"rtol": 1e-4, "atol": 1e-5}


class Net(nn.Module):
    """One layer of each kind that an adapter may change."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.ModuleDict({"to_q": nn.Linear(8, 8), "ff": nn.Linear(8, 12)}) for _ in range(2))
        self.conv = nn.Conv2d(12, 6, 3, padding=1)
        self.point = nn.Conv2d(6, 4, 1)

    def forward(self, indices):
        x = self.words(indices)
        for block in self.blocks:
            x = block["ff"](x + block["to_q"](x))[..., :8] + x
        x = torch.cat([x, x[..., :4]], -1)
        return self.point(self.conv(x.movedim(-1, 1)))


def layers(model):
    return {n: tuple(m.weight.shape) for n, m in model.named_modules() if isinstance(getattr(m, "weight", None), nn.Parameter)}


SHAPES = layers(Net())


def randomised(model, *names):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in names):
                parameter.copy_(torch.randn_like(parameter))


def pairs(*names, rank=2, shape=(8, 8), form="{}.lora_{}.weight", halves=("A", "B")):
    """A state dict with a LoRA for each layer."""
    made = {}
    for name in names:
        made[form.format(name, halves[0])] = torch.randn(rank, *shape[1:])
        made[form.format(name, halves[1])] = torch.randn(shape[0], rank)
    return made


# --- written by others


LINEAR = r"blocks\..\.(to_q|ff)|conv"
TARGETS = f"{LINEAR}|words|point"


def peft_config(kind):
    common = {"target_modules": TARGETS, "r": 4}
    patterns = {"rank_pattern": {"blocks.0.to_q": 3, "conv": 6}, "alpha_pattern": {"to_q": 5, "^conv": 7}}
    if kind in ("loha", "loha with cores"):
        return peft.LoHaConfig(**common | {"target_modules": LINEAR}, alpha=6, use_effective_conv2d="cores" in kind)
    if kind.startswith("lokr"):
        made = {"decompose_both": "both" in kind, "use_effective_conv2d": "cores" in kind}
        return peft.LoKrConfig(**common | {"target_modules": LINEAR, "r": 2}, alpha=6, **patterns, **made)
    dora = {"target_modules": LINEAR, "use_dora": True} if kind == "dora" else {}
    return peft.LoraConfig(**common | dora, lora_alpha=9, use_rslora=kind == "rslora", **patterns if kind == "lora" else {})


@pytest.mark.parametrize(
    "kind", ["lora", "rslora", "dora", "loha", "loha with cores", "lokr", "lokr of both", "lokr with cores"]
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # peft's advice on its own options
def test_a_folder_that_peft_wrote(kind, tmp_path):
    model = peft.get_peft_model(Net(), peft_config(kind))
    randomised(model, "lora_", "hada_", "lokr_")
    model.save_pretrained(tmp_path)
    found = files.fit(files.read(tmp_path), SHAPES).check()
    tuned = {n.removeprefix("base_model.model."): m for n, m in model.named_modules() if hasattr(m, "get_delta_weight")}
    assert set(found.placed) == set(tuned) and found.missing == () and not found.others
    for path, entry in found.placed.items():
        assert entry.kind == kind.partition(" ")[0].replace("rs", "")
        torch.testing.assert_close(magnitudeless(entry).update(SHAPES[path]), tuned[path].get_delta_weight("default"), **NEAR)
        if kind == "dora":
            magnitude = tuned[path].lora_magnitude_vector["default"].weight
            assert torch.equal(entry.tensors["magnitude"], magnitude)
    assert found.placed["conv"].rank == (6 if kind == "lora" else 2 if kind.startswith("lokr") else 4)


def magnitudeless(entry):
    return files.Entry(**vars(entry) | {"kind": "lora"}) if entry.kind == "dora" else entry


def test_peft_adapters_by_name_and_without_a_configuration():
    model = peft.get_peft_model(Net(), peft.LoraConfig(target_modules=["to_q", "ff"], r=4, lora_alpha=8), adapter_name="ink")
    model.add_adapter("film", peft.LoraConfig(target_modules=["to_q", "ff"], r=2, lora_alpha=8))
    state = {key: value for key, value in model.state_dict().items() if "lora_" in key}
    with pytest.raises(ArtifactError, match="several adapters: give one of film, ink"):
        files.read(state)
    with pytest.raises(ArtifactError, match=r"has no adapter 'inc' \(did you mean 'ink'\?\); it has film, ink"):
        files.read(state, adapter="inc")
    film = files.read(state, adapter="film")
    assert {(e.rank, e.scale) for e in film.entries} == {(2, 1.0)}
    film = files.read(state, adapter="film", config=model.peft_config["film"].to_dict())
    assert {(e.rank, e.scale) for e in film.entries} == {(2, 4.0)}
    assert len(files.fit(film, SHAPES).check().placed) == 4


ALGOS = {
    "locon": {"algo": "locon"},
    "locon with cores": {"algo": "locon", "use_tucker": True},
    "locon of rs": {"algo": "locon", "rs_lora": True},
    "dora": {"algo": "locon", "dora_wd": True},
    "loha": {"algo": "loha"},
    "loha with cores": {"algo": "loha", "use_tucker": True},
    "lokr": {"algo": "lokr"},
    "lokr of both": {"algo": "lokr", "decompose_both": True},
    "lokr with cores": {"algo": "lokr", "use_tucker": True},
    "lokr of full matrices": {"algo": "lokr", "full_matrix": True},
}


@pytest.mark.parametrize("kind", ALGOS)
def test_a_file_that_lycoris_wrote(kind, tmp_path, capsys):
    model = Net()
    plain = copy.deepcopy(model)
    LycorisNetwork.apply_preset({"target_module": ["Linear", "Conv2d"], "target_name": []})
    rank = 1 if "lokr" in kind else 2
    options = {"linear_dim": rank, "linear_alpha": 3.0, "conv_dim": rank, "conv_alpha": 5.0}
    network = create_lycoris(model, 1.0, **options, **ALGOS[kind])
    network.apply_to()
    randomised(network, "lora_", "hada_", "lokr_", "dora_scale")
    network.save_weights(str(tmp_path / "a.safetensors"), torch.float32, {"made": "by lycoris"})
    found = files.fit(files.read(tmp_path / "a.safetensors"), SHAPES).check()
    assert set(found.placed) == set(SHAPES) - {"words"}
    for path, entry in found.placed.items():
        assert entry.kind == kind.partition(" ")[0].replace("locon", "lora")
        shape, layer = SHAPES[path], plain.get_submodule(path)
        same = magnitudeless(entry).as_lora(shape)
        assert same.tensors["down"].shape == (same.rank, *shape[1:]) and same.tensors["up"].shape[:2] == (shape[0], same.rank)
        with torch.no_grad():
            weight = layer.weight + magnitudeless(entry).update(shape)
            if kind == "dora":
                norm = weight.flatten(1).norm(dim=1)
                weight *= (entry.tensors["magnitude"].flatten() / norm).view(-1, *[1] * (len(shape) - 1))
            layer.weight.copy_(weight)
        x = torch.randn(2, shape[1], *[5] * (len(shape) - 2))
        torch.testing.assert_close(model.get_submodule(path)(x), layer(x), **NEAR)


def test_files_that_diffusers_wrote(tmp_path):
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, cross_attention_dim=8, attention_head_dim=4,
        norm_num_groups=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    shapes = layers(model)
    model.add_adapter(peft.LoraConfig(r=2, lora_alpha=6, target_modules=["to_q", "to_out.0", "conv1"]))
    randomised(model, "lora_")
    model.save_lora_adapter(tmp_path / "model")
    own = peft.get_peft_model_state_dict(model, adapter_name="default")
    text = {"text_model.encoder.layers.0.mlp.fc1.lora_A.weight": torch.randn(2, 8)}
    text["text_model.encoder.layers.0.mlp.fc1.lora_B.weight"] = torch.randn(8, 2)
    about = {"unet_lora_adapter_metadata": {"r": 2, "lora_alpha": 6, "alpha_pattern": {}}}
    StableDiffusionPipeline.save_lora_weights(tmp_path / "pipe", own, text_encoder_lora_layers=text, **about)
    for folder in ("model", "pipe"):
        found = files.fit(files.read(tmp_path / folder), shapes).check()
        assert len(found.placed) == sum(path.endswith(("to_q", "to_out.0", "conv1")) for path in shapes) > 10
        assert list(found.others) == ([] if folder == "model" else ["text_encoder"])
        for path, entry in found.placed.items():
            assert entry.scale == 3.0
            wanted = model.get_submodule(path).get_delta_weight("default")
            torch.testing.assert_close(entry.update(shapes[path]), wanted, **NEAR)


# --- names


LAYOUTS = {
    "peft": pairs("base_model.model.blocks.0.to_q", "base_model.model.blocks.1.to_q"),
    "peft with adapter": pairs("base_model.model.blocks.0.to_q", form="{}.lora_{}.default.weight"),
    "within a wrapped layer": pairs("base_model.model.blocks.0.base_layer.to_q"),
    "compiled": pairs("base_model.model._orig_mod.blocks.0.to_q"),
    "diffusers": pairs("unet.blocks.0.to_q", "unet.blocks.1.to_q"),
    "diffusers of peft": pairs("base_model.model.transformer.blocks.0.to_q"),
    "diffusers layers": pairs("unet.blocks.0.to_q", form="{}.lora.{}.weight", halves=("down", "up")),
    "diffusers linear layers": pairs("blocks.0.to_q", form="{}.lora_linear_layer.{}.weight", halves=("down", "up")),
    "processors": pairs("unet.blocks.0.processor.to_q_lora", form="{}.{}.weight", halves=("down", "up")),
    "kohya": pairs("lora_unet_blocks_0_to_q", form="{}.lora_{}.weight", halves=("down", "up")),
    "lycoris": pairs("lycoris_blocks_0_to_q", form="{}.lora_{}.weight", halves=("down", "up")),
    "ai-toolkit": pairs("diffusion_model.blocks.0.to_q"),
    "of a wrapper": pairs("net.inner.blocks.0.to_q", "net.inner.blocks.1.ff", shape=(8, 8)) | {
        "net.inner.blocks.1.ff.lora_B.weight": torch.randn(12, 2)
    },
    "kohya of a wrapper": pairs("lora_unet_net_inner_blocks_0_to_q", form="{}.lora_{}.weight", halves=("down", "up")),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_are_found_by_every_kind_of_name(layout):
    state = LAYOUTS[layout]
    found = files.fit(files.read(state), SHAPES).check()
    assert list(found.placed)[0] == "blocks.0.to_q" and len(found.placed) == len(state) // 2
    down, up = state.values() if len(state) == 2 else list(state.values())[:2]
    torch.testing.assert_close(found.placed["blocks.0.to_q"].update((8, 8)), up @ down)


def test_a_graph_of_a_wrapper_takes_the_file_of_what_it_wraps():
    shapes = {f"net.{path}": shape for path, shape in SHAPES.items()}
    found = files.fit(files.read(pairs("unet.blocks.0.to_q")), shapes).check()
    assert list(found.placed) == ["net.blocks.0.to_q"]
    twice = shapes | {f"other.{path}": shape for path, shape in SHAPES.items()}
    with pytest.raises(ArtifactError, match=re.escape("may be 'net.blocks.0.to_q' or 'other.blocks.0.to_q'")):
        files.fit(files.read(pairs("unet.blocks.0.to_q")), twice)


def test_text_encoders_lie_apart():
    text = pairs("lora_te_text_model_encoder_layers_0_mlp_fc1", form="{}.lora_{}.weight", halves=("down", "up"))
    unet = pairs("lora_unet_blocks_0_to_q", form="{}.lora_{}.weight", halves=("down", "up"))
    file = files.read(text | unet)
    assert file.parts == ("text_encoder", "unet")
    found = files.fit(file, SHAPES).check()
    assert list(found.placed) == ["blocks.0.to_q"] and list(found.others) == ["text_encoder"]
    encoder = {"encoder.layers.0.mlp.fc1": (8, 8), "encoder.layers.0.mlp.fc2": (8, 8)}
    found = files.fit(file, encoder, part="text_encoder").check()
    assert list(found.placed) == ["encoder.layers.0.mlp.fc1"] and list(found.others) == ["unet"]
    with pytest.raises(ArtifactError, match=r"nothing for 'text_encode' \(did you mean 'text_encoder'\?\); it has text_enc"):
        files.fit(file, SHAPES, part="text_encode")


@pytest.mark.parametrize(
    "names", [("text_encoder.{}", "text_encoder_2.{}"), ("transformer.{}", "transformer_2.{}"), ("lora_te1_{}", "lora_te2_{}")]
)
@pytest.mark.parametrize("other", ["blocks.0.to_q", "blocks.1.to_q"])
def test_two_parts_that_fit_one_graph_are_not_mixed(names, other):
    paths = (path if "." in names[0] else path.replace(".", "_") for path in ("blocks.0.to_q", other))
    first, second = (n.format(path) for n, path in zip(names, paths, strict=True))
    file = files.read(pairs(first, second))
    with pytest.raises(ArtifactError, match=f"several models: give one of '{file.parts[0]}' .1 layers., '"):
        files.fit(file, SHAPES)
    assert files.fit(file, SHAPES, part=file.parts[1]).check().placed[other].part == file.parts[1]
    whole = {f"{part}.{path}": shape for part in file.parts for path, shape in SHAPES.items()}
    if "." in first:
        assert len(files.fit(file, whole).check().placed) == 2, "a graph of both has room for both"


def test_a_second_part_is_not_mixed_with_names_without_one():
    file = files.read(pairs("blocks.0.to_q", "transformer_2.blocks.1.to_q"))
    with pytest.raises(ArtifactError, match="give one of '' .without such a name, 1 layers., 'transformer_2' .1 layers."):
        files.fit(file, SHAPES)
    assert list(files.fit(file, SHAPES, part="").check().placed) == ["blocks.0.to_q"]
    first = files.read(pairs("blocks.0.to_q", "transformer.blocks.1.to_q"))
    assert len(files.fit(first, SHAPES).check().placed) == 2, "names without a part are those of the first"


def test_what_begins_otherwise_is_not_put_into_one_model():
    file = files.read(pairs("high_noise.blocks.0.to_q", "low_noise.blocks.1.to_q"))
    with pytest.raises(ArtifactError, match="2 of 2 layers are not in the graph: 'high_noise.blocks.0.to_q'"):
        files.fit(file, SHAPES).check()
    assert len(files.fit(files.read(pairs("any.blocks.0.to_q", "any.blocks.1.to_q")), SHAPES).check().placed) == 2


def test_kohyas_underscores_do_not_tell_two_layers_apart_unless_the_shape_does():
    state = pairs("lora_unet_a_b", form="{}.lora_{}.weight", halves=("down", "up"))
    assert list(files.fit(files.read(state), {"a.b": (8, 8), "a_b": (8, 4)}).placed) == ["a.b"]
    with pytest.raises(ArtifactError, match="'lora_unet_a_b' may be 'a.b' or 'a_b'"):
        files.fit(files.read(state), {"a.b": (8, 8), "a_b": (8, 8)})


@pytest.mark.parametrize("kind", ["lora", "loha", "lokr"])
def test_a_linear_layer_may_be_a_convolution_of_size_1(kind):
    state = {
        "lora": pairs("point"),
        "loha": {f"point.hada_w{n}_{h}": torch.randn(*s) for n in (1, 2) for h, s in (("a", (8, 2)), ("b", (2, 8)))},
        "lokr": {"point.lokr_w1": torch.randn(2, 2), "point.lokr_w2": torch.randn(4, 4)},
    }[kind]
    entry = files.fit(files.read(state), {"point": (8, 8, 1, 1)}).check().placed["point"]
    assert torch.equal(entry.update((8, 8, 1, 1)).flatten(1), files.read(state).entries[0].update((8, 8)))
    if kind == "lora":
        assert entry.tensors["down"].shape == (2, 8, 1, 1) and entry.tensors["up"].shape == (8, 2, 1, 1)
        back = files.read({f"point.lora_{h}.weight": entry.tensors[n] for h, n in (("A", "down"), ("B", "up"))})
        again = files.fit(back, {"point": (8, 8)}).check().placed["point"]
        assert again.tensors["down"].shape == (2, 8)
    if kind == "lokr":
        assert entry.tensors["lokr_w2"].shape == (4, 4, 1, 1)


# --- the first names


@cache
def small_xl():
    from diffusers import UNet2DConditionModel

    down = ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D")
    up = ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D")
    options = {"block_out_channels": (8, 16, 24), "norm_num_groups": 4, "attention_head_dim": 4, "cross_attention_dim": 8}
    conditions = {"addition_embed_type": "text_time", "addition_time_embed_dim": 4, "projection_class_embeddings_input_dim": 32}
    kinds = {"down_block_types": down, "up_block_types": up, "use_linear_projection": True}
    with torch.device("meta"):
        return UNet2DConditionModel(**kinds, **options, **conditions)


@cache
def small_flux():
    from diffusers import FluxTransformer2DModel

    options = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 4, "num_attention_heads": 2, "in_channels": 8}
    conditions = {"joint_attention_dim": 12, "pooled_projection_dim": 6, "guidance_embeds": True, "axes_dims_rope": (2, 2)}
    with torch.device("meta"):
        return FluxTransformer2DModel(**options, **conditions)


XL = {
    "input_blocks_0_0": "conv_in",
    "input_blocks_3_0_op": "down_blocks.0.downsamplers.0.conv",
    "input_blocks_4_0_skip_connection": "down_blocks.1.resnets.0.conv_shortcut",
    "input_blocks_4_1_proj_in": "down_blocks.1.attentions.0.proj_in",
    "input_blocks_8_1_transformer_blocks_0_attn2_to_k": "down_blocks.2.attentions.1.transformer_blocks.0.attn2.to_k",
    "middle_block_1_transformer_blocks_0_attn1_to_out_0": "mid_block.attentions.0.transformer_blocks.0.attn1.to_out.0",
    "middle_block_2_in_layers_2": "mid_block.resnets.1.conv1",
    "output_blocks_2_1_transformer_blocks_0_ff_net_0_proj": "up_blocks.0.attentions.2.transformer_blocks.0.ff.net.0.proj",
    "output_blocks_2_2_conv": "up_blocks.0.upsamplers.0.conv",
    "output_blocks_8_0_emb_layers_1": "up_blocks.2.resnets.2.time_emb_proj",
    "label_emb_0_2": "add_embedding.linear_2",
    "out_2": "conv_out",
}


def test_the_first_names_of_a_unet():
    shapes = layers(small_xl())
    names = map_first_names(shapes)
    assert sorted(path for (path,) in names.values()) == sorted(shapes)  # each layer has one
    assert {old: names[dotted][0] for dotted in names if (old := dotted.replace(".", "_")) in XL} == XL
    state = {}
    for old, path in XL.items():
        out, inner, *kernel = shapes[path]
        state[f"lora_unet_{old}.lora_up.weight"] = torch.ones(out, 2, *[1] * len(kernel))
        state[f"lora_unet_{old}.lora_down.weight"] = torch.ones(2, inner, *kernel)
    found = files.fit(files.read(state), shapes).check()
    assert {entry.name.removeprefix("lora_unet_"): path for path, entry in found.placed.items()} == XL
    some = {path: shape for path, shape in shapes.items() if "attentions" in path}  # of a pass on these alone
    found = files.fit(files.read(state), some, model=lambda: shapes)
    assert list(found.placed) == [path for path in XL.values() if "attentions" in path]
    with pytest.raises(ArtifactError, match="layers have no slots here: 'conv_in', .* \\(apply the pass with at: 'conv_in', "):
        found.check()


def test_the_first_names_are_what_diffusers_makes_of_them():
    from diffusers import FluxPipeline, StableDiffusionXLPipeline

    shapes = layers(small_xl())
    state = {}
    for name, (path,) in map_first_names(shapes).items():
        if "attentions" in path and len(shapes[path]) == 2:
            key = f"lora_unet_{name.replace('.', '_')}"
            state[f"{key}.lora_down.weight"] = torch.randn(2, shapes[path][1])
            state[f"{key}.lora_up.weight"] = torch.randn(shapes[path][0], 2)
            state[f"{key}.alpha"] = torch.tensor(1.0)
    same_as_diffusers(state, shapes, *StableDiffusionXLPipeline.lora_state_dict(dict(state), unet_config=small_xl().config))
    shapes = layers(small_flux())
    state = {}
    for name, paths in map_first_names(shapes).items():
        if re.match("(double|single)(?!.*(linear1|_norm)$)", name):  # their linear1 is of the full width only
            key = f"lora_unet_{name.replace('.', '_')}"
            state[f"{key}.lora_down.weight"] = torch.randn(2, shapes[paths[0]][1])
            state[f"{key}.lora_up.weight"] = torch.randn(sum(shapes[path][0] for path in paths), 2)
            state[f"{key}.alpha"] = torch.tensor(1.0)
    same_as_diffusers(state, shapes, FluxPipeline.lora_state_dict(dict(state)))


def same_as_diffusers(state, shapes, converted, alphas=None):
    theirs = files.fit(files.read({**converted, **(alphas or {})}), shapes).check()
    ours = files.fit(files.read(state), shapes).check()
    assert set(ours.placed) == set(theirs.placed)
    for path, entry in ours.placed.items():
        torch.testing.assert_close(entry.update(shapes[path]), theirs.placed[path].update(shapes[path]), **NEAR)


# --- ours


@pytest.mark.parametrize("name", ["lora", "loha", "lokr", "dora", "lora_weight"])
def test_what_fxplug_saved(name, tmp_path):
    base = Net()
    gm = fxplug.trace(base, (torch.arange(6).view(1, 2, 3),))
    new = fxplug.apply(gm, fxplug.load_pass(name, at="**", rank=3, alpha=2.0, name="style"))
    randomised(new.style, "down", "up", "hada_", "lokr_")
    fxplug.save(new, tmp_path / "out")
    found = files.fit(files.read(tmp_path / "out"), SHAPES).check()
    assert set(found.placed) == set(SHAPES) and set(found.file.parts) == {"style"}
    block = {"lora": "Lora", "loha": "Loha", "lokr": "Lokr", "dora": "Dora", "lora_weight": "LoraWeight"}[name]
    for path, entry in found.placed.items():
        at = new.get_submodule(f"style.{path}.{block}")
        assert entry.scale == pytest.approx(at.scale.item())
        if name == "lora":
            down, up = entry.pair(at.kind)
            assert torch.equal(down, at.down.weight) and torch.equal(up, at.up.weight)
            weight = at.up.weight.flatten(1) @ (at.down.weight.T if at.kind == "Embedding" else at.down.weight.flatten(1))
            wanted = (weight.T if at.kind == "Embedding" else weight).reshape(SHAPES[path]) * at.scale
        else:
            wanted = at.updated(torch.zeros(SHAPES[path])) if name in ("dora", "lora_weight") else at(torch.zeros(SHAPES[path]))
        torch.testing.assert_close(magnitudeless(entry).update(SHAPES[path]), wanted.detach(), **NEAR)


def test_embeddings_turn_between_the_two_ways_to_hold_them():
    state = {"words.lora_embedding_A": torch.randn(3, 11), "words.lora_embedding_B": torch.randn(8, 3)}
    entry = files.fit(files.read(state), SHAPES).check().placed["words"]
    down, up = entry.pair("Embedding")
    assert torch.equal(down, state["words.lora_embedding_A"].T) and torch.equal(up, state["words.lora_embedding_B"])
    down, up = entry.pair("Linear")  # as an update of the weight itself
    torch.testing.assert_close(up @ down, entry.update((11, 8)))


class Square(nn.Module):
    """Layers whose sizes do not tell what is rank and what is width."""

    def __init__(self):
        super().__init__()
        self.words, self.ff, self.conv = nn.Embedding(8, 8), nn.Linear(8, 8), nn.Conv1d(8, 12, 3, groups=2)

    def forward(self, indices):
        return self.conv(self.ff(self.words(indices)).mT)


def test_a_folder_of_slots_is_no_adapter_file(tmp_path):
    base = Square()
    new = fxplug.apply(fxplug.trace(base, (torch.arange(6).view(1, 6),)), fxplug.load_pass("lora", at="**", slots=2))
    fxplug.save(new, tmp_path / "out")
    with pytest.raises(ArtifactError, match="has the slots of the pass 'lora': load its folder with fxplug.load"):
        files.read(tmp_path / "out")


def test_groups_of_a_convolution():
    gm = fxplug.trace(nn.Sequential(nn.Conv2d(8, 12, 3, groups=4)), (torch.randn(1, 8, 5, 5),))
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="0", rank=2))
    randomised(new.lora, "down", "up")
    state = {key: value for key, value in new.state_dict().items() if key.startswith("lora.")}
    entry = files.fit(files.read(state), {"0": (12, 2, 3, 3)}).check().placed["0"]
    new.get_submodule("0").bias.data.zero_()
    x = torch.randn(1, 8, 5, 5)
    wanted = new(x) - new.get_submodule("0")(x)
    found = torch.nn.functional.conv2d(x, entry.update((12, 2, 3, 3)), groups=4)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


# --- bad input


A, B = "blocks.0.to_q.lora_A.weight", "blocks.0.to_q.lora_B.weight"
WRONG = [  # what is put into a file, None for what is taken out, and what is said of it
    ({B: None}, f"'{A}' is an incomplete update: 'blocks.0.to_q' has no up"),
    ({B: torch.full((8, 2), torch.nan)}, f"'{B}' has numbers that are not finite"),
    ({B: torch.ones(8, 2, dtype=torch.int8)}, f"'{B}' is torch.int8; an adapter's weights must be floating point"),
    ({B: torch.ones(8, 3)}, f"'{A}' and '{B}' do not fit each other: their shapes are"),
    ({"blocks.0.to_q.lora_up.weight": torch.ones(8, 2)}, "lora_up.weight' are the same tensor of one layer"),
    ({"blocks.0.to_q.alpha": torch.ones(2)}, "'blocks.0.to_q.alpha' must be one finite number, not a tensor"),
    (
        {A: None, B: None, **{f"blocks.0.to_q.{name}": torch.ones(2, 2) for name in ("lokr_w1", "lokr_w2_a")}},
        "is an incomplete update: 'blocks.0.to_q' has no lokr_w2",
    ),
    ({"blocks.1.to_q.alpha": torch.tensor(1.0)}, "'blocks.1.to_q.alpha' is an incomplete update: 'blocks.1.to_q' has no down"),
    ({A: None, B: None}, "it is empty"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_a_damaged_adapter_says_which_key(changes, message):
    state = {key: value for key, value in {**pairs("blocks.0.to_q"), **changes}.items() if value is not None}
    with pytest.raises(ArtifactError, match=f"the state dict.*{re.escape(message)}"):
        files.read(state)


def test_what_has_no_place_is_said_with_what_is_near():
    state = pairs("blocks.0.to_q", "blocks.0.to_k", "blocks.1.to_q", "conv")
    state["norm.weight"] = torch.ones(8)
    file = files.read(state)
    found = files.fit(file, SHAPES)
    assert set(found.placed) == {"blocks.0.to_q", "blocks.1.to_q"}
    with pytest.raises(ArtifactError) as error:
        found.check()
    text = str(error.value)
    assert "1 of 4 layers are not in the graph: 'blocks.0.to_k' (did you mean 'blocks.0.to_q'?)" in text
    assert "1 layers have other shapes: 'conv' is [6, 12, 3, 3], and 'conv' is for [8, 8]" in text
    assert "1 tensors are not part of a low-rank update: 'norm.weight'" in text


def test_a_file_for_another_model_size_says_so():
    with pytest.raises(ArtifactError, match=r"1 layers have other shapes: 'blocks.0.to_q' is \[8, 8\].*is for \[16, 16\]"):
        files.fit(files.read(pairs("unet.blocks.0.to_q", shape=(16, 16))), SHAPES).check()


def test_files_that_are_none(tmp_path):
    with pytest.raises(ArtifactError, match="no adapter file or folder .*ink.safetensor'"):
        files.read(tmp_path / "ink.safetensor")
    (tmp_path / "a.safetensors").write_bytes(b"nothing")
    with pytest.raises(ArtifactError, match=r"a\.safetensors cannot be read"):
        files.read(tmp_path)
    save_file(pairs("blocks.0.to_q"), tmp_path / "b.safetensors")
    with pytest.raises(ArtifactError, match="has 2 files of weights: give one of a.safetensors, b.safetensors"):
        files.read(tmp_path)
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ArtifactError, match="an adapter must be a file that ends in .safetensors"):
        files.read(tmp_path / "a.txt")
    torch.save([torch.ones(2)], tmp_path / "a.pt")
    with pytest.raises(ArtifactError, match="contains a list, not a dict of tensors"):
        files.read(tmp_path / "a.pt")
    torch.save({"model": nn.Linear(2, 2)}, tmp_path / "b.pt")
    with pytest.raises(ArtifactError, match="contains objects other than tensors"):
        files.read(tmp_path / "b.pt")
    (tmp_path / "ink").mkdir()
    (tmp_path / "adapter_config.json").write_text("{")
    torch.save(pairs("blocks.0.to_q"), tmp_path / "adapter_model.bin")
    with pytest.raises(ArtifactError, match="adapter_config.json is not JSON"):
        files.read(tmp_path)


def test_a_header_of_any_length_is_one(tmp_path):
    state = pairs("blocks.0.to_q")
    for length in range(0, 264, 8):  # headers are padded to 8 bytes, and their length begins the file
        save_file(state, tmp_path / "a.safetensors", {"of": "x" * length})
        assert len(files.read(tmp_path / "a.safetensors").entries) == 1


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("unet:12:up", "an incomplete update: 'unet:12' has no down"),
        ("w_a_000", "'w_b_000' is missing"),
        ("base_model.model.k_proj.ia3_l", "has an ia3_l of shape .2, 2., which must have one value per channel"),
        ("conv.weight", "its keys are like 'conv.weight'"),
    ],
)
def test_other_files_say_what_they_are(key, message):
    with pytest.raises(ArtifactError, match=message):
        files.read({key: torch.ones(2, 2)})


def test_what_a_plain_block_cannot_hold_is_another_kind():
    state = pairs("blocks.0.to_q") | {"blocks.0.to_q.lora_B.bias": torch.ones(8)}
    assert files.read(state).entries[0].kind == "lora+bias"
    state = {"a.lokr_w1": torch.ones(2, 2), "a.lokr_w2": torch.ones(2, 2), "a.dora_scale": torch.ones(4, 1)}
    entry = files.read(state).entries[0]
    assert entry.kind == "lokr+dora"
    with pytest.raises(ArtifactError, match="'a' is lokr.dora, which is more than a low-rank product"):
        entry.as_lora((4, 4))


@pytest.mark.parametrize("init", ["pissa", "olora", "eva", "gaussian", "orthogonal", False])
@pytest.mark.filterwarnings("ignore::UserWarning")  # peft's advice on its own options
def test_an_initialisation_that_changes_the_base_is_refused_and_any_other_exact(init, tmp_path):
    torch.manual_seed(0)
    base = Net()
    first = True if init == "eva" else init  # which peft asks data for
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=first))
    randomised(model, "lora_")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"init_lora_weights": init}))
    if init in ("pissa", "olora"):
        with pytest.raises(ArtifactError, match=f"init_lora_weights: '{init}': it was trained with weights that differ"):
            files.read(tmp_path)
        return
    indices = torch.arange(6).reshape(1, 2, 3)
    new = fxplug.apply(fxplug.trace(base, (indices,)), fxplug.load_pass("lora", at="**.to_q", rank=2, slots=1))
    assert not new.adapters.load("it", tmp_path).assumed
    new.adapters.use("it")
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    torch.testing.assert_close(new(indices), again(indices), **NEAR)


MEANING = [
    ({"alora_invocation_tokens": [1]}, "behind certain words only"),
    ({"layer_replication": [[0, 4]]}, "some of whose layers were repeated"),
    ({"use_qalora": True}, "pools what its layers read"),
    ({"arrow_config": {"top_k": 2}}, "chooses among adapters"),
    ({"peft_type": "VERO"}, "its peft_type is 'VERO' .did you mean 'VERA'..; supported are LORA, LOHA, LOKR"),
    ({"peft_type": "PROMPT_TUNING"}, "is PROMPT_TUNING, which is not supported: it puts trained tokens before the words"),
    ({"peft_type": "PSOFT"}, "singular vectors of the base's weights.*merge it with PEFT .merge_and_unload. and take the diff"),
    ({"init_lora_weights": "corda"}, "trained with weights that differ from the base model's"),
    ({"init_lora_weights": "new"}, "an initialisation that is not supported"),
    ({"use_dora": True}, r"use_dora is true, and 'blocks\.0\.to_q' has no magnitude"),
    ({"lora_bias": True}, r"lora_bias is true, and 'blocks\.0\.to_q' has no bias"),
    ({"r": 4}, r"the rank of 'blocks\.0\.to_q' is 4, and its tensors have 2"),
    ({"use_rslorra": True}, r"use_rslorra: True, an unknown key \(did you mean 'use_rslora'\?\)"),
]


@pytest.mark.parametrize(("config", "message"), MEANING)
def test_a_configuration_that_changes_the_meaning_is_honoured_or_refused(config, message):
    with pytest.raises(ArtifactError, match=message):
        files.read(pairs("blocks.0.to_q"), config={"peft_type": "LORA", "r": 2, "lora_alpha": 4} | config)


def test_a_configuration_of_pefts_newest_version_is_read():
    for config in (peft.LoraConfig(r=2), peft.LoHaConfig(r=2), peft.LoKrConfig(r=2)):
        files.read(pairs("blocks.0.to_q"), config=config.to_dict())


def test_a_configuration_lies_beside_a_file_of_any_name(tmp_path):
    save_file(pairs("blocks.0.to_q"), tmp_path / "ink.safetensors")
    found = files.fit(files.read(tmp_path / "ink.safetensors"), SHAPES)
    assert found.assumed == ["blocks.0.to_q"] and found.placed["blocks.0.to_q"].scale == 1
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 8}))
    found = files.fit(files.read(tmp_path / "ink.safetensors"), SHAPES)
    assert found.assumed == [] and found.placed["blocks.0.to_q"].scale == 4


def test_a_layer_without_a_slot_is_said_to_be_that():
    gm = fxplug.trace(Net(), (torch.arange(6).reshape(1, 2, 3),))
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="**.to_q", rank=2, slots=1))
    state = pairs("blocks.0.to_q") | pairs("blocks.0.ff", "blocks.1.ff", shape=(12, 8))
    with pytest.raises(ArtifactError, match=r"have no slots here: 'blocks.0.ff', 'blocks.1.ff' \(apply the pass with at: "):
        new.adapters.load("it", state)
    assert list(new.adapters.load("it", state, partial=True).placed) == ["blocks.0.to_q"]


def test_what_was_left_in_a_free_slot_is_not_inherited():
    gm = fxplug.trace(Net(), (torch.arange(6).reshape(1, 2, 3),))
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="**.to_q", rank=4, slots=2))
    randomised(new, "lora")
    state = pairs("blocks.0.to_q")
    new.adapters.load("it", state)
    other = fxplug.apply(gm, fxplug.load_pass("lora", at="**.to_q", rank=4, slots=1))
    other.adapters.load("it", state)
    for module in (new, other):
        module.adapters.use("it")
    x = torch.arange(6).reshape(1, 2, 3)
    torch.testing.assert_close(new(x), other(x))


def test_a_grouped_convolution_takes_one_product_for_all_groups(tmp_path):
    """LyCORIS has one down for all groups of a convolution, and the update is the product in the weight's shape."""
    torch.manual_seed(0)
    conv = nn.Conv2d(8, 12, 3, groups=4, bias=False)
    x = torch.randn(1, 8, 5, 5)
    new = fxplug.apply(fxplug.trace(nn.Sequential(conv), (x,)), fxplug.load_pass("lora", at="0", rank=2, slots=1))
    state = {"lora_0.lora_down.weight": torch.randn(2, 2, 3, 3), "lora_0.lora_up.weight": torch.randn(12, 2, 1, 1)}
    new.adapters.load("it", state)
    back = load_file(new.adapters.save("it", tmp_path / "it", as_="lycoris").path)
    assert all(torch.equal(back[f"lycoris_{key.removeprefix('lora_')}"], value) for key, value in state.items())
    new.adapters.use("it")
    down, up = (state[f"lora_0.lora_{half}.weight"].flatten(1) for half in ("down", "up"))
    update = (up @ down).reshape(12, 2, 3, 3)
    torch.testing.assert_close(new(x), torch.nn.functional.conv2d(x, conv.weight + update, groups=4), **NEAR)
    state = {"lora_0.lora_down.weight": torch.randn(4, 2, 3, 3), "lora_0.lora_up.weight": torch.randn(12, 2, 1, 1)}
    with pytest.raises(SpecError, match="is for a convolution of 2 groups, and '0' has 4"):
        new.adapters.load("other", state)


def test_alphas_may_be_numbers_beside_a_state_dict():
    entry = files.read({**pairs("unet.blocks.0.to_q"), "unet.blocks.0.to_q.alpha": 8}).entries[0]
    assert entry.scale == 4.0


# --- real files


def real(test):
    """A test that needs the shared folder of real adapters."""
    return pytest.mark.assets(pytest.mark.skipif(not ASSETS.is_dir(), reason="no shared folder of real adapters")(test))


@pytest.fixture(scope="module")
def sd15():
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        model = UNet2DConditionModel(cross_attention_dim=768)
    return layers(model)


@real
@pytest.mark.parametrize("name", ["sd15_attnprocs_noprefix.safetensors", "sd15_attnprocs_noprefix_cuda.bin"])
def test_attention_processors(name, sd15):
    found = files.fit(files.read(ASSETS / "diffusers" / name), sd15).check()
    assert len(found.placed) == 128 and {e.rank for e in found.placed.values()} == {4}


@real
def test_early_lokr_splits_kernels_over_both_factors(sd15):
    file = ASSETS / "kohya_lycoris" / "smart_falcon_4_lokr.safetensors"
    found = files.fit(files.read(file), sd15).check()
    assert len(found.placed) == 278 and len(found.others["text_encoder"]) == 72
    path = "down_blocks.1.resnets.0.conv1"
    t = {name: tensor.float() for name, tensor in found.placed[path].tensors.items()}
    wanted = torch.kron(t["lokr_w1_a"] @ t["lokr_w1_b"], t["lokr_w2_a"] @ t["lokr_w2_b"]).reshape(sd15[path])
    entry = found.placed[path]
    torch.testing.assert_close(entry.update(sd15[path]), wanted, rtol=1e-4, atol=1e-7)
    assert entry.as_lora(sd15[path]).rank == 16


@real
@pytest.mark.parametrize("file", sorted((ASSETS / "key_lists").glob("*.json")), ids=lambda file: file.stem)
def test_key_lists(file):
    """Every key of the lists is a layer's, or of the control LoRA's norms, which it has whole."""
    shapes = json.loads(file.read_text())["state_dict_keys"]
    state = {key: torch.zeros(shape, device="meta") if shape else torch.tensor(1.0) for key, shape in shapes.items()}
    read = files.read(state)
    used = sum(len(entry.tensors) for entry in read.entries) + sum(key.endswith(".alpha") for key in state)
    assert used + len(read.rest) == len(state)
    assert not read.rest
    norms = {entry.path: tuple(entry.tensors["whole"].shape) for entry in read.entries if entry.method == "whole"}
    assert len(norms) == sum(key.endswith("_norm.scale") for key in state)
    targets = {entry.path: norms.get(entry.path) or (entry.sizes()[0], *entry.sizes()[1]) for entry in read.entries}
    found = files.fit(read, targets, part=read.parts[0])
    assert len(found.placed) == sum(entry.part == read.parts[0] for entry in read.entries)


@pytest.mark.parametrize("form", ["by key", "a list"])
def test_numbered_layers_are_proposed_and_taken_when_told(form, tmp_path):
    """Files of 2022 number the layers in the order of modules: the order says which of those of one shape is which."""
    torch.manual_seed(0)
    some = {path: shape for path, shape in SHAPES.items() if path.startswith("blocks")}
    halves = [(torch.randn(shape[0], 2), torch.randn(2, shape[1])) for shape in some.values()]
    if form == "a list":
        source = tmp_path / "numbered.pt"
        torch.save([tensor for pair in halves for tensor in pair], source)
    else:
        source = {f"unet:{n}:{half}": pair[i] for n, pair in enumerate(halves) for i, half in enumerate(("up", "down"))}
    file = files.read(source)
    found = files.fit(file, some)
    assert not found.placed and list(found.guessed.values()) == list(some)
    with pytest.raises(ArtifactError, match=r"4 of 4 layers are not in the graph: '\w*:0'.*\(guess=True matches them by shape"):
        found.check()
    placed = files.fit(file, some, guess=True).check().placed
    for (path, shape), (up, down) in zip(some.items(), halves, strict=True):
        torch.testing.assert_close(placed[path].update(shape), up @ down)
    with pytest.raises(ArtifactError, match=r"they cannot be matched by order: 2 updates fit 3 layers of \[8, 8\]; match"):
        files.fit(file, {**some, "other": (8, 8)}, guess=True)
    with pytest.raises(ArtifactError, match="4 of 4 layers are not in the graph"):
        files.fit(file, {str(n): shape for n, shape in enumerate([*some.values(), (8, 8)])}).check()  # numbers are no names


def test_pairs_of_query_and_value_are_one_update_of_both():
    torch.manual_seed(0)
    state = {f"w_{half}_{n:03}": torch.randn(*shape) for n in range(4) for half, shape in (("a", (2, 8)), ("b", (8, 2)))}
    placed = files.fit(files.read(state), {f"blocks.{n}.qkv": (24, 8) for n in range(2)}, guess=True).check().placed
    for n in range(2):
        q, v = (state[f"w_b_{2 * n + i:03}"] @ state[f"w_a_{2 * n + i:03}"] for i in (0, 1))
        torch.testing.assert_close(placed[f"blocks.{n}.qkv"].update((24, 8)), torch.cat([q, torch.zeros(8, 8), v]))


@real
@pytest.mark.parametrize(("name", "number"), [("cloneofsimo_lora_disney.safetensors", 144), ("cloneofsimo_lora_pop.pt", 128)])
def test_numbered_layers_of_2022(name, number, sd15):
    words = 768 if number == 144 else 1024  # the list is for Stable Diffusion 2
    shapes = {path: tuple({768: words}.get(n, n) for n in shape) for path, shape in sd15.items()}
    some = {path: shape for path, shape in shapes.items() if re.search(r"attn\d\.to_|ff\.net\.0", path)}
    part = "unet" if number == 144 else None
    found = files.fit(files.read(ASSETS / "cloneofsimo" / name), some, part, guess=True)
    assert len(found.placed) == number and not found.missing and not found.mismatched
    if number == 128:
        with pytest.raises(ArtifactError, match="32 of 128 layers are not in the graph"):
            files.fit(found.file, {path: sd15[path] for path in some}, guess=True).check()


@real
def test_a_real_file_of_sam():
    file = files.read(ASSETS / "vision" / "samlora_rank4.safetensors")
    assert len(files.fit(file, {f"blocks.{n}.attn.qkv": (2304, 768) for n in range(12)}, guess=True).check().placed) == 12


@real
def test_peft_folders():
    file = files.read(ASSETS / "peft_text" / "peft_opt350m_lora")
    assert len(file.entries) == 48 and {e.scale for e in file.entries} == {1.0}
    file = files.read(ASSETS / "peft_text" / "peft_opt350m_ia3")
    gates = {(e.kind, e.options["side"], e.param) for e in file.entries}
    assert gates >= {("ia3", "output", "weight"), ("ia3", "output", "bias")}


def test_a_core_whose_product_is_too_large_for_its_dtype_is_told():
    state = {
        "conv.lora_down.weight": torch.full((2, 12, 1, 1), 3e4).half(),
        "conv.lora_mid.weight": torch.full((2, 2, 3, 3), 3e4).half(),
        "conv.lora_up.weight": torch.ones(6, 2, 1, 1).half(),
    }
    with pytest.raises(ArtifactError, match="has numbers out of range for torch.float16"):
        files.read(state)
