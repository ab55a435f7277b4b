"""What does not train keeps its parameters, buffers and statistics to the bit, whatever kind of norm has them."""

from __future__ import annotations

import pytest
import small
import torch
from runs import Digits
from timm.layers import BatchNormAct2d, FrozenBatchNormAct2d
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import fxplug
from fxplug.lowerings.frozen_norms import HeldBuffers, freeze_norms


class Momentum(nn.Module):
    """A part of somebody's that counts its calls and keeps a mean, without parameters."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.calls.add_(1)
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 2, 3)))
        return x - self.mean[:, None, None]


class Flat(nn.Module):
    """A norm of other dimensions than an image has."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x.flatten(2)).reshape(x.shape)


class Deep(Flat):
    def forward(self, x):
        return self.norm(x[:, :, None])[:, :, 0]


class Net(nn.Module):
    """A norm at the root, one inside a part, and layers that train."""

    def __init__(self, make):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), make()
        self.part = nn.Sequential(nn.Conv2d(8, 8, 1), make())
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 10)

    def forward(self, x):
        x = self.part(self.norm(self.conv(x)).relu()).mean((2, 3))
        return self.head(x + self.body(x))


NORMS = {
    "batch": lambda: nn.BatchNorm2d(8),
    "batch, affine-free": lambda: nn.BatchNorm2d(8, affine=False),
    "batch, cumulative": lambda: nn.BatchNorm2d(8, affine=False, momentum=None),
    "batch1d": lambda: Flat(nn.BatchNorm1d(8, affine=False)),
    "batch3d": lambda: Deep(nn.BatchNorm3d(8, affine=False)),
    "sync": lambda: nn.SyncBatchNorm(8, affine=False),
    "instance": lambda: nn.InstanceNorm2d(8, track_running_stats=True),
    "instance, affine": lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
    "timm": lambda: BatchNormAct2d(8),
    "timm, affine-free": lambda: BatchNormAct2d(8, affine=False),
    "timm, frozen": lambda: FrozenBatchNormAct2d(8),
    "spectral": lambda: spectral_norm(nn.Conv2d(8, 8, 1)),
    "spectral, of old": lambda: nn.utils.spectral_norm(nn.Conv2d(8, 8, 1)),
    "one's own": Momentum,
}
WAYS = {"eager": {}, "checkpointed": {"checkpointing": ["part"]}, "compiled": {"compile": True}}


def made(kind):
    net = small.seeded(lambda: Net(NORMS[kind]))
    return fxplug.trace(net, torch.randn(2, 3, 16, 16))


def buffers(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def changed(before, module):
    return sorted(name for name, buffer in module.named_buffers() if not torch.equal(buffer, before[name]))


def fit(gm, **given):
    common = {"steps": 3, "batch": 8, "device": "cpu", "quiet": True, "log": {"tensorboard": False}}
    trainer = fxplug.Trainer(gm, {"classify": {"augment": "none"}}, Digits(), **{**common, **given})
    trainer.fit()
    return trainer


@pytest.mark.parametrize("kind", NORMS)
def test_a_run_of_lora_leaves_every_buffer_and_what_trains_does_not(kind):
    new = fxplug.apply(made(kind), fxplug.load_pass("lora", at="body", rank=2))
    before, weights = buffers(new), {name: p.clone() for name, p in new.named_parameters()}
    fit(new)
    assert changed(before, new) == []
    moved = {name.split(".")[0] for name, p in new.named_parameters() if not torch.equal(p, weights[name])}
    assert moved == {"lora"}
    whole = made(kind)  # and the same of what trains is not held
    before = buffers(whole)
    fit(whole, trainable=["**"])
    assert bool(changed(before, whole)) == (kind != "timm, frozen")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["checkpointed", "compiled"])
@pytest.mark.parametrize("kind", ["batch, affine-free", "timm, affine-free", "spectral", "one's own"])
def test_so_does_one_that_is_lowered(kind, way):
    new = fxplug.apply(made(kind), fxplug.load_pass("lora", at="body", rank=2))
    before = buffers(new)
    fit(new, **WAYS[way])
    assert changed(before, new) == []


@pytest.mark.parametrize(
    ("trainable", "expected"),
    [
        (["head"], set()),
        (["conv"], set()),
        (["part.0"], set()),
        (["part"], {"part.1"}),
        (["part.*"], {"part.1"}),
        (["norm", "head"], {"norm"}),
        (["re:norm|part.*"], {"norm", "part.1"}),
        (["**"], {"norm", "part.1"}),
    ],
)
def test_a_norm_without_weights_trains_where_it_is_named(trainable, expected):
    gm = made("batch, affine-free")
    before = buffers(gm)
    fit(gm, trainable=trainable)
    assert {name.rpartition(".")[0] for name in changed(before, gm)} == expected


def test_a_norm_with_weights_trains_with_one_of_them():
    gm = made("batch")
    before = buffers(gm)
    fit(gm, trainable=["part.1.bias"])
    assert {name.rpartition(".")[0] for name in changed(before, gm)} == {"part.1"}


def test_a_model_that_is_a_norm_itself():
    for norm in (nn.BatchNorm2d(3, affine=False), nn.BatchNorm2d(3), BatchNormAct2d(3)):
        gm = small.traced(norm.train(), torch.randn(4, 3, 6, 6)).gm
        before, x = buffers(gm), torch.randn(4, 3, 6, 6)
        held = freeze_norms(gm, lambda name: True).train()
        assert torch.equal(held(x), gm.eval()(x)) and changed(before, gm) == []
        free = freeze_norms(gm, ()).train()
        free(x)
        assert changed(before, gm) == ["num_batches_tracked", "running_mean", "running_var"]


def test_what_is_written_between_the_steps_stays():
    gm = made("one's own")
    own = dict(gm.named_buffers())
    held = HeldBuffers(own, buffers(gm))
    with held.unchanged():
        own["norm.mean"].add_(1)
    assert own["norm.mean"].sum() == 0
    own["norm.mean"].add_(2)  # by a plugin, after a step
    with pytest.raises(ZeroDivisionError), held.unchanged():
        own["norm.mean"].add_(1)
        raise ZeroDivisionError
    assert own["norm.mean"].sum() == 16
    with held.unchanged():
        pass
    assert own["norm.mean"].sum() == 16
