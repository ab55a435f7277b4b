"""The last layer of a model, found by its graph: what its result is made of, but for operations without weights."""

from __future__ import annotations

import operator

from torch import fx

from ..errors import MatchError
from ..ir import functions
from ..ir.regions import Region, Regions, added, listed

LAST = "last-layer"  # a path that stands for it
KINDS = ("Linear", "Conv1d", "Conv2d", "Conv3d")
# what stands behind a layer within a model, and not behind its last one; a softmax, sigmoid or tanh may
ACTIVATIONS = {
    "relu", "relu6", "leakyrelu", "leaky_relu", "prelu", "rrelu", "elu", "celu", "selu", "gelu", "silu", "mish", "hardswish",
    "softplus", "glu",
}  # fmt: skip


def last_layer(regions: Regions) -> str:
    """The path of the Linear or convolution of whose result the model's own result is made by operations without weights.

    Raises MatchError where that is no such layer, or several.
    """
    called: dict[fx.Node, Region] = {r.leaf: r for r in regions.by_key.values() if r.leaf is not None}
    called |= {node: r for r in regions.by_key.values() if r.leaf is None and _is_head(regions, r) for _, node in r.outputs}
    (output,) = (node for node in regions.graph.nodes if node.op == "output")
    found = [_made_of(regions, node, called) for node in output.all_input_nodes]
    heads = list(dict.fromkeys(path for paths, others in found for path in paths if not others))
    if len(heads) == 1:
        return heads[0]
    if heads:
        raise MatchError(f"this model has {len(heads)} last layers, {listed(heads)}: name those that are meant, at: [...]")
    made = list(dict.fromkeys(path for paths, others in found for path in (*paths, *others)))
    comes = f"its result comes from {listed(made)}" if made else "its result is made of constants"
    raise MatchError(
        f"this model has no last layer: {comes}, and not from a Linear or a convolution alone; name the layer that is meant, "
        "at: ..., or build the model with one (timm's num_classes)"
    )


def _made_of(regions: Regions, result: fx.Node, called: dict[fx.Node, Region]) -> tuple[list[str], list[str]]:
    """The layers of whose results a result is made without other weights, and what else it is made of."""
    heads: dict[str, None] = {}
    others: dict[str, None] = {}
    todo, seen = [result], set[fx.Node]()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        region = called.get(node)
        beside = str(node.meta["pass"].get("site", "")).partition("@")[0] if added(node) else ""
        if region is None and beside and beside in regions.calls:  # a block at a layer
            region = regions.calls[beside][0]
        if region is not None and _is_head(regions, region):
            heads.setdefault(region.path)
        elif region is not None and any(True for _ in regions.module(region.path).parameters()):
            others.setdefault(f"{region.path} ({regions.classes(region.path)[0]})")
        elif node.op in ("placeholder", "get_attr"):
            others.setdefault(str(node.target))
        elif (name := functions.short_name(node.target).rstrip("_")) in ACTIVATIONS or _has_weights(node):
            at = next(reversed(node.meta.get("nn_module_stack") or {"": ""}))
            others.setdefault(f"{at} ({regions.classes(at.partition('@')[0])[0]})" if at else name)
        elif region is not None and regions.classes(region.path)[0].lower() in ACTIVATIONS:
            others.setdefault(f"{region.path} ({regions.classes(region.path)[0]})")
        else:
            todo += [v for v in node.all_input_nodes if "shape" in v.meta or node.target is operator.getitem]
    return list(heads), list(others)


def _has_weights(node: fx.Node) -> bool:
    return any(value.op == "get_attr" for value in node.all_input_nodes)


def _is_head(regions: Regions, region: Region) -> bool:
    return bool(region.path) and not regions.inserted(region.path) and regions.classes(region.path)[0] in KINDS
