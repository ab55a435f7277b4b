"""Random lists of adapters trained in one run: each must learn what its ordinary run alone does.

`fuzz_many(cases, seed)` returns a line for each miss.
"""

from __future__ import annotations

import random
from typing import Any

import many_adapters as many
import torch

COST = 400  # a case is a few trainings
KINDS = ("lora", "lora", "loha", "lokr", "dora", "ia3", "lora_weight")
OPTIMIZERS = ("adamw", {"sgd": {"momentum": 0.9}}, "adagrad", {"adamw": {"betas": [0.5, 0.9]}})
SCHEDULERS = (None, "cosine", {"linear": {"warmup": 2}}, {"StepLR": {"step_size": 2, "gamma": 0.5}})


def draw_case(chance: random.Random) -> tuple[str, int, list[dict[str, Any]], set[str]]:
    """Draw a kind, a number of slots, the adapters, and which of them fail."""
    kind = chance.choice(KINDS)
    rows, fail = [], set()
    for number in range(chance.randint(1, 6)):
        row: dict[str, Any] = {"name": f"a{number}", "seed": chance.randrange(9), "batch": chance.randint(1, 4)}
        row |= {"lr": chance.choice((1e-3, 1e-2, 0.1)), "weight_decay": chance.choice((0.0, 0.1))}
        row |= {"optimizer": chance.choice(OPTIMIZERS), "scheduler": chance.choice(SCHEDULERS)}
        row |= {"accumulate": chance.choice((1, 1, 2, 3))}
        row |= {"clip": chance.choice((None, 0.1, 1.0)), "ema": chance.choice((None, 0.9))}
        row["epochs" if chance.random() < 0.3 else "steps"] = chance.randint(1, 5) if chance.random() < 0.8 else 1
        if kind != "ia3":
            row |= {"rank": chance.randint(1, many.RANK), "alpha": chance.choice((None, 1.0, 16.0))}
        if kind == "lora":
            row["dropout"] = chance.choice((0.0, 0.0, 0.3))
        count = chance.randint(4, 12)
        spoil = chance.randrange(count) if chance.random() < 0.15 else None
        row["data"] = many.Samples(chance.randrange(99), count, spoil=spoil)
        if spoil is not None:
            fail.add(row["name"])
        rows.append(row)
    return kind, chance.randint(1, len(rows)), rows, fail


def play(seed: int) -> str:
    """Return what is wrong with one case; "" for nothing."""
    kind, slots, rows, fail = draw_case(random.Random(seed))
    try:
        run = many.train(many.slotted(kind, slots=slots), rows)
    except many.fxplug.FxplugError as error:
        return "" if len(fail) == len(rows) and "every adapter failed" in str(error) else f"{kind}: {error}"
    if not set(run.failed) <= fail:
        return f"{kind}: {run.failed}"
    for row in rows:
        if row["name"] in run.failed:
            continue
        alone = many.train_alone(row, kind)
        if (far := many.distance(many.trained(run, row["name"]), alone.trained)) > 1e-9:
            return f"{kind}, {len(rows)} adapters in {slots} slots: {row['name']} is {far:.1g} away from its run alone"
    return ""


def fuzz_many(cases: int, seed: int) -> list[str]:
    torch.set_num_threads(1)
    found = ((n, play(n)) for n in range(seed, seed + cases))
    return [f"seed {n}: {line}" for n, line in found if line]
