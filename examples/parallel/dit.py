"""A diffusion transformer that no library has, and the pipeline that draws with it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, DiffusionPipeline, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn


class Block(nn.Module):
    """Queries and keys of length one, a temperature for each head, and a gate of the tokens' own on what they heard."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.again = nn.LayerNorm(width, elementwise_affine=False), nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.gate, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, width)
        self.heat = nn.Parameter(torch.full((heads, 1, 1), 3.0))
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)
        self.shift = nn.Parameter(torch.randn(6, width) / width**0.5)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, open_, down, up, last = (condition.unflatten(-1, (6, -1)) + self.shift).unsqueeze(1).unbind(2)
        h = self.norm(x) * (1 + scale) + shift
        q, k, v = self.qkv(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = F.normalize(q, dim=-1) * self.heat, F.normalize(k, dim=-1)
        heard = F.scaled_dot_product_attention(q, k, v, scale=1.0).transpose(1, 2).flatten(2)
        x = x + open_ * self.out(heard * self.gate(h).sigmoid())
        wide, way = self.wide(self.again(x) * (1 + up) + down).chunk(2, -1)
        return x + last * self.narrow(F.silu(wide) * way)


class GarmentDiT(ModelMixin, ConfigMixin):
    """sample [n, 4, 14, 14], timestep [n] up to 1000 and label [n] up to 10, which is none, to the flow [n, 4, 14, 14]."""

    @register_to_config
    def __init__(self, width: int = 96, depth: int = 6, heads: int = 4, labels: int = 10, sample_size: int = 14) -> None:
        super().__init__()
        side = sample_size // 2
        self.patch, self.place = nn.Conv2d(4, width, 2, 2), nn.Parameter(torch.randn(1, side * side, width) * 0.02)
        self.label = nn.Embedding(labels + 1, width)
        self.time = nn.Sequential(nn.Linear(32, width), nn.SiLU(), nn.Linear(width, width))
        self.condition = nn.Linear(width, 6 * width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 16)
        nn.init.zeros_(self.head.weight)

    def forward(self, sample: Tensor, timestep: Tensor, label: Tensor) -> Tensor:
        waves = timestep[:, None] * torch.exp(torch.linspace(-7, 0, 16, device=sample.device))
        condition = self.condition(F.silu(self.time(torch.cat([waves.sin(), waves.cos()], -1)) + self.label(label)))
        x = self.patch(sample)
        side = x.shape[-1]
        x = x.flatten(2).transpose(1, 2) + self.place
        for block in self.blocks:
            x = block(x, condition)
        x = self.head(self.norm(x)).unflatten(1, (-1, side)).unflatten(-1, (4, 2, 2))
        return x.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


class Garments(DiffusionPipeline):
    """Pictures [n, 1, 28, 28] in [0, 1] of labels, with guidance. It knows of one process only."""

    def __init__(self, transformer: nn.Module, scheduler: object) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)

    @torch.no_grad()
    def __call__(self, labels: Tensor, steps: int = 20, guidance: float = 2.5, seed: int = 0) -> Tensor:
        self.scheduler.set_timesteps(steps)
        both = torch.cat([labels, torch.full_like(labels, self.transformer.config.labels)])
        x = torch.randn(len(labels), 4, 14, 14, generator=torch.Generator().manual_seed(seed))
        for time in self.scheduler.timesteps:
            given, free = self.transformer(torch.cat([x, x]), time.expand(len(both)), both).chunk(2)
            x = self.scheduler.step(free + guidance * (given - free), time, x).prev_sample
        return (F.pixel_shuffle(x, 2).clamp(-1, 1) + 1) / 2
