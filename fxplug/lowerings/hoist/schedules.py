"""The times of a pipeline's run as its denoiser gets them, read off the scheduler of the pipeline that calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.clock import find_scheduler
from ...core.ir.containers import list_leaves
from .sameness import has_same_bits

Times = tuple[dict[str, float], ...]  # of each step, by the names of inputs
TRAINED = 1000  # steps of a schedule that says no other number


class RunSchedule:
    """The schedule of one run of a pipeline, as far as its denoiser has been called in it.

    Which form of the scheduler's times a model gets (a share of the schedule, the rest of one, another dtype) is seen by the
    bits of one of them. A wrong one costs time and changes no result: what was computed for it is never asked for.
    """

    def __init__(self) -> None:
        self.timesteps: Any = None  # the scheduler's, another tensor in each run
        self.visits = 0
        self.is_over = False  # whether nothing is computed early any more, as it does not pay

    def find_times(self, given: Mapping[str, Any], most: int, visits: int) -> Times:
        """Find the times from that of a call on, in the run that it is in.

        Args:
            given: The inputs of the call that say its time.
            most: So many at most.
            visits: For so many sets of conditions at most, as those may change at every step.

        Returns:
            The times of each input; none without a pipeline, or where its times are not the scheduler's.
        """
        scheduler = find_scheduler()
        timesteps = getattr(scheduler, "timesteps", None)
        if timesteps is not self.timesteps:
            self.timesteps, self.visits, self.is_over = timesteps, 0, False
        self.visits += 1
        if timesteps is None or self.is_over or self.visits > visits:
            return ()
        rows = {name: find_row(scheduler, value) for name, value in given.items()}
        if not all(rows.values()):
            return ()
        return tuple(dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=False))[:most]


def find_row(scheduler: Any, value: Any) -> list[float]:
    """Find the times from that of an input on, in the form that the input has; none where no form has it."""
    leaves = list_leaves(value)
    tensors = [leaf.flatten() for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel()]
    if len(tensors) == len(leaves) > 0:
        now = tensors[0][:1].cpu()
        if any(t.dtype != now.dtype for t in tensors) or not has_same_bits((t.cpu(), now.expand(len(t))) for t in tensors):
            return []
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        now = torch.tensor([value], dtype=torch.int64 if isinstance(value, int) else torch.float64)
    else:
        return []
    for row in list_forms(scheduler, now.dtype):
        for at in (row == now).nonzero().flatten().tolist():
            if has_same_bits([(row[at : at + 1], now)]):
                return row[at:].tolist()
    return []


def list_forms(scheduler: Any, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield the times of a scheduler in the forms in which pipelines give them to a model, the nearest first."""
    try:
        times = torch.as_tensor(scheduler.timesteps).detach().flatten().cpu()
    except (TypeError, ValueError, RuntimeError):  # of a scheduler of somebody's own
        return
    sigmas, config = getattr(scheduler, "sigmas", None), getattr(scheduler, "config", None)
    trained = getattr(config, "num_train_timesteps", None)
    whole = trained if isinstance(trained, (int, float)) and trained > 0 else TRAINED
    noise = [sigmas.detach().flatten()[: len(times)].cpu()] if isinstance(sigmas, Tensor) else []
    for row in (times, *noise):
        for kind in dict.fromkeys((dtype, row.dtype, torch.float64)):
            x = row.to(kind)
            for form in (x, x / whole, (whole - x) / whole, 1 - x / whole, x * (1 / whole), 1 - x):
                yield form.to(dtype)
