"""What is checked before adapters train together: their samples make one batch, and the base takes them one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.capture.isolation import get_random_state, is_same_random_state, set_random_state
from ..core.errors import TrainError
from ..core.torch_internals.modules import tree_leaves
from .adapter_modules import SampleRows
from .shared_pass import SharedCall, SharedPass, group_calls

if TYPE_CHECKING:
    from .trainer import Trainer

NOISE = 0.1  # the deviation of what is added to blocks for a moment: new ones change nothing, and a mistake would not show
SAMPLES = 2  # of each adapter that are tried: a batch norm takes no single value, and more would cost as much as a step
FAR = {torch.float64: 1e-6, torch.float32: 1e-3}  # of the largest number of a result; in other dtypes 5e-2


def check_alike(calls: Sequence[tuple[int, SharedCall]], names: Sequence[str]) -> None:
    """Raise TrainError, with what differs, for calls of the module that cannot be put into one batch."""
    groups = group_calls(calls)
    if len(groups) == 1:
        return
    (one, first), (two, second) = groups[0][0], groups[1][0]
    pairs = zip(first.leaves, second.leaves, strict=False)
    differing = [pair for pair in pairs if _describe(*pair[:1]) != _describe(*pair[1:])] or [(first.spec, second.spec)]
    raise TrainError(
        f"the samples of '{names[one]}' and '{names[two]}' cannot be put into one batch: the module is called with "
        f"{_describe(differing[0][0])} for the one and with {_describe(differing[0][1])} for the other; give both data one "
        "'size', or set train.in_turn: true"
    )


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a sample of {list(value.shape[1:])} {str(value.dtype).removeprefix('torch.')}"
    return repr(value)[:80]


def check_by_sample(
    shared: SharedPass, rows: SampleRows, calls: Sequence[tuple[int, SharedCall, Trainer]], names: Sequence[str]
) -> None:
    """Raise TrainError for a base that draws random numbers, or in which samples meet, by trying: two adapters together must be
    each alone. Blocks get some noise meanwhile."""
    chosen = [calls[0], *calls[-1:]] if len(calls) > 1 else calls[:1]
    if len(chosen) == 2 and chosen[0][1].describe() != chosen[1][1].describe():
        chosen = chosen[:1]
    before = [drawing.random for drawing in rows.drawings]
    with _noisy([trainer for *_, trainer in chosen]):
        stood = get_random_state()
        together = _try_pass(shared, rows, [(index, call) for index, call, _ in chosen])
        drawn = not is_same_random_state(stood, get_random_state())
        set_random_state(stood)
        if not drawn and len(chosen) > 1:
            for (index, call, _), found in zip(chosen, together, strict=True):
                rows.drawings[index].random = before[index]
                (alone,) = _try_pass(shared, rows, [(index, call)])
                if (far := _distance(found, alone)) is not None:
                    raise TrainError(
                        f"the model's results for the samples of '{names[index]}' change where those of another "
                        f"adapter are in the batch (by {far:.1g} of the largest): it mixes samples, as a batch norm does in "
                        "training. Set train.mode: eval, or train.in_turn: true"
                    )
    for drawing, state in zip(rows.drawings, before, strict=True):
        drawing.random = state
    if drawn:
        raise TrainError(
            "the model itself draws random numbers, which all adapters would share: set train.mode: eval, in which only what "
            "you added is in training mode, or train.in_turn: true"
        )


def _try_pass(shared: SharedPass, rows: SampleRows, calls: list[tuple[int, SharedCall]]) -> list[Any]:
    tried = [(index, call.cut(SAMPLES)) for index, call in calls]
    shared.forward(tried)
    return [call.result for _, call in tried]


@contextmanager
def _noisy(trainers: Sequence[Trainer]) -> Iterator[None]:
    """Add noise to what trains inside the context."""
    generator = torch.Generator().manual_seed(0)
    held = [parameter for trainer in trainers for parameter in trainer.trained.values()]
    kept = [parameter.detach().clone() for parameter in held]
    try:
        with torch.no_grad():
            for parameter in held:
                parameter += NOISE * torch.randn(parameter.shape, generator=generator).to(parameter)
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(held, kept, strict=True):
                parameter.copy_(value)


def _distance(one: Any, two: Any) -> float | None:
    """Return how far results are from each other, as a share of the largest number, if it is more than rounding makes."""
    for a, b in zip(tree_leaves(one), tree_leaves(two), strict=True):
        if isinstance(a, Tensor) and a.is_floating_point() and a.shape == b.shape and a.numel():
            far = float((a - b).abs().max() / b.abs().max().clamp(min=torch.finfo(b.dtype).tiny))
            if far > FAR.get(a.dtype, 5e-2):
                return far
    return None
