"""What a site costs does not grow with their number. `benchmarks/trace.py` measures it up to 5000."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fxplug
from fxplug.spec import Match, Pass, Rule

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import trace  # noqa: E402


@pytest.fixture(scope="module")
def costs():
    trace.cost_of_a_site(10, repeats=1)  # the first use imports parts of torch
    return {count: trace.cost_of_a_site(count, repeats=2) for count in (100, 1000)}


@pytest.mark.parametrize("step", ["find", "apply", "verify"])
def test_a_site_costs_as_much_among_a_thousand(costs, step):
    assert costs[1000][step] < 3 * costs[100][step]


def test_a_second_pass_costs_as_much_as_the_first():
    def seconds(count):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))
        passes = [Pass(name, [Rule(Match("*"), "fxplug.blocks:Scale", args=["y"])]) for name in "ab"]
        once = fxplug.apply(fxplug.trace(model, torch.randn(2, 4)), passes[0])
        return min(trace.timed(lambda: fxplug.apply(once, passes[1]))[1] for _ in range(3))

    assert seconds(1000) < 3 * 10 * seconds(100)


def test_replacing_costs_as_much_among_a_thousand():
    def seconds(count):
        gm = fxplug.trace(nn.Sequential(*(nn.GELU() for _ in range(count))), torch.randn(2, 4))
        relu = fxplug.load_pass("replace", module="GELU", **{"with": "ReLU"})
        return min(trace.timed(lambda: fxplug.apply(gm, relu))[1] for _ in range(3))

    assert seconds(1000) < 3 * 10 * seconds(100)
