"""Devices, precision and processes of a run, by accelerate; and the module as it runs there."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ..core.errors import MatchError, SpecError, TrainError
from ..core.ir.traced_module import TracedModule
from ..core.ir.variants import Variants
from ..lowerings.frozen_norms import freeze_norms
from ..lowerings.linear.fused import fuse
from ..lowerings.regions.fsdp import shard
from ..lowerings.regions.nested import nest
from ..lowerings.regions.submodules import outline
from ..lowerings.regions.swapping import BlockSwap
from .checkpoint import list_differences
from .outlined_forms import OutlinedForms
from .swapped_blocks import outline_swapped
from .train_section import Train

MOST_FORMS = 256  # of a call, by sizes and captions, each compiled once: torch stops at 8, and the run would end there
PRECISIONS = {"fp32": "no", "fp16": "fp16", "bf16": "bf16"}


def make_accelerator(precision: str, device: str | None = None) -> Accelerator:
    """Return accelerate's view of this process: single, or one of those that `accelerate launch` or torchrun started. alone, or
    one of those that `accelerate launch` or torchrun started.

    `device` None leaves the choice to accelerate: a GPU when there is one. Raises TrainError for fp16 on a CPU, and when
    processes that were started together would each train alone.
    """
    if PartialState._shared_state and PartialState().num_processes == 1:
        PartialState._reset_state()  # accelerate keeps the settings of a process's first run for all later ones
    AcceleratorState._reset_state()
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    on_cpu = torch.device(device).type == "cpu" if device else processes > 1 and not torch.accelerator.is_available()
    if device is not None and torch.device(device).index is not None:
        torch.cuda.set_device(device)
    accelerator = Accelerator(mixed_precision=PRECISIONS[precision], cpu=on_cpu)
    if accelerator.num_processes != processes:
        found = f"only {accelerator.num_processes} of the {processes} processes that were started form a group"
        raise TrainError(f"{found}: set the device to train on (device: cpu, for example)")
    if precision == "fp16" and accelerator.device.type == "cpu":
        raise TrainError("fp16 needs a GPU, because of loss scaling; on a CPU use precision: bf16 or fp32")
    return accelerator


def remake_accelerator(precision: str, accelerator: Accelerator) -> Accelerator:
    """Return an accelerator for the same process and device in the precision of the model's weights. Raises TrainError for fp16
    on a CPU."""
    if precision == "fp16" and accelerator.device.type == "cpu":
        raise TrainError(
            "the trained parameters are float16, which needs loss scaling and so a GPU: on a CPU set dtype: bfloat16 or "
            "float32, or precision: bf16"
        )
    return make_accelerator(precision, str(accelerator.device))


def check_agreement(accelerator: Accelerator, config: Any) -> None:
    """Raise TrainError in every process, with the differences, if the processes were given different configurations."""
    for process, other in enumerate(gather(accelerator, config)):
        lines = list_differences(config, other, words=("here", f"in process {process}"))
        if lines:
            listed = "\n  ".join(lines)
            mine = accelerator.process_index
            raise TrainError(f"processes {mine} and {process} have different configurations:\n  {listed}")


def gather(accelerator: Accelerator, value: Any) -> list[Any]:
    """Return the value of every process, in their order."""
    return list(gather_object([value])) if accelerator.num_processes > 1 else [value]


def find_largest(number: int) -> int:
    """Return the largest of the numbers that the processes of a run have; of one process its own."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return number
    device = torch.device("cuda", torch.cuda.current_device()) if torch.distributed.get_backend() == "nccl" else None
    most = torch.tensor(number, device=device)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return int(most)


def average_by_name(
    accelerator: Accelerator, values: Mapping[str, float], names: list[str], flag: float
) -> tuple[dict[str, float], float]:
    """Return the mean of each number over the processes that have it, and the sum of their flags.

    `names` are those that any process has had before, the same in all of them; new ones are added.
    """
    if accelerator.num_processes == 1:
        return dict(values), flag
    new = sorted(values.keys() - {*names})
    flag, more, *sums = _sums(accelerator, [flag, float(bool(new)), *_with_counts(values, names)])
    if more:
        added = sorted({name for found in gather(accelerator, new) for name in found})
        sums += _sums(accelerator, _with_counts(values, added))
        names += added
    pairs = zip(names, sums[::2], sums[1::2], strict=True)
    return {name: total / count for name, total, count in sorted(pairs) if count}, flag


def _with_counts(values: Mapping[str, float], names: Iterable[str]) -> list[float]:
    return [number for name in names for number in (values.get(name, 0.0), float(name in values))]


def _sums(accelerator: Accelerator, numbers: list[float]) -> list[float]:
    reduced: Any = accelerator.reduce(torch.tensor(numbers, dtype=torch.float64, device=accelerator.device), "sum")
    return list(reduced.tolist())


