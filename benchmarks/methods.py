"""What each method of adapting costs and gives on the diffusion model of examples/fashion: time, memory, quality, drift.

python benchmarks/methods.py [--json FILE] [--page FILE] [--from FILE] [--add] [--steps N] [--only METHOD ...]

Each method learns Bag and Ankle boot, which the base has never seen, in the same few steps from the same batches and noise, on
one thread. Each trains at every learning rate of RATES, and the one with the lowest held-out loss is kept.

step        CPU time of a step (forward, backward, AdamW) over LoRA's, the median of turns that the methods take
memory      MiB that a training holds beyond the base: new weights, gradients, AdamW's moments, and what autograd saves
loss        flow-matching loss on test images of the two classes, at fixed noise and times (the base's is in the row `base`)
recognised  share of pictures of the two classes that the classifier takes for them
drift       mean distance of the pictures of the eight old classes from the base's, same noise, in percent of white
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from record import write
from safetensors.torch import load_file
from timing import milliseconds, taken
from torch import Tensor, nn
from train_step import saved

import fxplug

ROOT = Path(__file__).resolve().parent.parent
FASHION = ROOT / "examples/fashion"
sys.path.insert(0, str(FASHION))
from garments import CLASSES, FashionMnist  # noqa: E402
from judge import recognised  # noqa: E402
from parts import Classifier, SpaceToDepth, meaning  # noqa: E402

OLD, NEW = CLASSES[:8], CLASSES[8:]
RATES = (2e-3, 1e-2)
BATCH, RANK, MIB = 32, 8, 2**20
DRAWN_OLD, DRAWN_NEW = 4, 20  # pictures of each class
BEGIN, END = "<!-- make methods -->", "<!-- end -->"
SUBLAYERS = ["*.**.attn1", "*.**.attn2", "*.**.ff"]
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"at": "**", "rank": RANK},
    "lora_weight": {"at": "**", "rank": RANK},
    "dora": {"at": "**", "rank": RANK},
    "loha": {"at": "**", "rank": RANK},
    "lokr": {"at": "**", "rank": RANK},
    "vera": {"at": "**", "rank": RANK},
    "oft": {"at": "**", "block_size": 4},  # divides the inputs of every layer
    "boft": {"at": "**"},
    "ia3": {"at": [r"re:.*\.attn\d\.to_[kv]"], "feedforward": [r"re:.*\.ff\.net\.2"]},
    "scale": {"at": [r"re:.*\.(to_[qkv]|to_out\.0|conv1|conv2|net\.2)"]},
    "ssf": {"at": "**"},
    "bitfit": {"at": "**"},
    "delta": {"at": "**"},
    "weight_norm": {"at": "**"},
    "bottleneck": {"at": SUBLAYERS},
    "parallel_adapter": {"at": SUBLAYERS},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help="write the table between the page's marks")
    parser.add_argument("--from", dest="recorded", type=Path, help="measure nothing: take the figures of this file")
    parser.add_argument("--add", action="store_true", help="measure what --from's file lacks")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", nargs="+", choices=list(METHODS), default=list(METHODS))
    options = parser.parse_args()
    rows = json.loads(options.recorded.read_text("utf-8"))["rows"] if options.recorded else {}
    if options.add or not rows:
        measure(rows, options.only, options.steps)
    if options.json:
        write(options.json, {"steps": options.steps, "batch": BATCH, "rates": RATES, "methods": METHODS, "rows": rows})
    if options.page:
        options.page.write_text(replace_table(options.page.read_text("utf-8"), rows), "utf-8")
    print(format_table(rows))


def format_table(rows: dict[str, dict[str, float]]) -> str:
    """Return the page's table, the lowest loss first, and below it which methods have no row."""
    heads = ["method", "step, of LoRA's", "memory (MiB)", "held-out loss", "recognised (%)", "drift (%)", "learning rate"]
    lines = [heads, ["---"] * len(heads)]
    for name, row in sorted(rows.items(), key=lambda item: item[1]["loss"]):
        quality = [f"{row['loss']:.4f}", f"{100 * row['recognised']:.0f}"]
        if name == "base":
            lines.append(["the base", "", "", *quality, "0", ""])
        else:
            cost = [f"{row['step']:.2f}", f"{row['memory']:.0f}"] if "step" in row else ["", ""]
            lines.append([f"`{name}`", *cost, *quality, f"{100 * row['drift']:.1f}", f"{row['rate']:g}"])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    missing = [f"`{name}`" for name in METHODS if name not in rows]
    return f"{table}\n\nNot measured yet: {', '.join(missing)}." if missing else table


