"""An operation as planning tells it from others: its arguments by name, and what matters of its values."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from ...core.torch_internals import modules as pytree
from .streams import Leaf, StreamNumber
from .trials import is_value, leaves_of, name_of

PLAIN = (Tensor, int, float, bool, complex, str, type(None), tuple, list, dict)


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of scaled_dot_product_attention by name."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    defaults = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    return {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}


def normed(node: fx.Node) -> dict[str, Any] | None:
    """The arguments of layer_norm and rms_norm by name, None for another node."""
    names = {"layer_norm": ("weight", "bias", "eps"), "rms_norm": ("weight", "eps")}.get(name_of(node))
    if names is None or node.op != "call_function":
        return None
    given = dict(zip(("input", "normalized_shape", *names), node.args, strict=False))
    return {"weight": None, "bias": None, "eps": 1e-5 if "bias" in names else None, **given, **node.kwargs}


def is_plain_result(value: Any) -> bool:
    """Whether parts of a result can be gathered into one like it: not where it is of a class of its own."""
    own = type(value) is not dict if isinstance(value, dict) else hasattr(value, "_fields")
    return isinstance(value, PLAIN) and not own


def is_placed(leaf: Any) -> bool:
    """Whether a leaf is a tensor that is split."""
    return isinstance(leaf, Leaf) and leaf.place is not None


def leaf_like(true: Any, kind: Any) -> Any:
    """A leaf of a result like one that was tried before."""
    if isinstance(true, Tensor):
        return Leaf(true, kind)
    return kind if isinstance(kind, StreamNumber) else true


def signature(value: Any) -> Any:
    """What matters of a value to what an operation makes of its parts."""
    found: list[Any] = [str(pytree.tree_structure(value, is_leaf=is_value))]
    for leaf in leaves_of(value):
        if isinstance(leaf, Leaf):
            known = not leaf.tensor.is_meta
            content = leaf.tensor.cpu().numpy().tobytes() if known else b""
            found.append((tuple(leaf.tensor.shape), leaf.tensor.dtype, leaf.place, content))
        elif isinstance(leaf, (int, float, bool, str, type(None), StreamNumber)):
            found.append((type(leaf), leaf))
        else:
            found.append(repr(leaf))
    return tuple(found)
