"""IP-Adapter: attention to the tokens of an image beside those of the text (Ye et al. 2023, arXiv 2308.06721)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.nn.functional as F
from torch import Tensor, nn

from ..core import weight_files
from ..core.errors import SpecError, did_you_mean
from ..core.reading import get_stamp
from ..core.spec.addresses import select
from .base import Block, find_attribute
from .control import align_to_samples

if TYPE_CHECKING:
    from ..core.rewriter.sites import Site


class ImageAttention(Block):
    """value + strength * attention(query, image): the second cross-attention of IP-Adapter (arXiv 2308.06721).

    `value` (batch, tokens, width) is what the layer's attention to the text gave, before its output projection; `query`
    (batch, tokens, width) what it asked with; `image` (batch, ..., features) the image tokens, those of several images in
    dimensions of their own; `strength` one number, or one for each sample. New, the values are zero, so the output stays.
    """

    def __init__(self, width: int, features: int, heads: int, fresh: bool = True) -> None:
        """Create the block; `fresh` says that no trained weights will be loaded. Raises SpecError if the heads do not divide
        the width."""
        super().__init__()
        if heads < 1 or width % heads:
            raise SpecError(f"a width of {width} cannot be divided into {heads} heads")
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
        """Make an attention beside the one that `site` is a layer of.

        `heads` is a number, or the name of an attribute of one of the modules around the site. `weights` is a checkpoint of
        IP-Adapter: a file, or its content, `{"image_proj": {...}, "ip_adapter": {"1.to_k_ip.weight": ...}}`. It numbers the
        layers 1, 3, 5, ... in the order in which the model registers them; `order` is a pattern for all of them (default: the
        pattern of the rule). Raises SpecError for a checkpoint of another layout, count or shape.
        """
        query, image = site.args[1:3]
        block = cls(query.shape[-1], image.shape[-1], _heads(site, heads), fresh=weights is None)
        if weights is not None:
            block.fill(_checkpoint(weights, site.root), *_number(site, order))
        return block

    def fill(self, weights: Mapping[str, Tensor], number: int, layers: int) -> None:
        """Load the weights of layer `number` of a checkpoint that should have `layers` layers."""
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
        return value + found * align_to_samples(strength, value)

    def extra_repr(self) -> str:
        return f"{self.width}, {self.features}, heads={self.heads}"


def attention(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    """Compute softmax(q k' / sqrt(width of a head)) v in each head; all are (batch, tokens, width), the query with its own
    number of tokens."""
    q, k, v = (t.reshape(*t.shape[:2], heads, -1).transpose(1, 2) for t in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def as_tokens(model: nn.Module) -> nn.Module:
    """Return an identity in place of an image projection, for images that are given as tokens."""
    return nn.Identity()


def _heads(site: Site, heads: str | int) -> int:
    if isinstance(heads, int):
        return heads
    if (found := find_attribute(site, heads)) is not None:
        return found
    raise SpecError(f"no module around '{site.path}' has an attribute '{heads}': give the number of heads itself")


def _number(site: Site, order: str | None) -> tuple[int, int]:
    """Return the number of a site's layer in a checkpoint, and the number of layers."""
    # as for rules, a pattern means what passes put in only where it begins with the name of the pass
    passes = {site.pass_name, *(entry["name"] for entry in getattr(site.root, "meta", {}).get("passes", []))}
    path, modules = site.path.partition("@")[0], [name for name, _ in site.root.named_modules()]
    found: dict[str, Any] = {}
    for pattern in [order] if order is not None else site.rule.match.patterns:
        own = passes - {pattern.partition(".")[0]}
        names = [name for name in modules if name.partition(".")[0] not in own]
        found.update(select(pattern if pattern.startswith("re:") else pattern.partition(":")[0], names))
    if path not in found:
        raise SpecError(f"'{path}' is not one of the layers that order '{order}' names, so its number is not known")
    return 2 * list(found).index(path) + 1, len(found)


def _checkpoint(weights: Mapping[str, Any] | str, root: nn.Module) -> Mapping[str, Tensor]:
    """Return the `ip_adapter` half of a checkpoint, nested or with flat keys; a file is read once for all layers of a model."""
    if not isinstance(weights, Mapping):
        file = Path(weights)
        if not file.is_file():
            raise SpecError(f"no such checkpoint: '{file}'")
        key = str(file), get_stamp(file.stat())
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
        raise SpecError(f"this is not a checkpoint of IP-Adapter, which has 'ip_adapter' and 'image_proj'; it has {first}")
    return flat


# the last file of each model, which goes when the model does
_files: WeakKeyDictionary[nn.Module, tuple[tuple[str, tuple[int, ...]], Mapping[str, Any]]] = WeakKeyDictionary()


def _read(file: str) -> Mapping[str, Any]:
    found, _ = weight_files.read(file, raises=lambda finding: SpecError(f"'{file}' {finding}"))
    if not isinstance(found, Mapping):
        raise SpecError(f"'{file}' contains a {type(found).__name__}, not a dict of tensors")
    return found
