"""Edits of a graph: the few operations of which every rewrite is made.

What torch.fx offers for it is called in this file alone. Arguments may be nested as those of nodes are, in tuples, lists,
dicts and slices; nothing here checks that what a node reads stands before it, `graph.lint()` does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, fx

# --- new nodes


def insert(
    graph: fx.Graph,
    op: str,
    target: Any,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    after: fx.Node | None = None,
    before: fx.Node | None = None,
    name: str | None = None,
    meta: Mapping[str, Any] | None = None,
) -> fx.Node:
    """A new node right after or right before another, or at the end of the graph, with this meta.

    `op`, `target` and the arguments are those of an `fx.Node`. Its name is `name`, or made of the target, and gets a number
    where the graph has it already.
    """
    node: fx.Node = graph.create_node(op, target, args, dict(kwargs or {}), name=name)
    node.meta.update(meta or {})
    move(node, after=after, before=before)
    return node


def meta_of(value: fx.Node | Tensor, *keys: str) -> dict[str, Any]:
    """The shape and dtype of a tensor, as meta has them; of a node what is known of these two, or of the keys named."""
    if isinstance(value, Tensor):
        return {"shape": tuple(value.shape), "dtype": value.dtype}
    return {key: value.meta[key] for key in keys or ("shape", "dtype") if key in value.meta}


def copy_nodes(nodes: Iterable[fx.Node], into: fx.Graph, values: dict[fx.Node, fx.Node]) -> None:
    """Copies of nodes at the end of another graph, names and meta included.

    `values` says what stands there for the nodes that they read, and for each one in it already, which is not copied; it
    learns the copies. Raises KeyError for a node that reads what is neither.
    """
    for node in nodes:
        if node not in values:
            values[node] = into.node_copy(node, values.__getitem__)


# --- nodes that are there


def move(node: fx.Node, *, after: fx.Node | None = None, before: fx.Node | None = None) -> None:
    """Put a node right after or right before another of its graph."""
    if before is not None:
        before.prepend(node)
    elif after is not None:
        after.append(node)


def change(
    node: fx.Node, *, target: Any = None, args: tuple[Any, ...] | None = None, kwargs: Mapping[str, Any] | None = None
) -> None:
    """Let a node call another target, or give it other arguments; what is None stays."""
    if target is not None:
        node.target = target
    if args is not None:
        node.args = args
    if kwargs is not None:
        node.kwargs = dict(kwargs)


def set_argument(node: fx.Node, position: int, name: str, value: Any) -> None:
    """Give a node another value for an argument, which stands at this position or, where that is not given, has this name."""
    if len(node.args) > position:
        change(node, args=(*node.args[:position], value, *node.args[position + 1 :]))
    else:
        change(node, kwargs={**node.kwargs, name: value})


def rewire(node: fx.Node, table: Mapping[fx.Node, Any]) -> None:
    """Let a node read, wherever in its arguments a node of this table stands, what the table has for it: any value."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda read: table.get(read, read))
    change(node, args=args, kwargs=kwargs)


# --- who reads a value


def redirect(value: fx.Node, new: fx.Node, keep: Collection[fx.Node] = ()) -> None:
    """Let those who read a value read a new node instead, all but that node itself and those to `keep`."""
    value.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new and user not in keep)


def replace(node: fx.Node, value: Any) -> None:
    """Let those who read a node read a value instead, another node or nested ones, and take the node out of its graph."""
    for user in list(node.users):
        rewire(user, {node: value})
    erase([node])


def erase(nodes: Iterable[fx.Node]) -> None:
    """Take nodes out of their graph, the last first. Raises RuntimeError where one is read by another that stays."""
    for node in sorted(nodes, reverse=True):
        node.graph.erase_node(node)


def erase_unused(nodes: Iterable[fx.Node], which: Callable[[fx.Node], bool] | None = None) -> None:
    """Take out those of the nodes that nobody reads, the last first: what they alone read is unused then, and goes as well.

    Inputs and outputs of the graph stay, and nodes of which `which` is not true.
    """
    for node in sorted(nodes, reverse=True):
        if not node.users and node.op not in ("placeholder", "output") and (which is None or which(node)):
            erase([node])
