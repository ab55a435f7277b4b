"""Tiny pipelines of families that have a recipe and are not in `tiny_pipelines`, made in the same way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import tiny_modular_pipelines as tiny_modular
import tiny_pipelines as tiny
import torch
import transformers

TOKENS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 16, "intermediate_size": 16}


def flux2() -> Any:
    """Make FLUX.2 klein, whose text is layers 9, 18 and 27 of Qwen3."""
    model = diffusers.Flux2Transformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=48,
        timestep_guidance_channels=16, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=False,
    )  # fmt: skip
    text = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**tiny.IDS, **TOKENS, num_hidden_layers=28))
    return diffusers.Flux2KleinPipeline(
        transformer=model.eval(), text_encoder=text.eval(), tokenizer=tiny.tokenizer(512, chat_template=tiny.CHAT),
        vae=diffusers.AutoencoderKLFlux2(block_out_channels=(8,) * 4, latent_channels=4, norm_num_groups=4).eval(),
        scheduler=tiny.flow(shift=3.0, use_dynamic_shifting=True),
    )  # fmt: skip


def krea2() -> Any:
    """Make Krea 2, whose text is several layers of Qwen3-VL."""
    model = diffusers.Krea2Transformer2DModel(
        in_channels=16, num_layers=2, attention_head_dim=8, num_attention_heads=4, num_key_value_heads=2, intermediate_size=32,
        timestep_embed_dim=8, text_hidden_dim=16, num_text_layers=2, text_num_attention_heads=2, text_num_key_value_heads=1,
        text_intermediate_size=16, num_layerwise_text_blocks=1, num_refiner_text_blocks=1, axes_dims_rope=(4, 2, 2),
    )  # fmt: skip
    rope = {"mrope_section": [1, 1, 2], "rope_type": "default", "rope_theta": 10000.0}
    config = transformers.Qwen3VLConfig(
        text_config={**tiny.IDS, **TOKENS, "num_hidden_layers": 2, "rope_scaling": rope, "rope_parameters": rope},
        vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16,
                       "deepstack_visual_indexes": [0]},
        image_token_id=2, video_token_id=2, vision_start_token_id=2, vision_end_token_id=2,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=12, z_dim=4, dim_mult=[1, 2, 2, 2], num_res_blocks=1, temperal_downsample=[False, True, True],
        latents_mean=[0.1, -0.2, 0.3, 0.4], latents_std=[1.1, 1.2, 0.9, 0.8],
    )  # fmt: skip
    return diffusers.Krea2Pipeline(
        scheduler=tiny.flow(use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15), vae=vae.eval(),
        transformer=model.eval(), text_encoder=transformers.Qwen3VLModel(config).eval(),
        tokenizer=tiny.tokenizer(1024, chat_template=tiny.CHAT), text_encoder_select_layers=(1, 2),
    )  # fmt: skip


PLACES = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]  # of pictures in a text
PARTS = (  # of messages, whose text is in a list
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% for part in m['content'] %}{{ part['text'] if part is mapping else part }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def seeing_tokenizer() -> Any:
    """Make a tokenizer whose texts may have places of pictures."""
    made = tiny.tokenizer(1024, chat_template=PARTS)
    made.add_special_tokens({"additional_special_tokens": PLACES})
    return made


def qwen_image_edit() -> Any:
    """Make Qwen-Image-Edit of 2509, whose text encoder and denoiser see the picture that is edited."""
    parts, words = tiny.qwen_image().components, seeing_tokenizer()
    ids = {name: words.convert_tokens_to_ids(place) for name, place in zip(
        ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"), PLACES, strict=True)}  # fmt: skip
    config = transformers.Qwen2_5_VLConfig.from_dict({**parts["text_encoder"].config.to_dict(), **ids})
    config.text_config.vocab_size = len(words)
    looks = transformers.Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=56 * 56)
    processor = transformers.Qwen2VLProcessor(looks, words, transformers.Qwen2VLVideoProcessor(), chat_template=PARTS)
    text = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
    return diffusers.QwenImageEditPlusPipeline(**{**parts, "text_encoder": text, "tokenizer": words}, processor=processor)


def qwen_image_edit_first() -> Any:
    """Make the first Qwen-Image-Edit, of one picture, which text encoder and denoiser see in the same size."""
    return diffusers.QwenImageEditPipeline(**qwen_image_edit().components)


def ideogram4() -> Any:
    """Make Ideogram 4, which has a second transformer for what is without a caption; its text is 13 layers of Qwen3-VL."""

    def model() -> Any:
        return diffusers.Ideogram4Transformer2DModel(
            in_channels=16, num_layers=2, attention_head_dim=16, num_attention_heads=2, intermediate_size=32, adaln_dim=16,
            llm_features_dim=13 * 16, mrope_section=(2, 2, 2),
        ).eval()  # fmt: skip

    return diffusers.Ideogram4Pipeline(
        transformer=model(), unconditional_transformer=model(), scheduler=tiny.flow(),
        vae=diffusers.AutoencoderKLFlux2(block_out_channels=(8,) * 4, latent_channels=4, norm_num_groups=4).eval(),
        text_encoder=tiny_modular.qwen3_vl(36).model.eval(), tokenizer=tiny.tokenizer(512, chat_template=PARTS),
    )  # fmt: skip


def flux3() -> Any:
    """Make Flux 3, a modular pipeline, without what rewrites prompts."""
    pipe, words = tiny_modular.make("flux3"), seeing_tokenizer()
    looks, moves = transformers.Qwen2VLImageProcessor(), transformers.Qwen3VLVideoProcessor()
    text = tiny_modular.qwen3_vl()
    text.resize_token_embeddings(len(words))
    pipe.update_components(tokenizer=transformers.Qwen3VLProcessor(looks, words, moves, chat_template=PARTS), text_encoder=text)
    return pipe


MADE: dict[str, Callable[[], Any]] = {
    "flux2": flux2, "krea2": krea2, "qwen_image_edit": qwen_image_edit,
    "qwen_image_edit_first": qwen_image_edit_first, "ideogram4": ideogram4, "flux3": flux3,
}  # fmt: skip


def save(name: str, folder: Path) -> None:
    """Write the pipeline of a family, with no weights that are zero."""
    if name not in MADE:
        tiny.save(name, folder)
        return
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        pipe = MADE[name]()
        for part in pipe.components.values():
            for parameter in part.parameters() if isinstance(part, torch.nn.Module) else ():
                if not parameter.any():
                    torch.nn.init.normal_(parameter, std=0.05)
    pipe.save_pretrained(str(folder), **({"overwrite_modular_index": True} if name == "flux3" else {}))
