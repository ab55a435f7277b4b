"""Steps of a step cache over those of the plain model: DeepCache on the UNet, first-block cache on PixArt.

python benchmarks/step_cache.py [--json FILE] [--turns N] [--only deepcache|first_block_cache] [--full] [--eager]

Models are those of `models.py`: unet and pixart, with --full sd15 and pixart-1k, both with LoRA of rank 16 on their attention.
The ways take turns, ratios are over `plain`, the same module without the cache, of the same turn.

full, shallow     the two graphs of DeepCache
first + rest      a full step of a first-block cache; first + short is one that takes the rest from an earlier step
run               20 steps of StepCache with Every(2), over 20 of the plain module
`difference` is that of a shallow step with the values that the same step kept, over the largest value.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import models
import torch
from record import write
from timing import Call, difference, shown, turns

import fxplug

KINDS = {"deepcache": ("unet", "sd15"), "first_block_cache": ("pixart", "pixart-1k")}
STEPS = 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--only", choices=list(KINDS))
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--eager", action="store_true", help="only without torch.compile")
    options = parser.parse_args()
    rows: dict[str, Any] = {}
    for name in [options.only] if options.only else list(KINDS):
        rows[name] = {how: measure(name, how, options) for how in ("eager", "compiled")[: 2 - options.eager]}
        if options.json:
            write(options.json, {"rows": rows})


@torch.no_grad()
def measure(name: str, how: str, options: argparse.Namespace) -> dict[str, Any]:
    kind = KINDS[name][options.full]
    of = models.subject(kind)
    with tempfile.TemporaryDirectory() as folder:
        plain = models.with_plain(of, models.traced(of), models.adapter(of, Path(folder)))
    marked = fxplug.apply(plain, fxplug.load_pass(name))
    cache = fxplug.StepCache(marked, fxplug.Every(2) if name == "deepcache" else None)
    timed = fxplug.StepCache(marked, fxplug.Every(2))
    if how == "compiled":
        cache.compile()
        timed.compile()
        plain.compile(fullgraph=True)
    wanted = models.output(plain(**of.inputs))
    calls: dict[str, Call] = {"plain": lambda: plain(**of.inputs)}
    if name == "deepcache":
        full, kept = cache.full(**of.inputs)
        again = cache.shallow(**of.inputs, **kept)
        calls["full"] = lambda: cache.full(**of.inputs)
        calls["shallow"] = lambda: cache.shallow(**of.inputs, **kept)
    else:
        carried = cache.first(**of.inputs)[1]
        full, kept = cache.rest(**carried)
        again = cache.short(**carried, **kept)
        calls["first + rest"] = lambda: cache.rest(**cache.first(**of.inputs)[1])
        calls["first + short"] = lambda: cache.short(**cache.first(**of.inputs)[1], **kept)
    row = turns(calls, options.turns, "plain")
    rows = {"away": {"full": difference(models.output(full), wanted), "shallow": difference(models.output(again), wanted)}}
    if "timestep" in of.inputs:
        moments = [torch.full_like(of.inputs["timestep"], 999 - 40 * step) for step in range(STEPS)]

        def run(module: Any) -> Call:
            return lambda: [module(**{**of.inputs, "timestep": moment}) for moment in moments]

        run(timed)()
        row["run"] = turns({"plain": run(plain), "run": run(timed)}, max(options.turns // 3, 1), "plain", warm=0)["run"]
    for way, found in row.items():
        print(f"{name:18} {kind:7} {how:8} {way:14} {found['milliseconds']:8.1f} ms  {shown(found['ratio'])}", flush=True)
    print(f"{'':36} difference: full {rows['away']['full']:.0e}, shallow {rows['away']['shallow']:.0e}", flush=True)
    return {"model": kind, "ways": row, **rows}


if __name__ == "__main__":
    main()
