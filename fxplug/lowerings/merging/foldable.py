"""Which blocks of passes could be a change of weights, and what they make of them. Reads graphs, edits none."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn

from ...blocks.base import CONVOLUTIONS, Gates, LowRank
from ...blocks.gathered import GatheredDora
from ...blocks.lora import Lora
from ...blocks.lora_weight import Dora
from ...blocks.scale import Scale, Ssf
from ...blocks.weight_update import Delta
from ...core.ir import ops
from ...core.ir.containers import find_tensor
from ...core.ir.graph import is_added
from ..linear.layers import (
    LAYERS,
    PRODUCTS,
    Layer,
    explain_misfit,
    find_inner,
    find_result,
    get_argument,
    get_layer,
    list_blocks,
    list_readers,
)
from .numeric_check import Unfoldable, compare
from .updates import FoldStep, ParameterUse

# --- reading a graph


class FoldableGraph:
    """One graph: where its parameters are read, and through which blocks of these passes.

    `uses` are the places, `gone` gives for each block that is folded what its users get then, `biases` the names of those
    that products need then and have not, `named` those of weights that a product reads by the name of another layer's, and
    `refused` the blocks that cannot be folded, with the reason.
    """

    def __init__(self, graph: fx.Graph, tree: nn.Module, passes: set[str]) -> None:
        self.graph, self.tree, self.passes = graph, tree, passes
        self.uses: list[ParameterUse] = []
        self.gone: dict[fx.Node, Any] = {}
        self.biases: dict[fx.Node, str] = {}
        self.named: dict[fx.Node, str] = {}
        self.refused: list[tuple[fx.Node, str]] = []

    def refuse(self, node: fx.Node, reason: str) -> None:
        """Record a block that cannot be folded, and why."""
        self.refused.append((node, reason))

    def read(self) -> None:
        """Find all of these in the graph."""
        mapping: set[fx.Node] = set()  # of blocks that map a parameter
        for node in self.graph.nodes:
            if node.meta.get("behind", "").startswith("param:"):
                try:
                    mapping |= between(node)
                except Unfoldable as error:
                    if node.meta["pass"]["name"] in self.passes:
                        self.refuse(node, str(error))
        products = set()
        for node in list(self.graph.nodes):
            if node in mapping:
                continue
            layer = get_layer(self.tree, node)
            if layer is not None and layer.module is not None:
                self.module(layer)
            elif layer is not None:
                self.product(layer)
                products.add(node)
            elif node.target is torch.addmm and self.transposed(node):
                products.add(node)
        for node in list(self.graph.nodes):
            parameter = node.op == "get_attr" or node.meta.get("behind", "").startswith("param:")
            for user in node.users if parameter else ():
                # what reads no values, as `weight.dtype` does, is not concerned
                if user not in mapping and user not in products and _gives_tensors(user) and user.target is not ops.edge:
                    name, steps, _ = self.mapped(node)
                    if name:
                        self.note(ParameterUse(name, "", "", user, steps))

    def note(self, use: ParameterUse) -> None:
        """Record a use, with those of its steps that concern its part."""
        if use.part == "bias":
            use.steps = tuple(step for step in use.steps if self.concerns_bias(step))
        self.uses.append(use)

    def concerns_bias(self, step: FoldStep) -> bool:
        """Return whether a step changes a layer's bias too."""
        block = self.tree.get_submodule(step.block) if step.place == "after" else None
        if isinstance(block, GatheredDora):
            return block.biased
        return step.place == "param" or isinstance(block, (Scale, Ssf)) or (isinstance(block, Lora) and block.bias)

    def module(self, layer: Layer) -> None:
        """Record the uses of a module that is called whole."""
        path, own = layer.node.target, layer.module._parameters
        steps = self.around(layer, []) if layer.kind and "weight" in own else ()
        names = [n for n, p in own.items() if p is not None]
        if "bias" not in names and self.gives_bias(steps) and layer.kind != "Embedding":
            if "bias" in own:
                names.append("bias")
            for step in steps if "bias" not in names else ():
                self.refuse(step.node, f"'{path}' adds no bias")
        for name in names:
            self.note(ParameterUse(f"{path}.{name}", name, layer.kind, layer.node, steps))

    def product(self, layer: Layer) -> None:
        """Record the uses of a product of the model's own code, or of a layer that was opened."""
        node, kind = layer.node, layer.kind
        name, first, rest = self.mapped(layer.weight)
        if not name:
            return
        other, second, others = self.mapped(layer.bias) if layer.bias is not None and kind != "Embedding" else ("", (), [])
        around = self.around(layer, rest, others)
        path = next(reversed((node.meta.get("nn_module_stack") or {"": ("", "")}).values()))[0]
        own = f"{path}.weight"
        if (first or around) and not rest and own != name and find_tensor(self.tree, own) is find_tensor(self.tree, name):
            name = self.named[node] = own  # tied: it is changed under the layer's own name
        self.note(ParameterUse(name, "weight", kind, node, (*first, *around)))
        if kind == "Embedding":
            return
        if layer.bias is not None:
            if other:
                self.note(ParameterUse(other, "bias", kind, node, (*second, *around)))
        elif self.gives_bias(around):
            owner = name.rpartition(".")[0]
            if PRODUCTS[node.target][2] >= 0 and self.tree.get_submodule(owner)._parameters.get("bias", 0) is None:
                self.note(ParameterUse(f"{owner}.bias", "bias", kind, node, around))
                self.biases[node] = f"{owner}.bias"
            for step in around if node not in self.biases else ():
                self.refuse(step.node, f"'{node.name}' adds no bias")

    def transposed(self, node: fx.Node) -> bool:
        """Record a product of transformers' Conv1D, between two views: a weight (in, out), with a `Lora` after it. Return
        whether it is one."""
        after, flat = list_readers(node), get_argument(node, 1, "mat1")
        views = [value for value in (*after, flat) if isinstance(value, fx.Node) and value.target == "view"]
        name, first, rest = self.mapped(get_argument(node, 2, "mat2"))
        bias, second, others = self.mapped(get_argument(node, 0, "input"))
        if len(after) != 1 or len(views) != 2 or not name or not bias:
            return False
        steps = []
        for user, block in list_blocks(self.tree, views[0]):
            same = find_inner(get_argument(user, 0, "x")) is find_inner(flat.args[0])
            own = isinstance(block, Lora) and block.kind == "Linear" and same
            if not (own and self.takes(user) and all(map(sums, (*rest, *others)))):
                break
            steps.append(FoldStep(str(user.target), "after", user))
            self.gone[user] = find_result(user, block)
        self.note(ParameterUse(name, "weight", "TransposedLinear", node, (*first, *steps)))
        self.note(ParameterUse(bias, "bias", "TransposedLinear", node, (*second, *steps)))
        return True

    def gives_bias(self, steps: Iterable[FoldStep]) -> bool:
        """Return whether a layer without a bias gets one when the blocks are folded."""
        blocks = [self.tree.get_submodule(step.block) for step in steps if self.concerns_bias(step)]
        return any(not isinstance(block, (Scale, GatheredDora)) for block in blocks)

    def mapped(self, value: Any) -> tuple[str, tuple[FoldStep, ...], list[nn.Module | None]]:
        """Return the parameter that a node reads, the blocks that are folded into it, and those that remain on its way."""
        chain: list[fx.Node] = []
        node = find_inner(value)
        try:
            while isinstance(node, fx.Node) and node.meta.get("behind", "").startswith("param:"):
                chain.append(node)
                node = get_inner(node)
        except Unfoldable:
            return "", (), []
        if not isinstance(node, fx.Node) or node.op != "get_attr":
            return "", (), []
        steps: list[FoldStep] = []
        rest: list[nn.Module | None] = []
        for block in reversed(chain):
            module = self.tree.get_submodule(str(block.target)) if block.op == "call_module" else None
            if block.meta["pass"]["name"] not in self.passes:
                rest.append(module)
            elif rest and not (sums(module) and all(map(sums, rest))):
                self.refuse(block, "its input is from a block of another pass, which is not merged: merge that one too")
            else:
                steps.append(FoldStep(block.name, "param", block))
                self.gone[block] = get_inner(block)
        return str(node.target), tuple(steps), rest

    def around(self, layer: Layer, rest: list[Any], others: Sequence[Any] = ()) -> tuple[FoldStep, ...]:
        """Return the blocks before and after a layer that are folded, in the order in which they change the weight.

        `rest` has the blocks on the way of the weight that are not, `others` those on the way of the bias.
        """
        steps = []
        node, kind, module, x = layer.node, layer.kind, layer.module, layer.x
        scaled = x if isinstance(self.block(x), Scale) and self.takes(x) and kind in LAYERS and kind != "Embedding" else None
        if scaled in self.gone:  # it is in the layer before
            scaled = None
        if scaled is not None:
            reason = self.scales(self.block(x), x, kind, rest)
            if kind != "Linear" and (module is None or module.groups != 1):
                reason = "it is before a convolution in groups"
            if reason is None:
                steps.append(FoldStep(str(x.target), "before", x))
                self.gone[x] = x.args[0]
                x = find_inner(x.args[0])
            else:
                self.refuse(x, reason)
                scaled = None
        value, left = node, [*rest, *others]
        for user, block in list_blocks(self.tree, node):
            if user.meta.get("pass", {}).get("place") != "after":
                break
            if self.takes(user):
                via = scaled is not None and isinstance(block, Lora) and find_inner(user.args[0]) is scaled
                reason = self.fits(block, user, layer, scaled if via else x)
                if reason is None and left and not (sums(block) and all(map(sums, left))):
                    reason = "it is after a block of another pass, which is not merged: merge that one too"
                if reason is None:
                    steps.append(FoldStep(str(user.target), "after", user, str(scaled.target) if via and scaled else ""))
                    self.gone[user] = find_result(user, block)
                else:
                    self.refuse(user, reason)
            else:
                left.append(block)
            value = user
        other = set(list_readers(scaled)) - {node, *(step.node for step in steps)} if scaled is not None else set()
        for user in other:
            self.refuse(scaled, f"'{scaled.name}' is also read by '{user.name}'")  # type: ignore[arg-type, union-attr]
        for user in list_readers(value) if len(list_readers(value)) > 1 else ():
            if isinstance(self.block(user), Lora) and self.takes(user) and find_inner(user.args[1]) is value:
                self.refuse(user, f"the result of '{node.name}' is also read without it")
        return tuple(steps)

    def block(self, node: Any) -> nn.Module | None:
        """Return the block of a pass that a node calls."""
        if not isinstance(node, fx.Node) or node.op != "call_module" or "pass" not in node.meta:
            return None
        return self.tree.get_submodule(str(node.target))

    def takes(self, node: fx.Node) -> bool:
        """Return whether a node belongs to one of these passes."""
        return node.meta["pass"]["name"] in self.passes

    def fits(self, block: nn.Module, user: fx.Node, layer: Layer, x: Any) -> str | None:
        """Return why a block after a layer that reads x cannot be folded into its weight, or None."""
        node, kind, module = layer.node, layer.kind, layer.module
        if kind == "Embedding" and (module.max_norm if module is not None else get_argument(node, 3, "max_norm")) is not None:
            return "max_norm changes the table whenever it is read"
        if not isinstance(block, Lora):
            shape: Any = getattr(module, "normalized_shape", ())
            if module is None:
                shape = get_argument(node, 1, "normalized_shape")
            if kind in ("LayerNorm", "RMSNorm") and len(shape) != 1:
                return "the layer norm has more than one dimension"
            return self.scales(block, user, kind, [])
        if module is None and kind in CONVOLUTIONS and block.kind == kind:
            return compare(block, layer, find_inner(user.args[0]), self.tree)
        if reason := explain_misfit(block, user, kind, x):
            return reason
        if module is not None and kind in CONVOLUTIONS:
            own = {k: getattr(module, k) for k in block.geometry}
            if block.same_padding or own != block.geometry:
                return "its stride, padding or dilation differs from the layer's"
        return None

    def scales(self, block: Any, node: fx.Node, kind: str, rest: list[Any]) -> str | None:
        """Return why a scale per channel does not match the weight's channels, or None."""
        dims = len(node.meta.get("shape", ()))
        last = kind in ("Linear", "Embedding", "LayerNorm", "RMSNorm")
        channels = {"Conv1d": -2, "Conv2d": -3, "Conv3d": -4}.get(kind, -1 if last else 1 - dims)
        if rest:
            return "the weight goes through a block of another pass, which is not merged: merge that one too"
        if not dims or block.dim % dims != channels % dims:
            return f"it scales dimension {block.dim}, not the layer's channels"
        return None

