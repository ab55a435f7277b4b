"""Model and example inputs to a graph: run the real `forward` once and write down, as torch functions, what it does."""

from __future__ import annotations

import contextlib
import functools
import gc
import traceback
import unicodedata
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .. import quantised
from ..errors import FxplugError, TraceError, did_you_mean, shorten
from ..ir.containers import HOOKED, list_tensors, make_call
from ..ir.containers import list_leaves as values
from ..ir.functions import PATH_KEY
from ..ir.graph import erase
from ..ir.ops import TO_DENSE, other_kind
from ..ir.traced_module import TracedModule
from ..spec.addresses import select
from ..torch_internals.tensors import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from . import edges as model_edge
from . import self_check
from .edges import RegionEdges, block_calls, hold_trace_lock
from .fake_tensors import NeedsValues, Results, RetryState, is_missing_values, pause_gc, put_fake_weights, silence_torch
from .graph_builder import Recording
from .isolation import RecordedRun, assemble, refuse_python_random, restore_after, switch_mode
from .modes import Derived, drop, find_derived, patch_torch
from .module_state import MISSING, Journal, State, StatePlace
from .recorder import NeedsAutograd, list_patches
from .user_code import find_source_line, is_user_code

UNWRITABLE = {'"', "\\", "@", "."}  # FX writes names between quotes, and "@" stands before the number of a call


def trace(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    leaf: Iterable[str] = (),
    real: bool | None = None,
    check: bool = True,
) -> TracedModule:
    """Record one call `model(*args, **kwargs)` as a graph that gives `torch.equal` results for every input its guards admit.

    Tensors are fake while tracing: nothing is computed and no memory is taken. A model that reads numbers out of its data
    (`.item()`, `.tolist()`, `nonzero`), or calls what knows no fake tensors, is traced on its real tensors instead, with a
    warning, and what it read is a guard.

    The graph is then checked against the model: both are called twice on copies of the inputs, in evaluation and training where
    that matters, and must give and leave behind the same; without values (meta tensors) nothing is called. In a mode where the
    two differ, `train()` or `eval()` of the result raises.

    The module answers the calls that its guards admit. Another (a number for a tensor, another dtype, an optional input) is a
    GuardError that names the argument: trace such a call, or let `fxplug.variants(module, model)` do that when one comes.

    One trace runs at a time in a process; modules, modes of torch and random states are left as they were.

    Args:
        model: The module to trace, on any device, meta included.
        args: Example inputs by position: a tuple or list, or one tensor. Any shapes that `forward` takes, with any batch size,
            1 included.
        kwargs: Example inputs by name.
        leaf: Paths or patterns of modules to keep whole as one call, beside torch.nn's own.
        real: True traces on the real tensors from the start and also admits branches on measured (floating-point) values; False
            forbids real tensors; None takes them where fake ones cannot do.
        check: Whether the graph is run beside the model.

    Returns:
        The traced module, on the model's own parameters and buffers, with its `state_dict` keys.

    Raises:
        TraceError: What `forward` does cannot be a graph; with file and line of the model's code.
        SpecError: `kwargs` is no mapping.
    """
    if not isinstance(model, nn.Module):
        raise TraceError(f"trace takes an nn.Module, not {type(model).__name__}")
    if isinstance(model, TracedModule):
        raise TraceError("this is a traced module already: trace the model it was made from")
    if "_orig_mod" in model._modules:
        raise TraceError("this is a module from torch.compile: trace the model itself, and compile its graph")
    _check_names(model)
    _check_offloaded(model)
    patterns = [leaf] if isinstance(leaf, str) else list(leaf)
    call: Any = make_call(args, kwargs)
    options: dict[str, Any] = {"leaf": patterns, "real": real, "keep": False}
    with hold_trace_lock(model):
        derived = find_derived(model)
        gm = _checked_trace(model, patterns, real, check, call, False, derived)
        if derived and not _self_check_passes(model, gm, call, check):  # it is more than what was made of the weights
            options["keep"] = True
            gm = _checked_trace(model, patterns, real, check, call, False, [])
    if patterns or real is not None or options["keep"]:
        gm.meta["trace"] = options
    return gm


