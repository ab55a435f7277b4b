"""A diffusion transformer that no library has, trained on garments, drawn by many processes in its unchanged pipeline.

The first run trains it (a few minutes) and keeps it in out/parallel. Each row of the tables is the picture of one method beside
that of one process. `--quick` takes two steps on a few images, and draws little.
"""

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import fxplug

HERE, OUT = Path(__file__).resolve().parent, Path("out/parallel-quick" if "--quick" in sys.argv else "out/parallel")
for folder in ("fashion", "parallel"):
    sys.path.insert(0, str(HERE / folder))  # the configurations name what lies beside them
from drawing import EXACT, STALE, by_processes, drawn, judged  # noqa: E402

quick = ["train.steps=2", "train.batch=8"] if "--quick" in sys.argv else []
os.environ |= {"FASHION_MNIST": str(HERE / "fashion/few")} if quick else {}
each, steps, worlds = (1, 4, (2,)) if quick else (8, 20, (2, 4))
config = fxplug.load_config(HERE / "parallel/dit.yaml", quick)
if not (OUT / "dit.safetensors").is_file():
    OUT.mkdir(parents=True, exist_ok=True)
    run = fxplug.train(config, out=OUT / "training", quiet=bool(quick), resume=(OUT / "training/checkpoints").is_dir())
    save_file(run.module.state_dict(), OUT / "dit.safetensors")
gm = fxplug.rewrite(config).module.eval()
gm.load_state_dict(load_file(OUT / "dit.safetensors"))
labels = torch.arange(10).repeat_interleave(each)
inputs = torch.randn(2 * len(labels), 4, 14, 14), torch.full((2 * len(labels),), 500.0), torch.cat([labels, labels])

one = drawn(gm, labels, steps)
print(f"one process: {judged(one, labels):.1%} of {len(one)} pictures recognised")
torch.save({"labels": labels, "steps": steps, "one": one}, OUT / "wanted.pt")
for world in worlds:
    print(f"\n{world} processes                  error  bytes a step  share split")
    plans = [fxplug.parallel_plan(gm, inputs, **ways) for ways in EXACT[world].values()]
    models = [fxplug.save(fxplug.parallelize(gm, plan), OUT / f"model-{number}") for number, plan in enumerate(plans)]
    for name, plan, pictures in zip(EXACT[world], plans, by_processes(world, OUT, models), strict=True):
        away = max((found - one).abs().max().item() for found in pictures)
        print(f"{name:26}{away:8.0e} {plan.bytes():13,} {plan.share:12.1%}")
for name in ("2 stages, stale patches", "no stages, stale gathers"):
    print(f"\n{name:26}distance   recognised")
    for patches, warmup in STALE[: 2 if quick else None]:
        if name.startswith("2"):
            many = fxplug.pipefusion(gm, inputs, stages=2, patches=patches, warmup=warmup)
        else:
            many = fxplug.stale_sequence(gm, inputs, ways=patches, warmup=warmup)
        found = drawn(many, labels, steps)
        away = (found - one).square().mean().sqrt().item()
        print(f"{patches} patches, warm-up {warmup:2}   {away:8.3f} {judged(found, labels):12.1%}")
