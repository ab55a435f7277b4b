"""The ways to attach: parameters, values inside values, layers below a region, networks, inputs, stacked replacements."""

from __future__ import annotations

import copy
from typing import ClassVar

import pytest
import small
import torch
import torch.nn.functional as F
from sweeps import sweep
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxplug
from fxplug import Match, Pass, Rule
from fxplug.blocks.base import Block
from fxplug.core.rewriter import graft


class Gain(Block):
    """value * gain: for parameters and values alike."""

    def __init__(self, start: float = 0.5) -> None:
        super().__init__()
        self.start = start
        self.gain = nn.Parameter(torch.tensor(start))

    @classmethod
    def at(cls, site, start=0.5):
        return cls(start)

    def forward(self, value):
        return value * self.gain


class Sum(Block):
    neutral = False

    @classmethod
    def at(cls, site):
        return cls()

    def forward(self, *values):
        return sum(values)


class Negative(Block):
    @classmethod
    def at(cls, site):
        return cls()

    def forward(self, x):
        return -x


class Traced(nn.Module):
    """A block that is traced in: it sees all arguments and the whole result, and returns a result of the same structure."""

    inline: ClassVar[bool] = True

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    @classmethod
    def at(cls, site):
        return cls(4)

    def forward(self, xs, ys):
        hidden, extras = ys
        one, two = extras["twice"]
        return hidden + self.linear(xs[0]), {"twice": (one * 2, two), "n": extras["n"]}


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.act = nn.SiLU()

    def forward(self, x, scale, shift=None, *, extra=None):
        y = self.act(self.fc(x)) * scale
        y = y if shift is None else y + shift
        y = y if extra is None else y + extra
        return y, {"twice": (y + y, x * 3), "n": y.sum(-1)}


