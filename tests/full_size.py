"""The models of the recipes at their full size, on the meta device: what the passes of a recipe find and add, and the memory.

The memory of a training is, in GB: the weights, of the other models of the pipeline too, in the bytes that they have; 16 bytes
for each number that trains (itself, its gradient and two of AdamW, in float32); the results that the backward pass needs; and
one more for what the device itself keeps. With `checkpointing` the results are the last one of each block, and all within the
largest.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import timm
import torch
import transformers
from torch import nn

import fxplug
from fxplug.core.spec.pass_file import list_recipes

BYTES = {None: 2.0, "int8": 1.0, "nf4": 0.55}  # of a weight; nf4 has scales beside its half a byte
# what gives no memory of its own, but another view of what is there
VIEWS = re.compile(
    "view|reshape|permute|transpose|flatten|expand|squeeze|chunk|split|unbind|getitem|edge|size|check|guard|contiguous"
)


@dataclass
class Model:
    """A model as published: how it is made, the call that it gets, and in 10^9 its parameters, those of text encoders and
    VAE, and those of a second denoiser, which is quantised as the first."""

    make: Callable[[], nn.Module]
    call: dict[str, Any]
    published: float
    beside: float = 0.0
    twin: float = 0.0


@dataclass
class Count:
    """What a recipe is at its full size."""

    text: str
    parameters: int
    published: float
    gigabytes: int


@dataclass
class Traced:
    """A recipe's model on the meta device, rewritten by the recipe's passes: sites by pass, numbers that train."""

    config: Any
    module: Any
    sites: dict[str, Any]
    frozen: int
    trains: int


def backbone(name: str, published: float, side: int = 224, **options: Any) -> Model:
    return Model(lambda: timm.create_model(name, **options), {"x": empty(32, 3, side, side)}, published)


def tower(family: str, published: float, **sizes: Any) -> Model:
    def make() -> nn.Module:
        text = {"bos_token_id": 0, "eos_token_id": 1}
        given = {"vision_config": {"patch_size": 16, **sizes}, "text_config": text, "num_labels": 37}
        config = getattr(transformers, f"{family}Config")(**given)
        return getattr(transformers, f"{family}ForImageClassification")(config)  # type: ignore[no-any-return]

    return Model(make, {"pixel_values": empty(32, 3, 224, 224)}, published)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def denoiser(kind: str, call: dict[str, Any], published: float, beside: float, twin: float = 0.0, **config: Any) -> Model:
    return Model(lambda: getattr(diffusers, kind)(**config).to(torch.bfloat16), call, published, beside, twin)


def half(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.bfloat16)


def sd3() -> Model:
    """Stable Diffusion 3.5 medium, of 2.5 billion with the table of positions, a buffer; 333 tokens of T5 and CLIP."""
    call = {"hidden_states": half(1, 16, 128, 128), "encoder_hidden_states": half(1, 333, 4096), "timestep": half(1),
            "pooled_projections": half(1, 2048)}  # fmt: skip
    return denoiser(
        "SD3Transformer2DModel", call, 2.24, 5.66, num_layers=24, num_attention_heads=24, caption_projection_dim=1536,
        pos_embed_max_size=384, dual_attention_layers=tuple(range(13)), qk_norm="rms_norm",
    )  # fmt: skip


def flux() -> Model:
    call = {"hidden_states": half(1, 4096, 64), "encoder_hidden_states": half(1, 512, 4096), "timestep": half(1),
            "pooled_projections": half(1, 768), "guidance": half(1), "img_ids": half(4096, 3),
            "txt_ids": half(512, 3)}  # fmt: skip
    return denoiser("FluxTransformer2DModel", call, 11.9, 4.97, guidance_embeds=True)


def flux2() -> Model:
    call = {"hidden_states": half(1, 4096, 128), "encoder_hidden_states": half(1, 512, 7680), "timestep": half(1),
            "img_ids": half(1, 4096, 4), "txt_ids": half(1, 512, 4)}  # fmt: skip
    sizes = {"num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680}
    return denoiser("Flux2Transformer2DModel", call, 3.88, 4.1, guidance_embeds=False, **sizes)


def qwen() -> Model:
    call = {"hidden_states": half(1, 4096, 64), "encoder_hidden_states": half(1, 256, 3584), "timestep": half(1),
            "img_shapes": [[(1, 64, 64)]]}  # fmt: skip
    return denoiser("QwenImageTransformer2DModel", call, 20.4, 8.42)


def qwen_edit() -> Model:
    """Qwen-Image-Edit of 2509: as many tokens of the picture before as of the one after, and 196 of it in the text."""
    call = {"hidden_states": half(1, 8192, 64), "encoder_hidden_states": half(1, 452, 3584), "timestep": half(1),
            "img_shapes": [[(1, 64, 64), (1, 64, 64)]]}  # fmt: skip
    return denoiser("QwenImageTransformer2DModel", call, 20.4, 8.42)


def ideogram4() -> Model:
    """One of the two transformers of Ideogram 4; the other one is quantised as well. The text is Qwen3-VL of 8 billion."""
    tokens = {"position_ids": (1, 4352, 3), "segment_ids": (1, 4352), "indicator": (1, 4352)}
    call = {"hidden_states": half(1, 4352, 128), "encoder_hidden_states": half(1, 4352, 53248), "timestep": half(1),
            **{name: empty(*shape, dtype=torch.int64) for name, shape in tokens.items()}}  # fmt: skip
    return denoiser("Ideogram4Transformer2DModel", call, 9.28, 8.2, twin=9.28)


def flux3() -> Model:
    """FLUX.3 klein base, of which a part is for pictures that are edited. The text is Qwen3-VL of 4 billion."""
    call = {"hidden_states": half(1, 4096, 128), "encoder_hidden_states": half(1, 240, 20480), "timestep": half(1),
            "img_ids": half(4096, 4), "txt_ids": half(240, 4)}  # fmt: skip
    return denoiser("Flux3Transformer2DModel", call, 5.54, 4.5)


def z_image() -> Model:
    call = {"x": [half(16, 1, 128, 128)], "t": half(1), "cap_feats": [half(256, 2560)]}
    return denoiser("ZImageTransformer2DModel", call, 6.15, 4.1)


def krea2() -> Model:
    call = {"hidden_states": half(1, 4096, 64), "encoder_hidden_states": half(1, 512, 12, 2560), "timestep": half(1),
            "position_ids": empty(4608, 3)}  # fmt: skip
    return denoiser("Krea2Transformer2DModel", call, 12.8, 4.6)


def wan() -> Model:
    """One of the two denoisers of Wan 2.2; the other one is quantised as well."""
    call = {"hidden_states": half(1, 16, 1, 64, 64), "timestep": empty(1, dtype=torch.int64),
            "encoder_hidden_states": half(1, 512, 4096)}  # fmt: skip
    return denoiser("WanTransformer3DModel", call, 14.3, 5.81, twin=14.3)


def ltx2() -> Model:
    """LTX-2, of video and sound, for one frame; beside it Gemma 3 of 12 billion, whose captions are 1024 tokens."""
    call = {"hidden_states": half(1, 256, 128), "audio_hidden_states": half(1, 1, 128), "timestep": half(1), "sigma": half(1),
            "encoder_hidden_states": half(1, 1024, 3840), "audio_encoder_hidden_states": half(1, 1024, 3840),
            "encoder_attention_mask": half(1, 1024), "audio_encoder_attention_mask": half(1, 1024), "num_frames": 1,
            "height": 16, "width": 16, "audio_num_frames": 1, "video_coords": empty(1, 3, 256, 2),
            "audio_coords": empty(1, 1, 1, 2), "use_cross_timestep": True, "isolate_modalities": True}  # fmt: skip
    return denoiser("LTX2VideoTransformer3DModel", call, 18.9, 12.19 + 2.76)


def sana() -> Model:
    call = {"hidden_states": half(1, 32, 32, 32), "encoder_hidden_states": half(1, 300, 2304), "timestep": half(1),
            "encoder_attention_mask": half(1, 300)}  # fmt: skip
    return denoiser("SanaTransformer2DModel", call, 1.604, 2.93)


def pixart() -> Model:
    call = {"hidden_states": half(1, 4, 128, 128), "encoder_hidden_states": half(1, 300, 4096), "timestep": half(1),
            "encoder_attention_mask": half(1, 300),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}  # fmt: skip
    return denoiser("PixArtTransformer2DModel", call, 0.61, 4.85, caption_channels=4096, use_additional_conditions=False)


def unet(side: int, text: int, published: float, beside: float, channels: list[int], **config: Any) -> Model:
    call = {"sample": half(1, 4, side, side), "timestep": empty(1, dtype=torch.int64),
            "encoder_hidden_states": half(1, 77, text)}  # fmt: skip
    if "addition_embed_type" in config:
        call["added_cond_kwargs"] = {"text_embeds": half(1, 1280), "time_ids": half(1, 6)}
    sizes = {"sample_size": side, "block_out_channels": channels, "cross_attention_dim": text}
    return denoiser("UNet2DConditionModel", call, published, beside, **sizes, **config)


def sdxl() -> Model:
    down = ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D")
    up = ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D")
    more = {"addition_embed_type": "text_time", "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816}
    return unet(
        128, 2048, 2.567, 0.9, [320, 640, 1280], down_block_types=down, up_block_types=up, attention_head_dim=(5, 10, 20),
        transformer_layers_per_block=(1, 2, 10), use_linear_projection=True, **more,
    )  # fmt: skip


Z_IMAGE = z_image()
MODELS: dict[str, Model] = {
    "sd15": unet(64, 768, 0.86, 0.21, [320, 640, 1280, 1280], attention_head_dim=8),
    "sdxl": sdxl(), "sd35": sd3(), "flux1": flux(), "flux2": flux2(), "qwen_image": qwen(), "z_image": Z_IMAGE,
    "controlnet": unet(64, 768, 0.86, 0.21, [320, 640, 1280, 1280], attention_head_dim=8),
    "qwen_image_edit": qwen_edit(), "ideogram4": ideogram4(), "flux3": flux3(),
    "z_image_turbo": Z_IMAGE, "wan22": wan(), "sana": sana(), "pixart": pixart(), "krea2": krea2(),
    "ltx2": ltx2(),
    "vit": backbone("vit_base_patch16_224", 0.0864, num_classes=37),
    "dino": backbone("vit_base_patch14_dinov2", 0.0866, img_size=224, num_classes=37),
    "convnext": backbone("convnext_base", 0.0886, num_classes=37),
    "swin": backbone("swin_base_patch4_window7_224", 0.0878, num_classes=37),
    "clip": tower("CLIP", 0.0862, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12),
    "siglip": tower("Siglip", 0.0929),
}
# sites of each pass; numbers that are frozen and that train
EXPECTED = {
    "sd15": "lora 128: 859.5 M frozen, 3.19 M train",
    "sdxl": "lora 560: 2567.5 M frozen, 23.22 M train",
    "sd35": "lora 191: 2243.2 M frozen, 9.39 M train",
    "flux1": "lora 266: 11901.4 M frozen, 26.15 M train",
    "flux2": "lora 60: 3875.5 M frozen, 16.71 M train",
    "qwen_image": "lora 240: 20430.4 M frozen, 23.59 M train",
    "z_image": "lora 136: 6154.9 M frozen, 16.71 M train",
    "z_image_turbo": "lora 136: 6154.9 M frozen, 16.71 M train",
    "wan22": "lora 320: 14288.5 M frozen, 52.43 M train",
    "sana": "lora 120: 1604.5 M frozen, 8.60 M train",
    "pixart": "lora 224: 610.9 M frozen, 8.26 M train",
    "ltx2": "lora 384: 18876.2 M frozen, 50.33 M train",
    "krea2": "lora 226: 12820.1 M frozen, 93.26 M train",
    "controlnet": "controlnet 14: 859.5 M frozen, 361.28 M train",
    "qwen_image_edit": "lora 240: 20430.4 M frozen, 23.59 M train",
    "ideogram4": "lora 136: 9279.3 M frozen, 20.05 M train",
    "flux3": "lora 152: 5538.5 M frozen, 14.94 M train",
    "vit": "lora 48: 85.8 M frozen, 2.39 M train",
    "dino": "lora 48: 85.8 M frozen, 2.39 M train",
    "convnext": "lora 72: 87.6 M frozen, 2.93 M train",
    "swin": "lora 96: 86.8 M frozen, 3.12 M train",
    "clip": "lora 72: 85.8 M frozen, 2.68 M train",
    "siglip": "lora 72: 92.9 M frozen, 2.68 M train",
}


@functools.lru_cache(1)  # the next recipe may be of the same model
def _trace(name: str) -> tuple[nn.Module, fxplug.TracedModule]:
    with torch.device("meta"):
        made = MODELS[name].make().eval()
        return made, fxplug.trace(made, kwargs=MODELS[name].call)


def trace_recipe(name: str) -> Traced:
    model, config = MODELS[name], fxplug.load_config(list_recipes()[name])
    made, gm = _trace(next(other for other, each in MODELS.items() if each is model))
    with torch.device("meta"):
        found = {}
        for each in config.passes:
            found[each.name] = fxplug.find(gm, each)
            gm = fxplug.apply(gm, each)
    assert config.train is not None
    total = sum(p.numel() for p in made.parameters())
    trains = sum(p.numel() for p in gm.parameters()) - total
    trains += sum(p.numel() for n, p in made.named_parameters() if n.startswith(tuple(f"{t}." for t in config.train.trainable)))
    return Traced(config, gm, found, total, trains)


def count_bytes(name: str, traced: Traced, quantize: str | None, checkpointing: bool, *, encoded: bool = False) -> float:
    """Count the bytes of a training with such a base; `encoded`: text encoders and VAE have left the device."""
    model, source = MODELS[name], traced.config.model
    each = BYTES[quantize] if source.kind == "pipeline" else 4.0
    weights = (traced.frozen + model.twin * 1e9) * each + (0.0 if encoded else model.beside * 1e9 * 2)
    part = getattr(source, "part", None)
    alike = len(part) if isinstance(part, list) else 1  # models that train in each step
    return weights + alike * (16 * traced.trains + results(traced.module, checkpointing)) + 1e9


def count(name: str) -> Count:
    traced = trace_recipe(name)
    quantize, checkpointing = getattr(traced.config.model, "quantize", None), bool(traced.config.train.checkpointing)
    text = ", ".join(f"{key} {len(sites)}" for key, sites in traced.sites.items())
    text += f": {traced.frozen / 1e6:.1f} M frozen, {traced.trains / 1e6:.2f} M train"
    memory = count_bytes(name, traced, quantize, checkpointing)
    return Count(text, traced.frozen, MODELS[name].published * 1e9, math.ceil(memory / 1e9))


def results(gm: Any, checkpointing: bool) -> float:
    """Bytes of what the backward pass needs, in half precision."""
    groups: dict[str, list[int]] = {}
    for node in gm.graph.nodes:
        if node.op not in ("call_module", "call_function", "call_method") or "shape" not in node.meta:
            continue
        if VIEWS.search(str(getattr(node.target, "__name__", node.target))):
            continue
        path = next(reversed(node.meta["nn_module_stack"]))
        block = re.match(r"(.*?\.\d+)(\.|$)", str(path))
        groups.setdefault(block[1] if block else "", []).append(math.prod(node.meta["shape"]))
    outside = sum(groups.pop("", []))
    sums = [sum(sizes) for sizes in groups.values()]
    if not checkpointing:
        return 2.0 * (outside + sum(sums))
    return 2.0 * (outside + max(sums) + sum(sizes[-1] for sizes in groups.values()))
