"""Devices, precision and processes of a run, by accelerate; and the module as it runs there."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ..batchnorms import hold_norms
from ..errors import TrainError
from ..fusing import fuse
from ..module import TracedModule
from ..outlining import outline
from ..settings import Train
from ..sharding import shard
from .checkpoint import differences

PRECISIONS = {"fp32": "no", "fp16": "fp16", "bf16": "bf16"}


def launched(precision: str, device: str | None = None) -> Accelerator:
    """accelerate's view of this process: alone, or one of those that `accelerate launch` or torchrun started.

    `device` None leaves the choice to accelerate: a GPU when there is one. Raises TrainError for fp16 on a CPU.
    """
    if PartialState._shared_state and PartialState().num_processes == 1:
        PartialState._reset_state()  # accelerate keeps the settings of a process's first run for all later ones
    AcceleratorState._reset_state()
    on_cpu = device is not None and torch.device(device).type == "cpu"
    if device is not None and torch.device(device).index is not None:
        torch.cuda.set_device(device)
    accelerator = Accelerator(mixed_precision=PRECISIONS[precision], cpu=on_cpu)
    if precision == "fp16" and accelerator.device.type == "cpu":
        raise TrainError("fp16 needs a GPU, where the loss is scaled; on a CPU use precision: bf16 or fp32")
    return accelerator


def check_agreement(accelerator: Accelerator, config: Any) -> None:
    """TrainError in every process, with what differs, when the processes were given different configurations."""
    for process, other in enumerate(gathered(accelerator, config)):
        lines = differences(config, other, words=("here", f"in process {process}"))
        if lines:
            listed = "\n  ".join(lines)
            mine = accelerator.process_index
            raise TrainError(f"processes {mine} and {process} have different configurations:\n  {listed}")


def gathered(accelerator: Accelerator, value: Any) -> list[Any]:
    """The value of every process, in their order."""
    if accelerator.num_processes == 1:
        return [value]
    values: list[Any] = [None] * accelerator.num_processes
    torch.distributed.all_gather_object(values, value)
    return values


def mean(accelerator: Accelerator, values: list[float]) -> list[float]:
    """The mean of each number over the processes, which all have as many samples."""
    if accelerator.num_processes == 1:
        return values
    columns = zip(*gathered(accelerator, values), strict=True)
    return [sum(column) / accelerator.num_processes for column in columns]


def prepared(
    module: TracedModule, settings: Train, frozen: set[str], accelerator: Accelerator
) -> tuple[nn.Module, TracedModule | None]:
    """What runs in training, on shared weights, and the sharded module when there is one.

    Linear layers are fused with their low-rank updates unless `fuse` is off, and batch norms whose parameters are frozen keep
    their statistics. `checkpointing` and `shard` outline regions, `compile`
    compiles the whole as one graph, and several processes are put under DDP when nothing is sharded.
    """
    lowered = fuse(module) if settings.fuse else module
    lowered = hold_norms(lowered, frozen)
    if settings.checkpointing or settings.shard:
        chosen = next((s for s in (settings.shard, settings.checkpointing) if not isinstance(s, bool)), None)
        lowered = outline(lowered, chosen, checkpoint=bool(settings.checkpointing))
    runner: nn.Module = lowered
    sharded = None
    if settings.shard:
        if not torch.distributed.is_initialized():
            raise TrainError("shard needs several processes: start the run with torchrun or accelerate launch")
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        runner = sharded = shard(lowered, mesh)
    if settings.compile:
        runner = torch.compile(runner, fullgraph=True)  # type: ignore[assignment]
    if accelerator.num_processes > 1 and sharded is None:
        on_gpu = accelerator.device.type == "cuda"
        runner = DistributedDataParallel(runner, device_ids=[accelerator.device] if on_gpu else None)
    return runner, sharded


def set_mode(runner: nn.Module, module: TracedModule, mode: str) -> None:
    """Put the runner into training; with mode `eval` only what passes added, while the base computes as in evaluation."""
    runner.train()
    if mode == "eval":
        runner.eval()
        passes = {entry["name"] for entry in module.meta.get("passes", [])}
        for name, part in runner.named_modules():  # a compiled, outlined or wrapped module has its names below others
            if getattr(part, "is_block", False) or passes.intersection(name.split(".")):
                part.train()

