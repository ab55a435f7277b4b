"""LoRA, a low-rank update beside a layer (Hu et al. 2021, arXiv 2106.09685), for linear layers, convolutions and embeddings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.errors import SpecError, quote
from ..core.torch_internals.modules import conv_forward, is_hooked
from .base import CONVOLUTIONS, Block, LowRank, UpdateKind, check_share, check_slots, find_used_slots
from .low_rank import apply_gates

if TYPE_CHECKING:
    from ..core.rewriter.sites import Site

PEFT = {"down": "lora_A.weight", "up": "lora_B.weight", "bias": "lora_B.bias"}
KOHYA = {"down": "lora_down.weight", "up": "lora_up.weight"}
GEOMETRY = ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")


class Lora(LowRank):
    """y + scale * up(down(x)): a low-rank update beside a layer (Hu et al. 2021, arXiv 2106.09685).

    `scale` is a float32 buffer saved with the weights, see `scaling`. `down` has the layer's own geometry (kernel, stride,
    padding, dilation, groups), `up` is zero when new, and so is its bias if it has one. x and y are the layer's input and
    output: (..., features) for Linear, (batch, channels, *space) for convolutions, integer indices and (..., features) for
    Embedding. A grouped convolution gets an update in each group, of at most the rank that a group's weight can have, so
    that it can be merged.

    With `slots` it is a bank for that many adapters of up to this rank: one low-rank update of rank slots * rank, in whose
    inner channels the slots follow each other (within each group of a convolution), and whose inner values are multiplied by
    `rows` instead of `scale`: float32 (batch, slots * rank), what `Gates` gives. It begins as zeros and is not
    trained.
    """

    update_kind = UpdateKind(
        name="lora",
        forms=({"down": "l i ...", "up": "o r ..."},),  # of a convolution in groups l is their number times the rank
        aside={"mid": "r l ..."},
        ranks="lr",
        neutral={"up": 0, "bias": 0},
        place="after",
        slots="inner",
        state={"down": "down.weight", "up": "up.weight", "bias": "up.bias"},
        formats={"peft": PEFT, "diffusers": PEFT, "kohya": KOHYA, "comfy": KOHYA, "lycoris": KOHYA},
        ranked=("up",),
    )

    by_sample = "fxplug.blocks:GatheredLora"

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
    ) -> None:
        """Create the layers; `kind` is Linear, Conv1d, Conv2d, Conv3d or Embedding, `geometry` has a convolution's own
        arguments.

        `same_padding` pads the input so that the output is as large as the layer's, whatever the layer does for it; `bias`
        gives `up` a bias, which is scaled like the rest of the update. `batch_dim` is the dimension of the samples of x, 0 or
        1, or -1 for none; only slots need it. `group` is the group of the pass's that has its strength, -1 without any. Raises
        SpecError for a rank below 1, a dropout outside [0, 1), slots with a bias or with dropout, or what `scaling` refuses.
        """
        super().__init__(rank, alpha, rslora, alpha_auto_scale, slots)
        check_share("dropout", dropout)
        check_slots(slots, bias=bias, dropout=dropout)
        self.kind, self.in_features, self.out_features, self.bias = kind, in_features, out_features, bias
        self.geometry, self.same_padding, self.batch_dim = dict(geometry or {}), same_padding, batch_dim
        self.group = group
        self.down: nn.Module
        self.up: nn.Module
        inner = rank * max(slots, 1)
        if kind in CONVOLUTIONS:
            groups = self.geometry.get("groups", 1)
            channels = groups * self.rank_within(groups) * max(slots, 1)
            self.down = CONVOLUTIONS[kind](in_features, channels, bias=False, **self.geometry)
            self.up = CONVOLUTIONS[kind](channels, out_features, 1, groups=groups, bias=bias)
        else:
            self.down = nn.Embedding(in_features, inner) if kind == "Embedding" else nn.Linear(in_features, inner, bias=False)
            self.up = nn.Linear(inner, out_features, bias=bias)
        self.dropout = dropout
        if slots:
            for parameter in self.parameters():
                nn.init.zeros_(parameter.requires_grad_(False))
            return
        for parameter in self.up.parameters():
            nn.init.zeros_(parameter)
        if kind != "Embedding":
            nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))  # type: ignore[arg-type]

    @classmethod
    def at(
        cls,
        site: Site,
        rank: int | float = 8,
        alpha: float | None = None,
        dropout: float = 0.0,
        bias: bool = False,
        rslora: bool = False,
        alpha_auto_scale: bool = True,
        slots: int = 0,
        rank_max: int | None = None,
    ) -> Lora:
        """Make an update for a Linear, Conv1d, Conv2d, Conv3d or Embedding, or a layer derived from one, or transformers'
        Conv1D.

        A `rank` between 0 and 1.0 is a share of the layer's output features or channels, and 1 at least. With `slots`,
        `rank_max` is the highest rank of the adapters to come; None is `rank`.
        """
        layer: Any = site.module
        turned = "TransposedLinear" in site.classes
        kind = "Linear" if turned else next((k for k in ("Linear", "Embedding", *CONVOLUTIONS) if k in site.classes), None)
        if kind is None:
            known = ", ".join(["Linear", *CONVOLUTIONS, "Embedding"])
            raise SpecError(f"{site.path} is a {site.classes[0]}; a low-rank update fits {known} and layers derived from them")
        sizes = {"Linear": ("in_features", "out_features"), "Embedding": ("num_embeddings", "embedding_dim")}
        for size in () if turned else sizes.get(kind, ("in_channels", "out_channels", *GEOMETRY)):
            if not hasattr(layer, size):
                raise SpecError(
                    f"{site.path} is a {site.classes[0]} without '{size}', of the model's own and not torch.nn's; take "
                    "lora_weight, which changes its weight, or leave it out of `at`"
                )
        if isinstance(rank, float) and 0 < rank <= 1:
            widths = ("out_features", "out_channels", "embedding_dim", "nf")
            width = next(getattr(layer, k) for k in widths if hasattr(layer, k))
            rank = max(round(width * rank), 1)
        common: dict[str, Any] = {"rank": rank, "alpha": alpha, "dropout": dropout, "bias": bias}
        common.update(rslora=rslora, alpha_auto_scale=alpha_auto_scale)
        if slots:
            common.update(slots=slots, rank=rank if rank_max is None else rank_max, batch_dim=_batch_dim(site, kind))
        if kind == "Linear":
            features = layer.weight.shape if turned else (layer.in_features, layer.out_features)
            return cls(kind, *features, **common)
        if kind == "Embedding":
            return cls(kind, layer.num_embeddings, layer.embedding_dim, **common)
        geometry = {k: getattr(layer, k) for k in GEOMETRY}
        space = len(geometry["kernel_size"])  # an input may have no batch dimension
        same = False
        given = space + 2 if site.x is None else len(site.x.shape)
        if given - space not in (1, 2):
            finding = f"{site.path} is a {site.classes[0]} that is given {given} dimensions, and a {kind} takes {space + 2}"
            raise SpecError(f"{finding}: its own forward convolves something else; take lora_weight, which changes its weight")
        if site.x is not None and site.y is not None:
            same = _output_size(site.x.shape[-space:], geometry) != tuple(site.y.shape[-space:])
        if same:
            geometry.update(padding=0, padding_mode="zeros")
        return cls(kind, layer.in_channels, layer.out_channels, geometry=geometry, same_padding=same, **common)

    def bank(self) -> dict[str, Any]:
        """Describe the bank in plain values, for matching adapters; see `adapters.banks.Bank`."""
        groups = self.geometry.get("groups", 1)
        sizes = (self.in_features, self.out_features) if self.kind == "Embedding" else (self.out_features, self.in_features)
        shape = [sizes[0], sizes[1] // groups, *self.geometry.get("kernel_size", ())]
        rank = self.rank_within(groups) if self.geometry else self.rank
        return {"kind": self.kind, "slots": self.slots, "rank": rank, "shape": shape, "groups": groups}

    def rank_within(self, groups: int) -> int:
        """Return the rank of one update in each of the groups of a convolution."""
        within = (self.in_features // groups) * math.prod(self.geometry["kernel_size"])
        return self.rank if groups == 1 else min(self.rank, within, self.out_features // groups)

    def forward(self, x: Tensor, y: Tensor, rows: Tensor | None = None) -> Tensor:
        if self.same_padding:
            x = self.pad(x, y)
        if rows is not None:
            return self.banked(x, y, rows)
        return torch.add(y, self.compute(x))

    def compute(self, x: Tensor) -> Tensor:
        """Return what is added to the layer's output for its input x, which is padded already."""
        if self.kind == "Embedding":
            hidden = F.dropout(self.down(x), self.dropout, self.training)
        else:
            hidden = self.down(F.dropout(x, self.dropout, self.training))
        if self.bias:
            return self.up(hidden) * self.scale  # type: ignore[no-any-return]
        return self.up(hidden * self.scale)  # type: ignore[no-any-return]  # where it is small: no pass over all of y

    def banked(self, x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        """Return y with the updates of a bank. In eager code on a CPU only slots in use cost time."""
        whole = self.kind == "Embedding" or self.geometry.get("groups", 1) > 1
        slots = range(self.slots) if whole else find_used_slots(rows, self.slots)
        if len(slots) == self.slots or is_hooked(self.down) or is_hooked(self.up):
            return torch.add(y, self.up(self.gated(self.down(x), rows)))
        if not slots:
            return y.clone()
        halves: Any = ((self.down.weight, 0), (self.up.weight, 1), (rows, 1))
        down, up, own = (
            torch.cat([half.narrow(dim, slot * self.rank, self.rank) for slot in slots], dim) for half, dim in halves
        )
        return torch.add(y, _with(self.up, up, self.gated(_with(self.down, down, x), own)))

    def gated(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Multiply the inner values of a bank by the gates of each sample, see `low_rank.apply_gates`."""
        groups = self.geometry.get("groups", 1)
        if groups > 1:
            rows = torch.unflatten(rows, 1, (self.slots, -1))[..., : self.rank_within(groups)].flatten(1).repeat(1, groups)
        return apply_gates(hidden, rows, self.batch_dim, len(self.geometry.get("kernel_size", ())))

    def pad(self, x: Tensor, y: Tensor) -> Tensor:
        """Pad x with zeros, the odd one at the end, so that `down` has the output size of y."""
        around: list[int] = []
        geometry = zip(*(self.geometry[k] for k in ("kernel_size", "stride", "dilation")), strict=True)
        space = len(self.geometry["kernel_size"])
        for size, wanted, (kernel, stride, dilation) in zip(x.shape[-space:], y.shape[-space:], geometry, strict=True):
            total = torch.sym_max((wanted - 1) * stride + dilation * (kernel - 1) + 1 - size, 0)
            around = [total // 2, total - total // 2, *around]
        return F.pad(x, around)

    def extra_repr(self) -> str:
        return f"{self.kind}, {self.in_features}, {self.out_features}, {super().extra_repr()}"


class HalfLora(Block):
    """`Lora` for one half of the samples; the others keep their y.

    x and y have the samples in dimension 0, of which the first half is the smaller one where they are odd in number. It is no
    `Lora`, as no weight for all samples does the same: it cannot be merged.
    """

    neutral = True

    def __init__(self, lora: Lora, half: Literal["first", "second"]) -> None:
        """Wrap an update. Raises SpecError for another half."""
        super().__init__()
        if half not in ("first", "second"):
            raise SpecError(f"half must be first or second, not {quote(half)}")
        self.lora, self.side = lora, half

    @classmethod
    def at(
        cls,
        site: Site,
        half: Literal["first", "second"],
        rank: int | float = 8,
        alpha: float | None = None,
        dropout: float = 0.0,
        bias: bool = False,
        alpha_auto_scale: bool = True,
    ) -> HalfLora:
        """Make the block; arguments are those of `Lora.at`."""
        made: Any = Lora.at(site, rank, alpha, dropout, bias, alpha_auto_scale=alpha_auto_scale)
        return cls(made, half)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        middle = y.shape[0] // 2
        if self.side == "first":
            return torch.cat([self.lora(x[:middle], y[:middle]), y[middle:]])
        return torch.cat([y[:middle], self.lora(x[middle:], y[middle:])])

    def extra_repr(self) -> str:
        return f"half={self.side}"


def _with(layer: nn.Module, weight: Tensor, x: Tensor) -> Tensor:
    """Return the result of a linear layer or convolution with another weight, without a bias."""
    convolve = None if isinstance(layer, nn.Linear) else conv_forward(type(layer))
    return F.linear(x, weight) if convolve is None else convolve(layer, x, weight, None)


def _batch_dim(site: Site, kind: str) -> int:
    """Return which of the first two dimensions of a layer's input is the model's batch, as traced; -1 if neither."""
    shape, batch = (() if site.x is None else site.x.shape), next(arg.shape[0] for arg in site.args[::-1] if arg.shape)
    node = None if site.x is None else site.x.node
    from . import dimensions as batch_dim

    dim = None if node is None else batch_dim.find_batch_dim(node, batch)
    if dim is not None:
        if kind in CONVOLUTIONS:
            return 0 if dim == 0 and len(shape) > 2 else -1
        rows = shape if kind == "Embedding" else shape[:-1]
        return dim if dim < min(len(rows), 2) and (dim == 0 or shape[1] == batch) else -1
    if site.x is not None and batch not in shape[:2] and not batch_dim.is_sampled(node):
        return -1
    if kind in CONVOLUTIONS or len(shape) < 3 - (kind == "Embedding"):
        return 0
    return int(shape[0] != batch == shape[1])


def _output_size(size: tuple[int, ...], geometry: Mapping[str, Any]) -> tuple[int, ...]:
    padding = geometry["padding"]
    if isinstance(padding, str):
        return tuple(size) if padding == "same" else _output_size(size, {**geometry, "padding": (0,) * len(size)})
    rows = zip(size, geometry["kernel_size"], geometry["stride"], padding, geometry["dilation"], strict=True)
    return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in rows)
