"""A parallel module on pretended and on real processes, beside one: whether they agree, and the first node that does not."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from ..capture.frozen_values import copied
from ..errors import VerifyError
from ..ir.comparison import Difference, difference, distance, numbers, tolerance
from ..ir.pytree import leaves, map_leaves
from ..ir.traced_module import TracedModule
from ..rewriter.modes import in_mode
from ..verifier import Subject, is_split, need_values
from .plan import Plan, Runner
from .planning.streams import Leaf
from .planning.trials import EMPTY, leaves_of, name_of
from .planning.walk import bound, left_alone
from .runtime.collectives import Collective, Same, Sum
from .runtime.layouts import count, start
from .runtime.mesh import World
from .runtime.pretended import PRETENDED, placed, pretended
from .stage import alone

DRAWING = threading.Lock()


def ways_in(module: nn.Module) -> dict[str, int]:
    """The processes along each axis that a module is written for; none for one that is not parallel."""
    return next((dict(m.ways) for m in module.modules() if isinstance(m, Collective)), {})


def check_subject(subject: Subject) -> str:
    """The check of `verify`: on pretended processes and on real ones, each beside one; and one beside the module before."""
    gm, new, call = subject.gm, subject.new, subject.call
    need_values(new, call)
    ways = ways_in(new)
    found = f"{math.prod(ways.values())} pretended processes differ from one by {check_pretended(new, *call):.1e}"
    others = [entry for entry in subject.entries if not is_split(new, entry["name"])]
    if not ways_in(gm) and all(entry["neutral"] for entry in others):
        found += f", and one from the module before by {check_before(gm, new, *call):.1e}"
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() == math.prod(ways.values()):
        found += f"; real ones from pretended ones by {check_real(new, *call):.1e}"
    return found


def check_pretended(gm: TracedModule, args: Sequence[Any], kwargs: Mapping[str, Any], every: bool = False) -> float:
    """The largest difference of an output between one process and pretended ones, over the output's largest value.

    In each mode that has a graph. With `every` all values within the model are compared too. Raises VerifyError for one above
    what rounding may make of its dtype (`fxplug.ir.comparison`), which names the first node that differs.
    """
    worst = 0.0
    for mode in gm.graphs:
        one, many = _runs(gm, mode, args, kwargs, every)
        off = max(difference(one[0], out[0]) for out in many)
        if off.times > 1 and not every:
            one, many = _runs(gm, mode, args, kwargs, True)
        found = _first(gm, mode, one[1], [out[1] for out in many]) if every or off.times > 1 else ""
        if found or off.times > 1:
            raise VerifyError(f"pretended processes differ from one: an output by {off.distance:.1e}{found}")
        worst = max(worst, off.distance)
    return worst


def check_before(gm: TracedModule, new: TracedModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """The largest difference in evaluation between a module and the parallel one made of it, in one process.

    Raises VerifyError for one above what rounding may make of its dtype.
    """
    mode = False if False in gm.graphs else gm._graph_mode
    with pretending(alone()):
        found = _run(new, mode, args, kwargs, False)[0]
    want = _run(gm, mode, args, kwargs, False)[0]
    worst = difference(want, found)
    if worst.times > 1:
        raise VerifyError(f"one process differs from the module before: an output by {worst.distance:.1e}")
    return worst.distance


def check_real(gm: TracedModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """The largest difference of an output between a pretended process and the real one of its rank, for all ranks.

    Every process of torch.distributed calls it, and gets the same answer. Raises VerifyError, with the first node that differs
    and the process.
    """
    worst, first = Difference(), ""
    for mode in gm.graphs:
        known = _runs(gm, mode, args, kwargs, True)[1][dist.get_rank()]
        mine = _run(gm, mode, args, kwargs, True)
        worst = max(worst, difference(known[0], mine[0]))
        for name, value in known[1].items():
            off = difference(value, mine[1][name], within=True)
            if off.times > 1 and not first:
                first = f"; the first value that differs is '{name}', by {off.distance:.1e}"
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (worst, first))
    for process, (off, where) in enumerate(told):
        if where or off.times > 1:
            raise VerifyError(f"real process {process} differs from the pretended one: an output by {off.distance:.1e}{where}")
    return float(max(off.distance for off, _ in told))


@contextlib.contextmanager
def pretending(world: World) -> Iterator[None]:
    """Call modules as the process that stands there, in this thread."""
    token = PRETENDED.set(world)
    try:
        yield
    finally:
        PRETENDED.reset(token)


def _runs(gm: TracedModule, mode: bool, args: Any, kwargs: Any, keep: bool) -> tuple[Any, list[Any]]:
    """What one process gives, and each of the pretended ones: outputs, and what the nodes give."""
    with pretending(alone()):
        one = _told(lambda: _run(gm, mode, args, kwargs, keep))
    with _left_alone(gm, mode):
        return one, _told(lambda: pretended(ways_in(gm), lambda rank: _run(gm, mode, args, kwargs, keep, apart=False)))


def _told(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # what an operation makes of wrong parts may be anything
        text, _, rest = str(error).partition("While executing")
        where = f", at '{rest.split('=')[0].strip(' %:').partition(' ')[0]}'" if rest else ""
        raise VerifyError(
            f"the plan is not right for this model: {type(error).__name__}: {text.strip()[:300]}{where}"
        ) from error


@contextlib.contextmanager
def _left_alone(gm: TracedModule, mode: bool) -> Iterator[None]:
    with left_alone(gm), in_mode(mode, gm) if len(gm.graphs) == 2 else contextlib.nullcontext():
        yield


def _run(
    gm: TracedModule, mode: bool, args: Any, kwargs: Any, keep: bool, apart: bool = True
) -> tuple[Any, dict[str, Any]]:
    """What a graph gives as the process that this one is or pretends to be, and with `keep` what its nodes give."""
    kept: dict[str, Any] = {}

    def each(node: fx.Node, call: Callable[[], Any]) -> Any:
        drawn = any(_calls(gm, user, Same) for user in node.users) and not _calls(gm, node, Same)
        if drawn:  # the threads share the generators
            with DRAWING, torch.random.fork_rng(devices=[]):
                torch.manual_seed(len(node.name))
                value = call()
        else:
            value = call()
        if name_of(node) in EMPTY:  # what is not written yet is the same everywhere
            value = value.zero_()
        if keep and node.op != "output":
            kept[node.name] = map_leaves(value, lambda t, _: t.clone())
        return value

    with torch.no_grad(), _left_alone(gm, mode) if apart else contextlib.nullcontext():
        return Runner(gm, mode, each).run(*copied(bound(gm, args, kwargs))), kept


def _first(gm: TracedModule, mode: bool, one: Mapping[str, Any], many: Sequence[Mapping[str, Any]]) -> str:
    """The first value that the processes do not have as the plan says; of a module that was loaded, not together."""
    plan: Plan | None = gm.meta.get("plan")
    lies = _lies(plan, mode) if plan is not None else {}
    for node in gm.graphs[mode].nodes:
        if node.name not in one or (node.users and all(_calls(gm, user, Sum) for user in node.users)):
            continue  # summands are as they are
        values = [leaves(found[node.name]) for found in many]
        for index, whole in enumerate(leaves(one[node.name])):
            parts = [found[index] for found in values if index < len(found)]
            off = _together(whole, parts)
            for rank, part in enumerate(parts):
                if plan is not None and node.name in lies and off.times <= 1:
                    off = max(off, _lying(plan, mode, whole, part, [row[index] for row in lies[node.name]], rank))
            if off.times > 1:
                return f"; the first value that differs is '{node.name}', by {off.distance:.1e}"
    return ""


def _lies(plan: Plan, mode: bool) -> dict[str, list[list[Any]]]:
    """How the tensors of each value lie along each axis of a plan, by the name of the node in the written graph."""
    found: dict[str, list[list[Any]]] = {}
    for depth, stage in enumerate(plan.stages):
        here = stage.modes[mode]
        for node, value in here.values.items():
            given = node in here.births or here.cut(node)  # what stands there is the whole
            rows = [None if given or not isinstance(leaf, Leaf) else leaf.place for leaf in leaves_of(value)]
            name = here.name(node)
            if not depth or node.name in found:  # else it is a collective of an axis before
                found[name] = [*found.get(node.name, []), rows]
    return {name: rows for name, rows in found.items() if len(rows) == len(plan.stages)}


def _lying(plan: Plan, mode: bool, whole: Any, part: Any, places: Sequence[Any], rank: int) -> Difference:
    """How far the part of a process is from what the plan says it has."""
    world = placed(plan.ways, rank)
    dims = [place.dim for place in places if place is not None]
    if not dims or len(set(dims)) < len(dims) or not isinstance(whole, Tensor):
        return Difference()
    for stage, place in zip(plan.stages, places, strict=True):
        if place is not None:
            here, each = world.ranks[stage.axis], world.sizes[stage.axis]
            bounds = [(start(n, here, each), count(n, here, each), n) for n in stage.modes[mode].sizes]
            whole = whole.index_select(place.dim, place.layout.rows(bounds).to(whole.device))
    return difference(whole, part, within=True)


def _calls(gm: TracedModule, node: fx.Node, kind: type[Collective]) -> bool:
    return node.op == "call_module" and type(gm.get_submodule(str(node.target))) is kind


def _together(whole: Any, parts: Sequence[Any]) -> Difference:
    """How far what the processes have is from the whole: each has all of it, or together they have each number as often.

    Which part is whose does not matter here: what a node makes of parts in a wrong order differs.
    """
    if not isinstance(whole, Tensor) or not all(isinstance(part, Tensor) for part in parts) or not whole.numel():
        return Difference()  # a number that hangs on sizes
    if all(part.shape == whole.shape for part in parts):
        return max(difference(whole, part, within=True) for part in parts)
    held = torch.cat([numbers(part) for part in parts])
    wanted = numbers(whole)
    if len(held) % len(wanted):
        return Difference()  # parts that overlap
    off = distance(wanted.repeat(len(held) // len(wanted)).sort().values, held.sort().values)
    return Difference(off / tolerance(whole, within=True), off)
