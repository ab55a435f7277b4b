"""The pack lowering: linear layers that read the same value become one product, their low-rank updates with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ...blocks.lora import Lora
from ...errors import SpecError
from ...ir import ops
from ...ir.containers import Container
from ...ir.pytree import leaves
from ...ir.regions import added
from ...ir.subgraphs import SWITCHES, aliases, written
from ...ir.traced_module import Graph, TracedModule, copy_graph, shell
from ...spec.addresses import identifier
from ...torch_internals.modules import ConvNd, is_hooked
from . import operators
from .layers import called, check_traced, inside

HOME = "packed"  # where the packed weights lie in the module tree
ALIGNED = 8  # rows of a packed weight: a multiple, so that what is read in part lies on 16 bytes in half precision too
FEW = 64  # rows, see `worth_it`
WEIGHTED = (nn.Linear, nn.Bilinear, ConvNd, nn.MultiheadAttention, nn.RNNBase)
WEIGHTED_FUNCTIONS = (F.linear, F.bilinear, F.conv1d, F.conv2d, F.conv3d, F.multi_head_attention_forward)


def pack(gm: TracedModule, worth: Callable[[Group], bool] | None = None, *, across: bool = False) -> TracedModule:
    """The same module in which linear layers that read the same value are one product each, base and low-rank alike.

    The layers are found by the graph: in either mode's, several nn.Linear or F.linear of one dtype that read one value, such
    as q, k and v. They stay apart where a layer with weights between them is computed from an earlier one (so that blocks of
    a model keep to themselves), where gradients or autocast are switched or the value is changed in between, where a result
    is changed in place or leaves the model, and where a layer has a hook or is of a derived class. A `Lora` behind a layer,
    with slots or without, has its `down` in the same product; one with dropout, a bias or another dtype stays as it is.

    `worth` says which groups are packed; None is `worth_it`. `across` packs over blocks too, as keys and values of all blocks
    that read one text: faster for few tokens, but the result of the product lives as long as any block needs a part of it,
    and blocks are no wholes of their own any more.

    Parameters keep their names, values and objects, and are parts of the packed weight's memory from then on, in `gm` too:
    what is written into them in place reaches it, and memory is not taken twice. Moving the result, or loading a state_dict
    into it, keeps that; move `gm` before. Layers that another packing holds in other groups stay with that one: pack a
    deepcopy to have both. Results are equal to rounding (float32: 1e-5). Gradients of packed weights cost a copy: train `gm`.

    `meta["forms"]` names the form of each packed layer, `meta["source"]` is what it was made from. Raises SpecError for what
    is no traced module.
    """
    check_traced(gm, "pack")
    tree = shell(gm)
    graphs = {mode: copy_graph(graph) for mode, graph in gm.graphs.items()}
    maker = _Maker(tree)
    for mode in sorted(graphs):
        for group in groups(graphs[mode], tree, across):
            if (worth or worth_it)(group):
                maker.put(graphs[mode], group)
        graphs[mode].lint()
    forms = {**gm.meta.get("forms", {}), **maker.forms}
    return gm.derived(tree, graphs, source=gm.meta.get("source", gm), forms=forms)


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


# --- what may be one product


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
    if (layer := called(tree, node, (nn.Linear,))) is not None and len(node.args) == 1 and not node.kwargs:
        weight, bias = f"{node.target}.weight", None if layer.bias is None else f"{node.target}.bias"
    elif node.op == "call_function" and node.target is F.linear:
        given = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | dict(node.kwargs)
        reads = [given.get("weight"), given.get("bias")]
        if not isinstance(given.get("input"), fx.Node) or len(node.args) < 1:
            return None
        if any(r is not None and not (isinstance(r, fx.Node) and r.op == "get_attr") for r in reads):
            return None
        weight, bias = (None if r is None else str(r.target) for r in reads)  # type: ignore[union-attr,assignment]
    else:
        return None
    first = tensors.get(weight)
    if first is None or first.dim() != 2 or not isinstance(node.args[0], fx.Node):
        return None
    if bias is not None and (bias not in tensors or tensors[bias].dtype != first.dtype):
        return None
    member = Member(node, weight, bias, first.shape[0])
    last = node
    while len(last.users) == 1:
        user = next(iter(last.users))
        lora = called(tree, user, (Lora, Joined))
        if lora is None or lora.kind != "Linear" or lora.bias or lora.dropout or user.kwargs or not 2 <= len(user.args) <= 3:
            break
        down = tensors.get(f"{user.target}.down.weight")
        if inside(user.args[0]) is not inside(node.args[0]) or user.args[1] is not last or down is None:
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


# --- the product


class Packed(nn.Module):
    """x @ weight.T + bias for several layers at once: x (..., in), the result (..., rows of the packed weight).

    `weights` and `biases` name the parameters that are parts of the packed tensors, with the row where each begins, from the
    module that holds this one. Without a packed bias, biases are put together at each call.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, weights: dict[str, int], biases: dict[str, int]) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.weights, self.biases = weights, biases

    def forward(self, x: Tensor, *parts: Tensor) -> Tensor:
        """`parts` are the parameters that `weights` and then `biases` name: read where gradients of them are wanted."""
        weight, bias = self.weight, self.bias
        graded = torch.is_grad_enabled()
        trained = graded and any(part.requires_grad for part in parts)
        if trained:
            weight = _joined(weight, list(self.weights.values()), parts[: len(self.weights)])
        if self.biases and (trained or bias is None):
            bias = _joined(weight.new_zeros(len(weight)), list(self.biases.values()), parts[len(self.weights) :])
        graded = graded and (x.requires_grad or weight.requires_grad)
        casts = torch.is_autocast_enabled(x.device.type) or x.dtype != weight.dtype
        if graded or casts or x.dim() < 2 or torch.compiler.is_exporting():
            return F.linear(x, weight, bias)
        return operators.product(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], weight.shape[0])

    def retie(self, root: nn.Module) -> None:
        """Let the parameters, found from `root`, be parts of the packed tensors again, with the values that they have now."""
        for key, names in (("weight", self.weights), ("bias", self.biases)):
            whole = getattr(self, key)
            if whole is None:
                continue
            try:
                parts = {name: root.get_parameter(name) for name in names}
            except AttributeError:
                return  # a part of an outlined module: the module that holds them does it
            kinds = {(part.device, part.dtype) for part in parts.values()}
            if len(kinds) > 1:
                raise SpecError(f"the packed layers {', '.join(parts)} must be of one dtype and on one device, not {kinds}")
            if kinds != {(whole.device, whole.dtype)}:
                ((device, dtype),) = kinds
                whole = self._buffers[key] = torch.zeros(whole.shape, device=device, dtype=dtype)
            tie(whole, [(part, names[name]) for name, part in parts.items()])
            for rows in _between(whole, list(names.values()), list(parts.values())):
                rows.zero_()  # of layers without a bias

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}, {', '.join(self.weights)}"


