"""The plugins of HCP-Diffusion's guide in a graph, against the same classes on real hooks."""

from __future__ import annotations

import contextlib
import copy

import hcp_guide
import pytest
import small
import torch
from diffusers import UNet2DConditionModel
from torch import nn

import fxplug
from fxplug.compat.hcp import PatchPluginContainer, PluginBlock, SinglePluginBlock
from fxplug.compat.hcp.checkpoints import load_checkpoint, save_checkpoint
from fxplug.compat.hcp.convert_file import convert
from fxplug.core.errors import MatchError, SpecError, TraceError
from fxplug.core.spec.yaml_source import parse_yaml

COND = {"sample": ["n", "c", "h", "w"], "cond": ["n", 3, "2*h", "2*w"]}
WIDTHS = [8, 16, 16, 16]


class Net(nn.Module):
    """A convolution, a layer that is called by name, one that is called twice, and a result of several members."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.act = nn.SiLU()
        self.body = nn.ModuleList(Body() for _ in range(2))
        self.twice = nn.Linear(6, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        x = self.act(self.conv(x)).flatten(2).transpose(1, 2)
        for body in self.body:
            x, extra = body(x, shift=x.mean(1, keepdim=True))
            x = x + extra[0]
        return self.head(self.twice(self.twice(x)))


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj_in = nn.Linear(6, 6)
        self.nonlinearity = nn.SiLU()
        self.proj_out = nn.Linear(6, 6)

    def forward(self, x, shift=0.0, gain=2.0):
        inner = self.nonlinearity(self.proj_in(x) + shift)
        return self.proj_out(inner), [inner * gain]


@pytest.fixture
def net():
    return small.traced(small.seeded(Net).eval(), small.seeded(lambda: torch.randn(2, 3, 4, 4)))


@pytest.fixture(scope="module")
def unet():
    """SD 1.5's structure: four levels, three skips each but the last, which has two."""
    cross, plain = "CrossAttnDownBlock2D", "DownBlock2D"
    model = small.seeded(
        lambda: UNet2DConditionModel(
            sample_size=16, block_out_channels=WIDTHS, layers_per_block=2, down_block_types=(cross, cross, cross, plain),
            up_block_types=("UpBlock2D", *["CrossAttnUpBlock2D"] * 3), cross_attention_dim=8, attention_head_dim=2,
            norm_num_groups=4, use_linear_projection=True,
        )
    ).eval()  # fmt: skip
    args = small.seeded(lambda: (torch.randn(2, 4, 16, 16), torch.tensor([3, 700]), torch.randn(2, 5, 8)))
    return small.traced(model, *args)


def passes(tmp_path, text, **how):
    """The passes that the plugins of a file become."""
    file = tmp_path / "plugin.yaml"
    file.write_text("plugin_unet:\n" + text)
    found = parse_yaml(convert(file, **how).text).data["passes"]
    return [fxplug.load_pass(name, **given) for entry in found for name, given in entry.items()]


# --- what HCP-Diffusion does


