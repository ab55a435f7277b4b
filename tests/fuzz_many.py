"""Random lists of adapters trained in one run: each must learn what its ordinary run alone does, whatever their kinds, whether
they share a pass or take their steps in turn; and a run that goes on from any checkpoint must be the same to the bit.

`fuzz_many(cases, seed)` returns a line for each miss.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import many_adapters as many
import torch

from fxplug.training.checkpoint import list_checkpoints, read

COST = 400  # a case is a few trainings
KINDS = ("lora", "lora", "loha", "lokr", "dora", "ia3", "lora_weight")
OPTIMIZERS = ("adamw", {"sgd": {"momentum": 0.9}}, "adagrad", {"adamw": {"betas": [0.5, 0.9]}})
SCHEDULERS = (None, "cosine", {"linear": {"warmup": 2}}, {"StepLR": {"step_size": 2, "gamma": 0.5}})


def draw_case(chance: random.Random) -> tuple[list[str], int, list[dict[str, Any]], set[str]]:
    """Draw kinds, a number of slots, the adapters, each with one of the kinds in `passes`, and which of them fail."""
    kinds = [chance.choice(KINDS)]
    if chance.random() < 0.4:
        kinds = chance.sample(sorted(set(KINDS)), chance.randint(2, 3))
    rows, fail = [], set()
    for number in range(chance.randint(1, 6)):
        kind = chance.choice(kinds)
        row: dict[str, Any] = {"name": f"a{number}", "passes": [kind], "seed": chance.randrange(9)}
        row |= {"batch": chance.randint(1, 4)}
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
    return kinds, chance.randint(1, len(rows)), rows, fail


def play(seed: int) -> str:
    """Return what is wrong with one case; "" for nothing."""
    chance = random.Random(seed)
    kinds, slots, rows, fail = draw_case(chance)
    in_turn, at = chance.choice((None, False, True)), None if len(kinds) == 1 else ["stem", "qkv"]
    what = f"{' and '.join(kinds)}, in_turn {in_turn}, {len(rows)} adapters in {slots} slots"

    def make() -> Any:
        module = many.base()
        for kind in kinds:
            module = many.slotted(kind, slots=slots, gm=module, at=at)
        return module

    try:
        run = many.train(make(), rows, in_turn=in_turn)
    except many.fxplug.FxplugError as error:
        return "" if len(fail) == len(rows) and "every adapter failed" in str(error) else f"{what}: {error}"
    if not set(run.failed) <= fail:
        return f"{what}: {run.failed}"
    for row in rows:
        if row["name"] in run.failed:
            continue
        own = {key: value for key, value in row.items() if key != "passes"}
        alone = many.train_alone(own, row["passes"][0], at=at)
        if (far := many.distance(many.trained(run, row["name"]), alone.trained)) > 1e-9:
            return f"{what}: {row['name']} is {far:.1g} away from its run alone"
    return compare_resumed(make, rows, chance, what, in_turn=in_turn) if chance.random() < 0.3 else ""


def compare_resumed(make: Any, rows: list[dict[str, Any]], chance: random.Random, what: str, **more: Any) -> str:
    """Return what differs in a run that goes on from a checkpoint of another one, drawn; "" for nothing."""
    with tempfile.TemporaryDirectory() as folder:
        more |= {"save": {"every": 1, "keep": 99}, "log": {"tensorboard": False}, **many.COMMON}
        homes = [Path(folder) / name for name in ("whole", "resumed")]
        many.Trainer(make(), "classify", adapters=rows, out=homes[0], **more).fit()
        start = chance.choice(list_checkpoints(homes[0] / "checkpoints"))
        many.Trainer(make(), "classify", adapters=chance.sample(rows, len(rows)), out=homes[1], **more).fit(resume=start)
        one, two = (read(list_checkpoints(home / "checkpoints")[-1]).state for home in homes)
        return "" if many.are_equal(one, two) else f"{what}: resumed from {start.name} it is another"


def fuzz_many(cases: int, seed: int) -> list[str]:
    torch.set_num_threads(1)
    found = ((n, play(n)) for n in range(seed, seed + cases))
    return [f"seed {n}: {line}" for n, line in found if line]
