"""The model zoo: one small, randomly weighted case for every timm model family and diffusers model class.

Nothing is downloaded. `cases()` gives the list; building a case and its inputs is lazy and deterministic.
In the tables below an input function takes `b`, the batch size, and `n`, the side of the (latent) image or
the length of the audio, so that a case with two `sides` can be run at two resolutions.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[..., tuple[tuple, dict]]
    sizes: int = 1
    batches: tuple[int, ...] = (1, 2, 3)
    fast: bool = False
    note: str = ""


# --- random tensors and weights -----------------------------------------------------------------------------

_gen = torch.Generator()


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=_gen)


def u(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=_gen)


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=_gen)


def ts(b: int) -> torch.Tensor:
    return ints(1000, b)


def mask(b: int, length: int, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    """Padding mask; the last token of the last row is padding."""
    m = torch.ones(b, length, dtype=dtype)
    m[-1, -1] = 0
    return m


def grid(n: int, axes: int = 3) -> torch.Tensor:
    """Position ids (n*n, axes) of an n x n image, rows and columns in the two axes after the first."""
    ids = torch.zeros(n, n, axes)
    ids[..., 1] = torch.arange(n)[:, None]
    ids[..., 2] = torch.arange(n)[None, :]
    return ids.reshape(n * n, axes)


def _randomize(model: nn.Module) -> None:
    """Give every zero, tiny or uninitialised parameter and every BatchNorm statistic a random value."""
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point() and p.numel() and not (p.isfinite().all() and p.abs().max() > 2e-3):
                p.copy_(torch.randn(p.shape) * 0.05)
        for m in model.modules():
            if getattr(m, "running_var", None) is not None:
                m.running_mean.copy_(torch.randn(m.running_mean.shape) * 0.1)
                m.running_var.copy_(torch.rand(m.running_var.shape) + 0.5)


def _make(construct: Callable[[], nn.Module]) -> nn.Module:
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            # Deterministic mode fills what torch.empty returns with NaN, which _randomize then replaces.
            torch.use_deterministic_algorithms(True, warn_only=True)
            model = construct()
        finally:
            torch.use_deterministic_algorithms(was[0], warn_only=was[1])
        _randomize(model)
    return model.eval()


# fmt: off
# --- diffusers ----------------------------------------------------------------------------------------------

_CASES: list[Case] = []
_COVERED: set[str] = set()
_RNG = "draws from the global generator: seed it before each call"
_FLEX = "flex attention: compiles a kernel at its first call, no backward on CPU"


def _class(name: str, module: str = "") -> type[nn.Module]:
    return getattr(importlib.import_module(module or "diffusers"), name)


def d(cls: str, config: dict | Callable[[], nn.Module], kwargs: Callable[[int, int], dict], *sides: int,
      tag: str = "", module: str = "", full: bool = False, fast: bool = False, batches=(1, 2, 3),
      grad: bool = True, note: str = "") -> None:
    """Add a case of the diffusers class `cls`.

    `full` leaves return_dict at its default, True; `grad=False` is for models without a CPU backward pass.
    """
    sides = sides or (8,)

    def build() -> nn.Module:
        model = _make(config if callable(config) else lambda: _class(cls, module)(**config))
        return model.requires_grad_(grad)

    def inputs(batch: int = 1, size: int = 0) -> tuple[tuple, dict]:
        _gen.manual_seed(batch * 10 + size)
        kw = kwargs(batch, sides[size])
        args = kw.pop("*", ())
        if not full and "return_dict" in inspect.signature(_class(cls, module).forward).parameters:
            kw["return_dict"] = False
        return args, kw

    name = f"diffusers/{cls}" + (f"-{tag}" if tag else "")
    _COVERED.add(cls)
    _CASES.append(Case(name, build, inputs, len(sides), batches, fast, note))


# UNets

_UNET = dict(
    block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, attention_head_dim=2,
    cross_attention_dim=8,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), in_channels=4, out_channels=4, sample_size=16,
)


def _unet(b: int, n: int, dim: int = 8, **more) -> dict:
    return dict(sample=r(b, 4, n, n), timestep=ts(b), encoder_hidden_states=r(b, 6, dim), **more)


d("UNet2DConditionModel", _UNET, _unet, 16, 24, tag="sd15", full=True, fast=True)
d("UNet2DConditionModel", _UNET | dict(use_linear_projection=True, attention_head_dim=(2, 4),
    upcast_attention=True),
  _unet, 16, 24, tag="sd2", fast=True)
d("UNet2DConditionModel", _UNET | dict(
    use_linear_projection=True, transformer_layers_per_block=(1, 2), addition_embed_type="text_time",
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    addition_time_embed_dim=8, projection_class_embeddings_input_dim=64),
  lambda b, n: _unet(b, n, added_cond_kwargs=dict(text_embeds=r(b, 16), time_ids=ints(99, b, 6))),
  16, 24, tag="sdxl", full=True, fast=True)
d("UNet2DConditionModel", _UNET | dict(num_class_embeds=10),
  lambda b, n: _unet(b, n, class_labels=ints(10, b)), 16, 24, tag="class")
d("UNet2DConditionModel", _UNET | dict(class_embed_type="timestep"),
  lambda b, n: _unet(b, n, class_labels=ints(10, b)), 16, 24, tag="class-timestep")
d("UNet2DConditionModel", _UNET | dict(class_embed_type="projection",
    projection_class_embeddings_input_dim=12),
  lambda b, n: _unet(b, n, class_labels=r(b, 12)), 16, 24, tag="class-projection")
d("UNet2DConditionModel", _UNET | dict(
    class_embed_type="simple_projection", projection_class_embeddings_input_dim=12,
    class_embeddings_concat=True),
  lambda b, n: _unet(b, n, class_labels=r(b, 12)), 16, 24, tag="class-concat")
d("UNet2DConditionModel", _UNET | dict(
    down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"), addition_embed_type="image",
    up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"), out_channels=8, act_fn="gelu",
    mid_block_type="UNetMidBlock2DSimpleCrossAttn", encoder_hid_dim=12, encoder_hid_dim_type="image_proj",
    resnet_time_scale_shift="scale_shift"),
  lambda b, n: dict(sample=r(b, 4, n, n), timestep=ts(b), encoder_hidden_states=None,
                    added_cond_kwargs=dict(image_embeds=r(b, 12))), 16, 24, tag="kandinsky22")
d("UNet2DConditionModel", _UNET | dict(
    down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"), addition_embed_type="text",
    up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"), act_fn="gelu",
    mid_block_type="UNetMidBlock2DSimpleCrossAttn", encoder_hid_dim=12, encoder_hid_dim_type="text_proj",
    resnet_time_scale_shift="scale_shift", cross_attention_norm="group_norm", addition_embed_type_num_heads=2,
    cross_attention_dim=32, only_cross_attention=(True, False), attention_head_dim=4),
  lambda b, n: _unet(b, n, 12, encoder_attention_mask=mask(b, 6)), 16, 24, tag="deepfloyd")
d("UNet2DConditionModel", _UNET | dict(time_cond_proj_dim=12),
  lambda b, n: _unet(b, n, timestep_cond=r(b, 12)), 16, 24, tag="lcm")
d("UNet2DConditionModel", _UNET, lambda b, n: _unet(
    b, n, mid_block_additional_residual=r(b, 16, n // 2, n // 2),
    down_block_additional_residuals=tuple(
        r(b, c, n // k, n // k) for c, k in ((8, 1), (8, 1), (8, 2), (16, 2)))),
  16, 24, tag="with-control")
d("UNet2DConditionModel", _UNET, lambda b, n: _unet(
    b, n, down_intrablock_additional_residuals=[r(b, 8, n, n), r(b, 16, n // 2, n // 2)]),
  16, 24, tag="with-t2i-adapter")
d("UNet2DConditionModel", _UNET | dict(attention_type="gated", attention_head_dim=4), lambda b, n: _unet(
    b, n, cross_attention_kwargs=dict(gligen=dict(
        boxes=u(b, 3, 4), positive_embeddings=r(b, 3, 8), masks=torch.ones(b, 3)))), 16, 24, tag="gligen")
d("UNet2DConditionModel", _UNET | dict(
    time_embedding_type="fourier", center_input_sample=True, mid_block_type=None,
    conv_in_kernel=1, conv_out_kernel=1),
  _unet, 16, 24, tag="fourier")
d("UNet2DModel", dict(
    block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1, attention_head_dim=4, sample_size=16,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D")),
  lambda b, n: dict(sample=r(b, 3, n, n), timestep=ts(b)), 16, 24, full=True, fast=True)
d("UNet2DModel", dict(
    block_out_channels=(32, 32), layers_per_block=1, attention_head_dim=8, sample_size=16,
    norm_num_groups=None, time_embedding_type="fourier", norm_eps=1e-6, mid_block_scale_factor=2**0.5,
    down_block_types=("SkipDownBlock2D", "AttnSkipDownBlock2D"),
    up_block_types=("AttnSkipUpBlock2D", "SkipUpBlock2D")),
  lambda b, n: dict(sample=r(b, 3, n, n), timestep=1 + ts(b)), 16, 24, tag="ncsnpp")
d("UNet2DModel", dict(
    block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1, attention_head_dim=4, sample_size=16,
    down_block_types=("ResnetDownsampleBlock2D", "AttnDownBlock2D"), num_class_embeds=10,
    up_block_types=("AttnUpBlock2D", "ResnetUpsampleBlock2D"), resnet_time_scale_shift="scale_shift",
    downsample_type="resnet", upsample_type="resnet"),
  lambda b, n: dict(sample=r(b, 3, n, n), timestep=7, class_labels=ints(10, b)), 16, 24, tag="class")
d("UNet1DModel", dict(
    block_out_channels=(8, 16), in_channels=14, out_channels=14, time_embedding_type="positional",
    act_fn="swish",
    use_timestep_embedding=True, flip_sin_to_cos=False, freq_shift=1.0, out_block_type="OutConv1DBlock",
    mid_block_type="MidResTemporalBlock1D", down_block_types=("DownResnetBlock1D", "DownResnetBlock1D"),
    up_block_types=("UpResnetBlock1D",)),
  lambda b, n: dict(sample=r(b, 14, n), timestep=ts(b)), 16, 32)
d("UNet1DModel", dict(
    in_channels=14, out_channels=14, down_block_types=("DownResnetBlock1D",) * 4, up_block_types=(),
    out_block_type="ValueFunction", mid_block_type="ValueFunctionMidBlock1D",
    block_out_channels=(8, 16, 32, 64),
    downsample_each_block=True, use_timestep_embedding=True, freq_shift=1.0, flip_sin_to_cos=False,
    time_embedding_type="positional", act_fn="mish"),
  lambda b, n: dict(sample=r(b, 14, n), timestep=ts(b)), 16, tag="value-function")
d("UNet1DModel", dict(sample_size=256, extra_in_channels=64, block_out_channels=(32, 32, 64)),
  lambda b, n: dict(sample=r(b, 2, n), timestep=ts(b)), 256, 512, tag="dance-diffusion")
d("UNet3DConditionModel", _UNET | dict(
    down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
    up_block_types=("UpBlock3D", "CrossAttnUpBlock3D")),
  lambda b, n: dict(sample=r(b, 4, 3, n, n), timestep=ts(b), encoder_hidden_states=r(b, 6, 8)), 16, 24)
d("UNetSpatioTemporalConditionModel", dict(
    block_out_channels=(32, 64), cross_attention_dim=16, num_attention_heads=4, in_channels=4, out_channels=4,
    down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"), layers_per_block=1,
    up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"), sample_size=16,
    projection_class_embeddings_input_dim=24, addition_time_embed_dim=8),
  lambda b, n: dict(sample=r(b, 2, 4, n, n), timestep=ts(b), encoder_hidden_states=r(b, 1, 16),
                    added_time_ids=torch.tensor([[6, 127, 0.02]] * b)), 16, 24, full=True, fast=True)

# Transformers for images

_FLUX = dict(
    patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
    num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
)


def _flux(b: int, n: int, channels: int = 4, dim: int = 32, **more) -> dict:
    return dict(hidden_states=r(b, n * n, channels), encoder_hidden_states=r(b, 12, dim), timestep=u(b),
                img_ids=grid(n), txt_ids=torch.zeros(12, 3), **more)


d("FluxTransformer2DModel", _FLUX | dict(guidance_embeds=True),
  lambda b, n: _flux(b, n, pooled_projections=r(b, 32), guidance=u(b) * 4), 4, 6, full=True, fast=True)
d("FluxTransformer2DModel", _FLUX, lambda b, n: _flux(
    b, n, pooled_projections=r(b, 32), controlnet_block_samples=(r(b, n * n, 32),),
    controlnet_single_block_samples=(r(b, n * n, 32),)), 4, 6, tag="with-control")
d("ChromaTransformer2DModel", {k: v for k, v in _FLUX.items() if k != "pooled_projection_dim"} | dict(
    approximator_num_channels=8, approximator_hidden_dim=16, approximator_layers=1),
  lambda b, n: _flux(b, n, attention_mask=mask(b, 12 + n * n)), 4, 6)
d("BriaTransformer2DModel", _FLUX | dict(attention_head_dim=8, axes_dims_rope=(0, 4, 4),
    pooled_projection_dim=None),
  _flux, 4, 6)
d("BriaFiboTransformer2DModel", _FLUX | dict(
    attention_head_dim=8, axes_dims_rope=(0, 4, 4), pooled_projection_dim=None, text_encoder_dim=16),
  lambda b, n: _flux(b, n, text_encoder_layers=[r(b, 12, 16), r(b, 12, 16)]), 4, 6)
d("OvisImageTransformer2DModel", dict(
    patch_size=1, in_channels=4, out_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
    num_attention_heads=2, joint_attention_dim=32, axes_dims_rope=(4, 4, 8)), _flux, 4, 6)
d("LongCatImageTransformer2DModel", _FLUX, lambda b, n: _flux(b, n, guidance=u(b) * 4), 4, 6)
d("Flux2Transformer2DModel", dict(
    patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
    num_attention_heads=2, joint_attention_dim=32, axes_dims_rope=(4, 4, 4, 4)),
  lambda b, n: dict(
      hidden_states=r(b, n * n, 4), encoder_hidden_states=r(b, 12, 32), timestep=u(b), guidance=u(b) * 4,
      img_ids=grid(n, 4).expand(b, -1, -1), txt_ids=torch.zeros(b, 12, 4)), 4, 6)
_DIT = dict(
    in_channels=4, out_channels=8, num_attention_heads=2, attention_head_dim=4, attention_bias=True,
    num_layers=1, patch_size=2, sample_size=8, activation_fn="gelu-approximate",
)
d("DiTTransformer2DModel", _DIT | dict(norm_type="ada_norm_zero", num_embeds_ada_norm=8),
  lambda b, n: dict(hidden_states=r(b, 4, n, n), timestep=ts(b), class_labels=ints(4, b)), 8, fast=True)
d("PixArtTransformer2DModel", _DIT | dict(
    cross_attention_dim=8, norm_type="ada_norm_single", num_embeds_ada_norm=8,
    use_additional_conditions=False, norm_elementwise_affine=False, norm_eps=1e-6, caption_channels=12),
  lambda b, n: dict(hidden_states=r(b, 4, n, n), timestep=ts(b), encoder_hidden_states=r(b, 7, 12),
                    encoder_attention_mask=mask(b, 7, torch.int64),
                    added_cond_kwargs=dict(aspect_ratio=None, resolution=None)), 8, 12, fast=True)
d("SD3Transformer2DModel", dict(
    sample_size=16, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
    caption_projection_dim=32, joint_attention_dim=32, pooled_projection_dim=16, out_channels=4,
    pos_embed_max_size=24, dual_attention_layers=(), qk_norm=None),
  lambda b, n: dict(hidden_states=r(b, 4, n, n), encoder_hidden_states=r(b, 12, 32), timestep=ts(b),
                    pooled_projections=r(b, 16)), 8, 12, fast=True)
d("SD3Transformer2DModel", dict(
    sample_size=16, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
    caption_projection_dim=32, joint_attention_dim=32, pooled_projection_dim=16, out_channels=4,
    pos_embed_max_size=24, dual_attention_layers=(0,), qk_norm="rms_norm"),
  lambda b, n: dict(hidden_states=r(b, 4, n, n), encoder_hidden_states=r(b, 12, 32), timestep=ts(b),
                    pooled_projections=r(b, 16), block_controlnet_hidden_states=[r(b, n * n // 4, 32)]),
  8, 12, tag="sd35", full=True)
d("Lumina2Transformer2DModel", dict(
    sample_size=16, patch_size=2, in_channels=4, hidden_size=24, num_layers=2, num_refiner_layers=1,
    num_attention_heads=3, num_kv_heads=1, multiple_of=2, axes_dim_rope=(4, 2, 2), axes_lens=(128, 128, 128),
    cap_feat_dim=32),
  lambda b, n: dict(hidden_states=r(b, 4, n, n), encoder_hidden_states=r(b, 10, 32), timestep=u(b),
                    encoder_attention_mask=mask(b, 10)), 8, 12, fast=True)

d("AuraFlowTransformer2DModel", dict(
    sample_size=16, patch_size=2, in_channels=4, num_mmdit_layers=1, num_single_dit_layers=1,
    attention_head_dim=8,
    num_attention_heads=4, caption_projection_dim=32, joint_attention_dim=32, out_channels=4,
    pos_embed_max_size=64),
  lambda b, n: dict(hidden_states=r(b, 4, n, n), encoder_hidden_states=r(b, 12, 32), timestep=u(b)), 8, 12)
_SIZES = dict(original_size=(64, 64), target_size=(64, 64), crop_coords=(0, 0))


def _cogview(b: int, n: int, **more) -> dict:
    sizes = {k: torch.tensor([v] * b, dtype=torch.float32) for k, v in _SIZES.items()}
    return dict(hidden_states=r(b, 4, n, n), encoder_hidden_states=r(b, 8, 8), timestep=ts(b), **sizes,
        **more)


_COGVIEW = dict(
    patch_size=2, in_channels=4, num_layers=2, attention_head_dim=4, num_attention_heads=4, out_channels=4,
    text_embed_dim=8, time_embed_dim=8, condition_dim=4,
)
d("CogView3PlusTransformer2DModel", _COGVIEW | dict(pos_embed_max_size=8, sample_size=8), _cogview, 8, 12)
d("CogView4Transformer2DModel", _COGVIEW | dict(rope_axes_dim=(16, 16)), _cogview, 8, 12)
d("ErnieImageTransformer2DModel", dict(
    hidden_size=32, num_attention_heads=2, num_layers=1, ffn_hidden_size=32, in_channels=16, out_channels=16,
    patch_size=1, text_in_dim=16, rope_axes_dim=(8, 4, 4)),
  lambda b, n: dict(hidden_states=r(b, 16, n, n), timestep=u(b), text_bth=r(b, 10, 16),
                    text_lens=torch.tensor([10] * (b - 1) + [7])), 8, 12)
d("GlmImageTransformer2DModel", dict(
    patch_size=2, in_channels=4, out_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2,
    text_embed_dim=32, time_embed_dim=16, condition_dim=8, prior_vq_quantizer_codebook_size=64),
  lambda b, n: dict(
      hidden_states=r(b, 4, n, n), encoder_hidden_states=r(b, 12, 32), prior_token_id=ints(64, b, n * n // 4),
      prior_token_drop=torch.zeros(b, n * n // 4, dtype=torch.bool), timestep=ts(b),
      target_size=torch.tensor([[n, n]] * b).float(), crop_coords=torch.zeros(b, 2)), 8, 12)
d("HiDreamImageTransformer2DModel", dict(
    patch_size=2, in_channels=4, out_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8,
    num_attention_heads=4, caption_channels=(8, 4), text_emb_dim=8, num_routed_experts=2,
    num_activated_experts=2, axes_dims_rope=(4, 2, 2), max_resolution=(32, 32), llama_layers=(0, 1),
    force_inference_output=True),
  lambda b, n: dict(hidden_states=r(b, 4, n, n), encoder_hidden_states_t5=r(b, 8, 8), timesteps=ts(b),
                    encoder_hidden_states_llama3=r(2, b, 8, 4), pooled_embeds=r(b, 8)), 16, 24)
_HUNYUAN_DIT = dict(
    sample_size=8, patch_size=2, in_channels=4, attention_head_dim=8, num_attention_heads=2,
    cross_attention_dim=8,
    cross_attention_dim_t5=8, pooled_projection_dim=4, hidden_size=16, text_len=4, text_len_t5=4,
)


def _hunyuan_dit(b: int, n: int, **more) -> dict:
    return dict(
        hidden_states=r(b, 4, n, n), timestep=ts(b).float(), encoder_hidden_states=r(b, 4, 8),
        text_embedding_mask=mask(b, 4), encoder_hidden_states_t5=r(b, 4, 8),
        text_embedding_mask_t5=mask(b, 4),
        image_meta_size=torch.tensor([[1024, 1024, 16, 16, 0, 0]] * b).float(), style=ints(1, b),
        image_rotary_emb=(r(n * n // 4, 8).cos(), r(n * n // 4, 8).sin()), **more)


d("HunyuanDiT2DModel", _HUNYUAN_DIT | dict(num_layers=2, activation_fn="gelu-approximate"), _hunyuan_dit, 8)
d("HunyuanImageTransformer2DModel", dict(
    in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=8, num_layers=1,
    num_single_layers=1,
    num_refiner_layers=1, patch_size=(1, 1), guidance_embeds=True, text_embed_dim=32, text_embed_2_dim=16,
    rope_axes_dim=(4, 4)),
  lambda b, n: dict(
      hidden_states=r(b, 4, n, n), timestep=u(b) * 999, encoder_hidden_states=r(b, 9, 32), guidance=u(b) * 4,
      encoder_attention_mask=mask(b, 9), encoder_hidden_states_2=r(b, 7, 16),
      encoder_attention_mask_2=mask(b, 7)), 8, 12)


def _ideogram(b: int, n: int) -> dict:
    text, length = 4, 4 + n * n
    pos = torch.zeros(b, length, 3, dtype=torch.long)
    pos[:, :text] = torch.arange(text)[:, None]
    pos[:, text:] = grid(n).long() + 65536
    is_image = (torch.arange(length) >= text).expand(b, -1)
    return dict(
        hidden_states=r(b, length, 16) * is_image[..., None], timestep=u(b), position_ids=pos,
        encoder_hidden_states=r(b, length, 24) * ~is_image[..., None], indicator=torch.where(is_image, 2, 3),
        segment_ids=torch.ones(b, length, dtype=torch.long))


d("Ideogram4Transformer2DModel", dict(
    in_channels=16, num_layers=2, attention_head_dim=8, num_attention_heads=4, intermediate_size=32,
    adaln_dim=16, llm_features_dim=24, rope_theta=10000, mrope_section=(2, 1, 1)), _ideogram, 2, 4)
_JOY = dict(
    patch_size=(1, 2, 2), in_channels=16, hidden_size=32, num_attention_heads=2, text_dim=16, num_layers=2,
    rope_dim_list=(4, 6, 6), theta=256,
)
d("JoyImageEditTransformer3DModel", _JOY,
  lambda b, n: dict(hidden_states=r(b, 16, 1, n, n), encoder_hidden_states=r(b, 12, 16), timestep=u(b)), 4, 6)
d("JoyImageEditPlusTransformer3DModel", _JOY,
  lambda b, n: dict(hidden_states=r(b, 2 * n, 16, 1, 2, 2), encoder_hidden_states=r(b, 12, 16), timestep=u(b),
                    shape_list=[[(1, 1, n), (1, n, 1)]] * b), 2, 3)
d("Krea2Transformer2DModel", dict(
    in_channels=16, num_layers=2, attention_head_dim=8, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=32, timestep_embed_dim=8, text_hidden_dim=16, num_text_layers=3,
    text_num_attention_heads=2,
    text_num_key_value_heads=1, text_intermediate_size=16, num_layerwise_text_blocks=1,
    num_refiner_text_blocks=1, axes_dims_rope=(4, 2, 2), rope_theta=1000.0),
  lambda b, n: dict(
      hidden_states=r(b, n * n, 16), encoder_hidden_states=r(b, 4, 3, 16), timestep=u(b),
      position_ids=torch.cat([torch.zeros(4, 3), grid(n)]), encoder_attention_mask=mask(b, 4)), 2, 4)
d("LuminaNextDiT2DModel", dict(
    sample_size=16, patch_size=2, in_channels=4, hidden_size=24, num_layers=2, num_attention_heads=3,
    num_kv_heads=1, multiple_of=16, learn_sigma=False, cross_attention_dim=32),
  lambda b, n: dict(hidden_states=r(b, 4, n, n), encoder_hidden_states=r(b, 10, 32), timestep=u(b),
                    encoder_mask=mask(b, 10), image_rotary_emb=torch.polar(torch.ones(48, 48, 4),
                        r(48, 48, 4)),
                    cross_attention_kwargs={}), 8, 12)
d("NucleusMoEImageTransformer2DModel", dict(
    patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=4,
    joint_attention_dim=16, axes_dims_rope=(8, 4, 4), moe_enabled=False, capacity_factors=(8.0, 8.0)),
  lambda b, n: dict(hidden_states=r(b, n * n, 16), encoder_hidden_states=r(b, 8, 16), timestep=u(b),
                    encoder_hidden_states_mask=mask(b, 8), img_shapes=[(1, n, n)] * b), 4, 6)
d("NucleusMoEImageTransformer2DModel", dict(
    patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=4,
    joint_attention_dim=16, axes_dims_rope=(8, 4, 4), moe_enabled=True, capacity_factors=[1.0, 2.0],
    num_experts=4, moe_intermediate_dim=16, dense_moe_strategy="none"),
  lambda b, n: dict(hidden_states=r(b, n * n, 16), encoder_hidden_states=r(b, 8, 16), timestep=u(b),
                    encoder_hidden_states_mask=mask(b, 8), img_shapes=[(1, n, n)] * b), 4, 6, tag="moe")


def _omnigen(b: int, n: int) -> dict:
    image = n * n // 4
    length = 24 + 1 + image
    return dict(
        hidden_states=r(b, 4, n, n), timestep=u(b), input_ids=ints(10, b, 24),
        input_img_latents=[r(1, 4, n, n)],
        input_image_sizes={0: [[0, image]]}, attention_mask=torch.ones(b, length, length),
        position_ids=torch.arange(length).repeat(b, 1))


d("OmniGenTransformer2DModel", dict(
    hidden_size=16, num_attention_heads=4, num_key_value_heads=4, intermediate_size=32, num_layers=2,
    pad_token_id=0, vocab_size=1000, in_channels=4, time_step_dim=4,
    rope_scaling=dict(long_factor=[1, 2], short_factor=[1, 2])), _omnigen, 8)
d("PriorTransformer", dict(
    num_attention_heads=2, attention_head_dim=4, num_layers=2, embedding_dim=8, num_embeddings=7,
    additional_embeddings=4),
  lambda b, n: dict(hidden_states=r(b, 8), timestep=ts(b), proj_embedding=r(b, 8),
                    encoder_hidden_states=r(b, 7, 8), attention_mask=mask(b, 7)))
d("PRXTransformer2DModel", dict(
    in_channels=4, patch_size=2, context_in_dim=16, hidden_size=32, mlp_ratio=2.0, num_heads=2, depth=2,
    axes_dim=(8, 8)),
  lambda b, n: dict(hidden_states=r(b, 4, n, n), encoder_hidden_states=r(b, 8, 16), timestep=u(b),
                    attention_mask=mask(b, 8)), 8, 12)
_QWEN = dict(
    patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=4,
    joint_attention_dim=16, axes_dims_rope=(8, 4, 4),
)


def _qwen(b: int, n: int, **more) -> dict:
    return dict(hidden_states=r(b, n * n, 16), encoder_hidden_states=r(b, 8, 16), timestep=u(b),
                encoder_hidden_states_mask=mask(b, 8), img_shapes=[(1, n, n)] * b, **more)


d("QwenImageTransformer2DModel", _QWEN, _qwen, 4, 6)
d("QwenImage21Transformer2DModel", dict(
    patch_size=1, in_channels=8, out_channels=8, num_layers=2, attention_head_dim=16, num_attention_heads=2,
    context_in_dim=16, axes_dims_rope=(8, 4, 4)),
  lambda b, n: dict(
      hidden_states=r(b, n * n, 8), encoder_hidden_states=r(b, 6, 16), timestep=u(b),
      img_shapes=[[(1, n, n)]] * b, img_mask=(torch.arange(6 + n * n // 4) >= 6).repeat(b, 1)), 4, 8)
_SANA = dict(
    patch_size=1, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=4, num_attention_heads=2,
    num_cross_attention_heads=2, cross_attention_head_dim=4, cross_attention_dim=8, caption_channels=8,
    sample_size=16,
)


def _sana(b: int, n: int, **more) -> dict:
    return dict(hidden_states=r(b, 4, n, n), encoder_hidden_states=r(b, 8, 8), timestep=ts(b), **more)


d("SanaTransformer2DModel", _SANA, lambda b, n: _sana(b, n, encoder_attention_mask=mask(b, 8)), 8, 12)
d("SanaTransformer2DModel", _SANA | dict(guidance_embeds=True, qk_norm="rms_norm_across_heads",
    timestep_scale=1.0),
  lambda b, n: _sana(b, n, guidance=u(b) * 4), 8, 12, tag="sprint")
d("ZImageTransformer2DModel", dict(
    in_channels=16, dim=32, n_layers=1, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=16,
    axes_dims=(8, 4, 4), axes_lens=(256, 32, 32)),
  lambda b, n: dict(x=[r(16, 1, n, n) for _ in range(b)], t=u(b),
      cap_feats=[r(10 + i, 16) for i in range(b)]),
  8, 16)
d("Transformer2DModel", dict(
    num_attention_heads=2, attention_head_dim=8, in_channels=16, num_layers=1, norm_num_groups=4,
    cross_attention_dim=12),
  lambda b, n: dict(hidden_states=r(b, 16, n, n), encoder_hidden_states=r(b, 6, 12)), 8, 12)
d("Transformer2DModel", dict(
    num_attention_heads=2, attention_head_dim=8, num_layers=1, sample_size=4, num_vector_embeds=5,
    cross_attention_dim=12, num_embeds_ada_norm=10, norm_type="ada_norm"),
  lambda b, n: dict(hidden_states=ints(5, b, 16), timestep=torch.tensor(7),
      encoder_hidden_states=r(b, 6, 12)),
  tag="vq-diffusion")
d("DreamLiteTransformer2DModel", dict(
    num_attention_heads=2, attention_head_dim=8, in_channels=16, num_layers=1, norm_num_groups=4,
    cross_attention_dim=12, use_linear_projection=True, qk_norm="rms_norm"),
  lambda b, n: dict(hidden_states=r(b, 16, n, n), encoder_hidden_states=r(b, 6, 12)), 8, 12)
d("BriaFibo2Transformer2DModel", dict(
    in_channels=4, patch_size=2, dim=32, n_layers=3, n_refiner_layers=1, n_heads=2, cap_feat_dim=16,
    injection_layer_ids=(1,), perceiver_num_layers=1, min_num_gist_tokens=4, max_num_gist_tokens=8,
    gist_step=2, gist_min_text_len=4, gist_max_text_len=16, axes_dims=(8, 4, 4), axes_lens=(128, 64, 64)),
  lambda b, n: dict(hidden_states=r(b, 4, n, n), timestep=u(b), encoder_hidden_states=r(b, 2, 8, 16)), 8, 16)
d("Flux3Transformer2DModel", dict(
    in_channels=4, cond_in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
    num_attention_heads=2, joint_attention_dim=32, timestep_channels=32, axes_dims_rope=(4, 4, 4, 4)),
  lambda b, n: dict(hidden_states=r(b, n * n, 4), encoder_hidden_states=r(b, 12, 32), timestep=u(b),
                    img_ids=grid(n, 4), txt_ids=torch.zeros(12, 4)), 4, 6)
d("UVit2DModel", dict(
    hidden_size=32, cond_embed_dim=16, micro_cond_encode_dim=4, micro_cond_embed_dim=20,
    encoder_hidden_size=16,
    vocab_size=40, codebook_size=32, in_channels=16, block_out_channels=16, num_res_blocks=1,
    block_num_heads=2, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, sample_size=8),
  lambda b, n: dict(input_ids=ints(32, b, n, n), encoder_hidden_states=r(b, 6, 16), pooled_text_emb=r(b, 16),
                    micro_conds=u(b, 5)), 8, 12)

# Transformers for video

_WAN = dict(
    patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
    text_dim=16, freq_dim=32, ffn_dim=32, num_layers=2, cross_attn_norm=True, rope_max_seq_len=32,
)


def _wan(b: int, n: int, channels: int = 4, **more) -> dict:
    return dict(hidden_states=r(b, channels, 2, n, n), timestep=ts(b), encoder_hidden_states=r(b, 12, 16),
        **more)


d("WanTransformer3DModel", _WAN | dict(qk_norm="rms_norm_across_heads"), _wan, 8, 12, full=True, fast=True)
d("WanTransformer3DModel", _WAN | dict(image_dim=16, added_kv_proj_dim=24),
  lambda b, n: _wan(b, n, encoder_hidden_states_image=r(b, 5, 16)), 8, 12, tag="i2v")

def _allegro_rope(n: int) -> tuple:
    """(cos and sin per axis, token positions per axis) for 2 frames of n x n latents."""
    t, h, w = torch.meshgrid(torch.arange(2), torch.arange(n // 2), torch.arange(n // 2), indexing="ij")
    freqs = [(r(k, 4).cos(), r(k, 4).sin()) for k in (2, n // 2, n // 2)]
    return freqs, tuple(x.reshape(1, -1) for x in (t, h, w))


d("AllegroTransformer3DModel", dict(
    num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, num_layers=1,
    cross_attention_dim=24, sample_width=8, sample_height=8, sample_frames=8, caption_channels=8),
  lambda b, n: dict(
      hidden_states=r(b, 4, 2, n, n), encoder_hidden_states=r(b, 7, 8), timestep=ts(b),
      attention_mask=torch.ones(b, 2, n, n), encoder_attention_mask=mask(b, 7),
      image_rotary_emb=_allegro_rope(n)), 8, 12)
d("AnyFlowTransformer3DModel", _WAN | dict(gate_value=0.25, deltatime_type="r"),
  lambda b, n: dict(hidden_states=r(b, 2, 4, n, n), timestep=torch.full((b, 2), 500.0),
                    r_timestep=torch.full((b, 2), 250.0), encoder_hidden_states=r(b, 12, 16)), 8, 12)
d("AnyFlowFARTransformer3DModel", _WAN | dict(
    gate_value=0.25, deltatime_type="r", compressed_patch_size=(1, 4, 4), full_chunk_limit=3),
  lambda b, n: dict(hidden_states=r(b, 4, 4, n, n), timestep=torch.full((b, 4), 500.0),
                    r_timestep=torch.full((b, 4), 250.0), encoder_hidden_states=r(b, 12, 16),
                    chunk_partition=[2, 2]), 8, 16, grad=False, note=_FLEX)
d("ChronoEditTransformer3DModel", _WAN | dict(qk_norm="rms_norm_across_heads", rope_temporal_skip_len=8),
  _wan, 8, 12)
_COGVIDEO = dict(
    num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=2,
    text_embed_dim=8,
    num_layers=2, sample_width=8, sample_height=8, sample_frames=5, patch_size=2,
    temporal_compression_ratio=4, max_text_seq_length=8,
)


def _cogvideo(b: int, n: int, **more) -> dict:
    return dict(hidden_states=r(b, 2, 4, n, n), encoder_hidden_states=r(b, 8, 8), timestep=ts(b), **more)


d("CogVideoXTransformer3DModel", _COGVIDEO, _cogvideo, 8, 12)
d("CogVideoXTransformer3DModel", _COGVIDEO | dict(patch_size_t=2, use_rotary_positional_embeddings=True),
  lambda b, n: _cogvideo(b, n, image_rotary_emb=(r(n * n // 4, 16).cos(), r(n * n // 4, 16).sin())),
  8, 12, tag="15")
d("ConsisIDTransformer3DModel", _COGVIDEO | dict(
    num_layers=1, cross_attn_interval=1, is_kps=False, is_train_face=True, cross_attn_dim_head=1,
    cross_attn_num_heads=1, LFE_id_dim=2, LFE_vit_dim=2, LFE_depth=5, LFE_dim_head=8, LFE_num_heads=2,
    LFE_num_id_token=1, LFE_num_querie=1, LFE_output_dim=21, LFE_ff_mult=1, LFE_num_scale=1),
  lambda b, n: _cogvideo(b, n, id_vit_hidden=[r(b, 2, 2)], id_cond=r(b, 2)), 8, 12)
_COSMOS = dict(
    in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=2, mlp_ratio=2,
    text_embed_dim=16, adaln_lora_dim=4, max_size=(4, 32, 32), patch_size=(1, 2, 2),
    rope_scale=(2.0, 1.0, 1.0),
)


def _cosmos(b: int, n: int, **more) -> dict:
    return dict(hidden_states=r(b, 4, 2, n, n), timestep=ts(b), encoder_hidden_states=r(b, 12, 16), fps=30,
                padding_mask=torch.zeros(1, 1, n, n), **more)


d("CosmosTransformer3DModel", _COSMOS | dict(concat_padding_mask=True, extra_pos_embed_type="learnable"),
  lambda b, n: _cosmos(b, n, attention_mask=mask(b, 12)), 8, 12)
d("CosmosTransformer3DModel", _COSMOS | dict(in_channels=5, extra_pos_embed_type=None),
  lambda b, n: _cosmos(b, n, condition_mask=torch.ones(b, 1, 2, n, n)), 8, 12, tag="video-to-world")
d("Cosmos3OmniTransformer", dict(
    head_dim=6, hidden_act="relu2", hidden_size=12, intermediate_size=24, latent_channel=2,
    latent_patch_size=1,
    num_attention_heads=2, num_hidden_layers=2, num_key_value_heads=1, patch_latent_dim=2,
    qk_norm_for_text=False, rms_norm_eps=1e-5, rope_axes_dim=(1, 1, 1), rope_theta=1e8, vocab_size=32),
  lambda b, n: dict(
      input_ids=torch.tensor([1, 2]), text_indexes=torch.tensor([0, 1]), und_len=2, sequence_length=2 + n * n,
      position_ids=torch.cat([torch.zeros(2, 3), grid(n)]).T.long(), vision_tokens=[r(1, 2, 1, n, n)],
      vision_token_shapes=[(1, n, n)], vision_sequence_indexes=torch.arange(2, 2 + n * n),
      vision_mse_loss_indexes=torch.arange(2, 2 + n * n), vision_timesteps=torch.ones(n * n),
      vision_noisy_frame_indexes=[torch.tensor([0])]), 4, 6, batches=(1,),
      note="one packed sequence, no batch")
d("EasyAnimateTransformer3DModel", dict(
    attention_head_dim=16, num_attention_heads=2, in_channels=4, mmdit_layers=2, num_layers=2, out_channels=4,
    patch_size=2, sample_height=60, sample_width=90, text_embed_dim=16, time_embed_dim=8),
  _wan, 8, 12)
d("HeliosTransformer3DModel", {k: v for k, v in _WAN.items() if k != "rope_max_seq_len"} | dict(
    qk_norm="rms_norm_across_heads", rope_dim=(4, 4, 4), has_multi_term_memory_patch=True,
    guidance_cross_attn=True, zero_history_timestep=True, is_amplify_history=False),
  lambda b, n: _wan(
      b, n, indices_hidden_states=torch.arange(2.0).expand(b, 2), latents_history_short=r(b, 4, 1, n, n),
      latents_history_mid=r(b, 4, 1, n, n), latents_history_long=r(b, 4, 4, n, n),
      indices_latents_history_short=torch.ones(b, 1), indices_latents_history_mid=torch.ones(b, 1),
      indices_latents_history_long=torch.ones(b, 4)), 16, 24)
_HUNYUAN = dict(
    in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=1,
    num_single_layers=1,
    num_refiner_layers=1, patch_size=1, patch_size_t=1, guidance_embeds=True, text_embed_dim=16,
    pooled_projection_dim=8, rope_axes_dim=(2, 4, 4), image_condition_type=None,
)


def _hunyuan(b: int, n: int, channels: int = 4, **more) -> dict:
    return dict(hidden_states=r(b, channels, 2, n, n), timestep=ts(b), encoder_hidden_states=r(b, 12, 16),
                pooled_projections=r(b, 8), encoder_attention_mask=mask(b, 12), **more)


d("HunyuanVideoTransformer3DModel", _HUNYUAN, lambda b, n: _hunyuan(b, n, guidance=u(b) * 1000), 8, 12)
d("HunyuanVideoTransformer3DModel", _HUNYUAN | dict(
    in_channels=9, guidance_embeds=False, image_condition_type="latent_concat"),
  lambda b, n: _hunyuan(b, n, 9), 8, 12, tag="i2v-concat")
d("HunyuanVideoTransformer3DModel", _HUNYUAN | dict(image_condition_type="token_replace"),
  lambda b, n: _hunyuan(b, n, guidance=u(b) * 1000), 8, 12, tag="i2v-replace")
d("HunyuanVideo15Transformer3DModel", dict(
    in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, num_layers=2,
    num_refiner_layers=1,
    mlp_ratio=2.0, patch_size=1, patch_size_t=1, text_embed_dim=16, text_embed_2_dim=8, image_embed_dim=12,
    rope_axes_dim=(2, 2, 4), target_size=16, task_type="t2v"),
  lambda b, n: dict(
      hidden_states=r(b, 4, 1, n, n), timestep=u(b), encoder_hidden_states=r(b, 6, 16),
      encoder_attention_mask=mask(b, 6), encoder_hidden_states_2=r(b, 4, 8),
      encoder_attention_mask_2=mask(b, 4), image_embeds=torch.zeros(b, 3, 12)), 8, 12)
d("HunyuanVideoFramepackTransformer3DModel", _HUNYUAN | dict(
    patch_size=2, has_image_proj=True, image_proj_dim=16, has_clean_x_embedder=True),
  lambda b, n: _hunyuan(
      b, n, guidance=u(b) * 1000, image_embeds=r(b, 5, 16), indices_latents=torch.arange(2.0),
      latents_clean=r(b, 4, 2, n, n), indices_latents_clean=torch.arange(2.0),
      latents_history_2x=r(b, 4, 2, n, n), indices_latents_history_2x=torch.arange(2.0),
      latents_history_4x=r(b, 4, 8, n, n), indices_latents_history_4x=torch.arange(8.0)), 4, 8)
_K5 = dict(
    in_visual_dim=4, in_text_dim=16, in_text_dim2=8, time_dim=16, out_visual_dim=4, patch_size=(1, 2, 2),
    model_dim=16, ff_dim=32, num_text_blocks=1, num_visual_blocks=2, axes_dims=(2, 2, 4),
)
d("Kandinsky5Transformer3DModel", _K5 | dict(visual_cond=True),
  lambda b, n: dict(
      hidden_states=r(b, 2, n, n, 9), encoder_hidden_states=r(b, 6, 16), timestep=ts(b),
      text_rope_pos=torch.arange(6),
      pooled_projections=r(b, 8), visual_rope_pos=(torch.arange(2), torch.arange(n // 2),
          torch.arange(n // 2))),
  8, 12)
d("Kandinsky6Transformer3DModel", _K5 | dict(visual_cond=False, in_audio_dim=4, out_audio_dim=4),
  lambda b, n: dict(
      hidden_states=r(b, 2, n, n, 4), encoder_hidden_states=r(b, 6, 16), timestep=ts(b),
      pooled_projections=r(b, 8), audio_hidden_states=r(b, 5, 4), encoder_attention_mask=mask(b, 6)), 8, 12)
d("Kandinsky6SRTransformer3DModel", dict(
    in_visual_dim=4, out_visual_dim=8, time_dim=16, model_dim=16, ff_dim=32, num_visual_blocks=2,
    axes_dims=(2, 2, 4)),
  lambda b, n: dict(hidden_states=r(b, 2, n, n, 9), timestep=ts(b)), 16, 24, grad=False, note=_FLEX)
d("LatteTransformer3DModel", _DIT | dict(
    caption_channels=8, cross_attention_dim=8, num_embeds_ada_norm=1000, norm_type="ada_norm_single",
    norm_elementwise_affine=False, norm_eps=1e-6, video_length=2),
  lambda b, n: dict(hidden_states=r(b, 4, 2, n, n), encoder_hidden_states=r(b, 7, 8), timestep=ts(b)), 8)
_LTX = dict(
    in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16,
    num_layers=1, caption_channels=16,
)
d("LTXVideoTransformer3DModel", _LTX,
  lambda b, n: dict(hidden_states=r(b, 2 * n * n, 4), encoder_hidden_states=r(b, 9, 16), timestep=ts(b),
                    encoder_attention_mask=mask(b, 9), num_frames=2, height=n, width=n), 4, 6)
_LTX2 = _LTX | dict(
    audio_in_channels=4, audio_out_channels=4, audio_num_attention_heads=2, audio_attention_head_dim=4,
    audio_cross_attention_dim=8, rope_double_precision=False,
)


def _ltx2(b: int, n: int, **more) -> dict:
    return dict(
        hidden_states=r(b, 2 * n * n, 4), audio_hidden_states=r(b, 9, 4), encoder_hidden_states=r(b, 9, 16),
        audio_encoder_hidden_states=r(b, 9, 16), timestep=u(b) * 1000, encoder_attention_mask=mask(b, 9),
        num_frames=2, height=n, width=n, audio_num_frames=9, fps=25.0, **more)


d("LTX2VideoTransformer3DModel", _LTX2, _ltx2, 4, 6)
d("LTX2VideoTransformer3DModel", _LTX2 | dict(rope_double_precision=True, gated_attn=True,
    audio_gated_attn=True),
  _ltx2, 4, 6, tag="float64-rope")
d("MochiTransformer3DModel", dict(
    patch_size=2, num_attention_heads=2, attention_head_dim=8, num_layers=2, pooled_projection_dim=16,
    in_channels=4, qk_norm="rms_norm", text_embed_dim=16, time_embed_dim=4, max_sequence_length=16),
  lambda b, n: dict(hidden_states=r(b, 4, 2, n, n), encoder_hidden_states=r(b, 16, 16), timestep=ts(b),
                    encoder_attention_mask=mask(b, 16)), 8, 12)
d("MotifVideoTransformer3DModel", dict(
    in_channels=9, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=1,
    num_single_layers=1,
    num_decoder_layers=1, patch_size=1, text_embed_dim=16, image_embed_dim=4, rope_axes_dim=(4, 4, 4)),
  lambda b, n: _wan(b, n, 9), 8, 12)
d("SanaVideoTransformer3DModel", dict(
    in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=2,
    num_cross_attention_heads=2, cross_attention_head_dim=12, cross_attention_dim=24, caption_channels=16,
    sample_size=8, patch_size=(1, 2, 2), rope_max_seq_len=32), _wan, 8, 12)
d("SkyReelsV2Transformer3DModel", _WAN, _wan, 8, 12)
d("TransformerTemporalModel", dict(
    num_attention_heads=2, attention_head_dim=8, in_channels=8, num_layers=1, norm_num_groups=4),
  lambda b, n: dict(hidden_states=r(2 * b, 8, n, n), timestep=ts(b), num_frames=2), 8, 12)
d("WanAnimateTransformer3DModel", _WAN | dict(
    in_channels=12, latent_channels=4, image_dim=16, motion_encoder_size=16, motion_style_dim=8, motion_dim=4,
    motion_encoder_channel_sizes={"4": 16, "8": 16, "16": 16}, motion_encoder_dim=16,
    face_encoder_hidden_dim=16, face_encoder_num_heads=2, inject_face_latents_blocks=2),
  lambda b, n: dict(
      hidden_states=r(b, 12, 4, n, n), timestep=ts(b), encoder_hidden_states=r(b, 12, 16),
      encoder_hidden_states_image=r(b, 5, 16), pose_hidden_states=r(b, 4, 3, n, n),
      face_pixel_values=r(b, 3, 9, 16, 16)), 8, 12)
d("WanVACETransformer3DModel", _WAN | dict(num_layers=3, vace_layers=(0, 2), vace_in_channels=12),
  lambda b, n: _wan(b, n, control_hidden_states=r(b, 12, 2, n, n)), 8, 12)


def _wan_animate2(b: int, n: int) -> dict:
    cache = _class("WanAnimate2KVCache", "diffusers.models.transformers.transformer_wan_animate_2")
    return dict(
        hidden_states=[r(8, 2, n, n)], timestep=torch.ones(1), encoder_hidden_states=[r(8, 16)],
        condition_latents=[r(6, 2, n, n)], encoder_hidden_states_image=r(1, 4, 1280), kv_cache=cache(2),
        kv_cache_mode="extract", seq_len=n * n // 2, offset_grid_sizes=torch.tensor([[2, n // 2, n // 2]]))


d("WanAnimate2Transformer3DModel", dict(
    text_len=16, in_dim=14, dim=64, ffn_dim=64, freq_dim=32, text_dim=16, out_dim=8, num_heads=4,
    num_layers=2),
  _wan_animate2, 4, 6, batches=(1,), note="takes one video; writes a key-value cache")
d("SanaWMLTX2RefinerTransformer3DModel", {k: v for k, v in _LTX2.items() if not k.startswith("audio")} | dict(
    audio_in_channels=4, audio_out_channels=4, audio_num_attention_heads=2, audio_attention_head_dim=4,
    audio_cross_attention_dim=8),
  lambda b, n: dict(
      hidden_states=r(b, 2 * n * n, 4), encoder_hidden_states=r(b, 9, 16), timestep=u(b, 2 * n * n) * 1000,
      video_rotary_emb=(r(b, 2 * n * n, 16).cos(), r(b, 2 * n * n, 16).sin()),
      encoder_attention_mask=mask(b, 9)), 4, 6)

# Audio and other sequences

d("AceStepTransformer1DModel", dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, in_channels=24, audio_acoustic_hidden_dim=8, patch_size=2, rope_theta=10000.0,
    sliding_window=16),
  lambda b, n: dict(hidden_states=r(b, n, 8), timestep=u(b), timestep_r=u(b),
      encoder_hidden_states=r(b, 10, 32),
                    context_latents=r(b, n, 16)), 8, 12)
d("LongCatAudioDiTTransformer", dict(
    dit_dim=64, dit_depth=2, dit_heads=4, dit_text_dim=32, latent_dim=8, text_conv=True),
  lambda b, n: dict(hidden_states=r(b, n, 8), encoder_hidden_states=r(b, 10, 32), timestep=u(b),
                    encoder_attention_mask=mask(b, 10), attention_mask=mask(b, n)), 16, 24)
_MUSIC3 = dict(
    in_channels=8, condition_dim=16, num_layers=2, num_attention_heads=2, attention_head_dim=8,
    ff_inner_dim=32, rotary_dim=4, fourier_embedding_dim=8,
)
d("MiniMaxMusic3Transformer1DModel", _MUSIC3,
  lambda b, n: dict(hidden_states=r(b, 8, n), encoder_hidden_states=r(b, n, 16), timestep=u(b)), 16, 24)
d("MiniMaxMusic3RVQDepthDecoder", dict(
    hidden_size=16, num_layers=2, num_attention_heads=2, intermediate_size=32, audio_vocab_size=32,
    num_codebooks=2, max_position_embeddings=16), lambda b, n: dict(inputs_embeds=r(b, n, 16)), 8, 12)
d("MiniMaxMusic3ConditionEncoder", dict(
    condition_hidden_dim=8, num_condition_layers=2, out_dim=16), lambda b, n: dict(hidden_states=r(b, n, 16)),
    8, 12)
d("MiniMaxMusic3Vocoder", dict(
    latent_channels=8, decoder_input_dim=16, decoder_hidden_dim=32, upsampling_ratios=(4, 2)),
  lambda b, n: dict(latents=r(b, 8, n)), 8, 12)
d("StableAudioDiTModel", dict(
    sample_size=8, in_channels=3, num_layers=2, attention_head_dim=8, num_attention_heads=4,
    num_key_value_attention_heads=2, out_channels=3, cross_attention_dim=16, time_proj_dim=8,
    global_states_input_dim=8, cross_attention_input_dim=4),
  lambda b, n: dict(hidden_states=r(b, 3, n), timestep=u(b), encoder_hidden_states=r(b, 5, 4),
                    global_hidden_states=r(b, 1, 8), rotary_embedding=(r(n + 1, 4).cos(), r(n + 1, 4).sin())),
                    8, 12)
_SA3 = dict(
    io_channels=8, patch_size=1, embed_dim=32, depth=2, num_heads=4, cond_token_dim=16, global_cond_dim=12,
    local_add_cond_dim=5, timestep_features_dim=16, ff_mult=2, num_memory_tokens=3,
)


def _sa3(b: int, n: int, **more) -> dict:
    return dict(hidden_states=r(b, 8, n), timestep=u(b), encoder_hidden_states=r(b, 4, 16),
                global_hidden_states=r(b, 12), **more)


d("StableAudio3DiTModel", _SA3 | dict(use_differential_attention=False), _sa3, 16, 24)
d("StableAudio3DiTModel", _SA3 | dict(use_differential_attention=True), _sa3, 16, 24, tag="differential")
d("T5FilmDecoder", dict(
    input_dims=8, targets_length=16, d_model=16, num_layers=2, num_heads=2, d_kv=8, d_ff=32),
  lambda b, n: dict(encodings_and_masks=[(r(b, 6, 16), mask(b, 6, torch.float32))],
      decoder_input_tokens=r(b, 16, 8),
                    decoder_noise_time=u(b)))


def _minimax_h3(b: int, n: int) -> dict:
    text, audio, video = torch.arange(4), torch.arange(4, 10), torch.arange(10, 10 + n * n)
    tags, when, pos = ints(1, 10 + n * n), ints(1, 10 + n * n), torch.zeros(10 + n * n, 3)
    tags[text], tags[audio], when[audio] = 1, 2, 1
    pos[:, 0] = torch.arange(10 + n * n)
    pos[video, 1:] = grid(n)[:, 1:]
    return dict(
        hidden_states=r(b, n * n, 16), audio_hidden_states=r(b, 6, 6), encoder_hidden_states=r(b, 4, 8),
        timestep=torch.tensor([0.7, 0.3]), timestep_indices=when, token_tags=tags, position_ids=pos,
        video_indices=video, audio_indices=audio, text_indices=text)


d("MiniMaxH3Transformer3DModel", dict(
    num_attention_heads=2, attention_head_dim=16, hidden_size=24, num_layers=2, num_refiner_layers=2,
    ffn_dim=32,
    in_channels=4, audio_in_channels=6, text_dim=8, freq_dim=8, time_embed_hidden_dim=24, time_embed_dim=16,
    rope_freq_dim=2), _minimax_h3, 4, 6)
d("AnimaTextConditioner", dict(
    source_dim=16, target_dim=16, model_dim=16, num_layers=2, num_attention_heads=2, target_vocab_size=32,
    min_sequence_length=12),
  lambda b, n: dict(source_hidden_states=r(b, 6, 16), target_input_ids=ints(32, b, n),
                    target_attention_mask=mask(b, n), source_attention_mask=mask(b, 6)), 8, 16)

# Autoencoders

_AE = dict(
    block_out_channels=(8, 16), in_channels=3, out_channels=3, latent_channels=4, norm_num_groups=4,
    down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
)


def _image(b: int, n: int) -> dict:
    return dict(sample=r(b, 3, n, n))


d("AutoencoderKL", _AE, _image, 32, 48, full=True, fast=True)
d("AutoencoderTiny", dict(
    encoder_block_out_channels=(16, 16), decoder_block_out_channels=(16, 16), num_encoder_blocks=(1, 1),
    num_decoder_blocks=(1, 1)), _image, 32, 48, fast=True)

# ControlNets and adapters

_MULTI_UNION = "diffusers.models.controlnets.multicontrolnet_union"
_CONTROL = dict(
    block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, attention_head_dim=2,
    cross_attention_dim=8,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), conditioning_embedding_out_channels=(8, 8),
)


def _control(b: int, n: int, **more) -> dict:
    return _unet(b, n, controlnet_cond=r(b, 3, 2 * n, 2 * n), **more)


d("ControlNetModel", _CONTROL, _control, 16, 24, full=True, fast=True)
d("ControlNetModel", _CONTROL | dict(
    addition_embed_type="text_time", addition_time_embed_dim=8, projection_class_embeddings_input_dim=64,
    use_linear_projection=True, transformer_layers_per_block=(1, 2)),
  lambda b, n: _control(b, n, guess_mode=True, conditioning_scale=0.5, added_cond_kwargs=dict(
      text_embeds=r(b, 16), time_ids=ints(99, b, 6))), 16, 24, tag="sdxl-guess")
d("MultiControlNetModel", lambda: _class("MultiControlNetModel")(
    [_class("ControlNetModel")(**_CONTROL) for _ in range(2)]),
  lambda b, n: _unet(b, n, controlnet_cond=[r(b, 3, 2 * n, 2 * n) for _ in range(2)],
      conditioning_scale=[1.0, 0.5]),
  16, 24)
_UNION = _CONTROL | dict(
    num_control_type=3, num_trans_channel=8, num_trans_head=2, num_proj_channel=8,
    addition_embed_type="text_time", addition_time_embed_dim=8, projection_class_embeddings_input_dim=40)
d("ControlNetUnionModel", _UNION,
  lambda b, n: _unet(
      b, n, controlnet_cond=[r(b, 3, 2 * n, 2 * n) for _ in range(2)], control_type_idx=[1, 2],
      control_type=torch.tensor([[0.0, 1.0, 1.0]] * b),
      added_cond_kwargs=dict(text_embeds=r(b, 16), time_ids=ints(99, b, 3))), 16, 24)
d("MultiControlNetUnionModel", lambda: _class("MultiControlNetUnionModel", _MULTI_UNION)(
    [_class("ControlNetUnionModel")(**_UNION) for _ in range(2)]),
  lambda b, n: _unet(
      b, n, controlnet_cond=[[r(b, 3, 2 * n, 2 * n)] for _ in range(2)], control_type_idx=[[1], [2]],
      control_type=[torch.tensor([[0.0, 1.0, 0.0]] * b), torch.tensor([[0.0, 0.0, 1.0]] * b)],
      conditioning_scale=[1.0, 0.5],
      added_cond_kwargs=dict(text_embeds=r(b, 16), time_ids=ints(99, b, 3))), 16, 24, module=_MULTI_UNION)
d("SparseControlNetModel", _CONTROL | dict(
    down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"), motion_num_attention_heads=2,
    attention_head_dim=2, conditioning_channels=4),
  lambda b, n: dict(
      sample=r(b, 4, 2, n, n), timestep=ts(b), encoder_hidden_states=r(2 * b, 6, 8),
      controlnet_cond=r(b, 4, 2, n, n), conditioning_mask=torch.ones(b, 1, 2, n, n)), 16, 24)
_XS = dict(
    sample_size=16, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), cross_attention_dim=8,
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), block_out_channels=(8, 16), num_attention_heads=2,
    norm_num_groups=4, ctrl_block_out_channels=(4, 8), ctrl_num_attention_heads=4, ctrl_max_norm_num_groups=2,
    ctrl_conditioning_embedding_out_channels=(4, 4), upcast_attention=False,
)
d("UNetControlNetXSModel", _XS, _control, 16, 24)
d("UNetControlNetXSModel", _XS | dict(ctrl_learn_time_embedding=True, time_embedding_mix=0.5,
    time_cond_proj_dim=None),
  lambda b, n: _control(b, n, apply_control=False), 16, 24, tag="no-control")
d("FluxControlNetModel", _FLUX | dict(num_mode=4, guidance_embeds=True),
  lambda b, n: _flux(b, n, pooled_projections=r(b, 32), guidance=u(b), controlnet_cond=r(b, n * n, 4),
                     controlnet_mode=ints(4, b, 1)), 4, 6)
d("FluxMultiControlNetModel", lambda: _class("FluxMultiControlNetModel")(
    [_class("FluxControlNetModel")(**_FLUX, num_mode=4) for _ in range(2)]),
  lambda b, n: _flux(b, n, pooled_projections=r(b, 32), controlnet_cond=[r(b, n * n, 4) for _ in range(2)],
                     controlnet_mode=[ints(4, b), ints(4, b)],
                     conditioning_scale=[1.0, 0.5]), 4, 6)
_HUNYUAN_CONTROL = _HUNYUAN_DIT | dict(transformer_num_layers=4)
d("HunyuanDiT2DControlNetModel", _HUNYUAN_CONTROL,
  lambda b, n: _hunyuan_dit(b, n, controlnet_cond=r(b, 4, n, n)), 8)
d("HunyuanDiT2DMultiControlNetModel", lambda: _class("HunyuanDiT2DMultiControlNetModel")(
    [_class("HunyuanDiT2DControlNetModel")(**_HUNYUAN_CONTROL) for _ in range(2)]),
  lambda b, n: _hunyuan_dit(b, n, controlnet_cond=[r(b, 4, n, n) for _ in range(2)],
                            conditioning_scale=[1.0, 0.5]), 8)
_QWEN_CONTROL = _QWEN | dict(num_layers=1)
d("QwenImageControlNetModel", _QWEN_CONTROL, lambda b, n: _qwen(b, n, controlnet_cond=r(b, n * n, 16)), 4, 6)
d("QwenImageMultiControlNetModel", lambda: _class("QwenImageMultiControlNetModel")(
    [_class("QwenImageControlNetModel")(**_QWEN_CONTROL)]),
  lambda b, n: _qwen(b, n, controlnet_cond=[r(b, n * n, 16) for _ in range(2)],
      conditioning_scale=[1.0, 0.5]), 4, 6)
d("SanaControlNetModel", _SANA, lambda b, n: _sana(b, n, controlnet_cond=r(b, 4, n, n)), 8, 12)
_SD3_CONTROL = dict(
    sample_size=16, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
    joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=16, out_channels=4,
    pos_embed_max_size=24,
)


def _sd3_control(b: int, n: int, **more) -> dict:
    return dict(hidden_states=r(b, 4, n, n), encoder_hidden_states=r(b, 12, 32), timestep=ts(b),
                pooled_projections=r(b, 16), **more)


d("SD3ControlNetModel", _SD3_CONTROL, lambda b, n: _sd3_control(b, n, controlnet_cond=r(b, 4, n, n)), 8, 12)
d("SD3ControlNetModel", _SD3_CONTROL | dict(
    qk_norm="rms_norm", dual_attention_layers=(0,), extra_conditioning_channels=1, pos_embed_type=None,
    use_pos_embed=False, joint_attention_dim=None),
  lambda b, n: dict(hidden_states=r(b, n * n // 4, 32), timestep=ts(b), pooled_projections=r(b, 16),
                    controlnet_cond=r(b, 5, n, n)), 8, 12, tag="sd35-8b")
d("SD3MultiControlNetModel", lambda: _class("SD3MultiControlNetModel")(
    [_class("SD3ControlNetModel")(**_SD3_CONTROL) for _ in range(2)]),
  lambda b, n: _sd3_control(b, n, controlnet_cond=[r(b, 4, n, n) for _ in range(2)],
      conditioning_scale=[1.0, 0.5]),
  8, 12)
d("CosmosControlNetModel", dict(
    n_controlnet_blocks=2, in_channels=6, latent_channels=6, model_channels=24, num_attention_heads=2,
    attention_head_dim=12, mlp_ratio=2, text_embed_dim=16, adaln_lora_dim=4, patch_size=(1, 2, 2),
    max_size=(4, 32, 32), rope_scale=(2.0, 1.0, 1.0), extra_pos_embed_type=None, img_context_dim_in=16,
    img_context_dim_out=24, use_crossattn_projection=False),
  lambda b, n: dict(
      controls_latents=r(b, 4, 1, n, n), latents=r(b, 4, 1, n, n), timestep=u(b), conditioning_scale=1.0,
      encoder_hidden_states=(r(b, 12, 16), r(b, 4, 16)), condition_mask=torch.ones(b, 1, 1, n, n),
      padding_mask=torch.zeros(1, 1, n, n)), 8, 12)


def _z_control() -> nn.Module:
    base = _class("ZImageTransformer2DModel")(
        in_channels=16, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=16,
        axes_dims=(8, 4, 4), axes_lens=(256, 32, 32))
    cls = _class("ZImageControlNetModel")
    net = cls(control_layers_places=(0, 1), control_in_dim=16, dim=32, n_refiner_layers=1, n_heads=2,
        n_kv_heads=2)
    net.gradient_checkpointing = False  # the class itself forgets to set what its train-mode forward reads
    return cls.from_transformer(net, base)


d("ZImageControlNetModel", _z_control,
  lambda b, n: dict(x=[r(16, 1, n, n) for _ in range(b)], t=u(b), cap_feats=[r(10 + i, 16) for i in range(b)],
                    control_context=[r(16, 1, n, n) for _ in range(b)]), 8, 16)
_T2I = dict(channels=(8, 8, 16, 16), num_res_blocks=1, downscale_factor=8)
d("T2IAdapter", _T2I, lambda b, n: {"*": (r(b, 3, n, n),)}, 64, 128)
d("T2IAdapter", _T2I | dict(adapter_type="full_adapter_xl", downscale_factor=16),
  lambda b, n: {"*": (r(b, 3, n, n),)}, 64, 128, tag="xl")
d("T2IAdapter", _T2I | dict(adapter_type="light_adapter"), lambda b, n: {"*": (r(b, 3, n, n),)}, 64, 128,
  tag="light")
d("MultiAdapter", lambda: _class("MultiAdapter")([_class("T2IAdapter")(**_T2I) for _ in range(2)]),
  lambda b, n: {"*": ([r(b, 3, n, n) for _ in range(2)], [0.8, 0.5])}, 64, 128)

# More UNets

d("UNetMotionModel", dict(
    block_out_channels=(8, 16), norm_num_groups=4, cross_attention_dim=8, num_attention_heads=2,
    layers_per_block=1,
    down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"), motion_num_attention_heads=2,
    up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion"), sample_size=16),
  lambda b, n: dict(sample=r(b, 4, 3, n, n), timestep=ts(b), encoder_hidden_states=r(3 * b, 6, 8)), 16, 24)
d("I2VGenXLUNet", dict(
    block_out_channels=(8, 16), norm_num_groups=4, cross_attention_dim=8, attention_head_dim=2,
    layers_per_block=1,
    down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
    up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"), sample_size=16),
  lambda b, n: dict(sample=r(b, 4, 3, n, n), timestep=ts(b), fps=torch.full((b,), 16),
      image_latents=r(b, 4, 3, n, n),
                    image_embeddings=r(b, 8), encoder_hidden_states=r(b, 6, 8)), 16, 24)
d("Kandinsky3UNet", dict(
    time_embedding_dim=8, groups=2, attention_head_dim=4, layers_per_block=3, block_out_channels=(8, 16),
    cross_attention_dim=8, encoder_hid_dim=12),
  lambda b, n: dict(sample=r(b, 4, n, n), timestep=ts(b), encoder_hidden_states=r(b, 6, 12),
                    encoder_attention_mask=mask(b, 6)), 16, 24)
_CASCADE = dict(
    conditioning_dim=16, block_out_channels=(16, 16), num_attention_heads=(2, 2),
    down_num_layers_per_block=(1, 1),
    up_num_layers_per_block=(1, 1), switch_level=(False,), clip_text_pooled_in_channels=8,
)
d("StableCascadeUNet", _CASCADE | dict(in_channels=4, out_channels=4, clip_image_in_channels=12,
    clip_text_in_channels=8),
  lambda b, n: dict(sample=r(b, 4, n, n), timestep_ratio=u(b), clip_text_pooled=r(b, 1, 8),
      clip_text=r(b, 6, 8),
                    clip_img=r(b, 1, 12)), 8, 12, tag="prior")
d("StableCascadeUNet", _CASCADE | dict(
    in_channels=4, out_channels=4, num_attention_heads=(-1, 2), patch_size=2, effnet_in_channels=6,
    pixel_mapper_in_channels=3, switch_level=None, up_blocks_repeat_mappers=(2, 2),
    block_types_per_layer=(("SDCascadeResBlock", "SDCascadeTimestepBlock"),
                           ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"))),
  lambda b, n: dict(sample=r(b, 4, n, n), timestep_ratio=u(b), clip_text_pooled=r(b, 1, 8),
      effnet=r(b, 6, 4, 4)),
  16, 24, tag="decoder")
d("DreamLiteUNetModel", dict(
    sample_size=8, block_out_channels=(16, 32), cross_attention_dim=12, attention_head_dim=8,
    layers_per_block=1,
    norm_num_groups=4, up_block_types=("DreamLiteCrossAttnUpBlock2D", "DreamLiteUpBlock2D"),
    down_block_types=("DreamLiteCrossAttnNoSelfAttnDownBlock2D", "DreamLiteCrossAttnDownBlock2D")),
  lambda b, n: _unet(b, n, 12), 16, 24)

# More autoencoders

_VIDEO_AE = dict(
    in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1,
)


def _video(frames: int) -> Callable[[int, int], dict]:
    return lambda b, n: dict(sample=r(b, 3, frames, n, n))


def _audio(channels: int) -> Callable[[int, int], dict]:
    return lambda b, n: dict(sample=r(b, channels, n))


d("AutoencoderKL", _AE | dict(use_quant_conv=False, use_post_quant_conv=False, mid_block_add_attention=False),
  _image, 32, 48, tag="flux")
d("AutoencoderKLFlux2", _AE, _image, 32, 48)
d("AsymmetricAutoencoderKL", dict(
    down_block_types=("DownEncoderBlock2D",) * 2, down_block_out_channels=(8, 16), layers_per_down_block=1,
    up_block_types=("UpDecoderBlock2D",) * 2, up_block_out_channels=(8, 16), layers_per_up_block=1,
    latent_channels=4, norm_num_groups=4, sample_size=32),
  lambda b, n: dict(sample=r(b, 3, n, n), mask=(r(b, 1, n, n) > 0).float()), 32, 48)
d("AutoencoderDC", dict(
    in_channels=3, latent_channels=4, attention_head_dim=2,
    encoder_block_types=("ResBlock", "EfficientViTBlock"),
    decoder_block_types=("ResBlock", "EfficientViTBlock"), encoder_block_out_channels=(8, 8),
    decoder_block_out_channels=(8, 8), encoder_qkv_multiscales=((), (5,)), decoder_qkv_multiscales=((), (5,)),
    encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1), downsample_block_type="conv",
    upsample_block_type="interpolate", decoder_norm_types="rms_norm", decoder_act_fns="silu"), _image, 32, 48)
d("AutoencoderKLTemporalDecoder", dict(
    block_out_channels=(32, 32), down_block_types=("DownEncoderBlock2D",) * 2, layers_per_block=1),
  lambda b, n: dict(sample=r(3 * b, 3, n, n), num_frames=3), 32, 48)
d("AutoencoderKLHunyuanImage", dict(
    in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(32, 32, 64), layers_per_block=1,
    spatial_compression_ratio=4, sample_size=32), _image, 32, 48)
d("AutoencoderKLKVAE", dict(channels=32, num_enc_blocks=1, num_dec_blocks=1, z_channels=4, ch_mult=(1, 2)),
  _image, 32, 48)
d("VQModel", dict(
    block_out_channels=(8, 16), norm_num_groups=4, latent_channels=3, num_vq_embeddings=32,
    down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2), _image, 32, 48)
d("ConsistencyDecoderVAE", dict(
    encoder_block_out_channels=(8, 16), encoder_norm_num_groups=4, scaling_factor=1,
    encoder_down_block_types=("DownEncoderBlock2D",) * 2, decoder_block_out_channels=(8, 16),
    decoder_down_block_types=("ResnetDownsampleBlock2D",) * 2, decoder_layers_per_block=1,
    decoder_norm_num_groups=4, decoder_up_block_types=("ResnetUpsampleBlock2D",) * 2),
  lambda b, n: dict(sample=r(b, 3, n, n), generator=torch.Generator().manual_seed(0)), 32, 48,
  note="draws noise from the generator it is given")


def _allegro_vae() -> nn.Module:
    model = _class("AutoencoderKLAllegro")(**_VIDEO_AE, norm_num_groups=2)
    model.kernel, model.stride, model.use_tiling = (8, 32, 32), (4, 16, 16), True
    model.tile_overlap_t, model.tile_overlap_h, model.tile_overlap_w = 4, 16, 16
    return model


d("AutoencoderKLAllegro", _allegro_vae, _video(8), 32, 48, batches=(1,),
  note="eager takes one video and works with tiling only")
d("AutoencoderKLCogVideoX", _VIDEO_AE | dict(
    norm_num_groups=2, down_block_types=("CogVideoXDownBlock3D",) * 4,
    up_block_types=("CogVideoXUpBlock3D",) * 4),
  _video(8), 16, 24)
d("AutoencoderKLCosmos", dict(
    latent_channels=4, encoder_block_out_channels=(8, 8, 8, 8), decode_block_out_channels=(8, 8, 8, 8),
    attention_resolutions=(8,), resolution=64, num_layers=1, spatial_compression_ratio=4,
    temporal_compression_ratio=4), _video(9), 32, 48)
d("AutoencoderKLHunyuanVideo", _VIDEO_AE | dict(
    norm_num_groups=4, down_block_types=("HunyuanVideoDownBlock3D",) * 4,
    up_block_types=("HunyuanVideoUpBlock3D",) * 4), _video(9), 16, 24)
_HUNYUAN_AE = dict(
    latent_channels=4, block_out_channels=(16, 16), layers_per_block=1, spatial_compression_ratio=4,
    temporal_compression_ratio=2, downsample_match_channel=False, upsample_match_channel=False,
)
d("AutoencoderKLHunyuanVideo15", _HUNYUAN_AE, _video(5), 16, 24, batches=(1,),
  note="its mask takes one video only")
d("AutoencoderKLHunyuanImageRefiner", _HUNYUAN_AE, _video(5), 16, 24)
d("AutoencoderKLKVAEVideo", dict(ch=32, ch_mult=(1, 2), num_res_blocks=1, z_channels=4,
    temporal_compress_times=2),
  _video(3), 16, 24)
d("AutoencoderKLMagvit", _VIDEO_AE | dict(
    norm_num_groups=4, spatial_group_norm=True,
    down_block_types=("SpatialDownBlock3D",) + ("SpatialTemporalDownBlock3D",) * 3,
    up_block_types=("SpatialUpBlock3D",) + ("SpatialTemporalUpBlock3D",) * 3), _video(9), 16, 24)
d("AutoencoderKLMochi", dict(
    latent_channels=4, encoder_block_out_channels=(32, 32, 32, 32),
    decoder_block_out_channels=(32, 32, 32, 32),
    layers_per_block=(1, 1, 1, 1, 1), scaling_factor=1), _video(7), 16, 24)
d("AutoencoderKLMiniMaxH3", dict(
    latent_channels=4, block_out_channels=(8, 16), layers_per_block=1, spatial_downsample_factors=(2, 2),
    temporal_downsample_factors=(2, 2), norm_num_groups=4, decoder_num_layers=2,
    decoder_num_attention_heads=2,
    decoder_attention_head_dim=8, decoder_num_register_tokens=2, decoder_ffn_mult=2, clip_length=17,
    token_drop=3, latents_mean=(0.0,) * 4, latents_std=(1.0,) * 4), _video(22), 8, 16)
_LTX_AE = dict(
    latent_channels=8, block_out_channels=(8, 8, 8, 8), layers_per_block=(1, 1, 1, 1, 1), patch_size=1,
    patch_size_t=1,
)
d("AutoencoderKLLTXVideo", _LTX_AE | dict(
    decoder_block_out_channels=(8, 8, 8, 8), decoder_layers_per_block=(1, 1, 1, 1, 1),
    spatio_temporal_scaling=(True, True, False, False),
    decoder_spatio_temporal_scaling=(True, True, False, False),
    decoder_inject_noise=(False,) * 5, upsample_residual=(False,) * 4, upsample_factor=(1,) * 4), _video(9),
    16, 24)
_LTX_091 = _LTX_AE | dict(
    layers_per_block=(1, 1, 1, 1), decoder_block_out_channels=(8, 16, 32),
    decoder_layers_per_block=(1, 1, 1, 1),
    spatio_temporal_scaling=(True, True, True, False), decoder_spatio_temporal_scaling=(True, True, True),
    upsample_residual=(True,) * 3, upsample_factor=(2,) * 3, timestep_conditioning=True,
)
d("AutoencoderKLLTXVideo", _LTX_091 | dict(decoder_inject_noise=(False,) * 4),
  lambda b, n: dict(sample=r(b, 3, 9, n, n), temb=torch.full((b,), 0.05)), 16, 24, tag="091")
d("AutoencoderKLLTXVideo", _LTX_091 | dict(decoder_inject_noise=(True, True, True, False)),
  lambda b, n: dict(sample=r(b, 3, 9, n, n), temb=torch.full((b,), 0.05)), 16, 24, tag="091-noise", note=_RNG)
d("AutoencoderKLLTX2Video", _LTX_AE | dict(
    decoder_block_out_channels=(8, 16, 32), decoder_layers_per_block=(1, 1, 1, 1),
    spatio_temporal_scaling=(True,) * 4, decoder_spatio_temporal_scaling=(True,) * 3,
    decoder_inject_noise=(False,) * 4, upsample_residual=(True,) * 3, upsample_factor=(2,) * 3,
    downsample_type=("spatial", "temporal", "spatiotemporal", "spatiotemporal"), decoder_causal=False),
  _video(9), 16, 24)
d("LTX2VideoDiffusionDecoderModel", dict(
    latent_channels=8, patch_size=2, decoder_head_dim=16, decoder_stage_channels=(64, 32, 16, 16, 16),
    decoder_stage_depths=(1, 1, 1, 1, 2), decoder_stage_kernels=((3, 3, 3),) * 4, decoder_t_emb_dim=32,
    decoder_upsample_channel_reductions=(2, 2, 1, 1), decoder_stage5_kernel=(3, 3, 3),
    spatial_compression_ratio=16),
  lambda b, n: dict(z=r(b, 8, 2, n, n), generator=torch.Generator().manual_seed(0)), 3, batches=(1, 2),
  grad=False, note=_FLEX)
_WAN_AE = dict(base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
  temperal_downsample=[False, True, True])
d("AutoencoderKLWan", _WAN_AE, _video(9), 16, 24)
d("AutoencoderKLWan", _WAN_AE | dict(
    is_residual=True, patch_size=2, in_channels=12, out_channels=12, dim_mult=[1, 2, 2, 2],
    decoder_base_dim=4),
  _video(5), 32, 48, tag="22")
d("AutoencoderKLQwenImage", _WAN_AE, _video(1), 16, 24)
d("AutoencoderKLQwenImage21", dict(
    base_dim=4, decoder_base_dim=4, z_dim=8, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.0] * 8,
    temperal_downsample=[False, True, True], latents_std=[1.0] * 8),
  lambda b, n: dict(sample=r(b, 4, 1, n, n)), 32, 64)
_VIDTOK = dict(
    is_causal=False, ch=32, ch_mult=(1, 2, 2, 2), z_channels=6, double_z=False, num_res_blocks=1,
    regularizer="fsq", codebook_size=262144,
)
d("AutoencoderVidTok", _VIDTOK, _video(8), 16, 32)
d("AutoencoderVidTok", _VIDTOK | dict(is_causal=True, regularizer="kl", double_z=True, z_channels=4),
  lambda b, n: dict(sample=r(b, 3, 5, n, n), sample_posterior=False), 16, 32, tag="causal")
d("Kandinsky6SRVAE", dict(
    latent_channels=4, encoder_block_out_channels=(4, 8, 8), decoder_block_out_channels=(4, 8, 8),
    layers_per_block=1),
  _video(5), 16, 32)
d("Kandinsky6SRLatentUpscalerBank", dict(
    in_channels=4, stage_channels=(16, 8, 8), num_pre_blocks=1, num_mid_blocks=1, num_post_blocks=1,
    num_x2_adapter_blocks=1), lambda b, n: dict(latents=r(b, 4, 2, n, n), scale=2), 8, 12)
d("AutoencoderRAE", dict(
    encoder_type="dinov2", encoder_hidden_size=64, encoder_patch_size=14, encoder_num_hidden_layers=2,
    encoder_input_size=28, patch_size=4, image_size=8, decoder_hidden_size=32, decoder_num_hidden_layers=1,
    decoder_num_attention_heads=4, decoder_intermediate_size=64), _image, 28)
d("AutoencoderKLLTX2Audio", dict(
    base_channels=16, output_channels=2, ch_mult=(1, 2), num_res_blocks=1, in_channels=2, resolution=16,
    latent_channels=4, norm_type="pixel", causality_axis="height", mid_block_add_attention=False,
    mel_bins=16),
  lambda b, n: dict(sample=r(b, 2, n, 16)), 8, 12)
d("AutoencoderKLMiniMaxH3Audio", dict(
    encoder_dim=4, encoder_rates=(2, 2), latent_dim=32, latent_channels=8, num_attention_heads=2,
    decoder_dim=16, decoder_rates=(2, 2), decoder_kernel_sizes=(4, 4), resblock_kernel_sizes=(3, 7),
    resblock_dilation_sizes=((1, 3), (1, 3)), latents_mean=[0.0] * 8, latents_std=[1.0] * 8), _audio(1), 32,
    48)
d("AutoencoderKLKVAEAudio", dict(
    encoder_dim=8, encoder_rates=[2, 2], latent_dim=32, codebook_dim=8, decoder_dim=32, decoder_rates=[2, 2],
    attn_num_heads=2), _audio(1), 32, 48)
d("AutoencoderOobleck", dict(
    encoder_hidden_size=12, decoder_channels=12, decoder_input_channels=6, downsampling_ratios=[2, 4],
    channel_multiples=[1, 2]), _audio(2), 24, 48)
d("AutoencoderSAME", dict(
    audio_channels=2, patch_size=4, encoder_channels=16, encoder_c_mults=(1, 2), encoder_strides=(2, 2),
    encoder_transformer_depths=(1, 1), latent_dim=8, use_differential_attention=False, dim_heads=8,
    ff_mult=2),
  _audio(2), 128, 256)
d("LongCatAudioDiTVae", dict(
    channels=8, c_mults=[1, 2], strides=[2, 2], latent_dim=4, encoder_latent_dim=8, downsampling_ratio=4),
  _audio(1), 64, 96)
d("Cosmos3AVAEAudioTokenizer", dict(
    sampling_rate=16, hop_size=4, enc_dim=4, enc_num_blocks=1, enc_n_fft=8, enc_hop_length=2,
    enc_latent_dim=8,
    enc_c_mults=(1,), enc_strides=(2,), vocoder_input_dim=4, dec_dim=4, dec_c_mults=(1, 2),
    dec_strides=(2, 2)),
  _audio(2), 16, 32)
d("MMAudioVAE", dict(mel_bins=16, latent_channels=4, hidden_channels=16, layers_per_block=1, n_fft=64,
    hop_length=16),
  lambda b, n: dict(sample=u(b, n) * 2 - 1), 256, 512)
d("MMAudioVocoder", dict(
    num_mels=8, upsample_initial_channel=16, upsample_rates=(4, 2), upsample_kernel_sizes=(8, 4),
    resblock_kernel_sizes=(3,), resblock_dilation_sizes=((1, 3),)), lambda b, n: dict(mel=r(b, 8, n)), 8, 12)

# Models that live inside pipelines

_ACE = "diffusers.pipelines.ace_step.modeling_ace_step"
_ACE_CFG = dict(
    hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    sliding_window=4,
)
_ACE_POOL = _ACE_CFG | dict(audio_acoustic_hidden_dim=8, num_attention_pooler_hidden_layers=2)
d("AceStepAudioTokenDetokenizer", _ACE_POOL, lambda b, n: dict(hidden_states=r(b, n, 32)), 4, 6)
d("AceStepAudioTokenizer", _ACE_POOL | dict(fsq_dim=32), lambda b, n: dict(hidden_states=r(b, n, 5, 8)), 4, 6)
_ACE_LYRIC = dict(text_hidden_dim=16, num_lyric_encoder_hidden_layers=2)
_ACE_TIMBRE = dict(timbre_hidden_dim=8, num_timbre_encoder_hidden_layers=2)
d("AceStepLyricEncoder", _ACE_CFG | _ACE_LYRIC,
  lambda b, n: dict(inputs_embeds=r(b, n, 16), attention_mask=mask(b, n)), 8, 12, module=_ACE)
d("AceStepTimbreEncoder", _ACE_CFG | _ACE_TIMBRE,
  lambda b, n: dict(refer_audio_acoustic_hidden_states_packed=r(b, n, 8),
      refer_audio_order_mask=torch.arange(b)),
  8, 12, module=_ACE)
d("AceStepConditionEncoder", _ACE_CFG | _ACE_LYRIC | _ACE_TIMBRE,
  lambda b, n: dict(
      text_hidden_states=r(b, 6, 16), text_attention_mask=mask(b, 6), lyric_hidden_states=r(b, n, 16),
      lyric_attention_mask=mask(b, n), refer_audio_acoustic_hidden_states_packed=r(b, n, 8),
      refer_audio_order_mask=torch.arange(b)), 8, 12)
d("AudioLDM2ProjectionModel", dict(
    text_encoder_dim=16, text_encoder_1_dim=32, langauge_model_dim=16, use_learned_position_embedding=True,
    max_seq_length=9),
  lambda b, n: dict(hidden_states=r(b, 1, 16), hidden_states_1=r(b, 9, 32),
      attention_mask=torch.ones(b, 1).long(),
                    attention_mask_1=mask(b, 9).long()), full=True)
d("AudioLDM2UNet2DConditionModel", dict(
    block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, cross_attention_dim=(None, 8),
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=2),
  lambda b, n: _unet(b, n, encoder_hidden_states_1=r(b, 5, 8), encoder_attention_mask_1=mask(b, 5)), 16, 24)
d("UnCLIPTextProjModel", dict(clip_embeddings_dim=16, time_embed_dim=24, cross_attention_dim=12),
  lambda b, n: dict(image_embeddings=r(b, 16), prompt_embeds=r(b, 16), text_encoder_hidden_states=r(b, 6, 16),
                    do_classifier_free_guidance=False),
                    module="diffusers.pipelines.deprecated.unclip.text_proj")
_UNI = "diffusers.pipelines.deprecated.unidiffuser.modeling_uvit"
d("UniDiffuserTextDecoder", dict(
    prefix_length=4, prefix_inner_dim=16, prefix_hidden_dim=12, vocab_size=40, n_positions=32, n_embd=24,
    n_layer=2, n_head=2),
  lambda b, n: dict(input_ids=ints(40, b, n), prefix_embeds=r(b, 4, 16)), 8, 12)
_UVIT = dict(
    num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, patch_size=2, sample_size=8,
    activation_fn="gelu", num_embeds_ada_norm=10, norm_type="layer_norm", block_type="unidiffuser",
)
d("UTransformer2DModel", _UVIT | dict(use_patch_pos_embed=True, out_channels=4),
  lambda b, n: dict(hidden_states=r(b, 4, n, n), timestep=ts(b)), 8, module=_UNI)
d("UniDiffuserModel", _UVIT | dict(
    text_dim=12, clip_img_dim=12, num_text_tokens=6, out_channels=4, use_timestep_embedding=False,
    use_data_type_embedding=True),
  lambda b, n: dict(latent_image_embeds=r(b, 4, n, n), image_embeds=r(b, 1, 12), prompt_embeds=r(b, 6, 12),
                    timestep_img=ts(b), timestep_text=ts(b)), 8)
d("UNetFlatConditionModel", _UNET | dict(
    down_block_types=("CrossAttnDownBlockFlat", "DownBlockFlat"), attention_head_dim=2,
    up_block_types=("UpBlockFlat", "CrossAttnUpBlockFlat")),
  lambda b, n: dict(sample=r(b, 4, n, 1), timestep=ts(b), encoder_hidden_states=r(b, 6, 8)), 4,
  module="diffusers.pipelines.deprecated.versatile_diffusion.modeling_text_unet")
_WUERSTCHEN = "diffusers.pipelines.deprecated.wuerstchen."
d("PaellaVQModel", dict(bottleneck_blocks=1, embed_dim=16, latent_channels=4, num_vq_embeddings=16), _image,
  32, 48, module=_WUERSTCHEN + "modeling_paella_vq_model")
d("WuerstchenDiffNeXt", dict(
    c_r=16, c_cond=12, c_hidden=[8, 16], nhead=[-1, 2], blocks=[1, 1], level_config=["CT", "CTA"],
    inject_effnet=[False, True], effnet_embd=4, clip_embd=12),
  lambda b, n: dict(x=r(b, 4, n, n), r=u(b), effnet=r(b, 4, 4, 4), clip=r(b, 6, 12)), 16, 24,
  module=_WUERSTCHEN + "modeling_wuerstchen_diffnext")
d("WuerstchenPrior", dict(c_in=4, c=16, c_cond=12, c_r=16, depth=2, nhead=2),
  lambda b, n: dict(x=r(b, 4, n, n), r=u(b), c=r(b, 6, 12)), 8, 12,
  module=_WUERSTCHEN + "modeling_wuerstchen_prior")
d("ReduxImageEncoder", dict(redux_dim=12, txt_in_features=16), lambda b, n: dict(x=r(b, n, 12)), 8, 12,
  full=True)
d("Ideogram4PromptEnhancerHead", dict(hidden_size=12, vocab_size=40),
  lambda b, n: dict(hidden_states=r(b, n, 12)), 8, 12)
d("LTXLatentUpsamplerModel", dict(in_channels=8, mid_channels=32, num_blocks_per_stage=1),
  lambda b, n: dict(hidden_states=r(b, 8, 2, n, n)), 8, 12,
  module="diffusers.pipelines.ltx.modeling_latent_upsampler")
d("LTX2LatentUpsamplerModel", dict(in_channels=8, mid_channels=32, num_blocks_per_stage=1),
  lambda b, n: dict(hidden_states=r(b, 8, 2, n, n)), 8, 12,
  module="diffusers.pipelines.ltx2.latent_upsampler")
_CONNECTORS = dict(
    caption_channels=16, text_proj_in_factor=3, video_connector_num_attention_heads=2,
    video_connector_attention_head_dim=8, video_connector_num_layers=1, audio_connector_num_attention_heads=2,
    audio_connector_attention_head_dim=8, audio_connector_num_layers=1, connector_rope_base_seq_len=32,
)
d("LTX2TextConnectors", _CONNECTORS | dict(
    video_connector_num_learnable_registers=4, audio_connector_num_learnable_registers=4),
  lambda b, n: dict(text_encoder_hidden_states=r(b, n, 16, 3), attention_mask=mask(b, n).long()), 8, 12,
  module="diffusers.pipelines.ltx2.connectors")
d("LTX2DurationHead", dict(
    video_cross_attention_dim=16, audio_cross_attention_dim=12, pooler_hidden_dim=16, num_pooler_heads=2,
    mlp_hidden_dim=16),
  lambda b, n: dict(video_tokens=r(b, n, 16), audio_tokens=r(b, n, 12)), 8, 12,
  module="diffusers.pipelines.ltx2.duration_head")
_VOCODER = "diffusers.pipelines.ltx2.vocoder"
d("LTX2Vocoder", dict(
    in_channels=16, hidden_channels=16, upsample_kernel_sizes=[4, 4], upsample_factors=[2, 2],
    resnet_kernel_sizes=[3], resnet_dilations=[[1, 3, 5]]),
  lambda b, n: dict(hidden_states=r(b, 2, n, 8)), 8, 12, module=_VOCODER)


def _vocoder_bwe() -> nn.Module:
    model = _class("LTX2VocoderWithBWE", _VOCODER)(
        in_channels=16, hidden_channels=16, upsample_kernel_sizes=[4, 4], upsample_factors=[2, 2],
        resnet_kernel_sizes=[3], resnet_dilations=[[1, 3]], bwe_in_channels=16, bwe_hidden_channels=16,
        bwe_upsample_kernel_sizes=[8, 4], bwe_upsample_factors=[4, 2], bwe_resnet_kernel_sizes=[3],
        bwe_resnet_dilations=[[1, 3]], filter_length=16, hop_length=4, window_length=16, num_mel_channels=8,
        input_sampling_rate=16000, output_sampling_rate=32000)
    for buffer in model.mel_stft.buffers():  # zeros until a checkpoint is loaded
        buffer.copy_(torch.rand(buffer.shape))
    return model


d("LTX2VocoderWithBWE", _vocoder_bwe, lambda b, n: dict(mel_spec=r(b, 2, n, 8)), 8, 12, module=_VOCODER)
_SHAPE = "diffusers.pipelines.shap_e.renderer"
d("MLPNeRSTFModel", dict(d_hidden=16, n_hidden_layers=3, insert_direction_at=2),
  lambda b, n: dict(position=r(b, n, 3), direction=r(b, n, 3), ts=u(b, n, 1)), 8, 12, module=_SHAPE)
d("ShapEParamsProjModel", dict(
    param_names=("a.weight", "b.weight"), param_shapes=((8, 12), (8, 8)), d_latent=16),
  lambda b, n: dict(x=r(b, 16, 16)), module=_SHAPE)
d("StableAudioProjectionModel", dict(text_encoder_dim=12, conditioning_dim=8, min_value=0, max_value=32),
  lambda b, n: dict(text_hidden_states=r(b, n, 12), start_seconds=u(b) * 9, end_seconds=u(b) * 40), 6, 8,
  full=True)
d("StableAudio3DurationEmbedder", dict(output_dim=12, fourier_dim=16), lambda b, n: dict(seconds=u(b) * 400))
d("CLIPImageProjection", dict(hidden_size=12), lambda b, n: dict(x=r(b, 12)))


def _proteina(b: int, n: int) -> dict:
    return dict(bb_ca=r(b, n, 3), local_latents=r(b, n, 8), bb_ca_time=u(b), local_latents_time=u(b),
                padding_mask=mask(b, n), token_type=ints(7, b, n), atom37_mask=r(b, n, 37) > 0,
                conditioning=dict(
                    is_in_context_conditioning=r(b, n) > 1, supports_local_latent=torch.ones(b, n).bool(),
                    molecule_iid=ints(2, b, n), molecule_entity_id=ints(2, b, n)))


d("RFD4ProteinaTransformer", dict(
    nlayers=2, token_dim=32, nheads=2, dim_cond=16, pair_repr_dim=16, latent_dim=8, token_type_emb_dim=8,
    cath_emb_dim=8, t_emb_dim=16, seq_sep_dim=8, tri_mult_c=8, num_sequence_classes=12,
    feats_seq=("xt_bb_ca", "xt_local_latents", "token_type"),
    feats_pair_repr=("xt_bb_ca_pair_dists", "molecule_idx_pair", "molecule_entity_pair")), _proteina, 8, 12)
d("RFD4ProteinaAutoencoder", lambda: _class("RFD4ProteinaAutoencoder")(
    atom37_mask=(torch.rand(12, 37) > 0.5).tolist(), allowed_residue_types=(torch.rand(7, 12) > 0.3).tolist(),
    latent_dim=8, n_residue_types=12, nlayers=2, token_dim=32, nheads=2, dim_cond=16, pair_repr_dim=16,
    token_type_emb_dim=8),
  lambda b, n: dict(z_latent=r(b, n, 8), ca_coors_nm=r(b, n, 3), padding_mask=mask(b, n),
      token_type=ints(7, b, n),
                    atom37_mask=r(b, n, 37) > 0,
                    conditioning=dict(is_in_context_conditioning=r(b, n) > 1,
                                      supports_local_latent=torch.ones(b, n).bool())), 8, 12)
_SANA_WM = dict(
    in_channels=4, num_layers=2, hidden_size=48, num_attention_heads=2, softmax_every_n=2, linear_head_dim=24,
    conv_kernel_size=4, chunk_plucker_channels=6, caption_channels=16,
)


def _camera(b: int, frames: int) -> torch.Tensor:
    pose = torch.eye(4).repeat(b, frames, 1, 1)
    pose[..., :3, 3] = r(b, frames, 3)
    return torch.cat([pose.flatten(2), torch.tensor([8.0, 8.0, 4.0, 4.0]).expand(b, frames, 4)], dim=-1)


d("SanaWMTransformer3DModel", _SANA_WM,
  lambda b, n: dict(
      hidden_states=r(b, 4, 3, n, n), timestep=ts(b)[:, None, None].expand(b, 1, 3),
      encoder_hidden_states=r(b, 1, 9, 16), encoder_attention_mask=mask(b, 9),
      camera_conditions=_camera(b, 3), chunk_plucker=r(b, 6, 3, n, n)), 4, 6)

# --- timm ---------------------------------------------------------------------------------------------------

# Smallest model of each timm module, by parameter count.
TIMM: dict[str, str] = {
    "beit": "beit_base_patch16_224", "byoanet": "halonet_h1", "byobnet": "test_byobnet",
    "cait": "cait_xxs24_224", "coat": "coat_tiny", "convit": "convit_tiny", "convmixer": "convmixer_768_32",
    "convnext": "test_convnext", "cpubone": "cpubone_nano", "crossvit": "crossvit_tiny_240",
    "csatv2": "csatv2", "cspnet": "cs3darknet_focus_s", "cspnext": "cspnext_tiny", "davit": "davit_tiny",
    "deepseek_vit": "deepseek_vit_412m", "deit": "deit_tiny_patch16_224", "densenet": "densenet121",
    "dla": "dla46x_c", "dpn": "dpn48b", "edgenext": "edgenext_xx_small",
    "efficientformer": "efficientformer_l1", "efficientformer_v2": "efficientformerv2_s0",
    "efficientnet": "test_efficientnet", "efficientvim": "efficientvim_m1",
    "efficientvit_mit": "efficientvit_b0", "efficientvit_msra": "efficientvit_m0",
    "eva": "vit_tiny_patch16_dinov3_qkvb", "fasternet": "fasternet_t0", "fastvit": "fastvit_t8",
    "focalnet": "focalnet_tiny_srf", "gcvit": "gcvit_xxtiny", "gemma4_vit": "gemma4_vit_167m",
    "ghostnet": "ghostnet_050", "hardcorenas": "hardcorenas_b", "hgnet": "hgnetv2_b0",
    "hiera": "hiera_tiny_224", "hieradet_sam2": "sam2_hiera_tiny", "hrnet": "hrnet_w18_small",
    "iformer": "iformer_t", "inception_next": "inception_next_atto",
    "inception_resnet_v2": "inception_resnet_v2", "inception_v3": "inception_v3",
    "inception_v4": "inception_v4", "lcnetv2": "lcnetv2_small", "levit": "levit_128s",
    "lowformer": "lowformer_b0", "mambaout": "test_mambaout", "maxxvit": "test_coatnet",
    "metaformer": "poolformerv2_s12", "mlp_mixer": "gmlp_ti16_224", "mobilenetv3": "mobilenetv3_small_050",
    "mobilenetv5": "mobilenetv5_base", "mobilevit": "mobilevit_xxs", "mvitv2": "mvitv2_tiny",
    "naflexvit": "naflexvit_base_patch16_parfac_gap", "nasnet": "nasnetalarge", "nest": "nest_tiny",
    "nextvit": "nextvit_small", "nfnet": "test_nfnet", "pit": "pit_ti_224", "pnasnet": "pnasnet5large",
    "pvt_v2": "pvt_v2_b0", "qwen3_vit": "qwen3_vit_88m", "rdnet": "rdnet_tiny", "regnet": "regnetx_002",
    "repghost": "repghostnet_050", "repvit": "repvit_m1", "res2net": "res2next50", "resnest": "resnest14d",
    "resnet": "test_resnet", "resnetv2": "resnetv2_18", "rexnet": "rexnet_100", "selecsls": "selecsls42",
    "senet": "legacy_seresnet18", "sequencer": "sequencer2d_s", "shvit": "shvit_s1", "sknet": "skresnet18",
    "starnet": "starnet_s050", "swiftformer": "swiftformer_xs",
    "swin_transformer": "swin_tiny_patch4_window7_224", "swin_transformer_v2": "swinv2_tiny_window16_256",
    "swin_transformer_v2_cr": "swinv2_cr_tiny_224", "tiny_vit": "tiny_vit_5m_224",
    "tnt": "tnt_s_legacy_patch16_224", "tresnet": "tresnet_m", "twins": "twins_svt_small", "vgg": "vgg11",
    "visformer": "visformer_tiny", "vision_transformer": "test_vit",
    "vision_transformer_hybrid": "vit_tiny_r_s16_p8_224", "vision_transformer_relpos": "test_vit_relpos",
    "vision_transformer_sam": "samvit_base_patch16_224", "vitamin": "vitamin_small_224",
    "volo": "volo_d1_224", "vovnet": "ese_vovnet19b_slim_dw", "xception": "legacy_xception",
    "xception_aligned": "xception41p", "xcit": "xcit_nano_12_p8_224",
}
# Built for images of 64 x 64 (img_size=64); the others take 64 x 64 and 96 x 96, or what _TIMM_SIDES says.
_TIMM_FIXED = """
    beit cait coat convit deit efficientformer_v2 gcvit hiera levit maxxvit mlp_mixer nest pit
    swin_transformer swin_transformer_v2 swin_transformer_v2_cr tnt visformer vision_transformer_hybrid
    vision_transformer_relpos vitamin volo
