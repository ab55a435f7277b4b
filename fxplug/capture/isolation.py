"""Tracing leaves model, modes and random states as they were: what a run changes in them is put back."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import TraceError
from ..ir.ops import CASTING
from ..torch_internals.modes import set_grad_enabled
from .module_state import State
from .one_at_a_time import undone


def _set_autocast(kind: str, enabled: bool, dtype: torch.dtype) -> None:
    torch.set_autocast_enabled(kind, enabled)
    torch.set_autocast_dtype(kind, dtype)


# modes of torch that code in forward can switch: name, how to read one, how to set it
SETTINGS: tuple[tuple[str, Callable[[], Any], Callable[[Any], Any]], ...] = (
    ("gradients", torch.is_grad_enabled, set_grad_enabled),
    ("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("autocast's cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    *(
        (
            f"autocast on {kind}",
            lambda kind=kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
            lambda value, kind=kind: _set_autocast(kind, *value),
        )
        for kind in CASTING
    ),
)


@contextlib.contextmanager
def restored(state: State) -> Iterator[None]:
    """Give back what a run of `forward` changes in what was noted in `state`, random generators, and modes of torch.

    No cache of a function may keep a fake tensor. The values of tensors are given back where they are written: see `Journal`.
    """
    settings, draws = process_settings(), random_state()
    for cache in state.caches:
        cache.cache_clear()
    try:
        yield
    finally:
        for cache in state.caches:
            cache.cache_clear()
        state.restore()
        state.restore_tensors()
        set_random_state(draws)
        set_process_settings(settings)


def process_settings() -> list[Any]:
    """The values of SETTINGS."""
    return [read() for _, read, _ in SETTINGS]


def set_process_settings(values: list[Any]) -> None:
    """Put the settings back to what `process_settings` found."""
    for (_, read, write), value in zip(SETTINGS, values, strict=True):
        if read() != value:
            write(value)


def random_state() -> tuple[Any, ...]:
    """Where the generators of Python, numpy and torch (CPU, and CUDA where it runs) stand."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def same_random_state(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether two of what `random_state` gives are the same."""
    tensors = zip([a[2], *a[3]], [b[2], *b[3]], strict=False)
    return a[0] == b[0] and _same_numpy(a[1], b[1]) and all(torch.equal(x, y) for x, y in tensors)


def _same_numpy(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def set_random_state(state: tuple[Any, ...]) -> None:
    """Put the generators where `random_state` found them."""
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    if state[3]:
        torch.cuda.set_rng_state_all(state[3])


@contextlib.contextmanager
def same_random(model: nn.Module) -> Iterator[None]:
    """Refuse a model that draws from Python's or numpy's generator: the graph would repeat that one draw forever."""
    random.seed("fxplug")  # a state that no other run has left
    np.random.seed(7919)
    before, numpy_before = random.getstate(), np.random.get_state()
    yield
    drew = "random" if random.getstate() != before else ""
    if not _same_numpy(np.random.get_state(), numpy_before):
        drew = "numpy.random"
    if drew:
        raise TraceError(
            f"{type(model).__name__} draws from Python's '{drew}' in {'training' if model.training else 'evaluation'}, and "
            "its graph would repeat that one draw; keep the module that does so whole: leaf: [its path]"
        )


@contextlib.contextmanager
def mode_reads() -> Iterator[list[bool]]:
    """Yields a list that gets a member when a module asks in this thread whether it is in training."""
    reads: list[bool] = []
    thread = threading.get_ident()

    def read(module: nn.Module) -> bool:
        if threading.get_ident() == thread:
            reads.append(True)
        return bool(module.__dict__.get("training", True))

    def write(module: nn.Module, value: bool) -> None:
        module.__dict__["training"] = value

    with undone() as stack:
        stack.callback(delattr, nn.Module, "training")
        nn.Module.training = property(read, write)  # type: ignore[assignment]
        yield reads
