"""Tiny pipelines of diffusers, one of each family, whole: with text encoders and tokenizers, of random weights, made offline.

`make("flux")` is a pipeline, `save("flux", folder)` its folder, `CALLS["flux"]` what its call needs beside a prompt and a size.
All draw 64 x 64; text goes in as words, and captions of other words or another length are other tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

SIZE = 64  # a side of the pictures
SPECIAL = ("<pad>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>")
WORDS = (
    "a an the of and on in with by red blue gold green white black photo picture video ball cube box cat dog "
    "system user assistant describe image detailing color shape size texture quantity text spatial relationships objects "
    "background , . : ; ! ? \n"
).split(" ")
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
VOCABULARY = {word: n for n, word in enumerate(dict.fromkeys((*SPECIAL, *WORDS, *LETTERS, *(f"##{x}" for x in LETTERS))))}
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IDS = {"vocab_size": len(VOCABULARY), "pad_token_id": 0, "eos_token_id": 1}

# what a call needs beside prompt, height and width
CALLS: dict[str, dict[str, Any]] = {
    "sd15": {}, "sdxl": {}, "sd3": {}, "flux": {}, "qwen_image": {}, "z_image": {},
    "pixart": {"use_resolution_binning": False},
    "sana": {"use_resolution_binning": False, "complex_human_instruction": None},
    "wan": {"num_frames": 1}, "wan22": {"num_frames": 1}, "ltx": {"num_frames": 1}, "ltx2": {"num_frames": 1},
}  # fmt: skip
# which argument guides, and with which value each sample is in a call of the denoiser once
UNGUIDED: dict[str, dict[str, Any]] = {
    **{name: {"guidance_scale": 1.0} for name in CALLS}, "z_image": {"guidance_scale": 0.0},
    "qwen_image": {"true_cfg_scale": 1.0}, "wan22": {"guidance_scale": 1.0, "guidance_scale_2": 1.0},
    "ltx2": {"guidance_scale": 1.0, "audio_guidance_scale": 1.0, "stg_scale": 0.0, "audio_stg_scale": 0.0,
             "modality_scale": 1.0, "audio_modality_scale": 1.0, "guidance_rescale": 0.0, "audio_guidance_rescale": 0.0},
}  # fmt: skip


def make(name: str, seed: int = 0) -> Any:
    """Make a pipeline by its name in `CALLS`; the same weights each time, none of them zero."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        pipe = MADE[name]()
        for part in pipe.components.values():
            for parameter in part.parameters() if isinstance(part, torch.nn.Module) else ():
                if not parameter.any():  # as adaptive norms and last layers begin: with them nothing reaches the output
                    torch.nn.init.normal_(parameter, std=0.05)
    pipe.set_progress_bar_config(disable=True)
    pipe.made_of = f"tiny {name} {seed}"  # by which `runs` knows it again
    return pipe


def save(name: str, folder: Any, seed: int = 0) -> Path:
    """Write a pipeline as diffusers does, and return its folder."""
    make(name, seed).save_pretrained(folder)
    return Path(folder)


def draw(pipe: Any, name: str, prompt: Any = "a red ball", steps: int = 2, **more: Any) -> torch.Tensor:
    """Latents that a pipeline ends with, from the same noise each time."""
    given = {"height": SIZE, "width": SIZE, **CALLS[name], **more}
    generator = torch.Generator().manual_seed(7)
    prompt = list(prompt) if isinstance(prompt, list) else prompt  # Z-Image writes into it
    made = pipe(prompt=prompt, num_inference_steps=steps, generator=generator, output_type="latent", **given)
    return torch.as_tensor(made[0])


# --- parts that several have


