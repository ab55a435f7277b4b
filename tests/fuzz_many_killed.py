"""Runs of many adapters on folders of images, killed at a random moment and resumed: each must be the run that nobody killed,
to the bit, and each adapter what its run alone is.

Folders are shared between adapters or not, one may be empty or have a file that is no image, samples are loaded by workers or
not, and precisions and lengths are drawn. `fuzz_many_killed(cases, seed)` returns a line for each miss.
"""

from __future__ import annotations

import copy
import os
import random
import signal
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import many_adapters as many
import torch
from PIL import Image

import fxplug
import fxplug.training.run
from fxplug.core.errors import FxplugError
from fxplug.training.checkpoint import list_checkpoints, read

COST = 1000  # a case is four trainings in processes of their own
PRECISIONS = ("fp32", "fp32", "bf16")


def make_folder(path: Path, seed: int, count: int, odd: bool = False) -> None:
    """Draw images of two classes; an `odd` folder has a file that is none."""
    chance = random.Random(seed)
    for number in range(count):
        file = path / "ab"[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.frombytes("RGB", (8, 7), chance.randbytes(8 * 7 * 3)).save(file)
    path.mkdir(parents=True, exist_ok=True)
    if odd:
        (path / "a" / "odd.png").write_bytes(b"no image")


def draw_config(chance: random.Random, home: Path) -> tuple[dict[str, Any], str]:
    """Draw a run, and the name of an adapter whose folder is empty, or ""."""
    folders = [home / f"data{n}" for n in range(2)]
    for n, folder in enumerate(folders):
        make_folder(folder, n, chance.randint(4, 9), chance.random() < 0.2)
    empty, adapters = "", []
    for n in range(chance.randint(2, 5)):
        row: dict[str, Any] = {"name": f"a{n}", "rank": chance.randint(1, 4), "seed": n, "batch": chance.randint(1, 3)}
        row |= {"steps": chance.randint(1, 8), "lr": chance.choice((1e-3, 0.1)), "accumulate": chance.choice((1, 1, 2))}
        row |= {"data": {"classes": str(chance.choice(folders))}, "dropout": chance.choice((0.0, 0.3))}
        row |= {"ema": chance.choice((None, 0.9)), "clip": chance.choice((None, 0.1))}
        if chance.random() < 0.1:
            row |= {"lr": 1e30}  # it may get NaN
        adapters.append(row)
    if chance.random() < 0.1:
        make_folder(home / "empty", 0, 0)
        empty, adapters[-1]["data"] = adapters[-1]["name"], {"classes": str(home / "empty")}
    train = {"task": "classify", "mode": "eval", "steps": 4, "save": {"every": chance.randint(1, 3), "keep": 99}}
    train |= {"log": {"tensorboard": False}, "precision": chance.choice(PRECISIONS), "adapters": adapters}
    train |= {"in_turn": chance.choice((None, False, True))}
    workers = chance.choice((0, 0, 2))
    return {
        "model": "many_adapters:build",
        "inputs": {"x": {"shape": [2, 3, 6, 6], "dtype": "float64"}},
        "passes": [{"lora": {"at": ["stem", "qkv"], "rank": 4, "slots": chance.randint(1, len(adapters))}}],
        "train": train,
        "data": {"classes": str(folders[0]), "size": 6, "workers": workers, "max_corrupt": 2},
        "device": "cpu",
        "verify": False,
    }, empty


def train_apart(config: dict[str, Any], out: Path, seconds: float | None = None, **more: Any) -> tuple[int, str]:
    """Train in a process of its own, which is killed after so many seconds; return its exit code and its error."""
    note = out.parent / f"{out.name}.error"
    child = os.fork()
    if not child:
        code = 0
        try:
            torch.set_num_threads(1)
            fxplug.train(copy.deepcopy(config), out=out, quiet=True, **more)
        except FxplugError as error:
            note.write_text(str(error))
            code = 1
        except BaseException:
            note.write_text(traceback.format_exc())
            code = 2
        os._exit(code)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, note.read_text() if code > 0 else ""


def read_end(out: Path) -> Any:
    """Return the state of a run's last checkpoint, and the bytes of its adapters."""
    files = {str(file.relative_to(out)): file.read_bytes() for file in sorted((out / "adapter").rglob("*.safetensors"))}
    return read(list_checkpoints(out / "checkpoints")[-1]).state, files


def play(seed: int) -> str:
    """Return what is wrong with one case; "" for nothing."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        config, empty = draw_config(chance, home)
        begun = time.monotonic()
        code, error = train_apart(config, home / "whole")
        took = time.monotonic() - begun
        if empty or code == 1:
            fine = code == 1 and (not empty or empty in error or "adapters.[" in error or "empty" in error)
            fine &= bool(empty) or "every adapter failed" in error
            return "" if fine else f"exit code {code}, with {empty or 'no'} empty folder: {error}"
        if code:
            return error
        killed = home / "killed"
        for _ in range(chance.randint(1, 2)):
            found = (killed / "checkpoints").is_dir() and list_checkpoints(killed / "checkpoints")
            code, error = train_apart(config, killed, took * chance.random() * 1.1, **({"resume": killed} if found else {}))
            if code > 0:
                return f"killed: {error}"
        found = (killed / "checkpoints").is_dir() and list_checkpoints(killed / "checkpoints")
        code, error = train_apart(config, killed, **({"resume": killed} if found else {}))
        if code:
            return f"resumed, exit code {code}: {error}"
        if not many.are_equal(read_end(home / "whole"), read_end(killed)):
            return "resumed it is another"
        return compare_alone(config, home, chance)


def compare_alone(config: dict[str, Any], home: Path, chance: random.Random) -> str:
    """Return how far one adapter is from its run alone; "" for nothing."""
    state = read(list_checkpoints(home / "whole" / "checkpoints")[-1]).state
    one = chance.choice(config["train"]["adapters"])
    if state["progress"]["adapters"][one["name"]]["failed"] or config["train"]["precision"] != "fp32":
        return ""
    own = copy.deepcopy(config)
    settings = {key: value for key, value in one.items() if key not in ("name", "rank", "dropout", "data", "seed")}
    del own["train"]["adapters"], own["train"]["in_turn"]
    own["train"] |= settings
    own["data"] |= one["data"]
    own["seed"] = one["seed"]
    own["passes"] = [{"lora": {"at": ["stem", "qkv"], "rank": one["rank"], "dropout": one["dropout"]}}]
    code, error = train_apart(own, home / "alone")
    if code:
        return f"alone: {error}"
    mine = read(list_checkpoints(home / "alone" / "checkpoints")[-1]).state["weights"]
    start = f"{one['name']}/"
    theirs = {key.removeprefix(start): value for key, value in state["weights"].items() if key.startswith(start)}
    far = many.distance(theirs, mine)
    return f"{one['name']} is {far:.1g} away from its run alone" if far > 1e-9 else ""


def fuzz_many_killed(cases: int, seed: int) -> list[str]:
    torch.set_num_threads(1)
    many.base()  # so that libraries are imported once
    found = ((n, play(n)) for n in range(seed, seed + cases))
    return [f"seed {n}: {line}" for n, line in found if line]