""".split()
_TIMM_SIDES = {
    "byoanet": (256,), "deepseek_vit": (84, 126), "efficientformer": (224,), "inception_resnet_v2": (96, 128),
    "inception_v3": (96, 128), "inception_v4": (96, 128),
}
# Fewer blocks, for the modules whose smallest model is big.
_TIMM_ARGS = {
    "beit": dict(depth=2), "deepseek_vit": dict(depth=2), "gemma4_vit": dict(depth=2),
    "qwen3_vit": dict(depth=4), "naflexvit": dict(depth=2), "vision_transformer_sam": dict(depth=3),
}
# More models of some modules, with other layers or other ways to be called: (name, sides, arguments).
_TIMM_MORE = (
    ("tf_efficientnet_lite0", (64, 96), {}),
    ("tf_mobilenetv3_small_minimal_100", (64, 96), {}),
    ("mobilenetv4_conv_small_050", (64, 96), {}),
    ("test_efficientnet_evos", (64, 96), {}),
    ("test_convnext2", (64, 96), {}),
    ("test_maxvit", (64,), dict(img_size=64)),
    ("test_vit2", (64, 96), dict(dynamic_img_size=True)),
    ("test_vit3", (64, 96), dict(dynamic_img_size=True, dynamic_img_pad=True)),
    ("vit_tiny_patch16_224", (64, 96), dict(img_size=64, dynamic_img_size=True, depth=2)),
    ("vit_base_patch16_siglip_224", (64,), dict(img_size=64, depth=1)),
    ("vit_base_patch16_xp_224", (64,), dict(img_size=64, depth=1)),
    ("vit_srelpos_small_patch16_224", (64,), dict(img_size=64, depth=2)),
    ("eva02_tiny_patch14_224", (56, 84), dict(img_size=56, dynamic_img_size=True, depth=2)),
    ("deit_tiny_distilled_patch16_224", (64,), dict(img_size=64, depth=2)),
    ("mixer_s32_224", (64,), dict(img_size=64)),
    ("resmlp_12_224", (64,), dict(img_size=64)),
    ("levit_conv_128s", (64,), dict(img_size=64)),
    ("coat_lite_tiny", (64,), dict(img_size=64)),
    ("convnextv2_atto", (64, 96), {}),
    ("caformer_s18", (64, 96), {}),
    ("mobilevitv2_050", (64, 96), {}),
    ("regnety_002", (64, 96), {}),
    ("regnetz_005", (64, 96), {}),
    ("resnetv2_50x1_bit", (64, 96), {}),
    ("resnet18d", (64, 96), {}),
    ("seresnext26t_32x4d", (64, 96), {}),
    ("resnetblur18", (64, 96), {}),
    ("gcresnext26ts", (64, 96), {}),
    ("lambda_resnet26t", (64,), dict(img_size=64)),
    ("botnet26t_256", (64,), dict(img_size=64)),
    ("nf_regnet_b0", (64, 96), {}),
    ("dm_nfnet_f0", (64,), {}),
    ("ghostnetv3_050", (64, 96), {}),
    ("mobileone_s0", (64, 96), {}),
    ("twins_pcpvt_small", (64, 96), {}),
    ("swinv2_cr_tiny_ns_224", (64,), dict(img_size=64)),
    ("pit_ti_distilled_224", (64,), dict(img_size=64)),
    ("xcit_tiny_12_p16_224", (64, 96), {}),
    ("mvitv2_small_cls", (64,), dict(img_size=64)),
)
_TIMM_FAST = {
    "vision_transformer", "resnet", "convnext", "swin_transformer", "efficientnet", "mobilenetv3",
    "test_maxvit", "regnet", "mlp_mixer", "eva", "levit", "nfnet", "tf_efficientnet_lite0",
}


def t(label: str, model: str, sides: tuple[int, ...], args: dict) -> None:
    def build() -> nn.Module:
        import timm

        return _make(lambda: timm.create_model(model, **args))

    def inputs(batch: int = 1, size: int = 0) -> tuple[tuple, dict]:
        _gen.manual_seed(batch * 10 + size)
        return (r(batch, 3, sides[size], sides[size]),), {}

    _CASES.append(Case(f"timm/{label}", build, inputs, len(sides), fast=label in _TIMM_FAST, note=model))


for _module, _model in TIMM.items():
    _fixed = dict(img_size=64) if _module in _TIMM_FIXED else {}
    t(_module, _model, (64,) if _fixed else _TIMM_SIDES.get(_module, (64, 96)), _fixed
        | _TIMM_ARGS.get(_module, {}))
for _model, _sides, _args in _TIMM_MORE:
    t(_model, _model, _sides, _args)

# fmt: on

# --- what is covered ---------------------------------------------------------------------------------------

LEFT_OUT: dict[str, str] = {
    "ControlNetXSAdapter": "has no forward of its own: it holds weights for UNetControlNetXSModel",
    "IFWatermarker": "has no forward: it edits PIL images",
    "LearnedClassifierFreeSamplingEmbeddings": "has no forward: it holds one parameter",
    "LegacyModelMixin": "base class",
    "MotionAdapter": "has no forward of its own: it holds weights for UNetMotionModel",
    "ShapERenderer": "has no forward: it renders and makes meshes with methods; its networks are covered",
    "StableUnCLIPImageNormalizer": "has no forward: scale and unscale are methods",
}


def diffusers_classes() -> list[str]:
    """Names of all ModelMixin subclasses of diffusers, the exported ones and those inside its modules."""
    import diffusers

    for info in pkgutil.walk_packages(diffusers.models.__path__, "diffusers.models."):
        importlib.import_module(info.name)
    for name in dir(diffusers):
        with contextlib.suppress(Exception):  # an export whose optional dependency is missing
            getattr(diffusers, name)
    found, todo = set(), [diffusers.ModelMixin]
    while todo:
        for cls in todo.pop().__subclasses__():
            if cls.__module__.startswith("diffusers.") and cls not in found:
                found.add(cls)
                todo.append(cls)
    return sorted({cls.__name__ for cls in found})


def unlisted() -> list[str]:
    """Diffusers model classes and timm modules that have neither a case nor a reason in LEFT_OUT."""
    import timm

    names = [n for n in diffusers_classes() if n not in _COVERED]
    names += [f"timm/{m}" for m in timm.list_modules() if m not in TIMM]
    return [n for n in names if n not in LEFT_OUT]


def cases(only: str | None = None) -> list[Case]:
    return [c for c in _CASES if only is None or only in c.name]
