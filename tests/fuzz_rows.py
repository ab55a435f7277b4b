"""Random operations on rows of images over processes, called at other heights than planned: as in one process, or refused."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxplug
from fxplug.core.errors import FxplugError, GuardError, SpecError
from fxplug.core.ir.comparison import measure_distance
from fxplug.parallel.runtime.mesh import fill_degrees
from fxplug.parallel.runtime.pretended import run_simulated

COST = 10

CHANNELS = 4
CLOSE = 1e-10  # in float64


def layers(pick: random.Random) -> nn.Module:
    """A convolution or a pool of random geometry."""
    kernel, stride, half = pick.randint(1, 5), pick.randint(1, 3), pick.randint(0, 2)
    kinds: list[Callable[[], nn.Module]] = [
        lambda: nn.Conv2d(CHANNELS, CHANNELS, kernel, stride, half, pick.randint(1, 2)),
        lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, 1, 1, padding_mode=pick.choice(["reflect", "replicate", "circular"])),
        lambda: nn.ConvTranspose2d(CHANNELS, CHANNELS, kernel, stride, min(half, (kernel - 1) // 2), stride - 1),
        lambda: nn.MaxPool2d(kernel, stride, min(half, kernel // 2), ceil_mode=pick.random() < 0.5),
        lambda: nn.AvgPool2d(kernel, stride, min(half, kernel // 2), pick.random() < 0.5, pick.random() < 0.5),
        lambda: nn.GroupNorm(2, CHANNELS),
        lambda: nn.AdaptiveAvgPool2d(pick.choice([1, 4, (6, 5)])),
        lambda: nn.Upsample(scale_factor=pick.choice([2, 3, 0.5, 1.5, 1.3])),
        lambda: nn.Upsample(
            scale_factor=pick.choice([2, 3, 0.5, 1.5]), mode=pick.choice(["bilinear", "bicubic"]),
            align_corners=pick.random() < 0.5,
        ),
    ]  # fmt: skip
    return pick.choice(kinds)()


def function(pick: random.Random) -> Callable[[Tensor], Tensor]:
    """An operation on rows without weights: moved, left out, repeated, cropped, reversed, or by their number."""
    n, step, both = pick.randint(1, 7), pick.randint(2, 3), pick.random() < 0.5
    kinds: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.roll(n, 2),
        lambda x: x[:, :, ::step].repeat_interleave(step, 2)[:, :, : x.shape[2]],
        lambda x: x[:, :, n:] if n < 3 else x[:, :, : 4 * n],
        lambda x: x[:, :, :-1],
        lambda x: F.pad(x, (0, 0, n, n * both)),
        lambda x: F.pad(x, (1, 1, 2, 1), "reflect"),
        lambda x: F.interpolate(x, size=(x.shape[2] * 2 - 1, x.shape[3])),
        lambda x: F.interpolate(x, size=(x.shape[2] // 2, x.shape[3]), mode="area"),
        lambda x: F.interpolate(x, size=x.shape[2:], mode="bilinear"),
        lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True),
        lambda x: x.flip(2),
        lambda x: x + torch.linspace(0, 1, x.shape[2])[:, None],
        lambda x: x * (x.shape[2] % step + 1),
        lambda x: x.unflatten(2, (-1, step)).mean(3),
        lambda x: x.unflatten(2, (-1, step)).transpose(2, 3).flatten(2, 3),
        lambda x: x.unflatten(2, (step, -1)).transpose(2, 3).flatten(2, 3),
        lambda x: F.pixel_unshuffle(x, 2)[:, :CHANNELS],
        lambda x: F.pixel_shuffle(x, 2).repeat(1, CHANNELS, 1, 1),
        lambda x: x.cumsum(2) * 0.1,
        lambda x: x - x.mean((2, 3), keepdim=True),
        lambda x: x + x.amax(2, keepdim=True),
        lambda x: torch.cat([x, x[:, :, :n]], 2),
        lambda x: torch.cat([x, x.flip(2)], 2)[:, :, : x.shape[2]],
        lambda x: torch.where(torch.arange(x.shape[2])[:, None] < 5, x, -x),
        lambda x: x.sort(2).values,
        lambda x: x[:, :, torch.arange(x.shape[2]) // step],
        lambda x: x.tril() if x.shape[2] else x,
        lambda x: torch.stack(x.chunk(2, 2)[:1]).flatten(0, 1),
    ]
    return pick.choice(kinds)


class Net(nn.Module):
    """Some operations on rows between convolutions that leave the rows as they are."""

    def __init__(self, pick: random.Random) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, CHANNELS, 1), nn.Conv2d(CHANNELS, 3, (1, 3), padding=(0, 1))
        self.steps: list[Callable[[Tensor], Tensor]] = [
            layers(pick) if pick.random() < 0.5 else function(pick) for _ in range(pick.randint(1, 3))
        ]
        self.layers = nn.ModuleList(step for step in self.steps if isinstance(step, nn.Module))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for step in self.steps:
            x = torch.tanh(step(x))
        return self.last(x)


def miss(seed: int) -> str:
    """What is wrong in one case; nothing where all is as it should be."""
    pick = random.Random(f"rows {seed}")
    torch.manual_seed(seed)
    model, height, world = Net(pick).double().eval(), pick.choice([9, 12, 16, 17, 24, 32]), pick.randint(2, 3)
    x = torch.randn(1, 3, height, 8, dtype=torch.float64)
    try:
        model(x)
    except (RuntimeError, ValueError):  # torch's own: an operation does not take so many rows
        return ""
    try:
        gm = fxplug.trace(model, (x,))
        plan = fxplug.parallel_plan(gm, (x,), rows=world)
    except SpecError:
        return ""
    except FxplugError as error:  # found out by the plan's own check, and better not planned
        return f"{seed}: planned at {height}: {type(error).__name__}: {error}"[:300]
    for other in sorted({height, height + 1, 2 * height, 3 * height + 2, 8 * pick.randint(2, 12), pick.randint(4, 80)}):
        x = torch.randn(1, 3, other, 8, dtype=torch.float64)
        try:
            want = model(x)
        except (RuntimeError, ValueError):
            continue
        try:
            gm(x)
        except GuardError:
            continue
        errors: dict[int, str] = {}

        def run(rank: int, x: Tensor = x, errors: dict[int, str] = errors) -> Tensor:
            try:
                return plan.written(x)
            except FxplugError as error:
                errors[rank] = str(error)[:160]
                time.sleep(0.2)  # the others come to theirs before this one's ends their waiting
                raise

        try:
            found = run_simulated(fill_degrees({"rows": world}), run)
        except FxplugError:
            if len(errors) < world:
                return f"{seed}: {other} rows, planned at {height}: processes {sorted(errors)} of {world} alone: {errors}"
            continue
        except Exception as error:
            return f"{seed}: {other} rows, planned at {height}: {type(error).__name__}: {error}"[:300]
        for rank, got in enumerate(found):
            if got.shape != want.shape or measure_distance(want, got) > CLOSE:
                off = f"{tuple(got.shape)}" if got.shape != want.shape else f"{measure_distance(want, got):.1e}"
                return f"{seed}: {other} rows, planned at {height}, process {rank} of {world}: off by {off}"
    return ""


def fuzz_rows(cases: int, seed: int) -> list[str]:
    """A line for each case that is wrong."""
    return [line for number in range(cases) if (line := miss(seed + number))]
