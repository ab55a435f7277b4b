"""What all blocks share: the base class, ranks, where a value has its channels, and how much of which slot a sample takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..core.errors import SpecError, did_you_mean, quote
from ..core.ir.graph import SampleTable
from ..core.locks import StateLock
from ..core.torch_internals.modules import leave_frame, without_compiler
from ..core.torch_internals.tensors import assert_later, is_watched, version
from .low_rank import compute_scale

if TYPE_CHECKING:
    from ..core.rewriter.sites import Site, Value


CONVOLUTIONS: dict[str, type[nn.Module]] = {"Conv1d": nn.Conv1d, "Conv2d": nn.Conv2d, "Conv3d": nn.Conv3d}
Factors = Mapping[str, Tensor]  # the tensors of an update, by name


@dataclass(frozen=True)
class Method:
    """What tensors and options make of a parameter, by more than a sum with their product.

    `changed` gives what is read in a parameter's place; `fits` says whether it is for a parameter of a shape. `cut` names the
    tensors whose first dimension is the layer's outputs, so that it can be had for some of them; None where these are mixed.
    """

    changed: Callable[[Tensor, Factors, Mapping[str, Any]], Tensor]
    fits: Callable[[Factors, Mapping[str, Any], Sequence[int]], bool]
    cut: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class UpdateKind:
    """A kind of update: what the class of its block says in `update_kind`, and all that tells kinds apart.

    `name` is the word for it, that of its pass. `forms` are the sets of tensors that one may have, each tensor with its sizes:
    a letter is the same number in all of them, `k*i` the product of two that are known, a digit itself, `...` any further
    sizes, and `...k` those, the same everywhere. The letters in `ranks` are ranks: along these an adapter may be smaller than
    its slot. `outputs` and `inputs` are the parameter's. `aside` are tensors that files may have and the block has not.

    `neutral` has the tensors of a new one, which changes nothing, that are not drawn: a number that fills one, or a function of
    the parameter as (out, in) and of the dimension that has magnitudes. The first that is zero takes the scale of an adapter in
    a slot.

    `delta` gives what the tensors add to a parameter of a shape, not scaled. The product of two `factors` is a plain low-rank
    one, too, by `join` of their halves. What is no product has a `method`, the word for its `algebra`; what is `whole` can hold
    whatever another kind makes of the parameter.

    `place` is where the block stands. Its slots are the `first` dimension of each tensor, or follow each other in the `inner`
    channels; or there are none. `state` has the names of tensors in the block's state dict, and `formats` those in the files of
    each tool that has the kind, where they are not the tensors' own. Alpha is divided by the rank that the first of `ranked`
    has, or else the first tensor with one. `shared` are the tensors of the pass that the block's `product` makes a plain update
    with. `options` gives the options of the pass for such tensors, a rank and the shape of a weight; None where it has none.
    """

    name: str
    forms: tuple[Mapping[str, str], ...] = ()
    aside: Mapping[str, str] = field(default_factory=dict)
    ranks: str = "r"
    outputs: str = "o"
    inputs: str = "i"
    neutral: Mapping[str, float | Callable[[Tensor, int], Tensor]] = field(default_factory=dict)
    delta: Callable[[Factors, Sequence[int]], Tensor] | None = None
    factors: tuple[str, ...] = ()
    join: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    method: str = ""
    algebra: Method | None = None
    whole: bool = False
    place: Literal["after", "param"] = "param"
    slots: Literal["first", "inner", ""] = "first"
    state: Mapping[str, str] = field(default_factory=dict)
    formats: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    ranked: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    options: Callable[[Factors, int, Sequence[int]], Mapping[str, Any] | None] | None = None
    block: str = ""  # the name of the block's class

    def __post_init__(self) -> None:
        """Raises SpecError for a product none of whose tensors can take a scale."""
        if self.is_product and 0 not in self.neutral.values():
            raise SpecError(f"'{self.name}' has no tensor that is zero in a new one, which takes the scale: see 'neutral'")

    @property
    def tensors(self) -> set[str]:
        """The names of all tensors that one may have."""
        return {name for form in self.forms for name in form}

    @property
    def is_decomposed(self) -> bool:
        """Whether it is a low-rank product with magnitudes of its own."""
        return not self.method and "magnitude" in self.tensors

    @property
    def is_plain(self) -> bool:
        """Whether it is a low-rank product and nothing more."""
        return "up" in self.tensors and not self.is_decomposed

    @property
    def is_low_rank(self) -> bool:
        """Whether it is a low-rank product, or one of two, which is a low-rank one too."""
        return self.is_plain or bool(self.factors)

    @property
    def is_product(self) -> bool:
        """Whether it adds something to the parameter that its tensors alone make."""
        return bool(self.forms) and not self.method and not self.is_decomposed

    def form(self, names: Collection[str]) -> Mapping[str, str]:
        """Find the form that tensors of these names have, or the one that they are nearest to."""
        return max(self.forms, key=lambda form: len(form.keys() & set(names)))

    def rank_dims(self, name: str, names: Collection[str]) -> tuple[int, ...]:
        """List the dimensions of a tensor that are ranks, of one that has tensors of these names."""
        return tuple(dim for dim, size in enumerate(self.form(names).get(name, "").split()) if size in self.ranks)

    def rank(self, own: Factors) -> int:
        """Read the rank that alpha is divided by; of tensors without one the smaller side of the first."""
        ranked = (own[name].shape[dim] for name in self.ranked or own if name in own for dim in self.rank_dims(name, own))
        return next(ranked, None) or min(next(own[name] for name in self.form(own) if name in own).shape)

    def sizes(self, own: Factors) -> tuple[int, tuple[int, ...]]:
        """Read the sizes of the parameter off the tensors: outputs, and (in, *kernel) or their product."""
        known: dict[str, Any] = {}
        for name, text in self.form(own).items():
            *letters, last = text.split()
            letters += [] if last.startswith("...") else [last]
            known |= dict(zip(letters, own[name].shape, strict=False))
            known |= {last: tuple(own[name].shape[len(letters) :])} if last.startswith("...") else {}
        out, inner = (math.prod(known[letter] for letter in size.split("*")) for size in (self.outputs, self.inputs))
        return out, (inner, *known.get("...k", ()))

    def scaled(self, names: Collection[str]) -> str:
        """Find the tensor, of these, that takes the scale of an adapter in a slot."""
        return next(name for name, value in self.neutral.items() if name in names and value == 0)


UPDATE_KINDS: dict[str, UpdateKind] = {}  # of the blocks whose files are imported, by `make_kind_key`


def make_kind_key(cls: type) -> str:
    """Give the name of a block's class as records of slots have it: with its module, where that is none of fxplug's."""
    return cls.__qualname__ if cls.__module__.startswith("fxplug.blocks.") else f"{cls.__module__}:{cls.__qualname__}"


class Block(nn.Module):
    """A module that passes may put in: `at(site, **options)` makes one, `forward` gets the values of the rule's `args`.

    `neutral` says that a new one leaves the output `torch.equal` to what it was; `hands_on` that `at` hands the options that it
    does not name on to the constructor; `update_kind` what adapters hold for it, for this class alone; `about_place` which
    attributes say where it is, and change nothing of what it computes.
    """

    is_block: ClassVar[bool] = True
    neutral: ClassVar[bool] = False
    hands_on: ClassVar[bool] = False
    update_kind: ClassVar[UpdateKind | None] = None
    by_sample: ClassVar[str] = ""  # the block that does the same with `per_sample`, beside its layer
    about_place: ClassVar[tuple[str, ...]] = ()

    # classmethod (site, **options) -> Block: the options that a rule may give are its named arguments
    at: Any = classmethod(lambda cls, site, **options: cls(**options))

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        if (kind := vars(cls).get("update_kind")) is not None:
            cls.update_kind = UPDATE_KINDS[make_kind_key(cls)] = replace(kind, block=cls.__name__)


def get_kind(block: nn.Module) -> UpdateKind | None:
    """Give the kind of update that the class of a block says for itself; None for another module, and for a derived class."""
    kind: UpdateKind | None = vars(type(block)).get("update_kind")
    return kind


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Return the value of an option if it is an integer, `least` or more; raise SpecError otherwise."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SpecError(f"{name} must be a whole number, {least} or more, not {quote(value)}")
    return value


def check_share(name: str, value: Any) -> float:
    """Return the value of an option if it is a number in [0, 1); raise SpecError otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise SpecError(f"{name} must be at least 0 and below 1, not {quote(value)}")
    return value


