"""Small pipelines of diffusers, of random weights, and what they call their models with."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import diffusers
import small
import torch
import unets
from diffusers import (
    AutoencoderKL,
    AutoencoderKLCogVideoX,
    CogVideoXDDIMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    DDIMScheduler,
    DiTPipeline,
    DiTTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    PixArtAlphaPipeline,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionPipeline,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

STEPS = 4


@dataclasses.dataclass
class Case:
    """A pipeline, and how it is called; `more` are keyword arguments that take the place of those it is called with."""

    pipe: Any
    call: Callable[..., Any]

    def __call__(self, **more: Any) -> torch.Tensor:
        """The picture, or the video, from the same noise each time."""
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            out = self.call(self.pipe, generator=generator, num_inference_steps=STEPS, **more)
        return out if isinstance(out, torch.Tensor) else torch.as_tensor(out)

    def with_transformer(self, model: Any) -> Case:
        """The same pipeline with another model and a scheduler of its own."""
        pipe = copy.copy(self.pipe)
        pipe.scheduler = copy.deepcopy(self.pipe.scheduler)
        pipe.transformer = model
        return Case(pipe, self.call)

    def called_with(self, **more: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the pipeline calls its model with first."""
        found: list[Any] = []
        model = self.pipe.transformer

        def note(module: Any, args: Any, kwargs: Any) -> None:
            found.append((args, kwargs))

        handle = model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            self(**more)
        finally:
            handle.remove()
        return found[0]


def vae(channels: int) -> AutoencoderKL:
    return AutoencoderKL(block_out_channels=(8, 8), latent_channels=channels, norm_num_groups=4, shift_factor=0.1).eval()


def quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def dit() -> Case:
    """Guidance doubles its batch; 16 x 16 latents are 64 tokens."""
    model = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, patch_size=2, sample_size=16,
        norm_type="ada_norm_zero", num_embeds_ada_norm=1000, activation_fn="gelu-approximate",
    )  # fmt: skip

    def call(pipe: Any, labels: Any = (3,), guidance: float = 4.0, **given: Any) -> Any:
        return pipe(list(labels), guidance_scale=guidance, output_type="np", **given).images

    return Case(quiet(DiTPipeline(model.eval(), vae(4), DDIMScheduler(clip_sample=False))), call)


def pixart() -> Case:
    """Text of 7 tokens with a mask, 5 of them given."""
    model = PixArtTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, patch_size=2, sample_size=16,
        cross_attention_dim=32, norm_type="ada_norm_single", num_embeds_ada_norm=1000, norm_elementwise_affine=False,
        norm_eps=1e-6, caption_channels=12, activation_fn="gelu-approximate", use_additional_conditions=False,
    )  # fmt: skip

    def call(pipe: Any, texts: int = 1, length: int = 7, size: tuple[int, int] = (32, 32), **given: Any) -> Any:
        mask = (torch.arange(length) < length - 2).long().expand(texts, -1)
        return pipe(
            prompt_embeds=noise(texts, length, 12), prompt_attention_mask=mask, negative_prompt=None,
            negative_prompt_embeds=noise(texts, length, 12) * 0.1, negative_prompt_attention_mask=mask,
            height=size[0], width=size[1], use_resolution_binning=False, output_type="np", **given,
        ).images  # fmt: skip

    pipe = PixArtAlphaPipeline(None, None, vae(4), model.eval(), DDIMScheduler(clip_sample=False))
    return Case(quiet(pipe), call)


def sd3() -> Case:
    """Text and image attend jointly."""
    model = SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        caption_projection_dim=32, joint_attention_dim=24, pooled_projection_dim=16, out_channels=4, pos_embed_max_size=24,
    )  # fmt: skip

    def call(pipe: Any, texts: int = 1, length: int = 9, size: tuple[int, int] = (32, 32), **given: Any) -> Any:
        return pipe(
            prompt_embeds=noise(texts, length, 24), negative_prompt_embeds=noise(texts, length, 24) * 0.1,
            pooled_prompt_embeds=noise(texts, 16), negative_pooled_prompt_embeds=noise(texts, 16) * 0.1,
            height=size[0], width=size[1], output_type="np", **given,
        ).images  # fmt: skip

    parts = dict.fromkeys(
        ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3")
    )
    pipe = StableDiffusion3Pipeline(
        transformer=model.eval(), scheduler=FlowMatchEulerDiscreteScheduler(), vae=vae(4), **parts
    )
    return Case(quiet(pipe), call)


