"""The pack lowering: linear layers that read the same value become one product, their low-rank updates with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...blocks.lora import Lora
from ...ir import ops
from ...ir.containers import Container
from ...ir.editing import change, insert, meta_of, replace
from ...ir.graph import Graph, copy_graph
from ...ir.subgraphs import aliases
from ...ir.traced_module import TracedModule, shell
from ...spec.addresses import identifier
from .groups import Group, Member, groups, worth_it
from .layers import check_traced
from .packed_modules import Joined, Packed, alone, tie, whole_of

HOME = "packed"  # where the packed weights lie in the module tree
ALIGNED = 8  # rows of a packed weight: a multiple, so that what is read in part lies on 16 bytes in half precision too


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
            group = dataclasses.replace(group, members=[member for member in group.members if self.own(member)])
            made = self.module(group) if len({m.weight for m in group.members}) > 1 else None
        if made is None:
            return
        name, packed = made
        first = group.members[0].node
        around = {"nn_module_stack": _shared_stack([member.node for member in group.members])}
        reads = [
            insert(graph, "get_attr", part, before=first, meta={**meta_of(self.tree.get_parameter(part)), **around})
            for part in (*packed.weights, *packed.biases)
        ]
        path, meta = f"{self.home}.{name}", {**around, "dtype": group.dtype}
        whole = insert(graph, "call_module", path, (group.value, *reads), before=first, meta=meta)
        shape = group.value.meta.get("shape")
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
        args = (whole, -1, packed.weights[member.weight], member.width)
        replace(node, insert(graph, "call_function", torch.narrow, args, before=node, meta=node.meta))
        for update, down, rank in zip(member.updates, member.downs, member.ranks, strict=True):
            lora = self.tree.get_submodule(str(update.target))
            if type(lora) is Lora:
                lora.__class__ = Joined  # this tree's own copy of the module
            meta = {**meta_of(update, "nn_module_stack", "pass"), "dtype": whole.meta["dtype"]}
            if "shape" in whole.meta:
                meta["shape"] = (*whole.meta["shape"][:-1], rank)
            args = (whole, -1, packed.weights[down], rank)
            hidden = insert(graph, "call_function", torch.narrow, args, before=update, meta=meta)
            change(update, kwargs={**update.kwargs, "hidden": hidden})

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
            made.append(whole_of(parts, rows) if parts else None)
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
        return all(alone(self.tree.get_parameter(name)) for name in (member.weight, *member.downs))

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
            change(user, target="reshape")
        if user.target is ops.edge or aliases(user, tree):
            _allow_strides(user, tree)
