"""Several PatchPluginBlocks of HCP-Diffusion at one layer: other rates, other layers, before and behind, against hooks."""

from __future__ import annotations

import pytest
import small
import torch
from test_hcp import Hooks, Net, passes, same
from torch import nn
from torch.nn import functional as F

import fxplug
from fxplug.compat.hcp import PatchPluginBlock, PatchPluginContainer
from fxplug.compat.hcp.checkpoints import load_checkpoint, save_checkpoint
from fxplug.core.errors import SpecError


class Post(PatchPluginBlock):
    """Adds a share of what its module got."""

    def __init__(self, *args, k=1.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.full((), 0.5))
        self.k = k

    def post_forward(self, output, *args, **kwargs):
        return output * self.k + self.gain * args[0]


class Pre(PatchPluginBlock):
    def __init__(self, *args, k=1.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.full((), 1.5))
        self.k = k

    def pre_forward(self, x, *args, **kwargs):
        return (x * self.gain + self.k, *args), kwargs


class SumOfWeights(PatchPluginContainer):
    """One product with the sum of all weights."""

    def forward(self, x):
        weight = self._host.weight
        for name in self.plugin_names:
            weight = weight + self[name].weight()
        return F.linear(x, weight, self._host.bias)


class LowRank(PatchPluginBlock):
    """Reads the shape of its module when it is made."""

    container_cls = SumOfWeights
    wrapable_classes = (nn.Linear,)

    def __init__(self, *args, rank=2, **kwargs):
        super().__init__(*args, **kwargs)
        out, given = self.host().weight.shape
        self.up, self.down = nn.Parameter(torch.randn(out, rank)), nn.Parameter(torch.randn(rank, given))

    def weight(self):
        return self.up @ self.down


class AlsoBehind(SumOfWeights):
    """Runs what a default container runs, too."""

    def forward(self, x):
        y = super().forward(x)
        for _, plugin in self:
            y = plugin.post_forward(y, x)
        return y


class LowRankBehind(LowRank):
    container_cls = AlsoBehind


class Plain(Post):
    """For AlsoBehind, which wants a weight of all."""

    def weight(self):
        return self.gain * 0.1


NET = "test_hcp:Net"
IN, OUT = [f"body.{n}.proj_in" for n in range(2)], [f"body.{n}.proj_out" for n in range(2)]
ALL = "'re:body.*proj_(in|out)$'"
# name: plugins (name, class, layers as written, more of the entry, the layers); the passes; the groups with their rates
CASES = {
    "two rates, the constructor reads the module": (
        [("m", LowRank, "body.0.proj_in", {}, IN[:1]), ("n", LowRank, "body.0.proj_in", {"lr": 5e-4}, IN[:1])],
        {"m": "hcp/patch"},
        {"m": 1e-4, "m.n": 5e-4},
    ),
    "two rates behind": (
        [("a", Post, "body.0.proj_in", {}, IN[:1]), ("b", Post, "body.0.proj_in", {"lr": 1e-3, "k": 2.0}, IN[:1])],
        {"a": "hcp/patch_after"},
        {"a": 1e-4, "a.b": 1e-3},
    ),
    "before and behind by an expression": (
        [("a", Pre, ALL, {}, IN + OUT), ("b", Post, ALL, {}, IN + OUT)],
        {"a": "hcp/patch_around"},
        {"a": 1e-4},
    ),
    "before and behind with two rates": (
        [("a", Pre, "'re:body.*in$'", {}, IN), ("b", Post, "'re:body.*in$'", {"lr": 2e-3}, IN)],
        {"a": "hcp/patch_around"},
        {"a": 1e-4, "a.b": 2e-3},
    ),
    "some layers of one": (
        [("a", Post, ALL, {}, IN + OUT), ("b", Post, "body.1.proj_in", {"k": 3.0}, IN[1:])],
        {"a": "hcp/patch_after", "a_2": "hcp/patch_after"},
        {"a": 1e-4, "a_2": 1e-4},
    ),
    "some layers of each, one frozen": (
        [
            ("a", Post, "'re:body.*proj_in$'", {}, IN),
            ("b", Post, "body.1.proj_in, body.0.proj_out", {"k": 3.0, "train": "false"}, [IN[1], OUT[0]]),
        ],
        {"a": "hcp/patch_after", "a_2": "hcp/patch_after", "b_2": "hcp/patch_after"},
        {"a": 1e-4, "a_2": 1e-4},
    ),
    "three, three rates": (
        [
            ("m", LowRank, ALL, {}, IN + OUT),
            ("n", LowRank, "'re:body.*in$'", {"lr": 5e-4}, IN),
            ("o", LowRank, "body.0.proj_in", {"lr": 1e-3, "rank": 1}, IN[:1]),
        ],
        {"m": "hcp/patch", "m_2": "hcp/patch", "m_3": "hcp/patch"},
        {"m": 1e-4, "m_2": 1e-4, "m_2.n": 5e-4, "m_3": 1e-4, "m_3.n_2": 5e-4, "m_3.o": 1e-3},
    ),
    "all layers below, and one": (
        [("m", "LowRank.wrap_model", "body.0", {}, [IN[0], OUT[0]]), ("n", LowRank, "body.0.proj_in", {"lr": 5e-4}, IN[:1])],
        None,
        None,
    ),
    "another container's subclass": (
        [("m", LowRankBehind, "body.0.proj_in", {}, IN[:1]), ("b", Plain, "'re:body.*in$'", {"lr": 5e-4}, IN)],
        {"m": "hcp/patch", "b_2": "hcp/patch_after"},
        None,
    ),
}


