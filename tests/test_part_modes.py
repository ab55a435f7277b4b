"""Parts of a traced module that are put into training or evaluation by themselves, beside the same parts of the model."""

from __future__ import annotations

import copy
import random

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from timm.models._efficientnet_builder import decode_arch_def
from timm.models.efficientnet import EfficientNet
from torch import nn
from torch.utils import _pytree as pytree

import fxplug
from fxplug.core.ir.part_modes import MixedModes
from fxplug.lowerings.regions.nested import nest
from fxplug.lowerings.regions.submodules import outline


class Part(nn.Module):
    """Drops half of what a layer gives, in training."""

    def __init__(self, width=4):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return F.dropout(self.layer(x), 0.5, self.training)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = nn.Sequential(Part(), Part()), Part()

    def forward(self, x):
        return self.head(self.backbone(x))


class Twice(nn.Module):
    """One module called twice, one under two names, and numbers that go in without a tensor."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Part(), Sized()
        self.c = self.a

    def forward(self, x):
        n = x.shape[-1]
        x = F.dropout(x, 0.1, self.training)
        return self.b(self.c(self.a(self.a(x))), n // 2, n)


class Sized(nn.Module):
    def forward(self, x, half, whole):
        return F.dropout(x.view(-1, 2, half), 0.3, self.training).reshape(-1, whole)


def frozen_norms(model):
    for module in model.modules():
        if "BatchNorm" in type(module).__name__:
            module.eval()


def at_random(seed):
    def put(model):
        rng = random.Random(seed)
        for name, module in model.named_modules():
            if name and rng.random() < 0.4:
                module.train(rng.random() < 0.5)

    return put


def part(path, mode=False):
    return lambda model: model.get_submodule(path).train(mode)


def timm_model(name, size=64, **options):
    return lambda: (timm.create_model(name, num_classes=5, **options), torch.randn(2, 3, size, size))


def efficientnet():
    """EfficientNet's first stages, by its own builder."""
    stages = [["ds_r1_k3_s1_e1_c8_se0.25"], ["ir_r2_k3_s2_e4_c12_se0.25"], ["ir_r1_k5_s2_e4_c16_se0.25"]]
    options = {"num_classes": 5, "stem_size": 8, "num_features": 24}
    return EfficientNet(decode_arch_def(stages), **options), torch.randn(2, 3, 32, 32)


def swin():
    model = torchvision.models.SwinTransformer([2, 2], 8, [1, 2], [1, 2], [2, 2], dropout=0.1, stochastic_depth_prob=0.3)
    return model, torch.randn(2, 3, 16, 16)


FEW = {"depths": (1, 1), "embed_dim": (32, 64), "stem_width": 16}  # of four stages
CASES = {
    "norms of efficientnet": (efficientnet, True, frozen_norms),
    "backbone": (lambda: (Net(), torch.randn(3, 4)), True, part("backbone")),
    "a part that trains": (lambda: (Net(), torch.randn(3, 4)), False, part("backbone.1", True)),
    "called twice": (lambda: (Twice(), torch.randn(3, 4)), True, part("a")),
    "numbers that go in": (lambda: (Twice(), torch.randn(3, 4)), False, part("b", True)),
    "swin": (swin, True, at_random(1)),
    "densenet": (timm_model("densenet121", 32, growth_rate=4, block_config=(2, 2)), True, at_random(2)),
    "mobilevit": (timm_model("mobilevit_xxs", drop_path_rate=0.1), False, at_random(3)),
    "vit": (timm_model("vit_tiny_patch16_224", 32, img_size=32, depth=2, drop_path_rate=0.5), True, at_random(7)),
    "maxvit": (timm_model("maxvit_rmlp_pico_rw_256", drop_path_rate=0.3, img_size=64, **FEW), True, frozen_norms),
}

LARGE = ("maxvit", "mobilevit")


def same(model, gm, x, put=lambda model: None, mode=None):
    """Both called in these modes, with what they leave in their buffers."""
    before = {key: value.clone() for key, value in model.state_dict().items()}
    shared = set(before) & set(gm.state_dict())
    results = []
    for each in (model, gm):
        if mode is not None:
            each.train(mode)
        put(each)
        with torch.no_grad():
            for key in shared:
                each.state_dict()[key].copy_(before[key])
        torch.manual_seed(3)
        leaves = pytree.tree_leaves(each(x))
        assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
        results.append(leaves + [value.clone() for key, value in each.state_dict().items() if key in shared])
    return len(results[0]) == len(results[1]) and all(map(torch.equal, *results))


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LARGE else n for n in CASES])
def test_each_part_follows_its_own_mode(name):
    make, mode, put = CASES[name]
    torch.manual_seed(0)
    model, x = make()
    gm = copy.deepcopy(fxplug.trace(model.eval(), x))
    assert same(model, gm, x, put, mode)
    assert gm.has_mixed_modes
    assert same(model, copy.deepcopy(gm), x)  # a copy keeps the modes
    assert same(model, gm.copied(), x)
    for again in (True, False):  # the root's mode is that of all parts again
        assert same(model, gm, x, mode=again)
    assert not gm.has_mixed_modes


