"""Merged is un-merged, however often a layer is called, whatever is between, and tied or not."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from fuzz_merging import TOLERANCE, fuzz_merging
from torch import nn

import fxplug
from fxplug.core.errors import SpecError


@pytest.mark.slow
def test_random_merges_are_right_or_refused():
    """A sample; `make fuzz` draws more."""
    counts: Counter[str] = Counter()
    assert fuzz_merging(60, 0, counts) == []
    assert counts["merged"] > 4 * counts["refused"] > 0


class Both(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.table, self.a, self.b, self.call = nn.Embedding(6, 6), nn.Linear(6, 6), nn.Linear(6, 6, bias=False), call
        self.b.weight = self.table.weight

    def forward(self, x):
        return self.call(self.table(x), self.a, self.b)


CALLS = {
    "in a row": lambda x, a, b: b(a(x)),
    "twice, one in a row": lambda x, a, b: b(a(x)) + a(x + 1),
    "in itself": lambda x, a, b: a(a(x)),
    "around another": lambda x, a, b: a(b(a(x))),
    "tied head": lambda x, a, b: b(torch.tanh(a(x))),
}


@pytest.mark.parametrize("name", ["scale", "ssf", "ia3"])
@pytest.mark.parametrize("call", CALLS)
def test_a_scale_between_two_layers_goes_into_one_of_them(call, name):
    torch.manual_seed(0)
    net, x = Both(CALLS[call]).double().eval(), torch.tensor([[1, 4, 0], [5, 2, 2]])
    new = fxplug.apply(fxplug.trace(net, x), fxplug.load_pass(name, at="**"))
    for parameter in new.parameters():
        parameter.data += torch.randn(parameter.shape, dtype=torch.float64) * 0.3
    want = new(x)
    for merged in (fxplug.merge(new), fxplug.lower(new, merge="fold", fuse=None), fxplug.lower(new, merge="auto", fuse=None)):
        assert (merged(x) - want).abs().max() < TOLERANCE * want.abs().max()


@pytest.mark.parametrize("name", ["scale", "ia3", "lora"])
def test_a_bounded_table_is_not_merged_into(name):
    net, x = nn.Sequential(nn.Embedding(6, 6, max_norm=1.0)).eval(), torch.tensor([[1, 4, 0]])
    new = fxplug.apply(fxplug.trace(net, x), fxplug.load_pass(name, at="**"))
    with pytest.raises(SpecError, match="'0' cannot be merged into a weight: max_norm changes the table whenever it is read"):
        fxplug.merge(new)