def _check_offloaded(model: nn.Module) -> None:
    """Raises TraceError where accelerate or diffusers moves the weights of the model while it is called."""
    for path, part in model.named_modules():
        own = vars(part).get(HOOKED)
        kinds = [(type(hook).__name__, hook) for hook in getattr(own, "hooks", (own,))]
        moving = [kind for kind, hook in kinds if kind == "CpuOffload" or getattr(hook, "offload", False)]
        moving += [key for key in getattr(vars(part).get("_diffusers_hook"), "hooks", ()) if "group_offloading" in key]
        if moving:
            raise TraceError(
                f"'{path or type(model).__name__}' is offloaded ({moving[0]}), which moves weights during a call: take that "
                "off for the trace (pipe.remove_all_hooks(), accelerate's remove_hook_from_module(model, recurse=True); of "
                "diffusers' group offloading trace before it) and offload the traced module"
            )


def retrace(model: nn.Module, call: Any, open_numbers: bool, leaf: list[str], real: bool | None, keep: bool) -> TracedModule:
    """The trace of another call, which is (args, kwargs), with the options that `meta["trace"]` has of the first.

    With `open_numbers` the numbers in the call are inputs of the graph; with `keep` it has what modules hold otherwise.
    """
    with hold_trace_lock(model):
        return _checked_trace(model, leaf, real, True, call, open_numbers, [] if keep else find_derived(model))


def _self_check_passes(model: nn.Module, gm: TracedModule, call: Any, check: bool) -> bool:
    """Whether a graph that was made without what the model keeps gives what the model gives with it."""
    if not self_check.has_values([tensor for _, tensor in list_tensors(model)], call):
        return True
    if not check:
        return False
    try:
        self_check.check(model, gm, call, State(model), more_gradients=True)
    except FxplugError:
        return False
    return True


def _checked_trace(
    model: nn.Module, patterns: list[str], real: bool | None, check: bool, call: Any, open_numbers: bool, derived: Derived
) -> TracedModule:
    with contextlib.ExitStack() as stack:
        if derived:
            stack.enter_context(restore_after(State(model)))
            drop(derived)
        stack.enter_context(quantised.keep_unpacked(model))  # before the state is noted that each run begins with
        job = _Job(model, list(list_tensors(model)), call, _leaf_paths(model, patterns), real, check, open_numbers)
        _refuse_kinds(job)
        quantised.check_ready(model, job.leaves)
        stack.enter_context(pause_gc())
        try:
            gm = _trace(job)
        except RecursionError as error:
            if (function := _walking(error)) is None:
                raise  # the model's own
            raise TraceError(
                f"an input, a result or a list in it is nested too deeply for a graph, or contains itself ({function})"
            ) from None
        except FxplugError:
            raise
        except Exception as error:  # torch's, or the model's own
            if self_check.call_once(model, call, State(model)).error:
                raise
            text = f"{type(error).__name__}: {shorten(' '.join(str(error).split()), 300)}"
            raise TraceError(
                f"{type(model).__name__} ({': '.join(find_source_line(error))}) fails only while it is traced: "
                f"{text}; keep the module that fails whole: leaf: [its path]{', or remove real=False' * (real is False)}"
            ) from error
    if job.checkpointed:
        try:
            gm.enable_gradient_checkpointing()
        except (FxplugError, AttributeError) as error:  # it has no regions that repeat, or no extension has the method
            text = f"{job.checkpointed} saves memory in the model, and not in its graph: {getattr(error, 'finding', error)}"
            warnings.warn(text, stacklevel=3)
    for reason in dict.fromkeys(job.reasons):
        warnings.warn(f"{type(model).__name__} was traced on its real tensors: {reason}", stacklevel=3)
    return gm


def _refuse_kinds(job: _Job) -> None:
    """Raises TraceError for parameters and buffers that no graph can hold."""
    for name, tensor in job.tensors:
        if is_lazy(tensor):
            raise TraceError(f"'{name}' has no shape before the first call: call the model once before it is traced")
        if kind := other_kind(tensor):
            raise TraceError(f"'{name}' is a {kind} tensor, which a graph cannot hold: {TO_DENSE}")


def _walking(error: RecursionError) -> str | None:
    """The function that went too deep into a value; None where it is the model's code that did."""
    frames = list(traceback.walk_tb(error.__traceback__))[-20:]
    return None if any(is_user_code(frame) for frame, _ in frames) else frames[-1][0].f_code.co_name


