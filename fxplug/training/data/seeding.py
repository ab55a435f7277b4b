"""The global random numbers of Python, numpy and torch: lent to one sample after the other, then put back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from ..draws import _mixed as mixed

__all__ = ["mixed", "random_state_kept", "seed_all"]


@contextmanager
def random_state_kept() -> Iterator[None]:
    """What happens inside may draw and seed; afterwards the generators stand where they stood. CPU only.

    It costs 0.1 ms, most of it numpy's: once a batch, with `seed_all` for each sample, not once a sample.
    """
    python, numbers, tensors = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
        torch.default_generator.set_state(tensors)


def seed_all(seed: int) -> None:
    """Seed the three generators. torch.manual_seed would seed devices too, and takes twenty times as long."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
