"""Random models whose values move, mix, shrink and join words: each layer takes the mask of its places, or is refused.

Beside the values go codes, of which place of which level each entry is. What moves entries moves the codes by the same call.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxplug
from fxplug.core.errors import FxplugError, SpecError

WORDS, MIXED = -1.0, float("nan")  # the code of what has no place, and of what has several
TOLERANCE = 1e-4  # of the largest update
COST = 20


def make_codes(height: int, width: int) -> Tensor:
    """Return the codes of a level, (height, width)."""
    return (height * 100 + width) * 1e4 + torch.arange(height * width, dtype=torch.float64).view(height, width)


def mix(codes: Tensor, dim: int, size: int) -> Tensor:
    """Return the codes of what a layer makes along a dimension, of that size."""
    low, high = codes.amin(dim, keepdim=True), codes.amax(dim, keepdim=True)
    one = torch.where(low == high, low, MIXED)
    return one.expand(*[size if d == dim % codes.dim() else n for d, n in enumerate(one.shape)]).clone()


def join(one: Tensor, two: Tensor) -> Tensor:
    """Return the codes of a sum: those of a place, beside words or what is mixed."""
    one, two = torch.broadcast_tensors(one, two)
    both = torch.where((one == two) | two.isnan() | (two == WORDS), one, MIXED)
    return torch.where((one == WORDS) | (one.isnan() & ~two.isnan()), two, both)


class Run:
    """One call of a model, on values or on codes; its layers are made in the first one, in the order of their use."""

    def __init__(self, model: Model, picture: Tensor, words: Tensor, coded: bool) -> None:
        self.model, self.coded, self.picture, self.value, self.words, self.count = model, coded, picture, picture, words, 0
        self.found: dict[str, Tensor] = {}

    def layer(self, make: Callable[[], nn.Module]) -> tuple[str, Any]:
        name, self.count = f"layer{self.count}", self.count + 1
        if not hasattr(self.model, name):
            self.model.add_module(name, make())
        return name, getattr(self.model, name)

    def linear(self, x: Tensor, out: int = 0, keyword: bool = False) -> Tensor:
        size = out or x.shape[-1]
        name, layer = self.layer(lambda: nn.Linear(int(x.shape[-1]), int(size)))
        if self.coded:
            self.found[name] = mix(x, -1, size)
            return self.found[name]
        return layer(input=x) if keyword else layer(x)

    def convolve(self, kernel: int, stride: int, padding: int) -> None:
        name, layer = self.layer(lambda: nn.Conv2d(int(self.value.shape[1]), self.model.width, kernel, stride, padding))
        if not self.coded:
            self.value = layer(self.value)
        elif kernel == 1:
            self.found[name] = self.value = mix(self.value, 1, self.model.width)
        else:
            sizes = [(size + 2 * padding - kernel) // stride + 1 for size in self.value.shape[2:]]
            self.found[name] = self.value = self.level(*sizes)[:, :1].expand(-1, self.model.width, -1, -1).clone()

    def level(self, height: int, width: int) -> Tensor:
        """Return the codes of a picture that was made smaller or larger."""
        shape = *self.value.shape[:2], height, width
        if bool((self.value == make_codes(*self.value.shape[2:])).all()):
            return make_codes(height, width).expand(shape)
        return torch.full(shape, WORDS if bool((self.value == WORDS).all()) else MIXED, dtype=torch.float64)

    def resize(self, function: Callable[[Tensor], Tensor], height: int, width: int) -> None:
        self.value = self.level(height, width) if self.coded else function(self.value)

    def attend(self, query: Tensor, key: Tensor) -> Tensor:
        q, k, v = self.linear(query), self.linear(key), self.linear(key)
        return q if self.coded else F.scaled_dot_product_attention(q, k, v)

    def add(self, one: Tensor, two: Tensor) -> Tensor:
        return join(one, two) if self.coded else one + two

    def mean(self, x: Tensor, dims: Any) -> Tensor:
        made = x.mean(dims, keepdim=True)
        return torch.full_like(made, WORDS) if self.coded else made

    def join_words(self, first: bool) -> None:
        count, places = self.words.shape[1], self.value.shape[1]
        both = torch.cat([self.words, self.value] if first else [self.value, self.words], 1)
        both = self.linear(self.add(both, self.attend(both, both)))
        self.value, self.words = (both[:, count:], both[:, :count]) if first else (both[:, :places], both[:, places:])

    def part(self, order: tuple[int, ...], patches: bool) -> None:
        batch, channels, height, width = self.value.shape
        parts = self.value.view(batch, channels, height // 2, 2, width // 2, 2).permute(*order)
        if patches:
            codes = self.level(height // 2, width // 2).flatten(2).mT.repeat(1, 1, 4) if self.coded else None
            self.value = self.linear(parts.reshape(batch, -1, 4 * channels) if codes is None else codes, self.model.width)
        else:
            self.value = parts.reshape(batch, -1, channels)


def set_value(function: Callable[[Run], Any]) -> Callable[[Run], None]:
    return lambda run: setattr(run, "value", function(run))


def scaled(times: float) -> Callable[[Run], None]:
    def make(run: Run) -> None:
        height, width = (int(size * times) for size in run.value.shape[2:])
        run.resize(lambda x: F.avg_pool2d(x, 2) if times < 1 else F.interpolate(x, scale_factor=times), height, width)

    return make


def to_first(run: Run) -> None:
    sizes: Any = run.picture.shape[2:]
    run.resize(lambda x: F.interpolate(x, size=sizes), *sizes)


PICTURE: dict[str, Callable[[Run], Any]] = {
    "conv": lambda run: run.convolve(3, 1, 1), "point": lambda run: run.convolve(1, 1, 0),
    "stride": lambda run: run.convolve(3, 2, 1), "patch conv": lambda run: run.convolve(2, 2, 0),
    "smaller": scaled(0.5), "larger": scaled(2), "as first": to_first,
    "roll": set_value(lambda run: run.value.roll(1, 2)), "flip": set_value(lambda run: run.value.flip(3)),
    "turn": set_value(lambda run: run.value.transpose(2, 3)),
    "halves": set_value(lambda run: torch.cat(run.value.chunk(2, 2)[::-1], 2)),
    "list": set_value(lambda run: run.value[:, list(range(run.model.width))[::-1]]),
    "slice": set_value(lambda run: run.value[:, :, :, 1:]),
    "pooled": set_value(lambda run: run.add(run.value, run.linear(run.mean(run.value, (2, 3)).flatten(1))[..., None, None])),
    "rows": set_value(lambda run: run.linear(run.value.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)),
    "tokens": set_value(lambda run: run.value.flatten(2).mT),
    "windows": lambda run: run.part((0, 2, 4, 3, 5, 1), False), "patches": lambda run: run.part((0, 2, 4, 1, 3, 5), True),
}  # fmt: skip
TOKENS: dict[str, Callable[[Run], Any]] = {
    "linear": set_value(lambda run: run.linear(run.value)),
    "attend": set_value(lambda run: run.add(run.value, run.attend(run.value, run.value))),
    "read words": set_value(lambda run: run.attend(run.value, run.words)),
    "words read": lambda run: setattr(run, "words", run.attend(run.words, run.value)),
    "words first": lambda run: run.join_words(True), "words last": lambda run: run.join_words(False),
    "mixed": set_value(lambda run: run.linear(run.value.mT).mT),
    "mixed by keyword": set_value(lambda run: run.linear(run.value.mT, keyword=True).mT),
    "rolled": set_value(lambda run: run.value.roll(1, 1)),
    "indexed": set_value(lambda run: run.value[:, torch.arange(run.value.shape[1] - 1, -1, -1)]),
    "mean": set_value(lambda run: run.add(run.value, run.linear(run.mean(run.value, 1)))),
    "picture": set_value(lambda run: run.value.mT.unflatten(2, (run.picture.shape[2], -1))),
}  # fmt: skip


class Model(nn.Module):
    """A model of random steps."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.width, steps = draw.choice([4, 8, 16]), ["conv"]
        for _ in range(draw.randint(3, 9)):
            tokens = steps[-1] in ("tokens", "windows", "patches") or (steps[-1] in TOKENS and steps[-1] != "picture")
            steps.append(draw.choice([*(TOKENS if tokens else PICTURE)]))
        self.steps = steps

    def forward(self, picture: Tensor, words: Tensor) -> Tensor:
        return self.run(picture, words, False).value

    def run(self, picture: Tensor, words: Tensor, coded: bool) -> Run:
        made = Run(self, picture, words, coded)
        for step in self.steps:
            {**PICTURE, **TOKENS}[step](made)
        return made

    def find_codes(self, picture: Tensor, words: Tensor) -> dict[str, Tensor]:
        codes = make_codes(*picture.shape[2:]).expand(picture.shape)
        return self.run(codes, torch.full(words.shape, WORDS, dtype=torch.float64), True).found


