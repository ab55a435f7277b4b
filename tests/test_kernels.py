"""Forms of a layer with its low-rank update: fused, in the weight, as a kernel; plain ones and banks of slots."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxplug
from fxplug import low_rank
from fxplug.lowerings.linear import forms, kernels, operators
from fxplug.lowerings.merging import remerge

WEIGHTS = {"one": [1, 0, 0], "two": [0.5, 0, 2], "none": [0, 0, 0]}


class Layers(nn.Module):
    """A small text-and-picture model: what is first sees samples in dimension 0, what is `across` in dimension 1."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, stride=2)
        self.groups = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.first, self.second = nn.Linear(8, 20), nn.Linear(20, 9, bias=False)
        self.across, self.places = nn.Linear(9, 10), nn.Linear(4, 10)

    def forward(self, x):
        x = self.groups(self.conv(x)).flatten(2).transpose(1, 2)
        x = self.second(F.gelu(self.first(x)))
        return self.across(x.transpose(0, 1)).transpose(0, 1) + self.places(torch.ones(4))


def filled(module):
    """Banks with three adapters, of rank 3, 2 and 1."""
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if key.startswith("lora."):
                parameter.copy_(0.3 * torch.randn_like(parameter))
                inner = 0 if ".down." in key else 1
                spare = [i for i in range(parameter.shape[inner]) if parameter.shape[inner] == 9 and i in (5, 7, 8)]
                parameter.index_fill_(inner, torch.tensor(spare, dtype=torch.long), 0)
    return module


def take(module, weights):
    rows = torch.tensor(weights, dtype=torch.float32)
    table = module.get_submodule("lora.gates.table")
    table.weights.zero_()
    if rows.dim() == 1:
        table.weights.copy_(rows.expand_as(table.weights))
        table.entries.zero_()
    else:
        table.weights[: len(rows)] = rows
        table.entries.fill_(len(rows))


X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def banks():
    torch.manual_seed(0)
    made = fxplug.load_pass("lora", at=["first", "second", "across", "places", "conv", "groups"], rank=3, slots=3)
    return filled(fxplug.apply(fxplug.trace(Layers().eval(), X), made))


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def targets(module):
    return [n.target for n in module.graph.nodes]


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("how", ["fused", "remerge", "stock"])
def test_every_form_gives_what_the_bank_gives(banks, how, weights):
    take(banks, weights)
    fused = fxplug.fuse(banks, how)
    expected = {"fused": operators.bank_linear, "remerge": operators.remerged_linear, "stock": None}[how]
    assert targets(fused).count(expected) == (0 if how == "stock" else 4)
    with torch.no_grad():
        close(fused(X), banks(X))
    remerged = remerge.remerge(banks, everywhere=True)
    assert targets(remerged).count(remerge.convolution) == 1  # what has groups stays
    assert sorted(remerge.forms_of(remerged)) == ["across", "conv", "first", "places", "second"]
    close(remerged(X), banks(X))


def test_samples_of_a_batch_take_slots_of_their_own(banks):
    mixed = [[1, 0, 0], [1, 0, 0], [0, 2, 0.5], [0, 0, 0]]
    fused, remerged = fxplug.fuse(banks), remerge.remerge(banks, everywhere=True)
    without = banks.get_submodule("places")
    place = next(n for n in fused.graph.nodes if n.target is operators.bank_linear and "places" in str(n.args[1]))
    with torch.no_grad():
        take(banks, mixed)
        assert fused(X).isnan().all() and banks(X).isnan().all()  # `places` sees no samples, so it cannot mix them
        assert place.args[-2:] == (3, 0) and without is not None
        with pytest.raises(ValueError, match="keep the side path"):
            remerged(X)


