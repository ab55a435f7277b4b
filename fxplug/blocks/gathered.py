"""A bank of which each sample multiplies the factors of its own adapters alone, whatever the number of slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import CONVOLUTIONS, check_count
from .lora import Lora

if TYPE_CHECKING:
    from ..core.rewriter.sites import Site


class GatheredLora(Lora):
    """y + up(weight * down(x)) with the factors of each sample's own slots, as S-LoRA gathers them (arXiv 2311.03285).

    It is the bank of `Lora`, with one slot more that holds zeros: a sample with fewer adapters takes that. Its products
    are those of `per_sample` adapters for each sample, so that a sample's bits do not depend on what the others take.
    `weight` is float32 (batch, per_sample), `which` int64 (batch, per_sample): what `Gates` gives.
    """

    update_kind = Lora.update_kind
    by_sample = ""

    @classmethod
    def at(  # type: ignore[override]  # other options are named there
        cls, site: Site, per_sample: int = 0, slots: int = 0, **options: Any
    ) -> GatheredLora:
        """Make the bank of a layer as `Lora.at` does, for `slots` adapters."""
        check_count("per_sample", per_sample)
        made = super().at(site, slots=slots + 1, **options)
        assert isinstance(made, cls)
        return made

    def forward(
        self, x: Tensor, y: Tensor, weight: Tensor | None = None, which: Tensor | None = None
    ) -> Tensor:
        if weight is None or which is None:
            return super().forward(x, y)
        if self.same_padding:
            x = self.pad(x, y)
        space = len(self.geometry.get("kernel_size", ()))
        least = 1 + space if space else 0
        batch, first = which.shape[0], self.batch_dim
        if first < 0 or x.dim() <= least + (self.kind == "Linear") or not batch or x.shape[first] % batch:
            return self.banked(x, y, self.spread(weight, which))  # no samples in it: what all of them take
        if first:
            return self.gathered(x.transpose(0, 1), y.transpose(0, 1), weight, which).transpose(0, 1)
        return self.gathered(x, y, weight, which)

    def spread(self, weight: Tensor, which: Tensor) -> Tensor:
        """Return the rows of a bank, (batch, slots * rank), for the slots that each sample takes."""
        rows = weight.new_zeros(weight.shape[0], self.slots).scatter_add(1, which, weight)
        return rows.repeat_interleave(self.rank, 1)

    def gathered(self, x: Tensor, y: Tensor, weight: Tensor, which: Tensor) -> Tensor:
        """Return y with the updates of each sample, the samples in the first dimension of both."""
        if self.kind in CONVOLUTIONS:
            return self.convolved(x, y, weight, which)
        batch, ranked = which.shape[0], (self.slots, self.rank)
        down: Any = self.down.weight
        up: Any = self.up.weight
        up = up.unflatten(1, ranked).permute(1, 2, 0)[which].flatten(1, 2)
        if self.kind == "Embedding":
            index = x.reshape(batch, -1)
            hidden = down.unflatten(1, ranked)[index[:, :, None], which[:, None]].flatten(2)
        else:
            down = down.unflatten(0, ranked)[which].flatten(1, 2)
            hidden = torch.bmm(x.reshape(batch, -1, x.shape[-1]), down.transpose(1, 2))
        hidden = (hidden * weight.repeat_interleave(self.rank, 1)[:, None]).to(hidden.dtype)
        return torch.add(y, torch.bmm(hidden, up).view(y.shape))

    def convolved(self, x: Tensor, y: Tensor, weight: Tensor, which: Tensor) -> Tensor:
        """Return y with the updates of each sample, for a convolution: one of as many groups as there are samples."""
        if x.shape[0] != which.shape[0]:  # several pictures of each sample
            times = x.shape[0] // which.shape[0]
            weight, which = weight.repeat_interleave(times, 0), which.repeat_interleave(times, 0)
        layer: Any = self.down
        batch, groups = which.shape[0], self.geometry.get("groups", 1)
        rank, kernel = self.rank_within(groups), self.geometry["kernel_size"]
        down = layer.weight.unflatten(0, (groups, self.slots, rank))[:, which].transpose(0, 1)  # batch, groups, K, rank, ...
        up: Any = self.up.weight
        up = up.flatten(1).unflatten(0, (groups, -1)).unflatten(2, (self.slots, rank))[:, :, which]
        up = up.permute(2, 0, 1, 3, 4).flatten(3).flatten(0, 1)
        padding = layer.padding
        if layer.padding_mode != "zeros":
            x = F.pad(x, _list_padding(layer), mode=layer.padding_mode)
            padding = 0
        if all(k == s == 1 for k, s in zip(kernel, layer.stride, strict=True)) and padding in (0, (0,) * len(kernel)):
            halves = down.flatten(2, 3).flatten(0, 1).flatten(2)
            hidden = torch.bmm(halves, x.reshape(batch * groups, x.shape[1] // groups, -1))
        else:
            convolve: Any = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(kernel)]
            wide = x.reshape(1, -1, *x.shape[2:])
            hidden = convolve(wide, down.flatten(0, 3), None, layer.stride, padding, layer.dilation, batch * groups)
            hidden = hidden.view(batch * groups, which.shape[1] * rank, -1)
        gates = weight.repeat_interleave(rank, 1).repeat_interleave(groups, 0)[..., None]
        return torch.add(y, torch.bmm(up, (hidden * gates).to(hidden.dtype)).view(y.shape))


def _list_padding(layer: Any) -> list[int]:
    """Return what a convolution pads, as torch.nn.functional.pad takes it: the last dimension first, both of its sides."""
    around: list[int] = []
    for i, (kernel, dilation) in enumerate(zip(layer.kernel_size, layer.dilation, strict=True)):
        total = dilation * (kernel - 1)
        own = {"same": [total // 2, total - total // 2], "valid": [0, 0]}
        around = [*(own[layer.padding] if isinstance(layer.padding, str) else [layer.padding[i]] * 2), *around]
    return around
