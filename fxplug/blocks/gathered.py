"""Banks of which each sample multiplies the factors of its own adapters alone, whatever the number of slots."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.errors import SpecError, quote
from ..core.ir.containers import find_tensor
from ..core.spec.addresses import is_covered
from ..core.torch_internals.tensors import is_watched, version
from .base import CONVOLUTIONS, check_count
from .levels import find_level
from .lora import Lora
from .low_rank import divide_by_norm, multiply_groups, view_slot

if TYPE_CHECKING:
    from ..core.rewriter.sites import Site


class GatheredLora(Lora):
    """y + up(weight * down(x)) with the factors of each sample's own slots, as S-LoRA gathers them (arXiv 2311.03285).

    It is the bank of `Lora`, with one slot more that holds zeros: a sample with fewer adapters takes that. Its products
    are those of `per_sample` adapters for each sample, so that a sample's bits do not depend on what the others take.
    `weight` is float32 (batch, per_sample), `which` int64 (batch, per_sample): what `Gates` gives. Of a pass with groups
    `weight` is (batch, groups, per_sample), of which the layer takes that of its `group`. Of one with regions `places` are the
    shares of the layers without places, (batch, per_sample), and then of each level, (batch, per_sample, places): the layer
    takes that at its `level`; `text`, "before" or "after", says where it has tokens without places beside those.
    """

    update_kind = Lora.update_kind
    by_sample = ""

    def __init__(
        self,
        kind: str,
        in_features: int,
        out_features: int,
        rank: int = 8,
        alpha: float | None = None,
        dropout: float = 0.0,
        geometry: Mapping[str, Any] | None = None,
        same_padding: bool = False,
        bias: bool = False,
        rslora: bool = False,
        alpha_auto_scale: bool = True,
        slots: int = 0,
        batch_dim: int = 0,
        group: int = -1,
        level: int = 0,
        text: str = "",
    ) -> None:
        """Create the layers. Raises SpecError as `Lora`."""
        super().__init__(
            kind, in_features, out_features, rank, alpha, dropout, geometry, same_padding, bias, rslora, alpha_auto_scale,
            slots, batch_dim, group,
        )  # fmt: skip
        self.level, self.text = level, text

    @classmethod
    def at(  # type: ignore[override]  # other options are named there
        cls, site: Site, per_sample: int = 0, slots: int = 0, groups: Sequence[str] | None = None, regions: bool = False,
        **options: Any,
    ) -> GatheredLora:  # fmt: skip
        """Make the bank of a layer as `Lora.at` does, for `slots` adapters; `groups` are patterns, of which the first that
        covers the layer gives its group, and 0 is that of the rest. With `regions` the table of the pass has the
        levels of the model. Raises SpecError as `levels.find_level`."""
        check_count("per_sample", per_sample)
        made = super().at(site, slots=slots + 1, **options)
        assert isinstance(made, cls)
        if groups is not None:
            path = site.path.partition("@")[0]
            made.group = 1 + next((index for index, pattern in enumerate(groups) if is_covered(pattern, path)), -1)
        if regions:
            made.level, made.text = find_level(site, made.batch_dim)
        return made

    def bank(self) -> dict[str, Any]:
        return {**super().bank(), **({"group": self.group} if self.group > 0 else {})}

    def forward(
        self, x: Tensor, y: Tensor, weight: Tensor | None = None, which: Tensor | None = None,
        places: Sequence[Tensor] = (),
    ) -> Tensor:
        if weight is None or which is None:
            return super().forward(x, y, weight)
        if self.group >= 0:
            weight = weight[:, self.group]
        if places and not self.level:
            weight = weight * places[0]
        if self.same_padding:
            x = self.pad(x, y)
        space = len(self.geometry.get("kernel_size", ()))
        least = 1 + space if space else 0
        batch, first = which.shape[0], self.batch_dim
        if first < 0 or x.dim() <= least + (self.kind == "Linear") or not batch or x.shape[first] % batch:
            return self.shared(x, y, weight, which)
        if places and self.level > 0:
            count = math.prod(y.shape[2:] if space else [size for dim, size in enumerate(y.shape[:-1]) if dim != first])
            weight = self.place(weight, places[0], places[self.level], count)
        if first:
            return self.gathered(x.transpose(0, 1), y.transpose(0, 1), weight, which).transpose(0, 1)
        return self.gathered(x, y, weight, which)

    def place(self, weight: Tensor, rest: Tensor, mask: Tensor, count: int) -> Tensor:
        """Return the weight of each slot at each place of the layer's result, (batch, per_sample, places).

        Raises SpecError for another number of places than the graph of the model leads to.
        """
        more = count - mask.shape[-1]
        if self.text and more > 0:
            others = rest[..., None].expand(-1, -1, more)
            mask = torch.cat([others, mask] if self.text == "before" else [mask, others], -1)
        elif more != 0:
            raise SpecError(
                f"a layer with regions gives {count} places for a picture, and its graph leads to {mask.shape[-1]} for latents "
                "of this size: take another size"
            )
        return weight[..., None] * mask

    def shared(self, x: Tensor, y: Tensor, weight: Tensor, which: Tensor) -> Tensor:
        """Return y with the update that all samples take, where x has no samples; NaN where they differ."""
        return self.banked(x, y, self.spread(weight, which))

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
        up = up.unflatten(1, ranked).permute(1, 2, 0)[which]
        if (factor := self.factor(which)) is not None:
            up = (up * factor[:, :, None]).to(up.dtype)
        up = up.flatten(1, 2)
        if self.kind == "Embedding":
            index = x.reshape(batch, -1)
            hidden = down.unflatten(1, ranked)[index[:, :, None], which[:, None]].flatten(2)
        else:
            down = down.unflatten(0, ranked)[which].flatten(1, 2)
            hidden = torch.bmm(x.reshape(batch, -1, x.shape[-1]), down.transpose(1, 2))
        gates = weight.repeat_interleave(self.rank, 1)
        hidden = (hidden * (gates[:, None] if gates.dim() == 2 else gates.transpose(1, 2))).to(hidden.dtype)
        return self.add(y, torch.bmm(hidden, up).view(y.shape), weight, which)

    def factor(self, which: Tensor) -> Tensor | None:
        """Return what the outputs of these slots' products are multiplied by, (*which.shape, out); None for nothing."""
        return None

    def add(self, y: Tensor, update: Tensor, weight: Tensor, which: Tensor) -> Tensor:
        """Return a layer's result with the update of each sample, the samples in the first dimension of both."""
        return torch.add(y, update)

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
        up = up.permute(2, 0, 1, 3, 4)  # batch, groups, out / groups, K, rank
        if (factor := self.factor(which)) is not None:
            up = (up * torch.unflatten(factor, 2, (groups, -1)).permute(0, 2, 3, 1)[..., None]).to(up.dtype)
        up = up.flatten(3).flatten(0, 1)
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
        gates = weight.repeat_interleave(rank, 1).repeat_interleave(groups, 0)
        gates = gates[..., None] if gates.dim() == 2 else gates
        return self.add(y, torch.bmm(up, (hidden * gates).to(hidden.dtype)).view(y.shape), weight, which)


