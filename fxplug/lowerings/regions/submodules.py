"""Regions of a graph become submodules again: the units of gradient checkpointing and sharding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint as checkpointed

from ...core.errors import FxplugError, MatchError, SpecError
from ...core.ir.calls import CHECKPOINTING
from ...core.ir.containers import Container, find_tensor, list_tensors
from ...core.ir.functions import REGION
from ...core.ir.graph import copy_graph, erase_unused
from ...core.ir.regions import find_regions
from ...core.ir.subgraphs import RegionCut, collect_nodes, extract, find_changed_input, find_written, make_unique_names, plan
from ...core.ir.traced_module import TracedModule, list_class_names, strip_to_container
from ...core.rewriter.near_misses import describe_misses
from ...core.spec.addresses import select
from ...core.spec.rules import Match
from ...core.torch_internals.modules import NormBase
from ...core.torch_internals.tensors import version
from .choice import check_outlinable, choose, choose_blocks


def outline(
    gm: TracedModule,
    regions: Sequence[str] | None = None,
    *,
    checkpoint: bool = False,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
) -> TracedModule:
    """Return a module with chosen regions as submodules, on shared parameters and buffers; `gm` is unchanged.

    `regions` are path patterns (exact, glob, slices, `re:`); of nested regions the outer one is used. Blocks of a pass belong
    to the region of their site. None uses repeated regions that minimise saved activations, see `choice`. Signature, results
    and gradients stay the same, bit for bit. A region's module is at `outlined.meta["regions"][path]`, and `get_originals`
    returns parameters and buffers under their names in `gm`.

    With `checkpoint` each region's activations are recomputed in the backward pass, in either mode (Chen et al. 2016, arXiv
    1604.06174): random numbers are drawn as before, and buffers that it writes are written once. `wrap` puts a module around
    that of each region.

    Raises MatchError for a pattern that matches nothing and when there is nothing repeated to choose; SpecError for a named
    region that cannot be cut out or checkpointed, with the reason.
    """
    check_outlinable(gm, regions, "outline")
    checkpoint = checkpoint or bool(gm.meta.get(CHECKPOINTING))
    graphs = {mode: copy_graph(graph) for mode, graph in gm.graphs.items()}
    inside = {mode: collect_nodes(graph) for mode, graph in graphs.items()}

    def cut_at(key: str, nodes: list[fx.Node]) -> RegionCut | str:
        cut = plan(key, nodes, gm)
        node = find_changed_input(cut.nodes, cut.inputs, gm) if checkpoint and isinstance(cut, RegionCut) else None
        return cut if node is None else f"cannot be checkpointed, because '{node.name}' changes its input in place"

    train = True in graphs
    keys = choose(graphs[train], inside[train], gm, cut_at) if regions is None else find_named(gm, regions)
    names = make_unique_names(keys)
    home = "regions"
    while hasattr(gm, home):
        home += "_"
    parts: dict[str, dict[bool, fx.Graph]] = {}
    for key in keys:
        plans = {mode: cut_at(key, inside[mode][key]) for mode in graphs if key in inside[mode]}
        reason = next((p for p in plans.values() if isinstance(p, str)), None)
        cuts = {mode: p for mode, p in plans.items() if isinstance(p, RegionCut)}
        if reason is not None and regions is not None:
            raise SpecError(f"'{key}' {reason}: name a region around it, or regions inside it")
        if reason is None:
            stacks = {mode: make_stack(cut) for mode, cut in cuts.items()}
            parts[key] = {m: extract(c, f"{home}.{names[key]}", names[key], stacks[m])[0] for m, c in cuts.items()}
    if not parts:
        raise MatchError("the model has no repeated regions that can be outlined: name the regions yourself")
    return _assembled(gm, graphs, parts, home, names, checkpoint, wrap)


def list_blocks(gm: TracedModule, *, checkpoint: bool = False) -> list[str]:
    """List the outermost repeated regions with weights, as `outline` takes them; none where nothing is repeated.

    Args:
        gm: The traced module.
        checkpoint: Whether their activations are to be computed again.

    Returns:
        The regions that can be cut out in each mode, in the order they run.
    """
    graphs = {mode: copy_graph(graph) for mode, graph in gm.graphs.items()}
    inside = {mode: collect_nodes(graph) for mode, graph in graphs.items()}

    def cut_at(key: str, nodes: list[fx.Node]) -> RegionCut | str:
        found: list[RegionCut | str] = [plan(key, inside[mode][key], gm) for mode in graphs if key in inside[mode]]
        cuts = [cut for cut in found if isinstance(cut, RegionCut)]
        if len(cuts) < len(found) or (checkpoint and any(find_changed_input(cut.nodes, cut.inputs, gm) for cut in cuts)):
            return "cannot be cut out"
        return cuts[0]

    train = True in graphs
    return choose_blocks(graphs[train], inside[train], gm, cut_at)


def get_originals(outlined: TracedModule) -> dict[str, Tensor]:
    """Return parameters and buffers of an outlined module under their names in the original module.

    Tensors with several names are listed once. After `shard` they are those of the module then: DTensors. Raises SpecError for
    a module that is not outlined.
    """
    check_outlined(outlined, "originals")
    return {name: find_tensor(outlined, now) for name, now in outlined.meta["originals"].items()}  # type: ignore[misc]


def check_outlined(module: Any, caller: str) -> None:
    """Raise SpecError for anything that `outline` did not make."""
    if not isinstance(module, TracedModule) or "regions" not in module.meta:
        raise SpecError(f"{caller} takes an outlined module, not {type(module).__name__}: outline(module) makes one")


class CheckpointedRegion(nn.Module):
    """A region whose activations are computed again in the backward pass. Without gradients it just runs.

    `written` names its buffers that training writes: the second run sees them as the first did, and leaves them as they are.
    """

    def __init__(self, region: TracedModule, written: Sequence[str] = ()) -> None:
        super().__init__()
        self.region, self.written = region, tuple(written)
        self.training = region.training

    def forward(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():  # not by the mode: blocks may train in a base that computes as in evaluation
            return self.region(*args)
        if torch.compiler.is_compiling():  # a compiled program changes buffers once and its inputs never
            return checkpointed(self.region, *args, use_reentrant=False)
        buffers = [self.region.get_buffer(name) for name in self.written]
        read = [t for name, t in (*self.region.named_parameters(), *self.region.named_buffers()) if name not in self.written]
        return checkpointed(
            self.region, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), _as_before(buffers, read))
        )


def _as_before(buffers: list[Tensor], read: list[Tensor]) -> AbstractContextManager[None]:
    """Return a context that restores the current values of buffers inside, and those of its entry after it.

    Entering it raises FxplugError if one of the tensors that are `read` was changed since.
    """
    before = [b.clone() for b in buffers]
    versions = [version(t) for t in read if not t.is_inference()]

    @contextmanager
    def again() -> Iterator[None]:
        if versions != [version(t) for t in read if not t.is_inference()]:  # as autograd says of what it keeps
            raise FxplugError(
                "weights were changed between a forward pass and its backward pass, which computes activations again: change "
                "adapters and weights after it, or put `with module.adapters.hold()` around both"
            )
        after = [b.clone() for b in buffers]
        _put(buffers, before)
        try:
            yield
        finally:
            _put(buffers, after)

    return again()


@torch.no_grad()
def _put(buffers: list[Tensor], values: list[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)


def find_named(gm: TracedModule, patterns: Sequence[str]) -> list[str]:
    """Return the outermost regions that the patterns match in any of the graphs, in the order they ran."""
    views = find_regions(gm)
    order = list(dict.fromkeys(key for regions in views for key in regions.ran))
    found: set[str] = set()
    for pattern in patterns:
        matched = {key for regions in views for key in select(pattern, regions.candidates(pattern))}
        if not matched:
            rows = "\n".join(describe_misses(views[0], Match(pattern)))
            raise MatchError(f"no region to outline matches '{pattern}'\n{rows}")
        found |= matched
    stacks: dict[str, set[str]] = {}
    for graph in gm.graphs.values():
        for node in graph.nodes:
            stack = node.meta.get("nn_module_stack") or {"": None}
            stacks.setdefault(next(reversed(stack)), set(stack))
    return [key for key in order if key in found and not found & (stacks.get(key, {key}) - {key})]


def make_stack(cut: RegionCut) -> dict[str, Any]:
    """Return the regions around a region, for the node that calls it."""
    node = next(n for n in cut.nodes if cut.key in n.meta["nn_module_stack"])
    found = {}
    for key, value in node.meta["nn_module_stack"].items():
        if key == cut.key:
            break
        found[key] = value
    return found


# --- the module tree


def _assembled(
    gm: TracedModule,
    graphs: Mapping[bool, Any],
    parts: Mapping[str, Mapping[bool, Any]],
    home: str,
    names: Mapping[str, str],
    checkpoint: bool,
    wrap: Callable[[nn.Module], nn.Module] | None,
) -> TracedModule:
    """Assemble the outlined module: a region owns what it alone uses, the root the rest."""
    tree = strip_to_container(gm)
    for graph in graphs.values():
        for node in graph.nodes:
            node.meta.pop(REGION, None)
        erase_unused(graph.nodes, lambda node: node.op == "get_attr")
        graph.lint()
    own = {key: _targets(modes.values()) for key, modes in parts.items()}
    made: dict[str, nn.Module] = {}
    for key, targets in own.items():
        region = TracedModule(_subtree(tree, targets), dict(parts[key]))
        region.meta = {"region": key}
        made[key] = CheckpointedRegion(region, _mutated_buffers(parts[key], region)) if checkpoint else region
    made = made if wrap is None else {key: wrap(module) for key, module in made.items()}
    used = {target for target in _targets(graphs.values()) if not target.startswith(f"{home}.")}
    _prune(tree, used, set().union(*own.values()))
    holder = Container(("Regions",))
    holder.training = gm.training
    holder._modules.update({names[key]: module for key, module in made.items()})
    tree._modules[home] = holder
    new = TracedModule(tree, dict(graphs), gm._origin, gm._extras)
    new.twin_error = gm.twin_error
    where: dict[int, str] = {}
    for name, tensor in list_tensors(new):
        where.setdefault(id(tensor), name)
    old = {**dict(gm.named_parameters()), **dict(gm.named_buffers())}
    new.meta = {
        **{key: value for key, value in gm.meta.items() if key != CHECKPOINTING},
        "regions": {key: f"{home}.{names[key]}" for key in made},
        "originals": {name: where[id(tensor)] for name, tensor in old.items()},
    }
    return new


def _targets(graphs: Any) -> set[str]:
    """Return the modules, parameters and buffers that graphs use."""
    return {str(n.target) for graph in graphs for n in graph.nodes if n.op in ("call_module", "get_attr")}


def _subtree(tree: nn.Module, targets: set[str]) -> Container:
    """Return the part of a module tree that a graph uses, under the same names."""
    root = Container(("Region",))
    root.training = tree.training
    for target in sorted(targets):  # what holds something comes before it
        *parents, last = target.split(".")
        here: nn.Module = root
        there = tree
        for part in parents:
            there = there.get_submodule(part)
            if part not in here._modules:
                stand_in = Container(list_class_names(there))
                stand_in.training = there.training
                here._modules[part] = stand_in
            here = here.get_submodule(part)
        for table in ("_modules", "_parameters", "_buffers"):
            if last in getattr(there, table) and last not in getattr(here, table):
                getattr(here, table)[last] = getattr(there, table)[last]
                if last in there._non_persistent_buffers_set:
                    here._non_persistent_buffers_set.add(last)
    return root


def _prune(tree: nn.Module, used: set[str], moved: set[str]) -> None:
    """Remove from the root's tree what only regions use, under all its names."""
    kept: set[int] = set()
    gone: set[int] = set()
    for targets, ids in ((used, kept), (moved, gone)):
        for target in targets:
            owner, _, last = target.rpartition(".")
            module = tree.get_submodule(owner)
            found = next(t[last] for t in (module._modules, module._parameters, module._buffers) if last in t)
            ids.add(id(found))
            if isinstance(found, nn.Module):
                for part in found.modules():
                    ids.update(map(id, (part, *part._parameters.values(), *part._buffers.values())))
    whole = kept | gone
    for target in used:  # and what holds it
        parts = target.split(".")
        kept.update(id(tree.get_submodule(".".join(parts[:n]))) for n in range(len(parts)))
    lost = gone - kept
    for module in list(tree.modules()):
        if id(module) not in whole:
            for table in (module._modules, module._parameters, module._buffers):
                for name in [n for n, x in table.items() if x is not None and id(x) in lost]:
                    del table[name]
    _drop_empty(tree)


def _drop_empty(module: nn.Module) -> None:
    for name, child in list(module._modules.items()):
        if isinstance(child, Container):
            _drop_empty(child)
            if not (child._modules or child._parameters or child._buffers):
                del module._modules[name]


def _mutated_buffers(modes: Mapping[bool, fx.Graph], region: nn.Module) -> list[str]:
    """Return the buffers that a region writes in training: running statistics, and those of passes' blocks."""
    graph = modes.get(True) or next(iter(modes.values()))
    found: dict[str, None] = {}
    for node in graph.nodes:
        found.update({str(v.target): None for v in find_written(node, region) if v.op == "get_attr"})
        if node.op == "call_module":
            for path, module in region.get_submodule(str(node.target)).named_modules(prefix=str(node.target)):
                tracks = isinstance(module, NormBase)
                # a block's numbers, as LoRA's scale, are settings
                names = [k for k, b in module._buffers.items() if b is not None and (tracks or b.numel() > 1)]
                found.update({f"{path}.{name}": None for name in names})
    return list(found)