@dataclass
class _Job:
    """What all runs of one trace share. `state` is what the model holds before the first, and again after each."""

    model: nn.Module
    tensors: list[tuple[str, torch.Tensor]]  # parameters and buffers
    call: Any
    leaves: set[str]
    real: bool | None
    check: bool
    open_numbers: bool  # whether numbers among the arguments are inputs

    def __post_init__(self) -> None:
        self.state = State(self.model)
        self.results = Results()
        self.reasons: list[str] = []  # why real tensors were needed
        self.checkpointed = ""  # where the model runs code again in its backward
        self.has_values = False  # whether weights and inputs have, so that the graph can be checked
        self.one_or_two = False  # whether it matters to the model that two inputs are one tensor


def _trace(job: _Job) -> TracedModule:
    model, call = job.model, job.call
    job.has_values = self_check.has_values([t for _, t in job.tensors], call)
    checked = job.check and job.has_values
    job.one_or_two = checked and self_check.is_aliasing_dependent(model, call, job.state)
    # a graph holds one mode: those of parts are put together from both when it is called
    mixed = any(module.training != model.training for module in model.modules())
    first = _run_until_guards_agree(job, model.training if mixed else None)
    graphs = {model.training: first}
    twin_error, other_modes_read = None, set[tuple[str, str]]()
    job.checkpointed = first.checkpointed
    if first.reads_training:
        try:
            second = _run_until_guards_agree(job, not model.training)
        except Exception as error:  # the model's, or torch's
            twin_error = str(error)
        else:
            other_modes_read = second.modes_read
            job.checkpointed = job.checkpointed or second.checkpointed
            if second.text() != first.text():
                graphs[not model.training] = second
    gm = assemble(model, graphs, twin_error)
    notes = {"modes": _modes_given_by_train(job), "modes_read": sorted(map(list, first.modes_read | other_modes_read))}
    gm.meta.update({key: note for key, note in notes.items() if note})
    if not checked:
        moving = (name for name, m in model.named_modules() if m.training and getattr(m, "running_mean", None) is not None)
        if first.checkpointed and (name := next(moving, None)) is not None:
            warnings.warn(
                f"{first.checkpointed} runs its code again in the backward pass, and the graph does not: if '{name}' is in it, "
                "the model updates its statistics twice; turn checkpointing off for the trace",
                stacklevel=4,
            )
        return gm
    self_check.check(model, gm, call, job.state)
    self_check.check_gradients(model, gm, call, job.state, first)
    if twin_error is None and (first.leaves_read_training or first.reads_training):
        journal = Journal()
        try:
            with block_calls(), restore_after(job.state), switch_mode(not model.training, gm):
                with journal:  # layers that merge an update into their weight write it here
                    model.train(not model.training)
                state, second = State(model), graphs.get(model.training, first)
                self_check.check(model, gm, call, state)
                self_check.check_gradients(model, gm, call, state, second)
        except Exception as error:  # as above
            alone = assemble(model, {model.training: first}, str(error))
            alone.meta.update(gm.meta)
            return alone
        finally:
            journal.put_back()
    return gm


def _modes_given_by_train(job: _Job) -> dict[str, list[str]]:
    """The modules that the model's own `train()` and `eval()` put into the other mode, by the name of the method."""
    if all(type(module).train is nn.Module.train and "train" not in vars(module) for module in job.model.modules()):
        return {}
    found, journal = {}, Journal()
    try:
        for name, mode in (("train", True), ("eval", False)):
            with restore_after(job.state), journal, contextlib.suppress(Exception):  # the model's: it cannot be in that mode
                job.model.train(mode)
                found[name] = [path for path, module in job.model.named_modules() if module.training != mode]
    finally:
        journal.put_back()
    return {name: paths for name, paths in found.items() if paths}


def _run_until_guards_agree(job: _Job, training: bool | None) -> RecordedRun:
    """A recording; one that asks for gradients, as to checkpoint, and is the same without them holds for both."""
    first = _record(job, training)
    checks = first.asks_for_gradients()
    if checks and not torch.is_inference_mode_enabled():
        with contextlib.suppress(Exception), torch.set_grad_enabled(not torch.is_grad_enabled()):  # the model's
            second = _record(job, training)
            if first.text(checks) == second.text(second.asks_for_gradients()):
                erase(checks)
    return first


