"""The ways to run, the pipeline, and what a classifier of real garments takes its pictures for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from dit import Garments
from garments import CLASSES
from judge import recognised
from safetensors.torch import load_file
from torch import Tensor, nn

import fxplug

HERE = Path(__file__).resolve().parent
FASHION = HERE.parent / "fashion"
EXACT = {
    2: {"ulysses 2": {"ulysses": 2}, "ring 2": {"ring": 2}, "guidance 2": {"batch": 2}},
    4: {
        "ulysses 4": {"ulysses": 4}, "ring 4": {"ring": 4}, "ulysses 2 x ring 2": {"ulysses": 2, "ring": 2},
        "guidance 2 x ulysses 2": {"batch": 2, "ulysses": 2},
    },
}  # fmt: skip
STALE = [(2, 1), (4, 1), (4, 2), (4, 5), (8, 1), (8, 5)]  # patches, and steps in one piece before them


def pipeline(transformer: nn.Module) -> Garments:
    pipe = Garments(transformer, FlowMatchEulerDiscreteScheduler())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def drawn(transformer: nn.Module, labels: Tensor, steps: int) -> Tensor:
    return pipeline(transformer)(labels, steps=steps)


def judged(pictures: Tensor, labels: Tensor) -> float:
    """The share that examples/fashion's classifier recognises."""
    classifier = fxplug.rewrite(FASHION / "classifier.yaml").module.eval()
    classifier.load_state_dict(load_file(FASHION / "classifier.safetensors"), strict=False)
    shares = recognised(classifier, pictures, [CLASSES[label] for label in labels])
    return sum(shares.values()) / len(shares)


def by_processes(world: int, folder: Path, models: list[Path]) -> list[tuple[Tensor, ...]]:
    """For each of some saved models, the pictures of each of the processes that torchrun starts once for all of them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, str(HERE / "process.py"), str(folder), *map(str, models)], check=True, env=env)
    pictures = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]
    return list(zip(*pictures, strict=True))
