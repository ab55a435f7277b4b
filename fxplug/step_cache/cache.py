"""Step caches: a model whose steps take what passes have marked from earlier steps, and the policies that say when."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.errors import SpecError
from ..core.ir.containers import list_leaves
from ..core.ir.graph import Graph
from ..core.ir.traced_module import TracedModule
from .policies import Every, Policy, Step, Threshold
from .slices import Slices
from .steps import Stepped, StepRun, compile_graphs_only, disable_compile, find_device

GAUGED = ("first", "rest", "short")  # the parts of a gauged policy


@dataclass
class _RunCache(StepRun):
    """What is remembered of one run: of its last full step, and from `since` on of those after it."""

    gauges: tuple[Tensor, ...]
    before: tuple[Tensor, ...]  # the gauges of the last step
    result: tuple[Tensor, ...]  # the model's, while changes are measured
    moves: tuple[float, ...] = ()
    since: int = 0


class StepCache(Stepped):
    """A model whose steps take from earlier steps what a pass such as `deepcache` or `first_block_cache` has marked.

    It is called as `module` is, has the same parameters, buffers and attributes, and can take its place in a pipeline. In its
    parts, which are traced modules on the same modules and tensors, what is kept is an explicit input or output:

        full(*args, **kwargs)            -> (result, {name: kept})
        shallow(*args, **kwargs, **kept) -> result
        first(*args, **kwargs)           -> (gauges, {name: carried})
        rest(**carried)                  -> (result, {name: kept})
        short(**carried, **kept)         -> result

    `policy(Step(...))` says before each step whether it is computed in full: any function, `Every`, `Threshold`, `TeaCache`.
    One that is `gauged` is asked between `first` and the others, for which the module must have a gauge. The default is
    `Threshold()` where there is one, else `Every()`.

    `clock` names the input that says where in a run a call is, and is read on the host. A run begins where the time goes back,
    with `reset()`, and where a pipeline of diffusers begins one, which is seen by its scheduler's schedule. Calls at one time
    (conditional and unconditional ones, up to 8) are told apart by their conditions. A call takes nothing from earlier ones
    whose conditions were others, or whose sample its own does not come from, and is computed in full then: so is the first
    one after a change of adapters, and one with other shapes. With None every call is the next step until `reset()`. One
    thread at a time calls it; others may change its adapters meanwhile.

    Of a module that `parallelize` has written each process has a cache of its own, and they decide as one: a gauge is measured
    over all parts, and a step is computed in full everywhere if it has to be anywhere.

    Of what `lower(hoist=...)` gives the step is cached: values that the step takes from what is kept are no inputs of its parts
    that say where a run begins. A call for which nothing is kept there, as with gradients, is computed in full.

    Raises SpecError for a module that has no marks, marks that cut nothing off, and an unknown clock.
    """

    def __init__(
        self, module: TracedModule | Stepped, policy: Policy | None = None, *, clock: str | None = "timestep"
    ) -> None:
        source = module if isinstance(module, Stepped) else None
        step: TracedModule = module.get_step() if isinstance(module, Stepped) else module
        super().__init__(step, clock, None if source is None else source.module)
        # no submodules: they hold what `module` holds
        self.__dict__.update({"_source": source, "module": step if source is None else source.module})
        taken = {str(node.target) for node in step.graph.nodes if node.op == "placeholder"}
        self._given = taken - set(self._clock.names)  # what a source hands the step
        self._cuts = {mode: Slices(graph, step) for mode, graph in step.graphs.items()}
        gauged = all(cut.gauges for cut in self._cuts.values())
        self.policy: Policy = policy if policy is not None else Threshold() if gauged else Every()
        if self.gauged:
            self._check_gauges()
        for name in self.used:
            self._part(name)
        self.counts = {"full": 0, "shallow": 0}
        self._measures: list[tuple[float, float]] | None = None
        self.reset()

    # --- the parts

    @property
    def full(self) -> TracedModule:
        """Part that computes a whole step and returns the cached values."""
        return self._part("full")

    @property
    def shallow(self) -> TracedModule:
        """Part that computes a step from the values that an earlier one cached."""
        return self._part("shallow")

    @property
    def first(self) -> TracedModule:
        """Part that computes the gauges, and the values for the parts after it."""
        return self._part("first")

    @property
    def rest(self) -> TracedModule:
        """Part after `first` that computes the rest of a whole step and returns the cached values."""
        return self._part("rest")

    @property
    def short(self) -> TracedModule:
        """Part after `first` that computes the rest of a step from the values that an earlier one cached."""
        return self._part("short")

    def graphs_of(self, name: str) -> dict[bool, Graph]:
        """Give the graphs of a part.

        Args:
            name: The part, one of "full", "shallow", "first", "rest" and "short".

        Returns:
            A graph for training (True) and evaluation (False), as the module has them.

        Raises:
            SpecError: The policy needs a gauge, and no pass has marked one.
        """
        if name in GAUGED:
            self._check_gauges()
        return {mode: getattr(cut, name)() for mode, cut in self._cuts.items()}

    def _check_gauges(self) -> None:
        if not all(cut.gauges and cut.early for cut in self._cuts.values()):
            raise SpecError(
                "the policy needs a gauge, and no pass has marked one: apply first_block_cache or teacache, or use a policy "
                "such as Every(3)"
            )

    @property
    def gauged(self) -> bool:
        """Return whether the policy decides after the first part, on the gauge's value."""
        return bool(getattr(self.policy, "gauged", False))

    @property
    def used(self) -> tuple[str, ...]:
        """Names of the parts that the policy runs."""
        return GAUGED if self.gauged else ("full", "shallow")

    # --- a run

    @contextlib.contextmanager
    def measured(self) -> Iterator[list[tuple[float, float]]]:
        """Compute every step in full inside the context; yield a list of how much gauge and result changed from step to step.

        Both are relative L1 changes, of the gauge and of all floating-point tensors of the result; `TeaCache.fitted` takes
        them. Raises SpecError for a policy that goes by no gauge.
        """
        if not self.gauged:
            raise SpecError(f"{self.policy} does not use a gauge: measure with a policy that does, such as TeaCache()")
        self.reset()
        found: list[tuple[float, float]] = []
        self._measures = found
        try:
            yield found
        finally:
            self._measures = None
            self.reset()

    @compile_graphs_only
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step.

        Args:
            *args: The positional arguments of the module.
            **kwargs: Its keyword arguments.

        Returns:
            The module's result.
        """
        if self._source is None:
            return super().forward(*args, **kwargs)
        return self._source.run_step(self._run_step_or_reset, *args, **kwargs)

    @compile_graphs_only
    def _run_step_or_reset(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._step(*args, **kwargs)
        except BaseException:  # what a step has kept that was broken off is no step's
            self.reset()
            raise

    @compile_graphs_only
    def _step(self, *args: Any, **kwargs: Any) -> Any:
        number, shapes, old = self._advance(args, kwargs, self._given)
        gauges: tuple[Tensor, ...] = ()
        if self.gauged:
            gauges, carried = self.first(*args, **kwargs)
            if self._in_full(old, gauges, args, kwargs):
                result, kept = self.rest(**carried)
                return self._store(number, old, kept, gauges, shapes, result)
            out = self.short(**carried, **self._start_partial_step(old, gauges))
        elif self._in_full(old, gauges, args, kwargs):
            result, kept = self.full(*args, **kwargs)
            return self._store(number, old, kept, gauges, shapes, result)
        else:
            out = self.shallow(*args, **kwargs, **self._start_partial_step(old, gauges))
        return out

    @disable_compile
    def _in_full(self, old: _RunCache | None, gauges: tuple[Tensor, ...], *call: Any) -> bool:
        if old is not None and old.changes != self._changes():
            old = None
        wanted = old is None or (not self.gauged and bool(self.policy(Step(old.index, old.since))))
        if self._everywhere is None and (wanted or not self.gauged):
            return wanted
        row = [torch.tensor(float(wanted), device=find_device(gauges, call))]
        row += measure_change(gauges, gauges if old is None else old.gauges)
        row += measure_change(gauges, gauges if old is None else old.before)
        forced, *amounts = self._summed(row)
        if forced or old is None or not self.gauged:
            return bool(forced)
        change, move = (find_largest(half) for half in (amounts[: len(amounts) // 2], amounts[len(amounts) // 2 :]))
        old.moves += (move,)
        return self._measures is not None or bool(self.policy(Step(old.index, old.since, change, old.moves)))

    @disable_compile
    def _store(
        self,
        number: int,
        old: _RunCache | None,
        kept: Mapping[str, Tensor],
        gauges: tuple[Tensor, ...],
        shapes: tuple[Any, ...],
        result: Any,
    ) -> Any:
        self.counts["full"] += 1
        own = tuple(self._owned(dict(enumerate(gauges))).values())
        given: tuple[Tensor, ...] = ()
        if self._measures is not None:
            given = tuple(x.detach().clone() for x in list_leaves(result) if isinstance(x, Tensor) and x.is_floating_point())
            if old is not None and old.moves and old.result:
                self._measures.append((old.moves[-1], find_largest(self._summed(measure_change(given, old.result)))))
        index = 1 if old is None else old.index + 1
        self._streams[number] = _RunCache(self._owned(kept), index, shapes, self._changes(), own, own, given)
        return result

    @disable_compile
    def _start_partial_step(self, old: _RunCache | None, gauges: tuple[Tensor, ...]) -> dict[str, Tensor]:
        assert old is not None
        self.counts["shallow"] += 1
        old.before = tuple(self._owned(dict(enumerate(gauges))).values())
        old.index, old.since = old.index + 1, old.since + 1
        return old.kept

    def compile(self, **options: Any) -> None:
        """Compile each part; the choice between them stays on the host.

        Args:
            **options: Options of `torch.compile`; `fullgraph` is True by default.
        """
        if self._source is not None:
            self._source.compile(**options)
        super().compile(**options)

    def train(self, mode: bool = True) -> StepCache:
        """Set the mode of the module and all parts.

        Args:
            mode: Whether it is that of training.

        Returns:
            The module.
        """
        if self._source is None:
            return super().train(mode)
        self.training = mode
        self._source.train(mode)  # whose step is for evaluation alone
        return self

    def _apply(self, function: Any, recurse: bool = True) -> StepCache:
        if self._source is None:
            return super()._apply(function, recurse)
        self._source._apply(function, recurse)
        self.reset()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> StepCache:
        return StepCache(copy.deepcopy(self._source or self.module, memo), self.policy, clock=self._clock.name)

    def extra_repr(self) -> str:
        cut = next(iter(self._cuts.values()))
        return f"{self.policy}, shallow: {cut.operations(cut.later)} of {cut.operations(cut.flow.nodes)} operations"


def measure_change(now: Iterable[Tensor], then: Iterable[Tensor]) -> list[Tensor]:
    """Return, for each tensor, the L1 distance to an earlier one and the L1 norm of that: float32 sums, which can be added."""
    pairs = zip(now, then, strict=True)
    return [x.float().abs().sum() for a, b in pairs for x in (a.float() - b.float(), b)]


def find_largest(amounts: list[float]) -> float:
    """Return the largest relative L1 change."""
    found = [a / b if b else math.inf if a else math.nan for a, b in zip(amounts[::2], amounts[1::2], strict=True)]
    return math.nan if any(map(math.isnan, found)) else max(found)
