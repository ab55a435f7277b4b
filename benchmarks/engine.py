"""Many adapters behind few slots: the engine beside one adapter a batch and `set_adapters`; and what it compiles anew.

python benchmarks/engine.py [calls] [peft] [sizes] [recompiles] [memory] [--requests N] [--adapters N] [--steps N] [--json FILE]

The garments of examples/fashion, 16 slots, 16 rows, guidance, four schedulers; requests arrive as a Poisson process and name
adapters by Zipf's law (examples/fashion/traffic.py). Times are CPU times of this process.

calls        LoRA and LoHa of ranks 2, 4, 8: calls of the UNet and pictures a second, joint and with one mixture a batch
peft         LoRA alone: diffusers' `load_lora_adapter` and `set_adapters`, 16 kept, one request after the other, beside the
             engine; and by how much the pictures differ
sizes        pictures a second by the number of rows and of slots, all requests at once; and how long a picture takes, over
             one alone, at shares of the rate that 16 rows and 16 slots can draw at
recompiles   programs that `torch.compile` makes in so many calls of the UNet after a first load
memory       memory of the process, tensors and threads after each hundred of a thousand requests of one or two steps, with a
             store that keeps 16 MiB
"""

from __future__ import annotations

import argparse
import copy
import gc
import logging
import resource
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import record
import torch
from safetensors.torch import load_file

from fxplug.serving import AdapterStore, Engine, Request

sys.path.insert(0, str(Path(__file__).parent.parent / "examples/fashion"))
import traffic  # noqa: E402
from random_adapters import write_adapters  # noqa: E402  (traffic.py finds it)

SLOTS, ROWS = 16, 16


class OneMixtureEngine(Engine):
    """An engine whose calls have requests of one mixture of adapters alone, as servers make them that set adapters by batch."""

    def _choose(self) -> list[Any]:
        active, (head, *_) = self._active, super()._choose()
        self._active = [one for one in active if one.ticket.request.adapters == head.ticket.request.adapters]
        try:
            return super()._choose()
        finally:
            self._active = active


def measure_engine(kind: type[Engine], folder: Path, count: int, kinds: Sequence[str], arrivals: Any) -> dict[str, Any]:
    pipe = traffic.make_pipeline(SLOTS)
    store, names = traffic.make_store(folder, pipe, count, kinds)
    with store:
        engine = kind(pipe, store=store, rows=ROWS, queue=10_000)
        traffic.run_load(engine, traffic.draw_requests(24, 8.0, names[:4], seed=1))  # to learn the kinds of requests
        found = traffic.run_load(engine, arrivals)
    print(kind.__name__, found, flush=True)
    quantiles = {name: traffic.quantile(getattr(found, name), 0.5, 0.99) for name in ("waits", "wholes")}
    each = {"pictures_a_second": len(found.wholes) / found.seconds, "pictures": found.pictures}
    return {"calls": found.calls, "rows": found.rows, **each, **quantiles}


def measure_sizes(folder: Path, count: int, requests: int) -> dict[str, Any]:
    """Return pictures a second by rows and by slots, and the quantiles of a picture's time over one alone by load."""
    found: dict[str, Any] = {"rows": {}, "slots": {}, "load": {}}
    write_adapters(folder, traffic.load_pipeline().unet, count, kinds=["lora"], size=0.1)
    names = sorted(file.stem for file in folder.glob("*.safetensors"))

    def run(rows: int, slots: int, rate: float, number: int = requests) -> Any:
        pipe = traffic.make_pipeline(slots)
        with AdapterStore(folder, {"unet": pipe.unet}) as store:
            engine = Engine(pipe, store=store, rows=rows, queue=10_000)
            traffic.run_load(engine, traffic.draw_requests(24, 8.0, names[:4], seed=1))
            return traffic.run_load(engine, traffic.draw_requests(number, rate, names))

    for part, sizes in (("rows", [(n, SLOTS) for n in (2, 4, 8, 16, 32)]), ("slots", [(ROWS, n) for n in (4, 8, 16, 32)])):
        for rows, slots in sizes:
            made = run(rows, slots, 1e9)
            each = {"pictures_a_second": requests / made.seconds, "calls": made.calls, "rows_a_call": made.rows / made.calls}
            found[part][rows if part == "rows" else slots] = each
            print(part, rows if part == "rows" else slots, each, flush=True)
    most = found["rows"][ROWS]["pictures_a_second"]
    alone = traffic.quantile(run(ROWS, SLOTS, 0.01, 16).wholes, 0.5)[0]
    for share in (0.3, 0.5, 0.7, 0.9):
        wholes = run(ROWS, SLOTS, share * most, 2 * requests).wholes
        found["load"][share] = [value / alone for value in traffic.quantile(wholes, 0.5, 0.95)]
        print("load", share, found["load"][share], flush=True)
    return found


