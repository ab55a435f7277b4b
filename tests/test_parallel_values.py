"""Parts give what the whole gives: in both modes, in any memory format, for values of any size, in every dtype."""

from __future__ import annotations

import builtins
import math

import processes
import pytest
import small
import torch
import torch.nn.functional as F
from sweeps import sweep
from timm.layers import DropPath
from torch import nn

import fxplug
from fxplug.parallel.comparison import check_pretended
from fxplug.parallel.runtime.attention import Attention
from fxplug.parallel.runtime.pretended import run_simulated

WAYS = [{"ulysses": 2}, {"ring": 2}, {"batch": 2}]


class Tokens(nn.Module):
    """Attention among tokens of what `inner` makes of them; `channels` says that it takes (batch, channels, tokens)."""

    def __init__(self, inner=None, channels=False, attend=F.scaled_dot_product_attention, width=16, heads=4):
        super().__init__()
        self.inner, self.channels, self.attend, self.heads = inner or nn.Identity(), channels, attend, heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        x = self.inner(x.mT).mT if self.channels else self.inner(x)
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(q, k, v).transpose(1, 2).reshape(b, n, c))


def x(batch=4, tokens=12, width=16):
    return torch.randn(batch, tokens, width, generator=torch.Generator().manual_seed(0))


def traced(make, *inputs, training=False):
    return fxplug.trace(small.seeded(make).train(training), inputs).train(training)


def parallel(gm, *inputs, **ways):
    """A plan, and the module that is written of it."""
    plan = fxplug.parallel_plan(gm, inputs, **ways)
    return plan, fxplug.parallelize(gm, plan)


def same_gradients(gm, new, plan):
    """The mean over pretended processes of each parameter's gradients is that of one process."""
    weights = list(gm.parameters())
    want = torch.autograd.grad(gm(x()).square().sum(), weights)
    found = run_simulated(plan.ways, lambda rank: torch.autograd.grad(new(x()).square().sum(), weights))
    for index, gradient in enumerate(want):
        torch.testing.assert_close(sum(g[index] for g in found) / 2, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_bias_in_half_precision_is_added_by_one_process(device):
    """The rounding of a sum of 64 products in bfloat16 would hide a bias that is there twice."""

    def make():
        return Tokens(width=64).bfloat16()

    example = x(width=64).bfloat16()
    gm, planned = traced(make, example), traced(lambda: make().to(device), example.to(device))
    plan = fxplug.parallel_plan(planned, example.to(device), tensor=2, check=False)
    new = fxplug.parallelize(gm, plan)
    with torch.no_grad():
        for found in run_simulated(plan.ways, lambda rank: new(example)):
            torch.testing.assert_close(found, gm(example), rtol=2e-2, atol=2e-2)


# --- how results are compared


def test_one_table_says_what_rounding_may_change():
    from fxplug.core.ir.comparison import DTYPES, RESULT, measure_difference, measure_distance

    one = torch.linspace(0.5, 2, 64)
    for dtype, close in zip(DTYPES, RESULT.of_largest, strict=True):
        a = one.to(dtype)
        assert measure_difference(a, a) == (0, 0)
        assert measure_difference(a, (a.double() * (1 + close / 4)).to(dtype)).times < 1
        assert measure_difference(a, a * (1 + 3 * close)).times > 1
    assert measure_distance(one, one.double()) == measure_distance(one, one[1:]) == measure_distance(1, 2) == math.inf
    assert measure_difference((one, 3), (one, 3)).times == 0 and measure_difference((one,), (one, one)).times == math.inf


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan])
def test_a_value_that_is_not_finite_hides_no_other(odd):
    from fxplug.core.ir.comparison import measure_distance

    a = torch.tensor([1.0, 2.0, odd])
    assert measure_distance(a, a.clone()) == 0 and measure_distance(a, torch.tensor([1.0, 3.0, odd])) == 0.5
    assert measure_distance(torch.tensor([1.0, 2.0, 0.0]), a) == math.inf
    assert measure_distance(a, torch.tensor([1.0, 2.0, 3.0])) == math.inf, "nothing but 0 stands for NaN"


