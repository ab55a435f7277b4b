"""A denoiser whose calls compute only what depends on their latents: the rest is computed once, and kept while it is so."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...core.errors import GuardError, SpecError
from ...core.ir.calls import check_samples
from ...core.ir.containers import list_leaves, map_leaves
from ...core.ir.entry_checks import is_repeatable
from ...core.ir.graph import Graph
from ...core.ir.traced_module import TracedModule
from ...core.ir.variants import view
from ...core.locks import call_with_read_lock
from ...core.torch_internals.modules import is_listening
from ...step_cache.steps import Stepped, compile_graphs_only, disable_compile
from ..lowering import undo_lowering
from .cut import STEP, HoistStage, StageCut
from .groups import META, InputGroups
from .kept import Values, check_limit
from .listing import StageRow, format_stages, list_stages
from .planner import CallPlanner
from .plans import CallPlan, copy_memory, read_times
from .sameness import Call
from .schedules import RunSchedule, Times
from .weights import Offload, list_early

AROUND = (
    "a hoisted module decides on the host what it computes again, which a program compiled around it cannot: call its own "
    "compile(), which compiles each stage"
)


class HoistedModule(Stepped):
    """A model that computes once what is the same in many steps: what `lower(gm, hoist=...)` gives.

    It is called as `module` is, has the same parameters, buffers, adapters and attributes, and can take its place in a
    pipeline. Results are `torch.equal` to those of `module`. Its parts are traced modules on the same tensors: a stage for each
    set of groups of inputs that values need ("always", "conditions", "time", "conditions+time"), and the "step".

    A kept value is used only if all that it was computed from is the same: its inputs by their bits, its weights by identity,
    address and version, the choice of adapters by its numbers, and torch's modes. Anything else is computed. With gradients, in
    training, with hooks on layers that stages call, and where a mode of torch watches operations, nothing is kept and `module`
    itself is called. Call `reset()` after a write that counts no version of a weight up: through its `.data`, a tensor of the
    same memory that was made with `.data`, or numpy, and by a fused optimizer's kernel that was called directly, such as
    `torch._fused_adamw_`; `Optimizer.step` is seen. Call it, too, after functions or classes of torch were patched. Within one
    block of `torch.autocast` weights must not be written, of which it keeps casts.

    Of a module that is split over processes all that they exchange is of the step, so that each keeps values of its own.

    `counts` has how often each stage was computed. Several threads may call it.

    Raises SpecError where nothing can be hoisted.
    """

    def __init__(self, module: TracedModule, groups: InputGroups) -> None:
        super().__init__(module, None)
        self.groups = groups
        self._cut = StageCut(module.graphs.get(False, module.graph), module, groups.by_input)
        self._stages = {stage.name: stage for stage in self._cut.stages}
        self._times: Times = ()
        self._offload: Offload | None = None
        self._follows = META in module.meta  # a pipeline's run has noted its inputs
        self._is_followed = False  # whether weights leave by themselves
        self.obstacle = ""  # why nothing is kept of the last call, "" if all is
        self._planner = CallPlanner(module, groups, self._cut, self._bring_weights)
        self._guard, self.limits = self._planner.guard, self._planner.limits
        names = self._planner.names
        self._ports = {  # what a stage takes: inputs, with the names that calls give them, and values; and what it gives
            stage.name: (
                [(node.name, names[node.name]) for node in stage.nodes if node.op == "placeholder"],
                [value.name for value in stage.given],
                [node.name for node in stage.results],
            )
            for stage in self._cut.stages
        }
        self.counts = dict.fromkeys(self._stages, 0)
        self.reset()

    # --- the parts

    @property
    def used(self) -> tuple[str, ...]:
        """Names of the stages, the step last."""
        return tuple(self._stages)

    def graphs_of(self, name: str) -> dict[bool, Graph]:
        """Give the graph of a stage.

        Args:
            name: The stage, one of `used`.

        Returns:
            The graph for evaluation, as in training nothing is hoisted.
        """
        return {False: self._cut.write(self._stages[name])}

    @disable_compile
    def _made(self, name: str) -> TracedModule:
        part = view(self.module, self.graphs_of(name), None)
        part.meta = {**self.module.meta, "part": name}
        part.__dict__["training"] = False
        if self._options is not None:
            part.compile(**self._options)
        return part

    def train(self, mode: bool = True) -> HoistedModule:
        """Put the module into a mode; stages are for evaluation alone."""
        self.training = mode
        self.module.train(mode)
        return self

    def map_step(self, function: Callable[[TracedModule], TracedModule]) -> None:
        """Replace the step by `function(step)`, a lowering that keeps signature and result, such as outlining."""
        self._parts[STEP] = function(self._part(STEP))
        if self._options is not None:
            self._parts[STEP].compile(**self._options)

    # --- what is kept

    def reset(self) -> None:
        """Forget all that is kept: after weights were written through `.data`, which leaves no trace."""
        with self._guard:
            super().reset()
            self._planner.reset()
            self._schedule = RunSchedule()

    def _reset_stateful_cache(self, recurse: bool = True) -> None:
        """Keep all at the end of a pipeline's run: the next may have the same prompt."""

    def limit(self, conditions: int | None = None, times: int | None = None, bytes: int | None = None) -> HoistedModule:  # noqa: A002
        """Set how much is kept; what is None stays as it is. The oldest goes first.

        Args:
            conditions: How many sets of conditions, such as prompts; a step with guidance may have two. 8 at first.
            times: How many times, 256 at first.
            bytes: How many bytes, with the copies of conditions that calls are compared with. Not limited at first.

        Returns:
            This module.

        Raises:
            SpecError: A limit is no whole number of 1 or more.
        """
        given = {"conditions": conditions, "times": times, "bytes": bytes}
        checked = {name: check_limit(name, value) for name, value in given.items() if value is not None}
        with self._guard:
            for name, value in checked.items():
                setattr(self.limits, name, value)
            self.reset()
        return self

    # --- a call

    @torch.compiler.disable(recursive=False, reason=AROUND)  # type: ignore[no-untyped-call, untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step with the module's arguments. Raises SpecError in a program that is compiled around it."""
        if is_listening():
            raise SpecError(AROUND)
        return self.run_step(self._part(STEP), *args, **kwargs)

    def get_step(self) -> TracedModule:
        """Get the stage of what changes at every call."""
        return self._part(STEP)

    @compile_graphs_only
    def run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one call in which `step` is called in the last stage's place, with what that is given by name."""
        if self._before is not None:
            self._before(self.module, args, kwargs)
            self._before = None
        return call_with_read_lock(self._locks, self._run_step, step, args, kwargs)

    @compile_graphs_only
    def _run_step(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._locks:
            check_samples(self.module, args, kwargs)
        plan = self._plan(args, kwargs)
        self.obstacle = plan if isinstance(plan, str) else ""
        if isinstance(plan, str):
            return self._call_module(args, kwargs)
        try:
            if plan.is_kept and self._offload is None:
                with self._guard:
                    self.counts[STEP] += 1
            else:
                self._fill([plan])
            values = plan.values
            return step(*args, **kwargs, **{name: values[name] for name in self._ports[STEP][1]})
        except GuardError:  # another graph may be for such a call, or the whole module says why none is
            if not is_repeatable(self.module):
                raise
            return self._call_module(args, kwargs)

    def _call_module(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module itself, which reads all weights."""
        if self._offload is None:
            return self.module(*args, **kwargs)
        with self._guard:  # so that nobody sends them away meanwhile
            self._move_weights(self._offload.bring)
            if self._is_followed:  # so that they do not come and go in each step
                self._offload, self._schedule.is_over = None, True
            return self.module(*args, **kwargs)

    @disable_compile
    def _plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan | str:
        """Return what a call takes; why nothing is kept for it otherwise."""
        return "it is in training: call eval()" if self.training else self._planner.plan(args, kwargs)

    @compile_graphs_only
    def _fill(self, plans: list[CallPlan]) -> None:
        """Give plans the values of all stages but the step, and compute those that are not kept, stage after stage."""
        with self._guard:
            self._take(plans)

    @compile_graphs_only
    def _take(self, plans: list[CallPlan]) -> None:
        first, early, kept, away = plans[0], self._cut.stages[:-1], self._planner.kept, self._offload
        if len(plans) == 1 and not first.is_kept:  # all in one visit of the weights
            plans = [first, *self._planner.list_plans(first, self._find_times(first))]
            away = self._offload
        for stage in early if len(plans) > 1 or not first.is_kept else ():
            for plan in plans:
                key = plan.keys[stage.name]
                values = kept.find(key)
                if values is None:
                    if away is not None:
                        self._move_weights(partial(away.visit, stage.name))
                    values = self._compute(stage, plan)
                    kept.add(key, values, self.limits, self._planner.known)
                plan.values.update(values)
        if away is not None and away.here:
            self._move_weights(away.send)
        if len(plans) > 1 and any(key not in kept.rows for plan in plans for key in plan.keys.values()):
            self._schedule.is_over = True  # what was computed early is gone already
        self.counts[STEP] += 1

    @disable_compile
    def _find_times(self, plan: CallPlan) -> Times:
        """Find the times that a call which computes anything computes at once: those to come of the run of a pipeline that
        `rewrite_pipeline` made, for which weights leave until the next one, or those that are known where they have left."""
        found: Times = ()
        if self._follows and self.groups.time:
            given = {name: plan.call.values[name] for name in self.groups.time}
            found = self._schedule.find_times(given, self.limits.times, self.limits.conditions)
            if found and self._offload is None:
                self._offload, self._is_followed = Offload(list_early(self._cut), torch.device("cpu")), True
            elif not found and self._is_followed and self._offload is not None:
                self._move_weights(self._offload.bring)
                self._offload = None
        return found or (self._times if self._offload is not None else ())

    @compile_graphs_only
    def _compute(self, stage: HoistStage, plan: CallPlan) -> Values:
        call, sizes = plan.call, plan.form.sizes or {}
        inputs, given, results = self._ports[stage.name]
        taken = {name: call.values[of] for name, of in inputs}
        taken |= {name: sizes[name] if name in sizes else plan.values[name] for name in given}
        found = self._part(stage.name)(**taken)
        self.counts[stage.name] += 1
        return self._own(dict(zip(results, found, strict=True)), call)

    @disable_compile
    def _own(self, values: Values, call: Call) -> Values:
        """Copy results that lie in the memory of inputs, which their owner may write, or of a CUDA graph."""
        tensors = [leaf for leaf in list_leaves(list(call.values.values())) if isinstance(leaf, Tensor)]
        lent = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        replayed = (self._options or {}).get("mode") in ("reduce-overhead", "max-autotune")

        def own(tensor: Tensor, _: Any) -> Tensor:
            tensor = tensor.detach() if tensor.requires_grad else tensor
            return copy_memory(tensor) if replayed or tensor.untyped_storage().data_ptr() in lent else tensor

        return {name: own(x, ()) if isinstance(x, Tensor) else map_leaves(x, own) for name, x in values.items()}

    # --- all at once

    def prepare(self, *args: Any, times: Sequence[float] | Tensor | None = None, **kwargs: Any) -> HoistedModule:
        """Compute and keep what calls with these inputs need before their steps; of latents only shapes are read.

        Args:
            *args: The inputs of a call.
            times: All times of the run, as the model gets them, such as `scheduler.timesteps`: one visit of each weight then
                fills all stages, and `offload` knows when weights are needed again. None is the time of the call alone.
            **kwargs: Inputs of a call by name.

        Returns:
            This module.

        Raises:
            SpecError: Nothing is kept for such a call, or the model has no input for the time.
        """
        with torch.no_grad():
            call_with_read_lock(self._locks, self._prepare, args, kwargs, times)
        return self

    @compile_graphs_only
    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], times: Any) -> None:
        if times is not None and not self.groups.time:
            raise SpecError("prepare: the groups name no input for the time, so that there are no times to prepare")
        plan = self._plan(args, kwargs)
        if isinstance(plan, str):
            raise SpecError(f"prepare: nothing is kept of this call, because {plan}")
        with self._guard:
            plans = [plan]
            if times is not None:
                self._times = tuple(dict.fromkeys(self.groups.time, time) for time in read_times(times))
                plans = self._planner.list_plans(plan, self._times)
            if not plans:
                self._times = ()
                raise SpecError("prepare: the time is one tensor with an input of another group: give them as two")
            self._fill(plans)
            self.counts[STEP] -= 1

    # --- weights that leave

    def offload(self, device: str | torch.device | None = "cpu") -> HoistedModule:
        """Keep the weights that no step reads on another device while steps run; a stage that is computed fetches its own.

        A set of conditions that is new is computed for all times that `prepare` was given, so that each weight comes once a
        prompt. Call this module then, not the one that it was made from, which has the same weights.

        Args:
            device: Where they are meanwhile, "cpu"; None brings them back for good.

        Returns:
            This module.

        Raises:
            SpecError: The times of a run are not known, or the device is meta.
        """
        if device is not None and self.groups.time and not self._times:
            raise SpecError(
                "offload: the times of a run are not known, so that each step would fetch weights again: call "
                "prepare(..., times=scheduler.timesteps) before"
            )
        if device is not None and torch.device(device).type == "meta":
            raise SpecError("offload: the meta device keeps no values, and weights would be lost: give another, such as 'cpu'")
        with self._guard:
            self._bring_weights()
            self._offload = None if device is None else Offload(list_early(self._cut), torch.device(device))
            self._follows, self._is_followed = self._follows and device is not None, False  # None is for good
            if self._offload is not None:
                self._move_weights(self._offload.send)
        return self

    @property
    def device(self) -> torch.device:
        """Device that the model computes on, also while weights are away."""
        away = self._offload
        return next(iter(away.homes.values())) if away is not None and away.homes else self.module.device

    def _bring_weights(self) -> None:
        if self._offload is not None:
            self._move_weights(self._offload.bring)

    def _move_weights(self, move: Callable[[], Any]) -> None:
        """Move weights, which are the same afterwards: nothing is dropped for their new addresses."""
        fresh = self._planner.check_weights()
        move()
        if fresh:
            self._planner.watch.renew()

    def _apply(self, function: Any, recurse: bool = True) -> HoistedModule:
        away, follows, followed = self._offload, self._follows, self._is_followed
        self.offload(None)
        super()._apply(function, recurse)  # which waits for calls that wait for the guard
        self._follows = follows
        return self if away is None or followed else self.offload(away.device)

    # --- about it

    @property
    def stages(self) -> list[StageRow]:
        """Rows of what was hoisted, one for each stage: operations, weights of its own, FLOPs, bytes that are kept now."""
        return list_stages(self._cut, self._planner.places, self._planner.kept)

    @property
    def listing(self) -> str:
        """Text of what was hoisted: a line for each stage, and why nothing is kept of the last call, if it is so."""
        return format_stages(self.stages) + (f"nothing is kept of the last call: {self.obstacle}\n" if self.obstacle else "")

    def as_saved(self) -> TracedModule:
        """Return what a file has of this module: what it was made from, with the groups in its meta."""
        source = undo_lowering(self.module).copied()
        source.meta[META] = self.groups.as_data()
        return source

    def __deepcopy__(self, memo: dict[int, Any]) -> HoistedModule:
        new = memo[id(self)] = HoistedModule(copy.deepcopy(self.module, memo), self.groups)
        vars(new.limits).update(vars(self.limits))
        new.reset()
        return new

    def extra_repr(self) -> str:
        return ", ".join(f"{row.name}: {row.operations}" for row in self.stages) + " operations"
