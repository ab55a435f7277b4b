"""Tiny modular pipelines of diffusers: the families that have no other kind, and modular forms of those in `tiny_pipelines`.

`make("anima")` is a pipeline of random weights, `CALLS["anima"]` what its call needs beside a prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import diffusers.modular_pipelines as modular
import PIL.Image
import tiny_pipelines as tiny
import torch
import transformers

# the blocks of a family whose components `tiny_pipelines` makes
FORMS = {
    "sdxl": "StableDiffusionXLAutoBlocks", "sd3": "StableDiffusion3AutoBlocks", "flux": "FluxAutoBlocks",
    "qwen_image": "QwenImageAutoBlocks", "wan": "WanBlocks", "ltx": "LTXAutoBlocks", "z_image": "ZImageAutoBlocks",
}  # fmt: skip


def form_of(name: str, pipe: Any) -> Any:
    """Make the modular form of a pipeline, on its components."""
    return _filled(getattr(modular, FORMS[name])(), **pipe.components)


def make(name: str, seed: int = 0) -> Any:
    """Make a pipeline by its name in `CALLS`; the same weights each time, none of them zero."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        pipe = MADE[name]()
        for part in pipe.components.values():
            for parameter in part.eval().parameters() if isinstance(part, torch.nn.Module) else ():
                if not parameter.any():
                    torch.nn.init.normal_(parameter, std=0.05)
    return pipe


def _filled(blocks: Any, **components: Any) -> Any:
    """Make a pipeline of blocks with those components that they have."""
    pipe = blocks.init_pipeline()
    pipe.update_components(**{n: c for n, c in components.items() if n in pipe._component_specs and c is not None})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def picture(seed: int = 0, height: int = tiny.SIZE, width: int = tiny.SIZE) -> PIL.Image.Image:
    draw = torch.Generator().manual_seed(seed)
    return PIL.Image.fromarray(torch.randint(0, 256, (height, width, 3), generator=draw, dtype=torch.uint8).numpy())


def video(seed: int = 0, frames: int = 17, height: int = 40, width: int = 32) -> list[PIL.Image.Image]:
    return [picture(seed + n, height, width) for n in range(frames)]


# --- families


def anima() -> Any:
    model = diffusers.CosmosTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=2, mlp_ratio=2,
        text_embed_dim=16, adaln_lora_dim=4, max_size=(4, 32, 32), extra_pos_embed_type=None,
    )  # fmt: skip
    conditioner = diffusers.AnimaTextConditioner(
        source_dim=16, target_dim=16, model_dim=16, num_layers=1, num_attention_heads=2, target_vocab_size=len(tiny.VOCABULARY),
        min_sequence_length=16,
    )  # fmt: skip
    return _filled(
        modular.AnimaAutoBlocks(), transformer=model, text_conditioner=conditioner, text_encoder=qwen3(),
        tokenizer=tiny.tokenizer(64), t5_tokenizer=tiny.tokenizer(64), vae=tiny.qwen_image().vae,
        scheduler=tiny.flow(shift=3.0),
    )  # fmt: skip


def qwen3() -> Any:
    return transformers.Qwen3Model(
        transformers.Qwen3Config(
            **tiny.IDS, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
            head_dim=8,
        )
    )  # fmt: skip


def qwen3_vl(layers: int = 2) -> Any:
    words = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": layers, "num_attention_heads": 2, "head_dim": 8}
    rope = {"mrope_section": [1, 1, 2], "rope_type": "default", "rope_theta": 10000.0}
    text = transformers.Qwen3VLConfig(
        text_config={**tiny.IDS, **words, "num_key_value_heads": 2, "rope_scaling": rope, "rope_parameters": rope},
        vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16,
                       "deepstack_visual_indexes": [0]},
        image_token_id=2, video_token_id=2, vision_start_token_id=2, vision_end_token_id=2,
    )  # fmt: skip
    return transformers.Qwen3VLForConditionalGeneration(text)


class Processor(transformers.ProcessorMixin):
    """A processor of text alone."""

    attributes = ["tokenizer"]
    tokenizer_class = "AutoTokenizer"

    def __init__(self, tokenizer: Any = None, **_: Any) -> None:
        super().__init__(tokenizer)
        self.chat_template = tiny.CHAT


