"""Merge and unmerge: what passes made of weights goes into a copy of them, and the graph is the model's own again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ...adapters.slots import Adapters
from ...adapters.strengths import expand_factors
from ...blocks.base import Table, check_values
from ...core import quantised
from ...core.errors import SpecError, did_you_mean
from ...core.ir import ops
from ...core.ir.containers import find_tensor
from ...core.ir.graph import Graph, copy_graph, erase_unused, get_meta, insert, is_added, redirect, replace, set_argument
from ...core.ir.regions import Regions, format_names
from ...core.ir.traced_module import TracedModule, check_traced, strip_to_container
from ...core.locks import with_read_lock
from ...core.spec.addresses import Port, make_identifier
from ...core.spec.rules import GATES
from ..linear.layers import BEHIND, LAYERS, PRODUCTS, find_result, get_argument
from .foldable import FoldableGraph, get_inner
from .numeric_check import evaluate
from .updates import FoldStep, ParameterUse, choose_accumulator, fold_block, get_scale, map_parameter


@with_read_lock
def merge(
    gm: TracedModule, passes: Sequence[str] | None = None, adapters: Mapping[str, float] | None = None
) -> TracedModule:
    """Fold passes into a copy of the weights; `gm`, and every tensor of it, stays as it is.

    Folded are low-rank updates and scales beside a layer, and all blocks that map a parameter; with slots, the adapters in use.
    Sums are in float32 (float64 stays) and rounded once to the weight's dtype. Graph, modules and `meta["passes"]` keep no
    trace of the passes; tensors that nothing was folded into are shared. `meta["unmerged"]` is `gm`, which `unmerge` gives
    back; deleting that key frees it. A layer that is tied to another is so no more where only one of them was changed. Dropout
    and power iterations, which act in training, are left out.

    Args:
        gm: The rewritten module.
        passes: The names of those to fold; None is all but marks for a step cache.
        adapters: Which of the slots' adapters are folded and how much of each, instead of those in use, which stay as they are.

    Returns:
        The module with other weights.

    Raises:
        SpecError: A name is no pass or adapter here, a strength is no finite number, or a pass is no function of weights, with
            the reasons.
    """
    check_unlowered(gm, "merge")
    wanted = _named(gm, passes)
    if adapters is None:
        gates = {name: get_uniform_gates(gm, name) for name in find_slotted(gm) if name in wanted}
    else:
        gates = Adapters(gm).strengths(adapters)
    plan = FoldPlan(gm, set(wanted))
    plan.check()
    new = plan.module(plan.values(gates))
    new.meta["unmerged"] = gm
    return new


def unmerge(merged: TracedModule) -> TracedModule:
    """Return the module that `merge` was called with, bit for bit; on the device and in the dtype that the merged one was moved
    to.

    Args:
        merged: What `merge` gave.

    Returns:
        The module with its passes.

    Raises:
        SpecError: The module was not merged, was merged and loaded from a file, or got passes after that.
    """
    if not isinstance(merged, TracedModule):
        raise SpecError(f"unmerge takes a merged module, not {type(merged).__name__}")
    before = merged.meta.get("unmerged")
    if not isinstance(before, TracedModule):
        raise SpecError(
            "this module was not merged in this process: only the result of merge has the un-merged module, in "
            "meta['unmerged'], and a file does not; load the un-merged file"
        )
    kept = [entry["name"] for entry in before.meta["passes"]]
    later = [entry["name"] for entry in merged.meta.get("passes", []) if entry["name"] not in kept]
    if later:
        raise SpecError(f"after the merge {', '.join(later)} was applied, which unmerge would lose: unmerge first, then apply")
    ours = dict(merged.named_parameters())
    for name, old in before.named_parameters():
        now = ours.get(name)
        if now is not None and now is not old and (now.device, now.dtype) != (old.device, old.dtype):
            return before.to(device=now.device, dtype=now.dtype if now.dtype != old.dtype else None)
    return before


def check_unlowered(gm: Any, caller: str) -> None:
    """Raise SpecError for what is no traced module, and for one that is lowered or outlined already."""
    check_traced(gm, caller)
    if "source" in gm.meta:
        raise SpecError(f"this module is lowered already: {caller} takes the one it was made from, meta['source']")
    if any(isinstance(module, TracedModule) for module in gm.modules() if module is not gm):
        raise SpecError(f"this module is outlined: {caller} takes the one it was made from")


def _named(gm: TracedModule, passes: Sequence[str] | None) -> list[str]:
    known = [entry["name"] for entry in gm.meta.get("passes", [])]
    if isinstance(passes, str):
        raise SpecError(f"passes must be a list of names, not text: write ['{passes}']")
    if not known:
        raise SpecError("nothing to merge: no pass is applied to this module")
    for name in passes or ():
        if name not in known:
            raise SpecError(f"no pass '{name}' is applied here{did_you_mean(name, known)}; there are {', '.join(known)}")
    if passes is not None and not passes:
        raise SpecError(f"passes is empty: name some of {', '.join(known)}")
    if passes is not None:
        return list(passes)
    marks = {entry["name"] for entry in gm.meta["passes"] if is_mark(gm, entry)}
    if marks == set(known):
        raise SpecError(f"nothing to merge: {', '.join(known)} only marks where the graph may be cut")
    return [name for name in known if name not in marks]


def is_mark(gm: TracedModule, entry: Mapping[str, Any]) -> bool:
    """Return whether the blocks of an applied pass only mark where a graph may be cut; `entry` is the pass's record."""
    blocks = [site["block"] for site in entry["sites"]]
    return bool(blocks) and all(block and getattr(gm.get_submodule(block), "is_mark", False) is True for block in blocks)


