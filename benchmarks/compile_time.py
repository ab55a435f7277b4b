"""The first call of a compiled PixArt with 28 equal blocks, whole and with its blocks compiled once, from cold caches.

python benchmarks/compile_time.py [--train] [--kind KIND] [--json FILE] [--turns N] [--ways WAY ...]

Each is measured in a process of its own, who begins alternating, with an empty folder for caches and one compile thread.
Seconds are from the call of torch.compile to the first result, with `--train` to the first gradients of the adapters, or of
everything where there are none; `cpu` is the time of that process and of the C++ compilers it ran, `wall` what one waits.
`ratio` is over the same model whole, of the same turn, in CPU time; with `--calls N` `run_ratio` is that of N later calls of
each, in turns in one process.

plain       diffusers' model                        base, lora, slots            traced; with LoRA of rank 16; in 4 slots
peft        diffusers' model with PEFT's LoRA       *_outlined                   lower(outline="auto") of these
                                                    *_regional                   compile_repeated_blocks of diffusers
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
WAYS = [way for name, how in HOW.items() for way in (name, f"{name}_{how}")]
BLOCKS = ["BasicTransformerBlock", "Transformer2DModel"]  # that diffusers' PixArt and UNet do not name themselves


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=["plain", "plain_regional", "lora", "lora_outlined"])
    parser.add_argument("--kind", default="pixart", help="a model of models.py")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--calls", type=int, default=0, help="turns in which later calls are compared")
    parser.add_argument("--alone", choices=WAYS, help="in this process, for the others")
    options = parser.parse_args()
    if options.alone:
        measure = later_calls if options.calls else first_call
        print(json.dumps(measure(options.kind, options.alone, options.train, options.calls)))
        return
    from record import write

    found: list[dict[str, Any]] = []
    calls, options.calls = options.calls, 0
    for index in range(options.turns):
        order = options.ways if index % 2 == 0 else list(reversed(options.ways))
        found.append({way: alone(way, options) for way in order})
    rows: dict[str, Any] = {}
    for way in options.ways:
        rows[way] = {key: spread([turn[way][key] for turn in found]) for key in ("cpu", "wall")}
        text, (whole, _, how) = "", way.partition("_")
        if how and whole in options.ways:
            rows[way]["ratio"] = spread([turn[way]["cpu"] / turn[whole]["cpu"] for turn in found])
            text = f"  {shown(rows[way]['ratio'])} of {whole}"
        if how and calls:
            options.calls = calls
            rows[way]["run_ratio"] = alone(way, options)[way]["ratio"]
            text += f"; a call {shown(rows[way]['run_ratio'])}"
        print(f"{way:15} {rows[way]['cpu']['median']:6.1f} s CPU {rows[way]['wall']['median']:6.1f} s{text}", flush=True)
    if options.json:
        write(options.json, {"model": options.kind, "train": options.train, "rows": rows})


def alone(way: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [__file__, "--kind", options.kind, "--alone", way, "--calls", str(options.calls)]
    command += ["--train"] if options.train else []
    with tempfile.TemporaryDirectory() as empty:
        settings = {"TORCHINDUCTOR_CACHE_DIR": empty, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        found: dict[str, Any] = in_a_process(*command, **settings)
    if not options.calls:
        print(f"    {way:15} {found['cpu']:6.1f} s CPU {found['wall']:6.1f} s", flush=True)
    return found


def first_call(kind: str, way: str, train: bool, _: int) -> dict[str, float]:
    import torch

    module, step = made(kind, way, train)
    for _ in range(2):
        step(module)  # what is imported and allocated once
    cpu, wall = cpu_seconds(), time.perf_counter()
    step(compiled(module, way))
    torch.cuda.synchronize() if torch.cuda.is_available() else None
    return {"cpu": cpu_seconds() - cpu, "wall": time.perf_counter() - wall}


def later_calls(kind: str, way: str, train: bool, count: int) -> dict[str, Any]:
    """Calls of a model by blocks beside those of the same model whole."""
    from timing import turns

    whole = way.partition("_")[0]
    ways = {}
    for name in (whole, way):
        module, step = made(kind, name, train)
        ways[name] = partial(step, compiled(module, name))
    return turns(ways, count, whole)


def made(kind: str, way: str, train: bool) -> tuple[Any, Any]:
    """A model, and what calls it, compiled or not."""
    import models
    import torch

    import fxplug

    of = models.subject(kind)
    module: Any = of.module
    name, _, how = way.partition("_")
    if name == "peft":
        with tempfile.TemporaryDirectory() as folder:
            module = models.in_diffusers(of, {"one": models.adapter(of, Path(folder))})
    elif name != "plain":
        module = models.traced(of)
    if name in ("lora", "slots"):
        module = models.ours(of, module, 4 if name == "slots" else 0)
    for path, parameter in module.named_parameters():
        parameter.requires_grad_(train and (name in ("plain", "base") or "lora" in path))
    if how == "outlined":
        module = fxplug.lower(module, fuse=None, outline="auto")

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
