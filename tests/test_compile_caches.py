"""What torch keeps of compiled code: fused training starts from it in the next process."""

from __future__ import annotations

import json
import os

import processes
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.autograd_cache import check_cacheable
from torch._inductor import config as inductor
from torch.utils.checkpoint import checkpoint

import fxplug
from fxplug.lowerings.linear import operators

X = torch.randn(4, 10, 8, generator=torch.Generator().manual_seed(1))
FORMS = ["fused", "blas", "stock,fused,blas,fused"]


def trained():
    torch.manual_seed(0)
    new = fxplug.apply(
        fxplug.trace(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), X), fxplug.load_pass("lora", at="*", rank=2)
    )
    for name, parameter in new.named_parameters():
        parameter.requires_grad_(name.startswith("lora."))
        if name.endswith("up.weight"):
            parameter.data.normal_()
    return new


def gradients(call, module):
    module.zero_grad(set_to_none=True)
    x = X.clone().requires_grad_()
    y = call(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters() if p.requires_grad)]


@pytest.mark.slow
@pytest.mark.parametrize("how", FORMS)
def test_a_compiled_form_is_one_that_torch_keeps_and_has_the_gradients_of_the_rewrite(how, monkeypatch):
    graphs = []

    def backend(gm, inputs):
        check_cacheable(gm)
        graphs.append(gm)
        return torch._dynamo.lookup_backend("aot_eager")(gm, inputs)

    new = trained()
    if "," in how:  # another form in each way of running
        monkeypatch.setattr("fxplug.lowerings.linear.forms.choose_forms", lambda case, device: (how, how))
        fused = fxplug.fuse(new)
        assert {n.args[-1] for n in fused.graph.nodes if n.target is operators.run_lora_linear} == {how}
    else:
        fused = fxplug.fuse(new, how)
    wanted = gradients(new, new)
    for call in (fused, torch.compile(fused, fullgraph=True, backend=backend)):
        for found, expected in zip(gradients(call, fused), wanted, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    kept = gradients(lambda x: checkpoint(fused, x, use_reentrant=False), fused)
    torch.testing.assert_close(kept, wanted, rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1


@pytest.mark.slow
def test_what_trains_in_a_compiled_fused_layer_may_be_anything():
    for wanted in ("0.weight", "0.bias", "lora.0.Lora.down.weight", "2.weight"):
        new = trained()
        for name, parameter in new.named_parameters():
            parameter.requires_grad_(name == wanted)
        fused = fxplug.fuse(new, "fused")
        compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
        for call in (fused, compiled):
            torch.testing.assert_close(gradients(call, fused), gradients(new, new), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_compiled_forms_under_autocast_and_without_rows():
    new = trained()
    fused = fxplug.fuse(new, "fused")
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = compiled(X), new(X)
    assert found.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05)
    assert compiled(X[:0]).shape == (0, 10, 4) and fused(X[:0]).shape == (0, 10, 4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), new(X), rtol=1e-4, atol=1e-5)


def step(cache):
    """A step of training in a process of its own; it prints what torch found in its cache."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    inductor.cpp.vec_isa_ok = False  # or it would compile programs to see which vectors the processor has
    x, at = torch.randn(40, 8), fxplug.load_pass("lora", at="0", rank=2)
    new = fxplug.apply(fxplug.trace(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), x), at)
    torch.compile(fxplug.fuse(new, "fused"), fullgraph=True)(x).square().sum().backward()
    print(json.dumps(counters["aot_autograd"]), flush=True)


@pytest.mark.slow
def test_compiled_fused_training_is_kept_for_the_next_process(tmp_path):
    found = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        done = processes.ended(step, str(tmp_path / "cache"), folder=tmp_path / str(number))
        assert done.codes == [0], done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = found
    assert first["autograd_cache_miss"] == first["autograd_cache_saved"] == second["autograd_cache_hit"] == 1
    assert "autograd_cache_bypass" not in {*first, *second}