class Hooks(contextlib.ExitStack):
    """Plugins on a model as HCP-Diffusion attaches them, for as long as this is open."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def layer(self, text):
        path = text.removeprefix("pre_hook:")
        return {"layer": self.model.get_submodule(path), "pre_hook": text != path}

    def hook(self, layer, function):
        if layer["pre_hook"]:
            handle = layer["layer"].register_forward_pre_hook(lambda host, x: function(host, x, None))
        else:
            handle = layer["layer"].register_forward_hook(function)
        self.callback(handle.remove)

    def single(self, path, make):
        host = self.model.get_submodule(path)
        plugin = make(host).eval()
        self.hook({"layer": host, "pre_hook": False}, lambda host, x, y: plugin(x, y))
        return plugin

    def param(self, path, make, name="weight"):
        host = self.model.get_submodule(path)
        plugin, backup = make(host).eval(), getattr(host, name)

        def swap(host, x):
            delattr(host, name)
            setattr(host, name, plugin(backup))

        def back(host, x, y):
            setattr(host, name, backup)

        self.callback(host.register_forward_pre_hook(swap).remove)
        self.callback(host.register_forward_hook(back).remove)
        return plugin

    def pair(self, source, target, make):
        a, b = self.layer(source), self.layer(target)
        plugin = make(a, b).eval()
        self.hook(a, plugin.from_layer_hook)
        self.hook(b, plugin.to_layer_hook)
        return plugin

    def multi(self, sources, targets, make):
        froms, tos = [self.layer(s) for s in sources], [self.layer(t) for t in targets]
        plugin = make(froms, tos).eval()
        for layers, function in ((froms, plugin.from_layer_hook), (tos, plugin.to_layer_hook)):
            for index, layer in enumerate(layers):
                self.hook(layer, lambda host, x, y, f=function, i=index: f(host, x, y, i))
        return plugin

    def patch(self, path, make):
        parent, _, own = path.rpartition(".")
        parent, host = self.model.get_submodule(parent), self.model.get_submodule(path)
        plugin = make(host, parent_block=parent, host_name=own).eval()
        if not isinstance(host, PatchPluginContainer):
            setattr(parent, own, plugin.container())
            self.callback(setattr, parent, own, host)
        return plugin


def load(plugin, new, prefix):
    """Give a hooked plugin the weights that it has in the graph, key for key."""
    state, prefix = new.get_submodule(prefix).state_dict(), f"{prefix}."
    assert state, f"nothing under {prefix}"
    plugin.load_state_dict(state)
    return [(f"{prefix}{k}", p) for k, p in plugin.named_parameters()]


def same(case, new, plugins, **inputs):
    """Outputs of graph and hooks are equal, and so is the gradient of each weight of model and plugins."""
    model, _, args, _ = case.model, case.gm, case.args, case.kwargs
    pairs = [row for plugin, prefix in plugins for row in load(plugin, new, prefix)]
    for plugin, _ in plugins:
        plugin.feed_input_data(inputs)
    expected, got = first(model(*args)), first(new(*args, **inputs))
    assert torch.equal(got, expected) and not torch.equal(got, first(case.gm(*args)))
    known = dict(new.named_parameters())
    base = [(k, p) for k, p in model.named_parameters() if known.get(k) is p]
    assert len(base) > 3 and pairs
    theirs = gradients(expected, [p for _, p in [*base, *pairs]])
    ours = gradients(got, [known[k] for k, _ in [*base, *pairs]])
    for (key, _), a, b in zip([*base, *pairs], theirs, ours, strict=True):
        assert (a is None) is (b is None), key
        if a is not None:
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")
    assert any(g is not None and g.abs().max() > 0 for g in ours[len(base) :])


def first(result):
    return result if isinstance(result, torch.Tensor) else result.sample


def gradients(out, parameters):
    return torch.autograd.grad(out.square().sum(), parameters, allow_unused=True)


# --- SinglePluginBlock

LORA = """
  lora1:
    _target_: hcp_guide.LoraBlock{wrap}
    _partial_: True # Required
    lr: 1e-4 # Learning rate for this module
    alpha: 0.5 # Parameter declared in the LoraBlock module
    rank: 4
    layers: # Specify which layers to attach the plugin
      - '{first}'
      - '{second}'
