"""The module of a run on its device, with the weights of some blocks on the host: `train.blocks_to_swap`."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from ..core.errors import MatchError, SpecError
from ..core.ir.traced_module import TracedModule
from ..core.ir.variants import Variants
from ..lowerings.regions.swapping import BlockSwap, plan_swap
from .outlined_forms import OutlinedForms
from .train_section import Train

KEY = "blocks_to_swap"


def move_module(module: nn.Module, place: torch.device) -> None:
    """Move a module to a device, unless it is there: torch refuses for packed weights that compiled code looks at."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    if any((t.device.type, t.device.index or 0) != (place.type, place.index or 0) for t in tensors):
        module.to(place)


def place_module(module: TracedModule, settings: Train, accelerator: Accelerator, notes: list[str]) -> BlockSwap | None:
    """Move a module to the device of a run; with `blocks_to_swap` the frozen weights of its repeated regions stay on the host.

    Returns what fetches them, None without, and adds to `notes` what is to be said of it. Raises SpecError for settings that
    exclude it, and for a model that has fewer regions.
    """
    if not settings.blocks_to_swap:
        move_module(module, accelerator.device)
        return None
    for key in ("compile", "shard", "parallel"):
        if getattr(settings, key):
            raise SpecError(f"and '{key}' cannot be used together: leave one of them out", path=("train", KEY))
    if accelerator.num_processes > 1:
        raise SpecError(f"is for one process, and {accelerator.num_processes} were started", path=("train", KEY))
    again = settings.checkpointing
    patterns = None if isinstance(again, bool) else again
    try:
        swap = plan_swap(module, settings.blocks_to_swap, accelerator.device, patterns, checkpoint=bool(again))
    except MatchError as error:
        none = "needs repeated regions, and the model has none"
        raise SpecError(f"takes the regions of 'checkpointing': {error}" if patterns else none, path=("train", KEY)) from error
    except SpecError as error:
        raise SpecError(error.finding, path=error.path or ("train", KEY)) from error
    swap.place(module)
    notes.append(describe_swap(swap))
    return swap


def outline_swapped(module: TracedModule, swap: BlockSwap, *, checkpoint: bool = False) -> nn.Module:
    """Return a module on the weights of a swap that fetches them; of one with several forms of call for each of these."""
    cut = partial(swap.outline, checkpoint=checkpoint)
    return OutlinedForms(module, cut) if isinstance(module, Variants) else cut(module)


def swap_outside_steps(module: TracedModule, task: Any, swap: BlockSwap | None) -> Any:
    """Return the module for tests and pictures, which fetches the weights of a swap, if there is one.

    The model without what trains, which a task keeps for `preserve`, fetches them too.
    """
    if swap is None:
        return module
    if isinstance(task.untrained, Mapping):
        task.untrained = {name: outline_swapped(one, swap) for name, one in task.untrained.items()}
    elif task.untrained is not None:
        task.untrained = outline_swapped(task.untrained, swap)
    return outline_swapped(module, swap)


@contextlib.contextmanager
def end_swap(swap: BlockSwap | None) -> Iterator[None]:
    """Leave the weights of a swap on the host at the end of the context, however that ends."""
    try:
        yield
    finally:
        if swap is not None:
            swap.release()


def describe_swap(swap: BlockSwap) -> str:
    """Say how much of the weights is where, for the notes of a run."""
    sizes = sorted(swap.bytes_of_blocks)
    text = f"blocks_to_swap: frozen weights of {len(sizes)} regions, {_size(sum(sizes))}, are on the host, and at any time "
    text += f"those of at most {swap.limit}, {_size(sum(sizes[-swap.limit :]))}, on {swap.device}"
    if swap.device.type == "cpu":
        text += ", which is the host itself: this saves nothing, and shows what a GPU does"
    return text


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
