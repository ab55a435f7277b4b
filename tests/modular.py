"""Small modular pipelines of diffusers, of random weights: the blocks that denoise, given what encoders would give them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import small
import torch
from diffusers import (
    AnimaTextConditioner,
    CosmosTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
    Flux3Transformer2DModel,
    MiniMaxH3Transformer3DModel,
    MiniMaxMusic3ConditionEncoder,
    MiniMaxMusic3Transformer1DModel,
    WanTransformer3DModel,
)
from diffusers.modular_pipelines.anima import AnimaAutoBlocks
from diffusers.modular_pipelines.flux3 import Flux3AutoBlocks
from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3Blocks
from diffusers.modular_pipelines.minimax_music3 import MiniMaxMusic3Blocks
from diffusers.modular_pipelines.wan import WanBlocks
from pipelines import noise
from torch import nn

STEPS = 4


@dataclasses.dataclass
class Case:
    """A pipeline, what it is called with, and the name of what it draws."""

    pipe: Any
    call: dict[str, Any]
    output: str = "latents"

    def __call__(self) -> torch.Tensor:
        found = self.pipe(**self.call, generator=torch.Generator().manual_seed(7), output=self.output)
        return torch.cat(found, -1) if isinstance(found, list) else found


def pipe_of(blocks: Any, **components: Any) -> Any:
    """The pipeline of blocks, with these components and a scheduler."""
    pipe = blocks.init_pipeline()
    for model in components.values():
        for parameter in model.eval().parameters():
            if not parameter.abs().max() > 2e-3:
                nn.init.normal_(parameter, std=0.05)
    pipe.update_components(**components, scheduler=FlowMatchEulerDiscreteScheduler())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def words(*shape: int) -> dict[str, torch.Tensor]:
    return {"prompt_embeds": noise(*shape), "negative_prompt_embeds": noise(*shape) * 0.1}


def anima() -> Case:
    """A second model makes one text of two; guidance is two calls."""
    model = CosmosTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=2, mlp_ratio=2,
        text_embed_dim=16, adaln_lora_dim=4, max_size=(4, 32, 32), patch_size=(1, 2, 2), rope_scale=(2.0, 1.0, 1.0),
        concat_padding_mask=True, extra_pos_embed_type=None,
    )  # fmt: skip
    text = AnimaTextConditioner(
        source_dim=16, target_dim=16, model_dim=16, num_layers=2, num_attention_heads=2, target_vocab_size=32,
        min_sequence_length=12,
    )  # fmt: skip
    call = {"height": 64, "width": 64, "num_inference_steps": STEPS}
    for sign, what in enumerate(("", "negative_")):
        call[f"{what}qwen_prompt_embeds"] = noise(1, 6, 16) * (1 - sign / 2)
        call[f"{what}t5_input_ids"] = torch.arange(8)[None] + sign
        call |= {f"{what}qwen_attention_mask": torch.ones(1, 6).bool(), f"{what}t5_attention_mask": torch.ones(1, 8).bool()}
    blocks = AnimaAutoBlocks().sub_blocks["denoise"].sub_blocks["text2image"]
    return Case(pipe_of(blocks, transformer=model, text_conditioner=text), call)


def flux3() -> Case:
    """Its blocks ask for the signature of the model's forward."""
    model = Flux3Transformer2DModel(
        in_channels=16, cond_in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, timestep_channels=32, axes_dims_rope=(4, 4, 4, 4),
    )  # fmt: skip
    blocks = Flux3AutoBlocks().sub_blocks["denoise"].sub_blocks["text2image"]
    call = {**words(1, 12, 32), "height": 64, "width": 64, "num_inference_steps": STEPS}
    return Case(pipe_of(blocks, transformer=model), call)


def h3() -> Case:
    """A video and its sound, each with a scheduler."""
    model = MiniMaxH3Transformer3DModel(
        num_attention_heads=2, attention_head_dim=16, hidden_size=24, num_layers=2, num_refiner_layers=1, ffn_dim=32,
        in_channels=24, audio_in_channels=32, text_dim=8, freq_dim=8, time_embed_hidden_dim=24, time_embed_dim=16,
        rope_freq_dim=2,
    )  # fmt: skip
    pipe = pipe_of(MiniMaxH3Blocks().sub_blocks["denoise"].sub_blocks["t2va"], transformer=model)
    pipe.update_components(audio_scheduler=FlowMatchEulerDiscreteScheduler())
    call = {"prompt_embeds": noise(1, 4, 8), "text_token_tags": torch.ones(4).long(), "num_inference_steps": STEPS}
    return Case(pipe, {**call, "height": 32, "width": 32, "num_frames": 124})


def music3() -> Case:
    """A model that conditions, called once for each piece of the music; two pieces that share a stretch."""
    model = MiniMaxMusic3Transformer1DModel(
        in_channels=8, condition_dim=16, num_layers=2, num_attention_heads=2, attention_head_dim=8, ff_inner_dim=32,
        rotary_dim=4, fourier_embedding_dim=8,
    )  # fmt: skip
    condition = MiniMaxMusic3ConditionEncoder(condition_hidden_dim=8, num_condition_layers=2, out_dim=16)
    pipe = pipe_of(MiniMaxMusic3Blocks().sub_blocks["denoise"], transformer=model, condition_encoder=condition)
    return Case(pipe, {"frame_hiddens": noise(1, 210, 16), "num_inference_steps": STEPS}, "latent_chunks")


def wan() -> Case:
    """A video; its attention is of a class that guiders know."""
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=16, out_channels=16, text_dim=16,
        freq_dim=32, ffn_dim=32, num_layers=2, cross_attn_norm=True, rope_max_seq_len=32, qk_norm="rms_norm_across_heads",
    )  # fmt: skip
    pipe = pipe_of(WanBlocks().sub_blocks["denoise"], transformer=model)
    call = {**words(1, 12, 16), "height": 64, "width": 64, "num_frames": 5, "num_inference_steps": STEPS}
    return Case(pipe, call)


def made(name: str) -> Case:
    """A pipeline by name; the same weights each time."""
    return small.seeded(PIPELINES[name])


PIPELINES: dict[str, Callable[[], Case]] = {"anima": anima, "flux3": flux3, "h3": h3, "music3": music3, "wan": wan}