"""


def lora(host):
    return hcp_guide.LoraBlock("lora1", host, 4, alpha=0.5)


def test_lora_block(net, tmp_path):
    (p,) = passes(tmp_path, LORA.format(wrap="", first="conv", second=r"re:.*\.proj_(in|out)$"))
    assert p.lr == 1e-4 and p.train and p.name == "lora1"
    new = fxplug.apply(net.gm, p)
    paths = ["conv", *(f"body.{i}.proj_{side}" for i in range(2) for side in ("in", "out"))]
    with Hooks(net.model) as hooks:
        plugins = [(hooks.single(path, lora), f"lora1.{path}.SinglePlugin.plugin") for path in paths]
        same(net, new, plugins)
    print(fxplug.verify(net.gm, new, net.args))


@pytest.mark.slow
def test_the_guides_lora_on_attention_needs_wrap_model(unet, tmp_path):
    """As the guide writes it the plugin is put on the attention itself, which its own __init__ refuses."""
    text = LORA.format(wrap="", first=r"re:.*\.attn.?$", second=r"re:.*\.ff$")
    with pytest.raises(SpecError, match="attn1: LoraBlock cannot be built: NotImplementedError: No lora for"):
        fxplug.apply(unet.gm, *passes(tmp_path, text))


@pytest.mark.slow
def test_wrap_model(unet, tmp_path):
    text = LORA.format(wrap=".wrap_model", first=r"re:.*\.attn.?$", second=r"re:.*\.ff$")
    (p,) = passes(tmp_path, text)
    new = fxplug.apply(unet.gm, p)
    inside = [
        name for name, m in unet.model.named_modules()
        if isinstance(m, nn.Linear) and any(f".{part}." in name for part in ("attn1", "attn2", "ff"))
    ]  # fmt: skip
    with Hooks(unet.model) as hooks:
        same(unet, new, [(hooks.single(path, lora), f"lora1.{path}.SinglePlugin.plugin") for path in inside])
    assert len(fxplug.find(unet.gm, p)) == len(inside) > 100


def test_a_layer_that_is_called_twice_has_one_plugin(net, tmp_path):
    (p,) = passes(tmp_path, "  a: {_target_: hcp_guide.LoraBlock, rank: 4, alpha: 0.5, layers: [twice]}")
    new = fxplug.apply(net.gm, fxplug.load_pass(p, name="lora1"))
    with Hooks(net.model) as hooks:
        same(net, new, [(hooks.single("twice", lora), "lora1.twice.SinglePlugin.plugin")])


def test_training_draws_the_same_dropout(net, tmp_path):
    new = fxplug.apply(net.gm, *passes(tmp_path, LORA.format(wrap="", first="conv", second="head")))
    with Hooks(net.model) as hooks:
        for path in ("conv", "head"):
            load(hooks.single(path, lora).train(), new, f"lora1.{path}.SinglePlugin.plugin")
        net.model.train(), new.train()
        results = []
        for module in (net.model, new):
            torch.manual_seed(3)
            results.append(module(*net.args))
        assert torch.equal(*results)
        new.eval()
        assert not torch.equal(new(*net.args), results[0])


@pytest.mark.parametrize("path", ["conv", "head", "body.0.proj_in"])
def test_hook_param(net, tmp_path, path):
    text = f"  loha1: {{_target_: hcp_guide.LohaLayer, rank: 4, layers: ['{path}']}}"
    (p,) = passes(tmp_path, text)
    assert p.rules[0].place == "param" and p.rules[0].port == "weight"
    new = fxplug.apply(net.gm, p)
    with Hooks(net.model) as hooks:
        plugin = hooks.param(path, lambda host: hcp_guide.LohaLayer("loha1", host, rank=4))
        same(net, new, [(plugin, f"loha1.{path}.ParamPlugin.plugin")])


@pytest.mark.parametrize("path", ["head", "conv"])
@pytest.mark.parametrize("sort", ["lora", "loha"])
def test_lora_unet_is_what_hcp_diffusions_classes_compute(net, tmp_path, sort, path):
    """The same weights in fxplug's own blocks and in the guide's classes, which are those of lora_unet."""
    file = tmp_path / "lora.yaml"
    file.write_text(f"lora_unet: [{{type: {sort}, rank: 8, alpha: 4.0, layers: ['{path}']}}]")
    ((name, given),) = parse_yaml(convert(file).text).data["passes"][0].items()
    new = fxplug.apply(net.gm, fxplug.load_pass(name, **given))
    block = new.get_submodule(f"lora_block_0.{path}.{sort.capitalize()}")
    kind = {"lora": hcp_guide.LoraBlock, "loha": hcp_guide.LohaLayer}[sort]
    with Hooks(net.model) as hooks, torch.no_grad():
        plugin = getattr(hooks, {"lora": "single", "loha": "param"}[sort])(path, lambda host: kind("a", host, 8, alpha=4.0))
        for p in block.parameters():
            p.normal_()
        if sort == "lora":
            plugin.layer.lora_down.weight.copy_(block.down.weight)
            plugin.layer.lora_up.weight.copy_(block.up.weight)
        else:
            plugin.layer.W_up.copy_(torch.stack([block.hada_w1_a, block.hada_w2_a]))
            plugin.layer.W_down.copy_(torch.stack([block.hada_w1_b, block.hada_w2_b]))
        expected = net.model(*net.args)
        torch.testing.assert_close(new(*net.args), expected, rtol=1e-4, atol=1e-5)
        assert (expected - net.gm(*net.args)).abs().max() > 0.1


def test_a_plugin_in_the_wrong_pass_is_told_the_right_one(net):
    options = {"plugin": "hcp_guide:LohaLayer", "layers": "head", "options": {"rank": 4}, "name": "a"}
    with pytest.raises(SpecError, match=r"changes the parameter 'weight'.*hcp/param with param: weight"):
        fxplug.apply(net.gm, fxplug.load_pass("hcp/single", **options))
    with pytest.raises(SpecError, match=r"changes the parameter 'weight', not the parameter 'bias': use param: weight"):
        fxplug.apply(net.gm, fxplug.load_pass("hcp/param", param="bias", **options))
    with pytest.raises(SpecError, match="changes its layer's result, not the parameter"):
        fxplug.apply(net.gm, fxplug.load_pass("hcp/param", **{**options, "plugin": "hcp_guide:LoraBlock"}))
    with pytest.raises(SpecError, match=r"LohaLayer is a SinglePluginBlock, and this pass is for a PluginBlock"):
        given = {"to": "head", "args": ["conv:in[:]", "conv:out[:]", "x[:]", "y[:]"], "name": "a"}
        fxplug.apply(net.gm, fxplug.load_pass("hcp/pair", plugin="hcp_guide:LohaLayer", **given))


class Structured(SinglePluginBlock):
    """Changes one member of a layer's result, and sees only what a hook sees of its call."""

    def __init__(self, name, host, **kwargs):
        super().__init__(name, host)
        self.gain = nn.Parameter(torch.full((6,), 1.5))

    def forward(self, fea_in, fea_out):
        (x,) = fea_in  # `shift` is given by name
        return fea_out[0] * self.gain + x, fea_out[1]


