"""What a denoiser is told of the time in the steps of a run: which arguments say it, and the line over the scheduler's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.torch_internals import trees as pytree
from .recorded_run import RecordedStep, refuse


def group_by_value(names: list[str], steps: list[RecordedStep]) -> list[tuple[str, ...]]:
    """Group arguments of the denoiser that have the same numbers in each step.

    Args:
        names: Their names.
        steps: Steps that end with a call of the denoiser.

    Returns:
        The groups of names, in the order of the first of each.
    """
    groups: dict[tuple[float, ...], list[str]] = {}
    for name in names:
        values = [set(list_numbers(step.calls[-1][1][name])) for step in steps]
        key = tuple(value for each in values for value in sorted(each))
        groups.setdefault(key, []).append(name)
    return [tuple(group) for group in groups.values()]


def list_numbers(value: Any) -> list[float]:
    """Return all numbers in a structure."""
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, (Tensor, float, int))]
    return [number for leaf in leaves for number in torch.as_tensor(leaf).flatten().double().tolist()]


def fit_time_line(pipe: Any, part: str, name: str, steps: list[RecordedStep]) -> tuple[float, float]:
    """Fit the line of the denoiser's time over the scheduler's.

    Args:
        pipe: The pipeline.
        part: The denoiser.
        name: Its argument for the time.
        steps: Steps that end with a call of it.

    Returns:
        Slope and offset, rounded to what the pipeline computes.

    Raises:
        SpecError: An argument has several times, or is no such line.
    """
    values, times = [], []
    for step in steps:
        numbers = list_numbers(step.calls[-1][1][name])
        if len(set(numbers)) != 1:
            raise refuse(pipe, "time", f"{name} of {part} has several in a call: frames, or parts, have times of their own")
        values.append(numbers[0])
        times.append(float(torch.as_tensor(step.time).flatten()[0]))
    if times[0] == times[-1]:
        raise refuse(pipe, "time", "the scheduler's does not change from step to step")
    slope = (values[0] - values[-1]) / (times[0] - times[-1])
    offset = values[0] - slope * times[0]
    largest = max(map(abs, values))

    def off(slope: float, offset: float) -> float:
        return max(abs(v - slope * t - offset) for v, t in zip(values, times, strict=True))

    if off(slope, offset) > 1e-3 * max(1e-6, largest):
        raise refuse(pipe, "time", f"{name} of {part} is not a linear function of the scheduler's time")
    for digits in range(1, 7):  # what the pipeline computes is a round number, of which the scheduler's rounding is left
        plain = float(f"{slope:.{digits}g}"), round(offset, digits) + 0.0
        if off(*plain) <= max(1e-6 * largest, 2 * off(slope, offset)):
            return plain
    return slope, offset
