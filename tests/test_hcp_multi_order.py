"""A MultiPluginBlock whose to-layers follow each other directly: what one reads is what the plugin made of the one before."""

from __future__ import annotations

import pytest
import small
import torch
from test_hcp import Hooks, passes, same
from torch import nn

import fxplug
from fxplug.compat.hcp import MultiPluginBlock


class Adds(MultiPluginBlock):
    """Keeps what goes into the from-layers, and adds it to each to-layer."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.full((4,), 1.5))

    def from_layer_hook(self, host, fea_in, fea_out, idx):
        self.feat_to = fea_in[0] * (idx + 1)

    def to_layer_hook(self, host, fea_in, fea_out, idx):
        given = fea_in[0] if fea_out is None else fea_out + fea_in[0]
        return given * self.gain + self.feat_to * (idx + 1)


class Writes(Adds):
    """Changes a value that it reads elsewhere, in place."""

    def to_layer_hook(self, host, fea_in, fea_out, idx):
        return self.feat_to.add_(1) + super().to_layer_hook(host, fea_in, fea_out, idx)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.first(x).relu())


class Row(nn.Module):
    """Layers and blocks that follow each other directly, then a sum of two of their values."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        x = y = self.c(self.b(self.a(x)))
        for block in self.blocks:
            x = block(x)
        return self.norm(x) + y


@pytest.fixture
def row():
    return small.traced(small.seeded(Row).eval(), small.seeded(lambda: torch.randn(3, 4)))


def converted(row, tmp_path, kind, sources, targets):
    text = f"  p: {{_target_: {kind.__module__}.{kind.__name__}, from_layers: {sources}, to_layers: {targets}}}"
    (p,) = passes(tmp_path, text, model=f"{__name__}:Row")
    return fxplug.apply(row.gm, p)


@pytest.mark.parametrize(
    "sources, targets",
    [
        (["pre_hook:a"], ["b", "pre_hook:c"]),
        (["pre_hook:a"], ["pre_hook:c", "b"]),
        (["pre_hook:a"], ["a", "b", "c"]),
        (["pre_hook:a", "b"], ["c", "pre_hook:blocks.0", "pre_hook:blocks.0.last"]),
        (["pre_hook:a"], ["blocks.0", "blocks.1", "blocks.2", "pre_hook:norm"]),
        (["pre_hook:a"], ["blocks.0.last", "pre_hook:blocks.1.first", "blocks.2", "norm"]),
        (["pre_hook:blocks.0"], ["blocks.1", "pre_hook:blocks.2", "pre_hook:norm"]),
    ],
)
def test_to_layers_that_follow_each_other(row, tmp_path, sources, targets):
    new = converted(row, tmp_path, Adds, sources, targets)
    with Hooks(row.model) as hooks:
        plugin = hooks.multi(sources, targets, lambda a, b: Adds("p", a, b, host_model=row.model))
        same(row, new, [(plugin, "p.plugin.plugin")])
    assert fxplug.verify(row.gm, new, row.args, compile=False)
    fxplug.save(new, tmp_path / "saved")
    assert torch.equal(fxplug.load(tmp_path / "saved")(*row.args), new(*row.args))


def test_a_plugin_that_writes_in_between(row, tmp_path):
    sources, targets = ["pre_hook:a"], ["b", "pre_hook:c"]
    new = converted(row, tmp_path, Writes, sources, targets)
    with Hooks(row.model) as hooks:
        hooks.multi(sources, targets, lambda a, b: Writes("p", a, b, host_model=row.model))
        assert torch.equal(new(*row.args), row.model(*row.args))