class Flat(Structured):
    def forward(self, fea_in, fea_out):
        return fea_out[0]


def test_results_of_several_members_and_arguments_by_name(net, tmp_path):
    (p,) = passes(tmp_path, "  s: {_target_: test_hcp.Structured, layers: ['re:body.*[01]$']}")
    new = fxplug.apply(net.gm, p)
    with Hooks(net.model) as hooks:
        plugins = [hooks.single(f"body.{i}", lambda host: Structured("s", host)) for i in range(2)]
        same(net, new, [(plugin, f"s.body.{i}.SinglePlugin.plugin") for i, plugin in enumerate(plugins)])
    (flat,) = passes(tmp_path, "  s: {_target_: test_hcp.Flat, layers: ['body.0']}")
    with pytest.raises(TraceError, match=r"returns tensor, and its layer's result is \(tensor, \(tensor,\)\)"):
        fxplug.apply(net.gm, flat)


class Counts(hcp_guide.LoraBlock):
    calls = 0

    def forward(self, fea_in, fea_out):
        self.calls += 1
        return super().forward(fea_in, fea_out)


def test_state_between_calls_is_an_error(net, tmp_path):
    (p,) = passes(tmp_path, "  a: {_target_: test_hcp.Counts, rank: 2, layers: [head]}")
    with pytest.raises(TraceError, match=r"self.calls.*inputs of the pass.*buffer"):
        fxplug.apply(net.gm, p)


# --- PluginBlock

SKIP = """
  loha1:
    _target_: hcp_guide.{kind}
    _partial_: True
    lr: 1e-4

    from_layer:
      - 're:.*proj_in$'
    to_layer:
      - '{prefix}re:.*proj_out$'
"""


@pytest.mark.parametrize("kind, prefix", [("Skip", ""), ("PreSkip", "prehook:"), ("PreSkip", "pre_hook:")])
def test_skip(net, tmp_path, kind, prefix):
    (p,) = passes(tmp_path, SKIP.format(kind=kind, prefix=prefix))
    new = fxplug.apply(net.gm, p)
    make = getattr(hcp_guide, kind)
    target = "pre_hook:" if prefix else ""
    with Hooks(net.model) as hooks:
        rows = []
        for i in range(2):
            plugin = hooks.pair(f"body.{i}.proj_in", f"{target}body.{i}.proj_out", lambda a, b: make("loha1", a, b))
            rows.append((plugin, f"loha1.body.{i}.proj_out.PairPlugin.plugin"))
        same(net, new, rows)


def test_the_guides_skip_has_no_result_before_its_layer(net, tmp_path):
    with pytest.raises(TraceError, match=r"fea_out is None.*drop the prefix"):
        fxplug.apply(net.gm, *passes(tmp_path, SKIP.format(kind="Skip", prefix="prehook:")))


class Late(PluginBlock):
    """From the input of one layer, which it keeps, to the result of another."""

    def __init__(self, name, from_layer, to_layer, **kwargs):
        super().__init__(name, from_layer, to_layer)
        self.mix = nn.Parameter(torch.ones(6))

    def from_layer_hook(self, host, fea_in, fea_out):
        assert fea_out is None
        self.mean = fea_in[0].mean((2, 3))

    def to_layer_hook(self, host, fea_in, fea_out):
        return fea_out + (self.mean.mean(1)[:, None, None] * self.mix)


