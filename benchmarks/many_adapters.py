"""Eight adapters trained in one run, beside the eight runs alone: CPU time of the steps, and how far weights and losses are.

`python benchmarks/many_adapters.py [vit|unet|fashion ...] [--samples 2] [--steps 24] [--float64] [--rounds 1]`. A run alone is
`Trainer` on a pass without slots, with the defaults (layers fused with their updates). All have a rank, rate, schedule,
clipping, length and seed of their own; ratios are of CPU time, as others use the machine too.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
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
LAYERS = ["**.to_q", "**.to_k", "**.to_v", "**.to_out.0", "**.conv1"]
ADAPTERS = 8


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
        found = module(sample=noisy, timestep=share * 1000, encoder_hidden_states=batch["words"].to(dtype), return_dict=False)
        return F.mse_loss(found[0], noise)

    def setup(self, module: nn.Module, info: Any) -> None:
        self.like = [next(module.parameters())]


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
        return gm, Classes, ["blocks.*.attn.*"], lambda seed: Samples(seed, (3, 32, 32))
    import diffusers

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


def list_settings(samples: int, steps: int) -> list[dict[str, Any]]:
    """Return the settings of each adapter."""
    rows = []
    for n in range(ADAPTERS):
        row: dict[str, Any] = {"rank": (4, 8, 2, 8)[n % 4], "lr": 1e-3 * (1 + n % 3), "steps": steps - n % 3, "batch": samples}
        row |= {"seed": n, "clip": (None, 0.5)[n // 2 % 2], "scheduler": ("cosine", None)[n % 2]}
        row |= {"weight_decay": 0.01 * (n % 2)}
        rows.append(row)
    return rows


def measure(name: str, samples: int, steps: int, dtype: torch.dtype) -> dict[str, Any]:
    """Train all in one run and each alone."""
    gm, task, at, make = make_case(name, dtype)
    rows = list_settings(samples, steps)
    common: dict[str, Any] = {"mode": "eval", "device": "cpu", "quiet": True}
    module = fxplug.apply(gm, fxplug.load_pass("lora", at=at, rank=8, slots=ADAPTERS))
    adapters = [{"name": f"a{n}", "data": make(n), **row} for n, row in enumerate(rows)]
    together: Any = Trainer(module, task(), adapters=adapters, **common)
    assert isinstance(together, AdapterRuns)
    begun = time.process_time()
    together.fit()
    whole = time.process_time() - begun
    alone = weights = losses = 0.0
    for one, row in zip(together.runs, rows, strict=True):
        own = dict(row)
        torch.manual_seed(own["seed"])
        new = fxplug.apply(gm, fxplug.load_pass("lora", at=at, rank=own.pop("rank")))
        trainer = Trainer(new, task(), make(row["seed"]), **own, **common)
        begun = time.process_time()
        trainer.fit()
        alone += time.process_time() - begun
        pairs = [(trainer.trained[key], value) for key, value in one.trainer.trained.items()]
        weights = max([weights, *(float((a - b).detach().abs().max()) for a, b in pairs)])
        both = zip(trainer.history, one.trainer.history, strict=True)
        losses = max([losses, *(abs(a["loss"] - b["loss"]) for a, b in both)])
    return {"ratio": whole / alone, "seconds": whole, "alone": alone, "weights": weights, "losses": losses}


def main() -> None:
    parser = argparse.ArgumentParser(description="Eight adapters in one run, and each alone.")
    parser.add_argument("cases", nargs="*", default=["vit", "unet", "fashion"], metavar="case", help="vit, unet, fashion")
    parser.add_argument("--samples", type=int, nargs="*", default=[2])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--float64", action="store_true")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    dtype = torch.float64 if given.float64 else torch.float32
    for name in given.cases:
        for samples in given.samples:
            found = [measure(name, samples, given.steps, dtype) for _ in range(given.rounds)]
            row = sorted(found, key=lambda row: row["ratio"])[len(found) // 2]
            print(
                f"{name}, {samples} samples each: CPU time {row['ratio']:.2f} ({row['seconds']:.1f} s, {row['alone']:.1f} s), "
                f"weights within {row['weights']:.1e}, losses within {row['losses']:.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
