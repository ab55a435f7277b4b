"""What a site costs does not grow with their number. `benchmarks/trace.py` measures it up to 5000."""

import difflib
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from sweeps import sweep
from torch import nn

import fxplug
from fxplug.blocks.base import Block
from fxplug.core.capture.graph_builder import Recording
from fxplug.core.ir import text
from fxplug.core.ir.subgraphs import make_unique_names
from fxplug.core.spec.pass_file import Match, Pass, Rule
from fxplug.lowerings.regions.nested import nest
from fxplug.lowerings.regions.submodules import outline

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import trace  # noqa: E402

SIZES = pytest.mark.parametrize("many", [200, pytest.param(1000, marks=pytest.mark.slow)])  # against a tenth of it


@pytest.fixture(scope="module", autouse=True)
def own_time():
    """What this thread computes is timed, whatever else the machine does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "time", SimpleNamespace(perf_counter=time.thread_time))
        yield


@pytest.mark.slow
def test_a_site_costs_as_much_among_many():
    many = 1000
    trace.cost_of_a_site(10, repeats=1)  # the first use imports parts of torch
    few, lot = (trace.cost_of_a_site(count, repeats=2) for count in (many // 10, many))
    assert few.keys() == {"find", "apply", "verify"}
    assert [step for step in few if lot[step] >= 3 * few[step]] == [], (few, lot)


@SIZES
def test_a_second_pass_costs_as_much_as_the_first(many):
    def seconds(count):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))
        passes = [Pass(name, [Rule(Match("*"), "fxplug.blocks:Scale", args=["y"])]) for name in "ab"]
        once = fxplug.apply(fxplug.trace(model, torch.randn(2, 4)), passes[0])
        return min(trace.timed(lambda: fxplug.apply(once, passes[1]))[1] for _ in range(2))

    assert seconds(many) < 3 * 10 * seconds(many // 10)


@SIZES
def test_replacing_costs_as_much_among_many(many):
    def seconds(count):
        gm = fxplug.trace(nn.Sequential(*(nn.GELU() for _ in range(count))), torch.randn(2, 4))
        relu = fxplug.load_pass("replace", module="GELU", **{"with": "ReLU"})
        return min(trace.timed(lambda: fxplug.apply(gm, relu))[1] for _ in range(2))

    assert seconds(many) < 3 * 10 * seconds(many // 10)


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


@pytest.mark.slow
@sweep("kind", KINDS, "layers below")  # the one that finds most
def test_every_way_to_attach_costs_as_much_among_many(kind):
    gms = {count: fxplug.trace(Stack(count), torch.ones(1, 4)) for count in (20, 200)}
    made = Pass("p", [KINDS[kind]])

    def seconds(count):
        return min(trace.timed(lambda: fxplug.apply(gms[count], made))[1] for _ in range(2))

    assert len(fxplug.find(gms[200], made)) == 200
    assert seconds(200) < 2 * 10 * seconds(20)


@pytest.mark.slow
@sweep("cut", [outline, nest], nest)
def test_a_region_that_is_cut_out_costs_as_much_among_hundreds(cut):
    gms = {count: fxplug.trace(Stack(count), torch.ones(1, 4)) for count in (20, 200)}
    cut(gms[20], ["layers.*"])

    def seconds(count):
        return min(trace.timed(lambda: cut(gms[count], ["layers.*"]))[1] for _ in range(2))

    assert seconds(200) < 2 * 10 * seconds(20)


def test_a_name_costs_as_much_among_thousands():
    def seconds(count):
        keys = [*(f"layers.{i}" for i in range(count)), *(f"a{'.' * (i + 1)}b" for i in range(30))]
        return min(trace.timed(lambda: make_unique_names(keys))[1] for _ in range(3))

    assert seconds(20_000) < 3 * 10 * seconds(2_000)
    assert list(make_unique_names(["a.b", "a_b", "a/b", "a_b_2"]).values()) == ["a_b", "a_b_2", "a_b_3", "a_b_2_2"]


class Constant(nn.Module):
    def forward(self, x):
        return x + torch.tensor([1.0] * 20)


def test_a_constant_costs_as_much_among_a_thousand():
    def named(count):
        gm = fxplug.trace(nn.Sequential(*(Constant() for _ in range(count))), torch.ones(1, 20), check=False)
        return [name for name, _ in gm.named_buffers()]

    assert named(3) == ["constant_0", "constant_1", "constant_2"]
    assert len(set(named(300))) == 300
    recording = SimpleNamespace(named_weights=(0, set()), repeated=Counter(), parameters=Counted(), constants={}, journal=None)
    recording.attribute_name = lambda tensor: None
    for _ in range(500):
        Recording.constant(recording, torch.ones(1))
    assert list(recording.constants)[-1] == "constant_499" and recording.parameters.looks <= 1


class Counted(dict):
    looks = 0

    def __init__(self):
        super().__init__({i: f"layers.{i}.weight" for i in range(1000)})

    def values(self):
        self.looks += 1
        return super().values()


def test_a_line_of_a_diff_costs_as_much_among_thousands(monkeypatch):
    gm = fxplug.trace(Stack(100), torch.ones(1, 4))
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="layers.*.fc", rank=2))
    slow = difflib.unified_diff(text._lines(gm.graph), text._lines(new.graph), lineterm="", n=1)
    slow = "\n".join(line for line in slow if not line.startswith(("---", "+++"))) + "\n"
    assert "@@ " in slow
    with monkeypatch.context() as patch:
        patch.delattr(difflib.SequenceMatcher, "find_longest_match")  # what looks through all lines for each
        assert fxplug.diff(gm, new) == slow and fxplug.diff(gm, gm) == "\n"
    moved = ["a", "b", "a", "c", "d"], ["c", "d", "a", "x", "b"]
    assert text._Alike(None, *moved).get_matching_blocks() == difflib.SequenceMatcher(None, *moved).get_matching_blocks()
