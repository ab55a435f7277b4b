"""What an adapter changes in one layer: low-rank updates under the names that fxplug's blocks have, and their algebra."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..blocks import list_update_kinds, low_rank
from ..blocks.base import UpdateKind
from ..blocks.vera import draw_projections
from ..core.errors import ArtifactError, format_fields
from .methods import find_method

BY_OUTPUT = ("up", "bias", "magnitude")
FACTORS = ("up", "hada_w1_a", "lokr_w1", "lokr_w1_a", "down", "hada_w1_b", "lokr_w1_b")  # those that may take a scale
PRODUCT = 1 << 24  # elements that a product may have although the file and the layer have fewer


@dataclass(frozen=True)
class Entry:
    """What one layer gets. Tensors are as the file has them (dtype too), under the names that fxplug's blocks have.

    - "lora": `down` (rank, in, *kernel), `up` (out, rank, *1); of a grouped convolution `down` has groups * rank rows.
    - "dora": these and `magnitude` (out), (1, out, 1, ...) for a convolution.
    - any other kind that a block says (`blocks.base.UpdateKind`), "loha" or "lokr": one of its forms.
    - "lora+bias", "loha+dora", "lokr+dora", ...: with a `bias` of `up`, or a `magnitude`, that a plain block cannot hold;
      "dora by input" where the magnitudes are the inputs'.
    - "oft", "boft", "ia3", "delta": what `methods.find_method(method)` makes of the parameter `param` with these tensors and
      `options`. The first three have passes of their own; all can be had as the change of the whole.

    The update of the layer's weight is `scale` times the product; `embedding` says that `down` reads indices (None: not to be
    told from the shapes), so that the weight is the product's transpose.
    """

    name: str  # the layer, as the file has it
    path: str  # the name without what says which part of a pipeline it is in
    part: str  # "unet", "text_encoder", the name of a pass, ...; empty when the file does not say
    kind: str
    tensors: Mapping[str, Tensor]
    scale: float
    rank: int
    embedding: bool | None = False
    flat: bool = False  # kohya's names: underscores where the path has dots
    assumed: bool = False  # nothing says the scale
    param: str = "weight"  # which parameter of the layer
    method: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    optional: bool = False  # nothing where the layer has no such parameter
    base: Tensor | None = None  # the weight beside which it was trained, where the file has that

    def key(self, path: str) -> str:
        """Return the key of a place at a layer: the layer's path for its weight, followed by the parameter's name for
        another."""
        return path if self.param == "weight" else f"{path}.{self.param}".lstrip(".")

    __repr__ = format_fields

    @property
    def update_kind(self) -> UpdateKind:
        """Update kind of the block, without what is beside it."""
        return kind_named(self.kind.partition("+")[0].partition(" ")[0])

    @property
    def is_low_rank(self) -> bool:
        """Return whether the update is a low-rank product and nothing beside."""
        return not self.method and self.update_kind.is_low_rank and self.kind == self.update_kind.name

    @property
    def is_zero(self) -> bool:
        """Return whether the update is a product and nothing beside, that is zero by a factor or its scale."""
        plain = not self.method and self.kind == self.update_kind.name and "magnitude" not in self.tensors
        return plain and bound_change(self.tensors, self.scale) == 0

    @property
    def experts(self) -> int:
        """Number of experts with an update of this rank in the tensors, as for PEFT's `target_parameters`; 0 for none.

        `down` is then (experts * rank, in), `up` (out, rank * experts).
        """
        return int(self.options.get("experts", 0)) if self.kind == "lora" else 0

    def by_expert(self, transposed: bool) -> dict[str, Tensor]:
        """Return the tensors in the layout of blocks.LoraWeight for a parameter (experts, out, in), or (experts, in, out)."""
        if "by_expert" in self.options:
            return dict(self.tensors)
        down = torch.unflatten(self.tensors["down"], 0, (self.experts, self.rank))  # (experts, rank, in)
        up = torch.unflatten(self.tensors["up"], 1, (self.rank, self.experts))  # (out, rank, experts)
        if transposed:
            return {"down": up.permute(1, 2, 0), "up": down.permute(2, 1, 0)}
        return {"down": down.transpose(0, 1), "up": up}

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether this is an update of a weight of that shape; trailing sizes of 1 do not count."""
        if self.experts:
            if "by_expert" in self.options:
                return tuple(shape) == (self.experts, len(self.tensors["up"]), self.tensors["down"].shape[2])
            sizes = {self.tensors["up"].shape[0], self.tensors["down"].shape[1]}
            return len(shape) == 3 and shape[0] == self.experts and sizes == {*shape[1:]}
        if (method := find_method(self.method)) is not None:
            return method.fits(self.tensors, self.options, shape)
        if self.method == "miss":
            out = self.tensors["block"].shape[1]
            return len(shape) == 2 and shape[0] % out == 0 and (bool(self.options["mini"]) or shape[0] == out)
        if self.method == "vera":
            a, b = self.tensors.get("A"), self.tensors["lambda_b"]
            return len(shape) == 2 and len(b) == shape[0] and (a is None or a.shape[1] >= shape[1])
        if self.embedding is not False:
            size = self.tensors["down"].shape[0 if self.embedding is None else 1], self.tensors["up"].shape[0]
            if tuple(shape) == size:
                return True
            if self.embedding:
                return False
        out, inner = self.sizes()
        return bool(shape) and out == shape[0] and inner in (low_rank.trim_shape(shape[1:]), (math.prod(shape[1:]),))

    def shaped(self, shape: Sequence[int]) -> Entry:
        """Return the update with the number of dimensions of a weight that it fits: a linear layer may be a 1x1 convolution.

        A low-rank product that the file stores without factors gets them.
        """
        if self.options.get("kernel_forwards") and len(shape) > 2:  # the rotation's transpose: what a sign is to its series
            options = {**self.options, "kernel_forwards": False}
            return replace(self, tensors={name: -tensor for name, tensor in self.tensors.items()}, options=options)
        if find_method(self.method) is not None or (self.method == "vera" and "A" not in self.tensors):
            return self
        if self.method == "miss":
            block, rank = self.tensors["block"].float(), self.rank
            down = torch.eye(rank)[:, torch.arange(shape[1]) % rank]
            return replace(self, method="", tensors={"down": down, "up": block.T.repeat(shape[0] // block.shape[1], 1)})
        if self.method == "vera":
            t = {name: tensor.float() for name, tensor in self.tensors.items()}
            down, up = t["lambda_d"][:, None] * t["A"][:, : shape[1]], t["lambda_b"][:, None] * t["B"][: shape[0]]
            return replace(self, method="", tensors={"down": down, "up": up})
        made = dict(self.tensors)
        if "down" in made and {made["down"].dim(), made["up"].dim()} != {len(shape)} and not self.embedding:
            made["down"] = made["down"].reshape(-1, *shape[1:])
            made["up"] = made["up"].reshape(shape[0], -1, *[1] * (len(shape) - 2))
        for name, tensor in made.items():
            if name == "magnitude" and len(shape) > 2:
                made[name] = tensor.reshape(1, -1, *[1] * (len(shape) - 2))
            if name == "lokr_w2" and tensor.dim() != len(shape):
                made[name] = tensor.reshape(*tensor.shape[:2], *(shape[2:] if tensor.dim() > 2 else [1] * (len(shape) - 2)))
            if name in ("hada_t1", "hada_t2", "lokr_t2") and tensor.dim() != len(shape):
                made[name] = tensor.reshape(*tensor.shape[:2], *shape[2:])
        return replace(self, tensors=made)

    def pair(self, kind: str) -> tuple[Tensor, Tensor]:
        """`down` and `up` as the weights that blocks.Lora of that kind has: for an Embedding, down is (indices, rank)."""
        down, up = self.tensors["down"], self.tensors["up"]
        if kind != "Embedding":
            return (down, up) if not self.embedding else (up.T, down.T)
        if self.embedding is None:
            return down, up
        return (down.T, up) if self.embedding else (up, down.T)

    def update(self, shape: Sequence[int]) -> Tensor:
        """Return the whole update of a weight of that shape in float32, without magnitude and bias."""
        t = {name: tensor.float() for name, tensor in self.tensors.items()}
        if "down" not in t:
            delta = self.update_kind.delta
            assert delta is not None, self.kind
            return self.scale * delta(t, shape)
        down, up = t["down"].flatten(1), t["up"].flatten(1)
        if self.embedding or (self.embedding is None and up.shape[0] != shape[0]):
            made = (up @ (down if self.embedding else down.T)).T
        else:
            made = low_rank.multiply_groups(up, down, down.shape[0] // up.shape[1])
        return self.scale * made.reshape(*shape)

    def changed(self, value: Tensor) -> Tensor:
        """Return the value that replaces a parameter with these values, in float32.

        Raises ArtifactError if the magnitudes have another number of channels.
        """
        value = value.float()
        if (method := find_method(self.method)) is not None:
            t = {name: tensor.to(value.device) for name, tensor in self.tensors.items()}
            t = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in t.items()}
            return method.changed(value, t, self.options)
        update = self.update(value.shape).to(value.device)
        if "magnitude" not in self.tensors:
            return value + update
        dim = int(self.kind.endswith("by input")) ^ int(bool(self.embedding))
        if (number := self.tensors["magnitude"].numel()) != value.shape[dim]:
            raise ArtifactError(f"'{self.name}' has {number} magnitudes, and its layer {value.shape[dim]} channels")
        return low_rank.decompose(value + update, self.tensors["magnitude"].float().to(value.device), dim)

    def as_lora(self, shape: Sequence[int]) -> Entry:
        """Return the same update of a weight of that shape as one of kind "lora", in float32 or float64, exact up to rounding.

        A Hadamard product of ranks r and s has rank r * s, and so has a Kronecker product, of which a factor that is not
        decomposed counts with its shorter side. Raises ArtifactError for a kind with a bias or magnitude.
        """
        if self.kind == "lora":
            return self
        if self.product_rank() * (shape[0] + math.prod(shape[1:])) > max(PRODUCT, 4 * math.prod(shape)):
            rank = self.product_rank()
            raise ArtifactError(f"'{self.name}' is {self.kind}, which is too large as one low-rank product of rank {rank}")
        t = {name: tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for name, tensor in self.tensors.items()}
        kind = self.update_kind
        if kind.join is None or not self.is_low_rank:
            raise ArtifactError(
                f"'{self.name}' is {self.kind}, which is more than a low-rank product: apply it with its own pass"
            )
        first, second = (low_rank.make_halves(t, name) for name in kind.factors)
        up, down = kind.join(*first, *second)
        tensors = {"down": down.reshape(-1, *shape[1:]), "up": up.reshape(shape[0], -1, *[1] * (len(shape) - 2))}
        return replace(self, kind="lora", tensors=tensors, rank=up.shape[1])

    def without_magnitude(self) -> Entry:
        """Return the low-rank product alone of an update with magnitudes."""
        tensors = {name: tensor for name, tensor in self.tensors.items() if name != "magnitude"}
        word = self.kind.partition("+")[0].partition(" ")[0]
        return replace(self, kind="lora" if word == "dora" else word, tensors=tensors)

    def as_one_group(self) -> Entry:
        """Return the LoRA of a grouped convolution with one `down` for all groups, as in LyCORIS: exact.

        If each group has its own, the ranks add up, and each output has zeros for those of other groups.
        """
        if "down" not in self.tensors or len(self.tensors["down"]) == self.rank or self.experts:
            return self
        down, up = self.tensors["down"], self.tensors["up"]
        parts = torch.unflatten(down, 0, (-1, self.rank))
        if all(torch.equal(part, parts[0]) for part in parts):
            return replace(self, tensors={**self.tensors, "down": parts[0]})
        groups = len(parts)
        whole = torch.einsum("gor,gh->gohr", torch.unflatten(up.flatten(1), 0, (groups, -1)), torch.eye(groups).to(up))
        up = whole.reshape(len(up), -1, *up.shape[2:])
        return replace(self, tensors={**self.tensors, "up": up}, rank=groups * self.rank)

    def with_scale_in_factor(self, dtype: torch.dtype | None = None) -> Entry:
        """Return the same update with a scale of 1, multiplied into a factor and the bias, for readers that take alpha for the
        rank.

        Exact for a power of two, otherwise up to one rounding to `dtype`, None being the factor's own. The factor is the first
        of the product unless another loses less than half as much there, as where small numbers become subnormal.
        """
        names = [name for name in FACTORS if name in self.tensors]
        if self.scale == 1 or self.method or not names:
            return self
        exact = {name: self.tensors[name].double() * self.scale for name in (*names, "bias") if name in self.tensors}
        scaled = {name: value.to(dtype or self.tensors[name].dtype) for name, value in exact.items()}
        lost = {name: (scaled[name].double() - exact[name]).norm() / exact[name].norm().clamp(min=1e-300) for name in names}
        other = min(names, key=lambda name: float(lost[name]))
        key = other if lost[other] < lost[names[0]] / 2 else names[0]
        made = {name: scaled[name] for name in (key, "bias") if name in scaled}
        return replace(self, tensors={**self.tensors, **made}, scale=1.0)

    def product_rank(self) -> int:
        """Return the rank of the update as one low-rank product (`as_lora`) without computing it."""
        factors = self.update_kind.factors
        if self.method or not factors:
            return self.rank
        return math.prod(low_rank.get_inner_rank(self.tensors, name) for name in factors)

    def outputs(self, start: int, number: int) -> Entry:
        """Return the update of some of the layer's outputs; a product that is not a plain LoRA becomes one.

        Raises ArtifactError for a method that mixes the outputs.
        """
        if self.method or self.kind.endswith("by input"):
            names = self._cut()
            cut = {n: t[start : start + number] if n in names else t for n, t in self.tensors.items()}
            return replace(self, tensors=cut)
        entry = self if "down" in self.tensors else self.as_lora((self.sizes()[0], math.prod(self.sizes()[1])))
        cut = {n: t[start : start + number] if n in BY_OUTPUT else t for n, t in entry.tensors.items()}
        return replace(entry, tensors=cut)

    def swapped(self) -> Entry:
        """Return the update with the two halves of the outputs swapped."""
        names = self._cut() if self.method else BY_OUTPUT
        half = (len(self.tensors[names[0]]) if self.method and names else self.sizes()[0] if not self.method else 0) // 2
        first, second = self.outputs(0, half), self.outputs(half, half)
        both = {n: torch.cat([second.tensors[n], t]) if n in names else t for n, t in first.tensors.items()}
        return replace(first, tensors=both)

    def _cut(self) -> tuple[str, ...]:
        """Return the tensors of a method whose first dimension is the layer's outputs. Raises ArtifactError if it mixes
        them."""
        if self.method == "gate":
            return ("gate",) if self.options["side"] == "output" else ()
        method = find_method(self.method)
        found = None if method is None else method.cut
        if found is None:
            what = self.method or self.kind
            raise ArtifactError(
                f"'{self.name}' is several layers in this model, and {what} mixes the outputs of all of them: merge it into a "
                "model where they are one layer, and take the difference with fxplug.extract"
            )
        return found

    def sizes(self) -> tuple[int, tuple[int, ...]]:
        """Return the output width and the weight's other sizes: (in, *kernel), or only their product if no more is known."""
        t = self.tensors
        if "down" in t:
            return t["up"].shape[0], low_rank.trim_shape(t["down"].shape[1:])
        out, rest = self.update_kind.sizes(t)
        return out, low_rank.trim_shape(rest)


@dataclass(frozen=True)
class AdapterFile:
    """The layers of an adapter file. `rest` are the tensors that are no low-rank update, by key.

    A file that has passes as a module has them holds no layers, and their tensors in `own`: see `own_files`.
    """

    source: str
    entries: tuple[Entry, ...]
    rest: Mapping[str, Tensor] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)  # what the file or its configuration says of itself
    own: Mapping[str, Tensor] = field(default_factory=dict)

    __repr__ = format_fields

    @property
    def parts(self) -> tuple[str, ...]:
        """Pipeline components that the file has layers for."""
        return tuple(dict.fromkeys(entry.part for entry in self.entries))


def join(entries: Mapping[str, Entry], widths: Mapping[str, int]) -> Entry:
    """Return the LoRAs of several layers as one LoRA of a layer whose outputs are theirs, concatenated.

    If all have the same `down` and scale, that `down` is kept; otherwise the ranks add up, and `up` has a block for each.
    Exact, up to the rounding of a block whose scale is not the largest.
    """
    entries = {path: entries[path] for path in widths if path in entries}  # a file may have them in another order
    first = max(entries.values(), key=lambda entry: abs(entry.scale))
    downs = [entry.tensors["down"] for entry in entries.values()]
    alike = all(entry.scale == first.scale and torch.equal(entry.tensors["down"], downs[0]) for entry in entries.values())
    rank = first.rank if alike else sum(entry.rank for entry in entries.values())
    dtype = functools.reduce(torch.promote_types, (entry.tensors["up"].dtype for entry in entries.values()))
    rows: list[Tensor] = []
    start = 0
    for path, width in widths.items():
        up = torch.zeros(width, rank, dtype=dtype)
        if path in entries:
            entry = entries[path]
            own = entry.tensors["up"].flatten(1)
            if entry.scale != first.scale:
                own = own.float() * (entry.scale / first.scale)
            up[:, start : start + entry.rank] = own
            start += 0 if alike else entry.rank
        rows.append(up)
    down = downs[0] if alike else torch.cat([down.to(dtype) for down in downs])
    shape = [1] * (down.dim() - 2)
    tensors = {"down": down, "up": torch.cat(rows).reshape(-1, rank, *shape)}
    return replace(first, tensors=tensors, rank=rank)


def bound_change(tensors: Mapping[str, Tensor], scale: float) -> float:
    """At most so much does an update change one weight: no element of its product, scaled, is larger."""
    found = abs(scale)
    for name, tensor in tensors.items():
        if name not in ("bias", "magnitude") and not tensor.is_meta:
            numbers = tensor if tensor.itemsize > 1 else tensor.float()
            low, high = numbers.aminmax()
            inner = 1 if name in ("up", "lokr_w1", "lokr_w2") or name.endswith("_a") else tensor.shape[0]
            found *= max(abs(float(low)), abs(float(high))) * inner
    return found


def kind_named(word: str) -> UpdateKind:
    """Find the kind of updates with this word: of several blocks that hold it the one whose names files have."""
    return max((kind for kind in list_update_kinds().values() if kind.name == word), key=lambda kind: bool(kind.formats))


def has_lokr_of_3_dims(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a Kronecker product has the kernels of a Conv1d, from which PEFT 0.21 computes another weight than
    LyCORIS."""
    return any(tensors[name].dim() == 3 for name in ("lokr_w2", "lokr_t2") if name in tensors)


def add_projections(entries: Sequence[Entry], shapes: Sequence[Sequence[int] | None]) -> list[Entry]:
    """VeRA's entries whose file has no projections with those that its key draws for layers of these shapes.

    They are drawn for the widest of all the layers, so that nothing is done where one has none.
    """
    late = [(n, e) for n, e in enumerate(entries) if e.method == "vera" and "A" not in e.tensors]
    of = [shapes[n] for n, _ in late]
    if not late or any(shape is None or len(shape) != 2 for shape in of):
        return list(entries)
    wide = [max(shape[dim] for shape in of if shape is not None) for dim in (1, 0)]
    made = list(entries)
    for n, entry in late:
        a, b = draw_projections(entry.options["key"], entry.rank, *wide)
        own = entry.tensors["lambda_d"].device  # meta, where a file is only inspected
        made[n] = replace(entry, tensors={**entry.tensors, "A": a.to(own), "B": b.to(own)})
    return made
