"""A new last layer: parameters of other sizes in the place of the old ones."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..core import weight_files
from ..core.errors import SpecError, did_you_mean
from .base import Block, check_count

if TYPE_CHECKING:
    from ..core.rewriter.sites import Site


BEFORE = "base_model.model."  # of every key in a file of PEFT
WRAPPED = re.compile(r"\.modules_to_save(?:\.default)?(?=\.)")  # PEFT's wrapper around a layer that it saves whole


def read_saved_layer(path: str | os.PathLike[str], layer: str, name: str) -> Tensor:
    """Return a parameter of a layer from an adapter file or a checkpoint; `path` is a file or a folder of PEFT.

    Raises ArtifactError for a file that cannot be read, and SpecError for one that has no such parameter.
    """
    file = weight_files.find(path)
    found, _ = weight_files.read(file)
    values = found if isinstance(found, Mapping) else {}
    known = {WRAPPED.sub("", str(key).removeprefix(BEFORE)): value for key, value in values.items()}
    value = known.get(f"{layer}.{name}")
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise SpecError(f"'{file}' has no '{layer}.{name}'{did_you_mean(f'{layer}.{name}', known)}")
    return value


class Head(Block):
    """A weight or bias of another size in the place of a layer's own, so that it gives as many classes, or channels.

    `shape` is the new parameter's. A weight begins as torch's Linear does (uniform within 1 / sqrt(inputs)), a bias as zeros.
    """

    resizes = True

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = list(shape)
        self.value = nn.Parameter(torch.zeros(self.shape))
        if len(self.shape) > 1:
            nn.init.kaiming_uniform_(self.value, a=math.sqrt(5))

    @classmethod
    def at(
        cls,
        site: Site,
        classes: int | None = None,
        size: int | None = None,
        weights: str | None = None,
        same: bool = False,
    ) -> Head:
        """Make the block for the weight or bias of a Linear or convolution; with `weights`, from the layer's shape in an
        adapter file.

        With `same` it has the parameter's own shape, of any layer, for a value that is loaded. Raises SpecError unless one of
        `classes` and `size` is given, or `weights`, and for one that does not fit.
        """
        if same:
            return cls(site.parameter.shape)
        given = {"classes": classes, "size": size}
        said = {name: number for name, number in given.items() if number is not None}
        if len(said) > 1 or not said and weights is None:
            raise SpecError(f"needs one of 'classes' and 'size', or 'weights'; found {' and '.join(said) or 'none'}")
        for name, number in said.items():
            check_count(name, number)
        groups = getattr(site.module, "groups", 1)
        if groups > 1:
            raise SpecError(f"'{site.path}' is a convolution of {groups} groups, which a new head does not support")
        for entry in getattr(site.root, "meta", {}).get("passes", []):
            if any(other["path"].partition("@")[0] == site.path.partition("@")[0] for other in entry["sites"]):
                raise SpecError(
                    f"pass '{entry['name']}' was applied to it at its old size: put the new head before that pass in 'passes'"
                )
        inner = list(site.parameter.shape[1:])
        if weights is None:
            return cls([*said.values(), *inner])
        layer, name = site.path.partition("@")[0], str(site.port.keys[0])
        value = read_saved_layer(weights, layer, name)
        wanted = [next(iter(said.values()), value.shape[0] if value.dim() else 0), *inner]
        if list(value.shape) != wanted or not value.numel():
            raise SpecError(f"'{layer}.{name}' is {list(value.shape)} in '{weights}', and must be {wanted}")
        made = cls(wanted)
        made.value.data.copy_(value)
        return made

    def forward(self, value: Tensor) -> Tensor:
        """Return the new parameter, whatever the old one is."""
        return self.value

    def extra_repr(self) -> str:
        return str(self.shape)
