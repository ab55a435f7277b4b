"""The diffusion transformers of the zoo on several processes: `python benchmarks/parallel_zoo.py [--ways ulysses=2] [NAME]`.

Each model is traced and planned; pretended processes, threads of one, are compared with one process. A row says by how much
the result differs, over its largest value, how much of the work in products and attention is split, and how much of that which
is done on tokens: the zoo's models have few, and what embeds times, texts and patches weighs more there than in use. Below
90 % it says what had to be gathered, and why. Whatever has no plan stands there with its reason. Each model runs in a process
of its own with one thread, for at most --limit seconds; rows are appended to --keep at once, and what stands there is not run
again. Exit code 1 when a result differs by more than 1e-6.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import fxplug

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from zoo import Case, cases  # noqa: E402

KINDS = ("Transformer", "DiT", "UVit", "T5Film")
OTHERS = ("Control", "VAE", "Autoencoder", "UNet")
EXACT, MOST = 1e-6, 0.9


def transformers(names: list[str]) -> list[Case]:
    found = cases("diffusers/")
    if names:
        return [case for case in found if any(name in case.name for name in names)]
    own = [case for case in found if any(kind in case.name for kind in KINDS)]
    return [case for case in own if not any(other in case.name.split("/", 1)[1] for other in OTHERS)]


def row_of(case: Case, ways: dict[str, int]) -> dict[str, Any]:
    start = time.process_time()
    args, kwargs = case.inputs(2)
    gm = fxplug.trace(case.build().eval(), args, kwargs, check=False).eval()
    traced = time.process_time()
    plan = fxplug.parallel_plan(gm, args, kwargs, check=False, **ways)
    planned = time.process_time()
    row = {"share": round(plan.share, 4), "of tokens": round(of_tokens(plan), 4), "error": plan.check()}
    row.update({"trace": traced - start, "plan": planned - traced})
    if plan.share < MOST:
        row["why"] = [f"{node.name}: {why}" for stage in plan.stages for node, why in stage.found.why.items()][:8]
    return row


def of_tokens(plan: fxplug.Plan) -> float:
    """The share of the work that is split, in operations that follow from what is split."""
    done = work = 0
    for stage in plan.stages:
        found, reached = stage.found, set()
        for node in found.walk.graph.nodes:
            if found.is_split(node) or not reached.isdisjoint(node.all_input_nodes):
                reached.add(node)
                done += found.walk.work.get(node, 0) * found.on_parts(node)
                work += found.walk.work.get(node, 0)
    return done / max(1, work)


def run(todo: list[tuple[Case, dict[str, int]]], jobs: int, limit: int, keep: Path) -> None:
    """Each in a process of its own, which appends a row."""
    running: dict[int, tuple[Case, dict[str, int]]] = {}
    todo = todo[::-1]
    while todo or running:
        while todo and len(running) < jobs:
            case, ways = todo.pop()
            child = os.fork()
            if not child:
                begin(case, ways, limit, keep)
            running[child] = case, ways
        child, status = os.wait()
        case, ways = running.pop(child)
        if status:
            append(keep, {"name": case.name, "ways": ways, "refused": f"ended by {status} (--limit {limit})"})


def begin(case: Case, ways: dict[str, int], limit: int, keep: Path) -> None:
    signal.alarm(limit)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        row = row_of(case, ways)
    except BaseException as error:
        row = {"refused": f"{type(error).__name__}: {error}"[:400]}
    append(keep, {"name": case.name, "ways": ways, **row})
    os._exit(0)


def append(keep: Path, row: dict[str, Any]) -> None:
    with keep.open("a") as file:
        file.write(json.dumps(row) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names; all transformers without any")
    parser.add_argument("--ways", action="append", help="several times for several; ulysses=2 and ulysses=4 by default")
    parser.add_argument("--limit", type=int, default=400)
    parser.add_argument("--jobs", type=int, default=1, help="models at one time")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / f"parallel_zoo_{os.getpid()}.jsonl")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chosen = transformers(options.names)
    texts = options.ways or ("ulysses=2", "ulysses=4")
    every = [{k: int(n) for k, _, n in (p.partition("=") for p in text.split(","))} for text in texts]
    options.keep.parent.mkdir(parents=True, exist_ok=True)
    options.keep.touch()
    before = [json.loads(line) for line in options.keep.read_text().splitlines()]
    todo = [(c, w) for w in every for c in chosen if not any(r["name"] == c.name and r["ways"] == w for r in before)]
    run(todo, options.jobs, options.limit, options.keep)
    rows = [json.loads(line) for line in options.keep.read_text().splitlines()]
    wrong = 0
    for ways in every:
        mine = sorted((r for r in rows if r["ways"] == ways), key=lambda r: r["name"])
        for row in mine:
            print(f"{row['name']:58s} {said(row)}")
            for text in row.get("why", []):
                print(f"    {text}")
        exact = [r for r in mine if r.get("error", 1) <= EXACT]
        wrong += sum(r.get("error", 0) > EXACT for r in mine)
        split, here = (sum(r[key] >= MOST for r in exact) for key in ("share", "of tokens"))
        text = ",".join(f"{axis}={n}" for axis, n in ways.items())
        print(f"\n{text}: {len(exact)} of {len(mine)} exact to {EXACT:g}")
        print(f"{split} split {MOST:.0%} of the work or more, {here} of what is done on tokens\n")
    if options.json:
        from record import write

        write(options.json, {"rows": rows})
    return 1 if wrong else 0


def said(row: dict[str, Any]) -> str:
    return row["refused"] if "refused" in row else f"{row['error']:8.1e} {row['share']:7.1%} {row['of tokens']:7.1%}"


if __name__ == "__main__":
    sys.exit(main())