def tokenizer(length: int, **more: Any) -> Any:
    """Make a tokenizer of a few whole words, and of letters for others; texts end with <eos>."""
    made = Tokenizer(models.WordPiece(VOCABULARY, unk_token="<unk>"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|[a-zA-Z0-9]+|[^\sa-zA-Z0-9]"), "removed", invert=True)
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(list(SPECIAL))
    made.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special, model_max_length=length, **more)


def clip(kind: type = transformers.CLIPTextModel, width: int = 12) -> Any:
    sizes = {"hidden_size": width, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"max_position_embeddings": 16, "bos_token_id": 3, "projection_dim": 12}
    return kind(transformers.CLIPTextConfig(**IDS, **sizes, **more)).eval()


def clip_projected() -> Any:
    return clip(transformers.CLIPTextModelWithProjection)


def t5(width: int = 12, family: str = "T5") -> Any:
    config = getattr(transformers, f"{family}Config")
    sizes = {"d_model": width, "d_kv": 6, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return getattr(transformers, f"{family}EncoderModel")(config(**IDS, **sizes)).eval()


def vae(channels: int = 4, **more: Any) -> Any:
    """Make an autoencoder of pictures, of eight pixels a side to one."""
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    return diffusers.AutoencoderKL(
        block_out_channels=(8,) * 4, latent_channels=channels, norm_num_groups=4, **blocks, **more
    ).eval()


def flow(**more: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**more)


def unet(**more: Any) -> Any:
    return diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), **more,
    ).eval()  # fmt: skip


BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}


# --- families


def sd15() -> Any:
    return diffusers.StableDiffusionPipeline(
        vae=vae(scaling_factor=0.18215), text_encoder=clip(), tokenizer=tokenizer(16), safety_checker=None,
        unet=unet(cross_attention_dim=12, attention_head_dim=2), feature_extractor=None, requires_safety_checker=False,
        scheduler=diffusers.DDIMScheduler(**BETAS, clip_sample=False, set_alpha_to_one=False),
    )  # fmt: skip


def sdxl() -> Any:
    sizes = {"addition_embed_type": "text_time", "addition_time_embed_dim": 4, "projection_class_embeddings_input_dim": 36}
    return diffusers.StableDiffusionXLPipeline(
        vae=vae(scaling_factor=0.13025), text_encoder=clip(), text_encoder_2=clip_projected(), tokenizer=tokenizer(16),
        tokenizer_2=tokenizer(16), scheduler=diffusers.EulerDiscreteScheduler(**BETAS),
        unet=unet(cross_attention_dim=24, attention_head_dim=(1, 2), use_linear_projection=True, **sizes),
    )  # fmt: skip


def sd3() -> Any:
    model = diffusers.SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, out_channels=4, num_layers=2, num_attention_heads=2, attention_head_dim=8,
        caption_projection_dim=16, joint_attention_dim=24, pooled_projection_dim=24, pos_embed_max_size=24,
    )  # fmt: skip
    return diffusers.StableDiffusion3Pipeline(
        transformer=model.eval(), scheduler=flow(shift=3.0), vae=vae(scaling_factor=1.5305, shift_factor=0.0609),
        text_encoder=clip_projected(), tokenizer=tokenizer(16), text_encoder_2=clip_projected(), tokenizer_2=tokenizer(16),
        text_encoder_3=t5(24), tokenizer_3=tokenizer(64),
    )  # fmt: skip


def flux() -> Any:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, num_attention_heads=2, attention_head_dim=16,
        joint_attention_dim=12, pooled_projection_dim=12, axes_dims_rope=(4, 4, 8), guidance_embeds=True,
    )  # fmt: skip
    return diffusers.FluxPipeline(
        transformer=model.eval(), scheduler=flow(shift=3.0, use_dynamic_shifting=True), text_encoder=clip(),
        tokenizer=tokenizer(16), text_encoder_2=t5(), tokenizer_2=tokenizer(64),
        vae=vae(scaling_factor=0.3611, shift_factor=0.1159),
    )  # fmt: skip


def pixart() -> Any:
    model = diffusers.PixArtTransformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=8, num_layers=2, num_attention_heads=2, attention_head_dim=8,
        cross_attention_dim=16, caption_channels=12, use_additional_conditions=False,
    )  # fmt: skip
    return diffusers.PixArtSigmaPipeline(
        tokenizer=tokenizer(64), text_encoder=t5(), vae=vae(), transformer=model.eval(),
        scheduler=diffusers.DPMSolverMultistepScheduler(),
    )  # fmt: skip


