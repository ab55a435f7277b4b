"""Plugins of HCP-Diffusion that make other plugins: on layers of their own, which then run as on its hooks."""

from __future__ import annotations

import json

import pytest
import small
import torch
from sweeps import sweep
from torch import nn

import fxplug
from fxplug.compat.hcp import MultiPluginBlock, PatchPluginBlock, PatchPluginContainer, PluginBlock, SinglePluginBlock
from fxplug.compat.hcp.convert_file import convert
from fxplug.core.errors import SpecError
from fxplug.core.spec.yaml_source import parse_yaml


class Scale(SinglePluginBlock):
    wrapable_classes = (nn.Linear,)

    def __init__(self, name, host, **rest):
        super().__init__(name, host)
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, fea_in, fea_out):
        return fea_out + self.gain * fea_in[0]


class Weight(SinglePluginBlock):
    def __init__(self, name, host, **rest):
        super().__init__(name, host, hook_param="weight")
        self.shift = nn.Parameter(torch.tensor(0.25))

    def forward(self, host_param):
        return host_param * 2 + self.shift


class Over(PluginBlock):
    def forward(self, fea_from_in, fea_in, fea_out):
        return fea_out + fea_from_in[0]


class Before(PluginBlock):
    def forward(self, fea_from_in, fea_in, fea_out):
        return (fea_in[0] - fea_from_in[0],)


class Sum(MultiPluginBlock):
    def forward(self, feats):
        return [feats[0][0] + feats[1][0]]


class Around(PatchPluginBlock):
    wrapable_classes = (nn.Linear,)

    def __init__(self, *args, **rest):
        super().__init__(*args, **rest)
        self.gain = nn.Parameter(torch.tensor(3.0))

    def pre_forward(self, x):
        return (x * self.gain,), {}

    def post_forward(self, output, *args, **kwargs):
        return output + 1


class Products(PatchPluginContainer):
    def forward(self, x):
        for _, plugin in self:
            x = plugin.post_forward(x) * self._host.weight.sum() * plugin.gain
        return x


class Product(Around):
    container_cls = Products


class Outer(SinglePluginBlock):
    """y + two layers, on which it puts the plugins that `inner` says, as HCP-Diffusion's own classes are put there."""

    def __init__(self, name, host, inner=(), host_model=None):
        super().__init__(name, host)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        for number, kind in enumerate(inner):
            PUT[kind](self, f"inner{number}")

    def forward(self, fea_in, fea_out):
        return fea_out + self.two(self.one(fea_in[0]).tanh())


class OuterPair(PluginBlock):
    def __init__(self, name, from_layer, to_layer, inner=(), host_model=None):
        super().__init__(name, from_layer, to_layer)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        for number, kind in enumerate(inner):
            PUT[kind](self, f"inner{number}")

    def forward(self, fea_from_in, fea_in, fea_out):
        return fea_out + self.two(self.one(fea_from_in[0]).tanh())


class OuterPatch(PatchPluginBlock):
    def __init__(self, *args, inner=(), **rest):
        super().__init__(*args, **rest)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        for number, kind in enumerate(inner):
            PUT[kind](self, f"inner{number}")

    def post_forward(self, output, x):
        return output + self.two(self.one(x).tanh())


def end(layer, pre=False):
    return {"layer": layer, "pre_hook": pre}


PUT = {
    "single": lambda outer, name: Scale(name, outer.one),
    "wrapped": lambda outer, name: Scale.wrap_model(name, outer, host_model=None),
    "param": lambda outer, name: Weight(name, outer.one),
    "pair": lambda outer, name: Over(name, end(outer.one), end(outer.two)),
    "pair before": lambda outer, name: Before(name, end(outer.one, True), end(outer.two, True)),
    "multi": lambda outer, name: Sum(name, [end(outer.one), end(outer.two, True)], [end(outer.two)], outer),
    "patch": lambda outer, name: Around(name, outer.one, parent_block=outer, host_name="one"),
    "patches": lambda outer, name: Around.wrap_model(name, outer, parent_block=outer, host_name=""),
    "product": lambda outer, name: Product.wrap_model(name, outer, parent_block=outer, host_name=""),
    "self": lambda outer, name: Whole(name, outer),
}


class Whole(SinglePluginBlock):
    def forward(self, fea_in, fea_out):
        return fea_out * 0.5


def scaled(layer):
    return lambda x: layer(x) + 0.5 * x


def around(layer):
    return lambda x: layer(3 * x) + 1


def product(layer):
    return lambda x: 3 * (x + 1) * layer.weight.sum()


