"""Plugins of HCP-Diffusion that share something: a module of their class, a place, a layer's attributes."""

from __future__ import annotations

import json

import pytest
import small
import test_hcp
import torch
from sweeps import sweep
from torch import nn

import fxplug
from fxplug.compat.hcp import MultiPluginBlock, PatchPluginBlock, PatchPluginContainer, PluginBlock, SinglePluginBlock
from fxplug.core.errors import SpecError


def layers():
    return small.net(lambda self, x: self.c(self.b(self.a(x))), **{name: nn.Linear(4, 4) for name in "abc"})


@pytest.fixture
def net():
    return small.traced(small.seeded(layers).eval(), small.seeded(lambda: torch.randn(2, 4)))


def passes(tmp_path, section, **how):
    """The passes that a section `plugin_unet` becomes."""
    return test_hcp.passes(tmp_path, f" {json.dumps(section)}", **how)


# --- one module of several plugins


def shared():
    """A layer that is made once, by the first plugin that asks."""
    if "layer" not in CACHE:
        CACHE["layer"] = nn.Linear(4, 4)
    return CACHE["layer"]


CACHE = {}


class One(SinglePluginBlock):
    wrapable_classes = (nn.Linear,)

    def __init__(self, name, host, hook_param=None, **rest):
        super().__init__(name, host, hook_param)
        self.net = shared()

    def forward(self, fea_in, fea_out=None):
        return fea_in + self.net.weight if fea_out is None else fea_out + self.net(fea_in[0])


class Pair(PluginBlock):
    def __init__(self, name, from_layer, to_layer, **rest):
        super().__init__(name, from_layer, to_layer)
        self.net = shared()

    def forward(self, fea_from_in, fea_in, fea_out):
        return fea_out + self.net(fea_from_in[0])


class Patch(PatchPluginBlock):
    def __init__(self, *args, **rest):
        super().__init__(*args, **rest)
        self.net = shared()

    def post_forward(self, output, x):
        return output + self.net(x)


class Outer(SinglePluginBlock):
    """Makes a plugin of the class One on a layer of its own, or on the model's."""

    def __init__(self, name, host, own=True, **rest):
        super().__init__(name, host)
        self.own = nn.Linear(4, 4)
        self.inner = One("inner", self.own if own else host)

    def forward(self, fea_in, fea_out):
        return fea_out + self.own(fea_in[0])


SHARING = {
    "single": {"One": {"layers": ["re:[ab]$"]}},
    "param": {"One": {"layers": ["a", "b"], "hook_param": "weight"}},
    "wrapped": {"One.wrap_model": {"layers": [""]}},
    "pair": {"Pair": {"from_layer": ["a", "b"], "to_layer": ["b", "c"]}},
    "patch": {"Patch": {"layers": ["a", "b"]}},
    "two classes": {"One": {"layers": ["a"]}, "Patch": {"layers": ["b"]}},
}


@pytest.mark.parametrize("model", [None, f"{__name__}:layers"])
@pytest.mark.parametrize("case", SHARING)
def test_a_module_that_plugins_share_is_made_for_the_model_that_gets_them(net, tmp_path, case, model):
    CACHE.clear()
    section = {f"p{n}": {"_target_": f"{__name__}.{kind}", **given} for n, (kind, given) in enumerate(SHARING[case].items())}
    found = passes(tmp_path, section, model=model)
    assert not CACHE, "what reads a file makes no plugin"
    new = fxplug.apply(net.gm, *found)
    assert len([p for _, p in new.named_parameters() if p is CACHE["layer"].weight]) == 1
    (x,) = net.args
    new(x).sum().backward()
    assert CACHE["layer"].weight.grad.any() and not torch.equal(new(x), net.gm(x))
    fxplug.save(new, tmp_path / "saved")
    again = fxplug.load(tmp_path / "saved")
    assert torch.equal(again(x), new(x)) and len([*again.parameters()]) == len([*new.parameters()])


def test_a_shared_module_without_values_is_told(net, tmp_path):
    CACHE.clear()
    (p,) = passes(tmp_path, {"p": {"_target_": f"{__name__}.One", "layers": ["a"]}})
    CACHE["layer"] = nn.Linear(4, 4, device="meta")
    with pytest.raises(SpecError, match=r"One: 'net.weight' .* has no values.*create the module in each __init__"):
        fxplug.apply(net.gm, p)


@pytest.mark.parametrize("own", [True, False])
def test_a_plugin_that_makes_another_is_refused(net, tmp_path, own):
    CACHE.clear()
    (p,) = passes(tmp_path, {"p": {"_target_": f"{__name__}.Outer", "layers": ["a"], "own": own}})
    with pytest.raises(SpecError, match="Outer makes another plugin, One 'inner', which would not run: give that one its own"):
        fxplug.apply(net.gm, p)


# --- patches at one place


class Gain(PatchPluginBlock):
    def __init__(self, *args, gain=1.0, **rest):
        super().__init__(*args, **rest)
        self.gain = nn.Parameter(torch.tensor(gain))


