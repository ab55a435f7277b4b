"""The public face: a plan found for a model, printed and costed, and the model written with it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from ..core.capture.self_check import has_values
from ..core.errors import FxplugError, SpecError, VerifyError, cut_lines, format_fields
from ..core.ir.comparison import copy_inputs
from ..core.ir.containers import make_call
from ..core.ir.graph import Graph, copy_graph
from ..core.ir.traced_module import TracedModule, copy_graphs, strip_to_container
from ..core.rewriter.probe import GraphRun
from .comparison import check_pretended, simulate_rank
from .local_weights import localize
from .planning import features
from .planning.sharding_plan import ShardingPlan, Unsplittable
from .planning.trials import Memory
from .planning.walk import bind
from .runtime.checksums import PARTS, make_mark
from .runtime.collectives import Collective, record_traffic
from .runtime.layouts import count_all
from .runtime.mesh import SEQUENCE, fill_degrees, find_position, format_degrees
from .runtime.pretended import make_position
from .stage import Stage, check_sizes, give_both_modes, place, plan_axis, use_mode, write_axis

PACKED = (
    *(nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
    *(nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer),
)


@dataclass
class Plan:
    """Where a model is split over processes; `print(plan)` shows it, `parallelize` writes it.

    `ways` are the processes along each axis, `share` is the part of the work in products, convolutions and attention (counted
    in floating-point operations on the example inputs) that no process does alone.
    """

    ways: dict[str, int]
    stages: list[Stage]
    mark: str
    mode: bool
    written: TracedModule = field(repr=False)
    example: tuple[Any, Any] = field(repr=False)
    split: Mapping[str, int] | None = field(default=None, repr=False)  # as it was given
    graphs: dict[bool, Graph] = field(default_factory=dict, repr=False)  # of what is split, as they were
    costs: dict[int, list[tuple[str, int, int]]] = field(default_factory=dict, repr=False)
    away: float | None = None  # how far an output was from one process's, once that was looked at
    alternatives: list[str] = field(default_factory=list, repr=False)  # what other ways would cost, where it was chosen

    __repr__ = format_fields

    @property
    def share(self) -> float:
        """Least share that an axis splits; 1.0 for a plan with one process."""
        return min((stage.found.share() for stage in self.stages), default=1.0)

    def collectives(self, rank: int = 0) -> list[tuple[str, int, int]]:
        """List node, calls and bytes sent of each collective in a call with the example inputs.

        The graph runs as that process would run it, and nothing travels.

        Args:
            rank: The process.

        Returns:
            A row of node, calls and bytes for each.
        """
        if rank not in self.costs:
            with simulate_rank(make_position(self.ways, rank)):
                self.costs[rank] = list_node_costs(self.written, self.mode, *self.example)
        return self.costs[rank]

    def bytes(self, rank: int = 0) -> int:
        """Count the bytes that a process sends in one call on the example inputs.

        Args:
            rank: The process.

        Returns:
            The number of bytes.
        """
        return sum(row[2] for row in self.collectives(rank))

    def check(self) -> float:
        """Run the model on simulated processes, threads of this one, on the example inputs, and compare with one process.

        Returns the largest difference of an output, relative to the output's largest value. Raises VerifyError, with the first
        node that differs, if it is more than rounding in its dtype allows (`fxplug.core.ir.containers`).
        """
        self.away = check_pretended(self.written, *self.example)
        return self.away

    def is_of(self, module: TracedModule) -> bool:
        """Tell whether a module has its weights whole, and its graphs as this plan has written them.

        Args:
            module: The traced module.

        Returns:
            Whether it is of this plan.
        """
        return not module.meta.get(PARTS) and make_mark(module) == make_mark(self.written)

    def unsplit(self, module: TracedModule) -> TracedModule:
        """Make what was split of a module that `is_of` this plan, on the weights and with the adapters that it has now.

        Args:
            module: The parallel module.

        Returns:
            The module of one process.
        """
        names, tree = {stage.name for stage in self.stages}, strip_to_container(module)
        for name in names:
            tree._modules.pop(name, None)
        passes = [entry for entry in module.meta["passes"] if entry["name"] not in names]
        source = module.derived(tree, {mode: copy_graph(graph) for mode, graph in self.graphs.items()}, passes=passes)
        del source.meta["plan"]
        return source

    def rebuild(self, module: TracedModule, change: Callable[[TracedModule], TracedModule]) -> TracedModule:
        """Change what was split of a module that `is_of` this plan, and split that over the same processes by its own plan.

        It is checked on values where this one was.

        Args:
            module: The parallel module.
            change: Makes a module of the one that was split.

        Returns:
            The changed module, split again.

        Raises:
            SpecError: There is no plan of it for the example inputs of this one.
        """
        made = change(self.unsplit(module))
        args, kwargs = self.example
        try:
            checked = self.away is not None
            new = _written(made, parallel_plan(made, args, kwargs, **self.ways, split=self.split, check=checked))
        except FxplugError as error:
            raise SpecError(
                f"with this change the module cannot be split as before: {error}. Apply the pass to what was split, and make "
                "the plan of the module that this gives"
            ) from error
        here = (vars(m)["world"] for m in module.modules() if isinstance(m, Collective) and "world" in vars(m))
        place(new, next(here, None))
        return new

    def __str__(self) -> str:
        return cut_lines(self.listing)

    @property
    def listing(self) -> str:
        """Full text of the plan: degrees, streams, and every collective."""
        lines = [format_degrees(self.ways) or "one process"]
        for stage in self.stages:
            found = stage.found
            lines.append(f"{stage.name}: {found.share():.1%} of the work is split")
            for index, (node, dim) in enumerate(found.origins):
                parts = count_all([found.sizes[index]], make_position(self.ways, 0).sizes[stage.axis])
                lines.append(f"  stream {index}: {found.sizes[index]} from '{node.name}', dimension {dim}, in parts of {parts}")
            made = (node.meta.get("pass", {}) for node in self.written.graph.nodes)
            kinds = Counter(m["block"] for m in made if m.get("name") == stage.name and m["block"])
            lines.append("  " + ", ".join(f"{n} {kind}" for kind, n in kinds.items()))
            for node, why in found.why.items():
                lines.append(f"  whole at '{node.name}': {why}")
        checked = "not checked on values" if self.away is None else (
            f"an output differs by at most {self.away:.0e} from one process"
        )
        lines.append(checked)
        if self.written.twin_error and self.stages:
            lines.append(f"no graph for {'evaluation' if self.mode else 'training'}: {self.written.twin_error}")
        return "\n".join([*lines, *list_costs(self.collectives()), *self.alternatives])


def parallel_plan(
    gm: TracedModule,
    args: Sequence[Any] | torch.Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    ulysses: int = 1,
    ring: int = 1,
    batch: int = 1,
    tensor: int = 1,
    rows: int = 1,
    split: Mapping[str, int] | None = None,
    check: bool = True,
) -> Plan:
    """Find where a model can be split over processes, by trying its operations on parts of example inputs.

    Nothing is known of any model: each distinct operation runs once on small random values, whole and in unequal parts, and
    once more on others. Weights and inputs may be on the meta device. What has values is then run on pretended processes beside
    one (`Plan.check`): attention may hide an order of tokens that no comparison of parts can see.

    Args:
        gm: The traced module.
        args: Example inputs by position, as for `trace`.
        kwargs: Example inputs by name.
        ulysses: Ways to split tokens, by heads within attention (Jacobs et al. 2023, arXiv 2309.14509).
        ring: Ways to split tokens, with keys and values that go around (Liu et al. 2023, arXiv 2310.01889); multiplied by
            `ulysses`.
        batch: Ways to split samples, guidance included.
        tensor: Ways to split heads and features, and the weights of the layers before and behind them (Shoeybi et al. 2019,
            arXiv 1909.08053).
        rows: Ways to split images by their height: what operations read beyond a part is fetched, and norms share their
            statistics (Dryden et al. 2019, arXiv 1903.06681).
        split: Starts of tokens, or of rows, in the stead of those found: the name of a node, or of an argument, and a
            dimension.
        check: Whether the plan is run on pretended processes.

    Returns:
        The plan, for `parallelize`.

    Raises:
        SpecError: Ways are none, the model does not take the inputs, a node is not there, there are fewer tokens or samples
            than ways, or nothing can be split, with what is in the way.
        VerifyError: The plan proves wrong.
    """
    if not isinstance(gm, TracedModule):
        raise SpecError(f"parallel_plan takes a traced module, not {type(gm).__name__}: trace the model first")
    if any(isinstance(module, Collective) for module in gm.modules()):
        raise SpecError("this module is parallel already: make one plan with all degrees for the module that it was made from")
    ways = fill_degrees({"ulysses": ulysses, "ring": ring, "batch": batch, "tensor": tensor, "rows": rows})
    call = make_call(args, kwargs)
    gm = give_both_modes(gm) if math.prod(ways.values()) > 1 else gm
    modes = sorted(gm.graphs, key=lambda mode: mode != gm._graph_mode)
    try:
        return _plan(gm, modes, call, ways, split, check)
    except _Twin as error:
        plan = _plan(gm, modes[:1], call, ways, split, check)
        plan.written.twin_error = str(error)
        return plan


class _Twin(Exception):
    """Why the graph of the mode that is not in force has no plan."""


def _plan(gm: TracedModule, modes: list[bool], call: Any, ways: dict[str, int], split: Any, check: bool) -> Plan:
    plan, (args, kwargs) = Plan(ways, [], make_mark(gm), modes[0], gm, call, split, copy_graphs(gm)), call
    every = {**ways, SEQUENCE: ways["ulysses"] * ways["ring"]}
    for axis in ("batch", "rows", SEQUENCE, "tensor"):
        number = every[axis]
        if number == 1:
            continue
        found: dict[bool, ShardingPlan] = {}
        opens: frozenset[str] = frozenset()
        memory = Memory()  # what operations do is the same in both modes
        for mode in modes:
            try:
                with use_mode(mode, plan.written):
                    if axis == "tensor":
                        other = next(iter(found.values()), None)
                        opens, found[mode] = features.find(plan.written, mode, call, number, opens, other, memory)
                    else:
                        given = split if axis != "batch" else None
                        found[mode] = plan_axis(plan.written, mode, call, (axis, number), given, found, memory)
            except Unsplittable as error:
                if found:
                    raise _Twin(str(error)) from None
                text = f"nothing of this model can be split along '{axis}': {error}{_packed(plan.written)}"
                raise SpecError(text) from None
        stage = Stage(axis, found[modes[0]], found, opens)
        check_sizes(stage, number)
        plan.stages.append(stage)
        plan.written = write_axis(plan.written, stage, plan.ways, memory.traces)
    if check and plan.stages and has_values(list(gm.state_dict().values()), call):
        plan.away = check_pretended(plan.written, args, kwargs, modes=modes[:1])
        try:
            plan.away = max(plan.away, check_pretended(plan.written, args, kwargs, modes=modes[1:]))
        except VerifyError as error:
            raise _Twin(str(error)) from None
    return plan


def _packed(gm: TracedModule) -> str:
    """Return advice about a layer of torch.nn that is one operation of the graph, or ""."""
    calls = (str(node.target) for graph in gm.graphs.values() for node in graph.nodes if node.op == "call_module")
    for path in calls:
        if isinstance(layer := gm.get_submodule(path), PACKED):
            return (
                f". '{path}' is torch's {type(layer).__name__}: one operation of the graph, with a packed projection and a "
                "fast path of its own, which a plan cannot split; replace it by projections and "
                "F.scaled_dot_product_attention, with dropout as a separate layer"
            )
    return ""


def parallelize(gm: TracedModule, plan: Plan, mesh: DeviceMesh | None = None) -> TracedModule:
    """Write a plan into the graphs: the module runs on every process; `gm` is unchanged, weights are shared.

    `mesh` has the plan's axes by name; without one it is made of all processes of torch.distributed, if there are any, else at
    the first call. One graph serves every process. With one process along every axis it is the same graph again. Of weights
    that `tensor` splits, a process with a position keeps only its part, see `localize`.

    Args:
        gm: The module that the plan was made for.
        plan: The plan.
        mesh: A mesh that has the plan's axes by name; None makes one of all processes of torch.distributed, when there are
            some, else at the first call.

    Returns:
        The parallel module.

    Raises:
        SpecError: The plan is for another graph, or the mesh or number of processes does not fit.
    """
    gm = _written(gm, plan)
    if mesh is not None or (torch.distributed.is_available() and torch.distributed.is_initialized()):
        place(gm, find_position(plan.ways, mesh))
        if plan.ways["tensor"] > 1:
            localize(gm, mesh)
    else:
        place(gm, None)
    return gm


def _written(gm: TracedModule, plan: Plan) -> TracedModule:
    gm = give_both_modes(gm) if plan.stages else gm
    if plan.mark != make_mark(gm):
        raise SpecError("the plan is for another graph: make one for this module, after all passes are applied")
    for stage in plan.stages:
        gm = write_axis(gm, stage, plan.ways)
    if plan.stages:
        gm.twin_error = plan.written.twin_error
        gm.meta["plan"] = plan
    return gm


def list_costs(rows: Sequence[tuple[str, int, int]]) -> list[str]:
    """List the bytes that collectives send in a call, as lines of text."""
    calls, size = sum(row[1] for row in rows), sum(row[2] for row in rows)
    lines = (f"  {node}: {calls}, {size:,} bytes" for node, calls, size in rows)
    return [f"{calls} collectives of process 0 send {size:,} bytes per call:", *lines]


def list_node_costs(gm: TracedModule, mode: bool, args: Any, kwargs: Any) -> list[tuple[str, int, int]]:
    """Return node, calls and bytes sent of each collective in a call, in this real or simulated process."""
    with torch.no_grad(), use_mode(mode, gm):
        rows = list_senders(gm, gm.graphs[mode], copy_inputs(bind(gm, args, kwargs)))
    return [(node.name, len(numbers), sum(numbers)) for node, numbers in rows]


def list_senders(tree: nn.Module, graph: fx.Graph, inputs: Sequence[Any]) -> list[tuple[fx.Node, list[int]]]:
    """Return the nodes of a graph that send, with the bytes of each of their collectives."""
    found = []
    run = GraphRun(tree, graph, inputs, keep=False)
    for node in graph.nodes:
        with record_traffic() as numbers:
            run.step(node)
        if numbers:
            found.append((node, list(numbers)))
    return found
