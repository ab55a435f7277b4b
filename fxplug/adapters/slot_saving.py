"""An adapter in the slots of a module, saved as a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from ..core.locks import hold
from .held import in_slots
from .writing import Saved, content, write

if TYPE_CHECKING:
    from .slots import Adapters


def save(
    self: Adapters,
    name: str,
    path: str | os.PathLike[str],
    *,
    as_: str = "peft",
    part: str | None = None,
    partial: bool = False,
    dtype: torch.dtype | None = None,
    about: Mapping[str, str] | None = None,
) -> Saved:
    """Write an adapter as a tool reads it, see `writing.save_adapter`: what was loaded comes back to the last bit.

    The slots may be used meanwhile, and are not changed while they are read. Raises SpecError for a name that is not
    loaded, and what `save_adapter` does.
    """
    with hold(self.turns):
        held = in_slots(self, self.check_known(name))
    made = content(held, as_, self.about(), name=name, part=part, partial=partial, dtype=dtype, said=about, there=self.there)
    return write(made, path, as_)