def doubled(layer):
    return lambda x: nn.functional.linear(x, layer.weight * 2 + 0.25, layer.bias)


def chain(first, second):
    return lambda x: second(first(x).tanh())


WHAT = {  # what two layers are with the plugins on them
    ("single",): lambda a, b: chain(scaled(a), b),
    ("single", "single"): lambda a, b: chain(lambda x: scaled(a)(x) + 0.5 * x, b),
    ("wrapped",): lambda a, b: chain(scaled(a), scaled(b)),
    ("param",): lambda a, b: chain(doubled(a), b),
    ("param", "single"): lambda a, b: chain(scaled(doubled(a)), b),
    ("pair",): lambda a, b: lambda x: chain(a, b)(x) + x,
    ("pair before",): lambda a, b: lambda x: b(a(x).tanh() - x),
    ("multi",): lambda a, b: lambda x: chain(a, b)(x) + x + a(x).tanh(),
    ("patch",): lambda a, b: chain(around(a), b),
    ("patches", "patches"): lambda a, b: chain(lambda x: a(9 * x) + 2, lambda x: b(9 * x) + 2),
    ("product", "product"): lambda a, b: chain(lambda x: product(a)(product(a)(x)), lambda x: product(b)(product(b)(x))),
    ("self",): lambda a, b: None,
}
KINDS = {
    "Outer": {"layers": ["0"]}, "OuterPair": {"from_layer": ["0"], "to_layer": ["0"]}, "OuterPatch": {"layers": ["0"]},
}  # fmt: skip


def rewritten(tmp_path, kind, inner, more=None):
    net = small.traced(small.seeded(lambda: nn.Sequential(nn.Linear(4, 4))).eval(), small.seeded(lambda: torch.randn(3, 4)))
    entry = {"_target_": f"test_hcp_nested.{kind}", **(more or {**KINDS[kind], "inner": list(inner)})}
    (tmp_path / "a.yaml").write_text(json.dumps({"plugin_unet": {"outer": entry}}))
    ((name, given),) = parse_yaml(convert(tmp_path / "a.yaml").text).data["passes"][0].items()
    return net, fxplug.apply(net.gm, fxplug.load_pass(name, **given))


def layer(new, name):
    """A layer of the plugin, by its own weights alone."""
    state = {k.rpartition(f".{name}.")[2].removeprefix("_host."): v for k, v in new.state_dict().items() if f".{name}." in k}
    made = nn.Linear(4, 4, bias="bias" in state)
    made.load_state_dict({key: value for key, value in state.items() if key in ("weight", "bias")})
    return made


@pytest.mark.parametrize("inner", list(WHAT), ids=" ".join)
@sweep("kind", list(KINDS), "Outer")
def test_a_plugin_on_layers_of_another_runs(tmp_path, kind, inner):
    net, new = rewritten(tmp_path, kind, inner)
    (x,) = net.args
    one, two = layer(new, "one"), layer(new, "two")
    if inner == ("self",):  # what HCP-Diffusion's hooks call is layer_hook, which calls the plugin; of a patch its container
        y = net.model(x)
        expected = (y + chain(one, two)(x)) * 0.5 if kind != "OuterPatch" else y + chain(one, two)(x)
        torch.testing.assert_close(new(x), expected)
    else:
        torch.testing.assert_close(new(x) - net.model(x), WHAT[inner](one, two)(x))
    gains = {k: p for k, p in new.named_parameters() if k.endswith((".gain", ".shift"))}
    new(x).square().sum().backward()
    assert all(p.grad is not None for p in gains.values())
    assert bool(gains) == (not {"pair", "pair before", "multi", "self"} & {*inner})
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in new.modules())
    fxplug.save(new, tmp_path / "saved")
    torch.testing.assert_close(fxplug.load(tmp_path / "saved")(x), new(x))


class Inside(SinglePluginBlock):
    def __init__(self, name, host, how="single", host_model=None):
        super().__init__(name, host)
        if how == "patch":
            self.inner = Around("inner", host, parent_block=host_model, host_name="0")
        elif how == "pair":
            self.one = nn.Linear(4, 4)
            self.inner = Over("inner", end(host), end(self.one))
        else:
            self.inner = Scale("inner", host)

    def forward(self, fea_in, fea_out):
        return fea_out * 2


@pytest.mark.parametrize("how", ["single", "patch", "pair"])
def test_a_plugin_on_the_models_layers_that_another_makes_is_refused(tmp_path, how):
    with pytest.raises(SpecError, match="Inside makes another plugin, (Scale|Around|Over) 'inner', at a layer of the model"):
        rewritten(tmp_path, "Inside", (), {"layers": ["0"], "how": how})
