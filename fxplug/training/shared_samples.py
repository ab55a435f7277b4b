"""A run in which several processes share each sample: who gets which samples, and the plan for what the task calls."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ..core.errors import FxplugError, SpecError, TrainError
from ..core.ir.traced_module import TracedModule
from ..core.torch_internals.modules import tree_map
from ..parallel.plan import Plan, parallel_plan, parallelize
from ..parallel.planning.walk import bind, restore_state, walk
from ..parallel.runtime.mesh import AXES, fill_degrees
from .distributed import gather, set_mode
from .random_draws import Draws, preserve_random_state
from .tasks.task import Task
from .train_section import Train

PATH = ("train", "parallel")


def share(accelerator: Accelerator, settings: Train) -> tuple[int, int]:
    """Return the index of this process's part of the samples, and the number of parts: processes that share samples have one
    part. processes that share samples have one part.

    Raises SpecError for a number of processes that is no multiple of those that share a sample.
    """
    together, processes = _together(settings), accelerator.num_processes
    if processes % together:
        found = f"there {'is 1' if processes == 1 else f'are {processes}'}"
        raise SpecError(
            f"{together} processes share each sample, and {found}: start with torchrun --nproc-per-node {together}, or a "
            "multiple of it",
            path=PATH,
        )
    return accelerator.process_index // together, processes // together


def divide(
    module: TracedModule,
    settings: Train,
    task: Task,
    batch: Mapping[str, Any],
    accelerator: Accelerator,
    dtypes: Mapping[str, torch.dtype],
) -> TracedModule:
    """Return the module as parallelized over the processes of `settings.parallel`, on shared parameters; or `module` without
    any.

    The plan is made for the task's call of the module with this batch, the same in all processes that share samples; other
    batches may have other sizes. `dtypes` are those that parameters had in the trace, if they have others now. Raises SpecError
    if nothing can be split, TrainError if processes that share samples were given different ones.
    """
    together = _together(settings)
    if together == 1:
        return module
    rank, world = share(accelerator, settings)
    _check_equal_samples(accelerator, together, batch)
    set_mode(module, module, settings.mode)
    ways = _degrees(settings)
    draws = Draws(0, 0, rank=rank, world=world, device=accelerator.device)
    try:
        with preserve_random_state(), _as_traced(module, dtypes):
            args, kwargs = find_call(task, batch, draws, accelerator)
            if settings.precision != "fp32":  # what autocast would do
                args, kwargs = tree_map(lambda x: x.to(module.dtype) if _is_floating(x) else x, (args, kwargs))
            plan = parallel_plan(module, args, kwargs, ulysses=ways["ulysses"], ring=ways["ring"])
            _check_draws(module, plan, args, kwargs)
    except FxplugError as error:
        raise SpecError(getattr(error, "finding", str(error)), path=getattr(error, "path", ()) or PATH) from error
    names = ("data", *ways)
    mesh = init_device_mesh(accelerator.device.type, (world, *ways.values()), mesh_dim_names=names)
    return parallelize(module, plan, mesh)


class _Called(Exception):
    """What a module was called with."""


class _CallRecorder(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Called(args, kwargs)


def find_call(task: Task, batch: Mapping[str, Any], draws: Draws, accelerator: Accelerator) -> tuple[Any, Any]:
    """Return the arguments of the first call of the module in a task's loss of a batch."""
    with torch.no_grad(), accelerator.autocast():
        try:
            task.loss(_CallRecorder(), dict(batch), draws)
        except _Called as call:
            args, kwargs = call.args
            return args, kwargs
    raise SpecError(f"{type(task).__name__}.loss does not call the module", path=("train", "task"))


def _check_draws(gm: TracedModule, plan: Plan, args: Any, kwargs: Any) -> None:
    """Raise SpecError for an operation that draws random numbers, if the plan does not let the first process draw for all."""
    graph = gm.graphs.get(plan.mode) or gm.graph
    with restore_state(gm):
        drawn = walk(gm, graph, bind(gm, args, kwargs)).random
    known = {node.name for stage in plan.stages for node in stage.modes[plan.mode].walk.random}
    for node in graph.nodes:
        if node in drawn and node.name not in known:
            raise SpecError(
                f"'{node.name}' draws random numbers although the model is in evaluation, and processes that share a sample "
                "would draw different ones: set its dropout to 0, or mode: train"
            )


@contextmanager
def _as_traced(module: TracedModule, dtypes: Mapping[str, torch.dtype]) -> Iterator[None]:
    """Cast parameters back to their dtypes in the trace inside the context, where training has wider ones."""
    named = dict(module.named_parameters())
    wide = {name: named[name].data for name, dtype in dtypes.items() if named[name].dtype != dtype}
    for name, tensor in wide.items():
        named[name].data = tensor.to(dtypes[name])
    try:
        yield
    finally:
        for name, tensor in wide.items():
            named[name].data = tensor


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _degrees(settings: Train) -> dict[str, int]:
    given = settings.parallel
    return fill_degrees({axis: n for axis, n in given if axis in AXES} if given else {})


def _together(settings: Train) -> int:
    return math.prod(_degrees(settings).values())


def _check_equal_samples(accelerator: Accelerator, together: int, batch: Mapping[str, Any]) -> None:
    """Raise TrainError if processes that share samples have different ones."""
    digest = hashlib.sha256()
    for key, value in sorted(batch.items()):
        digest.update(f"{key} {value if not isinstance(value, Tensor) else tuple(value.shape)}".encode())
        if isinstance(value, Tensor):
            digest.update(value.cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes())
    found, mine = gather(accelerator, digest.hexdigest()), accelerator.process_index
    for other in range(mine // together * together, (mine // together + 1) * together):
        if found[other] != found[mine]:
            raise TrainError(
                f"processes {mine} and {other} share each sample, and got different ones: a sampler must use "
                f"{len(found) // together} replicas, and process r must have rank r // {together}"
            )
