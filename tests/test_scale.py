"""What a site costs does not grow with their number. `benchmarks/trace.py` measures it up to 5000."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

import fxplug
from fxplug.blocks import Block
from fxplug.spec import Match, Pass, Rule

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import trace  # noqa: E402

FEW, MANY = 30, 300  # an order of magnitude, and no more than must be: what grows with the square is seen in either


@pytest.fixture(scope="module", autouse=True)
def own_time():
    """What this thread computes is timed, whatever else the machine does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "time", SimpleNamespace(perf_counter=time.thread_time))
        yield


@pytest.fixture(scope="module")
def costs():
    trace.cost_of_a_site(10, repeats=1)  # the first use imports parts of torch
    return {count: trace.cost_of_a_site(count, repeats=2) for count in (FEW, MANY)}


@pytest.mark.parametrize("step", ["find", "apply", "verify"])
def test_a_site_costs_as_much_among_many(costs, step):
    assert costs[MANY][step] < 3 * costs[FEW][step]


def test_a_second_pass_costs_as_much_as_the_first():
    def seconds(count):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))
        passes = [Pass(name, [Rule(Match("*"), "fxplug.blocks:Scale", args=["y"])]) for name in "ab"]
        once = fxplug.apply(fxplug.trace(model, torch.randn(2, 4)), passes[0])
        return min(trace.timed(lambda: fxplug.apply(once, passes[1]))[1] for _ in range(2))

    assert seconds(MANY) < 3 * 10 * seconds(FEW)


def test_replacing_costs_as_much_among_many():
    def seconds(count):
        gm = fxplug.trace(nn.Sequential(*(nn.GELU() for _ in range(count))), torch.randn(2, 4))
        relu = fxplug.load_pass("replace", module="GELU", **{"with": "ReLU"})
        return min(trace.timed(lambda: fxplug.apply(gm, relu))[1] for _ in range(2))

    assert seconds(MANY) < 3 * 10 * seconds(FEW)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(self.fc(x)), (x,)


class Stack(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)[0] + x
        return x


class Whole(Block):
    inline: ClassVar[bool] = True

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @classmethod
    def at(cls, site):
        return cls()

    def forward(self, xs, ys):
        return ys[0] + self.linear(xs[0]), ys[1]


class First(Block):
    @classmethod
    def at(cls, site):
        return cls()

    def forward(self, value, *others):
        return value + 1


KINDS = {
    "a parameter": Rule(Match("layers.*.fc"), First, "param"),
    "a pair": Rule(Match("layers.*.act"), First, args=["value", "layers.*.fc"]),
    "layers below": Rule(Match("layers.{i}", within="Linear"), First, args=["y"]),
    "a traced block": Rule(Match("layers.*"), Whole, port="y[:]", args=["x[:]", "y[:]"]),
    "each value": Rule(Match("layers.*"), First, port="y[1][*]", args=["value"]),
    "an operation": Rule(Match("**", op="add"), First, "replace", args=["x[0]", "x[1]"]),
    "no block": Rule(Match("layers.*.act"), args=["x"]),
}


QUICK = [("a traced block", 150), ("layers below", 300)]  # the dearest, and the one that finds most


@pytest.mark.parametrize("kind, many", [*QUICK, *(pytest.param(kind, 500, marks=pytest.mark.slow) for kind in KINDS)])
def test_every_way_to_attach_costs_as_much_among_many(kind, many):
    gms = {count: fxplug.trace(Stack(count), torch.ones(1, 4)) for count in (many // 10, many)}
    made = Pass("p", [KINDS[kind]])

    def seconds(count):
        return min(trace.timed(lambda: fxplug.apply(gms[count], made))[1] for _ in range(2))

    assert len(fxplug.find(gms[many], made)) == many
    assert seconds(many) < 2 * 10 * seconds(many // 10)
