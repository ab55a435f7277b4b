"""Blocks that steer a diffusion model by a condition: residuals that are added, when they are, and attention to an image."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import weightfiles
from .blocks import Block
from .errors import SpecError, did_you_mean
from .paths import select

if TYPE_CHECKING:
    from .match import Site

CLOSE = 1e-6  # a step of the schedule is about 1e-3: this only makes up for rounding in float32


class Add(Block):
    """value + residual * strength, as ControlNet (arXiv 2302.05543) and T2I-Adapter (arXiv 2302.08453) add theirs.

    `value` (batch, ...) is floating point; `residual` has its dtype and shape, or 1 where it is the same everywhere;
    `strength` is one number, or one for each sample (batch,), of any real dtype. Zero leaves `value` as it was.
    """

    inline: ClassVar[bool] = True
    neutral = True

    @classmethod
    def at(cls, site: Site) -> Add:
        """Raises SpecError where the residual does not fit the value that it is added to."""
        value, residual = site.args[:2]
        if not _fits(residual.shape, value.shape):
            raise SpecError(
                f"{residual} does not fit {value}: a residual has the shape of what it is added to, so the network was made "
                "for a model of other widths or sizes, or takes a condition of another size"
            )
        return cls()

    def forward(self, value: Tensor, residual: Tensor, strength: Tensor) -> Tensor:
        return value + residual * per_sample(strength, value)


def _fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(shape) == len(wanted) and all(a in (1, b) for a, b in zip(shape, wanted, strict=True))


def per_sample(strength: Tensor, value: Tensor) -> Tensor:
    """One number, or one for each sample, so that it multiplies what is like `value` (batch, ...) and leaves its dtype."""
    # type_as and not `to`: a graph would keep the dtype that it was traced with
    return strength.type_as(value).reshape(-1, *[1] * (value.dim() - 1)) if strength.dim() else strength


class Gate(Block):
    """Lets a strength act in a part of the noise schedule only, chosen by tensors, so that another part recompiles nothing.

    forward(timestep, strength, start, end) gives the timestep as it came, and the strength where
    start <= 1 - timestep / timesteps <= end, else zero. `timestep` is one number or one for each sample (batch,), of any
    real dtype, and runs from `timesteps` (all noise) down to 0; the other three are one number each.

    `start` and `end` are fractions of the noise schedule. The pipelines of diffusers count fractions of the steps that they
    take: step i of n acts when start <= i / n and (i + 1) / n <= end. With steps evenly spaced from the last timestep
    down, these starts are the same, and ours has the one step more that begins at `end`.
    """

    inline: ClassVar[bool] = True
    neutral = True

    def __init__(self, timesteps: float = 1000) -> None:
        """`timesteps` is the number that stands for nothing but noise. Raises SpecError unless it is above zero."""
        super().__init__()
        if isinstance(timesteps, bool) or not isinstance(timesteps, (int, float)) or timesteps <= 0:
            raise SpecError(f"timesteps must be a number above zero, not {timesteps!r}")
        self.timesteps = timesteps

    @classmethod
    def at(cls, site: Site, timesteps: float = 1000) -> Gate:
        return cls(timesteps)

    def forward(self, timestep: Tensor, strength: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        done = 1 - timestep.to(torch.float32) / self.timesteps
        # the numbers stand on the right, where they may be plain ones too
        return timestep, ((done + CLOSE >= start) & (done - CLOSE <= end)) * strength


class ImageAttention(Block):
    """value + strength * attention(query, image): the second cross-attention of IP-Adapter (arXiv 2308.06721).

    `value` (batch, tokens, width) is what the layer's attention to the text gave, before its output projection; `query`
    (batch, tokens, width) what it asked with; `image` (batch, ..., features) the image tokens, those of several images in
    dimensions of their own; `strength` one number, or one for each sample. New, the values are zero, so the output stays.
    """

    def __init__(self, width: int, features: int, heads: int, fresh: bool = True) -> None:
        """`fresh` says that no trained weights will come. Raises SpecError where the heads do not divide the width."""
        super().__init__()
        if heads < 1 or width % heads:
            raise SpecError(f"{heads} heads do not divide a width of {width}")
        self.width, self.features, self.heads, self.fresh = width, features, heads, fresh
        self.neutral = fresh  # type: ignore[misc]  # of one block: with trained weights it is not
        self.to_k_ip = nn.Linear(features, width, bias=False)
        self.to_v_ip = nn.Linear(features, width, bias=False)
        if fresh:
            nn.init.zeros_(self.to_v_ip.weight)

    @classmethod
    def at(
        cls, site: Site, heads: str | int = "heads", weights: Mapping[str, Any] | str | None = None, order: str | None = None
    ) -> ImageAttention:
        """An attention beside the one that `site` is a layer of.

        `heads` is a number, or the attribute that holds it on one of the modules around the site. `weights` is a checkpoint
        of IP-Adapter: a file, or its content, `{"image_proj": {...}, "ip_adapter": {"1.to_k_ip.weight": ...}}`. It numbers
        the layers 1, 3, 5, ... in the order in which the model registers them; `order` is a pattern for all of them
        (default: the pattern of the rule). Raises SpecError for a checkpoint of another layout, count or shape.
        """
        query, image = site.args[1:3]
        block = cls(query.shape[-1], image.shape[-1], _heads(site, heads), fresh=weights is None)
        if weights is not None:
            block.fill(_checkpoint(weights, site.root), *_number(site, order))
        return block

    def fill(self, weights: Mapping[str, Tensor], number: int, layers: int) -> None:
        """Take the weights of layer `number` of a checkpoint that should have as many as `layers`."""
        known = {key.partition(".")[0] for key in weights}
        if len(known) != layers:
            raise SpecError(f"the checkpoint has weights for {len(known)} layers, and this model has {layers} cross-attentions")
        for name, linear in (("to_k_ip", self.to_k_ip), ("to_v_ip", self.to_v_ip)):
            key = f"{number}.{name}.weight"
            if key not in weights:
                raise SpecError(f"the checkpoint has no key 'ip_adapter.{key}'{did_you_mean(key, weights)}")
            if weights[key].shape != linear.weight.shape:
                found, wanted = list(weights[key].shape), list(linear.weight.shape)
                raise SpecError(f"'ip_adapter.{key}' is {found} in the checkpoint, and this layer takes {wanted}")
            if not linear.weight.is_meta:
                linear.weight.data.copy_(weights[key])

    def forward(self, value: Tensor, query: Tensor, image: Tensor, strength: Tensor) -> Tensor:
        tokens = image.reshape(image.shape[0], -1, image.shape[-1])
        found = attention(query, self.to_k_ip(tokens), self.to_v_ip(tokens), self.heads)
        return value + found * per_sample(strength, value)

    def extra_repr(self) -> str:
        return f"{self.width}, {self.features}, heads={self.heads}"


def attention(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    """softmax(q k' / sqrt(width of a head)) v in each head; (batch, tokens, width) all, query with tokens of its own."""
    q, k, v = (t.reshape(*t.shape[:2], heads, -1).transpose(1, 2) for t in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def as_tokens(model: nn.Module) -> nn.Module:
    """What stands for an image projection where the image comes as tokens: it gives back what it gets."""
    return nn.Identity()


def _heads(site: Site, heads: str | int) -> int:
    if isinstance(heads, int):
        return heads
    parts = site.path.partition("@")[0].split(".")
    for count in range(len(parts), 0, -1):
        found = getattr(site.root.get_submodule(".".join(parts[:count])), heads, None)
        if isinstance(found, int):
            return found
    raise SpecError(f"no module around '{site.path}' has a number '{heads}': give the count of heads itself")


def _number(site: Site, order: str | None) -> tuple[int, int]:
    """The number that a checkpoint gives to a site's layer, and how many layers there are."""
    # as for rules, a pattern means what passes put in only where it begins with the name of the pass
    passes = {site.pass_name, *(entry["name"] for entry in getattr(site.root, "meta", {}).get("passes", []))}
    path, modules = site.path.partition("@")[0], [name for name, _ in site.root.named_modules()]
    found: dict[str, Any] = {}
    for pattern in [order] if order is not None else site.rule.match.patterns:
        own = passes - {pattern.partition(".")[0]}
        names = [name for name in modules if name.partition(".")[0] not in own]
        found.update(select(pattern if pattern.startswith("re:") else pattern.partition(":")[0], names))
    if path not in found:
        raise SpecError(f"'{path}' is none of the layers that order '{order}' names, so its number is not known")
    return 2 * list(found).index(path) + 1, len(found)


def _checkpoint(weights: Mapping[str, Any] | str, root: nn.Module) -> Mapping[str, Tensor]:
    """The `ip_adapter` half of a checkpoint, nested or with flat keys; a file is read once for all layers of a model."""
    if not isinstance(weights, Mapping):
        file = Path(weights)
        if not file.is_file():
            raise SpecError(f"no checkpoint '{file}'")
        key = str(file), file.stat().st_mtime_ns
        if (known := _files.get(root)) is None or known[0] != key:
            _files[root] = known = key, _read(str(file))
        weights = known[1]
    assert isinstance(weights, Mapping)
    inner = weights.get("ip_adapter")
    if isinstance(inner, Mapping):
        return inner
    flat = {key.removeprefix("ip_adapter."): t for key, t in weights.items() if key.startswith("ip_adapter.")}
    if not flat:
        first = ", ".join(list(weights)[:3]) or "nothing"
        raise SpecError(f"this is no checkpoint of IP-Adapter, which has 'ip_adapter' and 'image_proj'; it has {first}")
    return flat


# the last file of each model, which goes when the model does
_files: WeakKeyDictionary[nn.Module, tuple[tuple[str, int], Mapping[str, Any]]] = WeakKeyDictionary()


def _read(file: str) -> Mapping[str, Any]:
    found, _ = weightfiles.read(file, raises=lambda finding: SpecError(f"'{file}' {finding}"))
    if not isinstance(found, Mapping):
        raise SpecError(f"'{file}' holds a {type(found).__name__}, no weights by name")
    return found