class Outer(nn.Module):
    """Shared, tied and directly read parameters, nested results, constants and keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Inner() for _ in range(3))
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.gate = nn.Parameter(torch.ones(4))
        self.norm = nn.BatchNorm1d(4)
        self.rnn = nn.LSTM(4, 4, batch_first=True)
        self.attn = nn.MultiheadAttention(4, 2, batch_first=True)
        self.conv = nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular")

    def forward(self, tokens, bias):
        x = self.embed(tokens)
        total = 0
        for block in self.blocks:
            x, extras = block(x, 0.5, bias, extra=x)
            total = total + extras["twice"][0] + extras["twice"][1] + extras["n"][..., None]
        x = self.blocks[0](x + total, 2.0)[0]
        x = self.norm(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        x = self.rnn(x)[0] + self.attn(x, x, x)[0] + self.conv(x.mT).mT
        return self.head(x * self.gate)


@pytest.fixture(scope="module")
def outer():
    model = small.seeded(Outer).eval()
    args = (torch.arange(10).view(2, 5) % 7, torch.randn(4, generator=torch.Generator().manual_seed(0)))
    return small.traced(model, *args)


def rule(use, path="**", **rest):
    keys = {k: rest.pop(k) for k in ("module", "op", "within") if k in rest}
    return Rule(Match(path, **keys), use, **rest)


def one(use, path="**", name="p", **rest):
    return Pass(name, [rule(use, path, **rest)])


def scaled(model, *names):
    """The model with these parameters halved, each name on its own."""
    model = copy.deepcopy(model)
    for name in names:
        path, _, last = name.rpartition(".")
        owner = model.get_submodule(path)
        half = nn.Parameter(owner._parameters[last].detach() * 0.5)
        setattr(owner, last, half)
    return model


def same(new, model, traced):
    return torch.equal(new(*traced.args), model(*traced.args))


def paths(gm, p):
    return [str(s.port) for s in fxplug.find(gm, p)]


# --- parameters


@sweep(
    "name",
    [
        "blocks.0.fc.weight", "blocks.2.fc.bias", "norm.weight", "norm.bias", "rnn.weight_hh_l0", "attn.in_proj_weight",
        "attn.in_proj_bias", "conv.weight", "conv.bias", "gate", "embed.weight", "head.weight",
    ], "blocks.0.fc.weight", "attn.in_proj_weight", "gate",
)  # fmt: skip
def test_any_parameter_of_any_layer_can_be_mapped(outer, name):
    path, _, last = name.rpartition(".")
    new = fxplug.apply(outer.gm, one(Gain, path, place="param", port=last))
    if path == "attn":  # opened, it multiplies q, k and v one by one
        torch.testing.assert_close(new(*outer.args), scaled(outer.model, name)(*outer.args), rtol=1e-5, atol=1e-5)
    else:
        assert same(new, scaled(outer.model, name), outer)
    assert fxplug.verify(outer.gm, new, outer.args, compile=False).ok
    new(*outer.args).sum().backward()
    assert new.get_parameter(f"p.{path}.Gain.gain".replace("..", ".")).grad is not None
    assert list(new.state_dict())[: len(outer.gm.state_dict())] == list(outer.gm.state_dict())


def test_a_tied_parameter_is_changed_where_it_is_named_and_matched_twice_has_one_block(outer):
    both = fxplug.apply(outer.gm, one(Gain, ["embed", "head"], place="param"))
    assert [k for k, _ in both.named_parameters() if k.startswith("p.")] == ["p.embed.Gain.gain"]
    assert same(both, scaled(outer.model, "embed.weight", "head.weight"), outer)


def test_a_parameter_named_in_the_path_and_by_patterns(outer):
    biases = [f"blocks.{i}.fc:param.bias" for i in range(3)]
    assert paths(outer.gm, one(Gain, "blocks.{i}.fc:param.bias", place="param")) == biases
    found = paths(outer.gm, one(Gain, "**", place="param", port="bias"))
    assert found == [*biases, "norm:param.bias", "conv:param.bias"]
    assert paths(outer.gm, one(Gain, "", place="param", port="*")) == [":param.gate"]
    both = ["rnn:param.weight_ih_l0", "rnn:param.weight_hh_l0"]
    assert paths(outer.gm, one(Gain, "rnn", place="param", port="weight_*")) == both


def test_two_passes_on_one_parameter_compose_in_the_written_order(outer):
    class Shift(Gain):
        def forward(self, value):
            return value + self.gain

    first, second = one(Gain, "blocks.1.fc", place="param"), one(Shift, "blocks.1.fc", "q", place="param")
    for passes, weight in (((first, second), lambda w: w * 0.5 + 0.5), ((second, first), lambda w: (w + 0.5) * 0.5)):
        model = copy.deepcopy(outer.model)
        model.blocks[1].fc.weight.data = weight(model.blocks[1].fc.weight.data)
        assert same(fxplug.apply(outer.gm, *passes), model, outer)


def test_an_opened_layer_stays_a_region_for_later_passes(outer):
    opened = fxplug.apply(outer.gm, one(Gain, "blocks.*.fc", place="param"))
    model = scaled(outer.model, *(f"blocks.{i}.fc.weight" for i in range(3)))
    lora = fxplug.load_pass("lora", at="blocks.*.fc", rank=2)
    new = fxplug.apply(opened, lora)
    assert len(new.meta["passes"][-1]["sites"]) == 4 and same(new, model, outer)
    turned, halved = one(Negative, "blocks.1.fc", args=["y"]), one(Gain, "blocks.1.fc", "q", place="param")
    before, after = fxplug.apply(outer.gm, turned, halved), fxplug.apply(outer.gm, halved, turned)
    assert torch.equal(before(*outer.args), after(*outer.args))


def test_a_parameter_may_be_read_and_mapped_with_an_input(outer):
    class Weighted(Block):
        @classmethod
        def at(cls, site):
            assert site.parameter is site.root.get_parameter("blocks.0.fc.weight")
            assert site.args[1].shape == (4,)
            return cls()

        def forward(self, weight, bias, amount):
            return weight * amount + bias[:, None]

    rules = [rule(Weighted, "blocks.0.fc", place="param", args=["value", "blocks.0.fc:param.bias", "amount"])]
    new = fxplug.apply(outer.gm, Pass("p", rules, inputs={"amount": {"shape": []}}))
    model = copy.deepcopy(outer.model)
    fc = model.blocks[0].fc
    fc.weight.data = fc.weight.data * 3 + fc.bias.data[:, None]
    with torch.no_grad():
        assert torch.equal(new(*outer.args, amount=3), model(*outer.args))
        assert torch.equal(new(*outer.args, amount=torch.tensor(3.0)), model(*outer.args))


@pytest.mark.slow
def test_mapped_parameters_are_saved_and_compiled(outer, tmp_path):
    new = fxplug.apply(outer.gm, one(Gain, "**", place="param"))
    fxplug.save(new, tmp_path / "a")
    again = fxplug.load(tmp_path / "a", allow=["test_attach"])
    assert torch.equal(again(*outer.args), new(*outer.args))
    base = small.vit()
    mapped = fxplug.apply(base.gm, one(Gain, "**", place="param", port="*"))
    report = fxplug.verify(base.gm, mapped, base.args)
    assert {c.name: c.status for c in report.checks}["one graph"] == "ok"


# --- values inside values


def test_the_whole_result_and_all_arguments_as_a_block_will_see_them(outer):
    first = fxplug.find(outer.gm, one(Traced, "blocks.{i}", port="y[:]", args=["x[:]", "y[:]"]))[0]
    x, scale, shift = first.args[0].members  # `extra` was given by name, so a hook would not see it
    assert x.shape == (2, 5, 4) and scale == 0.5 and shift.shape == (4,)
    assert first.args[1].members[1]["twice"][1].address == "blocks.0:out[1].twice[1]"


def test_a_traced_block_equals_a_hook(outer, tmp_path):
    new = fxplug.apply(outer.gm, one(Traced, "blocks.{i}", port="y[:]", args=["x[:]", "y[:]"]))
    model = copy.deepcopy(outer.model)
    hooked = []
    for i, block in enumerate(model.blocks):
        made = Traced(4)
        made.load_state_dict({k: new.get_parameter(f"p.blocks.{i}.Traced.{k}") for k in ("linear.weight", "linear.bias")})
        hooked.append(made)
        block.register_forward_hook(lambda m, xs, ys, made=made: made(xs, ys))
    out, expected = new(*outer.args), model(*outer.args)
    assert torch.equal(out, expected)
    out.sum().backward()
    expected.sum().backward()
    for i, made in enumerate(hooked):
        assert torch.equal(new.get_parameter(f"p.blocks.{i}.Traced.linear.weight").grad, made.linear.weight.grad)
    fxplug.save(new, tmp_path / "a")
    assert torch.equal(fxplug.load(tmp_path / "a")(*outer.args), out)  # no class of the block is needed


def test_a_traced_block_that_tells_training_apart_gives_the_model_both_modes(outer):
    class Noisy(Traced):
        def forward(self, x):
            return F.dropout(x, 0.5, self.training)

        @classmethod
        def at(cls, site):
            return cls(4)

    base = small.traced(small.seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU())).eval(), torch.ones(3, 4))
    new = fxplug.apply(base.gm, one(Noisy, "0", args=["y"]))
    assert len(base.gm.graphs) == 1 and len(new.graphs) == 2
    expected = base.gm(*base.args)
    assert torch.equal(new.eval()(*base.args), expected) and not torch.equal(new.train()(*base.args), expected)


def test_each_member_is_a_site_of_its_own(outer):
    p = one(Gain, "blocks.1", port="y[1].twice[*]")
    assert paths(outer.gm, p) == ["blocks.1:out[1].twice[0]", "blocks.1:out[1].twice[1]"]
    new = fxplug.apply(outer.gm, p)
    assert len([k for k, _ in new.named_parameters() if k.startswith("p.")]) == 2
    p = one(Sum, "blocks.2", port="y[1].twice[*]", args=["value", "blocks.1:out[1].twice[*]"])
    assert [s.args[1].address for s in fxplug.find(outer.gm, p)] == [f"blocks.1:out[1].twice[{i}]" for i in (0, 1)]
    with pytest.raises(fxplug.MatchError, match=r"matches 2 places and 'blocks.2' 1; they are paired in order"):
        fxplug.find(outer.gm, one(Sum, "blocks.2", port="y[0]", args=["value", "blocks.1:out[1].twice[*]"]))


def test_arguments_by_position_name_and_all(outer):
    new = fxplug.apply(outer.gm, one(Gain, "blocks.1", place="before", port="x.extra"))
    assert paths(outer.gm, one(Gain, "blocks.1", place="before", port="x[2]")) == ["blocks.1:in.shift"]
    model = copy.deepcopy(outer.model)
    hook = lambda m, args, kwargs: (args, {"extra": kwargs["extra"] * 0.5})  # noqa: E731
    model.blocks[1].register_forward_pre_hook(hook, with_kwargs=True)
    assert same(new, model, outer)
    everything = one(Nothing, "blocks.1", place="before", port="x[:]", args=["x[:]"])
    assert torch.equal(fxplug.apply(outer.gm, everything)(*outer.args), outer.gm(*outer.args))


class Nothing(nn.Module):
    inline: ClassVar[bool] = True

    @classmethod
    def at(cls, site):
        return cls()

    def forward(self, xs):
        return xs


def test_a_result_of_another_structure_is_refused(outer):
    class Bare(Nothing):
        def forward(self, xs):
            return xs[0]

    with pytest.raises(fxplug.SpecError) as caught:
        fxplug.apply(outer.gm, one(Bare, "blocks.1", port="y[:]", args=["y[:]"]))
    assert str(caught.value) == (
        "p: 'blocks.1:out[:]' returns (a tensor, {twice: (a tensor, a tensor), n: a tensor}), and the block in its place "
        "returns a tensor: return the same structure"
    )


def test_a_rule_without_a_block_puts_a_value_there(outer):
    new = fxplug.apply(outer.gm, Pass("p", [rule(None, "blocks.2.fc", args=["blocks.1.fc"])]))
    model = copy.deepcopy(outer.model)
    kept = {}
    model.blocks[1].fc.register_forward_hook(lambda m, x, y: kept.update(y=y))
    model.blocks[2].fc.register_forward_hook(lambda m, x, y: kept["y"])
    assert same(new, model, outer)


# --- layers below a region


def test_within_finds_layers_below_a_region_and_none_that_a_pass_added():
    base = small.vit()
    p = fxplug.load_pass({**LORA, "rules": [{**LORA["rules"][0], "match": {"path": "blocks.{i}.mlp", "within": ["Linear"]}}]})
    assert [(s.path, s.caught) for s in fxplug.find(base.gm, p)] == [
        (f"blocks.{i}.mlp.fc{k}", {"i": str(i)}) for i in (0, 1) for k in (1, 2)
    ]
    everywhere = Pass("all", [rule("fxplug.blocks:Lora", "", within=["Linear", "Conv2d"])])
    new = fxplug.apply(base.gm, everywhere)
    count = len(new.meta["passes"][-1]["sites"])
    again = fxplug.apply(new, Pass("more", [rule("fxplug.blocks:Lora", "", within=["Linear", "Conv2d"])]))
    assert count == 10 and len(again.meta["passes"][-1]["sites"]) == count  # the LoRA's own Linears are no places
    with pytest.raises(fxplug.MatchError, match="within blocks.0.mlp there is no Conv2d; there are Dropout, GELU, Id"):
        fxplug.find(base.gm, Pass("no", [rule("fxplug.blocks:Lora", "blocks.0.mlp", within="Conv2d")]))


LORA = {"name": "lora", "rules": [{"match": {}, "use": "fxplug.blocks:Lora"}]}


@pytest.mark.parametrize(
    "pattern, expected",
    [
        ("blocks.{0:2}.fc", [0, 1]),
        ("blocks.{-1}.fc", [2]),
        ("blocks.{::2}.fc", [0, 2]),
        ("blocks.{i=1:}.fc", [1, 2]),
        ("blocks.{1}.fc", [1]),
        ("blocks.{:-1}.*c", [0, 1]),
    ],
)
def test_slices_of_numbered_regions(outer, pattern, expected):
    sites = fxplug.find(outer.gm, one(Gain, pattern, place="param"))
    assert [s.path for s in sites] == [f"blocks.{i}.fc" for i in expected]
    assert [dict(s.caught) for s in sites] == [{"i": str(i)} if "i=" in pattern else {} for i in expected]


def test_a_slice_beyond_what_there_is_is_told(outer):
    with pytest.raises(fxplug.MatchError, match=r"in 'blocks.\{0:12\}.fc' goes up to 12, but 'blocks' has 3 \(0 to 2\)"):
        fxplug.find(outer.gm, one(Gain, "blocks.{0:12}.fc", place="param"))
    with pytest.raises(fxplug.SpecError, match=r"'\{1 2\}' in 'blocks.\{1 2\}' is not a placeholder"):
        fxplug.find(outer.gm, one(Gain, "blocks.{1 2}"))


# --- replacements


def test_replacements_stack_as_the_rule_says(outer):
    first = one(Negative, "blocks.*.act", place="replace", args=["x"])
    base = fxplug.apply(outer.gm, first)
    for combine, function in (("sum", lambda x: -x - x), ("chain", lambda x: x)):
        second = one(Negative, "blocks.*.act", "q", place="replace", args=["x"], combine=combine)
        new = fxplug.apply(base, second)
        model = copy.deepcopy(outer.model)
        for block in model.blocks:
            block.act.register_forward_hook(lambda m, x, y, function=function: function(x[0]))
        assert same(new, model, outer)
        assert not any(n.op == "call_module" and "act" in str(n.target) and n.target[0] == "b" for n in new.graph.nodes)


def test_an_operation_is_replaced_with_its_operands(outer):
    class Ratio(Block):
        @classmethod
        def at(cls, site):
            assert [v.shape for v in site.args] == [(2, 5, 4), (4,)]
            return cls()

        def forward(self, a, b):
            return a - b

    new = fxplug.apply(outer.gm, Pass("p", [rule(Ratio, "", op="mul", place="replace", args=["x[0]", "x[1]"])]))
    with torch.no_grad():  # the gate is one: x * 1 became x - 1
        expected = fxplug.apply(outer.gm, one(Minus, "head", place="before", args=["x"]))
        assert torch.equal(new(*outer.args), expected(*outer.args))


@pytest.mark.parametrize("place", ["replace", "after", "before"])
def test_a_block_at_an_operation_gets_all_its_operands(place, outer):
    class All(Block):
        @classmethod
        def at(cls, site):
            assert [v.shape for v in site.args[0].members] == [(2, 5, 4), (4,)]
            return cls()

        def forward(self, given):
            assert type(given) is tuple
            return given[0] - given[1] if place == "replace" else given[0] / given[1]

    new = fxplug.apply(outer.gm, Pass("p", [rule(All, "", op="mul", place=place, args=["x[:]"])]))
    with torch.no_grad():  # the gate is one: x * 1 became x - 1, or x
        expected = fxplug.apply(outer.gm, one(Minus, "head", place="before", args=["x"])) if place == "replace" else outer.gm
        assert torch.equal(new(*outer.args), expected(*outer.args))
    with pytest.raises(fxplug.MatchError, match=r"has no tensor 'x\[2\]'; it reads x\[0\], x\[1\]"):
        fxplug.find(outer.gm, Pass("p", [rule(All, "", op="mul", args=["x[2]"])]))


class Minus(Block):
    @classmethod
    def at(cls, site):
        return cls()

    def forward(self, x):
        return x - 1


# --- networks and inputs


class Side(nn.Module):
    """A second network: takes a value of the host and a condition, gives nested results."""

    def __init__(self, host=None, width: int = 4) -> None:
        super().__init__()
        self.made_from = type(host).__name__
        self.fc = nn.Linear(width, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, cond, bias, *, deep=None, flag=False):
        y = self.drop(self.fc(cond)) + bias
        y = y if deep is None else y + deep
        return {"down": [y, y * 2], "mid": (y.tanh(), flag)}


def not_a_module(host):
    return "text"


def side_pass(use="test_attach:Side", **rest):
    return Pass(
        "side",
        [
            rule(Sum, "blocks.{1:3}", port="y[0]", args=["value", "net:out.down[*]"]),
            rule(Sum, "rnn", place="before", args=["x", "net:out.mid[0]"]),
        ],
        inputs={"tokens": {"shape": ["n", "l"]}, "cond": {"shape": ["n", "l", 4]}},
        networks={"net": {"use": use, "args": {"cond": "cond", "flag": True}, **rest}},
    )


def test_a_network_runs_in_the_same_graph(outer, tmp_path):
    side = small.seeded(Side).eval()
    p = side_pass(side)
    new = fxplug.apply(outer.gm, p)
    cond = torch.randn(2, 5, 4)
    given = side(cond, outer.args[1])
    model = copy.deepcopy(outer.model)
    for i in (0, 1):
        model.blocks[i + 1].register_forward_hook(lambda m, x, y, i=i: (y[0] + given["down"][i], y[1]))
    model.rnn.register_forward_pre_hook(lambda m, x: (x[0] + given["mid"][0],))
    with torch.no_grad():
        ours = new(*outer.args, cond=cond)
        assert torch.equal(ours, model(*outer.args))
    assert new.get_parameter("side.net.fc.weight") is side.fc.weight
    assert fxplug.verify(outer.gm, new, outer.args, {"cond": cond}).ok
    with pytest.raises(fxplug.VerifyError, match=r"^the example inputs do not fit: .* needs the input 'cond' .*cond=\.\.\.$"):
        fxplug.verify(outer.gm, new, outer.args)
    inside = fxplug.apply(new, fxplug.load_pass("lora", at="side.net.**", rank=2))
    assert [s["path"] for s in inside.meta["passes"][-1]["sites"]] == ["side.net.fc"]
    fxplug.save(inside, tmp_path / "a")
    assert torch.equal(fxplug.load(tmp_path / "a", allow=["test_attach"])(*outer.args, cond=cond), ours)
    assert len(new.graphs) == 1  # torch's own dropout is a layer and reads the mode itself


def test_a_network_is_made_from_the_host_and_takes_values_from_its_middle(outer):
    spec = {"use": "test_attach:Side", "args": {"cond": "cond", "deep": "blocks.0.fc"}}
    rules = [rule(Sum, "blocks.1", port="y[0]", args=["value", "net:out.down[1]"])]
    p = Pass("side", rules, inputs=["cond"], networks={"net": spec})
    with pytest.raises(fxplug.TraceError, match="must be a tensor whose shape is known"):
        fxplug.apply(outer.gm, p)
    p = Pass("side", rules, inputs={"cond": {"shape": [2, 5, 4]}}, networks=p.networks)
    new = fxplug.apply(outer.gm, p)
    assert isinstance(new.side.net.fc, nn.Linear) and new.side.net.made_from == "TracedModule"  # the traced host
    rules = [rule(Sum, "blocks.0.fc", place="before", args=["x", "net:out.down[1]"])]
    early = Pass("side", rules, inputs=p.inputs, networks=p.networks)
    with pytest.raises(fxplug.MatchError, match="depends on it, so it would flow backward"):
        fxplug.apply(outer.gm, early)


@pytest.mark.parametrize("found", [True, False])
def test_a_network_is_traced_once(outer, found, monkeypatch):
    traces = []
    trace = lambda *given: traces.append(1) or graft.trace_module(*given)  # noqa: E731
    monkeypatch.setattr("fxplug.core.rewriter.networks.trace_module", trace)
    spec = {"use": nn.Sequential(nn.Linear(4, 4)), "args": {"input": "cond"}}
    rules = [rule(Sum, "blocks.1", port="y[0]", args=["value", "net:out"])]
    p = Pass("side", rules, inputs={"cond": {"shape": [2, 5, 4]}}, networks={"net": spec})
    new = fxplug.apply(outer.gm, fxplug.find(outer.gm, p) if found else p)
    assert len(traces) == 1 and "side_net" in " ".join(node.name for node in new.graph.nodes)


class Sized(nn.Module):
    """Takes conditions of some widths only."""

    def __init__(self, widths):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 4) for width in widths)

    def forward(self, a, b):
        return sum(layer(x) for layer, x in zip(self.layers, (a, b), strict=True))


@pytest.mark.parametrize("widths, most", [((8, 8), 1), ((8, 1), 5), ((32, 8), 3), ((3, 8), 4)])
def test_sizes_that_nothing_says_are_tried(outer, widths, most, monkeypatch):
    network, traces = Sized(widths), []
    trace = lambda *given: traces.append(1) or graft.trace_module(*given)  # noqa: E731
    monkeypatch.setattr("fxplug.core.rewriter.networks.trace_module", trace)
    spec = {"use": network, "args": {"a": "a", "b": "b"}}
    rules = [rule(Sum, "blocks.1", port="y[0]", args=["value", "net:out"])]
    few = {} if widths[0] == 8 else {"try": {f"size_{name}": [8, 32] for name in "ab"}}
    inputs = {name: {"shape": [2, 5, f"size_{name}"], **few} for name in "ab"}
    p = Pass("side", rules, inputs=inputs, networks={"net": spec})
    if 3 in widths:
        with pytest.raises(fxplug.TraceError, match=r"no size fits: tried size_a=8, size_b=8; size_a=8, size_b=32; size_a=32"):
            fxplug.apply(outer.gm, p)
    else:
        new = fxplug.apply(outer.gm, p)
        found = {n.target: n.meta["shape"][-1] for n in new.graph.nodes if n.op == "placeholder"}
        assert tuple(found[name] for name in "ab") == widths
    assert len(traces) <= most


def test_new_inputs_are_arguments_with_names_checks_and_defaults(outer):
    spec = {"shape": ["n", "l", 4]}
    own = {"tokens": {"shape": ["n", "l"]}}
    p = Pass("p", [rule(Sum, "blocks.0", port="y[0]", args=["value", "more", "amount"])],
             inputs={**own, "more": spec, "amount": {"shape": [], "default": 0.5}})  # fmt: skip
    new = fxplug.apply(outer.gm, p)
    more = torch.randn(3, 6, 4)
    args = (torch.zeros(3, 6, dtype=torch.long), outer.args[1])
    assert torch.equal(new(*args, more=more), new(*args, more=more, amount=torch.tensor(0.5)))
    assert torch.equal(new(*args, more=more, amount=2), new(*args, more=more, amount=torch.tensor(2.0)))
    for given, text in [
        ({}, r"the rewritten model needs the input 'more' \[n, l, 4\]: give it by name, more=..."),
        ({"more": more[:2]}, r"input 'more' must have the shape \[n, l, 4\], here \[3, 6, 4\]; it has \[2, 6, 4\]"),
        ({"more": more[..., None]}, r"it has \[3, 6, 4, 1\]"),
    ]:
        with pytest.raises(fxplug.GuardError, match=text):
            new(*args, **given)
    second = fxplug.apply(new, fxplug.load_pass(p, name="q"))
    assert second.meta["passes"][-1]["inputs"] == ["q_more", "q_amount"]
    assert torch.equal(second(*args, more=more, q_more=more * 0, q_amount=0), new(*args, more=more))


class Means(Block):
    """Adds the mean over boxes of any number [b, k, 4], weighted where there are weights."""

    inline = True

    @classmethod
    def at(cls, site):
        return cls()

    def forward(self, y: torch.Tensor, boxes: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        boxes = boxes if weights is None else boxes * weights.reshape(*boxes.shape[:2], 1)
        return y + boxes.mean(1, keepdim=True)


class Kept(Means):
    inline = False


@pytest.mark.parametrize("block", [Means, Kept])
@pytest.mark.parametrize(
    "shapes, args",
    [
        ({"boxes": ["n", "k", 4]}, ["boxes"]),
        ({"boxes": ["n", "k", 4], "weights": ["n", "k"]}, ["boxes", "weights"]),
        ({"weights": ["n", "2*k"], "boxes": ["n", "2*k", 4]}, ["boxes", "weights"]),
        ({"boxes": ["n", "k", 4], "weights": ["k", "n"]}, ["boxes", "weights"]),
        ({"weights": ["n", "k"], "boxes": ["n", "k", 4]}, ["boxes", "weights"]),
    ],
)
def test_a_size_that_nothing_says_is_free(outer, block, shapes, args):
    inputs = {"tokens": {"shape": ["n", "l"]}, **{name: {"shape": shape} for name, shape in shapes.items()}}
    ratio = "2*k" in str(shapes)
    new = fxplug.apply(outer.gm, Pass("p", [rule(block, "blocks.0", port="y[0]", args=["value", *args])], inputs=inputs))
    for k in (16,) if ratio else (3, 8, 11):
        given = {"boxes": torch.rand(2, k, 4), "weights": torch.rand(2, k)}
        if shapes.get("weights") == ["k", "n"]:
            given["weights"] = given["weights"].reshape(k, 2)
        model = copy.deepcopy(outer.model)
        fed = [given[name] for name in args]
        model.blocks[0].register_forward_hook(lambda m, x, y, fed=fed: (Means()(y[0], *fed), *y[1:]))
        assert torch.equal(new(*outer.args, **{name: given[name] for name in args})[0], model(*outer.args)[0])
    if "weights" in args:
        given["weights"] = torch.rand(k + 1, 2) if shapes["weights"][0] == "k" else torch.rand(2, k + 1)
        with pytest.raises(fxplug.GuardError, match="input '(weights|boxes)' must have the shape"):
            new(*outer.args, **given)
    if ratio:  # what is a factor first is found by trying, and fixed
        with pytest.raises(fxplug.GuardError, match="input '(weights|boxes)' must have the shape"):
            new(*outer.args, boxes=torch.rand(2, 6, 4), weights=torch.rand(2, 6))


def test_the_models_own_inputs_are_read_by_address(outer):
    new = fxplug.apply(outer.gm, one(Sum, "blocks.2", port="y[0]", args=["value", ":in.bias"]))
    model = copy.deepcopy(outer.model)
    model.blocks[2].register_forward_hook(lambda m, x, y: (y[0] + outer.args[1], y[1]))
    assert same(new, model, outer)


@pytest.mark.parametrize(
    "change, text",
    [
        ({"use": "test_attach:Sidee"}, "module 'test_attach' has no attribute 'Sidee' \\(did you mean 'Side'\\?\\)"),
        ({"use": "no/such/folder"}, "network 'net': 'no/such/folder' has no config.json"),
        ({"use": 3}, "network 'net' must be a module, a folder or 'package.module:function', not a int"),
        ({"use": "test_attach:not_a_module"}, "gave a str, not an nn.Module"),
        ({"args": {"cnd": "cond"}}, "network 'net' \\(Side\\) cannot be called: .*; it takes cond, bias, deep, flag"),
        ({"args": {"cond": "blocks.0.fcc"}}, "no region 'blocks.0.fcc' \\(did you mean 'blocks.0.fc'\\?\\)"),
        ({"options": {"width": 5}}, r"network 'net' \(Side\) fails on in_cond \[2, 5, 4\], in_bias \[4\]: RuntimeError"),
    ],
)
def test_a_network_that_does_not_fit_is_told(outer, change, text):
    p = side_pass()
    spec = {**p.networks["net"], **change}
    with pytest.raises(fxplug.FxplugError, match=text) as caught:
        fxplug.apply(outer.gm, Pass("side", p.rules, inputs=p.inputs, networks={"net": spec}))
    assert str(caught.value).startswith("side: ") or change["use"] == "test_attach:Sidee"


def test_a_network_on_another_device_is_refused(outer):
    with FakeTensorMode(), torch.device("cuda"):
        elsewhere = Side()
    text = r"side: network 'net' is on cuda:0 and the model on cpu: move the network first, with .to\('cpu'\)"
    with pytest.raises(fxplug.SpecError, match=text):
        fxplug.apply(outer.gm, side_pass(elsewhere))


class Elsewhere(Side):
    """As a network of a GPU is, of which a machine without one can make no values: it says where it is to go."""

    def to(self, device):
        self.goes = str(device)
        return small.seeded(Side).eval()


def elsewhere(host):
    with FakeTensorMode(), torch.device("cuda"):
        elsewhere.made = Elsewhere()
    return elsewhere.made


def test_a_network_that_is_made_here_goes_to_the_model(outer):
    new = fxplug.apply(outer.gm, side_pass("test_attach:elsewhere"))
    assert elsewhere.made.goes == "cpu" and new.get_parameter("side.net.fc.weight").device.type == "cpu"


LAYERWISE = ["lora", "lora_weight", "loha", "lokr", "dora", "boft", "bitfit", "weight_norm", "scale", "ssf"]


@pytest.mark.parametrize("name", LAYERWISE)
def test_shipped_passes_take_a_parent_and_the_layers_within(name):
    base = small.vit()
    p = fxplug.load_pass(name, at="blocks.{i}.attn", within=["Linear", "Conv2d"])
    assert [s.path for s in fxplug.find(base.gm, p)] == [f"blocks.{i}.attn.{k}" for i in (0, 1) for k in ("qkv", "proj")]
    new = fxplug.apply(base.gm, p)
    assert torch.equal(new(*base.args), base.gm(*base.args)) == new.meta["passes"][-1]["neutral"]
    with pytest.raises(fxplug.MatchError, match="within blocks.0.mlp.act there is no Conv2d"):
        fxplug.find(base.gm, fxplug.load_pass(name, at="blocks.0.mlp.act", within="Conv2d"))


class Conv2d(nn.Module):
    """A layer of the model's own that is called as torch's, as EDM's and Karras' networks have them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, 3, 3))

    def forward(self, x):
        return F.conv2d(x, self.weight / self.weight.norm(), padding=1)


