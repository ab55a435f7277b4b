"""Plugins of HCP-Diffusion that copy blocks of their host, as its ControlNetPlugin does."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import small
import torch
from test_hcp import Hooks, same
from test_hcp_multi_order import Row, converted
from torch import nn

import fxplug
from fxplug.compat.hcp import MultiPluginBlock, SinglePluginBlock
from fxplug.core.errors import FxplugError


class Twin(SinglePluginBlock):
    """Runs a copy of two blocks beside a layer; that of the layer itself is called by its children only."""

    def __init__(self, name, host, host_model=None, **kwargs):
        copies = [copy.deepcopy(part) for part in (host_model.blocks[1], host_model.blocks[2], host_model.blocks[0])]
        super().__init__(name, host, host_model=host_model, **kwargs)
        self.one, self.two, self.own = copies
        self.zero = nn.Linear(4, 4)

    def forward(self, fea_in, fea_out):
        return fea_out + self.zero(self.two(self.one(self.own.first(fea_in[0]))))


class Inner(Twin):
    def forward(self, fea_in, fea_out):
        return fea_out + self.zero(self.own.last(self.one.first(fea_in[0])))


class Control(MultiPluginBlock):
    """Copies a whole list of blocks, and adds what each gives to the model's."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.blocks = copy.deepcopy(kwargs["host_model"].blocks)
        self.zero = nn.Linear(4, 4)

    def from_layer_hook(self, host, fea_in, fea_out, idx):
        found, x = [], fea_in[0]
        for block in self.blocks:
            x = block(x)
            found.append(self.zero(x))
        self.feat_to = found


@pytest.fixture(params=[None, ["blocks.*"]], ids=["code", "leaf"])
def row(request):
    options = {"leaf": request.param} if request.param else {}
    model, args = small.seeded(Row).eval(), small.seeded(lambda: torch.randn(3, 4))
    found = small.traced(model, args)
    return dataclasses.replace(found, gm=fxplug.trace(model, args, **options)), request.param


def test_copies_of_whole_blocks(row):
    case, leaf = row
    p = fxplug.load_pass("hcp/single", name="p", plugin=Twin, layers="a")
    if leaf is None:
        with pytest.raises(FxplugError, match=r"Block.*whose code is in.*leaf: \['blocks.0', 'blocks.1', 'blocks.2'\]"):
            fxplug.apply(case.gm, p)
        return
    new = fxplug.apply(case.gm, p)
    with Hooks(case.model) as hooks:
        plugin = hooks.single("a", lambda host: Twin("p", host, host_model=case.model))
        same(case, new, [(plugin, "p.a.SinglePlugin.plugin")])


def test_copies_whose_children_are_called(row):
    case, _ = row
    new = fxplug.apply(case.gm, fxplug.load_pass("hcp/single", name="p", plugin=Inner, layers="a"))
    with Hooks(case.model) as hooks:
        plugin = hooks.single("a", lambda host: Inner("p", host, host_model=case.model))
        same(case, new, [(plugin, "p.a.SinglePlugin.plugin")])


def test_a_copy_of_a_list_of_blocks(row, tmp_path):
    case, leaf = row
    sources, targets = ["pre_hook:blocks.0"], ["blocks.0", "blocks.1", "blocks.2"]
    if leaf is None:
        with pytest.raises(FxplugError, match=r"Control calls its copy of a Block.*'blocks.0', 'blocks.1', 'blocks.2'\]"):
            converted(case, tmp_path, Control, sources, targets)
        return
    new = converted(case, tmp_path, Control, sources, targets)
    with Hooks(case.model) as hooks:
        plugin = hooks.multi(sources, targets, lambda a, b: Control("p", a, b, host_model=case.model))
        same(case, new, [(plugin, "p.plugin.plugin")])
