"""The price of an un-merged LoRA of rank 16 beside the plain model, in eager and compiled code, without gradients, in one run.

python benchmarks/unmerged.py [--json FILE] [--turns N] [--only KIND ...] [--full] [--ways WAY ...]
                              [--eager] [--compiled] [--batch N] [--every]

Models are those of `models.py`: vit, unet and pixart, or with --full those of full width (GPUs). The ways take turns, and a
ratio is over the plain model of the same turn. `share` is a way's extra time over the plain model as a part of PEFT's;
`share_own`, of ways whose base too goes to oneDNN on CPUs, is that over `plain_fused`, which leaves oneDNN's gain out.
`difference` is that of the results from fxplug's as `apply` leaves it, over their largest value.

plain     the model as it is                            plain_fused   traced and fused without LoRA: by oneDNN on CPUs
fxplug    the traced model after `apply`                blas          the same after fuse(how="blas")
fused_all the same after fuse(how="fused")
fused     lower(): each layer in the form that `fuse="auto"` measures to be the fastest
slots1    as `fxplug` with one slot                     slots4        with four slots, one of them used
slots4_fused                                            the same lowered
live      lower(merge="live") of four slots             merged        lower(merge="fold")
live_fused, merged_fused                                the same with fuse="auto", which also takes the base to oneDNN on CPUs
peft, lycoris, diffusers                                the peers, with the same adapter; peft_merged is PEFT's merge_adapter
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from pathlib import Path
from typing import Any

import models
import torch
from record import write
from timing import Call, difference, error_of, shown, turns
from torch import nn

import fxplug

PLAIN = ["plain", "plain_fused"]
SIDE = ["fxplug", "fused", "blas", "fused_all", "slots1", "slots4", "slots4_fused"]
IN_WEIGHTS = ["live", "merged", "live_fused", "merged_fused", "peft_merged"]
PEERS = ["peft", "lycoris", "diffusers"]
WAYS = [*PLAIN, *SIDE, *IN_WEIGHTS, *PEERS]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--only", choices=[*models.SMALL, *models.FULL], nargs="+")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=WAYS, help="plain and peft are always among them")
    parser.add_argument("--eager", action="store_true", help="only without torch.compile")
    parser.add_argument("--compiled", action="store_true", help="only with torch.compile")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--every", action="store_true", help="LoRA on every nn.Linear of all models")
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64
    rows: dict[str, Any] = {}
    for kind in options.only or (models.FULL if options.full else models.SMALL):
        rows[kind] = measure(kind, options)
        torch._dynamo.reset()
        gc.collect()
        if options.json:
            write(options.json, {"dtype": str(models.DTYPE).removeprefix("torch."), "rank": models.RANK, "rows": rows})


@torch.no_grad()
def measure(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    of = models.subject(kind, options.batch)
    if options.every:
        of.layers = [name for name, layer in of.module.named_modules() if isinstance(layer, nn.Linear)]
    row: dict[str, Any] = {"batch": len(next(iter(of.inputs.values()))), "layers": len(of.layers), "failed": {}}
    with tempfile.TemporaryDirectory() as folder:
        made = modules(of, Path(folder), options.ways, row["failed"])
    wanted = models.output((made.get("fxplug") or made["peft"])(**of.inputs))
    for how in ("eager", "compiled"):
        if (how == "eager" and options.compiled) or (how == "compiled" and options.eager):
            continue
        calls: dict[str, Call] = {}
        first, away = {}, {}
        for way, module in made.items():
            call = torch.compile(module, fullgraph=True) if how == "compiled" else module
            begun = time.perf_counter()
            try:
                away[way] = difference(models.output(call(**of.inputs)), wanted)
            except Exception as error:
                row["failed"][f"{way}, {how}"] = error_of(error)
                continue
            first[way] = time.perf_counter() - begun
            calls[way] = lambda call=call: call(**of.inputs)
        row[how] = turns(calls, options.turns, "plain")
        for way, found in row[how].items():
            found["share"] = share(row[how], way, "plain")
            if "plain_fused" in row[how] and way.endswith("fused"):
                found["share_own"] = share(row[how], way, "plain_fused")
            found["difference"] = None if way in PLAIN else away[way]
            found["first_call_seconds"] = first[way]
            own = f" ({100 * found['share_own']:.0f} % own)" if "share_own" in found else ""
            tail = "" if way in PLAIN else f"  {100 * found['share']:6.0f} % of PEFT's extra{own}  away {away[way]:.0e}"
            print(f"{kind:10} {how:8} {way:15} {found['milliseconds']:8.1f} ms  {shown(found['ratio'])}{tail}", flush=True)
    for way, error in row["failed"].items():
        print(f"{kind:10} {way}: {error}", flush=True)
    return row


def share(rows: dict[str, Any], way: str, over: str) -> float:
    """The extra time over a plain model as a part of PEFT's over its own."""
    ratio = {name: found["ratio"]["median"] for name, found in rows.items()}
    return (ratio[way] - ratio[over]) / (ratio["peft"] - ratio["plain"])  # type: ignore[no-any-return]


def modules(of: models.Subject, folder: Path, ways: list[str], failed: dict[str, str]) -> dict[str, nn.Module]:
    """The model in each way, all on the same base weights and the same adapter; what cannot be made goes to `failed`."""
    file = models.adapter(of, folder / "ink")
    base = models.traced(of)
    made = {}
    for way in WAYS:
        if way in (*ways, "plain", "peft"):
            try:
                made[way] = module_of(of, way, base, file)
            except Exception as error:
                failed[way] = error_of(error)
    return made


def module_of(of: models.Subject, way: str, base: Any, file: Path) -> nn.Module:
    name, _, how = way.partition("_")
    if way == "plain":
        return of.module
    if way == "plain_fused":
        return fxplug.fuse(base, "fused")
    if name == "peft":
        made = models.in_peft(of, {"ink": file}, models.with_own(models.copied(of.module), of.layers) if how else None)
        if how:
            made.merge_adapter()
        return made
    if way == "lycoris":
        return models.in_lycoris(of, file)
    if way == "diffusers":
        return models.in_diffusers(of, {"ink": file})
    if name in ("live", "slots1", "slots4"):
        new = models.with_slots(of, base, {"ink": file}, 1 if name == "slots1" else 4, "ink")
    else:
        new = models.with_plain(of, base, file)
    if way in ("fxplug", "slots1", "slots4"):
        return new
    if way in ("blas", "fused_all"):
        return fxplug.fuse(new, "fused" if way == "fused_all" else "blas")
    forms: dict[str, Any] = {"fuse": "auto" if how == "fused" or way == "fused" else None}
    if name in ("live", "merged"):
        forms["merge"] = "live" if name == "live" else "fold"
    return fxplug.lower(new, **forms)


if __name__ == "__main__":
    main()
