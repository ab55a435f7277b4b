"""Time of a call on several processes over that on one: `python benchmarks/parallel_speed.py [--ways ulysses=2] [--turns 5]`.

A PixArt transformer of 28 blocks and reduced width (random weights) with 4096 tokens, gloo, one thread a process. The first
process alone, all together, and all with nothing travelling take turns in one run, by the clock: the last is the machine's own
bound, as cores of one machine share their caches and clocks. With --compiled all are compiled first.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import socket
import statistics
from pathlib import Path
from typing import Any

import record
import timing
import torch
import torch.distributed as dist

import fxplug
from fxplug.core.verifier import as_first_rank

SIZE = {
    "num_layers": 28, "num_attention_heads": 4, "attention_head_dim": 72, "cross_attention_dim": 288, "caption_channels": 64,
}  # fmt: skip
SIDE = 128  # of the latents: a token is 2 x 2 of them


def model(layers: int) -> tuple[Any, dict[str, Any]]:
    from diffusers import PixArtTransformer2DModel

    torch.manual_seed(0)
    made = PixArtTransformer2DModel(**{**SIZE, "num_layers": layers}, sample_size=SIDE, use_additional_conditions=False).eval()
    inputs = {
        "hidden_states": torch.randn(1, 4, SIDE, SIDE), "encoder_hidden_states": torch.randn(1, 77, 64),
        "timestep": torch.tensor([500]), "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}, "return_dict": False,
    }  # fmt: skip
    return made, inputs


def process(rank: int, world: int, port: int, args: argparse.Namespace, ways: dict[str, int], answer: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    made, inputs = model(args.layers)
    one = fxplug.trace(made, (), inputs, check=False).eval()
    plan = fxplug.parallel_plan(one, (), inputs, check=False, **ways)
    many = fxplug.parallelize(one, plan)
    calls = {"one": one, "many": many}
    if args.compiled:
        calls = {name: torch.compile(call, fullgraph=True) for name, call in calls.items()}
    calls["apart"] = calls["many"]
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for index in range(args.turns + 1):
            for name in calls if index % 2 else reversed(calls):
                dist.barrier()
                with as_first_rank(many) if name == "apart" else contextlib.nullcontext():
                    if name != "one" or rank == 0:
                        spent = timing.by_the_clock(lambda call=calls[name]: call(**inputs))
                        times[name] += [spent] * (index > 0)
                dist.barrier()
        away = timing.difference(many(**inputs)[0], one(**inputs)[0]) if rank == 0 else many(**inputs) and 0.0
    if rank == 0:
        one = times["one"]
        rows = {name: timing.spread([n / m for m, n in zip(one, times[name], strict=True)]) for name in ("many", "apart")}
        answer.put({
            "ways": ways, "share": plan.share, "bytes": plan.bytes(), "error": away,
            "ratio": rows["many"], "nothing travels": rows["apart"],
            "milliseconds": {name: statistics.median(found) for name, found in times.items()},
        })  # fmt: skip
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", action="append", help="ulysses=2,batch=2; several times for several")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--layers", type=int, default=SIZE["num_layers"])
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {}
    for text in args.ways or ["ulysses=2", "ring=2"]:
        ways = {axis: int(n) for axis, _, n in (part.partition("=") for part in text.split(","))}
        world = math.prod(ways.values())
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        answer = torch.multiprocessing.get_context("spawn").SimpleQueue()
        torch.multiprocessing.spawn(process, (world, port, args, ways, answer), nprocs=world)
        results[text] = found = answer.get()
        ratio, bound = (timing.shown(found[name]) for name in ("ratio", "nothing travels"))
        print(f"{text}: {ratio} of one process, {bound} with nothing travelling")
        print(f"  {found['share']:.1%} of the work split, error {found['error']:.0e}")
    if args.json:
        record.write(args.json, {"layers": args.layers, "compiled": args.compiled, "results": results})


if __name__ == "__main__":
    main()
