"""Which linear layers could be one product: those that read the same value, with the low-rank updates behind them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ...blocks.lora import Lora
from ...ir import ops
from ...ir.pytree import leaves
from ...ir.regions import added
from ...ir.subgraphs import SWITCHES, aliases, written
from ...torch_internals.modules import ConvNd, is_hooked
from .layers import behind, inside, layer_at, layer_of, misfit
from .packed_modules import Joined, Packed

FEW = 64  # rows, see `worth_it`
WEIGHTED = (nn.Linear, nn.Bilinear, ConvNd, nn.MultiheadAttention, nn.RNNBase)
WEIGHTED_FUNCTIONS = (F.linear, F.bilinear, F.conv1d, F.conv2d, F.conv3d, F.multi_head_attention_forward)


@dataclass
class Member:
    """One linear layer of a group: the node that calls it, its tensors' names, and the updates behind it."""

    node: fx.Node
    weight: str
    bias: str | None
    width: int
    updates: list[fx.Node] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)

    @property
    def path(self) -> str:
        """The path of the layer."""
        return self.weight.rpartition(".")[0]

    @property
    def downs(self) -> list[str]:
        """The names of the weights with which its updates begin."""
        return [f"{node.target}.down.weight" for node in self.updates]


@dataclass
class Group:
    """Linear layers that read one value, in the order of the graph: what `worth` decides on."""

    value: fx.Node
    device: torch.device
    dtype: torch.dtype
    in_features: int
    members: list[Member]

    @property
    def widths(self) -> list[int]:
        """How many features each layer gives."""
        return [member.width for member in self.members]

    @property
    def ranks(self) -> list[int]:
        """The ranks of all updates that would be packed; with slots, of whole banks."""
        return [rank for member in self.members for rank in member.ranks]

    @property
    def tokens(self) -> int:
        """The rows of the value in the example that was traced; 0 where that is not known."""
        shape = self.value.meta.get("shape", (0,))
        return int(torch.Size(int(n) for n in shape[:-1]).numel())


def worth_it(group: Group) -> bool:
    """Whether one product is not slower than several.

    On a CPU one product alone was never slower (float32 through oneDNN: x0.65 to x1.00 of the same layers apart), but what
    follows reads parts of its rows with a stride, and whole models were 2 to 3 % slower (UNet, PixArt; benchmarks/unmerged.py).
    So only values of up to FEW rows are taken there, as the conditioning of a step has them: x0.72 for 28 layers of 384.
    """
    return group.device.type != "cpu" or 0 < group.tokens <= FEW


def groups(graph: fx.Graph, tree: nn.Module, across: bool = False) -> Iterator[Group]:
    """The groups of two or more linear layers that can be packed, in the order of the graph."""
    tensors = _named_tensors(tree)
    opened: dict[Any, list[Member]] = {}
    done: list[tuple[Any, list[Member]]] = []
    depends: dict[fx.Node, set[Any]] = {}  # on which open groups a node's value depends

    def close(keys: Any) -> None:
        done.extend((key, opened.pop(key)) for key in list(keys) if key in opened)

    for node in graph.nodes:
        if node.target in SWITCHES:
            close(opened)
        if changed := written(node, tree):
            roots = {_root(value, tree) for value in changed}
            names = {root.target for root in roots if root.op == "get_attr"}
            close(k for k, ms in opened.items() if _root(k[0], tree) in roots or any(m.weight in names for m in ms))
        known = set().union(*(depends.get(given, set()) for given in node.all_input_nodes)) & set(opened)
        if not across and _weighted(node, tree) and not added(node):
            close(known)
            known = set()
        if (member := _member(node, tree, tensors)) is not None and _free(member, tree):
            weight = tensors[member.weight]
            key = (inside(node.args[0]), weight.device, weight.dtype, weight.shape[1])
            opened.setdefault(key, []).append(member)
            known = known | {key}
        depends[node] = known
    close(opened)
    order = {node: i for i, node in enumerate(graph.nodes)}
    for key, members in sorted(done, key=lambda found: order[found[1][0].node]):
        if len({m.weight for m in members}) > 1:
            value, device, dtype, width = key
            yield Group(value, device, dtype, width, members)


