"""Values of regions by their addresses, beside what forward hooks on the model get."""

from __future__ import annotations

import copy

import pytest
import small
import timm
import torch
import torchvision
import zoo
from sweeps import sweep
from torch import nn
from torch.utils import _pytree as pytree

import fxplug
from fxplug.core.ir.regions import find_regions


def tensors(value):
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def hooked(model, names, args, kwargs):
    """What hooks see of results, and of the first tensor among the arguments, at the first call of each module."""
    found, handles = {}, []
    for name in names:
        path = name.partition(":")[0]

        def before(module, args, kwargs, name=name):
            found.setdefault(name, [t.clone() for t in tensors((args, kwargs))[:1]])

        def after(module, args, kwargs, out, name=name):
            found.setdefault(name, [t.clone() for t in tensors(out)])

        module = model.get_submodule(path)
        if name.endswith(":in"):
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        else:
            handles.append(module.register_forward_hook(after, with_kwargs=True))
    torch.manual_seed(3)
    model(*args, **kwargs)
    for handle in handles:
        handle.remove()
    return found


def addresses(gm):
    """Every region that has values, in both modes."""
    views = find_regions(gm)
    first = [key for key in views[0].ran if "@" not in key and all(key in view.by_key for view in views)]
    found = [key for key in first if all(view.out_ports(view.by_key[key]) for view in views)]
    return found + [f"{key}:in" for key in first if all(view.in_ports(view.by_key[key]) for view in views)]


def timm_model(name, **options):
    return lambda: (timm.create_model(name, num_classes=5, **options), (torch.randn(2, 3, 32, 32),), {})


def swin():
    model = torchvision.models.SwinTransformer([2, 2], 8, [1, 2], [1, 2], [2, 2], dropout=0.1, stochastic_depth_prob=0.3)
    return model, (torch.randn(2, 3, 16, 16),), {}


def unet():
    (case,) = (c for c in zoo.cases() if c.name == "diffusers/UNet2DConditionModel-sd15")
    return case.build(), *case.inputs(batch=2)


class Overwrites(nn.Module):
    """Writes into what its layers gave, and gives results in structures."""

    def __init__(self):
        super().__init__()
        self.lstm, self.act, self.fc = nn.LSTM(4, 5, batch_first=True), nn.ReLU(inplace=True), nn.Linear(5, 5)
        self.parts, self.norm = Parts(), nn.BatchNorm1d(5)

    def forward(self, x):
        y, (hidden, _) = self.lstm(x)
        y = self.fc(y)
        z = self.act(y[:, :2])
        y.mul_(2)
        out = self.parts(z)
        out["a"].add_(1)
        return self.norm(self.fc(out["a"] + out["b"][0])[:, 0]) + hidden[-1]


class Parts(nn.Module):
    def forward(self, x):
        return {"a": x * 2, "b": (x + 1, None, x - 1)}


MODELS = {
    "vit": timm_model("vit_tiny_patch16_224", img_size=32, depth=2, drop_path_rate=0.5),
    "convnext": timm_model("convnext_atto", depths=(1, 1, 2, 1), drop_path_rate=0.3),
    "efficientnet": timm_model("efficientnet_b0"),
    "resnet": lambda: (torchvision.models.resnet18(num_classes=5), (torch.randn(2, 3, 32, 32),), {}),
    "swin": swin,
    "unet": unet,
    "overwritten": lambda: (Overwrites(), (torch.randn(3, 2, 4),), {}),
}


