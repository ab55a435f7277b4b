"""A fixed sample of random models and passes; `python tests/fuzz.py models` and `passes` judge any number of them."""

from __future__ import annotations

import fuzz_models
import torch

# the first calls, then what a hostile line may read: memory, gradients, autocast, surroundings
FEW = [
    w for w in fuzz_models.WAYS
    if w.name in ("as traced", "no_grad", "train", "inference", "batch 3", "taller", "channels last", "autocast", "environment")
]  # fmt: skip
torch.set_num_threads(1)
