"""What a run is: its model, data and settings, as far as they change what it learns. A resumed run must be the same."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.errors import TrainError
from ..core.ir.traced_module import TracedModule
from ..core.quantised import get_plain_tensors
from .checkpoint import Checkpoint, list_differences
from .random_draws import preserve_random_state, seed_all
from .train_section import Data, Train

# settings of `train` and `data` that may differ on a resume: how long, how it is divided, computed, saved and shown
FREE = (
    *("steps", "epochs", "batch", "accumulate", "parallel", "shard", "compile", "checkpointing", "fuse", "blocks_to_swap"),
    *("plugins", "on_plugin_error", "save", "log", "test", "trainable", "parallel"),
)
SHOWN_ONLY = ("samples", "prompts", "sample_steps")  # options of `denoise` that may differ, too
FREE_DATA = ("workers", "max_corrupt", "cache", "test", *("images", "classes", "dataset", "call"))  # the samples have a digest
HEADS, HEAD = 1000, 4096  # of so many files so many bytes are read
SHOWN = 16  # of the digits of a digest
SAMPLES = 3  # so many of a data set that has no files


def describe_run(
    parts: Mapping[str, TracedModule],
    settings: Train,
    *,
    config: Mapping[str, Any],
    trained: Mapping[str, Tensor],
    base: Mapping[str, Tensor],
    groups: Iterable[Mapping[str, Any]],
    kinds: tuple[str, str],
    task: Any,
    data: Any,
    samples_of_a_step: int,
    seed: int,
) -> dict[str, Any]:
    """Return plain values that are equal for two runs which learn the same from the same start; `FREE` lists what they leave
    out.

    `parts` are the modules with passes by the prefix of their names, `base` the tensors that do not train, with buffers as they
    were at the start; `kinds` the classes of optimizer and scheduler, `task` what names the task and its options.
    """
    spec = getattr(data, "spec", None)
    return {
        **{key: config.get(key) for key in ("model", "weights", "dtype", "leaf")},
        "base weights": compute_digest(base),
        "passes": {
            f"{before}{entry['name']}": {**entry["params"], "sites": len(entry["sites"])}
            for before, part in parts.items()
            for entry in part.meta.get("passes", [])
        },
        "trained": {name: list(p.shape) for name, p in trained.items()},
        "groups": {group["name"]: [group["lr"], group["weight_decay"]] for group in groups},
        "task": task,
        "train": settings.model_dump(exclude={*FREE, "task"}),
        "optimizer and scheduler": list(kinds),
        "samples of a step": samples_of_a_step,
        "data": None if spec is None else spec.model_dump(exclude={**dict.fromkeys(FREE_DATA, True), "prior": {*FREE_DATA}}),
        "samples": describe_samples(data, seed),
        "seed": seed,
    }


def check_same_run(kept: Checkpoint, run: Mapping[str, Any], path: Path) -> None:
    """Raise TrainError, with the differences, for a checkpoint of another run."""
    lines = list_differences(_without_samples(_with_later_settings(kept.run, run)), _without_samples(run))
    if not lines:
        return
    weights = [line for line in lines if line.startswith("trained.")]  # which follow from the passes, mostly
    others = [line for line in lines if line not in weights]
    more = f"and {len(weights)} trained weights"
    shown = [*others, more] if others and weights else others or [*weights[:3], *([more] if weights[3:] else [])]
    listed = "\n  ".join(shown)
    cure = "set these as they were, or start a new run from its adapter/ (the pass adapter with slots: 0)"
    raise TrainError(f"'{path}' is a checkpoint of another run: {cure}\n  {listed}")


def _without_samples(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a description without what `denoise` draws samples of."""
    task = run.get("task")
    if not isinstance(task, dict) or not isinstance(options := task.get("denoise"), dict):
        return dict(run)
    left = {key: value for key, value in options.items() if key not in SHOWN_ONLY}
    return {**run, "task": {"denoise": left} if left else "denoise"}


def _with_later_settings(kept: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a kept description with the settings that were added since, where a run has their defaults."""
    found = dict(kept)
    for key, section in (("train", Train), ("data", Data)):
        if isinstance(kept.get(key), dict) and isinstance(run.get(key), dict):
            defaults = {name: field.get_default(call_default_factory=True) for name, field in section.model_fields.items()}
            later = {k: v for k, v in run[key].items() if k not in kept[key] and k in defaults and v == defaults[k]}
            found[key] = {**later, **kept[key]}
    return found


def compute_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of names, shapes, dtypes and all values; values on the meta device are left out."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        for part in [] if tensor.is_meta else get_plain_tensors(tensor):
            flat = part.detach().cpu().contiguous().flatten()
            flat = flat.clone(memory_format=torch.contiguous_format) if flat.stride(0) != 1 else flat  # one of one element
            found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()[:SHOWN]


def describe_samples(data: Any, seed: int) -> dict[str, Any]:
    """Describe the samples of a loader: their number, their classes, and a digest.

    For files the digest is of their names, sizes and first bytes, with captions and labels; for a data set of the user's, of a
    few samples.
    """
    items = data.items
    batches = getattr(data, "described", None)
    return {
        "count": len(items) if hasattr(items, "__len__") else None,
        "classes": data.classes,
        "digest": _digest(_of_files(items) if hasattr(items, "names") else _of_a_few(items, seed)),
        **({"batches": batches} if batches else {}),
        **({"prior": describe_samples(data.prior, seed)} if getattr(data, "prior", None) is not None else {}),
    }


def _digest(parts: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()[:SHOWN]


def _of_files(items: Any) -> Iterator[bytes]:
    read = {*range(0, len(items.names), max(1, len(items.names) // HEADS))}
    conditions = items.conditions or [None] * len(items.names)
    for number, (name, values, condition) in enumerate(zip(items.names, items.values, conditions, strict=True)):
        yield repr((name, sorted(values.items(), key=lambda pair: pair[0]))).encode()
        for file in filter(None, (*items.files(number), condition)):
            with contextlib.suppress(OSError):  # one that cannot be read is told when its turn comes
                yield str(Path(file).stat().st_size).encode()
                if number in read:
                    with open(file, "rb") as opened:
                        yield opened.read(HEAD)
    for number, mask in enumerate(items.masks or []):
        with contextlib.suppress(OSError):  # as above
            yield str(mask.stat().st_size).encode()
            if number in read:
                with open(mask, "rb") as opened:
                    yield opened.read(HEAD)
    yield repr((items.repeats, items.numbers)).encode()


def _of_a_few(items: Any, seed: int) -> Iterator[bytes]:
    yield type(getattr(items, "dataset", items)).__qualname__.encode()
    if not hasattr(items, "__len__") or not hasattr(items, "__getitem__"):
        return
    last = len(items) - 1
    for index in sorted({last * part // max(1, SAMPLES - 1) for part in range(SAMPLES)} if last >= 0 else ()):
        with preserve_random_state(), contextlib.suppress(Exception):  # the data set's own, told when its turn comes
            seed_all(seed)
            yield from _bytes(items[index])


def _bytes(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        yield compute_digest({"": value}).encode()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key).encode()
            yield from _bytes(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _bytes(item)
    elif hasattr(value, "tobytes"):  # an image, an array
        yield value.tobytes()
    elif isinstance(value, (str, int, float, bool, type(None))):
        yield repr(value).encode()
