"""What stands beside the UNet: the meaning of a caption, the space it works in, and a classifier that judges its samples."""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn

WORDS, WIDTH = 2, 64


def meaning(captions: list[str]) -> Tensor:
    """Captions as float32 [n, WORDS, WIDTH]: for each word a fixed random vector of its letters, as fastText adds n-grams up
    (arXiv 1607.04606). A class that nobody trained has one too; no words are zeros, which is what guidance compares with."""
    return torch.stack([_caption(caption) for caption in captions])


@lru_cache
def _caption(text: str) -> Tensor:
    words = re.findall(r"[a-z0-9]+", text.lower())[:WORDS]
    found = torch.zeros(WORDS, WIDTH)
    for row, word in enumerate(words):
        marked = f"<{word}>"
        grams = [marked, *(marked[i : i + 3] for i in range(len(marked) - 2))]
        vector = torch.stack([_random(gram) for gram in grams]).sum(0)
        found[row] = vector / vector.std()
    return found


def _random(text: str) -> Tensor:
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))


class SpaceToDepth(ModelMixin, ConfigMixin):
    """A VAE without weights: [n, c, 2h, 2w] to [n, 4c, h, w] and back. A quarter of the pixels is a third of the work."""

    @register_to_config
    def __init__(self, in_channels: int = 1) -> None:
        super().__init__()
        self.register_buffer("place", torch.zeros(()), persistent=False)  # `pipe.to` asks each model for a dtype and device

    def encode(self, image: Tensor) -> Tensor:
        return F.pixel_unshuffle(image, 2)

    def decode(self, latents: Tensor) -> Tensor:
        return F.pixel_shuffle(latents, 2)


class Classifier(nn.Sequential):
    """Garments [n, 1, 28, 28] in [-1, 1] to ten logits."""

    def __init__(self) -> None:
        super().__init__(
            nn.PixelUnshuffle(2), *_layer(4, 64), nn.MaxPool2d(2), *_layer(64, 128), *_layer(128, 128), nn.MaxPool2d(2),
            nn.Flatten(), nn.Dropout(0.3), nn.Linear(128 * 9, 10),
        )  # fmt: skip


def _layer(before: int, after: int) -> list[nn.Module]:
    return [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