def find_attribute(site: Site, name: str) -> int | None:
    """Return the integer attribute of that name of a site's module, or else of the nearest module around it."""
    parts = site.path.partition("@")[0].split(".")
    for count in range(len(parts), -1, -1):
        found: Any = getattr(site.root.get_submodule(".".join(parts[:count])), name, None)
        if isinstance(found, int):
            return found
    return None


def check_slots(slots: Any, **refused: Any) -> None:
    """Raise SpecError unless `slots` is an integer, 0 or more; with slots, also for an option that slots do not support."""
    check_count("slots", slots, 0)
    for name, value in refused.items():
        if slots and value:
            raise SpecError(f"{name} and slots cannot be used together: an adapter in a slot has no {name} of its own")


class LowRank(Block):
    """A low-rank update: one that is scaled by `scale`, a float32 buffer, or with `slots` a bank for so many, not trained."""

    neutral = True
    scale: Tensor

    def __init__(self, rank: int, alpha: float | None, rslora: bool, alpha_auto_scale: bool, slots: int) -> None:
        """Set rank, slots and scale. Raises SpecError for a rank below 1, slots below 0, an alpha of 0,
        and as `compute_scale` does."""
        super().__init__()
        check_slots(slots)
        self.rank, self.slots = check_count("rank", rank), slots
        self.alpha = rank if alpha is None else alpha
        self.rslora, self.alpha_auto_scale = rslora, alpha_auto_scale
        if not slots:
            factor = compute_scale(rank, alpha, rslora, alpha_auto_scale)
            if alpha == 0:
                raise SpecError(
                    "alpha is 0, which scales the update to zero, so nothing trains: leave alpha out for a scale of 1, "
                    "which is what kohya's network_alpha 0 means"
                )
            self.register_buffer("scale", torch.tensor(factor, dtype=torch.float32))

    def extra_repr(self) -> str:
        return f"rank={self.rank}, " + (f"slots={self.slots}" if self.slots else f"alpha={self.alpha:g}")