def test_both_checks_allow_the_rounding_of_half_precision():
    for dtype in (torch.bfloat16, torch.float16):
        gm = traced(lambda dtype=dtype: nn.Sequential(*(Tokens() for _ in range(4))).to(dtype), x().to(dtype))
        plan, new = parallel(gm, x().to(dtype), ring=2)
        assert check_pretended(new, (x().to(dtype),), {}) == pytest.approx(plan.check()) and plan.away > 1e-5


# --- memory formats, masks, modes of torch


class Channels(nn.Module):
    """Attention as VAEs write it: queries, keys and values are 1x1 convolutions, whose channels are not next to each other."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Conv1d(16, 16, 1) for _ in range(3))

    def forward(self, x):
        q, k, v = (f(x.mT).unflatten(1, (4, 4)).mT for f in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v).mT.flatten(1, 2).mT


@pytest.mark.parametrize("ways", WAYS, ids=str)
def test_queries_in_any_memory_format(ways):
    gm = traced(Channels, x())
    empty = x().to("meta")  # a plan that is not checked on values
    plan = fxplug.parallel_plan(traced(lambda: Channels().to("meta"), empty), empty, **ways)
    same_gradients(gm, fxplug.parallelize(gm, plan), plan)


def far(q, k, v):
    """With a mask of (heads, tokens, tokens): the further, the less (ALiBi, arXiv 2108.12409)."""
    at = torch.arange(q.shape[2], device=q.device)
    slopes = torch.arange(1, q.shape[1] + 1, device=q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=-(at[None] - at[:, None]).abs() * slopes[:, None, None] * 0.5)


@pytest.mark.parametrize("ways", [*WAYS, {"tensor": 2}], ids=str)
@pytest.mark.parametrize("heads", [4, 1])
def test_a_mask_for_each_head(ways, heads):
    if heads >= ways.get("tensor", 1):
        assert parallel(traced(lambda: Tokens(attend=far, heads=heads), x()), x(), **ways)[0].away < 1e-6


@pytest.mark.parametrize("ways", [*WAYS, {"tensor": 2}], ids=str)
def test_a_plan_made_under_autocast(ways):
    with torch.autocast("cpu", torch.bfloat16):
        plan, new = parallel(traced(Tokens, x()), x(), **ways)
        assert plan.away < 2e-2 and new.graph is not None
        assert all(out.dtype == torch.bfloat16 for out in run_simulated(plan.ways, lambda rank: new(x())))


# --- training and evaluation


LAYERS = {
    "batch norm": lambda: nn.BatchNorm1d(16), "instance norm": lambda: nn.InstanceNorm1d(16, track_running_stats=True),
    "dropout": lambda: nn.Dropout(0.3), "channels": lambda: nn.Dropout1d(0.3), "alpha": lambda: nn.AlphaDropout(0.3),
    "rrelu": lambda: nn.RReLU(), "none": lambda: nn.Dropout(0),
}  # fmt: skip


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("ways", WAYS, ids=str)
@sweep("name", LAYERS, "batch norm", "channels", "none")
def test_layers_that_do_other_things_in_training(name, ways, training):
    """One graph stands for both modes, and the layers in it do not: what they draw and measure is everybody's."""
    gm = traced(lambda: Tokens(LAYERS[name](), channels=True), x(), training=training)
    plan, new = parallel(gm, x(), **ways)
    assert len(new.graphs) == 1 + (name != "none") and plan.check() < 1e-5
    if name in ("dropout", "channels", "alpha", "rrelu"):
        outs = run_simulated(plan.ways, lambda rank: new.train()(x()))
        assert torch.equal(outs[0], outs[1])
        return
    for mode in (True, False):
        same_gradients(gm.train(mode), new.train(mode), plan)


