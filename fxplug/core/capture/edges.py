"""Edges of the whole model and of the modules that it calls: inputs become placeholders, values at edges get names."""

from __future__ import annotations

import copy
import inspect
import keyword
import operator
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from .. import quantised
from ..errors import TraceError
from ..ir import ops
from ..ir.containers import has_tensor, list_leaves, list_members, map_leaves, rebuild
from ..ir.graph import insert
from ..spec.addresses import Port, make_identifier
from ..torch_internals.modules import COMPILED, call_with_hooks, forward_hooks
from ..torch_internals.tensors import DisableTorchFunction, FakeTensor
from .fake_tensors import KINDS, NeedsValues, Number, make_fake, make_layer_key
from .graph_builder import PRINTABLE, Frame, Recording
from .isolation import freeze_value, is_alike
from .module_state import has_identical_items
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


# objects that a model hands on to torch functions without looking into them
OPAQUE = (torch.Generator,)
USED_BY_CODE = ("torch", "slice", "inf", "nan", "NoneType")  # names in the code that FX writes
CAN_BE_INPUTS = (
    "only tensors, torch.Generator, plain values, and tuples, lists and dicts of them can be inputs of a graph: call the model "
    "without it, or trace the submodules that do not take it"
)


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
    entry = _InputBinding(recording)
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
            result = _result(recording, out)
    finally:
        recording.active, _trace.edges = False, None
    insert(recording.graph, "output", "output", (result,), meta={"nn_module_stack": recording.frame.stack})


class _InputBinding:
    """The inputs of a graph while they are bound, and the checks that hold them to their kind."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.open: dict[str, Any] = {}  # arguments whose numbers are inputs, and no part of the graph
        # by the function that checks them: its arguments for each input, the node first
        self.checks: dict[Any, list[Any]] = {ops.check_constants: [], ops.check_numbers: [], ops.check_inputs: []}
        self.tensors: list[torch.Tensor] = []
        self.containers: list[tuple[fx.Node, Any, Any, str]] = []  # outermost last; each with what it held

    def bind(self, signature: inspect.Signature, given: dict[str, Any]) -> dict[str, Any]:
        """Create a placeholder for each parameter, and return the values for the model."""
        recording = self.recording
        nodes, examples = {}, {}
        for name, parameter in signature.parameters.items():
            if name in USED_BY_CODE:
                raise TraceError(f"forward has an argument '{name}', which hides a name in the code of the graph: rename it")
            star = "*" * (parameter.kind is parameter.VAR_POSITIONAL) + "**" * (parameter.kind is parameter.VAR_KEYWORD)
            default = parameter.default
            if default is not parameter.empty:
                default = _writable_default(default, name)
            args, meta = () if default is parameter.empty else (default,), {"nn_module_stack": recording.frame.stack}
            nodes[name] = insert(recording.graph, "placeholder", star + name, args, meta=meta)
            examples[name] = given.get(name, () if star == "*" else {} if star else default)
        self.open = given if recording.open_numbers else {}
        return {name: self.input(value, nodes[name], name) for name, value in examples.items()}

    def input(self, value: Any, node: fx.Node, name: str) -> Any:
        """Return an example for the model, bound to its node; members of containers are bound by `getitem`."""
        if isinstance(value, torch.Tensor):
            if own := ops.attributes(value):
                raise TraceError(
                    f"argument '{name}' is a tensor with {own}, which a graph cannot read: pass a tensor without it"
                )
            if self.recording.first_tensor is None:
                self.recording.first_tensor = node
            if kind := ops.other_kind(value):
                raise TraceError(f"argument '{name}' is a {kind} tensor, which a graph cannot take: {ops.TO_DENSE}")
            dtype = value.dtype if value.dtype.is_floating_point else None
            self.checks[ops.check_inputs].append((node, value.dim(), dtype, name))
            self.tensors.append(value)
            return self.recording.mark(self.example(value), node)
        if isinstance(value, OPAQUE):
            return self.opaque(value, node, name)
        open_here = name.partition("[")[0] in self.open
        if open_here and type(value) in KINDS:
            self.checks[ops.check_numbers].append((node, type(value).__name__, name))
            return self.recording.wrap_number(node, value)
        kinds = {type(x) for x in list_leaves(value)}
        if not has_tensor(value) and kinds.isdisjoint(OPAQUE) and not (open_here and kinds & KINDS.keys()):
            if not _printable(value):
                odd = next((x for x in list_leaves(value) if not isinstance(x, torch.Size) and type(x) not in PRINTABLE), value)
                raise TraceError(f"argument '{name}' is {_described(value, odd)}; {CAN_BE_INPUTS}")
            self.checks[ops.check_constants].append((node, _as_plain(value), name, ops.kind_of(value)))
            return self.contained(node, copy.deepcopy(value), name)
        if not isinstance(value, (tuple, list, dict)):
            raise TraceError(f"argument '{name}' is a {type(value).__name__}; {CAN_BE_INPUTS}")
        members = dict(list_members(value) or ())
        args = (node, tuple(members), name, ops.kind_of(value)[0])
        self.recording.node("call_function", ops.check_members, args, {}, "check_members", effect=True)
        new = {}
        for key, member in members.items():
            short = f"{make_identifier(name)}_{make_identifier(str(key)).strip('_')}"
            item = self.recording.node("call_function", operator.getitem, (node, key), {}, short)
            new[key] = self.input(member, item, f"{name}[{key!r}]")
        return self.contained(node, rebuild(value, new), name)

    def contained(self, node: fx.Node, value: Any, name: str) -> Any:
        """Return an input for the model; the members of a list or dict are noted."""
        if isinstance(value, (list, dict)):
            before = dict(list_members(value) or ()) if has_tensor(value) else freeze_value(value)
            self.containers.append((node, value, before, name))
        return value

    def record_writes(self) -> None:
        """Record what the model put into the lists and dicts that it was given, and took out of them."""
        for node, value, before, name in self.containers:
            now = dict(list_members(value) or ())
            if has_identical_items(now, before) if isinstance(before, dict) else is_alike(freeze_value(value), before):
                continue
            try:
                members = {key: _result(self.recording, member) for key, member in now.items()}
            except TraceError as error:
                text = str(error).replace("the model returns", "it holds", 1)
                raise TraceError(f"forward writes to the argument '{name}', and a graph cannot do the same: {text}") from None
            args = (node, members if isinstance(value, dict) else list(members.values()))
            self.recording.node("call_function", ops.put_members, args, {}, "put_members", effect=True)

    def example(self, value: torch.Tensor) -> torch.Tensor:
        """Return an example tensor that the run may modify: fake, or a copy."""
        recording = self.recording
        with DisableTorchFunction():
            if recording.mode is None:
                new = value.detach().clone()
            else:
                new = make_fake(value, recording.mode, recording.device if value.is_meta else value.device)
            return new.requires_grad_(value.requires_grad) if recording.autograd else new

    def opaque(self, value: torch.Generator, node: fx.Node, name: str) -> Any:
        """Return a copy of a random generator for the model, so that the run does not advance the original."""
        args = (node, value.device.type, name)
        self.recording.node("call_function", ops.check_generator, args, {}, "check_generator", effect=True)
        mine = value.clone_state()
        self.recording.opaque[id(mine)] = node
        self.recording.kept.append(mine)
        return mine

    def check(self) -> None:
        """Record the checks: plain arguments are part of the graph, tensors keep their rank and dtype."""
        for check, rows in self.checks.items():
            if rows:
                columns = tuple(zip(*rows, strict=True))
                if check is ops.check_inputs and self.recording.one_or_two:
                    columns += (ops.first_of_each(tuple(self.tensors)),)
                self.recording.node("call_function", check, columns, {}, check.__name__, effect=True)


def _writable_default(value: Any, name: str) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    if _printable(value) and not (isinstance(value, dict) and value):
        return value
    raise TraceError(
        f"argument '{name}' has the default {value!r} ({type(value).__name__}), which cannot be written into a graph"
    )


def _printable(value: Any) -> bool:
    if isinstance(value, (tuple, list, dict)):
        return all(_printable(member) for _, member in list_members(value) or ())
    return type(value) in PRINTABLE or isinstance(value, torch.device)


def _as_plain(value: Any) -> Any:
    """Return a plain value in Python's own tuples, lists and dicts, which can be written as code."""
    if isinstance(value, dict):
        return {key: _as_plain(member) for key, member in value.items()}
    if isinstance(value, (tuple, list)):
        return (tuple if isinstance(value, tuple) else list)(map(_as_plain, value))
    return value