def find_torch_class(name: str) -> type[nn.Module]:
    """Return the module class of that name in torch.nn. Raises SpecError."""
    name = name.removeprefix("torch.nn:").removeprefix("torch.nn.")
    known = {k: v for k, v in vars(nn).items() if isinstance(v, type) and issubclass(v, nn.Module) and not k.startswith("Lazy")}
    if name not in known:
        raise SpecError(f"torch.nn has no module class '{name}'{did_you_mean(name, known)}")
    return known[name]


def channel_dim(site: Site, value: Value) -> int:
    """Return the channel dimension of a value: that of the site's layer, else that of the layers around it.

    The last dimension is -1, others are counted from the first. Raises SpecError if it is unknown.
    """
    from . import dimensions as channels

    rank = len(value.shape)
    if value.node is None or not rank:
        raise SpecError(channels.describe_unknown(value))
    leaf = site.y.node if site.y is not None else None
    dim: int | None = None
    if leaf is not None and leaf.op == "call_module" and (value.node is leaf or value.node in leaf.all_input_nodes[:1]):
        own = channels.get_channel_dim(site.module, rank)
        dim = None if own is None or -own > rank else own + rank
    if dim is None:
        dim = 0 if rank == 1 else channels.find_channel_dim(value.node, site.root)
    if dim is None:
        raise SpecError(channels.describe_unknown(value))
    return -1 if dim == rank - 1 else dim


def get_width(site: Site, value: Value, dim: int | None) -> tuple[int, int]:
    """Return the number of channels of a value, and their dimension: `dim`, or that of its layer and shape. Raises
    SpecError."""
    if value.members is not None:
        raise SpecError(f"{value.address} is several values: name the one with the channels")
    dim = channel_dim(site, value) if dim is None else dim
    if not isinstance(dim, int) or isinstance(dim, bool) or not value.shape or not -len(value.shape) <= dim < len(value.shape):
        raise SpecError(f"{value} has no dimension {dim!r}")
    return value.shape[dim], dim


