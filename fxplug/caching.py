"""Step caches: a model whose steps take what passes have marked from earlier steps, and the policies that say when."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from .errors import SpecError, did_you_mean
from .module import TracedModule, shell
from .slicing import Slices
from .structure import leaves
from .turns import during, turns_of

TABLES = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")
GAUGED = ("first", "rest", "short")  # the parts of a gauged policy
AT_ONCE = 8  # so many calls at one time are told apart
F = TypeVar("F", bound=Callable[..., Any])


def _eager(function: F) -> F:
    """What is decided on the host stays there when somebody compiles the whole."""
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call, no-any-return]


def _between(function: F) -> F:
    """The same for a function that calls graphs, which are then compiled one by one."""
    return torch.compiler.disable(function, recursive=False)  # type: ignore[no-untyped-call, no-any-return]



# --- when a step is computed in full


@dataclass(frozen=True)
class Step:
    """What a policy decides on: the number of the step in its run, how many steps since the last full one were not full, and
    for a gauged policy by how much the gauge differs from that of the last full step (mean |now - then| / mean |then|)."""

    index: int
    since: int
    change: float = math.nan


class Policy(Protocol):
    """Whether a step is computed in full. One that reads `step.change` has an attribute `gauged` that is True.

    It goes by the step alone: where several processes run one model, each asks its own and must be told the same.
    """

    def __call__(self, step: Step, /) -> bool: ...


@dataclass(frozen=True)
class Every:
    """Every `interval`-th step in full, as in DeepCache; the first `start` steps too."""

    interval: int = 3
    start: int = 1

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise SpecError(f"the interval must be 1 or more, not {self.interval}")

    def __call__(self, step: Step) -> bool:
        return step.index < self.start or step.since + 1 >= self.interval


@dataclass(frozen=True)
class Threshold:
    """A step in full when the gauge has changed by `limit` or more since the last full one, or after `at_most` others."""

    limit: float = 0.1
    at_most: int | None = None
    gauged: ClassVar[bool] = True

    def __call__(self, step: Step) -> bool:
        return not step.change < self.limit or (self.at_most is not None and step.since >= self.at_most)


# --- the module that runs


@dataclass
class _Stream:
    """What is remembered of one run."""

    kept: dict[str, Tensor]
    gauges: tuple[Tensor, ...]
    index: int
    since: int
    shapes: tuple[Any, ...]
    changes: int


class StepCache(nn.Module):
    """A model whose steps take from earlier steps what a pass such as `deepcache` or `first_block_cache` has marked.

    It is called as `module` is, has the same parameters, buffers and attributes, and can take its place in a pipeline. In its
    parts, which are traced modules on the same modules and tensors, what is kept is an explicit input or output:

        full(*args, **kwargs)            -> (result, {name: kept})
        shallow(*args, **kwargs, **kept) -> result
        first(*args, **kwargs)           -> (gauges, {name: carried})
        rest(**carried)                  -> (result, {name: kept})
        short(**carried, **kept)         -> result

    `policy(Step(...))` says before each step whether it is computed in full: any function, `Every` or `Threshold`. One that
    is `gauged` is asked between `first` and the others, for which the module must have a gauge. The default is
    `Threshold()` where there is one, else `Every()`.

    `clock` names the input that says where in a run a call is: as long as it moves in one direction the run goes on, when it
    goes back a new one begins, and calls at one time (conditional and unconditional ones, up to 8) are kept apart. It is
    read on the host. With None every call is the next step until `reset()`; call that too when a run was broken off. A call
    with other shapes begins a run, and the first one after a change of adapters is computed in full. One thread at a time
    calls it; others may change its adapters meanwhile.

    Of a module that `parallelize` has written each process has a cache of its own, and they decide as one: a gauge is measured
    over all parts, and a step is computed in full everywhere if it has to be anywhere.

    Raises SpecError for a module that has no marks, marks that cut nothing off, and an unknown clock.
    """

    def __init__(self, module: TracedModule, policy: Policy | None = None, *, clock: str | None = "timestep") -> None:
        super().__init__()
        if not isinstance(module, TracedModule):
            raise SpecError(f"a step cache takes a traced module, not {type(module).__name__}: fxplug.trace makes one")
        self.__dict__.update({table: vars(module)[table] for table in TABLES}, module=module)
        self.training = module.training
        self._cuts = {mode: Slices(graph, module) for mode, graph in module.graphs.items()}
        gauged = all(cut.gauges for cut in self._cuts.values())
        self.policy: Policy = policy if policy is not None else Threshold() if gauged else Every()
        if self.gauged:
            self._check_gauges()
        self._position = self._of_clock(clock)
        self._clock = clock
        self._options: dict[str, Any] | None = None
        self._turns = turns_of(module)
        collectives: list[Any] = [m for m in module.modules() if hasattr(m, "everywhere")]
        self._everywhere: Callable[[Tensor], Tensor] | None = collectives[0].everywhere if collectives else None
        self._parts: dict[str, TracedModule] = {}  # no submodules: they hold what `module` holds
        for name in self.used:
            self._part(name)
        self.counts = {"full": 0, "shallow": 0}
        self.reset()

    # --- the parts

    @property
    def full(self) -> TracedModule:
        return self._part("full")

    @property
    def shallow(self) -> TracedModule:
        return self._part("shallow")

    @property
    def first(self) -> TracedModule:
        return self._part("first")

    @property
    def rest(self) -> TracedModule:
        return self._part("rest")

    @property
    def short(self) -> TracedModule:
        return self._part("short")

    def _part(self, name: str) -> TracedModule:
        if name not in self._parts:
            self._parts[name] = self._made(name)
        return self._parts[name]

    @_eager
    def _made(self, name: str) -> TracedModule:
        if name in GAUGED:
            self._check_gauges()
        module = self.module
        graphs = {mode: getattr(cut, name)() for mode, cut in self._cuts.items()}
        part = TracedModule(shell(module), graphs, module._origin, module._extras)
        for table in TABLES:
            part.__dict__[table] = vars(module)[table]  # what moves or changes one of them does so for all
        part.twin_error = module.twin_error
        part.meta = {**module.meta, "part": name}
        if self._options is not None:
            part.compile(**self._options)
        return part

    def _check_gauges(self) -> None:
        if not all(cut.gauges and cut.early for cut in self._cuts.values()):
            raise SpecError("no pass has marked a gauge to decide by: first_block_cache does; or take a policy as Every(3)")

    @property
    def gauged(self) -> bool:
        """Whether the policy is asked behind the first part, for what the gauge says."""
        return bool(getattr(self.policy, "gauged", False))

    @property
    def used(self) -> tuple[str, ...]:
        """The names of the parts that the policy runs."""
        return GAUGED if self.gauged else ("full", "shallow")

    def map(self, function: Callable[[TracedModule], Any]) -> None:
        """Put `function(part)` in the place of each part that is used, such as a lowering that keeps signature and result."""
        for name in self.used:
            self._parts[name] = function(self._part(name))

    def compile(self, **options: Any) -> None:
        """Compile each part, by default with fullgraph=True; the choice between them stays on the host."""
        self._options = {"fullgraph": True, **options}
        for name in self.used:
            self._part(name).compile(**self._options)

    # --- a run

    def reset(self) -> None:
        """Forget what was kept: the next call begins a run."""
        self._streams: dict[int, _Stream] = {}
        self._time: float | None = None
        self._direction = 0.0
        self._number = 0

    @_between
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return during(self._turns, self._step, *args, **kwargs)

    @_between
    def _step(self, *args: Any, **kwargs: Any) -> Any:
        number, shapes = self._advance(args, kwargs), _shapes(args, kwargs)
        old = self._streams.get(number)
        if old is not None and old.shapes != shapes:
            old = None
        gauges: tuple[Tensor, ...] = ()
        if self.gauged:
            gauges, carried = self.first(*args, **kwargs)
            if self._in_full(old, gauges, args, kwargs):
                result, kept = self.rest(**carried)
                return self._store(number, old, kept, gauges, shapes, result)
            out = self.short(**carried, **self._taken(old))
        elif self._in_full(old, gauges, args, kwargs):
            result, kept = self.full(*args, **kwargs)
            return self._store(number, old, kept, gauges, shapes, result)
        else:
            out = self.shallow(*args, **kwargs, **self._taken(old))
        return out

    @_eager
    def _in_full(self, old: _Stream | None, gauges: tuple[Tensor, ...], *call: Any) -> bool:
        if old is not None and old.changes != self._changes():
            old = None
        wanted = old is None or (not self.gauged and bool(self.policy(Step(old.index, old.since))))
        if wanted and self._everywhere is None:
            return True
        row = _row(wanted, gauges, gauges if old is None else old.gauges, call)
        if self._everywhere is not None:
            row = self._everywhere(row).sum(0)
        if row[0] or old is None or not self.gauged:
            return bool(row[0])
        change = float((row[1::2] / row[2::2]).max())
        return bool(self.policy(Step(old.index, old.since, change)))

    @_eager
    def _store(
        self,
        number: int,
        old: _Stream | None,
        kept: Mapping[str, Tensor],
        gauges: tuple[Tensor, ...],
        shapes: tuple[Any, ...],
        result: Any,
    ) -> Any:
        self.counts["full"] += 1
        own = self._owned(dict(enumerate(gauges))).values()
        index = 1 if old is None else old.index + 1
        self._streams[number] = _Stream(self._owned(kept), tuple(own), index, 0, shapes, self._changes())
        return result

    def _changes(self) -> int:
        return sum(turns.changes for turns in self._turns)

    @_eager
    def _taken(self, old: _Stream | None) -> dict[str, Tensor]:
        assert old is not None
        self.counts["shallow"] += 1
        old.index, old.since = old.index + 1, old.since + 1
        return old.kept

    def _owned(self, values: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """Values without their history; those of a CUDA graph as copies, as its next run writes over them."""
        replayed = (self._options or {}).get("mode") in ("reduce-overhead", "max-autotune")
        return {k: v.detach().clone() if replayed else v.detach() for k, v in values.items()}

    @_eager
    def _advance(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Which of the calls at one time this is; a new time is a new step, one that goes back a new run."""
        if self._clock is None:
            return 0
        value = args[self._position] if len(args) > self._position else kwargs.get(self._clock)
        if value is None:
            raise SpecError(f"the call has no '{self._clock}', which tells this step cache where a run begins")
        now = float(value.flatten()[0]) if isinstance(value, Tensor) else float(value)
        before, self._time = self._time, now
        if before is None or now == before:
            self._number = 0 if before is None else (self._number + 1) % AT_ONCE
            return self._number
        moved = math.copysign(1.0, now - before)
        if self._direction and moved != self._direction:
            self.reset()
            self._time = now
            return 0
        self._direction, self._number = moved, 0
        return 0

    def _of_clock(self, clock: str | None) -> int:
        names = [str(n.target) for n in self.module.graph.nodes if n.op == "placeholder"]
        if clock is not None and clock not in names:
            raise SpecError(
                f"the model has no input '{clock}' that says where in a run a call is{did_you_mean(clock, names)}: give "
                f"clock=..., one of {', '.join(names)}, or clock=None and call reset() before each run"
            )
        return -1 if clock is None else names.index(clock)

    # --- it stands for the module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "module" not in self.__dict__:
                raise
        return getattr(self.module, name)

    def __getitem__(self, key: int | str) -> nn.Module:
        return self.module[key]  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> StepCache:
        return StepCache(copy.deepcopy(self.module, memo), self.policy, clock=self._clock)

    def train(self, mode: bool = True) -> StepCache:
        self.training = mode
        self.module.train(mode)
        for part in self._parts.values():
            part.train(mode)
        return self

    def _apply(self, function: Any, recurse: bool = True) -> StepCache:
        self.module._apply(function, recurse)
        self.reset()
        return self

    def extra_repr(self) -> str:
        cut = next(iter(self._cuts.values()))
        return f"{self.policy}, shallow: {cut.operations(cut.later)} of {cut.operations(cut.flow.nodes)} operations"


@_eager
def _shapes(*call: Any) -> tuple[Any, ...]:
    return tuple((x.shape, x.dtype, x.device) for x in leaves(call) if isinstance(x, Tensor))


def _row(wanted: bool, now: Iterable[Tensor], then: Iterable[Tensor], call: Any) -> Tensor:
    """What a decision hangs on, in sums over a process's part: whether a full step is wanted in any case, and of each gauge by
    how much it differs from what it was, and how much that was; float32."""
    device = next((x.device for x in leaves(call) if isinstance(x, Tensor)), None)
    row = [torch.tensor(float(wanted), device=device)]
    for a, b in zip(now, then, strict=True):
        row += [(a.float() - b.float()).abs().sum(), b.float().abs().sum()]
    return torch.stack(row)
