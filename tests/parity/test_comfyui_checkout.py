"""ComfyUI's own models and readers, of a checkout (SEEDS is its folder): they load all of a file, with equal weights."""

from __future__ import annotations

import importlib
import logging
import sys
from types import ModuleType, SimpleNamespace

import diffusers
import pytest
import torch
from checkouts import checkout_of
from comfyui_layers import DATA, layers_in_comfyui, of_all_layers
from torch import nn

from fxplug.adapters.file_layouts import read_model
from fxplug.adapters.writing import describe_model

CHECKOUT = checkout_of("comfy/weight_adapter/lora.py")
pytestmark = pytest.mark.skipif(not CHECKOUT.is_dir(), reason="SEEDS names no folder with a checkout of ComfyUI")

UNET = {
    "use_checkpoint": False, "image_size": 32, "out_channels": 4, "use_spatial_transformer": True, "legacy": False,
    "in_channels": 4, "model_channels": 320,
}  # fmt: skip
# where each model is in the checkout, its class among those of comfy.model_base, and its arguments
MODELS = {
    "sd1": ("ldm.modules.diffusionmodules.openaimodel:UNetModel", "BaseModel", {
        **UNET, "adm_in_channels": None, "use_linear_in_transformer": False, "num_res_blocks": [2] * 4, "num_heads": 8,
        "channel_mult": [1, 2, 4, 4], "transformer_depth": [1] * 6 + [0] * 2, "transformer_depth_middle": 1,
        "transformer_depth_output": [1] * 9 + [0] * 3, "context_dim": 768, "num_head_channels": -1,
    }),
    "sdxl": ("ldm.modules.diffusionmodules.openaimodel:UNetModel", "SDXL", {
        **UNET, "num_classes": "sequential", "adm_in_channels": 2816, "use_linear_in_transformer": True,
        "num_res_blocks": [2] * 3, "channel_mult": [1, 2, 4], "transformer_depth": [0, 0, 2, 2, 10, 10], "num_heads": -1,
        "transformer_depth_middle": 10, "transformer_depth_output": [0] * 3 + [2] * 3 + [10] * 3,
        "context_dim": 2048, "num_head_channels": 64,
    }),
    "sd3.5-medium": ("ldm.modules.diffusionmodules.mmdit:OpenAISignatureMMDITWrapper", "SD3", {
        "in_channels": 16, "patch_size": 2, "depth": 24, "input_size": None, "adm_in_channels": 2048, "qk_norm": "rms",
        "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 1536}},
        "x_block_self_attn_layers": [*range(13)], "pos_embed_max_size": 384, "num_patches": 384 * 384,
    }),
    "flux": ("ldm.flux.model:Flux", "Flux", {
        "image_model": "flux", "in_channels": 16, "patch_size": 2, "out_channels": 16, "vec_in_dim": 768,
        "context_in_dim": 4096, "hidden_size": 3072, "mlp_ratio": 4.0, "num_heads": 24, "depth": 19,
        "depth_single_blocks": 38, "theta": 10000, "axes_dim": [16, 56, 56], "qkv_bias": True, "guidance_embed": True,
    }),
    "qwen-image": ("ldm.qwen_image.model:QwenImageTransformer2DModel", "QwenImage", {"in_channels": 64, "num_layers": 60}),
    "wan": ("ldm.wan.model:WanModel", "WAN21", {
        "model_type": "t2v", "dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 40, "text_dim": 4096, "in_dim": 16,
        "out_dim": 16,
    }),
    "ltx": ("ldm.lightricks.model:LTXVModel", "LTXV", {
        "in_channels": 128, "cross_attention_dim": 2048, "attention_head_dim": 64, "num_attention_heads": 32,
        "caption_channels": 4096, "num_layers": 28,
    }),
}  # fmt: skip


@pytest.fixture(scope="module")
def comfy():
    """Its modules, on the CPU, without what samples."""
    before = dict(sys.modules)
    if importlib.util.find_spec("torchsde") is None:
        sys.modules["torchsde"] = ModuleType("torchsde")
    sys.path.insert(0, str(CHECKOUT))
    importlib.import_module("comfy.cli_args").args.cpu = True
    names = ("ops", "model_base", "lora", "lora_convert", "utils")
    yield SimpleNamespace(**{name: importlib.import_module(f"comfy.{name}") for name in names})
    sys.path.remove(str(CHECKOUT))
    for name in sys.modules.keys() - before.keys():
        if name.partition(".")[0] in ("comfy", "torchsde"):
            del sys.modules[name]


