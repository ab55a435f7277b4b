"""Small training runs on real digits, for the tests of the trainer."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import pickle
from typing import Any

import processes
import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset

import fxplug
from fxplug.config import flow
from fxplug.config.run_config import resolve
from fxplug.core.errors import GuardError
from fxplug.pipelines import call_forms
from fxplug.training import monitor
from fxplug.training.tasks import sized_parts


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
build_traced, _trace = flow._traced, flow._trace


def _once(read, *given):
    """A model that a configuration alone makes, or a saved pipeline, traced once; the runs train copies."""
    if read.weights is not None or (key := _key_of(read, given[-1])) is None:
        return build_traced(read, *given)
    if key not in _traced:
        module, built = build_traced(read, *given)
        for other in built.beside.values():
            other.traced = _trace(read, other, given[0])
        if built.pipeline is not None:
            built.pipeline.made_of = key
        _traced[key] = module, built
    return copy.deepcopy(_traced[key])


def _key_of(read, device):
    """What a trace depends on: None where that is more than a configuration and the files of a pipeline say."""
    data = resolve(read)
    said = repr([data.get(key) for key in ("model", "inputs", "dtype", "mode", "seed", "leaf", "passes", "device")])
    if read.model.kind == "timm" or isinstance(read.model.target, dict):
        return said
    folder = read.base / str(read.model.target)
    if read.model.kind != "pipeline" or read.model.config is not None or not folder.is_dir():
        return None
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    digest = hashlib.sha256(b"".join(str(path.relative_to(folder)).encode() + path.read_bytes() for path in files))
    size = getattr(getattr(read, "data", None), "size", None)  # of which the example call is
    rest = {**data["model"], "pipeline": digest.hexdigest()}, sorted(flow._later(read)), size, device
    return repr([rest, *(data.get(key) for key in ("inputs", "dtype", "mode", "seed", "leaf", "device"))])


def _trace_of(config, built, step):
    """As it was traced beside another model of its pipeline."""
    return vars(built).get("traced") or _trace(config, built, step)


_seen: dict[str, Any] = {}
_observe, _confirm, _add_size_forms = sized_parts.observe, sized_parts.confirm, sized_parts.add_size_forms


def describe(pipe, *given):
    """Describe what is seen of a pipeline depends on: None where that cannot be told, as of one put together otherwise."""
    if not hasattr(pipe, "made_of"):
        return None
    parts = {name: (type(part), getattr(part, "config", None)) for name, part in pipe.components.items()}
    try:
        call = hashlib.sha256(pickle.dumps(given)).hexdigest()
    except (TypeError, AttributeError, pickle.PicklingError):
        return None
    return repr([type(pipe), pipe.made_of, parts, call])


def observe_once(pipe, call, part=None):
    """A tiny or saved pipeline is observed once for each call."""
    if (key := describe(pipe, call, part)) is None:
        return _observe(pipe, call, part)
    if key not in _seen:
        _seen[key] = _observe(pipe, call, part)
    return copy.deepcopy(_seen[key])


def _confirm_once(pipe, seen, calls):
    """What was seen is confirmed once."""
    if (key := describe(pipe, seen.part, seen.call, calls)) is None:
        return _confirm(pipe, seen, calls)
    if key not in _seen:
        _seen[key] = _confirm(pipe, seen, calls)
    return _seen[key]


def _add_size_forms_once(module, calls):
    """Where these calls have brought a module of the same kind no graph, they bring another one none."""
    calls, passes = list(calls), module.meta.get("passes")
    key = describe(calls[0].pipe, [each.arguments for each in calls], module.variants, passes, calls[0].part)
    if key is None or key not in _seen:
        before = module.variants
        _add_size_forms(module, calls)
        if key is not None and module.variants == before:
            _seen[key] = True


def _has_graph_for(module, call):
    """As of `call_forms`, by a run on the values themselves, which of a tiny model takes less time than one without values."""
    with call_forms._without_model(module), torch.random.fork_rng([]), torch.no_grad():
        try:
            module.forward(*call[0], **call[1])
        except GuardError:
            return False
        except Exception:  # an operation's
            return True
    return True


@contextlib.contextmanager
def sharing(drawn: bool = False):
    """Runs within have in common what is traced and seen of a model, and make pictures only where a test looks at them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flow, "_traced", _once)
        patch.setattr(flow, "_trace", _trace_of)
        patch.setattr(call_forms, "has_graph_for", _has_graph_for)
        patch.setattr(sized_parts, "observe", observe_once)
        patch.setattr(sized_parts, "confirm", _confirm_once)
        patch.setattr(sized_parts, "add_size_forms", _add_size_forms_once)
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