def test_a_plan_fits_a_module_in_either_mode():
    gm = traced(lambda: Tokens(nn.Dropout(0.5)), x())
    plan = fxplug.parallel_plan(gm, x(), ulysses=2)
    assert len(fxplug.parallelize(gm.train(), plan).graphs) == 2


# --- random numbers


class InPlace(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.read, self.drop, self.tokens = read, nn.Dropout(0.5, inplace=True), Tokens()

    def forward(self, x):
        x = x * 2
        y = self.drop(x)
        return self.tokens(x if self.read == "input" else y)


@pytest.mark.parametrize("ways", WAYS, ids=str)
@pytest.mark.parametrize("read", ["input", "result"])
def test_dropout_in_place(read, ways):
    gm = traced(lambda: InPlace(read), x(), training=True)
    if read == "input":
        with pytest.raises(fxplug.SpecError, match="'drop' .* writes random numbers into a value that is read later: return"):
            fxplug.parallel_plan(gm, x(), **ways)
        return
    plan, new = parallel(gm, x(), **ways)
    outs = run_simulated(plan.ways, lambda rank: new(x()))
    assert torch.equal(outs[0], outs[1])


DROPPED = {
    "tokens born behind it": lambda: nn.Dropout(0.5),
    # draws into new memory, and divides what it drew in place
    "paths of samples": lambda: nn.Sequential(nn.Linear(16, 16), DropPath(0.5)),
}


@pytest.mark.parametrize("ways", [*WAYS, {"batch": 2, "ulysses": 2}], ids=str)
@pytest.mark.parametrize("name", DROPPED)
def test_what_is_dropped_is_everybodys(name, ways):
    plan, new = parallel(traced(lambda: Tokens(DROPPED[name]()), x(), training=True), x(), **ways)
    outs = run_simulated(plan.ways, lambda rank: new(x()))
    assert plan.away < 1e-6 and plan.share > 0.99 and all(torch.equal(outs[0], out) for out in outs)


def test_a_graph_that_does_not_run_on_the_example_is_named():
    """A batch norm of one value for each channel computes in evaluation only."""
    norm = small.Call(lambda x, norm: x + norm(x.mean(1))[:, None], nn.BatchNorm1d(16))
    gm = traced(lambda: Tokens(norm), x())
    plan, new = parallel(gm, x(1), ulysses=2)
    assert plan.away < 1e-6
    with pytest.raises(fxplug.TraceError, match="no graph for training, .*: 'inner.*fails with these example inputs: Value"):
        new.train()
    with pytest.raises(fxplug.SpecError, match="fails with these example inputs"):
        parallel(gm.train(), x(1), ulysses=2)


# --- what travels


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.int16, torch.bool, torch.float8_e4m3fn], ids=str)
def test_tensors_travel_whatever_their_dtype(dtype):
    """A group of one process takes what gloo takes."""
    from fxplug.parallel.runtime.collectives import _all_to_all, _GatherFunction

    given = x().to(dtype)[0]
    given = given.conj() if dtype.is_complex else given
    with processes.alone():
        name = torch.distributed.group.WORLD.group_name
        for found in (_all_to_all(given, [12], [12], name), _GatherFunction.apply(given, 1, name)):
            assert found.dtype == dtype and torch.equal(found.to(torch.complex64), given.to(torch.complex64))


# --- what mixes tokens only where values are large


MIXING = {
    "clamped": lambda x: F.normalize(x, dim=1, eps=50.0), "renormed": lambda x: torch.renorm(x, 2, 2, 100.0),
    "responded": lambda x: F.local_response_norm(x, 3, alpha=1e-8),
}  # fmt: skip


def mixing(name, rows):
    """An operation before attention, or along the height of an image between convolutions."""
    if not rows:
        return nn.Sequential(nn.Linear(16, 16), small.Call(MIXING[name]), Tokens())
    one, two = (nn.Conv2d(1, 1, 3, padding=1) for _ in range(2))
    return nn.Sequential(one, small.Call(lambda x: MIXING[name](x[:, 0])[:, None]), two)


