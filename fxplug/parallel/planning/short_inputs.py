"""Inputs of an operation made short for a try: what it does on a thousand tokens, it does on some tens."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ...core.torch_internals import modules as pytree
from .streams import Leaf
from .trials import ShardTrials, is_value, list_leaves
from .walk import Walk

LONG = 32  # a dimension that is longer is shorter in a try


def shorten_inputs(
    walk: Walk, tries: ShardTrials, values: Mapping[fx.Node, Any], node: fx.Node
) -> tuple[dict[fx.Node, Any], Any] | None:
    """Shorten the long dimensions of a node's inputs, and of its result, that no number in the arguments refers to.

    Returns None if there are no such dimensions. Different sizes stay different, and keep their remainder modulo 8.
    """
    inputs, true = node.all_input_nodes, walk.values[node]
    if not all(isinstance(leaf, Tensor) for leaf in list_leaves(true)):
        return None
    fixed, free = {*tries.streams.true, *tries.streams.small}, set[int]()
    fx.node.map_aggregate((node.args, node.kwargs), lambda leaf: fixed.add(leaf) if type(leaf) is int else None)
    if node.op == "call_module":
        fixed.update(n for t in tries.gm.get_submodule(str(node.target)).state_dict().values() for n in t.shape)
    for leaf in (leaf for one in inputs for leaf in list_leaves(values[one]) if isinstance(leaf, Leaf)):
        shape = leaf.tensor.shape
        fixed.update(() if leaf.tensor.is_meta else shape, () if leaf.place is None else [shape[leaf.place.dim]])
        free.update(n for n in shape if n > LONG)
    table: dict[int, int] = {}
    for size in sorted(free - fixed):
        table[size] = next(n for n in itertools.count(LONG // 2 + size % 8, 8) if n not in {*fixed, *free, *table.values()})
    if not any(new < size for size, new in table.items()):
        return None

    def less(leaf: Any) -> Any:
        if isinstance(leaf, Leaf):
            return leaf._replace(tensor=less(leaf.tensor))
        if type(leaf) is int:
            return table.get(leaf, leaf)
        if not isinstance(leaf, Tensor) or not leaf.is_meta:
            return leaf
        return torch.empty([table.get(n, n) for n in leaf.shape], dtype=leaf.dtype, device="meta")

    return {one: pytree.tree_map(less, values[one], is_leaf=is_value) for one in inputs}, pytree.tree_map(less, true)