@pytest.mark.slow
def test_in_a_rewrite_and_in_what_is_saved_of_it(tmp_path):
    torch.manual_seed(0)
    model, x = efficientnet()
    gm = fxplug.trace(copy.deepcopy(model).eval(), x)
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="**.conv_pw", dropout=0.5), fxplug.load_pass("bitfit", at="blocks.1.**"))
    new = fxplug.apply(new, fxplug.load_pass("scale", at="blocks.*.*"))
    for put in (frozen_norms, at_random(5)):
        assert same(model, _without_dropout(new), x, put, True)
    fxplug.save(new, tmp_path / "artifact")
    loaded = fxplug.load(tmp_path / "artifact")
    assert loaded.has_mixed_modes and same(model, _without_dropout(loaded), x)


def _without_dropout(new):
    """A rewrite in which nothing but the model draws numbers."""
    for name, module in new.named_modules():
        if name.startswith("lora.") and isinstance(module, nn.Dropout):
            module.p = 0.0
    return new


def test_the_blocks_of_a_pass_have_modes_of_their_own():
    model, x = Net().eval(), torch.randn(3, 4)
    new = fxplug.apply(fxplug.trace(model, x), fxplug.load_pass("lora", at="head.layer", dropout=0.9))
    for name, parameter in new.named_parameters():
        if name.startswith("lora."):
            nn.init.ones_(parameter)
    new.train()
    new.get_submodule("lora").eval()
    torch.manual_seed(0)
    once = new(x)
    torch.manual_seed(0)
    assert torch.equal(once, new(x))
    new.backbone.eval(), new.head.eval()
    assert torch.equal(new(x), new(x))
    new.get_submodule("lora").train()
    assert not torch.equal(new(x), new(x))


@pytest.mark.slow
@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("name", ["norms of efficientnet", "backbone", "swin", "numbers that go in", "called twice"])
def test_a_model_traced_in_mixed_modes(name, mode):
    make, _, put = CASES[name]
    torch.manual_seed(0)
    model, x = make()
    model.train(mode)
    put(model)
    gm = copy.deepcopy(fxplug.trace(model, x))
    assert [m.training for m in gm.modules()] == [m.training for m in model.modules()]
    assert same(model, gm, x)
    assert same(model, gm, x, mode=not mode) and same(model, gm, x, mode=mode)


class Frozen(Net):
    """Leaves its backbone in evaluation, whoever trains it."""

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self


class Evaluated(Net):
    def train(self, mode=True):
        return super().train(False)


@pytest.mark.parametrize("kind", [Frozen, Evaluated])
def test_the_modes_that_a_model_gives_its_parts_itself(kind, tmp_path):
    model, x = kind(), torch.randn(3, 4)
    gm = copy.deepcopy(fxplug.trace(model, x))
    fxplug.save(gm, tmp_path / "artifact")
    for each in (gm, fxplug.load(tmp_path / "artifact"), fxplug.apply(gm, fxplug.load_pass("lora"))):
        for mode in (True, False, True):
            assert same(model, each, x, mode=mode)
            assert each.backbone.training == model.backbone.training


@pytest.mark.slow
def test_compiled_with_no_more_programs_than_modes():
    programs = []

    def backend(graph, inputs):
        programs.append(graph)
        return graph.forward

    torch.manual_seed(0)
    model, x = nn.Sequential(*(timm.layers.BatchNormAct2d(3) for _ in range(3))).eval(), torch.randn(2, 3, 4, 4)
    gm = fxplug.trace(copy.deepcopy(model), x)
    gm[1].train(), gm.eval()
    around = torch.compile(nn.Sequential(gm), backend=backend, fullgraph=True)
    for compiled in (torch.compile(gm, backend=backend, fullgraph=True), around):
        programs.clear()
        for put, count in ((part("0", True), 1), (part("2", True), 2), (part("0", True), 2), (lambda m: None, 3)):
            for each in (model, gm):
                each.eval()
                put(each)
            if compiled is around:
                same(model, gm, x)
            for _ in range(2):
                assert torch.equal(compiled(x), model(x))
            assert len(programs) == count


# --- what is refused


