"""Step caches: a model whose steps take what passes have marked from earlier steps, and the policies that say when."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .errors import SpecError, did_you_mean
from .module import TracedModule, shell
from .policies import Every, Policy, Step, Threshold
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


# --- the module that runs


@dataclass
class _Stream:
    """What is remembered of one run: of its last full step, and from `since` on of those after it."""

    kept: dict[str, Tensor]
    gauges: tuple[Tensor, ...]
    before: tuple[Tensor, ...]  # the gauges of the last step
    result: tuple[Tensor, ...]  # the model's, while changes are measured
    moves: tuple[float, ...]
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

    `policy(Step(...))` says before each step whether it is computed in full: any function, `Every`, `Threshold`, `TeaCache`.
    One that is `gauged` is asked between `first` and the others, for which the module must have a gauge. The default is
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
        self._measures: list[tuple[float, float]] | None = None
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
            raise SpecError(
                "no pass has marked a gauge to decide by: first_block_cache and teacache do; or take a policy as Every(3)"
            )

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

    @contextlib.contextmanager
    def measured(self) -> Iterator[list[tuple[float, float]]]:
        """Compute every step in full within; yields a list that gets how much gauge and result changed from step to step.

        Both are relative L1 changes, of the gauge and of all floating-point tensors of the result; `TeaCache.fitted` takes
        them. Raises SpecError for a policy that goes by no gauge.
        """
        if not self.gauged:
            raise SpecError(f"{self.policy} goes by no gauge: measure with one that does, such as TeaCache()")
        self.reset()
        found: list[tuple[float, float]] = []
        self._measures = found
        try:
            yield found
        finally:
            self._measures = None
            self.reset()

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
            out = self.short(**carried, **self._taken(old, gauges))
        elif self._in_full(old, gauges, args, kwargs):
            result, kept = self.full(*args, **kwargs)
            return self._store(number, old, kept, gauges, shapes, result)
        else:
            out = self.shallow(*args, **kwargs, **self._taken(old, gauges))
        return out

    @_eager
    def _in_full(self, old: _Stream | None, gauges: tuple[Tensor, ...], *call: Any) -> bool:
        if old is not None and old.changes != self._changes():
            old = None
        wanted = old is None or (not self.gauged and bool(self.policy(Step(old.index, old.since))))
        if wanted and self._everywhere is None:
            return True
        row = [torch.tensor(float(wanted), device=_device(gauges, call))]
        row += _differ(gauges, gauges if old is None else old.gauges) + _differ(gauges, gauges if old is None else old.before)
        forced, *amounts = self._summed(row)
        if forced or old is None or not self.gauged:
            return bool(forced)
        change, move = (_largest(half) for half in (amounts[: len(amounts) // 2], amounts[len(amounts) // 2 :]))
        old.moves += (move,)
        return self._measures is not None or bool(self.policy(Step(old.index, old.since, change, old.moves)))

    def _summed(self, row: list[Tensor]) -> list[float]:
        """Numbers of all processes' parts together."""
        if self._everywhere is None:
            return torch.stack(row).tolist()
        return self._everywhere(torch.stack(row)).sum(0).tolist()

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
        own = tuple(self._owned(dict(enumerate(gauges))).values())
        given: tuple[Tensor, ...] = ()
        if self._measures is not None:
            given = tuple(x.detach().clone() for x in leaves(result) if isinstance(x, Tensor) and x.is_floating_point())
            if old is not None and old.moves and old.result:
                self._measures.append((old.moves[-1], _largest(self._summed(_differ(given, old.result)))))
        index = 1 if old is None else old.index + 1
        self._streams[number] = _Stream(self._owned(kept), own, own, given, (), index, 0, shapes, self._changes())
        return result

    def _changes(self) -> int:
        return sum(turns.changes for turns in self._turns)

    @_eager
    def _taken(self, old: _Stream | None, gauges: tuple[Tensor, ...]) -> dict[str, Tensor]:
        assert old is not None
        self.counts["shallow"] += 1
        old.before = tuple(self._owned(dict(enumerate(gauges))).values())
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


def _device(*values: Any) -> torch.device | None:
    return next((x.device for x in leaves(values) if isinstance(x, Tensor)), None)


def _differ(now: Iterable[Tensor], then: Iterable[Tensor]) -> list[Tensor]:
    """Of each tensor by how much it differs from an earlier one, and how much that was: sums, float32, which add up."""
    pairs = zip(now, then, strict=True)
    return [x.float().abs().sum() for a, b in pairs for x in (a.float() - b.float(), b)]


def _largest(amounts: list[float]) -> float:
    """The largest relative L1 change."""
    found = [a / b if b else math.inf if a else math.nan for a, b in zip(amounts[::2], amounts[1::2], strict=True)]
    return math.nan if any(map(math.isnan, found)) else max(found)