@pytest.mark.parametrize("ways", [{"ulysses": 2}, {"ring": 2}, {"batch": 2}, {"rows": 2}], ids=str)
@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_tokens_where_they_are_large_is_whole(name, ways):
    given = x()[:, None] if "rows" in ways else x()
    _, new = parallel(traced(lambda: mixing(name, "rows" in ways), given), given, check=False, **ways)
    for scale in (0.01, 1.0, 100.0, 1e4):
        assert check_pretended(new, (given * scale,), {}) < 1e-5


# --- layers of torch.nn that are one operation


def packed(dropout=0.0):
    """torch's own attention."""
    attention = nn.MultiheadAttention(16, 4, dropout, batch_first=True)
    attend = small.Call(lambda x, attention: x + attention(x, x, x, need_weights=False)[0], attention)
    return nn.Sequential(nn.Linear(16, 16), attend, nn.Linear(16, 16))


def encoder(dropout=0.0):
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, dropout, batch_first=True), 2)


def padded():
    """An encoder whose samples have tokens that are none; in evaluation it nests them."""
    return small.Call(lambda x, net: net(x, src_key_padding_mask=x[..., 0] < -0.5), encoder())


def decoder():
    net = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, 0.0, batch_first=True), 2)
    return small.Call(lambda x, net: net(x, x.flip(1)), net)


@pytest.mark.parametrize("ways", WAYS, ids=str)
@pytest.mark.parametrize("make", [packed, encoder, padded, decoder], ids=lambda make: make.__name__)
@pytest.mark.parametrize("training", [False, True])
def test_packed_attention_runs_or_is_refused_by_name(make, ways, training):
    gm = traced(make, x(), training=training)
    if ways == {"batch": 2}:
        plan, new = parallel(gm, x(), **ways)
        assert plan.share == 1 and check_pretended(new, (x(6, 13),), {}) < 1e-5
        return
    with pytest.raises(fxplug.SpecError, match="is torch's (MultiheadAttention|Transformer(De|En)coder(Layer)?): one op"):
        parallel(gm, x(), **ways)


def test_packed_attention_that_drops_is_refused_by_name():
    with pytest.raises(fxplug.SpecError, match="draws random numbers.*TransformerEncoderLayer.*with dropout as a"):
        parallel(traced(lambda: encoder(0.1), x(), training=True), x(), batch=2)


def test_a_guard_on_len_says_what_to_ask_instead():
    class Counted(Tokens):
        def forward(self, x):
            return super().forward(x) * builtins.len(x)

    new = parallel(traced(Counted, x()), x(), ulysses=2)[1]
    with pytest.raises(fxplug.VerifyError, match=r"'len\(\)|len\(\) gives a plain number; use x.shape\[0\]"):
        check_pretended(new, (x(6),), {})


# --- dropouts of one input


@pytest.mark.parametrize("ways", WAYS, ids=str)
def test_several_dropouts_of_the_input_in_training(ways):
    """Queries, keys and values each have a dropout of their own."""

    def attend(x, drop, *layers):
        return F.scaled_dot_product_attention(*(headed(layer(drop(x))) for layer in layers)).transpose(1, 2).flatten(2)

    def make():
        return nn.Sequential(small.Call(attend, nn.Dropout(0.3), *(nn.Linear(16, 16) for _ in range(3))), nn.Linear(16, 16))

    plan, new = parallel(traced(make, x(), training=True), x(), **ways)
    assert plan.written.twin_error is None and check_pretended(new, (x(),), {}) < 1e-5


# --- what is broadcast, drawn in several tensors, written, or computed in half precision


def headed(t, heads=4):
    return t.unflatten(-1, (heads, -1)).transpose(1, 2)


