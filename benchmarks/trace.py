"""What tracing, finding, applying and verifying cost: `python benchmarks/trace.py [--json FILE] [--only sd15|sdxl|sites]`.

sd15   the UNet of Stable Diffusion 1.5 on the meta device, traced here and by torch.export in turn, and the memory it takes
sdxl   LoRA on every Linear and convolution of the SDXL UNet (2.6 billion parameters, meta device), step by step
sites  the cost of a site in stacks of 100 to 5000 layers
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import write
from timing import in_a_process, shown, spread
from torch import nn

import fxplug
from fxplug.core.spec.pass_file import Match, Pass, Rule

PAIRS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=[*MEASURED, "memory"], help="one of the three")
    options = parser.parse_args()
    if options.only == "memory":
        print(json.dumps(peak()))
        return
    rows = {name: measure() for name, measure in MEASURED.items() if options.only in (None, name)}
    if options.json:
        write(options.json, rows)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    gc.collect()
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


# --- Stable Diffusion 1.5


def unet_of(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    """A UNet of `models.py` on the meta device, and its inputs for a batch of 2."""
    import models

    of = models.subject(kind, 2, torch.float32, "meta")
    return of.module, of.inputs


def sd15() -> dict[str, Any]:
    unet, inputs = unet_of("sd15")
    pairs = []
    for index in range(PAIRS + 1):
        _, ours = timed(lambda: fxplug.trace(unet, (), inputs))
        _, theirs = timed(lambda: torch.export.export(unet, (), inputs, strict=False))
        if index:  # the first pair warms up
            pairs.append((ours, theirs))
            print(f"sd15   trace {ours:6.2f} s   torch.export {theirs:6.2f} s   ratio {ours / theirs:.2f}", flush=True)
    ratio = spread([ours / theirs for ours, theirs in pairs])
    megabytes = statistics.median(in_a_process(__file__, "--only", "memory") for _ in range(3))
    print(f"sd15   ratio {shown(ratio)}, {megabytes:.0f} MB above the imports")
    return {"pairs": pairs, "ratio": ratio, "megabytes": megabytes}


def peak() -> float:
    """Megabytes that tracing takes at its height above what the process held with model, inputs and imports."""
    unet, inputs = unet_of("sd15")
    fxplug.trace(nn.Linear(2, 2), torch.zeros(1, 2))  # the first trace imports the rest of torch
    gc.collect()
    before = memory("VmRSS")
    gm = fxplug.trace(unet, (), inputs)
    assert len(gm.graph.nodes) > 1000
    return memory("VmHWM") - before


def memory(field: str) -> float:
    """Megabytes: VmRSS is what the process holds now, VmHWM the most since it was asked for VmRSS."""
    status = Path("/proc/self/status")
    if not status.exists():  # not Linux: the most that was ever held, imports included
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if field == "VmRSS":
        Path("/proc/self/clear_refs").write_text("5")
    return next(int(line.split()[1]) / 1024 for line in status.read_text().splitlines() if line.startswith(field))


# --- SDXL


def sdxl() -> dict[str, Any]:
    unet, inputs = unet_of("sdxl")
    lora = fxplug.load_pass("lora", rank=16)
    gm, trace = timed(lambda: fxplug.trace(unet, (), inputs))
    sites, find = timed(lambda: fxplug.find(gm, lora))
    new, apply = timed(lambda: fxplug.apply(gm, lora))
    report, verify = timed(lambda: fxplug.verify(gm, new, (), inputs, compile=False))
    seconds = {"trace": trace, "find": find, "apply": apply, "verify": verify, "total": trace + find + apply + verify}
    print(f"sdxl   {report.summary}; {len(sites)} sites")
    print("sdxl   " + "   ".join(f"{name} {value:.2f} s" for name, value in seconds.items()), flush=True)
    return {"sites": len(sites), "parameters": sum(p.numel() for p in unet.parameters()), "seconds": seconds}


# --- cost of a site


def sites(counts: tuple[int, ...] = (100, 500, 1000, 5000), repeats: int = 3) -> dict[str, Any]:
    rows = {count: cost_of_a_site(count, repeats) for count in counts}
    for count, row in rows.items():
        print(f"sites  {count:5d}: " + "   ".join(f"{name} {value:6.0f} us" for name, value in row.items()), flush=True)
    first, last = rows[min(counts)], rows[max(counts)]
    ratios = {name: last[name] / first[name] for name in first}
    print(
        f"sites  {max(counts)} against {min(counts)}: " + "   ".join(f"{name} x{value:.2f}" for name, value in ratios.items())
    )
    return {"microseconds": rows, "ratio": ratios}


def cost_of_a_site(count: int, repeats: int = 3) -> dict[str, float]:
    """Microseconds of each step for each site, the best of `repeats`."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))
    x = torch.randn(2, 4)
    lora = Pass("lora", [Rule(Match("**", module="Linear"), "fxplug.blocks:Lora", options={"rank": 2})])
    gm = fxplug.trace(model, x)
    best: dict[str, float] = {}
    for _ in range(repeats):
        _, find = timed(lambda: fxplug.find(gm, lora))
        new, apply = timed(lambda: fxplug.apply(gm, lora))
        _, verify = timed(lambda new=new: fxplug.verify(gm, new, x, compile=False))
        for name, seconds in (("find", find), ("apply", apply), ("verify", verify)):
            best[name] = min(best.get(name, 1e9), 1e6 * seconds / count)
    return best


MEASURED = {"sd15": sd15, "sdxl": sdxl, "sites": sites}

if __name__ == "__main__":
    main()