def get_widths(site: Site, value: Value, source: Value, dim: int | None, what: str, way: str) -> tuple[int, int, int]:
    """Return the widths of `source` and `value`, which may differ in nothing else, and their dimension. Raises SpecError."""
    features, dim = get_width(site, value, dim)
    rest = [[n for i, n in enumerate(v.shape) if i != dim % max(len(v.shape), 1)] for v in (value, source)]
    if rest[0] != rest[1]:
        raise SpecError(f"{what}: only the widths (dimension {dim}) may differ; {way}")
    return source.shape[dim], features, dim


def align_to_dim(weight: Tensor, y: Tensor, dim: int) -> Tensor:
    """Reshape a vector so that it multiplies dimension `dim` of y."""
    return weight if dim in (-1, y.dim() - 1) else weight.view(-1, *[1] * (y.dim() - 1 - dim % y.dim()))


ROWS = 1024  # the most samples of a batch that can have entries of their own
NAME = 128  # the most bytes of an adapter's name


def find_used_slots(gates: Tensor, slots: int) -> Sequence[int]:
    """Return the slots that any sample uses, from gates (..., slots * n), n numbers for each slot.

    Returns all slots if values are not read: under a compiler, and on a GPU, which would be synchronised. What was read is kept
    with the gates, which all blocks of a pass get, until they are written.
    """
    if is_watched() or type(gates) is not Tensor or gates.device.type != "cpu":
        return range(slots)
    if gates.is_inference():  # nothing counts what is written there
        return _read_used(gates, slots)
    key, known = (id(gates), version(gates), slots), vars(gates).get("_used")  # a copy is another one
    if known is None or known[0] != key:
        known = vars(gates)["_used"] = key, _read_used(gates, slots)
    return known[1]


