"""Triton kernels on a GPU: results, gradients, compiled and exported graphs, and their measurement."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxplug
from fxplug.lowerings import forms, kernels, tuning

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(320, 1288), nn.Linear(1288, 320)

    def forward(self, x):
        return self.second(nn.functional.gelu(self.first(x)))


def filled(dtype, **params):
    x = torch.randn(4, 200, 320)
    new = fxplug.apply(fxplug.trace(Layers().eval(), x), fxplug.load_pass("lora", at="*", rank=16, **params))
    with torch.no_grad():
        for key, parameter in new.named_parameters():
            if key.startswith("lora."):
                parameter.copy_(0.05 * torch.randn_like(parameter))
    return new.to("cuda", dtype), x.to("cuda", dtype)


def near(found, expected, dtype):
    assert (found.float() - expected.float()).norm() <= CLOSE[dtype] * expected.float().norm()


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("tile", range(len(kernels.TILES)))
def test_results_and_gradients_of_the_kernel(dtype, tile):
    new, x = filled(dtype)
    fused = fxplug.fuse(new, forms.KERNELS[tile])
    results = []
    for module in (new, fused):
        given = x.clone().requires_grad_()
        out = module(given)
        out.float().square().mean().backward()
        results.append([out, given.grad, *(p.grad for p in module.parameters())])
        new.zero_grad()
    for found, expected in zip(results[1], results[0], strict=True):
        near(found, expected, dtype)


@pytest.mark.parametrize("compiled", [False, True])
def test_samples_take_slots_of_their_own(compiled):
    new, x = filled(torch.bfloat16, slots=3)
    fused = fxplug.fuse(new, "kernel")
    call = torch.compile(fused, fullgraph=True, dynamic=True) if compiled else fused
    table = new.get_submodule("lora.gates.table")
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for rows in ([[1, 0, 0]] * 4, [[0, 0, 0]] * 4, [[1, 0, 0], [0, 0.5, 0.5], [0, 0, 0], [0, 0, 2]]):
            table.weights[:4] = torch.tensor(rows, dtype=torch.float32)
            table.entries.fill_(4)
            near(call(x), new(x), torch.bfloat16)


def test_an_exported_graph_keeps_the_operator():
    new, x = filled(torch.bfloat16)
    with torch.no_grad():
        exported = torch.export.export(fxplug.fuse(new, "kernel"), (x,))
        near(exported.module()(x), new(x), torch.bfloat16)
    assert any("linear_of_bank" in str(node.target) for node in exported.graph.nodes)


@pytest.mark.parametrize("name", ["loha", "lokr"])
def test_weights_by_kernels(name):
    x = torch.randn(4, 200, 320)
    new = fxplug.apply(fxplug.trace(Layers().eval(), x), fxplug.load_pass(name, at="*", rank=8))
    with torch.no_grad():
        for key, parameter in new.named_parameters():
            parameter.add_(0.05 * torch.randn_like(parameter)) if key.startswith(name) else None
    new, x = new.cuda(), x.cuda()
    near(fxplug.fuse(new, "kernel")(x), new(x), torch.float32)


def test_kernels_are_measured_beside_the_other_forms(tmp_path, monkeypatch):
    monkeypatch.setenv("FXPLUG_CACHE", str(tmp_path))
    new, x = filled(torch.bfloat16)
    found = tuning.tune(new, (x,), turns=5)
    assert all(set(t.milliseconds) == {"stock", "fused", "remerge", *forms.KERNELS} for t in found.timings)
    assert fxplug.fuse(new).meta["forms"] == {name: t.form for t in found.timings for name in t.layers}
