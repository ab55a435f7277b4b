"""Which blocks of passes could be a change of weights, and what they make of them. Reads graphs, edits none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from ...blocks.base import CONVOLUTIONS
from ...blocks.bitfit import Delta
from ...blocks.dora import Dora
from ...blocks.lora import Lora
from ...blocks.scale import Scale
from ...blocks.ssf import Ssf
from ...blocks.weight_update import Update
from ...errors import FxplugError
from ...ir import ops
from ...ir.regions import added
from ...ir.traced_module import shell
from ...torch_internals.modules import conv_forward
from .updates import Step, Use, delta, in_dtype, weight_of

LAYERS: dict[str, type[nn.Module]] = {"Linear": nn.Linear, **CONVOLUTIONS, "Embedding": nn.Embedding}
NORMS: dict[type[nn.Module], str] = {
    c: c.__name__ for c in (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
}
# what the functions behind layers are, and where their weight and bias stand
PRODUCTS: dict[Any, tuple[str, int, int]] = {
    F.linear: ("Linear", 1, 2),
    F.conv1d: ("Conv1d", 1, 2),
    F.conv2d: ("Conv2d", 1, 2),
    F.conv3d: ("Conv3d", 1, 2),
    F.embedding: ("Embedding", 1, -1),
    F.layer_norm: ("LayerNorm", 2, 3),
    F.group_norm: ("GroupNorm", 2, 3),
    F.batch_norm: ("BatchNorm", 3, 4),
    F.rms_norm: ("RMSNorm", 2, -1),
}
BEHIND = (Lora, Scale, Ssf)  # blocks that change a layer's result as other weights would
SIZES = (7, 8)  # of the images on which a layer's own padding is compared with an update's


class Unfoldable(Exception):
    """Why a block cannot go into a weight."""


# --- reading a graph


class Reader:
    """One graph: where its parameters are read, and through which blocks of these passes.

    `uses` are the places, `gone` gives for each block that is folded what its users get then, `biases` the names of those
    that products need then and have not, `named` those of weights that a product reads by the name of another layer's, and
    `refused` the blocks that cannot be folded, with the reason.
    """

    def __init__(self, graph: fx.Graph, tree: nn.Module, passes: set[str]) -> None:
        self.graph, self.tree, self.passes = graph, tree, passes
        self.uses: list[Use] = []
        self.gone: dict[fx.Node, Any] = {}
        self.biases: dict[fx.Node, str] = {}
        self.named: dict[fx.Node, str] = {}
        self.refused: list[tuple[fx.Node, str]] = []

    def refuse(self, node: fx.Node, reason: str) -> None:
        """Keep a block that cannot be folded, and why."""
        self.refused.append((node, reason))

    def read(self) -> None:
        """Find all of these in the graph."""
        inside: set[fx.Node] = set()  # of blocks that map a parameter
        for node in self.graph.nodes:
            if node.meta.get("behind", "").startswith("param:"):
                try:
                    inside |= between(node)
                except Unfoldable as error:
                    if node.meta["pass"]["name"] in self.passes:
                        self.refuse(node, str(error))
        products = set()
        for node in list(self.graph.nodes):
            if node in inside:
                continue
            if node.op == "call_module":
                self.layer(node)
            elif node.op == "call_function" and node.target in PRODUCTS:
                self.product(node)
                products.add(node)
        for node in list(self.graph.nodes):
            parameter = node.op == "get_attr" or node.meta.get("behind", "").startswith("param:")
            for user in node.users if parameter else ():
                # what reads no values, as `weight.dtype` does, is not concerned
                if user not in inside and user not in products and "shape" in user.meta and user.target is not ops.edge:
                    name, steps, _ = self.mapped(node)
                    if name:
                        self.note(Use(name, "", "", user, steps))

    def tensor(self, name: str) -> Any:
        """The parameter of this name, None where there is none."""
        owner, _, last = name.rpartition(".")
        return self.tree.get_submodule(owner)._parameters.get(last)

    def note(self, use: Use) -> None:
        """Keep a use, with those of its steps that concern its part."""
        if use.part == "bias":
            use.steps = tuple(step for step in use.steps if self.concerns_bias(step))
        self.uses.append(use)

    def concerns_bias(self, step: Step) -> bool:
        """Whether a step makes something of a layer's bias too."""
        block = self.tree.get_submodule(step.block) if step.place == "after" else None
        return step.place == "param" or isinstance(block, (Scale, Ssf)) or (isinstance(block, Lora) and block.bias)

    def layer(self, node: fx.Node) -> None:
        """A layer that is called whole: of torch.nn, with the forward that it has there."""
        module = self.tree.get_submodule(str(node.target))
        kind = next((k for k, c in LAYERS.items() if isinstance(module, c) and type(module).forward is c.forward), None)
        if kind in CONVOLUTIONS and conv_forward(type(module)) is not conv_forward(CONVOLUTIONS[kind]):
            kind = None
        if module._parameters.get("weight") is not None:
            kind = kind or NORMS.get(type(module))
        steps = self.around(node, kind, module, []) if kind is not None and "weight" in module._parameters else ()
        names = [n for n, p in module._parameters.items() if p is not None]
        if "bias" not in names and self.gives_bias(steps) and kind != "Embedding":
            if "bias" in module._parameters:
                names.append("bias")
            for step in steps if "bias" not in names else ():
                self.refuse(step.node, f"'{node.target}' adds no bias")
        for name in names:
            self.note(Use(f"{node.target}.{name}", name, kind or "", node, steps))

    def product(self, node: fx.Node) -> None:
        """A product of the model's own code, or of a layer that was opened."""
        kind, weight_at, bias_at = PRODUCTS[node.target]
        weight, bias = argument(node, weight_at, "weight"), argument(node, bias_at, "bias") if bias_at > 0 else None
        name, first, rest = self.mapped(weight)
        if not name:
            return
        other, second, others = self.mapped(bias) if bias is not None and kind != "Embedding" else ("", (), [])
        around = self.around(node, kind, None, rest, others)
        path = next(reversed((node.meta.get("nn_module_stack") or {"": ("", "")}).values()))[0]
        own = f"{path}.weight"
        if (first or around) and not rest and own != name and self.tensor(own) is self.tensor(name):
            name = self.named[node] = own  # tied: it is changed under the layer's own name
        self.note(Use(name, "weight", kind, node, (*first, *around)))
        if kind == "Embedding":
            return
        if bias is not None:
            if other:
                self.note(Use(other, "bias", kind, node, (*second, *around)))
        elif self.gives_bias(around):
            owner = name.rpartition(".")[0]
            if bias_at >= 0 and self.tree.get_submodule(owner)._parameters.get("bias", 0) is None:
                self.note(Use(f"{owner}.bias", "bias", kind, node, around))
                self.biases[node] = f"{owner}.bias"
            for step in around if node not in self.biases else ():
                self.refuse(step.node, f"'{node.name}' adds no bias")

    def gives_bias(self, steps: Iterable[Step]) -> bool:
        """Whether a layer without a bias has one when the blocks are folded."""
        blocks = [self.tree.get_submodule(step.block) for step in steps if self.concerns_bias(step)]
        return any(not isinstance(block, Scale) for block in blocks)

    def mapped(self, value: Any) -> tuple[str, tuple[Step, ...], list[nn.Module | None]]:
        """The parameter that a node gives, the blocks that are folded into it, and those that stay on its way."""
        chain: list[fx.Node] = []
        node = inside_edges(value)
        try:
            while isinstance(node, fx.Node) and node.meta.get("behind", "").startswith("param:"):
                chain.append(node)
                node = inner(node)
        except Unfoldable:
            return "", (), []
        if not isinstance(node, fx.Node) or node.op != "get_attr":
            return "", (), []
        steps: list[Step] = []
        rest: list[nn.Module | None] = []
        for block in reversed(chain):
            module = self.tree.get_submodule(str(block.target)) if block.op == "call_module" else None
            if block.meta["pass"]["name"] not in self.passes:
                rest.append(module)
            elif rest and not (sums(module) and all(map(sums, rest))):
                self.refuse(block, "it maps what a block of another pass gives, which is not merged: merge that one too")
            else:
                steps.append(Step(block.name, "param", block))
                self.gone[block] = inner(block)
        return str(node.target), tuple(steps), rest

    def around(
        self, node: fx.Node, kind: str, module: nn.Module | None, rest: list[Any], others: Sequence[Any] = ()
    ) -> tuple[Step, ...]:
        """The blocks before and behind a layer that are folded, in the order in which they change the weight.

        `rest` has the blocks on the way of the weight that are not, `others` those on the way of the bias.
        """
        steps = []
        x = inside_edges(argument(node, 0, "input"))
        scaled = x if isinstance(self.block(x), Scale) and self.takes(x) and kind in LAYERS and kind != "Embedding" else None
        if scaled is not None:
            reason = self.scales(self.block(x), x, kind, rest)
            if kind != "Linear" and (module is None or module.groups != 1):
                reason = "it stands before a convolution in groups"
            if reason is None:
                steps.append(Step(str(x.target), "before", x))
                self.gone[x] = x.args[0]
                x = inside_edges(x.args[0])
            else:
                self.refuse(x, reason)
                scaled = None
        value, left = node, [*rest, *others]
        while len(found := readers(value)) == 1:
            user, block = found[0], self.block(found[0])
            place = user.meta.get("pass", {}).get("place")
            if not isinstance(block, BEHIND) or place != "after" or inside_edges(result_read(user, block)) is not value:
                break
            if self.takes(user):
                via = scaled is not None and isinstance(block, Lora) and inside_edges(user.args[0]) is scaled
                reason = self.fits(block, user, node, scaled if via else x, kind, module)
                if reason is None and left and not (isinstance(block, Lora) and all(map(sums, left))):
                    reason = "it stands behind a block of another pass, which is not merged: merge that one too"
                if reason is None:
                    steps.append(Step(str(user.target), "after", user, str(scaled.target) if via and scaled else ""))
                    self.gone[user] = result_read(user, block)
                else:
                    self.refuse(user, reason)
            else:
                left.append(block)
            value = user
        other = set(readers(scaled)) - {node, *(step.node for step in steps)} if scaled is not None else set()
        for user in other:
            self.refuse(scaled, f"'{scaled.name}' is also read by '{user.name}'")  # type: ignore[arg-type, union-attr]
        for user in readers(value) if len(readers(value)) > 1 else ():
            if isinstance(self.block(user), Lora) and self.takes(user) and inside_edges(user.args[1]) is value:
                self.refuse(user, f"what '{node.name}' gives is also read without it")
        return tuple(steps)

    def block(self, node: Any) -> nn.Module | None:
        """The block that a pass put in and a node calls."""
        if not isinstance(node, fx.Node) or node.op != "call_module" or "pass" not in node.meta:
            return None
        return self.tree.get_submodule(str(node.target))

    def takes(self, node: fx.Node) -> bool:
        """Whether a node of a pass is of one of these."""
        return node.meta["pass"]["name"] in self.passes

    def fits(
        self, block: nn.Module, user: fx.Node, node: fx.Node, x: Any, kind: str, module: nn.Module | None
    ) -> str | None:
        """Why a block behind a layer cannot go into its weight, or None."""
        if not isinstance(block, Lora):
            shape: Any = argument(node, 1, "normalized_shape") if module is None else getattr(module, "normalized_shape", ())
            if kind in ("LayerNorm", "RMSNorm") and len(shape) != 1:
                return "the layer norm has more than one dimension"
            return self.scales(block, user, kind, [])
        if block.kind != kind:
            return f"it is made for {block.kind} and stands behind {kind}"
        read = inside_edges(user.args[0])
        if module is None and kind in CONVOLUTIONS:
            return self.compared(block, node, read)
        if read is not x:
            return f"it reads '{getattr(read, 'name', read)}', the layer '{getattr(x, 'name', x)}'"
        if module is not None and kind in CONVOLUTIONS:
            own = {k: getattr(module, k) for k in block.geometry}
            if block.same_padding or own != block.geometry:
                return "its geometry is not the layer's"
        if kind == "Embedding" and (module.max_norm if module is not None else argument(node, 3, "max_norm")) is not None:
            return "max_norm changes the table whenever it is read"
        return None

    def scales(self, block: Any, node: fx.Node, kind: str, rest: list[Any]) -> str | None:
        """Why a scale per channel is none of the weight's channels, or None."""
        dims = len(node.meta.get("shape", ()))
        last = kind in ("Linear", "Embedding", "LayerNorm", "RMSNorm")
        channels = {"Conv1d": -2, "Conv2d": -3, "Conv3d": -4}.get(kind, -1 if last else 1 - dims)
        if rest:
            return "the weight is mapped by a block of another pass, which is not merged: merge that one too"
        if not dims or block.dim % dims != channels % dims:
            return f"it scales dimension {block.dim}, which is not that of the layer's channels"
        return None

    def compared(self, block: Lora, node: fx.Node, x: Any) -> str | None:
        """Whether a convolution that is written out gives with an update's weight what the update gives: tried on two sizes."""
        shape = getattr(x, "meta", {}).get("shape")
        if shape is None:
            return "its input is no tensor of a known shape"
        probe = noise(block)
        gates = torch.ones(probe.slots) if probe.slots else None
        weight, bias = argument(node, 1, "weight"), argument(node, 2, "bias")
        given = {weight: delta(probe, gates, torch.float64)}
        if bias is not None:
            given[bias] = torch.zeros(block.out_features, dtype=torch.float64)
        space = len(block.geometry["kernel_size"])
        tried = 0
        for size in SIZES:
            sides = [max(size, d * (k - 1) + 1) for k, d in zip(block.geometry["kernel_size"], block.geometry["dilation"])]  # noqa: B905
            image = torch.randn(*(1 for _ in shape[: -space - 1]), shape[-space - 1], *sides, dtype=torch.float64)
            try:
                ours = evaluate(node, self.tree, {**given, x: image}, torch.float64)
            except Unfoldable:
                return f"'{node.name}' reads other values than it"
            except (FxplugError, RuntimeError):  # a size that the model does not take
                continue
            rows = [] if gates is None else [torch.ones(1, weight_of(probe.up).shape[1], dtype=torch.float64)]
            try:
                theirs = probe(image, torch.zeros_like(ours), *rows)
            except RuntimeError:
                return "its geometry is not the layer's"
            if theirs.shape != ours.shape or not torch.allclose(ours, theirs, atol=1e-9):
                return "its geometry is not the layer's"
            tried += 1
        return None if tried else "its geometry could not be compared with the layer's"


