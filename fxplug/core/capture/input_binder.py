"""The inputs of a graph, bound to the examples of a trace with the checks of later calls, and its result."""

from __future__ import annotations

import copy
import inspect
import keyword
import operator
from typing import Any

import numpy as np
import torch
from torch import fx

from ..errors import TraceError
from ..ir import ops
from ..ir.containers import has_tensor, list_leaves, list_members, rebuild
from ..ir.graph import insert
from ..spec.addresses import make_identifier
from ..torch_internals.tensors import DisableTorchFunction
from .fake_tensors import KINDS, Number, make_fake
from .graph_builder import PRINTABLE, Recording
from .isolation import freeze_value, is_alike
from .module_state import has_identical_items

# objects that a model hands on to torch functions without looking into them
OPAQUE = (torch.Generator,)
USED_BY_CODE = ("torch", "slice", "inf", "nan", "NoneType")  # names in the code that FX writes
CAN_BE_INPUTS = (
    "only tensors, torch.Generator, plain values, and tuples, lists and dicts of them can be inputs of a graph: call the model "
    "without it, or trace the submodules that do not take it"
)


class InputBinder:
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
                members = {key: write_result(self.recording, member) for key, member in now.items()}
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


def write_result(recording: Recording, value: Any, path: str = "") -> Any:
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
    new = {key: write_result(recording, member, f"{path}.{key}" if path else str(key)) for key, member in members}
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