def take_means(mask: Tensor, height: int, width: int) -> Tensor:
    """Return a mask in another size, by the integral of each of its columns and rows."""

    def along(rows: Tensor, count: int) -> Tensor:
        total = torch.cat([torch.zeros(1, rows.shape[1], dtype=torch.float64), rows.cumsum(0)])
        at = torch.arange(count + 1, dtype=torch.float64) * rows.shape[0] / count
        low = at.floor().clamp(max=rows.shape[0] - 1).long()
        ends = total[low] + (at - low)[:, None] * rows[low]
        return (ends[1:] - ends[:-1]) * count / rows.shape[0]

    return along(along(mask.double(), height).T, width).T


def read_shares(codes: Tensor, mask: Tensor, rest: float) -> Tensor:
    """Return what codes (places, ...) of a sample take of a mask; NaN for what is mixed."""
    shares = torch.full_like(codes, MIXED)
    for code in codes[~codes.isnan()].unique().tolist():
        height, width = divmod(int(code // 1e4), 100)
        shares[codes == code] = rest if code == WORDS else take_means(mask, height, width).flatten()[int(code % 1e4)]
    return shares


def find_misses(draw: random.Random) -> list[str]:
    model, sides = Model(draw).eval(), draw.choice([(4, 4), (8, 8), (4, 8), (8, 4), (6, 4), (5, 7)])
    count = draw.choice([sides[0] * sides[1], 5, 1])
    picture, words = torch.randn(2, 3, *sides), torch.randn(2, count, model.width)
    try:
        codes = model.find_codes(picture, words)
        model(picture, words)
    except (RuntimeError, ValueError, IndexError):
        return []  # steps that do not fit each other
    gm, options = fxplug.trace(model, (picture, words)), {"rank": 2, "slots": 1, "per_sample": 1, "regions": True}
    layers = []
    for name in codes:
        with contextlib.suppress(SpecError):
            fxplug.apply(gm, fxplug.load_pass("lora", at=name, **options))
            layers.append(name)
    if not layers:
        return []
    new = fxplug.apply(gm, fxplug.load_pass("lora", at=layers, **options)).eval()
    weights = {name: model.get_submodule(name).weight for name in layers}
    state = {f"{name}.lora_A.weight": torch.randn(2, *weight.shape[1:]) for name, weight in weights.items()}
    ups = {f"{name}.lora_B.weight": torch.randn(len(w), 2, *[1] * (w.dim() - 2)) for name, w in weights.items()}
    new.adapters.load("a", {**state, **ups})
    misses = []
    for _ in range(3):
        misses += _call(draw, model, new, layers, picture, words)
        sides = draw.choice([2, 3, 4, 5, 6, 8]), draw.choice([1, 2, 3, 4, 6, 8])
        batch, count = draw.choice([1, 2, 3]), draw.choice([sides[0] * sides[1], count])
        picture, words = torch.randn(batch, 3, *sides), torch.randn(batch, count, model.width)
    return [f"{' '.join(model.steps)}: {miss}" for miss in misses]


def _call(draw: random.Random, model: Model, new: Any, layers: list[str], picture: Tensor, words: Tensor) -> list[str]:
    masks, seen = [torch.rand(draw.randint(1, 9), draw.randint(1, 9)) for _ in picture], {}
    rests = [draw.choice(["share", "full", "none"]) for _ in masks]
    with contextlib.ExitStack() as hooks, contextlib.suppress(FxplugError, RuntimeError, ValueError, IndexError):
        for name in layers:
            block = new.get_submodule(f"lora.{name}.GatheredLora")
            hook = block.register_forward_hook(lambda *call, name=name: seen.update({name: call}))
            hooks.callback(hook.remove)
        codes = model.find_codes(picture, words)
        with new.adapters.using([{"a": fxplug.Strength(1.0, region=m, rest=r)} for m, r in zip(masks, rests, strict=True)]):
            new(picture, words)
    misses = []
    for name, (block, (x, y, weight, which, _), result) in seen.items():
        dim = 1 if "Conv" in block.kind else -1
        cells = [take_means(mask, 64, 64).float() for mask in masks]  # as a table has them
        means = [{"full": 1.0, "none": 0.0}.get(r, float(cell.double().mean())) for r, cell in zip(rests, cells, strict=True)]
        rows = zip(codes[name].select(dim, 0), cells, means, strict=True)
        shares = torch.stack([read_shares(*row) for row in rows]).unsqueeze(dim)
        update = block(x, y, weight, which, ()) - y
        off = (result - y - update * shares).abs().max()
        if not off <= TOLERANCE * update.abs().max().clamp(min=1):  # NaN, too
            misses.append(f"{name}, {list(picture.shape)} with {words.shape[1]} words, is off by {float(off):g}")
    return misses


@torch.no_grad()
def fuzz_regions(cases: int, seed: int) -> list[str]:
    found = []
    for number in range(seed, seed + cases):
        torch.manual_seed(number)
        found += [f"seed {number}: {miss}" for miss in find_misses(random.Random(number))]
    return found
