"""A trace checks itself: the graph runs beside the model on the example inputs, twice, and nothing may differ."""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..errors import GuardError, TraceError
from ..ir.comparison import REPEATED, Outcome, copy_inputs, describe_difference, is_close, is_equal, is_integer, run
from ..ir.containers import Container, list_leaves, map_leaves
from ..ir.functions import is_random
from ..ir.ops import other_kind
from ..ir.traced_module import TracedModule
from ..torch_internals.modules import get_modes, set_modes
from ..torch_internals.tensors import FakeTensor, memory_id
from .fake_tensors import make_fake
from .graph_builder import Recording
from .isolation import (
    RecordedRun,
    freeze_value,
    get_random_state,
    has_equal_contents,
    is_alike,
    is_same_random_state,
    restore_after,
    set_random_state,
)
from .module_state import Journal, State, StatePlace, get_storage

DRAWS = "the random generators end in another state: the graph draws more or fewer numbers than the model"
UNCHECKED = "or skip this check: trace(..., check=False)"


def has_values(weights: list[torch.Tensor], call: Any) -> bool:
    """Return whether weights and inputs have values to run a model with, and not only shapes."""
    tensors = [*weights, *(x for x in list_leaves(call) if isinstance(x, torch.Tensor))]
    return not any(t.is_meta or isinstance(t, FakeTensor) for t in tensors)


def check(model: nn.Module, gm: TracedModule, call: Any, state: State, more_gradients: bool = False) -> None:
    """Run model and graph twice, each from the same state and random numbers, in the mode that both are in; once is enough
    for a model that keeps nothing.

    The second call has other inputs, where graph and model take them. Outputs, inputs, buffers, random
    generators and settings of torch must be the same after each call, and what else the model keeps must not matter to
    its next call. Weights are shared; inputs and buffers are copied. `state` is what the model holds, in this mode. With
    `more_gradients` results of the graph may have gradients where the model's have none.

    Raises TraceError with what differs.
    """
    grad = torch.is_grad_enabled()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # which enables gradients
        stack.enter_context(torch.set_grad_enabled(grad))
        # modules that the graph keeps whole are copies, and those of others may keep things as well
        whole = State(*(m for m in gm.modules() if type(m).__module__.partition(".")[0] not in ("torch", "fxplug")))
        stack.enter_context(restore_after(state))
        stack.enter_context(restore_after(whole))
        # what autograd saves is let go at once; a model that differentiates in its forward needs it. A guard may hold
        # what the inputs are to what they were.
        ways = [(_Pair.one_call_is_enough, True, value_changes(call)[0])]
        ways += [(_Pair.compared, lean, other) for lean in (True, False) for other in (*value_changes(call), "")]
        for way, lean, other in ways:
            pair = _Pair(model, gm, call, state, whole, lean, other, more_gradients)
            try:
                if way(pair):
                    return
            finally:
                pair.rewind()


def value_changes(call: Any) -> list[str]:
    """Return the options for `other` of `copy_inputs` for a call, the largest change first."""
    has_integers = any(isinstance(t, torch.Tensor) and is_integer(t) for t in list_leaves(call))
    return ["all", "numbers"] if has_integers else ["numbers"]


