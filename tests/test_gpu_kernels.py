"""Kernels on a GPU, Triton's and a ring's: results, gradients, compiled and exported graphs, and their measurement."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxplug
from fxplug.lowerings.linear import forms, kernels, measuring
from fxplug.parallel.runtime.attention import Attention
from fxplug.parallel.runtime.collectives import Gather, Split
from fxplug.parallel.runtime.mesh import ways_of
from fxplug.parallel.runtime.pretended import pretended

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
    found = measuring.tune(new, (x,), turns=5)
    assert all(set(t.milliseconds) == {"stock", "fused", "remerge", *forms.KERNELS} for t in found.timings)
    eager = {name: text.partition(" ")[0] for name, text in fxplug.fuse(new).meta["forms"].items()}
    assert eager == {name: t.form for t in found.timings for name in t.layers}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_ring_gives_what_the_whole_gives(dtype):
    """On pretended processes: the flash kernels' parts and gradients, merged by their denominators."""
    ways = ways_of({"ring": 3})
    split, gather = (kind(ways, "sequence", 2) for kind in (Split, Gather))
    given = [torch.randn(2, 4, 77, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
    weights = torch.randn_like(given[0])
    high = [t.detach().double().requires_grad_() for t in given]
    one = torch.nn.functional.scaled_dot_product_attention(*high)
    want = torch.autograd.grad((one * weights).sum(), high)

    def run(rank):
        out = gather(Attention(ways)(*(split(t, 77) for t in given), None, None, 77, 77), 77)
        return out, torch.autograd.grad((out * weights).sum(), given)

    close = 1e-4 if dtype == torch.float32 else 3e-2
    found = pretended(ways, run)
    assert all(torch.allclose(out.double(), one, rtol=close, atol=close) for out, _ in found)
    for index, gradient in enumerate(want):
        assert torch.allclose(sum(g[index].double() for _, g in found) / 3, gradient, rtol=close, atol=close)
