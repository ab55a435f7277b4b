"""A module with graphs for several forms of call trains with checkpointed regions in each of them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import fxplug
from fxplug.lowerings.regions.submodules import CheckpointedRegion, outline
from fxplug.training.distributed import make_accelerator, prepare, set_mode
from fxplug.training.outlined_forms import OutlinedForms
from fxplug.training.train_section import Train


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.drop(torch.relu(self.one(x)))


class Net(nn.Module):
    """Takes one tensor, or a list of them, which are two forms of call."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = torch.cat(x) if isinstance(x, list) else x
        for block in self.blocks:
            x = block(x)
        return x


def lora():
    torch.manual_seed(0)
    net = Net()
    x = torch.randn(2, 8)
    gm = fxplug.variants(fxplug.trace(net, (x,)), net)
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="blocks.*.one", rank=2))
    for name, parameter in new.named_parameters():
        parameter.requires_grad_("lora" in name)
        if name.endswith("up.weight"):
            nn.init.normal_(parameter)
    return new, x


def gradients(run, module, x):
    module.zero_grad()
    torch.manual_seed(7)
    result = run(x)
    result.square().sum().backward()
    return result, {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_results_and_gradients_are_those_without_checkpoints(mode):
    module, x = lora()
    run = OutlinedForms(module, partial(outline, regions=["blocks.*"], checkpoint=True))
    set_mode(run, module, mode)
    for call in (x, [x, x + 1], [x], x):  # the second and third have no graph yet
        expected = gradients(module, module, call)
        found = gradients(run, module, call)
        assert torch.equal(found[0], expected[0]) and len(found[1]) == 6
        assert all(torch.equal(found[1][name], grad) for name, grad in expected[1].items())
    assert len(run.forms) == 3 and all(sum(isinstance(m, CheckpointedRegion) for m in f.modules()) == 3 for f in run.forms)
    owned = {id(p) for p in module.parameters()}
    assert {id(p) for p in run.parameters()} == owned  # no form has weights of its own
    run.eval()
    assert not any(m.training for m in run.modules()) and torch.equal(run([x]), module([x]))


@pytest.mark.slow
def test_a_run_compiles_each_form_of_call_once_and_more_than_torch_does_by_itself(monkeypatch):
    net, compiled = Net().eval(), []

    def note(graph, _):
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=note))
    gm = fxplug.variants(fxplug.trace(net, ([torch.randn(2, 8)],)), net, limit=20)
    accelerator = make_accelerator("fp32", "cpu")
    runner, _ = prepare(gm, Train(task="classify", steps=1, compile=True, fuse=False), lambda _: False, accelerator)
    forms = [[torch.randn(2, 8)] * count for count in range(1, 11)]  # a list has a graph for each number of entries
    with torch.no_grad():
        for form in (*forms, *forms):
            assert torch.allclose(runner(form), net(form), atol=1e-6)
    assert len(compiled) == len(forms) > torch._dynamo.config.recompile_limit