class GatheredDora(GatheredLora):
    """A `GatheredLora` whose slots may hold DoRA (Liu et al. 2024, arXiv 2402.09353) and (IA)3 (Liu et al. 2022, arXiv
    2205.05638) too: a low-rank update and a gain of the layer's result.

    An adapter taken with weight r adds r (gain * y + shift + (1 + gain) * up(down(x))) to y. LoRA has no gain. DoRA's is
    magnitude / |W + up @ down| - 1 for each output channel, and its shift takes the bias out: -gain * bias. (IA)3's is its
    gate less one. Several adapters add up. `gain` and `shift`, (slots, out), are made of a slot's `magnitude`, which is zero
    where it holds no DoRA, and of the base by `make_gain`. A layer that is not `biased` has no shift.
    """

    update_kind = Lora.update_kind
    layers = ("Linear", "TransposedLinear", *CONVOLUTIONS, "Embedding")
    gains = ("gain", "shift")  # what `make_gain` gives
    about_place = ("layer",)
    magnitude: nn.Parameter
    gain: nn.Parameter
    shift: nn.Parameter

    def __init__(
        self,
        kind: str,
        in_features: int,
        out_features: int,
        rank: int = 8,
        alpha: float | None = None,
        dropout: float = 0.0,
        geometry: Mapping[str, Any] | None = None,
        same_padding: bool = False,
        bias: bool = False,
        rslora: bool = False,
        alpha_auto_scale: bool = True,
        slots: int = 0,
        batch_dim: int = 0,
        group: int = -1,
        level: int = 0,
        text: str = "",
        biased: bool = True,
        layer: str = "",
        transposed: bool = False,
    ) -> None:
        """Create the bank; `biased` says whether the layer has a bias, `layer` is its path, and `transposed` whether its weight
        is (in, out). Raises SpecError as `Lora`."""
        super().__init__(
            kind, in_features, out_features, rank, alpha, dropout, geometry, same_padding, bias, rslora, alpha_auto_scale,
            slots, batch_dim, group, level, text,
        )  # fmt: skip
        self.biased, self.layer, self.transposed = biased, layer, transposed
        for name in ("magnitude", *self.gains[: 1 + biased]):
            self.register_parameter(name, nn.Parameter(torch.zeros(slots, out_features), requires_grad=False))

    @classmethod
    def at(  # type: ignore[override]  # other options are named there
        cls, site: Site, by: str = "output", **options: Any
    ) -> GatheredDora:
        """Make the bank of a layer as `Lora.at` does. Raises SpecError for `by` other than output, and for an Embedding with
        max_norm."""
        if by != "output":
            raise SpecError(
                f"by={quote(by)} has magnitudes of the inputs, and with per_sample an adapter acts on the layer's result: "
                "leave one of the two out"
            )
        if getattr(site.module, "max_norm", None) is not None:
            raise SpecError("max_norm changes this Embedding whenever it is read, so no gain is known: leave it out of `at`")
        made = super().at(site, **options)
        assert isinstance(made, cls)
        biased = getattr(site.module, "bias", None) is not None
        if not biased:
            del made.shift
        made.biased, made.layer, made.transposed = biased, site.path.partition("@")[0], "TransposedLinear" in site.classes
        return made

    def bank(self) -> dict[str, Any]:
        return {**super().bank(), "parameters": ["down", "up", "magnitude", *self.gains[: 1 + self.biased]]}

    def make_gain(self, slot: int, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        """Return the gain of the DoRA in a slot, and its shift where the layer is biased, for these weights of the layer."""
        down, up, magnitude = self.down.weight, self.up.weight, self.magnitude[slot]
        embedding = self.kind == "Embedding"
        down = view_slot(down, slot, self.slots, 0 if embedding else self.geometry.get("groups", 1))  # type: ignore[arg-type]
        up = view_slot(up, slot, self.slots)  # type: ignore[arg-type]
        return compute_gain(weight.T if self.transposed or embedding else weight, bias, down, up, magnitude)

    @torch.no_grad()
    def after_load(self, root: Any) -> None:
        """Make the gains anew, of a layer of this module whose weights were loaded."""
        slots = [] if self.magnitude.is_meta else self.magnitude.any(1).nonzero()[:, 0].tolist()
        if not slots:
            return
        names = [root.meta.get("originals", {}).get(name, name) for name in (f"{self.layer}.weight", f"{self.layer}.bias")]
        weight, bias = (find_base(root, name) for name in names)
        if weight is None or weight.is_meta:
            return
        for slot in slots:
            for name, value in zip(self.gains, self.make_gain(slot, weight, bias), strict=False):
                getattr(self, name)[slot].copy_(value)

    def find_gains(self, which: Tensor) -> bool:
        """Return whether one of these slots may have a gain.

        Returns True where values are not read: under a compiler, and on a GPU, which would be synchronised. What was read is
        kept with the tensors until they are written.
        """
        own = self.gain
        if is_watched() or type(which) is not Tensor or not which.is_cpu or which.is_inference() or own.is_inference():
            return True
        taken, known = vars(which).get("_taken"), vars(own).get("_gained")
        if taken is None or taken[0] != (id(which), version(which)):
            taken = vars(which)["_taken"] = (id(which), version(which)), set(which.flatten().tolist())
        if known is None or known[0] != (id(own), version(own)):
            known = vars(own)["_gained"] = (id(own), version(own)), set(own.any(1).nonzero()[:, 0].tolist())
        return not known[1].isdisjoint(taken[1])

    def factor(self, which: Tensor) -> Tensor | None:
        return 1 + _widen(self.gain[which]) if self.find_gains(which) else None

    def add(self, y: Tensor, update: Tensor, weight: Tensor, which: Tensor) -> Tensor:
        if not self.find_gains(which):
            return torch.add(y, update)
        batch, sizes = which.shape[0], [1] * (y.dim() - 1)
        sizes[0 if self.kind in CONVOLUTIONS else -1] = self.out_features
        names = self.gains[: 1 + self.biased]
        if weight.dim() == 3:
            own = (batch, 1, *y.shape[1:])
            gain, *shift = (self.sum_places(getattr(self, name)[which], weight).view(own) for name in names)
        else:
            gain, *shift = ((getattr(self, name)[which] * weight[..., None]).sum(1).view(batch, 1, *sizes) for name in names)
        made: Tensor = torch.unflatten(y, 0, (batch, -1)) * (1 + gain)
        for one in shift:
            made = made + one
        return (made.flatten(0, 1) + update).to(y.dtype)

    def sum_places(self, gains: Tensor, weight: Tensor) -> Tensor:
        """Return the sum of gains (batch, per_sample, out) by the weights of their slots at each place, one after the other."""
        picture = self.kind in CONVOLUTIONS  # whose channels are before its places
        parts = (
            one[..., None] * own[:, None] if picture else one[:, None] * own[..., None]
            for one, own in zip(gains.unbind(1), weight.unbind(1), strict=True)
        )
        return functools.reduce(torch.add, parts)

    def shared(self, x: Tensor, y: Tensor, weight: Tensor, which: Tensor) -> Tensor:
        if not which.shape[0]:
            return y.clone()
        if self.kind not in CONVOLUTIONS or x.dim() == 1 + len(self.geometry["kernel_size"]):  # one entry, of whatever sizes
            made = self.gathered(x[None], y[None], weight[:1], which[:1])[0]
        else:
            made = self.gathered(x, y, weight[:1], which[:1])
        rows = weight.new_zeros(weight.shape[0], self.slots).scatter_add(1, which, weight)
        up: Any = self.up.weight
        parts: Tensor = torch.unflatten(up, 1, (self.slots, -1)).transpose(0, 1).flatten(1)
        acts = parts.any(1) | self.gain.any(1)
        alike = ((rows == rows[:1]) | ~acts).all()
        return torch.where(alike, made, torch.nan).to(y.dtype)


def find_base(root: nn.Module, name: str) -> Tensor | None:
    """Return a weight of a module by name, and where a live merge has put another one in its place that of the base."""
    for module in root.modules():
        if callable(find := getattr(module, "find_base", None)) and (found := find(root, name)) is not None:
            return found  # type: ignore[no-any-return]
    return find_tensor(root, name)


def compute_gain(weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, magnitude: Tensor) -> tuple[Tensor, ...]:
    """Return what DoRA multiplies a layer's result by, less one, and with a bias what it adds then, (out,) each.

    weight is (out, in, *kernel), up (out, rank, ...), down (groups, rank, in, *kernel), or an Embedding's (indices, rank);
    magnitude (out,). They are float32, or float64 for such weights. An output whose weights are zeros has no direction, and is
    left alone.
    """
    dtype = torch.promote_types(weight.dtype, torch.float32)
    up = up.flatten(1).to(dtype)
    rows = down.T if down.dim() == 2 else down.flatten(0, 1)
    product = multiply_groups(up, rows.to(dtype), 1 if down.dim() == 2 else len(down)).flatten(0, 1)
    norm = torch.linalg.vector_norm(weight.flatten(1).to(dtype) + product, dim=1)
    gain = divide_by_norm(magnitude.to(dtype), norm) - 1
    return (gain,) if bias is None else (gain, -gain * bias.to(dtype))


def _widen(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _list_padding(layer: Any) -> list[int]:
    """Return what a convolution pads, as torch.nn.functional.pad takes it: the last dimension first, both of its sides."""
    around: list[int] = []
    for i, (kernel, dilation) in enumerate(zip(layer.kernel_size, layer.dilation, strict=True)):
        total = dilation * (kernel - 1)
        own = {"same": [total // 2, total - total // 2], "valid": [0, 0]}
        around = [*(own[layer.padding] if isinstance(layer.padding, str) else [layer.padding[i]] * 2), *around]
    return around