def test_lora_at_a_layer_that_is_only_called_as_torchs():
    x = torch.randn(2, 3, 8, 8)
    gm = fxplug.trace(small.net(lambda self, x: self.last(self.first(x)), first=Conv2d(), last=nn.Conv2d(6, 4, 1)), x)
    with pytest.raises(fxplug.SpecError, match="first is a Conv2d without 'in_channels'.* take lora_weight"):
        fxplug.apply(gm, fxplug.load_pass("lora"))
    assert len(fxplug.find(gm, fxplug.load_pass("lora", at="last"))) == 1
    new = fxplug.apply(gm, fxplug.load_pass("lora_weight"))
    fxplug.verify(gm, new, args=x)


@pytest.mark.parametrize("make", [
    lambda: torch.arange(4).float(), lambda: torch.randn(4), lambda: torch.ones(4), lambda: torch.zeros(4, dtype=torch.bool),
    lambda: torch.randn(2, 4)[1], lambda: torch.tensor(2.0),
])  # fmt: skip
def test_a_buffer_of_a_block_that_is_not_saved_stays_with_it(make, tmp_path):
    class Own(Block):
        inline = True

        def __init__(self):
            super().__init__()
            self.register_buffer("freq", make(), persistent=False)

        @classmethod
        def at(cls, site):
            return cls()

        def forward(self, y):
            return y + self.freq

    gm, x = fxplug.trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(2, 4)), torch.randn(2, 4)
    new = fxplug.apply(gm, Pass("own", [rule(Own, "*", port="y", args=["y"])]))
    found = dict(new.named_buffers())
    value = x
    for name in ("0", "1", "2"):
        value = gm.get_submodule(name)(value) + found[f"own.{name}.Own.freq"]
    assert torch.equal(new(x), value) and not any("freq" in key for key in new.state_dict())
    fxplug.save(new, tmp_path / "m")
    assert torch.equal(fxplug.load(tmp_path / "m")(x), value)
