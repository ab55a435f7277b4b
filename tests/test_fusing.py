"""Layers fused with their low-rank updates: plain ones and banks of slots."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxplug
from fxplug.blocks import low_rank
from fxplug.lowerings.linear import operators, updated

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
@pytest.mark.parametrize("how", ["fused", "blas", "stock"])
def test_every_form_gives_what_the_bank_gives(banks, how, weights):
    take(banks, weights)
    fused = fxplug.fuse(banks, how)
    assert targets(fused).count(operators.run_bank_linear) == (0 if how == "stock" else 4)
    with torch.no_grad():
        close(fused(X), banks(X))


def test_samples_of_a_batch_take_slots_of_their_own(banks):
    mixed = [[1, 0, 0], [1, 0, 0], [0, 2, 0.5], [0, 0, 0]]
    fused = fxplug.fuse(banks)
    without = banks.get_submodule("places")
    place = next(n for n in fused.graph.nodes if n.target is operators.run_bank_linear and "places" in str(n.args[1]))
    with torch.no_grad():
        take(banks, mixed)
        assert fused(X).isnan().all() and banks(X).isnan().all()  # `places` sees no samples, so it cannot mix them
        assert place.args[-2:] == (3, 0) and without is not None


@pytest.mark.parametrize("shape, batch_dim", [((4, 5, 12), 0), ((5, 4, 12), 1), ((8, 12), 0), ((8, 3, 2, 12), 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bank_mixes_samples_in_one_product(shape, batch_dim, dtype):
    weight, bias = torch.randn(7, 12, dtype=dtype), torch.randn(7, dtype=dtype)
    down, up = torch.randn(6, 12, dtype=dtype), torch.randn(7, 6, dtype=dtype)
    x = torch.randn(shape, dtype=dtype)
    rows = torch.tensor([[1, 0, 0], [0.5, 0, 0.25], [0.5, 0, 0.25], [0, 0, 0]]).repeat_interleave(2, 1)
    found = operators.run_bank_linear(x, weight, bias, down, up, rows, 3, batch_dim)
    hidden = low_rank.apply_gates(F.linear(x, down), rows, batch_dim)
    expected = F.linear(x, weight, bias) + F.linear(hidden, up)
    close = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(found, expected, rtol=close, atol=10 * close)
    assert found.is_contiguous()
    trained = operators.run_bank_linear(x.requires_grad_(), weight, bias, down, up, rows, 3, batch_dim)
    torch.testing.assert_close(trained, expected, rtol=close, atol=10 * close)
    trained.float().square().sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("name", ["lora", "bank", "product"])
def test_operators_are_well_behaved(name):
    x, weight, bias, down, up = (torch.randn(shape) for shape in [(6, 5), (7, 5), (7,), (4, 5), (7, 4)])
    rows = torch.rand(3, 4)
    given = {"lora": (x, weight, bias, down, up, rows[0, 0]), "bank": (x, weight, bias, down, up, rows, 2, 0),
             "product": (x, weight, bias)}[name]
    torch.library.opcheck(getattr(torch.ops.fxplug, name).default, given)


SHAPES = {
    "linear": (operators.run_linear, []), "lora": (operators.run_lora_linear, [(2, 8), (4, 2), ()]),
    "dora": (updated.run_dora_linear, [(2, 8), (4, 2), (), (4,)]),
    "lokr": (updated.run_lokr_linear, [(), (2, 4), None, None, (2, 2), None, None]),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_a_layer_of_which_one_tensor_trains(name):
    """It gets the gradient of the stock form, and the input is kept only for the gradient of a weight."""
    function, more = SHAPES[name]
    shapes = [(6, 8), (4, 8), (4,), *more]
    for i, shape in enumerate(shapes):
        if not shape:  # the scale, or a factor that is not there
            continue
        values = [None if one is None or (one == (4,) and j == 2 != i) else torch.randn(one) for j, one in enumerate(shapes)]
        values[i].requires_grad_()
        found, kept = [], []
        for form in ("fused", "stock"):
            with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.data_ptr()) or t, lambda t: t):
                y = function(*values, form=form)
            found.append(torch.autograd.grad(y.square().sum(), values[i])[0])
            if form == "fused" and i in (0, 2):
                assert values[0].data_ptr() not in kept
        close(*found)


def test_fused_banks_export_without_operators_of_their_own(banks):
    take(banks, WEIGHTS["two"])
    with torch.no_grad():
        exported = torch.export.export(fxplug.fuse(banks), (X,))
        assert not [n for n in exported.graph.nodes if "fxplug" in str(n.target)]
        close(exported.module()(X), banks(X))


@pytest.mark.slow
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
    with pytest.raises(fxplug.SpecError, match="not 'fuse'.*did you mean 'fused'"):
        fxplug.fuse(fxplug.trace(nn.Linear(2, 2), torch.randn(1, 2)), "fuse")
    with pytest.raises(fxplug.SpecError, match="fuse takes a traced module, not Linear"):
        fxplug.fuse(nn.Linear(2, 2))


def test_fused_layers_run_on_the_meta_device():
    meta = {"device": "meta"}
    x, weight, bias = torch.empty(2, 5, 8, **meta), torch.empty(6, 8, **meta), torch.empty(6, **meta)
    down, up = torch.empty(4, 8, **meta), torch.empty(6, 4, **meta)
    for y in (
        operators.run_linear(x, weight, bias),
        operators.run_lora_linear(x, weight, bias, down, up, torch.ones((), **meta)),
        operators.run_bank_linear(x, weight, bias, down, up, torch.empty(2, 4, **meta), 2),
        updated.run_dora_linear(x, weight, bias, down, up, torch.ones((), **meta), torch.empty(6, **meta)),
        updated.run_lokr_linear(x, weight, bias, torch.ones((), **meta), down[:2, :4], None, None, weight[:3, :2], None, None),
    ):
        assert y.shape == (2, 5, 6) and y.is_meta


@pytest.mark.parametrize("how", ["fused", "blas", "stock", "auto"])
def test_weights_without_values_are_refused(how):
    """torch's own products give whatever the memory held then."""
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
    new = fxplug.apply(fxplug.trace(net, torch.randn(2, 16)), fxplug.load_pass("lora", at="*", rank=2))
    low = fxplug.lower(new, fuse=how)
    low.get_submodule("0").to("meta")
    with torch.no_grad(), pytest.raises((fxplug.FxplugError, RuntimeError, NotImplementedError), match="meta"):
        low(torch.randn(2, 16))


