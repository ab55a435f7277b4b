"""How plugins of HCP-Diffusion are called: arguments by name, and the inputs that they ask for."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput
from small import net as made
from sweeps import sweep
from test_hcp import Hooks, net, passes, same, unet
from torch import nn

import fxplug
from fxplug.compat.hcp import PatchPluginBlock, PatchPluginContainer, PluginBlock, SinglePluginBlock, WrapPluginBlock
from fxplug.compat.hcp.plugin_inputs import list_read_inputs
from fxplug.core.errors import MatchError, SpecError, TraceError

__all__ = ["net", "unet"]  # fixtures


# --- arguments by name


class Instead(PatchPluginContainer):
    def forward(self, *args, **kwargs):
        for _, plugin in self:
            output = plugin.post_forward(None, *args, **kwargs)
        return output


class Attention(PatchPluginBlock):
    """In the place of a cross-attention, which the UNet gives its text by name and its mask as None."""

    container_cls = Instead

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.to_out = nn.Linear(8, self.host().to_out[0].out_features)

    def post_forward(self, output, hidden_states, encoder_hidden_states, attention_mask):
        assert attention_mask is None
        return hidden_states * 2 + self.to_out(encoder_hidden_states).mean(1, keepdim=True)


class Beside(Attention):
    container_cls = PatchPluginContainer

    def post_forward(self, output, hidden_states, **named):
        return output + super().post_forward(output, hidden_states, **named)


class Ahead(PatchPluginBlock):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def pre_forward(self, hidden_states, **named):
        return (hidden_states * self.gain,), named


class AheadOfText(Ahead):
    def pre_forward(self, hidden_states, encoder_hidden_states, **named):
        return (hidden_states,), {"encoder_hidden_states": encoder_hidden_states * self.gain, **named}


ATTN2 = "mid_block.attentions.0.transformer_blocks.0.attn2"
DRIVERS = {Attention: "PatchPlugin", Beside: "PatchAfter", Ahead: "PatchBefore"}


@pytest.mark.slow
@sweep("kind", DRIVERS, 0)
def test_a_patch_of_a_module_that_is_called_with_names(unet, tmp_path, kind):
    (p,) = passes(tmp_path, f"  p: {{_target_: test_hcp_calls.{kind.__name__}, layers: [{ATTN2}]}}")
    new = fxplug.apply(unet.gm, p)
    with Hooks(unet.model) as hooks:
        plugin = hooks.patch(ATTN2, lambda host, **where: kind("p", host, **where))
        same(unet, new, [(plugin, f"p.{ATTN2}.{DRIVERS[kind]}.container.p")])


def test_what_is_given_by_name_is_changed_by_a_rule_of_its_own(unet, tmp_path):
    (p,) = passes(tmp_path, f"  p: {{_target_: test_hcp_calls.AheadOfText, layers: [{ATTN2}]}}")
    with pytest.raises(TraceError, match=r"changes arguments that the model passes by name .*hcp/patch.*port x\.name"):
        fxplug.apply(unet.gm, p)


class Shifts(Ahead):
    def pre_forward(self, x, shift, gain):
        return (x,), {"shift": shift * self.gain, "gain": gain}


class Gains(Ahead):
    def pre_forward(self, x, shift, gain):
        return (x,), {"shift": shift, "gain": gain * 2}


class Moves(Ahead):
    def pre_forward(self, *args, **named):
        return ((), {**named, "x": args[0]}) if args else ((named.pop("x"),), named)


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("kind", [Shifts, Gains, Moves])
def test_arguments_by_name_of_a_module_that_is_kept_whole(kind, by_name):
    inner = made(lambda self, x, shift, gain=1.0: (self.proj(x) + shift).tanh() * gain, proj=nn.Linear(6, 6))
    given = {"shift": torch.tensor(0.3), "gain": 3.0}
    call = (lambda self, x: self.inner(x=x, **given)) if by_name else (lambda self, x: self.inner(x, **given))
    model, x = made(call, inner=inner).eval(), torch.randn(4, 6)
    plugin = kind("p", inner, parent_block=model, host_name="inner")
    with inner.register_forward_pre_hook(lambda _, args, kwargs: plugin.pre_forward(*args, **kwargs), with_kwargs=True):
        wanted = model(x)
    patch = fxplug.load_pass("hcp/patch", name="p", plugin=kind, layers="inner")
    assert torch.equal(fxplug.apply(fxplug.trace(model, x, leaf=["inner"]), patch)(x), wanted)
    before = fxplug.load_pass("hcp/patch_before", name="p", plugin=kind, layers="inner")
    with pytest.raises(TraceError, match=r"by (position what the model passes by )?name.*leaf: .* use the pass hcp/patch"):
        fxplug.apply(fxplug.trace(model, x), before)


def test_all_that_a_region_is_given_by_name():
    class Given(nn.Module):
        inline = True
        neutral = False

        @classmethod
        def at(cls, site):
            return cls()

        def forward(self, y, named):
            assert list(named) == ["shift", "gain"] and named["gain"] == 3.0
            return y + named["shift"] * named["gain"]

    inner = made(lambda self, x, shift, gain: x * gain + shift)
    outer = made(lambda self, x: self.act(self.inner(x, shift=x.mean(), gain=3.0)), inner=inner, act=nn.SiLU())
    x = torch.randn(2, 3)
    gm = fxplug.trace(outer.eval(), x)
    rule = fxplug.Rule(fxplug.Match(path="inner"), use=Given, port="y", args=["y", "x[**]"])
    new = fxplug.apply(gm, fxplug.Pass("p", [rule]))
    torch.testing.assert_close(new(x), nn.functional.silu(x * 3 + x.mean() * 4))
    with pytest.raises(SpecError, match="place 'before' changes 'x'"):
        fxplug.Rule(fxplug.Match(path="inner"), use=Given, place="before", port="x[**]")
    with pytest.raises((AssertionError, MatchError, TraceError)):  # all of SiLU's are by position
        fxplug.apply(gm, fxplug.Pass("p", [fxplug.Rule(fxplug.Match(path="act"), use=Given, port="y", args=["y", "x[**]"])]))


# --- inputs


class Base(SinglePluginBlock):
    def feed_input_data(self, data):
        self.cond = data["cond"]


class Inherits(Base):
    pass


class HandsOn(Base):
    def feed_input_data(self, data):
        super().feed_input_data(data)
        self.mask = data.pop("mask")


class Kept(SinglePluginBlock):
    """Leaves it to the base class, which keeps all of it."""

    def forward(self, fea_in, fea_out):
        return fea_out + self.input_data["cond"] + self.input_data.get("mask", 0)


class Loop(SinglePluginBlock):
    def feed_input_data(self, data):
        for key in ("cond", "mask"):
            setattr(self, key, data[key])


class OwnKeys(SinglePluginBlock):
    keys: ClassVar = ["cond", "mask"]

    def feed_input_data(self, data):
        self.kept = {key: data.get(key) for key in self.keys}


class All(SinglePluginBlock):
    def feed_input_data(self, data):
        self.__dict__.update(data)


BOTH = ["cond", "mask"]


@pytest.mark.parametrize(
    "kind, names",
    [
        (Base, ["cond"]), (Inherits, ["cond"]), (HandsOn, BOTH), (Kept, BOTH), (Loop, BOTH), (OwnKeys, BOTH), (All, []),
        (SinglePluginBlock, None),
    ],
)  # fmt: skip
def test_what_a_plugin_asks_for(kind, names):
    assert list_read_inputs(kind, ("cond", "mask", "other")) == names


class Times(SinglePluginBlock):
    keys: ClassVar = ("cond",)

    def __init__(self, name, host, host_model=None):
        super().__init__(name, host)
        self.register_input_feeder_to(host_model)
        self.gain = nn.Parameter(torch.tensor(2.0))

    def forward(self, fea_in, fea_out):
        return fea_out * self.gain * sum(self.input_data[key] for key in self.keys)


def test_inputs_that_the_base_class_keeps(net, tmp_path):
    text = "  p: {_target_: test_hcp_calls.Times, layers: [head]}"
    (p,) = passes(tmp_path, text, inputs={"x": ["n", 3, 4, 4], "cond": ["n", 1, 1]})
    new = fxplug.apply(net.gm, p)
    with Hooks(net.model) as hooks:
        plugin = hooks.single("head", lambda host: Times("p", host, host_model=net.model))
        same(net, new, [(plugin, "p.head.SinglePlugin.plugin")], cond=torch.randn(2, 1, 1))


# --- around a module whose code the graph has, and what a plugin trains


class Around(WrapPluginBlock):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.kept = nn.Parameter(torch.tensor(0.5))

    def pre_forward(self, x, shift):
        return (x * self.gain,), {"shift": shift}

    def post_forward(self, output, x, shift):
        return output * self.gain + shift * self.kept

    def get_trainable_parameters(self):
        return [self.gain]


class OwnForward(Around):
    def forward(self, *args, **kwargs):
        return self.host()(*args, **kwargs)


class Greedy(Around):
    def get_trainable_parameters(self):
        return self.host().parameters()


def outer():
    inner = made(lambda self, x, shift: (self.proj(x) + shift).tanh(), proj=nn.Linear(6, 6))
    return made(lambda self, x: self.head(self.inner(x, shift=x.mean())), inner=inner, head=nn.Linear(6, 2))


def around(tmp_path, kind, leaf=("inner",)):
    """A model, its graph with a plugin, and what it is called with."""
    model, x = outer().eval(), torch.randn(4, 6)
    (p,) = passes(tmp_path, f"  p: {{_target_: test_hcp_calls.{kind.__name__}, layers: [inner]}}")
    return model, fxplug.apply(fxplug.trace(model, x, leaf=leaf), p), x


def test_before_and_after_a_module_that_is_kept_whole(tmp_path):
    for leaf in (["inner"], []):
        model, new, x = around(tmp_path, Around, leaf=leaf)
        with Hooks(model) as hooks:
            hooks.patch("inner", lambda host, **where: Around("p", host, **where))
            expected = model(x)
        torch.testing.assert_close(new(x), expected)
        torch.testing.assert_close(gradient(new, x), gradient(model, x, hooked=True))


def gradient(module, x, hooked=False):
    with Hooks(module) as hooks:
        if hooked:
            hooks.patch("inner", lambda host, **where: Around("p", host, **where))
        return torch.autograd.grad(module(x).square().sum(), module.head.weight)[0]


def test_what_a_plugin_does_not_train_is_no_parameter(tmp_path):
    _, new, _ = around(tmp_path, Around)
    assert {name for name, _ in new.named_parameters() if name.startswith("p.")} == {"p.inner.PatchAround.container.p.gain"}
    assert "p.inner.PatchAround.container.p.kept" in new.state_dict()


@pytest.mark.parametrize(
    "kind, message", [(OwnForward, "has its own forward"), (Greedy, "returns parameters that are not the plugin's")]
)
def test_what_such_a_plugin_cannot_have(tmp_path, kind, message):
    with pytest.raises(SpecError, match=message):
        around(tmp_path, kind)


# --- at the model itself, whose result is an object with fields


class Whole(SinglePluginBlock):
    """Behind the model; `FORMS` are the ways in which a hook may give another result."""

    def __init__(self, name, host, host_model=None, form=None):
        super().__init__(name, host, host_model=host_model)
        self.form = form
        self.gain = nn.Parameter(torch.tensor(2.0))

    def forward(self, fea_in, fea_out):
        assert list(fea_out) == ["sample"] and fea_out[0] is fea_out.sample and fea_out.to_tuple() == (fea_out["sample"],)
        return FORMS[self.form](fea_out, fea_out.sample * self.gain)


def set_attribute(out, value):
    out.sample = value
    return out


def set_item(out, value):
    out["sample"] = value
    return out


FORMS = {
    "attribute": set_attribute,
    "item": set_item,
    "nothing returned": lambda out, value: setattr(out, "sample", value),
    "changed in place": lambda out, value: out.sample.mul_(2) is None or None,
    "new of its type": lambda out, value: type(out)(sample=value),
    "the model's class": lambda out, value: UNet2DConditionOutput(sample=value),
    "dict": lambda out, value: {"sample": value},
    "tensor": lambda out, value: value,
    "another field": lambda out, value: {"sample": value, "extra": value},
}


@pytest.mark.slow
@sweep("form", [form for form in FORMS if form not in ("tensor", "another field")], 2)
def test_a_plugin_behind_the_model_itself(unet, tmp_path, form):
    p = fxplug.load_pass("hcp/single", name="p", plugin=Whole, layers="", options={"form": form})
    new = fxplug.apply(unet.gm, p)
    with Hooks(unet.model) as hooks, torch.no_grad():
        hooks.single("", lambda host: Whole("p", host, form=form))
        wanted = unet.model(*unet.args)
    got = new(*unet.args)
    assert type(got) is UNet2DConditionOutput and torch.equal(got.sample, wanted["sample"])
    assert not any("put_members" in node.name for node in new.graph.nodes)
    got.sample.sum().backward()
    assert form == "changed in place" or new.get_parameter("p.SinglePlugin.plugin.gain").grad.abs() > 0
    fxplug.save(new, tmp_path / "saved")
    again = fxplug.load(tmp_path / "saved")
    assert torch.equal(again(*unet.args).sample, wanted["sample"])
    fields = fxplug.apply(again, fxplug.load_pass("hcp/single", name="q", plugin=Whole, layers="", options={"form": form}))
    torch.testing.assert_close(fields(*unet.args).sample, wanted["sample"] * 2)


@pytest.mark.parametrize("form, returned", [("tensor", "returns tensor"), ("another field", "sample: tensor, extra: tensor")])
def test_what_such_a_plugin_cannot_return(unet, form, returned):
    p = fxplug.load_pass("hcp/single", name="p", plugin=Whole, layers="", options={"form": form})
    with pytest.raises(TraceError, match=rf"{returned}.*its layer's result is \{{sample: tensor\}}"):
        fxplug.apply(unet.gm, p)


# --- dicts among the arguments


class Writes(SinglePluginBlock):
    def forward(self, fea_in, fea_out):
        fea_in[1]["more"] = fea_out
        return fea_out


class WritesBetween(PluginBlock):
    def from_layer_hook(self, host, fea_in, fea_out):
        super().from_layer_hook(host, fea_in, fea_out)
        fea_in[1]["more"] = fea_out

    def forward(self, fea_from_in, fea_in, fea_out):
        return fea_out * 2


@pytest.mark.parametrize("kind", [Writes, WritesBetween])
def test_what_a_plugin_writes_into_a_dict_of_its_layer_is_refused(kind):
    body = made(lambda self, x, kept: self.proj(x) + kept["x"], proj=nn.Linear(3, 3))
    model = made(lambda self, x: self.head(self.body(x, {"x": x})), body=body, head=nn.Linear(3, 3)).eval()
    x = torch.randn(2, 3)
    name, where = ("single", {"layers": "body"}) if kind is Writes else ("pair", {"to": "head", "args": PAIR})
    with pytest.raises(TraceError, match="writes to a list or dict that it is given.*return the new value"):
        fxplug.apply(fxplug.trace(model, x), fxplug.load_pass(f"hcp/{name}", name="p", plugin=kind, **where))


PAIR = ["body:in[:]", "body:out[:]", "x[:]", "y[:]"]