def flux() -> Case:
    """Rotary positions, joint and single blocks, packed latents."""
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=24, pooled_projection_dim=16, axes_dims_rope=(4, 4, 8), guidance_embeds=True,
    )  # fmt: skip

    def call(pipe: Any, texts: int = 1, length: int = 9, size: tuple[int, int] = (32, 32), **given: Any) -> Any:
        return pipe(
            prompt_embeds=noise(texts, length, 24), pooled_prompt_embeds=noise(texts, 16), height=size[0], width=size[1],
            output_type="np", **given,
        ).images  # fmt: skip

    parts = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    pipe = FluxPipeline(transformer=model.eval(), scheduler=FlowMatchEulerDiscreteScheduler(), vae=vae(4), **parts)
    return Case(quiet(pipe), call)


def cogvideox() -> Case:
    """A video of 9 frames."""
    model = CogVideoXTransformer3DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=4, time_embed_dim=2, text_embed_dim=24,
        num_layers=2, sample_width=8, sample_height=8, sample_frames=9, patch_size=2, temporal_compression_ratio=4,
        max_text_seq_length=9,
    )  # fmt: skip
    decoder = AutoencoderKLCogVideoX(
        in_channels=3, out_channels=3, latent_channels=4, layers_per_block=1, norm_num_groups=2, temporal_compression_ratio=4,
        down_block_types=("CogVideoXDownBlock3D",) * 4, up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
    )  # fmt: skip

    def call(pipe: Any, texts: int = 1, length: int = 9, size: tuple[int, int] = (64, 64), **given: Any) -> Any:
        return pipe(
            prompt_embeds=noise(texts, length, 24), negative_prompt_embeds=noise(texts, length, 24) * 0.1, height=size[0],
            width=size[1], num_frames=9, max_sequence_length=length, output_type="latent", **given,
        ).frames  # fmt: skip

    pipe = CogVideoXPipeline(
        tokenizer=None, text_encoder=None, vae=decoder.eval(), transformer=model.eval(), scheduler=CogVideoXDDIMScheduler()
    )
    return Case(quiet(pipe), call)


def tokenizer(folder: Any) -> CLIPTokenizer:
    """Letters, each a token."""
    letters = [chr(n) for n in range(ord("a"), ord("z") + 1)]
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    (folder / "vocab.json").write_text(json.dumps({word: n for n, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=8)


def stable_diffusion(folder: Any, **parts: Any) -> Any:
    """Stable Diffusion with its text encoder, or with the part `controlnet` its pipeline; the same weights each time."""

    def models() -> dict[str, Any]:
        text = CLIPTextConfig(
            vocab_size=60, hidden_size=12, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=8, bos_token_id=0, eos_token_id=1, pad_token_id=1,
        )  # fmt: skip
        blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
        decoder = AutoencoderKL(block_out_channels=(8, 8, 8, 8), latent_channels=4, norm_num_groups=4, **blocks)
        unet = unets.sd15_model(sample_size=8)
        return {"vae": decoder.eval(), "text_encoder": CLIPTextModel(text).eval(), "unet": unet}

    kind = StableDiffusionControlNetPipeline if "controlnet" in parts else StableDiffusionPipeline
    rest = {"scheduler": DDIMScheduler(clip_sample=False, steps_offset=1), "tokenizer": tokenizer(folder)}
    none = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    return quiet(kind(**small.seeded(models), **rest, **none, **parts))


def controlled(name: str) -> tuple[Any, dict[str, Any]]:
    """A pipeline of SDXL with a ControlNet, by the end of its class's name, and how it is called."""
    kind = getattr(diffusers, f"StableDiffusionXLControlNet{name}Pipeline")
    unet = small.seeded(unets.small_sdxl_model)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    decoder = AutoencoderKL(block_out_channels=(8, 8, 8, 8), latent_channels=4, norm_num_groups=4, **blocks)
    parts = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    image = torch.rand(1, 3, 128, 128, generator=torch.Generator().manual_seed(1))
    given: dict[str, Any] = {"image": image}
    if name:
        given |= {"control_image": image.flip(-1), "strength": 0.9}
    if name == "Inpaint":
        given["mask_image"] = (image[:, :1] > 0.5).float()

    text = {"prompt_embeds": noise(1, 5, 12), "pooled_prompt_embeds": noise(1, 8)}
    given |= {**text, **{f"negative_{key}": value * 0.1 for key, value in text.items()}, "num_inference_steps": 2}
    given |= {"height": 128, "width": 128, "output_type": "pt"}
    scheduler = DDIMScheduler(clip_sample=False)
    pipe = kind(vae=decoder.eval(), unet=unet, controlnet=unets.control(unet), scheduler=scheduler, **parts)
    return quiet(pipe), given


def made(name: str) -> Case:
    """A pipeline by name; the same weights each time."""
    return small.seeded(PIPELINES[name])


PIPELINES: dict[str, Callable[[], Case]] = {
    "dit": dit, "pixart": pixart, "sd3": sd3, "flux": flux, "cogvideox": cogvideox,
}  # fmt: skip
