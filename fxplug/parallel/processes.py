"""Real processes for a parallel module: those that torchrun started, or gloo ones on this machine, started for a check."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

from ..core.artifacts.artifact import check_savable, load, save
from ..core.errors import FxplugError, SpecError, VerifyError
from ..core.ir.traced_module import TracedModule
from ..core.verifier import as_first_rank
from .comparison import check_pretended, check_real, get_degrees
from .pipelines.entry import in_steps
from .plan import list_costs, list_node_costs
from .runtime.mesh import find_position, format_degrees
from .stage import place

PATIENCE = timedelta(minutes=10)  # for a process that is started for a check, in one collective


def is_first() -> bool:
    """Return whether this is the first of all processes, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def compare_values(module: TracedModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Compare every value of a parallel module on simulated processes with one process, and on real ones with those.

    Under torchrun the real processes are all of its own; else gloo processes are started on this machine. For a module that
    runs in steps the results are compared, in one piece and by patches with nothing stale. Returns the findings as text. Raises
    VerifyError with the first node that differs, SpecError for another number of processes.
    """
    if said := module.meta.get("stepped"):
        return _agree_in_steps(module, args, kwargs, (said.get("stages") or said["ways"]) * said.get("batch", 1))
    ways = get_degrees(module)
    count = math.prod(ways.values())
    if count <= 1:
        return "one process: nothing to compare"
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        apart = check_pretended(module, args, kwargs, every=True)
        return _exit_message(count, apart, spawned(module, args, kwargs, count))
    with process_group(module):
        place(module, find_position(ways))
        told: list[Any] = [None]
        if is_first():
            try:
                told = [check_pretended(module, args, kwargs, every=True)]
            except FxplugError as error:
                told = [str(error)]
        dist.broadcast_object_list(told)
        if isinstance(told[0], str):
            raise VerifyError(told[0])
        try:
            return _exit_message(count, told[0], check_real(module, args, kwargs))
        finally:
            place(module, None)


def _agree_in_steps(module: TracedModule, args: Sequence[Any], kwargs: Mapping[str, Any], count: int) -> str:
    apart = in_steps(module, args, kwargs, check=False).check(args, kwargs)
    told = f"one process differs by {apart:.1e} in one piece and by patches"
    if count == 1:
        return told
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        real = spawned(module, args, kwargs, count)
    else:
        with process_group(module):
            real = _real(module, args, kwargs)
    return f"{told}, {count} real ones by {real:.1e}"


def _real(module: TracedModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Return the error of the joint result of this process and the others."""
    if module.meta.get("stepped"):
        return in_steps(module, args, kwargs, check=False).check(args, kwargs)
    return check_real(module, args, kwargs)


def _exit_message(count: int, pretended: float, real: float) -> str:
    return (
        f"{count} simulated processes differ from one by {pretended:.1e}, real ones from simulated ones by {real:.1e}; every "
        "value was compared"
    )


@contextlib.contextmanager
def process_group(module: nn.Module) -> Iterator[None]:
    """Initialise the process group of torchrun's processes, for the device of a module; use an existing one."""
    if dist.is_initialized():
        yield
        return
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    try:
        yield
    finally:
        dist.destroy_process_group()


def spawned(module: TracedModule, args: Sequence[Any], kwargs: Mapping[str, Any], count: int) -> float:
    """Return the result of `_real` in gloo processes that are started for it, with the module as `save` writes it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(module, folder / "module")
        torch.save((list(args), dict(kwargs)), folder / "call.pt")
        try:
            spawn(_process, (count, name, check_savable(module), module.training), nprocs=count)  # type: ignore[no-untyped-call]
        except Exception as error:  # torch's own, of a process that failed or died
            for file in sorted(folder.glob("*.txt")):
                raise VerifyError(file.read_text("utf-8")) from None
            raise VerifyError(f"a process that was started for the check failed: {error}") from error
        return float((folder / "apart").read_text("utf-8"))


def _process(rank: int, count: int, name: str, allow: list[str], training: bool) -> None:
    """Run one of the processes that are started for a check."""
    folder = Path(name)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    store = dist.FileStore(f"{name}/store", count)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=PATIENCE)
    try:
        module = load(folder / "module", allow=[text.partition(":")[0] for text in allow]).train(training)
        args, kwargs = torch.load(folder / "call.pt", weights_only=True)
        apart = _real(module, args, kwargs)
        if rank == 0:
            (folder / "apart").write_text(repr(apart), "utf-8")
    except FxplugError as error:
        (folder / f"{rank}.txt").write_text(str(error), "utf-8")
        raise
    finally:
        dist.destroy_process_group()


def measure() -> tuple[tuple[float, float], float]:
    """Measure bytes per second and seconds per call between torchrun's processes, and teraFLOP per second of one of them.

    From all-to-all of 64 MB and of a few bytes, and a product in float32, each the fastest of five. Raises SpecError for one
    process.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise SpecError("--link measured needs several processes: start with torchrun --nproc-per-node 2")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else torch.device("cpu")
    with process_group(torch.nn.Linear(1, 1, device=device)):
        world = dist.get_world_size()
        small, large = (_fastest(n, world, device) for n in (world, (1 << 24) // world * world))
        a = torch.randn(2048 if device.type == "cuda" else 512, 2048, device=device)
        b = torch.randn(2048, 2048, device=device)
        work = min(_seconds(lambda: a @ b, device) for _ in range(5))
        told = [torch.zeros(3, device=device, dtype=torch.float64) for _ in range(world)]
        dist.all_gather(told, torch.tensor([small, large, work], device=device, dtype=torch.float64))
        small, large, work = torch.stack(told).max(0).values.tolist()  # all go on from the same
    size = 4 * (1 << 24) // world * (world - 1)
    return (size / max(1e-9, large - small), small), 2 * a.numel() * 2048 / work / 1e12


def _fastest(count: int, world: int, device: torch.device) -> float:
    x = torch.zeros(count, device=device)
    out = torch.empty_like(x)
    times = []
    for _ in range(5):
        dist.barrier()
        times.append(_seconds(lambda: dist.all_to_all_single(out, x), device))
    return min(times)


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def describe(module: TracedModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Describe the communication of a parallel module without its plan: degrees, and each collective of the first process."""
    with as_first_rank(module):
        rows = list_node_costs(module, module._graph_mode, args, kwargs)
    return "\n".join([format_degrees(get_degrees(module)), *list_costs(rows)])
