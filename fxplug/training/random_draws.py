"""Random numbers of a step, the same on any number of processes and after a resume; and the global generators, lent out."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.capture.isolation import get_random_state, set_random_state


class Draws:
    """Random numbers that depend on the seed, the step and the order of the draws alone.

    Each draw is made for all samples of the step, on the CPU, and gives the rows of this process's batch: of micro batch
    `micro` of `micros`, process `rank` of `world` has `b` rows, where `b`, the first size of every shape, is the batch of this
    process. So the same samples get the same numbers, however the step is divided; `drawn` are what the micro batches of a
    step have in common.
    """

    def __init__(
        self,
        seed: int,
        step: int,
        micro: int = 0,
        micros: int = 1,
        *,
        rank: int = 0,
        world: int = 1,
        device: torch.device | str = "cpu",
        drawn: Drawn | None = None,
    ) -> None:
        self.seed, self.rank, self.world, self.device = seed, rank, world, torch.device(device)
        self.micro, self.micros, self._count = micro, micros, 0
        self._drawn = drawn or Drawn(seed, step)

    def normal(self, *shape: int) -> Tensor:
        """Draw standard normal float32 numbers of this shape."""
        return self._rows("normal", torch.randn, shape)

    def uniform(self, *shape: int) -> Tensor:
        """Draw float32 numbers of this shape, at least 0 and below 1."""
        return self._rows("uniform", torch.rand, shape)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Draw int64 numbers of this shape, at least 0 and below `high`."""
        return self._rows(f"integers below {high}", functools.partial(torch.randint, high), shape)

    def like(self, x: Tensor) -> Tensor:
        """Draw standard normal numbers of the shape, dtype and device of `x`."""
        return self.normal(*x.shape).to(x)

    def once(self) -> torch.Generator:
        """Return a CPU generator for numbers drawn once a batch; it is equal on all processes."""
        return self._drawn.generator

    def _rows(self, kind: str, draw: Callable[..., Tensor], shape: tuple[int, ...]) -> Tensor:
        rows = shape[0] * self.world
        key = (self._count, kind, shape)
        self._count += 1
        if key not in self._drawn.values:
            self._drawn.values[key] = draw((rows * self.micros, *shape[1:]), generator=self._drawn.generator)
        start = self.micro * rows + self.rank * shape[0]
        return self._drawn.values[key][start : start + shape[0]].to(self.device)


class Drawn:
    """What is drawn in a step: a generator, and the numbers for all samples of the step so far."""

    def __init__(self, seed: int, step: int) -> None:
        self.generator = torch.Generator().manual_seed(mix(seed, step, 0))
        self.values: dict[Any, Tensor] = {}


class RunDraws:
    """The random numbers of a run: the `Draws` of each step and micro batch, in a process that has part `rank` of `world`."""

    def __init__(self, seed: int, *, rank: int = 0, world: int = 1, device: torch.device | str = "cpu") -> None:
        self.seed, self.where = seed, {"rank": rank, "world": world, "device": device}
        self._drawn = Drawn(seed, 0)  # of the step at hand

    def of(self, step: int, micro: int = 0, micros: int = 1) -> Draws:
        """Begin the draws of a micro batch; those of one step are asked for in their order."""
        if micro == 0:
            self._drawn = Drawn(self.seed, step)
        where: dict[str, Any] = self.where
        return Draws(self.seed, step, micro, micros, **where, drawn=self._drawn)


def mix(*numbers: int) -> int:
    """Mix several numbers into one 63-bit seed, so that those of neighbouring steps are unrelated (splitmix64, Steele 2014)."""
    mixed = 0
    for number in numbers:
        mixed = (mixed ^ number) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 31
    return mixed >> 1


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the global generators after the context, inside which code may draw and seed.

    It costs 0.1 ms, most of it numpy's: use it once a batch, with `seed_all` for each sample, not once a sample.
    """
    states = get_random_state()
    try:
        yield
    finally:
        set_random_state(states)


def make_random_state(stood: tuple[Any, ...] | None = None) -> dict[str, Any]:
    """Return the states of the global generators of the CPU and of this process's GPU, or `stood`, as plain values and
    tensors."""
    (version, numbers, gauss), (kind, keys, *rest), cpu, devices = stood or get_random_state()
    device = {"cuda": devices[torch.cuda.current_device()]} if devices else {}
    numpys = [kind, torch.from_numpy(keys.astype(np.int64)), *rest]
    return {"python": [version, list(numbers), gauss], "numpy": numpys, "torch": cpu, **device}


def read_random_state(state: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the states of a `make_random_state` as `get_random_state` has them, those of GPUs left out."""
    (version, numbers, gauss), (kind, keys, *rest) = state["python"], state["numpy"]
    return (version, tuple(numbers), gauss), (kind, keys.numpy().astype(np.uint32), *rest), state["torch"], []


def load_random_state(state: Mapping[str, Any]) -> None:
    """Set the generators to the states of a `make_random_state`."""
    set_random_state(read_random_state(state))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_all(seed: int) -> None:
    """Seed the three generators. torch.manual_seed would seed devices too, and takes twenty times as long."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


@contextmanager
def seed_within(seed: int) -> Iterator[None]:
    """Seed every generator of this process inside the context, and restore them after it."""
    with preserve_random_state():
        torch.manual_seed(seed)
        seed_all(seed)
        yield