# --- walking through a graph


def argument(node: fx.Node, index: int, name: str) -> Any:
    """An argument of a node by its position or its name, None where it is not given."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name)


def inside_edges(value: Any) -> Any:
    """A value before the edges of regions that it crosses."""
    while isinstance(value, fx.Node) and value.target is ops.edge:
        value = value.args[0]
    return value


def readers(node: fx.Node) -> list[fx.Node]:
    """What uses a value, also behind the edges of regions."""
    found: dict[fx.Node, None] = {}
    for user in node.users:
        found.update(dict.fromkeys(readers(user)) if user.target is ops.edge else {user: None})
    return list(found)


def result_read(node: fx.Node, block: nn.Module) -> Any:
    """The layer's result among the arguments of a block behind it."""
    return node.args[1] if isinstance(block, Lora) else node.args[0]


def sums(block: nn.Module | None) -> bool:
    """Whether a block adds something that does not depend on the value: such blocks may change places."""
    return isinstance(block, (Lora, Update, Delta)) and not isinstance(block, Dora)


def between(node: fx.Node) -> set[fx.Node]:
    """The nodes of a block that maps a parameter. Raises Unfoldable where it reads more than tensors of the module."""
    found, todo, tag = {node}, [node], node.meta["behind"]
    while todo:
        for value in todo.pop().all_input_nodes:
            if value.op == "placeholder":
                raise Unfoldable(f"it depends on the input '{value.target}'")
            if value not in found and not gated(value) and value.op != "get_attr" and value.meta.get("behind") != tag:
                found.add(value)
                todo.append(value)
    return found


