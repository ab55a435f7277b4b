"""Four adapters mixed per sample in a batch of 8, over one adapter for all of it, in fxplug and PEFT.

python benchmarks/mixed.py [--json FILE] [--turns N] [--only KIND ...] [--full] [--eager]

Models are those of `models.py`. For each way `one` is the batch with one adapter, `mixed` the same with a different one in
every fourth sample; the ratio is mixed over one of the same turn and way. Before each timed call the choice is set, as a
server would; what that costs is not counted. `difference` is that of each sample from the result of its own adapter.

fxplug, fused     slots as `apply` leaves them; after lower(fuse="auto")
peft              set_adapter, and adapter_names for the mixed batch
plain             the model without adapters: how much one adapter costs, as milliseconds
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import torch
from record import write
from timing import difference, error_of, milliseconds, shown, turns

import fxplug

NAMES = ["ink", "film", "chalk", "fourth"]
BATCH = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--only", choices=[*models.SMALL, *models.FULL], nargs="+")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--eager", action="store_true", help="only without torch.compile")
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64
    rows: dict[str, Any] = {}
    for kind in options.only or (models.FULL if options.full else models.SMALL):
        rows[kind] = {
            how: measure(kind, how == "compiled", options.turns) for how in ("eager", "compiled")[: 2 - options.eager]
        }
        if options.json:
            write(options.json, {"batch": BATCH, "adapters": len(NAMES), "rows": rows})


@torch.no_grad()
def measure(kind: str, compiled: bool, count: int) -> dict[str, Any]:
    of = models.subject(kind, BATCH)
    each = [NAMES[i % len(NAMES)] for i in range(BATCH)]
    with tempfile.TemporaryDirectory() as folder:
        folders = {name: models.adapter(of, Path(folder) / name, seed=seed) for seed, name in enumerate(NAMES)}
        slots = models.with_slots(of, models.traced(of), folders)
        peft = models.in_peft(of, folders)
    modules = {"fxplug": slots, "fused": fxplug.lower(slots, fuse="auto"), "peft": peft, "plain": of.module}
    calls = {way: torch.compile(m, fullgraph=way != "peft") if compiled else m for way, m in modules.items()}
    own = []
    for index, name in enumerate(each):
        slots.adapters.use(name)
        own.append(models.output(slots(**of.inputs))[index])
    wanted, row = torch.stack(own), {}

    def run(way: str, mixed: bool) -> Callable[[], Any]:
        call, more = calls[way], {"adapter_names": each} if way == "peft" and mixed else {}
        return lambda: call(**of.inputs, **more)

    def chosen(way: str, mixed: bool) -> None:
        if way in ("fxplug", "fused"):
            modules[way].adapters.use(each if mixed else "ink")

    for way in modules:
        steps = {"one": run(way, False), "mixed": run(way, True)} if way != "plain" else {"one": run(way, False)}
        kinds = {step: name == "mixed" for name, step in steps.items()}

        def clock(step: Any, way: str = way, kinds: dict[Any, bool] = kinds) -> float:
            chosen(way, kinds[step])
            return milliseconds(step)

        try:
            row[way] = turns(steps, count, "one", clock=clock)
            if way != "plain":
                chosen(way, True)
                row[way]["difference"] = difference(models.output(steps["mixed"]()), wanted)
        except Exception as error:
            row[way] = {"error": error_of(error)}
            print(f"{kind:10} {'compiled' if compiled else 'eager':8} {way:8} {row[way]['error']}", flush=True)
            continue
        text = ""
        if way != "plain":
            found = row[way]["mixed"]
            text = f"mixed {found['milliseconds']:8.1f} ms  {shown(found['ratio'])}  away {row[way]['difference']:.0e}"
        print(
            f"{kind:10} {'compiled' if compiled else 'eager':8} {way:8} one {row[way]['one']['milliseconds']:8.1f} ms  {text}",
            flush=True,
        )
    return row


if __name__ == "__main__":
    main()
