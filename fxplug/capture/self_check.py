"""A trace checks itself: the graph runs beside the model on the example inputs, twice, and nothing may differ."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import GuardError, TraceError
from ..ir.containers import Container
from ..ir.pytree import leaves, map_leaves
from ..ir.traced_module import TracedModule
from ..torch_internals.fakes import FakeTensor
from ..torch_internals.tensors import memory_id
from .fake_tensors import fake
from .frozen_values import alike, copied, difference, frozen, same_tensors
from .isolation import (
    SETTINGS,
    process_settings,
    random_state,
    restored,
    same_random_state,
    set_process_settings,
    set_random_state,
)
from .line_watch import writer
from .memory_journal import Journal, storage_of
from .one_at_a_time import undone
from .python_state import Place, State
from .recorder import Recording

UNCHECKED = "or take the graph as it is: trace(..., check=False)"


def has_values(weights: list[torch.Tensor], call: Any) -> bool:
    """Whether weights and inputs are there to run a model, and not only their shapes."""
    tensors = [*weights, *(x for x in leaves(call) if isinstance(x, torch.Tensor))]
    return not any(t.is_meta or isinstance(t, FakeTensor) for t in tensors)


def check(model: nn.Module, gm: TracedModule, call: Any, state: State) -> None:
    """Run model and graph twice, each from the same state and random numbers, in the mode that both are in; once is enough
    for a model that keeps nothing.

    The second call has other floating-point inputs, where graph and model take them. Outputs, inputs, buffers, random
    generators and settings of torch must be the same after each call, and what else the model keeps must not matter to
    its next call. Weights are shared; inputs and buffers are copied. `state` is what the model holds, in this mode.

    Raises TraceError with what differs.
    """
    grad = torch.is_grad_enabled()
    with undone() as stack:
        stack.enter_context(torch.inference_mode(False))  # which enables gradients
        stack.enter_context(torch.set_grad_enabled(grad))
        # modules that the graph keeps whole are copies, and may keep things as well
        whole = State(*_whole(gm))
        stack.enter_context(restored(state))
        stack.enter_context(restored(whole))
        # what autograd saves is let go at once; a model that differentiates in its forward needs it. A guard may hold
        # what the inputs are to what they were.
        ways = [(_Pair.one_call_is_enough, True, True)]
        ways += [(_Pair.compared, lean, other) for lean in (True, False) for other in (True, False)]
        for way, lean, other in ways:
            pair = _Pair(model, gm, call, state, whole, lean, other)
            try:
                if way(pair):
                    return
            finally:
                pair.rewind()


def _whole(gm: TracedModule) -> list[nn.Module]:
    """The modules that are kept whole and are none of torch's: their code may keep things from call to call."""
    return [m for m in gm.modules() if not type(m).__module__.startswith(("torch.", "fxplug."))]


def check_kept(
    model: nn.Module,
    call: Any,
    state: State,
    written: list[Place],
    recording: Recording,
    leaves: set[str],
    stand_in: Callable[[], AbstractContextManager[object]],
) -> None:
    """For a model without values, whose recorded run has `written` places of `state`: refuse what its next call would find.

    The model runs again on fake tensors, from what the first run left and from the start: what Python code keeps must
    come out the same. `stand_in` puts fake weights into the model. Raises TraceError.
    """
    own = recording.parameters
    places = [p for p in written if id(p.now()) not in own and not any(_within(p, leaf) for leaf in leaves)]
    if not places or recording.mode is None:
        return
    mode, device = recording.mode, recording.device

    def again() -> None:
        args, kwargs = map_leaves(call, lambda t, _: fake(t, mode, device if t.is_meta else t.device))
        with contextlib.suppress(Exception):  # what the first run left may be of use to nobody
            model(*args, **kwargs)

    again()
    values = [_content(place) for place in places]
    state.restore()
    state.lend()
    with stand_in():
        again()
        kept = [place for place, value in zip(places, values, strict=True) if not alike(_content(place), value)]
        if kept:
            state.restore()
            state.lend()
            with stand_in():
                raise TraceError(_text_of_kept(kept[0], writer(again, kept)))


def _within(place: Place, leaf: str) -> bool:
    root = place.root()
    return isinstance(root, str) and f"{root.strip(chr(39))}.".startswith(f"{leaf}.")


class _Outcome(NamedTuple):
    """What one call gave and left behind."""

    out: Any
    facts: list[Any]
    error: Exception | None
    inputs: Any
    buffers: dict[str, torch.Tensor]
    memory: dict[int, torch.UntypedStorage]
    draws: tuple[Any, ...]
    settings: list[Any]


