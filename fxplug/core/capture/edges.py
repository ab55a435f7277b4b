"""Edges of the modules that a run calls: values at edges get names; and who may call a model while it is traced."""

from __future__ import annotations

import inspect
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from .. import quantised
from ..errors import TraceError
from ..ir import ops
from ..ir.containers import list_leaves, list_members, map_leaves
from ..ir.graph import insert
from ..spec.addresses import Port, make_identifier
from ..torch_internals.modules import COMPILED, call_with_hooks, forward_hooks
from ..torch_internals.tensors import DisableTorchFunction, FakeTensor
from .fake_tensors import NeedsValues, Number, make_layer_key
from .graph_builder import Frame, Recording
from .input_binder import InputBinder, write_result
from .reads import guard_structure, record_assignments
from .recorder import Listener

CONSTANTS = (bool, int, float, str)  # arguments that an edge remembers
MOMENT = 0.01  # seconds in which a thread ends the layer that it was in, and had not read its weights yet
PATIENCE = 600.0  # seconds that a call waits for a trace of its model, which may wait for that call itself


class _Trace:
    """The process's one trace: who runs it, the edges of its run, and whether the model is as its owner left it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.thread: int | None = None
        self.others: set[int | None] = set()  # threads that are no part of the run, as it did not start them
        self.edges: RegionEdges | None = None
        self.untouched = threading.Event()
        self.untouched.set()


_trace = _Trace()


@contextmanager
def hold_trace_lock(model: nn.Module) -> Iterator[None]:
    """Hold the process's one lock for traces, and see the calls of the model's modules meanwhile.

    Raises TraceError inside a trace of the same thread.
    """
    if _trace.thread == threading.get_ident():
        raise TraceError(
            "fxplug.trace was called during a trace: forward, or something that it calls, traces a model; trace that model "
            "first and let forward call the result"
        )
    with _trace.lock, ExitStack() as stack:
        _trace.thread = threading.get_ident()
        _trace.others = {thread.ident for thread in threading.enumerate()} - {_trace.thread}
        stack.callback(setattr, _trace, "thread", None)
        for module in model.modules():
            own = vars(module)  # what `module.compile()` has put there is left out: the model's own code is what is traced
            stack.callback(own.__setitem__ if COMPILED in own else own.pop, COMPILED, own.get(COMPILED))
            own[COMPILED] = _seen_call(module)
        yield


def _seen_call(module: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == _trace.thread:
            return _trace.edges.call(module, args, kwargs) if _trace.edges else call_with_hooks(module, *args, **kwargs)
        works_for_it = any(isinstance(value, (FakeTensor, Number)) for value in list_leaves((args, kwargs)))
        if threading.get_ident() in _trace.others and not works_for_it and not _trace.untouched.wait(PATIENCE):
            raise TraceError(f"another thread has been tracing this model for {PATIENCE:.0f} s: call it after the trace")
        return call_with_hooks(module, *args, **kwargs)

    return call


@contextmanager
def block_calls() -> Iterator[None]:
    """Let calls of the model in other threads wait meanwhile: its weights are fakes, or it is in its other mode."""
    _trace.untouched.clear()
    if threading.active_count() > 1:
        time.sleep(MOMENT)
    try:
        yield
    finally:
        _trace.untouched.set()


class RegionEdges:
    """The edges of module calls in one recording."""

    def __init__(self, recording: Recording, leaves: set[str]) -> None:
        self.recording = recording
        self.leaves = leaves
        self.called: set[str] = set()
        self.calls: Counter[str] = Counter()

    def call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a module of the model, as one node or through its own code."""
        if not self.recording.recording_here():
            return call_with_hooks(module, *args, **kwargs)
        path = self.recording.paths[id(module)]
        count = self.calls[path]
        self.calls[path] += 1
        key = path if count == 0 else f"{path}@{count}"
        if path in self.leaves or (is_leaf(module) and not self.replaced(module)):
            return self.leaf(module, path, key, args, kwargs)
        return self.region(module, key, args, kwargs)

    def replaced(self, module: nn.Module) -> bool:
        """Return whether a module has other tensors than its own at present, as within `torch.func.functional_call`."""
        recording = self.recording
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in recording.parameters:
                return True
        return any(buffer is not None and recording.recorded(buffer) is not None for buffer in module._buffers.values())

    def region(self, module: nn.Module, key: str, args: Any, kwargs: Any) -> Any:
        """Run a module's own code between its edges."""
        recording = self.recording
        outer = recording.frame
        recording.frame = Frame(key, type(module).__qualname__, outer)
        recording.modules.append(module)
        originals: dict[int, tuple[Any, Any]] = {}
        entered, entered_kw = self.enter(key, module, args, kwargs, originals)
        out = self.leave(key, call_with_hooks(module, *entered, **entered_kw))
        for value in (*args, *kwargs.values()):
            map_leaves(value, lambda t, _: originals.get(id(t), (t, t))[1], in_place=True)
        recording.modules.pop()
        recording.frame = outer
        return out

    def leaf(self, module: nn.Module, path: str, key: str, args: Any, kwargs: Any) -> Any:
        """Run a module as one node."""
        recording = self.recording
        outer = recording.frame
        recording.frame = Frame(key, type(module).__qualname__, outer)
        plain, nodes = recording.lower(args)
        plain_kw, node_kw = recording.lower(kwargs)
        before = _members((plain, plain_kw))
        known = recording.fake and type(module).__module__.startswith("torch.nn.")
        remembered_as = recording.results.key(make_layer_key(module), plain, plain_kw) if known else None
        out = recording.results.get(remembered_as, recording.mode)
        if out is None:
            if recording.fake and isinstance(module, torch.jit.ScriptModule):
                raise NeedsValues(
                    f"'{key}' is a torch.jit module, which runs on real tensors only: trace the model before it is scripted"
                )
            recording.paused = True
            try:
                # a packed weight says by a torch function what its product is
                own = not recording.fake and quantised.is_quantised(module)
                with nullcontext() if own else DisableTorchFunction():
                    if recording.fake and quantised.is_own_layer(module):
                        out = quantised.make_result_like(module, *plain, **plain_kw)
                    else:
                        out = call_with_hooks(module, *plain, **plain_kw)
            finally:
                recording.paused = False
            recording.results.put(remembered_as, out, [*plain, *plain_kw.values()])
        if _members((plain, plain_kw)) != before:
            raise TraceError(
                f"leaf '{key}' changes a list or dict among its arguments, which a graph cannot record: name a module around "
                "it as the leaf instead"
            )
        self.called.add(path)
        node = recording.node("call_module", path, nodes, node_kw, make_identifier(key))
        node.meta["port"] = Port(key, "out")
        if (
            path in self.leaves
            and not type(module).__module__.startswith("torch.nn.")
            or isinstance(module, torch.jit.ScriptModule)
        ):
            guard_structure(recording, node, out)
        with DisableTorchFunction():  # which the recording would answer for each tensor that it asks for its shape
            result = recording.bind(out, node)
        recording.frame = outer
        return result

    def enter(
        self, key: str, module: nn.Module, args: Any, kwargs: Any, originals: dict[int, tuple[Any, Any]]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Give each tensor that enters a region a name of its own there.

        A list or dict stays the object that it is, as the callee may change it for its caller to see; `originals` has
        what to put back into it afterwards.
        """
        names = argument_names(module, len(args))
        new = [
            map_leaves(
                value,
                lambda t, keys, name=name, index=index: self._edge(t, Port(key, "in", (name, *keys)), index, originals),  # type: ignore[misc]
                in_place=True,
            )
            for index, (name, value) in enumerate([*zip(names, args, strict=True), *kwargs.items()])
        ]
        edges = [t._fxplug for t in list_leaves(new) if isinstance(t, torch.Tensor) and hasattr(t, "_fxplug")]
        if edges:  # what a hook on the module would see: its positional arguments
            edges[0].meta["call"] = tuple(value if isinstance(value, CONSTANTS) else None for value in args)
            edges[0].meta["named"] = {k: value if isinstance(value, CONSTANTS) else None for k, value in kwargs.items()}
        return new[: len(args)], dict(zip(kwargs, new[len(args) :], strict=True))

    def leave(self, key: str, out: Any) -> Any:
        """Give each tensor that leaves a region a name of its own outside."""
        return map_leaves(out, lambda t, keys: self._edge(t, Port(key, "out", keys), 0), in_place=True)

    def _edge(
        self, tensor: torch.Tensor, port: Port, index: int, originals: dict[int, tuple[Any, Any]] | None = None
    ) -> torch.Tensor:
        recording = self.recording
        parts = [port.path, *(["in"] if port.side == "in" else []), *map(str, port.keys)]
        name = make_identifier("_".join(filter(None, parts)) or "out")
        with DisableTorchFunction():  # as above
            node = recording.node("call_function", ops.edge, (recording.lookup(tensor),), {}, name)
            node.meta.update(port=port, index=index)
            new = recording.mark(recording.alias(tensor), node)
        if originals is not None:
            originals[id(new)] = (new, tensor)
        return new


def _members(value: Any) -> Any:
    """Return the structure of nested lists and dicts, with the ids of the members."""
    found = list_members(value) if isinstance(value, (tuple, list, dict)) else None
    return id(value) if found is None else [(key, _members(member)) for key, member in found]


def is_leaf(module: nn.Module) -> bool:
    """Return whether a module is a leaf without being named: torch.nn's own, quantised ones, and blocks that passes
    inserted."""
    kind = type(module)
    if getattr(kind, "is_block", False) or isinstance(module, torch.jit.ScriptModule):
        return True
    if not kind.__module__.startswith(("torch.nn.modules.", "torch.ao.nn.")) and not quantised.is_own_layer(module):
        return False
    if isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        return False
    if "forward" in vars(module) or any(forward_hooks(module)):
        return False
    return not hasattr(module, "parametrizations")


def argument_names(module: nn.Module, count: int) -> list[str]:
    """Names for the first `count` positional arguments of a module's forward."""
    try:
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        parameters = {}
    names = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [names[i] if i < len(names) else f"arg{i}" for i in range(count)]


def run(recording: Recording, regions: RegionEdges, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call the model on the examples, from placeholders to output."""
    model = recording.model
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TraceError(
            f"{type(model).__name__}.forward does not take these example inputs: {error}; its signature is {signature}"
        ) from None
    entry = InputBinder(recording)
    values = entry.bind(signature, bound.arguments)
    entry.check()
    positional: list[Any] = []
    named = dict(kwargs)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional.extend(values[name])
        elif parameter.kind is parameter.VAR_KEYWORD:
            named.update(values[name])
        elif name in kwargs and parameter.kind is not parameter.POSITIONAL_ONLY:
            named[name] = values[name]
        elif len(positional) < len(args):
            positional.append(values[name])
    recording.active, _trace.edges = True, regions
    try:
        with Listener(recording):
            out = regions.region(model, "", positional, named)
            record_assignments(recording, regions.called)
            entry.record_writes()
            result = write_result(recording, out)
    finally:
        recording.active, _trace.edges = False, None
    insert(recording.graph, "output", "output", (result,), meta={"nn_module_stack": recording.frame.stack})