# --- walking through a graph


def _gives_tensors(node: fx.Node) -> bool:
    """Return whether a node's result is a tensor, or a tuple with one."""
    members = (user for user in node.users if user.target is operator.getitem)
    return "shape" in node.meta or any("shape" in member.meta for member in members)


def sums(block: nn.Module | None) -> bool:
    """Return whether a block adds a term that does not depend on the value: such blocks commute."""
    return isinstance(block, (LowRank, Delta)) and not isinstance(block, (Dora, GatheredDora))


def between(node: fx.Node) -> set[fx.Node]:
    """Return the nodes of a block that maps a parameter. Raises Unfoldable if it reads more than tensors of the module."""
    found, todo, tag = {node}, [node], node.meta["behind"]
    while todo:
        for value in todo.pop().all_input_nodes:
            if value.op == "placeholder":
                raise Unfoldable(f"it depends on the input '{value.target}'")
            if value not in found and not gated(value) and value.op != "get_attr" and value.meta.get("behind") != tag:
                found.add(value)
                todo.append(value)
    return found


def get_inner(node: fx.Node) -> fx.Node:
    """Return the input of a block that maps a parameter: the parameter, or the result of another block."""
    tag = node.meta["behind"]
    nodes = sorted(between(node), reverse=True)
    values = [v for n in nodes for v in n.all_input_nodes]
    found = [v for v in values if v.meta.get("behind") == tag and v is not node]
    found += [v for v in values if v.op == "get_attr" and not (is_added(v) and "site" in v.meta["pass"])]
    if not found:
        raise Unfoldable("it does not read the parameter")
    return found[0]


def gated(node: fx.Node) -> bool:
    """Return whether a node computes the gates of the slots."""
    return bool(node.meta.get("pass", {}).get("block") == Gates.__name__)