class Aside(nn.Module):
    """Hands a tensor on beside its result."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Leaves(), Part()

    def forward(self, x):
        x = self.b(self.a(x))
        return x + self.a.kept


class Leaves(Part):
    def forward(self, x):
        self.kept = super().forward(x)
        return x


class Asks(nn.Module):
    """Reads the mode of a part that is not running."""

    def __init__(self):
        super().__init__()
        self.drop, self.part = nn.Dropout(0.5), Part()

    def forward(self, x):
        return F.dropout(self.part(x), self.drop.p, self.drop.training)


class Agrees(Asks):
    def forward(self, x):
        return x if self.drop.training == self.part.training else -x


class Sets(Asks):
    """Puts its parts into evaluation for a while."""

    def forward(self, x):
        was = self.training
        x = self.drop(x)
        self.eval()
        x = self.part.layer(x)
        self.train(was)
        return x


class Tuples(nn.Module):
    """A part with another number of results in training."""

    def __init__(self):
        super().__init__()
        self.part = Pair()

    def forward(self, x):
        return self.part(x)[0]


class Pair(Part):
    def forward(self, x):
        return (x, super().forward(x)) if self.training else (x,)


class Sometimes(nn.Module):
    """Calls a part in training alone."""

    def __init__(self):
        super().__init__()
        self.part = Part()

    def forward(self, x):
        return self.part(x) if self.training else x


class Told(nn.Module):
    """Calls a part with another number in training."""

    def __init__(self):
        super().__init__()
        self.part = Scaled()

    def forward(self, x):
        return self.part(x, 2.0 if self.training else 1.0)


class Scaled(Part):
    def forward(self, x, by):
        return super().forward(x * by)


class OneMode(Net):
    """Cannot be traced in training."""

    def forward(self, x):
        if self.training:
            x = x * random.random()
        return super().forward(x)


REFUSED = {
    "a": (Aside, "neither an argument nor a result"),
    "drop": (Asks, "the code of the model reads or sets that mode"),
    "part": (Agrees, "reads or sets that mode"),
    "set": (Sets, "the code of the model reads or sets that mode"),
    "results": (Tuples, "in one mode alone it has 'part:out"),
    "call": (Sometimes, "the model does not call it in evaluation"),
    "arguments": (Told, "the model calls it with other arguments in the two modes"),
    "backbone.0": (OneMode, "could not be traced in training"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_part_that_no_graph_can_follow_is_named(name):
    kind, why = REFUSED[name]
    path = name if name not in ("set", "results", "call", "arguments") else "part"
    model, x = kind().eval(), torch.randn(3, 4)
    gm = fxplug.trace(model, x)
    assert same(model, gm, x)
    gm.get_submodule(path).train()
    if name == "call":  # it has no code in evaluation
        assert same(model, gm, x)
        gm.train()
        gm.get_submodule(path).eval()
    with pytest.raises(fxplug.GuardError, match=f"'{path}' is in (training|evaluation).*{why}") as error:
        gm(x)
    assert isinstance(error.value, MixedModes)
    gm.eval()
    assert same(model, gm, x, mode=False)


def test_parts_of_lowered_modules():
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Part() for _ in range(4))).eval(), torch.randn(3, 4)
    gm = fxplug.trace(copy.deepcopy(model), x)
    for each in (outline(gm, ["*"]), outline(gm, ["*"], checkpoint=True)):
        model.train(), each.train()
        model[1].eval()
        region = each.regions.get_submodule(next(name for name, m in each.regions.named_children() if "1" in name))
        region.eval()
        assert same(model, each, x)
    nested = nest(gm, ["*"])
    assert same(model, nested, x, mode=True)
    nested[1].eval()
    with pytest.raises(fxplug.GuardError, match="'1' is in evaluation.*its code is shared with other parts"):
        nested(x)


def test_exports_have_the_modes_of_the_parts(tmp_path):
    model, x = Net(), torch.randn(3, 4)
    gm = fxplug.trace(copy.deepcopy(model).eval(), x)
    for each in (model, gm):
        each.train()
        each.backbone.eval(), each.head.eval()
    fxplug.export(gm, tmp_path / "model.pt2", x)
    assert torch.equal(torch.export.load(tmp_path / "model.pt2").module()(x), model(x))


def test_variants_follow_the_parts_of_their_owner():
    model = Net()
    gm = fxplug.variants(fxplug.trace(model.eval(), torch.randn(3, 4)), model)
    other = torch.randn(2, 3, 4)
    gm(other)
    assert len(gm.variants) == 1
    for put in (part("backbone"), part("head")):
        assert same(model, gm, other, put, True) and same(model, gm, other[0])
    odd = OneMode()
    gm = fxplug.variants(fxplug.trace(odd.eval(), torch.randn(3, 4)), odd)
    gm.head.train()
    with pytest.raises(fxplug.GuardError, match="'head' is in training"):
        gm(torch.randn(3, 4))
    assert gm.variants == []  # another graph would not help


def test_gradients_go_where_the_models_go():
    torch.manual_seed(0)
    model, x = timm_model("densenet121", 32, growth_rate=4, block_config=(2, 2))()
    gm = copy.deepcopy(fxplug.trace(model.eval(), x))
    for each in (model, gm):
        each.train()
        at_random(2)(each)
        torch.manual_seed(1)
        each(x).square().sum().backward()
    ours = dict(gm.named_parameters())
    assert all(torch.equal(p.grad, ours[name].grad) for name, p in model.named_parameters())
