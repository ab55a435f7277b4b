"""Calls beside changes of adapters, in every form: each call gives what one state gives that was there.

`fuzz_switching(cases, seed)` makes so many calls over all forms and returns a row for each; `python tests/fuzz_switching.py
--cases N --seed S` prints them.
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fxplug
from fxplug.adapters.files import AdapterFile, read
from fxplug.core.errors import FxplugError
from fxplug.lowerings.regions.submodules import outline
from fxplug.step_cache.cache import StepCache, Threshold

WIDTH, SLOTS, RANK, CALLERS = 16, 3, 4, 8
LAYERS = [f"blocks.{i}.{name}" for i in range(3) for name in ("q", "k", "v", "out")]


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        return x + self.out(nn.functional.gelu(self.q(x) * self.k(x)) + self.v(x))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Part() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def example() -> torch.Tensor:
    return torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1))


@cache
def base() -> fxplug.core.capture.tracer.TracedModule:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return fxplug.trace(Chain().eval(), example())


def slotted(*more: Any) -> fxplug.core.capture.tracer.TracedModule:
    return fxplug.apply(base(), fxplug.load_pass("lora", at="blocks.**", within=["Linear"], rank=RANK, slots=SLOTS), *more)


@cache
def adapter(seed: int) -> AdapterFile:
    """An adapter of a rank of its own on layers of its own."""
    gen, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    rank, made = rng.randint(1, RANK), {}
    for path in rng.sample(LAYERS, rng.randint(4, len(LAYERS))):
        made[f"{path}.lora_A.weight"] = torch.randn(rank, WIDTH, generator=gen)
        made[f"{path}.lora_B.weight"] = torch.randn(WIDTH, rank, generator=gen) * 0.3
    return read(made)


# --- the forms


@dataclass
class Subject:
    call: Callable[[torch.Tensor], torch.Tensor]
    adapters: Any
    mixes: bool = True  # whether samples may have entries of their own
    callers: int = CALLERS


def compiled(module: Any, mixes: bool = True, **options: Any) -> Subject:
    torch.compile(module, fullgraph=True, **options)(example())  # it is one graph
    # torch counts the frames of fullgraph=True for the process: calls by several threads may find none, of a plain model too
    return Subject(torch.compile(module, **options), module.adapters, mixes)


def plain(module: Any, mixes: bool = True) -> Subject:
    return Subject(module, module.adapters, mixes)


def live(**options: Any) -> Any:
    return fxplug.lower(slotted(), merge="live", fuse=None, **options)


def steps() -> Subject:
    """First part and rest, one after the other."""
    marked = slotted(fxplug.load_pass("first_block_cache", first="blocks.0", last="blocks.{-1}"))
    module = StepCache(marked, Threshold(0.0), clock=None)
    return Subject(module, module.adapters, callers=1)


def inside() -> Subject:
    new = slotted()
    return Subject(nn.Sequential(new, nn.Identity()), new.adapters)


def again() -> Subject:
    """Traced within another module."""
    new = slotted()
    return Subject(fxplug.trace(nn.Sequential(new, nn.Identity()), example()), new.adapters)


def method() -> Subject:
    new = slotted()
    torch.compile(new, fullgraph=True, backend="eager")(example())
    new.compile(backend="eager")  # without fullgraph, as above
    return plain(new)


FORMS: dict[str, Callable[[], Subject]] = {
    "eager": lambda: plain(slotted()),
    "fused": lambda: plain(fxplug.fuse(slotted(), "fused")),
    "live merge": lambda: plain(live(), False),
    "outlined": lambda: plain(outline(slotted(), ["blocks.*"])),
    "step cache": steps,
    "in a Sequential": inside,
    "traced again": again,
    "compiled": lambda: compiled(slotted(), backend="aot_eager"),
    "compiled, dynamic": lambda: compiled(slotted(), dynamic=True, backend="eager"),
    "compiled live merge": lambda: compiled(live(), False, backend="eager"),
    "compile()": method,
}


def package(folder: Path) -> Callable[[], Subject]:
    """A package; it is compiled once and loaded for each subject."""
    fxplug.export(slotted(), folder / "chain", example(), to="aoti")

    def load() -> Subject:
        found = fxplug.load_package(folder / "chain.aoti.pt2", trusted=True, runners=CALLERS)
        return Subject(found, found.adapters)

    return load


# --- what is done


def plan(rng: random.Random, count: int, mixes: bool) -> list[tuple[str, tuple[Any, ...]]]:
    """Changes that end where they began, some of which fail; the first one loads what all are about."""
    held: dict[str, None] = {}
    made: list[tuple[str, tuple[Any, ...]]] = []
    for _ in range(count):
        names, what = list(held), rng.random()
        if len(names) < 2 or (what < 0.15 and len(names) < SLOTS):
            name = next(n for n in "abcd" if n not in held)
            held[name] = None
            made.append(("load", (name, rng.randrange(1000))))
        elif what < 0.3:
            made.append(("replace", (rng.choice(names), rng.randrange(1000))))
        elif what < 0.4:
            made.append(("unload", (rng.choice(names),)))
            del held[made[-1][1][0]]
        elif what < 0.45:
            made.append(("fail", (rng.choice(names),)))
        elif what < 0.48:
            made.append(("both", (rng.choice(names), rng.randrange(1000))))
        elif what < 0.5:
            made.append(("undone", (rng.choice(names), rng.randrange(1000))))
        elif what < 0.6 and mixes:
            made.append(("use", ([rng.choice([None, *names]) for _ in range(2)],)))
        else:
            picked = rng.sample(names, rng.randint(1, len(names)))
            made.append(("use", ({name: rng.choice([0.5, 1.0, -0.7]) for name in picked},)))
    return [*made, ("use", (None,)), *(("unload", (name,)) for name in held)]


def do(adapters: Any, action: str, args: tuple[Any, ...]) -> None:
    if action == "load":
        adapters.load(args[0], adapter(args[1]))
    elif action == "replace":
        adapters.load(args[0], adapter(args[1]), replace=True)
    elif action == "both":  # two changes that are one
        with adapters.change():
            adapters.use(args[0])
            adapters.load(args[0], adapter(args[1]), replace=True)
    elif action == "undone":  # two changes that are one, and an error behind them
        before = adapters.names, adapters.active
        try:
            with adapters.change():
                adapters.use(args[0])
                adapters.load(args[0], adapter(args[1]), replace=True)
                adapters.use({"none": 1.0})
        except FxplugError:
            assert before == (adapters.names, adapters.active)
            return
        raise AssertionError("an adapter that is not loaded was used")
    elif action == "fail":
        try:
            adapters.use({args[0]: 1.0, "none": 1.0})
        except FxplugError:
            return
        raise AssertionError("an adapter that is not loaded was used")
    else:
        getattr(adapters, action)(*args)


def stress(
    make: Callable[[], Subject], calls: int, seed: int, until_torn: bool = False, changes: int = 40
) -> dict[str, int]:
    """Calls by some threads while another one changes the adapters over and over; how many there were, and how many torn."""
    rng, x = random.Random(seed), example()
    subject = make()  # and no twin: where memory is aligned otherwise, a product may be rounded otherwise
    actions = plan(rng, changes, subject.mixes)
    with torch.no_grad():
        wanted = [subject.call(x)]
        for action in actions:
            do(subject.adapters, *action)
            wanted.append(subject.call(x))
        assert torch.equal(wanted[0], wanted[-1]) and len(set(map(str, wanted))) > changes // 4
    found = {"calls": 0, "changes": 0, "torn": 0, "beside a change": 0}
    left, lock, errors, stop = [calls], threading.Lock(), [], threading.Event()
    begun = done = 0  # changes

    def change() -> None:
        nonlocal begun, done
        while not stop.is_set():
            for action in actions:
                begun += 1
                do(subject.adapters, *action)
                done += 1

    def call() -> None:
        with torch.no_grad():
            while not stop.is_set():
                with lock:
                    left[0] -= 1
                    if left[0] < 0:
                        return
                first = done
                try:
                    out = subject.call(x)
                except RuntimeError:  # a state so torn that the call itself sees it
                    if not until_torn:
                        raise
                    out = None
                last = begun
                states = {n % len(actions) for n in range(first, last + 1)}
                torn = out is None or not any(torch.equal(out, wanted[n]) for n in states)
                with lock:
                    found["calls"] += 1
                    found["torn"] += torn
                    found["beside a change"] += len(states) > 1
                if torn and until_torn:
                    stop.set()

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)
            stop.set()

    changer = threading.Thread(target=guarded, args=(change,))
    callers = [threading.Thread(target=guarded, args=(call,)) for _ in range(subject.callers)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that threads meet at many places
    try:
        for thread in (changer, *callers):
            thread.start()
        for thread in callers:
            thread.join()
        stop.set()
        changer.join()
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]
    assert found["beside a change"], "no call was made beside a change"
    return {**found, "changes": done}


def fuzz_switching(cases: int, seed: int) -> list[str]:
    """So many calls over all forms, a package and inductor's code among them; a line for each form where some were torn."""
    torn = []
    with tempfile.TemporaryDirectory() as folder:
        forms = {**FORMS, "compiled by inductor": lambda: compiled(slotted()), "package": package(Path(folder))}
        for number, (name, make) in enumerate(forms.items()):
            row = stress(make, -(-cases // len(forms)), seed + number)
            torn += [f"{name}: {row['torn']} calls of {row}"] if row["torn"] else []
            print(f"{name:22}", *(f"{count:7} {what}" for what, count in row.items()), sep="  ", flush=True)
    return torn

