"""The names of each family of models: what diffusers' own converters make of a checkpoint or an adapter under them."""

from __future__ import annotations

import inspect
import math
import re
from functools import cache

import diffusers
import pytest
import torch
import zoo
from diffusers.loaders import lora_conversion_utils, single_file_utils
from trainer_keys import TRAINERS, lora_of, meant

from fxplug.adapters import files
from fxplug.adapters.layer_names import SWAPPED, families, family_of, map_first_names
from fxplug.core.errors import ArtifactError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # diffusers' about its own classes


class Checkpoint(dict):
    """What a converter takes: layers that no table names, norms for one, are there when asked for."""

    def pop(self, key, *default):
        return super().pop(key) if key in self else default[0] if default else torch.zeros(6, 1)


# converters with the widths of the published models in them
WIDE = {
    "FluxTransformer2DModel": {"num_layers": 1, "num_single_layers": 1, "guidance_embeds": True},
    "ChromaTransformer2DModel": {"num_layers": 1, "num_single_layers": 1},
    "Lumina2Transformer2DModel": {"num_layers": 1, "num_refiner_layers": 1},
    "HunyuanVideoTransformer3DModel": {"num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1},
    "MochiTransformer3DModel": {"num_attention_heads": 1, "attention_head_dim": 8, "pooled_projection_dim": 8},
}
CONVERTERS = {
    "FluxTransformer2DModel": "flux_transformer_checkpoint", "ChromaTransformer2DModel": "chroma_transformer_checkpoint",
    "Lumina2Transformer2DModel": "lumina2", "HunyuanVideoTransformer3DModel": "hunyuan_video_transformer",
    "MochiTransformer3DModel": "mochi_transformer_checkpoint", "SD3Transformer2DModel-sd35": "sd3_transformer_checkpoint",
    "SD3Transformer2DModel": "sd3_transformer_checkpoint", "AuraFlowTransformer2DModel": "auraflow_transformer_checkpoint",
    "ZImageTransformer2DModel": "z_image_transformer_checkpoint", "WanTransformer3DModel-i2v": "wan_transformer",
    "WanTransformer3DModel": "wan_transformer", "WanVACETransformer3DModel": "wan_transformer",
    "WanAnimate2Transformer3DModel": "wan_animate_2_transformer", "LTXVideoTransformer3DModel": "ltx_transformer_checkpoint",
    "LTX2VideoTransformer3DModel": "ltx2_transformer", "CosmosTransformer3DModel": "cosmos_transformer_checkpoint",
    "SanaTransformer2DModel": "sana_transformer", "Flux2Transformer2DModel": "flux2_transformer_checkpoint",
    "Flux3Transformer2DModel": "flux3_transformer_checkpoint", "Krea2Transformer2DModel": "krea2_transformer_checkpoint",
    "QwenImage21Transformer2DModel": "qwen_image21_transformer_checkpoint",
    "MiniMaxH3Transformer3DModel": "minimax_h3_transformer_checkpoint",
}  # fmt: skip


def case(name):
    return next(case for case in zoo.cases() if case.name == f"diffusers/{name}")


@cache
def weights(name):
    """The weight of each layer of a model: numbers that no other row has, in as few columns as do."""
    if name in WIDE:
        with torch.device("meta"):
            model = getattr(diffusers, name)(**WIDE[name])
    else:
        model = case(name).build()
    named = [(n, p) for n, p in model.named_parameters() if p.dim() > 1 or (n.endswith(".bias") and "norm" not in n)]
    return {n: torch.arange(len(p)).double().reshape(-1, *[1] * (p.dim() - 1)) + 1e6 * i for i, (n, p) in enumerate(named)}


def layers(name):
    found = ((n, w) for n, w in weights(name).items() if n.endswith(".weight") and w.dim() > 1)
    return {n.removesuffix(".weight"): tuple(w.shape) for n, w in found}


def as_the_family_has_it(name):
    """The whole checkpoint under the names of the family's code."""
    whole, names = weights(name), map_first_names(layers(name))
    made, used = Checkpoint(), set()
    for old, paths in names.items():
        for kind in ("weight", "bias"):
            rows = [whole.get(f"{path.removesuffix(SWAPPED)}.{kind}") for path in paths]
            if all(row is not None for row in rows):
                used |= {f"{path.removesuffix(SWAPPED)}.{kind}" for path in paths}
                both = torch.cat(rows)
                made[f"{old}.{kind}"] = torch.cat(both.chunk(2)[::-1]) if paths[0].endswith(SWAPPED) else both
    return made | {n: w for n, w in whole.items() if n not in used}


@pytest.mark.parametrize("name", CONVERTERS)
def test_the_names_are_those_that_diffusers_converts(name):
    convert = getattr(single_file_utils, f"convert_{CONVERTERS[name]}_to_diffusers")
    options = {"config": {}} if "config" in inspect.signature(convert).parameters else {}
    found, whole = convert(Checkpoint(as_the_family_has_it(name)), **options), weights(name)
    for path in (f"{layer}.weight" for layer in layers(name)):
        assert torch.equal(found[path], whole[path]), path


SCALED = ("Flux", "Chroma", "Krea2")  # families whose code calls the weight of a norm its scale


# where the tables have no norms or parameters
UNNAMED = {"SD3Transformer2DModel", "WanAnimate2Transformer3DModel", "QwenImage21Transformer2DModel"}


@pytest.mark.parametrize("name", [name for name in CONVERTERS if name not in UNNAMED])
def test_the_names_of_norms_and_of_parameters_are_those_that_diffusers_converts(name):
    if name in WIDE:
        with torch.device("meta"):
            model = getattr(diffusers, name)(**WIDE[name])
    else:
        model = case(name).build()
    sizes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    bare = {n for n in sizes if not n.endswith((".weight", ".bias"))}
    norms = {n.removesuffix(".weight") for n, size in sizes.items() if n.endswith(".weight") and len(size) == 1}
    state, wanted = as_the_family_has_it(name), {}
    for n, (old, paths) in enumerate(map_first_names([*layers(name), *norms, *bare]).items()):
        if paths[0] in norms | bare:
            ours = paths[0] if paths[0] in bare else f"{paths[0]}.weight"
            end = "" if paths[0] in bare else ".scale" if name.startswith(SCALED) else ".weight"
            wanted[ours] = torch.arange(math.prod(sizes[ours])).double().reshape(sizes[ours]) - 1e6 * (n + 1)
            state.pop(ours, None)
            state[f"{old}{end}"] = wanted[ours]
    convert = getattr(single_file_utils, f"convert_{CONVERTERS[name]}_to_diffusers")
    options = {"config": {}} if "config" in inspect.signature(convert).parameters else {}
    found = convert(Checkpoint(state), **options)
    assert wanted
    assert [key for key, value in wanted.items() if not torch.equal(found[key], value)] == []


# graphs that have another family's layers, and more
KIN = {
    "Flux": {
        "BriaTransformer2DModel", "BriaFiboTransformer2DModel", "OvisImageTransformer2DModel", "LongCatImageTransformer2DModel",
    },
    "PixArt": {"AllegroTransformer3DModel", "LatteTransformer3DModel"},
    "LTX": {"LTX2VideoTransformer3DModel", "SanaWMLTX2RefinerTransformer3DModel"},
    "HunyuanVideo": {"HunyuanVideoFramepackTransformer3DModel"},
    "Wan": {
        "AnyFlowTransformer3DModel", "AnyFlowFARTransformer3DModel", "ChronoEditTransformer3DModel", "HeliosTransformer3DModel",
        "SkyReelsV2Transformer3DModel", "WanAnimateTransformer3DModel", "WanVACETransformer3DModel",
    },
}  # fmt: skip


def test_each_graph_has_its_own_family():
    found = {}
    for one in zoo.cases():
        kind = one.name.removeprefix("diffusers/").partition("-")[0]
        if "Transformer" in kind and kind != one.name:
            family = family_of(n.removesuffix(".weight") for n, _ in one.build().named_parameters())
            found.setdefault(family and family[0].name, set()).add(kind)
    for family in families():
        assert len(found[family.name] - KIN.get(family.name, set())) == 1, (family.name, found[family.name])


def adapter(shapes, prefix, form=("lora_A", "lora_B"), flat=False, names=None, alpha=False):
    """A LoRA of rank 2 on all layers, under the names of the family's code."""
    torch.manual_seed(0)
    state = {}
    for old, paths in (names or map_first_names(shapes)).items():
        out = sum(shapes[path.removesuffix(SWAPPED)][0] for path in paths)
        inner = shapes[paths[0].removesuffix(SWAPPED)][1:]
        key = prefix + (old.replace(".", "_") if flat else old)
        state[f"{key}.{form[0]}.weight"] = torch.randn(2, *inner)
        state[f"{key}.{form[1]}.weight"] = torch.randn(out, 2, *[1] * (len(inner) - 1))
        if alpha:
            state[f"{key}.alpha"] = torch.tensor(1.0)
    return state


FLAT = {"flat": True, "alpha": True}
# what diffusers makes of an adapter, where its converter takes one of any widths: its prefix, and names that it leaves out
ADAPTERS = {
    "wan": ("WanTransformer3DModel-i2v", "non_diffusers_wan", "diffusion_model.", {}, ""),
    "musubi wan": ("WanTransformer3DModel", "musubi_wan", "lora_unet_", FLAT, "^blocks"),
    "flux 2": ("Flux2Transformer2DModel", "non_diffusers_flux2", "diffusion_model.", {}, "^(?!final_layer.ada)"),
    "flux 3": ("Flux3Transformer2DModel", "non_diffusers_flux3", "diffusion_model.", {}, r"_blocks\..*(_proj|_out|_in)$"),
    "krea": ("Krea2Transformer2DModel", "non_diffusers_krea2", "diffusion_model.", {}, ""),
    "ai-toolkit krea": ("Krea2Transformer2DModel", "non_diffusers_krea2", "base_model.model.", {}, ""),
    "minimax": ("MiniMaxH3Transformer3DModel", "non_diffusers_minimax_h3", "diffusion_model.", {}, ""),
    "flat minimax": ("MiniMaxH3Transformer3DModel", "non_diffusers_minimax_h3", "lora_unet_", FLAT, ""),
    "ltx 2": ("LTX2VideoTransformer3DModel", "non_diffusers_ltx2", "diffusion_model.", {}, ""),
    "anima": ("CosmosTransformer3DModel", "non_diffusers_anima", "diffusion_model.", {}, ""),
    "ace-step": ("AceStepTransformer1DModel", "non_diffusers_ace_step", "base_model.model.", {}, ""),
    "ideogram": ("Ideogram4Transformer2DModel", "non_diffusers_ideogram4", "diffusion_model.", {}, ""),
    "xlabs": ("FluxTransformer2DModel", "xlabs_flux", "", {"form": ("down", "up")}, r"\.processor\."),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_goes_where_diffusers_puts_it(kind):
    name, converter, prefix, how, some = ADAPTERS[kind]
    model = case(name).build()
    shapes = {n.removesuffix(".weight"): tuple(p.shape) for n, p in model.named_parameters() if ".weight" in n and p.dim() > 1}
    form = {"form": ("lora_down", "lora_up")} if how.get("alpha") else {}
    names = {old: to for old, to in map_first_names(shapes, also=kind == "xlabs").items() if re.search(some, old)}
    state = adapter(shapes, prefix, names=names, **form | how)
    placed = files.fit(files.read(state), shapes).check().placed
    theirs = getattr(lora_conversion_utils, f"_convert_{converter}_lora_to_diffusers")(dict(state))
    pairs = {key.removesuffix(".lora_A.weight").removeprefix("transformer."): key for key in theirs if ".lora_A." in key}
    assert sorted(placed) == sorted(pairs)
    for path, key in pairs.items():
        down, up = theirs[key].flatten(1), theirs[key.replace("lora_A", "lora_B")].flatten(1)
        torch.testing.assert_close(placed[path].update(shapes[path]), (up @ down).reshape(shapes[path]), msg=path)


def test_direct_names_and_the_familys_own_go_together_in_one_file():
    shapes = layers("WanTransformer3DModel")
    shapes = {path: (shape[0], 3, *shape[2:]) for path, shape in shapes.items()}
    old = adapter(shapes, "diffusion_model.")
    own = {f"diffusion_model.{path}": (path,) for path in ("patch_embedding",)}
    state = old | adapter(shapes, "", names=own)
    assert len(files.fit(files.read(state), shapes).check().placed) == len(map_first_names(shapes)) + 1


def test_a_file_for_another_architecture_says_which_it_looks_like():
    theirs = {path: (shape[0], 3, *shape[2:]) for path, shape in layers("WanTransformer3DModel").items()}
    ours = {path: (shape[0], 3, *shape[2:]) for path, shape in layers("Flux2Transformer2DModel").items()}
    for flat, prefix in ((False, "diffusion_model."), (True, "lora_unet_")):
        with pytest.raises(ArtifactError, match="are not in the graph: .*; names like these are used by Wan"):
            files.fit(files.read(adapter(theirs, prefix, flat=flat)), ours).check()


def test_a_model_within_another_has_its_familys_names():
    shapes = {f"core.inner.{path}": (shape[0], 3, *shape[2:]) for path, shape in layers("Krea2Transformer2DModel").items()}
    state = adapter(shapes, "diffusion_model.")
    assert len(files.fit(files.read(state), shapes).check().placed) == len(map_first_names(shapes))


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda t: f"{t['tool']} {t['model']} {t['start']}")
def test_what_trainers_call_layers_is_read(trainer):
    shapes = {n.removesuffix(".weight"): tuple(w.shape) for n, w in case(trainer["model"]).build().named_parameters()
              if n.endswith(".weight")}  # fmt: skip
    torch.manual_seed(0)
    state, wanted = lora_of(trainer, shapes)
    unmet = [name for name in trainer["keys"] if not meant({name: trainer["keys"][name]}, shapes)]
    assert not unmet, "a row that means no layer of the model"
    placed = files.fit(files.read(state), shapes).check().placed
    assert placed.keys() == wanted.keys()
    for path, change in wanted.items():
        zero = torch.zeros(shapes[path])
        torch.testing.assert_close(placed[path].changed(zero), change, msg=path)


def test_a_control_lora_of_flux_has_its_norms_whole():
    """As Black Forest Labs write theirs: biases beside the halves, and norms under the checkpoint's names."""
    shapes = {"transformer_blocks.0.attn.norm_q": (4,), "x_embedder": (8, 6), "single_transformer_blocks.0.norm.linear": (4, 8),
              "norm_out.linear": (4, 8), "context_embedder": (8, 8)}  # fmt: skip
    state = {"img_in.lora_A.weight": torch.randn(2, 6), "img_in.lora_B.weight": torch.randn(8, 2)}
    state |= {"img_in.lora_B.bias": torch.randn(8), "double_blocks.0.img_attn.norm.query_norm.scale": torch.randn(4)}
    placed = files.fit(files.read(state), shapes).check().placed
    assert {path: entry.method or entry.kind for path, entry in placed.items()} == {
        "x_embedder": "lora+bias", "transformer_blocks.0.attn.norm_q": "whole"
    }  # fmt: skip


def test_kohyas_oft_of_flux_turns_each_part_of_a_layer_by_itself():
    """networks/oft_flux.py of sd-scripts: blocks by number, q, k and v of one layer, or the only ones of another."""
    model = case("FluxTransformer2DModel").build()
    shapes = {n.removesuffix(".weight"): tuple(p.shape) for n, p in model.named_parameters() if n.endswith(".weight")}
    names = [("img_attn_qkv", 3, "attn.to_q"), ("img_attn_qkv", 3, "attn.to_v"), ("img_attn_proj", 1, "attn.to_out.0")]
    state = {}
    for name, parts, path in names[::2]:
        size = shapes[f"transformer_blocks.0.{path}"][0]
        key, half = f"lora_unet_double_blocks_0_{name}", size // 2
        state |= {f"{key}.oft_blocks.{n}": torch.randn(2, half, half) for n in range(parts)}
        state[f"{key}.alpha"] = torch.tensor(1e-3)
    placed = files.fit(files.read(state), shapes).check().placed
    assert len(placed) == 4
    for name, _, path in names:
        out, inner = shapes[f"transformer_blocks.0.{path}"]
        q = state[f"lora_unet_double_blocks_0_{name}.oft_blocks.{2 * path.endswith('v')}"]
        q = q - q.mT
        q = q * min(q.norm(), 1e-3 * out) / q.norm()
        turns = (torch.eye(out // 2) + q) @ (torch.eye(out // 2) - q).inverse()
        w = torch.randn(out, inner)
        wanted = torch.einsum("knm,knp->kmp", turns, w.reshape(2, -1, inner)).reshape(w.shape)
        torch.testing.assert_close(placed[f"transformer_blocks.0.{path}"].changed(w), wanted, rtol=1e-4, atol=1e-5)


def test_parts_of_other_tools_lie_apart():
    one = torch.randn(2, 8), torch.randn(8, 2)
    names = {
        "diffusion_model.blocks.0.mlp.layer1": ("diffusion_model", "blocks.0.mlp.layer1"),
        "diffusion_model.llm_adapter.blocks.0.cross_attn.q_proj": ("text_conditioner", "blocks.0.cross_attn.q_proj"),
        "lora_unet_llm_adapter_blocks_0_mlp_0": ("text_conditioner", "blocks_0_mlp_0"),
        "text_encoders.clip_l.transformer.text_model.encoder.layers.0.mlp.fc1": (
            "text_encoder", "text_model.encoder.layers.0.mlp.fc1"
        ),
        "text_encoders.clip_g.transformer.text_model.encoder.layers.0.mlp.fc1": (
            "text_encoder_2", "text_model.encoder.layers.0.mlp.fc1"
        ),
        "text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q": (
            "text_encoder_3", "encoder.block.0.layer.0.SelfAttention.q"
        ),
        "clip_l.text_model.encoder.layers.1.mlp.fc1": ("text_encoder", "text_model.encoder.layers.1.mlp.fc1"),
        "t5.encoder.block.1.layer.0.SelfAttention.q": ("text_encoder_3", "encoder.block.1.layer.0.SelfAttention.q"),
    }  # fmt: skip
    state = {f"{name}.lora_{half}.weight": t for name in names for half, t in zip(("down", "up"), one, strict=True)}
    file = files.read(state)
    assert {e.name: (e.part, e.path) for e in file.entries} == names
    encoder = {f"encoder.layers.{n}.mlp.fc1": (8, 8) for n in (0, 1)}
    both = {name: state[name] for name in state if "clip_l.trans" in name or "clip_g" in name}
    with pytest.raises(ArtifactError, match="several models: give one of 'text_encoder'"):
        files.fit(files.read(both), {f"text_model.{path}": shape for path, shape in encoder.items()})
    for part in ("text_encoder", "text_encoder_2"):
        found = files.fit(files.read(both), encoder, part=part).check()
        assert list(found.placed) == ["encoder.layers.0.mlp.fc1"] and len(found.others) == 1


def test_a_loha_of_a_convolution_may_have_its_kernels_dimensions():
    """OneTrainer's: factors are those of convolutions."""
    shape = (6, 4, 3, 3)
    sizes = {"a": (6, 2, 1, 1), "b": (2, 4, 3, 3)}
    t = {f"hada_w{n}_{half}": torch.randn(size) for n in (1, 2) for half, size in sizes.items()}
    state = {f"lora_unet_conv.{name}": value for name, value in t.items()} | {"lora_unet_conv.alpha": torch.tensor(1.0)}
    wanted = [t[f"hada_w{n}_a"].flatten(1) @ t[f"hada_w{n}_b"].flatten(1) for n in (1, 2)]
    found = files.fit(files.read(state), {"conv": shape}).check().placed["conv"]
    torch.testing.assert_close(found.changed(torch.zeros(shape)), (wanted[0] * wanted[1] / 2).reshape(shape))