def prepare(
    module: TracedModule,
    settings: Train,
    frozen: Callable[[str], bool],
    accelerator: Accelerator,
    unused: bool = False,
    swap: BlockSwap | None = None,
) -> tuple[nn.Module, TracedModule | None]:
    """Return the module that runs in training, on shared weights, and the sharded module if there is one.

    Linear layers are fused with their low-rank updates, each in the form of the rule for its sizes, unless `fuse` is off, and
    batch norms that are `frozen`, a predicate on names of parameters, keep their statistics. `checkpointing` and `shard`
    outline regions, and so does a `swap`, which fetches their weights. `compile` compiles the whole as one graph (a sharded
    module in parts), or regions by kinds. Several processes are put under DDP if nothing is sharded; with `unused` it looks for
    parameters without gradient in each step.
    Raises SpecError for settings that exclude each other, and if no regions are alike.
    """
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(settings.precision)  # what autocast multiplies
    lowered, several = module, None
    if settings.fuse:
        lowered = _repeatable(partial(fuse, how="auto" if settings.fuse is True else settings.fuse, dtype=dtype), lowered)
    lowered = _repeatable(partial(freeze_norms, frozen=frozen), lowered)
    if swap is not None:
        return outline_swapped(lowered, swap, checkpoint=bool(settings.checkpointing)), None
    if settings.checkpointing or settings.shard:
        named = [patterns for patterns in (settings.shard, settings.checkpointing) if not isinstance(patterns, bool)]
        if len(named) == 2 and named[0] != named[1]:
            raise SpecError("'shard' and 'checkpointing' must name the same regions", path=("train", "shard"))
        chosen = named[0] if named else None
        cut = partial(outline, regions=chosen, checkpoint=bool(settings.checkpointing))
        try:
            if isinstance(lowered, Variants) and not (settings.shard or settings.compile):
                several = OutlinedForms(lowered, cut)
            else:
                lowered = _repeatable(cut, lowered)
        except MatchError as error:
            key = "checkpointing" if chosen is None or settings.checkpointing == chosen else "shard"
            raise SpecError(str(error), path=("train", key)) from error
    if settings.compile == "regions":
        lowered = _by_kinds(lowered, settings)
    runner: nn.Module = several or lowered
    sharded = None
    if settings.shard:
        if not torch.distributed.is_initialized():
            finding = "shard needs several processes: start the run with torchrun or accelerate launch"
            raise SpecError(finding, path=("train", "shard"))
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        runner = sharded = shard(lowered, mesh)
        module.to("cpu")  # which frees the whole weights on this device: the sharded module has its part of each
    if settings.compile:
        # FSDP2 gathers weights between the graphs of its regions; torch 2.13 has a limit for the whole process only
        known = inspect.signature(torch.compile).parameters
        limit: dict[str, Any] = {"recompile_limit": MOST_FORMS} if "recompile_limit" in known else {}
        compiled: Any = torch.compile(runner, fullgraph=sharded is None, **limit)
        runner = compiled
    if accelerator.num_processes > 1 and sharded is None:
        on_gpu = accelerator.device.type == "cuda"
        devices = [accelerator.device] if on_gpu else None
        runner = DistributedDataParallel(runner, device_ids=devices, find_unused_parameters=unused)
    return runner, sharded


def _repeatable(step: Callable[[TracedModule], TracedModule], module: TracedModule) -> TracedModule:
    """Do a step to a module and to its variants, so that further forms of call can be met in training too."""
    made = step(module)
    return made if made is module else made.made_by(step, module)


def _by_kinds(lowered: TracedModule, settings: Train) -> TracedModule:
    for key in ("checkpointing", "shard"):
        if getattr(settings, key):
            finding = (
                f"'compile: regions' and '{key}' cannot be used together, since both outline regions: write 'compile: true'"
            )
            raise SpecError(finding, path=("train", "compile"))
    try:
        return _repeatable(nest, lowered)
    except MatchError:
        finding = "the model has no repeated regions, so 'compile: regions' saves nothing: write 'compile: true'"
        raise SpecError(finding, path=("train", "compile")) from None


def set_mode(runner: nn.Module, module: TracedModule, mode: str) -> None:
    """Put the runner into training mode; with mode `eval` only the added blocks, while the base computes as in evaluation."""
    runner.train()
    if mode == "eval":
        runner.eval()
        passes = {entry["name"] for entry in module.meta.get("passes", [])}
        for name, part in runner.named_modules():
            if getattr(part, "is_block", False) or _below_wrappers(name).split(".")[0] in passes:
                part.train()


def _below_wrappers(name: str) -> str:
    """Strip the prefixes that DDP, torch.compile and outlining put before a module's name."""
    return re.sub(r"^(?:module\.|_orig_mod\.|forms\.\d+\.)*(?:regions\.[^.]+\.(?:region\.)*)?", "", name)
