"""A training step of a pipeline with caches, over its denoiser's own forward and backward, in turn within one run.

    python benchmarks/cached_step.py [NAME...] [--steps N] [--json FILE]

NAME is one of `tests/tiny_pipelines.py`, or of `LARGER`: there the arithmetic of the denoiser takes longer than the
interpreter between its operations. After each step of `fxplug.train` (loader, noise, loss, backward, clipping, update,
and log) the denoiser runs with the arguments of that step, a mean square is taken, and it runs back: `denoiser`. And
`with_optimizer` is that and a step of AdamW on copies of the weights that train. Ratios are over these, of CPU time.
The first tenth of the steps does not count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import fxplug
from fxplug.training import trainer
from fxplug.training.tasks.pipeline_denoise import PipelineDenoise

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import tiny_pipelines as tiny  # noqa: E402
from record import write  # noqa: E402

clock = time.process_time
LARGER: dict[str, dict[str, Any]] = {
    "flux-larger": {"num_layers": 2, "num_single_layers": 4, "num_attention_heads": 4, "attention_head_dim": 64,
                    "axes_dims_rope": (16, 24, 24)},
    "flux-largest": {"num_layers": 2, "num_single_layers": 4, "num_attention_heads": 12, "attention_head_dim": 64,
                     "axes_dims_rope": (16, 24, 24)},
    "sd15-larger": {"block_out_channels": (64, 128), "layers_per_block": 2, "norm_num_groups": 32},
    "sd15-largest": {"block_out_channels": (192, 384), "layers_per_block": 2, "norm_num_groups": 32},
}  # fmt: skip


def measure(name: str, steps: int, folder: Path) -> dict[str, float]:
    """Return the medians of a run's steps, in milliseconds, and their ratios."""
    pictures = folder / "pictures"
    pictures.mkdir()
    for n in range(8):
        Image.new("RGB", (64, 64), (30 * n, 90, 200)).save(pictures / f"{n}.png")
        (pictures / f"{n}.txt").write_text("a red ball")
    family = name.partition("-")[0]
    pipe = tiny.make(family)
    if name != family:
        part = "unet" if hasattr(pipe, "unet") else "transformer"
        torch.manual_seed(0)
        setattr(pipe, part, type(getattr(pipe, part)).from_config({**getattr(pipe, part).config, **LARGER[name]}))
    pipe.save_pretrained(folder / "pipe")
    rows: list[tuple[float, float, float]] = []
    given: list[tuple[Any, Any, Any]] = []
    own_group, own_step, last = PipelineDenoise._compute_group, trainer.Trainer._step, [0.0]

    def compute_group(self: Any, runner: Any, *args: Any, **named: Any) -> Any:
        def noted(*a: Any, **k: Any) -> Any:
            given[:] = [(runner, a, k)]
            return runner(*a, **k)

        return own_group(self, noted, *args, **named)

    def step(self: Any, *args: Any, **named: Any) -> Any:
        found = own_step(self, *args, **named)
        whole = clock() - last[0]
        runner, a, k = given[0]
        weights = {key: value for key, value in self.trained.items() if value.requires_grad}
        copies = [torch.nn.Parameter(value.detach().clone()) for value in weights.values()]
        if not hasattr(self, "beside_optimizer"):
            self.beside_optimizer = torch.optim.AdamW(copies, lr=1e-3)
        copies = self.beside_optimizer.param_groups[0]["params"]
        begun = clock()
        output = runner(*a, **k)
        leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        torch.cat([leaf.flatten() for leaf in leaves]).square().mean().backward()
        alone = clock() - begun
        for one, two in zip(copies, weights.values(), strict=True):
            one.grad, two.grad = two.grad, None
        begun = clock()
        self.beside_optimizer.step()
        self.beside_optimizer.zero_grad()
        rows.append((whole, alone, alone + clock() - begun))
        last[0] = clock()
        return found

    config = {
        "model": {"pipeline": str(folder / "pipe"), "call": tiny.CALLS[family]},
        "passes": [{"lora": {"at": ["to_q", "to_k", "to_v", "to_out.0"], "rank": 4, "alpha": 2}}],
        "train": {"task": {"denoise": {"samples": 0}}, "steps": steps, "batch": 4, "lr": 1e-3, "log": {"tensorboard": False}},
        "data": {"images": str(pictures), "size": 64, "cache": str(folder / "cache")}, "device": "cpu", "verify": False,
    }  # fmt: skip
    PipelineDenoise._compute_group, trainer.Trainer._step = compute_group, step  # type: ignore[method-assign]
    try:
        fxplug.train(config, out=folder / "run", quiet=True)
    finally:
        PipelineDenoise._compute_group, trainer.Trainer._step = own_group, own_step  # type: ignore[method-assign]
    whole, alone, optimized = (statistics.median(row) * 1e3 for row in zip(*rows[max(1, steps // 10) :], strict=True))
    found = {"step": whole, "denoiser": alone, "with_optimizer": optimized}
    return {**found, "over_denoiser": whole / alone, "over_with_optimizer": whole / optimized}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["sd15", "flux", "wan", *LARGER])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {}
    for name in given.names:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = measure(name, given.steps, Path(folder))
        print(name, {key: round(value, 3) for key, value in found[name].items()}, flush=True)
    if given.json:
        write(given.json, found)


if __name__ == "__main__":
    main()
