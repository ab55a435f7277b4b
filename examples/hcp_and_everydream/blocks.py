"""A plugin for HCP-Diffusion: only the import of its base class is another."""

from torch import nn

from fxplug.compat.hcp import PluginBlock  # was: from hcpdiff.models.plugin import PluginBlock


class Skip(PluginBlock):
    """What one convolution gets, added to what another gets, zero when new."""

    def __init__(self, name, from_layer, to_layer, **kwargs):
        super().__init__(name, from_layer, to_layer)
        self.layer = nn.Conv2d(from_layer["layer"].in_channels, to_layer["layer"].in_channels, 3, padding=1)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, fea_from_in, fea_in, fea_out):
        return (fea_in[0] + self.layer(fea_from_in[0]),)
