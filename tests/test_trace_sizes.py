"""A size that leaves the tensor world is recorded or guarded: never silently a constant of the graph."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import math
import operator
import pickle
import threading
from collections import defaultdict
from collections.abc import Callable
from math import sqrt

import einops
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from einops.layers.torch import EinMix, Rearrange
from exact import difference
from torch import nn

import fxplug


class Apply(nn.Module):
    """A model whose forward is one function."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("table", torch.arange(240.0))

    def forward(self, x: torch.Tensor) -> object:
        return self.function(x, self.table)


def image(b: int, n: int, m: int) -> torch.Tensor:
    return torch.arange(float(b * n * m)).reshape(b, n, m) / 7


TRACED = (2, 6, 4)
OTHERS = [(1, 6, 4), (3, 6, 4), (2, 1, 4), (2, 9, 4), (2, 6, 1), (2, 6, 8), (1, 1, 1), (4, 3, 5)]

# stays a graph for every size
DYNAMIC: dict[str, Callable[..., object]] = {
    "arithmetic": lambda x, t: x * (x.shape[1] * 2 + 1 - x.size(2)) / (x.shape[0] ** 2),
    "reflected": lambda x, t: x + (10 - x.shape[1]) + 7 // x.shape[2] + 2 ** x.shape[0] + 9 % x.shape[2] + 1 / x.shape[1],
    "negative base": lambda x, t: x * (-1) ** x.shape[1],
    "negative base of a tensor": lambda x, t: (-1) ** torch.arange(x.shape[1]),
    "divmod": lambda x, t: x + divmod(x.shape[1], 4)[0] + divmod(x.shape[1], 4)[1] + divmod(13, x.shape[1])[1],
    "round, abs, neg": lambda x, t: x + round(x.shape[1] / 4) + abs(2 - x.shape[1]) + round(x.shape[1] / 7, 2),
    "math module": lambda x, t: x * math.sqrt(x.shape[1]) + math.log(x.shape[2], 2) + math.ceil(x.shape[1] / 4),
    "math.prod": lambda x, t: x.new_zeros(math.prod(x.shape)),
    "sum": lambda x, t: x * sum(x.shape),
    "functools.reduce": lambda x, t: t[: functools.reduce(operator.mul, x.shape)],
    "accumulate": lambda x, t: t[: list(itertools.accumulate(x.shape))[-1]],
    "numel": lambda x, t: t[: x.numel()] + x.nelement() + torch.numel(x) + x.nbytes,
    "stride": lambda x, t: x.as_strided((x.shape[0], x.shape[2]), (x.stride(0), x.stride()[-1])),
    "slice": lambda x, t: x[:, : x.shape[1] // 2, -x.shape[2] :],
    "index": lambda x, t: x[x.shape[0] - 1, x.shape[1] // 2],
    "assigned slice": lambda x, t: _assigned(x.clone()),
    "view and expand": lambda x, t: x.view(*x.shape[:-1], 1, x.shape[-1]).expand(*x.shape[:2], 3, x.shape[2]),
    "reshape by size()": lambda x, t: x.reshape(x.size(0) * x.size(1), -1),
    "whole shape": lambda x, t: torch.zeros(x.shape) + torch.ones(*x.shape) + x.new_full(x.shape, 3.0),
    "arange": lambda x, t: torch.arange(x.shape[1]) + torch.linspace(0, 1, x.shape[1]) + torch.arange(0, x.shape[1], 1),
    "full of a size": lambda x, t: torch.full((x.shape[1],), x.shape[2]),
    "torch.tensor": lambda x, t: torch.tensor([x.shape[1], x.shape[2]]) * torch.tensor(x.shape[0]),
    "torch.tensor of a fraction": lambda x, t: torch.tensor([[x.shape[1] / x.shape[2]], [1.0]]),
    "as_tensor": lambda x, t: torch.as_tensor(x.shape[1]) + torch.as_tensor(tuple(x.shape)),
    "scalar to": lambda x, t: torch.tensor(x.shape[1]).to(x.dtype).sqrt() * x,
    "split by sizes": lambda x, t: x.split([x.shape[1] // 2, x.shape[1] - x.shape[1] // 2], 1)[0],
    "interpolate": lambda x, t: F.interpolate(x, size=x.shape[2] * 2, mode="linear"),
    "pad": lambda x, t: F.pad(x, (0, (-x.shape[2]) % 3)),
    "torch.Size": lambda x, t: x.reshape(torch.Size([x.shape[0], x.shape[1] * x.shape[2]])),
    "shape of a shape": lambda x, t: x.transpose(1, 2).reshape(x.transpose(1, 2).shape[0], -1),
    "item of a size": lambda x, t: x * torch.tensor(x.shape[1]).item(),
    "returned": lambda x, t: (x, x.shape[1], x.shape[2] / 2, [x.numel()]),
    "isinstance": lambda x, t: x * 2 if isinstance(x.shape[1], int) and not isinstance(x.shape[1] / 2, int) else x,
    "deepcopy": lambda x, t: x + copy.deepcopy(list(x.shape))[1] + copy.copy(x.shape[2]),
    "size of a size": lambda x, t: t[: x.shape[1]].shape[0] * x,
    "text for people": lambda x, t: _checked(x),
    "rank": lambda x, t: x * len(x.shape) + x.dim() + x.ndim,
    "len": lambda x, t: x * len(x),
    "int": lambda x, t: x * int(x.shape[1] / 4) + int(-x.shape[2] / 3) + int(x.shape[0]),
    "int of all": lambda x, t: x.reshape(-1, *map(int, x.shape[1:])),
    "int of a text": lambda x, t: x * int("3") + int("11", 2) + int(2.7) + int(True) + float("1e3") + sum(map(int, "12")),
    "float": lambda x, t: x * float(x.shape[1]) ** -0.5 + float(int(x.shape[2] / 2)),
    "np.sqrt": lambda x, t: x * np.sqrt(x.shape[1]),
    "padded to a multiple": lambda x, t: F.pad(x, (0, int(np.ceil(x.shape[2] / 4) * 4 - x.shape[2]))),
    "windows": lambda x, t: _windowed(x),
    "a tensor of sizes by its class": lambda x, t: torch.Tensor(x.shape[0], 1, 1).fill_(2) * x + torch.Tensor(x.size()).zero_(),
    "a tensor of values by its class": lambda x, t: x[:, torch.LongTensor([0, -1])] * torch.Tensor([[x.shape[1], 2]]).sum(),
    "other classes of tensors": lambda x, t: torch.cat([torch.FloatTensor(), torch.Tensor(x).flatten()]).type(torch.LongTensor),
    "a class of tensors asked for": lambda x, t: x * 2 if type(x) is torch.Tensor and isinstance(x, torch.FloatTensor) else x,
    "max and min": lambda x, t: x * max(x.shape[1], 5) + min(x.shape) + max([x.shape[1] // 2, x.shape[2] / 2, 0]),
    "lru_cache": lambda x, t: x + _cached(x.shape[1]) + _cached(n=x.shape[2]),
    "lru_cache in another function": lambda x, t: x + _wrapped(x.shape[1], x.shape[2]),
    "kinds": lambda x, t: x * 2 if _has_kinds(x.shape[1], x.shape[1] / 2) else x,
}

# the plain value is needed: exact where the guard holds, an error elsewhere
GUARDED: dict[str, Callable[..., object]] = {
    "if": lambda x, t: x * 2 if x.shape[1] > 5 else x,
    "chain": lambda x, t: x * 2 if 2 < x.shape[1] <= 7 else x,
    "truth": lambda x, t: x * (x.shape[1] - 6 or 5),
    "range": lambda x, t: torch.stack([x[:, i] for i in range(x.shape[1])]),
    "iterated": lambda x, t: sum(row * (i + 1) for i, row in enumerate(x)),
    "iterated backwards": lambda x, t: [row * i for i, row in enumerate(x.unbind(1))],
    "complex": lambda x, t: x * complex(x.shape[1]).real,
    "bool": lambda x, t: x * bool(x.shape[1] - 1),
    "math function by name": lambda x, t: x * sqrt(x.shape[1]),
    "math without a record": lambda x, t: x * math.isqrt(x.shape[1]) + math.hypot(x.shape[2], 1),
    "operator.index": lambda x, t: x * operator.index(x.shape[1]),
    "list index": lambda x, t: x * list(range(20))[x.shape[1]],
    "list times": lambda x, t: torch.tensor([1.0] * x.shape[1]),
    "string times": lambda x, t: x * len("a" * x.shape[1]),
    "max and min with a key": lambda x, t: x * max(x.shape[1], 5, key=abs) + min(x.shape, key=lambda n: -n),
    "a key in a cached function": lambda x, t: x * _cached_key(x.shape[1]),
    "hash beside a cached function": lambda x, t: x * (hash(x.shape[1]) % 5) + _cached(x.shape[2]),
    "sorted": lambda x, t: x.reshape(sorted(x.shape)),
    "shape.index": lambda x, t: x * x.shape.index(4),
    "shape.count": lambda x, t: x * x.shape.count(6),
    "shape.numel": lambda x, t: x * x.shape.numel(),
    "shape equality": lambda x, t: x * 2 if x.shape == (2, 6, 4) else x,
    "tuple equality": lambda x, t: x * 2 if tuple(x.shape) == torch.Size([2, 6, 4]) else x,
    "in": lambda x, t: x * 2 if x.shape[1] in (3, 6) else x,
    "in a dict": lambda x, t: x * {6: 5.0}.get(x.shape[1], 1.0),
    "in a set": lambda x, t: x * 2 if x.shape[1] in {3, 6} else x,
    "dict key": lambda x, t: x * {x.shape[1]: 3.0}.get(6, 1.0),
    "tuple key": lambda x, t: x * {(2, 6): 5.0}.get((x.shape[0], x.shape[1]), 1.0),
    "hash": lambda x, t: x * (hash(x.shape[1]) % 5),
    "f-string": lambda x, t: x * {"6": 5.0}.get(f"{x.shape[1]}", 1.0),
    "str": lambda x, t: x * len(str(x.shape[1] * 2)),
    "repr of the shape": lambda x, t: x * {"torch.Size([2, 6, 4])": 5.0}.get(f"{x.shape}", 1.0),
    "percent format": lambda x, t: x * len("%d" % (x.shape[1] * 2)),  # noqa: UP031
    "str.format": lambda x, t: x * len("{:>{}}".format(1, x.shape[1])),
    "broadcast_shapes": lambda x, t: torch.zeros(torch.broadcast_shapes(x.shape, (1, 1, 1))),
    "np.prod": lambda x, t: x.reshape(int(np.prod(x.shape[:1])), -1),
    "np.array": lambda x, t: x + torch.from_numpy(np.array([x.shape[1], 2])).sum(),
    "np.arange": lambda x, t: torch.from_numpy(np.arange(x.shape[1])),
    "np.arange large": lambda x, t: torch.from_numpy(np.arange(x.shape[1] * 50)),
    "np.float64 times": lambda x, t: x * (np.float64(2.5) * x.shape[1]),
    "np.zeros": lambda x, t: torch.from_numpy(np.zeros((x.shape[1], 2))),
    "np.linspace": lambda x, t: torch.tensor(np.linspace(0, 1, x.shape[1]), dtype=torch.float32),
    "range object": lambda x, t: torch.tensor(list(range(x.shape[1]))),
    "bit_length": lambda x, t: x * x.shape[1].bit_length(),
    "is_integer": lambda x, t: x * 2 if (x.shape[1] / 4).is_integer() else x,
    "numerator": lambda x, t: x * x.shape[1].numerator + x.shape[1].real,
    "as_integer_ratio": lambda x, t: x * (x.shape[1] / 4).as_integer_ratio()[0],
    "pow with modulus": lambda x, t: x * pow(x.shape[1], 2, 5),
    "times a complex": lambda x, t: x * (x.shape[1] * 1j).imag,
    "squared root of a negative": lambda x, t: x * ((4 - x.shape[1]) ** 0.5).real,
    "pickled": lambda x, t: x * pickle.loads(pickle.dumps(x.shape[1])),
    "tolist of sizes": lambda x, t: x * torch.tensor([x.shape[1], 2]).tolist()[0],
    "unpacked tensor of sizes": lambda x, t: _unpacked(x),
    "tensor of a size as index": lambda x, t: x[:, : torch.tensor([x.shape[1] // 2, 1])[0]],
    "if on a tensor of a size": lambda x, t: x * 2 if torch.tensor(x.shape[1]) > 5 else x,
    "numpy of a tensor of a size": lambda x, t: x * float(torch.tensor([x.shape[1]]).numpy()[0]),
    "squeeze": lambda x, t: x.squeeze() if x.squeeze().dim() == 3 else x.squeeze()[None],
    "squeeze of a dimension": lambda x, t: x.squeeze(1).unsqueeze(-1),
    "split": lambda x, t: [part * i for i, part in enumerate(x.split(2, 1))],
    "split into unequal": lambda x, t: [part * i for i, part in enumerate(torch.split(x, 5, dim=1))],
    "chunk": lambda x, t: [part * i for i, part in enumerate(x.chunk(4, 1))],
    "equal": lambda x, t: x * 2 if torch.equal(torch.zeros(x.shape[1]), torch.zeros(6)) else x,
    "is_same_size": lambda x, t: x * 2 if x.is_same_size(torch.zeros(2, 6, 4)) else x,
    "sym_max": lambda x, t: x * torch.sym_max(x.shape[1], 5),
    "torch._check": lambda x, t: (torch._check(x.shape[1] < 100), x)[1],
    "torch._check_tensor_all": lambda x, t: (torch._check_tensor_all(torch.tensor([x.shape[1], 2]) < 100), x)[1],
    "while": lambda x, t: _halved(x),
}


def _windowed(x: torch.Tensor) -> torch.Tensor:
    """Windows, and back as Swin Transformer and the models after it write it: from their count to the batch."""
    batch, height, width = x.shape
    windows = x.view(batch, height // 1, 1, width, 1).transpose(1, 2).reshape(-1, width)
    count = int(windows.shape[0] / (height * width / width))
    return windows.view(count, height, width) * count


def _has_kinds(n: int, half: float) -> bool:
    kinds = type(n) is int, type(half) is float, type(int) is type, type(type(n)) is type, type(n) == int  # noqa: E721
    members = isinstance(n, int), isinstance(half, (int, float)), issubclass(bool, int), isinstance(int, type)
    counted: dict[str, int] = defaultdict(int)
    counted["n"] += n
    return all((*kinds, *members, {int: True}[type(n)], counted["n"] == n, type(n)("3") == 3))


def _assigned(x: torch.Tensor) -> torch.Tensor:
    x[:, : x.shape[1] // 2] += x.shape[2]
    x[..., x.shape[2] - 1] = 0
    return x


def _checked(x: torch.Tensor) -> torch.Tensor:
    torch._assert(True, f"height {x.shape[1]} " + "of {}".format(x.shape[2]))  # noqa: UP032
    logging.getLogger("test").debug(f"{x.shape} " + str(x.shape[0]) + "%s" % x.shape[1])  # noqa: UP031
    if x.dim() > 9:
        raise ValueError(f"{x.shape}")
    return x


def _unpacked(x: torch.Tensor) -> torch.Tensor:
    rows, columns = torch.tensor([x.shape[1] // 2, x.shape[2]])
    return x[0, : rows * 1, :columns]


def _halved(x: torch.Tensor) -> torch.Tensor:
    n = x.shape[1]
    while n > 1:
        x, n = x * 2, n // 2
    return x


@functools.lru_cache
def _cached(n: int) -> torch.Tensor:
    return torch.arange(n).sum()


@functools.lru_cache
def _cached_key(n: int) -> float:
    return {6: 5.0}.get(n, 1.0)


@functools.wraps(_cached)
def _wrapped(*args: int) -> torch.Tensor:
    """As diffusers' `lru_cache_unless_export`, which is given functions of several sizes."""
    cached = functools.lru_cache(lambda n, m: torch.arange(n * m).sum())
    return cached(*args) - cached(m=args[1], n=args[0])


def run(model: nn.Module, x: torch.Tensor) -> tuple[object, str | None]:
    try:
        return model(x), None
    except fxplug.GuardError as error:
        return None, f"guard: {error}"
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def outcomes(function: Callable[..., object]) -> tuple[int, int]:
    """How many other sizes are exact and how many are refused by a guard; anything else fails."""
    model = Apply(function)
    gm = fxplug.trace(model, image(*TRACED))
    assert difference(model(image(*TRACED)), gm(image(*TRACED))) is None
    exact = refused = 0
    for size in OTHERS:
        want, failed = run(model, image(*size))
        got, error = run(gm, image(*size))
        if error is not None and error.startswith("guard: "):
            assert "test_trace_sizes.py:" in error and "when traced" in error
            refused += 1
        elif failed is None:
            assert error is None, f"{size}: {error}"
            assert difference(want, got) is None, f"{size}: {difference(want, got)}"
            exact += 1
        else:
            assert error is not None, f"{size}: gives a result where the model fails: {failed}"
    return exact, refused


@pytest.mark.parametrize("name", DYNAMIC)
def test_a_size_in_arithmetic_stays_dynamic(name: str) -> None:
    exact, refused = outcomes(DYNAMIC[name])
    assert exact >= 3 and not refused


@pytest.mark.parametrize("name", GUARDED)
def test_a_size_that_python_needs_is_guarded(name: str) -> None:
    outcomes(GUARDED[name])


@pytest.mark.parametrize("name", ["if", "range", "dict key", "f-string", "np.arange", "squeeze of a dimension"])
def test_a_guard_refuses(name: str) -> None:
    assert outcomes(GUARDED[name])[1] > 0


def test_a_guard_says_where_and_what_in_few_words() -> None:
    gm = fxplug.trace(Apply(lambda x, t: x * 2 if (x + 1).shape[1] // 2 > 2 else x), image(*TRACED))
    with pytest.raises(fxplug.GuardError) as caught:
        gm(image(2, 2, 4))
    assert "add.size(1) // 2) > 2" in str(caught.value)
    assert "True when traced; now it is False" in str(caught.value)
    assert len(str(caught.value)) < 300


def test_numbers_are_harmless_after_the_trace() -> None:
    place = threading.local()  # which no trace puts back

    def keep(x: torch.Tensor, _: object) -> torch.Tensor:
        place.kept = [x.shape[1], x.shape]
        return x

    gm = fxplug.trace(Apply(keep), image(*TRACED), check=False)
    count, kept = len(gm.graph.nodes), place.kept
    assert kept[0] + 1 == 7 and int(kept[0]) == 6 and f"{kept[0]}" == "6" and str(kept[1]) == "torch.Size([2, 6, 4])"  # type: ignore[operator, call-overload]
    assert {kept[0]: 1}[6] == 1  # type: ignore[index]
    assert len(gm.graph.nodes) == count


def test_numbers_of_an_earlier_trace_are_plain_in_the_next() -> None:
    place = threading.local()

    def keep(x: torch.Tensor, _: object) -> torch.Tensor:
        kept = place.__dict__.setdefault("kept", x.shape[1])
        return x * kept + kept * x.shape[2]

    model = Apply(keep)
    # torch itself computes otherwise with a number that a model kept, so the check would refuse this one
    fxplug.trace(model, image(*TRACED), check=False)
    gm = fxplug.trace(model, image(2, 3, 4), check=False)
    assert torch.equal(gm(image(2, 3, 5)), image(2, 3, 5) * 6 + 30)


@pytest.mark.parametrize("traced, called", [(2, 64), (64, 2)])
def test_a_batch_above_64_goes_through_diffusers_upsampling(traced, called):
    """Its `if hidden_states.shape[0] >= 64` only makes a tensor contiguous, so it decides nothing."""
    from diffusers.models.upsampling import Upsample2D

    model = Upsample2D(4, use_conv=True)
    gm = fxplug.trace(model, torch.randn(traced, 4, 3, 3))
    x = torch.randn(called, 4, 5, 5)
    assert torch.equal(gm(x), model(x))


class Branches(torch.nn.Module):
    def forward(self, x):
        if x.shape[0] >= 4:
            x = x.contiguous()
            x = x + 1
        if x.shape[1] >= 4:
            y = x.contiguous()
            return y
        return x


def test_an_if_that_does_more_than_a_layout_is_held():
    gm = fxplug.trace(Branches(), torch.randn(2, 3))
    with pytest.raises(fxplug.GuardError, match=r"shape\[0\] >= 4"):
        gm(torch.randn(4, 3))
    with pytest.raises(fxplug.GuardError, match=r"shape\[1\] >= 4"):
        gm(torch.randn(2, 4))


class Decides(nn.Module):
    """Conditions on sizes, on a value and on what autograd knows, that hold and that do not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = [x.shape[1] == 6, x.shape[1] != 6, x.shape[0] >= 64, x.shape[0] % 2 == 0 and x.shape[2] > 2]
        for i, condition in enumerate([*sizes, x.requires_grad, (x.sum() > 0).item(), (x.sum() < 0).item()]):
            x = x + 2**i if condition else x
        return x


@pytest.mark.parametrize("how", ["compiled", "compiled for each size", "exported", "exported through dynamo"])
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_guards_stay_in_one_graph(how: str) -> None:
    gm = fxplug.trace(Decides(), image(*TRACED), real=True)
    torch._dynamo.reset()
    if how.startswith("compiled"):
        call = torch.compile(gm, fullgraph=True, dynamic=how == "compiled", backend="eager")
    else:
        sizes = dict.fromkeys(range(3), torch.export.Dim.AUTO)
        program = torch.export.export(gm, (image(*TRACED),), dynamic_shapes=(sizes,), strict=how != "exported")
        call = program.module()
    for batch in (2, 4):
        assert torch.equal(call(image(batch, 6, 4)), Decides()(image(batch, 6, 4)))
    with pytest.raises((AssertionError, RuntimeError)):
        call(image(2, 5, 4))


def test_bytes_follow_the_dtype() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[int, int, int]:
            y = self.fc(x)
            return y.nbytes, y.itemsize, y.element_size()

    model = Counts()
    gm = fxplug.trace(model, torch.randn(2, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert gm(torch.ones(3, 4)) == model(torch.ones(3, 4)) == (24, 2, 2)


class Rearranging(nn.Module):
    """Attention as libraries on einops write it: functions, layers, packing, and sizes that are given by name."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Linear(16, 16)
        self.pairs = Rearrange("b (n p) c -> b n (p c)", p=2)
        self.mix = EinMix("b n c -> b n d", weight_shape="c d", bias_shape="d", c=32, d=8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch, count, _ = x.shape
        heads = einops.rearrange(self.to_q(x), "b n (h d) -> (b h) n d", h=4)
        attended = einops.rearrange((heads @ heads.mT).softmax(-1) @ heads, "(b h) n d -> b n (h d)", b=batch)
        first = einops.repeat(attended[:, 0], "b c -> b n c", n=count)
        packed, shapes = einops.pack([attended, first], "b * c")
        left, right = einops.unpack(packed, shapes, "b * c")
        return self.mix(self.pairs(left + right)), einops.reduce(left, "b n c -> b c", "max")


def test_models_on_einops_take_other_batches_and_sizes():
    model = Rearranging()
    gm = fxplug.trace(model, torch.randn(1, 8, 16))
    for shape in ((1, 8, 16), (3, 8, 16), (2, 12, 16)):
        x = torch.randn(shape)
        assert difference(model(x), gm(x)) is None
    with pytest.raises(fxplug.GuardError, match=r"% 2 != 0|depends on"):
        gm(torch.randn(2, 7, 16))


@functools.lru_cache
def _table(count: int) -> torch.Tensor:
    return torch.arange(float(count))


def _looked_up(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    try:
        return x + _table(x.shape[2])
    except KeyError:
        return x


def test_a_size_may_be_the_argument_of_a_cached_function():
    gm = fxplug.trace(Apply(_looked_up), image(2, 3, 4))
    for shape in ((5, 2, 4), (2, 3, 5)):
        assert torch.equal(gm(image(*shape)), image(*shape) + torch.arange(float(shape[2])))


def test_two_sizes_for_which_a_cached_function_was_called_once_are_held_equal():
    gm = fxplug.trace(Apply(lambda x, t: x + _cached(x.shape[0]) * 3 + _cached(x.shape[1])), image(4, 4, 2))
    assert torch.equal(gm(image(3, 3, 2)), image(3, 3, 2) + 3 * 4)
    with pytest.raises(fxplug.GuardError, match=r"x.size\(1\) == x.size\(0\)|x.size\(0\) == x.size\(1\)"):
        gm(image(3, 4, 2))


def _converted(x: torch.Tensor, kind: type) -> torch.Tensor:
    return x.to(kind)


def test_a_class_that_is_handed_on_to_torch_is_pythons_own():
    model = Apply(lambda x, t: _converted(x, int) * x.shape[0])
    assert difference(model(image(3, 6, 4)), fxplug.trace(model, image(2, 6, 4))(image(3, 6, 4))) is None