def of_other_sizes(call: Any) -> Iterator[Any]:
    """Yield the inputs with one of their sizes changed, wherever it occurs: by one, and to a half."""
    sizes = {int(n) for t in list_leaves(call) if isinstance(t, torch.Tensor) for n in t.shape if n > 1}
    for size in sorted(sizes):
        for new in sorted({size // 2, size - 1, size + 1} - {0}):
            yield map_leaves(call, lambda t, _, size=size, new=new: _resized(t, size, new))  # type: ignore[misc]


def _resized(tensor: torch.Tensor, size: int, new: int) -> torch.Tensor:
    with torch.no_grad():
        for dim, n in enumerate(tensor.shape):
            if n == size:
                tensor = tensor.index_select(dim, torch.arange(new, device=tensor.device) % size)
    return tensor


def is_aliasing_dependent(model: nn.Module, call: Any, state: State) -> bool:
    """Return whether a model's result for one tensor passed twice differs from that for two equal ones: it may ask `a is b`."""
    tensors: dict[Any, torch.Tensor] = {}
    several = False
    for t in list_leaves(call):
        if isinstance(t, torch.Tensor) and not other_kind(t):
            several |= tensors.setdefault((t.shape, t.dtype, t.device), t) is not t
    if not several:
        return False
    found = []
    for change in (lambda t: t, lambda t: t.detach().clone()):
        like = map_leaves(call, lambda t, _, change=change: change(tensors.get((t.shape, t.dtype, t.device), t)))  # type: ignore[misc]
        found.append(call_once(model, like, state))
    return found[0].diff(found[1], has_equal_contents) is not None


def call_once(function: Callable[..., Any], call: Any, state: State, grad: bool = False) -> Outcome:
    """Call a model, or what calls it, on copies, with or without gradients recorded, and put all back as it was."""
    journal = Journal()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # which enables gradients
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.callback(journal.put_back)
        stack.enter_context(restore_after(state))
        with journal:
            found = run(function, copy_inputs(call))
        found.keep()
        return found


def _backward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Give the gradients of inputs and parameters, the buffers, and where the random generators stand."""
    inputs = [x for x in list_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.is_leaf]
    parameters = [p for p in module.parameters() if p.requires_grad]
    tensors = [*inputs, *parameters]
    for tensor in tensors:
        tensor.requires_grad_().grad = None
    out = [x for x in list_leaves(module(*args, **kwargs)) if isinstance(x, torch.Tensor) and x.requires_grad]
    if out:
        sum((x * torch.linspace(1, 2, x.numel()).to(x).reshape(x.shape)).sum() for x in out).backward()  # type: ignore[union-attr]
    buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
    return [None if x.grad is None else x.grad.clone() for x in tensors], buffers, get_random_state()


def check_gradients(model: nn.Module, gm: TracedModule, call: Any, state: State, recorded: RecordedRun) -> None:
    """Compare the gradients of inputs and parameters of model and graph, and what the backward leaves behind, where the model's
    backward runs code again, as that of a checkpoint does, and the graph's does not.

    Raises TraceError, which names the place, where they differ.
    """
    if not (where := recorded.checkpointed):
        return
    found = [call_once(functools.partial(_backward, module), call, state, grad=True) for module in (model, gm)]
    if found[0].error:
        return  # the model has no gradients here
    if found[1].error:
        name = type(model).__name__
        raise TraceError(f"{where}: the backward pass of {name} fails in the graph, but not in the model")
    (mine, kept, draws), (others, left, drawn) = (one.out for one in found)
    problem = "" if is_same_random_state(draws, drawn) else "the random numbers afterwards differ"
    for a, b in zip(mine, others, strict=True):
        if (a is None) != (b is None) or (a is not None and not (is_equal(a, b) or is_close(a, b, REPEATED))):
            problem = "its gradients differ from the model's"
    if changed := [name for name, b in kept.items() if name in left and not is_equal(b, left[name])]:
        problem = f"'{changed[0]}' differs afterwards: the graph writes it once, and the model again in its backward pass"
    if problem:
        raise TraceError(
            f"{where} has its own backward, which the graph does not record; {problem}: turn checkpointing off, or "
            f"keep the module that calls it whole: leaf: [its path], {UNCHECKED}"
        )


def check_kept(
    model: nn.Module,
    call: Any,
    state: State,
    written: list[StatePlace],
    recording: Recording,
    leaves: set[str],
    put_fakes: Callable[[], object],
) -> None:
    """For a model without values, whose recorded run has `written` places of `state`: refuse what its next call would find.

    The model runs again on fake tensors, from what the first run left and from the start: what Python code keeps must
    come out the same. `put_fakes` puts fake weights into the model. Raises TraceError.
    """
    own = recording.parameters
    places = [p for p in written if id(p.now()) not in own and not p.is_in(leaves)]
    if not places or recording.mode is None:
        return
    mode, device = recording.mode, recording.device

    def again() -> None:
        args, kwargs = map_leaves(call, lambda t, _: make_fake(t, mode, device if t.is_meta else t.device))
        with contextlib.suppress(Exception):  # what the first run left may be of use to nobody
            model(*args, **kwargs)

    again()
    values = [_content(place) for place in places]
    state.restore()
    put_fakes()
    again()
    kept = [place for place, value in zip(places, values, strict=True) if not is_alike(_content(place), value)]
    if kept:
        raise TraceError(_text_of_kept(kept[0]))


class ValueNotSaved(RuntimeError):
    """A backward pass wants a value that was not kept."""


def save_nothing() -> contextlib.AbstractContextManager[Any]:
    """Let autograd keep no value for a backward pass, which is a ValueNotSaved then."""

    def refuse(_: None) -> torch.Tensor:
        raise ValueNotSaved("what autograd saved was let go")

    return torch.autograd.graph.saved_tensors_hooks(lambda t: None, refuse)


@dataclass
class _WatchedOutcome(Outcome):
    """What one call gave and left behind, in the process too; its `state` are the buffers."""

    facts: list[Any] = field(default_factory=list)
    memory: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    draws: tuple[Any, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Pair:
    """A model and its graph, called from one state."""

    model: nn.Module
    gm: TracedModule
    example: Any
    state: State
    whole: State
    lean: bool
    other: str
    more_gradients: bool

    def __post_init__(self) -> None:
        self.tables = {id(m._buffers): (f"{path}." if path else "", m) for path, m in self.model.named_modules()}
        self.start = get_random_state(), get_modes()
        self.journal = Journal()

    # --- runs

    def call(self, module: nn.Module, step: int, example: Any = None) -> _WatchedOutcome:
        """Call one of the two on copies of the inputs; those of the second step are others, and so are random numbers."""
        if step:
            torch.default_generator.manual_seed(step)
        inputs = copy_inputs(self.example if example is None else example, self.other if step == 1 else "")
        given = [t for t in list_leaves(inputs) if isinstance(t, torch.Tensor)]
        lean = self.lean and torch.is_grad_enabled()
        hooks = save_nothing() if lean else contextlib.nullcontext()
        with self.journal, hooks:
            found = _WatchedOutcome(**vars(run(module, inputs)))
        found.facts = _facts(given, found.out)
        found.state = {f"the buffer '{name}'": b for name, b in module.named_buffers(remove_duplicate=False)}
        found.keep()
        found.memory, found.draws, found.settings = self.journal.now(), get_random_state(), get_modes()
        return found

    def rewind(self, to: _WatchedOutcome | None = None) -> None:
        """Put everything back to before the first call; or to after one, but for what Python code keeps."""
        draws, settings = self.start if to is None else (to.draws, to.settings)
        self.journal.put_back(None if to is None else to.memory)
        for state in (self.state, self.whole):
            state.restore()
            state.restore_tensors()
        set_random_state(draws)
        set_modes(settings)

    # --- comparing

    def one_call_is_enough(self) -> bool:
        """Return whether model and graph agree on the other inputs, and the model keeps no state for a next call."""
        theirs = self.call(self.model, 1)
        if theirs.error or theirs.memory or self.state.opaque or self.whole.opaque or self.state.changes():
            return False
        self.rewind()
        ours = self.call(self.gm, 1)
        return not ours.error and not ours.memory and self.unlike(theirs, ours, []) is None

    def compared(self, tries: int = 3) -> bool:
        """Return whether the two could be compared. Raises TraceError if they differ."""
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
        if found and found[1] == DRAWS and threading.active_count() > 1 and tries > 1:
            return self.compared(tries - 1)  # another thread may have drawn meanwhile
        if places and not first.error and not second.error:
            self.refuse_kept(first, second, ours, places, values)
            if noted := [p for p, value in zip(places, values, strict=True) if isinstance(value, (bool, int, float, str))]:
                self.refuse_noted(noted, places)
        if found:
            self.refuse(*found, theirs, ours)
        return True

    def unlike(self, a: _WatchedOutcome, b: _WatchedOutcome, places: list[StatePlace]) -> str | None:
        """Return how the graph's result or state differs from the model's; None if it does not."""
        if a.error or b.error:
            if a.error and b.error:
                return None  # neither takes these inputs
            text = f"{type(a.error or b.error).__name__}: {a.error or b.error}"
            if a.error:
                return f"the model fails where the graph does not: {text}"
            return f"the graph fails where the model does not: {text}"
        anew = {self.buffer(place) for place in places}
        found = replace(a, state={name: value for name, value in a.state.items() if name not in anew})
        if problem := found.diff(b, has_equal_contents):
            return problem
        for (name, mine), (_, other) in zip(a.facts, b.facts, strict=True):
            if mine != other and not (self.more_gradients and name == "gradients" and all(map(operator.le, mine, other))):
                return f"the output differs in {name}: {other} instead of {mine}"
        if problem := self.memory(a, b):
            return problem
        alone = threading.active_count() == 1  # or another thread may have drawn from the same generators
        if not is_same_random_state(a.draws, b.draws) and (alone or any(is_random(n, self.gm) for n in self.gm.graph.nodes)):
            return DRAWS
        for name, mine in a.settings.items():
            if mine != (other := b.settings[name]) and name != "gradients":  # which a graph gives back, as a model may not
                return f"after the call, {name} is {other} instead of {mine}"
        return None

    def memory(self, a: _WatchedOutcome, b: _WatchedOutcome) -> str | None:
        """Return which tensor of the model was written differently; None if there is none."""
        if len(self.journal.kept) == 0:
            return None
        for held in self.state.tensors.values():
            home = held.link[0]  # None of a module's own attribute, else what holds it
            storage = None if home is not None and home[1] == "_buffers" else get_storage(held.alias)
            if storage is None or memory_id(storage) not in self.journal.kept:
                continue
            before = self.journal.kept[memory_id(storage)][1]
            mine, other = a.memory.get(memory_id(storage), before), b.memory.get(memory_id(storage), before)
            if mine is not other and not torch.equal(_bytes(mine), _bytes(other)):
                return f"the tensor {held} differs after the call"
        return None

    def buffer(self, place: StatePlace) -> str | None:
        """Return the name of a reassigned buffer among an outcome's state."""
        table = self.tables.get(id(place.owner))
        return None if table is None or place.key is None else f"the buffer '{table[0]}{place.key}'"

    def is_in_leaf(self, place: StatePlace) -> bool:
        """Return whether a place belongs to a leaf module: the graph calls it, so its state is its own."""
        try:
            return bool(path := place.path()) and not isinstance(self.gm.get_submodule(path), Container)
        except AttributeError:
            return False

    # --- what the model keeps from call to call

    def refuse_kept(
        self,
        first: _WatchedOutcome,
        second: _WatchedOutcome,
        ours: Sequence[Outcome],
        places: list[StatePlace],
        values: list[Any],
    ) -> None:
        """Refuse a model whose second call leaves other things behind when it does not find what the first one left."""
        recorded = {}
        for place in places:
            name = self.buffer(place)
            calls = zip((first, second), ours, strict=True)
            if name in first.state and all(is_equal(m.state.get(name), o.state.get(name)) for m, o in calls):
                recorded[id(place.owner), place.key] = first.state[name]
        rest = [(p, v) for p, v in zip(places, values, strict=True) if (id(p.owner), p.key) not in recorded]
        if not rest:
            return
        self.rewind(first)
        for place in places:
            if (id(place.owner), place.key) in recorded:
                place.owner[place.key] = recorded[id(place.owner), place.key].clone()
        third = self.call(self.model, 1)
        kept = [place for place, value in rest if not is_alike(_content(place), value)]
        if not kept and not third.error and _compare_results(second, third):
            kept = [place for place, _ in rest]
        self.rewind()
        if kept:
            raise TraceError(_text_of_kept(kept[0]))

    def refuse_noted(self, noted: list[StatePlace], places: list[StatePlace]) -> None:
        """Refuse a model that notes plain values, such as the largest size so far, that matter to a call of another size."""
        for other in of_other_sizes(self.example):
            fresh = self.call(self.model, 0, other)
            self.rewind()
            self.call(self.model, 0)
            self.journal.put_back()  # what is written into memory is recorded
            for place in places:
                if self.buffer(place) and isinstance(place.before, torch.Tensor) and place.before.shape == place.now().shape:
                    place.owner[place.key] = place.before
            set_random_state(self.start[0])
            later = self.call(self.model, 0, other)
            self.rewind()
            if not fresh.error and (later.error or _compare_results(fresh, later)):
                raise TraceError(
                    f"forward stores {noted[0]}, which changes what calls of other sizes give, and a graph cannot store it: "
                    "move that out of forward, call the model with the largest size before it is traced, or keep the module "
                    f"whole: leaf: [its path], {UNCHECKED}"
                )

    # --- words

    def refuse(self, step: int, text: str, theirs: Sequence[Outcome], ours: Sequence[Outcome]) -> None:
        """Say what differs, after finding out whether the model is the same as itself."""
        name = type(self.model).__name__
        again = [self.call(self.model, 0), self.call(self.model, 1)][step]
        self.rewind()
        if not theirs[step].error and not again.error and (own := _compare_results(theirs[step], again)):
            if _close(theirs[step].out, again.out) and _close(theirs[step].out, ours[step].out):
                return  # sums in another order each time
            raise TraceError(
                f"{name} is not a function of its inputs, weights, buffers and torch's random numbers: called twice from the "
                f"same state its outputs differ {own}. It may read a clock, a file, a global or a random generator of its own. "
                f"Keep the module that does so whole: leaf: [its path], {UNCHECKED}"
            )
        mode = "training" if self.model.training else "evaluation"
        error = ours[step].error
        raise TraceError(
            f"the graph of {name} and the model give different results, in {mode} at the {('first', 'second')[step]} call with "
            f"the example inputs{' at other values' if step and self.other else ''}: {text}. Something affects the result and "
            f"was not recorded. Keep the module that does so whole: leaf: [its path], {UNCHECKED}"
        ) from error


def _compare_results(a: Outcome, b: Outcome) -> str | None:
    return describe_difference(a.out, b.out, has_equal_contents)


def _content(place: StatePlace) -> Any:
    now = place.now()
    # a hook has another key each time
    return freeze_value(list(now.values()) if place.key is None and isinstance(now, dict) else now)


def _text_of_kept(place: StatePlace) -> str:
    return (
        f"forward stores {place} for its next call, and a graph cannot: store a tensor in a buffer (register_buffer), which is "
        f"recorded, or keep the module whole: leaf: [{place.path() or 'its path'}], {UNCHECKED}"
    )


def _facts(given: list[torch.Tensor], out: Any) -> list[Any]:
    """Return the properties of a result besides its values: strides, gradients, and which tensors share memory."""
    tensors = [x for x in list_leaves(out) if isinstance(x, torch.Tensor)]
    strided = [t.stride() if t.layout is torch.strided else None for t in tensors]
    gradients = [t.requires_grad for t in tensors]
    first: dict[int, int] = {}
    shared = []
    for index, tensor in enumerate([*given, *tensors]):
        storage = get_storage(tensor)
        shared.append(index if storage is None else first.setdefault(memory_id(storage), index))
    return [("strides", strided), ("gradients", gradients), ("tensors that share memory", shared)]


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _close(a: Any, b: Any) -> bool:
    """Return whether two results differ only by rounding, for devices whose order of summation varies."""
    pairs = [(x, y) for x, y in zip(list_leaves(a), list_leaves(b), strict=True) if isinstance(x, torch.Tensor)]
    return all(is_equal(x, y) or (x.device.type != "cpu" and is_close(x, y, REPEATED)) for x, y in pairs)
