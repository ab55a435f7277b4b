"""Plugins written for HCP-Diffusion, in the graph of a timm model: only the import of their base class is another.

For a whole file of plugins:   fxplug convert hcp plugin.yaml -o config.yaml --model vit_tiny_patch16_224
"""

import timm
import torch
from torch import nn

import fxplug
from fxplug.compat.hcp import PluginBlock, SinglePluginBlock  # was: from hcpdiff.models.plugin import ...


class Skip(PluginBlock):
    """The residual connection of HCP-Diffusion's guide, zero when new."""

    def __init__(self, name, from_layer, to_layer, **kwargs):
        super().__init__(name, from_layer, to_layer)
        self.layer = nn.Linear(from_layer["layer"].in_features, to_layer["layer"].out_features)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, fea_from_in, fea_in, fea_out):
        return fea_out + self.layer(fea_from_in[0])


class Counter(SinglePluginBlock):
    """Counts its calls, which hooks allow and a graph cannot."""

    calls = 0

    def forward(self, fea_in, fea_out):
        self.calls += 1
        return fea_out * self.calls


model = timm.create_model("vit_tiny_patch16_224", img_size=64).eval()
image = torch.randn(1, 3, 64, 64)
gm = fxplug.trace(model, (image,))

places = {"to": "blocks.*.mlp.fc2", "args": ["blocks.*.mlp.fc1:in[:]", "blocks.*.mlp.fc1:out[:]", "x[:]", "y[:]"]}
new = fxplug.apply(gm, fxplug.load_pass("hcp/pair", name="skip", plugin=Skip, **places))
print(f"{len(new.meta['passes'][0]['sites'])} skips, same output while new:", torch.equal(new(image), gm(image)))

compiled = torch.compile(new, fullgraph=True, backend="eager")
compiled(image).sum().backward()
weight = new.get_parameter("skip.blocks.0.mlp.fc2.PairPlugin.plugin.layer.weight")
print("a gradient through one compiled graph:", bool(weight.grad.abs().max() > 0))

try:
    fxplug.apply(gm, fxplug.load_pass("hcp/single", name="count", plugin=Counter, layers="head"))
except fxplug.FxplugError as error:
    print(str(error).partition(". A graph")[0])
