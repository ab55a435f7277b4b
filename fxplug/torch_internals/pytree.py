"""Nested values as a list of leaves and their structure; torch.export's own structures are of this kind and no other."""

from __future__ import annotations

from torch.utils._pytree import (
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_structure,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

__all__ = ["tree_flatten", "tree_leaves", "tree_map", "tree_structure", "tree_unflatten", "treespec_dumps", "treespec_loads"]