def replace_table(page: str, rows: dict[str, dict[str, float]]) -> str:
    """Return the page with the table between its marks made anew. ValueError where it has no marks."""
    found, count = re.subn(rf"(?s)({BEGIN}\n).*?(\n{END})", lambda mark: f"{mark[1]}{format_table(rows)}{mark[2]}", page)
    if count != 1:
        raise ValueError(f"the page has no {BEGIN} ... {END} for the table")
    return found


def measure(rows: dict[str, dict[str, Any]], names: list[str], steps: int) -> None:
    """Add the figures that rows lack of the base and each method: quality in two processes, then costs in one."""
    lacking = [name for name in ["base", *names] if name not in rows]
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), initializer=prepare, initargs=(steps,)) as pool:
        for name, row in zip(lacking, pool.map(rate, lacking), strict=True):
            rows[name] = row
            print(json.dumps({name: row}), flush=True)
    prepare(steps)
    for name, row in PREPARED[0].measure_costs([name for name in names if "step" not in rows[name]]).items():
        rows[name] |= row
    return rows


def prepare(steps: int) -> None:
    torch.set_num_threads(1)
    PREPARED.append(Comparison(steps))


def rate(name: str) -> dict[str, Any]:
    return PREPARED[0].rate(name)


PREPARED: list[Comparison] = []  # of this process


class Comparison:
    """The base, the pictures and the noise that all methods share."""

    def __init__(self, steps: int) -> None:
        from diffusers import UNet2DConditionModel

        self.steps = steps
        unet = UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(FASHION / "unet"))
        unet.load_state_dict({key: value.float() for key, value in load_file(FASHION / "base.safetensors").items()})
        self.gm = fxplug.trace(unet.eval(), kwargs=call_of(torch.zeros(2, 4, 14, 14), torch.ones(2), ["Bag", "Bag"]))
        self.judge = Classifier().eval()
        self.judge.load_state_dict(load_file(FASHION / "classifier.safetensors"), strict=False)
        self.learned = examples(True, NEW, 2000)
        self.held_out = examples(False, NEW, 200)
        self.before = draw(self.gm, OLD, DRAWN_OLD)

    def rate(self, name: str) -> dict[str, Any]:
        """Return learning rate, held-out loss, share recognised and drift of a method; of the base itself for `base`."""
        if name == "base":
            return {"loss": self.test(self.gm), "recognised": self.recognise(self.gm)}
        made = {rate: self.train(name, rate) for rate in RATES}
        losses = {rate: self.test(module) for rate, module in made.items()}
        best = min(losses, key=losses.__getitem__)
        drift = (draw(made[best], OLD, DRAWN_OLD) - self.before).abs().mean().item()
        return {"rate": best, "loss": losses[best], "recognised": self.recognise(made[best]), "drift": drift, "losses": losses}

    def measure_costs(self, names: list[str]) -> dict[str, dict[str, float]]:
        """Return memory and time of a step of each method; the methods take turns."""
        every = dict.fromkeys(["lora", *names])
        made = {name: fxplug.apply(self.gm, fxplug.load_pass(name, **METHODS[name])) for name in every}
        steps = {name: self.step_of(module, 1e-4) for name, module in made.items()}
        turns = taken(steps, 7, 1, milliseconds)
        costs = {}
        for name in names:
            trained = sum(weight.nbytes for weight in made[name].parameters() if weight.requires_grad)
            costs[name] = {
                "parameters": trained // 4,
                "memory": (saved(steps[name]) + 4 * trained) / MIB,
                "step": statistics.median(turn[name] / turn["lora"] for turn in turns),
                "milliseconds": statistics.median(turn[name] for turn in turns),
            }
        return costs

    def train(self, name: str, rate: float) -> nn.Module:
        """Return the module that a method gives in these steps; weights, batches and noise are the same for each."""
        torch.manual_seed(0)
        module = fxplug.apply(self.gm, fxplug.load_pass(name, **METHODS[name]))
        step = self.step_of(module, rate, warm=8)
        for _ in range(self.steps):
            step()
        return module.eval()

    def step_of(self, module: nn.Module, rate: float, warm: int = 1) -> Any:
        optimizer = torch.optim.AdamW(fxplug.trainable(module), lr=rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm))
        random = torch.Generator().manual_seed(1)
        images, captions = self.learned

        def step() -> None:
            module.train()
            chosen = torch.randint(len(images), (BATCH,), generator=random)
            flow_loss(module, images[chosen], [captions[i] for i in chosen], random, dropout=0.1).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

        return step

    @torch.no_grad()
    def test(self, module: nn.Module) -> float:
        """Return the mean loss on the held-out pictures, each with one noise."""
        random = torch.Generator().manual_seed(2)
        images, captions = self.held_out
        losses = [
            flow_loss(module, images[at : at + 50], captions[at : at + 50], random).item()
            for at in range(0, len(images), 50)
        ]
        return sum(losses) / len(losses)

    def recognise(self, module: nn.Module) -> float:
        shares = recognised(self.judge, draw(module, NEW, DRAWN_NEW), [name for name in NEW for _ in range(DRAWN_NEW)])
        return sum(shares.values()) / len(shares)


