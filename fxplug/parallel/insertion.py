"""Where in a graph new nodes go, and what they read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import fx

Where = Callable[[fx.Graph], AbstractContextManager[Any]]


def behind(node: fx.Node) -> Where:
    """Right behind a node."""
    return lambda graph: graph.inserting_after(node)


def ahead_of(node: fx.Node) -> Where:
    """Right before a node."""
    return lambda graph: graph.inserting_before(node)


def nodes_among(values: Any) -> list[fx.Node]:
    """The nodes in values, which may be nested as arguments of nodes are."""
    found: list[fx.Node] = []
    for value in values:
        fx.node.map_arg(value, found.append)
    return found
