"""Adapters of random weights for a model: LoRA in kohya's layout and LoHa in LyCORIS', of several ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

KINDS, RANKS = ("lora", "lora", "loha"), (2, 4, 8)


def make_adapter(model: nn.Module, seed: int, kind: str, rank: int, size: float = 0.3) -> dict[str, Tensor]:
    """Make one for a UNet's linear layers and convolutions; even seeds for those of attention alone."""
    draw, made = torch.Generator().manual_seed(seed), {}

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    for name, layer in model.named_modules():
        if not isinstance(layer, (nn.Linear, nn.Conv2d)) or (seed % 2 == 0 and "attn" not in name):
            continue
        weight, key = layer.weight, f"{'lycoris' if kind == 'loha' else 'lora_unet'}_{name.replace('.', '_')}"
        wide = weight[0].numel()
        if kind == "loha":
            for part in ("w1", "w2"):
                made[f"{key}.hada_{part}_a"] = noise(len(weight), rank) * size
                made[f"{key}.hada_{part}_b"] = noise(rank, wide) * size / wide**0.25
        else:
            made[f"{key}.lora_down.weight"] = noise(rank, *weight.shape[1:]) / wide**0.5
            made[f"{key}.lora_up.weight"] = noise(len(weight), rank, *[1] * (weight.dim() - 2)) * size / rank
        made[f"{key}.alpha"] = torch.tensor(float(rank))
    return {name: value.half() for name, value in made.items()}


def write_adapters(
    folder: Path, model: nn.Module, count: int, most: int = 8, kinds: Sequence[str] = KINDS, size: float = 0.3
) -> list[str]:
    """Write so many files, of mixed kinds and ranks up to `most`; their names."""
    draw, names = random.Random(0), []
    for n in range(count):
        kind = kinds[n % len(kinds)]
        rank = 2 if kind == "loha" else draw.choice([rank for rank in RANKS if rank <= most])  # a LoHa has its rank's square
        names.append(f"style{n:04}")
        save_file(make_adapter(model, n, kind, rank, size), folder / f"{names[-1]}.safetensors")
    return names
