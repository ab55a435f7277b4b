"""Whether new passes leave a model as it was: both are called alike, on copies, and all that a call leaves is compared."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from ..capture.isolation import switch_mode
from ..capture.self_check import ValueNotSaved, save_nothing
from ..errors import TraceError, VerifyError, get_first_line
from ..ir.comparison import REWRITTEN, Call, Outcome, copy_inputs, is_close
from ..ir.containers import list_leaves, list_tensors, map_leaves
from ..ir.regions import format_names
from ..ir.traced_module import TracedModule
from ..quantised import is_packed
from ..spec.rules import Match, Pass, Rule
from ..torch_internals.modules import DropoutNd, NormBase
from ..torch_internals.tensors import version
from .matches import find_composites
from .probe import (
    GraphRun,
    Recorder,
    Unchecked,
    bind_placeholders,
    check_writes,
    find_gradient_leaves,
    is_differentiable,
    locate_error,
    note_constant_output,
    replace_tensors,
)


def _knows_mode(module: TracedModule) -> bool:
    """Return whether training can differ from evaluation: by its graph, or by the code of a module that it calls."""
    if len(module.graphs) > 1:
        return True
    called = {str(n.target) for n in module.graph.nodes if n.op == "call_module"}
    return any(_reads_mode(type(m)) and not _is_inert(m) for path in called for m in module.get_submodule(path).modules())  # type: ignore[arg-type]


def _is_inert(module: nn.Module) -> bool:
    """Return whether a torch layer drops nothing, or has no running statistics: training and evaluation are then the same."""
    if isinstance(module, DropoutNd):
        return module.p == 0
    return isinstance(module, NormBase) and module.running_mean is None


@cache
def _reads_mode(kind: type[nn.Module]) -> bool:
    """Return whether the code of a class mentions `training`; code that is not torch's or fxplug's may read it in other
    ways."""
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        if base.__module__.partition(".")[0] not in ("torch", "fxplug"):
            return True
        functions = (value for value in vars(base).values() if inspect.isfunction(value))
        if any("training" in function.__code__.co_names for function in functions):
            return True
    return False


@contextlib.contextmanager
def restore_buffers(*modules: nn.Module) -> Iterator[Callable[[], None]]:
    """Give the buffers of modules the values back that they have now: a block may write those that it keeps as its own.

    Gives a function that does so earlier, too.
    """
    values = [(b, b.detach().clone(), version(b)) for m in modules for b in m.buffers() if not (b.is_meta or b.is_inference())]

    @torch.no_grad()
    def restore() -> None:
        for buffer, value, before in values:
            if version(buffer) != before or not torch.equal(buffer, value):  # batch norms write without a version
                buffer.copy_(value)

    try:
        yield restore
    finally:
        restore()


Runner = Callable[[TracedModule, Call], Any]
INPUTS = ":in"  # among the names of what a model writes: its inputs


@dataclass(frozen=True)
class CallMode:
    """One way to call a module: `grads` has one entry a call, whether gradients are recorded; a call finds what the one
    before it left in the buffers.
    """

    label: str
    training: bool = False
    grads: tuple[bool, ...] = (False,)
    channels_last: bool = False

    def which(self, index: int) -> str:
        """Return a description of the call; "" for a plain one."""
        if index:
            return " on a second call, with gradients recorded"
        return f" {self.label}" if self.training or self.channels_last else ""


CALL_MODES = (
    CallMode("in evaluation twice", grads=(False, True)),
    CallMode("in training", training=True, grads=(True,)),
    CallMode("with channels-last inputs", channels_last=True),
)


@dataclass
class _CallOutcome(Outcome):
    """What one call gave and left, and the weights and inputs that a gradient of its result reaches."""

    reached: set[str] = field(default_factory=set)


class _CallDifference(NamedTuple):
    """In which of several calls two modules differ, and how."""

    number: int
    text: str


def first_difference(base: Sequence[_CallOutcome], new: Sequence[_CallOutcome]) -> _CallDifference | None:
    """Find the first thing that calls of two modules gave or left otherwise."""
    for number, (a, b) in enumerate(zip(base, new, strict=True)):
        if text := a.diff(b):
            return _CallDifference(number, text)
        if lost := sorted(a.reached - b.reached):
            more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
            return _CallDifference(number, f"gradients no longer reach {', '.join(lost[:3])}{more}")
    return None


def check(
    gm: TracedModule, new: TracedModule, call: Call, entries: list[dict[str, Any]], written: set[str] | None
) -> str:
    """Compare the two modules and return what was compared, in words.

    `written` names the weights that a call writes, None if unknown.

    Raises VerifyError that names the pass, or the model if that is at fault; Unchecked if there is nothing to compare.
    """
    added = {name for entry in entries for name in entry["inputs"]}
    names = ", ".join(e["name"] for e in entries) or "no pass"
    comparison = _Comparison(gm, new, call, added, entries, written)
    done, notes = [], []
    with check_writes(gm, new, call):
        for mode in CALL_MODES:
            if not comparison.applies(mode):
                continue
            note = comparison.check(mode)
            notes += [note] if note else []
            done += [mode.label] if note is None or not note.startswith("not ") else []
    if not done:
        raise Unchecked("; ".join(notes))
    return "; ".join([f"outputs are torch.equal ({names}), {', '.join(done)}", *dict.fromkeys(notes)])


def _call(module: TracedModule, call: Call) -> Any:
    return module(*call[0], **call[1])


def _run_isolated(module: TracedModule, call: Call) -> Any:
    """Run a graph node by node; what passes put in draws its random numbers beside those of the model."""
    run = GraphRun(module, module.graph, bind_placeholders(module.graph, call))
    for node in module.graph.nodes:
        put_in = node.meta.get("pass", {})
        opened = put_in.get("region") and put_in.get("place") == "param"  # a layer of the model, as its code
        with torch.random.fork_rng() if put_in and not opened else contextlib.nullcontext():
            result = run.step(node)
    return result


class _Comparison:
    """The two modules, what they are called with, and who put in what is between them."""

    def __init__(
        self,
        gm: TracedModule,
        new: TracedModule,
        call: Call,
        added: set[str],
        entries: list[dict[str, Any]],
        written: set[str] | None,
    ) -> None:
        self.gm, self.new, self.inputs, self.entries, self.written = gm, new, call, entries, written
        self.tensors = {module: dict(list_tensors(module)) for module in (gm, new)}
        self.old_call: Call = (call[0], {k: v for k, v in call[1].items() if k not in added})

    def applies(self, mode: CallMode) -> bool:
        """Return whether this way of calling can reveal differences that evaluation does not."""
        if mode.channels_last:
            tensors = (t for t in list_leaves(self.old_call) if isinstance(t, torch.Tensor))
            return any(_channels_last(t) is not t for t in tensors) and _has_space(self.new)
        return not mode.training or _knows_mode(self.gm) or _knows_mode(self.new)

    def check(self, mode: CallMode) -> str | None:
        """Compare one way of calling. Gives a note, which begins with 'not ' where nothing could be compared."""
        try:
            with switch_mode(mode.training, self.gm, self.new):
                return self.compare(mode)
        except TraceError:
            return f"not checked {mode.label}: the model could not be traced in that mode"

    def compare(self, mode: CallMode) -> str | None:
        try:
            base = self.call(self.gm, mode)
        except Exception as error:  # the model's
            text = f"{type(error).__name__}: {get_first_line(error)}"
            if mode is not CALL_MODES[0]:
                return f"not checked {mode.label}: the model itself fails there ({text})"
            raise VerifyError(f"the model fails on these inputs without any pass: {text}") from error
        try:
            new = self.call(self.new, mode)
        except Exception as error:  # the rewritten model's: its blocks may be the user's
            raise self.locate_failure(mode, error) from error
        note = "" if mode is not CALL_MODES[0] else note_constant_output(base[0].out)
        finding = first_difference(base, new)
        if finding is None:
            return note or None
        if (unsteady := first_difference(base, self.call(self.gm, mode))) is not None:
            again = f"the model gives another result when it is called again{mode.which(unsteady.number)}"
            raise Unchecked(f"{again}, with the same state, inputs and seed: {unsteady.text}")
        return self.explain(mode, base, new) or self.raise_located(mode, finding)

    def call(self, module: TracedModule, mode: CallMode, run: Runner = _call) -> list[_CallOutcome]:
        """Run each of the calls; give what they leave."""
        try:
            return self.run_calls(module, mode, run, save_nothing())
        except ValueNotSaved:  # the model computes gradients of its own
            return self.run_calls(module, mode, run, contextlib.nullcontext())

    def run_calls(
        self, module: TracedModule, mode: CallMode, run: Runner, saving: contextlib.AbstractContextManager[Any]
    ) -> list[_CallOutcome]:
        """Run the calls one after the other on copies of inputs and of the state that a call may write.

        Nothing goes back through these calls, so what a backward pass would need is not kept: with `saving` they take an
        inference's memory.
        """
        call, names = self.inputs if module is self.new else self.old_call, self.old_call[1].keys()
        if mode.channels_last:
            call = map_leaves(call, lambda t, _: _channels_last(t))
        tensors = self.tensors.get(module) or dict(list_tensors(module))
        own = {id(t): t for name, t in tensors.items() if self.may_write(name, t)}
        copies = dict(zip(own, copy_inputs(list(own.values())), strict=True))
        state = {name: copies.get(id(t), t) for name, t in tensors.items()}
        takes_gradients = self.written is not None and INPUTS not in self.written
        found = []
        with torch.random.fork_rng(), replace_tensors(module, copies):
            torch.manual_seed(0)
            for grad in mode.grads:
                arguments = copy_inputs(call)
                sources = {id(t): f"input {n}" for n, t in enumerate(list_leaves(arguments)) if grad and is_differentiable(t)}
                for t in list_leaves(arguments) if takes_gradients else ():
                    if id(t) in sources:
                        t.requires_grad_()
                with torch.inference_mode(False), torch.set_grad_enabled(grad), saving:
                    outcome = _CallOutcome(run(module, arguments), (arguments[0], {k: arguments[1][k] for k in names}))
                if grad:
                    reached = find_gradient_leaves(outcome.out)
                    outcome.reached = {name for name, t in state.items() if id(t) in reached}
                    outcome.reached |= {name for i, name in sources.items() if i in reached and takes_gradients}
                outcome.state = {f"'{name}'": state[name] for name, t in tensors.items() if id(t) in own}
                outcome.keep()
                found.append(outcome)
        return found

    def may_write(self, name: str, tensor: torch.Tensor) -> bool:
        """Tell whether a call may write a tensor of a module: a weight only where that is seen, or not known."""
        if is_packed(tensor):
            return False
        return self.written is None or name in self.written or not isinstance(tensor, nn.Parameter)

    def explain(self, mode: CallMode, base: list[_CallOutcome], new: list[_CallOutcome]) -> str | None:
        """Say why a difference is none of the passes': random numbers that they draw too, or a composite that was opened."""
        found = _opened(self.gm, self.new)
        for draws in (False, True):
            ours = self.call(self.new, mode, _run_isolated) if draws else new
            drawn = "random numbers that the passes draw are drawn separately" if draws else ""
            if draws and first_difference(base, ours) is None:
                return drawn
            if found:
                control = self.call(_as_opened(self.gm, found), mode)
                close = is_close([one.out for one in base], [one.out for one in control], REWRITTEN)
                if close and first_difference(control, ours) is None:
                    kinds = " and ".join(dict.fromkeys(found.values()))
                    text = f"outputs agree within rounding where {format_names(list(found))} was opened: {kinds} computes "
                    return text + "in another order there" + (f"; {drawn}" if draws else "")
        return None

    # --- who it was

    def locate_failure(self, mode: CallMode, error: Exception) -> VerifyError:
        runs: list[GraphRun] = []

        def by_nodes(module: TracedModule, call: Call) -> Any:
            runs.append(GraphRun(module, module.graph, bind_placeholders(module.graph, call)))
            return runs[-1].finish()

        with contextlib.suppress(Exception):  # the model's again, which was caught before
            self.call(self.new, mode, by_nodes)
            return VerifyError(f"the rewritten model fails{mode.which(0)}: {type(error).__name__}: {get_first_line(error)}")
        return locate_error(runs[-1], error)

    def raise_located(self, mode: CallMode, finding: _CallDifference) -> str:
        """Raises VerifyError with the pass and the site where the difference begins."""
        recorders: list[Recorder] = []

        def by_nodes(module: TracedModule, call: Call) -> Any:
            recorders.append(Recorder(GraphRun(module, module.graph, bind_placeholders(module.graph, call))))
            return recorders[-1].finish()

        found = []
        for module in (self.gm, self.new):
            self.call(module, mode, by_nodes)
            found.append(recorders[finding.number - len(mode.grads)])  # of the last calls: there may have been a try before
        first, node = found[1].responsible_block(found[0].digests)
        names = ", ".join(entry["name"] for entry in self.entries if entry["neutral"]) or "no pass"
        where = ""
        if node is not None:
            entry = node.meta["pass"]
            names = entry["name"]
            line = f" ({entry['where']})" if entry.get("where") else ""
            where = f"\n  first region to differ: {entry.get('site', '')} ({entry.get('block', '')}){line}"
        elif first is not None:
            where = f"\n  first value to differ: '{first.name}', before any block"
        since = "\n  new weights change nothing, trained or loaded ones do: verify the module as apply gave it"
        raise VerifyError(f"{names} says it is neutral, but {finding.text}{mode.which(finding.number)}{where}{since}")


