"""Random settings of a training: each is used, or refused by fxplug before anything is written."""

from __future__ import annotations

import math
import random
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import runs
import small
import torch

import fxplug
from fxplug.core.errors import FxplugError
from fxplug.training import train_section
from fxplug.training.task_section import ClassifyOptions, DenoiseOptions, ScheduleOptions

ODD = [
    0, -1, -0.5, 0.5, 1, 2, 3, 1e-320, 1e300, 10**12, 10**400, math.nan, math.inf, -math.inf,
    "text", "", "none", "auto", "1", [], {}, None, True, False, [""], ["head"], ["**"], [0, 1], [math.nan],
    {"adamw": {}}, {"cosine": None},
]  # fmt: skip
KEYS = [key for key in train_section.Train.model_fields if key not in ("save", "log", "test", "task", "plugins", "parallel")]
INNER = {
    "save": list(train_section.Save.model_fields), "log": list(train_section.Log.model_fields),
    "test": list(train_section.Test.model_fields),
}  # fmt: skip
OPTIONS = {
    "optimizer": {"adamw": ["betas", "eps", "amsgrad", "lr", "foreach"], "SGD": ["momentum", "nesterov", "dampening"]},
    "scheduler": {
        **{name: list(ScheduleOptions.model_fields) for name in ("constant", "linear", "cosine")},
        "StepLR": ["step_size", "gamma"],
        "OneCycleLR": ["max_lr", "pct_start", "total_steps"], "CosineAnnealingLR": ["T_max", "eta_min"],
    },
    "task": {"classify": list(ClassifyOptions.model_fields), "denoise": list(DenoiseOptions.model_fields)},
}  # fmt: skip
LONG = ("steps", "epochs", "batch", "accumulate")  # a huge number of these is a long run, and a fine one
SLOW = ("compile", "shard")


@cache
def rewritten() -> Any:
    return fxplug.rewrite(fxplug.load_config(runs.config())).module


@cache
def denoiser() -> Any:
    """A UNet of diffusers with classes, and LoRA in its middle."""
    parts = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (8,)}
    parts |= {"layers_per_block": 1, "norm_num_groups": 4, "sample_size": 8, "add_attention": False, "num_class_embeds": 5}
    net = small.seeded(lambda: diffusers.UNet2DModel(in_channels=3, out_channels=3, **parts))
    inputs = {"sample": torch.randn(2, 3, 8, 8), "timestep": torch.tensor([3, 5]), "class_labels": torch.tensor([0, 1])}
    return fxplug.apply(fxplug.trace(net, (), inputs), fxplug.load_pass("lora", at="mid_block.**", rank=2))


class Pictures(runs.Digits):
    """Digits at 8 x 8 in four classes."""

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image[:, ::2, ::2], label % 4

    classes = ["a", "b", "c", "d"]


def drawn(rng: random.Random) -> dict[str, Any]:
    train: dict[str, Any] = {"task": {"classify": {"augment": "none"}}, "steps": 2, "batch": 8, "log": {"tensorboard": False}}
    for _ in range(rng.randint(1, 2)):
        value, where = rng.choice(ODD), rng.random()
        if where < 0.4:
            train[rng.choice([key for key in KEYS if key not in SLOW])] = value
        elif where < 0.6:
            section = rng.choice(list(INNER))
            train[section] = {**train.get(section, {}), rng.choice(INNER[section]): value}
        else:
            key = rng.choice(list(OPTIONS))
            name = rng.choice(list(OPTIONS[key]))
            small_task = {"sample_steps": 2, "samples": 2} if name == "denoise" else {}
            train[key] = {name: {**small_task, rng.choice(OPTIONS[key][name]): value}}
    if "epochs" in train:
        train.pop("steps")
    return train


def attempt(train: dict[str, Any]) -> str:
    if any(isinstance(train.get(key), int) and train[key] > 8 for key in LONG):
        return ""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = Path(folder) / "run"
        task = train.pop("task")
        denoises = next(iter(task)) == "denoise" if isinstance(task, dict) and task else False
        module, kind = (denoiser(), Pictures) if denoises else (rewritten(), runs.Digits)
        try:
            trainer = fxplug.Trainer(module, task, kind(count=16), out=out, device="cpu", quiet=True, **train)
        except FxplugError:
            return "refused, and its folder is there" if out.exists() else ""
        except Exception as error:  # what the attack looks for
            return f"{type(error).__name__}: {error}"
        weights = {name: p.detach().clone() for name, p in trainer.trained.items()}
        try:
            rows = trainer.fit()
        except FxplugError as error:
            text = str(error)
            return "" if "not finite" in text or "is nan" in text or "is inf" in text else f"in the run: {text}"
        except Exception as error:
            return f"in the run: {type(error).__name__}: {error}"
        finally:
            with torch.no_grad():
                for name, p in trainer.trained.items():
                    p.copy_(weights[name])
        wrong = [row for row in rows if not (math.isfinite(row["loss"]) and 0 <= row["lr"] < math.inf)]
        return f"a step that is none: {wrong[0]}" if wrong else ""


def fuzz_settings(cases: int, seed: int) -> list[str]:
    misses = []
    for number in range(seed, seed + cases):
        train = drawn(random.Random(number))
        shown = str(train)[:300]
        if found := attempt(train):
            misses.append(f"{number}: {shown}: {found[:300]}")
    return misses
