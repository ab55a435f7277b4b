"""Structures of containers and leaves, such as the arguments of a call: torch's pytrees, whose module is private."""

from __future__ import annotations

from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_map_only, tree_unflatten

__all__ = ["keystr", "tree_flatten", "tree_flatten_with_path", "tree_leaves", "tree_map_only", "tree_unflatten"]