def test_pre_hook_on_the_from_layer_and_exact_lists(net, tmp_path):
    text = "  late: {_target_: test_hcp.Late, from_layer: ['pre_hook:conv'], to_layer: [body.1.proj_out]}"
    new = fxplug.apply(net.gm, *passes(tmp_path, text))
    with Hooks(net.model) as hooks:
        plugin = hooks.pair("pre_hook:conv", "body.1.proj_out", lambda a, b: Late("late", a, b))
        same(net, new, [(plugin, "late.body.1.proj_out.PairPlugin.plugin")])


def test_unequal_lists(net, tmp_path):
    text = "  s: {{_target_: hcp_guide.Skip, from_layer: [{}], to_layer: [{}]}}"
    (p,) = passes(tmp_path, text.format("'re:.*proj_in$'", "'re:.*proj_(in|out)$'"))
    with pytest.raises(MatchError, match="matches 2 places and .* 4;") as error:
        fxplug.apply(net.gm, p)
    assert "body.0.proj_in" in str(error.value) and "body.1.proj_out" in str(error.value)
    (p,) = passes(tmp_path, text.format("'re:.*none$'", "'re:.*proj_out$'"))
    with pytest.raises(MatchError, match="0 places"):
        fxplug.apply(net.gm, p)


def crossed():
    """Registers what it runs first last."""
    names = ("in_b", "in_a", "out_a", "out_b")
    forward = lambda self, x: self.out_b(self.out_a(self.in_b(self.in_a(x))))  # noqa: E731
    return small.net(forward, **{name: nn.Linear(4, 4) for name in names})


def test_pairs_are_those_of_hcp_diffusion(tmp_path):
    case = small.traced(small.seeded(crossed).eval(), torch.randn(2, 4))
    text = "  s: {_target_: hcp_guide.Skip, from_layer: ['re:in_'], to_layer: ['re:out_']}"
    with pytest.raises(SpecError, match=r"'in_a' is paired with 'out_a'.*and pairs.*--model"):
        fxplug.apply(case.gm, *passes(tmp_path, text))
    new = fxplug.apply(case.gm, *passes(tmp_path, text, model="test_hcp:crossed"))
    with Hooks(case.model) as hooks:
        make = lambda a, b: hcp_guide.Skip("s", a, b)  # noqa: E731
        rows = [(hooks.pair(f"in_{k}", f"out_{t}", make), f"s.out_{t}.PairPlugin.plugin") for k, t in ("ba", "ab")]
        same(case, new, rows)


# --- MultiPluginBlock

CONTROLNET = """
  controlnet1:
    _target_: hcp_guide.ControlNetPlugin
    _partial_: True
    lr: 1e-4
    cond_block_channels: [3, 8, 8, 8]
    block_out_channels: [8, 16, 16, 16]
    from_layers:
      - 'pre_hook:' # get model input
      - 'pre_hook:conv_in' # make forward in the autocast context
    to_layers:
      - 'down_blocks.0'
      - 'down_blocks.1'
      - 'down_blocks.2'
      - 'down_blocks.3'
      - 'mid_block'
      - 'pre_hook:up_blocks.3.resnets.2'
"""


@pytest.fixture(scope="module")
def controlled(unet, tmp_path_factory):
    """The UNet with its ControlNet, which tests read."""
    return fxplug.apply(unet.gm, *passes(tmp_path_factory.mktemp("controlnet"), CONTROLNET, inputs=COND))


@pytest.mark.slow
def test_controlnet(unet, controlled):
    new = controlled
    layers = parse_yaml(CONTROLNET).data["controlnet1"]
    options = {"cond_block_channels": (3, 8, 8, 8), "block_out_channels": WIDTHS}
    with Hooks(unet.model) as hooks:
        make = lambda a, b: hcp_guide.ControlNetPlugin("controlnet1", a, b, host_model=unet.model, **options)  # noqa: E731
        plugin = hooks.multi(layers["from_layers"], layers["to_layers"], make)
        same(unet, new, [(plugin, "controlnet1.plugin.plugin")], cond=torch.randn(2, 3, 32, 32))
    with pytest.raises(fxplug.GuardError, match="cond"):
        new(*unet.args)
    with pytest.raises(fxplug.GuardError, match="cond"):
        new(*unet.args, cond=torch.randn(2, 3, 16, 16))


