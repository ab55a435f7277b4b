"""The models that `gpu_trial.py` measures, and their linear layers with an update in one of its forms."""

from __future__ import annotations

import copy
import functools
import importlib.util
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Adapted(nn.Module):
    """A linear layer with an update in one form."""

    def __init__(self, base: nn.Linear, form: str, linear: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight, self.bias, self.form, self.linear = base.weight, base.bias, form, linear
        device, dtype = base.weight.device, base.weight.dtype
        draws = torch.Generator(device).manual_seed(0)
        for name, shape in (("down", (16, base.in_features)), ("up", (base.out_features, 16))):
            self.register_buffer(name, 0.02 * torch.randn(shape, device=device, generator=draws).to(dtype))
        self.register_buffer("gate", torch.ones((), device=device))

    def forward(self, x: Tensor) -> Tensor:
        update: tuple[Any, ...] = (self.down, self.up, self.gate)
        if self.form == "merged":
            return F.linear(x, self.weight, self.bias)
        return self.linear(x, self.weight, self.bias, *update, self.form)


class Blocks(nn.ModuleList):
    """Blocks after each other, which get the same conditions; of several results the last one goes on."""

    def forward(self, x: Tensor, *conditions: Any) -> Tensor:
        for block in self:
            found = block(x, *conditions)
            x = found[-1] if isinstance(found, tuple) else found
        return x


class Denoiser(nn.Module):
    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet

    def forward(self, *given: Tensor) -> Tensor:
        return self.unet(*given, return_dict=False)[0]


def subjects(device: str, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], nn.Module], tuple[Any, ...], str]]:
    """Name, model, inputs, and which linear layers are adapted: few blocks of large models, to compile them in time."""

    def new(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    large = device == "cuda"
    doubles, singles = (3, 2) if large else (1, 1)
    width, heads, tokens, wide, pixels = (1280, 20, 1024, 3072, 4096) if large else (32, 2, 12, 32, 12)
    if importlib.util.find_spec("timm"):
        import timm

        photographs = new(64, 3, 224, 224) if large else new(2, 3, 32, 32)
        for name, depth in (("small", 12), ("large", 4)) if large else (("tiny", 1),):
            kind, size = f"vit_{name}_patch16_224", {"depth": depth, "img_size": photographs.shape[-1]}
            yield f"vit-{name}, {depth} blocks", lambda k=kind, s=size: timm.create_model(k, **s), (photographs,), ".*"
    if importlib.util.find_spec("diffusers"):
        from diffusers.models.attention import BasicTransformerBlock
        from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock
        from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

        def sdxl() -> nn.Module:
            block = functools.partial(BasicTransformerBlock, width, heads, width // heads, cross_attention_dim=2 * wide)
            return Blocks(block() for _ in range(doubles))

        def flux() -> nn.Module:
            return Blocks(FluxSingleTransformerBlock(wide, wide // 128 or 1, min(wide, 128)) for _ in range(singles))

        yield f"sdxl, {doubles} blocks", sdxl, (new(2, tokens, width), None, new(2, 77, 2 * wide)), r".*attn[12]\.to_.*"
        yield f"flux, {singles} blocks", flux, (new(1, pixels, wide), new(1, 512, wide), new(1, wide)), r".*to_[qkv]"
        if large:
            given = new(2, 4, 64, 64), torch.ones(2, device=device), new(2, 77, 768)
            unet = functools.partial(UNet2DConditionModel, sample_size=64, cross_attention_dim=768)
            yield "sd15", lambda: Denoiser(unet()), given, r".*attn[12]\.to_.*"


def adapted(base: nn.Module, way: str, pattern: str, linear: Callable[..., Tensor]) -> nn.Module:
    """The model in one of its ways, on the same weights."""
    model = copy.deepcopy(base, {id(p): p for p in base.parameters()})
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and re.fullmatch(pattern, n)]
    if way == "peft":
        import peft

        config = peft.LoraConfig(r=16, lora_alpha=16, target_modules=names, init_lora_weights=False)
        return peft.inject_adapter_in_model(config, model).to(next(base.parameters()))
    for name in names if way != "plain" else ():
        model.set_submodule(name, Adapted(model.get_submodule(name), way, linear))
    return model
