"""What the trainer adds to a step: its loader, its plugins, and the rest of its loop, each over the step itself.

python benchmarks/train_loop.py [--json FILE] [--steps N]

timm's ViT-S/16 at 224 with LoRA of rank 16 on its attention, batches of 8 (GPU: 64) from a folder of JPEG photographs of
about 500 x 375 with captions for labels. `step` is forward, backward and optimizer on a batch that is there; a ratio is a
median over the median step of the same run:

loader         the next batch, decoded, resized and made a tensor: by this process, and with two workers as the run sees it
plugins_ten    all hooks of a step for ten plugins without any method, and for ten that have every step hook with nothing in it
loop           a whole step of `Trainer.fit`, with the batch in memory, less the step
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from record import write
from skimage import data
from torch.utils.data import Dataset

import fxplug
from fxplug.compat.everydream.plugins import LoadedPlugins
from fxplug.training.data.loader import Loader
from fxplug.training.data.sources import open_items
from fxplug.training.optimizer_step import Stepper
from fxplug.training.train_section import Data

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH = 64 if DEVICE == "cuda" else 8
PHOTOS = ("astronaut", "chelsea", "coffee", "rocket")


class Bare:
    def on_training_start(self) -> None:
        """What makes it a plugin; no step calls it."""


class Full(Bare):
    def on_step_start(self, **kwargs: Any) -> None:
        """Nothing."""

    def on_backpropagation(self, **kwargs: Any) -> None:
        """Nothing."""

    def on_step_end(self, **kwargs: Any) -> None:
        """Nothing."""


class InMemory(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.images = torch.randn(count, 3, 224, 224)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], index % 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measured(Path(folder), options.steps)
    for name, value in results.items():
        print(f"{name:24}{value}")
    if options.json:
        write(options.json, results)


def measured(folder: Path, steps: int) -> dict[str, Any]:
    photographs(folder, BATCH * 6)
    config = {
        "model": {"timm": "vit_small_patch16_224", "options": {"num_classes": 4}},
        "passes": [{"lora": {"at": "blocks.*.attn.*", "rank": 16}}],
        "seed": 0,
    }
    module = fxplug.rewrite(config, verify=False).module
    trainer = fxplug.Trainer(
        module,
        "classify",
        InMemory(BATCH * 2),
        steps=steps,
        batch=BATCH,
        plugins=[],
        quiet=True,
        log={"tensorboard": False},
    )
    trainer.take_step.__class__ = Timed
    history = trainer.fit()
    step = statistics.median(Timed.taken[2:])
    whole = statistics.median(record["seconds"] for record in history[2:])
    return {
        "batch": BATCH,
        "step_ms": round(step * 1e3, 1),
        "loader": ratio(loading(folder, 0), step),
        "loader_two_workers": ratio(loading(folder, 2, wait=step), step),
        "plugins_ten_empty": ratio(calling([Bare() for _ in range(10)]), step),
        "plugins_ten_full": ratio(calling([Full() for _ in range(10)]), step),
        "loop": ratio(whole - step, step),
    }


class Timed(Stepper):
    """Notes the seconds of the part of each step that is forward, backward and optimizer."""

    taken: ClassVar[list[float]] = []

    def __call__(self, *args: Any) -> dict[str, float]:
        synchronise()
        before = time.perf_counter()
        report = super().__call__(*args)
        synchronise()
        self.taken.append(time.perf_counter() - before)
        return report


def loading(folder: Path, workers: int, wait: float = 0.0) -> float:
    """Seconds that a step waits for its batch while the model is busy for `wait` seconds."""
    spec = Data(images=str(folder), size=224, workers=workers)
    loader = Loader(open_items(spec, folder), spec, BATCH)
    taken = []
    for epoch in range(2):
        batches = loader.epoch(epoch)
        while True:
            before = time.perf_counter()
            if next(batches, None) is None:
                break
            taken.append(time.perf_counter() - before)
            time.sleep(wait)
    loader.close()
    return statistics.median(taken[1:])


def calling(plugins: list[Any], count: int = 200) -> float:
    """Seconds that the hooks of one step take."""
    called = LoadedPlugins(plugins)
    called.common = {"module": None, "project_name": "", "log_folder": Path(), "data_root": None}
    taken = []
    for step in range(count):
        before = time.perf_counter()
        called.call("on_step_start", epoch=0, global_step=step, local_step=step, batch={})
        called.call("on_backpropagation", epoch=0, global_step=step, loss=0.0)
        called.call("on_step_end", epoch=0, global_step=step, local_step=step, batch={}, loss=0.0, lr=0.0, seconds=0.0)
        taken.append(time.perf_counter() - before)
    return statistics.median(taken)


def photographs(folder: Path, count: int) -> None:
    for index in range(count):
        image = Image.fromarray(getattr(data, PHOTOS[index % 4])()).resize((500, 375))
        image.save(folder / f"{index:04}.jpg", quality=90)
        (folder / f"{index:04}.txt").write_text(PHOTOS[index % 4])


def synchronise() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def ratio(part: float, step: float) -> float:
    return round(part / step, 5)


if __name__ == "__main__":
    main()
