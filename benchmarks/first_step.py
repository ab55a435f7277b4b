"""The first compiled training step with LoRA of rank 16, from a cold and from a warm cache: fxplug and PEFT.

python benchmarks/first_step.py [--json FILE] [--turns N] [--only vit|unet|tiny ...] [--ways WAY ...] [--threads N]

vit, unet   the models of `train_step.py`, with LoRA on every nn.Linear; tiny is ViT-tiny
Each way runs in processes of its own, who begins alternating: one with an empty folder for torch's caches of compiled code,
one more that finds what the first left. Seconds are from the call of torch.compile to the end of the first backward pass.
`cpu` is the time of that process and of the C++ compilers it ran, with one compile thread; `wall` what one waits. Ratios are
over PEFT's of the same turn. `hits` and `misses` are those of torch's cache of differentiated graphs, `bypassed` graphs that it
does not take.

peft     PEFT's modules          fxplug   the graph as `apply` leaves it          fused   the same after fuse(how="fused")
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from timing import cpu_seconds, in_a_process, shown, spread

WAYS = ["peft", "fxplug", "fused"]
KINDS = ["vit", "unet", "tiny"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--only", choices=KINDS, nargs="+", default=KINDS[:2])
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=WAYS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--alone", help="in this process, for the others")
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(first_step(options.only[0], options.alone)))
        return
    rows = {kind: measure(kind, options) for kind in options.only}
    if options.json:
        from record import write

        write(options.json, {"threads": options.threads, "rows": rows})


def measure(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    turns: list[dict[str, dict[str, Any]]] = []
    for index in range(options.turns):
        found = {}
        for way in options.ways if index % 2 == 0 else reversed(options.ways):
            with tempfile.TemporaryDirectory() as folder:
                threads = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": str(options.threads)}
                command, settings = (__file__, "--only", kind, "--alone", way), {"TORCHINDUCTOR_CACHE_DIR": folder, **threads}
                found[way] = {state: in_a_process(*command, **settings) for state in ("cold", "warm")}
        turns.append(found)
    row: dict[str, Any] = {}
    for way in options.ways:
        row[way] = {}
        for state in ("cold", "warm"):
            each = [turn[way][state] for turn in turns]
            row[way][state] = {"cache": each[-1]["cache"]}
            row[way][state].update((key, spread([one[key] for one in each])) for key in ("cpu", "wall"))
            if "peft" in options.ways:
                ratios = [turn[way][state]["cpu"] / turn["peft"][state]["cpu"] for turn in turns]
                row[way][state]["ratio"] = spread(ratios)
                seconds, cache = row[way][state]["cpu"]["median"], row[way][state]["cache"]
                print(f"{kind:5} {way:7} {state}  {seconds:6.1f} s CPU  {shown(spread(ratios))}  {cache}", flush=True)
    return row


def first_step(kind: str, way: str) -> dict[str, Any]:
    import peft
    import timm
    import torch
    import train_step
    from torch import nn
    from torch._dynamo.utils import counters

    import fxplug

    torch.manual_seed(0)
    module: Any = timm.create_model("vit_tiny_patch16_224", num_classes=10) if kind == "tiny" else train_step.base(kind)
    inputs, _ = train_step.example("vit" if kind == "tiny" else kind, train_step.BATCH.get(kind, 4))
    layers = [name for name, layer in module.train().named_modules() if isinstance(layer, nn.Linear)]
    if way == "peft":
        module = peft.get_peft_model(module, peft.LoraConfig(r=16, lora_alpha=16, target_modules=layers)).train()
    else:
        lora = fxplug.load_pass("lora", at="all-linear", rank=16)
        module = fxplug.apply(fxplug.trace(module, kwargs=inputs), lora).train()
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name.startswith("lora."))
        module = fxplug.fuse(module, "fused") if way == "fused" else module
    cpu, wall = cpu_seconds(), time.perf_counter()
    result = torch.compile(module, fullgraph=True)(**inputs)
    (result if isinstance(result, torch.Tensor) else result[0]).square().mean().backward()
    cpu, wall = cpu_seconds() - cpu, time.perf_counter() - wall
    names = {"hits": "hit", "misses": "miss", "bypassed": "bypass"}
    cache = {name: counters["aot_autograd"][f"autograd_cache_{key}"] for name, key in names.items()}
    return {"cpu": cpu, "wall": wall, "cache": cache}


if __name__ == "__main__":
    main()
