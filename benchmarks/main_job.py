"""CPU seconds of trace, find, apply, verify, save and load, beside another checkout: `python benchmarks/main_job.py OTHER`.

A ViT-S with values, and SD 1.5's UNet on the meta device without save and load, each with LoRA. Both checkouts run in turn,
each time in a process of its own with one thread, and the medians are printed with their ratios. `--runs 3` says how often,
`--only vit|unet` which.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

STEPS = ("trace", "find", "apply", "verify", "save", "load")


def model(name):
    import torch

    if name == "vit":
        import timm

        return timm.create_model("vit_small_patch16_224").eval(), (torch.randn(1, 3, 224, 224),)
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        unet = UNet2DConditionModel(
            cross_attention_dim=768, attention_head_dim=8, block_out_channels=(320, 640, 1280, 1280)
        ).eval()
        return unet, (torch.randn(1, 4, 64, 64), torch.tensor([1]), torch.randn(1, 77, 768))


def measure(name):
    """Seconds of each step, as one line of JSON."""
    warnings.simplefilter("ignore")
    import fxplug

    host, inputs = model(name)
    seconds = {}

    def timed(step, function):
        begun = time.process_time()
        result = function()
        seconds[step] = time.process_time() - begun
        return result

    gm = timed("trace", lambda: fxplug.trace(host, inputs))
    lora = fxplug.load_pass("lora")
    sites = timed("find", lambda: fxplug.find(gm, lora))
    new = timed("apply", lambda: fxplug.apply(gm, sites))
    timed("verify", lambda: fxplug.verify(gm, new, inputs))
    if name == "vit":
        with tempfile.TemporaryDirectory() as folder:
            timed("save", lambda: fxplug.save(new, f"{folder}/module"))
            timed("load", lambda: fxplug.load(f"{folder}/module"))
    print(json.dumps(seconds))


def run(checkout, name):
    env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import main_job; main_job.measure({name!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=checkout, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", choices=("vit", "unet"))
    given = parser.parse_args()
    checkouts = {"here": Path(__file__).resolve().parents[1], "other": given.other.resolve()}
    for name in [given.only] if given.only else ["vit", "unet"]:
        rows = {key: [] for key in checkouts}
        for _ in range(given.runs):
            for key, checkout in checkouts.items():
                row = run(checkout, name)
                rows[key].append({**row, "sum": sum(row.values())})
        print(f"{name:8}{'here':>10}{'other':>10}{'ratio':>10}")
        for step in (*(step for step in STEPS if step in rows["here"][0]), "sum"):
            here, other = (statistics.median(row[step] for row in rows[key]) for key in ("here", "other"))
            print(f"{step:8}{here:10.2f}{other:10.2f}{here / other:10.2f}")


if __name__ == "__main__":
    main()