def examples(train: bool, classes: list[str], each: int) -> tuple[Tensor, list[str]]:
    """Return latents [n, 4, 14, 14] in [-1, 1] and captions of the first pictures of each class."""
    found = FashionMnist(train=train, classes=dict.fromkeys(classes, each))
    images = torch.from_numpy(found.images)[:, None].float() / 127.5 - 1
    return SpaceToDepth().encode(images), [CLASSES[label] for label in found.labels]


def call_of(latents: Tensor, times: Tensor, captions: list[str]) -> dict[str, Any]:
    return {"sample": latents, "timestep": times * 1000, "encoder_hidden_states": meaning(captions), "return_dict": False}


def flow_loss(module: nn.Module, images: Tensor, captions: list[str], random: torch.Generator, dropout: float = 0.0) -> Tensor:
    """Return the flow-matching loss (arXiv 2210.02747) at uniform times; captions fall away at the rate `dropout`."""
    noise = torch.randn(images.shape, generator=random)
    times = torch.rand(len(images), generator=random)
    gone = torch.rand(len(images), generator=random) < dropout
    at = times[:, None, None, None]
    said = ["" if empty else caption for empty, caption in zip(gone, captions, strict=True)]
    return F.mse_loss(module(**call_of(torch.lerp(images, noise, at), times, said))[0], noise - images)


@torch.no_grad()
def draw(module: nn.Module, classes: list[str], each: int, steps: int = 12, guidance: float = 2.5) -> Tensor:
    """Return pictures [n, 1, 28, 28] in [0, 1] of each class in turn, by Euler's method from the same noise."""
    captions = [name for name in classes for _ in range(each)]
    latents = torch.randn(len(captions), 4, 14, 14, generator=torch.Generator().manual_seed(3))
    pictures = []
    for part, words in halves(latents, captions):
        for step in range(steps, 0, -1):
            at = torch.full((len(part),), step / steps)
            named, unnamed = (module(**call_of(part, at, text))[0] for text in (words, [""] * len(words)))
            part = part - (unnamed + guidance * (named - unnamed)) / steps
        pictures.append(SpaceToDepth().decode(part))
    return (torch.cat(pictures) / 2 + 0.5).clamp(0, 1)


def halves(latents: Tensor, captions: list[str]) -> Iterator[tuple[Tensor, list[str]]]:
    """Yield batches below 64, the size from which diffusers' upsampling takes another branch than the one traced."""
    for at in range(0, len(captions), 60):
        yield latents[at : at + 60], captions[at : at + 60]


if __name__ == "__main__":
    main()