def _leaf_paths(model: nn.Module, patterns: list[str]) -> set[str]:
    paths = [name for name, _ in model.named_modules(remove_duplicate=False)]
    found: set[str] = set()
    for pattern in patterns:
        hits = select(pattern, paths)
        if not hits:
            raise TraceError(f"leaf '{pattern}' names no module of {type(model).__name__}{did_you_mean(pattern, paths)}")
        found.update(hits)
    return found


def _record(job: _Job, training: bool | None) -> RecordedRun:
    inputs = [t for t in values(job.call) if isinstance(t, torch.Tensor)]
    on_meta = any(t.is_meta for t in [*(t for _, t in job.tensors), *inputs])
    if job.real:
        if on_meta:
            raise TraceError("real=True needs weights and inputs with values, but some are on the meta device: load them first")
        return _run(job, False, training)
    try:
        return _run(job, True, training)
    except FxplugError:
        raise
    except Exception as error:  # the model's or torch's
        only_fake = job.real is False or on_meta
        # or the model fails in this call without being traced, too
        if not is_missing_values(error) and (only_fake or self_check.call_once(job.model, job.call, job.state).error):
            raise  # else torch has no such function on fake tensors, or another one
        if only_fake:
            if not isinstance(error, NeedsValues):
                raise
            way = " (its weights or inputs are on the meta device; with values it could be traced on real tensors)"
            raise TraceError(f"{error}{'' if job.real is False else way}") from error
        reason = str(error) if isinstance(error, NeedsValues) else f"{type(error).__name__}: {str(error).strip()}"
        reason = reason.partition("\n")[0]
    gc.collect(0)  # fake tensors of the first try: none is older, as nothing was collected meanwhile
    try:
        recorded = _run(job, False, training)
    except Exception as error:  # the model's or torch's again
        error.add_note(f"the first attempt, on fake tensors, failed with: {reason}")
        raise
    job.reasons.append(reason)
    return recorded


def _run(job: _Job, on_fakes: bool, training: bool | None) -> RecordedRun:
    """Record one call, again with what a try has found that a run needs."""
    tries = RetryState(job.open_numbers, job.one_or_two)
    while True:
        try:
            return _try(job, on_fakes, training, tries)
        except NeedsAutograd:
            tries.autograd = True
        except (FxplugError, NeedsValues):
            raise
        except Exception as error:  # the model's or torch's
            if not tries.learn(error):
                raise


def _try(job: _Job, on_fakes: bool, training: bool | None, tries: RetryState) -> RecordedRun:
    model, tensors, call, leaves, state = job.model, job.tensors, job.call, job.leaves, job.state
    mode = FakeTensorMode(allow_non_fake_inputs=True) if on_fakes else None
    inputs = [x for x in values(call) if isinstance(x, torch.Tensor)]
    device = next((t.device for t in [*inputs, *(t for _, t in tensors)] if not t.is_meta), torch.device("cpu"))
    results = job.results if not tries.autograd else Results(remember=False)
    recording = Recording(model, mode, device, bool(job.real), results, tries)
    grad = torch.is_grad_enabled()
    regions = RegionEdges(recording, leaves)
    with contextlib.ExitStack() as stack:
        stack.callback(recording.unmark)
        if mode is not None:
            stack.enter_context(block_calls())
        stack.enter_context(restore_after(state))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(refuse_python_random(model))
        if mode is not None:
            put_fake_weights(state, mode, device, recording.parameters, tries.autograd)
            stack.callback(recording.overwritten.put_back)
            stack.enter_context(silence_torch())
            stack.enter_context(mode)
        else:
            for name, tensor in tensors:
                recording.parameters.setdefault(id(tensor), name)
            journal = Journal()
            stack.callback(journal.put_back)
            recording.journal = stack.enter_context(journal)
        recording.buffers = _tensors_in_table(state, "_buffers")
        for name, _, parameter in _tensors_in_table(state, "_parameters"):
            recording.holds(parameter, name)
        stack.enter_context(patch_torch(recording, training, list_patches(recording)))
        stack.callback(recording.stop)
        stack.enter_context(torch.set_grad_enabled(grad))  # the model is asked in the mode that its caller has
        try:
            model_edge.run(recording, regions, *call)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise NeedsValues(recording.needs_values(error)) from error
        except (NeedsValues, NeedsAutograd, FxplugError):
            raise
        except Exception as error:  # the model's or torch's, told with its line
            error.add_note(f"while tracing {recording.place(error)}{' on fake tensors' * (mode is not None)}")
            raise
        if recording.failed:
            text = f"{recording.failed}: an operation fails here and the code catches that, so the inputs decide what it does"
            if recording.fake:
                raise NeedsValues(text)
            raise TraceError(f"{text}, and a graph records one branch only: keep the module whole, leaf: [its path]")
        written = state.changes()
        _refuse_new_state(state, dict(tensors), recording.parameters, written, leaves)
        if mode is not None and job.check and not job.has_values:
            stand_in = functools.partial(put_fake_weights, state, mode, device, {}, False)
            self_check.check_kept(model, call, state, written, recording, regions.called, stand_in)
    recording.finish()
    return RecordedRun(
        recording.graph, recording.constants, regions.called, recording.reads_training, results.reads_training, written,
        recording.modes_read, recording.checkpointed,
    )


