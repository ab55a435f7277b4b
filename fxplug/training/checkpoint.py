"""Checkpoints of a run: written whole or not at all, the oldest removed, read without unpickling."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core import reading, weight_files
from ..core.errors import DEFAULT, Limits, TrainError, cut, format_fields
from ..core.weight_files import save_file
from ..core.writing import open_new, replace_folder

FORMAT = 2
PREFIX = "step-"


@dataclass
class Checkpoint:
    """A `TrainState.state_dict()`, on the CPU, the generators of each process (`random`), and of which `run` it is (plain
    values, see `identity`)."""

    state: dict[str, Any]
    run: dict[str, Any] = field(default_factory=dict)
    random: list[dict[str, Any]] = field(default_factory=list)

    __repr__ = format_fields

    @property
    def step(self) -> int:
        """Number of optimizer steps before this checkpoint was taken."""
        return int(self.state["progress"]["step"])


def write(folder: Path, made: Checkpoint, keep: int) -> Path:
    """Write `folder/step-00000100` and remove all but the newest `keep`. A crash at any moment leaves whole ones only."""
    target = folder / f"{PREFIX}{made.step:08}"
    write_to(target, made)
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def write_to(target: Path, made: Checkpoint) -> None:
    """Write a checkpoint to the folder `target`, replacing what is there."""
    weights, ema, progress = (made.state[key] for key in ("weights", "ema", "progress"))
    rest = {key: value for key, value in made.state.items() if key not in ("weights", "ema", "progress")}
    with replace_folder(target, own=os.listdir) as work:
        save_file(weights, work / "weights.safetensors")
        if ema:
            save_file(ema, work / "ema.safetensors")
        with open_new(work / "state.pt") as file:
            torch.save({"state": rest, "random": made.random}, file)
        tensors = _shapes({"weights": weights, "ema": ema, **rest})
        text = json.dumps({"format": FORMAT, "progress": progress, "run": made.run, "tensors": tensors}, indent=1)
        (work / "progress.json").write_text(text, "utf-8")


def _shapes(tree: Any, path: str = "") -> dict[str, str]:
    """Return the dtype and shape of each tensor of a tree by its path, such as `optimizer.state.0.exp_avg`."""
    if isinstance(tree, Tensor):
        return {path: f"{str(tree.dtype).removeprefix('torch.')} {list(tree.shape)}"}
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    found: dict[str, str] = {}
    for key, value in items:
        found |= _shapes(value, f"{path}.{key}".lstrip("."))
    return found


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the oldest first."""
    return sorted(path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit())


def find_newest(source: Path) -> Path:
    """Return `source` if it is a checkpoint, else the newest checkpoint below it. Raises TrainError when there is none."""
    for path in (source, *reversed(list_checkpoints(source / "checkpoints")), *reversed(list_checkpoints(source))):
        if (path / "progress.json").is_file():
            return path
    raise TrainError(f"'{source}' has no checkpoint to resume from")


def read(folder: Path, limits: Limits = DEFAULT) -> Checkpoint:
    """Read a checkpoint, onto the CPU. It holds tensors and plain values, and nothing is unpickled. Raises TrainError for a
    checkpoint that is damaged or beyond `limits`."""

    def raises(finding: str) -> TrainError:
        return TrainError(f"'{folder}' {finding}; resume from another one")

    try:
        said = reading.read_json(folder / "progress.json", raises, limits)
        if said.get("format") == 1:
            raise raises("is a checkpoint of an earlier version, which counts batches and not samples")
        reading.check_format(said, FORMAT, raises)
        weights, _ = weight_files.read(folder / "weights.safetensors", raises=raises, limits=limits)
        averaged = (folder / "ema.safetensors").is_file()
        ema = weight_files.read(folder / "ema.safetensors", raises=raises, limits=limits)[0] if averaged else {}
        rest, _ = weight_files.read(folder / "state.pt", raises=raises, limits=limits)
        tensors = _shapes({"weights": weights, "ema": ema, **rest["state"]})
        if lines := list_differences(said["tensors"], tensors, words=("as it was written", "now")):
            raise raises(f"was changed: {cut('; '.join(lines), 400)}")
        state = {**rest["state"], "weights": weights, "ema": ema, "progress": said["progress"]}
        return Checkpoint(state, said["run"], rest["random"])
    except TrainError:
        raise
    except Exception as error:  # of a damaged file, whatever it holds
        raise TrainError(f"'{folder}' cannot be read: {type(error).__name__}: {error}; resume from another one") from error


def list_differences(then: Any, now: Any, path: str = "", words: tuple[str, str] = ("then", "now")) -> list[str]:
    """Return one line per difference of two trees of plain values, such as `passes.lora.rank: 8 then, 16 now`."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        keys = list(dict.fromkeys([*then, *now]))
        missing = "nothing"
        below = [list_differences(then.get(k, missing), now.get(k, missing), f"{path}.{k}".lstrip("."), words) for k in keys]
        return [line for lines in below for line in lines]
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        below = [list_differences(a, b, f"{path}[{index}]", words) for index, (a, b) in enumerate(zip(then, now, strict=True))]
        return [line for lines in below for line in lines]
    same = json.loads(json.dumps(then)) == json.loads(json.dumps(now))
    return [] if same else [f"{path}: {cut(str(then), 80)} {words[0]}, {cut(str(now), 80)} {words[1]}"]
