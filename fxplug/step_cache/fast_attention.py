"""A model whose attentions are computed in cheaper ways from step to step, and the search for which of them may be."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..core.errors import SpecError, did_you_mean, quote
from ..core.ir.containers import list_leaves
from ..core.ir.graph import Graph
from ..core.ir.traced_module import TracedModule
from .attention_forms import METHODS, Do, find_places, write_attention
from .cache import find_largest, measure_change
from .steps import Stepped, StepRun, compile_graphs_only, disable_compile

FULL = ("full", "full half")


class FastAttention(Stepped):
    """A model whose attentions, marked by the pass `ditfastattn`, are computed as a schedule says (DiTFastAttn, 2406.08552).

    The schedule has a row for each step, {path of the attention: method}; what it does not name is computed in full:

        step         the output of the step before (AST); nothing of the attention is computed
        window       in a window, plus what that left out in the last full step (WA-RS)
        full half    for one half of the batch, which the other half takes (ASC); `side` says which, 0 or 1
        window half  both

    The first step of a run is in full. Each step that is different is a graph of its own, in which what it takes from earlier
    steps is an input and what it gives to later ones an output: `part(index)`. `with fast.calibrating(threshold)` writes the
    schedule for what runs meanwhile. It takes the module's place in a pipeline as a `StepCache` does, with the same `clock`.

    Raises SpecError for a module without marks, and for a schedule that it cannot follow.
    """

    def __init__(
        self,
        module: TracedModule,
        schedule: Sequence[Mapping[str, str]] = (),
        *,
        side: int = 1,
        clock: str | None = "timestep",
    ) -> None:
        super().__init__(module, clock)
        if side not in (0, 1):
            raise SpecError(f"side must be 0 or 1, not {quote(side)}")
        self.side = side
        self._rows: dict[str, dict[str, Do]] = {}  # of parts
        self.places = find_places(module.graph, module)
        self.schedule = [self._checked(index, row) for index, row in enumerate(schedule)]
        self._limit: float | None = None
        self._halves = True
        self._kept: set[str] = set()  # parts that a search leaves
        self.reset()

    def _checked(self, index: int, row: Mapping[str, str]) -> dict[str, str]:
        where = f"schedule, step {index}"
        for key, method in row.items():
            if key not in self.places:
                raise SpecError(f"{where}: '{key}' is not marked{did_you_mean(key, self.places)}")
            if method not in METHODS:
                raise SpecError(f"{where}: '{key}': no method {quote(method)}: there are {', '.join(METHODS)}")
            if index == 0 and method not in FULL:
                raise SpecError(f"{where}: '{key}': the first step must be full, because nothing is stored yet")
            if method.startswith("window") and not self.places[key].windowed:
                raise SpecError(f"{where}: '{key}' has no self-attention without a mask")
        return {key: method for key, method in row.items() if method != "full"}

    # --- the parts

    def row(self, index: int) -> dict[str, Do]:
        """Give what each place does in a step.

        Args:
            index: The number of the step.

        Returns:
            By place its method, and what it keeps for later steps.
        """
        return {key: self._do(index, key) for key in self.places}

    def _method(self, index: int, key: str) -> str:
        return self.schedule[index].get(key, "full") if index < len(self.schedule) else "full"

    def _do(self, index: int, key: str, method: str | None = None) -> Do:
        method = method or self._method(index, key)
        later = [self._method(i, key) for i in range(index + 1, len(self.schedule))]
        full = next((i for i, m in enumerate(later) if m in FULL), len(later))
        residual = method in FULL and any(m.startswith("window") for m in later[:full])
        return Do(method, residual, bool(later) and later[0] == "step" and method != "step")

    def part(self, index: int) -> TracedModule:
        """Give the graph of a step: (*args, **kwargs, what it takes) -> (result, {name: what later ones take}).

        Args:
            index: The number of the step.

        Returns:
            A module that computes it, on the same weights.
        """
        return self._of(self.row(index))

    def _of(self, row: Mapping[str, Do]) -> TracedModule:
        name = "; ".join(f"{key}: {', '.join(map(str, do))}" for key, do in row.items())
        self._rows[name] = dict(row)
        return self._part(name)

    def graphs_of(self, name: str) -> dict[bool, Graph]:
        """Give the graphs of a part.

        Args:
            name: The part, as `part` has named it.

        Returns:
            A graph for training (True) and evaluation (False), as the module has them.
        """
        rows, graphs = self._rows[name], self.module.graphs
        return {mode: write_attention(graph, self.module, rows, self.side) for mode, graph in graphs.items()}

    @property
    def used(self) -> tuple[str, ...]:
        for index in range(len(self.schedule) + 1):
            self.part(index)
        return tuple(self._parts)

    # --- a run

    @compile_graphs_only
    def _step(self, *args: Any, **kwargs: Any) -> Any:
        number, shapes, stream = self._advance(args, kwargs)
        if stream is None:
            stream = self._streams[number] = StepRun({}, 0, shapes, self._changes())
        row = self.row(stream.index)
        if stream.changes != self._changes():  # what is kept is of other adapters
            stream.kept.clear()
            stream.changes = self._changes()
            row = {key: self._do(stream.index, key, "full") for key in self.places}
        if self._limit is not None:
            row = self._choose_methods(stream, args, kwargs)
        return self._run(stream, row, args, kwargs, keep=True)

    def _run(self, stream: StepRun, row: Mapping[str, Do], args: Any, kwargs: Any, keep: bool = False) -> Any:
        part = self._of(row)
        names = {str(n.target) for n in part.graph.nodes if n.op == "placeholder"}
        taken = {k: v for k, v in stream.kept.items() if k in names}
        result, given = part(*args, **kwargs, **taken)
        if keep:
            stream.kept.update(self._owned(given))
            stream.index += 1
        return result

    @disable_compile
    def _choose_methods(self, stream: StepRun, args: Any, kwargs: Any) -> dict[str, Do]:
        """Return the cheapest methods of a step that preserve its result, region after region; all values for later steps are
        returned."""
        assert self._limit is not None
        index = stream.index
        self.schedule += [dict.fromkeys(self.places, METHODS[0]) for _ in range(index + 1 - len(self.schedule))]
        best = self.schedule[index]  # another call at this time, or another run, may have asked for more
        row = {key: Do("full") for key in self.places}
        raw = _values(self._run(stream, row, args, kwargs)) if index else ()
        for number, (key, place) in enumerate(self.places.items()):
            limit = self._limit * (number + 1) / len(self.places)
            for method in METHODS[METHODS.index(best.get(key, "full")) :]:
                row[key] = Do(method)
                tried = method != "full" and index and self._may(method, place)
                if method == "full" or (tried and self._away(stream, row, args, kwargs, raw) < limit):
                    best[key] = method
                    break
        for name in [name for name in self._parts if name not in self._kept]:
            del self._parts[name], self._rows[name]
        return {k: Do(m, m in FULL and self.places[k].windowed, m != "step") for k, (m, *_) in row.items()}

    def _may(self, method: str, place: Any) -> bool:
        return (place.windowed or not method.startswith("window")) and (self._halves or not method.endswith("half"))

    def _away(self, stream: StepRun, row: Mapping[str, Do], args: Any, kwargs: Any, raw: Any) -> float:
        return find_largest(self._summed(measure_change(_values(self._run(stream, row, args, kwargs)), raw)))

    @contextlib.contextmanager
    def calibrating(self, threshold: float, *, halves: bool = True) -> Iterator[FastAttention]:
        """Write the schedule for what runs within: of each step, place after place, the cheapest method that is close enough.

        The result of a step with it, and with those chosen before, is compared with that of all places in full. With several
        calls at one time, or several runs, a method must do for all.

        Args:
            threshold: The relative L1 change of the result must be below this, times the share of the places that have been
                gone through, as in the paper.
            halves: False leaves out the methods that share between halves of a batch, for batches that have none.

        Yields:
            This object.
        """
        self.schedule, self._limit, self._halves, self._kept = [], float(threshold), halves, set(self._parts)
        self.reset()
        try:
            yield self
        finally:
            self._limit = None
            self.reset()
            self.schedule = [{k: m for k, m in row.items() if m != "full"} for row in self.schedule]

    def __deepcopy__(self, memo: dict[int, Any]) -> FastAttention:
        return FastAttention(copy.deepcopy(self.module, memo), self.schedule, side=self.side, clock=self._clock.name)

    def extra_repr(self) -> str:
        counts = Counter(self._method(i, key) for i in range(len(self.schedule)) for key in self.places)
        return f"{len(self.places)} attentions, {len(self.schedule)} steps: " + ", ".join(f"{n} {m}" for m, n in counts.items())


def _values(result: Any) -> tuple[Tensor, ...]:
    return tuple(x.detach() for x in list_leaves(result) if isinstance(x, Tensor) and x.is_floating_point())