def flux3(kind: str = "Flux3AutoBlocks", flow_map: bool = False) -> Any:
    model = diffusers.Flux3Transformer2DModel(
        in_channels=16, cond_in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, timestep_channels=16, axes_dims_rope=(4, 4, 4, 4), flow_map=flow_map,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLFlux2(block_out_channels=(8,) * 4, latent_channels=4, norm_num_groups=4)
    with torch.no_grad():
        vae.bn.running_mean.uniform_(-1, 1)
        vae.bn.running_var.uniform_(0.5, 2)
    blocks = getattr(modular, kind)()
    blocks.sub_blocks.pop("prompt_upsampler")
    return _filled(
        blocks, transformer=model, vae=vae, text_encoder=qwen3_vl(), tokenizer=Processor(tiny.tokenizer(256)),
        scheduler=tiny.flow(shift=3.0),
    )  # fmt: skip


def flux3_distilled() -> Any:
    return flux3("Flux3DistilledAutoBlocks", flow_map=True)


def wan_animate_2(kind: str = "WanAnimate2Blocks") -> Any:
    model = diffusers.WanAnimate2Transformer3DModel(
        in_dim=36, dim=32, ffn_dim=32, freq_dim=16, text_dim=12, out_dim=16, num_heads=2, num_layers=2, text_len=16,
    )  # fmt: skip
    parts = tiny.wan().components
    vision = transformers.CLIPVisionConfig(hidden_size=1280, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
                                           image_size=224, patch_size=112)  # fmt: skip
    return _filled(getattr(modular, kind)(), **{**parts, "transformer": model, "scheduler": tiny.flow(shift=3.0),
                                                "image_encoder": transformers.CLIPVisionModel(vision)})  # fmt: skip


def wan_animate_2_distilled() -> Any:
    return wan_animate_2("WanAnimate2DistilledBlocks")


def minimax_h3() -> Any:
    model = diffusers.MiniMaxH3Transformer3DModel(
        num_attention_heads=2, attention_head_dim=32, hidden_size=32, num_layers=1, num_refiner_layers=1, ffn_dim=32,
        in_channels=4, audio_in_channels=4, text_dim=16, freq_dim=16, time_embed_hidden_dim=16, time_embed_dim=16,
        rope_freq_dim=4,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLMiniMaxH3(
        latent_channels=4, block_out_channels=(8,) * 6, layers_per_block=1, norm_num_groups=4, decoder_num_layers=1,
        decoder_num_attention_heads=2, decoder_attention_head_dim=16, latents_mean=(0.1,) * 4, latents_std=(1.2,) * 4,
    )  # fmt: skip
    audio = diffusers.AutoencoderKLMiniMaxH3Audio(
        encoder_dim=4, latent_dim=32, latent_channels=4, num_attention_heads=2, decoder_dim=128,
        latents_mean=[0.1] * 4, latents_std=[1.1] * 4,
    )  # fmt: skip
    return _filled(
        modular.MiniMaxH3Blocks(), transformer=model, vae=vae, audio_vae=audio, text_encoder=qwen3_vl(51),
        tokenizer=tiny.tokenizer(256), processor=Processor(tiny.tokenizer(256)), scheduler=diffusers.MiniMaxH3Scheduler(),
        audio_scheduler=diffusers.MiniMaxH3Scheduler(),
    )  # fmt: skip


def minimax_music3() -> Any:
    words = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    language = transformers.Qwen3Config(**{**tiny.IDS, "vocab_size": 151675 + 16384}, **words, num_key_value_heads=2)
    return _filled(
        modular.MiniMaxMusic3Blocks(), tokenizer=tiny.tokenizer(256), language_model=transformers.Qwen3ForCausalLM(language),
        rvq_depth_decoder=diffusers.MiniMaxMusic3RVQDepthDecoder(
            hidden_size=16, num_layers=1, num_attention_heads=2, intermediate_size=16, audio_vocab_size=64,
        ),
        condition_encoder=diffusers.MiniMaxMusic3ConditionEncoder(condition_hidden_dim=16 * 8 // 8, out_dim=16),
        transformer=diffusers.MiniMaxMusic3Transformer1DModel(
            in_channels=8, condition_dim=16, num_layers=1, num_attention_heads=2, attention_head_dim=16, ff_inner_dim=32,
            rotary_dim=8, fourier_embedding_dim=16,
        ),
        scheduler=tiny.flow(invert_sigmas=True, num_train_timesteps=1), vocoder=vocoder(),
    )  # fmt: skip


def vocoder() -> Any:
    return diffusers.MiniMaxMusic3Vocoder(**VOCODER)


VOCODER = {"latent_channels": 8, "decoder_input_dim": 8, "decoder_hidden_dim": 32}
SIZE = {"height": tiny.SIZE, "width": tiny.SIZE}
CALLS: dict[str, dict[str, Any]] = {
    "anima": SIZE,
    "flux3": {**SIZE, "text_encoder_out_layers": (1, 2)}, "flux3_distilled": {**SIZE, "text_encoder_out_layers": (1, 2)},
    "wan_animate_2": {**SIZE, "image": picture(0, 96, 64), "driving_video": video(), "segment_frame_length": 9,
                      "prev_segment_conditioning_frames": 1, "max_sequence_length": 16},
    "minimax_h3": {**SIZE, "num_frames": 124},
    "minimax_music3": {"lyrics": "a red ball", "audio_duration": 0.2},
}  # fmt: skip
CALLS["wan_animate_2_distilled"] = CALLS["wan_animate_2"]
MADE: dict[str, Callable[[], Any]] = {
    "anima": anima, "flux3": flux3, "flux3_distilled": flux3_distilled, "wan_animate_2": wan_animate_2,
    "wan_animate_2_distilled": wan_animate_2_distilled, "minimax_h3": minimax_h3,
    "minimax_music3": minimax_music3,
}  # fmt: skip