def measure_peft(folder: Path, arrivals: Sequence[tuple[float, Request]]) -> dict[str, Any]:
    """Run the requests one after the other, with the adapters of each set as diffusers does."""
    pipe = traffic.load_pipeline()
    names = {name.replace(".", "_"): name for name, _ in pipe.unet.named_modules()}
    kept, calls, begin = OrderedDict[str, None](), 0, time.process_time()
    pictures = []

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    pipe.unet.register_forward_pre_hook(count)
    for _, request in arrivals:
        for name in request.adapters:
            if name in kept:
                kept.move_to_end(name)
                continue
            if len(kept) >= SLOTS:
                pipe.unet.delete_adapters(kept.popitem(last=False)[0])
            pipe.unet.load_lora_adapter(read_lora(folder / f"{name}.safetensors", names), prefix=None, adapter_name=name)
            kept[name] = None
        if request.adapters:
            pipe.unet.set_adapters([*request.adapters], [*request.adapters.values()])
            pipe.unet.enable_lora()
        elif kept:
            pipe.unet.disable_lora()
        own = copy.copy(pipe)
        own.scheduler = getattr(diffusers, request.scheduler).from_config(pipe.scheduler.config)
        pictures.append(own(**request.call, generator=torch.Generator().manual_seed(request.seed)).images)
    spent = time.process_time() - begin
    print(f"set_adapters: {len(pictures) / spent:.2f} pictures a second, {calls} calls", flush=True)
    return {"calls": calls, "pictures_a_second": len(pictures) / spent, "pictures": pictures}


def read_lora(file: Path, names: dict[str, str]) -> dict[str, torch.Tensor]:
    """Read a file of kohya's as PEFT names it; alpha is the rank there."""
    found = {}
    for key, value in load_file(file).items():
        layer, _, rest = key.removeprefix("lora_unet_").partition(".")
        if rest != "alpha":
            found[f"{names[layer]}.lora_{'A' if 'down' in rest else 'B'}.weight"] = value
    return found


def count_compiled(folder: Path, pipe: Any, count: int, steps: int) -> dict[str, Any]:
    """Count the programs that are compiled in so many joint calls, after a first load."""
    torch._dynamo.config.recompile_limit = 64
    store, names = traffic.make_store(folder, pipe, count)
    counters = torch._dynamo.utils.counters["stats"]
    with store:
        engine = Engine(pipe, store=store, rows=8, compile=True, queue=10_000)
        key = id(engine.models["unet"])
        begin, seed, first, programs = time.process_time(), 0, 0, list[int]()
        while not programs or engine.caller.made[key] - first < steps:
            traffic.run_load(engine, traffic.draw_requests(12, 8.0, names, seed))
            seed += 1
            programs.append(counters["unique_graphs"])
            if len(programs) == 1:
                first = engine.caller.made[key]
                print(f"{programs[0]} programs in {time.process_time() - begin:.0f} s", flush=True)
    made = engine.caller.made[key] - first
    print(f"{programs[-1] - programs[0]} more in {made} calls of the UNet", flush=True)
    return {"first": programs[0], "more": programs[-1] - programs[0], "calls": made}


def measure_memory(folder: Path, count: int, requests: int = 1000) -> list[dict[str, Any]]:
    """Return what the process has after each hundred requests, of which the caller keeps nothing."""
    pipe = traffic.make_pipeline(SLOTS)
    names = write_adapters(folder, traffic.load_pipeline().unet, count, size=0.1)
    rows = []
    with AdapterStore(folder, {"unet": pipe.unet}, host_bytes=16 << 20) as store:
        engine = Engine(pipe, store=store, rows=ROWS, queue=10_000)
        for done in range(100, requests + 1, 100):
            arrivals = traffic.draw_requests(100, 1e9, names, seed=done, steps=(1, 2))
            for ticket in engine.generate(request for _, request in arrivals):
                ticket.result()
            del arrivals, ticket
            gc.collect()
            tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
            size = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
            each = {"requests": done, "mib": round(size, 1), "tensors": len(tensors), "threads": threading.active_count()}
            each["tensors_mib"] = round(sum({x.data_ptr(): x.nbytes for x in tensors if not x.is_meta}.values()) / 2**20, 2)
            del tensors
            rows.append(each)
            print(each, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=["calls", "peft", "sizes", "recompiles", "memory", []], default=[])
    for name, value in (("requests", 60), ("adapters", 1000), ("steps", 1000), ("rate", 4.0)):
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    logging.getLogger("fxplug.serving").setLevel(logging.ERROR)
    diffusers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    names = [f"style{n:04}" for n in range(given.adapters)]
    arrivals = traffic.draw_requests(given.requests, given.rate, names)
    found: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two, tempfile.TemporaryDirectory() as three
    ):  # fmt: skip
        if not given.what or "calls" in given.what:
            for kind in (Engine, OneMixtureEngine):
                found[kind.__name__] = measure_engine(kind, Path(one), given.adapters, traffic.KINDS, arrivals)
                del found[kind.__name__]["pictures"]
        if not given.what or "peft" in given.what:
            found["lora"] = measure_engine(Engine, Path(two), given.adapters, ["lora"], arrivals)
            found["set_adapters"] = measure_peft(Path(two), arrivals)
            one_way, other = found["lora"].pop("pictures"), found["set_adapters"].pop("pictures")
            found["difference"] = max(float((a - b).abs().max()) for a, b in zip(one_way, other, strict=True))
            print(f"pictures differ by {found['difference']:.1e}", flush=True)
        if not given.what or "sizes" in given.what:
            found["sizes"] = measure_sizes(Path(three), min(given.adapters, 100), given.requests)
        if not given.what or "recompiles" in given.what:
            found["recompiles"] = count_compiled(Path(one), traffic.make_pipeline(SLOTS), given.adapters, given.steps)
        if not given.what or "memory" in given.what:
            found["memory"] = measure_memory(Path(one), min(given.adapters, 100))
    if given.json:
        record.write(given.json, {"requests": given.requests, "adapters": given.adapters, "found": found})


if __name__ == "__main__":
    main()
