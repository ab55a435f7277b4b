"""Which inputs a plugin takes out of what `feed_input_data` gets, read from its source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable

from .base_classes import BasePluginBlock

TAKING = ("feed_input_data", "input_data", "register_input_feeder_to")


def list_read_inputs(kind: type[BasePluginBlock], known: Iterable[str]) -> list[str] | None:
    """Return those of the known inputs whose names are strings in the code of a plugin's class; None if it takes no inputs.

    A class takes inputs if it has a `feed_input_data`, or uses the attribute that HCP-Diffusion's own one sets,
    `self.input_data`. The code of its base classes counts as well.
    """
    texts: set[object] = set()
    takes = False
    for owner in kind.__mro__:
        if not issubclass(owner, BasePluginBlock) or owner.__module__ == BasePluginBlock.__module__:
            continue
        takes = takes or "feed_input_data" in vars(owner)
        try:
            nodes = [*ast.walk(ast.parse(textwrap.dedent(inspect.getsource(owner))))]
        except (OSError, SyntaxError):
            continue
        takes = takes or any(isinstance(node, ast.Attribute) and node.attr in TAKING for node in nodes)
        texts |= {node.value for node in nodes if isinstance(node, ast.Constant)}
    return [name for name in known if name in texts] if takes else None
