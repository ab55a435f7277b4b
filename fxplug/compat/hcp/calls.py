"""How the model calls its layers: which arguments by position, which by name."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import fx


@dataclass(frozen=True)
class CallArguments:
    """The arguments of one call: `count` by position, and the `names` of the tensors given by name.

    A forward hook gets the arguments by position and no others, and so does a plugin. Where none is by position, `x[:]` is
    what was given by name, in order, and a plugin sees that.
    """

    count: int
    names: tuple[str, ...] = ()

    def visible_arguments(self, x: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments that a hook sees: those by position."""
        return x[: self.count or len(self.names)]

    def joined(self, args: tuple[Any, ...], x: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments, with those that a hook sees replaced."""
        return (*args, *x[len(self.visible_arguments(x)) :])


POSITIONAL = CallArguments(sys.maxsize)
_known: WeakKeyDictionary[fx.Graph, dict[str, CallArguments]] = WeakKeyDictionary()


def find_call(gm: Any, key: str) -> CallArguments:
    """Return the call of a region in a traced module. Inputs that passes added to the model are left out."""
    graph = gm.graphs.get(gm.training, gm.graph)
    if graph not in _known:
        _known[graph] = _calls(graph)
    return _known[graph].get(key, CallArguments(0))


def _calls(graph: fx.Graph) -> dict[str, CallArguments]:
    counts: dict[str, int] = {}
    names: dict[str, dict[int, str]] = {}
    for node in graph.nodes:
        port = node.meta.get("port")
        if port is None:
            continue
        if node.op == "call_module":
            counts[port.path] = len(node.args)
            given = [name for name, value in node.kwargs.items() if isinstance(value, fx.Node)]
            names[port.path] = dict(enumerate(given, len(node.args)))
        elif port.side == "in" and (port.path or "pass" not in node.meta):
            names.setdefault(port.path, {})[node.meta["index"]] = str(port.keys[0])
            if "call" in node.meta:
                counts[port.path] = len(node.meta["call"])
    return {
        key: CallArguments(count := counts.get(key, 0), tuple(name for index, name in sorted(named.items()) if index >= count))
        for key, named in names.items()
    }
