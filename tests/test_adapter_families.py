"""The names of each family of models: what diffusers' own converters make of a checkpoint or an adapter under them."""

from __future__ import annotations

import inspect
import re
from functools import cache

import diffusers
import pytest
import torch
import zoo
from diffusers.loaders import lora_conversion_utils, single_file_utils

from fxplug.adapters import files
from fxplug.adapters.families import FAMILIES
from fxplug.adapters.layer_names import SWAPPED, family_of, first_names
from fxplug.errors import ArtifactError

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
    whole, names = weights(name), first_names(layers(name))
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


# graphs that have another family's layers, and more
KIN = {
    "Flux": {
        "BriaTransformer2DModel", "BriaFiboTransformer2DModel", "OvisImageTransformer2DModel", "LongCatImageTransformer2DModel",
    },
    "PixArt": {"AllegroTransformer3DModel", "LatteTransformer3DModel"},
    "LTX": {"LTX2VideoTransformer3DModel", "SanaWMLTX2RefinerTransformer3DModel"},
    "HunyuanVideo": {
        "HunyuanImageTransformer2DModel", "HunyuanVideo15Transformer3DModel", "HunyuanVideoFramepackTransformer3DModel",
    },
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
    for family in FAMILIES:
        assert len(found[family.name] - KIN.get(family.name, set())) == 1, (family.name, found[family.name])


def adapter(shapes, prefix, form=("lora_A", "lora_B"), flat=False, names=None, alpha=False):
    """A LoRA of rank 2 on all layers, under the names of the family's code."""
    torch.manual_seed(0)
    state = {}
    for old, paths in (names or first_names(shapes)).items():
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
    names = {old: to for old, to in first_names(shapes, also=kind == "xlabs").items() if re.search(some, old)}
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
    assert len(files.fit(files.read(state), shapes).check().placed) == len(first_names(shapes)) + 1


def test_a_file_for_another_architecture_says_which_it_looks_like():
    theirs = {path: (shape[0], 3, *shape[2:]) for path, shape in layers("WanTransformer3DModel").items()}
    ours = {path: (shape[0], 3, *shape[2:]) for path, shape in layers("Flux2Transformer2DModel").items()}
    for flat, prefix in ((False, "diffusion_model."), (True, "lora_unet_")):
        with pytest.raises(ArtifactError, match="are not in the graph: .*; such names are those of Wan"):
            files.fit(files.read(adapter(theirs, prefix, flat=flat)), ours).check()


def test_a_model_within_another_has_its_familys_names():
    shapes = {f"core.inner.{path}": (shape[0], 3, *shape[2:]) for path, shape in layers("Krea2Transformer2DModel").items()}
    state = adapter(shapes, "diffusion_model.")
    assert len(files.fit(files.read(state), shapes).check().placed) == len(first_names(shapes))