def sana() -> Any:
    model = diffusers.SanaTransformer2DModel(
        sample_size=32, patch_size=1, in_channels=4, out_channels=4, num_layers=1, num_attention_heads=2, attention_head_dim=4,
        num_cross_attention_heads=2, cross_attention_head_dim=4, cross_attention_dim=8, caption_channels=8,
    )  # fmt: skip
    blocks = {
        f"{way}_{key}": value for way in ("encoder", "decoder") for key, value in {
            "block_types": ("ResBlock", "EfficientViTBlock"), "block_out_channels": (8, 8), "layers_per_block": (1, 1),
            "qkv_multiscales": ((), (5,)),
        }.items()
    }  # fmt: skip
    decoder = diffusers.AutoencoderDC(
        latent_channels=4, attention_head_dim=2, downsample_block_type="conv", upsample_block_type="interpolate",
        scaling_factor=0.41407, **blocks,
    )  # fmt: skip
    text = transformers.Gemma2Config(
        **IDS, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=4, bos_token_id=1,
    )  # fmt: skip
    return diffusers.SanaPipeline(
        tokenizer=tokenizer(300), text_encoder=transformers.Gemma2Model(text).eval(), vae=decoder.eval(),
        transformer=model.eval(), scheduler=flow(shift=3.0),
    )  # fmt: skip


def qwen_image() -> Any:
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, num_attention_heads=3, attention_head_dim=16,
        joint_attention_dim=16, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    decoder = diffusers.AutoencoderKLQwenImage(
        base_dim=12, z_dim=4, dim_mult=[1, 2, 2, 2], num_res_blocks=1, temperal_downsample=[False, True, True],
        latents_mean=[0.1, -0.2, 0.3, 0.4], latents_std=[1.1, 1.2, 0.9, 0.8],
    )  # fmt: skip
    words = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    rope = {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"}
    text = transformers.Qwen2_5_VLConfig(
        text_config={**IDS, **words, "bos_token_id": 1, "num_key_value_heads": 2, "rope_scaling": rope},
        vision_config={"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16},
        image_token_id=2, video_token_id=2, vision_start_token_id=2, vision_end_token_id=2,
    )  # fmt: skip
    shifted = {"base_shift": 0.5, "max_shift": 0.9, "max_image_seq_len": 8192, "shift": 1.0, "shift_terminal": 0.02}
    return diffusers.QwenImagePipeline(
        transformer=model.eval(), vae=decoder.eval(), tokenizer=tokenizer(1024),
        text_encoder=transformers.Qwen2_5_VLForConditionalGeneration(text).eval(),
        scheduler=flow(use_dynamic_shifting=True, time_shift_type="exponential", **shifted),
    )  # fmt: skip


def z_image() -> Any:
    model = diffusers.ZImageTransformer2DModel(
        all_patch_size=(2,), all_f_patch_size=(1,), in_channels=16, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2,
        n_kv_heads=2, cap_feat_dim=16, axes_dims=[8, 4, 4], axes_lens=[256, 32, 32],
    )  # fmt: skip
    text = transformers.Qwen3Config(
        **IDS, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=8,
    )  # fmt: skip
    return diffusers.ZImagePipeline(
        transformer=model.eval(), vae=vae(16, scaling_factor=0.3611, shift_factor=0.1159), scheduler=flow(shift=3.0),
        text_encoder=transformers.Qwen3Model(text).eval(), tokenizer=tokenizer(512, chat_template=CHAT),
    )  # fmt: skip


def wan(**more: Any) -> Any:
    def model() -> Any:
        return diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2), in_channels=16, out_channels=16, num_layers=2, num_attention_heads=2, attention_head_dim=12,
            text_dim=12, freq_dim=32, ffn_dim=32, rope_max_seq_len=32,
        ).eval()  # fmt: skip

    decoder = diffusers.AutoencoderKLWan(base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    steps = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    second = {"transformer_2": model()} if "boundary_ratio" in more else {}
    return diffusers.WanPipeline(
        tokenizer=tokenizer(512), text_encoder=t5(family="UMT5"), vae=decoder.eval(), transformer=model(),
        scheduler=diffusers.UniPCMultistepScheduler(**steps), **second, **more,
    )  # fmt: skip


def wan22() -> Any:
    """Make Wan with two denoisers: one for early times, one for late ones."""
    return wan(boundary_ratio=0.875)


def ltx() -> Any:
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_layers=1, num_attention_heads=4, attention_head_dim=8, cross_attention_dim=32,
        caption_channels=12,
    )  # fmt: skip
    decoder = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8, block_out_channels=(8,) * 4, decoder_block_out_channels=(8,) * 4, layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5, spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False), decoder_inject_noise=(False,) * 5,
        upsample_residual=(False,) * 4, upsample_factor=(1,) * 4, patch_size=1,
    )  # fmt: skip
    shifted = {"base_shift": 0.95, "max_shift": 2.05, "base_image_seq_len": 1024, "max_image_seq_len": 4096}
    return diffusers.LTXPipeline(
        transformer=model.eval(), vae=decoder.eval(), scheduler=flow(use_dynamic_shifting=True, **shifted),
        text_encoder=t5(), tokenizer=tokenizer(128),
    )  # fmt: skip


