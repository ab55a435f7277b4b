"""A parallel module on pretended and on real processes, beside one: whether they agree, and the first node that does not."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from ..core.errors import VerifyError
from ..core.ir.comparison import (
    RESULT,
    WITHIN,
    Difference,
    Outcome,
    copy_inputs,
    detach,
    get_numbers,
    measure_difference,
    measure_distance,
)
from ..core.ir.containers import list_leaves
from ..core.ir.traced_module import TracedModule, strip_to_container
from ..core.rewriter.probe import GraphRun
from ..core.verifier import Subject, is_split, need_values
from .planning.trials import EMPTY, get_name
from .planning.walk import bind
from .runtime.collectives import AllReduce, Broadcast, Collective
from .runtime.mesh import MeshPosition
from .runtime.pretended import PRETENDED, run_simulated
from .runtime.shares import Once
from .stage import make_single_position, use_mode

DRAWING = threading.Lock()


def get_degrees(module: nn.Module) -> dict[str, int]:
    """Return the number of processes along each axis that a module is written for; empty for one that is not parallel."""
    return next((dict(m.ways) for m in module.modules() if isinstance(m, Collective)), {})


def check_subject(subject: Subject) -> str:
    """Check a parallel module, as a check of `verify`: simulated and real processes against one, and one against the module
    before."""
    gm, new, call = subject.gm, subject.new, subject.call
    need_values(new, call)
    ways = get_degrees(new)
    found = f"{math.prod(ways.values())} simulated processes differ from one by {check_pretended(new, *call):.1e}"
    others = [entry for entry in subject.entries if not is_split(new, entry["name"])]
    if not get_degrees(gm) and all(entry["neutral"] for entry in others):
        found += f", and one from the module before by {check_before(gm, new, *call):.1e}"
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() == math.prod(ways.values()):
        found += f"; real ones from simulated ones by {check_real(new, *call):.1e}"
    return found


def check_pretended(
    gm: TracedModule, args: Sequence[Any], kwargs: Mapping[str, Any], every: bool = False,
    modes: Iterable[bool] | None = None,
) -> float:  # fmt: skip
    """Compare one process with simulated ones and return the largest difference of an output, relative to its largest value.

    Runs each mode that has a graph, or these `modes`. With `every` all values within the model are compared too; of sharded
    values, the numbers that the processes have together. Raises VerifyError for an output that differs by more than rounding
    explains for the dtypes it was computed in (`fxplug.core.ir.comparison`), with the first such value.
    """
    worst = 0.0
    for mode in gm.graphs if modes is None else modes:
        one, many = _results(gm, mode, args, kwargs, every)
        off = max(one.difference(found, RESULT) for found in many)
        where = ""
        if every or off.times > 1:
            if not every:
                one, many = _results(gm, mode, args, kwargs, True)
            where = _first(gm, mode, one, many)
        if where or off.times > 1:
            raise VerifyError(f"the plan is wrong for this model: an output differs by {off.distance:.1e}{where}")
        worst = max(worst, off.distance)
    return worst


def check_before(gm: TracedModule, new: TracedModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Return the largest difference in evaluation between a module and the parallel one made of it, in one process.

    Raises VerifyError if it is more than rounding in its dtype allows.
    """
    mode = False if False in gm.graphs else gm._graph_mode
    with simulate_rank(make_single_position()):
        found = _result(new, mode, args, kwargs)
    worst = _result(gm, mode, args, kwargs).difference(found, RESULT)
    if worst.times > 1:
        raise VerifyError(f"one process differs from the module before the plan: an output by {worst.distance:.1e}")
    return worst.distance