def _member(node: fx.Node, tree: nn.Module, tensors: dict[str, Tensor]) -> Member | None:
    """The linear layer that a node calls, with the updates behind it."""
    layer = layer_at(tree, node, (nn.Linear,)) or (layer_of(tree, node) if node.target is F.linear else None)
    names = None if layer is None or not node.args or not isinstance(node.args[0], fx.Node) else layer.named()
    if layer is None or names is None:
        return None
    weight, bias = names
    first = tensors.get(weight)
    if first is None or first.dim() != 2:
        return None
    if bias is not None and (bias not in tensors or tensors[bias].dtype != first.dtype):
        return None
    member, last = Member(node, weight, bias, first.shape[0]), node
    for user, lora in behind(tree, node):
        if list(last.users) != [user] or type(lora) not in (Lora, Joined) or lora.bias or lora.dropout:
            break
        down = tensors.get(f"{user.target}.down.weight")
        if down is None or user.kwargs or not 2 <= len(user.args) <= 3 or misfit(lora, user, layer.kind, layer.x):
            break
        if down.dtype != first.dtype or down.device != first.device or lora.up.weight.dtype != first.dtype:
            break
        if any(is_hooked(part) for part in lora.modules()):
            break
        member.updates.append(user)
        member.ranks.append(down.shape[0])
        last = user
    return member


def _free(member: Member, tree: nn.Module) -> bool:
    """Whether nobody minds that a layer's result is a part of a larger tensor: it is only read, and by what takes strides."""
    waiting = [member.updates[-1] if member.updates else member.node]
    seen = set(waiting)
    while waiting:
        value = waiting.pop()
        for user in value.users:
            if user.op == "output" or any(v is value for v in written(user, tree)):
                return False
            if user.op == "call_module":
                module = tree.get_submodule(str(user.target))
                if not (type(module).__module__.startswith("torch.nn.") or getattr(module, "is_block", False)):
                    return False
            elif user.op == "call_method":
                if user.target in ("view_as", "as_strided", "stride", "is_contiguous", "data_ptr", "storage_offset", "set_"):
                    return False
                if user.target == "view" and any(isinstance(a, torch.dtype) for a in (*user.args, *user.kwargs.values())):
                    return False
            elif isinstance(user.target, type) or getattr(user.target, "namespace", "aten") not in ("aten", "prims"):
                return False
            if (aliases(user, tree) or user.target is ops.edge) and user not in seen:
                seen.add(user)
                waiting.append(user)
    return True


def _weighted(node: fx.Node, tree: nn.Module) -> bool:
    if node.op == "call_module":
        return any(isinstance(m, WEIGHTED) for m in tree.get_submodule(str(node.target)).modules())
    return node.target in WEIGHTED_FUNCTIONS


def _root(value: fx.Node, tree: nn.Module) -> fx.Node:
    """The value in whose memory a value may lie."""
    while value.op not in ("placeholder", "get_attr", "output") and (value.target is ops.edge or aliases(value, tree)):
        given = [v for v in leaves(value.args[:1]) if isinstance(v, fx.Node)] or value.all_input_nodes
        if not given:
            break
        value = given[0]
    return value


def _named_tensors(tree: nn.Module) -> dict[str, Tensor]:
    """What may become a part of a packed weight, by all its names: plain, contiguous parameters whose memory is their own."""
    found = {**dict(tree.named_parameters(remove_duplicate=False)), **dict(tree.named_buffers(remove_duplicate=False))}
    made = {id(buffer) for module in tree.modules() if isinstance(module, Packed) for buffer in module.buffers()}
    holders: dict[int, set[int]] = {}
    for tensor in (t for t in found.values() if id(t) not in made):
        if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta:
            holders.setdefault(tensor.data_ptr(), set()).add(id(tensor))

    def plain(t: Tensor) -> bool:
        usual = type(t) is nn.Parameter and t.layout is torch.strided and t.is_contiguous()
        return usual and not t.is_inference() and t.numel() > 0 and (t.is_meta or len(holders[t.data_ptr()]) == 1)

    return {name: tensor for name, tensor in found.items() if plain(tensor)}