# --- memory formats


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values in channels_last memory format; the tensor itself if it already has it."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if not tensor.is_floating_point() or tensor.dim() not in formats:
        return tensor
    moved = tensor.contiguous(memory_format=formats[tensor.dim()])
    return tensor if moved.stride() == tensor.stride() else moved


def _has_space(module: TracedModule) -> bool:
    """Return whether passes map a parameter, or are inserted at a value with spatial dimensions, for which memory formats
    matter."""
    put_in = [n for n in module.graph.nodes if "pass" in n.meta]
    return any(n.meta["pass"].get("place") == "param" or len(n.meta.get("shape") or ()) > 3 for n in put_in)


# --- torch.nn's composite modules, opened


def _opened(gm: TracedModule, new: TracedModule) -> dict[str, str]:
    """Return the classes of composites such as MultiheadAttention that are one call in the model and opened in the rewritten
    one.

    By path, the outer ones first. torch's own path through them depends on gradients, and on whether q, k and v are one object,
    which an argument of a graph is not.
    """
    put_in = [n.meta["pass"] for n in new.graph.nodes if n.meta.get("pass", {}).get("region")]
    paths = {str(made_by.get("site", "")).partition("@")[0] for made_by in put_in}  # an input of a pass has no site
    kept = {str(n.target) for n in gm.graph.nodes if n.op == "call_module"}
    around = {".".join(path.split(".")[:n]) for path in paths for n in range(1, path.count(".") + 2)}
    whole = {path: type(module).__name__ for path, module in find_composites(gm).items() if path in around}
    return {path: kind for path, kind in whole.items() if any(f"{path}.".startswith(f"{one}.") for one in kept)}


def _as_opened(gm: TracedModule, paths: Iterable[str]) -> TracedModule:
    """Return the model with these composites opened, and nothing else changed."""
    from .opening import open_composites  # which few models need

    for path in paths:
        gm = open_composites(gm, {path}, Pass("opened_for_comparison", [Rule(Match(path), args=("y",))]))
    return gm
