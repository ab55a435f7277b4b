"""The way in: a traced denoiser made one that runs in stages on patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import SpecError
from ..module import TracedModule
from ..selfcheck import has_values
from .collectives import whole_number
from .links import links_of
from .mesh import ways_of
from .overlap import Overlapping
from .patches import Patcher
from .pipeline import PipeFusion, Steps
from .plan import parallel_plan, place
from .stages import staged


def pipefusion(
    gm: TracedModule,
    args: Sequence[Any] | Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    stages: int = 1,
    patches: int,
    warmup: int = 1,
    correct: int = 0,
    steps: Steps = None,
    batch: int = 1,
    overlap: bool = True,
    clock: str | None = "timestep",
    split: Mapping[str, int] | None = None,
    mesh: DeviceMesh | None = None,
    check: bool = True,
) -> PipeFusion:
    """A denoiser in stages on patches of its tokens (PipeFusion; Fang et al. 2024, arXiv 2405.14430).

    `args` and `kwargs` are example inputs; where tokens are born and meet is found as for `parallel_plan`, and the graph is
    cut where little goes from stage to stage, into stages of about equal work. `warmup` steps at the beginning of an image and
    `correct` at its end run in one piece; the latter needs `steps`, the number of steps of an image or a function that tells
    it. `batch` splits samples, guidance included, over processes. `clock` names the input that says where in a run a call is.

    With torch.distributed each process is one stage for its part of the batch, and `mesh` may say which, with the axes "batch"
    and "stages"; without it one process runs all. A model with values is run once in one
    piece and once patch by patch on the same inputs, which must agree.

    Over processes with `overlap` a step does not wait for the last patch: a call gives tensors that come later, what the
    pipeline does with them elementwise (guidance, a scheduler's step) is done patch by patch, and where something else needs
    all of one it waits, as the decoder does at the end; between two calls that is an error that names the operation.

    Raises SpecError for numbers that are none or too many, and where tokens or stages cannot be split, with what stands in the
    way; VerifyError for patches that do not give what the model gives.
    """
    for name, number in (("stages", stages), ("patches", patches), ("warmup", warmup)):
        whole_number(name, number, 1)
    whole_number("correct", correct)
    if correct and steps is None:
        raise SpecError(f"correct={correct} needs the number of steps of an image: give steps=..., or a function that tells it")
    plan = parallel_plan(gm, args, kwargs, ulysses=max(2, patches), batch=batch, split=split, check=False)
    patcher = Patcher(plan.stages[-1].found)
    patcher.run()
    kind = Overlapping if overlap else PipeFusion
    found = kind(gm, staged(patcher, plan.written, stages), patches, warmup, correct, steps, clock)
    if check and has_values(list(gm.state_dict().values()), plan.example):
        found.check(*plan.example)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        links, world = links_of(stages, ways_of({"batch": batch}), mesh)
        place(plan.written, world)
        found = found.again(links=links)
    return found
