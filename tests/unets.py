"""UNets in the shapes of Stable Diffusion 1.5 and XL, small or on the meta device, and ControlNets for them."""

from __future__ import annotations

from functools import cache

import small
import torch
from diffusers import ControlNetModel, UNet2DConditionModel
from torch import nn

XL = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
}
CONDITION = (8, 8, 16, 16)  # channels of a ControlNet's first layers


def sd15_model(levels=2, **changes):
    """One layer a level: what a graph costs to trace, rewrite and compile grows with its nodes."""
    sizes = {"sample_size": 16, "block_out_channels": (8, *[16] * (levels - 1)), "cross_attention_dim": 12}
    blocks = {
        "down_block_types": (*["CrossAttnDownBlock2D"] * (levels - 1), "DownBlock2D"),
        "up_block_types": ("UpBlock2D", *["CrossAttnUpBlock2D"] * (levels - 1)),
        "layers_per_block": 1,
    }
    return UNet2DConditionModel(**{**sizes, **blocks, "attention_head_dim": 2, "norm_num_groups": 4, **changes}).eval()


def sdxl_model():
    return UNet2DConditionModel(
        sample_size=16, block_out_channels=(8, 16, 16), cross_attention_dim=24, norm_num_groups=4, attention_head_dim=(1, 2, 4),
        layers_per_block=1, transformer_layers_per_block=(1, 1, 2), addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=32, **XL
    ).eval()  # fmt: skip


def small_sdxl_model():
    """With two levels, and what tells an SDXL from earlier ones: its embedding of sizes."""
    return sd15_model(
        addition_embed_type="text_time", addition_time_embed_dim=4, projection_class_embeddings_input_dim=32,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip


def inputs(unet, batch=2, words=5):
    side, width = unet.config.sample_size, unet.config.cross_attention_dim
    call = {
        "sample": torch.randn(batch, 4, side, side),
        "timestep": torch.tensor(500),
        "encoder_hidden_states": torch.randn(batch, words, width),
        "return_dict": False,
    }
    if unet.config.addition_embed_type:
        size = unet.config.projection_class_embeddings_input_dim - 6 * unet.config.addition_time_embed_dim
        added = {"text_embeds": torch.randn(batch, size), "time_ids": torch.full((batch, 6), 16.0)}
        call["added_cond_kwargs"] = added
    return call


@cache
def sd15():
    unet = small.seeded(sd15_model)
    return small.traced(unet, **small.seeded(lambda: inputs(unet)))


@cache
def sd15_deep():
    """With attention in two levels, not in one."""
    unet = small.seeded(lambda: sd15_model(levels=3))
    return small.traced(unet, **small.seeded(lambda: inputs(unet)))


@cache
def sdxl():
    unet = small.seeded(sdxl_model)
    return small.traced(unet, **small.seeded(lambda: inputs(unet)))


HOSTS = {"sd15": sd15, "sdxl": sdxl}


def control(unet, seed=1, **options):
    """A ControlNet for a UNet whose last layers are not zero, as those of a new one are."""
    torch.manual_seed(seed)
    made = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=CONDITION, **options).eval()
    for parameter in made.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return made


def picture(base, channels=3, times=8, seed=2):
    n, _, h, w = base.kwargs["sample"].shape
    return torch.rand(n, channels, times * h, times * w, generator=torch.Generator().manual_seed(seed))


def sdxl_full():
    """Stable Diffusion XL itself, without memory."""
    with torch.device("meta"):
        unet = UNet2DConditionModel(
            sample_size=128, block_out_channels=(320, 640, 1280), transformer_layers_per_block=(1, 2, 10),
            attention_head_dim=(5, 10, 20), cross_attention_dim=2048, addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816, **XL
        ).eval()  # fmt: skip
        return unet, inputs(unet, words=77)


@cache
def sdxl_full_traced():
    unet, call = sdxl_full()
    return small.traced(unet, **call)


def error(ours, theirs):
    """The largest difference, relative to the largest value."""
    assert ours.shape == theirs.shape
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