@sweep("name", MODELS, "vit", "convnext", "resnet", "overwritten")
def test_what_hooks_get(name):
    torch.manual_seed(0)
    model, args, kwargs = MODELS[name]()
    gm = fxplug.trace(model.eval(), args, kwargs, check=False)
    names = addresses(gm)
    asked = [names, names[len(names) // 3 : len(names) // 3 + 1], names[-1:]]
    before = copy.deepcopy(model.state_dict())
    for mode in (False, True):
        wanted = hooked(model.train(mode), names, args, kwargs)
        for some in asked:
            model.load_state_dict(before)
            torch.manual_seed(3)
            taken = fxplug.features(gm, some).train(mode)(*args, **kwargs)
            assert list(taken) == some
            for one in some:
                assert len(tensors(taken[one])) == len(wanted[one]), one
                assert all(map(torch.equal, tensors(taken[one]), wanted[one])), one
        model.load_state_dict(before)


def test_what_only_later_results_need_is_left_out():
    gm, args, _ = small.vit()
    taken = fxplug.features(gm, "blocks.0.attn")
    assert len(taken.graph.nodes) < len(gm.graph.nodes) / 2
    assert all("blocks.1" not in str(node.target) for node in taken.graph.nodes)
    assert dict(taken.named_parameters()).keys() == dict(gm.named_parameters()).keys()
    assert taken.blocks[0].attn.qkv.weight is gm.blocks[0].attn.qkv.weight
    whole = fxplug.features(gm, [":out", "blocks.{0}"])(*args)
    assert torch.equal(whole[":out"], gm(*args)) and list(whole) == [":out", "blocks.0"]


def test_addresses_of_members_calls_and_patterns():
    model, (x,), _ = MODELS["overwritten"]()
    gm = fxplug.trace(model.eval(), x)
    taken = fxplug.features(gm, ["lstm:out[1][0]", "parts:out.b[0]", "parts", "fc@1", "fc@1:in", "l?tm"])(x)
    assert list(taken) == ["lstm:out[1][0]", "parts:out.b[0]", "parts", "fc@1", "fc@1:in", "lstm"]
    assert torch.equal(taken["lstm:out[1][0]"], taken["lstm"][1][0]) and torch.equal(taken["fc@1"], model.fc(taken["fc@1:in"]))
    assert type(taken["parts"]) is dict and torch.equal(taken["parts"]["b"][0], taken["parts:out.b[0]"])


def test_in_a_rewrite_that_is_saved_compiled_and_trained(tmp_path):
    torch.manual_seed(0)
    gm, args, _ = small.vit()
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="blocks.*.mlp.fc1"))
    for name, parameter in new.named_parameters():
        if name.startswith("lora."):
            nn.init.normal_(parameter)
    taken = fxplug.features(new.eval(), ["blocks.0.mlp.fc1", "blocks.0.mlp.act:in", "norm"])
    out = taken(*args)
    assert torch.equal(out["blocks.0.mlp.fc1"], out["blocks.0.mlp.act:in"])  # with what the pass put behind it
    assert not torch.equal(out["norm"], fxplug.features(gm.eval(), "norm")(*args)["norm"])
    fxplug.save(taken, tmp_path / "artifact")
    loaded = fxplug.load(tmp_path / "artifact")
    assert all(torch.equal(loaded(*args)[name], value) for name, value in out.items())
    program = torch.compile(taken, backend="eager", fullgraph=True)
    assert all(torch.equal(program(*args)[name], value) for name, value in out.items())
    out["norm"].sum().backward()
    assert all(p.grad is not None for name, p in new.named_parameters() if name.startswith("lora."))
    again = fxplug.apply(taken, fxplug.load_pass("bitfit", at="norm"))
    assert torch.equal(again(*args)["norm"], out["norm"])


@pytest.mark.slow
def test_parts_in_their_own_modes():
    torch.manual_seed(0)
    model, args, kwargs = MODELS["efficientnet"]()
    taken = fxplug.features(fxplug.trace(copy.deepcopy(model).eval(), args), ["blocks.1", "blocks.2.0"])
    for each in (model, taken):
        each.train()
        each.bn1.eval(), each.blocks[1].eval()
    wanted = hooked(model, ["blocks.1", "blocks.2.0"], args, kwargs)
    torch.manual_seed(3)
    assert all(torch.equal(value, wanted[name][0]) for name, value in taken(*args).items())


def test_gradients_through_what_is_taken():
    model, (x,), _ = MODELS["overwritten"]()
    gm = fxplug.trace(copy.deepcopy(model).eval(), x)
    fxplug.features(gm, ["fc"])(x)["fc"].sum().backward()
    y = model.eval().fc(model.lstm(x)[0])
    y.sum().backward()
    assert torch.equal(gm.fc.weight.grad, model.fc.weight.grad)


@pytest.mark.parametrize(
    ("asked", "error", "text"),
    [
        (["blocks.0.atn"], fxplug.MatchError, "no region 'blocks.0.atn'.*blocks.0.attn"),
        (["blocks.7.*"], fxplug.MatchError, "no region matches 'blocks.7.\\*'"),
        (["blocks.0:out[1]"], fxplug.MatchError, "no single result"),
        (["blocks.0:in.y"], fxplug.MatchError, "is not an input of 'blocks.0'"),
        (["norm:param.weight"], fxplug.SpecError, "is a parameter"),
        ([], fxplug.SpecError, "name at least one region"),
        ([3], fxplug.SpecError, "takes addresses"),
    ],
)
def test_addresses_that_are_none(asked, error, text):
    with pytest.raises(error, match=text):
        fxplug.features(small.vit().gm, asked)


def test_modules_without_their_regions():
    model, args, _ = MODELS["swin"]()
    gm = fxplug.trace(model.eval(), *args)
    with pytest.raises(fxplug.MatchError, match="never called by the model"):
        fxplug.features(gm, ["features.1.0.attn.qkv"])
    with pytest.raises(fxplug.SpecError, match="takes a traced module"):
        fxplug.features(model, ["head"])
    lowered = fxplug.lower(fxplug.apply(small.vit().gm, fxplug.load_pass("lora")))
    with pytest.raises(fxplug.SpecError, match="take the features first"):
        fxplug.features(lowered, ["norm"])
