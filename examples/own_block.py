"""A block of one's own on a timm model, without touching timm's source."""

import timm
import torch
from torch import Tensor, nn

import fxplug


class TokenMixer(nn.Module):
    """Adds to each token a learned share of the mean of all tokens. Zero when new, so it changes nothing."""

    neutral = True

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.share = nn.Parameter(torch.zeros(width))

    @classmethod
    def at(cls, site: fxplug.Site) -> "TokenMixer":
        """A block for the place that a rule found; `site.y` is the value there."""
        return cls(site.y.shape[-1])

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.share * tokens.mean(1, keepdim=True)


model = timm.create_model("vit_tiny_patch16_224", img_size=64).eval()
image = torch.randn(1, 3, 64, 64)
gm = fxplug.trace(model, (image,))

# the same as a YAML file:   rules: [{match: {path: "blocks.*.mlp"}, use: "own_block:TokenMixer", args: [y]}]
rule = fxplug.Rule(fxplug.Match(path="blocks.*.mlp"), use=TokenMixer, args=["y"], expect=12)
new = fxplug.apply(gm, fxplug.Pass("mixer", rules=[rule]))

print(fxplug.verify(gm, new, (image,)))
print("\n".join(fxplug.diff(gm, new).splitlines()[:9]))