@pytest.fixture
def net():
    return small.traced(small.seeded(Net).eval(), small.seeded(lambda: torch.randn(2, 3, 4, 4)))


def text(plugins):
    lines = []
    for name, kind, layers, more, _ in plugins:
        kind = kind if isinstance(kind, str) else kind.__name__
        options = "".join(f", {key}: {value}" for key, value in {"lr": 1e-4, **more}.items())
        lines.append(f"  {name}: {{_target_: {__name__}.{kind}, layers: [{layers}]{options}}}\n")
    return "".join(lines)


@pytest.mark.parametrize("case", [name for name, (_, kinds, _) in CASES.items() if kinds])
def test_patches_at_one_layer_share_its_container(net, tmp_path, case):
    plugins, kinds, rates = CASES[case]
    found = passes(tmp_path, text(plugins), model=NET)
    assert [p.name for p in found] == [*kinds]
    new = net.gm
    for p in found:
        new = fxplug.apply(new, p)
    places = containers(new)
    assert sorted(places) == sorted({layer for *_, layers in plugins for layer in layers})
    with Hooks(net.model) as hooks:
        rows, at = [], {layer: iter(names) for layer, names in places.items()}
        for name, kind, _, more, layers in plugins:
            given = {key: value for key, value in more.items() if key not in ("lr", "train")}
            for layer in layers:
                plugin = hooks.patch(layer, lambda host, n=name, k=kind, g=given, **where: k(n, host, **g, **where))
                rows.append((plugin, next(at[layer])))
        same(net, new, rows)
        x = net.args[0][:1]
        assert torch.equal(new(x), net.model(x))
    fxplug.save(new, tmp_path / "saved")
    for module in (new, fxplug.load(tmp_path / "saved")):
        groups = {group["name"]: group for group in fxplug.trainable(module)}
        if rates is not None:
            assert {name: group.get("lr") for name, group in groups.items()} == rates
        names = {id(value): name for name, value in module.named_parameters()}
        mine = [names[id(value)] for group in groups.values() for value in group["params"]]
        frozen = {f"container.{name}." for name, _, _, more, _ in plugins if "train" in more}
        assert len(mine) == len(set(mine)) and not [name for name in mine if any(own in name for own in frozen)]


def containers(new):
    """By layer: where the plugins of its container are, in their order."""
    found = {}
    for entry in new.meta["passes"]:
        for site in entry["sites"]:
            place = f"{site['block']}.container"
            own = [entry["name"], *(more["name"] for more in entry["params"].get("also", []))]
            state = new.state_dict()
            here = [f"{place}.{name}" for name in own if any(key.startswith(f"{place}.{name}.") for key in state)]
            if here:
                found[site["path"]] = here
    return found


def test_a_file_of_each_plugin_is_read_and_written(net, tmp_path):
    plugins, *_ = CASES["three, three rates"]
    loud, other = net.gm, net.gm
    for p in passes(tmp_path, text(plugins), model=NET):
        loud, other = fxplug.apply(loud, p), fxplug.apply(other, p)
    files = {"m": ["m", "m_2", "m_3"], "n": ["n", "n_2"], "o": ["o"]}
    for name, own in files.items():
        save_checkpoint(loud, tmp_path / f"{name}.ckpt", passes=own)
        load_checkpoint(other, tmp_path / f"{name}.ckpt", passes=own)
    assert torch.equal(other(*net.args), loud(*net.args))


def test_the_layers_below_are_parted_too(net, tmp_path):
    plugins, *_ = CASES["all layers below, and one"]
    one, two = passes(tmp_path, text(plugins), model=NET)
    assert [*one.params["layers"], *two.params["layers"]] == [OUT[0], IN[0]]
    assert [more["name"] for more in two.params["also"]] == ["n"]


def test_a_step_of_two_rates(net, tmp_path):
    plugins, *_ = CASES["two rates behind"]
    (p,) = passes(tmp_path, text(plugins))  # the layers are written alike: without the model
    new = fxplug.apply(net.gm, p)
    groups = fxplug.trainable(new)
    before = {name: value.detach().clone() for name, value in new.named_parameters() if value.requires_grad}
    new(*net.args).square().sum().backward()
    torch.optim.SGD(groups, lr=1.0).step()
    rates = [(before[name] - value) / value.grad for name, value in new.named_parameters() if name in before]
    torch.testing.assert_close(torch.stack(rates).detach(), torch.tensor([1e-4, 1e-3]), rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    "more, message",
    [
        ({"lr": -1}, "also: lr of b must be a number, 0 or more, not -1"),
        ({"train": 3}, "also: train of b must be true or false, not 3"),
        ({"rate": 1.0}, "also: unknown key 'rate'"),
    ],
)
def test_what_one_of_several_plugins_cannot_say(net, more, message):
    also = [{"name": "b", "plugin": Post, **more}]
    with pytest.raises(SpecError, match=message):
        fxplug.apply(net.gm, fxplug.load_pass("hcp/patch_after", name="a", plugin=Post, layers=IN[0], also=also))


def test_a_second_pass_at_a_layer_is_refused_before_its_plugin_is_made(net):
    new = fxplug.apply(net.gm, fxplug.load_pass("hcp/patch", name="m", plugin=LowRank, layers=IN[0]))
    with pytest.raises(SpecError, match=r"has a patch of 'm' already.*write one pass with both \(also: \[...\], each with"):
        fxplug.apply(new, fxplug.load_pass("hcp/patch", name="n", plugin=LowRank, layers=IN[0]))