@pytest.mark.slow
def test_controlnet_on_a_model_that_is_called_by_name(unet, controlled, tmp_path):
    """As a configuration calls it: what its hooks see of the model is all that it is given."""
    named = dict(zip(("sample", "timestep", "encoder_hidden_states"), unet.args, strict=True))
    (p,) = passes(tmp_path, CONTROLNET, inputs=COND)
    by_name = fxplug.apply(fxplug.trace(unet.model, (), named), p)
    by_name.load_state_dict(controlled.state_dict())
    cond = torch.randn(2, 3, 32, 32)
    assert torch.equal(first(by_name(**named, cond=cond)), first(controlled(*unet.args, cond=cond)))


@pytest.mark.slow
def test_a_saved_controlnet_needs_no_class(unet, controlled, tmp_path):
    new = controlled
    fxplug.save(new, tmp_path / "saved")
    again = fxplug.load(tmp_path / "saved")
    cond = torch.randn(2, 3, 32, 32)
    assert torch.equal(first(again(*unet.args, cond=cond)), first(new(*unet.args, cond=cond)))
    assert not [m for m in again.modules() if type(m).__module__.startswith(("hcp_guide", "fxplug.compat"))]


# --- PatchPluginBlock

PRELU = """
  {name}:
    _target_: hcp_guide.PReLUPatch{wrap}
    _partial_: True
    lr: 1e-4
    p: {p}
    layers:
      - '{layers}'
"""


def test_patches_at_one_place_add_up(net, tmp_path):
    slopes = {"prelu": 0.3, "prelu2": 0.6}
    text = "".join(PRELU.format(name=n, wrap="", p=p, layers="re:.*nonlinearity$") for n, p in slopes.items())
    (p,) = passes(tmp_path, text)
    new = fxplug.apply(net.gm, p)
    with Hooks(net.model) as hooks:
        rows = []
        for i in range(2):
            path = f"body.{i}.nonlinearity"
            for name, slope in slopes.items():
                plugin = hooks.patch(path, lambda h, n=name, s=slope, **w: hcp_guide.PReLUPatch(n, h, p=s, **w))
                rows.append((plugin, f"prelu.{path}.PatchPlugin.container.{name}"))
        same(net, new, rows)
    assert not [n for n in new.graph.nodes if n.op == "call_module" and str(n.target).endswith("nonlinearity")]


@pytest.mark.parametrize("model", [None, "here"])
def test_wrap_model_of_a_patch_from_the_whole_model(net, tmp_path, model):
    how = {"model": "test_hcp:Net"} if model else {}
    (p,) = passes(tmp_path, PRELU.format(name="prelu", wrap=".wrap_model", p=0.3, layers=""), **how)
    new = fxplug.apply(net.gm, p)
    with Hooks(net.model) as hooks:
        rows = []
        for path in ("act", "body.0.nonlinearity", "body.1.nonlinearity"):
            plugin = hooks.patch(path, lambda host, **where: hcp_guide.PReLUPatch("prelu", host, p=0.3, **where))
            rows.append((plugin, f"prelu.{path}.PatchPlugin.container.prelu"))
        same(net, new, rows)


class Around(hcp_guide.PatchPluginBlock):
    """With the container as it is: changes what its layer gets and what it gives, and reads the layer's own weight."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.full((6,), 1.5))

    def pre_forward(self, x):
        return (x * self.gain,), {}

    def post_forward(self, output, x):
        return output + x @ self.host().weight


@pytest.mark.parametrize("path", ["twice", "body.0.proj_in"])
def test_a_patch_before_and_after_a_layer_that_the_graph_keeps_whole(net, tmp_path, path):
    (p,) = passes(tmp_path, f"  p: {{_target_: test_hcp.Around, layers: ['{path}']}}")
    new = fxplug.apply(net.gm, p)
    with Hooks(net.model) as hooks:
        plugin = hooks.patch(path, lambda host, **where: Around("p", host, **where))
        same(net, new, [(plugin, f"p.{path}.PatchAround.container.p")])
    assert new.get_parameter(f"{path}.weight") is net.model.get_parameter(f"{path}.weight")
    assert set(new.get_submodule("p").state_dict()) >= {f"{path}.PatchAround.container.p.gain"}
    assert len(list(new.parameters())) == len(list(net.gm.parameters())) + 1
    older = fxplug.load_pass("hcp/patch", name="p", plugin="test_hcp:Around", layers=path)
    assert "PatchPlugin" in str(fxplug.diff(net.gm, fxplug.apply(net.gm, older)))


class After(hcp_guide.PatchPluginBlock):
    """Leaves its module in place: the container is HCP-Diffusion's own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.full((6,), 1.5))

    def post_forward(self, output, x, shift):
        return output[0] * self.gain + shift, output[1]


