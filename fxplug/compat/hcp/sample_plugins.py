"""A plugin of each of HCP-Diffusion's kinds, as small as can be, and a checkpoint: what the pages of passes/hcp show."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .base_classes import MultiPluginBlock, PatchPluginBlock, PatchPluginContainer, PluginBlock, SinglePluginBlock


class Gain(SinglePluginBlock):
    """The layer's result times a learned number."""

    wrapable_classes = (nn.Linear,)

    def __init__(self, name: str, host: nn.Module, gain: float = 1.1, **kwargs: Any) -> None:
        super().__init__(name, host)
        self.gain = nn.Parameter(torch.tensor(gain))

    def forward(self, fea_in: tuple[Any, ...], fea_out: Tensor) -> Tensor:
        return fea_out * self.gain


class WeightGain(SinglePluginBlock):
    """The layer's weight times a learned number."""

    def __init__(self, name: str, host: nn.Module, gain: float = 1.1, **kwargs: Any) -> None:
        super().__init__(name, host, hook_param="weight")
        self.gain = nn.Parameter(torch.tensor(gain))

    def forward(self, host_param: Tensor) -> Tensor:
        return host_param * self.gain


class SkipPlugin(PluginBlock):
    """Adds a linear map of what one layer gets to the result of another; `pre_hook:` on the latter adds it to its input."""

    def __init__(self, name: str, from_layer: dict[str, Any], to_layer: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(name, from_layer, to_layer)
        side = "in_features" if to_layer["pre_hook"] else "out_features"
        self.layer = nn.Linear(from_layer["layer"].in_features, getattr(to_layer["layer"], side))

    def forward(self, fea_from_in: tuple[Any, ...], fea_in: tuple[Any, ...], fea_out: Any) -> Any:
        more = self.layer(fea_from_in[0])
        return (fea_in[0] + more,) if fea_out is None else fea_out + more


class Mean(MultiPluginBlock):
    """What each to-layer gives, or gets, grows with the mean of what the from-layers get, by a learned factor."""

    def __init__(self, name: str, from_layers: Any, to_layers: Any, host_model: nn.Module | None = None) -> None:
        super().__init__(name, from_layers, to_layers, host_model)
        self.gains = nn.Parameter(torch.ones(len(to_layers)))

    def forward(self, feat: list[tuple[Any, ...]]) -> list[Tensor]:
        mean = torch.stack([x[0].mean() for x in feat]).mean()
        return [mean * gain for gain in self.gains]

    def to_layer_hook(self, host: nn.Module, fea_in: tuple[Any, ...], fea_out: Any, idx: int) -> Any:
        """Return the result of to-layer `idx`, or its input with `pre_hook`, times one more than its member."""
        more = 1 + self.feat_to[idx]
        return (fea_in[0] * more,) if fea_out is None else fea_out * more


class Sum(PatchPluginContainer):
    """The sum of what its plugins give, in the place of the module."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = 0.0
        for _, plugin in self:
            output = plugin.post_forward(output, *args, **kwargs)
        return output


class PReLU(PatchPluginBlock):
    """A learned slope in the place of an activation."""

    container_cls = Sum
    wrapable_classes = (nn.SiLU, nn.GELU)

    def __init__(self, *args: Any, slope: float = 0.2, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.act = nn.PReLU(init=slope)

    def post_forward(self, output: Any, x: Tensor) -> Tensor:
        """Return the sum so far plus the activation of x."""
        result: Tensor = output + self.act(x)
        return result


class Factor(PatchPluginBlock):
    """A patch with a learned number."""

    def __init__(self, *args: Any, factor: float = 1.1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.factor = nn.Parameter(torch.tensor(factor))


class Times(Factor):
    """A module's result times a learned number."""

    def post_forward(self, output: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the result times the number."""
        return output * self.factor


class TimesInput(Factor):
    """A module's input times a learned number."""

    def pre_forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the first argument times the number, and the others unchanged."""
        return (x * self.factor, *args), kwargs


def make_checkpoint() -> dict[str, dict[str, Tensor]]:
    """Return the contents of a file of low-rank updates, here of rank 2 for one layer of a ViT of width 192."""
    path = "blocks.0.attn.proj.___."
    return {"lora": {f"{path}layer.W_down": torch.full((2, 192), 0.01), f"{path}layer.W_up": torch.full((192, 2), 0.01)}}


class Residual(Factor):
    """Adds what a module gets to what it gives, times a learned number, and scales what it gets by another."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.share = nn.Parameter(torch.tensor(0.1))

    def pre_forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the first argument times the number, and store it for `post_forward`."""
        self.given = x
        return (x * self.factor, *args), kwargs

    def post_forward(self, output: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the result plus a share of the stored argument."""
        return output + self.share * self.given