def _read_used(gates: Tensor, slots: int) -> list[int]:
    rows = gates.reshape(-1, slots, gates.shape[-1] // slots)[..., 0].tolist()
    return [slot for slot, numbers in enumerate(zip(*rows, strict=True)) if any(numbers)]  # NaN is taken too


def read_count(entries: Tensor | None, known: dict[str, Any]) -> int:
    """Return the number in a table's `entries`, 0 for None. `known` caches the value read from a GPU, which synchronises, until
    the tensor is written again.
    """
    if type(entries) is not Tensor or entries.is_meta:
        return 0
    if entries.is_cpu or entries.is_inference():
        return int(entries)
    last = known.get("_count")
    if last is None or last[0] is not entries or last[1] != version(entries):
        last = known["_count"] = entries, version(entries), int(entries)
    return int(last[2])


def describe_other_batch(entries: int, samples: int) -> str:
    """Return the message for a batch whose number of samples differs from that of the entries."""
    return (
        f"use() got {entries} {'entry' if entries == 1 else 'entries'} but the batch has {samples} samples: give one entry per "
        "sample. With guidance the pipeline doubles the batch: repeat the list"
    )


def check_values(tensor: Tensor) -> Tensor:
    """Return a tensor of a pass's slots. Raises SpecError on the meta device, where writes are lost."""
    if tensor.is_meta:
        raise SpecError(
            "the slots are on the meta device and have no values: move the module to another device; where accelerate has "
            "offloaded it, change adapters before that, or take its hooks off"
        )
    return tensor


class Table(SampleTable, Block):
    """The state of a pass's slots, as tensors: it is saved, moved and shared with the weights, and a change recompiles nothing.

    `weights`, float32 (ROWS, slots), says how much of each slot each sample takes; all rows are equal where the whole batch
    takes the same. `entries`, int64, is the number of samples whose rows were given one by one, 0 for a whole batch. `names`,
    uint8 (slots, NAME), holds the adapters' names as UTF-8; a slot without a name is free. With `per_sample`, `which`, int64
    (ROWS, per_sample), has the slots that each sample takes, and the last slot, which holds zeros and has no name, where it
    takes fewer. With `groups`, `factors`, float32 (ROWS, groups, per_sample), multiplies these weights in each group of layers.
    """

    neutral = True
    weights: Tensor
    entries: Tensor
    names: Tensor
    which: Tensor
    factors: Tensor

    def __init__(
        self, slots: int, rank: int, others: Sequence[int] = (), per_sample: int = 0, groups: int = 0
    ) -> None:
        """Create the table; `others` are ranks of further banks, which have their own rows. With `per_sample` one of the slots
        is for zeros."""
        super().__init__()
        self.slots, self.rank, self.others, self.per_sample, self.groups = slots, rank, list(others), per_sample, groups
        self.state_lock = StateLock()  # shells share it as they share the tensors, and a copy has its own
        self.register_buffer("weights", torch.zeros(ROWS, slots, dtype=torch.float32))
        self.register_buffer("entries", torch.zeros((), dtype=torch.int64))
        self.register_buffer("names", torch.zeros(slots, NAME, dtype=torch.uint8))
        if per_sample:
            self.register_buffer("which", torch.full((ROWS, per_sample), slots - 1, dtype=torch.int64))
        if groups:
            self.register_buffer("factors", torch.ones(ROWS, groups, per_sample, dtype=torch.float32))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return (batch, slots * rank), each slot's weight for each of its inner channels, and (slots,), the weights that all
        samples share; then the first for each of the other ranks. With `per_sample` they are (batch, per_sample), the weights
        of the slots that each sample takes, (slots,), and (batch, per_sample), these slots; with `groups` the first is (batch,
        groups, per_sample).

        x has the samples in its first dimension. The second result is NaN if samples differ. If entries were given for another
        number of samples, a call raises SpecError before this; in a program that is compiled around the module a CPU raises
        RuntimeError, and on a GPU, which no error may leave unusable, all is NaN.
        """
        batch = x.shape[0]
        if not is_watched():
            self.check_samples(x)  # of a part that takes its samples from another one
        rows = self.weights[torch.arange(batch, device=self.weights.device).clamp(max=ROWS - 1)].float()
        fits = (self.entries == 0) | (self.entries == batch)
        if rows.device.type == "cpu":
            assert_later(fits, "adapters.use has one entry per sample, and the batch has another size")
        rows = torch.where(fits, rows, torch.nan)
        uniform = torch.where((rows == self.weights[0]).all(), self.weights[0].float(), torch.nan)
        if self.per_sample:
            which = self.which[torch.arange(batch, device=self.weights.device).clamp(max=ROWS - 1)]
            taken = rows.gather(1, which)
            if self.groups:
                factors = self.factors[torch.arange(batch, device=self.weights.device).clamp(max=ROWS - 1)].float()
                taken = taken[:, None] * factors
            return taken, uniform, which
        return rows.repeat_interleave(self.rank, 1), uniform, *(rows.repeat_interleave(rank, 1) for rank in self.others)

    def count_entries(self) -> int:
        """Return the number of samples with their own entries; 0 if all samples use the same."""
        return read_count(self._buffers["entries"], self.__dict__)

    @without_compiler
    def check_samples(self, x: Tensor) -> None:
        """Raise SpecError if the number of samples with entries differs from the first dimension of x."""
        entries = self.count_entries()
        if entries and isinstance(x, Tensor) and x.dim() and x.shape[0] != entries:
            raise SpecError(describe_other_batch(entries, x.shape[0]))


# a call asks these before what is compiled, and they are no part of it
leave_frame(Table.count_entries.__code__)
leave_frame(read_count.__code__)


class Gates(nn.Module):
    """The table of a pass's slots, as a network of the pass: what it gives goes to each of the pass's blocks."""

    def __init__(
        self, slots: int, rank: int, others: Sequence[int] = (), per_sample: int = 0, groups: int = 0
    ) -> None:
        super().__init__()
        self.table = Table(slots, rank, others, per_sample, groups)

    @classmethod
    def of(
        cls, model: Any, slots: int, rank: int, others: Sequence[int] = (), per_sample: int = 0, groups: int = 0
    ) -> Gates:
        """Make the gates of a model's banks with so many slots, of this rank, or of one of the others."""
        return cls(slots, rank, others, per_sample, groups)

    def forward(self, x: Tensor) -> Any:
        return self.table(x)