class Before(After):
    post_forward = hcp_guide.PatchPluginBlock.post_forward

    def pre_forward(self, x, shift):
        return (x * self.gain,), {"shift": shift}


class Both(After):
    pre_forward = Before.pre_forward


@pytest.mark.parametrize("kind", [After, Before])
def test_a_patch_around_its_module(net, tmp_path, kind):
    text = f"  p: {{_target_: test_hcp.{kind.__name__}, layers: [body.0]}}"
    (p,) = passes(tmp_path, text)
    new = fxplug.apply(net.gm, p)
    kept = {k: p.params[k] for k in ("plugin", "layers")}
    args = [*(arg for arg in p.rules[0].args if arg != "x[**]"), "x.shift"]  # as files of earlier versions have it
    older = {After: "hcp/patch_after", Before: "hcp/patch_before"}[kind]
    before = fxplug.apply(net.gm, fxplug.load_pass(older, name="p", keywords=["shift"], args=args, **kept))
    assert fxplug.diff(net.gm, before) == fxplug.diff(net.gm, new)
    with Hooks(net.model) as hooks:
        plugin = hooks.patch("body.0", lambda host, **where: kind("p", host, **where))
        name = {After: "PatchAfter", Before: "PatchBefore"}[kind]
        same(net, new, [(plugin, f"p.body.0.{name}.container.p")])


