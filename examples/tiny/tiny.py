"""Pipelines of diffusers in small, of random weights, which stand for the real ones; and LoRA of PEFT for them, in files."""

import json
import tempfile
from pathlib import Path

import diffusers
import torch
from peft import LoraConfig, get_peft_model_state_dict
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

LEVELS = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
UNET = {"sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1, "attention_head_dim": 2, "norm_num_groups": 4}
TEXT = {"vocab_size": 60, "hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
FLUX = {"in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
SD3 = {"sample_size": 16, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2, "pos_embed_max_size": 24}
SDXL = {"addition_embed_type": "text_time", "addition_time_embed_dim": 4, "projection_class_embeddings_input_dim": 32}
FOLDER = Path(tempfile.mkdtemp())


def vae():
    """A decoder that makes eight pixels of one."""
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    sizes = {"block_out_channels": (8,) * 4, "latent_channels": 4, "norm_num_groups": 4}
    return diffusers.AutoencoderKL(**sizes, shift_factor=0.1, **blocks)


def unet(**more):
    """A UNet of two levels."""
    return diffusers.UNet2DConditionModel(**UNET, **LEVELS, cross_attention_dim=12, **more)


def tokenizer():
    """Letters, each a token."""
    letters = [chr(n) for n in range(ord("a"), ord("z") + 1)]
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    (FOLDER / "vocab.json").write_text(json.dumps({word: n for n, word in enumerate(words)}))
    (FOLDER / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(FOLDER / "vocab.json"), str(FOLDER / "merges.txt"), model_max_length=8)


def pipeline(name, **parts):
    """A pipeline by the name of its class, the same each time."""
    torch.manual_seed(0)
    kind, ddim = getattr(diffusers, name), diffusers.DDIMScheduler(clip_sample=False, steps_offset=1)
    flow = diffusers.FlowMatchEulerDiscreteScheduler()
    none = dict.fromkeys(f"{part}{end}" for part in ("text_encoder", "tokenizer") for end in ("", "_2"))
    if "XL" in name:
        pipe = kind(vae=vae(), unet=unet(**SDXL), scheduler=ddim, **none, **parts)
    elif "Flux" in name:
        size = {"axes_dims_rope": (4, 4, 8), "patch_size": 1}
        model = diffusers.FluxTransformer2DModel(**FLUX, **size, joint_attention_dim=12, pooled_projection_dim=8)
        pipe = kind(transformer=model, vae=vae(), scheduler=flow, **none)
    elif "3" in name:
        size = {"attention_head_dim": 8, "num_attention_heads": 2, "caption_projection_dim": 16}
        model = diffusers.SD3Transformer2DModel(**SD3, **size, joint_attention_dim=12, pooled_projection_dim=8)
        pipe = kind(transformer=model, vae=vae(), scheduler=flow, **none, text_encoder_3=None, tokenizer_3=None)
    else:
        text = CLIPTextModel(CLIPTextConfig(**TEXT, max_position_embeddings=8, bos_token_id=0, eos_token_id=1, pad_token_id=1))
        rest = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
        pipe = kind(vae(), text.eval(), tokenizer(), unet().eval(), scheduler=ddim, **rest, **parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def prompt(pipe):
    """What stands for a prompt: words for a pipeline with a text encoder, else what an encoder would give."""
    if getattr(pipe, "text_encoder", None) is not None:
        return {"prompt": "a cat"}
    seed = torch.Generator().manual_seed(1)
    words = {"prompt_embeds": torch.randn(1, 5, 12, generator=seed), "pooled_prompt_embeds": torch.randn(1, 8, generator=seed)}
    return words if "Flux" in type(pipe).__name__ else {**words, **{f"negative_{k}": v * 0 for k, v in words.items()}}


def lora(pipe, file, seed=1, **layers):
    """A file of diffusers with LoRA of PEFT for parts of a pipeline, `unet=["to_q"]`, as a training writes it."""
    torch.manual_seed(seed)
    found = {}
    for part, names in layers.items():
        model = getattr(pipe, part)
        model.add_adapter(LoraConfig(r=4, target_modules=names, init_lora_weights=False))
        found[f"{part}_lora_layers"] = get_peft_model_state_dict(model)
    pipe.save_lora_weights(FOLDER / file, **found)
    return FOLDER / file