def find_slotted(gm: TracedModule) -> list[str]:
    """Return the names of the passes whose blocks have slots."""
    names = [entry["name"] for entry in gm.meta.get("passes", []) if GATES in entry["networks"]]
    return [name for name in names if isinstance(getattr(gm.get_submodule(f"{name}.{GATES}"), "table", None), Table)]


def get_uniform_gates(gm: nn.Module, name: str) -> Tensor:
    """Return the gates of a pass's slots for the whole batch, float32 (slots,), or (groups, slots) where layers differ. Raises
    SpecError if samples differ."""
    table = gm.get_submodule(f"{name}.{GATES}.table")
    assert isinstance(table, Table)
    weights = check_values(table.weights).float()
    count = max(int(table.entries), 1)
    factors = table.factors.float() if table.groups else weights.new_ones(1, 1, 1)
    if any((rows[:count] != rows[:1]).any() for rows in (weights, factors)):
        raise SpecError(
            f"the samples of a batch use different adapters of '{name}', which cannot be merged into one weight: use the same "
            "for all samples, adapters.use(name), or keep the un-merged module for mixed batches"
        )
    check_no_regions(gm, name)
    if (factors[0] != 1).any():
        return expand_factors(weights[0], table.which[0], factors[0])
    return weights[0].clone()


def check_no_regions(gm: nn.Module, name: str) -> None:
    """Raise SpecError for adapters of a pass that act in regions of the picture."""
    table: Any = gm.get_submodule(f"{name}.{GATES}.table")
    count, chosen = max(int(table.entries), 1), table._buffers.get("regions")
    if chosen is not None and bool(chosen[:count][table.weights[:count].gather(1, table.which[:count]) != 0].any()):
        raise SpecError(
            f"adapters of '{name}' act in regions of the picture, which no weight can: use them without regions, or keep the "
            "un-merged module"
        )


def choose_gates(block: nn.Module, gates: Tensor) -> Tensor:
    """Return the gates of a block's own group of layers, (slots,), where the groups of its pass differ."""
    return gates[int(getattr(block, "group", 0))] if gates.dim() == 2 else gates