def _refuse_new_state(
    state: State, originals: dict[str, torch.Tensor], names: dict[int, str], written: list[StatePlace], whole: set[str]
) -> None:
    """Refuse a forward that gives a module a parameter, a child or a buffer of its state dict that it did not have: the
    traced model would be without it.

    `originals` are the model's tensors by name; `names` those of what stands for them in the run, by id.
    """
    tables = {
        id(table): (path, kind, module._non_persistent_buffers_set)
        for module, path in state.modules.values()
        for table, kind in ((module._parameters, "parameter"), (module._buffers, "buffer"), (module._modules, "module"))
    }
    for place in written:
        path, kind, unsaved = tables.get(id(place.owner), ("", "", set()))
        made = place.now()
        if not kind or (made is None and place.before is MISSING) or any(f"{path}.".startswith(f"{leaf}.") for leaf in whole):
            continue
        if kind == "module" and not (isinstance(made, nn.Module) and any(True for _ in list_tensors(made))):
            continue  # it holds nothing that a graph could be without
        if kind == "buffer" and (place.before is not MISSING or place.key in unsaved):
            continue  # assigned anew, which is recorded; or a constant
        if kind == "parameter" and place.before is originals.get(names.get(id(made), "")):
            continue  # what stands for it
        name = f"{path}.{place.key}" if path else place.key
        if place.before is MISSING:
            raise TraceError(
                f"forward creates the {kind} '{name}' when it is first called, and the graph would not have it: create it in "
                "__init__, or call the model once before it is traced"
            )
        raise TraceError(
            f"forward assigns a new tensor to the {kind} '{name}', which a graph cannot do: make it a buffer "
            f"(register_buffer), or keep the module whole: leaf: [{path or 'its path'}]"
        )


def _tensors_in_table(state: State, table: str) -> list[tuple[str, nn.Module, torch.Tensor]]:
    """The parameters or buffers that the modules have now: name, module and tensor."""
    return [
        (f"{path}.{key}" if path else key, module, tensor)
        for module, path in state.modules.values()
        for key, tensor in getattr(module, table).items()
        if tensor is not None
    ]


def _check_names(model: nn.Module) -> None:
    """Refuse names of modules and tensors that no code can have, and warn of those that no artifact can have."""
    unsaved = []
    for path, module in model.named_modules():
        for name, _ in (*module.named_children(), *module.named_parameters("", False), *module.named_buffers("", False)):
            where = f"{path}.{name}" if path else name
            as_code = unicodedata.normalize("NFKC", name)  # Python does so with names
            if not name or as_code != name or not name.isprintable() or UNWRITABLE.intersection(name):
                raise TraceError(f"the name {where!r} of a module or tensor cannot be written into a graph: rename it")
            if not PATH_KEY.match(name) or name.startswith("__"):
                unsaved.append(where)
    if unsaved:
        text = (
            "the graph runs, but cannot be saved: rename it with letters, digits and _-+:/=, and without two underscores in "
            "front"
        )
        warnings.warn(f"the name {unsaved[0]!r} of a module or tensor cannot be in an artifact; {text}", stacklevel=3)