class _Pair:
    """A model and its graph, called from one state."""

    def __init__(
        self, model: nn.Module, gm: TracedModule, call: Any, state: State, whole: State, lean: bool, other: bool
    ) -> None:
        self.model, self.gm, self.state, self.whole, self.lean, self.other = model, gm, state, whole, lean, other
        self.example = call
        self.tables = {id(m._buffers): (f"{path}." if path else "", m) for path, m in model.named_modules()}
        self.start = random_state(), process_settings()
        self.journal = Journal()

    # --- runs

    def call(self, module: nn.Module, step: int) -> _Outcome:
        """Call one of the two on copies of the inputs; those of the second step are others."""
        args, kwargs = inputs = copied(self.example, self.other and step == 1)
        given = [t for t in leaves(inputs) if isinstance(t, torch.Tensor)]
        lean = self.lean and torch.is_grad_enabled()
        hooks = torch.autograd.graph.saved_tensors_hooks(_let_go, _gone) if lean else contextlib.nullcontext()
        out: Any = None
        error: Exception | None = None
        try:
            with self.journal, hooks:
                out = module(*args, **kwargs)
        except Exception as raised:  # the model's, compared with the graph's
            error = raised
        facts = _facts(given, out)
        with torch.no_grad():
            out, inputs = map_leaves(out, _kept), map_leaves(inputs, _kept)
            buffers = {name: _kept(b, ()) for name, b in module.named_buffers(remove_duplicate=False)}
        return _Outcome(out, facts, error, inputs, buffers, self.journal.now(), random_state(), process_settings())

    def rewind(self, to: _Outcome | None = None) -> None:
        """Put everything back to before the first call; or to after one, but for what Python code keeps."""
        draws, settings = self.start if to is None else (to.draws, to.settings)
        self.journal.put_back(None if to is None else to.memory)
        for state in (self.state, self.whole):
            state.restore()
            state.lend()
            state.restore_tensors()
        set_random_state(draws)
        set_process_settings(settings)

    # --- comparing

    def one_call_is_enough(self) -> bool:
        """Whether model and graph give the same for the other inputs, and the model keeps nothing for a next call."""
        theirs = self.call(self.model, 1)
        if theirs.error or theirs.memory or self.state.opaque or self.whole.opaque or self.state.changes():
            return False
        self.rewind()
        ours = self.call(self.gm, 1)
        return not ours.error and not ours.memory and self.unlike(theirs, ours, []) is None

    def compared(self) -> bool:
        """Whether the two could be compared. Raises TraceError where they differ."""
        first = self.call(self.model, 0)
        if self.lean and first.error:
            return False
        second = self.call(self.model, 1)
        if second.error and not first.error and (self.lean or self.other):
            return False
        theirs = [first, second]
        places = [place for place in self.state.changes() if not self.is_in_leaf(place)]
        values = [_content(place) for place in places]
        self.rewind()
        ours = [self.call(self.gm, 0), self.call(self.gm, 1)]
        if self.other and not ours[0].error and isinstance(ours[1].error, GuardError):
            return False
        self.rewind()
        found = next(((step, text) for step in (0, 1) if (text := self.unlike(theirs[step], ours[step], places))), None)
        if places and not first.error and not second.error:
            self.refuse_kept(first, second, ours, places, values)
        if found:
            self.refuse(*found, theirs, ours)
        return True

    def unlike(self, a: _Outcome, b: _Outcome, places: list[Place]) -> str | None:
        """What the graph's call gave or left otherwise than the model's."""
        if a.error or b.error:
            if a.error and b.error:
                return None  # neither takes these inputs
            text = f"{type(a.error or b.error).__name__}: {a.error or b.error}"
            if a.error:
                return f"the model fails where the graph does not: {text}"
            return f"the graph fails where the model does not: {text}"
        if problem := difference(a.out, b.out):
            return f"the output differs: {problem}"
        if problem := difference(a.inputs, b.inputs):
            return f"the inputs are left otherwise: {problem}"
        for (name, mine), (_, other) in zip(a.facts, b.facts, strict=True):
            if mine != other:
                return f"the output has other {name}: {other} instead of {mine}"
        anew = {self.buffer(place) for place in places}
        for name, value in a.buffers.items():
            if name not in anew and name in b.buffers and not alike(value, b.buffers[name]):
                return f"the buffer '{name}' is left otherwise: {difference(value, b.buffers[name])}"
        if problem := self.memory(a, b):
            return problem
        # another thread draws from the same generators, at other times
        if threading.active_count() == 1 and not same_random_state(a.draws, b.draws):
            return "the random generators are left otherwise: the graph draws more numbers than the model, or fewer"
        for (name, _, _), mine, other in zip(SETTINGS, a.settings, b.settings, strict=True):
            if mine != other and name != "gradients":  # a graph gives them back also where the model leaves them switched
                return f"{name} is left as {other}, not as {mine}"
        return None

    def memory(self, a: _Outcome, b: _Outcome) -> str | None:
        """Which tensor that the model holds was written otherwise."""
        if len(self.journal.kept) == 0:
            return None
        for held in self.state.tensors.values():
            storage = None if held.is_buffer() else storage_of(held.alias)
            if storage is None or memory_id(storage) not in self.journal.kept:
                continue
            before = self.journal.kept[memory_id(storage)][1]
            mine, other = a.memory.get(memory_id(storage), before), b.memory.get(memory_id(storage), before)
            if mine is not other and not torch.equal(_bytes(mine), _bytes(other)):
                return f"the tensor {held} is left otherwise"
        return None

    def buffer(self, place: Place) -> str | None:
        """The name of a buffer that was assigned anew."""
        table = self.tables.get(id(place.owner))
        return None if table is None or place.key is None else f"{table[0]}{place.key}"

    def is_in_leaf(self, place: Place) -> bool:
        """Whether a module holds a place that is kept whole: the graph calls it, and it keeps what it keeps."""
        root = place.root()
        if not isinstance(root, str) or not root.startswith("'"):
            return False
        try:
            return not isinstance(self.gm.get_submodule(root.strip("'")), Container)
        except AttributeError:
            return False

    # --- what the model keeps from call to call

    def refuse_kept(
        self, first: _Outcome, second: _Outcome, ours: list[_Outcome], places: list[Place], values: list[Any]
    ) -> None:
        """Refuse a model whose second call leaves other things behind when it does not find what the first one left."""
        recorded = {}
        for place in places:
            name = self.buffer(place)
            calls = zip((first, second), ours, strict=True)
            if name in first.buffers and all(alike(m.buffers.get(name), o.buffers.get(name)) for m, o in calls):
                recorded[id(place.owner), place.key] = first.buffers[name]
        rest = [(p, v) for p, v in zip(places, values, strict=True) if (id(p.owner), p.key) not in recorded]
        if not rest:
            return
        self.rewind(first)
        for place in places:
            if (id(place.owner), place.key) in recorded:
                place.owner[place.key] = recorded[id(place.owner), place.key].clone()
        third = self.call(self.model, 1)
        kept = [place for place, value in rest if not alike(_content(place), value)]
        if not kept and not third.error and difference(second.out, third.out):
            kept = [place for place, _ in rest]
        self.rewind()
        if kept:
            where = writer(lambda: self.call(self.model, 0), kept)
            self.rewind()
            raise TraceError(_text_of_kept(kept[0], where))

    # --- words

    def refuse(self, step: int, text: str, theirs: list[_Outcome], ours: list[_Outcome]) -> None:
        """Say what differs, after finding out whether the model is the same as itself."""
        name = type(self.model).__name__
        again = [self.call(self.model, 0), self.call(self.model, 1)][step]
        self.rewind()
        if not theirs[step].error and not again.error and (own := difference(theirs[step].out, again.out)):
            if _close(theirs[step].out, again.out) and _close(theirs[step].out, ours[step].out):
                return  # sums in another order each time
            raise TraceError(
                f"{name} is not a function of its inputs, weights, buffers and torch's random numbers: called twice from the "
                f"same state its outputs differ ({own}); it may read a clock, an id, a file or a generator of its own. Keep "
                f"the module that does so whole: leaf: [its path], {UNCHECKED}"
            )
        mode = "training" if self.model.training else "evaluation"
        error = ours[step].error
        raise TraceError(
            f"the graph of {name} is not the model, in {mode} at the {('first', 'second')[step]} call with the example inputs"
            f"{', of other values' if step and self.other else ''}: {text}. Something reaches the result without being "
            f"recorded. Keep the module that does so whole: leaf: [its path], {UNCHECKED}"
        ) from error


