"""LoRA's numbers: those of PEFT with the same weights, or of the layer with the update added to its weight."""

from __future__ import annotations

import peft
import pytest
import small
import torch
import torch.nn.functional as F
from torch import nn

import fxplug


class One(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


LAYERS = {
    "linear": (lambda: nn.Linear(6, 5), (3, 4, 6)),
    "linear without bias": (lambda: nn.Linear(6, 5, bias=False), (2, 6)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), (2, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3), (2, 4, 9, 7)),
    "conv2d with stride": (lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0)), (2, 4, 9, 7)),
    "conv3d": (lambda: nn.Conv3d(2, 6, 2, padding=1), (2, 2, 4, 3, 5)),
    "embedding": (lambda: nn.Embedding(11, 6), None),
}


def inputs(shape):
    return torch.randint(0, 11, (2, 7)) if shape is None else torch.randn(shape, requires_grad=True)


def ours(model, x, **params):
    """The model with LoRA on its layer, its weights random, and the block."""
    new = fxplug.apply(fxplug.trace(model, x), fxplug.load_pass("lora", at="layer", **params))
    block = new.get_submodule("lora.layer.Lora")
    nn.init.normal_(block.up.weight)
    return new, block


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("rank, alpha", [(3, 3), (2, 8)])
def test_as_peft_forward_and_backward(layer, rank, alpha):
    make, shape = LAYERS[layer]
    base, x = make(), inputs(shape)
    new, block = ours(One(base), x, rank=rank, alpha=alpha)
    assert block.scale.item() == alpha / rank
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=["layer"])
    theirs = peft.get_peft_model(One(base), config)
    inner = theirs.base_model.model.layer
    with torch.no_grad():
        if shape is None:
            inner.lora_embedding_A["default"].copy_(block.down.weight.T)
            inner.lora_embedding_B["default"].copy_(block.up.weight)
            down, up = inner.lora_embedding_A["default"], inner.lora_embedding_B["default"]
        else:
            down, up = inner.lora_A["default"].weight, inner.lora_B["default"].weight
            down.copy_(block.down.weight)
            up.copy_(block.up.weight)
    a, b = new(x), theirs(x)
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    weights = torch.randn_like(a)
    given = [] if shape is None else [x]
    left = torch.autograd.grad((a * weights).sum(), [block.down.weight, block.up.weight, *given])
    right = torch.autograd.grad((b * weights).sum(), [down, up, *given])
    if shape is None:
        right = (right[0].T, *right[1:])
    for p, q in zip(left, right, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6 * max(1, q.abs().max().item()))


def update(block, groups):
    """What a LoRA of a convolution adds to the weight, group by group."""
    down, up = block.down.weight.chunk(groups), block.up.weight.flatten(1).chunk(groups)
    return torch.cat([torch.einsum("or,r...->o...", u, d) for u, d in zip(up, down, strict=True)]) * block.scale


@pytest.mark.parametrize(
    "make, shape",
    [
        (lambda: nn.Conv2d(8, 12, 3, padding=1, groups=4), (2, 8, 7, 7)),
        (lambda: nn.Conv2d(8, 8, 5, stride=2, padding=2, groups=8), (2, 8, 9, 9)),
        (lambda: nn.Conv2d(4, 6, 3, padding=2, dilation=2), (2, 4, 9, 7)),  # PEFT forgets the dilation
        (lambda: nn.Conv2d(4, 6, 3, padding="same", dilation=2), (2, 4, 7, 7)),
        (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), (2, 4, 7, 7)),
        (lambda: nn.Conv1d(6, 9, 3, groups=3), (2, 6, 8)),
        (lambda: nn.Conv3d(4, 4, 2, groups=2), (1, 4, 3, 4, 5)),
        (lambda: nn.Conv2d(4, 6, 3, padding=1), (4, 7, 7)),
    ],
)
def test_a_convolution_is_the_one_with_the_update_in_its_weight(make, shape):
    base, x = make(), inputs(shape)
    new, block = ours(One(base), x, rank=2, alpha=3)
    found = new(x)
    with torch.no_grad():
        base.weight += update(block, base.groups)
    torch.testing.assert_close(found, base(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", [32, 33, 40])
@pytest.mark.parametrize("groups", [1, 4])
def test_a_convolution_that_pads_by_itself(side, groups):
    from timm.layers import Conv2dSame

    base = Conv2dSame(4, 8, 3, stride=2, groups=groups)
    traced = fxplug.trace(One(base), torch.randn(1, 4, 31, 31))
    new = fxplug.apply(traced, fxplug.load_pass("lora", at="layer", rank=2))
    block = new.get_submodule("lora.layer.Lora")
    nn.init.normal_(block.up.weight)
    x = torch.randn(2, 4, side, side)
    with torch.no_grad():
        found = new(x)
        base.weight += update(block, groups)
        torch.testing.assert_close(found, base(x), rtol=1e-5, atol=1e-5)


def test_lora_on_the_stem_of_a_real_backbone():
    base = small.lite()
    new = fxplug.apply(base.gm, fxplug.load_pass("lora", at="conv_stem", rank=4))
    block = new.get_submodule("lora.conv_stem.Lora")
    nn.init.normal_(block.up.weight, std=0.1)
    weight = base.model.conv_stem.weight.detach()
    with torch.no_grad():
        found = new(*base.args)
        merged = torch.func.functional_call(base.model, {"conv_stem.weight": weight + update(block, 1)}, base.args)
    torch.testing.assert_close(found, merged, rtol=1e-4, atol=1e-4)


def test_the_default_alpha_is_the_rank():
    x = torch.randn(2, 6)
    new, block = ours(One(nn.Linear(6, 5)), x, rank=4)
    assert block.alpha == 4 and block.scale.item() == 1 and "lora.layer.Lora.scale" in new.state_dict()
    expected = new.layer(x) + F.linear(F.linear(x, block.down.weight), block.up.weight)
    torch.testing.assert_close(new(x), expected, rtol=1e-6, atol=1e-6)


def test_the_scale_is_read_when_the_weights_are_loaded():
    x = torch.randn(2, 6)
    layer = One(nn.Linear(6, 5))
    strong, _ = ours(layer, x, rank=2, alpha=20)
    weak, _ = ours(layer, x, rank=2)
    weak.load_state_dict({k: v for k, v in strong.state_dict().items() if k.startswith("lora.")}, strict=False)
    assert torch.equal(weak(x), strong(x))