@pytest.mark.parametrize("shape, batch_dim", [((4, 5, 12), 0), ((5, 4, 12), 1), ((8, 12), 0), ((8, 3, 2, 12), 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bank_mixes_samples_in_one_product(shape, batch_dim, dtype):
    weight, bias = torch.randn(7, 12, dtype=dtype), torch.randn(7, dtype=dtype)
    down, up = torch.randn(6, 12, dtype=dtype), torch.randn(7, 6, dtype=dtype)
    x = torch.randn(shape, dtype=dtype)
    rows = torch.tensor([[1, 0, 0], [0.5, 0, 0.25], [0.5, 0, 0.25], [0, 0, 0]]).repeat_interleave(2, 1)
    found = operators.bank_linear(x, weight, bias, down, up, rows, 3, batch_dim)
    hidden = low_rank.gated(F.linear(x, down), rows, batch_dim)
    expected = F.linear(x, weight, bias) + F.linear(hidden, up)
    close = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(found, expected, rtol=close, atol=10 * close)
    assert found.is_contiguous()
    trained = operators.bank_linear(x.requires_grad_(), weight, bias, down, up, rows, 3, batch_dim)
    torch.testing.assert_close(trained, expected, rtol=close, atol=10 * close)
    trained.float().square().sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("gates", [torch.tensor(0.7), torch.tensor([0.5, 0.0])], ids=["scale", "slots"])
def test_gradients_of_an_update_in_the_weight(gates):
    shapes = [(2, 3, 5), (6, 5), (6,), (4, 5), (6, 4)]
    values = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(lambda *given: operators.remerged_linear(*given, gates), values)
    shapes = [(2, 4, 5), (6, 2, 3), (6,), (4, 2, 3), (6, 2, 1)]
    values = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    if not gates.dim():
        assert torch.autograd.gradcheck(lambda *v: remerge.convolution(*v, gates, (1,), (1,), (1,), 2), values)


@pytest.mark.parametrize("name", ["lora", "bank", "remerged", "product"])
def test_operators_are_well_behaved(name):
    x, weight, bias, down, up = (torch.randn(shape) for shape in [(6, 5), (7, 5), (7,), (4, 5), (7, 4)])
    rows, gates = torch.rand(3, 4), torch.rand(2)
    given = {"lora": (x, weight, bias, down, up, gates[0]), "bank": (x, weight, bias, down, up, rows, 2, 0),
             "remerged": (weight, down, up, gates), "product": (x, weight, bias)}[name]
    torch.library.opcheck(getattr(torch.ops.fxplug, name).default, given)


def test_plain_updates_go_into_the_weight_where_rows_are_many():
    new = filled(fxplug.apply(fxplug.trace(Layers().eval(), X), fxplug.load_pass("lora", at="**", rank=3)))
    remerged = remerge.remerge(new)
    # `places` has 4 rows and 10 + 4 features; `second` and `across` 16 samples, four times
    assert set(remerge.forms_of(remerged)) == {"conv", "groups", "first", "second", "across"}
    found, expected = [], []
    for module, kept in ((new, expected), (remerged, found)):
        kept.append(module(X))
        kept[0].square().sum().backward()
        kept += [p.grad for p in module.parameters()]
        module.zero_grad()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lowered", [fxplug.fuse, lambda gm: remerge.remerge(gm, everywhere=True)], ids=["fuse", "remerge"])
def test_lowered_banks_export_without_operators_of_their_own(banks, lowered):
    take(banks, WEIGHTS["two"])
    with torch.no_grad():
        exported = torch.export.export(lowered(banks), (X,))
        assert not [n for n in exported.graph.nodes if "fxplug" in str(n.target)]
        close(exported.module()(X), banks(X))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_switching_and_mixing_recompile_nothing(backend):
    made = fxplug.load_pass("lora", at=["first", "second", "across"], rank=3, slots=3)
    new = filled(fxplug.apply(fxplug.trace(Layers().eval(), X), made))
    fused = torch.compile(fxplug.fuse(new), fullgraph=True, dynamic=True, backend=backend)
    torch._dynamo.reset()
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for weights in [*WEIGHTS.values(), [[1, 0, 0], [1, 0, 0], [0, 2, 0.5], [0, 0, 0]]]:
            take(new, weights)
            close(fused(X), new(X))
        take(new, WEIGHTS["one"])
        other = torch.randn(6, 3, 16, 16)
        close(fused(other), new(other))


def test_unknown_forms_and_modules_that_are_not_traced():
    with pytest.raises(fxplug.SpecError, match="no form 'remerged'.*did you mean 'remerge'"):
        fxplug.fuse(fxplug.trace(nn.Linear(2, 2), torch.randn(1, 2)), "remerged")
    with pytest.raises(fxplug.SpecError, match="remerge takes a traced module, not Linear"):
        remerge.remerge(nn.Linear(2, 2))


# --- Triton kernels, by its interpreter: what it reads when it is imported is set for another process

INTERPRETED = """
import torch
from fxplug.lowerings.linear import kernels

assert kernels.INTERPRETED
torch.manual_seed(0)
for dtype, close in [(torch.float32, 1e-5), (torch.float16, 1e-2), (torch.bfloat16, 3e-2)]:
    def new(*shape):
        return torch.randn(shape).to(dtype)
    def check(operator, plain, *given):
        found = operator(*given)
        expected = plain(*(t.float() if isinstance(t, torch.Tensor) else t for t in given))
        assert found.dtype == dtype and found.isfinite().all()
        assert (found.float() - expected).norm() <= close * expected.norm(), (operator, dtype)
    shapes = [(2, 40, 24, 36, 3, 5), (1, 70, 64, 132, 1, 16)]
    for batch, tokens, inner, outer, slots, rank in shapes if dtype == torch.float32 else shapes[:1]:
        take = torch.rand(batch, slots)
        take[0, 0] = 0  # some that no sample takes
        x, weight, down, up = new(batch, tokens, inner), new(outer, inner), new(slots * rank, inner), new(outer, slots * rank)
        for tile, bias in ((0, None), (3, new(outer))):
            check(kernels.linear, kernels._linear_plain, x, weight, bias, down, up, take, tile)
        check(kernels.linear, kernels._linear_plain, new(batch, tokens, outer), weight.t(), None, up.t(), down.t(), take, 3)
        banks = new(slots, outer, rank), new(slots, rank, inner), new(slots, outer, rank), new(slots, rank, inner)
        check(kernels.loha, kernels._loha_plain, weight, *banks, take[0])
        factors = new(slots, 4, 2), new(slots, outer // 4, inner // 2)
        check(kernels.lokr, kernels._lokr_plain, weight, *factors, take[0])
values = [torch.randn(s, requires_grad=True) for s in [(2, 5, 20), (24, 20), (24,), (8, 20), (24, 8)]]
take = torch.tensor([[1.0, 0.0], [0.5, 2.0]])
results = [f(*values, take, 0) for f in (kernels.linear, kernels._linear_plain)]
gradients = [torch.autograd.grad(result.square().sum(), values) for result in results]
for one, other in zip(*gradients):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
"""


@pytest.mark.slow
@pytest.mark.skipif(not kernels.AVAILABLE, reason="needs triton")
def test_kernels_are_right_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


GIVEN = {
    "linear": [(2, 3, 5), (6, 5), (6,), (4, 5), (6, 4)],
    "loha": [(6, 8), (2, 6, 3), (2, 3, 8), (2, 6, 3), (2, 3, 8)],
    "lokr": [(6, 8), (2, 3, 2), (2, 2, 4)],
}


@pytest.mark.parametrize("name", GIVEN)
def test_operators_of_kernels_on_a_cpu(name):
    operator = getattr(kernels, name)
    values = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in GIVEN[name]]
    rest = (torch.tensor([[0.5, 0.0], [2.0, 1.0]]), 0) if name == "linear" else (torch.tensor([0.5, 0.25]),)
    assert torch.autograd.gradcheck(lambda *given: operator(*given, *rest), values)
    torch.library.opcheck(operator, (*(v.detach().float() for v in values), *rest))


@pytest.mark.parametrize("made", [
    {"name": "loha", "rank": 3}, {"name": "loha", "rank": 3, "slots": 2}, {"name": "lokr", "rank": 2, "decompose_both": True},
    {"name": "lokr", "rank": 9, "slots": 2},
], ids=str)
def test_weights_by_kernels(made, monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRETED", True)  # `fuse` takes kernels, the operators not
    monkeypatch.setattr(kernels, "fits", lambda *_, rank=1: False)
    made = dict(made)
    new = fxplug.apply(fxplug.trace(Layers().eval(), X), fxplug.load_pass(made.pop("name"), at=["first", "conv"], **made))
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    fused = fxplug.fuse(new, "kernel")
    assert sorted(remerge.forms_of(fused)) == ["conv", "first"]
    assert {operators.loha_weight, operators.lokr_weight} & set(targets(fused)) and "call_module" not in [
        n.op for n in fused.graph.nodes if "Lo" in str(n.target)
    ]
    if "slots" in made:
        new.get_submodule(f"{new.meta['passes'][0]['name']}.gates.table").weights.copy_(torch.tensor([0.5, 2.0]))
    close(fused(X), new(X))


def test_a_kernel_that_the_device_has_not_is_said_once(banks):
    forms.say.cache_clear()
    with pytest.warns(UserWarning, match="form 'kernel:1' is not available: .*'fused' is taken"):
        fused = fxplug.fuse(banks, "kernel:1")
    assert fxplug.fuse(banks, "kernel:1").meta["forms"] == fused.meta["forms"] == dict.fromkeys(
        ["across", "first", "places", "second"], "fused")