def find_foldable(gm: TracedModule, passes: Sequence[str]) -> list[str]:
    """Return those of the passes that `merge` can fold together."""
    names = list(passes)
    while names:
        bad = FoldPlan(gm, set(names)).refused_passes()
        if not bad:
            break
        names = [name for name in names if name not in bad]
    return names


class FoldPlan:
    """How the blocks of passes go into weights: found on copies of a module's graphs, which are edited on the way."""

    def __init__(self, gm: TracedModule, passes: set[str]) -> None:
        self.gm, self.passes = gm, passes
        self.tree = strip_to_container(gm)
        self.graphs = {mode: copy_graph(graph) for mode, graph in gm.graphs.items()}
        self.uses: dict[tuple[int, str], list[ParameterUse]] = {}
        self.reasons: dict[str, dict[str, str]] = {name: {} for name in passes}
        modes = sorted(gm.graphs, reverse=True)  # values are those of evaluation
        self.before = {node.name: node for mode in modes for node in gm.graphs[mode].nodes}
        readers = [FoldableGraph(graph, self.tree, passes) for graph in self.graphs.values()]
        for reader in readers:
            reader.read()
            for node, reason in reader.refused:
                self.refused(node, reason)
            for use in reader.uses:
                owner, _, last = use.name.rpartition(".")
                self.uses.setdefault((id(self.tree.get_submodule(owner)), last), []).append(use)
        self.check_single_reader()
        for graph, reader in zip(self.graphs.values(), readers, strict=True):
            for at, names in ((1, reader.named), (2, reader.biases)):
                for node, name in names.items():
                    read(graph, node, at, name)
            for node, value in reader.gone.items():
                while value in reader.gone:
                    value = reader.gone[value]
                bypass(node, value)
        for graph in self.graphs.values():
            self.clean(graph)
        for entry in gm.meta["passes"]:
            if entry["name"] in passes and entry["inputs"]:
                self.reasons[entry["name"]]["it"] = f"it has its own inputs: {', '.join(entry['inputs'])}"

    # --- finding

    def refused(self, node: fx.Node, reason: str) -> None:
        """Record why a node's pass cannot be merged at a place; the first reason is kept."""
        made_by = node.meta["pass"]
        what = f"{made_by['block'] or 'what it put'} at '{made_by['site'] or 'the model'}'" if "site" in made_by else "it"
        self.reasons[made_by["name"]].setdefault(what, reason)

    def check_single_reader(self) -> None:
        """Refuse to change a weight in one place that is read in another too."""
        for uses in self.uses.values():
            odd = next((u for u in uses if u.steps != uses[0].steps), None)
            if odd is not None:
                with_most = max((uses[0], odd), key=lambda u: len(u.steps))
                other = odd if with_most is uses[0] else uses[0]
                for step in with_most.steps:
                    if step not in other.steps:
                        self.refused(step.node, f"'{with_most.name}' is also read by '{other.node.name}' without it")

    def clean(self, graph: Graph) -> None:
        """Erase unused nodes of the passes, and close the layers that were opened for them."""
        for node in reversed(list(graph.nodes)):
            made_by = node.meta.get("pass")
            if made_by is None or made_by["name"] not in self.passes or node.op in ("placeholder", "output"):
                continue
            if node.target is ops.edge and is_added(node):
                bypass(node, node.args[0])
            elif is_added(node) or self.networked(node) or node.op == "get_attr":
                erase_unused([node])
        for node in graph.nodes:
            made_by = node.meta.get("pass")
            name = str(node.target).partition(".")[0] if node.op in ("call_module", "get_attr") else ""
            if made_by is not None and made_by["name"] in self.passes and (is_added(node) or self.networked(node)):
                beside = made_by.get("block") in [kind.__name__ for kind in BEHIND]
                reason = (
                    "there is no layer with a weight directly before or after it"
                ) if beside else "it is computed from activations; a block with place: param is not, and merges"
                self.refused(node, quantised.explain_fixed(self.gm, made_by.get("site", "")) or reason)
            elif name in self.passes:
                self.reasons[name].setdefault("it", f"'{node.name}' reads its weights")
        close(graph, self.gm, self.tree, self.passes)
        for node in graph.nodes:
            if node.meta.get("pass", {}).get("name") in self.passes:
                del node.meta["pass"]

    def networked(self, node: fx.Node) -> bool:
        """Return whether a node belongs to a network of a pass."""
        key = next(reversed(node.meta.get("nn_module_stack") or {"": None}))
        return key.partition(".")[0] in self.passes

    def refused_passes(self) -> dict[str, dict[str, str]]:
        """Return the passes that cannot be folded into weights, with the blocks and reasons."""
        return {name: rows for name, rows in self.reasons.items() if rows}

    def check(self) -> None:
        """Raise SpecError if a pass cannot be folded into weights."""
        bad = self.refused_passes()
        if not bad:
            return
        lines = []
        for name, rows in bad.items():
            lines += [f"  {name}: {what} cannot be merged into a weight: {reason}" for what, reason in list(rows.items())[:3]]
            lines += [f"  {name}: ... and {len(rows) - 3} more"] if len(rows) > 3 else []
        rest = [e["name"] for e in self.gm.meta["passes"] if e["name"] in self.passes and e["name"] not in bad]
        way = f"merge the others: passes={rest}" if rest else "leave it un-merged"
        raise SpecError("\n".join([f"{format_names(list(bad))} cannot be merged; {way}", *lines]))

    # --- the result

    def changed(self) -> list[ParameterUse]:
        """Return one use of each parameter that blocks are folded into."""
        return [uses[0] for uses in self.uses.values() if uses[0].steps]

    def path(self, step: FoldStep) -> str:
        """Return the path of a step's block."""
        return str(self.before[step.block].target) if step.place == "param" else step.block

    @torch.no_grad()
    def values(self, gates: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the folded parameters by name, in the dtype of those they replace.

        `gates` has, for a pass with slots, their weights (slots,).
        """
        made: dict[Any, Tensor] = {}
        found: dict[str, Tensor] = {}
        for use in self.changed():
            old = find_tensor(self.tree, use.name)
            key = (id(old) if old is not None else use.name, use.part, use.steps)  # what was tied stays so
            if key not in made:
                made[key] = self.value(use, old, gates)
            found[use.name] = made[key]
        return found

    def value(self, use: ParameterUse, old: Tensor | None, gates: Mapping[str, Tensor]) -> Tensor:
        """Return one parameter with its blocks folded in; `old` is None for a bias that a layer did not have."""
        like = self.tree.get_submodule(use.name.rpartition(".")[0])._parameters["weight"] if old is None else old
        assert like is not None
        dtype = choose_accumulator(like)
        value = torch.zeros(like.shape[0], dtype=dtype, device=like.device) if old is None else old.detach().to(dtype)
        for step in use.steps:
            if step.place == "param":
                node = self.before[step.block]
                name = node.meta["pass"]["name"]
                if name in gates:
                    value = map_parameter(value, self.tree.get_submodule(str(node.target)), gates[name])
                else:
                    value = evaluate(node, self.tree, {get_inner(node): value}, dtype)
            else:
                via = None
                if step.via:
                    via = get_scale(self.tree.get_submodule(step.via), gates.get(step.via.partition(".")[0]))
                own = gates.get(step.block.partition(".")[0])
                block = self.tree.get_submodule(step.block)
                value = fold_block(value, block, step, use, None if own is None else choose_gates(block, own), via)
        if old is not None and value.shape == old.shape and value.stride() != old.stride():  # which kernel runs depends on them
            return torch.empty_like(old).copy_(value)
        return value.to(like.dtype)

    def module(self, values: Mapping[str, Tensor]) -> TracedModule:
        """Return the module with these parameters, without the passes."""
        for graph in self.graphs.values():
            graph.lint()
        new: dict[int, nn.Parameter] = {}
        for name, value in values.items():
            owner, _, last = name.rpartition(".")
            module = self.tree.get_submodule(owner)
            old = module._parameters.get(last)
            like = old if old is not None else next(p for p in module._parameters.values() if p is not None)
            if id(value) not in new:
                new[id(value)] = nn.Parameter(value, requires_grad=like.requires_grad)
            module._parameters[last] = new[id(value)]
            if old is not None and value.shape[0] != old.shape[0]:  # a new head
                setattr(module, "out_features" if isinstance(module, nn.Linear) else "out_channels", value.shape[0])
        for name in self.passes:
            self.tree._modules.pop(name, None)
        kept = [entry for entry in self.gm.meta["passes"] if entry["name"] not in self.passes]
        made = self.gm.derived(self.tree, self.graphs, passes=kept)
        if not kept:
            del made.meta["passes"]
        return made


# --- editing a graph


def bypass(node: fx.Node, value: Any) -> None:
    """Replace a node by a value in its users; blocks after the node are after the value then."""
    for user in node.users:
        if user.meta.get("behind") == node.name:
            user.meta["behind"] = node.meta.get("behind", value.name)
    replace(node, value)


def read(graph: Graph, node: fx.Node, part: int, name: str) -> None:
    """Set a parameter of a product's layer as its argument: the weight (part 1) or the bias (2)."""
    _, weight_at, bias_at = PRODUCTS[node.target]
    at, key = (weight_at, "weight") if part == 1 else (bias_at, "bias")
    old = get_argument(node, at, key)
    shape = old.meta["shape"] if isinstance(old, fx.Node) else (node.meta["shape"][-1 if node.target is F.linear else 1],)
    meta = {**get_meta(node, "nn_module_stack", "pass", "dtype"), "shape": shape}
    set_argument(node, at, key, insert(graph, "get_attr", name, before=node, name=make_identifier(name), meta=meta))


def close(graph: Graph, gm: TracedModule, tree: nn.Module, passes: set[str]) -> None:
    """Restore calls of whole layers that were opened for blocks of these passes."""
    for region in list(Regions(graph, gm).by_key.values()):
        if region.leaf is not None or len(region.inputs) != 1 or len(region.outputs) != 1:
            continue
        (_, _, entry), (_, leave) = region.inputs[0], region.outputs[0]
        module = tree.get_submodule(region.path)
        product, behind = leave.args[0], []
        while isinstance(product, fx.Node) and product.op == "call_module" and "pass" in product.meta:
            block = tree.get_submodule(str(product.target))
            if not isinstance(block, BEHIND):
                break
            behind.append(product)
            product = find_result(product, block)
        if type(module) not in LAYERS.values() or not isinstance(product, fx.Node) or product.op != "call_function":
            continue
        inside = {product}
        todo = [product]
        while todo:
            new = [v for v in todo.pop().all_input_nodes if v is not entry and v not in inside]
            inside.update(new)
            todo += new
        made_by = [n.meta.get("pass", {}) for n in inside]
        opened = [m.get("region") and m["name"] in passes and m["site"].partition("@")[0] == region.path for m in made_by]
        if not all(opened):
            continue
        inside -= {n for n in inside if n is not product and not inside.issuperset(n.users)}  # others read it too
        port, stack = Port(region.key, "out"), entry.meta["nn_module_stack"]
        meta = {**get_meta(leave), "port": port, "nn_module_stack": stack}
        leaf = insert(
            graph, "call_module", region.path, (entry.args[0],), before=product, name=make_identifier(region.key), meta=meta
        )
        before = leaf
        for node in reversed(behind):
            node.meta["behind"], before = before.name, node
        redirect(product, leaf)
        for node in (leave, *sorted(inside, reverse=True)):
            bypass(node, node.args[0] if node is leave else leaf)
        bypass(entry, entry.args[0])