class Post(Gain):
    def post_forward(self, output, x):
        return output * self.gain + x


class Pre(Gain):
    def pre_forward(self, x):
        return (x * self.gain,), {}


class Both(Post, Pre):
    pass


class Sums(PatchPluginContainer):
    def forward(self, x):
        output = 0.0
        for _, plugin in self:
            output = plugin.post_forward(output, x)
        return output


class Halves(PatchPluginContainer):
    def forward(self, x):
        output = self._host(x)
        for _, plugin in self:
            output = plugin.post_forward(output, x)
        return output / 2


class InSum(Post):
    container_cls = Sums


class InHalf(Post):
    container_cls = Halves


def attached(model, *kinds):
    """The model with plugins at `a`, as HCP-Diffusion puts them into containers."""
    for number, kind in enumerate(kinds):
        plugin = kind(f"p{number}", model.a, host_model=model, parent_block=model, host_name="a", gain=number + 2.0)
        model.a = plugin.container()
    return model


PATCHES = ["Post", "Pre", "Both", "InSum", "InHalf"]
OTHERS = {(one, other) for one in PATCHES for other in ("InSum", "InHalf") if one != other}  # not in one container
SOME = [("Post", "Post"), ("Post", "Both"), ("Pre", "Both"), ("InSum", "InSum"), ("Post", "InHalf")]


@pytest.mark.parametrize("rates", [(1e-3, 1e-3), (1e-3, 1e-4)], ids=["one rate", "two rates"])
@sweep("kinds", [(one, other) for one in PATCHES for other in PATCHES], *SOME, ids=" ".join)
def test_two_patches_at_one_place_are_those_of_hcp_diffusion_or_refused(net, tmp_path, kinds, rates):
    section = {
        f"p{n}": {"_target_": f"{__name__}.{kind}", "layers": ["a"], "gain": n + 2.0, "lr": lr}
        for n, (kind, lr) in enumerate(zip(kinds, rates, strict=True))
    }
    found = passes(tmp_path, section, model=f"{__name__}:layers")
    (x,) = net.args
    if kinds in OTHERS:
        with pytest.raises(fxplug.FxplugError, match=r"write one pass with both|narrow the pattern of one"):
            fxplug.apply(net.gm, *found)
        return
    new = fxplug.apply(net.gm, *found)
    torch.testing.assert_close(new(x), attached(net.model, *(globals()[kind] for kind in kinds))(x))


# --- attributes of the layer that a plugin is put at


def attributes():
    parts = {"conv": nn.Conv2d(3, 4, 3, padding=1), "act": nn.LeakyReLU(0.1)}
    scale = small.net(lambda self, x: x * self.by, by=2.0)
    return small.net(lambda self, x: self.scale(self.act(self.conv(x))), **parts, scale=scale)


class SetSingle(SinglePluginBlock):
    def __init__(self, name, host, key="", value=None, **rest):
        super().__init__(name, host)
        setattr(host, key, value)


class SetPatch(PatchPluginBlock):
    def __init__(self, *args, key="", value=None, **rest):
        super().__init__(*args, **rest)
        setattr(self.host(), key, value)


class SetMulti(MultiPluginBlock):
    def __init__(self, name, from_layers, to_layers, host_model=None, key="", value=None, **rest):
        super().__init__(name, from_layers, to_layers, host_model)
        setattr(to_layers[0]["layer"], key, value)

    def forward(self, feats):
        return [feats[0][0].mean()]


class SetLater(MultiPluginBlock):
    """Changes the layer in a hook of its own."""

    def __init__(self, name, from_layers, to_layers, host_model=None, key="", value=None, **rest):
        super().__init__(name, from_layers, to_layers, host_model)
        self.key, self.value = key, value

    def to_layer_hook(self, host, fea_in, fea_out, idx):
        setattr(host, self.key, self.value)


PLACES = dict.fromkeys(("SetMulti", "SetLater"), ("from_layers", "to_layers"))


@pytest.mark.parametrize("at", [("conv", "padding", [0, 0]), ("act", "negative_slope", 0.5), ("scale", "by", 5.0)], ids=str)
@pytest.mark.parametrize("kind", ["SetSingle", "SetPatch", "SetMulti", "SetLater"])
def test_an_attribute_of_the_layer_that_a_plugin_changes_is_told_and_stays(tmp_path, kind, at):
    layer, key, value = at
    net = small.traced(small.seeded(attributes).eval(), torch.randn(2, 3, 6, 6))
    before = net.gm(*net.args)
    section = {"p": {"_target_": f"{__name__}.{kind}", "key": key, "value": value}}
    section["p"] |= {place: [layer] for place in PLACES.get(kind, ["layers"])}
    text = rf"changes the model while it is built: {key} of '{layer}'.*before it is traced"
    if layer == "scale":  # no layer of torch's: its code is in the graph
        text = rf"'{layer}.{key}' of a traced Net was 2.0 when the model was traced.*would have no effect"
    with pytest.raises(SpecError, match=text):
        fxplug.apply(net.gm, *passes(tmp_path, section))
    assert torch.equal(net.gm(*net.args), before)