def _described(value: Any, odd: Any) -> str:
    """Return the description of an argument that cannot be an input, with the offending member and what to pass instead."""
    kind = f"a {type(value).__name__}" + (f" with a {type(odd).__name__}" if odd is not value else "")
    plain = odd.item() if isinstance(odd, np.generic) else odd
    same = next((k for k in (bool, int, float, str) if isinstance(plain, k)), None)
    return kind + (f" (give {same.__name__}(...) in its place)" if same else "")


def _result(recording: Recording, value: Any, path: str = "") -> Any:
    """Return the model's result as the argument of the output node; a result class becomes a call of that class.

    `path` is the position of the value in the result.
    """
    if isinstance(value, torch.Tensor):
        return recording.lookup(value)
    if isinstance(value, Number):
        return recording.lower(value)[1]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, PRINTABLE):
        return value
    if id(value) in recording.opaque:
        return recording.opaque[id(value)]
    members = list_members(tuple(value) if isinstance(value, torch.Size) else value)
    if members is None:
        way_out = "call it with use_cache=False" if "Cache" in type(value).__name__ else "turn that part off"
        raise TraceError(
            f"the model returns a {type(value).__name__}{path and f' ({path!r})'}, which a graph cannot return: a result must "
            f"be a tensor, a plain value, or a tuple, list, dict or dataclass of them; {way_out}, or trace a submodule"
        )
    new = {key: _result(recording, member, f"{path}.{key}" if path else str(key)) for key, member in members}
    if type(value) in (tuple, list):
        return type(value)(new.values())
    if type(value) is torch.Size:
        return recording.node("call_function", torch.Size, (list(new.values()),), {}, "size")
    if type(value) is dict:
        return new
    name = make_identifier(type(value).__name__)
    if hasattr(value, "_fields"):
        return recording.node("call_function", type(value), tuple(new.values()), {}, name)
    named = all(isinstance(key, str) and key.isidentifier() and not keyword.iskeyword(key) for key in new)
    return recording.node("call_function", type(value), () if named else (new,), new if named else {}, name)