def _content(place: Place) -> Any:
    now = place.now()
    # a hook has another key each time
    return frozen(list(now.values()) if place.key is None and isinstance(now, dict) else now)


def _text_of_kept(place: Place, where: str) -> str:
    root = place.root()
    path = root.strip("'") if isinstance(root, str) and root.startswith("'") else ""
    return (
        f"forward keeps {place} for its next call{where}, and a graph cannot: keep a tensor in a buffer "
        "(register_buffer) and write it there, which is recorded, or keep the module whole: "
        f"leaf: [{path or 'its path'}], {UNCHECKED}"
    )


def _facts(given: list[torch.Tensor], out: Any) -> list[Any]:
    """What values do not show of a result: strides, gradients, and which tensors share memory."""
    tensors = [x for x in leaves(out) if isinstance(x, torch.Tensor)]
    strided = [t.stride() if t.layout is torch.strided else None for t in tensors]
    gradients = [t.requires_grad for t in tensors]
    first: dict[int, int] = {}
    shared = []
    for index, tensor in enumerate([*given, *tensors]):
        storage = storage_of(tensor)
        shared.append(index if storage is None else first.setdefault(memory_id(storage), index))
    return [("strides", strided), ("gradients", gradients), ("tensors that share memory", shared)]


def _kept(tensor: torch.Tensor, _: Any) -> torch.Tensor:
    return tensor.detach().clone()


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _close(a: Any, b: Any) -> bool:
    """Whether two results differ by no more than rounding, where a device adds up in another order each time."""
    pairs = [(x, y) for x, y in zip(leaves(a), leaves(b), strict=True) if isinstance(x, torch.Tensor)]
    return all(same_tensors(x, y) or (x.device.type != "cpu" and _rounded(x, y)) for x, y in pairs)


def _rounded(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or not a.dtype.is_floating_point:
        return False
    return torch.allclose(a, b, rtol=torch.finfo(a.dtype).eps ** 0.5, equal_nan=True)


def _let_go(tensor: torch.Tensor) -> None:
    return None


def _gone(_: None) -> torch.Tensor:
    raise RuntimeError("what autograd saved was let go")
