"""The first call of a compiled PixArt with 28 equal blocks, whole and with its blocks as nested regions, from cold caches.

python benchmarks/compile_time.py [--json FILE] [--turns N] [--ways WAY ...]

Each is measured in a process of its own, who begins alternating, without caches of compiled code and with one compile thread.
Seconds are from the call of torch.compile to the first result; `cpu` is the time of that process and of the C++ compilers it
ran, `wall` what one waits. The ratio is over the same model whole, of the same turn, in CPU time.

plain       diffusers' model                        base, lora, slots            traced; with LoRA of rank 16; in 4 slots
*_nested    lower(outline="auto") of these          plain_regional  compile_repeated_blocks of diffusers
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from timing import shown, spread

WAYS = ["plain", "plain_regional", "base", "base_nested", "lora", "lora_nested", "slots", "slots_nested"]
OVER = {"plain_regional": "plain", "base_nested": "base", "lora_nested": "lora", "slots_nested": "slots", "base": "plain"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=["base", "base_nested", "lora", "lora_nested"])
    parser.add_argument("--kind", default="pixart", help="a model of models.py")
    parser.add_argument("--alone", choices=WAYS, help="in this process, for the others")
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(first_call(options.kind, options.alone)))
        return
    from record import write

    found: list[dict[str, Any]] = []
    for index in range(options.turns):
        order = options.ways if index % 2 == 0 else list(reversed(options.ways))
        found.append({way: in_a_process(options.kind, way) for way in order})
    rows: dict[str, Any] = {}
    for way in options.ways:
        rows[way] = {key: spread([turn[way][key] for turn in found]) for key in ("cpu", "wall", "call")}
        text = ""
        if OVER.get(way) in options.ways:
            rows[way]["ratio"] = spread([turn[way]["cpu"] / turn[OVER[way]]["cpu"] for turn in found])
            rows[way]["run_ratio"] = spread([turn[way]["call"] / turn[OVER[way]]["call"] for turn in found])
            text = f"  {shown(rows[way]['ratio'])} of {OVER[way]}; a call {shown(rows[way]['run_ratio'])}"
        print(f"{way:15} {rows[way]['cpu']['median']:6.1f} s CPU {rows[way]['wall']['median']:6.1f} s{text}", flush=True)
    if options.json:
        write(options.json, {"model": options.kind, "rows": rows})


def in_a_process(kind: str, way: str) -> dict[str, float]:
    environment = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, __file__, "--kind", kind, "--alone", way]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"    {way:15} {found['cpu']:6.1f} s CPU {found['wall']:6.1f} s", flush=True)
    return found


def first_call(kind: str, way: str) -> dict[str, float]:
    import models
    import torch
    from timing import milliseconds, turns

    import fxplug

    of = models.subject(kind)
    module: Any = of.module
    name, _, how = way.partition("_")
    if name != "plain":
        module = models.traced(of)
    if name in ("lora", "slots"):
        module = models.ours(of, module, 4 if name == "slots" else 0).requires_grad_(False)
    if how == "nested":
        module = fxplug.lower(module, fuse=None, outline="auto")
    with torch.no_grad():
        for _ in range(2):
            module(**of.inputs)  # what is imported and allocated once
        cpu, wall = used(), time.perf_counter()
        if how == "regional":
            module.compile_repeated_blocks(fullgraph=True)
        else:
            module = torch.compile(module, fullgraph=True)
        module(**of.inputs)
        torch.cuda.synchronize() if torch.cuda.is_available() else None
        cpu, wall = used() - cpu, time.perf_counter() - wall
        call = turns({"call": lambda: milliseconds(lambda: module(**of.inputs))}, 5, "call")["call"]["milliseconds"]
    return {"cpu": cpu, "wall": wall, "call": call}


def used() -> float:
    """Seconds of CPU time of this process and of those that it waited for."""
    found = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(row.ru_utime + row.ru_stime for row in found)


if __name__ == "__main__":
    main()
