"""Random modules of 10 to 40 operations as real source files: the same seed gives the same text and weights."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import snippets
import torch
from torch import nn

HEADER = """\
import array, asyncio, collections, contextlib, copy, dataclasses, functools, io, itertools, json
import logging, math, operator, pickle, random, re, warnings, weakref
import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

C = 8


def scripted(inner):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(inner)


"""
OUT = """\
@dataclasses.dataclass
class Out:
    sample: torch.Tensor
    aux: object = None


"""
FOLDER = tempfile.TemporaryDirectory(prefix="random_models")
NUMBER = itertools.count()


@dataclass(frozen=True)
class Snippet:
    """A few lines of a forward and what they need elsewhere."""

    name: str
    kind: str
    hostile: bool
    choices: dict[str, list[str]]
    lines: tuple[tuple[str, str], ...]  # (module | class | init | forward, text)


def read(text: str, hostile: bool) -> dict[str, Snippet]:
    found = {}
    for part in re.split(r"^# ", text, flags=re.M)[1:]:
        head, *body = part.rstrip("\n").split("\n")
        if only := re.match(r"(\w+ \w+): (.*)", head):
            head, body = only[1], [only[2]]
        title, _, given = head.partition(" | ")
        kind, name = title.split()
        lines = []
        for line in body:
            where, _, rest = line.partition(": ")
            if where == "module" and re.match(r"    def \w+\(ctx", rest) and not lines[-1][1].startswith("    @"):
                lines.append((where, "    @staticmethod"))
            lines.append((where, rest) if where in ("module", "class", "init") else ("forward", line))
        name = name if kind == "any" or name not in found else f"{kind}_{name}"
        found[name] = Snippet(name, kind, hostile, _choices(given), tuple(lines))
    return found


def _choices(given: str) -> dict[str, list[str]]:
    """`k=1,3 f=g(a, b),h(a)` as lists: `f` comes last; a semicolon parts texts that have commas."""
    found = {}
    given, _, last = f" {given}".partition(" f=")
    for name, text in [*(g.split("=") for g in given.split()), *([("f", last)] if last else [])]:
        found[name] = text.split(";") if ";" in text else re.split(r",(?! )(?![^(\[]*[)\]])", text)
    return found


ORDINARY = read(snippets.ORDINARY, False)
FAMILIES = read(snippets.FAMILIES, True)
HOSTILE = read(snippets.HOSTILE, True) | FAMILIES


@dataclass
class Step:
    """One snippet, with its number and what was chosen."""

    snippet: Snippet
    number: int
    picks: dict[str, str]


@dataclass
class Block:
    """Steps in a module of their own; `how` says how it is called."""

    kind: str
    number: int
    how: str
    steps: list[Step] = field(default_factory=list)


@dataclass
class Program:
    """A model: steps and blocks on images, then perhaps on tokens, and the kind of its result."""

    seed: int
    first: str
    stages: list[tuple[str, list[Any]]]
    result: str
    warm: bool
    training: bool
    real: bool | None
    given: str  # what the second tensor of the example is to the first

    @property
    def hostile(self) -> bool:
        return any(name in HOSTILE for name in self.names())

    def numbers(self) -> list[int]:
        items = [item for _, items in self.stages for item in items]
        return [i.number for i in items] + [s.number for i in items if isinstance(i, Block) for s in i.steps]

    def names(self) -> list[str]:
        items = [item for _, items in self.stages for item in items]
        steps = [s for i in items for s in (i.steps if isinstance(i, Block) else [i])]
        return [s.snippet.name for s in steps]

    def without(self, dropped: set[int]) -> Program:
        """The same model but for these steps and blocks."""
        stages = []
        for kind, items in self.stages:
            kept: list[Any] = []
            for item in items:
                if item.number in dropped:
                    continue
                if isinstance(item, Block):
                    item = Block(item.kind, item.number, item.how, [s for s in item.steps if s.number not in dropped])
                kept.append(item)
            stages.append((kind, kept))
        return Program(self.seed, self.first, stages, self.result, self.warm, self.training, self.real, self.given)


def program(
    seed: int, hostile: bool, only: str | None = None, fit: Callable[[Snippet], bool] = lambda snippet: True
) -> Program:
    """A random model; `hostile` puts one to three hostile snippets among the others, `only` that one alone among few."""
    rng = random.Random(f"model {seed}")
    count = rng.randint(2, 4) if only else rng.randint(10, 40)
    kinds = rng.choice([["image"], ["image", "tokens"], ["tokens"], ["ids"]])
    if only:
        kind = (HOSTILE.get(only) or ORDINARY[only]).kind
        kinds = [kind if kind != "any" else ("image", "tokens")[seed % 2]]
    numbers = itertools.count(1)
    stages: list[tuple[str, list[Any]]] = []
    for kind in kinds:
        kind = "tokens" if kind == "ids" else kind
        stages.append((kind, _items(rng, kind, max(2, count // len(kinds)), numbers, fit, plain=only is not None)))
    wanted = [only] if only else rng.sample(sorted(HOSTILE), rng.choice([1, 1, 2, 3])) if hostile else []
    if hostile and not only:  # half of them have one of these
        wanted += rng.sample(sorted(FAMILIES.keys() - wanted), rng.choice([0, 1]))
    for name in wanted:
        snippet = HOSTILE.get(name) or ORDINARY[name]
        fitting = [(kind, items) for kind, items in stages if snippet.kind in ("any", kind)]
        if fitting:
            _, items = rng.choice(fitting)
            blocks = [item.steps for item in items if isinstance(item, Block)]
            home = rng.choice([items, *blocks])
            home.insert(0 if only else rng.randint(0, len(home)), _step(rng, snippet, next(numbers)))
    results = ["tensor", "tensor", "tuple", "dict", "dataclass", "nested", "head"]
    return Program(
        seed, kinds[0], stages, rng.choice(results), rng.random() < 0.2 and not only,
        rng.random() < 0.2 and not only, rng.choice([None] * 9 + [True]),
        "" if only else rng.choice([""] * 8 + ["same", "view"]),
    )  # fmt: skip


def _step(rng: random.Random, snippet: Snippet, number: int) -> Step:
    return Step(snippet, number, {name: rng.choice(texts) for name, texts in snippet.choices.items()})


def _items(
    rng: random.Random, kind: str, count: int, numbers: Iterator[int], fit: Callable[[Snippet], bool], plain: bool
) -> list[Any]:
    fitting = [s for s in ORDINARY.values() if s.kind in (kind, "any") and fit(s)]
    if plain:  # around one snippet that is looked at
        fitting = [s for s in fitting if s.name in ("conv", "linear", "by_dim", "mlp", "conv_block")]
    items: list[Any] = []
    shrinks = 0
    while count > 0:
        if rng.random() < 0.2 and count > 3 and not plain:
            size = rng.randint(2, 4)
            block = Block(kind, next(numbers), rng.choice(["once", "twice", "list", "list", "sequential", "tuple", "keyword"]))
            block.steps = [_step(rng, rng.choice(fitting), next(numbers)) for _ in range(size)]
            items.append(block)
            count -= size
            continue
        snippet = rng.choice(fitting)
        if snippet.name == "shrink" and (shrinks := shrinks + 1) > 1:
            continue
        items.append(_step(rng, snippet, next(numbers)))
        count -= 1
    return items


# --- source


class _Writer:
    def __init__(self) -> None:
        self.module: list[str] = []
        self.classes: list[str] = []

    def body(self, items: list[Any], indent: str = "        ") -> tuple[list[str], list[str], list[str]]:
        """Lines of __init__, of the class, and of forward."""
        init: list[str] = []
        own: list[str] = []
        forward: list[str] = []
        kept = "inp"
        for item in items:
            if isinstance(item, Block):
                self.block(item, init, forward)
                continue
            if item.snippet.name == "keep":
                kept = f"keep{item.number}"
            for where, text in item.snippet.lines:
                for name, pick in item.picks.items():
                    text = text.replace("{" + name + "}", pick)
                text = text.replace("{n}", str(item.number)).replace("{kept}", kept if kept != "inp" else "x")
                if where == "module":
                    self.module.append(text)
                elif where == "class":
                    own.append("    " + text)
                elif where == "init":
                    init.append(indent + text)
                else:
                    forward.append(indent + text)
        return init, own, forward

    def block(self, block: Block, init: list[str], forward: list[str]) -> None:
        n, pad = block.number, "        "
        more, own, body = self.body(block.steps)
        returned = "x, {'mean': x.mean()}" if block.how == "tuple" else "x"
        gain = ", *, gain" if block.how == "keyword" else ""
        self.classes += [
            f"class Block{n}(nn.Module):",
            "    def __init__(self):",
            f"{pad}super().__init__()",
            *more,
            *own,
            f"    def forward(self, inp, scale=1.0, mask=None, flag=False, extra=None{gain}):",
            f"{pad}extra = {{'bias': 0.25, 'gain': 2, 'other': inp}} if extra is None else extra",
            f"{pad}x = inp",
            *body,
            *([f"{pad}x = x * gain"] if block.how == "keyword" else []),
            f"{pad}return {returned}",
            "",
            "",
        ]
        if block.how == "list":
            init.append(f"{pad}self.blocks{n} = nn.ModuleList([Block{n}() for _ in range(2)])")
            forward += [f"{pad}for i, block in enumerate(self.blocks{n}):", f"{pad}    x = block(x, scale, mask=mask)"]
        elif block.how == "sequential":
            init.append(f"{pad}self.blocks{n} = nn.Sequential(Block{n}(), nn.Identity(), Block{n}())")
            forward.append(f"{pad}x = self.blocks{n}(x)")
        else:
            init.append(f"{pad}self.block{n} = Block{n}()")
            call = {"tuple": f"x, aux = self.block{n}(x)", "keyword": f"x = self.block{n}(inp=x, gain=0.5)"}
            line = call.get(block.how, f"x = self.block{n}(x, flag=flag)")
            forward += [f"{pad}{line}"] * (2 if block.how == "twice" else 1)


RETURNS = {
    "tensor": "x",
    "tuple": "(x, x.mean(1), None)",
    "dict": "{'out': x, 'size': x.shape[1], 'flag': flag}",
    "dataclass": "Out(x, x.mean(0))",
    "nested": "[x, {'a': (x * 2, [x.mean()])}]",
    "head": "self.head(x.mean(tuple(range(2, x.dim()))) if x.dim() == 4 else x.mean(1))",
}


def source(model: Program) -> str:
    """The text of a module with a class Net."""
    writer = _Writer()
    pad = "        "
    init: list[str] = []
    own: list[str] = []
    forward: list[str] = []
    for index, (_, items) in enumerate(model.stages):
        if index:
            forward.append(f"{pad}x = x.flatten(2).transpose(1, 2)")
        for lines, new in zip((init, own, forward), writer.body(items), strict=True):
            lines += new
    if model.first == "ids":
        init.insert(0, f"{pad}self.words = nn.Embedding(16, C)")
    if model.result == "head":
        init.append(f"{pad}self.head = nn.Linear(C, 5)")
    start = [f"{pad}ids, inp = inp, self.words(inp)"] if model.first == "ids" else []
    net = [
        "class Net(nn.Module):",
        "    def __init__(self):",
        f"{pad}super().__init__()",
        *init,
        *own,
        "    def forward(self, inp, scale=1.0, mask=None, *, flag=False, extra=None):",
        f"{pad}extra = {{'bias': 0.25, 'gain': 2, 'other': inp}} if extra is None else extra",
        *start,
        f"{pad}x = inp",
        *forward,
        f"{pad}return {RETURNS[model.result]}",
    ]
    head = HEADER + OUT if model.result == "dataclass" else HEADER
    return head + "\n".join([*writer.module, "", "", *writer.classes, *net, ""])


def write(text: str) -> Path:
    """The text as a file of its own, whose lines an error can name."""
    file = Path(FOLDER.name) / f"random_model_{next(NUMBER)}.py"
    file.write_text(text)
    return file


@functools.lru_cache(maxsize=8)
def _code(file: Path) -> Any:
    return compile(file.read_text(), str(file), "exec")


@contextmanager
def built(file: Path, seed: int) -> Iterator[tuple[ModuleType, nn.Module]]:
    """A new module of this file, in sys.modules for the time, and a model of its class Net in evaluation mode."""
    name = f"{file.stem}_{next(NUMBER)}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    space = importlib.util.module_from_spec(spec)
    sys.modules[name] = space
    try:
        exec(_code(file), vars(space))
        torch.default_generator.manual_seed(seed)
        yield space, space.Net().eval()
    finally:
        del sys.modules[name]