def ltx2() -> Any:
    """Make LTX-2, whose denoiser has the latents of a sound beside those of the video."""
    model = diffusers.LTX2VideoTransformer3DModel(
        in_channels=8, out_channels=8, num_layers=2, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16,
        audio_in_channels=8, audio_out_channels=8, audio_num_attention_heads=2, audio_attention_head_dim=4,
        audio_cross_attention_dim=8, caption_channels=16, rope_double_precision=False, rope_type="split",
    )  # fmt: skip
    decoder = diffusers.AutoencoderKLLTX2Video(
        latent_channels=8, block_out_channels=(8,) * 4, decoder_block_out_channels=(8,) * 3, layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 4, spatio_temporal_scaling=(True,) * 4, decoder_spatio_temporal_scaling=(True,) * 3,
        decoder_inject_noise=(False,) * 4, upsample_residual=(True,) * 3, upsample_factor=(1,) * 3, patch_size=4,
        downsample_type=("spatial", "temporal", "spatiotemporal", "spatiotemporal"), decoder_causal=False,
        spatial_compression_ratio=32, temporal_compression_ratio=8,
    )  # fmt: skip
    sound = diffusers.AutoencoderKLLTX2Audio(
        base_channels=8, output_channels=2, ch_mult=(1, 1), num_res_blocks=1, in_channels=2, resolution=16, latent_channels=2,
        norm_type="pixel", causality_axis="height", mid_block_add_attention=False, mel_bins=16,
    )  # fmt: skip
    text = transformers.Gemma3Config(
        text_config={**IDS, "bos_token_id": 1, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
                     "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
        vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "image_size": 32, "patch_size": 8},
        mm_tokens_per_image=4, image_token_index=2, boi_token_index=2, eoi_token_index=2,
    )  # fmt: skip
    connectors = LTX2TextConnectors(
        caption_channels=16, text_proj_in_factor=3, video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=8, video_connector_num_layers=1, video_connector_num_learnable_registers=None,
        audio_connector_num_attention_heads=2, audio_connector_attention_head_dim=8, audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=None, rope_double_precision=False, rope_type="split",
    )  # fmt: skip
    vocoder = LTX2Vocoder(
        in_channels=32, hidden_channels=16, upsample_kernel_sizes=[4, 4], upsample_factors=[2, 2], resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3]], output_sampling_rate=16000,
    )  # fmt: skip
    shifted = {"base_shift": 0.95, "max_shift": 2.05, "base_image_seq_len": 1024, "max_image_seq_len": 4096}
    return diffusers.LTX2Pipeline(
        transformer=model.eval(), vae=decoder.eval(), audio_vae=sound.eval(), vocoder=vocoder.eval(),
        scheduler=flow(use_dynamic_shifting=True, shift_terminal=0.1, **shifted), connectors=connectors.eval(),
        text_encoder=transformers.Gemma3ForConditionalGeneration(text).eval(), tokenizer=tokenizer(64),
    )  # fmt: skip


MADE: dict[str, Callable[[], Any]] = {
    "sd15": sd15, "sdxl": sdxl, "sd3": sd3, "flux": flux, "pixart": pixart, "sana": sana, "qwen_image": qwen_image,
    "wan": wan, "wan22": wan22, "ltx": ltx, "ltx2": ltx2, "z_image": z_image,
}  # fmt: skip


def move_weights(module):
    """Move weights that are mapped from a file to memory of torch's: by their address MKL sums in another order on AMD's."""
    for weight in [*module.parameters(), *module.buffers()]:
        weight.data = weight.data.clone()
