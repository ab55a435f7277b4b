"""Calls of modules: leaves become one node, the others get a name of their own for each value at their edges."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from .. import quantised
from ..errors import TraceError
from ..ir import ops
from ..ir.pytree import children, leaves, map_leaves, put_back
from ..spec.addresses import Port, identifier
from ..torch_internals.dispatch import DisableTorchFunction
from ..torch_internals.modules import call_with_hooks, forward_hooks
from .fake_tensors import NeedsValues
from .graph_builder import Frame
from .recorder import Recording

CONSTANTS = (bool, int, float, str)  # arguments that an edge remembers


class Regions:
    """The edges of module calls in one recording."""

    def __init__(self, recording: Recording, leaves: set[str]) -> None:
        self.recording = recording
        self.leaves = leaves
        self.called: set[str] = set()
        self.calls: Counter[str] = Counter()

    def call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What stands for a call of a module during the run."""

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = self.recording.paths.get(id(module))
            if path is None or not self.recording.recording_here():
                return original(module, *args, **kwargs)
            count = self.calls[path]
            self.calls[path] += 1
            key = path if count == 0 else f"{path}@{count}"
            if path in self.leaves or (is_leaf(module) and not self.replaced(module)):
                return self.leaf(module, path, key, args, kwargs)
            return self.region(module, key, args, kwargs)

        return call

    def replaced(self, module: nn.Module) -> bool:
        """Whether a module has other tensors than its own for the moment, as `torch.func.functional_call` gives it."""
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
            put_back(value, originals)
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
        remembered_as = recording.results.key(module, plain, plain_kw) if known else None
        out = recording.results.get(remembered_as, recording.mode)
        if out is None:
            if recording.fake and isinstance(module, torch.jit.ScriptModule):
                raise NeedsValues(f"'{key}' is a scripted module, which runs on real tensors only: trace before it is scripted")
            recording.paused = True
            try:
                # a packed weight says by a torch function what its product is
                own = not recording.fake and quantised.is_quantised(module)
                with nullcontext() if own else DisableTorchFunction():
                    if recording.fake and quantised.is_own_layer(module):
                        out = quantised.result_like(module, *plain, **plain_kw)
                    else:
                        out = call_with_hooks(module, *plain, **plain_kw)
            finally:
                recording.paused = False
            recording.results.put(remembered_as, out, [*plain, *plain_kw.values()])
        if _members((plain, plain_kw)) != before:
            raise TraceError(
                f"'{key}' is kept whole, but changes a list or dict that it is given, which a graph cannot say; "
                "name a module around it instead"
            )
        self.called.add(path)
        node = recording.node("call_module", path, nodes, node_kw, identifier(key))
        node.meta["port"] = Port(key, "out")
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
        edges = [t._fxplug for t in leaves(new) if isinstance(t, torch.Tensor) and hasattr(t, "_fxplug")]
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
        source = recording.lookup(tensor)
        parts = [port.path, *(["in"] if port.side == "in" else []), *map(str, port.keys)]
        node = recording.node("call_function", ops.edge, (source,), {}, identifier("_".join(filter(None, parts)) or "out"))
        node.meta.update(port=port, index=index)
        new = recording.mark(recording.alias(tensor), node)
        if originals is not None:
            originals[id(new)] = (new, tensor)
        return new


def _members(value: Any) -> Any:
    """The shape of nested lists and dicts, with the identity of what is in them."""
    found = children(value) if isinstance(value, (tuple, list, dict)) else None
    return id(value) if found is None else [(key, _members(member)) for key, member in found]


def is_leaf(module: nn.Module) -> bool:
    """Whether a module is kept whole without being named: torch.nn's own, quantised ones, and blocks that passes put in."""
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
