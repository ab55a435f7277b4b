"""What a run of a model sees in the place of torch's own: calls, modes and `math` that report to its recording."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils import checkpoint

from ..ir import functions
from ..torch_internals.names import CHECKPOINTS
from . import grad_modes, torch_modes
from .edges import Regions
from .module_state import MISSING
from .numbers import recorded_math
from .one_at_a_time import calls
from .recorder import Recording


@contextlib.contextmanager
def patched(recording: Recording, regions: Regions, training: bool | None) -> Iterator[None]:
    """For the time of one run: module calls, `module.training`, autocast, gradient modes and `math` report to it."""

    def read_training(module: nn.Module) -> bool:
        own = bool(module.__dict__.get("training", True))
        if threading.get_ident() != recording.thread:
            return own
        if recording.paused and recording.fake and type(module).__module__.startswith("torch."):
            return False  # shapes are the same, and no statistics are asked of fake tensors
        if not recording.paused:
            recording.reads_training = True
        return own if training is None else training

    def write_training(module: nn.Module, value: bool) -> None:
        module.__dict__["training"] = value

    apply = vars(torch.autograd.Function)["apply"]
    patches = [
        *grad_modes.patches(recording),
        *torch_modes.patches(recording),
        (torch.autograd.Function, "apply", recording.function_apply(apply)),
        *((checkpoint, name, recording.checkpoint(vars(checkpoint)[name])) for name in CHECKPOINTS if name in vars(checkpoint)),
        (type(nn.Parameter), "__instancecheck__", recording.instance_check(type(nn.Parameter).__instancecheck__)),
        *((torch, name, recording.from_numpy(getattr(torch, name))) for name in ("from_numpy", "frombuffer")),
        *((math, name, recorded_math(name)) for name in functions.MATH),
        (nn.Module, "training", property(read_training, write_training)),
    ]
    before = []
    try:
        for owner, name, value in patches:
            before.append((owner, name, vars(owner).get(name, MISSING)))
            setattr(owner, name, value)
        with calls(regions.call):
            yield
    finally:
        for owner, name, value in reversed(before):
            if value is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