class Joined(Lora):
    """A `Lora` whose `down` may be a part of a packed product: what that gives comes as `hidden`."""

    def forward(self, x: Tensor, y: Tensor, rows: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        """x, y and `rows` as for `Lora`; hidden (..., rank) is down(x)."""
        if hidden is None:
            return super().forward(x, y, rows)
        inner = hidden * self.scale if rows is None else self.gated(hidden, rows)
        weight = self.up.weight
        if y.dim() < 2 or y.dtype != weight.dtype or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return torch.add(y, self.up(inner))
        # y is a part of a packed product that nobody else reads
        return y.flatten(0, -2).addmm_(inner.flatten(0, -2), weight.t()).view(y.shape)  # type: ignore[operator]


def _between(whole: Tensor, starts: Sequence[int], parts: Sequence[Tensor]) -> list[Tensor]:
    """The rows of a packed tensor before each of its parts, and those behind the last."""
    ends = [0, *(start + part.shape[0] for start, part in zip(starts, parts, strict=True))]
    return [whole[end:start] for end, start in zip(ends, [*starts, whole.shape[0]], strict=True)]


def _joined(whole: Tensor, starts: Sequence[int], parts: Sequence[Tensor]) -> Tensor:
    """A packed tensor put together from its parts, for autograd."""
    *before, last = _between(whole, starts, parts)
    return torch.cat([rows for pair in zip(before, parts, strict=True) for rows in pair] + [last])


@torch.no_grad()
def tie(whole: Tensor, parts: list[tuple[nn.Parameter, int]]) -> None:
    """Make parameters the rows of `whole` that begin at these numbers, with their values."""
    for part, start in parts:
        rows = whole[start : start + part.shape[0]]
        if part.is_meta or part.data_ptr() != rows.data_ptr():
            rows.copy_(part)
            part.data = rows


def _whole(parts: Sequence[tuple[Tensor, int]], rows: int) -> Tensor | None:
    """The tensor of so many rows whose parts begin at these rows; None where their memory belongs to something else.

    Parameters that are parts of such a tensor already stay where they are.
    """
    (first, start), size = parts[0], parts[0][0][0].numel()
    shape = (rows, *first.shape[1:])
    own = [_alone(tensor) for tensor, _ in parts]
    if all(own):
        return first.new_zeros(shape).detach()
    storage, offset = first.untyped_storage(), first.storage_offset() - start * size
    beyond = (offset + rows * size) * first.element_size() > storage.nbytes()
    if any(own) or beyond or any(t.data_ptr() != first.data_ptr() + (s - start) * size * t.element_size() for t, s in parts):
        return None
    return first.detach().as_strided(shape, first.stride(), offset)


def _alone(tensor: Tensor) -> bool:
    return tensor.is_meta or tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


class _Maker:
    """Puts packed products into graphs over one module tree."""

    def __init__(self, tree: nn.Module) -> None:
        self.tree, self.forms = tree, dict[str, str]()
        self.home = HOME
        while hasattr(tree, self.home):
            self.home += "_"

    def put(self, graph: Graph, group: Group) -> None:
        made = self.module(group)
        if made is None:  # another packing holds some of them
            group = replace(group, members=[member for member in group.members if self.own(member)])
            made = self.module(group) if len({m.weight for m in group.members}) > 1 else None
        if made is None:
            return
        name, packed = made
        first = group.members[0].node
        stack = _shared_stack([member.node for member in group.members])
        with graph.inserting_before(first):
            reads = []
            for part in (*packed.weights, *packed.biases):
                reads.append(graph.create_node("get_attr", part))
                tensor = self.tree.get_parameter(part)
                reads[-1].meta.update(nn_module_stack=stack, shape=tuple(tensor.shape), dtype=tensor.dtype)
            whole = graph.call_module(f"{self.home}.{name}", (group.value, *reads))
        shape = group.value.meta.get("shape")
        whole.meta.update(nn_module_stack=stack, dtype=group.dtype)
        if shape is not None:
            whole.meta["shape"] = (*shape[:-1], packed.weight.shape[0])
        for member in group.members:
            self.part(graph, whole, member, packed)
        for member in group.members:
            low_rank = ", its low-rank update too" if member.updates else ""
            self.forms[member.path] = f"one product of {len(group.members)} layers ({self.home}.{name}){low_rank}"

    def part(self, graph: Graph, whole: fx.Node, member: Member, packed: Packed) -> None:
        """Put a part of the product in the place of a layer, and parts in the place of its updates' `down`."""
        node = member.node
        _allow_strides(member.updates[-1] if member.updates else node, self.tree)
        with graph.inserting_before(node):
            new = graph.call_function(torch.narrow, (whole, -1, packed.weights[member.weight], member.width))
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        for update, down, rank in zip(member.updates, member.downs, member.ranks, strict=True):
            lora = self.tree.get_submodule(str(update.target))
            if type(lora) is Lora:
                lora.__class__ = Joined  # this tree's own copy of the module
            with graph.inserting_before(update):
                hidden = graph.call_function(torch.narrow, (whole, -1, packed.weights[down], rank))
            hidden.meta.update({k: v for k, v in update.meta.items() if k in ("nn_module_stack", "pass")})
            hidden.meta["dtype"] = whole.meta["dtype"]
            if "shape" in whole.meta:
                hidden.meta["shape"] = (*whole.meta["shape"][:-1], rank)
            update.update_kwarg("hidden", hidden)

    def module(self, group: Group) -> tuple[str, Packed] | None:
        """The packed weights of a group, with the name that they have; None where their memory is something else's."""
        names = list(dict.fromkeys([m.weight for m in group.members] + [d for m in group.members for d in m.downs]))
        weights, rows = self.laid(names)
        layers = {m.weight: m.bias for m in group.members}
        biases = {bias: weights[weight] for weight, bias in layers.items() if bias is not None}
        home = self.tree._modules.get(self.home) or Container(("Packed",))
        for name, known in home._modules.items():
            if isinstance(known, Packed) and (known.weights, known.biases) == (weights, biases):
                return name, known
        made: list[Tensor | None] = []
        for starts in (weights, biases):
            parts = [(self.tree.get_parameter(name), start) for name, start in starts.items()]
            made.append(_whole(parts, rows) if parts else None)
        if made[0] is None:
            return None
        for starts, whole in zip((weights, biases), made, strict=True):
            if whole is not None:
                tie(whole, [(self.tree.get_parameter(name), start) for name, start in starts.items()])
        name = identifier(group.members[0].path)
        while name in home._modules:
            name += "_"
        packed = Packed(made[0], made[1], weights, biases)
        packed.training = self.tree.training
        home._modules[name] = packed
        self.tree._modules[self.home] = home
        return name, packed

    def own(self, member: Member) -> bool:
        """Whether a layer's weights have memory of their own."""
        return all(_alone(self.tree.get_parameter(name)) for name in (member.weight, *member.downs))

    def laid(self, names: list[str]) -> tuple[dict[str, int], int]:
        """Where each parameter begins in the packed weight, and how many rows that has."""
        starts, at = {}, 0
        for name in names:
            starts[name] = at
            at += self.tree.get_parameter(name).shape[0]
        return starts, -(-at // ALIGNED) * ALIGNED


def _shared_stack(nodes: list[fx.Node]) -> dict[str, Any]:
    """The regions that hold all of the nodes."""
    stacks = [list(node.meta.get("nn_module_stack", {}).items()) for node in nodes]
    shared = {}
    for level in zip(*stacks, strict=False):
        if any(key != level[0][0] for key, _ in level):
            break
        shared[level[0][0]] = level[0][1]
    return shared


def _allow_strides(value: fx.Node, tree: nn.Module) -> None:
    """Let what looks at a value's memory in another shape copy it where strides ask for that."""
    for user in value.users:
        if user.target == "view" and user.op == "call_method":
            user.target = "reshape"
        if user.target is ops.edge or aliases(user, tree):
            _allow_strides(user, tree)
