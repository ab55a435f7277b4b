"""Forms of a layer with its low-rank update: fused, in the weight, as a kernel; plain ones and banks of slots."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxplug
from fxplug import products, remerging

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
    expected = {"fused": products.bank_linear, "remerge": products.remerged_linear, "stock": None}[how]
    assert targets(fused).count(expected) == (0 if how == "stock" else 4)
    with torch.no_grad():
        close(fused(X), banks(X))
    remerged = remerging.remerge(banks, everywhere=True)
    assert targets(remerged).count(remerging.convolution) == 1  # what has groups stays
    assert sorted(remerging.forms_of(remerged)) == ["across", "conv", "first", "places", "second"]
    close(remerged(X), banks(X))


def test_samples_of_a_batch_take_slots_of_their_own(banks):
    mixed = [[1, 0, 0], [1, 0, 0], [0, 2, 0.5], [0, 0, 0]]
    fused, remerged = fxplug.fuse(banks), remerging.remerge(banks, everywhere=True)
    without = banks.get_submodule("places")
    place = next(n for n in fused.graph.nodes if n.target is products.bank_linear and "places" in str(n.args[1]))
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
    found = products.bank_linear(x, weight, bias, down, up, rows, 3, batch_dim)
    hidden = products.gated(F.linear(x, down), rows, batch_dim)
    expected = F.linear(x, weight, bias) + F.linear(hidden, up)
    close = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(found, expected, rtol=close, atol=10 * close)
    assert found.is_contiguous()
    trained = products.bank_linear(x.requires_grad_(), weight, bias, down, up, rows, 3, batch_dim)
    torch.testing.assert_close(trained, expected, rtol=close, atol=10 * close)
    trained.float().square().sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("gates", [torch.tensor(0.7), torch.tensor([0.5, 0.0])], ids=["scale", "slots"])
def test_gradients_of_an_update_in_the_weight(gates):
    shapes = [(2, 3, 5), (6, 5), (6,), (4, 5), (6, 4)]
    values = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(lambda *given: products.remerged_linear(*given, gates), values)
    shapes = [(2, 4, 5), (6, 2, 3), (6,), (4, 2, 3), (6, 2, 1)]
    values = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    if not gates.dim():
        assert torch.autograd.gradcheck(lambda *v: remerging.convolution(*v, gates, (1,), (1,), (1,), 2), values)


@pytest.mark.parametrize("name", ["lora", "bank", "remerged", "product"])
def test_operators_are_well_behaved(name):
    x, weight, bias, down, up = (torch.randn(shape) for shape in [(6, 5), (7, 5), (7,), (4, 5), (7, 4)])
    rows, gates = torch.rand(3, 4), torch.rand(2)
    given = {"lora": (x, weight, bias, down, up, gates[0]), "bank": (x, weight, bias, down, up, rows, 2, 0),
             "remerged": (weight, down, up, gates), "product": (x, weight, bias)}[name]
    torch.library.opcheck(getattr(torch.ops.fxplug, name).default, given)


def test_plain_updates_go_into_the_weight_where_rows_are_many():
    new = filled(fxplug.apply(fxplug.trace(Layers().eval(), X), fxplug.load_pass("lora", at="**", rank=3)))
    remerged = remerging.remerge(new)
    # `places` has 4 rows and 10 + 4 features; `second` and `across` 16 samples, four times
    assert set(remerging.forms_of(remerged)) == {"conv", "groups", "first", "second", "across"}
    found, expected = [], []
    for module, kept in ((new, expected), (remerged, found)):
        kept.append(module(X))
        kept[0].square().sum().backward()
        kept += [p.grad for p in module.parameters()]
        module.zero_grad()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


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
        remerging.remerge(nn.Linear(2, 2))
