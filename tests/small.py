"""Small models that several test files share: each is built and traced once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import zoo
from torch import nn
from typer.testing import CliRunner

import fxplug
from fxplug.core.spec.pass_file import list_shipped, open_pass

# the passes that have rules; parallel ones have a test of their own
PASSES = [name for name in list_shipped("passes") if "rules" in open_pass(name).source.data]

@dataclass(frozen=True, eq=False)
class Traced:
    """A model, its graph, and an example call."""

    model: nn.Module
    gm: fxplug.core.capture.tracer.TracedModule
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __iter__(self):
        return iter((self.gm, self.args, self.kwargs))


def traced(model: nn.Module, *args: Any, **kwargs: Any) -> Traced:
    return Traced(model, fxplug.trace(model, args, kwargs), args, kwargs)


def command(*words: Any) -> Any:
    """What `fxplug` with these words does: `exit_code`, `stdout`, `stderr`, and both as `output`."""
    from fxplug.__main__ import app  # which some tests do without

    return CliRunner().invoke(app, list(map(str, words)), prog_name="fxplug")


def load_and_use(module, source, name="it", **options):
    """Put an adapter into a slot, and let calls take it."""
    module.adapters.load(name, source, **options)
    module.adapters.use(name)


def seeded(make):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


@cache
def vit() -> Traced:
    """A ViT of two blocks whose attention dropout makes two graphs, one a mode."""
    import timm

    options = {"img_size": 32, "depth": 2, "num_classes": 10, "attn_drop_rate": 0.1}
    model = seeded(lambda: timm.create_model("vit_tiny_patch16_224", **options)).eval()
    return traced(model, seeded(lambda: torch.randn(2, 3, 32, 32)))


@cache
def plain_vit() -> Traced:
    """A narrower one with one graph for both modes."""
    import timm

    options = {"img_size": 32, "depth": 2, "num_classes": 10, "embed_dim": 96}
    model = seeded(lambda: timm.create_model("vit_tiny_patch16_224", **options)).eval()
    return traced(model, seeded(lambda: torch.randn(2, 3, 32, 32)))


@cache
def unet() -> Traced:
    """A UNet in the style of SD 1.5 with one layer a level."""
    (case,) = (c for c in zoo.cases() if c.name == "diffusers/UNet2DConditionModel-sd15")
    args, kwargs = case.inputs(batch=2)
    return traced(case.build(), *args, **kwargs)


def unet_xl() -> Traced:
    """A UNet in the style of SDXL with three levels."""
    import unets

    return unets.sdxl()


def features(gm: nn.Module, adapter_type: str = "full_adapter") -> nn.Module:
    """A T2I-Adapter for one of these UNets."""
    from diffusers import T2IAdapter

    channels = list(gm.config.block_out_channels)
    xl = adapter_type == "full_adapter_xl"
    network = T2IAdapter(3, [*channels, channels[-1]] if xl else channels, 1, 16 if xl else 8, adapter_type).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(2)  # loud, so that training has something to lower
    return network


@cache
def lite() -> Traced:
    """EfficientNet-Lite0: timm's Conv2dSame, depthwise convolutions, batch norm."""
    (case,) = (c for c in zoo.cases() if c.name == "timm/tf_efficientnet_lite0")
    args, kwargs = case.inputs(batch=2)
    return traced(case.build(), *args, **kwargs)


def net(forward, **parts: Any) -> nn.Module:
    """A module of a class of its own: `net(lambda self, x: self.b(self.a(x)), a=nn.Linear(2, 3), b=nn.Linear(3, 4))`."""
    made = type("Net", (nn.Module,), {"forward": forward, "__module__": forward.__module__})()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


class Call(nn.Module):
    """A function of a tensor and of layers as a module."""

    def __init__(self, function, *inner: nn.Module) -> None:
        super().__init__()
        self.function, self.inner = function, nn.ModuleList(inner)

    def forward(self, x):
        return self.function(x, *self.inner)


class Layers(nn.Module):
    """One layer of each kind that LoRA fits, a grouped convolution among them."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 12)
        self.conv1 = nn.Conv1d(12, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(2, 8, 3, padding="same", dilation=2)
        self.grouped = nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=4, padding_mode="reflect")
        self.conv3 = nn.Conv3d(1, 4, 2, bias=False)
        self.out = nn.Linear(4, 5)

    def forward(self, words):
        x = self.conv1(self.table(words).transpose(1, 2))
        x = self.grouped(self.conv2(x.unflatten(1, (2, 4))).relu())
        x = self.conv3(x.unsqueeze(1)).mean((2, 3, 4))
        return self.out(x)


@cache
def layers() -> Traced:
    words = torch.arange(22).reshape(2, 11) % 11
    return traced(seeded(Layers).eval(), words)
