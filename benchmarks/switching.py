"""What it costs to switch, load and merge adapters at the size of Stable Diffusion 1.5, how far merging drifts, and memory.

python benchmarks/switching.py [--json FILE] [--turns N] [--only NAME ...] [--small]

The UNet of SD 1.5 (128 layers of attention, random weights, bfloat16; --small takes a small one) with two adapters of rank
16 on all of them, in 4 slots. Milliseconds are those that a caller waits, medians with their spread, one call after another;
ratios are over fxplug's `use`, and over fxplug's `load` for what loads. A module is not called in between; what the peers'
changes cost a compiled model comes on top, see recompiles.py. Files lie in the page cache.

use            fxplug: adapters.use(name)             live_use     the same of lower(merge="live"), which writes all weights
load           fxplug: adapters.load(name, file)      live_load    the same of the live merge
merge          fxplug: merge, then unmerge            peft_merge   merge_adapter, then unmerge_adapter
peft_use       set_adapter                            peft_load    load_adapter, under a new name
peft_hotswap   hotswap_adapter
diffusers_use  set_adapters                           diffusers_load, diffusers_hotswap   load_lora_adapter
diffusers_merge  fuse_lora, then unfuse_lora

Drift: 1000 different adapters are merged and taken back in a small UNet in bfloat16, by fxplug's merge and unmerge, by its live
merge, and by PEFT; it is the norm of the change of all weights over their norm. Memory: bytes of a fifth slot over those of
an adapter of rank 16.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import torch
from models import Subject
from peft.utils import set_peft_model_state_dict
from peft.utils.hotswap import hotswap_adapter
from record import write
from timing import by_the_clock, spread
from torch import Tensor, nn

import fxplug

CYCLES = 1000
GROUPS = ["fxplug", "live", "merge", "peft", "diffusers", "drift", "memory"]
Change = Callable[[], Any]
Changes = dict[str, list[Change]]  # what is timed, and behind it what puts things back


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--cycles", type=int, default=CYCLES, help="of the drift")
    parser.add_argument("--only", choices=GROUPS, nargs="+", default=GROUPS)
    parser.add_argument("--small", action="store_true", help="a small UNet in the place of SD 1.5's")
    options = parser.parse_args()
    kind = "small" if options.small else "sd15"
    results: dict[str, Any] = {"model": kind, "dtype": "bfloat16"}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        if set(options.only) - {"drift"}:
            of = models.subject(kind, dtype=torch.bfloat16)
            folders = {name: models.adapter(of, Path(folder) / name, seed=seed) for seed, name in enumerate(("ink", "film"))}
            base = models.traced(of)
            results["layers"] = len(of.layers)
            results["milliseconds"] = times(of, base, folders, options)
            if "memory" in options.only:
                results["memory"] = memory(of, base, folders["ink"])
            del of, base
            gc.collect()
        if "drift" in options.only:
            results["drift"] = drift(options.cycles)
    if options.json:
        write(options.json, results)


# --- time


def times(of: Subject, base: Any, folders: dict[str, Path], options: argparse.Namespace) -> dict[str, Any]:
    makers = {"fxplug": slots, "live": live, "merge": merged, "peft": in_peft, "diffusers": in_diffusers}
    rows: dict[str, Any] = {}
    for name, make in makers.items():
        if name not in options.only:
            continue
        for way, changes in make(of, base, folders).items():
            found = []
            for _ in range(options.turns + 2):
                found.append(by_the_clock(changes[0]))
                for back in changes[1:]:
                    back()
            rows[way] = spread(found[2:])
        gc.collect()
    for way, row in rows.items():
        over = "load" if way.endswith(("load", "hotswap")) else "use"
        if over in rows:
            row["ratio"] = row["median"] / rows[over]["median"]
        text = f"  x{row['ratio']:.2f} of {over}" if "ratio" in row else ""
        print(f"{way:18} {row['median']:9.3f} ms ({row['low']:.3f} to {row['high']:.3f}){text}", flush=True)
    return rows


def slots(of: Subject, base: Any, folders: dict[str, Path], prefix: str = "") -> Changes:
    new = models.with_slots(of, base, folders, use="ink")
    adapters = (fxplug.lower(new, merge="live", fuse=None) if prefix else new).adapters
    return {
        f"{prefix}use": [lambda: adapters.use("film"), lambda: adapters.use("ink")],
        f"{prefix}load": [lambda: adapters.load("chalk", folders["film"]), lambda: adapters.unload("chalk")],
    }


def live(of: Subject, base: Any, folders: dict[str, Path]) -> Changes:
    return slots(of, base, folders, "live_")


def merged(of: Subject, base: Any, folders: dict[str, Path]) -> Changes:
    new = models.with_slots(of, base, folders, use="ink")
    return {"merge": [lambda: fxplug.unmerge(fxplug.merge(new))]}


def in_peft(of: Subject, base: Any, folders: dict[str, Path]) -> Changes:
    made = models.in_peft(of, folders, models.with_own(models.copied(of.module), of.layers))
    return {
        "peft_use": [
            lambda: made.set_adapter("film", inference_mode=True),
            lambda: made.set_adapter("ink", inference_mode=True),
        ],
        "peft_load": [
            lambda: made.load_adapter(str(folders["film"]), adapter_name="chalk"),
            lambda: made.delete_adapter("chalk"),
        ],
        "peft_hotswap": [lambda: hotswap_adapter(made, str(folders["film"]), "ink", torch_device=models.DEVICE)],
        "peft_merge": [lambda: (made.merge_adapter(), made.unmerge_adapter())],
    }


def in_diffusers(of: Subject, base: Any, folders: dict[str, Path]) -> Changes:
    made = models.in_diffusers(of, folders)
    own = Subject(of.kind, models.with_own(models.copied(of.module), of.layers), of.inputs, of.layers)
    fused = models.in_diffusers(own, {"ink": folders["ink"]})

    def load(name: str, hotswap: bool = False) -> Change:
        return lambda: made.load_lora_adapter(
            models.weights_of(folders["film"]), prefix=None, adapter_name=name, hotswap=hotswap
        )

    return {
        "diffusers_use": [lambda: made.set_adapters("film"), lambda: made.set_adapters("ink")],
        "diffusers_load": [load("chalk"), lambda: made.delete_adapters("chalk")],
        "diffusers_hotswap": [load("ink", hotswap=True)],
        "diffusers_merge": [lambda: (fused.fuse_lora(), fused.unfuse_lora())],
    }


# --- drift


def drift(cycles: int) -> dict[str, Any]:
    of = models.subject("small", dtype=torch.bfloat16)
    base = models.traced(of)
    rows = {"cycles": cycles, "relative": {}, "equal": {}}
    for way, cycle in (("fxplug", fold_cycle), ("live", live_cycle), ("peft", peft_cycle)):
        module, one = cycle(of, base)
        before = state(module, of.layers)
        for index in range(cycles):
            one(models.random_adapter(of, of.layers, seed=index))
        after = state(module, of.layers)
        change = sum(float((after[k].double() - before[k].double()).square().sum()) for k in before) ** 0.5
        rows["relative"][way] = change / sum(float(v.double().square().sum()) for v in before.values()) ** 0.5
        rows["equal"][way] = all(torch.equal(after[k], before[k]) for k in before)
        print(f"drift after {cycles}  {way:8} {rows['relative'][way]:.2e}", flush=True)
    return rows


def state(module: Callable[[], nn.Module], layers: list[str]) -> dict[str, Tensor]:
    """The weights of the layers as they are read now, as copies."""
    found = dict(module().named_parameters())
    names = {name: next(k for k in found if k.endswith((f"{name}.weight", f"{name}.base_layer.weight"))) for name in layers}
    return {name: found[key].detach().clone() for name, key in names.items()}


def fold_cycle(of: Subject, base: Any) -> tuple[Callable[[], nn.Module], Callable[[Any], None]]:
    new = models.with_slots(of, base, {}, 1)
    held = [new]

    def one(adapter: dict[str, Tensor]) -> None:
        held[0].adapters.load("ink", adapter)
        held[0].adapters.use("ink")
        held[0] = fxplug.unmerge(fxplug.merge(held[0]))
        held[0].adapters.unload("ink")

    return lambda: held[0], one


def live_cycle(of: Subject, base: Any) -> tuple[Callable[[], nn.Module], Callable[[Any], None]]:
    new = fxplug.lower(models.with_slots(of, base, {}, 1), merge="live", fuse=None)

    def one(adapter: dict[str, Tensor]) -> None:
        new.adapters.load("ink", adapter)
        new.adapters.use("ink")
        new.adapters.unload("ink")

    return lambda: new, one


def peft_cycle(of: Subject, base: Any) -> tuple[Callable[[], nn.Module], Callable[[Any], None]]:
    with tempfile.TemporaryDirectory() as folder:
        module = models.with_own(models.copied(of.module), of.layers)
        made = models.in_peft(of, {"ink": models.adapter(of, Path(folder))}, module)

    def one(adapter: dict[str, Tensor]) -> None:
        set_peft_model_state_dict(made, adapter, adapter_name="ink")
        made.merge_adapter()
        made.unmerge_adapter()

    return lambda: made, one


# --- memory


def memory(of: Subject, base: Any, folder: Path) -> dict[str, Any]:
    def total(count: int) -> int:
        new = models.ours(of, base, count)
        return sum(t.nbytes for t in {id(t): t for t in (*new.parameters(), *new.buffers())}.values())

    adapter = sum(t.nbytes for t in models.weights_of(folder).values())
    slot = total(5) - total(4)
    print(f"one more slot      {slot / 2**20:9.2f} MiB  x{slot / adapter:.4f} of an adapter's bytes", flush=True)
    return {"slot": slot, "adapter": adapter, "ratio": slot / adapter}


if __name__ == "__main__":
    main()
