"""The models that are measured, adapters for them on disk, and the same adapters in fxplug, PEFT, LyCORIS and diffusers.

All weights are random. A way of running a model shares the base's tensors with the others wherever it can, so that the ways
of one model lie in memory together. Adapters are folders in PEFT's layout, which every way gets its weights from.

vit     timm's ViT-S/16 at 224; LoRA on all linear layers of its blocks and on its head
unet    in the style of Stable Diffusion: 128, 256 and 256 channels, latents of 32x32, 77 words of width 768
small   a UNet of the same kind, with 64 and 128 channels and one layer to a block, where only the graph matters
pixart  PixArt with 28 blocks of width 256 (in full 1152), latents of 32x32 (256 tokens), 120 words of width 512
sd15, sdxl, pixart-1k, -4k, -16k, flux-1k, -4k, -16k   of full width, for GPUs; `flux` has 4 + 8 blocks in the place of 19 + 38
vit-large, flux-whole-4k   ViT-L/16, and Flux with all its blocks: for their layers, on the meta device
But for `vit` and `vit-large` LoRA is on to_q, to_k, to_v and to_out.0 of all attention, in `flux` with the words' projections.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import peft
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fxplug

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
SMALL = ["vit", "unet", "pixart"]
FULL = ["sd15", "sdxl", *(f"{name}-{tokens}" for name in ("pixart", "flux") for tokens in ("1k", "4k", "16k"))]
SIDES = {"1k": 64, "4k": 128, "16k": 256}  # of latents, with patches of 2x2
ATTENTION = r".*\.attn[12]?\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"
BATCH = {"vit": 4, "unet": 2, "pixart": 2} if DEVICE == "cpu" else {"vit": 64, "unet": 32, "pixart": 16}
RANK = 16


@dataclass
class Subject:
    """A model in evaluation, an example of its inputs by name, and the names of the layers that adapters are for."""

    kind: str
    module: nn.Module
    inputs: dict[str, Any]
    layers: list[str]


# --- the models


def subject(kind: str, batch: int | None = None, dtype: torch.dtype = DTYPE, device: str = DEVICE) -> Subject:
    """One of the models above."""
    torch.manual_seed(0)
    batch = batch or BATCH.get(kind, 1 if kind in FULL else 2)
    with torch.device(device):
        standard = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            module, inputs = MAKERS[kind.partition("-")[0]](kind, batch)
        finally:
            torch.set_default_dtype(standard)
    pattern = r"blocks\..*\.(qkv|proj|fc1|fc2)|head" if kind.startswith("vit") else ATTENTION
    linear = [name for name, m in module.named_modules() if isinstance(m, nn.Linear)]
    return Subject(kind, module.eval().requires_grad_(False), inputs, [n for n in linear if re.fullmatch(pattern, n)])


def _vit(kind: str, batch: int) -> tuple[nn.Module, dict[str, Any]]:
    size = kind.partition("-")[2] or "small"
    return timm.create_model(f"vit_{size}_patch16_224", num_classes=1000), {"x": torch.randn(batch, 3, 224, 224)}


def _unet(kind: str, batch: int) -> tuple[nn.Module, dict[str, Any]]:
    small = kind == "small"
    down = ["CrossAttnDownBlock2D"] * (1 if small else 2) + ["DownBlock2D"]
    module = diffusers.UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(64, 128) if small else (128, 256, 256),
        down_block_types=tuple(down),
        up_block_types=tuple(name.replace("Down", "Up") for name in reversed(down)),
        layers_per_block=1 if small else 2,
        cross_attention_dim=768,
    )
    return module, denoised(batch, 32, 768)


def _sd15(kind: str, batch: int) -> tuple[nn.Module, dict[str, Any]]:
    return diffusers.UNet2DConditionModel(sample_size=64, cross_attention_dim=768), denoised(batch, 64, 768)


def _sdxl(kind: str, batch: int) -> tuple[nn.Module, dict[str, Any]]:
    module = diffusers.UNet2DConditionModel(
        sample_size=128,
        block_out_channels=(320, 640, 1280),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2, 10),
        attention_head_dim=(5, 10, 20),
        cross_attention_dim=2048,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    )
    added = {"text_embeds": torch.randn(batch, 1280), "time_ids": torch.ones(batch, 6)}
    return module, {**denoised(batch, 128, 2048), "added_cond_kwargs": added}


def _pixart(kind: str, batch: int) -> tuple[nn.Module, dict[str, Any]]:
    small = kind == "pixart"
    side, heads, head, words = (32, 4, 64, 512) if small else (SIDES[kind.partition("-")[2]], 16, 72, 4096)
    module = diffusers.PixArtTransformer2DModel(
        sample_size=side,
        num_layers=28,
        num_attention_heads=heads,
        attention_head_dim=head,
        cross_attention_dim=heads * head,
        caption_channels=words,
        use_additional_conditions=False,
    )
    inputs = denoised(batch, side, words, 120)
    return module, {"hidden_states": inputs.pop("sample"), **inputs}


def _flux(kind: str, batch: int) -> tuple[nn.Module, dict[str, Any]]:
    side = SIDES[kind.rpartition("-")[2]] // 2
    module = diffusers.FluxTransformer2DModel(**({} if "whole" in kind else {"num_layers": 4, "num_single_layers": 8}))
    places = torch.cartesian_prod(torch.arange(1), torch.arange(side), torch.arange(side))
    return module, {
        "hidden_states": torch.randn(batch, side * side, 64),
        "encoder_hidden_states": torch.randn(batch, 512, 4096),
        "pooled_projections": torch.randn(batch, 768),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": places,
        "txt_ids": torch.zeros(512, 3),
        "return_dict": False,
    }


def denoised(batch: int, side: int, width: int, words: int = 77) -> dict[str, Any]:
    return {
        "sample": torch.randn(batch, 4, side, side),
        "timestep": torch.randint(0, 1000, (batch,)),
        "encoder_hidden_states": torch.randn(batch, words, width),
        "return_dict": False,
    }


MAKERS: dict[str, Callable[[str, int], tuple[nn.Module, dict[str, Any]]]] = {
    "vit": _vit, "unet": _unet, "small": _unet, "pixart": _pixart, "sd15": _sd15, "sdxl": _sdxl, "flux": _flux
}  # fmt: skip


def output(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def copied(module: nn.Module) -> nn.Module:
    """The modules again, on the same tensors."""
    return copy.deepcopy(module, {id(t): t for t in (*module.parameters(), *module.buffers())})


def with_own(module: nn.Module, layers: Iterable[str]) -> nn.Module:
    """The module after these layers got weights of their own, so that it can be merged in place."""
    for name in layers:
        layer = module.get_submodule(name)
        layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
    return module


# --- adapters on disk


def adapter(of: Subject, folder: Path, rank: int = RANK, part: str = ".*", seed: int = 1) -> Path:
    """A folder with an adapter for the layers whose names `part` matches, in the model's dtype."""
    layers = [name for name in of.layers if re.fullmatch(part, name)]
    save_file(random_adapter(of, layers, rank, seed), _made(folder) / "adapter_model.safetensors")
    peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=layers).save_pretrained(str(folder))
    return folder


