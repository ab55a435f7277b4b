"""Random numbers of a test, which are a sample's own."""

from __future__ import annotations

import torch
from torch import Tensor

from .model_call import get_images
from .task import Batch


class FixedDraws:
    """Draws that depend on the sample alone, by its place in the data: the same in every batch and process."""

    def __init__(self, batch: Batch, device: torch.device) -> None:
        places = batch["index"].tolist() if "index" in batch else range(len(get_images(batch)))
        self.generators = [torch.Generator().manual_seed(int(place)) for place in places]
        self.device = device

    def like(self, x: Tensor) -> Tensor:
        """Draw standard normal numbers of the shape, dtype and device of `x`."""
        return torch.stack([torch.randn(x.shape[1:], generator=g) for g in self.generators]).to(x)

    def uniform(self, *shape: int) -> Tensor:
        """Draw numbers of this shape, at least 0 and below 1."""
        return torch.stack([torch.rand(shape[1:], generator=g) for g in self.generators]).to(self.device)