def model(comfy, base, config, state):
    """A model as its readers of LoRA look at it: its class, its configuration, and the names of its weights."""
    made = object.__new__(getattr(comfy.model_base, base))
    nn.Module.__init__(made)
    made.state_dict = lambda: state
    made.model_config = SimpleNamespace(unet_config=config)
    return made


def patches(comfy, loaded, tensors, caplog):
    """What its readers make of a file, of which every key is to be loaded."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        keys = comfy.lora.model_lora_keys_unet(loaded, {})
        found = comfy.lora.load_lora(comfy.lora_convert.convert_lora(dict(tensors)), keys)
    assert not caplog.messages
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_its_models_have_these_layers_and_take_all_keys(comfy, family, caplog):
    where, base, config = MODELS[family]
    module, _, name = where.partition(":")
    with torch.device("meta"):
        net = getattr(importlib.import_module(f"comfy.{module}"), name)(**config, operations=comfy.ops.disable_weight_init)
    state = {f"diffusion_model.{key}": value for key, value in net.state_dict().items()}
    shapes = {key: tuple(value.shape) for key, value in state.items() if key.endswith(".weight") and value.dim() > 1}
    assert shapes == {f"diffusion_model.{key}.weight": shape for key, shape in layers_in_comfyui(family).items()}
    about, loaded = read_model(None, family), model(comfy, base, config, state)
    for as_ in ("comfy", "kohya"):
        assert patches(comfy, loaded, of_all_layers(about, as_).tensors, caplog).keys() == shapes.keys()


SMALL = {
    "flux": ("Flux", {"depth": 2, "depth_single_blocks": 2, "hidden_size": 16}, lambda: diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=12,
        pooled_projection_dim=6, guidance_embeds=True, axes_dims_rope=(2, 2, 4))),
    "sd3": ("SD3", {"depth": 2, "x_block_self_attn_layers": [0]}, lambda: diffusers.SD3Transformer2DModel(
        sample_size=8, in_channels=4, num_layers=2, attention_head_dim=64, num_attention_heads=2, joint_attention_dim=12,
        caption_projection_dim=128, pooled_projection_dim=12, out_channels=4, pos_embed_max_size=8, dual_attention_layers=(0,),
        qk_norm="rms_norm")),
    "z-image": ("Lumina2", {"n_layers": 2, "n_refiner_layers": 1, "dim": 32}, lambda: diffusers.ZImageTransformer2DModel(
        in_channels=4, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=16, axes_dims=[8, 4, 4],
        axes_lens=[16, 8, 8])),
}  # fmt: skip


@pytest.mark.parametrize("family", SMALL)
def test_what_is_joined_has_the_order_of_its_own_tables(comfy, family, caplog):
    """The same weights come from our names for its layers and, by its own tables of q, k and v, from diffusers' names."""
    base, config, build = SMALL[family]
    if family == "z-image" and not hasattr(comfy.utils, "z_image_to_diffusers"):
        pytest.skip("this checkout is older than Z-Image")
    about = describe_model(build())
    torch.manual_seed(0)
    ours = of_all_layers(about, "comfy")
    names = {key.removesuffix(".alpha") for key in ours.tensors if key.endswith(".alpha")}
    halves = {name: [ours.tensors[f"{name}.lora_{half}.weight"] for half in ("up", "down")] for name in names}
    state = {f"{name}.weight": torch.zeros(len(up), *down.shape[1:]) for name, (up, down) in halves.items()}
    torch.manual_seed(0)
    theirs = of_all_layers(about, "diffusers")
    results = []
    for made in (ours, theirs):
        whole = {name: value.clone() for name, value in state.items()}
        for key, patch in patches(comfy, model(comfy, base, config, state), made.tensors, caplog).items():
            name, offset, function = (key, None, None) if isinstance(key, str) else (*key, None)[:3]
            entry = (1.0, patch, 1.0, offset, function)
            whole[name] = comfy.lora.calculate_weight([entry], whole[name], name)
        results.append(whole)
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], rtol=1e-5, atol=1e-5, msg=name)
        assert value.any(), name


def test_the_table_has_no_other_family():
    assert {*DATA} == {*MODELS, "z-image"}
