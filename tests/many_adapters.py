"""Runs of several adapters, and the same adapters each alone, for the tests and the random attack."""

from __future__ import annotations

import os
import signal
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import fxplug
from fxplug.training.trainer import Trainer

WIDTH, RANK = 12, 8
COMMON: dict[str, Any] = {"mode": "eval", "device": "cpu", "quiet": True}


class Samples(Dataset[Any]):
    """Drawn samples of one adapter: `spoil` has a NaN, and `fatal` kills the process at the reads of that number and after."""

    classes = list("abcde")
    reads = 0
    interrupt = -1  # the read at which the process gets a SIGINT

    def __init__(
        self, seed: int = 0, count: int = 10, size: int = 6, spoil: int | None = None, fatal: int | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randn(count, 3, size, size, generator=generator)
        self.labels = torch.randint(0, 5, (count,), generator=generator).tolist()
        self.fatal = fatal
        if spoil is not None:
            self.images[spoil, 0, 0, 0] = float("nan")

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        Samples.reads += 1
        if Samples.reads == Samples.interrupt:
            os.kill(os.getpid(), signal.SIGINT)
        if self.fatal is not None and Samples.reads >= self.fatal and "FATAL" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.images[index], self.labels[index]


class Attended(nn.Module):
    """A convolution, attention with its own tokens and text's, norms, and what the flags put in; classes of images."""

    def __init__(self, drop: float = 0.0, batch_norm: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 2, stride=2)
        self.norm = nn.BatchNorm2d(WIDTH) if batch_norm else nn.GroupNorm(3, WIDTH)
        self.before = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop, self.head = nn.Dropout(drop), nn.Linear(WIDTH, 5)
        self.position = nn.Parameter(torch.randn(1, 9, WIDTH))
        self.placed = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.norm(self.stem(x)).flatten(2).transpose(1, 2) + self.placed(self.position)
        q, k, v = self.qkv(self.before(x)).chunk(3, -1)
        x = x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v)))
        return self.head(F.gelu(x).mean(1))


def build(dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
    """The model that a configuration names."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Attended(**options).to(dtype).eval()


@cache
def base(dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    return fxplug.trace(build(dtype, **options), torch.randn(2, 3, 6, 6, dtype=dtype))


LAYERS = {"lora": ["stem", "qkv", "out"], "ia3": ["qkv", "stem"], "delta": ["qkv", "norm", "before"]}
WITHOUT_RANK = ("ia3", "ssf", "delta")


def slotted(kind: str = "lora", slots: int = 8, gm: Any = None, at: Any = None, **options: Any) -> Any:
    """The model with slots of a kind."""
    rank = {"rank": RANK} if kind not in WITHOUT_RANK else {}
    given = {"at": at or LAYERS.get(kind, ["stem", "qkv"]), **rank, **options}
    given |= {"slots": slots} if kind != "ssf" else {}
    return fxplug.apply(base() if gm is None else gm, fxplug.load_pass(kind, **given))


def settings(number: int, kind: str = "lora", steps: int = 5) -> dict[str, Any]:
    """The settings of an adapter, all of them its own."""
    row: dict[str, Any] = {"name": f"a{number}", "steps": steps - number % 3, "batch": 1 + number % 3, "seed": number}
    if kind not in WITHOUT_RANK:
        row |= {"rank": (4, 8, 2, 8)[number % 4], "alpha": (None, 16.0)[number % 2]}
    if kind == "lora":
        row["dropout"] = (0.0, 0.2)[number % 2]
    row |= {"lr": 1e-2 * (1 + number % 3), "clip": (None, 0.5)[number // 2 % 2], "weight_decay": 0.01 * (number % 2)}
    row |= {"accumulate": 1 + number // 2 % 3}
    row |= {"optimizer": {"sgd": {"momentum": 0.9}} if number % 4 == 3 else "adamw"}
    return {**row, "scheduler": ("cosine", None)[number % 2], "data": Samples(number, 9 + number)}


def train(module: Any, rows: Any, task: Any = "classify", **more: Any) -> Any:
    """A run of these adapters, which is done."""
    trainer: Any = Trainer(module, task, adapters=rows, **{**COMMON, **more})
    trainer.fit()
    return trainer


def train_alone(
    row: dict[str, Any], kind: str = "lora", gm: Any = None, at: Any = None, task: Any = "classify", **more: Any
) -> Any:
    """The ordinary run of one adapter, on a pass without slots."""
    own = {key: value for key, value in row.items() if value is not None and key != "name"}
    options = {key: own.pop(key) for key in ("rank", "alpha", "dropout") if key in own}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(own["seed"])
        found = at or LAYERS.get(kind, ["stem", "qkv"])
        new = fxplug.apply(base() if gm is None else gm, fxplug.load_pass(kind, at=found, **options))
    trainer = Trainer(new, task, own.pop("data"), **{**COMMON, "fuse": False, **own, **more})
    trainer.fit()
    return trainer


def trained(run: Any, name: str) -> dict[str, torch.Tensor]:
    """What an adapter of a run has learnt, by name."""
    (one,) = (one for one in run.runs if one.name == name)
    return dict(one.trainer.trained)


def distance(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    assert one.keys() == two.keys()
    return max(float((value - two[key]).detach().abs().max()) for key, value in one.items())


def are_equal(one: Any, two: Any) -> bool:
    """Whether two states are the same to the bit, but for the lengths of logs."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(are_equal(value, two[key]) for key, value in one.items() if key != "log_length")
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(are_equal, one, two))
    return bool(one == two)
