"""The graph of a traced module: an FX graph with the edges of regions, and how its code is written."""

from __future__ import annotations

import functools
import keyword
import re
from typing import Any

from torch import fx, nn

from . import ops
from .editing import copy_nodes

# a lookup that FX writes for a name such as "0"; or a string or comment, which is left as it is
LOOKUP = re.compile(
    r'''getattr\((self(?:\.\w+|\[[^\[\]]+\])*), "([^"\\]+)"\)|'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*"|#[^\n]*'''
)
# a path from the root, in text without calls of getattr
PATH = re.compile(r'''\bself((?:\.\w+|\[[^\[\]]+\])+)|'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*"|#[^\n]*''')
STEP = re.compile(r"\.(\w+)|\[[^\[\]]+\]")
OF_THE_ROOT: set[str] = set()  # the names that a traced module has for itself, which its class says


class Graph(fx.Graph):
    """An FX graph whose generated code leaves out the edges of regions and writes `self.blocks[0]`, not `getattr`."""

    def python_code(self, root_module: str, **options: Any) -> Any:
        """The code of the graph without the edges of regions, with `self.blocks[0]` for a path."""
        code = fx.Graph.python_code(without_edges(self), root_module, **options)
        before = None
        while before != code.src:
            before = code.src
            code.src = LOOKUP.sub(_indexed, code.src)
        code.src = PATH.sub(_spelled, code.src)
        return code

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Graph:
        return copy_graph(self)


def _indexed(found: re.Match[str]) -> str:
    return f"{found[1]}[{found[2] if found[2].isdigit() else repr(found[2])}]" if found[1] else found[0]


def _spelled(found: re.Match[str]) -> str:
    if found[1] is None:
        return found[0]
    steps = [
        f"[{step[1]!r}]" if step[1] and by_index(step[1], first=step.start() == 0) else step[0]
        for step in STEP.finditer(found[1])
    ]
    return "self" + "".join(steps)


@functools.cache
def by_index(key: str, first: bool) -> bool:
    """Whether code takes a child, parameter or buffer as `module[key]`: an attribute of that name would be another.

    `first` says that the module is the root, a TracedModule; below it the modules with such keys are Containers.
    """
    if not key.isascii() or not key.isidentifier() or keyword.iskeyword(key):
        return True
    return key in (OF_THE_ROOT if first else {"classes", "attributes", *dir(nn.Module)})


def copy_graph(graph: fx.Graph) -> Graph:
    """The same graph again, node names and meta included."""
    new = Graph()
    copy_nodes(graph.nodes, new, {})
    return new


def without_edges(graph: fx.Graph) -> fx.Graph:
    """The graph that runs: the same without the identities that mark the edges of regions."""
    new = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is ops.edge and isinstance(node.args[0], fx.Node):
            values[node] = values[node.args[0]]
        else:
            copy_nodes([node], new, values)
    return new