def random_adapter(of: Subject, layers: Iterable[str], rank: int = RANK, seed: int = 1) -> dict[str, Tensor]:
    """An adapter's state in PEFT's layout, of scale 1, whose updates are about as large as those of trained ones."""
    generator, state = torch.Generator().manual_seed(seed), {}
    for name in layers:
        out, inner = of.module.get_submodule(name).weight.shape
        for half, shape in (("A", (rank, inner)), ("B", (out, rank))):
            values = torch.randn(shape, generator=generator) * (inner**-0.5 if half == "A" else 0.1 * rank**-0.5)
            state[f"base_model.model.{name}.lora_{half}.weight"] = values.to(of.module.get_submodule(name).weight.dtype)
    return state


def weights_of(folder: Path) -> dict[str, Tensor]:
    """An adapter's state with the layers' own names, as diffusers' models take it."""
    state = load_file(folder / "adapter_model.safetensors")
    return {key.removeprefix("base_model.model."): value for key, value in state.items()}


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# --- the model with adapters


def traced(of: Subject) -> Any:
    return fxplug.trace(of.module, kwargs=of.inputs)


def ours(of: Subject, base: Any, slots: int = 0, rank: int = RANK) -> Any:
    """The traced model with plain LoRA, or with slots for it."""
    options = {"slots": slots, "rank_max": rank} if slots else {}
    made = fxplug.load_pass("lora", at=of.layers, rank=rank, **options)
    return fxplug.apply(base, made).to(device=DEVICE, dtype=next(iter(of.module.parameters())).dtype).eval()


def with_plain(of: Subject, base: Any, folder: Path, rank: int = RANK) -> Any:
    """The traced model with plain LoRA that has an adapter's weights."""
    new = ours(of, base, rank=rank)
    state = weights_of(folder)
    for name in of.layers:
        block = new.get_submodule(f"lora.{name}.Lora")
        for half, key in ((block.down, "A"), (block.up, "B")):
            half.weight.data.copy_(state[f"{name}.lora_{key}.weight"])
        block.scale.fill_(1.0)
    return new.requires_grad_(False)


def with_slots(of: Subject, base: Any, folders: dict[str, Path], slots: int = 4, use: Any = None, rank: int = RANK) -> Any:
    """The traced model with adapters in its slots."""
    new = ours(of, base, slots, rank)
    for name, folder in folders.items():
        new.adapters.load(name, folder)
    new.adapters.use(use)
    return new


def in_peft(of: Subject, folders: dict[str, Path], module: nn.Module | None = None) -> Any:
    """PEFT's model with adapters; the first is active."""
    (first, folder), *rest = folders.items()
    made = peft.PeftModel.from_pretrained(module or copied(of.module), str(folder), adapter_name=first)
    for name, other in rest:
        made.load_adapter(str(other), adapter_name=name)
    return made.to(DEVICE).eval().requires_grad_(False)


def in_diffusers(of: Subject, folders: dict[str, Path], hotswap: int | None = None) -> Any:
    """Diffusers' own model with adapters; the first is active. `hotswap` is the rank that is prepared for."""
    made: Any = copied(of.module)
    if hotswap:
        made.enable_lora_hotswap(target_rank=hotswap)
    for name, folder in folders.items():
        made.load_lora_adapter(weights_of(folder), prefix=None, adapter_name=name)
    made.set_adapters(next(iter(folders)))
    return made.to(DEVICE).eval().requires_grad_(False)


def in_lycoris(of: Subject, folder: Path) -> nn.Module:
    """The model with LyCORIS's modules in it."""
    from lycoris import create_lycoris_from_weights
    from lycoris.logging import logger

    logger.setLevel("ERROR")
    made, state = copied(of.module), {}
    for key, value in weights_of(folder).items():
        name, half = key.removesuffix(".weight").rsplit(".", 1)
        flat = f"lycoris_{name.replace('.', '_')}"
        state[f"{flat}.{'lora_down' if half == 'lora_A' else 'lora_up'}.weight"] = value
        state[f"{flat}.alpha"] = torch.tensor(float(min(value.shape)))
    network, _ = create_lycoris_from_weights(1.0, "", made, state)
    network.apply_to()
    made.lycoris = network.to(DEVICE)
    return made.eval().requires_grad_(False)
