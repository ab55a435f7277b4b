"""What functions do to the places of their values, by their names, and by torch's tags."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import fx, nn

from ..core.ir import functions, ops
from ..core.ir.traced_module import list_class_names
from .dimensions import MOVED, RESHAPED

# functions whose result may have the sizes of a value and its places elsewhere, or makes others of them
STRAY = (
    "roll", "flip", "fliplr", "flipud", "rot90", "sort", "argsort", "msort", "topk", "gather", "index_select", "take",
    "take_along_dim", "scatter", "scatter_add", "index_add", "index_copy", "index_put", "masked_scatter", "masked_select",
    "grid_sample", "fold", "unfold", "repeat_interleave", "inverse", "outer", "setitem", "conv1d", "conv3d", "conv2d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "tensordot", "addmm", "kron", "cross", "stack", "repeat",
    "tile", "copy", "put_members", "as_strided", "multi_head_attention_forward", "narrow", "select", "diff", "bilinear",
)  # fmt: skip
# functions beside torch's own pointwise ones that leave what comes of each place where it is
LOCAL = (
    "edge", "to", "type", "float", "half", "double", "bfloat16", "contiguous", "clone", "detach", "expand", "real",
    "imag", "conj", "complex", "polar", "softmax", "log_softmax", "softmin", "cumsum", "cumprod", "layer_norm",
    "rms_norm", "group_norm", "batch_norm", "instance_norm", "normalize", "dropout", "dropout1d", "dropout2d",
    "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "truediv", "floordiv", "mod", "pos", "invert",
    "true_divide", "floor_divide", "divide", "multiply", "subtract", "negative", "absolute", "hardswish", "prelu",
    "softsign", "logsigmoid", "tanhshrink", "glu", "not", "long", "int", "bool", "cpu", "cuda", "type_as", "expand_as",
    "triu", "tril",
)  # fmt: skip
MADE = ("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_full",
        "new_empty", "new_tensor")  # fmt: skip
LIKE = ("type_as", "to", "expand_as", "view_as", "reshape_as")  # of whose second value only dtype or sizes matter
REDUCED = ("mean", "sum", "amax", "amin", "var", "std", "norm", "vector_norm", "logsumexp", "prod", "any", "all")
PARTED = ("chunk", "split", "split_with_sizes", "tensor_split")
PRODUCTS = ("matmul", "bmm", "mm", "baddbmm")
VIEWS = (*MOVED, *RESHAPED, *PARTED, "getitem", "getattr", "edge", "unbind", "narrow", "select", "view_as", "as_strided",
         "diagonal", "view_as_real", "view_as_complex", "real", "imag", "unfold", "contiguous", "detach", "expand")  # fmt: skip


def get_name(node: fx.Node) -> str:
    """Return the name of the function or method that a node calls, without underscores around it; "" for a module."""
    return "" if node.op == "call_module" else functions.get_short_name(node.target).strip("_")


def may_write(node: fx.Node) -> bool:
    """Return whether a node may change a value in place."""
    name = getattr(node.target, "__name__", str(node.target)) if node.op in ("call_function", "call_method") else ""
    return name == "setitem" or (name.endswith("_") and not name.endswith("__")) or node.kwargs.get("out") is not None


def is_view(node: fx.Node) -> bool:
    """Return whether a value may share memory with the first argument: nearly any method may give a view."""
    known = node.op == "call_method" or get_name(node) in VIEWS or may_write(node)
    return known and get_name(node) not in (*MADE, "clone") and bool(node.args) and isinstance(node.args[0], fx.Node)


def has_computed_one(node: fx.Node, shape: Sequence[int]) -> bool:
    """Return whether a size behind the batch is computed and 1, such as of one window: others may not be in a row."""
    sizes: Any = next((size for size in node.args[1:] if isinstance(size, (tuple, list))), node.args[1:])
    start: Any = node.args[1] if get_name(node) == "unflatten" else 0
    rows = enumerate(sizes, start % (len(shape) - len(sizes) + 1) if start else 0)
    return any(0 < at < len(shape) and shape[at] == 1 and (size == -1 or not isinstance(size, int)) for at, size in rows)


@cache
def is_local(name: str) -> bool:
    """Return whether each entry of a function's result is where the entries are that it is made of."""
    found = [getattr(torch.ops.aten, each, None) for each in (name, f"{name}_", f"bitwise_{name}")]
    tags = (getattr(one, each).tags for one in found if one is not None for each in one.overloads())
    return name in LOCAL or any(torch.Tag.pointwise in each for each in tags)


def is_known(node: fx.Node, root: nn.Module) -> bool:
    """Return whether a node calls what is torch's or Python's, a layer of these, or a block of this package."""
    if node.op == "call_module":
        return type(root.get_submodule(str(node.target))).__module__.startswith(("torch.nn.", "fxplug.")) or bool(
            {"Linear", "TransposedLinear", "_ConvNd", "Embedding"} & {*list_class_names(root.get_submodule(str(node.target)))}
        )
    module = getattr(node.target, "__module__", None) or "torch"
    return node.op == "call_method" or module.startswith(("torch", "_operator", "builtins", "math", ops.__name__))
