"""Small training runs on real digits, for the tests of the trainer."""

from __future__ import annotations

import contextlib
import copy
import json
from typing import Any

import processes
import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset

import fxplug
from fxplug.config import flow
from fxplug.config.run_config import resolve
from fxplug.training import monitor


class Digits(Dataset[Any]):
    """scikit-learn's 8 x 8 digits at 16 x 16, in [-1, 1]: (image [3, 16, 16], label)."""

    classes = [str(digit) for digit in range(10)]

    def __init__(self, train: bool = True, count: int = 96, spoil: int | None = None) -> None:
        read = load_digits()
        start = 0 if train else 1000
        images = torch.tensor(read.images[start : start + count], dtype=torch.float32) / 8 - 1
        self.images = images.repeat_interleave(2, 1).repeat_interleave(2, 2)[:, None].expand(-1, 3, -1, -1).contiguous()
        self.labels = read.target[start : start + count]
        if spoil is not None:
            self.images[spoil, 0, 0, 0] = float("nan")

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], int(self.labels[index])


VIT = {"timm": "vit_tiny_patch16_224", "options": {"img_size": 16, "patch_size": 8, "depth": 2, "num_classes": 10}}
CONFIG: dict[str, Any] = {
    "model": VIT,
    "passes": [{"lora": {"at": "blocks.*.attn.*", "rank": 4, "dropout": 0.1}}],
    "train": {
        "task": {"classify": {"augment": "none"}},
        "steps": 8,
        "batch": 16,
        "lr": 3e-3,
        "trainable": ["head"],
        "save": {"every": 3, "keep": 9},
        "log": {"tensorboard": False},
    },
    "data": {"call": "runs:Digits"},
    "device": "cpu",
    "verify": False,
}


def with_values(config: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """A copy of a configuration with some values replaced: `train__steps=4, passes=[]`."""
    made = copy.deepcopy(config)
    for key, value in changed.items():
        section, _, name = key.partition("__")
        if name:
            made.setdefault(section, {})[name] = value
        else:
            made[section] = value
    return made


def config(**changed: Any) -> dict[str, Any]:
    """CONFIG with some values replaced: `config(train__steps=4, data__test=...)`; None leaves a section out."""
    made = with_values(CONFIG, **changed)
    if "epochs" in made["train"]:
        made["train"].pop("steps", None)
    return {key: value for key, value in made.items() if value is not None}


_traced: dict[str, Any] = {}
_trace = flow._traced


def _once(read, *given):
    """A model that a configuration alone makes, traced once; the runs train copies."""
    if not (read.model.kind == "timm" or isinstance(read.model.target, dict)) or read.weights is not None:
        return _trace(read, *given)
    data = resolve(read)
    key = repr([data.get(key) for key in ("model", "inputs", "dtype", "mode", "seed", "leaf", "passes", "device")])
    if key not in _traced:
        _traced[key] = _trace(read, *given)
    return copy.deepcopy(_traced[key])


@contextlib.contextmanager
def sharing(drawn: bool = False):
    """Runs within have traces in common, and their pictures are left out but where a test looks at them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flow, "_traced", _once)
        if not drawn:
            patch.setattr(monitor, "save_curves", lambda *given: False)
        yield


def run(out, resume=False, drawn=False, **changed: Any):
    with sharing(drawn):
        return fxplug.train(config(**changed), out=out, resume=resume, quiet=True)


def plugin(name, **hooks):
    """The import path of a new plugin with these hooks."""
    globals()[name] = type(name, (), hooks)
    return f"{__name__}:{name}"


def logged(out):
    """The records of a run's log: those of steps have a loss."""
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def notes(out):
    """What the person was told."""
    return [record["note"] for record in logged(out) if "note" in record]


def launched(folder, run, *cases, world=2):
    """`run` each (name, changes, changes of the other processes), one after the other, in processes as torchrun starts them.

    Gives for each process by name: loss and norm of the gradient of every step, or the error.
    """
    processes.as_torchrun(_in_turn, folder, run, cases, world=world)
    return [json.loads((folder / f"answers-{rank}.json").read_text()) for rank in range(world)]


def _in_turn(rank, folder, run, cases):
    answers = {}
    for name, changed, others in cases:
        changed = {**changed, **(others if rank else {})}
        try:
            done = run(folder / changed.pop("out", name), **changed)
            answers[name] = [[record["loss"], record["grad_norm"]] for record in done.history]
        except (Exception, KeyboardInterrupt) as error:
            answers[name] = f"{type(error).__name__}: {error}"
    (folder / f"answers-{rank}.json").write_text(json.dumps(answers))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def trained(module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