# --- weights that an update maps

MAPPED = {
    "dora": {"rank": 4, "alpha": 2.0},
    "lokr": {"rank": 4},
    "lokr of wholes": {"rank": 64},
    "lokr of products": {"rank": 1, "decompose_both": True, "alpha": 3.0},
    "lokr by a factor": {"rank": 2, "factor": 4},
}


def of_mapped(name, dtype=torch.float32, bias=True):
    """A rewrite whose update is not new, and a batch."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(24, 36, bias=bias), nn.GELU(), nn.Linear(36, 24, bias=bias)).to(dtype)
    kind, x = name.split(" ")[0], torch.randn(2, 40, 24, dtype=dtype)
    new = fxplug.apply(fxplug.trace(net, x), fxplug.load_pass(kind, at="*", **MAPPED[name]))
    for key, parameter in new.named_parameters():
        parameter.requires_grad_(key.startswith(kind))
        if key.startswith(kind) and "magnitude" not in key:
            nn.init.normal_(parameter, std=0.3)
    return new, x


def learned_by(module, new, x):
    """The result, and the gradients of the input and of all that trains."""
    x = x.clone().requires_grad_()
    y = module(x)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, *(p for p in new.parameters() if p.requires_grad)])]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fused", "blas"])
@pytest.mark.parametrize("name", MAPPED)
def test_a_mapped_weight_has_the_results_and_gradients_of_the_rewrite(name, how):
    for bias in (True, False):
        new, x = of_mapped(name, bias=bias)
        low = fxplug.lower(new, fuse=how)
        targets = {n.target for n in low.graph.nodes if n.op == "call_function"}
        assert targets & {updated.run_dora_linear, updated.run_lokr_linear} and F.linear not in targets
        assert set(low.meta["forms"].values()) == {how}
        wanted = learned_by(new, new, x)
        for call in (low, torch.compile(low, fullgraph=True, backend="aot_eager")):
            for got, want in zip(learned_by(call, new, x), wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))
        with torch.no_grad():
            torch.testing.assert_close(low(x), new(x), rtol=1e-5, atol=1e-5)


def test_channels_without_magnitude_or_weight_have_the_gradients_of_the_rewrite():
    new, x = of_mapped("dora")
    block = new.get_submodule("dora.0.Dora")
    with torch.no_grad():
        block.magnitude[3] = 0  # the result says nothing of its direction
        new.get_parameter("0.weight")[5] = 0
        block.up[5] = 0  # nor has this one any
    low = fxplug.lower(new, fuse="fused")
    for got, want in zip(learned_by(low, new, x), learned_by(new, new, x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))
    assert float(learned_by(low, new, x)[-1].abs().max()) > 0


@pytest.mark.parametrize("name", ["dora", "lokr"])
def test_a_mapped_weight_keeps_its_precision_under_autocast(name):
    new, x = of_mapped(name)
    low = fxplug.lower(new, fuse="fused")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = learned_by(low, new, x), learned_by(new, new, x)
    for a, b, exact in zip(got, want, learned_by(new, new, x), strict=True):
        assert a.dtype == b.dtype
        off, theirs = (float((t.float() - exact).abs().max() / exact.abs().max()) for t in (a, b))
        assert off < max(2 * theirs, 1e-2)


def test_a_mapped_weight_that_is_read_twice_or_trained_or_has_a_hook_stays_as_it_is():
    new, x = of_mapped("dora")
    new.get_parameter("0.weight").requires_grad_(True)
    low = fxplug.lower(new, fuse="fused")
    for got, want in zip(learned_by(low, new, x), learned_by(new, new, x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return self.layer(self.layer(x))

    twice = fxplug.apply(fxplug.trace(Twice(), torch.randn(3, 8)), fxplug.load_pass("dora", at="layer", rank=2))
    fused, y = fxplug.lower(twice, fuse="fused"), torch.randn(3, 8)
    torch.testing.assert_close(fused(y), twice(y), rtol=1e-5, atol=1e-6)
    slots = fxplug.apply(fxplug.trace(Twice(), torch.randn(3, 8)), fxplug.load_pass("dora", at="layer", rank=2, slots=2))
    torch.testing.assert_close(fxplug.lower(slots, fuse="fused")(y), slots(y), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["dora", "lokr"])
def test_a_half_base_with_an_update_in_float32(name):
    new, x = of_mapped(name, torch.bfloat16)
    for key, parameter in new.named_parameters():
        parameter.data = parameter.data.float() if key.startswith(name) else parameter.data
    low = fxplug.lower(new, fuse="blas")
    for got, want in zip(learned_by(low, new, x), learned_by(new, new, x), strict=True):
        assert got.dtype == want.dtype
        assert float((got.float() - want.float()).abs().max()) < 4e-2 * float(want.float().abs().max())


@pytest.mark.parametrize("name", ["dora", "lokr"])
def test_a_fused_mapped_weight_is_split_over_processes(name):
    new, x = of_mapped(name)
    low = fxplug.lower(new, fuse="fused")
    for ways in ({"batch": 2}, {"ulysses": 2, "split": {"input_1": 1}}):
        plan = fxplug.parallel_plan(low, (x,), **ways)
        assert plan.share > 0.9 and plan.away < 1e-5


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, at the first transform
@pytest.mark.parametrize("name", ["dora", "lokr"])
def test_mapped_weights_in_half_precision_transforms_exports_and_empty_batches(name):
    new, x = of_mapped(name, torch.bfloat16)
    low = fxplug.lower(new, fuse="blas")
    for got, want in zip(learned_by(low, new, x), learned_by(new, new, x), strict=True):
        assert float((got.float() - want.float()).abs().max()) < 4e-2 * float(want.float().abs().max())
    new, x = of_mapped(name)
    low = fxplug.lower(new, fuse="fused")
    assert low(x[:0]).shape == (0, 40, 24)
    got, want = (torch.func.jvp(m, (x,), (torch.ones_like(x),)) for m in (low, new))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    program = torch.export.export(low, (x,))
    torch.testing.assert_close(program.module()(x), new(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["dora", "lokr"])
def test_gradients_of_a_gradient_are_those_of_the_rewrite(name):
    new, x = of_mapped(name)
    found = []
    for module in (fxplug.lower(new, fuse="fused"), new):
        y = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(module(y).square().sum(), y, create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), [y, *(p for p in new.parameters() if p.requires_grad)]))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))
