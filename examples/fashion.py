"""Garments by diffusion: a UNet from scratch, LoRA for two classes it never saw, a ControlNet on edges; how good each is.

`--quick` takes two steps of each on a few images, and judges the trained weights in examples/fashion; its README has more.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import fxplug

HERE = Path(__file__).resolve().parent / "fashion"
sys.path.insert(0, str(HERE))  # the configurations name what lies beside them
from garments import CLASSES, conditions  # noqa: E402
from judge import agreement, listed, recognised, sampled, sheet  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true")
parser.add_argument("--out", type=Path, default=Path("out/fashion") / time.strftime("%m%d-%H%M%S"))
args = parser.parse_args()
os.environ |= {"FASHION_MNIST": str(HERE / "few")} if args.quick else {}
OLD, NEW, EACH = CLASSES[:8], CLASSES[8:], 2 if args.quick else 40


def trained(name: str, *changes: str) -> fxplug.Run:
    """The run of a configuration; its weights are in NAME.safetensors afterwards, for the next one."""
    wall, cpu = time.perf_counter(), time.process_time()
    quick = ["train.epochs=null", "train.steps=2", "train.batch=8"] if args.quick else []
    run = fxplug.train(HERE / f"{name}.yaml", out=args.out / name, set=[*changes, *quick], quiet=args.quick)
    if args.quick:
        run.module.load_state_dict(load_file(HERE / f"{name}.safetensors"), strict=False)
    names = {n for group in run.trainer.groups for n in group["names"]} | {n for n, _ in run.module.named_buffers()}
    save_file({n: v.half() for n, v in run.module.state_dict().items() if n in names}, args.out / f"{name}.safetensors")
    print(f"{name}: {time.perf_counter() - wall:.0f} s, {time.process_time() - cpu:.0f} s of CPU time")
    return run


def shown(title: str, run: fxplug.Run, captions: list[str], **control: Any) -> torch.Tensor:
    images = sampled(run.trainer.task, run.module, captions, **control)
    print(f"  {title}: {listed(recognised(classifier.module, images, captions))}")
    return images


old, new = ([name for name in names for _ in range(EACH)] for names in (OLD, NEW))
classifier, base = trained("classifier"), trained("base")
scratch, _ = shown("base", base, old), shown("base, unseen classes", base, new)
lora = trained("lora", weights := f"weights={args.out.resolve() / 'base.safetensors'}")
taught, _ = shown("LoRA", lora, new), shown("LoRA, the old classes", lora, old)
control, (real, captions, edges) = trained("controlnet", weights), conditions(OLD, EACH)
for title, strength in (("ControlNet off", 0.0), ("ControlNet", 1.0)):
    made = shown(title, control, captions, condition=edges, strength=strength)
    print(f"  {title}: F1 {agreement(made, edges):.3f} of the edges of {len(edges)} images never seen")
rows = (scratch, taught, real, edges, made)
sheet([row[torch.arange(8) * len(row) // 8] for row in rows], args.out / "samples.png")
