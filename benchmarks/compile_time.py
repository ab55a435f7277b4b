"""The first call of a compiled PixArt with 28 equal blocks, whole and with its blocks compiled once, from cold caches.

python benchmarks/compile_time.py [--train] [--kind KIND] [--json FILE] [--turns N] [--ways WAY ...] [--over WAY]
                                  [--every] [--warm]

Each is measured in a process of its own, who begins alternating, with an empty folder for caches and one compile thread.
Seconds are from the call of torch.compile to the first result, with `--train` to the first gradients of the adapters, or of
everything where there are none; `cpu` is the time of that process and of the C++ compilers it ran, `wall` what one waits.
`ratio` is over the same model whole, or `--over` another way, of the same turn, in CPU time; with `--calls N` `run_ratio` is
that of N later calls of each, in turns in one process. `--every` puts LoRA on every nn.Linear. With `--warm` a second process
finds what the first left in its folder: `hits` are those of torch's cache of differentiated graphs.

plain       diffusers' model                        base, lora, slots            traced; with LoRA of rank 16; in 4 slots
peft        the model with PEFT's LoRA              *_outlined                   lower(outline="auto") of these
lora_fused  fuse(how="fused") of `lora`             *_regional                   compile_repeated_blocks of diffusers
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from timing import cpu_seconds, in_a_process, shown, spread

HOW = {"plain": "regional", "peft": "regional", "base": "outlined", "lora": "outlined", "slots": "outlined"}
WAYS = [*(way for name, how in HOW.items() for way in (name, f"{name}_{how}")), "lora_fused"]
BLOCKS = ["BasicTransformerBlock", "Transformer2DModel"]  # that diffusers' PixArt and UNet do not name themselves


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=["plain", "plain_regional", "lora", "lora_outlined"])
    parser.add_argument("--kind", default="pixart", help="a model of models.py")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--over", choices=WAYS)
    parser.add_argument("--every", action="store_true", help="LoRA on every nn.Linear")
    parser.add_argument("--warm", action="store_true", help="a second time, with what the first has left")
    parser.add_argument("--calls", type=int, default=0, help="turns in which later calls are compared")
    parser.add_argument("--alone", choices=WAYS, help="in this process, for the others")
    options = parser.parse_args()
    if options.alone:
        measure = later_calls if options.calls else first_call
        print(json.dumps(measure(options)))
        return
    from record import write

    found: list[dict[str, Any]] = []
    calls, options.calls = options.calls, 0
    for index in range(options.turns):
        order = options.ways if index % 2 == 0 else list(reversed(options.ways))
        found.append({way: alone(way, options) for way in order})
    rows: dict[str, Any] = {}
    for way in options.ways:
        whole, _, how = way.partition("_")
        over, text = options.over or whole, ""
        rows[way] = row_of(found, way, over)
        if over in options.ways and way != over:
            text = f"  {shown(rows[way]['ratio'])} of {over}"
        if options.warm:
            rows[way]["warm"] = row_of([{name: turn[name]["warm"] for name in turn} for turn in found], way, over)
            text += f"; warm {rows[way]['warm']['cpu']['median']:.1f} s CPU, {rows[way]['warm']['hits']} hits"
        if how and calls:
            options.calls = calls
            rows[way]["run_ratio"] = alone(way, options)[way]["ratio"]
            text += f"; a call {shown(rows[way]['run_ratio'])}"
        print(f"{way:15} {rows[way]['cpu']['median']:6.1f} s CPU {rows[way]['wall']['median']:6.1f} s{text}", flush=True)
    if options.json:
        write(options.json, {"model": options.kind, "train": options.train, "rows": rows})


def row_of(found: list[dict[str, Any]], way: str, over: str) -> dict[str, Any]:
    """The spread of what each turn has found of a way, and of the ratio over another one where that was measured."""
    row: dict[str, Any] = {key: spread([turn[way][key] for turn in found]) for key in ("cpu", "wall")}
    if over in found[0]:
        row["ratio"] = spread([turn[way]["cpu"] / turn[over]["cpu"] for turn in found])
    return {**row, "hits": found[-1][way].get("hits")}


def alone(way: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [__file__, "--kind", options.kind, "--alone", way, "--calls", str(options.calls)]
    command += [f"--{name}" for name in ("train", "every") if getattr(options, name)]
    with tempfile.TemporaryDirectory() as empty:
        settings = {"TORCHINDUCTOR_CACHE_DIR": empty, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        found: dict[str, Any] = in_a_process(*command, **settings)
        if options.warm and not options.calls:
            found["warm"] = in_a_process(*command, **settings)
    if not options.calls:
        print(f"    {way:15} {found['cpu']:6.1f} s CPU {found['wall']:6.1f} s", flush=True)
    return found


def first_call(options: argparse.Namespace) -> dict[str, float]:
    import torch
    from torch._dynamo.utils import counters

    module, step = made(options, options.alone)
    for _ in range(2):
        step(module)  # what is imported and allocated once
    cpu, wall = cpu_seconds(), time.perf_counter()
    step(compiled(module, options.alone))
    torch.cuda.synchronize() if torch.cuda.is_available() else None
    cpu, wall = cpu_seconds() - cpu, time.perf_counter() - wall
    return {"cpu": cpu, "wall": wall, "hits": counters["aot_autograd"]["autograd_cache_hit"]}


def later_calls(options: argparse.Namespace) -> dict[str, Any]:
    """Calls of a model by blocks beside those of the same model whole."""
    from timing import turns

    whole = options.alone.partition("_")[0]
    ways = {}
    for name in (whole, options.alone):
        module, step = made(options, name)
        ways[name] = partial(step, compiled(module, name))
    return turns(ways, options.calls, whole)


def made(options: argparse.Namespace, way: str) -> tuple[Any, Any]:
    """A model, and what calls it, compiled or not."""
    import models
    import torch

    import fxplug

    of, train = models.subject(options.kind), options.train
    if options.every:
        of.layers = [name for name, layer in of.module.named_modules() if isinstance(layer, torch.nn.Linear)]
    module: Any = of.module
    name, _, how = way.partition("_")
    if name == "peft":
        with tempfile.TemporaryDirectory() as folder:
            injected = models.in_peft if options.kind.startswith("vit") else models.in_diffusers
            module = injected(of, {"one": models.adapter(of, Path(folder))})
    elif name != "plain":
        module = models.traced(of)
    if name in ("lora", "slots"):
        module = models.ours(of, module, 4 if name == "slots" else 0)
    for path, parameter in module.named_parameters():
        parameter.requires_grad_(train and (name in ("plain", "base") or "lora" in path))
    if how == "outlined":
        module = fxplug.lower(module, fuse=None, outline="auto")
    elif how == "fused":
        module = fxplug.fuse(module, "fused")

    def step(call: Any) -> None:
        with torch.set_grad_enabled(train):
            out = models.output(call(**of.inputs))
        if train:
            out.square().mean().backward()
            for parameter in module.parameters():
                parameter.grad = None

    return module, step


def compiled(module: Any, way: str) -> Any:
    import torch

    if not way.endswith("regional"):
        return torch.compile(module, fullgraph=True)
    module._repeated_blocks = module._repeated_blocks or BLOCKS
    module.compile_repeated_blocks(fullgraph=True)
    return module


if __name__ == "__main__":
    main()