def inner(node: fx.Node) -> fx.Node:
    """What a block that maps a parameter gets: the parameter, or what another block made of it."""
    tag = node.meta["behind"]
    nodes = sorted(between(node), reverse=True)
    values = [v for n in nodes for v in n.all_input_nodes]
    found = [v for v in values if v.meta.get("behind") == tag and v is not node]
    found += [v for v in values if v.op == "get_attr" and not (added(v) and "site" in v.meta["pass"])]
    if not found:
        raise Unfoldable("it does not read the parameter")
    return found[0]


def gated(node: fx.Node) -> bool:
    """Whether a node tells how much of each slot is taken."""
    return bool(node.meta.get("pass", {}).get("block") == "Gates")


def evaluate(node: fx.Node, tree: nn.Module, given: Mapping[fx.Node, Any], dtype: torch.dtype) -> Any:
    """The value of a node from tensors of the module alone, those of floating point in `dtype`. Raises Unfoldable."""
    done = dict(given)

    def run(n: fx.Node) -> Any:
        if n not in done:
            if n.op == "placeholder":
                raise Unfoldable(f"it depends on the input '{n.target}'")
            args, kwargs = fx.node.map_arg(n.args, run), fx.node.map_arg(n.kwargs, run)
            if n.op == "get_attr":
                owner, _, last = str(n.target).rpartition(".")
                value = getattr(tree.get_submodule(owner), last)
                done[n] = value.detach().to(dtype) if value.is_floating_point() else value
            elif n.op == "call_module":
                done[n] = in_dtype(tree.get_submodule(str(n.target)), dtype, *args)
            elif n.op == "call_method":
                done[n] = getattr(args[0], str(n.target))(*args[1:], **kwargs)
            else:
                done[n] = n.target(*args, **kwargs)  # type: ignore[operator]
        return done[n]

    return run(node)


def noise(block: Lora) -> Lora:
    """A block of the same kind with other numbers, in float64 on the CPU."""
    copied: Lora = shell(block).eval()  # type: ignore[assignment]
    for module in copied.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = nn.Parameter(torch.randn(p.shape, dtype=torch.float64), requires_grad=False)
        for name, b in module._buffers.items():
            if b is not None:
                module._buffers[name] = torch.ones(b.shape, dtype=torch.float64)
    if copied.bias:
        nn.init.zeros_(copied.up.bias)  # type: ignore[arg-type]
    return copied