BROADCAST = {
    "samples of keys and values": lambda q, k, v: (headed(q), headed(k[:1]), headed(v[:1])),
    "samples of queries": lambda q, k, v: (headed(q[:1]), headed(k), headed(v)),
    "heads of queries": lambda q, k, v: (headed(q[..., :4], 1), headed(k), headed(v)),
    "heads of keys": lambda q, k, v: (headed(q), headed(k[..., :4], 1), headed(v)),
    "heads of values": lambda q, k, v: (headed(q), headed(k), headed(v[..., :4], 1)),
}


@pytest.mark.parametrize("ways", [{"ulysses": 2}, {"ring": 2}, {"ulysses": 3}, {"ulysses": 2, "ring": 2}], ids=str)
@pytest.mark.parametrize("form", BROADCAST)
def test_samples_and_heads_of_attention_are_broadcast(form, ways):
    def attend(x, qkv):
        y = F.scaled_dot_product_attention(*BROADCAST[form](*qkv(x).chunk(3, -1)))
        return x + y.transpose(1, 2).flatten(2)

    gm = traced(lambda: small.Call(attend, nn.Linear(16, 48)), x())
    assert fxplug.parallel_plan(gm, x(), check=False, **ways).check() < 1e-5


class Residual(nn.Module):
    """Tokens that are added up in float32, as autocast and models in half precision leave them."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype, self.norm, self.inner = dtype, nn.LayerNorm(16), Tokens().to(dtype)

    def forward(self, x):
        for _ in range(2):
            y = self.norm(x)
            x = x + self.inner(y if torch.is_autocast_enabled("cpu") else y.to(self.dtype))
        return x.softmax(-1)


@pytest.mark.parametrize("ways", [*WAYS, {"tensor": 2}], ids=str)
@sweep("dtype", [torch.bfloat16, torch.float16], 0, ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_result_in_float32_has_the_rounding_of_what_it_was_computed_in(autocast, dtype, ways):
    with torch.autocast("cpu", dtype, enabled=autocast):
        gm = traced(lambda: Residual(torch.float32 if autocast else dtype), x())
        plan, new = parallel(gm, x(), **ways)
        assert plan.away < 2e-2 and check_pretended(new, (x(),), {}, every=True) < 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_plan_that_is_wrong_is_refused_with_the_node(dtype, monkeypatch):
    monkeypatch.setattr(Attention, "attend", lambda self, q, k, v, *rest: F.scaled_dot_product_attention(q, k, v))
    gm = traced(lambda: Residual(dtype), x())
    with pytest.raises(fxplug.VerifyError, match=r"wrong for this model: an output differs by .*e-\d+; the first value"):
        fxplug.parallel_plan(gm, x(), ulysses=2)


def test_dropout_in_what_gives_several_tensors_is_refused_by_name():
    with pytest.raises(fxplug.SpecError, match="'.*inner_0' .* draws random numbers and returns more than one tensor"):
        fxplug.parallel_plan(traced(lambda: packed(0.1), x(), training=True), x(), batch=2)


class Average(nn.Module):
    """Takes away a mean that it keeps between calls."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(x.mean() * 0.1)
        return x - self.mean


@pytest.mark.parametrize("ways", [*WAYS, {"tensor": 2}], ids=str)
def test_pretended_processes_write_buffers_of_their_own(ways):
    plan = fxplug.parallel_plan(traced(lambda: Tokens(Average()), x(), training=True), x(), **ways)
    assert plan.check() < 1e-5 and plan.written.inner.mean == 0


def test_a_value_that_is_written_is_no_place_for_features():
    added = small.Call(lambda x: torch.zeros_like(x).index_add_(1, torch.arange(x.shape[1]).flip(0), x))
    plan = fxplug.parallel_plan(traced(lambda: Tokens(added), x()), x(), tensor=2)
    assert plan.share > 0.9 and plan.check() < 1e-5


def test_what_one_process_adds_for_all_is_no_difference():
    _, new = parallel(traced(Tokens, x()), x(), tensor=2)
    assert check_pretended(new, (x(),), {}, every=True) < 1e-5
