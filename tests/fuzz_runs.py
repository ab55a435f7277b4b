"""Random training runs that end at a random moment and go on: equal to the run that did not end.

To the bit where the run is divided as before; within CLOSE where batch and accumulation are others, of a model without batch
statistics and dropout.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import fxplug
from fxplug.training.checkpoint import list_checkpoints

CLOSE = 1e-6
OPTIMIZERS = [
    *("adamw", "adam", "sgd", "nadam", "radam", "adagrad", "adadelta", "rmsprop", "asgd", "adamax", "rprop"),
    "fuzz_runs:Adapting",
]
SCHEDULERS = [
    *(None, "constant", "linear", "cosine", {"cosine": {"warmup": 2}}, {"linear": {"floor": 0.1, "per": "epoch"}}),
    *("cosineannealinglr", "reducelronplateau", {"StepLR": {"step_size": 3}}, {"OneCycleLR": {"max_lr": 0.01}}),
    {"CosineAnnealingWarmRestarts": {"T_0": 3}},
]
HOOKS = ("on_step_start", "on_backpropagation", "on_step_end", "on_epoch_end", "on_model_save", "on_epoch_start")


class Adapting(torch.optim.SGD):
    """Keeps what it has learnt in its groups, as Prodigy and D-Adaptation do."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        for group in self.param_groups:
            group.setdefault("d", 1.0)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["d"] *= 1.01
            for p in group["params"]:
                if p.grad is not None:
                    p.grad *= group["d"]
        return super().step(closure)


class Net(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6) if norm else nn.Identity()
        self.drop, self.head = nn.Dropout(0.2 if norm else 0.0), nn.Linear(6, 4)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x)).relu().mean((2, 3))
        out: torch.Tensor = self.head(self.drop(x + self.body(x)))
        return out


class Pictures(Dataset[Any]):
    def __init__(self, count: int) -> None:
        drawn = torch.Generator().manual_seed(count)
        self.x, self.y = torch.randn(count, 3, 6, 6, generator=drawn), torch.randint(4, (count,), generator=drawn)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return self.x[i], int(self.y[i])


class Broken(RuntimeError):
    """What ends a run."""


class Breaks:
    """Raises in the `at`-th call of a hook."""

    def __init__(self, hook: str, at: int) -> None:
        self.left = at
        setattr(self, hook, self._count)

    def _count(self, **kwargs: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise Broken


def fuzz_runs(cases: int, seed: int) -> list[str]:
    """`cases` runs from `seed` on; a line for each that did not go on as the one that was not ended."""
    misses = []
    for case in range(seed, seed + cases):
        with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
            warnings.simplefilter("ignore")
            try:
                misses += [f"{case}: {line}" for line in one(random.Random(case), Path(folder))]
            except Exception as error:  # any of it is a miss
                misses.append(f"{case}: {type(error).__name__}: {error}")
    return misses


def one(draw: random.Random, folder: Path) -> list[str]:
    """A random run, ended and resumed."""
    samples_of_a_step = draw.choice([2, 4, 6, 8])
    divisors = [n for n in range(1, samples_of_a_step + 1) if samples_of_a_step % n == 0]
    batch, other = draw.choice(divisors), draw.choice(divisors)
    norm = draw.random() < 0.4
    if norm:
        other = batch
    length = {"steps": draw.randint(2, 14)} if draw.random() < 0.5 else {"epochs": draw.randint(1, 3)}
    settings: dict[str, Any] = {
        **length,
        "optimizer": draw.choice(OPTIMIZERS),
        "scheduler": draw.choice(SCHEDULERS),
        "clip": draw.choice([None, 0.5]),
        "ema": draw.choice([None, 0.9]),
        "weight_decay": draw.choice([0.0, 0.01]),
        "lr": draw.choice([1e-3, 1e-2]),
        "precision": draw.choice(["fp32", "fp32", "bf16"]) if norm else "fp32",
        "trainable": ["**"] if norm else draw.choice([["head"], []]),
        "save": {"every": draw.randint(1, 4), "keep": 99},
        "log": {"tensorboard": False},
    }
    if settings["scheduler"] == {"OneCycleLR": {"max_lr": 0.01}} and settings["optimizer"] not in ("adam", "adamw", "sgd"):
        settings["scheduler"] = "cosine"  # it needs an optimizer with momentum
    if settings["optimizer"] == "rprop":
        settings["weight_decay"] = 0.0  # it has none
    data = Pictures(samples_of_a_step * draw.randint(1, 5) + (draw.randint(0, 1) if batch == other else 0))
    where = draw.choice([1, 2])

    def run(out: Path, batch: int, plugins: list[Any] = [], resume: Any = None, **more: Any) -> Any:  # noqa: B006
        torch.manual_seed(where)
        gm = fxplug.trace(Net(norm), torch.randn(2, 3, 6, 6))
        if not norm:
            gm = fxplug.apply(gm, fxplug.load_pass("lora", at="body.*", rank=2))
        given = {"batch": batch, "accumulate": samples_of_a_step // batch, **settings, **more}
        task = {"classify": {"augment": "none"}}
        trainer = fxplug.Trainer(gm, task, data, out=out, seed=where, device="cpu", quiet=True, plugins=plugins, **given)
        trainer.fit(resume=resume)
        return trainer

    whole = run(folder / "whole", batch)
    ended = folder / "ended"
    try:
        hook = draw.choice(HOOKS)
        run(ended, batch, [Breaks(hook, draw.randint(1, 8))])
    except fxplug.FxplugError:
        pass
    start = list_checkpoints(ended / "checkpoints")
    if not start:
        shutil.rmtree(ended, ignore_errors=True)
        resumed = run(ended, other)
    else:
        resumed = run(ended, other, resume=draw.choice([ended, start[-1], draw.choice(start)]))
    return list(differences(whole, resumed, 0.0 if other == batch else CLOSE))


def differences(a: Any, b: Any, most: float) -> Any:
    """What is not equal in two runs that have ended."""
    rows = {"loss": most, "lr": 0.0, "grad_norm": 10 * most}
    steps = [[record["step"] for record in run.history] for run in (a, b)]
    if steps[0] != steps[1]:
        yield f"steps {steps[0]} and {steps[1]}"
    for one, other in zip(a.history, b.history, strict=False):
        for key, limit in rows.items():
            if abs(one[key] - other[key]) > limit * max(1.0, abs(one[key])):
                yield f"{key} of step {one['step']}: {one[key]} and {other[key]}"
                return
    for name, value in a.module.state_dict().items():
        now = b.module.state_dict()[name]
        if not (torch.equal(value, now) if most == 0 else torch.allclose(value, now, rtol=most, atol=most)):
            yield f"'{name}' differs by {(value - now).abs().max():.1e}"
            return
