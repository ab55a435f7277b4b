"""The first batch against the traced graph, before anything is made or written for training: by shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ..capture.fake_tensors import quiet
from ..errors import SpecError, TrainError
from ..ir.pytree import map_leaves
from ..ir.traced_module import TracedModule
from ..rewriter.probe import empty, swapped
from ..torch_internals.fakes import FakeTensorMode
from .data.seeding import random_state_kept
from .diagnosis import given_to, misfit
from .random_draws import Draws
from .splitting import called
from .tasks.calling import inputs_of
from .tasks.task import Task


def check_fits(module: TracedModule, task: Task, batch: Mapping[str, Any], draws: Draws, accelerator: Accelerator) -> None:
    """Raises TrainError where the graph does not hold for what the task calls the module with for this batch.

    The task's loss runs as far as that call; the graph runs on fake tensors, so nothing is computed or changed. What that
    cannot tell (a graph that reads values, an operation without a fake form, a task that fails) is left to the first step.
    """
    if any(n.op == "call_method" and n.target in ("item", "tolist") for graph in module.graphs.values() for n in graph.nodes):
        return
    try:
        with random_state_kept():
            args, kwargs = called(task, batch, draws, accelerator)
    except SpecError as error:
        if error.path == ("train", "task"):  # a loss that does not call the module, perhaps this once
            return
        raise
    except Exception:  # the task's own, which the first step tells with its traceback
        return
    given, inputs = given_to(module, args, kwargs), inputs_of(module)
    traced = {name: one for name, one in inputs.items() if one.shape is not None and isinstance(given.get(name), Tensor)}
    if all(one.shape == tuple(given[name].shape) and one.dtype == given[name].dtype for name, one in traced.items()):
        return
    failure = _failure(module, args, kwargs, accelerator)
    if failure is None:
        return
    for name, one in traced.items():
        given[name] = torch.empty(one.shape or (), dtype=one.dtype, device=given[name].device)
    if _failure(module, (), given, accelerator) is None:  # else it is nothing about the batch
        raise TrainError(misfit(failure, module, batch, (args, kwargs))) from failure


def _failure(module: TracedModule, args: Any, kwargs: Any, accelerator: Accelerator) -> Exception | None:
    """What a call of the module raises, on fake tensors of the same geometry."""
    with FakeTensorMode(allow_non_fake_inputs=True), swapped(module, empty), accelerator.autocast(), quiet():
        args, kwargs = map_leaves((args, kwargs), lambda t, _: empty(t) if isinstance(t, Tensor) else t)
        try:
            module(*args, **kwargs)
        except Exception as error:  # of any operation of the model's
            return error
    return None
