"""Adapters trained in one run, beside the runs of each alone: CPU time of the steps, and how far weights and losses are.

`python benchmarks/many_adapters.py [vit|unet|fashion|dit|convnext ...] [--kinds lora] [--adapters 8] [--samples 2] [--steps 24]
[--float64] [--rounds 1]`. A run alone is `Trainer` on a pass without slots, with the defaults (layers fused with their
updates). All have a rank, rate, schedule, clipping, length and seed of their own; ratios are of CPU time, as others use the
machine too, and every other round begins with the runs alone. `--sweep` is the table of all models, kinds and numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import fxplug
from fxplug.training.adapter_runs import AdapterRuns
from fxplug.training.trainer import Trainer

HERE = Path(__file__).parent
UNET = {
    "sample_size": 16, "block_out_channels": (32, 64), "layers_per_block": 1, "attention_head_dim": 8, "norm_num_groups": 8,
    "cross_attention_dim": 32, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}  # fmt: skip
DIT = {
    "sample_size": 16, "num_layers": 4, "attention_head_dim": 32, "num_attention_heads": 6, "in_channels": 4, "out_channels": 4,
    "patch_size": 2, "num_embeds_ada_norm": 1000, "norm_num_groups": 4,
}  # fmt: skip
LAYERS = ["**.to_q", "**.to_k", "**.to_v", "**.to_out.0", "**.conv1"]
KINDS = ("lora", "loha", "lokr", "ia3", "dora")


class Samples(Dataset[Any]):
    """Drawn samples of one adapter: images or latents, with what the model is called with beside them."""

    classes = [str(n) for n in range(10)]

    def __init__(self, seed: int, shape: tuple[int, ...], text: tuple[int, ...] = (), count: int = 32) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randn(count, *shape, generator=generator)
        self.labels = torch.randint(0, 10, (count,), generator=generator)
        self.texts = torch.randn(count, *text, generator=generator) if text else None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        text = {} if self.texts is None else {"words": self.texts[index]}
        return {"image": self.images[index], "label": int(self.labels[index]), **text}


class Noise(fxplug.Task):
    """The noise of noisy latents."""

    def loss(self, module: nn.Module, batch: dict[str, Any], draw: Any) -> Tensor:
        dtype = next(iter(self.like)).dtype
        image, noise = batch["image"].to(dtype), draw.like(batch["image"].to(dtype))
        share = draw.uniform(len(image)).to(dtype)
        noisy = image * (1 - share)[:, None, None, None] + noise * share[:, None, None, None]
        return F.mse_loss(self.call(module, batch, noisy, share * 1000), noise)

    def call(self, module: nn.Module, batch: dict[str, Any], noisy: Tensor, time: Tensor) -> Tensor:
        """Return what the model says of noisy latents."""
        given = {"timestep": time, "encoder_hidden_states": batch["words"].to(noisy.dtype), "return_dict": False}
        found: Tensor = module(sample=noisy, **given)[0]
        return found

    def setup(self, module: nn.Module, info: Any) -> None:
        self.like = [next(module.parameters())]


class LabelledNoise(Noise):
    """The noise of noisy latents, of a model that is given classes."""

    def call(self, module: nn.Module, batch: dict[str, Any], noisy: Tensor, time: Tensor) -> Tensor:
        given = {"timestep": time, "class_labels": batch["label"], "return_dict": False}
        found: Tensor = module(hidden_states=noisy, **given)[0]
        return found


class Classes(fxplug.Task):
    """The class of images."""

    def loss(self, module: nn.Module, batch: dict[str, Any], draw: Any) -> Tensor:
        return F.cross_entropy(module(x=batch["image"].to(self.like[0].dtype)), batch["label"])

    def setup(self, module: nn.Module, info: Any) -> None:
        self.like = [next(module.parameters())]


def make_case(name: str, dtype: torch.dtype) -> tuple[Any, Any, list[str], Any]:
    """Return the traced model, the class of its task, the layers of the adapters, and what makes their data."""
    torch.manual_seed(0)
    if name == "vit":
        import timm

        options = {"img_size": 32, "patch_size": 8, "depth": 4, "num_classes": 10}
        model = timm.create_model("vit_tiny_patch16_224", **options).eval().to(dtype)
        gm = fxplug.trace(model, kwargs={"x": torch.randn(4, 3, 32, 32, dtype=dtype)})
        return gm, Classes, ["blocks.*.attn.qkv", "blocks.*.attn.proj"], lambda seed: Samples(seed, (3, 32, 32))
    if name == "convnext":
        import timm

        model = timm.create_model("convnext_atto", num_classes=10, depths=(1, 1, 2, 1)).eval().to(dtype)
        gm = fxplug.trace(model, kwargs={"x": torch.randn(4, 3, 32, 32, dtype=dtype)})
        return gm, Classes, ["**.mlp.fc?", "**.conv_dw"], lambda seed: Samples(seed, (3, 32, 32))
    import diffusers

    if name == "dit":
        dit = diffusers.DiTTransformer2DModel(**DIT).eval().to(dtype)
        call = {"timestep": torch.rand(4, dtype=dtype) * 1000, "class_labels": torch.arange(4), "return_dict": False}
        gm = fxplug.trace(dit, kwargs={"hidden_states": torch.randn(4, 4, 16, 16, dtype=dtype), **call})
        return gm, LabelledNoise, [*LAYERS[:-1], "**.ff.net.*.proj"], lambda seed: Samples(seed, (4, 16, 16))
    config: dict[str, Any] = UNET
    if name == "fashion":
        read = json.loads((HERE.parent / "examples/fashion/unet/config.json").read_text())
        config = {key: value for key, value in read.items() if not key.startswith("_")}
    side, width = config["sample_size"], config["cross_attention_dim"]
    unet = diffusers.UNet2DConditionModel(**config).eval().to(dtype)
    given = {
        "sample": torch.randn(4, 4, side, side, dtype=dtype), "timestep": torch.rand(4, dtype=dtype) * 1000,
        "encoder_hidden_states": torch.randn(4, 4, width, dtype=dtype), "return_dict": False,
    }  # fmt: skip
    return fxplug.trace(unet, kwargs=given), Noise, LAYERS, lambda seed: Samples(seed, (4, side, side), (4, width))


def list_settings(kind: str, count: int, samples: int, steps: int) -> list[dict[str, Any]]:
    """Return the settings of each adapter."""
    rows = []
    for n in range(count):
        row: dict[str, Any] = {} if kind == "ia3" else {"rank": (4, 8, 2, 8)[n % 4]}
        row |= {"lr": 1e-3 * (1 + n % 3), "steps": steps - n % 3, "batch": samples}
        row |= {"seed": n, "clip": (None, 0.5)[n // 2 % 2], "scheduler": ("cosine", None)[n % 2]}
        row |= {"weight_decay": 0.01 * (n % 2)}
        rows.append(row)
    return rows


@dataclass
class Measure:
    """What adapters in one run cost beside runs alone, and how far they are from these."""

    seconds: float
    alone: float
    weights: float
    losses: float

    @property
    def ratio(self) -> float:
        return self.seconds / self.alone


def measure(case: Any, kind: str, count: int, samples: int, steps: int, first: bool = True) -> Measure:
    """Train all in one run and each alone; the one run is `first`, or last."""
    gm, task, at, make = case
    rows = list_settings(kind, count, samples, steps)
    common: dict[str, Any] = {"mode": "eval", "device": "cpu", "quiet": True}
    largest = {} if kind == "ia3" else {"rank": 8}
    module = fxplug.apply(gm, fxplug.load_pass(kind, at=at, **largest, slots=count))
    adapters = [{"name": f"a{n}", "data": make(n), **row} for n, row in enumerate(rows)]
    together: Any = Trainer(module, task(), adapters=adapters, **common)
    assert isinstance(together, AdapterRuns)
    single = []
    for row in rows:
        own = dict(row)
        torch.manual_seed(own["seed"])
        rank = {"rank": own.pop("rank")} if "rank" in own else {}
        new = fxplug.apply(gm, fxplug.load_pass(kind, at=at, **rank))
        single.append(Trainer(new, task(), make(row["seed"]), **own, **common))
    whole = fit(together) if first else 0.0
    alone = sum(fit(trainer) for trainer in single)
    whole = whole or fit(together)
    weights = losses = 0.0
    for one, trainer in zip(together.runs, single, strict=True):
        pairs = [(trainer.trained[key], value) for key, value in one.trainer.trained.items()]
        weights = max([weights, *(float((a - b).detach().abs().max()) for a, b in pairs)])
        both = zip(trainer.history, one.trainer.history, strict=True)
        losses = max([losses, *(abs(a["loss"] - b["loss"]) for a, b in both)])
    return Measure(whole, alone, weights, losses)


def fit(trainer: Any) -> float:
    """Return the CPU seconds of a run."""
    begun = time.process_time()
    trainer.fit()
    return time.process_time() - begun


def find_median(case: Any, rounds: int, *given: Any) -> Measure:
    """Return the measure with the median ratio of several."""
    found = [measure(case, *given, first=turn % 2 == 0) for turn in range(rounds)]
    return sorted(found, key=lambda row: row.ratio)[len(found) // 2]


def sweep(cases: Sequence[str], kinds: Sequence[str], samples: Sequence[int], steps: int, rounds: int) -> None:
    """Print a table of the ratios: a row for each model, kind and number of adapters, a column for each number of samples."""
    print("| model | kind | adapters |", *(f"{n} |" for n in samples), flush=True)
    print("|---|---|---|" + "---|" * len(samples), flush=True)
    for name in cases:
        case = make_case(name, torch.float32)
        for kind in kinds:
            for count in (2, 8):
                found = [find_median(case, rounds, kind, count, n, steps) for n in samples]
                print(f"| {name} | {kind} | {count} |", *(f"{row.ratio:.2f} |" for row in found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Adapters in one run, and each alone.")
    parser.add_argument("cases", nargs="*", metavar="case", help="vit, unet, fashion, dit, convnext")
    parser.add_argument("--kinds", nargs="*", choices=KINDS)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--samples", type=int, nargs="*")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--float64", action="store_true")
    parser.add_argument("--sweep", action="store_true", help="the table of all models, kinds, numbers of adapters and samples")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    dtype = torch.float64 if given.float64 else torch.float32
    if given.sweep:
        cases = given.cases or ["vit", "fashion", "dit", "convnext"]
        sweep(cases, given.kinds or KINDS, given.samples or [1, 2, 8], given.steps, given.rounds)
        return
    for name in given.cases or ["vit", "unet", "fashion"]:
        case = make_case(name, dtype)
        for kind in given.kinds or ["lora"]:
            for samples in given.samples or [2]:
                row = find_median(case, given.rounds, kind, given.adapters, samples, given.steps)
                print(
                    f"{name}, {given.adapters} {kind}, {samples} samples each: CPU time {row.ratio:.2f} ({row.seconds:.1f} s, "
                    f"{row.alone:.1f} s), weights within {row.weights:.1e}, losses within {row.losses:.1e}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
