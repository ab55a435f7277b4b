"""verify: blocks that lie about being neutral are found and named, models with faults of their own are not blamed on passes."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxplug
from fxplug import Match, Pass, Rule
from fxplug.blocks.base import Block
from fxplug.blocks.skip import Skip
from fxplug.core.ir.comparison import describe_difference
from fxplug.core.ir.graph import copy_graph
from fxplug.core.verifier import keep_distinct_calls


class Honest(Block):
    neutral = True

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("calls", torch.zeros(()))

    @classmethod
    def at(cls, site):
        block = cls()
        block.__dict__["site"] = site
        return block

    def forward(self, y):
        return y + self.weight


def lying(forward):
    return type("Lying", (Honest,), {"forward": forward})


def on_the_second_call(self, y):
    self.calls += 1
    return y + self.weight + (self.calls > 1) * 1e-3


def through_the_base(self, y):
    self.site.root.steps.add_(1)
    return y + self.weight


LIES = {  # how a block lies, and what is said of it
    "always": (lambda self, y: y + self.weight + 1e-3, r"differ by .* at \['second'\]\n"),
    "on the second call": (on_the_second_call, "on a second call"),
    "in training": (lambda self, y: y + self.weight + 1e-3 * self.training, "in training"),
    "with gradients": (lambda self, y: y + self.weight + 1e-3 * torch.is_grad_enabled(), "with gradients recorded"),
    "without gradients": (lambda self, y: y + self.weight + 1e-3 * (not torch.is_grad_enabled()), "differ by"),
    "writes what others read": (lambda self, y: y.add_(1) + self.weight, "differ by"),
    "infinities": (lambda self, y: y.masked_fill(y == y.max(), torch.inf) + self.weight, "differ by inf"),
    "NaN": (lambda self, y: y.masked_fill(y == y.max(), torch.nan) + self.weight, "NaN in one of them"),
    "without the base's gradient": (lambda self, y: y.detach() + self.weight, r"gradients no longer reach .*b\.weight"),
}


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        return {"first": self.a(x), "second": self.drop(self.c(self.b(x)))}


def rewritten(model, x, *passes):
    gm = fxplug.trace(model, (x,))
    return gm, fxplug.apply(gm, *passes)


def block(kind, path, name="p", **options):
    return Pass(name, [Rule(Match(path), kind, args=("y",), **options)])


def checked(gm, new, *args):
    return {c.name: (c.status, c.detail) for c in fxplug.verify(gm, new, args, compile=False).checks}


@pytest.mark.parametrize("how", LIES)
def test_a_block_that_lies_is_found_and_named_among_others(how):
    forward, text = LIES[how]
    passes = block(Honest, "*", "before"), block(lying(forward), "b", "liar"), block(Honest, "b", "behind")
    if how == "without the base's gradient":
        passes = passes[1:]
    gm, new = rewritten(Base().eval(), x := torch.randn(2, 3, 4), *passes)
    with pytest.raises(fxplug.VerifyError, match=text) as caught:
        checked(gm, new, x)
    assert "liar says it is neutral, but " in str(caught.value)
    assert "\n  first region to differ: b (Lying)\n" in str(caught.value)


def test_a_block_that_writes_into_the_model_is_found_and_undone():
    model = Base().eval()
    gm, new = rewritten(model, x := torch.randn(2, 3, 4), block(lying(through_the_base), "b"))
    with pytest.raises(fxplug.VerifyError, match="a block writes to the buffer 'steps' of the model"):
        checked(gm, new, x)
    assert model.steps == 0


@pytest.mark.parametrize(
    ("forward", "text"),
    [
        (lambda self, y: (y + self.weight).double(), "torch.float64 where torch.float32 was"),
        (lambda self, y: torch.cat([y, y + self.weight], -1), r"\[2, 3, 8\] where \[2, 3, 4\] was"),
    ],
)
def test_another_dtype_or_shape_is_told_at_the_block_that_made_it(forward, text):
    passes = block(lying(forward), "b", "liar"), block(Honest, "b", "behind")
    gm, new = rewritten(Base().eval(), x := torch.randn(2, 3, 4), *passes)
    with pytest.raises(fxplug.VerifyError, match=f"liar: block Lying at 'b' returns {text}"):
        checked(gm, new, x)


def test_a_parameter_that_another_block_cuts_off_names_that_block():
    cuts = lying(lambda self, y: y.detach() + self.weight)
    gm, new = rewritten(Base().eval(), x := torch.randn(2, 3, 4), block(Honest, "b", "good"), block(cuts, "b", "liar"))
    with pytest.raises(fxplug.VerifyError, match="good.b.Honest.weight.*; liar: block Lying at 'b' passes no gradient on"):
        checked(gm, new, x)


class Counts(Base):
    def forward(self, x):
        self.steps.add_(1)
        return self.a(x) * self.steps


class WritesItsInput(Base):
    def forward(self, x):
        x.mul_(2)
        return self.a(x)


class Normed(Base):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(self.a(x))


class Infinite(Base):
    def forward(self, x):
        y = self.a(x)
        return y, y.masked_fill(y > 0, torch.inf), y.masked_fill(y < 0, torch.nan)


@pytest.mark.parametrize("kind", [Base, Counts, WritesItsInput, Normed, Infinite])
@pytest.mark.parametrize("training", [False, True])
def test_what_a_model_does_itself_is_no_fault_of_a_pass_and_nothing_is_left_changed(kind, training):
    model, x = kind().train(training), torch.randn(2, 3, 4)
    gm, new = rewritten(model, x, block(Honest, "a"))
    modes = [m.training for m in [*gm.modules(), *new.modules()]]
    state, given, random = {k: v.clone() for k, v in model.state_dict().items()}, x.clone(), torch.get_rng_state()
    assert checked(gm, new, x)["neutral"] == ("ok", "outputs are torch.equal (p), in evaluation twice, in training")
    assert torch.equal(x, given) and torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert modes == [m.training for m in [*gm.modules(), *new.modules()]]


class Unsteady(nn.Module):
    """Kept whole, it is another thing at each call, as nothing in a graph is."""

    def __init__(self):
        super().__init__()
        self.number = itertools.count()

    def forward(self, x):
        return x + next(self.number)


class Failing(nn.Module):
    def forward(self, x):
        if type(x) is torch.Tensor and x.sum() > 1e6:
            raise ValueError("too much")
        return x * 1


def test_a_model_that_is_never_the_same_is_told_apart_from_its_passes():
    x = torch.randn(2, 3, 4)
    gm = fxplug.trace(nn.Sequential(nn.Linear(4, 4), Unsteady()).eval(), (x,), leaf=["1"], check=False)
    status, text = checked(gm, fxplug.apply(gm, block(Honest, "0")), x)["neutral"]
    assert status == "skipped" and text.startswith("the model gives another result when it is called again")


def test_a_model_that_fails_is_told_apart_from_its_passes():
    gm = fxplug.trace(nn.Sequential(nn.Linear(4, 4), Failing()).eval(), (torch.randn(2, 4),), leaf=["1"])
    new = fxplug.apply(gm, block(Honest, "0"))
    text = "the model fails on these inputs without any pass: ValueError: too much"
    with pytest.raises(fxplug.VerifyError, match=text):
        gm.get_parameter("0.bias").data.fill_(1e9)
        checked(gm, new, torch.ones(2, 4))


@pytest.mark.parametrize(("value", "status"), [(0.0, "ok"), (torch.nan, "skipped")])
def test_outputs_that_can_hide_a_difference_are_said(value, status):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    nn.init.zeros_(model[1].weight)
    nn.init.constant_(model[1].bias, value)
    gm, new = rewritten(model, x := torch.randn(2, 4), block(Honest, "0"))
    found, text = checked(gm, new, x)["neutral"]
    assert found == status and ("may hide a change" in text or "is NaN" in text)


def test_random_numbers_of_a_block_do_not_shift_those_of_the_model():
    drops = lying(lambda self, y: y + self.weight * F.dropout(y, 0.5, self.training))
    gm, new = rewritten(Base().eval(), x := torch.randn(2, 3, 4), block(drops, "b"))
    assert "random numbers that the passes draw are drawn separately" in checked(gm, new, x)["neutral"][1]
    loud = lying(lambda self, y: y + self.weight + 1e-3 * self.training * F.dropout(y, 0.5))
    gm, new = rewritten(Base().eval(), x, block(loud, "b"))
    with pytest.raises(fxplug.VerifyError, match=r"p says it is neutral.* in training"):
        checked(gm, new, x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.other = nn.MultiheadAttention(96, 3, batch_first=True), nn.Linear(96, 96)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0], self.other(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_output_is_compared_beside_an_opened_attention(dtype):
    opened = fxplug.load_pass("loha", at="attention", param="in_proj_weight")
    gm, new = rewritten(Attention().eval().to(dtype), x := torch.randn(3, 17, 96).to(dtype), opened)
    assert checked(gm, new, x)["neutral"][0] == "ok"
    loud = block(lying(lambda self, y: y + self.weight + 100), "other", "liar")
    for passes in ([opened, loud], [loud]):
        with pytest.raises(fxplug.VerifyError, match=r"liar says it is neutral.*at \[1\]\n.*other \(Lying\)"):
            checked(gm, fxplug.apply(gm, *passes), x)


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        (torch.zeros(2), torch.zeros(3), "in shape: [3] instead of [2]"),
        (torch.zeros(2), torch.zeros(2).double(), "in dtype"),
        ((torch.zeros(2), 1), (torch.zeros(2), 2), "in value at [1]: 2 instead of 1"),
        ((torch.zeros(2),), [torch.zeros(2)], "in type: a list instead of a tuple"),
        ({"a": 1}, {"b": 1}, "in structure"),
        ([torch.zeros(2)] * 2, [torch.zeros(2)], "in structure"),
        (torch.zeros(2), None, "in type: a NoneType instead of a Tensor"),
        (torch.tensor([torch.inf]), torch.tensor([torch.finfo().max]), "by inf"),
        (torch.tensor([1j]), torch.tensor([2j]), "by 1.0e+00"),
        (torch.tensor([1]), torch.tensor([2]), "in value"),
        (torch.tensor([torch.nan, torch.inf]), torch.tensor([torch.nan, torch.inf]), None),
        ((torch.tensor([0.0]), torch.nan), (torch.tensor([-0.0]), torch.nan), None),
    ],
)
def test_values_differ_in_words(a, b, text):
    found = describe_difference(a, b)
    assert found is None if text is None else found.startswith(text)


# --- the order of a graph


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        y = self.one(x)
        return self.norm(self.two(y) + y), y


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Two(), Two()]), nn.Linear(4, 4)

    def forward(self, x):
        for each in self.blocks:
            x, y = each(x)
        return self.head(x) + y


class Inlined(Skip):
    inline = True


class Mapped(Honest):
    def forward(self, value, source):
        return value + self.weight * source.sum()


INNER = ["one", "one.0", "one.2", "two", "norm"]
PLACES = [f"blocks.{n}.{name}" for n in (0, 1) for name in INNER] + ["head"]
SOURCES = [*PLACES, *(f"{p}:in" for p in PLACES), "blocks.0:out[0]", "blocks.1:out[1]", ":in.x", ":out"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "kind"),
    [("after", Skip), ("after", Inlined), ("before", Skip), ("before", Inlined), ("replace", Skip), ("param", Mapped)],
)
def test_a_value_flows_forward_or_it_is_said_which_place_runs_first(place, kind):
    gm = fxplug.trace(Model().eval(), (x := torch.randn(2, 3, 4),))
    counts = {True: 0, False: 0}
    pairs = list(itertools.product(SOURCES, [p for p in PLACES if place != "param" or not p.endswith("one")]))
    for source, target in pairs if kind is Skip else pairs[::4]:  # the others are traced for each
        made = Pass("p", [Rule(Match(target), kind, place=place, args=("y" if place == "replace" else "value", source))])
        try:
            new = fxplug.apply(gm, made)
        except fxplug.MatchError as error:
            told = str(error)
            assert f"'{target}" in told and "first, and" in told and "can only flow to what runs later" in told
            counts[False] += 1
        else:
            new(x)
            counts[True] += 1
    assert min(counts.values()) > 10


# --- what can be done with it afterwards


class Gradient(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        with torch.enable_grad():
            x = self.layer(x.detach().requires_grad_())
            y = self.layer(x)
            return y, torch.autograd.grad(y.sum(), x, create_graph=True)[0]


class WithDtype(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x), x.device


def local():
    class Local(Honest):
        pass

    return Local


@pytest.mark.parametrize(
    ("model", "kind", "saved", "exported"),
    [
        (Base, None, "ok", "ok"),
        (Gradient, None, "ok", "cannot"),
        (WithDtype, None, "ok", "cannot"),
        (Base, local(), "cannot", "ok"),
    ],
)
def test_verify_says_beforehand_what_save_and_export_will(model, kind, saved, exported, tmp_path):
    x = torch.randn(2, 4)
    passes = [fxplug.load_pass("lora", at="**", rank=2)] if kind is None else [block(kind, "b")]
    gm, new = rewritten(model().eval(), x, *passes)
    found = checked(gm, new, x)
    assert (found["saved"][0], found["exported"][0]) == (saved, exported)
    for said, act in (
        (found["saved"], lambda: fxplug.save(new, tmp_path / "a")),
        (found["exported"], lambda: fxplug.export(new, tmp_path / "b.pt2", (x,), free="none")),
    ):
        if said[0] == "ok":
            act()
        else:
            with pytest.raises(fxplug.FxplugError):
                act()


class Plain(Honest):
    @classmethod
    def at(cls, site):
        return cls()


def test_a_class_that_load_must_be_allowed_is_named():
    gm, new = rewritten(Base().eval(), x := torch.randn(2, 4), block(Plain, "b"))
    assert checked(gm, new, x)["saved"] == ("ok", "can be saved; load needs allow=[...] for test_verify:Plain")


class Attended(nn.Module):
    """Two outputs behind an attention, which is compared within a tolerance where it is opened."""

    def __init__(self):
        super().__init__()
        self.attention, self.fc = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 8)

    def forward(self, x):
        y = self.attention(x, x, x, need_weights=False)[0]
        return y, self.fc(y)


def test_a_second_output_that_differs_by_much_is_found():
    far = lying(lambda self, y: y + self.weight + 100)
    gm, new = rewritten(Attended().eval(), x := torch.randn(2, 3, 8), block(far, "fc", "liar"))
    with pytest.raises(fxplug.VerifyError, match=r"liar.*1\.0e\+02"):
        checked(gm, new, x)


@pytest.mark.parametrize(
    "wrong", [lambda self, y: y[..., :5], lambda self, y: (y + self.weight)[0], lambda self, y: torch.cat([y, y])]
)
def test_an_output_of_another_shape_is_an_error_of_verification(wrong):
    gm, new = rewritten(Attended().eval(), x := torch.randn(2, 3, 8), block(lying(wrong), "fc", "liar"))
    with pytest.raises(fxplug.VerifyError, match="liar"):
        checked(gm, new, x)


class Stack(nn.Module):
    """Equal layers, and sizes that are the same for some inputs only."""

    def __init__(self, layers=6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x, y):
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x.sum(1), torch.cat([y, y], 1).mean(0)


class BreaksAtOneSite(Block):
    """Cannot be captured at the site that its class names, and is like the others everywhere else."""

    neutral = True
    breaks = "layers.4"

    def __init__(self, path):
        super().__init__()
        self.path, self.weight = path, nn.Parameter(torch.zeros(1))

    @classmethod
    def at(cls, site):
        return cls(site.path)

    def forward(self, y):
        if self.path == self.breaks and y.sum() > 1e9:
            return y
        return y + self.weight


def test_equal_calls_are_captured_once_and_a_block_that_breaks_the_graph_at_one_site_is_found():
    inputs = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    gm = fxplug.trace(Stack(), inputs)
    few = keep_distinct_calls(gm, copy_graph(gm.graph))
    assert sum(n.op == "call_module" for n in few.nodes) == 1
    new = fxplug.apply(gm, block(BreaksAtOneSite, "layers.*"))
    with pytest.raises(fxplug.VerifyError, match=r"fullgraph=True\) does not give one graph"):
        fxplug.verify(gm, new, inputs)
    assert fxplug.verify(gm, fxplug.apply(gm, block(BreaksAtOneSite, ["layers.0", "layers.3"])), inputs).ok


def reads_the_value(layer, args):
    return (args[0] + 1,) if args[0].sum() > 1e9 else None


class Own(nn.Module):
    """Of a class that is neither torch's nor fxplug's; what tells one from another is private."""

    def __init__(self, breaks):
        super().__init__()
        self._breaks = breaks

    def forward(self, x):
        return x + 1 if self._breaks and x.sum() > 1e9 else x


@pytest.mark.parametrize("kind", ["a child", "a hook", "a method"])
def test_layers_that_only_look_alike_are_each_captured(kind):
    """Kept whole, and the last of them cannot be one graph: by code below it, or put on it after the trace."""
    layers = [nn.Sequential(nn.Linear(8, 8), Own(n == 3) if kind == "a child" else nn.ReLU()) for n in range(4)]
    gm = fxplug.trace(nn.Sequential(*layers), torch.randn(2, 8), leaf=("0", "1", "2", "3"), check=False)
    last = gm.get_submodule("3")
    if kind == "a hook":
        last.register_forward_pre_hook(reads_the_value)
    if kind == "a method":
        last.forward = lambda x: x + 1 if x.sum() > 1e9 else x
    few = keep_distinct_calls(gm, copy_graph(gm.graph))
    assert "3" in [n.target for n in few.nodes if n.op == "call_module"]


def test_sizes_that_were_equal_at_the_trace_alone_are_captured_as_they_are():
    new = fxplug.trace(Stack(), (torch.randn(2, 3, 8), torch.randn(2, 3, 8)))
    assert fxplug.verify(new, new, (torch.randn(2, 3, 8), torch.randn(5, 4, 8))).ok
