"""The edge of the whole graph: example inputs become placeholders and checks, the result becomes the output."""

from __future__ import annotations

import copy
import inspect
import operator
from typing import Any

import numpy as np
import torch
from torch import fx

from ..errors import TraceError
from ..ir import ops
from ..ir.editing import insert
from ..ir.pytree import children, has_tensor, rebuilt
from ..spec.addresses import identifier
from ..torch_internals.dispatch import DisableTorchFunction
from .edges import Regions
from .fake_tensors import fake
from .frozen_values import alike, frozen
from .graph_builder import PRINTABLE
from .numbers import KINDS, Number
from .recorder import Recording
from .value_kinds import identical_items

# objects that a model hands on to torch functions without looking into them
OPAQUE = (torch.Generator,)
CAN_BE_INPUTS = "only tensors, torch.Generator, plain values, and tuples, lists and dicts of them can be inputs of a graph"


def run(recording: Recording, regions: Regions, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call the model on the examples, from placeholders to output."""
    model = recording.model
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TraceError(
            f"{type(model).__name__}.forward does not take these example inputs: {error}; its signature is {signature}"
        ) from None
    entry = _Entry(recording)
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
    recording.active = True
    try:
        with recording:
            out = regions.region(model, "", positional, named)
            recording.assigned(regions.called)
            entry.record_writes()
            result = _result(recording, out)
    finally:
        recording.active = False
    insert(recording.graph, "output", "output", (result,), meta={"nn_module_stack": recording.frame.stack})


class _Entry:
    """The inputs of a graph while they are bound, and the checks that hold them to their kind."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.open: dict[str, Any] = {}  # arguments whose numbers are inputs, and no part of the graph
        self.tensors: list[tuple[fx.Node, torch.Tensor, str]] = []
        self.constants: list[tuple[fx.Node, Any, str]] = []
        self.numbers: list[tuple[fx.Node, str, str]] = []
        self.containers: list[tuple[fx.Node, Any, Any, str]] = []  # outermost last; each with what it held

    def bind(self, signature: inspect.Signature, given: dict[str, Any]) -> dict[str, Any]:
        """A placeholder for each parameter; the values as the model will see them."""
        recording = self.recording
        nodes, examples = {}, {}
        for name, parameter in signature.parameters.items():
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
        """An example as the model will see it, bound to its node; members of containers by `getitem`."""
        if isinstance(value, torch.Tensor):
            if own := ops.attributes(value):
                raise TraceError(f"argument '{name}' is a tensor with {own}, which no graph can read: pass it without")
            if self.recording.first_tensor is None:
                self.recording.first_tensor = node
            if value.layout is not torch.strided:
                raise TraceError(f"argument '{name}' is a {value.layout} tensor, which no graph can take: give its to_dense()")
            self.tensors.append((node, value, name))
            return self.recording.mark(self.example(value), node)
        if isinstance(value, OPAQUE):
            return self.opaque(value, node, name)
        open_here = name.partition("[")[0] in self.open
        if open_here and type(value) in KINDS:
            self.numbers.append((node, type(value).__name__, name))
            return self.recording.held(node, value)
        if not has_tensor(value) and not _holds_opaque(value) and not (open_here and _holds_number(value)):
            if not _printable(value):
                raise TraceError(f"argument '{name}' is a {type(value).__name__}: {CAN_BE_INPUTS}")
            self.constants.append((node, value, name))
            return self.contained(node, copy.deepcopy(value), name)
        if not isinstance(value, (tuple, list, dict)):
            raise TraceError(f"argument '{name}' is a {type(value).__name__}: {CAN_BE_INPUTS}")
        members = dict(children(value) or ())
        args = (node, tuple(members), name)
        self.recording.node("call_function", ops.check_members, args, {}, "check_members", effect=True)
        new = {}
        for key, member in members.items():
            short = f"{identifier(name)}_{identifier(str(key)).strip('_')}"
            item = self.recording.node("call_function", operator.getitem, (node, key), {}, short)
            new[key] = self.input(member, item, f"{name}[{key!r}]")
        return self.contained(node, rebuilt(value, new), name)

    def contained(self, node: fx.Node, value: Any, name: str) -> Any:
        """An input as the model will see it; what a list or dict holds is noted."""
        if isinstance(value, (list, dict)):
            self.containers.append((node, value, frozen(value) if not has_tensor(value) else dict(children(value) or ()), name))
        return value

    def record_writes(self) -> None:
        """Record what the model put into the lists and dicts that it was given, and took out of them."""
        for node, value, before, name in self.containers:
            now = dict(children(value) or ())
            if identical_items(now, before) if isinstance(before, dict) else alike(frozen(value), before):
                continue
            try:
                members = {key: _result(self.recording, member) for key, member in now.items()}
            except TraceError as error:
                text = str(error).replace("the model returns", "it holds", 1)
                raise TraceError(f"forward puts into the argument '{name}' what a graph cannot: {text}") from None
            args = (node, members if isinstance(value, dict) else list(members.values()))
            self.recording.node("call_function", ops.put_members, args, {}, "put_members", effect=True)

    def example(self, value: torch.Tensor) -> torch.Tensor:
        """An example tensor that the run may use up: fake, or a copy."""
        recording = self.recording
        with DisableTorchFunction():
            if recording.mode is None:
                new = value.detach().clone()
            else:
                new = fake(value, recording.mode, recording.device if value.is_meta else value.device)
            return new.requires_grad_(value.requires_grad) if recording.autograd else new

    def opaque(self, value: torch.Generator, node: fx.Node, name: str) -> Any:
        """A random generator: what the model is given is a copy, so that the run takes nothing out of it."""
        args = (node, value.device.type, name)
        self.recording.node("call_function", ops.check_generator, args, {}, "check_generator", effect=True)
        mine = value.clone_state()
        self.recording.opaque[id(mine)] = node
        self.recording.kept.append(mine)
        return mine

    def check(self) -> None:
        """Record the checks: plain arguments are part of the graph, tensors keep their rank and dtype."""
        if self.constants:
            nodes, values, names = zip(*self.constants, strict=True)
            self.recording.node("call_function", ops.same, (nodes, values, names), {}, "same", effect=True)
        if self.numbers:
            columns = tuple(zip(*self.numbers, strict=True))
            self.recording.node("call_function", ops.check_numbers, columns, {}, "check_numbers", effect=True)
        if self.tensors:
            nodes, examples, names = zip(*self.tensors, strict=True)
            ranks = tuple(v.dim() for v in examples)
            dtypes = tuple(v.dtype if v.dtype.is_floating_point else None for v in examples)
            firsts = (ops.first_of_each(examples),) if self.recording.one_or_two else ()
            args = (nodes, ranks, dtypes, names, *firsts)
            self.recording.node("call_function", ops.check_inputs, args, {}, "check_inputs", effect=True)


def _writable_default(value: Any, name: str) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    if _printable(value) and not (isinstance(value, dict) and value):
        return value
    raise TraceError(
        f"argument '{name}' has the default {value!r} ({type(value).__name__}), which cannot be written into a graph"
    )


def _printable(value: Any) -> bool:
    if isinstance(value, (tuple, list, dict)):
        return all(_printable(member) for _, member in children(value) or ())
    return isinstance(value, PRINTABLE)


def _holds_opaque(value: Any) -> bool:
    if isinstance(value, (tuple, list, dict)):
        return any(_holds_opaque(member) for _, member in children(value) or ())
    return isinstance(value, OPAQUE)


def _holds_number(value: Any) -> bool:
    if isinstance(value, (tuple, list, dict)):
        return any(_holds_number(member) for _, member in children(value) or ())
    return type(value) in KINDS


def _result(recording: Recording, value: Any, path: str = "") -> Any:
    """The model's result as the argument of the output node; a result class becomes a call of that class.

    `path` says where in the result a value is.
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
    members = children(tuple(value) if isinstance(value, torch.Size) else value)
    if members is None:
        way_out = "call it with use_cache=False" if "Cache" in type(value).__name__ else "turn that part off"
        raise TraceError(
            f"the model returns a {type(value).__name__}{path and f' ({path!r})'}, which a graph cannot make: a result is a "
            f"tensor, a plain value, or a tuple, list, dict or dataclass of them; {way_out}, or trace a submodule"
        )
    new = {key: _result(recording, member, f"{path}.{key}" if path else str(key)) for key, member in members}
    if type(value) in (tuple, list):
        return type(value)(new.values())
    if type(value) is torch.Size:
        return recording.node("call_function", torch.Size, (list(new.values()),), {}, "size")
    if type(value) is dict:
        return new
    name = identifier(type(value).__name__)
    if hasattr(value, "_fields"):
        return recording.node("call_function", type(value), tuple(new.values()), {}, name)
    return recording.node("call_function", type(value), (), new, name)
