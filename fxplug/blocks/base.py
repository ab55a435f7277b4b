"""What all blocks share: the base class, ranks, and where a value has its channels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ..errors import SpecError, did_you_mean, shown
from ..low_rank import scaling

if TYPE_CHECKING:
    from ..rewriter.sites import Site, Value

META, ROUNDING_RESIDUE = "said", "lost"  # the buffers beside a bank's parameters that keep what its files said
SCALED = ("up", "hada_w2_b", "lokr_w2", "lokr_w2_b", "delta")  # which of a bank's parameters takes the adapter's scale
CONVOLUTIONS: dict[str, type[nn.Module]] = {"Conv1d": nn.Conv1d, "Conv2d": nn.Conv2d, "Conv3d": nn.Conv3d}


class Block(nn.Module):
    """A module that passes may put in: `at(site, **options)` makes one, `forward` gets the values of the rule's `args`.

    `neutral` says that a new one leaves the output `torch.equal` to what it was; `hands_on` that `at` hands the options that it
    does not name on to the constructor.
    """

    is_block: ClassVar[bool] = True
    neutral: ClassVar[bool] = False
    hands_on: ClassVar[bool] = False

    at: Any  # classmethod (site, **options) -> Block: the options that a rule may give are its named arguments


def scaled_factor(names: Iterable[str]) -> str:
    """The one of an update's factors that takes its scale."""
    known = set(names)
    return next(name for name in SCALED if name in known)


def check_rank(rank: Any) -> int:
    """`rank` if it is a whole number above 0, else SpecError."""
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise SpecError(f"rank must be a whole number, 1 or more, not {shown(rank)}")
    return rank


def check_slots(slots: Any, **refused: Any) -> None:
    """Raises SpecError unless `slots` is a whole number, 0 or more; with slots, for an option that has no place in them."""
    if not isinstance(slots, int) or isinstance(slots, bool) or slots < 0:
        raise SpecError(f"slots must be a whole number, 0 or more, not {shown(slots)}")
    for name, value in refused.items():
        if slots and value:
            raise SpecError(f"{name} and slots do not go together: an adapter in a slot has no {name} of its own")


class LowRank(Block):
    """A low-rank update: one that is scaled by `scale`, a float32 buffer, or with `slots` a bank for so many, not trained."""

    neutral = True
    scale: Tensor

    def __init__(self, rank: int, alpha: float | None, rslora: bool, alpha_auto_scale: bool, slots: int) -> None:
        """Raises SpecError for a rank below 1, slots below 0, and as `scaling` does."""
        super().__init__()
        check_slots(slots)
        self.rank, self.slots = check_rank(rank), slots
        self.alpha = rank if alpha is None else alpha
        self.rslora, self.alpha_auto_scale = rslora, alpha_auto_scale
        if not slots:
            factor = scaling(rank, alpha, rslora, alpha_auto_scale)
            self.register_buffer("scale", torch.tensor(factor, dtype=torch.float32))

    def add_provenance(self) -> None:
        """Give a bank what it keeps of the files that its adapters came from: read by nothing but `adapters.save`.

        See `adapters.slot_memory`. It is no larger than the bank's own tensors, whatever a file says of its slots.
        """
        named = {name.removesuffix(".weight"): value for name, value in self.named_parameters()}
        factor = named[scaled_factor(named)]
        rows = min(self.slots, factor.numel())
        self.register_buffer(META, torch.zeros(rows, 3, dtype=torch.int64, device=factor.device))
        self.register_buffer(ROUNDING_RESIDUE, torch.zeros(factor.shape, dtype=torch.int8, device=factor.device))

    def remove_provenance(self) -> None:
        """Take that away again: artifacts of earlier versions have none, and a module that is read from one gets it later."""
        del self._buffers[META], self._buffers[ROUNDING_RESIDUE]

    def extra_repr(self) -> str:
        return f"rank={self.rank}, " + (f"slots={self.slots}" if self.slots else f"alpha={self.alpha:g}")


def torch_class(name: str) -> type[nn.Module]:
    """The module class of that name in torch.nn. Raises SpecError."""
    name = name.removeprefix("torch.nn:").removeprefix("torch.nn.")
    known = {k: v for k, v in vars(nn).items() if isinstance(v, type) and issubclass(v, nn.Module) and not k.startswith("Lazy")}
    if name not in known:
        raise SpecError(f"torch.nn has no module class '{name}'{did_you_mean(name, known)}")
    return known[name]


def channel_dim(site: Site, value: Value) -> int:
    """Where the channels of a value are: as the layer of the site has them, else as the layers around it do.

    The last dimension is -1, others are counted from the first. Raises SpecError where nothing tells.
    """
    from ..ir import channel_dim as channels

    rank = len(value.shape)
    if value.node is None or not rank:
        raise SpecError(channels.unknown(value))
    leaf = site.y.node if site.y is not None else None
    dim: int | None = None
    if leaf is not None and leaf.op == "call_module" and (value.node is leaf or value.node in leaf.all_input_nodes[:1]):
        own = channels.of_layer(site.module, rank)
        dim = None if own is None or -own > rank else own + rank
    if dim is None:
        dim = 0 if rank == 1 else channels.dimension(value.node, site.root)
    if dim is None:
        raise SpecError(channels.unknown(value))
    return -1 if dim == rank - 1 else dim


def width(site: Site, value: Value, dim: int | None) -> tuple[int, int]:
    """How many channels a value has, and in which dimension: `dim`, or what its layer and its shape tell. Raises SpecError."""
    if value.members is not None:
        raise SpecError(f"{value.address} is several values: name the one whose channels are meant")
    dim = channel_dim(site, value) if dim is None else dim
    if not isinstance(dim, int) or isinstance(dim, bool) or not value.shape or not -len(value.shape) <= dim < len(value.shape):
        raise SpecError(f"{value} has no dimension {dim!r}")
    return value.shape[dim], dim


def along(weight: Tensor, y: Tensor, dim: int) -> Tensor:
    """A vector shaped so that it multiplies dimension `dim` of y."""
    return weight if dim in (-1, y.dim() - 1) else weight.view(-1, *[1] * (y.dim() - 1 - dim % y.dim()))