class Keeps(Both):
    """Keeps what it got for the second method, and counts its calls in a buffer."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_buffer("calls", torch.zeros(()))

    def pre_forward(self, x, shift):
        self.given, self.rows = [x], x.shape[1]
        self.calls.add_(1)
        return super().pre_forward(x, shift)

    def post_forward(self, output, x, shift):
        return output[0] + self.given[0] * self.rows * self.gain, output[1]


class Leaves(Both):
    def post_forward(self, output, x, shift):
        before, self.last = getattr(self, "last", 0.0), output[0]
        return output[0] + before, output[1]


@pytest.mark.parametrize("kind", [Both, Keeps])
def test_both_methods_around_code_that_is_in_the_graph(net, tmp_path, kind):
    text = f"  p: {{_target_: test_hcp.{kind.__name__}, layers: [body.0, body.1]}}"
    (p,) = passes(tmp_path, text)
    assert [rule.place for rule in p.rules] == ["before", "after"] * 2
    new = fxplug.apply(net.gm, p)
    assert len([name for name, _ in new.named_parameters() if name.startswith("p.")]) == 2  # each plugin has its gain once
    with Hooks(net.model) as hooks:
        plugins = [hooks.patch(f"body.{n}", lambda host, **where: kind("p", host, **where)) for n in range(2)]
        same(net, new, [(plugin, f"p.body.{n}.PatchAround.container.p") for n, plugin in enumerate(plugins)])
        x = net.args[0][:1]  # another batch
        torch.testing.assert_close(new(x), net.model(x))
    fxplug.save(new, tmp_path / "saved")
    again = fxplug.load(tmp_path / "saved")
    assert torch.equal(again(x), new(x)) and len(list(again.parameters())) == len(list(new.parameters()))
    save_checkpoint(new, tmp_path / "a.ckpt")
    assert load_checkpoint(again, tmp_path / "a.ckpt")


def test_what_both_methods_around_a_module_cannot(net, tmp_path):
    (p,) = passes(tmp_path, "  p: {_target_: test_hcp.Leaves, layers: [body.0]}")
    with pytest.raises(TraceError, match="has the value from the last call"):
        fxplug.apply(net.gm, p)
    (p,) = passes(tmp_path, "  p: {_target_: test_hcp.Both, layers: ['re:body.0$']}")  # not one by one: without the model
    with pytest.raises(SpecError, match="runs the module that it patches.*hcp/patch_around for one with both"):
        fxplug.apply(net.gm, p)
    with pytest.raises(SpecError, match="list the layers one by one"):
        fxplug.load_pass("hcp/patch_around", plugin="test_hcp:Both", layers="re:body.0$")
    with pytest.raises(SpecError, match="has a pre_forward too.*hcp/patch_around"):
        fxplug.apply(net.gm, fxplug.load_pass("hcp/patch_after", name="p", plugin="test_hcp:Both", layers="body.0"))
    with pytest.raises(SpecError, match="has its own forward: use the pass hcp/patch"):
        fxplug.apply(net.gm, fxplug.load_pass("hcp/patch_after", name="p", plugin="hcp_guide:PReLUPatch", layers="act"))


class PreRaises(Both):
    def pre_forward(self, x, shift):
        raise KeyError("mine")


class PostOther(Both):
    def post_forward(self, output, x, shift):
        return output[0]


@pytest.mark.parametrize(
    "kind, given, message",
    [
        ("PreRaises", {}, "at 'body.0' fails on .*KeyError: 'mine'"),
        ("PostOther", {}, "post_forward returns tensor, and the module's result is"),
        ("Both", {"layers": "bdy.0"}, "no region 'bdy.0' .did you mean 'body.0'"),
        ("Both", {"layers": []}, "must be a list of layers, not an empty one"),
        ("Both", {"layers": 3}, "must be a list, not 3"),
        ("Both", {"args": 3}, "must be a list, not 3"),
        ("Both", {"laers": 3}, "unknown key 'laers' .did you mean 'layers'"),
    ],
)
def test_a_plugin_around_a_module_that_fails_is_named_and_leaves_nothing(net, kind, given, message):
    before = fxplug.show(net.gm)
    with pytest.raises(fxplug.FxplugError, match=f"(?s){message}"):
        p = fxplug.load_pass("hcp/patch_around", name="p", plugin=f"test_hcp:{kind}", **{"layers": "body.0", **given})
        fxplug.apply(net.gm, p)
    assert fxplug.show(net.gm) == before


@pytest.mark.parametrize("layers", ["re:down_blocks$", "up_blocks.1.attentions"])
@pytest.mark.parametrize("named", [True, False])
def test_wrap_model_at_containers_that_are_never_called(unet, tmp_path, layers, named):
    """ModuleLists: the layers in them, as HCP-Diffusion's wrap_model finds them; with the model looked up, and without."""
    text = f"  lora: {{_target_: hcp_guide.LoraBlock.wrap_model, rank: 2, layers: ['{layers}']}}"
    monkey = {"model": f"{__name__}:hosted"} if named else {}
    hosted.model = unet.model
    (p,) = passes(tmp_path, text, **monkey)
    at = layers.removeprefix("re:").removesuffix("$")
    below = copy.deepcopy(unet.model.get_submodule(at))
    wanted = {f"{at}.{path}" for path in hcp_guide.LoraBlock.wrap_model("lora", below, rank=2)}
    assert {site.path for site in fxplug.find(unet.gm, p)} == wanted and wanted


def hosted():
    return copy.deepcopy(hosted.model)


# --- inputs


class Fed(hcp_guide.LoraBlock):
    """Asks for an image of the condition and for what HCP-Diffusion feeds to every plugin."""

    def __init__(self, lora_id, host, **kwargs):
        super().__init__(lora_id, host, 2, **kwargs)
        self.register_input_feeder_to(kwargs["host_model"])

    def feed_input_data(self, data):
        if isinstance(data, dict):
            self.gain = data["gain"]
            self.noise = data.get("noisy_latents")

    def forward(self, fea_in, fea_out):
        return super().forward(fea_in, fea_out) * self.gain[:, None] + self.noise.mean()


@pytest.mark.slow
def test_inputs_of_the_pass_and_of_the_model(unet, tmp_path):
    path = "mid_block.attentions.0.proj_in"
    text = f"  fed: {{_target_: test_hcp.Fed, layers: [{path}]}}"
    (p,) = passes(tmp_path, text, inputs={"sample": ["n", "c", "h", "w"], "gain": ["n", 1]})
    new = fxplug.apply(unet.gm, p)
    with Hooks(unet.model) as hooks:
        plugin = hooks.single(path, lambda host: Fed("fed", host, host_model=unet.model))
        gain = torch.randn(2, 1)
        load(plugin, new, f"fed.{path}.SinglePlugin.plugin")
        plugin.feed_input_data({"gain": gain, "noisy_latents": unet.args[0]})
        expected = first(unet.model(*unet.args))
    assert torch.equal(first(new(*unet.args, gain=gain)), expected)
    assert not hasattr(unet.model, "input_feeder")
