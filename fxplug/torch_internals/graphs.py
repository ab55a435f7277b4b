"""What torch.fx says of a graph's nodes and functions without promising it."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from torch import fx
from torch.fx.node import _get_qualified_name

__all__ = ["is_erased", "qualified_name"]

# the name under which generated code calls a function
qualified_name: Callable[..., str] = _get_qualified_name
# whether a node was taken out of its graph
is_erased: Callable[[fx.Node], bool] = attrgetter("_erased")
