"""The names that trainers give layers (tests/data/trainer_keys.yaml), for a graph: which of its layers each means."""

from __future__ import annotations

import re
from pathlib import Path

import torch
import yaml

TRAINERS = yaml.safe_load((Path(__file__).parent / "data" / "trainer_keys.yaml").read_text())


def meant(keys, layers):
    """The layers of a graph by a trainer's name; `~` at the end where the halves of the outputs have changed places."""
    made = {}
    for name, target in keys.items():
        owner, bracket, inner = target.removesuffix("~").partition("[")
        targets = [owner + last for last in inner.removesuffix("]").split()] if bracket else [owner]
        form = re.escape(targets[0]).replace(r"\{i\}", r"(?P<i>\d+)")
        for m in filter(None, (re.fullmatch(form, path) for path in layers)):
            i = m.groupdict().get("i", "")
            made[name.replace("{i}", i)] = tuple(t.replace("{i}", i) + "~" * target.endswith("~") for t in targets)
    return made


def lora_of(trainer, shapes):
    """A file of a trainer's for layers of these shapes, and by layer the change that it makes."""
    state, wanted = {}, {}
    for name, paths in meant(trainer["keys"], shapes).items():
        key = trainer["start"] + (name.replace(".", "_") if trainer.get("flat") else name)
        plain = [path.removesuffix("~") for path in paths]
        if trainer.get("whole"):
            state[f"{key}.diff"] = wanted[plain[0]] = torch.randn(shapes[plain[0]])
            continue
        inner = shapes[plain[0]][1:]
        down, up = torch.randn(2, *inner), [torch.randn(shapes[path][0], 2) for path in plain]
        state[f"{key}.lora_down.weight"] = down
        state[f"{key}.lora_up.weight"] = torch.cat(up).reshape(-1, 2, *[1] * (len(inner) - 1))
        up = [torch.cat(one.chunk(2)[::-1]) if path.endswith("~") else one for path, one in zip(paths, up, strict=True)]
        wanted |= {path: (one @ down.flatten(1)).reshape(shapes[path]) for path, one in zip(plain, up, strict=True)}
    return state, wanted
