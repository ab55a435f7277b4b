"""Random passes in layers that are called once, several times, in each other, and tied: merged is un-merged, or refused."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import fxplug
from fxplug.core.errors import FxplugError, SpecError

VALUES = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
ROWS, IDS, PICTURES = VALUES.mT.contiguous(), torch.tensor([[1, 4, 0], [5, 2, 2]]), VALUES[:, :, None].expand(-1, -1, 4, -1)
KINDS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {  # a layer that gives what it takes, and an input
    "linear": (lambda: nn.Linear(6, 6), ROWS),
    "without bias": (lambda: nn.Linear(6, 6, bias=False), ROWS),
    "transposed": (lambda: Conv1D(6, 6), ROWS),
    "conv1d": (lambda: nn.Conv1d(6, 6, 3, padding=1), VALUES),
    "conv2d": (lambda: nn.Conv2d(6, 6, 3, padding=1), PICTURES),
    "groups": (lambda: nn.Conv2d(6, 6, 1, groups=2), PICTURES),
    "layer norm": (lambda: nn.LayerNorm(6), ROWS),
    "rms norm": (lambda: nn.RMSNorm(6), ROWS),
    "group norm": (lambda: nn.GroupNorm(2, 6), VALUES),
    "batch norm": (lambda: nn.BatchNorm1d(6), VALUES),
    "embedding": (lambda: nn.Embedding(6, 6), IDS),
    "bounded embedding": (lambda: nn.Embedding(6, 6, max_norm=0.5), IDS),
}
PASSES: dict[str, dict[str, Any]] = {
    "lora": {}, "lora with bias": {"bias": True}, "dora": {}, "loha": {}, "lokr": {}, "vera": {}, "lora_weight": {},
    "delta": {}, "bitfit": {}, "oft": {"block_size": 3}, "boft": {"block_size": 3, "factors": 1}, "scale": {}, "ssf": {},
    "ia3": {}, "ia3 before": {}, "weight_norm": {}, "spectral_norm": {},
}  # fmt: skip
BETWEEN: list[Callable[[Tensor], Tensor]] = [torch.tanh, lambda x: x * 0.5, lambda x: x + 1, lambda x: x.flip(0)]
TOLERANCE = 1e-9  # of the largest value, in float64


class Net(nn.Module):
    """Some steps over two layers of a kind: each takes what an earlier one gave, and all that nothing takes is summed."""

    def __init__(self, kind: str, steps: list[tuple[str, int]], tied: bool) -> None:
        super().__init__()
        self.a, self.b = KINDS[kind][0](), KINDS[kind][0]()
        self.first = self.a if isinstance(self.a, nn.Embedding) else None
        if self.first is not None:
            self.a, self.b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        self.steps = steps
        for parameter in self.parameters():
            nn.init.normal_(parameter)
        if tied:
            self.b.weight = self.a.weight
            if self.first is not None:
                self.first.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        values = [x if self.first is None else self.first(x)]
        left = {0}
        for what, read in self.steps:
            layer: Any = getattr(self, what) if what in "ab" else BETWEEN[int(what)]
            values.append(layer(values[read]))
            left = left - {read} | {len(values) - 1}
        return torch.stack([values[n] for n in sorted(left)]).sum(0)


def build(rng: random.Random) -> tuple[str, fxplug.TracedModule, Tensor]:
    """A random net with passes, their new weights random, and its input. """
    kind, tied = rng.choice(list(KINDS)), rng.random() < 0.3
    steps = []
    for n in range(rng.randint(1, 5)):
        read = n if rng.random() < 0.6 else rng.randint(0, n)
        steps.append((rng.choice("aaabb") if rng.random() < 0.7 else str(rng.randrange(len(BETWEEN))), read))
    torch.manual_seed(rng.randrange(2**31))
    x = KINDS[kind][1]
    made = fxplug.trace(Net(kind, steps, tied).double().eval(), x)
    text = f"{kind}{' tied' if tied else ''} {steps}"
    for n in range(rng.choice([1, 1, 2, 3])):
        name, at = rng.choice(list(PASSES)), rng.choice(["a", "b", "**"])
        given = {"at": [], "feedforward": at} if name == "ia3 before" else {**PASSES[name], "at": at}
        with contextlib.suppress(FxplugError):  # a pass that is not for such a layer
            made = fxplug.apply(made, fxplug.load_pass(name.split()[0], name=f"p{n}", **given))
            text += f" {name} at {at}"
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=torch.float64) * 0.3)
    return text, made, x


def fuzz_merging(cases: int, seed: int, counts: Counter[str] | None = None) -> list[str]:
    """Merge all passes of random nets, some of them, and what `lower` takes; `counts` gets how many were merged and refused."""
    found = []
    counts = Counter() if counts is None else counts
    for n in range(seed, seed + cases):
        rng = random.Random(n)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            text, new, x = build(rng)
            names = [entry["name"] for entry in new.meta.get("passes", [])]
            try:
                want = new(x)
            except RuntimeError:  # indices that were scaled
                continue
            if not names:
                continue
            some = rng.sample(names, rng.randint(1, len(names)))
            for what, merge in {
                "merge": lambda: fxplug.merge(new),  # noqa: B023
                f"merge {some}": lambda: fxplug.merge(new, passes=some),  # noqa: B023
                "auto": lambda: fxplug.lower(new, merge="auto", fuse=None),  # noqa: B023
            }.items():
                try:
                    merged = merge()
                except SpecError as error:
                    counts["refused"] += 1
                    if "cannot be merged" not in str(error) or what == "auto":
                        found.append(f"case {n}: {text}: {what}: {error}")
                    continue
                counts["merged"] += 1
                gap = ((merged(x) - want).abs().max() / want.abs().max()).item()
                if not gap < TOLERANCE:
                    found.append(f"case {n}: {text}: {what} is {gap:.1e} off")
    return found