def check_real(gm: TracedModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Return the largest difference of an output between a simulated process and the real one of its rank, for all ranks.

    Every process of torch.distributed calls it, and gets the same answer. Raises VerifyError, with the first node that differs
    and the process.
    """
    worst, first = Difference(), ""
    for mode in gm.graphs:
        known = _results(gm, mode, args, kwargs, True)[1][dist.get_rank()]
        mine = _result(gm, mode, args, kwargs, True)
        worst = max(worst, known.difference(mine, RESULT))
        for name, value in known.state.items():
            off = measure_difference(value, mine.state[name], WITHIN, known.dtypes)
            if off.times > 1 and not first:
                first = f"; the first value that differs is '{name}', by {off.distance:.1e}"
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (worst, first))
    for process, (off, where) in enumerate(told):
        if where or off.times > 1:
            raise VerifyError(f"real process {process} differs from the simulated one: an output by {off.distance:.1e}{where}")
    return float(max(off.distance for off, _ in told))


@contextlib.contextmanager
def simulate_rank(world: MeshPosition) -> Iterator[None]:
    """Call modules as the process at a position of the mesh, in this thread."""
    token = PRETENDED.set(world)
    try:
        yield
    finally:
        PRETENDED.reset(token)


def _results(gm: TracedModule, mode: bool, args: Any, kwargs: Any, keep: bool) -> tuple[Outcome, list[Outcome]]:
    """Return the result of one process, and those of the simulated ones; with `keep` their states are the values of all
    nodes."""
    try:
        with simulate_rank(make_single_position()):
            one = _result(gm, mode, args, kwargs, keep)
        with use_mode(mode, gm):
            return one, run_simulated(get_degrees(gm), lambda rank: _run(gm, mode, args, kwargs, keep))
    except Exception as error:  # what an operation makes of wrong parts may be anything
        where = ", ".join(["", *getattr(error, "__notes__", [])[:1]])
        raise VerifyError(
            f"the plan is wrong for this model: {type(error).__name__}: {str(error).strip()[:300]}{where}"
        ) from error


def _result(gm: TracedModule, mode: bool, args: Any, kwargs: Any, keep: bool = False) -> Outcome:
    """Return the result of a graph in this real or simulated process; the module's state is restored."""
    with use_mode(mode, gm):
        return _run(gm, mode, args, kwargs, keep)


def _run(gm: TracedModule, mode: bool, args: Any, kwargs: Any, keep: bool) -> Outcome:
    found, tree = Outcome(), strip_to_container(gm)
    for module in tree.modules():  # threads that pretend to be processes write buffers of their own
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.detach().clone()

    with torch.no_grad():
        run = GraphRun(tree, gm.graphs[mode], copy_inputs(bind(gm, args, kwargs)), keep=False)
        for node in run.graph.nodes:
            if any(_calls(gm, user, Broadcast) for user in node.users) and not _calls(gm, node, Broadcast):
                with DRAWING, torch.random.fork_rng(devices=[]):  # the threads share the generators
                    torch.manual_seed(len(node.name))
                    value = run.step(node)
            else:
                value = run.step(node)
            if get_name(node) in EMPTY:  # what is not written yet is the same everywhere
                value.zero_()
            tensors = [leaf for leaf in list_leaves(value) if isinstance(leaf, Tensor)]
            found.dtypes.update(tensor.dtype for tensor in tensors if tensor.is_floating_point())
            if node.op == "output":
                found.out = value
            elif keep:
                found.state[node.name] = detach(value)
    return found


def _first(gm: TracedModule, mode: bool, one: Outcome, many: Sequence[Outcome]) -> str:
    """Name the first value whose numbers the processes do not have together."""
    for node in gm.graphs[mode].nodes:
        summand = _calls(gm, node, Once) or (node.users and all(_calls(gm, user, AllReduce) for user in node.users))
        if node.name not in one.state or summand:
            continue
        values = [list_leaves(found.state[node.name]) for found in many]
        for index, whole in enumerate(list_leaves(one.state[node.name])):
            parts = [found[index] for found in values if index < len(found)]
            off = _together(whole, parts, one.dtypes)
            if off.times > 1:
                return f"; the first value that differs is '{node.name}', by {off.distance:.1e}"
    return ""


def _calls(gm: TracedModule, node: fx.Node, kind: type[Collective]) -> bool:
    return node.op == "call_module" and isinstance(gm.get_submodule(str(node.target)), kind)


def _together(whole: Any, parts: Sequence[Any], dtypes: set[torch.dtype]) -> Difference:
    """Return the distance of the processes' values from the whole: each has all of it, or together they have each number
    equally often.

    The order of the parts does not matter here: a later node differs if it is wrong.
    """
    if not isinstance(whole, Tensor) or not all(isinstance(part, Tensor) for part in parts) or not whole.numel():
        return Difference()  # a number that hangs on sizes
    if all(part.shape == whole.shape for part in parts):
        return max(measure_difference(whole, part, WITHIN, dtypes) for part in parts)
    held = torch.cat([get_numbers(part) for part in parts])
    wanted = get_numbers(whole)
    if len(held) % len(wanted):
        return Difference()  # parts that overlap
    off = measure_distance(wanted.repeat(len(held) // len(wanted)).sort().values, held.sort().values)
    return Difference(off / WITHIN.shares(whole, dtypes)[0], off)
