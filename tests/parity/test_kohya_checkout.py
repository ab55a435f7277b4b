"""kohya's own scripts read what is written for them, in a checkout: SEEDS is the folder that has kohya-ss+sd-scripts."""

from __future__ import annotations

import copy
import importlib
import sys
from types import ModuleType

import pytest
import small
import torch
from checkouts import checkout_of
from diffusers import UNet2DConditionModel
from torch import nn

import fxplug
from fxplug.adapters.contents import list_layers
from fxplug.adapters.formats import name_layers
from fxplug.adapters.updates import Entry

CHECKOUT = checkout_of("library/train_util.py")
pytestmark = pytest.mark.skipif(not CHECKOUT.is_dir(), reason="SEEDS names no folder with a checkout of sd-scripts")
XL = {
    "block_out_channels": [320, 640, 1280], "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"], "layers_per_block": 2,
    "cross_attention_dim": 2048, "transformer_layers_per_block": [1, 2, 10], "attention_head_dim": [5, 10, 20],
    "addition_embed_type": "text_time", "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816,
    "use_linear_projection": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def scripts():
    """Its networks, without the logging that its utilities set up."""
    before = dict(sys.modules)
    library, utils = ModuleType("library"), ModuleType("library.utils")
    library.__path__ = [str(CHECKOUT / "library")]
    utils.setup_logging = lambda *args, **kwargs: None
    sys.modules |= {"library": library, "library.utils": utils}
    sys.path.insert(0, str(CHECKOUT))
    yield importlib.import_module("networks.lora")
    sys.path.remove(str(CHECKOUT))
    for name in sys.modules.keys() - before.keys():
        if name.partition(".")[0] in ("library", "networks"):
            del sys.modules[name]


def loaded(scripts, model, weights):
    """A model with a network of the scripts that has all of some weights, and nothing else."""
    network, state = scripts.create_network_from_weights(1.0, "", None, [], model, weights_sd=dict(weights))
    network.apply_to([], model, apply_text_encoder=False, apply_unet=True)
    found = network.load_state_dict(state, strict=False)
    assert not found.missing_keys and not found.unexpected_keys
    return network


def test_its_model_gives_what_ours_gives(scripts, tmp_path):
    from safetensors.torch import load_file

    base = small.unet()
    at = "re:.*(to_[qkv]|to_out.0|proj_in|proj_out|ff.net.0.proj|ff.net.2|conv1|conv2|time_emb_proj)$"
    new = fxplug.apply(base.gm, fxplug.load_pass("lora", at=at, rank=3, alpha=2.0))
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            if name.startswith("lora."):
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    written = fxplug.save_adapter(new, tmp_path / "ink.safetensors", as_="kohya")
    model = copy.deepcopy(base.model)
    assert len(loaded(scripts, model, load_file(written.path)).unet_loras) == len(written.layers)
    with torch.no_grad():
        ours, theirs = new(*base.args, **base.kwargs)[0], model(*base.args, **base.kwargs)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_names_of_sdxl_are_its_own(scripts):
    from library.sdxl_original_unet import SdxlUNet2DConditionModel

    with torch.device("meta"):
        ours, theirs = UNet2DConditionModel(**XL), SdxlUNet2DConditionModel()
    linear = {path: m for path, m in ours.named_modules() if isinstance(m, nn.Linear) and ".attentions." in path}
    entries = [
        Entry(path, path, "", "lora", {"down": torch.zeros(2, m.in_features), "up": torch.zeros(m.out_features, 2)}, 1.0, 2)
        for path, m in linear.items()
    ]
    rows, left = name_layers(entries, "kohya", list_layers(ours), "unet")
    assert not left
    weights = {}
    for key, entry in rows:
        weights[f"{key}.lora_down.weight"], weights[f"{key}.lora_up.weight"] = entry.tensors["down"], entry.tensors["up"]
        weights[f"{key}.alpha"] = torch.tensor(1.0)
    assert len(loaded(scripts, theirs, weights).unet_loras) == len(linear) == 722
