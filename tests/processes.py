"""Functions in processes of their own, forked from one that has imported what takes long: a new Python takes ten seconds.

Not from this one: autograd cannot be forked once it has run. A function is found by its name, so it stands in a module.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")
UNET = "diffusers.models.unets.unet_2d_condition"  # what most of diffusers' models import
OURS = [f"fxplug.{name}" for name in ("training.run", "training.trainer", "parallel.plan", "core.verifier", "__main__")]
LAST = "frozen"
CONTEXT.set_forkserver_preload(["torch._dynamo", "torch.distributed", UNET, "sklearn.datasets", "timm", "pytest", *OURS, LAST])


def group(function: Callable[..., Any], *args: Any, world: int = 2) -> None:
    """`function(rank, *args)` in each process of a gloo group; what one of them raises is raised here."""
    as_torchrun(_member, function, *args, world=world)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A gloo group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def as_torchrun(function: Callable[..., Any], *args: Any, world: int = 2) -> None:
    """The same without a group, in the environment that torchrun makes."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = (_environment(store, world), function, args)
    torch.multiprocessing.start_processes(_raising, given, nprocs=world, start_method="forkserver")


@dataclass(frozen=True)
class Ended:
    """How processes ended: 0, 1 by an exception, -n by signal n; and what all of them have printed."""

    codes: list[int | None]
    stdout: str
    stderr: str


def ended(function: Callable[..., Any], *args: Any, folder: Path, world: int = 1) -> Ended:
    """How `function(*args)` ends in each of some processes, in the environment that torchrun makes if they are several."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = (_environment(store, world) if world > 1 else {}, folder, function, args)
    processes = [CONTEXT.Process(target=_printing, args=(rank, *given)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    texts = ["".join(path.read_text() for path in sorted(folder.glob(f"{name}-*"))) for name in ("stdout", "stderr")]
    return Ended([process.exitcode for process in processes], *texts)


def learned(module: torch.nn.Module, loss: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """The losses of some steps. In several processes gradients are their mean, but those of weights that are kept in parts."""
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        (value := loss()).backward()
        for name, p in module.named_parameters():
            if dist.is_initialized() and name not in module.meta.get("parts", ()):
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        optimizer.step()
        found.append(value.item())
    return found


def verb(*args: str) -> None:
    """A verb of the command line, as the program does it."""
    from fxplug.__main__ import main

    sys.argv = ["fxplug", *args]
    main()


def _environment(store: dist.TCPStore, world: int) -> dict[str, str]:
    return {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
    }  # fmt: skip


def _raising(rank: int, environment: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    function(rank, *args)


def _member(rank: int, function: Callable[..., Any], *args: Any) -> None:
    dist.init_process_group("gloo")
    try:
        function(rank, *args)
    finally:
        dist.destroy_process_group()


def _printing(
    rank: int, environment: dict[str, str], folder: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    if environment:
        os.environ |= {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    for number, name in enumerate(("stdout", "stderr"), 1):
        os.dup2(os.open(folder / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT), number)
    function(*args)
