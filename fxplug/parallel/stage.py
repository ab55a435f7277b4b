"""One axis of the mesh: where a graph is split along it, and the graph that is written of that."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from ..core.capture.isolation import switch_mode
from ..core.errors import SpecError, did_you_mean, format_fields
from ..core.ir.graph import Graph, copy_graph
from ..core.ir.traced_module import TracedModule, strip_to_container
from ..core.rewriter.graft import Traces
from ..core.rewriter.neutrality import _knows_mode
from .planning import rows, token_origins
from .planning.opened_layers import open_layers
from .planning.planner import make_plan, replan
from .planning.sharding_plan import PlanSettings, ShardingPlan, Unsplittable
from .planning.trials import Memory, ShardTrials
from .planning.walk import Walk, bind, make_label, restore_state, walk
from .runtime.collectives import Collective
from .runtime.mesh import SEQUENCE, MeshPosition, fill_degrees
from .runtime.pretended import make_position
from .writing import PlanWriter

NAMES = {
    SEQUENCE: "sequence_parallel", "batch": "batch_parallel", "rows": "spatial_parallel", "tensor": "tensor_parallel",
}  # fmt: skip


@dataclass
class Stage:
    """What one axis of the mesh does: to the graph of the mode in force, and to those of all modes that have a plan."""

    axis: str
    found: ShardingPlan
    modes: dict[bool, ShardingPlan]
    opens: frozenset[str] = frozenset()  # layers whose weights come into the graph

    __repr__ = format_fields

    @property
    def name(self) -> str:
        """Name of the axis's pass, such as `sequence_parallel`."""
        return NAMES[self.axis]


def plan_axis(
    gm: TracedModule, mode: bool, call: Any, along: tuple[str, int], split: Mapping[str, int] | None,
    before: Mapping[bool, ShardingPlan], memory: Memory,
) -> ShardingPlan:  # fmt: skip
    """Return the plan of one graph along one axis, with the starts of the plan `before`, of the other mode, if possible."""
    graph = gm.graphs[mode]
    walked, names = walk(gm, graph, bind(gm, *call)), {node.name for node in graph.nodes}
    for other in before.values():
        if all(node.name in names for node in other.starts):
            with contextlib.suppress(Unsplittable):
                again = {node.name: dim for node, dim in other.starts.items() if isinstance(dim, int)}
                return _plan_graph(gm, graph, walked, along, again, memory)
    return _plan_graph(gm, graph, walked, along, split, memory)


def _plan_graph(
    gm: TracedModule, graph: fx.Graph, walked: Walk, along: tuple[str, int], split: Mapping[str, int] | None,
    memory: Memory,
) -> ShardingPlan:
    axis, ways = along
    first, *others = (ShardTrials(gm, seed, axis == "rows", memory) for seed in range(3))
    if axis == "rows":
        found = rows.find_best(first, walked, named_starts(graph, split) if split else None)
    elif axis == "batch" or split:
        given = token_origins.find_samples(walked) if split is None else named_starts(graph, split)
        found = make_plan(walked, first, given, PlanSettings(one=axis == "batch"))
    else:
        found = token_origins.find_best(first, walked, ways)
    if axis == "rows":
        rows.check_at_other_rows(found, others)
    else:
        replan(found, others[0])
    if found.share() == 0:
        raise Unsplittable(next((f"{make_label(n)}: {why}" for n, why in found.why.items()), "no operation can be split"))
    return found


@contextlib.contextmanager
def use_mode(mode: bool, gm: TracedModule) -> Iterator[None]:
    """Switch to one mode inside the context, for a model with a graph for each, and restore its state after it."""
    with restore_state(gm), switch_mode(mode, gm) if len(gm.graphs) == 2 else contextlib.nullcontext():
        yield


def give_both_modes(gm: TracedModule) -> TracedModule:
    """Return the module with a graph for each mode, if one graph served both and its layers differ in training."""
    if len(gm.graphs) == 2 or gm.twin_error or not _knows_mode(gm):
        return gm
    (graph,) = gm.graphs.values()
    return gm.derived(strip_to_container(gm), {mode: copy_graph(graph) for mode in (gm.training, not gm.training)})


def named_starts(graph: fx.Graph, split: Mapping[str, int]) -> dict[fx.Node, int]:
    """Return the nodes that are split, by their names, each with its dimension. Raises SpecError for an unknown name."""
    known = {node.name: node for node in graph.nodes}
    for name in split:
        if name not in known:
            raise SpecError(f"split: no node '{name}'{did_you_mean(name, known)}")
    return {known[name]: dim for name, dim in split.items()}


def check_sizes(stage: Stage, number: int) -> None:
    """Raise SpecError if there are fewer samples, rows or tokens than processes."""
    found = stage.found
    for index, (node, dim) in enumerate(found.origins):
        if found.sizes[index] < number and (node in found.starts or index in found.derived):
            what = {"batch": "samples", "rows": "rows"}.get(stage.axis, "tokens")
            raise SpecError(
                f"{found.sizes[index]} {what} ('{node.name}', dimension {dim}) cannot be split over {number} processes: use "
                "fewer, or example inputs of the size that will be used"
            )


def write_axis(gm: TracedModule, stage: Stage, ways: Mapping[str, int], traces: Traces | None = None) -> TracedModule:
    """Return the module with collectives along one axis inserted; `traces` are those of layers that were opened for its plan.

    Raises SpecError for a module that has the name of the pass.
    """
    if stage.name in dict(gm.named_children()):
        raise SpecError(f"the model has a module '{stage.name}' of its own")
    gm = open_layers(gm, stage.opens, traces=traces) if stage.opens else gm
    tree = strip_to_container(gm)
    graphs: dict[bool, Graph] = {}
    for mode, found in stage.modes.items():
        graphs[mode] = copy_graph(gm.graphs[mode])
        writer = PlanWriter(graphs[mode], tree, found, stage.name, ways, stage.axis)
        writer.run()
    sites = writer.sites
    row = make_entry(stage.name, {k: n for k, n in ways.items() if n > 1}, sites)
    new = gm.derived(tree, graphs, passes=[*gm.meta.get("passes", []), row])
    place(new, make_single_position())
    return new


def make_entry(name: str, params: Mapping[str, Any], sites: Sequence[Any], neutral: bool = False) -> dict[str, Any]:
    """Return the entry of a parallel pass for a module's `meta["passes"]`."""
    return {
        "name": name, "about": "", "params": dict(params), "lr": None, "weight_decay": None, "train": False,
        "neutral": neutral, "sites": list(sites), "slots": 0, "inputs": [], "networks": [],
    }  # fmt: skip


def place(gm: nn.Module, world: MeshPosition | None) -> None:
    """Set this process's position in the collectives of a module."""
    for module in gm.modules():
        if isinstance(module, Collective):
            vars(module).pop("world", None)
            if world is not None:
                module.world = world


def make_single_position() -> MeshPosition:
    """Return the position of a single process."""
    return make_position(fill_degrees({}), 0)
