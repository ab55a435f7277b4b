"""A folder of adapters whose files are written, replaced, broken and deleted while threads lease them: under a lease an adapter
is what one of its files was, the same from beginning to end, and at last the file that is there.

All files have one size, and get one time of change, as copying tools leave them.
"""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from test_adapter_store import SIZE, Small, change, tensors, wait, want

import fxplug
from fxplug.core.errors import FxplugError
from fxplug.serving import AdapterStore
from fxplug.serving import store as stores

COST = 500  # a case is three seconds
SECONDS, USERS = 2.0, 3
NAMES = [f"n{i}" for i in range(7)]


class Case:
    """A store, and what was ever in its files."""

    def __init__(self, traced: Any, seed: int) -> None:
        self.draw, self.traced = random.Random(seed), traced
        self.module = fxplug.apply(traced, fxplug.load_pass("lora", at="**", rank=4, slots=4, per_sample=2))
        self.written = {name: list[int]() for name in NAMES}  # the numbers of all files that fitted
        self.now = dict[str, int]()
        self.number, self.time = 0, time.time_ns() - 10**11
        self.answers: dict[int, torch.Tensor] = {}
        self.misses: list[str] = []
        self.ended = threading.Event()

    def answer(self, number: int) -> torch.Tensor:
        if number not in self.answers:
            self.answers[number] = want(self.traced, self.module, number)
        return self.answers[number]

    def write(self, folder: Path, name: str) -> None:
        """Change a file in one of the ways in which files change, or unload the adapter from outside."""
        how = self.draw.choice(["replace", "replace", "write", "write", "delete", "cut", "misfit", "unload"])
        file, self.number = folder / f"{name}.safetensors", self.number + 1
        if how in ("replace", "write"):
            self.written[name].append(self.number)
            self.now[name] = self.number
        elif how != "unload":
            self.now.pop(name, None)
        raw = save(tensors(self.number, layers=("third", "fourth") if how == "misfit" else ("first", "second")))
        if how == "replace":
            other = folder / f".{name}"
            other.write_bytes(raw)
            os.replace(other, file)
        elif how == "delete":
            file.unlink(missing_ok=True)
        elif how == "unload":
            try:
                self.module.adapters.unload(name)
            except FxplugError:  # it is in no slot, or pinned
                return
        else:
            file.write_bytes(raw[: self.draw.randrange(len(raw))] if how == "cut" else raw)
        if file.exists():
            os.utime(file, ns=(self.time, self.time))

    def use(self, store: AdapterStore, seed: int) -> None:
        draw = random.Random(seed)
        while not self.ended.is_set():
            names = draw.sample(NAMES, draw.choice([1, 1, 2]))
            try:
                lease = wait(store, *names)
            except FxplugError:  # its file is broken now, or gone
                continue
            except AssertionError:
                self.misses.append(f"nobody leases {names}")
                continue
            with lease:
                name = draw.choice(names)
                first = change(self.module, [name])
                time.sleep(draw.random() * 0.02)
                if not torch.equal(first, change(self.module, [name])):
                    self.misses.append(f"{name} changed under a lease")
                if not any(is_near(first, self.answer(number)) for number in reversed(self.written[name])):
                    self.misses.append(f"{name} is what no file of it was")

    def run(self, folder: Path) -> None:
        for name in NAMES:
            (folder / f"{name}.safetensors").write_bytes(save(tensors(0)))
            self.written[name].append(0)
            self.now[name] = 0
        with AdapterStore(folder, {"unet": self.module}, host_bytes=self.draw.choice([500, 2000, 10**6])) as store:
            seeds = [self.draw.randrange(10**9) for _ in range(USERS)]
            threads = [threading.Thread(target=self.catch, args=(self.use, store, seed)) for seed in seeds]
            for thread in threads:
                thread.start()
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                self.catch(self.write, folder, self.draw.choice(NAMES))
                time.sleep(self.draw.random() * 0.05)
            self.ended.set()
            for thread in threads:
                thread.join()
            store.refresh()
            for name in NAMES:
                self.catch(self.look, store, name)

    def look(self, store: AdapterStore, name: str) -> None:
        """Look at an adapter when all is quiet."""
        try:
            with wait(store, name):
                right = name in self.now and is_near(change(self.module, [name]), self.answer(self.now[name]))
        except FxplugError:
            right = name not in self.now
        self.misses += [] if right else [f"{name} is not its file at the end"]

    def catch(self, function: Any, *args: Any) -> None:
        try:
            function(*args)
        except Exception as error:
            self.misses.append(f"{function.__name__} raises {type(error).__name__}: {error}")


def is_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-4)


def fuzz_store(cases: int, seed: int) -> list[str]:
    before, stores.SCAN = stores.SCAN, 0.05
    torch.manual_seed(0)
    traced, found = fxplug.trace(Small().eval(), torch.randn(2, SIZE)), []
    try:
        for number in range(seed, seed + cases):
            case = Case(traced, number)
            with tempfile.TemporaryDirectory() as folder:
                case.run(Path(folder))
            found += [f"seed {number}: {miss}" for miss in case.misses]
    finally:
        stores.SCAN = before
    return found
