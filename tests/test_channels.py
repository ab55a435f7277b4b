"""Where values have their channels, and parameters that are mapped in any order of memory."""

from __future__ import annotations

import pytest
import torch
from sweeps import sweep
from torch import nn

import fxplug


class Order(nn.Module):
    """Channels go last for a while, as in ConvNeXt and Swin."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.mlp = nn.Conv2d(3, 6, 1), nn.LayerNorm(6), nn.Sequential(nn.Linear(6, 5), nn.GELU())
        self.back = nn.Conv2d(5, 4, 1)

    def forward(self, x):
        return self.back(self.mlp(self.norm(self.conv(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2))


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Named(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


def alone(layer, *shape):
    return lambda: (Named(layer), shape)


PLACES = {  # a model and the shape of its input; the region, and which of its dimensions has the channels
    "Order, convolution": (lambda: (Order(), (2, 3, 6, 6)), "conv", 1),
    "Order, norm": (lambda: (Order(), (2, 3, 6, 6)), "norm", 3),
    "Order, Linear": (lambda: (Order(), (2, 3, 5, 5)), "mlp.0", 3),
    "Order, activation": (lambda: (Order(), (2, 3, 5, 5)), "mlp.1", 3),
    "Order, region": (lambda: (Order(), (2, 3, 5, 5)), "mlp", 3),
    "Order, back": (lambda: (Order(), (2, 3, 4, 4)), "back", 1),
    "Conv1d": (alone(nn.Conv1d(3, 4, 1), 2, 3, 4), "layer", 1),
    "Conv1d without a batch": (alone(nn.Conv1d(3, 4, 1), 3, 4), "layer", 0),
    "Conv2d": (alone(nn.Conv2d(3, 4, 1), 4, 3, 4, 4), "layer", 1),
    "Conv2d without a batch": (alone(nn.Conv2d(3, 4, 1), 3, 4, 4), "layer", 0),
    "Conv3d": (alone(nn.Conv3d(3, 4, 1), 2, 3, 4, 4, 4), "layer", 1),
    "Conv3d without a batch": (alone(nn.Conv3d(3, 4, 1), 3, 4, 4, 4), "layer", 0),
    "ConvTranspose2d": (alone(nn.ConvTranspose2d(3, 4, 1), 2, 3, 4, 4), "layer", 1),
    "Linear of five dimensions": (alone(nn.Linear(3, 4), 4, 4, 4, 4, 3), "layer", 4),
    "Linear of one": (alone(nn.Linear(3, 4), 3), "layer", 0),
    "GroupNorm": (alone(nn.GroupNorm(2, 4), 2, 4, 4, 4), "layer", 1),
    "LayerNorm2d": (alone(LayerNorm2d(4), 2, 4, 4, 4), "layer", 1),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_block_takes_the_dimension_that_the_layers_around_take(place):
    make, path, dim = PLACES[place]
    model, shape = make()
    gm = fxplug.trace(model.eval(), (x := torch.randn(shape),))
    seen = {}
    new = fxplug.apply(gm, fxplug.load_pass("scale", at=path))
    (gate,) = (m for m in new.modules() if type(m).__name__ == "Scale")
    gate.register_forward_hook(lambda m, args, out: seen.update(before=args[0], after=out))
    with torch.no_grad():
        gate.weight.copy_(torch.arange(2.0, 2 + gate.weight.numel()))
        new(x)
    index = [None] * seen["before"].dim()
    index[dim] = slice(None)
    assert torch.equal(seen["after"], seen["before"] * gate.weight[tuple(index)])


MAPPED = {  # passes on parameters, new and so neutral
    "lora_weight": {"rank": 2},
    "dora": {"rank": 2},
    "loha": {"rank": 2},
    "lokr": {"rank": 1},
    "oft": {"block_size": 2},
    "boft": {"block_size": 2},
    "weight_norm": {},
    "bitfit": {},
}


def odd(weight):
    """The same values with another order of memory, and a hole behind each row."""
    held = torch.empty(*reversed(weight.shape[1:]), 2 * weight.shape[0], dtype=weight.dtype)[..., ::2]
    return held.permute(*reversed(range(weight.dim()))).copy_(weight)


@sweep("name", MAPPED, 0, 1)
@pytest.mark.parametrize(
    ("memory", "dtype"), [("channels_last", torch.float32), ("odd", torch.float32), ("odd", torch.bfloat16)]
)
def test_a_mapped_parameter_is_neutral_to_the_last_bit_in_every_order_of_memory(name, memory, dtype):
    torch.manual_seed(0)
    layers = nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.Flatten(), nn.Linear(72, 4)
    model = nn.Sequential(*layers).eval().to(dtype)
    x = torch.randn(2, 4, 5, 5).to(dtype)
    if memory == "odd":
        with torch.no_grad():
            for layer in (model[0], model[2], model[4]):
                layer.weight.data = odd(layer.weight)
    else:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    gm = fxplug.trace(model, (x,))
    new = fxplug.apply(gm, fxplug.load_pass(name, at="**", **MAPPED[name]))
    found = {c.name: (c.status, c.detail) for c in fxplug.verify(gm, new, (x,), compile=False).checks}
    assert found["neutral"][0] == "ok"
    with torch.no_grad():
        for batch in (1, 3):
            for given in (torch.randn(batch, 4, 5, 5).to(dtype), torch.randn(batch, 5, 5, 4).to(dtype).permute(0, 3, 1, 2)):
                assert torch.equal(new(given), gm(given))
